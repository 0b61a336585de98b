"""Every op in plain torch: the oracle of the tests, and the path that CPU tensors take."""

from __future__ import annotations

import torch
from torch import Tensor

from .spec import LAYOUT_AXES


def canonical(x: Tensor, layout: str) -> Tensor:
    """A (batch, seq, head, dim) view of a tensor in `layout`."""
    batch, *rest = LAYOUT_AXES[layout]
    return x.unsqueeze(0) if batch is None else x.permute(batch, *rest)


def table_view(table: Tensor) -> Tensor:
    """A (batch, position, head, width) view of a table with 2, 3 or 4 axes."""
    if table.dim() == 4:
        return table
    return table[None, :, None] if table.dim() == 2 else table[:, :, None]


def positions(tokens: int, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """(position of each token in its sequence, whether it is past the last one), each (tokens,)."""
    token = torch.arange(tokens, device=cu_seqlens.device)
    offsets = cu_seqlens.long()
    sequence = torch.searchsorted(offsets[1:].contiguous(), token, right=True)
    return token - offsets[sequence], sequence == len(offsets) - 1


def rope(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    cu_seqlens: Tensor | None,
    layout: str,
    interleaved: bool,
    rotary_dim: int,
    conjugate: bool,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor | None]:
    """Fresh rotated tensors: y0 = x0 cos - x1 sin, y1 = x1 cos + x0 sin, rounded once at the end.

    Products and the sum round apart, as torch's real and (on a CPU) complex multiplies do.
    """
    outputs: list[Tensor | None] = []
    for x in (q, k):
        if x is None:
            outputs.append(None)
            continue
        out = torch.empty_like(x)
        view = canonical(out, layout)
        c, s = (table_view(table).to(compute_dtype) for table in (cos, sin))
        spare = None
        if cu_seqlens is None:
            c, s = c[:, : view.shape[1]], s[:, : view.shape[1]]
        else:
            position, spare = positions(view.shape[1], cu_seqlens)
            c, s = _gather(c, position), _gather(s, position)
        view.copy_(_rotate(canonical(x, layout).to(compute_dtype), c, s, interleaved, rotary_dim, conjugate))
        if spare is not None:
            view[:, spare] = 0
        outputs.append(out)
    return outputs[0], outputs[1]  # type: ignore[return-value]


def _gather(table: Tensor, position: Tensor) -> Tensor:
    """The table's rows at `position`; NaN past its end."""
    rows = table[:, position.clamp(max=table.shape[1] - 1)]
    return rows.masked_fill((position >= table.shape[1])[None, :, None, None], float("nan"))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, rotary_dim: int, conjugate: bool) -> Tensor:
    """x (batch, seq, head, head_dim), tables broadcastable to it up to the last axis."""
    turned, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    x0, x1 = _members(turned, interleaved)
    full = cos.shape[-1] == rotary_dim
    cos0, cos1 = _members(cos, interleaved) if full else (cos, cos)
    sin0, sin1 = _members(sin, interleaved) if full else (sin, sin)
    if conjugate:  # the transpose: each sine is read at the partner
        sin0, sin1 = -sin1, -sin0
    y0 = x0 * cos0 - x1 * sin0
    y1 = x1 * cos1 + x0 * sin1
    y = torch.stack((y0, y1), -1).flatten(-2) if interleaved else torch.cat((y0, y1), -1)
    return torch.cat((y, rest), -1)


def _members(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The first and the second member of each pair along the last axis."""
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]
