"""The checks of `all_gather_attention`. All except `check_ranks` run before any collective."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..base import arguments
from ..base.errors import InvalidInput
from ..ops import watch
from ..ops.fit import named
from ..plan.partition import RULES
from .groups import gather_values
from .interface import NAME, fail
from .schedule import Schedule
from .steps import Call

T = TypeVar("T")
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


def on_all_ranks(checked: Callable[[], T], schedule: Schedule) -> T:
    """The result of a rank's own check, which every rank refuses if one rank does. Waits for the device."""
    refused: InvalidInput | None = None
    try:
        result = checked()
    except InvalidInput as error:
        refused = error
    failed = torch.tensor([refused is not None], device=schedule.cu_seqlens.device).int()
    alone = schedule.ranks.group is None  # of one process, or refused by each
    ranks = [] if alone else [rank for rank, (wrong,) in enumerate(gather_values(failed, schedule.ranks)) if wrong]
    if refused is not None:
        raise refused
    if ranks:
        fail(f"rank {ranks[0]} refuses its arguments; its error has the reason")
    return result


def check_ranks(call: Call) -> None:
    """Refuse, on every rank, arguments that differ between ranks, and wrong lengths. Waits for the device."""
    schedule, case, rotation = call.schedule, call.case, call.rotation
    real, padded = schedule.cu_seqlens, schedule.cu_seqlens_padded
    sizes = {
        "len(cu_seqlens)": len(real),
        "cu_seqlens_padded (is given)": padded is not None,
        "tokens": schedule.shape.tokens,
        "max_seqlen": schedule.max_seqlen,
        "rule": RULES.index(schedule.shape.rule),
        **schedule.mask._asdict(),
        "head_groups": call.head_groups,
        "keep_gathered": call.keep_gathered,
        "rope (rows of its tables)": -1 if rotation is None else rotation.rows,
        "dtype": _DTYPES.index(case.dtype),
        "heads of q": case.heads,
        "heads of k": case.kv_heads,
        "head size of q": case.head_dim,
        "head size of v": case.head_dim_v,
        "wants a gradient": case.grad,
        "return_max_logit": case.max_logit,
        "softmax_scale": call.scale,  # by default it follows from a head size
    }
    words = {"rule": RULES, "dtype": _DTYPES}
    sent = torch.tensor([*sizes.values()], dtype=torch.float64, device=real.device)
    for name, each in zip(sizes, zip(*gather_values(sent, schedule.ranks))):
        if len(set(each)) > 1:
            shown = [int(x) if x.is_integer() else x for x in each]
            shown = [words[name][i] for i in shown] if name in words else shown
            fail(f"{name} differs between ranks: {shown}")
    both = [real] if padded is None else [real, padded]
    lengths = gather_values(torch.stack(both).long().view(-1), schedule.ranks)
    for i, each in enumerate(zip(*lengths)):
        if len(set(each)) > 1:
            name = "cu_seqlens" if i < len(real) else "cu_seqlens_padded"
            fail(f"{name} differs between ranks: entry {i % len(real)} is {list(each)}")
    _check_lengths(lengths[0][: len(real)], lengths[0][-len(real) :], call)


def _check_lengths(real: list[int], padded: list[int], call: Call) -> None:
    schedule = call.schedule
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
