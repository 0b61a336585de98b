"""Packed batches under context parallelism: checks, tables of rows, and moves of rows, on any device.

They are torch.library ops, for torch.compile and fake tensors. CPU tensors, and dtypes that the kernels cannot add up,
use `reference`; nothing here waits for a GPU. The ops have no gradients: `thd` and `context_parallel` define them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from ..base import arguments
from ..base.fit import FLOATS, INTEGERS, Fail
from ..base.layouts import MAX_TOKENS
from ..base.partition import RULES
from ..base.spec import ACCESS_BYTES
from ..base.views import DTYPE_NAMES
from ..run.enqueue import Call, enqueue
from ..torch_state import grad_enabled, is_traced, is_zero, own_ops, written
from . import reference
from . import spec as specs
from .reference import Correction, Move, Segments
from .shape import Mask, Shape

# ---- checks of the arguments of `jitrope.thd` ------------------------------------------------------------


def fail_of(name: str, gradient: bool = False, **tensors: Any) -> Fail:
    """Check that these arguments of `name` are tensors, and require no gradient if it has none. Return its `Fail`."""
    fail, lazy, recorded = Fail(name), not is_traced(), not gradient and grad_enabled()
    for label, x in tensors.items():
        arguments.tensor(name, label, x)
        if x.is_quantized or (lazy and is_zero(x)):
            arguments.refuse(name, label, x, "a tensor with memory, neither quantized nor torch's lazy zeros")
        if recorded and x.requires_grad:
            fail(f"{label} requires a gradient, which this function does not have; call it under torch.no_grad()")
    return fail


def check_offsets(fail: Fail, rows: str, x: Tensor, **given: Tensor) -> None:
    """Refuse offsets that are not contiguous int32 or int64 on the device of x, the argument `rows`, or not as many."""
    shape: tuple[Any, ...] = ("sequences + 1",)
    like = rows
    for label, offsets in given.items():
        fail.unlike(label, offsets, x.device, INTEGERS, shape, contiguous=True, like=like)
        if len(offsets) == 0:
            fail(f"{label} is empty; it must have sequences + 1 offsets")
        shape, like = offsets.shape, label


def shape_of(fail: Fail, x: Tensor, cu_seqlens: Tensor, rule: str, **sizes: int) -> Shape:
    """Return the shape of a batch. Refuse wrong offsets, a rank that is none, and more rows than int32 can count.

    sizes: the tokens, the number of ranks and a rank, by the names of the function's arguments.
    """
    check_offsets(fail, "x", x, cu_seqlens=cu_seqlens)
    tokens, cp_size, rank = map(partial(arguments.whole, fail.name), sizes, sizes.values(), (0, 1, 0))
    if rank >= cp_size:
        _, of, label = sizes
        fail(f"{label} is {rank}; it must be below {of}={cp_size}")
    if tokens + cp_size > MAX_TOKENS:
        fail(f"{tokens} tokens are more than {MAX_TOKENS} rows")
    return Shape(tokens, len(cu_seqlens) - 1, cp_size, rank, arguments.word(fail.name, "rule", rule, RULES))


def require_written(label: str, x: Tensor, fail: Fail) -> None:
    """Refuse to write rows that are not contiguous, that overlap, or with torch's lazy bits."""
    if not is_traced() and (x.is_neg() or x.is_conj()):  # Dynamo cannot trace them
        fail(f"{label} has torch's lazy negative or conjugate bit; pass {label}.resolve_conj().resolve_neg()")
    if len(x) != 0 and (not x[0].is_contiguous() or (len(x) != 1 and abs(x.stride(0)) < x[0].numel())):
        fail(f"{label} has strides {x.stride()}; its rows must be contiguous, and must not overlap")


def rows_of(x: Tensor) -> Tensor:
    """Return x, or a copy, with contiguous rows. There may be gaps between rows."""
    if is_traced():  # Dynamo cannot ask this of every gradient
        return x.contiguous()
    return x if len(x) == 0 or x[0].is_contiguous() else x.contiguous()


def check_lse(name: str, packed: Any, cu_seqlens: Tensor, **given: Any) -> tuple[bool, int]:
    """Refuse wrong log-sum-exps and offsets. Return whether they are packed, and the rows that fit in `lse`."""
    fail, lse = fail_of(name, **given, cu_seqlens=cu_seqlens), given["lse"]
    packed = arguments.flag(name, "lse_packed", packed)
    check_offsets(fail, "lse", lse, cu_seqlens=cu_seqlens)
    axes: tuple[Any, ...] = ("H",) if packed else (len(cu_seqlens) - 1, "H")
    for label, x in given.items():
        fail.unlike(label, x, lse.device, (torch.float32,), (*axes, "rows"), contiguous=True, like="lse")
        axes = x.shape[:-1]
    return packed, lse.shape[-1] if packed else (len(cu_seqlens) - 1) * lse.shape[-1]


def check_step(fail: Fail, label: str, out: Tensor, step: Tensor, first: str, second: str, *pair: int) -> None:
    """Refuse a step that does not have the rows of the halves that it changes. pair: 2 if out may be two tensors."""
    shapes = [("T", "H", "D"), *[(n, "T", "H", "D") for n in pair]]
    fail.unlike(label, out, out.device, FLOATS, *shapes, like=label)
    shape = (*out.shape[:-3], "rows", *out.shape[-2:])
    fail.unlike(f"{label}_per_step", step, out.device, (out.dtype,), shape, like=label)
    tokens = out.shape[-3]
    rows = (tokens + 1) // 2 if second == "nothing" else tokens // 2 if first == "nothing" else tokens
    if step.shape[-3] < rows:
        fail(f"{label}_per_step is {arguments.shown(step)}; it must have at least {rows} rows")
    require_written(label, out if out.dim() == 3 else out[0], fail)


# ---- rows: `struct Params` of `rows.cuh.jinja` ---------------------------------------------------------


def rows_calls(move: Move) -> list[Call] | None:
    """Move rows, or write their sources.

    None if no kernel can: rows are not contiguous, there are three tensors, or sums of other dtypes.
    """
    inputs, outputs, map, cu_seqlens, lengths, table, shape = move
    inputs, writes = inputs or outputs, not inputs
    sums, sources = (False, 1) if table is None or table.dim() == 1 else (True, len(table))
    whole = all(x.is_contiguous() or x.numel() == 0 or x[0].is_contiguous() for x in (*inputs, *outputs))
    if not whole or len(outputs) > 2 or (sums and inputs[0].dtype not in FLOATS):
        return None
    rows = len(outputs[0])  # widths and strides are in bytes
    widths, in_widths = ([x.shape[1:].numel() * x.itemsize * (len(x) > 0) for x in xs] for xs in (outputs, inputs))
    if rows == 0 or max(widths) == 0:
        return []
    in_strides, strides = ([x.stride(0) * x.itemsize * (len(x) > 1) for x in xs] for xs in (inputs, outputs))
    index_dtype = "int32" if cu_seqlens is None else DTYPE_NAMES[cu_seqlens.dtype]
    dtypes = (True, DTYPE_NAMES[inputs[0].dtype], DTYPE_NAMES[outputs[0].dtype]) if sums else ()
    multiple = math.gcd(*[x.data_ptr() for x in (*inputs, *outputs)], *in_strides, *strides, *widths, *in_widths)
    kind = (map, writes, index_dtype, shape.cp_size, shape.rule, *dtypes)
    spec = specs.RowsSpec(*kind) if writes else specs.rows_spec(tuple(widths), multiple, *kind)
    zeros, absent = [0] * (2 - len(inputs)), [None] * (2 - len(inputs))
    words = [*in_strides, *zeros, *strides, *zeros, *(in_widths if sums else widths), *zeros]
    words += [rows, len(inputs[0]), sources, shape.sequences, shape.tokens, shape.cp_rank, max(1, shape.capacity)]
    tensors = [*inputs, *absent, *outputs, *absent, cu_seqlens, lengths, table, outputs[0] if writes else None]
    grid = (-(-rows // (spec.threads // spec.lanes * spec.unroll)), len(outputs))
    return [Call(spec, grid, tensors, words, outputs[0].device)]


# ---- attention's segments: `struct Params` of `segments.cuh.jinja` -------------------------------------


def segments_calls(flat: Tensor, cu_seqlens: Tensor, padded: Tensor | None, shape: Shape, mask: Mask) -> list[Call]:
    """Write the tables of `Segments` into a buffer full of -1: first segments, then their rows."""
    tables = reference.split(flat, shape, mask, padded is not None)
    _, _, _, key_rows, gathered_rows, query_rows, _, send_rows, sent_rows = tables
    keys, queries, sent, places = (0 if x is None else x.numel() for x in (key_rows, query_rows, send_rows, sent_rows))
    bases, blocks, exchange = [0] * (2 * shape.cp_size), 1, shape.exchange(mask)
    if exchange is not None:  # bases: the first row of each rank, among those received and among those sent
        counts = [row[shape.cp_rank] for row in exchange], exchange[shape.cp_rank]
        bases, blocks = [sum(some[:rank]) for some in counts for rank in range(shape.cp_size)], 1 + 2 * shape.cp_size
    tensors = [cu_seqlens, cu_seqlens if padded is None else padded, *tables]
    words = [shape.sequences, shape.tokens, shape.cp_rank, *mask, shape.capacity, shape.rows, keys, queries]
    words += [gathered_rows.shape[1], sent, *bases]
    rows = keys + queries + places
    cut = (DTYPE_NAMES[cu_seqlens.dtype], shape.cp_size, shape.rule)
    flags = (mask.full, mask.extends, padded is not None and not mask.extends, exchange is not None)
    kernels = (False, specs.SCAN_THREADS, blocks), (True, specs.BLOCK_THREADS, -(-rows // specs.BLOCK_THREADS))
    return [
        Call(specs.SegmentsSpec(of_rows, *cut, *flags, threads), (blocks, 1), tensors, words, flat.device)
        for of_rows, threads, blocks in kernels
        if blocks
    ]


# ---- ring attention's corrections: `struct Params` of `thd_corrections.cu.jinja` -----------------------


def correction_calls(given: Correction) -> list[Call]:
    """Join a step with the steps before it."""
    *kind, cu_seqlens, rows, out, step, lse, lse_step = cast(Any, given)
    vec, heads, head_dim, strides = 1, 0 if lse is None else lse.shape[-2], 1, [0, 0]
    if out is not None:
        size, (heads, head_dim), strides = out.element_size(), out.shape[1:], [out.stride(0), step.stride(0)]
        vec = math.gcd(ACCESS_BYTES, out.data_ptr(), step.data_ptr(), *(n * size for n in (*strides, head_dim))) // size
    dtypes = "fp32" if out is None else DTYPE_NAMES[out.dtype], DTYPE_NAMES[cu_seqlens.dtype]
    spec = specs.correction_spec(*kind, *dtypes, vec)
    widths = [0 if x is None else x.shape[-1] for x in (lse, lse_step)]
    words = [len(cu_seqlens) - 1, heads, head_dim, *strides, *widths]
    tensors = [out, step, lse, lse_step, cu_seqlens]
    return [Call(spec, (rows, 1), tensors, words, cu_seqlens.device)] if rows and heads else []


# ---- torch's ops ----------------------------------------------------------------------------------


_SHAPE = "SymInt tokens, SymInt sequences, int cp_size, int cp_rank, str rule"
_TABLES = "Tensor? cu_seqlens, Tensor? lengths, Tensor? table"
_STEPS = "Tensor cu_seqlens, int rows, Tensor(a!)? out, Tensor? step, Tensor(c!)? lse, Tensor(d!)? lse_step"


def _rows(*given: Any) -> Any:
    move = Move._make((*given[:-5], Shape(*given[-5:])))
    return reference.move, rows_calls, (move,), move.outputs


def _segments(flat: Tensor, cu_seqlens: Tensor, padded: Tensor | None, left: int, right: int, *shape: Any) -> Any:
    words = flat, cu_seqlens, padded, Shape(*shape), Mask(left, right)
    return reference.fill_segments, segments_calls, words, [flat]


def _correction(*given: Any) -> Any:
    step = Correction(*given)
    changed = {"lse": step.lse, "read_lse": step.lse_step}.get(step.quantity, step.out)
    return reference.correct, correction_calls, (step,), [changed]


# An op writes tensors and returns nothing. Its function reads its arguments, and returns what does it in plain torch,
# what finds its launches on a GPU (None: plain torch does it there too), the arguments of both, and what changes.
OPERATIONS: dict[str, Callable[..., Any]] = {
    f"thd_rows(Tensor[] inputs, Tensor(a!)[] outputs, str map, {_TABLES}, {_SHAPE}) -> ()": _rows,
    f"cp_segments(Tensor(a!) flat, Tensor cu_seqlens, Tensor? padded, int left, int right, {_SHAPE}) -> ()": _segments,
    f"thd_correct(str quantity, str first, str second, bool packed, {_STEPS}) -> ()": _correction,
}


def _run(op: Callable[..., Any], launches: bool, *given: Any) -> None:
    """Call an op: by its launches if it has some for these tensors, which are on a GPU, else in plain torch."""
    plain, launched, words, changed = op(*given)
    calls = launched(*words) if launches else None
    if calls is None:
        with torch.no_grad():  # an exported program writes into views here
            plain(*words)
    else:
        for call in calls:
            enqueue(call)
        written(changed)


_lib = torch.library.Library(own_ops.name, "FRAGMENT")


def register(key: str, launches: bool) -> None:
    """Implement all ops for a dispatch key of torch."""
    for schema, op in OPERATIONS.items():
        _lib.impl(schema.partition("(")[0], partial(_run, op, launches), key)


for _schema in OPERATIONS:
    _name = _lib.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"{own_ops.name}::{_name}", lambda *_: None, lib=_lib)
register("CPU", launches=False)
register("CUDA", launches=True)


# ---- for the modules above ---------------------------------------------------------------------------


def table(map: str, cu_seqlens: Tensor, shape: Shape) -> Tensor:
    """The source of each row of a rank, (rows), int32; see `reference.table`."""
    out = cu_seqlens.new_empty(shape.rows, dtype=torch.int32)
    move(Move([], [out], map, cu_seqlens, shape=shape))
    return out


def segments(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, shape: Shape, mask: Mask) -> Segments:
    """A rank's attention as plain variable-length attention; see `Segments`."""
    if cu_seqlens_padded is not None:
        cu_seqlens_padded = cu_seqlens_padded.to(cu_seqlens.dtype)
    flat = reference.empty_segments(cu_seqlens, cu_seqlens_padded, shape, mask)
    own_ops.cp_segments(flat, cu_seqlens, cu_seqlens_padded, *mask, *shape)
    return Segments.of(flat, shape, mask, cu_seqlens_padded is not None)


def move(given: Move) -> None:
    """Move rows; see `Move`."""
    inputs, outputs, *others, shape = given
    own_ops.thd_rows(list(inputs), list(outputs), *others, *shape)


def move_rows(inputs: Sequence[Tensor], outputs: Sequence[Tensor], index: Tensor | None) -> None:
    """outputs[i][row] = inputs[i][index[row]], or the sum in fp32 of inputs[i][index[n, row]] over n; -1 adds nothing.

    One launch for one or two tensors. Without an index rows keep their places, and rows that an input lacks
    become zero.
    """
    move(Move(inputs, outputs, "stay" if index is None else "table", table=index))
