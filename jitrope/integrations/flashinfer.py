"""FlashInfer: rope, alone, with norms, with a conversion to fp8, and with the write to the paged KV cache.

>>> from jitrope.integrations import flashinfer as jitrope_flashinfer
>>> report = jitrope_flashinfer.enable()
>>> jitrope_flashinfer.disable()

The signatures are those of flashinfer-python 0.7.2. Tables are cos_sin_cache, (P, R), the cosines and then the sines of
the pairs; fp32, fp16 or bf16. Tokens are (T). enable_pdl is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..base.errors import InvalidInput
from ..ops.kv_cache import KVCache
from ..ops.quantize import Quantize
from ..plan.views import FORMATS, FP8
from . import _host, vllm
from ._flashinfer_norms import (
    cake_fused_qk_rmsnorm_rope_append_paged_kv_cache,
    cake_fused_qk_rmsnorm_rope_quantize_fp8_append_paged_kv_cache,
    fused_qk_rmsnorm_rope,
)
from ._serving import latent_cache, prepare, unit

__all__ = [
    "apply_rope_with_cos_sin_cache_inplace",
    "cake_fused_qk_rmsnorm_rope_append_paged_kv_cache",
    "cake_fused_qk_rmsnorm_rope_quantize_fp8_append_paged_kv_cache",
    "disable",
    "enable",
    "fused_qk_rmsnorm_rope",
    "rope_quantize_fp8",
    "rope_quantize_fp8_append_paged_kv_cache",
]


def apply_rope_with_cos_sin_cache_inplace(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool = True
) -> None:
    """Rotate query and key, (T, H * head_size), in place, in one launch. The errors are those of `prepare_qkv`.

    >>> cache = jitrope.tables.cos_sin_cache(16, jitrope.tables.inv_freq(rotary_dim=64)[0])
    >>> query, key = torch.randn(10, 8 * 64), torch.randn(10, 2 * 64)
    >>> jitrope_flashinfer.apply_rope_with_cos_sin_cache_inplace(torch.arange(10), query, key, 64, cache)
    """
    vllm.rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox)


def rope_quantize_fp8(
    q_rope: Tensor,
    k_rope: Tensor,
    q_nope: Tensor | None,
    k_nope: Tensor | None,
    cos_sin_cache: Tensor,
    pos_ids: Tensor,
    is_neox: bool = True,
    quantize_dtype: torch.dtype | None = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    q_rope_out: Tensor | None = None,
    k_rope_out: Tensor | None = None,
    q_nope_out: Tensor | None = None,
    k_nope_out: Tensor | None = None,
    enable_pdl: bool = False,
    backend: str = "cuda",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rotate q_rope and k_rope, and convert them and the rest of the heads to fp8: a launch for each.

    >>> cache = jitrope.tables.cos_sin_cache(16, jitrope.tables.inv_freq(rotary_dim=64)[0])
    >>> given = torch.randn(10, 8, 64), torch.randn(10, 64), None, None, cache, torch.arange(10)
    >>> q_rope, k_rope, q_nope, k_nope = jitrope_flashinfer.rope_quantize_fp8(*given)

    q_rope and q_nope are (T, H, R) and (T, H, N), k_rope and k_nope alike, or in MLA (T, R) and (T, N). The results are
    y times quant_scale_q or quant_scale_kv, in the outputs if they are given. backend is ignored. The errors are those
    of `prepare_qkv`.
    """
    outs = q_rope_out, k_rope_out, q_nope_out, k_nope_out
    scales = unit("quant_scale_q", quant_scale_q), unit("quant_scale_kv", quant_scale_kv)
    quantize = Quantize(*scales, dtype=quantize_dtype or next((x.dtype for x in outs if x is not None), FP8))
    if (q_nope is None) != (k_nope is None):
        raise InvalidInput("q_nope and k_nope: pass both or neither")
    q_nope, k_nope = (x[..., :0] if nope is None else nope for x, nope in ((q_rope, q_nope), (k_rope, k_nope)))
    q_rope, k_rope = _converted(q_rope, k_rope, outs[:2], quantize, cos_sin_cache, pos_ids, is_neox)
    q_nope, k_nope = _converted(q_nope, k_nope, outs[2:], quantize, None, pos_ids, is_neox)
    return q_rope, k_rope, q_nope, k_nope


def rope_quantize_fp8_append_paged_kv_cache(
    q_rope: Tensor,
    k_rope: Tensor,
    q_nope: Tensor | None,
    k_nope: Tensor | None,
    v: Tensor | None,
    cos_sin_cache: Tensor,
    pos_ids: Tensor,
    paged_kv_cache: tuple[Tensor, Tensor],
    kv_indices: Tensor,
    kv_indptr: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    is_neox: bool = True,
    quantize_dtype: torch.dtype | None = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    page_size: int = 16,
    kv_layout: str = "NHD",
    q_rope_out: Tensor | None = None,
    q_nope_out: Tensor | None = None,
    enable_pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotate q and k, convert them to fp8, and store k and v in a paged cache.

    In MLA (k_rope of two axes) that is a launch for the rotated parts and the cache, and one for q_nope. Otherwise it
    is one launch, after copies that join the parts of heads if they are not rotated whole.

    >>> cache = jitrope.tables.cos_sin_cache(16, jitrope.tables.inv_freq(rotary_dim=64)[0])
    >>> q, (k, v), ids = torch.randn(10, 8, 64), torch.randn(2, 10, 2, 64), torch.arange(10)
    >>> caches = tuple(torch.zeros(2, 1, 16, 2, 64).to(torch.float8_e4m3fn))
    >>> given = q, k, None, None, v, cache, ids, caches, torch.tensor([0]), torch.tensor([0, 1]), 0 * ids, ids
    >>> q_rope, q_nope = jitrope_flashinfer.rope_quantize_fp8_append_paged_kv_cache(*given)

    v is (T, H, D), in MLA None. paged_kv_cache are k's and v's, (pages, page_size, H, D), or with kv_layout="HND"
    (pages, H, page_size, D); in MLA the latent's and k_rope's, (pages, page_size, N) and (pages, page_size, R). The
    pages of request i are kv_indices[kv_indptr[i] : kv_indptr[i + 1]]. batch_indices and positions are the request of
    each token, and the token's place in its cache; with a negative index it is not stored. The others, and the errors,
    are those of `rope_quantize_fp8`.
    """
    if kv_layout not in ("NHD", "HND"):
        raise InvalidInput(f"kv_layout is {kv_layout!r}; it must be NHD or HND")
    latent, caches = k_rope.dim() == 2, list(paged_kv_cache)
    if kv_layout == "HND" and not latent:
        caches = [x.transpose(1, 2) for x in caches]
    dtype = quantize_dtype or next((x.dtype for x in (q_rope_out, q_nope_out) if x is not None), FP8)
    if any(x.dtype != dtype or x.shape[1] != page_size for x in caches):
        had = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in caches)
        raise InvalidInput(f"paged_kv_cache is {had}; it must have pages of page_size={page_size} rows in {dtype}")
    quantize, ids = Quantize(unit("quant_scale_q", quant_scale_q), dtype=dtype), pos_ids
    units: Any = dict.fromkeys(("k_scale", "v_scale"), unit("quant_scale_kv", quant_scale_kv))
    slots = _slots(kv_indices, kv_indptr, batch_indices, positions, page_size)
    words: dict[str, Any] = {"quantize": quantize}
    if not latent:
        cache = KVCache(caches[0], caches[1], slots, **units)
        q, k = (x if rest is None else torch.cat((x, rest), -1) for x, rest in ((q_rope, q_nope), (k_rope, k_nope)))
        words.update(cache=cache, rotary_dim=q_rope.shape[-1])
        whole = prepare(q, k, v, cos_sin_cache, ids, is_neox, **words)[0]
        found = zip((q_rope_out, q_nope_out), whole.tensor_split([q_rope.shape[-1]], -1))
        q, rest = (x if out is None else out.copy_(x) for out, x in found)
        return q, rest
    if v is not None or k_nope is None or q_nope is None:
        raise InvalidInput("with k_rope (T, R), v must be None, and k_nope and q_nope must be given")
    k, v, k_cache, v_cache = latent_cache("k_nope", k_rope, k_nope, caches[1], caches[0])
    words["cache"] = KVCache(k_cache, v_cache, slots, **units)
    rest = prepare(q_nope, None, None, None, ids, is_neox, out=(q_nope_out, None, None), quantize=quantize)[0]
    return prepare(q_rope, k, v, cos_sin_cache, ids, is_neox, out=(q_rope_out, None, None), **words)[0], rest


def _converted(
    q: Tensor, k: Tensor, outs: Sequence[Any], quantize: Quantize, table: Tensor | None, ids: Tensor, neox: bool
) -> tuple[Tensor, Tensor]:
    """q and k in fp8, rotated if there is a table. k may lack its axis of heads."""
    keys, k_out = (x.unsqueeze(1) if x is not None and k.dim() == 2 else x for x in (k, outs[1]))
    if q.shape[-1] == k.shape[-1] == 0:
        dtype = FORMATS[quantize.words.get("out_dtype", "fp8")].dtype
        found = [x.to(dtype) if out is None else out for x, out in zip((q, k), outs)]
        return found[0], found[1]
    q, found_k, _ = prepare(q, keys, None, table, ids, neox, quantize=quantize, out=(outs[0], k_out, None))
    return q, found_k.squeeze(1) if k.dim() == 2 else found_k


def _slots(indices: Tensor, indptr: Tensor, requests: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """The slot of each token; -1 for a token of no request."""
    if not indices.numel():
        return torch.full_like(requests, -1)
    place = indptr[requests.clamp(min=0).long()] + positions // page_size
    pages = indices[place.long().clamp(0, indices.numel() - 1)]
    return torch.where(requests < 0, -1, pages * page_size + positions % page_size)


_QUANTIZE = rope_quantize_fp8, rope_quantize_fp8_append_paged_kv_cache  # mla_rope_quantize_fp8 calls the first one
_FUNCTIONS = {
    **_host.named("flashinfer.rope", apply_rope_with_cos_sin_cache_inplace, *_QUANTIZE),
    **_host.named("flashinfer.cake_fused_qk_rope_append", cake_fused_qk_rmsnorm_rope_append_paged_kv_cache),
    **_host.named(
        "flashinfer.cake_fused_qk_rope_fp8_append", cake_fused_qk_rmsnorm_rope_quantize_fp8_append_paged_kv_cache
    ),
    **_host.named("flashinfer.norm", fused_qk_rmsnorm_rope),
}


def enable() -> _host.Report:
    """Replace FlashInfer's rope. Refused calls go to its own functions. Raises ImportError if it is not installed."""
    return _host.enable("flashinfer", _FUNCTIONS, optional=_FUNCTIONS)


def disable() -> None:
    """Undo `enable`."""
    _host.disable("flashinfer")
