"""Ring attention's corrections in plain torch: the oracle of the tests and the implementation for CPU tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..base.errors import InvalidInput
from ..plan.partition import count
from .reference import check_values
from .spec import STEPS


class Correction(NamedTuple):
    """A step of ring attention, to be joined with the steps before it.

    quantity: "lse" joins lse_step into lse, "read_lse" copies lse into lse_step, "out" adds step to out, scaled by
    exp(lse_step - lse), and "grad" adds step to out. If one half of the sequences has "nothing", step and lse_step have
    only the rows of the other.
    """

    quantity: str
    first: str  # for each first half "nothing", "add" or "copy"
    second: str
    packed: bool
    cu_seqlens: Tensor
    rows: int
    out: Tensor | None = None  # (rows, H, D)
    step: Tensor | None = None
    lse: Tensor | None = None  # (H, rows) if packed, else (B, H, rows)
    lse_step: Tensor | None = None

    @property
    def written(self) -> Tensor | None:
        """The tensor that changes."""
        return {"lse": self.lse, "read_lse": self.lse_step}.get(self.quantity, self.out)


def halves(cu_seqlens: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(sequence, position, whether in the second half, row among the rows of its half) for each row of a rank's shard.

    Rows before the first sequence or after the last have the sequence -1. Halves are the two chunks of each sequence.
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


def correct(given: Correction) -> None:
    """Join a step (`Correction`). Raises InvalidInput before any write if cu_seqlens has more rows than a tensor."""
    check_values(given.cu_seqlens, given.rows, "lse" if given.quantity in ("lse", "read_lse") else given.quantity)
    out, step, lse, lse_step, packed = given.out, given.step, given.lse, given.lse_step, given.packed
    sequence, position, in_second, inside = halves(given.cu_seqlens, given.rows)
    done = torch.where(in_second, STEPS.index(given.second), STEPS.index(given.first))
    row = torch.nonzero((sequence >= 0) & (done > 0))[:, 0]
    if not len(row):
        return
    sequence, position, in_second, inside, copied = (
        x[row] for x in (sequence, position, in_second, inside, done == STEPS.index("copy"))
    )
    of_halves = "nothing" in (given.first, given.second)
    step_row = inside if of_halves else row
    begin = given.cu_seqlens.long()[sequence]  # row `begin` of a batch is row count(begin) of its half
    begin = torch.where(in_second, count(begin, 1, 2), count(begin, 0, 2))
    columns = (row, step_row) if packed else (position, inside - begin if of_halves else position)
    labels = ("lse", "second_half_lse_seqlen" if given.quantity == "read_lse" else "lse_per_step")
    for label, x, column in zip(labels, (lse, lse_step), columns):
        needed = int(column.max()) + 1
        if x is not None and needed > x.shape[-1]:
            raise InvalidInput(f"{label} has room for {x.shape[-1]} rows, but cu_seqlens has {needed}")
    heads = slice(None)
    at, at_step = ((heads, column) if packed else (sequence, heads, column) for column in columns)
    if lse is not None and lse_step is not None:
        if given.quantity == "lse":
            lse[at] = torch.logaddexp(lse[at], lse_step[at_step])
        elif given.quantity == "read_lse":
            lse_step[at_step] = lse[at]
    if out is not None and step is not None:
        x = step[step_row]
        if lse is not None and lse_step is not None:
            factor = torch.exp(lse_step[at_step] - lse[at])
            factor = (factor.t() if packed else factor)[..., None]
            x = torch.where(x == 0, 0.0, x.float() * factor).to(out.dtype)
        out[row] = torch.where(copied[:, None, None], x, (out[row].float() + x.float()).to(out.dtype))
