"""What tensors must be, each refusal in words: the argument, what was given and what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor

from ..base.errors import InvalidInput
from ..base.spec import DTYPES, MAX_AXES
from ..plan.problem import DTYPE_NAMES, overlaps_itself, refuse_meeting
from ..plan.spec import LAYOUT_AXES, MAX_HEAD_DIM, Options
from ..plan.views import Tensors, table_pair

MAX_TOKENS = 2**31 - 1
"""CUDA's limit on the first grid axis."""

Fail = Callable[[str], NoReturn]


def failing(name: str) -> Fail:
    """A function that refuses a call of `name` with a text."""

    def fail(text: str) -> NoReturn:
        raise InvalidInput(f"{name}: {text}")

    return fail


def check_heads(q: Tensor, k: Tensor | None, options: Options, fail: Fail, first: str, second: str) -> None:
    rank = 3 if options.layout == "thd" else 4
    letters = options.layout.upper()
    for label, x in ((first, q), (second, k)):
        if x is None:
            continue
        if x.dim() != rank:
            fail(
                f"{label} has shape {tuple(x.shape)}, layout {options.layout!r} needs {rank} axes "
                f"({', '.join(letters)})"
            )
        if not is_float(x):
            fail(f"{label} is {x.dtype}; allowed are fp32, fp16 and bf16")
        same = x.device == q.device and x.dtype == q.dtype
        if not same:
            fail(f"{label} is {x.dtype} on {x.device} but {first} is {q.dtype} on {q.device}")
        if options.inplace:
            require_no_overlap(label, x, fail)
    known = q.device.type in ("cuda", "cpu", "meta")
    if not known:
        fail(f"{first} is on {q.device}; it must be on a CUDA device, the CPU or meta")
    batch, seqlen, _, head_dim = sizes_of(q, options.layout)
    if k is not None:
        k_batch, k_seqlen, _, k_head_dim = sizes_of(k, options.layout)
        if (k_batch, k_seqlen, k_head_dim) != (batch, seqlen, head_dim):
            fail(f"{first} is {named(q, options.layout)} but {second} is {named(k, options.layout)}; only H may differ")
    if batch * seqlen > MAX_TOKENS:
        fail(f"{first} has {batch * seqlen} tokens, at most {MAX_TOKENS} are possible")
    if head_dim > MAX_HEAD_DIM:
        fail(f"{first} has D={head_dim}, at most {MAX_HEAD_DIM} is possible")
    rotary, offset = options.rotary_dim, options.rotary_offset
    if offset < 0:
        fail(f"rotary_offset is {offset}; it cannot be negative")
    if rotary % 2 != 0 or not (0 < rotary <= head_dim - offset):
        fail(
            f"rotary_dim is {rotary}; it must be even and from 2 to D"
            + (f" - rotary_offset={head_dim - offset}" if offset else f"={head_dim}")
        )


def require_no_overlap(label: str, x: Tensor, fail: Fail) -> None:
    """For a tensor that is written. A compiler's symbolic strides are only asked for expanded axes."""
    if torch.compiler.is_compiling():
        overlaps = not all(stride or size < 2 for size, stride in zip(x.shape, x.stride()))
    else:
        overlaps = overlaps_itself(x)
    if overlaps:
        fail(
            f"{label} has strides {tuple(x.stride())}, with which its elements overlap in memory; in place they must "
            f"not: pass {label}.contiguous(), or leave inplace=True out"
        )


def require_apart(name: str, written: dict[str, Tensor], read: dict[str, Tensor]) -> None:
    """Refuse memory that a call would write and also read or write as another tensor, where there is memory."""
    tensors = {**written, **read}
    real = all(type(x) in (Tensor, torch.nn.Parameter) and x.device.type != "meta" for x in tensors.values())
    if real and not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is None:
        refuse_meeting(name, tensors, tuple(written))


def check_lengths(
    q: Tensor, cu_seqlens: Tensor | None, start_positions: Tensor | None, options: Options, fail: Fail
) -> None:
    batch, seqlen, *_ = sizes_of(q, options.layout)
    size, rank = options.cp_size, options.cp_rank
    if size < 1:
        fail(f"cp_size is {size}; it must be at least 1")
    if not (0 <= rank < size):
        fail(f"cp_rank is {rank}; it must be from 0 to cp_size - 1 = {size - 1}")
    for label, x in (("cu_seqlens", cu_seqlens), ("start_positions", start_positions)):
        if x is None:
            continue
        check_integers(label, x, q, fail)
        if x.dim() != 1:
            fail(f"{label} has shape {tuple(x.shape)}; it is one axis")
        if not x.is_contiguous():
            fail(f"{label} has stride {x.stride()}; it must be contiguous")
    if cu_seqlens is None:
        if size != 1 and seqlen % 2 != 0:
            fail(f"q is {named(q, options.layout)}: under context parallelism a rank has two equal chunks")
        rows = batch
    else:
        if options.layout != "thd":
            fail(f"cu_seqlens goes with layout 'thd', not {options.layout!r}")
        if options.max_seqlen < 0:
            fail(f"max_seqlen is {options.max_seqlen}; it cannot be negative")
        if len(cu_seqlens) < 1:
            fail("cu_seqlens is empty; it has N + 1 offsets")
        rows = len(cu_seqlens) - 1
    if start_positions is not None and len(start_positions) != rows:
        fail(
            f"start_positions has {0 if start_positions is None else len(start_positions)} entries for {rows} "
            + ("batch rows" if cu_seqlens is None else "sequences")
        )


def check_integers(label: str, x: Tensor, q: Tensor, fail: Fail) -> None:
    if x.dtype not in (torch.int32, torch.int64):
        fail(f"{label} is {x.dtype}; allowed are int32 and int64")
    if x.device != q.device:
        fail(f"{label} is on {x.device} but q is on {q.device}")


def check_position_ids(q: Tensor, tensors: Tensors, options: Options, fail: Fail) -> None:
    ids, sections = tensors.get("position_ids"), options.mrope_section
    if ids is None:
        return
    check_integers("position_ids", ids, q, fail)
    pairs = options.rotary_dim // 2
    if sections and (len(sections) > MAX_AXES or sum(sections) != pairs):
        fail(f"mrope_section is {tuple(sections)}; it must be at most {MAX_AXES} numbers of pairs, {pairs} in all")
    batch, seqlen, *_ = sizes_of(q, options.layout)
    axes = (len(sections),) if sections else ()
    allowed = (
        [(*axes, seqlen)] if options.layout == "thd" else [(*axes, seqlen), (*axes, 1, seqlen), (*axes, batch, seqlen)]
    )
    if not any(len(ids.shape) == len(shape) and all(a == b for a, b in zip(ids.shape, shape)) for shape in allowed):
        fail(
            f"q is {named(q, options.layout)} but position_ids has shape {tuple(ids.shape)}; allowed are "
            + ", ".join(dict.fromkeys(map(str, allowed)))
        )


def check_tables(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor | None,
    packed: bool,
    ids: bool,
    options: Options,
    fail: Fail,
) -> None:
    head_dim = q.shape[-1]
    rotary, kind = options.rotary_dim, options.table
    angles = kind == "freqs"
    in_fp64 = options.rounding == "complex128"
    both = "cos and sin are" if kind == "cos_sin" else f"{kind} is"
    if kind == "freqs_cis":
        allowed = torch.complex128 if cos.dtype == torch.complex128 and in_fp64 else torch.complex64
        if cos.dtype != allowed:
            fail(f"freqs_cis is {cos.dtype}; it is complex64, or complex128 with rounding='complex128'")
    if kind == "cos_sin_cache":
        if cos.dim() != 2:
            fail(f"cos_sin_cache has shape {tuple(cos.shape)}; it is (P, rotary_dim)")
        if cos.shape[-1] != rotary:
            fail(f"cos_sin_cache is {cos.shape[-1]} wide, rotary_dim is {rotary}: cos | sin")
    cos, sin = table_pair(cos, sin, kind)
    for label, table in (("cos", cos), ("sin", sin)) if kind == "cos_sin" else ((kind, cos),):
        shape = tuple(table.shape)
        axes = "(P, 1 or B, 1, W)" if angles else "(B, P, H, W)"
        if not (2 <= table.dim() <= 4):
            fail(f"{label} has shape {shape}; it must be (P, W), (B, P, W) or {axes}")
        if angles and table.dtype != torch.float32:
            fail(f"freqs is {table.dtype}; angles are fp32, or positions are lost")
        fits = is_float(table) or (in_fp64 and table.dtype == torch.float64)
        if not fits:
            fail(f"{label} is {table.dtype}; allowed are fp32, fp16, bf16, and fp64 with rounding='complex128'")
        if table.requires_grad and torch.is_grad_enabled():
            fail(f"{label} requires a gradient, which jitrope does not compute; pass {label}.detach()")
    if cos.shape != sin.shape or cos.dtype != sin.dtype:
        fail(f"cos is {tuple(cos.shape)} {cos.dtype} but sin is {tuple(sin.shape)} {sin.dtype}; they must match")
    width = cos.shape[-1]
    if width != rotary // 2 and width != rotary:
        fail(
            f"{both} {width} wide; with rotary_dim {rotary} (D={head_dim}) they are {rotary // 2} (half width) or "
            f"{rotary} (full width); pass rotary_dim for a partial rotation"
        )
    if in_fp64 and (angles or packed):
        fail("rounding='complex128' does not go with freqs or cu_seqlens; take cos and sin, and position_ids")
    if not angles and options.mscale != 1:
        fail("mscale goes with freqs; multiply cos and sin by it instead")
    mixed = options.interleaved != options.interleaved_out
    if mixed and width == rotary:
        fail(f"interleaved_out goes with half-width tables, {rotary // 2} wide")
    if mixed and options.inplace:
        fail("interleaved_out does not go with inplace: other elements are written than read; leave inplace=True out")
    _check_rows(q, k, cos, packed, ids, options, fail)


def _check_rows(
    q: Tensor, k: Tensor | None, cos: Tensor, packed: bool, ids: bool, options: Options, fail: Fail
) -> None:
    """The positions, batch rows and heads that the tables are for."""
    batch, seqlen, heads, _ = sizes_of(q, options.layout)
    angles, first = options.table == "freqs", "cos" if options.table == "cos_sin" else options.table
    rows = cos.shape[0] if cos.dim() == 2 else cos.shape[1]
    needed = options.max_seqlen if packed else 0 if ids else seqlen * options.cp_size
    if not options.packed_table and rows < needed:
        fail(f"q is {named(q, options.layout)} but {first} has {rows} rows; {needed} positions are used")
    if rows <= 0 and seqlen != 0:
        fail(f"{first} has no rows")
    if cos.dim() > 2:
        rows = cos.shape[0]
        if rows != 1 and rows != batch:
            fail(f"q is {named(q, options.layout)} but {first} has {rows} batch rows; allowed are 1 and B={batch}")
    if cos.dim() == 4 and cos.shape[2] != 1:
        if angles:
            fail(f"freqs has angles for {cos.shape[2]} heads; they are shared, or use cos and sin")
        same = k is None or sizes_of(k, options.layout)[2] == heads
        if cos.shape[2] != heads or not same:
            fail(
                f"q is {named(q, options.layout)} but cos has angles for {cos.shape[2]} heads; they go with as many "
                "heads in q and in k"
            )


def is_float(x: Tensor) -> bool:
    return DTYPE_NAMES.get(x.dtype) in DTYPES


def sizes_of(x: Tensor, layout: str) -> list[int]:
    """The sizes (B, S, H, D) of a tensor in `layout`."""
    return [1 if axis is None else x.shape[axis] for axis in LAYOUT_AXES[layout]]


def named(x: Tensor, layout: str) -> str:
    """A shape by its letters: `(B=2, S=128, H=32, D=64)`."""
    return "(" + ", ".join(f"{letter.upper()}={size}" for letter, size in zip(layout, x.shape)) + ")"
