"""Dynamic scales and the Hadamard transform: values, layouts, torch's machinery, refusals."""

from __future__ import annotations

import math
import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import jitrope
from jitrope import DynamicQuantize, KVCache, Norm, Quantize

from .devices import DEVICES
from .oracle import as_fp4, hadamard_matrix, of_elements, of_fp4

FP8 = torch.float8_e4m3fn
E8M0 = getattr(torch, "float8_e8m0fnu", torch.uint8)
E5M2 = torch.float8_e5m2
FP4 = getattr(torch, "float4_e2m1fn_x2", torch.uint8)
LARGEST = {FP8: 448.0, E5M2: 57344.0, torch.int8: 127.0, FP4: 6.0}


def inputs(device: str, *shape: int, dtype: torch.dtype = torch.bfloat16, k_heads: int = 2) -> tuple[Tensor, ...]:
    """q, k, cos and sin; shape: (B, S, H, D)."""
    generator = torch.Generator().manual_seed(sum(shape))
    b, s, h, d = shape
    q, k = (torch.randn(b, s, n, d, generator=generator).to(device, dtype) for n in (h, k_heads))
    angles = torch.rand(s, d // 2, generator=generator).to(device) * 50
    return q, k, angles.cos(), angles.sin()


def scaled(
    x: Tensor, dtype: torch.dtype, group: int | None = None, scale_dtype: torch.dtype = torch.float32, whole: float = 1
) -> tuple[Tensor, Tensor]:
    """Elements and scales of x (..., D) in plain torch."""
    if scale_dtype == FP8:
        return scaled_in_two_levels(x, group or x.shape[-1], torch.tensor(whole, device=x.device))
    rows = x.float().unflatten(-1, (-1, group or x.shape[-1]))
    least = 1e-12 if scale_dtype == torch.float32 else 2.0**-127 * LARGEST[dtype]
    scale = rows.abs().amax(-1).clamp(min=least) * (1 / LARGEST[dtype])
    if scale_dtype != torch.float32:
        mantissa, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
    units = (rows * (1 / scale)[..., None]).clamp(-LARGEST[dtype], LARGEST[dtype]).flatten(-2)
    values = as_fp4(units).view(FP4) if dtype == FP4 else (units.round() if dtype == torch.int8 else units).to(dtype)
    return values, (scale if group else scale[..., 0])


def scaled_in_two_levels(x: Tensor, group: int, whole: Tensor) -> tuple[Tensor, Tensor]:
    """Elements in fp4 and scales in e4m3 of x (..., D)."""
    rows = x.float().unflatten(-1, (-1, group))
    scale = ((rows.abs().amax(-1) * (1 / 6)) * (1 / whole)).clamp(max=448).to(FP8)
    unit = scale.float() * whole
    factor = torch.where(unit == 0, 0, 1 / unit)
    return as_fp4((rows * factor[..., None]).clamp(-6, 6).flatten(-2)).view(FP4), scale


def numbers(values: Tensor) -> Tensor:
    """Elements in fp32."""
    return of_fp4(values) if values.dtype == FP4 else values.float()


def assert_scaled(
    got: Any, want: tuple[Tensor, Tensor], steps: int = 0, scale_dtype: torch.dtype = torch.float32
) -> None:
    """steps: of an element's rounding, by which sums in another order may differ."""
    values, scale = got
    assert (values.dtype, values.shape) == (want[0].dtype, want[0].shape)
    assert (scale.dtype, scale.shape) == (scale_dtype, want[1].shape)
    scale = scale.float() if scale.dtype != torch.uint8 else torch.ldexp(torch.ones(()), scale.int() - 127)
    if not steps:
        assert torch.equal(values.view(torch.uint8), want[0].view(torch.uint8))
        assert torch.equal(scale, want[1].float())
        return
    torch.testing.assert_close(scale, want[1], rtol=1e-5, atol=0)
    unit = of_elements(want[1], values)
    a, b = (values.float() * of_elements(scale, values), want[0].float() * unit)
    step = unit * (1 if values.dtype == torch.int8 else b.abs() / unit / 8 + 2**-9)
    assert ((a - b).abs() <= steps * step + 1e-6).all()


@pytest.mark.parametrize("device", DEVICES)
def test_the_smallest_scale_has_a_reciprocal(device: str) -> None:
    """With the number before it zeros of q would be NaN: 0 times inf."""
    least = torch.tensor(2.0**-128 + 2.0**-149).item()
    q = torch.tensor([0.0, 2.0**-127]).repeat(1, 1, 1, 32).to(device)
    got, _, _ = jitrope.prepare_qkv(q, None, None, quantize=Quantize(least))
    assert got.float().flatten().tolist() == [0.0, 2.0] * 32
    with pytest.raises(jitrope.InvalidInput, match="so that fp32 holds its reciprocal"):
        Quantize(2.0**-128)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("words", [{}, {"interleaved": True}, {"rotary_dim": 32, "rotary_offset": 16}], ids=str)
@pytest.mark.parametrize("dim", [80, 128])
@pytest.mark.parametrize("dtype", LARGEST, ids=str)
def test_each_head_has_its_own_scale(dtype: torch.dtype, dim: int, words: dict[str, Any], device: str) -> None:
    """The bits of a rotation in fp32 followed by the scale of each head's largest element."""
    q, k, cos, sin = inputs(device, 2, 3, 4, dim)
    width = words.get("rotary_dim", dim) // 2
    tables = cos[:, :width], sin[:, :width]
    rotated = jitrope.apply_rope(q.float(), k.float(), *tables, **words)
    got = jitrope.prepare_qkv(q, k, None, *tables, quantize=DynamicQuantize(dtype), **words)
    assert got[2] is None
    for x, want in zip(got, rotated):
        assert_scaled(x, scaled(want, dtype))
    alone, none, _ = jitrope.prepare_qkv(q, None, None, *tables, quantize=DynamicQuantize(dtype), **words)
    assert none is None
    assert torch.equal(alone.scale, got[0].scale)


# Heads: their size, the words of the rotation, and whether accesses have one element (a transposed q).
HEADS = {
    "128": (128, {}, False),
    "256-interleaved": (256, {"interleaved": True}, False),
    "192-partial": (192, {"rotary_dim": 64}, False),
    "192-offset": (192, {"rotary_dim": 64, "rotary_offset": 128, "interleaved": True}, False),
    "128-middle": (128, {"rotary_dim": 32, "rotary_offset": 48}, False),
    "512-offset": (512, {"rotary_dim": 64, "rotary_offset": 448, "interleaved": True}, False),
    "96": (96, {}, False),
    "strided": (128, {"rotary_dim": 96}, True),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("group", [16, 32, 64, 128])
@pytest.mark.parametrize("head", HEADS)
def test_groups_of_a_head_have_scales(head: str, group: int, device: str) -> None:
    """The bits of a rotation in fp32, and of each group of neighbouring elements divided by its own scale."""
    dim, words, strided = HEADS[head]
    q, k, cos, sin = inputs(device, 2, 3, 3, dim)
    if dim % group:
        with pytest.raises(jitrope.InvalidInput, match=f"group is {group}; it must divide D={dim}"):
            jitrope.prepare_qkv(q, k, None, quantize=DynamicQuantize(group=group))
        return
    q = q.mT.contiguous().mT if strided else q
    width = words.get("rotary_dim", dim) // 2
    tables = cos[:, :width], sin[:, :width]
    dtype = [*LARGEST][(dim // 64 + group.bit_length()) % (3 if strided else 4)]  # fp4 needs neighbours in memory
    words = {**words, "inverse": group == 128}
    rotated = jitrope.apply_rope(q.float(), k.float(), *tables, **words)
    got = jitrope.prepare_qkv(q, k, None, *tables, quantize=DynamicQuantize(dtype, group=group), **words)
    for x, want in zip(got, rotated):
        assert_scaled(x, scaled(want, dtype, group))
        assert x.scale.is_contiguous()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("group", [None, 16, 32, 64, 128])
@pytest.mark.parametrize("dtype", LARGEST, ids=str)
def test_scales_are_powers_of_two(dtype: torch.dtype, group: int | None, device: str) -> None:
    """MXFP8, MXFP4 and their neighbours: each scale is the next power of two, so no element saturates."""
    q, k, cos, sin = inputs(device, 1, 5, 4, 128)
    quantize = DynamicQuantize(dtype, group=group, scale_dtype=E8M0)
    rotated = jitrope.apply_rope(q.float(), k.float(), cos, sin)
    for x, y in zip(jitrope.prepare_qkv(q, k, None, cos, sin, quantize=quantize), rotated):
        want = scaled(y, dtype, group, E8M0)
        assert_scaled(x, want, scale_dtype=E8M0)
        back = numbers(x.values)
        back = back * of_elements(want[1], back)
        assert (back - y).abs().max() <= y.abs().max() / {E5M2: 8, FP4: 4}.get(dtype, 16)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "group"), [(FP8, 128), (FP8, None), (torch.int8, 64), (FP4, 32)], ids=str)
@pytest.mark.parametrize("stage", ["rope", "norm", "cache"])
def test_powers_of_two_in_fp32(stage: str, dtype: torch.dtype, group: int | None, device: str) -> None:
    """scale_fmt="ue8m0": the values of scales in e8m0, and their numbers in fp32; zeros and NaN too."""
    q, k, cos, sin = inputs(device, 2, 5, 4, 128)
    q[0, 1], q[1, 2, 0, 5] = 0, torch.nan
    words = {"norm": Norm()} if stage == "norm" else {}
    results = []
    for form in ({"scale_fmt": "ue8m0"}, {"scale_dtype": E8M0}, {"scale_dtype": E8M0, "scale_fmt": "ue8m0"}):
        cache = torch.zeros(10, 2, 128, device=device, dtype=q.dtype)
        slots = torch.arange(10, device=device).view(2, 5)
        places = {"cache": KVCache(cache, cache.clone(), slots)} if stage == "cache" else {}
        quantize = DynamicQuantize(dtype, group=group, **form)
        results.append(jitrope.prepare_qkv(q, k, k if places else None, cos, sin, quantize=quantize, **words, **places))
    for got, want, again in list(zip(*results))[: 1 if stage == "cache" else 2]:
        powers = want.scale.view(torch.uint8)
        assert got.scale.dtype == torch.float32
        assert got.scale.shape == powers.shape
        exact = torch.ldexp(torch.ones_like(powers, dtype=torch.float64), powers.int() - 127)
        torch.testing.assert_close(
            got.scale.double(), exact.masked_fill(powers == 255, torch.nan), rtol=0, atol=0, equal_nan=True
        )
        assert torch.equal(got.values.view(torch.uint8), want.values.view(torch.uint8))
        assert torch.equal(again.scale.view(torch.uint8), powers)


@pytest.mark.parametrize("device", DEVICES)
def test_the_bytes_of_powers_of_two(device: str) -> None:
    """Exact powers, the next numbers, the smallest and the largest ones, zero and NaN, as their exponents."""
    most = {448.0: 127, 449.0: 128, 224.0: 126, 448 * 2.0**100: 227, 448 * 2.0**-120: 7, 448 * 2.0**-126: 1,
            448 * 2.0**-127: 0, 449 * 2.0**-127: 1, 2.0**-140: 0, 0.0: 0, 3e38: 127 + 120, float("nan"): 255,
            float("inf"): 254}  # fmt: skip
    q = torch.zeros(1, len(most), 1, 64, device=device)
    q[0, :, 0, 40] = torch.tensor([*most], device=device)
    tables = torch.ones(len(most), 1, device=device), torch.zeros(len(most), 1, device=device)
    quantize = DynamicQuantize(group=32, scale_dtype=E8M0)
    got, _, _ = jitrope.prepare_qkv(q, None, None, *tables, rotary_dim=2, quantize=quantize)
    assert got.scale.view(torch.uint8)[0, :, 0, 0].tolist() == [0] * len(most)
    assert got.scale.view(torch.uint8)[0, :, 0, 1].tolist() == [*most.values()]
    assert got.values.float()[0, :3, 0, 40].tolist() == [448, 224, 448]
    assert got.values.float()[0, -2, 0, 40].isnan()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dim", "words"), [(66, {"rotary_dim": 64}), (6, {"rotary_dim": 4}), (10, {"interleaved": True})], ids=str
)
def test_fp4_of_heads_with_an_odd_number_of_bytes(dim: int, words: dict[str, Any], device: str) -> None:
    q, k, cos, sin = inputs(device, 2, 3, 4, dim)
    width = words.get("rotary_dim", dim) // 2
    tables = cos[:, :width], sin[:, :width]
    got = jitrope.prepare_qkv(q, k, None, *tables, quantize=DynamicQuantize(FP4), **words)
    for x, y in zip(got, jitrope.apply_rope(q.float(), k.float(), *tables, **words)):
        assert_scaled(x, scaled(y, FP4))


@pytest.mark.parametrize("device", DEVICES)
def test_zeros_by_the_scale_of_a_tensor_of_zeros(device: str) -> None:
    q = torch.zeros(1, 2, 3, 64, device=device)
    got, _, _ = jitrope.prepare_qkv(q, None, None, quantize=two_levels(q_global_scale=q.abs().amax() / (448 * 6)))
    assert not got.values.view(torch.uint8).any()
    assert not got.scale.view(torch.uint8).any()


@pytest.mark.parametrize("shape", [(0, 3, 4, 64), (2, 0, 4, 64), (2, 3, 0, 64)], ids=str)
@pytest.mark.parametrize("words", [{}, {"group": 32}, {"dtype": FP4, "group": 16, "scale_dtype": FP8}], ids=str)
def test_nothing_to_convert(words: dict[str, Any], shape: tuple[int, ...]) -> None:
    q, per_item = torch.empty(shape), 2 if words.get("dtype") == FP4 else 1
    got, _, _ = jitrope.prepare_qkv(q, None, None, quantize=DynamicQuantize(**words))
    assert got.values.shape == (*shape[:3], 64 // per_item)
    assert got.scale.shape == (*shape[:3], *([64 // words["group"]] if words else []))


@pytest.mark.parametrize("device", DEVICES)
def test_each_number_of_fp4_and_the_ties_between(device: str) -> None:
    """Numbers halfway between numbers, and its neighbours; two in a byte, the first in the low bits."""
    codes = torch.arange(7)
    positive = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    around = [torch.nextafter(positive, torch.full((), to)) for to in (0.0, 9.0)]
    x, want = torch.cat((positive, *around, torch.tensor([1.0, 6, 5.5]))), torch.tensor([0, 2, 2, 4, 4, 6, 6])
    want = torch.cat((want, codes, codes + 1, torch.tensor([2, 7, 7])))
    x, want = torch.cat((x, -x, torch.zeros(16))), torch.cat((want, want + 8, torch.zeros(16, dtype=torch.long)))
    q = x.to(device).reshape(1, 1, 1, 64)
    got, _, _ = jitrope.prepare_qkv(q, None, None, quantize=DynamicQuantize(FP4, scale_dtype=E8M0))
    assert got.values.dtype == FP4
    assert got.scale.view(torch.uint8).item() == 127
    assert got.values.view(torch.uint8).flatten().tolist() == (want[0::2] + 16 * want[1::2]).tolist()
    assert torch.equal(numbers(got.values).flatten().cpu()[want % 8 == 7].abs().unique(), torch.tensor([6.0]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("stage", ["alone", "norm", "cache", "decode", "fp32", "hadamard", "head"])
@pytest.mark.parametrize("whole", [None, 0.004, "tensor", "heads"])
def test_scales_in_two_levels(whole: Any, stage: str, device: str) -> None:
    """NVFP4: each scale is rounded to e4m3 in units of the tensor's; y is values times scale times the tensor's."""
    group = None if stage == "head" else 16
    shape = (5, 1, 4, 64) if stage == "decode" else (2, 5, 4, 64)
    q, k, cos, sin = inputs(device, *shape, dtype=torch.float32 if stage in ("fp32", "hadamard") else torch.bfloat16)
    words: dict[str, Any] = {"norm": Norm(rounding="once")} if stage == "norm" else {}
    given = {"tensor": torch.tensor([2e-3]), "heads": torch.linspace(2e-3, 1e-2, 4)}.get(whole, whole)
    given = given.to(device) if isinstance(given, Tensor) else given
    of_k = given[:2].clone() if whole == "heads" else given
    want = [*jitrope.prepare_qkv(q.float(), k.float(), None, cos, sin, **words)[:2]]
    if stage == "hadamard":
        want = [(x.double() @ hadamard_matrix(64).to(device)).float() for x in want]
    if stage == "norm":
        want = [*jitrope.prepare_qkv(q, k, None, None, None, **words)[:2]]
        want = [*jitrope.apply_rope(want[0].float(), want[1].float(), cos, sin)]
    caches = torch.zeros(2, 10, 2, 64, device=device, dtype=q.dtype)
    if stage == "cache":
        of_k, words["cache"] = None, KVCache(*caches, torch.arange(10, device=device))
    quantize = DynamicQuantize(FP4, group=group, scale_dtype=FP8, q_global_scale=given, k_global_scale=of_k,
                               hadamard=stage == "hadamard")  # fmt: skip
    for _ in range(2):
        got = jitrope.prepare_qkv(q, k, k, cos, sin, quantize=quantize, **words)
        for x, y, unit in zip(got, want[: 1 if stage == "cache" else 2], (given, of_k)):
            unit = torch.as_tensor(1.0 if unit is None else unit, device=device)
            unit = unit[:, None] if whole == "heads" else unit.reshape(())
            values, scale = scaled_in_two_levels(y, group or 64, unit)
            scale = scale if group else scale[..., 0]
            assert (x.scale.dtype, x.scale.shape) == (FP8, scale.shape)
            if stage == "hadamard":  # sums in another order
                torch.testing.assert_close(x.scale.float(), scale.float(), rtol=2**-3, atol=2**-9)
            else:
                assert_scaled(x, (values, scale), scale_dtype=FP8)
            back = numbers(x.values)
            back = back * of_elements(x.scale, back) * unit
            least = 2.0**-10 * 6 * unit.max() * (1 if whole is None or stage == "head" else 0)
            assert ((back - y).abs() <= y.abs().amax() * 0.25 + least).all()
    if stage == "cache":
        assert torch.equal(caches[1], k.flatten(0, 1))


@pytest.mark.parametrize("device", DEVICES)
def test_the_ends_of_scales_in_e4m3(device: str) -> None:
    """A group that is too small has the scale 0 and zeros; one that is too large has 448; NaN stays."""
    most = {0.0: 0, 6 * 2.0**-9: 1, 6 * 2.0**-10: 0, 6 * 2.0**-10 * 1.01: 1, 6.0: 0x38, 6 * 1.0625: 0x38,
            6 * 448.0: 0x7E, 6e30: 0x7E, float("inf"): 0x7E, float("nan"): 0x7F}  # fmt: skip
    q = torch.zeros(1, len(most), 1, 64, device=device)
    q[0, :, 0, 40] = torch.tensor([*most], device=device)
    tables = torch.ones(len(most), 2, device=device), torch.zeros(len(most), 2, device=device)
    got, _, _ = jitrope.prepare_qkv(q, None, None, *tables, rotary_dim=4, quantize=two_levels())
    assert got.scale.view(torch.uint8)[0, :, 0, 2].tolist() == [*most.values()]
    assert not got.scale.view(torch.uint8)[0, :, 0, [0, 1, 3]].any()
    assert numbers(got.values)[0, :, 0, 40].tolist() == [0, 6, 0, 3, 6, 6, 6, 6, 6, 6]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("norm", [None, Norm()], ids=["alone", "normed"])
@pytest.mark.parametrize("dtype", [FP8, E5M2], ids=str)
def test_the_dtype_of_given_scales(dtype: torch.dtype, norm: Norm | None, cached: bool, device: str) -> None:
    """torch's own rounding after the saturation, of q, k and both caches."""
    q, k, cos, sin = inputs(device, 1, 5, 4, 64, dtype=torch.float32)
    words: dict[str, Any] = {"norm": norm} if norm else {}
    rotated = jitrope.prepare_qkv(q, k, None, cos, sin, **words)[:2]
    scales = {"q_scale": 1 / LARGEST[dtype], "k_scale": 0.03, "v_scale": 0.5}  # the first saturates
    want = [
        (x * (1 / torch.tensor(scale, device=device))).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)
        for x, scale in zip((*rotated, k), scales.values())
    ]
    q_scale = scales.pop("q_scale")
    if cached:
        caches = [torch.zeros(1, 5, 2, 64, device=device).to(dtype) for _ in range(2)]
        words["cache"] = jitrope.KVCache(*caches, torch.arange(5, device=device), **scales)
        quantize = Quantize(q_scale, dtype=dtype)
    else:
        caches, want, quantize = [], want[:2], Quantize(q_scale, scales["k_scale"], dtype=dtype)
    got = jitrope.prepare_qkv(q, k, k, cos, sin, quantize=quantize, **words)
    for x, y in zip([got[0], *(caches if cached else got[1:2])], want):
        assert x.dtype == y.dtype == dtype
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [(), (2,)], ids=["heads", "rows"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("how", ["plain", "norm", "hadamard", "cache", "joined"])
def test_heads_with_their_own_scales(how: str, layout: str, rows: tuple[int, ...], device: str) -> None:
    """Each head has the bits of a call with its scale alone, also where batch rows are merged or are the tokens."""
    length = 1 if how == "joined" else 5
    q, k, cos, sin = inputs(device, 2, length, 4, 64, k_heads=3)
    v = k.flip(1)
    scales = [torch.linspace(1, 3, math.prod(rows) * n, device=device).reshape(*rows, n) for n in (4, 3, 3)]
    words = {"positions": torch.arange(2 * length, device=device).reshape(2, length) % 5, "layout": layout}
    if how == "norm":
        words["norm"] = Norm(torch.linspace(1, 2, 64, device=device, dtype=q.dtype))
    turned = [x.transpose(1, 2) if layout == "bhsd" else x for x in (q, k, v)]

    def call(own: list[Any]) -> list[torch.Tensor]:
        quantize = Quantize(own[0], None if how == "cache" else own[1], hadamard=how == "hadamard")
        if how != "cache":
            out = jitrope.prepare_qkv(*turned[:2], None, cos, sin, quantize=quantize, **words)[:2]
        else:
            caches = [torch.zeros(2 * length, 3, 64, device=device).to(FP8) for _ in range(2)]
            cache = KVCache(*caches, torch.arange(2 * length, device=device), k_scale=own[1], v_scale=own[2])
            out = [jitrope.prepare_qkv(*turned, cos, sin, quantize=quantize, cache=cache, **words)[0]]
            out += [x.unflatten(0, (2, length)) for x in caches]
        layouts = [layout, layout if how != "cache" else "bshd", "bshd"]
        return [(x.transpose(1, 2) if order == "bhsd" else x).view(torch.uint8) for x, order in zip(out, layouts)]

    got = call(scales)
    for row in range(2):
        for head in range(4):
            own = [float(x[(row, head % x.shape[-1]) if rows else head % x.shape[-1]]) for x in scales]
            for x, y in zip(got, call(own)):
                if head < x.shape[2]:
                    assert torch.equal(x[row, :, head], y[row, :, head])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["bhsd", "sbhd", "thd"])
def test_scales_have_the_layout_of_the_heads(layout: str, device: str) -> None:
    q, k, cos, sin = inputs(device, 1, 7, 6, 64)
    order = {"bhsd": (0, 2, 1, 3), "sbhd": (1, 0, 2, 3), "thd": (1, 2, 3)}[layout]
    turned = [(x[0] if layout == "thd" else x.permute(order).contiguous()) for x in (q, k)]
    want = jitrope.prepare_qkv(q, k, None, cos, sin, quantize=DynamicQuantize())[:2]
    got = jitrope.prepare_qkv(*turned, None, cos, sin, quantize=DynamicQuantize(), layout=layout)[:2]
    for x, y in zip(got, want):
        scale = y.scale[0] if layout == "thd" else y.scale.permute(order[:-1])
        assert torch.equal(x.scale, scale)
        assert x.scale.is_contiguous()


@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_of_single_tokens(device: str) -> None:
    """A decode step: each batch row has its own position; a position outside of the table gives NaN."""
    q, k, cos, sin = inputs(device, 5, 1, 4, 64)
    q, k, cos, sin = *(torch.cat((x, x + 1), 1) for x in (q, k)), *(torch.cat((t, -t, t)) for t in (cos, sin))
    ids = torch.tensor([[0, 2], [1, 1], [2, 0], [0, 3], [-1, 2]], device=device)
    want = jitrope.apply_rope(q.float(), k.float(), cos, sin, positions=ids)
    got = jitrope.prepare_qkv(q, k, None, cos, sin, quantize=DynamicQuantize(), positions=ids)
    for x, y in zip(got, want):
        outside = y.isnan().any(-1)
        assert outside.sum() == 2 * y.shape[2]
        assert torch.equal(x.scale.isnan(), outside)
        assert x.values.float()[outside].isnan().all()
        values, scale = scaled(y, FP8)
        assert torch.equal(x.scale[~outside], scale[~outside])
        assert torch.equal(x.values.float()[~outside], values.float()[~outside])


@pytest.mark.parametrize("device", DEVICES)
def test_a_head_of_zeros_and_the_largest_numbers(device: str) -> None:
    q = torch.zeros(1, 3, 2, 64, device=device)
    q[0, 1, 0, 5], q[0, 2, 1, 7] = -3e38, 1e-30
    got, _, _ = jitrope.prepare_qkv(q, None, None, quantize=DynamicQuantize(torch.int8))
    assert_scaled(got, scaled(q, torch.int8))
    assert int(got.values[0, 1, 0, 5]) == -127
    assert float(got.scale[0, 0, 0]) == pytest.approx(1e-12 / 127)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "words",
    [
        {},
        {"interleaved": True},
        {"rotary_dim": 32, "rotary_offset": 32},
        {"rotary_dim": 64},
        {"rotary_dim": 64, "interleaved": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("group", [None, 32])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_hadamard_keeps_the_scores(dim: int, group: int | None, words: dict[str, Any], device: str) -> None:
    """Against the matrix in fp64; q k^T does not change. The rest of a head is transformed with its rotated part."""
    q, k, cos, sin = inputs(device, 2, 3, 2, dim, dtype=torch.bfloat16 if dim == 128 else torch.float32)
    width = words.get("rotary_dim", dim) // 2
    tables = cos[:, :width], sin[:, :width]
    rotated = jitrope.apply_rope(q.float(), k.float(), *tables, **words)
    want = [(x.double() @ hadamard_matrix(dim).to(device)).float() for x in rotated]
    got = jitrope.prepare_qkv(q, k, None, *tables, quantize=DynamicQuantize(group=group, hadamard=True), **words)[:2]
    for x, y in zip(got, want):
        assert_scaled(x, scaled(y, FP8, group), steps=1)
    fixed = jitrope.prepare_qkv(q, k, None, *tables, quantize=Quantize(0.02, 0.03, hadamard=True), **words)[:2]
    for x, y, scale in zip(fixed, want, (0.02, 0.03)):
        assert x.dtype == FP8
        torch.testing.assert_close(x.float(), (y / scale).clamp(-448, 448), rtol=2**-3, atol=2**-9)
    a, b = (x.values.float() * of_elements(x.scale, x.values) for x in got)
    scores, plain = (x[:, :, :2].flatten(2) @ y.flatten(2).mT for x, y in ((a, b), rotated))
    assert (scores - plain).abs().max() < 0.08 * plain.abs().max()


@pytest.mark.parametrize("device", DEVICES)
def test_the_indexer_of_deepseek(device: str) -> None:
    """LayerNorm with weight and bias of k, rope on a part, Hadamard, a scale for each head (DeepSeek V3.2)."""
    _, k, cos, sin = inputs(device, 1, 33, 4, 128, k_heads=1)
    weight, bias = torch.rand(128, device=device).bfloat16(), torch.randn(128, device=device).bfloat16()
    norm = Norm(weight, q_bias=bias, kind="layer_norm", rounding="once", eps=1e-6)
    words = {"rotary_dim": 64, "interleaved": True}
    got, _, _ = jitrope.prepare_qkv(
        k, None, None, cos[:, :32], sin[:, :32], norm=norm, quantize=DynamicQuantize(hadamard=True), **words
    )
    normed = F.layer_norm(k, (128,), weight, bias, 1e-6).float()
    rotated, _ = jitrope.apply_rope(normed, None, cos[:, :32], sin[:, :32], **words)
    want = (rotated.double() @ hadamard_matrix(128).to(device)).float()
    back = got.values.float() * got.scale[..., None]
    assert (back - want).abs().max() < 0.04 * want.abs().max()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", [{}, {"hadamard": True}, {"group": 32, "hadamard": True}], ids=str)
def test_operands_of_attention_in_another_layout(how: Any, device: str) -> None:
    """bshd to bhsd with fp8 in one launch; v is copied as it is. Again with other buffers."""
    q, k, cos, sin = inputs(device, 2, 9, 4, 64, k_heads=3)
    words = {"quantize": DynamicQuantize(**how)}
    if "group" in how:
        words["rotary_dim"], cos, sin = 32, cos[..., :16], sin[..., :16]
    v = k.flip(1)
    want = jitrope.prepare_qkv(q, k, None, cos, sin, **words)
    for _ in range(2):
        buffers = [torch.empty(2, h, 9, 64, dtype=x, device=device) for h, x in ((4, FP8), (3, FP8), (3, q.dtype))]
        out = [x.transpose(1, 2) for x in buffers]
        got = jitrope.prepare_qkv(q, k, v, cos, sin, out=out, **words)
        for x, y, buffer in zip(got[:2], want, buffers):
            assert x.values.data_ptr() == buffer.data_ptr()
            assert_scaled(x, tuple(y))
        assert torch.equal(out[2], v)
    q_alone = jitrope.prepare_qkv(q, k, None, cos, sin, out=(out[0], None, None), **words)
    assert_scaled(q_alone[1], tuple(want[1]))
    with jitrope.planning(["auto"]) as specs:
        meta = [x.to("meta") for x in (q, k, v, cos, sin)]
        jitrope.prepare_qkv(*meta, out=[x.to("meta") for x in out], **words)
    assert [spec.copy_v for spec in specs] == [True]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "scale_fmt"), [(FP8, None), (FP4, None), (FP8, "ue8m0")], ids=str)
def test_compiled_and_again(dtype: torch.dtype, scale_fmt: str | None, device: str) -> None:
    q, k, cos, sin = inputs(device, 2, 9, 4, 64)
    norm = Norm(torch.rand(64, device=device).bfloat16(), rounding="once")
    quantize = DynamicQuantize(dtype, group=32, hadamard=True, scale_fmt=scale_fmt)

    def call(q: Tensor, k: Tensor) -> Any:
        return jitrope.prepare_qkv(q, k, None, cos, sin, norm=norm, quantize=quantize)[:2]

    want = call(q, k)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        for got in (call(q, k), compiled(q, k)):
            for x, y in zip(got, want):
                assert type(x) is jitrope.Scaled
                assert_scaled(x, tuple(y))


def test_planning_lists_the_kernel() -> None:
    q, k = (torch.empty(1, 64, heads, 128, dtype=torch.bfloat16, device="meta") for heads in (32, 8))
    cos, sin = torch.empty(2, 64, 64, device="meta")
    with jitrope.planning(["auto"]) as specs:
        q_scaled, _, _ = jitrope.prepare_qkv(q, k, None, cos, sin, quantize=DynamicQuantize(torch.int8))
    assert [(spec.q_out, spec.dynamic, spec.hadamard) for spec in specs] == [("int8", True, False)]
    assert q_scaled.scale.shape == (1, 64, 32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("quantize", [Quantize(1.0, 1.0), DynamicQuantize()], ids=repr)
def test_v_in_fp8_is_copied(quantize: Any, device: str) -> None:
    """v already has the dtype of k's result, but not k's."""
    q, k, cos, sin = inputs(device, 1, 5, 4, 64)
    v = k.to(FP8)
    out = (None, None, torch.zeros_like(v))
    _, k_got, v_got = jitrope.prepare_qkv(q, k, v, cos, sin, quantize=quantize, out=out)
    assert v_got is out[2]
    assert torch.equal(v_got.view(torch.uint8), v.view(torch.uint8))
    want = jitrope.prepare_qkv(q, k, None, cos, sin, quantize=quantize)[1]
    for x, y in zip(k_got if isinstance(k_got, tuple) else [k_got], want if isinstance(want, tuple) else [want]):
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


two_levels = partial(DynamicQuantize, FP4, group=16, scale_dtype=FP8)


def fp4_of(q: Tensor, k: bool = False, **words: Any) -> Any:
    """A call in fp4 for q alone, or with a cache of fp4."""
    half = words.get("rotary_dim", q.shape[-1]) // 2
    tables, quantize = (COS[:, :half], SIN[:, :half]), words.pop("quantize", DynamicQuantize(FP4))
    if k:
        caches = torch.zeros(2, 4, 2, q.shape[-1], dtype=torch.uint8).view(FP4)
        words["cache"] = KVCache(*caches, torch.arange(4))
    return jitrope.prepare_qkv(q, *([q[:, :, :2]] * 2 if k else [None] * 2), *tables, quantize=quantize, **words)


Q, K, COS, SIN = inputs("cpu", 1, 4, 4, 48)
CACHE = jitrope.KVCache(torch.zeros(4, 2, 48).bfloat16(), torch.zeros(4, 2, 48).bfloat16(), torch.arange(4))
FP4_OUT = torch.zeros(1, 4, 4, 24, dtype=torch.uint8).view(FP4)
REFUSALS = {
    "dtype": (
        lambda: DynamicQuantize(torch.float16),
        "DynamicQuantize: dtype is torch.float16; it must be one of torch.float8",
    ),
    "fp4-out": (
        {"quantize": DynamicQuantize(FP4), "out": (FP4_OUT.transpose(2, 3).contiguous().transpose(2, 3), None, None)},
        r"out's q has strides \(.*\); for fp4 the last must be 1",
    ),
    "fp4-width": (
        {"quantize": DynamicQuantize(FP4), "out": (FP4_OUT[..., :12], None, None)},
        r"out's q is .*; it must be \(1, 4, 4, 24\), float4_e2m1fn_x2",
    ),
    "e4m3-scales": (
        lambda: DynamicQuantize(scale_dtype=FP8),
        "float8_e4m3fn; it must be .* only fp4 has scales in e4m3",
    ),
    "global": (
        lambda: DynamicQuantize(FP4, q_global_scale=1.0),
        "q_global_scale is 1.0; it must be None without scale_dtype",
    ),
    "global-sign": (lambda: two_levels(q_global_scale=-0.5), "q_global_scale is -0.5; it must be above 2.94e-39"),
    "global-type": (lambda: two_levels(k_global_scale="1"), "k_global_scale is '1'; it must be a finite number"),
    "global-cache": (
        {"cache": CACHE, "v": K, "quantize": two_levels(k_global_scale=1.0)},
        "k_global_scale of quantize does not go with a cache",
    ),
    "global-shape": (
        {"quantize": two_levels(q_global_scale=torch.ones(3))},
        r"q_global_scale is .*; it must be \(\) or \(4,\) or \(1, 4\), float32",
    ),
    "global-cached": (
        {"cache": CACHE, "v": K, "quantize": two_levels(q_global_scale=torch.ones(3))},
        r"q_global_scale is .*; it must be \(\) or \(4,\) or \(1, 4\), float32",
    ),
    "global-alone": (lambda: fp4_of(Q, quantize=two_levels(k_global_scale=1.0)), "k_global_scale is given, but no"),
    "fp4-static": (lambda: Quantize(1.0, dtype=FP4), "Quantize: dtype is .*; it must be .*e5m2"),
    "fp4-cache": (
        lambda: fp4_of(Q[..., :12], k=True),
        r"k_cache is float4_e2m1fn_x2; it must be \(slots, 2, 12\) or \(pages, rows, 2, 12\), bfloat16 or float8",
    ),
    "fp4-strides": (lambda: fp4_of(Q.mT.contiguous().mT), r"q has D=48, strides .*; fp4 needs aligned pairs"),
    "fp4-offset": (lambda: fp4_of(Q.flatten(-2)[..., 1:49].unsqueeze(-2)), "and offset 1; fp4 needs aligned pairs"),
    "fp4-bias": (
        lambda: jitrope.prepare_fused_qkv(
            torch.ones(1, 4, 4, 48),
            COS,
            SIN,
            heads=(2, 1),
            bias=torch.ones(4 * 48 + 1)[1:],
            quantize=DynamicQuantize(FP4),
        ),
        "bias has D=192, strides .* and offset 1; fp4 needs aligned pairs",
    ),
    "fp4-odd-out": (
        {"v": K, "quantize": DynamicQuantize(FP4), "out": (None, None, torch.ones(*K.shape, 2)[..., 0])},
        "out's v has D=48, strides .*; fp4 needs aligned pairs",
    ),
    "fp4-pairs": (lambda: fp4_of(Q, rotary_dim=6), "rotary_dim 6; for fp4 .*a multiple of 4"),
    "fp4-first": (lambda: fp4_of(Q, rotary_dim=4, rotary_offset=3), "rotary_offset is 3, .*; for fp4 the first must"),
    "dtype-static": (lambda: Quantize(1.0, dtype=torch.int8), "Quantize: dtype is torch.int8; it must be .*e5m2"),
    "dtype-list": (lambda: DynamicQuantize([1]), "DynamicQuantize: dtype is "),
    "group": (lambda: DynamicQuantize(group=48), "group is 48; it must be 16, 32, 64, 128 or None"),
    "group-type": (lambda: DynamicQuantize(group="32"), "DynamicQuantize: group is '32'; it must be"),
    "group-size": ({"quantize": DynamicQuantize(group=32)}, "group is 32; it must divide D=48"),
    "scale-dtype": (lambda: DynamicQuantize(scale_dtype=torch.float16), "scale_dtype is torch.float16; it must be"),
    "scale-dtype-type": (
        lambda: DynamicQuantize(scale_dtype="e8m0"),
        "scale_dtype is 'e8m0'; it must be one of",
    ),
    "scale-fmt": (lambda: DynamicQuantize(scale_fmt="mx"), "DynamicQuantize: scale_fmt is 'mx'; it must be"),
    "scale-fmt-type": (lambda: DynamicQuantize(scale_fmt=[1]), "DynamicQuantize: scale_fmt is "),
    "scale-fmt-e4m3": (lambda: DynamicQuantize(FP4, scale_dtype=FP8, scale_fmt="ue8m0"), "scale_fmt does not go with"),
    "scale-fmt-head": (lambda: DynamicQuantize(per="head", scale_fmt="ue8m0"), "scale_fmt does not go with per='head'"),
    "scale-fmt-tiles": (lambda: DynamicQuantize(group=32, scale_fmt="ue8m0", swizzled=True), "scales of one byte"),
    "hadamard-flag": (lambda: DynamicQuantize(hadamard="yes"), "DynamicQuantize: hadamard is 'yes'"),
    "size": ({"quantize": DynamicQuantize(hadamard=True)}, "a power of two of elements up to 256; q has D=48"),
    "size-static": ({"quantize": Quantize(1.0, 1.0, hadamard=True)}, "power of two of elements up to 256; q has D=48"),
    "size-cache": ({"cache": CACHE, "v": K, "quantize": Quantize(1.0, hadamard=True)}, "hadamard goes with a power of"),
    "group-cache": (
        {"cache": CACHE, "v": K, "quantize": DynamicQuantize(group=32)},
        "group is 32; it must divide D=48",
    ),
    "cache-ranks": (
        {"cache": CACHE, "v": K, "out": jitrope.Ulysses(2)},
        "Ulysses does not go with a cache",
    ),
    "across": ({"norm": Norm(across_heads=True)}, "across_heads does not go with dynamic scales"),
    "inverse": ({"norm": Norm(), "inverse": True}, "inverse does not go with norm"),
    "inplace": ({"inplace": True}, "inplace does not go with quantize"),
    "out-dtype": ({"out": (torch.empty_like(Q), None, None)}, r"out's q is .*bfloat16.*; it must be .*float8_e4m3fn"),
}


@pytest.mark.parametrize("device", DEVICES)
def test_a_v_that_is_copied_after_the_launch_may_have_any_strides(device: str) -> None:
    q, k, cos, sin = inputs(device, 1, 4, 2, 48)
    v = torch.randn(1, 4, 3, 48, device=device, dtype=q.dtype)
    out = torch.zeros(*v.shape, 2, device=device, dtype=q.dtype)[..., 0]
    jitrope.prepare_qkv(q, k, v, cos, sin, quantize=DynamicQuantize(FP4), out=(None, None, out))
    assert torch.equal(out, v)


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    words, message = REFUSALS[name]
    given = {"v": None, "cos": COS, "sin": SIN, "quantize": DynamicQuantize(), **(words if type(words) is dict else {})}
    call = words if callable(words) else partial(jitrope.prepare_qkv, Q, K, **given)
    with pytest.raises(jitrope.InvalidInput, match=message):
        call()


def test_there_is_no_gradient() -> None:
    with pytest.raises(jitrope.InvalidInput, match=r"q requires a gradient, but this call has none"):
        jitrope.prepare_qkv(Q.clone().requires_grad_(), K, None, COS, SIN, quantize=DynamicQuantize())
    scale, cache = torch.ones(()).requires_grad_(), CACHE.tensors
    e4m3 = {name: torch.zeros_like(cache[name], dtype=FP8) for name in ("k_cache", "v_cache")}
    slots = cache["slot_mapping"]
    calls: dict[str, dict[str, Any]] = {
        "q_scale": {"quantize": Quantize(scale, 1.0)},
        "k_scale": {"v": K, "cache": KVCache(**e4m3, slot_mapping=slots, k_scale=scale, v_scale=1.0)},
        "q_global_scale": {"quantize": DynamicQuantize(FP4, group=16, scale_dtype=FP8, q_global_scale=scale)},
    }
    for name, words in calls.items():
        text = f"{name} requires a gradient, but this call has none; pass {name}.detach()"
        with pytest.raises(jitrope.InvalidInput, match=re.escape(text)):
            jitrope.prepare_qkv(Q, K, **{"v": None, "cos": COS, "sin": SIN, **words})


def test_printed() -> None:
    assert repr(DynamicQuantize(torch.int8, hadamard=True)) == "DynamicQuantize(dtype=torch.int8, hadamard=True)"
    assert repr(DynamicQuantize(scale_fmt="ue8m0")) == "DynamicQuantize(scale_fmt='ue8m0')"
    assert repr(DynamicQuantize(group=64)) == "DynamicQuantize(group=64)"
    printed = "DynamicQuantize(dtype=torch.uint8, scale_dtype=torch.float8_e4m3fn, k_global_scale=0.5)"
    quantize = DynamicQuantize(FP4, scale_dtype=FP8, k_global_scale=0.5)
    assert repr(quantize) == printed.replace("torch.uint8", str(FP4))
    assert repr(Quantize(0.5, hadamard=True)) == "Quantize(q_scale=0.5, hadamard=True)"
