"""Conversion: y = x / scale in a format, where the scale is given, or the largest |x| over the format's largest number.

Sources: arXiv:2209.05433 (fp8), OCP Microscaling Formats 1.0 and arXiv:2506.08027 (powers of two), arXiv:2509.25149
(NVFP4). It has no gradient.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from ctypes import c_float
from dataclasses import field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.arguments import flags, refuse, refuse_beside, tensor, whole, word
from ..base.errors import require
from ..base.spec import DTYPES, OF_NORM
from ..base.views import BLOCK_SCALES, DTYPE_NAMES, E8M0, FORMATS, FP8, FP8S, GROUPS, SCALES, Tensors, canonical
from ..values.asked import Value
from ..values.constants import divisors
from . import positions
from .positions import sequences_of, spare

LABEL = "quantize"
WHOLE = ("computed", "per_row")
SCALE_DTYPES = ("fp32", "e8m0", "fp8", "e8m0_fp32")
SCALE_FMTS = ("", "ue8m0")
TENSORS = ("q_scale", "k_scale", "v_scale", "q_weights")
ARGUMENTS = {
    "dynamic_q": ("ScaleOut* scale_out: q_scale_out k_scale_out", "Strides scale_stride: q_scale_out k_scale_out"),
    "dynamic_v": ("void* v_scale_out", "Strides v_scale_stride: v_scale_out"),
    "head_scales": ("", f"ScaleStrides scale_strides: {' '.join(TENSORS[:3])}"),
    "weighs_q": ("const float* q_weights", "Strides weights_stride: q_weights"),
}
_SCALE_WORDS = {dtype: name for name, dtype in SCALES.items()}


class Quantize(Value):
    """Return q, and without a cache also k, in fp8 (arXiv:2209.05433).

    >>> q, k = torch.randn(2, 1, 16, 8, 64)
    >>> cos, sin = jitrope.tables.cos_sin(16, jitrope.tables.inv_freq(rotary_dim=64)[0])
    >>> q, k, _ = jitrope.prepare_qkv(q, k, None, cos, sin, quantize=jitrope.Quantize(0.05, 0.05))
    >>> q.dtype
    torch.float8_e4m3fn

    Args:
        q_scale, k_scale: the call stores y / scale, clamped to the range of the dtype, and rounded once from fp32 (y
            times the reciprocal of the scale, which fp32 must hold). Numbers, or fp32 tensors on q's device, which the
            host does not read: of one element, or of one for each head, (H), or for each head of a batch row, (B, H).
            With `Packed` also for each head of a sequence, (N, H); v of tokens after the last sequence has that one's
            scale. A cache has its own k_scale.
        v_scale: return v in fp8 too, in the same launch. v must be like k, in shape (not in `prepare_mla_qkv`) and
            dtype, and the heads must share the tables. Refused with a cache, which has its own, and with across_heads
            without mean_squares.
        dtype: torch.float8_e4m3fn, at most 448, or torch.float8_e5m2, at most 57344. A cache has its own dtype.
        hadamard: multiply each head by the orthogonal Hadamard matrix first (Sylvester's order), which spreads large
            elements over the head (QuaRot, arXiv:2404.00456). The scores of q and k do not change; k is transformed in
            a cache too (which must have no k_pe_cache), and v is not. D must be a power of two up to 256.

    Raises:
        InvalidInput: an argument has a wrong type.
    """

    per = "token"

    def __init__(
        self,
        q_scale: float | Tensor,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        *,
        dtype: torch.dtype = FP8,
        hadamard: bool = False,
    ) -> None:
        self.tensors = divisors("Quantize", "q_scale", q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
        form = DTYPE_NAMES[word("Quantize", "dtype", dtype, FP8S)]
        self.words = {"out_dtype": form, **flags("Quantize", hadamard=hadamard)}


class Scaled(NamedTuple):
    """Elements, (B, S, H, D) in the default layout, and their scale, (B, S, H): y is values times scale.

    With groups the scale is (B, S, H, D / group), and y is values times `scale.repeat_interleave(group, -1)`; swizzled
    it is (B, H, S, D / group), padded and in another order (`DynamicQuantize`). With per="head" it is (B, H), and y is
    values times `scale[:, None, :, None]`; with `Packed` it is (N, H), a row for each sequence. With per="kv_head" q's
    scale is (B, Hk); repeat it for the heads of q: `scale.repeat_interleave(Hq // Hk, 1)`. In fp4 the values are
    (B, S, H, D / 2), two in a byte, the first in the low bits. With a global scale y is also multiplied by that.

    >>> q = torch.randn(1, 16, 8, 64)
    >>> scaled, _, _ = jitrope.prepare_qkv(q, None, None, quantize=jitrope.DynamicQuantize(torch.int8))
    >>> error = scaled.values * scaled.scale[..., None] - q
    """

    values: Tensor
    scale: Tensor


class DynamicQuantize(Value):
    """Return q, k and if asked v as `Scaled`, with scales that the launch computes.

    | for | pass |
    | --- | --- |
    | q in fp8 beside an fp8 cache (Qwen3-VL), or FLUX with attention in fp8 | `DynamicQuantize()` |
    | FlashAttention-3 in fp8 | `DynamicQuantize(per="kv_head", v=True)` |
    | q of DeepSeek-V3.2's indexer | `DynamicQuantize(scale_fmt="ue8m0", q_weights=weights)` |
    | DeepSeek V4's output | `DynamicQuantize(group=128)` |
    | MXFP8 | `DynamicQuantize(group=32, scale_dtype=torch.float8_e8m0fnu)` |

    >>> q, k = torch.randn(2, 1, 16, 8, 64)
    >>> cos, sin = jitrope.tables.cos_sin(16, jitrope.tables.inv_freq(rotary_dim=64)[0])
    >>> q, k, _ = jitrope.prepare_qkv(q, k, None, cos, sin, quantize=jitrope.DynamicQuantize())
    >>> q.values.dtype, q.scale.shape
    (torch.float8_e4m3fn, torch.Size([1, 16, 8]))

    Args:
        dtype: torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, or for fp4 (e2m1) torch.float4_e2m1fn_x2, before
            torch 2.8 torch.uint8. The scale is a head's largest element in size, at least 1e-12, times 1 / 448,
            1 / 57344, 1 / 127 or 1 / 6, in fp32. Elements in fp4 are rounded to the nearest number, ties to even. It
            needs an even D, elements that are neighbours in memory, even strides and offsets,
            an even rotary_offset, and a rotary_dim that is a multiple of 4 (interleaved: of 2). A bias needs such
            elements too, and so do tensors of `out` that are not fp4.
        group: None: a head has one scale. 16, 32, 64 or 128: that many neighbouring elements of a head share a scale,
            computed in the same way. It must divide D.
        scale_dtype: torch.float32, or torch.float8_e8m0fnu (before torch 2.7 torch.uint8): the scale is then rounded up
            to a power of two, 2^ceil(log2(largest / 448)), without the bound of 1e-12. With groups of 32 this is
            MXFP8 for e4m3 and MXFP4 for fp4 (OCP Microscaling Formats 1.0). The standard leaves the rounding of scales
            open; rounding up is the rule of arXiv:2506.08027, cuDNN's block scale quantize and Megatron-core's
            `mxfp8_quantize`. No element saturates. A group of zeros has the byte 0. Only for fp4
            torch.float8_e4m3fn, with group=16 NVFP4: the scale is rounded to the nearest number of e4m3, at most 448.
            If it becomes 0, its elements are 0.
        scale_fmt: None, or "ue8m0", DeepSeek-V3.1's word: scales are rounded up to powers of two, as above, but stay in
            torch.float32, as DeepGEMM reads them on Hopper (there with group=128). With a scale_dtype of
            torch.float8_e8m0fnu they are the bytes. A group of zeros has the scale 2^-127. It cannot be combined with
            scales in e4m3, swizzled without a scale_dtype, per="head" and per="kv_head". Beside a cache with block
            scales in fp32 give it to `KVCache` too.
        q_global_scale, k_global_scale, v_global_scale: the unit of scales in e4m3; positive numbers, or tensors as in
            `Quantize`; default 1. The scale is largest / 6 / global, rounded, and 0 if global is; y is values times
            scale times global. In arXiv:2509.25149 global is the tensor's largest element in size, divided by 448 * 6.
            With a cache only q's is allowed.
        q_weights: (B, S, Hq) in fp32 on q's device, or q's shape in another layout without D; any strides. Each scale
            of q is stored times its weight, which the indexer's sum over heads needs; y is values times scale over
            weight. Refused with group, scale_dtype, per="head" and per="kv_head".
        hadamard: True: as in `Quantize`. Groups are of the transformed elements.
        per: the elements that share a scale. "token": those of a head in one token. "head": those of a head in all
            tokens of a batch row, or with `Packed` of a sequence; the scales are (B, H), or (N, H), in fp32.
            "kv_head": the same, but the heads of q that share a head of k have one scale. All scales are then (B, Hk)
            or (N, Hk), FlashAttention-3's q_descale, k_descale and with v=True v_descale; k must be given. "head" and
            "kv_head" take two launches; the first only computes the scales. They cannot be combined with fp4, group,
            scale_dtype, swizzled and a cache. With `Ulysses` the scales are of all heads.
        swizzled: True: the scales are in the order in which cuBLAS, TensorRT-LLM and FlashInfer read block scales
            (NVIDIA's documentation of cuBLAS, "1D Block Scaling Factors Layout"). group and a scale_dtype of one byte
            must be given. Those of a head in a batch row are tiles of 128 tokens by 4 groups: (B, H, S, D / group) in
            every layout, contiguous. S is padded to a multiple of 128 and D / group to one of 4, by bytes of zero. With
            C padded groups the byte of token s and group g of a head is number (s//128 * (C//4) + g//4) * 512 + s%32 *
            16 + s%128//32 * 4 + g%4. With "thd" B is 1 and S is T. With `Ulysses` each rank's heads have tiles of their
            own, (ranks, B, H / ranks, S, D / group).
        v: True: return v as `Scaled` too, in the same launches and with scales of the same kind. v must be like k, in
            shape and dtype, and the heads must share the tables. It is refused with a cache, whose v has a
            v_block_scale. hadamard leaves v as it is. Tokens after the last sequence have no part in a scale of "head"
            and "kv_head"; their v has that of the last sequence. Convert any other v as q, in a call without k and
            without a table.

    Raises:
        InvalidInput: an argument is wrong.
    """

    def __init__(
        self,
        dtype: torch.dtype = FP8,
        *,
        group: int | None = None,
        scale_dtype: torch.dtype = torch.float32,
        scale_fmt: str | None = None,
        q_global_scale: float | Tensor | None = None,
        k_global_scale: float | Tensor | None = None,
        v_global_scale: float | Tensor | None = None,
        q_weights: Tensor | None = None,
        hadamard: bool = False,
        per: str = "token",
        swizzled: bool = False,
        v: bool = False,
    ) -> None:
        name = "DynamicQuantize"
        self.per = word(name, "per", per, ("token", "head", "kv_head"))
        form = DTYPE_NAMES[word(name, "dtype", dtype, [form.dtype for form in FORMATS.values()])]
        size = 0 if group is None else whole(name, "group", group)
        if group is not None and size not in GROUPS:
            refuse(name, "group", group, "16, 32, 64, 128 or None")
        self.words = {"out_dtype": form, "scale_out": _scale_out(name, form, scale_dtype, scale_fmt), "group": size}
        on = flags(name, swizzled=swizzled, v=v, hadamard=hadamard)
        self.words |= {"dynamic_v" if x == "v" else x: True for x in on}
        if per == "token":
            self.words["computed"] = True
        wide = scale_dtype == torch.float32
        given = {"group": size, "scale_dtype": not wide, "scale_fmt": scale_fmt, "fp4": form == "fp4"}
        labels = [label for label, x in {**given, "swizzled": "swizzled" in on}.items() if x]
        weighted, of_rows = ["q_weights"] * (q_weights is not None), [f"per={per!r}"] if per != "token" else []
        refuse_beside(name, labels + weighted, of_rows)
        refuse_beside(name, weighted, [label for label in labels if label in ("group", "scale_dtype")])
        one_byte = "swizzled" not in on or (size and not wide)
        require(name, one_byte, "swizzled needs scales of one byte; pass group and scale_dtype too")
        numbers = {"q_global_scale": q_global_scale, "k_global_scale": k_global_scale, "v_global_scale": v_global_scale}
        self.tensors = {x: tensor(name, x, q_weights) for x in weighted}
        for label, scale in divisors(name, "", **numbers).items():
            beside = f"scale_dtype={FP8}" if scale_dtype != FP8 else "v=True" if label[0] not in ("q", "k", *on) else ""
            if beside:
                refuse(name, label, scale, f"None without {beside}")
            self.tensors[label.replace("_global", "")] = scale


def _scale_out(name: str, form: str, scale_dtype: Any, scale_fmt: Any) -> str:
    """The word for the dtype of scales, and their rounding."""
    found = _SCALE_WORDS[word(name, "scale_dtype", scale_dtype, _SCALE_WORDS)]
    if found == "fp8" and form != "fp4":
        refuse(name, "scale_dtype", scale_dtype, "torch.float32 or torch.float8_e8m0fnu; only fp4 has scales in e4m3")
    word(name, "scale_fmt", scale_fmt, (None, *SCALE_FMTS[1:]))
    refuse_beside(name, ["scale_fmt"] * (scale_fmt is not None), [f"scale_dtype={FP8}"] * (found == "fp8"))
    return "e8m0_fp32" if scale_fmt and found == "fp32" else found


class Words(positions.Words):
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

    q_out: str = field(metadata={"words": (*DTYPES, *FORMATS)})  # the stored type: dtype, or a format
    kv_out: str = field(metadata={"words": (*DTYPES, *FORMATS)})
    dynamic: bool = field(metadata=OF_NORM)  # the kernel computes scales
    dynamic_q: bool = field(metadata=OF_NORM | {"given": "q_scale_out"})  # of q, and of k without a cache
    weighs_q: bool = field(metadata=OF_NORM | {"given": "q_weights"})  # scales of q are stored times weights
    group: int = field(metadata=OF_NORM)  # neighbouring elements of a head that share a scale; 0: all
    scale_out: str = field(metadata=OF_NORM | {"words": SCALE_DTYPES})  # the scales' type
    swizzled: bool = field(metadata=OF_NORM)  # those of q and k are in tiles
    per_row: bool  # nothing but the scale of each head of a batch row or a sequence
    convert_v: bool  # v is divided by scales too
    head_scales: bool  # each head has its own given scale of fp8


def block_format(t: Tensors, o: Words) -> tuple[str, int, str]:
    """out_dtype, group and scale_out for a call's cache with block scales."""
    cache, scale = t["k_cache"], t[BLOCK_SCALES[0]]
    group = cache.shape[-1] * FORMATS[DTYPE_NAMES[cache.dtype]].per_item // scale.shape[-1]
    dtype = next(name for name, found in SCALES.items() if found == scale.dtype)
    return DTYPE_NAMES[cache.dtype], group, "e8m0_fp32" if o.scale_fmt == "ue8m0" and dtype == "fp32" else dtype


def converts(given: Container[str], o: Words) -> bool:
    """Whether a call returns heads divided by scales. A cache has its own, but for q. given: as in `converts_v`."""
    return o.computed or o.per_row or any(x in given for x in TENSORS[: 1 if "k_cache" in given else 3])


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
    if letter == "q" and "q_weights" in t:
        stored = stored * canonical(t["q_weights"].unsqueeze(-1), o.layout)
    return divided(rows, scale[..., None], o.out_dtype).flatten(-2), stored


def cached(letter: str, x: Tensor, t: Tensors, o: Words) -> tuple[Tensor, Tensor | None]:
    """(heads in the format of their cache, their scales if the cache has block scales)."""
    cache = t[f"{letter}_cache"]
    if f"{letter}_block_scale" in t:
        out_dtype, group, scale_out = block_format(t, o)
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
