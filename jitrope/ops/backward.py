"""The gradient of a source where it is an operation of its own, and the options of gradients."""

from __future__ import annotations

from collections.abc import Container, Sequence

from ..base.errors import JitropeError
from ..plan.options import Options, norm_of
from ..plan.views import Tensors
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
        self.inplace = False
        BACKWARDS[self.name] = self

    def made(self, given: Container[str], o: Options) -> tuple[str, ...]:
        return tuple([name for name in self.results if name in given or not name.endswith(("_weight", "_bias"))])

    def viewed(self, given: Container[str], o: Options) -> tuple[str, ...]:
        return ()

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
    o = o._replace(interleaved=o.interleaved_out, interleaved_out=o.interleaved)
    return o._replace(inverse=not o.inverse, inplace=inplace)


def norm_turned_back(o: Options) -> Options:
    """The options of the gradient of a norm of q, k and v. The pairs of the output stay those of the output's gradient.

    Roundings do not change gradients, so one kernel serves all. Its products are contracted, which is fastest.
    """
    norm = norm_of(o)._replace(rounding="none")
    return o._replace(inverse=not o.inverse, inplace=False, rounding="complex64", norm=norm)
