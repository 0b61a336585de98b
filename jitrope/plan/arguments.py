"""The arguments of the rope kernels: one list of names, in the order of the host's words and of the CUDA struct.

A kernel takes one struct: addresses of tensors, then words of 8 bytes. `declarations` writes the fields of the struct
for `templates/parameters.cuh.jinja`, and `words` orders the host's values. A kernel with a norm has more addresses at
the front and more words at the end, and a kernel with a stage of `OPTIONAL` has its arguments behind those.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Collection, Mapping
from itertools import chain
from typing import Any, NamedTuple

from ..sinks import cache, pages
from ..stages import STAGES


class Argument(NamedTuple):
    """A field of the struct. names: of its elements, tensors or numbers; a field with several names is an array."""

    c_type: str
    field: str
    names: tuple[str, ...]


def _arguments(text: str) -> tuple[Argument, ...]:
    """The arguments of "type field, field" and "type array: its names", on lines of their own or after a semicolon."""
    found = re.findall(r"(\w[^:;\n]*[\w*]) (\w+(?:, \w+)*)(?:: ([\w ]+))?", text)
    each = [(c_type, field, tuple(names.split())) for c_type, fields, names in found for field in fields.split(", ")]
    return tuple([Argument(c_type, field, names or (field,)) for c_type, field, names in each])


WORDS_OF = {"Strides": 5, "TableStrides": 4, "IdStrides": 3, "ScaleStrides": 2}
"""8-byte words of a C++ type; every other type is one word."""

ADDRESSES = _arguments("""
    const T* in: q k v; void* out: q_out k_out v_out; const Table* cos, sin
    const CuSeqlens* cu_seqlens; const StartPositions* start_positions; const PositionIds* position_ids
    const SlotMapping* slot_mapping; const float* scale: q_scale k_scale v_scale
""")
WORDS = _arguments("""
    Strides in_stride: q k v; Strides out_stride: q_out k_out v_out
    TableStrides cos_stride: cos; TableStrides sin_stride: sin; IdStrides ids_stride: position_ids
    long long tokens, batch, seqlen, q_heads, k_heads, sequences, table_rows, cp_rank, slot_count; Number mscale, eps
""")
_STREAMS = "first_q first_k first_v second_q second_k second_v"
_SOURCE = {"projected": ("const T* x", "long long in_features, x_stride")}
_SOURCE |= {"two_streams": (f"const T* source: {_STREAMS}", f"Strides source_stride: {_STREAMS}; long long split")}
OPTIONAL = {
    flag: (_arguments(addresses), _arguments(words))
    for part in (_SOURCE, *[getattr(x, "ARGUMENTS", {}) for x in (*STAGES.values(), cache, pages)])
    for flag, (addresses, words) in part.items()
}
"""The addresses and the words of a stage, by its flag in the spec."""


def _ordered(stages: Collection[str]) -> tuple[tuple[Argument, ...], tuple[Argument, ...]]:
    """(the addresses, the words) of a kernel. stages: those of `OPTIONAL` that it has."""
    own = [OPTIONAL[stage] for stage in OPTIONAL if stage in stages]
    addresses = (*ADDRESSES, *chain(*[first for first, _ in own]))
    return addresses, (*WORDS, *chain(*[second for _, second in own]))


def address_names(stages: Collection[str] = ()) -> tuple[str, ...]:
    """The names of the addresses, in order."""
    return tuple([name for argument in _ordered(stages)[0] for name in argument.names])


def declarations(stages: Collection[str] = ()) -> str:
    """The fields of the struct in CUDA, one on each line."""
    lines = []
    for c_type, field, names in chain(*_ordered(stages)):
        line = f"    {c_type} {field}{f'[{len(names)}]' if len(names) > 1 else ''};"
        lines.append(line if len(names) == 1 else f"{line:57}// {', '.join(names)}")
    return "\n".join(lines)


def words(given: Mapping[str, Any], stages: Collection[str] = ()) -> list[int]:
    """The words after the addresses, in order. given: the strides of tensors, and numbers, by name.

    The strides of a tensor that is not given are zeros.
    """
    found: list[int] = []
    for c_type, _, names in _ordered(stages)[1]:
        for name in names:
            size = WORDS_OF.get(c_type)
            own = given.get(name, [0] * size) if size else [given[name]]
            own = struct.unpack("q", struct.pack("f4x", *own)) if c_type == "Number" else own
            assert len(own) == (size or 1), name
            found += own
    return found
