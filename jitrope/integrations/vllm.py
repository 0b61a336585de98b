"""vLLM: its rotary embedding op, multimodal rope, and rope with the write to the paged KV cache in one launch.

>>> from jitrope.integrations import vllm as jitrope_vllm
>>> report = jitrope_vllm.enable()
>>> jitrope_vllm.disable()

`enable` replaces `RotaryEmbedding.forward_cuda` and `MRotaryEmbedding.forward_cuda`. With its compiler on,
vLLM leaves rope to Inductor; set custom_ops=["+rotary_embedding"] in its compilation configuration to call these.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..api import apply_rope, prepare_qkv
from ..base.errors import InvalidInput
from ..ops.values import KVCache, Mrope
from . import _host

_LAYOUTS = {1: "thd", 2: "bshd"}  # by the number of token axes


_FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""The dtypes of fp8 caches, by vLLM's names."""


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

    Raises:
        InvalidInput: the arguments do not fit together; nothing was written.
        CompileError: the kernel could not be built.
    """
    words = {"rotary_offset": rope_dim_offset, "inverse": inverse, "rounding": rounding}
    axes = _token_axes(positions)
    _rotate(query, key, axes, head_size, is_neox, positions=positions, cos_sin_cache=cos_sin_cache, **words)


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
    """`rotary_embedding`, then `reshape_and_cache_flash` of key and value, in one launch: k is read once.

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

    Raises:
        InvalidInput, CompileError: as `rotary_embedding`; nothing was written.
    """
    axes = _token_axes(positions)
    scales: dict[str, Any] = {}
    fp8 = _FP8.get(kv_cache_dtype)
    if fp8 is not None:
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        if key_cache.dtype == torch.uint8:
            key_cache, value_cache = key_cache.view(fp8), value_cache.view(fp8)
        if key_cache.dtype != fp8:
            raise InvalidInput(
                f"key_cache is {key_cache.dtype}; with kv_cache_dtype={kv_cache_dtype!r} it must be {fp8}"
            )
    if axes == 1 and slot_mapping.shape[0] < positions.shape[0]:
        count = slot_mapping.shape[0]
        positions, query, key, value = (x[:count] for x in (positions, query, key, value))
    q, k, v = (heads(name, x, axes, head_size) for name, x in (("query", query), ("key", key), ("value", value)))
    cache = KVCache(key_cache, value_cache, slot_mapping, rotate_k=True, **scales)
    words: dict[str, Any] = {"cos_sin_cache": cos_sin_cache, "layout": _LAYOUTS[axes], "interleaved": not is_neox}
    prepare_qkv(q, k, v, positions=positions, cache=cache, inplace=True, **words)


def _token_axes(positions: Tensor) -> int:
    if positions.dim() not in _LAYOUTS:
        raise InvalidInput(f"positions have shape {tuple(positions.shape)}; they must be (T) or (B, S)")
    return positions.dim()


def _rotate(query: Tensor, key: Tensor | None, axes: int, head_size: int, is_neox: bool, **words: Any) -> None:
    q, k = heads("query", query, axes, head_size), None if key is None else heads("key", key, axes, head_size)
    apply_rope(q, k, layout=_LAYOUTS[axes], interleaved=not is_neox, inplace=True, **words)


def heads(name: str, x: Tensor, token_axes: int, head_size: int) -> Tensor:
    """View x, (..., H * head_size) or (..., H, head_size) after its token axes, as (..., H, head_size).

    Splitting the last axis never copies, so results written to the view are written to x.

    >>> jitrope_vllm.heads("query", torch.randn(10, 8 * 64), token_axes=1, head_size=64).shape
    torch.Size([10, 8, 64])

    Raises:
        InvalidInput: x has neither shape.
    """
    axes, width = x.dim() - token_axes, x.shape[-1]
    if axes == 1 and head_size > 0 and width % head_size == 0:
        return x.view(*x.shape[:-1], width // head_size, head_size)
    if axes == 2 and width == head_size:
        return x
    lead = "T" if token_axes == 1 else "B, S"
    raise InvalidInput(
        f"{name} has shape {tuple(x.shape)}; with positions of {token_axes} axes and head_size {head_size} it must be "
        f"({lead}, H * {head_size}) or ({lead}, H, {head_size})"
    )


_MROPE = "vllm.model_executor.layers.rotary_embedding.mrope:triton_mrope"


def enable(*, rounding: str = "fp32") -> _host.Report:
    """Replace vLLM's rotary embedding in this process.

    Calls that jitrope refuses (fp64, heads of more than 512) go to vLLM's own functions. Call `enable` in each worker
    process. Enabling twice changes nothing; call `disable` before you change the rounding.

    Args:
        rounding: "dtype" for the bits of 16-bit arithmetic; see `rotary_embedding`.

    Raises:
        InvalidInput: rounding is neither "fp32" nor "dtype".
        ImportError: vLLM is not installed.
    """
    if rounding not in ("fp32", "dtype"):
        raise InvalidInput(f"rounding is {rounding!r}; allowed are fp32 and dtype")
    functions: dict[str, _host.Function] = {"vllm._custom_ops:rotary_embedding": rotary_embedding, _MROPE: triton_mrope}
    return _host.enable("vllm", {at: partial(ours, rounding=rounding) for at, ours in functions.items()}, {_MROPE})


def disable() -> None:
    """Undo `enable`."""
    _host.disable("vllm")
