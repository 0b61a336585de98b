"""Every test has its own kernel cache. gpu tests are deselected without a device.

With TEST_DEVICE=host they run on the CPU, with kernels built by g++ (`tests/host/backend.py`), except those
that need the hardware.
"""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import tempfile
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import jitrope
from jitrope.integrations import _host

from .host import backend

ON_HOST = backend.DEVICE == "cpu"
LEFT_OUT = pytest.StashKey[tuple[int, int, int]]()
"""How many of the tests marked `tenth` do not run, how many there are, and the tenth that runs."""


def pytest_configure(config: pytest.Config) -> None:
    # Threads do not speed up tiny tensors, and wait for each other if cores are shared; in child processes too.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    if "TEST_KERNEL_CACHE" not in os.environ:  # one for all these processes
        made = os.environ["TEST_KERNEL_CACHE"] = tempfile.mkdtemp(prefix="jitrope-")
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


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    unfit = set() if torch.cuda.is_available() else {item for item in items if item.get_closest_marker("gpu")}
    if ON_HOST:
        unfit = {item for item in items if not item.get_closest_marker("gpu") or item.get_closest_marker("hardware")}
    hosts = [f"test_{host}" for host in os.environ.get("TEST_LEFT_OUT", "").split()]  # of .ci/run, which says why
    unfit.update(x for x in items if x.path.parent.name == "integrations" and x.path.stem.startswith((*hosts, "-")))
    marked = [x for x in items if x.get_closest_marker("tenth") and x not in unfit and x.nodeid not in config.args]
    if marked and not os.environ.get("TEST_ALL") and shutil.which("git"):
        command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        found = subprocess.run(command, capture_output=True, text=True)
        if found.returncode == 0:
            part = int(found.stdout, 16) % 10
            others = [x for x in marked if zlib.crc32(x.nodeid.encode()) % 10 != part]
            config.stash[LEFT_OUT] = (len(others), len(marked), part)
            getattr(config, "workeroutput", {})["left_out"] = config.stash[LEFT_OUT]  # of a process of pytest-xdist
            unfit.update(others)
    if unfit:
        config.hook.pytest_deselected(items=[item for item in items if item in unfit])
        items[:] = [item for item in items if item not in unfit]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    if "left_out" in getattr(node, "workeroutput", {}):
        node.config.stash[LEFT_OUT] = node.workeroutput["left_out"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was left out, and the names of the skipped tests, for `pytest @FILE` where there is what they need."""
    if LEFT_OUT in terminalreporter.config.stash:
        left, marked, part = terminalreporter.config.stash[LEFT_OUT]
        terminalreporter.write_line(
            f"left out: {left} of {marked} tests, since a tenth of those marked `tenth` runs for a commit: this time "
            f"part {part} of 0 to 9, by the commit's hash; all: TEST_ALL=1, or .ci/run all"
        )
    if file := os.environ.get("TEST_SKIPPED"):
        skipped = dict.fromkeys(report.nodeid for report in terminalreporter.stats.get("skipped", ()))
        Path(file).write_text("".join(f"{name}\n" for name in skipped))


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Never use the user's own cache; tests of the cache itself use `tmp_path`.

    After a test nothing is configured, and before its patches are undone, the functions of hosts are their own.
    """
    monkeypatch.setenv("JITROPE_CACHE_DIR", os.environ["TEST_KERNEL_CACHE"])
    yield
    jitrope.configure(launch=None, batch_invariant=False, compile=None)
    for host in {name for place in list(_host.placed.values()) for name in place.hosts}:
        _host.restore(host, list(_host.placed))
    assert not _host.placed
