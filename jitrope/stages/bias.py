"""Bias of a projection: y = x + bias, in x's dtype, as torch's Linear adds it."""

from __future__ import annotations

from dataclasses import field

from torch import Tensor

from ..base import layouts
from ..base.views import Tensors, bias_like, fused_part

TENSORS = ("bias",)
_ADDED = "q_added k_added v_added"
ARGUMENTS = {
    "added_bias": (f"const T* added: {_ADDED}", f"Strides added_stride: {_ADDED}"),
    "gated": ("void* gate_out", ""),
}


class Fields:
    """Constants of a kernel."""

    added_bias: bool = field(metadata={"given": "bias"})  # it is added first
    gated: bool  # behind each head of q lies its gate, which is copied


def forward(letter: str, x: Tensor, t: Tensors, o: layouts.Words) -> Tensor:
    """One part of the projection's output, (..., heads, head_dim), plus its part of the bias."""
    return x + fused_part(bias_like(t["bias"], t["qkv"]), letter, o) if "bias" in t else x


def back(grad: Tensor, bias: Tensor) -> Tensor:
    """The gradient of the bias: that of the projection's output, summed over the tokens."""
    return grad.flatten(0, -3).sum(0).view(bias.shape)
