"""The ranks of a call, and collectives between them: torch's functional ones, which can be compiled and exported."""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ..base import arguments
from ..ops.fit import failing
from ..ops.watch import collectives
from ..thd.reference import Shape


class Ranks(NamedTuple):
    """The ranks of a call. group is None for a single process and for ranks given as numbers."""

    group: ProcessGroup | None
    cp_size: int
    cp_rank: int
    name: str = ""  # the group's

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
    sent: Tensor  # must live until the collective ends

    def wait(self) -> Tensor:
        """Return the rows. With CUDA only the current stream waits."""
        return self.rows if self.rows is self.sent else collectives.wait_tensor(self.rows)


def ranks_of(
    function: str, group: ProcessGroup | DeviceMesh | None, cp_size: int | None = None, cp_rank: int | None = None
) -> Ranks:
    """The ranks from cp_size and cp_rank, else from the group, else from torch's default group, else one process."""
    fail = failing(function)
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            fail(f'group is a DeviceMesh of {group.ndim} axes; pass one of them, as mesh["cp"]')
        group = group.get_group()
    if not (group is None or isinstance(group, ProcessGroup) or group is dist.GroupMember.NON_GROUP_MEMBER):
        arguments.refuse(function, "group", group, "a process group, a DeviceMesh with one axis, or None")
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
    assert group is not None  # there is a default group
    rank = dist.get_rank(group)
    if rank < 0:
        fail("this process is not in the group")
    return Ranks(group, dist.get_world_size(group), rank, group.group_name)


def all_ranks_rows(shape: Shape, device: torch.device) -> Tensor:
    """(cp_size, rows) int32: the place of each row of this rank among each rank's rows of an all-gather."""
    first = torch.arange(shape.cp_size, dtype=torch.int32, device=device) * shape.capacity
    return first[:, None] + torch.arange(shape.rows, dtype=torch.int32, device=device)


def all_gather(rows: Tensor, ranks: Ranks) -> Pending:
    """All ranks' rows (R, ...), concatenated in rank order: (cp_size * R, ...). All must have the same R."""
    if ranks.cp_size == 1:
        return Pending(rows, rows)
    if not rows.numel():
        none = rows.new_empty(ranks.cp_size * len(rows), *rows.shape[1:])
        return Pending(none, none)
    return Pending(collectives.all_gather_into_tensor(rows, ranks.cp_size, ranks.name), rows)


def all_to_all(rows: Tensor, sent: list[int], received: list[int], ranks: Ranks) -> Pending:
    """Send sent[r] rows to rank r, and receive received[r] rows from it."""
    if ranks.cp_size == 1:
        return Pending(rows, rows)
    return Pending(collectives.all_to_all_single(rows, received, sent, ranks.name), rows)


def largest(x: Tensor, ranks: Ranks) -> Tensor:
    """The largest of all ranks' numbers."""
    if ranks.cp_size == 1:
        return x
    return Pending(collectives.all_reduce(x, "max", ranks.name), x).wait()
