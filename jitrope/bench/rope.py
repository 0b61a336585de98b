"""`jitrope bench rope`: GPU time of q + k, beside a copy of the same bytes and peers."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import apply_rope, apply_rope_, reference
from ..problem import DTYPE_NAMES
from ..spec import Options
from . import peers as others
from .timing import cold_copies, copy_calls, copy_time, gpu_time

# name: (B, S, Hq, Hk, D), interleaved, hot
CASES = {
    "qwen-image": ((1, 4352, 24, 24, 128), True, False),
    "flux": ((1, 4608, 24, 24, 128), False, False),
    "wan": ((1, 32760, 12, 12, 128), True, False),
    "prefill": ((1, 8192, 32, 8, 128), False, False),
    "train": ((1, 4096, 32, 32, 128), False, False),
    "head80": ((32, 512, 8, 8, 80), False, False),
    "head256": ((1, 2048, 64, 8, 256), False, False),
    "decode1": ((1, 1, 32, 8, 128), False, True),
    "decode64": ((64, 1, 32, 8, 128), False, True),
    "few4": ((4, 1, 64, 8, 128), False, True),
}

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def inputs(shape: tuple[int, int, int, int, int], table_dtype: str = "fp32") -> Inputs:
    """bf16 q and k, half-width tables."""
    b, s, hq, hk, d = shape
    q, k = (torch.randn(b, s, h, d, device="cuda", dtype=torch.bfloat16) for h in (hq, hk))
    angles = torch.outer(torch.arange(s, device="cuda"), 10000 ** (-torch.arange(d // 2, device="cuda") / (d // 2)))
    dtype = next(dtype for dtype, name in DTYPE_NAMES.items() if name == table_dtype)
    return q, k, angles.cos().to(dtype), angles.sin().to(dtype)


def run(only: list[str] | None, peers: bool, table_dtype: str) -> list[dict[str, Any]]:
    """A row for each case and implementation. Cold: q, k, cos, sin and outputs rotate past L2."""
    return [row for name in CASES if not only or name in only for row in _case(name, peers, table_dtype)]


def _case(name: str, with_peers: bool, table_dtype: str) -> list[dict[str, Any]]:
    shape, interleaved, hot = CASES[name]
    b, s, hq, hk, d = shape
    moved = 2 * 2 * b * s * (hq + hk) * d
    copies, calls = (1, 200) if hot else (cold_copies(moved, at_least=3), 12)
    sets = [inputs(shape, table_dtype) for _ in range(copies)]
    one_table = [(q, k, *sets[0][2:]) for q, k, _, _ in sets]  # for all calls, as a model's layers have it
    check(sets[0], interleaved)

    measured: dict[str, Callable[[], float]] = {}
    copy = copy_calls(moved, copies)
    measured["COPY"] = lambda: copy_time(copy, calls)

    def add(label: str, call: Callable[..., Any], sets: list[Inputs]) -> None:
        bound = [lambda s=s: call(*s) for s in sets]  # type: ignore[misc]
        bound[0]()  # compiled now, not between the timings
        measured[label] = lambda: gpu_time(bound, calls_per_graph=calls)

    for label, function in (("jitrope", apply_rope), ("jitrope in place", apply_rope_)):
        call = partial(function, interleaved=interleaved)
        add(label, call, sets)
        if not hot:
            add(f"{label}, one table", call, one_table)
    for label, peer in others.available(interleaved, sets) if with_peers else ():
        add(label, peer, sets)

    # In rounds, so that what the clocks do meets everyone; the median of the rounds.
    rounds = [{label: measure() for label, measure in measured.items()} for _ in range(3)]
    times = {label: statistics.median(r[label] for r in rounds) for label in measured}
    base = times["COPY"]
    return [
        {"case": name, "by": label, "us": us, "x COPY": us / base, "TB/s": moved / us / 1e6}
        for label, us in times.items()
    ]


def check(inputs: Inputs, interleaved: bool) -> None:
    """The bits that are timed are the reference's."""
    q, k, cos, sin = inputs
    got = apply_rope(q, k, cos, sin, interleaved=interleaved)
    options = Options(interleaved=interleaved, interleaved_out=interleaved, rotary_dim=q.shape[-1])
    want = reference.rope(q, k, cos, sin, None, None, options)
    for a, b in zip(got, want):
        assert torch.equal(a, b), "jitrope differs from its reference"  # type: ignore[arg-type]
