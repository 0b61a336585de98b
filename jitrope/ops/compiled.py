"""A public function under torch.compile: one op, in whose place torch runs the function.

Dynamo traces how the op's arguments are made, and guards them alone. torch decomposes the op, as it does with its own
composite ones, into the ops of the function's calls, which it makes with tensors that have no values. So what works in
eager mode works in a compiled model. The op's text is not that of a call (`jitrope.call`), but what the user wrote.
"""

from __future__ import annotations

import threading
from ast import literal_eval
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..base.errors import InvalidInput
from ..call import COUNTS
from .kv_cache import KVCache, Pages
from .quantize import DynamicQuantize, Quantize, Scaled
from .torch_op import TAGS, lib
from .values import Mrope, Norm, Packed, Shifts, Starts, Ulysses, Value
from .watch import constant, dispatch_modes

FUNCTIONS: dict[str, Callable[..., Any]] = {}
"""The public functions, by name."""
_VALUES = (Packed, Starts, Mrope, Shifts, Norm, KVCache, Pages, Quantize, DynamicQuantize, Ulysses)
_KINDS: dict[str, type[Value]] = {x.__name__: x for x in _VALUES}

lib.define("call(Tensor(a!)[] tensors, str text, SymInt[] sizes) -> Tensor[]", tags=TAGS)
_op = torch.ops.jitrope.call.default
_local = threading.local()
_refused: set[Any] = set()


def compiled(arguments: dict[str, Any], *instead: Any) -> Any:
    """The results of a public function from its op. instead: what it returns for a result that is not fresh.

    Whole numbers are no part of the text, because they may be symbols. None: Dynamo must trace the function itself,
    because an argument has no text, or the op has an error of another kind than a refusal.
    """
    tensors: list[Tensor] = []
    sizes: list[int] = []
    said: list[Any] = []
    kinds: list[str] = []
    todo: list[Any] = [arguments]
    while todo:  # in one function, because Dynamo guards each call of one
        x = todo.pop()
        if isinstance(x, Tensor):
            tensors.append(x)
            said.append("tensor")
        elif isinstance(x, Value):
            kinds.append(x.text or type(x).__name__)
            if x.text:
                said += ("value", x.text, len(x.items))
                todo += x.items
            else:
                said.append(type(x).__name__)
                todo.append(x.parts())
        elif isinstance(x, dict):
            said += ("dict", len(x), *x)
            todo += x.values()
        elif isinstance(x, (list, tuple)):
            said += ("tuple", len(x))
            todo += [*x]
        elif isinstance(x, bool):
            said += ("", True if x else False)  # noqa: SIM210  a symbol's truth
        elif isinstance(x, int):
            sizes.append(x)
            said.append("number")
        elif isinstance(x, float) and x - x == 0:
            said += ("", next(iter({float(x)})))  # all digits of a symbol
        elif x is None or isinstance(x, str):
            said += ("", x)
        else:
            return None
    text = _text(kinds, *said)
    if text is None:
        return None
    found = _op(tensors, text, sizes)
    if not found:
        if refusal := _refusal():
            raise InvalidInput(refusal)
        return None
    out = arguments.get("out")
    results: list[Any] = []
    for other in instead:
        n = len(results)
        x, scale = found[2 * n], found[2 * n + 1]
        if x.dim() == 1:
            x = other if not isinstance(out, (list, tuple)) or out[n] is None else out[n]
        results.append(Scaled(x, scale) if scale.dim() > 1 else x)
    return tuple(results)


@constant
def _text(kinds: list[str], *said: Any) -> str | None:
    """The text, or None if a value's class is the user's. kinds: of values, names or texts."""
    ours = all((literal_eval(x)[0] if x.startswith("[") else x) in _KINDS for x in kinds)
    return repr(said) if ours else None


@constant
def _refusal() -> Any:
    """The sentence of the last refusal; "" after another error. An exception in an op would end the compilation."""
    return _local.refusal


_said = lru_cache(maxsize=1024)(literal_eval)


def _whole(x: Any) -> Any:
    """x, or the number of a symbol."""
    return int(x) if isinstance(x, torch.SymInt) else x


def _read(said: Iterator[Any], tensors: Iterator[Tensor], sizes: Iterator[int]) -> Any:
    """The next item of a text, with all that it holds. What `compiled` adds last to its list it takes first."""
    kind = next(said)
    if kind in ("tensor", "number"):
        return next(tensors if kind == "tensor" else sizes)
    if kind == "":
        return next(said)
    if kind == "tuple":
        return tuple([_whole(_read(said, tensors, sizes)) for _ in range(next(said))][::-1])
    if kind == "dict":
        names = [next(said) for _ in range(next(said))]
        found = {name: _read(said, tensors, sizes) for name in reversed(names)}
        return {name: found[name] if name in COUNTS else _whole(found[name]) for name in names}
    parts: Any = None
    if kind == "value":
        text, count = next(said), next(said)
        kind, parts = Value.read(text, [_read(said, tensors, sizes) for _ in range(count)][::-1])
    return _KINDS[kind].of(parts or _read(said, tensors, sizes))


def _call(tensors: Sequence[Tensor], text: str, sizes: Sequence[int]) -> list[Tensor]:
    arguments = _read(iter(_said(text)), iter(tensors), iter(sizes))
    name = arguments.pop("")
    try:
        if arguments.get("check") is True:
            raise InvalidInput(f"{name}: check=True waits for the device and cannot be compiled; leave it out")
        found = FUNCTIONS[name](**arguments)
    except Exception as error:  # the op stays in the graph of Dynamo, beside what is done instead
        kinds = [(x.dtype, *[n if isinstance(n, int) else None for n in x.shape]) for x in tensors]
        if dispatch_modes():
            _local.refusal = str(error) if isinstance(error, InvalidInput) else ""
            _refused.add((text, *kinds))
        elif (text, *kinds) not in _refused:
            raise
        return []
    parts: list[Any] = []
    for x in found if type(found) is tuple else (found,):
        parts += x if isinstance(x, Scaled) else (x, None)
    given = {id(x) for x in tensors}
    return [tensors[0].new_empty(0) if x is None or id(x) in given else x for x in parts]


lib.impl("call", _call, "CompositeImplicitAutograd")
lib.impl("call", _call, "FuncTorchBatched")
