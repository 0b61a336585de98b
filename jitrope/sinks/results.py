"""Results in tensors: fresh ones, the call's own in place, the caller's, and a group of heads for each rank.

A place is a view (batch, seq, group, head of the group, dim) of the heads of such a tensor, or of its scales.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..base.arguments import whole
from ..base.views import SCALES, Tensors, canonical, head_view
from ..stages import convert
from ..values.asked import Value

TENSORS = ("q_out", "k_out", "v_out")


class Ulysses(Value):
    """As `out=`: return q, k and v as (ranks, B, S, H / ranks, D), contiguous, the layout that Ulysses sends.

    Each rank's group of heads is in one piece, so `torch.distributed.all_to_all_single` takes the results as they are
    (arXiv:2309.14509). The gradient arrives in that layout. See `apply_rope` for buffers of your own in it.

    >>> q, k, v = torch.randn(3, 1, 16, 8, 64)
    >>> cos, sin = jitrope.tables.cos_sin(16, jitrope.tables.inv_freq(rotary_dim=64)[0])
    >>> q, k, v = jitrope.prepare_qkv(q, k, v, cos, sin, out=jitrope.Ulysses(4))
    >>> q.shape
    torch.Size([4, 1, 16, 2, 64])

    Args:
        ranks: the number of ranks; it must divide the numbers of heads. With "sbhd" and the other layouts the axis of
            ranks comes first too.

    Raises:
        InvalidInput: ranks is not a whole number of at least 1.
    """

    def __init__(self, ranks: int) -> None:
        self.tensors, self.words = {}, {"ulysses_degree": int(whole("Ulysses", "ranks", ranks, 1))}


class Words(convert.Words):
    ulysses_degree: int = 0  # ranks, each with a group of heads in the results
    inplace_grad: bool = False  # the gradient of a call in place overwrites that of its results


LETTERS = ("q", "k", "v", "gate")
TILE = (128, 4)  # tokens and groups of a tile of swizzled scales


def places(outputs: Tensors, o: Words) -> Tensors:
    """The places of results by name. Scales of rows, weights and biases are as they are."""
    found = dict(outputs)
    for name, x in outputs.items():
        if name in LETTERS:
            found[name] = head_view(x, o.layout)
        elif name.endswith("_scale") and not o.per_row:
            found[name] = head_view(x if o.group else x.unsqueeze(-1), "bhsd" if o.swizzled else o.layout)
    return found


def put(place: Tensor, y: Tensor) -> None:
    """Copy heads (batch, seq, heads, dim), or their scales, to their place."""
    y = y.unflatten(2, place.shape[2:4])
    place.copy_(y) if y.element_size() > 1 else indexed(place).copy_(indexed(y))


def indexed(x: Tensor) -> Tensor:
    """A tensor that torch can index and copy: fp8 and fp4 as bytes."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def empty_scale(x: Tensor, o: Words, per_item: int = 1) -> Tensor:
    """A tensor for the scales of x. Swizzled scales are padded with zeros to whole tiles.

    per_item: the elements of a head in an item of x.
    """
    if not o.swizzled:
        groups = (x.shape[-1] * per_item // o.group,) if o.group else ()
        return x.new_empty((*x.shape[:-1], *groups), dtype=SCALES.get(o.scale_out, torch.float32))
    ranks = x.shape[: x.dim() - len(o.layout)]  # with a group of heads for each
    batch, tokens, heads, dim = canonical(x[0] if ranks else x, o.layout).shape
    dim *= per_item
    rows, columns = -(-tokens // TILE[0]) * TILE[0], -(-dim // (o.group * TILE[1])) * TILE[1]
    whole = type(tokens) is int and (tokens, dim // o.group) == (rows, columns)  # every byte is written
    made = (x.new_empty if whole else x.new_zeros)((*ranks, batch, heads, rows, columns), dtype=torch.uint8)
    return made.view(SCALES[o.scale_out])


def tiles(scales: Tensor) -> Tensor:
    """Scales of groups, swizzled: tiles of 128 tokens and 4 groups, one after the other along the groups.

    In a tile those of tokens 0, 32, 64 and 96 are neighbours, then come 1, 33, 65, 97 and so on. Source: NVIDIA's
    documentation of cuBLAS, "1D Block Scaling Factors Layout".
    """
    by_head = scales.transpose(1, 2).view(torch.uint8)
    tokens, groups = by_head.shape[2:]
    padded = torch.nn.functional.pad(by_head, (0, -groups % TILE[1], 0, -tokens % TILE[0]))
    found: Tensor = padded.unflatten(3, (-1, TILE[1])).unflatten(2, (-1, 4, TILE[0] // 4))
    return found.permute(0, 1, 2, 5, 4, 3, 6).reshape(padded.shape).transpose(1, 2).view(scales.dtype)
