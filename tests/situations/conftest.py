"""A test of a situation gets a named call on a device."""

from __future__ import annotations

import pytest

from .named import Call


@pytest.fixture
def call(request: pytest.FixtureRequest) -> Call:
    return Call(*request.param)
