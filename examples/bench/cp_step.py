"""The whole step of `bench cp`: times of its parts, memory, balance of ranks, and real runs on several GPUs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from jitrope import JitropeError
from jitrope.context_parallel import all_gather_attention
from jitrope.context_parallel import attention as library
from jitrope.context_parallel.attention import Call, attend, attend_backward, unpack
from jitrope.context_parallel.backends import Backend, Result, choose
from jitrope.context_parallel.shards import all_gather, all_to_all, ranks_of

from .cp import CUTS, Batch, row
from .harness import DEVICE, bf16, turn_by_turn
from .report import Rows

Heads = tuple[int, int]
"""Of q, and of k and v."""


class Shapes(Backend):
    """A backend that makes the tensors that an attention returns, and computes nothing; see `Backend`."""

    name = "shapes"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, varlen: Any, case: Any) -> Result:
        """Output and logarithms."""
        lse = q.new_empty(q.shape[1], len(q), dtype=torch.float32)
        return Result(q.new_empty(*q.shape[:2], v.shape[2]), None, None, (lse,))

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv."""
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


SHAPES = Shapes()


class Local(NamedTuple):
    """A rank's tensors: (rows, heads, head_dim)."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


def local(schedule: Any, heads: Heads, batch: Batch) -> Local:
    """Random ones; q, k and v want gradients."""
    q, k, v, dout = (bf16(schedule.shape.rows, heads[i], batch.head_dim) for i in (0, 1, 1, 0))
    return Local(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout)


def call_of(schedule: Any, heads: Heads, batch: Batch, backend: Backend | None = None, **words: Any) -> Call:
    """A call of one rank; its backend is the one that "auto" takes, unless one is given."""
    case = batch.attention(schedule, heads, words.get("head_groups", 1))
    return Call(schedule, backend or choose("auto", case), case, batch.head_dim**-0.5, **words)


def our_step(x: Local, call: Call) -> None:
    """Forward and backward, as `all_gather_attention` runs them; the group may be torch's fake one."""
    function: Any = library._Attention
    torch.autograd.grad(function.apply(*x[:3], call)[0], x[:3], x.dout)


@contextmanager
def one_rank_of(schedule: Any) -> Iterator[None]:
    """A group for a schedule whose other ranks are not there: collectives make their results, and leave them as they
    are."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    _, cp_size, cp_rank, _ = schedule.ranks
    dist.init_process_group("fake", rank=cp_rank, world_size=cp_size, store=FakeStore())
    schedule.ranks = ranks_of("bench cp", None)
    try:
        yield
    finally:
        dist.destroy_process_group()


# ---- one rank ----------------------------------------------------------------------------------------


def rows(cp_size: int, mask: str, heads: Heads, batch: Batch) -> Rows:
    """Times of a rank's step and, of the same segments, of the attention's kernels alone; then its memory."""
    schedule = batch.schedule(cp_size, mask)
    call, x = call_of(schedule, heads, batch), local(schedule, heads, batch)
    with one_rank_of(schedule):
        with torch.no_grad():
            k, v = unpack(bf16(sum(schedule.received), sum(call.widths)), call)
            result, varlen = attend(x.q, k, v, call), schedule.varlen(call.scale)
        q, dout = (y.detach() for y in (x.q, x.dout))
        us = turn_by_turn(
            {
                "attention alone, forward": partial(call.backend.forward, q, k, v, varlen, call.case),
                "attention alone, backward": partial(call.backend.backward, dout, q, k, v, result, varlen),
                "whole step, without collectives": partial(our_step, x, call),
            },
            9,
        )
    alone = sum(t for what, t in us.items() if what.startswith("attention alone"))
    case = f"{mask} {heads[0]}/{heads[1]}, {call.backend.name}"
    found = [row("step", cp_size, case, what, t, x=t / alone, of="attention alone") for what, t in us.items()]
    return found + memory_rows(cp_size, mask, heads, batch) + call_rows(cp_size, mask, heads, batch)


def te_peak(rows: int, cp_size: int, heads: Heads, head_dim: int) -> int:
    """Bytes that TransformerEngine's all-gather attention holds at most besides q, k, v and dout, without its
    kernels' own: counted from its allocations, with FlashAttention 3's copies of gradients, in bf16.

    rows: of one rank. All keys are K bytes, as are all values and each of their gradients; queries, outputs and the
    gradients of queries Q, logarithms of softmax sums L. Forward: gathered keys, values and one of them in its new
    order, 3 K; later keys and values, the output, one that is not used, and one for each of the two steps, and L as
    often: 2 K + 4 Q + 2 L. Backward: output and 2 L; dQ and each step's, 3 Q; keys, values, dK, dV, and dK and dV of
    each step, 8 K; one of them in its other order, K.
    """
    k = 2 * cp_size * rows * heads[1] * head_dim
    q, lse = 2 * rows * heads[0] * head_dim, 4 * rows * heads[0]
    return max(3 * k, 2 * k + 4 * q + 2 * lse, 9 * k + 4 * q + 2 * lse)


THEIRS = "TransformerEngine's, by formula"
VARIANTS: dict[str, dict[str, Any]] = {
    "jitrope": {},
    "jitrope, keep_gathered": {"keep_gathered": True},
    "jitrope, head_groups=2": {"head_groups": 2},
}


def memory_rows(cp_size: int, mask: str, heads: Heads, batch: Batch) -> Rows:
    """Peak memory of a step besides q, k, v and dout, the tables of a batch with it.

    Of tensors alone, over TransformerEngine's by formula; and in MiB with the workspace of the attention's kernels.
    """
    found = []
    for backend in (SHAPES, None):
        schedule = batch.schedule(cp_size, mask)
        x, call = local(schedule, heads, batch), call_of(schedule, heads, batch, backend)
        theirs = te_peak(len(x.q), cp_size, heads, batch.head_dim) if backend else None
        peaks = {THEIRS: theirs} if backend else {}
        with one_rank_of(schedule):
            for what, words in VARIANTS.items():
                peaks[what] = peak_of(partial(_fresh_step, x, cp_size, mask, heads, batch, backend, words))
        case = f"{mask} {heads[0]}/{heads[1]}, " + ("tensors" if backend else f"with {call.backend.name}'s kernels")
        for what, peak in peaks.items():
            share: dict[str, Any] = {"x": peak / theirs, "of": THEIRS} if peak and theirs else {}
            found.append(row("memory", cp_size, case, what, MiB=peak and peak / 2**20, **share))
    return found


def _fresh_step(x: Local, cp_size: int, mask: str, heads: Heads, batch: Batch, backend: Any, words: Any) -> None:
    our_step(x, call_of(batch.schedule(cp_size, mask, group=dist.group.WORLD), heads, batch, backend, **words))


def peak_of(call: Callable[[], Any]) -> int | None:
    """The most bytes that torch had given out during a call, above those before it; None without a GPU."""
    call()  # kernels are loaded now
    return given_out(call)[2]


def given_out(call: Callable[[], Any]) -> tuple[Any, int | None, int | None]:
    """A call's result, and the bytes that torch gave out above those before it: after it, and the most of all."""
    if DEVICE != "cuda":
        return call(), None, None
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    return result, torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before


def call_rows(cp_size: int, mask: str, heads: Heads, batch: Batch) -> Rows:
    """Memory of a call, over that of `Schedule.memory`, which does not count what the attention's kernels take."""
    found, schedule = [], batch.schedule(cp_size, mask)
    x, name = local(schedule, heads, batch), call_of(schedule, heads, batch).backend.name
    with one_rank_of(schedule):
        for what, words in VARIANTS.items():
            user_step(x, schedule, **words)  # kernels and tables are there now
            out, more, forward = given_out(partial(all_gather_attention, *x[:3], schedule, **words))
            kept = more and more + sum(given.nbytes for given in (x[:1] if "keep_gathered" in words else x[:3]))
            backward = given_out(partial(torch.autograd.grad, out, x[:3], x.dout))[2]
            case = f"{mask} {heads[0]}/{heads[1]}{what.removeprefix('jitrope')}, {name}"
            said = schedule.memory(heads, (batch.head_dim,) * 2, torch.bfloat16, **words)
            for part, got, least in zip(said._fields, (kept, forward, backward), said):
                share = {"x": got / least, "MiB": got / 2**20} if got is not None else {}
                found.append(row("call", cp_size, case, part, of="Schedule.memory", **share))
    return found


def balance_rows(cp_size: int, mask: str, heads: Heads, batch: Batch) -> Rows:
    """The busiest rank of padded batches, with the page's number of sequences and a fourth: its pairs of a query and a
    key over the mean, and the time of its step between the collectives over that of the first cut."""
    found = []
    for count in (batch.sequences, max(1, batch.sequences // 4)):
        own, times = batch._replace(sequences=count), list[float]()
        for kind, apart in CUTS.items():
            calls = [call_of(own.padded(cp_size, rank, mask, apart), heads, own) for rank in range(cp_size)]
            us = turn_by_turn({str(n): _work(call, heads, own) for n, call in enumerate(calls)}, 9)
            times.append(max(us.values()))
            case, pairs = f"{count} {mask} {heads[0]}/{heads[1]}, {calls[0].backend.name}", calls[0].schedule.balance()
            found.append(row("balance", cp_size, case, f"{kind}, pairs", x=pairs, of="mean of the ranks"))
            ours = {"x": times[-1] / times[0], "of": next(iter(CUTS))}
            found.append(row("balance", cp_size, case, f"{kind}, time", times[-1], **ours))
    return found


def _work(call: Call, heads: Heads, batch: Batch) -> Callable[[], Any]:
    q, _, _, dout = (x.detach() for x in local(call.schedule, heads, batch))
    k, v = unpack(bf16(sum(call.schedule.received), sum(call.widths)), call)
    return lambda: attend_backward(dout, q, k, v, attend(q, k, v, call), call)


# ---- real ranks ----------------------------------------------------------------------------------------


def launched() -> bool:
    """By torchrun."""
    return bool(dist.is_torchelastic_launched())


@contextmanager
def joined() -> Iterator[int]:
    """In torchrun's group, with a GPU of one's own: the rank."""
    if DEVICE != "cuda":
        raise JitropeError("jitrope bench needs a CUDA device")
    torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group("nccl")
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def rank_steps(batch: Batch) -> dict[str, Callable[[], Rows]]:
    """Whole steps of all ranks of the default group, and the collectives in them alone. Every rank runs them all."""
    kinds = [(heads, mask) for heads in batch.heads for mask in batch.windows()]
    return {f"{mask} {heads}": partial(_rank_rows, heads, mask, batch) for heads, mask in kinds}


def _rank_rows(heads: Heads, mask: str, batch: Batch) -> Rows:
    """MiB: of k and v, or their gradients, that come from others; a step has them three times."""
    cp_size, world = dist.get_world_size(), dist.group.WORLD
    schedule = batch.schedule(cp_size, mask, group=world)
    call, x = call_of(schedule, heads, batch), local(schedule, heads, batch)
    width, capacity = sum(call.widths), schedule.shape.capacity
    own, sent = bf16(capacity, width), bf16(sum(schedule.sent), width)
    gathered = exchanged = (cp_size - 1) * capacity
    if schedule.exchange is not None:  # the most rows that a rank gets
        exchanged = max(sum(each) - each[rank] for rank, each in enumerate(zip(*schedule.exchange)))
    measured: dict[str, tuple[int, Callable[[], Any]]] = {
        "step": (3 * exchanged, partial(user_step, x, schedule)),
        "step, keep_gathered": (2 * exchanged, partial(user_step, x, schedule, keep_gathered=True)),
        "step, head_groups=2": (3 * exchanged, partial(user_step, x, schedule, head_groups=2)),
        "all-gather of k and v": (gathered, lambda: all_gather(own, schedule.ranks).wait()),
    }
    if schedule.exchange is not None:
        exchange = partial(all_to_all, sent, schedule.sent, schedule.received, schedule.ranks)
        measured["exchange of k and v"] = exchanged, lambda: exchange().wait()
    dist.barrier()
    times = turn_by_turn({what: run for what, (_, run) in measured.items()}, 9)
    us = torch.tensor(list(times.values()), device=DEVICE)
    dist.all_reduce(us, dist.ReduceOp.MAX)  # each the slowest rank's
    case, step = f"{mask} {heads[0]}/{heads[1]}, {call.backend.name}", float(us[0])
    return [
        row("ranks", cp_size, case, what, t, x=t / step, of="step", MiB=n * width * 2 / 2**20)
        for t, (what, (n, _)) in zip(us.tolist(), measured.items())
    ]


def user_step(x: Local, schedule: Any, **words: Any) -> None:
    """Forward and backward of `all_gather_attention`."""
    out = all_gather_attention(*x[:3], schedule, **words)
    assert isinstance(out, Tensor)
    torch.autograd.grad(out, x[:3], x.dout)
