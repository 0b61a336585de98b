"""vLLM: its rotary embedding ops, with norms, multimodal positions, the write to the paged KV cache, MLA and indexer.

>>> from jitrope.integrations import vllm as jitrope_vllm
>>> report = jitrope_vllm.enable()
>>> jitrope_vllm.disable()

`enable` replaces `_custom_ops.rotary_embedding`, `triton_mrope` and the fused functions below. With
its compiler on, vLLM leaves rope to Inductor; set custom_ops=["+rotary_embedding"] in its compilation configuration to
call these. The signatures are those of vLLM 0.33.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..api import apply_rope, prepare_qkv
from ..base.errors import InvalidInput
from ..ops.values import Mrope, Norm
from . import _host
from ._serving import cache_of, heads, indexer_q, latent_cache, norm_once, packed, prepare, replayed

_LAYOUTS = {1: "thd", 2: "bshd"}  # by the number of token axes


def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
    rope_dim_offset: int = 0,
    inverse: bool = False,
    *,
    rounding: str = "fp32",
) -> None:
    """Rotate query and key in place, in one launch, like vLLM's op of this name.

    >>> query, key = torch.randn(10, 8 * 64), torch.randn(10, 2 * 64)
    >>> cache = jitrope.tables.cos_sin_cache(16, jitrope.tables.inv_freq(rotary_dim=64)[0])
    >>> jitrope_vllm.rotary_embedding(torch.arange(10), query, key, 64, cache, is_neox=True)

    Args:
        positions: int32 or int64, (T) or (B, S), any strides: rows of the cache. A token with a position outside of
            the cache becomes NaN.
        query, key: (T, H * head_size) or (B, S, H * head_size), or with an axis of heads, (..., H, head_size); fp32,
            fp16 or bf16; any strides: slices of a packed projection are rotated in place. key may have its own number
            of heads, or be None.
        head_size: at most 512.
        cos_sin_cache: (max_position, R): cosines of the R / 2 pairs, then their sines; fp32, fp16 or bf16, for any
            dtype of query. R elements of each head are rotated.
        is_neox: True: pairs are halves, (i, i + R / 2); False: neighbours.
        rope_dim_offset: the first rotated element of a head.
        inverse: rotate back.
        rounding: "fp32": each result is rounded once, which is most accurate. "dtype": the cache, each product and
            the sum are rounded to query's dtype, which gives the bits of a host that computes in 16 bits, like vLLM's
            layers in plain torch. The two differ in the last place of some elements.

    The errors are those of `jitrope.apply_rope`.
    """

    def run() -> None:
        words = {"rotary_offset": rope_dim_offset, "inverse": inverse, "rounding": rounding}
        axes = _token_axes(positions)
        _rotate(query, key, axes, head_size, is_neox, positions=positions, cos_sin_cache=cos_sin_cache, **words)

    words = head_size, is_neox, rope_dim_offset, inverse, rounding
    tensors = {"position_ids": positions, "q": query, "k": key, "cos_sin_cache": cos_sin_cache}
    replayed("rotary_embedding", words, run, **tensors)


def triton_mrope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    mrope_section: Sequence[int],
    head_size: int,
    rotary_dim: int,
    mrope_interleaved: bool,
    is_neox_style: bool = True,
    *,
    rounding: str = "fp32",
) -> tuple[Tensor, Tensor]:
    """Rotate q and k in place by gathered tables of several axes (time, height, width), and return them.

    >>> q, k = torch.randn(10, 8 * 64), torch.randn(10, 2 * 64)
    >>> cos, sin = jitrope.tables.cos_sin(torch.randint(16, (3, 10)), jitrope.tables.inv_freq(rotary_dim=64)[0])
    >>> q, k = jitrope_vllm.triton_mrope(q, k, cos, sin, [16, 8, 8], 64, 64, mrope_interleaved=False)

    Args:
        q, k: (T, H * head_size) or (T, H, head_size), any strides.
        cos, sin: (A, T, rotary_dim / 2), the table row of each token along each of the A axes; A is at most 4.
        mrope_section: pairs of each axis, rotary_dim / 2 in all.
        mrope_interleaved: True: axis a > 0 has the pairs a, a + A, a + 2A, ..., and axis 0 the others (Qwen3-VL);
            False: the pairs of a section are neighbours (Qwen2-VL).
        head_size, is_neox_style, rounding and the errors: as in `rotary_embedding`.
    """
    if cos.dim() != 3:
        raise InvalidInput(f"cos has shape {tuple(cos.shape)}; it must be (A, T, rotary_dim / 2)")
    axes, tokens = cos.shape[:2]
    # The tables of all axes, concatenated as a view, and their rows as ids: nothing is copied.
    positions = Mrope(torch.arange(axes * tokens, device=q.device).view(axes, tokens), mrope_section, mrope_interleaved)
    words = {"cos": cos.flatten(0, 1), "sin": sin.flatten(0, 1), "rotary_dim": rotary_dim, "rounding": rounding}
    _rotate(q, k, 1, head_size, is_neox_style, positions=positions, **words)
    return q, k


def rotary_embedding_and_cache(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: float | Tensor,
    v_scale: float | Tensor,
) -> None:
    """`rotary_embedding`, with its errors, and `reshape_and_cache_flash` of k and v in one launch: k is read once.

    >>> ids, query, (key, value) = torch.arange(10), torch.randn(10, 8 * 64), torch.randn(2, 10, 2 * 64)
    >>> table = jitrope.tables.cos_sin_cache(16, jitrope.tables.inv_freq(rotary_dim=64)[0])
    >>> given = ids, query, key, value, 64, table, True, *torch.zeros(2, 4, 16, 2, 64), ids, "auto", 1.0, 1.0
    >>> jitrope_vllm.rotary_embedding_and_cache(*given)

    Args:
        positions, query, key, head_size, cos_sin_cache, is_neox: as in `rotary_embedding`; key is rotated in place too.
        value: of key's shape; stored unchanged.
        key_cache, value_cache: (blocks, block_size, H, head_size), any strides: pass a cache with the heads before the
            rows as a transposed view. Of key's dtype; with fp8 also uint8, taken as the dtype that
            kv_cache_dtype names.
        slot_mapping: int32 or int64, block * block_size + row of each token. A token with a negative slot is padding:
            it is rotated but not stored. With positions (T) the mapping may be shorter than T, as in CUDA graphs;
            tokens past its end are padding too, and are not rotated.
        kv_cache_dtype: "fp8", "fp8_e4m3" or "fp8_e5m2"; with any other name the caches must be of key's dtype.
        k_scale, v_scale: numbers, or fp32 tensors of one element on the device: fp8 caches hold k / k_scale and
            v / v_scale, rounded once from fp32.
    """

    def run() -> None:
        axes, tokens = _token_axes(positions), [positions, query, key, value]
        if axes == 1 and slot_mapping.shape[0] < positions.shape[0]:
            tokens = [x[: slot_mapping.shape[0]] for x in tokens]
        q, k, v = (heads(name, x, axes, head_size) for name, x in zip(("query", "key", "value"), tokens[1:]))
        cache = cache_of(key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale)
        words: dict[str, Any] = {"cos_sin_cache": cos_sin_cache, "layout": _LAYOUTS[axes], "interleaved": not is_neox}
        prepare_qkv(q, k, v, positions=tokens[0], cache=cache, inplace=True, **words)

    tensors = {"position_ids": positions, "q": query, "k": key, "v": value, "cos_sin_cache": cos_sin_cache}
    caches = {"k_cache": key_cache, "v_cache": value_cache, "slot_mapping": slot_mapping}
    words = head_size, is_neox, kv_cache_dtype
    replayed("rotary_embedding_and_cache", words, run, **tensors, **caches, k_scale=k_scale, v_scale=v_scale)


def _token_axes(positions: Tensor) -> int:
    if positions.dim() not in _LAYOUTS:
        raise InvalidInput(f"positions have shape {tuple(positions.shape)}; they must be (T) or (B, S)")
    return positions.dim()


def _rotate(query: Tensor, key: Tensor | None, axes: int, head_size: int, is_neox: bool, **words: Any) -> None:
    q, k = heads("query", query, axes, head_size), None if key is None else heads("key", key, axes, head_size)
    apply_rope(q, k, layout=_LAYOUTS[axes], interleaved=not is_neox, inplace=True, **words)


def fused_qk_norm_rope(
    qkv: Tensor,
    num_heads_q: int,
    num_heads_k: int,
    num_heads_v: int,
    head_dim: int,
    eps: float,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin_cache: Tensor,
    is_neox: bool,
    position_ids: Tensor,
    forced_token_heads_per_warp: int = -1,
) -> None:
    """RMSNorm and rope of q and k inside qkv, (T, H * head_dim), in one launch. Nothing is rounded in between.

    forced_token_heads_per_warp is ignored. The other arguments and the errors are those of `rotary_embedding`.

    >>> cache = jitrope.tables.cos_sin_cache(16, jitrope.tables.inv_freq(rotary_dim=64)[0])
    >>> weights, qkv, ids = (torch.ones(64), torch.ones(64)), torch.randn(10, 12 * 64), torch.arange(10)
    >>> jitrope_vllm.fused_qk_norm_rope(qkv, 8, 2, 2, 64, 1e-6, *weights, cache, True, ids)
    """
    counts = num_heads_q, num_heads_k, num_heads_v

    def run() -> None:
        q, k, _ = packed("qkv", qkv, counts, head_dim)
        prepare(q, k, None, cos_sin_cache, position_ids, is_neox, norm=Norm(q_weight, k_weight, eps=eps), inplace=True)

    tensors = {"qkv": qkv, "position_ids": position_ids, "cos_sin_cache": cos_sin_cache}
    words = *counts, head_dim, eps, is_neox
    replayed("fused_qk_norm_rope", words, run, **tensors, q_weight=q_weight, k_weight=k_weight)


def fused_qknorm_rope_cache(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    eps: float,
    norm_weight_bias: float = 0.0,
    kv_cache_dtype: str = "auto",
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """RMSNorm, rope of halves and the write to the paged cache in one launch; k and v are copied before it.

    >>> cache = jitrope.tables.cos_sin_cache(16, jitrope.tables.inv_freq(rotary_dim=64)[0])
    >>> weights, ids, caches = (torch.ones(64), torch.ones(64)), torch.arange(10), torch.zeros(2, 4, 16, 2, 64)
    >>> given = torch.randn(10, 12 * 64), *weights, cache, ids, ids, *caches, 8, 2, 64, 64, 1e-6
    >>> q, k, v = jitrope_vllm.fused_qknorm_rope_cache(*given)

    With rotary_dim 0 nothing is rotated. norm_weight_bias is 0, or 1: the factor is 1 + weight. The normalised heads
    are rounded before the rotation. slot_mapping has a slot for each token. The others, and the errors, are those of
    `fused_qk_norm_rope` and `rotary_embedding_and_cache`.
    """
    q, k, v = packed("qkv", qkv, (num_q_heads, num_kv_heads, num_kv_heads), head_dim)
    k, v = (x.clone(memory_format=torch.contiguous_format) for x in (k, v))
    words: dict[str, Any] = {"rotary_dim": rotary_dim} if rotary_dim else {}
    words["norm"] = norm_once(q_weight, k_weight, eps, norm_weight_bias)
    words["cache"] = cache_of(key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale)
    q, k, v = prepare(q, k, v, cos_sin_cache if rotary_dim else None, positions, True, **words)
    return q.flatten(1), k.flatten(1), v.flatten(1)


def fused_qk_rmsnorm_rope_gate(
    q_gate: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    eps: float,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    mrope_section: Sequence[int] | None = None,
    norm_beta: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """RMSNorm and rope of q and k in one launch, and a copy of the gate (Qwen3.5).

    >>> cache = jitrope.tables.cos_sin_cache(16, jitrope.tables.inv_freq(rotary_dim=32)[0])
    >>> weights, ids = (torch.zeros(64), torch.zeros(64)), torch.randint(16, (3, 10))
    >>> given = torch.randn(10, 2 * 8 * 64), torch.randn(10, 2 * 64), *weights, cache, ids, 1e-6, 8, 2, 64, 32
    >>> q, k, gate = jitrope_vllm.fused_qk_rmsnorm_rope_gate(*given, mrope_section=[6, 5, 5], norm_beta=1.0)

    q_gate is (T, 2 * num_q_heads * head_dim): each head of q is followed by its gate. positions are (T); or (3, T) with
    mrope_section, whose sections are interleaved as in Qwen3-VL. norm_beta is 0, or 1: the factor is 1 + weight. The
    normalised heads are rounded before the rotation. The errors are those of `rotary_embedding`.
    """
    (both,) = packed("q_gate", q_gate, (2 * num_q_heads,), head_dim)
    norm = norm_once(q_weight, k_weight, eps, norm_beta)
    at: Any = positions if mrope_section is None else Mrope(positions, mrope_section, True)
    (keys,) = packed("k", k, (num_kv_heads,), head_dim)
    q, keys, _ = prepare(both[:, ::2], keys, None, cos_sin_cache, at, True, norm=norm, rotary_dim=rotary_dim)
    return q.flatten(1), keys.flatten(1), both[:, 1::2].flatten(1)


def concat_and_cache_mla_rope_fused(
    positions: Tensor,
    q_pe: Tensor,
    k_pe: Tensor,
    kv_c: Tensor,
    cos_sin_cache: Tensor,
    is_neox: bool,
    slot_mapping: Tensor,
    kv_cache: Tensor,
    kv_cache_dtype: str,
    kv_cache_scale: Tensor,
) -> None:
    """Rope of q_pe and k_pe in place, and the write of the latent and k_pe to MLA's paged cache, in one launch.

    >>> cache = jitrope.tables.cos_sin_cache(16, jitrope.tables.inv_freq(rotary_dim=64)[0])
    >>> ids, q_pe, k_pe, latent = torch.arange(10), torch.randn(10, 8, 64), torch.randn(10, 64), torch.randn(10, 512)
    >>> given = ids, q_pe, k_pe, latent, cache, False, ids, torch.zeros(4, 16, 576), "auto", torch.ones(1)
    >>> jitrope_vllm.concat_and_cache_mla_rope_fused(*given)

    q_pe is (T, H, R), k_pe (T, R) or (T, 1, R), kv_c (T, L), where L is a multiple of R, and kv_cache
    (blocks, block_size, L + R). slot_mapping, kv_cache_dtype, kv_cache_scale and the errors are as in
    `rotary_embedding_and_cache`, but "fp8_ds_mla" is refused.
    """
    if kv_cache_dtype == "fp8_ds_mla":
        raise InvalidInput("kv_cache_dtype is 'fp8_ds_mla', whose scales lie between the elements")

    def run() -> None:
        ids, q, rope, latent = (x[: slot_mapping.shape[0]] for x in (positions, q_pe, k_pe, kv_c))
        parts = kv_cache[..., : latent.shape[-1]], kv_cache[..., latent.shape[-1] :]
        k, v, k_cache, v_cache = latent_cache("kv_c", rope, latent, parts[1], parts[0])
        cache = cache_of(k_cache, v_cache, slot_mapping, kv_cache_dtype, kv_cache_scale, kv_cache_scale)
        prepare(q, k, v, cos_sin_cache, ids, is_neox, cache=cache, inplace=True)

    tensors = {"position_ids": positions, "q": q_pe, "k": k_pe, "v": kv_c, "cos_sin_cache": cos_sin_cache}
    caches = {"slot_mapping": slot_mapping, "cache": kv_cache, "scale": kv_cache_scale}
    replayed("concat_and_cache_mla_rope_fused", (is_neox, kv_cache_dtype), run, **tensors, **caches)


def fused_indexer_q_rope_quant(
    positions: Tensor,
    q: Tensor,
    cos_sin_cache: Tensor,
    weights: Tensor,
    softmax_scale: float,
    head_scale: float,
    is_neox: bool,
) -> tuple[Tensor, Tensor]:
    """q of a sparse attention's indexer (DeepSeek-V3.2), rotated, in fp8, and its weights times the scales of q.

    The scales are powers of two. q, (T, H, D), is rounded once, from fp32. The errors are those of `rotary_embedding`.

    >>> cache = jitrope.tables.cos_sin_cache(16, jitrope.tables.inv_freq(rotary_dim=64)[0])
    >>> q, weights = torch.randn(10, 8, 128), torch.randn(10, 8)
    >>> q, weights = jitrope_vllm.fused_indexer_q_rope_quant(torch.arange(10), q, cache, weights, 0.1, 0.5, True)
    """
    factor = softmax_scale * head_scale
    return indexer_q(q, weights, factor, cos_sin_cache, positions, is_neox, scale_fmt="ue8m0")


_OPS, _LAYERS = "vllm._custom_ops", "vllm.model_executor.layers"
_ROTARY = _host.named(_OPS, rotary_embedding)
_MROPE = _host.named(f"{_LAYERS}.rotary_embedding.mrope", triton_mrope)
_FUSED = {
    **_host.named(_OPS, fused_qk_norm_rope, fused_qknorm_rope_cache, concat_and_cache_mla_rope_fused),
    **_host.named(f"{_LAYERS}.fused_qk_norm_rope", fused_qk_rmsnorm_rope_gate),
    **_host.named(f"{_LAYERS}.sparse_attn_indexer", fused_indexer_q_rope_quant),
}


def enable(*, rounding: str = "fp32") -> _host.Report:
    """Replace vLLM's rotary embedding in this process.

    Calls that jitrope refuses (fp64, heads of more than 512) go to vLLM's own functions. Call `enable` in each worker
    process. Enabling twice changes nothing; call `disable` before you change the rounding.

    Args:
        rounding: "dtype" for the bits of 16-bit arithmetic in `rotary_embedding` and `triton_mrope`.

    Raises:
        InvalidInput: rounding is neither "fp32" nor "dtype".
        ImportError: vLLM is not installed.
    """
    if rounding not in ("fp32", "dtype"):
        raise InvalidInput(f"rounding is {rounding!r}; allowed are fp32 and dtype")
    rotate = {at: partial(ours, rounding=rounding) for at, ours in (_ROTARY | _MROPE).items()}
    return _host.enable("vllm", {**rotate, **_FUSED}, {*_MROPE, *_FUSED})


disable = _host.disabler(__name__)
