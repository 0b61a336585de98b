"""Kinds of tensors, and modes and transforms of torch around a call."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import graph
from torch.nn import Parameter
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import BaseTorchDispatchMode
from torch.utils._pytree import tree_map

from .named import CALLS, ONE_TABLE, Call, of, times_one

ON_GPU = (pytest.mark.gpu, pytest.mark.hardware)
NO_WRITES = [x.name for x in CALLS if not x.written]


@pytest.mark.parametrize("gradients", [False, True])
@of()
def test_parameters(call: Call, gradients: bool) -> None:
    """Every tensor is one. Those with gradients are written under no_grad, and stay leaves."""
    one = call.changed(call.args, lambda x: Parameter(x, gradients and x.is_floating_point()))
    one.check(around=torch.no_grad() if gradients else nullcontext())
    assert all(x.is_leaf and x.requires_grad == (gradients and x.is_floating_point()) for x in one.args.values())


class Named(Tensor):
    """A subclass that does nothing, with torch's own __torch_function__."""


class Held(Tensor):
    """A wrapper that runs each op on the tensor it holds."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Any:
        own = Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device=held.device, requires_grad=held.requires_grad,
        )  # fmt: skip
        own.held = held
        return own

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda x: x.held if isinstance(x, Held) else x, (args, kwargs or {}))
        return tree_map(lambda y: Held(y) if isinstance(y, Tensor) else y, func(*args, **kwargs))


SUBCLASSES: dict[str, Any] = {"subclass": lambda x: x.as_subclass(Named), "wrapper": Held}


@pytest.mark.parametrize("which", ["every tensor", "heads", "tables"])
@pytest.mark.parametrize("kind", SUBCLASSES)
@of()
def test_subclasses(call: Call, kind: str, which: str) -> None:
    names = {"every tensor": [*call.args], "heads": call.heads, "tables": ["cos", "sin"]}[which]
    call.changed(names, SUBCLASSES[kind]).check(
        run=lambda args: tuple([getattr(y, "held", y) for y in call(args)]),
        numbers=call.args, same_tensors=False, fake=False, versions=False,
    )  # fmt: skip


ODD: dict[str, Any] = {
    "sparse": lambda x: x.to_sparse(),
    "mkldnn": lambda x: x.cpu().to_mkldnn(),  # only CPUs have it
    "nested": lambda x: torch.nested.nested_tensor(list(x)),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:.*quantize")
@pytest.mark.parametrize("kind", ODD)
@of()
def test_a_tensor_without_strides(call: Call, kind: str) -> None:
    text = r"it must be a strided tensor|it must be a tensor \(B, S, H, D\)|qint8"
    call.changed(call.turned[:1], ODD[kind]).check(text, versions=False)


INFERENCE = "it must be a tensor that was not made in inference mode"
cloned = torch.inference_mode()(lambda x: x.clone())


@of()
def test_inference_tensors(call: Call) -> None:
    """Made in inference mode, and used outside of it: they are refused where they are written."""
    read = [x for x in call.args if x not in call.written]
    for names in (["cos", "sin"], call.weights, read, call.written, [*call.args]):
        call.changed(names, cloned).check(INFERENCE if {*names} & {*call.written} else "")
    # Tables cannot be kept for the backward.
    call.changed(("cos", "sin"), cloned).check_gradient(refusal=call.no_gradient or INFERENCE)


@of()
def test_no_grad_and_inference_mode(call: Call) -> None:
    """Of tensors that want a gradient, and of those that were made inside."""
    one = call.changed((*call.heads, *call.weights), lambda x: x.requires_grad_() * 1)
    one.check(around=torch.no_grad(), fake=False)
    for names in ((), call.args):
        call.changed(names, cloned).check(around=torch.inference_mode(), fake=not names)


@contextmanager
def doubles() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


CONTEXTS: dict[str, Any] = {
    "autocast": lambda device: torch.autocast(torch.device(device).type, dtype=torch.bfloat16),
    "the meta device": lambda device: torch.device("meta"),
    "a dispatch mode": lambda device: BaseTorchDispatchMode(),
    "a function mode": lambda device: BaseTorchFunctionMode(),
    "doubles": lambda device: doubles(),
    "hooks": lambda device: graph.saved_tensors_hooks(lambda x: (x.clone(),), lambda held: held[0]),
    "save_on_cpu": lambda device: graph.save_on_cpu(),
}


@pytest.mark.parametrize("kind", CONTEXTS)
@of()
def test_contexts(call: Call, kind: str) -> None:
    """Dtypes and devices stay what they are, what is written counts as written, and the backward is outside."""
    for _ in range(2):
        call.changed((), cloned).check(around=CONTEXTS[kind](call.device))
    call.check_gradient(around=CONTEXTS[kind](call.device))


@of(ONE_TABLE)
def test_the_meta_device_as_default_with_positions(call: Call) -> None:
    """Whatever is made for them is not on it."""
    call.args["position_ids"] = torch.tensor([[0, 2, 1, 5, 3, 4]], device=call.device).expand(2, 6).contiguous()
    call.check(around=torch.device("meta"), fake=False)


@of()
def test_fake_tensors(call: Call) -> None:
    """Outside of their mode; every `check` has some inside of it."""
    mode = FakeTensorMode()
    fakes = {n: mode.from_tensor(x) for n, x in call.args.items()}
    call.check_alike(fakes, call(call.changed(()).args), nullcontext())
    call.check()


@of()
def test_fake_tensors_under_autograd(call: Call) -> None:
    mode = FakeTensorMode()
    args = {n: mode.from_tensor(x) for n, x in call.args.items()}
    leaves = {n: args[n].requires_grad_() for n in (*call.heads, *call.weights)}
    if call.no_gradient:
        call.tried({**args, **times_one(leaves)}, call.no_gradient, None)
        return
    results = call({**args, **times_one(leaves)})
    torch.autograd.backward(results, [torch.ones_like(y) for y in results])
    for leaf in leaves.values():
        assert leaf.grad.shape == leaf.shape  # type: ignore[union-attr]


@of()
def test_vmap(call: Call) -> None:
    """A call that writes nothing has an axis in front."""
    plain = call.args
    stacked = {x: torch.stack((plain[x], 2 * plain[x])) for x in call.turned}
    mapped = torch.func.vmap(lambda *xs: call({**plain, **dict(zip(stacked, xs))}))
    if call.written:
        call.args = {**plain, **stacked}
        text = "torch.func's vmap is not supported here; give the tensors a batch axis"
        call.check(text, run=lambda args: mapped(*[args[x] for x in stacked]))
        return
    results = mapped(*stacked.values())
    for n in range(2):
        args = {**plain, **{x: y[n] for x, y in stacked.items()}}
        call.compare(args, tuple([y[n] for y in results]), call.like(args))
    none = mapped(*[x[:0] for x in stacked.values()])
    assert [x.shape for x in none] == [(0, *x.shape[1:]) for x in results]


NO_FORWARD = r"forward-mode derivatives \(jvp\) are not supported; use the backward"
NO_GRAD = "torch.func's grad is not supported here; use torch.autograd.grad|requires a gradient, but this call has none"
TRANSFORMS: dict[str, Any] = {
    "grad": (NO_GRAD, lambda f, xs: torch.func.grad(lambda x: sum(y.double().sum() for y in f(x, *xs[1:])))(xs[0])),
    "vjp": (NO_GRAD, lambda f, xs: torch.func.vjp(f, *xs)),
    "jvp": (NO_FORWARD, lambda f, xs: torch.func.jvp(f, xs, xs)),
}


@pytest.mark.parametrize("kind", TRANSFORMS)
@of()
def test_derivatives_of_torch_func(call: Call, kind: str) -> None:
    """They are refused, as the message says: `loss.backward()` is there."""
    text, transform = TRANSFORMS[kind]
    function = lambda *xs: call({**call.args, **times_one(dict(zip(call.turned, xs)))})  # noqa: E731
    call.check(text, run=lambda args: transform(function, tuple([args[x] for x in call.turned])))


@of()
def test_a_dual_tensor(call: Call) -> None:
    """Forward mode of torch.autograd."""
    with torch.autograd.forward_ad.dual_level():
        call.args |= {x: torch.autograd.forward_ad.make_dual(call.args[x], call.args[x]) for x in call.turned[-1:]}
        call.check(NO_FORWARD)


@of(NO_WRITES)
def test_functionalize(call: Call) -> None:
    """torch's own has no rule for ops that write."""
    function = torch.func.functionalize(lambda *xs: call(dict(zip(call.args, xs))))
    call.check(run=lambda args: function(*args.values()), same_tensors=False)


@of()
def test_copies_and_pickles(call: Call) -> None:
    """Of what comes back, and of what was written. torch pickles no fp8 tensors, but saves them."""
    for y in (*call(call.args), *[call.args[x] for x in call.written]):
        held = io.BytesIO()
        torch.save(y, held)
        held.seek(0)
        pickled = y if y.dtype == torch.float8_e4m3fn else pickle.loads(pickle.dumps(y))
        for twin in (copy.deepcopy(y), torch.load(held), pickled):
            assert twin.dtype == y.dtype
            assert twin.stride() == y.stride() or not y.is_contiguous()
            assert torch.equal(twin.float(), y.float())
    Call(call.name, call.device).check()


@of()
def test_many_threads(call: Call) -> None:
    """Eight calls each, with numbers of their own."""

    def work(number: int) -> None:
        for _ in range(8):
            one = call.changed(call.turned[:1], lambda x: x * number)
            like = one.like({n: x.clone() for n, x in one.args.items()})
            one.compare(one.args, one(one.args), like)
        if call.derived:
            call.changed(()).check_gradient()

    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(work, range(1, 5))] == [None] * 4
    call.check()


@of(cpu=False, gpu=ON_GPU)
def test_another_stream(call: Call) -> None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    call.check(around=torch.cuda.stream(stream))


@of(cpu=False, gpu=ON_GPU)
def test_a_cuda_graph(call: Call) -> None:
    """It is captured, then played with other numbers."""
    other = call.changed(call.turned[:1], lambda x: x * 0.5)
    call(call.changed(()).args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call(call.args)
    for name, x in other.args.items():
        call.args[name].copy_(x)
    like = call.like(other.args)
    graph.replay()
    torch.cuda.synchronize()
    call.compare(call.args, results, like)
