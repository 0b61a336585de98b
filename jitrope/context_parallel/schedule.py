"""The tables of a batch's attention, made once and used by every layer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..base import arguments
from ..base.fit import Fail
from ..thd import ops as thd_ops
from ..thd.reference import Segments, check_values, cut
from ..thd.shape import Mask
from .backends import DTYPES, Varlen, fail
from .shards import Group, Partition, all_ranks_rows, kept

Pair = tuple[int, int]


def _pair(function: str, label: str, value: Any, must: str, least: int = 1) -> tuple[int, ...]:
    """Two whole numbers of at least `least`."""
    if len(sizes := arguments.wholes(function, label, value, least)) != 2:
        Fail(function)(f"{label} is {sizes!r}; it must be {must}")
    return sizes


class Memory(NamedTuple):
    """Bytes of a call of `all_gather_attention` on one rank; see `Schedule.memory`."""

    kept: int
    forward: int
    backward: int


class Schedule(Partition):
    """A partition with a mask: the rows that a rank sends, the keys that it sees, and the rows of gradients.

    >>> schedule = Schedule(torch.tensor([0, 7, 10]), 10, max_seqlen=7, window=(4, 0))
    >>> q, k, v = torch.randn(3, 10, 8, 64)
    >>> for layer in range(2): q = context_parallel.all_gather_attention(q, k, v, schedule)

    Args:
        cu_seqlens, tokens, group, cp_size, cp_rank, separate_padding, rule, and the errors: see `Partition`. Attention
            needs a group.
        cu_seqlens_padded: see `Partition`; cu_seqlens are then the cumulated lengths without padding.
        max_seqlen: the longest sequence, including its padding; default: tokens. A larger number takes more time; a
            smaller one gives wrong results.
        causal: a query sees no keys after its own. This sets the right side of the window to 0.
        window: (left, right): a query sees the keys from `left` before its own to `right` after it; -1: no bound.
    """

    def __init__(
        self,
        cu_seqlens: Tensor,
        tokens: int,
        *,
        group: Group = None,
        cp_size: int | None = None,
        cp_rank: int | None = None,
        cu_seqlens_padded: Tensor | None = None,
        max_seqlen: int | None = None,
        causal: bool = True,
        window: Pair = (-1, -1),
        separate_padding: bool = False,
        rule: str = "dual_chunk",
    ) -> None:
        on: dict[str, Any] = {"group": group, "cp_size": cp_size, "cp_rank": cp_rank, "rule": rule}
        on |= {"cu_seqlens_padded": cu_seqlens_padded, "separate_padding": separate_padding}
        super().__init__(cu_seqlens, tokens, **on)
        sizes = _pair("Schedule", "window", window, "(left, right), with -1 for no bound", -1)
        sizes = tuple([-1 if size >= self.shape.tokens else size for size in sizes])
        self.mask = Mask(sizes[0], 0 if arguments.flag("Schedule", "causal", causal) else sizes[1])
        self.longest = None if max_seqlen is None else arguments.whole("Schedule", "max_seqlen", max_seqlen, 0)
        self.max_seqlen = self.shape.tokens if self.longest is None else self.longest
        self.equal = self.shape.tokens == 0  # whether sequences have one length
        self.most_segments = self.shape.segments(self.mask, cu_seqlens_padded is not None)  # with empty ones
        # rows[source][rank]: the number of rows that each rank sends to each; None: all ranks gather all rows
        self.exchange = self.shape.exchange(self.mask)
        size, rank = self.shape.cp_size, self.shape.cp_rank
        rows = ((self.shape.capacity,) * size,) * size if self.exchange is None else self.exchange
        self.sent, self.received = [*rows[rank]], [each[rank] for each in rows]  # of this rank, to and from each

    @classmethod
    def fixed(cls, batch: int, seqlen: int, device: torch.device | str | None, **words: Any) -> Schedule:
        """A schedule of sequences of one length, for bshd and sbhd. Errors: see `Schedule`.

        Args:
            batch: B, the number of sequences.
            seqlen: tokens of a sequence on all ranks together, a multiple of the group's size.
            device: the device of q; None: torch's default device.
            words: the keywords of `Schedule`, except cu_seqlens_padded, separate_padding and max_seqlen.
        """
        name = "Schedule.fixed"
        batch = arguments.whole(name, "batch", batch, 1)
        seqlen = arguments.whole(name, "seqlen", seqlen, 0)
        offsets = torch.arange(batch + 1, dtype=torch.int32, device=arguments.device(name, "device", device)) * seqlen
        schedule = cls(offsets, batch * seqlen, cu_seqlens_padded=None, max_seqlen=seqlen, **words)
        size = schedule.shape.cp_size
        if seqlen % size != 0:
            Fail(name)(f"seqlen is {seqlen}; it must be a multiple of the group's size {size}")
        schedule.equal = True
        return schedule

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, window ({self.mask.left}, {self.mask.right}))"

    @kept
    def segments(self) -> Segments:
        """The tables of rows, on the device."""
        return thd_ops.segments(self.cu_seqlens, self.cu_seqlens_padded, self.shape, self.mask)

    @kept
    def sum_rows(self) -> Tensor:
        """(cp_size, rows) int32: the places of each row's gradients among the gradients that this rank receives."""
        sent_rows = self.segments.sent_rows
        return all_ranks_rows(self.shape, self.cu_seqlens.device) if sent_rows is None else sent_rows

    @property
    def saving(self) -> float:
        """The share of an all-gather's rows that need not be sent, over all ranks; 0 if all rows are gathered."""
        if self.exchange is None:
            return 0.0
        size = self.shape.cp_size
        moved: int = sum(map(sum, self.exchange)) - sum(self.exchange[rank][rank] for rank in range(size))
        return 1 - moved / (size * (size - 1) * self.shape.capacity)

    def balance(self) -> float:
        """The busiest rank's work over the mean of all ranks, in pairs of a query and a key; 1 is even.

        This waits for the device.
        """
        cu_seqlens, offsets, size = self.cu_seqlens.cpu().long(), self.offsets.cpu().long(), self.shape.cp_size
        left, right = (self.shape.tokens if side < 0 else side for side in self.mask)
        sequence, position, rank, _ = cut(offsets, self.shape)
        last = pad(cu_seqlens.diff(), (0, 1))[sequence] - 1  # of its sequence without padding; spare tokens have none
        seen = torch.minimum(position + right, last) - (position - left).clamp(min=0) + 1
        work = torch.zeros(size, dtype=torch.long).index_add_(0, rank, torch.where(position <= last, seen, 0)).tolist()
        return max(work) * size / sum(work) if any(work) else 1.0

    def memory(
        self, heads: Pair, head_dims: Pair, dtype: torch.dtype, *, keep_gathered: bool = False, head_groups: int = 1
    ) -> Memory:
        """The bytes that a call of `all_gather_attention` takes on this rank. Does not wait for the device.

        A step of n layers has at most n times `kept`, the larger of the others and dout at once. Let w be the bytes of
        a row of keys and values, t this rank's rows, K its keys (`Shape.most`), R and S w times the rows that it
        receives and sends. For one head group, if all rows are gathered and no query is a dummy (see `Segments`):

            kept     = q + t w + out + 4 Hq t                 (keep_gathered: K w in place of t w)
            forward  = R + max(S, K w)                        or, if more, K w + out + 4 Hq t
            backward = max(R + max(S, K w), 2 K w + dq, K w + R + dq, dq + 2 R, dq + t w + R)

        The code has the other cases; where they are kept, no rows arrive in the backward. 4 Hq t is the log-sum-exp,
        which only "flash" keeps. Not counted are what a backend takes for itself (FlashAttention 2: dq in fp32, and a
        dK and a dV of each head of q), lse and max_logit that the call returns, what rope copies, and the tables of a
        batch: 4 bytes for each of K keys, and more for each row.

        Args:
            heads, head_dims: (Hq, Hk) and (D, Dv).
            dtype: of q, k and v.
            keep_gathered, head_groups: as in the call.

        Returns:
            kept: between the forward and the backward; forward: the most at once, beside q, k and v; backward: the most
            at once, beside what is kept and dout.

        Raises:
            InvalidInput: the arguments do not fit together.
        """
        name = "Schedule.memory"
        (hq, hk), d = (_pair(name, *x) for x in (("heads", heads, "(Hq, Hk)"), ("head_dims", head_dims, "(D, Dv)")))
        n = arguments.whole(name, "head_groups", head_groups, 1)
        held = arguments.flag(name, "keep_gathered", keep_gathered)
        if hq % hk or hk % n:
            Fail(name)(f"heads is ({hq}, {hk}) and head_groups {n}; Hk must divide Hq, and head_groups Hk")
        size, (keys, queries) = arguments.word(name, "dtype", dtype, DTYPES).itemsize, self.shape.most(self.mask)
        # From here on bytes of one head group; all_q and all_out have dummies too.
        q, out, all_q, all_out = (hq // n * size * rows * x for rows in (self.rows, queries) for x in d)
        sends = self.sent * (self.shape.cp_size > 1)  # alone, a rank sends nothing
        counts = self.rows, keys, sum(self.received), sum(sends if self.exchange else sends[:1]), sum(sends)
        kv, seen, received, sent, returned = (hk // n * size * sum(d) * count for count in counts)
        lse, grads, gather, left = hq // n * 4 * queries, q + kv, received + max(sent, seen), received + returned
        attend = lse + (all_out + max(all_q, out) if self.mask.extends else out)
        back, result = q + 2 * (all_q + all_out) * self.mask.extends, out + lse + held * seen
        forward, backward = n * (result + (n > 1) * out), n * grads + max(left - kv, returned, (n > 1) * n * grads)
        for group in {max(n - 2, 0), n - 1}:  # the rows of the next group arrive, the gradients of the last one leave
            ahead, again = (group < n - 1) * (sent + received), 1 - held
            forward = max(forward, group * result + ahead + max(gather, seen + attend))
            step = max(again * gather, (1 + again) * seen + back, seen + received + q) + again * ahead
            backward = max(backward, group * q + max(group - 1, 0) * kv + (group > 0) * left + step)
        return Memory(n * (q + out + lse + (seen if held else kv)), forward, backward)

    def varlen(self, scale: float) -> Varlen:
        """The segments in the form for backends, with bounds of the largest one. scale: the softmax's."""
        shape, mask = self.shape, self.mask
        longest = min(self.max_seqlen, shape.tokens)
        chunk = -(-longest // shape.of)
        left, right = (longest if side < 0 else side for side in mask)
        # Under a full mask, segments (of padding too) can have all of the rank's queries of a sequence.
        whole = mask.full or (self.cu_seqlens_padded is not None and not mask.extends)
        queries = chunk * len(shape.chunks) if whole else min(longest, chunk + right)
        keys, (most_keys, most_queries) = min(longest, left + chunk + right), shape.most(mask)
        most = min(queries, most_queries), min(keys, most_keys)
        return Varlen(self.segments.cu_seqlens_q, self.segments.cu_seqlens_k, *most, mask, scale)


# ---- checks of a call -------------------------------------------------------------------------------


def check_lengths(schedule: Schedule, table_rows: int | None) -> None:
    """Refuse wrong offsets, and sequences longer than max_seqlen or rope's tables. Waits for the device."""
    real, padded = schedule.cu_seqlens.cpu(), schedule.offsets.cpu()
    for offsets in (real, padded):
        check_values(offsets, schedule.shape.tokens)
    longest = int(padded.diff().max())
    if longest > schedule.max_seqlen:
        fail(f"a sequence has {longest} tokens, more than max_seqlen={schedule.max_seqlen}")
    if table_rows is not None and longest > table_rows:
        fail(f"rope's tables have {table_rows} rows, but a sequence has {longest} tokens")
    if (real.diff() > padded.diff()).any():
        fail("a sequence is longer in cu_seqlens than in cu_seqlens_padded")
