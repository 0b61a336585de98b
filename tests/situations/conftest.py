"""A test of a situation gets a named call on a device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..results import same
from .named import Call, bits


@pytest.fixture
def call(request: pytest.FixtureRequest) -> Iterator[Call]:
    """Whatever the situation does, a plain call has the same bits before and after it."""
    before = bits(*request.param)
    yield Call(*request.param)
    assert all(same(x, y) for x, y in zip(before, bits.__wrapped__(*request.param), strict=True))
