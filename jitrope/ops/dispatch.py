"""Which way a call goes: past torch's dispatcher, through an autograd function, or to the library's op.

A call that nothing watches does not go through torch's dispatcher, which would cost as much host time as the launch;
one that is like one of the last ones is not even looked at again (`launch.again`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..base.errors import InvalidInput
from ..plan.spec import Options, changed
from ..plan.views import Tensors
from . import checks, launch, library, watch
from .launch import Asked, Known, again
from .operations import Operation
from .watch import dispatch_modes, grad_enabled, is_compiling


def call(op: Operation, tensors: Tensors, asked: Asked) -> Tensors:
    """The results of an operation by name. A user's words are checked; `Options` are known to be good."""
    if not is_compiling() and not dispatch_modes() and forward_ad._current_level < 0:
        found = again(op, tensors, asked)
        if found is not None:
            known, wants, xs, at = found
            if not wants or not grad_enabled():
                return known.run(tensors, xs, at)
            return _record(op, {**checks.canonical(tensors), **known.stand_ins}, known.options, known)
    return _call(op, tensors, asked)


def _call(op: Operation, tensors: Tensors, asked: Asked) -> Tensors:
    """The same of a call that is new, or watched."""
    if not isinstance(asked, Options):
        asked = {word: tuple(value) if type(value) is list else value for word, value in asked.items()}
    wants = watch.wants_grad(*[tensors.get(name) for name in op.names])
    tables_want = watch.wants_grad(*[x for name, x in tensors.items() if name not in op.names])
    plain = not is_compiling() and not tables_want and (op.differentiable or not wants) and watch.plain(tensors)
    known = launch.find(op, tensors, asked) if plain else None
    if known is not None:
        options, full = known.options, {**checks.canonical(tensors), **known.stand_ins}
    elif isinstance(asked, Options):
        options, full = asked, tensors
    else:
        options, full = checks.resolved(op, tensors, asked)
    if not isinstance(asked, Options):
        checks.check_watched(op, wants, full, options)
        if known is None:
            op.check(op.label(options), full, options)
            if checks.check_asked(op.label(options), asked):
                checks.check_positions(op.label(options), full, options)
                asked = {word: value for word, value in asked.items() if word != "check"}
                plain = False
        if not plain and watch.sharded(full.values()):
            full = _sharded(op, full, options)
    if wants and (plain or (options.inplace and not is_compiling())):
        if options.inplace and _alone(op, tensors):
            return _record_views(op, full, options)
        if plain and not options.inplace:
            known = known or launch.prepare(op, tensors, full, asked, options)
            launch.keep_in_mind(known, tensors, asked)
        return _record(op, full, options, known if plain and not options.inplace else None)
    if plain:
        known = known or launch.prepare(op, tensors, full, asked, options)
        launch.keep_in_mind(known, tensors, asked)
        return known.run(tensors, [*tensors.values()], [x.data_ptr() for x in tensors.values()])
    if options.inplace and wants:  # traced under autograd: a copy, which Inductor writes in place
        return op.put(full, library.run_op(op, full, changed(options, inplace=False)), options)
    return library.run_op(op, full, options)


def _sharded(op: Operation, tensors: Tensors, options: Options) -> Tensors:
    from . import sharding

    if op.name not in sharding.OUTPUTS:
        raise InvalidInput(
            f"{op.label(options)}: it takes no DTensors; pass x.to_local(), and make results with DTensor.from_local"
        )
    return sharding.prepared(op.label(options), tensors, options)


# ---- under autograd ------------------------------------------------------------------------------


class _Recorded(torch.autograd.Function):
    """A call under eager autograd: a fraction of the host time of the library's own recording."""

    @staticmethod
    def forward(
        ctx: Any, op: Operation, names: tuple[str, ...], options: Options, known: Known | None, *xs: Tensor
    ) -> Any:
        tensors = dict(zip(names, xs))
        if known is None:
            outputs = call(op, tensors, options)
        else:
            given = xs[: len(known.names)]
            outputs = known.run(tensors, given, [x.data_ptr() for x in given])
        library.keep(ctx, op, names, tensors, outputs, options)
        if options.inplace:
            ctx.mark_dirty(*outputs.values())
        return tuple(outputs.values())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return None, None, None, None, *library.gradients(ctx, grads)


class _RecordedView(torch.autograd.Function):
    """A tensor that was written in place: torch records a view of another tensor only by itself."""

    @staticmethod
    def forward(ctx: Any, op: Operation, names: tuple[str, ...], options: Options, *xs: Tensor) -> Tensor:
        tensors = dict(zip(names, xs))
        library.keep(ctx, op, names, tensors, {"q": xs[0]}, options)
        ctx.mark_dirty(xs[0])
        return xs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return None, None, None, *library.gradients(ctx, grads)


def _record(op: Operation, tensors: Tensors, options: Options, known: Known | None) -> Tensors:
    outputs = _Recorded.apply(op, tuple(tensors), options, known, *tensors.values())
    return dict(zip(op.produced(tensors, options), outputs))


def _alone(op: Operation, tensors: Tensors) -> bool:
    """Whether torch can only record each tensor that is written in place by itself."""
    heads = [tensors[name] for name in op.results if name in tensors]
    return any(x._is_view() or x.requires_grad != heads[0].requires_grad for x in heads) if len(heads) else False


def _record_views(op: Operation, tensors: Tensors, options: Options) -> Tensors:
    with torch.no_grad():
        outputs = call(op, tensors, options)
    tables = op.saved(tensors)
    for name, x in outputs.items():
        if x.requires_grad:
            kept = {"q": x, **tables}
            outputs[name] = _RecordedView.apply(op, tuple(kept), options, *kept.values())
    return outputs
