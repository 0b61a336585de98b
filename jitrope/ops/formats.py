"""The conversion of elements in plain torch: the Hadamard transform, scales, and division by them."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_float

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..plan.options import LAYOUT_AXES, Options
from ..plan.views import E8M0, FORMATS, SCALES, Tensors, canonical
from .rows import sequences_of

TILE = (128, 4)  # tokens and groups of a tile of swizzled scales


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
    halfway = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between e2m1's numbers
    below = torch.tensor(halfway, dtype=torch.float32)
    below[1::2] = torch.nextafter(below[1::2], below.new_zeros(()))  # halfway goes up to the even number
    codes = torch.bucketize(units.abs().contiguous(), below.to(units.device)) | units.signbit().long() << 3
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)


def given_scale(name: str, y: Tensor, t: Tensors, o: Options) -> Tensor:
    """The scale of the heads y of q, k or v against y's axes: one number, or those of (H), (B, H) or sequences, (N, H).

    After the last sequence v has the scale of that one, and zeros of q and k have 1. Without a scale, and with none of
    no sequences, (0, H), it is 1.
    """
    scale = t.get(f"{name}_scale")
    if scale is None or scale.numel() == 1:
        return torch.ones((), dtype=torch.float32, device=y.device) if scale is None else scale.reshape(())
    if "cu_seqlens" in t:  # y is (T, H, D)
        sequences, spare = sequences_of(len(y), t, o)
        rows = scale if scale.dim() > 1 else scale[None]
        rows = rows[sequences] if len(rows) > 1 else rows if len(rows) else rows.new_ones((1, rows.shape[1]))
        return (rows if name == "v" else torch.where(spare[:, None], 1, rows))[..., None]
    batch, _, head, _ = LAYOUT_AXES[o.layout]
    shape = [1] * len(o.layout)
    shape[head] = scale.shape[-1]
    if batch is not None and scale.dim() > 1:
        shape[batch] = len(scale)
    return scale.reshape(shape)


def scaled_elements(y: Tensor, o: Options, unit: Tensor) -> tuple[Tensor, Tensor]:
    """y in a format, and the scale of each head or group: its largest element over the format's largest number.

    unit: that of scales in "fp8", against y's axes.
    """
    rows = y.unflatten(-1, (-1, o.group or y.shape[-1]))
    scale = _unit(rows.abs().amax(-1), o)
    stored = scale
    if o.scale_out.startswith("e8m0"):
        exponents = powers_of_two(scale)
        scale = value_of_powers(exponents)
        stored = exponents.view(E8M0) if o.scale_out == "e8m0" else scale
    elif o.scale_out == "fp8":
        none = unit == 0  # as of a tensor of zeros
        stored = divided(scale.masked_fill(none, 0), unit.masked_fill(none, 1), "fp8")
        scale = stored.float() * unit
        scale = scale.masked_fill(scale == 0, torch.inf)  # elements without a scale become zeros
    values = divided(rows, scale[..., None], o.out_dtype).flatten(-2)
    return values, stored if o.group else stored[..., 0]


def row_scales(y: Tensor, t: Tensors, o: Options) -> Tensor:
    """The scales of the heads of each batch row of y, (B, H), or of each sequence, (N, H); the least without tokens."""
    largest = canonical(y, o.layout).abs()
    if "cu_seqlens" in t:
        sequence, spare = sequences_of(len(y), t, o)
        of_rows, kept = largest.new_zeros((len(t["cu_seqlens"]) - 1, y.shape[1])), largest[0].amax(-1)[~spare]
        return _unit(of_rows.scatter_reduce(0, sequence[~spare, None].expand_as(kept), kept, "amax"), o)
    return _unit(largest.amax((1, 3)) if largest.shape[1] else largest.sum((1, 3)), o)


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


def empty_elements(x: Tensor, word: str) -> Tensor:
    """A tensor for the elements of x in a format, in the order of x's axes."""
    dtype, _, per_item = FORMATS[word]
    return torch.empty_like(x if per_item == 1 else x[..., : x.shape[-1] // per_item], dtype=dtype)


def empty_heads(like: Tensor, shape: tuple[int, ...], word: str) -> Tensor:
    """A contiguous tensor for heads of a shape (..., D), in a format, or without a word in the dtype of `like`."""
    if not word:
        return like.new_empty(shape)
    dtype, _, per_item = FORMATS[word]
    return like.new_empty((*shape[:-1], shape[-1] // per_item), dtype=dtype)


def empty_scale(x: Tensor, o: Options, per_item: int = 1) -> Tensor:
    """A tensor for the scales of x. Swizzled scales are padded with zeros to whole tiles.

    per_item: the elements of a head in an item of x.
    """
    if not o.swizzled:
        groups = (x.shape[-1] * per_item // o.group,) if o.group else ()
        return x.new_empty((*x.shape[:-1], *groups), dtype=SCALES.get(o.scale_out, torch.float32))
    ranks = x.shape[: x.dim() - len(o.layout)]  # with a group of heads for each
    batch, tokens, heads, dim = canonical(x[0] if ranks else x, o.layout).shape
    dim *= per_item
    rows, columns = -(-tokens // TILE[0]) * TILE[0], -(-dim // (o.group * TILE[1])) * TILE[1]
    whole = type(tokens) is int and (tokens, dim // o.group) == (rows, columns)  # every byte is written
    made = (x.new_empty if whole else x.new_zeros)((*ranks, batch, heads, rows, columns), dtype=torch.uint8)
    return made.view(SCALES[o.scale_out])


def stored_scale(scale: Tensor, o: Options) -> Tensor:
    """The scales of groups, (..., D / group), as the call returns them: as they are, or swizzled.

    Swizzled they are tiles of 128 tokens and 4 groups, one after the other along the groups. In a tile those of tokens
    0, 32, 64 and 96 are neighbours, then come 1, 33, 65, 97 and so on. Source: NVIDIA's documentation of cuBLAS, "1D
    Block Scaling Factors Layout".
    """
    if not o.swizzled:
        return scale
    by_head = canonical(scale, o.layout).transpose(1, 2).view(torch.uint8)
    tokens, groups = by_head.shape[2:]
    padded = pad(by_head, (0, -groups % TILE[1], 0, -tokens % TILE[0]))
    tiles: Tensor = padded.unflatten(3, (-1, TILE[1])).unflatten(2, (-1, 4, TILE[0] // 4))
    return tiles.permute(0, 1, 2, 5, 4, 3, 6).reshape(padded.shape).view(scale.dtype)


def with_hadamard(x: Tensor) -> Tensor:
    """Heads in fp32 times the orthogonal Hadamard matrix (Sylvester's order). The order of sums is the kernel's."""
    bits = x.shape[-1].bit_length() - 1
    for bit in range(bits):
        pairs = x.unflatten(-1, (-1, 2, 1 << bit))
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((a + b, a - b), -2).flatten(-3)
    return x * (0.5 ** (bits // 2) * (0.5**0.5 if bits % 2 else 1))
