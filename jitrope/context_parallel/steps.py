"""All-gather attention's steps on one rank, between the collectives."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..thd import ops as thd_ops
from .interface import Backend, Case, Result
from .rotary import Rotation
from .schedule import Schedule
from .shards import taken


class Call(NamedTuple):
    """A call, checked."""

    schedule: Schedule
    backend: Backend
    case: Case  # of one of the head groups
    scale: float
    head_groups: int = 1
    keep_gathered: bool = False
    rotation: Rotation | None = None  # of q and k, by the launch that packs

    @property
    def widths(self) -> list[int]:
        """Numbers in a row of keys and in one of values."""
        return [self.case.kv_heads * self.case.head_dim, self.case.kv_heads * self.case.head_dim_v]


def pack(k: Tensor, v: Tensor, call: Call) -> Tensor:
    """This rank's keys and values, side by side, as they are sent: (rows sent, widths)."""
    schedule = call.schedule
    index = None if schedule.exchange is None else schedule.segments.send_rows
    sent = k.new_empty(schedule.shape.capacity if index is None else len(index), sum(call.widths))
    thd_ops.move_rows((k.flatten(1), v.flatten(1)), sent.split(call.widths, 1), index)
    return sent


def unpack(gathered: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """The keys that this rank's queries see, segment by segment, and their values: (keys, Hk, D), (keys, Hk, Dv)."""
    case, index = call.case, call.schedule.segments.key_rows
    k = gathered.new_empty(len(index), case.kv_heads, case.head_dim)
    v = gathered.new_empty(len(index), case.kv_heads, case.head_dim_v)
    thd_ops.move_rows(gathered.split(call.widths, 1), (k.flatten(1), v.flatten(1)), index)
    return k, v


def attend(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Result:
    """This rank's attention over those keys: out (rows, Hq, Dv), lse and row_max (rows, Hq); see `Result`."""
    schedule, segments, rows = call.schedule, call.schedule.segments, len(q)
    if rows == 0:
        none = q.new_empty(0, q.shape[1], dtype=torch.float32)
        return Result(q.new_empty(0, q.shape[1], v.shape[2]), none, none, ())
    result = call.backend.forward(_with_dummies(q, call), k, v, schedule.varlen(call.scale), call.case)
    if segments.output_rows is None:
        out = result.out
        thd_ops.move("tail", [out], [out], segments.cu_seqlens_q)
    else:
        out = taken(result.out, segments.output_rows, rows)
    lse = _by_rows(result.lse, call, rows) if call.case.lse else None
    row_max = _by_rows(result.row_max, call, rows) if call.case.max_logit else None
    return Result(out, lse, row_max, result.saved)


def attend_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, saved: tuple[Tensor, ...], call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    """dq (rows, Hq, D), dk and dv of the keys of `unpack`."""
    segments, rows = call.schedule.segments, len(q)
    if rows == 0:
        return torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    dout, q, out = (_with_dummies(x, call) for x in (dout, q, out))
    dq, dk, dv = call.backend.backward(dout, q, k, v, out, saved, call.schedule.varlen(call.scale))
    if segments.output_rows is None:
        thd_ops.move("tail", [dq], [dq], segments.cu_seqlens_q)
        return dq, dk, dv
    return taken(dq, segments.output_rows, rows), dk, dv


def pack_gradients(dk: Tensor, dv: Tensor, call: Call) -> Tensor:
    """Gradients of keys and values in the order in which those came, added up where two chunks see a key."""
    index = call.schedule.segments.gathered_rows
    sent = dk.new_empty(index.shape[1], sum(call.widths))
    thd_ops.move_rows((dk.flatten(1), dv.flatten(1)), sent.split(call.widths, 1), index)
    return sent


def unpack_gradients(received: Tensor, dk: Tensor, dv: Tensor, call: Call) -> None:
    """Add up all ranks' gradients of this rank's keys and values, in fp32, into dk and dv (rows, widths)."""
    if len(dk):
        thd_ops.move_rows(received.split(call.widths, 1), (dk, dv), call.schedule.sum_rows)


def _with_dummies(x: Tensor, call: Call) -> Tensor:
    """Rows of queries as the segments have them."""
    index = call.schedule.segments.query_rows
    return x if index is None else taken(x, index, len(index))


def _by_rows(x: Tensor | None, call: Call, rows: int) -> Tensor:
    """A number of each query and head (Hq, Tq) as (rows, Hq); -inf for rows of no segment."""
    assert x is not None, f"{call.backend.name} took a case and then did not do it"
    segments = call.schedule.segments
    if segments.output_rows is None:
        none = torch.arange(rows, device=x.device) >= segments.cu_seqlens_q[-1]
    else:
        none = segments.output_rows < 0
        x = x[:, segments.output_rows.clamp(min=0)]
    return x.masked_fill(none, -torch.inf).t().contiguous()
