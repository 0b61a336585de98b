"""SGLang: rope of its language models, with the write to the KV buffers in the same launch where it asks for it.

>>> from jitrope.integrations import sglang as jitrope_sglang
>>> report = jitrope_sglang.enable()          # before the model is made, until jitrope_sglang.disable()

The functions have the signatures of sglang.kernels.ops.attention.rope (0.5.23; before, sglang.jit_kernel.rope), but
for `apply_rope_with_cos_sin_cache_inplace`, whose are those of the sgl_kernel package. All work in place, with any even
rotary width, any head size up to 512, and tables in fp32, fp16 or bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..api import apply_rope, prepare_qkv
from ..base.errors import InvalidInput
from ..ops.values import KVCache
from . import _host, vllm
from .vllm import heads


@dataclass
class FusedSetKVBufferArg:
    """Where k and v go: the host's own do as well.

    Attributes:
        value: (T, Hk * head_size) or (T, Hk, head_size).
        k_buffer, v_buffer: (slots, Hk * head_size) or (slots, Hk, head_size), of k's dtype or torch.float8_e4m3fn.
        k_scale, v_scale: with fp8 buffers, which hold k / k_scale and v / v_scale; None is 1.
        cache_loc: int32 or int64 (T), the slot of each token; negative ones are padding.
    """

    value: Tensor
    k_buffer: Tensor
    v_buffer: Tensor
    k_scale: float | None
    v_scale: float | None
    cache_loc: Tensor


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
    """Rotate query and key in place, in one launch; with fused_set_kv_buffer_arg k and v are stored by it as well.

    Args:
        positions: int32 or int64, (T): rows of the cache. Those outside of it come out as NaN.
        query, key: (T, H * head_size) or (T, H, head_size); fp32, fp16 or bf16; any strides.
        head_size: at most 512.
        cos_sin_cache: (max_position, R): cosines of the R / 2 pairs, then their sines. R elements of each head,
            from the first, are rotated.
        is_neox: pairs are halves, (i, i + R / 2); else neighbours.
        fused_set_kv_buffer_arg: a `FusedSetKVBufferArg`, this module's or the host's.
        enable_pdl: has no effect on the result; there is nothing to say.

    Raises:
        InvalidInput: the arguments do not fit together; nothing was written.
        CompileError: the kernel could not be built.
    """
    if fused_set_kv_buffer_arg is None:
        return vllm.rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox)
    to = fused_set_kv_buffer_arg
    q, k = heads("query", query, 1, head_size), heads("key", key, 1, head_size)
    words = {"cos_sin_cache": cos_sin_cache, "positions": positions, "interleaved": not is_neox}
    scales = {name: getattr(to, name, None) for name in ("k_scale", "v_scale")}
    _rope_and_store(q, k, to.value, (to.k_buffer, to.v_buffer, to.cache_loc), words, scales)


def apply_rope_inplace(
    q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor, *, is_neox: bool, rope_dim: int = 0
) -> None:
    """Rotate q and k, (T, H, D), in place, in one launch; R, the width of the cache, may be less than D.

    The arguments are those of `apply_rope_with_cos_sin_cache_inplace`; rope_dim is R, or 0. So are the errors.
    """
    words: Any = {"positions": positions, "interleaved": not is_neox, "rotary_dim": rope_dim or None}
    apply_rope(q, k, cos_sin_cache=cos_sin_cache, layout="thd", inplace=True, **words)


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
    """`apply_rope_inplace`, and k rotated and v as it is stored in their slots, in one launch.

    Args:
        q, k: (T, H, D), rotated in place.
        v: (T, Hk, D) or (T, Hk * D).
        k_cache, v_cache: (slots, Hk * D) or (slots, Hk, D), of k's dtype, or torch.float8_e4m3fn, unscaled.
        out_loc: int32 or int64 (T), the slot of each token; negative ones are padding.
        The others are `apply_rope_inplace`'s, and so are the errors.
    """
    words = {"cos_sin_cache": cos_sin_cache, "positions": positions, "interleaved": not is_neox}
    _rope_and_store(q, k, v, (k_cache, v_cache, out_loc), {**words, "rotary_dim": rope_dim or None}, {})


def _rope_and_store(
    q: Tensor, k: Tensor, v: Tensor, to: tuple[Tensor, Tensor, Tensor], words: Any, scales: dict[str, Any]
) -> None:
    """to: the caches and the slots."""
    size = k.shape[-1]
    if to[0].dtype == torch.float8_e4m3fn:
        scales |= {name: 1.0 for name in ("k_scale", "v_scale") if scales.get(name) is None}
    v, k_cache, v_cache = (heads(name, x, 1, size) for name, x in (("v", v), ("k_cache", to[0]), ("v_cache", to[1])))
    cache = KVCache(k_cache, v_cache, to[2], rotate_k=True, **scales)
    prepare_qkv(q, k, v, cache=cache, layout="thd", inplace=True, **words)


def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Rotate query and key in place and return them; key may be None. Also torch.ops.sgl_kernel.rotary_embedding's.

    Arguments and errors are those of `jitrope.integrations.vllm.rotary_embedding`.
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
    """Rotate q and k in place by positions (3, T), along time, height and width, as `MRotaryEmbedding` does.

    Args:
        q, k: (T, H * head_size) or (T, H, head_size), any strides.
        rotary_dim: the width of the cache.
        mrope_section, mrope_interleaved: as `jitrope.integrations.vllm.mrope` has them.
        mrope_interleaved_glm: refused where the sections interleave; axis_map is of no use otherwise.

    Raises:
        InvalidInput: the arguments do not fit together; nothing was written.
    """
    if mrope_interleaved and mrope_interleaved_glm:
        raise InvalidInput("mrope_interleaved_glm deals the pairs out in its own order; use SGLang's function")
    if positions.dim() != 2 or cos_sin_cache.shape[-1] != rotary_dim:
        raise InvalidInput(
            f"positions are {tuple(positions.shape)} and cos_sin_cache is {tuple(cos_sin_cache.shape)}; they must be "
            f"(3, T) and (max_position, {rotary_dim})"
        )
    vllm.mrope(positions, q, k, head_size, cos_sin_cache, mrope_section, is_neox_style, mrope_interleaved)


_KERNELS = (apply_rope_inplace, apply_rope_inplace_with_kvcache, rotary_embedding)
_FUNCTIONS: dict[str, _host.Function] = {
    # apply_rope_with_cos_sin_cache_inplace of these two modules, which the models call, calls the first two functions.
    **{f"sglang.kernels.ops.attention.rope:{function.__name__}": function for function in _KERNELS},
    **{f"sglang.jit_kernel.rope:{function.__name__}": function for function in _KERNELS},
    "sglang.kernels.ops.attention.rotary_triton:triton_mrope_fused": triton_mrope_fused,
    "sgl_kernel:apply_rope_with_cos_sin_cache_inplace": apply_rope_with_cos_sin_cache_inplace,
}


def enable() -> _host.Report:
    """Replace SGLang's rope in this process; returns a report, which counts the calls.

    Call it before the model is made: layers of head sizes other than 64, 128, 256 and 512 keep the function that they
    find then. SGLang's own functions take the calls that jitrope refuses.

    Raises:
        ImportError: neither sglang nor sgl_kernel has a function that is known here.
    """
    return _host.enable("sglang", _FUNCTIONS, _FUNCTIONS)  # no version has them all


def disable() -> None:
    """Undo `enable`."""
    _host.disable("sglang")
