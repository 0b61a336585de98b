"""Block scales in the tiles that matrix products read: bytes, stages, torch's machinery, refusals."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import jitrope
from jitrope import DynamicQuantize, InvalidInput, KVCache, Norm, Packed, Pages, Scaled, Ulysses, planning
from jitrope.ops.operations import QK_NORM_ROPE_SCALED
from jitrope.plan.options import NO_NORM, Options

from .cases import op_arguments
from .devices import DEVICES
from .oracle import heads, of_tiles, unheads
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


WAYS: dict[str, dict[str, Any]] = {
    "norm": {"norm": Norm(rounding="once")},
    "layer norm after": {"norm": Norm(kind="layer_norm", after_rope=True), "interleaved": True},
    "hadamard": {"hadamard": True},
    "partial": {"rotary_dim": 64, "rotary_offset": 64, "unrotated": 2},
    "no rope": {"tables": False, "q_scale": 0.25},
    "heads first": {"layout": "bhsd"},
    "tokens first": {"layout": "sbhd"},
    "packed rows": {"layout": "thd", "shape": (1, 131, 4, 128)},
    "packed sequences": {"layout": "thd", "shape": (1, 131, 4, 128), "packed": True, "positions": [0, 2, 2, 130]},
    "ids": {"positions": [3, 0, 2, 2, 1, 4, 5]},
    "ids of rows": {"positions": [[3, 0, 2, 2, 1, 4, 5]] * 2},
    "decode": {"shape": (5, 1, 4, 128), "positions": [[0], [0], [0], [0], [0]]},
    "out": {"out": True},
    "cache": {"cache": "slots"},
    "decode with a cache": {"cache": "slots", "shape": (5, 1, 4, 128)},
    "pages": {"cache": "pages", "shape": (1, 9, 4, 128)},
}
BESIDE = [(way, form) for way in WAYS for form in ("mxfp8", "nvfp4") if (way, form) != ("out", "nvfp4")]  # refused


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("way", "form"), BESIDE)
def test_beside_other_stages(way: str, form: str, device: str) -> None:
    """The same values and caches as with plain scales; ids that rows share, and single tokens, merge no batch rows."""
    words, own = dict(WAYS[way]), dict(FORMS[form])
    q, k, cos, sin = inputs(device, *words.pop("shape", (2, 7, 4, 128)))
    layout = words.get("layout", "bshd")
    into, cached, own["hadamard"] = words.pop("out", False), words.pop("cache", ""), words.pop("hadamard", False)
    tables = (cos, sin) if words.pop("tables", True) else ()
    tables = tuple([x[:, : words.get("rotary_dim", 128) // 2] for x in tables])
    if "positions" in words:
        words["positions"] = torch.tensor(words["positions"], device=device)
    if words.pop("packed", False):
        words["positions"] = Packed(words["positions"])
    q, k = (unheads(x, layout).contiguous() for x in (q, k))
    if cached:
        own.pop("k_global_scale", None)
    results, stored = [], []
    for make in (DynamicQuantize, quantized):
        if into:
            words["out"] = (torch.empty_like(q, dtype=FP8), None, None)
        if cached:
            count = q.shape[0] * q.shape[1]
            stored.append(torch.zeros(2, count, 2, 128, dtype=k.dtype, device=device))
            cache = KVCache(*stored[-1], torch.arange(count, device=device).flip(0))
            words["cache"] = pages(device, count) if cached == "pages" else cache
        results.append(jitrope.prepare_qkv(q, k, k, *tables, quantize=make(**own), **words)[: 1 if cached else 2])
        if into:
            assert results[-1][0].values is words["out"][0]
    for want, got in zip(*results):
        assert_same(got, want, layout)
    assert not stored or torch.equal(*stored)


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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [5, 128])
def test_opcheck(tokens: int, device: str) -> None:
    q, k, cos, sin = inputs(device, 2, tokens, 4, 128)
    options = Options(rotary_dim=128, norm=NO_NORM, group=32, scale_out="e8m0", swizzled=True)
    arguments = op_arguments(QK_NORM_ROPE_SCALED, (q, k), (cos, sin), options)
    torch.library.opcheck(torch.ops.jitrope.qk_norm_rope_scaled.default, arguments)


def test_planned() -> None:
    q, k = (torch.empty(1, 4100, n, 128, dtype=torch.bfloat16, device="meta") for n in (32, 8))
    table = torch.empty(4100, 64, device="meta")
    with planning() as called:
        got, _, _ = jitrope.prepare_qkv(q, k, None, table, table, quantize=quantized(**FORMS["mxfp8"]))
    assert got.scale.shape == (1, 32, 4224, 4)
    assert all(spec.swizzled and "swizzled" in spec.name for spec in called)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd", "thd"])
@pytest.mark.parametrize("form", ["mxfp8", "mxfp4"])
def test_each_rank_has_tiles_of_its_heads(form: str, layout: str, device: str) -> None:
    """By `Ulysses` and in given tensors: the bytes of all heads, dealt out; the second call is a known one."""
    q, k, cos, sin = inputs(device, *((1, 131) if layout == "thd" else (2, 131)), 4, 128)
    q, k = (unheads(x.repeat(1, 1, 2, 1), layout).contiguous() for x in (q, k))
    words: dict[str, Any] = {"layout": layout, "quantize": quantized(**FORMS[form], v=True)}
    want = jitrope.prepare_qkv(q, k, k, cos, sin, **words)
    axis = layout.index("h")
    for given in (False, True, True):
        values = [torch.stack(x.values.view(torch.uint8).chunk(4, axis)) for x in want]
        out = [torch.zeros_like(x).view(FORMS[form].get("dtype", FP8)) for x in values]
        got = jitrope.prepare_qkv(q, k, k, cos, sin, **words, out=out if given else Ulysses(4))
        for x, y, each in zip(got, want, values):
            assert torch.equal(x.values.view(torch.uint8), each)
            assert torch.equal(x.scale.view(torch.uint8), torch.stack(y.scale.view(torch.uint8).chunk(4, 1)))


def test_refusals() -> None:
    mx = FORMS["mxfp8"]
    needs = "DynamicQuantize: swizzled needs scales of one byte; pass group and scale_dtype too"
    for words, message in (
        ({}, needs),
        ({"group": 32}, needs),
        ({"scale_dtype": E8M0}, needs),
        ({"dtype": torch.int8, "group": 16}, needs),
        ({"per": "head"}, "swizzled does not go with per='head'"),
        ({"per": "kv_head"}, "swizzled does not go with per='kv_head'"),
        ({**mx, "swizzled": "yes"}, "swizzled is 'yes'; it must be True or False"),
    ):
        with pytest.raises(InvalidInput, match=message):
            quantized(**words)
    assert repr(quantized(**mx)).endswith("swizzled=True)")
