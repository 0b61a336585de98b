"""Views of heads, tables and positions, in the order of axes that plans, kernels and the reference share."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from .layouts import LAYOUT_AXES, QKV_ORDERS, Words
from .spec import ACCESS_BYTES

FP8 = torch.float8_e4m3fn


class Format(NamedTuple):
    """Elements that are stored divided by a scale: their dtype, its largest number, and the elements in an item."""

    dtype: torch.dtype
    largest: float
    per_item: int = 1


FORMATS = {
    "fp8": Format(FP8, 448.0),
    "fp8_e5m2": Format(torch.float8_e5m2, 57344.0),
    "int8": Format(torch.int8, 127.0),
    "fp4": Format(getattr(torch, "float4_e2m1fn_x2", torch.uint8), 6.0, 2),
}
"""The formats by their words; before torch 2.8 fp4 is bytes."""
DTYPE_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
DTYPE_NAMES |= {torch.int32: "int32", torch.int64: "int64", **{form.dtype: name for name, form in FORMATS.items()}}
PER_ITEM = {form.dtype: form.per_item for form in FORMATS.values()}
E8M0: torch.dtype = getattr(torch, "float8_e8m0fnu", torch.uint8)  # powers of two; before torch 2.7 their bytes
SCALES = {"fp32": torch.float32, "e8m0": E8M0, "fp8": FP8}
"""The dtypes of dynamic scales by the words of `SCALE_DTYPES`, without "e8m0_fp32", powers of two in fp32."""
GROUPS = (16, 32, 64, 128)  # numbers of neighbouring elements of a head that may share a scale
BLOCK_SCALES = ("k_block_scale", "v_block_scale")
"""Computed scales beside a cache."""
FP8S = tuple(form.dtype for name, form in FORMATS.items() if name.startswith("fp8"))
"""The dtypes with scales of the caller."""
Tensors = dict[str, Tensor]  # a call's tensors by the names of their arguments, without those that were not given
Views = tuple[Tensor, "Tensor | None", "Tensor | None"]
"""The heads of q, k and v, each (batch, seq, group, head of the group, dim)."""
HEADS = ("q", "k", "v", "q_out", "k_out", "v_out")
TABLE_NAMES = ("cos", "sin", "cu_seqlens", "start_positions", "position_ids", "q_factor")
"""The tables, the tokens' positions in them, and the scale of q. Without sin, cos is a single table of the kind
`Options.table`."""
MEANS = ("q_mean_square", "k_mean_square")  # given means of squares of a norm across heads, (B, S)


def canonical(x: Tensor, layout: str) -> Tensor:
    """A (batch, seq, head, dim) view of a tensor in `layout`."""
    batch, *rest = LAYOUT_AXES[layout]
    return x.unsqueeze(0) if batch is None else x.permute(batch, *rest)


def by_rank(x: Tensor, layout: str, ranks: int) -> Tensor:
    """A (ranks, ..., heads / ranks, dim) view of a tensor in `layout`."""
    axis = LAYOUT_AXES[layout][2]
    return torch.movedim(x.unflatten(axis, (ranks, -1)), axis, 0)


def joined(x: Tensor, layout: str) -> Tensor:
    """A tensor in `layout`, also from (ranks, ..., heads / ranks, dim)."""
    axis = LAYOUT_AXES[layout][2]
    return x if x.dim() == len(layout) else torch.flatten(x.movedim(0, axis), axis, axis + 1)


def table_view(table: Tensor) -> Tensor:
    """A (batch, position, head, width) view of a table with 2, 3 or 4 axes."""
    heads = table if table.dim() == 4 else table.unsqueeze(-2)
    return heads if heads.dim() == 4 else heads[None]


def per_head(table: Tensor) -> bool:
    """Whether a table has entries for each head."""
    return table.dim() == 4 and table.shape[2] != 1


def table_pair(cos: Tensor, sin: Tensor | None, table: str) -> tuple[Tensor, Tensor]:
    """cos and sin as two views; for freqs both are the angles. `table` is a word of `options.TABLES`."""
    sin = cos if sin is None else sin
    if table == "cos_sin_cache":
        half = cos.shape[-1] // 2
        return cos[..., :half], sin[..., half:]
    if table == "freqs_cis":
        real, imag = (torch.view_as_real(x.resolve_conj()) for x in (cos, sin))
        return real[..., 0], imag[..., 1]
    return cos, sin


def head_view(x: Tensor, layout: str) -> Tensor:
    """The heads of a tensor in `layout`. Each is a group; with another axis in front those of a rank are."""
    batch, *rest = LAYOUT_AXES[layout]
    if x.dim() == len(layout):
        return (x.unsqueeze(0) if batch is None else x.permute(batch, *rest)).unsqueeze(3)
    seq, head, dim = (axis + 1 for axis in rest)
    return x.permute(seq, 0, head, dim).unsqueeze(0) if batch is None else x.permute(batch + 1, seq, 0, head, dim)


def cache_view(cache: Tensor, paged: bool = False) -> Tensor:
    """The heads of a cache (slots, H, D) or (pages, rows, H, D). Pages become the batch axis if needed, or if paged."""
    if not paged and cache.dim() == 4 and cache.stride(0) == cache.shape[1] * cache.stride(1):
        cache = cache.flatten(0, 1)
    return (cache if cache.dim() == 4 else cache.unsqueeze(0)).unsqueeze(3)


def factor_view(q_factor: Tensor, shape: tuple[int, ...] = (-1, -1)) -> Tensor:
    """A (batch, seq, 1, 1, 1) view of a scale of q, one number, (S) or (B, S), expanded to a shape (batch, seq)."""
    both = q_factor.reshape((1,) * (2 - q_factor.dim()) + tuple(q_factor.shape))
    return both.expand(shape)[..., None, None, None]


# ---- fused QKV ------------------------------------------------------------------------------------


def heads_per_group(options: Words) -> int:
    """The number of heads of q, with their gates, of k and of v for each head of k in fused QKV."""
    return options.q_per_group * QKV_ORDERS[options.order] + 2


def fused_sizes(qkv: Tensor, options: Words) -> tuple[int, int]:
    """(groups, head_dim) of a fused tensor; a group is a head of k."""
    (*_, heads, width), per_group = qkv.shape, heads_per_group(options)
    return (heads, width // per_group) if options.order == "grouped" else (heads // per_group, width)


def fused_shape(groups: int, head_dim: int, options: Words) -> tuple[int, int]:
    """The last two axes of a fused tensor, the inverse of `fused_sizes`."""
    per_group = heads_per_group(options)
    return (groups, per_group * head_dim) if options.order == "grouped" else (groups * per_group, head_dim)


def fused_part(qkv: Tensor, name: str, options: Words) -> Tensor:
    """q, k, v or the gate inside a fused tensor, (..., heads, D); q of the order "grouped" is (..., G, heads, D)."""
    n, each = options.q_per_group, QKV_ORDERS[options.order]
    if options.order == "grouped":
        heads: Tensor = qkv.unflatten(-1, (n + 2, -1))
        return heads[..., :n, :] if name == "q" else heads[..., ("k", "v").index(name) - 2, :]
    groups, _ = fused_sizes(qkv, options)
    end = groups * n * each
    of_q = {"q": slice(0, end, each), "gate": slice(1, end, each)}
    return qkv[..., {**of_q, "k": slice(end, end + groups), "v": slice(end + groups, None)}[name], :]


def fused_views(qkv: Tensor, options: Words, with_gate: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """The heads of q, k and v inside a fused tensor, (batch, seq, group, head of the group, dim).

    with_gate: a gate is the second head of its head of q.
    """
    whole = canonical(qkv, options.layout)
    q, k, v = (fused_part(whole, name, options) for name in "qkv")
    if with_gate and options.order == "qkv_gated":
        q = whole[..., : 2 * q.shape[-2], :].unflatten(-2, (-1, 2))
    return q if q.dim() == 5 else q.unsqueeze(3), k.unsqueeze(3), v.unsqueeze(3)


def bias_like(bias: Tensor, qkv: Tensor) -> Tensor:
    """A projection's bias with the last two axes of the projection's output."""
    return bias.unflatten(0, qkv.shape[-2:]) if bias.dim() == 1 else bias


def bias_views(bias: Tensor, qkv: Tensor, options: Words, with_gate: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """The views of a bias as one token of its fused tensor."""
    return fused_views(bias_like(bias, qkv)[(None,) * (qkv.dim() - 2)], options, with_gate)


# ---- strides ----------------------------------------------------------------------------------------


def strides_of_axes(x: Tensor) -> list[int]:
    """Strides in elements. An axis of size 1 is shared, so its stride is 0."""
    return [0 if size == 1 else stride for size, stride in zip(x.shape, x.stride())]


def strides_of(view: Tensor) -> list[int]:
    """The strides of heads or of a table. The last axis has 1 if its size is 1."""
    return [*strides_of_axes(view)[:-1], 1 if view.shape[-1] == 1 else view.stride(-1)]


def elements_per_access(tensors: Iterable[Tensor], apart: int = 1) -> int:
    """Elements that one aligned access may span, by addresses and strides, which count items.

    apart: the step from one element to the next. It is 2 for complex and repeated tables: an access then loads both
    neighbours and uses one. The result is 0 if that is not possible. The address of a meta tensor is the offset in its
    storage, which will be aligned.
    """
    limits = []
    for x in tensors:
        (*outer, inner), size = strides_of(x), x.element_size()
        address = int(x.storage_offset()) * size if x.is_meta else x.data_ptr()
        span = apart * size
        aligned = math.gcd(ACCESS_BYTES, *(stride * size for stride in outer), address // span * span)
        limits.append(aligned // span * PER_ITEM.get(x.dtype, 1) if inner == apart else 0)
    return min(limits) or int(apart == 1)
