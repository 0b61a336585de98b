"""Rotation of q and k: y0 = x0 cos - x1 sin, y1 = x1 cos + x0 sin of each pair. Source: arXiv:2104.09864."""

from __future__ import annotations

from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from ..base.fit import FLOATS, USERS_NAMES, Fail, sizes_of
from ..base.spec import DTYPES, OF_NORM
from ..base.views import DTYPE_NAMES, Tensors, table_pair, table_view
from . import positions
from .positions import POSITIONS, TURNED, cleared, table_rows

TABLES = ("cos_sin", "freqs", "cos_sin_cache", "freqs_cis")
ROUNDINGS = ("fp32", "complex64", "complex128", "dtype", "addcmul")
TENSORS = ("cos", "sin", "second_cos", "second_sin", *positions.TENSORS)
MAX_MOVED = 64
"""The most rotated elements of a head that can change their pairing in place: threads of one warp have them, even with
one element in an access."""
ARGUMENTS = positions.ARGUMENTS
WITHOUT_TABLE = "position_ids start_positions mrope_section mrope_interleaved shifts unrotated rotary_dim rotary_offset"
"""The tensors and words that have no effect without a table."""


class Words(positions.Words):
    rotary_dim: int = 0
    rotary_offset: int = 0
    interleaved: bool = False
    interleaved_out: bool | None = None  # None: as interleaved
    rounding: str = "fp32"
    inverse: bool = False
    table: str = "cos_sin"  # every other kind is a single tensor in the place of cos
    mscale: float = 1.0


class Fields(positions.Fields):
    """Constants of a kernel."""

    table_dtype: str = field(metadata={"words": (*DTYPES, "fp64")})
    rotary_dim: int  # elements of a head that are rotated, from rotary_offset on
    rotary_offset: int
    interleaved: bool  # pairs are (2i, 2i+1), else (i, i + rotary_dim / 2)
    interleaved_out: bool  # the same for the output
    inverse: bool  # rotate back (the backward)
    freqs: bool  # the tables hold angles, not cos and sin
    full_width: bool  # each member of a pair has an entry
    per_head: bool  # each head has entries
    two_tables: bool = field(metadata=OF_NORM | {"given": "second_cos"})  # each stream has its own
    rounding: str = field(metadata={"words": ROUNDINGS})  # only "complex128" computes in fp64, by fp64 tables

    @property
    def reorders(self) -> bool:
        """Whether pairs are stored otherwise than they are read."""
        return self.interleaved != self.interleaved_out

    @property
    def pairing(self) -> str:
        """How pairs lie, as a word."""
        words = [("halves", "interleaved")[flag] for flag in (self.interleaved, self.interleaved_out)]
        return "_to_".join(dict.fromkeys(words))


def fields(tables: Tensors, o: Words) -> dict[str, Any]:
    """The constants that its words do not name, with those of positions. tables: views of the tables."""
    cos = tables["cos"]
    return {
        "prefixed": o.unrotated > 0,
        "table_dtype": DTYPE_NAMES[cos.dtype],
        "interleaved_out": o.interleaved if o.interleaved_out is None else o.interleaved_out,
        "freqs": o.table == "freqs",
        "full_width": cos.shape[-1] == o.rotary_dim,
        "per_head": any(x.shape[2] != 1 and x.stride(2) for x in tables.values()),
    }


def pairs_of(o: Words) -> dict[str, Any]:
    """The one spelling of its pairs."""
    return {"interleaved_out": None if o.interleaved_out == o.interleaved else o.interleaved_out}


def exchanged(o: Words) -> dict[str, Any]:
    """The pairs of the way back, from the output to the input."""
    return {} if o.interleaved_out is None else {"interleaved": o.interleaved_out, "interleaved_out": o.interleaved}


def label_of(name: str, o: Words) -> str:
    """The user's name of a table, of positions or of a number for each token."""
    own = {"cos": "cos" if o.table == "cos_sin" else o.table, **USERS_NAMES}
    return own.get(name, positions.label(o) if name == "position_ids" else name)


def check_moved(name: str, norm: bool, o: Words, rotate_k: bool) -> None:
    """Refuse other pairs in place, where elements move. norm: a kernel reads whole heads."""
    dim, moved = o.rotary_dim, o.interleaved_out is not None
    apart = norm or dim > MAX_MOVED or dim & (dim - 1) != 0
    of_dim = f"inplace{f' and rotary_dim={dim}' * (not norm)}"
    Fail(name).apart("interleaved_out", {of_dim: moved and o.inplace and apart, "rotate_k": moved and rotate_k})


def check_dims(head_dim: int, o: Words, fail: Fail) -> None:
    """Refuse to rotate elements that a head does not have."""
    most = head_dim - o.rotary_offset
    wrong = o.rotary_dim % 2 != 0 or not (0 < o.rotary_dim <= most)
    had = f"rotary_dim is {o.rotary_dim}{f' with {o.table}' * (o.table != 'cos_sin')}"
    fail.when(wrong, f"{had}; it must be even and from 2 to D - rotary_offset={most}")


def check(t: Tensors, o: Words, shared: bool, fail: Fail) -> None:
    """Refuse tables that do not fit q, k and the positions. shared: heads cannot have entries of their own."""
    q, cos, kind, rotary, wide = t["q"], t["cos"], o.table, o.rotary_dim, o.rounding == "complex128"
    label, (batch, seqlen, heads, _) = label_of("cos", o), sizes_of(q, o.layout)
    positions.check_counted("interleaved_out", o.interleaved_out is not None, o, fail)
    fail.apart("freqs", {"Shifts": kind == "freqs" and o.shifts})
    fail.apart("rounding='complex128'", {"freqs": wide and kind == "freqs", "cu_seqlens": wide and "cu_seqlens" in t})
    fail.when(kind != "freqs" and o.mscale != 1, "mscale goes with freqs; multiply cos and sin by it instead")
    complexes, floats = (torch.complex64, torch.complex128)[: 1 + wide], (*FLOATS, *[torch.float64] * wide)
    dtypes = {"freqs": (torch.float32,), "freqs_cis": complexes}.get(kind, floats)
    own = not shared and heads == sizes_of(t.get("k", q), o.layout)[2]
    shapes = [("P", "W"), ((1, batch), "P", "W"), ((1, batch), "P", (1, heads) if own else 1, "W")]
    if kind == "freqs":
        shapes[2] = ("P", (1, batch), 1, "W")
    given = cos.transpose(0, 1) if kind == "freqs" and cos.dim() == 4 else cos
    fail.unlike(label, given, q.device, dtypes, *shapes[: 1 if kind == "cos_sin_cache" else 3])
    if "sin" in t:
        fail.unlike("sin", t["sin"], q.device, (cos.dtype,), cos.shape, like="cos")
    rows, needed, width = rows_of(cos), positions.needed_rows(t, o), cos.shape[-1]
    wrong = (rows < needed and not o.packed_table) or (rows == 0 and seqlen != 0)
    fail.when(wrong, f"{label} has {rows} rows; q needs {needed}")
    half = (rotary // 2, rotary)[: 1 + (o.interleaved_out is None)]
    widths = (rotary,) if kind == "cos_sin_cache" else half
    had = f"{label} is {width} wide; with rotary_dim={rotary}{' and interleaved_out' * (len(half) == 1)}"
    fail.when(width not in widths, f"{had} it must be {' or '.join(map(str, widths))}")


def rows_of(table: Tensor) -> int:
    """The number of rows of a table, one for each position."""
    return table.shape[0] if table.dim() == 2 else table.shape[1]


def forward(letter: str, x: Tensor, t: Tensors, o: Words) -> Tensor:
    """Heads, rotated, with their pairs as they are read, in fp32 with the strides of x.

    Products and the sum are rounded separately, as in torch's real multiplies; complex multiplies and the fused product
    of "addcmul" are torch's own. With "dtype" each step is rounded to the dtype of the call's heads.
    """
    if letter not in TURNED:
        return x
    cos, sin, still = _turns(x.shape[1], t[letter].dtype, t, o)
    heads = x.to(cos.dtype if o.rounding == "complex128" else torch.float32)
    if "cu_seqlens" in t:  # tokens after the last sequence may hold NaN, which must not reach the tables' gradients
        heads = cleared(letter, heads, t, o)
    first, end = o.rotary_offset, o.rotary_offset + o.rotary_dim
    x0, x1 = _members(heads[..., first:end], o.interleaved)
    full = cos.shape[-1] == o.rotary_dim
    cos0, cos1 = _members(cos, o.interleaved) if full else (cos, cos)
    sin0, sin1 = _members(sin, o.interleaved) if full else (sin, sin)
    if o.rounding.startswith("complex") and not full:  # torch's, which may round a row's last pairs otherwise
        turned = torch.complex(x0, x1) * torch.complex(cos0, sin0)
        y0, y1 = turned.real, turned.imag
    else:
        y0 = _sum_of_products(x0, cos0, x1, -sin0, o.rounding)
        y1 = _sum_of_products(x1, cos1, x0, sin1, o.rounding)
    if "cu_seqlens" in t:
        y0, y1 = cleared(letter, y0, t, o), cleared(letter, y1, t, o)
    y = _with_pairs(x, heads, y0, y1, o.interleaved, (first, end))
    y = y if still is None else torch.where(still, heads, y)
    return y.float()


def back(letter: str, x: Tensor, grad: Tensor, t: Tensors, o: Words, found: Tensors) -> Tensor:
    """The rotation back."""
    return forward(letter, grad, t, o._replace(inverse=not o.inverse))


def paired(letter: str, x: Tensor, o: Words, back: bool = False) -> Tensor:
    """Heads with their pairs as they are read -> as they are stored; `back`: the other way."""
    if letter not in TURNED or o.interleaved_out is None:
        return x
    read, stored = (o.interleaved_out, o.interleaved) if back else (o.interleaved, o.interleaved_out)
    first, end = o.rotary_offset, o.rotary_offset + o.rotary_dim
    return _with_pairs(x, x, *_members(x[..., first:end], read), stored, (first, end))


def _turns(tokens: int, dtype: torch.dtype, t: Tensors, o: Words) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cosines and sines of each token, (batch or 1, seq, head or 1, width), and a mask of tokens that are not rotated.

    They are in fp32, with "complex128" in fp64, with "dtype" in the dtype of the call's heads.
    """
    compute_dtype = torch.float64 if o.rounding == "complex128" else torch.float32
    plain = o.table == "cos_sin"
    cos, sin = (t["cos"], t["sin"]) if plain else table_pair(t["cos"], t.get("sin"), o.table)
    cos, sin = table_view(cos).to(compute_dtype), table_view(sin).to(compute_dtype)
    if o.table == "freqs":
        cos, sin = cos.cos() * o.mscale, sin.sin() * o.mscale
    if o.rounding == "dtype":
        cos, sin = cos.to(dtype), sin.to(dtype)
    sin = _transposed(sin, o) if o.inverse else sin
    if o.cp_size == 1 and not o.unrotated and POSITIONS.isdisjoint(t):
        return cos[:, :tokens], sin[:, :tokens], None
    rows, still, back = positions.turned(table_rows(tokens, cos.device, t, o), o)
    cos, sin = _gathered(cos, rows, o), _gathered(sin, rows, o)
    sin = sin if back is None else torch.where(back[..., None, None], _transposed(sin, o), sin)
    return cos, sin, None if still is None else still[..., None, None]


def _transposed(sin: Tensor, o: Words) -> Tensor:
    """The sines of the rotation back: negated, each at the partner."""
    if sin.shape[-1] != o.rotary_dim:
        return -sin
    sin0, sin1 = _members(sin, o.interleaved)
    return torch.stack((-sin1, -sin0), -1).flatten(-2) if o.interleaved else torch.cat((-sin1, -sin0), -1)


def _sum_of_products(a: Tensor, b: Tensor, c: Tensor, d: Tensor, rounding: str) -> Tensor:
    """a b + c d. With "dtype" each step is rounded to the dtype of the tables b and d."""
    if rounding == "addcmul":
        return torch.addcmul(a * b, c, d)
    if rounding == "dtype":
        return (a * b).to(b.dtype) + (c * d).to(b.dtype)
    return a * b + c * d


def _members(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The first and the second member of each pair along the last axis."""
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _with_pairs(like: Tensor, x: Tensor, y0: Tensor, y1: Tensor, interleaved: bool, within: tuple[int, int]) -> Tensor:
    """Heads x with other members in their pairs, and with the strides of `like`: sums of norms depend on them."""
    first, end = within
    out = torch.empty_like(like, dtype=x.dtype)
    out = out if end - first == x.shape[-1] else out.copy_(x)
    for n, y in enumerate((y0, y1)):  # a view from before a write cannot be written under autograd
        _members(out[..., first:end], interleaved)[n].copy_(y)
    return out


def _gathered(table: Tensor, rows: Tensor, o: Words) -> Tensor:
    """The table's rows, (batch, token, head, width). A row outside gives NaN.

    A pair takes the row of its axis of position_ids: one section of pairs after the other, or alternating.
    """
    outside = ((rows < 0) | (rows >= table.shape[1])).any(0)
    batch = torch.arange(len(table), device=table.device)[:, None]
    found = [table[batch, axis.masked_fill(outside, 0)] for axis in rows]
    gathered = found[0]
    if len(found) > 1:
        pair = torch.arange(o.rotary_dim // 2, device=table.device)
        sections = torch.tensor(o.mrope_section, device=table.device)
        if o.mrope_interleaved:
            axis_of = pair % len(sections)
            axis_of = torch.where(pair < len(sections) * sections[axis_of], axis_of, 0)
        else:
            axis_of = torch.searchsorted(sections.cumsum(0), pair, right=True)
        if table.shape[-1] == o.rotary_dim:
            axis_of = axis_of.repeat_interleave(2) if o.interleaved else axis_of.repeat(2)
        for axis in range(1, len(found)):
            gathered = torch.where(axis_of == axis, found[axis], gathered)
    return gathered.masked_fill(outside[..., None, None], float("nan"))
