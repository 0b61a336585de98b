"""DeepSpeed: rope of `deepspeed.sequence` (Ulysses and FPDT attention).

>>> from jitrope.integrations import deepspeed as jitrope_deepspeed
>>> report = jitrope_deepspeed.enable()
>>> jitrope_deepspeed.disable()
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..api import apply_rope
from . import _host


def apply_rotary_pos_emb(t: Tensor, freqs_cos: Tensor, freqs_sin: Tensor) -> Tensor:
    """Rotate the first W elements of each head, halves, by tables that broadcast to t, like DeepSpeed's own.

    >>> cos, sin = jitrope.tables.cos_sin(16, jitrope.tables.inv_freq(rotary_dim=64)[0], width="full")
    >>> t = jitrope_deepspeed.apply_rotary_pos_emb(torch.randn(16, 1, 8, 64), cos[:, None, None], sin[:, None, None])

    Args:
        t: (..., D), at most four axes, [S, B, H, D], [B, S, H, D] or any other order; any strides. It is copied only
            if the tables promote its dtype.
        freqs_cos, freqs_sin: (..., W), W <= D even, broadcastable to t's other axes.

    Returns:
        t rotated in fp32, rounded to the dtype that t and the tables promote to; errors as in `jitrope.apply_rope`.
    """
    return _rotate(t, freqs_cos, freqs_sin)


def apply_rotary_pos_emb_backward(grad_output: Tensor, freqs_cos: Tensor, freqs_sin: Tensor) -> Tensor:
    """The gradient of `apply_rotary_pos_emb` with respect to t, for FPDT's attention.

    grad_output and the result are (..., D), of t's shape; the tables and errors are those of `apply_rotary_pos_emb`.

    >>> cos, sin = jitrope.tables.cos_sin(16, jitrope.tables.inv_freq(rotary_dim=64)[0], width="full")
    >>> grad, cos, sin = torch.randn(16, 1, 8, 64), cos[:, None, None], sin[:, None, None]
    >>> grad = jitrope_deepspeed.apply_rotary_pos_emb_backward(grad, cos, sin)
    """
    return _rotate(grad_output, freqs_cos, freqs_sin, inverse=True)


def _rotate(t: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    cos, sin = _host.broadcast((*t.shape[:-1], *cos.shape[-1:]), cos, sin)
    axis = next((axis for axis in range(3) if cos.shape[axis] > 1), 0)  # of positions; the others are batch and heads
    x = _host.padded(t.to(torch.promote_types(t.dtype, cos.dtype))).transpose(1, axis)
    cos, sin = (table.transpose(1, axis).expand(-1, x.shape[1], -1, -1) for table in (cos, sin))
    out, _ = apply_rope(x, None, cos, sin, rotary_dim=cos.shape[-1], inverse=inverse)
    return out.transpose(1, axis).reshape(t.shape)


def enable() -> _host.Report:
    """Replace DeepSpeed's rope in every module that holds it. Raises ImportError without DeepSpeed."""
    functions = _host.named("deepspeed.sequence.layer", apply_rotary_pos_emb)
    functions |= _host.named("deepspeed.sequence.fpdt_layer", apply_rotary_pos_emb_backward)
    return _host.enable("deepspeed", functions)


disable = _host.disabler(__name__)
