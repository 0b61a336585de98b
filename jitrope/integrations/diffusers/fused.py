"""Attention processors of diffusers in which RMSNorm of q and k, rope and the joining of two streams are one launch.

Each function in `FUSED` stands for a host processor's `__call__`: same arguments, same projections, same attention
call, bit for bit the same result. It is meant for a subclass of that processor with the host's class as
`_jitrope_host`, and for a host whose `fingerprint` is known. A call with what is not handled here (autocast, other
tables) goes to the subclass' `_jitrope_rope`, the host's code with its rope replaced, or, where there is none, to the
host's `__call__`; one with norms that are not fused stays here (see `norms`).

The file is long because there is a function for each form of processor; what they share is in front.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import math
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .counting import note
from .norms import Pair, Parts, Rope, joint, norm_alone, norm_of, norm_rope, norm_rope_front, unfit
from .tables import of_pairs
from .twins import host_of

__all__ = ["FINGERPRINTS", "FUSED", "fingerprint", "norm_of"]

_REAL = (torch.float32,)
_COMPLEX = {torch.complex64: "complex64", torch.complex128: "complex128"}

# ---- what processors share -------------------------------------------------------------------------------


def _host(processor: Any, reason: str) -> Callable[..., Any]:
    """The function that takes a call that is not ours, with the processor as its first argument."""
    cls = type(processor)
    with_our_rope = getattr(cls, "_jitrope_rope", None)
    if with_our_rope is not None:  # which counts what it rotates
        note("jitrope", reason, 0)
        return with_our_rope  # type: ignore[no-any-return]
    note("host", reason)
    return host_of(cls).__call__  # type: ignore[no-any-return]


def _names(processor: Any) -> dict[str, Any]:
    """The names of the host's module: what is put in their place there is used here too."""
    return host_of(type(processor)).__call__.__globals__  # type: ignore[no-any-return]


def _attend(processor: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, parallel: Any) -> Tensor:
    """The host's attention: (B, S, H * D)."""
    out = _names(processor)["dispatch_attention_fn"](
        q, k, v, attn_mask=mask, dropout_p=0.0, is_causal=False, backend=processor._attention_backend,
        parallel_config=parallel,
    )  # fmt: skip
    return out.flatten(2, 3).to(q.dtype)  # type: ignore[no-any-return]


def _head_dim(attn: Any) -> int:
    """Of an attention module that has it, or of the host's `Attention`, which does not."""
    dim: int = getattr(attn, "head_dim", 0) or attn.inner_dim // attn.heads
    return dim


def _heads(tensors: Sequence[Tensor], dim: int) -> Parts:
    """(B, S, H, D) of each; H is what this rank has under tensor parallelism."""
    return tuple(x.unflatten(-1, (-1, dim)) for x in tensors)  # type: ignore[return-value]


def _split(tensors: Sequence[Tensor], heads: int) -> Parts:
    return tuple(x.unflatten(2, (heads, -1)) for x in tensors)  # type: ignore[return-value]


def _qkv(attn: Any, x: Tensor, source: Tensor | None = None) -> Parts:
    """The projections of x, or of x and the source of keys and values."""
    source = x if source is None else source
    return attn.to_q(x), attn.to_k(source), attn.to_v(source)


def _added_qkv(attn: Any, x: Tensor) -> Parts:
    return attn.add_q_proj(x), attn.add_k_proj(x), attn.add_v_proj(x)


def _normed(
    attn: Any, q: Tensor, k: Tensor, rope: Rope | None, k_rope: Rope | None, across_heads: bool = False
) -> Pair:
    """q and k as just projected, by their norms and ropes."""
    norms = (attn.norm_q, attn.norm_k)
    return norm_rope(q, k, norms, (rope, k_rope), across_heads=across_heads, fresh=_fresh(attn))


def _fresh(attn: Any) -> bool:
    """Whether q and k as just projected are nobody else's: views of nothing, and no hook has seen them."""
    packed = getattr(attn, "fused_projections", False)
    return not (packed or attn.to_q._forward_hooks or attn.to_k._forward_hooks)


def _complex_rope(table: Tensor) -> Rope:
    return Rope(freqs_cis=table.resolve_conj(), rounding=_COMPLEX[table.dtype])


def _out(attn: Any, x: Tensor) -> Tensor:
    """The output projection and, where there is one, its dropout."""
    x = attn.to_out[0](x)
    return attn.to_out[1](x) if len(attn.to_out) > 1 else x  # type: ignore[no-any-return]


# ---- Flux and its relatives: text before image -------------------------------------------------------------


def _flux_unfit(attn: Any, image: Tensor, text: Tensor | None, tables: Any) -> str:
    texts = 0 if text is None or attn.added_kv_proj_dim is None else text.shape[1]
    return unfit(image, tables, 2, _REAL, texts + image.shape[1])


def _flux_qkv(processor: Any, attn: Any, image: Tensor, text: Tensor | None, tables: Pair) -> Parts:
    """Projections, norms and rope, of one stream or of two."""
    q, k, v, *texts = _names(processor)["_get_qkv_projections"](attn, image, text)
    dim, rope = _head_dim(attn), Rope(*tables)
    q, k, v = _heads((q, k, v), dim)
    if attn.added_kv_proj_dim is None:
        return *_normed(attn, q, k, rope, rope), v
    norms = (attn.norm_added_q, attn.norm_added_k, attn.norm_q, attn.norm_k)
    return joint(_heads(texts, dim), (q, k, v), norms, (rope,))


def _flux_like(contiguous: bool) -> Callable[..., Any]:
    """Flux; `contiguous`: the streams are copied before their output projections."""

    def call(
        self: Any, attn: Any, hidden_states: Tensor, encoder_hidden_states: Any = None, attention_mask: Any = None,
        image_rotary_emb: Any = None,
    ) -> Any:  # fmt: skip
        image, text, tables = hidden_states, encoder_hidden_states, image_rotary_emb
        if reason := _flux_unfit(attn, image, text, tables):
            return _host(self, reason)(self, attn, image, text, attention_mask, tables)
        q, k, v = _flux_qkv(self, attn, image, text, tables)
        out = _attend(self, q, k, v, attention_mask, self._parallel_config)
        if text is None:
            return out
        text, image = out.split_with_sizes([text.shape[1], out.shape[1] - text.shape[1]], dim=1)
        if contiguous:
            text, image = text.contiguous(), image.contiguous()
        return _out(attn, image), attn.to_add_out(text)

    return call


def _flux2_attend(
    self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, texts: int, cache: Any = None, mode: Any = None,
    references: int = 0,
) -> Tensor:  # fmt: skip
    """Flux2's attention, with the keys and values of its reference images stored or read."""
    extract = mode == "extract" and references > 0
    if not extract and (mode != "cached" or cache is None):
        return _attend(self, q, k, v, mask, self._parallel_config)
    if extract and cache is not None:
        rows = slice(texts, texts + references)
        cache.store(k[:, rows].clone(), v[:, rows].clone())
    words = {} if extract else {"kv_cache": cache}
    attention = _names(self)["_flux2_kv_causal_attention"]
    out = attention(q, k, v, texts, references if extract else 0, backend=self._attention_backend, **words)
    return out.flatten(2, 3).to(q.dtype)  # type: ignore[no-any-return]


def _flux2_double(self: Any, attn: Any, image: Tensor, text: Any, mask: Any, tables: Any, *kv: Any) -> Any:
    if reason := _flux_unfit(attn, image, text, tables):
        return _host(self, reason)(self, attn, image, text, mask, tables, *kv)
    texts = 0 if text is None else text.shape[1]
    q, k, v = _flux_qkv(self, attn, image, text, tables)
    out = _flux2_attend(self, q, k, v, mask, texts, *kv)
    if text is None:
        return _out(attn, out)
    text, image = out.split_with_sizes([texts, out.shape[1] - texts], dim=1)
    text = attn.to_add_out(text)
    return _out(attn, image), text


def _flux2_single(self: Any, attn: Any, x: Tensor, mask: Any, tables: Any, texts: int = 0, *kv: Any) -> Any:
    """Q, K and V are strided views of one projection that has the MLP's input too."""
    qkv_mlp = attn.to_qkv_mlp_proj(x)
    qkv_dim = 3 * attn.inner_dim
    local = qkv_mlp.shape[-1] * qkv_dim // (qkv_dim + attn.mlp_hidden_dim * attn.mlp_mult_factor)
    qkv, mlp = torch.split(qkv_mlp, [local, qkv_mlp.shape[-1] - local], dim=-1)
    q, k, v = _heads(qkv.chunk(3, dim=-1), attn.head_dim)
    rope = Rope(*tables)
    q, k = norm_rope(q, k, (attn.norm_q, attn.norm_k), (rope, rope))
    out = _flux2_attend(self, q, k, v, mask, texts, *kv)
    return attn.to_out(torch.cat([out, attn.mlp_act_fn(mlp)], dim=-1))


def _flux2(
    self: Any, attn: Any, hidden_states: Tensor, encoder_hidden_states: Any = None, attention_mask: Any = None,
    image_rotary_emb: Any = None,
) -> Any:  # fmt: skip
    return _flux2_double(self, attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)


def _flux2_kv(
    self: Any, attn: Any, hidden_states: Tensor, encoder_hidden_states: Any = None, attention_mask: Any = None,
    image_rotary_emb: Any = None, kv_cache: Any = None, kv_cache_mode: Any = None, num_ref_tokens: int = 0,
) -> Any:  # fmt: skip
    kv = (kv_cache, kv_cache_mode, num_ref_tokens)
    return _flux2_double(self, attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb, *kv)


def _flux2_parallel(
    self: Any, attn: Any, hidden_states: Tensor, attention_mask: Any = None, image_rotary_emb: Any = None
) -> Any:
    if reason := unfit(hidden_states, image_rotary_emb, 2, _REAL, hidden_states.shape[1]):
        return _host(self, reason)(self, attn, hidden_states, attention_mask, image_rotary_emb)
    return _flux2_single(self, attn, hidden_states, attention_mask, image_rotary_emb)


def _flux2_kv_parallel(
    self: Any, attn: Any, hidden_states: Tensor, attention_mask: Any = None, image_rotary_emb: Any = None,
    kv_cache: Any = None, kv_cache_mode: Any = None, num_txt_tokens: int = 0, num_ref_tokens: int = 0,
) -> Any:  # fmt: skip
    x, mask, tables, texts, references = hidden_states, attention_mask, image_rotary_emb, num_txt_tokens, num_ref_tokens
    if reason := unfit(x, tables, 2, _REAL, x.shape[1]):
        return _host(self, reason)(self, attn, x, mask, tables, kv_cache, kv_cache_mode, texts, references)
    return _flux2_single(self, attn, x, mask, tables, texts, kv_cache, kv_cache_mode, references)


def _flux3(
    self: Any, attn: Any, hidden_states: Tensor, attention_mask: Any = None, image_rotary_emb: Any = None
) -> Any:
    """Norm and rope of fp32 q and k, which are rounded behind them."""
    x, mask, tables = hidden_states, attention_mask, image_rotary_emb
    if reason := unfit(x, tables, 2, _REAL, x.shape[1]):
        return _host(self, reason)(self, attn, x, mask, tables)
    rope = Rope(*tables)
    q, k, v = _split(_names(self)["_get_qkv_projections"](attn, x), attn.heads)
    q, k = _normed(attn, q.float(), k.float(), rope, rope)
    q, k = q.to(v.dtype), k.to(v.dtype)
    return _out(attn, _attend(self, q, k, v, mask, self._parallel_config))


# ---- Qwen-Image --------------------------------------------------------------------------------------------


def _qwen(
    self: Any, attn: Any, hidden_states: Tensor, encoder_hidden_states: Any = None,
    encoder_hidden_states_mask: Any = None, attention_mask: Any = None, image_rotary_emb: Any = None,
) -> Any:  # fmt: skip
    """Complex tables of image and text, (S, D / 2) each; attention has text before image."""
    image, text, tables = hidden_states, encoder_hidden_states, image_rotary_emb
    reason = unfit(image, tables, 2, (torch.complex64,))
    if text is None or attention_mask is not None:
        reason = "no text, or a mask"  # which the host refuses
    elif not reason and [table.shape[0] for table in tables] != [image.shape[1], text.shape[1]]:
        reason = "the tables' shape or gradient"
    if reason:
        return _host(self, reason)(self, attn, image, text, encoder_hidden_states_mask, attention_mask, tables)
    if encoder_hidden_states_mask is not None:
        ones = torch.ones(image.shape[:2], dtype=torch.bool, device=image.device)
        attention_mask = torch.cat([encoder_hidden_states_mask, ones], dim=1)[:, None, None, :]
    dim = _head_dim(attn)
    norms = (attn.norm_added_q, attn.norm_added_k, attn.norm_q, attn.norm_k)
    ropes = (_complex_rope(tables[1]), _complex_rope(tables[0]))
    texts = _heads(_added_qkv(attn, text), dim)
    q, k, v = joint(texts, _heads(_qkv(attn, image), dim), norms, ropes)
    del texts
    out = _attend(self, q, k, v, attention_mask, self._parallel_config)
    text, image = out[:, : text.shape[1]], out[:, text.shape[1] :]
    return _out(attn, image.contiguous()), attn.to_add_out(text.contiguous())


# ---- Wan and its relatives: norms across heads ---------------------------------------------------------------

_WAN_TEXT = 512
"""The text tokens behind those of an image, a constant of the host too."""


def _wan_rope(tables: Any) -> Rope | None:
    """Tables (1, S, 1, D), of each pair the first cosine and the second sine; bf16 ones make bf16 products."""
    if tables is None:
        return None
    rounding = "fp32" if tables[0].dtype == torch.float32 else "dtype"
    return Rope(*of_pairs(*tables), rounding=rounding)


def _wan_like(parallel_everywhere: bool) -> Callable[..., Any]:
    """Rope in self-attention only; keys and values of an image beside the text's."""

    def call(
        self: Any, attn: Any, hidden_states: Tensor, encoder_hidden_states: Any = None, attention_mask: Any = None,
        rotary_emb: Any = None,
    ) -> Any:  # fmt: skip
        x, text, image = hidden_states, encoder_hidden_states, None
        if reason := unfit(x, rotary_emb, 0 if rotary_emb is None else 2, (*_REAL, x.dtype)):
            return _host(self, reason)(self, attn, x, text, attention_mask, rotary_emb)
        if attn.add_k_proj is not None:
            length = text.shape[1] - _WAN_TEXT
            image, text = text[:, :length], text[:, length:]
        rope = _wan_rope(rotary_emb)
        q, k, v = _split(_names(self)["_get_qkv_projections"](attn, x, text), attn.heads)
        q, k = _normed(attn, q, k, rope, rope, across_heads=True)
        parallel = self._parallel_config if text is None or parallel_everywhere else None
        of_image = None if image is None else _wan_image(self, attn, q, image, parallel)
        out = _attend(self, q, k, v, attention_mask, parallel)
        return _out(attn, out if of_image is None else out + of_image)

    return call


def _wan_image(self: Any, attn: Any, q: Tensor, image: Tensor, parallel: Any) -> Tensor:
    """Attention to an image's own keys and values."""
    k, v = _split(_names(self)["_get_added_kv_projections"](attn, image), attn.heads)[:2]
    k = norm_alone(k, attn.norm_added_k, across_heads=True)
    return _attend(self, q, k, v, None, parallel)


def _helios(
    self: Any, attn: Any, hidden_states: Tensor, encoder_hidden_states: Any = None, attention_mask: Any = None,
    rotary_emb: Any = None, original_context_length: Any = None,
) -> Any:  # fmt: skip
    """One table (B, S, 2 D), cos | sin; the keys of frames before may be scaled."""
    x, text = hidden_states, encoder_hidden_states
    if reason := unfit(x, (rotary_emb,), 0 if rotary_emb is None else 1, (*_REAL, x.dtype)):
        arguments = (attn, x, text, attention_mask, rotary_emb, original_context_length)
        return _host(self, reason)(self, *arguments)
    rope = None
    if rotary_emb is not None:
        rounding = "fp32" if rotary_emb.dtype == torch.float32 else "dtype"
        rope = Rope(*of_pairs(*rotary_emb.chunk(2, dim=-1)), rounding=rounding)
    q, k, v = _split(_names(self)["_get_qkv_projections"](attn, x, text), attn.heads)
    q, k = _normed(attn, q, k, rope, rope, across_heads=True)
    if not attn.is_cross_attention and attn.is_amplify_history and x.shape[1] > original_context_length:
        history = x.shape[1] - original_context_length
        scale = 1.0 + torch.sigmoid(attn.history_key_scale) * (attn.max_scale - 1.0)
        if attn.history_scale_mode == "per_head":
            scale = scale.view(1, 1, -1, 1)
        k = torch.cat([k[:, :history] * scale, k[:, history:]], dim=1)
    return _out(attn, _attend(self, q, k, v, attention_mask, self._parallel_config if text is None else None))


def _ltx(
    self: Any, attn: Any, hidden_states: Tensor, encoder_hidden_states: Any = None, attention_mask: Any = None,
    image_rotary_emb: Any = None,
) -> Any:  # fmt: skip
    """Tables (B, S, H * D), each head with its own."""
    x, text, tables = hidden_states, encoder_hidden_states, image_rotary_emb
    if reason := unfit(x, tables, 0 if tables is None else 2, _REAL):
        return _host(self, reason)(self, attn, x, text, attention_mask, tables)
    attention_mask = _ltx_mask(attn, attention_mask, x if text is None else text)
    rope = _ltx_rope(attn, tables, "interleaved")
    q, k, v = _split(_qkv(attn, x, text), attn.heads)
    q, k = _normed(attn, q, k, rope, rope, across_heads=True)
    return _out(attn, _attend(self, q, k, v, attention_mask, self._parallel_config))


def _ltx_mask(attn: Any, mask: Any, source: Tensor) -> Any:
    if mask is None:
        return None
    mask = attn.prepare_attention_mask(mask, source.shape[1], source.shape[0])
    return mask.view(source.shape[0], attn.heads, -1, mask.shape[-1])


def _ltx_rope(attn: Any, tables: Any, form: str) -> Rope | None:
    """Interleaved: tables (B, S, H * D). Split: halves, by tables (B, H, S, D / 2)."""
    if tables is None:
        return None
    if form == "interleaved":
        cos, sin = (table.unflatten(2, (attn.heads, -1)) for table in tables)
        return Rope(cos, sin)
    return Rope(tables[0].transpose(1, 2), tables[1].transpose(1, 2), rounding="addcmul", interleaved=False)


def _ltx2_unfit(attn: Any, x: Tensor, q_tables: Any, k_tables: Any) -> str:
    dims = {"interleaved": 3, "split": 4}.get(attn.rope_type)
    for tables in (q_tables, k_tables):
        reason = unfit(x, tables, 0 if tables is None else 2, _REAL)
        if reason or (tables is not None and any(table.dim() != dims for table in tables)):
            return reason or "the tables' shape or gradient"
    return ""


def _ltx2_attention(
    self: Any, attn: Any, x: Tensor, source: Tensor, v: Tensor, mask: Any, q_tables: Any, k_tables: Any
) -> Tensor:
    """q and k may have tables of their own (video attends to audio, audio to video)."""
    rope = _ltx_rope(attn, q_tables, attn.rope_type)
    own = q_tables is not None and k_tables is not None
    k_rope = _ltx_rope(attn, k_tables, attn.rope_type) if own else rope
    q, k, v = _split((attn.to_q(x), attn.to_k(source), v), attn.heads)
    q, k = _normed(attn, q, k, rope, k_rope, across_heads=True)
    return _attend(self, q, k, v, mask, self._parallel_config)


def _ltx2_out(attn: Any, out: Tensor, gates: Tensor | None) -> Tensor:
    """The output projection; gates (B, S, H) of the heads are twice the sigmoid, one where they are zero."""
    if gates is not None:
        gates = 2.0 * torch.sigmoid(gates)
        out = (out.unflatten(2, (attn.heads, -1)) * gates.unsqueeze(-1)).flatten(2, 3)
    return _out(attn, out)


def _ltx2(
    self: Any, attn: Any, hidden_states: Tensor, encoder_hidden_states: Any = None, attention_mask: Any = None,
    query_rotary_emb: Any = None, key_rotary_emb: Any = None,
) -> Any:  # fmt: skip
    x, text, tables = hidden_states, encoder_hidden_states, (query_rotary_emb, key_rotary_emb)
    if reason := _ltx2_unfit(attn, x, *tables):
        return _host(self, reason)(self, attn, x, text, attention_mask, *tables)
    source = x if text is None else text
    mask = _ltx_mask(attn, attention_mask, source)
    gates = None if attn.to_gate_logits is None else attn.to_gate_logits(x)
    out = _ltx2_attention(self, attn, x, source, attn.to_v(source), mask, *tables)
    return _ltx2_out(attn, out, gates)


def _ltx2_perturbed(
    self: Any, attn: Any, hidden_states: Tensor, encoder_hidden_states: Any = None, attention_mask: Any = None,
    query_rotary_emb: Any = None, key_rotary_emb: Any = None, perturbation_mask: Any = None, all_perturbed: Any = None,
) -> Any:  # fmt: skip
    """Perturbed rows take the values as they are in place of attention."""
    x, text, tables = hidden_states, encoder_hidden_states, (query_rotary_emb, key_rotary_emb)
    if reason := _ltx2_unfit(attn, x, *tables):
        perturbation = (perturbation_mask, all_perturbed)
        return _host(self, reason)(self, attn, x, text, attention_mask, *tables, *perturbation)
    source = x if text is None else text
    mask = _ltx_mask(attn, attention_mask, source)
    gates = None if attn.to_gate_logits is None else attn.to_gate_logits(x)
    v = attn.to_v(source)
    if all_perturbed is None and perturbation_mask is not None:
        all_perturbed = not perturbation_mask.any()
    if all_perturbed:
        return _ltx2_out(attn, v, gates)
    out = _ltx2_attention(self, attn, x, source, v, mask, *tables)
    if perturbation_mask is not None:
        out = torch.lerp(v, out, perturbation_mask)
    return _ltx2_out(attn, out, gates)


# ---- Hunyuan, Motif, Joy: image before text, mostly the image alone is rotated ----------------------------------


def _hunyuan_qkv(attn: Any, image: Tensor, text: Tensor | None, tables: Pair) -> Parts:
    """The text is projected by weights of its own, or with the image."""
    rope = Rope(*tables)
    if text is None:
        q, k, v = _split(_qkv(attn, image), attn.heads)
        return *_normed(attn, q, k, rope, rope), v
    if attn.add_q_proj is None:
        q, k, v = _split(_qkv(attn, torch.cat([image, text], dim=1)), attn.heads)
        return *norm_rope_front(q, k, (attn.norm_q, attn.norm_k), rope, fresh=_fresh(attn)), v
    norms = (attn.norm_q, attn.norm_k, attn.norm_added_q, attn.norm_added_k)
    texts = _split(_added_qkv(attn, text), attn.heads)
    return joint(_split(_qkv(attn, image), attn.heads), texts, norms, (rope, None))


def _hunyuan_like(pair_mask: bool = False, motif: bool = False) -> Callable[..., Any]:
    """HunyuanVideo; `pair_mask`: 1.5's mask of pairs of tokens; `motif`: without text the output is one tensor."""

    def call(
        self: Any, attn: Any, hidden_states: Tensor, encoder_hidden_states: Any = None, attention_mask: Any = None,
        image_rotary_emb: Any = None,
    ) -> Any:  # fmt: skip
        text, mask = encoder_hidden_states, attention_mask
        if reason := unfit(hidden_states, image_rotary_emb, 2, _REAL, hidden_states.shape[1]):
            return _host(self, reason)(self, attn, hidden_states, text, mask, image_rotary_emb)
        q, k, v = _hunyuan_qkv(attn, hidden_states, text, image_rotary_emb)
        if pair_mask:
            mask = F.pad(mask, (q.shape[1] - mask.shape[1], 0), value=True).bool()
            mask = mask[:, None, :, None] & mask[:, None, None, :]
        out = _attend(self, q, k, v, mask, self._parallel_config)
        if text is None:
            return (_out(attn, out) if attn.to_out is not None else out) if motif else (out, None)
        image, text = out[:, : -text.shape[1]], out[:, -text.shape[1] :]
        if getattr(attn, "to_out", None) is not None:
            image = _out(attn, image)
        if getattr(attn, "to_add_out", None) is not None:
            text = attn.to_add_out(text)
        return image, text

    return call


def _motif_cross(
    self: Any, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, attention_mask: Any = None,
    image_rotary_emb: Any = None, image_embed_seq_len: int = 0,
) -> Any:  # fmt: skip
    """Cross-attention to the text behind an image's tokens, in which only q is rotated."""
    x, source, tables = hidden_states, encoder_hidden_states, image_rotary_emb
    if reason := unfit(x, tables, 2, _REAL, x.shape[1]):
        return _host(self, reason)(self, attn, x, source, attention_mask, tables, image_embed_seq_len)
    mask = attention_mask
    if mask is not None:
        mask = mask[:, :, :, image_embed_seq_len - source.shape[1] :]
    q, k, v = _split(_qkv(attn, x, source[:, image_embed_seq_len:, :]), attn.heads)
    q, k = _normed(attn, q, k, Rope(*tables), None)
    return _out(attn, _attend(self, q, k, v, mask, self._parallel_config))


def _joy(
    self: Any, attn: Any, hidden_states: Tensor, encoder_hidden_states: Any = None, image_rotary_emb: Any = None,
    **kwargs: Any,
) -> Any:  # fmt: skip
    """q, k and v of a stream are one projection; the text may have tables too."""
    image, text = hidden_states, encoder_hidden_states
    tables: Any
    tables, text_tables = image_rotary_emb or (None, None)
    reason = "no text" if text is None else unfit(image, tables, 2, _REAL, image.shape[1])
    if not reason and text_tables is not None:
        reason = unfit(text, text_tables, 2, _REAL, text.shape[1])
    if reason:
        return _host(self, reason)(self, attn, image, text, image_rotary_emb, **kwargs)
    ropes = (Rope(*tables), None if text_tables is None else Rope(*text_tables))
    norms = (attn.img_attn_q_norm, attn.img_attn_k_norm, attn.txt_attn_q_norm, attn.txt_attn_k_norm)
    texts = _split(attn.txt_attn_qkv(text).chunk(3, dim=-1), attn.heads)
    q, k, v = joint(_split(attn.img_attn_qkv(image).chunk(3, dim=-1), attn.heads), texts, norms, ropes)
    del texts
    out = _attend(self, q, k, v, None, self._parallel_config)
    return attn.img_attn_proj(out[:, : image.shape[1], :]), attn.txt_attn_proj(out[:, image.shape[1] :, :])


# ---- one stream ------------------------------------------------------------------------------------------------


def _z_image(
    self: Any, attn: Any, hidden_states: Tensor, encoder_hidden_states: Any = None, attention_mask: Any = None,
    freqs_cis: Any = None,
) -> Any:  # fmt: skip
    """A complex table (B, S, D / 2)."""
    x, mask = hidden_states, attention_mask
    if reason := unfit(x, (freqs_cis,), 1, tuple(_COMPLEX)):
        return _host(self, reason)(self, attn, x, encoder_hidden_states, mask, freqs_cis)
    rope = _complex_rope(freqs_cis)
    q, k, v = _split(_qkv(attn, x), attn.heads)
    q, k = _normed(attn, q, k, rope, rope)
    if mask is not None and mask.ndim == 2:
        mask = mask[:, None, None, :]
    return _out(attn, _attend(self, q, k, v, mask, self._parallel_config))


def _bria_fibo2(
    self: Any, attn: Any, hidden_states: Tensor, encoder_hidden_states: Any = None, attention_mask: Any = None,
    freqs_cis: Any = None,
) -> Any:  # fmt: skip
    """A complex table (B, S, D / 2) in self-attention, none in cross-attention."""
    x, text, mask = hidden_states, encoder_hidden_states, attention_mask
    if reason := unfit(x, (freqs_cis,), 0 if freqs_cis is None else 1, tuple(_COMPLEX)):
        return _host(self, reason)(self, attn, x, text, mask, freqs_cis)
    rope = None if freqs_cis is None else _complex_rope(freqs_cis)
    q, k, v = _split(_qkv(attn, x, text), attn.heads)
    q, k = _normed(attn, q, k, rope, rope)
    if mask is not None and mask.ndim == 2:
        mask = mask[:, None, None, :]
    return attn.to_out[0](_attend(self, q, k, v, mask, self._parallel_config))


def _lumina2(
    self: Any, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, attention_mask: Any = None,
    image_rotary_emb: Any = None, base_sequence_length: Any = None,
) -> Any:  # fmt: skip
    """A complex table (B, S, D / 2); fewer heads of k and v, repeated for torch's own attention."""
    x, text = hidden_states, encoder_hidden_states
    if reason := unfit(x, (image_rotary_emb,), 1, tuple(_COMPLEX)):
        return _host(self, reason)(self, attn, x, text, attention_mask, image_rotary_emb, base_sequence_length)
    rope = _complex_rope(image_rotary_emb)
    q, k, v = _qkv(attn, x, text)
    q, k, v = _heads((q, k, v), q.shape[-1] // attn.heads)
    q, k = _normed(attn, q, k, rope, rope)
    scale = attn.scale
    if base_sequence_length is not None:
        scale = math.sqrt(math.log(x.shape[1], base_sequence_length)) * scale
    if (repeats := attn.heads // k.shape[2]) > 1:
        k, v = (part.repeat_interleave(repeats, dim=2) for part in (k, v))
    if attention_mask is not None:
        attention_mask = attention_mask.bool().view(x.shape[0], 1, 1, -1)
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask, scale=scale)
    return _out(attn, out.transpose(1, 2).flatten(2).type_as(q))


def _cosmos(
    self: Any, attn: Any, hidden_states: Tensor, encoder_hidden_states: Any = None, attention_mask: Any = None,
    image_rotary_emb: Any = None,
) -> Any:  # fmt: skip
    """Halves rotated in self-attention; no backend of the processor's own."""
    x, text, tables = hidden_states, encoder_hidden_states, image_rotary_emb
    count, rows = (0, None) if tables is None else (2, x.shape[1])
    if reason := "export to ONNX" if torch.onnx.is_in_onnx_export() else unfit(x, tables, count, _REAL, rows):
        return _host(self, reason)(self, attn, x, text, attention_mask, tables)
    rope = None if tables is None else Rope(tables[0], tables[1], interleaved=False)
    q, k, v = _split(_qkv(attn, x, text), attn.heads)
    q, k = _normed(attn, q, k, rope, rope)
    out = _names(self)["dispatch_attention_fn"](q, k, v, attn_mask=attention_mask, dropout_p=0.0, is_causal=False)
    return _out(attn, out.flatten(2, 3).type_as(q))


# ---- what there is -----------------------------------------------------------------------------------------

# By the class name of the host's processor: our `__call__`, and the fingerprints of those that it stands for, which
# are those of diffusers 0.42 and of the versions since 0.36 that do the same.
_PROCESSORS: dict[str, tuple[Callable[..., Any], str]] = {
    "FluxAttnProcessor": (_flux_like(contiguous=True), "b500bbed0e50eefa 7e3e63df5c741293"),
    "LongCatImageAttnProcessor": (_flux_like(contiguous=False), "58a704f87481e26b"),
    "OvisImageAttnProcessor": (_flux_like(contiguous=False), "58a704f87481e26b"),
    "BriaAttnProcessor": (_flux_like(contiguous=False), "58a704f87481e26b"),
    "BriaFiboAttnProcessor": (_flux_like(contiguous=True), "7e3e63df5c741293"),
    "Flux2AttnProcessor": (_flux2, "2cacd20b58b5e9a2 9de89788b0f0fbc8"),
    "Flux2KVAttnProcessor": (_flux2_kv, "93757d455f08c8ae 20f4df79b80d732a"),
    "Flux2ParallelSelfAttnProcessor": (_flux2_parallel, "989ecd19f3dadda6 4bbf8e0dc858ad21"),
    "Flux2KVParallelSelfAttnProcessor": (_flux2_kv_parallel, "6e1346af58a90d8f aabb6298c6039f3b"),
    "Flux3AttnProcessor": (_flux3, "de1d574dcf59b411"),
    "QwenDoubleStreamAttnProcessor2_0": (_qwen, "f9fb82b04a566e85 c7badf506f8fab3f"),
    # Also Wan-Animate's and ChronoEdit's, which have the same name and code.
    "WanAttnProcessor": (_wan_like(parallel_everywhere=False), "c4356a92aa98cfef"),
    "SkyReelsV2AttnProcessor": (_wan_like(parallel_everywhere=True), "d26674ae4312e024"),
    "HunyuanVideoAttnProcessor2_0": (_hunyuan_like(), "91dde12c4bbd4263"),
    "HunyuanImageAttnProcessor": (_hunyuan_like(), "91dde12c4bbd4263"),
    "HunyuanVideo15AttnProcessor2_0": (_hunyuan_like(pair_mask=True), "7fb661938874fcd3"),
    "MotifVideoAttnProcessor2_0": (_hunyuan_like(motif=True), "07aed65170beffa8"),
    "JoyImageAttnProcessor": (_joy, "2dbbb6174355b41f"),
    "HeliosAttnProcessor": (_helios, "9b0327bf9806e683"),
    "MotifVideoCrossAttnProcessor2_0": (_motif_cross, "3aee1702fd83afcc"),
    "LTXVideoAttnProcessor": (_ltx, "a7ec6fcb4eb00797"),
    "LTX2AudioVideoAttnProcessor": (_ltx2, "319b1024ffa15a02"),
    "LTX2PerturbedAttnProcessor": (_ltx2_perturbed, "daa12f453bc61109"),
    "ZSingleStreamAttnProcessor": (_z_image, "4fa3368192f216d6"),
    "BriaFibo2AttnProcessor": (_bria_fibo2, "7255507e33e7182c"),
    "Lumina2AttnProcessor2_0": (_lumina2, "9d94bee29badfe30"),
    "CosmosAttnProcessor2_0": (_cosmos, "55787c3f823f956f"),
}

FUSED: dict[str, Callable[..., Any]] = {name: call for name, (call, _) in _PROCESSORS.items()}
"""The class name of a host's processor: our `__call__` for it."""

FINGERPRINTS: dict[str, frozenset[str]] = {name: frozenset(them.split()) for name, (_, them) in _PROCESSORS.items()}
"""The fingerprints of the hosts' `__call__`s that those stand for; another one means another version of the host."""


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
    """A syntax tree as nested tuples of what is in it; what is empty is left out, for versions differ there."""
    if isinstance(node, list):
        return tuple(_plain(item) for item in node if not _is_docstring(item))
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = ((name, value) for name, value in ast.iter_fields(node) if name not in _NO_MATTER)
    return type(node).__name__, *((name, _plain(value)) for name, value in fields if value not in (None, []))


def _is_docstring(node: Any) -> bool:
    """A string on a line of its own, which does nothing wherever it stands."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
