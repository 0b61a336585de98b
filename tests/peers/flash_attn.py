"""flash-attention: jitrope in the place of its Triton kernel, under its own autograd functions."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

import jitrope

from .standin import module


def install(checkout: Path) -> None:
    import_module("torch._inductor.compile_fx")  # else it would take the stand-in for the real Triton
    module("triton")
    module("flash_attn", checkout / "flash_attn")
    module("flash_attn.ops.triton.rotary", apply_rotary=apply_rotary)


def apply_rotary(
    x: Tensor, cos: Tensor, sin: Tensor, seqlen_offsets: int | Tensor = 0, cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None, interleaved: bool = False, inplace: bool = False, conjugate: bool = False,
) -> Tensor:  # fmt: skip
    starts = seqlen_offsets if isinstance(seqlen_offsets, Tensor) else None
    if starts is None:
        cos, sin = cos[seqlen_offsets:], sin[seqlen_offsets:]
    positions = jitrope.Starts(starts)
    if cu_seqlens is not None:
        positions = jitrope.Packed(cu_seqlens, max_seqlen, start_positions=starts)
    with torch.no_grad():
        return jitrope.apply_rope(
            x, None, cos, sin, positions=positions, interleaved=interleaved, rotary_dim=2 * cos.shape[-1],
            inverse=conjugate, inplace=inplace,
        )[0]  # fmt: skip
