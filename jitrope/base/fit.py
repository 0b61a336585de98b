"""What a tensor of any kind must be. A refusal names the argument, its value and the allowed values."""

from __future__ import annotations

from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from .errors import InvalidInput
from .layouts import LAYOUT_AXES
from .spec import DTYPES
from .views import DTYPE_NAMES, MEANS

USERS_NAMES = {"q_factor": "q_scale", **{name: f"mean_squares' {name[0]}" for name in MEANS}}
"""The users' names of tensors that have another name in a call."""


class Fail(NamedTuple):
    """Raise InvalidInput(text) for a call of a function."""

    name: str

    def __call__(self, text: str) -> NoReturn:
        raise InvalidInput(f"{self.name}: {text}")

    def when(self, wrong: object, text: str) -> None:
        if wrong:
            self(text)


def check_device(label: str, x: Tensor, owner: str, q: Tensor, fail: Fail) -> None:
    fail.when(x.device != q.device, f"{label} is on {x.device} but {owner} is on {q.device}")


def check_integers(label: str, x: Tensor, q: Tensor, fail: Fail) -> None:
    fail.when(x.dtype not in (torch.int32, torch.int64), f"{label} is {x.dtype}; allowed are int32 and int64")
    check_device(label, x, "q", q, fail)


def check_floats(label: str, x: Tensor, fail: Fail) -> None:
    fail.when(not is_float(x), f"{label} is {x.dtype}; allowed are fp32, fp16 and bf16")


def check_contiguous(label: str, x: Tensor, fail: Fail) -> None:
    fail.when(not x.is_contiguous(), f"{label} has stride{'s' * (x.dim() > 1)} {x.stride()}; it must be contiguous")


def check_one_axis(label: str, x: Tensor, fail: Fail) -> None:
    fail.when(x.dim() != 1, f"{label} has shape {tuple(x.shape)}; it must have one axis")


def check_shape(label: str, x: Tensor, allowed: list[tuple[int, ...]], fail: Fail, had: str = "") -> None:
    """Refuse another shape than the allowed ones. had: what it must fit, for the message."""
    must = f"allowed are {', '.join(dict.fromkeys(map(str, allowed)))}"
    fail.when(tuple(x.shape) not in allowed, f"{had}{label} has shape {tuple(x.shape)}; {must}")


def check_of_tokens(name: str, x: Tensor, q: Tensor, allowed: list[tuple[int, ...]], fail: Fail) -> None:
    """Refuse a tensor of a number for each token that has another dtype, device or shape."""
    had = f"{USERS_NAMES[name]} is {x.dtype} on {x.device}"
    fail.when(x.dtype != torch.float32 or x.device != q.device, f"{had}; it must be fp32 on {q.device}")
    check_shape(USERS_NAMES[name], x, allowed, fail)


def is_float(x: Tensor) -> bool:
    return DTYPE_NAMES.get(x.dtype) in DTYPES


def sizes_of(x: Tensor, layout: str) -> list[int]:
    """The sizes (B, S, H, D) of a tensor in `layout`."""
    return [1 if axis is None else x.shape[axis] for axis in LAYOUT_AXES[layout]]


def named(x: Tensor, layout: str) -> str:
    """A shape by its letters: `(B=2, S=128, H=32, D=64)`."""
    return "(" + ", ".join(f"{letter.upper()}={size}" for letter, size in zip(layout, x.shape)) + ")"
