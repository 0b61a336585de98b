"""Twins of the host's classes: subclasses with the host's own code, in which one name is another, the rope's.

An object becomes its twin, and itself again, by its `__class__`: state, identity, hooks and everything else in
its code stay the host's, whatever its version.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from ...base.errors import JitropeError
from .counting import note
from .ropes import Rope

_EMBEDDINGS = "diffusers.models.embeddings"


@dataclass(frozen=True)
class Site:
    """A rope function that a class calls, by its name in the code, and ours for it.

    through: a function of the host's module that calls it, where the class itself does not.
    """

    name: str
    rope: Rope
    through: str = ""


def host_of(cls: type) -> Any:
    """The host's class of a twin, or the class itself, which a call finds if `disable` ran in another thread."""
    return getattr(cls, "_jitrope_host", cls)


def is_twin(cls: type) -> bool:
    """Whether a class is a twin itself. Sharding and parametrizing derive classes of a module's, which stay."""
    return "_jitrope_host" in vars(cls)


def replaced_by(host: Any, attribute: str) -> str:
    """The module of another library's function that the host's method has become, or ""."""
    module: str = getattr(host, attribute).__module__ or ""
    return "" if module.split(".")[0] == "diffusers" else module


@functools.cache
def twin(host: Any, attribute: str, original: Any, sites: tuple[Site, ...], call: Any = None) -> type:
    """A subclass of `host` whose method `attribute`, now `original`, calls our ropes, or is `call`.

    With a `call` the ropes may be missed: then there is no `_jitrope_rope`, and `_jitrope_missed` says why.

    Raises:
        JitropeError: the rope function's name is not in the method's code, and there is no `call`.
    """
    members: dict[str, Any] = {"_jitrope_host": host, "__module__": host.__module__, "_jitrope_missed": ""}
    try:
        redirected = functools.reduce(lambda function, site: _redirected(function, site, host), sites, original)
    except JitropeError as error:
        if call is None:
            raise JitropeError(f"{error}; this version is not supported") from None
        members["_jitrope_missed"] = str(error)
    else:
        if sites:
            members["_jitrope_rope"] = redirected
    members["__reduce_ex__"] = _reduced(host, call is not None)
    members[attribute] = _current(host, attribute, original, call or redirected)
    cls = type(f"Jitrope{host.__name__}", (host,), members)
    _register(host, cls)
    return cls


def _current(host: Any, attribute: str, original: Any, ours: Callable[..., Any]) -> Callable[..., Any]:
    """Ours, until another library puts its own method into the host's class, which is then called."""

    @functools.wraps(original)  # the host looks at the signature
    def method(self: Any, *arguments: Any, **words: Any) -> Any:
        if type(self) is host:  # it was given back; hooks may still hold this method
            return getattr(host, attribute)(self, *arguments, **words)
        if getattr(host, attribute) is not original:
            note("host", f"{host.__name__}.{attribute} was replaced after enable; enable again")
            return getattr(host, attribute)(self, *arguments, **words)
        return ours(self, *arguments, **words)

    return method


def _reduced(host: Any, fused: bool) -> Callable[..., Any]:
    """A twin's way to be pickled and copied: as an object of the host's class, which `reloaded` makes a twin again."""

    def reduced(self: Any, protocol: Any) -> tuple[Any, ...]:
        from . import reloaded  # which imports this module

        make, (_, *arguments), *state = host.__reduce_ex__(self, protocol)
        return reloaded, (make, host, fused, *arguments), *state

    return reduced


def _register(host: Any, cls: Any) -> None:
    """diffusers' layer skipping looks a processor's class up in a table."""
    try:
        registry = importlib.import_module("diffusers.hooks._helpers").AttentionProcessorRegistry
        registry.register(cls, registry.get(host))
    except (ImportError, AttributeError, ValueError):  # an older version, or a class that is not in it
        pass


def _redirected(function: Any, site: Site, host: Any) -> Any:
    """The function with the name of the site pointing at ours."""
    names = function.__globals__
    alias = f"_jitrope_{site.name.strip('_')}_{site.rope.__name__}"
    code = function.__code__
    if site.through:
        if site.through not in code.co_names or site.through not in names:
            raise _unsupported(host, site.through)
        inner = _redirected(names[site.through], Site(site.name, site.rope), host)
        alias = f"_jitrope_{site.through.strip('_')}"
        names[alias] = inner
        return _copy(function, _renamed(code, site.through, alias))
    nested = next((c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == site.name), None)
    if nested is not None:
        if nested.co_freevars or nested.co_argcount not in _STUBS:
            raise _unsupported(host, site.name)
        names[alias] = functools.partial(site.rope, FunctionType(nested, names, site.name))
        stub = _STUBS[nested.co_argcount].__code__.replace(
            co_names=(alias,), co_name=site.name, co_varnames=nested.co_varnames[: nested.co_argcount]
        )
        return _copy(function, code.replace(co_consts=tuple(stub if c is nested else c for c in code.co_consts)))
    if site.name not in code.co_names:
        raise _unsupported(host, site.name)
    if site.name in names:
        names[alias] = functools.partial(site.rope, names[site.name])
    else:  # imported inside the function: the module that has it gets the alias
        module = sys.modules[_EMBEDDINGS]
        setattr(module, alias, functools.partial(site.rope, vars(module)[site.name]))
    return _copy(function, _renamed(code, site.name, alias))


def _renamed(code: CodeType, name: str, alias: str) -> CodeType:
    return code.replace(co_names=tuple(alias if n == name else n for n in code.co_names))


def _copy(function: Any, code: CodeType) -> Any:
    copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return functools.update_wrapper(copy, function)


def _unsupported(host: Any, name: str) -> JitropeError:
    version = importlib.import_module("diffusers").__version__
    return JitropeError(f"diffusers {version}: {host.__name__} does not call {name}")


# A function nested in a method becomes a stub of the same arguments, which calls ours.
def _stub_of_two(x, table):  # type: ignore[no-untyped-def]
    return alias(x, table)  # type: ignore[name-defined]  # noqa: F821


def _stub_of_three(x, cos, sin):  # type: ignore[no-untyped-def]
    return alias(x, cos, sin)  # type: ignore[name-defined]  # noqa: F821


_STUBS: dict[int, Any] = {2: _stub_of_two, 3: _stub_of_three}
