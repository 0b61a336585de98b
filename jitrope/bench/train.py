"""`jitrope bench train`: forward and backward of training's other shapes, beside a copy and what they replace."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from .. import apply_rope
from ..integrations.deepspeed import apply_rotary_pos_emb
from . import peers as others
from .thd import angles, offsets
from .timing import Step, cold_copies, copy_calls, copy_time, gpu_time, train_step

SBHD = ((4096, 1, 128, 128), (512, 32, 24, 128))


def run(with_peers: bool) -> list[dict[str, Any]]:
    """Rows of (case, implementation): padded SBHD with TransformerEngine's angles, a million packed tokens,
    DeepSpeed's [S, B, H, D] entry with its full-width tables."""
    rows = []
    for shape in SBHD:
        half = angles(shape[0], shape[-1])
        freqs = torch.cat((half, half), -1)[:, None, None]
        calls: dict[str, Step] = {
            "jitrope": lambda x, freqs=freqs: apply_rope(x, None, freqs=freqs, layout="sbhd")[0]  # type: ignore[misc]
        }
        if with_peers:
            calls |= others.sbhd(freqs)
        rows += _measure(f"sbhd {list(shape)}", shape, calls)

    tokens, count = 1_000_000, 100_000
    cu_seqlens = offsets(tokens, count, True)
    freqs = torch.cat((angles(tokens, 128),) * 2, -1)
    for heads in (8, 32):
        calls = {"jitrope": lambda x: apply_rope(x, None, freqs=freqs, layout="thd", cu_seqlens=cu_seqlens)[0]}
        rows += _measure(f"{count} sequences in {tokens} tokens, {heads} heads", (tokens, heads, 128), calls)

    shape = (4096, 1, 32, 128)
    half = angles(shape[0], shape[-1])
    cos, sin = (torch.cat((table, table), -1)[:, None, None].bfloat16() for table in (half.cos(), half.sin()))
    calls = {"jitrope": lambda x: apply_rotary_pos_emb(x, cos, sin)}
    if with_peers:
        calls |= others.deepspeed(cos, sin)
    return rows + _measure(f"DeepSpeed {list(shape)}", shape, calls)


def _measure(case: str, shape: tuple[int, ...], calls: dict[str, Step]) -> list[dict[str, Any]]:
    moved = 2 * 2 * torch.Size(shape).numel()
    # A graph keeps what its calls return, so large calls are one to a graph.
    copies, calls_per_graph = cold_copies(2 * moved, at_least=1), max(1, min(8, (4 << 30) // moved))
    sets = [torch.randn(2, *shape, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    copy = copy_calls(moved, copies)
    measured: dict[str, Callable[[], tuple[float, float]]] = {}
    measured["COPY"] = lambda: (copy_time(copy, 4), 0.0)
    for label, call in calls.items():
        pairs = [train_step(call, x, grad) for x, grad in sets]
        forward, both = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        measured[label] = lambda forward=forward, both=both: (  # type: ignore[misc]
            gpu_time(forward, 15, calls_per_graph), gpu_time(both, 15, calls_per_graph)
        )  # fmt: skip
    rounds = [{label: measure() for label, measure in measured.items()} for _ in range(3)]
    times = {label: [statistics.median(r[label][i] for r in rounds) for i in (0, 1)] for label in measured}
    base = times["COPY"][0]
    rows = []
    for label, (one, total) in times.items():
        backward = base if label == "COPY" else total - one
        rows.append({
            "case": case, "by": label, "fwd us": one, "bwd us": backward, "fwd x COPY": one / base,
            "bwd x COPY": backward / base,
        })  # fmt: skip
    return rows
