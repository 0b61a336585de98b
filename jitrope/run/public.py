"""A public function: one that repeats its recent calls, and that is one op under torch.compile.

Dynamo traces how the op's arguments are made, and guards them alone. torch decomposes the op, as it does with its own
composite ones: it runs the function with tensors that have no values, which calls the ops of `torch_op`. So what works
in eager mode works in a compiled model. The op's text is not that of a call (`jitrope.call`), but what the user wrote.
"""

from __future__ import annotations

import threading
from ast import literal_eval
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache, partial, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from ..base.errors import InvalidInput
from ..sinks.cache import KVCache
from ..sinks.pages import Pages
from ..sinks.results import Ulysses
from ..stages.convert import DynamicQuantize, Quantize, Scaled
from ..stages.norm import Norm
from ..stages.positions import COUNTS, Mrope, Packed, Shifts, Starts
from ..torch_state import constant, dispatch_modes, is_traced
from ..values.asked import Value, spelled
from . import launch
from .torch_op import TAGS, lib

_PLAIN = frozenset((bool, int, float, str, type(None)))
_MOST = 256  # items of a call that are looked at
F = TypeVar("F", bound=Callable[..., Any])
FUNCTIONS: dict[str, Callable[..., Any]] = {}
"""The public functions, by name."""
_VALUES = (Packed, Starts, Mrope, Shifts, Norm, KVCache, Pages, Quantize, DynamicQuantize, Ulysses)
_KINDS: dict[str, type[Value]] = {x.__name__: x for x in _VALUES}

lib.define("call(Tensor(a!)[] tensors, str text, SymInt[] sizes) -> Tensor[]", tags=TAGS)
_op = torch.ops.jitrope.call.default
_local = threading.local()
_refused: set[Any] = set()


def repeated(function: F) -> F:
    """Decorate a public function: a call like a recent one of its user is found by its arguments, and launched."""
    name = function.__name__
    FUNCTIONS[name] = function

    @wraps(function)
    def call(*args: Any, **words: Any) -> Any:
        if is_traced():
            return _compiled(name, args, words)
        xs: list[Tensor] = []
        said: list[Any] = [name, *words]
        items = [*args, *words.values()]
        for x in items:  # half the time of `spelled`
            kind = type(x)
            said.append(kind)
            if kind is Tensor or kind is Parameter:
                xs.append(x)
            elif kind in _PLAIN:
                said.append(x)
            elif isinstance(x, Value) and x.text:
                said.append(x.text)
                items += x.items
            elif (kind is tuple or kind is list) and len(items) < _MOST:
                said.append(len(x))
                items += x
            else:
                return function(*args, **words)
        key = tuple(said)
        if not dispatch_modes() and forward_ad._current_level < 0:
            for replay in launch.local.recent.get(key, ()):
                if (out := replay(*xs)) is not None:
                    return out
        try:
            out = function(*args, **words)
        finally:
            made, launch.local.made = launch.local.made, None
        if made is not None and launch.local.recent.get(key) != []:
            launch.keep_spelled(key, xs, out, *made)
        return out

    return call  # type: ignore[return-value]


# ---- under torch.compile ---------------------------------------------------------------------------


def _compiled(name: str, args: Any, words: Any) -> Any:
    """The result of a public function from its op.

    Dynamo traces the function itself if an argument cannot be spelled, or if the op has another error than a refusal.
    """
    found = spelled(name, args, words)
    if found is not None:
        said, tensors, sizes = found
        fresh = _op(tensors, ", ".join(said), sizes)
        refusal, shape = _outcome()
        if refusal:
            raise InvalidInput(refusal)
        if shape is not None:
            results: list[Any] = []
            for place, scale in shape:
                x: Any = None if place is None else tensors[place] if place >= 0 else fresh[~place]
                results.append(x if scale is None else Scaled(x, fresh[~scale]))
            return results[0] if refusal is None else (*results,)
    return FUNCTIONS[name](*args, **words)


@constant
def _outcome() -> Any:
    """A refusal's sentence (None: the result is one tensor), and where the results are (None: there was another error).

    An exception in an op would end the compilation.
    """
    return _local.outcome


_said = lru_cache(maxsize=1024)(literal_eval)


def _whole(name: str, x: Any) -> Any:
    """x, or the number of a symbol, but of one that changes from call to call."""
    return int(x) if isinstance(x, torch.SymInt) and name not in COUNTS else x


def _read(said: Iterator[Any], tensors: Iterator[Tensor], sizes: Iterator[int]) -> Any:
    """The next item of a text, with all that it holds."""
    kind, read = next(said), partial(_read, said, tensors, sizes)
    if kind in ("tensor", "number"):
        return next(tensors if kind == "tensor" else sizes)
    if kind == "":
        return next(said)
    if kind == "dtype":
        return getattr(torch, next(said).removeprefix("torch."))
    if kind == "tuple":
        return tuple([_whole("", read()) for _ in range(next(said))])
    own = iter(_said(next(said))) if kind == "value" else said
    name, words, args = _arguments(own, partial(_read, own, tensors, sizes), kind == "made")
    return _KINDS[name](*args, **words)  # KeyError: the class is the user's


def _arguments(
    said: Iterator[Any], read: Callable[[], Any], counted: bool = False
) -> tuple[str, dict[str, Any], list[Any]]:
    """The name, the keywords and the other arguments of a call. counted: more follows."""
    name, names = next(said), [*iter(partial(next, said), 0)]
    count = next(said) if counted else -1
    words = {word: _whole(word, read()) for word in names}
    args: list[Any] = []
    with suppress(StopIteration):
        while len(args) != count:
            args.append(read())
    return name, words, args


def _call(tensors: Sequence[Tensor], text: str, sizes: Sequence[int]) -> list[Tensor]:
    try:
        said = iter(_said(text))
        name, words, args = _arguments(said, partial(_read, said, iter(tensors), iter(sizes)))
        found = FUNCTIONS[name](*args, **words)
    except Exception as error:  # the op stays in the graph of Dynamo, beside what is done instead
        kinds = [(x.dtype, *[n if isinstance(n, int) else None for n in x.shape]) for x in tensors]
        refused = isinstance(error, InvalidInput)
        if dispatch_modes():
            _local.outcome = str(error) if refused else "", None
            _refused.add((text, *kinds) if refused and not any(None in kind for kind in kinds) else text)
        elif text not in _refused and (text, *kinds) not in _refused:
            raise
        return []
    finally:
        launch.local.made = None
    fresh: list[Tensor] = []
    at = {id(x): n for n, x in enumerate(tensors)}

    def place(x: Tensor | None) -> int | None:
        if x is not None and id(x) not in at:
            fresh.append(x)
            at[id(x)] = ~(len(fresh) - 1)
        return None if x is None else at[id(x)]

    alone = isinstance(found, Tensor)
    parts = [x if isinstance(x, Scaled) else (x, None) for x in ([found] if alone else found)]
    _local.outcome = None if alone else "", tuple([(place(x), place(scale)) for x, scale in parts])
    return fresh


lib.impl("call", _call, "CompositeImplicitAutograd")
lib.impl("call", _call, "FuncTorchBatched")
