"""A cache of k and v, (slots, heads, dim) or (pages, rows, heads, dim), and the scales of its blocks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..plan.options import Options
from ..plan.views import BLOCK_SCALES, Tensors
from .pages import slots_of_pages
from .results import indexed


class Slots(NamedTuple):
    """The tokens that are stored, a mask, and their slots, or with four axes of the cache their pages and rows."""

    kept: Tensor
    page: Tensor
    row: Tensor | None


def slots_of(cache: Tensor) -> int:
    """The number of slots of a cache."""
    return cache.shape[0] * (cache.shape[1] if cache.dim() == 4 else 1)


def slots(t: Tensors, o: Options, tokens: int, spare: Tensor | None) -> Slots:
    """The slots of a call's tokens, without those in `spare`. It counts errors of pages, and clears their ends."""
    cache, row = t["k_cache"], None
    found = _in_pages(t, o, tokens, spare) if "page_table" in t else t["slot_mapping"].flatten().long()
    kept = (found >= 0) & (found < slots_of(cache))
    kept = kept if spare is None else kept & ~spare
    page = found[kept]
    if cache.dim() == 4:
        page, row = page // cache.shape[1], page % cache.shape[1]
    return Slots(kept, page, row)


def store(letter: str, stored: tuple[Tensor, Tensor | None], t: Tensors, to: Slots) -> None:
    """Write heads (batch, seq, heads, dim), and the scales of their blocks if the cache has some."""
    for label, x in zip((f"{letter}_cache", f"{letter}_block_scale"), stored):
        if x is not None:
            _put(t[label], to.page, to.row, indexed(x).flatten(0, 1)[to.kept])


def _in_pages(t: Tensors, o: Options, tokens: int, spare: Tensor | None) -> Tensor:
    """The slot of each token. The rest of the last page of a sequence with new tokens is cleared if asked."""
    pages, rows = t["k_cache"].shape[:2]
    found, wrong, last = slots_of_pages(t, tokens, pages, rows)
    if "errors" in t:
        t["errors"] += wrong.sum().to(torch.int32)
    if o.clear_page:
        last = last & (found >= 0) if spare is None else last & (found >= 0) & ~spare
        ends = found[last][:, None]
        rest = ends + torch.arange(1, rows, device=found.device)
        rest = rest[rest // rows == ends // rows]
        for name in ("k_cache", "v_cache", *BLOCK_SCALES):
            if name in t:
                _put(t[name], rest // rows, rest % rows, 0)
    return found


def _put(x: Tensor, page: Tensor, row: Tensor | None, value: Any) -> None:
    """Write to rows of a cache, or of its block scales."""
    at = (page,) if row is None else (page, row) if x.dim() == 4 else (page, row // 4, row % 4)
    indexed(x)[at] = value
