"""Conversion: y = x / scale in a format, where the scale is given, or the largest |x| over the format's largest number.

Sources: arXiv:2209.05433 (fp8), OCP Microscaling Formats 1.0 and arXiv:2506.08027 (powers of two), arXiv:2509.25149
(NVFP4). It has no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_float

import torch
from torch import Tensor

from ..plan.options import Options
from ..plan.views import DTYPE_NAMES, E8M0, FORMATS, FP8S, Tensors, block_format
from .positions import sequences_of, spare


def divided(y: Tensor, scale: Tensor, word: str) -> Tensor:
    """y / scale in a format of `FORMATS`: fp32 times the fp32 reciprocal, clamped to its largest number, rounded once.

    NaN stays; as int8 and fp4 it becomes the largest number.
    """
    dtype, largest, per_item = FORMATS[word]
    units = (y.float() * (1 / scale)).clamp(-largest, largest)
    if per_item == 2:
        return _two_in_a_byte(units.nan_to_num(largest)).view(dtype)
    return (units.nan_to_num(largest).round() if dtype == torch.int8 else units).to(dtype)


def _two_in_a_byte(units: Tensor) -> Tensor:
    """Numbers up to 6 in size as e2m1, rounded to the nearest, ties to the even; the first of two in the low bits."""
    below = torch.tensor((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), dtype=torch.float32)  # halfway between e2m1's numbers
    below[1::2] = torch.nextafter(below[1::2], below.new_zeros(()))  # which goes up to the even number
    codes = torch.bucketize(units.abs().contiguous(), below.to(units.device)) | units.signbit().long() << 3
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)


def forward(letter: str, x: Tensor, t: Tensors, o: Options) -> Tensor:
    """Heads divided by their given scales, if they have some."""
    return divided(x, _given(letter, x, t, o), o.out_dtype) if f"{letter}_scale" in t else x


def scaled(letter: str, x: Tensor, t: Tensors, o: Options) -> tuple[Tensor, Tensor]:
    """(heads in a format, the scale of each head or group, (batch, seq, heads, groups)).

    A given scale is the unit of scales in "fp8".
    """
    rows = x.float().unflatten(-1, (-1, o.group or x.shape[-1]))
    scale = _unit(rows.abs().amax(-1), o)
    stored = scale
    if o.scale_out.startswith("e8m0"):
        exponents = powers_of_two(scale)
        scale = value_of_powers(exponents)
        stored = exponents.view(E8M0) if o.scale_out == "e8m0" else scale
    elif o.scale_out == "fp8":
        unit = _given(letter, x, t, o)
        none = unit == 0  # as of a tensor of zeros
        stored = divided(scale.masked_fill(none, 0), unit.masked_fill(none, 1), "fp8")
        scale = stored.float() * unit
        scale = scale.masked_fill(scale == 0, torch.inf)  # elements without a scale become zeros
    return divided(rows, scale[..., None], o.out_dtype).flatten(-2), stored


def cached(letter: str, x: Tensor, t: Tensors, o: Options) -> tuple[Tensor, Tensor | None]:
    """(heads in the format of their cache, their scales if the cache has block scales)."""
    cache = t[f"{letter}_cache"]
    if f"{letter}_block_scale" in t:
        out_dtype, group, scale_out = block_format(t, x.shape[-1], o)
        return scaled(letter, x, t, o._replace(out_dtype=out_dtype, group=group, scale_out=scale_out))
    if cache.dtype in FP8S:
        return divided(x, _given(letter, x, t, o), DTYPE_NAMES[cache.dtype]), None
    return x.to(cache.dtype), None


def row_scales(x: Tensor, t: Tensors, o: Options) -> Tensor:
    """The scales of the heads of each batch row, (B, H), or of each sequence, (N, H); the least without tokens."""
    largest, beyond = x.float().abs(), spare(x.shape[1], t, o)
    if beyond is not None:
        sequence = sequences_of(x.shape[1], t, o)[~beyond, None]
        of_rows, found = largest.new_zeros((len(t["cu_seqlens"]) - 1, x.shape[2])), largest[0].amax(-1)[~beyond]
        return _unit(of_rows.scatter_reduce(0, sequence.expand_as(found), found, "amax"), o)
    return _unit(largest.amax((1, 3)) if largest.shape[1] else largest.sum((1, 3)), o)


def _given(letter: str, x: Tensor, t: Tensors, o: Options) -> Tensor:
    """The given scale of heads, (batch or 1, seq or 1, heads, 1) or a number; 1 without one.

    After the last sequence v has the scale of that one, and zeros of q and k have 1. It is also 1 with scales of no
    sequences, (0, H).
    """
    scale = t.get(f"{letter}_scale")
    if scale is None or scale.numel() == 1:
        return torch.ones((), dtype=torch.float32, device=x.device) if scale is None else scale.reshape(())
    if "cu_seqlens" in t:
        rows = scale if scale.dim() > 1 else scale[None]
        if len(rows) != 1:
            rows = rows[sequences_of(x.shape[1], t, o)] if len(rows) else rows.new_ones((1, rows.shape[1]))
        beyond = spare(x.shape[1], t, o)
        rows = rows if letter == "v" or beyond is None else torch.where(beyond[:, None], 1, rows)
        return rows[None, ..., None]
    return scale.reshape(-1, 1, scale.shape[-1], 1)


def least_scales(shape: Sequence[int], like: Tensor, o: Options) -> Tensor:
    """The scales of heads of zeros: the product of two fp32 numbers, rounded to fp32."""
    number = c_float(1e-12).value * c_float(1 / FORMATS[o.out_dtype].largest).value
    return like.new_full(shape, number, dtype=torch.float32)


def _unit(largest: Tensor, o: Options) -> Tensor:
    least = 1e-12 if o.scale_out == "fp32" else 0
    return (largest.clamp(min=least) * (1 / FORMATS[o.out_dtype].largest)).contiguous()


def powers_of_two(x: Tensor) -> Tensor:
    """Sizes in fp32, rounded up to powers of two from 2^-127 to 2^127, as the bytes of e8m0; 255 is NaN."""
    bits = x.view(torch.int32)
    above = (bits + 0x7FFFFF) >> 23
    exponents = torch.where(bits <= 0x400000, 0, above.clamp(max=254)).masked_fill(x.isnan(), 255)
    return exponents.to(torch.uint8)


def value_of_powers(exponents: Tensor) -> Tensor:
    """The numbers of bytes of e8m0, in fp32."""
    bits = exponents.int() << 23
    bits = torch.where(exponents == 0, 0x400000, torch.where(exponents == 255, 0x7FC00000, bits))
    return bits.int().view(torch.float32)
