"""transformers: rope of its model files, whichever variant a file has.

>>> from jitrope.integrations import transformers as jitrope_transformers
>>> report = jitrope_transformers.enable(model)                          # until jitrope_transformers.disable()
>>> q, k = jitrope_transformers.apply_rotary_pos_emb(q, k, cos, sin)     # or the plain function

Every model file has rope functions of its own, under the same few names: of halves or interleaved pairs, with tables
of full or half width or of which half is read, turning forwards or back, the whole head or a part. Names do not tell
which. So `enable` calls each function it finds once, on small CPU tensors, and replaces it where one of jitrope's
variants gives the same bits; the others stay, and the report says why.

With the `kernels` library: `register_kernel_mapping(kernel_mapping())`, then `kernelize(model, mode=...)`.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..base.errors import JitropeError
from ._patch import _holders
from ._variants import Function, Rotated, Variant, mixed, recognise, replacement, rotate

HALVES = Variant(partial=True, widens=True, alone="pair")
"""What `apply_rotary_pos_emb` computes."""

_VISION = HALVES._replace(widens=False)
INTERLEAVED = HALVES._replace(interleaved=True, interleaved_out=True)
"""What `apply_rotary_pos_emb` computes with interleaved=True."""

calls: Counter[str] = Counter()
"""Calls so far, by "jitrope" and "host"; one of a compiled model counts when it is traced."""


@torch.compiler.assume_constant_result
def _count(who: str) -> None:
    # Dynamo runs this as it traces. Tracing it would guard on the number, and compile every call anew.
    calls[who] += 1


def _taken(v: Variant | None, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, axis: int) -> Rotated | None:
    """`rotate`, counted."""
    out = rotate(v, q, k, cos, sin, axis)
    _count("host" if out is None else "jitrope")
    return out


def _in_torch(v: Variant, x: Tensor, cos: Tensor, sin: Tensor, axis: int) -> Tensor:
    """What `rotate` leaves, for the plain functions: full tables, pairs as they come."""
    cos, sin = cos.unsqueeze(axis), sin.unsqueeze(axis)
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    x0, x1 = (turned[..., ::2], turned[..., 1::2]) if v.interleaved else turned.chunk(2, -1)
    partner = torch.stack((-x1, x0), -1).flatten(-2) if v.interleaved else torch.cat((-x1, x0), -1)
    y = turned * cos + partner * sin
    return torch.cat((y, rest), -1) if rest.shape[-1] else y


# ---- the plain functions -------------------------------------------------------------------------------


def apply_rotary_pos_emb(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1, *, interleaved: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The function of Llama's file and most others; W < D turns the first W elements, as GPT-NeoX's.

    Args:
        q, k: (B, H, S, D), or (B, S, H, D) with unsqueeze_dim=2; any strides, nothing is copied. k may have its own
            number of heads, or be None, which comes back in its place.
        cos, sin: (B or 1, S, W), an angle an element, W <= D even. Where they are wider than q, q is converted.
        interleaved: pairs are neighbours (Cohere, ERNIE 4.5 VL), not halves; the tables are laid out alike.

    Returns:
        q and k in fp32 arithmetic rounded once, in the dtype that q and the tables promote to. What the kernels do
        not take (fp64, tables that require a gradient) is computed in plain torch, whose errors those are.
    """
    v = INTERLEAVED if interleaved else HALVES
    out = _taken(v, q, k, cos, sin, unsqueeze_dim)
    if out is None:
        q = _in_torch(v, q, cos, sin, unsqueeze_dim)
        return q, None if k is None else _in_torch(v, k, cos, sin, unsqueeze_dim)
    return out


def apply_rotary_pos_emb_single(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    """`apply_rotary_pos_emb` of Gemma 3n's and Gemma 4's files: one tensor alone, (B, H, S, D). Errors are its own."""
    return apply_rotary_pos_emb(x, None, cos, sin, unsqueeze_dim)[0]


def apply_rotary_pos_emb_vision(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """That of the Qwen-VL vision towers: q, k (S, H, D) or (B, S, H, D); cos, sin (S, D) or (B, S, D), any dtype.

    q and k keep their dtypes. What the kernels do not take is computed in plain torch, whose errors those are.
    """
    out = _taken(_VISION, q, k, cos, sin, -2)
    if out is None:
        rotated = [_in_torch(HALVES, x.float(), cos.float(), sin.float(), -2).to(x.dtype) for x in (q, k)]
        return rotated[0], rotated[1]
    return out  # type: ignore[return-value]


def apply_multimodal_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: list[int], unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor | None]:
    """That of Qwen2-VL and Qwen2.5-VL before transformers 5.6: three tables, for time, height and width.

    Args:
        q, k: as for `apply_rotary_pos_emb`.
        cos, sin: (3, B, S, W). Of each half of W, the first mrope_section[0] columns are the first table's, the next
            mrope_section[1] the second's, and so on, in turn.
        mrope_section: widths that add up to W / 2 (arXiv:2409.12191).

    Returns:
        q and k as of `apply_rotary_pos_emb`, whose errors are those here.
    """
    return apply_rotary_pos_emb(q, k, mixed(cos, mrope_section), mixed(sin, mrope_section), unsqueeze_dim)


# ---- in place of the hosts' ----------------------------------------------------------------------------

_NAMES = re.compile(r"\w*apply_\w*rotary\w*")
_placed: dict[Function, tuple[str, Function, Variant]] = {}
"""Our functions that stand for a host's now: its name, itself, what it computes."""


@dataclass
class Report:
    """What `enable` did. As a context manager it undoes that, and nothing that was done before it.

    Attributes:
        replaced: by a function's name, what it computes.
        left: by a function's name, why it stays the host's.
    """

    replaced: dict[str, Variant] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    _own: list[Function] = field(default_factory=list)
    _before: Counter[str] = field(default_factory=Counter)

    @property
    def calls(self) -> dict[str, int]:
        """Calls of replaced functions since, whoever enabled them: taken by jitrope, and left to the host."""
        return {who: calls[who] - self._before[who] for who in ("jitrope", "host")}

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *_: object) -> None:
        _restore(self._own)

    def __str__(self) -> str:
        replaced = "; ".join(f"{name} ({variant})" for name, variant in self.replaced.items()) or "nothing"
        left = "".join(f"; {name} is left alone: {why}" for name, why in self.left.items())
        return f"jitrope replaces {replaced}{left}; calls so far: {self.calls}"


def enable(model: nn.Module | None = None) -> Report:
    """Let jitrope rotate in a model, or in every model whose file is loaded.

    A model file's functions are replaced for all models of that file, wherever they are held. Enabling twice changes
    nothing.

    Args:
        model: whose files; None: all that are loaded.

    Returns:
        A report: `replaced` (each function's name and variant), `left` (functions that stay the host's, and why) and
        `calls` since, by jitrope and, where dtypes or shapes are not jitrope's, by the host. It is a context manager.

    Raises:
        JitropeError: there is nothing that jitrope can replace; the message says what was found.
    """
    report = Report()
    for module in _files(model):
        for name, function in list(vars(module).items()):
            if not (_NAMES.fullmatch(name) and callable(function)):
                continue
            label = f"{module.__name__}.{name}"
            if placed := _placed.get(function):
                report.replaced[label] = placed[2]
                continue
            variant = recognise(function)
            if isinstance(variant, str):
                report.left[label] = variant
                continue
            ours = replacement(function, variant, _taken)
            ours.__name__ = ours.__qualname__ = name
            ours.__module__ = module.__name__  # so it pickles as the host's, by reference
            _placed[ours] = (name, function, variant)
            for holder in _holders(name, function):
                setattr(holder, name, ours)
            report.replaced[label] = variant
            report._own.append(ours)
    if not report.replaced:
        found = "; ".join(f"{name}: {why}" for name, why in report.left.items()) or "no rotary function"
        where = "the loaded model files have" if model is None else f"the files of {type(model).__name__} have"
        raise JitropeError(f"jitrope replaces nothing in transformers: {where} {found}")
    report._before = calls.copy()  # a probed function may call another that is replaced
    return report


def disable(model: nn.Module | None = None) -> None:
    """Give the functions of a model's files, or all, back. What is not replaced stays as it is."""
    if model is None:
        _restore(list(_placed))
    else:
        held = [function for module in _files(model) for function in vars(module).values() if callable(function)]
        _restore([ours for ours in list(_placed) if any(ours is function for function in held)])


def _restore(functions: Iterable[Function]) -> None:
    for ours in functions:
        if placed := _placed.pop(ours, None):
            name, host, _ = placed
            for holder in _holders(name, ours):
                setattr(holder, name, host)


def _files(model: nn.Module | None) -> Iterator[ModuleType]:
    """The modules that define a model's classes; of none, all of transformers' and of remote code that are loaded."""
    if model is None:
        names = [n for n in list(sys.modules) if n.startswith(("transformers.models.", "transformers_modules."))]
    else:
        names = [base.__module__ for cls in {type(m) for m in model.modules()} for base in cls.__mro__]
        names = sorted({n for n in names if n.split(".")[0] not in ("torch", "builtins", "jitrope")})
    for name in names:
        module = sys.modules.get(name)
        if isinstance(module, ModuleType):
            yield module


# ---- the kernels library -------------------------------------------------------------------------------


class RotaryPosEmb(nn.Module):
    """The layer for `kernels`, which puts this `forward` into its module of a host's function.

    Models share the name "rotary_pos_emb" for functions that compute different things; so the function whose place
    is taken, that of the module's class, is recognised at its first call, and keeps what is not jitrope's.
    """

    can_torch_compile = True
    has_backward = True

    def forward(self, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        """As the host's function, or, by itself, `apply_rotary_pos_emb`: q and k (B, H, S, D). Errors are theirs."""
        if type(self) is RotaryPosEmb:
            return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)
        variant = _variant_of(type(self))
        out = _taken(variant, q, k, cos, sin, unsqueeze_dim)
        if out is None:
            return type(self).forward(self, q, k, cos, sin, unsqueeze_dim)
        return out[0] if k is None and variant.alone == "tensor" else out  # type: ignore[union-attr]


_variants: dict[type[nn.Module], Variant | None] = {}


@torch.compiler.assume_constant_result
def _variant_of(cls: type[nn.Module]) -> Variant | None:
    if cls not in _variants:
        variant = recognise(partial(cls.forward, None))
        _variants[cls] = None if isinstance(variant, str) else variant
    return _variants[cls]


@dataclass(frozen=True)
class Repository:
    """Where `kernels` gets the layer: from here, with nothing to download."""

    layer_name: str = "RotaryPosEmb"

    def load(self) -> type[nn.Module]:
        """The layer's class, as `kernels` asks for it."""
        return RotaryPosEmb


def kernel_mapping(*devices: str) -> dict[str, dict[str, Any]]:
    """A mapping for `kernels.register_kernel_mapping` or `use_kernel_mapping`: jitrope in every mode.

    >>> kernels.register_kernel_mapping(kernel_mapping())
    >>> kernels.kernelize(model, mode=kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE)

    For devices of these types; "cuda" if none is given. `jitrope.integrations.transformers.calls` counts the calls.
    """
    return {"rotary_pos_emb": {device: Repository() for device in devices or ("cuda",)}}
