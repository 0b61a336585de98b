"""Tensors -> problem: a call in integers, its plan, and what its kernel is given beside addresses.

Looks at shapes, strides and alignment only, so the tensors may be on any device.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import heuristics
from .reference import canonical, table_view
from .spec import ACCESS_BYTES, Options

DTYPE_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "int32",
    torch.int64: "int64",
}


# ---- views of heads: (batch, seq, group, head of the group, dim) -------------------------------

Views = tuple[Tensor, "Tensor | None", "Tensor | None"]


def head_views(q: Tensor, k: Tensor | None, options: Options) -> tuple[Views, Views]:
    """The heads that a call of `rope` reads and those that it writes; a head is a group of its own."""
    outputs = (q, k)
    if not options.in_place:
        outputs = (torch.empty_like(q, device="meta"), None if k is None else torch.empty_like(k, device="meta"))
    views = [[None if x is None else canonical(x, options.layout).unsqueeze(3) for x in xs] for xs in ((q, k), outputs)]
    return (*views[0], None), (*views[1], None)  # type: ignore[return-value]


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


def empty_parts(qkv: Tensor, q_per_group: int, device: Any, values: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Fresh q, k and v of a packed tensor; without `values` v is the view."""
    *lead, groups, width = qkv.shape
    head_dim = width // (q_per_group + 2)
    q = torch.empty((*lead, groups * q_per_group, head_dim), dtype=qkv.dtype, device=device)
    k = torch.empty((*lead, groups, head_dim), dtype=qkv.dtype, device=device)
    return q, k, torch.empty_like(k) if values else value_view(qkv, q_per_group)


# ---- the plan ----------------------------------------------------------------------------------


def plan_call(
    inputs: Views,
    outputs: Views,
    cos: Tensor,
    sin: Tensor,
    cu_seqlens: Tensor | None,
    start_positions: Tensor | None,
    options: Options,
    sm_count: int,
) -> tuple[heuristics.Plan, list[int]] | None:
    """The plan of a call and its kernel's arguments after the addresses; None: nothing to do."""
    batch, seqlen, groups, q_per_group, head_dim = inputs[0].shape
    q_heads, k_heads = groups * q_per_group, 0 if inputs[1] is None else inputs[1].shape[2]
    tokens, heads = batch * seqlen, q_heads + k_heads * (2 if inputs[2] is not None else 1)
    if tokens * heads == 0:
        return None
    # No head of a missing k or v is read.
    views = [xs[0] if x is None else x for xs in (inputs, outputs) for x in xs]
    strides = [_strides(x) for x in views]
    tables = [_strides(table_view(table)) for table in (cos, sin)]
    problem = heuristics.RopeProblem(
        dtype=DTYPE_NAMES[inputs[0].dtype],
        table_dtype=DTYPE_NAMES[cos.dtype],
        head_dim=head_dim,
        rotary_dim=options.rotary_dim,
        rotary_offset=options.rotary_offset,
        interleaved=options.interleaved,
        interleaved_out=options.interleaved_out,
        conjugate=options.conjugate,
        angles=options.angles,
        full_width=cos.shape[-1] == options.rotary_dim,
        per_head=any(table[2] for table in tables),
        packed_table=options.packed_table,
        rounding=options.rounding,
        in_place=options.in_place,
        index_dtype=None if cu_seqlens is None else DTYPE_NAMES[cu_seqlens.dtype],
        start_dtype=None if start_positions is None else DTYPE_NAMES[start_positions.dtype],
        cp_size=options.cp_size,
        q_per_group=q_per_group,
        values=inputs[2] is not None,
        batch_inner=batch > 1 and seqlen > 1 and inputs[0].stride(0) < inputs[0].stride(1),
        tokens=tokens,
        heads=heads,
        num_sequences=0 if cu_seqlens is None else len(cu_seqlens) - 1,
        max_seqlen=options.max_seqlen,
        vec_limit=_elements_per_access(views, strides),
        table_vec_limit=_elements_per_access([cos, sin], tables),
        launch=options.launch,
        sm_count=sm_count,
    )
    table_rows = cos.shape[0] if cos.dim() == 2 else cos.shape[1]
    counts = [tokens, batch, seqlen, q_heads, k_heads, problem.num_sequences, table_rows, options.cp_rank]
    (mscale_bits,) = struct.unpack("q", struct.pack("2f", options.mscale, 0))
    words = [word for group in (*strides, *tables, counts) for word in group]
    return heuristics.plan(problem), [*words, mscale_bits]


def _strides(view: Tensor) -> list[int]:
    """In elements; 0 along an axis of size 1, where a table is shared, but 1 along the last."""
    strides = [0 if size == 1 else stride for size, stride in zip(view.shape, view.stride())]
    return [*strides[:-1], 1 if view.shape[-1] == 1 else strides[-1]]


def _elements_per_access(views: Sequence[Tensor], strides: Sequence[Sequence[int]]) -> int:
    """Elements that one aligned access may span, from addresses and strides; the last stride is the inner one."""
    size = views[0].element_size()
    if any(inner != 1 for *_, inner in strides):
        return 1
    steps = [stride * size for *outer, _ in strides for stride in outer]
    return max(1, math.gcd(ACCESS_BYTES, *steps, *map(_address, views)) // size)


def _address(x: Tensor) -> int:
    """Of the first element; within its allocation, which is aligned, where that is still to be made."""
    return int(x.storage_offset()) * x.element_size() if x.is_meta else x.data_ptr()
