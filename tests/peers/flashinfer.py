"""FlashInfer: its rope functions, replaced by jitrope's public ones."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import jitrope
from jitrope import tables
from jitrope.integrations import sglang
from tests.said import fp8

from .standin import module


def install(checkout: Path) -> None:
    names: dict[str, Any] = {"apply_rope_with_cos_sin_cache_inplace": sglang.apply_rope_with_cos_sin_cache_inplace}
    for llama31 in (False, True):
        for in_place in (False, True):
            name, end = "apply_llama31_rope" if llama31 else "apply_rope", "_inplace" if in_place else ""
            names[f"{name}{end}"] = partial(_by_offsets, in_place, llama31)
            names[f"{name}_pos_ids{end}"] = partial(_by_positions, in_place, llama31)
    quantize = {"rope_quantize_fp8": rope_quantize_fp8, "mla_rope_quantize_fp8": rope_quantize_fp8}
    module("flashinfer", **names)
    module("flashinfer.rope", **names, **quantize)


def _by_offsets(
    in_place: bool, llama31: bool, q: Tensor, k: Tensor, indptr: Tensor, offsets: Tensor, **words: Any,
) -> Any:  # fmt: skip
    longest = int((indptr.diff() + offsets).max())
    return _rotate(in_place, llama31, q, k, longest, jitrope.Packed(indptr, start_positions=offsets), **words)


def _by_positions(in_place: bool, llama31: bool, q: Tensor, k: Tensor, pos_ids: Tensor, **words: Any) -> Any:
    return _rotate(in_place, llama31, q, k, int(pos_ids.max()) + 1, pos_ids, **words)


def _rotate(
    in_place: bool, llama31: bool, q: Tensor, k: Tensor, rows: int, positions: Any, rotary_dim: int | None =
    None, interleave: bool = False, rope_theta: float = 1e4,
) -> Any:  # fmt: skip
    extended = {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192
    }  # fmt: skip
    frequencies, _ = tables.inv_freq(
        "llama3" if llama31 else "default", rotary_dim=rotary_dim or q.shape[-1], theta=rope_theta, device=q.device,
        **(extended if llama31 else {}),
    )  # fmt: skip
    angles = torch.arange(rows, device=q.device, dtype=torch.float32)[:, None] * frequencies
    words: Any = {"layout": "thd", "interleaved": interleave, "rotary_dim": rotary_dim, "inplace": in_place}
    return jitrope.apply_rope(q, k, freqs=angles, positions=positions, **words)


def rope_quantize_fp8(
    q_rope: Tensor, k_rope: Tensor, q_nope: Tensor | None, k_nope: Tensor | None, cos_sin_cache: Tensor, pos_ids:
    Tensor, is_neox: bool = True, *, q_rope_out: Tensor, k_rope_out: Tensor, q_nope_out: Tensor | None = None,
    k_nope_out: Tensor | None = None, quant_scale_q: float = 1.0, quant_scale_kv: float = 1.0, **ignored: Any,
) -> None:  # fmt: skip
    """jitrope rotates; the other parts are only scaled and rounded, in plain torch."""
    k_heads = k_rope if k_rope.dim() == 3 else k_rope.unsqueeze(1)
    q, k = fp8(
        q_rope,
        k_heads,
        dtype=q_rope_out.dtype,
        q_scale=1 / quant_scale_q,
        k_scale=1 / quant_scale_kv,
        cos_sin_cache=cos_sin_cache,
        position_ids=pos_ids,
        layout="thd",
        interleaved=not is_neox,
    )
    q_rope_out.copy_(q)
    k_rope_out.copy_(k.view(k_rope.shape))
    for out, x, scale in ((q_nope_out, q_nope, quant_scale_q), (k_nope_out, k_nope, quant_scale_kv)):
        if out is not None and x is not None:
            largest = torch.finfo(out.dtype).max
            out.copy_((x.float() * scale).clamp(-largest, largest).to(out.dtype))
