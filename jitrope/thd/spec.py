"""What is compiled into the kernels that move rows of packed batches between ranks, and how they are launched.

Pure Python, no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

from ..base.spec import (
    ACCESS_BYTES,
    ACCESSES,
    C_TYPES,
    DTYPES,
    INDEX_DTYPES,
    MAX_THREADS,
    Spec,
    check_fields,
    refuse_unless,
)
from ..jit.registry import KINDS
from ..plan.partition import RULES, number_of_chunks

MAPS = ("table", "stay", "to_ranks", "to_sequences", "positions", "valid", "tail")
PARTITIONED = ("to_ranks", "to_sequences", "positions")
"""Maps that depend on how the batch is cut."""

QUANTITIES = ("lse", "read_lse", "out", "grad")
STEPS = ("nothing", "add", "copy")
_ENUMERATORS = {"map": MAPS, "quantity": QUANTITIES, "first": STEPS, "second": STEPS}
_WORDS = {**_ENUMERATORS, "rule": RULES, "index_dtype": INDEX_DTYPES, "dtype": DTYPES, "out_dtype": DTYPES}

BLOCK_THREADS = 256
ROWS_IN_FLIGHT = 4
"""Rows whose loads a thread has on their way at once."""

SCAN_THREADS = 1024
MIN_LANE_USE = 0.9
"""Of the threads of a row, those that should have work in its last pass."""


class _Moves(Spec):
    """A spec whose fields, under their own names, are the constants of its template."""

    threads: int
    unused: tuple[str, ...] = ()
    """Fields that the template does not name."""

    def check(self) -> None:
        """Raise InvalidInput where a field is not a constant of its kind, or these cannot be a kernel's."""
        check_fields(self, _WORDS)

    def constants(self) -> dict[str, Any]:
        """The values of the template's parameter block: C's name for a dtype, an enumerator for a word."""
        self.check()
        found: dict[str, Any] = {"threads": self.threads}
        for name in [field.name for field in fields(self) if field.name not in self.unused]:
            value = getattr(self, name)
            if name.endswith("dtype"):
                found[name.replace("dtype", "c_type")] = C_TYPES[value]
            else:
                found[name] = value.upper() if name in _ENUMERATORS else value
        if "rule" in found:  # a kernel knows the number of chunks that the rule gives
            found["chunks"] = number_of_chunks(found["cp_size"], found.pop("rule"))
        return found


@dataclass(frozen=True)
class RowsSpec(_Moves):
    """A kernel that moves rows (`thd_rows.cu.jinja`), or writes where they come from (`thd_tables.cu.jinja`).

    map: how a row's source is found, one of `MAPS`: in a table, by where it stands, or by the partition: from the
    batch to ranks' shards, back, to positions; only what is valid of each sequence, or nothing but zeros behind the
    last one. writes: it writes these sources. index_dtype: of cu_seqlens. cp_size, rule: the partition's. dtype,
    out_dtype: of rows that are summed, in fp32, from a table of several; elsewhere rows are bytes. access_bytes: of
    a load and a store. lanes: threads of a row, unroll: rows of a thread.
    """

    map: str
    writes: bool = False
    index_dtype: str = "int32"
    cp_size: int = 1
    rule: str = "dual_chunk"
    sums: bool = False
    dtype: str = "fp32"
    out_dtype: str = "fp32"
    access_bytes: int = ACCESS_BYTES
    lanes: int = 1
    unroll: int = 1

    threads = BLOCK_THREADS
    unused = ("writes",)

    @property
    def kind(self) -> str:
        """What the kernel does, in its file's name and its entry's."""
        return "thd_tables" if self.writes else "thd_rows"

    @property
    def name(self) -> str:
        """A readable name."""
        parts = [self.kind, self.map]
        if self.map in PARTITIONED:
            parts.append(f"{self.rule}_cp{self.cp_size}")
        if not self.writes:
            parts += [f"sum_{self.dtype}_{self.out_dtype}"] if self.sums else []
            parts.append(f"{self.access_bytes}x{self.lanes}")
        return "_".join(parts)

    @property
    def rows_per_block(self) -> int:
        """Rows that a block moves."""
        return self.threads if self.writes else self.threads // self.lanes * self.unroll

    def check(self) -> None:
        """See `_Moves.check`."""
        super().check()
        refuse_unless("RowsSpec", self.access_bytes in ACCESSES, f"access_bytes is one of {ACCESSES}")
        refuse_unless("RowsSpec", self.cp_size > 0 < self.unroll, "cp_size and unroll are at least 1")
        refuse_unless("RowsSpec", 0 < self.lanes <= self.threads, f"lanes is 1 to {self.threads}")


@dataclass(frozen=True)
class SegmentsSpec(_Moves):
    """A kernel that lays out a rank's attention: its segments (`cp_segments.cu.jinja`) or their rows.

    rows: it is the latter (`cp_segment_rows.cu.jinja`). full, extends: of the mask (`partition.Mask`). padded: there
    are rows without keys behind each sequence. exchange: ranks send each other only what is needed. threads:
    of a block.
    """

    rows: bool
    index_dtype: str
    cp_size: int
    rule: str
    full: bool
    extends: bool
    padded: bool
    exchange: bool
    threads: int

    unused = ("rows",)

    @property
    def kind(self) -> str:
        """What the kernel does, in its file's name and its entry's."""
        return "cp_segment_rows" if self.rows else "cp_segments"

    @property
    def name(self) -> str:
        """A readable name."""
        flags = [name for name in ("full", "extends", "padded", "exchange") if getattr(self, name)]
        return "_".join([self.kind, self.rule, f"cp{self.cp_size}", *flags])

    def check(self) -> None:
        """See `_Moves.check`."""
        super().check()
        refuse_unless("SegmentsSpec", self.cp_size > 0, "cp_size is at least 1")
        refuse_unless("SegmentsSpec", 0 < self.threads <= MAX_THREADS, f"a block has 1 to {MAX_THREADS} threads")


@dataclass(frozen=True)
class CorrectionSpec(_Moves):
    """A kernel that joins a step of ring attention with the steps before it (`thd_corrections.cu.jinja`).

    quantity: "lse", "read_lse", "out" or "grad". first, second: what is done with the halves of a sequence, "nothing",
    "add" or "copy". packed: log-sum-exps are (heads, rows), else (sequences, heads, rows). vec: elements an access.
    """

    quantity: str
    first: str
    second: str
    packed: bool
    dtype: str
    index_dtype: str
    vec: int

    kind = "thd_corrections"
    threads = 128

    @property
    def name(self) -> str:
        """A readable name."""
        return "_".join([self.kind, self.quantity, self.first, self.second, self.dtype] + ["packed"] * self.packed)

    def check(self) -> None:
        """See `_Moves.check`."""
        super().check()
        refuse_unless("CorrectionSpec", self.vec in ACCESSES, f"vec is one of {ACCESSES}")


ThdSpec = RowsSpec | SegmentsSpec | CorrectionSpec

KINDS.update(dict.fromkeys(("thd_rows", "thd_tables"), RowsSpec))
KINDS.update(dict.fromkeys(("cp_segments", "cp_segment_rows"), SegmentsSpec), thd_corrections=CorrectionSpec)


def plan_rows(spec: RowsSpec, widths: tuple[int, ...], multiples: tuple[int, ...]) -> RowsSpec:
    """The spec with its accesses and threads, for rows of so many bytes.

    multiples: what must be a multiple of an access, in bytes: addresses, strides and widths.
    """
    access = math.gcd(ACCESS_BYTES, *multiples)
    columns = max(1, max(widths) // access)
    lanes, best = 1, 0.0
    for candidate in (1 << shift for shift in range(BLOCK_THREADS.bit_length())):
        use = columns / (-(-columns // candidate) * candidate)
        if use >= best or use >= MIN_LANE_USE:
            lanes, best = candidate, use
    unroll = 1 if spec.sums else ROWS_IN_FLIGHT
    return replace(spec, access_bytes=access, lanes=lanes, unroll=unroll)


_cached = lru_cache(maxsize=1024)
table_spec, segments_spec, correction_spec = map(_cached, (RowsSpec, SegmentsSpec, CorrectionSpec))


@_cached
def rows_spec(widths: tuple[int, ...], multiple: int, *words: Any) -> RowsSpec:
    """`plan_rows` of the spec of these words; multiple: of what an access must divide, the greatest divisor."""
    return plan_rows(RowsSpec(*words), widths, (multiple,))
