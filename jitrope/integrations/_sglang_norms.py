"""SGLang's functions with norms of q and k; `sglang` has and replaces them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..base.errors import InvalidInput
from ..ops.values import Mrope, Norm
from ._serving import frequencies, norm_once, packed, prepare, run_of_heads


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
    q = run_of_heads("qkv", qkv, 0, num_q_heads, head_dim)
    k = run_of_heads("qkv", qkv, num_q_heads, num_k_heads, head_dim)
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
    q, k, _ = packed("qkv", qkv, (num_heads_q, num_heads_k, num_heads_v), head_dim)
    width = head_dim if rotary_dim is None else rotary_dim
    if position_ids.shape != qkv.shape[:1]:
        raise InvalidInput(f"position_ids has shape {tuple(position_ids.shape)}; it must be ({qkv.shape[0]},)")
    freqs = position_ids.unsqueeze(-1) * frequencies(qkv.device, (width,), base, factor, low, high)
    words: Any = {"freqs": freqs, "rotary_dim": width, "mscale": attention_factor, "inplace": True}
    prepare(q, k, None, None, None, is_neox, norm=Norm(q_weight, k_weight, eps=eps), **words)


def minimax_qknorm_rope_grouped(
    qkv: Tensor,
    groups: Sequence[tuple[Tensor, int, int]],
    cos_sin_cache: Tensor,
    positions: Tensor,
    eps: float,
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
    q, k, *_ = [*(run_of_heads("qkv", qkv, first, n, weight.shape[-1]) for weight, first, n in given), None]
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
    at: Any = positions if mrope_axis_map is None else Mrope(positions, *_sections(mrope_axis_map))
    (both,) = packed("q_gate", q_gate, ((1 + has_gate) * num_q_heads,), head_dim)
    (keys,) = packed("k", k, (num_kv_heads,), head_dim)
    q, gate = (both[:, ::2], both[:, 1::2].contiguous()) if has_gate else (both, None)
    norm = norm_once(q_weight, k_weight, eps, 1.0)
    q, keys, _ = prepare(q, keys, None, cos_sin_cache, at, True, norm=norm, rotary_dim=rotary_dim)
    return q.flatten(1), keys.flatten(1), gate


_AXES: Any = WeakTensorKeyDictionary()
"""The sections and their order of each map of axes, or None."""


def _sections(axis_map: Tensor) -> tuple[tuple[int, ...], bool]:
    """The number of pairs of each axis, and whether they interleave, from the axis of each pair."""
    graph = axis_map.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if torch.compiler.is_compiling() or (graph and axis_map not in _AXES):
        raise InvalidInput("mrope_axis_map must be read; call the function before the CUDA graph, and not compiled")
    if axis_map not in _AXES:
        axes = axis_map.tolist()
        counts = tuple([axes.count(axis) for axis in range(3)])
        mixed = [pair % 3 if pair // 3 < counts[pair % 3] else 0 for pair in range(len(axes))]
        _AXES[axis_map] = (counts, axes == mixed) if axes in (mixed, sorted(axes)) else None
    found: tuple[tuple[int, ...], bool] | None = _AXES[axis_map]
    if found is None:
        raise InvalidInput("mrope_axis_map has another order of axes than whole sections, or axes in turn")
    return found


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
