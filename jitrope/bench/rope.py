"""`jitrope bench rope` and `train`: GPU time of q + k, beside a copy of the same bytes and peers."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import apply_rope, apply_rope_, reference, runtime
from . import peers as others
from .timing import cold_copies, gpu_time, stream_time

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
    dtype = next(dtype for dtype, name in runtime.DTYPE_NAMES.items() if name == table_dtype)
    return q, k, angles.cos().to(dtype), angles.sin().to(dtype)


def copy_calls(bytes_moved: int, copies: int) -> list[Callable[[], Any]]:
    """torch's `y.copy_(x)` that reads and writes so many bytes in all, over as many buffers."""
    count = bytes_moved // 4
    x, y = torch.randn(copies, 2, count, device="cuda", dtype=torch.bfloat16).unbind(1)
    return [lambda i=i: y[i].copy_(x[i]) for i in range(copies)]  # type: ignore[misc]


def copy_time(calls: list[Callable[[], Any]], calls_per_graph: int) -> float:
    """Microseconds of a copy: the faster of a graph's replay and plain launches.

    In a graph a copy of 512 MiB is a memcpy node, which takes 1.2 x what the same copy takes on a
    stream.
    """
    return min(gpu_time(calls, calls_per_graph=calls_per_graph), stream_time(calls))


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
    want = reference.rope(q, k, cos, sin, None, "bshd", interleaved, q.shape[-1], False)
    for a, b in zip(got, want):
        assert torch.equal(a, b), "jitrope differs from its reference"  # type: ignore[arg-type]


def train() -> list[dict[str, Any]]:
    """Forward + backward of one packed tensor, as `figures` of TransformerEngine's PR 3057 have it."""
    q = torch.randn(65536, 32, 128, device="cuda", dtype=torch.bfloat16)
    _, _, cos, sin = inputs((1, 65536, 1, 1, 128))
    moved = 2 * q.numel() * q.element_size()
    copy = copy_time(copy_calls(moved, 2), 4)
    leaf = q.detach().requires_grad_()
    grad = torch.randn_like(q)

    def step() -> Any:
        out, _ = apply_rope(leaf, None, cos, sin, layout="thd")
        return torch.autograd.grad(out, leaf, grad)

    forward = gpu_time([lambda: apply_rope(q, None, cos, sin, layout="thd")], calls_per_graph=2)
    both = gpu_time([step], calls_per_graph=2)
    return [
        {"by": "COPY", "us": copy, "x COPY": 1.0, "TB/s": moved / copy / 1e6},
        {"by": "jitrope forward", "us": forward, "x COPY": forward / copy, "TB/s": moved / forward / 1e6},
        {"by": "jitrope fwd+bwd / 2", "us": both / 2, "x COPY": both / 2 / copy, "TB/s": 2 * moved / both / 1e6},
    ]
