"""Moves of rows between ranks on a GPU: the kernels against plain torch on the CPU."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch

from jitrope import thd
from jitrope.base.partition import RULES
from jitrope.thd import ops as thd_ops
from jitrope.thd import reference
from jitrope.thd.shape import Shape

from .host.backend import DEVICE
from .test_thd import MASKS, MOVES, STEPS, TABLES, WIDTHS, Pack, offsets, rows, step_of, wanted_segments

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("a", "b"), [(1.0, math.nan), (math.nan, 1.0), (-math.inf, -math.inf), (0.0, math.inf)])
def test_a_step_that_is_no_number_stays_one(a: float, b: float) -> None:
    lse, step = torch.tensor([[0.0, a]], device=DEVICE), torch.tensor([[b]], device=DEVICE)
    thd.second_half_lse_correction(lse, step, torch.tensor([0, 2], device=DEVICE), lse_packed=True)
    want = torch.logaddexp(torch.tensor(a), torch.tensor(b))
    torch.testing.assert_close(lse[0, 1].cpu(), want, equal_nan=True)


def cuda(x):
    return None if x is None else x.to(DEVICE)


@contextlib.contextmanager
def no_wait():
    """Fail if anything waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("seed", range(12))
def test_tables(seed: int) -> None:
    pack = Pack(seed, cp_sizes=(1, 2, 3, 4, 8))
    slots = pack.slots.to(DEVICE)
    first = pack.shape._replace(cp_rank=0)
    for map, shape, size in (*((map, pack.shape, size) for map, size in TABLES), ("to_ranks", first, "all_rows")):
        count = getattr(shape, size)
        want = reference.table(pack.slots, map, count, shape)
        out = torch.empty(count, dtype=torch.int32, device=DEVICE)
        thd_ops.move(reference.Move([], [out], map, slots, shape=shape))
        assert torch.equal(out.cpu(), want), map


@pytest.mark.hardware
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("seed", range(4))
def test_segments(seed: int, mask: str) -> None:
    pack = Pack(seed, cp_sizes=(1, 2, 3, 4, 8))
    padded = pack.slots if pack.padded else None
    want = wanted_segments(pack.cu_seqlens, padded, pack.shape, MASKS[mask])
    on_gpu = pack.cu_seqlens.to(DEVICE), cuda(padded)
    with no_wait():
        got = thd_ops.segments(*on_gpu, pack.shape, MASKS[mask])
    for name, x in want._asdict().items():
        there = getattr(got, name)
        assert (x is None) == (there is None), name
        assert x is None or torch.equal(x, there.cpu()), name


@pytest.mark.hardware
@pytest.mark.parametrize("rule", RULES)
def test_exchanged_segments_of_thousands(rule: str) -> None:
    """More sequences than a block scans at a time, with a window, on every rank."""
    torch.manual_seed(0)
    lengths = [*torch.randint(0, 60, (3000,)).tolist(), 40_000, 30_000]
    cu_seqlens = offsets(lengths)
    for rank in range(4):
        for mask in (MASKS["causal-window"], MASKS["two-sided"]):
            shape = Shape(sum(lengths) + 3, len(lengths), 4, rank, rule)
            want = wanted_segments(cu_seqlens, None, shape, mask)
            got = thd_ops.segments(cu_seqlens.to(DEVICE), None, shape, mask)
            for name, x in want._asdict().items():
                assert x is None or torch.equal(x, getattr(got, name).cpu()), name


@pytest.mark.hardware
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("seed", range(8))
def test_rows(seed: int, move: str) -> None:
    torch.manual_seed(seed)
    pack = Pack(1000 * MOVES.index(move) + seed)
    draw, shape = pack.draw, pack.shape._replace(cp_rank=0)
    everyone = shape.cp_size * shape.capacity
    dtype = draw.choice((torch.bfloat16, torch.float16, torch.float32, *((torch.int8,) if move != "sum" else ())))
    count = {"to_ranks": everyone, "stay": pack.tokens + 3, "table": 70, "sum": 33}.get(move, pack.tokens)
    widths = [draw.choice(WIDTHS) for _ in range(1 if move == "tail" else draw.choice((1, 2)))]
    inputs = [rows(draw, everyone if move == "to_sequences" else pack.tokens, width, dtype) for width in widths]
    outputs = [torch.full((count, *width), 77, dtype=dtype) for width in widths]
    table = lengths = None
    if move in ("table", "sum"):
        table = torch.randint(-1, pack.tokens, (count,) if move == "table" else (draw.choice((1, 2, 5)), count)).int()
    if move == "valid":
        lengths = pack.cu_seqlens
    if move == "tail":
        inputs = outputs
    map = "table" if move == "sum" else move
    there = [x.to(DEVICE) for x in outputs]
    given = there if move == "tail" else [x.to(DEVICE) for x in inputs]
    on_gpu = [cuda(x) for x in (pack.slots, lengths, table)]
    with no_wait():
        torch.ops.jitrope.thd_rows(given, there, map, *on_gpu, *shape)
    torch.ops.jitrope.thd_rows(inputs, outputs, map, pack.slots, lengths, table, *shape)
    for out, want in zip(there, outputs):
        assert torch.equal(out.cpu(), want)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: "-".join(step))
@pytest.mark.parametrize("seed", range(4))
def test_corrections(seed: int, step: tuple[str, str, str]) -> None:
    cu_seqlens, packed, t, tensors = step_of(10 * STEPS.index(step) + seed, *step)
    there = [cuda(x) for x in tensors]
    torch.ops.jitrope.thd_correct(*step, packed, cu_seqlens.to(DEVICE), t, *there)
    torch.ops.jitrope.thd_correct(*step, packed, cu_seqlens, t, *tensors)
    for got, want in zip(there, tensors):
        if got is not None:
            rtol = 2**-7 if got.dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(got.cpu(), want, rtol=rtol, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("name", ["valid", "grad", "out", "lse"])
def test_writes_are_seen_by_autograd(name: str) -> None:
    """A tensor that a backward needs must not change."""
    cu_seqlens, lse = offsets((6, 4)).to(DEVICE), torch.zeros(1, 10, device=DEVICE)
    leaf = torch.ones((1, 10) if name == "lse" else (10, 1, 1), device=DEVICE, requires_grad=True)
    x = leaf * 1
    squares, step = (x * x).sum(), torch.ones_like(x)
    with torch.no_grad():
        if name == "valid":
            thd.copy_valid_tokens_from_per_split_to_rank_local(x, step, cu_seqlens, cu_seqlens)
        elif name == "grad":
            thd.grad_correction(x, step, cu_seqlens, "copy", "add")
        elif name == "out":
            thd.out_correction(x, step, lse, lse, cu_seqlens, only_second_half=False, lse_packed=True)
        else:
            thd.second_half_lse_correction(x, lse[:, :5].contiguous(), cu_seqlens, lse_packed=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()


@pytest.mark.hardware
@pytest.mark.parametrize("count", [1, 2401, 20_000, 300_000])
def test_any_number_of_sequences(count: int) -> None:
    """TransformerEngine has a limit of 12,287 sequences, because it keeps offsets in shared memory."""
    torch.manual_seed(0)
    lengths = torch.randint(0, 2 * 300_000 // count + 1, (count,)).tolist()
    cu_seqlens = offsets(lengths)
    tokens = sum(lengths) + 7
    x = torch.arange(tokens)
    ranks = thd.sequence_order_to_cp_rank_order(x.to(DEVICE), cu_seqlens.to(DEVICE), 4)
    assert torch.equal(ranks.cpu(), thd.sequence_order_to_cp_rank_order(x, cu_seqlens, 4))
    assert torch.equal(thd.cp_rank_order_to_sequence_order(ranks, cu_seqlens.to(DEVICE), 4, tokens).cpu(), x)


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
    back = thd.cp_rank_order_to_sequence_order(ranks, cu_seqlens, 2, tokens)
    assert torch.equal(back, x)


@pytest.mark.hardware
def test_in_a_cuda_graph() -> None:
    """A replay is right for other lengths of the same number of sequences."""
    slots, shape = offsets((40, 3, 21)).to(DEVICE), Shape(64, 3, 2, 1)
    x = torch.randn(64, 2, 8, device=DEVICE)

    def call():
        segments = thd_ops.segments(slots, None, shape, MASKS["causal"])
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


@pytest.mark.hardware
def test_gradients_and_streams() -> None:
    cu_seqlens = offsets((137, 2041, 89)).to(DEVICE)
    x = torch.randn(2267, 4, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        ranks = thd.sequence_order_to_cp_rank_order(x, cu_seqlens, 4)
        weight = torch.randn_like(ranks)
        (grad,) = torch.autograd.grad((ranks.float() * weight).sum(), x)
        want = thd.cp_rank_order_to_sequence_order(weight, cu_seqlens, 4, 2267)
    torch.cuda.synchronize()
    assert torch.equal(grad, want)
