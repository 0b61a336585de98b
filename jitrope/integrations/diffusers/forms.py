"""The forms of rope in diffusers: the tables of a model, and the call of jitrope with them.

`rope_of` makes our function for a rope function of the host, with the same arguments and the same bits. Calls that
jitrope refuses go to the host, and are counted with the reason. The README's table describes the tables of each model.

Tables are used as views wherever possible. Tables that must be converted are converted in each call, and nothing is
kept, because a program may write to a table between two calls without a reliable sign: inference tensors have no
version, and a write through `.data` does not change it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...api import apply_rope
from ...base.errors import InvalidInput
from .. import _host

Tables = Sequence[Tensor]
Read = tuple[Any, ...]

_SHAPES = "the tables' shape does not fit q and k"
WORDS = "arguments that jitrope does not know"


class Form(NamedTuple):
    """One form of rope. `read` takes the arguments of the host's function and returns (q, k or None, tables).

    A fourth value is another form, if the call has that. Tables are (cos, sin), or one complex table.
    """

    read: Callable[..., Read] = lambda *_: ()
    axes: int = 2  # of the tables: 2 (S, W), 3 (B, S, W) or 4 (B, S, H, W)
    width: float = 1  # of a row, in heads; 0: only the first part of a head is rotated, and rows have its width
    layout: str = "bshd"  # this and the next two as in `apply_rope`
    interleaved: bool = True
    rounding: str = "fp32"  # or "promoted": in the wider dtype of q and tables; "complex": in the table's dtype
    back: Callable[[Tensor, Tensor], Tensor] = lambda out, x: out  # (jitrope's result, the host's first argument)
    by: Callable[..., Any] | None = None  # in place of `_rotate`, with its arguments and results


def rope_of(form: Form, host: Callable[..., Any], now: Callable[[], Any] | None = None) -> Callable[..., Any]:
    """Return our function for a host's, with the same arguments. now: returns what has its name now."""
    ours = functools.partial(_host.or_else("diffusers", "jitrope", form.by or _rotate, _left), form, host)

    def function(*arguments: Any, **words: Any) -> Any:
        if now is None or now() is host:
            return ours(*arguments, **words)
        return _left(f"{host.__name__} was replaced after enable", form, now(), *arguments, **words)

    return function


def _left(reason: str, form: Form, host: Callable[..., Any], *arguments: Any, **words: Any) -> Any:
    _host.note("diffusers", "host", reason)
    return host(*arguments, **words)


def rotated(form: Form, *arguments: Any, **words: Any) -> Any:
    """The result of a host's function of this form; a call that jitrope refuses raises InvalidInput."""
    return _rotate(form, None, *arguments, **words)[0]


def _rotate(form: Form, host: Any, *arguments: Any, **words: Any) -> tuple[Any, int]:
    q, k, tables, *other = form.read(*arguments, **words)
    form = other[0] if other else form
    q_out, k_out = apply_rope(q, k, layout=form.layout, **options(form, q, tables))
    return (form.back(q_out, arguments[0]), 1) if k is None else ((q_out, k_out), 2)


def options(form: Form, q: Tensor, tables: Tables, tokens: int | None = None) -> dict[str, Any]:
    """jitrope's words to rotate q by these tables. tokens: their whole number, if q has only a part of them.

    Raises InvalidInput if the tables do not have exactly one row of the form's width for each token. (jitrope alone
    would take longer tables.)
    """
    if q.dim() != 4 or not all(isinstance(table, Tensor) for table in tables):
        raise InvalidInput(WORDS)
    table = tables[0]
    tokens = q.shape[1 if form.layout == "bshd" else 2] if tokens is None else tokens
    width = int(form.width * q.shape[-1]) if form.width else table.shape[-1]
    if table.dim() != form.axes or table.shape[min(form.axes - 2, 1)] != tokens or table.shape[-1] != width:
        raise InvalidInput(_SHAPES)
    names = ("cos", "sin") if len(tables) == 2 else ("freqs_cis",)
    words: dict[str, Any] = {name: part.to(q.device).resolve_conj() for name, part in zip(names, tables)}
    words["rounding"] = form.rounding
    if form.rounding == "complex":
        words["rounding"] = _host.COMPLEX.get(table.dtype, "complex64")
    elif form.rounding == "promoted":
        words["rounding"] = "dtype" if q.dtype == table.dtype != torch.float32 else "fp32"
    if not form.width:
        words["rotary_dim"] = width
    return {**words, "interleaved": form.interleaved}


def pair(tables: Any) -> Tables:
    """The host's (cos, sin). It may be asked for before the projections, which the host would compute again."""
    if not isinstance(tables, (tuple, list)) or len(tables) != 2:
        raise InvalidInput(WORDS)
    if getattr(tables[0], "dtype", None) == torch.float64:
        raise InvalidInput("cos is torch.float64")
    return tables


def of_pairs(cos: Tensor, sin: Tensor) -> Tables:
    """The first cosine and the second sine of each pair, as views: half the width of a head."""
    return cos[..., 0::2], sin[..., 1::2]


def _columns(table: Tensor) -> Tables:
    """The cosines and sines of a table of 2 x 2 rotations [[cos, -sin], [sin, cos]], the last two axes: one copy."""
    return table.select(-1, 0).contiguous().unbind(-1)


def _waves(angles: Tensor) -> Tables:
    """The cosines and sines of angles in radians, computed in fp32."""
    angles = angles.float()
    return angles.cos(), angles.sin()


# ---- forms that are not one call of jitrope ------------------------------------------------------------


def _allegro(form: Form, host: Any, x: Tensor, freqs_cis: Any, positions: Any) -> tuple[Tensor, int]:
    third = x.shape[-1] // 3
    fitting = all(table.dim() == 2 and table.shape[1] == third for both in freqs_cis for table in both)
    if not fitting or not len(freqs_cis) == len(positions) == 3 or 3 * third != x.shape[-1]:
        raise InvalidInput(_SHAPES)
    for axis, ((cos, sin), ids) in enumerate(zip(freqs_cis, positions)):
        words = {"positions": ids, "rotary_dim": third, "rotary_offset": axis * third}
        x = apply_rope(x, None, cos, sin, layout="bhsd", **words)[0]
    return x, 1


def _camera(form: Form, host: Any, feats: Tensor, matrix: Tensor, rotary_emb: Any = None, inverse_rope: Any = 0) -> Any:
    turned = host(feats, matrix)
    if rotary_emb is None:
        return turned, 0
    if turned.dtype != feats.dtype:
        raise InvalidInput("the camera's dtype")
    words = options(form, turned, (rotary_emb.squeeze(1),))
    half = feats.shape[-1] // 2
    out = apply_rope(turned, None, layout="bhsd", rotary_offset=half, inverse=bool(inverse_rope), **words)[0]
    return out, 1


# ---- reading the arguments -----------------------------------------------------------------------------


def _shared(
    x: Tensor, freqs_cis: Any, use_real: bool = True, use_real_unbind_dim: int = -1, sequence_dim: int = 2, **words: Any
) -> Read:
    if words or use_real_unbind_dim not in (-1, -2) or sequence_dim not in (1, 2):
        raise InvalidInput(WORDS)
    if not use_real:
        return x, None, (freqs_cis,), COMPLEX_ROWS
    return x, None, pair(freqs_cis), _SHARED[use_real_unbind_dim, sequence_dim]


def _qwen(x: Tensor, freqs_cis: Tensor, use_real: bool = True, **words: Any) -> Read:
    if words or use_real:
        raise InvalidInput(WORDS)
    return x, None, (freqs_cis,)


def _kandinsky(x: Tensor, rope: Tensor) -> Read:
    tables = _columns(rope)
    rows = x if x.dim() == 4 else x[None]
    return rows, None, tables if rope.dim() == 6 else [table[None] for table in tables]


def _ltx(x: Tensor, freqs: Any) -> Read:
    """A pair is two neighbours, so any even part of the row can be treated as a head."""
    width = math.gcd(x.shape[-1], 128)
    x, cos, sin = (part.unflatten(-1, (-1, width)) for part in (x, *pair(freqs)))
    return x, None, (cos, sin)


def _ltx2_split(x: Tensor, freqs: Any) -> Read:
    cos, sin = (table.transpose(1, 2) for table in pair(freqs))
    if cos.dim() != 4 or 2 * cos.shape[2] * cos.shape[3] != x.shape[-1]:
        raise InvalidInput(_SHAPES)
    return x.unflatten(-1, (cos.shape[2], -1)), None, (cos, sin)


def _ernie(x: Tensor, freqs_cis: Tensor) -> Read:
    if freqs_cis.dtype != torch.float32:
        raise InvalidInput("the tables' dtype")  # the host computes cosines in that dtype
    return x, None, _waves(freqs_cis)


def _grid(x: Tensor, grid_sizes: Tensor, freqs: Tensor, time_stride: int = 1) -> Read:
    """The table (S, D / 2) of a grid: each of its axes has a part of the angles."""
    grids = grid_sizes.tolist()  # the host also waits for the device in every call
    if len(grids) != x.shape[0] or any(grid != grids[0] for grid in grids) or math.prod(grids[0]) != x.shape[1]:
        raise InvalidInput("samples of different or padded grids")
    frames, height, width = grids[0]
    small = freqs.shape[1] // 3
    first, *rest = freqs.split([freqs.shape[1] - 2 * small, small, small], dim=1)
    axes = (first[: frames * time_stride : time_stride, None, None], rest[0][:height, None], rest[1][:width])
    table = torch.cat([axis.expand(frames, height, width, -1) for axis in axes], dim=-1)
    return x.float(), None, (table.flatten(0, 2),)


# ---- the forms -----------------------------------------------------------------------------------------

# (cos, sin), or angles
SHARED = Form(_shared)
_SHARED = {
    (unbind_dim, sequence_dim): SHARED._replace(interleaved=unbind_dim == -1, layout=("bshd", "bhsd")[sequence_dim - 1])
    for unbind_dim in (-1, -2)
    for sequence_dim in (1, 2)
}
JOY = Form(lambda xq, xk, freqs_cis: (xq, xk, pair(freqs_cis)))
JOY_PLUS = JOY._replace(axes=3)
HALVES = Form(lambda x, rope: (x, None, pair(rope)), interleaved=False)
STABLE_AUDIO3 = HALVES._replace(read=lambda t, freqs: (t, None, _waves(freqs[-t.shape[1] :])), width=0)
MINIMAX_MUSIC3 = HALVES._replace(width=0, rounding="dtype")
MINIMAX_H3 = MINIMAX_MUSIC3._replace(read=lambda x, cos, sin: (x, None, (cos, sin)))
ERNIE = MINIMAX_MUSIC3._replace(read=_ernie, axes=4)
MOCHI = Form(lambda x, freqs_cos, freqs_sin: (x, None, (freqs_cos[None], freqs_sin[None])), axes=4, width=0.5)
WAN = Form(
    lambda x, freqs_cos, freqs_sin: (x, None, of_pairs(freqs_cos, freqs_sin)), axes=4, width=0.5, rounding="promoted"
)
HELIOS = WAN._replace(read=lambda x, freqs_cis: (x, None, of_pairs(*freqs_cis.chunk(2, dim=-1))), axes=3)
LTX = Form(_ltx, axes=4, back=lambda out, x: out.flatten(2))
LTX2_SPLIT = LTX._replace(read=_ltx2_split, width=0.5, interleaved=False, rounding="addcmul")
ALLEGRO = Form(by=_allegro)

# cos + i sin
COMPLEX_ROWS = Form(lambda x, freqs_cis: (x, None, (freqs_cis,)), axes=3, width=0.5, rounding="complex")
QWEN = COMPLEX_ROWS._replace(read=_qwen, axes=2)
WAN_ANIMATE2 = QWEN._replace(read=_grid, rounding="complex128")
ANY_FLOW = COMPLEX_ROWS._replace(
    read=lambda x, freqs: (x, None, (freqs.squeeze(1),)), layout="bhsd", rounding="complex128"
)
SANA_WM = ANY_FLOW._replace(
    read=lambda x, freqs: (x.permute(0, 1, 3, 2), None, (freqs.squeeze(1),)),
    rounding="complex",
    back=lambda out, x: out.permute(0, 1, 3, 2),
)
SANA_WM_CAMERA = SANA_WM._replace(width=0.25, by=_camera)

# 2 x 2 rotations [[cos, -sin], [sin, cos]]
HIDREAM = Form(lambda xq, xk, freqs_cis: (xq, xk, _columns(freqs_cis)), axes=4, width=0.5)
PRX = HIDREAM._replace(
    read=lambda xq, freqs_cis: (xq, None, [x.squeeze(1) for x in _columns(freqs_cis)]), axes=3, layout="bhsd"
)
KANDINSKY6 = HIDREAM._replace(read=_kandinsky, back=lambda out, x: out.view(x.shape))
KANDINSKY5 = KANDINSKY6._replace(
    # The host rounds the fp32 sum to bf16 for every dtype of x.
    read=lambda x, rope: _kandinsky(x if x.dtype == torch.bfloat16 else x.float(), rope),
    back=lambda out, x: out.view(x.shape).to(torch.bfloat16),
)
