"""Layers of the package that `bundle.write_hub` writes: a host's layer takes their `forward`."""

from typing import Any

from torch import Tensor, nn

from ..api import apply_rope


class apply_rotary_transformers(nn.Module):
    """The layer `rotary_pos_emb` of transformers, which calls it by this name: its `apply_rotary_pos_emb`.

    Results are rounded once, so in bf16 and fp16 they may differ from transformers' in the last bits. The gradient is a
    launch too.
    """

    can_torch_compile = True

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        """Rotate q and k (B, H, S, D), or with unsqueeze_dim=2 (B, S, H, D); cos and sin are (B or 1, S, D)."""
        return apply_rope(q, k, cos, sin, layout="bshd" if unsqueeze_dim == 2 else "bhsd")
