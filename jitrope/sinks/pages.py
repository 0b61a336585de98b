"""The pages of sequences in a cache: position p is in row p % rows of page number p // rows.

Source: arXiv:2309.06180.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..plan.views import Tensors


def slots_of_pages(t: Tensors, tokens: int, pages: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """(the slot of each token, -1 for none; whether it is an error; whether it is its sequence's last token)."""
    table = t["page_table"].long()
    count = len(t["page_indptr"]) - 1 if "page_indptr" in t else len(table)
    token = torch.arange(tokens, device=table.device)
    sequence, position, padding, last = _given_places(t) if "batch_indices" in t else _last_places(t, token, rows)
    if count == 0:
        return torch.full_like(token, -1), ~padding, last
    known, sequence = (sequence >= 0) & (sequence < count), sequence.clamp(0, count - 1)
    if "page_indptr" in t:
        first = t["page_indptr"].long()[sequence]
        width = t["page_indptr"].long()[sequence + 1] - first
    else:
        first, width = sequence * table.shape[1], torch.full_like(token, table.shape[1])
    at = first + position // rows
    inside = known & (position >= 0) & (position // rows < width)
    inside = inside & (first >= 0) & (at >= 0) & (at < table.numel())
    entries = torch.cat((table.flatten(), table.new_full((1,), -1)))
    page = entries[at.where(inside, table.numel())]
    inside = (page >= 0) & (page < pages)
    slots = torch.where(inside & ~padding, page * rows + position % rows, -1)
    return slots, ~inside & ~padding, last


def _given_places(t: Tensors) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(each token's sequence, its position there, whether it is padding, False)."""
    sequence, position = (t[name].flatten().long() for name in ("batch_indices", "lengths"))
    return sequence, position, sequence < 0, torch.zeros_like(sequence, dtype=torch.bool)


def _last_places(t: Tensors, token: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same for sequences whose last tokens are the new ones, and whether a token is its sequence's last.

    A token without a position has -1.
    """
    lengths = t["lengths"].long()
    none = torch.zeros_like(token, dtype=torch.bool)
    if len(lengths) == 0:
        return token, token, ~none, none
    if "cu_seqlens_q" in t:
        ends = t["cu_seqlens_q"].long()[1:]
        sequence = torch.searchsorted(ends.contiguous(), token, right=True)
        padding = sequence == len(ends)
        sequence = sequence.clamp(max=len(ends) - 1)
        left = ends[sequence] - token
    else:
        new = max(1, len(token) // len(lengths))
        sequence, left, padding = token // new, new - token % new, none
    length = lengths[sequence]
    if "page_indptr" in t:
        width = t["page_indptr"].long().diff()[sequence]
        length = torch.where(width == 0, 0, (width - 1) * rows + length)
    position = torch.where(left > 0, length - left, -1)
    return sequence, position, padding | (length == 0), left == 1
