"""`prepare_mla_qkv`, and caches of MLA's latents: sizes, sums over heads, one cache as two, the latents' norm."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import jitrope
from jitrope import DynamicQuantize, KVCache, Norm, Packed, Pages, Quantize, Scaled, prepare_mla_qkv, prepare_qkv
from jitrope.plan.options import Options
from jitrope.run import dispatch
from jitrope.sources.latent import LATENT_BACKWARD

from .. import oracle
from ..devices import DEVICES, noise, turn
from ..host import backend

assert_same = partial(torch.testing.assert_close, rtol=0, atol=0)
SIZES = [  # dtype, heads of q and of k, elements of a head, rotated ones, those of v, words
    (torch.bfloat16, 2, 5, 64, 32, 160, {"interleaved": True}),  # v wider than q
    (torch.float16, 3, 2, 48, 32, 8, {"rounding": "dtype"}),  # v of one access
    (torch.float32, 2, 3, 9, 6, 5, {}),  # sizes that no access divides
    (torch.bfloat16, 2, 2, 16, 16, 32, {}),  # no first part: a head is rotated whole
    (torch.bfloat16, 4, 4, 48, 16, 32, {"interleaved": True, "interleaved_out": False}),  # as DeepSeek's
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_bits_are_those_of_slices_and_a_rotation(sizes: tuple[Any, ...], tokens: int, device: str) -> None:
    """And the gradients, but for the sum over heads, which plain torch rounds each time."""
    dtype, q_heads, heads, dim, rotary, v_dim, words = sizes
    generator, first = torch.Generator().manual_seed(1), dim - rotary
    shapes = (q_heads, dim), (heads, first + v_dim), (1, rotary)
    leaves = [torch.randn(2, tokens, *x, generator=generator).to(device, dtype).requires_grad_() for x in shapes]
    q, kv, k_pe = leaves
    cos, sin = torch.randn(2, tokens, rotary // 2, generator=generator).to(device)
    got = prepare_mla_qkv(q, kv, k_pe, cos, sin, **words)
    assert all(x.is_contiguous() for x in got[1:])
    k = torch.cat((kv[..., :first], k_pe.expand(*kv.shape[:-1], -1)), -1)
    want = *jitrope.apply_rope(q, k, cos, sin, rotary_offset=first, rotary_dim=rotary, **words), kv[..., first:]
    assert_same(got, want)
    grads = [torch.sin(3 * x.detach().float()).to(dtype) for x in want]
    found, wanted = (torch.autograd.grad(ys, leaves, grads) for ys in (got, want))
    assert_same(found[:2], wanted[:2])
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(found[2], wanted[2], rtol=4 * unit, atol=4 * unit * heads)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_the_sum_over_heads_is_in_fp32(layout: str, device: str) -> None:
    """The gradient of k_pe is the exact one, rotated back and rounded once, the same in each backward."""
    made = noise("cpu", torch.bfloat16, (1, 3, 1, 48), (1, 3, 65, 56), (1, 3, 1, 16), (1, 3, 65, 48))
    grad, (cos, sin) = made.pop(), turn("cpu", 3, 8)
    q, kv, k_pe = (oracle.heads(x, layout).to(device) for x in made)
    _, k, _ = prepare_mla_qkv(q, kv, k_pe.requires_grad_(), cos.to(device), sin.to(device), layout=layout)
    given = oracle.heads(grad, layout).to(device)
    first, second = (torch.autograd.grad(k, k_pe, given, retain_graph=True)[0] for _ in range(2))
    assert_same(first, second)
    (want, _), _ = oracle.rope(grad[..., 32:].double().sum(2, keepdim=True), None, cos, sin, inverse=True)
    got = oracle.heads(first, layout).double().cpu()
    torch.testing.assert_close(got, want, rtol=2**-8, atol=4e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_the_sum_over_no_heads_is_zero(device: str) -> None:
    """Whatever an earlier sum has left in memory."""
    cos, sin = torch.rand(2, 6, 8, device=device)
    options = Options(rotary_dim=16, rotary_offset=32, v_dim=24, inverse=True)
    for heads in (3, 0):
        dq, dk, dv = (torch.randn(1, 6, *x, device=device) for x in ((200, 48), (heads, 48), (heads, 24)))
        found = dispatch.call(LATENT_BACKWARD, {"dq": dq, "dk": dk, "dv": dv, "cos": cos, "sin": sin}, options)
    assert not found["k_pe"].any()


@pytest.mark.parametrize("device", DEVICES)
def test_q_without_heads_and_strided_inputs(device: str) -> None:
    """kv alone, as `fused_apply_mla_rope_for_kv`; k_pe and kv as slices of one projection, in any strides."""
    down = torch.randn(2, 6, 3 * (32 + 24) + 16, device=device)
    kv, k_pe = down[..., :-16].unflatten(-1, (3, -1)), down[..., None, -16:]
    cos, sin = torch.rand(2, 6, 8, device=device)
    q = torch.randn(2, 6, 3, 48, device=device)
    want = prepare_mla_qkv(q, kv.contiguous(), k_pe.contiguous(), cos, sin)
    none, k, v = prepare_mla_qkv(q[:, :, :0], kv, k_pe, cos, sin)
    assert none.shape == (2, 6, 0, 48)
    assert_same((k, v), want[1:])
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    strided, *_ = prepare_mla_qkv(turned, kv, k_pe, cos, sin)
    assert_same(strided, want[0])
    assert strided.stride() == turned.stride()


def test_one_launch_each_way() -> None:
    """DeepSeek-V3: one kernel forward and one backward, with 16-byte accesses."""
    shapes = (128, 192), (128, 256), (1, 64)
    leaves = [torch.empty(1, 4096, *x, dtype=torch.bfloat16, device="meta", requires_grad=True) for x in shapes]
    freqs = torch.empty(4096, 32, device="meta")
    with jitrope.planning(["auto"]) as specs:
        out = prepare_mla_qkv(*leaves, freqs=freqs, interleaved=True, interleaved_out=False)
        grads = torch.autograd.grad(out, leaves, [torch.empty_like(x) for x in out])
    assert [x.shape for x in out] == [(1, 4096, 128, 192), (1, 4096, 128, 192), (1, 4096, 128, 128)]
    assert [x.shape for x in grads] == [x.shape for x in leaves]
    assert [(spec.v_dim, spec.vec, spec.inverse) for spec in specs] == [(128, 8, False), (128, 8, True)]


def test_inputs_of_unused_results_have_no_gradient() -> None:
    """And a gradient has none."""
    leaves = [torch.ones(2, 6, *x, requires_grad=True) for x in ((4, 48), (3, 56), (1, 16))]
    q, k, v = prepare_mla_qkv(*leaves, *torch.ones(2, 6, 8))
    found = [torch.autograd.grad(x.sum(), leaves, retain_graph=True, allow_unused=True) for x in (q, k, v)]
    assert [[x is not None for x in grads] for grads in found] == [[True, False, False]] + 2 * [[False, True, True]]
    (first,) = torch.autograd.grad(k.square().sum(), leaves[1], create_graph=True)
    with pytest.raises(jitrope.JitropeError, match="no second derivative"):
        torch.autograd.grad(first.sum(), leaves[1])


# ---- caches of latents: c_kv is passed as v, in heads of k_pe's size -------------------------------------

T, HEADS, ROWS, PAGES = 7, 5, 4, 6
SLOTS = (9, 3, -1, 22, 0, 7, 14)


def inputs(device: str, latent: int, rotary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """(q, with its part that is not rotated; k_pe, a part of a projection; c_kv, after its norm; the words)."""
    q, projected, c_kv = noise(device, dtype, (T, HEADS, 32 + rotary), (T, latent + rotary), (T, latent), seed=3)
    (table,), ids = noise(device, torch.float32, (40, rotary)), torch.tensor([7, 39, 0, 7, 12, 33, 21], device=device)
    words = {"cos_sin_cache": table, "positions": ids, "interleaved": True, "layout": "thd"}
    return q, projected[:, None, latent:], c_kv.unflatten(-1, (-1, rotary)), words


def views(cache: Tensor, latent: int, rotary: int) -> tuple[Tensor, Tensor]:
    """k_pe's and c_kv's, as heads."""
    return cache[..., None, latent:], cache[..., :latent].unflatten(-1, (-1, rotary))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("paged", [False, True], ids=["slots", "pages"])
@pytest.mark.parametrize("one", [True, False], ids=["one cache", "two caches"])
@pytest.mark.parametrize(
    ("latent", "rotary", "dtype", "quantize"),
    [
        (512, 64, torch.bfloat16, None),  # DeepSeek, Kimi, GLM
        (256, 32, torch.float32, None),  # MiniCPM3
        (512, 64, torch.bfloat16, Quantize(0.5)),
        (512, 64, torch.float16, DynamicQuantize()),
        (64, 64, torch.bfloat16, None),
    ],
)
def test_rows_have_latents_and_rotated_keys(
    latent: int, rotary: int, dtype: torch.dtype, quantize: Any, one: bool, paged: bool, device: str
) -> None:
    q, k_pe, c_kv, words = inputs(device, latent, rotary, dtype)
    fp8 = isinstance(quantize, Quantize)
    scale, stored = (0.5, torch.float8_e4m3fn) if fp8 else (1.0, dtype)
    (cache,) = noise(device, stored, (PAGES, ROWS, latent + rotary))
    k_cache, v_cache = views(cache, latent, rotary)
    if not one:
        k_cache, v_cache = k_cache.contiguous(), v_cache.contiguous()
    places: Any = torch.tensor(SLOTS, device=device)
    slots: tuple[int, ...] = SLOTS
    if paged:  # the last 7 tokens of a sequence of 11, in pages 4, 1 and 5
        pages, lengths = torch.tensor([[4, 1, 5]], device=device), torch.tensor([11], device=device)
        places, slots = Pages(pages.int(), seq_lens=lengths.int()), (4, 5, 6, 7, 20, 21, 22)
    of_cache = KVCache(k_cache, v_cache, places, **({"k_scale": scale, "v_scale": scale} if fp8 else {}))
    turn = {"cos_sin_cache": words["cos_sin_cache"], "position_ids": words["positions"]}
    (want_q, want_k), _ = oracle.rope(q[..., 32:], k_pe, **turn, interleaved=True, layout="thd")
    want = torch.cat((c_kv.double().flatten(1), want_k[:, 0]), 1) / scale
    after = cache.double().flatten(0, 1)
    for token, slot in enumerate(slots):
        if slot >= 0:
            after[slot] = want[token]
    for _ in range(2):
        got = prepare_qkv(q[..., 32:], k_pe, c_kv, cache=of_cache, quantize=quantize, **words)[0]
        written = torch.cat((v_cache.float().flatten(-2), k_cache.float().flatten(-2)), -1).flatten(0, 1).double()
        near = {"rtol": 2**-3, "atol": 2**-9} if fp8 else {"rtol": 2**-7, "atol": 2**-7}
        torch.testing.assert_close(written, after, **near)
        if not fp8:
            assert_same(written[:, :latent], after[:, :latent])
        values = got.values.float() * got.scale[..., None] if isinstance(got, Scaled) else got.float()
        near = {"rtol": 2**-7, "atol": 2**-7} if quantize is None else {"rtol": 2**-3, "atol": 0.02}
        torch.testing.assert_close(values.double() * scale, want_q, **near)


@pytest.mark.parametrize("device", DEVICES)
def test_q_is_rotated_where_it_lies_or_beside_its_absorbed_part(device: str) -> None:
    """Also in a compiled function that makes both views of the one cache."""
    q, k_pe, c_kv, words = inputs(device, 512, 64, torch.bfloat16)
    slots, found = torch.tensor(SLOTS, device=device), []

    def call(cache: Tensor, **more: Any) -> Tensor:
        of_cache = KVCache(*views(cache, 512, 64), slots)
        return prepare_qkv(q[..., 32:], k_pe, c_kv, cache=of_cache, **more, **words)[0]

    for function in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
        (cache,) = noise(device, q.dtype, (PAGES, ROWS, 576))
        found.append((function(cache), cache))
    assert_same(*found)
    absorbed = torch.full((T, HEADS, 576), 7.0, device=device, dtype=q.dtype)
    call(cache, out=(absorbed[..., 512:], None, None))
    assert_same(absorbed[..., 512:], found[0][0])
    assert (absorbed[..., :512] == 7).all()
    before = q[..., :32].clone()
    call(cache, inplace=True)
    assert_same(q, torch.cat((before, found[0][0]), -1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("launch", ["token_linear", "grid_2d"])
@pytest.mark.parametrize("kind", ["weight", "zero", "once", "twice", "no weight"])
@pytest.mark.parametrize(
    ("latent", "rotary", "dtype"), [(512, 64, torch.bfloat16), (256, 32, torch.float32), (96, 48, torch.float16)]
)
def test_latents_are_normalised_on_their_way(
    latent: int, rotary: int, dtype: torch.dtype, kind: str, launch: str, device: str
) -> None:
    """Against fp64; q and k_pe have the bits of a call without the norm, in one launch. Other slots stay."""
    jitrope.configure(launch=launch)
    q, k_pe, c_kv, words = inputs(device, latent, rotary, dtype)
    w = torch.randn(latent, generator=torch.Generator().manual_seed(8)).to(device)
    w = w.bfloat16() if kind == "once" else None if kind == "no weight" else w
    rounding = kind if kind in ("once", "twice") else "none"
    norm = Norm(of="v", v_weight=w, zero_centered=kind == "zero", rounding=rounding, eps=1e-5)
    slots, caches, results = torch.tensor(SLOTS, device=device), [], []
    shape = (PAGES, ROWS, latent + rotary)
    for own in (None, norm, norm):
        (cache,), before = noise(device, dtype, shape), backend.launched.total()
        of_cache = KVCache(*views(cache, latent, rotary), slots)
        results.append(prepare_qkv(q[..., 32:], k_pe, c_kv, cache=of_cache, norm=own, **words)[0])
        assert backend.launched.total() - before <= 1
        caches.append(cache.flatten(0, 1))
    want = noise("cpu", dtype, shape)[0].double().flatten(0, 1)[:, :latent]
    factor = None if w is None else w.double().cpu() + (kind == "zero")
    normed = torch.nn.functional.rms_norm(c_kv.double().cpu().flatten(1), (latent,), factor, 1e-5)
    for token, slot in enumerate(SLOTS):
        if slot >= 0:
            want[slot] = normed[token]
    unit = (1 if rounding == "none" else 3) * torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5
    for got, cache in zip(results[1:], caches[1:]):
        assert_same((got, cache[:, latent:]), (results[0], caches[0][:, latent:]))
        torch.testing.assert_close(cache[:, :latent].double().cpu(), want, rtol=unit, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_several_heads_of_k_and_spare_tokens(device: str) -> None:
    """The mean is over all heads of v, and in place padding is not stored."""
    q, k, v, w, table = noise(device, torch.float32, (T, 4, 64), (T, 2, 64), (T, 6, 64), (384,), (T, 64))
    k_cache, v_cache = torch.zeros(T, 2, 64, device=device), torch.zeros(T, 6, 64, device=device)
    packed = Packed(torch.tensor([0, 2, 5], device=device))
    cache, norm = KVCache(k_cache, v_cache, torch.arange(T, device=device)), Norm(of="v", v_weight=w)
    prepare_qkv(q, k, v, cos_sin_cache=table, positions=packed, norm=norm, cache=cache, inplace=True)
    want = torch.nn.functional.rms_norm(v.double().flatten(1), (384,), w.double(), 1e-6).view(T, 6, 64)
    torch.testing.assert_close(v_cache[:5].double(), want[:5], rtol=1e-5, atol=1e-5)
    assert not v_cache[5:].any()
    assert not k_cache[5:].any()


@pytest.mark.parametrize("device", DEVICES)
def test_absorbed_q_and_the_cache_in_fp8_are_one_launch(device: str) -> None:
    """A decode step: whole heads [latent | rotated] of q, and one of k, [c_kv | k_pe], which goes to its slot."""
    q, kv, table = noise(device, torch.bfloat16, (T, HEADS, 576), (T, 1, 576), (9, 64))
    ids, slots = torch.arange(T, device=device) % 9, torch.tensor(SLOTS, device=device)
    (before,) = noise(device, torch.float8_e4m3fn, (PAGES, ROWS, 1, 576))
    turn: dict[str, Any] = {"interleaved": True, "layout": "thd", "rotary_dim": 64, "rotary_offset": 512}
    found, launched = [], backend.launched.total()
    for launch in ("auto", "token_linear", "grid_2d"):
        jitrope.configure(launch=launch)
        cache = KVCache(before.clone(), None, slots, k_scale=0.5)
        words: dict[str, Any] = {"cos_sin_cache": table.float(), "positions": ids, "cache": cache}
        y, *_ = prepare_qkv(q, kv, None, **words, quantize=Quantize(0.25), **turn)
        found.append((y, cache.tensors["k_cache"]))
        assert_same(*[[x.view(torch.uint8) for x in one] for one in (found[0], found[-1])])
    assert backend.launched.total() - launched in (0, 3)
    (want_q, want_k), _ = oracle.rope(q, kv, cos_sin_cache=table.float(), position_ids=ids, **turn)
    after = before.double().flatten(0, 1)
    for token, slot in enumerate(SLOTS):
        if slot >= 0:
            after[slot] = want_k[token].to(after) / 0.5
    for got, want in ((found[0][0].double() * 0.25, want_q.to(device)), (found[0][1].double().flatten(0, 1), after)):
        torch.testing.assert_close(got, want, rtol=2**-3, atol=2**-8)
