"""`bench stages`: what each stage between projection and attention costs over a copy, beside what was expected."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jitrope import (
    DynamicQuantize,
    KVCache,
    Mrope,
    Norm,
    Packed,
    Quantize,
    Shifts,
    Ulysses,
    apply_rope,
    prepare_fused_qkv,
    prepare_joint_qkv,
    prepare_qkv,
)
from jitrope.base.views import E8M0, FORMATS

from . import chains
from .chains import RANKS, SECTIONS, Inputs
from .harness import COPY, Call, bf16
from .presets import Preset, timed
from .report import AS_JSON, ONLY, SMOKE, Rows, app, chosen, show
from .rope import Shape
from .sections import Row, Section, Table, of

SHAPE = (1, 4096, 32, 8, 128)
TEXT = 512
"""Tokens of the first of two streams."""
HALF = 64
FP4 = FORMATS["fp4"].dtype


class Stage(NamedTuple):
    """A call, rope with one stage.

    expected: its time over COPY's and that of its gradient, written down before the first measurement; 0: not timed.
    moved, make, backward, rotary_dim: as in `Preset`. trained: fields with gradients.
    """

    part: str
    call: Call
    expected: tuple[float, float] = (1.05, 0)
    moved: tuple[float, float, float] = (4, 4, 0)
    make: Callable[[Shape, int], Any] = chains.inputs
    backward: float = 1
    rotary_dim: int = 0
    trained: tuple[str, ...] = ("q", "k")

    def preset(self) -> Preset:
        """Return the call as one of `bench presets`."""
        trained = self.trained if self.expected[1] else ()
        return Preset(
            SHAPE, self.call, None, self.moved, self.rotary_dim, trained=trained, make=self.make, backward=self.backward
        )


# ---- calls -------------------------------------------------------------------------------------------------


def rope(words: Callable[[Inputs], dict[str, Any]] = lambda x: {}, tables: bool = True) -> Call:
    """Return a call for q and k with these words."""

    def call(x: Inputs) -> Any:
        return apply_rope(x.q, x.k, *(x[3:5] if tables else ()), **words(x))

    return call


def stages(words: Callable[[Inputs], dict[str, Any]], v: bool = False, tables: bool = True) -> Call:
    """Return a call with these words for q and k, and v if asked. It returns tensors that a gradient can enter."""

    def call(x: Inputs) -> Any:
        found = prepare_qkv(x.q, x.k, x.v if v else None, *(x[3:5] if tables else ()), **words(x))
        return found if v else found[:2]

    return call


def norm(v: bool = False, tables: bool = True, **words: Any) -> Call:
    """Return a call with this norm."""
    return stages(lambda x: {"norm": Norm(*x.weights, v_norm=v, **{"rounding": "once", **words})}, v, tables)


def layer_norm(x: Inputs) -> dict[str, Any]:
    q_bias, k_bias = x.biases
    return {"norm": Norm(*x.weights, q_bias=q_bias, k_bias=k_bias, kind="layer_norm", rounding="once")}


def scaled(written: float, expected: float, **words: Any) -> Stage:
    """A conversion with scales that the call computes. written: bytes of an element and its part of a scale."""
    call = stages(lambda x: {"quantize": DynamicQuantize(**words)})
    return Stage("convert", call, (expected, 0), (2 + written, 2 + written, 0))


def projection(shape: Shape, rotary_dim: int) -> Inputs:
    """Return inputs whose q is a projection's output: heads of q, of k and of v in turn."""
    b, s, hq, hk, d = shape
    own = chains.inputs(shape, rotary_dim)
    heads = hq + 2 * hk
    return own._replace(q=bf16(b, s, heads, d), k=own.k[..., :hk, :], biases=(bf16(heads * d), own.biases[1]))


def pages(shape: Shape, rotary_dim: int) -> Inputs:
    """Return inputs with caches in bf16."""
    own = chains.inputs(shape, rotary_dim)
    k_cache, v_cache, slots = own.caches
    return own._replace(caches=(k_cache.bfloat16(), v_cache.bfloat16(), slots))


def differences(shape: Shape, rotary_dim: int) -> Inputs:
    """Return inputs with differences of positions, also below 0."""
    own = chains.inputs(shape, rotary_dim)
    return own._replace(ids=own.ids - shape[1] // 2)


def fused(x: Inputs, biased: bool = False) -> Any:
    """All heads of q, k and v in turn."""
    hk = x.k.shape[2]
    words: Any = {"bias": x.biases[0]} if biased else {}
    return prepare_fused_qkv(x.q, x.cos, x.sin, heads=(x.q.shape[2] - 2 * hk, hk), **words)


class Streams(NamedTuple):
    """q, k and v of two streams, and the tables of both."""

    q: Tensor
    k: Tensor
    v: Tensor
    other_q: Tensor
    other_k: Tensor
    other_v: Tensor
    cos: Tensor
    sin: Tensor


def streams(shape: Shape, rotary_dim: int) -> Streams:
    """Return two streams."""
    own = chains.inputs(shape, rotary_dim)
    text = min(TEXT, shape[1] // 2)
    parts = [y[:, part].contiguous() for part in (slice(text), slice(text, None)) for y in own[:3]]
    return Streams._make([*parts, own.cos, own.sin])


def joint(x: Streams) -> Any:
    return prepare_joint_qkv(x[:3], x[3:6], x.cos, x.sin)


def tokens_first(x: Inputs) -> Any:
    """Three packed sequences."""
    q, k = (y.flatten(0, 1) for y in x[:2])
    return apply_rope(q, k, x.cos, x.sin, positions=Packed(x.cu_seqlens))


def heads_first(x: Inputs) -> dict[str, Any]:
    """Results in another layout."""
    return {"out": [y.new_empty(y.transpose(1, 2).shape).transpose(1, 2) for y in (x.q, x.k)]}


def cached(x: Inputs, **scales: Any) -> dict[str, Any]:
    return {"cache": KVCache(*x.caches, **scales)}


def to_ranks(x: Inputs) -> dict[str, Any]:
    return {"out": Ulysses(min(RANKS, x.k.shape[2]))}


def per_head(x: Inputs) -> dict[str, Any]:
    return {"quantize": DynamicQuantize(per="head")}


TRAINED = (1.05, 1.05)
STAGES = {
    "rope alone": Stage("rotate", rope(), TRAINED),
    "in place": Stage("rotate", rope(lambda x: {"inplace": True})),
    "position ids": Stage("rotate", rope(lambda x: {"positions": x.ids[0]}), (1.06, 1.06)),
    "ids along three axes": Stage("rotate", rope(lambda x: {"positions": Mrope(x.ids, SECTIONS)}), (1.1, 1.1)),
    "packed sequences": Stage("rotate", tokens_first, TRAINED),
    "angles": Stage("rotate", rope(lambda x: {"freqs": x.freqs}, False), (1.07, 1.07)),
    "half of a head": Stage("rotate", rope(lambda x: {"rotary_dim": HALF}), TRAINED, rotary_dim=HALF),
    "interleaved pairs, halves out": Stage(
        "rotate", rope(lambda x: {"interleaved": True, "interleaved_out": False}), (1.06, 1.06)
    ),
    "tokens that stay": Stage("rotate", rope(lambda x: {"unrotated": 256}), TRAINED),
    "a factor on q": Stage("rotate", rope(lambda x: {"q_scale": 0.5}), TRAINED),
    "moved by differences": Stage(
        "rotate", rope(lambda x: {"positions": Shifts(x.ids[0]), "inplace": True}), (1.07, 0), make=differences
    ),
    "a projection": Stage("in", fused, TRAINED, (4, 4, 4), projection, trained=("q",)),
    "a projection and its bias": Stage("in", partial(fused, biased=True), (1.06, 0), (4, 4, 4), projection),
    "two streams": Stage("in", joint, (1.08, 1.1), (4, 4, 4), streams, 5 / 6, trained=Streams._fields[:6]),
    "RMSNorm": Stage("norm", norm(), (1.08, 1.18), backward=1.5),
    "RMSNorm without rope": Stage("norm", norm(tables=False), (1.07, 1.15), backward=1.5),
    "RMSNorm, rounded twice": Stage("norm", norm(rounding="twice"), (1.09, 1.18), backward=1.5),
    "RMSNorm behind rope": Stage("norm", norm(after_rope=True), (1.09, 1.2), backward=1.5),
    "RMSNorm of v too": Stage("norm", norm(v=True), (1.07, 1.15), (4, 4, 4), backward=1.5, trained=("q", "k", "v")),
    "RMSNorm across heads": Stage(
        "norm", norm(across_heads=True), (1.06, 1.18), make=chains.across, backward=1.5
    ),
    "LayerNorm with a bias": Stage("norm", stages(layer_norm), (1.09, 1.22), backward=1.5),
    "Hadamard": Stage("transform", stages(lambda x: {"hadamard": True}), (1.25, 2.3)),
    "fp8, given scales": Stage(
        "convert", stages(lambda x: {"quantize": Quantize(0.05, 0.05)}), (1.1, 0), (3, 3, 0)
    ),
    "fp8, scales of tokens and heads": scaled(1 + 4 / 128, 1.15),
    "int8, scales of tokens and heads": scaled(1 + 4 / 128, 1.15, dtype=torch.int8),
    "MXFP8": scaled(1 + 1 / 32, 1.2, group=32, scale_dtype=E8M0),
    "MXFP4": scaled(0.5 + 1 / 32, 1.35, dtype=FP4, group=32, scale_dtype=E8M0),
    "NVFP4": scaled(0.5 + 1 / 16, 1.4, dtype=FP4, group=16, scale_dtype=torch.float8_e4m3fn),
    "NVFP4, swizzled": scaled(0.5 + 1 / 16, 1.45, dtype=FP4, group=16, scale_dtype=torch.float8_e4m3fn, swizzled=True),
    "fp8, scales of heads": Stage("convert", stages(per_head), (1.75, 0), (3, 3, 0)),
    "Hadamard and fp8, scales of tokens and heads": scaled(1 + 4 / 128, 1.45, hadamard=True),
    "another layout": Stage("out", rope(heads_first), (1.06, 0)),
    "Ulysses": Stage("out", stages(to_ranks, v=True), (1.1, 0), (4, 4, 4)),
    "pages": Stage("out", stages(cached, v=True), (1.08, 0), (4, 4, 4), pages),
    "fp8 pages": Stage("out", stages(partial(cached, k_scale=0.05, v_scale=0.02), v=True), (1.1, 0), (4, 3, 3)),
}  # fmt: skip


def rows(name: str, smoke: bool) -> Rows:
    """The forward of a stage, and its gradient."""
    stage, found = STAGES[name], []
    for training, expected in enumerate(stage.expected):
        if expected:
            made, us = timed(stage.preset(), False, bool(training), smoke)
            over = us["jitrope"] / us[COPY]
            found.append(
                {
                    "part": stage.part,
                    "stage": name,
                    "pass": ("forward", "backward")[training],
                    "by": "jitrope",
                    "MiB": made.moved[COPY] / 2**20,
                    "us": us["jitrope"],
                    "expected": expected,
                    "x COPY": over,
                }
            )
    return found


@app.command("stages")
def command(only: ONLY = "", smoke: SMOKE = False, as_json: AS_JSON = False) -> None:
    """GPU time of rope with one stage more, cold, over a copy of the same bytes, and what was expected."""
    show({name: partial(rows, name, smoke) for name in chosen(only, STAGES)}, smoke, as_json)


# ---- in examples/results/README.md -----------------------------------------------------------------------


def line(row: Row) -> str:
    """Of the table."""
    return f"{row['part']}: {row['stage']}"


SECTION = Section(
    "Stage by stage",
    """
    Rope of 4,096 tokens with 32 heads of q and 8 of k, 128 wide, with one stage more: time over COPY of the bytes that
    the call must read and write, its inputs cold. "Expected" was written into the program before the first measurement.
    Scales of heads take two launches, and so do the gradients of a Hadamard transform and of two streams, whose v's
    gradient is a view; Ulysses also copies v.
    """,
    "jitrope bench stages",
    (
        Table(
            "stage",
            line,
            {
                head + label: of(key, **{"pass": name})
                for name, label in (("forward", ""), ("backward", ", gradient"))
                for head, key in {"MiB": "MiB", "us": "us", "expected": "expected", "measured": "x COPY"}.items()
            },
        ),
    ),
)
