"""A call as the arguments of torch's ops, and these arguments as a call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor

from .. import torch_state as watch
from ..base.errors import InvalidInput
from ..base.views import Tensors, table_pair
from ..call import FRESH, Call
from ..plan.options import Options
from ..sources.operation import Operation, operation_of
from ..stages.positions import COUNTS


@lru_cache(maxsize=1024)
def read(text: str) -> tuple[Operation, tuple[str, ...], tuple[str, ...], Options]:
    """What a text says: operation, names of tensors, those of them that are written (the last), options."""
    name, tensors, options = Call.parse(text)
    op = operation_of(name, tensors, options)
    written = op.written(tensors, options)
    return op, (*[name for name in tensors if name not in written], *written), written, options


_spelled = lru_cache(maxsize=1024)(lambda name, tensors, options: str(Call.of(name, tensors, options)))


def filled(op: Operation, tensors: Tensors, options: Options) -> Tensors:
    """A call's tensors, with fresh results among them if it writes others."""
    made = op.made(tensors, options)
    if options.inplace or not made or not op.written(tensors, options):
        return tensors
    fresh = op.fresh(tensors, options, 0)
    return {**tensors, **{FRESH + name: fresh[name] for name in made}}


def arguments(op: Operation, tensors: Tensors, options: Options) -> tuple[Any, ...]:
    """The arguments of a call's op: (tensors, text, sizes), or (tensors, written, text, sizes).

    Complex tables are passed as real views, because Inductor has no complex numbers.
    """
    tensors = dict(tensors)
    if options.table == "freqs_cis":
        for cos, sin in (("cos", "sin"), ("second_cos", "second_sin")):
            if cos in tensors:
                tensors[cos], tensors[sin] = table_pair(tensors[cos], tensors.get(sin), "freqs_cis")
        options = options._replace(table="cos_sin")
    text = _spelled(op.name, tuple(tensors), options._replace(**dict.fromkeys(COUNTS, 0)))
    _, names, written, _ = read(text)
    reads, sizes = [tensors[name] for name in names if name not in written], [getattr(options, word) for word in COUNTS]
    if not written:
        return reads, text, sizes
    return reads, [tensors[name] for name in written], text, sizes


def run_op(op: Operation, tensors: Tensors, options: Options) -> Tensors:
    """Return the results of an operation from its torch op."""
    # torch gives the op lazy zeros with other strides than were checked
    tensors = {name: x.clone() if watch.is_zero(x) else x for name, x in tensors.items()}
    made, full = op.made(tensors, options), filled(op, tensors, options)
    given = arguments(op, full, options)
    if len(given) == 3:
        results = dict(zip(made, watch.own_ops.prepare(*given)))
    else:
        if watch.tracing():
            text = "torch.jit.trace loses what a call writes to a cache or to out; export the model"
            raise InvalidInput(f"{op.function}: {text}")
        watch.own_ops.prepare_(*given)
        results = op.outputs(full, options)
    return op.complete(results, tensors, options)


def given_to(text: str, sizes: Sequence[Any], tensors: Sequence[Tensor], written: Sequence[Tensor] = ()) -> Any:
    """(operation, tensors by name, options) of an op's arguments."""
    (op, names, own, options), both = read(text), (*tensors, *written)
    if (len(both), len(written), len(sizes)) != (len(names), len(own), len(COUNTS)):
        what = f"{len(both)} tensors, {len(written)} of them written, and {len(sizes)} sizes"
        needs = f"{len(names)}, {len(own)} and {len(COUNTS)}"
        raise InvalidInput(f"call {text!r} is given {what}; it needs {needs}")
    return op, dict(zip(names, both)), options._replace(**dict(zip(COUNTS, sizes)))
