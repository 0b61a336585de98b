"""The pages of sequences in a cache: position p is in row p % rows of page number p // rows.

Source: arXiv:2309.06180.
"""

from __future__ import annotations

from dataclasses import field

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..base import layouts
from ..base.arguments import flags, refuse, tensor
from ..base.fit import INTEGERS, Fail, sizes_of
from ..base.spec import INDEX_DTYPES
from ..base.views import Tensors
from ..values.asked import Value

TENSORS = ("page_table", "page_indptr", "lengths", "cu_seqlens_q", "batch_indices", "errors")
_ADDRESSES = "const PageIndex* page_table, page_indptr, lengths, cu_seqlens_q, batch_indices; int* errors"
ARGUMENTS = {"paged": (_ADDRESSES, "long long page_table_stride, page_table_width, page_count, new_tokens")}


class Pages(Value):
    """The pages of each sequence in a `KVCache`, as FlashInfer (arXiv:2501.01005) and vLLM keep them.

    The new tokens are the last ones of each sequence, whose lengths count them; or the sequence and the position of
    each token are given. The token at position p of its sequence goes to row p % rows of page number p // rows.

    >>> q, (k, v) = torch.randn(2, 8, 64), torch.randn(2, 2, 1, 64)
    >>> k_cache, v_cache = torch.zeros(2, 4, 16, 1, 64)  # 4 pages of 16 rows
    >>> block_table, seq_lens = torch.tensor([[3, 1], [2, 0]]), torch.tensor([18, 16])  # a new token each
    >>> cache = jitrope.KVCache(k_cache, v_cache, jitrope.Pages(block_table, seq_lens=seq_lens))
    >>> table = jitrope.tables.cos_sin_cache(18, jitrope.tables.inv_freq(rotary_dim=64)[0])
    >>> ids = seq_lens - 1
    >>> q, _, v = jitrope.prepare_qkv(q, k, v, cos_sin_cache=table, positions=ids, cache=cache, layout="thd")
    >>> torch.equal(v_cache[1, 1], v[0]) and torch.equal(v_cache[2, 15], v[1])
    True

    Args:
        page_table: vLLM's block_table, (N or more, max_pages); beside batch_indices and `Packed` exactly N. Or, with
            page_indptr, FlashInfer's page_indices of all sequences, one after the other, (n). All tensors are int32, or
            all int64, on q's device. The host does not read them.
        page_indptr: (N + 1): the pages of sequence i are page_table[page_indptr[i] : page_indptr[i + 1]].
        last_page_len: (N): rows of each sequence's last page that are in use, with the new tokens.
        seq_lens: (N): the length of each sequence, with the new tokens.
        cu_seqlens_q: (N + 1): offsets of the new tokens of each sequence, ascending from 0 (vLLM's query_start_loc,
            FlashInfer's append_indptr). Tokens after the last sequence are padding. None: each sequence has equally
            many new tokens, as in a decode step.
        batch_indices, cache_positions: of each token, (B, S) or flat, in place of lengths and cu_seqlens_q: its
            sequence, and its position there (FlashInfer's batch_indices and positions). A negative sequence is padding.
        clear_page: write zeros to the rest of the last page of each sequence with new tokens too; not with
            batch_indices.
        errors: an int32 tensor of one element. The kernel adds the number of tokens whose page is outside of the cache,
            or whose sequence or position is outside of the table. Nothing is stored for them, nor for those of a
            sequence without a length (padding), which are not counted.

    Raises:
        InvalidInput: an argument has a wrong type, is missing, or does not go with another.
    """

    def __init__(
        self,
        page_table: Tensor,
        page_indptr: Tensor | None = None,
        last_page_len: Tensor | None = None,
        *,
        seq_lens: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        batch_indices: Tensor | None = None,
        cache_positions: Tensor | None = None,
        clear_page: bool = False,
        errors: Tensor | None = None,
    ) -> None:
        placed = batch_indices is not None or cache_positions is not None
        listed = page_indptr is not None or last_page_len is not None
        needed: tuple[str, ...] = ("page_indptr", "last_page_len") if listed else ("seq_lens",)
        needed = ("batch_indices", "cache_positions") if placed else needed
        lengths = {"last_page_len": last_page_len, "seq_lens": seq_lens, "cache_positions": cache_positions}
        given = {"page_table": page_table, "page_indptr": page_indptr, **lengths, "cu_seqlens_q": cu_seqlens_q}
        self.tensors = {}
        for label, x in {**given, "batch_indices": batch_indices, "errors": errors}.items():
            if x is not None and label not in needed and (label in lengths or (placed and label == "cu_seqlens_q")):
                refuse("Pages", label, x, f"None beside {' and '.join(needed)}")
            if x is not None or label in ("page_table", *needed):
                self.tensors["lengths" if label in lengths else label] = tensor("Pages", label, x)
        self.words = flags("Pages", clear_page=clear_page)
        if self.words and placed:
            refuse("Pages", "clear_page", True, "False beside batch_indices")


class Words(layouts.Words):
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


def check(t: Tensors, o: Words, fail: Fail) -> None:
    """Refuse slots, or a page table and its lengths, that do not fit the tokens and the cache."""
    device, (batch, seqlen, *_) = t["q"].device, sizes_of(t["q"], o.layout)
    tokens, dtypes, owner = batch * seqlen, INTEGERS, fail.main
    shapes: dict[str, list[tuple[int]]] = {"slot_mapping": []}  # []: a number for each token, with any axes
    if "page_table" in t:
        table, listed, of_cache = t["page_table"], "page_indptr" in t, tuple(t["k_cache"].shape)
        fail.unlike("page_table", table, device, INTEGERS, ("n",) if listed else ("N", "max_pages"))
        apart = table.shape[-1] > 1 and table.stride(-1) != 1
        fail.when(apart, f"page_table has strides {table.stride()}; its last axis must be contiguous")
        if "batch_indices" in t:
            owner, count = "page_table", t["page_indptr"].numel() - 1 if listed else table.shape[0]
            shapes = {"lengths": [], "batch_indices": []}
        else:
            owner, count = lengths_of(t), t["lengths"].numel()
            shapes = {"lengths": [(count,)]}
            had = f"{owner} has {count} entries"
            fail.when(not listed and table.shape[0] < count, f"page_table has {table.shape[0]} rows, but {had}")
            wrong = "cu_seqlens_q" not in t and tokens and (not count or tokens % count)
            fail.when(wrong, f"{had} for {tokens} tokens; pass cu_seqlens_q")
        dtypes = (table.dtype,)
        shapes.update(page_indptr=[(count + 1,)], cu_seqlens_q=[(count + 1,)], cu_seqlens=[(count + 1,)])
        fail.when(len(of_cache) != 4, f"k_cache has shape {of_cache}; with a page table it must be (pages, rows, H, D)")
        fail.when(of_cache[1] == 0, "k_cache has pages of 0 rows; a page table needs pages with rows")
        if "errors" in t:
            fail.unlike("errors", t["errors"], device, (torch.int32,), (1,), ())
    for name in [name for name in shapes if name in t]:
        label, x, own = lengths_of(t) if name == "lengths" else name, t[name], shapes[name]
        allowed = INTEGERS if name == "cu_seqlens" else dtypes  # positions have their own
        fail.unlike(label, x, device, allowed, *own, contiguous=True, like=owner)
        fail.when(not own and x.numel() != tokens, f"{label} has {x.numel()} entries for {tokens} tokens")


def slots_of_pages(t: Tensors, tokens: int, pages: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """(the slot of each token, -1 for none; whether it is an error; whether it is its sequence's last token).

    One sequence more, without pages and of length 0, has the tokens of no sequence.
    """
    table, on = t["page_table"].long(), t["page_table"].device
    token = torch.arange(tokens, device=on)
    bounds = t["page_indptr"].long() if "page_indptr" in t else torch.arange(len(table) + 1, device=on) * table.shape[1]
    first, width = pad(bounds[:-1], (0, 1)), pad(bounds.diff(), (0, 1))
    if "batch_indices" in t:
        sequence, position = (t[name].flatten().long() for name in ("batch_indices", "lengths"))
        padding, left = sequence < 0, torch.zeros_like(token)
    else:
        lengths = t["lengths"].long()
        new = max(1, tokens // max(1, len(lengths)))
        ends = t["cu_seqlens_q"].long()[1:] if "cu_seqlens_q" in t else torch.ones_like(lengths).cumsum(0) * new
        sequence = torch.searchsorted(ends.contiguous(), token, right=True)
        left = pad(ends, (0, 1))[sequence] - token
        length = pad(lengths, (0, 1))[sequence]
        if "page_indptr" in t:
            length = torch.where(width[sequence] == 0, 0, (width[sequence] - 1) * rows + length)
        padding, position = length == 0, torch.where(left > 0, length - left, -1)
    sequence = torch.where((sequence >= 0) & (sequence < len(first)), sequence, len(first) - 1)
    first, width, number = first[sequence], width[sequence], position // rows
    at = first + number
    inside = (position >= 0) & (number < width) & (first >= 0) & (at >= 0) & (at < table.numel())
    page = pad(table.flatten(), (0, 1), value=-1)[at.where(inside, table.numel())]
    inside = (page >= 0) & (page < pages)
    return torch.where(inside & ~padding, page * rows + position % rows, -1), ~inside & ~padding, left == 1
