"""Random values: no field carries code into a source, every plan belongs to a kernel, every key is unique."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from itertools import chain
from math import gcd
from operator import attrgetter
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jitrope.base import partition
from jitrope.base.errors import InvalidInput
from jitrope.base.spec import DTYPES, INDEX_DTYPES, ITEM_SIZES, MAX_INT, Spec, spec_from_dict
from jitrope.base.views import GROUPS
from jitrope.jit import compiler, render
from jitrope.jit.entry import Key
from jitrope.plan.arguments import declarations
from jitrope.plan.heuristics import MAX_GRID_Y, SHARED_BYTES, SHORT_WALK, RopeProblem, plan, shared_by_stages
from jitrope.plan.spec import RopeSpec
from jitrope.stages.convert import SCALE_DTYPES
from jitrope.stages.norm import KINDS as NORM_KINDS
from jitrope.stages.norm import ROUNDINGS as NORM_ROUNDINGS
from jitrope.stages.rotate import ROUNDINGS
from jitrope.thd.shape import Mask, Shape
from jitrope.thd.spec import MAPS, CorrectionSpec, RowsSpec, SegmentsSpec, rows_spec

from .calls import named
from .results import planned

# The same examples in every run, so failures are reproducible.
settings.register_profile(
    "fixed", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("fixed")

SPECS: list[Spec] = [
    *chain(*[planned(named(x)) for x in ("rope 32+8 128", "rope_alone mrope 24+24 128", "once 32+8 128 grad")]),
    rows_spec((2048, 1024), 1024, "to_ranks", cp_size=2),
    RowsSpec("positions", writes=True, cp_size=4, rule="contiguous", index_dtype="int64"),
    SegmentsSpec(True, "int32", 2, "dual_chunk", full=False, extends=False, padded=True, exchange=True, threads=256),
    CorrectionSpec("out", "nothing", "add", True, "bf16", "int32", 8),
]
BY_NAME = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.call or spec.name)
FLAG, COUNTS = st.booleans(), st.integers(1, 64)

# ---- code in a field -----------------------------------------------------------------------------

PAYLOADS = [
    "float; } __device__ int x = 1; {", "bf16\n#include <evil>", "{{ 7 * 7 }}", "{% include 'x' %}", "*/ int y; /*",
    "../../../etc/passwd", "fp32 ", "FP32", "fp32\0", "\u212aB", 'fp32"', "true", "1;//", "fp32//", "",
]  # fmt: skip
TEXTS = st.one_of(st.sampled_from(PAYLOADS), st.text(), st.from_regex(r"[a-z0-9_]{1,12}", fullmatch=True))
JSON = st.recursive(
    st.one_of(st.none(), FLAG, st.integers(), st.floats(), TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=5), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)
LITERAL = re.compile(r"true|false|\d{1,10}|[A-Za-z][A-Za-z0-9_ ]{0,20}|\{\d{1,11}(, \d{1,11}){0,35}\}")


def is_harmless(spec: Spec) -> bool:
    """A constant of a template is a number, a flag, a word, a list of numbers, or the fixed arguments."""
    constants = spec.constants()
    fixed = constants.pop("arguments", None)
    literals = [str(render.cpp_literal(value)) for value in constants.values()]
    assert fixed in (None, declarations(getattr(spec, "stages", ())))
    return all(LITERAL.fullmatch(text) for text in literals)


LINES: dict[str, tuple[set[str], re.Pattern[str]]] = {}
"""Of a template: its lines without a constant, and a pattern of the others."""
for template in {spec.template for spec in SPECS}:
    between_tags = [x for text in render._texts(template).values() for x in re.split(r"{%[^%]*%}", text)]
    lines = {line for x in between_tags for line in x.splitlines()}
    with_constant = {line for line in lines if "{{" in line}
    parts = [[*map(re.escape, re.split(r"{{ \w+ }}", line))] for line in with_constant]
    pattern = re.compile("|".join(f"(?:{LITERAL.pattern})".join(x) for x in parts))
    LINES[template] = (lines - with_constant, pattern)


@BY_NAME
@settings(max_examples=100)
@given(data=st.data())
def test_no_text_gets_into_a_source(spec: Any, data: st.DataObject) -> None:
    """A value of a field, from Python or from JSON, is refused or is allowed for that field.

    Then each line is one of the template, a mark of its place, or one of the arguments.
    """
    name = data.draw(st.sampled_from([field.name for field in fields(spec)]))
    value = data.draw(JSON)
    changed = replace(spec, **{name: value})
    try:
        text = render.render(changed).text
    except InvalidInput:
        for use in (render.render, render.ingredients, lambda wrong: wrong.constants()):
            with pytest.raises(InvalidInput):
                use(changed)
    else:
        assert is_harmless(changed)
        if changed.template not in LINES:  # with projected it has loops over a number
            return
        plain, with_constant = LINES[changed.template]
        known = {*plain, *declarations(getattr(changed, "stages", ())).splitlines()}
        for line in text.removeprefix(render.head(changed)).splitlines():
            assert line in known or re.fullmatch(r'#line \d+ "[\w.]+"', line) or with_constant.fullmatch(line)
    try:
        again = spec_from_dict({**spec.to_dict(), name: value})
    except InvalidInput:
        return
    assert is_harmless(again)
    assert spec_from_dict(json.loads(json.dumps(again.to_dict()))) == again


@settings(max_examples=100)
@given(JSON)
def test_whatever_a_file_has_for_a_spec_is_refused(value: Any) -> None:
    with pytest.raises(InvalidInput):
        spec_from_dict(value)


@settings(max_examples=100)
@given(st.sampled_from(SPECS), st.dictionaries(TEXTS, JSON, max_size=2), st.sets(st.integers(0, 60), max_size=2))
def test_missing_and_unknown_fields_are_refused(spec: Any, more: dict[str, Any], without: set[int]) -> None:
    given_fields = list(spec.to_dict().items())
    kept = dict(item for i, item in enumerate(given_fields) if i not in without) | more
    if kept.keys() == spec.to_dict().keys() and not more.keys() & kept.keys():
        assert spec_from_dict(kept) == spec
    elif kept.keys() != spec.to_dict().keys():
        # The text of a call may be left out, and of a spec of rows a field with a default.
        try:
            assert is_harmless(spec_from_dict(kept))
            assert isinstance(spec, RowsSpec) or "call" not in kept
        except InvalidInput:
            pass


@st.composite
def problems(draw: Any) -> RopeProblem:
    """A call that passes the host's checks, in integers."""
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    kind = pick("plain", "plain", "packed", "ids", "cache", "qkv", "latent", "norm", "streams", "across", "gradient")
    normed = kind in ("norm", "streams", "across", "gradient") or (kind in ("cache", "packed") and draw(FLAG))
    head_dim = 2 * draw(st.one_of(st.sampled_from([32, 40, 64, 128]), st.integers(1, 256)))
    rotary = 2 * draw(st.integers(1, head_dim // 2)) if pick(True, False) else head_dim
    offset = head_dim - rotary if kind == "latent" else draw(st.integers(0, head_dim - rotary))
    rounding = pick(*ROUNDINGS)
    dtype, exact = pick(*DTYPES), rounding == "complex128"
    angles = draw(FLAG) and not exact and kind != "streams"
    if kind == "packed" and exact:
        rounding, exact = "complex64", False
    interleaved, paged = draw(FLAG), kind == "cache" and draw(FLAG)
    mixed = pick(True, False, False)
    in_place = draw(FLAG) and not mixed and kind not in ("streams", "gradient", "qkv", "latent")
    fp8 = pick(True, False, False) and not in_place and kind in ("plain", "cache", "norm")
    convert_v = fp8 and kind in ("plain", "norm") and draw(FLAG)
    values = convert_v or kind in ("streams", "qkv", "latent") or (kind == "cache" and draw(FLAG))
    per_head = pick(True, False, False) and not angles and not values and not mixed and kind != "ids"
    heads_each = draw(COUNTS)
    q_per_group = draw(st.integers(1, 8)) if kind == "qkv" else 1
    row_heads = pick((heads_each,), (heads_each, 1 + heads_each // 4)) if kind == "across" else ()
    q_heads = heads_each * q_per_group
    heads = sum(row_heads) or (q_heads + (2 if values else pick(0, 1)) * heads_each)
    pairs = rotary // 2
    axes: tuple[int, ...] = ()
    if kind == "ids" and pairs >= 3 and draw(FLAG):
        axes = tuple(draw(st.lists(st.integers(0, 3), min_size=pairs, max_size=pairs)))
        axes = tuple(sorted(axes)) if draw(FLAG) else axes
    fp8_form = pick("fp8", "fp8_e5m2")
    dynamic = fp8 and normed and not row_heads and draw(FLAG)
    block_cache = dynamic and kind == "cache" and draw(FLAG)
    gradient = kind == "gradient"
    added_bias = (kind == "qkv" or gradient) and draw(FLAG)
    norm_kind = pick("no_norm", *NORM_KINDS) if normed else ""
    norm_q, norm_k = (draw(FLAG) or not normed for _ in "qk")
    latent_norm = kind == "cache" and values and norm_kind == "rms_norm" and not (norm_q or norm_k)
    given_means = not latent_norm and kind in ("norm", "cache") and norm_kind == "rms_norm" and draw(FLAG)
    nope = kind == "cache" and not (values or row_heads) and 0 < offset == head_dim - rotary and not given_means
    prefixed = draw(FLAG) and not mixed and kind not in ("ids", "cache", "streams", "latent")
    weight = pick(None, *DTYPES) if normed else None
    weight_vec = pick(*(n for n in (1, 2, 4, 8) if n <= 16 // ITEM_SIZES[weight])) if weight else 1
    tokens = draw(st.one_of(st.integers(1, 300), st.integers(1, 1 << 30)))
    return RopeProblem(
        dtype=dtype, table_dtype=pick(*DTYPES, *(["fp64"] if exact else [])), head_dim=head_dim, rotary_dim=rotary,
        rotary_offset=offset, interleaved=interleaved, interleaved_out=interleaved != mixed,
        inverse=gradient or draw(FLAG), freqs=angles, full_width=draw(FLAG) and not mixed,
        per_head=per_head and kind == "plain", packed_table=draw(FLAG) and kind == "packed" and not prefixed,
        rounding=rounding, in_place=in_place, cu_seqlens_dtype=pick(*INDEX_DTYPES) if kind == "packed" else None,
        start_positions_dtype=pick(None, *INDEX_DTYPES)
        if kind in ("plain", "packed") and not exact and not prefixed else None,
        cp_size=pick(1, 1, 2, 3, 8) if kind in ("plain", "packed", "qkv", "latent") and not prefixed else 1,
        scales_q=draw(FLAG) and kind != "latent", prefixed=prefixed, head_scales=draw(FLAG), added_bias=added_bias,
        gated=kind == "qkv" and q_per_group == 2 and draw(FLAG), weighs_q=dynamic and draw(FLAG),
        position_ids_dtype=pick(*INDEX_DTYPES) if kind in ("ids", "cache") else None,
        shifts=kind == "ids" and not angles and draw(FLAG), axis_of_pair=axes,
        slot_mapping_dtype=pick(*INDEX_DTYPES) if kind == "cache" and not paged else None,
        page_table_dtype=pick(*INDEX_DTYPES) if paged else None, page_indptr=paged and draw(FLAG),
        cu_seqlens_q=paged and draw(FLAG), batch_indices=paged and draw(FLAG), clear_page=paged and draw(FLAG),
        page_size=pick(16, 784) if paged else pick(0, 16, 784) if kind == "cache" else 0,
        rotate_k=kind == "cache" and not mixed and draw(FLAG), pe_dtype=pick(None, dtype, "fp8") if nope else None,
        q_out=fp8_form if fp8 else dtype,
        kv_out=fp8_form if fp8 or (kind == "cache" and draw(FLAG)) else dtype,
        hadamard=fp8 and normed and not row_heads and head_dim in (64, 128, 256) and draw(FLAG), dynamic=dynamic,
        group=pick(0, *GROUPS) if dynamic and head_dim % 128 == 0 else 0,
        scale_out=pick(*SCALE_DTYPES) if dynamic else "fp32", per_row=dynamic and draw(FLAG),
        swizzled=dynamic and draw(FLAG), block_cache=block_cache, dynamic_q=dynamic and (not block_cache or draw(FLAG)),
        norm_kind=norm_kind, biased=weight is not None and draw(FLAG),
        norm_rounding=("none" if gradient else pick(*NORM_ROUNDINGS)) if normed else "", across_heads=bool(row_heads),
        row_heads=row_heads, given_means=given_means, zero_centered=normed and draw(FLAG),
        after_rope=normed and draw(FLAG), norm_q=given_means or norm_q, norm_k=given_means or norm_k,
        latent_norm=latent_norm, norm_nope=nope and norm_kind == "rms_norm" and norm_k and not norm_q,
        v_norm=latent_norm or (normed and kind == "cache" and values and not given_means and draw(FLAG)),
        weight_dtype=weight, two_streams=kind == "streams", two_tables=kind == "streams" and draw(FLAG),
        projected=False, round_projection=False, gradient=gradient,
        q_per_group=q_per_group, copy_v=values, v_per_k=1, convert_v=convert_v,
        kv_per_group=pick(1, 1, heads_each) if kind in ("plain", "norm", "gradient") else 1,
        v_dim=draw(st.integers(1, 256)) if kind == "latent" else 0, batch_inner=kind != "packed" and draw(FLAG),
        wide=draw(FLAG), batch=draw(st.integers(1, 4)), tokens=tokens, heads=heads,
        q_heads=q_heads if not row_heads else row_heads[0],
        sequences=draw(st.one_of(st.integers(1, 9), st.just(MAX_GRID_Y), st.just(100_000))) if kind == "packed" else 0,
        max_seqlen=draw(st.integers(0, tokens)) if kind == "packed" else 0, vec_limit=pick(1, 2, 4, 8, 16),
        table_vec_limit=pick(1, 2, 4, 8), table_step_limit=pick(1, 1, 2), weight_vec_limit=weight_vec,
        launch=pick("auto", "token_linear", "grid_2d"), sm_count=pick(1, 80, 132), memory_speed=pick(0.0, 4.9),
    )  # fmt: skip


@settings(max_examples=400)
@given(problems())
def test_plans_are_launchable_and_whole(p: RopeProblem) -> None:
    chosen = plan(p)
    spec, (x, y, *z) = chosen.spec, chosen.grid
    assert 1 <= x <= MAX_INT
    assert all(1 <= n <= MAX_GRID_Y for n in (y, *z))
    assert spec.threads <= 1024
    assert spec.threads % 32 == 0
    assert shared_by_stages(spec) <= SHARED_BYTES
    assert spec.lanes <= spec.team <= spec.threads
    run = spec.chunk * spec.chunks  # every element of a head has one lane
    rest = 0 if p.in_place and not (p.cached or p.norm or p.scales_q or p.added_bias) else p.head_dim - p.rotary_dim
    assert spec.lanes * run >= p.rotary_dim
    copied = spec.vec * spec.copy_accesses
    assert p.rotary_dim % run == rest % copied == p.rotary_offset % spec.vec == p.v_dim % spec.vec == 0
    assert copied <= max(run, spec.vec)
    assert spec.lanes == p.rotary_dim // run + rest // copied
    assert spec.vec <= p.vec_limit
    assert spec.table_vec <= p.table_vec_limit
    step = spec.heads_per_block * spec.heads_per_thread
    if p.across_heads or p.gradient:  # a block walks tokens, or rows
        assert p.across_heads or y * step >= p.heads
    elif spec.tiles == 1:
        assert x * step >= p.heads > (x - 1 - (p.inverse and p.v_dim > 0)) * step
        assert y * z[0] * spec.tokens_per_block >= p.tokens > (y - 1) * z[0] * spec.tokens_per_block
        assert spec.one_step
    elif spec.launch == "token_linear":
        groups = -(-p.tokens // spec.tokens_per_block)
        walks = (-(-groups // SHORT_WALK), p.sm_count * spec.blocks_per_sm)
        assert x >= groups or (spec.ring and x in walks)
        if spec.tiles:
            assert spec.one_step
            assert y * step >= p.heads
        else:
            assert y == 1
            assert spec.one_step == (step >= p.heads)
    elif p.cu_seqlens_dtype and not p.norm:
        assert y == p.sequences + 1
    else:
        assert x * spec.tokens_per_block >= p.tokens
        assert y * step >= p.heads
    if p.norm:
        row_threads = spec.team * (spec.heads_per_block if p.across_heads else 1)
        assert row_threads <= 32 or row_threads % 32 == 0
    if p.gradient and not p.across_heads:
        assert spec.blocks_per_sm * spec.threads > 256 or spec.team == 256
        assert spec.threads // spec.team * p.head_dim * 4 <= SHARED_BYTES  # a row of sums for each team
    if spec.ring and not p.across_heads:  # the next heads of each thread
        of_thread = spec.heads_per_thread * spec.chunks * spec.chunk * ITEM_SIZES[p.dtype]
        assert spec.threads * of_thread * (1 + p.gradient) <= SHARED_BYTES


@settings(max_examples=150)
@given(problems())
def test_every_planned_spec_renders_and_round_trips(p: RopeProblem) -> None:
    spec = plan(p).spec
    source = render.render(spec)
    assert f" {spec.entry}(" in source.text
    assert "{{" not in source.text
    assert is_harmless(spec)
    assert re.fullmatch(r"[a-z0-9_]+", source.name)
    assert spec_from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


@pytest.mark.slow
@settings(max_examples=30)
@given(problems())
def test_a_sample_compiles(p: RopeProblem) -> None:
    cubin, _ = compiler.compile_source(render.render(plan(p).spec), "sm_90")
    assert cubin.startswith(b"\x7fELF")


identity = attrgetter("source", "compiler")  # of a key
PARTS = st.tuples(st.text(), st.lists(st.text(), max_size=3).map(tuple), st.text(), st.text())


@settings(max_examples=100)
@given(PARTS, PARTS, st.text(), st.text())
def test_keys_are_equal_only_of_equal_parts(first: Any, second: Any, name: str, other_name: str) -> None:
    assert (identity(Key(name, *first)) == identity(Key(other_name, *second))) == (first == second)
    assert identity(Key(name, *first)) == identity(Key(other_name, *first))


@settings(max_examples=100)
@given(PARTS, st.integers(0, 3), st.data())
def test_text_that_moves_from_part_to_part_is_another_key(parts: Any, at: int, data: st.DataObject) -> None:
    """ "ab" + "c" is not "a" + "bc"."""
    ingredients, options, arch, version = parts
    joined = data.draw(st.text(min_size=1, max_size=8))
    cuts = [(joined[:i], joined[i:]) for i in range(len(joined) + 1)]
    digests = {identity(Key("x", ingredients, options, arch + left, right + version)) for left, right in cuts}
    assert len(digests) == len({(arch + left, right + version) for left, right in cuts})


@settings(max_examples=200)
@given(problems(), problems())
def test_specs_share_a_key_only_if_they_share_a_text(p: RopeProblem, q: RopeProblem) -> None:
    first, second = plan(p).spec, plan(q).spec
    same = render.ingredients(first) == render.ingredients(second)
    assert same == (render.render(first).text == render.render(second).text)


@settings(max_examples=200)
@given(
    st.sampled_from(MAPS), st.lists(st.integers(0, 1 << 20), min_size=1, max_size=2),
    st.lists(st.integers(0, 1 << 40), max_size=8), FLAG,
)  # fmt: skip
def test_planned_rows_are_whole_accesses(map: str, widths: list[int], others: list[int], sums: bool) -> None:
    spec = rows_spec(tuple(widths), gcd(*widths, *others), map, sums=sums)
    assert spec.access_bytes in (1, 2, 4, 8, 16)
    assert gcd(16, *widths, *others) == spec.access_bytes
    assert spec.lanes & (spec.lanes - 1) == 0
    assert 1 <= spec.lanes <= spec.threads <= 1024
    assert spec.threads % spec.lanes == 0
    # Lanes are a power of two, and none only waits.
    assert spec.lanes <= max(1, 2 * max(widths) // spec.access_bytes)
    spec.check()


# ---- the rule of the partition -------------------------------------------------------------------

OFFSETS, RANKS, RULE = st.integers(0, 1 << 40), st.integers(1, 64), st.sampled_from(partition.RULES)


@settings(max_examples=200)
@given(OFFSETS, OFFSETS, RANKS, RULE)
def test_chunks_share_out_every_token(first: int, end: int, cp_size: int, rule: str) -> None:
    first, end = sorted((first, end))
    of = partition.number_of_chunks(cp_size, rule)
    counts = [partition.count(end, chunk, of) for chunk in range(of)]
    assert sum(counts) == end
    assert counts == sorted(counts, reverse=True)
    assert counts[0] - counts[-1] <= 1
    assert [partition.before(end, chunk, of) for chunk in range(of)] == [sum(counts[:chunk]) for chunk in range(of)]
    mine = [partition.local_rows(end, rank, cp_size, rule) for rank in range(cp_size)]
    assert sum(mine) == end
    assert max(mine) <= Shape(end, 1, cp_size, 0, rule).capacity <= min(mine) + 1
    for chunk in range(of):  # a sequence's share of a chunk is never negative
        assert partition.count(first, chunk, of) <= counts[chunk]


@settings(max_examples=200)
@given(st.lists(OFFSETS, min_size=1, max_size=9), RANKS, RULE, st.data())
def test_tensors_and_integers_agree(offsets: list[int], cp_size: int, rule: str, data: st.DataObject) -> None:
    of, tensor = partition.number_of_chunks(cp_size, rule), torch.tensor(offsets)
    chunk, rank = data.draw(st.integers(0, of - 1)), data.draw(st.integers(0, cp_size - 1))
    for function, *words in (
        *((f, chunk, of) for f in (partition.count, partition.before)),
        (partition.local_rows, rank, cp_size, rule),
    ):
        assert function(tensor, *words).tolist() == [function(offset, *words) for offset in offsets]
    # Every chunk has one rank.
    owners = {chunk: rank for rank in range(cp_size) for chunk in partition.chunks_of(rank, cp_size, rule)}
    each = [partition.chunks_of(rank, cp_size, rule) for rank in range(cp_size)]
    assert sorted(chain(*each)) == list(range(of))
    assert all(list(some) == sorted(some) for some in each)
    assert partition.rank_of(torch.arange(of), cp_size, rule).tolist() == [owners[chunk] for chunk in range(of)]
    assert [partition.rank_of(chunk, cp_size, rule) for chunk in range(of)] == [owners[chunk] for chunk in range(of)]


@settings(max_examples=100)
@given(
    st.integers(0, 4096), st.integers(1, 8), st.integers(1, 9), st.integers(-1, 300), st.integers(-1, 300), RULE
)  # fmt: skip
def test_capacity_and_exchange_are_bounds(
    tokens: int, cp_size: int, sequences: int, left: int, right: int, rule: str
) -> None:
    mask, shapes = Mask(left, right), [Shape(tokens, sequences, cp_size, rank, rule) for rank in range(cp_size)]
    for shape in shapes:
        keys, queries = shape.most(mask)
        assert shape.rows <= queries
        assert shape.rows <= keys
        assert mask.full or keys <= 2 * tokens
    rows = shapes[0].exchange(mask)
    for source, needed in enumerate(rows or []):
        own = shapes[source].rows
        assert needed[source] == own
        assert all(0 <= count <= own for count in needed)


def test_specs_of_every_kind_are_fuzzed() -> None:
    assert all(map(is_harmless, SPECS))
    assert {type(spec) for spec in SPECS} == {RopeSpec, RowsSpec, SegmentsSpec, CorrectionSpec}
