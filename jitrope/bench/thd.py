"""`jitrope bench thd`: packed batches of the same tokens in ever more sequences, forward and backward."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import apply_rope
from . import peers as others
from .timing import Step, copy_calls, copy_time, gpu_time, train_step

TABLES = ("freqs", "freqs-half", "cos-sin")
Progress = Callable[[str], Any]


def offsets(tokens: int, sequences: int, uneven: bool) -> Tensor:
    """int32 cu_seqlens; lengths differ by one at most, or are drawn at random."""
    if uneven:
        cuts = torch.randint(0, tokens + 1, (sequences - 1,), generator=torch.Generator().manual_seed(0)).sort().values
        cuts = torch.cat((torch.tensor([0]), cuts, torch.tensor([tokens])))
    else:
        cuts = torch.arange(sequences + 1) * tokens // sequences
    return cuts.int().cuda()


def angles(rows: int, head_dim: int) -> Tensor:
    """Half-width angles (rows, head_dim / 2) of base 10000."""
    theta = 10000 ** (-torch.arange(head_dim // 2, device="cuda") / (head_dim // 2))
    return torch.outer(torch.arange(rows, device="cuda"), theta)


def tables(kind: str, rows: int, head_dim: int) -> dict[str, Any]:
    """The keywords of `apply_rope`: TransformerEngine's angles, each twice, or half of that, or cos and sin."""
    half = angles(rows, head_dim)
    if kind == "cos-sin":
        return {"cos": half.cos(), "sin": half.sin()}
    return {"freqs": torch.cat((half, half), -1)[:, None, None] if kind == "freqs" else half}


def run(
    tokens: int, heads: int, head_dim: int, sequences: list[int], kind: str, launches: list[str], uneven: bool,
    with_peers: bool, progress: Progress = lambda text: None,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each number of sequences and implementation, of one bf16 tensor (tokens, heads, head_dim)."""
    torch.manual_seed(0)
    x = torch.randn(tokens, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn_like(x)
    copy = copy_calls(2 * x.numel() * x.element_size(), 2)
    table = tables(kind, tokens, head_dim)
    rows = []
    for count in sequences:
        progress(f"{count} sequences")
        cu_seqlens = offsets(tokens, count, uneven)
        calls: dict[str, Step] = {}
        for launch in launches:
            label = "jitrope" if launch == "auto" else f"jitrope {launch}"
            calls[label] = lambda x, launch=launch, cu_seqlens=cu_seqlens: apply_rope(  # type: ignore[misc]
                x, None, **table, layout="thd", cu_seqlens=cu_seqlens, launch=launch
            )[0]
        if with_peers:
            half = angles(tokens, head_dim)
            calls |= others.packed(cu_seqlens, tokens, half)
            for label, pair in others.packed_pairs(cu_seqlens, tokens, half).items():
                if heads % 2 == 0:  # the tensor's heads, half of them as q and half as k
                    calls[label] = lambda x, pair=pair: pair(*x.chunk(2, 1))  # type: ignore[misc]
        calls = others.usable(calls, x)
        steps = {label: train_step(call, x, grad) for label, call in calls.items()}
        rounds: list[dict[str, tuple[float, float]]] = []
        for _ in range(3):
            now = {"COPY": (copy_time(copy, 4),) * 2}
            for label, step in steps.items():
                now[label] = gpu_time([step[0]], 10, 2), gpu_time([step[1]], 10, 2)
            rounds.append(now)
        times = {label: [statistics.median(r[label][i] for r in rounds) for i in (0, 1)] for label in rounds[0]}
        base = times["COPY"][0]
        for label, (one, both) in times.items():
            total = 2 * base if label == "COPY" else both
            rows.append({
                "sequences": count, "by": label, "fwd us": one, "bwd us": total - one, "fwd+bwd us": total,
                "x 2 COPY": total / (2 * base),
            })  # fmt: skip
    return rows


def plot(rows: list[dict[str, Any]], title: str, path: str) -> None:
    """Forward + backward over the number of sequences, a line for each implementation."""
    from .report import figure

    figure(rows, "sequences", "fwd+bwd us", "by", title, "sequences in the pack", "forward + backward, us", path)
