"""All-gather attention against fp64 with an explicit mask: one process, several, and all ranks in one process."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode

from jitrope import InvalidInput
from jitrope.base.partition import RULES
from jitrope.context_parallel import Rope, Schedule, all_gather_attention
from jitrope.context_parallel import attention as steps
from jitrope.context_parallel.backends import BACKENDS, Case, Gradients, Math, Result, _module, choose

from ..ranks import GROUPS, on_eight, on_gpus, on_ranks
from .batches import CASES, CLOSE, Batch, assert_attention, assert_rows, made, random_call, schedule_of

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.mark.parametrize("name", CASES)
def test_attention_without_process_groups(name: str) -> None:
    """A group of one process works without torch.distributed."""
    assert not dist.is_initialized()
    assert_attention(CASES[name])


@pytest.mark.parametrize(("dtype", "other", "groups"), [(torch.float32, BF16, 1), (BF16, FP16, 2)])
def test_autocast_changes_nothing(dtype: torch.dtype, other: torch.dtype, groups: int) -> None:
    q, k, v = (torch.randn(10, 2, 8, dtype=dtype, requires_grad=True) for _ in range(3))
    schedule, found = Schedule(torch.tensor([0, 6, 10]), 10), []
    for on in (False, True):
        with torch.autocast("cpu", other, enabled=on):
            out = all_gather_attention(q, k, v, schedule, head_groups=groups)
            found.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    assert all(torch.equal(*both) for both in zip(*found))


@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
def test_sequences_without_tokens(layout: str) -> None:
    shape = (2, 0) if layout == "bshd" else (0, 2)
    q, k, v = (torch.randn(*shape, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    schedule = Schedule.fixed(2, 0, "cpu") if layout == "sbhd" else Schedule(torch.zeros(3, dtype=torch.int32), 0)
    out, lse, most = all_gather_attention(q, k, v, schedule, layout=layout, return_lse=True, return_max_logit=True)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:-1])
    assert most.tolist() == [-torch.inf] * 4
    out.sum().backward()
    assert [x.grad.shape for x in (q, k, v)] == [x.shape for x in (q, k, v)]


@pytest.mark.slow
@pytest.mark.parametrize("inside", [False, True])
def test_compiled_attention_with_a_new_schedule(inside: bool) -> None:
    q, k = (torch.randn(10, heads, 16, requires_grad=True) for heads in (4, 2))
    of, found = partial(Schedule, torch.tensor([0, 3, 10]), 10), []
    schedule = of()
    for compile_it in (partial, partial(torch.compile, backend="aot_eager")):
        call = compile_it(lambda: all_gather_attention(q, k, k, of() if inside else schedule) * 2)
        found.append((out := call(), *torch.autograd.grad(out.square().sum(), (q, k))))
    torch.testing.assert_close(*found)


def test_a_check_in_a_compiled_function_is_refused() -> None:
    q, schedule = torch.randn(3, 10, 4, 8), Schedule(torch.tensor([0, 7, 10]), 10)
    checked = torch.compile(lambda *q: all_gather_attention(*q, schedule, check=True), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="check=True waits for the device"):
        checked(*q)


@on_ranks
@pytest.mark.parametrize("name", CASES)
def test_attention(name: str) -> None:
    for group in GROUPS:
        assert_attention(CASES[name], group)


@pytest.mark.tenth
@on_eight
@pytest.mark.parametrize("seed", [seed for seed in range(1143) if seed % 8])  # 1,000 batches
def test_random_calls(seed: int) -> None:
    """On 2 to 8 ranks."""
    batch, cp_size = random_call(seed)
    for group in GROUPS:
        if dist.get_world_size(group) == cp_size:
            assert_attention(batch, group)


@on_ranks
@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
def test_fixed(layout: str) -> None:
    """A batch of sequences of one length, with an odd number of rows on each rank."""
    for group in GROUPS:
        size = dist.get_world_size(group)
        inputs, wants = made(Batch((5 * size,) * 3, window=(6, 2)))
        schedule = Schedule.fixed(3, 5 * size, "cpu", group=group, causal=False, window=(6, 2))
        cut = [schedule.shard(x).unflatten(0, (3, 5)) for x in (*inputs, *wants[:5])]
        cut = cut if layout == "bshd" else [x.transpose(0, 1).contiguous() for x in cut]
        q, k, v, dout = (x.requires_grad_() for x in cut[:4])
        out, lse = all_gather_attention(q, k, v, schedule, layout=layout, return_lse=True)
        found = (out, *torch.autograd.grad(out, (q, k, v), dout), lse)
        for name, x, want in zip(("out", "dq", "dk", "dv", "lse"), found, cut[4:]):
            assert_rows(x, want, None, 1e-5 if name == "lse" else 1e-10, name)


@on_ranks
def test_one_schedule_serves_many_calls() -> None:
    """With gradients and without."""
    batch = Batch((37, 0, 141, 29, 1, 3), window=(5, 5))
    (inputs, wants), schedule = made(batch), schedule_of(batch)
    q, k, v, _ = (schedule.shard(x) for x in inputs)
    with torch.inference_mode():
        assert_rows(all_gather_attention(q, k, v, schedule), schedule.shard(wants[0]), None, 1e-10, "")
    all_gather_attention(q.requires_grad_(), k, v, schedule).sum().backward()
    assert q.grad is not None
    assert k.grad is None


@on_ranks
def test_collectives() -> None:
    """Keys and values go in one collective, and their gradients in one. One rank alone has no collectives."""
    for name, forward, backward in (
        ("causal", {"all_gather_into_tensor": 1}, {"all_gather_into_tensor": 1, "all_to_all_single": 1}),
        ("kept", {"all_gather_into_tensor": 1}, {"all_to_all_single": 1}),
        ("groups", {"all_gather_into_tensor": 2}, {"all_gather_into_tensor": 2, "all_to_all_single": 2}),
        ("one long, short window", {"all_to_all_single": 1}, {"all_to_all_single": 2}),
    ):
        for group in GROUPS:
            schedule = schedule_of(CASES[name], group=group)
            q, k, v, dout = (schedule.shard(x).requires_grad_() for x in made(CASES[name])[0])
            with CommDebugMode() as there:
                out = all_gather_attention(q, k, v, schedule, **CASES[name].options)
            with CommDebugMode() as back:
                out.backward(dout)
            for mode, want in ((there, forward), (back, backward)):
                got = {str(op).split(".")[-1]: n for op, n in mode.get_comm_counts().items() if n}
                assert got == (want if dist.get_world_size(group) > 1 else {}), (name, got)


@on_ranks
def test_differences_between_ranks_are_refused() -> None:
    """Also wrong lengths, by `check`, on every rank. The group still works then."""
    rank, tokens, q = dist.get_rank(), 32, torch.randn(8, 2, 8)
    good, given, ascend = torch.tensor([0, 3, tokens]), "cu_seqlens", "it must ascend from 0"
    padded = {given: torch.tensor([0, 4, 5]), "cu_seqlens_padded": torch.tensor([0, 3, 6])}
    faults: list[tuple[str, dict[str, Any]]] = [
        (rf"cu_seqlens is \[0, 5, 4\]; {ascend}", {given: torch.tensor([0, 5, 4])}),
        (rf"cu_seqlens is \[1, 5, 6\]; {ascend}", {given: torch.tensor([1, 5, 6])}),
        (f"{ascend} to at most 32", {given: torch.tensor([0, 3, 33])}),
        *[("more than max_seqlen=4", {"max_seqlen": 4}), ("longer in cu_seqlens than", padded)],
        (r"cu_seqlens\[1\] differs between ranks: \[3, 4", {given: torch.tensor([0, 3 + rank, tokens])}),
        (r"len\(cu_seqlens\) differs", {given: torch.tensor([0, 3] + [tokens] * (1 + rank % 2))}),
        *[("left differs", {"window": (rank, 0)}), ("rule differs", {"rule": RULES[rank % 2]})],
    ]
    for message, words in faults:
        with pytest.raises(InvalidInput, match=message):
            all_gather_attention(q, q, q, Schedule(**{given: good, "tokens": tokens, **words}), check=True)
    schedule, rope = Schedule(good, tokens), Rope(freqs=torch.ones(tokens, 4))
    wrong = Schedule(torch.tensor([0, 3 + (tokens if rank else 0), tokens]), tokens, rule="contiguous")
    with pytest.raises(InvalidInput, match="must ascend from 0" if rank else "rank 1 refuses its arguments"):
        all_gather_attention(q, q, q, wrong, rope=rope, check=True)
    for message, words in (
        (r"softmax_scale differs between ranks: \[0.5, 1.5", {"softmax_scale": 0.5 + rank}),
        (r"rope \(rows of its tables\) differs between ranks: \[-1, ", {"rope": rope if rank else None}),
        (r"head_groups differs between ranks: \[1, 2", {"head_groups": 1 + rank % 2}),
    ):
        with pytest.raises(InvalidInput, match=message):
            all_gather_attention(q, q, q, schedule, check=True, **words)
    all_gather_attention(q, q, q, schedule, check=True)
    alone = Schedule(torch.tensor([0, 8]), 8, cp_size=1, cp_rank=0)
    with pytest.raises(InvalidInput, match="the schedule has no group, so check=True cannot ask"):
        all_gather_attention(q, q, q, alone, check=True)  # the other ranks would wait for this one
    all_gather_attention(q, q, q, alone)


@on_ranks
@pytest.mark.parametrize("device", ["cpu"])
def test_one_rank_refuses_for_all(device: str) -> None:
    """With check=True every rank refuses what rank 0 refuses, for any reason."""
    rank, size = dist.get_rank(), dist.get_world_size()
    q = torch.randn(4, 2, 8, device=device)
    schedule = Schedule(torch.tensor([0, 4 * size], device=device), 4 * size)
    rope, short = (Rope(freqs=torch.ones(4 * size - n, 4, device=device)) for n in range(2))
    odd: list[tuple[str, dict[str, Any]]] = [
        *[("q has 3 rows", dict.fromkeys("qkv", q[:3])), ("v is None", {"v": None})],
        *[("layout is 'x'", {"layout": "x"}), ("head_groups is 0", {"head_groups": 0})],
        *[("backend is 'best'", {"backend": "best"}), ("backend 'flash' cannot do this", {"backend": "flash"})],
        *[("pass cos and sin, or one of", {"rope": Rope()}), ("q is a tensor of shape", {"q": q.to_sparse()})],
    ]
    for message, words in odd:
        words = {**dict.fromkeys("qkv", q), **({} if rank else words)}
        with pytest.raises(InvalidInput, match="rank 0 refuses its arguments" if rank else message):
            all_gather_attention(**words, schedule=schedule, check=True)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr("jitrope.context_parallel.rotary.resolved", lambda *_: 1 / 0)
        with pytest.raises(InvalidInput if rank else ZeroDivisionError, match="rank 0 refuses" if rank else "division"):
            all_gather_attention(q, q, q, schedule, rope=rope, check=True)
    with pytest.raises(InvalidInput, match=f"rope's tables have {4 * size - 1} rows, but a sequence has {4 * size}"):
        all_gather_attention(q, q, q, schedule, rope=short, check=True)


def assert_compiled(batch: Batch, group: Any = None, device: str = "cpu") -> None:
    """torch.compile of the whole call, with gradients, and export: the results and gradients of the eager call."""
    schedule, backend = schedule_of(batch, device, group=group), batch.options.get("backend", "auto")
    q, k, v, dout = (schedule.shard(x.to(device)).requires_grad_() for x in made(batch)[0])
    asked = {"return_lse": True, "return_max_logit": backend == "auto", **batch.options}
    call = partial(all_gather_attention, schedule=schedule, **asked)
    forward = lambda _, *given: [x if n else schedule.unshard(x) for n, x in enumerate(call(*given))]  # noqa: E731
    run = type("Run", (torch.nn.Module,), {"forward": forward})()
    torch._dynamo.reset()
    exported = torch.export.export(run, (q.detach(), k.detach(), v.detach())).module()
    results = [f(q, k, v) for f in (run, torch.compile(run, backend="aot_eager", fullgraph=True), exported)]
    every, bound = schedule.unshard(dout.detach()), 1e-12 if batch.dtype == torch.float64 else 2e-2
    grads = [torch.autograd.grad(out, (q, k, v), every) for out, *_ in results[:2]]
    for got in results[1:]:
        torch.testing.assert_close(got, results[0], rtol=0, atol=bound, equal_nan=True)
    torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=bound)


# By two ranks, and by all four.
COMPILED = {"one long, short window": 1, "kept": 1, "groups": -1, "more ranks than tokens": -1, "two-sided": 1}


@pytest.mark.tenth
@on_ranks
@pytest.mark.parametrize("name", COMPILED)
def test_compiled(name: str) -> None:
    assert_compiled(CASES[name], GROUPS[COMPILED[name]])


# ---- all ranks in one process ------------------------------------------------------------------------


def assert_steps(batch: Batch, cp_size: int, device: str) -> None:
    """The steps of `all_gather_attention` for all ranks, without collectives; padding is exactly zero."""
    (inputs, wants), ranks, sent, back, outputs = made(batch), [], [], [], []
    for rank in range(cp_size):
        cut = {"cp_size": cp_size, "cp_rank": rank, "max_seqlen": max(1, *batch.slots)}
        schedule = schedule_of(batch, device, **cut)
        case = Case(torch.device(device), batch.dtype, *batch.heads, batch.mask, schedule.most_segments, lse=True)
        call = steps.Call(schedule, choose(batch.options["backend"], case), case, batch.heads[2] ** -0.5)
        q, k, v, dout = (schedule.shard(x.to(device)) for x in inputs)
        ranks.append((call, q, dout))
        rows = steps.pack(k, v, call)
        sent.append([rows] * cp_size if schedule.exchange is None else rows.split(schedule.sent))
    for (call, q, dout), *rows in zip(ranks, *sent):
        keys, values = steps.unpack(torch.cat(rows), call)
        result = steps.attend(q, keys, values, call)
        dq, *gradients = steps.attend_backward(dout, q, keys, values, result, call)
        back.append(steps.pack_gradients(*gradients, call).split(call.schedule.received))
        outputs.append([result.out, dq, result.lse])
    for (call, *_), some, *rows in zip(ranks, outputs, *back):
        some[2:2] = steps.unpack_gradients(torch.cat(rows), call)
    order = torch.cat([call.schedule.indices for call, *_ in ranks]).argsort()
    for name, x, want in zip(("out", "dq", "dk", "dv", "lse"), zip(*outputs), wants):
        together, atol = torch.cat(x)[order].cpu(), CLOSE[batch.dtype]
        assert name == "lse" or not together[batch.sequence < 0].any(), f"{name}: padding is not zero"
        close = {"rtol": 0, "atol": max(1e-5, atol / 4)} if name == "lse" else {"rtol": atol, "atol": atol}
        torch.testing.assert_close(together.double(), want.double(), **close, msg=lambda t, n=name: f"{n}: {t}")


# Every mask, rule and kind of padding.
PLAIN = {name: x for name, x in CASES.items() if x.heads == (4, 2, 8, 8) and not x.options and x.dtype == torch.float64}


class Poisoned(Math):
    """NaN in all unspecified rows."""

    def forward(self, *given: Any) -> Result:
        result, varlen = super().forward(*given), given[3]
        result.out[varlen.cu_seqlens_q[-1] :] = torch.nan
        return result

    def backward(self, *given: Any) -> Gradients:
        gradients, varlen = super().backward(*given), given[5]
        for x, offsets in zip(gradients, (varlen.cu_seqlens_q, varlen.cu_seqlens_k, varlen.cu_seqlens_k)):
            x[offsets[-1] :] = torch.nan
        return gradients


@pytest.mark.parametrize("cp_size", [3, 8])
@pytest.mark.parametrize("name", PLAIN)
def test_rows_that_a_backend_leaves_undefined(name: str, cp_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "poisoned", Poisoned())
    assert_steps(replace(PLAIN[name], options={"backend": "poisoned"}), cp_size, "cpu")


BACKENDS_ON_GPU = {  # and the numbers of ranks
    **{(version, BF16): (1, 2, 4, 8) for version in ("flash", "FA3", "FA4")},
    **{("math", dtype): (4,) for dtype in (torch.float32, BF16)},
    ("flex", BF16): (2,),
}
LONG = Batch((137, 0, 641, 89, 1, 3), pads=8)


@pytest.mark.gpu
@pytest.mark.hardware
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_compiled_by_inductor(dtype: torch.dtype) -> None:
    """With flash, and with flex."""
    torch._dynamo.reset()
    q, k = (torch.randn(1000, heads, 64, device="cuda", dtype=dtype) for heads in (4, 2))
    schedule = Schedule(torch.tensor([0, 300, 1000], device="cuda"), 1000, window=(64, 0))
    call = partial(all_gather_attention, schedule=schedule)
    torch.testing.assert_close(torch.compile(call, fullgraph=True)(q, k, k), call(q, k, k))


@pytest.mark.slow
def test_compiled_flex() -> None:
    q, k = (torch.randn(10, heads, 16) for heads in (4, 2))
    call = partial(all_gather_attention, schedule=Schedule(torch.tensor([0, 3, 10]), 10, window=(4, 0)))
    compiled = torch.compile(partial(call, backend="flex"), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, k), call(q, k, k))


@pytest.mark.gpu
@pytest.mark.hardware
@pytest.mark.parametrize(("backend", "dtype"), BACKENDS_ON_GPU)
@pytest.mark.parametrize("name", PLAIN)
def test_backends_on_a_gpu(name: str, backend: str, dtype: torch.dtype) -> None:
    """With GQA, empty segments and rows of no segment. FlashAttention 3 and 4 are run if they are installed.

    Batches are five times as long, longer than a block of a kernel. No number of chunks divides most lengths.
    """
    newer = backend.startswith("FA")
    small, of = PLAIN[name], {"dtype": dtype, "options": {"backend": "flash" if newer else backend}}
    lengths, pads = (tuple(5 * n for n in x) for x in (small.lengths, small.slots))
    window = tuple(5 * n if n > 0 else n for n in small.window)
    batch = replace(small, lengths=lengths, pads=pads, window=window, heads=(4, 2, 64, 64), **of)
    try:
        if newer:
            torch.nn.attention.activate_flash_attention_impl(backend)
    except Exception as error:  # this torch has no registry, the package is not there, or it is not for this GPU
        pytest.skip(f"{backend}: {error}")
    torch._dynamo.reset()  # torch stops recompiling flex after a few
    try:
        case = Case(torch.device("cuda"), dtype, *batch.heads, batch.mask)
        why = BACKENDS[batch.options["backend"]].refuses(case)
        if why is not None and (newer or not hasattr(_module(), "AuxRequest")):
            pytest.skip(f"{backend}: {why}")
        for cp_size in BACKENDS_ON_GPU[backend, dtype]:
            assert_steps(batch, cp_size, "cuda")
    finally:
        if newer:
            torch.nn.attention.restore_flash_attention_impl()


@pytest.mark.gpu
@pytest.mark.hardware
@pytest.mark.parametrize(("backend", "dtype", "heads"), [
    *[("flash", FP16, (4, 2, size, size)) for size in (8, 40, 64, 96, 128, 192, 256)],
    *[("flash", BF16, (*heads, 128, 128)) for heads in ((4, 1), (2, 2))],
    ("math", torch.float32, (4, 2, 128, 128)), ("flex", FP16, (4, 2, 64, 64)),
    *[("flex", BF16, heads) for heads in ((4, 2, 192, 128), (4, 4, 32, 64), (3, 1, 80, 80))],
])  # fmt: skip
def test_heads_on_a_gpu(backend: str, dtype: torch.dtype, heads: tuple[int, ...]) -> None:
    """Every head size with a kernel, and others of v; also with lengths that no number of chunks divides."""
    if backend == "flex" and not hasattr(_module(), "AuxRequest"):
        pytest.skip("this torch's flex_attention does not return what is needed")
    torch._dynamo.reset()
    for batch in (LONG, Batch((137, 2041, 89)), Batch((3, 2, 4, 0, 4), spare=3)):  # the last: one query a segment
        assert_steps(replace(batch, heads=heads, dtype=dtype, options={"backend": backend}), 2, "cuda")


@pytest.mark.gpu
@pytest.mark.hardware
def test_max_logit() -> None:
    """ "auto" skips a backend without max_logit."""
    assert_attention(replace(LONG, heads=(4, 2, 64, 64), dtype=BF16), None, "cuda")


@pytest.mark.gpu
@pytest.mark.hardware
@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (70, 50), (9, 0)])
def test_graph_of_other_lengths(window: tuple[int, int]) -> None:
    """The host reads nothing: a captured step is right for other lengths of as many sequences and rows."""
    first = Batch((100, 200, 50), window=window, heads=(4, 2, 64, 64), dtype=BF16, spare=30)
    (q, k, v, dout), cu = (x.cuda().requires_grad_() for x in made(first)[0]), first.cu_seqlens.cuda()

    def step() -> tuple[Tensor, ...]:
        schedule = Schedule(cu, first.tokens, causal=False, window=window)
        out, _ = all_gather_attention(q, k, v, schedule, backend="flash", return_lse=True)
        return (out, *torch.autograd.grad(out, (q, k, v), dout))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for batch in (first, replace(first, lengths=(7, 0, 310), spare=63)):
        inputs, wants = made(batch)
        with torch.no_grad():
            for x, new in zip((q, k, v, dout), inputs):
                x.copy_(new)
        cu.copy_(batch.cu_seqlens)
        graph.replay()
        for name, x, want in zip(("out", "dq", "dk", "dv"), captured, wants):
            assert not x[(batch.sequence < 0).cuda()].any(), name
            torch.testing.assert_close(x.cpu().double(), want, rtol=2e-2, atol=2e-2)


NCCL = {name: replace(x, dtype=BF16, heads=(8, 4, 64, 64), options={"backend": "flash", **x.options})
        for name, x in CASES.items() if name in PLAIN or (x.options and "backend" not in x.options)}  # fmt: skip


@on_gpus
@pytest.mark.parametrize("name", NCCL)
def test_over_nccl(name: str) -> None:
    """The cases of the gloo test, in bf16, some compiled and exported."""
    assert_attention(NCCL[name], None, "cuda")
    if name in COMPILED:
        assert_compiled(NCCL[name], None, "cuda")


@on_gpus
def test_one_rank_refuses_for_all_over_nccl() -> None:
    test_one_rank_refuses_for_all.body("cuda")
