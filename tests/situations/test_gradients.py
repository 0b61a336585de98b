"""Autograd around a call: what a leaf or a view may be written, hooks, checkpoints, gradients of gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from jitrope import JitropeError

from ..results import near
from .named import DERIVED, SEVERAL, Args, Call, of, times_one

NO_GRADIENT = "requires a gradient, but this call has none"
VIEW = "a view by unbind, split or chunk, or made under no_grad, which torch cannot write in place"

# Of a size (B, S, H, D): the size of a tensor, and its view that has this size.
VIEWS: dict[str, Any] = {
    "view": (lambda b, s, h, d: (b, s, h * d), lambda x, *size: x.view(size)),
    "unflatten": (lambda b, s, h, d: (b, s, h * d), lambda x, b, s, h, d: x.unflatten(-1, (h, d))),
    "transpose": (lambda b, s, h, d: (s, b, h, d), lambda x, *_: x.transpose(0, 1)),
    "view and transpose": (lambda b, s, h, d: (s, b * h, d), lambda x, b, s, h, d: x.view(s, b, h, d).transpose(0, 1)),
    "permute": (lambda b, s, h, d: (d, h, s, b), lambda x, *_: x.permute(3, 2, 1, 0)),
    "select": (lambda b, s, h, d: (b, s, h, d, 2), lambda x, *_: x[..., 1]),
    "narrow": (lambda b, s, h, d: (b, s, h, d + 3), lambda x, b, s, h, d: x.narrow(-1, 1, d)),
    "slice with a step": (lambda b, s, h, d: (b, s, h, 2 * d), lambda x, *_: x[..., ::2]),
    "squeeze": (lambda *size: (1, *size), lambda x, *_: x.squeeze(0)),
    "as_strided": (lambda *size: (2, *size), lambda x, *size: x.as_strided(size, x.stride()[1:], 3)),
    "unbind": (lambda *size: (2, *size), lambda x, *_: x.unbind(0)[1]),
    "chunk": (lambda b, s, h, d: (2 * b, s, h, d), lambda x, *_: x.chunk(2)[1]),
    "split": (lambda b, s, h, d: (b, s, h, 2 * d), lambda x, b, s, h, d: x.split(d, -1)[0]),
    "a view of a view": (lambda b, s, h, d: (1, b, s, h * d), lambda x, *size: x[0].view(size)[:, :]),
}


@pytest.mark.parametrize("kind", VIEWS)
@of()
def test_views(call: Call, kind: str) -> None:
    """All that is rotated is a view. In place it writes its base; torch forbids it to those of unbind, chunk, split."""
    size, view = VIEWS[kind]
    bases = {f"base of {x}": call.made.noise(*size(*call.args[x].shape)) for x in call.turned}
    leaves = bases | {x: call.args[x] for x in (*call.copied, *call.weights)}
    call.check_gradient(
        lambda made: made | {x: view(made[f"base of {x}"], *call.args[x].shape) for x in call.turned},
        leaves=leaves,
        refusal=call.no_gradient or VIEW * call.writes_heads if kind in ("unbind", "chunk", "split") else None,
    )
    call.args |= {x: view(bases[f"base of {x}"], *call.args[x].shape) for x in call.turned}
    call.check()


ONE_PROJECTION: dict[str, Any] = {
    "slices": lambda x, q: (x[:, :, :q], x[:, :, q:]),
    "split": lambda x, q: x.split([q, x.shape[2] - q], 2),
}


@pytest.mark.parametrize("kind", ONE_PROJECTION)
@of([x for x in SEVERAL if x != "streams"])
def test_q_and_k_of_one_projection(call: Call, kind: str) -> None:
    both = torch.cat((call.args["q"], call.args["k"]), 2)
    call.check_gradient(
        lambda made: made | dict(zip("qk", ONE_PROJECTION[kind](made["base"], 4))),
        leaves={"base": both} | {x: call.args[x] for x in (*call.copied, *call.weights)},
        refusal=call.no_gradient or VIEW * call.writes_heads if kind == "split" else None,
    )
    call.args |= dict(zip("qk", ONE_PROJECTION[kind](both, 4)))
    call.check()


LEAF = "requires a gradient and is a leaf, which torch cannot write in place"
LAZY = "it must be a tensor with its numbers in memory, not torch's lazy zeros"
HEADS: dict[str, Any] = {
    "a leaf": (LEAF, lambda x: x),
    "a view of a leaf": (LEAF, lambda x: x[:]),
    "a view made under no_grad": (LEAF, lambda x: torch.no_grad()(lambda y: y[:])(x * 1)),
    "negative": (LAZY, lambda x: torch._neg_view(-x)),  # torch's lazy negative bit
}


@pytest.mark.parametrize("kind", HEADS)
@of()
def test_heads_that_cannot_be_written(call: Call, kind: str) -> None:
    """torch forbids it to leaves under autograd."""
    text, change = HEADS[kind]
    call.check_gradient(
        begin=lambda leaves: {n: change(x) if n in call.turned else x for n, x in leaves.items()},
        refusal=call.no_gradient or text * call.writes_heads,
    )


@of()
def test_detached_tensors(call: Call) -> None:
    """They are written through, past autograd."""
    bases = times_one({x: call.args[x].clone().requires_grad_() for x in call.heads})
    one = call.changed(())
    one.args |= {n: x.detach() for n, x in bases.items()}
    one.check()
    for name, x in bases.items():
        assert torch.equal(x.detach(), call.args[name]) == (name not in call.written)


@of()
def test_one_tensor_has_a_gradient(call: Call) -> None:
    for name in (*call.heads, *call.weights):
        call.check_gradient(leaves={name: call.args[name]})


@of()
def test_tables_with_a_gradient(call: Call) -> None:
    """They get one where the call has gradients and writes nothing."""
    tables = {x: call.args[x] for x in ("cos", "sin")}
    call.check_gradient(begin=dict, leaves=tables, refusal=call.no_gradient or NO_GRADIENT * call.writes_heads)


# Words of `Call.check_gradient`: gradients of a sum, as complex numbers hand them back, and of other strides.
OF_RESULTS: dict[str, Any] = {
    "expanded": {"gradient": lambda y: torch.ones((), device=y.device).expand(y.shape)},
    "negative": {"given": lambda g: torch._neg_view(-g)},
    "transposed": {"given": lambda g: torch.stack((g, g), -1).permute(4, 1, 0, 2, 3).contiguous()[1].transpose(0, 1)},
    "unaligned": {"given": lambda g: torch.cat((g.flatten()[:1], g.flatten()))[1:].view(g.shape)},
}


@pytest.mark.parametrize("kind", OF_RESULTS)
@of(DERIVED)
def test_gradients_of_results(call: Call, kind: str) -> None:
    call.check_gradient(**OF_RESULTS[kind])


@of(DERIVED)
def test_gradients_through_complex_numbers(call: Call) -> None:
    """They come back with the negative bit."""
    lazy = lambda y: torch.complex(torch.zeros_like(y), y * 1).conj().imag.neg()  # noqa: E731
    call.check_gradient(run=lambda args: tuple([lazy(y) for y in call(args)]), same_tensors=False)


@pytest.mark.parametrize("reentrant", [False, True])
@of(DERIVED)
def test_checkpoint(call: Call, reentrant: bool) -> None:
    """Computed again for the backward. The inputs of a checkpoint do not change, so it writes what it made."""

    def run(args: Args) -> tuple[Tensor, ...]:
        fresh = times_one if call.writes_heads else dict
        again = lambda *tensors: call(fresh(dict(zip(args, tensors))))  # noqa: E731
        results = checkpoint(again, *args.values(), use_reentrant=reentrant)
        for name, y in zip(call.turned if call.writes_heads else (), results):
            args[name].data.copy_(y.data)
        return results  # type: ignore[no-any-return]

    call.check_gradient(run=run, same_tensors=False)


@pytest.mark.parametrize("anomalies", [False, True])
@of()
def test_checks_of_torch(call: Call, anomalies: bool) -> None:
    """Deterministic algorithms, and the detection of anomalies."""
    torch.use_deterministic_algorithms(not anomalies)
    try:
        with torch.autograd.set_detect_anomaly(anomalies):
            call.check_gradient()
    finally:
        torch.use_deterministic_algorithms(False)


@of(DERIVED)
def test_double_backward(call: Call) -> None:
    """The gradient's gradient; a norm and latent attention have none."""

    def second(function: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
        noise = Call(call.name, call.device).made.noise  # the same numbers
        leaves = {x: call.args[x].detach().to(dtype).requires_grad_() for x in call.heads}
        results = function({**call.args, **times_one(leaves)})
        given = [noise(*y.shape).to(dtype).requires_grad_() for y in results]
        once = torch.autograd.grad(results, [*leaves.values()], given, create_graph=True)
        return torch.autograd.grad(sum((g * noise(*g.shape).to(dtype)).sum() for g in once), given)

    if call.weights or call.name == "latent":
        with pytest.raises(JitropeError, match="second derivative"):
            second(call, torch.float32)
        return
    for got, want in zip(second(call, torch.float32), second(call.expected, torch.float64), strict=True):
        assert near(got, want) is None


@of(DERIVED)
def test_backward_twice(call: Call) -> None:
    leaves = {x: call.args[x].requires_grad_() for x in (*call.heads, *call.weights)}
    results = call({**call.args, **times_one(leaves)})
    given = [call.made.noise(*y.shape) for y in results]
    once = torch.autograd.grad(results, [*leaves.values()], given, retain_graph=True)
    twice = torch.autograd.grad(results, [*leaves.values()], given)
    assert all(torch.equal(a, b) for a, b in zip(once, twice))


@of(DERIVED)
def test_a_table_written_after_the_call(call: Call) -> None:
    """A backward that needs what was there raises."""
    call.args |= times_one({x: call.args[x].requires_grad_() for x in (*call.heads, *call.weights)})
    results = call(call.args)
    call.args["cos"].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(results, [torch.ones_like(y) for y in results])
