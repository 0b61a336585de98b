"""Launches of kernels that have no operation: their arguments are the addresses of tensors, then words."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..base.spec import Spec
from ..jit.kernels import get_kernel
from ..torch_state import get_device, get_stream

MAX_LAUNCHES = 4096  # the most that a thread keeps; beyond it all are dropped

_local = threading.local()


class Call(NamedTuple):
    """A launch. Its argument block has the addresses of the tensors, then the words."""

    spec: Spec
    grid: tuple[int, int]
    tensors: Sequence[Tensor | None]
    words: Sequence[int]
    device: torch.device


def enqueue(call: Call) -> None:
    """Enqueue a call on torch's current stream of its device."""
    spec, grid, tensors, words, device = call
    index: int = device.index
    if index != get_device():
        with torch.cuda.device(device):
            return enqueue(call)
    kept = _local.__dict__.setdefault("launches", {})
    key = (spec, grid, index)
    known = kept.get(key)
    if known is None:
        if len(kept) >= MAX_LAUNCHES:
            kept.clear()
        kernel = get_kernel(spec, index)
        kernel.bind_thread()
        block = (ctypes.c_int64 * (len(tensors) + len(words)))()
        known = kept[key] = block, kernel.enqueuer(grid, spec.threads, ctypes.addressof(block))
    block, launch = known
    block[:] = [*[0 if x is None else x.data_ptr() for x in tensors], *words]
    launch(get_stream(index))
