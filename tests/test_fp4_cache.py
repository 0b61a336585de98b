"""KV caches in NVFP4 with block scales beside them: values, places, stages, torch's machinery, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import jitrope
from jitrope import DynamicQuantize, InvalidInput, KVCache, Pages, planning

from .devices import DEVICES
from .test_arguments import STRANGERS
from .test_quantize import FP4, FP8, inputs, scaled_in_two_levels

PAGES, ROWS = 5, 8
FORMS = ("slots", "NHD", "HND", "fours", "one page", "odd rows", "two orders")
"""fours: the rows of v's scales are in fours, as trtllm-gen reads them; one page: values and scales in one page; odd
rows: a byte behind each head; two orders: k's heads lie before the rows of a page, v's behind."""


class Caches:
    """Caches full of noise in a form, and the same memory as (slots, heads, elements or groups) of bytes."""

    def __init__(self, form: str, heads: tuple[int, int], dim: int, device: str) -> None:
        generator = torch.Generator().manual_seed(5)
        self.words: dict[str, Any] = {}
        self.form, self.dim, self.device, self.generator = form, dim, device, generator
        for letter, count in zip("kv", heads):
            whole = self._noise(PAGES, count * ROWS * (dim // 2 + dim // 16))
            values, scales = whole.split([count * ROWS * dim // 2, count * ROWS * dim // 16], 1)
            if form != "one page":
                values, scales = values.clone(), scales.clone()
            values = self._shaped(values, count, dim // 2, letter)
            if form == "odd rows":
                values = torch.nn.functional.pad(values, (0, 1))[..., :-1]
            self.words[f"{letter}_cache"] = values.view(FP4)
            fours = form == "fours" and letter == "v"
            found = self._shaped(scales, count, dim // 16, letter) if not fours else (
                scales.view(PAGES, count, ROWS // 4, dim // 16, 4).permute(0, 2, 4, 1, 3)
            )  # fmt: skip
            self.words[f"{letter}_block_scale"] = found.view(FP8)
        if form == "slots":
            self.words = {name: x.flatten(0, 1) for name, x in self.words.items()}
        self.before = self.rows()

    def _noise(self, *shape: int) -> Tensor:
        return torch.randint(1, 120, shape, generator=self.generator, dtype=torch.uint8).to(self.device)

    def _shaped(self, flat: Tensor, heads: int, size: int, letter: str) -> Tensor:
        if self.form in ("slots", "NHD", "odd rows") or (self.form, letter) == ("two orders", "v"):
            return flat.view(PAGES, ROWS, heads, size)
        return flat.view(PAGES, heads, ROWS, size).transpose(1, 2)

    def rows(self) -> dict[str, Tensor]:
        found = {name: x.view(torch.uint8).cpu() for name, x in self.words.items()}
        return {name: x.reshape(PAGES * ROWS, *x.shape[-2:]).clone() for name, x in found.items()}


def check(caches: Caches, slots: list[int], k: Tensor, v: Tensor, scales: dict[str, Any], cleared: Any = ()) -> None:
    """Each slot has its token's values and scales, cleared ones have zeros, and all others have what they had."""
    rows, kept = caches.rows(), [(n, slot) for n, slot in enumerate(slots) if 0 <= slot < PAGES * ROWS]
    for letter, x in (("k", k), ("v", v)):
        whole = torch.as_tensor(scales.get(f"{letter}_scale", 1.0), device=x.device)
        values, scale = scaled_in_two_levels(x, 16, whole[:, None] if whole.dim() else whole)
        for name, want in ((f"{letter}_cache", values), (f"{letter}_block_scale", scale)):
            expected = caches.before[name].clone()
            flat = want.view(torch.uint8).cpu().flatten(0, 1)
            for n, slot in kept:
                expected[slot] = flat[n]
            for slot in cleared:
                expected[slot] = 0
            assert torch.equal(rows[name], expected), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dim", [64, 128, 80])
@pytest.mark.parametrize("form", FORMS)
def test_values_and_scales_in_their_places(form: str, dim: int, device: str) -> None:
    """The bits of a rotation in fp32 and of NVFP4; padding and slots past the end; the second call is a known one."""
    q, k, cos, sin = inputs(device, 2, 6, 4, dim)
    v, slots = k.flip(1), [3, 17, -1, 39, 22, 9, 40, 5, 8, 1, 0, 30]
    rotated = jitrope.apply_rope(k.float(), None, cos, sin)[0]
    scales = {"k_scale": 0.004, "v_scale": torch.tensor([0.01, 0.02], device=device)}
    for given in ({}, scales):
        for _ in range(2):
            caches = Caches(form, (2, 2), dim, device)
            cache = KVCache(**caches.words, slot_mapping=torch.tensor(slots, device=device), **given)
            got = jitrope.prepare_qkv(q, k, v, cos, sin, cache=cache)
            assert torch.equal(got[0], jitrope.apply_rope(q, None, cos, sin)[0])
            assert got[1] is None
            check(caches, slots, rotated, v, given)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", FORMS[1:])
def test_pages_of_sequences(form: str, device: str) -> None:
    """Two sequences by a page table; the rest of each last page is cleared, with its scales."""
    q, k, cos, sin = inputs(device, 1, 6, 4, 64)
    q, k = q[0], k[0]
    v, ids = k.flip(0), torch.tensor([3, 4, 5, 0, 1, 2], device=device)
    table, lengths = torch.tensor([[4, 1], [2, 0]], device=device), torch.tensor([10, 3], device=device)
    caches = Caches(form, (2, 2), 64, device)
    cache = KVCache(**{name: caches.words[name] for name in caches.words},
                    slot_mapping=Pages(table, seq_lens=lengths, clear_page=True))  # fmt: skip
    jitrope.prepare_qkv(q, k, v, cos, sin, positions=ids, cache=cache, layout="thd")
    rotated = jitrope.apply_rope(k.float(), None, cos, sin, positions=ids, layout="thd")[0]
    slots = [4 * ROWS + 7, ROWS, ROWS + 1, 2 * ROWS, 2 * ROWS + 1, 2 * ROWS + 2]
    cleared = [*range(ROWS + 2, 2 * ROWS), *range(2 * ROWS + 3, 3 * ROWS)]
    check(caches, slots, rotated[None], v[None], {}, cleared)


def test_planned() -> None:
    names = {"k_cache": "fp4", "v_cache": "fp4", "k_block_scale": "fp8", "v_block_scale": "fp8"}
    q, k = (torch.empty(1, 4096, n, 128, dtype=torch.bfloat16, device="meta") for n in (32, 8))
    table = torch.empty(4096, 64, device="meta")
    caches = {name: torch.empty(4096, 8, 128 // 2 if x == "fp4" else 8, device="meta", dtype=FP4 if x == "fp4" else FP8)
              for name, x in names.items()}  # fmt: skip
    with planning() as called:
        cache = KVCache(**caches, slot_mapping=torch.empty(4096, dtype=torch.int64, device="meta"))
        jitrope.prepare_qkv(q, k, k, table, table, cache=cache)
    assert all(spec.block_cache and "block_cache" in spec.name for spec in called)


def test_refusals() -> None:
    q, k, cos, sin = inputs("cpu", 1, 6, 4, 64)
    slots = torch.arange(6)

    def refused(match: str, d: int = 64, **changes: Any) -> None:
        words = {**Caches("NHD", (2, 2), 64, "cpu").words, "slot_mapping": slots}
        call = {name: changes.pop(name) for name in ("quantize", "freqs", "q") if name in changes}
        tables = () if "freqs" in call else (cos[:, : d // 2], sin[:, : d // 2])
        heads = [x[..., :d] for x in (call.pop("q", q), k, k)]
        with pytest.raises(InvalidInput, match=match):
            jitrope.prepare_qkv(*heads, *tables, cache=KVCache(**{**words, **changes}), **call)

    refused("KVCache: v_block_scale is None; it must be a tensor", v_block_scale=None)
    refused("KVCache: k_block_scale is 1.0; it must be a tensor", k_block_scale=1.0)
    for _, stranger in STRANGERS:
        refused("v_block_scale", v_block_scale=stranger)
    scale = torch.zeros(PAGES, ROWS, 2, 4)
    refused(
        r"v_block_scale is float8_e4m3fn; it must be \(5, 8, 2, 4\) or \(5, 2, 4, 2, 4\), float32", k_block_scale=scale
    )
    refused(
        r"v_block_scale is .*; it must be \(5, 8, 2, 4\) or \(5, 2, 4, 2, 4\), float8_e4m3fn",
        v_block_scale=scale.to(FP8)[..., :3],
    )
    refused("v_block_scale has strides .*; its elements overlap in memory", v_block_scale=scale.to(FP8)[:1].expand(
        PAGES, ROWS, 2, 4))  # fmt: skip
    refused(
        r"k_cache is bfloat16; it must be .*, float8_e4m3fn or float8_e5m2 or int8 or float4",
        k_cache=torch.zeros(PAGES, ROWS, 2, 32).bfloat16(),
    )
    refused(
        r"k_cache is .*; it must be \(slots, 2, 32\) or \(pages, rows, 2, 32\)",
        k_cache=torch.zeros(PAGES, ROWS, 2, 64).to(torch.uint8).view(FP4),
    )
    refused(
        r"k_block_scale is float8_e4m3fn; it must be \(5, 8, 2, 1\|2\|4\) or \(5, 2, 4, 2, 1\|2\|4\)",
        k_cache=torch.zeros(PAGES, ROWS, 2, 64).to(FP8),
    )
    refused(r"k_block_scale is .*; it must be \(5, 8, 2, 1\) or \(5, 2, 4, 2, 1\)", d=40,
            k_cache=torch.zeros(PAGES, ROWS, 2, 20, dtype=torch.uint8).view(FP4))  # fmt: skip
    refused(r"k_scale is .*; it must be \(\) or \(2,\) or \(1, 2\), float32", k_scale=torch.ones(3))
    refused(
        "quantize makes q fp8 .*, but k_cache and k_block_scale are fp4 .*; they must match", quantize=DynamicQuantize()
    )
    refused("k_cache has strides .*; the last must be 1", k_cache=torch.zeros(PAGES, ROWS, 32, 2).to(FP8).view(
        torch.uint8).view(FP4).mT)  # fmt: skip
    refused("fp4 needs aligned pairs", q=q.mT.contiguous().mT)
    words = Caches("NHD", (2, 2), 64, "cpu").words
    shared = words["k_cache"].view(torch.uint8).flatten()[: scale.numel()].view(FP8).view(scale.shape)
    refused("k_cache and k_block_scale share memory", k_cache=words["k_cache"], k_block_scale=shared)
    refused("k_cache is .*; it must be", k_block_scale=None,
            v_block_scale=None)  # fmt: skip
