"""Scale of q, a word of attention that is learned or grows with the context: y = x factor. Source: arXiv:2309.00071."""

from __future__ import annotations

from torch import Tensor

from ..plan.options import Options
from ..plan.views import Tensors, factor_view


def forward(letter: str, x: Tensor, t: Tensors, o: Options) -> Tensor:
    """q times the number of its token, in fp32."""
    return x.float() * factor_view(t["q_factor"])[..., 0] if letter == "q" and "q_factor" in t else x


def back(letter: str, x: Tensor, grad: Tensor, t: Tensors, o: Options, found: Tensors) -> Tensor:
    return forward(letter, grad, t, o)
