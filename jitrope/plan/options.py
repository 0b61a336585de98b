"""The options of a call: the words of its parts, in one record."""

from __future__ import annotations

from inspect import get_annotations
from typing import Any

from .. import stages
from ..sinks import cache, results


class Options(cache.Words, results.Words, stages.Words):
    """The words of a call, as `apply_rope` describes them. Those that are not given have the parts' defaults."""

    launch: str = "auto"
    check: bool = False  # read the positions first; no text has it

    def _asdict(self) -> dict[str, Any]:
        return {**DEFAULTS, **vars(self)}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Options) and (vars(self) == vars(other) or self._asdict() == other._asdict())

    def __hash__(self) -> int:
        return hash((self.rotary_dim, self.layout, self.inverse, self.inplace, self.norm_kind))  # which differ most


DEFAULTS: dict[str, Any] = {x: getattr(Options, x) for part in Options.__mro__[::-1] for x in get_annotations(part)}
