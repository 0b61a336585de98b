"""Conversion: the bits of given and of computed scales, the ends of formats, and whose elements share a scale."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

import jitrope
from jitrope import DynamicQuantize, KVCache, Norm, Packed, Quantize

from ..devices import DEVICES, devices, inputs, noise, turn
from ..oracle import as_fp4, of_fp4, of_tiles
from ..results import LARGEST, same
from ..sweep import E4M3, E5M2, E8M0, FP4

NVFP4: dict[str, Any] = {"dtype": FP4, "group": 16, "scale_dtype": E4M3}
MXFP8: dict[str, Any] = {"group": 32, "scale_dtype": E8M0}


# ---- computed scales -------------------------------------------------------------------------------

HEADS: list[tuple[int, dict[str, Any]]] = [
    *[(80, {}), (128, {"rotary_dim": 32, "rotary_offset": 48}), (192, {"rotary_dim": 64})],
    *[(192, {"rotary_dim": 64, "rotary_offset": 128, "interleaved": True}), (256, {"interleaved": True})],
    *[(512, {"rotary_dim": 64, "rotary_offset": 448, "interleaved": True}), (96, {})],
    (66, {"rotary_dim": 64}),  # in fp4 a head has an odd number of bytes
    *[(6, {"rotary_dim": 4}), (10, {"interleaved": True})],
]
GROUPS = (None, 16, 32, 64, 128)
FP32: dict[str, Any] = {"scale_fmt": "ue8m0"}  # powers of two in fp32
POWERS: list[dict[str, Any]] = [{}, {"scale_dtype": E8M0}, FP32, {**FP32, "scale_dtype": E8M0}]
BITS = [
    (dim, words, group, dtype, powers)
    for (dim, words), group, dtype, powers in itertools.product(HEADS, GROUPS, LARGEST, POWERS)
    if dim % (group or dim) == 0
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("powers", [{}, FP32], ids=str)
def test_weights_of_heads_multiply_the_scales_of_q(powers: dict[str, Any], device: str) -> None:
    """The indexer's weights, in fp32; the elements stay, and so does k. A weight may be negative, or a view's."""
    q, k, _, cos, sin = inputs(device, 2, 4, 1, 128)
    weights = noise(device, torch.float32, (*q.shape[:3], 2))[0][..., 0]
    want = jitrope.prepare_qkv(q, k, None, cos, sin, quantize=DynamicQuantize(**powers))
    got = jitrope.prepare_qkv(q, k, None, cos, sin, quantize=DynamicQuantize(**powers, q_weights=weights))
    assert same(got[0].scale, want[0].scale * weights)
    assert same(got[0].values, want[0].values)
    assert all(map(same, got[1], want[1]))


@pytest.mark.parametrize(("device", "dim", "words", "group", "dtype", "powers"), devices(BITS, BITS[::9]))
def test_computed_scales_have_the_bits_of_plain_torch(
    dim: int, words: dict[str, Any], group: int | None, dtype: torch.dtype, powers: dict[str, Any], device: str
) -> None:
    """A rotation in fp32, the largest element of each head or group, and a division by it, rounded once."""
    q, k, _, cos, sin = inputs(device, 2, 3, 3, dim)
    tables = [x[:, : words.get("rotary_dim", dim) // 2] for x in (cos, sin)]
    rotated = jitrope.apply_rope(q.float(), k.float(), *tables, **words)
    quantize = DynamicQuantize(dtype, group=group, **powers)
    got = jitrope.prepare_qkv(q, k, None, *tables, quantize=quantize, **words)
    assert got[2] is None
    for (values, scale), y in zip(got, rotated):
        rows = y.unflatten(-1, (-1, group or dim))
        unit = rows.abs().amax(-1) * (1 / LARGEST[dtype])
        if powers:  # a GPU's log2 of a power of two may lie above its exponent
            unit = unit.cpu().double().log2().ceil().exp2().float().to(unit.device)
        units = (rows * (1 / unit)[..., None]).clamp(-LARGEST[dtype], LARGEST[dtype]).flatten(-2)
        units = units.round() if dtype == torch.int8 else as_fp4(units).view(FP4) if dtype == FP4 else units
        want = units.to(dtype)
        assert (values.dtype, values.shape) == (want.dtype, want.shape)
        assert same(values, want)
        scale_of = torch.exp2(scale.view(torch.uint8).double() - 127).float() if "scale_dtype" in powers else scale
        assert torch.equal(scale_of, unit if group else unit[..., 0])
        assert scale.is_contiguous()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(2, 5, 4, 64), (5, 1, 4, 64)], ids=str)
@pytest.mark.parametrize("group", [16, None])
@pytest.mark.parametrize("unit", [None, 0.004, 1e3, [0.0], [2e-3, 4e-3, 7e-3, 1e-2]], ids=str)
def test_nvfp4_has_the_bits_of_plain_torch(unit: Any, group: int | None, shape: tuple[int, ...], device: str) -> None:
    """A scale is rounded to e4m3 in units of the tensor's, or of its head's; one that is or becomes 0 makes zeros."""
    q, k, _, cos, sin = inputs(device, *shape, dtype=torch.float32 if group is None else torch.bfloat16)
    units = [unit, unit[:2] if isinstance(unit, list) else unit]
    units = [torch.tensor(x, device=device) if isinstance(x, list) else x for x in units]
    quantize = DynamicQuantize(**{**NVFP4, "group": group}, q_global_scale=units[0], k_global_scale=units[1])
    got = jitrope.prepare_qkv(q, k, None, cos, sin, quantize=quantize)
    for (values, scale), y, own in zip(got, jitrope.apply_rope(q.float(), k.float(), cos, sin), units):
        whole = torch.as_tensor(1.0 if own is None else own, device=device).view(-1, 1)
        rows = y.unflatten(-1, (-1, group or 64))
        units = rows.abs().amax(-1) * (1 / 6) * (1 / whole)
        want = torch.where(whole == 0, 0, units).clamp(max=448).to(E4M3)
        product = want.float() * whole
        times = torch.where(product == 0, 0, 1 / product)
        assert same(scale, want if group else want[..., 0])
        assert same(values, as_fp4((rows * times[..., None]).clamp(-6, 6).flatten(-2)))


# ---- the ends of formats ---------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_the_smallest_scale_has_a_reciprocal(device: str) -> None:
    """With the number before it zeros of q would be NaN: 0 times inf."""
    least = torch.tensor(2.0**-128 + 2.0**-149).item()
    q = torch.tensor([0.0, 2.0**-127]).repeat(1, 1, 1, 32).to(device)
    got, _, _ = jitrope.prepare_qkv(q, None, None, quantize=Quantize(least))
    assert got.float().flatten().tolist() == [0.0, 2.0] * 32


POWERS_OF = {448.0: 127, 449.0: 128, 224.0: 126, 448 * 2.0**100: 227, 448 * 2.0**-120: 7, 448 * 2.0**-126: 1,
             448 * 2.0**-127: 0, 449 * 2.0**-127: 1, 2.0**-140: 0, 0.0: 0, 3e38: 127 + 120, math.nan: 255,
             math.inf: 254}  # fmt: skip
OF_E4M3 = {0.0: 0, 6 * 2.0**-9: 1, 6 * 2.0**-10: 0, 6 * 2.0**-10 * 1.01: 1, 6.0: 0x38, 6 * 1.0625: 0x38,
           6 * 448.0: 0x7E, 6e30: 0x7E, math.inf: 0x7E, math.nan: 0x7F}  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("form", "most", "units"),
    [
        *[({**MXFP8, **more}, POWERS_OF, [448, 224, 448, 448, 448, 448]) for more in ({}, FP32)],
        ({"group": 32, **FP32}, POWERS_OF, [448, 224, 448, 448, 448, 448]),
        (NVFP4, OF_E4M3, [0, 6, 0, 3, 6, 6, 6, 6, 6, 6]),
    ],
    ids=["mxfp8", "ue8m0", "fp32", "nvfp4"],
)
def test_the_ends_of_scales(form: dict[str, Any], most: dict[float, int], units: list[float], device: str) -> None:
    """Exact ones, the next numbers, the smallest and the largest, zero and NaN; the other groups of the head are zeros.

    A group that is too small for e4m3 has the scale 0 and zeros; one that is too large has 448.
    """
    q, at = torch.zeros(1, len(most), 1, 64, device=device), 40 // form["group"]
    q[0, :, 0, 40] = torch.tensor([*most], device=device)
    tables = torch.ones(len(most), 2, device=device), torch.zeros(len(most), 2, device=device)
    got, _, _ = jitrope.prepare_qkv(q, None, None, *tables, rotary_dim=4, quantize=DynamicQuantize(**form))
    scale, want = got.scale[0, :, 0], torch.zeros(len(most), 64 // form["group"], dtype=torch.uint8)
    want[:, at] = torch.tensor([*most.values()])
    if scale.dtype == torch.float32:
        exact = torch.ldexp(torch.ones_like(want, dtype=torch.float64), want.int() - 127)
        exact = exact.masked_fill(want == 255, math.nan)
        torch.testing.assert_close(scale.cpu().double(), exact, rtol=0, atol=0, equal_nan=True)
    else:
        assert torch.equal(scale.cpu().view(torch.uint8), want)
    values = (of_fp4(got.values) if form is NVFP4 else got.values.float())[0, :, 0, 40].tolist()
    assert values[: len(units)] == units
    assert form is NVFP4 or math.isnan(values[-2])


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
    assert torch.equal(of_fp4(got.values).flatten().cpu()[want % 8 == 7].abs().unique(), torch.tensor([6.0]))


@pytest.mark.parametrize("device", DEVICES)
def test_a_head_of_zeros_and_the_largest_numbers(device: str) -> None:
    """The smallest scale is 1e-12 / 127."""
    q = torch.zeros(1, 3, 2, 64, device=device)
    q[0, 1, 0, 5], q[0, 2, 1, 7] = -3e38, 1e-30
    got, _, _ = jitrope.prepare_qkv(q, None, None, quantize=DynamicQuantize(torch.int8))
    least = torch.tensor(1e-12) * (1 / 127)
    want = torch.stack((least, least, torch.tensor(3e38) * (1 / 127), least, least, least)).view(1, 3, 2)
    assert torch.equal(got.scale.cpu(), want)
    assert got.values.nonzero().tolist() == [[0, 1, 0, 5]]
    assert int(got.values[0, 1, 0, 5]) == -127


@pytest.mark.parametrize("shape", [(0, 3, 4, 64), (2, 0, 4, 64), (2, 3, 0, 64)], ids=str)
@pytest.mark.parametrize("words", [{}, {"group": 32}, NVFP4, {**MXFP8, "swizzled": True}], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_nothing_to_convert(device: str, words: dict[str, Any], shape: tuple[int, ...]) -> None:
    q, per_item = torch.empty(shape, device=device), 2 if words.get("dtype") == FP4 else 1
    got, _, _ = jitrope.prepare_qkv(q, None, None, quantize=DynamicQuantize(**words))
    batch, tokens, heads, _ = shape
    assert got.values.shape == (*shape[:3], 64 // per_item)
    if "swizzled" in words:
        assert got.scale.shape == (batch, heads, 128 if tokens else 0, 4)
        assert not got.scale.view(torch.uint8).any()
    else:
        assert got.scale.shape == (*shape[:3], *([64 // words["group"]] if words else []))


@pytest.mark.parametrize("device", DEVICES)
def test_a_position_outside_of_the_table_makes_heads_of_nan(device: str) -> None:
    """Also of batch rows of one token, which are merged; NaN has no number in int8."""
    q, k, _, cos, sin = inputs(device, 5, 2, 4, 64)
    ids = torch.tensor([[0, 1], [1, 1], [1, 0], [0, 2], [-1, 1]], device=device)
    outside = (ids < 0) | (ids > 1)
    for length, dtype in ((2, E4M3), (1, E4M3), (2, torch.int8)):
        given, quantize = (q[:, :length], k[:, :length], None, cos, sin), DynamicQuantize(dtype)
        got = jitrope.prepare_qkv(*given, positions=ids[:, :length], quantize=quantize)
        want = jitrope.prepare_qkv(*given, positions=ids[:, :length].clamp(0, 1), quantize=quantize)
        for x, y in zip(got[:2], want[:2]):
            bad = outside[:, :length]
            assert torch.equal(x.scale.isnan(), bad[..., None].expand(x.scale.shape))
            assert torch.equal(x.scale[~bad], y.scale[~bad])
            assert same(x.values.float()[~bad], y.values.float()[~bad])
            assert dtype == torch.int8 or x.values.float()[bad].isnan().all()
            assert dtype == E4M3 or (x.values[bad] == 127).all()


# ---- given scales ----------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("length", [1, 5])  # batch rows of one token are merged
@pytest.mark.parametrize("of", ["tensor", "element", "heads", "rows"])
def test_given_scales_have_the_bits_of_torchs_rounding(of: str, length: int, dtype: torch.dtype, device: str) -> None:
    """Of q, k and v, after the saturation; a number, or tensors of one element, of heads, or of the heads of rows."""
    q, k, _, cos, sin = inputs(device, 2, length, 4, 64, dtype=torch.float32)
    shape = {"tensor": [], "element": [1], "heads": [0], "rows": [2, 0]}[of]
    own = [[n or heads for n in shape] for heads in (4, 2, 2)]
    firsts = (0.2 / LARGEST[dtype], 0.03, 0.5)  # with the first of them elements saturate
    scales = [(torch.arange(1, math.prod(n) + 1) * x).view(n).to(device) for n, x in zip(own, firsts)]
    given = [float(x) if of == "tensor" else x for x in scales]
    words = {"positions": torch.arange(2 * length, device=device).view(2, length) % 5}
    cos, sin = (x.repeat(5, 1)[:5] for x in (cos, sin))
    rotated = jitrope.apply_rope(q, k, cos, sin, **words)
    got = jitrope.prepare_qkv(q, k, k, cos, sin, quantize=Quantize(*given, dtype=dtype), **words)
    for x, y, scale in zip(got, (*rotated, k), scales):
        units = y * (1 / (scale.view(-1, 1, scale.shape[-1], 1) if scale.dim() else scale))
        assert x.dtype == dtype
        assert same(x, units.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype))
    assert (got[0].float().abs() == LARGEST[dtype]).any()


AFTER = Norm(after_rope=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "quantize",
    [
        *(Quantize(0.05), Quantize(0.05, 0.05), DynamicQuantize(), DynamicQuantize(per="head")),
        *(DynamicQuantize(hadamard=True), DynamicQuantize(torch.int8, hadamard=True)),
    ],
    ids=repr,
)
@pytest.mark.parametrize(
    ("rounding", "norm"),
    [("complex64", None), ("complex128", Norm()), *[("dtype", x) for x in (None, Norm(), AFTER)], ("addcmul", AFTER)],
)
def test_a_conversion_has_the_bits_of_a_hosts_rounding(rounding: str, norm: Any, quantize: Any, device: str) -> None:
    """The call converts what a call in fp32, or with "dtype" in q's dtype, has rotated; a cache of fp8 has it too."""
    q, k, _, cos, sin = inputs(device, 13, 4, 64)
    wide = q.dtype if rounding == "dtype" else torch.float32
    host = {"layout": "thd", "interleaved": True, "rounding": rounding, "unrotated": 2, "norm": norm}
    caches = torch.zeros(2, 2, 13, 2, 64, device=device).to(E4M3)
    own: list[dict[str, Any]] = [{}, {}]
    if repr(quantize) == "Quantize(q_scale=0.05)":  # it leaves k to a cache
        slots = torch.arange(13, device=device)
        own = [{"cache": KVCache(*both, slots, k_scale=0.05, v_scale=0.05)} for both in caches]
    got = jitrope.prepare_qkv(q, k, k, cos, sin, **host, quantize=quantize, **own[0])
    a, b, _ = jitrope.prepare_qkv(q.to(wide), k.to(wide), None, cos, sin, **host)
    if rounding == "dtype" and quantize.words.get("hadamard"):  # the transform rounds too
        a, b, _ = jitrope.prepare_qkv(a, b, None, layout="thd", hadamard=True)
        quantize = DynamicQuantize(torch.int8 if "int8" in repr(quantize) else E4M3)
    want = jitrope.prepare_qkv(a, b, k.to(wide), layout="thd", quantize=quantize, **own[1])
    for x, y in zip(got[:2], want[:2]):
        assert x is y or all(same(*both) for both in zip(x, y))
    assert same(*caches)
    assert bool(own[0]) == bool(caches.view(torch.uint8).any())


# ---- scales of a head in all tokens of a row or a sequence -----------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("per", ["head", "kv_head"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2, torch.int8], ids=str)
def test_a_head_has_one_scale_for_a_batch_row(dtype: torch.dtype, per: str, device: str) -> None:
    """The bits of a rotation in fp32, of its largest elements in plain torch, and of a division by them.

    The largest of all blocks does not depend on their order, and each call begins with zeros.
    """
    q, k, _, cos, sin = inputs(device, 3, 64, 4, 64)
    q[0, 2:] *= 8  # each row has other scales
    for factor in (1.0, 1.0, 0.25):  # smaller ones than those before
        rotated = jitrope.apply_rope((q * factor).float(), k.float(), cos, sin)
        got = jitrope.prepare_qkv(q * factor, k, None, cos, sin, quantize=DynamicQuantize(dtype, per=per))
        for (values, scale), y, heads in zip(got, rotated, (4 if per == "head" else 2, 2)):
            rows = y.unflatten(2, (heads, -1))
            want = rows.abs().amax((1, 3, 4)) * (1 / LARGEST[dtype])
            units = rows * (1 / want)[:, None, :, None, None]
            units = units.clamp(-LARGEST[dtype], LARGEST[dtype]).flatten(2, 3)
            assert torch.equal(scale, want)
            assert same(values, (units.round() if dtype == torch.int8 else units).to(dtype))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("launch", ["auto", "token_linear", "grid_2d"])
@pytest.mark.parametrize("normed", [False, True])
def test_packed_sequences_have_scales_of_their_own(normed: bool, launch: Any, device: str) -> None:
    """Spare tokens, NaN here, have no part in a scale, and become zeros; a sequence without tokens has the least."""
    jitrope.configure(launch=launch)
    q, k, _, cos, sin = inputs(device, 12, 4, 64, dtype=torch.float32)
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
                assert same(x.values[rows], values)
                assert torch.equal(x.scale[sequence], scale[0])
        for x in got:
            assert torch.equal(x.scale[1], torch.full_like(x.scale[1], 1e-12) * (1 / 448))
            assert x.scale.shape == (3, 4 if x is got[0] and per == "head" else 2)
        assert not any(x.values[9:].float().any() for x in got[:2])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("launch", ["auto", "token_linear", "grid_2d"])
@pytest.mark.parametrize("latent", [False, True])
def test_given_scales_of_packed_sequences(latent: bool, launch: Any, cp_size: int, device: str) -> None:
    """Each sequence has the bits of a call with its scales alone; v after the last one has that one's."""
    jitrope.configure(launch=launch)
    sizes = [(4, 96), (4, 112), (1, 32)] if latent else [(4, 64), (2, 64), (2, 64)]
    call = jitrope.prepare_mla_qkv if latent else jitrope.prepare_qkv
    given, (cos, sin) = noise(device, torch.float32, *[(14, *n) for n in sizes]), turn(device, 14, 16 if latent else 32)
    scales = [torch.linspace(0.01, 0.3, 3 * n, device=device).view(3, n) for n in ((4, 4, 4) if latent else (4, 2, 2))]
    words: dict[str, Any] = {"max_seqlen": 14, "cp_size": cp_size, "cp_rank": cp_size - 1}
    packed = Packed(torch.tensor([0, 4, 4, 12], device=device), **words)
    got, end = call(*given, cos, sin, quantize=Quantize(*scales), positions=packed), 12 // cp_size
    for n, rows in ((0, slice(0, 4 // cp_size)), (2, slice(4 // cp_size, end))):
        alone = Packed(torch.tensor([0, 8 if n else 4], device=device), **words)
        own = Quantize(*[x[n] for x in scales])
        want = call(*[x[rows] for x in given], cos, sin, quantize=own, positions=alone)
        assert all(same(x[rows], y) for x, y in zip(got, want))
    v = given[1][end:, :, 64:].contiguous() if latent else given[2][end:]
    assert same(got[2][end:], jitrope.prepare_qkv(v, None, None, quantize=Quantize(scales[2][2]), layout="thd")[0])
    assert not any(x[end:].float().any() for x in got[:2])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("normed", [False, True])
def test_q_and_k_after_the_last_sequence_are_zeros_whatever_its_scales_are(normed: bool, device: str) -> None:
    """A scale is NaN where an element is, and given scales of sequences that are padding may be 0."""
    q, k, _, cos, sin = inputs(device, 8, 4, 64)
    q[4, 0, 0] = k[5, 1, 3] = math.nan
    words: dict[str, Any] = {"norm": Norm() if normed else None}
    packed = Packed(torch.tensor([0, 3, 6], device=device))
    bad = [torch.tensor([[1.0] * n, [0.0, math.nan] * (n // 2)], device=device) for n in (4, 2)]
    cache = KVCache(torch.zeros(8, 2, 64, device=device).to(E4M3), None, torch.arange(8, device=device), k_scale=bad[1])
    for dtype in (E4M3, torch.int8):
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
    q, k, _, cos, sin = inputs(device, 5, 4, 64)
    none = Packed(torch.zeros(1, dtype=torch.int32, device=device), max_seqlen=0)
    scales = [torch.zeros(0, n, device=device) for n in (4, 2, 2)]
    q8, k8, v8 = jitrope.prepare_qkv(q, k, k, cos, sin, quantize=Quantize(*scales), positions=none)
    assert not q8.float().any() | k8.float().any()
    assert torch.equal(v8.float(), k.to(E4M3).float())
    got = jitrope.prepare_qkv(q, k, None, cos, sin, quantize=DynamicQuantize(per="head"), positions=none)
    assert [x.scale.shape for x in got[:2]] == [(0, 4), (0, 2)]


@pytest.mark.parametrize("device", DEVICES)
def test_the_units_of_packed_sequences(device: str) -> None:
    """A sequence's global scale of NVFP4 for each head: the bits of a call with this one alone."""
    q, k, _, cos, sin = inputs(device, 9, 4, 64)
    units = [torch.linspace(0.001, 0.02, 2 * n, device=device).view(2, n) for n in (4, 2)]
    packed = Packed(torch.tensor([0, 3, 9], dtype=torch.int32, device=device))
    whole = DynamicQuantize(**NVFP4, q_global_scale=units[0], k_global_scale=units[1])
    got = jitrope.prepare_qkv(q, k, None, cos, sin, quantize=whole, positions=packed)
    for n, rows in enumerate((slice(0, 3), slice(3, 9))):
        own = DynamicQuantize(**NVFP4, q_global_scale=units[0][n], k_global_scale=units[1][n])
        want = jitrope.prepare_qkv(q[rows], k[rows], None, cos, sin, quantize=own, layout="thd")
        for x, y in zip(got[:2], want[:2]):
            assert same(x.values[rows], y.values)
            assert same(x.scale[rows], y.scale)


@pytest.mark.parametrize("device", DEVICES)
def test_nan_zeros_and_no_tokens_of_a_row(device: str) -> None:
    """A NaN anywhere makes its head's scale NaN; zeros, and a row without tokens, have the smallest scale."""
    q, k, *_ = inputs(device, 2, 9, 3, 64)
    q[0, 4, 1, 7], k[0] = float("nan"), 0
    a, b, _ = jitrope.prepare_qkv(q, k, None, quantize=DynamicQuantize(per="head"))
    assert a.scale.isnan().tolist() == [[False, True, False], [False, False, False]]
    least = torch.full((2, 3), 1e-12, device=device) * (1 / 448)
    assert torch.equal(b.scale[0], least[0, :2])
    none, _, _ = jitrope.prepare_qkv(q[:, :0], None, None, quantize=DynamicQuantize(per="head"))
    assert none.values.shape == (2, 0, 3, 64)
    assert torch.equal(none.scale, least)


# ---- the order of scales, and v --------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("launch", ["grid_2d", "token_linear"])
@pytest.mark.parametrize("shape", [(2, 130, 3, 128), (1, 128, 1, 64), (2, 257, 1, 96), (1, 33, 2, 256), (3, 1, 4, 160)])
@pytest.mark.parametrize("form", [MXFP8, {**MXFP8, "dtype": FP4}, NVFP4], ids=["mxfp8", "mxfp4", "nvfp4"])
def test_scales_in_tiles(form: dict[str, Any], shape: tuple[int, ...], launch: str, device: str) -> None:
    """The bytes of a call without tiles: whole tiles, parts of tiles in both directions, and padding of zeros."""
    jitrope.configure(launch=launch)
    q, k, _, cos, sin = inputs(device, *shape)
    plain, tiles = (
        jitrope.prepare_qkv(q, k, None, cos, sin, quantize=DynamicQuantize(**form, swizzled=swizzled))[:2]
        for swizzled in (False, True)
    )
    for got, want in zip(tiles, plain):
        batch, tokens, heads, groups = want.scale.shape
        assert got.scale.dtype == want.scale.dtype
        assert got.scale.shape == (batch, heads, -(-tokens // 128) * 128, -(-groups // 4) * 4)
        assert same(of_tiles(got.scale, tokens, groups), want.scale)
        assert same(got.values, want.values)


@pytest.mark.parametrize("device", DEVICES)
def test_tiles_compiled_for_any_length(device: str) -> None:
    """Whole tiles are written in full, but a compiled call does not know whether its tiles are whole."""
    quantize = DynamicQuantize(**{**MXFP8, "dtype": FP4}, swizzled=True)
    compiled = torch.compile(jitrope.prepare_qkv, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (9, 128, 130):
        given = inputs(device, 2, tokens, 4, 64)
        found = [function(*given, quantize=quantize)[:2] for function in (compiled, jitrope.prepare_qkv)]
        for x, y in zip(*found):
            assert type(x) is jitrope.Scaled
            assert all(same(*both) for both in zip(x, y))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("quantize", [Quantize(1.0, 1.0), DynamicQuantize()], ids=repr)
def test_v_in_fp8_is_copied(quantize: Any, device: str) -> None:
    """v already has the dtype of k's result, but it is not divided."""
    q, k, _, cos, sin = inputs(device, 1, 5, 4, 64)
    v = k.to(E4M3)
    out = (None, None, torch.zeros_like(v))
    _, k_got, v_got = jitrope.prepare_qkv(q, k, v, cos, sin, quantize=quantize, out=out)
    assert v_got is out[2]
    assert same(v_got, v)
    want = jitrope.prepare_qkv(q, k, None, cos, sin, quantize=quantize)[1]
    assert all(same(x, y) for x, y in zip(k_got, want))
