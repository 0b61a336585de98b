"""`bench layer`: a transformer layer's forward and backward on a packed batch, and rope's share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional as F

from jitrope import Packed, apply_rope, prepare_fused_qkv
from jitrope.integrations.transformer_engine import apply_rotary_pos_emb

from . import peers as others
from .harness import DEVICE, Call, angles, bf16, turn_by_turn, twice, usable
from .plots import Plot
from .report import AS_JSON, OUT, PEERS, SMOKE, Rows, app, pairs, show
from .sections import PLAIN, Row, Section, Table, grouped, of, short, span
from .train import Inputs, offsets

HEADS, HEAD_DIM, MLP = 16, 128, 4
SHARE = "rope's share %"
THEIRS, OURS = "TransformerEngine's layer", "TransformerEngine's layer with jitrope"


class Layer(nn.Module):
    """Pre-norm attention and MLP, as GPT's: hidden size 2048, 16 heads of 128, bf16."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads, hidden = heads, heads * HEAD_DIM
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, MLP * hidden), nn.Linear(MLP * hidden, hidden)

    def forward(self, x: Tensor, rope: Call, length: int) -> Any:
        """x (T, hidden), sequences of one length, so that torch's own attention takes them as a batch."""
        q, k, v = rope(self.qkv(self.norms[0](x)).unflatten(-1, (self.heads, -1)))
        q, k, v = (y.unflatten(0, (-1, length)).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def ropes(cu_seqlens: Tensor, tokens: int, with_peers: bool) -> dict[str, Call]:
    """The implementations by name, each from fused QKV (T, H, 3 D) to q, k and v; "none" only splits it."""
    half = angles(tokens, HEAD_DIM)  # as long as the pack, as Megatron passes it
    words: dict[str, Any] = {"freqs": twice(half)[:, None, None], "positions": Packed(cu_seqlens)}

    def split(rotate: Callable[..., Any], qkv: Tensor) -> Any:
        q, k, v = qkv.chunk(3, -1)
        return *rotate(q, k), v

    def fused(qkv: Tensor) -> Any:
        return prepare_fused_qkv(qkv, heads=(qkv.shape[1], qkv.shape[1]), order="grouped", **words)

    def both(one: Call, q: Tensor, k: Tensor) -> Any:
        return one(Inputs(q)), one(Inputs(k))

    found: dict[str, Call] = {
        "none": lambda qkv: qkv.chunk(3, -1),
        "jitrope": partial(split, partial(apply_rope, **words)),
        "jitrope fused QKV": fused,
    }
    if with_peers:
        singles = {label: partial(both, one) for label, one in others.packed(cu_seqlens, tokens, half).items()}
        theirs: dict[str, Any] = {**singles, **others.packed_pairs(cu_seqlens, tokens, half)}
        found |= {label: partial(split, rotate) for label, rotate in theirs.items()}
    return found


def rows(count: int, length: int, heads: int, with_peers: bool) -> Rows:
    """A row for each implementation on a batch of `count` sequences.

    "rope ms" is the time between the projection and attention, forward and backward, on its own: QKV split, q and k
    rotated.
    """
    torch._dynamo.reset()
    layer, tokens = Layer(heads).to(DEVICE, torch.bfloat16), count * length
    x, qkv = bf16(tokens, heads * HEAD_DIM).requires_grad_(), bf16(tokens, heads, 3 * HEAD_DIM).requires_grad_()
    grad, parts = torch.randn_like(x), tuple(bf16(3, tokens, heads, HEAD_DIM))
    found = usable(ropes(offsets(tokens, count), tokens, with_peers), qkv.detach())

    def whole(rope: Call) -> Any:
        return torch.autograd.grad(layer(x, rope, length), (x, *layer.parameters()), grad)

    def alone(rope: Call) -> Any:
        return torch.autograd.grad(rope(qkv), qkv, parts)

    return timed(f"{count} x {length}", found, whole, alone)


def timed(batch: str, ropes: Mapping[str, Call], whole: Callable[[Call], Any], alone: Callable[[Call], Any]) -> Rows:
    """A row for each implementation. whole, alone: run a layer and rope with it."""
    all_us, us = (turn_by_turn({by: partial(run, rope) for by, rope in ropes.items()}) for run in (whole, alone))
    return [
        {
            "batch": batch,
            "rope": by,
            "layer ms": all_us[by] / 1e3,
            "rope ms": us[by] / 1e3,
            SHARE: 100 * us[by] / all_us[by],
        }
        for by in ropes
    ]


def te_rows(count: int, length: int, heads: int) -> Rows:
    """Of TransformerEngine's TransformerLayer, with its rope and with jitrope's in its place, if it is installed.

    "rope ms" is q and k on their own, forward and backward.
    """
    try:
        from transformer_engine.pytorch import TransformerLayer
        from transformer_engine.pytorch.attention import multi_head_attention as host
    except (ImportError, FileNotFoundError):  # the second without its compiled part
        return []
    hidden, tokens, cu_seqlens = heads * HEAD_DIM, count * length, offsets(count * length, count)
    words: dict[str, Any] = {"normalization": "RMSNorm", "hidden_dropout": 0.0, "attention_dropout": 0.0}
    words |= {"self_attn_mask_type": "padding_causal", "attn_input_format": "thd", "params_dtype": torch.bfloat16}
    layer = TransformerLayer(hidden, MLP * hidden, heads, **words)
    freqs = twice(angles(tokens, HEAD_DIM))[:, None, None]
    packed = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens, "max_seqlen_q": length, "max_seqlen_kv": length}
    x, qk = bf16(tokens, hidden).requires_grad_(), [bf16(tokens, heads, HEAD_DIM).requires_grad_() for _ in range(2)]
    grad, grads = torch.randn_like(x), [torch.randn_like(y) for y in qk]

    def whole(rope: Any) -> Any:
        with patch.object(host, "apply_rotary_pos_emb", rope):
            out = layer(x, rotary_pos_emb=freqs, **packed)
        return torch.autograd.grad(out, (x, *layer.parameters()), grad)

    def alone(rope: Any) -> Any:
        rotate = partial(rope, freqs=freqs, tensor_format="thd", fused=True, cu_seqlens=cu_seqlens)
        return torch.autograd.grad([rotate(y) for y in qk], qk, grads)

    ropes = {THEIRS: host.apply_rotary_pos_emb, OURS: apply_rotary_pos_emb}
    found = timed(f"{count} x {length}", ropes, whole, alone)
    return [{**row, "x stock": found[0]["layer ms"] / row["layer ms"]} for row in found]


@app.command("layer")
def command(
    batches: Annotated[str, typer.Option(help="Sequences x length of each batch.")] = "128x512,512x128,1024x64,2401x28",
    peers: PEERS = True,
    smoke: SMOKE = False,
    as_json: AS_JSON = False,
    out: OUT = None,
) -> None:
    """A transformer layer's forward and backward on packed batches (hidden 2048, 16 heads), and rope's share."""
    shapes, heads = pairs("--batches", batches, "x"), HEADS
    if smoke:
        shapes, heads = [(2, 4), (4, 2)], 1
    steps: dict[str, Callable[[], Rows]] = {}
    for n, size in shapes:
        steps[f"{n} x {size}"] = partial(rows, n, size, heads, peers)
        if peers and DEVICE == "cuda":
            steps[f"{n} x {size}, {THEIRS}"] = partial(te_rows, n, size, heads)
    show(steps, smoke, as_json, out, plot)


# ---- in examples/results/README.md -----------------------------------------------------------------------


def alone(row: Row) -> str:
    """Milliseconds, and the share of the layer."""
    return f"{short(row['rope ms'])} ({row[SHARE]:.1f} %)"


def plot(rows: Rows) -> Plot:
    """Time between projection and attention."""
    series = {
        "none": "no rope, only split",
        "jitrope": "jitrope",
        "jitrope fused QKV": "jitrope, fused QKV",
        "torch.compile": "torch.compile",
        "Liger": "Liger",
    }
    share = span((row[SHARE] for row in rows if row["rope"].startswith("jitrope")), 1)
    groups = grouped(rows, lambda row: row["batch"], series, "rope", "rope ms")
    message = f"Between projection and attention jitrope takes {share} % of a layer"
    return Plot(message, "forward + backward, ms", groups, by="sequences x length")


SECTION = Section(
    "Rope in a transformer layer",
    """
    GPU time of a layer's forward and backward on a packed batch (hidden size 2048, 16 heads of 128, MLP x 4), and,
    timed on its own, of all that lies between the projection and attention: QKV split, q and k rotated. In brackets
    is its share of the layer with that implementation. The layer's own time follows the clocks of its matrix
    products, which vary by as much as rope takes. Where TransformerEngine is installed, its TransformerLayer of this
    size is timed too, with its own rope and with jitrope's; there the share is that of rope of q and k.
    """,
    "jitrope bench layer",
    (
        Table(
            "sequences x length",
            lambda row: str(row["batch"]),
            {
                "layer with jitrope, ms": of("layer ms", rope="jitrope"),
                **{
                    f"{head}, ms": of(alone, rope=by)
                    for by, head in {
                        "none": "split, no rope",
                        "jitrope fused QKV": "`prepare_fused_qkv`",
                        "jitrope": "`apply_rope`",
                        "TransformerEngine": "TransformerEngine",
                        "flash-attn": "flash-attn",
                        "Liger": "Liger",
                        **PLAIN,
                    }.items()
                },
            },
        ),
        Table(
            "sequences x length, in TransformerEngine's layer",
            lambda row: str(row["batch"]),
            {
                "layer, ms": of("layer ms", rope=THEIRS),
                SHARE: of(SHARE, rope=THEIRS),
                "with jitrope, ms": of("layer ms", rope=OURS),
                f"{SHARE} with jitrope": of(SHARE, rope=OURS),
                "times as fast": of("x stock", rope=OURS),
            },
        ),
    ),
    plot,
)
