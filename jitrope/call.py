"""A call as plain values and as a text, which is the argument of the torch ops.

>>> text = "bshd heads q k > rotate cos sin rotary_dim=64 > fresh"
>>> Call.parse(text).options.rotary_dim, str(Call.parse(text)) == text
(64, True)
"""

from __future__ import annotations

from collections.abc import Iterable
from inspect import get_annotations
from itertools import chain
from types import SimpleNamespace
from typing import Any, NamedTuple

from .base import layouts
from .base.errors import InvalidInput
from .plan.options import DEFAULTS, Options
from .sinks import cache, pages, results
from .stages import STAGES, norm, positions, rotate
from .stages.positions import COUNTS

FRESH = "fresh_"
"""What begins the name of a tensor that a call with other written tensors fills with a fresh result."""
FRESHES = tuple([FRESH + name for name in ("q", "k", "v", "q_scale", "k_scale", "v_scale")])


class Part(NamedTuple):
    """The words and the tensors of a part of a call. words: those of the options by those of a text."""

    words: dict[str, str]
    tensors: tuple[str, ...] = ()


def _part(*files: Any) -> Part:
    """The words and the tensors of some files."""
    found = chain(*[get_annotations(getattr(file, "Words", object)) for file in files])
    words = [word for word in found if word not in (*COUNTS, "layout", "inplace", "check")]
    tensors = chain(*[getattr(file, "TENSORS", ()) for file in files])
    return Part({word.removeprefix("norm_"): word for word in words}, tuple(tensors))


SOURCE, SINK = "source", "sink"
_HEADS = "dq dk dv dgate x weight q k v qkv kv k_pe first_q first_k first_v second_q second_k second_v"
PARTS = {
    SOURCE: _part(SimpleNamespace(TENSORS=_HEADS.split(), Words=layouts.Words)),
    **{name: _part(stage) for name, stage in STAGES.items()},
    "rotate": _part(rotate, positions),
    SINK: _part(results, cache, pages, SimpleNamespace(TENSORS=FRESHES, Words=Options)),
}
"""The parts of a call in the order of its text. A word or a tensor is named by its part, and nowhere else."""

_PART_OF = {name: part for part, own in PARTS.items() for name in own.tensors}
_DEFAULTS: dict[str, dict[str, Any]] = {
    part: {word: DEFAULTS[of_options] for word, of_options in own.words.items()} for part, own in PARTS.items()
}
_DEFAULTS["norm"]["kind"] = norm.KINDS[0]  # of a text with a norm


class Call(NamedTuple):
    """Everything about a call but the values of its tensors and its `COUNTS`."""

    name: str  # of the operation
    tensors: tuple[str, ...]  # names, in the order of `PARTS`
    options: Options

    @staticmethod
    def of(name: str, tensors: Iterable[str], options: Options) -> Call:
        """A call without its counts, with its tensors in order."""
        ordered = sorted(tensors, key=[*_PART_OF].index)
        return Call(name, tuple(ordered), options._replace(**dict.fromkeys(COUNTS, 0), **rotate.pairs_of(options)))

    def __str__(self) -> str:
        o, parts = self.options, []
        for part in PARTS:
            words = [name for name in self.tensors if _PART_OF[name] == part]
            words += _others(part, o) if part != "norm" or o.norm_kind else []
            first = {SOURCE: f"{o.layout} {self.name}", SINK: _sink(self)}.get(part, part)
            if words or part in (SOURCE, SINK) or (part == "norm" and o.norm_kind):
                parts.append(" ".join([first, *words]))
        return " > ".join(parts)

    @staticmethod
    def parse(text: str) -> Call:
        """The call of a text. Raises InvalidInput if no call has this text."""
        first, *others = [words.split() for words in text.split(" > ")]
        if len(first) < 2 or first[0] not in layouts.LAYOUT_AXES or not others or not all(others):
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
            values.update({PARTS[part].words[word]: x for word, x in {**_DEFAULTS[part], **read}.items()})
        found = Call.of(name, tensors, Options(**values))
        if others[-1][0] != _sink(found):
            raise InvalidInput(f"call ends in {others[-1][0]!r}; with its tensors it must be {_sink(found)!r}")
        return found


def _sink(call: Call) -> str:
    """The word for where the results go."""
    made = "given" if any(name.endswith("_out") for name in call.tensors) else "fresh"
    return "in_place" if call.options.inplace else "cache" if "k_cache" in call.tensors else made


def _others(part: str, o: Options) -> list[str]:
    """A part's words that do not have their defaults."""
    found = {word: getattr(o, of_options) for word, of_options in PARTS[part].words.items()}
    others = {word: x for word, x in found.items() if x != _DEFAULTS[part][word]}
    shown = {word: ",".join(map(str, x)) if isinstance(x, tuple) else x for word, x in others.items()}
    return [word if x is True else f"{word}={x}" for word, x in shown.items()]


def _read(part: str, text: str) -> tuple[str, Any]:
    """The word of a text and its value."""
    word, _, value = text.partition("=")
    kind = type(_DEFAULTS[part][word])
    if kind in (bool, type(None)):
        return word, ("False", "True", "").index(value) > 0
    if kind is tuple:
        return word, tuple([int(x) for x in value.split(",")])
    return word, kind(value)
