"""transformers: rope of its model files, for every variant, in one launch with the norms of q, k and v.

>>> from jitrope.integrations import transformers as jitrope_transformers
>>> import transformers
>>> small = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 9}
>>> model = transformers.LlamaModel(transformers.LlamaConfig(num_hidden_layers=1, **small))
>>> report = jitrope_transformers.enable(model)
>>> out = model(torch.tensor([[1, 2, 3]]))
>>> report.calls["jitrope"]
1
>>> jitrope_transformers.disable()

Every model file has its own rope functions, under the same few names: for halves or interleaved pairs, tables of full
or half width or complex, the whole head or a part, all tokens or the last ones. The names do not show the variant. So
`enable` calls each function that it finds, on small CPU tensors, and replaces it if one of jitrope's variants gives the
same bits in fp32. In bf16 and fp16 jitrope rounds once, so results may differ in the last bits.

Norms of q and k directly before or after rope are in its launch, in eager mode, with the host's bits in bf16 too.
The compiler fuses them by itself:

>>> qwen3 = transformers.Qwen3Model(transformers.Qwen3Config(num_hidden_layers=1, num_key_value_heads=2, **small))
>>> with jitrope_transformers.enable(qwen3) as report:
...     out = qwen3(torch.tensor([[1, 2, 3]]))
>>> report.calls["fused"]
1
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from types import ModuleType
from typing import Any

from torch import nn

from ...base.arguments import flag, refuse, word
from ...base.errors import InvalidInput, JitropeError
from .. import _host
from .._norms import form_of
from .variants import State, recognise
from .waiting import WAITS, Rope, wait

__all__ = ["Report", "calls", "disable", "enable"]

ROPES = re.compile(r"\w*apply_\w*rotary\w*")  # the names of rope functions
NORMS = re.compile(r"(q|k|qk|v|query|key)_(layer)?norm")  # and of the norms of q, k and v in an attention

calls = _host.calls["transformers"]
"""Calls so far, by "jitrope" and "host"; a call of a compiled model counts when it is traced."""


class Report(_host.Report):
    """The result of `enable`. As a context manager it undoes that `enable`, and no other.

    `calls` also counts the "fused" launches of rope and norms. `attention` says, by the name of an attention class,
    whether its norms wait for rope, or why not.

    >>> Report().calls
    Counter({'jitrope': 0, 'host': 0})
    """

    def __init__(self) -> None:
        super().__init__("transformers")
        self.attention: dict[str, str] = {}

    def _replaced(self) -> str:
        waiting = sum(what.startswith(WAITS) for what in self.attention.values())
        return super()._replaced() + (f", {WAITS} in {_host.counted(waiting, 'attention class')}" if waiting else "")

    def table(self) -> str:
        """A line for each function and for each attention class of the model: what was done, or why it was not."""
        return "\n".join([super().table(), *(f"{name}: {what}" for name, what in self.attention.items())])


@_host.alone
def enable(model: nn.Module | None = None, *, fuse_norm: bool = True, rounding: str = "fp32") -> Report:
    """Use jitrope's rope in a model, or in every model with a loaded file, and fuse it with the norms of q and k.

    Functions of a model file are replaced for all models of that file, wherever they are held. Enabling twice changes
    nothing.

    Args:
        model: its files are searched; None: all loaded model files, without their norms.
        fuse_norm: True: in eager mode, the norms of q and k of this model are in the launch of rope if jitrope
            knows their class. False: only rope is replaced; norms that are fused already stay so until `disable`.
        rounding: of rope in fp16 and bf16, without norms. "fp32": results are rounded once, so outputs differ from the
            host's in the last bits. "dtype": the host's bits; functions that round in another way stay with the host.

    Returns:
        A report, which is a context manager: `replaced` and `left` (functions, by their names), `attention` (classes,
        and whether their norms wait), `calls` since then, by jitrope, fused or by the host, and the `reasons` for that.

    Raises:
        ImportError: transformers is not installed.
        InvalidInput: an argument is of another kind, or rounding is not that of an earlier call.
        JitropeError: there is nothing to replace; the message lists the functions that were found.
    """
    if model is None and importlib.util.find_spec("transformers") is None:
        raise ImportError("transformers is not installed in this Python: pip install transformers")
    fuse_norm = flag("enable", "fuse_norm", fuse_norm)
    exact = word("enable", "rounding", rounding, ("fp32", "dtype")) == "dtype"
    files, report = _files(model), Report()
    try:
        _place(report, model, files, fuse_norm, exact)
    except BaseException:
        report.__exit__()
        raise
    return report


def _place(report: Report, model: nn.Module | None, files: list[Any], fuse_norm: bool, exact: bool) -> None:
    """Replace the rope functions of files, and fuse the norms of the model's attention classes."""
    known: dict[Any, Rope | str] = {}
    for module, name in [(file, name) for file in files for name in vars(file) if ROPES.fullmatch(name)]:
        if not callable(function := getattr(module, name)):
            continue
        rope = known[function] = known.get(function) or _rope(function, exact)
        if isinstance(rope, str):
            report.left[f"{module.__name__}.{name}"] = rope
        else:
            report.replace(module, name, rope.alone, rope, by=rope.call)
    if not report.replaced:
        why = "".join(f"; {name}: {why}" for name, why in report.left.items())
        where = "the loaded model files have" if model is None else f"the file of {type(model).__name__} has"
        hint = "; load the model first, or pass it" if model is None else "; call jitrope.apply_rope in it"
        raise JitropeError(f"{where} no rope function that jitrope can replace{why or hint}")
    for cls, modules in _attention(model).items() if model is not None and fuse_norm else ():
        report.attention[f"{cls.__module__}.{cls.__name__}"] = _fuse(cls, modules, report)


def _rope(function: Any, exact: bool) -> Rope | str:
    """The rope function that is replaced, or is to be replaced; or why it is not."""
    if function in _host.placed:
        rope: Rope = _host.placed[function].what
        if rope.variant.exact != exact:
            raise InvalidInput("enable: rounding differs from that of an earlier call; call disable first")
        return rope
    variant = recognise(function)
    return variant if isinstance(variant, str) else Rope(function, variant._replace(exact=exact))


disable = _host.disabler(__name__)


def _files(model: nn.Module | None) -> list[ModuleType]:
    """The modules that define a model's classes; None: all loaded ones of transformers and of remote code."""
    if model is not None and not isinstance(model, nn.Module):
        refuse("enable", "model", model, "a model, such as pipeline.model, or None; diffusers has its own enable")
    if model is None:
        names = [n for n in list(sys.modules) if n.startswith(("transformers.models.", "transformers_modules."))]
    else:
        names = [base.__module__ for cls in {type(m) for m in model.modules()} for base in cls.__mro__]
        names = sorted({n for n in names if n.split(".")[0] not in ("torch", "builtins", __name__.split(".")[0])})
    return [module for name in names if isinstance(module := sys.modules.get(name), ModuleType)]


def _ropes_of(cls: type) -> State:
    """The rope functions that a class's methods call."""
    found: list[Any] = []
    for function in filter(inspect.isfunction, map(inspect.unwrap, filter(callable, vars(cls).values()))):
        told, module = inspect.getclosurevars(function).globals, sys.modules.get(function.__module__)
        found += [(module, n, f) for n, f in told.items() if ROPES.fullmatch(n) and callable(f)]
    return tuple(found)


def _attention(model: nn.Module) -> dict[type, list[nn.Module]]:
    """The modules of a model with a method that calls a rope function, by their classes."""
    found: dict[type, list[nn.Module]] = {}
    owners = {cls: next(filter(_ropes_of, cls.__mro__[:-1]), None) for cls in {type(m) for m in model.modules()}}
    for module in model.modules():
        if (cls := owners[type(module)]) is not None:
            found.setdefault(cls, []).append(module)
    return found


def _fuse(cls: type, modules: list[nn.Module], report: _host.Report) -> str:
    """Let the norms of attention modules wait for rope. Returns what was done, or why it was not."""
    places = tuple(place for place in _ropes_of(cls) if place[2] in _host.placed)
    if not places:
        return "left alone: jitrope does not replace its rope function"
    forms, reasons = set(), set()
    for module, (name, norm) in ((m, child) for m in modules for child in m.named_children()):
        if NORMS.fullmatch(name):
            try:
                forms.add(str(form_of(norm)))
            except InvalidInput as error:
                reasons.add(error.args[0])
            else:
                wait(module, name, norm, places, report)
    if not forms:
        return f"rope only: {min(reasons, default='no norm of q and k was found')}"
    return f"{WAITS} ({'; '.join(sorted(forms))})"
