"""SGLang: rope, with norms, with the write to the KV buffers, and the indexer of DeepSeek-V3.2.

>>> from jitrope.integrations import sglang as jitrope_sglang
>>> report = jitrope_sglang.enable()  # before the model is made
>>> jitrope_sglang.disable()

The signatures are those of the modules of sglang.kernels.ops (0.5.23; sglang.jit_kernel.rope in older versions), and
for `apply_rope_with_cos_sin_cache_inplace` those of the sgl_kernel package. All functions take any even rotary width,
any head size up to 512, and tables in fp32, fp16 or bf16; those that return nothing work in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from ..api import apply_rope
from ..base.errors import InvalidInput
from ..ops.values import Mrope, Norm
from . import _host, vllm
from ._serving import buffers, frequencies, heads, heads_from, indexer_q, norm_once, packed, prepare, replayed, sections


def apply_rope_with_cos_sin_cache_inplace(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool = True,
    fused_set_kv_buffer_arg: Any = None,
    enable_pdl: bool | None = None,
) -> None:
    """Rotate query and key in place, in one launch; with fused_set_kv_buffer_arg, the launch also stores k and v.

    >>> query, key = torch.randn(10, 8 * 64), torch.randn(10, 2 * 64)
    >>> cache = jitrope.tables.cos_sin_cache(16, jitrope.tables.inv_freq(rotary_dim=64)[0])
    >>> jitrope_sglang.apply_rope_with_cos_sin_cache_inplace(torch.arange(10), query, key, 64, cache)

    Args:
        positions, query, key, head_size, cos_sin_cache, is_neox: as in `jitrope.integrations.vllm.rotary_embedding`;
            positions are (T), query and key (T, H * head_size) or (T, H, head_size).
        fused_set_kv_buffer_arg: the host's `FusedSetKVBufferArg`, or any object with its attributes: value, shaped
            like key; k_buffer and v_buffer, (slots, Hk * head_size) or (slots, Hk, head_size), of key's dtype,
            torch.float8_e4m3fn or torch.float8_e5m2; k_scale and v_scale for fp8 buffers, which hold k / k_scale and
            v / v_scale (None: 1); cache_loc, int32 or int64 (T), the slot of each token (negative: padding).
        enable_pdl: ignored; it does not change the result.

    The errors are those of `jitrope.apply_rope`.
    """
    if fused_set_kv_buffer_arg is None:
        return vllm.rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox)
    to = fused_set_kv_buffer_arg
    scales = {name: getattr(to, name, None) for name in ("k_scale", "v_scale")}

    def run() -> None:
        q, k, v = (heads(name, x, 1, head_size) for name, x in (("query", query), ("key", key), ("value", to.value)))
        cache = buffers(k, to.k_buffer, to.v_buffer, to.cache_loc, *scales.values())
        prepare(q, k, v, cos_sin_cache, positions, is_neox, cache=cache, inplace=True)

    tensors = {"position_ids": positions, "q": query, "k": key, "v": to.value, "cos_sin_cache": cos_sin_cache}
    caches = {"k_cache": to.k_buffer, "v_cache": to.v_buffer, "slot_mapping": to.cache_loc, **scales}
    replayed("apply_rope_with_cos_sin_cache_inplace", (head_size, is_neox), run, **tensors, **caches)


def apply_rope_inplace(
    q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor, *, is_neox: bool, rope_dim: int = 0
) -> None:
    """Rotate q and k, (T, H, D), in place, in one launch.

    The other arguments and the errors are those of `apply_rope_with_cos_sin_cache_inplace`. R, the width of the cache,
    may be less than D; rope_dim is R, or 0.

    >>> q, k = torch.randn(10, 8, 64), torch.randn(10, 2, 64)
    >>> cache = jitrope.tables.cos_sin_cache(16, jitrope.tables.inv_freq(rotary_dim=64)[0])
    >>> jitrope_sglang.apply_rope_inplace(q, k, cache, torch.arange(10), is_neox=True)
    """
    words: Any = {"positions": positions, "interleaved": not is_neox, "rotary_dim": rope_dim or None}
    run = partial(apply_rope, q, k, cos_sin_cache=cos_sin_cache, layout="thd", inplace=True, **words)
    tensors = {"q": q, "k": k, "cos_sin_cache": cos_sin_cache, "position_ids": positions}
    replayed("apply_rope_inplace", (is_neox, rope_dim), run, **tensors)


def apply_rope_inplace_with_kvcache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    out_loc: Tensor,
    *,
    is_neox: bool,
    rope_dim: int = 0,
) -> None:
    """`apply_rope_inplace` that also stores the rotated k and v in their slots, in the same launch.

    >>> q, (k, v), buffers = torch.randn(10, 8, 64), torch.randn(2, 10, 2, 64), torch.zeros(2, 32, 2, 64)
    >>> table, ids = jitrope.tables.cos_sin_cache(16, jitrope.tables.inv_freq(rotary_dim=64)[0]), torch.arange(10)
    >>> jitrope_sglang.apply_rope_inplace_with_kvcache(q, k, v, *buffers, table, ids, ids, is_neox=True)

    Args:
        q, k: (T, H, D), rotated in place.
        v: (T, Hk, D) or (T, Hk * D), stored unchanged.
        k_cache, v_cache: (slots, Hk * D) or (slots, Hk, D), of k's dtype, or in fp8, unscaled.
        out_loc: int32 or int64 (T), the slot of each token; negative: padding.
        The other arguments and the errors are those of `apply_rope_inplace`.
    """

    def run() -> None:
        cache = buffers(k, k_cache, v_cache, out_loc)
        words: Any = {"cache": cache, "rotary_dim": rope_dim or None, "inplace": True}
        prepare(q, k, heads("v", v, 1, k.shape[-1]), cos_sin_cache, positions, is_neox, **words)

    tensors = {"q": q, "k": k, "v": v, "cos_sin_cache": cos_sin_cache, "position_ids": positions}
    caches = {"k_cache": k_cache, "v_cache": v_cache, "slot_mapping": out_loc}
    replayed("apply_rope_inplace_with_kvcache", (is_neox, rope_dim), run, **tensors, **caches)


def rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor | None, head_size: int, cos_sin_cache: Tensor, is_neox: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Rotate query and key in place and return them; key may be None. Also for torch.ops.sgl_kernel.rotary_embedding.

    Arguments and errors are those of `jitrope.integrations.vllm.rotary_embedding`.

    >>> cache = jitrope.tables.cos_sin_cache(16, jitrope.tables.inv_freq(rotary_dim=64)[0])
    >>> query, _ = jitrope_sglang.rotary_embedding(torch.arange(10), torch.randn(10, 8 * 64), None, 64, cache)
    """
    vllm.rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox)
    return query, key


def triton_mrope_fused(
    q: Tensor,
    k: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    mrope_section: Sequence[int],
    head_size: int,
    rotary_dim: int,
    mrope_interleaved: bool,
    mrope_interleaved_glm: bool,
    is_neox_style: bool,
    axis_map: Tensor | None,
) -> None:
    """Rotate q and k in place by positions (3, T), along time, height and width, like `MRotaryEmbedding`.

    >>> q, k, ids = torch.randn(10, 8, 64), torch.randn(10, 2, 64), torch.randint(16, (3, 10))
    >>> cache = jitrope.tables.cos_sin_cache(16, jitrope.tables.inv_freq(rotary_dim=64)[0])
    >>> jitrope_sglang.triton_mrope_fused(q, k, cache, ids, [16, 8, 8], 64, 64, False, False, True, None)

    Args:
        q, k: (T, H * head_size) or (T, H, head_size), any strides.
        rotary_dim: the width of the cache.
        mrope_section, mrope_interleaved: as in `jitrope.integrations.vllm.triton_mrope`.
        mrope_interleaved_glm: refused if the sections interleave. axis_map, which only that order needs, is ignored.

    The errors are those of `rotary_embedding`.
    """
    if mrope_interleaved and mrope_interleaved_glm:
        raise InvalidInput("mrope_interleaved_glm has another order of pairs; use SGLang's function")
    q, k = heads("q", q, 1, head_size), heads("k", k, 1, head_size)
    words: Any = {"positions": Mrope(positions, mrope_section, mrope_interleaved), "interleaved": not is_neox_style}
    apply_rope(q, k, cos_sin_cache=cos_sin_cache, rotary_dim=rotary_dim, layout="thd", inplace=True, **words)


def fused_k_indexer_norm_rope(
    k_input: Tensor, weight: Tensor, bias: Tensor, eps: float, cos_sin_cache: Tensor, positions: Tensor
) -> Tensor:
    """k of DeepSeek-V3.2's indexer, (T, D): LayerNorm, then rope of its first part; errors as in `rotary_embedding`.

    >>> cache = jitrope.tables.cos_sin_cache(16, jitrope.tables.inv_freq(rotary_dim=64)[0])
    >>> given = torch.randn(10, 128), torch.ones(128), torch.zeros(128), 1e-6, cache, torch.arange(10)
    >>> k = jitrope_sglang.fused_k_indexer_norm_rope(*given)
    """
    norm = Norm(weight, q_bias=bias, kind="layer_norm", eps=eps)
    k: Tensor = prepare(k_input[:, None], None, None, cos_sin_cache, positions, False, norm=norm)[0]
    return k.squeeze(1)


def fused_q_indexer_rope_first_quant(
    q_input: Tensor, weight: Tensor, weight_scale: float, cos_sin_cache: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """q of that indexer, (T, H, D), with its first part rotated, in fp8, and weight * weight_scale * q's scale.

    The errors are those of `rotary_embedding`.

    >>> cache = jitrope.tables.cos_sin_cache(16, jitrope.tables.inv_freq(rotary_dim=64)[0])
    >>> given = torch.randn(10, 8, 128), torch.randn(10, 8), 0.1, cache, torch.arange(10)
    >>> q, weights = jitrope_sglang.fused_q_indexer_rope_first_quant(*given)
    """
    q, weights = indexer_q(q_input, weight, weight_scale, cos_sin_cache, positions, False)
    return q, weights.unsqueeze(-1)


# ---- with norms of q and k -----------------------------------------------------------------------------


def table_qk_norm_rope_(
    qkv: Tensor,
    positions: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin_cache: Tensor,
    num_q_heads: int,
    num_k_heads: int,
    head_dim: int,
    eps: float,
) -> None:
    """RMSNorm and rope of halves of the first heads of qkv, (T, H * head_dim), in place, in one launch (DFlash).

    The normalised heads are rounded before the rotation. The other arguments and the errors are those of
    `fused_qk_norm_rope` and `rotary_embedding`.

    >>> cache = jitrope.tables.cos_sin_cache(16, jitrope.tables.inv_freq(rotary_dim=64)[0])
    >>> given = torch.randn(10, 12 * 64), torch.arange(10), torch.ones(64), torch.ones(64), cache, 8, 2, 64, 1e-6
    >>> jitrope_sglang.table_qk_norm_rope_(*given)
    """
    q = heads_from("qkv", qkv, 0, num_q_heads, head_dim)
    k = heads_from("qkv", qkv, num_q_heads, num_k_heads, head_dim)
    norm = norm_once(q_weight, k_weight, eps)
    prepare(q, k, None, cos_sin_cache, positions, True, norm=norm, inplace=True)


def fused_qk_norm_rope(
    qkv: Tensor,
    num_heads_q: int,
    num_heads_k: int,
    num_heads_v: int,
    head_dim: int,
    eps: float,
    q_weight: Tensor,
    k_weight: Tensor,
    base: float,
    is_neox: bool,
    position_ids: Tensor,
    factor: float,
    low: float,
    high: float,
    attention_factor: float,
    rotary_dim: int | None = None,
) -> None:
    """RMSNorm and rope of q and k inside qkv, (T, H * head_dim), in place, by angles (Qwen3-MoE). v stays.

    A launch in torch multiplies the positions by the frequencies: base^(-2 i / rotary_dim) for pair i, with a factor
    those of YaRN, whose ramp is from pair low to pair high. attention_factor multiplies the rotated elements. Nothing
    is rounded in between. position_ids are (T). The errors are those of `rotary_embedding`.

    >>> weights, ids = (torch.ones(64), torch.ones(64)), torch.arange(10, dtype=torch.int32)
    >>> given = 8, 2, 2, 64, 1e-6, *weights, 1e4, True, ids, 1.0, 0.0, 0.0, 1.0
    >>> jitrope_sglang.fused_qk_norm_rope(torch.randn(10, 12 * 64), *given)
    """
    counts, width = (num_heads_q, num_heads_k, num_heads_v), head_dim if rotary_dim is None else rotary_dim
    if position_ids.shape != qkv.shape[:1]:
        raise InvalidInput(f"position_ids has shape {tuple(position_ids.shape)}; it must be ({qkv.shape[0]},)")
    freqs = position_ids.unsqueeze(-1) * frequencies(qkv.device, (width,), base, factor, low, high)

    def run() -> None:
        q, k, _ = packed("qkv", qkv, counts, head_dim)
        words: Any = {"freqs": freqs, "rotary_dim": width, "mscale": attention_factor, "inplace": True}
        prepare(q, k, None, None, None, is_neox, norm=Norm(q_weight, k_weight, eps=eps), **words)

    words = *counts, head_dim, width, eps, is_neox, attention_factor
    replayed("fused_qk_norm_rope", words, run, qkv=qkv, freqs=freqs, q_weight=q_weight, k_weight=k_weight)


def minimax_qknorm_rope_grouped(
    qkv: Tensor, groups: Sequence[tuple[Tensor, int, int]], cos_sin_cache: Tensor, positions: Tensor, eps: float
) -> Tensor:
    """RMSNorm of 1 + weight and rope of halves of groups of heads of qkv, (T, H * D), in place. Returns qkv.

    A group is (weight, first head, number of heads), and its weight has D elements; more than two groups that have
    heads are refused. `minimax_qknorm_rope` of SGLang calls this. Nothing is rounded between norm and rope. The errors
    are those of `rotary_embedding`.

    >>> cache = jitrope.tables.cos_sin_cache(16, jitrope.tables.inv_freq(rotary_dim=64)[0])
    >>> qkv, groups = torch.randn(10, 12 * 128), [(torch.zeros(128), 0, 8), (torch.zeros(128), 8, 2)]
    >>> qkv = jitrope_sglang.minimax_qknorm_rope_grouped(qkv, groups, cache, torch.arange(10), 1e-6)
    """
    given = [group for group in groups if group[2] > 0]
    if not 1 <= len(given) <= 2:
        raise InvalidInput(f"groups has {len(given)} groups with heads; one or two go into a launch")
    q, k, *_ = [*(heads_from("qkv", qkv, first, n, weight.shape[-1]) for weight, first, n in given), None]
    norm = Norm(*[weight for weight, _, _ in given], eps=eps, zero_centered=True)
    prepare(q, k, None, cos_sin_cache, positions, True, norm=norm, inplace=True)
    return qkv


def fused_qk_gemma_rmsnorm_rope_gate(
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
    has_gate: bool = True,
    mrope_axis_map: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """RMSNorm of 1 + weight and rope of halves in one launch, and a copy of the gate (Qwen3.5).

    q_gate is (T, 2 * num_q_heads * head_dim), each head of q before its gate; with has_gate=False it is q alone, and
    the third result None. The gate is (T, num_q_heads, head_dim). mrope_axis_map, the axis of each pair for positions
    (3, T), is read at its first call, which waits for the device; in a CUDA graph or compiled that call is refused, and
    so is GLM's order. The normalised heads are rounded before the rotation. The errors are those of `rotary_embedding`.

    >>> cache = jitrope.tables.cos_sin_cache(16, jitrope.tables.inv_freq(rotary_dim=32)[0])
    >>> given = torch.randn(10, 2 * 8 * 64), torch.randn(10, 2 * 64), torch.zeros(64), torch.zeros(64), cache
    >>> q, k, gate = jitrope_sglang.fused_qk_gemma_rmsnorm_rope_gate(*given, torch.arange(10), 1e-6, 8, 2, 64, 32)
    """
    at: Any = positions if mrope_axis_map is None else Mrope(positions, *sections(mrope_axis_map))
    (both,) = packed("q_gate", q_gate, ((1 + has_gate) * num_q_heads,), head_dim)
    (keys,) = packed("k", k, (num_kv_heads,), head_dim)
    q, gate = (both[:, ::2], both[:, 1::2].contiguous()) if has_gate else (both, None)
    norm = norm_once(q_weight, k_weight, eps, 1.0)
    q, keys, _ = prepare(q, keys, None, cos_sin_cache, at, True, norm=norm, rotary_dim=rotary_dim)
    return q.flatten(1), keys.flatten(1), gate


def gemma_qkv_norm_rope(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cache: Tensor,
    positions: Tensor,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    eps: float,
) -> None:
    """RMSNorm of q, k and, without a weight, v, and rope of halves of q and k, in place (Gemma 4).

    q, k and v are (T, H * head_dim). v has a launch and a copy of its own. The normalised heads are rounded before the
    rotation. The errors are those of `rotary_embedding`.

    >>> cache = jitrope.tables.cos_sin_cache(16, jitrope.tables.inv_freq(rotary_dim=64)[0])
    >>> q, (k, v) = torch.randn(10, 8 * 64), torch.randn(2, 10, 2 * 64)
    >>> given = torch.ones(64), torch.ones(64), cache, torch.arange(10), 8, 2, 64, 64, 1e-6
    >>> jitrope_sglang.gemma_qkv_norm_rope(q, k, v, *given)
    """
    q, k, v = (
        packed(name, x, (n,), head_dim)[0]
        for name, x, n in (("q", q, num_q_heads), ("k", k, num_kv_heads), ("v", v, num_kv_heads))
    )
    norm = Norm(q_weight, k_weight, eps=eps, rounding="once", v_norm=True)
    v.copy_(prepare(q, k, v, cache, positions, True, norm=norm, rotary_dim=rotary_dim, inplace=True)[2])


_KERNELS = (apply_rope_inplace, apply_rope_inplace_with_kvcache, rotary_embedding)
_ATTENTION = "sglang.kernels.ops.attention"
_FUNCTIONS = {
    # The models call the first two modules' apply_rope_with_cos_sin_cache_inplace, which calls the first two functions.
    **_host.named(f"{_ATTENTION}.rope", *_KERNELS),
    **_host.named("sglang.jit_kernel.rope", *_KERNELS),
    **_host.named(f"{_ATTENTION}.rotary_triton", triton_mrope_fused),
    **_host.named(f"{_ATTENTION}.dsa.indexer_k", fused_k_indexer_norm_rope),
    **_host.named(f"{_ATTENTION}.dsa.indexer_q", fused_q_indexer_rope_first_quant),
    **_host.named(f"{_ATTENTION}.table_qk_norm_rope", table_qk_norm_rope_),
    **_host.named(f"{_ATTENTION}.fused_qknorm_rope", fused_qk_norm_rope),
    **_host.named(f"{_ATTENTION}.minimax_qknorm_rope", minimax_qknorm_rope_grouped),
    **_host.named(f"{_ATTENTION}.fused_qk_rmsnorm_rope_gate", fused_qk_gemma_rmsnorm_rope_gate),
    **_host.named(f"{_ATTENTION}.gemma_qkv_norm_rope", gemma_qkv_norm_rope),
    **_host.named("sgl_kernel", apply_rope_with_cos_sin_cache_inplace),
}


def enable() -> _host.Report:
    """Replace SGLang's rope in this process.

    Call it before the model is made: layers with head sizes other than 64, 128, 256 and 512 look the function up only
    then. Calls that jitrope refuses go to SGLang's own functions. Raises ImportError if neither sglang nor sgl_kernel
    has a function that jitrope knows.
    """
    return _host.enable("sglang", _FUNCTIONS, optional=_FUNCTIONS)  # no version has them all


disable = _host.disabler(__name__)
