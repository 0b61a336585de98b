"""The shared lists of keywords, their defaults, and both in the signatures of functions, for `help` and editors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import Parameter, signature
from typing import Any, TypedDict, TypeVar

from torch import Tensor

from ..plan.options import DEFAULTS
from ..sinks.results import Ulysses


class SharedWords(TypedDict, total=False):
    """The keywords of all functions; see `apply_rope`."""

    interleaved: bool
    interleaved_out: bool | None
    rounding: str
    q_scale: float | Tensor | None
    unrotated: int
    mscale: float


class JointWords(SharedWords, total=False):
    """The keywords of `prepare_joint_qkv`."""

    rotary_dim: int | None
    rotary_offset: int
    out: Sequence[Tensor | None] | Ulysses | None


class LatentWords(SharedWords, total=False):
    """The keywords of `prepare_mla_qkv`."""

    layout: str
    cos_sin_cache: Tensor | None
    freqs: Tensor | None
    freqs_cis: Tensor | None
    check: bool


class RopeWords(LatentWords, JointWords, total=False):
    """All keywords: those of `apply_rope`, `prepare_qkv` and `prepare_fused_qkv`."""

    inverse: bool
    inplace_grad: bool


ROPE_WORDS = frozenset(RopeWords.__annotations__)
SHOWN = {**DEFAULTS, "rotary_dim": None}

F = TypeVar("F", bound=Callable[..., Any])


def with_words(words: Any) -> Callable[[F], F]:
    """Decorate a function: its signature names the keys of `words`, a TypedDict, in place of its `**words`."""

    def show(function: F) -> F:
        own = signature(function)
        shown = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        for name, annotation in words.__annotations__.items():
            annotation, default = getattr(annotation, "__forward_arg__", annotation), SHOWN.get(name)
            shown.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation))
        vars(function)["__signature__"] = own.replace(parameters=shown)
        return function

    return show
