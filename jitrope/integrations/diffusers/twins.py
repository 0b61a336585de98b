"""Twins of the host's classes: subclasses with the host's own code, in which one name is another, the rope's.

An object becomes its twin, and itself again, by its `__class__`: state, identity, hooks and everything else in
its code stay the host's, whatever its version.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from inspect import CO_VARARGS, CO_VARKEYWORDS
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from ...base.errors import JitropeError
from .counting import note
from .forms import Form, rope_of

_EMBEDDINGS = "diffusers.models.embeddings"


class Site(NamedTuple):
    """A rope function that a class calls: its form, and its name in the code.

    through: a function of the host's module that calls it, where the class itself does not.
    """

    form: Form
    name: str
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
    code, names = function.__code__, function.__globals__
    name = site.through or site.name
    alias = f"_jitrope_{host.__name__}_{name}"
    nested = next((c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name), None)
    if nested is not None:
        if nested.co_freevars or nested.co_kwonlyargcount or nested.co_flags & (CO_VARARGS | CO_VARKEYWORDS):
            raise _unsupported(host, name)
        names[alias] = rope_of(site.form, FunctionType(nested, names, name))
        stub = _stub(nested, alias)
        return _copy(function, code.replace(co_consts=tuple(stub if c is nested else c for c in code.co_consts)))
    # A name that is imported inside the function gets its alias in the module that has it.
    holder = names if name in names else vars(sys.modules[_EMBEDDINGS])
    if name not in code.co_names or name not in holder:
        raise _unsupported(host, name)
    theirs = holder[name]
    holder[alias] = _redirected(theirs, site._replace(through=""), host) if site.through else rope_of(site.form, theirs)
    return _copy(function, code.replace(co_names=tuple(alias if n == name else n for n in code.co_names)))


def _stub(nested: CodeType, alias: str) -> CodeType:
    """The code of a function of the same arguments, which calls the one of that name."""
    names = ", ".join(nested.co_varnames[: nested.co_argcount])
    made = compile(f"lambda {names}: {alias}({names})", nested.co_filename, "eval")
    return next(code for code in made.co_consts if isinstance(code, CodeType)).replace(co_name=nested.co_name)


def _copy(function: Any, code: CodeType) -> Any:
    copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return functools.update_wrapper(copy, function)


def _unsupported(host: Any, name: str) -> JitropeError:
    version = importlib.import_module("diffusers").__version__
    return JitropeError(f"diffusers {version}: {host.__name__} does not call {name}")
