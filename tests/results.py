"""The results of a call of the table (`sweep`) against those in fp64, and the places they go to."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import jitrope
from jitrope import KVCache, Pages, Scaled, Ulysses
from jitrope.base.spec import Spec

from . import oracle
from .calls import BLOCKS, CACHES, OF_ROWS, ROPES, Case
from .sweep import (
    BLOCK_FORMS,
    E4M3,
    E5M2,
    E8M0,
    FLOATS,
    FP4,
    GLOBALS,
    V_DIM,
    Made,
    S,
    converts_v,
    form_of,
    is_own,
    letters_of,
    outputs_of,
)

RANKS = 2
PAGES, ROWS = 8, 4
LARGEST = {E4M3: 448.0, E5M2: 57344.0, torch.int8: 127.0, FP4: 6.0}
CACHE_SCALES = {"k_scale": 0.005, "v_scale": 0.3}


# ---- comparisons -----------------------------------------------------------------------------------

STEPS = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-8}  # of floats; half of one, and fp32's noise
# relative, and of the smallest numbers
HALVES = {E4M3: (2**-4, 2**-10), E5M2: (2**-3, 2**-17), torch.int8: (0, 0.5), FP4: (2**-2, 2**-2)}


def noise_of(case: Case) -> float:
    """What a result loses before its last rounding, relative to the largest."""
    early = case["rounding"] == "dtype" or case["norm"] in ("once", "twice")
    return 3 * STEPS[FLOATS[case["dtype"]]] if early else 2e-5


def near(got: Tensor, want: Tensor, noise: float = 1e-5, slack: float = 1.0) -> None:
    """A rounding to got's dtype; what was lost before it is in proportion to the largest element."""
    most = noise * slack * max(1.0, float(want.abs().max()))
    torch.testing.assert_close(got.cpu().to(want.dtype), want.cpu(), rtol=slack * STEPS[got.real.dtype], atol=most)


def near_each(got: Any, want: Any) -> None:
    """Results of two calls that add in other orders; NaN is NaN."""
    for x, y in zip(got, want):
        if y is None or not y.numel():
            assert x is y or x.shape == y.shape
            continue
        rtol = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}[x.dtype]
        size = max(1.0, float(y.float().nan_to_num(0).abs().max()))
        torch.testing.assert_close(x.float(), y.float(), rtol=rtol, atol=rtol / 2 * size, equal_nan=True)


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
    noise, largest_unit = noise_of(m.case), LARGEST[values.dtype]
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
    want, form, case, noise = m.expected(letter), form_of(m.case), m.case, noise_of(m.case)
    got = whole(got, m, letter)
    if form is None or letter == "g" or (letter == "v" and not converts_v(case)):
        assert got.dtype == m.dtype
        near(oracle.heads(got, m.layout), want, noise)
    elif "per" in form:
        near_rows(got, want, m, case["convert"] == "kv_rows")
    elif isinstance(got, Scaled):
        values, scale = oracle.heads(got.values, m.layout).cpu(), got.scale.cpu()
        if form.get("swizzled"):
            scale = oracle.of_tiles(scale, values.shape[1], values.shape[-1] // form["group"])
        else:
            scale = oracle.heads(scale if "group" in form else scale[..., None], m.layout)
        near_scaled(values, scale, want / (GLOBALS[letter] if case["convert"] == "nvfp4" else 1), form, noise)
    else:
        assert got.dtype == form["dtype"]
        near_units(oracle.heads(got, m.layout), want.cpu() / m.scale_of_heads(letter), noise)


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(*[x.contiguous().flatten().view(torch.uint8) for x in (a, b)])


# ---- the places of results -------------------------------------------------------------------------


class Fresh:
    """Fresh tensors, the heads' own memory, or groups of heads for ranks."""

    def __init__(self, m: Made) -> None:
        own: dict[str, Any] = {"ulysses": {"out": Ulysses(RANKS)}, "inplace": {"inplace": True}}
        self.words: dict[str, Any] = own.get(m.case["out"], {})

    def check(self, m: Made, got: dict[str, Any]) -> None:
        for letter in outputs_of(m.case):
            check_heads(m, got[letter], letter)

    def tensors(self) -> list[Tensor]:
        """Those that a call writes, other than its heads."""
        return []


class Given(Fresh):
    """Tensors of the caller with other strides, each in a larger one."""

    def __init__(self, m: Made) -> None:
        form, case = form_of(m.case) or {"dtype": m.dtype}, m.case
        heads = dict(zip("qkv", (m.counts[0], m.counts[1], m.counts[1])))
        self.wholes, self.given = {}, {}
        for letter in letters_of(case):
            if (letter == "v" and case["source"] == "view") or (letter == "k" and case["out"] == "some"):
                continue
            dtype = m.dtype if letter == "v" and not converts_v(case) else form["dtype"]
            width = V_DIM if letter == "v" and case["source"] == "latent" else m.size
            width = width // 2 if dtype == FP4 else width
            ranks = RANKS if case["out"] == "by_rank" else 1
            like = torch.empty(m.batch, m.tokens, heads[letter] // ranks, width, device="meta")
            first, second, *rest, width = oracle.unheads(like, m.layout).shape
            lead = (ranks,) if case["out"] == "by_rank" else ()
            whole = torch.full((*lead, second, first, *rest, width + 8), 7.0, device=m.device)
            whole = whole.byte().view(dtype) if dtype == FP4 else whole.to(dtype)
            self.wholes[letter] = whole
            self.given[letter] = whole[..., :width].transpose(len(lead), len(lead) + 1)
        self.words = {"out": [self.given.get(x) for x in ("qk" if case["source"] in ROPES else "qkv")]}

    def check(self, m: Made, got: dict[str, Any]) -> None:
        super().check(m, got)
        for letter, given in self.given.items():
            x, whole = got[letter], self.wholes[letter]
            assert (x.values if isinstance(x, Scaled) else x) is given
            rest = whole[..., -8:]
            assert ((rest.view(torch.uint8) if whole.dtype == FP4 else rest.float()) == 7).all()

    def tensors(self) -> list[Tensor]:
        return [*self.wholes.values()]


class Caches(Fresh):
    """Pages full of noise."""

    def __init__(self, m: Made) -> None:
        kind, device = m.case["out"], m.device
        self.kind, self.blocks = kind, kind in BLOCKS
        self.clear, self.errors = kind == "fp8_pages", torch.zeros(1, dtype=torch.int32, device=device)
        self.letters = "k" if kind == "of_k" else "kv"
        form = BLOCK_FORMS.get(kind, {"dtype": {"fp8_slots": E4M3, "fp8_pages": E5M2}.get(kind, m.dtype)})
        self.pages = max(PAGES, m.batch * m.tokens // ROWS + 2)
        self.form, size, lead = form, m.size, (self.pages * ROWS,) if kind == "fp8_slots" else (self.pages, ROWS)
        shape = (*lead, m.counts[1], size // 2 if form["dtype"] == FP4 else size)
        self.caches = {x: self._noise(m, form["dtype"], shape) for x in self.letters}
        self.scales = CACHE_SCALES if kind.startswith("fp8") else {}
        self.block_scales: dict[str, Tensor] = {}
        if self.blocks:
            groups = size // form.get("group", size)
            dtype = form.get("scale_dtype", torch.float32)
            self.block_scales = {x: self._noise(m, dtype, (*shape[:-1], groups)) for x in self.letters}
            self.scales = {f"{x}_scale": GLOBALS[x] for x in "kv"} if kind == "nvfp4_blocks" else {}
        self.before = [x.clone() for x in self.tensors()]
        self.named, self.cleared, places = self._places(m)
        if is_own(m.case) and m.cu:  # spare tokens in place are not stored
            self.named = {slot: token for slot, token in self.named.items() if token < m.ends[-1]}
        value = KVCache(
            self.caches["k"], self.caches.get("v"), places, **self.scales, rotate_k=kind == "own",
            **{f"{x}_block_scale": y for x, y in self.block_scales.items()},
        )  # fmt: skip
        self.words: dict[str, Any] = {"cache": value, **({"inplace": True} if is_own(m.case) else {})}

    def tensors(self) -> list[Tensor]:
        return [*self.caches.values(), *self.block_scales.values()]

    def stored(self, x: Tensor) -> Tensor:
        """The rows of a cache that have tokens; torch 2.6 indexes no fp8 on a CPU."""
        return x.reshape(self.pages * ROWS, *x.shape[-2:]).view(torch.uint8)[[*self.named]].view(x.dtype)

    def of_tokens(self, x: Tensor) -> Tensor:
        """The heads of these tokens, of all (B, S, H, D)."""
        return x.flatten(0, 1)[[*self.named.values()]]

    def _noise(self, m: Made, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        if dtype.itemsize > 1:
            return m.noise(*shape).to(dtype)
        return torch.randint(0, 100, shape, generator=m.generator).to(m.device, torch.uint8).view(dtype)

    def _places(self, m: Made) -> tuple[dict[int, int], list[int], Any]:
        """(the token in each slot, slots that are cleared, the argument)"""
        tokens, kind = m.batch * m.tokens, self.kind
        each, every = tokens // 2, torch.randperm(self.pages, generator=m.generator).tolist()
        if kind not in ("pages", "indptr", "indices", "fp8_pages", "nvfp4_blocks"):
            slots = torch.randperm(self.pages * ROWS, generator=m.generator)[:tokens].tolist()
            slots[1] = -1  # a token of padding
            slots[2] = -1 if m.case["more"] == "check" else self.pages * ROWS + 1  # past the end, which a check refuses
            named = {slot: token for token, slot in enumerate(slots) if 0 <= slot < self.pages * ROWS}
            return named, [], torch.tensor(slots, dtype=m.ints).to(m.device)

        def ints(x: Any) -> Tensor:
            return torch.tensor(x, dtype=m.ints).to(m.device)

        news = (each - 1, each) if kind == "indptr" else (each, each)  # the last token is padding
        lengths = (news[0] + 1, news[1])
        counts = [-(-length // ROWS) for length in lengths]
        table = [every[: counts[0]], every[counts[0] : sum(counts)]]
        of_token = [(n, at) for n in range(2) for at in range(lengths[n] - news[n], lengths[n])]
        named = {table[n][at // ROWS] * ROWS + at % ROWS: token for token, (n, at) in enumerate(of_token)}
        cleared = [table[n][-1] * ROWS + row for n in range(2) for row in range((lengths[n] - 1) % ROWS + 1, ROWS)]
        padded = [[*row, *[0] * (max(counts) - len(row))] for row in table]
        own: dict[str, Any] = {"errors": self.errors, **({"clear_page": True} if self.clear else {})}
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
        named, noise = self.named, noise_of(m.case)
        others = [x for x in range(self.pages * ROWS) if x not in named and x not in self.cleared]
        for x, before in zip(self.tensors(), self.before):
            rows, old = (y.contiguous().view(torch.uint8).reshape(self.pages * ROWS, -1) for y in (x, before))
            assert torch.equal(rows[others], old[others])
            assert not rows[self.cleared].any()
        for letter in self.letters:
            want, scale = self.of_tokens(m.expected(letter)), self.scales.get(f"{letter}_scale", 1.0)
            stored = self.stored(self.caches[letter])
            if self.blocks:
                own = self.stored(self.block_scales[letter])
                near_scaled(stored[None].cpu(), own[None].cpu(), want[None] / scale, self.form, noise)
            elif self.scales:
                near_units(stored, want.cpu() / torch.tensor(scale).double(), noise)
            else:
                near(stored, want, noise)
        if self.kind == "own":
            near(oracle.heads(got["k"], m.layout), m.expected("k"), noise)
        else:
            assert got["k"] is None


def places_of(m: Made) -> Fresh:
    kind = m.case["out"]
    return Caches(m) if kind in CACHES else Given(m) if kind in ("given", "some", "by_rank") else Fresh(m)


def lies_in(x: Tensor, y: Tensor) -> bool:
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


def unchanged(m: Made) -> Iterator[str]:
    """The names of the tensors of heads that a call does not write."""
    for name in m.tensors:
        of_own = ("k", "qkv", *("q" * is_own(m.case)))
        written = name in {"inplace": ("q", "k", "qkv"), "own": of_own}.get(m.case["out"], ())
        if not written:
            yield name


# ---- gradients ---------------------------------------------------------------------------------------


def flat(results: Any) -> Iterator[Tensor]:
    """The tensors of results."""
    if isinstance(results, Tensor):
        yield results
    elif isinstance(results, dict):
        yield from flat([*results.values()])
    elif isinstance(results, (list, tuple)):
        for x in results:
            yield from flat(x)


def wanted(case: Case) -> str:
    every = outputs_of(case)
    return {"all": every, "of_first": every[:1], "of_last": every[-1:]}[case["wanted"]]


def outputs(m: Made) -> list[Tensor]:
    """The wanted results, (B, S, H, D), of a call whose tensors require a gradient."""
    if m.case["out"] == "inplace":
        m.tensors = {name: x.clone() for name, x in m.tensors.items()}
    got = m.call(**places_of(m).words)
    return [oracle.heads(whole(got[x], m, x), m.layout) for x in wanted(m.case)]


def gradients(results: list[Tensor], m: Made, leaves: dict[str, Tensor] | None = None) -> Any:
    """Of all tensors that can have one, by the wanted results. leaves: those of a call in place, before it."""
    generator = torch.Generator().manual_seed(3)
    grads = [torch.randn(x.shape, generator=generator).to(m.dtype).to(x) for x in results]
    return torch.autograd.grad(results, [*(leaves or m.leaves_of()).values()], grads, allow_unused=True)


def check_gradients(like: Made, found: Any) -> None:
    """Gradients are those of the chain in fp64."""
    case, results = like.case, [like.expected(letter) for letter in wanted(like.case)]
    elements = sum(x.numel() for x in results)
    for name, got, want in zip(like.leaves_of(), found, gradients(results, like)):
        if got is None or want is None:
            assert all(x is None or not x.any() for x in (got, want)), name
            continue
        # Sums are of values that were rounded: a transform's gradient has a launch of its own, that of each stream too.
        sums = name in ("bias", "q_scale", *like.turn) or name.endswith("_mean") or case["transform"] == "head"
        sums = sums or (case["source"] == "streams" and name in like.weights)
        noise = max(noise_of(case), STEPS[like.dtype] * sums)
        near(got, want, noise * max(1.0, (elements / want.numel()) ** 0.5 / max(1.0, float(want.abs().max()))), 4.0)


# ---- kernels -----------------------------------------------------------------------------------------


def planned(case: Case, launches: Sequence[str] = ("auto",), tokens: int = S, sm_count: int = 132) -> list[Spec]:
    """The kernels of a call of the table, and with "wanted" those of its gradient, planned without memory."""
    m = Made(
        {**case, "more": "none"} if case["more"] == "check" else case, "meta", leaves="wanted" in case, tokens=tokens
    )
    leaves = m.leaves_of()
    with jitrope.planning([*launches], sm_count=sm_count) as specs:
        if leaves:
            gradients(outputs(m), m, leaves)
        else:
            m.call(**places_of(m).words)
    return specs
