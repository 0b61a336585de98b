"""Kinds of calls that `bench roofline` and `bench targets` time, made from the cases of the other benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jitrope import Norm, Packed, Quantize, apply_rope, prepare_qkv

from . import chains, cp, decode, presets, qk_norm, rope, stages
from . import peers as others
from .harness import COPY, DEVICE, Call, Case, angles, bf16, measure, twice
from .presets import Preset
from .rope import Shape
from .train import offsets


class Kind(NamedTuple):
    """A kind of call.

    make, by: a function of `--smoke` that returns a case, and the label of one of its calls.
    part: "forward", "backward" or "both" of it; it moves the bytes of so many `copies`.
    trained: fields of the inputs with gradients; empty for a forward alone.
    """

    make: Callable[[bool], Case]
    by: str = "jitrope"
    part: str = "forward"
    trained: tuple[str, ...] = ()
    copies: float = 1


class Timed(NamedTuple):
    """Microseconds of a kind of call and of the copies beside it, and the bytes that each moves."""

    us: float
    copied: float
    moved: float


def timed(kind: Kind, smoke: bool, hot: bool | None = None) -> Timed:
    """Of new inputs, in rounds with the copy. hot: as in `Case`; None: as the case has it."""
    made = kind.make(smoke)
    copy = made.beside.get(kind.by, COPY)
    only = {kind.by: made.ours[kind.by]}
    plain = {label: call for label, call in made.plain.items() if label in only}
    hot = made.hot if hot is None else hot
    case = replace(made, ours=only, moved={copy: made.moved[copy]}, peers={}, plain=plain, hot=hot)
    times = measure(case, kind.trained)
    us = getattr(times[kind.by], kind.part)
    return Timed(us, kind.copies * times[copy].forward, kind.copies * made.moved[copy])


# ---- q and k ---------------------------------------------------------------------------------------------


def partial_rope(smoke: bool) -> Case:
    """Return a rotation of 64 of 128 elements."""
    preset = stages.STAGES["half of a head"].preset()
    return presets.case(preset._replace(shape=rope.CASES["prefill"][0]), False, smoke)


def half_width(shape: Shape, rotary_dim: int) -> chains.Inputs:
    """Return random inputs with each angle once."""
    own = chains.inputs(shape, rotary_dim)
    return own._replace(freqs=own.freqs[:, 0, 0, : rotary_dim // 2].contiguous())


def by_angles(name: str, full: bool, smoke: bool) -> Case:
    """Return a shape of `bench rope` with angles, half or full width."""
    shape, interleaved, _ = rope.CASES[name]
    call = stages.rope(lambda x: {"freqs": x.freqs, "interleaved": interleaved}, False)
    plain, make = others.plain_pair(interleaved), chains.inputs if full else half_width
    return presets.case(Preset(shape, call, plain, presets.IN_AND_OUT, make=make), False, smoke)


def norm(name: str, smoke: bool, training: bool = False) -> Case:
    """Return a case of `bench qk-norm`."""
    kind = qk_norm.CASES[name]
    return qk_norm.case(qk_norm.tiny(kind) if smoke else kind, False, training)


def in_order(shape: Shape, rotary_dim: int) -> chains.Inputs:
    """Return random inputs with the ids of a prefill."""
    return chains.inputs(shape, rotary_dim)._replace(ids=torch.arange(shape[1], device=DEVICE).expand(3, -1))


def norm_in_place(name: str, smoke: bool, rounding: str, ids: bool = False) -> Case:
    """Return a shape of `bench qk-norm` in place, with a rounding, by ids or by rows of the table."""
    kind = qk_norm.CASES[name]

    def words(x: chains.Inputs) -> dict[str, Any]:
        places = {"positions": x.ids[0]} if ids else {}
        own = Norm(*x.weights, rounding=rounding)
        return {"norm": own, "interleaved": kind.interleaved, "inplace": True, **places}

    plain = chains.both(lambda y, weight, bias: chains.rms(y, weight), interleaved=kind.interleaved)
    call = stages.stages(words)
    return presets.case(Preset(kind.shape, call, plain, presets.IN_AND_OUT, make=in_order), False, smoke)


# ---- one tensor ------------------------------------------------------------------------------------------


class Inputs(NamedTuple):
    """A bf16 tensor, and full-width angles (rows, 1, 1, D) in fp32."""

    x: Tensor
    freqs: Tensor


def tensor(shape: tuple[int, ...], words: dict[str, Any], sets: int = 1) -> Case:
    """Return a rotation of one tensor, tokens first, by TransformerEngine's angles."""

    def inputs() -> Inputs:
        return Inputs(bf16(*shape), twice(angles(shape[0], shape[-1]))[:, None, None])

    call: Call = lambda x: apply_rope(x.x, None, freqs=x.freqs, **words)[0]  # noqa: E731
    return Case(inputs, {"jitrope": call}, {COPY: 2 * 2 * prod(shape)}, sets=sets)


def padded(shape: tuple[int, ...], smoke: bool) -> Case:
    """Return a rotation of (S, B, H, D)."""
    return tensor((8, 2, 2, 16) if smoke else shape, {"layout": "sbhd"})


def packed(tokens: int, heads: int, sequences: int, smoke: bool, uneven: bool = False, sets: int = 1) -> Case:
    """Return a rotation of sequences of the same length, one more or less, or of random lengths."""
    tokens, sequences = (64, min(sequences, 8)) if smoke else (tokens, sequences)
    return tensor((tokens, heads, 128), {"positions": Packed(offsets(tokens, sequences, uneven))}, sets)


# ---- serving ---------------------------------------------------------------------------------------------

STEP, PREFILL = 256, 4096
ROWS, IDS, KV, FP8, FP8_Q, NORM_KV = (
    f"jitrope, {what}"
    for what in (
        *("cos and sin rows", "cos_sin_cache and ids", "KV cache", "fp8 KV cache"),
        *("fp8 q and KV cache", "norm and KV cache"),
    )
)

COPY_FP8_Q = "COPY, fp8 q and KV cache"


def fp8_q(x: decode.Inputs) -> Any:
    """q in fp8, k and v to an fp8 cache."""
    words: Any = {"cos_sin_cache": x.table, "positions": x.positions, "cache": x.kv_fp8}
    return prepare_qkv(x.q, x.k, x.v, **words, quantize=Quantize(x.kv_fp8.tensors["k_scale"]))[0]


def without_result(call: Call) -> Call:
    """The steps of a graph then write to the same memory, which stays in L2."""

    def made(x: decode.Inputs) -> None:
        call(x)

    return made


def serving(tokens: int, heads: tuple[int, int], smoke: bool) -> Case:
    """Return a step of `bench decode`, hot, or its prefill, cold; also with fresh results, and with q in fp8."""
    prefill, head_dim, pool = tokens == PREFILL, 128, decode.POSITIONS
    if smoke:
        tokens, heads, head_dim, pool = 20, (4, 2), 16, 64
    case = decode.case(tokens, heads, head_dim, prefill, False, pool)
    fresh = {ROWS: decode.by_rows, IDS: decode.by_ids, KV: decode.to_cache}
    more: dict[str, Call] = {FP8_Q: fp8_q} if prefill else {}
    for by in fresh.keys() & case.ours.keys():
        call = partial(fresh[by], inplace=False)
        more[f"{by}, fresh"] = call if prefill else without_result(call)
    moved = {**case.moved, COPY_FP8_Q: tokens * head_dim * 3 * (heads[0] + 2 * heads[1])}
    beside = {**case.beside, FP8_Q: COPY_FP8_Q, **{f"{by}, fresh": case.beside[by] for by in fresh}}
    return replace(case, ours={**case.ours, **more}, moved=moved, beside=beside)


# ---- context parallelism ---------------------------------------------------------------------------------


def between_ranks(name: str, smoke: bool) -> Case:
    """Return an operation of `bench cp` on an even batch of two ranks."""
    works = cp.works(2, cp.TINY if smoke else cp.Batch(), False)
    return cp.case_of(next(work for work in works if work.name == name))


# ---- all of them -----------------------------------------------------------------------------------------

DENSE = ("prefill", "qwen-image", "flux", "wan", "train", "head64", "head72", "head80", "head256")
NORMED = ("prefill", "flux")
SBHD = ((4096, 1, 128, 128), (512, 32, 24, 128))
MANY = 100_000, 1_000_000
HEADS = {"32/8": (32, 8), "64/8": (64, 8)}
MOVES = (
    *("sequence to rank order", "sequence to rank order, k and v", "rank to sequence order"),
    *("rank to sequence order, k and v", "copy valid", "gather of visible keys, k and v"),
)
SUMS = ("sum of chunks, dK and dV", "sum over ranks, dK and dV")
WEIGHTS = ("q", "k", "q_weight", "k_weight")


def dense(by: str, in_place: str) -> dict[str, Kind]:
    """A call of `bench rope` on all shapes, and its form in place on one."""
    found = {name: Kind(partial(rope.case, name, False), by) for name in DENSE}
    return {**found, "prefill, in place": found["prefill"]._replace(by=in_place)}


def angled(names: Sequence[str], full: bool) -> dict[str, Kind]:
    """Full-width angles are those of halves."""
    return {f"{name}, {'full' if full else 'half'} width": Kind(partial(by_angles, name, full)) for name in names}


def pack(sequences: int, tokens: int = 65_536, heads: int = 32, uneven: bool = False, sets: int = 4) -> Kind:
    """Both passes. One sequence reads a whole table: 32 MiB, and L2 must not keep all of the sets."""
    make = partial(packed, tokens, heads, sequences, uneven=uneven, sets=sets)
    return Kind(make, part="both", trained=("x",), copies=2)


def padded_kinds(part: str, *trained: str) -> dict[str, Kind]:
    """A pass of (S, B, H, D)."""
    return {str(list(shape)): Kind(partial(padded, shape), part=part, trained=trained) for shape in SBHD}


def normed(by: str = "jitrope") -> dict[str, Kind]:
    """A call of `bench qk-norm`."""
    return {name: Kind(partial(norm, name), by) for name in NORMED}


def normed_in_place(what: str, rounding: str, ids: bool = False) -> dict[str, Kind]:
    """A norm in place."""
    return {f"{name}, {what}": Kind(partial(norm_in_place, name, rounding=rounding, ids=ids)) for name in NORMED}


def served(tokens: int, heads: Sequence[str], *labels: str) -> dict[str, Kind]:
    """Calls of `serving`."""
    made = {f"{by.removeprefix('jitrope, ')}, {n}": (by, HEADS[n]) for n in heads for by in labels}
    return {name: Kind(partial(serving, tokens, shape), by) for name, (by, shape) in made.items()}


def staged(*names: str) -> dict[str, Kind]:
    """Calls of `bench stages`."""
    return {name: Kind(partial(presets.case, stages.STAGES[name].preset(), False)) for name in names}


def preset(**names: str) -> dict[str, Kind]:
    """Calls of `bench presets`. names: of presets, by those of cases."""
    return {case: Kind(partial(presets.case, presets.PRESETS[name], False)) for case, name in names.items()}


def latent() -> dict[str, Kind]:
    """The training of DeepSeek's attention, with q and its gradient in place."""
    made, by = presets.PRESETS["deepseek-mla"], "jitrope in place"
    trained = Kind(partial(presets.case, made, False, training=True), by, trained=made.trained)
    passes = {part: trained._replace(part=part, copies=1 + (part == "both")) for part in ("backward", "both")}
    return {"forward": Kind(partial(presets.case, made, False), by), **passes}


def ranked(names: Sequence[str]) -> dict[str, Kind]:
    """Operations of `bench cp`."""
    return {name: Kind(partial(between_ranks, name)) for name in names}


KINDS: dict[str, dict[str, Kind]] = {
    "rope": dense("jitrope", "jitrope in place"),
    "rope by ids": dense("jitrope, position_ids", "jitrope in place, position_ids"),
    "rope of half a head": {"prefill": Kind(partial_rope)},
    "rope by angles": {**angled(DENSE, False), **angled(("prefill", "train"), True)},
    "packed evenly": {f"{n:,} sequences": pack(n) for n in (8, 128, 1024)},
    "packed unevenly": {"100 sequences": pack(100, uneven=True)},
    "one sequence": {"65,536 tokens": pack(1)},
    "a million tokens of 8 heads": {"100,000 sequences": pack(*MANY, heads=8, uneven=True, sets=1)},
    "a million tokens of 32 heads": {"100,000 sequences": pack(*MANY, heads=32, uneven=True, sets=1)},
    "SBHD forward": padded_kinds("forward"),
    "SBHD backward": padded_kinds("backward", "x"),
    "norm": {**normed(), **{f"{name}, in place": kind for name, kind in normed("jitrope in place").items()}},
    "norm by ids": {
        **normed_in_place("in place", "none", True),
        **normed_in_place("in place, rounded once", "once", True),
    },
    "norm rounded twice": {**normed("jitrope, rounded twice"), **normed_in_place("in place", "twice")},
    "norm and its gradient": {"prefill": Kind(partial(norm, "prefill"), part="both", trained=WEIGHTS, copies=2.5)},
    "gradient of a norm": {"prefill": Kind(partial(norm, "prefill", training=True), part="backward", trained=WEIGHTS)},
    "decode": served(STEP, ("32/8",), ROWS, IDS, f"{ROWS}, fresh", f"{IDS}, fresh"),
    "KV cache of a step": served(STEP, (*HEADS,), KV, f"{KV}, fresh"),
    "KV cache of a prefill": served(PREFILL, (*HEADS,), KV, f"{KV}, fresh"),
    "fp8 KV cache": served(PREFILL, ("32/8",), FP8, FP8_Q),
    "norm and KV cache": served(PREFILL, ("32/8",), NORM_KV),
    "norm and KV cache of a step": served(64, (*HEADS,), NORM_KV),
    "ids along three axes": staged("ids along three axes"),
    "Hadamard": staged("Hadamard"),
    "fp8": staged("fp8, given scales", "fp8, scales of tokens and heads"),
    "fp8, scales of heads": preset(FLUX="flux-fp8-heads", Hadamard="flux-fp8-heads-hadamard"),
    "DeepSeek's indexer": preset(
        prefill="deepseek-indexer", step="deepseek-indexer-decode", Hadamard="deepseek-indexer-hadamard"
    ),
    "DeepSeek's attention": latent(),
    "DeepSeek's step in fp8": preset(step="deepseek-mla-decode-fp8"),
    "a gate in the same launch": preset(prefill="qwen3.5-fused"),
    "rows between ranks": ranked(MOVES),
    "sums of rows": ranked(SUMS),
}
"""By what they do. `bench roofline` takes the first case of each."""
