"""Bias of a projection: y = x + bias, in x's dtype, as torch's Linear adds it."""

from __future__ import annotations

from torch import Tensor

from ..plan.options import Options
from ..plan.views import Tensors, bias_like, fused_part


def forward(letter: str, x: Tensor, t: Tensors, o: Options) -> Tensor:
    """One part of the projection's output, (..., heads, head_dim), plus its part of the bias."""
    return x + fused_part(bias_like(t["bias"], t["qkv"]), letter, o) if "bias" in t else x


def back(grad: Tensor, bias: Tensor) -> Tensor:
    """The gradient of the bias: that of the projection's output, summed over the tokens."""
    return grad.flatten(0, -3).sum(0).view(bias.shape)
