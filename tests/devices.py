"""The devices of tests' tensors: the CPU, and the GPU or its stand-in (`tests/host/backend.py`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from .host.backend import DEVICE

DEVICES = ["cpu", pytest.param(DEVICE, marks=pytest.mark.gpu, id="cuda")]


def devices(every: Iterable[tuple[Any, ...]], some: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Parameters (device, *case): every case on the CPU, and some cases on the GPU."""
    named = [(case, "-".join(map(str, case))) for case in some]
    on_gpu = [pytest.param(DEVICE, *case, marks=pytest.mark.gpu, id=f"cuda-{name}") for case, name in named]
    return [*(("cpu", *case) for case in every), *on_gpu]


def slow(*values: Any) -> Any:
    """The values of a test's parameters, left out by default."""
    return pytest.param(*values, marks=pytest.mark.slow)
