"""The `jitrope` command in the process of a test, and kernels on disk without a compiler."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from jitrope.base import config
from jitrope.base.spec import Spec
from jitrope.jit import kernels
from jitrope.jit.cache import KernelCache
from jitrope.jit.render import render
from jitrope.tools import cli

from ..caches import DATA
from ..caches import cache as cache

Run = Callable[..., Any]


def stored(root: Path, specs: list[Spec], *archs: str) -> list[Path]:
    """Store kernels as if they had been compiled, for a GPU that no machine has. Returns their folders."""
    keys = {kernels.key_of(spec, arch): spec for arch in archs or ("sm_50",) for spec in specs}
    assert all(KernelCache(root).store(key, render(spec).text, DATA, spec.to_dict()) for key, spec in keys.items())
    return [root / key.folder for key in keys]


@pytest.fixture
def jitrope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command in this process, which saves importing torch again. `data` is what `--json` printed."""

    def run(command: str = "", *more: str, **changes: str) -> Any:
        arguments = [*command.split(), *more]
        stdout, stderr, code = io.StringIO(), io.StringIO(), 0
        with monkeypatch.context() as patch, redirect_stdout(stdout), redirect_stderr(stderr):
            for name, value in {"JITROPE_CACHE_DIR": str(tmp_path / "kernels"), "COLUMNS": "150", **changes}.items():
                patch.setenv(name, value)
            patch.setattr(sys, "argv", ["jitrope", *arguments])
            patch.setattr(config, "_start", tmp_path)
            kernels._cache_at.cache_clear()
            patch.chdir(tmp_path)
            try:
                cli.main()
            except SystemExit as stop:
                code = int(stop.code or 0)
            finally:
                config.configure(compile=None)
        done: Any = CompletedProcess(arguments, code, stdout.getvalue(), stderr.getvalue())
        done.data = json.loads(done.stdout) if "--json" in arguments and done.stdout else None
        return done

    return run
