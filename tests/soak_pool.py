"""Calls of the public functions for the soak and the sanitizers: a job fixes compiled constants, the rest is random.

A job makes the same inputs on any device from a seed. The seed determines lengths, positions and contents; the job
determines dtypes, head sizes, strides and options, so it needs only one or a few kernels.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

import jitrope
from jitrope import thd
from jitrope.base.partition import RULES
from jitrope.context_parallel import Partition, Schedule, all_gather_attention
from jitrope.thd.shape import Mask, Shape
from tests.said import fp8, kv_cache, norm_kv_cache, said

from .cases import (
    CACHE_CASES,
    CASES,
    LATENT_CASES,
    NORM_CASES,
    QKV_CASES,
    QKV_NORM_CASES,
    CacheCase,
    Case,
    LatentCase,
    NormCase,
    as_fused,
    heads_of,
    latent_call,
    make,
    make_bias,
    make_cache,
    make_norm,
    norm_call,
    qkv_norm_call,
    random_case,
    random_norm_case,
)

MOST_TOKENS = 40
E8M0 = getattr(torch, "float8_e8m0fnu", torch.uint8)
FP4 = getattr(torch, "float4_e2m1fn_x2", torch.uint8)

Outputs = list["Tensor | None"]
Call = Callable[[], Outputs]


class Job(NamedTuple):
    """A kind of call.

    make: (device, seed) -> the call, which holds its inputs. slack: 0: the bits of the CPU's result; else a factor of
    the tolerance of `check`. repeatable: repeating the call gives the same bits.
    """

    op: str
    name: str
    make: Callable[[str, int], Call]
    slack: float = 0.0
    repeatable: bool = True

    def __str__(self) -> str:
        return f"{self.op} {self.name}"


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
    if not dtype.is_floating_point:
        return torch.randint(-99, 99, tuple(shape), generator=generator).to(dtype).to(device)
    return torch.randn(tuple(shape), generator=generator).to(dtype).to(device)


def gradients(
    call: Callable[[], Any], leaves: Outputs, generator: torch.Generator, device: str, dtype: torch.dtype | None = None
) -> Call:
    """The call with its backward for random gradients: outputs, then the gradients of leaves.

    dtype: the random ones are values of this dtype, by default of the outputs'.
    """
    given = [x.requires_grad_() for x in leaves if x is not None]

    def both() -> Outputs:
        outputs = [y for y in call() if y is not None]
        weights = [noise(generator, y.shape, dtype or y.dtype, device).to(y.dtype) for y in outputs]
        return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, given, weights)]

    return both


# ---- rope --------------------------------------------------------------------------------------------


def resized(case: Case, draw: random.Random) -> Case:
    """The case with other lengths: the same number of sequences, table rows for most positions; decode: other rows."""
    b, s, *rest = case.shape
    size = case.cp[0]
    if case.lengths is not None or size == 1:
        tokens = draw.randint(1, MOST_TOKENS)
    else:
        tokens = 2 * draw.randint(1, MOST_TOKENS // 2)  # chunks of a dense batch are even
    if s == 1 and b > 1:
        b, tokens = draw.randint(2, MOST_TOKENS), 1
    left, lengths = size * tokens, []
    for _ in case.lengths or ():
        lengths.append(draw.randint(0, min(left, 2 * size * tokens // len(case.lengths or (0,)) + 1)))
        left -= lengths[-1]
    return replace(
        case,
        shape=(b, tokens, *rest),
        lengths=None if case.lengths is None else tuple(lengths),
        starts=None if case.starts is None else tuple(draw.randint(-2, 6) for _ in case.starts),
        table_rows=draw.randint(1, MOST_TOKENS) if case.ids else size * tokens + draw.randint(0, 5),
    )


def rope_slack(case: Case) -> float:
    """The slack of a case: sines, and contracted complex and addcmul products, depend on the device."""
    return 0.0 if case.rounding in ("fp32", "dtype") and not case.table.startswith("angles") else 1.0


def can_be_in_place(case: Case) -> bool:
    return case.options.get("interleaved_out", case.interleaved) == case.interleaved


def rope_job(case: Case, mode: str) -> Job:
    """mode: "" | "in place" | "backward"."""

    def made(device: str, seed: int) -> Call:
        q, k, cos, sin, words = make(resized(case, random.Random(seed)), device, seed)
        if mode == "in place":
            return lambda: [*jitrope.apply_rope(q, k, cos, sin, **said(**words), inplace=True)]
        call = lambda: [*jitrope.apply_rope(q, k, cos, sin, **said(**words))]  # noqa: E731
        return gradients(call, [q, k], torch.Generator().manual_seed(seed), device) if mode else call

    op = {"": "rope", "in place": "rope_", "backward": "rope, backward"}[mode]
    return Job(op, case.name, made, rope_slack(case))


def ulysses_job(case: Case) -> Job:
    """A group of heads for each of two ranks, with the gradient, which arrives in that layout."""

    def made(device: str, seed: int) -> Call:
        q, k, cos, sin, words = make(resized(case, random.Random(seed)), device, seed)
        call = lambda: [*jitrope.apply_rope(q, k, cos, sin, **said(**words), out=jitrope.Ulysses(2))]  # noqa: E731
        return gradients(call, [q, k], torch.Generator().manual_seed(seed), device)

    return Job("rope by rank, backward", case.name, made, rope_slack(case))


def qkv_job(case: Case, mode: str, biased: bool = False) -> Job:
    """Fused QKV, perhaps with its projection's bias; modes as `rope_job`'s."""

    def made(device: str, seed: int) -> Call:
        sized = resized(case, random.Random(seed))
        qkv, _, cos, sin, words = make(as_fused(sized), device, seed)
        words["heads"], bias = heads_of(sized), make_bias(qkv, "flat", seed) if biased else None
        if mode == "in place":
            return lambda: [jitrope.prepare_fused_qkv(qkv, cos, sin, bias=bias, **said(**words), inplace=True)]
        call = lambda: [*jitrope.prepare_fused_qkv(qkv, cos, sin, bias=bias, **said(**words))]  # noqa: E731
        return gradients(call, [qkv, bias], torch.Generator().manual_seed(seed), device) if mode else call

    op = {"": "fused_qkv", "in place": "fused_qkv_", "backward": "fused_qkv, backward"}[mode]
    slack = NORM_SLACK if biased and mode == "backward" else rope_slack(case)  # a bias' gradient is torch's sum
    return Job(op + ", bias" * biased, case.name, made, slack)


def latent_job(case: LatentCase) -> Job:
    """Latent attention with its gradient, whose sum over heads has another order on a CPU."""

    def made(device: str, seed: int) -> Call:
        sized = replace(case, rope=resized(case.rope, random.Random(seed)))
        tensors, words, _ = latent_call(sized, device, seed)
        call = lambda: [*jitrope.prepare_mla_qkv(*tensors, **said(**words))]  # noqa: E731
        return gradients(call, [*tensors], torch.Generator().manual_seed(seed), device)

    return Job("latent, backward", case.name, made, 1.0)


# ---- serving -----------------------------------------------------------------------------------------


def fp8_job(case: Case) -> Job:
    def made(device: str, seed: int) -> Call:
        q, k, cos, sin, words = make(resized(case, random.Random(seed)), device, seed)
        del words["rounding"]
        scale = torch.tensor(0.02, device=device)
        return lambda: [
            *fp8(q, k, cos, sin, q_scale=scale, k_scale=0.3 if k is not None else None, **words)
        ]  # fmt: skip

    return Job("fp8", case.name, made, rope_slack(case))


SCALED: dict[str, dict[str, Any]] = {
    "halves": {"group": 32, "scale_dtype": E8M0, "hadamard": True},
    "ids": {"dtype": torch.int8, "hadamard": True},
    "partial-odd": {},
    "d72": {},
    "interleaved": {"dtype": FP4, "group": 32, "scale_dtype": E8M0, "swizzled": True},
    "bhsd": {"dtype": FP4, "group": 16, "scale_dtype": torch.float8_e4m3fn, "q_global_scale": 0.01},
    "sbhd": {"per": "head"},
    "thd": {"per": "kv_head", "dtype": torch.float8_e5m2},
}
"""Arguments of `DynamicQuantize` by cases."""


def scaled_job(case: Case) -> Job:
    """Dynamic scales."""

    def made(device: str, seed: int) -> Call:
        q, k, cos, sin, words = make(resized(case, random.Random(seed)), device, seed)
        del words["rounding"]
        quantize = jitrope.DynamicQuantize(**SCALED[case.name])
        tables = {**said(**words), "cos": cos, "sin": sin, "quantize": quantize}

        def call() -> Outputs:
            found = [x for y in jitrope.prepare_qkv(q, k, None, **tables)[:2] if y is not None for x in y]
            return [x.view(torch.uint8) if x.dtype == FP4 else x for x in found]

        return call

    return Job("scaled", case.name, made, rope_slack(case))


def means_job(case: Case) -> Job:
    """A norm across the heads of several ranks, by given means of squares."""

    def made(device: str, seed: int) -> Call:
        q, k, cos, sin, words = make(resized(case, random.Random(seed)), device, seed)
        means = [x.float().cpu().square().mean((-2, -1)).to(device) + 1 for x in (q, k)]
        norm = jitrope.Norm(across_heads=True, mean_squares=means, rounding="once")
        tables = {**said(**words), "cos": cos, "sin": sin, "norm": norm}
        return lambda: [*jitrope.prepare_qkv(q, k, None, **tables)[:2]]

    return Job("means of squares", case.name, made, 1.0)


def cache_job(case: CacheCase, in_place: bool = False, norm: bool = False) -> Job:
    """Store k and v in a cache full of noise; slots do not repeat, and some are padding or past the end."""

    def made(device: str, seed: int) -> Call:
        draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        b, s, *rest = case.shape
        b, s = (draw.randint(2, MOST_TOKENS), 1) if s == 1 else (b, draw.randint(3, MOST_TOKENS))
        first, *page = case.cache
        cache = (b * s + first, *page) if not page else (-(-b * s // page[0]) + first, *page)
        c = make_cache(replace(case, shape=(b, s, *rest), cache=cache, padding=(draw.randrange(b * s),)), device)
        for x in (c.q, c.k, c.v, c.k_cache, c.v_cache):
            x.copy_(noise(generator, x.shape, torch.float32, device))
        slots = torch.randperm(torch.Size(cache).numel() + 2, generator=generator)[: b * s]
        c.slots.copy_(torch.where(c.slots.cpu() < 0, -1, slots).to(device))
        words: dict[str, Any] = {
            **case.options, "layout": case.layout, "rotate_k": case.rotate_k, case.table: c.tables[0],
            "position_ids": c.tables[4], "k_cache": c.k_cache, "v_cache": c.v_cache, "slot_mapping": c.slots,
            "k_scale": c.scales[1], "v_scale": c.scales[2],
        }  # fmt: skip
        if not in_place:
            words["q_scale"] = c.scales[0]
        weights = [noise(generator, case.shape[-1:], c.q.dtype, device) for _ in range(2 * norm)]
        call = norm_kv_cache if norm else kv_cache
        words |= {"v_norm": draw.random() < 0.5} if norm else {}
        return lambda: [call(c.q, c.k, c.v, *weights, inplace=in_place, **words), c.k, c.k_cache, c.v_cache]

    op = ("norm_" if norm else "") + ("kv_cache_" if in_place else "kv_cache")
    return Job(op, case.name, made, NORM_SLACK if norm else 1.0 if case.table == "freqs" else 0.0)


def pages_job(draw: random.Random) -> Job:
    """Store k and v in the pages of sequences of random lengths, full of noise; spare tokens belong to none."""
    ragged, counts, clear, scaled, placed = (draw.random() < 0.5 for _ in range(5))
    index_dtype, rows = draw.choice((torch.int32, torch.int64)), 4

    def made(device: str, seed: int) -> Call:
        draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        lengths = [draw.randint(1, 25) for _ in range(draw.randint(1, 6))]
        new = [draw.randint(0, n) if counts else 1 for n in lengths]
        spare = draw.randint(1, 3) if counts else 0
        pages = [-(-n // rows) for n in lengths]
        own = torch.randperm(sum(pages) + 2, generator=generator)[: sum(pages)]
        found: dict[str, Any] = {"page_table": own, "page_indptr": torch.tensor([0, *accumulate(pages)])}
        if ragged:
            found["last_page_len"] = torch.tensor([(n - 1) % rows + 1 for n in lengths])
        else:
            table = torch.nn.utils.rnn.pad_sequence([*own.split(pages)], True, -1)
            found = {"page_table": table, "seq_lens": torch.tensor(lengths)}
        if counts:
            found["cu_seqlens_q"] = torch.tensor([0, *accumulate(new)])
        ids = torch.tensor([at for n, end in zip(new, lengths) for at in range(end - n, end)] + [0] * spare)
        if placed:
            own_of = [number for number, n in enumerate(new) for _ in range(n)] + [-1] * spare
            found = {name: x for name, x in found.items() if name in ("page_table", "page_indptr")}
            found |= {"batch_indices": torch.tensor(own_of), "cache_positions": ids}
        words = {name: x.to(index_dtype).to(device) for name, x in found.items()}
        q, k, v = (noise(generator, (sum(new) + spare, n, 64), torch.bfloat16, device) for n in (4, 2, 2))
        dtype = torch.float8_e4m3fn if scaled else torch.bfloat16
        caches = [noise(generator, (len(own) + 2, rows, 2, 64), torch.float32, "cpu").to(dtype) for _ in range(2)]
        k_cache, v_cache = (x.to(device) for x in caches)
        errors = torch.zeros(1, dtype=torch.int32, device=device)
        words |= {
            "k_cache": k_cache,
            "v_cache": v_cache,
            "errors": errors,
            "clear_page": clear and not placed,
            "layout": "thd",
        }
        words |= {"k_scale": 0.02, "v_scale": 0.02} if scaled else {}
        words |= {"position_ids": ids.to(device), "cos_sin_cache": noise(generator, (25, 64), torch.float32, device)}
        return lambda: [kv_cache(q, k, v, **words), k_cache, v_cache, errors]

    traits = ["ragged"] * ragged + ["counts"] * counts + ["clear"] * clear + ["fp8"] * scaled
    return Job("pages", f"{'-'.join(traits) or 'table'}-{str(index_dtype)[6:]}", made)


# ---- QK-norm -----------------------------------------------------------------------------------------

NORM_SLACK = 2.0
"""Sums have another order on a GPU; over millions of elements, two roundings of one sometimes differ."""


def resized_norm(case: NormCase, draw: random.Random) -> NormCase:
    rope = resized(case.rope, draw)
    tokens = rope.shape[1]
    if case.first is None:
        return replace(case, rope=rope)
    if case.two_tables:  # each with at least one row
        tokens = max(2, tokens)
        rope = replace(rope, shape=(rope.shape[0], tokens, *rope.shape[2:]), table_rows=tokens)
        return replace(case, rope=rope, first=draw.randint(1, tokens - 1))
    return replace(case, rope=rope, first=draw.randint(0, tokens))


def norm_job(case: NormCase, mode: str) -> Job:
    """modes as `rope_job`'s."""

    def made(device: str, seed: int) -> Call:
        call = make_norm(resized_norm(case, random.Random(seed)), device, seed)
        if mode == "in place":
            return lambda: [*norm_call(call, True)]
        if mode == "":
            return lambda: [*norm_call(call)]
        leaves = [*call.streams, *call.weights, *call.biases]
        return gradients(lambda: norm_call(call), leaves, torch.Generator().manual_seed(seed), device)

    name = "norm_rope" if case.first is None else "norm_rope_joint"
    op = {"": name, "in place": f"{name}_", "backward": f"{name}, backward"}[mode]
    return Job(op, case.name, made, NORM_SLACK)


def qkv_norm_job(case: NormCase, mode: str, biased: bool = False) -> Job:
    """Fused QKV with a norm, perhaps with its projection's bias; modes as `rope_job`'s."""

    def made(device: str, seed: int) -> Call:
        qkv, weights, words = qkv_norm_call(resized_norm(case, random.Random(seed)), device, seed)
        own = {**case.norm, "v_norm": not case.across_heads and random.Random(seed).random() < 0.5}
        norm, words = jitrope.Norm(**weights, **own), said(**words)
        words["bias"] = bias = make_bias(qkv, "flat", seed) if biased else None
        if mode == "in place":
            return lambda: [jitrope.prepare_fused_qkv(qkv, norm=norm, **words, inplace=True)]
        call = lambda: [*jitrope.prepare_fused_qkv(qkv, norm=norm, **words)]  # noqa: E731
        leaves = [qkv, bias, *weights.values()]
        return gradients(call, leaves, torch.Generator().manual_seed(seed), device) if mode else call

    op = {"": "fused_qkv_norm", "in place": "fused_qkv_norm_", "backward": "fused_qkv_norm, backward"}[mode]
    return Job(op + ", bias" * biased, case.name, made, NORM_SLACK)


# ---- packed batches between ranks ----------------------------------------------------------------------


class Batch:
    """Sequences of random lengths, with or without padding after them, and spare rows; one of several ranks."""

    def __init__(self, seed: int, index_dtype: torch.dtype, padded: bool, cp_size: int, rule: str) -> None:
        self.draw = draw = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        slots = [draw.choice((0, 1, 3, 9, 17, 30)) for _ in range(draw.choice((1, 2, 5, 20)))]
        lengths = [draw.randint(0, n) for n in slots] if padded else slots
        self.slots, self.cu_seqlens = (
            torch.tensor([0, *accumulate(x)], dtype=index_dtype) for x in (slots, lengths)
        )  # fmt: skip
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
        return cls(
            draw.choice((torch.int32, torch.int64)), draw.random() < 0.5, draw.choice((1, 2, 3, 4)), draw.choice(RULES)
        )

    def __str__(self) -> str:
        return f"{self.rule}-cp{self.cp_size}{'-padded' * self.padded}-{str(self.index_dtype)[6:]}"


WIDTHS = ((16,), (3,), (1,), (24,), (2, 8), (65,), (520,))
MOVES = ("to_ranks", "to_sequences", "stay", "table", "sum", "valid", "tail")
MASKS = (Mask(-1, 0), Mask(-1, -1), Mask(3, 0), Mask(4, 1), Mask(3, -1))
STEPS = (
    ("lse", "none", "add"), ("read_lse", "none", "copy"), ("out", "add", "add"), ("out", "none", "add"),
    ("grad", "add", "none"), ("grad", "none", "copy"), ("grad", "add", "copy"), ("grad", "copy", "add"),
)  # fmt: skip


def rows_job(move: str, draw: random.Random) -> Job:
    """Move rows of any size and alignment by any map, in one tensor or two; other rows do not change."""
    trait = Trait.drawn(draw)
    dtype = draw.choice((torch.bfloat16, torch.float16, torch.float32, *((torch.int8,) if move != "sum" else ())))
    widths = [draw.choice(WIDTHS) for _ in range(1 if move == "tail" else draw.choice((1, 2)))]
    apart, terms = draw.choice((0, 8, 1)), draw.choice((1, 2, 5))

    def made(device: str, seed: int) -> Call:
        batch = Batch(seed, *trait)
        tokens, generator = batch.tokens, batch.generator
        shape = batch.shape._replace(cp_rank=0)
        everyone = shape.cp_size * shape.capacity
        count = {"to_ranks": everyone, "stay": tokens + 3, "table": 70, "sum": 33}.get(move, tokens)
        rows = everyone if move == "to_sequences" else tokens
        spread = [(rows, *width[:-1], width[-1] + apart * (len(width) == 1)) for width in widths]
        # Whole numbers have exact sums in any order.
        inputs = [
            noise(generator, s, torch.int64, "cpu").to(dtype).to(device)[..., : w[-1]] for s, w in zip(spread, widths)
        ]
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

    return Job("thd rows", f"{move}-{trait}-{dtype}-{widths}-{apart}", made)


def reorder_job(draw: random.Random) -> Job:
    """Reorder a batch for its ranks and back, k and v in one launch, with gradients."""
    trait, dtype = Trait.drawn(draw), draw.choice((torch.bfloat16, torch.float32))
    shapes = [(2, draw.choice((3, 8))), (2, draw.choice((5, 16)))]

    def made(device: str, seed: int) -> Call:
        batch = Batch(seed, *trait)
        slots, cp_size, rule = batch.slots.to(device), trait.cp_size, trait.rule
        k, v = (noise(batch.generator, (batch.tokens, *shape), dtype, device) for shape in shapes)

        def call() -> Outputs:
            ranks = thd.sequence_order_to_cp_rank_order((k, v), slots, cp_size, rule=rule)
            back = thd.cp_rank_order_to_sequence_order(ranks, slots, cp_size, batch.tokens, rule=rule)
            return [*ranks, *back]

        return gradients(call, [k, v], batch.generator, device)

    return Job("thd order", f"{trait}-{dtype}", made)


def tables_job(draw: random.Random) -> Job:
    """Tables of a rank, its rows of a tensor, the halves of its sequences, and their valid tokens."""
    trait = Trait.drawn(draw)

    def made(device: str, seed: int) -> Call:
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

    return Job("thd tables", str(trait), made)


def segments_job(mask: Mask, draw: random.Random) -> Job:
    """A rank's attention as segments."""
    trait = Trait.drawn(draw)

    def made(device: str, seed: int) -> Call:
        batch = Batch(seed, *trait)
        real, padded = batch.cu_seqlens.to(device), batch.slots.to(device) if trait.padded else None
        words = {"cp_size": trait.cp_size, "cp_rank": batch.shape.cp_rank, "rule": trait.rule, "window": tuple(mask)}
        causal = mask.right == 0
        return lambda: [
            *Schedule(real, batch.tokens, cu_seqlens_padded=padded, causal=causal, **words).segments
        ]  # fmt: skip

    return Job("cp segments", f"{mask.left},{mask.right}-{trait}", made)


def correction_job(step: tuple[str, str, str], draw: random.Random) -> Job:
    """Join a step of ring attention with earlier ones, also for sequences of odd length."""
    quantity, first, second = step
    packed, index_dtype = draw.random() < 0.5, draw.choice((torch.int32, torch.int64))
    dtype, (heads, size) = draw.choice((torch.bfloat16, torch.float32)), draw.choice(((2, 8), (3, 5), (4, 16)))

    def made(device: str, seed: int) -> Call:
        batch = Batch(seed, index_dtype, False, 1, "dual_chunk")
        cu_seqlens, generator, t, half = batch.slots.to(device), batch.generator, batch.tokens, "none" in step
        longest = max(batch.slots.diff().tolist()) + 1
        out, into = (
            noise(generator, (n, heads, size), dtype, device) for n in (t, t // 2 + 4 if half else t)
        )  # fmt: skip
        lead = (heads,) if packed else (batch.shape.sequences, heads)
        rows, ends = (t, t // 2 + 4) if packed else (longest, longest // 2 + 2)
        widths = (rows, ends if half else rows)
        lse, lse_step = (noise(generator, (*lead, n), torch.float32, "cpu") for n in widths)
        for x in (lse_step,) if quantity == "out" else (lse, lse_step):
            x[torch.rand(x.shape, generator=generator) < 0.1] = -torch.inf  # rows without keys
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

    return Job("thd corrections", f"{'-'.join(step)}-{packed}-{dtype}-{size}", made, 1.0)


def attention_job(draw: random.Random) -> Job:
    """Attention of a group of one, with its backward, which adds in any order."""
    window, padded = draw.choice(((-1, -1), (9, 0))), draw.random() < 0.5

    def made(device: str, seed: int) -> Call:
        batch = Batch(seed, torch.int32, padded, 1, "dual_chunk")
        # The CPU computes attention in fp32 from the same values.
        dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
        q, k, v = (
            noise(batch.generator, (batch.tokens, heads, 64), torch.bfloat16, device).to(dtype) for heads in (4, 2, 2)
        )
        real, slots = batch.cu_seqlens.to(device), batch.slots.to(device) if padded else None
        words = {"cu_seqlens_padded": slots, "window": window}
        call = lambda: [all_gather_attention(q, k, v, Schedule(real, batch.tokens, **words))]  # noqa: E731
        both = gradients(call, [q, k, v], batch.generator, device, torch.bfloat16)
        return lambda: [x.to(torch.bfloat16) for x in both() if x is not None]

    return Job("all_gather_attention", f"{window}{'-padded' * padded}", made, 2.0, False)


# ---- the pool ----------------------------------------------------------------------------------------

FP8 = ("halves", "ids", "partial-odd", "d72", "packed")
MEANS = ("halves", "ids", "interleaved")
BY_RANK = ("halves", "interleaved", "packed", "scaled-tokens")
PLACED = ("shifts", "prefix", "scaled")


def _ropes(draw: random.Random) -> Iterator[Job]:
    cases = [case for case in CASES if not case.name.startswith("ragged-2") and not case.name.startswith("ragged-4")]
    while True:
        case = draw.choice((draw.choice(cases), random_case(draw.randrange(10_000))))
        modes = ("", "in place", "backward") if can_be_in_place(case) else ("", "backward")
        yield rope_job(case, draw.choice(modes))


def _norms(draw: random.Random) -> Iterator[Job]:
    while True:
        case = draw.choice((draw.choice(NORM_CASES), random_norm_case(draw.randrange(10_000))))
        modes = [""] if case.first is not None else ["", "in place"]
        if case in NORM_CASES and case.rope.ids != "past":
            modes.append("backward")
        yield norm_job(case, draw.choice(modes))


def _serving(draw: random.Random) -> Iterator[Job]:
    for in_place in itertools.cycle((False, True)):
        yield cache_job(draw.choice([case for case in CACHE_CASES if not (in_place and case.q_fp8)]), in_place)
        yield cache_job(draw.choice(NORMED), in_place, norm=True)
        yield fp8_job(draw.choice([c for c in CASES if c.name in FP8]))
        yield scaled_job(draw.choice([c for c in CASES if c.name in SCALED]))
        yield means_job(draw.choice([c for c in CASES if c.name in MEANS]))


def _packed(draw: random.Random) -> Iterator[Job]:
    while True:
        yield rows_job(draw.choice(MOVES), draw)
        yield correction_job(draw.choice(STEPS), draw)
        yield segments_job(draw.choice(MASKS), draw)
        yield reorder_job(draw)
        yield tables_job(draw)


def _placed(draw: random.Random) -> Iterator[Job]:
    """Pages, ranks, shifts, tokens that are not rotated, and scales of q."""
    while True:
        yield pages_job(draw)
        yield ulysses_job(draw.choice([case for case in CASES if case.name in BY_RANK]))
        for begin in PLACED:
            case = draw.choice([case for case in CASES if case.name.startswith(begin)])
            yield rope_job(
                case, draw.choice(("", "in place", "backward") if can_be_in_place(case) else ("", "backward"))
            )


def _qkvs(draw: random.Random) -> Iterator[Job]:
    for mode in itertools.cycle(("", "in place", "backward")):
        yield qkv_job(draw.choice(QKV_CASES), mode)
        yield latent_job(draw.choice(LATENT_CASES))
        yield qkv_norm_job(draw.choice(QKV_NORM_CASES), mode)
        yield qkv_job(draw.choice(QKV_CASES), mode, biased=True)
        yield qkv_norm_job(draw.choice(QKV_NORM_CASES), mode, biased=True)


def _attentions(draw: random.Random) -> Iterator[Job]:
    while True:
        yield attention_job(draw)


NORMED = [case for case in CACHE_CASES if case.table != "freqs" and not (case.fp8 or case.q_fp8)]
"""Calls with a cache that a norm goes with. fp8 would show another order of a sum as a whole step."""
SHARES = ((_ropes, 12), (_norms, 7), (_packed, 6), (_serving, 3), (_placed, 2), (_qkvs, 5), (_attentions, 1))
"""Jobs of each kind in turn."""


def pool(count: int, seed: int) -> list[Job]:
    """`count` jobs of all kinds; the same for the same seed."""
    draw = random.Random(seed)
    kinds = {kind: kind(random.Random(draw.getrandbits(32))) for kind, _ in SHARES}
    order = [kinds[kind] for kind, share in SHARES for _ in range(share)]
    draw.shuffle(order)
    return [next(order[n % len(order)]) for n in range(count)]
