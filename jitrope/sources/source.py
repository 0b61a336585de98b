"""Where the heads of q, k and v come from: what all sources have. Each source is a file beside this one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Container, Mapping
from typing import Any

from torch import Tensor

from ..base.views import Tensors, head_view
from ..plan.options import Options
from ..sinks import results
from ..stages import positions

SOURCES: dict[str, Source] = {}
"""All sources by their names."""
Read = tuple[str, Tensor]
"""A tensor's name, and a view of the heads in it, (batch, seq, group, head of the group, dim)."""


class Source:
    """The heads of a call. letter: "q", "k", "v" or "gate"; t: the call's tensors by name; o: its options."""

    word: str  # its name
    op: str  # its name in torch's ops
    said = ""  # in messages, where a stage does not go with it
    function = "prepare_qkv"  # the user's
    needed: tuple[str, ...]  # tensors that each call has
    heads: tuple[str, ...] = ("q", "k", "v")  # tensors that a kernel reads as q, k and v
    labels: Mapping[str, str] = {}  # users' names of tensors, where they differ
    refused: frozenset[str] = frozenset()  # words and tensors that do not go with it
    whole = False  # its kernels read whole heads

    def __init__(self) -> None:
        SOURCES[self.word] = self

    def reads(self, t: Tensors, o: Options) -> dict[str, Read]:
        """The heads that a kernel reads, by letter."""
        return {x: (name, head_view(t[name], o.layout)) for x, name in zip("qkv", self.heads) if name in t}

    def shaped(self, t: Tensors, o: Options) -> Tensors:
        """The call's tensors with q, k and v of their own, for checks. Of heads only shape, dtype and device count."""
        return t

    def letters(self, given: Container[str], o: Options) -> tuple[str, ...]:
        """The results that are fresh tensors."""
        return ("q", "k", "v")

    def empty(self, letter: str, t: Tensors, o: Options, word: str) -> Tensor:
        """A fresh tensor for a result, with the strides of heads that are a tensor of their own. word: its format."""
        if letter in t:
            return results.empty_elements(t[letter], word)
        heads = self.shaped(t, o)
        like = heads[letter] if letter in heads else heads["q"]  # the gate
        return results.empty_heads(like, tuple(like.shape), word)

    def out_view(self, out: Tensor, letter: str, t: Tensors, o: Options) -> Tensor:
        """The heads of a result, as a kernel writes them."""
        return head_view(out, o.layout)

    def viewed(self, given: Container[str], o: Options) -> tuple[str, ...]:
        """The results that are views of a fused tensor."""
        return ()

    def parts(self, t: Tensors, o: Options) -> list[tuple[Tensors, Options]]:
        """Of each stream, its heads by letter beside its other tensors, and its options."""
        return [(t, o)]

    def check(self, op: Any, t: Tensors, o: Options) -> None:
        """Refuse a wrong call."""
        op.check_stages(self.shaped(t, o), o)

    def joins(self, t: Tensors) -> bool:
        """Whether a kernel can store heads of v as it stores those of k."""
        return True

    def copied(self, outputs: Tensors, t: Tensors, o: Options) -> Tensors:
        """The heads that a call copies after its launch, if the kernel cannot, by letter."""
        return {"v": t["v"]}

    def overwritten(self, given: Container[str]) -> tuple[str, ...]:
        """The tensors that a call in place returns."""
        return tuple([name for name in ("q", "k") if name in given])

    def places(self, t: Tensors, o: Options) -> Tensors:
        """The places of the results of a call in place, for plain torch."""
        return results.places({name: t[name] for name in self.overwritten(t)}, o)

    def put(self, t: Tensors, found: Tensors, o: Options) -> Tensors:
        """Copy fresh results to the tensors of a call in place."""
        for name, x in found.items():
            t[name].copy_(positions.spare_stays(t[name], x, t, o))
        return {name: t[name] for name in found}

    def saved(self, t: Tensors, o: Options, tables: Tensors) -> Tensors:
        """The tensors that the backward needs. tables: those of the tables among them."""
        return tables

    @abstractmethod
    def gradient(self, op: Any, call: Callable[..., Tensors], saved: Tensors, grads: Tensors, o: Options) -> Tensors:
        """The gradients of the inputs. grads: gradients of the results, at least one."""
