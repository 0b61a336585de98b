"""Positions: the row of a token in the tables, and whether the token comes after the last sequence.

row = its place in its sequence + start - unrotated, or its id. Source: context parallelism cuts sequences as
Megatron-LM does; mrope is of arXiv:2409.12191.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..plan import partition
from ..plan.options import Options
from ..plan.views import Tensors, ids_view

RULE = "dual_chunk"  # the rule of `partition` by which rope's context parallelism cuts sequences

TURNED = ("q", "k")
"""The letters of heads that have positions."""
POSITIONS = {"position_ids", "start_positions", "cu_seqlens"}
"""Tensors by which a token's row differs from its place in the batch row."""


def table_rows(tokens: int, device: torch.device, t: Tensors, o: Options) -> Tensor:
    """Each token's row of the table, (axes, batch or 1, tokens).

    The rows of tokens that are not rotated, before those of the table, are below 0.
    """
    if "position_ids" in t:
        return ids_view(t["position_ids"], o).long()
    return _counted_rows(torch.arange(tokens, device=device), t, o)[None] - o.unrotated


def _counted_rows(index: Tensor, t: Tensors, o: Options) -> Tensor:
    starts = t.get("start_positions")
    if "cu_seqlens" not in t:
        rows = local_positions(index, 0, len(index) * o.cp_size, o)[None]
        return rows if starts is None else rows + starts[:, None]
    ends = t["cu_seqlens"].long()
    offsets = partition.local_rows(ends, o.cp_rank, o.cp_size, RULE)
    if offsets.shape[0] == 1:
        return index[None]
    sequence = _sequences(index, offsets)
    first = ends[sequence]
    rows = local_positions(index - offsets[sequence], first, ends[sequence + 1], o)
    if starts is not None:
        rows = rows + starts[sequence]
    if o.packed_table:
        rows = rows + first
    return rows[None]


def spare(tokens: int, t: Tensors, o: Options) -> Tensor | None:
    """A mask of the tokens after the last sequence; None without sequences."""
    if "cu_seqlens" not in t:
        return None
    end = partition.local_rows(t["cu_seqlens"][-1].long(), o.cp_rank, o.cp_size, RULE)
    return torch.arange(tokens, device=end.device).ge(end)


def spare_stays(x: Tensor, y: Tensor, t: Tensors, o: Options) -> Tensor:
    """y (tokens, ...), but with x's tokens after the last sequence."""
    mask = spare(x.shape[0], t, o)
    return y if mask is None else torch.where(mask[:, None, None], x, y)


def cleared(letter: str, x: Tensor, t: Tensors, o: Options) -> Tensor:
    """x (batch, seq, ...), in which tokens of q and k after the last sequence are zero."""
    mask = spare(x.shape[1], t, o) if letter in TURNED and "cu_seqlens" in t else None
    return x if mask is None else x.masked_fill(mask.view(-1, *[1] * (x.dim() - 2)), 0)


def sequences_of(tokens: int, t: Tensors, o: Options) -> Tensor:
    """The sequence of each of a packed batch's tokens; of those after the last sequence that one."""
    ends = t["cu_seqlens"].long()
    return _sequences(torch.arange(tokens, device=ends.device), partition.local_rows(ends, o.cp_rank, o.cp_size, RULE))


def _sequences(index: Tensor, offsets: Tensor) -> Tensor:
    return torch.searchsorted(offsets[1:].contiguous(), index, right=True).clamp(max=offsets.shape[0] - 2)


def local_positions(index: Tensor, first: Tensor | int, end: Tensor | int, o: Options) -> Tensor:
    """The position in its sequence of the index-th token that a rank has of it.

    A sequence owns the tokens [first, end) of the batch and is cut into 2 cp_size chunks (`partition`). A rank has
    the chunks cp_rank and 2 cp_size - 1 - cp_rank.
    """
    if o.cp_size == 1:
        return index
    of = partition.number_of_chunks(o.cp_size, RULE)
    head, tail = partition.chunks_of(o.cp_rank, o.cp_size, RULE)
    size = partition.count(end, head, of) - partition.count(first, head, of)
    begins = [partition.before(end, chunk, of) - partition.before(first, chunk, of) for chunk in (head, tail)]
    return torch.where(index < size, begins[0] + index, begins[1] + index - size)


def gathered(table: Tensor, rows: Tensor, o: Options) -> Tensor:
    """The table's rows, (batch, token, head, width). A row outside gives NaN.

    A pair takes the row of its axis of position_ids: one section of pairs after the other, or alternating.
    """
    outside = ((rows < 0) | (rows >= table.shape[1])).any(0)
    batch = torch.arange(len(table), device=table.device)[:, None]
    found = [table[batch, axis.masked_fill(outside, 0)] for axis in rows]
    gathered = found[0]
    if len(found) > 1:
        pair = torch.arange(o.rotary_dim // 2, device=table.device)
        sections = torch.tensor(o.mrope_section, device=table.device)
        if o.mrope_interleaved:
            axis_of = pair % len(sections)
            axis_of = torch.where(pair < len(sections) * sections[axis_of], axis_of, 0)
        else:
            axis_of = torch.searchsorted(sections.cumsum(0), pair, right=True)
        if table.shape[-1] == o.rotary_dim:
            axis_of = axis_of.repeat_interleave(2) if o.interleaved else axis_of.repeat(2)
        for axis in range(1, len(found)):
            gathered = torch.where(axis_of == axis, found[axis], gathered)
    return gathered.masked_fill(outside[..., None, None], float("nan"))
