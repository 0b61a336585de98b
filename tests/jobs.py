"""Random calls of the public functions, for the soak, the sanitizers and the bits of two states of the code.

A job is a kind of call: dtypes, head sizes, strides and options, so it needs only one or a few kernels. A seed
determines the contents, the positions and the lengths, on any device the same.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jitrope import thd
from jitrope.base.partition import RULES
from jitrope.context_parallel import Partition, Schedule, all_gather_attention
from jitrope.thd.shape import Mask, Shape

from .calls import Case, ident, random_case
from .results import check_gradients, flat, near_each, places_of, run
from .sweep import FUNCTIONS, Made

Outputs = list["Tensor | None"]


class Call(NamedTuple):
    """A call that holds its inputs. start: it runs, and gives what it has written; check: that is right."""

    start: Callable[[], Outputs]
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
        if backward:
            return Call(lambda: run(m)[len(m.wanted) :], lambda found: check_gradients(like, found))
        places, got = places_of(m), {}
        places_of(like)  # draws the same numbers

        def start() -> Outputs:
            got.update(m.call(**places.words))
            return [*flat(got), *places.tensors]

        return Call(start, lambda _: places.check(like, got))

    return Job(FUNCTIONS[case["source"]] + ", backward" * backward, ident(case), made)


# ---- against the same call on a CPU --------------------------------------------------------------------


class Batch:
    """Sequences of random lengths, with or without padding after them, and spare rows; one of several ranks."""

    def __init__(
        self, seed: int, index_dtype: torch.dtype, padded: bool, cp_size: int, rule: str, device: str = "cpu"
    ) -> None:
        draw, self.generator, self.device = random.Random(seed), torch.Generator().manual_seed(seed), device
        slots = [draw.choice((0, 1, 3, 9, 17, 30)) for _ in range(draw.choice((1, 2, 5, 40)))]
        lengths = [draw.randint(0, n) for n in slots] if padded else slots
        offsets = (torch.tensor([0, *accumulate(x)], dtype=index_dtype, device=device) for x in (slots, lengths))
        self.slots, self.cu_seqlens = offsets
        self.padded = self.slots if padded else None
        self.tokens = sum(slots) + draw.choice((0, 5)) or 1
        self.shape = Shape(self.tokens, len(slots), cp_size, draw.randrange(cp_size), rule)
        self.words = {"cp_size": cp_size, "cp_rank": self.shape.cp_rank, "rule": rule}

    def noise(self, *shape: int, dtype: torch.dtype) -> Tensor:
        if dtype.is_floating_point:
            return torch.randn(shape, generator=self.generator).to(dtype).to(self.device)
        return torch.randint(-99, 99, shape, generator=self.generator).to(dtype).to(self.device)

    def with_gradients(self, outputs: Sequence[Tensor], leaves: Sequence[Tensor], dtype: torch.dtype) -> Outputs:
        """Outputs, then the gradients of leaves for random ones, values of this dtype."""
        weights = [self.noise(*y.shape, dtype=dtype).to(y.dtype) for y in outputs]
        return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, leaves, weights)]


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


# (the trait and the rest of a job's name) for a batch, then nothing, once its inputs are there, then its outputs.
Steps = Iterator[Any]


def against_cpu(steps: Callable[..., Any], op: str, *given: Any, slack: float = 0.0, repeatable: bool = True) -> Job:
    """A job of packed batches. given: arguments of the steps, the last a `random.Random` for what is compiled in.

    slack: 0: the bits of the CPU's result; else a factor of the tolerance of `near_each`.
    """
    state = given[-1].getstate()
    trait, name = next(steps(*given))

    def make(device: str, seed: int) -> Call:
        runs = []
        for place in (device, "cpu"):
            draw = random.Random()
            draw.setstate(state)
            runs.append(steps(*given[:-1], draw))
            next(runs[-1])
            runs[-1].send(Batch(seed, *trait, place))
        return Call(functools.partial(next, runs[0]), lambda got: near_each(got, next(runs[1]), slack))

    return Job(op, f"{trait}{name}", make, repeatable)


# ---- packed batches between ranks ----------------------------------------------------------------------

WIDTHS = ((16,), (3,), (1,), (24,), (2, 8), (65,), (520,))
MOVES = ("to_ranks", "to_sequences", "stay", "table", "sum", "valid", "tail")
MASKS = [Mask(*x) for x in ((-1, 0), (-1, -1), (3, 0), (0, 0), (4, 1), (-1, 2), (3, -1), (0, 5))]
STEPS = (
    ("lse", "none", "add"), ("read_lse", "none", "copy"), ("out", "add", "add"), ("out", "none", "add"),
    ("grad", "add", "none"), ("grad", "copy", "none"), ("grad", "none", "add"), ("grad", "none", "copy"),
    ("grad", "add", "copy"), ("grad", "copy", "add"),
)  # fmt: skip


def rows(move: str, draw: random.Random) -> Steps:
    """Move rows of any size and alignment by any map, in one tensor or two; other rows do not change."""
    trait = Trait.drawn(draw)
    dtype = draw.choice((torch.bfloat16, torch.float16, torch.float32, *((torch.int8,) if move != "sum" else ())))
    widths = [draw.choice(WIDTHS) for _ in range(1 if move == "tail" else draw.choice((1, 2)))]
    apart, terms, more = draw.choice((0, 8, 1)), draw.choice((1, 2, 5)), draw.choice((0, 3))
    batch = yield trait, f"-{move}-{dtype}-{widths}-{apart}"
    tokens, shape = batch.tokens, batch.shape._replace(cp_rank=0)
    count = {"to_ranks": shape.all_rows, "stay": tokens + more, "table": 70, "sum": 33}.get(move, tokens)
    own = shape.all_rows if move == "to_sequences" else tokens
    spread = [(own, *width[:-1], width[-1] + apart * (len(width) == 1)) for width in widths]
    wide = [batch.noise(*size, dtype=torch.int64).to(dtype) for size in spread]  # with exact sums in any order
    outputs = [torch.full((count, *width), 77, dtype=dtype, device=batch.device) for width in widths]
    inputs = outputs if move == "tail" else [x[..., : width[-1]] for x, width in zip(wide, widths)]
    table = None
    if move in ("table", "sum"):
        size = (count,) if move == "table" else (terms, count)
        table = torch.randint(-1, tokens, size, generator=batch.generator).int().to(batch.device)
    map, lengths = "table" if move == "sum" else move, batch.cu_seqlens if move == "valid" else None
    yield
    torch.ops.jitrope.thd_rows(inputs, outputs, map, batch.slots, lengths, table, *shape)
    yield outputs


def reorder(draw: random.Random) -> Steps:
    """Reorder a batch for its ranks and back, k and v in one launch, with gradients."""
    trait, dtype = Trait.drawn(draw), draw.choice((torch.bfloat16, torch.float32))
    sizes = [draw.choice((3, 8)), draw.choice((5, 16))]
    batch = yield trait, f"-{dtype}"
    kv = tuple([batch.noise(batch.tokens, 2, size, dtype=dtype).requires_grad_() for size in sizes])
    yield
    cut = batch.slots, trait.cp_size
    ranks = thd.sequence_order_to_cp_rank_order(kv, *cut, rule=trait.rule)
    back = thd.cp_rank_order_to_sequence_order(ranks, *cut, batch.tokens, rule=trait.rule)
    yield batch.with_gradients([*ranks, *back], kv, dtype)


def tables(draw: random.Random) -> Steps:
    """Tables of a rank, its rows of a tensor, the halves of its sequences, and their valid tokens."""
    batch = yield Trait.drawn(draw), ""
    x, slots = batch.noise(batch.tokens, 2, 8, dtype=torch.float16), batch.slots
    yield
    indices = thd.get_partitioned_indices(slots, batch.tokens, *batch.shape[2:4], rule=batch.shape.rule)
    part = Partition(slots, batch.tokens, **batch.words)
    halves = [thd.read_half_tensor(x, slots, n) for n in (0, 1)]
    valid = torch.zeros_like(x)
    thd.copy_valid_tokens_from_per_split_to_rank_local(valid, x, slots, batch.cu_seqlens)
    yield [indices, part.position_ids, part.local_cu_seqlens, part.shard(x), *halves, valid]


def segments(mask: Mask, draw: random.Random) -> Steps:
    """A rank's attention as segments."""
    batch = yield Trait.drawn(draw), f"-{mask.left},{mask.right}"
    of = {"cu_seqlens_padded": batch.padded, "causal": mask.right == 0, "window": tuple(mask)}
    yield
    yield [*Schedule(batch.cu_seqlens, batch.tokens, **batch.words, **of).segments]


def correction(step: tuple[str, str, str], draw: random.Random) -> Steps:
    """Join a step of ring attention with earlier ones, also for sequences of odd length."""
    quantity, first, second = step
    packed, trait = draw.random() < 0.5, Trait(draw.choice((torch.int32, torch.int64)), False, 1, "dual_chunk")
    dtype, (heads, size) = draw.choice((torch.bfloat16, torch.float32)), draw.choice(((2, 8), (3, 5), (4, 16)))
    batch = yield trait, f"-{'-'.join(step)}-{packed}-{dtype}-{size}"
    slots, t, half = batch.slots, batch.tokens, "none" in step
    longest = max(slots.diff().tolist()) + 1
    out, into = (batch.noise(n, heads, size, dtype=dtype) for n in (t, t // 2 + 4 if half else t))
    lead = (heads,) if packed else (batch.shape.sequences, heads)
    rows, ends = (t, t // 2 + 4) if packed else (longest, longest // 2 + 2)
    lse, lse_step = (batch.noise(*lead, n, dtype=torch.float32) for n in (rows, ends if half else rows))
    for x in (lse_step,) if quantity == "out" else (lse, lse_step):
        # Rows without keys, and a step that is no number and stays one.
        for value in (-torch.inf, *((torch.nan, torch.inf) if quantity == "lse" else ())):
            x[(torch.rand(x.shape, generator=batch.generator) < 0.1).to(batch.device)] = value
    yield
    if quantity == "read_lse":
        yield [thd.read_second_half_lse(lse, slots, packed, ends)]
    elif quantity == "lse":
        thd.second_half_lse_correction(lse, lse_step, slots, packed)
    elif quantity == "out":
        thd.out_correction(out, into, lse, lse_step, slots, first == "none", packed)
    else:
        thd.grad_correction(out, into, slots, first, second)
    yield [lse, out]


def attention(draw: random.Random) -> Steps:
    """Attention of a group of one, with its backward, which adds in any order."""
    window, trait = draw.choice(((-1, -1), (9, 0))), Trait(torch.int32, draw.random() < 0.5, 1, "dual_chunk")
    batch = yield trait, f"-{window}"
    # The CPU computes attention in fp32 from the same values.
    dtype = torch.bfloat16 if batch.device.startswith("cuda") else torch.float32
    qkv = [batch.noise(batch.tokens, n, 64, dtype=torch.bfloat16).to(dtype).requires_grad_() for n in (4, 2, 2)]
    yield
    schedule = Schedule(batch.cu_seqlens, batch.tokens, cu_seqlens_padded=batch.padded, window=window)
    found = batch.with_gradients([all_gather_attention(*qkv, schedule)], qkv, torch.bfloat16)
    yield [x.to(torch.bfloat16) for x in found]


rows_job = functools.partial(against_cpu, rows, "thd rows")
reorder_job = functools.partial(against_cpu, reorder, "thd order")
tables_job = functools.partial(against_cpu, tables, "thd tables")
segments_job = functools.partial(against_cpu, segments, "cp segments")
correction_job = functools.partial(against_cpu, correction, "thd corrections", slack=1.0)
attention_job = functools.partial(against_cpu, attention, "all_gather_attention", slack=2.0, repeatable=False)


# ---- the pool ----------------------------------------------------------------------------------------


def pool(count: int, seed: int) -> list[Job]:
    """`count` jobs; the same for the same seed. A third has gradients, a sixth is of packed batches between ranks."""
    draw = random.Random(seed)
    jobs: list[Job] = []
    while len(jobs) < count:
        few = [of_table(random_case(draw, gradient=n % 3 == 0)) for n in range(30)]
        few += [reorder_job(draw), tables_job(draw), attention_job(draw), rows_job(draw.choice(MOVES), draw)]
        few += [correction_job(draw.choice(STEPS), draw), segments_job(draw.choice(MASKS), draw)]
        jobs += draw.sample(few, len(few))
    return jobs[:count]
