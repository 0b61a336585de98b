"""Caches by page table: `Pages`, as FlashInfer and vLLM keep them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import jitrope
from jitrope import InvalidInput, KVCache, Mrope, Norm, Pages, Quantize
from jitrope.run import launch as runtime

from .devices import DEVICE, DEVICES

FP8 = torch.float8_e4m3fn
ROWS, PAGES, D = 4, 24, 64


@dataclass(frozen=True)
class Form:
    """Sequences with new tokens at their ends, and the form of their page table."""

    why: str
    lengths: tuple[int, ...] = (9, 4, 13)  # with the new tokens
    new: tuple[int, ...] = (3, 1, 7)
    spare: int = 0  # tokens after the last sequence
    table: str = "block_table"  # block_table | page_indices
    counts: bool = True  # cu_seqlens_q is given
    dtype: torch.dtype = torch.int32
    batched: bool = False  # (B, S, H, D)
    placed: bool = False  # the sequence and the position of each token are given
    order: str = "NHD"  # NHD | HND | one (k and v in one page) | one HND
    words: dict[str, Any] = field(default_factory=dict)


FORMS = {
    "vllm": Form("a prefill and a decode step in one batch, and padding", spare=2),
    "vllm-decode": Form("a new token each: no offsets", new=(1, 1, 1), counts=False),
    "vllm-speculative": Form("several new tokens each", new=(2, 2, 2), counts=False, dtype=torch.int64),
    "vllm-rows": Form("a batch row for each sequence", new=(2, 2, 2), counts=False, batched=True),
    "vllm-decode-rows": Form("a token a row", new=(1, 1, 1), counts=False, batched=True),
    "vllm-idle": Form(
        "sequences of a CUDA graph's batch that are not in use", lengths=(5, 0, 8, 0), new=(1, 1, 1, 1), counts=False
    ),
    "vllm-none": Form("no sequence: all tokens are padding", lengths=(), new=(), spare=3),
    "flashinfer": Form("append_paged_kv_cache", table="page_indices", spare=1),
    "flashinfer-decode": Form("a new token each", new=(1, 1, 1), counts=False, table="page_indices"),
    "flashinfer-empty": Form(
        "a sequence without pages, one without new tokens",
        lengths=(0, 8, 12),
        new=(0, 0, 12),
        table="page_indices",
        dtype=torch.int64,
    ),
    "placed": Form("FlashInfer's batch_indices and positions", table="page_indices", spare=2, placed=True),
    "placed-rows": Form("rows of the batch, by a block table", new=(2, 2, 2), batched=True, placed=True),
    "placed-padding": Form("no sequence", lengths=(), new=(), table="page_indices", spare=3, placed=True),
    "placed-far": Form("int64", lengths=(9, 0, 13), new=(4, 0, 1), dtype=torch.int64, placed=True),
    "full pages": Form("the last row of a page, and the first of the next", lengths=(8, 9, 4), new=(5, 6, 4)),
    "HND": Form("heads before the rows of a page", order="HND", table="page_indices"),
    "one cache": Form("k and v in one page, (pages, 2, rows, H, D)", order="one", table="page_indices"),
    "one cache HND": Form("(pages, 2, H, rows, D)", order="one HND"),
}
STAGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "rotate k": {"rotate_k": True},
    "fp8": {"fp8": True},
    "query in fp8 too": {"fp8": True, "quantize": Quantize(0.05)},
    "norm": {"norm": (0.5, 1.5)},
    "norm, v too, fp8": {"norm": (0.5, 1.5), "v_norm": True, "fp8": True},
    "dynamic scales of q": {"quantize": jitrope.DynamicQuantize()},
    "partial": {"rotary_dim": 32, "rotary_offset": 16},
    "in place": {"inplace": True},
    "clear_page": {"clear_page": True},
    "clear_page, fp8, norm": {"clear_page": True, "fp8": True, "norm": (0.5, 1.5)},
    "mrope": {"mrope": (8, 12, 12)},
}


@dataclass
class Made:
    """A call, and where its tokens belong."""

    q: Tensor
    k: Tensor
    v: Tensor
    caches: tuple[Tensor, Tensor]
    pages: dict[str, Tensor]
    ids: Tensor
    places: list[tuple[int, int] | None]  # (page, row) of each token
    last: list[tuple[int, int]]  # of the last token of each sequence that has new tokens

    def on(self, place: Callable[[Tensor], Tensor]) -> Made:
        caches = place(self.caches[0]), place(self.caches[1])
        pages = {name: place(x) for name, x in self.pages.items()}
        return Made(*map(place, (self.q, self.k, self.v)), caches, pages, place(self.ids), self.places, self.last)


def made(form: Form, device: str, fp8: bool = False, dtype: torch.dtype = torch.bfloat16) -> Made:
    """Pages in random order, caches full of noise."""
    generator = torch.Generator().manual_seed(5)
    free = torch.randperm(PAGES, generator=generator).tolist()
    pages = [[free.pop() for _ in range(-(-length // ROWS))] for length in form.lengths]
    places: list[tuple[int, int] | None] = []
    ids, last = [], []
    for own, length, new in zip(pages, form.lengths, form.new):
        positions = range(length - new, length)
        ids += [max(0, position) for position in positions]
        places += [(own[at // ROWS], at % ROWS) if length else None for at in positions]
        last += places[-1:] if new and length else []
    places, ids = places + [None] * form.spare, ids + [0] * form.spare
    found: dict[str, Any] = {}
    if form.table == "block_table":
        widest = max(map(len, pages), default=0) + 2  # a part of a wider table, and unused rows
        table = torch.full((len(pages) + 1, widest + 3), -1)
        for row, own in zip(table, pages):
            row[: len(own)] = torch.tensor(own, dtype=torch.long)
        found["page_table"], found["seq_lens"] = table[:, :widest], torch.tensor(form.lengths, dtype=torch.long)
    else:
        found["page_table"] = torch.tensor([page for own in pages for page in own], dtype=torch.long)
        found["page_indptr"] = torch.tensor([0, *(len(own) for own in pages)]).cumsum(0)
        found["last_page_len"] = torch.tensor([(length - 1) % ROWS + 1 if length else 0 for length in form.lengths])
    if form.placed:
        found = {name: x for name, x in found.items() if name in ("page_table", "page_indptr")}
        own = [n for n, new in enumerate(form.new) for _ in range(new)]
        found["batch_indices"] = torch.tensor([*own, *[-1] * form.spare], dtype=torch.long)
        found["cache_positions"] = torch.tensor(ids, dtype=torch.long)
    elif form.counts:
        found["cu_seqlens_q"] = torch.tensor([0, *form.new]).cumsum(0)
    tokens = len(places)
    shape = (len(form.lengths), tokens // len(form.lengths)) if form.batched else (tokens,)
    q, k, v = (torch.randn(*shape, heads, D, generator=generator).to(device, dtype) for heads in (4, 2, 2))
    noise = torch.randn(PAGES, 2, ROWS, 2, D, generator=generator).to(FP8 if fp8 else dtype)
    both = {"HND": noise.permute(1, 0, 3, 2, 4), "one": noise, "one HND": noise.transpose(2, 3)}.get(
        form.order, noise.transpose(0, 1)
    )
    both = both.contiguous().to(device)
    if "HND" in form.order:
        both = both.transpose(2, 3)
    caches = both.unbind(0 if form.order in ("NHD", "HND") else 1)
    tensors = {name: wide(x, form.dtype, device) for name, x in found.items()}
    return Made(q, k, v, caches, tensors, torch.tensor(ids, device=device).view(shape), places, last)


def wide(x: Tensor, dtype: torch.dtype, device: str) -> Tensor:
    """x with its strides."""
    base = (x._base if x._base is not None and x.dim() == 2 else x).to(device, dtype)
    return base[:, : x.shape[1]] if x.dim() == 2 else base


def stored(m: Made, stage: dict[str, Any], places: Any) -> tuple[Any, dict[str, Any]]:
    """q of a call that stores k and v at these places, and its words."""
    words, device = {name: x for name, x in stage.items() if name != "clear_page"}, m.q.device
    scales = {"k_scale": 0.7, "v_scale": 0.3} if words.pop("fp8", False) else {}
    cache = KVCache(*m.caches, places, rotate_k=words.pop("rotate_k", False), **scales)
    ids: Any = m.ids
    if "mrope" in words:
        ids = Mrope(torch.stack((m.ids, m.ids.flip(-1), m.ids)), words.pop("mrope"))
    if "norm" in words:
        weights = [torch.linspace(0.5, x, D, device=device) for x in words.pop("norm")]
        words["norm"] = Norm(*weights, v_norm=words.pop("v_norm", False))
    table = torch.randn(50, words.get("rotary_dim", D), generator=torch.Generator().manual_seed(2)).to(device)
    layout = "bshd" if m.q.dim() == 4 else "thd"
    words = {**words, "cos_sin_cache": table, "positions": ids, "layout": layout}
    return jitrope.prepare_qkv(m.q, m.k, m.v, **words, cache=cache)[0], words


def run(m: Made, stage: dict[str, Any], errors: Tensor | None = None) -> tuple[Any, dict[str, Any]]:
    """The same by the page table."""
    own = {"errors": errors, **m.pages, **{name: x for name, x in stage.items() if name == "clear_page"}}
    return stored(m, stage, Pages(**own))


def expected(form: Form, stage: dict[str, Any], device: str) -> tuple[Any, tuple[Tensor, Tensor], Tensor]:
    """(q, the caches, k) by a slot for each token of dense caches: `KVCache` by slots has its own tests."""
    m = made(form, device, stage.get("fp8", False))
    m.caches = m.caches[0].contiguous(), m.caches[1].contiguous()
    slots = [-1 if place is None else place[0] * ROWS + place[1] for place in m.places]
    q, _ = stored(m, stage, torch.tensor(slots, device=device, dtype=torch.long))
    if stage.get("clear_page"):
        for page, row in m.last:
            for x in m.caches:
                x.view(torch.uint8)[page, row + 1 :] = 0
    return q, m.caches, m.k


def same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple):
        return all(same(x, y) for x, y in zip(a, b))
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


CALLS = [
    *[(name, "plain") for name in FORMS],
    *[(("flashinfer", "vllm", "vllm-rows")[n % 3], stage) for n, stage in enumerate(STAGES) if stage != "plain"],
    *[("one cache", "clear_page"), ("vllm-idle", "clear_page"), ("full pages", "clear_page")],
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "stage"), CALLS)
def test_pages_hold_what_slots_would(name: str, stage: str, device: str) -> None:
    """Every byte of the caches, also of rows that are not named; the second call is a known one."""
    form, words = FORMS[name], STAGES[stage]
    want_q, want, want_k = expected(form, words, device)
    errors = torch.zeros(1, dtype=torch.int32, device=device)
    m = made(form, device, words.get("fp8", False))
    kept = [x.clone() for x in (m.q, m.k, *m.caches)]
    for _ in range(2):
        for x, was in zip((m.q, m.k, *m.caches), kept):
            x.view(torch.uint8).copy_(was.view(torch.uint8))
        q, _ = run(m, words, errors=errors)
        assert same(q, want_q)
        assert same(m.caches, want)
        assert same(m.k, want_k)
    assert errors.item() == 0


FAR = 2**40
WILD: dict[str, tuple[str, Callable[[dict[str, Tensor]], None], int]] = {
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
    "offsets past the pages": ("flashinfer", lambda t: t["page_indptr"].add_(1000), 11),
    "offsets before the pages": ("flashinfer", lambda t: t["page_indptr"].sub_(1000), 11),
    "far offsets": ("flashinfer-empty", lambda t: t["page_indptr"].mul_(FAR).add_(FAR), 12),
    "a sequence past the last": ("placed-rows", lambda t: t["batch_indices"].fill_(4), 6),
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
    m = made(FORMS[form], device)
    change(m.pages)
    before = m.caches[0].clone()
    errors = torch.zeros((), dtype=torch.int32, device=device)
    for n in (1, 2):
        run(m, {}, errors=errors)
        assert errors.item() == n * count
    run(m, {})  # without a counter
    stored = int((m.caches[0] != before).any(-1).any(-1).sum())
    assert stored == sum(place is not None for place in m.places) - count
    if stored == 0 and not FORMS[form].placed:
        run(m, {"clear_page": True})
        assert torch.equal(m.caches[0], before)
    with pytest.raises(InvalidInput, match=f"lead {count} tokens out"):
        run(m, {"check": True})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("max_seqlen", [None, 4])
@pytest.mark.parametrize("normed", [False, True])
def test_errors_are_counted_in_each_sequence(normed: bool, max_seqlen: int | None, device: str) -> None:
    """A packed batch may have a grid over its sequences, each in its own blocks."""
    q, k, cos = (torch.randn(*shape, device=device) for shape in ((7, 5, 16), (7, 5, 16), (21, 8)))
    offsets, lengths = (torch.tensor(x, device=device) for x in ([0, 1, 5], [1, 4]))
    table = torch.tensor([[0, 1], [-1, -1]], device=device)
    errors = torch.zeros((), dtype=torch.int32, device=device)
    cache = KVCache(
        torch.zeros(2, 3, 5, 16, device=device),
        None,
        Pages(table, seq_lens=lengths, cu_seqlens_q=offsets, errors=errors),
    )
    norm = Norm(torch.ones(16, device=device), torch.ones(16, device=device)) if normed else None
    positions = jitrope.Packed(offsets, max_seqlen=max_seqlen)
    for launch in ("auto", "token_linear", "grid_2d"):
        jitrope.configure(launch=launch)
        errors.zero_()
        jitrope.prepare_qkv(q, k, None, cos, cos, norm=norm, cache=cache, positions=positions)
        assert errors.item() == 4, launch


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("stage", ["plain", "partial", "norm", "partial norm"])
@pytest.mark.parametrize("token", [0, 1, 3, 7, 10])
def test_each_token_is_counted_once(token: int, stage: str, device: str) -> None:
    """Also by the threads of a block of several tokens, of which some only copy."""
    words: dict[str, Any] = {**(STAGES["partial"] if "partial" in stage else {})}
    words.update(STAGES["norm"] if "norm" in stage else {})
    m = made(Form("", lengths=(1,) * 11, new=(1,) * 11, counts=False), device)
    m.pages["page_table"][token, 0] = -1
    errors = torch.zeros(1, dtype=torch.int32, device=device)
    for launch in ("token_linear", "grid_2d"):
        jitrope.configure(launch=launch)
        run(m, words, errors)
    assert errors.item() == 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ends", [(0, -5, 3, 40), (7, 5, 2, 1), (FAR, FAR, -FAR, FAR), (-(2**63), 2**63 - 1, 0, 4)])
def test_wild_offsets_of_new_tokens_stay_inside(ends: tuple[int, ...], device: str) -> None:
    """Only pages of the table are written, whatever the offsets say; under ASan nothing else is touched."""
    m = made(Form("", dtype=torch.int64), device)
    m.pages["cu_seqlens_q"] = torch.tensor(ends, device=device)
    before = m.caches[0].clone()
    run(m, {}, torch.zeros(1, dtype=torch.int32, device=device))
    changed = (m.caches[0] != before).flatten(1).any(1).nonzero().flatten().tolist()
    assert set(changed) <= set(m.pages["page_table"].flatten().tolist())


# ---- refusals ------------------------------------------------------------------------------------

INT = torch.int32
REFUSALS: dict[str, tuple[str, dict[str, Any], str]] = {
    "no lengths": ("vllm", {"seq_lens": None}, "Pages: seq_lens is None; it must be a tensor"),
    "both lengths": (
        "flashinfer",
        {"seq_lens": torch.zeros(3, dtype=INT)},
        "seq_lens is .* None beside page_indptr and last_page_len",
    ),
    "a length beside places": (
        "placed",
        {"seq_lens": torch.zeros(3, dtype=INT)},
        "seq_lens is .* None beside batch_indices and cache_positions",
    ),
    "offsets beside places": ("placed", {"cu_seqlens_q": torch.zeros(4, dtype=INT)}, "cu_seqlens_q is .* None beside"),
    "sequences without positions": ("placed", {"cache_positions": None}, "cache_positions is None"),
    "positions without sequences": ("placed-rows", {"batch_indices": None}, "batch_indices is None"),
    "too few positions": (
        "placed",
        {"cache_positions": torch.zeros(3, dtype=INT)},
        "cache_positions has 3 entries for 13 tokens",
    ),
    "strided sequences": (
        "placed",
        {"batch_indices": torch.zeros(26, dtype=INT)[::2]},
        "batch_indices is .*; it must be int32, contiguous",
    ),
    "a page to clear": ("placed", {"clear_page": True}, "clear_page is True; it must be False beside batch_indices"),
    "a flat block table": (
        "vllm",
        {"page_table": torch.zeros(9, dtype=INT)},
        r"page_table is .*; it must be \(N, max_pages\), int32 or int64",
    ),
    "a table of pages with two axes": (
        "flashinfer",
        {"page_table": torch.zeros(3, 4, dtype=INT)},
        r"page_table is .*; it must be \(n,\), int32 or int64, .* like k \(T=12, H=2, D=64\)",
    ),
    "floats": ("vllm", {"seq_lens": torch.zeros(3)}, r"seq_lens is float32; it must be \(3,\), int32, contiguous"),
    "two dtypes": (
        "vllm",
        {"seq_lens": torch.zeros(3, dtype=torch.int64)},
        r"seq_lens is int64; it must be \(3,\), int32, contiguous",
    ),
    "too few rows": (
        "vllm",
        {"page_table": torch.zeros(2, 4, dtype=INT)},
        "page_table has 2 rows, but seq_lens has 3 entries",
    ),
    "too few offsets": (
        "flashinfer",
        {"page_indptr": torch.zeros(3, dtype=INT)},
        r"page_indptr is .*; it must be \(4,\), int32, contiguous",
    ),
    "too many counts": (
        "vllm",
        {"cu_seqlens_q": torch.zeros(6, dtype=INT)},
        r"cu_seqlens_q is .*; it must be \(4,\), int32, contiguous",
    ),
    "tokens that no sequence has": ("vllm-decode", {"seq_lens": torch.zeros(2, dtype=INT)}, "2 entries for 3 tokens"),
    "a strided table": ("vllm", {"page_table": torch.zeros(9, 4, dtype=INT).T}, "last axis must be contiguous"),
    "a counter of floats": ("vllm", {"errors": torch.zeros(1)}, r"errors is float32; it must be \(1,\) or \(\), int32"),
    "a long counter": (
        "vllm",
        {"errors": torch.zeros(2, dtype=INT)},
        r"errors is .*; it must be \(1,\) or \(\), int32, .* like k \(T=13, H=2, D=64\)",
    ),
    "on meta": (
        "vllm",
        {"seq_lens": torch.zeros(3, dtype=INT, device="meta")},
        r"seq_lens is .*; it must be \(3,\), int32, contiguous",
    ),
    "a word": ("vllm", {"clear_page": "yes"}, "Pages: clear_page is 'yes'"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    form, changes, text = REFUSALS[name]
    m = made(FORMS[form], "cpu")
    before = [x.clone() for x in m.caches]
    m.pages = {label: x for label, x in {**m.pages, **changes}.items() if x is not None}
    with pytest.raises(InvalidInput, match=text):
        run(m, {})
    assert same(tuple(m.caches), tuple(before))


def test_pages_without_rows() -> None:
    m = made(FORMS["vllm"], "cpu")
    m.caches = m.caches[0][:, :0], m.caches[1][:, :0]
    with pytest.raises(InvalidInput, match="k_cache has pages of 0 rows"):
        run(m, {})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm", [None, jitrope.Norm()])
@pytest.mark.parametrize("inplace", [False, True])
def test_tokens_after_the_last_sequence_and_their_page(inplace: bool, norm: Any, device: str) -> None:
    """In place they are not stored, and clear nothing; else k is stored as zeros, and v as it is."""
    q, k, v = torch.randn(3, 3, 2, 16, generator=torch.Generator().manual_seed(1)).to(device)
    cos, sin = (x.to(device) for x in jitrope.tables.cos_sin(8, jitrope.tables.inv_freq(rotary_dim=16)[0]))
    lengths, offsets, table = (torch.tensor(x, device=device) for x in ([3], [0, 3], [[1]]))
    caches, given = torch.ones(2, 2, 4, 2, 16, device=device), v.clone()
    pages = jitrope.Pages(table, seq_lens=lengths, cu_seqlens_q=offsets, clear_page=True)
    packed = jitrope.Packed(torch.tensor([0, 2], device=device))
    words = {"positions": packed, "norm": norm, "inplace": inplace, "cache": jitrope.KVCache(*caches, pages)}
    jitrope.prepare_qkv(q, k, v, cos, sin, **words)
    assert torch.equal(caches[1, 1, :2], given[:2])
    rest = caches[:, 1, 2:]
    if inplace:
        assert (rest == 1).all()
    else:
        assert (rest[:, 1] == 0).all()
        assert (rest[0, 0] == 0).all()
        assert torch.equal(rest[1, 0], given[2])


def test_slots_have_no_pages() -> None:
    m = made(FORMS["vllm"], "cpu")
    m.caches = m.caches[0].flatten(0, 1), m.caches[1].flatten(0, 1)
    with pytest.raises(InvalidInput, match="with a page table it must be"):
        run(m, {})


# ---- torch's situations --------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_it_compiles_and_counts(device: str) -> None:
    form = FORMS["flashinfer"]
    want_q, want, _ = expected(form, {}, device)
    m = made(form, device)
    m.pages["page_table"][0] = PAGES  # the first page of the first sequence, which has no new tokens
    errors = torch.zeros(1, dtype=torch.int32, device=device)
    table = run(m, {})[1]["cos_sin_cache"]

    def call(q: Tensor, k: Tensor, v: Tensor, page_table: Tensor) -> Any:
        cache = KVCache(*m.caches, Pages(**{**m.pages, "page_table": page_table}, errors=errors))
        return jitrope.prepare_qkv(q, k, v, cos_sin_cache=table, positions=m.ids, cache=cache, layout="thd")[0]

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for n in (1, 2):
        assert same(compiled(m.q, m.k, m.v, m.pages["page_table"]), want_q)
        assert errors.item() == 0, n
        assert same(m.caches, want)
    compiled(m.q, m.k, m.v, m.pages["page_table"].fill_(PAGES))
    assert errors.item() == 11


def test_fake_tensors_have_the_shape() -> None:
    m = made(FORMS["vllm"], "cpu")
    with torch._subclasses.fake_tensor.FakeTensorMode() as mode:
        m = m.on(mode.from_tensor)
        assert run(m, {})[0].shape == m.q.shape


def test_a_value_is_printed_and_planned() -> None:
    m = made(FORMS["flashinfer"], "cpu")
    pages = Pages(**m.pages, clear_page=True)
    assert re.match(r"Pages\(page_table=.*, clear_page=True\)", repr(pages))
    assert "page_table" in repr(KVCache(*m.caches, pages))
    m = m.on(lambda x: x.to("meta"))
    with jitrope.planning(["auto"]) as specs:
        run(m, {"clear_page": True})
    (spec,) = specs
    assert (spec.page_table_dtype, spec.page_indptr, spec.cu_seqlens_q, spec.page_size) == ("int32", True, True, ROWS)
    assert spec.clear_page


@pytest.mark.gpu
def test_one_launch() -> None:
    m = made(FORMS["vllm"], DEVICE)
    runtime.local.recent.clear()
    run(m, {"clear_page": True})
    assert len({known.origin[0] for functions in runtime.local.recent.values() for known in functions}) == 1
