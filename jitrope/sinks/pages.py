"""The pages of sequences in a cache: position p is in row p % rows of page number p // rows.

Source: arXiv:2309.06180.
"""

from __future__ import annotations

from dataclasses import field

import torch
from torch import Tensor

from ..base import layouts
from ..base.fit import Fail, check_contiguous, check_integers, check_one_axis, sizes_of
from ..base.spec import INDEX_DTYPES
from ..base.views import Tensors

TENSORS = ("page_table", "page_indptr", "lengths", "cu_seqlens_q", "batch_indices", "errors")
ARGUMENTS = {
    "paged": (
        "const PageIndex* page_table, page_indptr, lengths, cu_seqlens_q, batch_indices; int* errors",
        "long long page_table_stride, page_table_width, page_count, new_tokens",
    )
}


class Words(layouts.Words):
    """Its words."""

    clear_page: bool = False


class Fields:
    """Constants of a kernel."""

    page_size: int  # slots of a page; 0: no pages
    page_table_dtype: str | None = field(metadata={"words": INDEX_DTYPES})
    page_indptr: bool = field(metadata={"given": "page_indptr"})
    cu_seqlens_q: bool = field(metadata={"given": "cu_seqlens_q"})
    batch_indices: bool = field(metadata={"given": "batch_indices"})
    clear_page: bool  # the rest of a sequence's last page becomes zero

    @property
    def paged(self) -> bool:
        """Whether a cache's pages are given by a page table."""
        return self.page_table_dtype is not None


def lengths_of(t: Tensors) -> str:
    """The user's name for the lengths."""
    return "cache_positions" if "batch_indices" in t else "last_page_len" if "page_indptr" in t else "seq_lens"


def refuse(t: Tensors, o: Words, fail: Fail) -> None:
    """Refuse slots, or a page table and its lengths, that do not fit the tokens and the cache."""
    q, shape = t["q"], tuple(t["k_cache"].shape)
    batch, seqlen, *_ = sizes_of(q, o.layout)
    tokens = batch * seqlen
    of_tokens = ("slot_mapping", *(("lengths", "batch_indices") if "batch_indices" in t else ()))
    names = ("slot_mapping", "page_table", "page_indptr", "lengths", "cu_seqlens_q", "batch_indices")
    for name in [name for name in names if name in t]:
        label, x, table = lengths_of(t) if name == "lengths" else name, t[name], t.get("page_table", t[name])
        check_integers(label, x, q, fail)
        fail.when(x.dtype != table.dtype, f"{label} is {x.dtype} but page_table is {table.dtype}; they must match")
        if name in of_tokens:
            check_contiguous(label, x, fail)
            fail.when(x.numel() != tokens, f"{label} has shape {tuple(x.shape)} for {tokens} tokens")
            continue
        if name != "page_table" or "page_indptr" in t:
            check_one_axis(label, x, fail)
        elif x.dim() != 2:
            fail(f"page_table has shape {tuple(x.shape)}; it must be (N, max_pages) without page_indptr")
        had = f"{label} has strides {x.stride()}"
        fail.when(x.shape[-1] > 1 and x.stride(-1) != 1, f"{had}; its last axis must be contiguous")
    if "slot_mapping" in t:
        return
    _refuse_counts(t, tokens, fail)
    fail.when(len(shape) != 4, f"k_cache has shape {shape}; with a page table it must be (pages, rows, H, D)")
    fail.when(shape[1] == 0, "k_cache has pages of 0 rows; a page table needs pages with rows")
    if (e := t.get("errors")) is not None and (e.dtype != torch.int32 or e.numel() != 1 or e.device != q.device):
        fail(f"errors is {tuple(e.shape)} {e.dtype} on {e.device}; it must be one int32 number on q's device")


def _refuse_counts(t: Tensors, tokens: int, fail: Fail) -> None:
    """Refuse tables, lengths and offsets of different numbers of sequences."""
    sizes = {name: x.shape[0] for name, x in t.items() if x.dim()}  # len would make a symbol a number
    if "batch_indices" in t:
        label, count = "page_table", sizes["page_indptr"] - 1 if "page_indptr" in sizes else sizes["page_table"]
    else:
        label, count = lengths_of(t), sizes["lengths"]
        if "page_indptr" not in sizes and sizes["page_table"] < count:
            had = f"page_table has {sizes['page_table']} rows and seq_lens has {count} entries"
            fail(f"{had}; it must have as many rows")
        wrong = "cu_seqlens_q" not in sizes and tokens and (not count or tokens % count)
        fail.when(wrong, f"{label} has {count} entries for {tokens} tokens; pass cu_seqlens_q")
    for name in [name for name in ("page_indptr", "cu_seqlens_q", "cu_seqlens") if name in sizes]:
        must = f"{name} must have one more"
        fail.when(sizes[name] != count + 1, f"{name} has {sizes[name]} entries and {label} has {count}; {must}")


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
