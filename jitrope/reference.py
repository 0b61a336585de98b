"""Every op in plain torch: the oracle of the tests, and the path that CPU tensors take."""

from __future__ import annotations

import torch
from torch import Tensor

from .spec import LAYOUT_AXES, Options


def canonical(x: Tensor, layout: str) -> Tensor:
    """A (batch, seq, head, dim) view of a tensor in `layout`."""
    batch, *rest = LAYOUT_AXES[layout]
    return x.unsqueeze(0) if batch is None else x.permute(batch, *rest)


def table_view(table: Tensor) -> Tensor:
    """A (batch, position, head, width) view of a table with 2, 3 or 4 axes."""
    if table.dim() == 4:
        return table
    return table[None, :, None] if table.dim() == 2 else table[:, :, None]


def local_positions(index: Tensor, length: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """Positions in their sequences of a rank's tokens, the index-th of the length that it has of each.

    A sequence is cut into 2 cp_size chunks; a rank has chunks cp_rank and 2 cp_size - 1 - cp_rank.
    """
    if cp_size == 1:
        return index
    half = length // 2
    second = length * cp_size - (cp_rank + 1) * half - half
    return index + torch.where(index < half, cp_rank * half, second)


def table_rows(
    tokens: int, device: torch.device, cu_seqlens: Tensor | None, start_positions: Tensor | None, options: Options
) -> tuple[Tensor, Tensor | None]:
    """(row of the table for each token, (batch or 1, tokens); which tokens are after the last sequence)."""
    index = torch.arange(tokens, device=device)
    if cu_seqlens is None:
        length = torch.tensor(tokens, device=device)
        rows = local_positions(index, length, options.cp_size, options.cp_rank)[None]
        return (rows if start_positions is None else rows + start_positions[:, None]), None
    offsets = cu_seqlens.long() // options.cp_size
    sequence = torch.searchsorted(offsets[1:].contiguous(), index, right=True)
    spare = sequence == len(offsets) - 1
    if len(offsets) == 1:
        return index[None], spare
    sequence = sequence.clamp(max=len(offsets) - 2)
    length = offsets[sequence + 1] - offsets[sequence]
    rows = local_positions(index - offsets[sequence], length, options.cp_size, options.cp_rank)
    if start_positions is not None:
        rows = rows + start_positions[sequence]
    if options.packed_table:
        rows = rows + cu_seqlens[sequence]
    return rows[None], spare


def rope(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    cu_seqlens: Tensor | None,
    start_positions: Tensor | None,
    options: Options,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor | None]:
    """Fresh rotated tensors: y0 = x0 cos - x1 sin, y1 = x1 cos + x0 sin, rounded once at the end.

    Products and the sum round apart, as torch's real and (on a CPU) complex multiplies do.
    """
    outputs: list[Tensor | None] = []
    for x in (q, k):
        if x is None:
            outputs.append(None)
            continue
        out = torch.empty_like(x)
        view = canonical(out, options.layout)
        c, s = (table_view(table).to(compute_dtype) for table in (cos, sin))
        if options.angles:
            c, s = c.cos() * options.mscale, s.sin() * options.mscale
        rows, spare = table_rows(view.shape[1], c.device, cu_seqlens, start_positions, options)
        c, s = _gather(c, rows), _gather(s, rows)
        view.copy_(_rotate(canonical(x, options.layout).to(compute_dtype), c, s, options))
        if spare is not None:
            view[:, spare] = 0
        outputs.append(out)
    return outputs[0], outputs[1]  # type: ignore[return-value]


def rope_qkv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cu_seqlens: Tensor | None,
    start_positions: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor]:
    """Packed QKV (..., groups, (q_per_group + 2) head_dim) -> fresh q, k, rotated, and v."""
    q, k, v = split_qkv(qkv, options.q_per_group)
    q, k = rope(q, k, cos, sin, cu_seqlens, start_positions, options)  # type: ignore[assignment]
    return q, k, v.clone(memory_format=torch.contiguous_format)


def rope_qkv_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cu_seqlens: Tensor | None,
    start_positions: Tensor | None,
    options: Options,
) -> Tensor:
    """The other way: one packed tensor."""
    q, k = rope(dq.contiguous(), dk.contiguous(), cos, sin, cu_seqlens, start_positions, options)
    return join_qkv(q, k, dv, options.q_per_group)  # type: ignore[arg-type]


def split_qkv(qkv: Tensor, q_per_group: int) -> tuple[Tensor, Tensor, Tensor]:
    """(..., groups, (q_per_group + 2) head_dim) -> q (a copy where there are several groups), k and v (views)."""
    packed = qkv.unflatten(-1, (q_per_group + 2, -1))
    return packed[..., :q_per_group, :].flatten(-3, -2), packed[..., -2, :], packed[..., -1, :]


def join_qkv(q: Tensor, k: Tensor, v: Tensor, q_per_group: int) -> Tensor:
    """The inverse of `split_qkv`."""
    return torch.cat((q.unflatten(-2, (-1, q_per_group)), k.unsqueeze(-2), v.unsqueeze(-2)), -2).flatten(-2)


def _gather(table: Tensor, rows: Tensor) -> Tensor:
    """The table's rows, (batch, token, head, width); NaN outside of it."""
    outside = (rows < 0) | (rows >= table.shape[1])
    rows = rows.masked_fill(outside, 0)
    if len(rows) == 1:
        found = table[:, rows[0]]
    else:
        found = table.expand(len(rows), -1, -1, -1)[torch.arange(len(rows), device=rows.device)[:, None], rows]
    return found.masked_fill(outside[..., None, None], float("nan"))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, options: Options) -> Tensor:
    """x (batch, seq, head, head_dim), tables broadcastable to it up to the last axis."""
    o = options
    end = o.rotary_offset + o.rotary_dim
    before, turned, rest = x[..., : o.rotary_offset], x[..., o.rotary_offset : end], x[..., end:]
    x0, x1 = _members(turned, o.interleaved)
    full = cos.shape[-1] == o.rotary_dim
    cos0, cos1 = _members(cos, o.interleaved) if full else (cos, cos)
    sin0, sin1 = _members(sin, o.interleaved) if full else (sin, sin)
    if o.conjugate:  # the transpose: each sine is read at the partner
        sin0, sin1 = -sin1, -sin0
    y0 = x0 * cos0 - x1 * sin0
    y1 = x1 * cos1 + x0 * sin1
    y = torch.stack((y0, y1), -1).flatten(-2) if o.interleaved_out else torch.cat((y0, y1), -1)
    return torch.cat((before, y, rest), -1)


def _members(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The first and the second member of each pair along the last axis."""
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]
