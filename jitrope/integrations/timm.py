"""timm: rope of its vision transformers (EVA-02, DINOv3, Perception Encoder, RoPE-ViT, NaFlex, SAM).

>>> from jitrope.integrations import timm as jitrope_timm
>>> report = jitrope_timm.enable()
>>> jitrope_timm.disable()

In `AttentionRope` and `EvaAttention` one launch rotates q and k and copies their class and register tokens; elsewhere
a call of `apply_rot_embed` is a launch. Results have the bits of timm. Compiled models have timm's own code.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..api import apply_rope
from ..base.errors import InvalidInput, JitropeError
from . import _host

_ROPE = "timm.layers.pos_embed_sincos:apply_rot_embed"
_ATTENTION = {
    "timm.layers.attention:AttentionRope": (
        "988f1dcec745c90d", "3bd7445e06eb3cfa", "9c2321aea688b0aa", "7cfdadf4d88eea44", "3f742ca1632dca04"
    ),
    "timm.models.eva:EvaAttention": ("f2fc2100652f6462", "c3e2233d28fa77bb", "ab5e17e344c38aae"),
}  # fmt: skip
"""The classes that `_attention` is written for, and the texts of their forward in 1.0.21 to 1.0.31."""


def apply_rot_embed(x: Tensor, sin_emb: Tensor, cos_emb: Tensor, half: bool = False) -> Tensor:
    """Rotate whole heads by tables that broadcast to x; `apply_rot_embed_cat` and `apply_rot_embed_list` call it.

    >>> cos, sin = jitrope.tables.cos_sin(16, jitrope.tables.inv_freq(rotary_dim=64)[0], width="full")
    >>> x = jitrope_timm.apply_rot_embed(torch.randn(2, 8, 16, 64), sin, cos, half=True)

    Args:
        x: (..., S, D), at most four axes, as (B, H, S, D); any strides, nothing is copied.
        sin_emb, cos_emb: (..., S, D), broadcastable to x: an angle for each element, as (S, D), with a table for each
            head (H, S, D), or with one for each image (B, 1, S, D). Tables that require a gradient are left to timm.
        half: the pairs are halves; False: neighbours, and the tables repeat each angle.

    Returns:
        x rotated, in its dtype, with the bits of timm: products and their sum are rounded to the dtype that x and the
        tables promote to. The errors are those of `jitrope.apply_rope`. Under torch.compile it raises InvalidInput:
        call timm's function there.
    """
    return _rotate(x, None, sin_emb, cos_emb, half)[0]


def _promoted(x: Tensor, sin_emb: Tensor, cos_emb: Tensor, half: bool = False) -> Tensor:
    """`apply_rot_embed` before timm 1.0.31, whose result has the dtype that x and the tables promote to."""
    if isinstance(x, Tensor):
        x = x.to(torch.promote_types(x.dtype, cos_emb.dtype))
    return apply_rot_embed(x, sin_emb, cos_emb, half)


def _rotate(q: Tensor, k: Tensor | None, sin: Tensor, cos: Tensor, half: bool, unrotated: int = 0) -> list[Tensor]:
    """q and k, (B, H, S, D) or with fewer axes, rotated behind their first tokens."""
    if not isinstance(q, Tensor):  # torch.fx traces with stand-ins
        raise InvalidInput(f"x is a {type(q).__name__}, not a tensor")
    if torch.compiler.is_compiling():
        raise InvalidInput("under torch.compile Inductor fuses timm's own code, and its step is shorter")
    if torch.is_grad_enabled() and (sin.requires_grad or cos.requires_grad):
        raise InvalidInput("the tables require a gradient, which timm computes in fewer launches")
    shape = (*q.shape[:-2], q.shape[-2] - unrotated, q.shape[-1]) if q.dim() > 1 else ()
    tables = _host.broadcast(shape, cos, sin)
    cos, sin = (table.expand(-1, -1, shape[-2], -1).transpose(1, 2) for table in tables)
    rounding = "dtype" if q.dtype == cos.dtype == sin.dtype != torch.float32 else "fp32"
    words: Any = {"layout": "bhsd", "interleaved": not half, "unrotated": unrotated, "rounding": rounding}
    out = apply_rope(_host.padded(q), k, cos, sin, **words)  # there is a k for four axes alone
    return [y.reshape(x.shape) for x, y in zip((q, k), out) if x is not None and y is not None]


# ---- one launch for q and k ----------------------------------------------------------------------------


def _attention(module: ModuleType, functions: ModuleType, theirs: _host.Function) -> _host.Function:
    """A forward for the classes of `_ATTENTION`.

    module: the class's. functions: that of rope, whose `apply_rot_embed` is ours. theirs: the host's forward.
    """
    known = functions.apply_rot_embed_cat, functions.apply_rot_embed

    def forward(self: Any, x: Tensor, rope: Any = None, attn_mask: Any = None, is_causal: bool = False) -> Any:
        same = known == (module.apply_rot_embed_cat, functions.apply_rot_embed)
        if not same:
            _host.note("timm", "host", "apply_rot_embed_cat or apply_rot_embed was replaced")
        if rope is None or not self.fused_attn or not isinstance(x, Tensor) or not same:  # torch.fx has stand-ins
            return theirs(self, x, rope, attn_mask, **({} if is_causal is False else {"is_causal": is_causal}))
        gate = None if getattr(self, "gate", None) is None else self.gate(x).sigmoid()
        q, k, v = _heads(self, x)
        q, k, first, (sin, cos) = self.q_norm(q), self.k_norm(k), self.num_prefix_tokens, rope.chunk(2, -1)
        half, groups = getattr(self, "rotate_half", False), getattr(self, "num_kv_groups", 1)
        try:
            q, k = _rotate(q, k, sin, cos, half, first)
            _host.note("timm", "jitrope")
        except InvalidInput:  # the function counts its own refusals
            turned = [module.apply_rot_embed_cat(y[:, :, first:], rope, half=half) for y in (q, k)]
            q, k = (torch.cat([y[:, :, :first], z], 2) for y, z in zip((q, k), turned))
        q, k = (y.type_as(v) for y in (q, k))
        if groups > 1:
            k, v = (y.repeat_interleave(groups, 1) for y in (k, v))
        x = F.scaled_dot_product_attention(q, k, v, attn_mask, self.attn_drop.p * self.training, is_causal)
        x = self.norm(x.transpose(1, 2).flatten(2))
        return self.proj_drop(self.proj(x if gate is None else x * gate))

    return forward


def _heads(layer: Any, x: Tensor) -> list[Tensor]:
    """q, k and v of a layer for x, (B, S, W): each (B, H, S, D)."""
    if layer.qkv is None:
        made = [linear(x) for linear in (layer.q_proj, layer.k_proj, layer.v_proj)]
        size = made[0].shape[-1] // layer.num_heads
        return [y.unflatten(-1, (-1, size)).transpose(1, 2) for y in made]
    if getattr(layer, "q_bias", None) is None:
        qkv = layer.qkv(x)
    else:
        bias = torch.cat((layer.q_bias, layer.k_bias, layer.v_bias))
        qkv = layer.qkv(x).add_(bias) if layer.qkv_bias_separate else F.linear(x, layer.qkv.weight, bias)
    return list(qkv.unflatten(-1, (3, layer.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0))


# ---- enable --------------------------------------------------------------------------------------------

_OURS = {"1c5717d3622fbb6c": _promoted, "9a39cb61183cdfe3": apply_rot_embed}
_CAT = ("aa3e4efb7d28e19e", "53460ec208173c51")
"""The texts of `apply_rot_embed` and `apply_rot_embed_cat` before 1.0.31, and in it."""


def _text(function: Any) -> str:
    return _host.text_of(_host.own("timm", function))


@_host.alone
def enable() -> _host.Report:
    """Replace timm's rope for all models, and the forward of two attention classes, so that q and k are one launch.

    Raises:
        ImportError: timm is not installed.
        JitropeError: `apply_rot_embed` has another text than in timm 1.0.21 to 1.0.31, or was replaced; jitrope has
            replaced nothing.
    """
    functions, _ = _host.held("timm", _ROPE)
    if (ours := _OURS.get(_text(functions.apply_rot_embed))) is None:
        raise JitropeError("apply_rot_embed is not that of timm 1.0.21 to 1.0.31: another version has it, or a patch")
    report = _host.enable("timm", {_ROPE: ours})
    for where, texts in _ATTENTION.items():
        try:
            module, name = _host.held("timm", where)
            cls = getattr(module, name)
            if _text(cls.forward) not in texts or _text(functions.apply_rot_embed_cat) not in _CAT:
                raise JitropeError("q and k are separate launches, because its text is not that of 1.0.21 to 1.0.31")
            report.replace_method(cls, "forward", partial(_attention, module, functions), "q and k in one launch")
        except (ImportError, JitropeError) as error:
            report.left[f"{where.replace(':', '.')}.forward"] = str(error)
    return report


disable = _host.disabler(__name__)
