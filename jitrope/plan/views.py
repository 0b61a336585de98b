"""Views of heads, tables and positions, in the order of axes that plans, kernels and the reference share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .spec import LAYOUT_AXES, Options

FP8 = torch.float8_e4m3fn


class Format(NamedTuple):
    """Elements that are stored divided by a scale: their dtype, and its largest number."""

    dtype: torch.dtype
    largest: float


FORMATS = {
    "fp8": Format(FP8, 448.0),
    "fp8_e5m2": Format(torch.float8_e5m2, 57344.0),
    "int8": Format(torch.int8, 127.0),
}
"""The formats by the words of `spec.SCALED_DTYPES`."""
E8M0: torch.dtype = getattr(torch, "float8_e8m0fnu", torch.uint8)
"""Powers of two; before torch 2.7 their bytes."""
SCALES = {"fp32": torch.float32, "e8m0": E8M0}
"""The dtypes of dynamic scales by the words of `spec.SCALE_DTYPES`."""
GROUPS = (32, 64, 128)
"""Numbers of neighbouring elements of a head that may share a scale."""
FP8S = (FP8, torch.float8_e5m2)
"""The dtypes with scales of the caller."""
Tensors = dict[str, Tensor]
"""A call's tensors by the names of their arguments, without those that were not given."""
TABLE_NAMES = ("cos", "sin", "cu_seqlens", "start_positions", "position_ids")
"""The tables, and the tokens' positions in them. Without sin, cos is a single table of the kind `Options.table`."""


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
    """cos and sin as two views; for freqs both are the angles. `table` is a word of `spec.TABLES`."""
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
