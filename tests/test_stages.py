"""The stages of `prepare_qkv` beside each other: every pair of their values, in few calls, against a chain in fp64.

`STAGES` lists the values of each stage, `REFUSED` the combinations that jitrope refuses. From both follow the calls:
a set in which each other pair of values appears at least once, in an order that never changes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from operator import and_
from typing import Any

import pytest
import torch
from torch import Tensor

import jitrope
from jitrope import DynamicQuantize, InvalidInput, KVCache, Mrope, Norm, Packed, Pages, Quantize, Scaled, Ulysses

from . import oracle
from .devices import DEVICES

Case = dict[str, str]
E8M0 = getattr(torch, "float8_e8m0fnu", torch.uint8)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP4 = getattr(torch, "float4_e2m1fn_x2", torch.uint8)
FLOATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# The first value of each stage is the one of a plain call.
STAGES: dict[str, tuple[str, ...]] = {
    "norm": ("none", "rms", "layer", "l2", "across", "after", "zero", "v_norm", "of_q", "of_k"),
    "rotate": ("rows", "ids", "mrope", "per_head", "none", "angles", "packed"),  # packed: sequences, and spare tokens
    # full: halves, by a table with an entry for each element; into_halves: interleaved ones are stored as halves
    "pairs": ("halves", "interleaved", "full", "into_halves", "into_pairs"),
    "part": ("whole", "last", "middle"),
    "more": ("none", "number", "tokens", "unrotated", "inverse"),  # number, tokens: q_scale
    "transform": ("none", "head"),
    "convert": (
        *("none", "e4m3", "e5m2", "heads", "int8", "rows"),  # without groups
        *("groups", "mxfp8", "mxfp4", "nvfp4", "tiles", "ue8m0"),
    ),
    "out": ("fresh", "inplace", "given", "ulysses", "slots", "pages", "fp8_slots", "fp8_pages", "own"),
    "layout": ("bshd", "sbhd", "bhsd", "thd"),
    "dtype": ("bf16", "fp16", "fp32"),
    "size": ("64", "128", "80", "256"),
}
# own: a cache by slots, k itself too, and without a conversion q in place
PLAIN = {stage: values[0] for stage, values in STAGES.items()}
NORMS, CONVERTED, TRANSFORMED = STAGES["norm"][1:], STAGES["convert"][1:], STAGES["transform"][1:]
ANY_SIZE = (*CONVERTED[:5], "nvfp4")  # without groups of 32
DYNAMIC, CACHES, INTO = STAGES["convert"][3:], STAGES["out"][4:], STAGES["pairs"][3:]
KEPT = {"into_halves": "interleaved", "into_pairs": "halves"}
UNSAID: dict[str, Any] = {"transform": TRANSFORMED, "convert": "none"}  # a transform is a word of a conversion

# A combination, and the words of its refusal.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"norm": "across", "out": CACHES}, "across_heads does not go with a cache"),
    ({"norm": "across", "convert": DYNAMIC}, "across_heads does not go with dynamic scales"),
    ({"norm": "across", "transform": "head", "convert": ("e4m3", "e5m2")}, "across_heads does not go with hadamard"),
    ({"convert": "rows", "out": CACHES}, "per='head' does not go with a cache"),
    ({"norm": NORMS, "more": "inverse"}, "inverse does not go with"),
    ({"out": CACHES, "more": "inverse"}, "inverse does not go with"),
    ({"pairs": INTO, "out": "inplace", "norm": NORMS}, "interleaved_out does not go with inplace"),
    ({"pairs": INTO, "out": "inplace", "part": "whole", "size": ("128", "80", "256")}, "a power of two up to 64"),
    ({"pairs": INTO, "out": "inplace", "part": "last", "size": "256"}, "a power of two up to 64; it is 128"),
    ({"pairs": INTO, "out": "own"}, "interleaved_out does not go with (inplace|rotate_k)"),
    ({"pairs": INTO, "more": "unrotated"}, "interleaved_out does not go with unrotated"),
    ({"pairs": INTO, "rotate": "none"}, "interleaved_out does not go without a table|pass cos and sin"),
    ({"out": CACHES, "rotate": "per_head"}, "with a cache the heads must share it"),
    ({"rotate": "packed", "layout": STAGES["layout"][:3]}, "needs 3 axes"),
    ({"out": "inplace", "convert": CONVERTED}, "inplace does not go with"),
    ({"rotate": ("ids", "mrope"), "more": "unrotated"}, "does not go with unrotated"),
    ({"transform": "head", "size": "80", "convert": ANY_SIZE}, "a power of two of elements up to 256; q has D=80"),
    ({"size": "80", "convert": ("groups", "mxfp8", "mxfp4", "tiles", "ue8m0")}, "group is 32; it must divide D=80"),
    (
        {"rotate": "none", "norm": "none", "convert": "none", "out": ("fresh", "inplace"),
         "more": ("none", "unrotated", "inverse")},
        "pass cos and sin",
    ),
]  # fmt: skip


# ---- the calls -------------------------------------------------------------------------------------


RULES = [
    {stage: (x,) if isinstance(x, str) else x for stage, x in rule.items()}
    for rule in (UNSAID, *[rule for rule, _ in REFUSED])
]


@functools.cache
def rules_with(stage: str, value: str | None) -> int:
    """The rules, one bit each, that a case with this value of a stage, or without one, can fulfil."""
    return sum(1 << n for n, rule in enumerate(RULES) if stage not in rule or value in rule[stage])


def is_refused(case: Case) -> bool:
    return functools.reduce(and_, [rules_with(stage, case.get(stage)) for stage in STAGES]) != 0


def pairs_of(case: Case) -> list[frozenset[tuple[str, str]]]:
    return [*map(frozenset, itertools.combinations(case.items(), 2))]


def completed(case: Case, stages: dict[str, tuple[str, ...]], missing: dict[Any, None]) -> Case | None:
    """The case with a value for each stage, the one with most missing pairs first; None if all are refused."""
    if is_refused(case):
        return None
    left = next((stage for stage in stages if stage not in case), None)
    if left is None:
        return case

    def gained(value: str) -> int:
        return -sum(frozenset((other, (left, value))) in missing for other in case.items())

    # The sort is stable; it begins at another value for each count of missing pairs.
    values = stages[left]
    turn = len(missing) % len(values)
    for value in sorted((*values[turn:], *values[:turn]), key=gained):
        found = completed({**case, left: value}, stages, missing)
        if found:
            return found
    return None


def covering(stages: dict[str, tuple[str, ...]]) -> tuple[list[Case], list[Case]]:
    """(calls with every pair of values that is allowed; the pairs that are in no call)"""
    words = {stage: [(stage, x) for x in values] for stage, values in stages.items()}
    both = itertools.combinations(stages, 2)
    missing = dict.fromkeys(frozenset(pair) for a, b in both for pair in itertools.product(words[a], words[b]))
    cases, never = [], []
    while missing:
        pair = next(iter(missing))
        case = completed(dict(pair), stages, missing)
        if case is None:
            never.append(dict(pair))
            del missing[pair]
            continue
        cases.append({stage: case[stage] for stage in STAGES})
        for covered in pairs_of(cases[-1]):
            missing.pop(covered, None)
    return cases, never


CASES, NEVER = covering(STAGES)
DIFFERENTIABLE = {
    "rotate": ("rows", "ids", "per_head", "none", "angles", "packed"),
    "transform": ("none",),
    "convert": ("none",),
    "out": ("fresh", "ulysses"),
    "size": ("64", "128", "80"),
}
WITH_GRADIENT, _ = covering({**STAGES, **DIFFERENTIABLE})


# ---- tensors ---------------------------------------------------------------------------------------

B, S, HEADS, RANKS, SKIPPED = 2, 5, 4, 2, 2
PAGES, ROWS = 6, 4
SLOTS = torch.tensor([3, 17, 0, -1, 22, 9, 24, 5, 8, 1])  # a token of padding, and one past the end
LENGTHS, PAGE_TABLE = (7, 5), ((5, 2), (0, 3))  # sequences with S new tokens each
CLEARED = [(2, 3), (3, 1), (3, 2), (3, 3)]  # pages and rows after the last token of each
CACHE_SCALES = {"k_scale": 0.005, "v_scale": 0.3}  # k saturates at e4m3's largest number
LARGEST = {E4M3: 448.0, E5M2: 57344.0, torch.int8: 127.0, FP4: 6.0}
SCALES = {"q": 0.07, "k": 0.005}
NORM_WORDS: dict[str, dict[str, Any]] = {
    "layer": {"kind": "layer_norm", "eps": 1e-5},
    "across": {"across_heads": True},
    "after": {"after_rope": True},
    "zero": {"zero_centered": True},
    "v_norm": {"v_norm": True},
    "of_q": {"of": "q", "after_rope": True},
    "of_k": {"of": "k", "kind": "layer_norm"},
}
CONVERSIONS: dict[str, dict[str, Any]] = {
    "e4m3": {"dtype": E4M3},
    "e5m2": {"dtype": E5M2},
    "heads": {"dtype": E4M3},
    "int8": {"dtype": torch.int8},
    "rows": {"dtype": E4M3, "per": "head"},
    "groups": {"dtype": E5M2, "group": 32},
    "mxfp8": {"dtype": E4M3, "group": 32, "scale_dtype": E8M0},
    "mxfp4": {"dtype": FP4, "group": 32, "scale_dtype": E8M0},
    "ue8m0": {"dtype": E4M3, "group": 32, "scale_fmt": "ue8m0"},
    "nvfp4": {"dtype": FP4, "group": 16, "scale_dtype": E4M3},
    "tiles": {"dtype": E4M3, "group": 32, "scale_dtype": E8M0, "swizzled": True},
}


def rotated_part(case: Case) -> tuple[int, int]:
    """The first rotated element of a head, and the number of them; the rest of "last" is a power of two."""
    size = int(case["size"])
    rest = 16 if size == 80 else size // 2
    return {"whole": (0, size), "last": (rest, size - rest), "middle": (16, 32)}[case["part"]]


class Made:
    """The tensors of a case on a device; the words of its call, and those of the oracle."""

    def __init__(self, case: Case, device: str, leaves: bool = False) -> None:
        self.case, self.device, self.generator = case, device, torch.Generator().manual_seed(7)
        self.layout, self.dtype, self.size = case["layout"], FLOATS[case["dtype"]], int(case["size"])
        self.batch, self.tokens = (1, B * S) if self.layout == "thd" else (B, S)
        counts = (HEADS, *((HEADS, HEADS) if case["rotate"] == "per_head" else (2, 2)))
        self.fused = self.noise(self.batch, self.tokens, sum(counts) + 1, self.size).to(self.dtype)
        views = [oracle.unheads(x, self.layout) for x in self.fused.split([*counts, 1], -2)[:3]]
        self.q, self.k, self.v = [x.clone().requires_grad_() for x in views] if leaves else views
        self.weights = self._weights(counts)
        if leaves:
            self.weights = {name: x.requires_grad_() for name, x in self.weights.items()}
        self.turn = self._rotation()
        last = self.tokens - 2 * (case["convert"] not in DYNAMIC)  # a head of zeros has no scale of its own
        packed = (0, 4, last) if case["out"].endswith("pages") else (0, 4, 4, last)  # as many as in the page table
        self.ends = packed if case["rotate"] == "packed" else (0, self.tokens)
        self.v_end = self.tokens  # of the tokens whose v is normalised
        shape = {"number": (), "tokens": (self.batch, self.tokens)}.get(case["more"])
        self.factor = None if shape is None else (self.noise(*shape).abs() + 0.5).requires_grad_(leaves)

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device)

    def _weights(self, counts: tuple[int, ...]) -> dict[str, Tensor]:
        kind = self.case["norm"]
        if kind in ("none", "l2"):
            return {}
        names = ("q_weight", "k_weight", *(("q_bias", "k_bias") if kind in ("layer", "of_k") else ()))
        sizes = [self.size * (count if kind == "across" else 1) for count in counts[:2]] * 2
        made = {name: self.noise(size) / 4 + (kind != "zero") for name, size in zip(names, sizes)}
        return {name: x for name, x in made.items() if name[0] in NORM_WORDS.get(kind, {}).get("of", "qk")}

    def _rotation(self) -> dict[str, Any]:
        """The words of the rotation, as the oracle has them."""
        kind, (first, rotary), rows = self.case["rotate"], rotated_part(self.case), self.tokens + 3
        o: dict[str, Any] = {"rotary_offset": first, "rotary_dim": rotary}
        o["interleaved"] = self.case["pairs"] in ("interleaved", "into_halves")
        o["interleaved_out"] = not o["interleaved"] if self.case["pairs"] in INTO else None
        width = rotary if self.case["pairs"] == "full" else rotary // 2
        shape = (1, rows, HEADS, width) if kind == "per_head" else (rows, width)
        if kind == "angles":
            o.update(freqs=self.noise(*shape) * 3)
        elif kind != "none":
            o.update(cos=self.noise(*shape), sin=self.noise(*shape))
        ids = (3,) if kind == "mrope" else ()
        if kind in ("ids", "mrope", "none"):
            shape = (*ids, *((self.tokens,) if self.layout == "thd" else (B, S)))
            o["position_ids"] = torch.randint(rows, shape, generator=self.generator).to(self.device)
        if kind == "mrope":
            o["mrope_section"] = (rotary // 2 - 2 * (rotary // 8), rotary // 8, rotary // 8)
        return {**o, "inverse": True} if self.case["more"] == "inverse" else o

    def call_words(self) -> dict[str, Any]:
        """The words of `prepare_qkv`, except cache and out."""
        words, kind = {**self.turn, "layout": self.layout}, self.case["norm"]
        ids, sections = words.pop("position_ids", None), words.pop("mrope_section", None)
        words["positions"] = Mrope(ids, sections) if sections else ids
        if self.case["rotate"] == "packed":
            words["positions"] = Packed(torch.tensor(self.ends, dtype=torch.int32, device=self.device))
            del words["layout"]
        if self.case["more"] == "unrotated":
            words["unrotated"] = SKIPPED
        if self.factor is not None:
            words["q_scale"] = self.factor[0] if self.layout == "thd" and self.factor.dim() else self.factor
        if kind != "none":
            words["norm"] = Norm(**self.weights, **NORM_WORDS.get(kind, {}))
        form = CONVERSIONS.get(self.case["convert"])
        hadamard = self.case["transform"] == "head"
        if form and self.case["convert"] in DYNAMIC:
            words["quantize"] = DynamicQuantize(**form, hadamard=hadamard, v=converts_v(self.case))
        elif form:
            k_scale = None if self.case["out"] in CACHES else SCALES["k"]
            words["quantize"] = Quantize(SCALES["q"], k_scale, **form, hadamard=hadamard)
        return words

    def expected(self, letter: str) -> Tensor:
        """(B, S, H, D) in fp64 before the conversion: norm, rotation, scale of q, transform."""
        x, n = oracle.heads(oracle.exact(getattr(self, letter)), self.layout), self.case["norm"]
        o = {"norm_kind" if name == "kind" else name: x for name, x in NORM_WORDS.get(n, {}).items()}
        own = self.weights.get(f"{letter}_weight"), self.weights.get(f"{letter}_bias")
        if letter == "v":
            y = oracle.normed(x, None, None, o) if n == "v_norm" else x
            return torch.cat((y[:, : self.v_end], x[:, self.v_end :]), 1)
        before, skipped = x, SKIPPED if self.case["more"] == "unrotated" else 0
        normed, after = n != "none" and letter in o.get("of", "qk"), o.get("after_rope")
        if normed and not after:
            x = oracle.normed(x, *own, o)
        sequences = [x[:, first:end].split([min(skipped, end - first), max(0, end - first - skipped)], 1)
                     for first, end in itertools.pairwise(self.ends)]  # fmt: skip
        turn = {**self.turn, "interleaved_out": None}
        x = torch.cat([torch.cat((head, oracle.rotated(tail, turn)), 1) for head, tail in sequences], 1)
        if normed and after:
            x = oracle.normed(x, *own, o)
        x = oracle.reordered(x, self.turn)
        x = torch.cat((x, 0 * before[:, self.ends[-1] :]), 1)
        if letter == "q" and self.factor is not None:
            factor = oracle.exact(self.factor)
            x = x * (factor[..., None, None] if factor.dim() else factor)
        x = x @ oracle.hadamard_matrix(self.size).to(x) if self.case["transform"] == "head" else x
        stays = self.case["out"] == "inplace" or is_own(self.case)
        return x if not stays else torch.cat((x[:, : self.ends[-1]], before[:, self.ends[-1] :]), 1)


# ---- comparisons -----------------------------------------------------------------------------------

STEPS = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-8}  # of floats; half of one, and fp32's noise
# relative, and of the smallest numbers
HALVES = {E4M3: (2**-4, 2**-10), E5M2: (2**-3, 2**-17), torch.int8: (0, 0.5), FP4: (2**-2, 2**-2)}


def near(got: Tensor, want: Tensor, slack: float = 1.0) -> None:
    """A rounding to got's dtype; what fp32 lost before it is in proportion to the largest element."""
    most = 1e-5 * slack * max(1.0, float(want.abs().max()))
    torch.testing.assert_close(got.double().cpu(), want.cpu(), rtol=slack * STEPS[got.dtype], atol=most)


def near_units(got: Tensor, want: Tensor) -> None:
    """Elements of a format of 4 or 8 bits, rounded once and to the nearest; larger ones are the largest."""
    relative, least = HALVES[got.dtype]
    want = want.clamp(-LARGEST[got.dtype], LARGEST[got.dtype])
    noise = 2e-5 * max(1.0, float(want.abs().max()))
    got = oracle.of_fp4(got) if got.dtype == FP4 else got
    assert ((got.cpu().double() - want.cpu()).abs() <= 1.001 * relative * want.abs() + least + noise).all()


def near_scaled(got: Scaled, want: Tensor, layout: str, form: dict[str, Any]) -> None:
    """Scales of the largest elements, and values that are the nearest to elements divided by them."""
    values, scale = oracle.heads(got.values, layout).cpu(), got.scale.cpu()
    group = form.get("group")
    assert values.dtype == form["dtype"]
    assert scale.dtype == form.get("scale_dtype", torch.float32)
    relative, least = HALVES[E4M3] if scale.dtype == E4M3 else (1e-5, 0)
    if form.get("swizzled"):
        scale = oracle.of_tiles(scale, values.shape[1], values.shape[-1] // form["group"])
    else:
        scale = oracle.heads(scale if group else scale[..., None], layout)
    scale = torch.ldexp(torch.ones(()), scale.int() - 127) if scale.dtype == torch.uint8 else scale.float()
    want = want.cpu()
    largest = want.unflatten(-1, (-1, group or want.shape[-1])).abs().amax(-1) / LARGEST[values.dtype]
    if form.get("scale_dtype") == E8M0 or form.get("scale_fmt") == "ue8m0":
        largest = torch.exp2(torch.ceil(torch.log2(largest)))
    scale = scale.double()
    torch.testing.assert_close(scale, largest, rtol=relative, atol=least)
    near_units(values, want / scale.repeat_interleave(want.shape[-1] // scale.shape[-1], -1))


def near_rows(got: Scaled, want: Tensor, m: Made) -> None:
    """A head has one scale in a batch row, or in a packed sequence."""
    values, scale, want = oracle.heads(got.values, m.layout).cpu(), got.scale.cpu(), want.cpu()
    spans = [*itertools.pairwise(m.ends)] if m.case["rotate"] == "packed" else [(0, m.tokens)] * m.batch
    assert len(scale) == len(spans)
    for n, (first, end) in enumerate(spans):
        row = n if m.case["rotate"] != "packed" else 0
        y, own = want[row, first:end], scale[n].double()
        largest = y.abs().amax((0, 2)) if len(y) else torch.zeros_like(own)
        torch.testing.assert_close(own, largest.clamp(min=1e-12) / LARGEST[values.dtype], rtol=1e-5, atol=0)
        if len(y):
            near_units(values[row, first:end], y / own[:, None])


def joined(x: Tensor, case: Case, axis: int | None = None) -> Tensor:
    """Heads of all ranks, one after the other, if they are apart. axis: of the heads, if it is not the layout's."""
    if case["out"] != "ulysses":
        return x
    axis = case["layout"].index("h") if axis is None else axis
    if x.dtype == FP4:  # torch joins its bytes alone
        return torch.cat([*x.view(torch.uint8)], axis).view(FP4)
    return torch.cat([*x], axis)


def check_heads(m: Made, got: Any, letter: str) -> None:
    want, form, case = m.expected(letter), CONVERSIONS.get(m.case["convert"]), m.case
    if form is None or (letter == "v" and not converts_v(case)):
        assert got.dtype == m.dtype
        near(oracle.heads(joined(got, case), m.layout), want)
    elif "per" in form:
        near_rows(Scaled(joined(got.values, case), got.scale), want, m)
    elif isinstance(got, Scaled):
        scale = joined(got.scale, case, 1 if form.get("swizzled") else None)
        near_scaled(Scaled(joined(got.values, case), scale), want, m.layout, form)
    else:
        assert got.dtype == form["dtype"]
        values = oracle.heads(joined(got, case), m.layout)
        near_units(values, want.cpu() / torch.tensor(SCALES[letter]).double())


def bytewise(move: Any, x: Tensor, *own: Any) -> Tensor:
    """Elements of x in another order; torch's functions take no fp8."""
    return move(x.view(torch.uint8), *own).view(x.dtype) if x.element_size() == 1 else move(x, *own)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


# ---- the places of results -------------------------------------------------------------------------


class Given:
    """Tensors of the caller with other strides, each in a larger one."""

    def __init__(self, m: Made) -> None:
        form = CONVERSIONS.get(m.case["convert"], {"dtype": m.dtype})
        dtypes = (form["dtype"], form["dtype"], form["dtype"] if converts_v(m.case) else m.dtype)
        self.wholes, self.out = [], []
        for x, dtype in zip((m.q, m.k, m.v), dtypes):
            first, second, *rest, width = x.shape
            width = width // 2 if dtype == FP4 else width
            whole = torch.full((second, first, *rest, width + 8), 7.0, device=m.device)
            whole = whole.byte().view(dtype) if dtype == FP4 else whole.to(dtype)
            self.wholes.append(whole)
            self.out.append(whole[..., :width].transpose(0, 1))

    def check(self, got: Any) -> None:
        for x, given, whole in zip(got, self.out, self.wholes):
            assert (x.values if isinstance(x, Scaled) else x) is given
            rest = whole[..., -8:]
            assert ((rest.view(torch.uint8) if whole.dtype == FP4 else rest.float()) == 7).all()


class Caches:
    """Pages full of noise."""

    def __init__(self, m: Made) -> None:
        kind, device = m.case["out"], m.device
        self.scales = CACHE_SCALES if kind.startswith("fp8") else {}
        self.clear, self.errors = kind == "fp8_pages", torch.zeros(1, dtype=torch.int32, device=device)
        dtype = {"fp8_slots": E4M3, "fp8_pages": E5M2}.get(kind, m.dtype)
        self.caches = [m.noise(PAGES, ROWS, 2, m.size).to(dtype) for _ in range(2)]
        self.before = [x.clone() for x in self.caches]
        self.slots = SLOTS.to(device)
        places: Any = self.slots
        if kind.endswith("pages"):
            ends = torch.tensor(LENGTHS, device=device)
            table = torch.tensor(PAGE_TABLE, device=device)
            places = Pages(table, seq_lens=ends, clear_page=self.clear, errors=self.errors)
            positions = [(row, at) for row, end in zip(PAGE_TABLE, LENGTHS) for at in range(end - S, end)]
            self.slots = torch.tensor([row[at // ROWS] * ROWS + at % ROWS for row, at in positions])
        self.value = KVCache(*self.caches, places, **self.scales, rotate_k=kind == "own")

    def check(self, m: Made) -> None:
        assert self.errors.item() == 0
        stays = is_own(m.case) and m.case["rotate"] == "packed"  # spare tokens in place are not stored
        slots = self.slots.tolist()[: m.ends[-1] if stays else None]
        named = {slot: token for token, slot in enumerate(slots) if 0 <= slot < PAGES * ROWS}
        for letter, cache, before in zip("kv", self.caches, self.before):
            want = m.expected(letter).flatten(0, 1)[[*named.values()]]
            flat, before = cache.flatten(0, 1), before.flatten(0, 1)
            if self.scales:
                units = flat.view(torch.uint8)[[*named]].view(flat.dtype)  # torch 2.6 indexes no fp8 on a CPU
                near_units(units, want.cpu() / torch.tensor(self.scales[f"{letter}_scale"]).double())
            else:
                near(flat[[*named]], want)
            cleared = [page * ROWS + row for page, row in CLEARED] if self.clear else []
            assert not flat.float()[cleared].any()
            others = [slot for slot in range(PAGES * ROWS) if slot not in named and slot not in cleared]
            assert same(flat.float()[others], before.float()[others])


# ---- the tests -------------------------------------------------------------------------------------


def ident(case: Case) -> str:
    words = [case[stage] for stage in STAGES if case[stage] != PLAIN[stage]]
    return "-".join(words) or "plain"


def converts_v(case: Case) -> bool:
    """Whether v gets computed scales too: in half of the calls that can."""
    computed = case["convert"] in ("groups", "mxfp8", "nvfp4", "tiles")
    return computed and case["out"] in ("fresh", "given", "ulysses") and case["rotate"] != "per_head"


def is_own(case: Case) -> bool:
    return case["out"] == "own" and case["convert"] == "none"


def called(m: Made, **words: Any) -> Any:
    inplace = {"inplace": True} if m.case["out"] == "inplace" or is_own(m.case) else {}
    out = {"out": Ulysses(RANKS)} if m.case["out"] == "ulysses" else {}
    return jitrope.prepare_qkv(m.q, m.k, m.v, **m.call_words(), **inplace, **out, **words)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=ident)
def test_a_call_is_the_chain_of_its_stages(case: Case, device: str) -> None:
    """The results, the caches slot by slot, and memory that nothing names; the second call is a known one."""
    like = Made(case, "cpu")
    for _ in range(2):
        m = Made(case, device)
        before, words = m.fused.clone(), {}
        given = Given(m) if case["out"] == "given" else None
        caches = Caches(m) if case["out"] in CACHES else None
        if given:
            words["out"] = given.out
        got = called(m, **words, **({"cache": caches.value} if caches else {}))
        written = [case["out"] == "inplace" or is_own(case), case["out"] in ("inplace", "own")]
        for x, y, is_written in zip(got, (m.q, m.k), written):
            assert (x is y) == is_written
        first, end = HEADS * (not written[0]), (HEADS + m.k.shape[m.layout.index("h")]) * written[1]
        before[..., first:end, :] = m.fused[..., first:end, :]
        assert same(m.fused, before)
        check_heads(like, got[0], "q")
        if caches:
            assert got[2] is m.v
            caches.check(like)
            if case["out"] == "own":
                near(oracle.heads(got[1], m.layout), like.expected("k"))
            else:
                assert got[1] is None
        else:
            check_heads(like, got[1], "k")
            check_heads(like, got[2], "v")
        if given:
            given.check(got)


FUSED = [
    case for case in (*CASES, *WITH_GRADIENT)
    if case["convert"] == "none" and case["out"] in ("fresh", "inplace") and case["layout"] != "bhsd"
    and case["rotate"] != "per_head"
]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("case", FUSED, ids=ident)
def test_fused_qkv_is_the_same_chain(case: Case, biased: bool, device: str) -> None:
    """biased: the chain is that of the sum with the projection's bias, rounded."""
    like, m = Made(case, "cpu"), Made(case, device)
    qkv = oracle.unheads(m.fused[..., : HEADS + 4, :], m.layout)
    words = {**m.call_words(), "heads": (HEADS, 2), "inplace": case["out"] == "inplace"}
    if biased:
        words["bias"] = m.noise(*qkv.shape[-2:]).to(m.dtype)
        like.fused[..., : HEADS + 4, :] += words["bias"].cpu()
    got = jitrope.prepare_fused_qkv(qkv, **words)
    if got is qkv:  # tokens after the last sequence stay
        like.v_end = like.ends[-1]
    for letter, x in zip("qkv", oracle.split(qkv, (HEADS, 2)) if got is qkv else got):
        check_heads(like, x, letter)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", WITH_GRADIENT, ids=ident)
def test_a_gradient_is_that_of_the_chain(case: Case, device: str) -> None:
    """Of q, k, v, the weights, the biases and the scale of q."""
    letters = "qkv" if "v_norm" in case["norm"] or case["out"] == "ulysses" else "qk"
    found: list[Any] = []
    for m in (Made(case, device, True), Made(case, "cpu", True)):
        generator = torch.Generator().manual_seed(3)
        factor = [m.factor] if m.factor is not None else []
        leaves = [*[getattr(m, letter) for letter in letters], *m.weights.values(), *factor]
        if found:
            outputs = [m.expected(letter) for letter in letters]
        else:
            outputs = [oracle.heads(joined(x, case), m.layout) for x in called(m)[: len(letters)]]
        grads = [torch.randn(x.shape, generator=generator).to(m.dtype).to(x) for x in outputs]
        found.append(torch.autograd.grad(outputs, leaves, grads))
    for got, want in zip(*found):
        near(got, want.double(), 4.0)


REORDERED: dict[str, Case] = {
    "torch's sums": {"norm": "rms", "size": "128", "pairs": "into_halves"},
    "other sums, idle lanes": {"norm": "layer", "size": "80", "layout": "sbhd", "pairs": "into_halves"},
    "a row is a token": {"norm": "across", "more": "number", "pairs": "into_halves"},
    "behind the rotation": {"norm": "after", "part": "middle", "rotate": "mrope", "pairs": "into_pairs"},
    "v too, a cache": {"norm": "v_norm", "out": "slots", "part": "last", "pairs": "into_halves"},
    "fp8": {"norm": "zero", "rotate": "angles", "convert": "e4m3", "size": "256", "pairs": "into_pairs"},
    "packed sequences": {"norm": "of_k", "rotate": "packed", "layout": "thd", "pairs": "into_pairs"},
    "ranks": {"out": "ulysses", "part": "last", "pairs": "into_halves"},
    "an fp8 cache": {"out": "fp8_slots", "convert": "e4m3", "layout": "bhsd", "pairs": "into_pairs"},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", REORDERED)
def test_other_pairs_are_a_permutation_of_the_bits(name: str, device: str) -> None:
    """Of a call that keeps its pairs, in another launch; its gradients are those of the permutation."""
    case = {**PLAIN, **REORDERED[name]}
    results, found = [], []
    for pairs, launch in ((case["pairs"], "token_linear"), (KEPT[case["pairs"]], "grid_2d")):
        jitrope.configure(launch=launch)
        m, turn = Made({**case, "pairs": pairs}, device, leaves=True), Made(case, "cpu").turn
        caches = Caches(m) if case["out"] in CACHES else None
        for x in caches.caches if caches else ():
            x.zero_()  # other slots have no pairs
        differentiable = not caches and case["convert"] == "none"
        with torch.set_grad_enabled(differentiable):
            out = [*called(m, **({"cache": caches.value} if caches else {}))]
            out[1:] = caches.caches if caches else out[1:]
        if pairs != case["pairs"]:
            out[:2] = [bytewise(oracle.reordered, x, turn) for x in out[:2]]
        results.append(out)
        if differentiable:
            grads = [torch.cos(torch.arange(x.numel(), device=device)).view(x.shape).to(x) for x in out[:2]]
            found.append(torch.autograd.grad(out[:2], [m.q, m.k, *m.weights.values()], grads))
    assert all(same(x, y) for x, y in zip(*results))
    for x, y in zip(*found):
        torch.testing.assert_close(x, y)


def refused() -> Iterator[Any]:
    for rule, text in REFUSED:
        choices = [(x,) if isinstance(x, str) else x for x in rule.values()]
        for values in itertools.product(*choices):
            case = {**PLAIN, **dict(zip(rule, values))}
            yield pytest.param(case, text, id=ident(case))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("case", "text"), [*refused()])
def test_a_refusal_is_by_name_and_writes_nothing(case: Case, text: str, device: str) -> None:
    m = Made(case, device)
    caches = Caches(m) if case["out"] in CACHES else None
    before, words = m.fused.clone(), {"cache": caches.value} if caches else {}
    if case["out"] == "given":
        words["out"] = [torch.empty_like(x) for x in (m.q, m.k, m.v)]
    with pytest.raises(InvalidInput, match=text):
        called(m, **words)
    assert same(m.fused, before)
    assert not caches or all(same(x, y) for x, y in zip(caches.caches, caches.before))


def test_every_pair_is_in_a_call_or_refused() -> None:
    """Few calls hold every pair; a pair without a call is that of a rule, or a transform, which needs a conversion."""
    assert len(CASES) + len(WITH_GRADIENT) <= 205
    assert not any(is_refused(case) for case in (*CASES, *WITH_GRADIENT))
    covered = {pair for case in CASES for pair in pairs_of(case)}
    for a, b in itertools.combinations(STAGES, 2):
        for x, y in itertools.product(STAGES[a], STAGES[b]):
            if frozenset(((a, x), (b, y))) not in covered:
                assert {a: x, b: y} in NEVER
    for pair in NEVER:
        assert any(all(value in rule.get(stage, ()) for stage, value in pair.items()) for rule in RULES) or (
            "transform" in pair and pair.get("out") == "inplace"
        ), pair
