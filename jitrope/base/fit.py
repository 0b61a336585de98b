"""What a tensor of any kind must be. A refusal names the argument, its value and the allowed values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from .arguments import shown
from .errors import InvalidInput
from .layouts import LAYOUT_AXES
from .views import MEANS

FLOATS: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)
INTEGERS: tuple[torch.dtype, ...] = (torch.int32, torch.int64)
USERS_NAMES = {"q_factor": "q_scale", **{name: f"mean_squares' {name[0]}" for name in MEANS}}
"""The users' names of tensors that have another name in a call."""


class Fail(NamedTuple):
    """Raise InvalidInput(text) for a call of a function.

    owner: the user's name of the heads that a tensor must fit. main: that of the heads with the sizes of the call.
    """

    name: str
    owner: str = "q"
    heads: Tensor | None = None
    layout: str = ""
    main: str = "q"

    def __call__(self, text: str) -> NoReturn:
        raise InvalidInput(f"{self.name}: {text}")

    def when(self, wrong: object, text: str) -> None:
        if wrong:
            self(text)

    def before_last(self, what: str, head_dim: int, o: Any) -> int:
        """The elements of a head before the rotated ones, for what takes both apart. These must be its last."""
        had = f"{what} goes with heads whose last elements are rotated, behind others; D is {head_dim}"
        wrong = o.rotary_offset == 0 or o.rotary_offset + o.rotary_dim != head_dim
        self.when(wrong, f"{had}, rotary_offset {o.rotary_offset} and rotary_dim {o.rotary_dim}")
        return int(o.rotary_offset)

    def unlike(
        self,
        label: str,
        x: Tensor,
        device: torch.device,
        dtypes: Sequence[torch.dtype],
        *shapes: Sequence[Any],
        contiguous: bool = False,
        like: str = "",
        hint: str = "",
    ) -> None:
        """Refuse a tensor with another dtype, device or shape. No shapes: it may have any.

        Of each axis a shape has its size, a tuple of the sizes that it may have, or a name for any size. like: the
        argument that it must fit, if not the owner's heads. hint: what else to do, after a semicolon.
        """
        same = x.device == device and x.dtype in dtypes and (x.is_contiguous() or not contiguous)
        if not same or (shapes and not any(_fits(x.shape, shape) for shape in shapes)):
            *names, own = [str(dtype).removeprefix("torch.") for dtype in (*dtypes, x.dtype)]
            must = [" or ".join(map(_shown, shapes)), " or ".join(names), "contiguous" * contiguous, f"on {device}"]
            fits = f" like {like or self.owner}" * (label != (like or self.owner))
            had = shown(x) if x.dtype in dtypes else own  # a host counts the messages, so a dtype has one
            if had != own and self.heads is not None and not like:
                fits += f" {named(self.heads, self.layout)}"
            had += f", with strides {tuple(x.stride())}" * (contiguous and not x.is_contiguous())
            self(f"{label} is {had}; it must be {', '.join([x for x in must if x])}{fits}{hint}")


def _fits(sizes: Sequence[int], shape: Sequence[Any]) -> bool:
    fit = [x == size or isinstance(x, str) or (isinstance(x, tuple) and size in x) for size, x in zip(sizes, shape)]
    return len(sizes) == len(shape) and all(fit)


def _shown(shape: Sequence[Any]) -> str:
    axes = ["|".join(dict.fromkeys(map(str, x))) if isinstance(x, tuple) else str(x) for x in shape]
    return f"({', '.join(axes)}{',' * (len(axes) == 1)})"


def sizes_of(x: Tensor, layout: str) -> list[int]:
    """The sizes (B, S, H, D) of a tensor in `layout`."""
    return [1 if axis is None else x.shape[axis] for axis in LAYOUT_AXES[layout]]


def named(x: Tensor, layout: str) -> str:
    """A shape by its letters: `(B=2, S=128, H=32, D=64)`."""
    return "(" + ", ".join(f"{letter.upper()}={size}" for letter, size in zip(layout, x.shape)) + ")"
