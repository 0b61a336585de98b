"""Values for the stage that converts: scales given by the user, or computed by the launch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.arguments import refuse, require, whole, word
from ..base.errors import InvalidInput
from ..base.views import DTYPE_NAMES, FORMATS, FP8, FP8S, GROUPS, SCALES, Tensors
from ..stages.convert import SCALE_FMTS
from .asked import Value
from .values import divisors, flags, scales

_SCALE_WORDS = {dtype: name for name, dtype in SCALES.items()}


class Conversion(Value):
    """A conversion of q, k and v."""

    given: dict[str, Any]  # the scales of whole tensors that are not None, as given
    asked: Mapping[str, Any] = {}
    per = "token"

    def _arguments(self) -> dict[str, Any]:
        return dict(self.asked)

    def on(self, q: Tensor) -> Tensors:
        """The scales of whole tensors on q's device. Shapes and errors are those of `Quantize`."""
        return scales(type(self).__name__, q, **self.given)


class Quantize(Conversion):
    """Return q, and without a cache also k, in fp8 (arXiv:2209.05433).

    >>> q, k = torch.randn(2, 1, 16, 8, 64)
    >>> cos, sin = jitrope.tables.cos_sin(16, jitrope.tables.inv_freq(rotary_dim=64)[0])
    >>> q, k, _ = jitrope.prepare_qkv(q, k, None, cos, sin, quantize=jitrope.Quantize(0.05, 0.05))
    >>> q.dtype
    torch.float8_e4m3fn

    Args:
        q_scale, k_scale: the call stores y / scale, clamped to the range of the dtype, and rounded once from fp32 (y
            times the reciprocal of the scale, which fp32 must hold). Numbers, or fp32 tensors on q's device, which the
            host does not read: of one element, of one for each head, (H), or for each head of a batch row, (B, H), with
            `Packed` also of a sequence, (N, H); v of tokens after the last sequence uses the scale of the last
            sequence. A cache has its own k_scale.
        v_scale: return v in fp8 too, in the same launch. v must be like k, in shape (not in `prepare_mla_qkv`) and
            dtype, and the heads must share the tables. Refused with a cache, which has its own, and with across_heads
            without mean_squares.
        dtype: torch.float8_e4m3fn, at most 448, or torch.float8_e5m2, at most 57344. A cache has its own dtype.
        hadamard: multiply each head by the orthogonal Hadamard matrix first (Sylvester's order), which spreads large
            elements over the head (QuaRot, arXiv:2404.00456). The scores of q and k do not change; k is transformed in
            a cache too, and v is not. D must be a power of two up to 256.

    Raises:
        InvalidInput: an argument has a wrong type.
    """

    def __init__(
        self,
        q_scale: float | Tensor,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        *,
        dtype: torch.dtype = FP8,
        hadamard: bool = False,
    ) -> None:
        self.given = divisors("Quantize", "q_scale", q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
        self.tensors, self.words = {}, {**flags("Quantize", hadamard=hadamard)}
        self.asked = {**self.given, **self.words}
        form = _format("Quantize", dtype, FP8S)
        if form != "fp8":
            self.words["out_dtype"], self.asked["dtype"] = form, dtype


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


class DynamicQuantize(Conversion):
    """Return q, k and if asked v as `Scaled`, with scales of each token and head that the launch computes.

    >>> q, k = torch.randn(2, 1, 16, 8, 64)
    >>> cos, sin = jitrope.tables.cos_sin(16, jitrope.tables.inv_freq(rotary_dim=64)[0])
    >>> q, k, _ = jitrope.prepare_qkv(q, k, None, cos, sin, quantize=jitrope.DynamicQuantize())
    >>> q.values.dtype, q.scale.shape
    (torch.float8_e4m3fn, torch.Size([1, 16, 8]))

    Args:
        dtype: torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, or for fp4 (e2m1) torch.float4_e2m1fn_x2, before
            torch 2.8 torch.uint8. The scale is a head's largest element in size, at least 1e-12, times 1 / 448,
            1 / 57344, 1 / 127 or 1 / 6, the largest numbers of the dtypes, in fp32. fp4 is rounded to the nearest
            number, ties to even. It needs an even D, elements that are neighbours in memory, even strides and offsets,
            an even rotary_offset, and a rotary_dim that is a multiple of 4 (interleaved: of 2). A bias needs such
            elements too, and so do tensors of `out` that are not fp4.
        group: 16, 32, 64 or 128 neighbouring elements of a head, a divisor of D, share a scale, computed in the same
            way. None: the head has one scale.
        scale_dtype: torch.float32, or torch.float8_e8m0fnu (before torch 2.7 torch.uint8): the scale is then rounded up
            to a power of two, 2^ceil(log2(largest / 448)), without the bound of 1e-12. With groups of 32 this is
            MXFP8 for e4m3 and MXFP4 for fp4 (OCP Microscaling Formats 1.0). The standard leaves the rounding of scales
            open; rounding up is the rule of arXiv:2506.08027, cuDNN's block scale quantize and Megatron-core's
            `mxfp8_quantize`. No element saturates. A group of zeros has the byte 0. Only for fp4
            torch.float8_e4m3fn, with group=16 NVFP4: the scale is rounded to the nearest number of e4m3, at most 448.
            If it becomes 0, its elements are 0.
        q_global_scale, k_global_scale, v_global_scale: the unit of scales in e4m3; positive numbers, or tensors as in
            `Quantize`; default 1. The scale is largest / 6 / global, rounded, and 0 if global is; y is values times
            scale times global. In arXiv:2509.25149 global is the tensor's largest element in size, divided by 448 * 6.
            With a cache only q's is allowed.
        scale_fmt: None, or "ue8m0", DeepSeek-V3.1's word: scales are rounded up to powers of two, as above, but stay in
            torch.float32, as DeepGEMM reads them on Hopper (there with group=128). With a scale_dtype of
            torch.float8_e8m0fnu they are the bytes. A group of zeros has the scale 2^-127. It cannot be combined with
            scales in e4m3, swizzled without a scale_dtype, per="head" and per="kv_head". Beside a cache with block
            scales in fp32 give it to `KVCache` too.
        hadamard: as in `Quantize`. Groups are of the transformed elements.
        per: the elements that share a scale. "token": those of a head in one token. "head": those of a head in all
            tokens of a batch row, or with `Packed` of a sequence; the scales are (B, H), or (N, H), in fp32.
            "kv_head": the same, but the heads of q that share a head of k have one scale; all scales are (B, Hk), or
            (N, Hk), as FlashAttention-3 reads q_descale, k_descale and with v=True v_descale, and k must be given.
            "head" and "kv_head" take two launches; the first only computes the scales. They cannot be combined with
            fp4, group, scale_dtype, swizzled and a cache. With `Ulysses` the scales are of all heads.
        swizzled: the scales are in the order in which cuBLAS, TensorRT-LLM and FlashInfer read block scales (NVIDIA's
            documentation of cuBLAS, "1D Block Scaling Factors Layout"). Those of a head in a batch row are tiles of
            128 tokens by 4 groups: (B, H, S, D / group) in every layout, contiguous, with S padded to a multiple of
            128 and D / group to one of 4, by bytes of zero. With C padded groups the byte of token s and group g of a
            head is number (s // 128 * (C // 4) + g // 4) * 512 + s % 32 * 16 + s % 128 // 32 * 4 + g % 4. With "thd"
            B is 1 and S is T. group and a scale_dtype of one byte must be given. With `Ulysses` each rank's heads have
            tiles of their own, (ranks, B, H / ranks, S, D / group).
        v: return v as `Scaled` too, in the same launches and with scales of the same kind. v must be like k, in shape
            and dtype, and the heads must share the tables. It is refused with a cache, whose v has a v_block_scale.
            hadamard leaves v as it is. Tokens after the last sequence have no part in a scale of "head" and "kv_head";
            their v has that of the last sequence.
            Convert any other v as q, in a call without k and without a table.

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
        hadamard: bool = False,
        per: str = "token",
        swizzled: bool = False,
        v: bool = False,
    ) -> None:
        name = "DynamicQuantize"
        self.per = word(name, "per", per, ("token", "head", "kv_head"))
        form = _format(name, dtype, tuple([form.dtype for form in FORMATS.values()]))
        self.asked = {"dtype": dtype}
        self.tensors, self.words = {}, {"out_dtype": form, **({"computed": True} if per == "token" else {})}
        if group is not None:
            self.words["group"] = self.asked["group"] = whole(name, "group", group)
            if self.words["group"] not in GROUPS:
                refuse(name, "group", group, "16, 32, 64, 128 or None")
        scale_out = _scale_out(form, scale_dtype, scale_fmt)
        if scale_out != "fp32":
            self.words["scale_out"] = scale_out
            self.asked |= {"scale_fmt": scale_fmt} if scale_dtype == torch.float32 else {"scale_dtype": scale_dtype}
        on = flags(name, swizzled=swizzled, v=v, hadamard=hadamard)
        self.words.update({"dynamic_v" if label == "v" else label: True for label in on})
        numbers = {"q_global_scale": q_global_scale, "k_global_scale": k_global_scale, "v_global_scale": v_global_scale}
        given = divisors(name, "", **numbers)
        for label, scale in given.items() if scale_dtype != FP8 else ():
            refuse(name, label, scale, f"None without scale_dtype={FP8}")
        if v_global_scale is not None and "v" not in on:
            refuse(name, "v_global_scale", v_global_scale, "None without v=True")
        self.asked.update({**on, **given, **({} if per == "token" else {"per": per})})
        self.given = {label.replace("_global", ""): scale for label, scale in given.items()}
        for label in ("group", "scale_dtype", "scale_fmt", "swizzled") if per != "token" else ():
            require(name, label not in self.asked, f"{label} does not go with per={per!r}; leave one out")
        require(name, per == "token" or form != "fp4", f"fp4 does not go with per={per!r}; leave per out")
        one_byte = "swizzled" not in on or (group is not None and scale_dtype != torch.float32)
        require(name, one_byte, "swizzled needs scales of one byte; pass group and scale_dtype too")


def _scale_out(form: str, scale_dtype: Any, scale_fmt: Any) -> str:
    """The word for the dtype of scales, and their rounding."""
    name = "DynamicQuantize"
    if not isinstance(scale_dtype, torch.dtype) or scale_dtype not in _SCALE_WORDS:
        refuse(name, "scale_dtype", scale_dtype, " or ".join(map(str, _SCALE_WORDS)))
    if scale_dtype == FP8 and form != "fp4":
        refuse(name, "scale_dtype", scale_dtype, "torch.float32 or torch.float8_e8m0fnu; only fp4 has scales in e4m3")
    if scale_fmt is not None and (not isinstance(scale_fmt, str) or scale_fmt not in SCALE_FMTS[1:]):
        refuse(name, "scale_fmt", scale_fmt, f"{SCALE_FMTS[1]!r} or None")
    good = scale_fmt is None or scale_dtype != FP8
    require(name, good, f"scale_fmt does not go with scale_dtype={FP8}; leave one out")
    return "e8m0_fp32" if scale_fmt and scale_dtype == torch.float32 else _SCALE_WORDS[scale_dtype]


def _format(name: str, dtype: Any, allowed: tuple[torch.dtype, ...]) -> str:
    """The word for the dtype of a conversion."""
    if not isinstance(dtype, torch.dtype) or dtype not in allowed:
        refuse(name, "dtype", dtype, " or ".join([", ".join(map(str, allowed[:-1])), str(allowed[-1])]))
    return DTYPE_NAMES[dtype]


def asked_of(name: str, quantize: Any, hadamard: Any) -> tuple[dict[str, Any], bool]:
    """(the words of a call's conversion or transform, whether heads are transformed). They are checked."""
    if quantize is None:
        words = {} if hadamard is False else flags(name, hadamard=hadamard)
    else:
        if not isinstance(quantize, (Quantize, DynamicQuantize)):
            refuse(name, "quantize", quantize, "a jitrope.Quantize or DynamicQuantize")
        if hadamard is not False:
            raise InvalidInput(f"{name}: hadamard is given beside quantize, which has its own; give it to that")
        words = quantize.words
    return words, "hadamard" in words
