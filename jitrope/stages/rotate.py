"""Rotation of q and k: y0 = x0 cos - x1 sin, y1 = x1 cos + x0 sin of each pair. Source: arXiv:2104.09864."""

from __future__ import annotations

import torch
from torch import Tensor

from ..plan.options import Options
from ..plan.views import Tensors, table_pair, table_view
from .positions import POSITIONS, TURNED, cleared, gathered, table_rows


def forward(letter: str, x: Tensor, t: Tensors, o: Options) -> Tensor:
    """Heads, rotated, with their pairs as they are read, in fp32 with the strides of x.

    Products and the sum are rounded separately, as in torch's real multiplies; complex multiplies and the fused product
    of "addcmul" are torch's own. With "dtype" each step is rounded to the dtype of the call's heads.
    """
    if letter not in TURNED:
        return x
    cos, sin, still = _turns(x.shape[1], t[letter].dtype, t, o)
    heads = x.to(cos.dtype if o.rounding == "complex128" else torch.float32)
    if "cu_seqlens" in t:  # tokens after the last sequence may hold NaN, which must not reach the tables' gradients
        heads = cleared(letter, heads, t, o)
    first, end = o.rotary_offset, o.rotary_offset + o.rotary_dim
    x0, x1 = _members(heads[..., first:end], o.interleaved)
    full = cos.shape[-1] == o.rotary_dim
    cos0, cos1 = _members(cos, o.interleaved) if full else (cos, cos)
    sin0, sin1 = _members(sin, o.interleaved) if full else (sin, sin)
    if o.rounding.startswith("complex") and not full:  # torch's, which may round a row's last pairs otherwise
        turned = torch.complex(x0, x1) * torch.complex(cos0, sin0)
        y0, y1 = turned.real, turned.imag
    else:
        y0 = _sum_of_products(x0, cos0, x1, -sin0, o.rounding)
        y1 = _sum_of_products(x1, cos1, x0, sin1, o.rounding)
    if "cu_seqlens" in t:
        y0, y1 = cleared(letter, y0, t, o), cleared(letter, y1, t, o)
    y = _with_pairs(x, heads, y0, y1, o.interleaved, (first, end))
    y = y if still is None else torch.where(still, heads, y)
    return y.float()


def back(letter: str, x: Tensor, grad: Tensor, t: Tensors, o: Options, found: Tensors) -> Tensor:
    """The rotation back."""
    return forward(letter, grad, t, o._replace(inverse=not o.inverse))


def paired(letter: str, x: Tensor, o: Options, back: bool = False) -> Tensor:
    """Heads with their pairs as they are read -> as they are stored; `back`: the other way."""
    if letter not in TURNED or o.interleaved == o.interleaved_out:
        return x
    read, stored = (o.interleaved_out, o.interleaved) if back else (o.interleaved, o.interleaved_out)
    first, end = o.rotary_offset, o.rotary_offset + o.rotary_dim
    return _with_pairs(x, x, *_members(x[..., first:end], read), stored, (first, end))


def _turns(tokens: int, dtype: torch.dtype, t: Tensors, o: Options) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cosines and sines of each token, (batch or 1, seq, head or 1, width), and a mask of tokens that are not rotated.

    They are in fp32, with "complex128" in fp64, with "dtype" in the dtype of the call's heads.
    """
    compute_dtype = torch.float64 if o.rounding == "complex128" else torch.float32
    plain = o.table == "cos_sin"
    cos, sin = (t["cos"], t["sin"]) if plain else table_pair(t["cos"], t.get("sin"), o.table)
    cos, sin = table_view(cos).to(compute_dtype), table_view(sin).to(compute_dtype)
    if o.table == "freqs":
        cos, sin = cos.cos() * o.mscale, sin.sin() * o.mscale
    if o.rounding == "dtype":
        cos, sin = cos.to(dtype), sin.to(dtype)
    sin = _transposed(sin, o) if o.inverse else sin
    if o.cp_size == 1 and not o.unrotated and POSITIONS.isdisjoint(t):
        return cos[:, :tokens], sin[:, :tokens], None
    rows = table_rows(tokens, cos.device, t, o)
    below = (rows[0] < 0)[..., None, None]
    rows = rows.clamp(min=0) if o.unrotated else rows.abs() if o.shifts else rows
    cos, sin = gathered(cos, rows, o), gathered(sin, rows, o)
    sin = torch.where(below, _transposed(sin, o), sin) if o.shifts else sin
    return cos, sin, below if o.unrotated else None


def _transposed(sin: Tensor, o: Options) -> Tensor:
    """The sines of the rotation back: negated, each at the partner."""
    if sin.shape[-1] != o.rotary_dim:
        return -sin
    sin0, sin1 = _members(sin, o.interleaved)
    return torch.stack((-sin1, -sin0), -1).flatten(-2) if o.interleaved else torch.cat((-sin1, -sin0), -1)


def _sum_of_products(a: Tensor, b: Tensor, c: Tensor, d: Tensor, rounding: str) -> Tensor:
    """a b + c d. With "dtype" each step is rounded to the dtype of the tables b and d."""
    if rounding == "addcmul":
        return torch.addcmul(a * b, c, d)
    if rounding == "dtype":
        return (a * b).to(b.dtype) + (c * d).to(b.dtype)
    return a * b + c * d


def _members(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The first and the second member of each pair along the last axis."""
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _with_pairs(like: Tensor, x: Tensor, y0: Tensor, y1: Tensor, interleaved: bool, within: tuple[int, int]) -> Tensor:
    """Heads x with other members in their pairs, and with the strides of `like`: sums of norms depend on them."""
    first, end = within
    out = torch.empty_like(like, dtype=x.dtype)
    out = out if end - first == x.shape[-1] else out.copy_(x)
    for n, y in enumerate((y0, y1)):  # a view from before a write cannot be written under autograd
        _members(out[..., first:end], interleaved)[n].copy_(y)
    return out
