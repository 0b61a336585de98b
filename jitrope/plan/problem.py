"""Tensors -> problem: a call in integers, its plan, and what its kernel is given beside addresses.

Looks at shapes, strides and alignment only, so the tensors may be on any device.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.errors import InvalidInput
from ..base.spec import ACCESS_BYTES
from . import arguments, heuristics
from .spec import NormOptions, Options
from .views import FP8, Tables, canonical, ids_view, table_pair, table_view

DTYPE_NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "int32",
    torch.int64: "int64",
    FP8: "fp8",
}


# ---- views of heads: (batch, seq, group, head of the group, dim) -------------------------------

Views = tuple[Tensor, "Tensor | None", "Tensor | None"]


def head_view(x: Tensor, layout: str) -> Tensor:
    """The heads of a tensor in `layout`; each is a group of its own."""
    return canonical(x, layout).unsqueeze(3)


def cache_view(cache: Tensor) -> Tensor:
    """A cache (slots, H, D) or (pages, rows, H, D) as heads: pages are the batch axis, if they are needed."""
    if cache.dim() == 4 and cache.stride(0) == cache.shape[1] * cache.stride(1):
        cache = cache.flatten(0, 1)
    return (cache if cache.dim() == 4 else cache.unsqueeze(0)).unsqueeze(3)


def qkv_views(qkv: Tensor, q_per_group: int, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v inside a packed tensor (..., groups, (q_per_group + 2) head_dim)."""
    packed = canonical(qkv, layout).unflatten(-1, (q_per_group + 2, -1))
    return packed[:, :, :, :q_per_group], packed[:, :, :, q_per_group:-1], packed[:, :, :, -1:]


def separate_views(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """The same of q (..., groups x q_per_group, head_dim), k and v (..., groups, head_dim)."""
    q, k, v = (canonical(x, options.layout) for x in (q, k, v))
    return q.unflatten(2, (-1, options.q_per_group)), k.unsqueeze(3), v.unsqueeze(3)


def value_view(qkv: Tensor, q_per_group: int) -> Tensor:
    """v inside a packed tensor, (..., groups, head_dim)."""
    view: Tensor = qkv.unflatten(-1, (q_per_group + 2, -1))[..., -1, :]
    return view


def empty_parts(qkv: Tensor, q_per_group: int, copy_v: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Fresh q, k and v of a packed tensor; without `copy_v` v is the view."""
    *lead, groups, width = qkv.shape
    head_dim = width // (q_per_group + 2)
    q = qkv.new_empty((*lead, groups * q_per_group, head_dim))
    k = qkv.new_empty((*lead, groups, head_dim))
    return q, k, torch.empty_like(k) if copy_v else value_view(qkv, q_per_group)


def joint_parts(q1: Tensor, k1: Tensor, v1: Tensor, q2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Fresh q, k and v, (B, S1 + S2, H, D), of both streams' tokens."""
    tokens = q1.shape[1] + q2.shape[1]
    q, k, v = (x.new_empty((x.shape[0], tokens, *x.shape[2:])) for x in (q1, k1, v1))
    return q, k, v


# ---- memory that is written --------------------------------------------------------------------


def extent(x: Tensor) -> int:
    """Bytes from the first to the last element."""
    if x.numel() == 0:
        return 0
    return (sum((size - 1) * stride for size, stride in zip(x.shape, x.stride())) + 1) * x.element_size()


def overlaps_itself(x: Tensor) -> bool:
    """Whether two elements share memory, as those of an expanded tensor and of overlapping windows do."""
    axes = sorted((stride, size) for size, stride in zip(x.shape, x.stride()) if size > 1)
    if x.numel() == 0 or not axes:
        return False
    if axes[0][0] == 0:  # expanded
        return True
    past = [sum((size - 1) * stride for stride, size in axes[:n]) for n in range(len(axes))]
    if all(stride > reach for (stride, _), reach in zip(axes, past)):  # each axis steps over all smaller ones
        return False
    steps = [stride for stride, _ in axes]
    return len(set(steps)) < len(steps) or _reaches(0, {stride: (1 - size, size - 1) for stride, size in axes}, True)


def meet(a: Tensor, b: Tensor) -> bool:
    """Whether a byte of a is a byte of b."""
    distance = b.data_ptr() - a.data_ptr()
    if a.numel() == 0 or b.numel() == 0 or not -extent(b) < distance < extent(a):
        return False
    ranges: dict[int, tuple[int, int]] = {}
    for x, sign in ((a, 1), (b, -1)):
        size = x.element_size()
        for step, count in ((1, size), *((stride * size, n) for n, stride in zip(x.shape, x.stride()))):
            low, high = ranges.get(step, (0, 0))
            ranges[step] = (low - (count - 1), high) if sign < 0 else (low, high + count - 1)
    return _reaches(distance, ranges)


def _reaches(target: int, ranges: dict[int, tuple[int, int]], moved: bool = False) -> bool:
    """Whether steps, each taken so often as its range allows, lead to the target; moved: not all of them zero times."""
    axes = sorted(((step, low, high) for step, (low, high) in ranges.items() if low < high and step), reverse=True)
    rest = [
        (sum(s * low for s, low, _ in axes[n:]), sum(s * high for s, _, high in axes[n:])) for n in range(len(axes) + 1)
    ]

    def search(n: int, left: int, still: bool) -> bool:
        if n == len(axes):
            return left == 0 and not still
        step, low, high = axes[n]
        first, last = -((rest[n + 1][1] - left) // step), (left - rest[n + 1][0]) // step
        return any(
            search(n + 1, left - step * x, still and x == 0) for x in range(max(low, first), min(high, last) + 1)
        )

    return search(0, target, moved)


def refuse_meeting(name: str, tensors: dict[str, Tensor], written: Sequence[str]) -> None:
    """Refuse memory that is written as one tensor, and read or written as another."""
    for n, label in enumerate(written):
        for other, x in tensors.items():
            if other not in written[: n + 1] and meet(tensors[label], x):
                raise InvalidInput(
                    f"{name}: {label} and {other} share memory, which is written; pass tensors that do not overlap"
                )


# ---- constants -----------------------------------------------------------------------------------


def constant(make: Callable[..., Any]) -> Callable[..., Any]:
    """Tensors that depend on a device and some numbers alone, made once and then kept.

    The stream that fills them is waited for, once, so that every other one may read them. What is made while
    something watches (torch.compile, fake tensors, a CUDA graph's capture) is its own, and not kept.
    """

    @lru_cache(maxsize=4096)
    def kept(device: torch.device, *numbers: Any) -> Any:
        with torch.inference_mode(False):
            made = make(device, *numbers)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return made

    def get(device: torch.device, *numbers: Any) -> Any:
        watched = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
        if watched or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return make(device, *numbers)
        return kept(device, *numbers)

    get.cache_clear = kept.cache_clear  # type: ignore[attr-defined]
    return get


# ---- the plan ----------------------------------------------------------------------------------


class NormCall(NamedTuple):
    """What a call with a norm has beside the others' tensors.

    weights: of q and k, and of the second stream's q and k. second: the views of its q, k and v; second_tables:
    its cos and sin, if they are not rows of the first's. grads: the outputs' gradients, of the norm's gradient.
    """

    norm: NormOptions
    weights: tuple[Tensor | None, ...]
    second: tuple[Tensor, ...] = ()
    second_tables: tuple[Tensor, Tensor | None] | tuple[()] = ()
    grads: tuple[Tensor | None, ...] = ()


def plan_call(
    inputs: Views, outputs: Views, tables: Tables, slot_mapping: Tensor | None, options: Options, sm_count: int,
    normed: NormCall | None = None,
) -> tuple[heuristics.Plan, list[int]] | None:  # fmt: skip
    """The plan of a call and its kernel's arguments after the addresses; None: nothing to do.

    With a slot_mapping the outputs of k and v are caches, pages as the batch axis.
    """
    cos, sin, cu_seqlens, start_positions, position_ids = tables
    page_size = slot_count = 0
    if slot_mapping is not None:
        pages, rows = outputs[1].shape[:2]  # type: ignore[union-attr]
        page_size, slot_count = rows if pages > 1 else 0, pages * rows
    # No head of a missing k or v is read.
    views = [xs[0] if x is None else x for xs in (inputs, outputs) for x in xs]
    table_views = [table_view(table) for table in table_pair(cos, sin, options.table)]
    ids = None if position_ids is None else ids_view(position_ids, options)
    if normed is None or not (normed.second or normed.grads):
        views, table_views, ids = _as_one_row(views, table_views, ids, slot_mapping is not None, start_positions)
    batch, seqlen, groups, q_per_group, head_dim = views[3].shape  # two streams are one in the output
    q_heads, k_heads = groups * q_per_group, 0 if inputs[1] is None else inputs[1].shape[2]
    tokens, heads = batch * seqlen, q_heads + k_heads * (2 if inputs[2] is not None else 1)
    if tokens * heads == 0:
        return None
    sources, grads = _norm_views(views, normed)
    strides = [_strides(x) for x in views]
    more_strides = [_strides(x) for x in (*sources, *grads)]
    if normed and normed.second_tables:
        cos2, sin2 = normed.second_tables
        table_views += [table_view(table) for table in table_pair(cos2, sin2, options.table)]
    table_strides = [_strides(table) for table in table_views]
    table_step, table_vec_limit = _table_access(table_views, table_strides)
    ids_strides = [0, 0, 0] if ids is None else [*_strides(ids)[:2], ids.stride(2)]
    steps = (*strides, *more_strides, *table_strides, ids_strides)
    largest = max(table_views[0].shape[1], *(step for group in steps for step in group))
    problem = heuristics.RopeProblem(
        dtype=DTYPE_NAMES[views[0].dtype],
        table_dtype=DTYPE_NAMES[table_views[0].dtype],
        head_dim=head_dim,
        rotary_dim=options.rotary_dim,
        rotary_offset=options.rotary_offset,
        interleaved=options.interleaved,
        interleaved_out=options.interleaved_out,
        inverse=options.inverse,
        freqs=options.table == "freqs",
        full_width=table_views[0].shape[-1] == options.rotary_dim,
        per_head=any(table[2] for table in table_strides),
        packed_table=options.packed_table,
        rounding=options.rounding,
        in_place=options.inplace,
        cu_seqlens_dtype=_name(cu_seqlens),
        start_positions_dtype=_name(start_positions),
        cp_size=options.cp_size,
        position_ids_dtype=_name(position_ids),
        mrope_section=tuple(options.mrope_section),
        mrope_interleaved=options.mrope_interleaved,
        slot_mapping_dtype=_name(slot_mapping),
        page_size=page_size,
        rotate_k=options.rotate_k,
        q_out=DTYPE_NAMES[views[3].dtype],
        kv_out=DTYPE_NAMES[views[4].dtype],
        **_norm_fields(inputs, normed),
        q_per_group=q_per_group,
        copy_v=inputs[2] is not None,
        batch_inner=batch > 1 and seqlen > 1 and views[0].stride(0) < views[0].stride(1),
        wide=largest >= 1 << 31,
        batch=batch,
        tokens=tokens,
        heads=heads,
        q_heads=q_heads,
        num_sequences=0 if cu_seqlens is None else len(cu_seqlens) - 1,
        max_seqlen=options.max_seqlen,
        vec_limit=_elements_per_access([*views, *sources, *grads], [*strides, *more_strides]),
        table_vec_limit=table_vec_limit,
        table_step_limit=table_step,
        launch=options.launch,
        sm_count=sm_count,
    )
    (scalars,) = struct.unpack("q", struct.pack("2f", options.mscale, normed.norm.eps if normed else 0))
    given: dict[str, arguments.Word] = {
        "in_stride": strides[:3],
        "out_stride": strides[3:],
        "cos_stride": table_strides[0],
        "sin_stride": table_strides[1],
        "ids_stride": ids_strides,
        "tokens": tokens,
        "batch": batch,
        "seqlen": seqlen,
        "q_heads": q_heads,
        "k_heads": k_heads,
        "sequences": problem.num_sequences,
        "table_rows": table_views[0].shape[1],
        "cp_rank": options.cp_rank,
        "slot_count": slot_count,
        "scalars": scalars,
    }
    if normed:
        given["source_stride"] = more_strides[: len(sources)] or [0] * 30
        given["grad_stride"] = more_strides[len(sources) :] or [0] * 10
        given["second_table_stride"] = table_strides[2:] or [0] * 8
        given["split"] = views[0].shape[1]
    return heuristics.plan(problem), arguments.words(given, norm=normed is not None)


def _norm_views(views: list[Tensor], normed: NormCall | None) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """q, k and v of both streams, and the outputs' gradients, if there are any."""
    if normed is None:
        return (), ()
    sources = (*views[:3], *normed.second) if normed.second else ()
    grads = tuple(views[0] if x is None else x for x in normed.grads)
    return sources, grads


def _norm_fields(inputs: Views, normed: NormCall | None) -> dict[str, Any]:
    """The fields of a problem about its norm."""
    norm = NormOptions("") if normed is None else normed.norm
    weights = [] if normed is None else [w for w in normed.weights if w is not None]
    rows = [x.shape[2] for x in inputs[:2] if x is not None] if norm.across_heads else []
    limits = [_elements_per_access([w], [_strides(w)]) for w in weights]
    head_dim = inputs[0].shape[-1]
    return {
        "norm_rounding": norm.rounding,
        "across_heads": norm.across_heads,
        "row_heads": tuple(rows),
        "zero_centered": norm.zero_centered,
        "weight_dtype": DTYPE_NAMES[weights[0].dtype] if weights else None,
        "two_streams": normed is not None and bool(normed.second),
        "two_tables": normed is not None and bool(normed.second_tables),
        "gradient": normed is not None and bool(normed.grads),
        "weight_vec_limit": math.gcd(min(limits), head_dim) if limits else 1,
    }


def _as_one_row(
    views: list[Tensor], tables: list[Tensor], ids: Tensor | None, caches: bool, starts: Tensor | None
) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
    """The batch axis made one with the sequence's where the kernel then does the same: it saves a division."""
    batch, seqlen = views[0].shape[:2]
    shared = len(tables[0]) == 1
    of_tokens = slice(0, 4 if caches else 6)  # the others are caches

    if batch == 1 or (ids is not None and not shared) or starts is not None:
        return views, tables, ids
    if ids is not None:
        ids = ids.expand(-1, batch, -1)
    if seqlen == 1:  # a decode step: the batch rows are the tokens
        views[of_tokens] = [x.transpose(0, 1) for x in views[of_tokens]]
        if ids is None:
            tables = [table[:, :1].transpose(0, 1).expand(-1, batch, -1, -1) for table in tables]
        return views, tables, None if ids is None else ids.transpose(1, 2)
    if ids is None or not all(_merges(x) for x in (*views[of_tokens], ids[0])):
        return views, tables, ids
    views[of_tokens] = [x.flatten(0, 1).unsqueeze(0) for x in views[of_tokens]]
    return views, tables, ids.flatten(1).unsqueeze(1)


def _merges(x: Tensor) -> bool:
    """Whether the first two axes can be seen as one."""
    return x.stride(0) == x.shape[1] * x.stride(1)


def _name(x: Tensor | None) -> str | None:
    return None if x is None else DTYPE_NAMES[x.dtype]


def _strides(view: Tensor) -> list[int]:
    """In elements; 0 along an axis of size 1, where a table is shared, but 1 along the last."""
    strides = [0 if size == 1 else stride for size, stride in zip(view.shape, view.stride())]
    return [*strides[:-1], 1 if view.shape[-1] == 1 else strides[-1]]


def _elements_per_access(views: Sequence[Tensor], strides: Sequence[Sequence[int]]) -> int:
    """Elements that one aligned access may span, from addresses and strides; the last stride is the inner one."""
    if any(inner != 1 for *_, inner in strides):
        return 1
    limits = []
    for view, (*outer, _) in zip(views, strides):
        size = view.element_size()
        limits.append(max(1, math.gcd(ACCESS_BYTES, *(stride * size for stride in outer), _address(view)) // size))
    return min(limits)


def _table_access(views: Sequence[Tensor], strides: Sequence[Sequence[int]]) -> tuple[int, int]:
    """(the tables' own element stride, entries that one aligned access may span); see `_elements_per_access`.

    Of every other element, as complex tables and repeated ones have them, an access takes both neighbours.
    """
    if any(inner != 2 for *_, inner in strides):
        return 1, _elements_per_access(views, strides)
    limits = []
    for view, (*outer, _) in zip(views, strides):
        pair = 2 * view.element_size()
        steps = (stride * view.element_size() for stride in outer)
        limits.append(math.gcd(ACCESS_BYTES, *steps, _address(view) // pair * pair) // pair)
    return (2, min(limits)) if min(limits) else (1, 1)


def _address(x: Tensor) -> int:
    """Of the first element; within its allocation, which is aligned, where that is still to be made."""
    return int(x.storage_offset()) * x.element_size() if x.is_meta else x.data_ptr()
