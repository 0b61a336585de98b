"""Caches of k alone, and caches with computed scales beside them: the index cache of DeepSeek-V3.2 in one launch.

A page of that cache has the values of its rows, (rows, D) in e4m3, and behind them their scales, (rows, D / group) in
fp32. Both are views of the page's bytes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import jitrope
from jitrope import DynamicQuantize, InvalidInput, KVCache, Norm, Pages, Quantize, Scaled, planning

from . import oracle
from .devices import DEVICES
from .results import LARGEST, near, near_units
from .sweep import E4M3, E5M2, E8M0, FP4

T, HEADS, PAGES, ROWS = 7, 4, 5, 4
SLOTS = (9, 3, -1, 17, 0, 7, 40)  # a token of padding, and one past the end
PAGE_TABLE, LENGTH = (4, 1, 3), 11  # the tokens are the last 7 of a sequence


def tensors(device: str, dim: int = 128, k_heads: int = 1, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    """(q, k, v, cos, sin, the norm's weight and bias); k and v are parts of a projection's output."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((T, HEADS, dim), (T, 2 * k_heads, dim), (T, 32), (T, 32), (dim,), (dim,))
    q, kv, *others = (torch.randn(shape, generator=generator).to(device) for shape in shapes)
    k, v = kv.to(dtype).chunk(2, 1)
    return q.to(dtype), k, v, *others


class Cache:
    """A cache full of noise with scales beside its elements, and what it had before."""

    def __init__(
        self,
        device: str,
        dim: int = 128,
        k_heads: int = 1,
        dtype: torch.dtype = E4M3,
        group: int = 128,
        scale_dtype: torch.dtype = torch.float32,
        one_page: bool = True,
        scale_fmt: str | None = None,
    ) -> None:
        self.device, self.group, self.dim, self.powers = device, group, dim, scale_fmt or scale_dtype == E8M0
        width, size = dim // (2 if dtype == FP4 else 1), 4 if scale_dtype == torch.float32 else 1
        each = ROWS * k_heads * width * dtype.itemsize, ROWS * k_heads * dim // group * size
        generator = torch.Generator().manual_seed(4)
        noise = torch.randint(1, 120, (PAGES, sum(each)), generator=generator, dtype=torch.uint8).to(device)
        values, scales = noise.split(each, 1)
        self.values = values.view(dtype).unflatten(1, (ROWS, k_heads, width))
        self.scales = scales.view(scale_dtype).unflatten(1, (ROWS, k_heads, dim // group))
        if not one_page:
            self.values, self.scales = self.values.clone(), self.scales.clone()
        self.before = self.bytes()

    def bytes(self) -> tuple[Tensor, Tensor]:
        """The rows of the values and of the scales, (slots, bytes)."""
        parts = [x.contiguous().flatten(0, 1).view(torch.uint8).flatten(1) for x in (self.values, self.scales)]
        return parts[0].clone(), parts[1].clone()

    def check(self, want: Tensor, places: tuple[int, ...]) -> None:
        """The rows of tokens have their elements in fp64, (T, H, D), and all others have what they had."""
        kept = [(token, slot) for token, slot in enumerate(places) if 0 <= slot < PAGES * ROWS]
        tokens, slots = (torch.tensor(x) for x in zip(*kept))
        for now, before in zip(self.bytes(), self.before):
            others = [slot for slot in range(PAGES * ROWS) if slot not in slots]
            assert torch.equal(now[others], before[others])
        scale = self.scales.contiguous().flatten(0, 1)[slots].cpu()
        scale = torch.exp2(scale.view(torch.uint8).float() - 127) if scale.dtype == E8M0 else scale.float()
        want = want.cpu()[tokens]
        largest = want.unflatten(-1, (-1, self.group)).abs().amax(-1) / LARGEST[self.values.dtype]
        largest = torch.exp2(torch.ceil(torch.log2(largest))) if self.powers else largest
        torch.testing.assert_close(scale.double(), largest, rtol=1e-5, atol=0)
        values = self.values.view(torch.uint8).contiguous().flatten(0, 1)[slots].view(self.values.dtype)
        near_units(values, want / scale.double().repeat_interleave(self.group, -1))


def places_of(kind: str, device: str) -> tuple[Any, tuple[int, ...]]:
    """(the value that says where tokens go, the slot of each)."""
    if kind == "slots":
        return torch.tensor(SLOTS, device=device), SLOTS
    pages = torch.tensor([PAGE_TABLE], dtype=torch.int32, device=device)
    slots = tuple(PAGE_TABLE[at // ROWS] * ROWS + at % ROWS for at in range(LENGTH - T, LENGTH))
    return Pages(pages, seq_lens=torch.tensor([LENGTH], dtype=torch.int32, device=device)), slots


def expected(x: Tensor, cos: Tensor, sin: Tensor, norm: tuple[Tensor, Tensor] | None, hadamard: bool = True) -> Tensor:
    """(T, H, D) in fp64: LayerNorm, rotation of the first 64 elements, transform."""
    y = oracle.exact(x)[None]
    if norm is not None:
        y = oracle.normed(y, *norm, {"norm_kind": "layer_norm"})
    turn = {"cos": cos, "sin": sin, "rotary_dim": 64, "rotary_offset": 0, "interleaved": False}
    y = oracle.rotated(y, turn)[0]
    return y @ oracle.hadamard_matrix(x.shape[-1]).to(y) if hadamard else y


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["slots", "pages"])
@pytest.mark.parametrize("launch", ["token_linear", "grid_2d"])
@pytest.mark.parametrize(("group", "scale_dtype"), [(128, torch.float32), (128, E8M0), (32, torch.float32), (64, E8M0)])
def test_the_indexer_of_deepseek_is_one_launch(
    group: int, scale_dtype: torch.dtype, launch: str, kind: str, device: str
) -> None:
    """q is in fp8 with its scales, k is normalised first and in the cache. The second call is a known one."""
    jitrope.configure(launch=launch)
    q, k, _, cos, sin, w, b = tensors(device)
    norm = Norm(k_weight=w, k_bias=b, kind="layer_norm", of="k")
    given = None if group == 128 and scale_dtype == torch.float32 else group  # the head is a group too
    quantize = DynamicQuantize(hadamard=True, group=given, scale_dtype=scale_dtype)
    to, places = places_of(kind, device)
    for _ in range(2):
        cache = Cache(device, group=group, scale_dtype=scale_dtype)
        into = KVCache(cache.values, None, to, k_block_scale=cache.scales)
        words: dict[str, Any] = {"norm": norm, "quantize": quantize, "rotary_dim": 64, "layout": "thd"}
        got, key, value = jitrope.prepare_qkv(q, k, None, cos, sin, cache=into, **words)
        assert key is value is None
        cache.check(expected(k, cos, sin, (w, b)), places)
        alone, _, _ = jitrope.prepare_qkv(q, None, None, cos, sin, quantize=quantize, rotary_dim=64, layout="thd")
        assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(got, alone))


STAGES: dict[str, dict[str, Any]] = {
    "rope alone": {},
    "a norm of both": {"norm": Norm(kind="layer_norm")},
    "q in fp8": {"quantize": Quantize(0.05)},
    "q transformed too": {"hadamard": True},
    "in place": {"inplace": True},
    "k too": {"rotate_k": True},
    "given": {"out": True},
    "a scale of q": {"q_scale": 0.25},
    "first tokens": {"unrotated": 2},
    "heads first": {"layout": "bhsd"},
    "no table": {"tables": False},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("launch", ["token_linear", "grid_2d"])
@pytest.mark.parametrize("blocks", [False, True], ids=["bf16", "blocks"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_cache_without_v_beside_other_stages(stage: str, blocks: bool, launch: str, device: str) -> None:
    """q and k's cache have the bits of a call that stores a v too."""
    jitrope.configure(launch=launch)
    q, k, v, cos, sin, _, _ = tensors(device, 64, 2)
    words = {"layout": "thd", **STAGES[stage]}
    rotate_k, out, tables = words.pop("rotate_k", False), words.pop("out", False), words.pop("tables", True)
    if words["layout"] == "bhsd":
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    found = []
    for with_v in (True, False):
        caches = [Cache(device, 64, 2, E4M3 if blocks else torch.bfloat16, 16) for _ in range(2)]
        scales = dict(zip(("k_block_scale", "v_block_scale"), [x.scales for x in caches])) if blocks else {}
        if not with_v:
            scales.pop("v_block_scale", None)
        to = torch.tensor(SLOTS, device=device)
        cache = KVCache(caches[0].values, caches[1].values if with_v else None, to, rotate_k=rotate_k, **scales)
        a, b = q.clone(), k.clone()
        more = {"out": (torch.empty_like(a), None, None)} if out else {}
        got = jitrope.prepare_qkv(
            a, b, v if with_v else None, *((cos, sin) if tables else ()), cache=cache, **words, **more
        )
        assert got[2] is (v if with_v else None)
        assert (got[1] is b) == rotate_k
        found.append([got[0], b, *caches[0].bytes()])
        assert blocks == (not torch.equal(caches[0].bytes()[1], caches[0].before[1]))
        assert not torch.equal(caches[0].bytes()[0], caches[0].before[0])
    assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(*found))


FORMATS = [
    (E4M3, 128, torch.float32),
    (E5M2, 32, torch.float32),
    (torch.int8, 64, torch.float32),
    (torch.int8, 128, E8M0),
    (E4M3, 32, E8M0),
    (FP4, 32, E8M0),
    (FP4, 16, torch.float32),
    (E4M3, 128, torch.float32, "ue8m0"),
    (FP4, 32, torch.float32, "ue8m0"),
    (E4M3, 64, E8M0, "ue8m0"),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("quantized", [False, True], ids=["q", "scaled q"])
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_scales_beside_k_and_v(form: tuple[Any, ...], quantized: bool, device: str) -> None:
    dtype, group, scale_dtype, scale_fmt = (*form, None)[:4]
    q, k, v, cos, sin, _, _ = tensors(device, 128, 2, torch.float16)
    caches = [Cache(device, 128, 2, dtype, group, scale_dtype, one_page, scale_fmt) for one_page in (True, False)]
    to, places = places_of("pages", device)
    scales = dict(zip(("k_block_scale", "v_block_scale"), [x.scales for x in caches]))
    words: dict[str, Any] = {"rotary_dim": 64, "layout": "thd"}
    if quantized:
        words["quantize"] = DynamicQuantize(dtype, group=group, scale_dtype=scale_dtype, scale_fmt=scale_fmt)
    cache = KVCache(*[x.values for x in caches], to, **scales, scale_fmt=scale_fmt)
    got, _, _ = jitrope.prepare_qkv(q, k, v, cos, sin, cache=cache, **words)
    caches[0].check(expected(k, cos, sin, None, False), places)
    caches[1].check(oracle.exact(v), places)
    want = expected(q, cos, sin, None, False)
    if isinstance(got, Scaled):
        want, _, _ = jitrope.prepare_qkv(q, None, None, cos, sin, **words)
        assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(got, want))
    else:
        near(got, want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale_fmt", [None, "ue8m0"])
def test_the_rest_of_a_page_is_cleared_with_its_scales(scale_fmt: str | None, device: str) -> None:
    q, k, _, cos, sin, _, _ = tensors(device)
    to, places = places_of("pages", device)
    to.words["clear_page"] = True
    cache = Cache(device, group=32, scale_fmt=scale_fmt)
    into = KVCache(cache.values, None, to, k_block_scale=cache.scales, scale_fmt=scale_fmt)
    jitrope.prepare_qkv(q, k, None, cos, sin, rotary_dim=64, cache=into, layout="thd")
    rest = PAGE_TABLE[-1] * ROWS + 3  # the sequence has 11 tokens
    assert all((x[rest] == 0).all() for x in cache.bytes())
    for before, now in zip(cache.before, cache.bytes()):
        before[rest] = now[rest]
    cache.check(expected(k, cos, sin, None, False), places)


@pytest.mark.parametrize("device", DEVICES)
def test_compiled(device: str) -> None:
    q, k, _, cos, sin, w, b = tensors(device)
    norm = Norm(k_weight=w, k_bias=b, kind="layer_norm", of="k")
    quantize = DynamicQuantize(hadamard=True)

    def call(q: Tensor, k: Tensor, values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        into = KVCache(values, None, torch.arange(T, device=q.device), k_block_scale=scales)
        words: dict[str, Any] = {"norm": norm, "quantize": quantize, "rotary_dim": 64, "layout": "thd"}
        got = jitrope.prepare_qkv(q, k, None, cos, sin, cache=into, **words)[0]
        return got.values, got.scale

    one, two = (Cache(device, one_page=False) for _ in range(2))
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    pairs = zip(compiled(q, k, one.values, one.scales), call(q, k, two.values, two.scales))
    assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in pairs)
    for x, y in zip(one.bytes(), two.bytes()):
        assert torch.equal(x, y)
    assert not torch.equal(one.bytes()[0], one.before[0])


def test_planned() -> None:
    q, k = (torch.empty(1, 4096, n, 128, dtype=torch.bfloat16, device="meta") for n in (64, 1))
    table, w, slots = (torch.empty(*shape, device="meta") for shape in ((4096, 32), (128,), (4096,)))
    values, scales = (torch.empty(4096, 1, n, device="meta", dtype=dtype) for n, dtype in ((128, E4M3), (1, None)))
    with planning() as called:
        cache = KVCache(values, None, slots.long(), k_block_scale=scales)
        norm = Norm(k_weight=w, k_bias=w, kind="layer_norm", of="k")
        words: dict[str, Any] = {"norm": norm, "quantize": DynamicQuantize(hadamard=True), "rotary_dim": 64}
        jitrope.prepare_qkv(q, k, None, table, table, cache=cache, **words)
    assert called
    assert all(spec.dynamic_q and spec.block_cache and not spec.copy_v for spec in called)


def test_refusals() -> None:
    q, k, v, cos, sin, _, _ = tensors("cpu")
    cache = Cache("cpu")

    def call(given: dict[str, Any], v: Any, **words: Any) -> None:
        into = KVCache(slot_mapping=torch.arange(T), **given)
        jitrope.prepare_qkv(q, k, v, cos, sin, rotary_dim=64, layout="thd", cache=into, **words)

    def refused(match: str, v: Any = None, quantize: Any = None, norm: Any = None, **changes: Any) -> None:
        given: dict[str, Any] = {"k_cache": cache.values, "v_cache": None, "k_block_scale": cache.scales, **changes}
        words = {"quantize": quantize} if quantize else {}
        with pytest.raises(InvalidInput, match=match):
            call(given, v, norm=norm, **words)

    refused("v is .*; it must be None, because the cache has no v_cache", v=v)
    refused("v is None; it must be a tensor", v_cache=cache.values, v_block_scale=cache.scales)
    refused("KVCache: v_scale is 1.0; it must be None without v_cache", v_scale=1.0)
    refused("KVCache: v_block_scale is .*; it must be None without v_cache", v_block_scale=cache.scales)
    refused("k_scale is given, but no output is divided by it", k_scale=1.0)
    refused("the norm has v_norm, but v is not given", norm=Norm(v_norm=True))
    halves, e4m3, three = cache.scales.half(), cache.scales.to(E4M3), torch.zeros(5, 4, 1, 3)
    refused(
        r"k_block_scale is float16; it must be \(5, 4, 1, 1\|2\|4\|8\) or",
        k_block_scale=halves,
    )
    refused(
        r"k_block_scale is float8_e4m3fn; it must be \(5, 4, 1, 1\|2\|4\|8\) or \(5, 1, 4, 1, 1\|2\|4\|8\)",
        k_block_scale=e4m3,
    )
    shapes = r"k_block_scale is .*; it must be \(5, 4, 1, 1\|2\|4\|8\) or \(5, 1, 4, 1, 1\|2\|4\|8\)"
    refused(shapes, k_block_scale=three)
    refused("v_block_scale is None; it must be a tensor", v=v, v_cache=cache.values)
    other = Cache("cpu", group=64)
    both = r"v_block_scale is .*; it must be \(5, 4, 1, 1\) or \(5, 1, 4, 1, 1\), float32"
    refused(both, v=v, v_cache=other.values, v_block_scale=other.scales)
    differs = "quantize makes q fp8 with a scale of fp32 for 32 elements, but k_cache and k_block_scale are fp8 with a "
    refused(f"{differs}scale of fp32 for 128 elements; they must match", quantize=DynamicQuantize(group=32))
    powers = DynamicQuantize(scale_fmt="ue8m0")
    refused("quantize makes q fp8 with a scale of ue8m0 in fp32 .*; they must match", quantize=powers)
    refused("are fp8 with a scale of ue8m0 .*; they must match", quantize=DynamicQuantize(), scale_fmt="ue8m0")
    refused("scale_fmt is 'ue8m0'; it must be None without k_block_scale", k_block_scale=None, scale_fmt="ue8m0")
    refused("scale_fmt is 'ue8m0'; it must be None .* with scales in", k_block_scale=e4m3, scale_fmt="ue8m0")
    refused("scale_fmt is 'e8m0'; it must be", scale_fmt="e8m0")
    given = KVCache(cache.values, None, torch.arange(T), k_block_scale=cache.scales, scale_fmt="ue8m0")
    assert "scale_fmt='ue8m0'" in repr(given)
    refused("quantize makes q int8 .*; they must match", quantize=DynamicQuantize(torch.int8))
    refused("k_cache and k_block_scale share memory", k_block_scale=cache.values.view(torch.float32)[..., :1])


def test_compiled_with_symbols_for_the_scales_of_a_head() -> None:
    q, k = torch.randn(2, 3, 8, 128)
    table = jitrope.tables.cos_sin(3, jitrope.tables.inv_freq(rotary_dim=128)[0])

    def stored(k: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        cache = jitrope.KVCache(torch.zeros(8, 8, 128, dtype=torch.int8), None, torch.arange(3), k_block_scale=scale)
        jitrope.prepare_qkv(q, k, None, *table, cache=cache, layout="thd")
        return scale

    want = stored(k, torch.zeros(8, 8, 4))
    assert want.any()
    assert torch.equal(torch.compile(stored, backend="eager", dynamic=True)(k, torch.zeros(8, 8, 4)), want)
