"""The bounds of the package, measured here: `python .ci/bounds.py`. It fails if a number is above what it may be.

A bound that is missed has a second number beside it, the one of today: it may fall, it must not rise.
"""

import ast
import inspect
import io
import os
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch._dynamo.symbolic_convert import InliningInstructionTranslator as Inliner

import jitrope

ROOT = Path(jitrope.__file__).parent
FILES = {str(path.relative_to(ROOT)): path.read_text() for path in sorted(ROOT.rglob("*.py"))}
TREES = {file: ast.parse(text) for file, text in FILES.items()}
NOT_CORE = ("integrations", "thd", "context_parallel", "tools")
REWRITES = re.compile(r"\bimport ast\b|\bco_\w+|__code__|\b(?:exec|eval)\(")
IMPORT = "from time import process_time as t; a = t(); import torch; b = t(); import jitrope; print(b - a, t() - b)"
BLANK = {*(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)}


def docstring(node: Any) -> set[int]:
    """The lines of a docstring."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    there = isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None
    return set(range(node.body[0].lineno, node.body[0].end_lineno + 1)) if there else set()


def code_lines(file: str) -> int:
    """The lines of a file without docstrings, comments and blank lines."""
    tokens = tokenize.generate_tokens(io.StringIO(FILES[file]).readline)
    lines = {n for x in tokens if x.type not in BLANK for n in range(x.start[0], x.end[0] + 1)}
    return len(lines.difference(*map(docstring, ast.walk(TREES[file]))))


def imports(file: str) -> set[str]:
    """The files that a file imports, also inside functions and for types."""
    found = set()
    for node in ast.walk(TREES[file]):
        if isinstance(node, ast.ImportFrom) and node.level:
            place = Path(file).parents[node.level - 1].joinpath(*(node.module or "").split("."))
            for name in node.names:  # a module, or a name in one
                near = (f"{place / name.name}.py", f"{place / name.name}/__init__.py", f"{place}.py")
                found.add(next((x for x in near if x in FILES), str(place / "__init__.py")))
    return found - {file}


def circles_and_floors() -> tuple[int, int]:
    """The circles of imports, and the files on the longest way of imports inside one folder."""
    direct = {file: imports(file) for file in FILES}
    reached = {file: set(files) for file, files in direct.items()}
    for between in FILES:
        for files in reached.values():
            files |= reached[between] if between in files else set()
    circle = {file: frozenset({file, *(x for x in reached[file] if file in reached[x])}) for file in FILES}

    def floors(file: str) -> int:
        below = set().union(*(direct[x] for x in circle[file])) - circle[file]
        return len(circle[file]) + max((floors(x) for x in below if Path(x).parent == Path(file).parent), default=0)

    return len({files for files in circle.values() if len(files) > 1}), max(map(floors, FILES))


def frames(call: Callable[[], object]) -> int:
    """The Python frames of jitrope in a warm call."""
    found = []

    def profile(frame: Any, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        found.append(event == "call" and name.startswith((f"{ROOT}/", "<known call")))

    for _ in range(3):
        call()
    sys.setprofile(profile)
    call()
    sys.setprofile(None)
    return sum(found)


def compiled(call: Callable[..., object], *args: object) -> tuple[int, int]:
    """The functions of jitrope that Dynamo inlines in a frame, and the guards of the frame."""
    inlined, guards, inline = [], [], Inliner.build_inline_tracer

    def build(parent: Any, function: Any, *args: Any, **words: Any) -> Any:
        inlined.append(hasattr(function, "get_code") and function.get_code().co_filename.startswith(f"{ROOT}/"))
        return inline(parent, function, *args, **words)

    def keep(entries: list[Any]) -> list[bool]:
        guards.append(len(entries))
        return [True] * len(entries)

    torch.compiler.reset()
    Inliner.build_inline_tracer = staticmethod(build)
    torch.compile(call, backend="eager", fullgraph=True, dynamic=False, options={"guard_filter_fn": keep})(*args)
    Inliner.build_inline_tracer = staticmethod(inline)
    return sum(inlined), guards[-1]


class Layer(torch.nn.Module):
    """It makes its norm in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = (torch.nn.Parameter(torch.ones(64)) for _ in range(2))

    def forward(self, *args: torch.Tensor) -> object:
        return jitrope.prepare_qkv(*args, norm=jitrope.Norm(self.q, self.k))


def ops() -> int:
    return sum(name.startswith("jitrope::") for name in torch._C._dispatch_get_all_op_names())


def naming(word: str) -> int:
    """The files outside hosts and api that name a stage's word."""
    inside = [text for file, text in FILES.items() if not file.startswith(("integrations/", "api"))]
    return sum(re.search(rf"\b{word}\b", text) is not None for text in inside)


hosts = [text for file, text in FILES.items() if file.startswith("integrations/")]
parts: Counter[str] = Counter()
for file in FILES:
    parts[file.split("/")[0]] += code_lines(file)
code, text = sum(parts.values()), "".join(FILES.values())
nodes = [node for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
circles, floors = circles_and_floors()

q, k, v = (torch.randn(1, 16, heads, 64) for heads in (8, 2, 2))
inv_freq, norm = jitrope.tables.inv_freq(rotary_dim=64)[0], jitrope.Norm(torch.ones(64), torch.ones(64))
table, angles = jitrope.tables.cos_sin_cache(16, inv_freq), jitrope.tables.cos_sin(16, inv_freq)
pages = jitrope.Pages(torch.tensor([[0]]), seq_lens=torch.tensor([16]))
cache = jitrope.KVCache(*torch.zeros(2, 1, 16, 2, 64), pages)
words = {"cos_sin_cache": table, "positions": torch.arange(16), "cache": cache, "layout": "thd", "norm": norm}
rope_frames = frames(lambda: jitrope.apply_rope(q, k, *angles))
pages_frames = frames(lambda: jitrope.prepare_qkv(q[0], k[0], v[0], **words))
inlined, guards = compiled(lambda *args: jitrope.prepare_qkv(*args, norm=norm), q, k, v, *angles)
ops_of_calls = ops()
every_op = ops() if jitrope.thd and jitrope.context_parallel else 0  # they are imported here
names = [name for name in jitrope.__all__ if name.startswith(("apply_", "prepare_", "project_"))]
public = [inspect.unwrap(getattr(jitrope, name)).__code__ for name in names]
parameters = [x.co_argcount + x.co_kwonlyargcount + bool(x.co_flags & 8) for x in public]  # `**words` is one

command = [sys.executable, "-c", IMPORT]
with TemporaryDirectory() as folder:  # as installed: where Python may not write, jitrope is compiled at each import
    own = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    own["PYTHONPYCACHEPREFIX"] = folder
    runs = [subprocess.run(command, capture_output=True, check=True, env=own) for _ in range(6)]
of_torch, ours = map(min, zip(*[map(float, run.stdout.split()) for run in runs[1:]]))

BOUNDS = [  # what, its number here, its bound, and what is held while the bound is missed
    ("code lines of the core", code - sum(parts[part] for part in NOT_CORE), 6000, 6576),
    ("code lines of jitrope/", code, 10800, 10800),
    ("code lines of integrations", parts["integrations"], 1900, 1900),
    ("lines of integrations", sum(len(text.splitlines()) for text in hosts), 3200, 3200),
    ("code lines of tools", parts["tools"], 800, 800),
    ("ast, code objects, exec and eval in integrations", sum(len(REWRITES.findall(text)) for text in hosts), 0, 0),
    ("torch ops of calls", ops_of_calls, 3, 3),
    ("torch ops, with thd and context parallelism", every_op, 16, 16),
    ("files outside hosts and api that name hadamard", naming("hadamard"), 3, 3),
    ("files outside hosts and api that name unrotated", naming("unrotated"), 3, 3),
    ("files outside hosts and api that name interleaved_out", naming("interleaved_out"), 3, 3),
    ("files in a folder", max(Counter(Path(file).parent for file in FILES).values()), 12, 12),
    ("floors in a folder", floors, 5, 5),
    ("circles of imports", circles, 0, 0),
    ("frames of a warm apply_rope on a CPU", rope_frames, 40, 42),
    ("frames of a warm prepare_qkv(norm, cache=Pages) on a CPU", pages_frames, 120, 120),
    ("functions that Dynamo inlines for prepare_qkv(norm)", inlined, 8, 8),
    ("guards of its frame", guards, 30, 30),
    ("guards of a frame that makes the norm", compiled(Layer(), q, k, v, *angles)[1], 34, 34),
    ("CPU time of importing jitrope over that of torch", round(ours / of_torch, 3), 0.05, 0.05),
    ("public functions that compute", len(public), 6, 6),
    ("their parameters", sum(parameters), 70, 70),
    ("type: ignore", text.count("type: ignore"), 20, 20),
    ("fmt: skip", text.count("fmt: skip"), 0, 6),
    ("files over 400 lines", sum(len(text.splitlines()) > 400 for text in FILES.values()), 0, 0),
    ("functions over 50 lines", sum(x.end_lineno - x.lineno + 1 - len(docstring(x)) > 50 for x in nodes), 2, 2),
]
print("code lines: ", ", ".join(f"{part} {lines}" for part, lines in parts.most_common()))
for name, number, bound, most in BOUNDS:
    kept = "" if number <= bound else f", missed; at most {most}"
    print(f"{name:58} {number:6}, bound {bound}{kept}{'' if number <= most else ': ABOVE IT'}")
sys.exit(any(number > max(bound, most) for _, number, bound, most in BOUNDS))
