"""Packed batches under context parallelism in plain torch: the oracle of the tests and the path that CPU tensors take.

Sizes are known to the host, lengths are not: nothing here waits for a device. What has no row is -1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..plan.partition import (
    Mask,
    Rows,
    before,
    capacity,
    chunks_of,
    count,
    exchange_rows,
    local_rows,
    number_of_chunks,
    rank_of,
    rows_per_rank,
)


class Shape(NamedTuple):
    """What the host knows of a sharded batch."""

    tokens: int  # of the whole batch, spare ones included
    sequences: int
    cp_size: int
    cp_rank: int
    rule: str = "dual_chunk"

    @property
    def of(self) -> int:
        """Chunks of a sequence."""
        return number_of_chunks(self.cp_size, self.rule)

    @property
    def chunks(self) -> tuple[int, ...]:
        """This rank's."""
        return chunks_of(self.cp_rank, self.cp_size, self.rule)

    @property
    def rows(self) -> int:
        """Tokens of this rank."""
        return int(local_rows(self.tokens, self.cp_rank, self.cp_size, self.rule))

    @property
    def capacity(self) -> int:
        """Rows that every rank's shard has room for."""
        return rows_per_rank(self.tokens, self.cp_size)


class Segments(NamedTuple):
    """Attention of a rank's queries as plain variable-length attention.

    A segment is a run of queries that see one run of keys: a chunk of a sequence, or under a full mask all that the
    rank has of it. cu_seqlens_q, cu_seqlens_k (int32, segments + 1): their offsets. A segment's last query stands at
    its last key, so that masks counted from the end (bottom right) are right for each; where keys lie behind a chunk's
    queries (`Mask.extends`), queries that nobody reads are added to it. Elsewhere queries stay where they are, and
    padding makes segments without keys.
    key_rows (keys): where each key is among the gathered rows. gathered_rows (chunks, gathered): the inverse, for each
    of the rank's chunks; under a full mask one. query_rows (queries), output_rows (rows): where each query comes from,
    where each row's output is; None where queries stay. send_rows (sent), sent_rows (cp_size, rows): which row is sent
    where; None where all are gathered.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    key_rows: Tensor
    gathered_rows: Tensor
    query_rows: Tensor | None
    output_rows: Tensor | None
    send_rows: Tensor | None
    sent_rows: Tensor | None


def layout(shape: Shape, mask: Mask, padded: bool) -> dict[str, tuple[int, ...]]:
    """The size of each table of `Segments`, and of what its kernels keep between them; () where it is not there."""
    exchange = exchange_rows(shape.tokens, shape.cp_size, shape.sequences, mask, shape.rule)
    keys, queries = capacity(shape.tokens, shape.cp_rank, shape.cp_size, shape.sequences, mask, shape.rule)
    parts = 1 if mask.full else len(shape.chunks)
    offsets = (shape.sequences * (parts + (padded and not mask.extends)) + 1,)
    gathered = shape.cp_size * shape.capacity if exchange is None else sum(row[shape.cp_rank] for row in exchange)
    return {
        "cu_seqlens_q": offsets,
        "cu_seqlens_k": offsets,
        "key_rows": (keys,),
        "gathered_rows": (parts, gathered),
        "query_rows": (queries,) if mask.extends else (),
        "output_rows": (shape.rows,) if mask.extends else (),
        "send_rows": () if exchange is None else (sum(exchange[shape.cp_rank]),),
        "sent_rows": () if exchange is None else (shape.cp_size, shape.rows),
        "pairs": () if exchange is None else (2 * shape.cp_size, shape.sequences + 1),
    }


def split(flat: Tensor, sizes: dict[str, tuple[int, ...]]) -> dict[str, Tensor | None]:
    """The tables of one buffer, by their names; None for those that are not there."""
    parts = flat.split([math.prod(size) if size else 0 for size in sizes.values()])
    return {name: part.view(size) if size else None for (name, size), part in zip(sizes.items(), parts)}


# ---- the partition ---------------------------------------------------------------------------------


def _offsets(cu_seqlens: Tensor, shape: Shape) -> Tensor:
    """With the spare tokens as one more sequence."""
    return torch.cat((cu_seqlens.long(), cu_seqlens.new_full((1,), shape.tokens, dtype=torch.long)))


def _place(token: Tensor, offsets: Tensor, shape: Shape, cp_rank: int) -> tuple[Tensor, Tensor]:
    """(sequence, position) of a rank's tokens."""
    local = local_rows(offsets, cp_rank, shape.cp_size, shape.rule)
    sequence = torch.searchsorted(local[1:].contiguous(), token, right=True).clamp(max=len(offsets) - 2)
    first, end = offsets[sequence], offsets[sequence + 1]
    rest = token - local[sequence]
    position = torch.zeros_like(token)
    for chunk in chunks_of(cp_rank, shape.cp_size, shape.rule):
        size = count(end, chunk, shape.of) - count(first, chunk, shape.of)
        start = before(end, chunk, shape.of) - before(first, chunk, shape.of)
        position = torch.where((rest >= 0) & (rest < size), start + rest, position)
        rest = rest - size
    return sequence, position


def _chunk_at(position: Tensor, first: Tensor, end: Tensor, of: int) -> Tensor:
    """Which chunk of the sequence [first, end) a position is in."""
    ends = [before(end, chunk + 1, of) - before(first, chunk + 1, of) for chunk in range(of)]
    chunk = torch.zeros_like(position)
    for e in ends[:-1]:
        chunk = chunk + (position >= e)
    return chunk


def _row_of(position: Tensor, first: Tensor, end: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """(rank, its row) of a position of the sequence [first, end)."""
    of = shape.of
    chunk = _chunk_at(position, first, end, of)
    rank = rank_of(chunk, shape.cp_size, shape.rule)
    ranks = torch.arange(shape.cp_size, device=position.device)
    owned = torch.stack([local_rows(first, int(r), shape.cp_size, shape.rule) for r in range(shape.cp_size)])
    row = owned.gather(0, rank[None])[0] if len(ranks) else position
    other = of - 1 - chunk  # its owner's first chunk, if this is the second
    ahead = (end + of - 1 - other) // of - (first + of - 1 - other) // of
    if of > shape.cp_size:
        row = row + torch.where(chunk >= shape.cp_size, ahead, 0)
    return rank, row + position - (before(end, chunk, of) - before(first, chunk, of))


def partition_indices(cu_seqlens: Tensor, shape: Shape) -> Tensor:
    """The token of the batch that each of a rank's rows is: (rows), int32."""
    offsets = _offsets(cu_seqlens, shape)
    token = torch.arange(shape.rows, device=cu_seqlens.device)
    sequence, position = _place(token, offsets, shape, shape.cp_rank)
    return (offsets[sequence] + position).int()


def position_ids(cu_seqlens: Tensor, shape: Shape) -> Tensor:
    """The position in its sequence of each of a rank's rows: (rows), int32. That of spare rows is 0."""
    offsets = _offsets(cu_seqlens, shape)
    row = torch.arange(shape.rows, device=cu_seqlens.device)
    sequence, position = _place(row, offsets, shape, shape.cp_rank)
    return torch.where(sequence < shape.sequences, position, 0).int()


def to_ranks(cu_seqlens: Tensor, shape: Shape) -> Tensor:
    """For each row of all ranks' shards, one behind the other: its token, or -1. (cp_size * capacity), int32."""
    out = cu_seqlens.new_full((shape.cp_size, shape.capacity), -1, dtype=torch.int32)
    for rank in range(shape.cp_size):
        tokens = partition_indices(cu_seqlens, shape._replace(cp_rank=rank))
        out[rank, : len(tokens)] = tokens
    return out.view(-1)


def to_sequences(cu_seqlens: Tensor, shape: Shape) -> Tensor:
    """The inverse: where each token is among all ranks' shards. (tokens), int32."""
    offsets = _offsets(cu_seqlens, shape)
    token = torch.arange(shape.tokens, device=cu_seqlens.device)
    sequence = torch.searchsorted(offsets[1:].contiguous(), token, right=True)
    rank, row = _row_of(token - offsets[sequence], offsets[sequence], offsets[sequence + 1], shape)
    return (rank * shape.capacity + row).int()


# ---- attention's segments --------------------------------------------------------------------------


def _seen(
    lengths: Tensor, offsets: Tensor, shape: Shape, mask: Mask, cp_rank: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(first position, queries, first key, last key + 1) of a rank's segments: (sequences, segments of each)."""
    first, end, of = offsets[:-1, None], offsets[1:, None], shape.of
    chunks = torch.tensor(chunks_of(cp_rank, shape.cp_size, shape.rule), device=offsets.device)
    start = before(end, chunks, of) - before(first, chunks, of)
    size = (end + of - 1 - chunks) // of - (first + of - 1 - chunks) // of
    queries = torch.minimum((lengths[:, None] - start).clamp(min=0), size)
    if mask.full:
        start, queries = start[:, :1], queries.sum(1, keepdim=True)
        low, high = torch.zeros_like(start), lengths[:, None]
    else:
        low = (start - mask.left).clamp(min=0) if mask.left >= 0 else torch.zeros_like(start)
        high = lengths[:, None].expand_as(start)
        if mask.right >= 0:
            high = torch.minimum(high, start + queries + mask.right)
    none = queries == 0
    return start, queries, torch.where(none, 0, low), torch.where(none, 0, high)


def _overlap(low: Tensor, high: Tensor, others: list[tuple[Tensor, Tensor]]) -> Tensor:
    """How many positions of [low, high) the ranges `others` have, one by one."""
    return sum((torch.minimum(high, end) - torch.maximum(low, first)).clamp(min=0) for first, end in others)  # type: ignore[return-value]


def _needed(start: Tensor, low: Tensor, high: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The keys of a rank's segments as ranges that do not overlap, each (sequences)."""
    ranges = []
    last = torch.zeros_like(low[:, 0])
    for c in range(low.shape[1]):
        a, b = torch.maximum(low[:, c], last), high[:, c]
        ranges.append((a, torch.maximum(a, b)))
        last = torch.maximum(last, b)
    return ranges


def segments(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, shape: Shape, mask: Mask) -> Segments:
    """See `Segments`; the sizes are those of `partition.capacity` and `partition.exchange_rows`."""
    device = cu_seqlens.device
    real = cu_seqlens.long()
    offsets = real if cu_seqlens_padded is None else cu_seqlens_padded.long()
    lengths = real.diff()
    start, queries, low, high = _seen(lengths, offsets, shape, mask, shape.cp_rank)
    keys = high - low
    local = local_rows(offsets, shape.cp_rank, shape.cp_size, shape.rule)
    n_keys, n_queries = capacity(
        shape.tokens, shape.cp_rank, shape.cp_size, shape.sequences, mask, shape.rule
    )  # fmt: skip
    taken = torch.where(queries > 0, high - start, 0) if mask.extends else queries
    padded = cu_seqlens_padded is not None and not mask.extends
    if padded:
        taken = torch.cat((taken, (local.diff() - queries.sum(1))[:, None]), 1)
        keys = torch.cat((keys, torch.zeros_like(keys[:, :1])), 1)
    each = keys.shape[1]
    cu_q, cu_k = (torch.cat((x.new_zeros(1), x.reshape(-1).cumsum(0))) for x in (taken, keys))

    # where keys come from
    exchange = exchange_rows(shape.tokens, shape.cp_size, shape.sequences, mask, shape.rule)
    row = torch.arange(n_keys, device=device)
    segment = torch.searchsorted(cu_k[1:].contiguous(), row, right=True).clamp(max=max(0, each * shape.sequences - 1))
    sequence, part = segment // each, (segment % each).clamp(max=start.shape[1] - 1)
    there = row < cu_k[-1]
    position = torch.where(there, low[sequence, part] + row - cu_k[segment], 0)
    first, end = offsets[sequence], offsets[sequence + 1]
    rank, at = _row_of(position, first, end, shape)
    gathered = shape.cp_size * shape.capacity
    send_rows = sent_rows = None
    if exchange is None:
        at = rank * shape.capacity + at
    else:
        at, gathered = _exchanged(position, sequence, rank, lengths, offsets, shape, mask, exchange)
        send_rows, sent_rows = _sent(lengths, offsets, shape, mask, exchange)
    key_rows = torch.where(there, at, -1)
    back = torch.full((start.shape[1], gathered + 1), -1, device=device)
    back[part, torch.where(there, at, gathered)] = row
    back = back[:, :gathered].contiguous()

    query_rows = output_rows = None
    if mask.extends:
        query_rows, output_rows = _queries(cu_q, start, queries, offsets, local, shape, n_queries)
    index = [
        x if x is None else x.int() for x in (cu_q, cu_k, key_rows, back, query_rows, output_rows, send_rows, sent_rows)
    ]
    return Segments(*index)  # type: ignore[arg-type]


def _queries(
    cu_q: Tensor, start: Tensor, queries: Tensor, offsets: Tensor, local: Tensor, shape: Shape, n_queries: int
) -> tuple[Tensor, Tensor]:
    """Where queries come from, with some behind each chunk that nobody reads; where outputs are."""
    device, each = cu_q.device, start.shape[1]
    row = torch.arange(n_queries, device=device)
    segment = torch.searchsorted(cu_q[1:].contiguous(), row, right=True).clamp(max=max(0, each * shape.sequences - 1))
    sequence, part = segment // each, segment % each
    i = row - cu_q[segment]
    there = (row < cu_q[-1]) & (i < queries[sequence, part])
    first, end = offsets[sequence], offsets[sequence + 1]
    ahead = torch.zeros_like(i)
    if each > 1:  # the second chunk lies behind the first
        chunk = shape.chunks[0]
        ahead = torch.where(part > 0, count(end, chunk, shape.of) - count(first, chunk, shape.of), 0)
    query_rows = torch.where(there, local[sequence] + ahead + i, -1)
    output_rows = torch.full((shape.rows + 1,), -1, device=device)
    output_rows[torch.where(there, query_rows, shape.rows)] = row
    return query_rows, output_rows[:-1]


def _pair(
    shape: Shape, mask: Mask, lengths: Tensor, offsets: Tensor, source: int, rank: int
) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]], Tensor]:
    """(what `rank` needs, what `source` has, offsets of what goes from source to rank), each by sequence."""
    start, _, low, high = _seen(lengths, offsets, shape, mask, rank)
    needed = _needed(start, low, high)
    first, end, of = offsets[:-1], offsets[1:], shape.of
    has = [
        (before(end, c, of) - before(first, c, of), before(end, c + 1, of) - before(first, c + 1, of))
        for c in chunks_of(source, shape.cp_size, shape.rule)
    ]
    total = sum(_overlap(low, high, needed) for low, high in has)
    return needed, has, torch.cat((offsets.new_zeros(1), total.cumsum(0)))  # type: ignore[union-attr]


def _count_before(
    position: Tensor, sequence: Tensor, needed: list[tuple[Tensor, Tensor]], has: list[tuple[Tensor, Tensor]]
) -> Tensor:
    there = [(low[sequence], high[sequence]) for low, high in needed]
    return sum(_overlap(low[sequence], torch.minimum(high[sequence], position), there) for low, high in has)  # type: ignore[return-value]


def _exchanged(
    position: Tensor, sequence: Tensor, rank: Tensor, lengths: Tensor, offsets: Tensor, shape: Shape, mask: Mask,
    exchange: Rows,
) -> tuple[Tensor, int]:  # fmt: skip
    """(where a key is among the rows received, how many there are)."""
    at, base = torch.zeros_like(position), 0
    for source in range(shape.cp_size):
        needed, has, sent = _pair(shape, mask, lengths, offsets, source, shape.cp_rank)
        here = base + sent[sequence] + _count_before(position, sequence, needed, has)
        at = torch.where(rank == source, here, at)
        base += exchange[source][shape.cp_rank]
    return at, base


def _sent(lengths: Tensor, offsets: Tensor, shape: Shape, mask: Mask, exchange: Rows) -> tuple[Tensor, Tensor]:
    """Which row goes where, and the inverse."""
    device, rows = offsets.device, shape.rows
    total = sum(exchange[shape.cp_rank])
    send = torch.full((total + 1,), -1, device=device)
    sent = torch.full((shape.cp_size, rows), -1, device=device)
    row = torch.arange(rows, device=device)
    local = local_rows(offsets, shape.cp_rank, shape.cp_size, shape.rule)
    spare = row >= local[-1]
    sequence, position = _place(row, offsets, shape, shape.cp_rank)
    base = 0
    for rank in range(shape.cp_size):
        needed, has, cumulative = _pair(shape, mask, lengths, offsets, shape.cp_rank, rank)
        inside = sum(((position >= low[sequence]) & (position < high[sequence])).int() for low, high in needed) > 0
        at = base + cumulative[sequence] + _count_before(position, sequence, needed, has)
        goes = inside & ~spare  # type: ignore[operator]
        send[torch.where(goes, at, total)] = row
        sent[rank] = torch.where(goes, at, -1)
        base += exchange[shape.cp_rank][rank]
    return send[:-1], sent


# ---- rows --------------------------------------------------------------------------------------------


def move_rows(inputs: Sequence[Tensor], outputs: Sequence[Tensor], index: Tensor | None) -> None:
    """outputs[i][row] = inputs[i][index[row]], or the sum in fp32 of inputs[i][index[n, row]] over n; -1 adds nothing.

    Without an index rows stay where they are, and rows that an input does not have are zero.
    """
    for x, out in zip(inputs, outputs):
        rows = len(out)
        if index is None:
            out[: len(x)] = x[:rows]
            out[len(x) :] = 0
        elif len(x) == 0:
            out.zero_()
        elif index.dim() == 1:
            out.copy_(_taken(x, index))
        else:
            total = torch.zeros_like(out, dtype=torch.promote_types(x.dtype, torch.float32))
            for one in index:
                total += _taken(x, one)
            out.copy_(total)


def _taken(x: Tensor, index: Tensor) -> Tensor:
    there = (index >= 0).view(-1, *[1] * (x.dim() - 1))
    return torch.where(there, x[index.clamp(min=0).long()], torch.zeros((), dtype=x.dtype, device=x.device))


def copy_valid(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], cu_seqlens_padded: Tensor, cu_seqlens: Tensor
) -> None:
    """Copy the rows that are not padding; the others stay as they are."""
    offsets, rows = cu_seqlens_padded.long(), len(outputs[0])
    row = torch.arange(rows, device=offsets.device)
    sequence = torch.searchsorted(offsets[1:].contiguous(), row, right=True).clamp(max=len(offsets) - 2)
    at = row - offsets[sequence]
    valid = (at >= 0) & (at < cu_seqlens.long().diff()[sequence])
    for x, out in zip(inputs, outputs):
        out.copy_(torch.where(valid.view(-1, *[1] * (x.dim() - 1)), x, out))


def zero_tail_(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Rows from cu_seqlens[-1] on become zero."""
    return x.masked_fill_((torch.arange(len(x), device=x.device) >= cu_seqlens[-1]).view(-1, *[1] * (x.dim() - 1)), 0)
