"""Where tests have their tensors: on the CPU, and as a GPU's (`tests/host/backend.py` says where that is)."""

from __future__ import annotations

import pytest

from .host.backend import DEVICE

DEVICES = ["cpu", pytest.param(DEVICE, marks=pytest.mark.gpu, id="cuda")]
