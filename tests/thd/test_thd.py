"""Moves of rows between ranks, attention's segments and ring attention's corrections.

The kernels against plain torch (`reference`), and plain torch against literals.
"""

from __future__ import annotations

import random
from functools import partial
from itertools import accumulate, chain, product
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import pad

from jitrope import thd
from jitrope.base.partition import RULES
from jitrope.jit import compiler
from jitrope.jit.render import render
from jitrope.run.enqueue import Call, enqueue
from jitrope.thd import ops as thd_ops
from jitrope.thd import reference
from jitrope.thd.reference import Move, Segments
from jitrope.thd.shape import Mask, Shape
from jitrope.thd.spec import MAPS, CorrectionSpec, RowsSpec, SegmentsSpec, rows_spec

from .. import machine_code
from ..devices import DEVICES, devices
from ..host import harness
from ..host.backend import DEVICE
from ..jobs import MASKS, MOVES, STEPS, Batch, Trait, correction_job, in_host_memory, rows_job, segments_job

SEEDS = [
    *devices([(0,), (1,)], [(0,), (1,)]),
    *[pytest.param(DEVICE, n, marks=[pytest.mark.gpu, pytest.mark.hardware]) for n in range(2, 8)],
]


def offsets(lengths, dtype=torch.int32) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=dtype)


# ---- the kernels ---------------------------------------------------------------------------------------


def launch(calls: list[Call] | None, device: str) -> None:
    """On the device of the tests marked `gpu`, else on the CPU in a process of its own, under ASan and UBSan."""
    assert calls is not None
    for call in calls:
        if device == DEVICE:
            enqueue(call)
        else:
            harness.run(render(call.spec), call.grid, call.spec.threads, call.tensors, call.words)


@pytest.mark.parametrize(("device", "seed"), SEEDS)
def test_tables(device: str, seed: int) -> None:
    batch = Batch(seed, *Trait.drawn(random.Random(seed)))
    first = batch.shape._replace(cp_rank=0)
    for map, shape, rows in (
        ("to_ranks", batch.shape, batch.shape.rows), ("positions", batch.shape, batch.shape.rows),
        ("to_sequences", batch.shape, batch.tokens), ("to_ranks", first, first.all_rows),
    ):  # fmt: skip
        out = torch.full((rows,), -7, dtype=torch.int32, device=device)
        launch(thd_ops.rows_calls(Move([], [out], map, batch.slots.to(device), shape=shape)), device)
        assert torch.equal(out.cpu(), reference.table(batch.slots, map, rows, shape)), map


KINDS = {
    **{f"rows {move}": partial(rows_job, move) for move in MOVES},
    **{f"segments {left},{right}": partial(segments_job, Mask(left, right)) for left, right in MASKS},
    **{f"correction {'-'.join(step)}": partial(correction_job, step) for step in STEPS},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("device", "seed"), SEEDS)
def test_kernels(device: str, seed: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moves of rows, segments and corrections, of a random batch and rank: the results of plain torch.

    Segments by a block with so few threads that it does not scan a few dozen sequences at a time.
    """
    monkeypatch.setattr("jitrope.thd.spec.SCAN_THREADS", 32)
    job = KINDS[kind](random.Random(f"{kind} {seed}"))
    calls = {"move": "rows_calls", "fill_segments": "segments_calls", "correct": "correction_calls"}
    with monkeypatch.context() as patch:
        for plain, name in calls.items() if device != DEVICE else ():
            made = getattr(thd_ops, name)
            patch.setattr(reference, plain, lambda *given, made=made: launch(made(*given), device))
        got = in_host_memory(job.make(device, seed).start())
    for name in calls.values():
        monkeypatch.setattr(thd_ops, name, lambda *_: None)  # plain torch
    for x, want in zip(got, job.make("cpu", seed).start(), strict=True):
        assert (x is None) == (want is None)
        if x is not None:
            rtol = 0 if "correction" not in kind else 2**-7 if x.dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(x, want, rtol=rtol, atol=1e-5 if rtol else 0, equal_nan=True)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("device", "count"),
    [*devices([(0,)], [(0,)]), pytest.param(DEVICE, 3000, marks=[pytest.mark.gpu, pytest.mark.hardware])],
)
def test_exchanged_segments(device: str, count: int, rule: str) -> None:
    """With long sequences and a short window ranks send each other only the rows that are needed.

    Also of more sequences than a block scans at a time.
    """
    short = torch.randint(0, 60, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    lengths = [*short, 40_000, 30_000] if count else [97, 60, 0, 41, 2]
    cu = offsets(lengths)
    for rank, mask in product(range(4), (Mask(3, 0), Mask(4, 1)) if count else (Mask(3, 0),)):
        shape = Shape(sum(lengths) + 3, len(lengths), 4, rank, rule)
        assert shape.exchange(mask) is not None
        want, made = (reference.empty_segments(cu.to(x), None, shape, mask) for x in ("cpu", device))
        reference.fill_segments(want, cu, None, shape, mask)
        launch(thd_ops.segments_calls(made, cu.to(device), None, shape, mask), device)
        for x, y in zip(*(Segments.of(flat, shape, mask, False) for flat in (want, made))):
            assert (x is None) == (y is None)
            assert x is None or torch.equal(x, y.cpu())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "wild", [[0, 9, 4, 40], [0, -5, 3, 10], [0, 2**31 - 1, 2, 4], [7, 3, 1, 0], [0, 100, 200, 300]]
)
def test_offsets_that_are_none_touch_nothing_else(device: str, wild: list[int]) -> None:
    """Wrong offsets give any rows, but no byte outside the tensors is read or written."""
    cu_seqlens, shape = torch.tensor(wild, dtype=torch.int32, device=device), Shape(20, 3, 2, 1)
    for map in ("to_ranks", "to_sequences", "valid", "tail"):
        x, out = torch.ones(20, 8, device=device), torch.zeros(20, 8, device=device)
        given = Move([x], [out], map, cu_seqlens, cu_seqlens, None, shape._replace(cp_rank=0))
        launch(thd_ops.rows_calls(given), device)
    for mask in (Mask(-1, 0), Mask(2, 1)):
        flat = reference.empty_segments(cu_seqlens, None, shape, mask)
        launch(thd_ops.segments_calls(flat, cu_seqlens, None, shape, mask), device)
    table = torch.tensor([5, 20, -9, 2**31 - 1], dtype=torch.int32, device=device)
    x, out = torch.ones(20, 8, device=device), torch.full((4, 8), 7.0, device=device)
    launch(thd_ops.rows_calls(Move([x], [out], "table", table=table)), device)
    assert out[:, 0].tolist() == [1, 0, 0, 0]


# The specs of real calls: each map, tables, sums, segments of each mask, corrections.
FLAGS = ((False,) * 4, (True, False, True, False), (False, True, False, True), (False, False, True, True))
CUTS = [("int32", 4, RULES[0]), ("int64", 4, RULES[1])]
EVERY_KIND: list[RowsSpec | SegmentsSpec | CorrectionSpec] = [
    *[rows_spec((2048,), 2048, map, cp_size=4) for map in MAPS if map != "positions"],
    *[rows_spec((2048,), 2048, "to_sequences", False, "int64", 3, rule) for rule in RULES],
    *[rows_spec((2048,), 2048, "table", sums=True, dtype=x, out_dtype=y)
      for x, y in (("bf16", "bf16"), ("fp16", "fp32"), ("fp32", "fp32"))],
    *[RowsSpec(map, True, *cut) for map in ("to_ranks", "to_sequences", "positions") for cut in CUTS],
    *[SegmentsSpec(rows, *cut, *some, threads=256 if rows else 1024)
      for rows in (False, True) for some in FLAGS for cut in CUTS],
    *[CorrectionSpec(*[x.replace("none", "nothing") for x in step], True, "bf16", "int32", 8) for step in STEPS],
]  # fmt: skip


EVERY_ARCH = ["sm_75", "sm_80", "sm_90", "sm_100", "sm_120"]


@pytest.mark.slow
@pytest.mark.parametrize("arch", EVERY_ARCH)
def test_every_kind_compiles_without_spills(arch: str, tmp_path: Path) -> None:
    """No spills and no 64-bit divisions, and rows are stored in 16 bytes. sm_90 gets all specs, others a fifth each."""
    specs = EVERY_KIND if arch == "sm_90" else EVERY_KIND[EVERY_ARCH.index(arch) :: 5]
    code = {spec: compiler.compile_source(render(spec), arch, ("--ptxas-options=-v",)) for spec in specs}
    assert all(cubin.startswith(b"\x7fELF") for cubin, _ in code.values())
    machine_code.bounds()
    for spec, (cubin, log) in code.items():
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log, f"{spec.name}: {log}"
        assert "warning" not in log, log
        assert not machine_code.DIVISION.search(cubin), spec.name
    moves = [spec for spec in specs if isinstance(spec, RowsSpec) and not spec.writes]
    for spec, lines in zip(moves, machine_code.disassemble([code[spec][0] for spec in moves], arch, tmp_path)):
        stores = [name for name in map(machine_code.opcode, lines) if name.startswith("STG")]
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


@pytest.mark.parametrize("seed", range(20))
def test_there_and_back(seed: int) -> None:
    """Into rank order and back, for one tensor and for two, of any length, with their gradients."""
    pack = Batch(seed, *Trait.drawn(random.Random(seed)))
    size, rule = pack.shape.cp_size, pack.shape.rule
    k, v = (torch.randn(pack.tokens, 2, d, requires_grad=True) for d in (4, 3))
    ranks = thd.sequence_order_to_cp_rank_order((k, v), pack.slots, size, rule=rule)
    each = [thd.get_partitioned_indices(pack.slots, pack.tokens, size, rank, rule=rule) for rank in range(size)]
    indices = [rows.long() for rows in each]
    assert sorted(torch.cat(indices).tolist()) == list(range(pack.tokens))
    for x, y in zip((k, v), ranks):
        parts = [pad(x[i], (0, 0, 0, 0, 0, pack.shape.capacity - len(i))) for i in indices]  # with rows of zeros
        assert torch.equal(y, torch.cat(parts))
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
        thd.grad_correction(out[:, :0], step[:, :0], cu[:1].repeat(2), first, second)  # of no rows


def test_steps_of_halves_make_the_whole() -> None:
    """Two steps give attention: all queries to some keys, and then the second halves to the other keys."""
    torch.manual_seed(0)
    lengths, heads, size = (8, 0, 12, 3), 2, 8
    cu_seqlens, t = offsets(lengths), sum(lengths)
    scores = [torch.randn(heads, t, 5), torch.randn(heads, t, 7)]
    values = [torch.randn(5, heads, size), torch.randn(7, heads, size)]
    second = torch.tensor([4 <= n < 8 or 14 <= n < 20 or n == 22 for n in range(t)])
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
    torch.testing.assert_close(rest, torch.einsum("hqk,khd->qhd", both.softmax(-1), torch.cat(values)))
    torch.testing.assert_close(lse, both.logsumexp(-1))
    assert torch.equal(thd.read_second_half_lse(lse, cu_seqlens, True, t // 2), lse[:, second])


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


def test_one_graph_for_any_number_of_tokens() -> None:
    """Of a pair, whose tensors have their own gradients."""
    graphs, eager = CompileCounterWithBackend("aot_eager"), thd.sequence_order_to_cp_rank_order
    compiled = torch.compile(eager, backend=graphs, dynamic=True, fullgraph=True)
    for tokens in (10, 15, 22, 31):
        pair, cu_seqlens = [torch.randn(tokens, 4, requires_grad=True) for _ in range(2)], torch.tensor([0, 3, tokens])
        results = [call(pair, cu_seqlens, 2) for call in (eager, compiled)]
        grads = [torch.autograd.grad(sum(n * x.sum() for n, x in enumerate(out)), pair) for out in results]
        for got, want in zip(chain(results[1], grads[1]), chain(results[0], grads[0])):
            assert torch.equal(got, want)
    assert graphs.frame_count == 1


# Functions that write x, of shape (T, H, D), or lse, of shape (H, T).
valid = thd.copy_valid_tokens_from_per_split_to_rank_local
WRITES = {
    "valid": lambda x, lse, step, cu: valid(x, step, cu, cu - (cu > 4).int()),  # a sequence has padding
    "grad": lambda x, lse, step, cu: thd.grad_correction(x, step, cu, "copy", "add"),
    "out": lambda x, lse, step, cu: thd.out_correction(x, step, lse, lse + 1, cu, False, True),
    "lse": lambda x, lse, step, cu: thd.second_half_lse_correction(lse, lse[:, : len(x) // 2] + 1, cu, True),
}


def test_corrections_in_a_compiled_function() -> None:
    cu, (x, step), found = offsets((4, 2)), torch.randn(2, 6, 2, 4), []
    calls = [*WRITES.values(), lambda x, lse, step, cu: thd.read_second_half_lse(lse, cu, True, 3)]
    for compile_it in (partial, partial(torch.compile, fullgraph=True, backend="aot_eager")):
        given = x.clone(), x[..., 0].t().contiguous(), step, cu
        *_, read = compile_it(lambda *given: [call(*given) for call in calls])(*given)
        found.append((*given, read))
    assert all(map(torch.equal, *found))


@pytest.mark.gpu
@pytest.mark.parametrize("name", WRITES)
def test_writes_are_seen_by_autograd(name: str) -> None:
    """A tensor that a backward needs must not change. Under no_grad, tensors that require a gradient are taken."""
    x, lse = (torch.ones(shape, device=DEVICE, requires_grad=True) * 1 for shape in ((10, 1, 1), (1, 10)))
    squares = (lse if name == "lse" else x).square().sum()
    with torch.no_grad():
        WRITES[name](x, lse, torch.ones_like(x), offsets((6, 4)).to(DEVICE))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()


@pytest.mark.gpu
@pytest.mark.hardware
@pytest.mark.parametrize("count", [1, 2401, 20_000, 300_000])
def test_any_number_of_sequences(count: int) -> None:
    """TransformerEngine has a limit of 12,287 sequences, because it keeps offsets in shared memory."""
    torch.manual_seed(0)
    lengths = torch.randint(0, 2 * 300_000 // count + 1, (count,)).tolist()
    cu_seqlens, tokens = offsets(lengths), sum(lengths) + 7
    x = torch.arange(tokens)
    ranks = thd.sequence_order_to_cp_rank_order(x.to(DEVICE), cu_seqlens.to(DEVICE), 4)
    assert torch.equal(ranks.cpu(), thd.sequence_order_to_cp_rank_order(x, cu_seqlens, 4))
    assert torch.equal(thd.cp_rank_order_to_sequence_order(ranks, cu_seqlens.to(DEVICE), 4, tokens).cpu(), x)


@pytest.mark.gpu
@pytest.mark.hardware
def test_elements_past_31_bits() -> None:
    """Tensors with more than 2^31 elements: offsets have 64 bits."""
    cu_seqlens = offsets((300_000, 7, 240_000)).to(DEVICE)
    tokens, width = 540_007, 4096
    x = torch.empty(tokens, width, dtype=torch.int8, device=DEVICE)
    x.copy_((torch.arange(tokens, device=DEVICE) % 127)[:, None])
    assert x.numel() > 2**31
    ranks = thd.sequence_order_to_cp_rank_order(x, cu_seqlens, 2)
    indices = thd.get_partitioned_indices(cu_seqlens, tokens, 2, 1)
    there = ranks[-(-tokens // 2) :][: len(indices)]
    assert torch.equal(there[:, 0].long(), indices.long() % 127)
    assert torch.equal(there[:, -1], there[:, 0])
    assert torch.equal(thd.cp_rank_order_to_sequence_order(ranks, cu_seqlens, 2, tokens), x)


@pytest.mark.gpu
@pytest.mark.hardware
def test_in_a_cuda_graph() -> None:
    """A replay is right for other lengths of the same number of sequences. Nothing waits for the device."""
    slots, shape = offsets((40, 3, 21)).to(DEVICE), Shape(64, 3, 2, 1)
    x = torch.randn(64, 2, 8, device=DEVICE)

    def call():
        segments = thd_ops.segments(slots, None, shape, Mask(-1, 0))
        out = torch.empty(len(segments.key_rows), 2, 8, device=DEVICE)
        thd_ops.move_rows([x], [out], segments.key_rows)
        return thd.sequence_order_to_cp_rank_order(x, slots, 2), out, segments.cu_seqlens_k

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call()
    for lengths in ((1, 60, 2), (64, 0, 0), (0, 0, 5)):
        slots.copy_(offsets(lengths))
        graph.replay()
        for a, b in zip(got, call()):
            assert torch.equal(a, b)
