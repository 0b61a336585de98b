"""A cache of k and v, (slots, heads, dim) or (pages, rows, heads, dim), and the scales of its blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..plan.options import Options
from ..plan.views import BLOCK_SCALES, Tensors
from .pages import slots_of_pages
from .results import indexed


def slots_of(cache: Tensor) -> int:
    """The number of slots of a cache."""
    return cache.shape[0] * (cache.shape[1] if cache.dim() == 4 else 1)


def slots(t: Tensors, o: Options, tokens: int, spare: Tensor | None) -> tuple[Tensor, Tensor]:
    """(a mask of the tokens that are stored, their slots). It counts errors of pages, and clears their ends.

    spare: those that are not stored.
    """
    found = _in_pages(t, o, tokens, spare) if "page_table" in t else t["slot_mapping"].flatten().long()
    kept = (found >= 0) & (found < slots_of(t["k_cache"]))
    kept = kept if spare is None else kept & ~spare
    return kept, found[kept]


def store(letter: str, stored: tuple[Tensor, Tensor | None], t: Tensors, kept: Tensor, slot: Tensor) -> None:
    """Write heads (batch, seq, heads, dim), and the scales of their blocks if the cache has some."""
    for label, x in zip((f"{letter}_cache", f"{letter}_block_scale"), stored):
        if x is not None:
            _put(t[label], slot, t["k_cache"].shape[1], indexed(x).flatten(0, 1)[kept])


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
                _put(t[name], rest, rows, 0)
    return found


def _put(x: Tensor, slot: Tensor, rows: int, value: Any) -> None:
    """Write to slots of a cache, or of its block scales, (slots, ...), or in pages of rows, which may be in fours."""
    place: tuple[Tensor, ...] = (slot,)
    if x.dim() > 3:
        row = slot % rows
        place = (slot // rows, row) if x.dim() == 4 else (slot // rows, row // 4, row % 4)
    indexed(x)[place] = value
