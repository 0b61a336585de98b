"""How a packed batch is cut between context-parallel ranks: the rule, in arithmetic on offsets.

Of `of` chunks, chunk `chunk` owns `count(offset, chunk, of)` of the first `offset` tokens of the batch, whatever
sequences they belong to. So of a sequence that owns the tokens [first, end) it has count(end) - count(first), which
is an equal part where first and end are multiples of `of`, and else one more or less, in turn; and what a rank has
of the whole batch follows from its number of tokens alone. Nothing has to be padded, and no length has to be read.

    sum(count(offset, chunk, of) for chunk in range(of)) == offset        (Hermite's identity)

Every function takes Python integers or integer tensors as offsets. `templates/sequences.cuh` is the same rule on the
device.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

RULES = ("dual_chunk", "contiguous")
Rows = tuple[tuple[int, ...], ...]


class Mask(NamedTuple):
    """Which keys of its own sequence a query at position p sees: those from p - left to p + right; -1: no bound."""

    left: int = -1
    right: int = 0

    @property
    def full(self) -> bool:
        """Every query sees all keys of its sequence."""
        return self.left < 0 and self.right < 0

    @property
    def extends(self) -> bool:
        """Keys may lie behind a rank's last query, which takes queries of their own: see `Segments`."""
        return self.right != 0 and not self.full


def number_of_chunks(cp_size: int, rule: str) -> int:
    """How many chunks each sequence is cut into: two for a rank ("dual_chunk") or one ("contiguous")."""
    return 2 * cp_size if rule == "dual_chunk" and cp_size > 1 else cp_size


def chunks_of(cp_rank: int, cp_size: int, rule: str) -> tuple[int, ...]:
    """A rank's chunks, in their order in a sequence. Dual chunks even out the work of a causal mask.

    "dual_chunk" (head and tail): cp_rank and 2 cp_size - 1 - cp_rank; "contiguous": cp_rank.
    """
    if number_of_chunks(cp_size, rule) == cp_size:
        return (cp_rank,)
    return cp_rank, 2 * cp_size - 1 - cp_rank


def rank_of(chunk: Any, cp_size: int, rule: str) -> Any:
    """Whose chunk it is."""
    of = number_of_chunks(cp_size, rule)
    if of == cp_size:
        return chunk
    return chunk + (chunk >= cp_size) * (of - 1 - 2 * chunk)


def count(offset: Any, chunk: int, of: int) -> Any:
    """Of the first `offset` tokens of the batch, those in chunk `chunk` of `of` of their sequences."""
    return (offset + of - 1 - chunk) // of


def before(offset: Any, chunk: Any, of: int) -> Any:
    """Of the first `offset` tokens of the batch, those in the chunks before `chunk`."""
    whole, rest = offset // of, offset % of
    return chunk * whole + _at_most(rest, chunk)


def local_rows(offset: Any, cp_rank: int, cp_size: int, rule: str) -> Any:
    """Of the first `offset` tokens of the batch, those that a rank has: its local offset."""
    of = number_of_chunks(cp_size, rule)
    total = 0
    for chunk in chunks_of(cp_rank, cp_size, rule):
        total = total + count(offset, chunk, of)
    return total


def rows_per_rank(tokens: int, cp_size: int) -> int:
    """The most tokens that a rank has of `tokens`; no rank has more than one fewer."""
    return -(-tokens // cp_size)


def capacity(tokens: int, cp_rank: int, cp_size: int, sequences: int, mask: Mask, rule: str) -> tuple[int, int]:
    """(keys, queries) that a rank's attention has at most; see `Segments`."""
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
    """rows[source][rank]: the most keys of `source` that `rank` needs; None: exchanging them saves nothing.

    Of a chunk d chunks away no sequence needs more than ceil(window / d) keys: those between take up the rest. None
    where this is more than three quarters of what an all-gather moves, whose rows need no packing by rank.
    """
    if cp_size == 1 or mask.full or mask.left < 0 or mask.right < 0:
        return None
    known = type(tokens) is int and type(sequences) is int  # a traced size is one number here, another there
    return (_kept_rows if known else _exchange_rows)(tokens, cp_size, sequences, mask, rule)


def _exchange_rows(tokens: int, cp_size: int, sequences: int, mask: Mask, rule: str) -> Rows | None:
    of = number_of_chunks(cp_size, rule)

    def needed(chunk: int, by: int) -> int:
        reach = mask.left if chunk < by else mask.right
        own = int(count(tokens, chunk, of))
        return own if chunk == by else min(own, sequences * -(-reach // abs(by - chunk)))

    rows = tuple(
        tuple(
            min(
                local_rows(tokens, source, cp_size, rule),
                sum(
                    needed(chunk, by)
                    for chunk in chunks_of(source, cp_size, rule)
                    for by in chunks_of(rank, cp_size, rule)
                ),
            )
            for rank in range(cp_size)
        )
        for source in range(cp_size)
    )
    moved = sum(rows[source][rank] for source in range(cp_size) for rank in range(cp_size) if source != rank)
    return rows if 4 * moved <= 3 * (cp_size - 1) * cp_size * rows_per_rank(tokens, cp_size) else None


_kept_rows = lru_cache(maxsize=256)(_exchange_rows)


def _at_most(rest: Any, chunk: Any) -> Any:
    if isinstance(rest, int) and isinstance(chunk, int):
        return min(rest, chunk)
    return rest - (rest - chunk) * (rest > chunk)
