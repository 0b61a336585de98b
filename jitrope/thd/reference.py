"""Packed batches under context parallelism in plain torch: the oracle of the tests and the path that CPU tensors take.

Sizes are known to the host; lengths are read by `fill_segments` and `correct` alone. A row that is missing is -1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.errors import InvalidInput
from ..plan.partition import (
    Mask,
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
from .spec import STEPS


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

    @property
    def all_rows(self) -> int:
        """Rows of all ranks' shards, one behind the other."""
        return self.cp_size * self.capacity


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

    @classmethod
    def of(cls, flat: Tensor, shape: Shape, mask: Mask, padded: bool) -> Segments:
        """The tables of one buffer; see `layout`."""
        tables = split(flat, layout(shape, mask, padded))
        return cls(**{name: tables[name] for name in cls._fields})


def layout(shape: Shape, mask: Mask, padded: bool) -> dict[str, tuple[int, ...]]:
    """The size of each table of `Segments`, and of what its kernels keep between them; () where it is not there."""
    known = type(shape.tokens) is int and type(shape.sequences) is int  # a traced size is not
    return (_kept_layout if known else _layout)(shape, mask, padded)


def _layout(shape: Shape, mask: Mask, padded: bool) -> dict[str, tuple[int, ...]]:
    exchange = exchange_rows(shape.tokens, shape.cp_size, shape.sequences, mask, shape.rule)
    keys, queries = capacity(shape.tokens, shape.cp_rank, shape.cp_size, shape.sequences, mask, shape.rule)
    parts = 1 if mask.full else len(shape.chunks)
    offsets = (shape.sequences * (parts + (padded and not mask.extends)) + 1,)
    gathered = shape.all_rows if exchange is None else sum(row[shape.cp_rank] for row in exchange)
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


_kept_layout = lru_cache(maxsize=256)(_layout)


def empty_segments(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, shape: Shape, mask: Mask) -> Tensor:
    """One buffer for all tables, full of -1; int32."""
    sizes = layout(shape, mask, cu_seqlens_padded is not None).values()
    return cu_seqlens.new_full((sum(math.prod(size) for size in sizes if size),), -1, dtype=torch.int32)


def split(flat: Tensor, sizes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """The tables (Tensor | None) of one buffer, by their names; None for those that are not there."""
    parts = flat.split([math.prod(size) if size else 0 for size in sizes.values()])
    return {name: part.view(size) if size else None for (name, size), part in zip(sizes.items(), parts)}


# ---- the partition ---------------------------------------------------------------------------------


def _places(cu_seqlens: Tensor, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """(sequence, position in it, rank) of each token of the batch; spare tokens are one more sequence."""
    offsets = torch.cat((cu_seqlens.long(), cu_seqlens.new_full((1,), shape.tokens, dtype=torch.long)))
    token = torch.arange(shape.tokens, device=cu_seqlens.device)
    sequence = torch.searchsorted(offsets[1:].contiguous(), token, right=True)
    first, end = offsets[sequence], offsets[sequence + 1]
    chunk = torch.zeros_like(token)
    for c in range(1, shape.of):
        chunk += token - first >= before(end, c, shape.of) - before(first, c, shape.of)
    return sequence, token - first, rank_of(chunk, shape.cp_size, shape.rule)


def to_ranks(cu_seqlens: Tensor, shape: Shape) -> Tensor:
    """For each row of all ranks' shards, one behind the other: its token, or -1. (cp_size * capacity), int32."""
    tokens = _places(cu_seqlens, shape)[2].argsort(stable=True)  # each rank has its tokens in their order
    counts = [local_rows(shape.tokens, rank, shape.cp_size, shape.rule) for rank in range(shape.cp_size)]
    out = cu_seqlens.new_full((shape.cp_size, shape.capacity), -1, dtype=torch.int32)
    for row, own in zip(out, tokens.split(counts)):
        row[: len(own)] = own
    return out.view(-1)


def to_sequences(cu_seqlens: Tensor, shape: Shape) -> Tensor:
    """The inverse: where each token is among all ranks' shards. (tokens), int32."""
    token = to_ranks(cu_seqlens, shape).long()
    out = token.new_empty(shape.tokens + 1, dtype=torch.int32)
    out[token] = torch.arange(len(token), dtype=torch.int32, device=token.device)  # -1 is the last
    return out[:-1]


def table(cu_seqlens: Tensor, map: str, rows: int, shape: Shape) -> Tensor:
    """The sources of `rows` rows under a map, from the first of shape.cp_rank on; (rows), int32."""
    if map == "to_sequences":
        return to_sequences(cu_seqlens, shape)
    token = to_ranks(cu_seqlens, shape)[shape.cp_rank * shape.capacity :][:rows]
    if map == "to_ranks":
        return token
    sequence, position, _ = _places(cu_seqlens, shape)
    return torch.where(sequence < shape.sequences, position, 0)[token.long()].int()  # any table has a first row


# ---- attention's segments --------------------------------------------------------------------------


def _seen(lengths: Tensor, offsets: Tensor, shape: Shape, mask: Mask) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(first query, queries, first key, keys) of a rank's segments: (sequences, segments of each), in tokens."""
    first, end, of = offsets[:-1, None], offsets[1:, None], shape.of
    chunks: Any = torch.tensor(shape.chunks, device=offsets.device)
    start = before(end, chunks, of) - before(first, chunks, of)
    queries = torch.minimum((lengths[:, None] - start).clamp(min=0), count(end, chunks, of) - count(first, chunks, of))
    if mask.full:
        start, queries = start[:, :1], queries.sum(1, keepdim=True)
    low = torch.zeros_like(start) if mask.left < 0 else (start - mask.left).clamp(min=0)
    high = lengths[:, None].expand_as(start)
    if mask.right >= 0:
        high = torch.minimum(high, start + queries + mask.right)
    return first + start, queries, first + low, torch.where(queries > 0, high - low, 0)


def _ranges(first: Tensor, size: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(number, range, place in it) of the numbers of ranges, one range behind the other."""
    first, size = first.flatten(), size.flatten()
    which = torch.arange(len(size), device=size.device).repeat_interleave(size)
    place = torch.arange(len(which), device=size.device) - (size.cumsum(0) - size)[which]
    return first[which] + place, which, place


def fill_segments(flat: Tensor, cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, shape: Shape, mask: Mask) -> None:
    """Write the tables of `Segments` into a buffer full of -1."""
    tables = split(flat, layout(shape, mask, cu_seqlens_padded is not None))
    offsets = (cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded).long()
    lengths = cu_seqlens.long().diff()
    start, queries, low, keys = _seen(lengths, offsets, shape, mask)
    place = to_sequences(offsets, shape)  # of each token, among the rows that are gathered
    own = place - shape.cp_rank * shape.capacity
    if tables["send_rows"] is not None:
        place = _exchange(tables, lengths, offsets, own, shape, mask)

    token, segment, _ = _ranges(low, keys)
    row = torch.arange(len(token), dtype=torch.int32, device=flat.device)
    tables["key_rows"][: len(row)] = place[token]
    tables["gathered_rows"][segment % start.shape[1], place[token]] = row

    taken = queries
    if mask.extends:
        taken = torch.where(queries > 0, low + keys - start, 0)
        token, segment, behind = _ranges(start, queries)
        query = (taken.flatten().cumsum(0) - taken.flatten())[segment] + behind
        tables["query_rows"][query] = own[token]
        tables["output_rows"][own[token]] = query.int()
    elif cu_seqlens_padded is not None:  # padding: queries without keys
        rest = local_rows(offsets, shape.cp_rank, shape.cp_size, shape.rule).diff() - queries.sum(1)
        taken, keys = torch.cat((queries, rest[:, None]), 1), torch.nn.functional.pad(keys, (0, 1))
    for name, sizes in (("cu_seqlens_q", taken), ("cu_seqlens_k", keys)):
        tables[name].copy_(torch.nn.functional.pad(sizes.flatten().cumsum(0), (1, 0)))


def _exchange(
    tables: dict[str, Any], lengths: Tensor, offsets: Tensor, own: Tensor, shape: Shape, mask: Mask
) -> Tensor:
    """Write which rows are sent, where each token's is `own`; returns where tokens are among the rows received."""
    rows = exchange_rows(shape.tokens, shape.cp_size, shape.sequences, mask, shape.rule)
    assert rows is not None
    owner, place = _places(offsets, shape)[2], torch.full_like(own, -1)

    def needed(rank: int, source: int) -> tuple[Tensor, Tensor]:
        """The tokens of `source` that `rank` needs, in their order, and numbers for them."""
        _, _, low, keys = _seen(lengths, offsets, shape._replace(cp_rank=rank), mask)
        some = torch.zeros_like(owner, dtype=torch.bool)
        some[_ranges(low, keys)[0]] = True
        found = torch.nonzero(some & (owner == source))[:, 0]
        return found, torch.arange(len(found), dtype=torch.int32, device=own.device)

    sent = received = 0
    for other in range(shape.cp_size):
        token, number = needed(shape.cp_rank, other)
        place[token] = received + number
        token, number = needed(other, shape.cp_rank)
        tables["send_rows"][sent : sent + len(token)] = own[token]
        tables["sent_rows"][other, own[token]] = sent + number
        sent, received = sent + rows[shape.cp_rank][other], received + rows[other][shape.cp_rank]
    return place


# ---- rows --------------------------------------------------------------------------------------------


def move_rows(inputs: Sequence[Tensor], outputs: Sequence[Tensor], index: Tensor | None) -> None:
    """See `ops.move_rows`."""
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
    return torch.where(
        _by_row(index >= 0, x), x[index.clamp(min=0).long()], torch.zeros((), dtype=x.dtype, device=x.device)
    )


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
        out.copy_(torch.where(_by_row(valid, x), x, out))


def zero_tail(x: Tensor, cu_seqlens: Tensor) -> None:
    """Rows from cu_seqlens[-1] on become zero."""
    x.masked_fill_(_by_row(torch.arange(len(x), device=x.device) >= cu_seqlens[-1], x), 0)


def _by_row(of_rows: Tensor, x: Tensor) -> Tensor:
    """A value of each row of x, to go with all of its elements."""
    return of_rows.view(-1, *[1] * (x.dim() - 1))


# ---- ring attention's corrections --------------------------------------------------------------------


def halves(cu_seqlens: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(sequence, position, is it in the second half, row among those of its half) of each row of a rank's shard.

    Rows before the first sequence or behind the last have the sequence -1. Halves are the two chunks of each sequence.
    """
    offsets = cu_seqlens.long()
    row = torch.arange(rows, device=cu_seqlens.device)
    sequence = torch.searchsorted(offsets[1:].contiguous(), row, right=True)
    outside = (sequence == len(offsets) - 1) | (row < offsets[0])
    sequence = sequence.clamp(max=max(0, len(offsets) - 2))
    first, end = offsets[sequence], offsets[(sequence + 1).clamp(max=len(offsets) - 1)]
    size = count(end, 0, 2) - count(first, 0, 2)
    position = row - first
    second = position >= size
    inside = torch.where(second, position - size + count(first, 1, 2), position + count(first, 0, 2))
    return torch.where(outside, -1, sequence), position, second, inside


def correct(
    quantity: str,
    first: str,
    second: str,
    packed: bool,
    offsets: Tensor,
    rows: int,
    out: Tensor | None,
    step: Tensor | None,
    lse: Tensor | None,
    lse_step: Tensor | None,
) -> None:
    """One step's log-sum-exp, outputs or gradients into those of the steps before it.

    out, step: (rows, H, D). lse, lse_step: (H, rows) if packed, else (B, H, rows). first, second: "nothing", "add" or
    "copy", with each half of a sequence; see `spec.CorrectionSpec`.

    Raises:
        InvalidInput: the sequences have more rows than a tensor; nothing was written.
    """
    sequence, position, in_second, inside = halves(offsets, rows)
    done = torch.where(in_second, STEPS.index(second), STEPS.index(first))
    row = torch.nonzero((sequence >= 0) & (done > 0))[:, 0]
    if not len(row):
        return
    sequence, position, in_second, inside, copied = (
        x[row] for x in (sequence, position, in_second, inside, done == STEPS.index("copy"))
    )
    of_halves = "nothing" in (first, second)
    step_row = inside if of_halves else row
    begin = offsets.long()[sequence]  # row `begin` of a batch is row count(begin) among those of its half
    begin = torch.where(in_second, count(begin, 1, 2), count(begin, 0, 2))
    columns = (row, step_row) if packed else (position, inside - begin if of_halves else position)
    labels = ("lse", "second_half_lse_seqlen" if quantity == "read_lse" else "lse_per_step")
    for label, x, column in zip(labels, (lse, lse_step), columns):
        needed = int(column.max()) + 1
        if x is not None and needed > x.shape[-1]:
            raise InvalidInput(f"{label} is for {x.shape[-1]} rows; by cu_seqlens there are {needed}")
    heads = slice(None)
    at, at_step = ((heads, column) if packed else (sequence, heads, column) for column in columns)
    if quantity in ("lse", "read_lse"):
        assert lse is not None
        assert lse_step is not None
        to, to_at = (lse, at) if quantity == "lse" else (lse_step, at_step)
        to[to_at] = lse[at] if quantity == "read_lse" else torch.logaddexp(lse[at], lse_step[at_step])
        return
    assert out is not None
    assert step is not None
    x = step[step_row]
    if lse is not None and lse_step is not None:
        factor = torch.exp(lse_step[at_step] - lse[at])
        factor = (factor.t() if packed else factor)[..., None]
        x = torch.where(x == 0, 0.0, x.float() * factor).to(out.dtype)
    out[row] = torch.where(copied[:, None, None], x, (out[row].float() + x.float()).to(out.dtype))
