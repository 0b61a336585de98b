"""Rotation of q and k: y0 = x0 cos - x1 sin, y1 = x1 cos + x0 sin of each pair. Source: arXiv:2104.09864."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from ..base.errors import InvalidInput
from ..base.fit import FLOATS, USERS_NAMES, Fail, named, sizes_of
from ..base.spec import DTYPES, OF_NORM
from ..base.views import DTYPE_NAMES, Tensors, per_head, table_pair, table_view
from . import positions

TABLES = ("cos_sin", "freqs", "cos_sin_cache", "freqs_cis")
ROUNDINGS = ("fp32", "complex64", "complex128", "dtype", "addcmul")
TENSORS = ("cos", "sin", "second_cos", "second_sin", *positions.TENSORS)
MAX_MOVED = 64
"""The most rotated elements of a head that can change their pairing in place: threads of one warp have them, even with
one element in an access."""
_SECOND = "second_cos second_sin"
ARGUMENTS = {
    **positions.ARGUMENTS,
    "two_tables": (f"const Table* second_table: {_SECOND}", f"TableStrides second_table_stride: {_SECOND}"),
}
WITHOUT_TABLE = "position_ids start_positions axis_of_pair shifts unrotated rotary_dim rotary_offset"
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
    dim = o.rotary_dim
    within_warp = not norm and 0 < dim <= MAX_MOVED and dim & (dim - 1) == 0
    for word, given, possible in (("inplace", o.inplace, within_warp), ("rotate_k", rotate_k, False)):
        if o.interleaved_out is not None and given and not possible:
            unless = f", unless rotary_dim is a power of two up to {MAX_MOVED}; it is {dim}"
            why = f"because it moves elements{unless if word == 'inplace' and not norm else ''}"
            raise InvalidInput(f"{name}: interleaved_out does not go with {word}, {why}; leave {word}=True out")


def check_dims(head_dim: int, o: Words, fail: Fail) -> None:
    """Refuse to rotate elements that a head does not have."""
    begin, end = o.rotary_offset, o.rotary_offset + o.rotary_dim
    of = "D - rotary_offset" if begin else "D"
    had = f"rotary_dim{f', by default {of},' if end == head_dim else ''} is {o.rotary_dim}"
    wrong = o.rotary_dim % 2 != 0 or not (begin < end <= head_dim)
    fail.when(wrong, f"{had}; it must be even and from 2 to {of}={head_dim - begin}")


def check(t: Tensors, o: Words, beside: str, fail: Fail) -> None:
    """Refuse tables that do not fit q, k and the positions. beside: what needs a table that the heads share, or ""."""
    q, cos, kind, rotary, label = t["q"], t["cos"], o.table, o.rotary_dim, label_of("cos", o)
    (batch, seqlen, heads, _), half, wide = sizes_of(q, o.layout), rotary // 2, o.rounding == "complex128"
    positions.check_counted("interleaved_out", o.interleaved_out is not None, o, fail)
    width: Any = rotary if kind == "cos_sin_cache" else (half, *[rotary] * (o.interleaved_out is None))
    beside = "freqs" if kind == "freqs" else beside
    each = () if beside or heads != sizes_of(t.get("k", q), o.layout)[2] else (heads,)
    lead = ("P", (1, batch)) if kind == "freqs" else ((1, batch), "P")  # of four axes
    shapes: list[Any] = [("P", width), ((1, batch), "P", width), (*lead, (1, *each), width)]
    kinds = {"freqs": FLOATS[:1], "freqs_cis": (torch.complex64, *[torch.complex128] * wide)}
    dtypes = kinds.get(kind, (*FLOATS, *[torch.float64] * wide))
    for name in ("cos", "sin") if kind == "cos_sin" else ("cos",):
        x = t[name].transpose(0, 1) if kind == "freqs" and cos.dim() == 4 else t[name]  # as the user has it
        own, single = label_of(name, o), "to(torch.complex64)" if x.is_complex() else "float()"
        full, odd = x.shape[-1:] == (rotary,), x.shape[-1:] not in ((half,), (rotary,))
        hints = {
            "pass a complex table as freqs_cis=table": x.is_complex() and kind != "freqs_cis",
            "pass torch.view_as_complex(table)": kind == "freqs_cis" and not x.is_complex(),
            "the angles must be computed and passed in fp32": kind == "freqs" and x.dtype != torch.float32,
            f"pass {own}.{single}": x.dtype in (torch.float64, torch.complex128) and not wide,
            f"with {beside} the heads must share it": per_head(x) and beside,
            f"the third axis is the heads, as many of q and k; of (B, 1, S, W) pass {own}.squeeze(1)": per_head(x),
            f"pass {own}.squeeze(1)": x.dim() == 3 and x.shape[1] == 1,
            "interleaved_out goes with half-width tables": o.interleaved_out is not None and full,
            "k_pe has rotary_dim elements": name == "cos" and odd and o.v_dim,
            "pass rotary_dim for a partial rotation": name == "cos" and odd,
        }
        hint = next((f"; {text}" for text, wrong in hints.items() if wrong), "")
        like, allowed = "cos" * (name == "sin"), shapes[: 1 if kind == "cos_sin_cache" else None]
        fail.unlike(own, x, q.device, dtypes, *allowed, like=like, hint=hint)
        dtypes, shapes = (x.dtype,), [x.shape]
    fail.when(kind == "freqs" and o.shifts, "freqs does not go with Shifts; pass cos and sin")
    if wide and (kind == "freqs" or "cu_seqlens" in t):
        fail("rounding='complex128' does not go with freqs or cu_seqlens; pass cos and sin, and position_ids")
    fail.when(kind != "freqs" and o.mscale != 1, "mscale goes with freqs; multiply cos and sin by it instead")
    rows, needed = rows_of(cos), o.max_seqlen if "cu_seqlens" in t else seqlen * o.cp_size
    needed = (0 if "position_ids" in t else needed) - o.unrotated
    if not o.packed_table and rows < needed:
        fail(f"{fail.main} is {named(q, o.layout)} but {label} has {rows} rows; it needs {needed}; make it longer")
    fail.when(rows <= 0 and seqlen != 0, f"{label} has no rows")


def rows_of(table: Tensor) -> int:
    """The number of rows of a table, one for each position."""
    return table.shape[0] if table.dim() == 2 else table.shape[1]


def forward(letter: str, x: Tensor, t: Tensors, o: Words) -> Tensor:
    """Heads, rotated, with their pairs as they are read, in fp32 with the strides of x. Its transpose is the inverse.

    Products and the sum are rounded separately, as in torch's real multiplies; complex multiplies and the fused product
    of "addcmul" are torch's own. With "dtype" each step is rounded to the dtype of the call's heads.
    """
    if letter not in positions.TURNED:
        return x
    cos, sin, still = _turns(x.shape[1], t[letter].dtype, t, o)
    full = cos.shape[-1] == o.rotary_dim
    cos0, cos1 = _members(cos, o.interleaved) if full else (cos, cos)
    sin0, sin1 = _members(sin, o.interleaved) if full else (sin, sin)
    heads = x.to(cos.dtype if o.rounding == "complex128" else torch.float32)
    if "cu_seqlens" in t:  # tokens after the last sequence may hold NaN, which must not reach the tables' gradients
        heads = positions.cleared(letter, heads, t, o)
    first, end = o.rotary_offset, o.rotary_offset + o.rotary_dim
    x0, x1 = _members(heads[..., first:end], o.interleaved)
    if o.rounding.startswith("complex") and not full:  # torch's, which may round a row's last pairs otherwise
        turned = torch.complex(x0, x1) * torch.complex(cos0, sin0)
        y0, y1 = turned.real, turned.imag
    else:
        y0 = _sum_of_products(x0, cos0, x1, -sin0, o.rounding)
        y1 = _sum_of_products(x1, cos1, x0, sin1, o.rounding)
    y = _with_pairs(x, heads, y0, y1, o.interleaved, (first, end))
    y = y if still is None else torch.where(still, heads, y)
    return y.float()


def paired(letter: str, x: Tensor, o: Words, back: bool = False) -> Tensor:
    """Heads with their pairs as they are read -> as they are stored; `back`: the other way."""
    if letter not in positions.TURNED or o.interleaved_out is None:
        return x
    read, stored = (o.interleaved_out, o.interleaved) if back else (o.interleaved, o.interleaved_out)
    first, end = o.rotary_offset, o.rotary_offset + o.rotary_dim
    return _with_pairs(x, x, *_members(x[..., first:end], read), stored, (first, end))


def _turns(tokens: int, dtype: torch.dtype, t: Tensors, o: Words) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cosines and sines of each token, (batch or 1, seq, head or 1, width), and a mask of tokens that are not rotated.

    They are in fp32, with "complex128" in fp64, with "dtype" in the dtype of the call's heads.
    """
    compute_dtype = torch.float64 if o.rounding == "complex128" else torch.float32
    cos, sin = (t["cos"], t["sin"]) if o.table == "cos_sin" else table_pair(t["cos"], t.get("sin"), o.table)
    cos, sin = table_view(cos).to(compute_dtype), table_view(sin).to(compute_dtype)
    if o.table == "freqs":
        cos, sin = cos.cos() * o.mscale, sin.sin() * o.mscale
    if o.rounding == "dtype":
        cos, sin = cos.to(dtype), sin.to(dtype)
    sin = _transposed(sin, o) if o.inverse else sin
    if o.cp_size == 1 and not o.unrotated and positions.POSITIONS.isdisjoint(t):
        return cos[:, :tokens], sin[:, :tokens], None
    rows, still, back = positions.turned(positions.table_rows(tokens, cos.device, t, o), o)
    cos, sin = _gathered(cos, rows, o), _gathered(sin, rows, o)
    if back is not None:
        sin = torch.where(_of_axes([*back[..., None, None]], sin.shape[-1], o), _transposed(sin, o), sin)
    return cos, sin, None if still is None else still[..., None, None]


def _transposed(sin: Tensor, o: Words) -> Tensor:
    """The sines of the rotation back: negated, each at the partner."""
    if sin.shape[-1] == o.rotary_dim:
        pairs, axis = ((-1, 2), -1) if o.interleaved else ((2, -1), -2)
        sin = sin.unflatten(-1, pairs).flip(axis).flatten(-2)
    return -sin


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
    """The table's rows, (batch, token, head, width). A row outside gives NaN."""
    outside = ((rows < 0) | (rows >= table.shape[1])).any(0)
    batch = torch.arange(len(table), device=table.device)[:, None]
    found = _of_axes([table[batch, axis.masked_fill(outside, 0)] for axis in rows], table.shape[-1], o)
    return found.masked_fill(outside[..., None, None], float("nan"))


def _of_axes(of_each: Sequence[Tensor], width: int, o: Words) -> Tensor:
    """What each pair's axis of position_ids has for it. of_each: of each axis, (..., width of a table or 1)."""
    found, *others = of_each
    if others:
        axes = [*o.axis_of_pair]
        if width == o.rotary_dim:
            axes = [axis for axis in axes for _ in "01"] if o.interleaved else axes * 2
        for axis, other in enumerate(others, 1):
            found = torch.where(torch.tensor([x == axis for x in axes], device=found.device), other, found)
    return found
