"""The layers of `bench hosts` with DeepSpeed's attention for sequence parallelism (Ulysses), on one rank.

DeepSpeed has no layers of a model, so they are written here. Its `DistributedAttention` exchanges heads and tokens
between ranks, which is a copy on one rank, then does rope, and calls torch's attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .harness import DEVICE, angles, bf16, twice
from .host_models import Chain, Host, Pair, Side, keeping, one_rank, random_weights, share


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of q, k, v (B, S, H, D)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


class Layer(nn.Module):
    """A decoder layer. attention: of q, k, v (1, S, H, D)."""

    def __init__(self, attention: nn.Module, width: int, wide: int, heads: int, groups: int, head_dim: int) -> None:
        super().__init__()
        self.attention, self.heads, self.head_dim = attention, (heads, groups, groups), head_dim
        self.qkv = nn.Linear(width, (heads + 2 * groups) * head_dim, bias=False)
        self.out, self.down = (nn.Linear(n, width, bias=False) for n in (heads * head_dim, wide))
        self.up = nn.Linear(width, 2 * wide, bias=False)
        self.before, self.after = (nn.RMSNorm(width, eps=1e-5) for _ in range(2))

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """x (1, S, width), and a cosine and a sine (S, 1, 1, D)."""
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (-1, self.head_dim)).split(self.heads, 2)
        x = x + self.out(self.attention(q, k, v, 0, rotary_pos_emb=tables).flatten(2))
        gate, up = self.up(self.after(x)).chunk(2, -1)
        out: Tensor = x + self.down(F.silu(gate) * up)
        return out


@contextmanager
def ulysses() -> Iterator[Any]:
    """DeepSpeed's module of this attention, with a group of this process alone."""
    import deepspeed
    from deepspeed.sequence import layer

    # torch 2.11 would trace the exchange, and give it a gradient of zero.
    exchange = SimpleNamespace(apply=torch.compiler.disable(layer._SeqAllToAll.apply))
    # One rank needs no sums in shared memory, which DeepSpeed would build on a CPU.
    ops = patch.dict(vars(deepspeed.ops), {"__compatible_ops__": {}})
    with one_rank(), ops, patch.object(layer, "_SeqAllToAll", exchange):
        deepspeed.comm.init_distributed("nccl" if DEVICE == "cuda" else "gloo", auto_mpi_discovery=False)
        yield layer


@contextmanager
def pair(smoke: bool) -> Iterator[Pair]:
    """Two layers as large as Llama 3 8B's."""
    from jitrope.integrations import deepspeed as integration

    *sizes, tokens = (64, 96, 4, 2, 16, 8) if smoke else (4096, 14336, 32, 8, 128, 4096)
    with ulysses() as host:
        cls, group = host.DistributedAttention, torch.distributed.group.WORLD
        kept = keeping(cls, apply_rotary_pos_emb=host.apply_rotary_pos_emb)
        with torch.device(DEVICE):
            stock, ours = (Chain([Layer(made(attend, group, 2, 1), *sizes) for _ in range(2)]) for made in (kept, cls))
        random_weights(stock)
        share(ours, stock)
        theta = twice(angles(tokens, sizes[-1]))[:, None, None]
        tables = tuple(f(theta).bfloat16() for f in (torch.cos, torch.sin))
        words = {"x": bf16(1, tokens, sizes[0]).requires_grad_(), "tables": tables}
        with integration.enable() as report:
            yield Pair(Side(stock, words), Side(ours, words), lambda: report.calls)


HOSTS = {"deepspeed-train": Host("deepspeed", "Llama 3 8B (Ulysses)", "train, 4096 tokens, 2 layers", pair)}
