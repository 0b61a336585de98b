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

from ..api import prepare_qkv
from ..base.errors import InvalidInput
from ..ops.kv_cache import KVCache
from ..ops.pages import Pages
from ..ops.quantize import DynamicQuantize, Quantize
from ..ops.stand_ins import constant
from ..ops.values import Mrope, Norm, Packed
from ..plan.views import FORMATS, FP8
from . import _host, vllm
from ._serving import frequencies, latent_cache, packed, prepare, unit

_FP8_MAX = torch.finfo(FP8).max


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
    words: dict[str, Any] = {"quantize": Quantize(unit("quant_scale_q", quant_scale_q), dtype=dtype)}
    units: Any = dict.fromkeys(("k_scale", "v_scale"), unit("quant_scale_kv", quant_scale_kv))
    pages = Pages(kv_indices, kv_indptr, batch_indices=batch_indices, cache_positions=positions)
    if not latent:
        q, k = (x if rest is None else torch.cat((x, rest), -1) for x, rest in ((q_rope, q_nope), (k_rope, k_nope)))
        width = q_rope.shape[-1]
        words.update(cache=KVCache(caches[0], caches[1], pages, **units), rotary_dim=width)
        whole = prepare(q, k, v, cos_sin_cache, pos_ids, is_neox, **words)[0]
        found = zip((q_rope_out, q_nope_out), whole.split_with_sizes((width, whole.shape[-1] - width), -1))
        q, rest = (x.contiguous() if out is None else out.copy_(x) for out, x in found)
        return q, rest
    if v is not None or k_nope is None or q_nope is None:
        raise InvalidInput("with k_rope (T, R), v must be None, and k_nope and q_nope must be given")
    k, v, k_cache, v_cache = latent_cache("k_nope", k_rope, k_nope, caches[1], caches[0])
    rest = prepare(q_nope, None, None, None, pos_ids, is_neox, out=(q_nope_out, None, None), **words)[0]
    words["cache"] = KVCache(k_cache, v_cache, pages, **units)
    return prepare(q_rope, k, v, cos_sin_cache, pos_ids, is_neox, out=(q_rope_out, None, None), **words)[0], rest


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


# ---- with norms of q and k -----------------------------------------------------------------------------


def cake_fused_qk_rmsnorm_rope_append_paged_kv_cache(
    qkv: Tensor,
    cos_sin: Tensor,
    seq_lens: Tensor,
    q_indptr: Tensor,
    page_indices: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    qk_norm_policy: int = 0,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    out_q: Tensor | None = None,
    out_k: Tensor | None = None,
    out_v: Tensor | None = None,
    clear_unused_last_page_rows: bool = True,
) -> Tensor:
    """Norm and rope of halves of packed QKV, and the write of k and v to the paged cache, in one launch. Returns q.

    >>> table = jitrope.tables.cos_sin_cache(32, jitrope.tables.inv_freq(rotary_dim=64)[0])
    >>> requests = torch.tensor([18, 4]), torch.tensor([0, 2, 6]), torch.tensor([[2, 0], [1, 3]])
    >>> given = torch.randn(6, 12 * 64), table, *requests, *torch.zeros(2, 4, 16, 2, 64)
    >>> counts = {"num_q_heads": 8, "num_kv_heads": 2}
    >>> q = jitrope_flashinfer.cake_fused_qk_rmsnorm_rope_append_paged_kv_cache(*given, **counts)

    qkv is (T, H * D): all heads of q, then of k, then of v. The caches are (pages, page_size, H, D). Tokens q_indptr[i]
    to q_indptr[i + 1] are the last ones of request i, whose length with them is seq_lens[i] and whose pages are
    page_indices[i]. qk_norm_policy is 0: no norm, 1: RMSNorm after rope, 2: before it, with both weights, (D). Nothing
    is rounded in between. clear_unused_last_page_rows writes zeros to the rest of the last page of a request with new
    tokens. out_k and out_v are refused. Positions are computed from the lengths in torch. The errors are those of
    `prepare_qkv`.
    """
    words = _norm(qk_norm_policy, q_norm_weight, k_norm_weight, eps, out_k, out_v)
    pages = Pages(page_indices, seq_lens=seq_lens, cu_seqlens_q=q_indptr, clear_page=clear_unused_last_page_rows)
    words |= {"cache": KVCache(key_cache, value_cache, pages), "out": (out_q, None, None)}
    return _appended(qkv, num_q_heads, num_kv_heads, cos_sin, seq_lens, q_indptr, words)  # type: ignore[no-any-return]


def cake_fused_qk_rmsnorm_rope_quantize_fp8_append_paged_kv_cache(
    qkv: Tensor,
    cos_sin_cache: Tensor,
    seq_lens: Tensor,
    q_indptr: Tensor,
    page_indices: Tensor,
    paged_kv_cache: tuple[Tensor, Tensor],
    is_prefill: bool,
    k_scale: Tensor,
    v_scale: Tensor,
    quant_policy: int,
    max_seqlen: int = 0,
    upper_max: float = _FP8_MAX,
    q_scale_inv: Tensor | None = None,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    qk_norm_policy: int = 0,
    out_q: Tensor | None = None,
    out_k: Tensor | None = None,
    out_v: Tensor | None = None,
    q_scale: Tensor | None = None,
    split_k_flag: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same with fp8: q, its scale, and the flags, (requests, Hk); the caches are e4m3.

    >>> table = jitrope.tables.cos_sin_cache(32, jitrope.tables.inv_freq(rotary_dim=64)[0])
    >>> requests = torch.tensor([18, 4]), torch.tensor([0, 2, 6]), torch.tensor([[2, 0], [1, 3]])
    >>> caches, one = tuple(torch.zeros(2, 4, 16, 2, 64).to(torch.float8_e4m3fn)), torch.ones(1)
    >>> given = torch.randn(6, 12 * 64), table, *requests, caches, False, one, one, 1
    >>> q, scale, flags = jitrope_flashinfer.cake_fused_qk_rmsnorm_rope_quantize_fp8_append_paged_kv_cache(*given)

    The caches hold k / k_scale and v / v_scale. quant_policy 1: the scale of a token's head of q is its largest
    element / 448, (T, H); 2: q times q_scale_inv, and an empty scale. eps is 1e-6. A flag is 0, or -1 if q_indptr does
    not rise from 0 to T: then nothing is stored, and q has no meaning. The flags are a few operations in torch.
    quant_policy 1 with is_prefill or another upper_max is refused, and so are out_k and out_v; 2 does not read
    upper_max. The other arguments and the errors are those of `cake_fused_qk_rmsnorm_rope_append_paged_kv_cache`.
    """
    words, dynamic = _norm(qk_norm_policy, q_norm_weight, k_norm_weight, 1e-6, out_k, out_v), quant_policy == 1
    if quant_policy not in (1, 2) or (dynamic and (is_prefill or upper_max != _FP8_MAX)):
        had = f"quant_policy is {quant_policy}, with {is_prefill=} and {upper_max=}"
        raise InvalidInput(f"{had}; it must be 2, or 1 without is_prefill and with upper_max={_FP8_MAX}")
    if not dynamic and q_scale_inv is None:
        raise InvalidInput("q_scale_inv is None; quant_policy 2 needs it")
    k_cache, v_cache = paged_kv_cache
    kv_heads = k_cache.shape[-2] if k_cache.dim() == 4 else 0
    if kv_heads == 0 or k_cache.dtype != FP8 or qkv.shape[-1] % k_cache.shape[-1]:
        had = f"key_cache is {tuple(k_cache.shape)} {k_cache.dtype}, and qkv is {tuple(qkv.shape)}"
        raise InvalidInput(f"{had}; they must be (pages, page_size, Hk, D) {FP8} and (T, H * D)")
    right = (q_indptr[0] == 0) & (q_indptr[-1] == len(qkv)) & (q_indptr.diff() >= 0).all()
    lengths = torch.where(right, seq_lens, torch.zeros_like(seq_lens))
    pages = Pages(page_indices, seq_lens=lengths, cu_seqlens_q=q_indptr, clear_page=True)
    words["cache"] = KVCache(k_cache, v_cache, pages, k_scale=k_scale, v_scale=v_scale)
    words["quantize"] = DynamicQuantize() if q_scale_inv is None or dynamic else Quantize(q_scale_inv.reciprocal())
    q_heads = qkv.shape[-1] // k_cache.shape[-1] - 2 * kv_heads
    _must_be("out_q", out_q, (len(qkv), q_heads, k_cache.shape[-1]), FP8)
    _must_be("q_scale", q_scale, (len(qkv), q_heads) if dynamic else (0,), torch.float32)
    _must_be("split_k_flag", split_k_flag, (len(seq_lens), kv_heads), torch.int32)
    q = _appended(qkv, q_heads, kv_heads, cos_sin_cache, lengths, q_indptr, words)
    values, scale = q if dynamic else (q, torch.empty(0, device=qkv.device))
    flags = (right.int() - 1).expand(len(seq_lens), kv_heads)
    found = zip((out_q, q_scale, split_k_flag), (values, scale, flags))
    values, scale, flags = (x.contiguous() if out is None else out.copy_(x) for out, x in found)
    return values, scale, flags


def fused_qk_rmsnorm_rope(  # more than 50 lines, because the signature is the host's
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    *,
    ppf: int,
    pph: int,
    ppw: int,
    num_frame_channels: int,
    num_height_channels: int,
    num_width_channels: int,
    num_heads_q: int,
    num_heads_k: int,
    num_heads_v: int,
    head_dim: int,
    eps: float = 1e-6,
    base: float = 10000.0,
    interleave: bool = True,
    factor: float = 1.0,
    low: float = 0.0,
    high: float = 0.0,
    attention_factor: float = 1.0,
    is_qk_norm: bool = True,
    output_fp8: bool = False,
    output_quant_scale: float = 1.0,
    v_quant_scale: float = 1.0,
    q_out: Tensor | None = None,
    k_out: Tensor | None = None,
    v_out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """RMSNorm across heads and rope along frames, height and width of packed QKV, and a copy of v (video models).

    >>> patches, channels = {"ppf": 2, "pph": 3, "ppw": 4}, {"num_frame_channels": 24}
    >>> channels |= dict.fromkeys(("num_height_channels", "num_width_channels"), 20)
    >>> counts = {**dict.fromkeys(("num_heads_q", "num_heads_k", "num_heads_v"), 8), "head_dim": 64}
    >>> given = torch.randn(1, 24, 3 * 512), torch.ones(512), torch.ones(512)
    >>> q, k, v = jitrope_flashinfer.fused_qk_rmsnorm_rope(*given, **patches, **channels, **counts)

    qkv is (B, S, H * D) or (B * S, H * D), with S = ppf * pph * ppw tokens, the width innermost; the results have an
    axis of heads. The weights are (H * D). The first num_frame_channels elements of a head turn by the frame, the next
    by the height, then by the width: pair i of W channels by base^(-2 i / W), with a factor by YaRN's, whose ramp is
    from pair low to pair high. Normalised heads are rounded before the rotation. output_fp8: e4m3, of y times
    output_quant_scale and, in a launch of its own, v times v_quant_scale; nothing is rounded before. The errors are
    those of `prepare_qkv`.
    """
    sizes, widths = (ppf, pph, ppw), (num_frame_channels, num_height_channels, num_width_channels)
    tokens, flat = ppf * pph * ppw, qkv.dim() == 2
    fits = qkv.dim() in (2, 3) and tokens > 0 and qkv.shape[-2] % tokens == 0 and (flat or qkv.shape[1] == tokens)
    if not fits or sum(widths) != head_dim or any(width % 2 for width in widths):
        had = f"qkv has shape {tuple(qkv.shape)}, and the patches are {sizes}, the channels {widths}"
        raise InvalidInput(f"{had}; they must be {tokens} tokens, and even numbers, {head_dim} in all")
    rows = qkv.unflatten(0, (-1, tokens)) if flat else qkv
    outs = [x.unflatten(0, (-1, tokens)) if flat and x is not None else x for x in (q_out, k_out, v_out)]
    q, k, v = packed("qkv", rows, (num_heads_q, num_heads_k, num_heads_v), head_dim, 2)
    freqs, ids = _axes(qkv.device, sizes, widths, base, factor, low, high)
    words: dict[str, Any] = {"freqs": freqs, "positions": Mrope(ids, [width // 2 for width in widths])}
    words |= {"mscale": attention_factor, "interleaved": interleave}
    if is_qk_norm:
        words["norm"] = Norm(q_weight, k_weight, eps=eps, across_heads=True, rounding="none" if output_fp8 else "once")
    if output_fp8:
        scale = unit("output_quant_scale", output_quant_scale)
        words["quantize"] = Quantize(scale, scale)
        q, k, _ = prepare_qkv(q, k, None, out=(*outs[:2], None), **words)
        of_v = Quantize(unit("v_quant_scale", v_quant_scale))
        v = prepare_qkv(v, None, None, quantize=of_v, out=(outs[2], None, None))[0]
    else:
        if outs[2] is None:
            v = v.clone(memory_format=torch.contiguous_format)
        q, k, v = prepare_qkv(q, k, v, out=tuple(outs), **words)
    made = [x.flatten(0, 1) if flat else x for x in (q, k, v)]
    return made[0], made[1], made[2]


def _norm(
    policy: int, q_weight: Tensor | None, k_weight: Tensor | None, eps: float, *outputs: Tensor | None
) -> dict[str, Any]:
    """The norm of a policy, as a word. outputs: those of k and v."""
    if policy not in (0, 1, 2) or (policy and (q_weight is None or k_weight is None)):
        had = f"qk_norm_policy is {policy}, q_norm_weight {q_weight is not None}, k_norm_weight {k_weight is not None}"
        raise InvalidInput(f"{had}; it must be 0, or 1 or 2 with both weights")
    if any(out is not None for out in outputs):
        raise InvalidInput("out_k and out_v are given; k and v go to the cache")
    return {"norm": Norm(q_weight, k_weight, eps=eps, after_rope=policy == 1) if policy else None}


def _must_be(name: str, out: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if out is not None and (out.shape != shape or out.dtype != dtype):
        raise InvalidInput(f"{name} is {tuple(out.shape)} {out.dtype}; it must be {shape} {dtype}")


def _appended(
    qkv: Tensor, q_heads: int, kv_heads: int, table: Tensor, lengths: Tensor, indptr: Tensor, words: dict[str, Any]
) -> Any:
    """q of a call that stores k and v. Each request's new tokens are its last ones."""
    total = q_heads + 2 * kv_heads
    if qkv.dim() != 2 or total < 1 or qkv.shape[1] % total:
        raise InvalidInput(f"qkv has shape {tuple(qkv.shape)}; it must be (T, {total} * D)")
    q, k, v = packed("qkv", qkv, (q_heads, kv_heads, kv_heads), qkv.shape[1] // total)
    positions = Packed(indptr, start_positions=lengths - indptr.diff())
    return prepare(q, k, v, table, positions, True, **words)[0]


@constant
def _axes(device: torch.device, sizes: tuple[int, ...], widths: tuple[int, ...], *ramp: float) -> tuple[Tensor, Tensor]:
    """Angles of the pairs at each place of an axis, and the places of each patch along the axes."""
    places = torch.arange(max(sizes), device=device)
    axes = [torch.arange(size, dtype=torch.int32, device=device) for size in sizes]
    ids = torch.stack([x.flatten() for x in torch.meshgrid(*axes, indexing="ij")])
    return places.unsqueeze(-1) * frequencies(device, widths, *ramp), ids


_ROPE = apply_rope_with_cos_sin_cache_inplace, rope_quantize_fp8, rope_quantize_fp8_append_paged_kv_cache
_FP8 = cake_fused_qk_rmsnorm_rope_quantize_fp8_append_paged_kv_cache
_FUNCTIONS = {
    **_host.named("flashinfer.rope", *_ROPE),  # mla_rope_quantize_fp8 calls the second one
    **_host.named("flashinfer.cake_fused_qk_rope_append", cake_fused_qk_rmsnorm_rope_append_paged_kv_cache),
    **_host.named("flashinfer.cake_fused_qk_rope_fp8_append", _FP8),
    **_host.named("flashinfer.norm", fused_qk_rmsnorm_rope),
}


def enable() -> _host.Report:
    """Replace FlashInfer's rope. Refused calls go to its own functions. Raises ImportError if it is not installed."""
    return _host.enable("flashinfer", _FUNCTIONS, optional=_FUNCTIONS)


disable = _host.disabler(__name__)
