"""diffusers: rope of its transformers by jitrope, in their attention processors, with the host's bits.

>>> from jitrope.integrations import diffusers as jitrope_diffusers
>>> import diffusers
>>> model = diffusers.FluxTransformer2DModel(num_layers=1, num_single_layers=1, num_attention_heads=1)
>>> report = jitrope_diffusers.enable(model)  # or a pipeline
>>> print(report)
norm and rope fused in 2 attention layers; 0 calls since; 0 left to diffusers
>>> jitrope_diffusers.disable(model)

.. include:: README.md
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from ...base.arguments import flag, refuse
from ...base.errors import JitropeError
from .. import _host
from .fused import FUSED, INLINE
from .sites import SITES
from .twins import host_of, is_twin, rope_replaced_by, twin, version

__all__ = ["Report", "disable", "enable"]


@dataclass(repr=False)
class Report(_host.Report):
    """The result of `enable`. As a context manager it undoes that `enable`, and nothing done before it.

    `calls` counts for all enabled models the tensors rotated by "jitrope", the calls left to the "host" and the
    "fused" calls of processors. `reasons` gives the reasons why calls were left to the host or not fused.

    >>> jitrope_diffusers.Report().calls
    Counter({'jitrope': 0, 'host': 0})

    Attributes:
        host: "diffusers".
        replaced: by class, the number of the host's processors and modules that are replaced.
        left: by class, the number of attention processors that are not replaced.
        fused: by class, the number of replaced ones with norm and rope in one launch.
        notes: by class, the reason why it is left or not fused.
    """

    host: str = "diffusers"
    replaced: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    fused: Counter[str] = field(default_factory=Counter)
    notes: dict[str, str] = field(default_factory=dict)
    _models: list[weakref.ref[nn.Module]] = field(default_factory=list, repr=False)

    def _active(self) -> bool:
        """Whether one of the processors is replaced now, or none exists any more."""
        models = [model for ref in self._models if (model := ref()) is not None]
        return not models or any(host_of(type(part)) is not type(part) for model in models for part in _parts(model))

    def _replaced(self) -> str:
        fused, alone, left = self.fused.total(), (self.replaced - self.fused).total(), self.left.total()
        total = fused + alone + left
        of = "" if total in (fused, alone) else f" of {total}"
        layers = "attention layer" if total == 1 else "attention layers"
        kinds = {"norm and rope fused in": fused, "rope alone in": alone}
        parts = [f"{kind} {count}" for kind, count in kinds.items() if count]
        parts[:1] = [f"{part}{of} {layers}" for part in parts[:1]]
        return ", ".join([*parts, f"{left} left alone"] if left else parts)

    def table(self) -> str:
        """A line for each class: the number of layers with norm and rope fused or only rope replaced, and notes."""
        kinds = {"norm and rope": self.fused, "rope alone": self.replaced - self.fused, "left alone": self.left}
        rows = [f"{name}: {count} x {kind}" for kind, counts in kinds.items() for name, count in counts.items()]
        return "\n".join([*rows, *(f"{name}: {note}" for name, note in self.notes.items())])


@_host.alone
def enable(model_or_pipeline: Any, *, fuse_norm: bool = True) -> Report:
    """Use jitrope's rope in a transformer, or in every transformer and ControlNet of a pipeline.

    Only the processors of these models change. Enabling twice changes nothing. Call it again after you set other
    processors or replace methods of the host's classes.

    Args:
        model_or_pipeline: an `nn.Module`, also compiled or wrapped, or a pipeline with `components`.
        fuse_norm: True: RMSNorm of q and k and rope are one launch where that is known to give the host's bits.
            False: only rope is replaced.

    Returns:
        A report of the replaced and the other classes. It counts the calls, and is a context manager.

    Raises:
        InvalidInput: model_or_pipeline is no model and has none, or fuse_norm is not True or False.
        JitropeError: no class in the model is supported, or this diffusers version is too different.
    """
    report, fuse_norm = Report(), flag("enable", "fuse_norm", fuse_norm)
    seen: Counter[str] = Counter()
    try:
        for model in _models("enable", model_or_pipeline):
            seen += _place(report, model, fuse_norm)
        if not report.replaced:
            raise JitropeError(_nothing(model_or_pipeline, seen, report.notes))
    except BaseException:
        report.__exit__()
        raise
    return report


def _place(report: Report, model: nn.Module, fuse_norm: bool) -> Counter[str]:
    """Replace the processors of a model; return the number of those that are left alone, by class."""
    report._models.append(weakref.ref(model))
    before = [weakref.ref(part) for part in _parts(model) if is_twin(type(part))]
    report._undo.append(partial(_undo, weakref.ref(model), before))
    parts = [(host_of(type(part)), _replace(part, fuse_norm, report)) for part in _parts(model)]
    left = [host for host, replaced in parts if not replaced]
    names = Counter(host.__name__ for host in left)
    if len(left) < len(parts):
        report.left += names
        for host in left:
            own = host.__module__.split(".")[0] == "diffusers"
            report.notes.setdefault(host.__name__, _NO_ROPE if own else _FOREIGN)
    return names


_NO_ROPE = "jitrope knows no rope in it"
_FOREIGN = "not a processor of diffusers; call jitrope.apply_rope in it"


def _nothing(given: Any, seen: Counter[str], notes: dict[str, str]) -> str:
    """The reason why nothing was replaced."""
    if notes:
        return "; ".join(f"{name}: {note}" for name, note in notes.items())
    name = type(given).__name__
    if not seen:
        return f"{name} has no attention processors of diffusers {version()}{_host.of_other('diffusers', given)}"
    processors = ", ".join(f"{count} {cls}" for cls, count in seen.items())
    return (
        f"{name} has {processors}, which are not among the processors of diffusers {version()} that apply rope. In "
        f"your own processor, call jitrope.apply_rope in place of its rope function"
    )


@_host.alone
def disable(model_or_pipeline: Any) -> None:
    """Restore the processors of a transformer, or of a pipeline's transformers.

    Raises:
        InvalidInput: model_or_pipeline is no model and has none.
    """
    for model in _models("disable", model_or_pipeline):
        _give_back_all(model, [])


def reloaded(make: Callable[..., Any], host: type, fused: bool, *arguments: Any) -> Any:
    """Make a copied or unpickled processor or module, and replace it like its original, if possible."""
    part = make(host, *arguments)
    with contextlib.suppress(JitropeError):  # another version of diffusers may not allow it
        _replace(part, fused, Report())
    return part


def _models(caller: str, model_or_pipeline: Any) -> list[nn.Module]:
    components = getattr(model_or_pipeline, "components", None)
    parts = components.values() if isinstance(components, dict) else (model_or_pipeline,)
    models = [part for part in parts if isinstance(part, nn.Module)]
    if not models and not isinstance(model_or_pipeline, nn.Module):
        other = _host.of_other("diffusers", model_or_pipeline)
        refuse(caller, "model_or_pipeline", model_or_pipeline, f"a model, or a pipeline that has one{other}")
    return models


def _parts(model: nn.Module) -> list[Any]:
    """The attention processors in a model, and the modules with their own rope; each once."""
    found: dict[int, Any] = {}
    for module in model.modules():
        processor = getattr(module, "processor", None)
        if _known(host_of(type(module))):
            found[id(module)] = module
        if callable(processor):
            found[id(processor)] = processor
    return list(found.values())


def _known(host: type) -> bool:
    return host.__module__.startswith("diffusers.models.") and (host.__name__ in SITES or host.__name__ in INLINE)


def _replace(part: Any, fuse_norm: bool, report: Report) -> bool:
    """Change one object to its twin and report it; False if it has no twin."""
    host = host_of(type(part))
    if not _known(host):
        return False
    name = host.__name__
    attribute = "forward" if isinstance(part, nn.Module) and "__call__" not in vars(host) else "__call__"
    if attribute == "forward" and "forward" in vars(part):
        cls, fused, note = None, False, "its forward is hooked; call enable before you set hooks or offload"
    else:
        cls, fused, note = _twin(host, attribute, fuse_norm)
    if note:
        report.notes[name] = note
    if cls is None:
        return False
    if type(part) is not cls and (type(part) is host or is_twin(type(part))):
        report._undo.append(partial(_give_back, weakref.ref(part), type(part)))
        part.__class__ = cls
    report.replaced[name] += 1
    if fused:
        report.fused[name] += 1
    return True


def _twin(host: Any, attribute: str, fuse_norm: bool) -> tuple[type | None, bool, str]:
    """(twin class or None, whether norm and rope are one launch in it, note)."""
    name, original = host.__name__, getattr(host, attribute)
    module = original.__module__ or ""
    other = "" if module.split(".")[0] == "diffusers" else module  # the library that replaced the method
    if rope := rope_replaced_by(host, attribute, SITES.get(name, ())):
        return None, False, f"its rope function is {rope}'s"
    ours, call, note = INLINE.get(name) or (FUSED.get(name) if fuse_norm else None), None, ""
    if ours is not None and other:
        note = f"its {attribute} is {other}'s: not fused"
    elif ours is not None and not ours.stands_for(original):
        note = f"jitrope does not know its code in diffusers {version()}: not fused"
    elif ours is not None:
        call = ours.call
    if name in INLINE and call is None:
        return None, False, note
    try:
        cls: Any = twin(host, attribute, original, SITES.get(name, ()), call)
    except JitropeError:
        if other:
            return None, False, f"its {attribute} is {other}'s, which does not call the host's rope"
        raise
    if cls._jitrope_missed:
        note = f"{cls._jitrope_missed}; calls that are not fused are the host's"
    return cls, call is not None and name in FUSED, note


def _undo(ref: weakref.ref[nn.Module], kept: list[weakref.ref[Any]]) -> None:
    model = ref()
    if model is not None:
        _give_back_all(model, kept)


def _give_back_all(model: Any, kept: list[weakref.ref[Any]]) -> None:
    """Restore all parts of a model but those kept, and those that the host has made since."""
    set_aside = getattr(model, "original_attn_processors", None) or {}  # kept by `fuse_qkv_projections`
    for part in (*_parts(model), *set_aside.values()):
        if is_twin(type(part)) and all(known() is not part for known in kept):
            part.__class__ = host_of(type(part))


def _give_back(ref: weakref.ref[Any], cls: type) -> None:
    part = ref()
    if part is not None and is_twin(type(part)):
        part.__class__ = cls
