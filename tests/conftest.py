"""Every test has its own kernel cache. gpu tests are deselected without a device.

With TEST_DEVICE=host they run on the CPU, with kernels built by g++ (`tests/host/backend.py`), except those
that need the hardware.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

import jitrope
from jitrope.base import config

from .host import backend

ON_HOST = backend.DEVICE == "cpu"


def pytest_configure(config: pytest.Config) -> None:
    # Threads do not speed up tiny tensors, and wait for each other if cores are shared; in child processes too.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    for folder in ("TEST_HOST_BUILDS", "TEST_KERNEL_CACHE"):  # one for the kernels of all these processes
        if folder not in os.environ:
            made = os.environ[folder] = tempfile.mkdtemp(prefix="jitrope-")
            config.add_cleanup(partial(shutil.rmtree, made, ignore_errors=True))
    if ON_HOST:
        backend.install()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Hosts and tests stay until the end: to look for garbage among them takes half of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if ON_HOST:
        unfit = [item for item in items if not item.get_closest_marker("gpu") or item.get_closest_marker("hardware")]
    elif torch.cuda.is_available():
        unfit = []
    else:
        unfit = [item for item in items if item.get_closest_marker("gpu")]
    if unfit:
        config.hook.pytest_deselected(items=unfit)
        without = set(unfit)
        items[:] = [item for item in items if item not in without]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The names of the skipped tests, for `pytest @FILE` where there is what they need."""
    if file := os.environ.get("TEST_SKIPPED"):
        skipped = dict.fromkeys(report.nodeid for report in terminalreporter.stats.get("skipped", ()))
        Path(file).write_text("".join(f"{name}\n" for name in skipped))


@pytest.fixture(autouse=True)
def _launch() -> Iterator[None]:
    """After a test no launch is forced, and norms add in any order."""
    yield
    if config.launch() != "auto" or config.batch_invariant():
        jitrope.configure(launch="auto", batch_invariant=False)


@pytest.fixture(autouse=True)
def _kernel_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never use the user's own cache. Tests of the cache itself use `tmp_path`."""
    monkeypatch.setenv("JITROPE_CACHE_DIR", os.environ["TEST_KERNEL_CACHE"])
