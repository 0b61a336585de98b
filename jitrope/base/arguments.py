"""Checks of arguments of any type. A value with a plain meaning is accepted; any other is refused in one line.

The message names the function and the argument, and shows the value and the allowed ones. Values known only to a
compiler (`torch.SymInt`, `torch.SymFloat`) pass unchanged. numpy is never imported: its scalars are recognised as
registered classes of `numbers`.
"""

from __future__ import annotations

import numbers
import operator
import os
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from .errors import InvalidInput

Word = TypeVar("Word")
_LARGEST = 2**63 - 1  # the largest integer that torch's operations take
_LONGEST = 80  # characters of a value in a message


def refuse(function: str, label: str, value: Any, must: str) -> NoReturn:
    """Raise InvalidInput: "function: label is value; it must be ..."."""
    raise InvalidInput(f"{function}: {label} is {shown(value)}; it must be {must}")


def whole(function: str, label: str, value: Any, least: int | None = None) -> int:
    """Return a whole number of at least `least`. Python's, numpy's and symbolic ones pass, also 2.0 and True."""
    found: int | None = value if type(value) is int else _as(int, value, torch.SymInt)
    if found is None or (least is not None and found < least) or (type(found) is int and abs(found) > _LARGEST):
        refuse(function, label, value, "a whole number" + (f" of at least {least}" if least is not None else ""))
    return found


def flag(function: str, label: str, value: Any, or_else: str = "") -> bool:
    """Return True or False. numpy's, 1 and 0 are accepted too; None and "no" are refused."""
    found: bool | None = value if isinstance(value, bool) else _as(bool, value)
    if found is None:
        refuse(function, label, value, "True or False" + or_else)
    return found


def number(function: str, label: str, value: Any, above: float | None = None, or_else: str = "") -> float:
    """Return a finite number greater than `above`. Python's, numpy's and symbolic ones are accepted, whole or not."""
    found: float | None = value if type(value) is float else _as(float, value, torch.SymInt, torch.SymFloat)
    if found is None or (type(found) is float and (found * 0 != 0 or (above is not None and found <= above))):
        must = "a finite number" if above is None else f"a finite number above {above}"
        refuse(function, label, value, must + or_else)
    return found


def _as(kind: Any, value: Any, *symbolic: Any) -> Any:
    """A value as int, bool or float, or as it is if symbolic; else None. Only a float may be rounded."""
    if isinstance(value, symbolic):
        return value
    real = _real(value)
    try:
        found = None if real is None else kind(real)
        return found if kind is float or found == real else None
    except (ArithmeticError, ValueError):  # nan and infinite
        return None


def _real(value: Any) -> Any:
    """Return a value's real number, or None. Known calls are found by value, so equal values must mean the same."""
    if isinstance(value, numbers.Real):
        is_large = isinstance(value, numbers.Integral) and abs(operator.index(value)) > _LARGEST
        return None if is_large else value
    if isinstance(value, Tensor):  # `torch.jit.trace` shows sizes as tensors without axes
        return value if torch.jit.is_tracing() and value.dim() == 0 else None  # type: ignore[attr-defined]
    kind = type(value).__name__
    if kind == "ndarray" and torch.compiler.is_compiling():  # `torch.compile` shows numpy's scalars without axes
        return value if value.ndim == 0 else None
    is_number = isinstance(value, numbers.Number) or kind in ("bool", "bool_")  # complex, Decimal, numpy's bool
    return value.real if is_number and value.imag == 0 else None


def refuse_beside(function: str, labels: Iterable[str], others: Iterable[str], instead: str = "leave one out") -> None:
    """Raise InvalidInput if there are both: arguments, and others that they do not go with."""
    for label, other in product(labels, others):
        raise InvalidInput(f"{function}: {label} does not go with {other}; {instead}")


def word(function: str, label: str, value: Any, allowed: Iterable[Word]) -> Word:
    """Return one of the allowed words or dtypes; None may be one of them."""
    words = tuple(allowed)
    if not isinstance(value, (str, torch.dtype, type(None))) or value not in words:
        refuse(function, label, value, "one of " + ", ".join(map(repr, words)))
    return value


def wholes(function: str, label: str, value: Any, least: int | None = None) -> tuple[int, ...]:
    """Return a tuple of whole numbers, from a list, a tuple, a `torch.Size` or a numpy array of one axis."""
    is_array = type(value).__module__ == "numpy" and getattr(value, "ndim", 0) == 1
    if not is_array and not isinstance(value, (list, tuple)):
        refuse(function, label, value, "a list or tuple of whole numbers")
    return tuple([whole(function, f"{label}[{i}]", item, least) for i, item in enumerate(value)])


def path(function: str, label: str, value: Any) -> Path:
    """Return a `pathlib.Path`, from text or from any path."""
    if not isinstance(value, (str, os.PathLike)) or isinstance(found := os.fspath(value), bytes) or "\0" in found:
        refuse(function, label, value, "a path, as text or a pathlib.Path")
    return Path(found)


def device(function: str, label: str, value: Any) -> torch.device | None:
    """Return a device of this machine from torch's name or number for it. None stays None: torch's default device."""
    if value is None:
        return None
    is_number = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    try:
        if is_number or isinstance(value, (str, torch.device)):
            found = torch.device(operator.index(value) if is_number else value)
            torch.empty(0, device=found)
            return found
    except (RuntimeError, ValueError, AssertionError):  # there is no such device, or this torch has no support for it
        pass
    refuse(function, label, value, "a device that torch has here, such as 'cuda' or 'cpu'")


def items(function: str, label: str, value: Any, must: str) -> list[Any]:
    """Return the items of a list or of any other iterable except text."""
    try:
        if not isinstance(value, (str, bytes)):
            return list(value)
    except (RuntimeError, TypeError):  # the first: a nested tensor
        pass
    refuse(function, label, value, must)


def parts(function: str, label: str, value: Any, count: int) -> tuple[Any, ...]:
    """Return the `count` items of a list or a tuple."""
    if not isinstance(value, (list, tuple)) or len(value) != count:
        refuse(function, label, value, f"a tuple of {count} {'norms' if label == 'norm' else 'tensors'}")
    return tuple(value)


def tensor(function: str, label: str, value: Any) -> Tensor:
    """Return a strided tensor. Lists and numpy arrays are refused: they have no device."""
    if not isinstance(value, Tensor) or value.is_nested or value.layout is not torch.strided:
        refuse(function, label, value, f"a {'strided ' * isinstance(value, Tensor)}tensor{hint(label, value)}")
    return value


def hint(label: str, value: Any) -> str:
    """After a semicolon, what to pass in the place of a module, a list or an array."""
    first, *_ = value if isinstance(value, (list, tuple)) and value else (value,)
    if isinstance(first, torch.nn.Module) and (label == "norm" or label.endswith("_weight")):
        eps = "variance_epsilon" if hasattr(first, "variance_epsilon") else "eps"
        layer = "q_bias=q_norm.bias, k_bias=k_norm.bias, kind='layer_norm', " * isinstance(first, torch.nn.LayerNorm)
        return f"; pass jitrope.Norm(q_norm.weight, k_norm.weight, {layer}eps=q_norm.{eps}) of your modules"
    listed = isinstance(value, (list, tuple, range)) and all(isinstance(x, numbers.Real) for x in value[:9])
    maker = "tensor" if listed else "from_numpy" * (type(value).__name__ == "ndarray")
    unpacked = "; unpack it" * (first is not value and isinstance(first, Tensor))
    return f"; pass torch.{maker}({label})" if maker else unpacked


def shown(value: Any) -> str:
    """Return a value as short text on one line, for a message."""
    kind = type(value)
    if isinstance(value, Tensor):
        if value.is_nested:
            return "a nested tensor"
        return f"a tensor of shape {tuple(value.shape)}, {str(value.dtype).removeprefix('torch.')}, on {value.device}"
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        return f"a numpy array of shape {tuple(value.shape)}"
    if isinstance(value, (list, tuple)) and any(isinstance(x, (Tensor, torch.nn.Module, list, tuple)) for x in value):
        return f"a {kind.__name__} of {len(value)}"
    if isinstance(value, torch.nn.Module):
        return f"a module, {kind.__name__}"  # its repr has a line for each layer
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def flags(name: str, **given: Any) -> dict[str, bool]:
    """The arguments that are True. They may be True or False."""
    return {label: True for label, value in given.items() if flag(name, label, value)}
