"""`bench projection`: a fused projection with q and k norms and rope, in one kernel and in two steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import jitrope
from jitrope import Norm

from .harness import angles, bf16, turn_by_turn
from .plots import Plot
from .report import AS_JSON, ONLY, SMOKE, app, chosen, show
from .sections import Row, Section, Table, grouped, of, span

SHAPES = {  # tokens, K, heads of q, of k
    "llama3-8b": (8192, 4096, 32, 8), "qwen3-8b": (4096, 4096, 32, 8), "qwen3-32b": (4096, 5120, 64, 8),
    "llama3-70b": (4096, 8192, 64, 8), "flux": (4608, 3072, 24, 24), "decode": (64, 4096, 32, 8),
}  # fmt: skip
SMALL = (6, 64, 4, 2)
DIM = 128
TOLERANCE = 2**-6
ALONE, TWO, ONE = "projection alone", "projection, then prepare_fused_qkv", "project_qkv"


def calls(sizes: tuple[int, int, int, int], trained: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Each way, as a call; forward and backward if trained."""
    tokens, width, *counts = sizes
    heads: Any = tuple(counts)
    x, weight = bf16(1, tokens, width), bf16((counts[0] + 2 * counts[1]) * DIM, width) * width**-0.5
    a = angles(tokens, DIM)
    tables, words = (a.cos(), a.sin()), {"heads": heads, "norm": Norm(*(1 + 0.1 * bf16(2, DIM)).unbind())}
    out, cotangents = x.new_empty(1, tokens, len(weight)), list[Tensor]()

    def two(x: Tensor, weight: Tensor) -> Any:
        return jitrope.prepare_fused_qkv(torch.nn.functional.linear(x, weight), *tables, **words)

    def one(x: Tensor, weight: Tensor) -> Any:
        return jitrope.project_qkv(x, weight, *tables, **words)

    def both(call: Any) -> Any:
        leaves = [y.detach().requires_grad_() for y in (x, weight)]
        found = call(*leaves)
        cotangents.extend([torch.randn_like(y) for y in found] if not cotangents else [])
        return torch.autograd.grad(found, leaves, cotangents)

    with torch.no_grad():
        for got, want in zip(one(x, weight), two(x, weight)):
            assert (got - want).float().norm() <= TOLERANCE * want.float().norm(), "results differ from two steps'"
    if trained:
        yield from ((label, partial(both, call)) for label, call in ((TWO, two), (ONE, one)))
        return
    yield ALONE, torch.no_grad()(lambda: torch.mm(x[0], weight.t(), out=out[0]))
    yield from ((label, torch.no_grad()(partial(call, x, weight))) for label, call in ((TWO, two), (ONE, one)))


def rows(name: str, smoke: bool) -> list[Row]:
    """A row for each way of a shape."""
    found = []
    for trained in (False, True):
        us = turn_by_turn(dict(calls(SMALL if smoke else SHAPES[name], trained)))
        first = next(iter(us.values()))
        part = "forward + backward" if trained else "forward"
        found += [{"shape": name, "pass": part, "by": by, "us": x, "ratio": x / first} for by, x in us.items()]
    return found


@app.command("projection")
def command(only: ONLY = "", smoke: SMOKE = False, as_json: AS_JSON = False) -> None:
    """A fused projection with norms and rope, in one kernel and in two steps, over the first of the shape's rows."""
    show({name: partial(rows, name, smoke) for name in chosen(only, SHAPES)}, smoke, as_json)


# ---- in examples/results/README.md -----------------------------------------------------------------------


def plot(rows: list[Row]) -> Plot:
    """Times of the forward over the projection's alone."""
    shown = [row for row in rows if row["pass"] == "forward"]
    groups = grouped(shown, lambda row: row["shape"], {TWO: "torch, then one launch", ONE: "jitrope"}, value="ratio")
    ours = span(row["ratio"] for row in shown if row["by"] == ONE)
    return Plot(f"A projection with norms and rope takes {ours} times the projection", "times the projection", groups)


SECTION = Section(
    "Projection, norms and rope",
    """
    GPU time of a fused projection of q, k and v (`Linear` without a bias), with norms of q and k and rope, in bf16. A
    forward is over the projection alone, which is cuBLAS's, in microseconds in the first column; a forward and backward
    is over two steps, the projection and `prepare_fused_qkv`. With a norm `project_qkv` is those two steps where a
    gradient is wanted.
    """,
    "jitrope bench projection",
    (
        Table(
            "shape, pass",
            lambda row: f"{row['shape']}, {row['pass']}",
            {"projection, us": of("us", by=ALONE), **{by: of("ratio", by=by) for by in (TWO, ONE)}},
        ),
    ),
    plot,
)
