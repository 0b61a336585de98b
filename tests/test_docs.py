"""The API reference: pdoc builds it without a warning, everything public is in it, and says what it has to say."""

from __future__ import annotations

import ast
import inspect
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("pdoc", reason="the API reference is built with pdoc: pip install -e '.[test]'")

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / ".ci" / "build_api.py"
MODULES: tuple[str, ...] = runpy.run_path(str(SCRIPT))["MODULES"]

# What a machine that builds the reference need not have.
ABSENT = (
    "cupy", "cupy_backends", "deepspeed", "diffusers", "kernels", "megatron", "sgl_kernel", "sglang", "torchtitan",
    "transformer_engine", "transformers", "vllm",
)  # fmt: skip
BUILD = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({ABSENT}))   # importing one of them fails
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def public(module: ModuleType) -> list[str]:
    """The names that a module offers: `__all__`, else the functions and classes that are its own."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    own = ((name, value) for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__)
    return [name for name, value in own if name[0] != "_" and callable(value)]


# ---- the pages -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The reference as HTML, by module, built where neither CuPy nor any host library is."""
    folder = tmp_path_factory.mktemp("api")
    code = BUILD.replace("sys.argv[0]", repr(str(SCRIPT)))
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return {name: (folder / f"{name.replace('.', '/')}.html").read_text() for name in MODULES}


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_has_its_place(pages: dict[str, str], name: str) -> None:
    names = public(import_module(name))
    assert names
    assert [missing for missing in names if f'id="{missing}"' not in pages[name]] == []


@pytest.mark.parametrize("name", MODULES)
def test_markdown_is_what_was_meant(pages: dict[str, str], name: str) -> None:
    """No section that pdoc did not see, no table that is none, and no emphasis, as there are many stars and lines."""
    page = pages[name]
    assert re.findall(r"<em>.{0,60}", page) == []
    assert re.findall(r"<p>[^<]*\b(?:Args|Attributes|Raises|Returns|Yields)\b[^<]*:\n", page) == []
    assert re.findall(r"<p>\s*\|.{0,60}|<p>[^<]*====", page) == []


def test_every_integration_is_in_it() -> None:
    folder = ROOT / "jitrope" / "integrations"
    found = {path.stem for path in (*folder.glob("[a-z]*.py"), *(file.parent for file in folder.glob("*/__init__.py")))}
    assert found == {name.split(".")[2] for name in MODULES if "integrations._" not in name and "integrations." in name}


def test_modules_stand_on_the_first_page(pages: dict[str, str]) -> None:
    rest = [name for name in MODULES[1:] if "._" not in name]
    assert [name for name in rest if f'href="jitrope/{name[8:].replace(".", "/")}.html"' not in pages["jitrope"]] == []


# ---- the docstrings ------------------------------------------------------------------------------------

Def = ast.FunctionDef | ast.ClassDef

_DIM = r"(?:\.\.\.?|[A-Z]\w{0,2}\b|\d|[a-z]\d?\b|(?:rows|tokens|slots|pages|blocks|positions|max_\w+|cp_size)\b)"
_DIM += r"[^,()\[\]]*(?:\([^()]*\)[^,()\[\]]*)?"
SHAPE = re.compile(rf"[(\[]{_DIM}(?:, {_DIM})*,?[)\]]")
"""(B, S, H, D), [s, b, h, d], (N + 1), (cp_size * ceil(T / cp_size), ...)."""

ERRORS = re.compile(r"Raises:|InvalidInput|errors those are")


def complaints(docs: dict[str, tuple[Def, bool]]) -> list[str]:
    """What docstrings lack, by the function's or class' name, with whether it can raise.

    What takes tensors says their shapes, and its errors if there are any; or says of which other function they are.
    """
    texts = {name: ast.get_docstring(node) or "" for name, (node, _) in docs.items()}
    shaped = _closure(texts, SHAPE, "")
    raising = _closure(texts, ERRORS, "rrors")
    found = [f"{name} has no docstring" for name, text in texts.items() if not text]
    for name, (node, raises) in docs.items():
        if texts[name] and _takes_tensors(node):
            found += [f"{name} names no shape"] * (name not in shaped)
            found += [f"{name} does not say what it raises"] * (raises and name not in raising)
    return found


def _closure(texts: dict[str, str], pattern: re.Pattern[str], word: str) -> set[str]:
    """The names whose text has the pattern, or the word and the name of one whose text has."""
    found = {name for name, text in texts.items() if pattern.search(text)}
    while True:
        known = {name.split(".")[-1] for name in found}
        more = {
            name
            for name, text in texts.items()
            if word in text and any(other.split(".")[-1] in known for other in re.findall(r"`([\w.]+)`", text))
        }
        if more <= found:
            return found
        found |= more


def _takes_tensors(node: Def) -> bool:
    functions = [node] if isinstance(node, ast.FunctionDef) else _constructors(node)
    words = [ast.unparse(a.annotation) for f in functions for a in _arguments(f) if a.annotation is not None]
    return any(re.search(r"\b(?:Tensor|Rows)\b", word) for word in words)


def _arguments(node: ast.FunctionDef) -> list[ast.arg]:
    return node.args.posonlyargs + node.args.args + node.args.kwonlyargs


def _constructors(node: ast.ClassDef) -> list[ast.FunctionDef]:
    return [f for f in node.body if isinstance(f, ast.FunctionDef) and f.name in ("__init__", "__post_init__")]


def _defined() -> Iterator[tuple[str, Def]]:
    for path in (ROOT / "jitrope").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, Def):
                yield node.name, node


def can_raise() -> set[str]:
    """Names of functions and classes that may refuse what they are given, themselves or by what they call."""
    uses: dict[str, set[str]] = {}
    for name, node in _defined():
        parts = [node] if isinstance(node, ast.FunctionDef) else _constructors(node)
        words = {w.id for part in parts for w in ast.walk(part) if isinstance(w, ast.Name)}
        words |= {w.attr for part in parts for w in ast.walk(part) if isinstance(w, ast.Attribute)}
        uses.setdefault(name, set()).update(words)
    found = {name for name, words in uses.items() if words & {"InvalidInput", "fail", "failing"}}
    while more := {name for name, words in uses.items() if words & found} - found:
        found |= more
    return found


def documented() -> dict[str, tuple[Def, bool]]:
    """Every public function and class, and a class' own methods, with whether it can raise."""
    raising = can_raise()
    docs: dict[str, tuple[Def, bool]] = {}
    for module_name in MODULES:
        module = import_module(module_name)
        for name in public(module):
            value = inspect.unwrap(getattr(module, name))
            if not callable(value):
                continue
            tree = ast.parse(Path(inspect.getsourcefile(value) or "").read_text())
            *_, node = (n for n in tree.body if isinstance(n, Def) and n.name == value.__name__)  # behind its overloads
            docs[f"{module_name}.{name}"] = node, node.name in raising
            for method in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
                    docs[f"{module_name}.{name}.{method.name}"] = method, method.name in raising
    return docs


def test_docstrings_say_shapes_and_errors() -> None:
    docs = documented()
    assert len(docs) > 120
    assert sum(raises for _, raises in docs.values()) > 60
    assert complaints(docs) == []


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("def f(): ...", "has no docstring"),
        ("class C:\n    x: int", "has no docstring"),
        ("def f(x: Tensor | None):\n    '''Turn x. Raises: InvalidInput.'''", "names no shape"),
        ("def f(x: Tensor):\n    '''Turn x (an expanded one), too. Raises: InvalidInput.'''", "names no shape"),
        ("def f(x: Tensor):\n    '''Turn x, (B, S, H, D).'''", "does not say what it raises"),
        ("def f(x: Tensor):\n    '''As `g`, of which no more is known. Raises: InvalidInput.'''", "names no shape"),
        ("def f(x: Tensor):\n    '''Turn x, (T).\n\n    Raises:\n        InvalidInput: no.\n    '''", ""),
        ("def f(x: int):\n    '''Count.'''", ""),
    ],
)
def test_what_is_missing_is_found(source: str, complaint: str) -> None:
    (node,) = ast.parse(source).body
    assert isinstance(node, Def)
    found = complaints({"m.f": (node, True)})
    assert found == ([f"m.f {complaint}"] if complaint else [])


def test_what_can_raise_is_known() -> None:
    found = can_raise()
    assert {"apply_rope", "prepare_joint_qkv", "Partition", "rotary_embedding", "grad_correction"} <= found
    assert "rows_per_rank" not in found
