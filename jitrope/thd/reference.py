"""Packed batches under context parallelism in plain torch: the oracle of the tests and the code for CPU tensors.

In every table -1 marks a missing row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from ..base import partition
from ..base.arguments import shown
from ..base.errors import InvalidInput
from ..base.partition import before, count
from .shape import Mask, Shape
from .spec import PARTITIONED, STEPS


class Segments(NamedTuple):
    """Attention of a rank's queries as plain variable-length attention.

    A segment is a run of queries that see one run of keys: a chunk of a sequence, or under a full mask all queries
    that the rank has of a sequence. The last query of a segment is at its last key, so masks counted from the end
    (bottom right) are correct for every segment. If keys come after a chunk's queries (`Mask.extends`), dummy queries
    are added to the chunk. Otherwise queries keep their places, and padding forms segments without keys. All tables
    are int32. Those that a case does not need are None.
    """

    cu_seqlens_q: Tensor  # (segments + 1), offsets of the segments
    cu_seqlens_k: Tensor
    key_rows: Tensor  # (keys), the gathered row of each key
    gathered_rows: Tensor  # (chunks, gathered), the inverse for each of the rank's chunks; one under a full mask
    query_rows: Tensor | None  # (queries), the source row of each query
    output_rows: Tensor | None  # (rows), the query of each row's output
    send_rows: Tensor | None  # (sent), the rows to send, in rank order
    sent_rows: Tensor | None  # (cp_size, rows), the place of each row among the rows sent to each rank

    @classmethod
    def of(cls, flat: Tensor, shape: Shape, mask: Mask, padded: bool) -> Segments:
        """The tables of one buffer; see `split`."""
        cu_seqlens_q, cu_seqlens_k, _, *rows = split(flat, shape, mask, padded)
        return cls(cu_seqlens_q, cu_seqlens_k, *rows)


def split(flat: Tensor, shape: Shape, mask: Mask, padded: bool) -> list[Any]:
    """The tables (Tensor | None) of one buffer, in the order of the kernels' argument block; see `_layout`."""
    sizes = _layout(shape, mask, padded)
    parts = flat.split([math.prod(size) if size else 0 for size in sizes])
    return [part.view(size) if size else None for part, size in zip(parts, sizes)]


def _layout(shape: Shape, mask: Mask, padded: bool) -> list[tuple[int, ...]]:
    """The size of each table of `Segments`, () for None; the third table is one that only the kernels use."""
    exchange, (keys, queries) = shape.exchange(mask), shape.most(mask)
    offsets, parts = (shape.segments(mask, padded) + 1,), 1 if mask.full else len(shape.chunks)
    gathered = shape.all_rows if exchange is None else sum(row[shape.cp_rank] for row in exchange)
    dummies = [(queries,), (shape.rows,)] if mask.extends else [(), ()]
    if exchange is None:
        return [offsets, offsets, (), (keys,), (parts, gathered), *dummies, (), ()]
    pairs, sent = (2 * shape.cp_size, shape.sequences + 1), (sum(exchange[shape.cp_rank]),)
    return [offsets, offsets, pairs, (keys,), (parts, gathered), *dummies, sent, (shape.cp_size, shape.rows)]


def empty_segments(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, shape: Shape, mask: Mask) -> Tensor:
    """One buffer for all tables, int32, full of -1."""
    sizes = _layout(shape, mask, cu_seqlens_padded is not None)
    return cu_seqlens.new_full((sum(math.prod(size) for size in sizes if size),), -1, dtype=torch.int32)


class Move(NamedTuple):
    """A move of rows, of one or two tensors in one launch. The map gives the input row of each output row, its source.
    Without inputs the output is the sources, (rows), int32.

    - "stay": the row in the same place
    - "table": the row in `table` (rows), or the sum in fp32 of the rows in `table` (n, rows)
    - "to_ranks" (from shape.cp_rank on), "to_sequences", "positions": the row from the function `table`
    - "valid": the row in the same place, but padding of the output does not change. cu_seqlens are the offsets with
      padding, and lengths the offsets without
    - "tail": zeros from row cu_seqlens[-1] on; the rows before do not change

    Rows without a source become zero.
    """

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    map: str
    cu_seqlens: Any = None
    lengths: Any = None
    table: Tensor | None = None
    shape: Shape = Shape(0, 0, 1, 0)  # of cu_seqlens' sequences


class Correction(NamedTuple):
    """A step of ring attention, to be joined with the steps before it.

    quantity: "lse" joins lse_step into lse, "read_lse" copies lse into lse_step, "out" adds step to out, scaled by
    exp(lse_step - lse), and "grad" adds step to out. If one half of the sequences has "nothing", step and lse_step have
    only the rows of the other.
    """

    quantity: str
    first: str  # for each first half "nothing", "add" or "copy"
    second: str
    packed: bool
    cu_seqlens: Tensor
    rows: int
    out: Tensor | None = None  # (rows, H, D)
    step: Tensor | None = None
    lse: Tensor | None = None  # (H, rows) if packed, else (B, H, rows)
    lse_step: Tensor | None = None


# ---- the partition ---------------------------------------------------------------------------------


def check_values(cu_seqlens: Tensor, tokens: int, label: str = "") -> None:
    """Refuse wrong offsets, if they can be read without waiting for a device.

    label: of a tensor with so many rows; its offsets may begin above 0.
    """
    ends = cu_seqlens.tolist() if cu_seqlens.device.type == "cpu" else [0]
    if (not label and ends[0] != 0) or ends != sorted(ends) or ends[-1] > tokens:
        most = f"from 0 to at most {tokens}, the number of tokens (tokens, total_tokens or the rows of x)"
        most = f"to at most {tokens}, the rows of {label}" if label else most
        raise InvalidInput(f"cu_seqlens is {shown(ends)}; it must ascend {most}")


def placed(offsets: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """(sequence, place in it) of each of so many rows; before the first sequence -1, after the last one more."""
    row = torch.arange(rows, device=offsets.device)
    sequence = torch.searchsorted(offsets, row, right=True) - 1
    return sequence, row - offsets[sequence]


def cut(offsets: Tensor, shape: Shape) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(sequence, position in it, rank, row among all ranks' shards) of each token; spare tokens are one more sequence.

    Each rank keeps the order of its tokens.
    """
    sequence, position = placed(offsets, shape.tokens)
    ends = torch.cat((offsets, offsets.new_full((1,), shape.tokens)))
    first, end, chunk = ends[sequence], ends[sequence + 1], torch.zeros_like(sequence)
    for c in range(1, shape.of):
        chunk += position >= before(end, c, shape.of) - before(first, c, shape.of)
    rank: Tensor = partition.rank_of(chunk, shape.cp_size, shape.rule)
    among = one_hot(rank, shape.cp_size).cumsum(0).gather(1, rank[:, None])[:, 0]  # the tokens of its rank up to each
    return sequence, position, rank, rank * shape.capacity + among - 1


def table(cu_seqlens: Tensor, map: str, rows: int, shape: Shape) -> Tensor:
    """The source of each of `rows` rows; (rows), int32. The maps:

    - "to_ranks": the token of the batch for each row of shape.cp_rank's shard and of the shards after it
    - "positions": the position of that token in its sequence, 0 for spare tokens
    - "to_sequences": the row in all ranks' shards, concatenated, for each token of the batch
    """
    check_values(cu_seqlens, shape.tokens)
    sequence, position, _, row = cut(cu_seqlens.long(), shape)
    if map == "to_sequences":
        return row.int()
    token = torch.arange(shape.tokens, device=row.device)
    source = token if map == "to_ranks" else torch.where(sequence < shape.sequences, position, 0)
    found = row.new_full((shape.all_rows,), -1, dtype=torch.int32).index_put_((row,), source.int())
    return found[shape.cp_rank * shape.capacity :][:rows]


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
    """(number, range, place in it) of all numbers in ranges, one range after the other."""
    first, size = first.flatten(), size.flatten()
    which = torch.arange(len(size), device=size.device).repeat_interleave(size)
    place = torch.arange(len(which), device=size.device) - (size.cumsum(0) - size)[which]
    return first[which] + place, which, place


def fill_segments(flat: Tensor, cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, shape: Shape, mask: Mask) -> None:
    """Write the tables of `Segments` into a buffer full of -1."""
    tables = Segments.of(flat, shape, mask, cu_seqlens_padded is not None)
    padded = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
    for ends in (cu_seqlens, padded):
        check_values(ends, shape.tokens)
    offsets, lengths = padded.long(), cu_seqlens.long().diff()
    start, queries, low, keys = _seen(lengths, offsets, shape, mask)
    _, _, owner, place = cut(offsets, shape)  # place: of each token, among the rows that are gathered
    own = place - shape.cp_rank * shape.capacity
    if tables.send_rows is not None:
        needed = torch.zeros(shape.cp_size, shape.tokens, dtype=torch.bool, device=flat.device)
        for rank, some in enumerate(needed):
            some[_ranges(*_seen(lengths, offsets, shape._replace(cp_rank=rank), mask)[2:])[0]] = True
        place = _exchange(tables, needed, owner, shape, mask)

    token, segment, _ = _ranges(low, keys)
    row = torch.arange(len(token), dtype=torch.int32, device=flat.device)
    tables.key_rows[: len(row)] = place[token]
    tables.gathered_rows[segment % start.shape[1], place[token]] = row

    taken = queries
    if tables.query_rows is not None and tables.output_rows is not None:
        taken = torch.where(queries > 0, low + keys - start, 0)
        token, segment, position = _ranges(start, queries)
        query = (taken.flatten().cumsum(0) - taken.flatten())[segment] + position
        tables.query_rows[query] = own[token].int()
        tables.output_rows[own[token]] = query.int()
    elif cu_seqlens_padded is not None:  # padding: queries without keys
        rest = shape.local(offsets).diff() - queries.sum(1)
        taken, keys = torch.cat((queries, rest[:, None]), 1), pad(keys, (0, 1))
    for ends, sizes in ((tables.cu_seqlens_q, taken), (tables.cu_seqlens_k, keys)):
        ends.copy_(pad(sizes.flatten().cumsum(0), (1, 0)))


def _exchange(tables: Any, needed: Tensor, owner: Tensor, shape: Shape, mask: Mask) -> Tensor:
    """Write the rows to send, and return each token's place among the rows received, or -1.

    needed: (cp_size, T), the tokens that each rank needs; owner: (T), the rank of each.
    """
    rows: Any = shape.exchange(mask)
    each = torch.arange(shape.cp_size, device=owner.device)[:, None]

    def numbered(some: Tensor, room: list[int]) -> Tensor:
        """The number of each, or -1. The numbers of a rank begin after the room of the ranks before."""
        first = torch.tensor([sum(room[:rank]) for rank in range(shape.cp_size)], device=owner.device)
        return torch.where(some, some.cumsum(1) - 1 + first[:, None], -1)

    sent = numbered(needed[:, owner == shape.cp_rank], rows[shape.cp_rank])
    tables.sent_rows.copy_(sent)
    row = torch.arange(shape.rows, dtype=torch.int32, device=owner.device).expand_as(sent)
    tables.send_rows[sent[sent >= 0]] = row[sent >= 0]
    return numbered(needed[shape.cp_rank] & (owner == each), [row[shape.cp_rank] for row in rows]).amax(0)


# ---- rows --------------------------------------------------------------------------------------------


def move(given: Move) -> None:
    """Move rows; see `Move`."""
    inputs, outputs, map, cu_seqlens, lengths, index, shape = given
    if map in PARTITIONED:
        index = table(cu_seqlens, map, len(outputs[0]), shape)
    elif map == "valid":
        check_values(cu_seqlens, len(outputs[0]), "out")
        sequence, position = placed(cu_seqlens.long(), len(outputs[0]))
        size = pad(lengths.long().diff(), (0, 1))[sequence]  # none after the last sequence
        kept = (position < 0) | (position >= size)
    if not inputs:
        outputs[0].copy_(cast(Tensor, index))
    for x, out in zip(inputs, outputs):
        if map == "tail":
            out.masked_fill_(_by_row(torch.arange(len(out), device=out.device) >= cu_seqlens[-1], out), 0)
        elif map == "valid":
            out.copy_(torch.where(_by_row(kept, x), out, x))
        elif index is None or not len(x):
            out[: len(x)] = x[: len(out)]
            out[len(x) :] = 0
        elif index.dim() == 1:
            out.copy_(_rows(x, index))
        else:
            total = torch.zeros_like(out, dtype=torch.promote_types(x.dtype, torch.float32))
            for one in index:
                total += _rows(x, one)
            out.copy_(total)


def _rows(x: Tensor, index: Tensor) -> Tensor:
    return torch.where(_by_row(index >= 0, x), x[index.clamp(min=0).long()], x.new_zeros(()))


def _by_row(of_rows: Tensor, x: Tensor) -> Tensor:
    """A value of each row of x, in a shape that broadcasts with x."""
    return of_rows.view(-1, *[1] * (x.dim() - 1))


# ---- ring attention's corrections ----------------------------------------------------------------------


def halves(cu_seqlens: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(sequence, position in it, whether in its second half, place in the half, row of the half) of each row of a rank.

    Halves are the two chunks of each sequence; their rows are counted over all sequences. The sequence is -1 before the
    first and after the last.
    """
    offsets = pad(cu_seqlens.long(), (1, 0))  # what is before the first is a sequence too
    shape = Shape(rows, len(cu_seqlens), 2, 0, "contiguous")
    sequence, position, half, row = cut(offsets, shape)
    inside, end = row - half * shape.capacity, len(cu_seqlens) - 1
    place = inside - count(offsets[sequence], half, 2)
    return torch.where(sequence > end, 0, sequence) - 1, position, half > 0, place, inside


def correct(given: Correction) -> None:
    """Join a step (`Correction`). Raises InvalidInput before any write if cu_seqlens has more rows than a tensor."""
    packed, cu_seqlens, rows, out, step, lse, lse_step = cast(Any, given[3:])
    check_values(cu_seqlens, rows, "lse" if out is None else given.quantity)
    sequence, position, second, place, inside = halves(cu_seqlens, rows)
    done = torch.where(second, STEPS.index(given.second), STEPS.index(given.first))
    row = torch.nonzero((sequence >= 0) & (done > 0))[:, 0]
    if not len(row):
        return
    sequence, position, place, inside, done = (x[row] for x in (sequence, position, place, inside, done))
    step_row, step_position = (inside, place) if "nothing" in (given.first, given.second) else (row, position)
    columns = (row, step_row) if packed else (position, step_position)
    labels = ("lse", "second_half_lse_seqlen" if given.quantity == "read_lse" else "lse_per_step")
    for label, x, column in zip(labels, (lse, lse_step), columns):
        needed = int(column.max()) + 1
        if x is not None and needed > x.shape[-1]:
            raise InvalidInput(f"{label} has room for {x.shape[-1]} rows, but cu_seqlens has {needed}")
    of_lse, of_step = ((slice(None), x) if packed else (sequence, slice(None), x) for x in columns)
    if given.quantity == "lse":
        lse[of_lse] = torch.logaddexp(lse[of_lse], lse_step[of_step])
    elif given.quantity == "read_lse":
        lse_step[of_step] = lse[of_lse]
    else:
        x = step[step_row]
        if given.quantity == "out":
            factor = torch.exp(lse_step[of_step] - lse[of_lse])
            factor = (factor.t() if packed else factor)[..., None]
            x = torch.where(x == 0, 0.0, x.float() * factor).to(out.dtype)
        copied = (done == STEPS.index("copy"))[:, None, None]
        out[row] = torch.where(copied, x, (out[row].float() + x.float()).to(out.dtype))
