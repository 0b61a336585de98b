"""The public functions for q, k and v as tensors of their own."""

from __future__ import annotations

from collections.abc import Sequence  # noqa: F401  in the signature, as Ulysses is
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..run.gather import gather, result, sent, with_v
from ..run.public import repeated
from ..sinks.cache import KVCache
from ..sinks.results import Ulysses  # noqa: F401
from ..sources.heads import HEADS, ROPE
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
    equation 34. The backward rotates the gradient back. A table that requires a gradient gets one from plain torch.

    >>> q, k = torch.randn(1, 16, 8, 64), torch.randn(1, 16, 2, 64)
    >>> cos, sin = jitrope.tables.cos_sin(16, jitrope.tables.inv_freq(rotary_dim=64)[0])
    >>> q, k = jitrope.apply_rope(q, k, cos, sin, positions=torch.arange(16).flip(0))

    Args:
        q: (B, S, Hq, D) in the default layout; fp32, fp16 or bf16; any strides, nothing is copied. D is at most 512.
        k: like q, with its own number of heads (GQA, MQA), or None; then the second result is None.
        cos, sin: tables over positions; fp32, fp16 or bf16; any strides. (P, W); (B, P, W) with a table for each batch
            row; or (B, P, H, W) with a table for each head too. An axis of size 1 is shared. P is at least the number
            of positions used. W is rotary_dim / 2 (half width: one angle for each pair) or rotary_dim (full width: one
            angle for each element, laid out like the head; the members of a pair may differ). With q_scale they may be
            omitted: then nothing is rotated.
        cos_sin_cache: a single table (P, rotary_dim) in place of cos and sin: the cosines of all pairs, then the sines,
            as in vLLM and SGLang. rotary_dim is its width.
        freqs: fp32 angles in radians in place of cos and sin: (P, W), (B, P, W) or, as in Megatron and
            TransformerEngine, (P, 1 or B, 1, W). The kernel computes each sine and cosine once for each token, as
            accurately as torch.
        freqs_cis: complex64 cos + i sin in place of cos and sin: (P, rotary_dim / 2), or with the axes of cos.
        positions: the table's row for each token; by default token t takes row t. A tensor of int32 or int64 ids on q's
            device, any strides: (S) or (B, S); (T) with "thd". `Packed`: concatenated sequences. `Starts`: each batch
            row starts at its own position. `Mrope`: a position along each of several axes. `Shifts`: differences of
            positions, for cached keys. A position outside of the table gives NaN, without a read; `check` refuses it.
        mscale: a factor of the cosines and sines, with freqs (YaRN, arXiv:2309.00071, section 3.4).
        layout: "bshd", "sbhd", "bhsd" or, for packed sequences, "thd": (T, H, D). `Packed` implies "thd".
        interleaved: True: the pairs are (0, 1), (2, 3), ...; False: (i, i + rotary_dim / 2).
        interleaved_out: the pairing of the output; default: that of the input. Multi-head latent attention rotates
            interleaved pairs into halves. The elements have the bits of a call that keeps their pairs; only their order
            differs. The weights of a norm after the rotation are in the order of the input. A Hadamard transform and
            groups that share a scale apply to the head as it is written. A different pairing needs half-width tables.
            With inplace or rotate_k, rotary_dim must be a power of two up to 64, and there must be no norm.
        rotary_dim: the number of rotated elements of a head; must be even. Default: D - rotary_offset, for tables of
            that width or half of it.
        rotary_offset: the first rotated element of a head. The elements outside are not changed.
        inverse: rotate by the negative angles, with the exact arithmetic of the gradient.
        unrotated: the number of first tokens of each sequence that are not rotated, such as class and register tokens
            (DINOv3, EVA-02, Perception Encoder). The token after them takes row 0 of the table. It cannot be combined
            with ids, packed_table and interleaved_out.
        rounding: the rounding of products and their sum, to get the bits of a model's own eager code on the same
            device. "fp32": each is rounded to fp32, as for real tensors (FLUX, Wan). "complex64" and "complex128": as
            in torch's complex multiply (Qwen-Image; Lumina2, with fp64 tables). "dtype": the tables, each product and
            the sum are rounded to q's dtype (rotate-half in the model's dtype, as in transformers). "addcmul": fp32,
            with the second product in `addcmul` (LTX-2). All except "dtype" round to q's dtype once, at the end, and
            transforms and conversions read them in fp32; with "dtype" they read heads in q's dtype.
        q_scale: a factor of q alone, in fp32: a number, such as that of the softmax, or a tensor with one number
            for each token, (S) or (B, S), with "thd" (T) (the temperature of Llama 4). It is the last step before the
            only rounding; with "dtype" q is also rounded before it, as in a model that scales the rotated tensor.
        inplace: overwrite q and k, and return them. Under autograd torch's rules for in-place operations hold: q and k
            must not be leaves that require a gradient. They must share no memory with each other or another tensor.
        out: (q_out, k_out), tensors to write and return: a buffer, or another layout (`buffer.transpose(1, 2)`). Each
            must have its input's shape, or (ranks, B, S, H / ranks, D) for an all-to-all. Its strides may be any. It
            must share no memory with another tensor. None: a fresh tensor. With out there is no gradient, except with
            `Ulysses`, which makes fresh tensors for an all-to-all. It cannot be combined with inplace.
        check: refuse positions outside of the table, exchanged cos and sin, full-width tables of the other pairing, and
            a table with a row for each head but not for each token. Use it to find mistakes: it waits for the device,
            so the call cannot be captured in a CUDA graph or compiled.

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
    q: Tensor,
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
        q, k: as in `apply_rope`; without a cache k may be None.
        v: (B, S, Hk, D) in the default layout. With a cache it is stored unchanged; it may have a multiple of Hk heads,
            or be None for a cache of k alone. Otherwise it is returned as given. With `Norm(v_norm=True)` it is
            normalised, in the same launch if it is like k (`Norm`).
        cos, sin: as in `apply_rope`. With another stage (norm, cache, quantize, out or q_scale) they may be omitted:
            then q and k are not rotated (layers without rope, "NoPE"). Positions, rotary_dim and rotary_offset
            have no effect then.
        norm: RMSNorm or LayerNorm of q and k, before the rotation or after it. across_heads goes with a cache,
            `DynamicQuantize` and hadamard only with mean_squares.
        cache: store the rotated k, and v if it is given, in a KV cache, also in fp8, int8 or fp4 with computed scales.
        quantize: return q, and without a cache k, in fp8 with your scales (`Quantize`; v too with a v_scale), or in
            fp8, int8 or fp4 with computed scales, as `Scaled` (`DynamicQuantize`; v too with v=True; per="head" and
            "kv_head" take two launches).
        hadamard: multiply each head of q and k by the Hadamard matrix last, without a conversion (DeepSeek-V3.2's
            indexer in training), as in `Quantize`. The gradient takes a second launch.
        out: (q_out, k_out, v_out), as in `apply_rope`, such as the operands of attention; with quantize of its dtype,
            v_out only with a v_scale or v=True. v is copied to v_out, in the same launch if k and v have one shape and
            dtype, outside of across_heads without mean_squares and tables for each head. With a cache only q_out can
            be given.
        The other arguments are those of `apply_rope`. norm, cache and quantize cannot be combined with `Shifts`, a norm
        with inverse, a cache with inverse, and quantize with inplace.
        With a cache and `Packed`, `Pages` must describe as many sequences, and tokens after the last one are stored
        where a slot says so, k as zeros and v as it is; in place they are not stored, and clear no page.

    Returns:
        (q, k, v) with the shapes, dtype and (if dense) strides of the inputs. v is the input, or, normalised or
        converted without a cache, a fresh tensor. With a cache k is None, or with rotate_k the rotated input.

    Raises:
        InvalidInput, CompileError: as in `apply_rope`. Nothing was written.
    """
    tensors: Any = {"q": q, "k": k} if cache is None else {"q": q, "k": k, "v": v}
    tensors.update(cos=cos, sin=sin)
    asked = gather(HEADS, tensors, words, ROPE_WORDS, positions, inplace, norm, cache, quantize, hadamard)
    if cache is None:
        v = with_v(HEADS, tensors, asked, v)
    found = sent(HEADS, tensors, asked, quantize)
    if cache is not None:
        return result(found, "q"), k if "rotate_k" in asked else None, v
    return result(found, "q"), result(found, "k"), result(found, "v") if "v" in found else v
