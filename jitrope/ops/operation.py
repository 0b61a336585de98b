"""What an operation says of itself; the rows are in `operations`.

A call is an operation, its tensors by name, and its options. `launch` plans and launches it, `dispatch` decides which
way it goes, `library` makes torch's op of it, with its fake and its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Container

import torch
from torch import Tensor

from ..base.errors import JitropeError
from ..plan import partition
from ..plan.problem import NormCall, Views, head_view
from ..plan.spec import Options, changed
from ..plan.views import Tensors
from . import checks
from .reference import RULE

Call = Callable[["Operation", Tensors, Options], Tensors]
"""`dispatch.call`."""

empty_like = torch.empty_like
HEADS = ("rotary_dim", "layout", "interleaved", "rotary_offset", "mrope_section", "mrope_interleaved")
SERVING = (*HEADS, "launch")
TABLE_WORDS = ("cos", "sin", "cos_sin_cache", "freqs_cis", "position_ids", "start_positions", "freqs")
NORMED = (*HEADS, "rounding", "launch")
ROTATION = (*NORMED, "mscale", "inverse", "max_seqlen", "packed_table", "cp_size", "cp_rank", "interleaved_out")


class Operation:
    """A row of the table.

    Attributes:
        name: of torch's op; the op in place has "_" behind it. function: the user's.
        tensors: names, in the op's order, before those of the tables; one with "?" may be missing.
        options: the fields of `Options` that its op takes, beside `table`.
        words, tables: what a user's call may have beside its tensors; tables are tensors.
        stage: what keeps it from having the other words, for messages.
        labels: names of tensors for messages, where they are others. norm: it normalises.
        results: names of outputs; one that is named as an input is missing where that is.
        reads, writes: where the heads of q, k and v come from and go to; "q_out" is the output "q".
        mutated: inputs that are written, in place or not.
        inplace: there is an op in place. differentiable: it has a gradient. shards: it takes DTensors.
    """

    name: str
    function: str = ""
    tensors: tuple[str, ...] = ("q", "k?")
    options: tuple[str, ...] = ROTATION
    words: tuple[str, ...] = ()
    stage: str = ""
    tables: frozenset[str] = frozenset((*TABLE_WORDS, "cu_seqlens"))
    labels: dict[str, str] = {}  # noqa: RUF012  no one writes it
    results: tuple[str, ...] = ("q", "k")
    reads: tuple[str, ...] = ("q", "k", "v")
    writes: tuple[str, ...] = ("q_out", "k_out", "v_out")
    mutated: tuple[str, ...] = ()
    norm = False
    inplace = differentiable = True
    shards = False

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors' names."""
        return tuple([name.rstrip("?") for name in self.tensors])

    def check(self, name: str, tensors: Tensors, options: Options) -> None:
        """Refuse what does not fit."""
        checks.check(name, tensors, options)

    def written(self, options: Options) -> tuple[str, ...]:
        """Names of the inputs that a call writes."""
        return (*self.mutated, *(self.results if options.inplace else ()))

    def outputs(self, tensors: Tensors, options: Options, blocks: int = 0) -> Tensors:
        """What a call writes: fresh tensors, or those that it writes in place."""
        if options.inplace:
            return {name: tensors[name] for name in self.produced(tensors, options)}
        return self.fresh(tensors, options, blocks)

    def fresh(self, tensors: Tensors, options: Options, blocks: int) -> Tensors:
        """Tensors for the results, and for the sums of so many blocks."""
        return {name: empty_like(tensors[name]) for name in self.results if name in tensors}

    def made(self, given: Container[str], options: Options) -> tuple[str, ...]:
        """Names of the results that torch's op makes."""
        return tuple([name for name in self.results if name in given or name not in self.names])

    def produced(self, given: Container[str], options: Options) -> tuple[str, ...]:
        """Names of all that a call gives."""
        return self.made(given, options)

    def complete(self, results: Tensors, tensors: Tensors, options: Options) -> Tensors:
        """All results, from those that torch's op makes."""
        return results

    def fakes(self, tensors: Tensors, options: Options) -> Tensors:
        """Tensors like the results."""
        return self.outputs(tensors, options)

    def finish(self, outputs: Tensors, tensors: Tensors, options: Options) -> Tensors:
        """The results, from the outputs that a launch has written."""
        return outputs

    def heads(self, tensors: Tensors, options: Options) -> tuple[Views, Views]:
        """The heads of q, k and v that are read and those that are written; an output "q" is called "q_out" here."""
        views = [
            [head_view(tensors[name], options.layout) if name in tensors else None for name in names]
            for names in (self.reads, self.writes)
        ]
        return tuple(views[0]), tuple(views[1])  # type: ignore[return-value]

    def places(self, options: Options) -> tuple[str, ...]:
        """The tensors that these are views of, as the pointers of q, k and v, in and out."""
        written = tuple([name.removesuffix("_out") for name in self.writes]) if options.inplace else self.writes
        return (*self.reads, *written)

    def normed(self, tensors: Tensors, options: Options) -> NormCall | None:
        """What a call with a norm has beside that."""
        return None

    def reference(self, tensors: Tensors, options: Options) -> Tensors:
        """The results in plain torch, as fresh tensors."""
        raise NotImplementedError

    def on_cpu(self, tensors: Tensors, options: Options) -> Tensors:
        """What a call gives on CPU tensors."""
        results = self.reference(tensors, options)
        return self.put(tensors, results, options) if options.inplace else results

    def put(self, tensors: Tensors, results: Tensors, options: Options) -> Tensors:
        """Fresh results copied to where a call in place has them."""
        for name, result in results.items():
            tensors[name].copy_(spare_stays(tensors[name], result, tensors, options))
        return {name: tensors[name] for name in results}

    def saved(self, tensors: Tensors) -> Tensors:
        """What the backward needs: tables, lengths, starts and positions."""
        return {name: x for name, x in tensors.items() if name not in self.names}

    def gradient(self, call: Call, saved: Tensors, grads: Tensors, options: Options) -> Tensors:
        """The gradients of inputs, from those of results, at least one."""
        raise JitropeError(f"{self.function or self.name} has no {'second derivative' if self.norm else 'gradient'}")


def spare_stays(x: Tensor, rotated: Tensor, tensors: Tensors, options: Options) -> Tensor:
    """x after a call in place: the tokens after the last sequence are not touched."""
    cu_seqlens = tensors.get("cu_seqlens")
    if cu_seqlens is None:
        return rotated
    end = partition.local_rows(cu_seqlens[-1].long(), options.cp_rank, options.cp_size, RULE)
    spare = torch.arange(x.shape[0], device=x.device) >= end
    return torch.where(spare[:, None, None], x, rotated)


def turned_back(options: Options, inplace: bool = False) -> Options:
    """The options of the gradient: a rotation's transpose is the rotation back, from output to input."""
    o = options
    return changed(
        o, inverse=not o.inverse, interleaved=o.interleaved_out, interleaved_out=o.interleaved, inplace=inplace
    )
