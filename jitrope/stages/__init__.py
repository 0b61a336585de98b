"""The stages of a call in plain torch, one file each, on heads (batch, seq, heads, head_dim). `chain` calls them.

forward(letter, x, t, o) -> heads. letter: "q", "k", "v" or "gate", whose heads a stage returns as they are if it does
not apply to them. t: the call's tensors by name, with heads by letter. o: its options. `back` is the gradient; a call
with a stage that lacks it has none. A bias is added as a projection is read.

A stage is named here, and in the list of its kernel. Its file has, where the stage needs it:
LABEL: the word or the tensor that asks for it, or the word for it in messages, if that is not its name.
TENSORS, Words, check(t, o, fail): its tensors and words, and what is refused.
WHOLE: words and tensors with which a kernel must take whole heads.
ARGUMENTS, Fields: the arguments and constants of its kernel. A field with "given" says whether a call has that tensor,
or a number other than 0.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from . import bias, convert, norm, rotate, scale, transform

STAGES = {x.__name__.rpartition(".")[2]: x for x in (bias, norm, rotate, scale, transform, convert)}
"""The stages by name, in the order of a call's text."""
_BY_LABEL: dict[str, Any] = {getattr(stage, "LABEL", name): stage for name, stage in STAGES.items()}
BEHIND = [*STAGES.values()][3:-1]
"""Those between the rotation and a conversion."""
WHOLE = frozenset([word for stage in STAGES.values() for word in getattr(stage, "WHOLE", ())])
LAST = " ".join([label for label, stage in _BY_LABEL.items() if not hasattr(stage, "back")])
"""The labels of those without a gradient."""


class Words(transform.Words, norm.Words, rotate.Words, convert.Words):
    """The words of all stages."""


class Fields(convert.Fields, bias.Fields, transform.Fields, scale.Fields, norm.Fields, rotate.Fields):
    """The constants of all stages."""


def present(given: Container[str], o: Any) -> list[str]:
    """The labels of the stages of a call, but for the rotation. given: its tensors, or their names."""
    own = {"norm": norm.normed(o), convert.LABEL: convert.converts(given, o)}
    return [label for label in _BY_LABEL if own.get(label, label in given or getattr(o, label, False))]
