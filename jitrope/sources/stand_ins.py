"""Weights that a kernel needs and a call does not give, and the memory of their gradients."""

from __future__ import annotations

import torch

from ..base.layouts import LAYOUT_AXES
from ..base.views import Tensors, shaped_parts
from ..plan.options import Options
from ..values.constants import counters, filled


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


def missing_weights(tensors: Tensors, options: Options) -> Tensors:
    """Factors of one and biases of zero for missing ones if some are given, because a kernel takes all or none."""
    made = {}
    given = [name for name in tensors if name.endswith(("_weight", "_bias"))]
    biased = any(name.endswith("_bias") for name in given)
    if "qkv" in tensors:
        tensors = {**tensors, **shaped_parts(tensors["qkv"], options)}
    heads = {"q": "q", "k": "k", "first_q": "q", "first_k": "k", "second_q": "second_q", "second_k": "second_k"}
    for head, owner in heads.items() if given else ():
        x = tensors.get(head)
        for ending, value in (("_weight", 0 if options.zero_centered else 1), *([("_bias", 0)] if biased else [])):
            if x is not None and owner + ending not in tensors:
                count = x.shape[-1] * (x.shape[LAYOUT_AXES[options.layout][2]] if options.across_heads else 1)
                made[owner + ending] = filled(x.device, count, tensors[given[0]].dtype, value)
    return made
