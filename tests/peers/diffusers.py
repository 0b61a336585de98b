"""diffusers: `enable` for every model of a class that jitrope covers, as soon as the model is made."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any

import diffusers

from jitrope.integrations import diffusers as ours
from tests.diffusion_coverage import COVERAGE


def install(checkout: Path) -> None:
    for name in COVERAGE:
        cls = getattr(diffusers, name, None)
        if cls is not None:
            cls.__init__ = _then_enable(cls, cls.__init__)


def _then_enable(cls: type, original: Any) -> Any:
    @wraps(original)
    def init(self: Any, *arguments: Any, **words: Any) -> None:
        original(self, *arguments, **words)
        if type(self) is cls:
            ours.enable(self)

    return init
