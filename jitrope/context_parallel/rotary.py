"""Rope on the way to the other ranks: q and k are rotated by the launch that packs what is sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..base import arguments
from ..ops import checks
from ..ops.dispatch import call
from ..ops.fit import Fail
from ..ops.operation import turned_back
from ..ops.operations import ROPE, ROPE_INTO
from ..ops.words import resolved
from ..plan.spec import HeadWords, Options
from ..plan.views import Tensors
from .schedule import Schedule


@dataclass(frozen=True, eq=False)  # tensors have no one answer to ==
class Rope(HeadWords):
    """What `all_gather_attention` turns q and k by, at their positions in their sequences; words of `apply_rope`.

    Attributes:
        cos, sin: tables over positions, (P, W), with a row for each position of the longest sequence, its padding
            included. They get no gradient.
        cos_sin_cache, freqs, freqs_cis: one of them in place of cos and sin, of as many rows; freqs in radians.
        The other keywords are those of `apply_rope`.
    """

    cos: Tensor | None = None
    sin: Tensor | None = None
    cos_sin_cache: Tensor | None = None
    freqs: Tensor | None = None
    freqs_cis: Tensor | None = None

    def call(self, q: Tensor, k: Tensor, schedule: Schedule, name: str) -> Rotation:
        """Its tables and options for this rank's rows, q (t, Hq, D) and k (t, Hk, D), checked.

        Raises:
            InvalidInput: they do not fit together; the message begins with `name`.
        """
        asked: dict[str, Any] = {"layout": "thd", **vars(self)}
        tables = {word: asked.pop(word) for word in ("cos", "sin", "cos_sin_cache", "freqs", "freqs_cis")}
        tables = {word: arguments.tensor(name, word, x) for word, x in tables.items() if x is not None}
        shape = schedule.shape
        if shape.rule == "dual_chunk" or shape.cp_size == 1:  # the kernel counts, from the offsets
            asked.update(cp_size=shape.cp_size, cp_rank=shape.cp_rank)
            positions = {"cu_seqlens": schedule.offsets}
        else:
            positions = {"position_ids": schedule.position_ids}
        options, tensors = resolved(ROPE, {"q": q, "k": k, **tables, **positions}, asked, name)
        checks.check(name, tensors, options)
        tables = {label: x.resolve_conj().resolve_neg() for label, x in tensors.items() if label not in ("q", "k")}
        return Rotation(tables, options)


@dataclass(frozen=True)
class Rotation:
    """A `Rope` of one call."""

    tables: Tensors
    options: Options

    def into(self, q: Tensor, k: Tensor, v: Tensor, sent: Tensor) -> Tensor:
        """q rotated; k rotated and v go side by side into `sent` (rows at least, widths of k and of v). One launch."""
        q, k, v = (x.resolve_neg() for x in (q, k, v))
        own, sent_k, sent_v = sent[: len(q)], k, v
        if len(q):
            sent_k, sent_v = (x.view_as(k) for x in own.chunk(2, 1))
        sent[len(q) :] = 0
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        tensors = {"q": q, "k": k, "v": v, "q_out": out, "k_out": sent_k, "v_out": sent_v, **self.tables}
        call(ROPE_INTO, tensors, self.options)
        return out

    def apart(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q and k rotated, with gradients, by a launch of their own."""
        out = call(ROPE, {"q": q, "k": k, **self.tables}, self.options)
        return out["q"], out["k"]

    def back_(self, dq: Tensor, dk: Tensor) -> None:
        """Gradients of what was rotated become those of what was given, in place."""
        if len(dq):
            call(ROPE, {"q": dq, "k": dk, **self.tables}, turned_back(self.options, inplace=True))


def one_launch(k: Tensor, v: Tensor, schedule: Schedule, head_groups: int) -> bool:
    """Whether `Rotation.into` does it: all rows of all heads are sent, and heads of k and v are alike."""
    return head_groups == 1 and schedule.exchange is None and k.shape == v.shape


def require_rope(rope: Any, fail: Fail) -> None:
    """A `Rope`, or None."""
    if rope is not None and not isinstance(rope, Rope):
        fail(f"rope is {type(rope).__name__}; it is a Rope")
