"""diffusers: rope of its transformers by jitrope, in several of them together with the norms of q and k.

>>> from jitrope.integrations import diffusers as jitrope_diffusers
>>> import diffusers
>>> model = diffusers.FluxTransformer2DModel(num_layers=1, num_single_layers=1, num_attention_heads=1)
>>> report = jitrope_diffusers.enable(model)  # or a pipeline
>>> print(report)
2 functions replaced; 0 calls since; 0 left to diffusers
>>> jitrope_diffusers.disable()
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import nn

from ...base.arguments import flag, refuse
from ...base.errors import InvalidInput, JitropeError
from .. import _host
from .fused import COPIES, FUSED, RMS_NORM, Call
from .ropes import ROPES

__all__ = ["disable", "enable"]


@_host.alone
def enable(model_or_pipeline: Any, *, fuse_norm: bool = True) -> _host.Report:
    """Use jitrope's rope in a transformer, or in every transformer and ControlNet of a pipeline.

    The functions and processors of their classes are replaced in this process, so for all models of these classes.
    Enabling twice changes nothing. Call it again for models with other processors.

    Args:
        model_or_pipeline: an `nn.Module`, also compiled or wrapped, or a pipeline with `components`.
        fuse_norm: True: RMSNorm of q and k and rope are one launch where that is known to give the host's bits.
            False: only rope is replaced.

    Returns:
        A report of what is replaced and what is left. `calls["fused"]` counts the calls of processors with norm and
        rope in one launch, "jitrope" those of other rope functions. It is a context manager.

    Raises:
        InvalidInput: model_or_pipeline is no model and has none, or fuse_norm is not True or False.
        JitropeError: nothing in the model is replaced.
    """
    report, fuse_norm = _host.Report("diffusers"), flag("enable", "fuse_norm", fuse_norm)
    for cls in dict.fromkeys(_classes(model_or_pipeline)):
        _take(report, cls, fuse_norm)
    if not report.replaced:
        nothing = f"no attention processors of diffusers {_version()}; transformers.enable takes models of transformers"
        reasons = "; ".join(f"{where}: {why}" for where, why in report.left.items())
        raise JitropeError(f"{type(model_or_pipeline).__name__}: {reasons or nothing}")
    return report


disable = _host.disabler(__name__)


def _classes(model_or_pipeline: Any) -> Iterator[Any]:
    """The classes of all attention processors, and of modules that rotate."""
    components = getattr(model_or_pipeline, "components", None)
    parts = components.values() if isinstance(components, dict) else (model_or_pipeline,)
    modules = [module for part in parts if isinstance(part, nn.Module) for module in part.modules()]
    if not modules:
        refuse("enable", "model_or_pipeline", model_or_pipeline, "a model or pipeline; transformers has its own enable")
    for module in modules:
        if callable(processor := getattr(module, "processor", None)):
            yield next(cls for cls in type(processor).__mro__ if "__call__" in vars(cls))
        yield from (cls for cls in type(module).__mro__ if _ropes(cls))


def _name(cls: type) -> str:
    """The name of a class of diffusers up to "AttnProcessor"; "" for other classes."""
    name = cls.__name__.partition("AttnProcessor")[0] or cls.__name__
    return name if cls.__module__.startswith("diffusers.models.") else ""


def _ropes(cls: type) -> list[tuple[Callable[..., Any], Any, str]]:
    """Our rope functions for a class, and the module and name of the host's; some classes import theirs in a call."""
    ropes = [rope for rope, classes in ROPES.items() if _name(cls) in classes.split()]
    own, shared = sys.modules.get(cls.__module__), sys.modules.get("diffusers.models.embeddings")
    return [(ours, own if hasattr(own, name) else shared, name) for ours, name in ropes]


def _take(report: _host.Report, cls: Any, fuse_norm: bool) -> None:
    """Replace the functions and the `__call__` of a class, or report why they are left."""
    name, ropes = _name(cls), _ropes(cls)
    if not ropes and name not in FUSED:
        foreign = "not a processor of diffusers; call jitrope.apply_rope in it"
        report.left[f"{cls.__module__}.{cls.__qualname__}"] = "jitrope knows no rope in it" if name else foreign
    for ours, module, function in ropes:
        if why := _left(getattr(module, function, None)):
            report.left[f"{module.__name__}.{function}"] = why
            return
        report.replace(module, function, ours, "rope")
    if name in FUSED:
        _fuse(report, cls, fuse_norm, [place for _, *place in ropes])


def _fuse(report: _host.Report, cls: Any, fuse_norm: bool, ropes: list[Any]) -> None:
    original, where = cls.__call__, f"{cls.__module__}.{cls.__qualname__}.__call__"
    norm, copy = importlib.import_module("diffusers.models.normalization").RMSNorm, COPIES.get(_host.text_of(original))
    by_torch = all(_host.own("torch", function) for function in (nn.RMSNorm.forward, F.rms_norm))
    if not fuse_norm:
        _host.restore("diffusers", [original])
        if not ropes:
            report.left[where] = "its rope is in its own code"
    elif why := _left(original):
        report.left[where] = why
    elif not by_torch or _host.text_of(_host.own("diffusers", norm.forward)) not in RMS_NORM:
        report.left[where] = f"jitrope does not know RMSNorm of diffusers {_version()} or of torch"
    elif copy is None:
        report.left[where] = f"jitrope does not know its code in diffusers {_version()}"
    else:
        called = [*ropes, (norm, "forward"), (nn.RMSNorm, "forward"), (F, "rms_norm")]
        report.replace_method(cls, "__call__", partial(_fused, copy, cls, ropes, called), "norm and rope")


def _left(function: Any) -> str:
    """Why a function is left: it is missing, or another library has replaced it; else ""."""
    if function is None:
        return f"diffusers {_version()} does not have it"
    return "" if _host.own("diffusers", function) else f"it is {_host.module_of(function)}'s"


def _fused(copy: Any, cls: type, ropes: Any, called: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """Ours in place of a class's `__call__`, now `original`. called: (holder, name) of what that calls."""
    given = _host.in_words_of(original, partial(Call, sys.modules[cls.__module__]))
    known = [(holder, name, f, _host.original(f)) for holder, name in called for f in [getattr(holder, name)]]

    def call(*arguments: Any, **words: Any) -> Any:
        for holder, name, function, theirs in known:
            if (found := getattr(holder, name)) is not function and found is not theirs:
                raise InvalidInput(f"{holder.__name__}.{name} was replaced after enable")
        return copy(given(*arguments, **words))

    def left(reason: str, *arguments: Any, **words: Any) -> Any:
        _host.note("diffusers", "host", reason, 0 if ropes else 1)  # the rope functions count themselves
        return original(*arguments, **words)

    return _host.or_else("diffusers", call, left)


def _version() -> str:
    return str(importlib.import_module("diffusers").__version__)
