"""`bench qk-norm`: GPU time of RMSNorm + rope of q and k, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from jitrope import Norm, apply_rope, configure, prepare_joint_qkv, prepare_qkv

from . import peers as others
from .harness import COPY, DEVICE, Call, Case, bf16, measure
from .harness import rows as rows_of
from .plots import Plot
from .report import AS_JSON, ONLY, PEERS, SMOKE, Rows, app, chosen, show
from .rope import Shape, line_of, name_of, small
from .sections import PLAIN, Row, Section, Table, grouped, of, span

EPS = 1e-6


class Kind(NamedTuple):
    """shape: (B, S, Hq, Hk, D). text: how many of the S tokens are a stream of their own, with its own weights,
    that comes first. per_head: tables (B, S, H, D / 2), otherwise (S, D / 2)."""

    shape: Shape
    interleaved: bool = False
    hot: bool = False
    across_heads: bool = False
    per_head: bool = False
    text: int = 0


CASES = {
    "flux": Kind((1, 4608, 24, 24, 128), interleaved=True),
    "flux-joint": Kind((1, 4608, 24, 24, 128), interleaved=True, text=512),
    "wan": Kind((1, 32760, 12, 12, 128), interleaved=True, across_heads=True),
    "ltx": Kind((1, 4992, 32, 32, 64), interleaved=True, across_heads=True, per_head=True),
    "prefill": Kind((1, 8192, 32, 8, 128)),
    "qwen3": Kind((1, 4096, 32, 8, 128)),
    "decode64": Kind((64, 1, 32, 8, 128), hot=True),
    **{f"head{d}": Kind((1, 4096, 16, 16, d)) for d in (64, 72, 80, 96, 112, 160, 192, 256)},
}
TRAINED = ("prefill", "flux")


def tiny(kind: Kind) -> Kind:
    """The same of a few tokens."""
    return kind._replace(shape=small(kind.shape), text=min(kind.text, 2))


class Inputs(NamedTuple):
    """bf16 activations and weights, fp32 half-width tables. v is moved only where there are two streams: then
    `first` is (q, k, v, q_weight, k_weight) of the first, and the rest the second's."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_weight: Tensor
    k_weight: Tensor
    cos: Tensor
    sin: Tensor
    first: tuple[Tensor, ...]


def inputs(kind: Kind) -> Inputs:
    """Random ones."""
    b, s, hq, hk, d = kind.shape
    widths = (hq * d, hk * d) if kind.across_heads else (d, d)

    def stream(tokens: int) -> tuple[Tensor, ...]:
        return *(bf16(b, tokens, heads, d) for heads in (hq, hk, hk)), *(1 + 0.1 * bf16(width) for width in widths)

    lead = (b, s, hq) if kind.per_head else (s,)
    angles = torch.rand(*lead, d // 2, device=DEVICE) * 2 * torch.pi
    q, k, v, q_weight, k_weight = stream(s - kind.text)
    first = stream(kind.text) if kind.text else ()
    return Inputs(q, k, v, q_weight, k_weight, angles.cos(), angles.sin(), first)


# ---- the implementations, each of which returns q and k, and with two streams v ---------------------------


def ours(kind: Kind, inplace: bool = False, rounding: str = "none") -> Call:
    """jitrope's one launch."""
    norm = partial(Norm, eps=EPS, across_heads=kind.across_heads, rounding=rounding)

    def one(x: Inputs) -> Any:
        words: Any = {"interleaved": kind.interleaved, "inplace": inplace}
        return prepare_qkv(x.q, x.k, None, x.cos, x.sin, norm=norm(x.q_weight, x.k_weight), **words)[:2]

    def joint(x: Inputs) -> Any:
        norms = norm(*x.first[3:]), norm(x.q_weight, x.k_weight)
        words: Any = {"norm": norms, "interleaved": kind.interleaved}
        return prepare_joint_qkv(x.first[:3], (x.q, x.k, x.v), x.cos, x.sin, **words)

    return joint if kind.text else one


def invariant(call: Call) -> Call:
    """The same with `configure(batch_invariant=True)`: its kernels are captured, so the setting costs no GPU time."""

    def one_order(x: Inputs) -> Any:
        configure(batch_invariant=True)
        try:
            return call(x)
        finally:
            configure(batch_invariant=False)

    return one_order


def plain_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, ...]:
    """Plain torch."""
    cos, sin = (table if table.dim() == 4 else table[None, :, None] for table in (cos, sin))
    return tuple(others.rotate(x, cos, sin, interleaved) for x in (q, k))


def separate(kind: Kind, rope: Callable[..., Any] = plain_rope) -> Call:
    """`F.rms_norm` of q and k, put together with v where there are two streams, then a rope."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        rows = x.flatten(-2) if kind.across_heads else x
        return F.rms_norm(rows, weight.shape, weight, EPS).view_as(x)

    def chain(x: Inputs) -> Any:
        q, k, *v = norm(x.q, x.q_weight), norm(x.k, x.k_weight)
        if kind.text:
            first = norm(x.first[0], x.first[3]), norm(x.first[1], x.first[4]), x.first[2]
            q, k, *v = (torch.cat(both, 1) for both in zip(first, (q, k, x.v)))
        return (*rope(q, k, x.cos, x.sin, interleaved=kind.interleaved), *v)

    return chain


def bytes_moved(kind: Kind) -> int:
    """Of q and k, read and written once; of v too where two streams become one."""
    b, s, hq, hk, d = kind.shape
    return 2 * 2 * b * s * (hq + (2 if kind.text else 1) * hk) * d


def case(kind: Kind, with_peers: bool = True, training: bool = False) -> Case:
    """Cold: all inputs, tables and outputs rotate past L2. Of the backward COPY is of x and dy, which are read, and dx.

    Ours must agree with the chain of plain torch within bf16's rounding; the chain rounds once more than "none" does.
    """
    calls: dict[str, Call] = {"jitrope": ours(kind)}
    if not (training or kind.text):
        calls["jitrope in place"] = ours(kind, inplace=True)
    calls |= {f"jitrope, rounded {rounding}": ours(kind, rounding=rounding) for rounding in ("once", "twice")}
    if not training:
        calls["jitrope, batch invariant"] = invariant(calls["jitrope"])
    plain = dict.fromkeys(calls, separate(kind))
    inplace = not training  # the norm's result is nobody else's and may be overwritten
    calls["F.rms_norm + apply_rope" + inplace * " in place"] = separate(kind, partial(apply_rope, inplace=inplace))
    peers = others.with_compiled(separate(kind)) if with_peers else {}
    if with_peers and not (kind.interleaved or kind.across_heads or kind.text):
        peers |= others.normed_pairs(lambda x: (x.q_weight, x.k_weight), EPS)
    moved = {COPY: bytes_moved(kind) * (3 if training else 2) // 2}
    if kind.per_head:  # here the tables are as large as q and k, and they are fp32
        moved["COPY, tables too"] = moved[COPY] + 2 * 4 * prod(kind.shape[:3]) * kind.shape[-1] // 2
    return Case(partial(inputs, kind), calls, moved, peers, {}, kind.hot, plain, (), (2**-6, 2**-5))


def rows(name: str, with_peers: bool, training: bool = False, smoke: bool = False) -> Rows:
    """A row an implementation, of one pass."""
    kind = tiny(CASES[name]) if smoke else CASES[name]
    made = case(kind, with_peers, training)
    trained = ("q", "k", "q_weight", "k_weight") if training else ()
    us = {by: each.backward if training else each.forward for by, each in measure(made, trained).items()}
    return rows_of(us, made.moved[COPY], case=name, **{"pass": "backward" if training else "forward"})


@app.command("qk-norm")
def command(only: ONLY = "", peers: PEERS = True, smoke: SMOKE = False, as_json: AS_JSON = False) -> None:
    """GPU time of RMSNorm + rope of q and k, forward and backward, beside a copy of the same bytes and others."""
    steps = {}
    for name in chosen(only, CASES):
        steps[name] = partial(rows, name, peers, False, smoke)
        if name in TRAINED:
            steps[f"{name} backward"] = partial(rows, name, peers, True, smoke)
    show(steps, smoke, as_json)


# ---- in examples/results/README.md -----------------------------------------------------------------------


def line(row: Row) -> str:
    """The case with its shape, streams, norm and tables."""
    kind = CASES[row["case"]]
    streams = f"{kind.text} + {kind.shape[1] - kind.text} tokens"
    tables = {"across heads": kind.across_heads, "a table for each head": kind.per_head}
    notes = {streams: kind.text > 0, "interleaved": kind.interleaved, **tables, "hot": kind.hot}
    return line_of(row, kind.shape, **notes)


FORWARD, BACKWARD = {"pass": "forward"}, {"pass": "backward"}
CHAIN = "F.rms_norm + apply_rope"


def plot(rows: Rows) -> Plot:
    """Cold forward cases of the models."""
    cases = ("flux", "flux-joint", "wan", "ltx", "prefill", "qwen3")
    shown = [row for row in rows if row["case"] in cases and row["pass"] == "forward"]
    series = {"jitrope": "jitrope", f"{CHAIN} in place": CHAIN, "torch.compile": "torch.compile", "Liger": "Liger"}
    groups = grouped(shown, name_of, series)
    best = [min(value for name, value in group.items() if name != "jitrope") for group in groups.values()]
    faster = span((other / group["jitrope"] for other, group in zip(best, groups.values())), 1)
    message = f"RMSNorm and rope in one launch: {faster} times as fast as the next best"
    return Plot(message, "time over COPY", groups, "COPY")


def gain(rows: Rows) -> Plot:
    """The picture of the first page: both passes of one shape. Eager torch's bars are cut."""
    series = {COPY: "COPY of the same bytes", "jitrope": "jitrope", "torch.compile": "torch.compile", "Liger": "Liger"}
    series["torch eager"] = "torch, eager"
    shown = [row for row in rows if row["case"] == "prefill"]
    groups = grouped(shown, lambda row: row["pass"], series, value="us")
    faster = span((group["torch.compile"] / group["jitrope"] for group in groups.values()), 1)
    shape = "{1} tokens, {2} heads of q and {3} of k, {4} wide, bf16".format(*CASES["prefill"].shape)
    message = f"QK-norm and rope: {faster} times as fast as torch.compile"
    return Plot(message, "microseconds", groups, by=shape, most=420)


SECTION = Section(
    "QK-norm and rope",
    """
    GPU time of RMSNorm of q and k and rope in one launch, over COPY of the bytes of q and k (of two streams: of v
    too; backward: of x and dy, which are read, and of dx). Tables are half width and in fp32. LTX has a table for
    each head: they are as large as q, and "COPY, with tables" is a copy of their bytes too. The hot decode step is
    slower with fresh tensors, because those of 200 calls in a graph do not stay in L2. A backward is one launch, the
    weights' gradients included.
    """,
    "jitrope bench qk-norm",
    (
        Table(
            "forward, q + k (B, S, Hq, Hk, D)",
            line,
            {
                "COPY, us": of("us", by=COPY, **FORWARD),
                "COPY, with tables": of("x COPY", by="COPY, tables too", **FORWARD),
                "`norm=`": of("x COPY", by="jitrope", **FORWARD),
                "in place": of("x COPY", by="jitrope in place", **FORWARD),
                "rounded once": of("x COPY", by="jitrope, rounded once", **FORWARD),
                "rounded twice": of("x COPY", by="jitrope, rounded twice", **FORWARD),
                "batch invariant": of("x COPY", by="jitrope, batch invariant", **FORWARD),
                "`F.rms_norm` + `apply_rope` in place": of("x COPY", by=f"{CHAIN} in place", **FORWARD),
                "Liger": of("x COPY", by="Liger", **FORWARD),
                **{head: of("x COPY", by=by, **FORWARD) for by, head in PLAIN.items()},
            },
        ),
        Table(
            "backward, q + k (B, S, Hq, Hk, D)",
            line,
            {
                "COPY, us": of("us", by=COPY, **BACKWARD),
                "`norm=`": of("x COPY", by="jitrope", **BACKWARD),
                "`F.rms_norm` + `apply_rope`": of("x COPY", by=CHAIN, **BACKWARD),
                "Liger": of("x COPY", by="Liger", **BACKWARD),
                **{head: of("x COPY", by=by, **BACKWARD) for by, head in PLAIN.items()},
            },
        ),
    ),
    plot,
)
