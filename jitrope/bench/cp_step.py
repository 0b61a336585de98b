"""The whole step of `jitrope bench cp`: times of its parts, peak memory, and real runs on several GPUs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..base.errors import JitropeError
from ..context_parallel import all_gather_attention
from ..context_parallel.attention import _Attention
from ..context_parallel.backends import choose
from ..context_parallel.groups import all_gather, all_to_all
from ..context_parallel.interface import Backend, Varlen
from ..context_parallel.steps import Call, attend, attend_backward, pack, pack_gradients, unpack, unpack_gradients
from ..plan.partition import Mask, Rows
from .cp import SHAPES, Batch, host_us, row
from .thd import Progress
from .timing import turn_by_turn

BYTES = 2
"""Of a bf16 number."""


class Local(NamedTuple):
    """A rank's tensors: (rows, heads, head_dim)."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


def local(call: Call, heads: tuple[int, int], batch: Batch) -> Local:
    """Random ones; q, k and v want gradients."""
    rows = call.schedule.shape.rows
    q, dout = (batch.randn(rows, heads[0], batch.head_dim) for _ in range(2))
    k, v = (batch.randn(rows, heads[1], batch.head_dim) for _ in range(2))
    return Local(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout)


def call_of(
    cp_size: int, mask: str, heads: tuple[int, int], batch: Batch, backend: Backend | None = None,
    head_groups: int = 1, keep_gathered: bool = False,
) -> Call:  # fmt: skip
    """A call of one rank; its backend is the one that "auto" takes, unless one is given."""
    schedule = batch.schedule(cp_size, mask)
    case = batch.case(schedule, heads, head_groups)
    backend = choose("auto", case) if backend is None else backend
    return Call(schedule, backend, case, batch.head_dim**-0.5, head_groups, keep_gathered)


def our_step(x: Local, call: Call) -> None:
    """Forward and backward, as `all_gather_attention` runs them; the group may be torch's fake one."""
    out = _Attention.apply(*x[:3], call)[0]
    torch.autograd.grad(out, x[:3], x.dout)


@contextmanager
def one_rank_of(cp_size: int, cp_rank: int) -> Iterator[None]:
    """A default group whose other ranks are not there: collectives make their results, and leave them as they are."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=cp_rank, world_size=cp_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


# ---- times of one rank -------------------------------------------------------------------------------


def step_rows(cp_size: int, mask: str, heads: str, batch: Batch) -> list[dict[str, Any]]:
    """The parts of a step, beside the attention alone: its kernels, of the same segments of keys."""
    pair = pair_of(heads)
    call = call_of(cp_size, mask, pair, batch)
    x, schedule = local(call, pair, batch), call.schedule
    with one_rank_of(*schedule.ranks[1:]), torch.no_grad():
        calls = _parts(x, call, batch)
        calls["whole step, without collectives"] = torch.enable_grad()(partial(our_step, x, call))
        times = times_of(calls, batch)
    alone = sum(us for what, us in times.items() if what.startswith("attention alone"))
    case = f"{mask} {heads}, {call.backend.name}"
    return [row("step", cp_size, case, what, us, x=us / alone, of="attention alone") for what, us in times.items()]


def _parts(x: Local, call: Call, batch: Batch) -> dict[str, Callable[[], Any]]:
    """In the order of a step, each on what the one before would leave in L2."""
    schedule, width = call.schedule, sum(call.widths)
    gathered = batch.randn(sum(schedule.received), width)
    returned = batch.randn(sum(schedule.sent), width)
    k, v = unpack(gathered, call)
    result = attend(x.q, k, v, call)
    dk, dv = (torch.zeros_like(y).flatten(1) for y in (x.k, x.v))
    _, dkeys, dvalues = attend_backward(x.dout, x.q, k, v, result.out, result.saved, call)
    varlen = schedule.varlen(call.scale)
    return {
        "pack of k and v": partial(pack, x.k, x.v, call),
        "gather of visible keys": partial(unpack, gathered, call),
        "attention, forward": partial(attend, x.q, k, v, call),
        "attention, backward": partial(attend_backward, x.dout, x.q, k, v, result.out, result.saved, call),
        "sum of chunks": partial(pack_gradients, dkeys, dvalues, call),
        "sum over ranks": partial(unpack_gradients, returned, dk, dv, call),
        "attention alone, forward": partial(call.backend.forward, x.q, k, v, varlen, call.case),
        "attention alone, backward": partial(
            call.backend.backward, x.dout, x.q, k, v, result.out, result.saved, varlen
        ),
    }


def times_of(calls: dict[str, Callable[[], Any]], batch: Batch) -> dict[str, float]:
    """Microseconds of each."""
    if batch.device == "cuda":
        return turn_by_turn(calls, 9)
    return {what: host_us([call]) for what, call in calls.items()}


def pair_of(heads: str) -> tuple[int, int]:
    """(of q, of k and v) of "32/8"."""
    q, kv = heads.split("/")
    return int(q), int(kv)


# ---- peak memory of one rank -------------------------------------------------------------------------


class Peak(NamedTuple):
    """Bytes."""

    forward: int
    backward: int


def te_peak(rows: int, cp_size: int, heads: tuple[int, int], head_dim: int) -> Peak:
    """What TransformerEngine's all-gather attention holds at most besides q, k, v and dout, without its kernels' own.

    rows: of one rank. All keys are K bytes, as are all values and each of their gradients; queries, outputs and the
    gradients of queries Q, logarithms of softmax sums L. Forward: gathered keys, values and one of them in its new
    order, 3 K; later keys and values, the output, one that is not used, and one for each of the two steps, and L as
    often: 2 K + 4 Q + 2 L. Backward: output and 2 L; dQ and each step's, 3 Q; keys, values, dK, dV, and dK and dV of
    each step, 8 K; one of them in its other order, K.
    """
    k = BYTES * cp_size * rows * heads[1] * head_dim
    q, lse = BYTES * rows * heads[0] * head_dim, 4 * rows * heads[0]
    return Peak(max(3 * k, 2 * k + 4 * q + 2 * lse), 9 * k + 4 * q + 2 * lse)


@torch.no_grad()
def te_step(x: Local, cp_size: int, backend: Backend, batch: Batch) -> None:
    """TransformerEngine's allocations in its order, with FlashAttention 3's copies of gradients; computes nothing else.

    A backend's attention is run on full sizes, for what its kernels take besides, not for its numbers.
    """
    rows = len(x.q)
    everyone = (cp_size * rows, *x.k.shape[1:])
    ends = torch.tensor([0, rows, cp_size * rows], dtype=torch.int32, device=x.q.device)
    varlen = Varlen(ends[:2], ends[::2].contiguous(), rows, cp_size * rows, Mask(), 1.0)
    case = batch.case(batch.schedule(1), (x.q.shape[1], x.k.shape[1]))

    def gather() -> tuple[Tensor, Tensor]:
        k, v = (x.k.new_empty(everyone) for _ in range(2))
        k = torch.empty_like(k)  # in the order of sequences
        v = torch.empty_like(v)
        return k, v

    k, v = gather()
    unused, out = (torch.empty_like(x.q) for _ in range(2))
    results = [backend.forward(x.q, k, v, varlen, case) for _ in range(2)]
    saved = [result.saved for result in results]
    del k, v, unused, results

    dq = torch.empty_like(x.q)
    dk, dv = (x.k.new_empty(everyone) for _ in range(2))
    k, v = gather()
    steps = [backend.backward(x.dout, x.q, k, v, out, state, varlen) for state in saved]
    dk = torch.empty_like(dk)  # in the order of ranks
    dv = torch.empty_like(dv)
    dk = torch.empty_like(x.k)  # reduced, and scattered
    dv = torch.empty_like(x.v)
    del steps, dq, dk, dv


def memory_rows(cp_size: int, mask: str, heads: str, batch: Batch) -> list[dict[str, Any]]:
    """Peak memory of a step besides q, k, v and dout, the tables of a batch with it, over TransformerEngine's.

    Once of tensors alone, and once with what the attention's kernels take, the same kernels on both sides.
    """
    pair = pair_of(heads)
    rows = []
    for backend in (SHAPES, None):
        call = call_of(cp_size, mask, pair, batch, backend)
        x = local(call, pair, batch)
        case = f"{mask} {heads}, " + ("tensors" if backend else f"with {call.backend.name}'s kernels")
        theirs = peak_of(lambda x=x, call=call: te_step(x, cp_size, call.backend, batch), batch)  # type: ignore[misc]
        if backend:
            of = max(te_peak(len(x.q), cp_size, pair, batch.head_dim))
            rows.append(_memory_row(cp_size, case, f"{_THEIRS}, by formula", of, theirs))
        rows.append(_memory_row(cp_size, case, _THEIRS, theirs, theirs))
        for what, words in _VARIANTS.items():
            if pair[1] % words.get("head_groups", 1) == 0:
                step = partial(_our_peak, x, cp_size, mask, pair, batch, backend, words)
                with one_rank_of(cp_size, call.schedule.shape.cp_rank):
                    rows.append(_memory_row(cp_size, case, what, peak_of(step, batch), theirs))
    return rows


_THEIRS = "TransformerEngine's"
_VARIANTS: dict[str, dict[str, Any]] = {
    "jitrope": {},
    "jitrope, keep_gathered": {"keep_gathered": True},
    "jitrope, head_groups=2": {"head_groups": 2},
}


def _our_peak(
    x: Local, cp_size: int, mask: str, heads: tuple[int, int], batch: Batch, backend: Backend | None,
    words: dict[str, Any],
) -> None:  # fmt: skip
    our_step(x, call_of(cp_size, mask, heads, batch, backend, **words))


def _memory_row(cp_size: int, case: str, what: str, peak: int | None, of: int | None) -> dict[str, Any]:
    share = peak / of if peak and of else None
    mib = None if peak is None else peak / 2**20
    return row("memory", cp_size, case, what, x=share, of=_THEIRS, MiB=mib)


def peak_of(call: Callable[[], Any], batch: Batch) -> int | None:
    """The most bytes that torch had given out during a call, above those before it; None where nobody counts."""
    if batch.device != "cuda":
        call()
        return None
    call()  # kernels are loaded now
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


# ---- real ranks ----------------------------------------------------------------------------------------


def launched() -> bool:
    """By torchrun."""
    return bool(dist.is_torchelastic_launched())


@contextmanager
def joined() -> Iterator[int]:
    """In torchrun's group, with a GPU of one's own: the rank."""
    if not torch.cuda.is_available():
        raise JitropeError("jitrope bench needs a CUDA device")
    torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group("nccl")
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def run_ranks(batch: Batch, progress: Progress = lambda text: None) -> list[dict[str, Any]]:
    """Whole steps of all ranks of the default group, and the collectives in them alone. Everyone calls it."""
    torch.manual_seed(dist.get_rank())
    rows = []
    for heads in batch.heads:
        for mask in batch.windows():
            progress(f"{mask} {heads[0]}/{heads[1]}")
            rows += _ranks(heads, mask, batch)
    return rows


def _ranks(heads: tuple[int, int], mask: str, batch: Batch) -> list[dict[str, Any]]:
    cp_size = dist.get_world_size()
    schedule = batch.schedule(cp_size, mask, group=dist.group.WORLD)
    case = batch.case(schedule, heads)
    call = Call(schedule, choose("auto", case), case, batch.head_dim**-0.5)
    x = local(call, heads, batch)
    width, capacity = sum(call.widths), schedule.shape.capacity
    rows, sent = batch.randn(capacity, width), batch.randn(sum(schedule.sent), width)
    gathered = (cp_size - 1) * capacity  # rows that come from others
    exchanged = gathered if schedule.exchange is None else _most_exchanged(schedule.exchange)
    every = [capacity] * cp_size
    everything = batch.randn(cp_size * capacity, width)
    # what: (rows from others, call); a step has a gather in each direction and gradients that go back
    measured: dict[str, tuple[int, Callable[[], Any]]] = {
        "step": (3 * exchanged, partial(user_step, x, schedule)),
        "step, keep_gathered": (2 * exchanged, partial(user_step, x, schedule, keep_gathered=True)),
    }
    if heads[1] % 2 == 0:
        measured["step, head_groups=2"] = 3 * exchanged, partial(user_step, x, schedule, head_groups=2)
    measured["all-gather of k and v"] = gathered, lambda: all_gather(rows, schedule.ranks).wait()
    measured["all to all of as many rows"] = (
        gathered, lambda: all_to_all(everything, every, every, schedule.ranks).wait()
    )  # fmt: skip
    if schedule.exchange is not None:
        measured["exchange of k and v"] = (
            exchanged, lambda: all_to_all(sent, schedule.sent, schedule.received, schedule.ranks).wait()
        )  # fmt: skip
    dist.barrier()
    times = slowest(times_of({what: call for what, (_, call) in measured.items()}, batch), batch)
    name = f"{mask} {heads[0]}/{heads[1]}, {call.backend.name}"
    mib = {what: n * width * BYTES / 2**20 for what, (n, _) in measured.items()}
    return [
        row("ranks", cp_size, name, what, us, x=us / times["step"], of="step", MiB=mib[what])
        for what, us in times.items()
    ]


def _most_exchanged(exchange: Rows) -> int:
    """The most rows that a rank gets from others."""
    received = [sum(rows[rank] for rows in exchange) - exchange[rank][rank] for rank in range(len(exchange))]
    return max(received)


def user_step(x: Local, schedule: Any, **words: Any) -> None:
    """Forward and backward of `all_gather_attention`."""
    out = all_gather_attention(*x[:3], schedule=schedule, **words)
    assert isinstance(out, Tensor)
    torch.autograd.grad(out, x[:3], x.dout)


def slowest(times: dict[str, float], batch: Batch) -> dict[str, float]:
    """Each the most of all ranks."""
    values = torch.tensor(list(times.values()), device=batch.device)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return dict(zip(times, values.tolist()))
