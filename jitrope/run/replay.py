"""The Python source of a known call, which checks its guard, fills the argument block and launches.

This is the hot path: every line runs once for each layer of a decode step. A loop over the tensors would double the
time, so the source has none. Equal sources are compiled once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from .. import torch_state as watch
from ..stages.convert import Scaled

UNUSED = "unused_"
"""What begins the names of a user's tensors that a call does not read."""
SCRATCH = ("weight_grads", "block_sums", "counters")
"""Outputs of a gradient that are not its results: the gradients of weights are parts of the first."""

_OF_PREPARED = (
    "alignments, apart, args, blocks, device, elsewhere, empty, enqueue, fill_maps, fixed, keep_apart, left, on_cpu, "
    "op.finish, op.fresh, options, pack, recorded"
)
"""The attributes of `launch.Prepared` that the source names."""


class Form(NamedTuple):
    """How a call is given, checked and returned. A `launch.Prepared` says the rest of its source."""

    given: tuple[str, ...]  # names of the tensors that it takes
    returns: str = ""  # what it returns, with results in braces; "": the results by name
    own: tuple[str, ...] = ()  # tensors that it keeps, or takes whole and splits on an axis
    twice: tuple[tuple[str, str], ...] = ()  # pairs of names (later, earlier) of one tensor
    guarded: bool = False  # it returns None for another kind of call
    recorded: bool = False  # for backward, if gradients are enabled
    unrecorded: bool = False  # it returns None if gradients are enabled


def _checks(prepared: Any, form: Form) -> list[str]:
    """The lines that return None for a call of another kind, and read the addresses."""
    names, lines = prepared.names, []
    if form.unrecorded:
        lines.append("if grad_enabled(): return None")
    if form.guarded:
        # A nested tensor makes a guard abort the process. A guard refuses a tensor that is given twice.
        once = [name for name in names if name not in dict(form.twice)]
        nested = [f"{name}.is_nested" for name in form.given if not name.startswith(UNUSED)]
        lines.append(f"try:\n            if {' or '.join(nested)}: return None")
        for name in form.own:
            split = f"{name}_whole" in form.given
            lines.append(f"    {name} = {f'unflatten({name}_whole, *own[{name!r}])' if split else f'own[{name!r}]'}")
        for name, earlier in form.twice:
            given = name in (*form.given, *form.own)
            lines.append(f"    if {name} is not {earlier}: return None" if given else f"    {name} = {earlier}")
        lines.append(f"    if not matches({', '.join(once)}): return None")
        lines.append("except (AttributeError, RuntimeError, TypeError): return None")  # the check refuses them
    if form.recorded and prepared.options.inplace:  # autograd may refuse to write these
        apart = " or ".join([f"{name}.is_leaf or {name}._is_view()" for name in prepared.results])
        lines.append(f"if grad_enabled() and ({apart}): return None")
    bits = [f"{name}_at" for name in names]
    lines += [f"{name}_at = {name}.data_ptr()" for name in names]
    new = "    " if prepared.close else ""
    if prepared.close:
        lines.append(f"if {_tuple(bits)} not in apart:")
    if form.guarded:  # a guard does not check addresses
        one = not any(prepared.alignments)
        other = f"({' | '.join(bits)}) & 15" if one else f"({' & 15, '.join(bits)} & 15,) != alignments"
        lines.append(f"{new}if {other}: return None")
    if prepared.close:
        lines.append(f"    keep_apart({_tuple(bits)})")
    return lines


def text(prepared: Any, form: Form) -> str:
    """The source of `make`, which makes the function of a call. prepared: a `launch.Prepared`."""
    results, recorded, lines = prepared.results, prepared.recorded, []
    no_grad = "with no_grad(): " if form.recorded else ""
    at = {name: name if prepared.options.inplace else f"{name}_out" for name in results}
    made = f"{{{', '.join([f'{name!r}: {x}' for name, x in at.items()])}}}"
    if prepared.empty:
        makers = [f"empty_like({name})" if prepared.like else f"empty[{n}]()" for n, name in enumerate(results)]
        lines += [f"{at[name]} = {make}" for name, make in zip(results, makers)]
    if prepared.in_torch:
        lines.append(f"{no_grad}out = on_cpu(tensors{f', {made}' if prepared.empty else ''})")
        made = "out"
    elif prepared.makes and not prepared.empty:
        lines.append("out = fresh(tensors, options, blocks)")
        made = "out"
    if prepared.pointers:
        used = {pointer.partition(" ")[0] for pointer in prepared.pointers}
        for name in [name for name in (*results, *SCRATCH) if f"{name}_out_at" in used]:
            lines.append(f"{name}_out_at = {f'out[{name!r}]' if made == 'out' else at[name]}.data_ptr()")
        lines.append(f"pack(args, 0, {', '.join([pointer for pointer in prepared.pointers if pointer != '0'])})")
        if prepared.mapped:
            lines.append(f"fill_maps({', '.join([f'{name}_at' for name in prepared.mapped])})")
        lines.append("if device == get_device(): enqueue(get_stream(device))")
        lines.append("else: elsewhere()")
    if prepared.written:
        lines.append(f"written({_tuple(prepared.written)})")
    if prepared.left:
        lines.append(f"{no_grad}out = finish(left, {made}, tensors, options)")
        made = "out"
    at = {name: f"out[{name!r}]" if made == "out" else x for name, x in at.items()}
    if form.recorded:
        outputs = _tuple([*at.values()])
        arguments = f"(recorded, {_tuple(recorded.saved)}, {outputs}), {', '.join(recorded.inputs)}"
        lines.append(f"if grad_enabled(): {outputs} = record({arguments})")
    lines.append(f"return {form.returns.format(**at) or made}")
    if any("tensors" in line for line in lines):
        lines.insert(0, f"tensors = {{{', '.join([f'{name!r}: {name}' for name in prepared.names])}}}")
    body = "\n        ".join(_checks(prepared, form) + lines)
    return (
        f"def make(prepared, matches, record, own):\n"
        f"    {_OF_PREPARED.replace('op.', '')} = attributes(prepared)\n"
        f"    def call({', '.join(form.given)}):\n        {body}\n    return call\n"
    )


def _tuple(items: Sequence[str]) -> str:
    return f"({', '.join(items)}{',' * (len(items) == 1)})"


@lru_cache(maxsize=1024)
def compiled(source: str, name: str) -> Callable[..., Callable[..., Any]]:
    """The function `make` of a source. name: for profilers, in place of a file's."""
    scope: dict[str, Any] = {
        "attributes": attrgetter(*_OF_PREPARED.split(", ")),
        "empty_like": torch.empty_like,
        "unflatten": torch.unflatten,
        **{name: getattr(watch, name) for name in ("get_device", "get_stream", "written", "grad_enabled")},
        "no_grad": torch.no_grad,
        "Scaled": Scaled,
    }
    exec(compile(source, name, "exec"), scope)
    found: Callable[..., Callable[..., Any]] = scope["make"]
    return found
