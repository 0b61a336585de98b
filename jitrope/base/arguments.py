"""Arguments of any type: what is plainly meant is taken, all else is refused in one line.

The message says the function, the argument, what was given and what it must be. Values known only to a compiler
(`torch.SymInt`, `torch.SymFloat`) pass as they are. numpy is never imported: its scalars are known by what they are
registered as (`numbers`).
"""

from __future__ import annotations

import numbers
import operator
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from .errors import InvalidInput

_LARGEST = 2**63 - 1  # what an operation of torch takes
_LONGEST = 80  # characters of what was given


def refuse(function: str, label: str, value: Any, must: str) -> NoReturn:
    """Raise InvalidInput: "function: label is value; it must be ..."."""
    raise InvalidInput(f"{function}: {label} is {shown(value)}; it must be {must}")


def whole(function: str, label: str, value: Any, least: int | None = None) -> int:
    """A whole number, of at least `least`, by its value: Python's, numpy's or a symbolic one, 2.0 and True (1) too."""
    if type(value) is not int and not isinstance(value, torch.SymInt):
        real = _real(value)
        try:
            found = None if real is None else int(real)
        except (ArithmeticError, ValueError):  # nan and infinite
            found = None
        if found is None or found != real:
            refuse(function, label, value, _whole_words(least))
        value = found
    if (least is not None and value < least) or (type(value) is int and abs(value) > _LARGEST):
        refuse(function, label, value, _whole_words(least))
    return value  # type: ignore[no-any-return]


def flag(function: str, label: str, value: Any) -> bool:
    """True or False, by its value: numpy's, 1 and 0 too. None and "no" are none."""
    if isinstance(value, bool):
        return value
    real = _real(value)
    if real is None or real not in (0, 1):
        refuse(function, label, value, "True or False")
    return bool(real)


def number(function: str, label: str, value: Any, above: float | None = None, or_else: str = "") -> float:
    """A finite number, greater than `above`, by its value: Python's or numpy's, whole or not, or a symbolic one."""
    if type(value) is float or isinstance(value, (torch.SymInt, torch.SymFloat)):
        found = value
    else:
        real = _real(value)
        too_large = isinstance(real, numbers.Integral) and abs(operator.index(real)) > _LARGEST
        try:
            found = float("nan" if real is None or too_large else real)
        except ArithmeticError:
            found = float("nan")
    if type(found) is float and (found * 0 != 0 or (above is not None and found <= above)):
        refuse(function, label, value, _number_words(above) + or_else)
    return found  # type: ignore[return-value]


def _real(value: Any) -> Any:
    """The real number that a value is, or None. Known calls are found by values, so equal ones must mean the same."""
    if isinstance(value, numbers.Real):
        return value
    if isinstance(value, numbers.Number) or type(value).__name__ in ("bool", "bool_"):  # complex, Decimal, numpy's bool
        return value.real if value.imag == 0 else None  # type: ignore[union-attr]
    return value if _is_traced_scalar(value) else None


def word(function: str, label: str, value: Any, allowed: Iterable[str]) -> str:
    """One of a few words."""
    words = tuple(allowed)
    if not isinstance(value, str) or value not in words:
        refuse(function, label, value, "one of " + ", ".join(map(repr, words)))
    return value


def wholes(function: str, label: str, value: Any, least: int | None = None) -> tuple[int, ...]:
    """A tuple of whole numbers, from a list, a tuple, a `torch.Size` or a numpy array of one axis."""
    is_array = type(value).__module__ == "numpy" and getattr(value, "ndim", 0) == 1
    if not is_array and not isinstance(value, (list, tuple)):
        refuse(function, label, value, "a list or tuple of whole numbers")
    return tuple([whole(function, f"{label}[{i}]", item, least) for i, item in enumerate(value)])


def path(function: str, label: str, value: Any) -> Path:
    """A `pathlib.Path`, from text or anything that is a path."""
    if not isinstance(value, (str, os.PathLike)) or isinstance(found := os.fspath(value), bytes) or "\0" in found:
        refuse(function, label, value, "a path, as text or a pathlib.Path")
    return Path(found)


def device(function: str, label: str, value: Any) -> torch.device | None:
    """A device that tensors can be made on here, by torch's name or number for it; None: torch's default."""
    if value is None:
        return None
    is_number = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    good = is_number or isinstance(value, (str, torch.device))
    if good:
        try:
            found = torch.device(operator.index(value) if is_number else value)
            torch.empty(0, device=found)
        except (RuntimeError, ValueError, AssertionError):  # no such device, or no torch for it
            good = False
    if not good:
        refuse(function, label, value, "a device that torch has here, such as 'cuda' or 'cpu'")
    return found


def items(function: str, label: str, value: Any, must: str) -> list[Any]:
    """The items of a list or of any other iterable except text."""
    try:
        if not isinstance(value, (str, bytes)):
            return list(value)
    except TypeError:
        pass
    refuse(function, label, value, must)


def tensor(
    function: str, label: str, value: Any, dtypes: Sequence[torch.dtype] = (), rank: int | None = None
) -> Tensor:
    """A tensor, of one of some dtypes, with so many axes. A list or a numpy array is none: it has no device."""
    if not isinstance(value, Tensor):
        refuse(function, label, value, "a tensor")
    if dtypes and value.dtype not in dtypes:
        refuse(function, label, value, "of dtype " + " or ".join(map(_short, dtypes)))
    if rank is not None and value.dim() != rank:
        refuse(function, label, value, f"a tensor with {rank} " + ("axis" if rank == 1 else "axes"))
    return value


def shown(value: Any) -> str:
    """What was given, for a message: short, and on one line."""
    kind = type(value)
    if isinstance(value, Tensor) and value.is_nested:
        return "a nested tensor"
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}, {_short(value.dtype)}, on {value.device}"
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        return f"a numpy array of shape {tuple(value.shape)}"
    if isinstance(value, (list, tuple)) and any(isinstance(x, Tensor) for x in value):
        return f"a {kind.__name__} of {len(value)}"
    if isinstance(value, torch.nn.Module):
        return f"a module, {kind.__name__}"  # its repr has a line for each layer
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _is_traced_scalar(value: Any) -> bool:
    """`torch.compile` sees numpy's scalars as arrays without axes, `torch.jit.trace` sizes as tensors without axes."""
    if isinstance(value, Tensor):
        return torch.jit.is_tracing() and value.dim() == 0  # type: ignore[attr-defined]
    return torch.compiler.is_compiling() and type(value).__name__ == "ndarray" and value.ndim == 0  # type: ignore[no-any-return]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _whole_words(least: int | None) -> str:
    return "a whole number" if least is None else f"a whole number of at least {least}"


def _number_words(above: float | None) -> str:
    return "a finite number" if above is None else f"a finite number above {above}"
