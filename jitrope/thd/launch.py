"""The launches of each operation of `ops` on a GPU. Nothing waits for the device."""

from __future__ import annotations

import math

from torch import Tensor

from ..base.spec import ACCESS_BYTES
from ..ops.enqueue import Call
from ..ops.fit import is_float
from ..plan.partition import Mask
from ..plan.problem import DTYPE_NAMES
from . import spec as specs
from .corrections import Correction
from .reference import Move, Shape, split

# ---- rows: `struct Params` of `rows.cuh.jinja` ---------------------------------------------------------


def table_calls(out: Tensor, cu_seqlens: Tensor, map: str, rows: int, shape: Shape) -> list[Call]:
    """Write the sources of rows; see `reference.table`."""
    spec = specs.table_spec(map, True, DTYPE_NAMES[cu_seqlens.dtype], shape.cp_size, shape.rule)
    grid = (-(-rows // spec.rows_per_block), 1)
    words = [*[0] * 6, rows, 0, 1, *_batch_words(shape)]
    return [Call(spec, grid, [None, None, None, None, cu_seqlens, None, None, out], words, out.device)] if rows else []


def rows_calls(move: Move) -> list[Call] | None:
    """Move rows. None if no kernel can: rows are not contiguous, there are three tensors, or sums of other dtypes."""
    inputs, outputs, map, cu_seqlens, lengths, table, shape = move
    sums, sources = (False, 1) if table is None or table.dim() == 1 else (True, len(table))
    whole = all(x.is_contiguous() or x.numel() == 0 or x[0].is_contiguous() for x in (*inputs, *outputs))
    if not whole or len(outputs) > 2 or (sums and not is_float(inputs[0])):
        return None
    rows = len(outputs[0])  # widths and strides are in bytes
    widths, in_widths = ([x.shape[1:].numel() * x.itemsize * (len(x) > 0) for x in xs] for xs in (outputs, inputs))
    if rows == 0 or max(widths) == 0:
        return []
    in_strides, strides = ([x.stride(0) * x.itemsize * (len(x) > 1) for x in xs] for xs in (inputs, outputs))
    index_dtype = "int32" if cu_seqlens is None else DTYPE_NAMES[cu_seqlens.dtype]
    cut = (shape.cp_size, shape.rule) if map in specs.PARTITIONED else (1, "dual_chunk")
    dtypes = (True, DTYPE_NAMES[inputs[0].dtype], DTYPE_NAMES[outputs[0].dtype]) if sums else ()
    addresses = [x.data_ptr() for x in (*inputs, *outputs)]
    multiple = math.gcd(*addresses, *in_strides, *strides, *widths, *in_widths)
    spec = specs.rows_spec(tuple(widths), multiple, map, False, index_dtype, *cut, *dtypes)
    zeros, absent = [0] * (2 - len(inputs)), [None] * (2 - len(inputs))
    words = [*in_strides, *zeros, *strides, *zeros, *(in_widths if sums else widths), *zeros]
    words += [rows, len(inputs[0]), sources, *_batch_words(shape)]
    tensors = [*inputs, *absent, *outputs, *absent, cu_seqlens, lengths, table, None]
    return [Call(spec, (-(-rows // spec.rows_per_block), len(outputs)), tensors, words, outputs[0].device)]


def _batch_words(shape: Shape) -> tuple[int, ...]:
    return shape.sequences, shape.tokens, shape.cp_rank, max(1, shape.capacity)


# ---- attention's segments: `struct Params` of `segments.cuh.jinja` -------------------------------------


def segments_calls(
    flat: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_padded: Tensor | None,
    shape: Shape,
    mask: Mask,
    scan_threads: int = specs.SCAN_THREADS,
) -> list[Call]:
    """Write the tables of `Segments` into a buffer full of -1: first segments, then their rows."""
    exchange, padded, (keys, queries) = shape.exchange(mask), cu_seqlens_padded is not None, shape.most(mask)
    queries = queries if mask.extends else 0
    bases, sent, gathered, blocks = [0] * (2 * shape.cp_size), 0, shape.all_rows, 1
    if exchange is not None:  # bases: the first row of each rank, among those received and among those sent
        counts = [row[shape.cp_rank] for row in exchange], exchange[shape.cp_rank]
        bases = [sum(some[:rank]) for some in counts for rank in range(shape.cp_size)]
        gathered, sent, blocks = sum(counts[0]), sum(counts[1]), 1 + 2 * shape.cp_size
    tensors = [cu_seqlens, cu_seqlens_padded if padded else cu_seqlens, *split(flat, shape, mask, padded)]
    words = [shape.sequences, shape.tokens, shape.cp_rank, *mask, shape.capacity, shape.rows, keys, queries]
    words += [gathered, sent, *bases]
    rows = keys + queries + (0 if exchange is None else shape.cp_size * shape.rows)
    cut = (DTYPE_NAMES[cu_seqlens.dtype], shape.cp_size, shape.rule)
    flags = (mask.full, mask.extends, padded and not mask.extends, exchange is not None)
    kernels = (False, scan_threads, blocks), (True, specs.BLOCK_THREADS, -(-rows // specs.BLOCK_THREADS))
    return [
        Call(specs.segments_spec(of_rows, *cut, *flags, threads), (blocks, 1), tensors, words, flat.device)
        for of_rows, threads, blocks in kernels
        if blocks
    ]


# ---- ring attention's corrections: `struct Params` of `thd_corrections.cu.jinja` -----------------------


def correction_calls(given: Correction) -> list[Call]:
    """Join a step with the steps before it."""
    out, step, lse, lse_step, cu_seqlens = given.out, given.step, given.lse, given.lse_step, given.cu_seqlens
    vec, heads, head_dim, strides = 1, 0 if lse is None else lse.shape[-2], 1, [0, 0]
    if out is not None and step is not None:
        size = out.element_size()
        heads, head_dim = out.shape[1:]
        strides = [out.stride(0), step.stride(0)]
        multiple = math.gcd(out.data_ptr(), step.data_ptr(), *(s * size for s in strides), head_dim * size)
        vec = math.gcd(ACCESS_BYTES, multiple) // size
    dtypes = "fp32" if out is None else DTYPE_NAMES[out.dtype], DTYPE_NAMES[cu_seqlens.dtype]
    spec = specs.correction_spec(given.quantity, given.first, given.second, given.packed, *dtypes, vec)
    widths = [0 if x is None else x.shape[-1] for x in (lse, lse_step)]
    words = [len(cu_seqlens) - 1, heads, head_dim, *strides, *widths]
    tensors = [out, step, lse, lse_step, cu_seqlens]
    return [Call(spec, (given.rows, 1), tensors, words, cu_seqlens.device)] if given.rows and heads else []
