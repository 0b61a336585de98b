"""A batch cut between ranks: which rows are whose, cutting, and putting together again."""

from __future__ import annotations

from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from ..base import arguments
from ..ops.fit import failing
from ..plan.partition import local_rows
from ..thd import ops as thd_ops
from ..thd.reference import Shape
from .checks import checked_batch
from .groups import Ranks, all_gather, all_to_all, everyones_rows, ranks_of


class Partition:
    """A packed batch cut between context-parallel ranks. Lengths need not be multiples of anything.

    Each sequence is cut into 2 cp_size chunks ("dual_chunk": a rank has chunk cp_rank and, counted from the end, chunk
    cp_rank: under a causal mask all ranks have equal work; Llama 3, arXiv:2407.21783, section 3.3.2, and
    TransformerEngine), or cp_size ("contiguous"). Chunks of a sequence differ by
    one token at most, and so do the rows of ranks. A rank's rows: of each sequence in turn, its chunks in order.
    Spare tokens after the last sequence are cut as one more. Nothing is read by the host.

    >>> part = Partition(cu_seqlens, tokens, group=group)
    >>> q = part.shard(q)  # (rows, H, D) of (T, H, D)
    >>> out = part.unshard(all_gather_attention(q, k, v, cu_seqlens, tokens=tokens, group=group))

    Args:
        cu_seqlens: int32 or int64 offsets (N + 1) of the whole batch, from 0 and ascending. With padding between
            sequences: those with the padding.
        tokens: T, rows of the whole batch.
        group: a process group; default: torch's default group, or one process.
        cp_size, cp_rank: in place of group; `unshard` then works for cp_size 1 alone.
        rule: "dual_chunk" or "contiguous".

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
        rule: str = "dual_chunk",
    ) -> None:
        fail = failing("Partition")
        tokens, rule = checked_batch("Partition", cu_seqlens, None, tokens, rule, fail)
        self.ranks: Ranks = ranks_of("Partition", group, cp_size, cp_rank, fail)
        self.shape = Shape(tokens, len(cu_seqlens) - 1, *self.ranks[1:], rule)
        self._offsets = cu_seqlens

    def __repr__(self) -> str:
        return f"Partition({described(self.shape)})"

    @property
    def rows(self) -> int:
        """Tokens of this rank."""
        return self.shape.rows

    @cached_property
    def indices(self) -> Tensor:
        """The token of the batch that each row is: (rows), int32."""
        return thd_ops.table("to_ranks", self._offsets, self.shape)

    @cached_property
    def position_ids(self) -> Tensor:
        """Each row's position in its sequence: (rows), int32. What `apply_rope` takes."""
        return thd_ops.table("positions", self._offsets, self.shape)

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """Offsets (N + 1) of the sequences among this rank's rows, of the dtype given."""
        local: Tensor = local_rows(self._offsets, *_place(self.shape))
        return local

    @cached_property
    def to_ranks(self) -> Tensor:
        """The token of each row of all ranks, one behind the other, each padded to the same number of rows; or -1.

        (cp_size * ceil(T / cp_size)), int32.
        """
        return thd_ops.table("to_ranks", self._offsets, self.shape._replace(cp_rank=0), self.shape.all_rows)

    @cached_property
    def to_sequences(self) -> Tensor:
        """Where each token is among those rows: (T), int32."""
        return thd_ops.table("to_sequences", self._offsets, self.shape)

    @cached_property
    def _own_rows(self) -> Tensor:
        """Each token's row here, or -1: (T)."""
        row = self.to_sequences - self.shape.cp_rank * self.shape.capacity
        return torch.where((row >= 0) & (row < self.shape.capacity), row, -1)

    def shard(self, x: Tensor) -> Tensor:
        """This rank's rows (rows, ...) of x (T, ...). The gradient has those rows, and zeros elsewhere.

        Raises:
            InvalidInput: x has not T rows.
        """
        if arguments.tensor("shard", "x", x).dim() <= 0 or len(x) != self.shape.tokens:
            failing("shard")(f"x has shape {tuple(x.shape)}; the batch has T={self.shape.tokens} tokens")
        self._require_device("shard", x)
        rows: Tensor = _Shard.apply(x, self)
        return rows

    def unshard(self, x: Tensor) -> Tensor:
        """All rows (T, ...) of everyone's x (rows, ...), in the order of the batch. A collective.

        The gradient is that of the sum of all ranks' losses: everyone's gradients of a row added up, in fp32.

        Raises:
            InvalidInput: x has not this rank's rows, or the partition was made without a group; nothing was sent.
        """
        fail = failing("unshard")
        if arguments.tensor("unshard", "x", x).dim() <= 0 or len(x) != self.rows:
            fail(f"x has shape {tuple(x.shape)}; this rank has {self.rows} rows of tokens={self.shape.tokens}")
        if self.ranks.group is None and self.shape.cp_size != 1:
            fail("the partition was made with cp_size and cp_rank; make it with a group")
        self._require_device("unshard", x)
        rows: Tensor = _Unshard.apply(x, self)
        return rows

    def _require_device(self, function: str, x: Tensor) -> None:
        device = self._offsets.device
        if x.device != device:
            failing(function)(f"x is on {x.device} but cu_seqlens on {device}")


def _of(function: str, cu_seqlens: Tensor, tokens: int, cp_size: int, cp_rank: int, rule: str) -> Partition:
    """A partition by numbers, which have to be given."""
    size = arguments.whole(function, "cp_size", cp_size, 1)
    return Partition(
        cu_seqlens, tokens, cp_size=size, cp_rank=arguments.whole(function, "cp_rank", cp_rank, 0), rule=rule
    )


def partition_indices(cu_seqlens: Tensor, tokens: int, cp_size: int, cp_rank: int, rule: str = "dual_chunk") -> Tensor:
    """The token of the batch that each of a rank's rows is: (rows), int32. Arguments and errors are `Partition`'s."""
    return _of("partition_indices", cu_seqlens, tokens, cp_size, cp_rank, rule).indices


def position_ids(cu_seqlens: Tensor, tokens: int, cp_size: int, cp_rank: int, rule: str = "dual_chunk") -> Tensor:
    """The position in its sequence of each of a rank's rows: (rows), int32. Arguments and errors are `Partition`'s."""
    return _of("position_ids", cu_seqlens, tokens, cp_size, cp_rank, rule).position_ids


def local_cu_seqlens(cu_seqlens: Tensor, cp_size: int, cp_rank: int, rule: str = "dual_chunk") -> Tensor:
    """Offsets (N + 1) of the sequences among a rank's rows. Arguments and errors are `Partition`'s."""
    return _of("local_cu_seqlens", cu_seqlens, 0, cp_size, cp_rank, rule).cu_seqlens


def shard(x: Tensor, cu_seqlens: Tensor, cp_size: int, cp_rank: int, rule: str = "dual_chunk") -> Tensor:
    """A rank's rows (rows, ...) of x (T, ...), as `Partition.shard`. Arguments and errors are `Partition`'s."""
    tokens = len(x) if arguments.tensor("shard", "x", x).dim() else 0
    return _of("shard", cu_seqlens, tokens, cp_size, cp_rank, rule).shard(x)


def unshard(
    x: Tensor, cu_seqlens: Tensor, tokens: int, *, group: ProcessGroup | None = None, rule: str = "dual_chunk"
) -> Tensor:
    """All rows (T, ...) of everyone's x (rows, ...). A collective, as `Partition.unshard`, whose errors are its own."""
    return Partition(cu_seqlens, tokens, group=group, rule=rule).unshard(x)


def described(shape: Shape) -> str:
    """A batch and what a rank has of it, for a `repr`."""
    return (
        f"{shape.rows} of {shape.tokens} tokens, {shape.sequences} sequences, rank {shape.cp_rank} of {shape.cp_size}, "
        f"{shape.rule}"
    )


def taken(x: Tensor, index: Tensor | None, rows: int) -> Tensor:
    """x's rows in another order, (rows, ...); see `thd_ops.move_rows`."""
    out = x.new_empty(rows, *x.shape[1:])
    width = prod(x.shape[1:])
    if out.numel():
        thd_ops.move_rows((x.reshape(len(x), width),), (out.view(rows, width),), index)
    return out


def _place(shape: Shape) -> tuple[int, int, str]:
    return shape.cp_rank, shape.cp_size, shape.rule


class _Shard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, part: Partition) -> Tensor:
        ctx.part = part
        return taken(x, part.indices, part.rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        part: Partition = ctx.part
        return taken(gradient, part._own_rows, part.shape.tokens), None


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, part: Partition) -> Tensor:
        ctx.part = part
        rows = all_gather(taken(x, None, part.shape.capacity), part.ranks).wait()
        return taken(rows, part.to_sequences, part.shape.tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        part: Partition = ctx.part
        shape = part.shape
        splits = [shape.capacity] * shape.cp_size
        sent = taken(gradient, part.to_ranks, len(part.to_ranks))
        rows = all_to_all(sent, splits, splits, part.ranks).wait()
        return taken(rows, everyones_rows(shape, rows.device), shape.rows), None
