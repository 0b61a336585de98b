"""diffusers: `enable` for every model that it has something for, as soon as the model is made."""

from __future__ import annotations

import contextlib
import re
from functools import wraps
from pathlib import Path
from typing import Any

import diffusers

from jitrope import JitropeError
from jitrope.integrations import diffusers as ours


def install(checkout: Path) -> None:
    models = re.compile("^(?!.*Pipeline).*(Transformer|ControlNet|DiT)")
    for cls in [getattr(diffusers, name) for name in dir(diffusers) if models.match(name)]:
        if isinstance(cls, type) and issubclass(cls, diffusers.ModelMixin):
            cls.__init__ = _then_enable(cls, cls.__init__)


def _then_enable(cls: type, original: Any) -> Any:
    @wraps(original)
    def init(self: Any, *arguments: Any, **words: Any) -> None:
        original(self, *arguments, **words)
        if type(self) is cls:
            with contextlib.suppress(JitropeError):
                ours.enable(self)

    return init
