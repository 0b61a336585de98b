"""Whether all ranks of a call say the same, and lengths are lengths. Waits for the device."""

from __future__ import annotations

from itertools import pairwise

import torch

from ..ops.fit import Fail
from ..plan.partition import RULES
from .groups import gather_values
from .schedule import Schedule
from .steps import Call


def check_ranks(call: Call, fail: Fail) -> None:
    """Refuse, on every rank, arguments that differ between ranks, or lengths that are none. Waits for the device."""
    schedule, case = call.schedule, call.case
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
        "return_max_logit": case.max_logit,
        "heads of q": case.heads,
        "heads of k": case.kv_heads,
        "head size of q": case.head_dim,
        "head size of v": case.head_dim_v,
        "bytes of a number": case.dtype.itemsize,
        "bf16": case.dtype == torch.bfloat16,
        "wants a gradient": case.grad,
    }
    values = gather_values(torch.tensor([*map(int, sizes.values())], device=real.device), schedule.ranks)
    for name, each in zip(sizes, zip(*values)):
        if len(set(each)) > 1:
            fail(f"{name} differs between ranks: {list(each)}")
    both = [real] if padded is None else [real, padded]
    lengths = gather_values(torch.stack(both).long().view(-1), schedule.ranks)
    for i, each in enumerate(zip(*lengths)):
        if len(set(each)) > 1:
            name = "cu_seqlens" if i < len(real) else "cu_seqlens_padded"
            fail(f"{name} differs between ranks: entry {i % len(real)} is {list(each)}")
    _check_lengths(lengths[0][: len(real)], lengths[0][-len(real) :], schedule, fail)


def _check_lengths(real: list[int], padded: list[int], schedule: Schedule, fail: Fail) -> None:
    for offsets in (real, padded):
        fits = offsets[0] == 0 and all(a <= b for a, b in pairwise(offsets))
        if not fits:
            fail("cu_seqlens does not ascend from 0")
    tokens = schedule.shape.tokens
    if padded[-1] > tokens:
        fail(f"cu_seqlens goes up to {padded[-1]}, but there are {tokens} tokens")
    longest = max(b - a for a, b in pairwise(padded))
    if longest > schedule.max_seqlen:
        fail(f"a sequence has {longest} tokens, more than max_seqlen={schedule.max_seqlen}")
    fits = all(b - a <= d - c for (a, b), (c, d) in zip(pairwise(real), pairwise(padded)))
    if not fits:
        fail("a sequence is longer in cu_seqlens than in cu_seqlens_padded")
