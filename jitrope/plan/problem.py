"""Tensors -> problem: a call in integers, its plan, and its kernel's arguments after the addresses.

Only shapes, strides and alignment are read, so the tensors may be on any device.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..base import config
from ..base.spec import ACCESS_BYTES
from . import arguments, heuristics, views
from .options import ALL_TOKENS, NormOptions, Options, norm_of
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

NARROW = 1 << 30
"""Strides below this many elements have at most 32 bits in bytes, also those of fp32."""
_OF_OPTIONS, _OF_NORM = (
    [name for name in words if name in heuristics.RopeProblem.__dataclass_fields__]
    for words in (Options._fields, NormOptions._fields[1:])
)
_PLANNED = ("head_dim", "q_per_group", "kv_per_group", "v_per_k", "batch", "tokens", "heads", "q_heads")
_COUNTED = ("tokens", "batch", "seqlen", "q_heads", "k_heads", "sequences")
"""Attributes of a call that are fields of a problem, and those that are words of the argument block."""


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
    """The views of a call, their strides, and its counts."""

    def __init__(self, inputs: Views, outputs: Views, tensors: Tensors, options: Options) -> None:
        self.inputs, self.tensors, self.options = inputs, tensors, options
        self.paged, self.cached = "page_table" in tensors, "page_table" in tensors or "slot_mapping" in tensors
        # No head of a missing k or v is read.
        self.views = [xs[0] if x is None else x for xs in (inputs, outputs) for x in xs]
        self.tables = _table_views(tensors, options, "")
        self.ids = views.ids_view(tensors["position_ids"], options) if "position_ids" in tensors else None
        self.second, self.grads = (
            [self._view(name) for name in names] if names[0] in tensors and options.norm else []
            for names in (("second_q", "second_k", "second_v"), ("dq", "dk", "dv")[: 2 + norm_of(options).v_norm])
        )
        given = [tensors[name] for name in ("q_scale_out", "k_scale_out", "v_scale_out") if name in tensors]
        self.scales = [
            x[:, None, :, None, None]  # (B, H)
            if options.per_row
            else views.head_view(x, "bhsd")  # tiles of (S, groups)
            if options.swizzled
            else views.head_view(x if options.group else x.unsqueeze(-1), options.layout)
            for x in given
        ]
        self._group()
        self.given_scales = [_scale_strides(tensors.get(f"{name}_scale")) for name in "qkv"]
        self.block_scales = [_block_scale_strides(tensors[name]) for name in BLOCK_SCALES if name in tensors]
        self.added = [*views.bias_views(tensors["bias"], tensors["qkv"], options)] if "bias" in tensors else []
        given = [tensors[name] for name in ("q_factor", *MEANS) if name in tensors]
        self.factors = [views.factor_view(x, self.views[3].shape[:2]) for x in given]
        if not self.second and not self.grads:
            self._merge_batch()
        self.sources = [*self.views[:3], *self.second] if self.second else []
        if "second_cos" in tensors:
            self.tables += _table_views(tensors, options, "second_")
        self.strides, self.source_strides, self.grad_strides, self.added_strides, self.table_strides = (
            [strides_of(x) for x in xs] for xs in (self.views, self.sources, self.grads, self.added, self.tables)
        )
        self.scale_strides, self.factor_strides = ([strides_of(x) for x in xs] for xs in (self.scales, self.factors))
        self.ids_strides = [0, 0, 0] if self.ids is None else [*strides_of(self.ids)[:2], self.ids.stride(2)]
        self.batch, self.seqlen, groups, self.q_per_group, _ = self.views[3].shape  # of both streams
        self.head_dim = self.views[0].shape[-1]  # an item of an output may hold two elements
        k_groups, self.kv_per_group = (0, 1) if inputs[1] is None else self.views[1].shape[2:4]
        self.q_heads, self.k_heads = groups * self.q_per_group, k_groups * self.kv_per_group
        self.tokens = self.batch * self.seqlen
        v_heads = 0 if inputs[2] is None else inputs[2].shape[2] * inputs[2].shape[3]
        v_heads = self.k_heads if options.v_dim else v_heads
        self.v_per_k = max(1, v_heads // max(1, self.k_heads))
        self.heads = self.q_heads + self.k_heads + v_heads
        self.heads += options.v_dim > 0 and options.inverse  # the sum over k's heads
        offsets = next((tensors[name] for name in ("cu_seqlens", "page_indptr") if name in tensors), None)
        rows = tensors.get("page_table" if "batch_indices" in tensors else "lengths", ())
        self.sequences = len(rows) if offsets is None else len(offsets) - 1
        self.pages, self.page_size = self.views[4].shape[:2] if self.cached else (0, 0)

    def _view(self, name: str) -> Tensor:
        return views.head_view(self.tensors[name], self.options.layout) if name in self.tensors else self.views[0]

    def _group(self) -> None:
        """Give all views of q the same groups of heads, and all of k and v."""
        of_kv = [n for n in (1, 2, 4, 5) if self.inputs[n % 3] is not None]
        for own, places in ((slice(1), [0, 3]), (slice(1, None), of_kv)):
            grads, scales = self.grads[own], self.scales[own]
            found = views.in_groups([*[self.views[n] for n in places], *grads, *scales])
            for n, view in zip(places, found):
                self.views[n] = view
            end = len(places) + len(grads)
            self.grads[own], self.scales[own] = found[len(places) : end], found[end:]

    def _merge_batch(self) -> None:
        """Merge the batch axis with the sequence axis if the results stay equal. The kernel then needs no division."""
        batch, seqlen = self.views[0].shape[:2]
        ids, shared = self.ids, len(self.tables[0]) == 1
        count = 4 if self.cached else 6  # the others are caches
        of_tokens = [*self.views[:count], *self.factors, *self.scales]
        counted = "start_positions" in self.tensors or 0 < self.options.unrotated < ALL_TOKENS
        counted |= self.options.per_row or self.options.swizzled or any(batch for batch, _ in self.given_scales)
        if batch == 1 or (ids is not None and not shared) or counted:
            return
        if ids is not None:
            ids = ids.expand(-1, batch, -1)
        if seqlen == 1:  # a decode step: the batch rows are the tokens
            of_tokens = [x.transpose(0, 1) for x in of_tokens]
            if ids is None:
                self.tables = [table[:, :1].transpose(0, 1).expand(-1, batch, -1, -1) for table in self.tables]
            self.ids = None if ids is None else ids.transpose(1, 2)
        elif ids is not None and all(x.stride(0) == x.shape[1] * x.stride(1) for x in (*of_tokens, ids[0])):
            of_tokens = [x.flatten(0, 1).unsqueeze(0) for x in of_tokens]
            self.ids = ids.flatten(1).unsqueeze(1)
        end = count + len(self.factors)
        self.views[:count], self.factors, self.scales = of_tokens[:count], of_tokens[count:end], of_tokens[end:]

    def problem(self, sm_count: int, memory_speed: float) -> heuristics.RopeProblem:
        o, table = self.options, self.tables[0]
        strides = [*self.strides, *self.source_strides, *self.grad_strides, *self.added_strides]
        beside = [*self.scale_strides, *self.block_scales, *self.factor_strides]
        steps = (*strides, *beside, *self.table_strides, self.ids_strides)
        table_step, table_vec_limit = _table_access(self.tables, self.table_strides)
        found: dict[str, Any] = {
            **{name: getattr(o, name) for name in _OF_OPTIONS},
            **{name: getattr(self, name) for name in _PLANNED},
            **{f"{x}_dtype": DTYPE_NAMES[self.tensors[x].dtype] if x in self.tensors else None for x in INDICES},
            **self._norm_fields(),
            "dtype": DTYPE_NAMES[self.views[0].dtype],
            "table_dtype": DTYPE_NAMES[table.dtype],
            "q_out": o.out_dtype if o.per_row else DTYPE_NAMES[self.views[3].dtype],
            "kv_out": o.out_dtype if o.per_row else DTYPE_NAMES[self.views[4].dtype],
            "dynamic": bool(self.scales or self.block_scales),
            "dynamic_q": bool(self.scales),
            "block_cache": bool(self.block_scales),
            "freqs": o.table == "freqs",
            "full_width": table.shape[-1] == o.rotary_dim,
            "per_head": any(step[2] for step in self.table_strides),
            "in_place": o.inplace,
            "page_size": self.page_size if self.pages > 1 or self.paged else 0,
            "page_indptr": "page_indptr" in self.tensors,
            "cu_seqlens_q": "cu_seqlens_q" in self.tensors,
            "batch_indices": "batch_indices" in self.tensors,
            "copy_v": self.inputs[2] is not None,
            "convert_v": views.converts_v(self.tensors, o.dynamic_v),
            "batch_inner": self.batch > 1 and self.seqlen > 1 and self.views[0].stride(0) < self.views[0].stride(1),
            "scales_q": "q_factor" in self.tensors,
            "prefixed": o.unrotated > 0,
            "head_scales": any(map(any, self.given_scales)),
            "added_bias": bool(self.added),
            "gated": bool(self.added) and o.order == "qkv_gated" and self.q_per_group == 2,
            "wide": max(table.shape[1], *(step for group in steps for step in group)) >= NARROW,
            "num_sequences": self.sequences,
            "vec_limit": elements_per_access([*self.views, *self.sources, *self.grads, *self.added], strides),
            "table_vec_limit": table_vec_limit,
            "table_step_limit": table_step,
            "batch_invariant": config.batch_invariant(),
            "sm_count": sm_count,
            "memory_speed": memory_speed,
        }
        if self.block_scales and not self.scales:  # scales of q are of the same kind
            form = views.block_format(self.tensors, self.head_dim, o)
            found.update(group=form.group if form.group < self.head_dim else 0, scale_out=form.scale_out)
        return heuristics.RopeProblem(**found)

    def _norm_fields(self) -> dict[str, Any]:
        norm = self.options.norm or NormOptions("", kind="")
        weights = [x for name, x in self.tensors.items() if name.endswith(("_weight", "_bias"))]
        across = views.sums_heads(self.tensors, self.options)
        rows = [x.shape[2] for x in self.inputs[:2] if x is not None] if across else []
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
            "two_streams": bool(self.second),
            "two_tables": len(self.tables) == 4,
            "gradient": bool(self.grads),
            "weight_vec_limit": math.gcd(min(limits), self.inputs[0].shape[-1]) if limits else 1,
        }

    def words(self, stages: Sequence[str]) -> list[int]:
        """The words of the argument block of a kernel with these stages."""
        norm = self.options.norm
        (scalars,) = struct.unpack("q", struct.pack("2f", self.options.mscale, norm.eps if norm else 0))
        given: dict[str, arguments.Word] = {
            "in_stride": self.strides[:3],
            "out_stride": self.strides[3:],
            "cos_stride": self.table_strides[0],
            "sin_stride": self.table_strides[1],
            "ids_stride": self.ids_strides,
            **{name: getattr(self, name) for name in _COUNTED},
            "table_rows": self.tables[0].shape[1],
            "cp_rank": self.options.cp_rank,
            "slot_count": self.pages * self.page_size,
            "scalars": scalars,
        }
        if norm:
            given["source_stride"] = self.source_strides or [0] * 30
            given["grad_stride"] = self.grad_strides[:2] or [0] * 10
            given["scale_stride"] = [*self.scale_strides, *[[0] * 5] * 2][:2]
            given["second_table_stride"] = self.table_strides[2:] or [0] * 8
            given["split"] = self.views[0].shape[1]
        means = self.factor_strides["q_factor" in self.tensors :]
        of_stages: dict[str, arguments.Word] = {
            "factor_stride": self.factor_strides[: len(self.factors) - len(means)],
            "mean_stride": [*means, *means][:2],
            "unrotated": self.options.unrotated,
            "added_stride": self.added_strides,
            "dv_stride": self.grad_strides[2:],
            "v_scale_stride": self.scale_strides[2:],
            "block_scale_stride": [*self.block_scales, [0] * 5][:2] if self.block_scales else 0,
            "scale_strides": self.given_scales if "head_scales" in stages else 0,
        }
        given.update({field: value for field, value in of_stages.items() if value})
        if self.paged:
            table = self.tensors["page_table"]
            given |= {"page_table_stride": table.stride(0), "page_table_width": table.shape[-1]}
            given |= {"page_count": self.pages, "new_tokens": max(1, self.tokens // max(1, self.sequences))}
        return arguments.words(given, norm=norm is not None, stages=stages)


def _table_views(tensors: Tensors, options: Options, stream: str) -> list[Tensor]:
    pair = views.table_pair(tensors[stream + "cos"], tensors.get(stream + "sin"), options.table)
    return [views.table_view(table) for table in pair]


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
    """The strides over batch rows and heads of a given scale: one number, (H) or (B, H)."""
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
