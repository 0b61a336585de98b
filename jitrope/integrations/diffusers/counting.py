"""Which calls jitrope took, and why the others were left to the host."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from ...base.errors import InvalidInput

calls: Counter[str] = Counter()
"""So far, of every model that is enabled: tensors rotated by "jitrope", and calls left to the "host"; calls of
processors in which norm and rope were one launch, as "fused"."""

reasons: Counter[str] = Counter()
"""Why calls were the host's, or were not fused."""


@torch.compiler.assume_constant_result
def note(who: str, reason: str = "", count: int = 1) -> None:
    """Count a call by "jitrope", "fused" or "host", with the reason where it is not the best one.

    Dynamo runs this while it traces. Traced itself, it would be guarded by the number, and every call would be
    compiled again; so a compiled call counts once.
    """
    calls[who] += count
    if reason:
        reasons[reason] += 1


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
