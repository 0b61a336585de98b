"""The ranks of a call, and the collectives between them."""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..base import arguments
from ..ops.fit import failing
from ..thd.reference import Shape


class Ranks(NamedTuple):
    """The ranks of a call. group is None for a single process and for ranks given as numbers."""

    group: ProcessGroup | None
    cp_size: int
    cp_rank: int

    def __reduce__(self) -> tuple[Any, ...]:
        if self.group is not None:
            text = "a Partition or Schedule with a process group belongs to its process: make it from cu_seqlens there"
            raise pickle.PicklingError(text)
        return Ranks, tuple(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return self  # groups cannot be copied


class Pending(NamedTuple):
    """Rows that a collective is moving."""

    rows: Tensor
    work: Any
    sent: Tensor  # must live until the collective ends

    def wait(self) -> Tensor:
        """Return the rows. With CUDA only the current stream waits."""
        if self.work is not None:
            self.work.wait()
        return self.rows


def ranks_of(
    function: str, group: ProcessGroup | None, cp_size: int | None = None, cp_rank: int | None = None
) -> Ranks:
    """The ranks from cp_size and cp_rank, else from the group, else from torch's default group, else one process."""
    fail = failing(function)
    if not (group is None or isinstance(group, ProcessGroup) or group is dist.GroupMember.NON_GROUP_MEMBER):
        arguments.refuse(function, "group", group, "a torch.distributed process group, or None")
    if cp_size is not None or cp_rank is not None:
        if group is not None:
            fail("group is given together with cp_size and cp_rank; pass either the group or the numbers")
        size = 1 if cp_size is None else arguments.whole(function, "cp_size", cp_size, 1)
        rank = 0 if cp_rank is None else arguments.whole(function, "cp_rank", cp_rank, 0)
        if rank >= size:
            fail(f"cp_rank is {rank}, cp_size {size}; ranks go from 0 to cp_size - 1")
        return Ranks(None, size, rank)
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return Ranks(None, 1, 0)
    group = dist.group.WORLD if group is None else group
    rank = dist.get_rank(group)
    if rank < 0:
        fail("this process is not in the group")
    return Ranks(group, dist.get_world_size(group), rank)


def all_ranks_rows(shape: Shape, device: torch.device) -> Tensor:
    """(cp_size, rows) int32: the place of each row of this rank among each rank's rows of an all-gather."""
    first = torch.arange(shape.cp_size, dtype=torch.int32, device=device) * shape.capacity
    return first[:, None] + torch.arange(shape.rows, dtype=torch.int32, device=device)


def all_gather(rows: Tensor, ranks: Ranks) -> Pending:
    """All ranks' rows (R, ...), concatenated in rank order: (cp_size * R, ...). All must have the same R."""
    if ranks.cp_size == 1:
        return Pending(rows, None, rows)
    out = rows.new_empty(ranks.cp_size * len(rows), *rows.shape[1:])
    if not out.numel():
        return Pending(out, None, rows)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the first from torch 2.13 on
    return Pending(out, gather(out, rows, group=ranks.group, async_op=True), rows)


def all_to_all(rows: Tensor, sent: list[int], received: list[int], ranks: Ranks) -> Pending:
    """Send sent[r] rows to rank r, and receive received[r] rows from it."""
    if ranks.cp_size == 1:
        return Pending(rows, None, rows)
    out = rows.new_empty(sum(received), *rows.shape[1:])
    return Pending(out, dist.all_to_all_single(out, rows, received, sent, group=ranks.group, async_op=True), rows)


def gather_values(x: Tensor, ranks: Ranks) -> list[list[Any]]:
    """Return all ranks' numbers. Waits for the device."""
    values: list[list[Any]] = all_gather(x[None], ranks).wait().tolist()
    return values
