"""Liger: the functions that it puts into models, and the autograd functions below them, replaced by jitrope's."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import jitrope
from jitrope.integrations import transformers as ours

from .standin import module


def install(checkout: Path) -> None:
    sys.path.insert(0, str(checkout))  # its tests import `test.utils`, and Python has a package `test` too
    module("liger_kernel", checkout / "src" / "liger_kernel")
    functions = {"LigerRopeFunction": rope, "LigerQwen2VLMRopeFunction": mrope, "LigerLlama4RopeFunction": llama4}
    module("liger_kernel.ops", **{name: SimpleNamespace(apply=function) for name, function in functions.items()})
    module("liger_kernel.transformers.functional", liger_rope=rope, liger_qwen2vl_mrope=mrope)
    module("liger_kernel.transformers.rope", liger_rotary_pos_emb=rope, liger_rotary_pos_emb_gpt_oss=gpt_oss)
    module("liger_kernel.transformers.qwen2vl_mrope", liger_multimodal_rotary_pos_emb=mrope)
    module("liger_kernel.transformers.llama4_rope", liger_llama4_text_rotary_pos_emb=llama4)


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> Any:  # fmt: skip
    cos, sin = (x if x.dim() == 3 else x[None] for x in (cos, sin))
    return jitrope.apply_rope(q, k, cos, sin, layout="bhsd", rotary_dim=rotary_dim or cos.shape[-1])


def gpt_oss(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return rope(q, k, cos, sin, rotary_dim=q.shape[-1])


def mrope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: list[int], unsqueeze_dim: int = 1) -> Any:
    parts = [table.split(mrope_section * 2, -1) for table in (cos, sin)]
    cos, sin = (torch.cat([part[i % 3] for i, part in enumerate(each)], -1) for each in parts)
    return ours.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)


def llama4(xq: Tensor, xk: Tensor, freqs_cis: Tensor, *_: Any) -> Any:
    return jitrope.apply_rope(xq, xk, freqs_cis=freqs_cis, interleaved=True)
