"""What context parallelism refuses, each in words; before any collective."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..base import arguments
from ..ops.fit import Fail
from ..plan.partition import RULES

LAYOUTS = {"thd": ("T", "H", "D"), "bshd": ("B", "S", "H", "D"), "sbhd": ("S", "B", "H", "D")}
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MAX_TOKENS = 2**31 - 1  # tables of rows are int32


def checked_batch(
    function: str, cu_seqlens: Any, cu_seqlens_padded: Any, tokens: Any, rule: Any, fail: Fail
) -> tuple[int, str]:
    """(tokens, rule), with the offsets of a batch looked at."""
    padded = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
    for label, x in (("cu_seqlens", cu_seqlens), ("cu_seqlens_padded", padded)):
        arguments.tensor(function, label, x)
        if x.dtype not in (torch.int32, torch.int64) or x.dim() != 1 or len(x) < 2:
            arguments.refuse(function, label, x, "(N + 1) int32 or int64, with one sequence at least")
    if padded.shape != cu_seqlens.shape or padded.device != cu_seqlens.device:
        both = f"cu_seqlens is {arguments.shown(cu_seqlens)}, cu_seqlens_padded {arguments.shown(padded)}"
        fail(f"{both}; they must match in shape and device")
    tokens = arguments.whole(function, "tokens", tokens, 0)
    if tokens > _MAX_TOKENS:
        fail(f"tokens is {tokens!r}; it is the number of rows of the whole batch, at most {_MAX_TOKENS}")
    return tokens, arguments.word(function, "rule", rule, RULES)


def checked_window(function: str, window: Any, fail: Fail) -> tuple[int, ...]:
    """(left, right), each -1 or more."""
    sizes = arguments.wholes(function, "window", window, -1)
    if len(sizes) != 2:
        fail(f"window is {sizes!r}; it is (left, right), each a number of keys or -1 for no bound")
    return sizes


def check_heads(q: Any, k: Any, v: Any, layout: Any, fail: Fail) -> None:
    """Shapes, dtypes and devices of a rank's q, k and v."""
    arguments.word("all_gather_attention", "layout", layout, LAYOUTS)
    axes = LAYOUTS[layout]
    for name, x in (("q", q), ("k", k), ("v", v)):
        arguments.tensor("all_gather_attention", name, x)
        if x.dim() != len(axes):
            fail(f"{name} has shape {tuple(x.shape)}, layout {layout!r} needs {len(axes)} axes ({', '.join(axes)})")
        if x.dtype != q.dtype or x.device != q.device:
            fail(f"{name} is {x.dtype} on {x.device} but q is {q.dtype} on {q.device}")
    if q.dtype not in _DTYPES:
        fail(f"q is {q.dtype}; allowed are fp16, bf16, fp32 and fp64")
    sizes = ", ".join(f"{name} is {_named(x, axes)}" for name, x in (("q", q), ("k", k), ("v", v)))
    if not (q.shape[:-2] == k.shape[:-2] == v.shape[:-2]):
        fail(f"{sizes}; only H and v's D may differ")
    if k.shape[-2] != v.shape[-2] or q.shape[-1] != k.shape[-1]:
        fail(f"{sizes}; k's H must be v's, and k's D must be q's")
    if min(*q.shape[-2:], *v.shape[-2:]) <= 0:
        fail(f"{sizes}; H and D must be at least 1")
    if q.shape[-2] % k.shape[-2] != 0:
        fail(f"q has H={q.shape[-2]}, which k's H={k.shape[-2]} does not divide")


def checked_head_groups(function: str, head_groups: Any, kv_heads: int, fail: Fail) -> int:
    """It divides the KV heads."""
    groups = arguments.whole(function, "head_groups", head_groups, 1)
    if kv_heads % groups != 0:
        fail(f"head_groups is {groups}, which does not divide k's H={kv_heads}")
    return groups


def _named(x: Tensor, axes: tuple[str, ...]) -> str:
    return "(" + ", ".join(f"{axis}={size}" for axis, size in zip(axes, x.shape)) + ")"
