"""The tensors and the words of a call of the table, and its results in fp64 (`oracle`), with the places they go to."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

import jitrope
from jitrope import DynamicQuantize, Mrope, Norm, Packed, Quantize, Shifts, Starts

from . import oracle
from .calls import BIASED, BLOCKS, CACHES, DYNAMIC, FUSED, INTO, OF_ROWS, PACKED, ROPES, STREAMS, Case

E8M0 = getattr(torch, "float8_e8m0fnu", torch.uint8)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP4 = getattr(torch, "float4_e2m1fn_x2", torch.uint8)
FLOATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

HEADS = {"gqa": (4, 2), "mha": (4, 4), "odd": (9, 3), "many": (70, 10)}  # else as "32+8"
B, S, SKIPPED, FIRST, V_DIM = 2, 6, 2, 2, 48
"""Rows, tokens, unrotated tokens, tokens of the first stream, elements of a head of v in latent attention."""
NUMBER = 0.75
SCALES = {"q": 0.07, "k": 0.005, "v": 0.03}  # k saturates at e4m3's largest number
GLOBALS = {"q": 0.5, "k": 2.0, "v": 0.25}
NORM_WORDS: dict[str, dict[str, Any]] = {
    "layer": {"kind": "layer_norm", "eps": 1e-5},
    "across": {"across_heads": True},
    "means": {"across_heads": True},
    "after": {"after_rope": True},
    "zero": {"zero_centered": True},
    "v_norm": {"v_norm": True},
    "of_q": {"of": "q", "after_rope": True},
    "of_k": {"of": "k", "kind": "layer_norm"},
    "of_v": {"of": "v"},
    "once": {"rounding": "once"},
    "twice": {"rounding": "twice"},
}
COMPUTED: dict[str, dict[str, Any]] = {
    "heads": {"dtype": E4M3},
    "int8": {"dtype": torch.int8},
    "rows": {"dtype": E4M3, "per": "head"},
    "kv_rows": {"dtype": torch.int8, "per": "kv_head"},
    "groups": {"dtype": E5M2, "group": 32},
    "int8_16": {"dtype": torch.int8, "group": 16},
    "e4m3_64": {"dtype": E4M3, "group": 64},
    "mxfp8": {"dtype": E4M3, "group": 32, "scale_dtype": E8M0},
    "mxfp4": {"dtype": FP4, "group": 32, "scale_dtype": E8M0},
    "nvfp4": {"dtype": FP4, "group": 16, "scale_dtype": E4M3},
    "fp4": {"dtype": FP4, "group": 128},
    "tiles": {"dtype": E4M3, "group": 32, "scale_dtype": E8M0, "swizzled": True},
    "ue8m0": {"dtype": E4M3, "group": 32, "scale_fmt": "ue8m0"},
}
WITH_V = ("kv_rows", "groups", "mxfp8", "nvfp4", "tiles")
BLOCK_FORMS = {"int8_blocks": COMPUTED["int8"], "mx_blocks": COMPUTED["mxfp8"], "nvfp4_blocks": COMPUTED["nvfp4"]}
CU_SEQLENS = {  # The whole batch has three sequences, or two if pages hold it. A rank has half of the tokens.
    **dict.fromkeys(PACKED, ((0, 4, 4, 10), (0, 4, 10))),
    "packed_cp": ((0, 8, 8, 20), (0, 8, 20)),
}


def form_of(case: Case) -> dict[str, Any] | None:
    """The dtype of a conversion, and for computed scales their words."""
    if case["convert"] in DYNAMIC:
        return COMPUTED[case["convert"]]
    return None if case["convert"] == "none" else {"dtype": E5M2 if case["convert"] == "e5m2" else E4M3}


def letters_of(case: Case) -> str:
    """Those of the heads that a call has."""
    return {"no_v": "qk", "alone": "q", "rope": "qk", "rope_alone": "q"}.get(case["source"], "qkv")


def outputs_of(case: Case) -> str:
    """Those of the results that are not in a cache; g: a gate."""
    letters = "q" if case["out"] in CACHES else letters_of(case)
    return letters + "g" * case["source"].startswith("gated")


def converts_v(case: Case) -> bool:
    """Whether v gets scales too: a given one, or for some conversions a computed one, where it can."""
    can = "v" in letters_of(case) and case["out"] not in CACHES and case["table"] != "per_head"
    can = can and case["source"] != "view" and case["norm"] != "across"
    return case["convert"] == "of_v" or (case["convert"] in WITH_V and can)


def is_own(case: Case) -> bool:
    """Whether a cache's call writes q in place too."""
    return case["out"] == "own" and case["convert"] == "none"


def in_place(case: Case) -> bool:
    return case["out"] == "inplace" or is_own(case)


def is_fresh_twin(case: Case) -> bool:
    """Whether fresh results have the same numbers: not beside a cache with scales, or with a norm of its v."""
    return case["out"] not in (*BLOCKS, "fp8_slots", "fp8_pages") and case["norm"] != "of_v"


def rotated_part(case: Case) -> tuple[int, int]:
    """The first rotated element of a head, and the number of them; the rest of "last" is a power of two."""
    size = int(case["size"])
    rest = {80: 16, 72: 8, 6: 4, 96: 64, 192: 128}.get(size, size // 2)
    return {"whole": (0, size), "first": (0, size - rest), "last": (rest, size - rest), "middle": (16, 32)}[
        case["part"]
    ]


def strided(x: Tensor, kind: str, axis: int) -> Tensor:
    """The same numbers, or one head's for "expanded", with other strides. axis: of the heads."""
    if kind == "offset":
        return torch.cat((x.flatten()[:1], x.flatten()))[1:].view(x.shape)
    if kind == "sliced":
        return torch.cat((x, x), axis).narrow(axis, x.shape[axis], x.shape[axis])
    if kind == "turned":
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    if kind == "apart":
        return torch.stack((x, x), -1)[..., 0]
    return x.narrow(axis, 0, 1).expand(x.shape) if kind == "expanded" else x.contiguous()


class Made:
    """The tensors of a call on a device, the words of its function, and those of the oracle."""

    def __init__(self, case: Case, device: str, seed: int = 7, leaves: bool = False, tokens: int = S) -> None:
        self.case, self.device, self.leaves = case, device, leaves
        self.generator = torch.Generator().manual_seed(seed)
        self.layout, self.dtype, self.size = case["layout"], FLOATS[case["dtype"]], int(case["size"])
        self.batch, self.tokens = (1, B * tokens) if self.layout == "thd" else (B, tokens)
        self.counts = HEADS.get(case["heads"]) or tuple(map(int, case["heads"].split("+")))
        self.weights_dtype = self.dtype if case["weights"] == "half" else torch.float32
        self.ints = torch.int32 if case["ints"] == "int32" else torch.int64
        in_pages = case["out"] in ("pages", "indptr", "indices", "fp8_pages", "nvfp4_blocks")
        cu = CU_SEQLENS[case["positions"]][in_pages] if case["positions"] in PACKED else ()
        self.cu = tuple([end * tokens // S for end in cu])
        self.ends = self._ends()
        self.tensors = self._sources()
        self.turn, self.second_turn = self._rotation(), {}
        if case["source"] == "two":
            self.second_turn = {**self.turn, **self._table()}
        self.weights = self._weights("") | (self._weights("second_") if case["source"] == "two" else {})
        shape = {"number": (), "tokens": (self.batch, self.tokens)}.get(case["more"])
        factor = torch.full((), NUMBER, device=device) if shape == () else self.noise(*(shape or ())).abs() + 0.5
        self.factor = None if shape is None else self.leaf(factor)
        heads = torch.arange(1, self.counts[0] + 1) / 40
        self.of_heads = {letter: heads[:n].to(device) for letter, n in zip("qkv", (*self.counts, self.counts[1]))}

    def noise(self, *shape: int) -> Tensor:
        if self.device == "meta":
            return torch.empty(shape, device="meta")
        return torch.randn(shape, generator=self.generator).to(self.device)

    def leaf(self, x: Tensor) -> Tensor:
        return x.detach().requires_grad_() if self.leaves else x

    def integers(self, low: int, high: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator).to(self.device, self.ints)

    def _ends(self) -> tuple[int, ...]:
        """The offsets of the sequences' tokens in this batch, or of all its tokens."""
        if not self.cu:
            return (0, self.tokens)
        size, rank = (2, 1) if self.case["positions"] == "packed_cp" else (1, 0)
        counts = [len([*oracle.chunked(first, end, size, rank)]) for first, end in itertools.pairwise(self.cu)]
        return (0, *itertools.accumulate(counts))

    # ---- where heads come from ----

    def laid(self, heads: int, size: int, tokens: int = 0) -> Tensor:
        """A tensor of heads in the call's layout, with its strides."""
        x = oracle.unheads(self.noise(self.batch, tokens or self.tokens, heads, size).to(self.dtype), self.layout)
        return strided(x, self.case["strides"], self.layout.index("h"))

    def _sources(self) -> dict[str, Tensor]:
        source, (q_heads, k_heads), size = self.case["source"], self.counts, self.size
        made: dict[str, Tensor] = {}
        if source in FUSED:
            order = self.order
            each = q_heads * (2 if order == "qkv_gated" else 1) + 2 * k_heads
            shape = (k_heads, each // k_heads * size) if order == "grouped" else (each, size)
            made["qkv"] = self.laid(*shape)
            if self.case["strides"] in ("plain", "sliced", "offset"):
                made["qkv"] = made["qkv"].flatten(-2)
            if source in BIASED:
                made["bias"] = self.noise(each * size).to(self.dtype)
        elif source == "latent":
            first, rotary = rotated_part(self.case)
            sizes = {"q": (q_heads, size), "kv": (k_heads, first + V_DIM), "k_pe": (1, rotary)}
            made = {name: self.laid(*shape) for name, shape in sizes.items()}
        elif source in STREAMS:
            for name, tokens in (("first", FIRST), ("second", self.tokens - FIRST)):
                for letter, heads in zip("qkv", (q_heads, k_heads, k_heads)):
                    made[f"{name}_{letter}"] = self.laid(heads, size, tokens)
        else:
            counts = dict(zip("qkv", (q_heads, k_heads, k_heads)))
            made = {letter: self.laid(counts[letter], size) for letter in letters_of(self.case)}
        return {name: self.leaf(x) for name, x in made.items()}

    @property
    def order(self) -> str:
        name = self.case["source"].removesuffix("_bias")
        return {"gated": "qkv_gated", "view": "qkv"}.get(name, name)

    def fused(self, qkv: Tensor) -> tuple[Tensor, ...]:
        """q, k, v and a gate, (B, S, H, D), of fused QKV in the call's form."""
        (q_heads, k_heads), layout = self.counts, self.layout
        each = q_heads * (2 if self.order == "qkv_gated" else 1) + 2 * k_heads
        if qkv.dim() < len(layout):
            qkv = qkv.unflatten(-1, (k_heads if self.order == "grouped" else each, -1))
        return tuple([oracle.heads(x, layout) for x in oracle.split(qkv, self.counts, self.order)])

    def read(self, letter: str) -> list[Tensor]:
        """The heads of a letter, (B, S, H, D) in fp64, of each stream with tables of its own."""
        t, source = self.tensors, self.case["source"]
        if source in FUSED:
            qkv = oracle.exact(t["qkv"])
            if "bias" in t:
                total = qkv + oracle.exact(t["bias"]).view(qkv.shape[len(self.layout) - 2 :])
                rounded = (t["qkv"].float() + t["bias"].float().view(total.shape[len(self.layout) - 2 :])).to(
                    self.dtype
                )
                qkv = total + (rounded.double() - total).detach()
            return [self.fused(qkv)["qkvg".index(letter)]]
        if source in STREAMS:
            parts = [oracle.exact(t[f"{name}_{letter}"]) for name in ("first", "second")]
            return parts if source == "two" else [torch.cat(parts, 1)]
        if source == "latent" and letter != "q":
            first = rotated_part(self.case)[0]
            kv, k_pe = (oracle.heads(oracle.exact(t[name]), self.layout) for name in ("kv", "k_pe"))
            v = kv[..., first:]
            return [v if letter == "v" else torch.cat((kv[..., :first], k_pe.expand(*kv.shape[:-1], -1)), -1)]
        return [oracle.heads(oracle.exact(t[letter]), self.layout)]

    # ---- stages ----

    def _weights(self, begin: str) -> dict[str, Tensor]:
        kind, (q_heads, k_heads) = self.case["norm"], self.counts
        if kind in ("none", "l2"):
            return {}
        if kind == "of_v":
            return {"v_weight": (self.noise(k_heads * self.size) / 4 + 1).to(self.weights_dtype)}
        names = ("q_weight", "k_weight", *(("q_bias", "k_bias") if kind in ("layer", "of_k") else ()))
        sizes = [self.size * (count if kind in ("across", "means") else 1) for count in (q_heads, k_heads)] * 2
        made = {name: self.noise(size) / 4 + (kind != "zero") for name, size in zip(names, sizes)}
        made = {name: x.to(self.weights_dtype) for name, x in made.items()}
        if kind == "means":
            made |= {f"{letter}_mean": self.noise(self.batch, self.tokens).abs() + 0.5 for letter in "qk"}
        of = [x for x in NORM_WORDS.get(kind, {}).get("of", "qk") if x in letters_of(self.case)]
        return {begin + name: self.leaf(x) for name, x in made.items() if name[0] in of}

    def norm(self, begin: str = "") -> Norm:
        kind, words = self.case["norm"], {}
        own = {
            name.removeprefix(begin): x for name, x in self.weights.items() if name.startswith("second") == bool(begin)
        }
        if kind == "means":
            means = [own.pop(f"{letter}_mean", None) for letter in "qk"]
            words["mean_squares"] = [x[0] if self.layout == "thd" and x is not None else x for x in means]
        return Norm(**own, **words, **NORM_WORDS.get(kind, {}))

    def _table(self) -> dict[str, Tensor]:
        made = self._tables()
        return {x: self.leaf(y) for x, y in made.items()} if self.case.get("learned") == "learned" else made

    def _tables(self) -> dict[str, Tensor]:
        kind, rotary, rows = self.case["table"], rotated_part(self.case)[1], 2 * self.tokens + 8
        width = rotary if self.case["pairs"] == "full" else rotary // 2
        shape: tuple[int, ...] = (rows, width)
        if kind in ("batch", "per_head"):
            shape = (self.batch, rows, width) if kind == "batch" else (1, rows, self.counts[0], width)
        dtype = {"half": self.dtype, "double": torch.float64}.get(self.case["of_table"], torch.float32)
        if kind == "none":
            return {}
        if kind == "angles":
            return {"freqs": (self.noise(*shape) * 3).to(dtype)}
        if kind == "scaled":
            return {"freqs": (self.noise(rows, 1, 1, width) * 3).to(dtype)}
        if kind == "cis":
            parts = [
                self.noise(*shape).to(torch.float64 if dtype == torch.float64 else torch.float32) for _ in range(2)
            ]
            return {"freqs_cis": torch.complex(*parts)}
        if kind == "cache":
            return {"cos_sin_cache": self.noise(rows, 2 * width).to(dtype)}
        return {name: self.noise(*shape).to(dtype) for name in ("cos", "sin")}

    def leaves_of(self) -> dict[str, Tensor]:
        """The tensors that require a gradient, by name."""
        tables = {f"second_{x}": y for x, y in self.second_turn.items()} | self.turn
        factor = {} if self.factor is None else {"q_scale": self.factor}
        named = {**self.tensors, **self.weights, **factor, **tables}
        return {name: x for name, x in named.items() if isinstance(x, Tensor) and x.requires_grad}

    def _rotation(self) -> dict[str, Any]:
        """The words of the rotation, as the oracle has them."""
        case, (first, rotary) = self.case, rotated_part(self.case)
        o: dict[str, Any] = {"rotary_offset": first, "rotary_dim": rotary, **self._table()}
        o["interleaved"] = case["pairs"] in ("interleaved", "into_halves")
        o["interleaved_out"] = not o["interleaved"] if case["pairs"] in INTO else None
        if case["table"] == "scaled":
            o["mscale"] = 1.25
        if case["more"] == "inverse":
            o["inverse"] = True
        if case["more"] == "unrotated":
            o["unrotated"] = SKIPPED
        return o | self._positions(rotary // 2)

    def _positions(self, pairs: int) -> dict[str, Any]:
        kind, rows = self.case["positions"], 2 * self.tokens + 8
        own = (self.tokens,) if self.layout == "thd" else (self.batch, self.tokens)
        if kind in ("ids", "shared", "shifts"):
            ids = self.integers(1 - rows if kind == "shifts" else 0, rows, own[-1:] if kind == "shared" else own)
            return {"position_ids": ids} | ({"shifts": True} if kind == "shifts" else {})
        if kind in ("mrope", "mrope_turns"):
            found = {"position_ids": self.integers(0, rows, (3, *own)), "mrope_interleaved": kind == "mrope_turns"}
            return {**found, "mrope_section": (pairs - 2 * (pairs // 4), pairs // 4, pairs // 4)}
        words: dict[str, Any] = {}
        if self.cu:
            words["cu_seqlens"] = torch.tensor(self.cu, dtype=self.ints).to(self.device)
        if kind in ("starts", "packed_starts"):
            words["start_positions"] = self.integers(0, 5, (len(self.cu) - 1 if self.cu else self.batch,))
        if kind == "packed_rows":
            words["packed_table"] = True
        if kind in ("cp", "packed_cp"):
            words.update(cp_size=2, cp_rank=1)
        return words

    def positions(self) -> Any:
        o = self.turn
        names = ("cu_seqlens", "start_positions", "packed_table", "cp_size", "cp_rank")
        if "position_ids" in o:
            if "mrope_section" in o:
                return Mrope(o["position_ids"], o["mrope_section"], o["mrope_interleaved"])
            return Shifts(o["position_ids"]) if "shifts" in o else o["position_ids"]
        words = {name: o[name] for name in names if name in o}
        if self.case["positions"] == "packed_starts":
            words["max_seqlen"] = max(end - first for first, end in itertools.pairwise(self.cu))
        return None if not words else (Packed if self.cu else Starts)(**words)

    def quantize(self) -> Any:
        kind, form, cached = self.case["convert"], form_of(self.case), self.case["out"] in CACHES
        letters = (
            "q"
            if cached and kind != "of_v"
            else "qv"
            if cached
            else [x for x in letters_of(self.case) if x != "v" or converts_v(self.case)]
        )
        hadamard = self.case["transform"] == "head"
        if kind in DYNAMIC:
            named = {f"{x}_global_scale": GLOBALS[x] for x in letters} if kind == "nvfp4" else {}
            return DynamicQuantize(**form, **named, hadamard=hadamard, v=converts_v(self.case))
        return Quantize(**{f"{x}_scale": self.scale(x) for x in letters}, **form, hadamard=hadamard)

    def scale(self, letter: str) -> Any:
        """A given scale: a number, or a tensor for each head, or for each head of a row or a sequence."""
        if self.case["convert"] == "of_heads":
            return self.of_heads[letter]
        if self.case["convert"] == "of_rows":
            rows = len(self.cu) - 1 if self.cu else self.batch
            return self.of_heads[letter] * torch.arange(1, rows + 1, device=self.device)[:, None]
        return SCALES[letter]

    def scale_of_heads(self, letter: str) -> Tensor:
        """The given scale against heads (B, S, H, D)."""
        scale = torch.as_tensor(self.scale(letter)).double().cpu()
        if scale.dim() < 2:
            return scale if not scale.dim() else scale[:, None]
        if not self.cu:
            return scale[:, None, :, None]
        token = torch.arange(self.tokens)
        return scale[torch.bucketize(token, torch.tensor(self.ends[1:-1]), right=True)][None, :, :, None]

    def words(self) -> dict[str, Any]:
        """The words of the function, without those of the places of results."""
        case, o = self.case, self.turn
        tables = {x: o[x] for x in ("cos", "sin", "cos_sin_cache", "freqs", "freqs_cis") if x in o}
        words: dict[str, Any] = {x: (y, self.second_turn[x]) if self.second_turn else y for x, y in tables.items()}
        words.update({x: o[x] for x in ("interleaved", "mscale", "inverse", "unrotated") if o.get(x)})
        if o["interleaved_out"] is not None:
            words["interleaved_out"] = o["interleaved_out"]
        if case["source"] != "latent" and case["part"] != "whole":
            words["rotary_offset"] = o["rotary_offset"]
            if case["table"] not in ("cache", "cis"):
                words["rotary_dim"] = o["rotary_dim"]
        if (positions := self.positions()) is not None:
            words["positions"] = positions
        if self.layout != "bshd" and not self.cu:
            words["layout"] = self.layout
        if case["rounding"] != "fp32":
            words["rounding"] = case["rounding"]
        if self.factor is not None:
            words["q_scale"] = self.factor[0] if self.layout == "thd" and self.factor.dim() else self.factor
            if case["more"] == "number" and not self.leaves:
                words["q_scale"] = NUMBER
        if case["more"] == "check":
            words["check"] = True
        if case["norm"] != "none":
            words["norm"] = [self.norm(), self.norm("second_")] if case["source"] == "two" else self.norm()
        if case["convert"] != "none":
            words["quantize"] = self.quantize()
        elif case["transform"] == "head":
            words["hadamard"] = True
        if case["source"] in FUSED:
            words.update(heads=self.counts)
            words.update({} if self.order == "qkv" else {"order": self.order})
            words.update({"copy_v": False} if case["source"] == "view" else {})
            words.update({"bias": self.tensors["bias"]} if "bias" in self.tensors else {})
        return words

    def call(self, **words: Any) -> dict[str, Any]:
        """The results by letter."""
        return self.named(function_of(self.case)(*self.arguments(), **self.words(), **words))

    def call_separately(self, **words: Any) -> dict[str, Any]:
        """The results of `prepare_qkv` of heads in memory of their own, by ids where positions are counted.

        With a cache of floats they are not converted. Tokens after the last sequence have results too.
        """
        of_source = ("heads", "order", "copy_v", "bias")
        own = {name: x for name, x in self.words().items() if name not in of_source}
        if self.case["source"] == "latent":
            own.update(zip(("rotary_offset", "rotary_dim"), rotated_part(self.case)))
        if is_fresh_twin(self.case) and self.case["out"] in CACHES and own.pop("quantize", None):
            own.update({"hadamard": True} if self.case["transform"] == "head" else {})
        if self.are_counted():
            own["positions"] = oracle.rows_of(self.tokens, self.device, self.turn)[0][0].to(self.ints)
            own["positions"] = own["positions"][0] if self.layout == "thd" else own["positions"]
            own.update({} if self.layout == "bshd" else {"layout": self.layout})
        letters = [x for x in letters_of(self.case) if x != "v" or self.case["out"] != "of_k"]
        heads = [oracle.unheads(torch.cat(self.read(x), 1).to(self.dtype), self.layout) for x in letters]
        given = [*[x.contiguous() for x in heads], None, None][:3]
        return dict(zip("qkv", jitrope.prepare_qkv(*given, **own, **words)))

    def are_counted(self) -> bool:
        """Whether positions follow from lengths, and nothing else does."""
        of_sequences = self.case["convert"] in (*OF_ROWS, "of_rows", "tiles") or self.case["more"] == "unrotated"
        return self.case["positions"] in ("starts", "cp", *PACKED) and not of_sequences

    def arguments(self) -> list[Any]:
        t, source = self.tensors, self.case["source"]
        if source in STREAMS:
            return [[t[f"{name}_{letter}"] for letter in "qkv"] for name in ("first", "second")]
        if source in FUSED:
            return [t["qkv"]]
        if source == "latent":
            return [t["q"], t["kv"], t["k_pe"]]
        return [t.get(letter) for letter in ("qk" if source in ROPES else "qkv")]

    def named(self, results: Any) -> dict[str, Any]:
        """Results by letter; fused QKV that was written is split, in the layout."""
        if isinstance(results, Tensor):
            return {x: oracle.unheads(y, self.layout) for x, y in zip("qkvg", self.fused(results))}
        return dict(zip("qkvg", results))

    # ---- the results ----

    def _chain(self, letter: str, x: Tensor, turn: dict[str, Any], begin: str) -> Tensor:
        """The norm and the rotation of a stream's heads."""
        kind = self.case["norm"]
        o = {"norm_kind" if name == "kind" else name: y for name, y in NORM_WORDS.get(kind, {}).items()}
        own = [self.weights.get(f"{begin}{letter}_{name}") for name in ("weight", "bias")]
        of = o.get("of", "qk") if kind != "none" else ""

        def norm(y: Tensor) -> Tensor:
            if kind == "means":
                mean = oracle.exact(self.weights[f"{begin}{letter}_mean"])[..., None, None]
                return y / (mean + 1e-6).sqrt() * oracle.exact(own[0]).view(y.shape[2:])
            across = {"across_heads": True} if letter == "v" and kind == "of_v" else {}
            return oracle.normed(y, *own, {**o, **across})

        if letter == "v":
            y = oracle.normed(x, None, None, o) if kind == "v_norm" else norm(x) if "v" in of else x
            stays = (self.case["source"] in FUSED and self.case["out"] == "inplace") or is_own(self.case)
            return torch.cat((y[:, : self.ends[-1]], x[:, self.ends[-1] :]), 1) if stays else y
        y = norm(x) if letter in of and not o.get("after_rope") else x
        y = oracle.rotated(y, {**turn, "interleaved_out": None})
        y = norm(y) if letter in of and o.get("after_rope") else y
        return oracle.reordered(y, turn)

    def expected(self, letter: str) -> Tensor:
        """(B, S, H, D) in fp64 before the conversion: norm, rotation, scale of q, transform."""
        parts = self.read(letter)
        if letter == "g":
            return parts[0]
        turns = (self.turn, self.second_turn)
        x = torch.cat([self._chain(letter, y, *own) for y, own in zip(parts, zip(turns, ("", "second_")))], 1)
        if letter == "v":
            return x
        before = torch.cat(parts, 1)
        if letter == "q" and self.factor is not None:
            factor = oracle.exact(self.factor)
            x = x * (factor[..., None, None] if factor.dim() else factor)
        x = x @ oracle.hadamard_matrix(self.size).to(x) if self.case["transform"] == "head" else x
        spare = before if in_place(self.case) else 0 * before
        return torch.cat((x[:, : self.ends[-1]], spare[:, self.ends[-1] :]), 1)


def function_of(case: Case) -> Any:
    source = case["source"]
    if source in FUSED:
        return jitrope.prepare_fused_qkv
    if source in STREAMS:
        return jitrope.prepare_joint_qkv
    return {"latent": jitrope.prepare_mla_qkv, **dict.fromkeys(ROPES, jitrope.apply_rope)}.get(
        source, jitrope.prepare_qkv
    )
