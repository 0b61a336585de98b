"""Every op in plain torch: the oracle of the tests, and the path that CPU tensors take."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..plan import partition
from ..plan.spec import LAYOUT_AXES, NormOptions, Options, changed
from ..plan.views import FP8, Tables, Weights, canonical, ids_view, table_pair, table_view

FP8_MAX = 448.0
RULE = "dual_chunk"
"""Of `partition`: how rope's context parallelism cuts sequences."""


def axis_of_pairs(options: Options, device: torch.device) -> Tensor:
    """Which axis of position_ids turns a pair: sections one after the other, or every so many-th pair."""
    pair = torch.arange(options.rotary_dim // 2, device=device)
    sections = torch.tensor(options.mrope_section, device=device)
    if options.mrope_interleaved:
        axis = pair % len(sections)
        return torch.where(pair < len(sections) * sections[axis], axis, 0)
    return torch.searchsorted(sections.cumsum(0), pair, right=True)


def local_positions(index: Tensor, first: Tensor | int, end: Tensor | int, cp_size: int, cp_rank: int) -> Tensor:
    """Positions in their sequences of a rank's tokens, the index-th ones that it has of each.

    A sequence owns the tokens [first, end) of the batch and is cut into 2 cp_size chunks (`partition`); a rank
    has chunks cp_rank and 2 cp_size - 1 - cp_rank.
    """
    if cp_size == 1:
        return index
    of = partition.number_of_chunks(cp_size, RULE)
    head, tail = partition.chunks_of(cp_rank, cp_size, RULE)
    size = partition.count(end, head, of) - partition.count(first, head, of)
    begins = [partition.before(end, chunk, of) - partition.before(first, chunk, of) for chunk in (head, tail)]
    return torch.where(index < size, begins[0] + index, begins[1] + index - size)


def table_rows(
    tokens: int,
    device: torch.device,
    cu_seqlens: Tensor | None,
    start_positions: Tensor | None,
    position_ids: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor | None]:
    """(row of the table for each token, (axes, batch or 1, tokens); which tokens are after the last sequence)."""
    if position_ids is not None:
        return ids_view(position_ids, options).long(), None
    rows, spare = _counted_rows(tokens, device, cu_seqlens, start_positions, options)
    return rows[None], spare


def _counted_rows(
    tokens: int, device: torch.device, cu_seqlens: Tensor | None, start_positions: Tensor | None, options: Options
) -> tuple[Tensor, Tensor | None]:
    index = torch.arange(tokens, device=device)
    if cu_seqlens is None:
        rows = local_positions(index, 0, tokens * options.cp_size, options.cp_size, options.cp_rank)[None]
        return (rows if start_positions is None else rows + start_positions[:, None]), None
    ends = cu_seqlens.long()
    offsets = partition.local_rows(ends, options.cp_rank, options.cp_size, RULE)
    sequence = torch.searchsorted(offsets[1:].contiguous(), index, right=True)
    spare = sequence == len(offsets) - 1
    if len(offsets) == 1:
        return index[None], spare
    sequence = sequence.clamp(max=len(offsets) - 2)
    first, end = ends[sequence], ends[sequence + 1]
    rows = local_positions(index - offsets[sequence], first, end, options.cp_size, options.cp_rank)
    if start_positions is not None:
        rows = rows + start_positions[sequence]
    if options.packed_table:
        rows = rows + first
    return rows[None], spare


def rope(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor | None,
    cu_seqlens: Tensor | None,
    start_positions: Tensor | None,
    position_ids: Tensor | None,
    options: Options,
    compute_dtype: torch.dtype = torch.float32,
    out_dtype: torch.dtype | None = None,
    storage: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Fresh rotated tensors: y0 = x0 cos - x1 sin, y1 = x1 cos + x0 sin, rounded as `options.rounding` says.

    Products and the sum round apart, as torch's real multiplies do; complex multiplies and the fused product of
    "addcmul" are left to torch's own. storage: q's dtype, where q is fp32 on its way there.
    """
    rounded_to = (storage or q.dtype) if options.rounding == "dtype" and compute_dtype == torch.float32 else None
    if options.rounding == "complex128":
        compute_dtype = torch.float64
    outputs: list[Tensor | None] = []
    for x in (q, k):
        if x is None:
            outputs.append(None)
            continue
        out = torch.empty_like(x, dtype=out_dtype or x.dtype)
        view = canonical(out, options.layout)
        c, s = (table_view(table).to(compute_dtype) for table in table_pair(cos, sin, options.table))
        if options.table == "freqs":
            c, s = c.cos() * options.mscale, s.sin() * options.mscale
        if rounded_to is not None:
            c, s = c.to(rounded_to), s.to(rounded_to)
        rows, spare = table_rows(view.shape[1], c.device, cu_seqlens, start_positions, position_ids, options)
        c, s = _gather(c, rows, options), _gather(s, rows, options)
        y = _rotate(canonical(x, options.layout).to(compute_dtype), c, s, options)
        view.copy_(y.float() if options.rounding == "complex128" else y)
        if spare is not None:
            view[:, spare] = 0
        outputs.append(out)
    return outputs[0], outputs[1]  # type: ignore[return-value]


# ---- RMSNorm before the rotation -----------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor | None, norm: NormOptions, layout: str) -> Tensor:
    """x / sqrt(mean(x^2) + eps) times weight, over each head or over all heads of a token; the mean in fp32.

    In fp32 with norm.rounding "none", else in x's dtype: with "once" what torch.nn.RMSNorm gives, with
    "twice" what transformers' and diffusers' own RMSNorm do, bit for bit.
    """
    view = canonical(x, layout)
    rows = view.flatten(-2) if norm.across_heads else view
    plain = not norm.zero_centered and (weight is None or weight.dtype == x.dtype)
    if norm.rounding == "once" and plain:
        y = torch.nn.functional.rms_norm(rows, rows.shape[-1:], weight, norm.eps)
    else:
        y = rows.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + norm.eps)
        if norm.rounding == "twice":
            y = y.to(x.dtype)
        if weight is not None:
            y = y * (weight.float() + norm.zero_centered)
        if norm.rounding != "none":
            y = y.to(x.dtype)
    y = _as_laid_out(y.view(view.shape), layout)
    return torch.empty_like(x, dtype=y.dtype).copy_(y)


def qk_norm_rope(
    q: Tensor, k: Tensor | None, q_weight: Tensor | None, k_weight: Tensor | None, tables: Tables, options: Options,
    norm: NormOptions,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """q and k normalised and rotated, of q's dtype."""
    normed = [
        None if x is None else rms_norm(x, weight, norm, options.layout) for x, weight in ((q, q_weight), (k, k_weight))
    ]
    outputs = rope(*normed, *tables, options, out_dtype=q.dtype, storage=q.dtype)  # type: ignore[arg-type,call-arg,misc]
    return outputs


def qk_norm_rope_joint(
    first: Sequence[Tensor], second: Sequence[Tensor], first_weights: Weights, second_weights: Weights, tables: Tables,
    options: Options, norm: NormOptions, second_tables: Sequence[Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """q, k and v of two streams, one behind the other along the sequence; q and k normalised, then rotated.

    The second stream's tables are its own, or the rows of the first's behind the first stream's.
    """
    cos, sin = second_tables
    if cos is None:
        begin = first[0].shape[1]
        cos, sin = (None if x is None else x[begin:] if x.dim() == 2 else x[:, begin:] for x in tables[:2])
    own = Tables(cos, sin)  # type: ignore[arg-type]
    parts = []
    for (q, k, v), (q_weight, k_weight), rows in ((first, first_weights, tables), (second, second_weights, own)):
        parts.append((*qk_norm_rope(q, k, q_weight, k_weight, rows, options, norm), v))
    q, k, v = (torch.cat([x.contiguous() for x in pair], 1) for pair in zip(*parts))  # type: ignore[union-attr]
    return q, k, v


def qk_norm_rope_backward(
    dq: Tensor, dk: Tensor | None, q: Tensor, k: Tensor | None, q_weight: Tensor | None, k_weight: Tensor | None,
    tables: Tables, options: Options, norm: NormOptions,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients of q, k and their weights, in fp32 up to the last rounding; `options` rotate back."""
    rotated = rope(dq, dk, *tables, changed(options, rounding="fp32"), out_dtype=torch.float32)
    grads: list[Tensor | None] = []
    weight_grads: list[Tensor | None] = []
    for x, g, weight in ((q, rotated[0], q_weight), (k, rotated[1], k_weight)):
        if x is None or g is None:
            grads.append(None)
            weight_grads.append(None)
            continue
        rows, g = canonical(x, options.layout).float(), canonical(g, options.layout)
        if norm.across_heads:
            rows, g = rows.flatten(-2), g.flatten(-2)
        scale = torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + norm.eps)
        normed = rows * scale
        dw = None if weight is None else (g * normed).sum(tuple(range(g.dim() - 1))).to(weight.dtype)
        if weight is not None:
            g = g * (weight.float() + norm.zero_centered)
        dx = scale * (g - normed * (g * normed).mean(-1, keepdim=True))
        dx = _as_laid_out(dx.view(canonical(x, options.layout).shape), options.layout)
        grads.append(torch.empty_like(x).copy_(dx))
        weight_grads.append(dw)
    return *grads, *weight_grads


def _as_laid_out(view: Tensor, layout: str) -> Tensor:
    """The inverse of `canonical`."""
    batch, *rest = LAYOUT_AXES[layout]
    if batch is None:
        return view[0]
    order = (batch, *rest)
    return view.permute([order.index(axis) for axis in range(4)])


def to_fp8(y: Tensor, scale: Tensor) -> Tensor:
    """y / scale as e4m3, at most 448 in size: fp32 times the fp32 reciprocal, rounded once."""
    return (y.float() * (1 / scale)).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def rope_fp8(
    q: Tensor, k: Tensor | None, q_scale: Tensor, k_scale: Tensor | None, tables: Tables, options: Options
) -> tuple[Tensor, Tensor | None]:
    """q and k rotated, divided by their scales, as e4m3."""
    q_out, k_out = rope(q, k, *tables, options, out_dtype=torch.float32)
    return to_fp8(q_out, q_scale), None if k_out is None else to_fp8(k_out, k_scale)  # type: ignore[arg-type]


def rope_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    tables: Tables,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """q and k rotated, q as fp8 if asked; k and v are stored at their slots of caches (slots, heads, dim) or
    (pages, rows, heads, dim)."""
    q_out, k_out = rope(q, k, *tables, options)
    q_exact, k_exact = rope(q, k, *tables, options, out_dtype=torch.float32)
    slots = slot_mapping.flatten().long()
    page_size = k_cache.shape[1] if k_cache.dim() == 4 else 1
    kept = (slots >= 0) & (slots < k_cache.shape[0] * page_size)
    page, row = slots[kept] // page_size, slots[kept] % page_size
    at = (page, row) if k_cache.dim() == 4 else (page,)
    for cache, x, exact, scale in ((k_cache, k_out, k_exact, k_scale), (v_cache, v, v, v_scale)):
        stored: Tensor = to_fp8(exact, scale) if cache.dtype == FP8 else x  # type: ignore[arg-type, assignment]
        bits = torch.uint8 if cache.dtype == FP8 else cache.dtype  # there is no index_put for fp8
        cache.view(bits)[at] = canonical(stored.view(bits), options.layout).flatten(0, 1)[kept]
    return to_fp8(q_exact, q_scale) if q_scale is not None else q_out, k_out  # type: ignore[arg-type,return-value]


def rope_qkv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor | None,
    cu_seqlens: Tensor | None,
    start_positions: Tensor | None,
    position_ids: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor]:
    """Packed QKV (..., groups, (q_per_group + 2) head_dim) -> fresh q, k, rotated, and v."""
    q, k, v = split_qkv(qkv, options.q_per_group)
    q, k = rope(q.contiguous(), k.contiguous(), cos, sin, cu_seqlens, start_positions, position_ids, options)  # type: ignore[assignment]
    return q, k, v.clone(memory_format=torch.contiguous_format)


def rope_qkv_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cos: Tensor,
    sin: Tensor | None,
    cu_seqlens: Tensor | None,
    start_positions: Tensor | None,
    position_ids: Tensor | None,
    options: Options,
) -> Tensor:
    """The other way: one packed tensor."""
    tables = (cos, sin, cu_seqlens, start_positions, position_ids)
    q, k = rope(dq.contiguous(), dk.contiguous(), *tables, options)
    return join_qkv(q, k, dv.contiguous(), options.q_per_group)  # type: ignore[arg-type]


def split_qkv(qkv: Tensor, q_per_group: int) -> tuple[Tensor, Tensor, Tensor]:
    """(..., groups, (q_per_group + 2) head_dim) -> q (a copy where there are several groups), k and v (views)."""
    packed = qkv.unflatten(-1, (q_per_group + 2, -1))
    return packed[..., :q_per_group, :].flatten(-3, -2), packed[..., -2, :], packed[..., -1, :]


def join_qkv(q: Tensor, k: Tensor, v: Tensor, q_per_group: int) -> Tensor:
    """The inverse of `split_qkv`."""
    return torch.cat((q.unflatten(-2, (-1, q_per_group)), k.unsqueeze(-2), v.unsqueeze(-2)), -2).flatten(-2)


def _gather(table: Tensor, rows: Tensor, options: Options) -> Tensor:
    """The table's rows, (batch, token, head, width), each pair's of its axis; NaN where one is outside."""
    outside = ((rows < 0) | (rows >= table.shape[1])).any(0)
    found = [_rows_of(table, axis.masked_fill(outside, 0)) for axis in rows]
    gathered = found[0]
    if len(found) > 1:
        axis_of = axis_of_pairs(options, table.device)
        if table.shape[-1] == options.rotary_dim:
            axis_of = axis_of.repeat_interleave(2) if options.interleaved else axis_of.repeat(2)
        for axis in range(1, len(found)):
            gathered = torch.where(axis_of == axis, found[axis], gathered)
    return gathered.masked_fill(outside[..., None, None], float("nan"))


def _rows_of(table: Tensor, rows: Tensor) -> Tensor:
    if len(rows) == 1:
        return table[:, rows[0]]
    return table.expand(len(rows), -1, -1, -1)[torch.arange(len(rows), device=rows.device)[:, None], rows]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, options: Options) -> Tensor:
    """x (batch, seq, head, head_dim), tables broadcastable to it up to the last axis."""
    o = options
    end = o.rotary_offset + o.rotary_dim
    before, turned, rest = x[..., : o.rotary_offset], x[..., o.rotary_offset : end], x[..., end:]
    x0, x1 = _members(turned, o.interleaved)
    full = cos.shape[-1] == o.rotary_dim
    cos0, cos1 = _members(cos, o.interleaved) if full else (cos, cos)
    sin0, sin1 = _members(sin, o.interleaved) if full else (sin, sin)
    if o.inverse:  # the transpose: each sine is read at the partner
        sin0, sin1 = -sin1, -sin0
    if o.rounding.startswith("complex") and not full:  # torch's own, whose last pairs of a row may round apart
        turned = torch.complex(x0, x1) * torch.complex(cos0, sin0)
        y0, y1 = turned.real, turned.imag
    else:
        y0 = _sum_of_products(x0, cos0, x1, -sin0, o.rounding)
        y1 = _sum_of_products(x1, cos1, x0, sin1, o.rounding)
    y = torch.stack((y0, y1), -1).flatten(-2) if o.interleaved_out else torch.cat((y0, y1), -1)
    return torch.cat((before, y, rest), -1)


def _sum_of_products(a: Tensor, b: Tensor, c: Tensor, d: Tensor, rounding: str) -> Tensor:
    """a b + c d; with "dtype" the tables b and d have the dtype that all is rounded to."""
    if rounding == "addcmul":
        return torch.addcmul(a * b, c, d)
    if rounding == "dtype":
        return (a * b).to(b.dtype) + (c * d).to(b.dtype)
    return a * b + c * d


def _members(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The first and the second member of each pair along the last axis."""
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]
