"""Twins of the host's classes: subclasses with the host's own code, in which another function replaces the rope.

Setting an object's `__class__` changes it to its twin and back. Its state, identity, hooks and all other code stay the
host's, in every version.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import sys
from collections.abc import Callable
from inspect import CO_VARARGS, CO_VARKEYWORDS
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from ...base.errors import JitropeError
from .. import _host
from .forms import Form, rope_of


class Site(NamedTuple):
    """A rope function that a class calls: its form, and its name in the code.

    through: the function of the host's module that calls it, if the class itself does not.
    """

    form: Form
    name: str
    through: str = ""


def host_of(cls: type) -> Any:
    """The host's class of a twin; any other class itself, which occurs if `disable` ran in another thread."""
    return getattr(cls, "_jitrope_host", cls)


def is_twin(cls: type) -> bool:
    """Whether a class itself is a twin. Sharding and parametrizing derive classes from a module's; these are kept."""
    return "_jitrope_host" in vars(cls)


def rope_replaced_by(host: Any, attribute: str, sites: tuple[Site, ...]) -> str:
    """The module of the other library whose function has the name of the host's rope, or ""."""
    for site in sites:
        rope = _holder(getattr(host, attribute), site.name).get(site.name)
        if rope is None:  # it is defined in the method
            continue
        module = _host.module_of(rope)
        if module.split(".")[0] not in ("diffusers", "jitrope"):
            return module
    return ""


def _holder(function: Any, name: str) -> dict[str, Any]:
    """The module's names that a name in a function's code means, also if the function imports it."""
    names: dict[str, Any] = function.__globals__
    known = name in names or name not in function.__code__.co_names
    return names if known else vars(sys.modules["diffusers.models.embeddings"])


def _now(holder: dict[str, Any], name: str) -> tuple[Callable[[], Any], Any]:
    """(A function that returns the value of a name in the host's module, as torch.compile can guard it; the value)."""
    code = compile(f"lambda: {name}", "<jitrope>", "eval").co_consts[0]
    return FunctionType(code, holder), holder[name]


def version() -> str:
    """diffusers' version."""
    return str(importlib.import_module("diffusers").__version__)


def twin(host: Any, attribute: str, original: Any, sites: tuple[Site, ...], call: Any = None) -> type:
    """Make a subclass of `host` whose method `attribute`, now `original`, calls our ropes, or is `call`.

    Raises JitropeError if the rope function's name is not in the method's code. With a `call` it may be missing: then
    there is no `_jitrope_rope`, and `_jitrope_missed` is the reason.
    """
    ropes = [_holder(original, site.name).get(site.name) for site in sites]
    return _twin(host, attribute, original, sites, call, *ropes)


@functools.cache
def _twin(host: Any, attribute: str, original: Any, sites: tuple[Site, ...], call: Any, *ropes: Any) -> type:
    members: dict[str, Any] = {"_jitrope_host": host, "__module__": host.__module__, "_jitrope_missed": ""}
    holders = [(_holder(original, site.name), site.name) for site in sites]  # not of ropes that the method defines
    members["_jitrope_ropes"] = tuple([_now(names, name) for names, name in holders if name in names])
    redirected = original
    try:
        for site in sites:
            redirected = members["_jitrope_rope"] = _redirected(redirected, site, host)
    except JitropeError as error:
        if call is None:
            raise JitropeError(f"{error}; jitrope is tested with diffusers 0.36 to 0.42") from None
        members.pop("_jitrope_rope", None)
        members["_jitrope_missed"] = str(error)
    members["__reduce_ex__"] = _reduced(host, call is not None)
    members[attribute] = _current(host, attribute, original, call or redirected)
    cls = type(f"Jitrope{host.__name__}", (host,), members)
    try:  # diffusers' layer skipping has a list of processors
        registry = importlib.import_module("diffusers.hooks._helpers").AttentionProcessorRegistry
        registry.register(cls, registry.get(host))
    except (ImportError, AttributeError, ValueError):  # an older version, or a class that is not in the list
        pass
    return cls


def _current(host: Any, attribute: str, original: Any, ours: Callable[..., Any]) -> Callable[..., Any]:
    """Call ours, until another library puts its own method into the host's class; then call that one."""

    @functools.wraps(original)  # the host inspects the signature
    def method(self: Any, *arguments: Any, **words: Any) -> Any:
        if type(self) is not host and getattr(host, attribute) is original:
            return ours(self, *arguments, **words)
        if type(self) is not host:  # otherwise it was restored; hooks may still hold this method
            _host.note("diffusers", "host", f"{host.__name__}.{attribute} was replaced after enable; enable again")
        return getattr(host, attribute)(self, *arguments, **words)

    return method


def _reduced(host: Any, fused: bool) -> Callable[..., Any]:
    """`__reduce_ex__` of a twin: pickle it as an object of the host's class, which `reloaded` replaces again."""

    def reduced(self: Any, protocol: Any) -> tuple[Any, ...]:
        from . import reloaded  # that module imports this one

        make, (_, *arguments), *state = host.__reduce_ex__(self, protocol)
        return reloaded, (make, host, fused, *arguments), *state

    return reduced


_numbers = itertools.count()


def _redirected(function: Any, site: Site, host: Any) -> Any:
    """The function, with the site's name referring to our rope."""
    code, names = function.__code__, function.__globals__
    name = site.through or site.name
    alias = f"_jitrope_{host.__name__}_{name}_{next(_numbers)}"  # another twin may have another rope
    missed = JitropeError(f"diffusers {version()}: {host.__name__} does not call {name}")
    nested = next((c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name), None)
    if nested is not None:
        if nested.co_freevars or nested.co_kwonlyargcount or nested.co_flags & (CO_VARARGS | CO_VARKEYWORDS):
            raise missed
        names[alias] = rope_of(site.form, FunctionType(nested, names, name))
        stub = _stub(nested, alias)
        return _host.with_code(
            function, code.replace(co_consts=tuple(stub if c is nested else c for c in code.co_consts))
        )
    # If the function imports the name, its alias must be in the module that has the name.
    holder = _holder(function, name)
    if name not in code.co_names or name not in holder:
        raise missed
    now, theirs = _now(holder, name)
    through = site._replace(through="")
    holder[alias] = _redirected(theirs, through, host) if site.through else rope_of(site.form, theirs, now)
    return _host.with_code(function, code.replace(co_names=tuple(alias if n == name else n for n in code.co_names)))


def _stub(nested: CodeType, alias: str) -> CodeType:
    """The code of a function with the same arguments that calls the function of that name."""
    names = ", ".join(nested.co_varnames[: nested.co_argcount])
    made = compile(f"lambda {names}: {alias}({names})", nested.co_filename, "eval")
    return next(code for code in made.co_consts if isinstance(code, CodeType)).replace(co_name=nested.co_name)
