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
SHAPES = {"q": (1, T, H, D), "k": (1, T, H, D), "cos": (T, D // 2), "sin": (T, D // 2), "q_weight": (D,),
          "k_cache": (T, H, D), "qkv": (1, T, 3, D), "bias": (3 * D,), "q_scale": (T,),
          "cos_sin_cache": (T, D)}  # fmt: skip
Given = dict[str, Tensor]
# The tensor that is written, one that is read, and the call.
CALLS: list[tuple[str, str, Callable[[Given], Any]]] = [
    ("q", "cos", lambda x: jitrope.apply_rope(x["q"], None, x["cos"], x["sin"], inplace=True)),
    ("q", "positions", lambda x: jitrope.apply_rope(x["q"], None, x["cos"], x["sin"], positions=x["positions"],
                                                    inplace=True)),
    ("q", "q_weight", lambda x: jitrope.prepare_qkv(x["q"], None, None, norm=Norm(x["q_weight"]), inplace=True)),
    ("out's q", "cos", lambda x: jitrope.apply_rope(x["k"], None, x["cos"], x["sin"], out=(x["q"], None))),
    ("out's q", "cos_sin_cache", lambda x: jitrope.apply_rope(x["k"], None, cos_sin_cache=x["cos_sin_cache"],
                                                              out=(x["q"], None))),
    ("out's q", "q_weight", lambda x: jitrope.prepare_qkv(x["k"], None, None, norm=Norm(x["q_weight"]),
                                                          out=(x["q"], None, None))),
    ("out's q", "bias", lambda x: jitrope.prepare_fused_qkv(x["qkv"], x["cos"], x["sin"], heads=(1, 1), bias=x["bias"],
                                                            out=(x["q"][:, :, :1], None, None))),
    ("k_cache", "slot_mapping", lambda x: jitrope.prepare_qkv(
        torch.zeros_like(x["k"][0]), x["q"][0], torch.zeros_like(x["k"][0]), layout="thd",
        cache=KVCache(x["k_cache"], torch.zeros_like(x["k_cache"]), x["slot_mapping"]))),
    ("qkv", "sin", lambda x: jitrope.prepare_fused_qkv(x["qkv"], x["cos"], x["sin"], heads=(1, 1), inplace=True)),
    ("qkv", "bias", lambda x: jitrope.prepare_fused_qkv(x["qkv"], x["cos"], x["sin"], heads=(1, 1), bias=x["bias"],
                                                        inplace=True)),
    ("out's q", "q_scale", lambda x: jitrope.prepare_qkv(  # Quantize has a q_scale of its own
        x["k"], None, None, x["cos"], x["sin"], q_scale=x["q_scale"], quantize=Quantize(q_scale=0.5),
        out=(x["q"].flatten().view(torch.float8_e4m3fn)[: x["k"].numel()].view(x["k"].shape), None, None))),
]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("written", "read", "call"), CALLS)
def test_shared_memory_is_refused(written: str, read: str, call: Callable[[Given], Any], device: str) -> None:
    """Also after a call of the same kind that shares none; another part of the same memory is no fault."""
    given = {label: torch.rand(shape, device=device) for label, shape in SHAPES.items()}
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
