"""The path of a call: directly to the launch, through an autograd function, or to torch's op; and its backward.

A call that nothing watches skips torch's dispatcher, which takes as much host time as the launch. A call like a
recent one is not checked again (`replay`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import torch_state as watch
from ..base import config
from ..base.errors import InvalidInput
from ..base.views import Tensors
from ..checks import checks
from ..checks.check_values import check_values
from ..checks.words import canonical, resolved
from ..plan.options import Options
from ..sources.operation import Operation, has
from ..sources.source import OF_TABLES
from ..stages.transform import LABEL as TRANSFORM
from ..torch_state import dispatch_modes, is_compiling
from . import launch
from .op_call import run_op


@config.on_change
def _forget() -> None:
    """Forget known calls, which were planned with the launch configured before."""
    launch.local = launch.Local()


def call(op: Operation, tensors: Tensors, asked: launch.Asked) -> Tensors:
    """Return the results of an operation by name. A user's words are checked; `Options` are already checked.

    The recent calls of this thread are tried first (`replay`). They notice everything that may watch a call, except
    dispatch modes, with torch.compile's, and forward-mode AD, which are tested here.
    """
    key = (op, *tensors, *asked.items()) if type(asked) is dict else (op, *tensors, asked)
    if not dispatch_modes() and forward_ad._current_level < 0:
        try:
            recent = launch.local.recent[key]
        except (KeyError, TypeError):  # the check refuses words without a hash
            recent = []
        for number, replay in enumerate(recent):
            out: Tensors | None = replay(*tensors.values())
            if out is not None:
                if number:  # the next layers of a step have this kind too
                    recent.insert(0, recent.pop(number))
                launch.local.made = (replay, tensors, out) if type(asked) is dict else None
                return out
    return _call(op, tensors, asked, key)


def _call(op: Operation, tensors: Tensors, asked: launch.Asked, key: Any) -> Tensors:
    """Return the results of a call that is new or watched."""
    if not is_compiling():
        launch.local.made = None
    wants = watch.wants_grad(*[x for name, x in tensors.items() if name not in OF_TABLES])
    tables_want = watch.wants_grad(*[x for name, x in tensors.items() if name in OF_TABLES])
    plain = not tables_want and watch.plain(tensors)
    options, full = (asked, tensors) if isinstance(asked, Options) else resolved(op, tensors, asked)
    if not op.fits(full, options):
        return call(*op.instead(tensors, asked))
    sharded = not plain and watch.sharded(full.values())
    if not isinstance(asked, Options):
        shards = op.name == "heads" and not has(f"quantize {TRANSFORM} cache out Ulysses", full, options)
        if sharded and (tables_want or not shards):
            text = "it takes no DTensors" + " beside a table that requires a gradient" * shards
            text += "; pass x.to_local(), and make results with DTensor.from_local"
            raise InvalidInput(f"{op.function}: {text}")
        checks.check_watched(op, full, options)
        op.check(full, options)
        checks.check_memory(op, full, options)
        if options.check:
            first = next(iter(full.values()))
            if is_compiling() or watch.transformed() or watch.capturing(first):
                text = "check=True waits for the device, which torch.compile, torch.func and a CUDA graph do not"
                raise InvalidInput(f"{op.function}: {text}; leave it out")
            if not (first.is_meta or hasattr(first, "fake_mode")):  # they have no values
                check_values(op.function, op.shaped(full, options), options)
            plain, options = False, options._replace(check=False)
    if wants and plain:  # views may be written, which an autograd function with several results forbids
        viewed = op.viewed(full, options) and not watch.on_gpu(next(iter(full.values())))
        plain = op.differentiable(full, options) and not viewed
    heads = [full[name] for name in op.produced(full, options)] if options.inplace else []
    apart = any(watch.is_view(x) or not x.requires_grad for x in heads)  # autograd must record each by itself
    if plain and not (wants and apart):
        prepared = launch.Prepared(op, options, tensors, full)
        function = launch.function_of(prepared, tensors, key, record if wants else None)  # checked as one that records
        out = function(*tensors.values())
        launch.local.made = (function, tensors, out) if type(asked) is dict else None
        return out  # type: ignore[no-any-return]
    if options.inplace and (watch.tracing() or (wants and is_compiling())):  # Inductor turns the copy into a write
        return op.put(full, _through_op(op, full, options._replace(inplace=False), sharded), options)
    if wants and options.inplace:
        return _write(op, full, options, apart)
    return _through_op(op, full, options, sharded)


def _through_op(op: Operation, tensors: Tensors, options: Options, sharded: bool) -> Tensors:
    """Return the results of a call from torch's op, which each rank calls on its own shards."""
    if sharded:
        from . import dtensor

        return dtensor.run(call, op, tensors, options)
    return run_op(op, tensors, options)


# ---- under autograd, in a fraction of the host time of torch.library's recording -------------------


class _Made(torch.autograd.Function):
    """A call that was made: it returned fresh tensors, or wrote its own."""

    @staticmethod
    def forward(ctx: Any, made: Any, *inputs: Tensor) -> Any:
        ctx.recorded, ctx.to_save, outputs = made  # as `save_for_backward` does
        ctx.materialize_grads = False
        if outputs[0] is inputs[0]:
            ctx.mark_dirty(*outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return None, *gradients(ctx, grads)


record = watch.apply_of(_Made)


def _write(op: Operation, tensors: Tensors, options: Options, apart: bool) -> Tensors:
    """Return the results of a call in place. apart: each is recorded by itself."""
    with torch.no_grad():
        call(op, tensors, options)
    found = {name: tensors[name] for name in op.produced(tensors, options)}
    others = {name: x for name, x in op.saved(tensors, options).items() if name not in found}
    for names in [[name] for name in found] if apart else [[*found]]:
        own = {**{name: found[name] for name in names}, **others}
        if watch.wants_grad(*own.values()):
            made, saved = recorded(op, own, names, options)
            found.update(zip(names, record((made, saved, tuple([found[name] for name in names])), *own.values())))
    return found


def recorded(op: Operation, tensors: Tensors, results: Sequence[str], options: Options) -> Any:
    """(the `Recorded` of a call, the tensors that it saves)."""
    learned = tuple([name for name in checks.LEARNED if name in tensors and tensors[name].requires_grad])
    saved, like = tensors if learned else op.saved(tensors, options), {}
    if watch.sharded(tensors.values()):
        from . import dtensor

        like = dtensor.gradients_like({name: x for name, x in tensors.items() if name not in OF_TABLES})
    made = launch.Recorded(op, options, tuple(saved), tuple(tensors), tuple(results), {}, learned, like)
    return made, tuple(saved.values())


def gradients(ctx: Any, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients of the inputs of a call, None for those without."""
    op, options, saved, inputs, results, stand_ins, learned, like = ctx.recorded
    given = {name: grad for name, grad in zip(results, grads) if grad is not None}
    if not given:
        return [None] * len(inputs)
    if like:  # torch places gradients in its own way, and cannot place a missing one
        given = {name: like[name](given.get(name)) for name in results if name in like}
    tensors = {**canonical(dict(zip(saved, ctx.saved_tensors))), **stand_ins}  # a checkpoint allows one access
    found = op.gradient(call, op.saved(tensors, options) if learned else tensors, dict(given), options)
    if learned:
        found.update(_of_tables(op, tensors, learned, given, options))
    return [found.get(name) for name in inputs]


def _of_tables(op: Operation, t: Tensors, names: Sequence[str], grads: Tensors, o: Options) -> dict[str, Tensor | None]:
    """The gradients of the tables `names`, by torch's autograd through plain torch. grads: of the results."""
    again = torch.is_grad_enabled()  # the gradient of this gradient is wanted too
    if o.rounding != "complex128":
        o = o._replace(rounding="fp32")  # roundings do not change gradients
    with torch.enable_grad(), watch.without_autocast(t[names[0]]):  # the words alone say what is rounded
        # Views: there is no way from a result to a table through q or through another table.
        inputs = {name: x.view_as(x) if again else x.detach() for name, x in t.items()}
        for name in names:  # a sum in the dtype of the table would be rounded for q, and for k again
            exact = inputs[name] if inputs[name].dtype == torch.float64 else inputs[name].float()
            inputs[name] = exact if again else exact.requires_grad_()
        results = op.on_cpu(inputs, o)
        given = [name for name in grads if results[name].requires_grad]  # k has no scale
        outputs, sent = [results[name] for name in given], [grads[name] for name in given]
        found = torch.autograd.grad(outputs, [inputs[x] for x in names], sent, create_graph=again, allow_unused=True)
    return {name: None if grad is None else grad.to(t[name].dtype) for name, grad in zip(names, found)}
