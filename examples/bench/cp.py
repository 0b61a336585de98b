"""`bench cp`: context parallelism's moves of rows, tables, whole step, memory and balance of ranks, on one GPU.

Bytes are those of the rows that an operation reads and writes, each as often as it does: a key that two chunks of a
rank see is moved twice. Tables of rows, 4 bytes a row, do not count. Steps are in `cp_step.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate, pairwise, product
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor

from jitrope import thd
from jitrope.base.partition import chunks_of, count, local_rows, number_of_chunks
from jitrope.context_parallel.attention import Call, pack_gradients, unpack, unpack_gradients
from jitrope.context_parallel.backends import Case as Attention
from jitrope.context_parallel.schedule import Memory, Schedule
from jitrope.thd import ops as thd_ops
from jitrope.thd import reference as thd_reference

from .harness import COPY, DEVICE, Case, bf16, gpu_time, host_times, measure, stream_time
from .plots import Plot
from .report import AS_JSON, SMOKE, Rows, app, chosen, numbers, show
from .sections import Row, Section, Table, grouped, of, short, span

PARTS = ("rows", "metadata", "step", "balance")
COUNTS = (16, 512, 2401)
"""Sequences of the batches whose tables are timed."""
CUTS = {"TransformerEngine's cut": False, "separate_padding": True}


class Batch(NamedTuple):
    """A bf16 batch over all ranks."""

    tokens: int = 65536
    sequences: int = 16
    heads: tuple[tuple[int, int], ...] = ((16, 16), (32, 8))  # of q, and of k and v
    head_dim: int = 64
    window: int = 512  # keys before a query's own, where there is a window

    def bounds(self, sequences: int | None = None, ragged: bool = False) -> list[int]:
        """Where sequences begin, and the end: even lengths, one more or less, or random ones."""
        n, draw = self.sequences if sequences is None else sequences, random.Random(0)
        if ragged:
            return [0, *sorted(draw.randint(0, self.tokens) for _ in range(n - 1)), self.tokens]
        return [i * self.tokens // n for i in range(n + 1)]

    def windows(self) -> dict[str, tuple[int, int]]:
        """The masks of the step, all causal."""
        return {"causal": (-1, 0), f"window {self.window}": (self.window, 0)}

    def schedule(
        self, cp_size: int, mask: str = "causal", sequences: int | None = None, ragged: bool = False, **ranks: Any
    ) -> Schedule:
        """That of one rank of cp_size, which has neighbours on both sides, or of a group's."""
        bounds = self.bounds(sequences, ragged)
        offsets, longest = torch.tensor(bounds, device=DEVICE).int(), max(b - a for a, b in pairwise(bounds))
        ranks = ranks or {"cp_size": cp_size, "cp_rank": cp_size // 2}
        return Schedule(offsets, self.tokens, max_seqlen=longest, window=self.windows()[mask], **ranks)

    def padded(self, cp_size: int, rank: int, mask: str, apart: bool) -> Schedule:
        """That of a rank, of random lengths padded to the longest; the padding is cut apart, or as tokens are."""
        draw, slot = random.Random(0), self.tokens // self.sequences
        sizes = [draw.lognormvariate(0, 0.8) for _ in range(self.sequences)]
        ends = accumulate((int(slot * size / max(sizes)) for size in sizes), initial=0)
        real, slots = (torch.tensor([*x], device=DEVICE).int() for x in (ends, range(0, self.tokens + 1, slot)))
        words: dict[str, Any] = {"cu_seqlens_padded": slots, "separate_padding": apart, "max_seqlen": slot}
        return Schedule(real, self.tokens, cp_size=cp_size, cp_rank=rank, window=self.windows()[mask], **words)

    def attention(self, schedule: Schedule, heads: tuple[int, int], head_groups: int = 1) -> Attention:
        """One of the head groups of a training step."""
        (q, kv), device, d = (n // head_groups for n in heads), torch.device(DEVICE), self.head_dim
        return Attention(device, torch.bfloat16, q, kv, d, d, schedule.mask, schedule.most_segments)


TINY = Batch(97, 3, ((4, 2),), 8, 3)


def row(part: str, cp_size: int, case: str, what: str, us: float | None = None, **more: Any) -> dict[str, Any]:
    """One of the table. x: of the time or memory that `of` names."""
    empty = dict.fromkeys(("x", "of", "host us", "TB/s", "MiB"))
    return {"part": part, "cp": cp_size, "case": case, "what": what, "us": us, **empty, **more}


class Work(NamedTuple):
    """An operation on rows: bytes that it reads and writes, and (rows, width) of its bf16 inputs."""

    name: str
    bytes_moved: int
    run: Callable[..., Any]
    inputs: tuple[tuple[int, int], ...]


def works(cp_size: int, batch: Batch, ragged: bool) -> Iterator[Work]:
    """Each on heads of k and v of the batch's first kind; pairs are moved by one launch."""
    from .cp_step import SHAPES

    schedule = batch.schedule(cp_size, ragged=ragged)
    shape, tokens, heads = schedule.shape, batch.tokens, batch.heads[0]
    call = Call(schedule, SHAPES, batch.attention(schedule, heads), 1.0)
    width = heads[1] * batch.head_dim
    size, padded = 2 * width, cp_size * shape.capacity  # bytes of a row; rows of all ranks
    words: dict[str, Any] = {"cu_seqlens": schedule.cu_seqlens, "cp_size": cp_size}
    to_ranks: Any = partial(thd.sequence_order_to_cp_rank_order, **words)
    to_sequences: Any = partial(thd.cp_rank_order_to_sequence_order, **words, total_tokens=tokens)
    there, back, one = (tokens + padded) * size, 2 * tokens * size, (tokens, width)
    yield Work("sequence to rank order", there, to_ranks, (one,))
    yield Work("sequence to rank order, k and v", 2 * there, lambda k, v: to_ranks((k, v)), (one, one))
    one = padded, width
    yield Work("rank to sequence order", back, to_sequences, (one,))
    yield Work("rank to sequence order, k and v", 2 * back, lambda k, v: to_sequences((k, v)), (one, one))
    starts, lengths, valid = first_halves(schedule.cu_seqlens, cp_size, shape.cp_rank, shape.rule)
    copy = partial(thd.copy_valid_tokens_from_per_split_to_rank_local, cu_seqlens_padded=starts, cu_seqlens=lengths)
    yield Work("copy valid", 2 * valid * size, copy, ((shape.rows, width),) * 2)
    keys, seen = len(schedule.segments.key_rows), int(schedule.segments.cu_seqlens_k[-1])
    everyone = (padded, 2 * width)
    moved = 2 * (seen + keys) * size, 2 * (seen + padded) * size, 2 * (cp_size + 1) * shape.rows * size
    gather, chunks, ranks = (partial(lambda f, *x: f(*x, call), f) for f in (unpack, pack_gradients, unpack_gradients))
    yield Work("gather of visible keys, k and v", moved[0], gather, (everyone,))
    yield Work("sum of chunks, dK and dV", moved[1], chunks, ((keys, width),) * 2)
    yield Work("sum over ranks, dK and dV", moved[2], ranks, (everyone,))


def first_halves(cu_seqlens: Tensor, cp_size: int, rank: int, rule: str) -> tuple[Tensor, Tensor, int]:
    """Of a rank's first chunks: (where each begins among its rows, lengths added up, tokens in all)."""
    offsets, chunk = cu_seqlens.long(), chunks_of(rank, cp_size, rule)[0]
    lengths = count(offsets, chunk, number_of_chunks(cp_size, rule))
    return local_rows(offsets, rank, cp_size, rule).int(), lengths.int(), int(lengths[-1])


def case_of(work: Work) -> Case:
    """Cold."""
    make = partial(lambda shapes: tuple(bf16(*shape) for shape in shapes), work.inputs)
    return Case(make, {"jitrope": partial(lambda run, x: run(*x), work.run)}, {COPY: work.bytes_moved})


def moved_rows(cp_size: int, case: str, batch: Batch) -> Rows:
    """A row for each operation, cold."""
    found = []
    for work in works(cp_size, batch, case == "ragged"):
        times = measure(case_of(work))
        us, copy = times["jitrope"].forward, times[COPY].forward
        speed = {"TB/s": work.bytes_moved / us / 1e6}
        found.append(row("rows", cp_size, case, work.name, us, x=us / copy, of=COPY, **speed))
    return found


def metadata(cp_sizes: list[int], sequences: int, batch: Batch) -> Rows:
    """A batch's tables, once a batch; and once the same by plain torch on the GPU, launched one by one."""
    found = []
    for cp_size in cp_sizes:
        for name in batch.windows():
            schedule = batch.schedule(cp_size, name, sequences, ragged=True)
            call = partial(thd_ops.segments, schedule.cu_seqlens, None, schedule.shape, schedule.mask)
            host = {"host us": host_times({"": call})[""]}
            found.append(row("metadata", cp_size, f"{sequences} {name}", "segments", gpu_time([call]), **host))
    words = schedule.cu_seqlens, None, schedule.shape, schedule.mask
    plain = partial(thd_reference.fill_segments, thd_reference.empty_segments(*words), *words)
    host = {"host us": host_times({"": plain}, count=20)[""]}
    us = stream_time([plain])
    return [*found, row("metadata", cp_size, f"{sequences} {name}", "segments, plain torch", us, **host)]


@app.command("cp")
def command(
    only: Annotated[str, typer.Option(help="Parts to run, of rows,metadata,step,balance; under torchrun step.")] = "",
    cp: Annotated[str, typer.Option(help="Ranks, one of which this GPU stands for.")] = "2,4,8",
    smoke: SMOKE = False,
    as_json: AS_JSON = False,
) -> None:
    """Context parallelism, one rank of several: moves of rows beside copies, tables, the step, memory and balance.

    torchrun --nproc-per-node 2 -m jitrope bench cp --only step: whole steps of real ranks, a GPU each.
    """
    from . import cp_step

    parts, sizes, batch = chosen(only, PARTS), numbers("--cp", cp), Batch()
    if smoke:
        sizes, batch = [2], TINY
    steps: dict[str, Callable[[], Rows]] = {}
    for size in sizes:
        if "rows" in parts:
            steps |= {f"rows, cp {size}, {case}": partial(moved_rows, size, case, batch) for case in ("even", "ragged")}
        for part, make in (("step", cp_step.rows), ("balance", cp_step.balance_rows)):
            for heads, mask in product(batch.heads, batch.windows()) if part in parts else ():
                steps[f"{part}, cp {size}, {heads}, {mask}"] = partial(make, size, mask, heads, batch)
    if "metadata" in parts:
        steps |= {f"metadata, {n} sequences": partial(metadata, sizes, n, batch) for n in COUNTS}
    if not cp_step.launched():
        show(steps, smoke, as_json)
    elif only != "step":
        raise typer.BadParameter("--only is 'step' under torchrun, whose ranks do nothing else together")
    else:
        with cp_step.joined() as rank:
            real = cp_step.rank_steps(batch)
            if rank == 0:
                show(real, smoke, as_json)
            else:
                _ = [step() for step in real.values()]


# ---- in examples/results/README.md -----------------------------------------------------------------------


def mask_of(row: Row) -> str:
    """Mask and heads of a step's case, without its backend."""
    return str(row["case"]).split(", ")[0]


def batch_of(row: Row) -> str:
    """Sequences and mask of a batch whose tables are made."""
    count, mask = row["case"].split(" ", 1)
    return f"{int(count):,} sequences, {mask}"


def ms(row: Row) -> str:
    """A time in milliseconds."""
    return short(row["us"] / 1e3)


def mebibytes(row: Row) -> str:
    """Peak memory with the kernels' own; "" for a row of tensors alone."""
    return f"{row['MiB']:.0f}" if "kernels" in row["case"] else ""


def of_te(row: Row) -> str:
    """Tensors alone, over TransformerEngine's."""
    return short(row["x"]) if row["case"].endswith("tensors") else ""


def gpu_and_host(row: Row) -> str:
    """Microseconds of the GPU and of the host."""
    return f"{row['us']:.0f} and {row['host us']:.0f}"


def plot(rows: Rows) -> Plot | None:
    """Moves of rows for the most ranks; of real ranks whole steps."""
    most = max(row["cp"] for row in rows)
    groups = grouped((r for r in rows if r["part"] == "ranks"), mask_of, RANKS, "what", lambda row: row["us"] / 1e3)
    if groups:
        kept = span(group[RANKS["step, keep_gathered"]] / group["jitrope"] for group in groups.values())
        message = f"{most} GPUs: keep_gathered=True takes {kept} of a step's time"
        return Plot(message, "whole step, ms", groups, by="mask, heads of q / of k and v")
    moves = [row for row in rows if row["part"] == "rows"]
    shown = [{**row, "by": "jitrope"} for row in moves if row["cp"] == most and row["case"] == "even"]
    groups = grouped(shown, lambda row: row["what"], {"jitrope": "jitrope"}, value="x")
    message = f"Moving rows between ranks' orders: {span(row['x'] for row in moves)} times a copy"
    return Plot(message, "time over COPY", groups, "COPY", f"even lengths, {most} ranks") if groups else None


RANKS = {
    "step": "jitrope",
    "step, keep_gathered": "jitrope, keep_gathered=True",
    "step, head_groups=2": "jitrope, head_groups=2",
}
STEP, MEMORY, ALL = {"part": "step"}, {"part": "memory"}, {"part": "ranks"}
SECTION = Section(
    "Context parallelism",
    """
    A batch of 65,536 tokens in 16 sequences, heads of 64, cut between 2 / 4 / 8 ranks; one GPU stands for one of them.
    The first table has the moves of rows over COPY of the bytes of the rows that they read and write; lengths are
    even, or random. Tables of a batch are made once a batch, and nothing waits for the device. A step is the forward
    and backward of attention on one rank without collectives, beside the attention's kernels alone. Peak memory is
    counted above q, k, v and dout: tensors alone, over those of TransformerEngine's algorithm by formula, and with the
    memory of the attention's kernels. FlashAttention 2 gives each query head a dK and a dV of its own before it adds up
    those of a group: with 32/8 heads this raises the peak, and `head_groups=2` halves it. Beside `Schedule.memory` the
    memory of such kernels counts too. Padded batches have random lengths, padded to the longest: 16 times 4,096 tokens,
    or 4 times 16,384. Real ranks run whole steps with NCCL, each on a GPU of its own.
    """,
    "jitrope bench cp`, and for real ranks `torchrun --nproc-per-node 2 -m jitrope bench cp --only step",
    (
        Table(
            "moves over COPY, 2 / 4 / 8 ranks",
            lambda row: str(row["what"]),
            {
                "even lengths": of("x", part="rows", case="even"),
                "random lengths": of("x", part="rows", case="ragged"),
            },
        ),
        Table(
            "tables of a batch, us of the GPU and of the host, 2 / 4 / 8 ranks",
            batch_of,
            {
                "jitrope": of(gpu_and_host, part="metadata", what="segments"),
                "plain torch, 8 ranks": of(gpu_and_host, part="metadata", what="segments, plain torch"),
            },
        ),
        Table(
            "a rank's step, ms, 2 / 4 / 8 ranks",
            mask_of,
            {
                "attention alone, forward": of(ms, what="attention alone, forward", **STEP),
                "attention alone, backward": of(ms, what="attention alone, backward", **STEP),
                "whole step": of(ms, what="whole step, without collectives", **STEP),
                "whole step over attention alone": of("x", what="whole step, without collectives", **STEP),
            },
        ),
        Table(
            "peak of a step, 2 / 4 / 8 ranks",
            mask_of,
            {
                "tensors, over TransformerEngine's": of(of_te, what="jitrope", **MEMORY),
                "tensors, `head_groups=2`": of(of_te, what="jitrope, head_groups=2", **MEMORY),
                "MiB, with the kernels' own": of(mebibytes, what="jitrope", **MEMORY),
                "MiB, `keep_gathered=True`": of(mebibytes, what="jitrope, keep_gathered", **MEMORY),
                "MiB, `head_groups=2`": of(mebibytes, what="jitrope, head_groups=2", **MEMORY),
            },
        ),
        Table(
            "a call's MiB (over `Schedule.memory`), 2 / 4 / 8 ranks",
            lambda row: str(row["case"]).rpartition(", ")[0],
            {x: of(lambda row: f"{row['MiB']:.0f} ({row['x']:.2f})", part="call", what=x) for x in Memory._fields},
        ),
        Table(
            "padded to the longest: the busiest rank, 2 / 4 / 8 ranks",
            lambda row: batch_of({**row, "case": mask_of(row)}),
            {
                **{f"{cut}, pairs over the mean": of("x", what=f"{cut}, pairs") for cut in CUTS},
                "`separate_padding`, time over the other cut's": of("x", what="separate_padding, time"),
            },
        ),
        Table(
            "real ranks, ms",
            mask_of,
            {
                "whole step": of(ms, what="step", **ALL),
                "`keep_gathered=True`": of(ms, what="step, keep_gathered", **ALL),
                "`head_groups=2`": of(ms, what="step, head_groups=2", **ALL),
                "all-gather of k and v": of(ms, what="all-gather of k and v", **ALL),
                "exchange of the rows that a window sees": of(ms, what="exchange of k and v", **ALL),
            },
        ),
    ),
    plot,
)
