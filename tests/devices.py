"""The devices of tests' tensors: the CPU, and the GPU or its stand-in (`tests/host/backend.py`)."""

from __future__ import annotations

import pytest

from .host.backend import DEVICE

DEVICES = ["cpu", pytest.param(DEVICE, marks=pytest.mark.gpu, id="cuda")]
