"""Processors of diffusers that rotate in the midst of their `__call__`, with no function for it: ours for all of it.

Each stands for the host's `__call__` whose fingerprint is in `FINGERPRINTS`: same arguments, same bits.
The docstring's first line says what the host's tables are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...api import apply_rope
from .counting import note
from .ropes import is_pair, misfit, promoted, rows_misfit
from .twins import host_of


def ideogram4(self: Any, attn: Any, hidden_states: Tensor, attention_mask: Any, image_rotary_emb: Any) -> Any:
    """(cos, sin), (B, S, D) each; halves, products and result in the wider dtype of q and tables"""
    if not is_pair(image_rotary_emb):
        return _host(
            self, "arguments that jitrope does not know", attn, hidden_states, attention_mask, image_rotary_emb
        )
    q, k, v = (
        project(hidden_states).unflatten(-1, (attn.num_heads, attn.head_dim))
        for project in (attn.to_q, attn.to_k, attn.to_v)
    )
    q, k = attn.norm_q(q), attn.norm_k(k)
    cos, sin = image_rotary_emb
    reason = misfit(q, cos, sin) or rows_misfit(q, "bshd", cos, 3, width=1)
    if reason or k.shape != q.shape or k.dtype != q.dtype:
        return _host(self, reason or "q and k differ", attn, hidden_states, attention_mask, image_rotary_emb)
    note("jitrope", count=2)
    wide = torch.promote_types(q.dtype, cos.dtype)
    q, k = q.to(wide), k.to(wide)
    q, k = _rotated(q, k, cos, sin, rounding=promoted(q, cos))
    out = _attention(self, q, k, v, attn_mask=attention_mask)
    return attn.to_out[0](out.flatten(2, 3))


def cosmos3(self: Any, attn: Any, und_seq: Tensor, gen_seq: Tensor, rotary_emb: Any) -> Any:
    """(cos, sin), (S, D) each, in the model's dtype, of packed tokens; halves, all in that dtype"""
    counts = (attn.num_attention_heads, attn.num_key_value_heads, attn.num_key_value_heads)
    streams = (
        (und_seq, (attn.to_q, attn.to_k, attn.to_v)),
        (gen_seq, (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)),
    )
    (q_und, k_und, v_und), (q_gen, k_gen, v_gen) = (
        [project(x).view(-1, count, attn.head_dim) for project, count in zip(projections, counts)]
        for x, projections in streams
    )
    q_und, k_und, q_gen, k_gen = (
        attn.norm_q(q_und),
        attn.norm_k(k_und),
        attn.norm_added_q(q_gen),
        attn.norm_added_k(k_gen),
    )
    k_seen = k_und if attn.k_norm_und_for_gen is None else attn.k_norm_und_for_gen(k_und)
    cos_und, sin_und, cos_gen, sin_gen = rotary_emb
    for x, cos, sin in ((q_und, cos_und, sin_und), (q_gen, cos_gen, sin_gen)):
        reason = misfit(x[None], cos, sin) or rows_misfit(x[None], "bshd", cos, 2, width=1)
        if reason or cos.dtype != x.dtype:
            return _host(self, reason or "the tables' dtype", attn, und_seq, gen_seq, rotary_emb)
    note("jitrope", count=5)
    words: dict[str, Any] = {"layout": "thd", "rounding": "dtype"}
    q_und, k_und = _rotated(q_und, k_und, cos_und, sin_und, **words)
    k_seen = apply_rope(k_seen, None, cos_und, sin_und, **words)[0]
    q_gen, k_gen = _rotated(q_gen, k_gen, cos_gen, sin_gen, **words)

    # The text attends to itself, causally; the picture attends to both.
    text = _attention(self, q_und[None], k_und[None], v_und[None], is_causal=True, enable_gqa=True)
    keys, values = torch.cat((k_seen, k_gen)), torch.cat((v_und, v_gen))
    picture = _attention(self, q_gen[None], keys[None], values[None], is_causal=False, enable_gqa=True)
    return attn.to_out(text[0].flatten(-2, -1)), attn.to_add_out(picture[0].flatten(-2, -1))


INLINE: dict[str, Callable[..., Any]] = {"Cosmos3AttnProcessor": cosmos3, "Ideogram4AttnProcessor": ideogram4}

FINGERPRINTS: dict[str, frozenset[str]] = {
    "Cosmos3AttnProcessor": frozenset({"f9428f5954e77c03"}),
    "Ideogram4AttnProcessor": frozenset({"7b11287e1c65732f"}),
}


def _host(self: Any, reason: str, *arguments: Any) -> Any:
    note("host", reason)
    return host_of(type(self)).__call__(self, *arguments)


def _rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **words: Any) -> tuple[Tensor, Tensor]:
    return apply_rope(q, k, cos, sin, **words)  # type: ignore[return-value]


def _attention(self: Any, q: Tensor, k: Tensor, v: Tensor, **words: Any) -> Tensor:
    dispatch = host_of(type(self)).__call__.__globals__["dispatch_attention_fn"]
    backend, parallel = self._attention_backend, self._parallel_config
    return dispatch(q, k, v, backend=backend, parallel_config=parallel, **words)  # type: ignore[no-any-return]
