"""diffusers: rope of FLUX, Qwen-Image and Wan transformers through their attention processors.

>>> from jitrope.integrations import diffusers as jitrope_diffusers
>>> report = jitrope_diffusers.enable(pipeline)        # until jitrope_diffusers.disable(pipeline)
>>> with jitrope_diffusers.enable(pipeline.transformer) as report: ...

Each processor is replaced by one of a subclass whose `__call__` is the host's own code with one name
changed: the rope function it calls. So everything else in it (LoRA, IP adapters, attention backends,
context parallelism) stays the host's, whatever its version. The result is bit for bit the host's.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import JitropeError
from ..problem import DTYPE_NAMES
from ..rope import apply_rope

_PREFIX = "diffusers.models.transformers."


def _flux(host: Callable[..., Tensor], x: Tensor, freqs_cis: Any, **words: Any) -> Tensor:
    """Full-width tables (cos, sin), (S, D) each, as they are; fp32 products and sum."""
    if not (
        isinstance(freqs_cis, tuple)
        and set(words) <= {"sequence_dim"}
        and words.get("sequence_dim", 2) in (1, 2)
        and _fits(x, *freqs_cis)
    ):
        return _count("host", host(x, freqs_cis, **words))
    layout = "bshd" if words.get("sequence_dim", 2) == 1 else "bhsd"
    return _count("jitrope", apply_rope(x, None, *freqs_cis, layout=layout, interleaved=True)[0])


def _qwen(host: Callable[..., Tensor], x: Tensor, freqs_cis: Any, use_real: bool = True, **words: Any) -> Tensor:
    """A complex64 table (S, D / 2); torch's complex multiply."""
    ours = isinstance(freqs_cis, Tensor) and freqs_cis.dtype == torch.complex64 and not use_real and not words
    if not (ours and _fits(x) and freqs_cis.device == x.device):
        return _count("host", host(x, freqs_cis, use_real=use_real, **words))
    cos, sin = _kept(_planes, freqs_cis)
    return _count("jitrope", apply_rope(x, None, cos, sin, interleaved=True, rounding="complex64")[0])


def _wan(host: Callable[..., Tensor], x: Tensor, freqs_cos: Tensor, freqs_sin: Tensor) -> Tensor:
    """Full-width tables (1, S, 1, D), of which each pair's first cosine and second sine are used."""
    if not _fits(x, freqs_cos, freqs_sin):
        return _count("host", host(x, freqs_cos, freqs_sin))
    cos, sin = _kept(_even, freqs_cos), _kept(_odd, freqs_sin)
    return _count("jitrope", apply_rope(x, None, cos, sin, interleaved=True)[0])


# processor: (module, the rope function's name in its code, whether that is nested in `__call__`, ours)
PROCESSORS: dict[str, tuple[str, str, bool, Callable[..., Tensor]]] = {
    "FluxAttnProcessor": ("transformer_flux", "apply_rotary_emb", False, _flux),
    "FluxIPAdapterAttnProcessor": ("transformer_flux", "apply_rotary_emb", False, _flux),
    "QwenDoubleStreamAttnProcessor2_0": ("transformer_qwenimage", "apply_rotary_emb_qwen", False, _qwen),
    "WanAttnProcessor": ("transformer_wan", "apply_rotary_emb", True, _wan),
}

calls: Counter[str] = Counter()
"""Eager rope calls so far: "jitrope", and "host" where a call was not one of ours. Traced calls of a
compiled model are not counted."""


@dataclass
class Report:
    """What `enable` did. As a context manager it undoes it."""

    models: list[Any]
    replaced: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    _before: Counter[str] = field(default_factory=lambda: calls.copy())

    @property
    def calls(self) -> dict[str, int]:
        """Eager rope calls since: by jitrope, and by the host where tables or dtypes are not ours."""
        return {name: calls[name] - self._before[name] for name in ("jitrope", "host")}

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *_: object) -> None:
        for model in self.models:
            disable(model)

    def __str__(self) -> str:
        processors = ", ".join(f"{count} {name}" for name, count in self.replaced.items())
        left = f"; left alone: {', '.join(self.left)}" if self.left else ""
        return f"jitrope rotates in {processors}{left}; calls so far: {self.calls}"


def enable(model_or_pipeline: Any) -> Report:
    """Let jitrope rotate in a transformer, or in every transformer of a pipeline.

    Returns a report of the processors that were replaced, which counts the calls and is a context
    manager. Processors that jitrope does not know are left alone and named in it. Enabling twice
    changes nothing.

    Raises:
        JitropeError: nothing in there is supported, or this diffusers version is too different.
    """
    models = list(_models(model_or_pipeline))
    report = Report(models)
    for model in models:
        processors = dict(model.attn_processors)
        for name, processor in processors.items():
            label = type(processor).__name__
            if getattr(type(processor), "_jitrope_host", None):
                report.replaced[type(processor)._jitrope_host.__name__] += 1
            elif label in PROCESSORS and type(processor).__module__.startswith(_PREFIX):
                processors[name] = _twin(processor, _subclass(type(processor)))  # type: ignore[arg-type]
                report.replaced[label] += 1
            else:
                report.left[label] += 1
        model.set_attn_processor(processors)
    if not report.replaced:
        found = ", ".join(report.left) or "no attention processors"
        raise JitropeError(f"{type(model_or_pipeline).__name__} has {found}; supported are {', '.join(PROCESSORS)}")
    return report


def disable(model_or_pipeline: Any) -> None:
    """Give a transformer, or a pipeline's transformers, their own processors back."""
    for model in _models(model_or_pipeline):
        processors = dict(model.attn_processors)
        for name, processor in processors.items():
            if host := getattr(type(processor), "_jitrope_host", None):
                processors[name] = _twin(processor, host)
        model.set_attn_processor(processors)


def _models(model_or_pipeline: Any) -> Iterator[Any]:
    parts = getattr(model_or_pipeline, "components", None)
    for part in parts.values() if isinstance(parts, dict) else (model_or_pipeline,):
        if hasattr(part, "attn_processors") and hasattr(part, "set_attn_processor"):
            yield part


def _twin(processor: Any, cls: Any) -> Any:
    """A processor of another class over the same state: what is set on one is set on the other."""
    twin = cls.__new__(cls)
    object.__setattr__(twin, "__dict__", processor.__dict__)
    return twin


@cache
def _subclass(host: Any) -> type:
    """The host's processor class with its rope function's name pointing at ours."""
    module_name, name, nested, ours = PROCESSORS[host.__name__]
    module = sys.modules[host.__module__]
    original = vars(host)["__call__"]
    alias = f"_jitrope_{ours.__name__.strip('_')}"
    found: Any = _nested(original.__code__, name) if nested else name in original.__code__.co_names
    if not found or module_name not in module.__name__:
        version = importlib.import_module("diffusers").__version__
        raise JitropeError(f"diffusers {version}: {host.__name__} does not call {name}; this version is not supported")
    if nested:
        own = FunctionType(found, module.__dict__, name)
        # The nested function becomes a stub of the same arguments that calls ours.
        stub = _stub.__code__.replace(co_names=(alias,), co_name=name)
        constants = tuple(stub if constant is found else constant for constant in original.__code__.co_consts)
        code = original.__code__.replace(co_consts=constants)
    else:
        own = vars(module)[name]
        code = original.__code__.replace(co_names=tuple(alias if n == name else n for n in original.__code__.co_names))

    def rotate(*arguments: Any, **words: Any) -> Tensor:
        return ours(own, *arguments, **words)

    setattr(module, alias, rotate)
    call = FunctionType(code, module.__dict__, "__call__", original.__defaults__, original.__closure__)
    call.__kwdefaults__ = original.__kwdefaults__
    return type(f"Jitrope{host.__name__}", (host,), {"__call__": call, "_jitrope_host": host})


def _nested(code: CodeType, name: str) -> Any:
    """The code of the function `name` that `code` defines, if it stands alone."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType) and constant.co_name == name and not constant.co_freevars:
            return constant if constant.co_argcount == _stub.__code__.co_argcount else None
    return None


def _stub(hidden_states, freqs_cos, freqs_sin):  # type: ignore[no-untyped-def]
    return alias(hidden_states, freqs_cos, freqs_sin)  # type: ignore[name-defined]  # noqa: F821


def _fits(x: Tensor, *tables: Any) -> bool:
    """Whether a call is one whose arithmetic jitrope has: fp32, whatever the activations."""
    return x.dtype in DTYPE_NAMES and all(
        isinstance(t, Tensor) and t.dtype == torch.float32 and t.device == x.device for t in tables
    )


def _count(who: str, result: Tensor) -> Tensor:
    if not torch.compiler.is_compiling():
        calls[who] += 1
    return result


# ---- tables, converted once and kept as long as the host keeps its own -------------------------------

_tables: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _kept(convert: Callable[[Tensor], Any], table: Tensor) -> Any:
    """`convert(table)`, remembered with the table itself, and made again if that was written to."""
    if torch.compiler.is_compiling():
        return convert(table)
    version = 0 if table.is_inference() else table._version
    known = _tables.get(table)
    if known is None or known[0] != version or known[1] is not convert:
        known = (version, convert, convert(table))
        _tables[table] = known
    return known[2]


def _planes(table: Tensor) -> tuple[Tensor, Tensor]:
    pairs = torch.view_as_real(table)
    return pairs[..., 0].contiguous(), pairs[..., 1].contiguous()


def _even(table: Tensor) -> Tensor:
    return table[..., 0::2].contiguous()


def _odd(table: Tensor) -> Tensor:
    return table[..., 1::2].contiguous()
