"""The arguments of the rope kernels: one list of names, in the order of the host's words and of the CUDA struct.

A kernel takes one struct: addresses of tensors, then words of 8 bytes. `declarations` writes the fields of the struct
for `templates/parameters.cuh.jinja`, and `words` orders the host's values. A kernel with a norm has more addresses at
the front and more words at the end, and a kernel with a stage of `OPTIONAL` has its arguments behind those.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple


class Argument(NamedTuple):
    """A field of the struct. names: of its elements, tensors or numbers; a field with several names is an array."""

    c_type: str
    field: str
    names: tuple[str, ...]


def _argument(c_type: str, field: str, names: str = "") -> Argument:
    return Argument(c_type, field, tuple(names.split()) or (field,))


def _each(c_type: str, names: str) -> list[Argument]:
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
    _argument("TableStrides", "cos_stride", "cos"),
    _argument("TableStrides", "sin_stride", "sin"),
    _argument("IdStrides", "ids_stride", "position_ids"),
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
    "scales_q": ((_argument("const float*", "q_factor"),), (_argument("Strides", "factor_stride", "q_factor"),)),
    "prefixed": ((), (_argument("long long", "unrotated"),)),
    "given_means": (
        (_argument("const float*", "mean_square", "q_mean_square k_mean_square"),),
        (_argument("Strides", "mean_stride", "q_mean_square k_mean_square"),),
    ),
    "added_bias": (
        (_argument("const T*", "added", "q_added k_added v_added"),),
        (_argument("Strides", "added_stride", "q_added k_added v_added"),),
    ),
    "dynamic_v": ((_argument("void*", "v_scale_out"),), (_argument("Strides", "v_scale_stride", "v_scale_out"),)),
    "latent_norm": ((_argument("const void*", "v_weight"),), ()),
    "v_gradient": ((_argument("const T*", "dv"),), (_argument("Strides", "dv_stride", "dv"),)),
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
        lines.append(line if len(names) == 1 else f"{line:{_COMMENT_COLUMN}}// {', '.join(names)}")
    return "\n".join(lines)


def words(given: Mapping[str, Any], norm: bool, stages: Collection[str] = ()) -> list[int]:
    """The words after the addresses, in order. given: the strides of tensors, and numbers, by name.

    The strides of a tensor that is not given are zeros.
    """
    found: list[int] = []
    for argument in _words(norm, stages):
        size = WORDS_OF.get(argument.c_type)
        for name in argument.names:
            strides = [given[name]] if size is None else given.get(name, [0] * size)
            assert len(strides) == (size or 1), name
            found += strides
    return found
