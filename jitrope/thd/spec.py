"""The specs of the kernels that move rows of packed batches between ranks. Pure Python, no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, ClassVar

from ..base.partition import RULES, number_of_chunks
from ..base.spec import ACCESS_BYTES, ACCESSES, DTYPES, INDEX_DTYPES, KINDS, NUMBERS, Spec

MAPS = ("table", "stay", "to_ranks", "to_sequences", "positions", "valid", "tail")
PARTITIONED = ("to_ranks", "to_sequences", "positions")  # maps that depend on the cut of the batch

QUANTITIES = ("lse", "read_lse", "out", "grad")
STEPS = ("nothing", "add", "copy")
_WORDS = {"map": MAPS, "quantity": QUANTITIES, "first": STEPS, "second": STEPS, "rule": RULES}
_WORDS |= {"index_dtype": INDEX_DTYPES, "dtype": DTYPES, "out_dtype": DTYPES}

BLOCK_THREADS = 256
ROWS_IN_FLIGHT = 2  # rows that a thread loads at the same time

# Rows that a thread adds at the same time, each of two sources. H100, x the copy, 1 / 2 / 4: sums of chunks 1.14 /
# 1.09 / 1.18, over two ranks 1.08 / 1.05 / 1.11.
SUMS_IN_FLIGHT = 2

SCAN_THREADS = 1024
MIN_LANE_USE = 0.9  # the least share of a row's threads that must have work, on average over its passes


class _Moves(Spec):
    words = _WORDS
    rule: Any

    @property
    def name(self) -> str:
        """The kind, and what is not a default."""
        words = [self.kind]
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not False and value != field.default and field.name not in self.unused:
                words.append({bool: field.name, str: value}.get(type(value), f"{field.name}{value}"))
        return "_".join(words)

    def constants(self) -> dict[str, Any]:
        found = super().constants()
        if found.pop("rule", ""):  # a kernel takes the number of chunks
            found["chunks"] = number_of_chunks(found["cp_size"], self.rule)
        return found


@dataclass(frozen=True)
class RowsSpec(_Moves):
    """A kernel that moves rows (`thd_rows.cu.jinja`), or writes their sources (`thd_tables.cu.jinja`)."""

    map: str  # the rule for the source of a row, of `MAPS`; see `reference.Move`
    writes: bool = False  # the kernel writes the sources themselves
    index_dtype: str = "int32"  # of cu_seqlens
    cp_size: int = 1
    rule: str = "dual_chunk"  # of the partition
    sums: bool = False  # the table has several sources for each row, which are added up in fp32
    dtype: str = "fp32"  # of the rows with sums; otherwise they are bytes
    out_dtype: str = "fp32"
    access_bytes: int = ACCESS_BYTES  # of one load or store
    lanes: int = 1  # threads for each row
    unroll: int = 1  # rows for each thread

    threads = BLOCK_THREADS
    unused = ("writes",)
    bounds: ClassVar = {"access_bytes": ACCESSES, "lanes": NUMBERS[1 : threads + 1]}
    bounds |= dict.fromkeys(("cp_size", "unroll"), NUMBERS[1:])

    kind = property(lambda self: "thd_tables" if self.writes else "thd_rows")


@dataclass(frozen=True)
class SegmentsSpec(_Moves):
    """A kernel that lays out a rank's attention (`cp_segments.cu.jinja`, `cp_segment_rows.cu.jinja`)."""

    rows: bool  # it writes the rows of the segments
    index_dtype: str
    cp_size: int
    rule: str
    full: bool  # see `partition.Mask`
    extends: bool
    padded: bool  # each sequence ends in queries without keys
    exchange: bool  # ranks send each other only the rows that are needed
    threads: int

    unused = ("rows",)
    bounds: ClassVar = {"cp_size": NUMBERS[1:]}

    kind = property(lambda self: "cp_segment_rows" if self.rows else "cp_segments")


@dataclass(frozen=True)
class CorrectionSpec(_Moves):
    """A kernel that joins a step of ring attention with the steps before it (`thd_corrections.cu.jinja`)."""

    quantity: str  # this and the next three: see `reference.Correction`
    first: str
    second: str
    packed: bool
    dtype: str
    index_dtype: str
    vec: int  # elements of one load or store

    kind = "thd_corrections"
    threads = 128
    bounds: ClassVar = {"vec": ACCESSES}


KINDS.update(dict.fromkeys(("thd_rows", "thd_tables"), RowsSpec))
KINDS.update(dict.fromkeys(("cp_segments", "cp_segment_rows"), SegmentsSpec), thd_corrections=CorrectionSpec)


correction_spec = lru_cache(maxsize=1024)(CorrectionSpec)


@lru_cache(maxsize=1024)
def rows_spec(widths: tuple[int, ...], multiple: int, *words: Any, **more: Any) -> RowsSpec:
    """`RowsSpec(*words, **more)` with access_bytes, lanes and unroll, for rows of `widths` bytes.

    multiple: the greatest common divisor of every address, stride and width, in bytes. An access must divide it.
    """
    access = math.gcd(ACCESS_BYTES, multiple)
    columns = max(1, max(widths) // access)
    lanes, best = 1, 0.0
    for candidate in (1 << shift for shift in range(BLOCK_THREADS.bit_length())):
        use = columns / (-(-columns // candidate) * candidate)
        if use >= best or use >= MIN_LANE_USE:
            lanes, best = candidate, use
    spec = RowsSpec(*words, **more)
    return replace(spec, access_bytes=access, lanes=lanes, unroll=SUMS_IN_FLIGHT if spec.sums else ROWS_IN_FLIGHT)
