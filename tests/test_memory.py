"""A tensor that a call writes shares memory with no other tensor of the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import jitrope
from jitrope import InvalidInput, KVCache, Norm, Quantize

from .devices import DEVICES

T, H, D = 8, 2, 16
SHAPES = {
    "q": (1, T, H, D),
    "cos": (T, D // 2),
    "q_weight": (D,),
    "slots": (T,),
    "k_cache": (T, H, D),
    "qkv": (1, T, 3, D),
    "q_scale": (T,),
}
CALLS: dict[str, tuple[str, str, Callable[[dict[str, Tensor]], Any]]] = {
    "in place": ("q", "cos", lambda x: jitrope.apply_rope(x["q"], None, x["cos"], x["sin"], inplace=True)),
    "ids": ("q", "positions", lambda x: rotated_by_ids(x["q"], x["positions"], x["cos"], x["sin"])),
    "norm": (
        "q",
        "q_weight",
        lambda x: jitrope.prepare_qkv(x["q"], None, None, norm=Norm(x["q_weight"]), inplace=True),
    ),
    "out": ("out's q", "cos", lambda x: jitrope.apply_rope(x["k"], None, x["cos"], x["sin"], out=(x["q"], None))),
    "cache": ("k_cache", "slot_mapping", lambda x: stored(x["q"], x["k_cache"], x["slot_mapping"])),
    "projection": ("qkv", "sin", lambda x: projected(x["qkv"], x["cos"], x["sin"], None)),
    "two scales": ("out's q", "q_scale", lambda x: scaled(x["q"], x["k"], x["cos"], x["sin"], x["q_scale"])),
    "bias": ("qkv", "bias", lambda x: projected(x["qkv"], x["cos"], x["sin"], x["bias"])),
}


def rotated_by_ids(q: Tensor, ids: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return jitrope.apply_rope(q, None, cos, sin, positions=ids, inplace=True)


def stored(k: Tensor, cache: Tensor, slots: Tensor) -> Any:
    q = torch.zeros_like(k)
    return jitrope.prepare_qkv(q[0], k[0], q[0], layout="thd", cache=KVCache(cache, torch.zeros_like(cache), slots))


def scaled(out: Tensor, q: Tensor, cos: Tensor, sin: Tensor, factor: Tensor) -> Any:
    """Quantize has a q_scale of its own."""
    given = out.flatten().view(torch.float8_e4m3fn)[: q.numel()].view(q.shape)
    words = {"quantize": Quantize(q_scale=0.5), "out": (given, None, None)}
    return jitrope.prepare_qkv(q, None, None, cos, sin, q_scale=factor, **words)


def projected(qkv: Tensor, cos: Tensor, sin: Tensor, bias: Tensor | None) -> Any:
    return jitrope.prepare_fused_qkv(qkv, cos, sin, heads=(1, 1), bias=bias, inplace=True)


def tensors(device: str) -> dict[str, Tensor]:
    shapes = {**SHAPES, "k": SHAPES["q"], "sin": SHAPES["cos"], "bias": (3 * D,)}
    ids = {name: torch.arange(T, dtype=torch.int32, device=device) for name in ("positions", "slot_mapping")}
    return {**{name: torch.rand(shape, device=device) for name, shape in shapes.items()}, **ids}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", CALLS)
def test_shared_memory_is_refused(kind: str, device: str) -> None:
    """Also after a call of the same kind that shares none; another part of the same memory is no fault."""
    written, read, call = CALLS[kind]
    given, name = tensors(device), written.removeprefix("out's ")
    call(dict(given))
    x, memory = given[read], torch.zeros(2 * given[name].numel(), device=device)
    whole = memory[: given[name].numel()].view_as(given[name])
    for begin, shares in ((memory.numel() - x.numel(), False), (0, True)):
        part = memory[begin : begin + x.numel()].view(x.dtype).view_as(x)
        part.copy_(x)
        apart = {**given, name: whole, read: part}
        before = memory.clone()
        if not shares:
            call(apart)
            continue
        with pytest.raises(InvalidInput, match=f"{written} and {read} share memory, which is written"):
            call(apart)
        assert torch.equal(memory.view(torch.int32), before.view(torch.int32))
