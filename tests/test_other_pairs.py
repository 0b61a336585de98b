"""Rotation in place from interleaved pairs into halves and back, of parts of heads: latent attention's q."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import jitrope
from jitrope import Mrope, Packed

from .devices import DEVICES
from .host import backend

WAYS: dict[str, dict[str, Any]] = {
    "mla": {"dim": 192, "offset": 128, "rotary": 64},
    "whole": {"dim": 64, "rotary": 64},
    "first": {"dim": 80, "rotary": 32},
    "pair": {"dim": 6, "offset": 2, "rotary": 2},
    "fp32": {"dim": 64, "rotary": 64, "dtype": torch.float32},
    "unaligned": {"dim": 67, "offset": 3, "rotary": 64},
    "heads first": {"dim": 64, "rotary": 32, "layout": "bhsd"},
    "sequence first": {"dim": 64, "rotary": 16, "layout": "sbhd"},
    "ids": {"dim": 64, "rotary": 64, "positions": lambda d: torch.arange(10, device=d).view(2, 5).flip(1)},
    "axes": {"dim": 64, "rotary": 32, "positions": lambda d: Mrope(torch.arange(15, device=d).view(3, 5), (4, 6, 6))},
    "packed": {"dim": 192, "offset": 128, "rotary": 64, "layout": "thd",
               "positions": lambda d: Packed(torch.tensor([0, 3, 3, 8], device=d))},
    "scaled": {"dim": 64, "rotary": 32, "q_scale": 0.25},
    "dtype": {"dim": 64, "rotary": 64, "rounding": "dtype"},
    "back": {"dim": 64, "rotary": 64, "inverse": True},
}  # fmt: skip


def inputs(way: str, device: str) -> tuple[list[Tensor], list[Tensor], dict[str, Any]]:
    """q and k, cos and sin, and the words of the call."""
    words = dict(WAYS[way])
    dim, rotary, layout = words.pop("dim"), words.pop("rotary"), words.get("layout", "bshd")
    generator = torch.Generator().manual_seed(3)
    heads = []
    for count in (3, 2):
        lead = {"thd": (10, count), "bhsd": (2, count, 5), "sbhd": (5, 2, count)}.get(layout, (2, 5, count))
        x = torch.randn(*lead, dim, generator=generator)
        heads.append(x.to(device, words.get("dtype", torch.bfloat16)))
    words.pop("dtype", None)
    angles = torch.rand(20, rotary // 2, generator=generator).to(device) * 30
    words.update(rotary_dim=rotary, rotary_offset=words.pop("offset", 0))
    if "positions" in words:
        words["positions"] = words["positions"](device)
    if way == "packed":
        del words["layout"]
    return heads, [angles.cos(), angles.sin()], words


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("launch", ["token_linear", "grid_2d"])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_in_place_has_the_bits_of_fresh_results(way: str, interleaved: bool, launch: Any, device: str) -> None:
    """In one launch; tokens after the last sequence stay as they are."""
    jitrope.configure(launch=launch)
    (q, k), tables, words = inputs(way, device)
    words.update(interleaved=interleaved, interleaved_out=not interleaved)
    want = jitrope.apply_rope(q, k, *tables, **words)
    if way == "packed":
        for y, x in zip(want, (q, k)):
            y[8:] = x[8:]
    for _ in range(2):  # the second call is known
        own = [q.clone(), k.clone()]
        before = backend.launched.total()
        got = jitrope.apply_rope(*own, *tables, inplace=True, **words)
        assert backend.launched.total() - before <= 1
        for x, y, z in zip(got, own, want):
            assert x is y
            assert torch.equal(x, z)
