"""TransformerEngine: `fused=True` is jitrope, `fused=False` TransformerEngine's own code, or plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jitrope.integrations import transformer_engine as ours

from .standin import module, rotated

_ROPE = "transformer_engine.pytorch.attention.rope"
_BEFORE = ("transformer_engine.pytorch.attention", "transformer_engine.pytorch.dot_product_attention.rope")


def install(checkout: Path) -> None:
    host = getattr(module(_ROPE), "apply_rotary_pos_emb", plain)

    def apply_rotary_pos_emb(*arguments: Any, fused: bool = False, **words: Any) -> Tensor:
        return (ours.apply_rotary_pos_emb if fused else host)(*arguments, **words)

    names = {"RotaryPositionEmbedding": Embedding, "apply_rotary_pos_emb": apply_rotary_pos_emb}
    names["apply_fused_qkv_rotary_pos_emb"] = ours.apply_fused_qkv_rotary_pos_emb
    for name in (_ROPE, *_BEFORE):
        module(name, **names)


class Embedding(torch.nn.Module):
    """The angles of each position, as TransformerEngine documents them."""

    def __init__(self, dim: int, rotary_percent: float = 1.0, interleaved: bool = False, **_: Any) -> None:
        super().__init__()
        self.dim, self.interleaved = int(dim * rotary_percent), interleaved

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        inverse = 10000 ** (-torch.arange(0, self.dim, 2, device=device) / self.dim)
        angles = (torch.arange(max_seq_len, device=device) + offset)[:, None] * inverse
        angles = angles.repeat_interleave(2, -1) if self.interleaved else torch.cat((angles, angles), -1)
        return angles[:, None, None]


def plain(
    t: Tensor, freqs: Tensor, tensor_format: str = "sbhd", start_positions: Tensor | None = None, interleaved: bool =
    False, cu_seqlens: Tensor | None = None, cp_size: int = 1, cp_rank: int = 0,
) -> Tensor:  # fmt: skip
    """The rotation that TransformerEngine documents, one sequence after another."""
    if tensor_format == "thd":
        assert cu_seqlens is not None
        sequences = t.split((cu_seqlens.diff() // cp_size).tolist())
        starts = [None] * len(sequences) if start_positions is None else start_positions.split(1)
        parts = [
            plain(x.unsqueeze(1), freqs, "sbhd", start, interleaved, None, cp_size, cp_rank).squeeze(1)
            for x, start in zip(sequences, starts)
        ]
        return torch.cat(parts)
    axis = ("sbhd", "bshd").index(tensor_format)
    half = t.shape[axis] // 2
    rows = torch.arange(t.shape[axis], device=t.device)
    if cp_size > 1:
        rows = torch.cat((rows[:half] + cp_rank * half, rows[:half] + (2 * cp_size - 1 - cp_rank) * half))
    rows = rows[None] if start_positions is None else rows + start_positions[:, None]
    angles = freqs[:, 0, 0][rows].unsqueeze(2)  # (1 or B, S, 1, R)
    angles = angles if tensor_format == "bshd" else angles.transpose(0, 1)
    angles = angles[..., ::2] if interleaved else angles[..., : freqs.shape[-1] // 2]
    return rotated(t, angles.cos(), angles.sin(), interleaved)
