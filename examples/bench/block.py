"""`bench block`: a training step of a block as large as Qwen3-8B's, and the share of its q and k norms and rope."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jitrope import Norm, prepare_qkv

from . import peers as others
from .harness import DEVICE, angles, bf16, turn_by_turn
from .plots import Plot
from .report import AS_JSON, SMOKE, Rows, app, show
from .sections import Row, Section, Table, grouped, of, short

SIZES = (2, 4096, 32, 8, 128, 12288)
"""B, S, heads of q, heads of k, elements of a head, width of the MLP."""
SMALL = (1, 4, 2, 1, 64, 64)
EPS = 1e-6
SHARE = "share %"


def plain(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Norm and rope in plain torch: torch's RMSNorm, then halves."""
    cos, sin = cos[None, :, None], sin[None, :, None]
    q, k = (
        others.rotate(F.rms_norm(x, x.shape[-1:], w, EPS), cos, sin, False) for x, w in ((q, q_weight), (k, k_weight))
    )
    return q, k


def ours(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """The same in one launch, and one backward."""
    return prepare_qkv(q, k, None, cos, sin, norm=Norm(q_weight, k_weight, eps=EPS, rounding="once"))[:2]


def none(q: Tensor, k: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    """Neither norm nor rope."""
    return q, k


Between = Callable[..., Any]
BETWEEN: dict[str, Between] = {"none": none, "torch": plain, "jitrope": ours}


class Block(nn.Module):
    """Pre-norm attention and a gated MLP, as Qwen3's; bf16."""

    def __init__(self, heads: int, kv_heads: int, dim: int, mlp: int) -> None:
        super().__init__()
        hidden = heads * dim
        self.heads = (heads, kv_heads, kv_heads)
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))
        self.weights = nn.ParameterList(torch.ones(dim) for _ in range(2))
        self.qkv, self.out = nn.Linear(hidden, sum(self.heads) * dim, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, 2 * mlp, bias=False), nn.Linear(mlp, hidden, bias=False)

    def forward(self, x: Tensor, between: Between, cos: Tensor, sin: Tensor) -> Tensor:
        """x (B, S, hidden)."""
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (sum(self.heads), -1)).split(self.heads, 2)
        q, k = between(q, k, *self.weights, cos, sin)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        gate, up = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)  # type: ignore[no-any-return]


def rows(compiled: bool, sizes: tuple[int, ...]) -> Rows:
    """A row for each implementation. "between ms" is the norms and rope, forward and backward, on their own."""
    torch._dynamo.reset()
    b, s, heads, kv_heads, dim, mlp = sizes
    block = Block(heads, kv_heads, dim, mlp).to(DEVICE, torch.bfloat16)
    x, angle = bf16(b, s, heads * dim).requires_grad_(), angles(s, dim)
    q, k = (bf16(b, s, n, dim).requires_grad_() for n in (heads, kv_heads))
    cos, sin, grad, grads = angle.cos(), angle.sin(), bf16(*x.shape), (bf16(*q.shape), bf16(*k.shape))
    matrices = (x, *(y for y in block.parameters() if y.dim() > 1))
    inputs = (q, k, *block.weights, cos, sin)
    for got, want in zip(ours(*inputs), plain(*inputs)):
        torch.testing.assert_close(got, want, rtol=2**-6, atol=2**-5)

    def build(call: Any) -> Any:
        return torch.compile(call) if compiled else call

    def whole(forward: Between, weights: Sequence[Tensor]) -> Any:
        return torch.autograd.grad(forward(x), (*matrices, *weights), grad)

    def alone(between: Between) -> Any:
        return torch.autograd.grad(between(*inputs), inputs[:4], grads)

    calls = {by: partial(build(block), between=call, cos=cos, sin=sin) for by, call in BETWEEN.items()}
    step = {by: partial(whole, call, [] if by == "none" else [*block.weights]) for by, call in calls.items()}
    part = {by: partial(alone, build(call)) for by, call in BETWEEN.items() if by != "none"}
    all_us, us = turn_by_turn(step), turn_by_turn(part)
    return [
        {
            "block": "compiled" if compiled else "eager",
            "by": by,
            "block ms": all_us[by] / 1e3,
            "between ms": us[by] / 1e3 if by in us else None,
            SHARE: 100 * us[by] / all_us[by] if by in us else None,
        }
        for by in BETWEEN
    ]


@app.command("block")
def command(smoke: SMOKE = False, as_json: AS_JSON = False) -> None:
    """A training step of a Qwen3-8B-sized block, eager and compiled, and the share of its q and k norms and rope."""
    sizes = SMALL if smoke else SIZES
    show({name: partial(rows, name == "compiled", sizes) for name in ("eager", "compiled")}, smoke, as_json)


# ---- in examples/results/README.md -----------------------------------------------------------------------


def between(row: Row) -> str:
    """Milliseconds, and the share of the block; nothing for a block without norms and rope."""
    return f"{short(row['between ms'])} ({row[SHARE]:.1f} %)" if row["between ms"] is not None else ""


def plot(rows: Rows) -> Plot:
    """Time of the norms and rope."""
    shown = [row for row in rows if row["between ms"] is not None]
    groups = grouped(shown, lambda row: row["block"], {"torch": "torch", "jitrope": "jitrope"}, "by", "between ms")
    shares = " and ".join(f"{row[SHARE]:.1f} %" for row in shown if row["by"] == "jitrope")
    return Plot(f"Norms of q and k, and rope: {shares} of a block with jitrope", "forward + backward, ms", groups)


SECTION = Section(
    "Norms and rope in a training step",
    """
    GPU time of the forward and backward of a block as large as Qwen3-8B's (2 x 4096 tokens, hidden size 4096, 32 heads
    of q and 8 of k, heads of 128, a gated MLP of 12,288, random weights), eager and compiled as a whole, and, timed on
    its own, of the norms of q and k and rope. In brackets is its share of the block. "none" has neither norm nor rope.
    """,
    "jitrope bench block",
    (
        Table(
            "block",
            lambda row: str(row["block"]),
            {
                **{f"whole, {by}, ms": of("block ms", by=by) for by in BETWEEN},
                **{f"norms and rope, {by}, ms": of(between, by=by) for by in BETWEEN},
            },
        ),
    ),
    plot,
)
