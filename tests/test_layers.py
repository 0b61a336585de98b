"""The direction of imports, and the effects of importing."""

from __future__ import annotations

import ast
import os
import re
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
MODULES = {str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {file: ast.parse(path.read_text()) for file, path in MODULES.items()}
PLACE = {"cupy": "jit/compiler.py", "cupy_backends": "jit/compiler.py", "jinja2": "jit/render.py"}
TORCH = {"base/arguments.py", "base/fit.py", "base/memory.py", "base/views.py", "jit/compiler.py", "jit/kernels.py"}
"""Modules from base to jit that may import torch."""


@pytest.mark.parametrize("file", MODULES)
def test_imports_go_down(file: str) -> None:
    """Those inside functions too."""
    name, folder, others = file.split("/")[0].removesuffix(".py"), Path(file).parts[:-1], []
    for node in ast.walk(TREES[file]):
        if isinstance(node, ast.Import):
            others += [alias.name.split(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            others.append(node.module.split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            base = [*folder[: len(folder) - node.level + 1], *(node.module or "").split(".")]
            for own in [part for part in base if part][:1] or [alias.name for alias in node.names]:
                own = own if list(PACKAGE.glob(f"{own}*")) else "__init__"
                assert own == name or LAYER[own] > LAYER[name] or name == "__init__", f"{file} imports {own}"
    for other in others:
        assert PLACE.get(other, file) == file
        assert other != "torch" or LAYER[name] < LAYER["jit"] or file in TORCH


def test_stages_know_positions_but_not_each_other() -> None:
    for file in [file for file in MODULES if re.match("stages/[a-z]", file)]:
        near = [node for node in ast.walk(TREES[file]) if getattr(node, "level", 0) == 1]
        own = [name for node in near for name in ([node.module] if node.module else [x.name for x in node.names])]
        assert set(own) <= {"positions"}, f"{file} imports {own}"


def test_environment_is_read_in_one_place() -> None:
    readers = [file for file, path in MODULES.items() if re.search("os.environ|getenv", path.read_text())]
    assert readers == ["base/config.py"]


def test_files_and_functions_are_short() -> None:
    folders = [PACKAGE, PACKAGE.parent / "templates", PACKAGE.parent / "examples"]
    for path in [path for folder in folders for path in folder.rglob("*.*")]:
        assert path.suffix not in (".py", ".cuh", ".jinja") or len(path.read_text().splitlines()) <= 400, path
    for file, node in [(file, node) for file, tree in TREES.items() for node in ast.walk(tree)]:
        if isinstance(node, ast.FunctionDef):
            said = node.body[0] if ast.get_docstring(node) else None
            docstring = said.end_lineno - said.lineno + 1 if said else 0
            assert node.end_lineno - node.lineno + 1 - docstring <= 50, f"{file}:{node.name}"


def test_few_exceptions_and_few_folders() -> None:
    text = "".join(path.read_text() for path in MODULES.values())
    assert text.count("type: ignore") <= 40
    assert text.count("# fmt: skip") <= 10
    assert len([path for path in PACKAGE.iterdir() if path.name != "__pycache__"]) <= 22


PRIVATE = {  # torch's private names in other files than torch_state.py
    "run/dispatch.py": ("forward_ad._current_level",),  # read in each call
    "run/public.py": ("forward_ad._current_level",),
    "context_parallel/backends.py": ("torch.ops.aten.", "torch.nn.attention._fa4"),
    "integrations/_norms.py": ("module._backward_hooks",),  # of a host's module
}


@pytest.mark.parametrize("file", MODULES)
def test_private_names_of_torch_are_in_one_file(file: str) -> None:
    found = []
    for node in ast.walk(TREES[file]):
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
