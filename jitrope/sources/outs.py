"""Tensors of the caller for results, and the v that goes to one."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ..base.arguments import refuse
from ..base.errors import InvalidInput
from ..plan.options import Options, norm_of
from ..plan.views import Tensors, per_head

OUTS = {f"{letter}_out": f"out's {letter}" for letter in "qkv"}
"""The users' names of output tensors."""


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
    """Copy heads (batch, seq, group, head of the group, dim), which have groups in out, in x, or in both.

    It copies 16 bytes at a time if possible: torch's copy between layouts takes its time for each element.
    """
    pairs = ((out, x), (x, out))
    both = [y.squeeze(3).unflatten(2, other.shape[2:4]) if y.shape[3] == 1 else y for y, other in pairs]
    if out.dtype == x.dtype and not any(y.data_ptr() % 16 for y in both):
        with suppress(RuntimeError):  # 16 bytes are not always neighbours
            both = [y.view(torch.complex128) for y in both]
    both[0].copy_(both[1])


def is_dense(x: Any) -> bool:
    """Whether x is a strided tensor with an axis."""
    return isinstance(x, Tensor) and x.layout is torch.strided and not (x.is_nested or x.is_quantized) and x.dim() > 0
