"""Other implementations of the same rotation, as far as they are installed. Imported inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
Rotate = Callable[[Tensor, Tensor, Tensor, Tensor], Any]
"""(q, k, cos, sin) with (B, S, H, D) activations and half-width fp32 tables."""


def available(interleaved: bool, sets: Sequence[Inputs]) -> Iterator[tuple[str, Rotate]]:
    """(name, call) of each peer that does this pairing here, for calls with these `sets` of inputs."""
    yield "torch eager", _eager(interleaved)
    # One compiled function a shape, as a model would have; the bench's shapes are not dynamic.
    torch._dynamo.reset()
    yield "torch.compile", torch.compile(_eager(interleaved), dynamic=False)
    for make in (_flash_attn, _liger, _torchembed):
        try:
            peer = make(interleaved, sets)
        except ImportError:
            continue
        if peer is not None:
            yield peer


def _eager(interleaved: bool) -> Rotate:
    def one(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos[None, :, None], sin[None, :, None]
        if interleaved:
            x0, x1 = x.float().unflatten(-1, (-1, 2)).unbind(-1)
            return torch.stack((x0 * cos - x1 * sin, x1 * cos + x0 * sin), -1).flatten(-2).to(x.dtype)
        x0, x1 = x.float().chunk(2, -1)
        return torch.cat((x0 * cos - x1 * sin, x1 * cos + x0 * sin), -1).to(x.dtype)

    return lambda q, k, cos, sin: (one(q, cos, sin), one(k, cos, sin))


def _flash_attn(interleaved: bool, sets: Sequence[Inputs]) -> tuple[str, Rotate]:
    from flash_attn.ops.triton.rotary import apply_rotary

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return tuple(apply_rotary(x, cos, sin, interleaved=interleaved, inplace=True) for x in (q, k))

    return "flash-attn", rotate


def _liger(interleaved: bool, sets: Sequence[Inputs]) -> tuple[str, Rotate] | None:
    if interleaved:
        return None
    from liger_kernel.transformers import liger_rotary_pos_emb

    # Its own format of the tables, made outside the timing.
    tables = {id(cos): [torch.cat((t, t), -1)[None] for t in (cos, sin)] for _, _, cos, sin in sets}

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return liger_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), *tables[id(cos)])

    return "Liger (in place)", rotate


def _torchembed(interleaved: bool, sets: Sequence[Inputs]) -> tuple[str, Rotate] | None:
    if interleaved:
        return None
    from torchembed._triton import fused_rope_forward

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return fused_rope_forward(q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous(), cos, sin)

    return "torchembed", rotate
