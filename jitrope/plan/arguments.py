"""The arguments of the rope kernels: one list of names, in the order of the host's words and of the CUDA struct.

A kernel takes one struct: addresses of tensors, then words of 8 bytes. `declarations` writes the fields of the struct
for `templates/parameters.cuh.jinja`, and `words` orders the host's values. A kernel with a norm has more addresses at
the front and more words at the end, and a kernel with a stage of `OPTIONAL` has its arguments behind those.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple


class Argument(NamedTuple):
    """A field of the struct. names: the names of its elements; a field with several names is an array."""

    c_type: str
    field: str
    names: tuple[str, ...]


def _argument(c_type: str, field: str, names: str = "") -> Argument:
    return Argument(c_type, field, tuple(names.split()) or (field,))


def _each(c_type: str, names: str) -> list[Argument]:
    """A field for each of the names."""
    return [_argument(c_type, name) for name in names.split()]


WORDS_OF = {"Strides": 5, "TableStrides": 4, "IdStrides": 3, "ScaleStrides": 2}
"""8-byte words of a C++ type; every other type is one word."""

ADDRESSES = (
    _argument("const T*", "in", "q k v"),
    _argument("void*", "out", "q_out k_out v_out"),
    *_each("const Table*", "cos sin"),
    _argument("const CuSeqlens*", "cu_seqlens"),
    _argument("const StartPositions*", "start_positions"),
    _argument("const PositionIds*", "position_ids"),
    _argument("const SlotMapping*", "slot_mapping"),
    _argument("const float*", "scale", "q_scale k_scale v_scale"),
)
WORDS = (
    _argument("Strides", "in_stride", "q k v"),
    _argument("Strides", "out_stride", "q_out k_out v_out"),
    *_each("TableStrides", "cos_stride sin_stride"),
    _argument("IdStrides", "ids_stride"),
    *_each("long long", "tokens batch seqlen q_heads k_heads sequences table_rows cp_rank slot_count"),
    _argument("Scalars", "scalars"),
)
NORM_ADDRESSES = (
    _argument("const T*", "source", "first_q first_k first_v second_q second_k second_v"),
    _argument("const Weight*", "weight", "q_weight k_weight second_q_weight second_k_weight"),
    _argument("const Weight*", "bias", "q_bias k_bias second_q_bias second_k_bias"),
    _argument("Weight*", "weight_grads"),
    _argument("float*", "block_sums"),
    _argument("unsigned int*", "counters"),
    _argument("ScaleOut*", "scale_out", "q_scale_out k_scale_out"),
    _argument("const T*", "grad", "dq dk"),
    _argument("const Table*", "second_table", "second_cos second_sin"),
)
NORM_WORDS = (
    _argument("Strides", "source_stride", "first_q first_k first_v second_q second_k second_v"),
    _argument("Strides", "grad_stride", "dq dk"),
    _argument("Strides", "scale_stride", "q_scale_out k_scale_out"),
    _argument("TableStrides", "second_table_stride", "second_cos second_sin"),
    _argument("long long", "split"),
)
OPTIONAL: dict[str, tuple[tuple[Argument, ...], tuple[Argument, ...]]] = {
    "scales_q": ((_argument("const float*", "q_factor"),), (_argument("Strides", "factor_stride"),)),
    "prefixed": ((), (_argument("long long", "unrotated"),)),
    "given_means": (
        (_argument("const float*", "mean_square", "q_mean_square k_mean_square"),),
        (_argument("Strides", "mean_stride", "q_mean_square k_mean_square"),),
    ),
    "added_bias": (
        (_argument("const T*", "added", "q_added k_added v_added"),),
        (_argument("Strides", "added_stride", "q_added k_added v_added"),),
    ),
    "dynamic_v": ((_argument("void*", "v_scale_out"),), (_argument("Strides", "v_scale_stride"),)),
    "latent_norm": ((_argument("const void*", "v_weight"),), ()),
    "v_gradient": ((_argument("const T*", "dv"),), (_argument("Strides", "dv_stride"),)),
    "gated": ((_argument("void*", "gate_out"),), ()),
    "block_cache": (
        (_argument("void*", "block_scale", "k_block_scale v_block_scale"),),
        (_argument("Strides", "block_scale_stride", "k_block_scale v_block_scale"),),
    ),
    "head_scales": ((), (_argument("ScaleStrides", "scale_strides", "q_scale k_scale v_scale"),)),
    "paged": (
        (
            *_each("const PageIndex*", "page_table page_indptr lengths cu_seqlens_q batch_indices"),
            _argument("int*", "errors"),
        ),
        (*_each("long long", "page_table_stride page_table_width page_count new_tokens"),),
    ),
}
"""The addresses and the words of a stage, by its flag in the spec."""

_COMMENT_COLUMN = 57

Word = int | Sequence["Word"]


def _addresses(norm: bool, stages: Collection[str]) -> tuple[Argument, ...]:
    own = [argument for stage, (addresses, _) in OPTIONAL.items() if stage in stages for argument in addresses]
    return (*(NORM_ADDRESSES if norm else ()), *ADDRESSES, *own)


def _words(norm: bool, stages: Collection[str]) -> tuple[Argument, ...]:
    own = [argument for stage, (_, words) in OPTIONAL.items() if stage in stages for argument in words]
    return (*WORDS, *(NORM_WORDS if norm else ()), *own)


def address_names(norm: bool, stages: Collection[str] = ()) -> tuple[str, ...]:
    """The names of the addresses, in order. stages: those of `OPTIONAL` that the kernel has."""
    return tuple(name for argument in _addresses(norm, stages) for name in argument.names)


def declarations(norm: bool, stages: Collection[str] = ()) -> str:
    """The fields of the struct in CUDA, one on each line."""
    lines = []
    for c_type, field, names in (*_addresses(norm, stages), *_words(norm, stages)):
        line = f"    {c_type} {field}{f'[{len(names)}]' if len(names) > 1 else ''};"
        lines.append(line if names == (field,) else f"{line:{_COMMENT_COLUMN}}// {', '.join(names)}")
    return "\n".join(lines)


def words(given: Mapping[str, Word], norm: bool, stages: Collection[str] = ()) -> list[int]:
    """The words after the addresses, in order. given: one value for each field of the struct."""
    flat = {field: _flat(value) for field, value in given.items()}
    sizes = {x.field: WORDS_OF.get(x.c_type, 1) * len(x.names) for x in _words(norm, stages)}
    assert {field: len(value) for field, value in flat.items()} == sizes
    return [word for field in sizes for word in flat[field]]


def _flat(value: Word) -> list[int]:
    return [value] if isinstance(value, int) else [word for part in value for word in _flat(part)]
