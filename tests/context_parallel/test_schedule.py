"""`Schedule`: which rows a rank sends, which keys its queries see, and what can be said of them beforehand."""

from __future__ import annotations

import pytest
import torch

from jitrope.context_parallel import Schedule
from jitrope.context_parallel.backends import key_ranges

from .batches import dealt, random_batch, schedule_of, visible


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
