"""`bench block`: forward and backward of a block as large as Qwen3-8B's, and the share of q and k norms and rope."""

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
        q, k = between(q, k, self.weights[0], self.weights[1], cos, sin)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        gate, up = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)  # type: ignore[no-any-return]


def rows(compiled: bool, sizes: tuple[int, ...]) -> Rows:
    """A row for each implementation.

    "added ms" is the block's time less that of a block without norms and rope; "alone ms" is the time of norms and
    rope on their own, of contiguous q and k.
    """
    torch._dynamo.reset()
    b, s, heads, kv_heads, dim, mlp = sizes
    block = Block(heads, kv_heads, dim, mlp).to(DEVICE, torch.bfloat16)
    x, angle = bf16(b, s, heads * dim).requires_grad_(), angles(s, dim)
    q, k = (bf16(b, s, n, dim).requires_grad_() for n in (heads, kv_heads))
    cos, sin, grad, grads = angle.cos(), angle.sin(), bf16(*x.shape), (bf16(*q.shape), bf16(*k.shape))
    trained = (x, *(y for name, y in block.named_parameters() if not name.startswith("weights")))
    inputs = (q, k, *block.weights, cos, sin)

    def build(call: Any) -> Any:
        return others.compiled(call) if compiled else call

    def whole(forward: Between, weights: Sequence[Tensor]) -> Any:
        return torch.autograd.grad(forward(x), (*trained, *weights), grad)

    def alone(between: Between) -> Any:
        return torch.autograd.grad(between(*inputs), inputs[:4], grads)

    for got, want in zip((*ours(*inputs), *alone(ours)), (*plain(*inputs), *alone(plain))):
        assert (got - want).float().norm() <= 2**-6 * want.float().norm(), "results differ from plain torch's"
    calls = {by: partial(build(block), between=call, cos=cos, sin=sin) for by, call in BETWEEN.items()}
    step = {by: partial(whole, call, [] if by == "none" else [*block.weights]) for by, call in calls.items()}
    part = {by: partial(alone, build(call)) for by, call in BETWEEN.items() if by != "none"}
    whole_us, part_us = turn_by_turn(step), turn_by_turn(part)
    return [
        {
            "block": "compiled" if compiled else "eager",
            "by": by,
            "block ms": whole_us[by] / 1e3,
            "added ms": (whole_us[by] - whole_us["none"]) / 1e3 if by in part else None,
            "alone ms": part_us[by] / 1e3 if by in part else None,
            SHARE: 100 * part_us[by] / whole_us[by] if by in part else None,
        }
        for by in BETWEEN
    ]


@app.command("block")
def command(smoke: SMOKE = False, as_json: AS_JSON = False) -> None:
    """Forward and backward of a Qwen3-8B-sized block, eager and compiled, and the share of q and k norms and rope."""
    sizes = SMALL if smoke else SIZES
    show({name: partial(rows, name == "compiled", sizes) for name in ("eager", "compiled")}, smoke, as_json)


# ---- in examples/results/README.md -----------------------------------------------------------------------


def with_share(row: Row) -> str:
    """Milliseconds, and the share of the block."""
    return f"{short(row['alone ms'])} ({row[SHARE]:.1f} %)"


def plot(rows: Rows) -> Plot:
    """Time of the norms and rope."""
    shown = [row for row in rows if row["by"] != "none"]
    groups = grouped(shown, lambda row: row["block"], {"torch": "torch", "jitrope": "jitrope"}, "by", "alone ms")
    shares = " and ".join(f"{row[SHARE]:.1f} % ({row['block']})" for row in shown if row["by"] == "jitrope")
    return Plot(f"q and k norms and rope: {shares} of a block", "forward + backward, ms", groups)


SECTION = Section(
    "Norms and rope in a transformer block",
    """
    GPU time of the forward and backward of a block as large as Qwen3-8B's: 2 x 4096 tokens, hidden size 4096, 32 heads
    of q and 8 of k, heads of 128, a gated MLP of 12,288, random weights. The block is eager or compiled as a whole.
    "none" has neither norms of q and k nor rope; "torch" is torch's RMSNorm and a rotation in fp32, rounded once.
    "added" is a block's time less that of "none". Norms and rope are also timed on their own, with contiguous q and k;
    the number in brackets is their share of the block.
    """,
    "jitrope bench block",
    (
        Table(
            "block",
            lambda row: str(row["block"]),
            {
                **{f"whole, {by}, ms": of("block ms", by=by) for by in BETWEEN},
                **{f"added, {by}, ms": of("added ms", by=by) for by in BETWEEN if by != "none"},
                **{f"alone, {by}, ms": of(with_share, by=by) for by in BETWEEN if by != "none"},
            },
        ),
    ),
    plot,
)
