"""The devices of tests' tensors: the CPU, and the GPU or its stand-in (`tests/host/backend.py`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from .host.backend import DEVICE

DEVICES = ["cpu", pytest.param(DEVICE, marks=pytest.mark.gpu, id="cuda")]


def devices(every: Iterable[tuple[Any, ...]], some: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Parameters (device, *case): every case on the CPU, and some cases on the GPU."""
    named = [(case, "-".join(map(str, case))) for case in some]
    on_gpu = [pytest.param(DEVICE, *case, marks=pytest.mark.gpu, id=f"cuda-{name}") for case, name in named]
    return [*(("cpu", *case) for case in every), *on_gpu]


def assert_bits(got: Tensor, want: Tensor) -> None:
    """The bits of the host's own operations on this device.

    The stand-in has only nearly the same results: it computes as CUDA does, and the host's operations as CPUs do.
    """
    if torch.device(DEVICE).type != "cpu":
        assert torch.equal(got, want)
        return
    bound = max(1e-6, 2 * torch.finfo(want.dtype).eps)
    torch.testing.assert_close(got, want, rtol=bound, atol=bound * float(want.detach().abs().max()))
