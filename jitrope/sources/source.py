"""Where the heads of q, k and v come from: what all sources have. Each source is a file beside this one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch import Tensor

from ..base.views import TABLE_NAMES, Tensors, head_view, per_head
from ..plan.options import Options
from ..stages import positions

OF_TABLES = frozenset((*TABLE_NAMES, "second_cos", "second_sin", "cos_sin_cache", "freqs", "freqs_cis"))
"""The tensors of a call that are not those of heads, of a norm, or of a sink."""
Read = tuple[str, Tensor]
"""A tensor's name, and a view of the heads in it, (batch, seq, group, head of the group, dim)."""


class Source:
    """The heads of a call. letter: "q", "k", "v" or "gate"; t: the call's tensors by name; o: its options."""

    name: str  # also in the texts of calls
    said = ""  # in messages, where a stage does not go with it
    main = "q"  # in messages, the heads that have the sizes of the call
    function = "prepare_qkv"  # the user's
    needed: tuple[str, ...]  # tensors that each call has
    heads: tuple[str, ...] = ("q", "k", "v")  # its tensors; a kernel reads the first three as q, k and v
    kept: tuple[str, ...] = ()  # those that each backward needs
    labels: Mapping[str, str] = {}  # users' names of tensors, where they differ
    lacks: tuple[str, ...] = ()  # words and tensors that do not go with it
    whole = False  # its kernels read whole heads

    def reads(self, t: Tensors, o: Options) -> dict[str, Read]:
        """The heads that a kernel reads, by letter; those that it writes in place, or as gradients, are the same."""
        return {x: (name, head_view(t[name], o.layout)) for x, name in zip("qkv", self.heads) if name in t}

    def named(self, t: Tensors, o: Options) -> Tensors:
        """A call's tensors as a plan names them."""
        return t

    def head_dim(self, t: Tensors, o: Options) -> int:
        """The elements of a head; 0 of a tensor without axes."""
        x = next(iter(t.values()))
        return int(x.shape[-1]) if x.dim() else 0

    def fits(self, t: Tensors, o: Options) -> bool:
        """Whether there is a kernel for a call; if not, `instead` has another call."""
        return True

    def instead(self, t: Tensors, asked: Any) -> tuple[Any, Tensors, Any]:
        """The source of another call with the results of one that has no kernel, its tensors and words."""
        return self, t, asked

    def maps(self, t: Tensors, spec: Any) -> dict[str, Any]:
        """What a kernel's copy engine copies, by the tensors' names."""
        return {}

    def shaped(self, t: Tensors, o: Options) -> Tensors:
        """The call's tensors with q, k and v of their own, for checks. Of heads only shape, dtype and device count."""
        return t

    def letters(self, given: Container[str], o: Options) -> tuple[str, ...]:
        """The results."""
        return ("q", "k", "v")

    def views(self, given: Container[str], o: Options) -> tuple[str, ...]:
        """The results that are views of a fused tensor, if they are not sent elsewhere."""
        return ()

    def part(self, letter: str, t: Tensors, o: Options) -> Tensor:
        """The heads of a letter, in the call's layout."""
        return t[letter]

    def parts(self, t: Tensors, o: Options) -> list[tuple[Tensors, Options]]:
        """Of each stream, its heads by letter beside its other tensors, and its options."""
        return [(t, o)]

    def joins(self, t: Tensors) -> bool:
        """Whether a kernel can store heads of v as it stores those of k."""
        return True

    def put(self, t: Tensors, found: Tensors, o: Options) -> Tensors:
        """Copy fresh results to the tensors of a call in place."""
        for name, x in found.items():
            t[name].copy_(positions.spare_stays(t[name], x, t, o))
        return {name: t[name] for name in found}

    @abstractmethod
    def back(self, call: Callable[..., Tensors], saved: Tensors, grads: Tensors, o: Options) -> Tensors:
        """The gradients of the inputs. grads: gradients of the results, at least one."""

    def empty(self, t: Tensors, o: Options) -> Tensors:
        """New tensors for the gradients of its tensors. t: those of the gradient's call."""
        return {name: torch.empty_like(t[name]) for name in self.heads if name in t}


def joins_k(v: Tensor, k: Tensor | None, cos: Tensor | None = None) -> bool:
    """Whether a kernel can store heads of v as it stores those of k."""
    return (cos is None or not per_head(cos)) and k is not None and v.shape == k.shape and v.dtype == k.dtype


def is_dense(x: Any) -> bool:
    """Whether x is a strided tensor with an axis."""
    return isinstance(x, Tensor) and x.layout is torch.strided and not (x.is_nested or x.is_quantized) and x.dim() > 0


def tables_of(t: Tensors) -> Tensors:
    """Those of a call's tensors that are not of heads, of a norm, or of a sink."""
    return {name: x for name, x in t.items() if name in OF_TABLES}
