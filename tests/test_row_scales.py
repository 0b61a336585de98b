"""Dynamic scales of each head of a batch row, in two launches: values, stages, torch's machinery, refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import jitrope
from jitrope import DynamicQuantize, InvalidInput, KVCache, Norm, Packed, Quantize, planning
from jitrope.plan.options import Options
from jitrope.stages.norm import NO_NORM

from .cases import NORM_SCALES, op_arguments
from .devices import DEVICE, DEVICES
from .test_quantize import FP4, FP8, LARGEST, inputs

AXES = {"bshd": (0, 1, 2), "sbhd": (1, 0, 2), "bhsd": (0, 2, 1)}


def converted(y: Tensor, dtype: torch.dtype, heads: int) -> tuple[Tensor, Tensor]:
    """Elements and scales of y (B, S, H, D) in fp32, with a scale for each of `heads` groups of heads."""
    rows = y.unflatten(2, (heads, -1))
    scale = rows.abs().amax((1, 3, 4)).clamp(min=1e-12) * (1 / LARGEST[dtype])
    units = (rows * (1 / scale)[:, None, :, None, None]).clamp(-LARGEST[dtype], LARGEST[dtype]).flatten(2, 3)
    return (units.round() if dtype == torch.int8 else units).to(dtype), scale


def assert_same(got: Any, want: tuple[Tensor, Tensor], layout: str = "bshd") -> None:
    values, scale = got
    order = (*AXES.get(layout, (0, 1, 2)), 3)
    laid = want[0].permute(order) if layout != "thd" else want[0][0]
    assert (values.dtype, values.shape) == (laid.dtype, laid.shape)
    assert torch.equal(values.view(torch.uint8), laid.view(torch.uint8))
    assert scale.dtype == torch.float32
    assert torch.equal(scale, want[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("per", ["head", "kv_head"])
@pytest.mark.parametrize("layout", [*AXES, "thd"])
@pytest.mark.parametrize("dtype", [dtype for dtype in LARGEST if dtype != FP4], ids=str)
def test_a_head_has_one_scale_for_a_batch_row(dtype: torch.dtype, layout: str, per: str, device: str) -> None:
    """The bits of a rotation in fp32, of its largest elements in plain torch, and of a division by them."""
    q, k, cos, sin = inputs(device, 1 if layout == "thd" else 3, 7, 4, 64)
    q[0, 2:] *= 8  # each row has other scales
    rotated = jitrope.apply_rope(q.float(), k.float(), cos, sin)
    given = [x[0] if layout == "thd" else x.permute(*AXES[layout], 3) for x in (q, k)]
    got = jitrope.prepare_qkv(*given, None, cos, sin, quantize=DynamicQuantize(dtype, per=per), layout=layout)
    assert got[2] is None
    for x, want, heads in zip(got, rotated, (4 if per == "head" else 2, 2)):
        assert_same(x, converted(want, dtype, heads), layout)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("launch", ["auto", "token_linear", "grid_2d"])
@pytest.mark.parametrize("normed", [False, True])
def test_packed_sequences_have_scales_of_their_own(normed: bool, launch: Any, device: str) -> None:
    """Spare tokens, NaN here, have no part in a scale, and become zeros; a sequence without tokens has the least."""
    jitrope.configure(launch=launch)
    (q,), (k,), cos, sin = inputs(device, 1, 12, 4, 64, dtype=torch.float32)
    q[2:], k[:2] = q[2:] * 8, k[:2] * 3
    q[9:] = k[9:] = math.nan
    cu_seqlens = torch.tensor([0, 2, 2, 9], dtype=torch.int32, device=device)
    norm = Norm(*torch.linspace(0.5, 2, 128, device=device).view(2, 64)) if normed else None
    for per in ("head", "kv_head"):
        words: dict[str, Any] = {"norm": norm, "quantize": DynamicQuantize(per=per, v=True)}
        got = jitrope.prepare_qkv(q, k, k, cos, sin, positions=Packed(cu_seqlens), **words)
        for sequence, rows in ((0, slice(0, 2)), (2, slice(2, 9))):
            alone = jitrope.prepare_qkv(q[rows], k[rows], k[rows], cos, sin, layout="thd", **words)
            for x, (values, scale) in zip(got, alone):
                assert torch.equal(x.values[rows].view(torch.uint8), values.view(torch.uint8))
                assert torch.equal(x.scale[sequence], scale[0])
        for x in got:
            assert torch.equal(x.scale[1], torch.full_like(x.scale[1], 1e-12) * (1 / 448))
            assert x.scale.shape == (3, 4 if x is got[0] and per == "head" else 2)
        assert not any(x.values[9:].float().any() for x in got[:2])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("launch", ["auto", "token_linear", "grid_2d"])
def test_given_scales_of_packed_sequences(launch: Any, cp_size: int, device: str) -> None:
    """Each sequence has the bits of a call with its scales alone; v after the last one has that one's."""
    jitrope.configure(launch=launch)
    (q,), (k,), cos, sin = inputs(device, 1, 14, 4, 64)
    lengths = [4, 0, 8]
    cu_seqlens = torch.tensor([0, 4, 4, 12], device=device)
    scales = [torch.linspace(0.01, 0.3, 3 * n, device=device).view(3, n) for n in (4, 2, 2)]
    words: dict[str, Any] = {"cos": cos, "sin": sin}
    positions = Packed(cu_seqlens, max_seqlen=14, cp_size=cp_size, cp_rank=cp_size - 1)
    for norm in (None, Norm()):
        got = jitrope.prepare_qkv(q, k, k, quantize=Quantize(*scales), norm=norm, positions=positions, **words)
        begin = 0
        for sequence, length in enumerate(lengths):
            rows = slice(begin, begin := begin + length // cp_size)
            own = Quantize(*[x[sequence] for x in scales])
            cu = cu_seqlens[sequence : sequence + 2] - cu_seqlens[sequence]
            alone = Packed(cu, max_seqlen=14, cp_size=cp_size, cp_rank=cp_size - 1)
            want = jitrope.prepare_qkv(q[rows], k[rows], k[rows], quantize=own, norm=norm, positions=alone, **words)
            for x, y in zip(got, want):
                assert torch.equal(x[rows].view(torch.uint8), y.view(torch.uint8))
        spare = jitrope.prepare_qkv(k[begin:], None, None, quantize=Quantize(scales[2][2]), layout="thd")[0]
        assert torch.equal(got[2][begin:].view(torch.uint8), spare.view(torch.uint8))
        assert not any(x[begin:].float().any() for x in got[:2])


@pytest.mark.parametrize("device", DEVICES)
def test_given_scales_of_packed_sequences_in_latent_attention(device: str) -> None:
    """q, k and v of each sequence have the bits of a call with its scales alone."""
    generator = torch.Generator().manual_seed(1)
    q, kv, k_pe = (torch.randn(9, *n, generator=generator).to(device) for n in ((4, 96), (4, 112), (1, 32)))
    _, _, cos, sin = inputs(device, 1, 9, 4, 32)
    scales = [torch.linspace(0.01, 0.3, 12, device=device).view(3, 4) * n for n in (1, 2, 3)]
    ends = [0, 4, 4, 7]
    words: dict[str, Any] = {"interleaved": True, "interleaved_out": False}
    packed = Packed(torch.tensor(ends, device=device))
    got = jitrope.prepare_mla_qkv(q, kv, k_pe, cos, sin, positions=packed, quantize=Quantize(*scales), **words)
    for n, rows in ((0, slice(0, 4)), (2, slice(4, 7))):
        own = Quantize(*[x[n] for x in scales])
        parts = (x[rows] for x in (q, kv, k_pe))
        want = jitrope.prepare_mla_qkv(*parts, cos, sin, layout="thd", quantize=own, **words)
        for x, y in zip(got, want):
            assert torch.equal(x[rows].view(torch.uint8), y.view(torch.uint8))
    assert not any(x[7:].float().any() for x in got[:2])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("normed", [False, True])
def test_q_and_k_after_the_last_sequence_are_zeros_whatever_its_scales_are(normed: bool, device: str) -> None:
    """A scale is NaN where an element is, and given scales of sequences that are padding may be 0."""
    (q,), (k,), cos, sin = inputs(device, 1, 8, 4, 64)
    q[4, 0, 0] = k[5, 1, 3] = math.nan
    words: dict[str, Any] = {"norm": Norm() if normed else None}
    packed = Packed(torch.tensor([0, 3, 6], device=device))
    bad = [torch.tensor([[1.0] * n, [0.0, math.nan] * (n // 2)], device=device) for n in (4, 2)]
    cache = KVCache(torch.zeros(8, 2, 64, device=device).to(FP8), None, torch.arange(8, device=device), k_scale=bad[1])
    for dtype in (FP8, torch.int8):
        quantize = DynamicQuantize(dtype, per="head")
        got = jitrope.prepare_qkv(q, k, None, cos, sin, positions=packed, quantize=quantize, **words)[:2]
        assert got[0].scale[1].isnan().tolist() == [True, False, False, False]
        assert not any(x.values[6:].float().any() for x in got)
    given = jitrope.prepare_qkv(q, k, None, cos, sin, positions=packed, quantize=Quantize(*bad), **words)[:2]
    assert not any(x[6:].float().any() for x in given)
    jitrope.prepare_qkv(q, k, None, cos, sin, positions=packed, cache=cache, **words)
    assert not cache.tensors["k_cache"][6:].float().any()


@pytest.mark.parametrize("device", DEVICES)
def test_scales_of_no_sequences(device: str) -> None:
    """All tokens lie after the last sequence: q and k are zeros, and v is divided by 1."""
    (q,), (k,), cos, sin = inputs(device, 1, 5, 4, 64)
    none = Packed(torch.zeros(1, dtype=torch.int32, device=device), max_seqlen=0)
    scales = [torch.zeros(0, n, device=device) for n in (4, 2, 2)]
    q8, k8, v8 = jitrope.prepare_qkv(q, k, k, cos, sin, quantize=Quantize(*scales), positions=none)
    assert not q8.float().any() | k8.float().any()
    assert torch.equal(v8.float(), k.to(FP8).float())
    got = jitrope.prepare_qkv(q, k, None, cos, sin, quantize=DynamicQuantize(per="head"), positions=none)
    assert [x.scale.shape for x in got[:2]] == [(0, 4), (0, 2)]


@pytest.mark.parametrize("device", DEVICES)
def test_the_units_of_packed_sequences(device: str) -> None:
    """A sequence's global scale of NVFP4, and the scale of its keys in an fp8 cache."""
    (q,), (k,), cos, sin = inputs(device, 1, 9, 4, 64)
    cu_seqlens = torch.tensor([0, 3, 9], dtype=torch.int32, device=device)
    units = [torch.linspace(0.001, 0.02, 2 * n, device=device).view(2, n) for n in (4, 2)]
    cache, alone = (torch.zeros(9, 2, 64, device=device).to(FP8) for _ in range(2))
    slots = torch.arange(9, device=device)

    def call(rows: slice, units: Any, cache: Tensor, **words: Any) -> list[Tensor]:
        form: dict[str, Any] = {"group": 16, "scale_dtype": FP8, "q_global_scale": units[0], "k_global_scale": units[1]}
        got = jitrope.prepare_qkv(q[rows], k[rows], None, cos, sin, quantize=DynamicQuantize(FP4, **form), **words)
        stored = KVCache(cache, None, slots[rows], k_scale=units[1])
        jitrope.prepare_qkv(q[rows], k[rows], None, cos, sin, cache=stored, **words)
        return [x.view(torch.uint8) for scaled in got[:2] for x in scaled]

    got = call(slice(9), units, cache, positions=Packed(cu_seqlens))
    for sequence, rows in enumerate((slice(0, 3), slice(3, 9))):
        want = call(rows, [x[sequence] for x in units], alone, layout="thd")
        assert all(torch.equal(x[rows], y) for x, y in zip(got, want))
    assert torch.equal(cache.view(torch.uint8), alone.view(torch.uint8))


@pytest.mark.parametrize("device", DEVICES)
def test_nan_zeros_and_no_tokens(device: str) -> None:
    """A NaN anywhere makes its head's scale NaN; zeros, and a row without tokens, have the smallest scale."""
    q, k, _, _ = inputs(device, 2, 9, 3, 64)
    q[0, 4, 1, 7], k[0] = float("nan"), 0
    a, b, _ = jitrope.prepare_qkv(q, k, None, quantize=DynamicQuantize(per="head"))
    assert a.scale.isnan().tolist() == [[False, True, False], [False, False, False]]
    least = torch.full((2, 3), 1e-12, device=device) * (1 / 448)
    assert torch.equal(b.scale[0], least[0, :2])
    none, _, _ = jitrope.prepare_qkv(q[:, :0], None, None, quantize=DynamicQuantize(per="head"))
    assert none.values.shape == (2, 0, 3, 64)
    assert torch.equal(none.scale, least)


@pytest.mark.gpu
def test_every_run_has_the_same_bits() -> None:
    """The largest of all blocks does not depend on their order, and each call begins with zeros."""
    q, k, cos, sin = inputs(DEVICE, 2, 64, 4, 64)
    quantize = DynamicQuantize(per="kv_head")
    for factor in (4.0, 1.0, 0.25):  # smaller ones than those before
        want = [converted(x, FP8, 2) for x in jitrope.apply_rope((q * factor).float(), (k * factor).float(), cos, sin)]
        for _ in range(3):
            for x, y in zip(jitrope.prepare_qkv(q * factor, k * factor, None, cos, sin, quantize=quantize), want):
                assert_same(x, y)


def test_torchs_machinery() -> None:
    q, k, cos, sin = inputs("cpu", 2, 5, 4, 64)

    def call(q: Tensor, k: Tensor) -> Any:
        return jitrope.prepare_qkv(q, k, None, cos, sin, quantize=DynamicQuantize(per="kv_head"))[:2]

    for x, y in zip(torch.compile(call, fullgraph=True, backend="aot_eager")(q, k), call(q, k)):
        assert_same(x, tuple(y))
    for heads in ([q, k], [q, k, k + 1]):
        options = Options(rotary_dim=64, per_row=True, **NO_NORM, dynamic_v=len(heads) > 2)
        arguments = op_arguments(NORM_SCALES, heads, [cos, sin], options)
        utils = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
        torch.library.opcheck(torch.ops.jitrope.prepare.default, arguments, test_utils=utils)


def test_refusals() -> None:
    q, k, cos, sin = inputs("cpu", 1, 5, 4, 64)

    def refused(match: str, *heads: Any, **words: Any) -> None:
        quantize = DynamicQuantize(per=words.pop("per", "head"))
        with pytest.raises(InvalidInput, match=match):
            jitrope.prepare_qkv(*(heads or (q, k, None)), cos, sin, quantize=quantize, **words)

    for text, words in {
        "group does not go with per='head'": {"group": 32},
        "scale_dtype does not go with per='head'": {"scale_dtype": getattr(torch, "float8_e8m0fnu", torch.uint8)},
        "per is 'row'; it must be": {"per": "row"},
        "fp4 does not go with per='head'": {"dtype": FP4},
    }.items():
        with pytest.raises(InvalidInput, match=text):
            DynamicQuantize(**{"per": "head", **words})
    cache = KVCache(*torch.zeros(2, 9, 2, 64, dtype=q.dtype), torch.arange(5))
    refused("per='head' does not go with a cache; pass q's scales in Quantize", q, k, k, cache=cache)
    refused("per='kv_head' needs a multiple of k's heads; q has 4, k 0", q, None, None, per="kv_head")
    refused("per='kv_head' needs a multiple of k's heads; q has 4, k 3", q, q[:, :, :3], None, per="kv_head")
    refused("q requires a gradient, but this call has none", q.clone().requires_grad_(), k, None)
    refused("inplace does not go with quantize", inplace=True)
    refused("across_heads does not go with dynamic scales", norm=Norm(across_heads=True))
    sequences = Packed(torch.tensor([0, 2, 5]))
    with pytest.raises(InvalidInput, match=r"q_scale is .*; it must be \(\) or \(4,\) or \(1\|2, 4\), float32"):
        jitrope.prepare_qkv(q[0], k[0], None, cos, sin, positions=sequences, quantize=Quantize(torch.ones(3, 4), 1.0))
    assert repr(DynamicQuantize(per="head")) == "DynamicQuantize(per='head')"


def test_planned() -> None:
    q, k = (torch.empty(1, 4096, n, 128, dtype=torch.bfloat16, device="meta") for n in (32, 8))
    table = torch.empty(4096, 64, device="meta")
    with planning() as called:
        jitrope.prepare_qkv(q, k, None, table, table, quantize=DynamicQuantize(per="kv_head"))
    assert {spec.kind for spec in called} == {"rope", "qk_norm_rope"}
    assert any(spec.per_row for spec in called)
