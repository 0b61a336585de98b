"""The sizes of a sharded batch. No length is read, so each is a bound that holds for sequences of any length."""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

from ..base import partition
from ..base.partition import before, count
from ..torch_state import is_traced

Rows = tuple[tuple[int, ...], ...]


class Mask(NamedTuple):
    """A query at position p sees the keys of its sequence from p - left to p + right; -1: no bound."""

    left: int = -1
    right: int = 0

    @property
    def full(self) -> bool:
        """Whether every query sees all keys of its sequence."""
        return self.left < 0 and self.right < 0

    @property
    def extends(self) -> bool:
        """Whether keys may come after the last query of a rank. Such keys need their own queries: see `Segments`."""
        return self.right != 0 and not self.full


class Shape(NamedTuple):
    """A batch and one of its ranks."""

    tokens: int  # of the whole batch, including spare ones
    sequences: int
    cp_size: int
    cp_rank: int
    rule: str = "dual_chunk"

    @property
    def of(self) -> int:
        """Chunks of a sequence."""
        return partition.number_of_chunks(self.cp_size, self.rule)

    @property
    def chunks(self) -> tuple[int, ...]:
        """This rank's chunks of each sequence."""
        return partition.chunks_of(self.cp_rank, self.cp_size, self.rule)

    def local(self, offsets: Any) -> Any:
        """This rank's offsets for offsets into the batch; see `partition.local_rows`."""
        return partition.local_rows(offsets, self.cp_rank, self.cp_size, self.rule)

    @property
    def rows(self) -> int:
        """Tokens of this rank."""
        return int(self.local(self.tokens))

    @property
    def capacity(self) -> int:
        """The rows that fit in every rank's shard. Every rank has this number of tokens or one fewer."""
        return -(-self.tokens // self.cp_size)

    @property
    def all_rows(self) -> int:
        """The total rows of all ranks' shards."""
        return self.cp_size * self.capacity

    def segments(self, mask: Mask, padded: bool) -> int:
        """The number of `Segments`, including empty ones."""
        return self.sequences * ((1 if mask.full else len(self.chunks)) + (padded and not mask.extends))

    def most(self, mask: Mask) -> tuple[int, int]:
        """The most (keys, queries) of this rank; see `Segments`."""
        if mask.full:
            return self.tokens, self.rows
        keys = queries = 0
        for chunk in self.chunks:
            own, left = count(self.tokens, chunk, self.of), before(self.tokens, chunk, self.of)
            right = self.tokens - own - left
            left = left if mask.left < 0 else min(left, self.sequences * mask.left)
            right = right if mask.right < 0 else min(right, self.sequences * mask.right)
            keys, queries = keys + left + own + right, queries + own + right
        return keys, queries

    def exchange(self, mask: Mask) -> Rows | None:
        """rows[source][rank]: the most keys of `source` that `rank` needs; None: an exchange saves nothing.

        A sequence needs at most ceil(window / d) keys of a chunk that is d chunks away, because the chunks between hold
        the rest. None if this exceeds three quarters of the rows of an all-gather, which needs no packing by rank.
        """
        if self.cp_size == 1 or mask.left < 0 or mask.right < 0:
            return None
        # traced sizes are not kept: they may change
        known = not is_traced() and type(self.tokens) is int and type(self.sequences) is int
        return (_kept_exchange if known else _exchange)(self._replace(cp_rank=0), mask)


def _exchange(shape: Shape, mask: Mask) -> Rows | None:
    ranks = [shape._replace(cp_rank=rank) for rank in range(shape.cp_size)]

    def rows_between(source: Shape, rank: Shape) -> int:
        keys = 0
        for chunk, by in product(source.chunks, rank.chunks):
            own, reach = int(count(shape.tokens, chunk, shape.of)), mask.left if chunk < by else mask.right
            keys += own if chunk == by else min(own, shape.sequences * -(-reach // abs(by - chunk)))
        return min(source.rows, keys)

    rows = tuple(tuple(rows_between(source, rank) for rank in ranks) for source in ranks)
    moved = sum(map(sum, rows)) - sum(rows[rank][rank] for rank in range(shape.cp_size))
    return rows if 4 * moved <= 3 * (shape.cp_size - 1) * shape.all_rows else None


_kept_exchange = lru_cache(maxsize=256)(_exchange)
