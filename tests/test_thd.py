"""Moves of rows between ranks: the kernels, on the CPU, against plain torch, and the user's functions."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch

import jitrope
from jitrope import thd
from jitrope.base.partition import RULES
from jitrope.jit import compiler
from jitrope.jit.render import render
from jitrope.thd import ops as thd_ops
from jitrope.thd import reference
from jitrope.thd.reference import Correction, Move, Segments
from jitrope.thd.shape import Mask, Shape
from jitrope.thd.spec import MAPS, CorrectionSpec, RowsSpec, SegmentsSpec, rows_spec

from .host import harness
from .machine_code import ARCHS, DIVISION, bounds, disassemble, opcode

SCAN_THREADS = 32  # so few that a block does not scan a few dozen sequences at a time
MASKS = {
    "causal": Mask(-1, 0), "full": Mask(-1, -1), "causal-window": Mask(3, 0), "diagonal": Mask(0, 0),
    "two-sided": Mask(4, 1), "ahead": Mask(-1, 2), "behind": Mask(3, -1), "only-ahead": Mask(0, 5),
}  # fmt: skip


TABLES = (("to_ranks", "rows"), ("positions", "rows"), ("to_sequences", "tokens"))  # maps, and their numbers of rows


def run(call) -> None:
    """Run one launch under ASan and UBSan."""
    harness.run(render(call.spec), call.grid, call.spec.threads, call.tensors, call.words)


def move(given: Move) -> None:
    """Run the kernels of a call of thd_rows, if there is anything to do."""
    for call in thd_ops.rows_calls(given):
        run(call)


def wanted_segments(cu_seqlens, padded, shape: Shape, mask: Mask) -> Segments:
    """The tables from plain torch."""
    flat = reference.empty_segments(cu_seqlens, padded, shape, mask)
    reference.fill_segments(flat, cu_seqlens, padded, shape, mask)
    return Segments.of(flat, shape, mask, padded is not None)


def segments(cu_seqlens, padded, shape: Shape, mask: Mask) -> Segments:
    """The tables from the kernels."""
    flat = reference.empty_segments(cu_seqlens, padded, shape, mask)
    for call in thd_ops.segments_calls(flat, cu_seqlens, padded, shape, mask):
        run(call if call.spec.rows else call._replace(spec=replace(call.spec, threads=SCAN_THREADS)))
    return Segments.of(flat, shape, mask, padded is not None)


def offsets(lengths, dtype=torch.int32) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=dtype)


class Pack:
    """A random batch, with padding or without, and some with spare rows."""

    def __init__(self, seed: int, cp_sizes=(1, 2, 3)) -> None:
        self.draw = draw = random.Random(seed)
        count = draw.choice((1, 2, 5, 40))
        slots = [draw.choice((0, 1, 3, 9, 17, 30)) for _ in range(count)]
        self.padded = draw.random() < 0.5
        lengths = [draw.randint(0, n) for n in slots] if self.padded else slots
        self.dtype = draw.choice((torch.int32, torch.int64))
        self.cu_seqlens = offsets(lengths, self.dtype)
        self.slots = offsets(slots, self.dtype)
        cp_size = draw.choice(cp_sizes)
        self.tokens = sum(slots) + draw.choice((0, 5)) or 1
        self.shape = Shape(self.tokens, count, cp_size, draw.randrange(cp_size), draw.choice(RULES))


# ---- the kernels ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_tables_match_reference(seed: int) -> None:
    pack = Pack(seed)
    for map, rows in TABLES:
        want = reference.table(pack.slots, map, getattr(pack.shape, rows), pack.shape)
        out = torch.full((len(want),), -7, dtype=torch.int32)
        move(Move([], [out], map, pack.slots, shape=pack.shape))
        assert torch.equal(out, want), map


@pytest.mark.parametrize("mask", MASKS)
def test_segments_match_reference(mask: str) -> None:
    pack = Pack(list(MASKS).index(mask))
    padded = pack.slots if pack.padded else None
    want = wanted_segments(pack.cu_seqlens, padded, pack.shape, MASKS[mask])
    got = segments(pack.cu_seqlens, padded, pack.shape, MASKS[mask])
    for name, x in want._asdict().items():
        assert (x is None) == (getattr(got, name) is None), name
        assert x is None or torch.equal(x, getattr(got, name)), name


def test_exchanged_segments_match_reference() -> None:
    """With long sequences and a short window ranks send each other only the rows that are needed."""
    cu_seqlens, mask = offsets((97, 60, 0, 41, 2)), Mask(3, 0)
    for rule in RULES:
        for rank in range(4):
            shape = Shape(203, 5, 4, rank, rule)
            want = wanted_segments(cu_seqlens, None, shape, mask)
            assert want.send_rows is not None
            got = segments(cu_seqlens, None, shape, mask)
            for name, x in want._asdict().items():
                assert x is None or torch.equal(x, getattr(got, name)), name


def rows(draw: random.Random, count: int, width: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Rows at any alignment, possibly with gaps."""
    wide = torch.randint(-99, 99, (count, *width[:-1], width[-1] + (draw.choice((0, 8, 1)) if len(width) == 1 else 0)))
    return wide.to(dtype)[..., : width[-1]]


WIDTHS = ((16,), (3,), (1,), (24,), (2, 8), (65,), (520,))
MOVES = ("to_ranks", "to_sequences", "stay", "table", "sum", "valid", "tail")


@pytest.mark.parametrize("kind", MOVES)
@pytest.mark.parametrize("seed", range(2))
def test_rows_match_reference(seed: int, kind: str) -> None:
    """Rows of any size, dtype and alignment, in one tensor or two of different widths. Other rows do not change."""
    pack = Pack(1000 * MOVES.index(kind) + seed)
    draw, shape, everyone = pack.draw, pack.shape, pack.shape.cp_size * pack.shape.capacity
    dtype = draw.choice((torch.bfloat16, torch.float16, torch.float32, *((torch.int8,) if kind != "sum" else ())))
    count = {"to_ranks": everyone, "stay": pack.tokens + draw.choice((0, 3)), "table": 70, "sum": 33}.get(
        kind, pack.tokens
    )
    widths = [draw.choice(WIDTHS) for _ in range(1 if kind == "tail" else draw.choice((1, 2)))]
    inputs = [rows(draw, everyone if kind == "to_sequences" else pack.tokens, width, dtype) for width in widths]
    outputs = [torch.full((count, *width), 77, dtype=dtype) for width in widths]
    wants = [x.clone() for x in outputs]
    table = lengths = None
    if kind in ("table", "sum"):
        table = torch.randint(-1, pack.tokens, (count,) if kind == "table" else (draw.choice((1, 2, 5)), count)).int()
    if kind == "valid":
        lengths = pack.cu_seqlens
    if kind == "tail":
        inputs = outputs
    map = "table" if kind == "sum" else kind
    given = Move(inputs, outputs, map, pack.slots, lengths, table, shape._replace(cp_rank=0))
    reference.move(given._replace(outputs=wants))
    move(given)
    for out, want in zip(outputs, wants):
        assert torch.equal(out, want)


STEPS = (
    ("lse", "nothing", "add"), ("read_lse", "nothing", "copy"), ("out", "add", "add"), ("out", "nothing", "add"),
    ("grad", "add", "nothing"), ("grad", "copy", "nothing"), ("grad", "nothing", "add"), ("grad", "nothing", "copy"),
    ("grad", "add", "copy"), ("grad", "copy", "add"),
)  # fmt: skip


def step_of(seed: int, quantity: str, first: str, second: str):
    """(cu_seqlens, packed, rows, (out, step, lse, lse_step)) of a random rank. Some sequences have an odd length."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    lengths = [draw.choice((0, 1, 2, 5, 8)) for _ in range(draw.choice((1, 3, 7)))]
    t, longest, packed = sum(lengths) + draw.choice((0, 3)), max(lengths) + 1, draw.random() < 0.5
    heads, size = draw.choice(((2, 8), (3, 5), (4, 16)))
    half = "nothing" in (first, second)
    dtype = draw.choice((torch.bfloat16, torch.float32))
    out = torch.randn(t, heads, size).to(dtype)
    step = torch.randn(t // 2 + 4 if half else t, heads, size).to(dtype)
    step[torch.rand(step.shape) < 0.1] = 0
    lse = torch.randn((heads, t) if packed else (len(lengths), heads, longest))
    ends = (t // 2 + 4 if packed else longest // 2 + 2) if half else (t if packed else longest)
    lse_step = torch.randn((*lse.shape[:-1], ends))
    lse_step[torch.rand(lse_step.shape) < 0.1] = -torch.inf
    if quantity != "out":
        lse[torch.rand(lse.shape) < 0.1] = -torch.inf
    tensors = {"out": (out, step, lse, lse_step), "grad": (out, step, None, None)}.get(
        quantity, (None, None, lse, lse_step)
    )
    return offsets(lengths, draw.choice((torch.int32, torch.int64))), packed, t, tensors


@pytest.mark.parametrize("step", STEPS, ids=lambda step: "-".join(step))
def test_corrections_match_reference(step: tuple[str, str, str]) -> None:
    cu_seqlens, packed, t, tensors = step_of(STEPS.index(step), *step)
    wants = [None if x is None else x.clone() for x in tensors]
    for call in thd_ops.correction_calls(Correction(*step, packed, cu_seqlens, t, *tensors)):
        run(call)
    reference.correct(Correction(*step, packed, cu_seqlens, t, *wants))
    for got, want in zip(tensors, wants):
        if got is not None:
            rtol = 2**-7 if got.dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(got, want, rtol=rtol, atol=1e-5, equal_nan=True)


def test_steps_of_halves_make_the_whole() -> None:
    """Two steps give attention: all queries to some keys, and then the second halves to the other keys."""
    torch.manual_seed(0)
    lengths, heads, size = (8, 0, 12, 3), 2, 8
    cu_seqlens = offsets(lengths)
    t = sum(lengths)
    scores = [torch.randn(heads, t, 5), torch.randn(heads, t, 7)]
    values = [torch.randn(5, heads, size), torch.randn(7, heads, size)]
    second = reference.halves(cu_seqlens, t)[2]
    out = torch.einsum("hqk,khd->qhd", scores[0].softmax(-1), values[0]).contiguous()
    lse = scores[0].logsumexp(-1)
    half = thd.read_half_tensor(scores[1].transpose(0, 1), cu_seqlens, 1).transpose(0, 1)
    step, step_lse = torch.einsum("hqk,khd->qhd", half.softmax(-1), values[1]), half.logsumexp(-1).contiguous()
    before = lse.clone()
    thd.second_half_lse_correction(lse, step_lse, cu_seqlens, True)
    assert torch.equal(lse[:, ~second], before[:, ~second])
    rest = torch.zeros_like(out)
    thd.out_correction(rest, out, lse, before, cu_seqlens, False, True)
    thd.out_correction(rest, step, lse, step_lse, cu_seqlens, True, True)
    both = torch.cat(scores, -1).masked_fill(~second[:, None] & (torch.arange(12) >= 5), -torch.inf)
    want = torch.einsum("hqk,khd->qhd", both.softmax(-1), torch.cat(values))
    torch.testing.assert_close(rest, want)
    torch.testing.assert_close(lse, both.logsumexp(-1))
    read = thd.read_second_half_lse(lse, cu_seqlens, True, t // 2)
    assert torch.equal(read, lse[:, second])


def test_sanitizer_sees_a_row_past_the_input() -> None:
    """The harness finds an input with fewer rows than the kernel's arguments say."""
    x, out, table = torch.zeros(5, 8), torch.zeros(3, 8), torch.tensor([0, 4, 1], dtype=torch.int32)
    (call,) = thd_ops.rows_calls(Move([x], [out], "table", table=table))
    with pytest.raises(AssertionError, match=r"use-after-poison|heap-buffer-overflow"):
        run(call._replace(tensors=[x[:4].clone(), *call.tensors[1:]]))


WILD = ([0, 9, 4, 40], [0, -5, 3, 10], [0, 2**31 - 1, 2, 4], [7, 3, 1, 0], [0, 100, 200, 300])


@pytest.mark.parametrize("wild", WILD, ids=str)
def test_offsets_that_are_none_touch_nothing_else(wild: list[int]) -> None:
    """Wrong offsets give any rows, but no byte outside the tensors is read or written."""
    cu_seqlens, shape = torch.tensor(wild, dtype=torch.int32), Shape(20, 3, 2, 1)
    for map, rows in (("to_ranks", 20), ("to_sequences", 20), ("valid", 20), ("tail", 20)):
        x, out = torch.ones(20, 8), torch.zeros(rows, 8)
        move(Move([x], [out], map, cu_seqlens, cu_seqlens, None, shape._replace(cp_rank=0)))
    table = torch.tensor([5, 20, -9, 2**31 - 1], dtype=torch.int32)
    out = torch.full((4, 8), 7.0)
    move(Move([torch.ones(20, 8)], [out], "table", table=table))
    assert out[:, 0].tolist() == [1, 0, 0, 0]
    for mask in (Mask(-1, 0), Mask(2, 1)):
        segments(cu_seqlens, None, shape, mask)


# ---- compiled by NVRTC -------------------------------------------------------------------------------


def every_kind() -> list[RowsSpec | SegmentsSpec | CorrectionSpec]:
    """The specs of real calls: each map, sums, segments of each mask, corrections."""
    moving = [rows_spec((2048,), 2048, map, cp_size=4) for map in MAPS if map != "positions"]
    moving += [rows_spec((2048,), 2048, "to_sequences", False, "int64", 3, rule) for rule in RULES]
    tables = [
        RowsSpec(map, True, index, 4, rule)
        for map in ("to_ranks", "to_sequences", "positions")
        for index, rule in zip(("int32", "int64"), RULES)
    ]
    sums = [
        rows_spec((2048,), 2048, "table", sums=True, dtype=dtype, out_dtype=out)
        for dtype, out in (("bf16", "bf16"), ("fp16", "fp32"), ("fp32", "fp32"))
    ]
    flags = ((False,) * 4, (True, False, True, False), (False, True, False, True), (False, False, True, True))
    segments = [
        SegmentsSpec(rows, index, 4, rule, *some, threads=256 if rows else 1024)
        for rows in (False, True)
        for some in flags
        for index, rule in zip(("int32", "int64"), RULES)
    ]
    corrections = [CorrectionSpec(*step, True, "bf16", "int32", 8) for step in STEPS]
    return [*moving, *tables, *sums, *segments, *corrections]


@pytest.mark.slow
def test_every_kind_compiles() -> None:
    """CI runs this with the oldest supported NVRTC too."""
    for spec in every_kind():
        assert compiler.compile_source(render(spec), "sm_90")[0].startswith(b"\x7fELF"), spec.name


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_75", *ARCHS])
def test_kernels_compile_without_spills(arch: str, tmp_path: Path) -> None:
    """No spills and no 64-bit divisions, and rows are stored in 16 bytes. sm_90 gets all specs, others a fifth each."""
    turn = ["sm_75", *ARCHS].index(arch)
    specs = [spec for number, spec in enumerate(every_kind()) if arch == "sm_90" or number % 5 == turn]
    code = {spec: compiler.compile_source(render(spec), arch, ("--ptxas-options=-v",)) for spec in specs}
    bounds()
    for spec, (cubin, log) in code.items():
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log, f"{spec.name}: {log}"
        assert "warning" not in log, log
        assert not DIVISION.search(cubin), spec.name
    writing = [spec for spec in specs if isinstance(spec, RowsSpec) and not spec.writes]
    for spec, found in zip(writing, disassemble([code[spec][0] for spec in writing], arch, tmp_path)):
        stores = [name for name in map(opcode, found) if name.startswith("STG")]
        assert stores, spec.name
        assert all(".128" in name for name in stores), spec.name


# ---- TransformerEngine's functions -------------------------------------------------------------------


def test_transformer_engines_worked_example() -> None:
    """Two ranks, lengths 7 and 3, padded to 8 and 4."""
    padded, valid = offsets((8, 4)), offsets((7, 3))
    assert thd.get_partitioned_indices(padded, 12, 2, 0).tolist() == [0, 1, 6, 7, 8, 11]
    assert thd.get_partitioned_indices(padded, 12, 2, 1).tolist() == [2, 3, 4, 5, 9, 10]
    x = torch.arange(12)
    ranks = thd.sequence_order_to_cp_rank_order(x, padded, 2)
    assert ranks.tolist() == [0, 1, 6, 7, 8, 11, 2, 3, 4, 5, 9, 10]
    assert torch.equal(thd.cp_rank_order_to_sequence_order(ranks, padded, 2), x)
    local = offsets((4, 2))
    halves = [thd.read_half_tensor(torch.arange(6).view(6, 1, 1), local, half).flatten().tolist() for half in (0, 1)]
    assert halves == [[0, 1, 4], [2, 3, 5]]
    for rank, steps in ((0, ([0, 1, 4], [2])), (1, ([0, 1, 4], [2, 3, 5]))):
        shape = Shape(12, 2, 2, rank)
        cu_q = thd_ops.segments(valid, padded, shape, Mask(-1, 0)).cu_seqlens_q.tolist()
        for step, written in enumerate(steps):
            out = torch.zeros(6, 1)
            begins = torch.tensor([cu_q[3 * b + step] for b in range(2)] + [6], dtype=torch.int32)
            ends = [cu_q[3 * b + step + 1] - cu_q[3 * b + step] for b in range(2)]
            thd.copy_valid_tokens_from_per_split_to_rank_local(out, torch.ones(6, 1), begins, offsets(ends))
            assert out[:, 0].nonzero()[:, 0].tolist() == written


def test_copy_valid_may_begin_past_zero() -> None:
    out = torch.full((12, 2, 4), -1, dtype=torch.float16)
    x = torch.arange(96, dtype=torch.float16).view(12, 2, 4)
    padded = torch.tensor((2, 6, 12), dtype=torch.int32)
    thd.copy_valid_tokens_from_per_split_to_rank_local(out, x, padded, offsets((3, 4)))
    valid = [2, 3, 4, 6, 7, 8, 9]
    assert torch.equal(out[valid], x[valid])
    assert (out[[0, 1, 5, 10, 11]] == -1).all()


@pytest.mark.parametrize("seed", range(20))
def test_there_and_back(seed: int) -> None:
    """Into rank order and back, for one tensor and for two, of any length, with their gradients."""
    pack = Pack(seed, cp_sizes=(1, 2, 3, 4, 8))
    size, rule = pack.shape.cp_size, pack.shape.rule
    k, v = (torch.randn(pack.tokens, 2, d, requires_grad=True) for d in (4, 3))
    ranks = thd.sequence_order_to_cp_rank_order((k, v), pack.slots, size, rule=rule)
    assert ranks[0].shape == (size * -(-pack.tokens // size), 2, 4)
    shards = []
    for rank in range(size):
        indices = thd.get_partitioned_indices(pack.slots, pack.tokens, size, rank, rule=rule).long()
        shards.append(indices)
        there = ranks[0].view(size, -1, 2, 4)[rank]
        assert torch.equal(there[: len(indices)], k[indices])
        assert not there[len(indices) :].any()
    assert sorted(torch.cat(shards).tolist()) == list(range(pack.tokens))
    back = thd.cp_rank_order_to_sequence_order(ranks, pack.slots, size, pack.tokens, rule=rule)
    assert torch.equal(back[0], k)
    assert torch.equal(back[1], v)
    weight = torch.randn_like(ranks[1])
    (grad,) = torch.autograd.grad((ranks[1] * weight).sum(), v, retain_graph=True)
    assert torch.equal(grad, thd.cp_rank_order_to_sequence_order(weight, pack.slots, size, pack.tokens, rule=rule))
    (grad,) = torch.autograd.grad(back[0].sum(), k)
    assert torch.equal(grad, torch.ones_like(k))


def test_gradient_corrections() -> None:
    cu = offsets((4, 2))
    grad, whole, half = torch.ones(2, 6, 1, 1), torch.full((2, 6, 1, 1), 2.0), torch.full((2, 3, 1, 1), 3.0)
    for first, second, step, want in (
        ("add", "none", half, [4, 4, 1, 1, 4, 1]), ("none", "copy", half, [1, 1, 3, 3, 1, 3]),
        ("add", "copy", whole, [3, 3, 2, 2, 3, 2]), ("copy", "add", whole, [2, 2, 3, 3, 2, 3]),
    ):  # fmt: skip
        out = grad.clone()
        thd.grad_correction(out, step, cu, first, second)
        assert out.view(2, 6).tolist() == [want, want]


@pytest.mark.parametrize("op", ["thd_rows", "cp_segments", "thd_correct"])
def test_opcheck(op: str) -> None:
    cu, shape = offsets((7, 0, 6)), Shape(14, 3, 2, 1)
    x, out = torch.randn(14, 3), torch.empty(14, 3)
    arguments = {
        "thd_rows": ([x], [out], "to_ranks", cu, None, None, *shape._replace(cp_rank=0)),
        "cp_segments": (reference.empty_segments(cu, None, shape, Mask(2, 1)), cu, None, 2, 1, *shape),
        "thd_correct": ("grad", "add", "copy", True, cu, 14, out.view(14, 3, 1), x.view(14, 3, 1), None, None),
    }[op]
    torch.library.opcheck(getattr(torch.ops.jitrope, op).default, arguments)


QUANTIZED = torch._empty_affine_quantized((8, 2, 4), scale=1.0, zero_point=0, dtype=torch.quint8)
REFUSED = {
    "dtype": (lambda: thd.get_partitioned_indices(torch.zeros(3), 4, 2, 0), "cu_seqlens is"),
    "rank": (lambda: thd.get_partitioned_indices(offsets((4,)), 4, 2, 2), "rank is 2; it must be below world_size=2"),
    "rule": (lambda: thd.get_partitioned_indices(offsets((4,)), 4, 2, 0, rule="striped"), "rule is 'striped'"),
    "too-many": (lambda: thd.get_partitioned_indices(offsets((4,)), 2**31, 2, 0), "tokens are more than"),
    "rows": (lambda: thd.cp_rank_order_to_sequence_order(torch.ones(7, 1), offsets((6,)), 2, 6), "x has 7 rows"),
    "pair": (
        lambda: thd.sequence_order_to_cp_rank_order((torch.ones(7, 1), torch.ones(6, 1)), offsets((6,)), 2),
        "it must be .T, ...., or a pair with as many rows",
    ),
    "three": (lambda: thd.sequence_order_to_cp_rank_order((torch.ones(1),) * 3, offsets((1,)), 1), "x is a tuple of 3"),
    "valid": (
        lambda: thd.copy_valid_tokens_from_per_split_to_rank_local(
            torch.ones(4, 1), torch.ones(5, 1), offsets((4,)), offsets((4,))
        ), r"x is .*; it must be \(4, 1\), float32, on cpu like out",
    ),
    "half": (lambda: thd.read_half_tensor(torch.ones(4, 1, 1), offsets((4,)), 2), "half_idx is 2"),
    "lse": (
        lambda: thd.second_half_lse_correction(torch.ones(2, 4).half(), torch.ones(2, 2), offsets((4,)), True),
        "lse is",
    ),
    "heads": (
        lambda: thd.out_correction(
            torch.ones(4, 3, 1), torch.ones(4, 3, 1), torch.ones(2, 4), torch.ones(2, 4), offsets((4,)), False, True
        ), "lse is .*; they must have one shape, and out's heads",
    ),
    "step": (
        lambda: thd.grad_correction(torch.ones(4, 1, 1), torch.ones(1, 1, 1), offsets((4,)), "add", "none"),
        "grad_per_step is .*; it must have at least 2 rows",
    ),
    "equal lse": (
        lambda: thd.out_correction(
            torch.ones(4, 1, 1), torch.ones(4, 1, 1), torch.ones(1, 4), torch.ones(1, 2), offsets((4,)), False, True
        ), "lse is .*, lse_per_step .*; they must have one shape",
    ),
    "rows of lse": (
        lambda: thd.out_correction(
            torch.ones(4, 1, 1), torch.ones(4, 1, 1), torch.ones(1, 3), torch.ones(1, 3), offsets((3,)), False, True
        ), "lse is .*; they must have one shape, and out's heads and at least its rows",
    ),
    "lse of fewer tokens": (
        lambda: thd.second_half_lse_correction(torch.ones(1, 3), torch.ones(1, 2), offsets((4,)), True),
        r"cu_seqlens is \[0, 4\]; it must ascend to at most 3",
    ),
    "lse of shorter sequences": (
        lambda: thd.second_half_lse_correction(torch.ones(2, 1, 3), torch.ones(2, 1, 2), offsets((2, 4)), False),
        "lse has room for 3 rows",
    ),
    "falling offsets": (
        lambda: thd.read_second_half_lse(torch.ones(1, 4), torch.tensor([0, 3, 2, 4]), True, 2),
        "cu_seqlens is .*; it must ascend",
    ),
    "gradient of fewer tokens": (
        lambda: thd.grad_correction(torch.ones(3, 1, 1), torch.ones(3, 1, 1), offsets((4,)), "add", "add"),
        "cu_seqlens is .*; it must ascend to at most 3",
    ),
    "offsets of more sequences": (
        lambda: thd.copy_valid_tokens_from_per_split_to_rank_local(
            torch.ones(3, 1), torch.ones(3, 1), offsets((3,)), offsets((1, 2))
        ), r"cu_seqlens is .*; it must be \(2,\), int32 or int64, contiguous, on cpu like cu_seqlens_padded",
    ),
    "valid past the end": (
        lambda: thd.copy_valid_tokens_from_per_split_to_rank_local(
            torch.ones(3, 1), torch.ones(3, 1), offsets((4,)), offsets((4,))
        ), "cu_seqlens is .*; it must ascend to at most 3",
    ),
    "zeros": (
        lambda: thd.read_second_half_lse(torch._efficientzerotensor((1, 4)), offsets((4,)), True, 2),
        "lse is .*; it must be a tensor with memory",
    ),
    "sparse": (
        lambda: thd.sequence_order_to_cp_rank_order(torch.ones(8).to_sparse(), offsets((8,)), 2),
        "x is .*; it must be a strided tensor",
    ),
    "quantized": (
        lambda: thd.cp_rank_order_to_sequence_order(QUANTIZED, offsets((8,)), 2),
        "x is .*, quint8, on cpu; it must be a tensor with memory, neither quantized nor",
    ),
    "half of quantized": (lambda: thd.read_half_tensor(QUANTIZED, offsets((8,)), 0), "x is .*, quint8, on cpu; it"),
    "nested": (
        lambda: thd.read_half_tensor(torch.nested.nested_tensor([torch.ones(2)]), offsets((8,)), 0),
        "x is a nested tensor; it must be a strided tensor",
    ),
    "conjugate": (
        lambda: thd.copy_valid_tokens_from_per_split_to_rank_local(
            torch.ones(4, 1, dtype=torch.complex64).conj(), torch.ones(4, 1, dtype=torch.complex64), offsets((4,)),
            offsets((4,))
        ), "out has torch's lazy",
    ),
    "what": (
        lambda: thd.grad_correction(torch.ones(4, 1, 1), torch.ones(4, 1, 1), offsets((4,)), "plus", "none"),
        "first_half is 'plus'",
    ),
}  # fmt: skip


def test_offsets_of_inference_mode_serve_training() -> None:
    with torch.inference_mode():
        cu_seqlens = offsets((7, 3))
    x = torch.randn(10, 4)
    want = thd.sequence_order_to_cp_rank_order(x, cu_seqlens, 2)
    got = thd.sequence_order_to_cp_rank_order(x.requires_grad_(), cu_seqlens, 2)
    assert torch.equal(got, want)
    assert torch.equal(torch.autograd.grad(got.sum(), x)[0], torch.ones_like(x))


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(jitrope.InvalidInput, match=message):
        call()


def test_functions_without_a_gradient_refuse_tensors_that_require_one() -> None:
    x, lse, cu_seqlens = torch.ones(10, 1, 1, requires_grad=True), torch.zeros(1, 10), offsets((6, 4))
    calls = {
        "x": lambda x: thd.read_half_tensor(x, cu_seqlens, 0),
        "out": lambda x: thd.copy_valid_tokens_from_per_split_to_rank_local(x, x, cu_seqlens, cu_seqlens),
        "grad": lambda x: thd.grad_correction(x, x.detach(), cu_seqlens, "copy", "add"),
        "out_per_step": lambda x: thd.out_correction(x.detach(), x, lse, lse, cu_seqlens, False, True),
        "lse": lambda x: thd.read_second_half_lse(x[:, 0].T, cu_seqlens, True, 5),
        "lse_per_step": lambda x: thd.second_half_lse_correction(lse, x[:5, 0].T, cu_seqlens, True),
    }
    for label, call in calls.items():
        with pytest.raises(jitrope.InvalidInput, match=f": {label} requires a gradient, which"):
            call(x)
        with torch.no_grad():
            call(x.clone())


def test_one_graph_for_any_number_of_tokens() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    def call(x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        return jitrope.thd.sequence_order_to_cp_rank_order(x, cu_seqlens, 2)

    compiled = torch.compile(call, backend=backend, dynamic=True, fullgraph=True)
    for tokens in (10, 15, 22, 31):
        x, cu_seqlens = torch.randn(tokens, 4), torch.tensor([0, 3, tokens])
        assert torch.equal(compiled(x, cu_seqlens), call(x, cu_seqlens))
    assert len(graphs) == 1


def test_corrections_in_a_compiled_function() -> None:
    cu_seqlens = offsets((4, 2))

    def call(x: torch.Tensor, step: torch.Tensor) -> list[torch.Tensor]:
        grad, copied, out = x.clone(), x.clone(), x.clone()
        lse, lse_step = x[..., 0].t().contiguous(), step[..., 0].t().contiguous()
        thd.grad_correction(grad, step, cu_seqlens, "add", "copy")
        thd.copy_valid_tokens_from_per_split_to_rank_local(copied, step, cu_seqlens, offsets((3, 2)))
        thd.out_correction(out, step, lse, lse_step, cu_seqlens, False, True)
        thd.second_half_lse_correction(lse, lse_step, cu_seqlens, True)
        return [grad, copied, out, lse, thd.read_second_half_lse(lse, cu_seqlens, True, 3)]

    x, step = torch.randn(2, 6, 2, 4)
    for got, want in zip(torch.compile(call, fullgraph=True, backend="aot_eager")(x, step), call(x, step)):
        assert torch.equal(got, want)


def test_a_pair_is_reordered_in_a_compiled_function() -> None:
    pair, cu_seqlens = [torch.randn(10, 2, requires_grad=True) for _ in range(2)], offsets((6, 4))

    def call(*pair: torch.Tensor):
        return thd.sequence_order_to_cp_rank_order(pair, cu_seqlens, 2)

    want, got = call(*pair), torch.compile(call, backend="aot_eager", fullgraph=True)(*pair)
    for x, y in zip(got, want):
        assert torch.equal(x, y)
    for x, y in zip(*(torch.autograd.grad(sum(n * x.sum() for n, x in enumerate(out)), pair) for out in (got, want))):
        assert torch.equal(x, y)
