"""Attention over a batch cut between ranks: every rank gathers the keys that its queries see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..base import arguments
from ..base.errors import InvalidInput
from ..ops import watch
from ..ops.fit import named
from .backends import choose
from .interface import NAME, Case, Result, fail
from .rotary import Rope, rotation_of
from .schedule import Schedule
from .shards import Pending, all_gather, all_to_all, largest
from .steps import Call, attend, attend_backward, pack, pack_gradients, unpack, unpack_gradients

Checked = tuple[Tensor, Tensor, Tensor, Call]
LAYOUTS = ("thd", "bshd", "sbhd")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def all_gather_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    schedule: Schedule,
    *,
    layout: str = "thd",
    softmax_scale: float | None = None,
    rope: Rope | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    return_max_logit: bool = False,
    keep_gathered: bool = False,
    head_groups: int = 1,
    check: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """softmax(scale q k^T + mask) v of a batch cut between ranks. Every rank of the group must call it.

    One collective sends keys and values, and one sends their gradients back. All rows are gathered or, for windows much
    shorter than the sequences, only the rows that some query sees (`Schedule.saving`). Gradients are sent in the dtype
    of the inputs, and added up in fp32. Autocast changes nothing. This does not wait for the device.

    >>> q, (k, v) = torch.randn(10, 8, 64), torch.randn(2, 10, 2, 64)
    >>> schedule = Schedule(torch.tensor([0, 7, 10]), 10)  # of torch's default group; here of one process
    >>> q, k, v = (schedule.shard(x) for x in (q, k, v))  # or computed from schedule.shard(hidden_states)
    >>> out = all_gather_attention(q, k, v, schedule)

    Args:
        q: (t, Hq, D), this rank's rows in the order of `Partition`; fp16, bf16, fp32 or fp64.
        k, v: (t, Hk, D) and (t, Hk, Dv). Hk must divide Hq (GQA, MQA).
        schedule: the batch, its mask and the group, made once for all layers.
        layout: "thd", or "bshd" and "sbhd" with `Schedule.fixed`: (B, S / cp_size, H, D). The rows of a sequence are
            this rank's chunks in order, as in `Partition`.
        softmax_scale: default 1 / sqrt(D) (arXiv:1706.03762).
        rope: rotate q and k first, by their positions. The launch that packs keys and values also rotates if
            head_groups is 1, all rows are gathered, and k and v have the same shape; otherwise another launch does it.
        backend: "auto", "flash4", "flash3", "flash", "cudnn", "flex" or "math". A named backend is never replaced by
            another.
        return_lse: also return the logarithm of each softmax's sum, fp32, (t, Hq), or as q without D; -inf for rows
            that see no key. It has no gradient.
        return_max_logit: also return the largest logit of each head over all ranks, (Hq), fp32. It has no gradient.
        keep_gathered: keep the gathered keys and values for the backward, which then gathers nothing.
        head_groups: gather the heads of k in this many groups, each during the attention of the previous group. This
            divides the memory for gathered keys.
        check: compare the arguments of all ranks (of rope only the rows of its tables), and check the lengths. If one
            rank refuses its arguments, all ranks raise InvalidInput. This waits for the device.

    Returns:
        out (t, Hq, Dv), in q's layout and dtype; with lse or max_logit a tuple of out, lse and max_logit in this order.
        Padding and spare rows are not used. They are zero in out and in all gradients.

    Raises:
        InvalidInput: the arguments do not fit together, or no backend accepts them. Without `check` nothing was sent.
    """
    flag = partial(arguments.flag, NAME)
    if not isinstance(schedule, Schedule):
        arguments.refuse(NAME, "schedule", schedule, "a Schedule")
    given = (q, k, v)

    def checked() -> tuple[Tensor, Tensor, Tensor, Call]:
        groups = _check_heads(*given, layout, head_groups)
        q, k, v = (_batch_first(x, layout).flatten(0, -3) for x in given)
        _check_rows(q, given[0].shape, layout, schedule)
        sizes = (q.shape[1] // groups, k.shape[1] // groups, q.shape[2], v.shape[2])  # of one head group
        grad = torch.is_grad_enabled() and any(x.requires_grad for x in given)
        wanted = (grad, flag("return_lse", return_lse), flag("return_max_logit", return_max_logit))
        case = Case(q.device, q.dtype, *sizes, schedule.mask, schedule.most_segments, schedule.equal, *wanted)
        scale = q.shape[2] ** -0.5 if softmax_scale is None else arguments.number(NAME, "softmax_scale", softmax_scale)
        keeps, rotation = flag("keep_gathered", keep_gathered), rotation_of(rope, q, k, schedule)
        return q, k, v, Call(schedule, choose(backend, case), case, scale, groups, keeps, rotation)

    q, k, v, call = _on_all_ranks(checked, schedule) if flag("check", check) else checked()
    apart = call.head_groups != 1 or schedule.exchange is not None or k.shape != v.shape
    if call.rotation is not None and apart:
        q, k = call.rotation.apart(q, k)
        call = call._replace(rotation=None)
    if torch.compiler.is_compiling():  # which lets no autograd function make a tensor that is kept
        _ = schedule.segments, schedule.sum_rows if call.case.grad else None
    out, lse, max_logit = _Attention.apply(q, k, v, call)
    outputs = [x for x in (out, lse) if x is not None]
    if layout != "thd":
        size = _batch_first(given[0], layout).shape[:2]
        outputs = [_batch_first(x.view(*size, *x.shape[1:]), layout) for x in outputs]
    outputs += [] if max_logit is None else [max_logit]
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _batch_first(x: Tensor, layout: str) -> Tensor:
    """x with the axes of bshd for sbhd, and the inverse."""
    return x.transpose(0, 1) if layout == "sbhd" else x


# ---- checks -----------------------------------------------------------------------------------------


def _check_heads(q: Any, k: Any, v: Any, layout: Any, head_groups: Any) -> int:
    """Check a rank's q, k and v. Returns head_groups, a number that divides the heads of k."""
    arguments.word(NAME, "layout", layout, LAYOUTS)
    for name, x in (("q", q), ("k", k), ("v", v)):
        arguments.tensor(NAME, name, x)
        if watch.sharded((x,)):
            fail(f"{name} is a DTensor; pass {name}.to_local(), and make the result with DTensor.from_local")
        if x.dim() != len(layout):
            axes = ", ".join(layout.upper())
            fail(f"{name} has shape {tuple(x.shape)}, layout {layout!r} needs {len(layout)} axes ({axes})")
        if x.dtype != q.dtype or x.device != q.device:
            fail(f"{name} is {x.dtype} on {x.device} but q is {q.dtype} on {q.device}")
    if q.dtype not in _DTYPES:
        fail(f"q is {q.dtype}; allowed are fp16, bf16, fp32 and fp64")
    sizes = ", ".join(f"{name} is {named(x, layout)}" for name, x in (("q", q), ("k", k), ("v", v)))
    if not (q.shape[:-2] == k.shape[:-2] == v.shape[:-2]):
        fail(f"{sizes}; only H and v's D may differ")
    if k.shape[-2] != v.shape[-2] or q.shape[-1] != k.shape[-1]:
        fail(f"{sizes}; k's H must be v's, and k's D must be q's")
    if min(*q.shape[-2:], *v.shape[-2:]) <= 0:
        fail(f"{sizes}; H and D must be at least 1")
    if q.shape[-2] % k.shape[-2] != 0:
        fail(f"q has H={q.shape[-2]}, which k's H={k.shape[-2]} does not divide")
    groups = arguments.whole(NAME, "head_groups", head_groups, 1)
    if k.shape[-2] % groups != 0:
        fail(f"head_groups is {groups}, which does not divide k's H={k.shape[-2]}")
    return groups


def _check_rows(q: Tensor, given: torch.Size, layout: str, schedule: Schedule) -> None:
    """Check that q (rows, H, D), given in a layout with shape `given`, has the rows of this rank."""
    shape, device = schedule.shape, schedule.cu_seqlens.device
    batch = given[layout.index("b")] if "b" in layout else None
    if batch is not None and (batch != shape.sequences or (not schedule.equal and shape.tokens != 0)):
        fail(f"q has B={batch} in layout {layout!r}; make the schedule with Schedule.fixed, for that batch")
    if q.device != device:
        fail(f"q is on {q.device} but cu_seqlens on {device}")
    if len(q) != shape.rows:
        fail(f"q has {len(q)} rows; rank {shape.cp_rank} of {shape.cp_size} has {shape.rows} of tokens={shape.tokens}")
    if shape.cp_size != 1 and schedule.ranks.group is None:
        fail("the schedule was made with cp_size and cp_rank; make it with a group")


def _on_all_ranks(checked: Callable[[], Checked], schedule: Schedule) -> Checked:
    """The result of a rank's own check. Waits for the device.

    Every rank refuses if one does, if the ranks' calls differ, or if the lengths are wrong.
    """
    result: Any
    try:
        result = checked()
    except InvalidInput as error:
        result = error
    refused = isinstance(result, InvalidInput)
    ranks: list[Any] = [None if refused else _facts(result[-1])]
    if schedule.ranks.group is not None:  # else there is one process, or each has refused
        facts, ranks = ranks[0], [None] * schedule.ranks.cp_size
        with torch.cuda.device_of(schedule.cu_seqlens):
            dist.all_gather_object(ranks, facts, schedule.ranks.group)
    if refused:
        raise result
    if None in ranks:
        fail(f"rank {ranks.index(None)} refuses its arguments; its error has the reason")
    for name in ranks[0]:
        each = [rank[name] for rank in ranks]
        if any(x != each[0] for x in each):
            fail(f"{name} differs between ranks: {each}")
    _check_lengths(result[-1])
    return cast(Checked, result)


def _facts(call: Call) -> dict[str, Any]:
    """What must be the same on every rank, by its name in messages."""
    schedule, case, rotation = call.schedule, call.case, call.rotation
    given = {"cu_seqlens": schedule.cu_seqlens, "cu_seqlens_padded": schedule.cu_seqlens_padded}
    return {
        "len(cu_seqlens)": len(schedule.cu_seqlens),
        "cu_seqlens_padded (is given)": schedule.cu_seqlens_padded is not None,
        "max_seqlen": schedule.max_seqlen,
        "rope (rows of its tables)": -1 if rotation is None else rotation.rows,
        "softmax_scale": call.scale,  # by default it follows from a head size
        **{name: getattr(schedule.shape, name) for name in ("tokens", "rule")},
        **schedule.mask._asdict(),
        **{name: getattr(call, name) for name in ("head_groups", "keep_gathered")},
        **dict(zip(("dtype", "heads of q", "heads of k", "head size of q", "head size of v"), case[1:])),
        **{"wants a gradient": case.grad, "return_max_logit": case.max_logit},
        **{f"{name}[{i}]": n for name, x in given.items() if x is not None for i, n in enumerate(x.tolist())},
    }


def _check_lengths(call: Call) -> None:
    schedule, tokens = call.schedule, call.schedule.shape.tokens
    real, padded = schedule.cu_seqlens.tolist(), schedule.offsets.tolist()
    if any(offsets[0] != 0 or offsets != sorted(offsets) for offsets in (real, padded)):
        fail("cu_seqlens does not ascend from 0")
    if padded[-1] > tokens:
        fail(f"cu_seqlens goes up to {padded[-1]}, but there are {tokens} tokens")
    lengths, slots = ([b - a for a, b in pairwise(offsets)] for offsets in (real, padded))
    longest = max(slots)
    if longest > schedule.max_seqlen:
        fail(f"a sequence has {longest} tokens, more than max_seqlen={schedule.max_seqlen}")
    if call.rotation is not None and longest > call.rotation.rows:
        fail(f"rope's tables have {call.rotation.rows} rows, but a sequence has {longest} tokens")
    if any(length > slot for length, slot in zip(lengths, slots)):
        fail("a sequence is longer in cu_seqlens than in cu_seqlens_padded")


# ---- autograd ----------------------------------------------------------------------------------------


def _packed_groups(k: Tensor, v: Tensor | None, call: Call) -> Iterator[Tensor]:
    """This rank's rows to send, one head group at a time; see `pack`. Without v, k has them."""
    if v is None:
        return iter((k,))
    return (pack(*pair, call) for pair in zip(k.chunk(call.head_groups, 1), v.chunk(call.head_groups, 1)))


def _gathered(groups: Iterator[Tensor], call: Call) -> Iterator[tuple[Tensor, Tensor]]:
    """Gathered keys and values, one head group after the other; see `unpack`. The next group is gathered meanwhile.

    The order of steps frees each tensor before the next takes memory.
    """

    def begin() -> Pending | None:
        rows, schedule = next(groups, None), call.schedule
        if rows is None:
            return None
        if schedule.exchange is None:
            return all_gather(rows, schedule.ranks)
        return all_to_all(rows, schedule.sent, schedule.received, schedule.ranks)

    pending = begin()
    while pending is not None:
        rows, pending = [pending.wait()], None
        pending = begin()
        yield unpack(rows.pop(), call)


class _Given:
    """All ranks' gradients for this rank's keys and values, added up group by group."""

    def __init__(self, like: Tensor, call: Call) -> None:
        self.like, self.call, self.done = like, call, 0
        self.pending: Pending | None = None
        self.sums: list[Tensor] = []  # allocated when the first gradients arrive

    def send(self, rows: Tensor | None) -> None:
        """Send one head group's gradients; see `pack_gradients`. Before that those of the group before arrive."""
        call, schedule = self.call, self.call.schedule
        if self.pending is not None:
            received, self.pending = [self.pending.wait()], None
            self.sums = self.sums or [self.like.new_empty(len(self.like), call.head_groups, n) for n in call.widths]
            dk, dv = (x[:, self.done] for x in self.sums)
            unpack_gradients(received.pop(), dk, dv, call)  # it is freed before more arrive
            self.done += 1
        if rows is not None:
            self.pending = all_to_all(rows, schedule.received, schedule.sent, schedule.ranks)

    def gradients(self) -> list[Tensor]:
        """dk and dv of all heads."""
        self.send(None)
        heads = self.call.case.kv_heads
        return [x.view(len(x), self.call.head_groups * heads, x.shape[2] // heads) for x in self.sums]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor | None, Tensor | None]:
        inputs: tuple[Tensor, Tensor | None] = k, v
        if call.rotation is not None:
            inputs = k.new_empty(call.schedule.shape.capacity, sum(call.widths)), None
            q = call.rotation.into(q, k, v, inputs[0])
        results, saved, gathered = [], [], _gathered(_packed_groups(*inputs, call), call)
        for part in q.chunk(call.head_groups, 1):
            keys, values = next(gathered)
            results.append(attend(part, keys, values, call))
            saved += [*([keys, values] if call.keep_gathered else []), *results[-1].saved]
            del keys, values
        out, lse, row_max = (_together([result[i] for result in results]) for i in range(3))
        max_logit = None
        if call.case.max_logit:
            lowest = row_max.new_full((1, row_max.shape[1]), -torch.inf)
            max_logit = largest(torch.cat((row_max, lowest)).amax(0), call.schedule.ranks)
        lse = lse if call.case.lse else None
        ctx.call = call
        ctx.save_for_backward(q, *((None, None) if call.keep_gathered else inputs), out, *saved)
        ctx.mark_non_differentiable(*(x for x in (lse, max_logit) if x is not None))
        ctx.set_materialize_grads(False)
        return out, lse, max_logit

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, *_: None) -> tuple[Tensor, Tensor, Tensor, None]:
        call: Call = ctx.call
        q, k, v, out, *saved = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        gathered = _gathered(iter(()) if call.keep_gathered else _packed_groups(k, v, call), call)
        parts, given, size, kept = [], _Given(q, call), len(saved) // call.head_groups, 2 * call.keep_gathered
        for i, (dout_i, q_i, out_i) in enumerate(zip(*(x.chunk(call.head_groups, 1) for x in (dout, q, out)))):
            state = saved[i * size : (i + 1) * size]
            keys, values = state[:2] if call.keep_gathered else next(gathered)
            result = Result(out_i, None, None, tuple(state[kept:]))
            dq, dkeys, dvalues = attend_backward(dout_i, q_i, keys, values, result, call)
            del keys, values
            parts.append(dq)
            rows = pack_gradients(dkeys, dvalues, call)
            del dkeys, dvalues  # free them before received rows take memory
            given.send(rows)
            del rows
        dq, (dk, dv) = _together(parts), given.gradients()
        if call.rotation is not None:
            call.rotation.back_(dq, dk)
        return dq, dk, dv, None


def _together(parts: list[Any]) -> Any:
    """All heads, from head groups."""
    if len(parts) == 1 or parts[0] is None:
        return parts[0]
    with watch.without_autocast(parts[0]):  # which would promote
        return torch.cat(parts, 1)
