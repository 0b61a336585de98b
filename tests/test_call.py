"""The text of a call: it says all of a call but its counts, and it can be read."""

from __future__ import annotations

import random
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from jitrope import InvalidInput
from jitrope.base.layouts import LAYOUT_AXES, QKV_ORDERS
from jitrope.base.views import FORMATS
from jitrope.call import COUNTS, PARTS, Call
from jitrope.plan.options import DEFAULTS, Options
from jitrope.run import op_call
from jitrope.stages.convert import SCALE_DTYPES, SCALE_FMTS
from jitrope.stages.norm import KINDS as NORM_KINDS
from jitrope.stages.norm import OF as NORM_OF
from jitrope.stages.norm import ROUNDINGS as NORM_ROUNDINGS
from jitrope.stages.rotate import ROUNDINGS, TABLES

from .calls import CALLS, Case, ident
from .results import places_of
from .sweep import Made

WORDS = {
    "layout": tuple(LAYOUT_AXES),
    "table": TABLES,
    "order": tuple(QKV_ORDERS),
    "rounding": ROUNDINGS,
    "launch": ("auto", "grid_2d"),
    "out_dtype": tuple(FORMATS),
    "scale_out": SCALE_DTYPES,
    "scale_fmt": SCALE_FMTS,
    "norm_kind": (*NORM_KINDS, "no_norm"),
    "norm_rounding": NORM_ROUNDINGS,
    "of": NORM_OF,
}


def some(chance: random.Random, word: str, default: object) -> object:
    """A value of a word's type."""
    if word in WORDS:
        return chance.choice(WORDS[word])
    if default is None:
        return chance.choice([None, True, False])
    if isinstance(default, bool):
        return chance.random() < 0.5
    if isinstance(default, float):
        return chance.choice([default, 0.1, 3e-41, chance.random()])
    if isinstance(default, tuple):
        return tuple([chance.randrange(64) for _ in range(chance.randrange(4))])
    return chance.choice([default, chance.randrange(1000)])


@pytest.mark.parametrize("seed", range(300))
def test_a_text_can_be_read(seed: int) -> None:
    chance = random.Random(seed)
    values = {word: some(chance, word, value) for word, value in DEFAULTS.items() if word != "check"}
    without = {word: DEFAULTS[word] for word in PARTS["norm"].words.values()}
    values.update(chance.choice([without, {**without, "norm_kind": "rms_norm"}, {}]))
    parts = [own for part, own in PARTS.items() if part != "norm" or values["norm_kind"]]  # its weights imply a norm
    names = ["q", "k", "v", *[name for own in parts for name in own.tensors]]
    call = Call.of("heads", chance.sample(names, chance.randrange(len(names))), Options(**values))
    assert Call.parse(str(call)) == call
    assert not any(word in str(call) for word in COUNTS)


def test_every_word_has_one_part() -> None:
    words = [word for own in PARTS.values() for word in own.words.values()]
    assert sorted([*words, *COUNTS, "layout", "inplace", "check"]) == sorted(DEFAULTS)


class Texts(TorchDispatchMode):
    """The texts of the torch ops that calls reach: a mode watches them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), words: Any = None) -> Any:
        self.found += [x for x in given if isinstance(x, str) and function.namespace == "jitrope"]
        return function(*given, **(words or {}))


@pytest.mark.parametrize("case", CALLS, ids=ident)
def test_calls_of_the_table_can_be_read(case: Case) -> None:
    """Of each torch op that a call reaches."""
    m = Made(case, "cpu")
    places = places_of(m)
    with Texts() as texts:
        m.call(**places.words)
    assert texts.found
    assert all(str(Call.parse(text)) == text for text in texts.found)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it must be like"),
        ("bshd heads q", "it must be like"),
        ("bhds heads q > fresh", "it must be like"),
        ("bshd heads q > turn cos > fresh", "call has 'turn'; it must be one of"),
    ],
)
def test_another_text_is_refused(text: str, why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        Call.parse(text)


def test_an_op_refuses_another_number_of_tensors() -> None:
    with pytest.raises(InvalidInput, match="is given 0 tensors, 0 of them written, and 2 sizes; it needs 3, 0 and 2"):
        op_call.given_to("bshd heads q > rotate cos sin > fresh", [0, 0], [])
    with pytest.raises(InvalidInput, match="call has the source 'turn'"):
        op_call.read("bshd turn q > fresh")
