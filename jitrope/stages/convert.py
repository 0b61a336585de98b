"""Conversion: y = x / scale in a format, where the scale is given, or the largest |x| over the format's largest number.

Sources: arXiv:2209.05433 (fp8), OCP Microscaling Formats 1.0 and arXiv:2506.08027 (powers of two), arXiv:2509.25149
(NVFP4). It has no gradient.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from ctypes import c_float
from dataclasses import field

import torch
from torch import Tensor

from ..base.spec import DTYPES, OF_NORM
from ..base.views import BLOCK_SCALES, DTYPE_NAMES, E8M0, FORMATS, FP8S, SCALES, Tensors
from . import positions
from .positions import sequences_of, spare

SCALED_DTYPES = ("fp8", "fp8_e5m2", "int8", "fp4")
SCALE_DTYPES = ("fp32", "e8m0", "fp8", "e8m0_fp32")
SCALE_FMTS = ("", "ue8m0")
TENSORS = ("q_scale", "k_scale", "v_scale")
_SCALES = " ".join(TENSORS)
ARGUMENTS = {
    "dynamic_v": ("void* v_scale_out", "Strides v_scale_stride: v_scale_out"),
    "head_scales": ("", f"ScaleStrides scale_strides: {_SCALES}"),
}


class Words(positions.Words):
    """Its words."""

    out_dtype: str = "fp8"  # of elements that are divided by scales
    computed: bool = False  # the call computes the scales of q, and of k without a cache
    group: int = 0  # neighbouring elements of a head with one dynamic scale; 0: the head
    scale_out: str = "fp32"  # the dtype of dynamic scales
    swizzled: bool = False  # in tiles of 128 tokens and 4 groups
    per_row: bool = False  # dynamic scales alone, each of a head of a batch row or a sequence
    dynamic_v: bool = False  # v has dynamic scales too
    scale_fmt: str = ""  # "ue8m0": computed scales beside a cache are powers of two


class Fields:
    """Constants of a kernel."""

    q_out: str = field(metadata={"words": (*DTYPES, *SCALED_DTYPES)})  # the stored type: dtype, or a format
    kv_out: str = field(metadata={"words": (*DTYPES, *SCALED_DTYPES)})
    dynamic: bool = field(metadata=OF_NORM)  # the kernel computes scales
    dynamic_q: bool = field(metadata=OF_NORM | {"given": "q_scale_out"})  # of q, and of k without a cache
    group: int = field(metadata=OF_NORM)  # neighbouring elements of a head that share a scale; 0: all
    scale_out: str = field(metadata=OF_NORM | {"words": SCALE_DTYPES})  # the scales' type
    swizzled: bool = field(metadata=OF_NORM)  # those of q and k are in tiles
    per_row: bool  # nothing but the scale of each head of a batch row or a sequence
    convert_v: bool  # v is divided by scales too
    head_scales: bool  # each head has its own given scale of fp8


def block_format(t: Tensors, head_dim: int, o: Words) -> tuple[str, int, str]:
    """out_dtype, group and scale_out for a call's cache with block scales."""
    cache, scale = t["k_cache"], t[BLOCK_SCALES[0]]
    dtype = next(name for name, found in SCALES.items() if found == scale.dtype)
    powers = o.scale_fmt == "ue8m0" and dtype == "fp32"
    return DTYPE_NAMES[cache.dtype], head_dim // scale.shape[-1], "e8m0_fp32" if powers else dtype


def converts_v(given: Container[str], dynamic_v: bool) -> bool:
    """Whether a call returns v divided by scales. A cache has its own. given: the names of the call's tensors."""
    return dynamic_v or ("v_scale" in given and "v_cache" not in given)


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


def forward(letter: str, x: Tensor, t: Tensors, o: Words) -> Tensor:
    """Heads divided by their given scales, if they have some."""
    return divided(x, _given(letter, x, t, o), o.out_dtype) if f"{letter}_scale" in t else x


def scaled(letter: str, x: Tensor, t: Tensors, o: Words) -> tuple[Tensor, Tensor]:
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


def cached(letter: str, x: Tensor, t: Tensors, o: Words) -> tuple[Tensor, Tensor | None]:
    """(heads in the format of their cache, their scales if the cache has block scales)."""
    cache = t[f"{letter}_cache"]
    if f"{letter}_block_scale" in t:
        out_dtype, group, scale_out = block_format(t, x.shape[-1], o)
        return scaled(letter, x, t, o._replace(out_dtype=out_dtype, group=group, scale_out=scale_out))
    if cache.dtype in FP8S:
        return divided(x, _given(letter, x, t, o), DTYPE_NAMES[cache.dtype]), None
    return x.to(cache.dtype), None


def row_scales(x: Tensor, t: Tensors, o: Words) -> Tensor:
    """The scales of the heads of each batch row, (B, H), or of each sequence, (N, H); the least without tokens."""
    largest, beyond = x.float().abs(), spare(x.shape[1], t, o)
    if beyond is not None:
        sequence = sequences_of(x.shape[1], t, o)[~beyond, None]
        of_rows, found = largest.new_zeros((len(t["cu_seqlens"]) - 1, x.shape[2])), largest[0].amax(-1)[~beyond]
        return _unit(of_rows.scatter_reduce(0, sequence.expand_as(found), found, "amax"), o)
    return _unit(largest.amax((1, 3)) if largest.shape[1] else largest.sum((1, 3)), o)


def _given(letter: str, x: Tensor, t: Tensors, o: Words) -> Tensor:
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


def least_scales(shape: Sequence[int], like: Tensor, o: Words) -> Tensor:
    """The scales of heads of zeros: the product of two fp32 numbers, rounded to fp32."""
    number = c_float(1e-12).value * c_float(1 / FORMATS[o.out_dtype].largest).value
    return like.new_full(shape, number, dtype=torch.float32)


def _unit(largest: Tensor, o: Words) -> Tensor:
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
