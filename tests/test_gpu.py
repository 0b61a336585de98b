"""Numerics and behaviour on a CUDA device."""

from __future__ import annotations

import pytest
import torch

import jitrope
from jitrope import reference

from .cases import CASES, Case, make

pytestmark = pytest.mark.gpu

RELATIVE_L2 = {"bf16": 1.7e-3, "fp16": 2.2e-4, "fp32": 1e-7}


def oracle(case: Case, q, k, cos, sin, keywords, conjugate=False):
    """fp64 result of a case, before any rounding."""
    outputs = reference.rope(
        q.double(), None if k is None else k.double(), cos, sin, keywords.get("cu_seqlens"), case.layout,
        case.interleaved, case.rotary_dim or q.shape[-1], conjugate, compute_dtype=torch.float64,
    )  # fmt: skip
    return outputs


def relative_l2(out: torch.Tensor, want: torch.Tensor) -> float:
    keep = ~want.isnan()
    assert torch.equal(out.isnan(), ~keep)
    return float((out.double() - want)[keep].norm() / want[keep].norm().clamp(min=1e-30))


@pytest.mark.parametrize("launch", ["auto", "token_linear", "grid_2d"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_matches_fp64(case: Case, launch: str) -> None:
    q, k, cos, sin, keywords = make(case, "cuda")
    outputs = jitrope.apply_rope(q, k, cos, sin, launch=launch, **keywords)
    expected = oracle(case, q, k, cos, sin, keywords)
    for out, want in zip(outputs, expected):
        if want is None:
            assert out is None
        else:
            # A small tensor's rounding errors scatter about the bound, which is for large ones.
            assert relative_l2(out, want) <= 1.3 * RELATIVE_L2[case.dtype]
    if case.rounding == "fp32":  # and bit for bit what the CPU path gives
        cpu = make(case, "cpu")
        for out, want in zip(outputs, jitrope.apply_rope(*cpu[:4], **cpu[4])):
            if want is not None:
                torch.testing.assert_close(out.cpu(), want, rtol=0, atol=0, equal_nan=True)
