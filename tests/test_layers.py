"""The direction of imports, and the effects of importing."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest
import torch

from . import fresh

PACKAGE = Path(__file__).parent.parent / "jitrope"

LAYERS = """
__main__ > tools > integrations > __init__ > context_parallel > api tables thd > run > sources > checks > call chain
> plan > sinks > stages > values > torch_state > jit > base
"""
LAYER = {name: n for n, names in enumerate(LAYERS.split(">")) for name in names.split()}
"""A folder or file imports only from layers below its own, and from itself."""
MODULES = sorted(PACKAGE.rglob("*.py"))
PLACE = {"cupy": "jit/compiler.py", "cupy_backends": "jit/compiler.py", "jinja2": "jit/render.py"}
TORCH = {
    *("base/arguments.py", "base/fit.py", "base/memory.py", "base/views.py", "jit/compiler.py", "jit/kernels.py"),
}  # modules from base to jit that may import torch


def imports(path: Path) -> list[tuple[str, bool]]:
    """(module, whether it is jitrope's) of every import in a file, also inside functions."""
    found = []
    folder = path.relative_to(PACKAGE).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name.split(".")[0], False) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.append((node.module.split(".")[0], False))
        elif isinstance(node, ast.ImportFrom):
            base = [*folder[: len(folder) - node.level + 1], *(node.module or "").split(".")]
            names = [name for name in base if name][:1] or [alias.name for alias in node.names]
            there = [name if list(PACKAGE.glob(f"{name}*")) else "__init__" for name in names]
            found += [(name, True) for name in there]
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    file = str(path.relative_to(PACKAGE))
    name = file.split("/")[0].removesuffix(".py")
    for imported, own in imports(path):
        if own and imported != name:
            assert LAYER[imported] > LAYER[name] or name == "__init__", f"{file} imports {imported}"
        elif not own:
            assert PLACE.get(imported, file) == file
            assert imported != "torch" or LAYER[name] < LAYER["jit"] or file in TORCH


def test_stages_know_positions_but_not_each_other() -> None:
    for path in (PACKAGE / "stages").glob("[a-z]*.py"):
        near = [node for node in ast.walk(ast.parse(path.read_text())) if getattr(node, "level", 0) == 1]
        own = [name for node in near for name in ([node.module] if node.module else [x.name for x in node.names])]
        assert set(own) <= {"positions"}, f"stages/{path.name} imports {own}"


def test_environment_is_read_in_one_place() -> None:
    readers = {path.name for path in MODULES if "os.environ" in path.read_text() or "getenv" in path.read_text()}
    assert readers == {"config.py"}


def test_files_and_functions_are_short() -> None:
    kinds = {".py", ".cuh", ".jinja"}
    folders = [PACKAGE, PACKAGE.parent / "templates", PACKAGE.parent / "examples"]
    for path in [path for folder in folders for path in folder.rglob("*") if path.suffix in kinds]:
        assert len(path.read_text().splitlines()) <= 400, path
    long = []
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                docstring = node.body[0] if ast.get_docstring(node) else None
                lines = node.end_lineno - node.lineno + 1
                lines -= docstring.end_lineno - docstring.lineno + 1 if docstring else 0
                if lines > 50:
                    long.append(f"{path.relative_to(PACKAGE)}:{node.name}")
    assert not long


def test_few_exceptions_and_few_folders() -> None:
    text = "".join(path.read_text() for path in MODULES)
    assert text.count("type: ignore") <= 40
    assert text.count("# fmt: skip") <= 10
    assert len([path for path in PACKAGE.iterdir() if path.name != "__pycache__"]) <= 22


PRIVATE = {  # torch's private names in other files than torch_state.py
    "run/dispatch.py": ("forward_ad._current_level",),  # read in each call
    "run/public.py": ("forward_ad._current_level",),
    "context_parallel/backends.py": ("torch.ops.aten.", "torch.nn.attention._fa4"),
    "integrations/_norms.py": ("module._backward_hooks",),  # of a host's module
}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_private_names_of_torch_are_in_one_file(path: Path) -> None:
    file, found = str(path.relative_to(PACKAGE)), []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            name = ".".join([node.module, *[alias.name for alias in node.names]])
            found += [name] * ("._" in name)
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            name = ast.unparse(node)
            found += [name] * (name.startswith(("torch.", "forward_ad.")) or hasattr(torch.Tensor, node.attr))
    assert file == "torch_state.py" or all(name.startswith(PRIVATE.get(file, ())) for name in found), found


IMPORT = """
import os, sys
import torch
before = set(sys.modules)
import jitrope
for module in (jitrope.tables, jitrope.integrations.deepspeed, jitrope.integrations.timm):  # without their import
    assert module.__doc__, module
for name in ("nothing", "timm.rope", "_nothing"):
    assert not hasattr(jitrope.integrations, name), name
new = set(sys.modules) - before
assert not new & {"cupy", "cupy_backends", "jinja2", "diffusers"}, new
assert not torch.cuda.is_initialized()
pid = os.fork()
assert jitrope.apply_rope(torch.ones(1, 2, 1, 8), None, torch.ones(2, 4), torch.zeros(2, 4))[0].sum() == 16
assert not torch.cuda.is_initialized() and not torch.cuda._is_in_bad_fork()
if pid == 0:  # as the worker of a DataLoader
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
assert not {"cupy", "cupy_backends"} & set(sys.modules)
"""


@pytest.mark.parametrize("home", ["empty", "missing", "read-only"])
def test_neither_import_nor_fork_nor_a_cpu_call_touches_cuda_or_the_disk(tmp_path: Path, home: str) -> None:
    folder = tmp_path / "home"
    if home != "missing":
        folder.mkdir(mode=0o555 if home == "read-only" else 0o755)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JITROPE", "XDG", "CUPY"))}
    environment |= {"HOME": str(folder), "PYTHONPATH": fresh.IMPORTS}
    fresh.python("-c", IMPORT, env=environment, cwd=tmp_path, check=True)
    assert list(tmp_path.rglob("*")) == ([folder] if home != "missing" else [])
