"""Fused functions of vLLM, SGLang and FlashInfer: jitrope's of the same names against plain torch, and signatures.

The hosts' kernels need a GPU, so results are compared with formulas that do not use jitrope. The hosts' signatures are
read from their wheels, which are not installed.
"""

from __future__ import annotations

import ast
import inspect
import sys
import zipfile
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import jitrope
from jitrope.integrations import flashinfer, sglang, sglang_diffusion, vllm, vllm_omni

from .devices import DEVICES
from .hosts import HOSTS, missing, stand_in
from .test_serving_hosts import pick_rows, table, turn

FP8, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
T, HQ, HK, D = 10, 8, 2, 64
IDS = torch.randint(0, 50, (T,), generator=torch.Generator().manual_seed(1))
COMMANDS = {
    "vllm": "pip download --no-deps --only-binary :all: -d build/hosts vllm==0.33.0",
    "sglang": "pip download --no-deps --only-binary :all: -d build/hosts sglang==0.5.23",
    "flashinfer_python": "pip download --no-deps -d build/hosts flashinfer-python==0.7.2.post1",
    "vllm_omni": "pip download --no-deps --only-binary :all: -d build/hosts vllm-omni==0.30.0",
    "xfuser": "pip download --no-deps --only-binary :all: -d build/hosts xfuser==0.7.0",
}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def normed(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def near(a: Tensor, b: Tensor, tolerance: float = 2e-5) -> bool:
    """Whether two results have one shape and nearly the same values."""
    a, b = a.cpu().float(), b.cpu().float()
    return a.shape == b.shape and torch.allclose(a, b, rtol=tolerance, atol=tolerance)


def in_fp8(x: Tensor, factor: float, dtype: torch.dtype = FP8) -> Tensor:
    largest = torch.finfo(dtype).max
    return (x * factor).clamp(-largest, largest).to(dtype)


# ---- norm and rope -------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("neox", [True, False])
def test_norm_rope_in_packed_qkv(neox: bool, device: str) -> None:
    """v stays as it is."""
    qkv, weights, cache = random(T, HQ + 2 * HK, D), (random(D, seed=2), random(D, seed=3)), table(50, 48)
    want = qkv.clone()
    for part, weight in zip((slice(HQ), slice(HQ, HQ + HK)), weights):
        want[:, part] = turn(normed(qkv[:, part], weight), cache[IDS], neox)
    got = qkv.flatten(1).to(device, copy=True)
    given = [x.to(device) for x in (*weights, cache)]
    vllm.fused_qk_norm_rope(got, HQ, HK, HK, D, 1e-6, *given, neox, IDS.to(device))
    assert near(got, want.flatten(1))
    assert torch.equal(got.cpu()[:, -HK * D :], qkv.flatten(1)[:, -HK * D :])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("section", [None, [6, 5, 5]])
def test_norm_rope_and_gate(section: list[int] | None, device: str) -> None:
    """A factor of 1 + weight, half a head rotated, and positions along three axes; the gate is a copy."""
    q_gate, k, cache = random(T, HQ, 2, D), random(T, HK, D, seed=4), table(50, 32)
    weights = random(D, seed=2), random(D, seed=3)
    ids = IDS if section is None else torch.stack((IDS, IDS.flip(0), IDS.roll(3)))
    rows = cache[IDS] if section is None else pick_rows(cache, ids, section, True)
    wants = [turn(normed(x, 1 + w), rows, True) for x, w in zip((q_gate[:, :, 0], k), weights)]
    given = [x.to(device) for x in (q_gate.flatten(1), k.flatten(1), *weights, cache, ids)]
    words = {"mrope_section": section, "norm_beta": 1.0}
    q, keys, gate = vllm.fused_qk_rmsnorm_rope_gate(*given, 1e-6, HQ, HK, D, 32, **words)
    assert near(q, wants[0].flatten(1))
    assert near(keys, wants[1].flatten(1))
    assert torch.equal(gate.cpu(), q_gate[:, :, 1].flatten(1))


# ---- SGLang's, with norms ------------------------------------------------------------------------


def yarn(width: int, base: float, factor: float, low: float, high: float) -> Tensor:
    """Frequencies, pair by pair."""
    found = []
    for pair in range(width // 2):
        full = base ** (-2 * pair / width)
        part = min(max((pair - low) / max(high - low, 1e-3), 0.0), 1.0)
        found.append(full * (1 - part) + full / factor * part)
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("device", DEVICES)
def test_sglang_norm_rope_by_a_table(device: str) -> None:
    """The first heads of a wider buffer; groups of heads in any place, and one alone."""
    qkv, weights, cache = random(T, HQ + 2 * HK, D), (random(D, seed=2), random(D, seed=3)), table(50, D)
    given = [x.to(device) for x in (*weights, cache, IDS)]
    for groups, added in (((0, HQ), (HQ, HK)), 0), (((HK, HQ), (0, HK)), 1), (((0, 0), (2, 3)), 1):
        want, got = qkv.clone(), qkv.flatten(1).to(device, copy=True)
        for (first, count), weight in zip(groups, weights):
            part = slice(first, first + count)
            want[:, part] = turn(normed(qkv[:, part], added + weight), cache[IDS], True)
        if added:
            some = [(weight, *group) for weight, group in zip(given, groups)]
            assert sglang.minimax_qknorm_rope_grouped(got, some, *given[2:], 1e-6) is got
        else:
            sglang.table_qk_norm_rope_(got, given[3], *given[:3], HQ, HK, D, 1e-6)
        assert near(got, want.flatten(1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("factor", [1.0, 4.0])
@pytest.mark.parametrize(("rotary", "neox"), [(None, True), (48, False)])
def test_sglang_norm_rope_by_frequencies(rotary: int | None, neox: bool, factor: float, device: str) -> None:
    """Also with YaRN, whose factor multiplies the rotated elements alone."""
    qkv, weights = random(T, HQ + 2 * HK, D), (random(D, seed=2), random(D, seed=3))
    width, mscale = rotary or D, 1.0 if factor == 1 else 1.25
    angles = torch.outer(IDS.double(), yarn(width, 1e4, factor, 3.0, 11.0))
    rows = (torch.cat((angles.cos(), angles.sin()), -1) * mscale).float()
    want, got = qkv.clone(), qkv.flatten(1).to(device, copy=True)
    for part, weight in zip((slice(HQ), slice(HQ, HQ + HK)), weights):
        want[:, part] = turn(normed(qkv[:, part], weight), rows, neox)
    given = [x.to(device) for x in (*weights, IDS.int())]
    words = {"rotary_dim": rotary} if rotary else {}
    ramp = factor, 3.0, 11.0, mscale
    sglang.fused_qk_norm_rope(got, HQ, HK, HK, D, 1e-6, *given[:2], 1e4, neox, given[2], *ramp, **words)
    assert near(got, want.flatten(1))


AXES = {
    "sections": [0] * 6 + [1] * 5 + [2] * 5,
    "in turn": [0, 1, 2] * 5 + [0],
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("axes", [None, *AXES])
def test_sglang_norm_rope_and_gate(axes: str | None, gate: bool, device: str) -> None:
    """Also by positions along three axes, with a map of the pairs' axes on the device."""
    q_gate, k, cache = random(T, HQ, 1 + gate, D), random(T, HK, D, seed=4), table(50, 32)
    weights = random(D, seed=2), random(D, seed=3)
    ids = IDS if axes is None else torch.stack((IDS, IDS.flip(0), IDS.roll(3)))
    rows = cache[IDS] if axes is None else pick_rows(cache, ids, [6, 5, 5], axes == "in turn")
    given = [x.to(device) for x in (q_gate.flatten(1), k.flatten(1), *weights, cache, ids)]
    map_ = None if axes is None else torch.zeros(16, dtype=torch.int64, device=device)
    if axes is not None:
        sglang.fused_qk_gemma_rmsnorm_rope_gate(*given, 1e-6, HQ, HK, D, 32, gate, map_)
        map_.copy_(torch.tensor(AXES[axes]))
    for _ in range(2):  # the map is read once after it was written
        q, keys, copy = sglang.fused_qk_gemma_rmsnorm_rope_gate(*given, 1e-6, HQ, HK, D, 32, gate, map_)
        assert near(q, turn(normed(q_gate[:, :, 0], 1 + weights[0]), rows, True).flatten(1))
        assert near(keys, turn(normed(k, 1 + weights[1]), rows, True).flatten(1))
        assert torch.equal(copy.cpu(), q_gate[:, :, 1]) if gate else copy is None


@pytest.mark.parametrize("device", DEVICES)
def test_sglang_norms_of_q_k_and_v(device: str) -> None:
    """All three in place, inside packed QKV."""
    qkv, weights, cache = random(T, HQ + 2 * HK, D), (random(D, seed=2), random(D, seed=3)), table(50, 32)
    got = qkv.flatten(1).to(device, copy=True)
    parts = got.split([HQ * D, HK * D, HK * D], 1)
    sglang.gemma_qkv_norm_rope(*parts, *[x.to(device) for x in (*weights, cache, IDS)], HQ, HK, D, 32, 1e-6)
    q, k, v = qkv.split([HQ, HK, HK], 1)
    turned = [turn(normed(x, weight), cache[IDS], True) for x, weight in zip((q, k), weights)]
    assert near(got, torch.cat((*turned, normed(v)), 1).flatten(1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("neox", "rotary", "full"), [(True, D, False), (False, 32, False), (True, 32, True), (False, D, True)]
)
def test_sglang_diffusion(neox: bool, rotary: int, full: bool, device: str) -> None:
    """In place and into other tensors, from a packed projection, with cosines of pairs and of elements."""
    qkv, weights, pairs = random(T, HQ + HK, D), (random(D, seed=2), random(D, seed=3)), table(50, rotary)
    parts = [x.repeat(1, 2) if neox else x.repeat_interleave(2, -1) for x in pairs.chunk(2, -1)]
    cache = torch.cat(parts, -1) if full else pairs
    wants = [turn(normed(x, w), pairs[IDS], neox) for x, w in zip(qkv.split([HQ, HK], 1), weights)]
    got = qkv.to(device, copy=True)
    given = [x.to(device) for x in (*weights, cache, IDS)]
    words: dict[str, Any] = {"is_neox": neox, "cache_has_full_width": full}
    outs = [torch.empty(x.shape, device=device) for x in wants]
    sglang_diffusion.fused_qknorm_rope_out_of_place(*got.split([HQ, HK], 1), *outs, *given, **words, rope_dim=rotary)
    assert torch.equal(got.cpu(), qkv)
    assert all(near(a, b) for a, b in zip(outs, wants))
    sglang_diffusion.fused_inplace_qknorm_rope(*got.split([HQ, HK], 1), *given, **words, head_dim=D)
    assert near(got, torch.cat(wants, 1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sglang_diffusion_rounds_like_separate_functions(dtype: torch.dtype, device: str) -> None:
    """The norm is rounded first and, with a table in bf16, the products too: the bits of torch's own bf16."""
    half = torch.bfloat16
    q, k, w, cache = (
        random(T, HQ, D).to(half),
        random(T, HK, D, seed=4).to(half),
        random(D, seed=2).to(half),
        table(50, D),
    )
    cache = cache.to(dtype)
    cos, sin = (x.unsqueeze(1) for x in cache[IDS].chunk(2, -1))
    wants = []
    for x in (q, k):
        a, b = normed(x.float(), w.float()).to(half).chunk(2, -1)
        wants.append(torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(half))
    got = [x.to(device, copy=True) for x in (q, k)]
    given = [x.to(device) for x in (w, w, cache, IDS)]
    sglang_diffusion.fused_inplace_qknorm_rope(*got, *given, is_neox=True, round_norm_before_rope=True)
    for a, b in zip(got, wants):  # a GPU adds squares in another order
        assert (a.cpu() != b).float().mean() < (0.01 if device == "cuda" else 1e-9)
        torch.testing.assert_close(a.cpu(), b, rtol=2**-6, atol=2**-8)


@pytest.mark.parametrize("device", DEVICES)
def test_sglang_norm_across_heads(device: str) -> None:
    """A table of five rows for two samples of five tokens, and a projection with other columns."""
    wide, weight, cache = random(T, HQ * D + 64), random(HQ * D, seed=2), table(5, D)
    got = wide.to(device, copy=True)
    x = got[:, : HQ * D]
    assert sglang_diffusion.fused_rmsnorm_interleaved_rope_(x, weight.to(device), cache.to(device), 1e-6, D) is x
    heads = normed(wide[:, : HQ * D], weight).view(T, HQ, D)
    want = turn(heads, cache[torch.arange(T) % 5], False).flatten(1)
    assert near(got, torch.cat((want, wide[:, HQ * D :]), 1))


# ---- with a cache --------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["auto", "fp8"])
@pytest.mark.parametrize("rotary", [48, 0])
def test_norm_rope_and_cache(rotary: int, kind: str, device: str) -> None:
    """The results are fresh, qkv stays, and padding is not stored."""
    qkv, weights, cache = random(T, HQ + 2 * HK, D), (random(D, seed=2), random(D, seed=3)), table(50, 48)
    slots, scale = torch.tensor([5, -1, 31, 0, 16, 15, 7, -1, 8, 2]), 0.5 if kind == "fp8" else 1.0
    pages = torch.zeros(2, 4, 8, HK, D).to(device, FP8 if kind == "fp8" else torch.float32)
    heads = [normed(x, w) for x, w in zip(qkv.split([HQ, HK, HK], 1), weights)]
    q, k = (turn(x, cache[IDS], True) if rotary else x for x in heads)
    v, before = qkv[:, -HK:], qkv.flatten(1).to(device, copy=True)
    given = [x.to(device) for x in (*weights, cache, IDS, slots)]
    scales = torch.tensor(scale, device=device), torch.tensor(2 * scale, device=device)
    found = vllm.fused_qknorm_rope_cache(before, *given, *pages, HQ, HK, D, rotary, 1e-6, 0.0, kind, *scales)
    assert all(near(a, b.flatten(1)) for a, b in zip(found, (q, k, v)))
    assert torch.equal(before.cpu(), qkv.flatten(1))
    for stored, x, unit in zip(pages, (k, v), (scale, 2 * scale)):
        want = torch.zeros(32, HK, D)
        want[slots[slots >= 0]] = in_fp8(x, 1 / unit).float()[slots >= 0] if kind == "fp8" else x[slots >= 0]
        assert near(stored.float().view(32, HK, D), want, 0.13 if kind == "fp8" else 2e-5)
        assert torch.equal(stored.float().view(32, HK, D).cpu() == 0, want == 0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["auto", "fp8"])
def test_mla_rope_and_cache(kind: str, device: str) -> None:
    latent, k_pe, q_pe, cache = random(T, 256), random(T, 64, seed=2), random(T, HQ, 64, seed=3), table(50, 64)
    slots = torch.tensor([5, -1, 31, 0, 16, 15, 7, -1, 8, 2])
    stored = torch.zeros(4, 8, 320).to(device, torch.uint8 if kind == "fp8" else torch.float32)
    q, k, at, scale = q_pe.to(device, copy=True), k_pe.to(device, copy=True), cache.to(device), torch.tensor(0.5)
    given = IDS.to(device), q, k, latent.to(device), at, False, slots.to(device), stored, kind, scale.to(device)
    vllm.concat_and_cache_mla_rope_fused(*given)
    turned = turn(k_pe[:, None], cache[IDS], False)[:, 0]
    assert near(q, turn(q_pe, cache[IDS], False))
    assert near(k, turned)
    want, whole = torch.zeros(32, 320), torch.cat((latent, turned), -1)
    want[slots[slots >= 0]] = (in_fp8(whole, 2.0).float() if kind == "fp8" else whole)[slots >= 0]
    got = stored.view(FP8) if kind == "fp8" else stored
    assert near(got.float().view(32, 320), want, 0.13 if kind == "fp8" else 2e-5)


# ---- conversions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [FP8, E5M2])
@pytest.mark.parametrize("outs", [False, True])
@pytest.mark.parametrize("mla", [False, True])
def test_rope_quantize(mla: bool, outs: bool, dtype: torch.dtype, device: str) -> None:
    ropes = random(T, HQ, D), random(T, *(() if mla else (HK,)), D, seed=2)
    rests = random(T, HQ, 128, seed=3), random(T, *(() if mla else (HK,)), 128, seed=4)
    cache, parts = table(50, D), [*ropes, *rests]
    given = [torch.empty(x.shape, dtype=dtype, device=device) for x in parts] if outs else [None] * 4
    words = {"quant_scale_q": 0.5, "quant_scale_kv": 2.0}
    words.update(zip(("q_rope_out", "k_rope_out", "q_nope_out", "k_nope_out"), given))
    at = cache.to(device), IDS.to(device), False, None if outs else dtype
    found = flashinfer.rope_quantize_fp8(*[x.to(device) for x in parts], *at, **words)
    rows = cache[IDS]
    turned = [turn(ropes[0], rows, False), turn(ropes[1].view(T, -1, D), rows, False).view(ropes[1].shape)]
    for got, out, x, factor in zip(found, given, (*turned, *rests), (0.5, 2.0) * 2):
        assert out is None or got.data_ptr() == out.data_ptr()
        assert got.dtype == dtype
        assert near(got, in_fp8(x, factor, dtype), 0.13 if dtype == FP8 else 0.26)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("outs", [False, True])
@pytest.mark.parametrize("form", ["whole", "partial", "HND", "mla"])
def test_rope_quantize_append(form: str, outs: bool, device: str) -> None:
    """Two requests; a token of no request is not stored."""
    mla, rest = form == "mla", {"partial": 32, "mla": 256}.get(form, 0)
    q_rope, k_rope = random(T, HQ, D), random(T, *(() if mla else (HK,)), D, seed=2)
    q_nope, k_nope = random(T, HQ, rest, seed=3), random(T, *(() if mla else (HK,)), rest, seed=4)
    v = None if mla else random(T, HK, D + rest, seed=5)
    indices, indptr, requests = torch.tensor([2, 0, 1]), torch.tensor([0, 2, 3]), torch.tensor([0] * 6 + [1] * 3 + [-1])
    places = torch.tensor([6, 7, 8, 9, 10, 11, 0, 1, 2, 3])
    slots = torch.tensor([22, 23, 0, 1, 2, 3, 8, 9, 10])
    cache, rows = table(50, D), table(50, D)[IDS]
    shapes = [(3, 8, rest), (3, 8, D)] if mla else [(3, 8, HK, D + rest)] * 2
    pages = [torch.zeros(shape).to(device, FP8) for shape in shapes]
    pages = [x.transpose(1, 2).contiguous() for x in pages] if form == "HND" else pages
    names = ("q_rope_out", "q_nope_out")
    given = [torch.zeros(x.shape).to(device, FP8) if outs else None for x in (q_rope, q_nope)]
    words: dict[str, Any] = {**dict(zip(names, given)), "quant_scale_q": 0.5, "quant_scale_kv": 2.0, "page_size": 8}
    ropes, rests = [q_rope, k_rope], [q_nope, k_nope] if rest else [None, None]
    parts = [None if x is None else x.to(device) for x in (*ropes, *rests, v)]
    at = cache.to(device), IDS.to(device), tuple(pages), *[x.to(device) for x in (indices, indptr, requests, places)]
    layout = "HND" if form == "HND" else "NHD"
    found = flashinfer.rope_quantize_fp8_append_paged_kv_cache(*parts, *at, kv_layout=layout, **words)
    assert near(found[0], in_fp8(turn(q_rope, rows, True), 0.5), 0.13)
    assert near(found[1], in_fp8(q_nope, 0.5), 0.13)
    assert all(out is None or got.data_ptr() == out.data_ptr() for got, out in zip(found, given))
    assert all(x.is_contiguous() for x in found)
    turned = turn(k_rope.view(T, -1, D), rows, True)
    k = turned[:, 0] if mla else torch.cat((turned, k_nope), -1)
    for stored, x in zip(pages, (k_nope, k) if mla else (k, v)):
        stored = stored.transpose(1, 2) if form == "HND" else stored
        want = torch.zeros(24, *stored.shape[2:])
        want[slots] = in_fp8(x, 2.0).float()[:9]
        assert near(stored.float().reshape(want.shape), want, 0.13)


# Requests: new tokens, and lengths with them. The second has no new token, and the last token is of no request.
INDPTR, LENGTHS = torch.tensor([0, 4, 4, 9]), torch.tensor([10, 3, 17])
TABLE, SLOTS = torch.tensor([[2, 0, 0], [5, 0, 0], [4, 1, 3]]), [22, 23, 0, 1, 12, 13, 14, 15, 24]
NEW = torch.tensor([6, 7, 8, 9, 12, 13, 14, 15, 16])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", [0, 1, 2])
@pytest.mark.parametrize("form", ["plain", "out", "dynamic", "static"])
def test_norm_rope_append(form: str, policy: int, device: str) -> None:
    """k and v go to each request's pages, whose unused rows become zero; with fp8 each head of q has a scale."""
    qkv, weights, cache = random(T, HQ + 2 * HK, D), (random(D, seed=2), random(D, seed=3)), table(50, D)
    fp8 = form in ("dynamic", "static")
    pages = torch.ones(2, 6, 8, HK, D).to(FP8 if fp8 else torch.float32).to(device)
    wants = []
    for x, w in zip(qkv[:9].split([HQ, HK, HK], 1), weights):
        x = normed(x, w) if policy == 2 else x
        x = turn(x, cache[NEW], True)
        wants.append(normed(x, w) if policy == 1 else x)
    q, k, v = *wants, qkv[:9, -HK:]
    requests = [x.int().to(device) for x in (LENGTHS, INDPTR, TABLE)]
    given = qkv.flatten(1).to(device), cache.to(device), *requests
    words: dict[str, Any] = {"qk_norm_policy": policy}
    words |= dict(zip(("q_norm_weight", "k_norm_weight"), (x.to(device) for x in weights if policy)))
    if fp8:
        one = [torch.tensor([x], device=device) for x in (0.5, 0.25, 4.0)]
        at = tuple(pages), form == "static", *one[:2], 1 + (form == "static")
        name = flashinfer.cake_fused_qk_rmsnorm_rope_quantize_fp8_append_paged_kv_cache
        inverse = one[2] if form == "static" else None
        given = given[0][:9], *given[1:]  # here q_indptr must end with T
        got, scale, flags = name(*given, *at, q_scale_inv=inverse, **words)
        assert torch.equal(flags.cpu(), torch.zeros(3, HK, dtype=torch.int32))
        if form == "dynamic":
            assert near(scale, q.abs().amax(-1) / 448, 1e-4)
            assert near(got.float() * scale[..., None], q, 0.13)
        else:
            assert scale.shape == (0,)
            assert near(got, in_fp8(q, 4.0), 0.13)
    else:
        out = torch.empty(T, HQ, D, device=device) if form == "out" else None
        counts = {"num_q_heads": HQ, "num_kv_heads": HK, "out_q": out, "clear_unused_last_page_rows": form == "out"}
        got = flashinfer.cake_fused_qk_rmsnorm_rope_append_paged_kv_cache(*given, *pages, **counts, **words)
        assert out is None or got.data_ptr() == out.data_ptr()
        assert near(got[:9], q)
    for stored, x, factor in zip(pages, (k, v), (2.0, 4.0)):
        want = torch.ones(48, HK, D)
        want[SLOTS] = in_fp8(x, factor).float() if fp8 else x
        if form != "plain":  # 2 and 1 rows of the last pages are in use; the second request has no new token
            want[2:8] = want[25:32] = 0
        assert near(stored.float().view(48, HK, D), want, 0.13 if fp8 else 2e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("indptr", [[1, 4, 4, 9], [0, 5, 4, 9], [0, 4, 4, 8], [0, 4, 4, 90]])
def test_norm_rope_append_of_a_malformed_batch(indptr: list[int], device: str) -> None:
    """The flags say so, and nothing is stored."""
    pages = torch.ones(2, 6, 8, HK, D).to(FP8).to(device)
    requests = [x.int().to(device) for x in (LENGTHS, torch.tensor(indptr), TABLE)]
    given = random(9, (HQ + 2 * HK) * D).to(device), table(50, D).to(device), *requests, tuple(pages)
    one = torch.ones(1, device=device)
    append = flashinfer.cake_fused_qk_rmsnorm_rope_quantize_fp8_append_paged_kv_cache
    *_, flags = append(*given, False, one, one, 1)
    assert torch.equal(flags.cpu(), torch.full((3, HK), -1, dtype=torch.int32))
    assert bool((pages.float() == 1).all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize(("fp8", "outs"), [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize(("interleave", "factor", "norm"), [(True, 1.0, True), (False, 4.0, True), (True, 1.0, False)])
def test_norm_rope_of_video(
    interleave: bool, factor: float, norm: bool, fp8: bool, outs: bool, flat: bool, device: str
) -> None:
    """Two samples of 2 x 3 x 4 patches; heads of q, k and v may differ in number."""
    sizes, widths, counts = (2, 3, 4), (24, 20, 20), (HQ, HK, HK)
    qkv, weights = random(2, 24, sum(counts), D), (random(HQ * D, seed=2), random(HK * D, seed=3))
    mscale = 1.0 if factor == 1 else 1.25
    places = torch.cartesian_prod(*[torch.arange(size) for size in sizes]).double()
    found = [torch.outer(places[:, i], yarn(width, 1e4, factor, 1.0, 5.0)) for i, width in enumerate(widths)]
    angles = torch.cat(found, -1)
    rows = (torch.cat((angles.cos(), angles.sin()), -1) * mscale).float()
    q, k, v = qkv.split(counts, 2)
    if norm:
        q, k = (normed(x.flatten(2), w).view(x.shape) for x, w in zip((q, k), weights))
    wants = [turn(q, rows, not interleave), turn(k, rows, not interleave), v]
    given = [x.to(device) for x in (qkv.flatten(2), *weights)]
    names = "ppf", "pph", "ppw", "num_frame_channels", "num_height_channels", "num_width_channels"
    words: dict[str, Any] = dict(zip((*names, "num_heads_q", "num_heads_k", "num_heads_v"), (*sizes, *widths, *counts)))
    words |= {"head_dim": D, "interleave": interleave, "factor": factor, "low": 1.0, "high": 5.0, "is_qk_norm": norm}
    words |= {"attention_factor": mscale, "output_fp8": fp8, "output_quant_scale": 0.5, "v_quant_scale": 2.0}
    shapes = [x.flatten(0, 1).shape if flat else x.shape for x in wants]
    into = [
        torch.empty(shape, dtype=FP8 if fp8 else torch.float32, device=device) if outs else None for shape in shapes
    ]
    words |= dict(zip(("q_out", "k_out", "v_out"), into))
    got = flashinfer.fused_qk_rmsnorm_rope(given[0].flatten(0, 1) if flat else given[0], *given[1:], **words)
    for x, out, want, unit, shape in zip(got, into, wants, (0.5, 0.5, 2.0), shapes):
        assert out is None or x.data_ptr() == out.data_ptr()
        assert x.is_contiguous()
        assert near(x, in_fp8(want, unit).view(shape) if fp8 else want.reshape(shape), 0.13 if fp8 else 2e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_indexer(device: str) -> None:
    """q times its weights keeps its value; the scales of vLLM's are rounded up to powers of two; k has LayerNorm."""
    q, weights, cache = random(T, HQ, 128), random(T, HQ, seed=2).abs() + 0.5, table(50, 64)
    at = cache.to(device), IDS.to(device)
    ours = vllm.fused_indexer_q_rope_quant(at[1], q.to(device), at[0], weights.to(device), 0.25, 0.5, True)
    theirs = sglang.fused_q_indexer_rope_first_quant(q.to(device), weights.to(device), 0.125, *at)
    for (values, scaled), neox in ((ours, True), (theirs, False)):
        scale = scaled.view(T, HQ, 1).cpu() / (weights[..., None] * 0.125)
        assert values.dtype == FP8
        assert near(values.cpu().float() * scale, turn(q, cache[IDS], neox), 0.08)
    largest = turn(q, cache[IDS], True).abs().amax(-1)
    assert near(ours[1].cpu() / (weights * 0.125), torch.exp2(torch.log2(largest / 448).ceil()), 1e-6)
    assert theirs[1].shape == (T, HQ, 1)
    with pytest.raises(jitrope.InvalidInput, match=r"weights has shape \(1, 8\); it must be \(T, H\)"):
        vllm.fused_indexer_q_rope_quant(at[1], q.to(device), at[0], weights[:1].to(device), 0.25, 0.5, True)
    k, weight, bias = random(T, 128), random(128, seed=3), random(128, seed=4)
    given = [x.to(device) for x in (k, weight, bias)]
    got = sglang.fused_k_indexer_norm_rope(*given, 1e-6, *at)
    normal = torch.nn.functional.layer_norm(k, (128,), weight, bias, 1e-6)
    assert near(got, turn(normal[:, None], cache[IDS], False)[:, 0])


@pytest.mark.parametrize("device", DEVICES)
def test_flashinfer_rope(device: str) -> None:
    q, k, cache = random(T, HQ * D), random(T, HK * D, seed=2), table(50, D)
    wants = [turn(x.view(T, -1, D), cache[IDS], True).flatten(1) for x in (q, k)]
    given = [x.to(device, copy=True) for x in (IDS, q, k)]
    flashinfer.apply_rope_with_cos_sin_cache_inplace(*given, D, cache.to(device))
    assert all(near(a, b) for a, b in zip(given[1:], wants))


@pytest.mark.parametrize("device", DEVICES)
def test_calls_without_tokens(device: str) -> None:
    """Nothing is computed, and the results have their shapes."""
    x, w, cache, ids = (y.to(device) for y in (torch.empty(0, HQ * D), torch.ones(D), table(5, D), IDS[:0]))
    sglang.table_qk_norm_rope_(x, ids, w, w, cache, 4, 2, D, 1e-6)
    sglang.fused_qk_norm_rope(x, 4, 2, 2, D, 1e-6, w, w, 1e4, True, ids, 1.0, 0.0, 0.0, 1.0)
    sglang_diffusion.fused_rmsnorm_interleaved_rope_(x, w.repeat(HQ), cache, 1e-6, D)
    found = flashinfer.fused_qk_rmsnorm_rope(x, w.repeat(4), w.repeat(2), **VIDEO.keywords)
    assert [y.shape for y in found] == [(0, 4, D), (0, 2, D), (0, 2, D)]


# ---- refusals ------------------------------------------------------------------------------------

X, W, CACHE = torch.ones(T, HQ, D), torch.ones(D), table(50, D)
APPEND = flashinfer.rope_quantize_fp8_append_paged_kv_cache
PAGES = (torch.zeros(2, 16, HQ, D).to(FP8),) * 2
AT = IDS, PAGES, torch.tensor([0]), torch.tensor([0, 1]), 0 * IDS, IDS

COUNTS = {"num_q_heads": 4, "num_kv_heads": 2}
REQUESTS = torch.tensor([10]), torch.tensor([0, 10]), torch.tensor([[0]])
CAKE = partial(
    flashinfer.cake_fused_qk_rmsnorm_rope_append_paged_kv_cache,
    X.flatten(1), CACHE, *REQUESTS, *torch.zeros(2, 1, 16, 2, D),
)  # fmt: skip
CAKE_FP8 = partial(
    flashinfer.cake_fused_qk_rmsnorm_rope_quantize_fp8_append_paged_kv_cache,
    X.flatten(1), CACHE, *REQUESTS, tuple(torch.zeros(2, 1, 16, 2, D).to(FP8)),
)  # fmt: skip
VIDEO = partial(
    flashinfer.fused_qk_rmsnorm_rope,
    X.flatten(1), torch.ones(4 * D), torch.ones(2 * D), ppf=1, pph=2, ppw=5, num_heads_q=4, num_heads_k=2,
    num_heads_v=2, head_dim=D, **{"num_frame_channels": 24, "num_height_channels": 20, "num_width_channels": 20},
)  # fmt: skip


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: vllm.fused_qk_norm_rope(X.flatten(1), 4, 1, 1, D, 1e-6, W, W, CACHE, True, IDS), "qkv has 8 heads"),
        (lambda: vllm.fused_qk_norm_rope(X, 4, 2, 2, 50, 1e-6, W, W, CACHE, True, IDS), "qkv has shape"),
        (
            lambda: vllm.fused_qk_rmsnorm_rope_gate(
                X.flatten(1), X.flatten(1), W, W, CACHE, IDS, 1e-6, 4, HQ, D, D, norm_beta=0.5
            ),
            "norm_beta.* is 0.5",
        ),
        (
            lambda: vllm.concat_and_cache_mla_rope_fused(
                IDS, X, X[:, 0], X[:, 0], CACHE, True, IDS, torch.zeros(4, 16, 128), "fp8_ds_mla", torch.ones(1)
            ),
            "kv_cache_dtype is 'fp8_ds_mla'",
        ),
        (
            lambda: vllm.concat_and_cache_mla_rope_fused(
                IDS, X, X[:, 0], X[:, 0, :50], CACHE, True, IDS, torch.zeros(4, 16, 114), "auto", torch.ones(1)
            ),
            r"kv_c has shape \(10, 50\)",
        ),
        (lambda: sglang.table_qk_norm_rope_(X.flatten(1), IDS, W, W, CACHE, 7, 2, D, 1e-6), "qkv has 8 heads.* 9"),
        (
            lambda: sglang.minimax_qknorm_rope_grouped(X.flatten(1), [(W, 0, 1)] * 3, CACHE, IDS, 1e-6),
            "3 groups with heads",
        ),
        (
            lambda: sglang.fused_qk_norm_rope(
                X.flatten(1), 4, 2, 2, D, 1e-6, W, W, 1e4, True, IDS[:1], 1.0, 0.0, 0.0, 1.0
            ),
            r"position_ids has shape \(1,\)",
        ),
        (
            lambda: sglang.fused_qk_gemma_rmsnorm_rope_gate(
                X.flatten(1), X.flatten(1), W, W, CACHE, IDS, 1e-6, 4, HQ, D, D, True, torch.tensor([0, 1, 2, 1])
            ),
            "mrope_axis_map has another order",
        ),
        (
            lambda: sglang_diffusion.fused_rmsnorm_interleaved_rope_(
                X.flatten(1), torch.ones(HQ * D), table(3, D), 1e-6, D
            ),
            "10 tokens; the table's 3 rows",
        ),
        (lambda: APPEND(X, X, None, None, X, CACHE, *AT, kv_layout="DHN"), "kv_layout is 'DHN'"),
        (lambda: APPEND(X, X, None, None, X, CACHE, *AT, page_size=8), "page_size=8"),
        (lambda: APPEND(X, X, None, None, X, CACHE, *AT, quantize_dtype=E5M2), "paged_kv_cache is .*e4m3fn"),
        (lambda: APPEND(X, X, None, None, X, CACHE, *AT, quant_scale_kv=0.0), "quant_scale_kv is 0.0"),
        (lambda: APPEND(X, X[:, 0], None, None, None, CACHE, *AT), "k_nope and q_nope must be given"),
        (lambda: flashinfer.rope_quantize_fp8(X, X, None, None, CACHE, IDS, quantize_dtype=torch.int8), "dtype"),
        (lambda: CAKE(**COUNTS, qk_norm_policy=1), "qk_norm_policy is 1"),
        (lambda: CAKE(**COUNTS, out_k=X, out_v=X), "out_k and out_v are given"),
        (lambda: CAKE(num_q_heads=5, num_kv_heads=2), r"qkv has shape \(10, 512\)"),
        (lambda: CAKE_FP8(True, W[:1], W[:1], 1, 128), "is_prefill=True"),
        (lambda: CAKE_FP8(False, W[:1], W[:1], 1, upper_max=440.0), "upper_max=440.0"),
        (lambda: CAKE_FP8(False, W[:1], W[:1], 2), "q_scale_inv is None"),
        (lambda: VIDEO(num_frame_channels=22), r"the channels \(22, 20, 20\)"),
        (lambda: VIDEO(ppf=3), "they must be 30 tokens"),
        (lambda: VIDEO(output_fp8=True, v_quant_scale=0.0), "v_quant_scale is 0.0"),
    ],
)
def test_refusals(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(jitrope.InvalidInput, match=message):
        call()


# ---- signatures ----------------------------------------------------------------------------------

PLACES = {
    "vllm": vllm._FUSED,
    "sglang": {
        **{at: ours for at, ours in sglang._FUNCTIONS.items() if ".ops." in at},
        **sglang_diffusion._FUNCTIONS,
    },
    "flashinfer_python": flashinfer._FUNCTIONS,
    "vllm_omni": {at: ours for at, ours in vllm_omni._FUNCTIONS.items() if "vllm_omni" in at},
}


@pytest.mark.parametrize("host", PLACES)
def test_signatures(host: str) -> None:
    """The parameters, their kinds and their defaults are those of the function in the host's wheel."""
    wheels = sorted(HOSTS.glob(f"{host}-*.whl"))
    if not wheels and host == "vllm":
        pytest.skip(f"vLLM's wheel, 340 MB that CI does not load, is not at hand: {COMMANDS[host]}")
    if not wheels:
        missing(COMMANDS[host])
    with zipfile.ZipFile(wheels[-1]) as wheel:
        for at, ours in PLACES[host].items():
            module, name = at.split(":")
            place = module.replace(".", "/")
            file = f"{place}.py" if f"{place}.py" in wheel.namelist() else f"{place}/__init__.py"
            source = ast.parse(wheel.read(file))
            theirs = next(n for n in source.body if isinstance(n, ast.FunctionDef) and n.name == name)
            assert said(ours) == parameters(theirs, numbers(source)), at


def numbers(source: ast.Module) -> dict[str, Any]:
    """The numbers that a module's names have from its start."""
    given = [n for n in source.body if isinstance(n, ast.Assign) and isinstance(n.value, ast.Constant)]
    return {target.id: n.value for n in given for target in n.targets if isinstance(target, ast.Name)}


def parameters(node: ast.FunctionDef, known: dict[str, Any]) -> list[tuple[str, bool, str]]:
    """(name, whether it is named in calls only, default) of each parameter, from the source."""
    plain, named = node.args.args, node.args.kwonlyargs
    defaults = [None] * (len(plain) - len(node.args.defaults)) + node.args.defaults + node.args.kw_defaults
    defaults = [known.get(d.id, d) if isinstance(d, ast.Name) else d for d in defaults]
    given = [(x.arg, x in named, "" if d is None else ast.unparse(d)) for x, d in zip(plain + named, defaults)]
    return [(name, only, shown(default)) for name, only, default in given]


def said(function: Callable[..., Any]) -> list[tuple[str, bool, str]]:
    found = inspect.signature(function).parameters.values()
    return [(p.name, p.kind is p.KEYWORD_ONLY, "" if p.default is p.empty else shown(repr(p.default))) for p in found]


def shown(default: str) -> str:
    """A default as Python shows its value: 1e-6 and 1e-06 are one."""
    return repr(ast.literal_eval(default)) if default else ""


def test_flashinfer_enable(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer's own file, with stand-ins for its compiler: a function that `rope` imports is replaced there too."""
    wheels = sorted(HOSTS.glob("flashinfer_python-*.whl")) or missing(COMMANDS["flashinfer_python"])
    name = "cake_fused_qk_rmsnorm_rope_append_paged_kv_cache"
    jit, utils = (stand_in(monkeypatch, f"flashinfer.{part}") for part in ("jit.cake_fused_qk_rope_append", "utils"))
    for needed in ("arch_for", "clear_units_per_request", "load_cake_fused_qk_rope_append_module", "stage_for"):
        setattr(jit, needed, None)
    utils.get_compute_capability = None
    cake, rope = (stand_in(monkeypatch, f"flashinfer.{part}") for part in ("cake_fused_qk_rope_append", "rope"))
    cake.__package__ = "flashinfer"
    with zipfile.ZipFile(wheels[-1]) as wheel:
        exec(compile(wheel.read("flashinfer/cake_fused_qk_rope_append.py"), "cake.py", "exec"), vars(cake))
    host = getattr(cake, name)
    setattr(rope, name, host)
    given = X.flatten(1), CACHE, *REQUESTS, *torch.zeros(2, 1, 16, 2, D)
    with flashinfer.enable() as report:
        q = getattr(rope, name)(*given, **COUNTS)
        assert near(q, turn(X[:, :4], CACHE[:T], True))
        assert report.calls == {"jitrope": 1, "host": 0}
        with pytest.raises(ValueError, match="must be a 2-D bf16 tensor"):  # the host's, whose kernels have no fp32
            getattr(rope, name)(*given, **COUNTS, out_k=X[:, :2], out_v=X[:, :2])
        assert report.calls == {"jitrope": 1, "host": 1}
    assert getattr(rope, name) is getattr(cake, name) is host


def test_flashinfer_without_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ImportError):
        flashinfer.enable()
