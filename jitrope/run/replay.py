"""The Python source of a known call, which checks its guard, fills the argument block and launches.

This is the hot path: every line runs once for each layer of a decode step. A loop over the tensors would double the
time, so the source has none. It depends only on names, and is compiled once for each form of call. The data of one
kind of call are arguments of `make`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import torch_state as watch
from ..base.views import Tensors
from ..stages.convert import Scaled

UNUSED = "unused_"
"""What begins the names of a user's tensors that a call does not read."""
SCRATCH = ("weight_grads", "block_sums", "counters")
"""Outputs of a gradient that are not its results: the gradients of weights are parts of the first."""


class Form(NamedTuple):
    """All inputs of the source of a known call."""

    names: tuple[str, ...]  # of the tensors, in order
    pointers: tuple[str, ...]  # addresses as expressions, "0" for an absent one; () if nothing is launched
    results: tuple[str, ...]  # names
    inplace: bool  # the results are tensors of the call
    like: bool  # a result is like the tensor of the same name
    fresh: bool  # there are other outputs
    sized: bool  # they are empty tensors of known sizes
    finished: bool  # results are made from the outputs
    close: tuple[str, ...]  # tensors that must not share memory
    written: tuple[str, ...]  # tensors whose versions are incremented
    twice: tuple[tuple[str, str], ...] = ()  # pairs of names (later, earlier) of one tensor
    guarded: bool = False  # the call returns None for another kind of call
    aligned: bool = True  # all addresses are multiples of 16
    heads: tuple[str, ...] = ()  # tensors that `record` is given if gradients are enabled; (): it is not recorded
    saved: tuple[str, ...] = ()  # those that its backward needs
    unrecorded: bool = False  # it returns None if gradients are enabled
    given: tuple[str, ...] = ()  # names of what it takes; (): a dict of its tensors, and then each
    own: tuple[str, ...] = ()  # tensors that it does not take
    split: tuple[str, ...] = ()  # of these, those that are what it takes with the last axis in two
    returns: str = ""  # what it returns, with results in braces; "": the results by name
    in_torch: bool = False  # plain torch computes it


def _checks(form: Form) -> list[str]:
    """The lines that return None for a call of another kind, and read the addresses."""
    names, lines = form.names, []
    if form.unrecorded:
        lines.append("if grad_enabled(): return None")
    if form.guarded:
        # A nested tensor makes a guard abort the process. A guard refuses a tensor that is given twice.
        once = [name for name in names if name not in dict(form.twice)]
        taken = [name for name in form.given or once if not name.startswith(UNUSED)]
        lines.append(f"try:\n            if {' or '.join([f'{name}.is_nested' for name in taken])}: return None")
        for name in form.own:
            if name in form.split:
                lines.append(f"    if {name}_whole.shape != wholes[{name!r}]: return None")
            lines.append(
                f"    {name} = {f'{name}_whole.view(own[{name!r}])' if name in form.split else f'own[{name!r}]'}"
            )
        for name, earlier in form.twice:
            given = not form.given or name in (*form.given, *form.own)
            lines.append(f"    if {name} is not {earlier}: return None" if given else f"    {name} = {earlier}")
        lines.append(f"    if not matches({', '.join(once)}): return None")
        lines.append("except (AttributeError, RuntimeError, TypeError): return None")  # the check refuses them
    lines += [f"{name}_at = {name}.data_ptr()" for name in names]
    if form.guarded:  # a guard does not check addresses
        bits = [f"{name}_at" for name in names]
        other = f"({' | '.join(bits)}) & 15" if form.aligned else f"({' & 15, '.join(bits)} & 15,) != alignments"
        lines.append(f"if {other}: return None")
    return lines


def _named(results: Sequence[str]) -> str:
    return f"{{{', '.join(f'{name!r}: {name}_out' for name in results)}}}"


def _outputs(form: Form) -> tuple[list[str], str]:
    """The lines that make the outputs, or all results in plain torch, and those by name as an expression."""
    results, at = form.results, "" if form.in_torch else "\n        {0}_out_at = {0}_out.data_ptr()"
    made = "tensors" if form.inplace else _named(results) if form.fresh else "{}"
    lines = []
    if form.sized:
        makers = [f"empty_like({x})" if form.like and at else f"empty[{n}]()" for n, x in enumerate(results)]
        lines = [f"{name}_out = {make}{at.format(name)}" for name, make in zip(results, makers)]
    if form.in_torch:
        of_sizes = f", {made}" if form.sized else ""
        return [*lines, f"{'with no_grad(): ' if form.heads else ''}out = on_cpu(tensors{of_sizes})"], "out"
    if form.fresh and not (form.sized or form.inplace):
        outputs = [name for name in (*results, *SCRATCH) if any(name + "_out_at" in x for x in form.pointers)]
        lines = [
            "out = fresh(tensors, options, blocks)",
            *[f"{name}_out_at = out['{name}'].data_ptr()" for name in outputs],
        ]
        made = "out"
    return lines, made


def text(form: Form) -> str:
    """The source of `make`, a function that makes a known call of this form."""
    names, results, checks, lines = form.names, form.results, _checks(form), []
    if form.close:
        distances = [f"{name}_at - {form.close[0]}_at" for name in form.close[1:]]
        near = f"-reach < {distances[0]} < reach and " if len(distances) == 1 else ""
        tupled = f"({', '.join(distances)},)"
        lines.append(f"if {near}{tupled} not in apart: keep_apart({tupled})")
    outputs, made = _outputs(form)
    lines += outputs
    if form.pointers:
        lines.append(f"pack(args, 0, {', '.join([at for at in form.pointers if at != '0'])})")
        lines.append("if device == get_device(): enqueue(get_stream(device))")
        lines.append("else: elsewhere()")
    if form.written:
        lines.append(f"written(({', '.join(form.written)},))")
    if form.finished:
        lines.append(f"{'with no_grad(): ' if form.heads else ''}out = finish({made}, tensors, options)")
        made = "out"
    at = {name: f"out[{name!r}]" if made == "out" else name if form.inplace else f"{name}_out" for name in results}
    if form.heads:
        recorded = f"record((known, ({_listed(form.saved)}), ({_listed([*at.values()])})), {', '.join(form.heads)})"
        lines.append(f"if grad_enabled(): {_listed([*at.values()])} = {recorded}")
    lines.append(f"return {form.returns.format(results=made, **at) if form.returns else made}")
    if form.given and any("tensors" in line for line in lines):
        checks.append(f"tensors = {{{', '.join(f'{name!r}: {name}' for name in names)}}}")
    body = "\n        ".join(checks + lines)
    taken = "known, op, options, blocks, empty, pack, args, device, enqueue, fixed, reach, apart, alignments"
    return (
        f"def make({taken}, matches, record, outputs, wholes, own):\n    fresh, finish, keep_apart, elsewhere, on_cpu ="
        " op.fresh, op.finish, known.keep_apart, known.elsewhere, known.on_cpu\n"
        f"    def call({', '.join(form.given or ('tensors', *names))}):\n        {body}\n    return call\n"
    )


def _listed(items: Sequence[str]) -> str:
    return ", ".join(items) + "," * (len(items) == 1)


@lru_cache(maxsize=1024)
def maker(form: Form) -> Callable[..., Callable[..., Tensors | None]]:
    """The compiled function `make`."""
    scope: dict[str, Any] = {
        "empty_like": torch.empty_like,
        "get_device": watch.get_device,
        "get_stream": watch.get_stream,
        "written": watch.written,
        "grad_enabled": watch.grad_enabled,
        "no_grad": torch.no_grad,
        "Scaled": Scaled,
    }
    exec(compile(text(form), f"<known call of {', '.join(form.names)}>", "exec"), scope)
    found: Callable[..., Callable[..., Tensors | None]] = scope["make"]
    return found


def twice(names: Sequence[str], tensors: Sequence[Tensor]) -> tuple[tuple[str, str], ...]:
    """Pairs of names (later, earlier) of tensors that are given twice."""
    first: dict[int, str] = {}
    return tuple([(name, first[id(x)]) for name, x in zip(names, tensors) if first.setdefault(id(x), name) != name])
