"""Packed batches under context parallelism: tables of rows, and moves of rows, on any device.

They are torch.library ops, for torch.compile and fake tensors. CPU tensors, and dtypes that the kernels cannot add up,
use `reference`; nothing here waits for a GPU. The ops have no gradients: `thd` and `context_parallel` define them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.enqueue import Call, enqueue
from ..ops.watch import written
from ..plan.partition import Mask
from . import reference
from .corrections import Correction, correct
from .launch import correction_calls, rows_calls, segments_calls, table_calls
from .reference import Move, Segments, Shape


class Operation(NamedTuple):
    """An op. If it returns a new tensor, `fresh` makes it, and it is the first argument of the last two functions."""

    schema: str
    read: Callable[..., tuple[Any, ...]]  # turns the op's arguments into those of the functions below
    fresh: Callable[..., Tensor] | None
    reference: Callable[..., object]  # plain torch
    calls: Callable[..., list[Call] | None]  # the launches on a GPU; None: use plain torch there too
    written: Callable[..., Sequence[Any]] = lambda *words: ()  # the tensors that it overwrites


_SHAPE = "SymInt tokens, SymInt sequences, int cp_size, int cp_rank, str rule"
_TABLES = "Tensor? cu_seqlens, Tensor? lengths, Tensor? table"
_STEPS = "Tensor(a!)? out, Tensor? step, Tensor(c!)? lse, Tensor(d!)? lse_step"

OPERATIONS = (
    Operation(
        f"thd_table(Tensor cu_seqlens, str map, SymInt rows, {_SHAPE}) -> Tensor",
        lambda cu_seqlens, map, rows, *shape: (cu_seqlens, map, rows, Shape(*shape)),
        lambda cu_seqlens, map, rows, shape: cu_seqlens.new_empty(rows, dtype=torch.int32),
        lambda out, *words: out.copy_(reference.table(*words)),
        table_calls,
    ),
    Operation(
        f"thd_rows(Tensor[] inputs, Tensor(a!)[] outputs, str map, {_TABLES}, {_SHAPE}) -> ()",
        lambda inputs, outputs, map, offsets, lengths, table, *shape: (
            Move(inputs, outputs, map, offsets, lengths, table, Shape(*shape)),
        ),
        None,
        reference.move,
        rows_calls,
        lambda given: given.outputs,
    ),
    Operation(
        f"cp_segments(Tensor cu_seqlens, Tensor? cu_seqlens_padded, int left, int right, {_SHAPE}) -> Tensor",
        lambda cu_seqlens, padded, left, right, *shape: (cu_seqlens, padded, Shape(*shape), Mask(left, right)),
        reference.empty_segments,
        reference.fill_segments,
        segments_calls,
    ),
    Operation(
        f"thd_correct(str quantity, str first, str second, bool packed, Tensor cu_seqlens, int rows, {_STEPS}) -> ()",
        lambda *given: (Correction(*given),),
        None,
        correct,
        correction_calls,
        lambda given: [given.written],
    ),
)


def _fake(op: Operation, *given: Any) -> Tensor | None:
    return op.fresh(*op.read(*given)) if op.fresh else None


def _run(op: Operation, launches: bool, *given: Any) -> Tensor | None:
    """Call an op: by its launches if it has some for these tensors, which are on a GPU, else in plain torch."""
    words = op.read(*given)
    made = (op.fresh(*words),) if op.fresh else ()
    calls = op.calls(*made, *words) if launches else None
    if calls is None:
        with torch.no_grad():  # an exported program writes into views here
            op.reference(*made, *words)
    else:
        for call in calls:
            enqueue(call)
        written(op.written(*words))
    return made[0] if made else None


_lib = torch.library.Library("jitrope", "FRAGMENT")


def register(key: str, launches: bool) -> None:
    """Implement all ops for a dispatch key of torch."""
    for op in OPERATIONS:
        _lib.impl(op.schema.partition("(")[0], partial(_run, op, launches), key)


for _op in OPERATIONS:
    _name = _lib.define(_op.schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"jitrope::{_name}", partial(_fake, _op), lib=_lib)
register("CPU", launches=False)
register("CUDA", launches=True)


# ---- for the modules above ---------------------------------------------------------------------------


def table(map: str, cu_seqlens: Tensor, shape: Shape, rows: int | None = None) -> Tensor:
    """The source of each row, (rows), int32; see `reference.table`. rows: default: all rows of the map."""
    rows = (shape.tokens if map == "to_sequences" else shape.rows) if rows is None else rows
    found: Tensor = torch.ops.jitrope.thd_table(cu_seqlens.contiguous(), map, rows, *shape)
    return found


def segments(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, shape: Shape, mask: Mask) -> Segments:
    """A rank's attention as plain variable-length attention; see `Segments`."""
    if cu_seqlens_padded is not None:
        cu_seqlens_padded = cu_seqlens_padded.to(cu_seqlens.dtype).contiguous()
    flat = torch.ops.jitrope.cp_segments(cu_seqlens.contiguous(), cu_seqlens_padded, *mask, *shape)
    return Segments.of(flat, shape, mask, cu_seqlens_padded is not None)


def move(given: Move) -> None:
    """Move rows; see `Move`."""
    offsets, shape = given.cu_seqlens, given.shape
    shape = shape if offsets is None else shape._replace(sequences=len(offsets) - 1)
    torch.ops.jitrope.thd_rows(list(given.inputs), list(given.outputs), *given[2:-1], *shape)


def move_rows(inputs: Sequence[Tensor], outputs: Sequence[Tensor], index: Tensor | None) -> None:
    """outputs[i][row] = inputs[i][index[row]], or the sum in fp32 of inputs[i][index[n, row]] over n; -1 adds nothing.

    One launch for one or two tensors. Without an index rows keep their places, and rows that an input lacks
    become zero.
    """
    move(Move(inputs, outputs, "stay" if index is None else "table", table=index))
