"""Tables of the host in the form that jitrope reads: converted once, and kept as long as the host keeps its own."""

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
        value = convert(table, *arguments)
        if table.is_cuda and torch.cuda.is_current_stream_capturing():
            return value  # its memory is the graph's, and its contents are there when that is replayed
        values[key] = value
        _tables[table] = known
    return values[key]


def moved(table: Tensor, device: torch.device) -> Tensor:
    """The table on a device; offloaded ones are moved once, and not by every call."""
    return table if table.device == device else kept(_to, table, device)


def planes(table: Tensor) -> tuple[Tensor, Tensor]:
    """The cosines and sines of a complex table."""
    pairs = torch.view_as_real(table.resolve_conj())
    return pairs[..., 0].contiguous(), pairs[..., 1].contiguous()


def columns(table: Tensor) -> tuple[Tensor, Tensor]:
    """The cosines and sines of a table of 2 x 2 rotations [[cos, -sin], [sin, cos]], the last two axes."""
    return table[..., 0, 0].contiguous(), table[..., 1, 0].contiguous()


def even(table: Tensor) -> Tensor:
    return table[..., 0::2].contiguous()


def odd(table: Tensor) -> Tensor:
    return table[..., 1::2].contiguous()


def waves(angles: Tensor) -> tuple[Tensor, Tensor]:
    """The cosines and sines of angles in radians, taken in fp32."""
    angles = angles.float()
    return angles.cos(), angles.sin()


def _to(table: Tensor, device: torch.device) -> Tensor:
    return table.to(device)
