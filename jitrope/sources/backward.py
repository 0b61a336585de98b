"""The gradient of a source where it is an operation of its own, and the options of gradients."""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor

from .. import chain
from .. import torch_state as watch
from ..base.errors import JitropeError
from ..base.layouts import LAYOUT_AXES
from ..base.memory import meet, overlaps_itself, span
from ..base.views import Tensors, head_view
from ..plan.options import Options
from ..sinks.results import LETTERS
from ..stages import rotate
from ..stages.norm import normed, sums_heads
from ..values.constants import counters, filled
from .operation import Call, Operation
from .source import Read


class Backward(Operation):
    """The gradient of a source, where it is no call of the user's, from gradients of q, k and v: dq, dk, dv and dgate.

    It writes what the source reads. With a norm it reads that too, and v only if it has a norm. It has no second
    derivative then; else it is the source's own call.
    """

    function = ""
    heads = ("dq", "dk", "dv", "dgate")

    def __init__(self, source: Operation) -> None:
        super().__init__(name=f"{source.name}_backward")
        self.source = source

    def made(self, given: Container[str], o: Options) -> tuple[str, ...]:
        heads = [x for x in self.source.heads if x not in LETTERS or f"d{x}" in given]
        return (*heads, *[x for x in ("q_weight", "k_weight", "q_bias", "k_bias") if x in given])

    def fresh(self, t: Tensors, o: Options, blocks: int) -> Tensors:
        across, axis = o.across_heads, LAYOUT_AXES[o.layout][2]
        heads = self.source.shaped(t, o) if o.norm_kind else {}
        given = {x: heads[x] for x in "qk" if x in heads and (x == "q" or heads[x].shape[axis])}
        widths = {name: x.shape[-1] * (x.shape[axis] if across else 1) for name, x in given.items()}
        return {**self.source.empty(t, o), **weight_sums(t, widths, blocks)}

    def fakes(self, t: Tensors, o: Options) -> Tensors:
        sums = [name for name in self.made(t, o) if name.endswith(("_weight", "_bias"))]
        return {**self.source.empty(t, o), **{name: torch.empty_like(t[name]) for name in sums}}

    def ways(self, named: Tensors, o: Options) -> list[tuple[Read | None, Read | None]]:
        reads = {x: (f"d{x}", head_view(named[f"d{x}"], o.layout)) for x in "qkv" if f"d{x}" in named}
        if o.norm_kind:
            reads |= {x: y for x, y in self.source.reads(named, o).items() if x != "v" or o.v_norm}
        outs = {name: named[f"{name}_out"] for name in self.source.heads if f"{name}_out" in named}
        writes = {x: (f"{name}_out", view) for x, (name, view) in self.source.reads(outs, o).items()}
        if "v" in writes and self.source.leaves_v(named, o):
            del writes["v"]
        return [(reads[x], writes[x]) if x in writes else (None, None) for x in "qkv"]

    def left(self, named: Container[str], o: Options) -> tuple[str, ...]:
        return ("v",) * ("dv" in named and sums_heads(named, o)) + ("gate",) * (o.order == "qkv_gated")

    def part(self, letter: str, t: Tensors, o: Options) -> Tensor:
        """The gradient of a letter. That of a gate may be missing, and is zero then."""
        q = t["dq"]
        return t[f"d{letter}"] if f"d{letter}" in t else filled(q.device, (1,), q.dtype, 0).expand(q.shape)

    def compute(self, made: Tensors, t: Tensors, o: Options) -> None:
        places = self.source.places(made, t, o)
        grads = {x: self.part(x, t, o) for x in LETTERS if x in places}
        if not o.norm_kind:
            return chain.run([({**t, **{x: grad.contiguous() for x, grad in grads.items()}}, o)], places, o)
        t = {**self.source.parts(t, o)[0][0], **{f"d{x}": grad for x, grad in grads.items()}}
        chain.back(t, places, o._replace(inverse=not o.inverse))

    def back(self, call: Call, saved: Tensors, grads: Tensors, o: Options) -> Tensors:
        if o.norm_kind:
            hint = "compute the norm by itself; with a drop-in, enable(model, fuse_norm=False)"
            raise JitropeError(f"a norm of q or k has no second derivative; {hint}")
        return named_back(call(self.source, {**grads, **saved}, turned_back(o)))


def weight_sums(tensors: Tensors, widths: dict[str, int], blocks: int) -> Tensors:
    """The gradients of the given weights and biases, and the memory of the kernel that sums them over its blocks.

    widths: the lengths of a weight of q, and of k if it has heads, in the kernel's order.
    """
    given = {name: x for name, x in tensors.items() if name.endswith(("_weight", "_bias"))}
    if not given:
        return {}
    kinds = ("weight", "bias") if any(name.endswith("_bias") for name in given) else ("weight",)
    sizes = {f"{name}_{kind}": size for kind in kinds for name, size in widths.items()}
    some, width = next(iter(given.values())), sum(sizes.values())  # all have one dtype: `checks`
    sums = some.new_empty(width) if blocks else some.new_zeros(width)
    parts = dict(zip(sizes, sums.split([*sizes.values()])))
    out = {name: parts[name] if name in parts else torch.zeros_like(x) for name, x in given.items()}
    scratch = {"block_sums": some.new_empty((blocks, width), dtype=torch.float32), "counters": counters(some)}
    return {"weight_grads": sums, **out, **scratch}


def overwrites(grads: Tensors, o: Options) -> bool:
    """Whether a gradient overwrites that of the results: each element has memory of its own, and torch allows it."""
    if not (o.inplace and o.inplace_grad and watch.plain(grads)) or torch.is_grad_enabled():
        return False
    xs = [*grads.values()]
    met = len(xs) > 1 and meet(span(xs[0]), span(xs[1]))
    return not (met or any(x.is_inference() or overlaps_itself(x) for x in xs))


def named_back(grads: Tensors) -> Tensors:
    """The gradients of results by their names in a call."""
    return {f"d{name}": x for name, x in grads.items()}


def turned_back(o: Options, inplace: bool = False, with_v: bool = True) -> Options:
    """The options of the gradient: the transpose of a rotation rotates back, from output to input.

    With a norm the pairs of the output stay those of the output's gradient. Roundings do not change gradients, so one
    kernel serves all. Its products are contracted, which is fastest. with_v: v has a gradient.
    """
    o = o._replace(inverse=not o.inverse, inplace=inplace)
    if not normed(o):
        return o._replace(**rotate.exchanged(o), norm_kind="")
    return o._replace(rounding="complex64", norm_rounding="none", v_norm=o.v_norm and with_v)
