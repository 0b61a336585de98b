"""The user's functions: what they take, in words, and what they give."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from .base.arguments import number, refuse
from .base.errors import InvalidInput
from .base.signature import with_words
from .ops.dispatch import call
from .ops.operation import Operation
from .ops.operations import QK_NORM_ROPE, QK_NORM_ROPE_JOINT, ROPE, ROPE_FP8, ROPE_KV_CACHE, ROPE_QKV
from .ops.words import ONE_TABLE
from .plan.problem import constant
from .plan.spec import Norm, Options
from .plan.views import Tensors

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ServingWords(TypedDict, total=False):
    """The keywords that all functions have; `apply_rope` says what they mean."""

    cos_sin_cache: Tensor | None
    freqs: Tensor | None
    freqs_cis: Tensor | None
    position_ids: Tensor | None
    mrope_section: Sequence[int]
    mrope_interleaved: bool
    layout: str
    interleaved: bool
    rotary_dim: int | None
    rotary_offset: int
    start_positions: Tensor | None
    launch: str
    check: bool


class Fp8Words(ServingWords, total=False):
    """Those of `apply_rope_fp8`."""

    cu_seqlens: Tensor | None


class PackedWords(Fp8Words, total=False):
    """Those of `apply_rope_qkv`."""

    mscale: float
    inverse: bool
    max_seqlen: int | None
    packed_table: bool
    cp_size: int
    cp_rank: int
    rounding: str


class RopeWords(PackedWords, total=False):
    """Those of `apply_rope`."""

    interleaved_out: bool | None


class JointWords(TypedDict, total=False):
    """The keywords of functions with a norm; `qk_norm_rope` says what they mean."""

    eps: float
    zero_centered: bool
    norm_rounding: str
    interleaved: bool
    rotary_dim: int | None
    rotary_offset: int
    rounding: str
    launch: str


class NormWords(JointWords, total=False):
    """Those of `qk_norm_rope`."""

    across_heads: bool
    cos_sin_cache: Tensor | None
    freqs_cis: Tensor | None
    position_ids: Tensor | None
    mrope_section: Sequence[int]
    mrope_interleaved: bool
    start_positions: Tensor | None
    layout: str
    check: bool


_DEFAULTS = {
    **Options._field_defaults, "interleaved_out": None, "rotary_dim": None, "max_seqlen": None, "check": False,
    **Norm._field_defaults, "norm_rounding": "none", "rounding": "fp32",
}  # fmt: skip


def _given(op: Operation, tensors: dict[str, Any], words: Any) -> Tensors:
    """The tensors that are not None, with those among the words, which go from there."""
    tables = op.tables
    for word in [*words]:
        if word in tables:
            tensors[word] = words.pop(word)
        elif word == "inplace":  # ours: the functions that end in "_" set it
            raise TypeError(f"{op.function}() got an unexpected keyword argument 'inplace'")
    for name in [*tensors]:
        if tensors[name] is None:
            del tensors[name]
    return tensors


@with_words(RopeWords, _DEFAULTS)
def apply_rope(
    q: Tensor, k: Tensor | None, cos: Tensor | None = None, sin: Tensor | None = None, **words: Unpack[RopeWords]
) -> tuple[Tensor, Tensor | None]:
    """Rotate q and k by position-dependent angles, in one launch; returns fresh tensors.

    Pair i of a head, (x0, x1), becomes (x0 cos_i - x1 sin_i, x1 cos_i + x0 sin_i); see RoFormer,
    arXiv:2104.09864, equation 34. The gradient is the rotation back; cos, sin and freqs get none.

    >>> q, k = jitrope.apply_rope(q, k, cos, sin)                       # (B, S, H, D), halves
    >>> q, _ = jitrope.apply_rope(q, None, cos, sin, interleaved=True)  # one tensor alone
    >>> q, k = jitrope.apply_rope(q, k, freqs=freqs, layout="thd", cu_seqlens=cu_seqlens)

    Args:
        q: (B, S, Hq, D) in the default layout; fp32, fp16 or bf16; any strides, nothing is copied.
            D is at most 512.
        k: as q with its own number of heads (GQA, MQA), or None, which comes back in its place.
        cos, sin: tables over positions, fp32, fp16 or bf16, any strides: (P, W), or a row of tables
            for each batch entry (B, P, W), or for each head too (B, P, H, W); an axis of size 1 is
            shared. P is at least the number of positions used. W is rotary_dim / 2 (half width: an
            angle a pair) or rotary_dim (full width: an angle an element, laid out like the head;
            the members of a pair may differ).
        cos_sin_cache: in place of cos and sin: both in one table (P, rotary_dim), the cosines of the pairs
            before the sines, as vLLM and SGLang have it. rotary_dim is its width.
        freqs: in place of cos and sin: fp32 angles in radians, (P, W), (B, P, W) or, as Megatron and
            TransformerEngine have them, (P, 1 or B, 1, W). The kernel takes each sine and cosine
            once a token, with the accuracy of torch's own.
        freqs_cis: in place of cos and sin: complex64 cos + i sin, (P, rotary_dim / 2) or with the axes of cos.
        position_ids: int32 or int64, on q's device, any strides: the table's row for each token, (S) or
            (B, S); (T) with "thd". Default: rows 0, 1, ... Ids outside of the table come out as NaN and are
            never read; `check` refuses them.
        mrope_section: position_ids have an axis in front, (A, S) or (A, B, S): as many ids a token as there
            are sections, and the pairs of each section take theirs (multimodal rope, arXiv:2409.12191; the
            axial rope of images and video). A is at most 4; the sizes count pairs, rotary_dim / 2 in all.
        mrope_interleaved: the pairs of axis a > 0 are a, a + A, a + 2A, ..., as many as its section has, and
            all others are those of axis 0 (Qwen3-VL); else a section's pairs are neighbours (Qwen2-VL).
        mscale: with freqs: a factor of the cosines and sines (YaRN, arXiv:2309.00071, section 3.4).
        layout: "bshd", "sbhd", "bhsd" or, for packed sequences, "thd": (T, H, D). Without
            cu_seqlens a packed token t uses row t of the table.
        interleaved: True: pairs are (0, 1), (2, 3), ...; False: (i, i + rotary_dim / 2).
        interleaved_out: the pairing of the output, where it is another than the input's (multi-head
            latent attention rotates interleaved pairs into halves). With half-width tables only.
        rotary_dim: even; only so many elements of a head are rotated. Default: D - rotary_offset,
            for tables of that width or half of it.
        rotary_offset: the first element of a head that is rotated; the others stay.
        inverse: rotate by the negative angles, exactly the gradient's arithmetic.
        cu_seqlens: with "thd": int32 or int64 offsets (N + 1) of N sequences, on q's device, from 0
            and ascending. Positions restart at 0 in each. Not read on the host. Tokens after the
            last sequence come out as zeros (`apply_rope_` leaves them alone); tokens past the
            table's end come out as NaN.
        max_seqlen: with cu_seqlens: the longest sequence, if the host knows it.
        start_positions: int32 or int64, (B,), or (N,) with cu_seqlens: the position of the first
            token of each batch row or sequence. Positions outside of the table come out as NaN.
        packed_table: with cu_seqlens: the table has a row for each token of the packed batch, so that
            positions do not restart (mRoPE tables, say).
        cp_size, cp_rank: context parallelism. q and k hold this rank's chunks cp_rank and
            2 cp_size - 1 - cp_rank of the 2 cp_size chunks of every sequence, one behind the other.
            cu_seqlens, max_seqlen and the tables are those of the whole batch. With cu_seqlens
            sequences may have any length: token t of the batch gives chunk t % (2 cp_size) of its
            sequence a place, so that a sequence's chunks differ by one token at most
            (`jitrope.context_parallel.Partition`). Without, they are equal.
        rounding: how products and their sum are rounded, for the bits of a model's own eager code on the same
            device: "fp32": each to fp32, as real tensors are (FLUX, Wan); "complex64" and "complex128": as
            torch's complex multiply (Qwen-Image; Lumina2, whose tables are fp64); "dtype": the tables, each
            product and the sum to q's dtype (rotate-half in the model's dtype, as in transformers); "addcmul":
            fp32, the second product through `addcmul` (LTX-2). All but "dtype" round to q's dtype once.
        launch: "auto", or force "token_linear" or "grid_2d"; all give the same bits.
        check: refuse positions outside of the table, however they are given. For finding mistakes: it waits
            for the device, and so cannot be captured in a CUDA graph or compiled.

    Returns:
        (q, k) rotated, of the shapes, dtype and (where dense) strides of the inputs.

    Raises:
        InvalidInput: the arguments do not fit together; nothing was written.
        CompileError: the kernel could not be built; the message says what to install.
    """
    tensors: Any = {"q": q, "k": k, "cos": cos, "sin": sin}
    if words or k is None or cos is None or sin is None:
        tensors = _given(ROPE, tensors, words)
    out = call(ROPE, tensors, words)
    return out["q"], out.get("k")


@with_words(PackedWords, _DEFAULTS)
def apply_rope_(
    q: Tensor, k: Tensor | None, cos: Tensor | None = None, sin: Tensor | None = None, **words: Unpack[PackedWords]
) -> tuple[Tensor, Tensor | None]:
    """`apply_rope` in place: q and k themselves are rotated, and returned.

    Arguments and errors are those of `apply_rope`; the pairing of the output is the input's. Under autograd
    torch's rules for in-place operations hold: q and k may not be leaves that require a gradient. cos and sin must not
    lie in q's or k's memory.

    Raises:
        InvalidInput: also for a tensor whose elements overlap in memory (an expanded one).
        CompileError: as `apply_rope`.
    """
    tensors: Any = {"q": q, "k": k, "cos": cos, "sin": sin}
    if words or k is None or cos is None or sin is None:
        tensors = _given(ROPE, tensors, words)
    words["inplace"] = True  # type: ignore[typeddict-unknown-key]
    call(ROPE, tensors, words)
    return q, k


@with_words(PackedWords, _DEFAULTS)
def apply_rope_qkv(
    qkv: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    q_per_group: int = 1,
    copy_v: bool = True,
    **words: Unpack[PackedWords],
) -> tuple[Tensor, Tensor, Tensor]:
    """Split packed QKV and rotate q and k, in one launch; the gradient is one launch too.

    >>> q, k, v = jitrope.apply_rope_qkv(qkv, cos, sin, q_per_group=4)     # 4 heads of q to one of k and v

    Args:
        qkv: (B, S, G, (q_per_group + 2) D) in the default layout ("sbhd" and "thd" are the others):
            each of the G groups holds its q_per_group heads of q, then one of k, then one of v, as
            a grouped-query projection leaves them.
        q_per_group: heads of q in a group.
        copy_v: False: v is returned as a view of qkv, and nothing of it is moved.
        The others are `apply_rope`'s; tables for each head are refused.

    Returns:
        q (B, S, G q_per_group, D), k and v (B, S, G, D), contiguous; v a view if asked. Of the
        tokens after the last sequence q and k are zero; v is copied whole.

    Raises:
        InvalidInput, CompileError: as `apply_rope`.
    """
    words.update(q_per_group=q_per_group, copy_v=copy_v)  # type: ignore[call-arg]
    out = call(ROPE_QKV, _given(ROPE_QKV, {"qkv": qkv, "cos": cos, "sin": sin}, words), words)
    return out["q"], out["k"], out["v"]


@with_words(PackedWords, _DEFAULTS)
def apply_rope_qkv_(
    qkv: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    q_per_group: int = 1,
    **words: Unpack[PackedWords],
) -> Tensor:
    """Rotate q and k where they lie in packed QKV, and return it; v is not touched.

    For attention that takes packed input or views. Arguments and errors are `apply_rope_qkv`'s, those of an overlap in
    memory `apply_rope_`'s.

    Returns:
        qkv itself, (B, S, G, (q_per_group + 2) D).
    """
    tensors = _given(ROPE_QKV, {"qkv": qkv, "cos": cos, "sin": sin}, words)
    words.update(q_per_group=q_per_group, inplace=True)  # type: ignore[call-arg]
    call(ROPE_QKV, tensors, words)
    return qkv


@with_words(Fp8Words, _DEFAULTS)
def apply_rope_fp8(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    q_scale: float | Tensor,
    k_scale: float | Tensor | None = None,
    **words: Unpack[Fp8Words],
) -> tuple[Tensor, Tensor | None]:
    """`apply_rope` with fp8 outputs (e4m3; arXiv:2209.05433), for attention that takes them. Without gradient.

    Args:
        q, k: as `apply_rope`'s, (B, S, H, D) in the default layout; k may be None.
        q_scale, k_scale: what one unit of the output stands for: stored is y / scale, at most 448 in size,
            rounded once from fp32 (times the reciprocal of the scale). Numbers, or fp32 tensors of one element
            on q's device, which are not read on the host.
        The others are `apply_rope`'s.

    Returns:
        (q, k) as torch.float8_e4m3fn, of the shapes of the inputs.

    Raises:
        InvalidInput, CompileError: as `apply_rope`.
    """
    tensors = {"q": q, "k": k, **_scales("apply_rope_fp8", q, q_scale=q_scale, k_scale=k_scale)}
    out = call(ROPE_FP8, _given(ROPE_FP8, {**tensors, "cos": cos, "sin": sin}, words), words)
    return out["q"], out.get("k")


@with_words(ServingWords, _DEFAULTS)
def apply_rope_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    q_scale: float | Tensor | None = None,
    rotate_k: bool = False,
    **words: Unpack[ServingWords],
) -> Tensor:
    """Rotate q and k, and store k and v in a KV cache, in one launch; returns q rotated. Without gradient.

    >>> q = jitrope.apply_rope_kv_cache(q, k, v, cos, sin, position_ids=positions, layout="thd",
    ...                                 k_cache=k_cache, v_cache=v_cache, slot_mapping=slots)

    Args:
        q: as for `apply_rope`; a fresh tensor comes back.
        k, v: (B, S, Hk, D) in the default layout, of one shape, any strides; v is stored as it is.
        k_cache, v_cache: (slots, Hk, D), or pages (pages, rows, Hk, D) (a cache with the heads before the
            rows is a transposed view); any strides; of k's dtype or torch.float8_e4m3fn.
        slot_mapping: int32 or int64, an entry for each token, (B, S) or flat: the slot, page * rows + row, that its
            k and v go to (vLLM's paged cache, arXiv:2309.06180). Negative slots are padding, and
            slots past the end do not exist: nothing is stored (`check` refuses the latter). Of two tokens with one
            slot either may win.
        k_scale, v_scale: with fp8 caches, which hold k / k_scale and v / v_scale; see `apply_rope_fp8`.
        q_scale: q comes back as torch.float8_e4m3fn, divided by it.
        rotate_k: k itself is rotated too, in place.
        The others are `apply_rope`'s.

    Returns:
        q rotated, of its shape and dtype; torch.float8_e4m3fn with q_scale.

    Raises:
        InvalidInput, CompileError: as `apply_rope`; nothing was written.
    """
    scales = _scales("apply_rope_kv_cache", q, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    tensors = {"q": q, "k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "slot_mapping": slot_mapping, **scales}
    words["rotate_k"] = rotate_k  # type: ignore[typeddict-unknown-key]
    return call(ROPE_KV_CACHE, _given(ROPE_KV_CACHE, {**tensors, "cos": cos, "sin": sin}, words), words)["q"]


@with_words(ServingWords, _DEFAULTS)
def apply_rope_kv_cache_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    rotate_k: bool = False,
    **words: Unpack[ServingWords],
) -> Tensor:
    """`apply_rope_kv_cache` with q in place, which is returned; so there is no q_scale.

    Arguments and errors are those of `apply_rope_kv_cache`, those of an overlap in memory `apply_rope_`'s.
    """
    scales = _scales("apply_rope_kv_cache_", q, k_scale=k_scale, v_scale=v_scale)
    tensors = {"q": q, "k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "slot_mapping": slot_mapping, **scales}
    given = _given(ROPE_KV_CACHE, {**tensors, "cos": cos, "sin": sin}, words)
    words.update(rotate_k=rotate_k, inplace=True)  # type: ignore[call-arg]
    call(ROPE_KV_CACHE, given, words)
    return q


def _scales(name: str, q: Tensor, **scales: float | Tensor | None) -> dict[str, Tensor | None]:
    """Scales as the kernels read them, on the device."""
    return {label: _scale(name, label, scale, q) for label, scale in scales.items() if scale is not None}


def _scale(name: str, label: str, scale: float | Tensor | None, q: Tensor) -> Tensor | None:
    """A scale as the kernels read it, on the device."""
    if scale is None or isinstance(scale, Tensor) or not isinstance(q, Tensor):
        return scale  # type: ignore[return-value]
    value = number(name, label, scale, or_else=", or a tensor of one fp32 number on q's device")
    if type(value) is float and abs(value) > torch.finfo(torch.float32).max:
        refuse(name, label, scale, "a number that fp32 holds")
    with getattr(q, "fake_mode", None) or nullcontext():  # a fake tensor's, which need not be active
        made: Tensor = _scale_of(q.device, value, label)
    return made


@constant
def _scale_of(device: torch.device, scale: float, label: str) -> Tensor:
    """One for each argument: a guard refuses a tensor that it has twice."""
    return torch.full((), scale, device=device)


# ---- QK-norm + rope -----------------------------------------------------------------------------------


@with_words(NormWords, _DEFAULTS)
def qk_norm_rope(
    q: Tensor,
    k: Tensor | None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    **words: Unpack[NormWords],
) -> tuple[Tensor, Tensor | None]:
    """RMSNorm of q and k, then rope, in one launch; returns fresh tensors.

    A head x becomes x / sqrt(mean(x^2) + eps) times the weight (RMSNorm, arXiv:1910.07467, equation 4), then is
    rotated as `apply_rope` does it. Differentiable in q, k and the weights; the gradient is one launch too
    and the same from run to run.

    >>> q, k = jitrope.qk_norm_rope(q, k, norm_q.weight, norm_k.weight, cos, sin)     # (B, S, H, D)

    Args:
        q, k: as `apply_rope`'s; k may be None.
        q_weight, k_weight: (D), or (H D) with across_heads; fp32, fp16 or bf16; None: no weight.
        cos, sin: as `apply_rope`'s, as are cos_sin_cache and freqs_cis in their place. No table at all: q and k are
            normalised only.
        eps: added to the mean of the squares. The default is that of Qwen3, FLUX, Qwen-Image and Wan in transformers
            and diffusers.
        across_heads: one mean over all heads of a token (Wan, LTX), not one for each head (FLUX, Qwen3).
        zero_centered: the factor is 1 + weight (Gemma, Qwen3-Next).
        norm_rounding: between norm and rope. "none": nothing is rounded. "once": to q's dtype, behind the
            weight, as torch.nn.RMSNorm does; "twice": before the weight and behind it, as transformers' and
            diffusers' own RMSNorm do. Both give those chains' bits: on a CPU always, on a GPU for heads of 64,
            128 and 256, rotated whole and aligned, across heads only "once", in fp16 and bf16. Elsewhere
            squares are summed in another order, and a rare element differs in its last bit.
        The others are `apply_rope`'s.

    Returns:
        (q, k) of the shapes, dtype and (where dense) strides of the inputs.

    Raises:
        InvalidInput: the arguments do not fit together; nothing was written.
        CompileError: the kernel could not be built; the message says what to install.
    """
    tensors = {"q": q, "k": k, "q_weight": q_weight, "k_weight": k_weight}
    out = call(QK_NORM_ROPE, _normed(QK_NORM_ROPE, tensors, cos, sin, words), words)
    return out["q"], out.get("k")


@with_words(NormWords, _DEFAULTS)
def qk_norm_rope_(
    q: Tensor,
    k: Tensor | None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    **words: Unpack[NormWords],
) -> tuple[Tensor, Tensor | None]:
    """`qk_norm_rope` in place: q and k themselves are normalised and rotated, and returned.

    Arguments and errors are those of `qk_norm_rope`. There is no gradient, which would need q and k as they were.

    Raises:
        InvalidInput: also where a gradient is asked for, and for a tensor whose elements overlap in memory.
        CompileError: as `qk_norm_rope`.
    """
    tensors = _normed(QK_NORM_ROPE, {"q": q, "k": k, "q_weight": q_weight, "k_weight": k_weight}, cos, sin, words)
    words["inplace"] = True  # type: ignore[typeddict-unknown-key]
    call(QK_NORM_ROPE, tensors, words)
    return q, k


@with_words(JointWords, _DEFAULTS)
def qk_norm_rope_joint(
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    first_weights: Sequence[Tensor | None] | None,
    second_weights: Sequence[Tensor | None] | None,
    cos: Tensor | Sequence[Tensor] | None = None,
    sin: Tensor | Sequence[Tensor] | None = None,
    *,
    cos_sin_cache: Tensor | Sequence[Tensor] | None = None,
    freqs_cis: Tensor | Sequence[Tensor] | None = None,
    **words: Unpack[JointWords],
) -> tuple[Tensor, Tensor, Tensor]:
    """`qk_norm_rope` of two streams into joint tensors: norm, rope and concatenation in one launch.

    For attention over text and image tokens that have projections and norms of their own (FLUX, Qwen-Image,
    HunyuanVideo): q and k of both streams are normalised, each with its weights, and rotated, v is copied,
    and all are written one stream behind the other.

    >>> q, k, v = jitrope.qk_norm_rope_joint((tq, tk, tv), (q, k, v), text_weights, weights, cos, sin)

    Args:
        first, second: (q, k, v) of the tokens in front and of those behind, (B, S1, H, D) and (B, S2, H, D),
            with the same H and D in both; any strides.
        first_weights, second_weights: (q_weight, k_weight) of each stream, (D) each; None: no weights.
        cos, sin, or another table: as `apply_rope`'s, over both streams, at least S1 + S2 rows; or a pair of each, of
            the first stream and of the second. A stream that is not to be rotated has cosines of one and sines of
            zero.
        The others are `qk_norm_rope`'s; the norm is each head's own.

    Returns:
        q, k and v, (B, S1 + S2, H, D), contiguous.

    Raises:
        InvalidInput, CompileError: as `qk_norm_rope`.
    """
    name = "qk_norm_rope_joint"
    tensors: dict[str, Any] = {}
    for label, stream in (("first", first), ("second", second)):
        tensors.update(zip((f"{label}_q", f"{label}_k", f"{label}_v"), _parts(name, label, stream, 3)))
        if not isinstance(q := tensors[f"{label}_q"], Tensor) or q.is_nested or q.dim() != 4:
            refuse(name, f"{label}'s q", q, "a tensor (B, S, H, D)")
    for n, label, weights in (("", "first_weights", first_weights), ("second_", "second_weights", second_weights)):
        tensors.update(zip((n + "q_weight", n + "k_weight"), _parts(name, label, weights, 2)))
    tables: dict[str, Any] = {"cos": cos, "sin": sin, "cos_sin_cache": cos_sin_cache, "freqs_cis": freqs_cis}
    second_tables = {}
    for label, table in tables.items():
        if table is not None and not isinstance(table, Tensor):
            tables[label], second_tables[label] = _parts(name, label, table, 2)
    if len(second_tables) > 0:
        tensors.update(zip(("second_cos", "second_sin"), _second_tables(name, tables, second_tables)))
    out = call(QK_NORM_ROPE_JOINT, _normed(QK_NORM_ROPE_JOINT, {**tensors, **tables}, None, None, words), words)
    return out["q"], out["k"], out["v"]


def _normed(op: Operation, tensors: dict[str, Any], cos: Tensor | None, sin: Tensor | None, words: Any) -> Tensors:
    """As `_given`. Without a table nothing is rotated, at whatever positions."""
    if cos is not None or sin is not None:
        tensors.update(cos=cos, sin=sin)
    given = _given(op, tensors, words)
    if not any(name in given for name in ("cos", "sin", *ONE_TABLE)):
        for word in ("mrope_section", "mrope_interleaved", "rotary_dim", "rotary_offset"):
            words.pop(word, None)
        given = {name: x for name, x in given.items() if name not in ("position_ids", "start_positions")}
    return given


def _second_tables(name: str, first: dict[str, Any], second: dict[str, Any]) -> list[Tensor]:
    """The tables of the second stream, of the first one's kind."""
    given = {label for label, table in first.items() if table is not None}
    if given != second.keys():
        had, other = (" and ".join(sorted(labels)) for labels in (given, second))
        raise InvalidInput(f"{name}: the first table is {had}, the second {other}; pass two of one kind")
    return list(second.values())


def _parts(name: str, label: str, value: Any, count: int) -> tuple[Any, ...]:
    """So many tensors of an argument that has them side by side."""
    if value is None and "weights" in label:
        return (None,) * count
    if not isinstance(value, (list, tuple)) or len(value) != count:
        refuse(name, label, value, f"a tuple of {count} tensors")
    return tuple(value)
