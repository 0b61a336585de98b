"""Gather the tensors and words of a user's call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..base.arguments import refuse
from ..base.errors import InvalidInput
from ..plan.views import Tensors
from .dispatch import call
from .into import given_out
from .operation import Operation
from .quantize import Scaled
from .values import Positions, Ulysses
from .words import ONE_TABLE, unexpected


def gather(
    op: Operation, tensors: Tensors, words: Any, allowed: frozenset[str], positions: Any = None, inplace: bool = False
) -> dict[str, Any]:
    """Move tables and positions that are not None from the words to the tensors; return the remaining words."""
    for word in [*words]:
        if word not in allowed:
            raise unexpected(op.function, word)
        if word in ONE_TABLE:
            tensors[word] = words.pop(word)
    if inplace is not False:
        words["inplace"] = inplace
    if positions is not None:
        words = {**placed(op, tensors, positions), **words}
    for name in [*tensors]:
        if tensors[name] is None:
            del tensors[name]
    return words  # type: ignore[no-any-return]


def placed(op: Operation, tensors: Tensors, positions: Any) -> dict[str, Any]:
    """Add the tensors of `positions` to the others; return its words."""
    if isinstance(positions, Positions):
        tensors.update(positions.tensors)
        return positions.words
    if not isinstance(positions, Tensor):
        refuse(op.function, "positions", positions, "a tensor of ids, or a jitrope.Packed, Mrope or Starts")
    tensors["position_ids"] = positions
    return {}


def forget_positions(tensors: Tensors, words: dict[str, Any]) -> None:
    """Drop the positions of a call without a table, which rotates nothing."""
    if not any(name in tensors for name in ("cos", "sin", *ONE_TABLE)):
        for name in ("position_ids", "start_positions"):
            tensors.pop(name, None)
        for word in ("mrope_section", "mrope_interleaved", "rotary_dim", "rotary_offset"):
            words.pop(word, None)


def add(name: str, label: str, value: Any, kind: Any, tensors: Tensors, words: dict[str, Any]) -> None:
    """Add the tensors and words of a value to those of a call."""
    if not isinstance(value, kind):
        refuse(name, label, value, f"a jitrope.{kind.__name__}")
    tensors.update(value.tensors)
    words.update(value.words)


def call_into(
    op: Operation, tensors: Tensors, words: dict[str, Any], heads: Mapping[str, Any], v: Any = None
) -> Tensors:
    """The results of a call with the word `out`: `Ulysses`, or tensors; see `given_out`."""
    if isinstance(words["out"], Ulysses):
        if not hasattr(op, "by_rank"):
            raise InvalidInput(f"{op.function}: Ulysses does not go with {op.stage}")
        words.update(words.pop("out").words)
        if heads.get("v") is not None:
            tensors["v"] = heads["v"]
        return call(op.by_rank, tensors, words)
    into = given_out(op, words, heads, tensors, v)
    return {**into, **call(op.into if into else op, tensors, words)}


def result(out: Tensors, name: str) -> Any:
    """A result of a call, with its scale if it has one."""
    return Scaled(out[name], out[f"{name}_scale"]) if f"{name}_scale" in out else out.get(name)
