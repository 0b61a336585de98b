"""Tensors in place of missing ones. Each is made once."""

from __future__ import annotations

import torch
from torch import Tensor

from ..plan.problem import constant
from ..plan.spec import LAYOUT_AXES, Options, norm_of
from ..plan.views import Tensors


def weights_of_one(tensors: Tensors, options: Options) -> Tensors:
    """Ones for missing weights if some are given, because a kernel takes all weights or none."""
    norm, ones = norm_of(options), {}
    given = [x for name, x in tensors.items() if name.endswith("_weight")]
    names = {"q": "q_weight", "k": "k_weight", "first_q": "q_weight", "first_k": "k_weight"}
    names |= {"second_q": "second_q_weight", "second_k": "second_k_weight"}
    for head, name in names.items() if given else ():
        x = tensors.get(head)
        if x is not None and name not in tensors:
            heads = x.shape[LAYOUT_AXES[options.layout][2]] if norm.across_heads else 1
            ones[name] = _ones(x.device, x.shape[-1] * heads, given[0].dtype, norm.zero_centered)
    return ones


@constant
def one_row(device: torch.device, pairs: int) -> tuple[Tensor, Tensor]:
    """Cosines of one and sines of zero."""
    return torch.ones(1, pairs, device=device), torch.zeros(1, pairs, device=device)


@constant
def _ones(device: torch.device, count: int, dtype: torch.dtype, zero_centered: bool) -> Tensor:
    return torch.full((count,), 0 if zero_centered else 1, dtype=dtype, device=device)
