"""DeepSpeed: rope of `deepspeed.sequence` (Ulysses and FPDT attention).

>>> from jitrope.integrations import deepspeed as jitrope_deepspeed
>>> report = jitrope_deepspeed.enable()                        # until jitrope_deepspeed.disable()
>>> y = jitrope_deepspeed.apply_rotary_pos_emb(t, cos, sin)    # or the plain function
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..api import apply_rope
from ..base.spec import DTYPES
from ..plan.problem import DTYPE_NAMES
from ..plan.spec import MAX_HEAD_DIM
from ._patch import Patch


def apply_rotary_pos_emb(t: Tensor, freqs_cos: Tensor, freqs_sin: Tensor) -> Tensor:
    """Rotate the first W elements of each head, halves, by tables that broadcast to t, as DeepSpeed's own.

    Args:
        t: (..., D): [S, B, H, D], [B, S, H, D] or any other order, any strides. Nothing is copied, but of
            more axes than four those that are merged and lie apart, and t where the tables promote it.
        freqs_cos, freqs_sin: (..., W), W <= D even, broadcastable to t's other axes.

    Returns:
        t rotated, in fp32 arithmetic rounded once, in the dtype that t and the tables promote to.
        What the kernels do not take (fp64, say) is computed in plain torch, whose errors those are.
    """
    return _apply(t, freqs_cos, freqs_sin, inverse=False)


def apply_rotary_pos_emb_backward(grad_output: Tensor, freqs_cos: Tensor, freqs_sin: Tensor) -> Tensor:
    """The gradient of `apply_rotary_pos_emb` with regard to t, as FPDT's attention asks for it.

    grad_output and the result are (..., D), of t's shape; the tables and errors are those of `apply_rotary_pos_emb`.
    """
    return _apply(grad_output, freqs_cos, freqs_sin, inverse=True)


def _apply(t: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    lead = t.dim() - 1
    width = cos.shape[-1]
    dtype = t.dtype if t.dtype == cos.dtype else torch.promote_types(t.dtype, cos.dtype)
    takes = (
        DTYPE_NAMES.get(dtype) in DTYPES and cos.dtype == sin.dtype and cos.shape == sin.shape and cos.dim() <= lead + 1
        and all(n in (1, size) for n, size in zip(cos.shape[-2::-1], t.shape[-2::-1]))
        and width % 2 == 0 and 0 < width <= t.shape[-1] <= MAX_HEAD_DIM and t.numel() > 0 and lead > 0
        and not (torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad))
    )  # fmt: skip
    if not takes:
        _patch.count("host")
        return _in_torch(t, cos, sin, inverse)
    _patch.count("jitrope")
    if t.dtype != dtype:
        t = t.to(dtype)
    shape = t.shape
    padding = (1,) * (lead + 1 - cos.dim())
    tables = [table.reshape(padding + table.shape) if padding else table for table in (cos, sin)]
    if lead > 3:  # neighbours along which the tables do the same become one axis
        t, tables = _merged(t, tables)
        lead = t.dim() - 1
    position = next((axis for axis in range(lead) if tables[0].shape[axis] > 1), 0)
    order = [*(axis for axis in range(lead) if axis != position)]
    while len(order) < 2:  # an axis of size 1 for each that is missing
        order.append(t.dim() - 1)
        t, tables = t.unsqueeze(-2), [table.unsqueeze(-2) for table in tables]
    axes = (order[0], position, order[1], -1)  # batch, position, head
    tables = [table.permute(axes) for table in tables]
    if tables[0].shape[1] == 1 and t.shape[position] > 1:  # one angle for all positions
        tables = [table.expand(-1, t.shape[position], -1, -1) for table in tables]
    out, _ = apply_rope(t.permute(axes), None, *tables, rotary_dim=width, inverse=inverse)
    inverted = sorted(range(4), key=lambda i: axes[i] % 4)
    return out.permute(inverted).reshape(shape)


def _merged(t: Tensor, tables: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Neighbouring axes made one where the tables are of size 1 along both, or along neither."""
    runs: list[list[int]] = []
    for axis in range(t.dim() - 1):
        alike = runs and (tables[0].shape[runs[-1][0]] == 1) == (tables[0].shape[axis] == 1)
        if alike:
            runs[-1].append(axis)
        else:
            runs.append([axis])

    def merge(x: Tensor) -> Tensor:
        return x.reshape(*(math.prod(x.shape[axis] for axis in run) for run in runs), x.shape[-1])

    if len(runs) > 3:  # the tables alternate: all the angles are written out
        tables = [table.expand(*t.shape[:-1], -1) for table in tables]
        return t.flatten(0, -2), [table.flatten(0, -2) for table in tables]
    return merge(t), [merge(table) for table in tables]


def _in_torch(t: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    width = cos.shape[-1]
    turned, rest = t[..., :width], t[..., width:]
    if inverse:
        s0, s1 = (turned * sin).chunk(2, -1)
        y = turned * cos + torch.cat((s1, -s0), -1)
    else:
        x0, x1 = turned.chunk(2, -1)
        y = turned * cos + torch.cat((-x1, x0), -1) * sin
    return y if rest.shape[-1] == 0 else torch.cat((y, rest), -1)


_patch = Patch(
    "deepspeed",
    {
        "deepspeed.sequence.layer:apply_rotary_pos_emb": apply_rotary_pos_emb,
        "deepspeed.sequence.fpdt_layer:apply_rotary_pos_emb_backward": apply_rotary_pos_emb_backward,
    },
)


def enable() -> Patch:
    """Replace DeepSpeed's rope in every module that holds it; returns a report, which counts the calls.

    Raises:
        ImportError: DeepSpeed is not installed.
    """
    return _patch.enable()


def disable() -> None:
    """Undo `enable`."""
    _patch.disable()
