"""Turn a user's words into options: check their types, and fill in defaults."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from ..base import config
from ..base.arguments import flag, number, parts, refuse, refuse_beside, tensor, whole, word
from ..base.errors import InvalidInput
from ..base.layouts import LAYOUT_AXES, QKV_ORDERS
from ..base.views import Tensors
from ..plan.options import DEFAULTS, Options
from ..stages import rotate
from ..stages.norm import NO_NORM

ONE_TABLE = rotate.TABLES[1:]  # words for a single table in place of cos and sin

_WORDS = {"layout": tuple(LAYOUT_AXES), "rounding": rotate.ROUNDINGS, "order": tuple(QKV_ORDERS)}
"""The keywords that are words. Other words come from values, which checked them."""
_TIMES_WIDTH = {"cos_sin_cache": 1, "freqs_cis": 2}  # tables whose width determines rotary_dim, by which factor
_OLD = {
    "positions=position_ids": "position_ids position",
    "positions=jitrope.Mrope(position_ids, mrope_section)": "mrope_section mrope_interleaved axis_of_pair",
    "positions=jitrope.Starts(start_positions)": "start_positions start_pos seqlen_offsets offset",
    "positions=jitrope.Packed(cu_seqlens, ...)": "cu_seqlens max_seqlen packed_table cp_size cp_rank",
    "norm=jitrope.Norm(...)": "eps across_heads zero_centered after_rope q_weight k_weight q_bias k_bias q_norm k_norm",
    "cache=jitrope.KVCache(...)": "k_cache v_cache kv_cache slot_mapping page_table block_table v_scale rotate_k",
    "quantize=jitrope.Quantize(...)": "k_scale",
    "interleaved=not is_neox_style": "is_neox_style is_neox",
    "layout='bhsd' or 'bshd'": "unsqueeze_dim tensor_format",
    "interleaved=rotary_interleaved": "rotary_interleaved",
    "inplace=in_place": "in_place",
    "heads=(Hq, Hk) to prepare_fused_qkv": "heads num_heads num_kv_heads q_per_group",
}
"""Words of other libraries and of jitrope's old versions, by the argument that replaces them."""

_INSTEAD = dict.fromkeys(("cu_seqlens", "max_seqlen", "start_positions"), "pass positions as a tensor of ids")
_INSTEAD |= {"shifts": "rotate by Shifts in a call of apply_rope", "inplace_grad": "pass inplace=True too"}
"""Advice for words that do not go with an operation."""
_LACKS = {"apply_rope": "norm cache quantize", "prepare_mla_qkv": "norm cache"}
"""The stages that functions do not have."""


def unexpected(name: str, label: str) -> TypeError:
    """The error for a word that a function does not have; it names the argument that replaces the word."""
    lacks = _LACKS.get(name, "").split()
    hint = "; prepare_qkv has it" if label in lacks else ""
    for new in [new for new, old in _OLD.items() if label in old.split()]:
        hint = f"; pass {new}{' to prepare_qkv' if new.partition('=')[0] in lacks else ''}"
    return TypeError(f"{name}() got an unexpected keyword argument {label!r}{hint}")


def canonical(tensors: Tensors) -> Tensors:
    """A call's tensors by the kernel's names: a single table is called cos and has its axes in cos's order."""
    full = {"cos" if name in ONE_TABLE else name: x for name, x in tensors.items()}
    if "freqs" in tensors and full["cos"].dim() == 4:  # (P, B, 1, W)
        full["cos"] = full["cos"].transpose(0, 1)
    return full


def resolved(op: Any, tensors: Mapping[str, Any], asked: Mapping[str, Any]) -> tuple[Options, Tensors]:
    """The checked options of a call with defaults filled in, and its tensors by the kernel's names.

    Raises InvalidInput if a word does not go with the operation, a value has another type, or a tensor is missing.
    """
    name, words = op.function, {label: _typed(op.function, label, value) for label, value in asked.items()}
    given = Options(**words)
    for label in (*tensors, *asked):
        value, default = asked.get(label), DEFAULTS.get(label)
        if value is None or type(value) is not type(default) or value != default:  # an array has no single answer
            beside = op.beside(label, tensors, given)
            refuse_beside(name, [op.label(label)], beside, _INSTEAD.get(label, "leave it out"))
    kind = _check_tensors(op, tensors, given, name)
    full = canonical(dict(tensors))
    o = Options(**{"launch": config.launch(), **words}, table=kind)
    o = o if o.norm_kind or not op.takes_whole(tensors, o) else o._replace(**NO_NORM)
    cos = full.get("cos")
    table_width = int(cos.shape[-1]) if cos is not None and cos.dim() else 0
    rotary_dim = rotary_dim_of(name, words, op.head_dim(full, o), kind, table_width)
    if not table_width and words.get("rotary_dim") is None:  # nothing is rotated
        rotary_dim -= rotary_dim % 2
    found = o._replace(rotary_dim=rotary_dim, **rotate.pairs_of(o))
    rotate.check_moved(name, found.norm_kind != "", found, found.rotate_k)
    return (found, full) if cos is not None else op.without_table(full, found)


def _check_tensors(op: Any, tensors: Mapping[str, Any], o: Options, name: str) -> str:
    """Refuse missing and wrong tensors, and return the kind of the tables."""
    kinds = [kind for kind in ONE_TABLE if kind in tensors]
    ways = len(kinds) + ("cos" in tensors or "sin" in tensors)
    if ways > 1 or (ways == 0 and not op.goes_bare(tensors, o)) or ("cos" in tensors) != ("sin" in tensors):
        raise InvalidInput(f"{name}: {_missing_table(tensors, kinds)}")
    for label in [label for label in op.needed if label not in tensors]:
        refuse(name, op.label(label), None, "a tensor")
    for label, x in tensors.items():
        tensor(name, op.label(label), x)
    return kinds[0] if kinds else "cos_sin"


def _missing_table(tensors: Mapping[str, Any], kinds: list[str]) -> str:
    """The message about a call's wrong tables, with the call that was probably meant."""
    wanted = "pass cos and sin, or one of cos_sin_cache, freqs and freqs_cis"
    cos = tensors.get("cos")
    if isinstance(cos, (list, tuple)):
        return f"cos is a {type(cos).__name__} of {len(cos)}; unpack it: pass *table for cos and sin"
    if isinstance(cos, Tensor) and "sin" not in tensors and not kinds:
        if cos.is_complex():
            return "cos is complex; pass a complex table as freqs_cis=table"
        return f"sin is missing; {wanted}, and None in the place of a k or v that there is not"
    pair = " and ".join([label for label in ("cos", "sin") if label in tensors])
    return f"{wanted}, not {', '.join([x for x in (pair, *kinds) if x]) or 'none'}"


def rotary_dim_of(name: str, words: Mapping[str, Any], head_dim: int, kind: str = "", table_width: int = 0) -> int:
    """The number of elements of a head to rotate: rotary_dim, or by the width of some tables, or all after the offset.

    kind, table_width: of the table.
    """
    rotary_dim: int | None = _typed(name, "rotary_dim", words.get("rotary_dim"))
    offset: int = _typed(name, "rotary_offset", words.get("rotary_offset", 0))
    if rotary_dim is not None or kind not in _TIMES_WIDTH:
        return head_dim - offset if rotary_dim is None else rotary_dim
    found = _TIMES_WIDTH[kind] * table_width
    if found < 2 or found % 2:
        must = "rotary_dim (even)" if kind == "cos_sin_cache" else "rotary_dim / 2"
        raise InvalidInput(f"{name}: {kind} is {table_width} wide; it must be (P, W) with W = {must}")
    return found


def rotates_heads(tensors: Mapping[str, Tensor], words: Mapping[str, Any], head_dim: int) -> bool:
    """Whether a call rotates whole heads, as its words and tables say before they are checked."""
    table = [(kind, tensors[kind].shape[-1]) for kind in _TIMES_WIDTH if kind in tensors]
    found = rotary_dim_of("prepare_qkv", words, head_dim, *(table or [("", 0)])[0])
    return found == head_dim and words.get("rotary_offset", 0) == 0


def _typed(name: str, label: str, value: Any) -> Any:
    """The value of a word, checked; those that come from a value were checked as that was made."""
    if label in _WORDS:
        return word(name, label, value, _WORDS[label])
    readers: Any = {bool: flag, type(None): flag, int: partial(whole, least=0), float: number}
    read = readers.get(type(DEFAULTS[label]))
    absent = value is None and label in ("interleaved_out", "rotary_dim")
    return value if absent or read is None else read(name, label, value)


def second_tables(name: str, tables: dict[str, Any]) -> dict[str, Tensor]:
    """Take the tables of the second stream out of pairs, and leave those of the first."""
    second: dict[str, Tensor] = {}
    given = [label for label, table in tables.items() if table is not None]
    for label in given:
        if not isinstance(pair := tables[label], Tensor):
            tables[label], second[label] = both = parts(name, label, pair, 2)
            if not all(isinstance(x, Tensor) for x in both):
                refuse(name, label, pair, "a tensor, or a tuple of 2 tensors")
    if second and len(second) < len(given):
        had, other = (" and ".join(sorted(labels)) for labels in (given, second))
        raise InvalidInput(f"{name}: the first table is {had}, the second {other}; pass two of one kind")
    return dict(zip(("second_cos", "second_sin"), second.values()))
