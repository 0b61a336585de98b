"""Tables of the host in the form that jitrope reads: views of them where that will do, for copies take memory.

What has to be converted is converted in each call, and nothing is kept. A table may be written to between two calls
without a sign of it: inference tensors have no version, and a write through `.data` does not change one.
"""

from __future__ import annotations

import torch
from torch import Tensor


def of_pairs(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Of each pair the first cosine and the second sine, as views: half the width of a head."""
    return cos[..., 0::2], sin[..., 1::2]


def columns(table: Tensor) -> tuple[Tensor, ...]:
    """The cosines and sines of a table of 2 x 2 rotations [[cos, -sin], [sin, cos]], the last two axes: one copy."""
    return table.select(-1, 0).contiguous().unbind(-1)


def no_turn(table: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Cosines of one and sines of zero, (rows, W) of a table's width and dtype: one row, seen as many."""
    width = table.shape[-1]
    return table.new_ones(1, width).expand(rows, -1), table.new_zeros(1, width).expand(rows, -1)


def lengthened(table: Tensor, rows: int, value: float) -> Tensor:
    """A table (S, W) with rows of one value behind it, `rows` in all."""
    return torch.nn.functional.pad(table, (0, 0, 0, rows - table.shape[0]), value=value)


def waves(angles: Tensor) -> tuple[Tensor, Tensor]:
    """The cosines and sines of angles in radians, taken in fp32."""
    angles = angles.float()
    return angles.cos(), angles.sin()
