"""What a recorded call keeps, and its gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import torch_state as watch
from ..checks.checks import LEARNED
from ..checks.words import canonical
from ..plan.options import Options
from ..plan.views import Tensors
from ..sources.operation import OF_TABLES, Call, Operation


class Recorded(NamedTuple):
    """What the backward of a call needs, beside the tensors that are saved for it."""

    op: Operation
    options: Options
    saved: tuple[str, ...]  # names of those tensors
    inputs: tuple[str, ...]  # names of the tensors that autograd sees
    results: tuple[str, ...]  # names
    stand_ins: Tensors  # tensors that are the same in every call
    learned: tuple[str, ...]  # tables that require a gradient, for which q and k are saved too
    like: Mapping[str, Any]  # functions that place gradients of DTensors


def recorded(op: Operation, inputs: Sequence[str], tensors: Tensors, results: Sequence[str], options: Options) -> Any:
    """(the `Recorded` of a call, the tensors that it saves)."""
    learned = tuple([name for name in LEARNED if name in tensors and tensors[name].requires_grad])
    saved, like = tensors if learned else op.saved(tensors, options), {}
    if watch.sharded(tensors.values()):
        from .dtensor import gradient_like

        like = {name: gradient_like(x) for name, x in tensors.items() if name not in OF_TABLES and x.requires_grad}
    made = Recorded(op, options, tuple(saved), tuple(inputs), tuple(results), {}, learned, like)
    return made, tuple(saved.values())


def gradients(call: Call, ctx: Any, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients of the inputs of a call, None for those without. call: makes the calls of the backward."""
    op, options, saved, inputs, results, stand_ins, learned, like = ctx.recorded
    given = {name: grad for name, grad in zip(results, grads) if grad is not None}
    if not given:
        return [None] * len(inputs)
    if like:  # torch places gradients in its own way, and cannot place a missing one
        given = {name: like[name](given.get(name)) for name in results if name in like}
    tensors = {**canonical(dict(zip(saved, ctx.saved_tensors))), **stand_ins}  # a checkpoint allows one access
    needed = op.saved(tensors, options) if learned else tensors
    if learned and not torch.is_grad_enabled():  # a launch like a recent one, whose tables are not learned
        needed = {name: x.detach() if name in learned else x for name, x in needed.items()}
    found = op.gradient(call, needed, dict(given), options)
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
        wanted = [inputs[name] for name in names]
        found = torch.autograd.grad(outputs, wanted, sent, create_graph=again, allow_unused=True)
    return {name: None if grad is None else grad.to(t[name].dtype) for name, grad in zip(names, found)}
