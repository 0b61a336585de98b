"""The torch ops of all calls, for torch.compile, checkpointing, vmap and fake tensors.

An op takes a call as a text (`jitrope.call`), its tensors in the order of the text, and its counts. A call that writes
tensors has them in a list of their own, behind which torch looks for what changes. Its op returns nothing, so fresh
results beside them are allocated first, and are written too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .. import torch_state as watch
from ..sources import fused, latent, projected, streams  # noqa: F401  each source registers its operations
from . import launch, planning
from .dispatch import gradients, recorded
from .op_call import given_to

lib = torch.library.Library(watch.own_ops.name, "DEF")
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
lib.define("prepare(Tensor[] tensors, str call, SymInt[] sizes) -> Tensor[]", tags=TAGS)
lib.define("prepare_(Tensor[] tensors, Tensor(a!)[] written, str call, SymInt[] sizes) -> ()", tags=TAGS)


# ---- launches, and plain torch on a CPU -----------------------------------------------------------


def _launch_(tensors: Sequence[Tensor], written: Sequence[Tensor], text: str, sizes: Sequence[int]) -> None:
    _launch((*tensors, *written), text, sizes, len(written))


def _launch_or_record(keys: Any, tensors: Sequence[Tensor], text: str, sizes: Sequence[int]) -> Any:
    """A call that autograd may record. All others skip torch's Python layer of it, which takes longer than a launch."""
    return _launch(tensors, text, sizes, record=lambda: _recorded()(keys, tensors, text, sizes))


def _launch(
    given: Sequence[Tensor], text: str, sizes: Sequence[int], written: int = 0, record: Callable[[], Any] | None = None
) -> Any:
    """Launch a call. One like a recent one is not read again (`replay`).

    record: makes a call that autograd records, or that more than autograd watches. Without it the dispatcher is
        behind all that watches.
    """
    key = (text, len(given), written, *sizes)
    try:
        recent = () if record and watch.watched() else launch.local.recent[key]
    except (KeyError, TypeError):  # a symbolic number has no hash
        recent = ()
    for replay in recent:
        out = replay(*given)
        if out is not None:
            return out
    op, tensors, options = given_to(text, sizes, given[: len(given) - written], given[len(given) - written :])
    plain, wants = watch.plain(tensors), watch.wants_grad(*given)
    if record is not None and (wants or not plain):
        return record()
    prepared = launch.Prepared(op, options, tensors, tensors)
    returns = "" if written else f"[{', '.join(_outputs(op.made(tensors, options)))}]"
    return launch.function_of(prepared, tensors, key, None, returns, plain and not wants)(*given)


def _outputs(made: Sequence[str]) -> list[str]:
    """The outputs of an op, of its results. No output may share memory with another.

    The gradients of weights and biases share memory, parts of one tensor of sums.
    """
    parts = [name for name in made if name.endswith(("_weight", "_bias"))]
    return [f"{{{name}}}{'.clone()' * (name in parts[1:])}" for name in made]


# ---- without values --------------------------------------------------------------------------------


@torch.library.register_fake(f"{lib.ns}::prepare", lib=lib)
def _fake(tensors: Sequence[Tensor], text: str, sizes: Sequence[Any]) -> list[Tensor]:
    op, named, options = given_to(text, sizes, tensors)
    planning.note(op, named, options)
    results = op.fakes(named, options)
    return [results[name] for name in op.made(named, options)]


@torch.library.register_fake(f"{lib.ns}::prepare_", lib=lib)
def _fake_(tensors: Sequence[Tensor], written: Sequence[Tensor], text: str, sizes: Sequence[Any]) -> None:
    planning.note(*given_to(text, sizes, tensors, written))


# ---- the backward ----------------------------------------------------------------------------------


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Save what the backward of `prepare` needs."""
    given, text, sizes = inputs
    op, tensors, options = given_to(text, sizes, given)
    ctx.recorded, saved = recorded(op, tensors, op.made(tensors, options), options)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*saved)


def _backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    return gradients(ctx, grads), None, None


_recorded = cache(lambda: watch.autograd_of(watch.own_ops.prepare.default, _backward, _setup))


# ---- vmap ------------------------------------------------------------------------------------------


def _each(count: int, dims: Sequence[int | None], tensors: Sequence[Tensor], *words: Any) -> list[Tensor]:
    """The results of each call of a batch, stacked: torch has no batching rule for lists."""
    if not count:  # a call of zeros has the shapes of the results
        tensors = [x if n is None else x.new_zeros((*x.shape[:n], 1, *x.shape[n + 1 :])) for x, n in zip(tensors, dims)]
    calls = [[x if dim is None else x.select(dim, n) for x, dim in zip(tensors, dims)] for n in range(count or 1)]
    return [torch.stack(outputs)[:count] for outputs in zip(*[watch.own_ops.prepare(xs, *words) for xs in calls])]


def _vmap(info: Any, dims: Any, *given: Any) -> Any:
    found = _each(info.batch_size, dims[0], *given)
    return found, [0] * len(found)


def _batched(tensors: Sequence[Tensor], text: str, sizes: Sequence[Any]) -> list[Tensor]:
    """The same for a batch of cotangents (`is_grads_batched`), which torch hides in another kind of tensor."""
    dims = [0 if watch.is_batched(x) else None for x in tensors]
    level = next(watch.batch_level(x) for x, dim in zip(tensors, dims) if dim == 0)
    whole = [x if dim is None else watch.with_batch(x, level) for x, dim in zip(tensors, dims)]
    count = next(x.shape[0] for x, dim in zip(whole, dims) if dim == 0)
    return [watch.without_batch(x, level) for x in _each(count, dims, whole, text, sizes)]


for _key in ("CPU", "CUDA"):
    lib.impl("prepare", _launch, _key)
    lib.impl("prepare_", _launch_, _key)
    lib.impl("prepare", _launch_or_record, f"Autograd{_key}", with_keyset=True)
lib.impl("prepare", _batched, "Batched")
torch.library.register_vmap(f"{lib.ns}::prepare", _vmap, lib=lib)
torch.library.register_autograd(f"{lib.ns}::prepare", _backward, setup_context=_setup, lib=lib)
