"""Calls that torch compiles, traces or exports, and imports of jitrope under a mode."""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from ..devices import DEVICES
from ..fresh import python
from .named import CALLS, DERIVED, NAMED, Args, Call, of, times_one

ON_GPU = (pytest.mark.gpu, pytest.mark.hardware)  # to compile takes too long beside the host's stand-in
INDUCTOR = ["rope", "fused", "norm", "streams", "cache"]
IN_PLACE = [x.name for x in CALLS if x.name.endswith("_") or x.cached]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def of_tensors(call: Call) -> Callable[..., tuple[Tensor, ...]]:
    """The call as a function of its tensors."""
    names = [*call.args]
    return lambda *tensors: call(dict(zip(names, tensors)))


@of(gpu=ON_GPU)
def test_torch_compile(call: Call) -> None:
    """Static shapes, one graph."""
    graph = torch.compile(of_tensors(call), backend="aot_eager", dynamic=False, fullgraph=True)
    call.check(run=lambda args: graph(*args.values()), same_tensors=False)


@pytest.mark.slow
@pytest.mark.tenth
@of(gpu=ON_GPU)
def test_dynamic_shapes(call: Call) -> None:
    """Other lengths with the same graph."""
    graph = torch.compile(of_tensors(call), backend="aot_eager", dynamic=True, fullgraph=True)
    for one in (call, Call(call.name, call.device, tokens=8)):
        one.check(run=lambda args: graph(*args.values()), same_tensors=False)


@pytest.mark.slow
@pytest.mark.tenth
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


@pytest.mark.slow
@pytest.mark.tenth
@of(DERIVED, gpu=ON_GPU)
def test_compiled_under_autograd(call: Call) -> None:
    """Forward and backward are compiled."""
    graph = torch.compile(of_tensors(call), backend="aot_eager", fullgraph=True)
    call.check_gradient(run=lambda args: graph(*args.values()), same_tensors=False)


@pytest.mark.slow
@pytest.mark.tenth
@of(DERIVED, gpu=ON_GPU)
def test_compiled_views_under_autograd(call: Call) -> None:
    """Of projections, in place too."""
    function, sizes = of_tensors(call), {n: call.args[n].shape if n in call.turned else None for n in call.args}
    graph = torch.compile(
        lambda *tensors: function(*[x if size is None else x.view(size) for x, size in zip(tensors, sizes.values())]),
        backend="aot_eager",
        fullgraph=True,
    )
    call.check_gradient(
        lambda leaves: {n: x.view(sizes[n]) if sizes[n] else x for n, x in times_one(leaves).items()},
        run=lambda args: graph(*[x.flatten(-2) if sizes[n] else x for n, x in args.items()]),
        same_tensors=False,
    )


@pytest.mark.slow
@pytest.mark.tenth
@of(INDUCTOR, gpu=ON_GPU)
def test_inductor(call: Call) -> None:
    """It computes with the results of sequence-first tensors, whose strides are as the fakes say."""
    call.args |= {x: call.args[x].transpose(0, 1).contiguous().transpose(0, 1) for x in call.turned}
    function = of_tensors(call)
    graph = torch.compile(lambda *tensors: tuple([y.float() + 0 for y in function(*tensors)]), fullgraph=True)
    call.check(run=lambda args: graph(*args.values()), same_tensors=False)


@pytest.mark.slow
@pytest.mark.tenth
@of([x for x in INDUCTOR if x in DERIVED], gpu=ON_GPU)
def test_inductor_under_autograd(call: Call) -> None:
    """Of sequence-first tensors."""
    graph = torch.compile(of_tensors(call), fullgraph=True)
    leaves = {x: call.args[x] for x in (*call.heads, *call.weights)}
    leaves |= {x: leaves[x].transpose(0, 1).contiguous() for x in call.turned}
    call.check_gradient(
        lambda leaves: {n: x.transpose(0, 1) if n in call.turned else x for n, x in times_one(leaves).items()},
        run=lambda args: graph(*args.values()),
        leaves=leaves,
        same_tensors=False,
    )


@pytest.mark.slow
@pytest.mark.tenth
@of(IN_PLACE, gpu=ON_GPU)
def test_inductor_in_place_with_a_complex_table(call: Call) -> None:
    call.args["freqs_cis"] = torch.complex(call.args.pop("cos"), call.args.pop("sin"))
    graph = torch.compile(of_tensors(call), backend="inductor", fullgraph=True)
    with torch.no_grad():
        call.check(run=lambda args: graph(*args.values()), same_tensors=False)


@pytest.mark.slow
@pytest.mark.tenth
@of(gpu=ON_GPU)
def test_compiled_with_a_complex_table(call: Call) -> None:
    call.args["freqs_cis"] = torch.complex(call.args.pop("cos"), call.args.pop("sin"))
    graph = torch.compile(of_tensors(call), backend="aot_eager", fullgraph=True)
    call.check(run=lambda args: graph(*args.values()), same_tensors=False)


@pytest.mark.slow
@pytest.mark.tenth
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@of(gpu=ON_GPU)
def test_make_fx(call: Call, mode: str) -> None:
    """The graph gives the same with the tensors of the call."""
    graph = make_fx(of_tensors(call), tracing_mode=mode)(*[x.clone() for x in call.args.values()])
    call.check(run=lambda args: tuple(graph(*args.values())), same_tensors=False)


class Called(torch.nn.Module):
    """torch.export takes modules."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Any:
        return self.function(*tensors)


@pytest.mark.slow
@pytest.mark.tenth
@of(gpu=ON_GPU)
def test_export(call: Call) -> None:
    """As it is, and then saved and loaded."""
    program, held = torch.export.export(Called(of_tensors(call)), tuple([x.clone() for x in call.args.values()])), io.BytesIO()
    torch.export.save(program, held)
    held.seek(0)
    for one in (program, torch.export.load(held)):
        again = Call(call.name, call.device)
        again.check(run=lambda args: tuple(one.module()(*args.values())), same_tensors=False)  # noqa: B023


@pytest.mark.slow
@pytest.mark.tenth
@of(gpu=ON_GPU)
def test_jit_trace(call: Call) -> None:
    """The traced call gives the same with other tensors; it would lose what is written, but in place."""
    function = of_tensors(call)

    def run(args: Args) -> tuple[Tensor, ...]:
        made = torch.jit.trace(function, tuple([x.clone() for x in args.values()]), check_trace=False)
        return tuple(made(*args.values()))

    call.check("torch.jit.trace" if {*call.written} - {*call.heads} else "", run, same_tensors=False)


@functools.cache
def package() -> Any:
    """All calls with their tensors, one after the other, exported, compiled, packaged and loaded."""
    calls = [(of_tensors(x), len(x.args)) for x in CALLS]

    def call_all(*tensors: Tensor) -> list[list[Tensor]]:
        results, rest = [], list(tensors)
        for function, count in calls:
            results.append([*function(*rest[:count])])
            del rest[:count]
        return results

    with torch.no_grad(), TemporaryDirectory() as folder:
        program = torch.export.export(Called(call_all), tuple([y.clone() for x in CALLS for y in x.args.values()]))
        path = torch._inductor.aoti_compile_and_package(program, package_path=f"{folder}/model.pt2")
        return torch._inductor.aoti_load_package(path)


# On a GPU torch 2.11 crashes when it loads a package, even of torch.nn.functional.silu alone.
@pytest.mark.slow
@pytest.mark.tenth
@of(gpu=())
def test_ahead_of_time(call: Call) -> None:
    """AOTInductor: one package of all calls."""
    others = [Call(name, "cpu") for name in NAMED]
    at = [*NAMED].index(call.name)

    def run(args: Args) -> tuple[Tensor, ...]:
        given = [args if n == at else other.args for n, other in enumerate(others)]
        return tuple(package()(*[x for tensors in given for x in tensors.values()])[at])

    with torch.no_grad():
        call.check(run=run, same_tensors=False)


IMPORTED = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
with {mode}:
    import jitrope
from tests.situations.named import NAMED, Call
for name in NAMED:
    Call(name, {device!r}).check()
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["FakeTensorMode()", 'torch.device("meta")'])
@pytest.mark.parametrize("device", [DEVICES[0], pytest.param("cuda", marks=ON_GPU)])
def test_imported_under_a_mode(device: str, mode: str) -> None:
    """No tensor of the library is made of it: all calls are right afterwards."""
    root = Path(__file__).parents[2]
    python("-c", IMPORTED.format(mode=mode, device=device), env={**os.environ, "PYTHONPATH": str(root)}, cwd=root, check=True)
