"""Results for the all-to-all of Ulysses: a group of heads for each rank, one after the other."""

from __future__ import annotations

from collections.abc import Container

import torch

from ..plan.options import LAYOUT_AXES, Options, changed
from ..plan.views import FORMATS, Tensors, by_rank, converts_v, joined
from .fit import check_axes, check_ranks, failing
from .formats import empty_scale
from .into import Into, copy_heads, layout_of, refuse_other_v, stored_v
from .operation import Call, Operation, rotated_back


class ByRank(Into):
    """An operation whose results q, k and v are (ranks, ..., H / ranks, D), fresh.

    Given tensors in that layout, as gradients are, it returns them in the usual one; so a rotation is its own backward.
    """

    def __init__(self, base: Operation) -> None:
        super().__init__(base)
        self.name, self.stage = base.name + "_by_rank", " with ".join([x for x in (base.stage, "Ulysses") if x])
        self.tensors, self.options = (*base.tensors, "v?"), (*base.options, "ulysses_degree")
        self.words = (*self.words, "ulysses_degree")
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

    def reference(self, tensors: Tensors, options: Options) -> Tensors:
        """The results in plain torch."""
        layout, ranks = options.layout, options.ulysses_degree
        usual = {name: joined(x, layout) if name in ("q", "k", "v") else x for name, x in tensors.items()}
        of_v, options = stored_v(usual, options) if "v" in usual else ({}, options)
        results = {**usual, **of_v, **self.base.reference(usual, options)}
        made = {name: results[name] for name in self.made(tensors, options)}
        if tensors["q"].dim() == len(layout):
            made = {name: by_rank(x, layout_of(name, options), ranks) for name, x in made.items()}
        return {name: x.clone(memory_format=torch.contiguous_format) for name, x in made.items()}  # v may be a view

    def on_cpu(self, tensors: Tensors, options: Options) -> Tensors:
        return Operation.on_cpu(self, tensors, options)

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
