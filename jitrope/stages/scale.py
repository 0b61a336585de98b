"""Scale of q, a factor that is learned, or that grows with the context: y = x factor. Source: arXiv:2309.00071."""

from __future__ import annotations

from dataclasses import field

import torch
from torch import Tensor

from ..base import layouts
from ..base.fit import USERS_NAMES, Fail, sizes_of
from ..base.views import Tensors, factor_view

LABEL = "q_factor"
PLAIN = True  # the kernel of a plain rotation has it too
TENSORS = (LABEL,)
ARGUMENTS = {"scales_q": ("const float* q_factor", "Strides factor_stride: q_factor")}


class Fields:
    """Constants of a kernel."""

    scales_q: bool = field(metadata={"given": "q_factor"})


def check(t: Tensors, o: layouts.Words, fail: Fail) -> None:
    """Refuse a factor that does not fit q."""
    if "q_factor" in t:
        batch, seqlen, *_ = sizes_of(t["q"], o.layout)
        rows = [] if o.layout == "thd" else [((1, batch), seqlen)]
        fail.unlike(USERS_NAMES[LABEL], t[LABEL], t["q"].device, (torch.float32,), (), (seqlen,), *rows)


def forward(letter: str, x: Tensor, t: Tensors, o: layouts.Words) -> Tensor:
    """q times the number of its token, in fp32."""
    return x.float() * factor_view(t["q_factor"])[..., 0] if letter == "q" and "q_factor" in t else x


back = forward
