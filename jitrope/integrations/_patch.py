"""Putting our functions where a host library holds its own, and taking them out again."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from ..base.errors import JitropeError

calls: Counter[str] = Counter()
"""Calls so far of a host's functions while it is patched, by "HOST: jitrope" and "HOST: host"."""


@torch.compiler.assume_constant_result
def note(what: str) -> None:
    """Count a call. Dynamo runs this as it traces: traced itself it would be guarded by the number, and every
    call compiled anew; so a compiled call counts once."""
    calls[what] += 1


@dataclass
class Patch:
    """What `enable` of a host did: which names in which modules are ours.

    As a context manager it undoes the `enable` that it is entered with, unless that changed nothing.

    A module, the host's or another's, that came to hold a function by `from ... import` is found among those that are
    loaded; what loads later gets ours by itself.

    Attributes:
        host: its name.
        replacements: "module:name" of the host's functions, and ours.
        optional: those of them that a version may not have.
        originals: by the same names, the host's own. They stay after `disable`: calls may still run.
        holders: (module, name, the host's function) of every place that has ours.
    """

    host: str
    replacements: dict[str, Callable[..., Any]]
    optional: frozenset[str] = frozenset()
    originals: dict[str, Any] = field(default_factory=dict)
    holders: list[tuple[ModuleType, str, Any]] = field(default_factory=list)
    _before: Counter[str] = field(default_factory=Counter)
    _changed: bool = False
    _entered: list[bool] = field(default_factory=list)

    @property
    def enabled(self) -> bool:
        """Whether anything is ours."""
        return bool(self.holders)

    @property
    def replaced(self) -> list[str]:
        """The names that are ours now."""
        return [f"{module.__name__}.{name}" for module, name, _ in self.holders]

    @property
    def calls(self) -> dict[str, int]:
        """Calls since: taken by jitrope, and left to the host."""
        return {who: calls[f"{self.host}: {who}"] - self._before[who] for who in ("jitrope", "host")}

    def count(self, who: str) -> None:
        """Note a call that jitrope took or left to the host."""
        if self.enabled:
            note(f"{self.host}: {who}")

    def enable(self) -> Patch:
        """Put ours everywhere; twice changes nothing.

        Raises:
            ImportError: the host is not installed.
            JitropeError: this version of it lacks a function that is to be replaced; nothing was.
        """
        self._changed = not self.enabled
        if self.enabled:
            return self
        found = {}
        for where, ours in self.replacements.items():
            module_name, name = where.split(":")
            try:
                module = importlib.import_module(module_name)
            except ImportError:
                if where in self.optional:
                    continue
                raise
            if hasattr(module, name):
                found[where] = (module, name, getattr(module, name), ours)
            elif where not in self.optional:
                raise JitropeError(f"this version of {self.host} has no {where}, which jitrope would replace")
        self._before = Counter({who: calls[f"{self.host}: {who}"] for who in ("jitrope", "host")})
        for where, (module, name, original, ours) in found.items():
            self.originals[where] = original
            for holder in [module] if original is None else _holders(name, original):
                setattr(holder, name, ours)
                self.holders.append((holder, name, original))
        return self

    def disable(self) -> None:
        """Give the host its own functions back, in its modules that were loaded since too."""
        for where, original in self.originals.items():
            module_name, name = where.split(":")
            prefix = module_name.split(".")[0] + "."
            later = [m for m in _holders(name, self.replacements[where]) if m.__name__.startswith(prefix)]
            self.holders += [(module, name, original) for module in later]
        for holder, name, original in self.holders:
            setattr(holder, name, original)
        self.holders.clear()

    def __enter__(self) -> Patch:
        self._entered.append(self._changed)
        self._changed = False
        return self

    def __exit__(self, *_: object) -> None:
        if self._entered.pop():
            self.disable()

    def __str__(self) -> str:
        return f"jitrope replaces {', '.join(self.replaced) or 'nothing'}; calls so far: {self.calls}"


def _holders(name: str, function: Any) -> list[ModuleType]:
    """The loaded modules, ours apart, in which `name` is this function."""
    modules = [m for n, m in list(sys.modules.items()) if isinstance(m, ModuleType) and not n.startswith("jitrope")]
    return [m for m in modules if vars(m).get(name) is function]
