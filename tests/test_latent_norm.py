"""The norm of MLA's latents in the launch that rotates k_pe and writes both to the cache: `Norm(of="v")`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import jitrope
from jitrope import InvalidInput, KVCache, Norm, Packed

from . import oracle
from .devices import DEVICES
from .host import backend
from .test_arguments import STRANGERS
from .test_latent_cache import SLOTS, T, caches, tensors

SHAPES = [(512, 64, torch.bfloat16), (256, 32, torch.float32), (96, 48, torch.float16)]


def weight_of(latent: int, device: str) -> Tensor:
    return torch.randn(latent, generator=torch.Generator().manual_seed(8)).to(device)


def norms(w: Tensor) -> dict[str, tuple[Norm, Tensor | None]]:
    """Norms, and the factor of each."""
    return {
        "weight": (Norm(of="v", v_weight=w, eps=1e-5), w),
        "zero": (Norm(of="v", v_weight=w, zero_centered=True, eps=1e-5), 1 + w),
        "once": (Norm(of="v", v_weight=w.bfloat16(), rounding="once", eps=1e-5), w.bfloat16().float()),
        "twice": (Norm(of="v", v_weight=w, rounding="twice", eps=1e-5), w),
        "no weight": (Norm(of="v", eps=1e-5), None),
    }


def into(c_kv: Tensor, ckv: Tensor, kpe: Tensor, rotary: int, slots: Tensor, **scales: Any) -> tuple[Tensor, KVCache]:
    """(the latents in heads of k_pe's size, the cache)."""
    cache = KVCache(kpe.unsqueeze(-2), ckv.unflatten(-1, (-1, rotary)), slots, **scales)
    return c_kv.unflatten(-1, (-1, rotary)), cache


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("launch", ["token_linear", "grid_2d"])
@pytest.mark.parametrize("kind", ["weight", "zero", "once", "twice", "no weight"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_latents_are_normalised_on_their_way(shape: Any, kind: str, launch: str, device: str) -> None:
    """Against fp64; q and k_pe have the bits of a call without the norm, in one launch. Other slots stay."""
    jitrope.configure(launch=launch)
    latent, rotary, dtype = shape
    q, k_pe, c_kv, table, ids = tensors(device, latent, rotary, dtype)
    norm, factor = norms(weight_of(latent, device))[kind]
    words: dict[str, Any] = {"cos_sin_cache": table, "positions": ids, "interleaved": True, "layout": "thd"}
    slots = torch.tensor(SLOTS, device=device)
    ckv, kpe = caches(device, latent, rotary, True, dtype)
    want_ckv, want_kpe = ckv.double().flatten(0, 1).clone(), kpe.clone()
    x = oracle.exact(c_kv)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    x = x if factor is None else x * oracle.exact(factor)
    for token, slot in enumerate(SLOTS):
        if slot >= 0:
            want_ckv[slot] = x[token]
    other = torch.empty_like(ckv)
    v, cache = into(c_kv, other, want_kpe, rotary, slots)
    q_want = jitrope.prepare_qkv(q[..., 32:], k_pe, v, cache=cache, **words)[0]
    for _ in range(2):
        ckv, kpe = caches(device, latent, rotary, True, dtype)
        v, cache = into(c_kv, ckv, kpe, rotary, slots)
        before = backend.launched.total()
        got = jitrope.prepare_qkv(q[..., 32:], k_pe, v, cache=cache, norm=norm, **words)
        assert backend.launched.total() - before <= 1
        assert torch.equal(got[0], q_want)
        assert torch.equal(kpe, want_kpe)
        steps = 3 if kind in ("once", "twice") else 1
        unit = steps * torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5
        torch.testing.assert_close(ckv.double().flatten(0, 1), want_ckv, rtol=unit, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_several_heads_of_k_and_spare_tokens(device: str) -> None:
    """The mean is over all heads of v, and in place padding is not stored."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(T, n, 64, generator=generator).to(device) for n in (4, 2, 6))
    w, table = weight_of(6 * 64, device), torch.randn(T, 64, generator=generator).to(device)
    k_cache, v_cache = torch.zeros(T, 2, 64, device=device), torch.zeros(T, 6, 64, device=device)
    packed = Packed(torch.tensor([0, 2, 5], device=device))
    cache = KVCache(k_cache, v_cache, torch.arange(T, device=device))
    jitrope.prepare_qkv(
        q, k, v, cos_sin_cache=table, positions=packed, norm=Norm(of="v", v_weight=w), cache=cache, inplace=True
    )
    want = torch.nn.functional.rms_norm(v.double().flatten(1), (384,), w.double(), 1e-6).view(T, 6, 64)
    torch.testing.assert_close(v_cache[:5].double(), want[:5], rtol=1e-5, atol=1e-5)
    assert not v_cache[5:].any()
    assert not k_cache[5:].any()


def test_refusals() -> None:
    q, k_pe, c_kv, table, _ = tensors("cpu", 512, 64, torch.bfloat16)
    w = torch.ones(512)
    for words, text in (
        ({"across_heads": True}, "across_heads does not go with of='v'"),
        ({"after_rope": True}, "after_rope does not go with of='v'"),
        ({"v_norm": True}, "v_norm does not go with of='v'"),
        ({"kind": "layer_norm"}, "kind='layer_norm' does not go with of='v'"),
        ({"q_weight": w}, "q_weight does not go with of='v'"),
        ({"mean_squares": (w, None)}, "mean_squares does not go with"),
    ):
        with pytest.raises(InvalidInput, match=text):
            Norm(of="v", v_weight=w, **words)  # type: ignore[arg-type]
    for _, stranger in STRANGERS[:-1]:
        with pytest.raises(InvalidInput, match="Norm: v_weight is "):
            Norm(of="v", v_weight=stranger)
    with pytest.raises(InvalidInput, match="v_weight does not go with of='qk'"):
        Norm(v_weight=w)
    words = {"cos_sin_cache": table[:T], "layout": "thd"}
    ckv, kpe = caches("cpu", 512, 64, True, q.dtype)
    v, cache = into(c_kv, ckv, kpe, 64, torch.tensor(SLOTS))
    for norm, more, text in (
        (
            Norm(of="v", v_weight=w[:64]),
            {"cache": cache},
            r"v_weight is .*\(64,\).*; it must be \(512,\)",
        ),
        (Norm(of="v", v_weight=w), {}, "the norm has of='v', which goes with a cache of v"),
        (Norm(of="v"), {}, "the norm has of='v', which goes with a cache of v"),
        (
            Norm(of="v"),
            {"cache": KVCache(kpe.unsqueeze(-2), None, torch.tensor(SLOTS))},
            "which goes with a cache of v",
        ),
    ):
        given = None if "cache" in more and "v_cache" not in more["cache"].tensors else v
        with pytest.raises(InvalidInput, match=text):
            jitrope.prepare_qkv(q[..., 32:], k_pe, given, norm=norm, **words, **more)
