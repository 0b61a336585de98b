"""What the drop-ins of serving stacks share: views of flat heads, and the way back to the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor

from ..base.errors import InvalidInput
from ._patch import Patch


def heads(name: str, x: Tensor, token_axes: int, head_size: int) -> Tensor:
    """x, (..., H * head_size) or (..., H, head_size) after its token axes, as the latter: a view, whatever the strides.

    Splitting the last axis never copies, so what is written to the view is written to x.
    """
    *tokens, width = shape = x.shape
    axes = len(shape) - token_axes
    if axes == 1 and head_size > 0 and width % head_size == 0:
        return x.view(*tokens, width // head_size, head_size)
    if axes == 2 and width == head_size:
        return x
    lead = "T" if token_axes == 1 else "B, S"
    raise InvalidInput(
        f"{name} has shape {tuple(shape)}; with positions of {token_axes} axes and head_size {head_size} it is "
        f"({lead}, H * {head_size}) or ({lead}, H, {head_size})"
    )


def take_over(patch: Patch, where: str, ours: Callable[..., Any], **settings: Any) -> None:
    """Have `patch` put `ours`, with these settings, at "module:name", counted; what ours refuses the host's gets.

    A refusal comes before anything is written, and costs nothing where there is none.
    """

    @wraps(ours)
    def function(*arguments: Any, **words: Any) -> Any:
        try:
            result = ours(*arguments, **words, **settings)
        except InvalidInput:
            patch.count("host")
            return patch.originals[where](*arguments, **words)
        patch.count("jitrope")
        return result

    patch.replacements[where] = function
