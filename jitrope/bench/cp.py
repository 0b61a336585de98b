"""`jitrope bench cp`: context parallelism's moves of rows, tables and whole step, of one rank on one GPU.

Bytes are those of the rows that an operation reads and writes, each as often as it does: a key that two chunks of a
rank see is moved twice. Tables of rows, 4 bytes a row, do not count.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import thd
from ..context_parallel.interface import Backend, Case, Result, Varlen
from ..context_parallel.schedule import Schedule
from ..context_parallel.steps import Call, pack_gradients, unpack, unpack_gradients
from ..plan.partition import chunks_of, count, local_rows, number_of_chunks
from ..thd import ops as thd_ops
from ..thd import reference as thd_reference
from .thd import Progress
from .timing import cold_copies, copy_calls, copy_time, gpu_time, host_time, median_of_rounds, stream_time

PARTS = ("rows", "metadata", "step")
COUNTS = (16, 512, 2401)
"""Sequences of which the tables are timed."""


class Batch(NamedTuple):
    """What is timed; bf16."""

    tokens: int = 65536
    sequences: int = 16
    heads: tuple[tuple[int, int], ...] = ((16, 16), (32, 8))  # of q, and of k and v
    head_dim: int = 64
    window: int = 512  # keys before a query's own, where there is a window
    device: str = "cuda"

    def bounds(self, sequences: int | None = None, ragged: bool = False) -> list[int]:
        """Where sequences begin, and the end: even lengths, one more or less, or random ones."""
        n, draw = self.sequences if sequences is None else sequences, random.Random(0)
        if ragged:
            return [0, *sorted(draw.randint(0, self.tokens) for _ in range(n - 1)), self.tokens]
        return [i * self.tokens // n for i in range(n + 1)]

    def schedule(
        self, cp_size: int, mask: str = "causal", sequences: int | None = None, ragged: bool = False, **ranks: Any
    ) -> Schedule:
        """That of one rank of cp_size, which has neighbours on both sides, or of a group's."""
        bounds = self.bounds(sequences, ragged)
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=self.device)
        longest = max(b - a for a, b in pairwise(bounds))
        ranks = ranks or {"cp_size": cp_size, "cp_rank": cp_size // 2}
        return Schedule(cu_seqlens, self.tokens, max_seqlen=longest, window=self.windows()[mask], **ranks)

    def windows(self) -> dict[str, tuple[int, int]]:
        """The masks of the step, all causal."""
        return {"causal": (-1, 0), f"window {self.window}": (self.window, 0)}

    def case(self, schedule: Schedule, heads: tuple[int, int], head_groups: int = 1) -> Case:
        """One of the head groups of a training step."""
        q, kv = (n // head_groups for n in heads)
        return Case(
            torch.device(self.device), torch.bfloat16, q, kv, self.head_dim, self.head_dim, schedule.mask,
            schedule.most_segments,
        )  # fmt: skip

    def randn(self, rows: int, *shape: int) -> Tensor:
        """bf16 (rows, ...)."""
        return torch.randn(rows, *shape, device=self.device, dtype=torch.bfloat16)


class Shapes:
    """A backend that makes what an attention returns, and computes nothing."""

    name = "shapes"

    def refuses(self, case: Case) -> str | None:
        """Nothing."""
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, case: Case) -> Result:
        """See `Backend`."""
        lse = q.new_empty(q.shape[1], len(q), dtype=torch.float32)
        return Result(q.new_empty(*q.shape[:2], v.shape[2]), None, None, (lse,))

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, saved: tuple[Tensor, ...], varlen: Varlen
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Backend`."""
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


SHAPES: Backend = Shapes()


def run(
    parts: Sequence[str], cp_sizes: Sequence[int], batch: Batch, progress: Progress = lambda text: None
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each thing measured, of one rank's work on one GPU."""
    from .cp_step import memory_rows, step_rows

    torch.manual_seed(0)
    rows = []
    for part, cp_size, case in steps(parts, cp_sizes, batch):
        progress(" ".join((part, f"cp {cp_size}" if cp_size else "", case)))
        if part == "rows":
            rows += _moved(cp_size, case, batch)
        elif part == "metadata":
            rows += _metadata(cp_sizes, int(case), batch)
        else:
            mask, heads = case.rsplit(" ", 1)
            rows += step_rows(cp_size, mask, heads, batch) + memory_rows(cp_size, mask, heads, batch)
    return rows


def steps(parts: Sequence[str], cp_sizes: Sequence[int], batch: Batch) -> list[tuple[str, int, str]]:
    """(part, cp_size, case) of all that `run` goes through."""
    cases = {
        "rows": [(cp_size, case) for cp_size in cp_sizes for case in ("even", "ragged")],
        "metadata": [(0, str(count)) for count in COUNTS],
        "step": [
            (cp_size, f"{mask} {q}/{kv}") for cp_size in cp_sizes for q, kv in batch.heads for mask in batch.windows()
        ],
    }
    return [(part, *case) for part in PARTS if part in parts for case in cases[part]]


def row(part: str, cp_size: int, case: str, what: str, us: float | None = None, **more: Any) -> dict[str, Any]:
    """One of the table. x: of what stands in `of`."""
    empty = dict.fromkeys(("x", "of", "host us", "TB/s", "MiB"))
    return {"part": part, "cp": cp_size, "case": case, "what": what, "us": us, **empty, **more}


# ---- rows --------------------------------------------------------------------------------------------


class Work(NamedTuple):
    """An operation on rows: bytes that it reads and writes, and a maker of calls with inputs of their own."""

    name: str
    bytes_moved: int
    make: Callable[[], Callable[[], Any]]


def works(cp_size: int, batch: Batch, ragged: bool) -> Iterator[Work]:
    """Each on heads of k and v of the batch's first kind; pairs are moved by one launch."""
    schedule = batch.schedule(cp_size, ragged=ragged)
    cu_seqlens, tokens = schedule.cu_seqlens, batch.tokens
    heads = batch.heads[0]
    call = Call(schedule, SHAPES, batch.case(schedule, heads), 1.0)
    shape, width = schedule.shape, heads[1] * batch.head_dim
    size, padded = 2 * width, cp_size * shape.capacity  # bytes of a row; rows of all ranks

    def make(function: Callable[..., Any], *inputs: tuple[int, int]) -> Callable[[], Any]:
        return partial(function, *(batch.randn(rows, n) for rows, n in inputs))

    to_ranks = partial(thd.sequence_order_to_cp_rank_order, cu_seqlens=cu_seqlens, cp_size=cp_size)
    to_sequences = partial(
        thd.cp_rank_order_to_sequence_order, cu_seqlens=cu_seqlens, cp_size=cp_size, total_tokens=tokens
    )
    for name, function, rows in (
        ("sequence to rank order", to_ranks, tokens),
        ("rank to sequence order", to_sequences, padded),
    ):
        moved = (tokens + (padded if function is to_ranks else tokens)) * size
        yield Work(name, moved, partial(make, function, (rows, width)))
        both = lambda k, v, function=function: function((k, v))  # type: ignore[misc]  # noqa: E731
        yield Work(f"{name}, k and v", 2 * moved, partial(make, both, (rows, width), (rows, width)))

    starts, lengths, valid = first_halves(cu_seqlens, shape)
    copy = partial(
        thd.copy_valid_tokens_from_per_split_to_rank_local, cu_seqlens_padded=starts, cu_seqlens=lengths
    )  # fmt: skip
    yield Work("copy valid", 2 * valid * size, partial(make, copy, (shape.rows, width), (shape.rows, width)))

    keys, there = len(schedule.segments.key_rows), int(schedule.segments.cu_seqlens_k[-1])
    gather = lambda gathered: unpack(gathered, call)  # noqa: E731
    yield Work("gather of visible keys, k and v", 2 * (there + keys) * size, partial(make, gather, (padded, 2 * width)))
    give = lambda dk, dv: pack_gradients(dk, dv, call)  # noqa: E731
    yield Work(
        "sum of chunks, dK and dV", 2 * (there + padded) * size, partial(make, give, (keys, width), (keys, width))
    )
    add = lambda received, dk, dv: unpack_gradients(received, dk, dv, call)  # noqa: E731
    added = partial(make, add, (padded, 2 * width), (shape.rows, width), (shape.rows, width))
    yield Work("sum over ranks, dK and dV", 2 * (cp_size + 1) * shape.rows * size, added)


def first_halves(cu_seqlens: Tensor, shape: thd_reference.Shape) -> tuple[Tensor, Tensor, int]:
    """Of a rank's first chunks: (where each begins among its rows, lengths added up, tokens in all)."""
    offsets = cu_seqlens.long()
    starts = local_rows(offsets, shape.cp_rank, shape.cp_size, shape.rule)
    chunk = chunks_of(shape.cp_rank, shape.cp_size, shape.rule)[0]
    lengths = count(offsets, chunk, number_of_chunks(shape.cp_size, shape.rule))
    return starts.int(), lengths.int(), int(lengths[-1])


def _moved(cp_size: int, case: str, batch: Batch) -> list[dict[str, Any]]:
    rows = []
    for work in works(cp_size, batch, case == "ragged"):
        copies = cold_copies(work.bytes_moved, at_most=16) if batch.device == "cuda" else 1
        calls = [work.make() for _ in range(copies)]
        times = median_of_rounds({"COPY": _copy(work.bytes_moved, copies, batch), "": _timed(calls, batch)})
        us = times[""]
        speed = work.bytes_moved / us / 1e6
        rows.append(row("rows", cp_size, case, work.name, us, x=us / times["COPY"], of="COPY", **{"TB/s": speed}))
    return rows


def _copy(moved: int, copies: int, batch: Batch) -> Callable[[], float]:
    if batch.device != "cuda":
        return _timed([torch.zeros(moved // 2, dtype=torch.uint8).clone], batch)
    calls = copy_calls(moved, copies)
    return lambda: copy_time(calls, 12)


def _timed(calls: Sequence[Callable[[], Any]], batch: Batch) -> Callable[[], float]:
    if batch.device == "cuda":
        return lambda: gpu_time(calls, calls_per_graph=12)
    return lambda: host_us(calls)


def host_us(calls: Sequence[Callable[[], Any]]) -> float:
    """Where there is no GPU, as in the tests: of the host, which says nothing."""
    start = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - start) * 1e6 / len(calls)


# ---- metadata ----------------------------------------------------------------------------------------


def _metadata(cp_sizes: Sequence[int], sequences: int, batch: Batch) -> list[dict[str, Any]]:
    """A batch's tables (`thd_ops.segments`); and once the same made by plain torch on the GPU, launched one by one."""
    rows = []
    for cp_size in cp_sizes:
        for name in batch.windows():
            schedule = batch.schedule(cp_size, name, sequences, ragged=True)
            arguments = schedule.cu_seqlens, None, schedule.shape, schedule.mask
            call = partial(thd_ops.segments, *arguments)
            us = _timed([call], batch)()
            host = host_time(call) if batch.device == "cuda" else None
            rows.append(row("metadata", cp_size, f"{sequences} {name}", "segments", us, **{"host us": host}))
    plain = partial(thd_reference.segments, *arguments)
    us = stream_time([plain]) if batch.device == "cuda" else host_us([plain])
    host = host_time(plain, 20, 5) if batch.device == "cuda" else None
    rows.append(row("metadata", cp_size, f"{sequences} {name}", "segments, plain torch", us, **{"host us": host}))
    return rows


def plot(rows: list[dict[str, Any]], title: str, path: str) -> None:
    """Moves of rows over a copy of their bytes; without any, the parts of the step over the attention alone."""
    from .report import bars

    shown = [r for r in rows if r["of"] == "COPY"] or [r for r in rows if r["part"] in ("step", "ranks") and r["x"]]
    shown = [{**r, "case": f"cp {r['cp']} {r['case']}"} for r in shown]
    of = shown[0]["of"] if shown else ""
    bars(shown, "case", "x", "what", title, f"time over {of}", path, most=3.0)
