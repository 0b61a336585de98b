"""The models of `bench hosts` with ComfyUI's kernels, which are comfy-kitchen's.

ComfyUI itself is no package, so the blocks are written here. Its FLUX.1 calls `apply_rope` after torch's norms of q and
k; later models in it call `rms_rope`. Both sides are one model, under two backends of the registry.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .harness import DEVICE, angles, bf16
from .host_models import Chain, Host, Pair, Side, counts, random_weights


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


class Under(nn.Module):
    """A model under a backend of the registry, which each call of an operator looks up, in a compiled model too."""

    def __init__(self, registry: Any, backend: str, model: nn.Module) -> None:
        super().__init__()
        self.registry, self.backend, self.model = registry, backend, model

    def forward(self, **words: Any) -> Any:
        """The model's."""
        with self.registry.use_backend(self.backend):
            return self.model(**words)

    def compile(self, *_: Any, **words: Any) -> None:
        """Compile the model alone, because a graph would not keep the choice of a backend."""
        self.model.compile(**words)


@contextmanager
def comfy_pair(fused: bool, smoke: bool) -> Iterator[Pair]:
    """Four blocks as wide as FLUX.1's, with 512 tokens of text and 4096 of a picture; both sides are one model."""
    import comfy_kitchen as ck

    from jitrope.integrations import comfy_kitchen as integration

    backend = ck.registry.get_capable_backend("apply_rope")
    tokens, heads, head_dim = (6, 2, 16) if smoke else (4608, 24, 128)
    with torch.device(DEVICE):
        model = Chain([SingleBlock(ck, heads, head_dim, fused) for _ in range(4)])
    random_weights(model)
    cos, sin = (f(angles(tokens, head_dim)) for f in (torch.cos, torch.sin))
    table = torch.stack((cos, -sin, sin, cos), -1).unflatten(-1, (2, 2))[None, None]
    words = {"x": bf16(1, tokens, heads * head_dim), "vec": bf16(1, 1, heads * head_dim), "table": table}
    version = f"{importlib.metadata.version('comfy-kitchen')} ({backend})"
    with integration.enable() as report:
        stock, ours = (Side(Under(ck.registry, by, model), words) for by in (backend, integration.BACKEND))
        yield Pair(stock, ours, partial(counts, report, fused), trained=False, version=version)


STEP = "denoise, 4608 tokens, 4 blocks"
HOSTS = {
    "comfy-flux": Host("comfy_kitchen", "FLUX.1's blocks", STEP, partial(comfy_pair, False)),
    "comfy-fused": Host("comfy_kitchen", "FLUX.1's blocks, rms_rope", STEP, partial(comfy_pair, True)),
}
