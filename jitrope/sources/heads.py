"""q, k and v as tensors of their own: the source, and its gradient."""

from __future__ import annotations

from collections.abc import Container

import torch

from .. import chain
from ..base.views import Tensors, head_view, joined
from ..checks.words import resolved
from ..plan.options import Options
from ..sinks import results
from ..stages import positions
from ..stages.norm import NO_NORM, NormOptions, gradients_of_means, norm_of
from .backward import Backward, norm_turned_back, turned_back
from .operation import Call, Operation, operation, tables_of
from .outs import joins_k
from .source import Read, Source


class Heads(Source):
    word = op = "heads"
    needed = ("q",)

    def letters(self, given: Container[str], o: Options) -> tuple[str, ...]:
        return tuple([letter for letter in "qkv" if letter in given])

    def joins(self, t: Tensors) -> bool:
        return joins_k(t["v"], t.get("k"), t.get("cos"))

    def saved(self, t: Tensors, o: Options, tables: Tensors) -> Tensors:
        if norm_of(o).kind == NO_NORM.kind or o.norm is None:
            return tables
        return {name: x for name, x in t.items() if name != "v" or norm_of(o).v_norm}

    def gradient(self, op: Operation, call: Call, saved: Tensors, grads: Tensors, o: Options) -> Tensors:
        if op.out == "ranks":
            return _of_ranks(op, call, saved, grads, o)
        if o.norm is not None and o.norm.kind != NO_NORM.kind:
            return _of_norm(call, saved, grads, o)
        o = o._replace(norm=None)
        found = rotated_back(operation(self), call, tables_of(saved), grads, o)
        if o.inplace:  # tokens that are not rotated keep their gradient
            found = {name: positions.spare_stays(grads[name], x, saved, o) for name, x in found.items()}
        return found


class V(Heads):
    """v alone, which takes the place of q and is not rotated."""

    word = "v"
    labels = {"q": "v"}  # noqa: RUF012


def of_k(tensors: Tensors) -> Tensors:
    """The tensors of a call for k alone, in the place of q; only q has a scale."""
    return {name: x for name, x in tensors.items() if name != "q_factor"}


def rotated_back(op: Operation, call: Call, saved: Tensors, grads: Tensors, o: Options) -> Tensors:
    """The gradients of a rotation. That of k alone takes the place of q's, without q's scale."""
    back = turned_back(o)
    if "q" in grads:
        return call(op, {**grads, **saved}, back)
    return {"k": call(op, {"q": grads["k"], **of_k(saved)}, back)["q"]}


def _of_ranks(op: Operation, call: Call, saved: Tensors, grads: Tensors, o: Options) -> Tensors:
    """The gradients of groups of heads for ranks: such a rotation is its own backward."""
    own = {name: x for name, x in grads.items() if name != "v" or (len(grads) == 3 and not op.norm)}
    found: Tensors = {}
    if own and op.norm:
        found = op.source.gradient(operation(op.source), call, saved, own, o._replace(ulysses_degree=0))
    elif own:
        found = rotated_back(op, call, saved, own, o)
    if "v" in grads and "v" not in found:
        found["v"] = joined(grads["v"], o.layout)
    return found


def _of_norm(call: Call, saved: Tensors, grads: Tensors, o: Options) -> Tensors:
    """The gradients of a norm, from one launch if all of q, k and v have one; else that of v has its own."""
    grads = dict(grads)
    grad = grads.pop("v", None) if len(grads) < 3 else None
    found = _of_letters(call, saved, grads, o) if grads else {}
    if grad is not None:
        words = {"layout": o.layout, "norm": norm_of_v(norm_of(o))}
        of_v, alone = resolved(NORM_OF_V, {"q": saved["v"]}, words)
        found["v"] = _of_letters(call, alone, {"q": grad}, of_v)["q"]
    return found


def _of_letters(call: Call, saved: Tensors, grads: Tensors, o: Options) -> Tensors:
    """The gradients of q, of k, or of q, k and perhaps v. That of k alone takes the place of q's."""
    names = dict(zip("qkv", grads))
    back = norm_turned_back(o, "v" in names)
    if names["q"] == "k" and (of := norm_of(back).of) != "qk":
        back = back._replace(norm=norm_of(back)._replace(of="k" if of == "q" else "q"))
    tensors = {"d" + as_name: grads[name] for as_name, name in names.items()}
    endings = ("", "_weight", "_bias", "_mean_square")
    tensors |= {own + x: saved[name + x] for x in endings for own, name in names.items() if name + x in saved}
    tables = tables_of(saved)
    found = call(HEADS_BACKWARD, {**tensors, **(tables if "q" in grads else of_k(tables))}, back)
    found = {names[name[0]] + name[1:]: x for name, x in found.items()}
    return {**found, **gradients_of_means(saved, saved, found, o)}


def norm_of_v(norm: NormOptions) -> NormOptions:
    """The norm of v alone, by that of a call with v_norm: it has no weight."""
    return NormOptions(norm.rounding, norm.across_heads, kind=norm.kind, eps=norm.eps)


class HeadsBackward(Backward):
    """The gradients of a norm of q, k and v."""

    results = ("q", "k", "v", "q_weight", "k_weight", "q_bias", "k_bias")

    def made(self, given: Container[str], o: Options) -> tuple[str, ...]:
        return tuple([name for name in self.results if name in given])

    def of_heads(self, t: Tensors, o: Options) -> Tensors:
        return {name: torch.empty_like(t[name]) for name in "qkv" if name in t}

    def compute(self, outputs: Tensors, t: Tensors, o: Options) -> None:
        chain.back(t, results.places(outputs, o), o._replace(inverse=not o.inverse))

    def finishes(self, named: Container[str], o: Options) -> bool:
        return True  # it drops the scratch

    def ways(self, named: Tensors, o: Options) -> list[tuple[Read, Read] | None]:
        reads = self.source.reads(named, o)
        return [(reads[x], (f"{x}_out", head_view(named[f"{x}_out"], o.layout))) if x in reads else None for x in "qkv"]


HEADS, OF_V = Heads(), V()
HEADS_BACKWARD = HeadsBackward(HEADS)
NORM_OF_V = operation(OF_V, norm=True)
