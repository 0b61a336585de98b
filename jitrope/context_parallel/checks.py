"""The checks of `all_gather_attention`. All except `on_all_ranks` run before any collective."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..base import arguments
from ..base.errors import InvalidInput
from ..ops import watch
from ..ops.fit import named
from .interface import NAME, fail
from .schedule import Schedule
from .steps import Call

Checked = tuple[Tensor, Tensor, Tensor, Call]
LAYOUTS = ("thd", "bshd", "sbhd")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_heads(q: Any, k: Any, v: Any, layout: Any, head_groups: Any) -> int:
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


def check_rows(q: Tensor, given: torch.Size, layout: str, schedule: Schedule) -> None:
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


def on_all_ranks(checked: Callable[[], Checked], schedule: Schedule) -> Checked:
    """The result of a rank's own check. Waits for the device.

    Every rank refuses if one does, if the ranks' calls differ, or if the lengths are wrong.
    """
    facts: dict[str, Any] | None = None
    refused: InvalidInput | None = None
    try:
        result = checked()
        facts = _facts(result[-1])
    except InvalidInput as error:
        refused = error
    ranks = [facts]
    if schedule.ranks.group is not None:  # else there is one process, or each has refused
        ranks = [None] * schedule.ranks.cp_size
        with torch.cuda.device_of(schedule.cu_seqlens):
            dist.all_gather_object(ranks, facts, schedule.ranks.group)
    if refused is not None:
        raise refused
    assert facts is not None
    if None in ranks:
        fail(f"rank {ranks.index(None)} refuses its arguments; its error has the reason")
    for name in facts:
        each = [rank[name] for rank in ranks if rank is not None]
        if any(x != facts[name] for x in each):
            fail(f"{name} differs between ranks: {each}")
    _check_lengths(result[-1])
    return result


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
    schedule = call.schedule
    real, padded = schedule.cu_seqlens.tolist(), schedule.offsets.tolist()
    for offsets in (real, padded):
        if offsets[0] != 0 or offsets != sorted(offsets):
            fail("cu_seqlens does not ascend from 0")
    tokens = schedule.shape.tokens
    if padded[-1] > tokens:
        fail(f"cu_seqlens goes up to {padded[-1]}, but there are {tokens} tokens")
    lengths, slots = ([b - a for a, b in pairwise(offsets)] for offsets in (real, padded))
    if max(slots, default=0) > schedule.max_seqlen:
        fail(f"a sequence has {max(slots)} tokens, more than max_seqlen={schedule.max_seqlen}")
    if call.rotation is not None and max(slots, default=0) > call.rotation.rows:
        fail(f"rope's tables have {call.rotation.rows} rows, but a sequence has {max(slots)} tokens")
    if any(length > slot for length, slot in zip(lengths, slots)):
        fail("a sequence is longer in cu_seqlens than in cu_seqlens_padded")
