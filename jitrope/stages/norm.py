"""Norm of q, k and v: y = x / sqrt(mean(x^2) + eps) weight + bias, over each head or all heads of a token.

Sources: RMSNorm, arXiv:1910.07467; with kind="layer_norm" the mean of x is subtracted first, arXiv:1607.06450.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..plan.options import NormOptions, Options, norm_of
from ..plan.views import MEANS, Tensors, canonical, factor_view
from .positions import cleared


def forward(letter: str, x: Tensor, t: Tensors, o: Options) -> Tensor:
    """Heads, normalised with the mean in fp32.

    The result is in fp32 with the rounding "none", else in the dtype of the call's heads: "once" has the bits of
    torch.nn.RMSNorm and LayerNorm, "twice" those of the RMSNorm of transformers and diffusers.
    """
    norm = norm_of(o)
    if o.norm is None or not norm.takes(letter):
        return x
    across, one = _places(letter, norm)
    weight, bias, mean_square = [t.get(f"{letter}_{kind}") for kind in ("weight", "bias", "mean_square")]
    rows = x if norm.rounding == "none" else x.to(t[letter].dtype)
    rows = rows.flatten(-2) if across else rows
    same = {p.dtype for p in (weight, bias) if p is not None} <= {rows.dtype}
    plain = same and mean_square is None and not one
    if norm.rounding == "once" and plain and norm.kind == "layer_norm":
        y = torch.nn.functional.layer_norm(rows, rows.shape[-1:], weight, bias, norm.eps)
    elif norm.rounding == "once" and plain:
        y = torch.nn.functional.rms_norm(rows, rows.shape[-1:], weight, norm.eps)
    else:
        y, scale = _centred(rows.float(), norm, mean_square)
        y = y * scale
        if norm.rounding == "twice":
            y = y.to(rows.dtype)
        if weight is not None:
            y = y * (weight.float() + one)
        if bias is not None:
            y = y + bias.float()
        if norm.rounding != "none":
            y = y.to(rows.dtype)
    return torch.empty_like(x, dtype=y.dtype).copy_(y.view(x.shape)) if across else y


def back(letter: str, x: Tensor, grad: Tensor, t: Tensors, o: Options, found: Tensors) -> Tensor:
    """The gradient of x, in fp32, and those of its weight and bias. Roundings do not change them."""
    norm = norm_of(o)
    across, one = _places(letter, norm)
    weight, bias, mean_square = [t.get(f"{letter}_{kind}") for kind in ("weight", "bias", "mean_square")]
    if not norm.takes(letter):
        return grad
    rows, g = (y.float().flatten(-2) if across else y.float() for y in (x, grad))
    rows, scale = _centred(rows, norm, mean_square)
    y, g = (cleared(letter, part, t, o) for part in (rows * scale, g))
    tokens = tuple(range(g.dim() - 1))
    if bias is not None:
        found[f"{letter}_bias"] = g.sum(tokens)
    if weight is not None:
        found[f"{letter}_weight"] = (g * y).sum(tokens)
        g = g * (weight.float() + one)
    if mean_square is not None:
        return (scale * g).view(x.shape)
    centre = g.mean(-1, keepdim=True) if norm.kind == "layer_norm" else 0
    return (scale * (g - y * (g * y).mean(-1, keepdim=True) - centre)).view(x.shape)


def after_rope(letter: str, o: Options) -> bool:
    """Whether heads are rotated before they are normalised."""
    return norm_of(o).after_rope and norm_of(o).takes(letter)


def _places(letter: str, norm: NormOptions) -> tuple[bool, bool]:
    """Whether all heads of a token share a mean; whether one is added to the weight. A v beside q and k has neither."""
    own = letter != "v" or norm.of == "v"
    return (norm.across_heads or norm.of == "v") and own, norm.zero_centered and own


def _centred(rows: Tensor, norm: NormOptions, mean_square: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rows in fp32, less their mean with "layer_norm", and 1 / sqrt(mean of their squares + eps)."""
    rows = rows - rows.mean(-1, keepdim=True) if norm.kind == "layer_norm" else rows
    mean = rows.pow(2).mean(-1, keepdim=True) if mean_square is None else factor_view(mean_square)[..., 0, 0]
    return rows, torch.rsqrt(mean + norm.eps)


def gradients_of_means(t: Tensors, xs: Tensors, grads: Tensors, o: Options) -> Tensors:
    """The gradients of a call's given means that require one. xs, grads: q and k, and their other gradients.

    1 / sqrt(mean + eps) is a factor of x, so it is the sum of dx x over a token's heads, times -1/2 / (mean + eps).
    Elements without a gradient may be anything.
    """
    found = {}
    for name in [name for name in MEANS if name in t and t[name].requires_grad and name[0] in grads]:
        mean, x, dx = t[name], xs[name[0]], grads[name[0]]
        total = canonical(torch.where(dx == 0, 0, dx.float() * x.float()), o.layout).sum((-2, -1)).view(mean.shape)
        found[name] = torch.where(total == 0, 0, total * (-0.5 / (mean + norm_of(o).eps)))
    return found
