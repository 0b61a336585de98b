"""The stages of a call in plain torch, one file each, on heads (batch, seq, heads, head_dim). `chain` calls them.

forward(letter, x, t, o) -> heads. letter: "q", "k", "v" or "gate", whose heads a stage returns as they are if it does
not apply to them. t: the call's tensors by name, with heads by letter. o: its options. A bias is added as a projection
is read. A call with a stage that has no `back` has no gradient. `README.md` beside this folder says how to add one.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from . import bias, convert, norm, rotate, scale, transform

BEHIND: dict[str, Any] = {stage.LABEL: stage for stage in (scale, transform)}
"""The stages between the rotation and a conversion, by the word or the tensor that asks for them."""
STAGES = {x.__name__.rpartition(".")[2]: x for x in (bias, norm, rotate, *BEHIND.values(), convert)}
"""All stages by name, in the order of a call's text."""
WHOLE = frozenset([*convert.WHOLE, *[label for label, stage in BEHIND.items() if not hasattr(stage, "PLAIN")]])
"""The words and tensors of stages that the kernel of a plain rotation has not."""
LAST = " ".join([convert.LABEL, *[label for label, stage in BEHIND.items() if not hasattr(stage, "back")]])
"""The labels of stages without a gradient."""


class Words(transform.Words, norm.Words, rotate.Words, convert.Words):
    """The words of all stages."""


class Fields(convert.Fields, bias.Fields, transform.Fields, scale.Fields, norm.Fields, rotate.Fields):
    """The constants of all stages."""


def present(given: Container[str], o: Any) -> list[str]:
    """The labels of the stages of a call, but for the rotation. given: its tensors, or their names."""
    own = {"norm": norm.normed(o), convert.LABEL: convert.converts(given, o)}
    return [label for label in ("bias", *BEHIND, *own) if own.get(label, label in given or getattr(o, label, False))]
