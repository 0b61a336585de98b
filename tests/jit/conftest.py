"""A cache for each test, and a machine whose GPUs need no driver."""

from __future__ import annotations

from collections import namedtuple

import pytest

from jitrope.jit import kernels, recording

from ..caches import cache as cache

Loaded = namedtuple("Loaded", "cubin entry device shared_bytes")
"""A kernel that is not loaded, because there is no driver."""


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `get_kernel` work as on a machine with GPUs of sm_90. Only the loading is replaced."""
    monkeypatch.setattr(kernels, "Kernel", Loaded)
    monkeypatch.setattr(kernels, "arch_of", lambda device: "sm_90")
    monkeypatch.setattr(kernels, "_kernels", {})
    monkeypatch.setattr(kernels.torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(recording, "_asked", {})
