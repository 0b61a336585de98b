"""Whole `__call__`s for attention processors: RMSNorm of q and k, rope and the joining of two streams in one launch.

Each does what the host's does: same arguments, same projections, same attention call, and the same result bit for bit.
It is used where the text of the host's own is one that it was written for (`COPIES`). A call that it refuses
(autocast, other norms or tables) goes to the host's. It writes only into tensors of its own.

The first argument is the module of the host's class: its functions are looked up there in each call, because another
library may have replaced some. Then come the host's parameters, under its names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...base.errors import InvalidInput
from .norms import Norms, Parts, Words, beside, joint, norm_rope, norms_of
from .ropes import HALF, HEADS, PAIRS, ROWS, TURNS, WORDS, of_pairs, pair

# ---- shared by processors --------------------------------------------------------------------------------


def _one(norms: Norms, qkv: Parts, rope: Words) -> Parts:
    """q and k normalised and rotated, and v."""
    return *norm_rope(norms, *qkv[:2], rope), qkv[2]


def _attended(host: Any, processor: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, parallel: bool = True) -> Tensor:
    """The host's attention: (B, S, H * D)."""
    config = processor._parallel_config if parallel else None
    words = {"attn_mask": mask, "backend": processor._attention_backend, "parallel_config": config}
    out: Tensor = host.dispatch_attention_fn(q, k, v, dropout_p=0.0, is_causal=False, **words)
    return out.flatten(2, 3).to(q.dtype)


def _heads(tensors: Sequence[Tensor], attn: Any) -> Any:
    """Each as (B, S, H, D); under tensor parallelism H is this rank's number of heads."""
    dim = getattr(attn, "head_dim", 0) or attn.inner_dim // attn.heads
    return tuple(x.unflatten(-1, (-1, dim)) for x in tensors)


def _split(tensors: Sequence[Tensor], attn: Any) -> Any:
    return tuple(x.unflatten(2, (attn.heads, -1)) for x in tensors)


def _qkv(attn: Any, x: Tensor, source: Tensor | None = None) -> Parts:
    """The projections of x; keys and values come from `source`, if given."""
    source = x if source is None else source
    return attn.to_q(x), attn.to_k(source), attn.to_v(source)


def _added_qkv(attn: Any, x: Tensor) -> Parts:
    return attn.add_q_proj(x), attn.add_k_proj(x), attn.add_v_proj(x)


def _out(attn: Any, x: Tensor) -> Tensor:
    """The output projection and its dropout, if there is one."""
    for module in attn.to_out:
        x = module(x)
    return x


# ---- the processors ----------------------------------------------------------------------------------------


def _flux(
    project: bool,
    copy: bool,
    host: Any,
    self: Any,
    attn: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Any = None,
    attention_mask: Any = None,
    image_rotary_emb: Any = None,
) -> Any:
    """FLUX of one or two streams, text before image. project: one stream too; copy: two before they are projected."""
    text = encoder_hidden_states
    added = () if attn.added_kv_proj_dim is None else ("added_q", "added_k")
    norms, tables = norms_of(hidden_states, attn, *added, "q", "k"), pair(image_rotary_emb)
    projected = host._get_qkv_projections(attn, hidden_states, text)
    projected = _heads(projected if added else projected[:3], attn)
    tokens = sum(q.shape[1] for q in projected[::3])
    rope = PAIRS.words(projected[0], tables, tokens)
    q, k, v = joint(norms, projected[3:], projected[:3], rope) if added else _one(norms, projected, rope)
    del projected  # attention needs memory
    out = _attended(host, self, q, k, v, attention_mask)
    if text is None:
        return _out(attn, out) if project else out
    text, image = out.split_with_sizes([text.shape[1], out.shape[1] - text.shape[1]], dim=1)
    if copy:
        text, image = text.contiguous(), image.contiguous()
    return _out(attn, image), attn.to_add_out(text)


def _flux2_parallel(
    host: Any, self: Any, attn: Any, hidden_states: Tensor, attention_mask: Any = None, image_rotary_emb: Any = None
) -> Any:
    """q, k and v are strided views of one projection, which also gives the MLP's input."""
    norms, tables = norms_of(hidden_states, attn, "q", "k"), pair(image_rotary_emb)
    qkv_mlp = attn.to_qkv_mlp_proj(hidden_states)
    width = 3 * attn.inner_dim
    width = qkv_mlp.shape[-1] * width // (width + attn.mlp_hidden_dim * attn.mlp_mult_factor)  # of this rank
    projected, mlp = torch.split(qkv_mlp, [width, qkv_mlp.shape[-1] - width], dim=-1)
    qkv = _heads(projected.chunk(3, dim=-1), attn)
    q, k, v = _one(norms, qkv, PAIRS.words(qkv[0], tables))
    out = _attended(host, self, q, k, v, attention_mask)
    return attn.to_out(torch.cat([out, attn.mlp_act_fn(mlp)], dim=-1))


def _qwen(
    masks: bool,
    host: Any,
    self: Any,
    attn: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Any = None,
    encoder_hidden_states_mask: Any = None,
    attention_mask: Any = None,
    image_rotary_emb: Any = None,
) -> Any:
    """Qwen-Image: tables of image and of text; attention takes text before image. masks: it masks the text."""
    text, mask = encoder_hidden_states, attention_mask
    if text is None or (masks and mask is not None):
        raise InvalidInput("no text, or a mask")  # the host refuses that too
    if masks and encoder_hidden_states_mask is not None:
        ones = torch.ones(hidden_states.shape[:2], dtype=torch.bool, device=hidden_states.device)
        mask = torch.cat([encoder_hidden_states_mask, ones], dim=1)[:, None, None, :]
    norms, tables = norms_of(hidden_states, attn, "added_q", "added_k", "q", "k"), pair(image_rotary_emb)
    texts, images = _heads(_added_qkv(attn, text), attn), _heads(_qkv(attn, hidden_states), attn)
    of_image, of_text = (TURNS.words(x[0], (table,)) for x, table in zip((images, texts), tables))
    q, k, v = joint(norms, texts, images, beside(of_text, of_image))
    del texts, images
    out = _attended(host, self, q, k, v, mask)
    image, text = out[:, text.shape[1] :], out[:, : text.shape[1]]
    return _out(attn, image.contiguous()), attn.to_add_out(text.contiguous())


def _wan(
    crossed: bool,
    host: Any,
    self: Any,
    attn: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Any = None,
    attention_mask: Any = None,
    rotary_emb: Any = None,
) -> Any:
    """Wan: norms across heads, rope in self-attention alone. crossed: attention to text is parallel too.

    With an image, whose tokens come before 512 of text, a second attention uses its keys and values.
    """
    text, words = encoder_hidden_states, {"across_heads": True}
    norms, norms_of_image, image = norms_of(hidden_states, attn, "q", "k", **words), None, None
    tables = None if rotary_emb is None else of_pairs(*pair(rotary_emb))
    if attn.add_k_proj is not None:
        norms_of_image, length = norms_of(hidden_states, attn, "added_k", **words), text.shape[1] - 512
        image, text = text[:, :length], text[:, length:]
    q, k, v = _split(host._get_qkv_projections(attn, hidden_states, text), attn)
    rope: Words = {} if tables is None else HALF.words(q, tables)
    q, k = norm_rope(norms, q, k, rope)
    parallel = crossed or text is None
    out = _attended(host, self, q, k, v, attention_mask, parallel)
    if norms_of_image is not None:
        k, v = _split(host._get_added_kv_projections(attn, image), attn)
        k, _ = norm_rope(norms_of_image, k, None, {})
        out = out + _attended(host, self, q, k, v, None, parallel)
    return _out(attn, out)


def _ltx(
    host: Any,
    self: Any,
    attn: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Any = None,
    attention_mask: Any = None,
    image_rotary_emb: Any = None,
) -> Any:
    """LTX-Video: as Wan, with tables (B, S, H * D): each head has its own."""
    source, mask = hidden_states if encoder_hidden_states is None else encoder_hidden_states, attention_mask
    if mask is not None:
        mask = attn.prepare_attention_mask(mask, source.shape[1], source.shape[0])
        mask = mask.view(source.shape[0], attn.heads, -1, mask.shape[-1])
    tables = None if image_rotary_emb is None else _split(pair(image_rotary_emb), attn)
    norms = norms_of(hidden_states, attn, "q", "k", across_heads=True)
    q, k, v = _split(_qkv(attn, hidden_states, source), attn)
    rope: Words = {} if tables is None else HEADS.words(q, tables)
    q, k = norm_rope(norms, q, k, rope)
    return _out(attn, _attended(host, self, q, k, v, mask))


def _hunyuan(
    host: Any,
    self: Any,
    attn: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Any = None,
    attention_mask: Any = None,
    image_rotary_emb: Any = None,
) -> Any:
    """HunyuanVideo: image before text, which is not rotated, and has its own weights or the image's."""
    image, text, tables = hidden_states, encoder_hidden_states, pair(image_rotary_emb)
    rows = 0 if text is None else text.shape[1]
    added = ("added_q", "added_k") if text is not None and attn.add_q_proj is not None else ()
    norms = norms_of(image, attn, "q", "k", *added)
    if added:
        images, texts = _split(_qkv(attn, image), attn), _split(_added_qkv(attn, text), attn)
        rope = PAIRS.words(images[0], tables)
        cos, sin = (table[:1].expand(rows, -1) for table in (torch.ones_like(tables[0]), torch.zeros_like(tables[1])))
        q, k, v = joint(norms, images, texts, beside(rope, {**rope, "cos": cos, "sin": sin}))
        del images, texts
    else:
        q, k, v = _split(_qkv(attn, image if text is None else torch.cat([image, text], dim=1)), attn)
        rope = PAIRS.words(q, tables, image.shape[1])
        if rows:
            rope["cos"] = F.pad(rope["cos"], (0, 0, 0, rows), value=1.0)
            rope["sin"] = F.pad(rope["sin"], (0, 0, 0, rows))
        q, k = norm_rope(norms, q, k, rope)
    out = _attended(host, self, q, k, v, attention_mask)
    if text is None:
        return out, None
    image, text = out[:, :-rows], out[:, -rows:]
    if getattr(attn, "to_out", None) is not None:
        image = _out(attn, image)
    if getattr(attn, "to_add_out", None) is not None:
        text = attn.to_add_out(text)
    return image, text


def _z_image(
    host: Any,
    self: Any,
    attn: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Any = None,
    attention_mask: Any = None,
    freqs_cis: Any = None,
) -> Any:
    """Z-Image."""
    if freqs_cis is None or encoder_hidden_states is not None:
        raise InvalidInput(WORDS)
    norms, mask = norms_of(hidden_states, attn, "q", "k"), attention_mask
    qkv = _split(_qkv(attn, hidden_states), attn)
    q, k, v = _one(norms, qkv, ROWS.words(qkv[0], (freqs_cis,)))
    del qkv  # attention needs memory
    if mask is not None and mask.ndim == 2:
        mask = mask[:, None, None, :]
    return _out(attn, _attended(host, self, q, k, v, mask))


# ---- which of them stands for which text of the host's `__call__` -------------------------------------------

_TEXTS: dict[Callable[..., Any], str] = {  # in the order of diffusers' versions, from 0.36 to 0.42
    partial(_flux, False, False): "8646542a4f433943",
    partial(_flux, False, True): "6576b68b6158e83b d5b36134887ebe45",
    partial(_flux, True, False): "fa5f37f1f3b507c8 a92fd9cfb896bedb 2106c36979e28f30",
    _flux2_parallel: "66dee2df7e0ec4e0 5850a55d0e2a6b05 18a20dca47451835",
    partial(_qwen, False): "04a0b19727c265e5",
    partial(_qwen, True): "ac06e31720cc08fc 2a0c20db8321b4d4 e6dfad13458f15b3",
    partial(_wan, True): "3cb730668e365536 aa8d7b3940827e84 be927e58ea7fba80",  # Wan in 0.36; SkyReels V2
    partial(_wan, False): "184ebefc0184bba7 a000dc173c7fbf59 13c09feedcfe814a",  # ChronoEdit; Wan since 0.37
    _hunyuan: "79744a7e109e2f2b 9d2e9a44e1dc2bf7",
    _ltx: "e45c9370c2173fdb cac2aabbea3a63db",
    _z_image: "0b99aba335ba3000 f8f65d350a617957",
}

COPIES = {text: copy for copy, texts in _TEXTS.items() for text in texts.split()}

FUSED = {"Flux", "Flux2", "Flux2ParallelSelf", "QwenDoubleStream", "Wan", "SkyReelsV2"}
FUSED |= {"HunyuanVideo", "LTXVideo", "ZSingleStream"}
"""The classes with those texts, by their names up to "AttnProcessor"."""
