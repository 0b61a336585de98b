"""The base of a user's values."""

from __future__ import annotations

from inspect import signature
from typing import Any

from ..base.arguments import shown
from ..base.views import Tensors


class Value:
    """Tensors and words by name. They must not change after a value was made.

    A number in the place of a tensor becomes one in a call, on the device of its heads.

    Dynamo only notes the arguments of a constructor. The call that takes the value refuses what is wrong with them.
    """

    tensors: Tensors
    words: dict[str, Any]
    text = ""  # what the user wrote but tensors and whole numbers (`run/public.py`); "": it cannot be spelled
    items: tuple[Any, ...]  # these tensors and numbers
    asked: Any = None  # the arguments of the constructor

    def __getattr__(self, name: str) -> Any:
        """An attribute that is missing because Dynamo traced the constructor, which runs now."""
        if name.startswith("__") or self.asked is None or "tensors" in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        args, words = self.asked
        type(self).__init__.__wrapped__(self, *args, **words)  # type: ignore[attr-defined]
        return getattr(self, name)

    def __repr__(self) -> str:
        own = next(x for x in type(self).__mro__ if x.__module__.split(".")[0] == __name__.split(".")[0])
        given = signature(own).bind(*self.asked[0], **self.asked[1]).arguments
        parts = [f"{name}={shown(x)}" for name, x in given.items() if x is not None and x is not False]
        return f"{type(self).__name__}({', '.join(parts)})"
