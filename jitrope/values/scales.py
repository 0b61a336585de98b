"""Scales of elements, as numbers or tensors."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..base.arguments import number, refuse
from ..base.views import Tensors
from .constants import filled


def scales(name: str, like: Any, **given: Any) -> Tensors:
    """The scales that are not None, as tensors on the device of `like`, if that is a tensor."""
    found = {label: scale for label, scale in given.items() if scale is not None}
    for label, scale in found.items():
        if not isinstance(scale, Tensor) and isinstance(like, Tensor):
            with getattr(like, "fake_mode", None) or nullcontext():  # the mode of a fake tensor need not be active
                found[label] = filled(like.device, (), torch.float32, _number(name, label, scale))
    return found


def divisors(name: str, needed: str = "", **given: Any) -> dict[str, Any]:
    """The scales that are not None. fp32 must hold the reciprocal of a number, by which a call multiplies."""
    found = {label: scale for label, scale in given.items() if scale is not None or label == needed}
    for label, scale in found.items():
        if not isinstance(scale, Tensor) and _number(name, label, scale) <= 2.0**-128 + 2.0**-150:  # fp32: 2 ** -128
            refuse(name, label, scale, "above 2.94e-39, so that fp32 holds its reciprocal")
    return found


def _number(name: str, label: str, scale: Any) -> float:
    value = number(name, label, scale, or_else=", or a tensor in fp32 on q's device")
    if type(value) is float and abs(value) > torch.finfo(torch.float32).max:
        refuse(name, label, scale, "a number that fp32 holds")
    return value
