"""The rendered CUDA runs on the CPU, under ASan and UBSan, and is held against the reference."""

from __future__ import annotations

import pytest
import torch

from jitrope import reference, runtime
from jitrope.render import Source, render

from .cases import CASES, Case, make, random_case
from .host import harness

SM_COUNT = 4  # few enough that small cases take token_linear by themselves


def arguments(q, k, q_out, k_out, cos, sin, cu_seqlens):
    """The tensors in the kernel's order; without k it gets q's address and no heads, as in runtime."""
    return [q, q if k is None else k, q_out, q_out if k_out is None else k_out, cos, sin, cu_seqlens]


def run_case(case: Case, launch: str = "auto", conjugate: bool = False, in_place: bool = False):
    """(outputs of the kernel, outputs of the reference) of a case, each (q, k)."""
    q, k, cos, sin, keywords = make(case)
    options = runtime.Options(
        case.layout, case.interleaved, case.rotary_dim or q.shape[-1], keywords.get("max_seqlen", 0), case.rounding,
        launch, conjugate, in_place,
    )  # fmt: skip
    cu_seqlens = keywords.get("cu_seqlens")
    expected = reference.rope(q, k, cos, sin, cu_seqlens, case.layout, case.interleaved, options.rotary_dim, conjugate)
    if in_place and cu_seqlens is not None:  # spare rows stay as they are
        end = int(cu_seqlens[-1])
        for x, out in zip((q, k), expected):
            if x is not None:
                out[end:] = x[end:]
    outputs = [x if in_place or x is None else torch.full_like(x, 777) for x in (q, k)]
    plan, words = runtime.plan_call(q, k, cos, sin, cu_seqlens, options, SM_COUNT)
    source = render(plan.spec)
    harness.run(source, plan.grid, plan.block, arguments(q, k, *outputs, cos, sin, cu_seqlens), words)
    return outputs, expected, plan


def assert_same(outputs, expected, rounding: str = "fp32") -> None:
    for out, want in zip(outputs, expected):
        if want is None:
            assert out is None
        elif rounding == "fp32":
            torch.testing.assert_close(out, want, rtol=0, atol=0, equal_nan=True)
        else:  # one product is not rounded: half a unit of fp32, at most one of the storage type
            torch.testing.assert_close(out, want, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_token_linear_matches_reference(case: Case) -> None:
    outputs, expected, plan = run_case(case, "token_linear")
    assert plan.spec.launch == "token_linear"
    assert_same(outputs, expected, case.rounding)


@pytest.mark.parametrize("case", [c for c in CASES if c.name in (
    "halves", "odd-heads", "one-token", "many-heads", "d80-interleaved", "partial", "packed", "packed-int64",
    "packed-none", "packed-too-long", "per-head", "packed-qkv",
)], ids=str)  # fmt: skip
def test_grid_2d_matches_reference(case: Case) -> None:
    outputs, expected, plan = run_case(case, "grid_2d")
    assert plan.spec.launch == "grid_2d"
    assert_same(outputs, expected)


@pytest.mark.parametrize("case", [c for c in CASES if c.name in (
    "halves", "interleaved", "full", "full-interleaved", "full-partial", "packed", "complex64-rounding",
)], ids=str)  # fmt: skip
def test_backward_matches_reference(case: Case) -> None:
    outputs, expected, _ = run_case(case, conjugate=True)
    assert_same(outputs, expected, case.rounding)


@pytest.mark.parametrize("case", [c for c in CASES if c.name in (
    "halves", "partial-odd", "packed", "packed-qkv", "strided-dim", "unaligned", "q-alone",
)], ids=str)  # fmt: skip
@pytest.mark.parametrize("launch", ["token_linear", "grid_2d"])
def test_in_place_matches_reference(case: Case, launch: str) -> None:
    outputs, expected, _ = run_case(case, launch, in_place=True)
    assert_same(outputs, expected)


@pytest.mark.parametrize("seed", range(12))
def test_seeded_sweep(seed: int) -> None:
    case = random_case(seed)
    launch = ("auto", "token_linear", "grid_2d")[seed % 3]
    outputs, expected, _ = run_case(case, launch, conjugate=seed % 2 == 1, in_place=seed % 4 == 0)
    assert_same(outputs, expected)


def test_max_seqlen_bounds_the_grid_not_the_result() -> None:
    case = Case("", "", shape=(1, 40, 2, 1, 64), layout="thd", lengths=(18, 20), options={"max_seqlen": 7})
    outputs, expected, plan = run_case(case, "grid_2d")
    assert plan.grid[0] < 10
    assert_same(outputs, expected)


@pytest.mark.parametrize("launch", ["token_linear", "grid_2d"])
@pytest.mark.parametrize("offsets", [[0, 5, 3, 12], [0, 4, 40], [3, 12], [-7, 4, 12], [0, 90, -3, 12]], ids=str)
def test_malformed_lengths_stay_in_bounds(offsets: list[int], launch: str) -> None:
    """The host does not read cu_seqlens, so the kernel may not trust it: no access outside q or the table."""
    q, _, cos, sin, _ = make(Case("", "", shape=(1, 12, 2, 0, 64), layout="thd"))
    options = runtime.Options("thd", False, 64, 0, "fp32", launch, False, False)
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32)
    plan, words = runtime.plan_call(q, None, cos, sin, cu_seqlens, options, SM_COUNT)
    harness.run(
        render(plan.spec), plan.grid, plan.block, arguments(q, None, q.clone(), None, cos, sin, cu_seqlens), words
    )


def test_sanitizer_sees_a_read_past_the_table() -> None:
    """The harness can fail: a table with a row too few is caught, not read over."""
    q, _, cos, sin, _ = make(Case("", "", shape=(1, 8, 2, 0, 64)))
    options = runtime.Options("bshd", False, 64, 0, "fp32", "auto", False, False)
    plan, words = runtime.plan_call(q, None, cos, sin, None, options, SM_COUNT)
    short = [table[:7].clone() for table in (cos, sin)]
    with pytest.raises(AssertionError, match=r"use-after-poison|heap-buffer-overflow"):
        harness.run(render(plan.spec), plan.grid, plan.block, arguments(q, None, q.clone(), None, *short, None), words)


def test_sanitizer_sees_a_misaligned_access() -> None:
    q, _, cos, sin, _ = make(Case("", "", shape=(1, 8, 2, 0, 64)))
    options = runtime.Options("bshd", False, 64, 0, "fp32", "auto", False, False)
    plan, words = runtime.plan_call(q, None, cos, sin, None, options, SM_COUNT)
    shifted = torch.zeros(q.numel() + 1, dtype=q.dtype)[1:].view_as(q)
    tensors = arguments(shifted, None, q.clone(), None, cos, sin, None)
    with pytest.raises(AssertionError, match="misaligned"):
        harness.run(render(plan.spec), plan.grid, plan.block, tensors, words)


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
