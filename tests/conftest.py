"""Every test has a kernel cache of its own; gpu tests are deselected where there is no device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # of pytest-xdist: processes that would all take every core, and wait
        torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.fixture(scope="session")
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(autouse=True)
def _kernel_cache(monkeypatch: pytest.MonkeyPatch, session_cache: Path) -> None:
    """Never the user's own cache. Tests of the cache itself take `tmp_path`."""
    monkeypatch.setenv("JITROPE_CACHE_DIR", str(session_cache))
