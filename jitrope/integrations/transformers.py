"""transformers: rope of its model files, whichever variant a file has.

>>> from jitrope.integrations import transformers as jitrope_transformers
>>> report = jitrope_transformers.enable(model)                          # until jitrope_transformers.disable()
>>> q, k = jitrope_transformers.apply_rotary_pos_emb(q, k, cos, sin)     # or the plain function

Every model file has rope functions of its own, under the same few names: of halves or interleaved pairs, with tables of
full or half width or with a half that is not read, rotating the whole head or a part. Names do not tell which. So
`enable` calls each function that it finds, on small CPU tensors, and replaces it if one of jitrope's variants gives the
same bits. The other functions stay, and the report says why.

With the `kernels` library: `register_kernel_mapping(kernel_mapping())`, then `kernelize(model, mode=...)`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..base.errors import InvalidInput, JitropeError
from . import _host
from ._host import Function, Report
from ._variants import Variant, recognise, replacement, rotate, rotate_pair

HALVES = Variant(partial=True, widens=True)
"""What `apply_rotary_pos_emb` computes."""

_VISION = HALVES._replace(widens=False)
INTERLEAVED = HALVES._replace(interleaved=True, interleaved_out=True)
"""What `apply_rotary_pos_emb` computes with interleaved=True."""

calls = _host.calls["transformers"]
"""Calls so far, by "jitrope" and "host"; one of a compiled model counts when it is traced."""


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
        q and k in fp32 arithmetic rounded once, in the dtype that q and the tables promote to. Plain torch computes
        what jitrope refuses (fp64, tables that require a gradient).

    Raises:
        RuntimeError: the shapes do not fit together, for plain torch either.
        CompileError: the kernel could not be built.
    """

    def in_torch(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, axis: int) -> Any:
        tables = cos.unsqueeze(axis), sin.unsqueeze(axis)
        return tuple(None if x is None else _host.in_torch(x, *tables, interleaved) for x in (q, k))

    ours = partial(rotate, INTERLEAVED if interleaved else HALVES)
    return _host.take("transformers", ours, in_torch, q, k, cos, sin, unsqueeze_dim)


def apply_rotary_pos_emb_single(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    """`apply_rotary_pos_emb` of Gemma 3n's and Gemma 4's files: one tensor alone, (B, H, S, D). Errors are its own."""
    return apply_rotary_pos_emb(x, None, cos, sin, unsqueeze_dim)[0]


def apply_rotary_pos_emb_vision(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """That of the Qwen-VL vision towers: q, k (S, H, D) or (B, S, H, D); cos, sin (S, D) or (B, S, D), any dtype.

    q and k keep their dtypes. The errors are those of `apply_rotary_pos_emb`.
    """

    def in_torch(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, axis: int) -> Any:
        tables = cos.unsqueeze(axis).float(), sin.unsqueeze(axis).float()
        return tuple(_host.in_torch(x.float(), *tables).to(x.dtype) for x in (q, k))

    out: tuple[Tensor, Tensor] = _host.take("transformers", partial(rotate_pair, _VISION), in_torch, q, k, cos, sin, -2)
    return out


# ---- in place of the hosts' ----------------------------------------------------------------------------

_NAMES = re.compile(r"\w*apply_\w*rotary\w*")


def enable(model: nn.Module | None = None) -> Report:
    """Let jitrope rotate in a model, or in every model whose file is loaded.

    A model file's functions are replaced for all models of that file, wherever they are held. Enabling twice changes
    nothing.

    Args:
        model: whose files; None: all that are loaded.

    Returns:
        A report: `replaced` (each function's name and variant), `left` (functions that stay the host's, and why),
        `calls` since, by jitrope and, where dtypes or shapes are not jitrope's, by the host, and the `reasons`. It is
        a context manager.

    Raises:
        JitropeError: there is nothing that jitrope can replace; the message says what was found.
    """
    found = [
        (module, name, function)
        for module in _files(model)
        for name, function in list(vars(module).items())
        if _NAMES.fullmatch(name) and callable(function)
    ]
    variants: dict[Function, Variant | str] = {}
    for _, _, function in found:
        variants[function] = _host.placed[function].what if function in _host.placed else recognise(function)
    replaced, left, own = {}, {}, []
    for module, name, function in found:
        label, variant = f"{module.__name__}.{name}", variants[function]
        if isinstance(variant, str):
            left[label] = variant
            continue
        replaced[label] = variant
        if getattr(module, name) is function:  # else it was replaced in another module
            own.append(_host.put("transformers", module, name, replacement(function, variant), variant))
    if not replaced:
        why = "; ".join(f"{name}: {why}" for name, why in left.items()) or "no rotary function"
        where = "the loaded model files have" if model is None else f"the files of {type(model).__name__} have"
        raise JitropeError(f"jitrope replaces nothing in transformers: {where} {why}")
    return Report("transformers", replaced, left, [ours for ours in own if ours is not None])


def disable(model: nn.Module | None = None) -> None:
    """Give the functions of a model's files, or all, back. What is not replaced stays as it is."""
    if model is None:
        _host.disable("transformers")
    else:
        held = [function for module in _files(model) for function in vars(module).values() if callable(function)]
        _host.restore([ours for ours in list(_host.placed) if any(ours is function for function in held)])


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
        cls = type(self)
        if cls is RotaryPosEmb:
            return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)
        arguments = q, k, cos, sin, unsqueeze_dim
        return _host.take("transformers", partial(_rotate_as, cls), partial(cls.forward, self), *arguments)


def _rotate_as(cls: type[nn.Module], *arguments: Any) -> Any:
    variant = _variant_of(cls)
    if isinstance(variant, str):
        raise InvalidInput(variant)
    return rotate_pair(variant, *arguments)


_variants: dict[type[nn.Module], Variant | str] = {}


@torch.compiler.assume_constant_result
def _variant_of(cls: type[nn.Module]) -> Variant | str:
    if cls not in _variants:
        _variants[cls] = recognise(partial(cls.forward, None))
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
