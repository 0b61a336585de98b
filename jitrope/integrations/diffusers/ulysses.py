"""Ulysses, diffusers' context parallelism by an all-to-all over heads: norm and rope write what is sent.

The host prepares q, k and v, then copies each into the order of the ranks, sends it, attends to all tokens of its heads
and sends the result back (`TemplatedUlyssesAttention` in diffusers.models.attention_dispatch, arXiv:2309.14509). Here
the launch writes q, k and v in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...api import prepare_qkv
from .norms import Norms, Parts, Words, refuse_mixed


def ranks_of(processor: Any, attend: Callable[..., Any], mask: Any, *streams: Parts) -> int:
    """The number of ranks, if q, k and v can be written as they are sent; 0: the host makes what it sends.

    It does so with a gradient, a mask, a ring, uneven sequences or heads, and under `torch.compile`.
    """
    config: Any = getattr(processor._parallel_config, "context_parallel_config", None)
    if config is None or mask is not None or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return 0
    ranks = config.ulysses_degree
    if ranks < 2 or config.ring_degree > 1 or getattr(config, "ulysses_anything", False) or _swap(attend) is None:
        return 0
    even = all(x.shape[1] == parts[0].shape[1] and x.shape[2] % ranks == 0 for parts in streams for x in parts)
    return int(ranks) if even else 0


def sent(norms: Norms, streams: Sequence[Parts], rope: Words, ranks: int) -> Parts:
    """q, k and v of one or two streams, prepared and joined, as (ranks, B, S, H / ranks, D), ready for an all-to-all.

    It takes a launch for each stream.
    """
    refuse_mixed(norms, *(x for parts in streams for x in parts[:2]))
    tokens = [parts[0].shape[1] for parts in streams]
    out = [x.new_empty(ranks, x.shape[0], sum(tokens), x.shape[2] // ranks, x.shape[3]) for x in streams[0]]
    for i, (parts, start) in enumerate(zip(streams, (0, tokens[0]))):
        pieces = tuple(x[:, :, start : start + tokens[i]] for x in out)
        own = _rows(rope, i, start, tokens[i]) if len(streams) > 1 else rope
        prepare_qkv(*parts, norm=norms.of(i), out=pieces, **own)
    return out[0], out[1], out[2]


def _rows(rope: Words, stream: int, start: int, tokens: int) -> Words:
    """The words of one stream: its own tables, or its rows of common ones."""
    found = {}
    for name, value in rope.items():
        if isinstance(value, tuple):
            value = value[stream]
        elif isinstance(value, Tensor):
            value = value.narrow(min(value.dim() - 2, 1), start, tokens)
        found[name] = value
    return found


def exchanged(attend: Callable[..., Any], *qkv: Tensor | None, parallel_config: Any, **words: Any) -> Tensor:
    """Attention of q, k and v as `sent` makes them: (B, S, H, D) of this rank's tokens."""
    group, swap = parallel_config.context_parallel_config._ulysses_mesh.get_group(), _swap(attend)
    q, k, v = (swap(x, group).transpose(0, 1).flatten(1, 2) for x in qkv)
    out = attend(q, k, v, parallel_config=None, **words)
    out = swap(out.unflatten(1, (group.size(), -1)).transpose(0, 1).contiguous(), group)
    by_token: Tensor = out.permute(1, 2, 0, 3, 4)
    return by_token.flatten(2, 3)


def _swap(attend: Any) -> Any:
    """The host's all-to-all, in the module of its attention, or None."""
    return getattr(attend, "__globals__", {}).get("_all_to_all_single")
