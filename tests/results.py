"""The results of a call of the table (`sweep`) against those in fp64, and the places they go to."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import jitrope
from jitrope import KVCache, Pages, Scaled, Ulysses
from jitrope.base.spec import Spec

from . import oracle
from .calls import BLOCKS, CACHES, NVFP4, OF_K, OF_ROWS, PE, ROPES, Case
from .sweep import BLOCK_FORMS, E4M3, E5M2, E8M0, FP4, GLOBALS, IN_PAGES, STEPS, V_DIM, Made, S

RANKS = 2
PAGES, ROWS = 8, 4
LARGEST = {E4M3: 448.0, E5M2: 57344.0, torch.int8: 127.0, FP4: 6.0}
CACHE_SCALES = {"k_scale": 0.005, "v_scale": 0.3}


# ---- comparisons -----------------------------------------------------------------------------------

# relative, and of the smallest numbers
HALVES = {E4M3: (2**-4, 2**-10), E5M2: (2**-3, 2**-17), torch.int8: (0, 0.5), FP4: (2**-2, 2**-2)}


def near(got: Tensor, want: Tensor, noise: float = 1e-5, slack: float = 1.0) -> None:
    """A rounding to got's dtype; what was lost before it is in proportion to the largest element."""
    most = noise * slack * max(1.0, float(want.abs().max()))
    torch.testing.assert_close(got.cpu().to(want.dtype), want.cpu(), rtol=slack * STEPS[got.real.dtype], atol=most)


def near_each(got: Sequence[Tensor | None], want: Sequence[Tensor | None], slack: float = 1.0) -> None:
    """Results of two calls that add in other orders; NaN is NaN. Without slack, and of integers, the same bits."""
    assert len(got) == len(want), f"{len(got)} outputs, not {len(want)}"
    for number, (x, y) in enumerate(zip(got, want)):
        assert (x is None) == (y is None), f"output {number} is {x}, not {y}"
        if x is not None and y is not None:
            rtol = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}.get(y.dtype)
            x, y = (z.contiguous().flatten().view(torch.uint8) if rtol is None else z.float() for z in (x, y))
            size = float(y.nan_to_num(0, 0, 0).abs().max()) if rtol and y.numel() else 1.0
            close = {"rtol": slack * (rtol or 0), "atol": slack * (rtol or 0) / 2 * max(1.0, size), "equal_nan": True}
            torch.testing.assert_close(x, y, **close, msg=lambda text, n=number: f"output {n}: {text}")


def near_units(got: Tensor, want: Tensor, noise: float = 2e-5) -> None:
    """Elements of a format of 4 or 8 bits, rounded once and to the nearest; larger ones are the largest."""
    relative, least = HALVES[got.dtype]
    want = want.cpu().clamp(-LARGEST[got.dtype], LARGEST[got.dtype])
    lost = noise * max(1.0, float(want.abs().max()))
    got = oracle.of_fp4(got) if got.dtype == FP4 else got
    assert ((got.cpu().double() - want).abs() <= (1.001 * relative + noise) * want.abs() + least + lost).all()


def near_scaled(values: Tensor, scale: Tensor, want: Tensor, form: dict[str, Any], noise: float) -> None:
    """Scales (B, S, H, G) of the largest elements, and values (B, S, H, D) that are nearest to elements over them."""
    assert values.dtype == form["dtype"]
    assert scale.dtype == form.get("scale_dtype", torch.float32)
    powers = form.get("scale_dtype") == E8M0 or form.get("scale_fmt") == "ue8m0"
    relative, least = HALVES[E4M3] if scale.dtype == E4M3 else (1e-5, 1e-14)
    bits = scale.view(torch.uint8).int() - 127 if scale.dtype == E8M0 else None
    scale = scale.float() if bits is None else torch.exp2(bits.double())
    want, scale = want.cpu(), scale.double().cpu()
    largest = want.unflatten(-1, (scale.shape[-1], -1)).abs().amax(-1) / LARGEST[values.dtype]
    least += noise * float(largest.max())
    if powers:
        low, high = (torch.exp2(torch.ceil(torch.log2((largest + x).clamp(min=2**-127)))) for x in (-least, least))
        assert ((low <= scale) & (scale <= high)).all()
    else:
        largest = largest if scale.dtype == E4M3 else largest.clamp(min=1e-12 / LARGEST[values.dtype])
        torch.testing.assert_close(scale, largest, rtol=relative, atol=least)
    each = scale.repeat_interleave(want.shape[-1] // scale.shape[-1], -1)
    near_units(values, torch.where(each > 0, want / each, 0.0), noise)


def near_rows(got: Scaled, want: Tensor, m: Made, per_kv: bool) -> None:
    """A head has one scale in a batch row, or in a packed sequence; with per_kv the heads of q that share one of k."""
    values, scale, want = oracle.heads(got.values, m.layout).cpu(), got.scale.cpu(), want.cpu()
    noise, largest_unit = m.lost, LARGEST[values.dtype]
    spans = [*itertools.pairwise(m.ends)] if m.cu else [(0, m.tokens)] * m.batch
    assert len(scale) == len(spans)
    for n, (first, end) in enumerate(spans):
        row = 0 if m.cu else n
        y, own = want[row, first:end], scale[n].double()
        largest = y.abs().amax((0, 2)) if len(y) else torch.zeros(want.shape[2], dtype=torch.float64)
        if per_kv:
            largest = largest.unflatten(0, (len(own), -1)).amax(-1)
        torch.testing.assert_close(own, largest.clamp(min=1e-12) / largest_unit, rtol=1e-5 + noise, atol=0)
        if len(y):
            near_units(values[row, first:end], y / own.repeat_interleave(want.shape[2] // len(own))[:, None], noise)


def whole(got: Any, m: Made, letter: str) -> Any:
    """A result with heads of all ranks, one after the other, if they are apart."""
    is_view = letter == "g" or (letter == "v" and m.case["source"] == "view")
    if m.case["out"] not in ("ulysses", "by_rank") or is_view:
        return got
    axis = m.layout.index("h")
    if not isinstance(got, Scaled):
        return torch.cat([*got], axis)
    values = torch.cat([*got.values.view(torch.uint8)], axis).view(got.values.dtype)  # torch joins fp4's bytes alone
    of_rows, swizzled = m.case["convert"] in OF_ROWS, m.case["convert"] == "tiles"
    return Scaled(values, got.scale if of_rows else torch.cat([*got.scale], 1 if swizzled else axis))


def check_heads(m: Made, got: Any, letter: str) -> None:
    want, form, got = m.expected(letter), m.form, whole(got, m, letter)
    if form is None or letter == "g" or (letter == "v" and not m.converts_v):
        assert got.dtype == m.dtype
        near(oracle.heads(got, m.layout), want, m.lost)
    elif "per" in form:
        near_rows(got, want, m, m.case["convert"] == "kv_rows")
    elif isinstance(got, Scaled):
        values, scale = oracle.heads(got.values, m.layout).cpu(), got.scale.cpu()
        if form.get("swizzled"):
            scale = oracle.of_tiles(scale, values.shape[1], values.shape[-1] // form["group"])
        else:
            scale = oracle.heads(scale if "group" in form else scale[..., None], m.layout)
        if letter == "q" and m.case["convert"] == "weighted":
            scale = scale / oracle.heads(m.weighs.cpu()[..., None], m.layout)
        near_scaled(values, scale, want / (GLOBALS[letter] if m.case["convert"] == "nvfp4" else 1), form, m.lost)
    else:
        assert got.dtype == form["dtype"]
        scale = torch.as_tensor(m.scales[letter]).double().cpu()
        if scale.dim() == 2:  # of each row or sequence
            sequence = torch.bucketize(torch.arange(m.tokens), torch.tensor(m.ends[1:-1]), right=True)
            scale = scale[sequence[None] if m.cu else torch.arange(m.batch)[:, None]]
        near_units(oracle.heads(got, m.layout), want.cpu() / scale[..., None], m.lost)


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(*[x.contiguous().flatten().view(torch.uint8) for x in (a, b)])


# ---- the places of results -------------------------------------------------------------------------


class Places:
    """Fresh tensors, the heads' own memory, or those of the caller with other strides, each in a larger one."""

    def __init__(self, m: Made) -> None:
        case, words = m.case, {"ulysses": {"out": Ulysses(RANKS)}, "inplace": {"inplace": True}}
        self.words: dict[str, Any] = words.get(case["out"], {})
        self.wholes: dict[str, Tensor] = {}
        self.given: dict[str, Tensor] = {}
        self.tensors: list[Tensor] = []  # that a call writes, other than its heads
        if case["out"] not in ("given", "some", "by_rank"):
            return
        lead = (RANKS,) if case["out"] == "by_rank" else ()
        for letter in m.letters:
            if (letter == "v" and case["source"] == "view") or (letter == "k" and case["out"] == "some"):
                continue
            dtype = m.dtype if m.form is None or (letter == "v" and not m.converts_v) else m.form["dtype"]
            width = V_DIM if letter == "v" and case["source"] == "latent" else m.size
            heads = m.counts[letter != "q"] // (RANKS if lead else 1)
            like = torch.empty(m.batch, m.tokens, heads, width // 2 if dtype == FP4 else width, device="meta")
            first, second, *rest, width = oracle.heads(like, m.layout).shape
            whole = torch.full((*lead, second, first, *rest, width + 8), 7.0, device=m.device)
            self.wholes[letter] = whole.byte().view(dtype) if dtype == FP4 else whole.to(dtype)
            self.given[letter] = self.wholes[letter][..., :width].transpose(len(lead), len(lead) + 1)
        self.words = {"out": [self.given.get(x) for x in ("qk" if case["source"] in ROPES else "qkv")]}
        self.tensors = [*self.wholes.values()]

    def check(self, m: Made, got: dict[str, Any]) -> None:
        for letter in m.outputs:
            check_heads(m, got[letter], letter)
        for letter, given in self.given.items():
            x, rest = got[letter], self.wholes[letter][..., -8:]
            assert (x.values if isinstance(x, Scaled) else x) is given
            assert ((rest.view(torch.uint8) if rest.dtype == FP4 else rest.float()) == 7).all()


class Caches(Places):
    """Pages full of noise."""

    def __init__(self, m: Made) -> None:
        super().__init__(m)
        kind = m.case["out"]
        self.kind, self.blocks = kind, kind in BLOCKS
        self.clear, self.errors = kind in ("fp8_pages", "record"), torch.zeros(1, dtype=torch.int32, device=m.device)
        self.letters = "k" if kind in OF_K else "kv"
        form = BLOCK_FORMS.get(kind, {"dtype": {"fp8_slots": E4M3, "fp8_pages": E5M2}.get(kind, m.dtype)})
        self.pages = max(PAGES, m.batch * m.tokens // ROWS + 2)
        lead = (self.pages * ROWS,) if kind == "fp8_slots" else (self.pages, ROWS)
        self.form, size = form, (kind in PE and m.part[0]) or m.size
        shape = (*lead, m.counts[1], size // 2 if form["dtype"] == FP4 else size)
        self.caches = {x: m.noise(*shape, dtype=form["dtype"]) for x in self.letters}
        self.scales = CACHE_SCALES if kind.startswith("fp8") else {}
        self.block_scales: dict[str, Tensor] = {}
        if self.blocks:
            scales = (*shape[:-1], size // form.get("group", size))
            dtype = form.get("scale_dtype", torch.float32)
            self.block_scales = {x: m.noise(*scales, dtype=dtype) for x in self.letters}
            self.scales = {f"{x}_scale": GLOBALS[x] for x in self.letters} if kind in NVFP4 else {}
        of_pe = E4M3 if kind == "record" else m.dtype
        self.k_pe = {"k_pe_cache": m.noise(*shape[:-1], m.part[1], dtype=of_pe)} if kind in PE else {}
        self.tensors = [*self.caches.values(), *self.block_scales.values(), *self.k_pe.values()]
        self.before = [x.clone() for x in self.tensors]
        self.named, self.cleared, places = self._places(m)
        if m.is_own and m.cu:  # spare tokens in place are not stored
            self.named = {slot: token for slot, token in self.named.items() if token < m.ends[-1]}
        value = KVCache(
            self.caches["k"], self.caches.get("v"), places, **self.scales, rotate_k=kind == "own",
            **{f"{x}_block_scale": y for x, y in self.block_scales.items()}, **self.k_pe,
        )  # fmt: skip
        self.words = {"cache": value, **({"inplace": True} if m.is_own else {})}

    def stored(self, x: Tensor) -> Tensor:
        """The rows of a cache that have tokens; torch 2.6 indexes no fp8 on a CPU."""
        return x.reshape(self.pages * ROWS, *x.shape[-2:]).view(torch.uint8)[[*self.named]].view(x.dtype)

    def _places(self, m: Made) -> tuple[dict[int, int], list[int], Any]:
        """(the token in each slot, slots that are cleared, the argument)"""
        tokens, kind = m.batch * m.tokens, self.kind
        ints = functools.partial(torch.tensor, dtype=m.ints, device=m.device)
        each, every = tokens // 2, torch.randperm(self.pages, generator=m.generator).tolist()
        if kind not in IN_PAGES:
            slots = torch.randperm(self.pages * ROWS, generator=m.generator)[:tokens].tolist()
            slots[1] = -1  # a token of padding
            slots[2] = -1 if m.case["more"] == "check" else self.pages * ROWS + 1  # past the end, which a check refuses
            named = {slot: token for token, slot in enumerate(slots) if 0 <= slot < self.pages * ROWS}
            return named, [], ints(slots)
        news = (each - 1, each) if kind == "indptr" else (each, each)  # the last token is padding
        lengths = (news[0] + 1, news[1])
        counts = [-(-length // ROWS) for length in lengths]
        table = [every[: counts[0]], every[counts[0] : sum(counts)]]
        of_token = [(n, at) for n in range(2) for at in range(lengths[n] - news[n], lengths[n])]
        named = {table[n][at // ROWS] * ROWS + at % ROWS: token for token, (n, at) in enumerate(of_token)}
        cleared = [table[n][-1] * ROWS + row for n in range(2) for row in range((lengths[n] - 1) % ROWS + 1, ROWS)]
        padded = [[*row, *[0] * (max(counts) - len(row))] for row in table]
        own: dict[str, Any] = {"errors": self.errors} | ({"clear_page": True} if self.clear else {})
        if kind == "indptr":
            last = [(length - 1) % ROWS + 1 for length in lengths]
            own["cu_seqlens_q"] = ints([0, news[0], sum(news)])
            return named, [], Pages(ints([*table[0], *table[1]]), ints([0, counts[0], sum(counts)]), ints(last), **own)
        if kind == "indices":
            own.update(batch_indices=ints([n for n, _ in of_token]), cache_positions=ints([at for _, at in of_token]))
            return named, [], Pages(ints(padded), **own)
        return named, cleared if self.clear else [], Pages(ints(padded), seq_lens=ints(lengths), **own)

    def check(self, m: Made, got: dict[str, Any]) -> None:
        super().check(m, got)
        assert self.errors.item() == 0
        others = [x for x in range(self.pages * ROWS) if x not in self.named and x not in self.cleared]
        for x, before in zip(self.tensors, self.before):
            rows, old = (y.contiguous().view(torch.uint8).reshape(self.pages * ROWS, -1) for y in (x, before))
            assert torch.equal(rows[others], old[others])
            assert not rows[self.cleared].any()
        for letter in self.letters:
            want = m.expected(letter).flatten(0, 1)[[*self.named.values()]]
            scale = self.scales.get(f"{letter}_scale", 1.0)
            stored = self.stored(self.caches[letter])
            for pe in self.k_pe.values():
                want, last = want.split(m.part, -1)
                if pe.dtype == m.dtype:
                    near(self.stored(pe), last, m.lost)
                else:
                    near_units(self.stored(pe), last.cpu() / torch.tensor(scale).double(), m.lost)
            if self.blocks:
                own = self.stored(self.block_scales[letter])
                near_scaled(stored[None].cpu(), own[None].cpu(), want[None] / scale, self.form, m.lost)
            elif self.scales:
                near_units(stored, want.cpu() / torch.tensor(scale).double(), m.lost)
            else:
                near(stored, want, m.lost)
        if self.kind == "own":
            near(oracle.heads(got["k"], m.layout), m.expected("k"), m.lost)
        else:
            assert got["k"] is None


def places_of(m: Made) -> Places:
    return Caches(m) if m.case["out"] in CACHES else Places(m)


# ---- gradients ---------------------------------------------------------------------------------------


def flat(results: Any) -> list[Tensor]:
    """The tensors of results."""
    return [x for x in tree_leaves(results) if isinstance(x, Tensor)]


def outputs(m: Made) -> list[Tensor]:
    """The wanted results, (B, S, H, D), of a call whose tensors require a gradient."""
    if m.case["out"] == "inplace":
        m.tensors = {name: x.clone() for name, x in m.tensors.items()}
    got = m.call(**places_of(m).words)
    return [oracle.heads(whole(got[x], m, x), m.layout) for x in m.wanted]


def gradients(results: list[Tensor], m: Made) -> Any:
    """Of all tensors that can have one, by the wanted results."""
    generator = torch.Generator().manual_seed(3)
    grads = [torch.randn(x.shape, generator=generator).to(m.dtype).to(x) for x in results]
    return torch.autograd.grad(results, [*m.leaves.values()], grads, allow_unused=True)


def run(m: Made) -> list[Tensor | None]:
    """The results of a call, and its gradients, if it has some."""
    if not m.leaves:
        return [*flat(m.call(**places_of(m).words))]
    results = outputs(m)
    return [*results, *gradients(results, m)]


def check_gradients(like: Made, found: Any) -> None:
    """Gradients are those of the chain in fp64."""
    case, results = like.case, [like.expected(letter) for letter in like.wanted]
    elements = sum(x.numel() for x in results)
    for name, got, want in zip(like.leaves, found, gradients(results, like)):
        if got is None or want is None:
            assert all(x is None or not x.any() for x in (got, want)), name
            continue
        # Sums are of values that were rounded: a transform's gradient has a launch of its own, that of each stream too.
        sums = name in ("bias", "q_scale", *like.turn) or name.endswith("_mean") or case["transform"] == "head"
        sums = sums or (case["source"] == "streams" and name in like.weights)
        noise = max(like.lost, STEPS[like.dtype] * sums)
        near(got, want, noise * max(1.0, (elements / want.numel()) ** 0.5 / max(1.0, float(want.abs().max()))), 4.0)


# ---- kernels -----------------------------------------------------------------------------------------


def planned(case: Case, launches: Sequence[str] = ("auto",), tokens: int = S, sm_count: int = 132) -> list[Spec]:
    """The kernels of a call of the table, and with "wanted" those of its gradient, planned without memory."""
    case = {**case, "more": "none"} if case["more"] == "check" else case
    with jitrope.planning([*launches], sm_count=sm_count) as specs:
        run(Made(case, "meta", leaves="wanted" in case, tokens=tokens))
    return specs
