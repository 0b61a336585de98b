"""What context parallelism refuses, each in words; before any collective."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..checks import Require
from ..partition import RULES

LAYOUTS = {"thd": ("T", "H", "D"), "bshd": ("B", "S", "H", "D"), "sbhd": ("S", "B", "H", "D")}
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MAX_TOKENS = 2**31 - 1  # tables of rows are int32


def check_size(name: str, size: Any, require: Require, least: int = 0) -> None:
    """An integer, or None."""
    fits = size is None or (isinstance(size, int) and not isinstance(size, bool) and size >= least)
    require(fits, lambda: f"{name} is {size!r}; it is an integer of at least {least}")


def check_cu_seqlens(cu_seqlens: Any, cu_seqlens_padded: Any, tokens: Any, rule: Any, require: Require) -> None:
    """Offsets of a batch, its size and how it is cut."""
    _check_offsets("cu_seqlens", cu_seqlens, require)
    if cu_seqlens_padded is not None:
        _check_offsets("cu_seqlens_padded", cu_seqlens_padded, require)
        require(
            cu_seqlens_padded.shape == cu_seqlens.shape and cu_seqlens_padded.device == cu_seqlens.device,
            lambda: (
                f"cu_seqlens is {tuple(cu_seqlens.shape)} on {cu_seqlens.device} but cu_seqlens_padded is "
                f"{tuple(cu_seqlens_padded.shape)} on {cu_seqlens_padded.device}; they must match"
            ),
        )
    check_size("tokens", tokens, require)
    require(
        tokens is not None and tokens <= _MAX_TOKENS,
        lambda: f"tokens is {tokens!r}; it is the number of rows of the whole batch, at most {_MAX_TOKENS}",
    )
    require(rule in RULES, lambda: f"rule is {rule!r}; allowed are {', '.join(RULES)}")


def check_window(window: Any, require: Require) -> None:
    """(left, right), each -1 or more."""
    fits = isinstance(window, (tuple, list)) and len(window) == 2
    fits = fits and all(isinstance(x, int) and not isinstance(x, bool) and x >= -1 for x in window)
    require(fits, lambda: f"window is {window!r}; it is (left, right), each a number of keys or -1 for no bound")


def check_heads(q: Any, k: Any, v: Any, layout: Any, require: Require) -> None:
    """Shapes, dtypes and devices of a rank's q, k and v."""
    require(layout in LAYOUTS, lambda: f"layout is {layout!r}; allowed are {', '.join(LAYOUTS)}")
    axes = LAYOUTS[layout]
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_tensor(name, x, q, layout, require)
    require(q.dtype in _DTYPES, lambda: f"q is {q.dtype}; allowed are fp16, bf16, fp32 and fp64")
    require(
        q.shape[:-2] == k.shape[:-2] == v.shape[:-2],
        lambda: f"q is {_named(q, axes)}, k {_named(k, axes)}, v {_named(v, axes)}; only H and v's D may differ",
    )
    require(
        k.shape[-2] == v.shape[-2] and q.shape[-1] == k.shape[-1],
        lambda: f"q is {_named(q, axes)}, k {_named(k, axes)}, v {_named(v, axes)}; k's H is v's, and k's D is q's",
    )
    require(min(*q.shape[-2:], *v.shape[-2:]) > 0, lambda: f"q is {_named(q, axes)}, v {_named(v, axes)}; H or D is 0")
    require(
        q.shape[-2] % k.shape[-2] == 0,
        lambda: f"q has H={q.shape[-2]}, which k's H={k.shape[-2]} does not divide",
    )


def _check_offsets(name: str, x: Any, require: Require) -> None:
    require(isinstance(x, Tensor), lambda: f"{name} is {type(x).__name__}; it is a tensor")
    require(
        x.dtype in (torch.int32, torch.int64) and x.dim() == 1 and len(x) >= 2,
        lambda: f"{name} is {tuple(x.shape)} {x.dtype}; it is (N + 1) int32 or int64, with one sequence at least",
    )


def _check_tensor(name: str, x: Any, q: Any, layout: str, require: Require) -> None:
    axes = LAYOUTS[layout]
    require(isinstance(x, Tensor), lambda: f"{name} is {type(x).__name__}; it is a tensor")
    require(
        x.dim() == len(axes),
        lambda: f"{name} has shape {tuple(x.shape)}, layout {layout!r} needs {len(axes)} axes ({', '.join(axes)})",
    )
    require(
        x.dtype == q.dtype and x.device == q.device,
        lambda: f"{name} is {x.dtype} on {x.device} but q is {q.dtype} on {q.device}",
    )


def check_head_groups(head_groups: Any, kv_heads: int, require: Require) -> None:
    """It divides the KV heads."""
    check_size("head_groups", head_groups, require, 1)
    require(
        head_groups is not None and kv_heads % head_groups == 0,
        lambda: f"head_groups is {head_groups}, which does not divide k's H={kv_heads}",
    )


def _named(x: Tensor, axes: tuple[str, ...]) -> str:
    return "(" + ", ".join(f"{axis}={size}" for axis, size in zip(axes, x.shape)) + ")"
