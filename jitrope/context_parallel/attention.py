"""Attention over a batch cut between ranks: every rank gathers the keys that its queries see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from .. import torch_state as watch
from ..base import arguments
from ..base.fit import named
from ..thd import ops as thd_ops
from ..thd.reference import Move
from ..thd.shape import Shape
from .backends import DTYPES, NAME, Backend, Case, Gradients, Result, choose, fail
from .rotary import Rope, Rotation, rotation_of
from .schedule import Schedule, check_lengths
from .shards import Pending, all_gather, all_to_all, check_rows, largest, taken


class Call(NamedTuple):
    """A checked call."""

    schedule: Schedule
    backend: Backend
    case: Case  # of one head group
    scale: float
    head_groups: int = 1
    keep_gathered: bool = False
    rotation: Rotation | None = None  # by the launch that packs k and v

    @property
    def widths(self) -> list[int]:
        """The numbers of elements in a row of keys and in a row of values."""
        return [self.case.kv_heads * self.case.head_dim, self.case.kv_heads * self.case.head_dim_v]


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
        q: (t, Hq, D), this rank's rows in the order of `Partition`; fp16, bf16, fp32, or without rope fp64.
        k, v: (t, Hk, D) and (t, Hk, Dv). Hk must divide Hq (GQA, MQA).
        schedule: the batch, its mask and the group, made once for all layers.
        layout: "thd", or "bshd" and "sbhd" with `Schedule.fixed`: (B, S / cp_size, H, D). The rows of a sequence are
            this rank's chunks in order, as in `Partition`.
        softmax_scale: default 1 / sqrt(D) (arXiv:1706.03762).
        rope: rotate q and k first, by their positions. The launch that packs keys and values also rotates if
            head_groups is 1, all rows are gathered, and k and v have the same shape; otherwise another launch does it.
        backend: "auto", "flash", "flex" or "math". A named backend is never replaced by another.
        return_lse: also return the logarithm of each softmax's sum, fp32, (t, Hq), or as q without D; -inf for rows
            that see no key. It has no gradient.
        return_max_logit: also return the largest logit of each head over all ranks, (Hq), fp32. It has no gradient.
        keep_gathered: keep the gathered keys and values for the backward, which then gathers nothing.
        head_groups: gather the heads of k in this many groups, each during the attention of the previous group. This
            divides the memory for gathered keys.
        check: compare the arguments of all ranks (of rope only the rows of its tables), and check the lengths. If one
            rank refuses its arguments, all ranks raise InvalidInput. A rank without a `Schedule`, or whose schedule has
            no group, refuses at once and tells nobody: the others wait until it ends, or for the group's timeout. This
            waits for the device.

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

    def checked() -> Any:
        groups = _check_heads(*given, layout, head_groups)
        q, k, v = (_batch_first(x, layout).flatten(0, -3) for x in given)
        batch = given[0].shape[layout.index("b")] if "b" in layout else None
        if batch is not None and (batch != schedule.shape.sequences or not schedule.equal):
            fail(f"q has B={batch} in layout {layout!r}; make the schedule with Schedule.fixed, for that batch")
        check_rows(schedule, fail, "q", q)
        sizes = (q.shape[1] // groups, k.shape[1] // groups, q.shape[2], v.shape[2])  # of one head group
        grad = torch.is_grad_enabled() and any(x.requires_grad for x in given)
        wanted = (grad, flag("return_lse", return_lse), flag("return_max_logit", return_max_logit))
        case = Case(q.device, q.dtype, *sizes, schedule.mask, schedule.most_segments, *wanted)
        scale = q.shape[2] ** -0.5 if softmax_scale is None else arguments.number(NAME, "softmax_scale", softmax_scale)
        keeps, rotation = flag("keep_gathered", keep_gathered), rotation_of(rope, q, k, schedule)
        return q, k, v, Call(schedule, choose(backend, case), case, scale, groups, keeps, rotation)

    q, k, v, call = _on_all_ranks(checked, schedule) if flag("check", check) else checked()
    if call.rotation is not None and (call.head_groups != 1 or schedule.exchange is not None or k.shape != v.shape):
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
    arguments.word(NAME, "layout", layout, ("thd", "bshd", "sbhd"))
    like, shape, dtypes = "q", tuple(layout.upper()), DTYPES
    for name, x in (("q", q), ("k", k), ("v", v)):
        arguments.tensor(NAME, name, x)
        if watch.sharded((x,)):
            fail(f"{name} is a DTensor; pass {name}.to_local(), and make the result with DTensor.from_local")
        fail.unlike(name, x, q.device, dtypes, shape, like=like, hint=f"; layout is {layout!r}")
        shape = (*x.shape[:-2], "H", x.shape[-1]) if name == "q" else (*x.shape[:-1], "D")
        like, dtypes = name, (x.dtype,)
    if not q.shape[-2:].numel() * v.shape[-2:].numel() or q.shape[-2] % k.shape[-2] != 0:
        sizes = ", ".join(f"{name} is {named(x, layout)}" for name, x in (("q", q), ("k", k), ("v", v)))
        fail(f"{sizes}; k's H must divide q's, and H and D be at least 1")
    groups = arguments.whole(NAME, "head_groups", head_groups, 1)
    if k.shape[-2] % groups != 0:
        fail(f"head_groups is {groups}, which does not divide k's H={k.shape[-2]}")
    return groups


def _on_all_ranks(checked: Callable[[], Any], schedule: Schedule) -> Any:
    """The result of a rank's own check. Waits for the device.

    Every rank refuses if one does, if the ranks' calls differ, or if the lengths are wrong.
    """

    if watch.is_compiling() or watch.capturing(schedule.cu_seqlens):
        fail("check=True waits for the device, so it cannot be compiled or captured in a CUDA graph; leave it out")
    if schedule.ranks.group is None and dist.is_initialized():
        fail("the schedule has no group, so check=True cannot ask the other ranks; pass group to Schedule")

    def told(facts: Any) -> list[Any]:
        """Every rank's facts; None from a rank that refuses."""
        ranks = [facts] * schedule.ranks.cp_size
        if schedule.ranks.group is not None:  # else there is one process
            with torch.cuda.device_of(schedule.cu_seqlens):
                dist.all_gather_object(ranks, facts, schedule.ranks.group)
        return ranks

    try:
        result = checked()
    except Exception:  # also another one: the other ranks wait for this one
        told(None)
        raise
    ranks = told(_facts(result[-1]))
    if None in ranks:
        fail(f"rank {ranks.index(None)} refuses its arguments; its error has the reason")
    for name in ranks[0]:
        each = [rank[name] for rank in ranks]
        if any(x != each[0] for x in each):
            fail(f"{name} differs between ranks: {each}")
    rotation = result[-1].rotation
    check_lengths(schedule, None if rotation is None else rotation.rows)
    return result


def _facts(call: Call) -> dict[str, Any]:
    """What must be the same on every rank, by its name in messages."""
    schedule, case, rotation = call.schedule, call.case, call.rotation
    given = {"cu_seqlens": schedule.cu_seqlens, "cu_seqlens_padded": schedule.cu_seqlens_padded}
    return {
        "len(cu_seqlens)": len(schedule.cu_seqlens),
        "cu_seqlens_padded (is given)": schedule.cu_seqlens_padded is not None,
        **{name: getattr(schedule.shape, name) for name in ("tokens", "rule")},
        "max_seqlen": schedule.max_seqlen,
        "rope (rows of its tables)": -1 if rotation is None else rotation.rows,
        "softmax_scale": call.scale,  # by default it follows from a head size
        **{f"window's {side}": size for side, size in schedule.mask._asdict().items()},
        **{name: getattr(call, name) for name in ("head_groups", "keep_gathered")},
        **dict(zip(("dtype", "heads of q", "heads of k", "head size of q", "head size of v"), case[1:])),
        **{"wants a gradient": case.grad, "return_max_logit": case.max_logit},
        **{f"{name}[{i}]": n for name, x in given.items() if x is not None for i, n in enumerate(x.tolist())},
    }


# ---- the steps of a rank, between the collectives ----------------------------------------------------


def pack(k: Tensor, v: Tensor, call: Call) -> Tensor:
    """The rows that this rank sends, keys and values side by side: (rows, sum of widths)."""
    return _side_by_side(k, v, None if call.schedule.exchange is None else call.schedule.segments.send_rows, call)


def unpack(gathered: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """The keys that this rank's queries see, segment by segment, and their values: (keys, Hk, D), (keys, Hk, Dv)."""
    return _apart(gathered, call.schedule.segments.key_rows, call)


def attend(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Result:
    """This rank's attention over the keys of `unpack`: out (rows, Hq, Dv), lse and row_max (rows, Hq); see `Result`."""
    if len(q) == 0:  # of v: a compiler must keep the collective that brought it, in the order of the other ranks
        none = q.new_empty(0, q.shape[1], dtype=torch.float32)
        return Result(v[:0].repeat(1, q.shape[1] // v.shape[1], 1), none, none, ())
    with watch.without_autocast(q):  # backends compute in the dtypes of their inputs
        out, lse, row_max, saved = call.backend.forward(
            _with_dummies(q, call), k, v, call.schedule.varlen(call.scale), call.case
        )
    return Result(_without_dummies(out, call), _by_rows(lse, call), _by_rows(row_max, call), saved)


def attend_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Result, call: Call) -> Gradients:
    """dq (rows, Hq, D), dk and dv of the keys of `unpack`. result: out and saved of `attend`."""
    if len(q) == 0:
        # Zeros of dout, so that a compiler does not send them before dout is there.
        return torch.empty_like(q), torch.zeros_like(k) + dout.sum(), torch.zeros_like(v) + dout.sum()
    dout, q, out = (_with_dummies(x, call) for x in (dout, q, result.out))
    with watch.without_autocast(q):
        dq, dk, dv = call.backend.backward(dout, q, k, v, result._replace(out=out), call.schedule.varlen(call.scale))
    return _without_dummies(dq, call), dk, dv


def pack_gradients(dk: Tensor, dv: Tensor, call: Call) -> Tensor:
    """Gradients of keys and values, in the order of the received rows. Those of two chunks are added up."""
    return _side_by_side(dk, dv, call.schedule.segments.gathered_rows, call)


def _side_by_side(k: Tensor, v: Tensor, index: Tensor | None, call: Call) -> Tensor:
    """The rows of an index of k and of v, in one tensor; without an index all rows, and zeros up to the capacity."""
    rows = k.new_empty(call.schedule.shape.capacity if index is None else index.shape[-1], sum(call.widths))
    thd_ops.move_rows((k.flatten(1), v.flatten(1)), rows.split(call.widths, 1), index)
    return rows


def unpack_gradients(received: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """The sums over all ranks, in fp32: dk (rows, Hk, D) and dv (rows, Hk, Dv) of this rank's keys and values."""
    return _apart(received, call.schedule.sum_rows, call)


def _apart(rows: Tensor, index: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """The inverse of `_side_by_side`: k (rows, Hk, D) and v (rows, Hk, Dv), by the rows of an index."""
    k, v = (rows.new_empty(index.shape[-1], width) for width in call.widths)
    thd_ops.move_rows(rows.split(call.widths, 1), (k, v), index)
    return k.unflatten(1, (call.case.kv_heads, -1)), v.unflatten(1, (call.case.kv_heads, -1))


def _with_dummies(x: Tensor, call: Call) -> Tensor:
    """Rows of queries in the order of the segments, with dummies; see `Segments`."""
    index = call.schedule.segments.query_rows
    return x if index is None else taken(x, index, len(index))


def _without_dummies(x: Tensor, call: Call) -> Tensor:
    """The inverse, with zeros in rows of no segment. May write x."""
    segments = call.schedule.segments
    if segments.output_rows is not None:
        return taken(x, segments.output_rows, len(segments.output_rows))
    shape = Shape(0, len(segments.cu_seqlens_q) - 1, 1, 0)
    thd_ops.move(Move([x], [x], "tail", segments.cu_seqlens_q, shape=shape))
    return x


def _by_rows(x: Tensor | None, call: Call) -> Tensor | None:
    """A value of each query and head (Hq, Tq) as (rows, Hq), -inf for rows of no segment."""
    rows = call.schedule.segments.output_rows
    if x is not None and rows is not None:
        x = x[:, rows.clamp(min=0)].masked_fill(rows < 0, -torch.inf)
    # A copy also of one row: torch 2.11's compiler asks for the gradient of a view, though it is marked as without one.
    return None if x is None else x.t().clone(memory_format=torch.contiguous_format)


# ---- autograd ----------------------------------------------------------------------------------------


def _gathered(k: Tensor, v: Tensor | None, call: Call) -> Iterator[tuple[Tensor, Tensor]]:
    """Gathered keys and values, one head group after the other; see `unpack`. The next group is gathered meanwhile.

    Without v, k has the rows to send. The order of steps frees each tensor before the next takes memory.
    """
    schedule, n = call.schedule, call.head_groups
    pending: list[Pending] = []
    for rows in [k] if v is None else (pack(*pair, call) for pair in zip(k.chunk(n, 1), v.chunk(n, 1))):
        if schedule.exchange is None:
            pending.append(all_gather(rows, schedule.ranks))
        else:
            pending.append(all_to_all(rows, schedule.sent, schedule.received, schedule.ranks))
        del rows
        if len(pending) > 1:
            yield unpack(pending.pop(0).wait(), call)
    yield unpack(pending.pop().wait(), call)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor | None, Tensor | None]:
        inputs: tuple[Tensor, Tensor | None] = k, v
        if call.rotation is not None:
            inputs = k.new_empty(call.schedule.shape.capacity, sum(call.widths)), None
            q = call.rotation.into(q, k, v, inputs[0])
        results, saved, gathered = [], [], _gathered(*inputs, call)
        for part in q.chunk(call.head_groups, 1):
            keys, values = next(gathered)
            results.append(attend(part, keys, values, call))
            saved += [*([keys, values] if call.keep_gathered else []), *results[-1].saved]
            del keys, values
        out, lse, row_max = (_together([result[i] for result in results]) for i in range(3))
        lse, max_logit = lse if call.case.lse else None, None
        if call.case.max_logit:  # of no rows -inf
            max_logit = largest(pad(row_max, (0, 0, 0, 1), value=-torch.inf).amax(0), call.schedule.ranks)
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
        schedule, groups, kept = call.schedule, call.head_groups, 2 * call.keep_gathered
        size = len(saved) // groups
        gathered: Any = None if kept else _gathered(k, v, call)
        of_queries = [x.chunk(groups, 1) for x in (torch.zeros_like(out) if dout is None else dout, q, out)]
        parts: list[Tensor] = []

        def packed(group: int) -> Tensor:
            """A head group's gradients for other ranks; see `pack_gradients`. dq goes to `parts`."""
            dout, q, out = (x[group] for x in of_queries)
            state = saved[group * size : (group + 1) * size]
            keys, values = state[:2] if kept else next(gathered)
            result = Result(out, None, None, tuple(state[kept:]))
            dq, dkeys, dvalues = attend_backward(dout, q, keys, values, result, call)
            del keys, values
            parts.append(dq)
            return pack_gradients(dkeys, dvalues, call)

        sums: list[tuple[Tensor, Tensor]] = []  # of all ranks' gradients for this rank's keys and values
        pending = None
        for group in range(groups + 1):  # a group's gradients arrive during the attention of the next
            rows = packed(group) if group < groups else None
            if pending is not None:
                received, pending = [pending.wait()], None  # what was sent is freed now
                sums.append(unpack_gradients(received.pop(), call))  # and what came before more arrives
            if rows is not None:
                pending = all_to_all(rows, schedule.received, schedule.sent, schedule.ranks)
        dq, dk, dv = map(_together, (parts, *zip(*sums)))
        if call.rotation is not None:
            call.rotation.apart(dq, dk, inverse=True, inplace=True)
        return dq, dk, dv, None


def _together(parts: Any) -> Any:
    """All heads, from a list of head groups."""
    if len(parts) == 1 or parts[0] is None:
        return parts[0]
    with watch.without_autocast(parts[0]):  # which would promote
        return torch.cat(parts, 1)
