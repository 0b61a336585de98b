"""DeepSpeed: rope of `deepspeed.sequence` (Ulysses and FPDT attention).

>>> from jitrope.integrations import deepspeed as jitrope_deepspeed
>>> report = jitrope_deepspeed.enable()                        # until jitrope_deepspeed.disable()
>>> y = jitrope_deepspeed.apply_rotary_pos_emb(t, cos, sin)    # or the plain function
"""

from __future__ import annotations

import math
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from ..api import apply_rope
from ..base.errors import InvalidInput
from . import _host


def apply_rotary_pos_emb(t: Tensor, freqs_cos: Tensor, freqs_sin: Tensor) -> Tensor:
    """Rotate the first W elements of each head, halves, by tables that broadcast to t, like DeepSpeed's own.

    Args:
        t: (..., D): [S, B, H, D], [B, S, H, D] or any other order, any strides. It is copied only where the tables
            promote its dtype, or where more than three axes before D are merged and do not lie together.
        freqs_cos, freqs_sin: (..., W), W <= D even, broadcastable to t's other axes.

    Returns:
        t rotated, in fp32 arithmetic rounded once, in the dtype that t and the tables promote to. Calls that jitrope
        refuses (fp64, say) are computed in plain torch.

    Raises:
        RuntimeError: the shapes do not fit together in plain torch either.
        CompileError: the kernel could not be built.
    """
    return _host.take("deepspeed", _rotate, _host.in_torch, t, freqs_cos, freqs_sin)


def apply_rotary_pos_emb_backward(grad_output: Tensor, freqs_cos: Tensor, freqs_sin: Tensor) -> Tensor:
    """The gradient of `apply_rotary_pos_emb` with regard to t, as FPDT's attention asks for it.

    grad_output and the result are (..., D), of t's shape; the tables and errors are those of `apply_rotary_pos_emb`.
    """
    in_torch = partial(_host.in_torch, inverse=True)
    return _host.take("deepspeed", _rotate_back, in_torch, grad_output, freqs_cos, freqs_sin)


def _rotate(t: Tensor, freqs_cos: Tensor, freqs_sin: Tensor, inverse: bool = False) -> Tensor:
    cos, sin, lead = freqs_cos, freqs_sin, t.dim() - 1
    sizes = zip(cos.shape[-2::-1], t.shape[-2::-1])
    if cos.shape != sin.shape or not 0 < cos.dim() <= lead + 1 or lead < 1 or any(n not in (1, m) for n, m in sizes):
        raise InvalidInput(f"tables of shapes {tuple(cos.shape)} and {tuple(sin.shape)} for t {tuple(t.shape)}")
    t = t.to(torch.promote_types(t.dtype, cos.dtype))
    shape, width = t.shape, cos.shape[-1]
    cos, sin = (table.reshape((1,) * (lead + 1 - table.dim()) + table.shape) for table in (cos, sin))
    if lead > 3:
        t, cos, sin = _merged(t, cos, sin)
    while t.dim() < 4:
        t, cos, sin = (x.unsqueeze(-2) for x in (t, cos, sin))
    axis = next((axis for axis in range(3) if cos.shape[axis] > 1), 0)  # of positions; the others are batch and heads
    t, cos, sin = (x.transpose(1, axis) for x in (t, cos, sin))
    cos, sin = (table.expand(-1, t.shape[1], -1, -1) for table in (cos, sin))  # one angle for all positions
    out, _ = apply_rope(t, None, cos, sin, rotary_dim=width, inverse=inverse)
    return out.transpose(1, axis).reshape(shape)


_rotate_back = partial(_rotate, inverse=True)


def _merged(t: Tensor, *tables: Tensor) -> list[Tensor]:
    """t and the tables with fewer axes: neighbouring axes along which the tables broadcast alike become one."""
    runs = [list(axes) for _, axes in groupby(range(t.dim() - 1), key=lambda axis: tables[0].shape[axis] == 1)]
    if len(runs) > 3:  # the tables alternate: all the angles are written out
        tables = tuple(table.expand(*t.shape[:-1], -1) for table in tables)
        runs = [list(range(t.dim() - 1))]
    return [x.reshape(*(math.prod(x.shape[i] for i in run) for run in runs), x.shape[-1]) for x in (t, *tables)]


def enable() -> _host.Report:
    """Replace DeepSpeed's rope in every module that holds it. The report counts the calls.

    Raises:
        ImportError: DeepSpeed is not installed.
    """
    functions = {"layer:apply_rotary_pos_emb": _rotate, "fpdt_layer:apply_rotary_pos_emb_backward": _rotate_back}
    return _host.enable("deepspeed", {f"deepspeed.sequence.{where}": ours for where, ours in functions.items()})


def disable() -> None:
    """Undo `enable`."""
    _host.disable("deepspeed")
