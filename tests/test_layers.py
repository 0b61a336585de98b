"""Which way imports go, and what importing does."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "jitrope"

ROWS = [  # a module imports only from rows below its own
    {"__main__"},
    {"cli"},
    {"doctor"},
    {"bundle"},
    {"prewarm", "bench"},
    {"integrations"},
    {"__init__", "version"},
    {"context_parallel"},
    {"thd"},
    {"thd_ops"},
    {"thd_runtime"},
    {"thd_reference", "thd_corrections"},
    {"norm_rope"},
    {"rope", "tables", "norm_ops"},
    {"dispatch"},
    {"sharding"},
    {"ops", "checks"},
    {"runtime"},
    {"problem"},
    {"reference", "kernels"},
    {"compiler", "cache"},
    {"system_cache"},
    {"archive"},
    {"heuristics", "render", "recording", "entry", "thd_spec"},
    {"config", "spec", "partition"},
    {"arguments"},
    {"errors"},
]
TORCH_FREE = {
    "heuristics",
    "render",
    "cache",
    "compiler",
    "config",
    "spec",
    "errors",
    "version",
    "partition",
    "thd_spec",
    "entry",
    "archive",
    "system_cache",
    "recording",
}
MODULES = sorted(PACKAGE.rglob("*.py"))


def row(name: str) -> int:
    return next(i for i, names in enumerate(ROWS) if name in names)


def top(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0].removesuffix(".py")


def imports(path: Path) -> list[tuple[str, bool]]:
    """(module, is it jitrope's own) of every import in a file, those inside functions too."""
    found = []
    depth = len(path.relative_to(PACKAGE).parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name.split(".")[0], False) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.append((node.module.split(".")[0], False))
        elif isinstance(node, ast.ImportFrom) and node.level == depth:
            if node.module:
                found.append((node.module.split(".")[0], True))
            else:
                found += [(a.name if (PACKAGE / f"{a.name}.py").exists() else "__init__", True) for a in node.names]
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    name = top(path)
    for imported, own in imports(path):
        if own and imported != name:
            down = row(imported) > row(name) or (name == "__init__" and imported in {"rope", "version"})
            assert down, f"{name} imports {imported}"
        elif not own:
            assert imported not in {"cupy", "cupy_backends"} or name == "compiler"
            assert imported != "torch" or name not in TORCH_FREE
            assert imported != "jinja2" or name == "render"


def test_environment_is_read_in_one_place() -> None:
    readers = {path.name for path in MODULES if "os.environ" in path.read_text() or "getenv" in path.read_text()}
    assert readers == {"config.py"}


IMPORT = """
import sys, os
before = set(sys.modules)
import torch
with_torch = set(sys.modules)
import jitrope
new = set(sys.modules) - with_torch
assert not new & {"cupy", "cupy_backends", "jinja2", "typer", "diffusers"}, new
assert not torch.cuda.is_initialized()
"""


@pytest.mark.parametrize("home", ["empty", "missing", "read-only"])
def test_import_touches_neither_cuda_nor_the_disk(tmp_path: Path, home: str) -> None:
    folder = tmp_path / "home"
    if home != "missing":
        folder.mkdir(mode=0o555 if home == "read-only" else 0o755)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JITROPE", "XDG", "CUPY"))}
    environment |= {"HOME": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(PACKAGE.parent)}
    subprocess.run([sys.executable, "-c", IMPORT], check=True, env=environment, cwd=tmp_path)
    assert list(tmp_path.rglob("*")) == ([folder] if home != "missing" else [])
