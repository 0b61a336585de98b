"""All-gather attention on a CUDA device: every backend, with all ranks in one process, and over NCCL."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import jitrope
from jitrope.context_parallel import Partition, Rope, Schedule, all_gather_attention
from jitrope.context_parallel.attention import (
    Call,
    attend,
    attend_backward,
    pack,
    pack_gradients,
    unpack,
    unpack_gradients,
)
from jitrope.context_parallel.backends import BACKENDS, Case, Gradients, Math, Result, Varlen, _module, choose

from .test_context_parallel import (
    CASES,
    COMPILED,
    Attention,
    Made,
    check_attention,
    check_compiled,
    check_one_refuses_for_all,
    make,
)

CLOSE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}


# ---- all ranks in one process ------------------------------------------------------------------------


def routed(sent: list[Tensor], splits: list[list[int]]) -> list[Tensor]:
    """The rows that each rank receives from all: splits[source][rank] rows each."""
    parts = [rows.split(split) for rows, split in zip(sent, splits)]
    return [torch.cat(to_rank) for to_rank in zip(*parts)]


def ranks_of(case: Attention, made: Made, cp_size: int, device: str) -> list[tuple[Call, list[Tensor]]]:
    """Every rank's call, and its rows of q, k, v and dout."""
    pack_ = case.pack
    real, padded = (None if x is None else x.to(device) for x in (pack_.cu_seqlens, pack_.cu_seqlens_padded))
    ranks = []
    for rank in range(cp_size):
        schedule = schedule_of(case, cp_size, rank, real, padded)
        sizes = torch.device(device), case.dtype, *case.heads
        asked = Case(*sizes, schedule.mask, schedule.most_segments, lse=True)
        call = Call(schedule, choose(case.backend, asked), asked, made.scale)
        part = partition_of(case, cp_size, rank)
        ranks.append((call, [part.shard(x).to(device) for x in made.inputs]))
    return ranks


def simulate(case: Attention, made: Made, cp_size: int, device: str) -> list[Tensor]:
    """out, dq, dk, dv and lse of the whole batch, by the steps of `all_gather_attention`."""
    ranks = ranks_of(case, made, cp_size, device)
    calls = [call for call, _ in ranks]
    sent = [pack(k, v, call) for call, (_, k, v, _) in ranks]
    if calls[0].schedule.exchange is None:
        gathered = [torch.cat(sent)] * cp_size
    else:
        gathered = routed(sent, [call.schedule.sent for call in calls])
    outputs, back = [], []
    for (call, (q, _, _, dout)), rows in zip(ranks, gathered):
        keys, values = unpack(rows, call)
        result = attend(q, keys, values, call)
        dq, *gradients = attend_backward(dout, q, keys, values, result, call)
        back.append(pack_gradients(*gradients, call))
        outputs.append([result.out, dq, result.lse])
    for x, call, rows in zip(outputs, calls, routed(back, [call.schedule.received for call in calls])):
        x[2:2] = unpack_gradients(rows, call)
    return [together(x, case) for x in zip(*outputs)]


def schedule_of(case: Attention, cp_size: int, rank: int, real: Tensor, padded: Tensor | None) -> Schedule:
    ranks = {"cp_size": cp_size, "cp_rank": rank, "causal": case.causal, "window": case.window, "rule": case.rule}
    longest = max(1, *case.pack.pads)
    return Schedule(real, case.pack.tokens, cu_seqlens_padded=padded, max_seqlen=longest, **ranks)


def partition_of(case: Attention, cp_size: int, rank: int) -> Partition:
    return Partition(case.pack.offsets, case.pack.tokens, cp_size=cp_size, cp_rank=rank, rule=case.rule)


def together(x: tuple[Tensor, ...], case: Attention) -> Tensor:
    """All ranks' rows in the order of the batch."""
    out = torch.empty(case.pack.tokens, *x[0].shape[1:], dtype=x[0].dtype)
    for rank, rows in enumerate(x):
        out[partition_of(case, len(x), rank).indices.long()] = rows.detach().cpu()
    return out


def check(case: Attention, cp_size: int, device: str) -> None:
    """Compare with the fp64 oracle; padding is exactly zero."""
    made, atol = make(case), CLOSE[case.dtype]
    got = simulate(case, made, cp_size, device)
    for name, x, want in zip(("out", "dq", "dk", "dv"), got, made.want):
        assert not x[made.spare].any(), f"{name}: padding is not zero"
        torch.testing.assert_close(x.double(), want, rtol=atol, atol=atol, msg=lambda t, name=name: f"{name}: {t}")
    torch.testing.assert_close(got[4].double(), made.want[4], rtol=0, atol=max(1e-5, atol / 4))


# Each mask, rule and kind of padding once, with lengths that no number of chunks divides.
LONG = (137, 0, 641, 89, 1, 3)
GQA = (4, 2, 64, 64)
CASES_OF_SEGMENTS = [
    Attention("causal", LONG),
    Attention("full", LONG, causal=False),
    Attention("window", LONG, window=(100, 0)),
    Attention("two-sided", LONG, causal=False, window=(70, 50)),
    Attention("to the right alone", LONG, causal=False, window=(-1, 60)),
    Attention("to the left and all behind", LONG, causal=False, window=(60, -1)),
    Attention("short window", (700,), window=(9, 0)),
    Attention("short window, two-sided", (700, 100), causal=False, window=(8, 12)),
    Attention("D1: unequal", (36, 16), causal=False, window=(8, 8)),
    Attention("D1: one alone", (1032,), causal=False, window=(200, 200)),
    Attention("contiguous", LONG, rule="contiguous"),
    Attention("contiguous, full", LONG, rule="contiguous", causal=False, pads=64),
    Attention("padded", LONG, pads=64),
    Attention("padded, full", LONG, pads=64, causal=False, spare=5),
    Attention("padded, window", LONG, pads=64, window=(30, 0)),
    Attention("padded, two-sided", LONG, pads=64, causal=False, window=(30, 20), spare=7),
    Attention("spare", LONG, spare=130),
    Attention("one query a segment", (3, 2, 4, 0, 4), spare=3),
    Attention("all padding", (0, 0), pads=(9, 16)),
    Attention("MQA", LONG, heads=(4, 1, 64, 64)),
    Attention("MHA, D 128", LONG, heads=(2, 2, 128, 128)),
]
REAL = Attention("137, 2041, 89", (137, 2041, 89))


def small(case: Attention, dtype: torch.dtype, backend: str) -> Attention:
    heads = GQA if case.heads == (4, 2, 8, 8) else case.heads
    return case._replace(dtype=dtype, backend=backend, heads=heads)


@pytest.fixture
def version(request: pytest.FixtureRequest) -> Iterator[str]:
    """A version of FlashAttention, active in torch. Skips one whose package is not installed."""
    if request.param == "FA2":
        yield request.param
        return
    try:
        torch.nn.attention.activate_flash_attention_impl(request.param)
    except Exception as error:  # this torch has no registry, the package is not there, or it is not for this GPU
        pytest.skip(f"{request.param}: {error}")
    yield request.param
    torch.nn.attention.restore_flash_attention_impl()


def taken_or_skipped(case: Attention, installed: bool) -> None:
    """Skip a backend that this torch does not have; all others must accept the case."""
    hq, hk, d, dv = case.heads
    why = BACKENDS[case.backend].refuses(Case(torch.device("cuda"), case.dtype, hq, hk, d, dv, case.mask))
    if why is not None and not installed:
        pytest.skip(f"{case.backend}: {why}")
    assert why is None


class Poisoned(Math):
    """NaN in all unspecified rows."""

    name = "poisoned"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, case: Case) -> Result:
        result = super().forward(q, k, v, varlen, case)
        result.out[varlen.cu_seqlens_q[-1] :] = torch.nan
        return result

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Result, varlen: Varlen) -> Gradients:
        gradients = super().backward(dout, q, k, v, result, varlen)
        for x, offsets in zip(gradients, (varlen.cu_seqlens_q, varlen.cu_seqlens_k, varlen.cu_seqlens_k)):
            x[offsets[-1] :] = torch.nan
        return gradients


@pytest.mark.parametrize("cp_size", [3, 8])
@pytest.mark.parametrize("case", CASES_OF_SEGMENTS[:19], ids=lambda case: case.name)
def test_steps_on_cpu(case: Attention, cp_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps without collectives, in fp64, with a backend that leaves rows of no segment undefined."""
    monkeypatch.setitem(BACKENDS, "poisoned", Poisoned())
    lengths = tuple(-(-n // 8) for n in case.lengths)
    check(case._replace(dtype=torch.float64, lengths=lengths, backend="poisoned"), cp_size, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("cp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("case", CASES_OF_SEGMENTS, ids=lambda case: case.name)
@pytest.mark.parametrize("version", ["FA2", "FA3", "FA4"], indirect=True)
def test_flash(version: str, case: Attention, cp_size: int) -> None:
    """bf16 within 2e-2, with GQA, empty segments and rows of no segment."""
    case = small(case, torch.bfloat16, "flash")
    taken_or_skipped(case, installed=version == "FA2")
    check(case, cp_size, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [8, 40, 64, 96, 128, 192, 256])
def test_flash_head_sizes_in_fp16(head_dim: int) -> None:
    """fp16 within 5e-3, at every head size with a kernel."""
    case = Attention("sizes", LONG, heads=(4, 2, head_dim, head_dim), dtype=torch.float16, backend="flash", pads=8)
    check(case, 2, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "dtype"), [("flash", torch.bfloat16), ("flash", torch.float16), ("math", torch.float32)]
)
@pytest.mark.parametrize("cp_size", [2, 4])
def test_lengths_that_nothing_divides(backend: str, dtype: torch.dtype, cp_size: int) -> None:
    check(REAL._replace(heads=(4, 2, 128, 128), dtype=dtype, backend=backend), cp_size, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES_OF_SEGMENTS, ids=lambda case: case.name)
def test_math(case: Attention, dtype: torch.dtype) -> None:
    check(small(case, dtype, "math"), 4, "cuda")


FLEX = [
    *(small(case, torch.bfloat16, "flex") for case in CASES_OF_SEGMENTS[:6]),
    *(small(case, torch.bfloat16, "flex") for case in CASES_OF_SEGMENTS[12:18]),
    Attention("fp16", LONG, heads=GQA, dtype=torch.float16, backend="flex"),
    Attention("Dv smaller", LONG, heads=(4, 2, 192, 128), dtype=torch.bfloat16, backend="flex", pads=8),
    Attention("Dv larger", LONG, heads=(4, 4, 32, 64), dtype=torch.bfloat16, backend="flex"),
    Attention("no power of two", LONG, heads=(3, 1, 80, 80), dtype=torch.bfloat16, backend="flex"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", FLEX, ids=lambda case: case.name)
def test_flex(case: Attention) -> None:
    """Compiled, with other head sizes for v."""
    taken_or_skipped(case, installed=hasattr(_module(), "AuxRequest"))
    torch._dynamo.reset()  # one head size each: torch stops recompiling a function after a few
    check(case, 2, "cuda")


# ---- one call ----------------------------------------------------------------------------------------


def local(case: Attention) -> list[Tensor]:
    return [x.cuda().requires_grad_() for x in make(case).inputs]


@pytest.mark.gpu
def test_max_logit() -> None:
    """ "auto" skips a backend without max_logit, and equals the oracle."""
    case = Attention("max", LONG, heads=GQA, dtype=torch.bfloat16)
    q, k, v, dout = local(case)
    out, max_logit = all_gather_attention(q, k, v, case.schedule("cuda"), return_max_logit=True)
    out.backward(dout)
    made = make(case)
    torch.testing.assert_close(max_logit.cpu().double(), made.want[5], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(q.grad.cpu().double(), made.want[1], rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [CASES_OF_SEGMENTS[i] for i in (0, 1, 3, 6)], ids=lambda case: case.name)
def test_no_wait_for_the_device(case: Attention) -> None:
    """In a whole step with its tables, the host reads nothing."""
    case = small(case, torch.bfloat16, "flash")
    (q, k, v, dout), cu = local(case), case.pack.cu_seqlens.cuda()

    def step() -> None:
        schedule = Schedule(cu, case.pack.tokens, causal=case.causal, window=case.window)
        all_gather_attention(q, k, v, schedule, return_lse=True)[0].backward(dout)

    step()  # kernels are compiled
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_graph_of_other_lengths() -> None:
    """A captured step is right for later lengths with the same number of sequences and rows."""
    first = Attention("captured", (100, 200, 50), heads=GQA, dtype=torch.bfloat16, spare=30)
    then = first._replace(name="replayed", lengths=(7, 0, 310), spare=63)
    (q, k, v, dout), cu = local(first), first.pack.cu_seqlens.cuda()
    tensors = [q, k, v]

    def step() -> tuple[Tensor, ...]:
        out = all_gather_attention(q, k, v, Schedule(cu, first.pack.tokens), backend="flash")
        return (out, *torch.autograd.grad(out, tensors, dout))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for case in (first, then):
        made = make(case)
        with torch.no_grad():
            for x, new in zip((q, k, v, dout), made.inputs):
                x.copy_(new)
        cu.copy_(case.pack.cu_seqlens)
        graph.replay()
        for name, x, want in zip(("out", "dq", "dk", "dv"), captured, made.want):
            assert not x[made.spare.cuda()].any(), name
            torch.testing.assert_close(x.cpu().double(), want, rtol=2e-2, atol=2e-2)


# ---- real ranks --------------------------------------------------------------------------------------


NCCL = [
    case._replace(dtype=torch.bfloat16, heads=(8, 4, 64, 64), backend="flash")
    for case in CASES
    if case.heads == (4, 2, 8, 8) and case.backend == "auto" and case.scale is None
] + [
    Attention(
        "groups, long", LONG, heads=(8, 4, 64, 64), dtype=torch.bfloat16, backend="flash", options={"head_groups": 4}
    )
]


def process(rank: int, size: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/init", rank=rank, world_size=size)
    failed = []
    compiled = [(check_compiled, case) for case in NCCL if case.name in COMPILED]
    for check, *given in [*((check_attention, case) for case in NCCL), *compiled, (check_one_refuses_for_all,)]:
        try:
            check(*given, f"cuda:{rank}")
        except Exception as error:
            failed.append(f"rank {rank}, {check.__name__}, {given}: {type(error).__name__}: {error}")
        dist.barrier(device_ids=[rank])
    Path(folder, f"rank{rank}").write_text("\n".join(failed))
    dist.destroy_process_group()


@pytest.mark.gpu
def test_on_processes_over_nccl(tmp_path: Path) -> None:
    """The cases of the gloo test, in bf16, one GPU for each rank, some compiled and exported; and what all refuse."""
    size = min(4, torch.cuda.device_count())
    if size < 2:
        pytest.skip("this machine has one GPU; NCCL takes one for each process")
    torch.multiprocessing.spawn(process, (size, str(tmp_path)), size)
    failed = [(tmp_path / f"rank{rank}").read_text() for rank in range(size)]
    assert not any(failed), "\n".join(failed)


@pytest.mark.gpu
@pytest.mark.parametrize("spare", [0, 5])
def test_rope_on_the_way(spare: int) -> None:
    """One launch rotates q and k and packs k and v, with the bits of apply_rope followed by attention."""
    lengths = (137, 2041, 0, 89)
    tokens = sum(lengths) + spare
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(tokens, heads, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for heads in (8, 2, 2)
    )
    freqs = torch.outer(torch.arange(2041.0, device="cuda"), torch.rand(32, device="cuda"))
    dout = torch.randn_like(q)
    schedule = Schedule(cu_seqlens, tokens, max_seqlen=2041)
    rotated = jitrope.apply_rope(q, k, freqs=freqs, positions=jitrope.Packed(cu_seqlens))
    want = all_gather_attention(*rotated, v, schedule)
    wants = torch.autograd.grad(want, (q, k, v), dout)
    out = all_gather_attention(q, k, v, schedule, rope=Rope(freqs=freqs))
    assert torch.equal(out, want)
    for got, expected in zip(torch.autograd.grad(out, (q, k, v), dout), wants):
        torch.testing.assert_close(got, expected, rtol=2**-6, atol=2**-6 * float(expected.abs().max()))
