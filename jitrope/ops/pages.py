"""The pages of each sequence in a cache, in place of a slot for each token: the value, and its check."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..base.arguments import refuse, tensor
from ..plan.options import Options
from ..plan.views import Tensors
from .fit import Fail, check_contiguous, check_integers, check_one_axis, sizes_of
from .values import Value, flags


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

    def _arguments(self) -> dict[str, Any]:
        found = super()._arguments()
        return {_lengths_of(self.tensors) if name == "lengths" else name: x for name, x in found.items()}


def _lengths_of(t: Tensors) -> str:
    """The user's name for the lengths."""
    return "cache_positions" if "batch_indices" in t else "last_page_len" if "page_indptr" in t else "seq_lens"


def check_slots(tensors: Tensors, options: Options, fail: Fail) -> None:
    """Refuse slots that do not fit the tokens."""
    batch, seqlen, *_ = sizes_of(tensors["q"], options.layout)
    check_integers("slot_mapping", tensors["slot_mapping"], tensors["q"], fail)
    _check_tokens("slot_mapping", tensors["slot_mapping"], batch * seqlen, fail)


def _check_tokens(label: str, x: Tensor, tokens: int, fail: Fail) -> None:
    """Refuse an argument that is not one contiguous entry for each token."""
    check_contiguous(label, x, fail)
    if x.numel() != tokens:
        fail(f"{label} has shape {tuple(x.shape)} for {tokens} tokens")


def check_pages(tensors: Tensors, options: Options, fail: Fail) -> None:
    """Refuse a page table that does not fit its cache, its lengths and the tokens."""
    q, table, cache = tensors["q"], tensors["page_table"], tensors["k_cache"]
    batch, seqlen, *_ = sizes_of(q, options.layout)
    of_tokens = ("lengths", "batch_indices") if "batch_indices" in tensors else ()
    named = ("page_table", "page_indptr", "lengths", "cu_seqlens_q", "batch_indices")
    for name in [name for name in named if name in tensors]:
        label, x = _lengths_of(tensors) if name == "lengths" else name, tensors[name]
        check_integers(label, x, q, fail)
        if x.dtype != table.dtype:
            fail(f"{label} is {x.dtype} but page_table is {table.dtype}; they must match")
        if name in of_tokens:
            _check_tokens(label, x, batch * seqlen, fail)
            continue
        if name != "page_table" or "page_indptr" in tensors:
            check_one_axis(label, x, fail)
        elif x.dim() != 2:
            fail(f"page_table has shape {tuple(x.shape)}; it must be (N, max_pages) without page_indptr")
        if x.shape[-1] > 1 and x.stride(-1) != 1:
            fail(f"{label} has strides {x.stride()}; its last axis must be contiguous")
    _check_counts(tensors, batch * seqlen, fail)
    if cache.dim() != 4:
        fail(f"k_cache has shape {tuple(cache.shape)}; with a page table it must be (pages, rows, H, D)")
    if cache.shape[1] == 0:
        fail("k_cache has pages of 0 rows; a page table needs pages with rows")
    errors = tensors.get("errors")
    if errors is not None and (errors.dtype != torch.int32 or errors.numel() != 1 or errors.device != q.device):
        had = f"errors is {tuple(errors.shape)} {errors.dtype} on {errors.device}"
        fail(f"{had}; it must be one int32 number on q's device")


def _check_counts(tensors: Tensors, tokens: int, fail: Fail) -> None:
    """Refuse tables, lengths and offsets of different numbers of sequences."""
    sizes = {name: x.shape[0] for name, x in tensors.items() if x.dim()}  # len would make a symbol a number
    if "batch_indices" in tensors:
        label, count = "page_table", sizes["page_indptr"] - 1 if "page_indptr" in sizes else sizes["page_table"]
    else:
        label, count = _lengths_of(tensors), sizes["lengths"]
        if "page_indptr" not in sizes and sizes["page_table"] < count:
            had = f"page_table has {sizes['page_table']} rows and seq_lens has {count} entries"
            fail(f"{had}; it must have as many rows")
        if "cu_seqlens_q" not in sizes and tokens and (not count or tokens % count):
            fail(f"{label} has {count} entries for {tokens} tokens; pass cu_seqlens_q")
    for name in ("page_indptr", "cu_seqlens_q", "cu_seqlens"):
        if name in sizes and sizes[name] != count + 1:
            fail(f"{name} has {sizes[name]} entries and {label} has {count}; {name} must have one more")
