"""`Schedule`: which rows a rank sends, which keys its queries see, and what can be said of them beforehand."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from examples.bench import cp_step
from jitrope.context_parallel import Schedule, all_gather_attention
from jitrope.context_parallel.backends import BACKENDS, Case, Flash, Varlen, key_ranges
from jitrope.context_parallel.schedule import Memory
from jitrope.thd.shape import Mask

from .batches import CASES, Batch, Living, dealt, random_batch, schedule_of, visible


@pytest.mark.parametrize("seed", range(96))
def test_segments(seed: int) -> None:
    """By a schedule's tables every query sees the keys that the mask allows, and inverse tables are inverse.

    The longest segments are within the bounds, and `balance` is the busiest rank's work over the mean.
    """
    batch, cp_size = random_batch(seed)
    shards, want = dealt(batch, cp_size), visible(batch)
    ranks = [schedule_of(batch, cp_size=cp_size, cp_rank=rank) for rank in range(cp_size)]
    tables, exchange = [rank.segments for rank in ranks], ranks[0].exchange
    work = [int(want[tokens].sum()) for tokens in shards]
    for rank, (schedule, table, tokens) in enumerate(zip(ranks, tables, shards)):
        assert schedule.balance() == pytest.approx(max(work) * cp_size / sum(work) if any(work) else 1.0)
        gathered: list[int] = []  # the token of each row that this rank receives, or -1
        for source, rows in enumerate(shards):
            sent = [*range(len(rows)), *[-1] * (schedule.shape.capacity - len(rows))]
            if exchange is not None:
                base = sum(exchange[source][:rank])
                sent = tables[source].send_rows[base : base + exchange[source][rank]].tolist()
            gathered += [-1 if row < 0 else rows[row] for row in sent]
        queries = list(range(len(tokens))) if table.query_rows is None else table.query_rows.tolist()
        assert (len(table.key_rows), len(queries)) == schedule.shape.most(batch.mask)
        keys = [-1 if row < 0 else gathered[row] for row in table.key_rows.tolist()]
        seen, times = torch.zeros(batch.tokens, batch.tokens, dtype=torch.bool), torch.zeros(batch.tokens)
        varlen = schedule.varlen(1.0)
        for query, first, end in zip(queries, *(x.tolist() for x in key_ranges(varlen, len(queries)))):
            if query >= 0:
                assert -1 not in keys[first:end]
                seen[tokens[query], keys[first:end]] = True
                times[tokens[query]] += 1
        assert times.max() <= 1
        assert torch.equal(seen[tokens], want[tokens]), batch
        # Inverse tables.
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
        # Bounds, with max_seqlen and without.
        longest = schedule_of(batch, cp_size=cp_size, cp_rank=rank, max_seqlen=max(1, *batch.slots))
        for bounds in (varlen, longest.varlen(1.0)):
            assert bounds.cu_seqlens_q.diff().max() <= bounds.max_q
            assert bounds.cu_seqlens_k.diff().max() <= bounds.max_k
            assert len(bounds.cu_seqlens_q) - 1 == schedule.most_segments


def test_saving_of_a_window() -> None:
    """With a short window over one long sequence few rows are exchanged. Otherwise all are gathered."""
    cu = torch.tensor([0, 4096])
    # Chunks have 512 tokens. Of a chunk that is d chunks before, ceil(64 / d) rows are sent, except to its own rank.
    assert Schedule(cu, 4096, cp_size=4, cp_rank=0, window=(64, 0)).saving == 1 - 776 / (3 * 4096)
    for causal, window in ((True, (-1, 0)), (False, (-1, -1)), (True, (4000, 0)), (False, (64, -1))):
        assert Schedule(cu, 4096, cp_size=4, cp_rank=0, causal=causal, window=window).saving == 0
    assert Schedule(torch.tensor([0, 0]), 0, cp_size=2, cp_rank=0, window=(4, 0)).saving == 0


def test_mask() -> None:
    """causal takes the right side away. A side of all tokens is no bound, also one that no int32 holds."""
    cu = torch.tensor([0, 7, 10])
    assert Schedule(cu, 10).mask == (-1, 0)
    assert Schedule(cu, 10, causal=False).mask == (-1, -1)
    assert Schedule(cu, 10, window=(9, 9)).mask == (9, 0)
    assert Schedule(cu, 10, causal=False, window=(9, 5)).mask == (9, 5)
    for size in (10, 11, 2**31 - 1, 2**31, 2**32, 2**40, 2**63 - 1):
        assert Schedule(cu, 10, window=(size, size)).mask == (-1, 0)
        assert Schedule(cu, 10, causal=False, window=(size, size)).mask == (-1, -1)


@pytest.mark.parametrize(("cp_size", "padded", "apart"), [(2, 1.1, 1.01), (4, 1.15, 1.02), (8, 1.2, 1.04)])
def test_padding_cut_apart_balances_the_work(cp_size: int, padded: float, apart: float) -> None:
    """The busiest rank's work over the mean, of 100 batches padded to their longest sequence. Ranks have equal rows."""
    rng, found = random.Random(0), torch.zeros(2)
    for _ in range(100):
        n = rng.choice([1, 2, 4, 8, 16])
        lengths = [min(1024, 1 + int(256 * rng.lognormvariate(0, 0.8))) for _ in range(n)]
        batch = Batch(tuple(lengths), (max(lengths),) * n, separate=True)
        both = [schedule_of(x, cp_size=cp_size, cp_rank=0) for x in (replace(batch, separate=False), batch)]
        assert both[0].rows == both[1].rows
        found += torch.tensor([x.balance() for x in both])
    assert found[0] > 100 * padded
    assert found[1] < 100 * apart


# ---- memory --------------------------------------------------------------------------------------------


KINDS = ("causal", "full", "window", "two-sided", "to the right alone", "one long, short window",
         "one long, two-sided", "contiguous, causal", "contiguous, two-sided", "contiguous, short window",
         "padded, causal", "padded, full", "padded, two-sided", "apart, causal", "apart, two-sided",
         "spare", "MQA", "Dv larger", "bf16")  # fmt: skip


@pytest.mark.parametrize("ranks", [(1, 0), (2, 0), (3, 2), (4, 1), (8, 7)])
@pytest.mark.parametrize("name", KINDS)
def test_memory_is_what_lives(name: str, ranks: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """To the byte, in both directions, with k and v kept or gathered again, in one head group and in several."""
    monkeypatch.setitem(BACKENDS, "shapes", cp_step.SHAPES)
    dtype, (*_, d, dv) = CASES[name].dtype, CASES[name].heads
    for keeps, (groups, hq, hk) in product((False, True), ((1, 4, 2), (2, 4, 2), (2, 2, 2), (4, 8, 4), (3, 3, 3))):
        words: dict[str, Any] = {"keep_gathered": keeps, "head_groups": groups}
        schedule = schedule_of(CASES[name], cp_size=ranks[0], cp_rank=ranks[1])
        with cp_step.one_rank_of(schedule):
            sizes = ((hq, d), (hk, d), (hk, dv), (hq, dv))
            q, k, v, dout = (torch.randn(schedule.rows, *size, dtype=dtype).requires_grad_() for size in sizes)
            _ = schedule.segments, schedule.sum_rows  # the tables, once a batch
            with Living() as living:
                out = all_gather_attention(q, k, v, schedule, backend="shapes", **words)
                kept, forward, living.most = living.bytes, living.most, 0
                grads = torch.autograd.grad(out, (q, k, v), dout.detach())
        saved = q.nbytes + (0 if keeps else k.nbytes + v.nbytes)  # the caller's tensors that the call keeps
        assert [x.shape for x in grads] == [x.shape for x in (q, k, v)]
        found = Memory(kept + saved, forward, living.most - kept)
        assert schedule.memory((hq, hk), (d, dv), dtype, **words) == found, words


def test_flash_keeps_its_log_sum_exp() -> None:
    """4 bytes for each query and head of q, and torch's state of random numbers, which has 24 bytes."""
    with FakeTensorMode():
        q, k = (torch.empty(rows, heads, 64, dtype=torch.float16, device="cuda") for rows, heads in ((10, 4), (21, 2)))
        offsets = torch.empty(3, dtype=torch.int32, device="cuda")
        case = Case(q.device, q.dtype, 4, 2, 64, 64)
        result = Flash().forward(q, k, k, Varlen(offsets, offsets, 10, 21, Mask(-1, 0), 1.0), case)
        assert sum(x.nbytes for x in result.saved) == 4 * 4 * 10 + 24
