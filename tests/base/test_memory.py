"""A tensor that a call writes shares memory with no other tensor of the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import jitrope
from jitrope import InvalidInput, KVCache, Norm, Quantize

from ..devices import DEVICES

T, H, D = 8, 2, 16
FP8 = torch.float8_e4m3fn
# The tensor that is written, one that is read, and the call.
CALLS: dict[str, tuple[str, str, Callable[[dict[str, Tensor]], Any]]] = {
    "in place": ("q", "cos", lambda x: jitrope.apply_rope(x["q"], None, x["cos"], x["sin"], inplace=True)),
    "ids": (
        *("q", "positions"),
        lambda x: jitrope.apply_rope(x["q"], None, x["cos"], x["sin"], positions=x["positions"], inplace=True),
    ),
    "norm": (
        *("q", "q_weight"),
        lambda x: jitrope.prepare_qkv(x["q"], None, None, norm=Norm(x["q_weight"]), inplace=True),
    ),
    "out": ("out's q", "cos", lambda x: jitrope.apply_rope(x["k"], None, x["cos"], x["sin"], out=(x["q"], None))),
    "cache": (
        *("k_cache", "slot_mapping"),
        lambda x: jitrope.prepare_qkv(
            *(torch.zeros_like(x["k"][0]), x["q"][0], torch.zeros_like(x["k"][0])),
            layout="thd",
            cache=KVCache(x["k_cache"], torch.zeros_like(x["k_cache"]), x["slot_mapping"]),
        ),
    ),
    "projection": (
        *("qkv", "sin"),
        lambda x: jitrope.prepare_fused_qkv(x["qkv"], x["cos"], x["sin"], heads=(1, 1), inplace=True),
    ),
    "bias": (
        *("qkv", "bias"),
        lambda x: jitrope.prepare_fused_qkv(x["qkv"], x["cos"], x["sin"], heads=(1, 1), bias=x["bias"], inplace=True),
    ),
    "two scales": (  # Quantize has a q_scale of its own
        *("out's q", "q_scale"),
        lambda x: jitrope.prepare_qkv(
            *(x["k"], None, None, x["cos"], x["sin"]),
            q_scale=x["q_scale"],
            quantize=Quantize(q_scale=0.5),
            out=(x["q"].flatten().view(FP8)[: x["k"].numel()].view(x["k"].shape), None, None),
        ),
    ),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", CALLS)
def test_shared_memory_is_refused(kind: str, device: str) -> None:
    """Also after a call of the same kind that shares none; another part of the same memory is no fault."""
    written, read, call = CALLS[kind]
    shapes = {"q": (1, T, H, D), "k": (1, T, H, D), "cos": (T, D // 2), "sin": (T, D // 2), "q_weight": (D,)}
    shapes.update(k_cache=(T, H, D), qkv=(1, T, 3, D), bias=(3 * D,), q_scale=(T,))
    given = {label: torch.rand(shape, device=device) for label, shape in shapes.items()}
    given.update({x: torch.arange(T, dtype=torch.int32, device=device) for x in ("positions", "slot_mapping")})
    call(dict(given))
    name = written.removeprefix("out's ")
    x, memory = given[read], torch.zeros(2 * given[name].numel(), device=device)
    for begin, shares in ((memory.numel() - x.numel(), False), (0, True)):
        part = memory[begin : begin + x.numel()].view(x.dtype).view_as(x)
        part.copy_(x)
        apart = {**given, name: memory[: given[name].numel()].view_as(given[name]), read: part}
        before = memory.clone()
        if not shares:
            call(apart)
            continue
        with pytest.raises(InvalidInput, match=f"{written} and {read} share memory, which is written"):
            call(apart)
        assert torch.equal(memory.view(torch.int32), before.view(torch.int32))
