"""The tensors and the words of a call of the table, and its results in fp64 (`oracle`), with the places they go to."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch import Tensor

import jitrope
from jitrope import DynamicQuantize, Mrope, Norm, Packed, Quantize, Shifts, Starts
from jitrope.sources import projected

from . import calls, oracle
from .calls import AXES, BIASED, CACHES, DYNAMIC, FUSED, GIVEN, INTO, NVFP4, PACKED, PROJECTED, ROPES, STREAMS, Case
from .host import backend

projected.LEAST_FILLED = 0  # calls of the table are small
E8M0 = getattr(torch, "float8_e8m0fnu", torch.uint8)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP4 = getattr(torch, "float4_e2m1fn_x2", torch.uint8)
FLOATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
STEPS = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-8}  # of floats; half of one, and fp32's noise

FUNCTIONS = {
    **dict.fromkeys(AXES["source"], "prepare_qkv"), **dict.fromkeys(ROPES, "apply_rope"), "latent": "prepare_mla_qkv",
    **dict.fromkeys(FUSED, "prepare_fused_qkv"), **dict.fromkeys(STREAMS, "prepare_joint_qkv"),
    **dict.fromkeys(PROJECTED, "project_qkv"),
}  # fmt: skip
HEADS = {"gqa": (4, 2), "mha": (4, 4), "odd": (9, 3), "many": (70, 10)}  # else as "32+8"
if backend.DEVICE == "cpu":
    HEADS["many"] = (30, 10)  # more than a block has, and a kernel on the CPU takes its time for each
B, S, SKIPPED, FIRST, V_DIM = 2, 6, 2, 2, 48
"""Rows, tokens, unrotated tokens, tokens of the first stream, elements of a head of v in latent attention."""
WIDTH = 72  # elements of a token that is projected
NUMBER = 0.75
SCALES = {"q": 0.07, "k": 0.005, "v": 0.03}  # k saturates at e4m3's largest number
GLOBALS = {"q": 0.5, "k": 2.0, "v": 0.25}
NORM_WORDS: dict[str, dict[str, Any]] = {
    "layer": {"kind": "layer_norm", "eps": 1e-5}, "across": {"across_heads": True}, "means": {"across_heads": True},
    "after": {"after_rope": True}, "zero": {"zero_centered": True}, "v_norm": {"v_norm": True},
    "of_q": {"of": "q", "after_rope": True}, "of_k": {"of": "k", "kind": "layer_norm"}, "of_v": {"of": "v"},
    "k_nope": {"of": "k_nope"},
    "once": {"rounding": "once"}, "twice": {"rounding": "twice"},
}  # fmt: skip
# The dtype of a conversion, and for computed scales their words.
FORMS: dict[str, Any] = {
    "none": None, **{x: {"dtype": E4M3} for x in GIVEN}, "e5m2": {"dtype": E5M2},
    "rows": {"dtype": E4M3, "per": "head"}, "kv_rows": {"dtype": torch.int8, "per": "kv_head"},
    "heads": {"dtype": E4M3}, "int8": {"dtype": torch.int8}, "int8_16": {"dtype": torch.int8, "group": 16},
    "groups": {"dtype": E5M2, "group": 32}, "e4m3_64": {"dtype": E4M3, "group": 64},
    "mxfp8": {"dtype": E4M3, "group": 32, "scale_dtype": E8M0},
    "mxfp4": {"dtype": FP4, "group": 32, "scale_dtype": E8M0},
    "nvfp4": {"dtype": FP4, "group": 16, "scale_dtype": E4M3}, "fp4": {"dtype": FP4, "group": 128},
    "tiles": {"dtype": E4M3, "group": 32, "scale_dtype": E8M0, "swizzled": True},
    "ue8m0": {"dtype": E4M3, "group": 32, "scale_fmt": "ue8m0"}, "weighted": {"dtype": E4M3},
}  # fmt: skip
WITH_V = ("kv_rows", "groups", "mxfp8", "nvfp4", "tiles")
BLOCK_FORMS = {"int8_blocks": FORMS["int8"], "mx_blocks": FORMS["mxfp8"], **dict.fromkeys(NVFP4, FORMS["nvfp4"])}
IN_PAGES = ("pages", "indptr", "indices", "fp8_pages", "nvfp4_blocks", "record")
CU_SEQLENS = {  # The whole batch has three sequences, or two if pages hold it. A rank has half of the tokens.
    **dict.fromkeys(PACKED, ((0, 4, 4, 10), (0, 4, 10))),
    "packed_cp": ((0, 8, 8, 20), (0, 8, 20)),
}


class Made:
    """The tensors of a call on a device, the words of its function, and those of the oracle."""

    def __init__(self, case: Case, device: str, seed: int = 7, leaves: bool = False, tokens: int = S) -> None:
        source, convert, out = case["source"], case["convert"], case["out"]
        self.case, self.device, self.trained = case, device, leaves
        self.generator = torch.Generator().manual_seed(seed)
        self.function = getattr(jitrope, FUNCTIONS[source])
        self.layout, self.dtype, self.size = case["layout"], FLOATS[case["dtype"]], int(case["size"])
        self.batch, self.tokens = (1, B * tokens) if self.layout == "thd" else (B, tokens)
        self.rows = 2 * self.tokens + 8  # of a table
        self.counts = HEADS.get(case["heads"]) or tuple(map(int, case["heads"].split("+")))
        self.weights_dtype = self.dtype if case["weights"] == "half" else torch.float32
        self.ints = torch.int32 if case["ints"] == "int32" else torch.int64
        order = source.removesuffix("_bias").removesuffix("_copy").removeprefix("projected").removeprefix("_") or "qkv"
        self.order = {"gated": "qkv_gated", "view": "qkv"}.get(order, order)
        # The heads that a call has; the results that are not in a cache, with a gate, g; those that get a gradient.
        self.letters = {"no_v": "qk", "alone": "q", "kv": "kv", "rope": "qk", "rope_alone": "q"}.get(source, "qkv")
        self.outputs = self.letters.strip("kv" if out in CACHES else "") + "g" * (self.order == "qkv_gated")
        first, last = self.outputs[:1], self.outputs[-1:]
        self.wanted = {"of_first": first, "of_last": last}.get(case.get("wanted", "all"), self.outputs)
        # The first rotated element of a head, and the number of them; the rest of "last" is a power of two.
        rest = {80: 16, 72: 8, 6: 4, 96: 64, 192: 128}.get(self.size, self.size // 2)
        parts = {"whole": (0, self.size), "first": (0, self.size - rest), "last": (rest, self.size - rest)}
        self.part = parts.get(case["part"], (16, 32))
        # v gets scales too: a given one, or for some conversions a computed one, where it can.
        can = "v" in self.letters and out not in CACHES and case["table"] != "per_head"
        can = can and source != "view" and case["norm"] != "across"
        self.form, self.converts_v = FORMS[convert], convert == "of_v" or (convert in WITH_V and can)
        self.is_own = out == "own" and convert == "none"  # a cache's call writes q in place too
        self.in_place = out == "inplace" or self.is_own
        # What is lost before the last rounding, relative to the largest.
        early = case["rounding"] == "dtype" or case["norm"] in ("once", "twice") or source in PROJECTED
        self.lost = 3 * STEPS[self.dtype] if early else 2e-5
        cu = CU_SEQLENS[case["positions"]][out in IN_PAGES] if case["positions"] in PACKED else ()
        self.cu = tuple([end * tokens // S for end in cu])
        # The offsets of the sequences' tokens in this batch, or of all its tokens.
        of_rank = (2, 1) if case["positions"] == "packed_cp" else (1, 0)
        counts = [len([*oracle.chunked(*span, *of_rank)]) for span in itertools.pairwise(self.cu)]
        self.ends = (0, *itertools.accumulate(counts or [self.tokens]))

        self.tensors = self._sources()
        self.turn, self.second_turn = self._rotation(), {}
        if source == "two":
            self.second_turn = {**self.turn, **self._tables()}
        self.weights = self._weights("") | (self._weights("second_") if source == "two" else {})
        shape = {"number": (), "tokens": (self.batch, self.tokens)}.get(case["more"])
        factor = torch.full((), NUMBER, device=device) if shape == () else self.noise(*(shape or ())).abs() + 0.5
        self.factor = None if shape is None else self.leaf(factor)
        # Given scales: a number, or a tensor for each head, or for each head of a row or a sequence.
        self.scales: dict[str, Any] = SCALES
        if convert in ("of_heads", "of_rows"):
            heads, rows = torch.arange(1, self.counts[0] + 1) / 40, len(self.cu) - 1 if self.cu else self.batch
            heads = heads * torch.arange(1, rows + 1)[:, None] if convert == "of_rows" else heads
            counts = zip("qkv", (*self.counts, self.counts[1]))
            self.scales = {letter: heads[..., :n].to(device) for letter, n in counts}
        if convert == "weighted":
            self.weighs = oracle.heads(self.noise(self.batch, self.tokens, self.counts[0], 1), self.layout)[..., 0]
        # The tensors that require a gradient, by name.
        tables = {f"second_{x}": y for x, y in self.second_turn.items()} | self.turn
        every = {**self.tensors, **self.weights, "q_scale": self.factor, **tables}
        self.leaves = {name: x for name, x in every.items() if isinstance(x, Tensor) and x.requires_grad}

    def noise(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Normal numbers; a format of 8 bits has any bits."""
        if self.device == "meta":
            return torch.empty(shape, device="meta", dtype=dtype)
        if dtype.itemsize > 1:
            return torch.randn(shape, generator=self.generator).to(self.device).to(dtype)
        return torch.randint(0, 100, shape, generator=self.generator).to(self.device, torch.uint8).view(dtype)

    def leaf(self, x: Tensor) -> Tensor:
        return x.detach().requires_grad_() if self.trained else x

    # ---- where heads come from ----

    def laid(self, heads: int, size: int, tokens: int = 0) -> Tensor:
        """A tensor of heads in the call's layout, with its strides."""
        x = self.noise(self.batch, tokens or self.tokens, heads, size).to(self.dtype)
        x, kind, axis = oracle.heads(x, self.layout), self.case["strides"], self.layout.index("h")
        if kind == "offset":
            return torch.cat((x.flatten()[:1], x.flatten()))[1:].view(x.shape)
        if kind == "sliced":
            return torch.cat((x, x), axis).narrow(axis, x.shape[axis], x.shape[axis])
        if kind == "turned":
            return x.transpose(-3, -2).contiguous().transpose(-3, -2)
        if kind == "apart":
            return torch.stack((x, x), -1)[..., 0]
        return x.narrow(axis, 0, 1).expand(x.shape) if kind == "expanded" else x.contiguous()  # one head's numbers

    def _sources(self) -> dict[str, Tensor]:
        source, (q_heads, k_heads), size = self.case["source"], self.counts, self.size
        made: dict[str, Tensor] = {}
        if source in (*FUSED, *PROJECTED):
            each = q_heads * (2 if self.order == "qkv_gated" else 1) + 2 * k_heads
            shape = (k_heads, each // k_heads * size) if self.order == "grouped" else (each, size)
            if source in PROJECTED:
                made["x"] = self.laid(1, WIDTH).squeeze(self.layout.index("h"))
                made["weight"] = (self.noise(each * size, WIDTH) * WIDTH**-0.5).to(self.dtype)
            else:
                made["qkv"] = self.laid(*shape)
            if self.case["strides"] in ("plain", "sliced", "offset") and "qkv" in made:
                made["qkv"] = made["qkv"].flatten(-2)
            if source in (*BIASED, "projected_bias"):
                made["bias"] = self.noise(each * size).to(self.dtype)
        elif source == "latent":
            first, rotary = self.part
            sizes = {"q": (q_heads, size), "kv": (k_heads, first + V_DIM), "k_pe": (1, rotary)}
            made = {name: self.laid(*shape) for name, shape in sizes.items()}
        elif source in STREAMS:
            for name, tokens in (("first", FIRST), ("second", self.tokens - FIRST)):
                for letter, heads in zip("qkv", (q_heads, k_heads, k_heads)):
                    made[f"{name}_{letter}"] = self.laid(heads, size, tokens)
        else:
            counts = dict(zip("qkv", (q_heads, k_heads, k_heads)))
            made = {letter: self.laid(counts[letter], size) for letter in self.letters}
        return {name: self.leaf(x) for name, x in made.items()}

    def fused(self, qkv: Tensor) -> tuple[Tensor, ...]:
        """q, k, v and a gate, (B, S, H, D), of fused QKV in the call's form."""
        q_heads, k_heads = self.counts
        gated, grouped = self.order == "qkv_gated", self.order == "grouped"
        counts = (q_heads * (1 + gated), k_heads, k_heads)
        if qkv.dim() < len(self.layout):
            qkv = qkv.unflatten(-1, (k_heads if grouped else sum(counts), -1))
        if grouped:
            groups = qkv.unflatten(-1, (q_heads // k_heads + 2, -1))
            parts = [groups[..., :-2, :].flatten(-3, -2), groups[..., -2, :], groups[..., -1, :]]
        else:
            parts = [*qkv.split(counts, -2)]
        if gated:
            both = parts[0].unflatten(-2, (-1, 2))
            parts = [both[..., 0, :], *parts[1:], both[..., 1, :]]
        return tuple([oracle.heads(x, self.layout) for x in parts])

    def read(self, letter: str) -> list[Tensor]:
        """The heads of a letter, (B, S, H, D) in fp64, of each stream with tables of its own."""
        t, source = self.tensors, self.case["source"]
        if source in (*FUSED, *PROJECTED):
            if source in PROJECTED:
                qkv = oracle.exact(t["x"]) @ oracle.exact(t["weight"]).t()
                return [self.fused(qkv + oracle.exact(t["bias"]) if "bias" in t else qkv)["qkvg".index(letter)]]
            qkv = oracle.exact(t["qkv"])
            if "bias" in t:
                bias = t["bias"].view(qkv.shape[len(self.layout) - 2 :])
                total, rounded = qkv + oracle.exact(bias), (t["qkv"].float() + bias.float()).to(self.dtype)
                qkv = total + (rounded.double() - total).detach()
            return [self.fused(qkv)["qkvg".index(letter)]]
        if source in STREAMS:
            parts = [oracle.exact(t[f"{name}_{letter}"]) for name in ("first", "second")]
            return parts if source == "two" else [torch.cat(parts, 1)]
        if source == "latent" and letter != "q":
            first = self.part[0]
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
        size = self.part[0] if kind == "k_nope" else self.size
        sizes = [size * (count if kind in ("across", "means") else 1) for count in (q_heads, k_heads)] * 2
        made = {name: self.noise(size) / 4 + (kind != "zero") for name, size in zip(names, sizes)}
        made = {name: x.to(self.weights_dtype) for name, x in made.items()}
        if kind == "means":
            made |= {f"{letter}_mean": self.noise(self.batch, self.tokens).abs() + 0.5 for letter in "qk"}
        of = [x for x in NORM_WORDS.get(kind, {}).get("of", "qk") if x in self.letters]
        return {begin + name: self.leaf(x) for name, x in made.items() if name[0] in of}

    def _tables(self) -> dict[str, Tensor]:
        kind, width, rows = self.case["table"], self.part[1] // (1 if self.case["pairs"] == "full" else 2), self.rows
        dtype = {"half": self.dtype, "double": torch.float64}.get(self.case["of_table"], torch.float32)
        lead = {"batch": (self.batch, rows), "per_head": (1, rows, self.counts[0]), "scaled": (rows, 1, 1)}
        shape = (*lead.get(kind, (rows,)), 2 * width if kind == "cache" else width)
        if kind == "cis":
            made = {"freqs_cis": torch.complex(*[self.noise(*shape).to(dtype) for _ in range(2)])}
        else:
            names = {"none": "", "angles": "freqs", "scaled": "freqs", "cache": "cos_sin_cache"}.get(kind, "cos sin")
            most = 3 if names == "freqs" else 1
            made = {name: (self.noise(*shape) * most).to(dtype) for name in names.split()}
        return {x: self.leaf(y) for x, y in made.items()} if self.case.get("learned") == "learned" else made

    def _rotation(self) -> dict[str, Any]:
        """The words of the rotation, as the oracle has them."""
        case, (first, rotary) = self.case, self.part
        o: dict[str, Any] = {"rotary_offset": first, "rotary_dim": rotary, **self._tables()}
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
        kind, rows, words = self.case["positions"], self.rows, dict[str, Any]()
        own = (self.tokens,) if self.layout == "thd" else (self.batch, self.tokens)
        drawn = functools.partial(torch.randint, generator=self.generator)
        if kind in ("ids", "shared", *calls.SHIFTS, *calls.MROPES):
            lead = (3,) if kind in (*calls.MROPES, "shifts_map") else ()
            shape = (*lead, *(own[-1:] if kind == "shared" else own))
            words["position_ids"] = drawn(1 - rows if kind in calls.SHIFTS else 0, rows, shape)
        if kind in calls.MROPES:
            words |= {"mrope_interleaved": kind == "mrope_turns"}
            words["mrope_section"] = (pairs - 2 * (pairs // 4), pairs // 4, pairs // 4)
        if kind == "shifts_map":  # Ernie 4.5 VL's order
            words["axis_of_pair"] = ([1, 2] * (pairs // 3 + 1))[: pairs - pairs // 3] + [0] * (pairs // 3)
        if self.cu:
            words["cu_seqlens"] = torch.tensor(self.cu)
        if kind in ("starts", "packed_starts"):
            words["start_positions"] = drawn(0, 5, (len(self.cu) - 1 if self.cu else self.batch,))
        if kind in (*calls.SHIFTS, "packed_rows"):
            words["shifts" if kind in calls.SHIFTS else "packed_table"] = True
        if kind in ("cp", "packed_cp"):
            words.update(cp_size=2, cp_rank=1)
        return {x: y.to(self.device, self.ints) if isinstance(y, Tensor) else y for x, y in words.items()}

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
        names = ("cu_seqlens", "start_positions", "packed_table", "cp_size", "cp_rank")
        given = {x: o[x] for x in names if x in o}
        if case["positions"] == "packed_starts":
            given["max_seqlen"] = max(end - first for first, end in itertools.pairwise(self.cu))
        if given:
            words["positions"] = (Packed if self.cu else Starts)(**given)
        elif "position_ids" in o:
            axes = {x: o[x] for x in ("mrope_section", "mrope_interleaved", "axis_of_pair") if x in o}
            value = Shifts if "shifts" in o else Mrope if axes else None
            words["positions"] = value(o["position_ids"], **axes) if value else o["position_ids"]
        if self.layout != "bshd" and not self.cu:
            words["layout"] = self.layout
        if case["rounding"] != "fp32":
            words["rounding"] = case["rounding"]
        if self.factor is not None:
            words["q_scale"] = self.factor[0] if self.layout == "thd" and self.factor.dim() else self.factor
            if case["more"] == "number" and not self.trained:
                words["q_scale"] = NUMBER
        if case["more"] == "check":
            words["check"] = True
        if case["norm"] != "none":
            norms = []
            for begin in ("", "second_")[: 1 + (case["source"] == "two")]:
                own: dict[str, Any] = {
                    x.removeprefix(begin): y for x, y in self.weights.items() if x.startswith("second") == bool(begin)
                }
                if case["norm"] == "means":
                    means = [own.pop(f"{letter}_mean", None) for letter in "qk"]
                    own["mean_squares"] = [x[0] if self.layout == "thd" and x is not None else x for x in means]
                norms.append(Norm(**own, **NORM_WORDS.get(case["norm"], {})))
            words["norm"] = norms if case["source"] == "two" else norms[0]
        hadamard, cached = case["transform"] == "head", case["out"] in CACHES
        converted = [x for x in ("qv" if cached else self.letters) if x != "v" or self.converts_v]
        if case["convert"] in DYNAMIC:
            scales = {f"{x}_global_scale": GLOBALS[x] for x in converted} if case["convert"] == "nvfp4" else {}
            scales |= {"q_weights": self.weighs} if case["convert"] == "weighted" else {}
            words["quantize"] = DynamicQuantize(**self.form, **scales, hadamard=hadamard, v=self.converts_v)
        elif case["convert"] != "none":
            scales = {f"{x}_scale": self.scales[x] for x in converted}
            words["quantize"] = Quantize(**scales, **self.form, hadamard=hadamard)
        elif hadamard:
            words["hadamard"] = True
        if case["source"] in (*FUSED, *PROJECTED):
            words.update(heads=self.counts)
            words.update({} if self.order == "qkv" else {"order": self.order})
            words.update({"view": {"copy_v": False}, "gated_copy": {"copy_gate": True}}.get(case["source"], {}))
            words.update({"bias": self.tensors["bias"]} if "bias" in self.tensors else {})
        return words

    def call(self, **words: Any) -> dict[str, Any]:
        """The results by letter."""
        return self.named(self.function(*self.arguments(), **self.words(), **words))

    def arguments(self) -> list[Any]:
        t, source = self.tensors, self.case["source"]
        if source in STREAMS:
            return [[t[f"{name}_{letter}"] for letter in "qkv"] for name in ("first", "second")]
        if source in PROJECTED:
            return [t["x"], t["weight"]]
        if source in FUSED:
            return [t["qkv"]]
        if source == "latent":
            return [t["q"], t["kv"], t["k_pe"]]
        return [t.get(letter) for letter in ("qk" if source in ROPES else "qkv")]

    def named(self, results: Any) -> dict[str, Any]:
        """Results by letter; fused QKV that was written is split, in the layout."""
        if isinstance(results, Tensor):
            return {x: oracle.heads(y, self.layout) for x, y in zip("qkvg", self.fused(results))}
        return dict(zip("qkvg", results))

    # ---- the results ----

    def normed(self, letter: str, x: Tensor, begin: str) -> Tensor:
        """A stream's heads after its norm, if they have one."""
        kind, words = self.case["norm"], NORM_WORDS.get(self.case["norm"], {})
        if kind == "none" or letter not in words.get("of", "qkv" if kind == "v_norm" else "qk"):
            return x
        own = [self.weights.get(f"{begin}{letter}_{name}") for name in ("weight", "bias")]
        if kind == "means":
            mean = oracle.exact(self.weights[f"{begin}{letter}_mean"])[..., None, None]
            return x / (mean + 1e-6).sqrt() * oracle.exact(own[0]).view(x.shape[2:])
        first, rest = x.tensor_split([self.part[0] if kind == "k_nope" else self.size], -1)
        o = {"norm_kind" if name == "kind" else name: y for name, y in words.items()}
        return torch.cat((oracle.normed(first, *own, {**o, "across_heads": kind in ("across", "of_v")}), rest), -1)

    def expected(self, letter: str) -> Tensor:
        """(B, S, H, D) in fp64 before the conversion: norm, rotation, scale of q, transform."""
        parts, done, case = self.read(letter), [], self.case
        if letter == "g":
            return parts[0]
        after = "after_rope" in NORM_WORDS.get(case["norm"], {})
        for x, turn, begin in zip(parts, (self.turn, self.second_turn), ("", "second_")):
            y = x if after else self.normed(letter, x, begin)
            if letter != "v":
                y = oracle.rotated(y, turn)
                y = oracle.reordered(self.normed(letter, y, begin) if after else y, turn)
            done.append(y)
        before, x = torch.cat(parts, 1), torch.cat(done, 1)
        if letter == "v":
            spare = before if self.is_own or (case["source"] in FUSED and self.in_place) else x
        else:
            spare = before if self.in_place else 0 * before
            if letter == "q" and self.factor is not None:
                factor = oracle.exact(self.factor)
                x = x * (factor[..., None, None] if factor.dim() else factor)
            x = x @ oracle.hadamard_matrix(self.size).to(x) if case["transform"] == "head" else x
        return torch.cat((x[:, : self.ends[-1]], spare[:, self.ends[-1] :]), 1)
