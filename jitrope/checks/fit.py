"""The checks of heads, lengths, positions and tables. A refusal names the argument, its value and allowed values."""

from __future__ import annotations

from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from .. import torch_state as watch
from ..base.errors import InvalidInput
from ..base.spec import DTYPES, MAX_AXES
from ..plan.memory import refuse_meeting, span
from ..plan.options import ALL_TOKENS, LAYOUT_AXES, MAX_HEAD_DIM, Options
from ..plan.views import DTYPE_NAMES, MEANS, PER_ITEM, Tensors, per_head, table_pair

MAX_TOKENS = 2**31 - 1  # CUDA's limit on the first grid axis
USERS_NAMES = {"q_factor": "q_scale", **{name: f"mean_squares' {name[0]}" for name in MEANS}}
"""The users' names of tensors that have another name in a call."""

SWAPPED = {"bshd": "bhsd", "bhsd": "bshd"}  # layouts that are easily mistaken for each other


class Fail(NamedTuple):
    """Raise InvalidInput(text) for a call of a function."""

    name: str

    def __call__(self, text: str) -> NoReturn:
        raise InvalidInput(f"{self.name}: {text}")

    def when(self, wrong: object, text: str) -> None:
        if wrong:
            self(text)


def label_of(name: str, o: Options) -> str:
    """The user's name of a table, of positions or of a number for each token."""
    own = {"cos": "cos" if o.table == "cos_sin" else o.table, **USERS_NAMES}
    return own.get(name, "positions" if name == "position_ids" and not o.mrope_section else name)


# ---- what a tensor of any kind must be ----------------------------------------------------------------


def check_device(label: str, x: Tensor, owner: str, q: Tensor, fail: Fail) -> None:
    fail.when(x.device != q.device, f"{label} is on {x.device} but {owner} is on {q.device}")


def check_integers(label: str, x: Tensor, q: Tensor, fail: Fail) -> None:
    fail.when(x.dtype not in (torch.int32, torch.int64), f"{label} is {x.dtype}; allowed are int32 and int64")
    check_device(label, x, "q", q, fail)


def check_floats(label: str, x: Tensor, fail: Fail) -> None:
    fail.when(not is_float(x), f"{label} is {x.dtype}; allowed are fp32, fp16 and bf16")


def check_contiguous(label: str, x: Tensor, fail: Fail) -> None:
    fail.when(not x.is_contiguous(), f"{label} has stride{'s' * (x.dim() > 1)} {x.stride()}; it must be contiguous")


def check_one_axis(label: str, x: Tensor, fail: Fail) -> None:
    fail.when(x.dim() != 1, f"{label} has shape {tuple(x.shape)}; it must have one axis")


def check_shape(label: str, x: Tensor, allowed: list[tuple[int, ...]], fail: Fail, had: str = "") -> None:
    """Refuse another shape than the allowed ones. had: what it must fit, for the message."""
    must = f"allowed are {', '.join(dict.fromkeys(map(str, allowed)))}"
    fail.when(tuple(x.shape) not in allowed, f"{had}{label} has shape {tuple(x.shape)}; {must}")


def check_heads(q: Tensor, k: Tensor | None, o: Options, fail: Fail, first: str, second: str) -> None:
    """Check q and k. first, second: their names for messages."""
    layout = o.layout
    for label, x in ((first, q), *([(second, k)] if k is not None else [])):
        if x.dim() != len(layout):
            hint = "; Packed implies it" if layout == "thd" else ""
            if x.dim() == 3:
                flat = f"; for (B, S, H D) pass {label}.unflatten(-1, (H, D))" if layout == "bshd" else ""
                one_head = f", for (B, S, D) {label}.unsqueeze(2)" if layout == "bshd" else ""
                hint = f'; for (T, H, D) pass layout="thd"{flat}' if x is q else flat + one_head
            needs = f"layout {layout!r} needs {len(layout)} axes ({', '.join(layout.upper())})"
            fail(f"{label} has shape {tuple(x.shape)}, {needs}{hint}")
        check_floats(label, x, fail)
        if x.device != q.device or x.dtype != q.dtype:
            fail(f"{label} is {x.dtype} on {x.device} but {first} is {q.dtype} on {q.device}; pass {label}.to({first})")
    on = f"{first} is on {q.device}"
    fail.when(q.device.type not in ("cuda", "cpu", "meta"), f"{on}; it must be on a CUDA device, the CPU or meta")
    batch, seqlen, heads, head_dim = sizes_of(q, layout)
    if k is not None and (unlike := [a for a, x, y in zip(layout, q.shape, k.shape) if a != "h" and x != y]):
        other = SWAPPED.get(layout)
        alike = other and unlike == ["s"] and heads == sizes_of(k, layout)[2]
        hint = f"; if their layout is {other!r}, pass layout={other!r}" if alike else ""
        fail(f"{first} is {named(q, layout)} but {second} is {named(k, layout)}; only H may differ{hint}")
    tokens, had = batch * seqlen, f"{first} has D={head_dim}; at most {MAX_HEAD_DIM} is possible"
    fail.when(tokens > MAX_TOKENS, f"{first} has {tokens} tokens; at most {MAX_TOKENS} are possible")
    fail.when(head_dim > MAX_HEAD_DIM, f"{had}; pass a view of the rotated elements")
    begin, end = o.rotary_offset, o.rotary_offset + o.rotary_dim
    fail.when(begin < 0, f"rotary_offset is {begin}; it cannot be negative")
    most = f"D - rotary_offset={head_dim - begin}" if begin else f"D={head_dim}"
    had = f"rotary_dim{', by default D,' if end == head_dim and not begin else ''} is {o.rotary_dim}"
    wrong = o.rotary_dim % 2 != 0 or not (begin < end <= head_dim)
    fail.when(wrong, f"{had}; it must be even and from 2 to {most}")


def require_apart(name: str, written: Tensors, read: Tensors, labels: dict[str, str]) -> None:
    """Refuse memory that a call would write as one tensor and read or write as another; skip tensors without memory."""
    t = {**written, **read}
    real = all(type(x) in (Tensor, torch.nn.Parameter) and x.device.type != "meta" for x in t.values())
    if real and not watch.transformed():
        refuse_meeting(name, {label: span(x) for label, x in t.items()}, tuple(written), labels)


def check_pairs(t: Tensors, o: Options, fail: Fail) -> None:
    """Refuse tensors whose elements cannot be taken in aligned pairs: fp4 stores two in a byte."""
    apart = "v" in t and ("k" not in t or t["v"].shape != t["k"].shape)
    names = ("bias", *"qkv", "q_out", "k_out", *["v_out"] * (not apart))  # v is copied after the launch
    for name in [x for x in names if x in t and PER_ITEM.get(t[x].dtype, 1) == 1]:
        x, label = t[name], f"out's {name[0]}" if name.endswith("_out") else name
        steps = [stride for size, stride in zip(x.shape[:-1], x.stride()) if size > 1]
        odd = x.stride(-1) != 1 or any(n % 2 for n in (x.shape[-1], x.storage_offset(), *steps))
        had = f"{label} has D={x.shape[-1]}, strides {tuple(x.stride())} and offset {x.storage_offset()}"
        fail.when(odd, f"{had}; fp4 needs aligned pairs of neighbouring elements")
    first, dim, of = o.rotary_offset, o.rotary_dim, 2 if o.interleaved else 4
    must = f"for fp4 the first must be even, and the second a multiple of {of}"
    fail.when(first % 2 or dim % of, f"rotary_offset is {first}, rotary_dim {dim}; {must}")


def check_lengths(t: Tensors, o: Options, fail: Fail) -> None:
    q, size, unrotated = t["q"], o.cp_size, o.unrotated
    batch, seqlen, *_ = sizes_of(q, o.layout)
    alone = unrotated == ALL_TOKENS  # there is no table
    fail.when(unrotated < 0, f"unrotated is {unrotated}; it cannot be negative")
    others = {label_of("position_ids", o): "position_ids" in t, "packed_table": o.packed_table and not alone}
    others["interleaved_out"] = o.interleaved != o.interleaved_out
    instead = "pass a table" if alone else "give these tokens a row of the table with cosines of 1"
    for label in [label for label, given in others.items() if given and unrotated > 0]:  # they are not counted
        fail(f"{label} does not go {'without a table' if alone else 'with unrotated'}; {instead}")
    fail.when(size < 1, f"cp_size is {size}; it must be at least 1")
    fail.when(not (0 <= o.cp_rank < size), f"cp_rank is {o.cp_rank}; it must be from 0 to cp_size - 1 = {size - 1}")
    for label in [label for label in ("cu_seqlens", "start_positions") if label in t]:
        check_integers(label, t[label], q, fail)
        check_one_axis(label, t[label], fail)
        check_contiguous(label, t[label], fail)
    rows, of = batch, "batch rows"
    if "cu_seqlens" in t:
        rows, of = t["cu_seqlens"].shape[0] - 1, "sequences"
        fail.when(o.layout != "thd", f"cu_seqlens goes with layout 'thd', not {o.layout!r}; leave layout out")
        fail.when(o.max_seqlen < 0, f"max_seqlen is {o.max_seqlen}; it cannot be negative")
        fail.when(rows < 0, "cu_seqlens is empty; it must have N + 1 offsets")
    elif size != 1 and seqlen % 2 != 0:
        fail(f"q is {named(q, o.layout)}; with cp_size={size} S must be even, for two equal chunks")
    if "start_positions" in t:
        count = t["start_positions"].shape[0]  # len would make a symbol a number
        fail.when(count != rows, f"start_positions has {count} entries for {rows} {of}")


def check_position_ids(t: Tensors, o: Options, fail: Fail) -> None:
    q, layout, sections, pairs = t["q"], o.layout, o.mrope_section, o.rotary_dim // 2
    label, ids = label_of("position_ids", o), t["position_ids"]
    check_integers(label, ids, q, fail)
    if sections and (len(sections) > MAX_AXES or sum(sections) != pairs):
        fail(f"mrope_section is {tuple(sections)}; it must be at most {MAX_AXES} numbers of pairs, {pairs} in all")
    batch, seqlen, *_ = sizes_of(q, layout)
    axes, rows = (len(sections),) if sections else (), [] if layout == "thd" else [(1,), (batch,)]
    check_shape(label, ids, [(*axes, *row, seqlen) for row in [(), *rows]], fail, f"q is {named(q, layout)} but ")


def check_factor(t: Tensors, q: Tensor, seqlen: int, layout: str, fail: Fail) -> None:
    """Check the scale of q, for that many tokens in each batch row."""
    if "q_factor" in t:
        rows = [] if layout == "thd" else [(1, seqlen), (sizes_of(q, layout)[0], seqlen)]
        _check_of_tokens("q_factor", t["q_factor"], q, [(), (seqlen,), *rows], fail)


def check_means(t: Tensors, layout: str, fail: Fail) -> None:
    """Check the given means of squares of a norm across heads."""
    for letter, name in zip("qk", MEANS) if any(name in t for name in MEANS) else ():
        label = USERS_NAMES[name]
        fail.when(letter in t and name not in t, f"{letter} is given, but {label} is not")
        fail.when(name in t and letter not in t, f"{label} is given, but {letter} is not")
        if name in t:
            batch, seqlen, *_ = sizes_of(t[letter], layout)
            shape = (seqlen,) if layout == "thd" else (batch, seqlen)
            _check_of_tokens(name, t[name], t[letter], [shape], fail)


def _check_of_tokens(name: str, x: Tensor, q: Tensor, allowed: list[tuple[int, ...]], fail: Fail) -> None:
    """Refuse a tensor of a number for each token that has another dtype, device or shape."""
    had = f"{USERS_NAMES[name]} is {x.dtype} on {x.device}"
    fail.when(x.dtype != torch.float32 or x.device != q.device, f"{had}; it must be fp32 on {q.device}")
    check_shape(USERS_NAMES[name], x, allowed, fail)


def check_tables(t: Tensors, o: Options, fail: Fail) -> None:
    cos, kind, rotary = t["cos"], o.table, o.rotary_dim
    wide = o.rounding == "complex128"
    if kind == "freqs_cis" and cos.dtype != torch.complex64 and not (wide and cos.dtype == torch.complex128):
        hint = "; pass torch.view_as_complex(table)" if cos.dim() == 3 and cos.shape[-1] == 2 else ""
        fail(f"freqs_cis is {cos.dtype}; it must be complex64, or complex128 with rounding='complex128'{hint}")
    if kind == "cos_sin_cache":
        fail.when(cos.dim() != 2, f"cos_sin_cache has shape {tuple(cos.shape)}; it must be (P, rotary_dim)")
        had = f"cos_sin_cache is {cos.shape[1]} wide, rotary_dim is {rotary}"
        fail.when(cos.shape[1] != rotary, f"{had}; they must be equal")
    cos, sin = table_pair(cos, t.get("sin"), kind)
    must = f"it must be (P, W), (B, P, W) or {'(P, 1 or B, 1, W)' if kind == 'freqs' else '(B, P, H, W)'}"
    for label, x in (("cos", cos), ("sin", sin)) if kind == "cos_sin" else ((kind, cos),):
        fail.when(not (2 <= x.dim() <= 4), f"{label} has shape {tuple(x.shape)}; {must}")
        wrong = kind == "freqs" and x.dtype != torch.float32
        fail.when(wrong, f"freqs is {x.dtype}; the angles must be computed and passed in fp32")
        hint = "; pass a complex table as freqs_cis=table" if x.is_complex() else ""
        had = f"{label} is {x.dtype}; allowed are fp32, fp16, bf16, and fp64 with rounding='complex128'"
        fail.when(not is_float(x) and not (wide and x.dtype == torch.float64), f"{had}{hint}")
    had = f"cos is {tuple(cos.shape)} {cos.dtype} but sin is {tuple(sin.shape)} {sin.dtype}"
    fail.when(cos.shape != sin.shape or cos.dtype != sin.dtype, f"{had}; they must match")
    fail.when(kind == "freqs" and o.shifts, "freqs does not go with Shifts; pass cos and sin")
    if wide and (kind == "freqs" or "cu_seqlens" in t):
        fail("rounding='complex128' does not go with freqs or cu_seqlens; pass cos and sin, and position_ids")
    fail.when(kind != "freqs" and o.mscale != 1, "mscale goes with freqs; multiply cos and sin by it instead")
    width, half = cos.shape[-1], rotary // 2
    if width != half and width != rotary:
        had = f"{'cos and sin are' if kind == 'cos_sin' else f'{kind} is'} {width} wide; with rotary_dim {rotary}"
        allowed = f"allowed are {half} (half width) and {rotary} (full width)"
        hint = "k_pe has as many elements" if o.v_dim else "pass rotary_dim for a partial rotation"
        fail(f"{had} (D={t['q'].shape[-1]}) {allowed}; {hint}")
    if o.interleaved != o.interleaved_out and width == rotary:
        own = label_of("cos", o) + ("[..., ::2]" if o.interleaved else f"[..., :{half}]")
        fail(f"interleaved_out goes with half-width tables, {half} wide; pass {own}")
    _check_rows(t, cos, o, fail)


def _check_rows(t: Tensors, cos: Tensor, o: Options, fail: Fail) -> None:
    """Check the numbers of rows, batch rows and heads of the tables."""
    q, label, rows = t["q"], label_of("cos", o), rows_of(cos)
    batch, seqlen, heads, _ = sizes_of(q, o.layout)
    of_q = f"q is {named(q, o.layout)} but "
    needed = o.max_seqlen if "cu_seqlens" in t else seqlen * o.cp_size
    needed = (0 if "position_ids" in t else needed) - o.unrotated
    if not o.packed_table and rows < needed:
        squeezed = cos.dim() == 4 and rows == 1 and cos.shape[2] >= needed
        hint = f"; it is (B, 1, S, W): pass {label}.squeeze(1)" if squeezed else ""
        fail(f"{of_q}{label} has {rows} rows; it needs {needed}{hint}")
    fail.when(rows <= 0 and seqlen != 0, f"{label} has no rows")
    if cos.dim() > 2 and cos.shape[0] != 1 and cos.shape[0] != batch:
        fail(f"{of_q}{label} has {cos.shape[0]} batch rows; allowed are 1 and B={batch}")
    if per_head(cos):
        had = f"has angles for {cos.shape[2]} heads"
        fail.when(o.table == "freqs", f"freqs {had}; heads must share them, or pass cos and sin")
        same = cos.shape[2] == heads == sizes_of(t.get("k", q), o.layout)[2]
        fail.when(not same, f"{of_q}cos {had}; q and k must have as many heads")


def refuse_per_head(table: Tensor, o: Options, beside: str, fail: Fail) -> None:
    """Refuse a table with entries for each head."""
    had = f"{label_of('cos', o)} has shape {tuple(table.shape)}"
    fail.when(per_head(table), f"{had}; with {beside} the heads must share it: (P, W) or (B, P, W)")


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
