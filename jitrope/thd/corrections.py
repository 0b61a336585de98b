"""Ring attention's corrections in plain torch: one step's log-sum-exp, outputs and gradients into those before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..base.errors import InvalidInput
from ..plan.partition import count


def halves(cu_seqlens: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(sequence, position, is it in the second half, row among those of its half) of each row of a rank's shard.

    Rows before the first sequence or behind the last have the sequence -1. Halves are the two chunks of each sequence.
    """
    offsets = cu_seqlens.long()
    row = torch.arange(rows, device=cu_seqlens.device)
    sequence = torch.searchsorted(offsets[1:].contiguous(), row, right=True)
    outside = (sequence == len(offsets) - 1) | (row < offsets[0])
    sequence = sequence.clamp(max=max(0, len(offsets) - 2))
    first, end = offsets[sequence], offsets[(sequence + 1).clamp(max=len(offsets) - 1)]
    size = count(end, 0, 2) - count(first, 0, 2)
    position = row - first
    second = position >= size
    inside = torch.where(second, position - size + count(first, 1, 2), position + count(first, 0, 2))
    return torch.where(outside, -1, sequence), position, second, inside


def correct(
    quantity: str, first: str, second: str, packed: bool, offsets: Tensor, rows: int,
    out: Tensor | None, step: Tensor | None, lse: Tensor | None, lse_step: Tensor | None,
) -> None:  # fmt: skip
    """See `thd_runtime.correct`.

    Raises:
        InvalidInput: the sequences have more rows than a tensor; nothing was written.
    """
    sequence, position, in_second, inside = halves(offsets, rows)
    of_halves = "nothing" in (first, second)
    work = []
    for what, half in ((first, False), (second, True)):
        row = torch.nonzero((sequence >= 0) & (in_second == half))[:, 0]
        if what == "nothing" or not len(row):
            continue
        step_row = inside[row] if of_halves else row
        starts = offsets.long()[sequence[row]]
        at = (row,) if packed else (sequence[row], position[row])
        begin = count(starts, int(half), 2)
        at_step = (step_row,) if packed else (sequence[row], inside[row] - begin if of_halves else position[row])
        for label, x, needed in (("lse", lse, at), ("lse_per_step", lse_step, at_step)):
            columns = int(needed[-1].max()) + 1
            if x is not None and columns > x.shape[-1]:
                label = "second_half_lse_seqlen" if (quantity, label) == ("read_lse", "lse_per_step") else label
                raise InvalidInput(f"{label} is for {x.shape[-1]} rows; by cu_seqlens there are {columns}")
        work.append((what, at, at_step, row, step_row))
    for what, at, at_step, row, step_row in work:
        _correct(quantity, what, at, at_step, row, step_row, out, step, lse, lse_step)


def _correct(
    quantity: str, what: str, at: tuple[Tensor, ...], at_step: tuple[Tensor, ...], row: Tensor, step_row: Tensor,
    out: Tensor | None, step: Tensor | None, lse: Tensor | None, lse_step: Tensor | None,
) -> None:  # fmt: skip
    def places(index: tuple[Tensor, ...]) -> tuple[Any, ...]:  # of (rows, heads) in (H, rows) or (B, H, rows)
        return (slice(None), index[0]) if len(index) == 1 else (index[0], slice(None), index[1])

    if quantity in ("lse", "read_lse"):
        assert lse is not None
        assert lse_step is not None
        a, b = lse[places(at)], lse_step[places(at_step)]
        if quantity == "read_lse":
            lse_step[places(at_step)] = a
        else:
            high, low = torch.maximum(a, b), torch.minimum(a, b)
            lse[places(at)] = high + torch.log1p(torch.exp(torch.where(low == high, 0.0, low - high)))
        return
    assert out is not None
    assert step is not None
    x = step[step_row]
    if quantity == "out":
        assert lse is not None
        assert lse_step is not None
        a, b = lse[places(at)], lse_step[places(at_step)]
        factor = torch.exp(b - a)
        factor = (factor.t() if len(at) == 1 else factor)[..., None]
        x = torch.where(x == 0, 0.0, x.float() * factor).to(out.dtype)
    out[row] = x if what == "copy" and quantity == "grad" else (out[row].float() + x.float()).to(out.dtype)
