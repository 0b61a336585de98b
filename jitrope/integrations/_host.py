"""Replace functions of a host library by jitrope's, restore them, and count the calls."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial, wraps
from types import ModuleType
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import nn

from ..base.config import log
from ..base.errors import InvalidInput, JitropeError

Function = Callable[..., Any]
F = TypeVar("F", bound=Function)
T = TypeVar("T")
R = TypeVar("R", bound="Report")

calls: defaultdict[str, Counter[str]] = defaultdict(Counter)
"""For each host, the calls so far: by "jitrope", or left to the "host"."""

reasons: defaultdict[str, Counter[str]] = defaultdict(Counter)
"""For each host, the reasons why calls were left to it: jitrope's messages, with counts."""

COMPLEX = {torch.complex64: "complex64", torch.complex128: "complex128"}
"""The rounding of a host that multiplies by a complex table, by the dtype of the table."""

UNKNOWN = "jitrope does not know the argument"
_MOST_REASONS = 100  # messages contain shapes, so there may be any number


# ---- a call --------------------------------------------------------------------------------------------


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


def take(host: str, ours: Callable[..., T], theirs: Callable[..., T] | None, *arguments: Any, **words: Any) -> T:
    """Call `ours` or, if it raises InvalidInput, `theirs`, and count the call.

    A refusal comes before anything is written, so the host gets unchanged arguments. If `theirs` is None, the error is
    raised.
    """
    try:
        result = ours(*arguments, **words)
    except InvalidInput as error:
        if theirs is None:
            raise
        reason = error.args[0]
    else:
        note(host, "jitrope")
        return result
    note(host, "host", reason)
    return theirs(*arguments, **words)


def note_unfused(host: str, reason: str) -> None:
    """Log why norms are not fused. The functions that then run count themselves."""
    note(host, "host", f"not fused: {reason}", 0)


def or_else(host: str, who: str, ours: Function, otherwise: Function) -> Function:
    """`ours`, which returns (result, number of calls to count for `who`), or `otherwise` for a call that it refuses.

    `otherwise` takes the reason, then the same arguments; it counts the call itself.
    """

    def function(*arguments: Any, **words: Any) -> Any:
        try:
            result, count = ours(*arguments, **words)
        except InvalidInput as error:
            reason = error.args[0]
        else:
            note(host, who, count=count)
            return result
        return otherwise(reason, *arguments, **words)  # not in `except`, which would keep our tensors alive

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
        verb: what was done with the functions; "registered" in a host with a registry.
    """

    host: str
    replaced: dict[str, Any] = field(default_factory=dict)
    left: dict[str, Any] = field(default_factory=dict)
    verb: str = "replaced"
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)

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
        where = f"{module.__name__}.{name}"
        self.replaced[where] = what
        host, original = self.host, getattr(module, name)
        if original in placed:
            if host not in (hosts := placed[original].hosts):
                hosts[host] = where
                self._undo.append(partial(restore, host, [original]))
            return

        known = in_words_of(original, ours, name)

        # Marks of the original, such as torch.compile's, would lead Dynamo to the host's function.
        @wraps(ours if original is None else original, updated=())
        def function(*arguments: Any, **words: Any) -> Any:
            return by(host, known, original, *arguments, **words)

        function.__name__ = function.__qualname__ = name
        function.__module__ = module.__name__  # so that it is pickled as the host's
        self.place(function, where, partial(_exchange, name, function, original), what, original)
        setattr(module, name, function)
        if original is not None:
            _exchange(name, original, function)

    def replace_method(self, cls: type, name: str, made: Callable[[Function], Function], what: Any) -> None:
        """Replace a method by `made(method)`, in the class that defines it. An already replaced one does not change."""
        cls = next(base for base in cls.__mro__ if name in vars(base))
        where, original = f"{cls.__module__}.{cls.__qualname__}.{name}", vars(cls)[name]
        self.replaced[where] = what
        if original in placed:
            return
        function = wraps(original)(made(original))

        def undo() -> None:
            if vars(cls).get(name) is function:  # else someone has replaced it since
                setattr(cls, name, original)

        self.place(function, where, undo, what, original)
        setattr(cls, name, function)

    def place(self, ours: Any, where: str, undo: Function, what: Any = "jitrope", original: Any = None) -> None:
        """Note that ours is at a place of the host until `undo`."""
        placed[ours] = Placed({self.host: where}, original, what, undo)
        self._undo.append(partial(restore, self.host, [ours]))

    def __enter__(self: R) -> R:
        return self

    def __exit__(self, *_: object) -> None:
        for undo in self._undo:
            undo()

    def __str__(self) -> str:
        ours = sum(count for who, count in self.calls.items() if who != "host")
        line = f"{self._state()}; {counted(ours, 'call')} since; {self.calls['host']} left to {self.host}"
        return line + "".join(f"\n  {n} x {reason}" for reason, n in self.reasons.most_common())

    def __repr__(self) -> str:
        return f"<jitrope in {self.host}: {self._state()}>"

    def _state(self) -> str:
        return self._replaced() + ("" if self._active() else " (disabled)")

    def _active(self) -> bool:
        """Whether one of the functions is replaced now."""
        return any(place.hosts.get(self.host) in self.replaced for place in list(placed.values()))

    def _replaced(self) -> str:
        left = f", {len(self.left)} left alone" if self.left else ""
        return f"{counted(len(self.replaced), 'function')} {self.verb}{left}"

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
    kept = {n: default for n, default in defaults.items() if n in own}
    needed = [n for n, p in own.items() if p.default is p.empty and n not in kept]

    def function(*arguments: Any, **words: Any) -> Any:
        given = {**dict(zip(places, arguments)), **words}
        if strange := others(given, own, defaults):
            raise InvalidInput(f"{UNKNOWN} {strange[0]} of {name}")
        if missing := [n for n in needed if n not in given]:
            raise InvalidInput(f"{name} was called without {missing[0]}")
        return ours(**{**kept, **{n: value for n, value in given.items() if n in own}})

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


def own(package: str, function: Any) -> Any:
    """A function, or None if its code is not of this package, because it was replaced or decorated."""
    return function if module_of(function).split(".")[0] == package else None


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
def enable(host: str, functions: Mapping[str, Function], optional: Collection[str] = ()) -> Report:
    """Replace a host's functions everywhere. Already replaced functions do not change.

    Args:
        host: its name.
        functions: "module:name" of the host's functions, and ours with the same signature. Calls that ours refuse
            with InvalidInput go to the host's.
        optional: functions that some versions of the host lack.

    Raises:
        ImportError: the host cannot be imported.
        JitropeError: this version of the host lacks a function that is not optional; nothing was replaced.
    """
    found, absent = {}, {}
    for where in functions:
        try:
            found[where] = held(host, where)
        except (ImportError, JitropeError) as error:
            if where not in optional:
                raise
            absent[where.replace(":", ".")] = str(error)
    report = Report(host, left=absent)
    for where, (module, name) in found.items():
        report.replace(module, name, functions[where], "jitrope")
    return report


def of_other(host: str, model: Any) -> str:
    """The advice to use another module of integrations, if a model or a pipeline is of its host; else ""."""
    parts = model.modules() if isinstance(model, nn.Module) else [model]
    libraries = {base.__module__.split(".")[0] for part in parts for base in type(part).__mro__}
    others = [] if host in libraries else sorted({"diffusers", "transformers"} & libraries)
    return "".join(f"; it is of {other}: use jitrope.integrations.{other}" for other in others)


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
        place = placed.get(function)
        if place is not None and host in place.hosts:
            del place.hosts[host]
            if not place.hosts:
                del placed[function]
                place.undo()


def _exchange(name: str, before: Any, after: Any) -> None:
    """Replace a function in all loaded modules that hold it under this name, except jitrope's."""
    for path, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and not path.startswith("jitrope") and vars(module).get(name) is before:
            setattr(module, name, after)
