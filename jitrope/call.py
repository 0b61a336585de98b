"""A call as plain values and as a text, which is the argument of the torch ops.

>>> text = "bshd heads q k > rotate cos sin rotary_dim=64 > fresh"
>>> Call.parse(text).options.rotary_dim, str(Call.parse(text)) == text
(64, True)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from .base.errors import InvalidInput
from .plan.options import LAYOUT_AXES, NormOptions, Options

COUNTS = ("max_seqlen", "unrotated")
"""Words that change from call to call. They are not in the text, so that torch.compile and export keep symbols."""
FRESH = "fresh_"
"""What begins the name of a tensor that a call with other written tensors fills with a fresh result."""


class Part(NamedTuple):
    """The words and the tensors of a part of a call."""

    words: tuple[str, ...]
    tensors: tuple[str, ...] = ()


def _part(words: str, tensors: str = "") -> Part:
    return Part(tuple(words.split()), tuple(tensors.split()))


SOURCE, SINK = "source", "sink"
PARTS = {
    SOURCE: _part(
        "q_per_group order copy_v v_dim",
        "dq dk dv dgate q k v qkv kv k_pe first_q first_k first_v second_q second_k second_v",
    ),
    "bias": _part("", "bias"),
    "norm": _part(
        " ".join(NormOptions._fields),
        "q_weight k_weight v_weight q_bias k_bias q_mean_square k_mean_square "
        "second_q_weight second_k_weight second_q_bias second_k_bias",
    ),
    "rotate": _part(
        "rotary_dim rotary_offset interleaved interleaved_out rounding inverse table mscale mrope_section "
        "mrope_interleaved shifts packed_table cp_size cp_rank",
        "cos sin second_cos second_sin cu_seqlens start_positions position_ids",
    ),
    "scale": _part("", "q_factor"),
    "transform": _part("hadamard"),
    "convert": _part("out_dtype computed group scale_out swizzled per_row dynamic_v", "q_scale k_scale v_scale"),
    SINK: _part(
        "rotate_k clear_page ulysses_degree scale_fmt launch",
        "q_out k_out v_out k_cache v_cache slot_mapping k_block_scale v_block_scale page_table page_indptr lengths "
        f"cu_seqlens_q batch_indices errors {FRESH}q {FRESH}k {FRESH}v {FRESH}q_scale {FRESH}k_scale {FRESH}v_scale",
    ),
}
"""The parts of a call in the order of its text. A word or a tensor of a call is named here and nowhere else."""

_PART_OF = {name: part for part, own in PARTS.items() for name in own.tensors}
_DEFAULTS: dict[str, dict[str, Any]] = {
    part: {word: (NormOptions if part == "norm" else Options)._field_defaults[word] for word in own.words}
    for part, own in PARTS.items()
}


class Call(NamedTuple):
    """Everything about a call but the values of its tensors and its `COUNTS`."""

    name: str  # of the operation
    tensors: tuple[str, ...]  # names, in the order of `PARTS`
    options: Options

    @staticmethod
    def of(name: str, tensors: Iterable[str], options: Options) -> Call:
        """A call without its counts, with its tensors in order."""
        ordered = sorted(tensors, key=[*_PART_OF].index)
        return Call(name, tuple(ordered), options._replace(max_seqlen=0, unrotated=0))

    def __str__(self) -> str:
        o, parts = self.options, []
        for part in PARTS:
            words = [name for name in self.tensors if _PART_OF[name] == part]
            words += _others(part, o.norm if part == "norm" else o)
            first = {SOURCE: f"{o.layout} {self.name}", SINK: _sink(self)}.get(part, part)
            if words or part in (SOURCE, SINK) or (part == "norm" and o.norm is not None):
                parts.append(" ".join([first, *words]))
        return " > ".join(parts)

    @staticmethod
    def parse(text: str) -> Call:
        """The call of a text. Raises InvalidInput if no call has this text."""
        first, *others = [words.split() for words in text.split(" > ")]
        if len(first) < 2 or first[0] not in LAYOUT_AXES or not others or not all(others):
            raise InvalidInput(f"call is {text!r}; it must be like 'bshd heads q k > rotate cos sin > fresh'")
        layout, name, *own = first
        parts = {SOURCE: own, **{words[0]: words[1:] for words in others[:-1]}, SINK: others[-1][1:]}
        values: dict[str, Any] = {"layout": layout, "inplace": others[-1][0] == "in_place"}
        tensors: list[str] = []
        for part, words in parts.items():
            if part not in PARTS:
                raise InvalidInput(f"call has {part!r}; it must be one of {', '.join(PARTS)}")
            own = [word for word in words if word.partition("=")[0] in PARTS[part].words]
            names = [word for word in words if word not in own]
            if unknown := [word for word in names if _PART_OF.get(word) != part]:
                raise InvalidInput(f"call has {unknown[0]!r}, which is neither a word nor a tensor of its {part}")
            try:
                read = dict([_read(part, word) for word in own])
            except ValueError as error:
                raise InvalidInput(f"call has a wrong value in {' '.join(own)!r}: {error}") from error
            tensors += names
            values.update({"norm": NormOptions(**read)} if part == "norm" else read)
        values.setdefault("interleaved_out", values.get("interleaved", False))
        found = Call.of(name, tensors, Options(**values))
        if others[-1][0] != _sink(found):
            raise InvalidInput(f"call ends in {others[-1][0]!r}; with its tensors it must be {_sink(found)!r}")
        return found


def _sink(call: Call) -> str:
    """The word for where the results go."""
    given = any(name.endswith("_out") for name in call.tensors)
    return (
        "in_place" if call.options.inplace else "cache" if "k_cache" in call.tensors else "given" if given else "fresh"
    )


def _others(part: str, options: Any) -> list[str]:
    """A part's words that do not have their defaults. The pairs of the output are by default those of the input."""
    defaults = {**_DEFAULTS[part], **({"interleaved_out": options.interleaved} if part == "rotate" else {})}
    found = {word: getattr(options, word, default) for word, default in defaults.items()}  # of a call without a norm
    others = {word: x for word, x in found.items() if x != defaults[word]}
    shown = {word: ",".join(map(str, x)) if isinstance(x, tuple) else x for word, x in others.items()}
    return [word if x is True else f"{word}={x}" for word, x in shown.items()]


def _read(part: str, text: str) -> tuple[str, Any]:
    """The word of a text and its value."""
    word, _, value = text.partition("=")
    kind = type(_DEFAULTS[part][word])
    if kind is bool:
        return word, ("False", "True", "").index(value) > 0
    if kind is tuple:
        return word, tuple([int(x) for x in value.split(",")])
    return word, kind(value)
