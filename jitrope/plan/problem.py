"""Tensors -> problem: a call in integers, its plan, and its kernel's arguments after the addresses.

Only shapes, strides and alignment are read, so the tensors may be on any device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

from torch import Tensor

from ..base import config, views
from ..base.views import BLOCK_SCALES, DTYPE_NAMES, HEADS, MEANS, Tensors, Views, elements_per_access, strides_of
from ..stages import norm, positions, rotate
from ..stages.convert import block_format, converts_v
from . import arguments, heuristics
from .options import Options
from .spec import GIVEN, INDICES

NARROW = 1 << 30  # strides below this many elements have at most 32 bits in bytes, also those of fp32
_SCALES, _FACTORS = ("q_scale_out", "k_scale_out", "v_scale_out", "q_weights"), ("q_factor", *MEANS)


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
    """The views of a call by the names of their tensors, their strides, and its counts.

    A count has the name of the problem's field and of the argument.
    """

    def __init__(self, inputs: Views, outputs: Views, tensors: Tensors, options: Options) -> None:
        self.inputs, self.tensors, self.options = inputs, tensors, options
        self.paged = "page_table" in tensors
        self.cached = self.paged or "slot_mapping" in tensors
        self.projected = "x" in tensors
        self.ids = positions.ids_view(tensors["position_ids"], options) if "position_ids" in tensors else None
        self.tables: Tensors = {}
        for stream in [x for x in ("", "second_") if x + "cos" in tensors]:
            pair = views.table_pair(tensors[stream + "cos"], tensors.get(stream + "sin"), options.table)
            self.tables |= {stream + name: views.table_view(x) for name, x in zip(("cos", "sin"), pair)}
        self.named = {name: x for name, x in zip(HEADS, (*inputs, *outputs)) if x is not None}
        grads = ("dq", "dk", "dv")[: 2 + options.v_norm] if options.norm_kind else ()
        beside = [name for name in (*grads, "second_q", "second_k", "second_v") if name in tensors]
        self.named |= {name: views.head_view(tensors[name], options.layout) for name in beside}
        self.named |= {name: _scale_view(tensors[name], options) for name in _SCALES if name in tensors}
        if self.projected:
            self.named["x"] = views.head_view(tensors["x"].unsqueeze(-2), options.layout)
            self.in_features, self.x_stride = tensors["x"].shape[-1], tensors["x"].flatten(0, -2).stride(0)
        self.gated = options.order == "qkv_gated" and inputs[0].shape[3] == 2
        if "bias" in tensors:
            added = views.bias_views(tensors["bias"], tensors["qkv"], options, self.gated)
            self.named |= {f"{letter}_added": x for letter, x in zip("qkv", added)}
        for letters in ("q", "kv"):  # all in the groups of one of them
            names = [name for name in self.named if name.removeprefix("second_").removeprefix("d")[0] in letters]
            groups = next((self.named[name].shape[2] for name in names if self.named[name].shape[3] > 1), 0)
            for name in [name for name in names if groups and self.named[name].shape[2] != groups]:
                self.named[name] = self.named[name].squeeze(3).unflatten(2, (groups, -1))
        scales = [f"{letter}_scale" for letter in "qkv" if f"{letter}_scale" in tensors]
        self.given_scales = {name: [0, 0, *views.strides_of_axes(tensors[name])][-2:] for name in scales}
        shape = self.named["q_out"].shape[:2]
        self.named |= {name: views.factor_view(tensors[name], shape) for name in _FACTORS if name in tensors}
        if not beside:
            self._merge_batch()
        if "second_q" in tensors:
            self.named |= {f"first_{name}": self.named[name] for name in "qkv"}
        ids = {} if self.ids is None else {"position_ids": self.ids}
        self.strides = {name: strides_of(x) for name, x in {**self.named, **self.tables, **ids}.items()}
        self.strides |= {name: _block_scale_strides(tensors[name]) for name in BLOCK_SCALES if name in tensors}
        self._count()

    def _merge_batch(self) -> None:
        """Merge the batch axis with the sequence axis if the results stay equal. The kernel then needs no division."""
        o, tables, (batch, seqlen) = self.options, self.tables, self.named["q"].shape[:2]
        ids = None if self.ids is None else self.ids.expand(-1, batch, -1)
        others = ("q_added", "k_added", "v_added", *(("k_out", "v_out") if self.cached else ()))
        of_tokens = {name: x for name, x in self.named.items() if name not in others}
        counted = positions.counted(self.tensors, o) or o.per_row or o.swizzled
        counted |= any(row for row, _ in self.given_scales.values())
        if batch == 1 or (ids is not None and len(tables["cos"]) > 1) or counted:
            return
        if seqlen == 1:  # a decode step: the batch rows are the tokens
            self.named |= {name: x.transpose(0, 1) for name, x in of_tokens.items()}
            if ids is None:
                self.tables = {name: x[:, :1].transpose(0, 1).expand(-1, batch, -1, -1) for name, x in tables.items()}
            self.ids = None if ids is None else ids.transpose(1, 2)
        elif ids is not None and all(x.stride(0) == x.shape[1] * x.stride(1) for x in (*of_tokens.values(), ids[0])):
            self.named |= {name: x.flatten(0, 1).unsqueeze(0) for name, x in of_tokens.items()}
            self.ids = ids.flatten(1).unsqueeze(1)

    def _count(self) -> None:
        (q, k, v), o, t = self.inputs, self.options, self.tensors
        self.batch, self.seqlen, groups, self.q_per_group, _ = self.named["q_out"].shape  # of both streams
        self.head_dim = q.shape[-1]  # an item of an output may hold two elements
        k_groups, self.kv_per_group = (0, 1) if k is None else self.named["k"].shape[2:4]
        self.q_heads, self.k_heads = groups * self.q_per_group, k_groups * self.kv_per_group
        self.tokens, self.table_rows = self.batch * self.seqlen, self.tables["cos"].shape[1]
        self.split = self.named["q"].shape[1]
        v_heads = self.k_heads if o.v_dim else 0 if v is None else v.shape[2] * v.shape[3]
        self.v_per_k = max(1, v_heads // max(1, self.k_heads))
        self.heads = self.q_heads + self.k_heads + v_heads + (o.v_dim > 0 and o.inverse)  # the sum over k's heads
        offsets = t.get("cu_seqlens", t.get("page_indptr"))
        rows = t.get("page_table" if "batch_indices" in t else "lengths", ())
        self.sequences = len(rows) if offsets is None else len(offsets) - 1
        self.page_count, slots = self.named["k_out"].shape[:2] if self.cached else (0, 0)
        self.slot_count = self.page_count * slots
        self.page_size = slots if self.page_count > 1 or self.paged else 0

    def problem(self, sm_count: int, memory_speed: float) -> heuristics.RopeProblem:
        o, t, named = self.options, self.tensors, self.named
        table, tables, q_out = self.tables["cos"], self.tables.values(), named["q_out"]
        pairs, read = elements_per_access(tables, apart=2), named.get("x", named["q"])
        accessed = {name: x for name, x in named.items() if not (self.projected and name in "qkv")}
        of_norm = norm.fields(t, self.inputs[:2], o)
        words = {**o._asdict(), **of_norm, **vars(self), **rotate.fields(self.tables, o)}
        found: dict[str, Any] = {
            **{name: x for name, x in words.items() if name in heuristics.RopeProblem.__dataclass_fields__},
            **{f"{x}_dtype": DTYPE_NAMES[t[x].dtype] if x in t else None for x in INDICES},
            **{name: given in t or bool(words.get(given)) for name, given in GIVEN.items()},
            "dtype": DTYPE_NAMES[named["q"].dtype],
            "q_out": o.out_dtype if o.per_row else DTYPE_NAMES[q_out.dtype],
            "kv_out": o.out_dtype if o.per_row else DTYPE_NAMES[named.get("k_out", q_out).dtype],
            "pe_dtype": DTYPE_NAMES[t["k_pe_cache"].dtype] if "k_pe_cache" in t else None,
            "dynamic": not self.strides.keys().isdisjoint((*_SCALES, *BLOCK_SCALES)),
            "in_place": o.inplace,
            "copy_v": self.inputs[2] is not None,
            "convert_v": converts_v(t, o.dynamic_v),
            "batch_inner": self.batch > 1 and self.seqlen > 1 and read.stride(0) < read.stride(1),
            "head_scales": any(map(any, self.given_scales.values())),
            "gradient": "dq" in named,
            "wide": max(table.shape[1], *chain(*self.strides.values())) >= NARROW,
            "vec_limit": elements_per_access([x for name, x in accessed.items() if name not in (*_SCALES, *_FACTORS)]),
            "table_vec_limit": pairs or elements_per_access(tables),
            "table_step_limit": 2 if pairs else 1,
            "weight_vec_limit": math.gcd(of_norm["weight_vec_limit"], self.head_dim),
            "batch_invariant": config.batch_invariant(),
            "sm_count": sm_count,
            "memory_speed": memory_speed,
        }
        if found["block_cache"] and not found["dynamic_q"]:  # scales of q are of the same kind
            _, group, scale_out = block_format(t, o)
            found.update(group=group % self.head_dim, scale_out=scale_out)
        return heuristics.RopeProblem(**found)

    def words(self, stages: Sequence[str]) -> list[int]:
        """The words of the argument block of a kernel with these stages."""
        given: dict[str, Any] = {**self.options._asdict(), **vars(self), **self.strides, **self.given_scales}
        if self.paged:
            table = self.tensors["page_table"]
            given.update(page_table_stride=table.stride(0), page_table_width=table.shape[-1])
            given["new_tokens"] = max(1, self.tokens // max(1, self.sequences))
        return arguments.words(given, stages)


def _scale_view(scale: Tensor, options: Options) -> Tensor:
    """The view of scales that the kernel computes, with the axes of heads."""
    if options.per_row:  # (B, H) or (N, H)
        return scale[:, None, :, None, None]
    layout = "bhsd" if options.swizzled else options.layout  # tiles of (S, groups)
    return views.head_view(scale if options.group else scale.unsqueeze(-1), layout)


def _block_scale_strides(scale: Tensor) -> list[int]:
    """The strides over pages, four rows, heads, a row and groups.

    scale: (slots, H, G), (pages, rows, H, G), or (pages, rows / 4, 4, H, G).
    """
    page, *rows, head, group = scale.stride() if scale.dim() > 3 else (0, *scale.stride())
    return [page, 4 * rows[0] if len(rows) == 1 else rows[0], head, rows[-1], group]
