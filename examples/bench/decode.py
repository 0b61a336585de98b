"""`bench decode`: the few tokens of a serving step, hot, and a prefill, cold; GPU and host time."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor

from jitrope import KVCache, Norm, apply_rope, prepare_qkv, tables

from . import peers as others
from .harness import COPY, DEVICE, Call, Case, bf16, host_times, measure
from .plots import Plot
from .report import AS_JSON, PEERS, SMOKE, Rows, app, numbers, pairs, show
from .sections import Row, Section, Table, grouped, of, span

PAGE, POSITIONS = 16, 8192
COPY_KV, COPY_FP8 = "COPY, KV cache", "COPY, fp8 KV cache"


class Inputs(NamedTuple):
    """The inputs of a layer of a serving step: T tokens, each at a position and with a slot of its own."""

    q: Tensor  # (1, T, Hq, D) bf16; k and v are (1, T, Hk, D)
    k: Tensor
    v: Tensor
    cos: Tensor  # (T, D / 2) fp32: the tokens' rows of the table, gathered beforehand
    sin: Tensor
    table: Tensor  # (POSITIONS, D) fp32: cosines, then sines
    positions: Tensor  # (T,) int64
    norm: Norm  # of q and k, with bf16 weights (D,), rounded as in Qwen3
    kv: KVCache  # slots and caches (pages, PAGE, Hk, D) in bf16
    kv_fp8: KVCache  # the same with caches in e4m3, and their scales
    caches: tuple[Tensor, ...]  # the tensors of both
    rows: tuple[Tensor, ...]  # the same memory as (slots, Hk, D), fp8 as bytes: torch.compile copies what it must view


def inputs(
    tokens: int, heads: int, kv_heads: int, head_dim: int, prefill: bool = False, pool: int = POSITIONS
) -> Inputs:
    """Tokens of as many sequences, anywhere in them; or, of a prefill, one sequence, page after page."""
    q, k, v = (bf16(1, tokens, n, head_dim) for n in (heads, kv_heads, kv_heads))
    inv_freq, _ = tables.inv_freq(rotary_dim=head_dim, theta=500000.0, device=DEVICE)
    pool = max(pool, -(-tokens // PAGE) * PAGE)
    table = tables.cos_sin_cache(pool, inv_freq)
    index, order = torch.arange(tokens, device=DEVICE), partial(torch.randperm, device=DEVICE)
    if prefill:
        positions, slots = index, order(pool // PAGE)[index // PAGE] * PAGE + index % PAGE
    else:
        positions, slots = torch.randint(pool, (tokens,), device=DEVICE), order(pool)[:tokens]
    cos, sin = (part.contiguous() for part in table[positions].chunk(2, -1))
    empty = torch.zeros(pool // PAGE, PAGE, kv_heads, head_dim, device=DEVICE)
    k_cache, v_cache = empty.bfloat16(), empty.bfloat16()
    k_fp8, v_fp8 = empty.to(torch.float8_e4m3fn), empty.to(torch.float8_e4m3fn)
    k_scale, v_scale = (torch.full((1,), scale, device=DEVICE) for scale in (0.02, 0.03))
    kv = KVCache(k_cache, v_cache, slots)
    kv_fp8 = KVCache(k_fp8, v_fp8, slots, k_scale=k_scale, v_scale=v_scale)
    caches = (k_cache, v_cache, k_fp8, v_fp8)
    rows = tuple(x.flatten(0, 1) if x.dtype == torch.bfloat16 else x.flatten(0, 1).view(torch.uint8) for x in caches)
    norm = Norm(*(1 + bf16(head_dim) / 8 for _ in range(2)), rounding="twice")
    return Inputs(q, k, v, cos, sin, table, positions, norm, kv, kv_fp8, caches, rows)


def by_rows(x: Inputs, inplace: bool = True) -> Any:
    """By the rows gathered beforehand."""
    return apply_rope(x.q, x.k, x.cos, x.sin, inplace=inplace)


def by_ids(x: Inputs, inplace: bool = True) -> Any:
    """By the table of all positions."""
    return apply_rope(x.q, x.k, cos_sin_cache=x.table, positions=x.positions, inplace=inplace)


def to_cache(x: Inputs, inplace: bool = True) -> Any:
    """q rotated, k and v into the paged cache."""
    return prepare_qkv(x.q, x.k, x.v, cos_sin_cache=x.table, positions=x.positions, cache=x.kv, inplace=inplace)[0]


def to_fp8_cache(x: Inputs) -> Any:
    """The same in place, with a cache of e4m3."""
    return prepare_qkv(x.q, x.k, x.v, cos_sin_cache=x.table, positions=x.positions, cache=x.kv_fp8, inplace=True)[0]


def norm_to_cache(x: Inputs) -> Any:
    """q and k normalised first, in the same launch."""
    made = prepare_qkv(
        x.q, x.k, x.v, cos_sin_cache=x.table, positions=x.positions, norm=x.norm, cache=x.kv, inplace=True
    )
    return made[0]


def norm_then_cache(x: Inputs) -> Any:
    """The same in two launches."""
    prepare_qkv(x.q, x.k, None, norm=x.norm, inplace=True)
    return to_cache(x)


OURS: dict[str, tuple[str, Call, Call]] = {
    "jitrope, cos and sin rows": (COPY, by_rows, others.plain_pair(False)),
    "jitrope, cos_sin_cache and ids": (COPY, by_ids, others.plain_pair(False)),
    "jitrope, KV cache": (COPY_KV, to_cache, others.plain_kv_cache(False)),
    "jitrope, fp8 KV cache": (COPY_FP8, to_fp8_cache, others.plain_kv_cache(True)),
    "jitrope, norm and KV cache": (COPY_KV, norm_to_cache, others.plain_kv_cache(False, True)),
    "jitrope, norm, then KV cache": (COPY_KV, norm_then_cache, others.plain_kv_cache(False, True)),
}
"""label: (the copy that moves the same bytes, the call, the same in plain torch)"""
COMPILED_KV = {
    f"torch.compile, {what}": f"jitrope, {what}" for what in ("KV cache", "fp8 KV cache", "norm and KV cache")
}
"""label: the row of `OURS` whose plain torch is compiled"""


def bytes_moved(tokens: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, int]:
    """The bytes of q, k, v and caches that a call reads and writes; tables and indices are left out."""
    return {
        COPY: tokens * head_dim * 4 * (heads + kv_heads),
        COPY_KV: tokens * head_dim * 4 * (heads + 2 * kv_heads),
        COPY_FP8: tokens * head_dim * (4 * heads + (2 + 1) * 2 * kv_heads),
    }


def case(tokens: int, heads: tuple[int, int], head_dim: int, prefill: bool, with_peers: bool, pool: int) -> Case:
    """Hot, with the same inputs in every call; the KV writes of a prefill are cold, caches included.

    Cosine and sine rows are gathered beforehand for all that take no positions.
    """
    moved = bytes_moved(tokens, *heads, head_dim)
    peers = {**others.pairs(False), **{label: others.compiled(OURS[by][2]) for label, by in COMPILED_KV.items()}}
    beside = {by: copy for by, (copy, *_) in OURS.items()}
    beside |= {label: beside[by] for label, by in COMPILED_KV.items()}
    ours = {by: call for by, (_, call, _) in OURS.items()}
    if prefill:
        moved = {copy: moved[copy] for copy in (COPY_KV, COPY_FP8)}
        ours, peers = ({by: calls[by] for by in calls if beside.get(by) in moved} for calls in (ours, peers))
    make = partial(inputs, tokens, *heads, head_dim, prefill, pool)
    plain = {by: OURS[by][2] for by in ours}
    return Case(make, ours, moved, peers if with_peers else {}, beside, not prefill, plain, ("caches",))


def rows(tokens: int, heads: tuple[int, int], head_dim: int, prefill: bool, with_peers: bool, pool: int) -> Rows:
    """A row an implementation; "x COPY" is over a copy of the bytes that the row moves."""
    made = case(tokens, heads, head_dim, prefill, with_peers, pool)
    us = {by: times.forward for by, times in measure(made).items()}
    x_copy = {by: us[by] / us[by if by in made.moved else made.beside.get(by, COPY)] for by in us}
    hosts: dict[str, float] = {}
    if not prefill:
        x, one = made.inputs(), torch.ones(64, device=DEVICE)
        hosts = host_times({"x.add_(1)": lambda: one.add_(1), **{by: partial(f, x) for by, f in made.ours.items()}})
    head = {"heads": "{}/{}".format(*heads), "tokens": tokens, "L2": "cold" if prefill else "hot"}
    return [
        {**head, "by": by, "us": us.get(by), "x COPY": x_copy.get(by), "host us": hosts.get(by)}
        for by in {**us, **hosts}
    ]


@app.command("decode")
def command(
    tokens: Annotated[str, typer.Option(help="Tokens of a step.")] = "1,4,16,64,256",
    heads: Annotated[str, typer.Option(help="Heads of q and of k and v.")] = "32/8,64/8",
    prefill: Annotated[int, typer.Option(help="Tokens of the prefill, of the first heads; 0: none.")] = 4096,
    peers: PEERS = True,
    smoke: SMOKE = False,
    as_json: AS_JSON = False,
) -> None:
    """A serving step, hot: GPU and host time of q + k and of their KV-cache write, beside copies of their bytes."""
    counts, kinds, head_dim, pool = numbers("--tokens", tokens), pairs("--heads", heads, "/"), 128, POSITIONS
    if smoke:
        counts, kinds, head_dim, prefill, pool = [1, 5], [(4, 2)], 16, prefill and 20, 64
    steps = {
        f"{n} tokens, {pair} heads": partial(rows, n, pair, head_dim, False, peers, pool)
        for pair in kinds
        for n in counts
    }
    if prefill:
        steps[f"{prefill} tokens, cold"] = partial(rows, prefill, kinds[0], head_dim, True, peers, pool)
    show(steps, smoke, as_json)


# ---- in examples/results/README.md -----------------------------------------------------------------------

HOT, COLD = {"L2": "hot"}, {"L2": "cold"}
SHOWN = {
    "rows of cos and sin": "jitrope, cos and sin rows",
    "`cos_sin_cache` and ids": "jitrope, cos_sin_cache and ids",
    "`KVCache`": "jitrope, KV cache",
    "fp8 `KVCache`": "jitrope, fp8 KV cache",
    "norm and `KVCache`": "jitrope, norm and KV cache",
    "norm, then `KVCache`": "jitrope, norm, then KV cache",
}


def step_of(row: Row) -> str:
    """Heads and tokens."""
    return f"{row['heads']}, {row['tokens']}"


def plot(rows: Rows) -> Plot:
    """The steps of the first heads."""
    heads = rows[0]["heads"]
    shown = [row for row in rows if row["L2"] == "hot" and row["heads"] == heads]
    series = {
        COPY: "COPY of q and k",
        "jitrope, cos_sin_cache and ids": "jitrope",
        "jitrope, KV cache": "jitrope, KV cache",
        "Liger (in place)": "Liger (no ids)",
        "torch.compile, KV cache": "torch.compile, KV cache",
    }
    groups = grouped(shown, lambda row: str(row["tokens"]), series, value="us")
    ours = span((group["jitrope, KV cache"] for group in groups.values()), 1)
    by = "tokens of the step, {} heads of q and {} of k".format(*heads.split("/"))
    return Plot(f"Rope and the KV-cache write of a decode step take {ours} us", "us", groups, by=by)


SECTION = Section(
    "Serving",
    """
    GPU time of a decode step's q and k, in place, hot, as a CUDA graph replays it, beside COPY of the bytes of q and
    k. With a `KVCache` the same launch writes k and v to a paged cache. "Norm and `KVCache`" is RMSNorm of q and k in
    that launch too, "norm, then `KVCache`" two launches. "Rows of cos and sin", Liger and torch.compile without a cache
    take no positions: their rows of the table are gathered beforehand. A prefill is cold, its caches too, with shuffled
    pages, and is shown over COPY of the bytes of q, k, v and the caches. Host time is the time to
    enqueue a call; a CUDA graph has none of it.
    """,
    "jitrope bench decode",
    (
        Table(
            "us, heads of q / of k, tokens",
            step_of,
            {
                "COPY": of("us", by=COPY, **HOT),
                **{head: of("us", by=by, **HOT) for head, by in SHOWN.items()},
                "Liger": of("us", by="Liger (in place)", **HOT),
                "torch.compile": of("us", by="torch.compile", **HOT),
                "torch.compile, KV cache": of("us", by="torch.compile, KV cache", **HOT),
                "torch.compile, norm and KV cache": of("us", by="torch.compile, norm and KV cache", **HOT),
                "eager torch": of("us", by="torch eager", **HOT),
            },
        ),
        Table(
            "prefill over COPY, heads, tokens",
            step_of,
            {
                **{head: of("x COPY", by=by, **COLD) for head, by in SHOWN.items()},
                **{label: of("x COPY", by=label, **COLD) for label in COMPILED_KV},
            },
        ),
        Table(
            "host us, heads, tokens",
            step_of,
            {
                "`x.add_(1)`": of("host us", by="x.add_(1)"),
                **{head: of("host us", by=by) for head, by in SHOWN.items()},
            },
        ),
    ),
    plot,
)
