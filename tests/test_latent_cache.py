"""Latent caches of MLA: k_pe is rotated, c_kv is copied, into one cache of rows [c_kv | k_pe] or into two.

c_kv is passed as v, in heads of k_pe's size; both caches are views.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import jitrope
from jitrope import InvalidInput, KVCache, Pages, Quantize

from . import oracle
from .devices import DEVICES

FP8 = torch.float8_e4m3fn
T, HEADS, ROWS, PAGES = 7, 5, 4, 6
SLOTS = (9, 3, -1, 22, 0, 7, 14)


def tensors(device: str, latent: int, rotary: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """(q, with its part that is not rotated; k_pe, a part of a projection; c_kv; a table; ids)."""
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(T, HEADS, 32 + rotary, generator=generator)
    projected = torch.randn(T, latent + rotary, generator=generator)
    c_kv = torch.randn(T, latent, generator=generator)  # after its norm
    table = torch.randn(40, rotary, generator=generator)
    ids = torch.randint(40, (T,), generator=generator)
    q, projected, c_kv = (x.to(device, dtype) for x in (q, projected, c_kv))
    return q, projected[:, None, latent:], c_kv, table.to(device), ids.to(device)


def caches(device: str, latent: int, rotary: int, one: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(c_kv's, k_pe's), (pages, rows, width), full of noise."""
    noise = torch.randn(PAGES, ROWS, latent + rotary, generator=torch.Generator().manual_seed(4)).to(dtype).to(device)
    ckv, kpe = noise.split([latent, rotary], -1)
    return (ckv, kpe) if one else (ckv.contiguous(), kpe.contiguous())


def call(q_pe: Tensor, k_pe: Tensor, c_kv: Tensor, ckv: Tensor, kpe: Tensor, slots: Any, **words: Any) -> Tensor:
    rotary = k_pe.shape[-1]
    cache_words = {name: words.pop(name) for name in ("k_scale", "v_scale") if name in words}
    cache = KVCache(kpe.unsqueeze(-2), ckv.unflatten(-1, (-1, rotary)), slots, **cache_words)
    return jitrope.prepare_qkv(q_pe, k_pe, c_kv.unflatten(-1, (-1, rotary)), layout="thd", cache=cache, **words)[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("paged", [False, True], ids=["slots", "pages"])
@pytest.mark.parametrize("one", [True, False], ids=["one cache", "two caches"])
@pytest.mark.parametrize(
    ("latent", "rotary", "dtype", "stage"),
    [
        (512, 64, torch.bfloat16, "plain"),  # DeepSeek, Kimi, GLM
        (256, 32, torch.float32, "plain"),  # MiniCPM3
        (512, 64, torch.bfloat16, "fp8"),
        (512, 64, torch.float16, "dynamic scales of q"),
        (64, 64, torch.bfloat16, "plain"),
    ],
)
def test_rows_have_latents_and_rotated_keys(
    latent: int, rotary: int, dtype: torch.dtype, stage: str, one: bool, paged: bool, device: str
) -> None:
    q, k_pe, c_kv, table, ids = tensors(device, latent, rotary, dtype)
    stored = FP8 if stage == "fp8" else dtype
    ckv, kpe = caches(device, latent, rotary, one, stored)
    want_ckv, want_kpe = (x.float().flatten(0, 1).clone() for x in (ckv, kpe))
    slots: Any = torch.tensor(SLOTS, device=device)
    places: tuple[int, ...] = SLOTS
    if paged:  # the last 7 tokens of a sequence of 11, in pages 4, 1 and 5
        pages = torch.tensor([[4, 1, 5]], dtype=torch.int32, device=device)
        slots = Pages(pages, seq_lens=torch.tensor([11], dtype=torch.int32, device=device))
        places = tuple((4, 1, 5)[at // ROWS] * ROWS + at % ROWS for at in range(4, 11))
    words: dict[str, Any] = {"cos_sin_cache": table, "positions": ids, "interleaved": True}
    scale = 1.0
    if stage == "fp8":
        words |= {"k_scale": 0.5, "v_scale": 0.5, "quantize": Quantize(0.5)}
        scale = 0.5
    elif stage != "plain":
        words["quantize"] = jitrope.DynamicQuantize()
    q_pe = q[..., 32:]
    (want_q, want_k), _ = oracle.rope(q_pe, k_pe, cos_sin_cache=table, position_ids=ids, interleaved=True, layout="thd")
    for token, slot in enumerate(places):
        if slot >= 0:
            want_kpe[slot], want_ckv[slot] = want_k[token, 0] / scale, c_kv[token].float() / scale
    for _ in range(2):
        got = call(q_pe, k_pe, c_kv, ckv, kpe, slots, **words)
        near = {"rtol": 2**-3, "atol": 2**-9} if stored == FP8 else {"rtol": 2**-7, "atol": 2**-7}
        torch.testing.assert_close(kpe.float().flatten(0, 1), want_kpe, **near)
        torch.testing.assert_close(
            ckv.float().flatten(0, 1), want_ckv, **(near if stored == FP8 else {"rtol": 0, "atol": 0})
        )
        values: Any = got
        if isinstance(values, jitrope.Scaled):
            values = values.values.float() * values.scale[..., None]
        near = {"rtol": 2**-7, "atol": 2**-7} if stage == "plain" else {"rtol": 2**-3, "atol": 0.02}
        torch.testing.assert_close(values.float() * scale, want_q.to(device).float(), **near)


@pytest.mark.parametrize("device", DEVICES)
def test_q_is_rotated_where_it_lies_or_beside_its_absorbed_part(device: str) -> None:
    q, k_pe, c_kv, table, ids = tensors(device, 512, 64, torch.bfloat16)
    words = {"cos_sin_cache": table, "positions": ids}
    slots = torch.tensor(SLOTS, device=device)
    want = call(q[..., 32:], k_pe, c_kv, *caches(device, 512, 64, True, q.dtype), slots, **words)
    absorbed = torch.full((T, HEADS, 576), 7.0, device=device, dtype=q.dtype)
    out = (absorbed[..., 512:], None, None)
    call(q[..., 32:], k_pe, c_kv, *caches(device, 512, 64, True, q.dtype), slots, out=out, **words)
    assert torch.equal(absorbed[..., 512:], want)
    assert (absorbed[..., :512] == 7).all()
    before = q[..., :32].clone()
    call(q[..., 32:], k_pe, c_kv, *caches(device, 512, 64, True, q.dtype), slots, inplace=True, **words)
    assert torch.equal(q[..., 32:], want)
    assert torch.equal(q[..., :32], before)


@pytest.mark.parametrize("device", DEVICES)
def test_it_compiles(device: str) -> None:
    q, k_pe, c_kv, table, ids = tensors(device, 512, 64, torch.bfloat16)
    words = {"cos_sin_cache": table, "positions": ids}
    slots = torch.tensor(SLOTS, device=device)
    found = []
    for wrap in (lambda f: f, lambda f: torch.compile(f, backend="aot_eager", fullgraph=True)):
        both = caches(device, 512, 64, True, q.dtype)
        found.append((wrap(lambda q_pe, to=both: call(q_pe, k_pe, c_kv, *to, slots, **words))(q[..., 32:]), *both))
    assert all(torch.equal(x, y) for x, y in zip(*found))


def test_refusals() -> None:
    q, k, v = torch.randn(T, 4, 64), torch.randn(T, 2, 64), torch.randn(T, 3, 64)
    table, slots = torch.randn(T, 64), torch.arange(T)
    for k_heads, v_heads, text in (
        (2, 3, r"k is .*H=2.* but v is .*H=3.*; v must have as many heads, or a multiple of them"),
        (2, 2, r"v_cache is .*; it must be \(9, 4, 64\), float32"),
        (4, 4, r"k_cache is .*; it must be \(slots, 2, 64\)"),
    ):
        given = v if v_heads == 3 else torch.randn(T, 4, 64)
        cache = KVCache(torch.zeros(9, k_heads, 64), torch.zeros(9, v_heads, 64), slots)
        with pytest.raises(InvalidInput, match=text):
            jitrope.prepare_qkv(q, k, given, cos_sin_cache=table, layout="thd", cache=cache)
