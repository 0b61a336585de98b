"""Attention processors of diffusers that are ours as a whole.

In those of `FUSED` RMSNorm of q and k, rope and the joining of two streams are one launch; those of `INLINE` rotate in
the midst of their code. Each stands for a host processor's `__call__`: same arguments, same projections, same attention
call, bit for bit the same result. It is meant for a subclass of that processor with the host's class as
`_jitrope_host`, and for a host whose `fingerprint` is known. A call that it refuses (autocast, other norms or tables)
goes to the subclass' `_jitrope_rope`, the host's code with its rope replaced, or, where there is none, to the host's
`__call__`.

All other processors keep rope alone, which works for any version of the host.
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
from . import forms
from .counting import note, or_else
from .forms import options, pair
from .norms import Norms, Parts, Words, beside, joint, no_turn, norm_rope, norm_rope_front, norms_of
from .twins import host_of

# ---- what processors share -------------------------------------------------------------------------------


class Ours(NamedTuple):
    """Our `__call__` for a host's processor.

    Attributes:
        names: the host's parameters behind `attn`. Those that are not given are None, as in the host.
        fingerprints: of the calls that it stands for: those of diffusers 0.42 and of versions since 0.36 that do the
            same.
    """

    call: Callable[..., Any]
    names: list[str]
    fingerprints: list[str]

    def stands_for(self, function: Callable[..., Any]) -> bool:
        return fingerprint(function) in self.fingerprints


def whole(function: Callable[..., Any], names: str, fingerprints: str) -> Ours:
    """`Ours` from a function that takes what the host's parameters of these names are given, in turn."""
    known = names.split()

    @functools.wraps(function)
    def call(self: Any, attn: Any, *arguments: Any, **words: Any) -> Any:
        given = {**dict(zip(known, arguments)), **words}
        if len(arguments) > len(known) or any(name not in known for name in words):
            raise InvalidInput("arguments that jitrope does not know")
        return function(self, attn, *[given.get(name) for name in known])

    return Ours(or_else(call, _host), known, fingerprints.split())


def _host(reason: str, processor: Any, *arguments: Any, **words: Any) -> Any:
    """The host's own code for a call that is not ours, with its rope replaced if that can be done."""
    cls = type(processor)
    with_our_rope = getattr(cls, "_jitrope_rope", None)  # which counts what it rotates
    note("host", reason, 0 if with_our_rope else 1)
    return (with_our_rope or host_of(cls).__call__)(processor, *arguments, **words)


def _names(processor: Any) -> dict[str, Any]:
    """The names of the host's module: what is put in their place there is used here too."""
    names: dict[str, Any] = host_of(type(processor)).__call__.__globals__
    return names


def _attend(processor: Any, q: Tensor, k: Tensor, v: Tensor, **words: Any) -> Tensor:
    """The host's attention: (B, S, H, D)."""
    words = {"backend": processor._attention_backend, "parallel_config": processor._parallel_config, **words}
    out: Tensor = _names(processor)["dispatch_attention_fn"](q, k, v, **words)
    return out


def _attended(processor: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **words: Any) -> Tensor:
    """The same, (B, S, H * D)."""
    out = _attend(processor, q, k, v, attn_mask=mask, dropout_p=0.0, is_causal=False, **words)
    return out.flatten(2, 3).to(q.dtype)


def _heads(tensors: Sequence[Tensor], attn: Any) -> Any:
    """(B, S, H, D) of each; H is what this rank has under tensor parallelism."""
    dim = getattr(attn, "head_dim", 0) or attn.inner_dim // attn.heads
    return tuple(x.unflatten(-1, (-1, dim)) for x in tensors)


def _split(tensors: Sequence[Tensor], attn: Any) -> Any:
    return tuple(x.unflatten(2, (attn.heads, -1)) for x in tensors)


def _qkv(attn: Any, x: Tensor, source: Tensor | None = None) -> Parts:
    """The projections of x, or of x and the source of keys and values."""
    source = x if source is None else source
    return attn.to_q(x), attn.to_k(source), attn.to_v(source)


def _added_qkv(attn: Any, x: Tensor) -> Parts:
    return attn.add_q_proj(x), attn.add_k_proj(x), attn.add_v_proj(x)


def _norms(attn: Any, x: Tensor, *names: str) -> Norms:
    return norms_of(x, *(getattr(attn, f"norm_{name}") for name in names))


def _fresh(attn: Any) -> bool:
    """Whether q and k as just projected are nobody else's: views of nothing, and no hook has seen them."""
    packed = getattr(attn, "fused_projections", False)
    return not (packed or attn.to_q._forward_hooks or attn.to_k._forward_hooks)


def _out(attn: Any, x: Tensor) -> Tensor:
    """The output projection and, where there is one, its dropout."""
    for module in attn.to_out:
        x = module(x)
    return x


# ---- FLUX and FLUX.2: text before image --------------------------------------------------------------------


def _flux_qkv(processor: Any, attn: Any, image: Tensor, text: Tensor | None, tables: Any) -> Any:
    """Projections, norms and rope, of one stream or of two."""
    two = attn.added_kv_proj_dim is not None
    norms = _norms(attn, image, *(("added_q", "added_k") if two else ()), "q", "k")
    q, k, v, *texts = _names(processor)["_get_qkv_projections"](attn, image, text)
    q, k, v = _heads((q, k, v), attn)
    if not two:
        return *norm_rope(norms, q, k, options(forms.SHARED, q, pair(tables)), fresh=_fresh(attn)), v
    first = _heads(texts, attn)
    tokens = first[0].shape[1] + q.shape[1]
    return joint(norms, first, (q, k, v), options(forms.SHARED, q, pair(tables), tokens))


def _flux(self: Any, attn: Any, image: Tensor, text: Any, mask: Any, tables: Any, second: bool = False) -> Any:
    """FLUX, which copies the streams before their output projections, or FLUX.2."""
    q, k, v = _flux_qkv(self, attn, image, text, tables)
    out = _attended(self, q, k, v, mask)
    if text is None:
        return _out(attn, out) if second else out, "fused", 1
    text, image = out.split_with_sizes([text.shape[1], out.shape[1] - text.shape[1]], dim=1)
    if not second:
        text, image = text.contiguous(), image.contiguous()
    return (_out(attn, image), attn.to_add_out(text)), "fused", 1


_flux2 = functools.partial(_flux, second=True)


def _flux2_parallel(self: Any, attn: Any, x: Tensor, mask: Any, tables: Any) -> Any:
    """Q, K and V are strided views of one projection that has the MLP's input too."""
    norms = _norms(attn, x, "q", "k")
    qkv_mlp = attn.to_qkv_mlp_proj(x)
    qkv_dim = 3 * attn.inner_dim
    local = qkv_mlp.shape[-1] * qkv_dim // (qkv_dim + attn.mlp_hidden_dim * attn.mlp_mult_factor)
    projected, mlp = torch.split(qkv_mlp, [local, qkv_mlp.shape[-1] - local], dim=-1)
    q, k, v = _heads(projected.chunk(3, dim=-1), attn)
    q, k = norm_rope(norms, q, k, options(forms.SHARED, q, pair(tables)))
    out = _attended(self, q, k, v, mask)
    return attn.to_out(torch.cat([out, attn.mlp_act_fn(mlp)], dim=-1)), "fused", 1


# ---- Qwen-Image --------------------------------------------------------------------------------------------


def _qwen(self: Any, attn: Any, image: Tensor, text: Any, text_mask: Any, mask: Any, tables: Any) -> Any:
    """Tables of image and text; attention has text before image."""
    if text is None or mask is not None:
        raise InvalidInput("no text, or a mask")  # the host refuses that too
    if text_mask is not None:
        ones = torch.ones(image.shape[:2], dtype=torch.bool, device=image.device)
        mask = torch.cat([text_mask, ones], dim=1)[:, None, None, :]
    norms = _norms(attn, image, "added_q", "added_k", "q", "k")
    texts, images = _heads(_added_qkv(attn, text), attn), _heads(_qkv(attn, image), attn)
    ropes = [options(forms.QWEN, x[0], (table,)) for x, table in zip((images, texts), pair(tables))]
    q, k, v = joint(norms, texts, images, beside(ropes[1], ropes[0]))
    del texts, images
    out = _attended(self, q, k, v, mask)
    text, image = out[:, : text.shape[1]], out[:, text.shape[1] :]
    return (_out(attn, image.contiguous()), attn.to_add_out(text.contiguous())), "fused", 1


# ---- Wan and LTX: norms across heads, rope in self-attention alone ------------------------------------------

_WAN_TEXT = 512
"""The text tokens behind those of an image, a constant of the host too."""


def _wan(self: Any, attn: Any, x: Tensor, text: Any, mask: Any, tables: Any) -> Any:
    """Keys and values of an image beside the text's."""
    image = None
    if attn.add_k_proj is not None:
        length = text.shape[1] - _WAN_TEXT
        image, text = text[:, :length], text[:, length:]
    norms = _norms(attn, x, "q", "k")
    norms_of_image = None if image is None else _norms(attn, x, "added_k")
    q, k, v = _split(_names(self)["_get_qkv_projections"](attn, x, text), attn)
    rope: Words = {} if tables is None else options(forms.WAN, q, forms.of_pairs(*pair(tables)))
    q, k = norm_rope(norms, q, k, rope, across_heads=True, fresh=_fresh(attn))
    parallel = {} if text is None else {"parallel_config": None}
    of_image = None
    if norms_of_image is not None:
        k_image, v_image = _split(_names(self)["_get_added_kv_projections"](attn, image), attn)[:2]
        k_image, _ = norm_rope(norms_of_image, k_image, None, {}, across_heads=True)
        of_image = _attended(self, q, k_image, v_image, None, **parallel)
    out = _attended(self, q, k, v, mask, **parallel)
    return _out(attn, out if of_image is None else out + of_image), "fused", 1


def _ltx(self: Any, attn: Any, x: Tensor, text: Any, mask: Any, tables: Any) -> Any:
    """Tables (B, S, H * D), each head with its own."""
    source = x if text is None else text
    if mask is not None:
        mask = attn.prepare_attention_mask(mask, source.shape[1], source.shape[0])
        mask = mask.view(source.shape[0], attn.heads, -1, mask.shape[-1])
    norms = _norms(attn, x, "q", "k")
    q, k, v = _split(_qkv(attn, x, source), attn)
    rope: Words = {} if tables is None else options(forms.LTX, q, _split(pair(tables), attn))
    q, k = norm_rope(norms, q, k, rope, across_heads=True, fresh=_fresh(attn))
    return _out(attn, _attended(self, q, k, v, mask)), "fused", 1


# ---- HunyuanVideo: image before text, the image alone is rotated --------------------------------------------


def _hunyuan_qkv(attn: Any, image: Tensor, text: Tensor | None, tables: Any) -> Any:
    """The text is projected by weights of its own, or with the image."""
    two = text is not None and attn.add_q_proj is not None
    norms = _norms(attn, image, "q", "k", *(("added_q", "added_k") if two else ()))
    tables = pair(tables)
    if text is not None and two:
        images, texts = _split(_qkv(attn, image), attn), _split(_added_qkv(attn, text), attn)
        rope = options(forms.SHARED, images[0], tables)
        return joint(norms, images, texts, beside(rope, no_turn(rope, text.shape[1])))
    q, k, v = _split(_qkv(attn, image if text is None else torch.cat([image, text], dim=1)), attn)
    fused = norm_rope if text is None else norm_rope_front
    return *fused(norms, q, k, options(forms.SHARED, q, tables, image.shape[1]), fresh=_fresh(attn)), v


def _hunyuan(self: Any, attn: Any, image: Tensor, text: Any, mask: Any, tables: Any) -> Any:
    q, k, v = _hunyuan_qkv(attn, image, text, tables)
    out = _attended(self, q, k, v, mask)
    if text is None:
        return (out, None), "fused", 1
    image, text = out[:, : -text.shape[1]], out[:, -text.shape[1] :]
    if getattr(attn, "to_out", None) is not None:
        image = _out(attn, image)
    if getattr(attn, "to_add_out", None) is not None:
        text = attn.to_add_out(text)
    return (image, text), "fused", 1


# ---- Z-Image ---------------------------------------------------------------------------------------------------


def _z_image(self: Any, attn: Any, x: Tensor, _: Any, mask: Any, table: Any) -> Any:
    norms = _norms(attn, x, "q", "k")
    q, k, v = _split(_qkv(attn, x), attn)
    q, k = norm_rope(norms, q, k, options(forms.COMPLEX_ROWS, q, (table,)), fresh=_fresh(attn))
    if mask is not None and mask.ndim == 2:
        mask = mask[:, None, None, :]
    return _out(attn, _attended(self, q, k, v, mask)), "fused", 1


# ---- rope in the midst of a `__call__`, with no function for it ----------------------------------------------
# Ours for all of it; the docstring's first line says what the host's tables are.


def _ideogram4(self: Any, attn: Any, x: Tensor, mask: Any, tables: Any) -> Any:
    """(cos, sin), (B, S, D) each; halves, products and result in the wider dtype of q and tables"""
    cos, sin = pair(tables)
    q, k, v = (part.unflatten(-1, (attn.num_heads, attn.head_dim)) for part in _qkv(attn, x))
    q, k = attn.norm_q(q), attn.norm_k(k)
    wide = torch.promote_types(q.dtype, cos.dtype)
    q, k = q.to(wide), k.to(wide)
    rope: Any = apply_rope
    q, k = rope(q, k, **options(_IDEOGRAM4, q, (cos, sin)))
    out = _attend(self, q, k, v, attn_mask=mask)
    return attn.to_out[0](out.flatten(2, 3)), "jitrope", 2


_IDEOGRAM4 = forms.Form("", lambda *_: (), axes=3, interleaved=False, rounding="promoted")


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

    # The text attends to itself, causally; the picture attends to both.
    text = _attend(self, q_und[None], k_und[None], v_und[None], is_causal=True, enable_gqa=True)
    keys, values = torch.cat((k_seen, k_gen)), torch.cat((v_und, v_gen))
    picture = _attend(self, q_gen[None], keys[None], values[None], is_causal=False, enable_gqa=True)
    return (attn.to_out(text[0].flatten(-2, -1)), attn.to_add_out(picture[0].flatten(-2, -1))), "jitrope", 5


def _packed(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor) -> Any:
    if cos.dtype != q.dtype:
        raise InvalidInput("the tables' dtype")
    return apply_rope(q, k, layout="thd", **options(_COSMOS3, q[None], (cos, sin)))


_COSMOS3 = forms.Form("", lambda *_: (), interleaved=False, rounding="dtype")


# ---- what there is -----------------------------------------------------------------------------------------


_STREAMS = "hidden_states encoder_hidden_states attention_mask"
_QWEN = "hidden_states encoder_hidden_states encoder_hidden_states_mask attention_mask image_rotary_emb"

FUSED: dict[str, Ours] = {
    name: whole(function, names, fingerprints)
    for name, function, names, fingerprints in (
        ("FluxAttnProcessor", _flux, f"{_STREAMS} image_rotary_emb", "b500bbed0e50eefa 7e3e63df5c741293"),
        ("Flux2AttnProcessor", _flux2, f"{_STREAMS} image_rotary_emb", "2cacd20b58b5e9a2 9de89788b0f0fbc8"),
        (
            "Flux2ParallelSelfAttnProcessor",
            _flux2_parallel,
            "hidden_states attention_mask image_rotary_emb",
            "989ecd19f3dadda6 4bbf8e0dc858ad21",
        ),
        ("QwenDoubleStreamAttnProcessor2_0", _qwen, _QWEN, "f9fb82b04a566e85 c7badf506f8fab3f"),
        # Also Wan-Animate's and ChronoEdit's, which have the same name and code.
        ("WanAttnProcessor", _wan, f"{_STREAMS} rotary_emb", "c4356a92aa98cfef"),
        ("HunyuanVideoAttnProcessor2_0", _hunyuan, f"{_STREAMS} image_rotary_emb", "91dde12c4bbd4263"),
        ("LTXVideoAttnProcessor", _ltx, f"{_STREAMS} image_rotary_emb", "a7ec6fcb4eb00797"),
        ("ZSingleStreamAttnProcessor", _z_image, f"{_STREAMS} freqs_cis", "4fa3368192f216d6"),
    )
}
"""By the class name of a host's processor."""

INLINE: dict[str, Ours] = {
    "Cosmos3AttnProcessor": whole(_cosmos3, "und_seq gen_seq rotary_emb", "f9428f5954e77c03"),
    "Ideogram4AttnProcessor": whole(_ideogram4, "hidden_states attention_mask image_rotary_emb", "7b11287e1c65732f"),
}
"""The same, without the norm."""


@functools.cache
def fingerprint(function: Callable[..., Any]) -> str:
    """A digest of a function's source: of its syntax, without comments, docstrings and annotations.

    The same for every Python version that parses it. "" where there is no source, or where it is not all: of a
    function wrapped by another library's.
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
    """A syntax tree as nested tuples of its parts; empty ones are left out, because versions differ there."""
    if isinstance(node, list):
        return tuple(_plain(item) for item in node if not _is_docstring(item))
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = ((name, value) for name, value in ast.iter_fields(node) if name not in _NO_MATTER)
    return type(node).__name__, *((name, _plain(value)) for name, value in fields if value not in (None, []))


def _is_docstring(node: Any) -> bool:
    """A string on a line of its own, which does nothing wherever it stands."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
