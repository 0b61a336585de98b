"""Rope functions of hosts that have many: what each computes, found by calling it once.

A `Variant` is the arithmetic, a form is a signature. `recognise` calls a host's function on small random CPU tensors
and looks for the variant that gives the same bits; `replacement` makes our function of that variant and signature.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..api import apply_rope
from ..base.spec import DTYPES
from ..plan.problem import DTYPE_NAMES
from ..plan.spec import MAX_HEAD_DIM

Function = Callable[..., Any]
Rotated = tuple[Tensor, "Tensor | None"]
Shape = tuple[int, int, int]
FLOATS = frozenset(dtype for dtype, name in DTYPE_NAMES.items() if name in DTYPES)


class Variant(NamedTuple):
    """What a host's rope function computes."""

    interleaved: bool = False
    interleaved_out: bool = False
    table: str = "full"  # an angle an element; "half": an angle a pair; "first": one a pair, in the first half
    negated: bool = False  # the rotation back
    partial: bool = False  # narrower tables turn a part of the head,
    last: bool = False  # which ends it instead of beginning it
    widens: bool = False  # the result has the dtype that q and the tables promote to, not q's
    alone: str = ""  # what comes back where k is None: "tensor" or "pair"; "": that is the host's
    axis: int = 1  # where the tables get their axis of heads, in functions that are not told
    shapes: tuple[Shape, ...] = ()  # axes of q, of the tables, and that axis, where it is right; (): everywhere
    rounding: str = "fp32"

    def __str__(self) -> str:
        pairs = "interleaved" if self.interleaved else "halves"
        into = " into halves" if self.interleaved != self.interleaved_out else ""
        return f"{pairs}{into}, {self.table} tables{', partial' if self.partial else ''}"


HALVES = Variant(partial=True, widens=True, alone="pair")
INTERLEAVED = HALVES._replace(interleaved=True, interleaved_out=True)


def rotate(v: Variant | None, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, axis: int) -> Rotated | None:
    """q and k rotated, or None where the call's arithmetic is not jitrope's, or has no variant.

    q and k are (B, H, S, D), (B, S, H, D) or one of these without B: which axis is which is told by the tables, which
    get an axis of size 1 at `axis` and broadcast.
    """
    if v is None:
        return None
    q_shape, shape, device, dtype = q.shape, cos.shape, q.device, q.dtype
    width, dim = shape[-1], q_shape[-1]
    rotary = 2 * width if v.table == "half" else width
    axis = axis if axis >= 0 else axis + len(shape) + 1
    takes = (
        dtype in FLOATS and cos.dtype in FLOATS and sin.dtype == cos.dtype and sin.shape == shape
        and device.type in ("cpu", "cuda", "meta") and device == cos.device == sin.device
        and not ((cos.requires_grad or sin.requires_grad) and torch.is_grad_enabled())
        and (v.alone != "" if k is None else k.dtype == dtype and k.device == device)
        and rotary % 2 == 0 and 0 < rotary <= dim <= MAX_HEAD_DIM and (rotary == dim or v.partial)
        and (not v.shapes or (len(q_shape), len(shape), axis) in v.shapes)
    )  # fmt: skip
    where = _layout(q_shape, None if k is None else k.shape, shape, axis) if takes else None
    if where is None:
        return None
    layout, batch, positions = where
    if shape[:-1] not in ((positions,), (batch, positions)):
        cos, sin = cos.reshape(batch, positions, width), sin.reshape(batch, positions, width)
    if v.widens and dtype != cos.dtype:
        dtype = torch.promote_types(dtype, cos.dtype)
        q, k = q.to(dtype), None if k is None else k.to(dtype)
    if v.table == "first":
        cos, sin = cos[..., : width // 2], sin[..., : width // 2]
    if v.negated:  # `inverse` would also swap the sines of a pair's members, where they differ
        sin = -sin
    flat = len(q_shape) == 3
    if flat:
        q, k = q.unsqueeze(0), None if k is None else k.unsqueeze(0)
    q, k = apply_rope(
        q, k, cos, sin, layout=layout, interleaved=v.interleaved, interleaved_out=v.interleaved_out, rotary_dim=rotary,
        rotary_offset=dim - rotary if v.last else 0, rounding=v.rounding,
    )  # fmt: skip
    return (q.squeeze(0), None if k is None else k.squeeze(0)) if flat else (q, k)


def _layout(q: Sequence[int], k: Sequence[int] | None, table: Sequence[int], axis: int) -> tuple[str, int, int] | None:
    """(layout, batch of the tables, positions) by shapes, if there is a row for each position that q and k have."""
    if not (0 <= axis < len(table) <= 4 and len(q) in (3, 4)):
        return None
    if k is not None and (len(k) != len(q) or k[-1] != q[-1] or k[:-3] != q[:-3]):
        return None
    lead = [*table[:axis], 1, *table[axis:-1]]
    if len(lead) > 3:
        return None
    batch, first, second = [1] * (3 - len(lead)) + lead
    if batch != 1 and (len(q) == 3 or batch != q[0]):
        return None
    if first == 1 and q[-2] == second and (k is None or k[-2] == second):
        return "bhsd", batch, second
    if second == 1 and q[-3] == first and (k is None or k[-3] == first):
        return "bshd", batch, first
    return None


def mixed(table: Tensor, section: Iterable[int]) -> Tensor:
    """(B, S, W) of three tables (3, B, S, W): sections of each half, taken from the three in turn."""
    parts = table.split([*section, *section], dim=-1)
    return torch.cat([part[i % 3] for i, part in enumerate(parts)], -1)


# ---- the hosts' signatures -----------------------------------------------------------------------------
# Each makes our function of a signature; `rotate` is the one above, or one that counts as well.


def _pair(host: Function, v: Variant, rotate: Function) -> Function:
    def rope(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, unsqueeze_dim: int) -> Any:
        out = rotate(v, q, k, cos, sin, unsqueeze_dim)
        if out is None:
            return host(q, k, cos, sin, unsqueeze_dim)
        return out[0] if k is None and v.alone == "tensor" else out

    return rope


def _pair_ids(host: Function, v: Variant, rotate: Function) -> Function:
    def rope(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, position_ids: Any, unsqueeze_dim: int) -> Any:
        # The probe had no position_ids: what the host does with them is not known.
        out = rotate(v if position_ids is None else None, q, k, cos, sin, unsqueeze_dim)
        if out is None:
            return host(q, k, cos, sin, position_ids, unsqueeze_dim)
        return out[0] if k is None and v.alone == "tensor" else out

    return rope


def _single(host: Function, v: Variant, rotate: Function) -> Function:
    def rope(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int) -> Any:
        out = rotate(v, x, None, cos, sin, unsqueeze_dim)
        return host(x, cos, sin, unsqueeze_dim) if out is None else out[0]

    return rope


def _sine_first(host: Function, v: Variant, rotate: Function) -> Function:
    def rope(tensor: Tensor, sin: Tensor, cos: Tensor) -> Any:
        out = rotate(v, tensor, None, cos, sin, v.axis)
        return host(tensor, sin, cos) if out is None else out[0]

    return rope


def _fixed(host: Function, v: Variant, rotate: Function) -> Function:
    def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        out = rotate(v, q, k, cos, sin, v.axis)
        return host(q, k, cos, sin) if out is None else out

    return rope


def _complex(host: Function, v: Variant, rotate: Function) -> Function:
    def rope(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> Any:
        ours = freqs_cis.dtype == torch.complex64
        cos, sin = torch.view_as_real(freqs_cis).unbind(-1) if ours else (freqs_cis, freqs_cis)
        out = rotate(v if ours else None, xq, xk, cos, sin, v.axis)
        return host(xq, xk, freqs_cis) if out is None else out

    return rope


def _sections(host: Function, v: Variant, rotate: Function) -> Function:
    def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: list[int], unsqueeze_dim: int) -> Any:
        ours = cos.dim() == sin.dim() == 4 and cos.shape[-1] == sin.shape[-1] == 2 * sum(mrope_section)
        tables = [mixed(table, mrope_section) if ours else table for table in (cos, sin)]
        out = rotate(v if ours else None, q, k, *tables, unsqueeze_dim)
        return host(q, k, cos, sin, mrope_section, unsqueeze_dim) if out is None else out

    return rope


_BATCHED = ((4, 3, 1), (4, 3, 2))
_ANY = (*_BATCHED, (4, 2, 0), (4, 2, 1), (3, 2, 0), (3, 2, 1))
# names of the parameters: (maker, `shapes` to try, whether the caller says the axis)
FORMS: dict[tuple[str, ...], tuple[Function, tuple[Shape, ...], bool]] = {
    ("q", "k", "cos", "sin", "unsqueeze_dim"): (_pair, _ANY, True),
    ("q", "k", "cos", "sin", "position_ids", "unsqueeze_dim"): (_pair_ids, _ANY, True),
    ("x", "cos", "sin", "unsqueeze_dim"): (_single, _ANY, True),
    ("tensor", "sin", "cos"): (_sine_first, _BATCHED, False),
    ("q", "k", "cos", "sin"): (_fixed, _ANY, False),
    ("xq", "xk", "freqs_cis"): (_complex, _BATCHED, False),
    ("q", "k", "cos", "sin", "mrope_section", "unsqueeze_dim"): (_sections, _BATCHED, True),
}


# ---- recognising ---------------------------------------------------------------------------------------


def recognise(host: Function) -> Variant | str:
    """The variant that a host's rope function computes, or why there is none."""
    try:
        form = FORMS.get(_names(host))
    except (TypeError, ValueError):  # no signature
        form = None
    if form is None:
        return "its signature is not known"
    maker, shapes, says_axis = form
    with torch.no_grad():
        for v, axis in product(_candidates(maker), (None,) if says_axis else (-2, 1, 0)):
            some = [(q, tables, at) for q, tables, at in shapes if axis in (None, at, at - tables - 1)]
            same = [_same(host, v, maker, shape) for shape in some]
            if False not in same and True in same:
                right = tuple(shape for shape, fits in zip(some, same) if fits)
                return _completed(host, v._replace(axis=axis or 0, shapes=right), maker)
    return "none of jitrope's variants gives its results"


def replacement(host: Function, v: Variant, rotate: Function) -> Function:
    """Our function for a host's that computes v: of the same signature, with the host's for what is not ours."""
    ours: Function = FORMS[_names(host)][0](host, v, rotate)
    ours.__defaults__ = tuple(p.default for p in _parameters(host) if p.default is not p.empty)
    return ours


def _parameters(host: Function) -> list[inspect.Parameter]:
    # `kernels` makes modules of functions; the function's signature is then that of `forward`.
    return list(inspect.signature(host.forward if isinstance(host, nn.Module) else host).parameters.values())


def _names(host: Function) -> tuple[str, ...]:
    return tuple(p.name for p in _parameters(host))


def _candidates(maker: Function) -> Iterator[Variant]:
    alone = "tensor" if maker in (_single, _sine_first) else ""
    if maker is _complex:
        yield Variant(True, True, "half", rounding="complex64")
        return
    pairings = ((False, False), (True, True), (True, False))
    for (interleaved, out), table, negated in product(pairings, ("full", "half", "first"), (False, True)):
        if interleaved == out or table != "full":  # jitrope changes the pairing with half tables only
            yield Variant(interleaved, out, table, negated, alone=alone)


def _probe(maker: Function, v: Variant, shape: Shape, part: int = 1, dtypes: Any = (torch.float32,) * 2) -> Any:
    """Arguments of a call: heads of 8, of which 8 / part turn, random tables whose pairs' members differ."""
    generator = torch.Generator().manual_seed(0)

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device="cpu")

    axes, table_axes, axis = shape
    width = (4 if v.table == "half" else 8) // part
    tokens = [(heads, 5) if axis == table_axes - 2 else (5, heads) for heads in (3, 2)]
    q, k = (random(*(2,) * (axes - 3), *sizes, 8).to(dtypes[0]) for sizes in tokens)
    lead = (3,) * (maker is _sections) + (2,) * (table_axes - 2) + (5,)
    cos, sin = (random(*lead, width).to(dtypes[1]) for _ in range(2))
    if maker is _complex:
        return q, k, torch.complex(cos.float(), sin.float())
    return {
        _pair: (q, k, cos, sin, axis), _pair_ids: (q, k, cos, sin, None, axis), _single: (q, cos, sin, axis),
        _sine_first: (q, sin, cos), _fixed: (q, k, cos, sin),
        _sections: (q, k, cos, sin, [1, 1, width // 2 - 2], axis),
    }[maker]  # fmt: skip


def _same(host: Function, v: Variant, maker: Function, shape: Shape, **probe: Any) -> bool | None:
    """Whether ours and the host's results are the same; None where the host raises."""
    arguments = _probe(maker, v, shape, **probe)
    try:
        want = host(*arguments)
    except Exception:  # whatever it raises, it does not compute this
        return None
    # In bf16 roundings differ; torch's complex multiply on a CPU rounds as its loop was compiled.
    tolerance = 0.05 if "dtypes" in probe else 1e-5 if maker is _complex else 0.0
    return _equal(maker(lambda *_: None, v._replace(axis=shape[2]), rotate)(*arguments), want, tolerance)


def _equal(ours: Any, want: Any, tolerance: float = 0.0) -> bool:
    if type(ours) is not type(want):
        return False
    pairs = [(ours, want)] if isinstance(ours, Tensor) else list(zip(ours or (), want or ()))
    return all(
        a is b or (
            isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape
            and torch.allclose(a.float(), b.float(), rtol=tolerance, atol=tolerance)
        )
        for a, b in pairs
    )  # fmt: skip


def _completed(host: Function, v: Variant, maker: Function) -> Variant | str:
    """A variant that is right for whole heads in fp32, with the rest of what there is to know about the host."""
    shape = v.shapes[0]
    parts = [_same(host, v._replace(partial=True, last=last), maker, shape, part=2) for last in (False, True)]
    if None not in parts:  # the host takes narrower tables: ours has to do the same with them
        if True not in parts:
            return "the part of a head that it rotates is neither the first nor the last"
        v = v._replace(partial=True, last=parts[1] is True)
    bf16, fp32 = torch.bfloat16, torch.float32
    wide = [_same(host, v._replace(widens=widens), maker, shape, dtypes=(bf16, fp32)) for widens in (False, True)]
    if True not in wide or not _same(host, v, maker, shape, dtypes=(bf16, bf16)):
        return "the dtype of its results is not one of jitrope's"
    v = v._replace(widens=wide[0] is not True)
    if maker in (_pair, _pair_ids):
        q, _, *rest = _probe(maker, v, shape)
        for alone in ("tensor", "pair"):
            try:
                if _equal(maker(host, v._replace(alone=alone), rotate)(q, None, *rest), host(q, None, *rest)):
                    return v._replace(alone=alone)
            except Exception:  # it wants k
                break
    return v
