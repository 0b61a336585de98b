"""diffusers: rope of its transformers by jitrope, in several of them together with the norms of q and k.

>>> from jitrope.integrations import diffusers as jitrope_diffusers
>>> import diffusers
>>> model = diffusers.FluxTransformer2DModel(num_layers=1, num_single_layers=1, num_attention_heads=1)
>>> report = jitrope_diffusers.enable(model)  # or a pipeline
>>> print(report)
2 functions replaced; 0 calls since; 0 left to diffusers
>>> jitrope_diffusers.disable(model)
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn

from ...base.arguments import flag, refuse
from ...base.errors import InvalidInput, JitropeError
from .. import _host
from .fused import COPIES, FUSED, Call
from .norms import unknown
from .ropes import LEFT, ROPES

__all__ = ["disable", "enable"]

Rope = tuple[Callable[..., Any], Any, str]  # ours, the module with the host's, and its name


@_host.alone
def enable(model_or_pipeline: Any, *, fuse_norm: bool = True) -> _host.Report:
    """Use jitrope's rope in a transformer, or in every transformer and ControlNet of a pipeline.

    The functions and attention processors of their classes are replaced in this process, so for all models of these
    classes. Enabling twice changes nothing. Call it again for models with other processors.

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
    found = Counter(_classes("enable", model_or_pipeline))
    try:
        for cls in found:
            _take(report, cls, fuse_norm)
        if not report.replaced:
            raise JitropeError(_nothing(model_or_pipeline, report))
    except BaseException:
        report.__exit__()
        raise
    return report


@_host.alone
def disable(model_or_pipeline: Any) -> None:
    """Restore diffusers' functions in a model or a pipeline, and in all other models that use them.

    Raises:
        InvalidInput: model_or_pipeline is no model and has none.
    """
    for cls in set(_classes("disable", model_or_pipeline)):
        functions = [getattr(module, name) for _, module, name in _ropes(cls)]
        _host.restore("diffusers", [cls.__call__, *functions])


def _classes(caller: str, model_or_pipeline: Any) -> Iterator[type]:
    """The classes of all attention processors, and of modules that rotate."""
    components = getattr(model_or_pipeline, "components", None)
    parts = components.values() if isinstance(components, dict) else (model_or_pipeline,)
    models = [part for part in parts if isinstance(part, nn.Module)]
    if not models and not isinstance(model_or_pipeline, nn.Module):
        other = _host.of_other("diffusers", model_or_pipeline)
        refuse(caller, "model_or_pipeline", model_or_pipeline, f"a model, or a pipeline that has one{other}")
    for module in (module for model in models for module in model.modules()):
        processor = getattr(module, "processor", None)
        if callable(processor):
            yield next(cls for cls in type(processor).__mro__ if "__call__" in vars(cls))
        yield from (cls for cls in type(module).__mro__ if cls.__name__ in ROPES and _is_hosts(cls))


def _is_hosts(cls: type) -> bool:
    return cls.__module__.startswith("diffusers.models.")


def _ropes(cls: type) -> list[Rope]:
    """The rope functions of a class; some import theirs in a call."""
    ropes = ROPES.get(_short(cls), ()) if _is_hosts(cls) else ()
    own, shared = sys.modules[cls.__module__], sys.modules.get("diffusers.models.embeddings")
    found = [(ours, own if hasattr(own, name) else shared, name) for ours, name in ropes]
    return [(ours, module, name) for ours, module, name in found if hasattr(module, name)]


def _short(cls: type) -> str:
    return cls.__name__.partition("AttnProcessor")[0]


def _take(report: _host.Report, cls: type, fuse_norm: bool) -> None:
    """Replace the functions and the `__call__` of a class, or report why they are left."""
    where, name = f"{cls.__module__}.{cls.__qualname__}", _short(cls)
    if not _is_hosts(cls) or not (name in ROPES or name in FUSED):
        known = "jitrope leaves its rope to diffusers" if name in LEFT else "jitrope knows no rope in it"
        report.left[where] = known if _is_hosts(cls) else "not a processor of diffusers; call jitrope.apply_rope in it"
        return
    ropes = _ropes(cls)
    for function in {name for _, name in ROPES.get(name, ())} - {name for *_, name in ropes}:
        report.left[f"{cls.__module__}.{function}"] = f"diffusers {_version()} does not have it"
    for ours, module, function in ropes:
        theirs = getattr(module, function)
        if theirs not in _host.placed and _host.own("diffusers", theirs) is None:
            report.left[f"{module.__name__}.{function}"] = f"it is {_host.module_of(theirs)}'s"
            return
        report.replace(module, function, ours, "rope")
    if name in FUSED:
        _fuse(report, cls, fuse_norm, ropes)


def _fuse(report: _host.Report, cls: Any, fuse_norm: bool, ropes: list[Rope]) -> None:
    original, where = cls.__call__, f"{cls.__module__}.{cls.__qualname__}.__call__"
    owner, copy = _host.module_of(original), COPIES.get(_host.text_of(original))
    if not fuse_norm:
        _host.restore("diffusers", [original])
        if not ropes:
            report.left[where] = "its rope is in its own code"
    elif owner.split(".")[0] not in ("diffusers", "jitrope"):
        report.left[where] = f"it is {owner}'s"
    elif unknown(importlib.import_module("diffusers.models.normalization").RMSNorm):
        report.left[where] = f"jitrope does not know RMSNorm of diffusers {_version()}"
    elif copy is None or (hasattr(original, "__wrapped__") and original not in _host.placed):
        report.left[where] = f"jitrope does not know its code in diffusers {_version()}"
    else:
        report.replace_method(cls, "__call__", partial(_fused, copy, cls, ropes), "norm and rope")


def _fused(copy: Any, cls: type, ropes: list[Rope], original: Callable[..., Any]) -> Callable[..., Any]:
    """Ours in place of a class's `__call__`, now `original`."""
    given = _host.in_words_of(original, partial(Call, sys.modules[cls.__module__]))
    known = [(m, name, (f := getattr(m, name), _host.placed[f].original)) for _, m, name in ropes]

    def call(*arguments: Any, **words: Any) -> Any:
        for module, name, functions in known:
            if getattr(module, name) not in functions:
                raise InvalidInput(f"{name} was replaced after enable")
        return copy(given(*arguments, **words))

    def left(reason: str, *arguments: Any, **words: Any) -> Any:
        _host.note("diffusers", "host", reason, 0 if ropes else 1)  # the rope functions count themselves
        return original(*arguments, **words)

    return _host.or_else("diffusers", call, left)


def _nothing(given: Any, report: _host.Report) -> str:
    """The reason why nothing was replaced."""
    name = type(given).__name__
    if not report.left:
        return f"{name} has no attention processors of diffusers {_version()}{_host.of_other('diffusers', given)}"
    return f"{name}: " + "; ".join(
        f"{where.removeprefix('diffusers.models.')}: {why}" for where, why in report.left.items()
    )


def _version() -> str:
    return str(importlib.import_module("diffusers").__version__)
