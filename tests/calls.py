"""The table of calls: `AXES` has the values of everything that a call can have, `REFUSED` what jitrope refuses.

From both follow `CALLS`: few calls in which each pair of values appears that is allowed, in an order that never
changes. `sweep` makes the tensors of a call, and knows its results.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence
from operator import and_
from typing import Any

Case = dict[str, str]
Axes = dict[str, tuple[str, ...]]

# The first value of each axis is the one of a plain call.
AXES: Axes = {
    # heads: q, k and v of `prepare_qkv`; no_v, alone: without v, without k too; kv: without q; rope: `apply_rope`,
    # rope_alone: of q.
    # qkv, grouped, gated: orders of `prepare_fused_qkv`; view: v is not copied. two: streams with tables of their own.
    "source": (
        *("heads", "no_v", "alone", "kv", "rope", "rope_alone"),
        *("qkv", "view", "qkv_bias", "grouped", "grouped_bias", "gated", "gated_bias", "gated_copy"),
        *("latent", "streams", "two"),
    ),
    "norm": (
        *("none", "rms", "after", "l2", "across", "means", "of_v", "zero", "layer", "of_q", "of_k", "v_norm", "k_nope"),
        *("once", "twice"),  # rounded to q's dtype after the weight, and before it too
    ),
    "table": ("rows", "batch", "per_head", "cache", "angles", "scaled", "cis", "none"),  # scaled: angles, and mscale
    "of_table": ("fp32", "half", "double"),  # half: q's dtype
    "positions": (
        *("none", "starts", "mrope", "mrope_turns", "shifts", "ids", "shared", "cp", "shifts_map"),
        *("packed", "packed_starts", "packed_rows", "packed_cp"),  # with spare tokens; rows: a row for each token
    ),
    # full: halves, by a table with an entry for each element; into_halves: interleaved ones are stored as halves
    "pairs": ("halves", "interleaved", "full", "into_halves", "into_pairs"),
    "part": ("whole", "first", "last", "middle"),
    "rounding": ("fp32", "complex64", "complex128", "dtype", "addcmul"),
    "more": ("none", "number", "tokens", "unrotated", "inverse", "check"),  # number, tokens: q_scale
    "transform": ("none", "head"),
    "convert": (
        *("none", "e4m3", "e5m2", "of_v", "of_heads", "of_rows"),  # given scales: of v too, of each head, of each row
        *("heads", "int8", "rows", "kv_rows"),  # computed ones: of a head of a token, of a head of a row
        *("groups", "int8_16", "e4m3_64", "mxfp8", "mxfp4", "nvfp4", "fp4", "tiles", "ue8m0", "weighted"),
    ),
    # some: k is a fresh tensor; own: k itself too; of_k: a cache of k alone; k_pe: the same, and another of its rotated
    # elements; blocks: with computed scales; record: nvfp4, and k_pe in fp8
    "out": (
        *("fresh", "inplace", "given", "some", "by_rank", "ulysses"),
        *("slots", "pages", "indptr", "indices", "fp8_slots", "fp8_pages", "own", "of_k"),
        *("k_pe", "int8_blocks", "mx_blocks", "nvfp4_blocks", "record"),
    ),
    "layout": ("bshd", "sbhd", "thd", "bhsd"),
    "dtype": ("bf16", "fp16", "fp32"),
    "size": ("64", "6", "256", "80", "576", "128", "72"),
    "heads": ("gqa", "odd", "mha", "many"),
    "weights": ("half", "weights_fp32"),  # half: q's dtype
    # sliced: of a wider tensor; turned: two axes are exchanged in memory; apart: of every second element;
    # offset: the address is that of the second element
    "strides": ("plain", "apart", "turned", "sliced", "expanded", "offset"),
    "ints": ("int64", "int32"),
}
PLAIN: Case = {axis: values[0] for axis, values in AXES.items()}


def but(axis: str, *values: str) -> tuple[str, ...]:
    """The other values of an axis."""
    return tuple([x for x in AXES[axis] if x not in values])


ROPES, STREAMS = AXES["source"][4:6], AXES["source"][15:]
# The sources of `project_qkv`, and those that have their rules.
PROJECTED = {
    "projected": "qkv",
    "projected_bias": "qkv_bias",
    "projected_grouped": "grouped",
    "projected_gated": "gated",
}
FUSED = AXES["source"][6:14]
BIASED, ALONE = ("qkv_bias", "grouped_bias", "gated_bias"), ("alone", "rope_alone")
CONVERTED, GIVEN, DYNAMIC = AXES["convert"][1:], AXES["convert"][1:6], AXES["convert"][6:]
CACHES, BLOCKS, PACKED = AXES["out"][6:], AXES["out"][15:], AXES["positions"][9:]
PE = ("k_pe", "record")
NVFP4 = ("nvfp4_blocks", "record")
OF_K = ("of_k", *PE)
INTO, ONE_TABLE = AXES["pairs"][3:], ("cache", "angles", "scaled", "cis")
GROUPED = ("groups", "e4m3_64", "mxfp8", "mxfp4", "fp4", "tiles", "ue8m0")
FP4S, OF_ROWS = ("mxfp4", "nvfp4", "fp4"), ("rows", "kv_rows")
NORMS, CACHED_V, TWO_HEADS = (
    but("norm", "none"),
    [x for x in CACHES if x not in OF_K],
    ("heads", "no_v", "rope", *STREAMS),
)
SHIFTS, MROPES = ("shifts", "shifts_map"), ("mrope", "mrope_turns")
COUNTED = ("ids", "shared", *SHIFTS, *MROPES, "packed_rows")  # each token has a row of the table
UNLIKE = {
    blocks: [x for x in DYNAMIC if x not in (*OF_ROWS, *alike)]
    for blocks, alike in {
        **{"int8_blocks": ["int8"], "mx_blocks": ["mxfp8", "tiles"], **{x: ["nvfp4"] for x in NVFP4}}
    }.items()
}

IDLE = dict.fromkeys(("table", "norm", "transform", "convert"), ("none",))  # with these no stage does anything
IDLE["more"] = ("none", "unrotated", "inverse", "check")

# What cannot be said: a function has no such word, or a value has no such form.
UNSAID: list[dict[str, Any]] = [
    *[{"source": ROPES, "norm": but("norm", "none")}, {"source": ROPES, "transform": "head"}],
    *[{"source": ROPES, "convert": CONVERTED}, {"source": (*ROPES, "latent"), "out": CACHES}],
    *[{"source": "latent", "out": "inplace"}, {"source": STREAMS, "out": ("inplace", "own")}],
    *[{"source": "latent", "norm": but("norm", "none")}, {"source": "latent", "transform": "head"}],
    *[{"source": "latent", "convert": DYNAMIC}, {"source": "latent", "out": ("by_rank", "ulysses")}],
    {"size": "6", "part": "middle"},
    {"source": "latent", "part": ("first", "middle")},  # the widths of the tensors say which
    *[{"source": ("latent", *STREAMS), "more": "inverse"}, {"source": STREAMS, "more": "check"}],
    *[{"source": STREAMS, "layout": but("layout", "bshd")}, {"source": "two", "table": "none"}],
    *[{"table": ("cache", "cis"), "pairs": "full"}, {"table": "none", "of_table": ("half", "double")}],
    *[{"table": "cis", "of_table": "half"}, {"dtype": "fp32", "of_table": "half"}],
    *[{"norm": ("none", "l2"), "weights": "weights_fp32"}, {"dtype": "fp32", "weights": "weights_fp32"}],
    *[{"positions": PACKED, "layout": but("layout", "thd")}],  # `Packed` implies it
]

# A combination, and the sentence of its refusal; ... is any text.
A_TABLE = "pass cos and sin, or one of cos_sin_cache, freqs and freqs_cis, not none"
ACROSS = "; pass mean_squares, or normalise before"
COSINES = "give these tokens a row of the table with cosines of 1"
MOVED = "interleaved_out does not go with inplace, because it moves elements; leave inplace=True out"
LAST = "goes with heads whose last elements are rotated, behind others; D is ..., rotary_offset ... and rotary_dim ..."
NO_ANGLES = "rounding='complex128' does not go with freqs or cu_seqlens; pass cos and sin, and position_ids"
NO_SHIFTS = "shifts does not go with ...; rotate by Shifts in a call of apply_rope"
PAIRED = "q has D=..., strides ... and offset ...; fp4 needs aligned pairs of neighbouring elements"
SCALE_SHAPE = "k_block_scale is ...; it must be ...; a scale is for ... elements"
TWO_TABLES = " does not go with a table for each stream; pass one table"
UP_TO_64 = (
    "interleaved_out does not go with inplace, because it moves elements, unless rotary_dim is a power of two up "
    "to 64; it is ...; leave inplace=True out"
)
V_LIKE_K = (
    "v is ..., k ...; quantize converts a v like k, beside neither a norm across heads nor tables for each head; "
    "or convert v in a call as q"
)
REFUSED: list[tuple[dict[str, Any], str]] = [
    # The source.
    ({"source": ("no_v", "alone"), "norm": "v_norm"}, "v is None; it must be a tensor, because the norm has v_norm"),
    ({"source": "no_v", "out": CACHED_V}, "v is None; it must be a tensor"),
    ({"source": "kv", "out": but("out", *CACHES)}, "q is None; it must be a tensor"),
    ({"source": "kv", "convert": CONVERTED}, "quantize does not go with q=None; leave it out"),
    ({"source": "kv", "more": ("number", "tokens")}, "q_scale does not go with q=None; leave it out"),
    ({"source": "kv", "norm": "of_q"}, "the norm has of='q', but q is not given"),
    ({"source": "alone", "norm": "of_k"}, "the norm has of='k', but k is not given"),
    ({"source": "alone", "out": CACHES}, "k is None; it must be a tensor"),
    ({"source": "alone", "convert": "kv_rows"}, "per='kv_head' needs a multiple of k's heads; q has 4, k 0"),
    ({"source": ("heads", "kv"), "out": OF_K},
     "v is ...; it must be None, because the cache has no v_cache; or pass one"),
    ({"source": "view", "norm": "v_norm"}, "copy_v=False does not go with v_norm; leave copy_v out"),
    ({"source": "view", "convert": "of_v"}, "v_scale is given, but no output is divided by it; leave it out"),
    ({"source": "view", "out": "ulysses"}, "copy_v=False does not go with Ulysses; leave copy_v out"),
    ({"source": "gated_copy", "out": "inplace"}, "copy_gate does not go with inplace; leave it out"),
    ({"source": "gated_copy", "out": CACHES}, "copy_gate does not go with cache; leave it out"),
    ({"source": "gated_copy", "out": "ulysses"}, "copy_gate does not go with Ulysses; leave it out"),
    ({"source": "gated_copy", "out": ("given", "some", "by_rank")}, "copy_gate does not go with out; leave it out"),
    ({"source": "gated_copy", "convert": CONVERTED}, "copy_gate does not go with quantize; leave it out"),
    ({"source": BIASED, "norm": "of_v"}, "the norm has of='v', which does not go with bias"),
    ({"source": FUSED, "layout": "bhsd"}, "layout is 'bhsd'; it must be one of 'bshd', 'sbhd', 'thd'"),
    ({"source": (*FUSED, "latent", *STREAMS), "table": "per_head"},
     "cos is ...; it must be ...; with ... the heads must share it"),
    ({"source": (*FUSED, "latent", *STREAMS), "positions": SHIFTS}, NO_SHIFTS),
    ({"source": STREAMS, "norm": "across"},
     "across_heads does not go with two streams; normalise before, or join them and use prepare_qkv"),
    ({"source": STREAMS, "norm": "means"}, "mean_squares' q does not go with two streams; leave it out"),
    ({"source": STREAMS, "positions": "starts"},
     "start_positions does not go with two streams; pass positions as a tensor of ids"),
    ({"source": STREAMS, "positions": "cp"}, "cp_size does not go with two streams; leave it out"),
    ({"source": STREAMS, "norm": "of_v"}, "v_weight does not go with two streams; leave it out"),
    ({"source": STREAMS, "out": OF_K}, "v is ...; it must be None, because the cache has no v_cache; or pass one"),
    ({"source": "two", "table": ("angles", "scaled")}, "freqs" + TWO_TABLES),
    ({"source": "two", "positions": ("ids", "shared", *MROPES)}, "position..." + TWO_TABLES),
    ({"source": "two", "more": "unrotated"}, "unrotated" + TWO_TABLES),
    # Norms.
    ({"norm": "of_v", "out": but("out", *CACHED_V)},
     "the norm has of='v', which goes with a cache of v; without one pass v as q to a call of its own"),
    ({"norm": "k_nope", "out": but("out", *CACHES)}, "the norm has of='k_nope', which goes with a cache"),
    ({"norm": "k_nope", "part": but("part", "last")}, f"a norm with of='k_nope' {LAST}"),
    ({"norm": "k_nope", "table": "none"}, f"a norm with of='k_nope' {LAST}"),
    ({"norm": "v_norm", "out": OF_K}, "the norm has v_norm, but v is not given"),
    ({"norm": "across", "out": CACHES}, "across_heads does not go with a cache" + ACROSS),
    ({"norm": ("across", "means"), "size": "576"}, "q has D=...; across_heads goes with at most 512"),
    ({"norm": "across", "convert": DYNAMIC}, "across_heads does not go with dynamic scales" + ACROSS),
    ({"norm": "across", "transform": "head"}, "across_heads does not go with hadamard" + ACROSS),
    *[({"norm": "across", "convert": "of_v"}, V_LIKE_K), ({"norm": NORMS, "positions": SHIFTS}, NO_SHIFTS)],
    ({"norm": NORMS, "more": "inverse"}, "inverse does not go with norm; rotate back in a call without a norm"),
    # Tables and positions.
    ({"table": "per_head", "heads": but("heads", "mha"), "source": TWO_HEADS},
     "cos is ...; it must be ...; the third axis is the heads, as many of q and k; of (B, 1, S, W) "
     "pass cos.squeeze(1)"),
    ({"table": "per_head", "out": CACHES}, "cos is ...; it must be ...; with a cache the heads must share it"),
    ({"table": "per_head", "convert": "of_v"}, V_LIKE_K),
    ({"table": ("angles", "scaled"), "of_table": ("half", "double")},
     "freqs is ...; it must be ...; the angles must be computed and passed in fp32"),
    ({"table": ("angles", "scaled"), "rounding": "complex128"}, NO_ANGLES),
    ({"table": ("angles", "scaled"), "positions": SHIFTS}, "freqs does not go with Shifts; pass cos and sin"),
    ({"of_table": "double", "rounding": but("rounding", "complex128")},
     "cos is float64; it must be ...; pass cos.float()"),
    ({"positions": PACKED, "rounding": "complex128"}, NO_ANGLES),
    ({"positions": COUNTED, "more": "unrotated"}, "... does not go with unrotated; " + COSINES),
    ({"positions": SHIFTS, "transform": "head"}, NO_SHIFTS),
    *[({"positions": SHIFTS, "convert": CONVERTED}, NO_SHIFTS), ({"positions": SHIFTS, "out": CACHES}, NO_SHIFTS)],
    # Pairs.
    ({"pairs": INTO, "more": "unrotated"}, "interleaved_out does not go with unrotated; " + COSINES),
    ({"pairs": INTO, "out": "own"},
     "interleaved_out does not go with rotate_k, because it moves elements; leave rotate_k=True out"),
    ({"pairs": INTO, "out": "inplace", "norm": NORMS}, MOVED),
    ({"pairs": INTO, "out": "inplace", "transform": "head"}, MOVED),
    ({"pairs": INTO, "out": "inplace", "part": "whole", "size": but("size", "64")}, UP_TO_64),
    ({"pairs": INTO, "out": "inplace", "part": ("first", "last"), "size": ("256", "576")}, UP_TO_64),
    ({"pairs": INTO, "table": "none"}, "interleaved_out does not go without a table; pass a table"),
    # The transform, conversions.
    ({"transform": "head", "size": ("80", "72", "576", "6")},
     "hadamard goes with a power of two of elements up to 256; q has D=..., so leave it out"),
    ({"size": ("80", "72", "6"), "convert": GROUPED}, "group is ...; it must divide D=..."),
    ({"size": ("72", "6"), "convert": ("int8_16", "nvfp4")}, "group is ...; it must divide D=..."),
    ({"size": ("64", "576"), "convert": "fp4"}, "group is 128; it must divide D=..."),
    ({"strides": ("apart", "offset"), "convert": FP4S}, PAIRED),
    ({"convert": CONVERTED, "out": "inplace"}, "inplace does not go with quantize; leave it out"),
    ({"convert": "of_v", "out": CACHES}, "v_scale of quantize does not go with a cache; give its scales to KVCache"),
    ({"convert": OF_ROWS, "out": CACHES}, "per=... does not go with a cache; pass q's scales in Quantize"),
    # Caches.
    ({"out": CACHES, "more": "inverse"}, "inverse does not go with cache; leave it out"),
    *[({"out": blocks, "convert": other}, "quantize makes q ..., but k_cache and k_block_... are ...; they must match")
      for blocks, other in UNLIKE.items()],
    ({"heads": "odd", "out": ("by_rank", "ulysses")}, "q is ...; for 2 ranks it needs a multiple of 2 heads"),
    ({"source": ("grouped", "grouped_bias"), "heads": "many", "out": ("by_rank", "ulysses")},
     "with order='grouped' and heads for each rank there must be a rank for each of the 10 groups"),
    ({"out": PE, "part": but("part", "last")}, f"k_pe_cache {LAST}"),
    ({"out": PE, "table": "none"}, f"k_pe_cache {LAST}"),
    ({"out": PE, "transform": "head"},
     "hadamard does not go with k_pe_cache, because it mixes its elements with those of k_cache; leave it out"),
    ({"out": "mx_blocks", "size": ("80", "72", "6")}, SCALE_SHAPE),
    ({"out": NVFP4, "size": "72"}, SCALE_SHAPE),
    ({"out": NVFP4, "size": "6"},
     "rotary_offset is ..., rotary_dim ...; for fp4 the first must be even, and the second a multiple of 4"),
    ({"out": NVFP4, "strides": ("apart", "offset")}, PAIRED),
    ({"out": ("inplace", "own"), "strides": "expanded"},
     "q has strides ...; its elements overlap in memory, so it cannot be written; pass q.contiguous(), or leave "
     "inplace=True out"),
    # Nothing to do.
    ({**IDLE, "source": ROPES}, A_TABLE),
    ({**IDLE, "source": ("heads", "no_v", "alone"), "out": ("fresh", "inplace")}, A_TABLE),
    ({**IDLE, "source": ("qkv", "view", "grouped", "gated", "gated_copy"), "out": "inplace"}, A_TABLE),
]  # fmt: skip

# Calls with a gradient. learned: the table requires one too; wanted: the results that get one.
WITH_GRADIENT: Axes = {
    **AXES,
    "of_table": ("fp32", "half"),
    "convert": ("none",),
    "out": ("fresh", "inplace", "ulysses"),
    "learned": ("fixed", "learned"),
    "wanted": ("all", "of_first", "of_last"),
}
WITHOUT_GRADIENT: list[tuple[dict[str, Any], str]] = [
    ({"out": "inplace", "norm": NORMS}, "requires a gradient, but this call has none; leave inplace=True out"),
    ({"out": "inplace", "transform": "head"}, "requires a gradient, but this call has none; leave inplace=True out"),
    ({"out": "inplace", "learned": "learned"}, "requires a gradient, but this call has none; leave inplace=True out"),
    ({"out": "inplace", "more": ("number", "tokens")}, "q_scale requires a gradient, but this call has none"),
    ({"out": ("given", "some", "by_rank")}, "requires a gradient, but this call has none"),
    ({"out": CACHES}, "requires a gradient, but this call has none"),
    ({"convert": CONVERTED}, "requires a gradient, but this call has none"),
]
for rule in (*UNSAID, *[rule for rule, _ in (*REFUSED, *WITHOUT_GRADIENT)]):
    rule.update({axis: (x,) for axis, x in rule.items() if isinstance(x, str)})


# ---- the calls -------------------------------------------------------------------------------------


class Table:
    """Few calls with each pair of values. Values are numbers, and sets of values the bits of one."""

    def __init__(self, axes: Axes, rules: Sequence[dict[str, Any]]) -> None:
        self.axes = axes
        self.words = [(axis, value) for axis, values in axes.items() for value in values]
        self.number = {word: n for n, word in enumerate(self.words)}
        self.of_axis = {axis: [self.number[axis, value] for value in values] for axis, values in axes.items()}
        # The rules that can hold beside a value: those that do not name its axis, or name the value.
        self.held = [sum(fits({axis: x}, rule) << n for n, rule in enumerate(rules)) for axis, x in self.words]
        self.least = {
            axis: functools.reduce(and_, [self.held[n] for n in numbers]) for axis, numbers in self.of_axis.items()
        }

    def covered(self) -> tuple[list[Case], list[Case]]:
        """(calls with every pair of values that is allowed, the pairs that are in no call)"""
        every, cases, never = (1 << len(self.words)) - 1, [], []
        own = {axis: sum(1 << n for n in numbers) for axis, numbers in self.of_axis.items()}
        missing = [every & ~own[axis] for axis, _ in self.words]
        for first, (axis, _) in enumerate(self.words):
            while later := missing[first] >> first:
                second = first + (later & -later).bit_length() - 1
                pair = {axis: first, self.words[second][0]: second}

                def order(values: list[int], chosen: dict[str, int]) -> list[int]:
                    """Those with most missing pairs first; of equal ones another in each case."""
                    turn, bits = len(cases) % len(values), sum(1 << n for n in chosen.values())
                    return sorted([*values[turn:], *values[:turn]], key=lambda n: -(missing[n] & bits).bit_count())

                found = self.completed(pair, order)
                if found is None:
                    never.append(dict(self.words[n] for n in pair.values()))
                    found = pair
                else:
                    cases.append({axis: self.words[found[axis]][1] for axis in self.axes})
                bits = sum(1 << n for n in found.values())
                for n in found.values():
                    missing[n] &= ~bits
        return cases, never

    def case(self, values: Case, order: Any) -> Case | None:
        """The completed case with some values."""
        found = self.completed({axis: self.number[axis, x] for axis, x in values.items()}, order)
        return None if found is None else {axis: self.words[found[axis]][1] for axis in self.axes}

    def completed(self, chosen: dict[str, int], order: Any) -> dict[str, int] | None:
        """The values with one for each axis, the first in an order with which no rule holds; None if there is none."""
        left = [axis for axis in self.axes if axis not in chosen]
        if not left:
            return chosen
        least = [self.least[axis] for axis in left]  # the rules that hold whatever the axis has
        first = [-1, *itertools.accumulate(least, and_)]
        last = [-1, *itertools.accumulate(reversed(least), and_)][::-1]
        holds = functools.reduce(and_, [self.held[n] for n in chosen.values()], -1)
        possible: dict[str, list[int]] = {}
        for at, axis in enumerate(left):
            held = holds & first[at] & last[at + 1]
            possible[axis] = [n for n in self.of_axis[axis] if not held & self.held[n]]
            if not possible[axis]:
                return None
        axis = next((axis for axis in left if len(possible[axis]) == 1), left[0])
        for n in order(possible[axis], chosen):
            found = self.completed({**chosen, axis: n}, order)
            if found is not None:
                return found
        return None


def fits(case: Case, rule: dict[str, Any]) -> bool:
    """Whether a rule holds, as far as the case says."""
    return all(axis not in rule or case[axis] in rule[axis] for axis in case)


RULES = [*UNSAID, *[rule for rule, _ in REFUSED]]
TABLE = Table(AXES, RULES)
CALLS, NEVER = TABLE.covered()
# Projections, most of which tensor cores can make, have a table of their own, with fewer conversions and results.
OF_PROJECTIONS: Axes = {
    **AXES,
    **{"source": tuple(PROJECTED), "dtype": ("bf16", "fp16"), "size": ("64", "128"), "part": ("whole", "first")},
    **{"pairs": but("pairs", "into_pairs"), "norm": but("norm", "of_v"), "strides": ("plain", "sliced")},
    "convert": ("none", "e4m3", "of_v", "heads", "mxfp8"),
    "out": ("fresh", "given", "slots", "fp8_pages", "ulysses"),
}


def of_projections(rules: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    own = [{x for x, like in PROJECTED.items() if like in rule.get("source", ())} for rule in rules]
    return [rule if "source" not in rule else {**rule, "source": (*rule["source"], *x)} for rule, x in zip(rules, own)]


PROJECTIONS = Table(OF_PROJECTIONS, of_projections(RULES)).covered()[0]


def named(words: str) -> Case:
    """The plain call but for some values, "rms slots fp16"; where two axes have one of this name, "out=of_k".

    "32+8" are the heads of q and of k, another number is the head's size; "grad": the call has a gradient. Other axes
    have the first value that is allowed beside those.
    """
    found: Case = {}
    for word in words.replace(" grad", "").split():
        axis, _, value = word.rpartition("=")
        other = ["heads" if "+" in word else "size"]
        (own,) = [axis] if axis else [x for x, values in AXES.items() if value in values[1:]] or other
        found[own] = value
    free = {axis: found.pop(axis) for axis in ("heads", "size") if found.get(axis, PLAIN[axis]) not in AXES[axis]}
    case = TABLE.case(found, lambda numbers, _: numbers)
    assert case is not None, f"{words} is refused"
    return case | free | ({"learned": "fixed", "wanted": "all"} if words.endswith(" grad") else {})


def random_case(draw: random.Random, gradient: bool = False) -> Case:
    """A call of the table that need not be one of `CALLS`, or one of those with a gradient."""
    found = (GRADIENT_TABLE if gradient else TABLE).case({}, lambda numbers, _: draw.sample(numbers, len(numbers)))
    assert found is not None
    return found


UNLEARNED = {"learned": ("learned",), "table": ("none",)}
_RULES = [*RULES, UNLEARNED, *[rule for rule, _ in WITHOUT_GRADIENT]]
GRADIENT_TABLE = Table(WITH_GRADIENT, _RULES)
GRADIENTS, NO_GRADIENTS = GRADIENT_TABLE.covered()
_FEWER = {"norm": ("none", "rms", "after"), "table": ("rows", "angles"), "positions": ("none", "ids", "packed")}
_FEWER |= {"rounding": ("fp32",), "more": ("none", "number"), "layout": ("bshd", "sbhd", "thd"), "ints": ("int64",)}
_FEWER |= {"pairs": ("halves", "interleaved"), "convert": ("none",), "out": ("fresh", "ulysses")}
OF_PROJECTED = Table({**WITH_GRADIENT, **OF_PROJECTIONS, **_FEWER}, of_projections(_RULES)).covered()[0]


def ident(case: Case) -> str:
    plain = {axis: values[0] for axis, values in WITH_GRADIENT.items()} | PLAIN
    return "-".join([value for axis, value in case.items() if value != plain[axis]]) or "plain"


# Calls of models, and those whose kernels need most: the largest blocks, the fewest registers, the widest tables.
MODELS = """
rope 32+8 128 | rope 32+32 128 | rope 64+8 128 | rope 32+8 128 inplace | rope 64+8 128 inplace | rope 32+8 128 grad
rope 32+8 128 ids inplace | rope 64+8 128 ids inplace | rope 32+8 128 packed grad | rope_alone 16+16 80
slots ids 32+8 128 | own ids 32+8 128 | fp8_slots ids 32+8 128 | twice slots ids 32+8 128 | twice own ids 32+8 128
twice fp8_slots ids 32+8 128 | rope_alone 24+24 128 interleaved | rope_alone 24+24 128 full | rope_alone 16+16 256
rope 24+24 128 interleaved grad | rope_alone 24+24 128 interleaved complex64 | rope_alone 16+16
streams once interleaved 24+24 128 | once interleaved inplace 24+24 128 | two twice cis interleaved complex64 24+24 128
norm=across cis interleaved inplace 40+40 128 | norm=across cis interleaved inplace 12+12 128 | twice 32+8 128 grad
rope_alone 12+12 128 interleaved | rope_alone 40+40 128 interleaved | rope_alone angles full 8+8 128 grad
rope_alone angles full 32+32 128 grad | rope_alone angles full packed 8+8 128 grad
"""
LARGEST = """
rope_alone 96+96 128 full | rope_alone 96+96 128 full grad | rope_alone 96+96 128 full packed grad
rope_alone 48+48 128 full fp32 packed int32 | rope_alone angles full 64+64 128 grad | rope_alone angles 128+128 128 grad
rope_alone angles full packed 24+24 128 int32 grad | rope_alone angles full packed 128+128 128 int32 grad
rope_alone angles packed_starts 40+40 128 grad | rope_alone angles packed_cp 40+40 128 | rope_alone packed_cp 24+24 128
rope_alone angles packed_rows 40+40 128 | rope_alone angles packed_rows interleaved 24+24 128 int32
rope full ids number 64+8 128 grad | rope half full ids dtype 64+8 128 | rope cis double complex128 ids 64+8 128
rope first angles full ids inplace 129+5 128 | rope_alone packed 64+64 128 int32 grad | rope_alone full packed 24+24 128
grouped angles full packed 32+8 128 int32 grad | grouped sbhd 16+16 128 grad | gated 16+2 256 grad
grouped_bias angles full packed 32+8 128 int32 | qkv_bias inplace 28+4 128 | gated_bias 16+2 256 grad
latent angles last into_halves 128+128 192 grad | latent angles packed last into_halves 128+128 192 int32 grad
latent angles last into_halves 16+16 192 grad | latent last 40+40 96 grad | latent last e4m3 into_halves 16+16 192
latent last angles full unrotated 40+40 96 grad | latent last convert=of_v into_halves 16+16 192
rope_alone mrope inplace 40+40 128 int32 | rope_alone mrope_turns 40+40 128 grad
rope_alone cis ids interleaved 24+24 128 | rope_alone ids 72+72 128 grad | rope_alone angles ids 24+24 128
e4m3 ids 32+8 128 | convert=of_v half full ids dtype 32+8 128 | qkv_bias ids fp8_slots 28+4 128
rope last angles into_halves 16+16 192 grad | rope_alone double complex128 48+48 128 grad
rope_alone half full dtype 40+40 128 grad | rope_alone addcmul 48+48 128 | rope_alone shifts inplace 8+8 128
rope_alone shifts full inplace 8+8 128 | rope number 32+8 128 grad | rope unrotated bhsd 16+16 128 grad
rope half full dtype number 32+8 128 | pages ids 32+8 128 int32 | indptr ids 32+8 128 int32 | indices ids 32+8 128 int32
fp8_pages ids 32+8 128 int32 | twice fp8_pages ids 32+8 128 int32
once interleaved 24+24 128 grad | once full 24+24 128 | twice cis interleaved complex64 inplace 24+24 128
streams zero 24+24 128 | streams interleaved ids 24+24 128 grad | streams v_norm angles unrotated 24+24 128
streams once interleaved kv_rows 24+24 128 | streams once interleaved int8 head 24+24 128
streams once interleaved head 24+24 128 | norm=across interleaved inplace 12+12 128
norm=across interleaved 12+12 128 grad
norm=across interleaved 40+40 128 grad | alone norm=across interleaved 40+40 128 | norm=across addcmul 32+32 grad
rms ids 32+8 128 grad | v_norm 8+4 256 grad | once into_halves 32+8 128 grad | groups head into_pairs 95+1 256
twice dtype ids inplace 32+8 128 | twice packed 32+8 128 grad | twice angles packed 32+8 128 int32 grad
grouped once angles full packed_cp 32+8 128 int32 grad | twice mrope_turns 32+8 128 | zero first 16+8 256 grad
twice 32+16 | once 24+8 80 | once double complex128 interleaved 24+8 96 | once fp32 24+8 128 grad | rms 8+8 576
layer 48+48 grad | twice mrope convert=heads 32+8 128 | convert=heads head first 64+1 128
norm=of_k convert=heads head first 64+1 128 | norm=of_k 32+8 128 grad | norm=of_v ids slots 128+1 64
grouped_bias twice ids fp8_slots 32+8 128 | once interleaved int8 head 24+24 128 | twice groups 32+8 128
e4m3 head first fp8_slots 64+8 128 | twice ids convert=rows 32+8 128 | twice ids kv_rows 32+8 128
rms nvfp4 32+8 128 | qkv_bias twice mxfp8 28+4 128 | twice ids nvfp4_blocks 32+8 128 | ids nvfp4_blocks 32+8 128
ids mxfp8 32+8 128 | once mxfp4 32+8 128 | once ue8m0 32+8 128 | interleaved nvfp4 32+8 128 | interleaved tiles 32+8 128
once fp4 32+8 128 | inverse last interleaved e4m3_64 64+64 576 | rms first 2+2 6 | after number 32+8 128
l2 interleaved 16+8 128 grad | means interleaved 10+10 128 grad | means ids fp8_slots 24+4 128
record k_nope last interleaved 16+1 576 | k_pe last ids 16+1 576
after unrotated 32+8 128 grad | gated zero first 16+2 256 grad | gated_copy zero first 16+2 256 grad
"""
MODELS, LARGEST = (tuple(x.replace("\n", " | ").strip(" |").split(" | ")) for x in (MODELS, LARGEST))
# Their gradient's largest block would need more shared memory than there is.
WIDE = ("norm=across into_halves 96+96 128 grad", "norm=across into_halves 64+64 256 grad")
# Three values that were wrong together: gates in place beside a cache; spare tokens with a bias in place.
THREES = (
    *("gated_bias own 128", "gated_bias own first 128", "rms gated_bias own 128", "rms gated_bias own packed 128"),
    *("gated_bias own packed 128", "qkv_bias own packed 128", "grouped_bias rms own packed 128"),
    *("qkv_bias number own packed 128", "qkv_bias head own packed 128", "rms gated_bias packed inplace 128"),
    *("qkv_bias packed into_halves first inplace 128", "grouped_bias packed into_halves first inplace fp16 128"),
    "grouped_bias packed_rows into_pairs middle inplace 256 odd",
)
# One for each function and kind of place, for the situations of torch. A name with "_" at its end writes q in place.
NAMED = {
    "rope": "rope", "rope_": "rope inplace", "rope_into": "rope given", "fused": "grouped", "fused_": "grouped inplace",
    "fused_norm": "grouped rms", "fused_norm_": "grouped rms inplace", "norm": "no_v rms", "norm_": "no_v rms inplace",
    "norm_into": "rms given", "across": "no_v norm=across", "fp8": "no_v e4m3", "norm_fp8": "no_v rms e4m3",
    "norm_scaled": "no_v rms convert=heads head", "cache": "slots", "cache_": "slots",
    "cache_own_k": "own e4m3",  # k itself is rotated too
    "norm_cache": "rms slots", "norm_cache_": "rms slots", "v_norm_cache": "v_norm slots", "pages": "pages",
    "streams": "streams rms", "latent": "latent last",
}  # fmt: skip
NAMED = {name: named(f"{words} fp32") for name, words in NAMED.items()}
