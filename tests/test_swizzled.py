"""Block scales in the tiles that matrix products read: bytes, stages, torch's machinery, refusals."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import jitrope
from jitrope import DynamicQuantize, InvalidInput, KVCache, Pages, Scaled, planning

from .devices import DEVICES
from .oracle import heads, of_tiles
from .test_quantize import E8M0, FP4, FP8, inputs

FORMS: dict[str, dict[str, Any]] = {
    "mxfp8": {"group": 32, "scale_dtype": E8M0},
    "mxfp4": {"dtype": FP4, "group": 32, "scale_dtype": E8M0},
    "nvfp4": {"dtype": FP4, "group": 16, "scale_dtype": FP8, "q_global_scale": 0.01, "k_global_scale": 0.02},
}
quantized = partial(DynamicQuantize, swizzled=True)


def assert_same(got: Scaled, want: Scaled, layout: str = "bshd") -> None:
    """The values of a call with plain scales, and its scales in tiles."""
    assert torch.equal(got.values.view(torch.uint8), want.values.view(torch.uint8))
    scale = heads(want.scale, layout)
    batch, tokens, count, groups = scale.shape
    assert got.scale.dtype == scale.dtype
    assert got.scale.shape == (batch, count, -(-tokens // 128) * 128, -(-groups // 4) * 4)
    found = of_tiles(got.scale, tokens, groups)
    assert torch.equal(found.view(torch.uint8), scale.contiguous().view(torch.uint8))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("launch", ["grid_2d", "token_linear"])
@pytest.mark.parametrize("shape", [(2, 130, 3, 128), (1, 128, 1, 64), (2, 257, 1, 96), (1, 33, 2, 256), (3, 1, 4, 160)])
@pytest.mark.parametrize("form", FORMS)
def test_the_bytes_of_a_call_in_tiles(form: str, shape: tuple[int, ...], launch: str, device: str) -> None:
    """Whole tiles, parts of tiles in both directions, tokens of a batch row; the second call is a known one."""
    q, k, cos, sin = inputs(device, *shape)
    jitrope.configure(launch=launch)
    want = jitrope.prepare_qkv(q, k, None, cos, sin, quantize=DynamicQuantize(**FORMS[form]))[:2]
    for _ in range(2):
        for x, y in zip(jitrope.prepare_qkv(q, k, None, cos, sin, quantize=quantized(**FORMS[form])), want):
            assert_same(x, y)


@pytest.mark.parametrize("device", DEVICES)
def test_where_some_scales_are(device: str) -> None:
    """By hand: token 33 is next to token 1, group 4 in the second tile, token 128 behind both tiles of the first."""
    q, _, _, _ = inputs(device, 1, 130, 2, 160)
    plain, tiles = (jitrope.prepare_qkv(q, None, None, quantize=make(**FORMS["mxfp8"]))[0].scale.view(torch.uint8)
                    for make in (DynamicQuantize, quantized))  # fmt: skip
    assert tiles.shape == (1, 2, 256, 8)
    for token, group, byte in ((0, 3, 3), (1, 0, 16), (33, 2, 22), (127, 0, 508), (0, 4, 512), (128, 0, 1024),
                               (129, 4, 1552)):  # fmt: skip
        assert torch.equal(tiles.flatten(2)[0, :, byte], plain[0, token, :, group])


def pages(device: str, length: int) -> KVCache:
    """A cache with a sequence's pages in reverse."""
    count = -(-length // 4)
    caches = torch.zeros(2, count, 4, 2, 128, dtype=torch.bfloat16, device=device)
    table = torch.arange(count, device=device).flip(0)[None]
    return KVCache(*caches, Pages(table, seq_lens=torch.tensor([length], device=device)))


@pytest.mark.parametrize("shape", [(0, 3, 4, 64), (2, 0, 4, 64), (2, 3, 0, 64)], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_nothing_to_convert(shape: tuple[int, ...], device: str) -> None:
    got, _, _ = jitrope.prepare_qkv(torch.empty(shape, device=device), None, None, quantize=quantized(**FORMS["mxfp8"]))
    batch, tokens, count, _ = shape
    assert got.scale.shape == (batch, count, -(-tokens // 128) * 128, 4)
    assert not got.scale.view(torch.uint8).any()


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_for_any_length(device: str) -> None:
    def call(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return jitrope.prepare_qkv(q, k, None, cos, sin, quantize=quantized(**FORMS["mxfp4"]))[:2]

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (9, 128, 130):
        q, k, cos, sin = inputs(device, 2, tokens, 4, 64)
        for x, y in zip(compiled(q, k, cos, sin), call(q, k, cos, sin)):
            assert type(x) is Scaled
            assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(x, y))


def test_planned() -> None:
    q, k = (torch.empty(1, 4100, n, 128, dtype=torch.bfloat16, device="meta") for n in (32, 8))
    table = torch.empty(4100, 64, device="meta")
    with planning() as called:
        got, _, _ = jitrope.prepare_qkv(q, k, None, table, table, quantize=quantized(**FORMS["mxfp8"]))
    assert got.scale.shape == (1, 32, 4224, 4)
    assert all(spec.swizzled for spec in called)


def test_refusals() -> None:
    mx = FORMS["mxfp8"]
    needs = "DynamicQuantize: swizzled needs scales of one byte; pass group and scale_dtype too"
    for words, message in (
        ({}, needs),
        ({"group": 32}, needs),
        ({"scale_dtype": E8M0}, needs),
        ({"dtype": torch.int8, "group": 16}, needs),
        ({"per": "head"}, "per='head' does not go with swizzled; leave one out"),
        ({"per": "kv_head"}, "per='kv_head' does not go with swizzled"),
        ({**mx, "swizzled": "yes"}, "swizzled is 'yes'; it must be True or False"),
    ):
        with pytest.raises(InvalidInput, match=message):
            quantized(**words)
    assert repr(quantized(**mx)).endswith("swizzled=True)")
