"""v in the launches that convert q and k: `Quantize(q_scale, k_scale, v_scale)`, and `DynamicQuantize(v=True)`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import jitrope
from jitrope import DynamicQuantize, InvalidInput, KVCache, Norm, Packed, Quantize, Ulysses
from jitrope.ops import library
from jitrope.ops.operations import QK_NORM_ROPE_SCALED
from jitrope.plan.options import NO_NORM, Options

from .devices import DEVICES
from .host import backend
from .test_quantize import E8M0, FP4, FP8, inputs, numbers, scaled
from .test_row_scales import assert_same, converted

E5M2 = torch.float8_e5m2
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm": {"norm": Norm(rounding="once")},
    "v too": {"norm": Norm(v_norm=True)},
    "v too, part": {"norm": Norm(v_norm=True), "rotary_dim": 32},
    "transform": {"hadamard": True},
    "e5m2": {"dtype": E5M2},
    "heads": {"scales": True},
    "part, other pairs": {"rotary_dim": 32, "rotary_offset": 16, "interleaved_out": True},
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
    source = {"norm": Norm()} if way.startswith("v too") else {}
    want_v, _, _ = jitrope.prepare_qkv(v, None, None, layout=layout, **source, quantize=Quantize(scales[2], **form))
    for given in (False, True, True):
        before, out = backend.launched.total(), {}
        if given:
            out["out"] = (None, None, torch.zeros_like(torch.cat((v, v), -1), dtype=want_v.dtype)[..., :64])
        got = jitrope.prepare_qkv(q, k, v, *tables, **words, **out, quantize=Quantize(*scales, **form_of(way)))
        assert backend.launched.total() - before <= 1
        assert all(same(x, y) for x, y in zip(got, (*want[:2], want_v)))
        assert not given or got[2] is out["out"][2]


@pytest.mark.parametrize("quantize", [Quantize(0.05, 0.02, 0.03), DynamicQuantize(v=True)])
def test_no_given_tensors(quantize: Any) -> None:
    """out=None is the default."""
    q, k, cos, sin = inputs("cpu", 2, 5, 4, 64)
    got, want = (jitrope.prepare_qkv(q, k, k, cos, sin, quantize=quantize, **out) for out in ({"out": None}, {}))
    assert all(same(x, y) for xs, ys in zip(got, want) for x, y in zip(xs, ys))


@pytest.mark.parametrize("device", DEVICES)
def test_of_fused_qkv_and_for_ranks(device: str) -> None:
    """With a projection's bias; and in given tensors with a group of heads for each rank."""
    q, k, cos, sin = inputs(device, 2, 5, 4, 64)
    v, quantize = k + 1, Quantize(0.05, 0.02, 0.03)
    want = jitrope.prepare_qkv(q, k, v, cos, sin, quantize=quantize)
    out = [torch.zeros(2, 2, 5, x.shape[2] // 2, 64, device=device).to(FP8) for x in (q, k, v)]
    jitrope.prepare_qkv(q, k, v, cos, sin, quantize=quantize, out=out)
    assert all(same(torch.cat([*x.view(torch.uint8)], 2), y) for x, y in zip(out, want))
    bias = torch.randn(q.shape[2] + 2 * k.shape[2], 64, generator=torch.Generator().manual_seed(1)).to(q)
    qkv = torch.cat((q, k, v), 2)
    words: dict[str, Any] = {"heads": (q.shape[2], k.shape[2]), "quantize": quantize}
    parts = (qkv + bias).split([q.shape[2], k.shape[2], k.shape[2]], 2)
    want = jitrope.prepare_qkv(*[x.contiguous() for x in parts], cos, sin, quantize=quantize)
    assert all(same(x, y) for x, y in zip(jitrope.prepare_fused_qkv(qkv, cos, sin, bias=bias, **words), want))


COMPUTED: dict[str, dict[str, Any]] = {
    "tokens": {},
    "norm": {"norm": {"rounding": "once"}, "dtype": torch.int8},
    "v too": {"norm": {"v_norm": True}, "group": 32},
    "v too, part": {"norm": {"v_norm": True}, "dtype": E5M2, "group": 32, "rotary_dim": 32},
    "transform": {"hadamard": True, "dtype": E5M2},
    "groups": {"group": 16, "layout": "bhsd", "rotary_dim": 32, "rotary_offset": 16, "interleaved_out": True},
    "powers": {"group": 32, "scale_fmt": "ue8m0", "tables": False},
    "tiles": {"group": 16, "scale_dtype": E8M0, "swizzled": True},
    "nvfp4": {"dtype": FP4, "group": 16, "scale_dtype": FP8, "v_global_scale": 0.01},
    "host's rounding": {"rounding": "dtype", "norm": {"v_norm": True, "rounding": "twice"}},
    "head": {"per": "head", "norm": {"v_norm": True}, "layout": "bhsd"},
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


@pytest.mark.parametrize("device", DEVICES)
def test_computed_scales_in_plain_torch(device: str) -> None:
    """The largest element of each head, of a token or of a batch row, becomes the largest number."""
    q, k, cos, sin = inputs(device, 2, 5, 4, 64)
    v = k.flip(1) * 3 + 1
    got = jitrope.prepare_qkv(q, k, v, cos, sin, quantize=DynamicQuantize(group=32, v=True))[2]
    values, scale = scaled(v, FP8, 32)
    assert same(got.values, values)
    assert same(got.scale, scale)
    assert (numbers(got.values) * got.scale.repeat_interleave(32, -1) - v).abs().max() <= v.abs().max() / 16
    assert_same(
        jitrope.prepare_qkv(q, k, v, quantize=DynamicQuantize(per="kv_head", v=True))[2], converted(v.float(), FP8, 2)
    )


@pytest.mark.parametrize("device", DEVICES)
def test_computed_scales_of_fused_qkv(device: str) -> None:
    """Those of a call on the parts, also with a bias."""
    q, k, cos, sin = inputs(device, 2, 5, 4, 64)
    qkv, quantize = torch.cat((q, k, k + 1), 2), DynamicQuantize(group=32, v=True)
    bias = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).to(q)
    words: dict[str, Any] = {"heads": (4, 2), "quantize": quantize}
    for added in (None, bias):
        parts = (qkv if added is None else qkv + added).split([4, 2, 2], 2)
        want = jitrope.prepare_qkv(*[x.contiguous() for x in parts], cos, sin, quantize=quantize)
        got = jitrope.prepare_fused_qkv(qkv, cos, sin, bias=added, **words)
        assert all(same(x, y) for xs, ys in zip(got, want) for x, y in zip(xs, ys))
    with pytest.raises(InvalidInput, match="copy_v=False does not go with v=True of quantize"):
        jitrope.prepare_fused_qkv(qkv, cos, sin, copy_v=False, **words)
    with pytest.raises(InvalidInput, match=r"out's v is .*; it must be None with copy_v=False"):
        jitrope.prepare_fused_qkv(qkv, cos, sin, copy_v=False, out=(None, None, torch.empty_like(k)), **words)


@pytest.mark.parametrize("device", DEVICES)
def test_compiled(device: str) -> None:
    q, k, cos, sin = inputs(device, 2, 5, 4, 64)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return jitrope.prepare_qkv(q, k, v, cos, sin, quantize=Quantize(0.05, 0.02, 0.03))

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert all(same(x, y) for x, y in zip(compiled(q, k, k + 1), call(q, k, k + 1)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("per", ["token", "kv_head"])
def test_compiled_with_computed_scales(per: str, device: str) -> None:
    q, k, cos, sin = inputs(device, 2, 5, 4, 64)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return [*jitrope.prepare_qkv(q, k, v, cos, sin, quantize=DynamicQuantize(per=per, v=True))[2]]

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert all(same(x, y) for x, y in zip(compiled(q, k, k + 1), call(q, k, k + 1)))


def test_opcheck() -> None:
    """The mutations that the op with tensors for v declares, its fake and its compiled form."""
    q, k, cos, sin = inputs("cpu", 2, 5, 4, 64)
    into, v = QK_NORM_ROPE_SCALED.into, k + 1
    options = Options(rotary_dim=64, norm=NO_NORM, out_dtype="int8", group=32, dynamic_v=True)
    given = {"q": q, "k": k, "v": v, "cos": cos, "sin": sin}
    given |= {f"{name}_out": torch.empty_like(given[name], dtype=torch.int8) for name in "qkv"}
    torch.library.opcheck(getattr(torch.ops.jitrope, into.name).default, library.arguments(into, given, options))


@pytest.mark.parametrize("per", ["token", "kv_head"])
def test_refusals_of_computed_scales(per: str) -> None:
    q, k, cos, sin = inputs("cpu", 2, 5, 4, 64)

    def refused(match: str, v: Any = k, k: Any = k, q: Any = q, **words: Any) -> None:
        words = {"cos": cos, "sin": sin, "quantize": DynamicQuantize(per=per, v=True), **words}
        with pytest.raises(InvalidInput, match=match):
            jitrope.prepare_qkv(q, k, v, **words)

    refused("v is None; it must be a tensor, because quantize has v=True", v=None)
    like_k = "v is .*; it must be like k, because quantize has v=True"
    refused(like_k, v=torch.cat((k, k), 2))
    refused(like_k, v=k.float())
    refused(like_k, v=k[0])
    refused(like_k, v=k[0], out=Ulysses(2))
    refused("k is None; it must be a tensor, because quantize has v=True", k=None, out=Ulysses(2))
    nvfp4 = {"group": 16, "scale_dtype": FP8, "v_global_scale": 1.0}
    refused(like_k, v=k[0], quantize=DynamicQuantize(FP4, **nvfp4, v=True))
    refused("q is a tensor of shape|q has shape", q=torch.ones(()), quantize=DynamicQuantize(FP4, v=True))
    refused("k is None; it must be a tensor, because quantize has v=True", k=None)
    each = {name: x[None, :, None].expand(2, 5, 2, -1) for name, x in (("cos", cos), ("sin", sin))}
    refused("v cannot be converted beside tables for each head, but quantize has v=True", q=k, **each)
    refused("v is .*; it must be like k, because quantize has v=True", v=torch.cat((k, k), 2), out=Ulysses(2))
    refused("v requires a gradient, but this call has none", v=k.clone().requires_grad_(), out=Ulysses(2))
    refused("v requires a gradient, but this call has none; leave v=True of quantize out", v=k.clone().requires_grad_())
    refused("out's v is .* torch.bfloat16 on cpu; it must be", out=(None, None, torch.empty_like(k)))
    cache = KVCache(*torch.zeros(2, 10, k.shape[2], 64).to(k), torch.arange(10))
    refused("v=True of quantize does not go with a cache, which has v_block_scale", cache=cache)
    with pytest.raises(InvalidInput, match=r"v_global_scale is 1\.0; it must be None without v=True"):
        DynamicQuantize(FP4, group=16, scale_dtype=FP8, v_global_scale=1.0)
    with pytest.raises(InvalidInput, match="DynamicQuantize: v is 'yes'; it must be"):
        DynamicQuantize(v="yes")  # type: ignore[arg-type]
    assert repr(DynamicQuantize(v=True)).endswith("e4m3fn, v=True)")


def test_refusals() -> None:
    q, k, cos, sin = inputs("cpu", 2, 5, 4, 64)
    slots = torch.arange(10)

    def refused(match: str, v: Any = k, k: Any = k, scale: Any = 0.1, **words: Any) -> None:
        given = {"cos": cos, "sin": sin, "quantize": Quantize(0.1, 0.1 if k is not None else None, scale), **words}
        with pytest.raises(InvalidInput, match=match):
            jitrope.prepare_qkv(q, k, v, **given)

    refused("v is None; it must be a tensor, because quantize has a v_scale", v=None)
    refused("v is .*; it must be like k, because v_scale is given", v=torch.cat((k, k), 2))
    refused("v is .*; it must be like k, because v_scale is given", v=k[0])
    refused("k is None; it must be a tensor, because v_scale is given", k=None)
    refused("v is None; it must be a tensor, because quantize has a v_scale", v=None, out=Ulysses(2))
    refused("v requires a gradient, but this call has none", v=k.clone().requires_grad_(), out=Ulysses(2))
    refused("v_scale is .*; it must be fp32 on q's device", scale=torch.ones(3))
    refused("out's v is .* torch.bfloat16 on cpu; it must be", out=(None, None, torch.empty_like(k)))
    with pytest.raises(InvalidInput, match="Quantize: v_scale is 'a'; it must be a finite number"):
        Quantize(0.1, 0.1, "a")  # type: ignore[arg-type]
    cache = KVCache(*torch.zeros(2, 10, k.shape[2], 64).to(k), slots)
    with pytest.raises(InvalidInput, match="quantize has a v_scale, but v goes to the cache; give it to KVCache"):
        jitrope.prepare_qkv(q, k, k, cos, sin, cache=cache, quantize=Quantize(0.1, None, 0.1))
