"""A public function: one that repeats its recent calls, and that is one op under torch.compile.

Dynamo traces how the op's arguments are made, and guards them alone; a value's constructor it only notes. torch
decomposes the op, as it does with its own composite ones: it runs the function with tensors that have no values, which
calls the ops of `torch_op`. So what works in eager mode works in a compiled model. The op's text is not that of a call
(`jitrope.call`), but what the user wrote.
"""

from __future__ import annotations

import threading
from ast import literal_eval
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, wraps
from inspect import getfullargspec
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
from ..torch_state import constant, dispatch_modes, is_traced, own_ops
from ..values.asked import Value
from . import launch
from .torch_op import TAGS, lib

_PLAIN = frozenset((bool, int, float, str, type(None)))
_MOST = 256  # items of a call that are looked at
F = TypeVar("F", bound=Callable[..., Any])
FUNCTIONS: dict[str, Callable[..., Any]] = {}
"""The public functions and the classes of values, by name."""

lib.define("call(Tensor(a!)[] tensors, str text, SymInt[] sizes) -> Tensor[]", tags=TAGS)
_op = own_ops.call.default
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
        items = [*args, *words.values()]  # grows in the loop
        for x in items:  # half the time of `_spelled`, which a compiler needs
            kind = type(x)
            said.append(kind)
            if kind is Tensor or kind is Parameter:
                xs.append(x)
            elif kind in _PLAIN:
                said.append(x)
            elif kind in _VALUES and (text := x.text):
                said.append(text)
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
    if found := _spelled(name, args, words):
        text, tensors, sizes = found
        both = [*tensors, *_op(tensors, text, sizes), None]
        refusal, alone, places = _outcome()
        if refusal:
            raise InvalidInput(refusal)
        if places is not None:
            results = [both[x] if scale < 0 else Scaled(both[x], both[scale]) for x, scale in places]
            return results[0] if alone else (*results,)
    return FUNCTIONS[name](*args, **words)


@constant
def _outcome() -> Any:
    """A refusal, whether the result is one tensor, and the places of results and their scales among given and fresh.

    An exception in an op would end the compilation. Of one that is no refusal there are no places.
    """
    return _local.outcome


def _spelled(name: str, args: Any, words: Any) -> tuple[str, list[Tensor], list[int]] | None:
    """What a call with these arguments says, its tensors, and its whole numbers, which may be symbols.

    None: an argument cannot be spelled. Dynamo traces this, so it is one function with few builtins, which are guarded.
    """
    said = [f"{{{(name, *words)!r}: ("]
    tensors: list[Tensor] = []
    sizes: list[int] = []
    todo: list[Any] = [*words.values(), *args][::-1]
    while todo:
        x = todo.pop()
        if isinstance(x, Tensor):
            tensors.append(x)
            said.append("0,")
        elif isinstance(x, Value) and (text := x.text):
            said.append(f"{text},")
            for y in x.items:
                (tensors if isinstance(y, Tensor) else sizes).append(y)
        elif x is None or isinstance(x, str):
            said.append(f"{x!r},")
        elif isinstance(x, bool):
            said.append(f"{True if x else False},")  # noqa: SIM210  a symbol's truth
        elif isinstance(x, int):
            sizes.append(x)
            said.append("1,")
        elif isinstance(x, float) and x - x == 0:
            said.append(f"{next(iter({float(x)}))!r},")  # all digits of a symbol
        elif isinstance(x, (list, tuple)):
            said.append("(")
            todo += [..., *x[::-1]]
        elif x is ...:
            said.append("),")
        elif isinstance(x, torch.dtype):
            said.append(f"b'{x}',")
        else:
            return None
    return "".join([*said, ")}"]), tensors, sizes


def _noted(kind: Any) -> Any:
    """Let the values of a class note what they are made of. Dynamo traces no more of their constructor."""
    init = kind.__init__

    @wraps(init)
    def noted(self: Any, *args: Any, **words: Any) -> None:
        self.text = ""
        own = type(self) is kind  # a class of the user's is made of more than these arguments
        if not (own and is_traced()):
            init(self, *args, **words)
        args = (*[tuple(x) if isinstance(x, list) else x for x in args],)  # which the user may change later
        words = {word: tuple(x) if isinstance(x, list) else x for word, x in words.items()}
        self.asked = args, words
        if own and (found := _spelled(kind.__name__, args, words)):
            self.text, self.items = found[0], (*found[1], *found[2])

    kind.__init__ = noted
    kind.form = f"jitrope.{kind.__name__}({', '.join(getfullargspec(init).args[1:])})"
    return kind


_VALUES = frozenset((Packed, Starts, Mrope, Shifts, Norm, KVCache, Pages, Quantize, DynamicQuantize, Ulysses))
FUNCTIONS.update({kind.__name__: _noted(kind) for kind in _VALUES})
_said = lru_cache(maxsize=1024)(literal_eval)


def _whole(name: str, x: Any) -> Any:
    """x, or the number of a symbol, but of one that changes from call to call."""
    return int(x) if isinstance(x, torch.SymInt) and name not in COUNTS else x


def _made(said: Any, tensors: Iterator[Tensor], sizes: Iterator[int]) -> Any:
    """What an item of a text means. That of a dict are the results of a call, or a value."""
    if isinstance(said, tuple):
        return tuple([_whole("", _made(x, tensors, sizes)) for x in said])
    if isinstance(said, bytes):
        return getattr(torch, said.decode().removeprefix("torch."))
    if type(said) is int:
        return next(sizes if said else tensors)
    if not isinstance(said, dict):
        return said
    (((name, *labels), items),) = said.items()
    found = [_made(x, tensors, sizes) for x in items]
    words = {word: _whole(word, x) for word, x in zip(labels, found)}
    return FUNCTIONS[name](*found[len(labels) :], **words)


def _call(tensors: Sequence[Tensor], text: str, sizes: Sequence[int]) -> list[Tensor]:
    try:
        found = _made(_said(text), iter(tensors), iter(sizes))
    except Exception as error:  # the op stays in the graph of Dynamo, beside what is done instead
        kinds = [(x.dtype, *[n if isinstance(n, int) else None for n in x.shape]) for x in tensors]
        refused = isinstance(error, InvalidInput)
        if dispatch_modes():
            _local.outcome = str(error) if refused else "", False, None
            _refused.add((text, *kinds) if refused and not any(None in kind for kind in kinds) else text)
        elif text not in _refused and (text, *kinds) not in _refused:
            raise
        return []
    finally:
        launch.local.made = None
    at = {id(None): -1, **{id(x): n for n, x in enumerate(tensors)}}
    both = [*tensors]

    def place(x: Any) -> int:
        if id(x) not in at:
            at[id(x)] = len(both)
            both.append(x)
        return at[id(x)]

    alone = isinstance(found, Tensor)
    parts = [x if isinstance(x, Scaled) else (x, None) for x in ([found] if alone else found)]
    _local.outcome = "", alone, tuple([(place(x), place(scale)) for x, scale in parts])
    return both[len(tensors) :]


lib.impl("call", _call, "CompositeImplicitAutograd")
lib.impl("call", _call, "FuncTorchBatched")
