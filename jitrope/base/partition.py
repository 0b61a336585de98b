"""The rule that cuts a packed batch between context-parallel ranks, as arithmetic on offsets.

Chunk `chunk` of `of` owns `count(offset, chunk, of)` of the first `offset` tokens of the batch, independent of their
sequences. So it owns count(end) - count(first) tokens of a sequence [first, end). These parts are equal if first and
end are multiples of `of`; otherwise they differ by one. A rank's share of the whole batch depends only on the number
of tokens. No padding is needed, and no length is read.

    sum(count(offset, chunk, of) for chunk in range(of)) == offset        (Hermite's identity)

Offsets are Python integers or integer tensors. `templates/sequences.cuh` has the same rule for the device.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

RULES = ("dual_chunk", "contiguous")
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


def number_of_chunks(cp_size: int, rule: str) -> int:
    """The number of chunks of each sequence: two for each rank ("dual_chunk") or one ("contiguous")."""
    return 2 * cp_size if rule == "dual_chunk" and cp_size > 1 else cp_size


def chunks_of(cp_rank: int, cp_size: int, rule: str) -> tuple[int, ...]:
    """The chunks of a rank, in their order in a sequence. Dual chunks balance the work of a causal mask.

    "dual_chunk" (head and tail): cp_rank and 2 cp_size - 1 - cp_rank; "contiguous": cp_rank.
    """
    if number_of_chunks(cp_size, rule) == cp_size:
        return (cp_rank,)
    return cp_rank, 2 * cp_size - 1 - cp_rank


def rank_of(chunk: Any, cp_size: int, rule: str) -> Any:
    """The rank that owns a chunk."""
    return chunk + (chunk >= cp_size) * (number_of_chunks(cp_size, rule) - 1 - 2 * chunk)


def count(offset: Any, chunk: int, of: int) -> Any:
    """The number of the first `offset` tokens of the batch that are in chunk `chunk` of `of`."""
    return (offset + of - 1 - chunk) // of


def before(offset: Any, chunk: Any, of: int) -> Any:
    """The number of the first `offset` tokens of the batch that are in the chunks before `chunk`."""
    whole, rest = offset // of, offset % of
    if isinstance(rest, int) and isinstance(chunk, int):
        return chunk * whole + min(rest, chunk)
    return chunk * whole + rest - (rest - chunk) * (rest > chunk)


def local_rows(offset: Any, cp_rank: int, cp_size: int, rule: str) -> Any:
    """The number of the first `offset` tokens of the batch that a rank has: its local offset."""
    of = number_of_chunks(cp_size, rule)
    return sum([count(offset, chunk, of) for chunk in chunks_of(cp_rank, cp_size, rule)])


def rows_per_rank(tokens: int, cp_size: int) -> int:
    """The most tokens that a rank has of `tokens`. Every rank has this number or one fewer."""
    return -(-tokens // cp_size)


def capacity(tokens: int, cp_rank: int, cp_size: int, sequences: int, mask: Mask, rule: str) -> tuple[int, int]:
    """The bounds on (keys, queries) of a rank's attention; see `Segments`."""
    of = number_of_chunks(cp_size, rule)
    chunks = chunks_of(cp_rank, cp_size, rule)
    if mask.full:
        return tokens, local_rows(tokens, cp_rank, cp_size, rule)
    keys = queries = 0
    for chunk in chunks:
        own, left = count(tokens, chunk, of), before(tokens, chunk, of)
        right = tokens - own - left
        left = left if mask.left < 0 else min(left, sequences * mask.left)
        right = right if mask.right < 0 else min(right, sequences * mask.right)
        keys, queries = keys + left + own + right, queries + own + right
    return keys, queries


def exchange_rows(tokens: int, cp_size: int, sequences: int, mask: Mask, rule: str) -> Rows | None:
    """rows[source][rank]: the most keys of `source` that `rank` needs; None: an exchange saves nothing.

    A sequence needs at most ceil(window / d) keys of a chunk that is d chunks away, because the chunks between hold the
    rest. None if this exceeds three quarters of the rows of an all-gather, which needs no packing by rank.
    """
    if cp_size == 1 or mask.full or mask.left < 0 or mask.right < 0:
        return None
    known = type(tokens) is int and type(sequences) is int  # traced sizes are not kept: they may change
    return (_kept_rows if known else _exchange_rows)(tokens, cp_size, sequences, mask, rule)


def _exchange_rows(tokens: int, cp_size: int, sequences: int, mask: Mask, rule: str) -> Rows | None:
    of, ranks = number_of_chunks(cp_size, rule), range(cp_size)

    def rows_between(source: int, rank: int) -> int:
        keys = 0
        for chunk, by in product(chunks_of(source, cp_size, rule), chunks_of(rank, cp_size, rule)):
            own, reach = int(count(tokens, chunk, of)), mask.left if chunk < by else mask.right
            keys += own if chunk == by else min(own, sequences * -(-reach // abs(by - chunk)))
        return min(int(local_rows(tokens, source, cp_size, rule)), keys)

    rows = tuple(tuple(rows_between(source, rank) for rank in ranks) for source in ranks)
    moved = sum(rows[source][rank] for source in ranks for rank in ranks if source != rank)
    return rows if 4 * moved <= 3 * (cp_size - 1) * cp_size * rows_per_rank(tokens, cp_size) else None


_kept_rows = lru_cache(maxsize=256)(_exchange_rows)
