"""Calls from flat words, for the sweeps: each name is a field of `Options`, or of a value that users make."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import jitrope

_OF = {
    "packed": ("cu_seqlens", "max_seqlen", "start_positions", "packed_table", "cp_size", "cp_rank"),
    "mrope": ("mrope_section", "mrope_interleaved"),
    "norm": (
        "q_weight",
        "k_weight",
        "q_bias",
        "k_bias",
        "norm_kind",
        "eps",
        "across_heads",
        "zero_centered",
        "after_rope",
        "of",
        "v_norm",
        "norm_rounding",
        "q_mean_square",
        "k_mean_square",
    ),
    "cache": ("k_cache", "v_cache", "slot_mapping", "k_scale", "v_scale", "rotate_k"),
    "pages": (
        *("page_table", "page_indptr", "last_page_len", "seq_lens", "cu_seqlens_q", "batch_indices", "cache_positions"),
        *("clear_page", "errors"),
    ),
}


def said(**flat: Any) -> dict[str, Any]:
    """The words of `apply_rope`, with values in place of their parts. A `launch` is forced until the test's end."""
    if "launch" in flat:
        jitrope.configure(launch=flat.pop("launch"))
    packed = {k: v for k, v in flat.items() if k in _OF["packed"] and not (v is None and k in _OF["packed"][:3])}
    mrope = {k: v for k, v in flat.items() if k in _OF["mrope"]}
    if type(mrope.get("mrope_section", ())) is tuple and not mrope.get("mrope_section"):
        mrope = {}
    words = {
        k: v for k, v in flat.items() if k not in (*_OF["mrope"], *_OF["packed"], "position_ids", "q_factor", "shifts")
    }
    if "q_factor" in flat:  # the word "q_scale" is a tensor of Quantize
        words["q_scale"] = flat["q_factor"]
    ids = flat.get("position_ids")
    if ids is not None:
        made = jitrope.Shifts if flat.get("shifts") else lambda x: x
        words["positions"] = jitrope.Mrope(ids, **mrope) if mrope else made(ids)
    elif "cu_seqlens" in packed:
        words["positions"] = jitrope.Packed(**packed)
    elif packed:
        words["positions"] = jitrope.Starts(**packed)
    return words


def norm_rope(
    q: Tensor, k: Tensor | None, q_weight: Tensor | None = None, k_weight: Tensor | None = None,
    cos: Tensor | None = None, sin: Tensor | None = None, **flat: Any,
) -> Any:  # fmt: skip
    """`prepare_qkv` with a norm: (q, k)."""
    norm, flat = _norm(flat, q_weight, k_weight)
    return jitrope.prepare_qkv(q, k, None, cos, sin, norm=norm, **said(**flat))[:2]


def norm_rope_joint(
    first: Any, second: Any, first_weights: Any = None, second_weights: Any = None, cos: Any = None, sin: Any = None,
    **flat: Any,
) -> Any:  # fmt: skip
    """`prepare_joint_qkv` with the weights of both streams: (q, k, v)."""
    norms = [_norm(flat, *(weights or (None, None))) for weights in (first_weights, second_weights)]
    return jitrope.prepare_joint_qkv(first, second, cos, sin, norm=[norm for norm, _ in norms], **said(**norms[0][1]))


def kv_cache(
    q: Any, k: Any, v: Any, cos: Any = None, sin: Any = None, *, q_scale: Any = None, dtype: Any = torch.float8_e4m3fn,
    **flat: Any,
) -> Any:  # fmt: skip
    """`prepare_qkv` with a cache: q."""
    words = {k: v for k, v in flat.items() if k not in (*_OF["cache"], *_OF["pages"])}
    pages = {k: v for k, v in flat.items() if k in _OF["pages"]}
    flat = {**flat, "slot_mapping": jitrope.Pages(**pages)} if pages else flat
    cache = jitrope.KVCache(**{k: v for k, v in flat.items() if k in _OF["cache"]})
    if q_scale is not None:
        words["quantize"] = jitrope.Quantize(q_scale, dtype=dtype)
    return jitrope.prepare_qkv(q, k, v, cos, sin, cache=cache, **said(**words))[0]


def fp8(
    q: Any, k: Any, cos: Any = None, sin: Any = None, *, q_scale: Any, k_scale: Any = None, hadamard: Any = False,
    dtype: Any = torch.float8_e4m3fn, **flat: Any,
) -> Any:  # fmt: skip
    """`prepare_qkv` with fp8 outputs: (q, k)."""
    quantize = jitrope.Quantize(q_scale, k_scale, dtype=dtype, hadamard=hadamard)
    return jitrope.prepare_qkv(q, k, None, cos, sin, quantize=quantize, **said(**flat))[:2]


def norm_kv_cache(
    q: Any, k: Any, v: Any, q_weight: Any = None, k_weight: Any = None, cos: Any = None, sin: Any = None, **flat: Any
) -> Any:
    """`prepare_qkv` with a norm and a cache: q."""
    norm, flat = _norm(flat, q_weight, k_weight)
    return kv_cache(q, k, v, cos, sin, norm=norm, **flat)


def norm_fp8(
    q: Any, k: Any, q_weight: Any = None, k_weight: Any = None, cos: Any = None, sin: Any = None, **flat: Any
) -> Any:
    """`prepare_qkv` with a norm and fp8 outputs: (q, k)."""
    norm, flat = _norm(flat, q_weight, k_weight)
    return fp8(q, k, cos, sin, norm=norm, **flat)


def norm_scaled(
    q: Any, k: Any, q_weight: Any = None, k_weight: Any = None, cos: Any = None, sin: Any = None, *,
    hadamard: Any = False, dtype: Any = torch.float8_e4m3fn, **flat: Any,
) -> Any:  # fmt: skip
    """`prepare_qkv` with a norm and dynamic scales: (q, k, q's scale, k's scale)."""
    norm, flat = _norm(flat, q_weight, k_weight)
    quantize = jitrope.DynamicQuantize(dtype, hadamard=hadamard)
    found = jitrope.prepare_qkv(q, k, None, cos, sin, norm=norm, quantize=quantize, **said(**flat))[:2]
    return tuple([None if x is None else x[n] for n in range(2) for x in found])


def _norm(
    flat: dict[str, Any], q_weight: Any, k_weight: Any, q_bias: Any = None, k_bias: Any = None
) -> tuple[jitrope.Norm, dict[str, Any]]:
    biases = {name: x for name, x in (("q_bias", q_bias), ("k_bias", k_bias)) if x is not None}
    words = {**{k.removeprefix("norm_"): v for k, v in flat.items() if k in _OF["norm"]}, **biases}
    means = [words.pop(f"{letter}_mean_square", None) for letter in "qk"]
    words |= {"mean_squares": means} if any(x is not None for x in means) else {}
    return jitrope.Norm(q_weight, k_weight, **words), {k: v for k, v in flat.items() if k not in _OF["norm"]}


def rope(q: Any, k: Any, cos: Any = None, sin: Any = None, **flat: Any) -> Any:
    """`apply_rope`."""
    return jitrope.apply_rope(q, k, cos, sin, **said(**flat))


def rope_into(q: Any, k: Any, cos: Any = None, sin: Any = None, *, q_out: Any, k_out: Any, **flat: Any) -> Any:
    """`apply_rope` into tensors of the caller."""
    return jitrope.apply_rope(q, k, cos, sin, out=(q_out, k_out), **said(**flat))


def norm_into(
    q: Any, k: Any, v: Any, q_weight: Any = None, k_weight: Any = None, cos: Any = None, sin: Any = None, *,
    q_out: Any, k_out: Any, v_out: Any, **flat: Any,
) -> Any:  # fmt: skip
    """`prepare_qkv` with a norm into tensors of the caller: (q, k, v)."""
    norm, flat = _norm(flat, q_weight, k_weight)
    return jitrope.prepare_qkv(q, k, v, cos, sin, norm=norm, out=(q_out, k_out, v_out), **said(**flat))


def fused_qkv(qkv: Any, cos: Any = None, sin: Any = None, **flat: Any) -> Any:
    """`prepare_fused_qkv`."""
    return jitrope.prepare_fused_qkv(qkv, cos, sin, **said(**flat))


def fused_qkv_norm(
    qkv: Any, q_weight: Any = None, k_weight: Any = None, cos: Any = None, sin: Any = None, **flat: Any
) -> Any:
    """`prepare_fused_qkv` with a norm."""
    norm, flat = _norm(flat, q_weight, k_weight)
    return jitrope.prepare_fused_qkv(qkv, cos, sin, norm=norm, **said(**flat))


KINDS: dict[str, Callable[..., Any]] = {
    "rope": rope,
    "rope_into": rope_into,
    "norm_into": norm_into,
    "fused_qkv": fused_qkv,
    "fused_qkv_norm": fused_qkv_norm,
    "fp8": fp8,
    "kv_cache": kv_cache,
    "norm_rope": norm_rope,
    "norm_scaled": norm_scaled,
    "norm_rope_joint": norm_rope_joint,
    "norm_fp8": norm_fp8,
    "norm_kv_cache": norm_kv_cache,
}
"""The kinds of calls; a name with "_" at the end is the call in place."""
IN_PLACE = ("rope", "fused_qkv", "fused_qkv_norm", "kv_cache", "norm_rope", "norm_kv_cache")
KINDS |= {f"{name}_": partial(KINDS[name], inplace=True) for name in IN_PLACE}
