"""Cases of `cases.py` through the launch, against plain torch: on a GPU, and on the CPU under sanitizers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import jitrope
from jitrope.base import partition
from jitrope.plan import problem
from jitrope.plan.heuristics import Plan
from jitrope.plan.options import Options
from jitrope.run import dispatch, launch
from jitrope.sources import fused
from jitrope.sources.backward import turned_back
from jitrope.stages.norm import NO_NORM

from .cases import (
    CACHE_CASES,
    CASES,
    FUSED_BACK,
    LATENT_BACK,
    LATENT_CASES,
    NORM_CASES,
    NORM_ROPE,
    QKV_CASES,
    ROPE,
    ROPE_CACHE,
    ROPE_FP8,
    ROPE_FUSED,
    ROPE_INTO,
    ROPE_LATENT,
    CacheCase,
    Case,
    LatentCase,
    NormCase,
    launched,
    lower,
    make,
    make_cache,
    make_latent,
    make_norm,
    make_qkv,
    named,
    norm_call,
    norm_kind,
    norm_reference,
    random_case,
    random_norm_case,
    referenced,
    rope_reference,
)
from .host import backend
from .host.backend import DEVICE
from .oracle import of_elements
from .results import near_each

pytestmark = pytest.mark.gpu

ON_HOST = DEVICE == "cpu"
TILES = ("token_linear", "grid_2d")
LAUNCHES = TILES if ON_HOST else ("auto", *TILES)
SEEDS = 24 if ON_HOST else 60


@pytest.fixture(autouse=True)
def plans(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Plan]]:
    """The plans of a test's calls. Fresh results are full of NaN before a launch; where NaN is right, see `rotated`."""
    made: list[Plan] = []
    plan_call = problem.plan_call

    def noted(*arguments: Any) -> Any:
        planned = plan_call(*arguments)
        made.extend([planned[0]] if planned else [])
        return planned

    monkeypatch.setattr(problem, "plan_call", noted)
    launch.local.recent.clear()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield made
    torch.use_deterministic_algorithms(False)


def alternate(cases: list[Any]) -> list[Any]:
    """(case, launch): every launch on a GPU. On the CPU, where g++ builds each kernel, the two alternate."""
    each = [(case, TILES[n % 2 :][:1] if ON_HOST else LAUNCHES) for n, case in enumerate(cases)]
    return [pytest.param(case, one, id=f"{case}-{one}") for case, some in each for one in some]


def moved(x: Tensor | None) -> Tensor | None:
    """A copy on the device with the same strides and a new storage."""
    if x is None:
        return None
    storage = torch.empty(x.untyped_storage().nbytes() // x.element_size(), dtype=x.dtype)
    storage.untyped_storage().copy_(x.untyped_storage())
    return torch.as_strided(storage.to(DEVICE), x.shape, x.stride(), x.storage_offset())


def rotated(q: Tensor, k: Tensor | None, tables: Any, options: Options) -> list[Tensor | None]:
    """q and k, by a launch that writes them in place, or to tensors full of 777."""
    if options.inplace:
        return launched(ROPE, (q, k), tables, options)
    out = [None if x is None else torch.full_like(x, 777) for x in (q, k)]
    launched(ROPE_INTO, (q, k, None, *out), tables, options)
    return out


def assert_bits(got: Any, want: Any) -> None:
    """The same bits; any NaN is like another."""
    for out, expected in zip(got, want, strict=True):
        assert (out is None) == (expected is None)
        if out is not None:
            assert out.dtype == expected.dtype
            values = [x.cpu().float() for x in (out, expected)]
            assert torch.equal(*[x.isnan() for x in values])
            assert torch.equal(*[x.masked_fill(x.isnan(), 9).view(torch.int32) for x in values])


# ---- the rotation --------------------------------------------------------------------------------


def forms(number: int, case: Case, tile: str) -> list[tuple[bool, bool]]:
    """(inverse, in place) of the calls of a case: all on a GPU; on the CPU one with each launch."""
    every = [(False, False), (True, False), (False, True), (True, True)]
    if ON_HOST:
        every = every[:1] if tile == TILES[0] else [every[number % 4]]
    mixed = case.options.get("interleaved_out", case.interleaved) != case.interleaved
    return [(inverse, in_place and not mixed) for inverse, in_place in every]


@pytest.mark.parametrize("tile", LAUNCHES)
@pytest.mark.parametrize(("number", "case"), list(enumerate([*CASES, *map(random_case, range(SEEDS))])), ids=str)
def test_bits_of_the_reference(number: int, case: Case, tile: str, plans: list[Plan]) -> None:
    """Forward and gradient, fresh and in place, with every launch.

    Sines and cosines of angles are torch's on the same GPU, to the bit.
    """
    tensors, options = lower(make(case), launch=tile)
    for inverse, in_place in forms(number, case, tile):
        o = options._replace(inverse=inverse, inplace=in_place)
        given = [moved(x) for x in tensors]
        want = rope_reference(*(given if o.table == "freqs" else tensors), o._replace(inplace=False))
        got = rotated(*given[:2], given[2:], o)
        end = case.end if in_place else None
        # torch contracts complex products and addcmul on a GPU, but not, or differently, on a CPU.
        exact = case.rounding in ("fp32", "dtype") or (ON_HOST and case.rounding != "complex64")
        exact = exact and not (ON_HOST and o.table == "freqs")
        bounds = {"rtol": 0, "atol": 0} if exact else {"rtol": 2**-7, "atol": 4e-6 if ON_HOST else 1e-5}
        for x, out, expected in zip(tensors, got, want):
            assert (out is None) == (expected is None)
            if out is not None:
                torch.testing.assert_close(out.cpu()[:end], expected.cpu()[:end], **bounds, equal_nan=True)
                assert end is None or torch.equal(out.cpu()[end:], x[end:])
    assert plans
    assert all(tile in ("auto", plan.spec.launch) for plan in plans)


def test_max_seqlen_bounds_the_grid_not_the_result(plans: list[Plan]) -> None:
    case = Case("", "", shape=(1, 40, 2, 1, 64), layout="thd", lengths=(18, 20), options={"max_seqlen": 7})
    tensors, options = lower(make(case, DEVICE), launch="grid_2d")
    assert_bits(rotated(*tensors[:2], tensors[2:], options), rope_reference(*tensors, options))
    assert plans[0].grid[0] < 10


def test_a_running_process_follows_the_environment(monkeypatch: pytest.MonkeyPatch, plans: list[Plan]) -> None:
    """A call that is known keeps its launch until `configure(launch=None)`."""
    q, table = torch.randn(1, 6, 4, 64, device=DEVICE), torch.randn(6, 32, device=DEVICE)
    for told in (*TILES, "auto"):
        monkeypatch.setenv("JITROPE_LAUNCH", told)
        jitrope.configure(launch=None)
        for _ in range(3):
            jitrope.apply_rope(q, None, table, table)
    monkeypatch.setenv("JITROPE_LAUNCH", "token_linear")
    jitrope.apply_rope(q, None, table, table)
    assert [plan.spec.launch for plan in plans] == ["token_linear", "grid_2d", "grid_2d"]


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("offsets", [[0, 5, 3, 12], [0, 4, 40], [3, 12], [-7, 4, 12], [0, 90, -3, 12]], ids=str)
@pytest.mark.parametrize("table", ["half", "angles"])
def test_malformed_lengths_stay_in_bounds(offsets: list[int], tile: str, table: str) -> None:
    """The host does not read cu_seqlens, so the kernel must not trust it: no access outside q or the table."""
    call = make(Case("", "", shape=(1, 12, 2, 0, 64), layout="thd", table=table), DEVICE)
    for changes in ({}, {"cp_size": 2, "cp_rank": 1}, {"packed_table": True}):
        (q, k, cos, sin, *_), options = lower(call, launch=tile, **changes)
        rotated(q, k, (cos, sin, torch.tensor(offsets, dtype=torch.int32, device=DEVICE)), options)
    if not ON_HOST:
        torch.cuda.synchronize()


def test_wild_starts_stay_in_bounds() -> None:
    (q, k, cos, sin, *_), options = lower(make(Case("", "", shape=(3, 4, 2, 0, 64)), DEVICE))
    starts = torch.tensor([-(2**62), 2**63 - 2, -1], device=DEVICE)
    out, _ = rotated(q, k, (cos, sin, None, starts), options)
    assert out[:2].isnan().all()
    assert out[2, 0].isnan().all()
    assert not out[2, 1:].isnan().any()


@pytest.mark.parametrize("cp", [(1, 0), (3, 0), (3, 2)], ids=str)
@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 1000, 1025, 3000])
def test_any_number_of_sequences_is_searched(count: int, cp: tuple[int, int]) -> None:
    """Each step of the search leaves a 32nd; any number of empty sequences is skipped."""
    generator = torch.Generator().manual_seed(count)
    lengths = torch.zeros(count, dtype=torch.long)
    for i in torch.randint(count, (8,), generator=generator):
        lengths[i] += 2 if cp[0] == 1 else 5
    cu_seqlens = torch.cat((torch.zeros(1, dtype=torch.long), lengths.cumsum(0))).int().to(DEVICE)
    call = make(Case("", "", shape=(1, 18, 1, 0, 8), layout="thd", cp=cp, table_rows=40), DEVICE)
    (q, k, cos, sin, *_), options = lower(call, launch="token_linear")
    got = rotated(q, k, (cos, sin, cu_seqlens), options)
    assert_bits(got, rope_reference(q, k, cos, sin, cu_seqlens, None, None, options))


# ---- fused QKV, and v beside q and k ------------------------------------------------------------


@pytest.mark.parametrize("tile", LAUNCHES)
@pytest.mark.parametrize("case", QKV_CASES, ids=str)
def test_fused_qkv_has_the_references_bits(case: Case, tile: str) -> None:
    """With v copied, with a view of v, in place, and the gradient."""
    tensors, options = make_qkv(case, DEVICE, launch=tile)
    qkv, *tables = tensors
    want = [*referenced(ROPE_FUSED, [qkv], tables, options).values()]
    for copied in (True, False):
        got = launched(ROPE_FUSED, [qkv], tables, options._replace(copy_v=copied))
        assert_bits(got[: len(want)], want)
    changed = qkv.clone()
    launched(ROPE_FUSED, [changed], tables, options._replace(inplace=True))
    end = case.end
    parts, before = ([*fused.split_qkv({"qkv": x}, options).values()] for x in (changed, qkv))
    assert_bits([x[:end] for x in parts[:2]], [x[:end] for x in want[:2]])
    assert_bits(parts[2:], before[2:])
    if end is not None:
        assert torch.equal(changed[end:], qkv[end:])
    back = turned_back(options)
    assert_bits(launched(FUSED_BACK, want, tables, back),
                referenced(FUSED_BACK, want, tables, back).values())  # fmt: skip


@pytest.mark.parametrize("cp", [(1, 0), (2, 1)], ids=str)
def test_k_and_v_go_side_by_side(cp: tuple[int, int]) -> None:
    """As context parallelism sends them: q and k rotated, and v copied, to the columns of one tensor in one launch."""
    cu_seqlens = torch.tensor([0, 7, 7, 30], dtype=torch.int32, device=DEVICE)
    rows = int(partition.local_rows(32, cp[1], cp[0], "dual_chunk"))
    q, k, v = (torch.randn(rows, heads, 16).bfloat16().to(DEVICE) for heads in (6, 2, 2))
    angles = torch.outer(torch.arange(30.0), torch.rand(8)).to(DEVICE)
    tables = (angles.cos(), angles.sin(), cu_seqlens)
    options = Options(layout="thd", rotary_dim=16, cp_size=cp[0], cp_rank=cp[1])
    out, sent = torch.full_like(q, 777), torch.full((rows + 1, 64), 777.0, device=DEVICE).bfloat16()
    outputs = (out, *(x.view(rows, 2, 16) for x in sent[:rows].split(32, 1)))
    launched(ROPE_INTO, (q, k, v, *outputs), tables, options)
    wants = [torch.full_like(q, 7), *(torch.full_like(k, 7) for _ in range(2))]
    ROPE_INTO.op.on_cpu(named(ROPE_INTO, (q, k, v, *wants), tables), options)
    assert_bits(outputs, wants)
    assert torch.equal(wants[2], v)
    assert (sent[rows] == 777).all()


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("case", LATENT_CASES, ids=str)
def test_latent_attention_has_the_references_bits(case: LatentCase, tile: str, plans: list[Plan]) -> None:
    """Forward, and the gradient, whose sum over heads has another order than torch's."""
    (*tensors, cos, sin, cu_seqlens, starts, ids), options = make_latent(case, DEVICE, launch=tile)
    tables = (cos, sin, cu_seqlens, starts, ids)
    for kind, o in ((ROPE_LATENT, options), (LATENT_BACK, turned_back(options))):
        want = referenced(kind, tensors, tables, o)
        for name, got in zip(kind.results, launched(kind, tensors, tables, o), strict=True):
            unit = torch.finfo(got.dtype).eps
            exact = name != "k_pe" and (o.table != "freqs" or not ON_HOST) and o.rounding != "complex64"
            bound = 0 if exact else 2 * unit if name == "k_pe" else 2**-7
            torch.testing.assert_close(got, want[name], rtol=bound, atol=bound, equal_nan=True)
        tensors = [*want.values()]
    assert {plan.spec.launch for plan in plans} == {"token_linear" if cu_seqlens is not None else tile}


# ---- KV caches and fp8 ---------------------------------------------------------------------------


@pytest.mark.parametrize("tile", LAUNCHES)
@pytest.mark.parametrize(("number", "case"), list(enumerate(CACHE_CASES)), ids=str)
def test_kv_cache_has_the_references_bytes(number: int, case: CacheCase, tile: str, plans: list[Plan]) -> None:
    """q fresh and in place, and every byte of the caches, also in unused slots. q in fp8 is always fresh."""
    for in_place in (False,) if case.q_fp8 else [(number + (tile == TILES[0])) % 2 == 0] if ON_HOST else (False, True):
        c = make_cache(case, DEVICE if case.table == "freqs" else "cpu", launch=tile, in_place=in_place)
        want = (c.k_cache.clone(), c.v_cache.clone())
        tensors = (c.q, c.k, c.v, *want, c.slots, *c.scales)
        (q_want,), k_want = referenced(ROPE_CACHE, tensors, c.tables, c.options).values(), c.k
        c = make_cache(case, DEVICE, launch=tile, in_place=in_place)
        tensors = (c.q, c.k, c.v, c.k_cache, c.v_cache, c.slots, *c.scales)
        (q,) = launched(ROPE_CACHE, tensors, c.tables, c.options)
        assert (q is c.q) == in_place
        assert_bits((q, c.k, c.k_cache, c.v_cache), (q_want, k_want, *want))
    assert all(plan.spec.page_size == case.page_size and tile in ("auto", plan.spec.launch) for plan in plans)


@pytest.mark.parametrize(
    "wild", [[-1] * 3 + [10**6] * 3, [2**31, 2**32, 2**40, -(2**40), 2**63 - 1, -(2**63)]], ids=["near", "far"]
)
def test_wild_slots_write_nothing(wild: list[int]) -> None:
    c = make_cache(CACHE_CASES[0], DEVICE)
    before = c.k_cache.clone(), c.v_cache.clone()
    tensors = (c.q, c.k, c.v, c.k_cache, c.v_cache, torch.tensor(wild, device=DEVICE), *c.scales)
    launched(ROPE_CACHE, tensors, c.tables, c.options)
    assert_bits((c.k_cache, c.v_cache), before)


@pytest.mark.parametrize("form", ["fp8", "fp8_e5m2"])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("case", [c for c in CASES if c.name in (
    "halves", "ids", "partial-odd", "d72", "packed", "d2",
)], ids=str)  # fmt: skip
def test_fp8_outputs_have_the_references_bits(case: Case, inverse: bool, form: str) -> None:
    (q, k, *tables), options = lower(make(case), inverse=inverse, out_dtype=form)
    scales = (torch.tensor(0.02 / 128 ** (form == "fp8_e5m2")), torch.tensor(0.3))  # the first saturates
    want = referenced(ROPE_FP8, (q, k, *scales), tables, options).values()
    tables = [None if x is None else x.to(DEVICE) for x in tables]
    assert_bits(launched(ROPE_FP8, (moved(q), moved(k), *(x.to(DEVICE) for x in scales)), tables, options), want)


# ---- norms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "tile"), alternate([*NORM_CASES, *map(random_norm_case, range(SEEDS))]))
def test_norm_is_the_cpus(case: NormCase, tile: str) -> None:
    """Fresh, again by the fast path, and in place; to a unit of bf16, because sums have another order.

    In place tokens after the last sequence stay.
    """
    want, end = norm_reference(make_norm(case)), case.rope.end
    results = []
    few = ON_HOST and tile == TILES[0] and case.name not in ("fused-qkv", "across-d64", "d6")
    for in_place in (False, False, True)[: 2 if few or case.first is not None else 3]:
        call = make_norm(case, DEVICE)
        call.arguments["launch"] = tile
        got = norm_call(call, in_place)
        if in_place:
            assert all(a is b for a, b in zip(got, call.streams))
        if in_place and end is not None:
            for x, before in zip(got, make_norm(case, DEVICE).streams):
                assert x is None or torch.equal(x[end:], before[end:])
                if x is not None:
                    x[end:] = 0
        results.append([None if x is None else x.cpu() for x in got])
        near_each(results[-1], want)
    for other in results[1:]:
        assert_bits(results[0], other)


WALKED = ("once", "twice-d64", "d72", "partial-offset", "zero-centered", "only-q-weight", "across-d128", "full",
          "across-per-head", "across-alone", "d6", "mrope", "across-scalar", "layer", "layer-biased",
          "layer-unweighted", "layer-across", "layer-after", "layer-per-head", "layer-scalar", "scaled",
          "scaled-after-dtype", "scaled-across", "scaled-layer", "prefix", "prefix-after", "prefix-across",
          "prefix-layer")  # fmt: skip


@pytest.mark.parametrize(
    "case", [c for c in NORM_CASES if (c.name in WALKED if ON_HOST else c.rope.ids != "past")], ids=str
)
def test_norm_gradient_is_the_cpus(case: NormCase, plans: list[Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of q, k, weights and biases, twice. On the CPU's few SMs blocks walk over tokens; those of 20 SMs sum twice."""
    b, tokens, *rest = case.rope.shape
    if case.name in WALKED:
        tokens, sms = (300, 20) if case.name == "once" else (67, 1)
        case = replace(case, rope=replace(case.rope, shape=(b, tokens, *rest), table_rows=tokens))
        monkeypatch.setattr(backend, "SMS", sms)
    grads = []
    for device in ("cpu", DEVICE, DEVICE):
        call = make_norm(case, device)
        leaves = [x for x in (*call.streams, *call.weights, *call.biases) if x is not None]
        for x in leaves:
            x.requires_grad_()
        with backend.plain() if ON_HOST and not grads else contextlib.nullcontext():
            outputs = [y for y in norm_call(call) if y is not None]
            torch.manual_seed(1)
            weights = [torch.randn(y.shape).to(y.dtype).to(device) for y in outputs]
            grads.append([g.cpu() for g in torch.autograd.grad(outputs, leaves, weights)])
    near_each(grads[1], grads[0])
    assert_bits(grads[1], grads[2])
    if ON_HOST:
        (plan,) = [plan for plan in plans if plan.spec.gradient]
        assert plan.grid[0] * plan.spec.tokens_per_block < b * tokens
        assert plan.grid[0] * plan.grid[1] > 16 * (case.name == "once")


SCALED_CASES = [c for c in NORM_CASES if c.name in (
    "none", "twice-d64", "d80-interleaved", "d192", "d6", "partial", "partial-offset", "fused-qkv", "per-head", "ids",
    "across-d128", "across-scalar", "layer-biased", "after-partial", "after-per-head", "unaligned", "twice-d256",
    "mrope",
)]  # fmt: skip


@pytest.mark.parametrize("normed", [False, True], ids=["alone", "normed"])
@pytest.mark.parametrize(("number", "case"), list(enumerate(SCALED_CASES)), ids=str)
def test_dynamic_scales_are_the_cpus(number: int, case: NormCase, normed: bool, plans: list[Plan]) -> None:
    """Without a norm bit for bit. Heads of a power of two are transformed too, with teams of any size."""
    number = 0 if case.name == "after-per-head" else number
    case = replace(case, across_heads=False, weights="qk" if normed else "")
    call, there = (make_norm(case, device, launch=TILES[number % 2]) for device in ("cpu", DEVICE))
    dim = call.streams[0].shape[-1]
    options = call.options._replace(
        **({} if normed else NO_NORM), rounding="fp32",
        hadamard=dim & (dim - 1) == 0, computed=True,
        out_dtype=("fp8", "int8")[number // 2 % 2], group=(0, 32, 64)[number % 3] if dim % 64 == 0 else 0,
    )  # fmt: skip
    want = NORM_ROPE.op.on_cpu(norm_kind(call)[1], options)
    got = dispatch.call(NORM_ROPE.op, norm_kind(there)[1], options)
    assert plans[0].spec.hadamard == options.hadamard
    for name, expected in want.items():
        x = got[name].cpu()
        assert (expected.dtype, expected.shape) == (x.dtype, x.shape)
        if not normed:
            assert_bits([x], [expected])
        elif name.endswith("scale"):
            torch.testing.assert_close(x, expected, rtol=2**-7, atol=0, equal_nan=True)
        else:
            pairs = ((x, got[name + "_scale"].cpu()), (expected, want[name + "_scale"]))
            a, b = (y.float() * of_elements(s, y) for y, s in pairs)
            unit = float(want[name + "_scale"].nan_to_num().max())
            torch.testing.assert_close(a, b, rtol=2**-3, atol=2 * unit, equal_nan=True)
