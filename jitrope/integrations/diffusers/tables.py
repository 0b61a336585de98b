"""Tables of the host in the form that jitrope reads: views of them where that will do, for copies take memory.

What has to be converted is converted once, and kept as long as the host keeps its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_tables: WeakIdKeyDictionary = WeakIdKeyDictionary()


def kept(convert: Callable[..., Any], table: Tensor, *arguments: Any) -> Any:
    """`convert(table, *arguments)`, remembered with the table itself, and made again if that was written to."""
    if torch.compiler.is_compiling():
        return convert(table, *arguments)
    version = 0 if table.is_inference() else table._version
    known = _tables.get(table)
    if known is None or known[0] != version:
        known = (version, {})
    values = known[1]
    key = (convert, *arguments)
    if key not in values:
        with torch.inference_mode(False), torch.no_grad():  # what is kept may be used in training too
            value = convert(table, *arguments)
        if table.is_cuda and torch.cuda.is_current_stream_capturing():
            return value  # its memory is the graph's, and its contents are there when that is replayed
        values[key] = value
        _tables[table] = known
    return values[key]


def moved(table: Tensor, device: torch.device) -> Tensor:
    """The table on a device; offloaded ones are moved once, and not by every call."""
    return table if table.device == device else kept(_to, table, device)


def of_pairs(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Of each pair the first cosine and the second sine, as views: half the width of a head."""
    return cos[..., 0::2], sin[..., 1::2]


def columns(table: Tensor) -> tuple[Tensor, Tensor]:
    """The cosines and sines of a table of 2 x 2 rotations [[cos, -sin], [sin, cos]], the last two axes."""
    return table[..., 0, 0].contiguous(), table[..., 1, 0].contiguous()


def no_turn(table: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Cosines of one and sines of zero, (rows, W) of a table's width and dtype: one row, seen as many."""
    width = table.shape[-1]
    return table.new_ones(1, width).expand(rows, -1), table.new_zeros(1, width).expand(rows, -1)


def lengthened(table: Tensor, rows: int, value: float) -> Tensor:
    """A table (S, W) with rows of one value behind it, `rows` in all."""
    return torch.cat((table, table.new_full((rows - table.shape[0], table.shape[1]), value)))


def waves(angles: Tensor) -> tuple[Tensor, Tensor]:
    """The cosines and sines of angles in radians, taken in fp32."""
    angles = angles.float()
    return angles.cos(), angles.sin()


def _to(table: Tensor, device: torch.device) -> Tensor:
    return table.to(device)
