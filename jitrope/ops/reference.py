"""Every operation in plain torch: the oracle of the tests, and the implementation for CPU tensors.

A function takes the tensors of a call by name, and its options. The results are fresh tensors by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import NamedTuple

import torch
from torch import Tensor

from ..plan import views
from ..plan.options import NormOptions, Options, changed, norm_of, rotated
from ..plan.problem import DTYPE_NAMES
from ..plan.views import FP8S, Tensors, canonical, joined, table_pair, table_view
from .formats import divided, empty_elements, given_scale, row_scales, scaled_elements, stored_scale, with_hadamard
from .pages import indexed, put, slots_of, store_in_pages
from .rows import POSITIONS, gathered, table_rows


def _scales_q(turn: Callable[..., Tensors]) -> Callable[..., Tensors]:
    """Multiply q by its scale in fp32 before it is rounded; with "dtype" it is also rounded before the product."""

    @wraps(turn)
    def turn_and_scale(t: Tensors, o: Options, out_dtype: torch.dtype | None = None) -> Tensors:
        out = turn(t, o, out_dtype)
        if "q_factor" in t:
            exact = turn(t, o, t["q"].dtype if o.rounding == "dtype" else torch.float32)["q"]
            y = canonical(exact, o.layout).float() * views.factor_view(t["q_factor"])[..., 0]
            spare = table_rows(y.shape[1], y.device, t, o)[1]
            view = canonical(out["q"], o.layout)
            view.copy_(y if spare is None else torch.where(spare[:, None, None], 0, y))
        return out

    return turn_and_scale


@_scales_q
def rope(t: Tensors, o: Options, out_dtype: torch.dtype | None = None) -> Tensors:
    """Rotate q and k."""
    return {name: rotate(t[name], t, o, out_dtype) for name in ("q", "k") if name in t}


def rotate(
    x: Tensor,
    t: Tensors,
    o: Options,
    out_dtype: torch.dtype | None = None,
    storage: torch.dtype | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Rotate x: y0 = x0 cos - x1 sin, y1 = x1 cos + x0 sin, rounded as in `o.rounding`.

    Products and the sum are rounded separately, as in torch's real multiplies; complex multiplies and the fused product
    of "addcmul" are torch's own. storage: the dtype that "dtype" rounds to; default: x's.
    """
    rounded_to = (storage or x.dtype) if o.rounding == "dtype" and compute_dtype == torch.float32 else None
    if o.rounding == "complex128":
        compute_dtype = torch.float64
    out = torch.empty_like(x, dtype=out_dtype or x.dtype)
    view = canonical(out, o.layout)
    cos, sin, still, spare = turns(view.shape[1], t, o, compute_dtype, rounded_to)
    heads = canonical(x, o.layout).to(compute_dtype)
    if spare is not None:  # they may hold NaN, which must not reach the gradients of the tables
        heads = heads.masked_fill(spare[:, None, None], 0)
    y = _rotate(heads, cos, sin, o)
    y = y if still is None else torch.where(still, heads, y)
    view.copy_(y.float() if o.rounding == "complex128" else y)
    if spare is not None:
        view[:, spare] = 0
    return out


class Turns(NamedTuple):
    """Cosines and sines of each token, (batch or 1, seq, head or 1, width); masks of tokens that are not rotated and
    of those after the last sequence, or None."""

    cos: Tensor
    sin: Tensor
    still: Tensor | None
    spare: Tensor | None


def turns(
    tokens: int,
    t: Tensors,
    o: Options,
    compute_dtype: torch.dtype = torch.float32,
    rounded_to: torch.dtype | None = None,
) -> Turns:
    """The cosines and sines of `tokens` tokens of a batch row, if rounded_to is given rounded to it."""
    cos, sin = (table_view(table).to(compute_dtype) for table in table_pair(t["cos"], t.get("sin"), o.table))
    if o.table == "freqs":
        cos, sin = cos.cos() * o.mscale, sin.sin() * o.mscale
    if rounded_to is not None:
        cos, sin = cos.to(rounded_to), sin.to(rounded_to)
    sin = _transposed(sin, o) if o.inverse else sin
    if o.cp_size == 1 and not o.unrotated and POSITIONS.isdisjoint(t):
        return Turns(cos[:, :tokens], sin[:, :tokens], None, None)
    rows, spare = table_rows(tokens, cos.device, t, o)
    below = (rows[0] < 0)[..., None, None]
    rows = rows.clamp(min=0) if o.unrotated else rows.abs() if o.shifts else rows
    cos, sin = gathered(cos, rows, o), gathered(sin, rows, o)
    sin = torch.where(below, _transposed(sin, o), sin) if o.shifts else sin
    return Turns(cos, sin, below if o.unrotated else None, spare)


def _cleared(x: Tensor, t: Tensors, o: Options) -> Tensor:
    """x, in which tokens after the last sequence become zero."""
    view = canonical(x, o.layout)
    spare = table_rows(view.shape[1], x.device, t, o)[1]
    if spare is not None:
        view[:, spare] = 0
    return x


# ---- the rotation ----------------------------------------------------------------------------------


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, o: Options) -> Tensor:
    """Rotate x (batch, seq, head, head_dim). The tables broadcast to it, except in the last axis."""
    first, end = rotated(o)
    x0, x1 = _members(x[..., first:end], o.interleaved)
    full = cos.shape[-1] == o.rotary_dim
    cos0, cos1 = _members(cos, o.interleaved) if full else (cos, cos)
    sin0, sin1 = _members(sin, o.interleaved) if full else (sin, sin)
    if o.rounding.startswith("complex") and not full:  # torch's, which may round a row's last pairs otherwise
        turned = torch.complex(x0, x1) * torch.complex(cos0, sin0)
        y0, y1 = turned.real, turned.imag
    else:
        y0 = _sum_of_products(x0, cos0, x1, -sin0, o.rounding)
        y1 = _sum_of_products(x1, cos1, x0, sin1, o.rounding)
    return torch.cat((x[..., :first], _paired(y0, y1, o.interleaved_out), x[..., end:]), -1)


def _reordered(x: Tensor, interleaved: bool, o: Options) -> Tensor:
    """Heads with interleaved pairs or halves, as `interleaved` says, with those of the output."""
    first, end = rotated(o)
    y = _paired(*_members(x[..., first:end], interleaved), o.interleaved_out)
    return torch.empty_like(x).copy_(torch.cat((x[..., :first], y, x[..., end:]), -1))


def _transposed(sin: Tensor, o: Options) -> Tensor:
    """The sines of the rotation back: negated, each at the partner."""
    if sin.shape[-1] != o.rotary_dim:
        return -sin
    sin0, sin1 = _members(sin, o.interleaved)
    return _paired(-sin1, -sin0, o.interleaved)


def _sum_of_products(a: Tensor, b: Tensor, c: Tensor, d: Tensor, rounding: str) -> Tensor:
    """a b + c d. With "dtype" each step is rounded to the dtype of the tables b and d."""
    if rounding == "addcmul":
        return torch.addcmul(a * b, c, d)
    if rounding == "dtype":
        return (a * b).to(b.dtype) + (c * d).to(b.dtype)
    return a * b + c * d


def _members(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The first and the second member of each pair along the last axis."""
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _paired(x0: Tensor, x1: Tensor, interleaved: bool) -> Tensor:
    """The inverse of `_members`."""
    return torch.stack((x0, x1), -1).flatten(-2) if interleaved else torch.cat((x0, x1), -1)


# ---- the norm -----------------------------------------------------------------


def normed(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    norm: NormOptions,
    layout: str,
    mean_square: Tensor | None = None,
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) times weight plus bias, over each head or all heads of a token; the mean in fp32.

    With "layer_norm" the mean of x is subtracted first. The result is in fp32 with norm.rounding "none", else in x's
    dtype: "once" has the bits of torch.nn.RMSNorm and LayerNorm, "twice" those of the RMSNorm of transformers and
    diffusers. mean_square: the given mean of x^2 of each token.
    """
    view = canonical(x, layout)
    rows = view.flatten(-2) if norm.across_heads else view
    layer = norm.kind == "layer_norm"
    plain = (
        mean_square is None and not norm.zero_centered and all(p is None or p.dtype == x.dtype for p in (weight, bias))
    )
    if norm.rounding == "once" and plain and layer:
        y = torch.nn.functional.layer_norm(rows, rows.shape[-1:], weight, bias, norm.eps)
    elif norm.rounding == "once" and plain:
        y = torch.nn.functional.rms_norm(rows, rows.shape[-1:], weight, norm.eps)
    else:
        y, scale = _centred(rows.float(), norm, mean_square)
        y = y * scale
        if norm.rounding == "twice":
            y = y.to(x.dtype)
        if weight is not None:
            y = y * (weight.float() + norm.zero_centered)
        if bias is not None:
            y = y + bias.float()
        if norm.rounding != "none":
            y = y.to(x.dtype)
    out = torch.empty_like(x, dtype=y.dtype)
    canonical(out, layout).copy_(y.view(view.shape))
    return out


def _centred(rows: Tensor, norm: NormOptions, mean_square: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rows in fp32, less their mean with "layer_norm", and 1 / sqrt(mean of their squares + eps)."""
    rows = rows - rows.mean(-1, keepdim=True) if norm.kind == "layer_norm" else rows
    mean = rows.pow(2).mean(-1, keepdim=True) if mean_square is None else views.factor_view(mean_square)[..., 0, 0]
    return rows, torch.rsqrt(mean + norm.eps)


@_scales_q
def qk_norm_rope(t: Tensors, o: Options, out_dtype: torch.dtype | None = None) -> Tensors:
    """Normalise and rotate q and k, in the order of the norm."""
    norm, as_read = norm_of(o), changed(o, interleaved_out=o.interleaved)
    out: Tensors = {}
    for name in [name for name in ("q", "k") if name in t]:
        x, to = t[name], out_dtype or t[name].dtype
        own = t.get(f"{name}_weight"), t.get(f"{name}_bias"), norm, o.layout, t.get(f"{name}_mean_square")
        if not norm.takes(name):
            out[name] = rotate(x, t, o, out_dtype=to)
        elif norm.after_rope:
            exact = norm.rounding == "none" and o.rounding != "dtype"
            turned_x = rotate(x, t, as_read, out_dtype=torch.float32 if exact else x.dtype)
            out[name] = _cleared(_reordered(normed(turned_x, *own).to(to), o.interleaved, o), t, o)
        else:
            out[name] = rotate(normed(x, *own), t, o, out_dtype=to, storage=x.dtype)
    if norm.v_norm or (norm.of == "v" and "v" in t):
        out["v"] = normed_v(t["v"], norm, o.layout, t.get("v_weight")).to(out_dtype or t["v"].dtype)
    return out


def normed_v(v: Tensor, norm: NormOptions, layout: str, weight: Tensor | None = None) -> Tensor:
    """v, normalised without a weight; or v alone over all its heads."""
    alone = norm.of == "v"
    return normed(
        v, weight, None, norm._replace(across_heads=alone, zero_centered=alone and norm.zero_centered), layout
    )


def qk_norm_rope_backward(t: Tensors, o: Options) -> Tensors:
    """The gradients of q, k, a normalised v, weights and biases, in fp32, rounded once at the end; `o` rotates back."""
    norm, pairs, o = norm_of(o), o.interleaved_out, changed(o, interleaved_out=o.interleaved)
    out: Tensors = {}
    for name in [name for name in ("q", "k", "v")[: 2 + norm.v_norm] if name in t]:
        x, weight, bias, grad = t[name], t.get(f"{name}_weight"), t.get(f"{name}_bias"), joined(t[f"d{name}"], o.layout)
        turns, back = name != "v", changed(o, rounding="fp32")
        grad = _reordered(grad, pairs, o) if turns else grad
        after_rope = turns and norm.after_rope and norm.takes(name)
        if after_rope:
            x = rotate(x, t, changed(back, inverse=not o.inverse), out_dtype=torch.float32)
        elif turns:
            grad = rotate(grad, t, back, out_dtype=torch.float32)
        rows, g = canonical(x, o.layout).float(), canonical(grad, o.layout).float()
        if name == "q" and "q_factor" in t:
            g = g * views.factor_view(t["q_factor"])[..., 0]
        if norm.across_heads:
            rows, g = rows.flatten(-2), g.flatten(-2)
        layer, mean_square = norm.kind == "layer_norm", t.get(f"{name}_mean_square")
        rows, scale = _centred(rows, norm, mean_square)
        y = rows * scale
        spare = table_rows(y.shape[1], y.device, t, o)[1] if turns else None
        if spare is not None:
            y, g = (part.masked_fill(spare.view(-1, *[1] * (y.dim() - 2)), 0) for part in (y, g))
        if bias is not None:
            out[f"{name}_bias"] = g.sum(tuple(range(g.dim() - 1))).to(bias.dtype)
        if weight is not None:
            out[f"{name}_weight"] = (g * y).sum(tuple(range(g.dim() - 1))).to(weight.dtype)
            g = g * (weight.float() + norm.zero_centered)
        if mean_square is not None:
            g = scale * g
        elif norm.takes(name):
            g = scale * (g - y * (g * y).mean(-1, keepdim=True) - (g.mean(-1, keepdim=True) if layer else 0))
        dx = torch.empty_like(x, dtype=torch.float32)
        canonical(dx, o.layout).copy_(g.view(canonical(x, o.layout).shape))
        dx = rotate(dx, t, back, out_dtype=torch.float32) if after_rope else dx if spare is None else _cleared(dx, t, o)
        out[name] = torch.empty_like(t[name]).copy_(dx)
    return out


def gradient_of_mean(mean: Tensor, x: Tensor, dx: Tensor, eps: float, layout: str) -> Tensor:
    """The gradient of a given mean of squares of x, whose gradient by the other factors is dx.

    1 / sqrt(mean + eps) is a factor of x, so it is the sum of dx x over a token's heads, times -1/2 / (mean + eps).
    Elements without a gradient may be anything.
    """
    both = torch.where(dx == 0, 0, dx.float() * x.float())
    total = canonical(both, layout).sum((-2, -1))
    total = total.view(mean.shape)
    return torch.where(total == 0, 0, total * (-0.5 / (mean + eps)))


def gradients_of_means(t: Tensors, xs: Tensors, grads: Tensors, o: Options) -> Tensors:
    """The gradients of a call's given means that require one. xs, grads: q and k, and their gradients."""
    names = [name for name in views.MEANS if name in t and t[name].requires_grad and name[0] in grads]
    eps = norm_of(o).eps
    return {name: gradient_of_mean(t[name], xs[name[0]], grads[name[0]], eps, o.layout) for name in names}


# ---- fp8 and caches --------------------------------------------------------------------------------


def turned(t: Tensors, o: Options, out_dtype: torch.dtype | None = None) -> Tensors:
    """q and k rotated, and normalised and transformed if asked."""
    turn = rope if o.norm is None else qk_norm_rope
    if not o.hadamard:
        return turn(t, o, out_dtype)
    before = turn(t, o, read_as(o))
    exact = {name: x if name == "v" else with_hadamard(x.float()) for name, x in before.items()}
    return {name: torch.empty_like(t[name], dtype=out_dtype).copy_(x) for name, x in exact.items()}


def read_as(o: Options) -> torch.dtype | None:
    """The dtype in which transforms and conversions read heads; with "dtype" that of q, as of the tensors of a host."""
    return None if o.rounding == "dtype" else torch.float32


def in_fp32(t: Tensors, o: Options) -> Tensors:
    """The same as a conversion reads them."""
    return {name: x.float() for name, x in turned(t, o, read_as(o)).items()}


def scaled(t: Tensors, o: Options) -> Tensors:
    """q and k divided by the scale of each head or group, whose largest element becomes the dtype's largest number."""
    out: Tensors = {}
    for name, y in in_fp32(t, o).items():
        values, scale = scaled_elements(y, o, given_scale(name, y, t, o))
        out[name], out[f"{name}_scale"] = empty_elements(t[name], o.out_dtype).copy_(values), stored_scale(scale, o)
    return out


def scales_of_rows(t: Tensors, o: Options) -> Tensors:
    """The scale of each head of q, k and v in a batch row or a sequence, as `scaled` computes that of a head."""
    made = {**({"v": t["v"].float()} if "v" in t else {}), **in_fp32(t, o)}
    return {f"{name}_scale": row_scales(y, t, o) for name, y in made.items()}


def rope_fp8(t: Tensors, o: Options) -> Tensors:
    """Normalise q and k if asked, rotate them and divide them by their scales."""
    return {name: divided(y, given_scale(name, y, t, o), o.out_dtype) for name, y in in_fp32(t, o).items()}


def rope_kv_cache(t: Tensors, o: Options) -> Tensors:
    """Normalise q and k if asked, rotate them, q to fp8 if it has a scale, and store k and v in their places.

    The caches are (slots, heads, dim) or (pages, rows, heads, dim).
    """
    out, exact = turned(t, o), in_fp32(t, o)
    k_cache, tokens = t["k_cache"], math.prod(canonical(t["q"], o.layout).shape[:-2])
    spare = table_rows(tokens, k_cache.device, t, o)[1] if o.inplace and "cu_seqlens" in t else None
    slots = store_in_pages(t, tokens, o.clear_page, spare) if "page_table" in t else t["slot_mapping"].flatten().long()
    kept = (slots >= 0) & (slots < slots_of(k_cache))
    kept = kept if spare is None else kept & ~spare
    page, row = slots[kept], None
    if k_cache.dim() == 4:
        page, row = page // k_cache.shape[1], page % k_cache.shape[1]
    stored = {name: (out.get(name, t[name]), exact.get(name, t[name])) for name in ("k", "v") if name in t}
    for name, (x, unrounded) in stored.items():
        cache = t[f"{name}_cache"]
        made = {f"{name}_cache": x}
        if f"{name}_block_scale" in t:
            form = changed(o, **views.block_format(t, x.shape[-1], o)._asdict())
            pair = scaled_elements(unrounded.float(), form, given_scale(name, x, t, o))
            made = dict(zip((f"{name}_cache", f"{name}_block_scale"), pair))
        elif cache.dtype in FP8S:
            made = {f"{name}_cache": divided(unrounded, given_scale(name, x, t, o), DTYPE_NAMES[cache.dtype])}
        for label, y in made.items():
            put(t[label], page, row, canonical(indexed(y), o.layout).flatten(0, 1)[kept])
    return {**out, "q": divided(exact["q"], given_scale("q", exact["q"], t, o), o.out_dtype)} if "q_scale" in t else out


def kv_cache_scaled(t: Tensors, o: Options) -> Tensors:
    """Store k and v at their slots; q is divided by the scale of each head."""
    plain, alone = ({name: x for name, x in t.items() if name not in without} for without in (("q_scale",), ("k", "v")))
    norm = norm_of(o)._replace(v_norm=False)
    return {**rope_kv_cache(plain, o), **scaled(alone, changed(o, norm=norm))}
