"""Caches: which bytes a call writes in memory of any form, and the scales of their heads and blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import jitrope
from jitrope import DynamicQuantize, KVCache, Norm, Packed, Pages, Quantize

from .. import oracle
from ..devices import DEVICES, inputs, noise, turn
from ..results import LARGEST, flat, near_scaled, same
from ..sweep import E4M3, E5M2, E8M0, FP4

PAGES, ROWS = 5, 8
NAMES = ("k_cache", "k_block_scale", "v_cache", "v_block_scale")


def memory(form: str, values: int, scales: int, device: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Bytes of noise, the same in each call, and the parts of a cache in them, (pages, rows, 2, bytes of a head)."""
    generator, odd = torch.Generator().manual_seed(5), int(form == "odd rows")
    sizes = [2 * ROWS * n for n in (values + odd, scales)] * 2
    whole = torch.randint(1, 120, (PAGES * sum(sizes),), generator=generator, dtype=torch.uint8).to(device)
    if form == "one page":
        parts = whole.view(PAGES, -1).split(sizes, 1)
    else:
        parts = tuple([x.view(PAGES, -1) for x in whole.split([PAGES * n for n in sizes])])
    found = {}
    for name, x in zip(NAMES, parts):
        size = x.shape[1] // (2 * ROWS)
        if form == "fours" and name == "v_block_scale":
            found[name] = x.view(PAGES, 2, ROWS // 4, size, 4).permute(0, 2, 4, 1, 3)
        elif form in ("HND", "fours", "one page") or (form == "two orders" and name[0] == "k"):
            found[name] = x.view(PAGES, 2, ROWS, size).transpose(1, 2)
        else:
            found[name] = x.view(PAGES, ROWS, 2, size)[..., : values if "cache" in name else size]
    return whole, {name: x.flatten(0, 1) if form == "slots" else x for name, x in found.items()}


FORMS = ("slots", "NHD", "HND", "fours", "one page", "odd rows", "two orders")
"""fours: the rows of v's scales are in fours, as trtllm-gen reads them; one page: values and scales in one page; odd
rows: a byte behind each head; two orders: k's heads lie before the rows of a page, v's behind."""
NVFP4: dict[str, Any] = {"dtype": FP4, "group": 16, "scale_dtype": E4M3}
BLOCKS: list[tuple[str, int, dict[str, Any]]] = [
    *[(form, dim, NVFP4) for form in FORMS for dim in (64, 80)],
    *[("one page", 128, {"group": 128}), ("NHD", 128, {"dtype": E5M2, "group": 32})],
    ("one page", 128, {"dtype": torch.int8, "group": 64}),
    ("NHD", 128, {"dtype": torch.int8, "group": 128, "scale_dtype": E8M0}),
    ("one page", 128, {"group": 32, "scale_dtype": E8M0}),
    *[("NHD", 128, {"dtype": FP4, "group": 32, "scale_dtype": E8M0}), ("one page", 128, {"dtype": FP4, "group": 16})],
    ("NHD", 128, {"group": 128, "scale_fmt": "ue8m0"}),
    ("one page", 128, {"dtype": FP4, "group": 32, "scale_fmt": "ue8m0"}),
    ("NHD", 128, {"group": 64, "scale_dtype": E8M0, "scale_fmt": "ue8m0"}),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(("form", "dim", "kind"), BLOCKS, ids=str)
def test_values_and_their_scales_go_to_their_places(
    form: str, dim: int, kind: dict[str, Any], paged: bool, device: str
) -> None:
    """They are those of `DynamicQuantize`. Padding, slots past the end and all other bytes stay as they are.

    By pages the rest of the last page of each sequence is cleared, with its scales.
    """
    q, k, v, cos, sin = inputs(device, 2, 6, 4, dim)
    slots, cleared = [3, 17, -1, 39, 22, 9, 40, 5, 8, 1, 0, 30], []
    to: Any = torch.tensor(slots, device=device)
    if paged and form != "slots":
        slots, cleared = [36, 37, 38, 39, 8, 9, 16, 17, 18, 19, 20, 21], [10, 11, 12, 13, 14, 15, 22, 23]
        table, lengths = torch.tensor([[4, 1], [2, 0]], device=device), torch.tensor([10, 6], device=device)
        to = Pages(table, seq_lens=lengths, clear_page=True)
    dtype, scale_dtype = kind.get("dtype", E4M3), kind.get("scale_dtype", torch.float32)
    sizes = dim // (2 if dtype == FP4 else 1), dim // kind["group"] * scale_dtype.itemsize
    for converted in (False, True):
        units: dict[str, Any] = {}
        if converted and kind == NVFP4:
            units = {"k_scale": 0.004, "v_scale": torch.tensor([0.01, 0.02], device=device)}
        (whole, parts), (want, places) = memory(form, *sizes, device), memory(form, *sizes, device)
        given = {name: x.view(dtype if "cache" in name else scale_dtype) for name, x in parts.items()}
        own, a, b = converted != paged, q.clone(), k.clone()  # then k is rotated in its memory too, and q if it can be
        cache = KVCache(**given, slot_mapping=to, scale_fmt=kind.get("scale_fmt"), rotate_k=own, **units)
        quantize = DynamicQuantize(**kind) if converted else None
        got = jitrope.prepare_qkv(a, b, v, cos, sin, cache=cache, quantize=quantize, inplace=own and not converted)
        assert (got[0] is a) == (own and not converted)
        assert got[1] is (b if own else None)
        assert same(b, jitrope.apply_rope(k, None, cos, sin)[0] if own else k)
        alone = jitrope.prepare_qkv(q, None, None, cos, sin, quantize=quantize)[0]
        assert all(same(x, y) for x, y in zip(got[0], alone))
        for letter, x, angles in (("k", k, (cos, sin)), ("v", v, ())):
            own = {"q_global_scale": units[f"{letter}_scale"]} if units else {}
            stored = jitrope.prepare_qkv(x, None, None, *angles, quantize=DynamicQuantize(**kind, **own))[0]
            for name, y in zip((f"{letter}_cache", f"{letter}_block_scale"), stored):
                rows, place = y.view(torch.uint8).flatten(0, 1), places[name]
                zeros = dict.fromkeys(cleared, torch.zeros_like(rows[0]))
                for slot, row in {**dict(zip(slots, rows)), **zeros}.items():
                    if 0 <= slot < PAGES * ROWS:
                        page, at = divmod(slot, ROWS)
                        place[{3: (slot,), 4: (page, at), 5: (page, at // 4, at % 4)}[place.dim()]] = row
        assert torch.equal(whole, want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("of", ["number", "heads", "rows", "sequences"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_a_cache_in_fp8_has_scales_of_its_own(dtype: torch.dtype, of: str, device: str) -> None:
    """k and v have the bits of torch's rounding after the saturation, by a scale of each head, row or sequence."""
    q, k, v, cos, sin = inputs(device, 2, 5, 4, 64, dtype=torch.float32)
    cos, sin = (x.repeat(2, 1) for x in (cos, sin))
    words: dict[str, Any] = {}
    if of == "sequences":
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        words["positions"] = Packed(torch.tensor([0, 4, 10], device=device))
    shape = {"number": (1, 1), "heads": (1, 2)}.get(of, (2, 2))
    scales = [torch.arange(1, 1 + shape[0] * shape[1], device=device).view(shape) * x for x in (4e-3, 0.5)]
    scales[0] = scales[0] * 448 / LARGEST[dtype]  # k saturates
    given = [float(x) if of == "number" else x[0] if of == "heads" else x for x in scales]
    caches = torch.zeros(2, 10, 2, 64, device=device).to(dtype)
    cache = KVCache(*caches, torch.arange(10, device=device), k_scale=given[0], v_scale=given[1])
    jitrope.prepare_qkv(q, k, v, cos, sin, cache=cache, **words)
    rotated = jitrope.apply_rope(q, k, cos, sin, **words)[1]
    sequence = torch.arange(10, device=device) // 5 if of == "rows" else (torch.arange(10, device=device) > 3).int()
    for stored, x, scale in zip(caches, (rotated, v), scales):
        own = scale.expand(2, 2)[sequence.long()][..., None]
        units = x.reshape(10, 2, 64) * (1 / own)
        assert same(stored, units.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype))
    assert (caches[0].float().abs() == LARGEST[dtype]).any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("launch", ["token_linear", "grid_2d"])
@pytest.mark.parametrize(("group", "scale_dtype"), [(128, torch.float32), (128, E8M0), (32, torch.float32), (64, E8M0)])
def test_the_index_cache_of_deepseek_v3_2(
    group: int, scale_dtype: torch.dtype, launch: str, paged: bool, device: str
) -> None:
    """A page has the values of its rows, and behind them their scales; there is no v. One launch does all stages.

    k is normalised by LayerNorm, its first 64 elements are rotated, and it is transformed; q without the norm.
    """
    jitrope.configure(launch=launch)
    (q,), (kv,), _, cos, sin = inputs(device, 1, 7, 4, 128, k_heads=2)
    k, (weight, bias) = kv[:, :1], torch.randn(2, 128, generator=torch.Generator().manual_seed(3)).to(device)
    slots: list[int] = [16, 17, 18, 19, 4, 5, 6] if paged else [9, 3, -1, 17, 0, 7, 20]
    to: Any = torch.tensor(slots, device=device)
    if paged:
        table, length = torch.tensor([[3, 4, 1]], device=device), torch.tensor([11], device=device)
        to = Pages(table, seq_lens=length)
    size = scale_dtype.itemsize * 128 // group
    pages = torch.randint(1, 120, (5, 4 * (128 + size)), generator=torch.Generator().manual_seed(4)).byte().to(device)
    before = pages.clone()
    values = pages[:, : 4 * 128].view(E4M3).view(5, 4, 1, 128)
    scales = pages[:, 4 * 128 :].view(scale_dtype).view(5, 4, 1, 128 // group)
    given = None if group == 128 and scale_dtype == torch.float32 else group  # the head is a group too
    words: dict[str, Any] = {
        "quantize": DynamicQuantize(hadamard=True, group=given, scale_dtype=scale_dtype),
        **{"cos": cos[:, :32], "sin": sin[:, :32], "rotary_dim": 64, "layout": "thd"},
    }
    norm = Norm(k_weight=weight, k_bias=bias, kind="layer_norm", of="k")
    got = jitrope.prepare_qkv(q, k, None, norm=norm, cache=KVCache(values, None, to, k_block_scale=scales), **words)
    assert got[1] is got[2] is None
    alone = jitrope.prepare_qkv(q, None, None, **words)[0]
    assert all(same(x, y) for x, y in zip(got[0], alone))
    normed = torch.nn.functional.layer_norm(k.double(), (128,), weight.double(), bias.double(), 1e-6)
    (a, b), (c, s) = normed[..., :64].chunk(2, -1), (x[:, None, :32].double() for x in (cos, sin))
    want = torch.cat((a * c - b * s, b * c + a * s, normed[..., 64:]), -1).cpu() @ oracle.hadamard_matrix(128)
    kept = [(token, slot) for token, slot in enumerate(slots) if 0 <= slot < 20]
    stored = [
        torch.stack([x[slot // 4, slot % 4].view(torch.uint8) for _, slot in kept]).cpu().view(x.dtype)[None]
        for x in (values, scales)
    ]
    form = {"dtype": E4M3, "scale_dtype": scale_dtype}
    near_scaled(stored[0], stored[1], want[[token for token, _ in kept]][None], form, 2e-5)
    rest = [slot for slot in range(20) if slot not in slots]
    for x, old in ((values, before[:, : 4 * 128]), (scales, before[:, 4 * 128 :])):
        assert torch.equal(x.view(torch.uint8).reshape(20, -1)[rest], old.reshape(20, -1)[rest])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("launch", ["token_linear", "grid_2d"])
@pytest.mark.parametrize(("latent", "group"), [(512, 128), (448, 64)], ids=["V3.2", "V4"])
def test_the_records_of_deepseek(latent: int, group: int, launch: str, paged: bool, device: str) -> None:
    """Their bytes by hand, as FlashMLA reads them (its README and tests/quant.py). One launch does all stages.

    V3.2: a record has 512 elements of e4m3, the scales of 4 groups in fp32, and 64 rotated elements in bf16; the norm
    is of the first 512. V4: a record has 448 and 64 of them. Behind the records of a page each has 8 bytes, 7 scales
    that are powers of two and one that nothing writes; the norm is of 512. The squares of small integers have the same
    sum in any order.
    """
    jitrope.configure(launch=launch)
    newest, generator = group == 64, torch.Generator().manual_seed(6)
    k = torch.randint(-8, 9, (8, 1, latent + 64), generator=generator).to(device, torch.bfloat16)
    k[0, :, :group] = 0
    (q,), (weight,) = (noise(device, torch.bfloat16, shape) for shape in ((8, 3, latent + 64), (512,)))
    table, positions = torch.cat(turn(device, 20, 32), -1), torch.arange(3, 11, device=device)
    slots, cleared = [9, 3, -1, 17, 0, 7, 20, 12], list[int]()
    to: Any = torch.tensor(slots, device=device)
    if paged:  # sequences of 6 and 9 tokens, with 4 and 3 new ones; the last token is padding
        slots, cleared = [18, 19, 4, 5, 14, 15, 0, -1], [6, 7, 1, 2, 3]
        pages, lengths, starts = (torch.tensor(x, device=device) for x in ([[4, 1, 0], [2, 3, 0]], [6, 9], [0, 4, 7]))
        to = Pages(pages, seq_lens=lengths, cu_seqlens_q=starts, clear_page=True)

    # The cache, as a user has it.
    size = 2880 if newest else 4 * 656  # V4: of 4 * 584 bytes, padded to a multiple of 576
    whole = torch.randint(1, 120, (5, size), generator=generator).byte().to(device)
    want, rows = whole.clone(), whole[:, : 4 * (576 if newest else 656)].view(5, 4, 1, -1)
    scales = whole[:, 4 * 576 : 4 * 584].view(5, 4, 1, 8)[..., :7] if newest else rows[..., 512:528]
    scales = scales.view(E8M0 if newest else torch.float32)
    values, k_pe = rows[..., :latent].view(E4M3), rows[..., -128:].view(torch.bfloat16)
    cache = KVCache(values, None, to, k_block_scale=scales, k_pe_cache=k_pe)
    words: dict[str, Any] = {"cos_sin_cache": table, "rotary_offset": latent, "positions": positions}
    words |= {"interleaved": True, "layout": "thd"}
    words |= {"quantize": DynamicQuantize(group=64, scale_dtype=E8M0)} if newest else {}
    norm = Norm(k_weight=weight, of="qk" if newest else "k_nope")
    got = jitrope.prepare_qkv(q, k, None, norm=norm, cache=cache, **words)
    assert got[1] is got[2] is None
    alone = jitrope.prepare_qkv(q, None, None, norm=Norm() if newest else None, **words)
    assert all(same(x, y) for x, y in zip(flat(got), flat(alone)))

    # Its bytes.
    x, rest = k[:, 0].float().tensor_split([512], 1)
    y = torch.cat((x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6) * weight.float(), rest), 1)
    (a, b), (cos, sin) = (y[:, latent:][:, first::2] for first in (0, 1)), table[positions].chunk(2, 1)
    turned = torch.stack((a * cos - b * sin, b * cos + a * sin), 2).flatten(1).bfloat16()
    groups = y[:, :latent].unflatten(1, (-1, group))
    largest = groups.abs().amax(2)
    units, stored = largest.clamp(min=1e-12) * (1 / 448), torch.empty(0)
    if newest:
        powers = torch.log2(largest.double() / 448).ceil().clamp(min=-127)
        units, stored = torch.exp2(powers).float(), (powers + 127).byte()
    parts = (groups * (1 / units)[..., None]).clamp(-448, 448).to(E4M3).flatten(1), units, turned
    elements, fp32, pe = (x.view(torch.uint8) for x in parts)
    for token, slot in enumerate(slots):
        page, row = divmod(slot, 4)
        if 0 <= slot < 20 and newest:
            want[page, row * 576 : (row + 1) * 576] = torch.cat((elements[token], pe[token]))
            want[page, 4 * 576 + row * 8 : 4 * 576 + row * 8 + 7] = stored[token]
        elif 0 <= slot < 20:
            want[page, row * 656 : (row + 1) * 656] = torch.cat((elements[token], fp32[token], pe[token]))
    for page, row in (divmod(slot, 4) for slot in cleared):
        want[page, row * rows.shape[-1] : (row + 1) * rows.shape[-1]] = 0
        if newest:
            want[page, 4 * 576 + row * 8 : 4 * 576 + row * 8 + 7] = 0
    assert torch.equal(whole, want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("kind", "of_pe"),
    [*((x, None) for x in (NVFP4, BLOCKS[-1][2], {"group": 192}, {"dtype": E5M2}, {})),
     (NVFP4, E4M3), ({"dtype": E5M2}, E4M3), ({"dtype": E4M3}, E5M2)],
    ids=str,
)  # fmt: skip
def test_a_cache_of_rotated_elements_beside_one_of_any_format(
    kind: dict[str, Any], of_pe: torch.dtype | None, device: str
) -> None:
    """NVFP4, MXFP8, one scale, a given one, or none: the others are converted as by themselves, before the rotation.

    The rotated ones stay as they are, or are divided by the given scale (FlashInfer's NVFP4 cache of MLA). The rows of
    both caches are in one tensor; there are two heads of k.
    """
    (k,), (cos, sin) = noise(device, torch.bfloat16, (2, 5, 2, 256)), turn(device, 5, 32)
    slots = [4, -1, 2, 9, 0, 7, 3, 30, 11, 1]
    latent, last = k.split([192, 64], -1)
    dtype = kind.get("dtype", E4M3 if kind else k.dtype)
    blocks: dict[str, Tensor] = {}
    if "group" in kind:
        unit = {"q_global_scale": 0.5} if of_pe else {}
        alone = DynamicQuantize(**{x: y for x, y in kind.items() if y != 192}, **unit)
        stored, scales = jitrope.prepare_qkv(latent, None, None, quantize=alone)[0]
        scales = scales if alone.words["group"] else scales[..., None]
        blocks["k_block_scale"] = torch.zeros(12, *scales.shape[2:], device=device).to(scales.dtype)
    else:
        stored = (latent.float() * (1 / torch.tensor(0.5))).to(dtype) if kind else latent
    width = stored.shape[-1] * stored.element_size()
    rows = torch.zeros(12, 2, width + (64 if of_pe else 128), dtype=torch.uint8, device=device)
    values, k_pe = rows[..., :width].view(dtype), rows[..., width:].view(of_pe or k.dtype)
    given = {"k_scale": 0.5} if of_pe or kind == {"dtype": E5M2} else {}
    to, scale_fmt = torch.tensor(slots, device=device), kind.get("scale_fmt")
    cache = KVCache(values, None, to, **blocks, **given, k_pe_cache=k_pe, scale_fmt=scale_fmt)
    jitrope.prepare_qkv(k[:, :, :0], k, None, cos, sin, rotary_dim=64, rotary_offset=192, cache=cache)
    turned = jitrope.apply_rope(last, None, cos, sin)[0]
    if of_pe:
        converted = Quantize(0.5, dtype=of_pe)
        turned = jitrope.prepare_qkv(last, None, None, cos, sin, quantize=converted)[0]
    for place, x in ((values, stored), (k_pe, turned), *((y, scales) for y in blocks.values())):
        kept = [(token, slot) for token, slot in enumerate(slots) if 0 <= slot < 12]
        for token, slot in kept:
            assert same(place[slot], x.flatten(0, 1)[token])
        rest = [slot for slot in range(12) if slot not in slots]
        assert not place.view(torch.uint8)[rest].any()


def test_compiled_with_symbols_for_the_scales_of_a_head() -> None:
    q, k = torch.randn(2, 3, 8, 128)
    table = jitrope.tables.cos_sin(3, jitrope.tables.inv_freq(rotary_dim=128)[0])

    def stored(k: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        cache = jitrope.KVCache(torch.zeros(8, 8, 128, dtype=torch.int8), None, torch.arange(3), k_block_scale=scale)
        jitrope.prepare_qkv(q, k, None, *table, cache=cache, layout="thd")
        return scale

    want = stored(k, torch.zeros(8, 8, 4))
    assert want.any()
    assert torch.equal(torch.compile(stored, backend="eager", dynamic=True)(k, torch.zeros(8, 8, 4)), want)
