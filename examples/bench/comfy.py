"""The blocks of `bench hosts` that call comfy-kitchen."""

from __future__ import annotations

from typing import Any

import comfy_kitchen
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """A single block of FLUX.1, as ComfyUI computes it, without its modulation by the time step."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads, width = heads, 128 * heads
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.linear1, self.linear2 = nn.Linear(width, 7 * width), nn.Linear(5 * width, width)
        self.q_scale, self.k_scale = (nn.Parameter(torch.ones(128)) for _ in range(2))

    def forward(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        """x (B, S, 128 heads)."""
        width = x.shape[-1]
        qkv, hidden = self.linear1(self.norm(x)).split((3 * width, 4 * width), -1)
        q, k, v = qkv.unflatten(-1, (3, self.heads, 128)).permute(2, 0, 3, 1, 4)
        q, k = comfy_kitchen.rms_rope(q, k, freqs_cis, self.q_scale, self.k_scale)
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        change: Tensor = self.linear2(torch.cat((out, F.gelu(hidden, approximate="tanh")), -1))
        return x + change


class EagerBackend(nn.Module):
    """A model with comfy-kitchen's backend in torch, which ComfyUI uses below CUDA 13."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **words: Any) -> Tensor:
        """The model's result."""
        with comfy_kitchen.use_backend("eager"):
            out: Tensor = self.model(**words)
        return out

    def compile(self, **words: Any) -> None:
        """Compile the model within."""
        self.model.compile(**words)
