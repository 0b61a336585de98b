"""Tensors that a kernel needs and a call does not give, or gives as numbers. Each is made once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from .. import torch_state as watch
from ..base.arguments import number, refuse
from ..base.views import Tensors

COUNTERS = 4096  # counters of blocks: one for each 16 blocks of a launch, and one more (`templates/block_sums.cuh`)

MOST_CONSTANTS = 4096  # of a function

CONSTANTS: dict[int, Tensor] = {}
"""The tensors that `constant` keeps, by their ids, which no other tensor gets as long as they live."""

_counters: dict[tuple[torch.device, int], Tensor] = {}


def kept(make: Callable[..., Any], device: torch.device, *arguments: Any) -> Any:
    """The tensors of `make(device, *arguments)`, which all streams may read, and which stay.

    On a GPU another thread makes them: this one may allocate from a memory pool that is used again, such as that of a
    CUDA graph of torch.compile.
    """
    if device.type != "cuda":
        with torch.inference_mode(False):
            return make(device, *arguments)

    def run() -> Any:
        torch.cuda.set_device(device)  # a new thread has GPU 0, where this process may have no context
        made = make(device, *arguments)
        torch.cuda.current_stream().synchronize()
        return made

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


def constant(make: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the tensors of a function that depend only on a device and some numbers.

    Tensors made under torch.compile, a dispatch mode, a transform of torch.func, forward-mode AD, torch.jit.trace or a
    CUDA graph's capture are not kept. Graphs read those that are, so none is freed.
    """
    known: dict[tuple[Any, ...], Any] = {}

    def get(device: torch.device, *numbers: Any) -> Any:
        if watch.watched() or watch.transformed():
            return make(device, *numbers)
        key = (device, *numbers)
        if key in known:
            return known[key]
        if (device.type == "cuda" and torch.cuda.is_current_stream_capturing()) or len(known) >= MOST_CONSTANTS:
            return make(device, *numbers)
        made = kept(make, *key)
        CONSTANTS.update({id(x): x for x in (made if isinstance(made, tuple) else (made,))})  # no thread has it yet
        return known.setdefault(key, made)

    get.cache_clear = known.clear  # type: ignore[attr-defined]
    return get


def counters(x: Tensor) -> Tensor:
    """Zeros that a kernel counts its blocks with and sets back: one tensor for a stream, or for a capture's call."""
    if x.is_meta or watch.capturing(x):
        return _zeros(x.device)
    key = (x.device, watch.get_stream(x.get_device()))
    if key not in _counters:
        _counters.setdefault(key, kept(_zeros, x.device))
    return _counters[key]


def _zeros(device: torch.device) -> Tensor:
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


@constant
def one_row(device: torch.device, pairs: int) -> tuple[Tensor, ...]:
    """Cosines of one and sines of zero."""
    return tuple([torch.full((1, pairs), x, dtype=torch.float32, device=device) for x in (1.0, 0.0)])


@constant
def filled(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype, value: float) -> Tensor:
    """Equal numbers."""
    return torch.full(shape, value, dtype=dtype, device=device)


# ---- scales of elements, as numbers or tensors ---------------------------------------------------------


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
