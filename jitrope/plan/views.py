"""Views of heads, tables and positions, in the order of axes that plans, kernels and the reference share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .spec import LAYOUT_AXES, Options

FP8 = torch.float8_e4m3fn
Tensors = dict[str, Tensor]
"""A call's tensors by the names of their arguments; one that is not given is not there."""
Weights = tuple["Tensor | None", "Tensor | None"]
"""Of the norms of q and k."""


class Tables(NamedTuple):
    """The tables, and the tokens' positions in them. Without sin, cos is one table; `Options.table` is its kind."""

    cos: Tensor
    sin: Tensor | None = None
    cu_seqlens: Tensor | None = None
    start_positions: Tensor | None = None
    position_ids: Tensor | None = None


def tables_of(tensors: Tensors) -> Tables:
    """The tables among a call's tensors."""
    return Tables(*[tensors.get(name) for name in Tables._fields])  # type: ignore[arg-type]


def canonical(x: Tensor, layout: str) -> Tensor:
    """A (batch, seq, head, dim) view of a tensor in `layout`."""
    batch, *rest = LAYOUT_AXES[layout]
    return x.unsqueeze(0) if batch is None else x.permute(batch, *rest)


def table_view(table: Tensor) -> Tensor:
    """A (batch, position, head, width) view of a table with 2, 3 or 4 axes."""
    if table.dim() == 4:
        return table
    return table[None, :, None] if table.dim() == 2 else table[:, :, None]


def table_pair(cos: Tensor, sin: Tensor | None, table: str) -> tuple[Tensor, Tensor]:
    """cos and sin as two views; of angles both are the angles. `table` is a word of `spec.TABLES`."""
    sin = cos if sin is None else sin
    if table == "cos_sin_cache":
        half = cos.shape[-1] // 2
        return cos[..., :half], sin[..., half:]
    if table == "freqs_cis":
        real, imag = (torch.view_as_real(x.resolve_conj()) for x in (cos, sin))
        return real[..., 0], imag[..., 1]
    return cos, sin


def ids_view(position_ids: Tensor, options: Options) -> Tensor:
    """An (axes, batch, seq) view of position_ids; batch is 1 where they are shared."""
    ids = position_ids if options.mrope_section else position_ids[None]
    return ids if ids.dim() == 3 else ids[:, None]
