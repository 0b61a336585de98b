"""Caches by page table: `Pages`, as FlashInfer and vLLM keep them. The slots of tokens are written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import jitrope
from jitrope import InvalidInput, KVCache, Norm, Packed, Pages

from ..devices import DEVICES, inputs
from ..results import same

ROWS, PAGES, D = 4, 10, 64
# Three sequences have 9, 4 and 13 tokens. Their last 3, 1 and 7 are new. The table's last row is not in use.
TABLE = [[7, 2, 5, -1, -1], [0, -1, -1, -1, -1], [9, 3, 6, 1, -1], [-1] * 5]
NEW = [10, 11, 20, 3, 14, 15, 24, 25, 26, 27, 4]
REST = [21, 22, 23, 5, 6, 7]
"""The slots of the new tokens, and those behind the last ones in their pages."""
BLOCKS = {"page_table": TABLE, "seq_lens": [9, 4, 13]}
LISTED = {"page_table": [7, 2, 5, 0, 9, 3, 6, 1], "page_indptr": [0, 3, 4, 8]}
LASTS = {**LISTED, "last_page_len": [1, 4, 1]}
COUNTS = {"cu_seqlens_q": [0, 3, 4, 11]}
FULL = {"page_table": [[7, 2, -1], [0, 8, 4], [9, -1, -1]], "seq_lens": [8, 9, 4], "cu_seqlens_q": [0, 5, 11, 15]}
EMPTY = {"page_table": [7, 2, 9, 3, 6], "page_indptr": [0, 0, 2, 5], "last_page_len": [0, 4, 4]}
EMPTY["cu_seqlens_q"] = [0, 0, 0, 12]
PLACED = {"batch_indices": [0, 0, 0, 1, *[2] * 7, -1, -1], "cache_positions": [6, 7, 8, 3, *range(6, 13), 0, 0]}
PLACED_ROWS = {"page_table": TABLE, "batch_indices": [0, 0, 1, 1, 2, 2], "cache_positions": [7, 8, 2, 3, 11, 12]}
PLACED_FAR = {"page_table": TABLE, "batch_indices": [0, 0, 0, 0, 2], "cache_positions": [5, 6, 7, 8, 12]}
PADDING = {"batch_indices": [-1, -1, -1], "cache_positions": [0, 0, 0]}

FORMS: dict[str, tuple[dict[str, list[Any]], list[int]]] = {
    # the words of `Pages`, and the slot of each token: a prefill and a decode step in one batch, and padding
    "vllm": ({**BLOCKS, **COUNTS}, [*NEW, -1, -1]),
    "vllm-decode": (BLOCKS, [20, 3, 4]),
    "vllm-speculative": (BLOCKS, [11, 20, 2, 3, 27, 4]),
    "vllm-rows": (BLOCKS, [11, 20, 2, 3, 27, 4]),
    "vllm-decode-rows": (BLOCKS, [20, 3, 4]),
    # sequences of a CUDA graph's batch that are not in use
    "vllm-idle": ({"page_table": TABLE, "seq_lens": [5, 0, 8, 0]}, [8, -1, 15, -1]),
    "vllm-none": ({"page_table": TABLE[3:], "seq_lens": [], "cu_seqlens_q": [0]}, [-1, -1, -1]),
    # the last row of a page, and the first of the next
    "full pages": (FULL, [31, 8, 9, 10, 11, 3, 32, 33, 34, 35, 16, 36, 37, 38, 39]),
    "flashinfer": ({**LASTS, **COUNTS}, [*NEW, -1]),
    "flashinfer-decode": (LASTS, [20, 3, 4]),
    # a sequence without pages, and one without new tokens
    "flashinfer-empty": (EMPTY, [36, 37, 38, 39, 12, 13, 14, 15, 24, 25, 26, 27]),
    # FlashInfer's batch_indices and positions
    "placed": ({**LISTED, **PLACED}, [*NEW, -1, -1]),
    "placed-rows": (PLACED_ROWS, [11, 20, 2, 3, 27, 4]),
    "placed-padding": ({"page_table": [], "page_indptr": [0], **PADDING}, [-1, -1, -1]),
    "placed-far": (PLACED_FAR, [9, 10, 11, 20, 4]),
}
LONG = ("vllm-speculative", "flashinfer-empty", "placed-far")
"""The forms whose tensors are int64."""


def made(name: str, device: str) -> dict[str, Tensor]:
    """The words of a form; a block table is a part of a wider one."""
    dtype = torch.int64 if name in LONG else torch.int32
    found = {word: torch.tensor(x, dtype=dtype, device=device) for word, x in FORMS[name][0].items()}
    table = found["page_table"]
    return {**found, "page_table": torch.nn.functional.pad(table, (0, 3))[:, :-3] if table.dim() == 2 else table}


def caches_of(order: str, device: str) -> tuple[Tensor, ...]:
    """k's and v's pages, full of the same noise in each call. one page: k and v are neighbours in a page."""
    lead = (PAGES, 2) if "one page" in order else (2, PAGES)
    shape = (*lead, 2, ROWS, D) if "HND" in order else (*lead, ROWS, 2, D)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(6)).bfloat16().to(device)
    return (noise.transpose(2, 3) if "HND" in order else noise).unbind(lead.index(2))


CALLS: list[tuple[str, str, list[int]]] = [
    *[(name, "NHD", []) for name in FORMS],
    *[("flashinfer", "HND", []), ("flashinfer", "one page", []), ("vllm", "one page HND", [])],
    *[(name, "NHD", REST) for name in ("vllm", "flashinfer", "vllm-rows")],
    *[("flashinfer", "one page", REST), ("vllm-idle", "NHD", [9, 10, 11]), ("full pages", "NHD", [17, 18, 19])],
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "order", "cleared"), CALLS)
def test_pages_hold_the_tokens_in_their_slots(name: str, order: str, cleared: list[int], device: str) -> None:
    """All other rows stay, but those that clear_page clears. The second call also rotates q and k in place."""
    slots, layout = FORMS[name][1], "bshd" if "rows" in name else "thd"
    q, k, v, cos, sin = inputs(device, *((3, len(slots) // 3) if layout == "bshd" else (len(slots),)), 4, D)
    errors = torch.zeros(1, dtype=torch.int32, device=device)
    turned = jitrope.apply_rope(q, k, cos, sin, layout=layout)
    for own in (False, True):
        caches, wanted, a, b = caches_of(order, device), caches_of(order, device), q.clone(), k.clone()
        pages = Pages(**made(name, device), errors=errors, clear_page=bool(cleared))
        cache = KVCache(*caches, pages, rotate_k=own)
        got = jitrope.prepare_qkv(a, b, v, cos, sin, cache=cache, inplace=own, layout=layout)[0]
        assert same(got, turned[0])
        assert (got is a) == own
        assert same(b, turned[1] if own else k)
        for cache, want, x in zip(caches, wanted, (turned[1], v)):
            for slot, row in zip(slots, x.reshape(-1, 2, D)):
                if slot >= 0:
                    want[slot // ROWS, slot % ROWS] = row
            for slot in cleared:
                want[slot // ROWS, slot % ROWS] = 0
            assert same(cache, want)
    assert errors.item() == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm", [None, Norm()])
@pytest.mark.parametrize("inplace", [False, True])
def test_tokens_after_the_last_sequence_and_their_page(inplace: bool, norm: Any, device: str) -> None:
    """In place they are not stored, and clear nothing; else k is stored as zeros, and v as it is."""
    q, k, v = torch.randn(3, 3, 2, 16, generator=torch.Generator().manual_seed(1)).to(device)
    cos, sin = (x.to(device) for x in jitrope.tables.cos_sin(8, jitrope.tables.inv_freq(rotary_dim=16)[0]))
    lengths, offsets, table = (torch.tensor(x, device=device) for x in ([3], [0, 3], [[1]]))
    caches, given = torch.ones(2, 2, 4, 2, 16, device=device), v.clone()
    pages = Pages(table, seq_lens=lengths, cu_seqlens_q=offsets, clear_page=True)
    packed = Packed(torch.tensor([0, 2], device=device))
    words = {"positions": packed, "norm": norm, "inplace": inplace, "cache": KVCache(*caches, pages)}
    jitrope.prepare_qkv(q, k, v, cos, sin, **words)
    assert torch.equal(caches[1, 1, :2], given[:2])
    rest = caches[:, 1, 2:]
    if inplace:
        assert (rest == 1).all()
    else:
        assert (rest[:, 1] == 0).all()
        assert (rest[0, 0] == 0).all()
        assert torch.equal(rest[1, 0], given[2])


FAR = 2**40
WILD: dict[str, tuple[str, Callable[[dict[str, Tensor]], Any], int]] = {
    # the form, the change of its tables, and the number of tokens that lead nowhere
    "a page past the last": ("vllm", lambda t: t["page_table"].fill_(PAGES), 11),
    "a negative page": ("flashinfer", lambda t: t["page_table"].fill_(-1), 11),
    "a far page": ("vllm-speculative", lambda t: t["page_table"].fill_(FAR), 6),
    "a longer sequence than the table": ("vllm", lambda t: t["seq_lens"].fill_(10**6), 11),
    "far lengths": ("vllm-speculative", lambda t: t["seq_lens"].fill_(FAR), 6),
    "negative lengths": ("vllm-speculative", lambda t: t["seq_lens"].fill_(-FAR), 6),
    "the longest length": ("vllm-speculative", lambda t: t["seq_lens"].fill_(2**63 - 1), 6),
    "more new tokens than tokens": ("vllm", lambda t: t["seq_lens"].fill_(1), 8),
    "a last page with more rows than there are": ("flashinfer", lambda t: t["last_page_len"].fill_(50), 11),
    "negative rows": ("flashinfer", lambda t: t["last_page_len"].fill_(-500), 11),
    "a row before the first page": ("flashinfer", lambda t: t["last_page_len"].fill_(-1), 1),
    "offsets past the pages": ("flashinfer", lambda t: t["page_indptr"].add_(1000), 11),
    "offsets before the pages": ("flashinfer", lambda t: t["page_indptr"].sub_(1000), 11),
    "far offsets": ("flashinfer-empty", lambda t: t["page_indptr"].mul_(FAR).add_(FAR), 12),
    "sequences past the last": ("placed-rows", lambda t: t["batch_indices"].copy_(torch.arange(4, 10)), 6),
    "far sequences": ("placed-far", lambda t: t["batch_indices"].fill_(FAR), 5),
    "a position past the pages": ("placed", lambda t: t["cache_positions"].add_(1000), 11),
    "positions below 0": ("placed-far", lambda t: t["cache_positions"].fill_(-1), 5),
    "the farthest positions": ("placed-far", lambda t: t["cache_positions"].fill_(2**63 - 1), 5),
    "a page past the last of a token": ("placed", lambda t: t["page_table"].fill_(PAGES), 11),
    "offsets past the pages of a token": ("placed", lambda t: t["page_indptr"].add_(1000), 11),
    "falling offsets": ("flashinfer", lambda t: t["page_indptr"].neg_(), 11),
    "falling offsets of a token": ("placed", lambda t: t["page_indptr"].copy_(t["page_indptr"].flip(0)), 11),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", WILD)
def test_wild_tables_write_nothing_and_are_counted(name: str, device: str) -> None:
    form, change, count = WILD[name]
    change(pages := made(form, device))
    slots, layout = FORMS[form][1], "bshd" if "rows" in form else "thd"
    given = inputs(device, *((3, 2) if layout == "bshd" else (len(slots),)), 4, D)
    caches, before = caches_of("NHD", device), caches_of("NHD", device)[0]
    errors = torch.zeros((), dtype=torch.int32, device=device)
    for n in (1, 2):
        jitrope.prepare_qkv(*given, cache=KVCache(*caches, Pages(**pages, errors=errors)), layout=layout)
        assert errors.item() == n * count
    jitrope.prepare_qkv(*given, cache=KVCache(*caches, Pages(**pages)), layout=layout)  # without a counter
    stored = int((caches[0] != before).any(-1).any(-1).sum())
    assert stored == sum(slot >= 0 for slot in slots) - count
    if stored == 0 and "batch_indices" not in pages:
        jitrope.prepare_qkv(*given, cache=KVCache(*caches, Pages(**pages, clear_page=True)), layout=layout)
        assert same(caches[0], before)
    with pytest.raises(InvalidInput, match=f"lead {count} tokens out"):
        jitrope.prepare_qkv(*given, cache=KVCache(*caches, Pages(**pages)), layout=layout, check=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("max_seqlen", [None, 4])
@pytest.mark.parametrize("normed", [False, True])
def test_errors_are_counted_in_each_sequence(normed: bool, max_seqlen: int | None, device: str) -> None:
    """A packed batch may have a grid over its sequences, each in its own blocks."""
    q, k, cos = (torch.randn(*shape, device=device) for shape in ((7, 5, 16), (7, 5, 16), (21, 8)))
    offsets, lengths = (torch.tensor(x, device=device) for x in ([0, 1, 5], [1, 4]))
    table = torch.tensor([[0, 1], [-1, -1]], device=device)
    errors = torch.zeros((), dtype=torch.int32, device=device)
    pages = Pages(table, seq_lens=lengths, cu_seqlens_q=offsets, errors=errors)
    cache = KVCache(torch.zeros(2, 3, 5, 16, device=device), None, pages)
    norm = Norm(torch.ones(16, device=device), torch.ones(16, device=device)) if normed else None
    positions = Packed(offsets, max_seqlen=max_seqlen)
    for launch in ("auto", "token_linear", "grid_2d"):
        jitrope.configure(launch=launch)
        errors.zero_()
        jitrope.prepare_qkv(q, k, None, cos, cos, norm=norm, cache=cache, positions=positions)
        assert errors.item() == 4, launch


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rotary", [D, 32])
@pytest.mark.parametrize("norm", [None, Norm()])
@pytest.mark.parametrize("token", [0, 1, 3, 7, 10])
def test_each_token_is_counted_once(token: int, norm: Any, rotary: int, device: str) -> None:
    """A block of several tokens does it too, although some of its threads only copy."""
    q, k, v, cos, sin = inputs(device, 11, 4, D)
    table = torch.arange(11, dtype=torch.int32, device=device)[:, None] % PAGES
    table[token] = -1
    errors = torch.zeros(1, dtype=torch.int32, device=device)
    cache = KVCache(*caches_of("NHD", device), Pages(table, seq_lens=torch.ones_like(table[:, 0]), errors=errors))
    words = {"rotary_dim": rotary, "rotary_offset": (D - rotary) // 2, "norm": norm}
    for launch in ("token_linear", "grid_2d"):
        jitrope.configure(launch=launch)
        tables = cos[:, : rotary // 2], sin[:, : rotary // 2]
        jitrope.prepare_qkv(q, k, v, *tables, cache=cache, layout="thd", **words)
    assert errors.item() == 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ends", [(0, -5, 3, 40), (7, 5, 2, 1), (FAR, FAR, -FAR, FAR), (-(2**63), 2**63 - 1, 0, 4)])
def test_wild_offsets_of_new_tokens_stay_inside(ends: tuple[int, ...], device: str) -> None:
    """Only pages of the table are written, whatever the offsets say; under ASan nothing else is touched."""
    table, lengths = (torch.tensor(x, device=device) for x in (TABLE, [9, 4, 13]))
    errors = torch.zeros(1, dtype=torch.int32, device=device)
    pages = Pages(table, seq_lens=lengths, cu_seqlens_q=torch.tensor(ends, device=device), errors=errors)
    caches, before = caches_of("NHD", device), caches_of("NHD", device)[0]
    jitrope.prepare_qkv(*inputs(device, 11, 4, D), cache=KVCache(*caches, pages), layout="thd")
    changed = (caches[0] != before).flatten(1).any(1).nonzero().flatten().tolist()
    assert {*changed} <= {page for row in TABLE for page in row}


@pytest.mark.parametrize("device", DEVICES)
def test_a_compiled_call_counts(device: str) -> None:
    """Its pages and its counter may change between calls."""
    q, k, v, cos, sin = given = inputs(device, 12, 4, D)
    pages, caches, before = made("flashinfer", device), caches_of("NHD", device), caches_of("NHD", device)
    errors = torch.zeros(1, dtype=torch.int32, device=device)

    compiled = torch.compile(jitrope.prepare_qkv, backend="aot_eager", fullgraph=True)
    for table, count in ((torch.full_like(pages["page_table"], PAGES), 11), (pages["page_table"], 0)):
        assert all(same(x, y) for x, y in zip(caches, before))
        cache = KVCache(*caches, Pages(**{**pages, "page_table": table}, errors=errors.zero_()))
        got = compiled(*given, cache=cache, layout="thd")[0]
        assert errors.item() == count
    assert same(got, jitrope.apply_rope(q, k, cos, sin, layout="thd")[0])
    assert same(caches[1][5, 0], v[2])
