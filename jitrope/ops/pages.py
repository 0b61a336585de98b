"""The pages of each sequence in a cache, in place of a slot for each token: the value, its check, and plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..base.arguments import flag, refuse, tensor
from ..plan.options import Options
from ..plan.views import BLOCK_SCALES, Tensors
from .fit import Fail, check_integers, sizes_of
from .values import Value

PAGE_TENSORS = ("page_table?", "page_indptr?", "last_page_len?", "seq_lens?", "cu_seqlens_q?", "errors?")


class Pages(Value):
    """The pages of each sequence in a `KVCache`, as FlashInfer (arXiv:2501.01005) and vLLM keep them.

    The new tokens are the last ones of each sequence: the lengths count them. The token at position p of its sequence
    goes to row p % rows of page number p // rows.

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
        page_table: vLLM's block_table, (N or more, max_pages), with seq_lens; or FlashInfer's page_indices of all
            sequences, one after the other, (n), with page_indptr and last_page_len. All tensors are int32, or all
            int64, on q's device. The host does not read them.
        page_indptr: (N + 1): the pages of sequence i are page_table[page_indptr[i] : page_indptr[i + 1]].
        last_page_len: (N): rows of each sequence's last page that are in use, with the new tokens.
        seq_lens: (N): the length of each sequence, with the new tokens.
        cu_seqlens_q: (N + 1): offsets of the new tokens of each sequence, ascending from 0 (vLLM's query_start_loc,
            FlashInfer's append_indptr). Tokens after the last sequence are padding. None: each sequence has equally
            many new tokens, as in a decode step.
        clear_page: write zeros to the rest of the last page of each sequence with new tokens too.
        errors: an int32 tensor of one element. The kernel adds the number of tokens whose page is outside of the cache,
            or whose position is outside of the table. Nothing is stored for them, nor for those of a sequence without
            a length (padding), which are not counted.

    Raises:
        InvalidInput: an argument has a wrong type, or an argument is missing.
    """

    def __init__(
        self,
        page_table: Tensor,
        page_indptr: Tensor | None = None,
        last_page_len: Tensor | None = None,
        *,
        seq_lens: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        clear_page: bool = False,
        errors: Tensor | None = None,
    ) -> None:
        given = dict(zip(PAGE_TENSORS, (page_table, page_indptr, last_page_len, seq_lens, cu_seqlens_q, errors)))
        named = {label.rstrip("?"): x for label, x in given.items()}
        ragged = page_indptr is not None or last_page_len is not None
        if ragged and seq_lens is not None:
            refuse("Pages", "seq_lens", seq_lens, "None beside page_indptr and last_page_len")
        needed = ("page_table", "page_indptr", "last_page_len") if ragged else ("page_table", "seq_lens")
        self.tensors = {
            label: tensor("Pages", label, x) for label, x in named.items() if x is not None or label in needed
        }
        self.words = {"clear_page": True} if flag("Pages", "clear_page", clear_page) else {}


def slots_of(cache: Tensor) -> int:
    """The number of slots of a cache."""
    return cache.shape[0] * (cache.shape[1] if cache.dim() == 4 else 1)


def put(x: Tensor, page: Tensor, row: Tensor | None, value: Any) -> None:
    """Write to rows of a cache, or of its block scales. row: None for slots, which have one axis."""
    at = (page,) if row is None else (page, row) if x.dim() == 4 else (page, row // 4, row % 4)
    indexed(x)[at] = indexed(value) if isinstance(value, Tensor) else value


def indexed(x: Tensor) -> Tensor:
    """A tensor that torch can index: fp8 as bytes."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def check_slots(tensors: Tensors, options: Options, fail: Fail) -> None:
    """Refuse slots that do not fit the tokens."""
    q, slot_mapping = tensors["q"], tensors["slot_mapping"]
    check_integers("slot_mapping", slot_mapping, q, fail)
    if not slot_mapping.is_contiguous():
        fail(f"slot_mapping has strides {slot_mapping.stride()}; it must be contiguous")
    batch, seqlen, *_ = sizes_of(q, options.layout)
    if slot_mapping.numel() != batch * seqlen:
        fail(f"slot_mapping has shape {tuple(slot_mapping.shape)} for {batch * seqlen} tokens")


def check_pages(tensors: Tensors, options: Options, fail: Fail) -> None:
    """Refuse a page table that does not fit its cache, its lengths and the tokens."""
    q, table = tensors["q"], tensors["page_table"]
    batch, seqlen, *_ = sizes_of(q, options.layout)
    ragged = "page_indptr" in tensors
    lengths = "last_page_len" if ragged else "seq_lens"
    given = {
        label: tensors[label] for label in ("page_table", "page_indptr", lengths, "cu_seqlens_q") if label in tensors
    }
    for label, x in given.items():
        check_integers(label, x, q, fail)
        if x.dtype != table.dtype:
            fail(f"{label} is {x.dtype} but page_table is {table.dtype}; they must match")
        axes = 2 if label == "page_table" and not ragged else 1
        if x.dim() != axes:
            wanted = "(N, max_pages) with seq_lens" if axes == 2 else "one axis"
            fail(f"{label} has shape {tuple(x.shape)}; it must be {wanted}")
        if x.shape[-1] > 1 and x.stride(-1) != 1:
            fail(f"{label} has strides {x.stride()}; its last axis must be contiguous")
    sizes = {label: x.shape[0] for label, x in tensors.items() if x.dim()}  # len would make a symbol a number
    count = sizes[lengths]
    for label in ("page_indptr", "cu_seqlens_q"):
        if label in tensors and sizes[label] != count + 1:
            fail(f"{label} has {sizes[label]} entries and {lengths} has {count}; {label} must have one more")
    if not ragged and sizes["page_table"] < count:
        fail(f"page_table has {sizes['page_table']} rows and seq_lens has {count} entries; it must have as many rows")
    if "cu_seqlens" in tensors and sizes["cu_seqlens"] != count + 1:
        fail(f"cu_seqlens has {sizes['cu_seqlens']} entries and {lengths} has {count}; it must have one more")
    tokens = batch * seqlen
    if "cu_seqlens_q" not in tensors and tokens and (not count or tokens % count):
        fail(f"{lengths} has {count} entries for {tokens} tokens; pass cu_seqlens_q")
    if tensors["k_cache"].dim() != 4:
        fail(f"k_cache has shape {tuple(tensors['k_cache'].shape)}; with a page table it must be (pages, rows, H, D)")
    errors = tensors.get("errors")
    if errors is not None and (errors.dtype != torch.int32 or errors.numel() != 1 or errors.device != q.device):
        had = f"errors is {tuple(errors.shape)} {errors.dtype} on {errors.device}"
        fail(f"{had}; it must be one int32 number on q's device")


def slots_of_pages(t: Tensors, tokens: int, pages: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """(the slot of each token, -1 for none; whether it is an error; whether it is its sequence's last token)."""
    token = torch.arange(tokens, device=t["page_table"].device)
    table, lengths = t["page_table"].long(), t["last_page_len" if "page_indptr" in t else "seq_lens"].long()
    none = torch.zeros_like(token, dtype=torch.bool)
    if len(lengths) == 0:
        return torch.full_like(token, -1), none, none
    if "cu_seqlens_q" in t:
        ends = t["cu_seqlens_q"].long()[1:]
        sequence = torch.searchsorted(ends.contiguous(), token, right=True)
        padding = sequence == len(ends)
        sequence = sequence.clamp(max=len(ends) - 1)
        left = ends[sequence] - token
    else:
        new = max(1, tokens // len(lengths))
        sequence, left, padding = token // new, new - token % new, none
    if "page_indptr" in t:
        first, end = t["page_indptr"].long()[sequence], t["page_indptr"].long()[sequence + 1]
        width = end - first
        length = torch.where(width == 0, 0, (width - 1) * rows + lengths[sequence])
    else:
        width = torch.full_like(token, table.shape[1])
        first, length = sequence * width, lengths[sequence]
    position = length - left
    at = first + position // rows
    inside = (position >= 0) & (position < length) & (position // rows < width)
    inside = inside & (first >= 0) & (at >= 0) & (at < table.numel())
    entries = torch.cat((table.flatten(), table.new_full((1,), -1)))
    page = entries[at.where(inside, table.numel())]
    padding, inside = padding | (length == 0), (page >= 0) & (page < pages)
    slots = torch.where(inside & ~padding, page * rows + position % rows, -1)
    return slots, ~inside & ~padding, left == 1


def store_in_pages(t: Tensors, tokens: int, clear: bool) -> Tensor:
    """The slot of each token. Counts errors, and clears the rest of the last pages of sequences with new tokens."""
    pages, rows = t["k_cache"].shape[:2]
    slots, wrong, last = slots_of_pages(t, tokens, pages, rows)
    if "errors" in t:
        t["errors"] += wrong.sum().to(torch.int32)
    if clear:
        ends = slots[last & (slots >= 0)][:, None]
        rest = ends + torch.arange(1, rows, device=slots.device)
        rest = rest[rest // rows == ends // rows]
        for name in ("k_cache", "v_cache", *BLOCK_SCALES):
            if name in t:
                put(t[name], rest // rows, rest % rows, 0)
    return slots
