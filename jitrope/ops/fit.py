"""The checks of heads, lengths, positions and tables. A refusal names the argument, its value and allowed values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from ..base.errors import InvalidInput
from ..base.spec import DTYPES, MAX_AXES
from ..plan.memory import overlaps_itself, refuse_meeting, span
from ..plan.options import ALL_TOKENS, LAYOUT_AXES, MAX_HEAD_DIM, Options, rotated
from ..plan.views import DTYPE_NAMES, MEANS, PER_ITEM, Tensors, per_head, table_pair
from . import watch

MAX_TOKENS = 2**31 - 1  # CUDA's limit on the first grid axis

Fail = Callable[[str], NoReturn]
USERS_NAMES = {"q_factor": "q_scale", **{name: f"mean_squares' {name[0]}" for name in MEANS}}
"""The users' names of tensors that have another name in a call."""

SWAPPED = {"bshd": "bhsd", "bhsd": "bshd"}  # layouts that are easily mistaken for each other


def failing(name: str) -> Fail:
    """Return a function that raises InvalidInput(text) for a call of `name`."""

    def fail(text: str) -> NoReturn:
        raise InvalidInput(f"{name}: {text}")

    return fail


def label_of(name: str, options: Options) -> str:
    """The user's name of a table, of positions or of a number for each token."""
    own = {"cos": "cos" if options.table == "cos_sin" else options.table, **USERS_NAMES}
    return own.get(name, "positions" if name == "position_ids" and not options.mrope_section else name)


# ---- what a tensor of any kind must be ----------------------------------------------------------------


def check_integers(label: str, x: Tensor, q: Tensor, fail: Fail) -> None:
    if x.dtype not in (torch.int32, torch.int64):
        fail(f"{label} is {x.dtype}; allowed are int32 and int64")
    if x.device != q.device:
        fail(f"{label} is on {x.device} but q is on {q.device}")


def check_floats(label: str, x: Tensor, fail: Fail) -> None:
    if not is_float(x):
        fail(f"{label} is {x.dtype}; allowed are fp32, fp16 and bf16")


def check_contiguous(label: str, x: Tensor, fail: Fail) -> None:
    if not x.is_contiguous():
        fail(f"{label} has stride{'s' * (x.dim() > 1)} {x.stride()}; it must be contiguous")


def check_one_axis(label: str, x: Tensor, fail: Fail) -> None:
    if x.dim() != 1:
        fail(f"{label} has shape {tuple(x.shape)}; it must have one axis")


def check_shape(
    label: str, x: Tensor, allowed: Sequence[tuple[int, ...]], fail: Fail, q: Tensor | None = None, layout: str = ""
) -> None:
    """Refuse another shape than the allowed ones. q: heads that it must fit, for the message."""
    if not is_one_of(x, allowed):
        had = "" if q is None else f"q is {named(q, layout)} but "
        fail(f"{had}{label} has shape {tuple(x.shape)}; allowed are {', '.join(dict.fromkeys(map(str, allowed)))}")


def is_one_of(x: Tensor, shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether x has one of the shapes; a compiler's sizes are compared one by one."""
    return any(x.dim() == len(shape) and all(a == b for a, b in zip(x.shape, shape)) for shape in shapes)


def check_heads(q: Tensor, k: Tensor | None, options: Options, fail: Fail, first: str, second: str) -> None:
    """Check q and k. first, second: their names for messages."""
    layout = options.layout
    for label, x in ((first, q), *([(second, k)] if k is not None else [])):
        if x.dim() != len(layout):
            axes = ", ".join(layout.upper())
            hint = "; Packed implies it" if layout == "thd" else ""
            if x.dim() == 3 and layout != "thd":
                hint = '; for (T, H, D) pass layout="thd"' if x is q else ""
                if layout == "bshd":
                    hint += f"; for (B, S, H D) pass {label}.unflatten(-1, (H, D))"
                    hint += "" if x is q else f", for (B, S, D) {label}.unsqueeze(2)"
            fail(f"{label} has shape {tuple(x.shape)}, layout {layout!r} needs {len(layout)} axes ({axes}){hint}")
        check_floats(label, x, fail)
        if x.device != q.device or x.dtype != q.dtype:
            fail(f"{label} is {x.dtype} on {x.device} but {first} is {q.dtype} on {q.device}; pass {label}.to({first})")
    if q.device.type not in ("cuda", "cpu", "meta"):
        fail(f"{first} is on {q.device}; it must be on a CUDA device, the CPU or meta")
    batch, seqlen, heads, head_dim = sizes_of(q, layout)
    if k is not None:
        k_batch, k_seqlen, k_heads, k_head_dim = sizes_of(k, layout)
        if (k_batch, k_seqlen, k_head_dim) != (batch, seqlen, head_dim):
            other = SWAPPED.get(layout)
            alike = other and (batch, heads, head_dim) == (k_batch, k_heads, k_head_dim)
            hint = f"; if their layout is {other!r}, pass layout={other!r}" if alike else ""
            fail(f"{first} is {named(q, layout)} but {second} is {named(k, layout)}; only H may differ{hint}")
    if batch * seqlen > MAX_TOKENS:
        fail(f"{first} has {batch * seqlen} tokens; at most {MAX_TOKENS} are possible")
    if head_dim > MAX_HEAD_DIM:
        fail(f"{first} has D={head_dim}; at most {MAX_HEAD_DIM} is possible; pass a view of the rotated elements")
    begin, end = rotated(options)
    if begin < 0:
        fail(f"rotary_offset is {begin}; it cannot be negative")
    if options.rotary_dim % 2 != 0 or not (begin < end <= head_dim):
        most = f"D - rotary_offset={head_dim - begin}" if begin else f"D={head_dim}"
        default = ", by default D," if end == head_dim and not begin else ""
        fail(f"rotary_dim{default} is {options.rotary_dim}; it must be even and from 2 to {most}")


def require_no_overlap(label: str, x: Tensor, instead: str, fail: Fail) -> None:
    """Refuse to write a tensor whose elements share memory."""
    if overlaps_itself(x):
        had = f"{label} has strides {tuple(x.stride())}; its elements overlap in memory, so it cannot be written"
        fail(f"{had}; {instead}")


def require_apart(name: str, written: dict[str, Tensor], read: dict[str, Tensor]) -> None:
    """Refuse memory that a call would write as one tensor and read or write as another; skip tensors without memory."""
    tensors = {**written, **read}
    real = all(type(x) in (Tensor, torch.nn.Parameter) and x.device.type != "meta" for x in tensors.values())
    if real and not watch.transformed():
        refuse_meeting(name, {label: span(x) for label, x in tensors.items()}, tuple(written))


def check_scale(
    label: str, tensors: Tensors, own: str, wanted: bool, options: Options, needed: bool, fail: Fail
) -> None:
    """Refuse a wrong given scale of `own`, q, k or v. wanted: it may have one; needed: it then must."""
    scale, q = tensors.get(f"{own}_scale"), tensors["q"]
    if scale is None and wanted and needed:
        fail(f"{label} is missing; pass it, because fp8 is stored divided by it")
    if scale is None:
        return
    if not wanted:
        fail(f"{label} is given, but no output is divided by it; leave it out")
    batch, _, heads, _ = sizes_of(tensors[own], options.layout)
    rows = {"B": batch, **({"N": tensors["cu_seqlens"].shape[0] - 1} if "cu_seqlens" in tensors else {})}
    fits = scale.numel() == 1 or is_one_of(scale, [(heads,), *[(number, heads) for number in rows.values()]])
    if scale.dtype != torch.float32 or not fits or scale.device != q.device:
        had = f"{label} is {tuple(scale.shape)} {scale.dtype} on {scale.device}"
        of_rows = " or ".join([f"({letter}={number}, H)" for letter, number in rows.items()])
        fail(f"{had}; it must be fp32 on q's device: one number, or one for each head, (H={heads}) or {of_rows}")


def check_pairs(tensors: Tensors, options: Options, fail: Fail) -> None:
    """Refuse tensors whose elements cannot be taken in aligned pairs: fp4 stores two in a byte."""
    k_shape, v_shape = (tensors[x].shape if x in tensors else None for x in "kv")
    apart = v_shape is not None and v_shape != k_shape  # v is copied after the launch
    for name in ("bias", *"qkv", "q_out", "k_out", *["v_out"] * (not apart)):
        x, label = tensors.get(name), f"out's {name[0]}" if name.endswith("_out") else name
        if x is None or PER_ITEM.get(x.dtype, 1) > 1:
            continue
        steps = [stride for size, stride in zip(x.shape[:-1], x.stride()) if size > 1]
        if x.stride(-1) != 1 or any(n % 2 for n in (x.shape[-1], x.storage_offset(), *steps)):
            had = f"{label} has D={x.shape[-1]}, strides {tuple(x.stride())} and offset {x.storage_offset()}"
            fail(f"{had}; fp4 needs aligned pairs of neighbouring elements")
    first, of = rotated(options)[0], 2 if options.interleaved else 4
    if first % 2 or options.rotary_dim % of:
        had = f"rotary_offset is {first}, rotary_dim {options.rotary_dim}"
        fail(f"{had}; for fp4 the first must be even, and the second a multiple of {of}")


def check_lengths(tensors: Tensors, options: Options, fail: Fail) -> None:
    q, size = tensors["q"], options.cp_size
    batch, seqlen, *_ = sizes_of(q, options.layout)
    unrotated, alone = options.unrotated, options.unrotated == ALL_TOKENS  # alone: there is no table
    if unrotated < 0:
        fail(f"unrotated is {unrotated}; it cannot be negative")
    others = {
        label_of("position_ids", options): "position_ids" in tensors,
        "packed_table": options.packed_table and not alone,
        "interleaved_out": options.interleaved != options.interleaved_out,
    }
    for label, given in others.items():  # they are not counted
        if unrotated > 0 and given:  # torch 2.6 makes a symbol a number where its truth is asked
            instead = "pass a table" if alone else "give these tokens a row of the table with cosines of 1"
            fail(f"{label} does not go {'without a table' if alone else 'with unrotated'}; {instead}")
    if size < 1:
        fail(f"cp_size is {size}; it must be at least 1")
    if not (0 <= options.cp_rank < size):
        fail(f"cp_rank is {options.cp_rank}; it must be from 0 to cp_size - 1 = {size - 1}")
    for label in [label for label in ("cu_seqlens", "start_positions") if label in tensors]:
        check_integers(label, tensors[label], q, fail)
        check_one_axis(label, tensors[label], fail)
        check_contiguous(label, tensors[label], fail)
    rows, of = batch, "batch rows"
    if "cu_seqlens" in tensors:
        rows, of = tensors["cu_seqlens"].shape[0] - 1, "sequences"
        if options.layout != "thd":
            fail(f"cu_seqlens goes with layout 'thd', not {options.layout!r}; leave layout out")
        if options.max_seqlen < 0:
            fail(f"max_seqlen is {options.max_seqlen}; it cannot be negative")
        if rows < 0:
            fail("cu_seqlens is empty; it must have N + 1 offsets")
    elif size != 1 and seqlen % 2 != 0:
        fail(f"q is {named(q, options.layout)}; with cp_size={size} S must be even, for two equal chunks")
    starts = tensors.get("start_positions")
    if starts is not None and starts.shape[0] != rows:  # len would make a symbol a number
        fail(f"start_positions has {starts.shape[0]} entries for {rows} {of}")


def check_position_ids(tensors: Tensors, options: Options, fail: Fail) -> None:
    q, sections, pairs = tensors["q"], options.mrope_section, options.rotary_dim // 2
    if "position_ids" not in tensors:
        return
    label = label_of("position_ids", options)
    check_integers(label, tensors["position_ids"], q, fail)
    if sections and (len(sections) > MAX_AXES or sum(sections) != pairs):
        fail(f"mrope_section is {tuple(sections)}; it must be at most {MAX_AXES} numbers of pairs, {pairs} in all")
    batch, seqlen, *_ = sizes_of(q, options.layout)
    axes, rows = (len(sections),) if sections else (), [] if options.layout == "thd" else [(1,), (batch,)]
    check_shape(label, tensors["position_ids"], [(*axes, *row, seqlen) for row in [(), *rows]], fail, q, options.layout)


def check_factor(tensors: Tensors, q: Tensor, seqlen: int, layout: str, fail: Fail) -> None:
    """Check the scale of q, for that many tokens in each batch row."""
    if "q_factor" in tensors:
        rows = [] if layout == "thd" else [(1, seqlen), (sizes_of(q, layout)[0], seqlen)]
        _check_of_tokens("q_factor", tensors["q_factor"], q, [(), (seqlen,), *rows], fail)


def check_means(tensors: Tensors, layout: str, fail: Fail) -> None:
    """Check the given means of squares of a norm across heads."""
    for name in MEANS if any(name in tensors for name in MEANS) else ():
        letter = name[0]
        for given, missing in ((letter, name), (name, letter)):
            if given in tensors and missing not in tensors:
                fail(f"{USERS_NAMES.get(given, given)} is given, but {USERS_NAMES.get(missing, missing)} is not")
        if name in tensors:
            batch, seqlen, *_ = sizes_of(tensors[letter], layout)
            shape = (seqlen,) if layout == "thd" else (batch, seqlen)
            _check_of_tokens(name, tensors[name], tensors[letter], [shape], fail)


def _check_of_tokens(name: str, x: Tensor, q: Tensor, allowed: list[tuple[int, ...]], fail: Fail) -> None:
    """Refuse a tensor of a number for each token that has another dtype, device or shape."""
    if x.dtype != torch.float32 or x.device != q.device:
        fail(f"{USERS_NAMES[name]} is {x.dtype} on {x.device}; it must be fp32 on {q.device}")
    check_shape(USERS_NAMES[name], x, allowed, fail)


def check_tables(tensors: Tensors, options: Options, fail: Fail) -> None:
    cos, kind, rotary = tensors["cos"], options.table, options.rotary_dim
    wide = options.rounding == "complex128"
    if kind == "freqs_cis" and cos.dtype != torch.complex64 and not (wide and cos.dtype == torch.complex128):
        hint = "; pass torch.view_as_complex(table)" if cos.dim() == 3 and cos.shape[-1] == 2 else ""
        fail(f"freqs_cis is {cos.dtype}; it must be complex64, or complex128 with rounding='complex128'{hint}")
    if kind == "cos_sin_cache" and cos.dim() != 2:
        fail(f"cos_sin_cache has shape {tuple(cos.shape)}; it must be (P, rotary_dim)")
    if kind == "cos_sin_cache" and cos.shape[-1] != rotary:
        fail(f"cos_sin_cache is {cos.shape[-1]} wide, rotary_dim is {rotary}; they must be equal")
    cos, sin = table_pair(cos, tensors.get("sin"), kind)
    for label, table in (("cos", cos), ("sin", sin)) if kind == "cos_sin" else ((kind, cos),):
        if not (2 <= table.dim() <= 4):
            axes = "(P, 1 or B, 1, W)" if kind == "freqs" else "(B, P, H, W)"
            fail(f"{label} has shape {tuple(table.shape)}; it must be (P, W), (B, P, W) or {axes}")
        if kind == "freqs" and table.dtype != torch.float32:
            fail(f"freqs is {table.dtype}; the angles must be computed and passed in fp32")
        if not is_float(table) and not (wide and table.dtype == torch.float64):
            instead = "; pass a complex table as freqs_cis=table" if table.is_complex() else ""
            fail(
                f"{label} is {table.dtype}; allowed are fp32, fp16, bf16, and fp64 with rounding='complex128'{instead}"
            )
    if cos.shape != sin.shape or cos.dtype != sin.dtype:
        fail(f"cos is {tuple(cos.shape)} {cos.dtype} but sin is {tuple(sin.shape)} {sin.dtype}; they must match")
    if kind == "freqs" and options.shifts:
        fail("freqs does not go with Shifts; pass cos and sin")
    if wide and (kind == "freqs" or "cu_seqlens" in tensors):
        fail("rounding='complex128' does not go with freqs or cu_seqlens; pass cos and sin, and position_ids")
    if kind != "freqs" and options.mscale != 1:
        fail("mscale goes with freqs; multiply cos and sin by it instead")
    width, half = cos.shape[-1], rotary // 2
    if width != half and width != rotary:
        had = f"{'cos and sin are' if kind == 'cos_sin' else f'{kind} is'} {width} wide; with rotary_dim {rotary}"
        allowed = f"allowed are {half} (half width) and {rotary} (full width)"
        hint = "k_pe has as many elements" if options.v_dim else "pass rotary_dim for a partial rotation"
        fail(f"{had} (D={tensors['q'].shape[-1]}) {allowed}; {hint}")
    if options.interleaved != options.interleaved_out and width == rotary:
        own = label_of("cos", options) + ("[..., ::2]" if options.interleaved else f"[..., :{half}]")
        fail(f"interleaved_out goes with half-width tables, {half} wide; pass {own}")
    _check_rows(tensors, cos, options, fail)


def _check_rows(tensors: Tensors, cos: Tensor, options: Options, fail: Fail) -> None:
    """Check the numbers of rows, batch rows and heads of the tables."""
    q, label, rows = tensors["q"], label_of("cos", options), rows_of(cos)
    batch, seqlen, heads, _ = sizes_of(q, options.layout)
    needed = options.max_seqlen if "cu_seqlens" in tensors else seqlen * options.cp_size
    needed = (0 if "position_ids" in tensors else needed) - options.unrotated
    if not options.packed_table and rows < needed:
        squeezed = cos.dim() == 4 and rows == 1 and cos.shape[2] >= needed
        hint = f"; it is (B, 1, S, W): pass {label}.squeeze(1)" if squeezed else ""
        fail(f"q is {named(q, options.layout)} but {label} has {rows} rows; it needs {needed}{hint}")
    if rows <= 0 and seqlen != 0:
        fail(f"{label} has no rows")
    if cos.dim() > 2 and cos.shape[0] != 1 and cos.shape[0] != batch:
        had = f"{label} has {cos.shape[0]} batch rows"
        fail(f"q is {named(q, options.layout)} but {had}; allowed are 1 and B={batch}")
    if per_head(cos):
        if options.table == "freqs":
            fail(f"freqs has angles for {cos.shape[2]} heads; heads must share them, or pass cos and sin")
        if cos.shape[2] != heads or sizes_of(tensors.get("k", q), options.layout)[2] != heads:
            had = f"cos has angles for {cos.shape[2]} heads"
            fail(f"q is {named(q, options.layout)} but {had}; q and k must have as many heads")


def refuse_per_head(table: Tensor, options: Options, beside: str, fail: Fail) -> None:
    """Refuse a table with entries for each head."""
    if per_head(table):
        had = f"{label_of('cos', options)} has shape {tuple(table.shape)}"
        fail(f"{had}; with {beside} the heads must share it: (P, W) or (B, P, W)")


def rows_of(table: Tensor) -> int:
    """The number of rows of a table, one for each position."""
    return table.shape[0] if table.dim() == 2 else table.shape[1]


def is_float(x: Tensor) -> bool:
    return DTYPE_NAMES.get(x.dtype) in DTYPES


def sizes_of(x: Tensor, layout: str) -> list[int]:
    """The sizes (B, S, H, D) of a tensor in `layout`."""
    return [1 if axis is None else x.shape[axis] for axis in LAYOUT_AXES[layout]]


def named(x: Tensor, layout: str) -> str:
    """A shape by its letters: `(B=2, S=128, H=32, D=64)`."""
    return "(" + ", ".join(f"{letter.upper()}={size}" for letter, size in zip(layout, x.shape)) + ")"


def check_axes(letter: str, x: Tensor, q: Tensor, fail: Fail) -> None:
    """Refuse heads with other axes than q's, or on another device."""
    if x.device != q.device or x.dim() != q.dim():
        fail(f"{letter} is {tuple(x.shape)} on {x.device} but q is {tuple(q.shape)} on {q.device}")


def check_ranks(letter: str, x: Tensor, ranks: int, options: Options, fail: Fail) -> None:
    """Refuse heads that cannot be dealt out to ranks in equal groups."""
    if x.shape[LAYOUT_AXES[options.layout][2]] % ranks:
        fail(f"{letter} is {named(x, options.layout)}; for {ranks} ranks it needs a multiple of {ranks} heads")
