"""A user's words as options: each of its type, with defaults filled in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..base import config
from ..base.arguments import flag, number, refuse, whole, wholes, word
from ..base.errors import InvalidInput
from ..plan.spec import LAYOUT_AXES, ROUNDINGS, TABLES, Options, changed
from ..plan.views import Tensors

ONE_TABLE = TABLES[1:]
"""Words for one table in place of cos and sin."""

_WORDS = {"layout": tuple(LAYOUT_AXES), "rounding": ROUNDINGS}

_PACKED = "positions=jitrope.Packed(cu_seqlens, ...)"
_OLD = {
    "position_ids": "positions=position_ids",
    **dict.fromkeys(("mrope_section", "mrope_interleaved"), "positions=jitrope.Mrope(position_ids, mrope_section)"),
    "start_positions": "positions=jitrope.Starts(start_positions)",
    **dict.fromkeys(("cu_seqlens", "max_seqlen", "packed_table", "cp_size", "cp_rank"), _PACKED),
    **dict.fromkeys(("eps", "across_heads", "zero_centered", "q_weight", "k_weight"), "norm=jitrope.Norm(...)"),
    **dict.fromkeys(("k_cache", "v_cache", "slot_mapping", "v_scale", "rotate_k"), "cache=jitrope.KVCache(...)"),
    **dict.fromkeys(("q_scale", "k_scale"), "quantize=jitrope.Quantize(...)"),
    "launch": "jitrope.configure(launch=...)",
}
"""How other libraries' words, and those that jitrope had, are said."""


_HAVE = {"apply_rope": ("positions",), "prepare_packed_qkv": ("positions",), "prepare_joint_qkv": ("norm",)}
"""The functions that do not have all words for values."""


def unexpected(name: str, label: str) -> TypeError:
    """The error of a word that a function does not have."""
    hint = ""
    if label in _OLD:
        word_ = _OLD[label].partition("=")[0]
        hint = f"; pass {_OLD[label]}" + (
            "" if "." in word_ or word_ in _HAVE.get(name, (word_,)) else " to prepare_qkv"
        )
    return TypeError(f"{name}() got an unexpected keyword argument {label!r}{hint}")


def canonical(tensors: Tensors) -> Tensors:
    """A call's tensors, with one table in place of cos and sin called cos, its axes in their order."""
    full = {"cos" if name in ONE_TABLE else name: x for name, x in tensors.items()}
    if "freqs" in tensors and full["cos"].dim() == 4:  # (P, B, 1, W)
        full["cos"] = full["cos"].transpose(0, 1)
    return full


def resolved(op: Any, tensors: Mapping[str, Any], asked: Mapping[str, Any], name: str = "") -> tuple[Options, Tensors]:
    """The options of a call, each of its type, with defaults filled in; and its tensors, by their names in the kernel.

    The tensors are checked first. The head size is that of the first one.

    Raises:
        InvalidInput: a word that does not go with the operation, or a value of another type.
    """
    name = name or op.function
    for label in (*asked, *[label for label in tensors if label not in op.names]):
        if label not in op.words and label not in op.tables:
            raise InvalidInput(f"{name}: {label} does not go with {op.stage or 'this function'}")
    kinds = [kind for kind in ONE_TABLE if kind in tensors]
    pair = "cos" in tensors or "sin" in tensors
    if len(kinds) + pair != 1 - op.norm * (not kinds and not pair) or ("cos" in tensors) != ("sin" in tensors):
        had = ", ".join([*(["cos and sin"] if {"cos", "sin"} <= tensors.keys() else []), *kinds])
        had = had or next((label for label in ("cos", "sin") if label in tensors), "none")
        raise InvalidInput(f"{name}: give cos and sin, or one of cos_sin_cache, freqs and freqs_cis, not {had}")
    needed = {*[label for label in op.tensors if not label.endswith("?")], "cos", "sin", *ONE_TABLE}
    for label in op.tensors:
        if not label.endswith("?") and label not in tensors:
            refuse(name, op.labels.get(label, label), None, "a tensor")
    for label, x in tensors.items():
        if not isinstance(x, Tensor) or x.layout is not torch.strided or x.is_nested:
            tensor = "a strided tensor" if isinstance(x, Tensor) else "a tensor"
            shown = (kinds or ["cos"])[0] if label == "second_cos" else op.labels.get(label, label)
            refuse(name, shown, x, tensor if label in needed else f"{tensor} or None")
    full = canonical(dict(tensors))
    first = next(iter(full.values()))
    cos = full.get("cos")
    widths = first.shape[-1] if first.dim() else 0, cos.shape[-1] if cos is not None and cos.dim() else 0
    kind = kinds[0] if kinds else "cos_sin"
    words = (("launch", config.launch()), *[item for item in asked.items() if item[0] != "check"])
    try:
        known = not (torch.compiler.is_compiling() or torch.jit.is_tracing())  # type: ignore[attr-defined]
        options = (_kept if known else _resolved)(op, name, kind, words, *widths)
    except TypeError:  # a word without a hash
        options = _resolved(op, name, kind, words, *widths)
    return options, full if cos is not None else op.unrotated(name, full, options)


def _resolved(
    op: Any, name: str, kind: str, words: tuple[tuple[str, Any], ...], width: int, table_width: int
) -> Options:
    values = {label: _typed(name, label, value) for label, value in words}
    o = Options(**{"rotary_dim": None, "interleaved_out": None, "table": kind, **values})
    if o.rotary_dim is None:  # from the width of cos_sin_cache or freqs_cis, if one is given, else from the head
        head_dim = width // (o.q_per_group + 2) if o.q_per_group > 0 else width
        twice = {"cos_sin_cache": 1, "freqs_cis": 2}.get(o.table)
        rotary_dim = twice * table_width if twice else head_dim - o.rotary_offset
        if op.norm and not table_width:  # nothing is rotated
            rotary_dim -= rotary_dim % 2
        o = changed(o, rotary_dim=rotary_dim)
        if twice and (o.rotary_dim < 2 or o.rotary_dim % 2):
            width_words = "rotary_dim (even)" if twice == 1 else "rotary_dim / 2"
            raise InvalidInput(f"{name}: {o.table} is {table_width} wide; it must be (P, W) with W = {width_words}")
    interleaved_out = o.interleaved if o.interleaved_out is None else o.interleaved_out
    return changed(o, interleaved_out=interleaved_out, max_seqlen=o.max_seqlen or 0)


_kept = lru_cache(maxsize=4096)(_resolved)


def _typed(name: str, label: str, value: Any) -> Any:
    default = Options._field_defaults[label]
    if label in ("norm", "launch") or (value is None and label in ("interleaved_out", "rotary_dim", "max_seqlen")):
        return value  # checked where they are made
    if label in _WORDS:
        return word(name, label, value, _WORDS[label])
    if label == "mrope_section":
        return wholes(name, label, value, 0)
    kinds: dict[type, Callable[..., Any]] = {bool: flag, int: whole, float: number}
    return kinds[type(default)](name, label, value)


def check_asked(name: str, asked: Mapping[str, Any]) -> bool:
    """Whether a call has `check=True`: the positions are looked at, which waits for the device."""
    return flag(name, "check", asked.get("check", False))
