"""The forms of an operation that write tensors of the caller, or a group of heads for each rank."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ..base.arguments import refuse
from ..base.errors import InvalidInput
from ..plan.options import LAYOUT_AXES, Options, changed, norm_of
from ..plan.problem import Views
from ..plan.views import FORMATS, Tensors, by_rank, converts_v, joined, per_head, sums_heads
from ..sinks.results import empty_scale
from . import checks
from .fit import check_axes, check_ranks, failing, require_apart
from .operation import Call, Operation, rotated_back
from .words import parts


class Into(Operation):
    """An operation whose results go to given tensors, with any strides: q_out, k_out and v_out.

    v is copied to v_out in the same launch where the kernel can do it, and after it elsewhere. With v_norm it is
    normalised on its way; `gather.with_v` sees to it that the kernel can. With a cache k and v go to the cache.
    """

    results: tuple[str, ...] = ()
    inplace = differentiable = False

    def __init__(self, base: Operation) -> None:
        self.base = base
        v, outs = (("v?",), ("q_out", "k_out", "v_out")) if "k" in base.results else ((), ("q_out",))
        self.name, self.function = base.name + "_into", base.function
        self.stage = " with ".join([stage for stage in (base.stage, "out") if stage])
        self.tensors = (*base.tensors, *v, *[f"{name}?" for name in outs])
        self.options, self.hidden, self.tables, self.norm = base.options, base.hidden, base.tables, base.norm
        self.writes, self.mutated = base.writes, (*base.mutated, *outs)
        self.labels = {name: f"out's {name[0]}" for name in outs}
        super().__init__()

    def written(self, options: Options) -> tuple[str, ...]:
        return (*self.base.written(options), *self.labels)

    def check(self, name: str, tensors: Tensors, options: Options) -> None:
        other = converts_v(tensors, options.dynamic_v) and self.finishes(tensors, options)
        if other and not sums_heads(tensors, options):  # before v's scale is compared with v
            refuse_other_v(name, tensors, options)
        self.base.check(name, tensors, options)
        if other:
            refuse_other_v(name, tensors, options)
        checks.check_into(name, tensors, options, self.labels, self.base.converted(tensors, options))

    def heads(self, tensors: Tensors, options: Options) -> tuple[Views, Views]:
        inputs, outputs = self.base.heads(tensors, options)
        if self.finishes(tensors, options):
            return (*inputs[:2], None), (*outputs[:2], None)
        return inputs, outputs

    def finishes(self, tensors: Tensors, options: Options) -> bool:
        """Whether v is copied after the launch, because a kernel copies heads only as it stores those of k."""
        if "v_out" not in tensors:
            return False
        joins = joins_k(tensors["v"], tensors.get("k"), tensors["cos"])
        return not joins or sums_heads(tensors, options)

    def finish(self, outputs: Tensors, tensors: Tensors, options: Options) -> Tensors:
        out, v = tensors["v_out"], tensors["v"]
        copy_heads(out, v if v.dim() == out.dim() else by_rank(v, options.layout, len(out)))
        return outputs


class ScaledInto(Into):
    """The same for an operation that also returns scales."""

    def __init__(self, base: Operation) -> None:
        super().__init__(base)
        own = tuple([name for name in base.results if name.endswith("_scale")])
        self.results = (*own, "v_scale") if "dynamic_v" in base.options else own

    def fresh(self, tensors: Tensors, options: Options, blocks: int) -> Tensors:
        given = [(name, tensors[f"{name[0]}_out"]) for name in self.made(tensors, options)]
        per_item = FORMATS[options.out_dtype].per_item
        return {name: empty_scale(x, options, per_item) for name, x in given}

    def made(self, given: Container[str], options: Options) -> tuple[str, ...]:
        names = [name for name in self.results if name != "v_scale" or options.dynamic_v]
        return tuple([name for name in names if f"{name[0]}_out" in given])


class ByRank(Into):
    """An operation whose results q, k and v are (ranks, ..., H / ranks, D), fresh.

    Given tensors in that layout, as gradients are, it returns them in the usual one; so a rotation is its own backward.
    """

    def __init__(self, base: Operation) -> None:
        super().__init__(base)
        self.name, self.stage = base.name + "_by_rank", " with ".join([x for x in (base.stage, "Ulysses") if x])
        self.tensors, self.options = (*base.tensors, "v?"), (*base.options, "ulysses_degree")
        self.names, self.words = (*base.names, "v"), (*self.words, "ulysses_degree")
        self.results = (*base.results, "v", *(("v_scale",) if "dynamic_v" in base.options else ()))
        self.mutated, self.labels, self.differentiable = base.mutated, {}, base.differentiable

    def check(self, name: str, tensors: Tensors, options: Options) -> None:
        if converts_v(tensors, options.dynamic_v) and self.finishes({**tensors, "v_out": tensors["v"]}, options):
            refuse_other_v(name, tensors, options)
        self.base.check(name, tensors, options)
        fail = failing(name)
        for letter in [letter for letter in "qkv" if letter in tensors]:
            check_axes(letter, tensors[letter], tensors["q"], fail)
            check_ranks(letter, tensors[letter], options.ulysses_degree, options, fail)

    def made(self, given: Container[str], options: Options) -> tuple[str, ...]:
        of_v = ("v", "v_scale")[: 1 + options.dynamic_v] if "v" in given else ()
        return (*self.base.made(given, options), *of_v)

    def fresh(self, tensors: Tensors, options: Options, blocks: int) -> Tensors:
        dtypes, per_item = self.base.converted(tensors, options), FORMATS[options.out_dtype].per_item
        out: Tensors = {}
        for name in self.made(tensors, options):
            x, axis = tensors[name[0]], LAYOUT_AXES[options.layout][2]
            if x.dim() == len(options.layout):
                shape = [options.ulysses_degree, *x.shape]
                shape[axis + 1] = x.shape[axis] // options.ulysses_degree
            else:
                shape = [*x.shape[1:]]
                shape[axis] *= len(x)
            if name.endswith("_scale"):
                out[name] = empty_scale(out[name[0]], options, per_item)
            else:
                shape[-1] //= per_item if name in dtypes else 1
                out[name] = x.new_empty(shape, dtype=dtypes.get(name, x.dtype))
        return out

    def finish(self, outputs: Tensors, tensors: Tensors, options: Options) -> Tensors:
        out, v, (layout, ranks) = outputs["v"], tensors["v"], (options.layout, options.ulysses_degree)
        split = v.dim() == len(layout)
        copy_heads(*((out, by_rank(v, layout, ranks)) if split else (by_rank(out, layout, ranks), v)))
        return outputs

    def saved(self, tensors: Tensors, options: Options) -> Tensors:
        return {name: x for name, x in self.base.saved(tensors, options).items() if name != "v"}

    def gradient(self, call: Call, saved: Tensors, grads: Tensors, options: Options) -> Tensors:
        found: Tensors = {}
        own: Tensors = {name: grads[name] for name in ("q", "k") if name in grads}
        if own and self.norm:
            found = self.base.gradient(call, saved, own, changed(options, ulysses_degree=1))
        elif own:
            with_v = {"v": grads["v"]} if "v" in grads and len(own) == 2 else {}
            found = rotated_back(self, call, saved, {**own, **with_v}, options)
        if "v" in grads and "v" not in found:
            found["v"] = joined(grads["v"], options.layout)
        return found


def joins_k(v: Tensor, k: Tensor | None, cos: Tensor | None = None) -> bool:
    """Whether a kernel can store heads of v as it stores those of k."""
    shared = cos is None or not per_head(cos)
    return shared and k is not None and v.shape == k.shape and v.dtype == k.dtype


def refuse_other_v(name: str, tensors: Tensors, options: Options) -> None:
    """Refuse to convert a v that does not join k."""
    why = "quantize has v=True" if options.dynamic_v else "v_scale is given"
    if "k" not in tensors:
        refuse(name, "k", None, f"a tensor, because {why}")
    if joins_k(tensors["v"], tensors["k"]):
        beside = "a norm across heads" if norm_of(options).across_heads else "tables for each head"
        raise InvalidInput(f"{name}: v cannot be converted beside {beside}, but {why}; convert v in a call as q")
    refuse(name, "v", tensors["v"], f"like k, because {why}")


def copy_heads(out: Tensor, x: Tensor) -> None:
    """Copy x to out, 16 bytes at a time if possible: torch's copy between layouts takes its time for each element."""
    both = [out, x]
    if out.dtype == x.dtype and not any(y.data_ptr() % 16 for y in both):
        with suppress(RuntimeError):  # 16 bytes are not always neighbours
            both = [y.view(torch.complex128) for y in both]
    both[0].copy_(both[1])


def items_of_out(into: Operation, out: Any, letters: Collection[str]) -> Tensors:
    """The tensors of the word `out` by letter, without those that are None."""
    items = dict(zip(letters, parts(into.function, "out", out, len(letters))))
    for letter, x in items.items():
        if x is not None and f"{letter}_out" not in into.labels:
            refuse(into.function, f"out's {letter}", x, f"None, because {letter} goes to the cache")
    return {letter: x for letter, x in items.items() if x is not None}


def given_out(
    op: Operation, asked: dict[str, Any], heads: Mapping[str, Any], tensors: Tensors, source: Any = None
) -> Tensors:
    """Move the output tensors of a call with `out` from its words to its tensors, and return them by name.

    heads: q, k and perhaps v, in the order of `out`. For q and k an item that is None is replaced by a fresh tensor.
    source: the user's v, if v is a normalised copy of it.
    """
    out = asked.pop("out", None)
    if out is None:
        return {}
    name = op.function
    results = items_of_out(op.into, out, heads)
    for letter, x in results.items():
        if heads[letter] is None:
            refuse(name, f"out's {letter}", x, f"None, because {letter} is None")
    if not results:
        return {}
    if "v" in results:
        tensors["v"] = heads["v"]
    like = {letter: heads[letter] for letter in heads if letter in op.results and letter not in results}
    like = {letter: x for letter, x in like.items() if is_dense(x)}
    if like:
        made = op.fresh(like, Options(out_dtype=asked.get("out_dtype", "fp8")), 0)
        results.update({letter: made[letter] for letter in like})
    tensors.update({f"{letter}_out": x for letter, x in results.items()})
    if source is not heads.get("v"):
        require_apart(name, {f"out's {letter}": x for letter, x in results.items()}, {"v": source})
    return results


def is_dense(x: Any) -> bool:
    """Whether x is a strided tensor with an axis."""
    return isinstance(x, Tensor) and x.layout is torch.strided and not (x.is_nested or x.is_quantized) and x.dim() > 0
