"""Checks of the arguments of `jitrope.thd`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..base import arguments
from ..ops.fit import MAX_TOKENS, Fail, failing, is_float
from ..ops.watch import is_compiling, is_zero, wants_grad
from .reference import Shape


def fail_of(name: str, **tensors: Any) -> Fail:
    """Check that these arguments of `name` are tensors, and return its `Fail`."""
    for label, x in tensors.items():
        if arguments.tensor(name, label, x).is_nested or x.layout is not torch.strided:
            arguments.refuse(name, label, x, "a strided tensor")
        if not is_compiling() and is_zero(x):
            arguments.refuse(name, label, x, "a tensor with memory, not torch's lazy zeros")
    return failing(name)


def fail_without_gradient(name: str, **tensors: Any) -> Fail:
    """As `fail_of`, for a function without a gradient."""
    fail = fail_of(name, **tensors)
    for label, x in tensors.items():
        if wants_grad(x):
            fail(f"{label} requires a gradient, which this function does not have; call it under torch.no_grad()")
    return fail


def check_offsets(label: str, cu_seqlens: Tensor, x: Tensor, fail: Fail, rows: str = "x") -> None:
    """Refuse offsets that are not contiguous int32 or int64 on the device of x."""
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        fail(f"{label} is {tuple(cu_seqlens.shape)} {cu_seqlens.dtype}; it must be (sequences + 1) int32 or int64")
    if cu_seqlens.device != x.device:
        fail(f"{label} is on {cu_seqlens.device}, {rows} on {x.device}; they must be on one device")
    if not cu_seqlens.is_contiguous():
        fail(f"{label} must be contiguous")


def shape_of(x: Tensor, cu_seqlens: Tensor, tokens: int, cp_size: int, cp_rank: int, rule: str, fail: Fail) -> Shape:
    """Return the shape of a batch. Refuse wrong offsets, and more rows than int32 can count."""
    check_offsets("cu_seqlens", cu_seqlens, x, fail)
    if tokens + cp_size > MAX_TOKENS:
        fail(f"{tokens} tokens are more than {MAX_TOKENS} rows")
    return Shape(tokens, len(cu_seqlens) - 1, cp_size, cp_rank, rule)


def require_written(label: str, x: Tensor, fail: Fail) -> None:
    """Refuse to write rows that are not contiguous, that overlap, or with torch's lazy bits."""
    if not is_compiling() and (x.is_neg() or x.is_conj()):  # Dynamo cannot trace them
        fail(f"{label} has torch's lazy negative or conjugate bit; pass {label}.resolve_conj().resolve_neg()")
    if len(x) != 0 and (not x[0].is_contiguous() or (len(x) != 1 and abs(x.stride(0)) < x[0].numel())):
        fail(f"{label} has strides {x.stride()}; its rows must be contiguous, and must not overlap")


def rows_of(x: Tensor) -> Tensor:
    """Return x, or a copy, with contiguous rows. There may be gaps between rows."""
    return x if len(x) == 0 or x[0].is_contiguous() else x.contiguous()


def check_lse(packed: bool, cu_seqlens: Tensor, fail: Fail, **given: Tensor) -> int:
    """Refuse wrong log-sum-exps and offsets. Return the number of rows that fit in the first log-sum-exp."""
    lse = next(iter(given.values()))
    check_offsets("cu_seqlens", cu_seqlens, lse, fail, "lse")
    for label, x in given.items():
        if x.dim() != (2 if packed else 3) or x.dtype != torch.float32 or not x.is_contiguous():
            words = "(H, rows)" if packed else "(B, H, rows)"
            fail(f"{label} is {tuple(x.shape)} {x.dtype}, strides {x.stride()}; it must be contiguous {words} fp32")
        if not packed and len(x) != len(cu_seqlens) - 1:
            fail(f"{label} has B={len(x)}, but cu_seqlens has {len(cu_seqlens) - 1} sequences; they must match")
        if x is not lse and (x.shape[:-1] != lse.shape[:-1] or x.device != lse.device):
            fail(f"{label} is {arguments.shown(x)}, lse {arguments.shown(lse)}; only rows may differ")
    return lse.shape[-1] if packed else (len(cu_seqlens) - 1) * lse.shape[-1]


def check_step(label: str, out: Tensor, step: Tensor, cu_seqlens: Tensor, first: str, second: str, fail: Fail) -> None:
    """Refuse a step that does not have the rows of the halves that it changes."""
    if out.dim() != 3 or not is_float(out):
        fail(f"{label} is {tuple(out.shape)} {out.dtype}; it must be (T, H, D) fp32, fp16 or bf16")
    rows = (len(out) + 1) // 2 if second == "nothing" else len(out) // 2 if first == "nothing" else len(out)
    alike = (step.shape[1:], step.dtype, step.device) == (out.shape[1:], out.dtype, out.device)
    if not alike or len(step) < rows:
        fail(
            f"{label}_per_step is {arguments.shown(step)}; it must have at least {rows} rows, and match {label}, "
            f"{arguments.shown(out)}"
        )
    require_written(label, out, fail)
    check_offsets("cu_seqlens", cu_seqlens, out, fail, label)
