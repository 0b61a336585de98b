"""v in the launches that convert q and k: `Quantize(q_scale, k_scale, v_scale)`, and `DynamicQuantize(v=True)`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import jitrope
from jitrope import DynamicQuantize, InvalidInput, KVCache, Norm, Packed, Quantize, Ulysses

from .devices import DEVICES
from .host import backend
from .test_quantize import FP4, FP8, inputs

E5M2 = torch.float8_e5m2


def same(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


@pytest.mark.parametrize("quantize", [Quantize(0.05, 0.02, 0.03), DynamicQuantize(v=True)])
def test_no_given_tensors(quantize: Any) -> None:
    """out=None is the default."""
    q, k, cos, sin = inputs("cpu", 2, 5, 4, 64)
    got, want = (jitrope.prepare_qkv(q, k, k, cos, sin, quantize=quantize, **out) for out in ({"out": None}, {}))
    assert all(same(x, y) for xs, ys in zip(got, want) for x, y in zip(xs, ys))


COMPUTED: dict[str, dict[str, Any]] = {
    "v too, part": {"norm": {"v_norm": True}, "dtype": E5M2, "group": 32, "rotary_dim": 32},
    "nvfp4": {"dtype": FP4, "group": 16, "scale_dtype": FP8, "v_global_scale": 0.01},
    "kv_head": {"per": "kv_head", "dtype": torch.int8, "hadamard": True},
    "packed sequences": {"per": "kv_head", "layout": "thd", "packed": True},
    "packed tokens": {"layout": "thd", "packed": True},
}
FORM = ("dtype", "group", "scale_dtype", "scale_fmt", "v_global_scale", "swizzled", "per", "hadamard")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("launch", ["grid_2d", "token_linear"])
@pytest.mark.parametrize("way", COMPUTED)
def test_v_has_computed_scales(way: str, launch: str, device: str) -> None:
    """The bits of a call that converts it as q, in as many launches as without v; q and k as without it.

    A token after the last sequence, NaN here, has no part in the scale of a head.
    """
    jitrope.configure(launch=launch)
    words = dict(COMPUTED[way])
    form = {name: words.pop(name) for name in FORM if name in words}
    packed, norm, layout = words.pop("packed", False), words.pop("norm", None), words.get("layout", "bshd")
    q, k, cos, sin = inputs(device, *((1, 10) if packed else (2, 5)), 4, 64)
    v, end = k.flip(1) * 3 + 1, 8 if packed else None
    if layout != "bshd":
        q, k, v = (x[0] if layout == "thd" else x.transpose(1, 2).contiguous() for x in (q, k, v))
    if packed:
        words["positions"], v[8:] = Packed(torch.tensor([0, 4, 8], device=device)), torch.nan
    sequences = {"positions": words["positions"]} if packed else {}
    tables = tuple([x[:, : words.get("rotary_dim", 64) // 2] for x in (cos, sin)] if words.pop("tables", True) else ())
    of_qk = {"norm": Norm(**{**norm, "v_norm": False})} if norm else {}
    of_v = {"layout": layout, **(of_qk if norm and "v_norm" in norm else {})}
    alone = {name: x for name, x in form.items() if name != "hadamard"}
    alone |= {"per": "head"} if "per" in form else {}
    whole = alone.pop("v_global_scale", None)
    want_v = jitrope.prepare_qkv(
        v[:end] if packed else v,
        None,
        None,
        **of_v,
        **sequences,
        quantize=DynamicQuantize(**alone, q_global_scale=whole),
    )[0]
    words["norm"] = Norm(**norm) if norm else None
    form_of_qk = {name: x for name, x in form.items() if name != "v_global_scale"}
    before = backend.launched.total()
    want = jitrope.prepare_qkv(q, k, None, *tables, **{**words, **of_qk}, quantize=DynamicQuantize(**form_of_qk))
    launches, again = backend.launched.total() - before, {}
    for _ in range(3):
        before = backend.launched.total()
        got = jitrope.prepare_qkv(q, k, v, *tables, **words, **again, quantize=DynamicQuantize(**form, v=True))
        assert backend.launched.total() - before == launches
        assert all(same(x, y) for xs, ys in zip(got, want[:2]) for x, y in zip(xs, ys))
        assert same(got[2].values[:end], want_v.values)
        assert same(got[2].scale[: len(want_v.scale)], want_v.scale)
        assert not again or got[2].values is again["out"][2]
        again = {"out": (None, None, torch.zeros_like(got[2].values.view(torch.uint8)).view(got[2].values.dtype))}


@pytest.mark.parametrize("per", ["token", "kv_head"])
def test_refusals_of_computed_scales(per: str) -> None:
    q, k, cos, sin = inputs("cpu", 2, 5, 4, 64)

    def refused(match: str, v: Any = k, k: Any = k, q: Any = q, **words: Any) -> None:
        words = {"cos": cos, "sin": sin, "quantize": DynamicQuantize(per=per, v=True), **words}
        with pytest.raises(InvalidInput, match=match):
            jitrope.prepare_qkv(q, k, v, **words)

    refused("v is None; it must be a tensor, because quantize has v=True", v=None)
    like_k = "v is a tensor .*, k a tensor .*; quantize converts a v like k"
    refused(like_k, v=torch.cat((k, k), 2))
    refused(like_k, v=k.float())
    refused(like_k, v=k[0])
    refused(like_k, v=k[0], out=Ulysses(2))
    refused("v is a tensor .*, k None; quantize converts a v like k", k=None, out=Ulysses(2))
    nvfp4 = {"group": 16, "scale_dtype": FP8, "v_global_scale": 1.0}
    refused(like_k, v=k[0], quantize=DynamicQuantize(FP4, **nvfp4, v=True))
    refused("q is a tensor of shape|q has shape", q=torch.ones(()), quantize=DynamicQuantize(FP4, v=True))
    refused("v is a tensor .*, k None; quantize converts a v like k", k=None)
    each = {name: x[None, :, None].expand(2, 5, 2, -1) for name, x in (("cos", cos), ("sin", sin))}
    refused("a v like k, beside neither .* nor tables for each head", q=k, **each)
    refused(like_k, v=torch.cat((k, k), 2), out=Ulysses(2))
    refused("v requires a gradient, but this call has none", v=k.clone().requires_grad_(), out=Ulysses(2))
    refused("v requires a gradient, but this call has none; leave v=True of quantize out", v=k.clone().requires_grad_())
    refused("out's v is bfloat16; it must be", out=(None, None, torch.empty_like(k)))
    cache = KVCache(*torch.zeros(2, 10, k.shape[2], 64).to(k), torch.arange(10))
    refused("v=True of quantize does not go with a cache; give its scales to KVCache", cache=cache)
    with pytest.raises(InvalidInput, match=r"v_global_scale is 1\.0; it must be None without v=True"):
        DynamicQuantize(FP4, group=16, scale_dtype=FP8, v_global_scale=1.0)
    with pytest.raises(InvalidInput, match="DynamicQuantize: v is 'yes'; it must be"):
        DynamicQuantize(v="yes")  # type: ignore[arg-type]
    assert repr(DynamicQuantize(v=True)) == "DynamicQuantize(v=True)"


def test_refusals() -> None:
    q, k, cos, sin = inputs("cpu", 2, 5, 4, 64)
    slots = torch.arange(10)

    def refused(match: str, v: Any = k, k: Any = k, scale: Any = 0.1, **words: Any) -> None:
        given = {"cos": cos, "sin": sin, "quantize": Quantize(0.1, 0.1 if k is not None else None, scale), **words}
        with pytest.raises(InvalidInput, match=match):
            jitrope.prepare_qkv(q, k, v, **given)

    refused("v is None; it must be a tensor, because quantize has a v_scale", v=None)
    refused("v is a tensor .*; quantize converts a v like k", v=torch.cat((k, k), 2))
    refused("v is a tensor .*; quantize converts a v like k", v=k[0])
    refused("v is a tensor .*, k None; quantize converts a v like k", k=None)
    refused("v is None; it must be a tensor, because quantize has a v_scale", v=None, out=Ulysses(2))
    refused("v requires a gradient, but this call has none", v=k.clone().requires_grad_(), out=Ulysses(2))
    refused(r"v_scale is .*; it must be \(\) or \(2,\) or \(2, 2\), float32", scale=torch.ones(3))
    refused("out's v is bfloat16; it must be", out=(None, None, torch.empty_like(k)))
    with pytest.raises(InvalidInput, match="Quantize: v_scale is 'a'; it must be a finite number"):
        Quantize(0.1, 0.1, "a")  # type: ignore[arg-type]
    cache = KVCache(*torch.zeros(2, 10, k.shape[2], 64).to(k), slots)
    with pytest.raises(InvalidInput, match="v_scale of quantize does not go with a cache; give its scales to KVCache"):
        jitrope.prepare_qkv(q, k, k, cos, sin, cache=cache, quantize=Quantize(0.1, None, 0.1))
