"""`prepare_fused_qkv` with a cache, a conversion, a transform and `out`: the bits of `prepare_qkv` of q, k and v.

With the projection's bias they are those of qkv + bias.
"""

from __future__ import annotations

from itertools import cycle, product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import jitrope
from jitrope import DynamicQuantize, InvalidInput, KVCache, Norm, Packed, Quantize, Scaled, Ulysses

from . import oracle
from .devices import DEVICES
from .host import backend

G, N, D, SLOTS = 2, 3, 64, 24
HEADS = (G * N, G)
GROUPED: Any = {"heads": HEADS, "order": "grouped"}
FP8 = torch.float8_e4m3fn
E8M0 = getattr(torch, "float8_e8m0fnu", torch.uint8)
STAGES: dict[str, dict[str, Any]] = {
    "cache": {"cache": torch.bfloat16},
    "fp8 cache": {"cache": FP8, "quantize": Quantize(0.05)},
    "block cache": {"cache": torch.int8},
    "cache and dynamic scales": {"cache": torch.bfloat16, "quantize": DynamicQuantize(group=32, scale_dtype=E8M0)},
    "cache and transform": {"cache": torch.bfloat16, "hadamard": True},
    "fp8": {"quantize": Quantize(0.05, 0.02, hadamard=True)},
    "scales of heads": {"quantize": Quantize(torch.rand(G * N) + 0.1, torch.rand(G) + 0.1)},
    "dynamic scales": {"quantize": DynamicQuantize(torch.int8)},
    "groups": {"quantize": DynamicQuantize(group=32)},
    "tiles": {"quantize": DynamicQuantize(group=16, scale_dtype=E8M0, swizzled=True)},
    "heads": {"quantize": DynamicQuantize(per="head")},
    "heads of k, v too": {"quantize": DynamicQuantize(torch.int8, per="kv_head", v=True, hadamard=True)},
    "transform": {"hadamard": True},
    "out": {"out": (None, None, None)},
    "ulysses": {"out": Ulysses(2)},
    "fp8 by rank": {"quantize": Quantize(0.05, 0.02, 0.03), "out": Ulysses(2)},
    "heads by rank": {"quantize": DynamicQuantize(per="head"), "out": Ulysses(2)},
    "groups by rank": {"quantize": DynamicQuantize(group=32, v=True), "out": Ulysses(2)},
}
NORMS: dict[str, Any] = {
    "none": None,
    "norm": Norm(torch.rand(D), torch.rand(D)),
    "layer": Norm(k_weight=torch.rand(D), k_bias=torch.rand(D), kind="layer_norm", of="k"),
    "v too": Norm(v_norm=True),
}
ROWS = {"q_weight": torch.rand(G * N * D), "k_weight": torch.rand(G * D), "across_heads": True}
FORMS = [("grouped", "bshd"), ("qkv", "bshd"), ("grouped", "sbhd"), ("grouped", "thd"), ("qkv", "thd")]
FORMS += [("qkv_gated", "bshd"), ("qkv_gated", "thd")]


def made(order: str, layout: str, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(qkv, a part of a wider tensor; bias; cos; sin)."""
    generator = torch.Generator().manual_seed(2)
    lead = {"bshd": (2, 5), "sbhd": (5, 2), "thd": (10,)}[layout]
    each = 2 * N if order == "qkv_gated" else N
    shape = (G, (each + 2) * D) if order == "grouped" else ((each + 2) * G, D)
    qkv = torch.randn(*lead, 2 * shape[0], shape[1], generator=generator)[..., : shape[0], :]
    tables = [torch.randn(10, D // 2, generator=generator).to(device) for _ in range(2)]
    bias = torch.randn(shape, generator=generator).bfloat16().to(device)
    return qkv.bfloat16().to(device), bias, *tables  # type: ignore[return-value]


def caches(dtype: torch.dtype, device: str) -> dict[str, Any]:
    """The words of a cache full of zeros; int8 has scales beside it."""
    words: dict[str, Any] = {f"{name}_cache": torch.zeros(SLOTS, G, D, device=device).to(dtype) for name in "kv"}
    if dtype == torch.int8:
        words |= {f"{name}_block_scale": torch.zeros(SLOTS, G, 2, device=device) for name in "kv"}
    return words | ({"k_scale": 0.05, "v_scale": 0.05} if dtype == FP8 else {})


def moved(x: Any, device: str) -> Any:
    """A value with its tensors on a device."""
    if x is None or device == "cpu":
        return x
    if isinstance(x, Norm):
        x.tensors = {name: y.to(device) for name, y in x.tensors.items()}
    if isinstance(x, Quantize):
        x.given = {name: y.to(device) if isinstance(y, Tensor) else y for name, y in x.given.items()}
    return x


def flat(results: Any, stored: dict[str, Any]) -> list[Tensor]:
    """The tensors of a call's results, and its caches, as bytes."""
    parts = [y for x in results if x is not None for y in (x if isinstance(x, Scaled) else (x,))]
    parts += [x for x in stored.values() if isinstance(x, Tensor)]
    return [x.contiguous().view(torch.uint8).cpu() for x in parts]


CALLS = [(stage, norm, *form, True) for (stage, norm), form in zip(product(STAGES, NORMS), cycle(FORMS))]
CALLS += [(stage, "none", *form, False) for stage, form in zip(STAGES, cycle(FORMS))]
CALLS += [(stage, "means", *form, True) for stage, form in zip(STAGES, cycle(FORMS))]
CALLS += [(stage, "across", *form, True) for stage in ("scales of heads", "out", "ulysses") for form in FORMS]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("stage", "norm", "order", "layout", "biased"), CALLS)
def test_the_bits_of_separate_tensors(
    stage: str, norm: str, order: str, layout: str, biased: bool, device: str
) -> None:
    """In one launch, or two; the second call is a known one. qkv stays. A gate has its bias too."""
    jitrope.configure(launch=("token_linear", "grid_2d")[biased])
    qkv, bias, *tables = made(order, layout, device)
    before = qkv.clone()
    summed = (qkv + bias if biased else qkv).contiguous()
    q, k, v, *gate = oracle.split(summed, HEADS, order)
    means: dict[str, Any] = {}
    if norm == "means":
        of_tokens = [x.float().square().mean((-2, -1)) for x in (q, k)]
        means["mean_squares"] = [x.T if layout == "sbhd" else x for x in of_tokens]
    own_norm = NORMS[norm] if norm in NORMS else Norm(**ROWS, **means)
    words = {**STAGES[stage], "norm": moved(own_norm, device), "layout": layout}
    words["quantize"], dtype = moved(words.get("quantize"), device), words.pop("cache", None)
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(1))[:10].to(device)
    for _ in range(2):
        found = []
        for fused in (True, False):
            own = {} if dtype is None else caches(dtype, device)
            given = {"cache": KVCache(**own, slot_mapping=slots)} if own else {}
            if fused:
                more: dict[str, Any] = {"bias": bias} if biased else {}
                count = backend.launched.total()
                got = jitrope.prepare_fused_qkv(qkv, *tables, heads=HEADS, order=order, **words, **given, **more)
                launches = backend.launched.total() - count
                assert launches <= 1 + stage.startswith("heads")
                assert own == {} or got[1:3] == (None, None)
                assert all(x is None or x.is_contiguous() for x in got[:3] if not isinstance(x, Scaled))
            else:
                got = jitrope.prepare_qkv(*[x.contiguous() for x in (q, k, v)], *tables, **words, **given)
                got = (*got, *gate) if dtype is None else (got[0], *gate)
            found.append(flat(got, own))
        assert len(found[0]) == len(found[1])
        for x, y in zip(*found):
            assert torch.equal(x, y)
    assert torch.equal(qkv, before)


@pytest.mark.parametrize("device", DEVICES)
def test_given_tensors_and_what_stays(device: str) -> None:
    """Heads-first operands of attention in fp8, and v; an item that is None is a fresh tensor; v can stay a view."""
    qkv, bias, *tables = made("grouped", "bshd", device)
    quantize = Quantize(0.05, 0.02)
    want = jitrope.prepare_fused_qkv(qkv, *tables, **GROUPED, bias=bias, quantize=quantize)
    q_out = torch.zeros(2, G * N, 5, D, device=device).to(FP8)
    v_out = torch.zeros(2, G, 5, D, device=device).bfloat16()
    out = (q_out.transpose(1, 2), None, v_out.transpose(1, 2))
    got = jitrope.prepare_fused_qkv(qkv, *tables, **GROUPED, bias=bias, quantize=quantize, out=out)
    assert got[0] is out[0]
    assert got[2] is out[2]
    for x, y in zip(got, want):
        assert torch.equal(x.contiguous().view(torch.uint8), y.view(torch.uint8))
    q, k, v = jitrope.prepare_fused_qkv(qkv, *tables, **GROUPED, quantize=quantize, copy_v=False)
    assert v.untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr()
    assert torch.equal(v, oracle.split(qkv, **GROUPED)[2])
    assert q.dtype == k.dtype == FP8


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("order", ["qkv", "qkv_gated", "grouped"])
def test_several_heads_of_each_rank_have_their_bias(order: str, device: str) -> None:
    """In fresh tensors and in given ones; q's groups of one head can be cut too."""
    generator = torch.Generator().manual_seed(4)
    shape = {"qkv": (12, D), "qkv_gated": (16, D), "grouped": (4, 3 * D)}[order]
    qkv, bias = (torch.randn(*lead, *shape, generator=generator).bfloat16().to(device) for lead in ((2, 5), ()))
    tables = made("qkv", "bshd", device)[2:]
    q, k, v, *_ = (x.contiguous() for x in oracle.split(qkv + bias, (4, 4), order))
    want = jitrope.prepare_qkv(q, k, v, *tables, out=Ulysses(2))
    words: dict[str, Any] = {"heads": (4, 4), "order": order, "bias": bias}
    for out in (Ulysses(2), [torch.zeros_like(x) for x in want]):
        got = jitrope.prepare_fused_qkv(qkv, *tables, **words, out=out)
        assert all(torch.equal(x, y) for x, y in zip(got, want))


@pytest.mark.parametrize("stage", ["cache", "quantize", "out"])
@pytest.mark.parametrize("number", [np.int64, float])
def test_heads_are_any_whole_numbers(number: Any, stage: str) -> None:
    """numpy's and 3.0 too."""
    qkv, _, *tables = made("qkv", "bshd", "cpu")
    cache = KVCache(**caches(torch.bfloat16, "cpu"), slot_mapping=torch.arange(10))
    out = (None, None, torch.zeros(2, 5, G, D).bfloat16())
    words: dict[str, Any] = {"cache": cache, "quantize": DynamicQuantize(v=True), "out": out}
    one, two = (
        jitrope.prepare_fused_qkv(qkv, *tables, heads=heads, **{stage: words[stage]})
        for heads in (HEADS, [number(n) for n in HEADS])
    )
    assert [x is None for x in one] == [x is None for x in two] == [False, *[stage == "cache"] * 2]
    assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(flat(one, {}), flat(two, {})))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "plain"])
def test_tokens_after_the_last_sequence(biased: bool, device: str) -> None:
    """q and k are zeros; v has its bias, and all are stored where a slot says so."""
    qkv, bias, *tables = made("qkv", "thd", device)
    more: dict[str, Any] = {"bias": bias} if biased else {}
    packed = Packed(torch.tensor([0, 4, 8], device=device))
    own = caches(torch.bfloat16, device)
    cache = KVCache(**own, slot_mapping=torch.arange(10, device=device))
    words: dict[str, Any] = {"heads": HEADS, "positions": packed, **more}
    q, k, v = jitrope.prepare_fused_qkv(qkv, *tables, **words, cache=cache)
    want = jitrope.prepare_fused_qkv(qkv, *tables, **words)
    assert k is v is None
    for x, y in zip((q, own["k_cache"][:10], own["v_cache"][:10]), want):
        assert torch.equal(x, y)
    assert (q[8:] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_a_gate_is_a_view_and_no_table_is_needed(device: str) -> None:
    qkv, _, *_ = made("qkv_gated", "bshd", device)
    words: dict[str, Any] = {"heads": HEADS, "order": "qkv_gated"}
    q, _, v, gate = jitrope.prepare_fused_qkv(qkv, **words, quantize=DynamicQuantize())
    parts = oracle.split(qkv, HEADS, "qkv_gated")
    assert gate.untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr()
    assert torch.equal(gate, parts[3])
    assert torch.equal(v, parts[2])
    want, _, _ = jitrope.prepare_qkv(parts[0].contiguous(), None, None, quantize=DynamicQuantize())
    assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(q, want))


@pytest.mark.parametrize("device", DEVICES)
def test_compiled(device: str) -> None:
    qkv, bias, *tables = made("grouped", "bshd", device)

    def call(qkv: Tensor, bias: Tensor, own: dict[str, Any]) -> tuple[Tensor, Tensor]:
        cache = KVCache(**own, slot_mapping=torch.arange(10, device=qkv.device))
        words: dict[str, Any] = {**GROUPED, "bias": bias, "cache": cache, "quantize": DynamicQuantize()}
        got = jitrope.prepare_fused_qkv(qkv, *tables, **words)[0]
        return got.values, got.scale

    one, two = (caches(torch.bfloat16, device) for _ in range(2))
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    pairs = [*zip(compiled(qkv, bias, one), call(qkv, bias, two)), *zip(one.values(), two.values())]
    assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in pairs)
    assert one["v_cache"].any()


def test_refusals() -> None:
    qkv, bias, *tables = made("grouped", "bshd", "cpu")
    cache = KVCache(**caches(torch.bfloat16, "cpu"), slot_mapping=torch.arange(10))

    def refused(match: str, qkv: Any = qkv, **words: Any) -> None:
        with pytest.raises(InvalidInput, match=match):
            jitrope.prepare_fused_qkv(qkv, *tables, **{**GROUPED, "cache": cache, **words})

    refused("prepare_fused_qkv: cache is 1; it must be a jitrope.KVCache", cache=1)
    refused("prepare_fused_qkv: quantize is 1; it must be a jitrope.Quantize", quantize=1)
    refused("inplace does not go with fused QKV with cache", inplace=True)
    refused("inverse does not go with fused QKV with cache", inverse=True)
    refused("out's k is .*; it must be None, because k goes to the cache", out=(None, qkv, None))
    refused("out is .*; it must be a tuple of 3 tensors", out=qkv)
    refused("prepare_fused_qkv: per='head' does not go with a cache", quantize=DynamicQuantize(per="head"))
    for per in ("token", "head"):
        words = {"cache": None, "quantize": DynamicQuantize(per=per, v=True), "copy_v": False}
        refused("copy_v=False does not go with v=True of quantize", **words)
    refused("Ulysses does not go with a cache", out=Ulysses(2))
    refused("Ulysses does not go with copy_v=False", out=Ulysses(2), cache=None, copy_v=False)
    refused("q is .*; for 4 ranks it needs a multiple of 4 heads", out=Ulysses(4), cache=None)
    one = [torch.zeros(1, 2, 5, n, D).bfloat16() for n in (G * N, G, G)]
    refused("there must be a rank for each of the 2 groups", out=one, cache=None)
    refused("across_heads does not go with a cache", norm=Norm(across_heads=True))
    refused("prepare_fused_qkv: hadamard is given beside quantize", quantize=Quantize(1.0), hadamard=True)
    refused("quantize has a k_scale, but k goes to the cache", quantize=Quantize(1.0, 1.0))
    refused("copy_v=False does not go with bias", bias=bias, copy_v=False)
    refused("bias is torch.float32", bias=bias.float())
    refused("heads=.14, 2. with order='grouped' are 18 heads of D elements", heads=(14, 2))
    refused("heads is 'a'", heads="a")
    refused("order is 'b'", order="b")
    refused(r"order is \['qkv'\]; it must be one of", order=["qkv"])
    refused("copy_v is None; it must be True or False", copy_v=None)
    refused("qkv is None; it must be a tensor", qkv=None)
    refused("qkv requires a gradient, but this call has none", qkv=qkv.clone().requires_grad_())
    words = {**caches(torch.bfloat16, "cpu"), "slot_mapping": torch.arange(10)}
    refused("rotate_k does not go with fused QKV", cache=KVCache(**words, rotate_k=True))
    buffer = torch.zeros(2, 5, G * (N + 2) * D).bfloat16()
    out = (buffer[..., : G * N * D].unflatten(2, (-1, D)), None, None)
    refused("out's q and qkv share memory", buffer.unflatten(2, (G, -1)), out=out)
    refused(r"out's q is \(2, 5, 6, 32\) .*; it must be \(2, 5, 6, 64\)", out=(out[0][..., :32], None, None))
