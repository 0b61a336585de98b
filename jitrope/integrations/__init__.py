"""Replacements for the rope of host libraries, one module for each library.

.. include:: README.md
"""

from importlib import import_module as _import_module
from importlib.util import find_spec as _find_spec
from types import ModuleType as _ModuleType


def __getattr__(name: str) -> _ModuleType:
    """Import `jitrope.integrations.diffusers` and the other modules at their first use."""
    module = f"{__name__}.{name}"
    if name.startswith("_") or "." in name or _find_spec(module) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _import_module(module)
