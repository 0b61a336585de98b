"""diffusers: rope of its transformers by jitrope, in their attention processors, with the host's bits.

>>> from jitrope.integrations import diffusers as jitrope_diffusers
>>> report = jitrope_diffusers.enable(pipeline)        # until jitrope_diffusers.disable(pipeline)
>>> with jitrope_diffusers.enable(pipeline.transformer) as report: ...
>>> print(report)                                      # what was replaced, who rotated since, and why not

An attention processor (or, where a model rotates in a module's `forward`, that module) becomes an object of a
subclass whose code is the host's own with one name changed: the rope function it calls. So everything else in
it (LoRA, IP adapters, attention backends, context parallelism) stays the host's, whatever its version. With
`fuse_norm` the processors of FLUX, FLUX.2, Qwen-Image, Wan, HunyuanVideo, LTX-Video and Z-Image are ours as a whole,
and RMSNorm, rope and the joining of two streams are one launch. `coverage.COVERAGE` says for every model how it is
covered.

.. include:: README.md
"""

from __future__ import annotations

import contextlib
import importlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ...base.errors import JitropeError
from . import counting
from .coverage import COVERAGE, SITES
from .fused import FUSED, INLINE
from .twins import host_of, is_twin, replaced_by, twin

__all__ = ["COVERAGE", "Report", "disable", "enable"]

_HOST = "diffusers.models."


@dataclass
class Report:
    """What `enable` did. As a context manager it undoes that, and nothing that was done before it.

    Attributes:
        replaced: by class, how many of the host's processors and modules are ours.
        fused: those of them in which norm and rope are one launch.
        left: attention processors that are not ours.
        notes: by class, why it is not, or not fused.
    """

    replaced: Counter[str] = field(default_factory=Counter)
    fused: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    notes: dict[str, str] = field(default_factory=dict)
    _calls: Counter[str] = field(default_factory=lambda: counting.calls.copy(), repr=False)
    _reasons: Counter[str] = field(default_factory=lambda: counting.reasons.copy(), repr=False)
    _models: list[weakref.ref[nn.Module]] = field(default_factory=list, repr=False)
    _changed: list[tuple[weakref.ref[Any], type]] = field(default_factory=list, repr=False)  # and the class before

    @property
    def models(self) -> list[nn.Module]:
        """The transformers and ControlNets in which something is replaced; the report keeps none of them alive."""
        return [model for ref in self._models if (model := ref()) is not None]

    @property
    def calls(self) -> dict[str, int]:
        """Since then: tensors rotated by "jitrope", calls left to the "host", and "fused" calls if there are some.

        Of all models that are enabled. A compiled model counts as it is traced.
        """
        since = counting.calls - self._calls
        return {name: since[name] for name in ("jitrope", "host", "fused") if since[name] or name != "fused"}

    @property
    def reasons(self) -> Counter[str]:
        """Why calls since then were the host's, or were not fused."""
        return counting.reasons - self._reasons

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *_: object) -> None:
        for ref, before in self._changed:
            part = ref()
            if part is not None and is_twin(type(part)):
                part.__class__ = before

    def __str__(self) -> str:
        parts = [f"jitrope rotates in {_listed(self.replaced)}"]
        parts += [f"fused with the norm in {_listed(self.fused)}"] if self.fused else []
        alone = self.replaced - self.fused
        parts += [f"the norm runs in the host's own code in {_listed(alone)}"] if alone else []
        parts += [f"left alone: {_listed(self.left)}"] if self.left else []
        parts += [f"{name}: {note}" for name, note in self.notes.items()]
        parts += [f"calls so far: {self.calls}"]
        return "; ".join(parts) + "".join(f"\n  {count} x {reason}" for reason, count in self.reasons.items())


def enable(model_or_pipeline: Any, *, fuse_norm: bool = True) -> Report:
    """Let jitrope rotate in a transformer, or in every transformer and ControlNet of a pipeline.

    Acts on the processors of these models alone. Enabling twice changes nothing; do it again after other
    processors were set, or methods of the host's classes replaced.

    Args:
        model_or_pipeline: an `nn.Module`, compiled or wrapped ones too, or a pipeline with `components`.
        fuse_norm: RMSNorm of q and k and rope in one launch where that is known to give the host's bits;
            False: rope alone.

    Returns:
        What was replaced, and what was left. It counts the calls, and is a context manager.

    Raises:
        JitropeError: nothing in there is supported, or this diffusers version is too different.
    """
    report = Report()
    seen: Counter[str] = Counter()
    for model in _models(model_or_pipeline):
        before = report.replaced.total()
        left: Counter[str] = Counter()
        for part in _parts(model):
            _replace(part, fuse_norm, report, left)
        seen += left
        if report.replaced.total() > before:
            report._models.append(weakref.ref(model))
            report.left += left
    if not report._models:
        raise JitropeError(_refusal(model_or_pipeline, seen, report.notes))
    return report


def disable(model_or_pipeline: Any) -> None:
    """Give a transformer, or a pipeline's transformers, their own processors back."""
    for model in _models(model_or_pipeline):
        set_aside = getattr(model, "original_attn_processors", None) or {}  # by `fuse_qkv_projections`, for later
        for part in (*_parts(model), *set_aside.values()):
            if is_twin(type(part)):
                part.__class__ = host_of(type(part))


def reloaded(make: Callable[..., Any], host: type, fused: bool, *arguments: Any) -> Any:
    """A processor or module that was replaced when it was pickled or copied, and is again where that can be done."""
    part = make(host, *arguments)
    with contextlib.suppress(JitropeError):  # in another version of diffusers it stays the host's
        _replace(part, fused, Report(), Counter())
    return part


def _models(model_or_pipeline: Any) -> Iterator[nn.Module]:
    parts = getattr(model_or_pipeline, "components", None)
    for part in parts.values() if isinstance(parts, dict) else (model_or_pipeline,):
        if isinstance(part, nn.Module):
            yield part


def _parts(model: nn.Module) -> list[Any]:
    """The attention processors in a model, and the modules that rotate by themselves; each once."""
    found: dict[int, Any] = {}
    for module in model.modules():
        processor = getattr(module, "processor", None)
        for part in (module if _known(host_of(type(module))) else None, processor if callable(processor) else None):
            if part is not None:
                found[id(part)] = part
    return list(found.values())


def _known(host: type) -> bool:
    return host.__module__.startswith(_HOST) and (host.__name__ in SITES or host.__name__ in INLINE)


def _replace(part: Any, fuse_norm: bool, report: Report, left: Counter[str]) -> None:
    """Make one object its class' twin, and say so in the report."""
    host = host_of(type(part))
    name = host.__name__
    if not _known(host):
        left[name] += 1
        return
    attribute = "forward" if isinstance(part, nn.Module) and "__call__" not in vars(host) else "__call__"
    original = getattr(host, attribute)
    call, note = _own_call(host, attribute, fuse_norm)
    if attribute == "forward" and "forward" in vars(part):
        note, cls = "its forward is hooked; enable before hooks and offload are", None
    elif name in INLINE:
        cls = twin(host, attribute, original, (), call) if call else None
    else:
        cls, note = _twin(host, attribute, original, call, note)
    if note:
        report.notes[name] = note
    if cls is None:
        left[name] += 1
        return
    if type(part) is not cls and (type(part) is host or is_twin(type(part))):
        report._changed.append((weakref.ref(part), type(part)))
        part.__class__ = cls
    report.replaced[name] += 1
    if call is not None and name in FUSED:
        report.fused[name] += 1


def _twin(host: type, attribute: str, original: Any, call: Any, note: str) -> tuple[type | None, str]:
    """The twin class, or why there is none: another library has put a method into the host's."""
    try:
        cls: Any = twin(host, attribute, original, SITES[host.__name__], call)
        return cls, f"{cls._jitrope_missed}; calls that are not fused are the host's" if cls._jitrope_missed else note
    except JitropeError:
        if other := replaced_by(host, attribute):
            return None, f"its {attribute} is {other}'s, which does not call the host's rope"
        raise


def _own_call(host: type, attribute: str, fuse_norm: bool) -> tuple[Any, str]:
    """Our function for all of a processor's call, if there is one for this very code; else why not."""
    ours = {**INLINE, **(FUSED if fuse_norm else {})}.get(host.__name__)
    if ours is None:
        return None, ""
    if other := replaced_by(host, attribute):
        return None, f"its {attribute} is {other}'s: not fused"
    if ours.stands_for(getattr(host, attribute)):
        return ours.call, ""
    return None, f"its code is not that which jitrope stands for, in diffusers {_version()}"


def _version() -> str:
    return str(importlib.import_module("diffusers").__version__)


def _refusal(model_or_pipeline: Any, seen: Counter[str], notes: dict[str, str]) -> str:
    name = type(model_or_pipeline).__name__
    why = "".join(f"; {part}: {note}" for part, note in notes.items())
    return f"{name} has {_listed(seen) or 'no attention processors'}{why}; supported are {', '.join(COVERAGE)}"


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())
