"""Transform of q and k: y = x H / sqrt(head_dim), with the Hadamard matrix H in Sylvester's order.

Source: arXiv:2404.00456.
"""

from __future__ import annotations

from dataclasses import field

import torch
from torch import Tensor

from ..base import layouts
from ..base.fit import Fail
from ..base.spec import OF_NORM
from ..base.views import Tensors
from .positions import TURNED

MAX_DIM = 256
LABEL = "hadamard"


class Words(layouts.Words):
    hadamard: bool = False


class Fields:
    """Constants of a kernel."""

    hadamard: bool = field(metadata=OF_NORM)  # heads of q and k are transformed before they are stored

    @property
    def transforms(self) -> bool:
        """Whether threads of a head exchange its elements behind the rotation."""
        return self.hadamard


def check(t: Tensors, o: Words, fail: Fail) -> None:
    """Refuse heads of another size, and those whose rotated elements are stored apart: it mixes all of them."""
    dim = t["q"].shape[-1]
    if o.hadamard and (dim > MAX_DIM or dim & (dim - 1)):
        fail(f"hadamard goes with a power of two of elements up to {MAX_DIM}; {fail.main} has D={dim}, so leave it out")
    mixed = "hadamard does not go with k_pe_cache, because it mixes its elements with those of k_cache; leave it out"
    fail.when(o.hadamard and "k_pe_cache" in t, mixed)


def forward(letter: str, x: Tensor, t: Tensors, o: Words) -> Tensor:
    """Heads times the matrix, its own transpose, in fp32. The order of sums is the kernel's."""
    if not o.hadamard or letter not in TURNED:
        return x
    x, bits = x.float(), x.shape[-1].bit_length() - 1
    for bit in range(bits):
        pairs = x.unflatten(-1, (-1, 2, 1 << bit))
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((a + b, a - b), -2).flatten(-3)
    return x * (0.5 ** (bits // 2) * (0.5**0.5 if bits % 2 else 1))


back = forward
