"""The kinds of kernels, by the "kind" in a spec's `to_dict`."""

from __future__ import annotations

from typing import Any

from ..base.errors import InvalidInput
from ..base.spec import Spec

KINDS: dict[str, type[Spec]] = {}  # the spec class of each kind; a module with kernels adds its classes at import


def spec_from_dict(data: Any) -> Spec:
    """The inverse of every spec's `to_dict`. Raises InvalidInput for wrong data."""
    if not isinstance(data, dict):
        raise InvalidInput(f"a spec must be a table of fields, not {data!r}")
    kind = data.get("kind")
    if kind not in tuple(KINDS):
        raise InvalidInput(f"kind is {kind!r}; allowed are {', '.join(KINDS)}")
    return KINDS[kind].from_dict(data)
