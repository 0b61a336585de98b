"""The kernel that computes the gradients of learned tables: its spec, and its plan. Pure Python, no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from ..base.spec import ACCESS_BYTES, ACCESSES, DTYPES, ITEM_SIZES, MAX_THREADS, PlainSpec, refuse_unless

KIND = "table_gradient"
BLOCK_THREADS = 256
MIN_ADDENDS = 4
"""Products that a thread adds at least. On an H200 8,192 tokens of 32 + 8 heads of 128 take 1.00 x a copy of their
bytes, with one product 1.29; sums over many batch rows 0.95 to 1.04, as with one."""


@dataclass(frozen=True)
class TableGradientSpec(PlainSpec):
    """A kernel that computes the gradients of the cosines and sines of each token (`table_gradient.cu.jinja`)."""

    dtype: str  # this and the fields up to rotary_offset as in `Compiled`
    interleaved: bool
    interleaved_out: bool
    full_width: bool
    per_head: bool
    rotary_dim: int
    rotary_offset: int
    vec: int  # elements of one access, and pairs of a thread; 1 serves any element stride
    heads: int  # of the table, in a block
    parts: int  # of each sum, which a block adds up

    kind = KIND
    words = {"dtype": DTYPES}  # noqa: RUF012  it is never written

    @property
    def name(self) -> str:
        pairs = dict.fromkeys(("halves", "interleaved")[flag] for flag in (self.interleaved, self.interleaved_out))
        width = "full" if self.full_width else "half"
        parts = [self.kind, self.dtype, f"r{self.rotary_dim}", *pairs, width, *["per_head"] * self.per_head]
        return "_".join([*parts, f"v{self.vec}", f"{self.heads}x{self.parts}"])

    @property
    def threads(self) -> int:
        return self.rotary_dim // 2 // max(1, self.vec) * self.heads * self.parts

    def check(self) -> None:
        super().check()
        even = self.rotary_dim % 2 == 0 and self.vec in ACCESSES and self.rotary_dim // 2 % self.vec == 0
        refuse_unless("TableGradientSpec", even, f"rotary_dim must be a multiple of 2 vec, and vec one of {ACCESSES}")
        refuse_unless("TableGradientSpec", self.parts & (self.parts - 1) == 0, "parts must be a power of two")
        most = MAX_THREADS if self.parts == 1 else BLOCK_THREADS  # shared memory
        refuse_unless("TableGradientSpec", 0 < self.threads <= most, f"a block has 1 to {most} threads")


@lru_cache(maxsize=1024)
def spec_of(
    dtype: str,
    interleaved: bool,
    interleaved_out: bool,
    full_width: bool,
    rotary_dim: int,
    rotary_offset: int,
    vec_limit: int,
    table_heads: int,
    addends: int,
) -> TableGradientSpec:
    """The kernel for tables of `table_heads` heads, or of 1 for all heads. addends: products in each sum."""
    vec = math.gcd(vec_limit, ACCESS_BYTES // ITEM_SIZES[dtype], rotary_dim // 2, rotary_offset)
    teams = max(1, BLOCK_THREADS // (rotary_dim // 2 // vec))
    heads = min(teams, table_heads)
    most = max(1, min(teams // heads, addends // MIN_ADDENDS))
    parts = 1 << (most.bit_length() - 1)
    own = (dtype, interleaved, interleaved_out, full_width, table_heads > 1)
    return TableGradientSpec(*own, rotary_dim, rotary_offset, vec, heads, parts)
