"""Which calls jitrope took, and why the others were left to the host."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ...base.errors import InvalidInput
from .. import _host

calls = _host.calls["diffusers"]
"""So far, of every model that is enabled: tensors rotated by "jitrope", and calls left to the "host"; calls of
processors in which norm and rope were one launch, as "fused"."""

reasons = _host.reasons["diffusers"]
"""Why calls were the host's, or were not fused."""


def note(who: str, reason: str = "", count: int = 1) -> None:
    """Count a call by "jitrope", "fused" or "host", with the reason where it is not the best one."""
    _host.note("diffusers", who, reason, count)


def or_else(ours: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """`ours`, which gives (result, "jitrope" or "fused", how many to count); `otherwise` for a call that it refuses.

    `otherwise` takes the reason, then the same arguments. jitrope refuses a call before anything of it is written.
    """

    @functools.wraps(ours)
    def function(*arguments: Any, **words: Any) -> Any:
        try:
            result, who, count = ours(*arguments, **words)
        except InvalidInput as refusal:
            reason = str(refusal)
        else:
            note(who, count=count)
            return result
        return otherwise(reason, *arguments, **words)  # not in `except`, which would keep tensors of ours alive

    return function
