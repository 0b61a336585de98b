"""Replace functions of a host library by jitrope's, restore them, and count the calls."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from types import ModuleType
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from ..base.config import log
from ..base.errors import InvalidInput, JitropeError

Function = Callable[..., Any]
F = TypeVar("F", bound=Function)
R = TypeVar("R", bound="Report")

calls: defaultdict[str, Counter[str]] = defaultdict(Counter)
"""For each host, the calls so far: by "jitrope", or left to the "host"."""

reasons: defaultdict[str, Counter[str]] = defaultdict(Counter)
"""For each host, the reasons why calls were left to it: jitrope's messages, with counts."""

COMPLEX = {torch.complex64: "complex64", torch.complex128: "complex128"}
"""The rounding of a host that multiplies by a complex table, by the dtype of the table."""

UNKNOWN = "jitrope does not know the argument"
_MOST_REASONS = 100  # messages contain shapes, so there may be any number


@torch.compiler.assume_constant_result
def note(host: str, who: str, reason: str = "", count: int = 1) -> None:
    """Count a call, and log a new reason for leaving it to the host.

    Dynamo runs this function during tracing, so a compiled call counts once. Traced itself, the function would add a
    guard on the number, and every call would be compiled again.
    """
    calls[host][who] += count
    if reason:
        known = reasons[host]
        if reason not in known and len(known) >= _MOST_REASONS:
            reason = "other reasons"
        if reason not in known and who == "host":
            log.warning("jitrope: %sleft to %s: %s", "" if count else "norms ", host, reason)
        known[reason] += 1


def _tried(host: str, who: str, ours: Function, arguments: Any, words: Any) -> tuple[bool, Any]:
    """Whether ours took the call, and its result or the reason why it did not."""
    try:
        result = ours(*arguments, **words)
    except InvalidInput as error:
        return False, error.args[0]
    note(host, who)
    return True, result


def take(host: str, ours: Function, theirs: Function | None, *arguments: Any, **words: Any) -> Any:
    """Call `ours` or, if it raises InvalidInput, `theirs`, and count the call.

    A refusal comes before anything is written, so the host gets unchanged arguments. If `theirs` is None, the error is
    raised.
    """
    done, result = _tried(host, "jitrope", ours, arguments, words)
    if done:
        return result
    if theirs is None:
        raise InvalidInput(result)
    note(host, "host", result)
    return theirs(*arguments, **words)


def note_unfused(host: str, reason: str) -> None:
    """Log why norms are not fused. The functions that then run count themselves."""
    note(host, "host", f"not fused: {reason}", 0)


def or_else(host: str, ours: Function, otherwise: Function) -> Function:
    """`ours`, counted as "fused", or `otherwise` for a call that it refuses.

    `otherwise` takes the reason, then the same arguments; it counts the call itself.
    """

    def function(*arguments: Any, **words: Any) -> Any:
        done, result = _tried(host, "fused", ours, arguments, words)
        return result if done else otherwise(result, *arguments, **words)

    return function


# ---- replacing functions, and restoring them ------------------------------------------------------------


class Placed(NamedTuple):
    """The hosts and the original of a replaced function, what stands in its place, and what puts it back."""

    hosts: dict[str, str]  # the place in each; two if both have the function
    original: Any
    what: Any
    undo: Function


placed: dict[Any, Placed] = {}

_lock = threading.RLock()


def alone(function: F) -> F:
    """A function that replaces or restores functions: one thread at a time runs those."""

    @wraps(function)
    def run(*arguments: Any, **words: Any) -> Any:
        with _lock:
            return function(*arguments, **words)

    return cast(F, run)


@dataclass(repr=False)
class Report:
    """The result of `enable`. As a context manager it undoes that `enable`, and no other.

    Printed, it is a summary line, and a line for each reason why calls were left to the host, the most frequent first.
    `table()` has a row for each function.

    A function is replaced in every loaded module that holds it, of the host or not. A module loaded later imports
    jitrope's.

    Attributes:
        host: the name of the library.
        replaced: by the name of a function, a description of its replacement.
        left: by the name of a function, the reason why it was not replaced.
    """

    host: str
    replaced: dict[str, Any] = field(default_factory=dict)
    left: dict[str, Any] = field(default_factory=dict)
    _ours: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._before = calls[self.host].copy(), reasons[self.host].copy()

    @property
    def calls(self) -> Counter[str]:
        """Calls since `enable`, by "jitrope" or left to the "host". A compiled call counts when it is traced."""
        return Counter({"jitrope": 0, "host": 0, **(calls[self.host] - self._before[0])})

    @property
    def reasons(self) -> Counter[str]:
        """The reasons why calls since `enable` were left to the host, with counts."""
        return reasons[self.host] - self._before[1]

    def replace(self, module: ModuleType, name: str, ours: Function, what: Any, by: Function = take) -> None:
        """Replace a module's function wherever it is held. An already replaced one does not change.

        by: called with the host, ours, the original and the arguments, in place of `take`.
        """

        def made(original: Any) -> Function:
            known = in_words_of(original, ours, name)

            # Marks of the original, such as torch.compile's, would lead Dynamo to the host's function.
            @wraps(ours if original is None else original, updated=())
            def function(*arguments: Any, **words: Any) -> Any:
                return by(self.host, known, original, *arguments, **words)

            function.__name__ = function.__qualname__ = name
            function.__module__ = module.__name__  # so that it is pickled as the host's
            return function

        self._exchange(module, f"{module.__name__}.{name}", made, what)

    def replace_method(self, cls: type, name: str, made: Callable[[Function], Function], what: Any) -> None:
        """Replace a method by `made(method)`, in the class that defines it. An already replaced one does not change."""
        cls = next(base for base in cls.__mro__ if name in vars(base))
        where = f"{cls.__module__}.{cls.__qualname__}.{name}"
        self._exchange(cls, where, lambda original: wraps(original)(made(original)), what)

    def _exchange(self, holder: Any, where: str, made: Callable[[Function], Function], what: Any) -> None:
        name, host = where.rpartition(".")[2], self.host
        original = getattr(holder, name)
        self.replaced[where] = what
        if original not in placed:
            function = made(original)
            self.place(function, where, partial(_exchange, holder, name, function, original), what, original)
            _exchange(holder, name, original, function)
        elif host not in (hosts := placed[original].hosts):
            hosts[host] = where
            self._ours.append(original)

    def place(self, ours: Any, where: str, undo: Function, what: Any = "jitrope", original: Any = None) -> None:
        """Note that ours is at a place of the host until `undo`."""
        placed[ours] = Placed({self.host: where}, original, what, undo)
        self._ours.append(ours)

    def __enter__(self: R) -> R:
        return self

    def __exit__(self, *_: object) -> None:
        restore(self.host, self._ours)

    def __str__(self) -> str:
        on = any(place.hosts.get(self.host) in self.replaced for place in list(placed.values()))
        ours = self.calls.total() - self.calls["host"]
        line = f"{self._replaced()}{'' if on else ' (disabled)'}; {counted(ours, 'call')} since; "
        reasons = "".join(f"\n  {n} x {reason}" for reason, n in self.reasons.most_common())
        return f"{line}{self.calls['host']} left to {self.host}{reasons}"

    __repr__ = __str__

    def _replaced(self) -> str:
        left = f", {len(self.left)} left alone" if self.left else ""
        return f"{counted(len(self.replaced), 'function')} replaced{left}"

    def table(self) -> str:
        """A line for each function: its name and its replacement, or why it was left alone."""
        rows = [f"{name}: {what}" for name, what in self.replaced.items()]
        return "\n".join([*rows, *(f"{name}: left alone: {why}" for name, why in self.left.items())])


def in_words_of(theirs: Any, ours: Function, name: str = "") -> Function:
    """Ours for calls of a host's function, whose parameters may be others than those that ours was written for.

    Ours gets its arguments by their names and with the host's defaults. A call with an argument that ours does not know
    raises InvalidInput, so the host's function runs. A function of ours with `*args` or `**words` gets all calls as
    they are. name: of the function, for the reason.
    """
    own, name = inspect.signature(ours).parameters, name or getattr(theirs, "__name__", "")
    try:
        host = inspect.signature(theirs).parameters
    except (TypeError, ValueError):  # None, or compiled code without a signature
        host = own
    told, known = ([(p.name, p.kind, p.default) for p in each.values()] for each in (host, own))
    if (host is not own and told == known) or any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in own.values()):
        return ours
    places, defaults = places_of(host.values()), {p.name: p.default for p in host.values() if p.default is not p.empty}
    needed = [n for n, p in own.items() if p.default is p.empty]

    def function(*arguments: Any, **words: Any) -> Any:
        given = {**dict(zip(places, arguments)), **words}
        if strange := others(given, own, defaults):
            raise InvalidInput(f"{UNKNOWN} {strange[0]} of {name}")
        given = {n: value for n, value in {**defaults, **given}.items() if n in own}
        if missing := [n for n in needed if n not in given]:
            raise InvalidInput(f"{name} was called without {missing[0]}")
        return ours(**given)

    return function


def places_of(parameters: Iterable[inspect.Parameter]) -> list[Any]:
    """The names of arguments by position, and numbers for those that have none."""
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [*names, *range(len(names) + 1, len(names) + 100)]


def others(given: Mapping[str, Any], known: Collection[str], defaults: Mapping[str, Any]) -> list[str]:
    """The arguments of a call that are not known, but for the host's defaults."""
    return [n for n, value in given.items() if n not in known and value is not defaults.get(n, inspect.Parameter.empty)]


def text_of(function: Any) -> str:
    """A digest of the source text of a host's function or class; "" if it has none.

    A whole forward that copies a host's is used only where the host's own text is the one that was copied.
    """
    try:
        return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]
    except (OSError, TypeError):
        return ""


def module_of(function: Any) -> str:
    """The name of the module with a function's code; of a wrapper its own."""
    names = getattr(function, "__globals__", {"__name__": type(function).__module__})
    return str(names.get("__name__"))


def padded(x: Tensor, axes: int = 4) -> Tensor:
    """x with leading axes of size 1."""
    return x if x.dim() == axes else x.reshape((1,) * (axes - x.dim()) + x.shape)


def broadcast(shape: Sequence[int], cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Tables that broadcast to a shape of up to four axes, padded to four. Raises InvalidInput for others."""
    fits = all(n in (1, m) for n, m in zip(cos.shape[::-1], shape[::-1]))
    if not fits or cos.shape != sin.shape or not 0 < cos.dim() <= len(shape) <= 4:
        raise InvalidInput(f"tables of shapes {tuple(cos.shape)} and {tuple(sin.shape)} for {tuple(shape)}")
    return padded(cos), padded(sin)


def own(package: str, function: Any) -> Any:
    """A package's function, or the one that jitrope replaced; None if someone else has replaced or decorated it."""
    function = original(function)
    return function if module_of(function).split(".")[0] == package else None


def original(function: Any) -> Any:
    """The function that jitrope replaced by this one, or the same."""
    return placed[function].original if function in placed else function


def counted(count: int, noun: str) -> str:
    """`1 call`, `2 calls`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def named(module: str, *functions: Function) -> dict[str, Function]:
    """Our functions by the places of a module's functions of the same names."""
    return {f"{module}:{function.__name__}": function for function in functions}


def load(host: str, module_name: str) -> ModuleType:
    """A module of a host. Raises ImportError if it cannot be imported."""
    try:
        return importlib.import_module(module_name)
    except Exception as error:  # a package that is broken may raise any
        raise ImportError(f"{host} cannot be imported: {type(error).__name__}: {error}") from error


def held(host: str, where: str) -> tuple[ModuleType, str]:
    """(module, name) of "module:name". Raises ImportError, or JitropeError if this version of the host lacks it."""
    module_name, name = where.split(":")
    module = load(host, module_name)
    if not hasattr(module, name):
        raise JitropeError(f"this version of {host} has no {where}, which jitrope would replace")
    return module, name


@alone
def enable(host: str, functions: Mapping[str, Function]) -> Report:
    """Replace a host's functions everywhere. Already replaced functions do not change.

    Args:
        host: its name.
        functions: "module:name" of the host's functions, and ours with the same signature. Calls that ours refuse
            with InvalidInput go to the host's.

    Raises:
        ImportError: the host cannot be imported.
        JitropeError: this version of the host lacks a function; nothing was replaced.
    """
    report, places = Report(host), [held(host, where) for where in functions]
    for (module, name), ours in zip(places, functions.values()):
        report.replace(module, name, ours, "jitrope")
    return report


def disabler(module: str) -> Callable[[], None]:
    """Return `disable` for a host's module, which has the host's name."""

    def disable() -> None:
        """Undo `enable`."""
        restore(module.split(".")[-1], list(placed))

    disable.__module__, disable.__qualname__ = module, "disable"
    return disable


@alone
def restore(host: str, functions: Iterable[Function]) -> None:
    """Undo a host's replacements. Calls that still run reach the host's own function as before."""
    for function in functions:
        hosts = placed[function].hosts if function in placed else {}
        if hosts.pop(host, None) and not hosts:
            placed.pop(function).undo()


def _exchange(holder: Any, name: str, before: Any, after: Any) -> None:
    """Replace a class's method, or a function in all loaded modules that hold it under this name, except jitrope's.

    A function that the host has as None is replaced in its own module alone.
    """
    holders = [holder]
    if isinstance(holder, ModuleType) and before is not None:
        holders += [each for path, each in list(sys.modules.items()) if path.split(".")[0] != __name__.split(".")[0]]
    for each in holders:
        if isinstance(each, (ModuleType, type)) and vars(each).get(name) is before:
            setattr(each, name, after)
