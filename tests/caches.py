"""A kernel on disk, without a compiler: its key, a look at its files, and faults while they are written and read."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from jitrope.base.errors import CompileError
from jitrope.jit import kernels
from jitrope.jit.cache import KernelCache
from jitrope.jit.entry import CUBIN, Key

from . import fresh

KEY = Key("rope_x", "ingredients", ("-std=c++17",), "sm_90", "nvrtc 13.0")
DATA = b"\x7fELF cubin"
no_nvrtc = Mock(side_effect=CompileError("NVRTC cannot be loaded"))
IMPORT = "from jitrope.jit import kernels; from jitrope.tools.prewarm import specs_of"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KernelCache:
    """The cache of this process, empty. Folders of tests imports it in their conftest.py."""
    monkeypatch.setenv("JITROPE_CACHE_DIR", str(tmp_path / "kernels"))
    return kernels.kernel_cache()


def filled(cache: KernelCache, key: Key = KEY) -> Path:
    """Store an entry. Returns its cubin's path."""
    assert cache.store(key, "text", DATA, {"a": 1})
    return cache.root / key.folder / CUBIN


def edit(folder: Path, name: str, value: object) -> None:
    meta = json.loads((folder / "spec.json").read_text())
    (folder / "spec.json").write_text(json.dumps({**meta, name: value}))


def run_in_child(
    work: Callable[[], object], user: int | None = None, group: int | None = None, groups: tuple[int, ...] = ()
) -> int:
    """Run `work` in a fork, as a user. Returns the exit status, or minus the signal that ended the child."""
    pid = os.fork()
    if pid == 0:
        try:
            if user is not None:
                os.setgroups(groups)
                os.setgid(user if group is None else group)
                os.setuid(user)
            work()
        except BaseException as error:
            print(f"in the child: {error!r}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def fault(patch: pytest.MonkeyPatch, at: int, names: str, strike: Callable[[], object] | OSError) -> list[str]:
    """Before the `at`-th call of these functions of `os`, call or raise something. The list gets each call's name."""
    calls: list[str] = []
    for name in names.split():
        real = getattr(os, name)

        def call(*arguments: Any, real: Any = real, name: str = name, **keywords: Any) -> Any:
            calls.append(name)
            if len(calls) == at:
                if isinstance(strike, OSError):
                    raise strike
                strike()
            return real(*arguments, **keywords)

        patch.setattr(os, name, call)
    return calls


ON_THE_GPU = """
import torch, jitrope
torch.manual_seed(0)
q = torch.randn(1, 64, 4, 128, device="cuda", dtype=torch.bfloat16)
angles = torch.rand(64, 64, device="cuda")
cos, sin = angles.cos(), angles.sin()
def call():
    out, _ = jitrope.apply_rope(q, None, cos, sin)
    torch.cuda.synchronize()
    return out
"""


def on_the_gpu(code: str, cache: Path, **variables: str) -> str:
    """The output of a process that makes calls."""
    done = fresh.python("-c", ON_THE_GPU + code, check=True, JITROPE_CACHE_DIR=str(cache), **variables)
    return done.stdout.strip()
