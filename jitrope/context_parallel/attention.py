"""Attention of a batch that is sharded over ranks: every rank gathers the keys that its queries see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from ..base import arguments
from ..ops.fit import Fail, failing
from .agreement import check_ranks
from .backends import choose
from .checks import check_heads, checked_head_groups
from .groups import Pending, all_gather, all_reduce_max, all_to_all, ranks_of
from .interface import Case
from .rotary import Rope, one_launch, require_rope
from .schedule import Schedule
from .steps import Call, attend, attend_backward, pack, pack_gradients, unpack, unpack_gradients

_NAME = "all_gather_attention"


def all_gather_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None = None,
    *,
    group: ProcessGroup | None = None,
    layout: str = "thd",
    cu_seqlens_padded: Tensor | None = None,
    max_seqlen: int | None = None,
    tokens: int | None = None,
    causal: bool | None = None,
    window: tuple[int, int] | None = None,
    softmax_scale: float | None = None,
    rule: str | None = None,
    schedule: Schedule | None = None,
    rope: Rope | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    return_max_logit: bool = False,
    keep_gathered: bool = False,
    head_groups: int = 1,
    check: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """softmax(scale q k^T + mask) v of a batch whose rows are cut between ranks. Every rank of the group calls it.

    Context parallelism by all-gather: Llama 3, arXiv:2407.21783, section 3.3.2.

    Keys and values go in one collective each way: gathered, or, for windows that are short beside the sequences,
    only the rows that some query sees (`Schedule.saving`). Their gradients come back rounded to the input's dtype and
    are added up in fp32. No lengths are read by the host.

    >>> part = Partition(cu_seqlens, tokens, group=group)
    >>> q, k, v = (part.shard(x) for x in (q, k, v))  # or made from part.shard(hidden_states)
    >>> out = all_gather_attention(q, k, v, cu_seqlens, tokens=tokens, group=group)

    Args:
        q: (t, Hq, D), this rank's rows in the order of `Partition`; fp16, bf16, fp32 or fp64.
        k, v: (t, Hk, D) and (t, Hk, Dv), with Hk a divisor of Hq (GQA, MQA).
        cu_seqlens: int32 or int64 offsets (N + 1) of the whole batch, on q's device; with "thd", without a schedule.
        group: a process group; default: torch's default group, or this process alone.
        layout: "thd", or "bshd" and "sbhd" for sequences of one length: (B, S / cp_size, H, D), each with its chunks
            of this rank in order, as `Partition` has them.
        cu_seqlens_padded: offsets where sequences have padding behind them, by which the rows are then cut;
            cu_seqlens is the real lengths, added up. Padding is neither read nor seen: its rows of out and of all
            gradients are zero, as are those of spare rows after the last sequence.
        max_seqlen: the longest sequence, its padding included, if the host knows it; see `Schedule`.
        tokens: T, rows of the whole batch. Default: t times the group's size; rows of ranks may differ by one.
        causal: default True: a query sees the keys up to its own.
        window: (left, right), default (-1, -1): of those only from `left` before to `right` behind its own; -1: no
            bound. causal sets right to 0.
        softmax_scale: default 1 / sqrt(D) (arXiv:1706.03762).
        rule: how sequences are cut, "dual_chunk" (the default) or "contiguous"; see `Partition`.
        schedule: made once for all layers; all above but layout and softmax_scale then come from it.
        rope: rotate q and k first, by their positions; with all heads in one group and no exchange for a window by the
            launch that packs keys and values, else by one of its own.
        backend: "auto", or one of `backends`; one that cannot do what is asked is refused, never replaced.
        return_lse: also the logarithm of each softmax's sum, fp32, (t, Hq), or as q without D; -inf where a row sees
            no key. No gradient.
        return_max_logit: also the largest logit of each head over all ranks, (Hq), fp32. No gradient.
        keep_gathered: the backward has no gather of its own; the keys and values that this rank sees are kept.
        head_groups: the heads of k are gathered in so many groups, each while the attention of the one before runs;
            takes so much less memory for keys.
        check: compare the ranks' arguments, and refuse lengths that are no lengths. Waits for the device.

    Returns:
        out (t, Hq, Dv), in q's layout and dtype; with lse and max_logit, as asked for, a tuple of them in this order.

    Raises:
        InvalidInput: the arguments do not fit together, or no backend takes them; without `check` nothing was sent.
    """
    fail = failing(_NAME)
    check_heads(q, k, v, layout, fail)
    head_groups = checked_head_groups(_NAME, head_groups, k.shape[-2], fail)
    require_rope(rope, fail)
    return_lse = arguments.flag(_NAME, "return_lse", return_lse)
    return_max_logit = arguments.flag(_NAME, "return_max_logit", return_max_logit)
    keep_gathered = arguments.flag(_NAME, "keep_gathered", keep_gathered)
    check = arguments.flag(_NAME, "check", check)
    causal = None if causal is None else arguments.flag(_NAME, "causal", causal)
    batch: dict[str, Any] = {"cu_seqlens": cu_seqlens, "cu_seqlens_padded": cu_seqlens_padded, "tokens": tokens}
    batch |= {"max_seqlen": max_seqlen, "group": group, "causal": causal, "window": window, "rule": rule}
    schedule = _schedule(schedule, q, layout, {name: x for name, x in batch.items() if x is not None}, fail)
    shape = q.shape
    q, k, v = (_packed(x, layout) for x in (q, k, v))
    _check_rows(q, shape, layout, schedule, fail)
    case = _case(q, k, v, schedule, head_groups)._replace(lse=return_lse, max_logit=return_max_logit)
    scale = q.shape[2] ** -0.5 if softmax_scale is None else arguments.number(_NAME, "softmax_scale", softmax_scale)
    rotation = None if rope is None else rope.call(q, k, schedule, _NAME)
    call = Call(schedule, choose(backend, case), case, scale, head_groups, keep_gathered)
    if check:
        check_ranks(call, fail)
    if rotation is not None and one_launch(k, v, schedule, head_groups):
        call = call._replace(rotation=rotation)
    elif rotation is not None:
        q, k = rotation.apart(q, k)
    out, lse, max_logit = _Attention.apply(q, k, v, call)
    outputs = [_unpacked(x, shape, layout) for x in (out, lse) if x is not None]
    outputs += [max_logit] if return_max_logit else []
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


# ---- arguments -------------------------------------------------------------------------------------


def _schedule(schedule: Schedule | None, q: Tensor, layout: str, batch: dict[str, Any], fail: Fail) -> Schedule:
    """The schedule given, if nothing is besides; else one for this call alone, of what was given."""
    if schedule is not None:
        if not isinstance(schedule, Schedule):
            arguments.refuse(_NAME, "schedule", schedule, "a Schedule")
        if batch:
            fail(f"{', '.join(batch)} given besides a schedule, which says so itself")
        return schedule
    if layout == "thd":
        if "cu_seqlens" not in batch:
            fail("cu_seqlens is missing; layout 'thd' needs it, or a schedule")
        if "tokens" not in batch:
            batch["tokens"] = len(q) * ranks_of(_NAME, batch.get("group"), None, None, fail).cp_size
        return Schedule(**batch)
    given = [name for name in ("cu_seqlens", "cu_seqlens_padded", "tokens", "max_seqlen") if name in batch]
    if given:
        fail(f"{', '.join(given)} given with layout {layout!r}, whose sequences are of one length")
    size = ranks_of(_NAME, batch.get("group"), None, None, fail).cp_size
    rows, seqlen = q.shape[:2] if layout == "bshd" else (q.shape[1], q.shape[0])
    if rows <= 0:
        fail("q has B=0; it must be at least 1")
    return Schedule.fixed(rows, seqlen * size, q.device, **batch)


def _case(q: Tensor, k: Tensor, v: Tensor, schedule: Schedule, head_groups: int) -> Case:
    """Of one head group's attention."""
    return Case(
        device=q.device,
        dtype=q.dtype,
        heads=q.shape[1] // head_groups,
        kv_heads=k.shape[1] // head_groups,
        head_dim=q.shape[2],
        head_dim_v=v.shape[2],
        mask=schedule.mask,
        segments=schedule.most_segments,
        equal=schedule.equal,
        grad=torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)),
    )


def _packed(x: Tensor, layout: str) -> Tensor:
    """(rows, H, D)."""
    if layout == "thd":
        return x
    return (x if layout == "bshd" else x.transpose(0, 1)).flatten(0, 1)


def _unpacked(x: Tensor, shape: torch.Size, layout: str) -> Tensor:
    """(rows, ...) in the layout and with the first axes of `shape`."""
    if layout == "thd":
        return x
    if layout == "bshd":
        return x.view(*shape[:2], *x.shape[1:])
    return x.view(shape[1], shape[0], *x.shape[1:]).transpose(0, 1)


def _check_rows(q: Tensor, given: torch.Size, layout: str, schedule: Schedule, fail: Fail) -> None:
    shape, device = schedule.shape, schedule.cu_seqlens.device
    batch = {"bshd": given[0], "sbhd": given[1]}.get(layout)
    if batch is not None and (batch != shape.sequences or (not schedule.equal and shape.tokens != 0)):
        fail(f"q has B={batch} in layout {layout!r}; the schedule has to be one of Schedule.fixed, with that batch")
    if q.device != device:
        fail(f"q is on {q.device} but cu_seqlens on {device}")
    if len(q) != shape.rows:
        fail(f"q has {len(q)} rows; rank {shape.cp_rank} of {shape.cp_size} has {shape.rows} of tokens={shape.tokens}")
    if shape.cp_size != 1 and schedule.ranks.group is None:
        fail("the schedule was made with cp_size and cp_rank; make it with a group")


# ---- autograd ----------------------------------------------------------------------------------------


def _gather(rows: Tensor, call: Call) -> Pending:
    schedule = call.schedule
    if schedule.exchange is None:
        return all_gather(rows, schedule.ranks)
    return all_to_all(rows, schedule.sent, schedule.received, schedule.ranks)


class _Gathered:
    """Keys and values of one head group after the other; the next is on its way while one is in use."""

    def __init__(self, rows: Iterator[Tensor], call: Call) -> None:
        self.call, self.rows = call, rows
        self.pending = self._start()

    @classmethod
    def of(cls, k: Tensor, v: Tensor, call: Call) -> _Gathered:
        """Of this rank's keys and values, packed as they are due."""
        pairs = zip(k.chunk(call.head_groups, 1), v.chunk(call.head_groups, 1))
        return cls((pack(*pair, call) for pair in pairs), call)

    def _start(self) -> Pending | None:
        rows = next(self.rows, None)
        return None if rows is None else _gather(rows, self.call)

    def next(self) -> tuple[Tensor, Tensor]:
        """See `unpack`."""
        assert self.pending is not None
        rows, self.pending = self.pending.wait(), None
        self.pending = self._start()
        return unpack(rows, self.call)


class _Given:
    """What comes back from the ranks for this rank's keys and values; takes memory when the first of it is there."""

    def __init__(self, like: Tensor, call: Call) -> None:
        self.like, self.call = like, call
        self.back: list[Pending] = []
        self.sums: list[Tensor] = []
        self.done = 0

    def send(self, rows: Tensor) -> None:
        """One head group's gradients; see `pack_gradients`."""
        self.collect()
        schedule = self.call.schedule
        self.back.append(all_to_all(rows, schedule.received, schedule.sent, schedule.ranks))

    def collect(self) -> None:
        """Add up what has been sent here."""
        while self.back:
            received = self.back.pop().wait()
            if not self.sums:
                shape = len(self.like), self.call.head_groups
                self.sums = [self.like.new_empty(*shape, width) for width in self.call.widths]
            dk, dv = (x[:, self.done] for x in self.sums)
            unpack_gradients(received, dk, dv, self.call)
            self.done += 1

    def gradients(self) -> list[Tensor]:
        """dk and dv of all heads."""
        self.collect()
        heads = self.call.head_groups * self.call.case.kv_heads
        return [x.view(len(x), heads, x.shape[2] // self.call.case.kv_heads) for x in self.sums]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor | None, Tensor | None]:
        sent = None
        if call.rotation is None:
            gathered = _Gathered.of(k, v, call)
        else:
            sent = k.new_empty(call.schedule.shape.capacity, sum(call.widths))
            q = call.rotation.into(q, k, v, sent)
            gathered = _Gathered(iter((sent,)), call)
        results, kept = [], []
        for part in q.chunk(call.head_groups, 1):
            keys, values = gathered.next()
            results.append(attend(part, keys, values, call))
            kept += [keys, values] if call.keep_gathered else []
            del keys, values
        out, lse, row_max = (_together([result[i] for result in results]) for i in range(3))
        max_logit = None
        if call.case.max_logit:
            highest = row_max.new_full((1, row_max.shape[1]), -torch.inf)
            max_logit = all_reduce_max(torch.cat((row_max, highest)).amax(0), call.schedule.ranks)
        lse = lse if call.case.lse else None
        ctx.call, ctx.n_kept, ctx.n_saved = call, len(kept), len(results[0].saved)
        keys_too = (None, None) if kept else (k, v) if sent is None else (sent, None)
        ctx.save_for_backward(q, *keys_too, out, *kept, *(x for result in results for x in result.saved))
        ctx.mark_non_differentiable(*(x for x in (lse, max_logit) if x is not None))
        ctx.set_materialize_grads(False)
        return out, lse, max_logit

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, *_: None) -> tuple[Tensor, Tensor, Tensor, None]:
        call: Call = ctx.call
        q, k, v, out, *rest = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        kept, saved = rest[: ctx.n_kept], rest[ctx.n_kept :]
        gathered = None
        if not kept:  # with a rotation k is what was sent
            gathered = _Gathered.of(k, v, call) if call.rotation is None else _Gathered(iter((k,)), call)
        parts, given = [], _Given(q, call)
        for i, (dout_i, q_i, out_i) in enumerate(zip(*(x.chunk(call.head_groups, 1) for x in (dout, q, out)))):
            keys, values = kept[2 * i : 2 * i + 2] if gathered is None else gathered.next()
            state = tuple(saved[i * ctx.n_saved : (i + 1) * ctx.n_saved])
            dq, dkeys, dvalues = attend_backward(dout_i, q_i, keys, values, out_i, state, call)
            del keys, values
            parts.append(dq)
            rows = pack_gradients(dkeys, dvalues, call)
            del dkeys, dvalues  # before the rows that come take memory
            given.send(rows)
            del rows
        dq, (dk, dv) = _together(parts), given.gradients()
        if call.rotation is not None:
            call.rotation.back_(dq, dk)
        return dq, dk, dv, None


def _together(parts: list[Any]) -> Any:
    """Head groups side by side again."""
    return parts[0] if len(parts) == 1 or parts[0] is None else torch.cat(parts, 1)
