"""Attention processors of diffusers that are replaced completely.

In the processors of `FUSED`, RMSNorm of q and k, rope and the joining of two streams are one launch. In those of
`INLINE`, the rotation is a part of the host's code and not a function. Each replaces a host processor's `__call__`:
same arguments, same projections, same attention call, and the same result bit for bit. It is a method of a subclass
(a twin) of that processor, and the `fingerprint` of the host's code must be known. A call that it refuses (autocast,
other norms or tables) goes to the twin's `_jitrope_rope`, the host's code with its rope replaced, or to the host's own
`__call__`.

In all other processors only rope is replaced, which works for any version of the host.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...api import apply_rope
from ...base.errors import InvalidInput
from ...ops.watch import hooks_of_all
from .. import _host
from . import forms
from .forms import WORDS, options, pair
from .norms import Norms, Parts, Words, beside, joint, no_turn, norm_rope, norm_rope_front, norms_of
from .twins import host_of
from .ulysses import exchanged, ranks_of, sent

# ---- shared by processors --------------------------------------------------------------------------------


class Ours(NamedTuple):
    """Our `__call__` for a host's processor."""

    call: Callable[..., Any]
    names: list[str]  # the host's parameters after `attn`; missing ones are None, as in the host
    fingerprints: list[str]  # of the host's code in diffusers 0.42, and since 0.36 where it computes the same
    says: str  # a description of the host's tables, for the README

    def stands_for(self, function: Callable[..., Any]) -> bool:
        return fingerprint(function) in self.fingerprints


def _ours(function: Callable[..., Any], names: str, fingerprints: str, who: str = "fused", count: int = 1) -> Ours:
    """`Ours` from a function of the values of these parameters; each call counts as `count` of `who`."""
    known = names.split()

    def call(self: Any, attn: Any, *arguments: Any, **words: Any) -> tuple[Any, int]:
        given = {**dict(zip(known, arguments)), **words}
        if len(arguments) > len(known) or any(name not in known for name in words):
            raise InvalidInput(WORDS)
        if any(now() is not theirs for now, theirs in getattr(type(self), "_jitrope_ropes", ())):
            raise InvalidInput("its rope function was replaced after enable")
        return function(self, attn, *[given.get(name) for name in known]), count

    whole = _host.or_else("diffusers", who, call, _left)
    return Ours(whole, known, fingerprints.split(), function.__doc__ or "")


def _left(reason: str, processor: Any, *arguments: Any, **words: Any) -> Any:
    """Run the host's own code, with its rope replaced if possible."""
    cls = type(processor)
    with_our_rope = getattr(cls, "_jitrope_rope", None)  # counts its rotated tensors
    _host.note("diffusers", "host", reason, 0 if with_our_rope else 1)
    return (with_our_rope or host_of(cls).__call__)(processor, *arguments, **words)


def _names(processor: Any) -> Any:
    """The current functions of the host's module by name: another library may have replaced some."""
    return host_of(type(processor)).__call__.__globals__


def _attend(processor: Any, q: Tensor, k: Tensor | None, v: Tensor, **words: Any) -> Any:
    """The host's attention: (B, S, H, D)."""
    words = {"backend": processor._attention_backend, "parallel_config": processor._parallel_config, **words}
    attend = _names(processor)["dispatch_attention_fn"]
    return exchanged(attend, q, k, v, **words) if q.dim() == 5 else attend(q, k, v, **words)


def _prepared(
    processor: Any, mask: Any, norms: Norms, streams: Sequence[Parts], rope: Words, *, fresh: bool = False
) -> Parts:
    """q and k of one or two streams normalised and rotated, and v; two are joined."""
    if ranks := ranks_of(processor, _names(processor)["dispatch_attention_fn"], mask, *streams):
        return sent(norms, streams, rope, ranks)
    (q, k, v), *second = streams
    if second:
        return joint(norms, (q, k, v), second[0], rope)
    return *norm_rope(norms, q, k, rope, fresh=fresh), v


def _attended(processor: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **words: Any) -> Any:
    """The host's attention: (B, S, H * D)."""
    out = _attend(processor, q, k, v, attn_mask=mask, dropout_p=0.0, is_causal=False, **words)
    return out.flatten(2, 3).to(q.dtype)


def _heads(tensors: Sequence[Tensor], attn: Any, count: int = 3) -> Any:
    """Each of the first as (B, S, H, D); under tensor parallelism H is this rank's number of heads."""
    dim = getattr(attn, "head_dim", 0) or attn.inner_dim // attn.heads
    return tuple(x.unflatten(-1, (-1, dim)) for x in tensors[:count])


def _split(tensors: Sequence[Tensor], attn: Any) -> Any:
    return tuple(x.unflatten(2, (attn.heads, -1)) for x in tensors)


def _qkv(attn: Any, x: Tensor, source: Tensor | None = None) -> Parts:
    """The projections of x; keys and values come from `source`, if given."""
    source = x if source is None else source
    return attn.to_q(x), attn.to_k(source), attn.to_v(source)


def _added_qkv(attn: Any, x: Tensor) -> Parts:
    return attn.add_q_proj(x), attn.add_k_proj(x), attn.add_v_proj(x)


def _norms(attn: Any, x: Tensor, *names: str, **words: Any) -> Norms:
    return norms_of(x, *(getattr(attn, f"norm_{name}") for name in names), **words)


def _fresh(attn: Any) -> bool:
    """Whether no other code holds the projections q and k: they are not views of a packed one, and no hook ran."""
    if getattr(attn, "fused_projections", False) or hooks_of_all():
        return False
    linears = attn.to_q, attn.to_k  # other classes, and those with their own `forward`, may keep what they return
    return all(type(x) is torch.nn.Linear and not (x._forward_hooks or "forward" in x.__dict__) for x in linears)


def _out(attn: Any, x: Tensor) -> Tensor:
    """The output projection and its dropout, if there is one."""
    for module in attn.to_out:
        x = module(x)
    return x


# ---- FLUX and FLUX.2: text before image --------------------------------------------------------------------


def _flux(self: Any, attn: Any, image: Tensor, text: Any, mask: Any, tables: Any, second: bool = False) -> Any:
    """FLUX or FLUX.2, of one or two streams. FLUX copies the streams before their output projections."""
    added = () if attn.added_kv_proj_dim is None else ("added_q", "added_k")
    norms, tables = _norms(attn, image, *added, "q", "k"), pair(tables)
    projected = _heads(_names(self)["_get_qkv_projections"](attn, image, text), attn, 6 if added else 3)
    images, texts = projected[:3], projected[3:]
    streams = [parts for parts in (texts, images) if parts]
    tokens = sum(parts[0].shape[1] for parts in streams)
    rope = options(forms.SHARED, images[0], tables, tokens)
    q, k, v = _prepared(self, mask, norms, streams, rope, fresh=_fresh(attn))
    del projected, images, texts, streams  # attention needs memory
    out = _attended(self, q, k, v, mask)
    if text is None:
        return _out(attn, out) if second else out
    text, image = out.split_with_sizes([text.shape[1], out.shape[1] - text.shape[1]], dim=1)
    if not second:
        text, image = text.contiguous(), image.contiguous()
    return _out(attn, image), attn.to_add_out(text)


_flux2 = functools.partial(_flux, second=True)


def _flux2_parallel(self: Any, attn: Any, x: Tensor, mask: Any, tables: Any) -> Any:
    """q, k and v are strided views of one projection, which also gives the MLP's input."""
    norms, tables = _norms(attn, x, "q", "k"), pair(tables)
    qkv_mlp = attn.to_qkv_mlp_proj(x)
    qkv_dim = 3 * attn.inner_dim
    local = qkv_mlp.shape[-1] * qkv_dim // (qkv_dim + attn.mlp_hidden_dim * attn.mlp_mult_factor)
    projected, mlp = torch.split(qkv_mlp, [local, qkv_mlp.shape[-1] - local], dim=-1)
    qkv = _heads(projected.chunk(3, dim=-1), attn)
    q, k, v = _prepared(self, mask, norms, [qkv], options(forms.SHARED, qkv[0], tables))
    out = _attended(self, q, k, v, mask)
    return attn.to_out(torch.cat([out, attn.mlp_act_fn(mlp)], dim=-1))


# ---- Qwen-Image --------------------------------------------------------------------------------------------


def _qwen(self: Any, attn: Any, image: Tensor, text: Any, text_mask: Any, mask: Any, tables: Any) -> Any:
    """The tables are those of image and text; attention takes text before image."""
    if text is None or mask is not None:
        raise InvalidInput("no text, or a mask")  # the host refuses that too
    if text_mask is not None:
        ones = torch.ones(image.shape[:2], dtype=torch.bool, device=image.device)
        mask = torch.cat([text_mask, ones], dim=1)[:, None, None, :]
    norms, tables = _norms(attn, image, "added_q", "added_k", "q", "k"), pair(tables)
    texts, images = _heads(_added_qkv(attn, text), attn), _heads(_qkv(attn, image), attn)
    ropes = [options(forms.QWEN, x[0], (table,)) for x, table in zip((images, texts), tables)]
    q, k, v = _prepared(self, mask, norms, [texts, images], beside(ropes[1], ropes[0]))
    del texts, images
    out = _attended(self, q, k, v, mask)
    text, image = out[:, : text.shape[1]], out[:, text.shape[1] :]
    return _out(attn, image.contiguous()), attn.to_add_out(text.contiguous())


# ---- Wan and LTX: norms across heads, rope in self-attention alone ------------------------------------------

_WAN_TEXT = 512  # text tokens after those of an image, a constant of the host too


def _wan(self: Any, attn: Any, x: Tensor, text: Any, mask: Any, tables: Any) -> Any:
    """With an image, a second attention uses its keys and values, and the results are added."""
    norms, norms_of_image, image = _norms(attn, x, "q", "k", across_heads=True), None, None
    tables = None if tables is None else forms.of_pairs(*pair(tables))
    if attn.add_k_proj is not None:
        norms_of_image, length = _norms(attn, x, "added_k", across_heads=True), text.shape[1] - _WAN_TEXT
        image, text = text[:, :length], text[:, length:]
    q, k, v = _split(_names(self)["_get_qkv_projections"](attn, x, text), attn)
    rope: Words = {} if tables is None else options(forms.WAN, q, tables)
    if text is None:
        q, k, v = _prepared(self, mask, norms, [(q, k, v)], rope, fresh=_fresh(attn))
    else:
        q, k = norm_rope(norms, q, k, rope, fresh=_fresh(attn))
    parallel = {} if text is None else {"parallel_config": None}
    out = _attended(self, q, k, v, mask, **parallel)
    if norms_of_image is not None:
        k, v = _split(_names(self)["_get_added_kv_projections"](attn, image), attn)[:2]
        k, _ = norm_rope(norms_of_image, k, None, {})
        out = out + _attended(self, q, k, v, None, **parallel)
    return _out(attn, out)


def _ltx(self: Any, attn: Any, x: Tensor, text: Any, mask: Any, tables: Any) -> Any:
    """The tables are (B, S, H * D): each head has its own."""
    source = x if text is None else text
    if mask is not None:
        mask = attn.prepare_attention_mask(mask, source.shape[1], source.shape[0])
        mask = mask.view(source.shape[0], attn.heads, -1, mask.shape[-1])
    tables = None if tables is None else _split(pair(tables), attn)
    norms = _norms(attn, x, "q", "k", across_heads=True)
    q, k, v = _split(_qkv(attn, x, source), attn)
    rope: Words = {} if tables is None else options(forms.LTX, q, tables)
    q, k, v = _prepared(self, mask, norms, [(q, k, v)], rope, fresh=_fresh(attn))
    return _out(attn, _attended(self, q, k, v, mask))


# ---- HunyuanVideo: image before text, only the image is rotated --------------------------------------------


def _hunyuan(self: Any, attn: Any, image: Tensor, text: Any, mask: Any, tables: Any) -> Any:
    """The text is projected by its own weights, or together with the image."""
    added = ("added_q", "added_k") if text is not None and attn.add_q_proj is not None else ()
    norms, tables = _norms(attn, image, "q", "k", *added), pair(tables)
    if added:
        images, texts = _split(_qkv(attn, image), attn), _split(_added_qkv(attn, text), attn)
        rope = options(forms.SHARED, images[0], tables)
        q, k, v = joint(norms, images, texts, beside(rope, no_turn(rope, text.shape[1])))
        del images, texts
    else:
        q, k, v = _split(_qkv(attn, image if text is None else torch.cat([image, text], dim=1)), attn)
        fused = norm_rope if text is None else norm_rope_front
        q, k = fused(norms, q, k, options(forms.SHARED, q, tables, image.shape[1]), fresh=_fresh(attn))
    out = _attended(self, q, k, v, mask)
    if text is None:
        return out, None
    image, text = out[:, : -text.shape[1]], out[:, -text.shape[1] :]
    if getattr(attn, "to_out", None) is not None:
        image = _out(attn, image)
    if getattr(attn, "to_add_out", None) is not None:
        text = attn.to_add_out(text)
    return image, text


# ---- Z-Image ---------------------------------------------------------------------------------------------------


def _z_image(self: Any, attn: Any, x: Tensor, _: Any, mask: Any, table: Any) -> Any:
    if table is None:
        raise InvalidInput(WORDS)
    norms = _norms(attn, x, "q", "k")
    qkv = _split(_qkv(attn, x), attn)
    q, k, v = _prepared(self, mask, norms, [qkv], options(forms.COMPLEX_ROWS, qkv[0], (table,)), fresh=_fresh(attn))
    if mask is not None and mask.ndim == 2:
        mask = mask[:, None, None, :]
    return _out(attn, _attended(self, q, k, v, mask))


# ---- rope inside a `__call__`, without a function; the docstrings describe the host's tables ------------------


def _ideogram4(self: Any, attn: Any, x: Tensor, mask: Any, tables: Any) -> Any:
    """(cos, sin), (B, S, D) each; halves, products and result in the wider dtype of q and tables"""
    cos, sin = pair(tables)
    q, k, v = (part.unflatten(-1, (attn.num_heads, attn.head_dim)) for part in _qkv(attn, x))
    q, k = attn.norm_q(q), attn.norm_k(k)
    wide = torch.promote_types(q.dtype, cos.dtype)
    q, k = q.to(wide), k.to(wide)
    out = _attend(self, *apply_rope(q, k, **options(_IDEOGRAM4, q, (cos, sin))), v, attn_mask=mask)
    return attn.to_out[0](out.flatten(2, 3))


_IDEOGRAM4 = forms.Form(axes=3, interleaved=False, rounding="promoted")


def _cosmos3(self: Any, attn: Any, und_seq: Tensor, gen_seq: Tensor, tables: Any) -> Any:
    """(cos, sin), (S, D) each, in the model's dtype, of packed tokens; halves, all in that dtype"""
    counts = (attn.num_attention_heads, attn.num_key_value_heads, attn.num_key_value_heads)
    (q_und, k_und, v_und), (q_gen, k_gen, v_gen) = (
        [x.view(-1, count, attn.head_dim) for x, count in zip(parts, counts)]
        for parts in (_qkv(attn, und_seq), _added_qkv(attn, gen_seq))
    )
    q_und, k_und = attn.norm_q(q_und), attn.norm_k(k_und)
    q_gen, k_gen = attn.norm_added_q(q_gen), attn.norm_added_k(k_gen)
    k_seen = k_und if attn.k_norm_und_for_gen is None else attn.k_norm_und_for_gen(k_und)
    q_und, k_und = _packed(q_und, k_und, *tables[:2])
    k_seen, _ = _packed(k_seen, None, *tables[:2])
    q_gen, k_gen = _packed(q_gen, k_gen, *tables[2:])

    # The text attends to itself, causally; the image attends to both.
    text = _attend(self, q_und[None], k_und[None], v_und[None], is_causal=True, enable_gqa=True)
    keys, values = torch.cat((k_seen, k_gen)), torch.cat((v_und, v_gen))
    picture = _attend(self, q_gen[None], keys[None], values[None], is_causal=False, enable_gqa=True)
    return attn.to_out(text[0].flatten(-2, -1)), attn.to_add_out(picture[0].flatten(-2, -1))


def _packed(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor) -> Any:
    if cos.dtype != q.dtype:
        raise InvalidInput("the tables' dtype")
    return apply_rope(q, k, layout="thd", **options(_COSMOS3, q[None], (cos, sin)))


_COSMOS3 = forms.Form(interleaved=False, rounding="dtype")


# ---- the processors, by the names of their classes ------------------------------------------------------------

_STREAMS = "hidden_states encoder_hidden_states attention_mask"
_QWEN = "hidden_states encoder_hidden_states encoder_hidden_states_mask attention_mask image_rotary_emb"

_PARALLEL = "hidden_states attention_mask image_rotary_emb"

FUSED: dict[str, Ours] = {
    "FluxAttnProcessor": _ours(_flux, f"{_STREAMS} image_rotary_emb", "b500bbed0e50eefa 7e3e63df5c741293"),
    "Flux2AttnProcessor": _ours(_flux2, f"{_STREAMS} image_rotary_emb", "2cacd20b58b5e9a2 9de89788b0f0fbc8"),
    "Flux2ParallelSelfAttnProcessor": _ours(_flux2_parallel, _PARALLEL, "989ecd19f3dadda6 4bbf8e0dc858ad21"),
    "QwenDoubleStreamAttnProcessor2_0": _ours(_qwen, _QWEN, "f9fb82b04a566e85 c7badf506f8fab3f"),
    # Also Wan-Animate's and ChronoEdit's, which have the same name and code.
    "WanAttnProcessor": _ours(_wan, f"{_STREAMS} rotary_emb", "c4356a92aa98cfef"),
    "HunyuanVideoAttnProcessor2_0": _ours(_hunyuan, f"{_STREAMS} image_rotary_emb", "91dde12c4bbd4263"),
    "LTXVideoAttnProcessor": _ours(_ltx, f"{_STREAMS} image_rotary_emb", "a7ec6fcb4eb00797"),
    "ZSingleStreamAttnProcessor": _ours(_z_image, f"{_STREAMS} freqs_cis", "4fa3368192f216d6"),
}
"""With the norm in the same launch."""

INLINE: dict[str, Ours] = {  # the counts are of rotated tensors
    "Cosmos3AttnProcessor": _ours(_cosmos3, "und_seq gen_seq rotary_emb", "f9428f5954e77c03", "jitrope", 5),
    "Ideogram4AttnProcessor": _ours(_ideogram4, _PARALLEL, "7b11287e1c65732f", "jitrope", 2),
}
"""Without the norm."""


@functools.cache
def fingerprint(function: Callable[..., Any]) -> str:
    """A digest of the syntax of a function's source, without comments, docstrings and annotations.

    It is equal in all Python versions that can parse the source. It is "" if there is no source, or if another library
    has wrapped the function.
    """
    if hasattr(function, "__wrapped__"):
        return ""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return ""
    return hashlib.sha256(repr(_plain(tree)).encode()).hexdigest()[:16]


_NO_MATTER = {"annotation", "returns", "type_comment", "type_params", "kind"}


def _plain(node: Any) -> Any:
    """A syntax tree as nested tuples of its parts. Empty parts are left out, because Python versions differ there."""
    if isinstance(node, list):
        strings = [isinstance(x, ast.Expr) and isinstance(getattr(x.value, "value", None), str) for x in node]
        return tuple(_plain(x) for x, docstring in zip(node, strings) if not docstring)
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = ((name, value) for name, value in ast.iter_fields(node) if name not in _NO_MATTER)
    return type(node).__name__, *((name, _plain(value)) for name, value in fields if value not in (None, []))
