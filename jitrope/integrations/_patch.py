"""Putting our functions where a host library holds its own, and taking them out again."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

calls: Counter[str] = Counter()
"""Calls so far of a host's functions while it is patched, by "<host>: jitrope" and "<host>: host"."""


@dataclass
class Patch:
    """What `enable` of a host did: which names in which modules are ours. As a context manager it undoes it.

    replacements: "module:name" of the host's functions, and ours. A module that came to hold a function
    by `from ... import` is found among those that are loaded; what loads later gets ours by itself.
    """

    host: str
    replacements: dict[str, Callable[..., Any]]
    optional: frozenset[str] = frozenset()
    originals: dict[str, Any] = field(default_factory=dict)
    replaced: list[str] = field(default_factory=list)
    _before: Counter[str] = field(default_factory=Counter)

    @property
    def enabled(self) -> bool:
        return bool(self.replaced)

    @property
    def calls(self) -> dict[str, int]:
        """Calls since: taken by jitrope, and left to the host."""
        return {who: calls[f"{self.host}: {who}"] - self._before[who] for who in ("jitrope", "host")}

    def count(self, who: str) -> None:
        """Note a call that jitrope took or left to the host."""
        if self.enabled:
            calls[f"{self.host}: {who}"] += 1

    def enable(self) -> Patch:
        """Put ours everywhere; twice changes nothing."""
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
            if where not in self.optional or hasattr(module, name):
                found[where] = (module, name, getattr(module, name), ours)
        self._before = Counter({who: calls[f"{self.host}: {who}"] for who in ("jitrope", "host")})
        for where, (module, name, original, ours) in found.items():
            self.originals[where] = original
            holders = [module] if original is None else self._holders(name, original)
            for holder in holders:
                setattr(holder, name, ours)
                self.replaced.append(f"{holder.__name__}.{name}")
        return self

    def disable(self) -> None:
        """Give the host its own functions back."""
        for where, original in self.originals.items():
            module_name, name = where.split(":")
            ours = self.replacements[where]
            holders = [sys.modules[module_name]] if original is None else self._holders(name, ours)
            for holder in holders:
                setattr(holder, name, original)
        self.originals.clear()
        self.replaced.clear()

    def _holders(self, name: str, function: Any) -> list[ModuleType]:
        """The host's loaded modules in which `name` is this function."""
        prefix = next(iter(self.replacements)).split(".")[0].split(":")[0]
        modules = [m for n, m in list(sys.modules.items()) if n == prefix or n.startswith(f"{prefix}.")]
        return [m for m in modules if m is not None and vars(m).get(name) is function]

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *_: object) -> None:
        self.disable()

    def __str__(self) -> str:
        return f"jitrope replaces {', '.join(self.replaced) or 'nothing'}; calls so far: {self.calls}"
