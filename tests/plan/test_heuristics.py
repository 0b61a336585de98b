"""Problem -> plan, as a table."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from typing import Any

import pytest

from jitrope.base import partition
from jitrope.plan import heuristics
from jitrope.plan.heuristics import RopeProblem, plan
from jitrope.plan.spec import Compiled

from ..calls import named
from ..results import planned

(SPEC,) = planned(named("rope 32+8 128"))
LIMITS = {"vec_limit": 8, "table_vec_limit": 4, "table_step_limit": 1, "weight_vec_limit": 1}
BASE = RopeProblem(
    **{field.name: getattr(SPEC, field.name) for field in fields(Compiled)}, **LIMITS, batch=1, tokens=4608, heads=48,
    q_heads=24, sequences=0, max_seqlen=0, launch="auto", sm_count=132,
)  # fmt: skip
NORM = {"norm_rounding": "once", "norm_kind": "rms_norm", "weight_dtype": "bf16", "weight_vec_limit": 8}
GRADIENT = {**NORM, "gradient": True, "inverse": True}


ACROSS = {  # a norm across so many heads of q, and of k
    heads: {**NORM, "across_heads": True, "row_heads": heads, "heads": sum(heads), "q_heads": heads[0]}
    for heads in ((24, 24), (12, 12), (40, 40), (48, 12), (49, 12), (32, 32), (40,))
}
FEW = {"cu_seqlens_dtype": "int32", "tokens": 256, "heads": 32}
PAIRS = {"interleaved": True, "interleaved_out": True}
IDS = {"position_ids_dtype": "int64"}


@pytest.mark.parametrize(
    ("changes", "launch"),
    [
        *[({}, "token_linear"), ({"tokens": 1, "heads": 40}, "grid_2d"), ({"tokens": 263, "heads": 40}, "grid_2d")],
        *[({"tokens": 264, "heads": 40}, "token_linear"), ({"tokens": 146, "heads": 72}, "grid_2d")],
        *[({"tokens": 147, "heads": 72}, "token_linear"), ({"tokens": 1, "heads": 1}, "token_linear")],
        *[({"heads": 65_536, "tokens": 1 << 20}, "token_linear"), ({**NORM, "heads": 258}, "token_linear")],
        *[({"launch": "grid_2d"}, "grid_2d"), ({"launch": "token_linear", "tokens": 1}, "token_linear")],
        ({"cu_seqlens_dtype": "int32", "sequences": 2401}, "token_linear"),
        ({"cu_seqlens_dtype": "int32", "sequences": 4, "max_seqlen": 1200}, "token_linear"),
        ({**FEW, "sequences": 4, "max_seqlen": 64}, "grid_2d"),
        ({**FEW, "sequences": 4, "max_seqlen": 129}, "token_linear"),
        ({**FEW, "sequences": 4, "max_seqlen": 256, "cp_size": 2}, "grid_2d"),
        ({**FEW, "sequences": 4}, "token_linear"),
        ({**FEW, "sequences": 4, "max_seqlen": 64, "heads": 33}, "token_linear"),
        ({"cu_seqlens_dtype": "int32", "sequences": 4, "launch": "grid_2d"}, "grid_2d"),
        ({"cu_seqlens_dtype": "int32", "sequences": 70000, "launch": "grid_2d"}, "token_linear"),
        *[(ACROSS[24, 24], "token_linear"), (GRADIENT, "token_linear")],
    ],
)
def test_launch(changes, launch) -> None:
    assert plan(replace(BASE, **changes)).spec.launch == launch


@pytest.mark.parametrize(
    ("changes", "vec", "chunks", "table_vec"),
    [
        *[({}, 8, 2, 4), ({"dtype": "fp32", "vec_limit": 4}, 4, 2, 4), (PAIRS, 8, 2, 4)],
        *[({"interleaved": True}, 8, 2, 4), ({"rotary_dim": 64, "rotary_offset": 28}, 4, 2, 4)],
        ({"rotary_dim": 64, "rotary_offset": 3}, 1, 2, 1),
        ({"head_dim": 72, "rotary_dim": 72, "interleaved": True}, 4, 2, 4),
        *[({"head_dim": 72, "rotary_dim": 72}, 4, 2, 4), ({"head_dim": 72, "rotary_dim": 72, **PAIRS}, 8, 1, 4)],
        ({"head_dim": 6, "rotary_dim": 6, "vec_limit": 2}, 1, 2, 1),
        ({"head_dim": 6, "rotary_dim": 6, "vec_limit": 2, **PAIRS}, 2, 1, 1),
        ({"rotary_dim": 20, "head_dim": 45}, 1, 2, 1),
        *[({"rotary_dim": 20, "head_dim": 45, "in_place": True, "vec_limit": 1}, 1, 2, 1), ({"vec_limit": 1}, 1, 2, 1)],
        *[({"table_vec_limit": 1}, 8, 2, 1), ({"full_width": True, **PAIRS}, 8, 2, 4)],
        ({"table_dtype": "bf16", "table_vec_limit": 8, **PAIRS}, 8, 2, 4),
        ({"table_step_limit": 2, "table_vec_limit": 2}, 8, 2, 2),
        ({"table_dtype": "fp64", "rounding": "complex128", "table_vec_limit": 2}, 8, 2, 2),
    ],
)
def test_widest_access(changes, vec, chunks, table_vec) -> None:
    spec = plan(replace(BASE, **changes)).spec
    assert (spec.vec, spec.chunks, spec.table_vec) == (vec, chunks, table_vec)


@pytest.mark.parametrize(
    ("heads", "lanes", "tokens", "at_once"),
    [(48, 8, 1, 48), (24, 8, 1, 24), (16, 5, 3, 16), (72, 16, 1, 36), (1, 8, 32, 1), (128, 8, 1, 64), (3, 511, 1, 1)],
)
def test_tile(heads, lanes, tokens, at_once) -> None:
    assert heuristics.tile(heads, lanes) == (tokens, at_once)


@pytest.mark.parametrize(
    ("changes", "launch", "tokens", "at_once", "each", "grid"),
    [
        (NORM, "token_linear", 1, 24, 2, (2304, 1)),  # neighbouring heads share a thread, if they are of one tensor
        ({**NORM, "heads": 40, "q_heads": 32}, "token_linear", 1, 20, 2, (2304, 1)),
        ({**NORM, "heads": 7, "q_heads": 4}, "token_linear", 8, 4, 2, (288, 1)),  # the last thread has one
        ({**NORM, "heads": 8, "q_heads": 7}, "token_linear", 4, 8, 1, (576, 1)),
        ({**NORM, "per_head": True}, "token_linear", 1, 48, 1, (2304, 1)),
        ({**NORM, "heads": 72, "two_streams": True, "copy_v": True}, "token_linear", 1, 36, 2, (2304, 1)),
        ({**NORM, "heads": 36, "q_heads": 34, "copy_v": True}, "token_linear", 1, 36, 1, (2304, 1)),  # one head of k
        ({**NORM, "vec_limit": 1}, "token_linear", 1, 12, 4, (4608, 1)),  # narrow accesses: no block walks
        ({**NORM, "tokens": 3, "heads": 40, "q_heads": 32}, "grid_2d", 1, 16, 1, (3, 3)),  # few: accesses of 8 bytes
        ({**NORM, "head_dim": 80, "rotary_dim": 80}, "token_linear", 1, 24, 2, None),  # 5 lanes, teams of 8
        ({**NORM, "head_dim": 72, "rotary_dim": 72}, "token_linear", 1, 12, 4, None),  # 9 lanes of 8 elements
        (ACROSS[12, 12], "token_linear", 2, 4, 1, (2304, 1)),  # a warp a row
        (ACROSS[48, 12], "token_linear", 2, 4, 1, (2304, 1)),
        (ACROSS[49, 12], "token_linear", 1, 8, 1, (4608, 1)),  # two warps
        (ACROSS[40,], "token_linear", 4, 4, 1, (1152, 1)),
        ({**ACROSS[32, 32], "head_dim": 64, "rotary_dim": 64}, "token_linear", 2, 8, 1, (2304, 1)),
        ({**ACROSS[12, 12], "launch": "grid_2d"}, "token_linear", 2, 4, 1, (2304, 1)),
        ({**ACROSS[12, 12], "gradient": True}, "token_linear", 1, 8, 1, None),  # a few blocks an SM walk the tokens
        ({**ACROSS[40, 40], "gradient": True}, "token_linear", 1, 20, 1, None),
        ({**GRADIENT, "tokens": 5}, "token_linear", 1, 24, 2, (5, 1)),  # as many blocks as there are tokens
        ({**GRADIENT, "launch": "grid_2d"}, "token_linear", 1, 24, 2, None),
        ({**GRADIENT, "heads": 64, "q_heads": 32, "head_dim": 64, "rotary_dim": 64}, "token_linear", 1, 32, 2, None),
    ],
)  # fmt: skip
def test_norm_plans(changes, launch, tokens, at_once, each, grid) -> None:
    found = plan(replace(BASE, **changes))
    spec = found.spec
    made = (spec.launch, spec.tokens_per_block, spec.heads_per_block, spec.heads_per_thread)
    assert made == (launch, tokens, at_once, each)
    if grid is None:
        assert 128 < spec.blocks_per_sm * found.spec.threads <= 768  # threads an SM
        grid = (132 * spec.blocks_per_sm, 1)
    assert found.grid == grid
    assert spec.team & (spec.team - 1) == 0
    assert spec.team >= spec.lanes


@pytest.mark.parametrize(
    ("changes", "heads"),
    [
        ({"tokens": 16}, 8),
        ({"tokens": 256}, 16),  # more blocks than an SM takes at once
        ({}, 40),
        ({"memory_speed": 4.9}, 8),  # it takes a part of two tokens
        (IDS, 40),
        ({"freqs": True, "memory_speed": 4.9, "heads": 48}, 16),  # of one
        ({"memory_speed": 4.9, "heads": 48, "tokens": 512}, 48),  # heads are in L2
        ({"cu_seqlens_dtype": "int32", "sequences": 9, "memory_speed": 4.9, "heads": 32}, 16),
        ({"kv_out": "bf16", "slot_mapping_dtype": "int64", "memory_speed": 4.9, "heads": 80}, 16),
        ({"heads": 128, "tokens": 264}, 16),  # it would be two steps
        ({"heads": 131}, 32),
        ({**IDS, "memory_speed": 4.9, "heads": 39}, 39),  # no even part is whole warps
        *[({**IDS, "memory_speed": 4.9, "heads": 24}, 24), ({**IDS, "memory_speed": 4.9, "launch": "token_linear"}, 8)],
        ({**IDS, "memory_speed": 4.9, "q_out": "fp8"}, 40),
    ],
)
def test_heads_of_a_block(changes: dict[str, Any], heads: int) -> None:
    found = plan(replace(BASE, **{"heads": 40, **changes}))
    assert found.spec.heads_per_block == heads


@pytest.mark.parametrize(
    ("changes", "walks"),
    [
        *[({}, 2), ({"tokens": 2000}, 2)],
        ({"tokens": 1000}, 1000 / 528),  # all fit on the GPU at once
        ({"memory_speed": 3.35}, 2),
        ({"memory_speed": 4.9}, 4608 / 528),  # to the end
        ({"dynamic": True, "dynamic_q": True}, 4608 / 528),
        ({"q_out": "fp8", "kv_out": "fp8", "hadamard": True}, 4608 / 528),
        ({"gradient": True, "inverse": True}, 4608 / 264),  # gradients of weights are summed
        ({"gradient": True, "inverse": True, "weight_dtype": None}, 2),
    ],
)
def test_blocks_of_a_norm_walk_over_two_groups_of_tokens(changes: dict[str, Any], walks: float) -> None:
    """Blocks that take long to begin, and those that sum, stay to the end."""
    found = plan(replace(BASE, **{**NORM, "heads": 40, "q_heads": 32, **changes}))
    assert found.spec.ring
    assert replace(BASE, **changes).tokens / found.grid[0] == walks


@pytest.mark.parametrize("sequences", [1, 2, 64])
def test_no_dead_blocks_under_context_parallelism(sequences) -> None:
    """TransformerEngine launches a block for each row of the whole sequence, which is cp_size times too many."""
    p = replace(BASE, heads=32, cu_seqlens_dtype="int32", sequences=sequences, tokens=8192, cp_size=8, max_seqlen=65536)
    linear, by_sequence = plan(p), plan(replace(p, launch="grid_2d", max_seqlen=65536 // sequences))
    assert linear.spec.launch == "token_linear"
    assert linear.grid == (8192, 1)
    assert by_sequence.grid == (8192 // sequences, sequences + 1)


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
def test_a_ranks_share_of_a_sequence_is_one_step(cp_size) -> None:
    """The grid over sequences is as wide as the longest share, wherever the sequence begins, and hardly wider."""
    for length in range(1, 40):
        shares = [
            partition.local_rows(first + length, rank, cp_size, "dual_chunk")
            - partition.local_rows(first, rank, cp_size, "dual_chunk")
            for rank, first in itertools.product(range(cp_size), range(2 * cp_size))
        ]
        p = replace(BASE, cu_seqlens_dtype="int32", sequences=3, max_seqlen=length, cp_size=cp_size, launch="grid_2d")
        assert max(shares) <= heuristics.longest_share(p) <= max(shares) + 1
        found = plan(replace(p, heads=32))
        assert (found.grid[0] - 1) * found.spec.tokens_per_block < heuristics.longest_share(p)
        assert found.grid[0] * found.spec.tokens_per_block >= heuristics.longest_share(p)


def test_heads_may_be_more_than_the_second_axis_takes() -> None:
    found = plan(replace(BASE, heads=65_537, tokens=1, vec_limit=1))
    assert found.grid[0] * found.spec.heads_per_block >= 65_537
    assert max(found.grid[1:]) <= heuristics.MAX_GRID_Y


def test_token_linear_does_not_depend_on_the_number_of_sequences() -> None:
    problems = [replace(BASE, cu_seqlens_dtype="int32", sequences=n, launch="token_linear") for n in (1, 100, 10**6)]
    assert len({plan(p).grid for p in problems}) == 1
