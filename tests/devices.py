"""The devices of tests' tensors: the CPU, and the GPU or its stand-in (`tests/host/backend.py`); tensors of noise."""

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


def slow(*values: Any) -> Any:
    """The values of a test's parameters, left out by default."""
    return pytest.param(*values, marks=pytest.mark.slow)


def noise(device: str, dtype: torch.dtype, *shapes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def turn(device: str, *shape: int) -> tuple[Tensor, Tensor]:
    """cos and sin of any angles."""
    angles = torch.rand(shape, generator=torch.Generator().manual_seed(9)).to(device) * 50
    return angles.cos(), angles.sin()


def inputs(device: str, *shape: int, k_heads: int = 2, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    """q, k, v, cos and sin; shape: (B, S, H, D) or (T, H, D)."""
    *lead, heads, size = shape
    shapes = [(*lead, n, size) for n in (heads, k_heads, k_heads)]
    return *noise(device, dtype, *shapes, seed=sum(shape)), *turn(device, lead[-1], size // 2)
