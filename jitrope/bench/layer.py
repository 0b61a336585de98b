"""`jitrope bench layer`: a transformer layer's forward and backward on a packed batch, and rope's share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import apply_rope, apply_rope_qkv
from . import peers as others
from .thd import Progress, angles, offsets
from .timing import turn_by_turn

HEADS, HEAD_DIM, MLP = 16, 128, 4
Rope = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
"""(T, H, 3 D) -> q, k, v, each (T, H, D)."""


class Layer(nn.Module):
    """Pre-norm attention and MLP, as GPT's: hidden size 2048, 16 heads of 128, bf16."""

    def __init__(self) -> None:
        super().__init__()
        hidden = HEADS * HEAD_DIM
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, MLP * hidden), nn.Linear(MLP * hidden, hidden)

    def forward(self, x: Tensor, rope: Rope, length: int) -> Tensor:
        """x (T, hidden), sequences of one length, so that torch's own attention takes them as a batch."""
        q, k, v = rope(self.qkv(self.norms[0](x)).unflatten(-1, (HEADS, -1)))
        q, k, v = (y.unflatten(0, (-1, length)).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        y = self.down(F.gelu(self.up(self.norms[1](x))))
        return x + y  # type: ignore[no-any-return]


def ropes(cu_seqlens: Tensor, rows: int, with_peers: bool) -> dict[str, Rope]:
    """The implementations by name, each from packed QKV; "none" only splits it."""
    half = angles(rows, HEAD_DIM)
    freqs = torch.cat((half, half), -1)[:, None, None]

    def split(qkv: Tensor) -> Any:
        return qkv.chunk(3, -1)

    def pair(qkv: Tensor) -> Any:
        q, k, v = split(qkv)
        return *apply_rope(q, k, freqs=freqs, layout="thd", cu_seqlens=cu_seqlens), v

    def of(one: Callable[[Tensor], Tensor]) -> Rope:
        def rope(qkv: Tensor) -> Any:
            q, k, v = split(qkv)
            return one(q), one(k), v

        return rope

    def both(pair: others.Pair) -> Rope:
        def rope(qkv: Tensor) -> Any:
            q, k, v = split(qkv)
            return *pair(q, k), v

        return rope

    found: dict[str, Rope] = {
        "none": split,
        "jitrope": pair,
        "jitrope packed QKV": lambda qkv: apply_rope_qkv(qkv, freqs=freqs, layout="thd", cu_seqlens=cu_seqlens),
    }
    if with_peers:
        found |= {label: of(one) for label, one in others.packed(cu_seqlens, rows, half).items()}
        found |= {label: both(pair) for label, pair in others.packed_pairs(cu_seqlens, rows, half).items()}
    return found


def run(
    shapes: Sequence[tuple[int, ...]], with_peers: bool, progress: Progress = lambda text: None
) -> list[dict[str, Any]]:
    """A row for each batch, as sequences x length, and implementation.

    "rope ms" is what lies between the projection and attention, forward and backward, on its own:
    QKV split, q and k rotated.
    """
    torch.manual_seed(0)
    layer = Layer().to("cuda", torch.bfloat16)
    rows = []
    for count, length in shapes:
        progress(f"{count} x {length}")
        tokens = count * length
        x = torch.randn(tokens, HEADS * HEAD_DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        grad = torch.randn_like(x)
        # The table is as long as the pack, as Megatron passes it: what made launches grow with the sequences.
        candidates = ropes(offsets(tokens, count, False), tokens, with_peers)

        def step(rope: Rope, x: Tensor = x, grad: Tensor = grad, length: int = length) -> Any:
            return torch.autograd.grad(layer(x, rope, length), (x, *layer.parameters()), grad)

        qkv = torch.randn(tokens, HEADS, 3 * HEAD_DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        candidates = others.usable(candidates, qkv.detach())
        parts = tuple(torch.randn(3, tokens, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16))

        def alone(rope: Rope, qkv: Tensor = qkv, parts: tuple[Tensor, ...] = parts) -> Any:
            return torch.autograd.grad(rope(qkv), qkv, parts)

        whole = turn_by_turn({label: lambda rope=rope: step(rope) for label, rope in candidates.items()})  # type: ignore[misc]
        part = turn_by_turn({label: lambda rope=rope: alone(rope) for label, rope in candidates.items()})  # type: ignore[misc]
        for label in candidates:
            rows.append({
                "batch": f"{count} x {length}", "rope": label, "layer ms": whole[label] / 1e3,
                "rope ms": part[label] / 1e3, "rope's share %": 100 * part[label] / whole[label],
            })  # fmt: skip
    return rows


def plot(rows: list[dict[str, Any]], title: str, path: str) -> None:
    """Rope's share of the layer over the batches, a line for each implementation."""
    from .report import figure

    figure(rows, "batch", "rope's share %", "rope", title, "sequences x length", "rope's share of the layer, %", path)
