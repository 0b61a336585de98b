"""Slow cells: calls that torch compiles, traces or exports, and imports under a mode."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from .cells import FUNCTIONS, SIZES, Args, Cell, D, Function, P
from .situations import NO_TABLES, changed, gradient_leaves, only, right, situation, times_one


def of_tensors(cell: Cell, args: Args) -> tuple[list[str], Callable[..., Any]]:
    """The names of the tensors among the arguments, and the call as a function of these."""
    names = [name for name, x in args.items() if isinstance(x, Tensor)]
    rest = {name: x for name, x in args.items() if name not in names}

    def call(*tensors: Tensor) -> Any:
        return cell.call({**rest, **dict(zip(names, tensors))})

    return names, call


def settle(cell: Cell, args: Args, prepare: Callable[[Callable[..., Any], list[Tensor]], Callable[..., Any]]) -> str:
    """A cell for `prepare`, which turns a call and example tensors into a callable."""
    names, call = of_tensors(cell, args)
    made = prepare(call, [args[name].clone() for name in names])
    return cell.settle(args, lambda args: tuple(made(*(args[name] for name in names))), same=False)


def longer(cell: Cell) -> Args:
    """The same arguments with more tokens."""
    changes: Args = {n: cell.rand(2, SIZES[n][1] + 2, *SIZES[n][2:], seed=6) for n in cell.function.heads}
    if "kv_cache" in cell.function.name:
        changes["slot_mapping"] = torch.arange(10, device=cell.device).view(2, 5)
    return cell.args(cos=cell.rand(9, D // 2), sin=cell.rand(9, D // 2), **changes)


def compiled(backend: str, **how: Any) -> Any:
    torch._dynamo.reset()
    return lambda call, _: torch.compile(call, backend=backend, **how)


@situation("torch.compile", "static shapes, one graph", slow=True)
def _(cell: Cell) -> str:
    return settle(cell, cell.args(), compiled("aot_eager", dynamic=False, fullgraph=True))


@situation("torch.compile, dynamic", "other lengths with the same graph", slow=True)
def _(cell: Cell) -> str:
    torch._dynamo.reset()
    names, call = of_tensors(cell, cell.args())
    graph = torch.compile(call, backend="aot_eager", dynamic=True, fullgraph=True)
    ended = {cell.settle(args, lambda args: tuple(graph(*(args[n] for n in names))), same=False)
             for args in (cell.args(), longer(cell))}  # fmt: skip
    return ended.pop()


@situation("torch.compile, graph breaks", "work before and after in other graphs", slow=True)
def _(cell: Cell) -> str:
    def prepare(call: Any, _: Any) -> Any:
        torch._dynamo.reset()

        def broken(*tensors: Tensor) -> Any:
            torch._dynamo.graph_break()
            out = call(*tensors)
            torch._dynamo.graph_break()
            return out

        return torch.compile(broken, backend="aot_eager")

    return settle(cell, cell.args(), prepare)


@situation("torch.compile under autograd", "forward and backward compiled", only(right, lambda f: f.derived), slow=True)
def _(cell: Cell) -> str:
    torch._dynamo.reset()
    names, call = of_tensors(cell, cell.args())
    graph = torch.compile(call, backend="aot_eager", fullgraph=True)
    return cell.settle_grad(gradient_leaves(cell), times_one, lambda args: tuple(graph(*(args[n] for n in names))),
                            same=False)  # fmt: skip


@situation("torch.compile of views under autograd", "of projections, in place too", only(right, lambda f: f.derived),
           slow=True)  # fmt: skip
def _(cell: Cell) -> str:
    torch._dynamo.reset()
    f = cell.function
    names, call = of_tensors(cell, cell.args())

    def of_projections(*tensors: Tensor) -> Any:
        views = [x.view(cell.size(n)) if n in f.turned else x for n, x in zip(names, tensors)]
        return call(*views)

    graph = torch.compile(of_projections, backend="aot_eager", fullgraph=True)

    def build(leaves: Args) -> Args:
        return {n: x.view(cell.size(n)) if n in f.turned else x for n, x in times_one(leaves).items()}

    return cell.settle_grad(gradient_leaves(cell), build, lambda args: tuple(graph(
        *(args[n].flatten(-2) if n in f.turned else args[n] for n in names))), same=False)  # fmt: skip


def inductor(f: Function) -> bool:
    return f.title in ("rope", "fused_qkv", "norm_rope", "norm_rope_joint", "kv_cache")


@situation("Inductor", "sequence-first inputs: strides as the fakes say", only(right, inductor), slow=True)
def _(cell: Cell) -> str:
    def turned(s: tuple[int, ...]) -> Tensor:
        return cell.rand(s[1], s[0], *s[2:]).transpose(0, 1)

    args = cell.args(**{n: turned(cell.size(n)) for n in cell.function.turned})
    names, call = of_tensors(cell, args)
    torch._dynamo.reset()
    graph = torch.compile(lambda *xs: tuple(y.float() + 0 for y in call(*xs)), fullgraph=True)
    return settle_plus(cell, args, graph, names)


def settle_plus(cell: Cell, args: Args, graph: Any, names: list[str]) -> str:
    """Compute with the outputs, so that Inductor reads their strides."""
    want, want_written = cell.function.expected(args)
    out = graph(*(args[n] for n in names))
    for y, z in zip(out, want):
        assert torch.allclose(y.double(), z, atol=2e-5, rtol=2e-5)
    for n, z in want_written.items():
        assert torch.allclose(args[n].double(), z, atol=2e-5, rtol=2e-5)
    return cell.settle(cell.args())


@situation("Inductor under autograd", "sequence-first inputs", only(right, lambda f: f.derived and inductor(f)),
           slow=True)  # fmt: skip
def _(cell: Cell) -> str:
    torch._dynamo.reset()
    f = cell.function
    names, call = of_tensors(cell, cell.args())
    graph = torch.compile(call, fullgraph=True)
    leaves = gradient_leaves(cell)
    leaves |= {n: leaves[n].transpose(0, 1).contiguous() for n in f.turned}

    def build(leaves: Args) -> Args:
        return {n: (x * 1).transpose(0, 1) if n in f.turned else x * 1 for n, x in leaves.items()}

    return cell.settle_grad(leaves, build, lambda args: tuple(graph(*(args[n] for n in names))), same=False)


@situation("Inductor in place with freqs_cis", "complex tables, under no_grad", only(right, lambda f: f.in_place
           or "kv_cache" in f.name), slow=True)  # fmt: skip
def _(cell: Cell) -> str:
    cis = torch.polar(torch.ones(P, D // 2), cell.rand(P, D // 2).cpu()).to(cell.device)
    args = changed(cell, {**NO_TABLES, "freqs_cis": cis})
    with torch.no_grad():
        return settle(cell, args, compiled("inductor", fullgraph=True))


@situation("compiled with freqs_cis", "complex tables", slow=True)
def _(cell: Cell) -> str:
    cis = torch.polar(torch.ones(P, D // 2), cell.rand(P, D // 2).cpu()).to(cell.device)
    return settle(cell, changed(cell, {**NO_TABLES, "freqs_cis": cis}), compiled("aot_eager", fullgraph=True))


for _mode in ("real", "fake", "symbolic"):

    @situation(f"make_fx, {_mode}", "the graph gives the same with other numbers", slow=True)
    def _(cell: Cell, mode: str = _mode) -> str:
        return settle(cell, cell.args(), lambda call, examples: make_fx(call, tracing_mode=mode)(*examples))


class Called(torch.nn.Module):
    def __init__(self, call: Any) -> None:
        super().__init__()
        self.call = call

    def forward(self, *tensors: Tensor) -> Any:
        return self.call(*tensors)


def exported(call: Any, examples: list[Tensor]) -> Any:
    return torch.export.export(Called(call), tuple(examples))


@situation("torch.export", "then saved and loaded", slow=True)
def _(cell: Cell) -> str:
    def prepare(call: Any, examples: list[Tensor]) -> Any:
        program, held = exported(call, examples), io.BytesIO()
        torch.export.save(program, held)
        held.seek(0)
        return torch.export.load(held).module()

    args = cell.args()
    assert settle(cell, args, lambda call, examples: exported(call, examples).module()) == "right"
    return settle(cell, cell.args(), prepare)


@situation("torch.jit.trace", "the traced call gives the same with other numbers, or would lose what is not in place",
           lambda f: "refused" if any(name not in f.heads for name in f.written) else "right", slow=True)  # fmt: skip
def _(cell: Cell) -> str:
    def run(args: Args) -> tuple[Any, ...]:
        names, call = of_tensors(cell, args)
        examples = tuple([args[name].clone() for name in names])
        made = torch.jit.trace(lambda *xs: tuple(call(*xs)), examples, check_trace=False)
        return tuple(made(*(args[name] for name in names)))

    return cell.settle(cell.args(), run, same=False)


# On a GPU torch 2.11 crashes when it loads a package, even of torch.nn.functional.silu alone.
@situation("AOTInductor", "exported, compiled, packaged, loaded: one package of all functions", slow=True, cuda=False)
def _(cell: Cell) -> str:
    others = [Cell(f, cell.device) for f in FUNCTIONS]
    at = [other.function for other in others].index(cell.function)

    def run(args: Args) -> tuple[Any, ...]:
        given = [args if n == at else other.args() for n, other in enumerate(others)]
        return tuple(package(cell.device)(*(x for args in given for x in args.values() if isinstance(x, Tensor)))[at])

    with torch.no_grad():
        return cell.settle(cell.args(), run, same=False)


@cache
def package(device: str) -> Any:
    """Call all functions with their tensors, one after the other, and return the outputs."""
    calls, examples = [], []
    for f in FUNCTIONS:
        args = Cell(f, device).args()
        names, call = of_tensors(Cell(f, device), args)
        calls.append((len(names), call))
        examples += [args[name] for name in names]

    def call_all(*tensors: Tensor) -> list[list[Any]]:
        outputs, rest = [], list(tensors)
        for count, call in calls:
            outputs.append(list(call(*rest[:count])))
            del rest[:count]
        return outputs

    with torch.no_grad(), TemporaryDirectory() as folder:
        program = exported(call_all, examples)
        path = torch._inductor.aoti_compile_and_package(program, package_path=f"{folder}/model.pt2")
        return torch._inductor.aoti_load_package(path)


# ---- at import ---------------------------------------------------------------------------------------

IMPORTED = """
import json, os, sys, torch
from torch._subclasses.fake_tensor import FakeTensorMode
with {mode}:
    import jitrope
if os.environ.get("TEST_DEVICE") == "host":
    from tests.host import backend
    backend.install()
from tests.matrix.cells import FUNCTIONS, Cell
ended = {{}}
for function in FUNCTIONS:
    try:
        cell = Cell(function, {device!r})
        ended[function.title] = cell.settle(cell.args())
    except Exception as error:
        ended[function.title] = repr(error)
print(json.dumps(ended))
"""


@cache
def imported(mode: str, device: str) -> dict[str, str]:
    """The outcome of a plain call of each function, in a process that imported jitrope under a mode."""
    root = Path(__file__).resolve().parents[2]
    code = IMPORTED.format(mode=mode, device=device)
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=root,
                         env={**os.environ, "PYTHONPATH": str(root)})  # fmt: skip
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])  # type: ignore[no-any-return]


for _name, _mode in (("FakeTensorMode", "FakeTensorMode()"), ("the meta device", 'torch.device("meta")')):

    @situation(f"imported under {_name}", "no tensor of the library is made of it", slow=True)
    def _(cell: Cell, mode: str = _mode) -> str:
        ended = imported(mode, cell.device)[cell.function.title]
        assert ended in ("right", "refused"), ended
        return ended
