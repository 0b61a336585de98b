"""Tensors -> problem: a call in integers, its plan, and its kernel's arguments after the addresses.

Only shapes, strides and alignment are read, so the tensors may be on any device.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..base import config
from ..base.spec import ACCESS_BYTES
from . import arguments, heuristics, views
from .options import ALL_TOKENS, NormOptions, Options
from .spec import INDICES
from .views import BLOCK_SCALES, FORMATS, MEANS, PER_ITEM, Tensors

DTYPE_NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "int32",
    torch.int64: "int64",
    **{form.dtype: name for name, form in FORMATS.items()},
}

Views = tuple[Tensor, "Tensor | None", "Tensor | None"]
"""The heads of q, k and v, each (batch, seq, group, head of the group, dim)."""

NARROW = 1 << 30  # strides below this many elements have at most 32 bits in bytes, also those of fp32
_OF_OPTIONS, _OF_NORM = (
    [name for name in words if name in heuristics.RopeProblem.__dataclass_fields__]
    for words in (Options._fields, NormOptions._fields[1:])
)
_PLANNED = ("head_dim", "q_per_group", "kv_per_group", "v_per_k", "batch", "tokens", "heads", "q_heads")
_COUNTED = ("tokens", "batch", "seqlen", "q_heads", "k_heads", "sequences")
"""Attributes of a call that are fields of a problem, and those that are words of the argument block."""
HEADS = ("q", "k", "v", "q_out", "k_out", "v_out")
_ADDED = ("q_added", "k_added", "v_added")
_SCALES, _FACTORS = ("q_scale_out", "k_scale_out", "v_scale_out"), ("q_factor", *MEANS)


def plan_call(
    inputs: Views, outputs: Views, tensors: Tensors, options: Options, sm_count: int, memory_speed: float = 0.0
) -> tuple[heuristics.Plan, list[int]] | None:
    """The plan of a call, and its kernel's arguments after the addresses; None if there is nothing to do.

    inputs, outputs: the heads of q, k and v; with a cache the outputs of k and v are caches, and pages are their batch
    axis. tensors: all tensors of the call by name.
    """
    call = _Call(inputs, outputs, tensors, options)
    if call.tokens * call.heads == 0:
        return None
    return (plan := heuristics.plan(call.problem(sm_count, memory_speed))), call.words(plan.spec.stages)


class _Call:
    """The views of a call by the names of their tensors, their strides, and its counts."""

    def __init__(self, inputs: Views, outputs: Views, tensors: Tensors, options: Options) -> None:
        self.inputs, self.tensors, self.options = inputs, tensors, options
        self.paged, self.cached = "page_table" in tensors, "page_table" in tensors or "slot_mapping" in tensors
        self.named = {name: x for name, x in zip(HEADS, (*inputs, *outputs)) if x is not None}
        self.tables = _table_views(tensors, options, "")
        self.ids = views.ids_view(tensors["position_ids"], options) if "position_ids" in tensors else None
        grads = ("dq", "dk", "dv")[: 2 + options.norm.v_norm] if options.norm else ()
        beside = [name for name in (*grads, "second_q", "second_k", "second_v") if name in tensors]
        self.named |= {name: views.head_view(tensors[name], options.layout) for name in beside}
        self.named |= {name: _scale_view(tensors[name], options) for name in _SCALES if name in tensors}
        self.gated = options.order == "qkv_gated" and inputs[0].shape[3] == 2
        if "bias" in tensors:
            added = views.bias_views(tensors["bias"], tensors["qkv"], options, self.gated)
            self.named |= dict(zip(_ADDED, added))
        self._group()
        self.given_scales = {f"{name}_scale": _scale_strides(tensors.get(f"{name}_scale")) for name in "qkv"}
        shape = self.named["q_out"].shape[:2]
        self.named |= {name: views.factor_view(tensors[name], shape) for name in _FACTORS if name in tensors}
        if not beside:
            self._merge_batch()
        if "second_q" in tensors:
            self.named |= {f"first_{name}": self.named[name] for name in "qkv"}
        if "second_cos" in tensors:
            self.tables |= _table_views(tensors, options, "second_")
        self.strides = {name: strides_of(x) for name, x in (*self.named.items(), *self.tables.items())}
        self.strides |= {name: _block_scale_strides(tensors[name]) for name in BLOCK_SCALES if name in tensors}
        if self.ids is not None:
            self.strides["position_ids"] = [*strides_of(self.ids)[:2], self.ids.stride(2)]
        self._count()

    def _group(self) -> None:
        """Give all views of q the same groups of heads, and all of k and v."""
        for letters in ("q", "kv"):
            names = [name for name in self.named if name.removeprefix("second_").removeprefix("d")[0] in letters]
            self.named.update(zip(names, views.in_groups([self.named[name] for name in names])))

    def _merge_batch(self) -> None:
        """Merge the batch axis with the sequence axis if the results stay equal. The kernel then needs no division."""
        batch, seqlen = self.named["q"].shape[:2]
        ids, shared = self.ids, len(self.tables["cos"]) == 1
        caches = ("k_out", "v_out") if self.cached else ()
        of_tokens = {name: x for name, x in self.named.items() if name not in (*caches, *_ADDED)}
        counted = "start_positions" in self.tensors or 0 < self.options.unrotated < ALL_TOKENS
        counted |= self.options.per_row or self.options.swizzled or any(x for x, _ in self.given_scales.values())
        if batch == 1 or (ids is not None and not shared) or counted:
            return
        if ids is not None:
            ids = ids.expand(-1, batch, -1)
        if seqlen == 1:  # a decode step: the batch rows are the tokens
            self.named |= {name: x.transpose(0, 1) for name, x in of_tokens.items()}
            if ids is None:
                first = {name: table[:, :1].transpose(0, 1) for name, table in self.tables.items()}
                self.tables = {name: table.expand(-1, batch, -1, -1) for name, table in first.items()}
            self.ids = None if ids is None else ids.transpose(1, 2)
        elif ids is not None and all(x.stride(0) == x.shape[1] * x.stride(1) for x in (*of_tokens.values(), ids[0])):
            self.named |= {name: x.flatten(0, 1).unsqueeze(0) for name, x in of_tokens.items()}
            self.ids = ids.flatten(1).unsqueeze(1)

    def _count(self) -> None:
        (q, k, v), options, tensors = self.inputs, self.options, self.tensors
        self.batch, self.seqlen, groups, self.q_per_group, _ = self.named["q_out"].shape  # of both streams
        self.head_dim = q.shape[-1]  # an item of an output may hold two elements
        k_groups, self.kv_per_group = (0, 1) if k is None else self.named["k"].shape[2:4]
        self.q_heads, self.k_heads = groups * self.q_per_group, k_groups * self.kv_per_group
        self.tokens = self.batch * self.seqlen
        v_heads = self.k_heads if options.v_dim else 0 if v is None else v.shape[2] * v.shape[3]
        self.v_per_k = max(1, v_heads // max(1, self.k_heads))
        self.heads = self.q_heads + self.k_heads + v_heads
        self.heads += options.v_dim > 0 and options.inverse  # the sum over k's heads
        offsets = next((tensors[name] for name in ("cu_seqlens", "page_indptr") if name in tensors), None)
        rows = tensors.get("page_table" if "batch_indices" in tensors else "lengths", ())
        self.sequences = len(rows) if offsets is None else len(offsets) - 1
        self.pages, self.page_size = self.named["k_out"].shape[:2] if self.cached else (0, 0)

    def problem(self, sm_count: int, memory_speed: float) -> heuristics.RopeProblem:
        o, table, strides = self.options, self.tables["cos"], self.strides
        of_tables = [strides[name] for name in self.tables]
        table_step, table_vec_limit = _table_access([*self.tables.values()], of_tables)
        heads = {name: x for name, x in self.named.items() if name not in (*_SCALES, *_FACTORS)}
        found: dict[str, Any] = {
            **{name: getattr(o, name) for name in _OF_OPTIONS},
            **{name: getattr(self, name) for name in _PLANNED},
            **{f"{x}_dtype": DTYPE_NAMES[self.tensors[x].dtype] if x in self.tensors else None for x in INDICES},
            **self._norm_fields(),
            "dtype": DTYPE_NAMES[self.named["q"].dtype],
            "table_dtype": DTYPE_NAMES[table.dtype],
            "q_out": o.out_dtype if o.per_row else DTYPE_NAMES[self.named["q_out"].dtype],
            "kv_out": o.out_dtype if o.per_row else DTYPE_NAMES[self.named.get("k_out", self.named["q_out"]).dtype],
            "dynamic": not strides.keys().isdisjoint((*_SCALES, *BLOCK_SCALES)),
            "dynamic_q": _SCALES[0] in strides,
            "block_cache": BLOCK_SCALES[0] in strides,
            "freqs": o.table == "freqs",
            "full_width": table.shape[-1] == o.rotary_dim,
            "per_head": any(step[2] for step in of_tables),
            "in_place": o.inplace,
            "page_size": self.page_size if self.pages > 1 or self.paged else 0,
            **{name: name in self.tensors for name in ("page_indptr", "cu_seqlens_q", "batch_indices")},
            "copy_v": self.inputs[2] is not None,
            "convert_v": views.converts_v(self.tensors, o.dynamic_v),
            "batch_inner": self.batch > 1 and self.seqlen > 1 and self.named["q"].stride(0) < self.named["q"].stride(1),
            "scales_q": "q_factor" in self.tensors,
            "prefixed": o.unrotated > 0,
            "head_scales": any(map(any, self.given_scales.values())),
            "added_bias": "bias" in self.tensors,
            "gated": self.gated,
            "wide": max(table.shape[1], *chain(*strides.values())) >= NARROW,
            "num_sequences": self.sequences,
            "vec_limit": elements_per_access([*heads.values()], [strides[name] for name in heads]),
            "table_vec_limit": table_vec_limit,
            "table_step_limit": table_step,
            "batch_invariant": config.batch_invariant(),
            "sm_count": sm_count,
            "memory_speed": memory_speed,
        }
        if found["block_cache"] and not found["dynamic_q"]:  # scales of q are of the same kind
            form = views.block_format(self.tensors, self.head_dim, o)
            found.update(group=form.group if form.group < self.head_dim else 0, scale_out=form.scale_out)
        return heuristics.RopeProblem(**found)

    def _norm_fields(self) -> dict[str, Any]:
        norm = self.options.norm or NormOptions("", kind="")
        weights = [x for name, x in self.tensors.items() if name.endswith(("_weight", "_bias"))]
        across = views.sums_heads(self.tensors, self.options)
        rows = [x.shape[2] * x.shape[3] for x in self.inputs[:2] if x is not None] if across else []
        limits = [elements_per_access([w], [strides_of(w)]) for w in weights]
        return {
            **{name: getattr(norm, name) for name in _OF_NORM},
            "across_heads": across,
            "given_means": MEANS[0] in self.tensors,
            "norm_rounding": norm.rounding,
            "norm_kind": norm.kind,
            "norm_q": "q" in norm.of,
            "norm_k": "k" in norm.of,
            "latent_norm": norm.of == "v",
            "v_norm": norm.v_norm or norm.of == "v",
            "row_heads": tuple(rows),
            "weight_dtype": DTYPE_NAMES[weights[0].dtype] if weights else None,
            "biased": any(name.endswith("_bias") for name in self.tensors),
            "two_streams": "second_q" in self.named,
            "two_tables": len(self.tables) == 4,
            "gradient": "dq" in self.named,
            "weight_vec_limit": math.gcd(min(limits), self.inputs[0].shape[-1]) if limits else 1,
        }

    def words(self, stages: Sequence[str]) -> list[int]:
        """The words of the argument block of a kernel with these stages."""
        norm = self.options.norm
        (scalars,) = struct.unpack("q", struct.pack("2f", self.options.mscale, norm.eps if norm else 0))
        given: dict[str, Any] = {
            **self.strides,
            **self.given_scales,
            **{name: getattr(self, name) for name in _COUNTED},
            "table_rows": self.tables["cos"].shape[1],
            "cp_rank": self.options.cp_rank,
            "slot_count": self.pages * self.page_size,
            "scalars": scalars,
            "split": self.named["q"].shape[1],
            "unrotated": self.options.unrotated,
        }
        if self.paged:
            table = self.tensors["page_table"]
            given |= {"page_table_stride": table.stride(0), "page_table_width": table.shape[-1]}
            given |= {"page_count": self.pages, "new_tokens": max(1, self.tokens // max(1, self.sequences))}
        return arguments.words(given, norm=norm is not None, stages=stages)


def _table_views(tensors: Tensors, options: Options, stream: str) -> Tensors:
    pair = views.table_pair(tensors[stream + "cos"], tensors.get(stream + "sin"), options.table)
    return {stream + name: views.table_view(table) for name, table in zip(("cos", "sin"), pair)}


def _scale_view(scale: Tensor, options: Options) -> Tensor:
    """The view of scales that the kernel computes, with the axes of heads."""
    if options.per_row:  # (B, H) or (N, H)
        return scale[:, None, :, None, None]
    if options.swizzled:  # tiles of (S, groups)
        return views.head_view(scale, "bhsd")
    return views.head_view(scale if options.group else scale.unsqueeze(-1), options.layout)


def strides_of(view: Tensor) -> list[int]:
    """Strides in elements. An axis of size 1 is shared, so its stride is 0; the last axis has 1."""
    strides = [0 if size == 1 else stride for size, stride in zip(view.shape, view.stride())]
    return [*strides[:-1], 1 if view.shape[-1] == 1 else strides[-1]]


def _block_scale_strides(scale: Tensor) -> list[int]:
    """The strides over pages, four rows, heads, a row and groups.

    scale: (slots, H, G), (pages, rows, H, G), or (pages, rows / 4, 4, H, G).
    """
    page, *rows, head, group = scale.stride() if scale.dim() > 3 else (0, *scale.stride())
    return [page, 4 * rows[0] if len(rows) == 1 else rows[0], head, rows[-1], group]


def _scale_strides(scale: Tensor | None) -> tuple[int, int]:
    """The strides over batch rows, or sequences, and heads of a given scale: one number, (H), (B, H) or (N, H)."""
    if scale is None:
        return 0, 0
    *batch, head = [0 if size == 1 else stride for size, stride in zip((1, *scale.shape), (0, *scale.stride()))]
    return (batch[-1] if batch else 0), head


def elements_per_access(tensors: Sequence[Tensor], strides: Sequence[Sequence[int]]) -> int:
    """Elements that one aligned access may span, by addresses and strides, which count items."""
    if any(inner != 1 for *_, inner in strides):
        return 1
    limits = []
    for x, (*outer, _) in zip(tensors, strides):
        size = x.element_size()
        items = math.gcd(ACCESS_BYTES, *(stride * size for stride in outer), _address(x)) // size
        limits.append(max(1, items) * PER_ITEM.get(x.dtype, 1))
    return min(limits)


def _table_access(tensors: Sequence[Tensor], strides: Sequence[Sequence[int]]) -> tuple[int, int]:
    """(element stride of the tables, entries that one aligned access may span).

    Complex and repeated tables use every other element, and an access loads both neighbours.
    """
    if any(inner != 2 for *_, inner in strides):
        return 1, elements_per_access(tensors, strides)
    limits = []
    for x, (*outer, _) in zip(tensors, strides):
        pair = 2 * x.element_size()
        steps = (stride * x.element_size() for stride in outer)
        limits.append(math.gcd(ACCESS_BYTES, *steps, _address(x) // pair * pair) // pair)
    return (2, min(limits)) if min(limits) else (1, 1)


def _address(x: Tensor) -> int:
    """The address of the first element; for a meta tensor, the offset in its storage, which will be aligned."""
    return int(x.storage_offset()) * x.element_size() if x.is_meta else x.data_ptr()
