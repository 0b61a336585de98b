"""Words of training beside caches and conversions: packed sequences, their ranks, scaled angles, a host's rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import jitrope
from jitrope import DynamicQuantize, InvalidInput, KVCache, Norm, Packed, Pages, Quantize, Scaled

from .devices import DEVICES

T, PAGES, ROWS = 13, 4, 8
FP8 = torch.float8_e4m3fn
STAGES: dict[str, Any] = {
    "cache": {},
    "fp8 cache": {"quantize": Quantize(0.05)},
    "cache and dynamic scales": {"quantize": DynamicQuantize()},
    "cache, transform and dynamic scales": {"quantize": DynamicQuantize(hadamard=True)},
    "fp8": {"quantize": Quantize(0.05, 0.05)},
    "dynamic scales": {"quantize": DynamicQuantize(torch.int8, hadamard=True)},
    "scales of heads": {"quantize": DynamicQuantize(per="head")},
}
NORMS: dict[str, Any] = {"none": None, "norm": Norm(), "after": Norm(after_rope=True)}


def tensors(device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((T, 4, 64), (T, 2, 64), (T, 2, 64), (40, 32))
    return [torch.randn(shape, generator=generator).to(device) for shape in shapes]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("stage", list(STAGES)[1:])
@pytest.mark.parametrize(
    ("rounding", "norm"),
    [("complex64", "none"), ("complex128", "norm"), *[("dtype", norm) for norm in NORMS], ("addcmul", "after")],
)
def test_a_conversion_has_the_bits_of_a_hosts_rounding(rounding: str, norm: str, stage: str, device: str) -> None:
    """Against a second call, which converts what a first one has rotated: in fp32, with "dtype" in q's dtype."""
    q, k, v, angles = (x.bfloat16() for x in tensors(device))
    tables = angles.float().cos(), angles.float().sin()
    wide = torch.bfloat16 if rounding == "dtype" else torch.float32
    host: dict[str, Any] = {"layout": "thd", "interleaved": True, "rounding": rounding, "unrotated": 2}
    host |= {} if norm == "none" else {"norm": NORMS[norm]}
    quantize = STAGES[stage]["quantize"]
    found: list[list[Tensor]] = []
    for once in (True, False):
        caches: dict[str, Any] = {}
        scales = {"k_scale": 0.05, "v_scale": 0.05} if stage == "fp8 cache" else {}
        if "cache" in stage:
            caches = {f"{x}_cache": torch.zeros(T, 2, 64, device=device).to(FP8 if scales else wide) for x in "kv"}
        own = {"cache": KVCache(**caches, slot_mapping=torch.arange(T, device=device), **scales)} if caches else {}
        if once and caches and not scales:
            caches["k_cache"], caches["v_cache"] = (x.bfloat16() for x in caches.values())
            own = {"cache": KVCache(**caches, slot_mapping=torch.arange(T, device=device))}
        if once:
            got = jitrope.prepare_qkv(q, k, v, *tables, **host, **own, quantize=quantize)
        else:
            a, b, c = (x.to(wide) for x in (q, k, v))
            a, b, c = jitrope.prepare_qkv(a, b, c, *tables, **host, out=(None, None, None))
            if rounding == "dtype" and quantize.words.get("hadamard"):  # the transform rounds too
                a, b, c = jitrope.prepare_qkv(a, b, c, layout="thd", hadamard=True)
                quantize = DynamicQuantize(torch.int8 if stage == "dynamic scales" else FP8)
            got = jitrope.prepare_qkv(a, b, c, layout="thd", **own, quantize=quantize)
        parts = [x for y in got[:2] if y is not None for x in (y if isinstance(y, Scaled) else (y,))]
        found.append([x.float().to(torch.bfloat16) for x in (*parts, *caches.values())])
    for x, y in zip(*found):
        assert torch.equal(x, y)


@pytest.mark.parametrize("device", DEVICES)
def test_sequences_and_their_pages(device: str) -> None:
    """One list of offsets serves both; there must be as many sequences of pages."""
    q, k, v, angles = tensors(device)
    tables = angles.cos(), angles.sin()
    caches = [torch.zeros(PAGES, ROWS, 2, 64, device=device) for _ in range(2)]
    offsets = torch.tensor([0, 4, 4, 11], device=device)
    starts = torch.tensor([2, 5, 3], device=device)  # tokens that are in the pages already
    lengths = starts + offsets.diff()
    table = torch.tensor([[2, 0], [0, 0], [3, 1]], device=device)
    packed = Packed(offsets, start_positions=starts)
    pages = Pages(table, seq_lens=lengths, cu_seqlens_q=offsets)
    got, _, _ = jitrope.prepare_qkv(q, k, v, *tables, positions=packed, cache=KVCache(*caches, pages))
    want, rotated = jitrope.apply_rope(q, k, *tables, positions=packed)
    assert torch.equal(got, want)
    for first, end, at, row in ((0, 4, 2, 0), (4, 11, 3, 2)):
        for cache, x in zip(caches, (rotated, v)):
            stored = cache[table[row]].flatten(0, 1)[at : at + end - first]
            assert torch.equal(stored, x[first:end])
    assert sum(int((cache != 0).any(-1).sum()) for cache in caches) == 2 * 2 * 11
    wrong = Pages(table, seq_lens=lengths[:2], cu_seqlens_q=offsets[:3])
    with pytest.raises(InvalidInput, match=r"cu_seqlens is .*; it must be \(3,\), int32 or int64, contiguous"):
        jitrope.prepare_qkv(q, k, v, *tables, positions=packed, cache=KVCache(*caches, wrong))
