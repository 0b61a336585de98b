"""transformers: `enable` for the file of every model, when the model is made."""

from __future__ import annotations

from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from jitrope.base.errors import JitropeError
from jitrope.integrations import transformers as ours


def install(checkout: Path) -> None:
    original = PreTrainedModel.__init__

    @wraps(original)
    def init(self: Any, *arguments: Any, **words: Any) -> None:
        original(self, *arguments, **words)
        with suppress(JitropeError):  # the file may have no rotary function that is recognised
            ours.enable(self)

    PreTrainedModel.__init__ = init
