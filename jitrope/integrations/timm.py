"""timm: rope of its vision transformers (EVA-02, DINOv3, Perception Encoder, RoPE-ViT, NaFlex, SAM), q and k together.

>>> from jitrope.integrations import timm as jitrope_timm
>>> report = jitrope_timm.enable()
>>> jitrope_timm.disable()

timm rotates q, then k, and joins each with its class and register tokens, which are not rotated. The code of its
attention classes is changed: one launch rotates both and copies those tokens. The statements of timm stay in the code,
for calls that jitrope refuses. Results have the bits of timm. Learned tables (RoPE-Mixed) get their gradient.
"""

from __future__ import annotations

import ast
import copy
import importlib
import re
from functools import partial
from itertools import chain, pairwise
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from ..api import apply_rope
from ..base.errors import InvalidInput, JitropeError
from . import _host
from ._rewrite import Source

_MODULE = "timm.layers.pos_embed_sincos"
_ATTENTION = {
    "timm.layers.attention": "AttentionRope",
    "timm.models.eva": "EvaAttention",
    "timm.layers.attention_pool2d": "RotAttentionPool2d",
    "timm.models.vision_transformer_sam": "Attention",
}
"""The classes whose forward rotates q, then k, by their modules."""


def apply_rot_embed(x: Tensor, sin_emb: Tensor, cos_emb: Tensor, half: bool = False) -> Tensor:
    """Rotate whole heads by tables that broadcast to x; `apply_rot_embed_cat` and `apply_rot_embed_list` call it.

    >>> cos, sin = jitrope.tables.cos_sin(16, jitrope.tables.inv_freq(rotary_dim=64)[0], width="full")
    >>> x = jitrope_timm.apply_rot_embed(torch.randn(2, 8, 16, 64), sin, cos, half=True)

    Args:
        x: (..., S, D), at most four axes, as (B, H, S, D); any strides, nothing is copied.
        sin_emb, cos_emb: (..., S, D), broadcastable to x: an angle for each element, as (S, D), with a table for each
            head (H, S, D), or with one for each image (B, 1, S, D). They may require a gradient.
        half: the pairs are halves; False: neighbours, and the tables repeat each angle.

    Returns:
        x rotated, in its dtype, with the bits of timm: products and their sum are rounded to the dtype that x and the
        tables promote to. The errors are those of `jitrope.apply_rope`.
    """
    return _rotate(x, None, sin_emb, cos_emb, half)[0]


@_host.alone
def enable() -> _host.Report:
    """Replace timm's rope for all models, and the code of its attention classes, so that q and k are one launch.

    Raises:
        ImportError: timm is not installed.
        JitropeError: this version of timm has another `apply_rot_embed`, or none, or it was replaced; jitrope has
            replaced nothing.
    """
    host = getattr(_host.load("timm", _MODULE), "apply_rot_embed", None)
    report = _host.enable("timm", {f"{_MODULE}:apply_rot_embed": apply_rot_embed if host is None else _like(host)})
    for module, name in _ATTENTION.items():
        place = f"{module}.{name}.forward"
        try:
            _recode(getattr(importlib.import_module(module), name).forward, report)
        except (ImportError, AttributeError):
            report.left[place] = "this version of timm has no such class"
        except ValueError as error:
            report.left[place] = f"q and k are separate launches: {error}"
        else:
            report.replaced[place] = "q and k in one launch"
    return report


disable = _host.disabler(__name__)


def _like(host: _host.Function) -> _host.Function:
    """Our function with the dtype of the host's results, found by a call with tables for each head."""
    host = _host.placed[host].original if host in _host.placed else host
    if not _host.own("timm", host):
        raise JitropeError(f"apply_rot_embed is {_host.module_of(host)}'s, not timm's: it was replaced before enable")
    x = torch.arange(48, dtype=torch.bfloat16, device="cpu").view(2, 2, 3, 4) / 10
    sin, cos = x[0].float().sin(), x[1].float().cos()
    for ours in (apply_rot_embed, _promoted):
        try:
            want, made = host(x, sin, cos, half=True), ours(x, sin, cos, half=True)
        except TypeError:  # it has no `half`
            break
        if made.dtype == want.dtype and torch.equal(made, want):
            return ours
    raise JitropeError("apply_rot_embed of this version of timm has other results; jitrope knows those since 1.0.21")


def _promoted(x: Tensor, sin_emb: Tensor, cos_emb: Tensor, half: bool = False) -> Tensor:
    """`apply_rot_embed` before timm 1.0.31, whose result has the dtype that x and the tables promote to."""
    if isinstance(x, Tensor):
        x = x.to(torch.promote_types(x.dtype, cos_emb.dtype))
    return apply_rot_embed(x, sin_emb, cos_emb, half)


def _rotate(q: Tensor, k: Tensor | None, sin: Tensor, cos: Tensor, half: bool, unrotated: int = 0) -> list[Tensor]:
    """q and k, (B, H, S, D) or with fewer axes, rotated behind their first tokens."""
    if not isinstance(q, Tensor):  # torch.fx traces with stand-ins
        raise InvalidInput(f"x is a {type(q).__name__}, not a tensor")
    shape = (*q.shape[:-2], q.shape[-2] - unrotated, q.shape[-1]) if q.dim() > 1 else ()
    broadcast = 0 < cos.dim() <= len(shape) <= 4 and all(n in (1, m) for n, m in zip(cos.shape[::-1], shape[::-1]))
    if not broadcast or cos.shape != sin.shape or cos.shape[-1] != shape[-1]:
        raise InvalidInput(f"tables of shapes {tuple(cos.shape)} and {tuple(sin.shape)} for x {tuple(q.shape)}")

    def four(x: Tensor) -> Tensor:
        return x.reshape((1,) * (4 - x.dim()) + x.shape)

    cos, sin = (four(table).expand(-1, -1, shape[-2], -1).transpose(1, 2) for table in (cos, sin))
    rounding = "dtype" if q.dtype == cos.dtype == sin.dtype != torch.float32 else "fp32"
    words: Any = {"layout": "bhsd", "interleaved": not half, "unrotated": unrotated, "rounding": rounding}
    out = apply_rope(four(q), None if k is None else four(k), cos, sin, **words)
    return [y.reshape(x.shape) for x, y in zip((q, k), out) if x is not None and y is not None]


# ---- one launch for q and k ----------------------------------------------------------------------------

_ROTATION = re.compile(
    r"(\w+) = (?:torch\.cat\(\[\1\[:, :, :(\w+), :\], )?"
    r"apply_rot_embed_cat\(\1(?(2)\[:, :, \2:, :\]), ([\w., =]+)\)(?(2)\], dim=2\))\.type_as\((\w+)\)"
)
"""A statement that rotates x, whole or behind its first tokens, as `ast.unparse` writes it."""

_NAME, _CALLED = "_jitrope_rotated", "apply_rot_embed_cat"
"""The names of `_of_timm` in timm's modules, and of the function that they call."""


def _recode(forward: FunctionType, report: _host.Report) -> None:
    """Change the code of a forward. Raises ValueError with the reason if it cannot be changed."""
    module, code = importlib.import_module(_MODULE), None
    if forward not in _host.placed:
        source = Source(forward, {})
        tree = copy.deepcopy(source.tree)
        if not _paired(tree):
            raise ValueError("it does not rotate q, then k, in statements that jitrope knows")
        code = source.code_of(tree)
    stock = _host.own("timm", getattr(module, _CALLED, None))
    # It stays there, for a forward that runs while it is restored.
    forward.__globals__[_NAME] = partial(_of_timm, module, stock, module.apply_rot_embed)
    if code is not None:
        report.recode(forward, code, "q and k")


def _paired(tree: ast.AST) -> bool:
    """Put a call of `_of_timm` before two statements that rotate q, then k. They stay, for calls that it refuses."""
    found = False
    for node in list(ast.walk(tree)):
        body = getattr(node, "body", None)
        for i, two in enumerate(pairwise(body) if isinstance(body, list) else ()):
            q, k = map(_read, two)
            if q and k and q[1:] == k[1:]:
                call = f"{_NAME}({_CALLED}, {q[0]}, {k[0]}, {', '.join(q[1:])})"
                made: Any = ast.parse(f"_made = {call}\nif _made is None: pass\nelse: {q[0]}, {k[0]} = _made").body
                made[1].body = list(two)
                for part in chain.from_iterable(map(ast.walk, made)):
                    ast.copy_location(part, two[0])
                body[i : i + 2] = made  # type: ignore[index]
                found = True
                break
    return found


def _read(statement: ast.stmt) -> tuple[str, ...]:
    """(x, the number of its first tokens, the tensor whose dtype it gets, the other arguments), or ()."""
    match = _ROTATION.fullmatch(ast.unparse(statement))
    return (match[1], match[2] or "0", match[4], match[3]) if match else ()


def _of_timm(host: ModuleType, stock: Any, ours: Any, called: Any, *heads: Any, **words: Any) -> list[Tensor] | None:
    """`_rotated`, if `called` is timm's `stock` and host's `apply_rot_embed` is ours; None if the user replaced one."""
    if called is not stock or host.apply_rot_embed is not ours:
        _host.note("timm", "host", "apply_rot_embed_cat or apply_rot_embed was replaced")
        return None
    return _rotated(*heads, **words)


def _rotated(q: Tensor, k: Tensor, first: int, like: Tensor, emb: Tensor, half: bool = False) -> list[Tensor] | None:
    """q and k rotated behind their `first` tokens, in the dtype of `like`; None if jitrope refuses the call."""
    try:
        sin, cos = emb.chunk(2, -1)
        turned = _rotate(q, k, sin, cos, half, first)
    except InvalidInput:  # timm's statements call `apply_rot_embed`, which counts the refusal
        return None
    _host.note("timm", "jitrope", device=q.device.type)
    return [x.type_as(like) for x in turned]
