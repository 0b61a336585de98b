"""What a user wrote: the base of values, and the arguments of a call as a text."""

from __future__ import annotations

from functools import wraps
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from ..base.arguments import shown
from ..base.views import Tensors
from ..torch_state import is_traced


class Value:
    """Tensors by name, and the words that are not defaults. They must not change after a value was made.

    A number in the place of a tensor becomes one in a call, on the device of its heads.

    Dynamo only notes the arguments of a constructor. The call that takes the value refuses what is wrong with them.
    """

    tensors: Tensors
    words: dict[str, Any]
    text = ""  # what the user wrote (`spelled`) but tensors and whole numbers; "": it cannot be spelled
    items: tuple[Any, ...]  # these tensors and numbers
    asked: tuple[Any, dict[str, Any]]  # all arguments
    asked_with: Any = None  # the arguments of a constructor that Dynamo traced

    def __init_subclass__(cls) -> None:
        """Let the constructor note its arguments, of a class of jitrope's own. Dynamo does not trace the rest of it."""
        init = vars(cls).get("__init__")
        if init is None or not cls.__module__.startswith("jitrope."):
            return

        @wraps(init)
        def noted(self: Any, *args: Any, **words: Any) -> None:
            self.text = ""
            if type(self) is not cls:  # the arguments are not all that a class of the user's is made of
                init(self, *args, **words)
                self.asked = args, words
            elif is_traced() and self.asked_with is None:
                frozen = {word: tuple(x) if isinstance(x, list) else x for word, x in words.items()}
                self.asked_with = [tuple(x) if isinstance(x, list) else x for x in args], frozen
            else:
                init(self, *args, **words)
                self.asked = args, words
                if not is_traced() and (found := spelled(cls.__name__, args, words)):
                    self.text, self.items = ", ".join(found[0]), (*found[1], *found[2])

        cls.__init__ = noted  # type: ignore[method-assign]

    def __getattr__(self, name: str) -> Any:
        """An attribute that is missing because Dynamo traced the constructor, which runs now."""
        if name.startswith("__") or self.asked_with is None or "tensors" in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        args, words = self.asked_with
        self.__init__(*args, **words)  # type: ignore[misc]
        return getattr(self, name)

    def __repr__(self) -> str:
        own = next(x for x in type(self).__mro__ if x.__module__.startswith("jitrope."))
        given = signature(own).bind(*self.asked[0], **self.asked[1]).arguments
        parts = [f"{name}={shown(x)}" for name, x in given.items() if x is not None and x is not False]
        return f"{type(self).__name__}({', '.join(parts)})"


def spelled(name: str, args: Any, words: Any) -> tuple[list[str], list[Tensor], list[int]] | None:
    """What a call with these arguments says, its tensors, and its whole numbers, which may be symbols.

    None: an argument cannot be spelled. Dynamo traces this, so it is one function with few builtins, which are guarded.
    """
    said = [f"{name!r}"]
    tensors: list[Tensor] = []
    sizes: list[int] = []
    for label in words:
        said.append(f"{label!r}")
    said.append("0")
    todo: list[Any] = [*words.values(), *args][::-1]
    while todo:
        x = todo.pop()
        if isinstance(x, Tensor):
            tensors.append(x)
            said.append("'tensor'")
        elif isinstance(x, Value):
            if x.text:
                said.append(f"'value', {x.text!r}")
                for y in x.items:
                    (tensors if isinstance(y, Tensor) else sizes).append(y)
            elif x.asked_with is None:
                return None
            else:
                args, words = x.asked_with
                said.append(f"'made', {type(x).__name__!r}")
                for label in words:
                    said.append(f"{label!r}")
                count = 0
                for _ in args:
                    count += 1
                said.append(f"0, {count}")
                todo += [*words.values(), *args][::-1]
        elif x is None or isinstance(x, str):
            said.append(f"'', {x!r}")
        elif isinstance(x, bool):
            said.append(f"'', {True if x else False}")  # noqa: SIM210  a symbol's truth
        elif isinstance(x, int):
            sizes.append(x)
            said.append("'number'")
        elif isinstance(x, float) and x - x == 0:
            said.append(f"'', {next(iter({float(x)}))!r}")  # all digits of a symbol
        elif isinstance(x, (list, tuple)):
            said.append(f"'tuple', {len(x)}")
            todo += x[::-1]
        elif isinstance(x, torch.dtype):
            said.append(f"'dtype', '{x}'")
        else:
            return None
    return said, tensors, sizes
