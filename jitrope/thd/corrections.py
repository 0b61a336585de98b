"""Ring attention's corrections in plain torch: the oracle of the tests and the implementation for CPU tensors."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..base.errors import InvalidInput
from ..plan.partition import count
from .reference import check_values, placed
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


def halves(cu_seqlens: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(sequence, position in it, whether in its second half, place in the half, row of the half) of each row of a rank.

    Halves are the two chunks of each sequence; their rows are counted over all sequences. The sequence is -1 before the
    first and after the last.
    """
    offsets = cu_seqlens.long()
    sequence, position = placed(offsets, rows)
    sequence = torch.where(sequence == len(offsets) - 1, -1, sequence)
    first, end = offsets[sequence], offsets[sequence + 1]
    size = count(end, 0, 2) - count(first, 0, 2)
    second = position >= size
    place = position - size * second
    return sequence, position, second, place, place + count(first, second.long(), 2)


def correct(given: Correction) -> None:
    """Join a step (`Correction`). Raises InvalidInput before any write if cu_seqlens has more rows than a tensor."""
    packed, cu_seqlens, rows, *tensors = cast(Any, given[3:])
    out, step, lse, lse_step = tensors
    check_values(cu_seqlens, rows, "lse" if out is None else given.quantity)
    sequence, position, second, place, inside = halves(cu_seqlens, rows)
    done = torch.where(second, STEPS.index(given.second), STEPS.index(given.first))
    row = torch.nonzero((sequence >= 0) & (done > 0))[:, 0]
    if not len(row):
        return
    sequence, position, place, inside, done = (x[row] for x in (sequence, position, place, inside, done))
    step_row, step_position = (inside, place) if "nothing" in (given.first, given.second) else (row, position)
    columns = (row, step_row) if packed else (position, step_position)
    labels = ("lse", "second_half_lse_seqlen" if given.quantity == "read_lse" else "lse_per_step")
    for label, x, column in zip(labels, (lse, lse_step), columns):
        needed = int(column.max()) + 1
        if x is not None and needed > x.shape[-1]:
            raise InvalidInput(f"{label} has room for {x.shape[-1]} rows, but cu_seqlens has {needed}")
    of_lse, of_step = ((slice(None), x) if packed else (sequence, slice(None), x) for x in columns)
    if given.quantity == "lse":
        lse[of_lse] = torch.logaddexp(lse[of_lse], lse_step[of_step])
    elif given.quantity == "read_lse":
        lse_step[of_step] = lse[of_lse]
    else:
        x = step[step_row]
        if given.quantity == "out":
            factor = torch.exp(lse_step[of_step] - lse[of_lse])
            factor = (factor.t() if packed else factor)[..., None]
            x = torch.where(x == 0, 0.0, x.float() * factor).to(out.dtype)
        copied = (done == STEPS.index("copy"))[:, None, None]
        out[row] = torch.where(copied, x, (out[row].float() + x.float()).to(out.dtype))
