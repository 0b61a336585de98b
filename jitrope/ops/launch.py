"""Prepared calls: what a thread knows of the kinds of calls that it has made, and the launch itself.

A kind of call is planned once. What is left of it is a kernel, a grid and a block of arguments, into which a later call
of that kind writes addresses.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import operator
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..base.config import log
from ..jit.kernels import get_kernel
from ..jit.registry import KINDS
from ..plan.problem import extent, plan_call, refuse_meeting
from ..plan.spec import ROPE_KINDS, Options, RopeSpec
from ..plan.views import Tensors, table_pair, tables_of
from . import watch
from .operations import Operation, weights_of_one
from .watch import get_device, get_stream, written

KINDS.update(dict.fromkeys(ROPE_KINDS, RopeSpec))

MAX_LAUNCHES = 4096
"""Prepared calls a thread keeps; past it they are forgotten, which costs a few microseconds each."""

MAX_APART = 1024
"""Distances between a call's tensors that are known to be of tensors that do not share memory."""

MAX_RECENT = 256
MAX_RECENT_KINDS = 8
"""Sets of words, and for each kinds of tensors, that a thread looks at before anything else."""

POINTERS = (
    "q", "k", "v", "q_out", "k_out", "v_out", "cos", "sin", "cu_seqlens", "start_positions", "position_ids",
    "slot_mapping", "q_scale", "k_scale", "v_scale",
)  # fmt: skip
NORM_POINTERS = (
    "q1", "k1", "v1", "q2", "k2", "v2", "q_weight", "k_weight", "q_weight2", "k_weight2", "sums", "dq", "dk", "cos2",
    "sin2",
)  # fmt: skip
"""The addresses of an argument block; those of a norm are in front."""

Asked = Any
"""A user's words as they were given (a dict), or `Options` that are checked."""


class _Local(threading.local):
    """What a thread keeps: an argument block is filled by one thread at a time."""

    def __init__(self) -> None:
        self.known: dict[Any, Known] = {}
        self.recent: dict[Any, list[tuple[Callable[..., bool], Known, bool]]] = {}


local = _Local()


class Known:
    """A kind of call that is prepared.

    A call has the addresses of its tensors, then those of its fresh outputs, then those that never change; `order`
    puts them in the order of the argument block.
    """

    device: int  # the GPU's index
    reach: int  # bytes, past which no two tensors of a call can meet
    stand_ins: Tensors  # for what was not given, by name
    statics: list[int]  # addresses
    kept: tuple[Tensor, ...]  # these are
    offsets: list[tuple[int, int]]  # an address and bytes behind it: what is inside of a tensor
    order: Callable[[list[int]], tuple[int, ...]]
    pack: Callable[..., None]
    args: ctypes.Array[ctypes.c_int64]

    def __init__(self, op: Operation, options: Options, given: Tensors) -> None:
        self.op, self.options = op, options
        self.names = tuple(given)
        self.blocks = 0
        self.written: tuple[int, ...] = tuple([self.names.index(n) for n in op.written(options) if n in given])
        self.alignments = [x.data_ptr() & 15 for x in given.values()]
        self.close: tuple[int, ...] = ()  # of those that may not meet
        self.apart: set[tuple[int, ...]] = set()  # distances between them at which they do not
        self.enqueue: Callable[[int], None] | None = None  # None: there is nothing to do

    def run(self, tensors: Tensors, xs: Sequence[Tensor], at: list[int]) -> Tensors:
        """Enqueue a call of this kind on torch's current stream: its tensors, and their addresses."""
        op, options = self.op, self.options
        if self.close:
            first = at[self.close[0]]
            distances = tuple([at[i] - first for i in self.close])
            if distances not in self.apart:
                self.keep_apart(tensors, distances)
        outputs = op.outputs(tensors, options, self.blocks)
        if self.enqueue is not None:
            if not options.inplace:
                at += [x.data_ptr() for x in outputs.values()]
            at += self.statics
            for index, offset in self.offsets:
                at.append(at[index] + offset)
            self.pack(self.args, 0, *self.order(at))
            device = self.device
            if device == get_device():
                self.enqueue(get_stream(device))
            else:
                with torch.cuda.device(device):
                    self.enqueue(get_stream(device))
        if self.written:
            written([xs[i] for i in self.written])
        return op.finish(outputs, tensors, options)

    def keep_apart(self, tensors: Tensors, distances: tuple[int, ...]) -> None:
        """Refuse memory that a call would write and also read or write as another of its tensors."""
        if any(b - a < self.reach for a, b in itertools.pairwise(sorted(distances))):
            heads = {self.names[i]: tensors[self.names[i]] for i in self.close}
            refuse_meeting(self.op.label(self.options), heads, [n for n in self.op.written(self.options) if n in heads])
        if len(self.apart) >= MAX_APART:
            self.apart.clear()
        self.apart.add(distances)


def words_of(op: Operation, tensors: Tensors, asked: Asked) -> tuple[Any, ...]:
    """What is known of a call without a look at its tensors."""
    return (op.name, *tensors, *asked.items()) if type(asked) is dict else (op.name, *tensors, asked)


def find(op: Operation, tensors: Tensors, asked: Asked) -> Known | None:
    """What this thread has prepared for a kind of call, if it has."""
    try:
        return local.known.get((words_of(op, tensors, asked), *map(_kind, tensors.values())))
    except (RuntimeError, TypeError):  # a sparse or a nested tensor, or a word without a hash, which the check refuses
        return None


def _kind(x: Tensor) -> Any:
    """All that checks, plans and argument blocks look at."""
    return x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() & 15


def prepare(op: Operation, given: Tensors, tensors: Tensors, asked: Asked, options: Options) -> Known:
    """Plan a kind of call, get its kernel, and keep both.

    tensors: those given, by the names of `Options`, and behind them those that stand for what was not given.
    """
    known = Known(op, options, given)
    known.stand_ins = dict([*tensors.items()][len(given) :])
    statics = {**known.stand_ins, **(weights_of_one(tensors, options) if op.norm else {})}
    _plan(known, {**tensors, **statics}, statics)
    if statics and watch.capturing(next(iter(given.values()))):
        return known  # what is made during a capture belongs to its graph
    if len(local.known) >= MAX_LAUNCHES:
        local.known.clear()
    with contextlib.suppress(TypeError):  # a word without a hash
        local.known[(words_of(op, given, asked), *map(_kind, given.values()))] = known
    return known


def _plan(known: Known, tensors: Tensors, statics: Tensors) -> None:
    op, options = known.op, known.options
    outputs = {name + "_out": x for name, x in op.outputs(tensors, options).items()}
    named = {**tensors, **outputs}
    inputs, results = op.heads(named, options)
    device, places = next(iter(tensors.values())).device, op.places(options)
    sources = [(name, x) for name, x in zip(places, (*inputs, *results)) if x is not None]
    known.reach = max(extent(x) for _, x in sources)
    close = tuple(dict.fromkeys([name for name, _ in sources if name in known.names]))
    if len(close) > 1 and any(name in close for name in op.written(options)):
        known.close = tuple([known.names.index(name) for name in close])
    sm_count = torch.cuda.get_device_properties(device).multi_processor_count
    normed, slots = op.normed(tensors, options), tensors.get("slot_mapping")
    planned = plan_call(inputs, results, tables_of(tensors), slots, options, sm_count, normed)
    if planned is None:
        return
    plan, words = planned
    log.debug("%s: %s", plan.spec.name, plan.reason)
    with torch.cuda.device(device.index):
        kernel = get_kernel(plan.spec, device.index)  # type: ignore[arg-type]
        kernel.bind_thread()
    known.device, known.blocks = device.index, plan.grid[0] * plan.grid[1]
    pointers = (*NORM_POINTERS, *POINTERS) if op.norm else POINTERS
    known.pack = struct.Struct(f"{len(pointers)}q").pack_into
    known.args = (ctypes.c_int64 * (len(pointers) + len(words)))(*[0] * len(pointers), *words)
    known.enqueue = kernel.enqueuer(plan.grid, plan.block, ctypes.addressof(known.args))
    _order(known, named, [] if options.inplace else [*outputs], statics, (*inputs, *results), pointers)


def _order(
    known: Known, named: Tensors, fresh: list[str], statics: Tensors, heads: Sequence[Tensor | None],
    pointers: Sequence[str],
) -> None:  # fmt: skip
    """Which address each pointer takes, and how many bytes behind it."""
    op, options = known.op, known.options
    found = {}  # of a pointer the tensor's name and the bytes from its first element
    for pointer, name, head in zip(POINTERS, op.places(options), heads):  # no head of a missing k or v is read
        found[pointer] = (op.reads[0], 0) if head is None else (name, head.data_ptr() - named[name].data_ptr())
    for n in ("", "2"):
        if "cos" + n in named and "sin" + n not in named:
            cos = named["cos" + n]
            found["sin" + n] = ("cos" + n, table_pair(cos, None, options.table)[1].data_ptr() - cos.data_ptr())
    places = [*named][: len(known.names)] + fresh + [*statics, ""]  # the last is for pointers to nothing
    known.kept = tuple(statics.values())
    known.statics = [*[x.data_ptr() for x in known.kept], 0]
    known.offsets, order = [], []
    for pointer in pointers:
        name, behind = found.get(pointer, (pointer, 0))
        index = places.index(next((place for place in (name, name + "_out") if place in places), ""))
        if behind:
            known.offsets.append((index, behind))
            index = len(places) + len(known.offsets) - 1
        order.append(index)
    known.order = operator.itemgetter(*order)


# ---- the replay ----------------------------------------------------------------------------------


def again(op: Operation, tensors: Tensors, asked: Asked) -> tuple[Known, bool, list[Tensor], list[int]] | None:
    """The kind of a call, if this thread has had it lately, whether it asks for a gradient, tensors and addresses.

    One check in C++ stands for all questions about the tensors. It sees what watches a call, but for what
    `watch.watched` asks. This is the hot path: every line is paid once for each layer of a decode step.
    """
    try:
        kinds = local.recent[words_of(op, tensors, asked)]
        xs = [*tensors.values()]
        at = [x.data_ptr() for x in xs if not x.is_nested]  # a guard that is given a nested tensor aborts the process
        aligned = [address & 15 for address in at]  # which a guard does not see
        for _ in range(2):
            for matches, known, wants in kinds:
                if known.alignments == aligned and matches(*xs):
                    return known, wants, xs, at
            if xs is (xs := _distinct(xs)):
                break
    except (AttributeError, KeyError, TypeError, RuntimeError):  # no strided tensor, or a word without a hash
        pass
    return None


def keep_in_mind(known: Known, tensors: Tensors, asked: Asked) -> None:
    """Keep the guard of a plain call for `again`. A table that asks for a gradient is left to the check."""
    xs = _distinct([*tensors.values()])
    wants = [name for name, x in tensors.items() if x.requires_grad]
    names = known.op.names if known.op.differentiable else ()
    if any(name not in names for name in wants) or (wants and known.options.inplace):
        return
    matches = watch.guard(xs)
    if matches is None or (known.kept and watch.capturing(xs[0])):
        return
    if len(local.recent) >= MAX_RECENT:
        local.recent = {}
    kinds = local.recent.setdefault(words_of(known.op, tensors, asked), [])
    kinds[:] = [kind for kind in kinds if kind[1] is not known or kind[2] != bool(wants)]
    kinds.insert(0, (matches, known, bool(wants)))
    del kinds[MAX_RECENT_KINDS:]


def _distinct(xs: list[Tensor]) -> list[Tensor]:
    """A guard takes no tensor twice, such as one weight for q and k: the second becomes a detached view."""
    if len({*map(id, xs)}) == len(xs):
        return xs
    return [x.detach() if any(x is y for y in xs[:n]) else x for n, x in enumerate(xs)]
