"""The gradient of a source where it is an operation of its own, and the options of gradients."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Container, Sequence

import torch

from ..base.errors import JitropeError
from ..base.layouts import LAYOUT_AXES
from ..base.views import Tensors
from ..plan.options import Options
from ..sources.stand_ins import weight_sums
from ..stages import rotate
from ..stages.norm import norm_of
from .operation import BACKWARDS, Call, Operation, tables_of
from .source import Source


class Backward(Operation):
    """The gradient of a source, where it is no call of the user's, from gradients of q, k and v.

    It has no second derivative, except where it says so.
    """

    results: tuple[str, ...]

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.name, self.function = f"{source.word}_backward", ""
        BACKWARDS[self.name] = self

    def made(self, given: Container[str], o: Options) -> tuple[str, ...]:
        return tuple([name for name in self.results if name in given or not name.endswith(("_weight", "_bias"))])

    def viewed(self, given: Container[str], o: Options) -> tuple[str, ...]:
        return ()

    @abstractmethod
    def of_heads(self, t: Tensors, o: Options) -> Tensors:
        """New tensors for the gradients of heads."""

    def fresh(self, t: Tensors, o: Options, blocks: int) -> Tensors:
        across, axis = norm_of(o).across_heads, LAYOUT_AXES[o.layout][2]
        heads = self.source.shaped(t, o) if o.norm else {}
        given = {x: heads[x] for x in "qk" if x in heads and (x == "q" or heads[x].shape[axis])}
        widths = {name: x.shape[-1] * (x.shape[axis] if across else 1) for name, x in given.items()}
        return {**self.of_heads(t, o), **weight_sums(t, widths, blocks)}

    def fakes(self, t: Tensors, o: Options) -> Tensors:
        sums = [name for name in self.made(t, o) if name.endswith(("_weight", "_bias"))]
        return {**self.of_heads(t, o), **{name: torch.empty_like(t[name]) for name in sums}}

    def makes_empty(self, given: Sequence[str], o: Options) -> bool:
        return False  # there may be sums

    def saved(self, t: Tensors, o: Options) -> Tensors:
        return tables_of(t)

    def finish(self, outputs: Tensors, t: Tensors, o: Options) -> Tensors:
        return {name: outputs[name] for name in self.results if name in outputs}

    def gradient(self, call: Call, saved: Tensors, grads: Tensors, o: Options) -> Tensors:
        if o.norm is not None:
            hint = "compute the norm by itself; with a drop-in, enable(model, fuse_norm=False)"
            raise JitropeError(f"a norm of q or k has no second derivative; {hint}")
        raise JitropeError(f"{self.name} has no gradient")


def turned_back(o: Options, inplace: bool = False) -> Options:
    """The options of the gradient: the transpose of a rotation rotates back, from output to input."""
    return o._replace(**rotate.exchanged(o), inverse=not o.inverse, inplace=inplace)


def norm_turned_back(o: Options, with_v: bool) -> Options:
    """The options of the gradient of a norm of q, k and v. The pairs of the output stay those of the output's gradient.

    Roundings do not change gradients, so one kernel serves all. Its products are contracted, which is fastest.
    """
    norm = norm_of(o)._replace(rounding="none", v_norm=norm_of(o).v_norm and with_v)
    return o._replace(inverse=not o.inverse, inplace=False, rounding="complex64", norm=norm)
