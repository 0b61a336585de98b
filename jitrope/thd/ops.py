"""Packed batches under context parallelism: tables of rows, and moving rows, on whatever device the tensors are.

torch.library ops, so that torch.compile and fake tensors see them; a row of `OPERATIONS` each. CPU tensors, and dtypes
that the kernels do not add up, take `reference`; on a GPU nothing here waits. None of the ops has a gradient of its
own: `thd` and `context_parallel`, which know the way back, do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.arguments import shown
from ..base.errors import InvalidInput
from ..plan.partition import Mask
from . import reference
from .launch import Call, correction_calls, launch, rows_calls, segments_calls, table_calls
from .reference import Segments, Shape


class Operation(NamedTuple):
    """An op. All functions but `read` take what `read` makes of its arguments; the last two the new tensor first."""

    schema: str
    read: Callable[..., tuple[Any, ...]]
    fresh: Callable[..., Tensor] | None  # the tensor that it returns, to be filled: all that a fake needs
    reference: Callable[..., None]  # fills or writes in plain torch
    calls: Callable[..., list[Call] | None]  # what a GPU gets instead; None: plain torch does it there too


def _with_shape(*given: Any) -> tuple[Any, ...]:
    return *given[:-5], Shape(*given[-5:])


def _with_mask(cu_seqlens: Tensor, padded: Tensor | None, left: int, right: int, *shape: Any) -> tuple[Any, ...]:
    return cu_seqlens, padded, Shape(*shape), Mask(left, right)


def _check_values(cu_seqlens: Tensor, tokens: int) -> None:
    """Refuse offsets that are none, where they can be read without waiting for a device."""
    ends = cu_seqlens.tolist() if cu_seqlens.device.type == "cpu" else [0]
    if ends[0] != 0 or ends != sorted(ends) or ends[-1] > tokens:
        raise InvalidInput(
            f"cu_seqlens is {shown(ends)}; it must ascend from 0 to at most {tokens}, the number of tokens (tokens, "
            "total_tokens or the rows of x)"
        )


def _table(out: Tensor, cu_seqlens: Tensor, map: str, rows: int, shape: Shape) -> None:
    _check_values(cu_seqlens, shape.tokens)
    out.copy_(reference.table(cu_seqlens, map, rows, shape))


def _rows(
    _: None,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    map: str,
    cu_seqlens: Any,
    lengths: Any,
    table: Tensor | None,
    shape: Shape,
) -> None:
    if map == "tail":
        for x in outputs:
            reference.zero_tail(x, cu_seqlens)
    elif map == "valid":
        reference.copy_valid(inputs, outputs, cu_seqlens, lengths)
    else:
        if map not in ("stay", "table"):
            _check_values(cu_seqlens, shape.tokens)
            table = reference.table(cu_seqlens, map, len(outputs[0]), shape)
        reference.move_rows(inputs, outputs, table)


def _segments(flat: Tensor, cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, shape: Shape, mask: Mask) -> None:
    for offsets in (cu_seqlens, cu_seqlens_padded):
        if offsets is not None:
            _check_values(offsets, shape.tokens)
    reference.fill_segments(flat, cu_seqlens, cu_seqlens_padded, shape, mask)


_SHAPE = "int tokens, int sequences, int cp_size, int cp_rank, str rule"
_TABLES = "Tensor? cu_seqlens, Tensor? lengths, Tensor? table"
_STEPS = "Tensor(a!)? out, Tensor? step, Tensor(c!)? lse, Tensor(d!)? lse_step"

OPERATIONS = (
    Operation(
        f"thd_table(Tensor cu_seqlens, str map, int rows, {_SHAPE}) -> Tensor",
        _with_shape,
        lambda cu_seqlens, map, rows, shape: cu_seqlens.new_empty(rows, dtype=torch.int32),
        _table,
        table_calls,
    ),
    Operation(
        f"thd_rows(Tensor[] inputs, Tensor(a!)[] outputs, str map, {_TABLES}, {_SHAPE}) -> ()",
        _with_shape,
        None,
        _rows,
        rows_calls,
    ),
    Operation(
        f"cp_segments(Tensor cu_seqlens, Tensor? cu_seqlens_padded, int left, int right, {_SHAPE}) -> Tensor",
        _with_mask,
        reference.empty_segments,
        _segments,
        segments_calls,
    ),
    Operation(
        f"thd_correct(str quantity, str first, str second, bool packed, Tensor offsets, int rows, {_STEPS}) -> ()",
        lambda *given: given,
        None,
        lambda _, *given: reference.correct(*given),
        correction_calls,
    ),
)


def _fake(op: Operation, *given: Any) -> Tensor | None:
    return None if op.fresh is None else op.fresh(*op.read(*given))


def _on_cpu(op: Operation, *given: Any) -> Tensor | None:
    out = _fake(op, *given)
    op.reference(out, *op.read(*given))
    return out


def on_gpu(op: Operation, *given: Any) -> Tensor | None:
    """Call an op on a GPU's tensors."""
    words = op.read(*given)
    out = None if op.fresh is None else op.fresh(*words)
    calls = op.calls(out, *words)
    if calls is None:
        op.reference(out, *words)
    else:
        for call in calls:
            launch(call)
    return out


_lib = torch.library.Library("jitrope", "FRAGMENT")


def register(key: str, run: Callable[..., Tensor | None]) -> None:
    """Have all ops run so on a dispatch key of torch."""
    for op in OPERATIONS:
        _lib.impl(op.schema.partition("(")[0], partial(run, op), key)


for _op in OPERATIONS:
    _name = _lib.define(_op.schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"jitrope::{_name}", partial(_fake, _op), lib=_lib)
register("CPU", _on_cpu)
register("CUDA", on_gpu)


# ---- for the modules above ---------------------------------------------------------------------------


def table(map: str, cu_seqlens: Tensor, shape: Shape, rows: int | None = None) -> Tensor:
    """The source of each row under a map, (rows), int32, by default of as many rows as there are:

    - "to_ranks": the token of the batch that each row of the rank is, and on of the ranks after it; -1: none
    - "positions": that token's position in its sequence, 0 for spare tokens
    - "to_sequences": where each token of the batch is among all ranks' shards, one behind the other
    """
    rows = (shape.tokens if map == "to_sequences" else shape.rows) if rows is None else rows
    found: Tensor = torch.ops.jitrope.thd_table(cu_seqlens.contiguous(), map, rows, *shape)
    return found


def segments(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, shape: Shape, mask: Mask) -> Segments:
    """A rank's attention as plain variable-length attention; see `Segments`."""
    if cu_seqlens_padded is not None:
        cu_seqlens_padded = cu_seqlens_padded.to(cu_seqlens.dtype).contiguous()
    flat = torch.ops.jitrope.cp_segments(cu_seqlens.contiguous(), cu_seqlens_padded, *mask, *shape)
    return Segments.of(flat, shape, mask, cu_seqlens_padded is not None)


_NO_SHAPE = Shape(0, 0, 1, 0)


def move(
    map: str,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    cu_seqlens: Tensor,
    shape: Shape | None = None,
    lengths: Tensor | None = None,
) -> None:
    """Move rows, of one or two tensors in one launch. What a row of an output takes, by the map:

    - "to_ranks" (from shape.cp_rank on), "to_sequences": the row that `table` says
    - "valid": the row of the input, if it is none of the padding by `lengths`, the offsets of what is valid
    - "tail": zeros from row cu_seqlens[-1] on
    """
    if shape is None:
        shape = _NO_SHAPE._replace(sequences=len(cu_seqlens) - 1)
    lengths = None if lengths is None else lengths.contiguous()
    torch.ops.jitrope.thd_rows(list(inputs), list(outputs), map, cu_seqlens.contiguous(), lengths, None, *shape)


def move_rows(inputs: Sequence[Tensor], outputs: Sequence[Tensor], index: Tensor | None) -> None:
    """outputs[i][row] = inputs[i][index[row]], or the sum in fp32 of inputs[i][index[n, row]] over n; -1 adds nothing.

    One launch for one or two tensors. Without an index rows stay where they are, and rows that an input does not have
    are zero.
    """
    map = "stay" if index is None else "table"
    torch.ops.jitrope.thd_rows(list(inputs), list(outputs), map, None, None, index, *_NO_SHAPE)


def correct(
    quantity: str,
    first: str,
    second: str,
    cu_seqlens: Tensor,
    rows: int,
    *,
    packed: bool = True,
    out: Tensor | None = None,
    step: Tensor | None = None,
    lse: Tensor | None = None,
    lse_step: Tensor | None = None,
) -> None:
    """Join a step of ring attention with those before it; see `reference.correct`."""
    torch.ops.jitrope.thd_correct(quantity, first, second, packed, cu_seqlens, rows, out, step, lse, lse_step)
