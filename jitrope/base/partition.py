"""The rule that cuts a packed batch between context-parallel ranks, as arithmetic on offsets.

Chunk `chunk` of `of` owns `count(offset, chunk, of)` of the first `offset` tokens of the batch, independent of their
sequences. So it owns count(end) - count(first) tokens of a sequence [first, end). These parts are equal if first and
end are multiples of `of`; otherwise they differ by one. A rank's share of the whole batch depends only on the number
of tokens. No padding is needed, and no length is read.

    sum(count(offset, chunk, of) for chunk in range(of)) == offset        (Hermite's identity)

Offsets are Python integers or integer tensors. `templates/sequences.cuh` has the same rule for the device.
"""

from __future__ import annotations

from typing import Any

RULES = ("dual_chunk", "contiguous")


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


def count(offset: Any, chunk: Any, of: int) -> Any:
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
