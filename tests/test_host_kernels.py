"""The rendered CUDA runs on the CPU, under ASan and UBSan, and is compared with the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from jitrope.jit.render import Source, environment, render
from jitrope.ops import projections
from jitrope.ops.operation import turned_back
from jitrope.ops.operations import (
    QK_NORM_ROPE_BACKWARD,
    QK_NORM_ROPE_SCALED,
    ROPE_FP8,
    ROPE_INTO,
    ROPE_KV_CACHE,
    ROPE_LATENT,
    ROPE_LATENT_BACKWARD,
    ROPE_QKV,
    ROPE_QKV_BACKWARD,
)
from jitrope.plan import heuristics, partition
from jitrope.plan.options import NO_NORM, Options
from jitrope.plan.problem import plan_call
from jitrope.plan.views import (
    FORMATS,
    cache_view,
    canonical,
    packed_part,
    packed_views,
    separate_views,
    table_pair,
)

from .cases import (
    CACHE_CASES,
    CASES,
    DTYPES,
    LATENT_CASES,
    NORM_CASES,
    QKV_CASES,
    CacheCase,
    Case,
    LatentCase,
    NormCase,
    head_views,
    lower,
    make,
    make_cache,
    make_latent,
    make_norm,
    make_qkv,
    named,
    named_tables,
    norm_operation,
    norm_reference,
    random_case,
    random_norm_case,
    referenced,
    rope_reference,
)
from .host import harness
from .oracle import of_elements

pytestmark = pytest.mark.slow
SM_COUNT = 4  # so few that small cases choose token_linear
LAUNCHES = ("token_linear", "grid_2d")


def alternate(cases):
    """Cases alternate between the two launches, because g++ takes almost a second for a kernel."""
    return [pytest.param(case, LAUNCHES[n % 2], id=f"{case}-{LAUNCHES[n % 2]}") for n, case in enumerate(cases)]


def run_kernel(inputs, outputs, tables, options, slots=None, scales=(None, None, None)) -> heuristics.Plan:
    """Run the kernel of a call on views of heads; without k or v it gets q's address and no such heads."""
    given = {**named_tables(tables), **({} if slots is None else {"slot_mapping": slots})}
    plan, words = plan_call(inputs, outputs, given, options, SM_COUNT)
    tensors = [xs[0] if x is None else x for xs in (inputs, outputs) for x in xs]
    cos, sin = table_pair(*tables[:2], options.table)
    tensors = [*tensors, cos, sin, *tables[2:5], slots, *scales, *tables[5:]]
    harness.run(render(plan.spec), plan.grid, plan.block, tensors, words)
    return plan


def run_rope(lowered, options, outputs=None):
    """(outputs of the kernel, its plan) of a call of the op."""
    q, k, *tables = lowered
    if outputs is None:
        outputs = (q, k) if options.inplace else [None if x is None else torch.full_like(x, 777) for x in (q, k)]
    views = [head_views(*xs, options._replace(inplace=True))[0] for xs in ((q, k), outputs)]
    return outputs, run_kernel(*views, tables, options)


def run_case(case: Case, launch: str = "auto", conjugate: bool | None = None, in_place: bool = False):
    """(outputs of the kernel, outputs of the reference, the plan) of a case."""
    changes = {} if conjugate is None else {"inverse": conjugate}
    (q, k, *tables), options = lower(make(case), launch=launch, inplace=in_place, **changes)
    expected = rope_reference(q, k, *tables, options)
    if in_place and case.lengths is not None:  # spare rows do not change
        end = case.end
        for x, out in zip((q, k), expected):
            if x is not None:
                out[end:] = x[end:]
    outputs, plan = run_rope((q, k, *tables), options)
    return outputs, expected, plan


def assert_same(outputs, expected, case: Case | None = None) -> None:
    # torch's own addcmul fuses too. Its complex64 product does not on a CPU.
    exact = case is None or (case.rounding != "complex64" and not case.table.startswith("angles"))
    for out, want in zip(outputs, expected):
        if want is None:
            assert out is None
        elif exact:
            torch.testing.assert_close(out, want, rtol=0, atol=0, equal_nan=True)
        else:  # one product is not rounded, or the sine is another library's: at most one of the storage type
            torch.testing.assert_close(out, want, rtol=2**-7, atol=4e-6, equal_nan=True)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_token_linear_matches_reference(case: Case) -> None:
    outputs, expected, plan = run_case(case, "token_linear")
    assert plan.spec.launch == "token_linear"
    assert_same(outputs, expected, case)


@pytest.mark.parametrize("case", [c for c in CASES if c.name in (
    "halves", "odd-heads", "one-token", "many-heads", "d80-interleaved", "partial", "packed", "packed-int64",
    "packed-none", "packed-too-long", "per-head", "packed-qkv", "starts-packed", "cp-packed", "packed-table-cp",
    "angles-interleaved", "angles-packed-cp", "mla", "cp-packed-starts", "complex128", "dtype-fp16", "dtype-packed",
    "addcmul-per-head", "ragged-2-1", "ragged-4-0", "ragged-short-2", "ragged-none", "ragged-three", "ragged-table",
    "ragged-angles", "scaled-tokens", "scaled-rows", "scaled-decode", "scaled-packed",
    "prefix", "prefix-one", "prefix-packed", "prefix-packed-partial", "shifts-full", "shifts-cache",
)], ids=str)  # fmt: skip
def test_grid_2d_matches_reference(case: Case) -> None:
    outputs, expected, plan = run_case(case, "grid_2d")
    assert plan.spec.launch == "grid_2d"
    assert_same(outputs, expected, case)


@pytest.mark.parametrize("case", [c for c in CASES if c.name in (
    "halves", "interleaved", "full", "full-interleaved", "full-partial", "packed", "complex64-rounding", "mla-back",
    "angles-full", "angles-full-interleaved", "angles-packed", "cp-packed", "complex128-full", "dtype-bf16-full",
    "addcmul", "ragged-4-1", "ragged-three", "scaled", "scaled-per-head", "prefix-packed",
)], ids=str)  # fmt: skip
def test_backward_matches_reference(case: Case) -> None:
    outputs, expected, _ = run_case(case, conjugate=True)
    assert_same(outputs, expected, case)


@pytest.mark.parametrize(("case", "launch"), alternate(c for c in CASES if c.name in (
    "halves", "partial-odd", "packed", "packed-qkv", "strided-dim", "unaligned", "q-alone", "offset", "angles-packed",
    "cp-packed-starts", "complex128-cis", "dtype", "addcmul", "ragged-4-3", "ragged-short-1", "ragged-angles",
    "scaled-rows", "scaled-dtype", "scaled-packed", "prefix", "prefix-full", "prefix-packed-partial",
    "shifts", "shifts-full-interleaved",
)))  # fmt: skip
def test_in_place_matches_reference(case: Case, launch: str) -> None:
    outputs, expected, _ = run_case(case, launch, in_place=True)
    assert_same(outputs, expected, case)


@pytest.mark.parametrize("seed", range(24))
def test_seeded_sweep(seed: int) -> None:
    case = random_case(seed)
    launch = ("auto", "token_linear", "grid_2d")[seed % 3]
    in_place = seed % 4 == 0 and "interleaved_out" not in case.options
    outputs, expected, _ = run_case(case, launch, conjugate=seed % 2 == 1, in_place=in_place)
    assert_same(outputs, expected, case)


def test_max_seqlen_bounds_the_grid_not_the_result() -> None:
    case = Case("", "", shape=(1, 40, 2, 1, 64), layout="thd", lengths=(18, 20), options={"max_seqlen": 7})
    outputs, expected, plan = run_case(case, "grid_2d")
    assert plan.grid[0] < 10
    assert_same(outputs, expected)


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("offsets", [[0, 5, 3, 12], [0, 4, 40], [3, 12], [-7, 4, 12], [0, 90, -3, 12]], ids=str)
@pytest.mark.parametrize("table", ["half", "angles"])
def test_malformed_lengths_stay_in_bounds(offsets: list[int], launch: str, table: str) -> None:
    """The host does not read cu_seqlens, so the kernel must not trust it: no access outside q or the table."""
    call = make(Case("", "", shape=(1, 12, 2, 0, 64), layout="thd", table=table))
    for changes in ({}, {"cp_size": 2, "cp_rank": 1}, {"packed_table": True}):
        (q, k, cos, sin, *_), options = lower(call, launch=launch, **changes)
        run_rope((q, k, cos, sin, torch.tensor(offsets, dtype=torch.int32), None, None), options)


def test_wild_starts_stay_in_bounds() -> None:
    (q, k, cos, sin, *_), options = lower(make(Case("", "", shape=(3, 4, 2, 0, 64))))
    starts = torch.tensor([-(2**62), 2**40, -1])
    (out, _), _ = run_rope((q, k, cos, sin, None, starts, None), options)
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
    cu_seqlens = torch.cat((torch.zeros(1, dtype=torch.long), lengths.cumsum(0))).int()
    call = make(Case("", "", shape=(1, 18, 1, 0, 8), layout="thd", cp=cp, table_rows=40))
    (q, k, cos, sin, *_), options = lower(call, launch="token_linear")
    (out, _), _ = run_rope((q, k, cos, sin, cu_seqlens, None, None), options)
    assert torch.equal(out, rope_reference(q, k, cos, sin, cu_seqlens, None, None, options)[0])


ILLEGAL = "(ILL|stack-overflow)"
"""ASan's report of UBSan's illegal instruction; it is taken for an overflow if the kernel lies near its stacks."""


def test_sanitizer_sees_a_read_past_the_table() -> None:
    """The harness can fail: it detects a read past a table that lacks a row."""
    (q, k, cos, sin, *rest), options = lower(make(Case("", "", shape=(1, 8, 2, 0, 64))))
    views = head_views(q, k, options._replace(inplace=True))[0]
    outputs = head_views(q.clone(), k, options._replace(inplace=True))[0]
    plan, words = plan_call(views, outputs, named_tables((cos, sin, *rest)), options, SM_COUNT)
    short = [table[:7].clone() for table in (cos, sin)]
    tensors = [q, q, q, outputs[0], outputs[0], outputs[0], *short, *[None] * 7]
    with pytest.raises(AssertionError, match=r"use-after-poison|heap-buffer-overflow"):
        harness.run(render(plan.spec), plan.grid, plan.block, tensors, words)


def test_sanitizer_sees_a_misaligned_access() -> None:
    (q, k, cos, sin, *rest), options = lower(make(Case("", "", shape=(1, 8, 2, 0, 64))))
    views = head_views(q, k, options._replace(inplace=True))[0]
    plan, words = plan_call(views, views, named_tables((cos, sin, *rest)), options, SM_COUNT)
    shifted = torch.zeros(q.numel() + 1, dtype=q.dtype)[1:].view_as(q)
    tensors = [shifted, q, q, q, q, q, cos, sin, *[None] * 7]
    with pytest.raises(AssertionError, match=rf"(?s)AddressSanitizer: {ILLEGAL}.* load<.*vec\.cuh:\d+"):
        harness.run(render(plan.spec), plan.grid, plan.block, tensors, words)


WRONG = {  # what the body of a kernel does wrong, with a count of 1, and ASan's report
    "signed overflow": ("p.out[0] = 0x7fffffff + p.count;", ILLEGAL),
    "shift": ("p.out[0] = 1 << (31 + p.count);", ILLEGAL),
    "division": ("p.out[0] = 1 / (p.count - 1);", ILLEGAL),
    "index of an array": ("int a[4] = {}; p.out[0] = a[3 + p.count];", ILLEGAL),
    "null": ("p.out[0] = *reinterpret_cast<int*>(p.count - 1);", ILLEGAL),
    "no value": ("p.out[0] = sometimes(p.count);", ILLEGAL),
    "past a local": ("int a[4] = {}; int* at = a; p.out[0] = at[3 + p.count];", "stack-buffer-overflow"),
    "past a local, behind a barrier": (
        "int a[4] = {}; int* at = a; __syncthreads(); if (!threadIdx.x) p.out[0] = at[3 + p.count];",
        "stack-buffer-overflow",
    ),
    "out of scope": ("int* at; { int a = 1; at = &a; } p.out[0] = *at;", "stack-use-after-scope"),
    "past shared memory": ("__shared__ int a[4]; int* at = a; p.out[0] = at[3 + p.count];", "global-buffer-overflow"),
    "past a tensor": ("p.out[p.count] = 1;", "use-after-poison"),
    "before a tensor": ("p.out[-p.count] = 1;", "heap-buffer-overflow"),
}


@pytest.mark.parametrize("name", WRONG)
def test_sanitizers_see(name: str) -> None:
    """The harness can fail: each kind of mistake ends the process with a report that has its line."""
    body, report = WRONG[name]
    text = f"""
struct Params {{ int* out; union {{ int count; long long word; }}; }};
__device__ int sometimes(int count) {{ if (count > 1) return 1; }}
extern "C" __global__ void probe(const Params p) {{
#line 1 "probe.cu"
    {body}
}}
"""
    with pytest.raises(AssertionError, match=rf"(?s)AddressSanitizer: {report}.* in .*probe\.cu:1"):
        harness.run(Source(text, "probe", "probe"), (1, 1), 2, [torch.zeros(1, dtype=torch.int32)], [1])


# ---- packed QKV ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "launch"), alternate(QKV_CASES))
def test_packed_qkv_matches_reference(case: Case, launch: str) -> None:
    """Forward with v copied, and in place, with one launch; v not copied, and the gradient, with the other."""
    other = LAUNCHES[launch == LAUNCHES[0]]
    (qkv, *tables), options = make_qkv(case, launch=launch)
    q, k, v, *_ = referenced(ROPE_QKV, (qkv,), tables, options).values()
    end = case.end
    inputs = packed_views(qkv, options)

    outputs = [torch.full_like(x, 777) for x in (q, k, v)]
    run_kernel(inputs, separate_views(*outputs, options), tables, options)
    assert_same(outputs, (q, k, v), case)

    outputs = [torch.full_like(x, 777) for x in (q, k, v)]
    views = (*separate_views(*outputs, options)[:2], None)
    plan = run_kernel((*inputs[:2], None), views, tables, options._replace(launch=other))
    assert plan.spec.launch == other
    assert_same(outputs[:2], (q, k), case)
    assert (outputs[2] == 777).all()

    changed = qkv.clone()
    views = (*packed_views(changed, options)[:2], None)
    run_kernel(views, views, tables, options._replace(inplace=True))
    parts, old = ([*projections.split_qkv(x, options).values()] for x in (changed, qkv))
    assert_same([x[:end] for x in parts[:2]], [q[:end], k[:end]], case)
    assert all(torch.equal(part, as_before) for part, as_before in zip(parts[2:], old[2:]))
    if end is not None:
        assert torch.equal(changed[end:], qkv[end:])

    back = turned_back(options)._replace(launch=other)
    packed = torch.full_like(qkv, 777)
    run_kernel(separate_views(q, k, v, options), packed_views(packed, options), tables, back)
    want = referenced(ROPE_QKV_BACKWARD, (q, k, v), tables, back)["qkv"]
    if options.order == "qkv_gated":
        packed_part(want, "gate", options).fill_(777)  # it is written after the launch
    assert_same([packed], [want], case)


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("case", LATENT_CASES, ids=str)
def test_latent_attention_matches_reference(case: LatentCase, launch: str) -> None:
    """Forward, and the gradient, whose sum over heads has another order than torch's."""
    (*tensors, cos, sin, cu_seqlens, starts, ids), options = make_latent(case, launch=launch)
    tables = (cos, sin, cu_seqlens, starts, ids)
    for op, o in ((ROPE_LATENT, options), (ROPE_LATENT_BACKWARD, turned_back(options))):
        want = referenced(op, tensors, tables, o)
        outputs = {f"{name}_out": torch.full_like(x, 777) for name, x in want.items()}
        views = op.heads({**named(op, tensors, tables), **outputs}, o)
        plan = run_kernel(*views, tables, o)
        assert plan.spec.launch == ("token_linear" if cu_seqlens is not None else launch)  # grid y is over heads
        exact = [name for name in want if name != "k_pe"]
        assert_same([outputs[f"{name}_out"] for name in exact], [want[name] for name in exact], case.rope)
        if op is ROPE_LATENT_BACKWARD:
            unit = torch.finfo(want["k_pe"].dtype).eps
            torch.testing.assert_close(outputs["k_pe_out"], want["k_pe"], rtol=2 * unit, atol=2 * unit)
        tensors = [*want.values()]


@pytest.mark.parametrize("cp", [(1, 0), (2, 1)], ids=str)
def test_k_and_v_go_side_by_side(cp: tuple[int, int]) -> None:
    """As context parallelism sends them: q and k rotated, and v copied, to the columns of one tensor in one launch."""
    cu_seqlens = torch.tensor([0, 7, 7, 30], dtype=torch.int32)
    rows = int(partition.local_rows(32, cp[1], cp[0], "dual_chunk"))
    q, k, v = (torch.randn(rows, heads, 16).bfloat16() for heads in (6, 2, 2))
    angles = torch.outer(torch.arange(30.0), torch.rand(8))
    tables = (angles.cos(), angles.sin(), cu_seqlens, None, None)
    options = Options(layout="thd", rotary_dim=16, cp_size=cp[0], cp_rank=cp[1])
    out, sent = torch.full_like(q, 777), torch.full((rows + 1, 64), 777.0).bfloat16()
    outputs = (out, *(x.view(rows, 2, 16) for x in sent[:rows].split(32, 1)))
    seen = options._replace(inplace=True)
    views = [tuple(head_views(x, None, seen)[0][0] for x in xs) for xs in ((q, k, v), outputs)]
    run_kernel(*views, tables, options)
    wants = [torch.full_like(q, 7), *(torch.full_like(k, 7) for _ in range(2))]
    ROPE_INTO.on_cpu(named(ROPE_INTO, (q, k, v, *wants), tables), options)
    assert_same(outputs, wants)
    assert torch.equal(wants[2], v)
    assert (sent[rows] == 777).all()


# ---- KV caches and fp8 -----------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "fresh"), alternate(CACHE_CASES))
def test_kv_cache_matches_reference(case: CacheCase, fresh: str) -> None:
    """q fresh with one launch and in place with the other, and every byte of the caches, also in unused slots.

    q in fp8 is always fresh, with both."""
    for launch in LAUNCHES:
        in_place = launch != fresh and not case.q_fp8
        call = make_cache(case, launch=launch, in_place=in_place)
        expected = [x.clone() for x in (call.k_cache, call.v_cache)]
        tensors = (call.q, call.k, call.v, *expected, call.slots, *call.scales)
        q_want, k_want = referenced(ROPE_KV_CACHE, tensors, call.tables, call.options).values()
        q_out = call.q if in_place else torch.full_like(q_want.float(), 77).to(q_want.dtype)
        k_before = call.k.clone()
        views = [
            head_views(x, None, call.options._replace(inplace=True))[0][0] for x in (call.q, call.k, call.v, q_out)
        ]
        caches = (cache_view(call.k_cache), cache_view(call.v_cache))
        plan = run_kernel(
            tuple(views[:3]), (views[3], *caches), call.tables, call.options, call.slots, call.scales
        )  # fmt: skip
        assert plan.spec.launch == launch
        assert plan.spec.page_size == case.page_size
        assert_same([q_out.float()], [q_want.float()])
        assert_same([call.k], [k_want if call.options.rotate_k else k_before])
        for got, want in zip((call.k_cache, call.v_cache), expected):
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def test_wild_slots_write_nothing() -> None:
    """Slots that do not exist are not written, however far outside they are."""
    case = CACHE_CASES[0]
    for wild in ([-1] * 3 + [10**6] * 3, [2**31, 2**32, 2**40, -(2**40), 2**63 - 1, -(2**63)]):
        call = make_cache(case)
        before = call.k_cache.clone()
        views = [head_views(x, None, call.options._replace(inplace=True))[0][0] for x in (call.q, call.k, call.v)]
        caches = (cache_view(call.k_cache), cache_view(call.v_cache))
        slots = torch.tensor(wild)
        run_kernel(tuple(views), (views[0], *caches), call.tables, call.options, slots, call.scales)
        assert torch.equal(call.k_cache, before)


@pytest.mark.parametrize("form", ["fp8", "fp8_e5m2"])
@pytest.mark.parametrize("name", ["halves", "d72", "partial-odd", "ids", "d2", "packed"])
def test_fp8_outputs_match_reference(name: str, form: str) -> None:
    (q, k, *tables), options = lower(make(next(c for c in CASES if c.name == name)), out_dtype=form)
    scales = (torch.tensor(0.02 / 128 ** (form == "fp8_e5m2")), torch.tensor(0.3), None)  # the first saturates
    want = referenced(ROPE_FP8, (q, k, *scales[:2]), tables, options).values()
    outputs = [torch.zeros_like(x, dtype=FORMATS[form].dtype) for x in (q, k)]
    views = [head_views(*xs, options._replace(inplace=True))[0] for xs in ((q, k), outputs)]
    run_kernel(*views, tables, options, None, scales)
    for got, expected in zip(outputs, want):
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


# ---- QK-norm + rope --------------------------------------------------------------------------------


def seen(tensors, options):
    """Views of heads of (q, k) or (q, k, v)."""
    views = head_views(*tensors[:2], options._replace(inplace=True))[0][:2]
    return (*views, tensors[2].unsqueeze(3) if len(tensors) > 2 else None)


def run_norm_kernel(inputs, outputs, call, grads=(), sums=None, scales=(), sm_count=1) -> heuristics.Plan:
    """Run the kernel of a call on views of heads; `sums` makes the tensors for the weights' gradients from the plan."""
    second_tables = call.second_tables if call.second_tables[0] is not None else ()
    second = [x.unsqueeze(3) for x in call.streams[3:]]
    _, given = norm_operation(call)
    given |= dict(zip(("q_scale_out", "k_scale_out"), scales))
    if grads:
        given = named(QK_NORM_ROPE_BACKWARD, (*grads, *call.streams, *call.weights, *call.biases), call.tables)
        grads = seen(grads, call.options)[:2]
    plan, words = plan_call(
        inputs, outputs, given, call.options, sm_count if grads else SM_COUNT
    )  # few blocks, which walk
    sources = (*inputs, *second) if second else (None,) * 6
    grads = [grads[0] if x is None else x for x in grads] if grads else [None] * 2
    weights = (*of_one(call, call.weights), None, None)[:4] + (*of_one(call, call.biases), None, None)[:4]
    tensors = [xs[0] if x is None else x for xs in (inputs, outputs) for x in xs]
    pairs = [table_pair(*pair, call.options.table) for pair in (call.tables[:2], second_tables) if pair]
    tables = [*(pairs[1] if second_tables else [None] * 2), *tensors, *pairs[0], *call.tables[2:5], *[None] * 4]
    tensors = [*sources, *weights, *(sums(plan) if sums else [None] * 3), *(*scales, None, None)[:2], *grads, *tables]
    tensors += call.tables[5:]
    harness.run(render(plan.spec), plan.grid, plan.block, tensors, words)
    return plan


def of_one(call, given):
    """The weights, with ones for missing ones if some are given, or biases with zeros: a kernel takes all or none."""
    value = 0 if given is call.biases else 1 - call.norm.zero_centered
    found = [w for w in given if w is not None]
    one = torch.full((1 << 14,), value, dtype=found[0].dtype) if found else None
    return tuple(one if w is None else w for w in given)


def run_norm(case: NormCase, launch: str = "auto", in_place: bool = False):
    """(outputs of the kernel, outputs of the reference, the plan) of a case."""
    call = make_norm(case, launch=launch, inplace=in_place)
    expected, streams = norm_reference(call), call.streams[:3]
    outputs = streams
    if not in_place:
        outputs = [None if x is None else torch.full_like(x, 777) for x in expected]
    plan = run_norm_kernel(seen(streams, call.options), seen(outputs, call.options), call)
    return outputs, expected, plan


def assert_close(outputs, expected) -> None:
    """rsqrt and the order of the sums differ: an element may be the next one in bf16."""
    for out, want in zip(outputs, expected):
        if want is None:
            assert out is None
        else:
            rtol = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}[out.dtype]
            size = want.float().nan_to_num(0).abs().max().clamp(min=1).item()  # where products nearly cancel
            torch.testing.assert_close(out, want, rtol=rtol, atol=rtol / 4 * size, equal_nan=True)


TILED = ("none", "twice", "d80-interleaved", "partial-offset", "ids", "joint-batch", "unaligned", "per-head")


@pytest.mark.parametrize("case", NORM_CASES, ids=str)
def test_norm_matches_reference(case: NormCase) -> None:
    """Alternate launches, which differ in the heads of a block."""
    launch = "grid_2d" if case.name in TILED else "token_linear"
    outputs, expected, plan = run_norm(case, launch)
    assert plan.spec.launch == launch
    assert_close(outputs, expected)


@pytest.mark.parametrize("case", [c for c in NORM_CASES if c.name in (
    "once", "partial", "packed-qkv", "across-d64", "d6",
)], ids=str)  # fmt: skip
def test_norm_in_place_matches_reference(case: NormCase) -> None:
    launch = "grid_2d" if case.name in ("once", "partial") else "token_linear"
    outputs, expected, _ = run_norm(case, launch, in_place=True)
    assert_close(outputs, expected)


@pytest.mark.parametrize("seed", [*range(8), 13])  # 13: an odd number of heads of k, before those of v
def test_norm_seeded_sweep(seed: int) -> None:
    outputs, expected, _ = run_norm(random_norm_case(seed), ("auto", "token_linear", "grid_2d")[seed % 3])
    assert_close(outputs, expected)


SCALED_CASES = [c for c in NORM_CASES if c.name in (
    "none", "twice-d64", "d80-interleaved", "d192", "d6", "partial", "partial-offset", "packed-qkv", "per-head", "ids",
    "across-d128", "across-scalar", "layer-biased", "after-partial", "after-per-head", "unaligned", "twice-d256",
    "mrope",
)]  # fmt: skip


@pytest.mark.parametrize("normed", [False, True], ids=["alone", "normed"])
@pytest.mark.parametrize("case", SCALED_CASES, ids=str)
def test_dynamic_scales_match_reference(case: NormCase, normed: bool) -> None:
    """Without a norm bit for bit. Heads of a power of two are transformed too, with teams of any size."""
    number = 0 if case.name == "after-per-head" else SCALED_CASES.index(case)
    call = make_norm(replace(case, across_heads=False, weights="qk" if normed else ""),
                     launch=("token_linear", "grid_2d")[number % 2])  # fmt: skip
    dim = call.streams[0].shape[-1]
    norm, rotary = call.norm if normed else NO_NORM, call.options.rotary_dim
    call.options = call.options._replace(norm=norm, rounding="fp32", hadamard=(("head" if dim & (dim - 1) == 0 else ""),
                                                   "rotary")[number % 4 == 1 and rotary & (rotary - 1) == 0],
                                         out_dtype=("fp8", "int8")[number // 2 % 2],
                                         group=(0, 32, 64)[number % 3] if dim % 64 == 0 else 0)  # fmt: skip
    _, tensors = norm_operation(call)
    want = QK_NORM_ROPE_SCALED.reference(tensors, call.options)
    got = {name: torch.full_like(x, 77) for name, x in QK_NORM_ROPE_SCALED.fresh(tensors, call.options, 0).items()}
    streams, scales = [got["q"], got.get("k")], [got[name] for name in ("q_scale", "k_scale") if name in got]
    plan = run_norm_kernel(seen(call.streams, call.options), seen(streams, call.options), call, scales=scales)
    assert plan.spec.hadamard == call.options.hadamard
    for name, x in got.items():
        expected = want[name]
        assert (expected.dtype, expected.shape) == (x.dtype, x.shape)
        if not normed:
            torch.testing.assert_close(x.float(), expected.float(), rtol=0, atol=0, equal_nan=True)
        elif name.endswith("scale"):
            torch.testing.assert_close(x, expected, rtol=2**-7, atol=0, equal_nan=True)
        else:
            pairs = ((x, got[name + "_scale"]), (expected, want[name + "_scale"]))
            a, b = (y.float() * of_elements(s, y) for y, s in pairs)
            torch.testing.assert_close(a, b, rtol=2**-3, atol=2 * float(want[name + "_scale"].nan_to_num().max()),
                                       equal_nan=True)  # fmt: skip


GRADIENT_CASES = [c for c in NORM_CASES if c.name in (
    "once", "twice-d64", "d72", "partial-offset", "zero-centered", "only-q-weight", "across-d128", "across-per-head",
    "across-alone", "d6", "full", "mrope", "across-scalar", "layer", "layer-biased", "layer-unweighted",
    "layer-across", "layer-after", "layer-per-head", "layer-scalar", "scaled", "scaled-after-dtype", "scaled-across",
    "scaled-layer", "prefix", "prefix-after", "prefix-across", "prefix-layer",
)]  # fmt: skip


@pytest.mark.parametrize("case", GRADIENT_CASES, ids=str)
def test_norm_gradient_matches_reference(case: NormCase) -> None:
    """More tokens than the blocks take at once, so blocks walk; the weights' gradients come from blocks' sums."""
    b, _, *rest = case.rope.shape
    tokens, sm_count = (300, 20) if case.name == "once" else (67, 1)  # 20: the blocks' sums are added in two steps
    rope = replace(case.rope, shape=(b, tokens, *rest), table_rows=tokens)
    case = replace(case, rope=rope)
    call = make_norm(case)
    norm = call.norm._replace(rounding="none")
    call.options = turned_back(call.options)._replace(rounding="complex64", norm=norm)
    q, k = call.streams
    grads = [None if x is None else torch.randn_like(x) for x in (q, k)]
    results = referenced(QK_NORM_ROPE_BACKWARD, (*grads, q, k, *call.weights, *call.biases), call.tables, call.options)
    expected = [results.get(name) for name in QK_NORM_ROPE_BACKWARD.results]
    outputs = [None if x is None else torch.full_like(x, 777) for x in (q, k)]
    sizes = [0 if x is None else x.shape[-1] * (heads_of(x, case) if case.across_heads else 1) for x in (q, k)]
    width, counters = sum(sizes) * (2 if case.biases else 1), torch.zeros(9, dtype=torch.int32)
    total = torch.full((width,), 777, dtype=DTYPES[case.weight_dtype])

    def room(plan):
        return total, torch.full((plan.grid[0] * plan.grid[1], width), float("nan")), counters

    views = seen(outputs, call.options)
    plan = run_norm_kernel(seen((q, k), call.options), views, call, grads, room if case.weights else None, (), sm_count)
    assert plan.grid[0] * plan.spec.tokens_per_block < b * tokens
    assert sm_count == 1 or plan.grid[0] * plan.grid[1] > 16
    assert_close(outputs, expected[:2])
    for got, want in zip(total.split(sizes * (2 if case.biases else 1)), expected[2:]):
        if want is not None:
            want = want.float()
            torch.testing.assert_close(got.float(), want, rtol=2**-7, atol=2**-7 * want.abs().max().item())
    assert not counters.any()


def heads_of(x, case: NormCase) -> int:
    return canonical(x, case.rope.layout).shape[2]


CONVERT = """
{% include "vec.cuh" %}
struct Params { const float* x; unsigned char* out; long long count; };
extern "C" __global__ void probe(const Params p) {
    for (long long at = threadIdx.x; at < p.count; at += blockDim.x) p.out[at] = float_to_FORM(p.x[at]);
}
"""


@pytest.mark.parametrize("form", ["fp8", "fp8_e5m2"])
def test_fp8_conversion_is_torchs(form: str) -> None:
    """The conversion for GPUs without an instruction: every fp16 and bf16 value, with ties and saturation."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    bits = torch.cat([every.view(dtype).float() for dtype in (torch.float16, torch.bfloat16)])
    x = torch.cat(
        (bits, torch.nextafter(bits, torch.tensor(torch.inf)), torch.nextafter(bits, -torch.tensor(torch.inf)))
    )
    out = torch.zeros(len(x), dtype=torch.uint8)
    text = environment().from_string(CONVERT).render().replace("FORM", form)
    harness.run(Source(text, "probe", "probe"), (1, 1), 64, [x, out], [len(x)])
    dtype, largest, _ = FORMATS[form]
    want = x.clamp(-largest, largest).to(dtype)
    nan = x.isnan()
    assert torch.equal(out[~nan], want.view(torch.uint8)[~nan])
    assert out.view(dtype)[nan].float().isnan().all()


COLLECTIVES = """
struct Params { int* out; };
extern "C" __global__ void probe(const Params p) {
    __shared__ int sums[2];
    const int t = threadIdx.x;
    int value = t;
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    if (t % 32 == 0) sums[t / 32] = value;
    __syncthreads();
    const unsigned int odd = __ballot_sync(~0u, t % 2);
    if (t == 63) return;
    p.out[t] = sums[0] + sums[1] + (odd == 0xaaaaaaaau) + __shfl_sync(~0u, t, 3) * 10000;
}
"""


def test_shim_runs_barriers_and_shuffles() -> None:
    out = torch.zeros(64, dtype=torch.int32)
    harness.run(Source(COLLECTIVES, "probe", "probe"), (1, 1), 64, [out], [])
    expected = [63 * 32 + 1 + 10000 * (3 + t // 32 * 32) for t in range(63)] + [0]
    assert out.tolist() == expected


def test_shim_refuses_barriers_that_never_open() -> None:
    text = COLLECTIVES.replace("if (t == 63) return;", "if (t % 2) __syncthreads(); else __syncwarp();")
    with pytest.raises(AssertionError, match="the threads of a block wait at barriers that never open"):
        harness.run(Source(text, "probe", "probe"), (1, 1), 64, [torch.zeros(64, dtype=torch.int32)], [])
