"""Rotation in place from interleaved pairs into halves and back, of parts of heads: latent attention's q."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import jitrope
from jitrope import InvalidInput, KVCache, Mrope, Norm, Packed

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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", ["mla", "packed", "scaled", "ids"])
def test_gradients(way: str, device: str) -> None:
    (q, k), tables, words = inputs(way, device)
    words.update(interleaved=True, interleaved_out=False)
    found = []
    for inplace in (False, True):
        leaves = [x.clone().requires_grad_() for x in (q, k)]
        out = jitrope.apply_rope(*[x * 1 for x in leaves], *tables, inplace=inplace, **words)
        grads = [torch.linspace(-1, 1, x.numel(), device=device).view(x.shape).to(x.dtype) for x in out]
        found.append(torch.autograd.grad(out, leaves, grads))
    for a, b, x in zip(*found, (q, k)):
        a, b = (y[:8] if way == "packed" else y for y in (a, b))
        assert torch.equal(a, b), x.shape


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("order", ["grouped", "qkv"])
def test_fused_qkv_and_q_beside_a_cache(order: str, device: str) -> None:
    qkv = torch.randn(2, 5, 2 * 4, 64, generator=torch.Generator().manual_seed(5)).to(device, torch.bfloat16)
    qkv = qkv.view(2, 5, 2, 4 * 64) if order == "grouped" else qkv
    angles = torch.rand(5, 32, generator=torch.Generator().manual_seed(6)).to(device)
    words: dict[str, Any] = {"cos": angles.cos(), "sin": angles.sin(), "interleaved": True, "interleaved_out": False}
    q, k, v = jitrope.prepare_fused_qkv(qkv, heads=(4, 2), order=order, **words)
    own = jitrope.prepare_fused_qkv(qkv.clone(), heads=(4, 2), order=order, inplace=True, **words)
    as_it_is = jitrope.prepare_fused_qkv(own, angles * 0 + 1, angles * 0, heads=(4, 2), order=order)
    assert all(torch.equal(x, y) for x, y in zip(as_it_is, (q, k, v)))
    heads = jitrope.prepare_fused_qkv(qkv, angles * 0 + 1, angles * 0, heads=(4, 2), order=order)
    caches = [torch.zeros(10, 2, 64, device=device, dtype=torch.bfloat16) for _ in range(2)]
    cache = KVCache(*caches, torch.arange(10, device=device))
    turned, _, _ = jitrope.prepare_qkv(*heads, cache=cache, inplace=True, **words)
    assert turned is heads[0]
    assert torch.equal(turned, q)
    assert torch.equal(caches[0], k.flatten(0, 1))


def test_refusals() -> None:
    (q, k), _, _ = inputs("mla", "cpu")
    for rotary, words, text in (
        (96, {}, "because it moves elements, unless rotary_dim is a power of two up to 64; it is 96"),
        (128, {}, "because it moves elements, unless .* up to 64; it is 128; leave inplace=True out"),
        (64, {"norm": Norm()}, "because it moves elements; leave inplace=True out"),
    ):
        table = torch.ones(5, rotary // 2)
        function: Any = jitrope.prepare_qkv if words else jitrope.apply_rope
        args = (q, k, None) if words else (q, k)
        with pytest.raises(InvalidInput, match=f"interleaved_out does not go with inplace, {text}"):
            function(*args, table, table, rotary_dim=rotary, interleaved_out=True, inplace=True, **words)
