"""The public functions for q, k and v as tensors of their own."""

from __future__ import annotations

from collections.abc import Sequence  # noqa: F401  in the signature, as Ulysses is
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..run.gather import gather, result, sent, with_v
from ..run.public import repeated
from ..sinks.cache import KVCache
from ..sinks.results import Ulysses  # noqa: F401
from ..sources.heads import HEADS, OF_KV, ROPE
from ..stages.convert import DynamicQuantize, Quantize
from ..stages.norm import Norm
from ..stages.positions import Positions
from .keywords import ROPE_WORDS, RopeWords, with_words

if TYPE_CHECKING:
    from typing_extensions import Unpack


@repeated
@with_words(RopeWords)
def apply_rope(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    positions: Tensor | Positions | None = None,
    inplace: bool = False,
    **words: Unpack[RopeWords],
) -> tuple[Tensor, Tensor | None]:
    """Rotate q and k by position-dependent angles, in one launch.

    Pair i of a head, (x0, x1), becomes (x0 cos_i - x1 sin_i, x1 cos_i + x0 sin_i); see RoFormer, arXiv:2104.09864,
    equation 34. The gradient is a launch too. A table that requires a gradient gets one from plain torch.

    >>> q, k = torch.randn(1, 16, 8, 64), torch.randn(1, 16, 2, 64)
    >>> cos, sin = jitrope.tables.cos_sin(16, jitrope.tables.inv_freq(rotary_dim=64)[0])
    >>> q, k = jitrope.apply_rope(q, k, cos, sin, positions=torch.arange(16).flip(0))

    Args:
        q: (B, S, Hq, D), or as `layout` says; bf16, fp16 or fp32; any strides, nothing is copied. D is at most 576.
        k: like q, with its own number of heads (GQA), or None; then the second result is None.
        cos, sin: tables (P, W) with a row for each position; fp32, bf16 or fp16; any strides. W is rotary_dim / 2 (an
            angle for each pair) or rotary_dim (one for each element, laid out like the head). (B, P, W) has a table for
            each batch row, (B, P, H, W) also for each head. With q_scale alone they may be omitted.
        positions: None: token t takes row t. A tensor of int32 or int64 ids on q's device, (S) or (B, S), with "thd"
            (T): the row of each token. `Packed`: concatenated sequences. `Starts`: a first position for each batch
            row. `Mrope`: several axes. `Shifts`: cached keys that move. One outside of the table gives NaN.
        inplace: True: overwrite q and k, and return them. They must not share memory, nor be leaves that require a
            gradient.
        inplace_grad: with inplace: the gradient may overwrite that of the results, which nothing else may read: neither
            backward's caller nor a sum's other term (q + x).
        interleaved: False: the pairs are (i, i + rotary_dim / 2) (Llama). True: (0, 1), (2, 3), ... (FLUX, GPT-J).
        interleaved_out: the pairing of the output; None: that of the input. A norm after the rotation
            has its weights in the order of the input. It needs half-width tables.
        rounding: "fp32": products and their sum are rounded to fp32 (FLUX, Wan), the result once to q's dtype. The
            others give the bits of other models' eager code. "dtype": all is rounded to q's dtype (transformers).
            "complex64" and "complex128": as torch's complex multiply (Qwen-Image; Lumina2, with fp64 tables).
            "addcmul": the second product is in `addcmul` (LTX-2).
        q_scale: a factor of q alone, in fp32, before the last rounding: a number, such as that of the softmax, or a
            tensor with one for each token, (S) or (B, S), with "thd" (T) (Llama 4).
        unrotated: the first tokens of each sequence that are not rotated, a number (DINOv3's class tokens). The next
            takes row 0. It goes with no ids, packed_table or interleaved_out.
        mscale: a factor of the cosines and sines of freqs (YaRN, arXiv:2309.00071, section 3.4).
        layout: "bshd", "bhsd" (B, H, S, D), "sbhd", or "thd" (T, H, D), which `Packed` implies.
        cos_sin_cache: in place of cos and sin (P, rotary_dim): all cosines, then all sines (vLLM, SGLang).
        freqs: in place of cos and sin fp32 angles in radians: (P, W), (B, P, W), or (P, 1 or B, 1, W) (Megatron).
        freqs_cis: in place of cos and sin complex64 cos + i sin: (P, rotary_dim / 2), or with the axes of cos.
        check: True: refuse positions outside of the table, exchanged cos and sin, and tables of another pairing or
            layout. It waits for the device, so it goes with no CUDA graph and no torch.compile. Meta tensors and fake
            ones have no values to check.
        rotary_dim: the number of rotated elements of a head, even; None: as cos_sin_cache or freqs_cis is wide, else
            all from rotary_offset on.
        rotary_offset: the first rotated element of a head. Elements outside do not change.
        out: (q_out, k_out), tensors to write and return, without a gradient; None: fresh ones. Each has its input's
            shape, or (ranks, B, S, H / ranks, D) for an all-to-all; `Ulysses` makes fresh ones for that.
        inverse: True: rotate by the negative angles, with the arithmetic of the gradient.

    Returns:
        (q, k) rotated, with the shapes, dtype and (if dense) strides of the inputs.

    Raises:
        InvalidInput: an argument is wrong, or two do not fit together. Nothing was written.
        CompileError: the kernel could not be built. The message names the missing package.
    """
    tensors: Any = {"q": q, "k": k, "cos": cos, "sin": sin}
    out = sent(ROPE, tensors, gather(ROPE, tensors, words, ROPE_WORDS, positions, inplace), letters="qk")
    return out["q"], out.get("k")


@repeated
@with_words(RopeWords)
def prepare_qkv(
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    positions: Tensor | Positions | None = None,
    norm: Norm | None = None,
    cache: KVCache | None = None,
    quantize: Quantize | DynamicQuantize | None = None,
    hadamard: bool = False,
    inplace: bool = False,
    **words: Unpack[RopeWords],
) -> tuple[Any, Any, Any]:
    """Prepare q, k and v for attention in one launch: norm, rope, conversion to fp8 or fp4, write to a KV cache.

    >>> q, k, v = torch.randn(3, 1, 16, 8, 64)
    >>> cos, sin = jitrope.tables.cos_sin(16, jitrope.tables.inv_freq(rotary_dim=64)[0])
    >>> q, k, v = jitrope.prepare_qkv(q, k, v, cos, sin, norm=jitrope.Norm(torch.ones(64), torch.ones(64)))

    With a norm the gradient of q, k and the weights is one launch too, and deterministic. In place there is none, as it
    would need the old q and k. With cache, quantize or out there is no gradient.

    Args:
        q, k: as in `apply_rope`; without a cache k may be None. With a cache q may be None: k and v alone are stored
            (cross attention, draft models, the latent of MLA), and the first result is None. What is for q alone, such
            as q_scale, is refused then.
        v: (B, S, Hk, D) in the default layout. With a cache it is stored unchanged; it may have a multiple of Hk heads,
            or be None for a cache of k alone. Otherwise it is returned as given. With `Norm(v_norm=True)` it is
            normalised, in the same launch if it is like k (`Norm`).
        cos, sin: as in `apply_rope`. With another stage (norm, cache, quantize, hadamard, out or q_scale) they may be
            omitted: then q and k are not rotated (layers without rope, "NoPE"). Positions, rotary_dim and rotary_offset
            have no effect then.
        norm: RMSNorm or LayerNorm of q and k, before the rotation or after it. across_heads goes with a cache,
            `DynamicQuantize` and hadamard only with mean_squares.
        cache: store the rotated k, and v if it is given, in a KV cache, also in fp8, int8 or fp4 with computed scales.
        quantize: return q, and without a cache k, converted. `Quantize`: in fp8 with your scales; v too with a v_scale.
            `DynamicQuantize`: in fp8, int8 or fp4 with computed scales, as `Scaled`; v too with v=True. per="head" and
            "kv_head" take two launches.
        hadamard: multiply each head of q and k by the Hadamard matrix last, without a conversion (DeepSeek-V3.2's
            indexer in training), as in `Quantize`; not with a k_pe_cache. The gradient takes a second launch.
        out: (q_out, k_out, v_out), as in `apply_rope`, such as the operands of attention; with quantize of its dtype,
            v_out only with a v_scale or v=True. Otherwise v is copied to v_out. That is in the same launch if k and v
            have one shape and dtype, except with across_heads without mean_squares, and with tables for each head. With
            a cache only q_out can be given.
        The other arguments are those of `apply_rope`. norm, cache and quantize cannot be combined with `Shifts`, a norm
        with inverse, a cache with inverse, and quantize with inplace.
        With a cache and `Packed`, `Pages` must describe as many sequences. Tokens after the last one are stored where a
        slot says so, k as zeros and v as it is. In place they are not stored, and clear no page.

    Returns:
        (q, k, v) with the shapes, dtype and (if dense) strides of the inputs. v is the input, or, normalised or
        converted without a cache, a fresh tensor. With a cache k is None, or with rotate_k the rotated input.

    Raises:
        InvalidInput, CompileError: as in `apply_rope`. Nothing was written.
    """
    tensors: Any = {"q": q, "k": k, **({} if cache is None else {"v": v}), "cos": cos, "sin": sin}
    op = HEADS if q is not None or cache is None else OF_KV
    asked = gather(op, tensors, words, ROPE_WORDS, positions, inplace, norm, cache, quantize, hadamard)
    if cache is None:
        v = with_v(HEADS, tensors, asked, v)
    found = sent(op, tensors, asked, quantize)
    if cache is not None:
        return q if q is None else result(found, "q"), k if "rotate_k" in asked else None, v
    return result(found, "q"), result(found, "k"), result(found, "v") if "v" in found else v
