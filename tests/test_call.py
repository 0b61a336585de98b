"""The text of a call: it says all of a call but its counts, and it can be read."""

from __future__ import annotations

import random
from typing import Any

import pytest

from jitrope.base.layouts import LAYOUT_AXES, QKV_ORDERS
from jitrope.base.views import FORMATS
from jitrope.call import COUNTS, PARTS, Call
from jitrope.plan.options import DEFAULTS, Options
from jitrope.stages import norm, rotate
from jitrope.stages.convert import SCALE_DTYPES, SCALE_FMTS

from .calls import CALLS, Case, ident
from .results import planned

WORDS: dict[str, tuple[Any, ...]] = {
    **{"layout": tuple(LAYOUT_AXES), "table": rotate.TABLES, "order": tuple(QKV_ORDERS), "rounding": rotate.ROUNDINGS},
    **{"launch": ("auto", "grid_2d"), "out_dtype": tuple(FORMATS), "scale_out": SCALE_DTYPES, "scale_fmt": SCALE_FMTS},
    **{"norm_kind": (*norm.KINDS, "no_norm"), "norm_rounding": norm.ROUNDINGS, "of": norm.OF},
}
OF_TYPES: dict[type, tuple[Any, ...]] = {
    **{type(None): (None, True, False), bool: (True, False), int: (0, 1, 2, 64, 999)},
    **{float: (0.1, 3e-41, 1e-6, 1 / 3), tuple: ((), (7,), (16, 24, 24))},
}


@pytest.mark.parametrize("seed", range(300))
def test_a_text_can_be_read(seed: int) -> None:
    chance = random.Random(seed)
    words = {word: WORDS.get(word) or (*OF_TYPES[type(x)], x) for word, x in DEFAULTS.items() if word != "check"}
    values = {word: chance.choice(choices) for word, choices in words.items()}
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


@pytest.mark.parametrize("case", CALLS, ids=ident)
def test_calls_of_the_table_can_be_read(case: Case) -> None:
    """Of each kernel of a call."""
    specs = planned(case)
    assert specs
    assert all(str(Call.parse(spec.call)) == spec.call for spec in specs)
