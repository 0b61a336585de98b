"""Random calls of the public functions, for the soak, the sanitizers and the bits of two states of the code.

A job is a kind of call: dtypes, head sizes, strides and options, so it needs only one or a few kernels. A seed
determines the contents, the positions and the lengths, on any device the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jitrope import thd
from jitrope.base.partition import RULES
from jitrope.context_parallel import Partition, Schedule, all_gather_attention
from jitrope.thd.shape import Mask, Shape

from .calls import Case, ident, random_case
from .results import check_gradients, flat, gradients, outputs, places_of
from .sweep import Made, function_of

Outputs = list["Tensor | None"]
Start = Callable[[], Outputs]


class Call(NamedTuple):
    """A call that holds its inputs. start: it runs, and gives what it has written; check: that is right."""

    start: Start
    check: Callable[[Outputs], None]


class Job(NamedTuple):
    """A kind of call. make: (device, seed) -> the call; repeatable: repeating the call gives the same bits."""

    op: str
    name: str
    make: Callable[[str, int], Call]
    repeatable: bool = True

    def __str__(self) -> str:
        return f"{self.op} {self.name}"


def in_host_memory(outputs: Outputs) -> Outputs:
    return [None if x is None else x.detach().cpu() for x in outputs]


# ---- calls of the table --------------------------------------------------------------------------------


def of_table(case: Case) -> Job:
    """A call of the table, or with "wanted" its gradients, against the chain in fp64."""
    backward = "wanted" in case

    def made(device: str, seed: int) -> Call:
        tokens = 2 * random.Random(seed).randint(3, 7)
        m, like = (Made(case, x, seed, backward, tokens) for x in (device, "cpu"))
        places, leaves, got = places_of(m), m.leaves_of(), {}
        places_of(like)  # draws the same numbers

        def start() -> Outputs:
            got.update(m.call(**places.words))
            return [*flat(got), *places.tensors()]

        def start_backward() -> Outputs:
            return [*gradients(outputs(m), m, leaves)]

        if backward:
            return Call(start_backward, lambda found: check_gradients(like, found))
        return Call(start, lambda _: places.check(like, got))

    return Job(function_of(case).__name__ + ", backward" * backward, ident(case), made)


# ---- against the same call on a CPU --------------------------------------------------------------------

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}


def check(got: Outputs, want: Outputs, slack: float) -> None:
    """Raise AssertionError if results on a device are not the CPU's. NaN equals NaN."""
    assert len(got) == len(want), f"{len(got)} outputs, not {len(want)}"
    for number, (x, y) in enumerate(zip(got, want)):
        assert (x is None) == (y is None), f"output {number} is {x}, not {y}"
        if x is None or y is None:
            continue
        rtol = slack * TOLERANCE.get(y.dtype, 0)
        if y.dtype.is_floating_point:
            x, y = x.float(), y.float()
        size = float(y.nan_to_num(0, 0, 0).abs().max()) if rtol and y.numel() else 1.0
        torch.testing.assert_close(
            x, y, rtol=rtol, atol=rtol / 2 * max(1.0, size), equal_nan=True, msg=lambda m, n=number: f"output {n}: {m}"
        )


def noise(generator: torch.Generator, shape: Any, dtype: torch.dtype, device: str) -> Tensor:
    whole = None if dtype.is_floating_point else torch.randint(-99, 99, tuple(shape), generator=generator)
    return (torch.randn(tuple(shape), generator=generator) if whole is None else whole).to(dtype).to(device)


def with_gradients(
    call: Callable[[], Any], leaves: Outputs, generator: torch.Generator, device: str, dtype: torch.dtype | None = None
) -> Start:
    """The call with its backward for random gradients: outputs, then the gradients of leaves.

    dtype: the random ones are values of this dtype, by default of the outputs'.
    """
    given = [x.requires_grad_() for x in leaves if x is not None]

    def both() -> Outputs:
        outputs = [y for y in call() if y is not None]
        weights = [noise(generator, y.shape, dtype or y.dtype, device).to(y.dtype) for y in outputs]
        return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, given, weights)]

    return both


def against_cpu(op: str, name: str, made: Callable[[str, int], Start], slack: float = 0.0, repeat: bool = True) -> Job:
    """slack: 0: the bits of the CPU's result; else a factor of the tolerance of `check`."""

    def make(device: str, seed: int) -> Call:
        return Call(made(device, seed), lambda got: check(got, made("cpu", seed)(), slack))

    return Job(op, name, make, repeat)


# ---- packed batches between ranks ----------------------------------------------------------------------


class Batch:
    """Sequences of random lengths, with or without padding after them, and spare rows; one of several ranks."""

    def __init__(self, seed: int, index_dtype: torch.dtype, padded: bool, cp_size: int, rule: str) -> None:
        self.draw = draw = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        slots = [draw.choice((0, 1, 3, 9, 17, 30)) for _ in range(draw.choice((1, 2, 5, 40)))]
        lengths = [draw.randint(0, n) for n in slots] if padded else slots
        both = (slots, lengths)
        self.slots, self.cu_seqlens = (torch.tensor([0, *accumulate(x)], dtype=index_dtype) for x in both)
        self.tokens = sum(slots) + draw.choice((0, 5)) or 1
        self.shape = Shape(self.tokens, len(slots), cp_size, draw.randrange(cp_size), rule)


class Trait(NamedTuple):
    """The compiled constants of a job of packed batches."""

    index_dtype: torch.dtype
    padded: bool
    cp_size: int
    rule: str

    @classmethod
    def drawn(cls, draw: random.Random) -> Trait:
        index_dtype, padded = draw.choice((torch.int32, torch.int64)), draw.random() < 0.5
        return cls(index_dtype, padded, draw.choice((1, 2, 3, 4, 8)), draw.choice(RULES))

    def __str__(self) -> str:
        return f"{self.rule}-cp{self.cp_size}{'-padded' * self.padded}-{str(self.index_dtype)[6:]}"


WIDTHS = ((16,), (3,), (1,), (24,), (2, 8), (65,), (520,))
MOVES = ("to_ranks", "to_sequences", "stay", "table", "sum", "valid", "tail")
MASKS = [Mask(*x) for x in ((-1, 0), (-1, -1), (3, 0), (0, 0), (4, 1), (-1, 2), (3, -1), (0, 5))]
STEPS = (
    ("lse", "none", "add"), ("read_lse", "none", "copy"), ("out", "add", "add"), ("out", "none", "add"),
    ("grad", "add", "none"), ("grad", "copy", "none"), ("grad", "none", "add"), ("grad", "none", "copy"),
    ("grad", "add", "copy"), ("grad", "copy", "add"),
)  # fmt: skip


def rows_job(move: str, draw: random.Random) -> Job:
    """Move rows of any size and alignment by any map, in one tensor or two; other rows do not change."""
    trait = Trait.drawn(draw)
    dtype = draw.choice((torch.bfloat16, torch.float16, torch.float32, *((torch.int8,) if move != "sum" else ())))
    widths = [draw.choice(WIDTHS) for _ in range(1 if move == "tail" else draw.choice((1, 2)))]
    apart, terms, more = draw.choice((0, 8, 1)), draw.choice((1, 2, 5)), draw.choice((0, 3))

    def made(device: str, seed: int) -> Start:
        batch = Batch(seed, *trait)
        tokens, generator, shape = batch.tokens, batch.generator, batch.shape._replace(cp_rank=0)
        count = {"to_ranks": shape.all_rows, "stay": tokens + more, "table": 70, "sum": 33}.get(move, tokens)
        rows = shape.all_rows if move == "to_sequences" else tokens
        spread = [(rows, *width[:-1], width[-1] + apart * (len(width) == 1)) for width in widths]
        # Whole numbers have exact sums in any order.
        wide = [noise(generator, size, torch.int64, "cpu").to(dtype).to(device) for size in spread]
        inputs = [x[..., : width[-1]] for x, width in zip(wide, widths)]
        outputs = [torch.full((count, *width), 77, dtype=dtype, device=device) for width in widths]
        table = None
        if move in ("table", "sum"):
            size = (count,) if move == "table" else (terms, count)
            table = torch.randint(-1, tokens, size, generator=generator).int().to(device)
        lengths = batch.cu_seqlens.to(device) if move == "valid" else None
        slots, map = batch.slots.to(device), "table" if move == "sum" else move

        def call() -> Outputs:
            given = outputs if move == "tail" else inputs
            torch.ops.jitrope.thd_rows(given, outputs, map, slots, lengths, table, *shape)
            return [*outputs]

        return call

    return against_cpu("thd rows", f"{move}-{trait}-{dtype}-{widths}-{apart}", made)


def reorder_job(draw: random.Random) -> Job:
    """Reorder a batch for its ranks and back, k and v in one launch, with gradients."""
    trait, dtype = Trait.drawn(draw), draw.choice((torch.bfloat16, torch.float32))
    shapes = [(2, draw.choice((3, 8))), (2, draw.choice((5, 16)))]

    def made(device: str, seed: int) -> Start:
        batch = Batch(seed, *trait)
        slots, cp_size, rule = batch.slots.to(device), trait.cp_size, trait.rule
        k, v = (noise(batch.generator, (batch.tokens, *shape), dtype, device) for shape in shapes)

        def call() -> Outputs:
            ranks = thd.sequence_order_to_cp_rank_order((k, v), slots, cp_size, rule=rule)
            back = thd.cp_rank_order_to_sequence_order(ranks, slots, cp_size, batch.tokens, rule=rule)
            return [*ranks, *back]

        return with_gradients(call, [k, v], batch.generator, device)

    return against_cpu("thd order", f"{trait}-{dtype}", made)


def tables_job(draw: random.Random) -> Job:
    """Tables of a rank, its rows of a tensor, the halves of its sequences, and their valid tokens."""
    trait = Trait.drawn(draw)

    def made(device: str, seed: int) -> Start:
        batch = Batch(seed, *trait)
        slots, real = batch.slots.to(device), batch.cu_seqlens.to(device)
        x = noise(batch.generator, (batch.tokens, 2, 8), torch.float16, device)
        tokens, where = batch.tokens, (trait.cp_size, batch.shape.cp_rank)

        def call() -> Outputs:
            indices = thd.get_partitioned_indices(slots, tokens, *where, rule=trait.rule)
            part = Partition(slots, tokens, cp_size=where[0], cp_rank=where[1], rule=trait.rule)
            halves = [thd.read_half_tensor(x, slots, n) for n in (0, 1)]
            valid = torch.zeros_like(x)
            thd.copy_valid_tokens_from_per_split_to_rank_local(valid, x, slots, real)
            return [indices, part.position_ids, part.local_cu_seqlens, part.shard(x), *halves, valid]

        return call

    return against_cpu("thd tables", str(trait), made)


def segments_job(mask: Mask, draw: random.Random) -> Job:
    """A rank's attention as segments."""
    trait = Trait.drawn(draw)

    def made(device: str, seed: int) -> Start:
        batch = Batch(seed, *trait)
        real, padded = batch.cu_seqlens.to(device), batch.slots.to(device) if trait.padded else None
        words: dict[str, Any] = {"cp_size": trait.cp_size, "cp_rank": batch.shape.cp_rank, "rule": trait.rule}
        words |= {"window": tuple(mask), "cu_seqlens_padded": padded, "causal": mask.right == 0}
        return lambda: [*Schedule(real, batch.tokens, **words).segments]

    return against_cpu("cp segments", f"{mask.left},{mask.right}-{trait}", made)


def correction_job(step: tuple[str, str, str], draw: random.Random) -> Job:
    """Join a step of ring attention with earlier ones, also for sequences of odd length."""
    quantity, first, second = step
    packed, index_dtype = draw.random() < 0.5, draw.choice((torch.int32, torch.int64))
    dtype, (heads, size) = draw.choice((torch.bfloat16, torch.float32)), draw.choice(((2, 8), (3, 5), (4, 16)))

    def made(device: str, seed: int) -> Start:
        batch = Batch(seed, index_dtype, False, 1, "dual_chunk")
        cu_seqlens, generator, t, half = batch.slots.to(device), batch.generator, batch.tokens, "none" in step
        longest = max(batch.slots.diff().tolist()) + 1
        sizes = (t, t // 2 + 4 if half else t)
        out, into = (noise(generator, (n, heads, size), dtype, device) for n in sizes)
        lead = (heads,) if packed else (batch.shape.sequences, heads)
        rows, ends = (t, t // 2 + 4) if packed else (longest, longest // 2 + 2)
        widths = (rows, ends if half else rows)
        lse, lse_step = (noise(generator, (*lead, n), torch.float32, "cpu") for n in widths)
        for x in (lse_step,) if quantity == "out" else (lse, lse_step):
            x[torch.rand(x.shape, generator=generator) < 0.1] = -torch.inf  # rows without keys
            for value in (torch.nan, torch.inf) if quantity == "lse" else ():  # a step that is no number stays one
                x[torch.rand(x.shape, generator=generator) < 0.1] = value
        lse, lse_step = lse.to(device), lse_step.to(device)

        def call() -> Outputs:
            if quantity == "lse":
                thd.second_half_lse_correction(lse, lse_step, cu_seqlens, packed)
            elif quantity == "read_lse":
                return [thd.read_second_half_lse(lse, cu_seqlens, packed, ends)]
            elif quantity == "out":
                thd.out_correction(out, into, lse, lse_step, cu_seqlens, first == "none", packed)
            else:
                thd.grad_correction(out, into, cu_seqlens, first, second)
            return [lse, out]

        return call

    return against_cpu("thd corrections", f"{'-'.join(step)}-{packed}-{dtype}-{size}", made, 1.0)


def attention_job(draw: random.Random) -> Job:
    """Attention of a group of one, with its backward, which adds in any order."""
    window, padded = draw.choice(((-1, -1), (9, 0))), draw.random() < 0.5

    def made(device: str, seed: int) -> Start:
        batch = Batch(seed, torch.int32, padded, 1, "dual_chunk")
        # The CPU computes attention in fp32 from the same values.
        dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
        sizes = [(batch.tokens, heads, 64) for heads in (4, 2, 2)]
        q, k, v = (noise(batch.generator, size, torch.bfloat16, device).to(dtype) for size in sizes)
        real, slots = batch.cu_seqlens.to(device), batch.slots.to(device) if padded else None
        words = {"cu_seqlens_padded": slots, "window": window}
        call = lambda: [all_gather_attention(q, k, v, Schedule(real, batch.tokens, **words))]  # noqa: E731
        both = with_gradients(call, [q, k, v], batch.generator, device, torch.bfloat16)
        return lambda: [x.to(torch.bfloat16) for x in both() if x is not None]

    return against_cpu("all_gather_attention", f"{window}{'-padded' * padded}", made, 2.0, False)


# ---- the pool ----------------------------------------------------------------------------------------


def packed_jobs(draw: random.Random) -> list[Job]:
    """One of each kind."""
    jobs = [reorder_job(draw), tables_job(draw), attention_job(draw), rows_job(draw.choice(MOVES), draw)]
    return [*jobs, correction_job(draw.choice(STEPS), draw), segments_job(draw.choice(MASKS), draw)]


def pool(count: int, seed: int) -> list[Job]:
    """`count` jobs; the same for the same seed. A third has gradients, a sixth is of packed batches between ranks."""
    draw = random.Random(seed)
    jobs: list[Job] = []
    while len(jobs) < count:
        few = [of_table(random_case(draw, gradient=n % 3 == 0)) for n in range(30)] + packed_jobs(draw)
        jobs += draw.sample(few, len(few))
    return jobs[:count]
