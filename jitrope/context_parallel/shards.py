"""A batch cut between ranks: collectives, the rows of each rank, and functions that cut and join.

The collectives are torch's functional ones, which can be compiled and exported.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # its defaults would keep a group that is there when Dynamo imports it
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ..base import arguments
from ..base.fit import Fail
from ..thd import cp_rank_order_to_sequence_order
from ..thd import ops as thd_ops
from ..thd.shape import Shape
from ..torch_state import collectives, dispatch_modes, is_compiling, transformed

Group = ProcessGroup | DeviceMesh | None

# ---- ranks ------------------------------------------------------------------------------------------


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


def ranks_of(function: str, group: Any, cp_size: int | None = None, cp_rank: int | None = None) -> Ranks:
    """The ranks from cp_size and cp_rank, else from the group, else from torch's default group, else one process."""
    fail = Fail(function)
    if isinstance(group, DeviceMesh) and group.ndim == 1:
        group = group.get_group()
    if not (group is None or isinstance(group, ProcessGroup) or group is dist.GroupMember.NON_GROUP_MEMBER):
        arguments.refuse(function, "group", group, 'a process group, a DeviceMesh of one axis (mesh["cp"]), or None')
    numbers = cp_size is not None or cp_rank is not None
    if numbers and group is not None:
        fail("group is given together with cp_size and cp_rank; pass either the group or the numbers")
    if numbers:
        if cp_size is None or cp_rank is None:
            fail(f"cp_size is {cp_size} and cp_rank is {cp_rank}; pass both, or a group")
        return Ranks(None, cp_size, cp_rank)
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return Ranks(None, 1, 0)
    group = dist.group.WORLD if group is None else group
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
    if not rows.numel():
        none = rows.new_empty(ranks.cp_size * len(rows), *rows.shape[1:])
        return Pending(none, none)
    return _begun(collectives.all_gather_into_tensor, rows, ranks, ranks.cp_size)


def all_to_all(rows: Tensor, sent: list[int], received: list[int], ranks: Ranks) -> Pending:
    """Send sent[r] rows to rank r, and receive received[r] rows from it."""
    return _begun(collectives.all_to_all_single, rows, ranks, received, sent)


def largest(x: Tensor, ranks: Ranks) -> Tensor:
    """The largest of all ranks' numbers."""
    return _begun(collectives.all_reduce, x, ranks, "max").wait()


def _begun(collective: Callable[..., Tensor], x: Tensor, ranks: Ranks, *words: Any) -> Pending:
    """A collective of x; a single rank's x is its result."""
    return Pending(x if ranks.cp_size == 1 else collective(x, *words, ranks.name), x)


# ---- their rows -------------------------------------------------------------------------------------


class kept:
    """A property that is computed once; in inference mode as a plain tensor, unless a compiled function computes it.

    What is computed under a dispatch mode (`torch.export`) or a transform of torch.func is not kept.

    `functools.cached_property` has a lock before Python 3.12, which torch.compile cannot trace.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function, self.name, self.__doc__ = function, function.__name__, function.__doc__

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        usual = is_compiling() or not torch.is_inference_mode_enabled()
        with nullcontext() if usual else torch.inference_mode(False):
            value = self.function(instance)
        if torch.compiler.is_dynamo_compiling() or not (dispatch_modes() or transformed()):
            setattr(instance, self.name, value)  # it is found before this object from now on
        return value


class Partition:
    """A packed batch cut between context-parallel ranks. Sequences may have any length.

    "dual_chunk" cuts each sequence into 2 cp_size chunks. A rank has chunk cp_rank and chunk 2 cp_size - 1 - cp_rank,
    so under a causal mask all ranks have equal work. "contiguous" cuts it into cp_size chunks. The chunks of a sequence
    differ by at most one token, and so do the rows of ranks. A rank's rows are its chunks of the first sequence, then
    those of the second, and so on. Spare tokens after the last sequence are cut like another sequence. Nothing here
    waits for the device.

    >>> part = Partition(torch.tensor([0, 7, 10]), 10, cp_size=2, cp_rank=0)
    >>> part.shard(torch.arange(10))
    tensor([0, 1, 6, 7, 9])

    Args:
        cu_seqlens: int32 or int64 offsets (N + 1) of the whole batch, from 0 and ascending. Do not write to them while
            this object lives, which makes its tables when they are needed.
        tokens: T, rows of the whole batch, including spare ones after the last sequence.
        group: a process group, or a DeviceMesh with one axis; default: torch's default group, or one process.
        cp_size, cp_rank: in place of group. `unshard` then works only for cp_size 1.
        cu_seqlens_padded: offsets that include padding after sequences. They then determine the cut.
        separate_padding: cut the tokens of a sequence and its padding apart, each into chunks, by both offsets. All
            ranks then have equal work in padded batches too, under a causal or full mask, and as many rows as without.
            It is for long sequences: of 4,096 tokens the busiest rank was slower than without (the page has times). A
            sequence's rows are the chunks of its tokens, then those of its padding.
        rule: "dual_chunk" or "contiguous".

    Attributes:
        rows: t, the number of tokens of this rank.

    Raises:
        InvalidInput: the arguments do not fit together.
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
        separate_padding: bool = False,
        rule: str = "dual_chunk",
    ) -> None:
        name = type(self).__name__
        offsets = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
        fail = thd_ops.fail_of(name, cu_seqlens=cu_seqlens, cu_seqlens_padded=offsets)
        self.cu_seqlens, self.offsets = cu_seqlens.contiguous(), offsets.contiguous()
        ranks = ranks_of(name, group, cp_size, cp_rank)
        both = {"cu_seqlens": self.cu_seqlens, "cu_seqlens_padded": self.offsets}
        thd_ops.check_offsets(fail, "cu_seqlens_padded", offsets, **both)
        self.each = 1  # sequences of `offsets` for one of the batch
        if arguments.flag(name, "separate_padding", separate_padding):
            if cu_seqlens_padded is None:
                fail("separate_padding=True needs cu_seqlens and cu_seqlens_padded; pass both")
            self.offsets = self.offsets.repeat(2, 1).T.flatten()[:-1]
            self.offsets[1::2] += self.cu_seqlens.diff()
            self.cu_seqlens, self.each = self.cu_seqlens.repeat(2, 1).T.flatten()[1:], 2  # padding has no tokens
        self.cu_seqlens_padded = None if cu_seqlens_padded is None else self.offsets
        sizes = {"tokens": tokens, "cp_size": ranks.cp_size, "cp_rank": ranks.cp_rank}
        self.shape = thd_ops.shape_of(fail, offsets, self.offsets, rule, **sizes)
        self.ranks: Ranks = ranks._replace(cp_size=self.shape.cp_size, cp_rank=self.shape.cp_rank)
        if self.shape.sequences < 1:
            fail("cu_seqlens has one offset; it must have those of one sequence at least")
        self.rows = self.shape.rows

    def __repr__(self) -> str:
        shape = self.shape
        rows, rank = f"{shape.rows} of {shape.tokens} tokens", f"rank {shape.cp_rank} of {shape.cp_size}"
        return f"{type(self).__name__}({rows}, {shape.sequences // self.each} sequences, {rank}, {shape.rule})"

    @kept
    def indices(self) -> Tensor:
        """The token of the batch for each row: (rows), int32."""
        return thd_ops.table("to_ranks", self.offsets, self.shape)

    @kept
    def position_ids(self) -> Tensor:
        """The position of each row in its sequence: (rows), int32, for `apply_rope`."""
        return thd_ops.table("positions", self.offsets, self.shape)

    @kept
    def local_cu_seqlens(self) -> Tensor:
        """The offsets (N + 1) of the sequences, with padding, in this rank's rows. They have the given dtype."""
        return cast(Tensor, self.shape.local(self.offsets[:: self.each]))

    def shard(self, x: Tensor) -> Tensor:
        """This rank's rows (rows, ...) of x (T, ...). The gradient is zero in all other rows.

        Raises:
            InvalidInput: x does not have T rows.
        """
        check_rows(self, thd_ops.fail_of("shard", gradient=True, x=x), "x", x, whole=True)
        return x.index_select(0, self.indices)

    def unshard(self, x: Tensor) -> Tensor:
        """All rows (T, ...) of all ranks' x (rows, ...), in the order of the batch. Every rank must call it.

        The gradient is for the sum of all ranks' losses: the fp32 sum of all ranks' gradients of a row.

        Raises:
            InvalidInput: x does not have this rank's rows, or the partition has no group; nothing was sent.
        """
        check_rows(self, thd_ops.fail_of("unshard", gradient=True, x=x), "x", x)
        rows, shape = _AllRows.apply(x, self), self.shape
        ordered = cp_rank_order_to_sequence_order(rows, self.offsets, shape.cp_size, shape.tokens, rule=shape.rule)
        return cast(Tensor, ordered)


def check_rows(of: Partition, fail: Fail, label: str, x: Tensor, whole: bool = False) -> None:
    """Refuse other rows than those of the batch, if `whole`, or of this rank, which then must be in a group."""
    shape, device, has = of.shape, of.offsets.device, len(x) if x.dim() else "no"
    rows, where = (shape.tokens, "") if whole else (shape.rows, f", rank {shape.cp_rank} of {shape.cp_size}")
    if has != rows:
        hint = "; pass this rank's rows, schedule.shard(x)" * (has == shape.tokens and not whole)
        fail(f"{label} has {has} rows; it must have {rows} (tokens={shape.tokens}{where}){hint}")
    if x.device != device:
        fail(f"{label} is on {x.device} but cu_seqlens on {device}")
    if not whole and shape.cp_size != 1 and of.ranks.group is None:
        fail(f"the {type(of).__name__} was made with cp_size and cp_rank; make it with a group")


def taken(x: Tensor, index: Tensor | None, rows: int) -> Tensor:
    """The rows of x in the order of an index, (rows, ...); see `thd_ops.move_rows`."""
    out = x.new_empty(rows, *x.shape[1:])
    thd_ops.move_rows((thd_ops.rows_of(x),), (out,), index)
    return out


class _AllRows(torch.autograd.Function):
    """All ranks' rows, padded to the same number and concatenated. Their gradients are added up over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: Partition) -> Tensor:
        ctx.part = part
        return all_gather(taken(x, None, part.shape.capacity), part.ranks).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        shape, ranks = ctx.part.shape, ctx.part.ranks
        splits = [shape.capacity] * shape.cp_size
        rows = all_to_all(gradient.contiguous(), splits, splits, ranks).wait()
        return taken(rows, all_ranks_rows(shape, rows.device), shape.rows), None
