"""Kernels in memory, and the launch. In the steady state a call is one dict hit and one launch."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import struct
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..base.config import log
from ..jit.kernels import get_kernel
from ..jit.registry import KINDS
from ..plan import heuristics
from ..plan.problem import (
    NormCall,
    Views,
    cache_view,
    constant,
    empty_parts,
    extent,
    head_views,
    joint_parts,
    plan_call,
    qkv_views,
    refuse_meeting,
    separate_views,
)
from ..plan.spec import LAYOUT_AXES, ROPE_KINDS, Given, Norm, Options, RopeSpec, changed
from ..plan.views import FP8, Tables, Weights, table_pair

KINDS.update(dict.fromkeys(ROPE_KINDS, RopeSpec))

MAX_LAUNCHES = 4096
"""Prepared launches a thread keeps; past it they are forgotten, which costs a few microseconds each."""

MAX_APART = 1024
"""Distances between a call's tensors that a launch keeps, known to be of tensors that do not share memory."""

MAX_RECENT = 256
MAX_RECENT_KINDS = 8
"""Sets of options, and for each kinds of tensors, that a thread looks at before anything else."""

_POINTERS = 15
_NORM_POINTERS = 15 + _POINTERS
_PACK, _PACK_NORM = (struct.Struct(f"{count}q").pack_into for count in (_POINTERS, _NORM_POINTERS))
_NO_SOURCES = (0,) * 6

_MISSING = object()
_ALL = -1  # the mark of a call whose missing tensors are stood for by empty ones


class _Local(threading.local):
    """What a thread keeps: prepared launches by kind of call, and the last kinds by their options."""

    def __init__(self) -> None:
        self.launches: dict[Any, Any] = {}
        self.recent: dict[Any, list[tuple[int, Callable[..., bool], Launch]]] = {}


_local = _Local()


@cache
def _nothing() -> list[Tensor]:
    """For tensors that are not given; at address 0. Made at the first plain call, where no dispatch mode is active."""
    with torch.inference_mode(False):
        return [torch.empty(0, dtype=torch.int8, device="cpu") for _ in range(14)]


# A torch without CUDA has neither.
_get_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", int)
_get_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", int)
_empty_like = torch.empty_like
_written = torch._C._increment_version

Check = Callable[..., Any] | None
Parts = tuple[Tensor, Tensor, Tensor]


# ---- the launch -------------------------------------------------------------------------------


class Launch:
    """A kernel with its grid and its argument block; only the addresses change from call to call."""

    __slots__ = (
        "alignments",
        "apart",
        "args",
        "blocks",
        "device",
        "enqueue",
        "options",
        "pack",
        "reach",
        "sin_offset",
        "sin_offset2",
    )

    def __init__(
        self, plan: heuristics.Plan, device: int, words: list[int], sin_offsets: tuple[int, int], reach: int,
        options: Options,
    ) -> None:  # fmt: skip
        with torch.cuda.device(device):
            kernel = get_kernel(plan.spec, device)
            kernel.bind_thread()
        self.device = device
        self.options = options  # resolved
        self.alignments: list[int] = []  # of a kept call's tensors, in bytes past 16
        self.sin_offset, self.sin_offset2 = sin_offsets  # bytes from cos to sin, where they are one tensor
        self.reach = reach  # bytes, past which no two tensors of a call can meet
        self.apart: set[tuple[int, ...]] = set()  # distances between a call's tensors at which none do
        self.blocks = plan.grid[0] * plan.grid[1]
        pointers, self.pack = (_NORM_POINTERS, _PACK_NORM) if plan.spec.norm else (_POINTERS, _PACK)
        self.args = (ctypes.c_int64 * (pointers + len(words)))(*[0] * pointers, *words)
        self.enqueue = kernel.enqueuer(plan.grid, plan.block, ctypes.addressof(self.args))

    def __call__(self, *addresses: int) -> None:
        """Enqueue on torch's current stream. The addresses: q, k, v, their outputs, cos, sin, cu_seqlens,
        start_positions, position_ids, slot_mapping and the scales of q, k and v. With a norm in front of them: q, k
        and v of two streams, the weights of q and k of each, the sums, the gradients of q's and k's outputs, and
        cos and sin of the second stream."""
        self.pack(self.args, 0, *addresses)
        if self.device == _get_device():
            self.enqueue(_get_stream(self.device))
        else:
            self.enqueue_on_its_device()

    def keep_apart(self, name: str, tensors: dict[str, Tensor], written: Sequence[str]) -> None:
        """Refuse memory that a call would write and also read or write as another of its tensors."""
        first, *others = _addresses(list(tensors.values()))
        distances = tuple(x - first for x in others)
        if distances not in self.apart:
            refuse_meeting(name, tensors, written)
            self.know_apart(distances)

    def know_apart(self, distances: tuple[int, ...]) -> None:
        """Tensors at these distances from the first do not share memory."""
        if len(self.apart) >= MAX_APART:
            self.apart.clear()
        self.apart.add(distances)

    def enqueue_on_its_device(self) -> None:
        """On torch's current stream of the kernel's device, where another device is the current one."""
        with torch.cuda.device(self.device):
            self.enqueue(_get_stream(self.device))


def _addresses(tensors: Sequence[Tensor | None]) -> list[int]:
    return [0 if x is None else x.data_ptr() for x in tensors]


def _table_addresses(tables: Tables, launch: Launch) -> list[int]:
    cos, sin, *rest = _addresses(tables)
    return [cos, sin + launch.sin_offset, *rest]


def rope(
    q: Tensor, k: Tensor | None, tables: Tables, options: Options, check: Check = None,
    plain: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Rotate CUDA tensors; with a `check` the options are as the caller wrote them.

    `check` runs once for each kind of call, before anything else, and returns the options converted to their types. The
    key holds all that it, the plan and the argument block look at. plain: neither this call nor a later one like it is
    watched.
    """
    key = ("rope", options, *map(_key, (q, k, *tables)))
    launch = _found(key)
    if launch is _MISSING:
        o = options if check is None else check(q, k, tables, options)
        launch = _remember(key, _prepare(*head_views(q, k, o), tables, None, o))
    if options.in_place and k is not None and launch is not None:
        launch.keep_apart("apply_rope_", {"q": q, "k": k}, ("q", "k"))
    if plain and _aligned(q, q if k is None else k, *tables[:2]):
        _keep_in_mind(options, *_marked(q, k, tables), launch)
    return _run_rope(launch, q, k, tables, options.in_place)


def _marked(q: Tensor, k: Tensor | None, tables: Tables) -> tuple[int, list[Tensor]]:
    """Which tensors a call has, in bits, and these, each once: a guard refuses a tensor that it has twice."""
    cos, sin, cu_seqlens, starts, ids = tables
    mark, tensors = 0, [q, cos]
    if k is not None:
        mark = 1
        tensors.append(k if k is not q else k.detach())
    if sin is not cos:
        mark += 2
        tensors.append(sin)
    if ids is not None:
        mark += 4
        tensors.append(ids)
    if cu_seqlens is not None:
        mark += 8
        tensors.append(cu_seqlens)
    if starts is not None:
        mark += 16
        tensors.append(starts)
    return mark, tensors


def rope_again(q: Tensor, k: Tensor | None, tables: Tables, given: Given) -> tuple[Tensor, Tensor | None] | None:
    """The same for a call of a kind that this thread has had lately, or None.

    One check in C++ stands for all questions about the tensors. It also sees what watches a call (autograd,
    functorch), but for dispatch modes, forward-mode AD and torch.compile, which `dispatch.call` asks about.
    This is the hot path: every line is paid once for each layer of a decode step.
    """
    try:
        kinds = _local.recent[given]
        if q.is_nested or (k is not None and k.is_nested):  # a guard given a nested tensor aborts the process
            return None
        mark, tensors = _marked(q, k, tables)
        for known, matches, launch in kinds:  # noqa: B007  launch is used behind the loop
            if known == mark and matches(*tensors):
                break
        else:
            return None
    except (AttributeError, KeyError, TypeError):  # no tensor, or an option without a hash: the check refuses both
        return None
    cos, sin, cu_seqlens, starts, ids = tables
    q_at, cos_at, sin_at = q.data_ptr(), cos.data_ptr(), sin.data_ptr()
    k_at = q_at if k is None else k.data_ptr()  # no head of a missing k is read
    if (q_at | k_at | cos_at | sin_at) & 15:  # what is kept is for aligned tensors; a guard does not see that
        return None
    out, k_out, in_place = q_at, k_at, launch.options.in_place
    if not in_place:
        q, k = _empty_like(q), None if k is None else _empty_like(k)
        out = q.data_ptr()
        k_out = out if k is None else k.data_ptr()
    elif k is not None and -launch.reach < k_at - q_at < launch.reach and (k_at - q_at,) not in launch.apart:
        launch.keep_apart("apply_rope_", {"q": q, "k": k}, ("q", "k"))
    cu_at = 0 if cu_seqlens is None else cu_seqlens.data_ptr()
    starts_at = 0 if starts is None else starts.data_ptr()
    ids_at = 0 if ids is None else ids.data_ptr()
    sin_at += launch.sin_offset
    _PACK(launch.args, 0, q_at, k_at, q_at, out, k_out, out, cos_at, sin_at, cu_at, starts_at, ids_at, 0, 0, 0, 0)
    device = launch.device
    if device == _get_device():
        launch.enqueue(_get_stream(device))
    else:
        launch.enqueue_on_its_device()
    if in_place:
        _written((q,) if k is None else (q, k))
    return q, k


def _run_rope(
    launch: Launch | None, q: Tensor, k: Tensor | None, tables: Tables, in_place: bool
) -> tuple[Tensor, Tensor | None]:
    q_out, k_out = q, k
    if not in_place:
        q_out, k_out = torch.empty_like(q), None if k is None else torch.empty_like(k)
    if launch is not None:
        q_at, q_out_at = q.data_ptr(), q_out.data_ptr()  # no head of a missing k is read
        k_at, k_out_at = (q_at, q_out_at) if k is None else (k.data_ptr(), k_out.data_ptr())  # type: ignore[union-attr]
        launch(q_at, k_at, q_at, q_out_at, k_out_at, q_out_at, *_table_addresses(tables, launch), 0, 0, 0, 0)
    return q_out, k_out


def rope_fp8(
    q: Tensor, k: Tensor | None, q_scale: Tensor, k_scale: Tensor | None, tables: Tables, options: Options,
    check: Check = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The same with fp8 outputs, divided by the scales."""
    tensors = (q, k, q_scale, k_scale)
    key = ("rope_fp8", options, *map(_key, (*tensors, *tables)))
    launch = _found(key)
    if launch is _MISSING:
        o = options if check is None else check(*tensors, tables, options)
        launch = _remember(key, _prepare(*head_views(q, k, o), tables, None, o))
    q_out, k_out = torch.empty_like(q, dtype=FP8), None if k is None else torch.empty_like(k, dtype=FP8)
    if launch is not None:
        at = _addresses((q, q if k is None else k, q, q_out, q_out if k is None else k_out, q_out))
        launch(*at, *_table_addresses(tables, launch), 0, *_addresses((q_scale, k_scale)), 0)
    return q_out, k_out


def rope_kv_cache(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor,
    q_scale: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None, tables: Tables, options: Options,
    check: Check = None, plain: bool = False,
) -> Tensor:  # fmt: skip
    """Rotate q and k, store k and v in caches; q comes back, in place or fresh."""
    tensors = (q, k, v, k_cache, v_cache, slot_mapping, q_scale, k_scale, v_scale)
    key = ("rope_kv_cache", options, *map(_key, (*tensors, *tables)))
    in_place = options.in_place
    launch = _found(key)
    if launch is _MISSING:
        o = options if check is None else check(*tensors, tables, options)
        (q_view, k_view, _), (q_out_view, *_) = head_views(q, k, o)
        inputs = (q_view, k_view, head_views(v, None, changed(o, in_place=True))[0][0])
        outputs = (q_out_view, cache_view(k_cache), cache_view(v_cache))
        launch = _remember(key, _prepare(inputs, outputs, tables, slot_mapping, o))
    if launch is not None:
        _keep_cache_apart(launch, tensors, options)
    if plain and _aligned(*tensors[:5], *tables[:2]):  # type: ignore[arg-type]
        distinct = _distinct(_for_a_guard((*tensors, *tables)))
        _keep_in_mind(options, _ALL, distinct, launch)
    q_out = q if in_place else torch.empty_like(q, dtype=FP8 if options.fp8 else None)
    if launch is not None:
        at = _addresses((q, k, v, q_out, k_cache, v_cache))
        launch(*at, *_table_addresses(tables, launch), *_addresses((slot_mapping, q_scale, k_scale, v_scale)))
    return q_out


def _keep_cache_apart(launch: Launch, tensors: Sequence[Any], options: Options) -> None:
    q, k, v, k_cache, v_cache = tensors[:5]
    written = ("k_cache", "v_cache", *(("q",) if options.in_place else ()), *(("k",) if options.k_too else ()))
    given = {"k_cache": k_cache, "v_cache": v_cache, "q": q, "k": k, "v": v}
    launch.keep_apart("apply_rope_kv_cache_" if options.in_place else "apply_rope_kv_cache", given, written)


def rope_kv_cache_again(tensors: Sequence[Tensor | None], tables: Tables, given: Given) -> Tensor | None:
    """The same for a call of a kind that this thread has had lately, or None; see `rope_again`."""
    launch, _ = _known(given, (*tensors, *tables))
    if launch is None:
        return None
    options = launch.options
    q, k, v, k_cache, v_cache, slots, q_scale, k_scale, v_scale = _addresses(tensors)
    cos, sin, *rest = _addresses(tables)
    if (q | k | v | k_cache | v_cache | cos | sin) & 15:
        return None
    distances = v_cache - k_cache, q - k_cache, k - k_cache, v - k_cache
    if distances not in launch.apart:
        places = sorted((0, *distances))
        if any(b - a < launch.reach for a, b in itertools.pairwise(places)):
            _keep_cache_apart(launch, tensors, options)
        launch.know_apart(distances)
    sin += launch.sin_offset
    q_in, k_in, _, *caches = tensors[:5]
    q_out: Any = q_in
    q_out_at = q
    if not options.in_place:
        q_out = torch.empty_like(q_out, dtype=FP8 if options.fp8 else None)
        q_out_at = q_out.data_ptr()
    launch(q, k, v, q_out_at, k_cache, v_cache, cos, sin, *rest, slots, q_scale, k_scale, v_scale)
    _written((*caches, *((q_in,) if options.in_place else ()), *((k_in,) if options.k_too else ())))  # type: ignore[arg-type]
    return q_out  # type: ignore[no-any-return]


def rope_qkv(qkv: Tensor, tables: Tables, options: Options, check: Check = None) -> tuple[Tensor, Tensor, Tensor]:
    """Packed QKV -> q and k rotated, v copied or a view. In place: q and k where they are; three times qkv."""
    key = ("rope_qkv", options, *map(_key, (qkv, *tables)))
    in_place = options.in_place
    prepared = _found(key)
    if prepared is _MISSING:
        o = options if check is None else check(qkv, tables, options)
        views = qkv_views(qkv, o.q_per_group, o.layout)
        inputs: Views = views
        outputs: Views = views
        if not in_place:
            outputs = separate_views(*empty_parts(qkv, o.q_per_group, "meta", True), o)
        if in_place or not o.values:
            inputs, outputs = (*inputs[:2], None), (*outputs[:2], None)
        launch = _prepare(inputs, outputs, tables, None, o)
        prepared = _remember(key, (launch, o.q_per_group, *_byte_offsets(views)))
    launch, q_per_group, k_offset, v_offset = prepared
    parts = (qkv, qkv, qkv) if in_place else empty_parts(qkv, q_per_group, qkv.device, options.values)
    if launch is not None:
        at = qkv.data_ptr()
        inputs_at = (at, at + k_offset, at + v_offset)
        outputs_at = inputs_at if in_place else _addresses(parts)
        launch(*inputs_at, *outputs_at, *_table_addresses(tables, launch), 0, 0, 0, 0)
    return parts


def rope_qkv_backward(dq: Tensor, dk: Tensor, dv: Tensor, tables: Tables, options: Options) -> Tensor:
    """The other way: q and k rotated, and v, written into one packed tensor."""
    grads = (dq, dk, dv)
    key = ("rope_qkv_backward", options, *map(_key, (*grads, *tables)))
    dqkv = dq.new_empty((*dk.shape[:-1], (options.q_per_group + 2) * dk.shape[-1]))
    prepared = _found(key)
    if prepared is _MISSING:
        o = options
        outputs = qkv_views(dqkv, o.q_per_group, o.layout)
        launch = _prepare(separate_views(*grads, o), outputs, tables, None, o)
        prepared = _remember(key, (launch, *_byte_offsets(outputs)))
    launch, k_offset, v_offset = prepared
    if launch is not None:
        at = dqkv.data_ptr()
        launch(*_addresses(grads), at, at + k_offset, at + v_offset, *_table_addresses(tables, launch), 0, 0, 0, 0)
    return dqkv


def rope_into(inputs: Parts, outputs: Parts, tables: Tables, options: Options) -> None:
    """q and k rotated, v copied, in one launch, into tensors of the caller's, whose heads may lie apart."""
    key = ("rope_into", options, *map(_key, (*inputs, *outputs, *tables)))
    launch = _found(key)
    if launch is _MISSING:
        o = options
        seen = changed(o, in_place=True)
        q, k, v, *outs = (head_views(x, None, seen)[0][0] for x in (*inputs, *outputs))
        launch = _remember(key, _prepare((q, k, v), (outs[0], outs[1], outs[2]), tables, None, o))
    if launch is not None:
        at = _addresses((*inputs, *outputs))
        launch(*at, *_table_addresses(tables, launch), 0, 0, 0, 0)


def _aligned(*tensors: Tensor) -> bool:
    return not any(x.data_ptr() & 15 for x in tensors)


def _for_a_guard(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """The tensors of a call in the form that a guard takes: None becomes an empty tensor."""
    given = [nothing if x is None else x for x, nothing in zip(tensors, _nothing())]
    if given[-5] is given[-4]:  # a table that is there as cos and as sin
        given[-4] = _nothing()[-1]
    return given


def _distinct(given: list[Tensor]) -> list[Tensor]:
    """A guard does not take one tensor twice, such as one weight for q and k: the second becomes a detached view."""
    if len({*map(id, given)}) == len(given):
        return given
    return [x.detach() if any(x is y for y in given[:n]) else x for n, x in enumerate(given)]


def _known(options: Any, tensors: Sequence[Tensor | None]) -> tuple[Launch | None, list[Tensor]]:
    """The launch of a kind that this thread has had lately, if this call is of one, and its tensors for a guard."""
    try:
        kinds = _local.recent[options]
        if any(x is not None and x.is_nested for x in tensors[:3]):  # a guard given a nested tensor aborts the process
            return None, []
        given = _for_a_guard(tensors)
        for _ in range(2):
            for _, matches, launch in kinds:
                if matches(*given):
                    return launch, given
            if given is (given := _distinct(given)):
                break
    except (AttributeError, KeyError, TypeError):  # the last for what is no tensor, or has no hash
        pass
    return None, []


def _keep_in_mind(
    options: Any, mark: int, given: Sequence[Tensor], launch: Launch | None, grads_asked: bool = False
) -> None:
    """Keep the guard of a plain call, whose tensors want no gradient; grads_asked: the caller looks after that.

    mark: which tensors the call has; a guard must get as many as it was made for.
    """
    guards = getattr(torch._C._dynamo.guards, "TensorGuards", None)
    if guards is None or launch is None or (not grads_asked and any(x.requires_grad for x in given)):
        return
    if len(_local.recent) >= MAX_RECENT:
        _local.recent = {}
    try:
        kinds = _local.recent.setdefault(options, [])
    except TypeError:  # an option without a hash, a numpy array for a tuple
        return
    matches = guards(*given, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    kinds[:] = [kind for kind in kinds if kind[2] is not launch or kind[0] != mark]
    kinds.insert(0, (mark, matches, launch))
    del kinds[MAX_RECENT_KINDS:]


def _key(x: Tensor | None) -> Any:
    if x is None:
        return None
    try:
        return x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() & 15
    except RuntimeError:  # a sparse or a nested tensor, which the check refuses
        return object()


def _byte_offsets(views: tuple[Tensor, Tensor, Tensor]) -> tuple[int, int]:
    """Of k and v from q."""
    q, k, v = views
    size = q.element_size()
    start = int(q.storage_offset())
    return (int(k.storage_offset()) - start) * size, (int(v.storage_offset()) - start) * size


def _found(key: tuple[Any, ...]) -> Any:
    """What this thread has prepared for a kind of call, or _MISSING: also for options without a hash."""
    try:
        return _local.launches.get(key, _MISSING)
    except TypeError:
        return _MISSING


def _remember(key: tuple[Any, ...], launch: Any) -> Any:
    """Keep what this thread has prepared: an argument block is filled by one thread at a time."""
    if len(_local.launches) >= MAX_LAUNCHES:
        _local.launches.clear()
    with contextlib.suppress(TypeError):  # an option without a hash, as a numpy array
        _local.launches[key] = launch
    return launch


def _prepare(
    inputs: Views, outputs: Views, tables: Tables, slot_mapping: Tensor | None, options: Options,
    normed: NormCall | None = None,
) -> Launch | None:  # fmt: skip
    """Plan a kind of call, get its kernel and fill in all but the addresses; None: nothing to do."""
    device = inputs[0].device
    sm_count = torch.cuda.get_device_properties(device).multi_processor_count
    planned = plan_call(inputs, outputs, tables, slot_mapping, options, sm_count, normed)
    if planned is None:
        return None
    plan, words = planned
    log.debug("%s: %s", plan.spec.name, plan.reason)
    pairs = [tables[:2], normed.second_tables] if normed and normed.second_tables else [tables[:2], tables[:2]]
    offsets = [table_pair(*pair, options.table)[1].data_ptr() - pair[1].data_ptr() for pair in pairs]  # type: ignore[call-arg,arg-type]
    reach = max(extent(x) for x in (*inputs, *outputs) if x is not None)
    return Launch(plan, device.index, words, (offsets[0], offsets[1]), reach, options)


# ---- QK-norm + rope ------------------------------------------------------------------------------


def qk_norm_rope(
    q: Tensor, k: Tensor | None, q_weight: Tensor | None, k_weight: Tensor | None, tables: Tables,
    options: Options, norm: Norm, check: Check = None, plain: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Normalise and rotate CUDA tensors; as `rope`."""
    weights = (q_weight, k_weight)
    tensors = (q, k, *weights)
    key = ("qk_norm_rope", options, norm, *map(_key, (*tensors, *tables)))
    launch = _found(key)
    if launch is _MISSING:
        o, normed = (options, norm) if check is None else check(*tensors, tables, options, norm)
        launch = _remember(key, _prepare(*head_views(q, k, o), tables, None, o, NormCall(normed, weights)))
    if options.in_place and k is not None and launch is not None:
        launch.keep_apart("qk_norm_rope_", {"q": q, "k": k}, ("q", "k"))
    if plain and launch is not None and not any(table.requires_grad for table in tables[:2]):
        distinct = _distinct(_for_a_guard((*tensors, *tables)))
        launch.alignments = [x.data_ptr() & 15 for x in distinct]  # a guard does not see that
        _keep_in_mind((options, norm), _ALL, distinct, launch, grads_asked=True)
    return _run_norm(launch, q, k, weights, tables, options, norm)


def qk_norm_rope_again(
    q: Tensor, k: Tensor | None, weights: Weights, tables: Tables, given: Given, norm: Norm
) -> tuple[Tensor, Tensor | None] | None:
    """The same for a call of a kind that this thread has had lately, or None; see `rope_again`.

    For a call that wants no gradient: a model's weights ask for one under torch.no_grad() too, and a guard does not
    know of that.
    """
    launch, tensors = _known((given, norm), (q, k, *weights, *tables))
    if launch is None or [x.data_ptr() & 15 for x in tensors] != launch.alignments:
        return None
    options = launch.options
    if options.in_place and k is not None:
        distance = k.data_ptr() - q.data_ptr()
        if -launch.reach < distance < launch.reach and (distance,) not in launch.apart:
            launch.keep_apart("qk_norm_rope_", {"q": q, "k": k}, ("q", "k"))
    out = _run_norm(launch, q, k, weights, tables, options, norm)
    if options.in_place:
        _written((q,) if k is None else (q, k))
    return out


def _run_norm(
    launch: Launch | None, q: Tensor, k: Tensor | None, weights: Weights, tables: Tables, options: Options,
    norm: Norm,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    q_out, k_out = q, k
    if not options.in_place:
        q_out, k_out = torch.empty_like(q), None if k is None else torch.empty_like(k)
    if launch is not None:
        q_at, q_out_at = q.data_ptr(), q_out.data_ptr()
        k_at, k_out_at = (q_at, q_out_at) if k is None else (k.data_ptr(), k_out.data_ptr())  # type: ignore[union-attr]
        norm_at = (*_NO_SOURCES, *_weight_addresses(weights, (q, k), options.layout, norm), 0, 0, 0, 0, 0, 0, 0)
        tables_at = _table_addresses(tables, launch)
        launch(*norm_at, q_at, k_at, q_at, q_out_at, k_out_at, q_out_at, *tables_at, 0, 0, 0, 0)
    return q_out, k_out


def qk_norm_rope_joint(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of two streams, the weights of each, cos and sin of the second or None, tables, options, a norm and
    perhaps a check -> joint q, k, v."""
    streams, weights, second_tables = arguments[:6], arguments[6:10], arguments[10:12]
    tables, options, norm, *checks = arguments[12:]
    key = ("qk_norm_rope_joint", options, norm, *map(_key, (*arguments[:12], *tables)))
    launch = _found(key)
    if launch is _MISSING:
        values, normed = checks[0](*arguments[:12], tables, options, norm) if checks else (options, norm)
        outputs = joint_parts(*streams[:4])
        first, second, out = (tuple(x.unsqueeze(3) for x in xs) for xs in (streams[:3], streams[3:], outputs))
        call = NormCall(normed, weights, second, second_tables if second_tables[0] is not None else ())
        launch = _remember(key, _prepare(first, out, tables, None, values, call))
    outputs = joint_parts(*streams[:4])
    if launch is not None:
        cos, sin = _addresses(second_tables)
        at = _addresses(streams)
        weights_at = _weight_addresses(weights, (*streams[:2], *streams[3:5]), options.layout, norm)
        norm_at = (*at, *weights_at, 0, 0, 0, cos, sin + launch.sin_offset2 if sin else 0)
        launch(*norm_at, *at[:3], *_addresses(outputs), *_table_addresses(tables, launch), 0, 0, 0, 0)
    return outputs


def qk_norm_rope_backward(
    dq: Tensor, dk: Tensor | None, q: Tensor, k: Tensor | None, q_weight: Tensor | None, k_weight: Tensor | None,
    tables: Tables, options: Options, norm: Norm,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients of q, k and the weights; `options` rotate back."""
    weights = (q_weight, k_weight)
    tensors = (dq, dk, q, k, *weights)
    key = ("qk_norm_rope_backward", options, norm, *map(_key, (*tensors, *tables)))
    prepared = _found(key)
    if prepared is _MISSING:
        o = options
        grads = head_views(dq, dk, changed(o, in_place=True))[0][:2]
        launch = _prepare(*head_views(q, k, o), tables, None, o, NormCall(norm, weights, grads=grads))
        sizes = [x.shape[-1] * (_heads_of(x, o) if norm.across_heads else 1) for x in (q, k) if x is not None]
        prepared = _remember(key, (launch, sizes))
    launch, sizes = prepared
    q_out, k_out = torch.empty_like(q), None if k is None else torch.empty_like(k)
    weighted = q_weight is not None or k_weight is not None
    blocks = launch.blocks if weighted and launch is not None else 0
    partial = torch.empty(blocks, sum(sizes), dtype=torch.float32, device=q.device)
    if launch is not None:
        q_at, q_out_at, dq_at = _addresses((q, q_out, dq))
        k_at, k_out_at, dk_at = (q_at, q_out_at, dq_at) if k is None else _addresses((k, k_out, dk))
        weights_at = _weight_addresses(weights, (q, k), options.layout, norm)
        norm_at = (*_NO_SOURCES, *weights_at, 0, 0, partial.data_ptr(), dq_at, dk_at, 0, 0)
        tables_at = _table_addresses(tables, launch)
        launch(*norm_at, q_at, k_at, q_at, q_out_at, k_out_at, q_out_at, *tables_at, 0, 0, 0, 0)
    if not weighted:
        return q_out, k_out, None, None
    dtype = next(w.dtype for w in weights if w is not None)
    total = partial.sum(0).to(dtype)
    parts = total[: sizes[0]], total[sizes[0] :]
    return q_out, k_out, *(None if w is None else part for part, w in zip(parts, weights))


def _weight_addresses(
    weights: Sequence[Tensor | None], tensors: Sequence[Tensor | None], layout: str, norm: Norm
) -> list[int]:
    """Where weights are missing beside others, those of a factor of one: a kernel has all of them or none."""
    if all(w is not None for w in weights) or all(w is None for w in weights):
        return _addresses(weights)
    dtype = next(w.dtype for w in weights if w is not None)
    addresses = []
    for weight, x in zip(weights, tensors):
        if weight is None and x is not None:
            size = x.shape[-1] * (x.shape[LAYOUT_AXES[layout][2]] if norm.across_heads else 1)
            weight = _ones(x.device, size, dtype, norm.zero_centered)
        addresses.append(0 if weight is None else weight.data_ptr())
    return addresses


@constant
def _ones(device: torch.device, count: int, dtype: torch.dtype, zero_centered: bool) -> Tensor:
    return torch.full((count,), 0 if zero_centered else 1, dtype=dtype, device=device)


def _heads_of(x: Tensor, options: Options) -> int:
    return x.shape[LAYOUT_AXES[options.layout][2]]
