"""Rope in context parallelism: the launch that packs k and v for other ranks can also rotate q and k."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..api import apply_rope, prepare_qkv
from ..base import arguments
from ..checks import checks
from ..checks.words import ONE_TABLE, canonical, resolved
from ..run.gather import placed
from ..sources.heads import Heads
from ..stages.positions import Packed
from ..stages.rotate import rows_of
from ..torch_state import is_traced
from .backends import NAME, fail
from .schedule import Schedule

ROPE = Heads(function=NAME)


@dataclass(frozen=True, eq=False)  # == of two tensors gives a tensor
class Rope:
    """The rotation of q and k in `all_gather_attention`, by each row's position in its sequence.

    >>> rope = Rope(freqs=jitrope.tables.freqs(7, jitrope.tables.inv_freq(rotary_dim=64)[0]))
    >>> q, k, v = torch.randn(3, 10, 8, 64)
    >>> out = all_gather_attention(q, k, v, Schedule(torch.tensor([0, 7, 10]), 10), rope=rope)

    Attributes:
        cos, sin: tables over positions, (P, W), with a row for each position of the longest sequence, including its
            padding. They get no gradient.
        cos_sin_cache, freqs, freqs_cis: one of them in place of cos and sin, with the same rows; freqs in radians.
        The other keywords are those of `apply_rope`.
    """

    interleaved: bool = field(default=False, kw_only=True)
    rotary_dim: int | None = field(default=None, kw_only=True)
    rotary_offset: int = field(default=0, kw_only=True)
    rounding: str = field(default="fp32", kw_only=True)
    cos: Tensor | None = None
    sin: Tensor | None = None
    cos_sin_cache: Tensor | None = None
    freqs: Tensor | None = None
    freqs_cis: Tensor | None = None


@dataclass(frozen=True)
class Rotation:
    """A `Rope`, checked for one call: the words of a call of `apply_rope`, and the rows of its tables."""

    words: dict[str, Any]
    rows: int

    def into(self, q: Tensor, k: Tensor, v: Tensor, sent: Tensor) -> Tensor:
        """Return q rotated, and write k rotated and v side by side into sent (rows or more, both widths)."""
        sent[len(q) :] = 0
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        q, k, v = (x.resolve_neg() for x in (q, k, v))
        sent_k, sent_v = (x.view_as(k) for x in sent[: len(q)].chunk(2, 1))
        prepare_qkv(q, k, v, **self.words, out=(out, sent_k, sent_v))
        return out

    def apart(self, q: Tensor, k: Tensor, **more: Any) -> tuple[Tensor, Tensor | None]:
        """Rotate q and k, or their gradients, in a separate launch. more: words of `apply_rope`."""
        return apply_rope(q, k, **self.words, **more)


def rotation_of(rope: Any, q: Tensor, k: Tensor, schedule: Schedule) -> Rotation | None:
    """The rotation of this rank's rows, q (t, Hq, D) and k (t, Hk, D); None for None.

    Raises InvalidInput if rope is not a `Rope`, or its fields do not fit together or do not fit q and k.
    """
    if rope is None:
        return None
    if not isinstance(rope, Rope):
        arguments.refuse(NAME, "rope", rope, "a Rope")
    if q.dtype == torch.float64:
        fail("q is float64, which rope does not take; rotate q and k before, or leave rope out")
    words: dict[str, Any] = {"layout": "thd", **vars(rope)}
    tables = {word: words.pop(word) for word in ("cos", "sin", *ONE_TABLE)}
    tables = {word: arguments.tensor(NAME, word, x) for word, x in tables.items() if x is not None}
    shape, positions = schedule.shape, schedule.position_ids
    if shape.rule == "dual_chunk" or shape.cp_size == 1:  # the kernel finds the positions from the offsets
        positions = Packed(schedule.offsets, cp_size=shape.cp_size, cp_rank=shape.cp_rank)
    if not is_traced():  # the call checks too, but under its own name
        given = {"q": q, "k": k, **tables}
        asked = placed(ROPE, given, positions)
        options, given = resolved(ROPE, given, {**words, **asked})
        checks.check(ROPE, given, options)
    tables = {word: x.detach().resolve_conj().resolve_neg() for word, x in tables.items()}
    rotation = Rotation({**tables, **words, "positions": positions}, rows_of(canonical(tables)["cos"]))
    if schedule.longest is not None and rotation.rows < schedule.longest:
        fail(f"rope's tables have {rotation.rows} rows; they must have at least max_seqlen={schedule.longest}")
    return rotation
