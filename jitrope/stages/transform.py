"""Transform of q and k: y = x H / sqrt(head_dim), with the Hadamard matrix H in Sylvester's order.

Source: arXiv:2404.00456.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..plan.options import Options
from ..plan.views import Tensors
from .positions import TURNED


def forward(letter: str, x: Tensor, t: Tensors, o: Options) -> Tensor:
    """Heads times the matrix, in fp32. The order of sums is the kernel's."""
    if not o.hadamard or letter not in TURNED:
        return x
    x, bits = x.float(), x.shape[-1].bit_length() - 1
    for bit in range(bits):
        pairs = x.unflatten(-1, (-1, 2, 1 << bit))
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((a + b, a - b), -2).flatten(-3)
    return x * (0.5 ** (bits // 2) * (0.5**0.5 if bits % 2 else 1))


def back(letter: str, x: Tensor, grad: Tensor, t: Tensors, o: Options, found: Tensors) -> Tensor:
    """The same: the matrix is its own transpose."""
    return forward(letter, grad, t, o)
