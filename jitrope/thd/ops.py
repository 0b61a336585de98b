"""Packed batches under context parallelism: tables of rows, and moving rows, on whatever device the tensors are.

torch.library ops, so that torch.compile and fake tensors see them. CPU tensors, and dtypes that the kernels do not add
up, take `thd_reference`; nothing here waits for a device. None of the ops has a gradient of its own: `thd` and
`context_parallel`, which know the way back, do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..base.arguments import shown
from ..base.errors import InvalidInput
from ..plan.partition import Mask
from . import corrections as thd_corrections
from . import launch as runtime
from . import reference
from .reference import Segments, Shape

_SHAPE = "int tokens, int sequences, int cp_size, int cp_rank, str rule"
_TABLES = "Tensor? cu_seqlens, Tensor? lengths, Tensor? table"
_STEPS = "Tensor(a!)? out, Tensor? step, Tensor(c!)? lse, Tensor(d!)? lse_step"
_lib = torch.library.Library("jitrope", "FRAGMENT")
for _schema in (
    f"thd_table(Tensor cu_seqlens, str map, int rows, {_SHAPE}) -> Tensor",
    f"thd_rows(Tensor[] inputs, Tensor(a!)[] outputs, str map, {_TABLES}, {_SHAPE}) -> ()",
    f"cp_segments(Tensor cu_seqlens, Tensor? cu_seqlens_padded, int left, int right, {_SHAPE}) -> Tensor",
    f"thd_correct(str quantity, str first, str second, bool packed, Tensor offsets, int rows, {_STEPS}) -> ()",
):
    _lib.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


# ---- on a CPU ------------------------------------------------------------------------------------------


def _check_values(cu_seqlens: Tensor, tokens: int) -> None:
    """Refuse offsets that are none, where they can be read without waiting for a device."""
    ends = cu_seqlens.tolist() if cu_seqlens.device.type == "cpu" else [0]
    if ends[0] != 0 or ends != sorted(ends) or ends[-1] > tokens:
        raise InvalidInput(
            f"cu_seqlens is {shown(ends)}; it must ascend from 0 to at most {tokens}, the number of tokens (tokens, "
            "total_tokens or the rows of x)"
        )


def _cpu_table(cu_seqlens: Tensor, map: str, rows: int, *shape: Any) -> Tensor:
    s = Shape(*shape)
    _check_values(cu_seqlens, s.tokens)
    if map == "to_ranks" and rows == s.cp_size * s.capacity and s.cp_rank == 0:
        return reference.to_ranks(cu_seqlens, s)
    functions = {
        "to_ranks": reference.partition_indices,
        "positions": reference.position_ids,
        "to_sequences": reference.to_sequences,
    }
    return functions[map](cu_seqlens, s)


def _cpu_rows(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], map: str, cu_seqlens: Tensor | None, lengths: Tensor | None,
    table: Tensor | None, *shape: Any,
) -> None:  # fmt: skip
    if map in ("stay", "table"):
        reference.move_rows(inputs, outputs, table)
    elif map == "tail":
        assert cu_seqlens is not None
        for x in outputs:
            reference.zero_tail_(x, cu_seqlens)
    elif map == "valid":
        assert cu_seqlens is not None
        assert lengths is not None
        reference.copy_valid(inputs, outputs, cu_seqlens, lengths)
    else:
        assert cu_seqlens is not None
        reference.move_rows(inputs, outputs, _cpu_table(cu_seqlens, map, len(outputs[0]), *shape))


def _cpu_segments(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, left: int, right: int, *shape: Any) -> Tensor:
    s, mask = Shape(*shape), Mask(left, right)
    for offsets in (cu_seqlens, cu_seqlens_padded):
        if offsets is not None:
            _check_values(offsets, s.tokens)
    tables = [x.view(-1) for x in reference.segments(cu_seqlens, cu_seqlens_padded, s, mask) if x is not None]
    rest = _size(s, mask, cu_seqlens_padded) - sum(map(len, tables))  # what kernels keep between them
    return torch.cat((*tables, tables[0].new_full((rest,), -1)))


# ---- on a GPU ------------------------------------------------------------------------------------------


def _cuda_table(cu_seqlens: Tensor, map: str, rows: int, *shape: Any) -> Tensor:
    return runtime.table(map, cu_seqlens, Shape(*shape), rows)


def _cuda_rows(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], map: str, cu_seqlens: Tensor | None, lengths: Tensor | None,
    table: Tensor | None, *shape: Any,
) -> None:  # fmt: skip
    sums = table is not None and table.dim() == 2
    whole = all(x.is_contiguous() or x.numel() == 0 or x[0].is_contiguous() for x in (*inputs, *outputs))
    if whole and len(outputs) <= 2 and not (sums and inputs[0].dtype not in runtime.SUMMED):
        runtime.move(map, inputs, outputs, cu_seqlens, lengths, table, Shape(*shape))
    else:
        _cpu_rows(inputs, outputs, map, cu_seqlens, lengths, table, *shape)


def _cuda_segments(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, left: int, right: int, *shape: Any) -> Tensor:
    return runtime.segments(cu_seqlens, cu_seqlens_padded, Shape(*shape), Mask(left, right))


# ---- both ----------------------------------------------------------------------------------------------


def _size(shape: Shape, mask: Mask, cu_seqlens_padded: Tensor | None) -> int:
    sizes = reference.layout(shape, mask, cu_seqlens_padded is not None)
    return sum(math.prod(size) for size in sizes.values() if size)


def _table_fake(cu_seqlens: Tensor, map: str, rows: int, *_: Any) -> Tensor:
    return cu_seqlens.new_empty(rows, dtype=torch.int32)


def _segments_fake(
    cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, left: int, right: int, *shape: Any
) -> Tensor:  # fmt: skip
    return cu_seqlens.new_empty(_size(Shape(*shape), Mask(left, right), cu_seqlens_padded), dtype=torch.int32)


def _register(key: str, *implementations: Callable[..., Any]) -> None:
    for name, implementation in zip(("thd_table", "thd_rows", "cp_segments", "thd_correct"), implementations):
        _lib.impl(name, implementation, key)


_register("CPU", _cpu_table, _cpu_rows, _cpu_segments, thd_corrections.correct)
CUDA = _cuda_table, _cuda_rows, _cuda_segments, runtime.correct
_register("CUDA", *CUDA)
torch.library.register_fake("jitrope::thd_table", _table_fake, lib=_lib)
torch.library.register_fake("jitrope::cp_segments", _segments_fake, lib=_lib)
torch.library.register_fake("jitrope::thd_rows", lambda *_: None, lib=_lib)
torch.library.register_fake("jitrope::thd_correct", lambda *_: None, lib=_lib)


# ---- for the modules above ---------------------------------------------------------------------------


def partition_indices(cu_seqlens: Tensor, shape: Shape) -> Tensor:
    """The token of the batch that each of a rank's rows is: (rows), int32."""
    return torch.ops.jitrope.thd_table(cu_seqlens.contiguous(), "to_ranks", shape.rows, *shape)  # type: ignore[no-any-return]


def position_ids(cu_seqlens: Tensor, shape: Shape) -> Tensor:
    """The position in its sequence of each of a rank's rows: (rows), int32. That of spare rows is 0."""
    return torch.ops.jitrope.thd_table(cu_seqlens.contiguous(), "positions", shape.rows, *shape)  # type: ignore[no-any-return]


def to_ranks(cu_seqlens: Tensor, shape: Shape) -> Tensor:
    """For each row of all ranks' shards, one behind the other: its token, or -1. (cp_size * capacity), int32."""
    everyone = shape._replace(cp_rank=0)
    return torch.ops.jitrope.thd_table(cu_seqlens.contiguous(), "to_ranks", shape.cp_size * shape.capacity, *everyone)  # type: ignore[no-any-return]


def to_sequences(cu_seqlens: Tensor, shape: Shape) -> Tensor:
    """The inverse: where each token is among all ranks' shards. (tokens), int32."""
    return torch.ops.jitrope.thd_table(cu_seqlens.contiguous(), "to_sequences", shape.tokens, *shape)  # type: ignore[no-any-return]


def segments(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, shape: Shape, mask: Mask) -> Segments:
    """A rank's attention as plain variable-length attention; see `Segments`."""
    if cu_seqlens_padded is not None:
        cu_seqlens_padded = cu_seqlens_padded.to(cu_seqlens.dtype).contiguous()
    flat = torch.ops.jitrope.cp_segments(cu_seqlens.contiguous(), cu_seqlens_padded, *mask, *shape)
    tables = reference.split(flat, reference.layout(shape, mask, cu_seqlens_padded is not None))
    tables.pop("pairs")
    return Segments(**tables)  # type: ignore[arg-type]


_NO_SHAPE = Shape(0, 0, 1, 0)


def move_rows(inputs: Sequence[Tensor], outputs: Sequence[Tensor], index: Tensor | None) -> None:
    """outputs[i][row] = inputs[i][index[row]], or the sum in fp32 of inputs[i][index[n, row]] over n; -1 adds nothing.

    One launch for one or two tensors. Without an index rows stay where they are, and rows that an input does not have
    are zero.
    """
    map = "stay" if index is None else "table"
    torch.ops.jitrope.thd_rows(list(inputs), list(outputs), map, None, None, index, *_NO_SHAPE)


def reorder(inputs: Sequence[Tensor], outputs: Sequence[Tensor], map: str, cu_seqlens: Tensor, shape: Shape) -> None:
    """The same with the rows that `map`, "to_ranks" (from shape.cp_rank on) or "to_sequences", says."""
    torch.ops.jitrope.thd_rows(list(inputs), list(outputs), map, cu_seqlens.contiguous(), None, None, *shape)


def copy_valid(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], cu_seqlens_padded: Tensor, cu_seqlens: Tensor
) -> None:
    """Copy the rows that are not padding; the others stay as they are."""
    shape = _NO_SHAPE._replace(sequences=len(cu_seqlens) - 1)
    torch.ops.jitrope.thd_rows(
        list(inputs), list(outputs), "valid", cu_seqlens_padded.contiguous(), cu_seqlens.contiguous(), None, *shape
    )


def zero_tail_(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Rows from cu_seqlens[-1] on become zero."""
    shape = _NO_SHAPE._replace(sequences=len(cu_seqlens) - 1)
    torch.ops.jitrope.thd_rows([x], [x], "tail", cu_seqlens, None, None, *shape)
    return x
