"""The base of a user's values."""

from __future__ import annotations

from typing import Any

from ..base.arguments import shown
from ..base.views import Tensors


class Value:
    """Tensors by name, and the words that are not defaults. They must not change after a value was made.

    Dynamo only notes the arguments of a constructor. The call that takes the value refuses what is wrong with them.
    """

    tensors: Tensors
    words: dict[str, Any]
    text = ""  # what the user wrote but tensors and whole numbers (`run/public.py`); "": it cannot be spelled
    items: tuple[Any, ...]  # these tensors and numbers
    asked_with: Any = None  # the arguments of a constructor that Dynamo traced

    def __getattr__(self, name: str) -> Any:
        """An attribute that is missing because Dynamo traced the constructor, which runs now."""
        if name.startswith("__") or self.asked_with is None or "tensors" in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        args, words = self.asked_with
        type(self).__init__.__wrapped__(self, *args, **words)  # type: ignore[attr-defined]
        return getattr(self, name)

    def __repr__(self) -> str:
        parts = [f"{name}={shown(x)}" for name, x in self._arguments().items()]
        return f"{type(self).__name__}({', '.join(parts)})"

    def _arguments(self) -> dict[str, Any]:
        """The arguments that are not defaults."""
        return {**self.tensors, **{name: x for name, x in self.words.items() if name not in ("layout", "shifts")}}
