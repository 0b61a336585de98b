"""v in fp8 in the launch that converts q and k: `Quantize(q_scale, k_scale, v_scale)`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import jitrope
from jitrope import InvalidInput, KVCache, Norm, Packed, Quantize, Ulysses

from .devices import DEVICES
from .host import backend
from .test_quantize import FP8, inputs

E5M2 = torch.float8_e5m2
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm": {"norm": Norm(rounding="once")},
    "v too": {"norm": Norm(v_norm=True)},
    "transform": {"hadamard": True},
    "e5m2": {"dtype": E5M2},
    "heads": {"scales": True},
    "part": {"rotary_dim": 32, "rotary_offset": 16},
    "no rope": {"tables": False},
    "heads first": {"layout": "bhsd"},
    "host's rounding": {"rounding": "dtype"},
    "packed sequences": {"layout": "thd", "packed": True},
}


def same(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


def form_of(way: str) -> dict[str, Any]:
    """The words of `Quantize`."""
    return {name: x for name, x in WAYS[way].items() if name in ("hadamard", "dtype")}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("launch", ["grid_2d", "token_linear"])
@pytest.mark.parametrize("way", WAYS)
def test_v_is_converted_with_q_and_k(way: str, launch: str, device: str) -> None:
    """The bits of a call that converts it as q, in one launch; q and k as without it; the second call is known."""
    jitrope.configure(launch=launch)
    words = dict(WAYS[way])
    q, k, cos, sin = inputs(device, *((1, 10) if words.get("packed") else (2, 5)), 4, 64)
    v, layout = k.flip(1) + 1, words.get("layout", "bshd")
    form = {name: words.pop(name) for name in form_of(way)}
    scales: list[Any] = [0.05, 0.02, 0.03]
    if words.pop("scales", False):
        scales = [torch.rand(n, device=device) + 0.1 for n in (q.shape[2], k.shape[2], k.shape[2])]
    if layout != "bshd":
        q, k, v = (x[0] if layout == "thd" else x.transpose(1, 2).contiguous() for x in (q, k, v))
    tables = (cos, sin) if words.pop("tables", True) else ()
    tables = tuple([x[:, : words.get("rotary_dim", 64) // 2] for x in tables])
    if words.pop("packed", False):
        words["positions"] = Packed(torch.tensor([0, 4, 10], device=device))
    want = jitrope.prepare_qkv(q, k, v, *tables, **words, quantize=Quantize(*scales[:2], **form))
    form.pop("hadamard", None)
    source = {"norm": Norm()} if way == "v too" else {}
    want_v, _, _ = jitrope.prepare_qkv(v, None, None, layout=layout, **source, quantize=Quantize(scales[2], **form))
    for given in (False, True, True):
        before, out = backend.launched.total(), {}
        if given:
            out["out"] = (None, None, torch.zeros_like(torch.cat((v, v), -1), dtype=want_v.dtype)[..., :64])
        got = jitrope.prepare_qkv(q, k, v, *tables, **words, **out, quantize=Quantize(*scales, **form_of(way)))
        assert backend.launched.total() - before <= 1
        assert all(same(x, y) for x, y in zip(got, (*want[:2], want_v)))
        assert not given or got[2] is out["out"][2]


@pytest.mark.parametrize("device", DEVICES)
def test_of_packed_qkv_and_for_ranks(device: str) -> None:
    """With a projection's bias; and in given tensors with a group of heads for each rank."""
    q, k, cos, sin = inputs(device, 2, 5, 4, 64)
    v, quantize = k + 1, Quantize(0.05, 0.02, 0.03)
    want = jitrope.prepare_qkv(q, k, v, cos, sin, quantize=quantize)
    out = [torch.zeros(2, 2, 5, x.shape[2] // 2, 64, device=device).to(FP8) for x in (q, k, v)]
    jitrope.prepare_qkv(q, k, v, cos, sin, quantize=quantize, out=out)
    assert all(same(torch.cat([*x.view(torch.uint8)], 2), y) for x, y in zip(out, want))
    bias = torch.randn(q.shape[2] + 2 * k.shape[2], 64, generator=torch.Generator().manual_seed(1)).to(q)
    qkv = torch.cat((q, k, v), 2)
    n = q.shape[2] // k.shape[2]
    words: dict[str, Any] = {"q_per_group": n, "order": "qkv", "quantize": quantize}
    parts = (qkv + bias).split([q.shape[2], k.shape[2], k.shape[2]], 2)
    want = jitrope.prepare_qkv(*[x.contiguous() for x in parts], cos, sin, quantize=quantize)
    assert all(same(x, y) for x, y in zip(jitrope.prepare_packed_qkv(qkv, cos, sin, bias=bias, **words), want))


@pytest.mark.parametrize("device", DEVICES)
def test_compiled(device: str) -> None:
    q, k, cos, sin = inputs(device, 2, 5, 4, 64)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return jitrope.prepare_qkv(q, k, v, cos, sin, quantize=Quantize(0.05, 0.02, 0.03))

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert all(same(x, y) for x, y in zip(compiled(q, k, k + 1), call(q, k, k + 1)))


def test_refusals() -> None:
    q, k, cos, sin = inputs("cpu", 2, 5, 4, 64)
    slots = torch.arange(10)

    def refused(match: str, v: Any = k, k: Any = k, scale: Any = 0.1, **words: Any) -> None:
        given = {"cos": cos, "sin": sin, "quantize": Quantize(0.1, 0.1 if k is not None else None, scale), **words}
        with pytest.raises(InvalidInput, match=match):
            jitrope.prepare_qkv(q, k, v, **given)

    refused("v is None; it must be a tensor, because quantize has a v_scale", v=None)
    refused("v is .*; it must be like k, because v_scale is given", v=torch.cat((k, k), 2))
    refused("v is .*; it must be like k, because v_scale is given", k=None)
    refused("v_scale does not go with Ulysses", out=Ulysses(2))
    refused("v_scale is .*; it must be fp32 on q's device", scale=torch.ones(3))
    refused("out's v is .* torch.bfloat16 on cpu; it must be", out=(None, None, torch.empty_like(k)))
    with pytest.raises(InvalidInput, match="Quantize: v_scale is 'a'; it must be a finite number"):
        Quantize(0.1, 0.1, "a")  # type: ignore[arg-type]
    cache = KVCache(*torch.zeros(2, 10, k.shape[2], 64).to(k), slots)
    with pytest.raises(InvalidInput, match="quantize has a v_scale, but v goes to the cache; give it to KVCache"):
        jitrope.prepare_qkv(q, k, k, cos, sin, cache=cache, quantize=Quantize(0.1, None, 0.1))
