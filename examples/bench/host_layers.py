"""The layers of `bench hosts` for libraries that have none of their own: ComfyUI's kernels and DeepSpeed's attention.

ComfyUI itself is no package; its kernels are comfy-kitchen's. Its FLUX.1 calls `apply_rope` after torch's norms of q
and k; later models in it call `rms_rope`. DeepSpeed's `DistributedAttention` (Ulysses) exchanges heads and tokens
between ranks, which is a copy on one rank, then does rope, and calls torch's attention.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .harness import DEVICE, angles, bf16, twice
from .host_models import TRAIN, Chain, Host, Side, enabled, one_rank, random_weights


class SingleBlock(nn.Module):
    """A block of FLUX.1's second half. fused: one function does the norms and rope of q and k."""

    def __init__(self, kernels: Any, heads: int, head_dim: int, fused: bool) -> None:
        super().__init__()
        self.kernels, self.heads, self.fused, width = kernels, heads, fused, heads * head_dim
        self.norm_q, self.norm_k = (nn.RMSNorm(head_dim, eps=1e-6) for _ in range(2))
        self.modulation, self.wide = nn.Linear(width, 3 * width), nn.Linear(width, 7 * width)
        self.narrow = nn.Linear(5 * width, width)

    def forward(self, x: Tensor, vec: Tensor, table: Tensor) -> Tensor:
        """x (1, S, width), vec (1, 1, width), and rotations (1, 1, S, head_dim / 2, 2, 2)."""
        ck, width = self.kernels, x.shape[-1]
        shift, scale, gate = self.modulation(F.silu(vec)).chunk(3, -1)
        qkv, mlp = self.wide(ck.adaln(x, scale, shift, 1e-6)).split((3 * width, 4 * width), -1)
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.fused:
            q, k = ck.rms_rope(q, k, table, self.norm_q.weight, self.norm_k.weight, 1e-6)
        else:
            q, k = ck.apply_rope(self.norm_q(q), self.norm_k(k), table)
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return torch.addcmul(x, gate, self.narrow(torch.cat((out, F.gelu(mlp, approximate="tanh")), -1)))


@contextmanager
def comfy_side(fused: bool, on: bool, smoke: bool) -> Iterator[Side]:
    """Four blocks as wide as FLUX.1's, with 512 tokens of text and 4096 of a picture."""
    import comfy_kitchen as ck

    backend = ck.registry.get_capable_backend("apply_rope")  # stock's
    tokens, heads, head_dim = (6, 2, 16) if smoke else (4608, 24, 128)
    with torch.device(DEVICE):
        model = Chain([SingleBlock(ck, heads, head_dim, fused) for _ in range(4)])
    random_weights(model)
    cos, sin = (f(angles(tokens, head_dim)) for f in (torch.cos, torch.sin))
    table = torch.stack((cos, -sin, sin, cos), -1).unflatten(-1, (2, 2))[None, None]
    words = {"x": bf16(1, tokens, heads * head_dim), "vec": bf16(1, 1, heads * head_dim), "table": table}
    version = f"{importlib.metadata.version('comfy-kitchen')} ({backend})"
    with enabled("comfy_kitchen", on) as calls:

        def counts() -> dict[str, int]:
            """The report does not tell calls with norms from others."""
            found = calls()
            return {"fused" if fused else "jitrope": found.get("jitrope", 0), "host": found.get("host", 0)}

        yield Side(model, words, counts, trained=False, version=version)


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
def deepspeed_side(on: bool, smoke: bool) -> Iterator[Side]:
    """Two layers as large as Llama 3 8B's."""
    *sizes, tokens = (64, 96, 4, 2, 16, 8) if smoke else (4096, 14336, 32, 8, 128, 4096)
    with ulysses() as host, enabled("deepspeed", on) as calls:
        group = torch.distributed.group.WORLD
        with torch.device(DEVICE):
            model = Chain([Layer(host.DistributedAttention(attend, group, 2, 1), *sizes) for _ in range(2)])
        random_weights(model)
        theta = twice(angles(tokens, sizes[-1]))[:, None, None]
        tables = tuple(f(theta).bfloat16() for f in (torch.cos, torch.sin))
        yield Side(model, {"x": bf16(1, tokens, sizes[0]).requires_grad_(), "tables": tables}, calls)


BLOCKS = "denoise, 4608 tokens, 4 blocks"
HOSTS = {
    "deepspeed-train": Host("deepspeed", "Llama 3 8B (Ulysses)", TRAIN, deepspeed_side),
    "comfy-flux": Host("comfy_kitchen", "FLUX.1's blocks", BLOCKS, partial(comfy_side, False)),
    "comfy-fused": Host("comfy_kitchen", "FLUX.1's blocks, rms_rope", BLOCKS, partial(comfy_side, True)),
}
