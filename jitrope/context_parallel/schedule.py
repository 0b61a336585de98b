"""What the attention of a batch needs besides q, k and v: made once, used by every layer."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..base import arguments
from ..ops.fit import failing
from ..plan.partition import Mask, Rows, capacity, exchange_rows
from ..thd import ops as thd_ops
from ..thd.reference import Segments, Shape
from .checks import checked_batch, checked_window
from .groups import Ranks, everyones_rows, ranks_of
from .interface import Varlen
from .shards import described


class Schedule:
    """Which rows a rank sends, which keys its queries see, and where gradients go, of one batch and mask.

    >>> schedule = Schedule(cu_seqlens, tokens, group=group)
    >>> for layer in layers: out = all_gather_attention(q, k, v, schedule=schedule)

    Args:
        cu_seqlens: int32 or int64 offsets (N + 1) of the whole batch, from 0 and ascending; never read by the host.
        tokens: rows of the whole batch, spare ones after the last sequence included.
        group: a process group; default: torch's default group, or one process.
        cp_size, cp_rank: in place of group, for tables alone.
        cu_seqlens_padded: offsets where sequences have padding behind them; cu_seqlens is then their real lengths,
            added up.
        max_seqlen: the longest sequence, its padding included, if the host knows it; default: tokens. Too large a
            one costs time, too small a one is wrong.
        causal: a query sees the keys up to its own.
        window: (left, right): and those from `left` before it to `right` behind it; -1: no bound. causal sets right
            to 0.
        rule: "dual_chunk" or "contiguous"; see `Partition`.

    Raises:
        InvalidInput: the arguments do not fit together.
    """

    def __init__(
        self,
        cu_seqlens: Tensor,
        tokens: int,
        *,
        group: ProcessGroup | None = None,
        cp_size: int | None = None,
        cp_rank: int | None = None,
        cu_seqlens_padded: Tensor | None = None,
        max_seqlen: int | None = None,
        causal: bool = True,
        window: tuple[int, int] = (-1, -1),
        rule: str = "dual_chunk",
    ) -> None:
        fail = failing("Schedule")
        tokens, rule = checked_batch("Schedule", cu_seqlens, cu_seqlens_padded, tokens, rule, fail)
        left, right = checked_window("Schedule", window, fail)
        max_seqlen = tokens if max_seqlen is None else arguments.whole("Schedule", "max_seqlen", max_seqlen, 0)
        causal = arguments.flag("Schedule", "causal", causal)
        self.ranks: Ranks = ranks_of("Schedule", group, cp_size, cp_rank, fail)
        self.shape = Shape(tokens, len(cu_seqlens) - 1, *self.ranks[1:], rule)
        self.mask = Mask(left, 0 if causal else right)
        self.cu_seqlens, self.cu_seqlens_padded = cu_seqlens, cu_seqlens_padded
        self.max_seqlen = max_seqlen
        self.equal = False

    @classmethod
    def fixed(
        cls,
        batch: int,
        seqlen: int,
        device: torch.device | str,
        *,
        group: ProcessGroup | None = None,
        cp_size: int | None = None,
        cp_rank: int | None = None,
        causal: bool = True,
        window: tuple[int, int] = (-1, -1),
        rule: str = "dual_chunk",
    ) -> Schedule:
        """For the layouts bshd and sbhd: sequences of one length. The other arguments are those of `Schedule`.

        Args:
            batch: B, how many sequences.
            seqlen: tokens of each on all ranks together, a multiple of the group's size.
            device: that of q.

        Raises:
            InvalidInput: the arguments do not fit together.
        """
        name = "Schedule.fixed"
        fail = failing(name)
        batch = arguments.whole(name, "batch", batch, 1)
        seqlen = arguments.whole(name, "seqlen", seqlen, 0)
        where = arguments.device(name, "device", device)
        if where is None:
            arguments.refuse(name, "device", device, "that of q")
        on: dict[str, Any] = {"group": group, "cp_size": cp_size, "cp_rank": cp_rank}
        ranks = ranks_of(name, **on, fail=fail)
        if seqlen % ranks.cp_size != 0:
            fail(f"seqlen is {seqlen}; it is a multiple of the group's size {ranks.cp_size}")
        offsets = torch.arange(batch + 1, dtype=torch.int32, device=where) * seqlen
        schedule = cls(offsets, batch * seqlen, **on, max_seqlen=seqlen, causal=causal, window=window, rule=rule)
        schedule.equal = seqlen > 0
        return schedule

    def __repr__(self) -> str:
        return f"Schedule({described(self.shape)}, window ({self.mask.left}, {self.mask.right}))"

    @property
    def offsets(self) -> Tensor:
        """Those that the rows are cut by, (N + 1): with the padding, if there is some."""
        return self.cu_seqlens if self.cu_seqlens_padded is None else self.cu_seqlens_padded

    @cached_property
    def position_ids(self) -> Tensor:
        """Each row's position in its sequence: (rows), int32."""
        return thd_ops.table("positions", self.offsets, self.shape)

    @cached_property
    def segments(self) -> Segments:
        """Tables of rows on the device."""
        return thd_ops.segments(self.cu_seqlens, self.cu_seqlens_padded, self.shape, self.mask)

    @cached_property
    def exchange(self) -> Rows | None:
        """rows[source][rank] that are sent; None: all ranks gather all rows."""
        shape = self.shape
        return exchange_rows(shape.tokens, shape.cp_size, shape.sequences, self.mask, shape.rule)

    @property
    def sent(self) -> list[int]:
        """How many rows of keys go from here to each rank."""
        if self.exchange is None:
            return [self.shape.capacity] * self.shape.cp_size
        return [*self.exchange[self.shape.cp_rank]]

    @property
    def received(self) -> list[int]:
        """How many rows of keys come here from each rank."""
        if self.exchange is None:
            return [self.shape.capacity] * self.shape.cp_size
        return [rows[self.shape.cp_rank] for rows in self.exchange]

    @cached_property
    def sum_rows(self) -> Tensor:
        """(cp_size, rows) int32: where each row's gradients are among those that come back."""
        sent_rows = self.segments.sent_rows
        return everyones_rows(self.shape, self.cu_seqlens.device) if sent_rows is None else sent_rows

    @property
    def saving(self) -> float:
        """The part of an all-gather's rows that need not be sent, over all ranks: 0 where all are gathered."""
        ranks = range(self.shape.cp_size)
        if self.exchange is None:
            return 0.0
        moved = sum(self.exchange[source][rank] for source in ranks for rank in ranks if source != rank)
        return 1 - moved / (len(ranks) * (len(ranks) - 1) * self.shape.capacity)

    @property
    def most_segments(self) -> int:
        """How many segments there are, empty ones included."""
        each = 1 if self.mask.full else len(self.shape.chunks)
        padding = self.cu_seqlens_padded is not None and not self.mask.extends
        return self.shape.sequences * (each + padding)

    def varlen(self, scale: float) -> Varlen:
        """The segments as backends take them; scale is that of the softmax."""
        return Varlen(self.segments.cu_seqlens_q, self.segments.cu_seqlens_k, *self._longest(), self.mask, scale)

    def _longest(self) -> tuple[int, int]:
        """(queries, keys) that no segment has more of."""
        shape, mask = self.shape, self.mask
        longest = min(self.max_seqlen, shape.tokens)
        chunk = -(-longest // shape.of)
        # Under a full mask a segment has all queries of a sequence; so has one of padding, at most.
        queries = chunk * len(shape.chunks) if mask.full or self.cu_seqlens_padded is not None else chunk
        keys = longest
        if mask.extends:
            queries = longest if mask.right < 0 else min(longest, chunk + mask.right)
        if mask.left >= 0 and mask.right >= 0:
            keys = min(longest, mask.left + chunk + mask.right)
        most_keys, most_queries = capacity(
            shape.tokens, shape.cp_rank, shape.cp_size, shape.sequences, mask, shape.rule
        )
        return min(queries, most_queries), min(keys, most_keys)
