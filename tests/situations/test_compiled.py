"""Calls that torch compiles, traces or exports, and imports of jitrope under a mode."""

from __future__ import annotations

import functools
import io
import itertools
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from ..calls import NAMED
from ..fresh import python
from .named import CALLS, DERIVED, Call, of

pytestmark = pytest.mark.slow
ON_GPU = (pytest.mark.gpu, pytest.mark.hardware)  # to compile takes too long beside the host's stand-in
INDUCTOR = ["rope", "fused", "norm", "streams", "cache"]
eager = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)


def of_tensors(call: Call) -> Callable[..., tuple[Tensor, ...]]:
    """The call as a function of its tensors."""
    torch._dynamo.reset()
    names = [*call.args]
    return lambda *tensors: call(dict(zip(names, tensors)))


@of(gpu=ON_GPU)
def test_graph_breaks(call: Call) -> None:
    """Work before and after is in other graphs."""
    function = of_tensors(call)

    def broken(*tensors: Tensor) -> Any:
        torch._dynamo.graph_break()
        results = function(*tensors)
        torch._dynamo.graph_break()
        return results

    graph = torch.compile(broken, backend="aot_eager")
    call.check(run=lambda args: graph(*args.values()), same_tensors=False)


@of({"aot_eager": DERIVED, "inductor": [x for x in INDUCTOR if x in DERIVED]}, gpu=ON_GPU)
def test_gradients(call: Call, kind: str) -> None:
    """Forward and backward are compiled, of sequence-first tensors."""
    graph = torch.compile(of_tensors(call), backend=kind, fullgraph=True)
    leaves = {x: call.args[x] for x in (*call.heads, *call.weights)}
    call.check_gradient(
        lambda made: made | {x: made[x].transpose(0, 1) for x in call.turned},
        run=lambda args: graph(*args.values()),
        leaves=leaves | {x: leaves[x].transpose(0, 1).contiguous() for x in call.turned},
        same_tensors=False,
    )


@of(DERIVED, gpu=ON_GPU)
def test_gradients_of_views(call: Call) -> None:
    """Of projections, in place too."""
    function, sizes = of_tensors(call), [x.shape if n in call.turned else None for n, x in call.args.items()]
    graph = eager(lambda *tensors: function(*[x.view(y) if y else x for x, y in zip(tensors, sizes)]))
    call.check_gradient(
        lambda made: made | {n: made[n].view(call.args[n].shape) for n in call.turned},
        run=lambda args: graph(*[x.flatten(-2) if y else x for x, y in zip(args.values(), sizes)]),
        same_tensors=False,
    )


@of(INDUCTOR, gpu=ON_GPU)
def test_inductor(call: Call) -> None:
    """It computes with the results of sequence-first tensors, whose strides are as the fakes say."""
    call.args |= {x: call.args[x].transpose(0, 1).contiguous().transpose(0, 1) for x in call.turned}
    function = of_tensors(call)
    graph = torch.compile(lambda *tensors: tuple([y.float() + 0 for y in function(*tensors)]), fullgraph=True)
    call.check(run=lambda args: graph(*args.values()), same_tensors=False)


@of({"aot_eager": NAMED, "inductor": [x.name for x in CALLS if x.name.endswith("_") or x.cached]}, gpu=ON_GPU)
@torch.no_grad()
def test_a_complex_table(call: Call, kind: str) -> None:
    call.args["freqs_cis"] = torch.complex(call.args.pop("cos"), call.args.pop("sin"))
    graph = torch.compile(of_tensors(call), backend=kind, fullgraph=True)
    call.check(run=lambda args: graph(*args.values()), same_tensors=False)


def exported(function: Callable[..., Any], examples: list[Tensor]) -> Any:
    module = torch.nn.Module()
    module.forward = function
    return torch.export.export(module, tuple(examples))


def loaded(program: Any) -> Any:
    """After it was saved."""
    held = io.BytesIO()
    torch.export.save(program, held)
    held.seek(0)
    return torch.export.load(held)


TRACED: dict[str, Any] = {
    "make_fx, real": lambda f, xs: make_fx(f, tracing_mode="real")(*xs),
    "make_fx, fake": lambda f, xs: make_fx(f, tracing_mode="fake")(*xs),
    "make_fx, symbolic": lambda f, xs: make_fx(f, tracing_mode="symbolic")(*xs),
    "exported": lambda f, xs: exported(f, xs).module(),
    "exported, saved and loaded": lambda f, xs: loaded(exported(f, xs)).module(),
    "torch.jit.trace": lambda f, xs: torch.jit.trace(f, tuple(xs), check_trace=False),
}


@pytest.mark.parametrize("kind", TRACED)
@of(gpu=ON_GPU)
def test_traced(call: Call, kind: str) -> None:
    """What it gives for copies gives the same for the tensors of the call; torch.jit would lose what is written."""
    copies, lost = [x.clone() for x in call.args.values()], {*call.written} - {*call.heads}
    call.check(
        kind if kind == "torch.jit.trace" and lost else "",
        run=lambda args: tuple(TRACED[kind](of_tensors(call), copies)(*args.values())),
        same_tensors=False,
    )


@functools.cache
def package() -> Any:
    """Calls with their tensors, one after the other, exported, compiled, packaged and loaded."""
    made = [Call(name, "cpu") for name in INDUCTOR]
    ends = [0, *itertools.accumulate(len(x.args) for x in made)]
    calls = [(of_tensors(x), slice(*span)) for x, span in zip(made, itertools.pairwise(ends))]
    with torch.no_grad(), TemporaryDirectory() as folder:
        program = exported(
            lambda *tensors: [[*function(*tensors[span])] for function, span in calls],
            [y.clone() for x in made for y in x.args.values()],
        )
        path = torch._inductor.aoti_compile_and_package(program, package_path=f"{folder}/model.pt2")
        return torch._inductor.aoti_load_package(path)


# On a GPU torch 2.11 crashes when it loads a package, even of torch.nn.functional.silu alone.
@of(INDUCTOR, gpu=())
def test_ahead_of_time(call: Call) -> None:
    """AOTInductor: one package of these calls."""
    others = {name: Call(name, "cpu").args for name in INDUCTOR}
    every = lambda args: [x for tensors in (others | {call.name: args}).values() for x in tensors.values()]  # noqa: E731
    with torch.no_grad():
        call.check(run=lambda args: tuple(package()(*every(args))[INDUCTOR.index(call.name)]), same_tensors=False)


IMPORTED = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
with {mode}:
    import jitrope
from tests.calls import NAMED
from tests.situations.named import Call
for name in NAMED:
    Call(name, {device!r}).check()
"""


@pytest.mark.parametrize("mode", ["FakeTensorMode()", 'torch.device("meta")'])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_imported_under_a_mode(device: str, mode: str) -> None:
    """No tensor of the library is made of it: all calls are right afterwards."""
    python("-c", IMPORTED.format(mode=mode, device=device), check=True)
