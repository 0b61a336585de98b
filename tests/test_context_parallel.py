"""Partitions, schedules and all-gather attention on gloo processes, against an oracle with an explicit mask."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import jitrope
from jitrope import InvalidInput
from jitrope.base.partition import RULES, chunks_of, number_of_chunks
from jitrope.context_parallel import Partition, Rope, Schedule, all_gather_attention
from jitrope.context_parallel.backends import BACKENDS, Case, Math, Varlen, _block_mask, key_ranges
from jitrope.thd import get_partitioned_indices
from jitrope.thd import ops as thd_ops
from jitrope.thd.reference import Segments
from jitrope.thd.shape import Mask, Shape
from tests.said import said

# ---- the oracle ------------------------------------------------------------------------------------


class Pack(NamedTuple):
    """A packed batch: lengths without padding, lengths with padding, and the number of rows."""

    lengths: list[int]
    pads: list[int]
    tokens: int

    @property
    def cu_seqlens(self) -> Tensor:
        return torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32)

    @property
    def cu_seqlens_padded(self) -> Tensor | None:
        return None if self.lengths == self.pads else self.offsets

    @property
    def offsets(self) -> Tensor:
        """The offsets by which the rows are cut."""
        return torch.tensor([0, *accumulate(self.pads)], dtype=torch.int32)

    @property
    def places(self) -> list[tuple[int, int]]:
        """(sequence, position) of every row. The sequence of padding and spare rows is -1."""
        rows = []
        for i, (length, pad) in enumerate(zip(self.lengths, self.pads)):
            rows += [(i if p < length else -1, p) for p in range(pad)]
        return rows + [(-1, 0)] * (self.tokens - len(rows))


def visible(pack: Pack, mask: Mask) -> Tensor:
    """(T, T): the rows that each row sees."""
    sequence, position = torch.tensor(pack.places).T
    distance = position[None] - position[:, None]
    seen = (sequence[:, None] == sequence) & (sequence >= 0)[:, None]
    if mask.left >= 0:
        seen &= distance >= -mask.left
    if mask.right >= 0:
        seen &= distance <= mask.right
    return seen


def oracle(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, ...]:
    """out, dq, dk, dv, lse (T, Hq), max_logit (Hq), in fp64."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = (torch.einsum("qhd,khd->hqk", q, keys) * scale).masked_fill(~seen, -torch.inf)
    weights = torch.where(seen, scores, -1e30).softmax(-1) * seen
    out = torch.einsum("hqk,khd->qhd", weights, values)
    gradients = torch.autograd.grad(out, (q, k, v), dout.double())
    return out.detach(), *gradients, scores.detach().logsumexp(-1).T, scores.detach().amax((1, 2))


# ---- pure functions, against tokens that are dealt out one by one ----------------------------------


def dealt(pack: Pack, cp_size: int, rule: str) -> list[list[int]]:
    """Every rank's tokens. The length of chunk c is the number of the sequence's tokens t with t % of == c."""
    of = number_of_chunks(cp_size, rule)
    bounds = [0, *accumulate(pack.pads), pack.tokens]
    ranks: list[list[int]] = [[] for _ in range(cp_size)]
    for first, end in pairwise(bounds):
        sizes = [sum(t % of == chunk for t in range(first, end)) for chunk in range(of)]
        starts = [first, *accumulate(sizes, initial=first)][1:]
        for rank, rows in enumerate(ranks):
            for chunk in chunks_of(rank, cp_size, rule):
                rows += range(starts[chunk], starts[chunk + 1])
    return ranks


MASKS = [(-1, 0), (-1, -1), (3, 0), (2, 2), (0, 0), (4, 1), (-1, 2), (3, -1), (0, 5)]


def random_pack(seed: int) -> tuple[Pack, int, str, Mask]:
    """A batch, a number of ranks, a rule and a mask."""
    rng = random.Random(seed)
    cp_size, rule = 1 + seed % 8, rng.choice(RULES)
    multiple = rng.choice([1, 1, 2 * cp_size])
    pads = [rng.choice([0, 1, 3, 9, 17, 30]) * multiple for _ in range(rng.choice([1, 2, 3, 6]))]
    lengths = [rng.randint(0, n) for n in pads] if rng.random() < 0.5 else pads
    tokens = max(1, sum(pads) + rng.choice([0, 0, 5, 2 * cp_size]))
    return Pack(lengths, pads, tokens), cp_size, rule, Mask(*rng.choice(MASKS))


def shape_of(pack: Pack, cp_size: int, cp_rank: int, rule: str) -> Shape:
    return Shape(pack.tokens, len(pack.lengths), cp_size, cp_rank, rule)


@pytest.mark.parametrize("seed", range(48))
def test_partition(seed: int) -> None:
    """Every token is in one row of one rank, and rows, positions and offsets are right, with padding and without."""
    pack, cp_size, rule, _ = random_pack(seed)
    want, offsets = dealt(pack, cp_size, rule), pack.offsets
    assert sorted(t for rows in want for t in rows) == list(range(pack.tokens))
    starts = [0, *accumulate(pack.pads)]
    x = torch.randn(pack.tokens, 2, 3)
    for rank, tokens in enumerate(want):
        ranks = {"cp_size": cp_size, "cp_rank": rank, "rule": rule}
        part = Partition(pack.cu_seqlens, pack.tokens, cu_seqlens_padded=pack.cu_seqlens_padded, **ranks)
        assert torch.equal(Partition(offsets, pack.tokens, **ranks).indices, part.indices)
        assert part.rows == len(tokens)
        assert part.indices.tolist() == tokens
        first = [max(s for s in starts if s <= t) for t in tokens]
        positions = [t - s if t < starts[-1] else 0 for t, s in zip(tokens, first)]
        assert part.position_ids.tolist() == positions
        local = [sum(t < s for t in tokens) for s in starts]
        assert part.local_cu_seqlens.tolist() == local
        assert torch.equal(part.shard(x), x[tokens])
        assert torch.equal(get_partitioned_indices(offsets, pack.tokens, cp_size, rank, rule=rule), part.indices)


def test_partition_by_hand() -> None:
    """Lengths that no number of chunks divides, and TransformerEngine's own example."""
    for rank, rows in enumerate(([0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10])):
        assert Partition(torch.tensor([0, 8, 12]), 12, cp_size=2, cp_rank=rank).indices.tolist() == rows
    cu = torch.tensor([0, 137, 2178, 2267])  # 137, 2041, 89
    rows = [Partition(cu, 2267, cp_size=4, cp_rank=rank).indices for rank in range(4)]
    assert [len(x) for x in rows] == [567, 567, 567, 566]
    assert torch.equal(torch.cat(rows).sort().values, torch.arange(2267).int())


def test_shard_of_any_tensor() -> None:
    """Tensors with one axis or many, and integers. The gradient is zero in the rows of other ranks."""
    cu = torch.tensor([0, 5, 11])
    part = Partition(cu, 12, cp_size=2, cp_rank=1)
    for x in (torch.arange(12), torch.randn(12, 2, 3, 2).double(), torch.randn(24)[::2] > 0):
        assert torch.equal(part.shard(x), x[part.indices.long()])
    x = torch.randn(12, 4, requires_grad=True)
    part.shard(x).sum().backward()
    want = torch.zeros(12, 4)
    want[part.indices.long()] = 1
    assert torch.equal(x.grad, want)


@pytest.mark.parametrize("seed", range(96))
def test_segments(seed: int) -> None:
    """By a schedule's tables every query sees the keys that the mask allows, and inverse tables are inverse."""
    pack, cp_size, rule, mask = random_pack(seed)
    shards = dealt(pack, cp_size, rule)
    shapes = [shape_of(pack, cp_size, rank, rule) for rank in range(cp_size)]
    tables = [thd_ops.segments(pack.cu_seqlens, pack.cu_seqlens_padded, shape, mask) for shape in shapes]
    exchange = shapes[0].exchange(mask)
    want = visible(pack, mask)
    for rank, (shape, table) in enumerate(zip(shapes, tables)):
        gathered = gathered_tokens(rank, shards, tables, shapes, exchange)
        assert (len(table.key_rows), queries_of(table, shape)) == shape.most(mask)
        seen = seen_through(table, mask, shards[rank], gathered, pack.tokens)
        for token in shards[rank]:
            assert torch.equal(seen[token], want[token]), (pack, mask, token)
        check_inverses(table, exchange, rank)


def queries_of(table: Segments, shape: Shape) -> int:
    return shape.rows if table.query_rows is None else len(table.query_rows)


def gathered_tokens(
    rank: int, shards: list[list[int]], tables: list[Segments], shapes: list[Shape], exchange: list[list[int]] | None
) -> list[int]:
    """The token of each row that a rank receives, or -1."""
    if exchange is None:
        return [t for rows in shards for t in rows + [-1] * (shapes[0].capacity - len(rows))]
    tokens = []
    for source, table in enumerate(tables):
        base = sum(exchange[source][:rank])
        rows = table.send_rows[base : base + exchange[source][rank]].tolist()
        tokens += [-1 if row < 0 else shards[source][row] for row in rows]
    return tokens


def seen_through(table: Segments, mask: Mask, rows: list[int], gathered: list[int], tokens: int) -> Tensor:
    """(T, T): the tokens that the tokens `rows` see. No token is seen twice."""
    queries = list(range(len(rows))) if table.query_rows is None else table.query_rows.tolist()
    keys = [-1 if row < 0 else gathered[row] for row in table.key_rows.tolist()]
    low, high = key_ranges(Varlen(table.cu_seqlens_q, table.cu_seqlens_k, 0, 0, mask, 1.0), len(queries))
    seen, times = torch.zeros(tokens, tokens, dtype=torch.bool), torch.zeros(tokens)
    for query, first, end in zip(queries, low.tolist(), high.tolist()):
        if query >= 0:
            assert -1 not in keys[first:end]
            seen[rows[query], keys[first:end]] = True
            times[rows[query]] += 1
    assert times.max() <= 1
    return seen


def check_inverses(table: Segments, exchange: list[list[int]] | None, rank: int) -> None:
    for chunk in table.gathered_rows:
        there = chunk >= 0
        assert torch.equal(table.key_rows[chunk[there].long()], torch.arange(len(chunk)).int()[there])
    assert (table.gathered_rows >= 0).sum() == table.cu_seqlens_k[-1] == (table.key_rows >= 0).sum()
    if table.output_rows is not None:
        there = table.output_rows >= 0
        rows = torch.arange(len(table.output_rows)).int()
        assert torch.equal(table.query_rows[table.output_rows[there].long()], rows[there])
    if exchange is not None:
        for other, sent in enumerate(table.sent_rows):
            there = sent >= 0
            assert torch.equal(table.send_rows[sent[there].long()], torch.arange(len(sent)).int()[there])
            base = sum(exchange[rank][:other])
            assert ((sent[there] >= base) & (sent[there] < base + exchange[rank][other])).all()


@pytest.mark.parametrize("seed", range(64))
def test_longest_segment(seed: int) -> None:
    """max_q and max_k are at least the longest segments, both with and without max_seqlen."""
    pack, cp_size, rule, mask = random_pack(seed)
    words: dict[str, Any] = {"cu_seqlens_padded": pack.cu_seqlens_padded, "causal": False, "window": mask, "rule": rule}
    for rank in range(cp_size):
        for max_seqlen in (None, max(1, *pack.pads)):
            ranks = {"cp_size": cp_size, "cp_rank": rank}
            schedule = Schedule(pack.cu_seqlens, pack.tokens, max_seqlen=max_seqlen, **ranks, **words)
            varlen = schedule.varlen(1.0)
            assert varlen.cu_seqlens_q.diff().max() <= varlen.max_q
            assert varlen.cu_seqlens_k.diff().max() <= varlen.max_k
            assert len(varlen.cu_seqlens_q) - 1 == schedule.most_segments


def test_saving_of_a_window() -> None:
    """With a short window over one long sequence few rows are exchanged. Otherwise all are gathered."""
    cu = torch.tensor([0, 4096])
    # Chunks have 512 tokens. Of a chunk that is d chunks before, ceil(64 / d) rows are sent, except to its own rank.
    assert Schedule(cu, 4096, cp_size=4, cp_rank=0, window=(64, 0)).saving == 1 - 776 / (3 * 4096)
    for causal, window in ((True, (-1, 0)), (False, (-1, -1)), (True, (4000, 0)), (False, (64, -1))):
        assert Schedule(cu, 4096, cp_size=4, cp_rank=0, causal=causal, window=window).saving == 0


# ---- attention, one process for all ranks ----------------------------------------------------------


def seen_in_window(lengths: list[int], cp_size: int, window: int, token: int) -> list[int]:
    """The positions that a token of the last sequence sees with a two-sided window."""
    pack = Pack(lengths, lengths, sum(lengths))
    mask = Mask(window, window)
    shards = dealt(pack, cp_size, "dual_chunk")
    shapes = [shape_of(pack, cp_size, rank, "dual_chunk") for rank in range(cp_size)]
    tables = [thd_ops.segments(pack.cu_seqlens, None, shape, mask) for shape in shapes]
    exchange = shapes[0].exchange(mask)
    row = sum(lengths[:-1]) + token
    rank = next(r for r, rows in enumerate(shards) if row in rows)
    gathered = gathered_tokens(rank, shards, tables, shapes, exchange)
    seen = seen_through(tables[rank], mask, shards[rank], gathered, pack.tokens)[row]
    return (seen.nonzero().view(-1) - sum(lengths[:-1])).tolist()


def test_window_with_unequal_lengths() -> None:
    """TransformerEngine shifts one window for all sequences: token 8 of 16 would see keys 0 to 12."""
    assert seen_in_window([36, 16], 2, 8, 8) == list(range(16))


def test_window_of_one_sequence() -> None:
    """A rounded max_seqlen shifts its window for a single sequence too: token 774 would see keys 567 to 967."""
    assert seen_in_window([1032], 4, 200, 774) == list(range(574, 975))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_math_backend_alone(dtype: torch.dtype) -> None:
    """Segments with and without keys or queries, more keys than queries, rows of no segment, GQA, Dv != D."""
    cu_q, cu_k = torch.tensor([0, 5, 5, 9, 11]), torch.tensor([0, 7, 9, 13, 13])
    torch.manual_seed(0)
    q, k, v = (torch.randn(rows, h, d, dtype=dtype) for rows, h, d in ((14, 4, 6), (15, 2, 6), (15, 2, 3)))
    dout = torch.randn(14, 4, 3, dtype=dtype)
    q[9:], dout[9:] = torch.nan, torch.nan
    for mask in (Mask(*m) for m in MASKS):
        seen = torch.zeros(14, 15, dtype=torch.bool)
        for a, b, c, d in zip(cu_q, cu_q[1:], cu_k, cu_k[1:]):
            for i in range(b - a):
                key = d - (b - a) + i
                low = c if mask.left < 0 else max(c, key - mask.left)
                high = d if mask.right < 0 else min(d, key + mask.right + 1)
                seen[a + i, low : max(low, high)] = True
        want = oracle(q.nan_to_num(), k, v, dout.nan_to_num(), seen, 0.3)
        case = Case(q.device, dtype, 4, 2, 6, 3, mask, 4, lse=True, max_logit=True)
        varlen = Varlen(cu_q.int(), cu_k.int(), 5, 7, mask, 0.3)
        result = Math().forward(q, k, v, varlen, case)
        gradients = Math().backward(dout, q, k, v, result, varlen)
        close = {"rtol": 0, "atol": 1e-12 if dtype == torch.float64 else 1e-5}
        for x, y in zip((result.out, *gradients), want):
            torch.testing.assert_close(x.double(), y, **close)
        torch.testing.assert_close(result.lse.T.double(), want[4], rtol=0, atol=1e-5)
        torch.testing.assert_close(result.row_max.amax(1).double(), want[5], rtol=0, atol=1e-5)


def test_autocast_does_not_change_attention() -> None:
    q, k, v = (torch.randn(10, 2, 8, requires_grad=True) for _ in range(3))
    schedule, found = Schedule(torch.tensor([0, 6, 10]), 10), []
    for on in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            out = all_gather_attention(q, k, v, schedule, backend="math")
            found.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    for x, y in zip(*found):
        assert torch.equal(x, y)


def test_a_partition_of_inference_mode_serves_training() -> None:
    part = Partition(torch.tensor([0, 7, 10]), 10, cp_size=2, cp_rank=0)
    with torch.inference_mode():
        rows = part.shard(torch.arange(10))
    x = torch.randn(10, 3, requires_grad=True)
    x[part.indices].sum().backward()
    assert x.grad is not None
    assert x.grad[:, 0].nonzero().flatten().tolist() == rows.tolist()
    with torch.inference_mode():
        cu_seqlens = torch.tensor([0, 7, 10])
    whole = Partition(cu_seqlens, 10).unshard(x)
    assert torch.equal(whole, x)
    whole.sum().backward()


@pytest.mark.parametrize("strict", [False, True])
def test_a_partition_that_was_exported_serves_eager_calls(strict: bool) -> None:
    part, x = Partition(torch.tensor([0, 7, 10]), 10, cp_size=2, cp_rank=0), torch.arange(10.0)

    class Cut(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return part.shard(x)

    exported = torch.export.export(Cut(), (x,), strict=strict).module()
    assert part.shard(x).tolist() == exported(x).tolist() == [0, 1, 6, 7, 9]


@pytest.mark.parametrize("size", [10, 11, 2**31 - 1, 2**31, 2**32, 2**40, 2**63 - 1])
def test_a_window_of_all_tokens_is_no_window(size: int) -> None:
    q, cu_seqlens = torch.randn(10, 4, 16), torch.tensor([0, 7, 10])
    for causal in (False, True):
        want = all_gather_attention(q, q, q, Schedule(cu_seqlens, 10, causal=causal))
        schedule = Schedule(cu_seqlens, 10, causal=causal, window=(size, size))
        assert torch.equal(all_gather_attention(q, q, q, schedule), want)


def test_a_batch_without_tokens_saves_nothing() -> None:
    assert Schedule(torch.tensor([0, 0]), 0, cp_size=2, cp_rank=0, window=(4, 0)).saving == 0


@pytest.mark.parametrize("head_groups", [1, 2])
def test_tables_of_rope_get_no_gradient(head_groups: int) -> None:
    q, cos = torch.randn(10, 4, 16), torch.ones(10, 8, requires_grad=True)
    rope, schedule = Rope(cos, torch.zeros(10, 8)), Schedule(torch.tensor([0, 7, 10]), 10)
    assert not all_gather_attention(q, q, q, schedule, rope=rope, head_groups=head_groups).requires_grad


@pytest.mark.parametrize("made", ["before", "inside"])
def test_a_compiled_function_cuts_a_batch(made: str) -> None:
    def partition() -> Partition:
        return Partition(torch.tensor([0, 7, 10]), 10, cp_size=2, cp_rank=0)

    part, x = partition(), torch.randn(10, 3, requires_grad=True)

    def call(x: torch.Tensor) -> torch.Tensor:
        own = part if made == "before" else partition()
        return own.shard(x) * own.position_ids[:, None]

    got = torch.compile(call, backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(got, call(x))
    assert torch.equal(*(torch.autograd.grad(out.sum(), x)[0] for out in (got, call(x))))


@pytest.mark.parametrize("made", ["before", "inside"])
def test_compiled_attention_with_a_new_schedule(made: str) -> None:
    q, k = (torch.randn(10, heads, 16, requires_grad=True) for heads in (4, 2))

    def schedule() -> Schedule:
        return Schedule(torch.tensor([0, 3, 10]), 10)

    own = schedule()

    def call(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return all_gather_attention(q, k, k, own if made == "before" else schedule()) * 2

    got = torch.compile(call, backend="aot_eager")(q, k)
    torch.testing.assert_close(got, call(q, k))
    grads = [torch.autograd.grad(out.square().sum(), (q, k)) for out in (got, call(q, k))]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("seed", range(24))
def test_blocks_of_flex(seed: int) -> None:
    """The listed blocks are those with a visible score, and whole blocks have no other. Compiled kernels use them."""
    pack, cp_size, rule, mask = random_pack(1000 + seed)
    pack = Pack([23 * n for n in pack.lengths], [23 * n for n in pack.pads], 23 * pack.tokens)
    for rank in {0, cp_size - 1}:
        table = thd_ops.segments(pack.cu_seqlens, pack.cu_seqlens_padded, shape_of(pack, cp_size, rank, rule), mask)
        rows, keys = queries_of(table, shape_of(pack, cp_size, rank, rule)), len(table.key_rows)
        low, high = key_ranges(Varlen(table.cu_seqlens_q, table.cu_seqlens_k, 0, 0, mask, 1.0), rows)
        key = torch.arange(keys)
        scores = (key >= low[:, None]) & (key < high[:, None])
        scores = torch.nn.functional.pad(scores, (0, -keys % 128, 0, -rows % 128))
        blocks = scores.view(len(scores) // 128, 128, -1, 128).transpose(1, 2).flatten(2)
        made = _block_mask(low, high, keys, lambda *_: None)
        some, whole = (
            _dense(*x) for x in ((made.kv_num_blocks, made.kv_indices), (made.full_kv_num_blocks, made.full_kv_indices))
        )
        assert not (some & whole).any()
        assert torch.equal(whole, blocks.all(2))
        assert torch.equal(some | whole, blocks.any(2))


def _dense(count: Tensor, order: Tensor) -> Tensor:
    """(rows, columns): whether each block is listed."""
    listed = torch.zeros(order.shape[2:], dtype=torch.bool)
    for row, (n, columns) in enumerate(zip(count[0, 0].tolist(), order[0, 0])):
        listed[row, columns[:n].long()] = True
    return listed


# ---- refusals --------------------------------------------------------------------------------------


CUDA, CPU = torch.device("cuda"), torch.device("cpu")
PLAIN = Case(CUDA, torch.bfloat16, 8, 2, 128, 128, Mask(-1, 0), 10)
REFUSED = [  # (backend, case, reason)
    ("flash", PLAIN._replace(device=CPU), "needs a CUDA device"),
    ("flash", PLAIN._replace(dtype=torch.float32), "allowed are fp16 and bf16"),
    ("flash", PLAIN._replace(head_dim=100, head_dim_v=100), "multiple of 8"),
    ("flash", PLAIN._replace(head_dim=264, head_dim_v=264), "up to 256"),
    ("flash", PLAIN._replace(head_dim=192), "v has D=128 and k D=192"),
    ("flash", PLAIN._replace(max_logit=True), "no max_logit"),
    ("flash", PLAIN._replace(segments=65536), "at most 65535"),
    ("flex", PLAIN._replace(dtype=torch.float64), "allowed are fp32, fp16 and bf16"),
    ("flex", PLAIN._replace(head_dim=8), "from 16 to 256"),
    ("flex", PLAIN._replace(device=CPU), "no backward on CPUs"),
    ("flex", PLAIN._replace(device=CPU, grad=False, max_logit=True), "no max_logit on CPUs"),
]


@pytest.mark.parametrize(("name", "case", "why"), REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_a_backend_refuses(name: str, case: Case, why: str) -> None:
    """A backend names the reason why it refuses a case, and "math" refuses none."""
    assert re.search(why, BACKENDS[name].refuses(case))
    assert BACKENDS["math"].refuses(case) is None


def test_the_version_of_flash_that_is_active_has_its_own_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    many = PLAIN._replace(segments=65536)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    assert BACKENDS["flash"].refuses(PLAIN) is None
    for version, most in (("FA3", 9), ("FA4", 10)):
        monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda v=version: v, raising=False)
        assert BACKENDS["flash"].refuses(many) == f"the device has compute capability 8.6; allowed are 9 to {most}"


def test_a_refused_backend_is_not_replaced() -> None:
    """A backend selected by name raises its reason; "auto" selects another backend."""
    q, schedule = torch.randn(6, 2, 16, requires_grad=True), Schedule(torch.tensor([0, 6]), 6)
    for name, why in (("flash", "CUDA"), ("flex", "no backward"), ("flash5", "one of 'auto'")):
        with pytest.raises(InvalidInput, match=f"backend (is )?'{name}'.*{why}"):
            all_gather_attention(q, q, q, schedule, backend=name)
    assert all_gather_attention(q, q, q, schedule).shape == q.shape


def test_without_process_groups() -> None:
    """A group of one process works without torch.distributed."""
    assert not dist.is_initialized()
    case = Attention("alone", RAGGED, pads=8, spare=3)
    made, pack = make(case), case.pack
    q, k, v, dout = (x.clone().requires_grad_() for x in made.inputs)
    schedule = Schedule(pack.cu_seqlens, pack.tokens, cu_seqlens_padded=pack.cu_seqlens_padded)
    out = all_gather_attention(q, k, v, schedule, check=True)
    for name, x, want in zip(("out", "dq", "dk", "dv"), (out, *torch.autograd.grad(out, (q, k, v), dout)), made.want):
        assert_rows(x, want, made.spare, 1e-10 * largest(want), name)


BATCH: dict[str, Any] = {"cu_seqlens": torch.tensor([0, 2, 6]), "tokens": 6}
GOOD: dict[str, Any] = {"q": (6, 4, 8), "k": (6, 2, 8), "v": (6, 2, 8)}
INVALID: list[tuple[dict[str, Any], str]] = [
    ({"layout": "tdh"}, "layout is 'tdh'; it must be one of 'thd'"),
    ({"q": (6, 4)}, r"q is a tensor of shape \(6, 4\), .*; it must be \(T, H, D\), .*; layout is 'thd'"),
    ({"layout": "bshd"}, r"it must be \(B, S, H, D\), .*; layout is 'bshd'"),
    ({"k": (5, 2, 8), "v": (5, 2, 8)}, r"k is a tensor of shape \(5, 2, 8\), .*; it must be \(6, H, 8\), .* like q"),
    ({"v": (6, 1, 8)}, r"v is a tensor of shape \(6, 1, 8\), .*; it must be \(6, 2, D\), float32, on cpu like k"),
    ({"k": (6, 2, 4)}, r"k is a tensor of shape \(6, 2, 4\), .*; it must be \(6, H, 8\), float32, on cpu like q"),
    ({"k": (6, 3, 8), "v": (6, 3, 8)}, r"q is \(T=6, H=4, .*; k's H must divide q's"),
    ({"v": (6, 2, 0)}, r"v is \(T=6, H=2, D=0\); .* H and D be at least 1"),
    ({"q": torch.zeros(6, 4, 8, dtype=torch.int32)}, r"q is int32; it must be \(T, H, D\), float32 or .* float64"),
    ({name: torch.zeros(6, 2, 8, dtype=torch.int32) for name in "qkv"}, "q is int32; it must be"),
    ({"v": torch.zeros(6, 2, 8, dtype=torch.float16)}, r"v is float16; it must be \(6, 2, D\), float32, on cpu like k"),
    ({"k": None}, "k is None; it must be a tensor"),
    ({"q": torch.zeros(6, 4, 8).to_sparse()}, "q is a tensor of shape .* it must be a strided tensor"),
    ({"v": torch.nested.nested_tensor([torch.zeros(6, 2, 8)])}, "v is a nested tensor; it must be a strided tensor"),
    ({"schedule": None}, "schedule is None; it must be a Schedule"),
    ({"cu_seqlens": [0, 6]}, r"cu_seqlens is \[0, 6\]; it must be a tensor"),
    ({"cu_seqlens": torch.tensor([0.0, 6.0])}, "int32 or int64"),
    ({"cu_seqlens": torch.tensor([0])}, "those of one sequence at least"),
    ({"cu_seqlens": torch.zeros(2, 2).int()}, r"\(sequences \+ 1,\)"),
    ({"cu_seqlens": torch.zeros(3).int().to("meta")}, "q is on cpu but cu_seqlens on meta"),
    ({"cu_seqlens_padded": torch.tensor([0, 6])}, r"cu_seqlens_padded is .*; it must be \(3,\), .* like cu_seqlens"),
    ({"tokens": 2**31 - 1}, "tokens are more than"),
    ({"tokens": 7}, r"q has 6 rows; it must have 7 \(tokens=7, rank 0 of 1\)"),
    ({"tokens": -1}, "tokens is -1"),
    ({"max_seqlen": 2.5}, "max_seqlen is 2.5"),
    ({"rule": "striped"}, "rule is 'striped'; it must be one of 'dual_chunk'"),
    ({"window": (-2, 0)}, r"window\[0\] is -2; it must be a whole number of at least -1"),
    ({"window": 5}, "window is 5"),
    ({"head_groups": 3}, "head_groups is 3, which does not divide k's H=2"),
    ({"head_groups": 0}, "head_groups is 0"),
    ({"backend": "best"}, "backend is 'best'"),
    ({"layout": "bshd", **dict.fromkeys("qkv", (2, 3, 2, 8))}, "make the schedule with Schedule.fixed"),
]


@pytest.mark.parametrize(("change", "message"), INVALID, ids=[message for _, message in INVALID])
def test_invalid_input(change: dict[str, Any], message: str) -> None:
    """Wrong arguments are refused before anything is sent, and the message names them."""
    of_batch = BATCH.keys() | {"cu_seqlens_padded", "max_seqlen", "rule", "window"}
    batch = BATCH | {name: x for name, x in change.items() if name in of_batch}
    call = GOOD | {name: x for name, x in change.items() if name not in of_batch}
    call = {name: torch.zeros(x) if isinstance(x, tuple) and name in "qkv" else x for name, x in call.items()}
    with pytest.raises(InvalidInput, match=message):
        all_gather_attention(**{"schedule": Schedule(**batch), **call})


def test_invalid_schedules_and_partitions() -> None:
    """Schedules and partitions for another rank, batch or group are refused."""
    cu, x = torch.tensor([0, 6]), torch.zeros(3, 1, 8)
    of_two = Schedule(cu, 6, cp_size=2, cp_rank=1)
    quantized = torch._empty_affine_quantized((6, 1, 8), scale=1.0, zero_point=0, dtype=torch.qint8)
    for message, call in (
        ("made with cp_size and cp_rank", lambda: all_gather_attention(x, x, x, of_two)),
        (
            "make the schedule with Schedule.fixed",
            lambda: all_gather_attention(*[x[None]] * 3, layout="bshd", schedule=of_two),
        ),
        (
            r"q has 2 rows; it must have 3 \(tokens=6, rank 1 of 2\)",
            lambda: all_gather_attention(*[x[:2]] * 3, schedule=of_two),
        ),
        ("cp_rank is 2; it must be below cp_size=2", lambda: Partition(cu, 6, cp_size=2, cp_rank=2)),
        (
            r"x has 3 rows; it must have 6 \(tokens=6\)",
            lambda: Partition(cu, 6, cp_size=2, cp_rank=0).shard(x),
        ),
        ("x has no rows; it must have 6", lambda: Partition(cu, 6).shard(torch.zeros(()))),
        ("made with cp_size", lambda: Partition(cu, 6, cp_size=2, cp_rank=0).unshard(x)),
        (
            r"x has 2 rows; it must have 3 \(tokens=6, rank 0 of 2\)",
            lambda: Partition(cu, 6, cp_size=2, cp_rank=0).unshard(x[:2]),
        ),
        (
            "shard: x is .*, qint8, on cpu; it must be .* neither quantized nor",
            lambda: Partition(cu, 6).shard(quantized),
        ),
        ("unshard: x is .*, qint8, on cpu; it must be", lambda: Partition(cu, 6).unshard(quantized)),
        ("tokens is None", lambda: Partition(cu, None)),
        ("seqlen is 5; it must be a multiple", lambda: Schedule.fixed(2, 5, "cpu", cp_size=2, cp_rank=0)),
    ):
        with pytest.raises(InvalidInput, match=message):
            call()


# ---- attention, on processes -----------------------------------------------------------------------


class Attention(NamedTuple):
    """A case: sequences, a mask, and options. pads: lengths with padding, or a multiple to pad to."""

    name: str
    lengths: tuple[int, ...]
    pads: tuple[int, ...] | int = 1
    spare: int = 0
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    rule: str = "dual_chunk"
    heads: tuple[int, int, int, int] = (4, 2, 8, 8)  # Hq, Hk, D, Dv
    dtype: torch.dtype = torch.float64
    options: dict[str, Any] = {}  # noqa: RUF012
    scale: float | None = None
    backend: str = "auto"
    grad: bool = True
    max_seqlen: int | None = None

    @property
    def mask(self) -> Mask:
        return Mask(self.window[0], 0 if self.causal else self.window[1])

    @property
    def pack(self) -> Pack:
        pads = self.pads
        if isinstance(pads, int):
            pads = tuple(-(-n // pads) * pads for n in self.lengths)
        return Pack(list(self.lengths), list(pads), sum(pads) + self.spare)

    def schedule(self, device: str = "cpu", **more: Any) -> Schedule:
        """The batch and the mask. more: other arguments of `Schedule`."""
        pack = self.pack
        padded = None if pack.cu_seqlens_padded is None else pack.cu_seqlens_padded.to(device)
        words: dict[str, Any] = {"causal": self.causal, "window": self.window, "rule": self.rule}
        words |= {"max_seqlen": self.max_seqlen, **more}
        return Schedule(pack.cu_seqlens.to(device), pack.tokens, cu_seqlens_padded=padded, **words)


RAGGED = (37, 0, 141, 29, 1, 3)
CASES = [
    Attention("causal", RAGGED),
    Attention("full", RAGGED, causal=False),
    Attention("window", RAGGED, window=(20, 0)),
    Attention("two-sided", RAGGED, causal=False, window=(7, 5)),
    Attention("to the right alone", RAGGED, causal=False, window=(-1, 6)),
    Attention("to the left and all behind", RAGGED, causal=False, window=(6, -1)),
    Attention("diagonal", RAGGED, window=(0, 0)),
    Attention("causal takes the right side away", RAGGED, window=(9, 9)),
    Attention("one long, short window", (301,), window=(5, 0)),
    Attention("one long, two-sided", (301,), causal=False, window=(4, 6)),
    Attention("D1: unequal", (36, 16), causal=False, window=(8, 8)),
    Attention("D1: one alone", (258,), causal=False, window=(50, 50)),
    Attention("contiguous, causal", RAGGED, rule="contiguous"),
    Attention("contiguous, full", RAGGED, rule="contiguous", causal=False),
    Attention("contiguous, two-sided", RAGGED, rule="contiguous", causal=False, window=(6, 4)),
    Attention("contiguous, short window", (203, 98), rule="contiguous", window=(3, 0)),
    Attention("padded, causal", RAGGED, pads=16),
    Attention("padded, full", RAGGED, pads=16, causal=False, spare=5),
    Attention("padded, window", RAGGED, pads=16, window=(11, 0)),
    Attention("padded, two-sided", RAGGED, pads=16, causal=False, window=(11, 3), spare=7),
    Attention("padded, short window", (150, 40), pads=(160, 64), window=(2, 0)),
    Attention("all padding", (0, 0), pads=(9, 16)),
    Attention("spare", RAGGED, spare=21),
    Attention("spare, two-sided", RAGGED, spare=21, causal=False, window=(5, 5)),
    Attention("shorter than ranks", (1, 2, 1, 3, 2), causal=False),
    Attention("more ranks than tokens", (2, 1)),
    Attention("more ranks than tokens, two-sided", (2, 1), causal=False, window=(1, 1)),
    Attention("more ranks than tokens, window", (3,), window=(1, 0), rule="contiguous"),
    Attention("no tokens", (0, 0)),
    Attention("MHA", RAGGED, heads=(3, 3, 8, 8)),
    Attention("MQA", RAGGED, heads=(4, 1, 8, 8), causal=False),
    Attention("Dv larger", RAGGED, heads=(4, 2, 6, 10)),
    Attention("Dv smaller", RAGGED, heads=(2, 2, 24, 16), causal=False, window=(9, 9), pads=8),
    Attention("scale", RAGGED, scale=0.5),
    Attention("kept", RAGGED, options={"keep_gathered": True}),
    Attention("kept, groups", RAGGED, heads=(8, 4, 8, 6), options={"keep_gathered": True, "head_groups": 4}),
    Attention("groups", RAGGED, heads=(8, 4, 8, 6), options={"head_groups": 2}, pads=8),
    Attention("groups, exchange", (203, 98), heads=(4, 4, 8, 8), window=(3, 0), options={"head_groups": 4}),
    Attention("checked", RAGGED, pads=16, options={"check": True}, max_seqlen=144),
    Attention("fp32", RAGGED, dtype=torch.float32, pads=8),
    Attention("fp32, two-sided", RAGGED, dtype=torch.float32, causal=False, window=(7, 5)),
    Attention("bf16", RAGGED, dtype=torch.bfloat16, pads=8),
    Attention("bf16, exchange", (203, 98), dtype=torch.bfloat16, window=(3, 0)),
    Attention("fp16", RAGGED, dtype=torch.float16, causal=False),
    Attention("flex", RAGGED, dtype=torch.float32, backend="flex", grad=False, pads=8),
    Attention("flex, two-sided", RAGGED, dtype=torch.float32, backend="flex", grad=False, causal=False, window=(7, 5)),
]
CLOSE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}


class Made(NamedTuple):
    """Inputs of the whole batch, and the outputs that they must have."""

    inputs: list[Tensor]  # q, k, v, dout
    want: tuple[Tensor, ...]
    scale: float
    spare: Tensor  # (T): whether a row is padding or spare


def make(case: Attention, poison: bool = True) -> Made:
    """The inputs of a case. Rows that may not be read are NaN if `poison`."""
    pack = case.pack
    hq, hk, d, dv = case.heads
    generator = torch.Generator().manual_seed(len(case.name))
    inputs = [
        torch.randn(pack.tokens, *size, generator=generator, dtype=torch.float64).to(case.dtype)
        for size in ((hq, d), (hk, d), (hk, dv), (hq, dv))
    ]
    scale = d**-0.5 if case.scale is None else case.scale
    spare = torch.tensor([sequence < 0 for sequence, _ in pack.places], dtype=torch.bool)
    if pack.tokens == 0:
        sizes = ((0, hq, dv), (0, hq, d), (0, hk, d), (0, hk, dv), (0, hq))
        return Made(inputs, (*(torch.zeros(*s).double() for s in sizes), torch.full((hq,), -torch.inf)), scale, spare)
    want = oracle(*inputs, visible(pack, case.mask), scale)
    if poison:
        for x in inputs:
            x[spare] = torch.nan
    return Made(inputs, want, scale, spare)


def assert_rows(got: Tensor | None, want: Tensor, spare: Tensor | None, atol: float, what: str) -> None:
    assert got is not None, what
    got = got.detach().cpu()
    torch.testing.assert_close(got.double(), want.double(), rtol=0, atol=atol, msg=lambda text: f"{what}: {text}")
    if spare is not None:
        assert not got[spare].any(), f"{what}: padding is not zero"


def largest(x: Tensor) -> float:
    """The scale of rounding errors, at least 1: sums over many rows are larger than 1."""
    return max([1.0, *x.abs().flatten().tolist()])


def check_attention(case: Attention, device: str = "cpu") -> None:
    """Check one case on this rank: out, lse, max_logit and the gradients of its rows."""
    pack, made = case.pack, make(case)
    part = Partition(pack.offsets, pack.tokens, rule=case.rule)
    rows = part.indices.long()
    q, k, v, dout = (part.shard(x).to(device).requires_grad_(case.grad) for x in made.inputs)
    max_logit = case.backend in ("auto", "math")
    with torch.set_grad_enabled(case.grad):
        asked: dict[str, Any] = {"return_lse": True, "return_max_logit": max_logit, "backend": case.backend}
        asked |= {"softmax_scale": case.scale, **case.options}
        out, lse, *rest = all_gather_attention(q, k, v, case.schedule(device), **asked)
    if case.grad:
        out.backward(dout)
    # No assertion before this line: if a rank fails earlier, the others wait for ever.
    atol, spare = CLOSE[case.dtype], made.spare[rows]
    assert out.dtype == case.dtype
    assert lse.dtype == torch.float32
    assert_rows(out, made.want[0][rows], spare, atol, "out")
    assert_rows(lse, made.want[4][rows], None, max(atol, 1e-5), "lse")
    if max_logit:
        assert_rows(rest[0], made.want[5], None, max(atol, 1e-5), "max_logit")
    for name, x, want in zip(("dq", "dk", "dv"), (q, k, v), made.want[1:4] if case.grad else ()):
        assert_rows(x.grad, want[rows], spare, atol * largest(want), name)


def check_fixed(layout: str) -> None:
    """A batch of sequences of one length, with an odd number of rows on each rank."""
    size = dist.get_world_size()
    lengths = (5 * size,) * 3
    case = Attention(layout, lengths, causal=False, window=(6, 2))
    made, pack = make(case), case.pack
    rows = Partition(pack.cu_seqlens, pack.tokens).indices.long()

    def cut(x: Tensor) -> Tensor:
        x = x[rows].unflatten(0, (3, 5))
        return x if layout == "bshd" else x.transpose(0, 1).contiguous()

    q, k, v, dout = (cut(x).requires_grad_() for x in made.inputs)
    schedule = Schedule.fixed(3, 5 * size, "cpu", causal=False, window=(6, 2))
    out, lse = all_gather_attention(q, k, v, schedule, layout=layout, return_lse=True)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    for name, x, want in zip(("out", "dq", "dk", "dv"), (out, *gradients), made.want):
        assert_rows(x, cut(want), None, 1e-10, name)
    assert_rows(lse, cut(made.want[4]), None, 1e-5, "lse")


ROPED = [
    Attention("causal", RAGGED, dtype=torch.float32, spare=3),
    Attention("padded, two-sided", RAGGED, pads=16, causal=False, window=(11, 3), spare=7, dtype=torch.float32),
    Attention("contiguous", RAGGED, pads=8, rule="contiguous", spare=5, dtype=torch.float32),
    Attention("kept", RAGGED, dtype=torch.float32, options={"keep_gathered": True}),
    Attention("groups", RAGGED, heads=(8, 4, 8, 8), dtype=torch.float32, options={"head_groups": 2}),
    Attention("exchange", (203, 98), heads=(4, 4, 8, 8), window=(3, 0), dtype=torch.float32),
    Attention("Dv larger", RAGGED, heads=(4, 2, 6, 10), dtype=torch.float32),
    Attention("more ranks than tokens", (2, 1), dtype=torch.float32),
]


def check_rope(case: Attention) -> None:
    """`rope=` equals apply_rope at each row's position and then attention, with the same gradients."""
    pack, made = case.pack, make(case)
    part = Partition(pack.offsets, pack.tokens, rule=case.rule)
    angles = torch.outer(torch.arange(210.0), torch.tensor([1.0, 0.1, 0.01]))
    words: dict[str, Any] = {"freqs": angles, "interleaved": True, "rotary_dim": 6}
    results = []
    for fused in (True, False):
        q, k, v, dout = (part.shard(x).requires_grad_() for x in made.inputs)
        if fused:
            out = all_gather_attention(q, k, v, case.schedule(), rope=Rope(**words), **case.options)
        else:
            rotated = jitrope.apply_rope(q, k, **said(layout="thd", position_ids=part.position_ids, **words))
            out = all_gather_attention(*rotated, v, case.schedule(), **case.options)
        results.append((out, *torch.autograd.grad(out, (q, k, v), dout)))
    spare = made.spare[part.indices.long()]
    for name, got, want in zip(("out", "dq", "dk", "dv"), *results):
        assert_rows(got, want, spare, 1e-5 * largest(want), name)


def check_rope_is_refused() -> None:
    q, tokens = torch.randn(4, 2, 8), 4 * dist.get_world_size()
    schedule = Schedule(torch.tensor([0, tokens]), tokens)
    with pytest.raises(InvalidInput, match=r"rope is \{\}; it must be a Rope"):
        all_gather_attention(q, q, q, schedule, rope={})  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="all_gather_attention: pass cos and sin, or one of"):
        all_gather_attention(q, q, q, schedule, rope=Rope())


def check_unshard() -> None:
    """unshard inverts shard for any tensor, and its gradient is the sum of all ranks' gradients."""
    cu, tokens, size, rank = torch.tensor([0, 5, 5, 16]), 19, dist.get_world_size(), dist.get_rank()
    for rule in RULES:
        part = Partition(cu, tokens, rule=rule)
        several = torch.randn(tokens, 2, 3, generator=torch.Generator().manual_seed(0))
        for x in (torch.arange(tokens), several, several[:, :0]):
            assert torch.equal(part.unshard(part.shard(x)), x)
        local = torch.randn(part.rows, 2, dtype=torch.float64, requires_grad=True)
        weight = torch.arange(2.0 * tokens, dtype=torch.float64).view(tokens, 2)
        (part.unshard(local) * weight * (rank + 1)).sum().backward()
        torch.testing.assert_close(local.grad, weight[part.indices.long()] * sum(range(1, size + 1)))


def check_schedule_of_many_layers() -> None:
    """One schedule serves many calls, with gradients and without."""
    case = Attention("schedule", RAGGED, causal=False, window=(5, 5))
    made, pack = make(case), case.pack
    part, schedule = (
        Partition(pack.offsets, pack.tokens),
        Schedule(pack.cu_seqlens, pack.tokens, causal=False, window=(5, 5)),
    )
    q, k, v, _ = (part.shard(x) for x in made.inputs)
    with torch.inference_mode():
        assert_rows(all_gather_attention(q, k, v, schedule), made.want[0][part.indices.long()], None, 1e-10, "")
    out = all_gather_attention(q.requires_grad_(), k, v, schedule)
    out.sum().backward()
    assert q.grad is not None
    assert k.grad is None


COUNTS = [  # (case, collectives of the forward, collectives of the backward), by kind
    ("causal", {"all_gather_into_tensor": 1}, {"all_gather_into_tensor": 1, "all_to_all_single": 1}),
    ("kept", {"all_gather_into_tensor": 1}, {"all_to_all_single": 1}),
    ("groups", {"all_gather_into_tensor": 2}, {"all_gather_into_tensor": 2, "all_to_all_single": 2}),
    ("one long, short window", {"all_to_all_single": 1}, {"all_to_all_single": 2}),
]


def check_collectives() -> None:
    """Keys and values go in one collective, and their gradients in one. One rank alone has no collectives."""
    for name, forward, backward in COUNTS:
        case = next(case for case in CASES if case.name == name)
        pack, made = case.pack, make(case)
        part = Partition(pack.offsets, pack.tokens)
        q, k, v, dout = (part.shard(x).requires_grad_() for x in made.inputs)
        with CommDebugMode() as there:
            out = all_gather_attention(q, k, v, case.schedule(), **case.options)
        with CommDebugMode() as back:
            out.backward(dout)
        for mode, want in ((there, forward), (back, backward)):
            got = {str(op).split(".")[-1]: n for op, n in mode.get_comm_counts().items() if n}
            assert got == (want if dist.get_world_size() > 1 else {}), (name, got)


def check_subgroup() -> None:
    """Two groups of every other process: ranks are counted in the group."""
    if dist.get_world_size() < 4:
        return
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[dist.get_rank() % 2]
    case = CASES[3]
    made, pack = make(case), case.pack
    part = Partition(pack.offsets, pack.tokens, group=group)
    q, k, v, dout = (part.shard(x).requires_grad_() for x in made.inputs)
    out = all_gather_attention(q, k, v, case.schedule(group=group), **case.options)
    out.backward(dout)
    assert_rows(part.unshard(out.detach()), made.want[0], None, 1e-10, "out")
    assert_rows(part.unshard(k.grad), made.want[2], None, 1e-10, "dk")
    with pytest.raises(InvalidInput, match="not in the group"):
        Partition(pack.offsets, pack.tokens, group=groups[1 - dist.get_rank() % 2])


def check_faults() -> None:
    """`check` refuses differences between ranks, and wrong lengths, on every rank. The group still works then."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tokens = 8 * size
    q = torch.randn(8, 2, 8)
    good = torch.tensor([0, 3, tokens])
    faults: list[tuple[str, dict[str, Any]]] = [
        (r"cu_seqlens is \[0, 5, 4\]; it must ascend from 0", {"cu_seqlens": torch.tensor([0, 5, 4])}),
        (r"cu_seqlens is \[1, 5, 6\]; it must ascend from 0", {"cu_seqlens": torch.tensor([1, 5, 6])}),
        (f"it must ascend from 0 to at most {tokens}", {"cu_seqlens": torch.tensor([0, 3, tokens + 1])}),
        ("more than max_seqlen=4", {"cu_seqlens": good, "max_seqlen": 4}),
        (
            "longer in cu_seqlens than",
            {"cu_seqlens": torch.tensor([0, 4, 5]), "cu_seqlens_padded": torch.tensor([0, 3, 6])},
        ),
    ]
    if size > 1:
        faults += [
            (r"cu_seqlens\[1\] differs between ranks: \[3, 4", {"cu_seqlens": torch.tensor([0, 3 + rank, tokens])}),
            (r"len\(cu_seqlens\) differs", {"cu_seqlens": torch.tensor([0, 3] + [tokens] * (1 + rank % 2))}),
            ("left differs", {"cu_seqlens": good, "window": (rank, 0)}),
            ("rule differs", {"cu_seqlens": good, "rule": RULES[rank % 2]}),
        ]
    for message, options in faults:
        with pytest.raises(InvalidInput, match=message):
            all_gather_attention(q, q, q, Schedule(tokens=tokens, **options), check=True)
    schedule = Schedule(good, tokens)
    if size > 1:
        rope = Rope(freqs=torch.ones(tokens, 4))
        wrong = Schedule(torch.tensor([0, 3 + (tokens if rank else 0), tokens]), tokens, rule="contiguous")
        with pytest.raises(InvalidInput, match="must ascend from 0" if rank else "rank 1 refuses its arguments"):
            all_gather_attention(q, q, q, wrong, rope=rope, check=True)
        for message, words in (
            (r"softmax_scale differs between ranks: \[0.5, 1.5", {"softmax_scale": 0.5 + rank}),
            (r"rope \(rows of its tables\) differs between ranks: \[-1, ", {"rope": rope if rank else None}),
            (r"head_groups differs between ranks: \[1, 2", {"head_groups": 1 + rank % 2}),
        ):
            with pytest.raises(InvalidInput, match=message):
                all_gather_attention(q, q, q, schedule, check=True, **words)
    all_gather_attention(q, q, q, schedule, check=True)
    alone = Schedule(torch.tensor([0, 8]), 8, cp_size=1)
    with pytest.raises(InvalidInput, match="the schedule has no group, so check=True cannot ask"):
        all_gather_attention(q, q, q, alone, check=True)  # the other ranks would wait for this one
    all_gather_attention(q, q, q, alone)


def check_one_refuses_for_all(device: str = "cpu") -> None:
    """With check=True every rank refuses what rank 0 refuses, for any reason."""
    rank, size = dist.get_rank(), dist.get_world_size()
    q = torch.randn(4, 2, 8, device=device)
    schedule = Schedule(torch.tensor([0, 4 * size], device=device), 4 * size)
    odd: list[tuple[str, dict[str, Any]]] = [
        ("q has 3 rows", {"q": q[:3], "k": q[:3], "v": q[:3]}),
        ("layout is 'x'", {"layout": "x"}),
        ("head_groups is 0", {"head_groups": 0}),
        ("backend is 'best'", {"backend": "best"}),
        ("backend 'flash' cannot do this", {"backend": "flash"}),
        ("pass cos and sin, or one of", {"rope": Rope()}),
        ("v is None", {"v": None}),
        ("q is a tensor of shape", {"q": q.to_sparse()}),
    ]
    for message, words in odd:
        with pytest.raises(InvalidInput, match="rank 0 refuses its arguments" if rank else message):
            all_gather_attention(
                **{**dict.fromkeys("qkv", q), **({} if rank else words)}, schedule=schedule, check=True
            )
    rope = Rope(freqs=torch.ones(4 * size, 4, device=device))
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr("jitrope.context_parallel.rotary.resolved", lambda *_: 1 / 0)
        with pytest.raises(InvalidInput if rank else ZeroDivisionError, match="rank 0 refuses" if rank else "division"):
            all_gather_attention(q, q, q, schedule, rope=rope, check=True)
    short = Rope(freqs=torch.ones(4 * size - 1, 4, device=device))
    with pytest.raises(InvalidInput, match=f"rope's tables have {4 * size - 1} rows, but a sequence has {4 * size}"):
        all_gather_attention(q, q, q, schedule, rope=short, check=True)


def check_compiled(case: Attention, device: str = "cpu") -> None:
    """torch.compile of the whole call, with gradients, and export: the results and gradients of the eager call."""
    pack, made = case.pack, make(case)
    part, schedule = Partition(pack.offsets.to(device), pack.tokens), case.schedule(device=device)
    q, k, v, dout = (part.shard(x.to(device)).requires_grad_() for x in made.inputs)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        asked = {"return_lse": True, "return_max_logit": case.backend == "auto", "backend": case.backend}
        out, *rest = all_gather_attention(q, k, v, schedule, **asked, **case.options)
        return schedule.unshard(out), *rest

    class Module(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> Any:
            return run(*tensors)

    torch._dynamo.reset()
    results = [
        *(f(q, k, v) for f in (run, torch.compile(run, backend="aot_eager", fullgraph=True))),
        torch.export.export(Module(), (q.detach(), k.detach(), v.detach())).module()(q, k, v),
    ]
    every, bound = part.unshard(dout.detach()), 1e-12 if case.dtype == torch.float64 else 2e-2
    grads = [torch.autograd.grad(out, (q, k, v), every) for out, *_ in results[:2]]
    for got in results[1:]:
        torch.testing.assert_close(got, results[0], rtol=0, atol=bound, equal_nan=True)
    torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=bound)


def check_a_rank_without_rows_writes_nothing() -> None:
    """rope= of fewer tokens than ranks: k and v of a rank without rows keep their versions, and gradients flow."""
    schedule, rope = Schedule(torch.tensor([0, 1]), 1), Rope(freqs=torch.ones(1, 4))
    q, k, v = (torch.randn(schedule.rows, 2, 8, requires_grad=True) for _ in range(3))
    versions = [x._version for x in (q, k, v)]
    out = all_gather_attention(q, k, v, schedule, rope=rope)
    out.sum().backward()
    assert [x._version for x in (q, k, v)] == versions
    assert all(x.grad is not None and x.grad.shape == x.shape for x in (q, k, v))


def check_mesh() -> None:
    """A DeviceMesh of one axis is its group; one of two axes is refused; DTensors are refused by name."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "cp"))
    cu = torch.tensor([0, 4 * size])
    assert repr(Schedule(cu, 4 * size, group=mesh["cp"])) == repr(Schedule(cu, 4 * size))
    with pytest.raises(
        InvalidInput, match=r"group is DeviceMesh.*; it must be a process group, a DeviceMesh of one axis"
    ):
        Partition(cu, 4 * size, group=mesh)
    x = distribute_tensor(torch.randn(4, 2, 8), mesh["cp"], [Replicate()])
    with pytest.raises(InvalidInput, match=r"q is a DTensor; pass q.to_local\(\)"):
        all_gather_attention(x, x, x, Schedule(cu, 4 * size))


COMPILED = ("causal", "one long, short window", "groups", "kept", "more ranks than tokens")
CHECKS: list[tuple[str, Callable[[], None]]] = [
    *((case.name, lambda case=case: check_attention(case)) for case in CASES),
    ("bshd", lambda: check_fixed("bshd")),
    ("sbhd", lambda: check_fixed("sbhd")),
    *((f"rope, {case.name}", lambda case=case: check_rope(case)) for case in ROPED),
    ("rope, refused", check_rope_is_refused),
    ("unshard", check_unshard),
    ("schedule", check_schedule_of_many_layers),
    ("collectives", check_collectives),
    ("subgroup", check_subgroup),
    ("faults", check_faults),
    ("one refuses for all", check_one_refuses_for_all),
    *((f"compiled, {case.name}", lambda case=case: check_compiled(case)) for case in CASES if case.name in COMPILED),
    ("a rank without rows", check_a_rank_without_rows_writes_nothing),
    ("mesh", check_mesh),
]


def process(rank: int, size: int, folder: str) -> None:
    """Run all checks on one rank, and write failures into its file. A barrier after each keeps the ranks together."""
    torch.set_num_threads(1)
    minute = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=size, timeout=minute)
    failed = []
    for name, run in CHECKS:
        try:
            run()
        except Exception:
            failed.append(f"rank {rank}, {name}: {traceback.format_exc()}")
        dist.barrier()
    Path(folder, f"rank{rank}").write_text("\n".join(failed))
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 4])
def test_on_processes(size: int, tmp_path: Path) -> None:
    """Every check above, on 1, 2 and 4 gloo processes."""
    torch.multiprocessing.spawn(process, (size, str(tmp_path)), size)
    failed = [(tmp_path / f"rank{rank}").read_text() for rank in range(size)]
    assert not any(failed), "\n".join(failed)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_balance(case: Attention) -> None:
    """The busiest rank's pairs of a query and a key that it sees over the mean, from the oracle's mask."""
    pack, size = case.pack, 3
    seen = visible(pack, case.mask).sum(1) if pack.tokens else torch.zeros(0)
    parts = [case.schedule(cp_size=size, cp_rank=rank) for rank in range(size)]
    work = [int(seen[part.indices.long()].sum()) for part in parts]
    want = max(work) * size / sum(work) if sum(work) else 1.0
    assert all(part.balance() == pytest.approx(want) for part in parts)


def test_autocast_with_groups_of_heads() -> None:
    """Autocast to the other 16-bit dtype changes nothing."""
    q, schedule = torch.randn(10, 4, 8, dtype=torch.bfloat16), Schedule(torch.tensor([0, 7, 10]), 10)
    want = all_gather_attention(q, q, q, schedule, head_groups=2)
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(all_gather_attention(q, q, q, schedule, head_groups=2), want)


def test_a_table_shorter_than_max_seqlen_is_refused() -> None:
    q, schedule = torch.randn(10, 4, 8), Schedule(torch.tensor([0, 7, 10]), 10, max_seqlen=7)
    with pytest.raises(InvalidInput, match="rope's tables have 5 rows; they must have max_seqlen=7"):
        all_gather_attention(q, q, q, schedule, rope=Rope(freqs=torch.rand(5, 4)))


def test_a_check_that_cannot_wait_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    q, schedule = torch.randn(3, 10, 4, 8), Schedule(torch.tensor([0, 7, 10]), 10)
    checked = torch.compile(lambda *q: all_gather_attention(*q, schedule, check=True), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="check=True waits for the device"):
        checked(*q)
    monkeypatch.setattr("jitrope.torch_state.capturing", lambda x: x is schedule.cu_seqlens)
    with pytest.raises(InvalidInput, match="all_gather_attention: check=True waits for the device"):
        all_gather_attention(*q, schedule, check=True)


@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
def test_sequences_without_tokens(layout: str) -> None:
    shape = (2, 0) if layout == "bshd" else (0, 2)
    q, k, v = (torch.randn(*shape, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    schedule = Schedule.fixed(2, 0, "cpu") if layout == "sbhd" else Schedule(torch.zeros(3, dtype=torch.int32), 0)
    out, lse, most = all_gather_attention(q, k, v, schedule, layout=layout, return_lse=True, return_max_logit=True)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:-1])
    assert most.tolist() == [-torch.inf] * 4
    out.sum().backward()
    assert [x.grad.shape for x in (q, k, v)] == [x.shape for x in (q, k, v)]
    with pytest.raises(InvalidInput, match="q has B=0 in layout"):
        all_gather_attention(*(torch.randn(0, 4, 2, 8) for _ in range(3)), schedule, layout="bshd")


LATE = """
import weakref, torch, torch.distributed as dist
import jitrope.context_parallel
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
import torch.distributed.nn.functional  # as Dynamo does, which the first step of an optimizer imports
group = weakref.ref(dist.group.WORLD)
dist.destroy_process_group()
assert group() is None
"""


def test_a_destroyed_group_is_gone() -> None:
    """Also if Dynamo was imported after the group was made. Else its threads are alive when Python ends."""
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
