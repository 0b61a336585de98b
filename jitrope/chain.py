"""A call in plain torch: the CPU path, the gradient without a kernel, and the oracle of the tests.

load -> bias -> norm -> rotate -> scale -> transform -> convert -> store; a source adds the bias as it loads. Heads are
(batch, seq, heads, head_dim) here, in fp32 from the first stage on, and are rounded once, as they are stored. Only a
norm rounds its result as its own word says, and with rounding="dtype" heads are rounded to their dtype each time that
something behind the rotation reads them, as by a host that stores them in between.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .base.views import Tensors, canonical, joined
from .plan.options import Options
from .sinks import cache, results
from .sinks.results import LETTERS
from .stages import BEHIND, convert, norm, positions, rotate, scale, transform


def run(parts: Sequence[tuple[Tensors, Options]], places: Tensors, o: Options) -> None:
    """Write the heads of a call, and the scales that it computes, to their places (`results.places`) and caches.

    parts: of each stream, its heads by letter beside its other tensors, and its options.
    """
    t = parts[0][0]
    spare = positions.spare(load("q", t, o).shape[1], t, o) if o.inplace and "cu_seqlens" in t else None
    tokens = sum([math.prod(load("q", *part).shape[:2]) for part in parts]) if "k_cache" in t else 0
    slots = cache.slots(t, o, tokens, spare) if "k_cache" in t else None
    for letter in LETTERS:
        own = f"{letter}_scale"
        if f"{letter}_cache" not in t and places.keys().isdisjoint((letter, own)):
            continue
        y = forward(letter, load(letter, *parts[0]), *parts[0])
        if len(parts) > 1:
            y = torch.cat([y, *[forward(letter, load(letter, *part), *part) for part in parts[1:]]], 1)
        if o.per_row:
            places[own].copy_(convert.row_scales(y, t, o))
            continue
        if slots is not None and f"{letter}_cache" in t:
            cache.store(letter, y, t, o, *slots)
        elif own in places:
            y, scales = convert.scaled(letter, y, t, o)
            results.put(places[own], results.tiles(scales) if o.swizzled else scales)
        elif own in t:
            y = convert.forward(letter, y, t, o)
        if letter in places:
            if spare is not None:  # in place they stay
                y = torch.where(spare[:, None, None], load(letter, t, o), y)
            results.put(places[letter], y)


def load(letter: str, t: Tensors, o: Options) -> Tensor:
    """The heads of a letter, also from a group of heads for each rank."""
    x = t[letter]
    return canonical(x if x.dim() == len(o.layout) else joined(x, o.layout), o.layout)


def forward(letter: str, x: Tensor, t: Tensors, o: Options) -> Tensor:
    """Heads as they are converted and stored. Those of q and k after the last sequence are zero."""
    stored = t[letter].dtype if o.rounding == "dtype" else None
    after = o.norm_kind and norm.after_rope(letter, o)
    if o.norm_kind and not after:
        x = norm.forward(letter, x, t, o)
    x = rotate.forward(letter, x, t, o)
    if after:
        x = norm.forward(letter, x if stored is None else x.to(stored), t, o)
    x = rotate.paired(letter, x, o)
    for label, stage in BEHIND.items():
        if label in t or getattr(o, label, False):
            x = stage.forward(letter, x if stored is None else x.to(stored), t, o)
    x = x if stored is None else x.to(stored)
    return positions.cleared(letter, x, t, o) if "cu_seqlens" in t else x


def back(t: Tensors, places: Tensors, o: Options) -> None:
    """Write the gradients of q, k, v, weights and biases to their places. Those of results are dq, dk and dv in `t`.

    They are in fp32 until they are stored. `o` are the options of the call, whose roundings do not change gradients.
    """
    found: Tensors = {}
    o = o._replace(rounding="fp32")
    turned = o._replace(inverse=not o.inverse)
    for letter in [letter for letter in LETTERS if letter in places]:
        x, after = load(letter, t, o), norm.after_rope(letter, o)
        x = rotate.forward(letter, x, t, o) if after else x
        grad = canonical(joined(t[f"d{letter}"], o.layout), o.layout)
        grad = rotate.paired(letter, transform.back(letter, grad, t, o), o, back=True)
        for stage in (scale, norm, rotate) if after else (rotate, scale, norm):
            grad = norm.back(letter, x, grad, t, o, found) if stage is norm else stage.forward(letter, grad, t, turned)
        results.put(places[letter], positions.cleared(letter, grad, t, o))
    for name, x in found.items():
        places[name].copy_(x)
