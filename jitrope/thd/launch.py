"""`thd_reference` on a GPU: the same functions, each one kernel. Nothing waits for the device."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..base.spec import ACCESS_BYTES
from ..jit.kernels import get_kernel
from ..ops.launch import MAX_LAUNCHES
from ..ops.watch import get_device, get_stream
from ..plan.partition import Mask, exchange_rows
from ..plan.problem import DTYPE_NAMES
from .reference import Shape, layout, split
from .spec import BLOCK_THREADS, SCAN_THREADS, CorrectionSpec, RowsSpec, SegmentsSpec, ThdSpec, plan_rows

SUMMED = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes that the kernel adds up, in fp32."""

_local = threading.local()


def _launch(spec: ThdSpec, grid: tuple[int, int], device: torch.device, arguments: Sequence[int]) -> None:
    """Enqueue on torch's current stream of the device; arguments: addresses, then words."""
    index: int = device.index
    if index != get_device():
        with torch.cuda.device(device):
            return _launch(spec, grid, device, arguments)
    kept = _local.__dict__.setdefault("launches", {})
    key = (spec, grid, index)
    if key not in kept:
        if len(kept) >= MAX_LAUNCHES:
            kept.clear()
        kernel = get_kernel(spec, index)
        kernel.bind_thread()
        words = (ctypes.c_int64 * len(arguments))()
        kept[key] = words, kernel.enqueuer(grid, spec.threads, ctypes.addressof(words))
    words, enqueue = kept[key]
    words[:] = arguments
    enqueue(get_stream(index))


# ---- rows --------------------------------------------------------------------------------------------


def rows_call(
    map: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], offsets: Tensor | None, lengths: Tensor | None,
    table: Tensor | None, indices: Tensor | None, shape: Shape | None,
) -> tuple[RowsSpec, tuple[int, int], list[Tensor | None], list[int]] | None:  # fmt: skip
    """(spec, grid, tensors, words) of a call of `thd_rows` or, with `indices`, of `thd_tables`; None: nothing to do.

    offsets: cu_seqlens; lengths: those of what is valid.
    """
    shape = shape or Shape(0, 0, 1, 0)
    ones = indices is not None
    rows = outputs[0].shape[0] if indices is None else indices.shape[0]
    sums = table is not None and table.dim() == 2
    cp_size, rule = (
        (shape.cp_size, shape.rule) if map in ("to_ranks", "to_sequences", "positions") else (1, "dual_chunk")
    )
    dtypes = (DTYPE_NAMES[inputs[0].dtype], DTYPE_NAMES[outputs[0].dtype]) if sums else ("fp32", "fp32")
    index_dtype = "int32" if offsets is None else DTYPE_NAMES[offsets.dtype]
    spec = RowsSpec(map, ones, index_dtype, cp_size, rule, sums, *dtypes)
    strides = [(x.stride(0) * x.element_size() if x.shape[0] > 1 else 0) for x in (*inputs, *outputs)]
    widths, in_widths = ([_row_bytes(x) for x in xs] for xs in (outputs, inputs))
    if rows == 0 or (not ones and max(widths) == 0):
        return None
    if not ones:
        at = [x.data_ptr() for x in (*inputs, *outputs)]
        spec = plan_rows(spec, tuple(widths), (*at, *strides, *widths, *in_widths))
    grid = (-(-rows // spec.rows_per_block), 1 if ones else len(outputs))
    two = [[*xs, *[None] * (2 - len(xs))] for xs in (inputs, outputs)]
    tensors = [*two[0], *two[1], offsets, lengths, table, indices]
    count = len(inputs)
    pad = [0] * (2 - count)
    words = [*strides[:count], *pad, *strides[count:], *pad, *(in_widths if sums else widths), *pad, rows]
    words += [inputs[0].shape[0] if inputs else 0, table.shape[0] if sums else 1, shape.sequences]  # type: ignore[union-attr]
    words += [shape.tokens, shape.cp_rank, max(1, shape.capacity)]
    return spec, grid, tensors, words


def _row_bytes(x: Tensor) -> int:
    return x.shape[1:].numel() * x.element_size() if x.shape[0] else 0


def _run(call: tuple[Any, ...] | None, device: torch.device) -> None:
    if call is not None:
        spec, grid, tensors, words = call
        _launch(spec, grid, device, [*(0 if x is None else x.data_ptr() for x in tensors), *words])


def table(map: str, cu_seqlens: Tensor, shape: Shape, rows: int) -> Tensor:
    """Where rows come from under a map: (rows), int32."""
    out = torch.empty(rows, dtype=torch.int32, device=cu_seqlens.device)
    _run(rows_call(map, (), (), cu_seqlens, None, None, out, shape), cu_seqlens.device)
    return out


def move(
    map: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], offsets: Tensor | None = None,
    lengths: Tensor | None = None, table: Tensor | None = None, shape: Shape | None = None,
) -> None:  # fmt: skip
    """Move rows by a map; the rows of a tensor are contiguous each."""
    _run(rows_call(map, inputs, outputs, offsets, lengths, table, None, shape), outputs[0].device)


# ---- attention's segments --------------------------------------------------------------------------


def segments(cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, shape: Shape, mask: Mask) -> Tensor:
    """The tables of `thd_reference.segments` in one buffer, by two kernels and what fills it with -1."""
    calls, flat = segments_calls(cu_seqlens, cu_seqlens_padded, shape, mask)
    for call in calls:
        _run(call, cu_seqlens.device)
    return flat


def segments_calls(
    cu_seqlens: Tensor, cu_seqlens_padded: Tensor | None, shape: Shape, mask: Mask, scan_threads: int = SCAN_THREADS
) -> tuple[list[Any], Tensor]:
    """What the two kernels get, and the buffer that they fill."""
    exchange = exchange_rows(shape.tokens, shape.cp_size, shape.sequences, mask, shape.rule)
    padded = cu_seqlens_padded is not None and not mask.extends
    sizes = layout(shape, mask, padded)
    flat = torch.full(
        (sum(math.prod(size) for size in sizes.values() if size),), -1, dtype=torch.int32, device=cu_seqlens.device
    )
    tables = split(flat, sizes)
    bases = [0] * (2 * shape.cp_size)
    if exchange is not None:  # where the rows of each rank begin, among those received and those sent
        counts = [row[shape.cp_rank] for row in exchange], exchange[shape.cp_rank]
        bases = [sum(some[:rank]) for some in counts for rank in range(shape.cp_size)]
    keys, queries = len(tables["key_rows"]), 0 if tables["query_rows"] is None else len(tables["query_rows"])  # type: ignore[arg-type]
    sent = 0 if exchange is None else shape.cp_size * shape.rows
    names = ("cu_seqlens_q", "cu_seqlens_k", "pairs", "key_rows", "gathered_rows", "query_rows", "output_rows",
             "send_rows", "sent_rows")  # fmt: skip
    offsets = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
    tensors = [cu_seqlens, offsets, *(tables[name] for name in names)]
    words = [shape.sequences, shape.tokens, shape.cp_rank, *mask, shape.capacity, shape.rows, keys, queries]
    words += [sizes["gathered_rows"][1], sum(sizes["send_rows"]), *bases]
    flags = (mask.full, mask.extends, padded, exchange is not None)
    word = DTYPE_NAMES[cu_seqlens.dtype]
    calls = []
    for rows, threads, blocks in (
        (False, scan_threads, 1 + (0 if exchange is None else 2 * shape.cp_size)),
        (True, BLOCK_THREADS, -(-(keys + queries + sent) // BLOCK_THREADS)),
    ):
        spec = SegmentsSpec(rows, word, shape.cp_size, shape.rule, *flags, threads=threads)
        if blocks:
            calls.append((spec, (blocks, 1), tensors, words))
    return calls, flat


# ---- ring attention's corrections --------------------------------------------------------------------


def correct(
    quantity: str, first: str, second: str, packed: bool, offsets: Tensor, rows: int,
    out: Tensor | None, step: Tensor | None, lse: Tensor | None, lse_step: Tensor | None,
) -> None:  # fmt: skip
    """One step's log-sum-exp, outputs or gradients into those of the steps before it."""
    _run(
        correction_call(quantity, first, second, packed, offsets, rows, out, step, lse, lse_step), offsets.device
    )  # fmt: skip


def correction_call(
    quantity: str, first: str, second: str, packed: bool, offsets: Tensor, rows: int,
    out: Tensor | None, step: Tensor | None, lse: Tensor | None, lse_step: Tensor | None,
) -> Any:  # fmt: skip
    """(spec, grid, tensors, words) of `correct`, or None. out, step: (rows, H, D); lse: (H, rows) or (B, H, rows)."""
    vec, heads, head_dim, strides = 1, 0 if lse is None else lse.shape[-2], 1, [0, 0]
    if out is not None and step is not None:
        size = out.element_size()
        heads, head_dim = out.shape[1:]
        strides = [out.stride(0), step.stride(0)]
        vec = ACCESS_BYTES // size
        bytes_ = (out.data_ptr(), step.data_ptr(), *(s * size for s in strides), head_dim * size)
        while any(number % (vec * size) for number in bytes_):
            vec //= 2
    if rows == 0 or heads == 0:
        return None
    dtype = "fp32" if out is None else DTYPE_NAMES[out.dtype]
    spec = CorrectionSpec(quantity, first, second, packed, dtype, DTYPE_NAMES[offsets.dtype], vec)
    widths = [0 if x is None else x.shape[-1] for x in (lse, lse_step)]
    words = [len(offsets) - 1, heads, head_dim, *strides, *widths]
    return spec, (rows, 1), [out, step, lse, lse_step, offsets], words
