"""Prepared calls, and the known calls of each thread.

A kind of call is planned once. The result is a kernel, a grid and an argument block. Each later call of that kind is a
function (`replay`) that writes its addresses into the block, and launches.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import torch_state as watch
from ..base.config import log
from ..base.memory import Span, refuse_meeting, span
from ..base.views import HEADS, Tensors, bias_views, table_pair
from ..checks.checks import label_of
from ..checks.words import canonical
from ..plan.options import Options
from ..sources.operation import Operation, missing_weights
from ..sources.source import OF_TABLES
from ..stages.convert import Scaled
from ..values.constants import CONSTANTS
from .replay import SCRATCH, UNUSED, Form, compiled, text

MAX_APART = 1024  # the most addresses of a call's tensors that are kept as known not to share memory

MAX_RECENT = 512
MAX_RECENT_KINDS, MAX_KINDS = 8, 64
"""The most sets of words that a thread remembers, with those of torch's ops, and the kinds of tensors for each: as a
user spelled them, and checked. The oldest are dropped: one takes 640 us when it comes back, on a CPU, a kept one 48."""

Asked = Any  # a user's words as given (a dict), or `Options` that were checked


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


class Local(threading.local):
    """The known calls of a thread. Only one thread fills an argument block."""

    def __init__(self) -> None:
        self.recent: dict[Any, list[Any]] = {}  # functions
        self.made: Any = None  # the last call by a user's words: its function, tensors and results

    def keep(self, key: Any, *functions: Any, most: int = MAX_KINDS) -> None:
        """Keep the function of a call for the fast path. An empty list under a key: its calls are not kept."""
        with contextlib.suppress(TypeError):  # a word without a hash
            if len(self.recent) >= MAX_RECENT and key not in self.recent:
                del self.recent[next(iter(self.recent))]
            self.recent[key] = [*functions, *self.recent.get(key, ())][:most]


local = Local()


class Prepared:
    """A kind of call that was planned, and its kernel.

    given: the tensors of a call. tensors: the same by the kernel's names, followed by stand-ins for missing ones.
    """

    device, blocks = -1, 0  # the GPU's index; the blocks of the launch
    left: tuple[str, ...] = ()  # letters that are copied after the launch
    pointers: tuple[str, ...] = ()  # the argument block's addresses as expressions; (): nothing is launched
    enqueue: Any = None
    mapped: tuple[str, ...] = ()  # tensors that the copy engine reads, whose maps `fill_maps` fills
    fill_maps: Any = None
    pack: Any = None
    args: Any = None

    def __init__(self, op: Operation, options: Options, given: Tensors, tensors: Tensors) -> None:
        self.op, self.options, self.home = op, options, local  # which `configure` may replace while this is planned
        self.names, self.stand_ins = tuple(given), dict([*tensors.items()][len(given) :])
        self.written = op.written(given, options)
        self.alignments = tuple([x.data_ptr() & 15 for x in given.values()])
        self.results = op.produced(given, options)
        saved, heads = op.saved(given, options), [name for name in given if name not in OF_TABLES]
        self.recorded = Recorded(op, options, tuple(saved), tuple(heads), self.results, self.stand_ins, (), {})
        has_kernel = watch.on_gpu(next(iter(given.values()))) and op.fits(tensors, options)
        self.in_torch, self.renamed = not has_kernel, [*tensors] != [*given]
        weights = {} if self.in_torch else missing_weights(op, tensors, options)
        self.kept = {**self.stand_ins, **weights}  # tensors that are the same in every call
        self.fixed = [x.data_ptr() for x in self.kept.values()]
        apart = self.written and len(given) > 1
        self.close: dict[str, Span] = dict(zip(given, map(span, tensors.values()))) if apart else {}
        self.apart: set[tuple[int, ...]] = set()  # addresses at which those in `close` share no memory
        full, sized = {**tensors, **weights}, op.makes_empty(self.names, options)
        named = full if self.in_torch and not sized else with_outputs(op, full, options)
        self.makes = len(named) > len(full) and not options.inplace  # fresh results
        made = [named[f"{name}_out"] for name in self.results] if self.makes and sized else []
        pairs = [(x, torch.empty_like(given[name])) for name, x in zip(self.results, made) if name in given]
        self.like = len(pairs) == len(made) and all(watch.guard([x])(y) for x, y in pairs)  # it takes a fifth less time
        self.empty = [partial(torch.empty_strided, x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in made]
        if not self.in_torch:
            self._plan(full, named)

    def _plan(self, tensors: Tensors, named: Tensors) -> None:
        """Plan the launch, and get its kernel. named: the tensors, followed by the outputs."""
        from ..jit.kernels import get_kernel  # which the first launch imports, and no call on a CPU
        from ..plan.arguments import address_names
        from ..plan.problem import plan_call

        op, options = self.op, self.options
        full = op.named(named, options)
        inputs, results = op.head_views(full, options)
        device = next(iter(tensors.values())).device
        self.left = op.left(full, options)
        gpu = torch.cuda.get_device_properties(device)
        planned = plan_call(inputs, results, full, options, gpu.multi_processor_count, watch.memory_speed(gpu))
        if planned is None:
            return
        plan, words = planned
        log.debug("%s: a grid of %s blocks", plan.spec.name, plan.grid)
        with torch.cuda.device(device.index):
            spec = plan.spec.of(op.text([x for x in tensors if x not in self.kept], options))
            kernel = get_kernel(spec, device.index)
            kernel.bind_thread()
        self.device, self.blocks = device.index, math.prod(plan.grid)
        pointers = address_names(plan.spec.stages)
        self.args = (ctypes.c_int64 * (len(pointers) + len(words)))(*[0] * len(pointers), *words)
        maps = op.maps(tensors, plan.spec)
        of_maps, self.fill_maps = kernel.tensor_maps([*maps.values()]) if maps else (0, None)
        self.mapped = tuple(maps)
        blocks = [ctypes.addressof(self.args), *[of_maps] * bool(maps)]
        self.enqueue = kernel.enqueuer(plan.grid, plan.spec.threads, *blocks)
        fresh = [] if options.inplace else [*named][len(tensors) :]
        own = dict(zip(named, self.names))  # a single table is cos in the kernel, and has its word as name in a call
        at = {name: f"{own[name]}_at" for name in own} | {name: f"{name}_at" for name in fresh}
        at |= {name: f"fixed[{n}]" for n, name in enumerate(self.kept)}
        offsets = _offsets(op, full, options)
        for pointer in pointers:
            name, offset = offsets.get(pointer, (pointer, 0))
            where = at.get(name, at.get(name + "_out", "0") if name in SCRATCH else "0")
            self.pointers += (f"{where} + {offset}" if offset else where,)
        self.pack = struct.Struct("".join("8x" if at == "0" else "n" for at in self.pointers)).pack_into  # "q" is slow

    def on_cpu(self, tensors: Tensors, made: Tensors | None = None) -> Tensors:
        """The results in plain torch. made: tensors for them."""
        if self.renamed:
            tensors = {**canonical(tensors), **self.stand_ins}
        with torch.autocast("cpu", enabled=False):  # as on a GPU, the words say what is rounded
            if made is None:
                return self.op.on_cpu(tensors, self.options)
            self.op.compute(made, tensors, self.options)
            return made

    def elsewhere(self) -> None:
        """Enqueue on the current stream of the kernel's device, which is not torch's current device."""
        with torch.cuda.device(self.device):
            self.enqueue(watch.get_stream(self.device))

    def keep_apart(self, addresses: tuple[int, ...]) -> None:
        """Refuse memory that a call would write as one of its tensors and read or write as another, of `close`."""
        spans = {name: x._replace(at=at) for (name, x), at in zip(self.close.items(), addresses)}
        ordered = sorted(spans.values())
        ends = itertools.accumulate([x.at + x.extent for x in ordered], max)
        if any(x.at < end for x, end in zip(ordered[1:], ends)):
            labels = {name: label_of(self.op, name, self.close, self.options) for name in self.close}
            refuse_meeting(self.op.function, spans, self.written, labels)
        if len(self.apart) >= MAX_APART:
            self.apart.clear()
        self.apart.add(addresses)


Record = Callable[..., tuple[Tensor, ...]]
"""Records a call that was enqueued: ((what its backward needs, the tensors that this saves, results), *heads)."""


def with_outputs(op: Operation, tensors: Tensors, options: Options) -> Tensors:
    """A call's tensors, followed by its outputs: an output "q" is called "q_out"."""
    return {**tensors, **{name + "_out": x for name, x in op.outputs(tensors, options).items()}}


def _offsets(op: Operation, named: Tensors, options: Options) -> dict[str, tuple[str, int]]:
    """(tensor's name, bytes from its first element) for the pointers into other tensors."""
    found, ways = {}, op.ways(named, options)
    places = [way[n] for n in (0, 1) for way in ways]
    for pointer, place in zip(HEADS, places):  # no head of a missing k or v is read
        name, head = place or (places[0][0], None)  # type: ignore[index]
        found[pointer] = (name, 0 if head is None else head.data_ptr() - named[name].data_ptr())
    if "bias" in named:
        for letter, part in zip("qkv", bias_views(named["bias"], named["qkv"], options)):
            found[f"{letter}_added"] = ("bias", part.data_ptr() - named["bias"].data_ptr())
    for cos, sin in (("cos", "sin"), ("second_cos", "second_sin")):
        if cos in named and sin not in named:
            found[sin] = (cos, table_pair(named[cos], None, options.table)[1].data_ptr() - named[cos].data_ptr())
    return found


# ---- the replay ----------------------------------------------------------------------------------


def function_from(prepared: Prepared, form: Form, tools: Sequence[Any], own: Any = None) -> Any:
    """The function of a call. tools: what tests its tensors, and what records it; own: for `Form.own`."""
    make = compiled(text(prepared, form), f"<known call of {', '.join(prepared.names)}>")
    function: Any = make(prepared, *tools, own)
    function.origin = prepared, form, tools
    return function


def function_of(
    prepared: Prepared, tensors: Tensors, key: Any, record: Record | None = None, returns: str = "", plain: bool = True
) -> Any:
    """The function of a call, which takes its tensors, and is kept for the fast path if it is plain.

    record: records a call whose tensors require gradients.
    """
    wants, xs = {name for name, x in tensors.items() if x.requires_grad}, [*tensors.values()]
    recorded = bool(wants) and record is not None and wants <= {*prepared.recorded.inputs}
    form = Form(prepared.names, returns, recorded=recorded)  # a table has no gradient here
    if not plain or (prepared.kept and watch.capturing(xs[0])):  # what is kept then belongs to the capture's graph
        return function_from(prepared, form, (None, record))
    pairs = twice(form.given, xs)
    form = form._replace(twice=pairs, guarded=True, unrecorded=bool(wants) and not recorded)
    matches = watch.guard([x for name, x in tensors.items() if name not in dict(pairs)])
    function = function_from(prepared, form, (matches, record))
    prepared.home.keep(key, function)
    return function


def twice(names: Sequence[str], tensors: Sequence[Tensor]) -> tuple[tuple[str, str], ...]:
    """Pairs of names (later, earlier) of tensors that are given twice."""
    first: dict[int, str] = {}
    return tuple([(name, first[id(x)]) for name, x in zip(names, tensors) if first.setdefault(id(x), name) != name])


def keep_spelled(key: Any, xs: Sequence[Tensor], out: Any, function: Any, tensors: Tensors, found: Tensors) -> None:
    """Keep a call as its user spelled it, unless it computed more than its results.

    xs: the user's tensors, in order. out: what the user got, of the results `found` by name.
    """
    prepared, form, tools = function.origin
    if not form.guarded:
        return
    home: Local = prepared.home
    names = [f"{UNUSED}{n}" for n in range(len(xs))]
    own: dict[str, Any] = {}
    for name, y in tensors.items():
        places = [n for n, x in enumerate(xs) if x is y or _split(x, y)]
        if len(places) > max(1, sum(x is y for x in tensors.values())):
            return  # another call may have another tensor at a place that is not read
        at = next((n for n in places if names[n].startswith(UNUSED)), None)
        if at is not None and xs[at] is y:
            names[at] = name
        elif at is not None:
            names[at], own[name] = f"{name}_whole", _split(xs[at], y)
        elif name not in dict(form.twice):
            if id(y) not in CONSTANTS:
                return home.keep(key)
            own[name] = y
    said = {id(None): "None", **{id(x): name for x, name in zip(xs, names)}}
    said.update({id(x): f"{{{name}}}" for name, x in found.items() if id(x) not in said})

    def spelled(x: Any) -> str:
        return f"Scaled({spelled(x.values)}, {spelled(x.scale)})" if isinstance(x, Scaled) else said[id(x)]

    try:
        returns = spelled(out) if isinstance(out, Tensor) else f"({', '.join(map(spelled, out))})"
    except KeyError:  # the user got a view, or what another launch computed
        return home.keep(key)
    form = form._replace(given=tuple(names), own=tuple(own), returns=returns)
    home.keep(key, function_from(prepared, form, tools, own), most=MAX_RECENT_KINDS)


def _split(x: Tensor, y: Tensor) -> tuple[int, Sequence[int]] | None:
    """The axis, the first or the last, and its parts, if y is x with this axis in two."""
    if x.is_nested or x.dtype != y.dtype or not watch.is_view(y) or x.data_ptr() != y.data_ptr():
        return None
    ways = ((-1, y.shape[-2:], y.shape[:-2] == x.shape[:-1]), (0, y.shape[:2], y.shape[2:] == x.shape[1:]))
    return next(((axis, sizes) for axis, sizes, fits in ways if fits), None)
