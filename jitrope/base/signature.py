"""Show a shared list of keywords in the signatures of functions, for `help` and editors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def with_words(words: Any, defaults: Mapping[str, Any]) -> Callable[[F], F]:
    """Decorate a function: its signature names the keys of `words`, a TypedDict, in place of its `**words`."""

    def show(function: F) -> F:
        signature = inspect.signature(function)
        given = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        shared = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=defaults.get(name),
                annotation=getattr(annotation, "__forward_arg__", annotation),
            )
            for name, annotation in words.__annotations__.items()
        ]
        vars(function)["__signature__"] = signature.replace(parameters=[*given, *shared])
        return function

    return show
