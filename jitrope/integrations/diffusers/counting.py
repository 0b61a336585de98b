"""Which calls jitrope took, and why the others were left to the host."""

from __future__ import annotations

from collections import Counter

import torch

calls: Counter[str] = Counter()
"""So far, of every model that is enabled: tensors rotated by "jitrope", and calls left to the "host"; calls of
processors in which norm and rope were one launch, as "fused"."""

reasons: Counter[str] = Counter()
"""Why calls were the host's, or were not fused."""


@torch.compiler.assume_constant_result
def note(who: str, reason: str = "", count: int = 1) -> None:
    """Count a call by "jitrope", "fused" or "host", with the reason where it is not the best one.

    Dynamo runs this as it traces: traced itself it would be guarded by the number, and every call compiled
    anew; so a compiled call counts once.
    """
    calls[who] += count
    if reason:
        reasons[reason] += 1
