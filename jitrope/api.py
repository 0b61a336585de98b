"""The user's functions: arguments in words to options; `checks` refuses what does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from .base.arguments import number, refuse
from .base.errors import InvalidInput
from .ops import checks
from .ops.dispatch import call, call_fp8, call_kv_cache, call_qkv
from .ops.norm_library import call as normed
from .ops.norm_library import call_joint
from .plan.problem import constant
from .plan.spec import LAYOUT_AXES, Norm
from .plan.views import Tables


def apply_rope(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    cos_sin_cache: Tensor | None = None,
    freqs: Tensor | None = None,
    freqs_cis: Tensor | None = None,
    position_ids: Tensor | None = None,
    mrope_section: Sequence[int] = (),
    mrope_interleaved: bool = False,
    mscale: float = 1.0,
    layout: str = "bshd",
    interleaved: bool = False,
    interleaved_out: bool | None = None,
    rotary_dim: int | None = None,
    rotary_offset: int = 0,
    inverse: bool = False,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    start_positions: Tensor | None = None,
    packed_table: bool = False,
    cp_size: int = 1,
    cp_rank: int = 0,
    rounding: str = "fp32",
    launch: str = "auto",
    check: bool = False,
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
    kind = "cos_sin"
    if cos is None or sin is None or freqs is not None or cos_sin_cache is not None or freqs_cis is not None:
        cos, sin, kind = one_table("apply_rope", cos, sin, cos_sin_cache, freqs, freqs_cis)
    tables = (cos, sin, cu_seqlens, start_positions, position_ids)
    options = (
        rotary_dim, layout, interleaved, interleaved_out,
        rotary_offset, max_seqlen, cp_size, cp_rank, kind, _sections(mrope_section), mrope_interleaved,
        mscale, packed_table, 0, True, False, False, rounding, launch, inverse, False,
    )  # fmt: skip
    if check is not False:
        checks.check_all("apply_rope", checks.check, check, {"q": q}, {"k": k}, tables, options)
    return call(q, k, tables, options, checks.check)


def apply_rope_(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    cos_sin_cache: Tensor | None = None,
    freqs: Tensor | None = None,
    freqs_cis: Tensor | None = None,
    position_ids: Tensor | None = None,
    mrope_section: Sequence[int] = (),
    mrope_interleaved: bool = False,
    mscale: float = 1.0,
    layout: str = "bshd",
    interleaved: bool = False,
    rotary_dim: int | None = None,
    rotary_offset: int = 0,
    inverse: bool = False,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    start_positions: Tensor | None = None,
    packed_table: bool = False,
    cp_size: int = 1,
    cp_rank: int = 0,
    rounding: str = "fp32",
    launch: str = "auto",
    check: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`apply_rope` in place: q and k themselves are rotated, and returned.

    Arguments and errors are those of `apply_rope`; the pairing of the output is the input's. Under autograd
    torch's rules for in-place operations hold: q and k may not be leaves that require a gradient. cos and sin must not
    lie in q's or k's memory.

    Raises:
        InvalidInput: also for a tensor whose elements overlap in memory (an expanded one).
        CompileError: as `apply_rope`.
    """
    kind = "cos_sin"
    if cos is None or sin is None or freqs is not None or cos_sin_cache is not None or freqs_cis is not None:
        cos, sin, kind = one_table("apply_rope_", cos, sin, cos_sin_cache, freqs, freqs_cis)
    tables = (cos, sin, cu_seqlens, start_positions, position_ids)
    options = (
        rotary_dim, layout, interleaved, interleaved,
        rotary_offset, max_seqlen, cp_size, cp_rank, kind, _sections(mrope_section), mrope_interleaved,
        mscale, packed_table, 0, True, False, False, rounding, launch, inverse, True,
    )  # fmt: skip
    if check is not False:
        checks.check_all("apply_rope_", checks.check, check, {"q": q}, {"k": k}, tables, options)
    return call(q, k, tables, options, checks.check)


def apply_rope_qkv(
    qkv: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    q_per_group: int = 1,
    copy_v: bool = True,
    cos_sin_cache: Tensor | None = None,
    freqs: Tensor | None = None,
    freqs_cis: Tensor | None = None,
    position_ids: Tensor | None = None,
    mrope_section: Sequence[int] = (),
    mrope_interleaved: bool = False,
    mscale: float = 1.0,
    layout: str = "bshd",
    interleaved: bool = False,
    rotary_dim: int | None = None,
    rotary_offset: int = 0,
    inverse: bool = False,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    start_positions: Tensor | None = None,
    packed_table: bool = False,
    cp_size: int = 1,
    cp_rank: int = 0,
    rounding: str = "fp32",
    launch: str = "auto",
    check: bool = False,
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
    kind = "cos_sin"
    if cos is None or sin is None or freqs is not None or cos_sin_cache is not None or freqs_cis is not None:
        cos, sin, kind = one_table("apply_rope_qkv", cos, sin, cos_sin_cache, freqs, freqs_cis)
    tables = (cos, sin, cu_seqlens, start_positions, position_ids)
    options = (
        rotary_dim, layout, interleaved, interleaved, rotary_offset, max_seqlen, cp_size, cp_rank, kind,
        _sections(mrope_section), mrope_interleaved, mscale, packed_table, q_per_group, copy_v, False, False,
        rounding, launch, inverse, False,
    )  # fmt: skip
    if check is not False:
        checks.check_all("apply_rope_qkv", checks.check_qkv, check, {"qkv": qkv}, {}, tables, options)
    return call_qkv(qkv, tables, options, checks.check_qkv)


def apply_rope_qkv_(
    qkv: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    q_per_group: int = 1,
    cos_sin_cache: Tensor | None = None,
    freqs: Tensor | None = None,
    freqs_cis: Tensor | None = None,
    position_ids: Tensor | None = None,
    mrope_section: Sequence[int] = (),
    mrope_interleaved: bool = False,
    mscale: float = 1.0,
    layout: str = "bshd",
    interleaved: bool = False,
    rotary_dim: int | None = None,
    rotary_offset: int = 0,
    inverse: bool = False,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    start_positions: Tensor | None = None,
    packed_table: bool = False,
    cp_size: int = 1,
    cp_rank: int = 0,
    rounding: str = "fp32",
    launch: str = "auto",
    check: bool = False,
) -> Tensor:
    """Rotate q and k where they lie in packed QKV, and return it; v is not touched.

    For attention that takes packed input or views. Arguments and errors are `apply_rope_qkv`'s, those of an overlap in
    memory `apply_rope_`'s.

    Returns:
        qkv itself, (B, S, G, (q_per_group + 2) D).
    """
    kind = "cos_sin"
    if cos is None or sin is None or freqs is not None or cos_sin_cache is not None or freqs_cis is not None:
        cos, sin, kind = one_table("apply_rope_qkv_", cos, sin, cos_sin_cache, freqs, freqs_cis)
    tables = (cos, sin, cu_seqlens, start_positions, position_ids)
    options = (
        rotary_dim, layout, interleaved, interleaved, rotary_offset, max_seqlen, cp_size, cp_rank, kind,
        _sections(mrope_section), mrope_interleaved, mscale, packed_table, q_per_group, True, False, False,
        rounding, launch, inverse, True,
    )  # fmt: skip
    if check is not False:
        checks.check_all("apply_rope_qkv_", checks.check_qkv, check, {"qkv": qkv}, {}, tables, options)
    return call_qkv(qkv, tables, options, checks.check_qkv)[0]


def apply_rope_fp8(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    q_scale: float | Tensor,
    k_scale: float | Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
    freqs: Tensor | None = None,
    freqs_cis: Tensor | None = None,
    position_ids: Tensor | None = None,
    mrope_section: Sequence[int] = (),
    mrope_interleaved: bool = False,
    layout: str = "bshd",
    interleaved: bool = False,
    rotary_dim: int | None = None,
    rotary_offset: int = 0,
    cu_seqlens: Tensor | None = None,
    start_positions: Tensor | None = None,
    launch: str = "auto",
    check: bool = False,
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
    kind = "cos_sin"
    if cos is None or sin is None or freqs is not None or cos_sin_cache is not None or freqs_cis is not None:
        cos, sin, kind = one_table("apply_rope_fp8", cos, sin, cos_sin_cache, freqs, freqs_cis)
    tables = (cos, sin, cu_seqlens, start_positions, position_ids)
    options = (
        rotary_dim, layout, interleaved, interleaved, rotary_offset, 0, 1, 0, kind, _sections(mrope_section),
        mrope_interleaved, 1.0, False, 0, True, True, False, "fp32", launch, False, False,
    )  # fmt: skip
    q_unit, k_unit = _scale("apply_rope_fp8", "q_scale", q_scale, q), _scale("apply_rope_fp8", "k_scale", k_scale, q)
    if check is not False:
        rest = {"k": k, "q_scale": q_unit, "k_scale": k_unit}
        checks.check_all("apply_rope_fp8", checks.check_fp8, check, {"q": q}, rest, tables, options)
    return call_fp8(q, k, q_unit, k_unit, tables, options, checks.check_fp8)  # type: ignore[arg-type]


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
    cos_sin_cache: Tensor | None = None,
    freqs: Tensor | None = None,
    freqs_cis: Tensor | None = None,
    position_ids: Tensor | None = None,
    mrope_section: Sequence[int] = (),
    mrope_interleaved: bool = False,
    layout: str = "bshd",
    interleaved: bool = False,
    rotary_dim: int | None = None,
    rotary_offset: int = 0,
    start_positions: Tensor | None = None,
    launch: str = "auto",
    check: bool = False,
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
    return _kv_cache(
        False, q, k, v, cos, sin, cos_sin_cache, freqs, freqs_cis, position_ids, start_positions,
        (k_cache, v_cache, slot_mapping), (q_scale, k_scale, v_scale), rotate_k, mrope_section, mrope_interleaved,
        layout, interleaved, rotary_dim, rotary_offset, launch, check,
    )  # fmt: skip


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
    cos_sin_cache: Tensor | None = None,
    freqs: Tensor | None = None,
    freqs_cis: Tensor | None = None,
    position_ids: Tensor | None = None,
    mrope_section: Sequence[int] = (),
    mrope_interleaved: bool = False,
    layout: str = "bshd",
    interleaved: bool = False,
    rotary_dim: int | None = None,
    rotary_offset: int = 0,
    start_positions: Tensor | None = None,
    launch: str = "auto",
    check: bool = False,
) -> Tensor:
    """`apply_rope_kv_cache` with q in place, which is returned; so there is no q_scale.

    Arguments and errors are those of `apply_rope_kv_cache`, those of an overlap in memory `apply_rope_`'s.
    """
    return _kv_cache(
        True, q, k, v, cos, sin, cos_sin_cache, freqs, freqs_cis, position_ids, start_positions,
        (k_cache, v_cache, slot_mapping), (None, k_scale, v_scale), rotate_k, mrope_section, mrope_interleaved,
        layout, interleaved, rotary_dim, rotary_offset, launch, check,
    )  # fmt: skip


def _kv_cache(
    in_place: bool, q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None,
    cos_sin_cache: Tensor | None, freqs: Tensor | None, freqs_cis: Tensor | None, position_ids: Tensor | None,
    start_positions: Tensor | None, cache: tuple[Tensor, Tensor, Tensor],
    scales: tuple[float | Tensor | None, float | Tensor | None, float | Tensor | None], rotate_k: bool,
    mrope_section: Sequence[int], mrope_interleaved: bool, layout: str, interleaved: bool, rotary_dim: int | None,
    rotary_offset: int, launch: str, check: bool,
) -> Tensor:  # fmt: skip
    name = "apply_rope_kv_cache_" if in_place else "apply_rope_kv_cache"
    kind = "cos_sin"
    if cos is None or sin is None or freqs is not None or cos_sin_cache is not None or freqs_cis is not None:
        cos, sin, kind = one_table(name, cos, sin, cos_sin_cache, freqs, freqs_cis)
    tables = (cos, sin, None, start_positions, position_ids)
    options = (
        rotary_dim, layout, interleaved, interleaved, rotary_offset, 0, 1, 0, kind, _sections(mrope_section),
        mrope_interleaved, 1.0, False, 0, True, scales[0] is not None, rotate_k, "fp32", launch, False, in_place,
    )  # fmt: skip
    labels = ("q", "k", "v", "k_cache", "v_cache", "slot_mapping", "q_scale", "k_scale", "v_scale")
    units = [_scale(name, label, scale, q) for label, scale in zip(labels[6:], scales)]
    tensors = (q, k, v, *cache, *units)
    if check is not False:
        given = dict(zip(labels, tensors))
        needed = {label: given.pop(label) for label in labels[:6]}
        if checks.check_all(name, checks.check_kv_cache, check, needed, given, tables, options):
            checks.check_slots(*cache, name)
    return call_kv_cache(tensors, tables, options, checks.check_kv_cache)


def one_table(
    name: str, cos: Tensor | None, sin: Tensor | None, cache: Tensor | None, freqs: Tensor | None, cis: Tensor | None
) -> tuple[Tensor, Tensor, str]:
    """The two tables that the ops take, and which of `spec.TABLES` they are: what is not two is there twice.

    The positions of angles are put on the axis of cos and sin's.
    """
    given = {"cos and sin": cos, "cos_sin_cache": cache, "freqs": freqs, "freqs_cis": cis}
    words = [word for word, table in given.items() if table is not None]
    if len(words) != 1 or (cos is None) != (sin is None):
        had = ", ".join(words) or ("sin" if sin is not None else "none")
        raise InvalidInput(f"{name}: give cos and sin, or one of cos_sin_cache, freqs and freqs_cis, not {had}")
    if cos is not None and sin is not None:
        return cos, sin, "cos_sin"
    if isinstance(freqs, Tensor) and freqs.dim() == 4:  # (P, B, 1, W)
        freqs = freqs.transpose(0, 1)
    table = given[words[0]] if freqs is None else freqs
    return table, table, words[0]  # type: ignore[return-value]


def _sections(sections: Sequence[int]) -> Any:
    """A list becomes a tuple, so that it can be part of a key; anything else is left to the check."""
    return tuple(sections) if type(sections) is list else sections


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


def qk_norm_rope(
    q: Tensor,
    k: Tensor | None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    eps: float = 1e-6,
    across_heads: bool = False,
    zero_centered: bool = False,
    norm_rounding: str = "none",
    cos_sin_cache: Tensor | None = None,
    freqs_cis: Tensor | None = None,
    position_ids: Tensor | None = None,
    mrope_section: Sequence[int] = (),
    mrope_interleaved: bool = False,
    start_positions: Tensor | None = None,
    layout: str = "bshd",
    interleaved: bool = False,
    rotary_dim: int | None = None,
    rotary_offset: int = 0,
    rounding: str = "fp32",
    launch: str = "auto",
    check: bool = False,
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
    if _none(cos, sin, cos_sin_cache, freqs_cis):  # nothing is rotated, at whatever positions
        mrope_section, mrope_interleaved, rotary_offset = (), False, 0
    tables, kind, rotary_dim = _arguments(
        "qk_norm_rope", q, cos, sin, cos_sin_cache, freqs_cis, start_positions, position_ids, layout, rotary_dim,
        rotary_offset,
    )  # fmt: skip
    options = (
        rotary_dim, layout, interleaved, interleaved, rotary_offset, 0, 1, 0, kind, _sections(mrope_section),
        mrope_interleaved, 1.0, False, 0, True, False, False, rounding, launch, False, False,
    )  # fmt: skip
    norm = Norm(norm_rounding, across_heads, zero_centered, eps)
    if check is not False:
        rest = {"k": k, "q_weight": q_weight, "k_weight": k_weight}
        checks.check_all("qk_norm_rope", checks.check_norm, check, {"q": q}, rest, tables, options, norm)
    return normed(q, k, (q_weight, k_weight), tables, options, norm, checks.check_norm)


def qk_norm_rope_(
    q: Tensor,
    k: Tensor | None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    eps: float = 1e-6,
    across_heads: bool = False,
    zero_centered: bool = False,
    norm_rounding: str = "none",
    cos_sin_cache: Tensor | None = None,
    freqs_cis: Tensor | None = None,
    position_ids: Tensor | None = None,
    mrope_section: Sequence[int] = (),
    mrope_interleaved: bool = False,
    start_positions: Tensor | None = None,
    layout: str = "bshd",
    interleaved: bool = False,
    rotary_dim: int | None = None,
    rotary_offset: int = 0,
    rounding: str = "fp32",
    launch: str = "auto",
    check: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`qk_norm_rope` in place: q and k themselves are normalised and rotated, and returned.

    Arguments and errors are those of `qk_norm_rope`. There is no gradient, which would need q and k as they were.

    Raises:
        InvalidInput: also where a gradient is asked for, and for a tensor whose elements overlap in memory.
        CompileError: as `qk_norm_rope`.
    """
    if _none(cos, sin, cos_sin_cache, freqs_cis):  # nothing is rotated, at whatever positions
        mrope_section, mrope_interleaved, rotary_offset = (), False, 0
    tables, kind, rotary_dim = _arguments(
        "qk_norm_rope_", q, cos, sin, cos_sin_cache, freqs_cis, start_positions, position_ids, layout, rotary_dim,
        rotary_offset,
    )  # fmt: skip
    options = (
        rotary_dim, layout, interleaved, interleaved, rotary_offset, 0, 1, 0, kind, _sections(mrope_section),
        mrope_interleaved, 1.0, False, 0, True, False, False, rounding, launch, False, True,
    )  # fmt: skip
    norm = Norm(norm_rounding, across_heads, zero_centered, eps)
    if check is not False:
        rest = {"k": k, "q_weight": q_weight, "k_weight": k_weight}
        checks.check_all("qk_norm_rope_", checks.check_norm, check, {"q": q}, rest, tables, options, norm)
    return normed(q, k, (q_weight, k_weight), tables, options, norm, checks.check_norm)


def qk_norm_rope_joint(
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    first_weights: Sequence[Tensor | None] | None,
    second_weights: Sequence[Tensor | None] | None,
    cos: Tensor | Sequence[Tensor] | None = None,
    sin: Tensor | Sequence[Tensor] | None = None,
    *,
    eps: float = 1e-6,
    zero_centered: bool = False,
    norm_rounding: str = "none",
    cos_sin_cache: Tensor | Sequence[Tensor] | None = None,
    freqs_cis: Tensor | Sequence[Tensor] | None = None,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    rotary_offset: int = 0,
    rounding: str = "fp32",
    launch: str = "auto",
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
    first, second = (_parts(name, label, x, 3) for label, x in (("first", first), ("second", second)))
    streams = (*first, *second)
    weights = (*_parts(name, "first_weights", first_weights, 2), *_parts(name, "second_weights", second_weights, 2))
    for label, x in (("first", first[0]), ("second", second[0])):
        if not isinstance(x, Tensor) or x.is_nested or x.dim() != 4:
            refuse(name, f"{label}'s q", x, "a tensor (B, S, H, D)")
    rows = first[0].shape[1] + second[0].shape[1]
    given = {"cos": cos, "sin": sin, "cos_sin_cache": cos_sin_cache, "freqs_cis": freqs_cis}
    (cos1, cos2), (sin1, sin2), (cache1, cache2), (cis1, cis2) = (
        (x, None) if x is None or isinstance(x, Tensor) else _parts(name, label, x, 2) for label, x in given.items()
    )
    if _none(cos, sin, cos_sin_cache, freqs_cis):
        rotary_offset = 0
    tables, kind, rotary_dim = _arguments(
        "qk_norm_rope_joint", first[0], cos1, sin1, cache1, cis1, None, None, "bshd", rotary_dim,
        rotary_offset, rows,
    )  # fmt: skip
    second_tables: tuple[Tensor | None, Tensor | None] = (None, None)
    if any(table is not None for table in (cos2, sin2, cache2, cis2)):
        *second, other = one_table("qk_norm_rope_joint", cos2, sin2, cache2, None, cis2)
        if other != kind:
            raise InvalidInput(
                f"qk_norm_rope_joint: the first table is {kind}, the second {other}; pass two of one kind"
            )
        second_tables = (second[0], second[1])
    options = (
        rotary_dim, "bshd", interleaved, interleaved, rotary_offset, 0, 1, 0, kind, (),
        False, 1.0, False, 0, True, False, False, rounding, launch, False, False,
    )  # fmt: skip
    norm = Norm(norm_rounding, False, zero_centered, eps)
    return call_joint(streams, weights, second_tables, tables, options, norm, checks.check_norm_joint)


def _none(*tables: Any) -> bool:
    """Whether there is no table. Each is compared with None alone: Dynamo cannot trace `is` between two tuples."""
    return all(table is None for table in tables)


def _parts(name: str, label: str, value: Any, count: int) -> tuple[Any, ...]:
    """So many tensors of an argument that has them side by side."""
    if value is None and "weights" in label:
        return (None,) * count
    if not isinstance(value, (list, tuple)) or len(value) != count:
        refuse(name, label, value, f"a tuple of {count} tensors")
    return tuple(value)


def _arguments(
    name: str,
    q: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    cos_sin_cache: Tensor | None,
    freqs_cis: Tensor | None,
    start_positions: Tensor | None,
    position_ids: Tensor | None,
    layout: str,
    rotary_dim: int | None,
    rotary_offset: int,
    rows: int | None = None,
) -> tuple[Tables, str, int | None]:
    """The tables that the ops take, which of `spec.TABLES` they are, and rotary_dim."""
    kind = "cos_sin"
    if _none(cos, sin, cos_sin_cache, freqs_cis):
        if not isinstance(q, Tensor) or q.is_nested or q.dim() not in (3, 4):
            refuse(name, "q", q, "a tensor with 3 or 4 axes")
        cos, sin = _no_rotation(q, layout, rows)
        rotary_dim, start_positions, position_ids = q.shape[-1] - q.shape[-1] % 2, None, None
    elif cos is None or sin is None or cos_sin_cache is not None or freqs_cis is not None:
        cos, sin, kind = one_table(name, cos, sin, cos_sin_cache, None, freqs_cis)
    return (cos, sin, None, start_positions, position_ids), kind, rotary_dim


def _no_rotation(q: Tensor, layout: str, rows: int | None) -> tuple[Tensor, Tensor]:
    """Tables that turn nothing: one row, seen as many."""
    if rows is None:
        known = isinstance(layout, str) and layout in LAYOUT_AXES and (q.dim() == 4 or layout == "thd")
        rows = q.shape[LAYOUT_AXES[layout][1]] if known else 1
    cos, sin = _one_row(q.device, q.shape[-1] // 2)
    return cos.expand(rows, -1), sin.expand(rows, -1)


@constant
def _one_row(device: torch.device, pairs: int) -> tuple[Tensor, Tensor]:
    return torch.ones(1, pairs, device=device), torch.zeros(1, pairs, device=device)
