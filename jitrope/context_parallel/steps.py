"""The steps of all-gather attention on one rank, between the collectives."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.watch import without_autocast
from ..thd import ops as thd_ops
from ..thd.reference import Move
from .interface import Backend, Case, Gradients, Result
from .rotary import Rotation
from .schedule import Schedule
from .shards import taken


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


def pack(k: Tensor, v: Tensor, call: Call) -> Tensor:
    """The rows that this rank sends, keys and values side by side: (rows, sum of widths)."""
    return _side_by_side(k, v, None if call.schedule.exchange is None else call.schedule.segments.send_rows, call)


def unpack(gathered: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """The keys that this rank's queries see, segment by segment, and their values: (keys, Hk, D), (keys, Hk, Dv)."""
    case, index = call.case, call.schedule.segments.key_rows
    k = gathered.new_empty(len(index), case.kv_heads, case.head_dim)
    v = gathered.new_empty(len(index), case.kv_heads, case.head_dim_v)
    thd_ops.move_rows(gathered.split(call.widths, 1), (k.flatten(1), v.flatten(1)), index)
    return k, v


def attend(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Result:
    """This rank's attention over the keys of `unpack`: out (rows, Hq, Dv), lse and row_max (rows, Hq); see `Result`."""
    schedule, rows = call.schedule, len(q)
    if rows == 0:
        none = q.new_empty(0, q.shape[1], dtype=torch.float32)
        return Result(q.new_empty(0, q.shape[1], v.shape[2]), none, none, ())
    with without_autocast(q):  # backends compute in the dtypes of their inputs
        result = call.backend.forward(_with_dummies(q, call), k, v, schedule.varlen(call.scale), call.case)
    lse = _by_rows(result.lse, call, rows) if call.case.lse else None
    row_max = _by_rows(result.row_max, call, rows) if call.case.max_logit else None
    return Result(_without_dummies(result.out, call, rows), lse, row_max, result.saved)


def attend_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Result, call: Call) -> Gradients:
    """dq (rows, Hq, D), dk and dv of the keys of `unpack`. result: out and saved of `attend`."""
    rows = len(q)
    if rows == 0:
        return torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    dout, q, out = (_with_dummies(x, call) for x in (dout, q, result.out))
    varlen = call.schedule.varlen(call.scale)
    with without_autocast(q):
        dq, dk, dv = call.backend.backward(dout, q, k, v, result._replace(out=out), varlen)
    return _without_dummies(dq, call, rows), dk, dv


def pack_gradients(dk: Tensor, dv: Tensor, call: Call) -> Tensor:
    """Gradients of keys and values, in the order of the received rows. Those of two chunks are added up."""
    return _side_by_side(dk, dv, call.schedule.segments.gathered_rows, call)


def _side_by_side(k: Tensor, v: Tensor, index: Tensor | None, call: Call) -> Tensor:
    """The rows of an index of k and of v, in one tensor; without an index all rows, and zeros up to the capacity."""
    rows = k.new_empty(call.schedule.shape.capacity if index is None else index.shape[-1], sum(call.widths))
    thd_ops.move_rows((k.flatten(1), v.flatten(1)), rows.split(call.widths, 1), index)
    return rows


def unpack_gradients(received: Tensor, dk: Tensor, dv: Tensor, call: Call) -> None:
    """Write the sums over all ranks, in fp32, into dk and dv (rows, width) of this rank's keys and values."""
    if len(dk):
        thd_ops.move_rows(received.split(call.widths, 1), (dk, dv), call.schedule.sum_rows)


def _with_dummies(x: Tensor, call: Call) -> Tensor:
    """Rows of queries in the order of the segments, with dummies; see `Segments`."""
    index = call.schedule.segments.query_rows
    return x if index is None else taken(x, index, len(index))


def _without_dummies(x: Tensor, call: Call, rows: int) -> Tensor:
    """The inverse, with zeros in rows of no segment. May write x."""
    segments = call.schedule.segments
    if segments.output_rows is not None:
        return taken(x, segments.output_rows, rows)
    thd_ops.move(Move([x], [x], "tail", segments.cu_seqlens_q))
    return x


def _by_rows(x: Tensor | None, call: Call, rows: int) -> Tensor:
    """A value of each query and head (Hq, Tq) as (rows, Hq), -inf for rows of no segment."""
    assert x is not None, f"{call.backend.name} did not refuse the case, but has no such output"
    segments = call.schedule.segments
    if segments.output_rows is None:
        none = torch.arange(rows, device=x.device) >= segments.cu_seqlens_q[-1]
    else:
        none = segments.output_rows < 0
        x = x[:, segments.output_rows.clamp(min=0)]
    return x.masked_fill(none, -torch.inf).t().contiguous()
