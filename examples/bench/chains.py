"""Inputs between projection and attention, and the stages of models in plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from jitrope.base.views import E8M0, FORMATS

from . import peers as others
from .harness import DEVICE, Call, bf16, twice
from .rope import Shape

FP4, FP8 = FORMATS["fp4"].dtype, torch.float8_e4m3fn
PAGE = 16
RANKS = 4
SECTIONS = (24, 20, 20)
NORMED, ROTARY = 512, 64
"""Elements that are normalised and rotated, of k of latent attention: all of DeepSeek-V4's 512."""


class Inputs(NamedTuple):
    """bf16 activations, weights and biases; fp32 half-width tables (S, rotary_dim / 2)."""

    q: Tensor  # (B, S, Hq, D); k and v (B, S, Hk, D)
    k: Tensor
    v: Tensor
    cos: Tensor
    sin: Tensor
    freqs: Tensor  # (S, 1, 1, rotary_dim), each angle twice
    weights: tuple[Tensor, Tensor]  # of q and k, (D,)
    biases: tuple[Tensor, Tensor]
    ids: Tensor  # (3, S)
    caches: tuple[Tensor, ...]  # k's and v's, (pages, PAGE, Hk, D) in e4m3, and the slots
    out: tuple[Tensor, ...]  # q, k in e4m3 and v, (B, H, S, D)
    cu_seqlens: Tensor  # (4,), of packed sequences
    head_weights: Tensor  # (B, S, Hq), fp32


def tables(rows: int, rotary_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return cos, sin and freqs of random angles."""
    angles = torch.rand(rows, rotary_dim // 2, device=DEVICE) * 2 * torch.pi
    return angles.cos(), angles.sin(), twice(angles)[:, None, None]


def offsets(tokens: int) -> Tensor:
    """Return offsets of three sequences of 0 or more tokens, each a multiple of 4."""
    return torch.tensor([tokens * i * i // 9 // 4 * 4 for i in range(3)] + [tokens], dtype=torch.int32, device=DEVICE)


def inputs(shape: Shape, rotary_dim: int) -> Inputs:
    """Return random inputs."""
    b, s, hq, hk, d = shape
    weights, biases = ((bf16(d) / 8 + one, bf16(d) / 8 + one) for one in (1, 0))
    ids, slots = torch.randint(s, (3, s), device=DEVICE), torch.randperm(-(-b * s // PAGE) * PAGE, device=DEVICE)
    caches = [torch.zeros(len(slots) // PAGE, PAGE, hk, d, device=DEVICE).to(FP8) for _ in range(2)]
    out = [torch.empty(b, h, s, d, device=DEVICE, dtype=dtype) for h, dtype in ((hq, FP8), (hk, FP8), (hk, None))]
    out[2] = out[2].bfloat16()
    q, k, v = (bf16(b, s, h, d) for h in (hq, hk, hk))
    places = (*caches, slots[: b * s])
    head_weights = torch.rand(b, s, hq, device=DEVICE) + 0.5
    return Inputs(q, k, v, *tables(s, rotary_dim), weights, biases, ids, places, tuple(out), offsets(s), head_weights)


def across(shape: Shape, rotary_dim: int) -> Inputs:
    """Return random inputs with a weight for each element of all heads."""
    own = inputs(shape, rotary_dim)
    q_weight, k_weight = own.weights
    return own._replace(weights=(q_weight.repeat(shape[2]), k_weight.repeat(shape[3])))


def gated(shape: Shape, rotary_dim: int) -> Inputs:
    """Return random inputs whose q is a view beside its gate."""
    b, s, hq, _, d = shape
    return inputs(shape, rotary_dim)._replace(q=bf16(b, s, hq, 2 * d)[..., :d])


def fused(shape: Shape, rotary_dim: int) -> Inputs:
    """Return random inputs whose q is a projection's output: heads of q with their gates, of k and of v."""
    b, s, hq, hk, d = shape
    return inputs(shape, rotary_dim)._replace(q=bf16(b, s, 2 * hq + 2 * hk, d))


def sequence_first(shape: Shape, rotary_dim: int) -> Inputs:
    """Return random inputs with q, k and v as (S, B, H, D)."""
    b, s, hq, hk, d = shape
    q, k, v = (bf16(s, b, h, d) for h in (hq, hk, hk))
    return inputs(shape, rotary_dim)._replace(q=q, k=k, v=v)


def latent(shape: Shape, rotary_dim: int) -> Inputs:
    """Return random inputs of latent attention: k is kv, with values of 128, and v is k_pe."""
    b, s, _, hk, d = shape
    own = inputs(shape, rotary_dim)
    return own._replace(k=bf16(b, s, hk, d - rotary_dim + 128), v=bf16(b, s, 1, rotary_dim))


def latent_packed(shape: Shape, rotary_dim: int, cp_size: int = 1) -> Inputs:
    """Return the same as (T, H, D), a rank's tokens of three packed sequences."""
    own, tokens = latent((1, *shape[1:]), rotary_dim), shape[1] * cp_size
    q, k, v = (x[0] for x in (own.q, own.k, own.v))
    cos, sin, freqs = tables(tokens, rotary_dim)
    return own._replace(q=q, k=k, v=v, cos=cos, sin=sin, freqs=freqs, cu_seqlens=offsets(tokens))


def absorbed(shape: Shape, rotary_dim: int) -> Inputs:
    """Return random inputs of a decode step of latent attention: q ends with its rotated part, k is k_pe, v is c_kv.

    There is one cache, (pages, PAGE, D), with rows [c_kv | k_pe]. v has pieces of k_pe's size.
    """
    own = inputs(shape, rotary_dim)
    c_kv, k_pe = own.k.split([shape[-1] - rotary_dim, rotary_dim], -1)
    cache = torch.zeros(own.caches[0].shape[0], PAGE, shape[-1], device=DEVICE, dtype=torch.bfloat16)
    v = c_kv.squeeze(2).unflatten(-1, (-1, rotary_dim))
    return own._replace(k=k_pe, v=v, caches=(cache, own.caches[2]))


def records(shape: Shape, rotary_dim: int, fp4: bool = False) -> Inputs:
    """Return random inputs whose caches are views of DeepSeek-V3.2's records: latents in e4m3, their scales, k_pe.

    fp4: of FlashInfer's records instead, with latents in NVFP4 and k_pe in e4m3.
    """
    own = inputs(shape, rotary_dim)
    sizes, dtypes = ((256, 32, 64), (FP4, FP8, FP8)) if fp4 else ((512, 16, 128), (FP8, torch.float32, torch.bfloat16))
    whole = torch.zeros(*own.caches[0].shape[:3], sum(sizes), device=DEVICE, dtype=torch.uint8)
    return own._replace(caches=(*[x.view(y) for x, y in zip(whole.split(sizes, -1), dtypes)], own.caches[2]))


def newer_records(shape: Shape, rotary_dim: int) -> Inputs:
    """Return the same with DeepSeek-V4's records. The scales, powers of two, are behind the rows of a page."""
    own = inputs(shape, rotary_dim)
    pages, *of_page, _ = own.caches[0].shape
    sizes = [math.prod(of_page) * n for n in (576, 8)]
    whole = torch.zeros(pages, sum(sizes), device=DEVICE, dtype=torch.uint8)
    rows, scales = (x.unflatten(-1, (*of_page, -1)) for x in whole.split(sizes, -1))
    parts = rows[..., :448].view(FP8), scales[..., :7].view(E8M0), rows[..., 448:].view(torch.bfloat16)
    return own._replace(caches=(*parts, own.caches[2]))


# ---- stages ----------------------------------------------------------------------------------------------


def rms(x: Tensor, weight: Tensor | None = None) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


def layer(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def centered(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm with the factor 1 + weight."""
    return (rms(x.float()) * (1 + weight.float())).to(x.dtype)


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, rotary_dim: int = 0) -> Tensor:
    """x (B, S, H, D), rotated from its first element on."""
    cos, sin = cos[None, :, None], sin[None, :, None]
    n = rotary_dim or x.shape[-1]
    return torch.cat((others.rotate(x[..., :n], cos, sin, interleaved), x[..., n:]), -1)


def scaled(x: Tensor, *axes: int) -> tuple[Tensor, Tensor]:
    """e4m3, and the scale of each head, or of those axes too."""
    scale = x.float().abs().amax((*axes, -1), keepdim=True).clamp(min=1e-12) / 448
    return (x * (1 / scale)).to(FP8), scale.squeeze((*axes, -1))


def hadamard(x: Tensor) -> Tensor:
    """Times the orthogonal Hadamard matrix."""
    y = x.float()
    for bit in range(x.shape[-1].bit_length() - 1):
        a, b = y.unflatten(-1, (-1, 2, 1 << bit)).unbind(-2)
        y = torch.stack((a + b, a - b), -2).flatten(-3)
    return y / torch.tensor(x.shape[-1]).sqrt()


# ---- models ----------------------------------------------------------------------------------------------


def both(
    norm: Callable[[Tensor, Tensor, Tensor], Tensor],
    after: bool = False,
    interleaved: bool = False,
    v: bool = False,
    rotary_dim: int = 0,
) -> Call:
    """norm(x, weight, bias) of q and k before or after the rotation, and v's norm."""

    def call(x: Inputs) -> Any:
        parts = zip((x.q, x.k), x.weights, x.biases)
        turn = partial(turned, cos=x.cos, sin=x.sin, interleaved=interleaved, rotary_dim=rotary_dim)
        made = [norm(turn(y), *own) if after else turn(norm(y, *own)) for y, *own in parts]
        return (*made, rms(x.v)) if v else tuple(made)

    return call


def qwen3_next(x: Inputs) -> Any:
    """q, k, v and the gate of a projection; 64 elements of a head are rotated."""
    heads = x.k.shape[2]
    q, k, v = x.q.split([x.q.shape[2] - 2 * heads, heads, heads], 2)
    q, gate = q.unflatten(2, (-1, 2)).unbind(3)
    q, k = (turned(centered(y, w), x.cos, x.sin, False, 64) for y, w in zip((q, k), x.weights))
    return q, k, v.contiguous(), gate


def text_tokens(x: Inputs) -> int:
    """The number of first tokens that are text."""
    return min(256, x.q.shape[1] // 4)


def cogview4(x: Inputs) -> Any:
    """LayerNorm without weights; the first tokens are text, which is not rotated."""
    n = text_tokens(x)
    parts = [layer(y, eps=1e-5).split([n, y.shape[1] - n], 1) for y in (x.q, x.k)]
    cos, sin = (table[: x.q.shape[1] - n] for table in (x.cos, x.sin))
    return tuple([torch.cat((text, turned(image, cos, sin)), 1) for text, image in parts])


def te_mha(x: Inputs) -> Any:
    """RMSNorm of rotated heads, (S, B, H, D)."""
    angles = x.freqs[..., : x.freqs.shape[-1] // 2]
    return tuple([rms(others.rotate(y, angles.cos(), angles.sin()), w) for y, w in zip((x.q, x.k), x.weights)])


def qwen3_vl(x: Inputs) -> Any:
    """Rows of three axes, alternating; k and v to the pages; a scale for each head of q."""
    pair = torch.arange(x.cos.shape[-1], device=x.q.device)
    axis = pair % 3 * (pair < 3 * SECTIONS[1])  # the second and third section are equally long
    cos, sin = (table[x.ids[axis], pair[:, None]].T for table in (x.cos, x.sin))
    q, k = (others.rotate(rms(y, w), cos[:, None], sin[:, None]) for y, w in zip((x.q, x.k), x.weights))
    *caches, slots = x.caches
    for cache, y, scale in zip(caches, (k, x.v), (0.05, 0.02)):
        units = (y.float() * (1 / scale)).clamp(-448, 448).to(FP8)
        cache.flatten(0, 1).view(torch.uint8)[slots] = units.view(torch.uint8).flatten(0, 1)
    return scaled(q)


def as_it_is(x: Tensor) -> Tensor:
    return x


def indexer(x: Inputs, transform: Callable[[Tensor], Tensor] = as_it_is) -> Any:
    """The queries, whose scales are times the weights of heads, and the one key with its LayerNorm."""
    q, k = (turned(y, x.cos, x.sin, False, 64) for y in (x.q, layer(x.k, x.weights[1], x.biases[1])))
    (values, scale), of_k = scaled(transform(q)), scaled(transform(k))
    return [values, scale * x.head_weights, *of_k]


def operands(x: Inputs, *axes: int, transform: Callable[[Tensor], Tensor] = as_it_is) -> Any:
    """q and k in e4m3 and v, heads first. A head has the scale of a token, or with axes of those, which v has too."""
    turned_pair = (turned(rms(y, w), x.cos, x.sin, True) for y, w in zip((x.q, x.k), x.weights))
    q, k = (scaled(transform(y), *axes) for y in turned_pair)
    v = scaled(x.v, *axes) if axes else [x.v]
    return [*(y.transpose(1, 2).contiguous() for y in (q[0], k[0], v[0])), q[1], k[1], *v[1:]]


def wan(x: Inputs) -> Any:
    """The mean is over all heads; q, k and v as `RANKS` ranks exchange them."""
    q, k = (F.rms_norm(y.flatten(2), w.shape, w, 1e-6).view_as(y) for y, w in zip((x.q, x.k), x.weights))
    parts = (turned(q, x.cos, x.sin, True), turned(k, x.cos, x.sin, True), x.v)
    return [y.unflatten(2, (RANKS, -1)).permute(2, 0, 1, 3, 4).contiguous() for y in parts]


def mla(x: Inputs, rows: Callable[[Inputs], Tensor] | None = None) -> Any:
    """q, k and v of latent attention, from interleaved pairs to halves. rows: of each token; default: in order."""
    cos, sin = ((table if rows is None else table[rows(x)])[:, None] for table in (x.cos, x.sin))
    n, rotary_dim = x.q.shape[-1] - x.v.shape[-1], x.v.shape[-1]
    first, v = x.k.split([n, x.k.shape[-1] - n], -1)
    q_pe, k_pe = (
        others.rotate(y.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), cos, sin, False)
        for y in (x.q[..., n:], x.v)
    )
    k = torch.cat((first, k_pe.expand(*first.shape[:-1], rotary_dim)), -1)
    return torch.cat((x.q[..., :n], q_pe), -1), k, v.contiguous()


def positions(x: Inputs, cp_size: int) -> Tensor:
    """The position of each token in its sequence; the first rank has the first and the last part of 2 cp_size."""
    token, local = torch.arange(len(x.q), device=x.q.device), x.cu_seqlens.long() // cp_size
    sequence = torch.searchsorted(local, token, right=True) - 1
    place, part = token - local[sequence], local.diff()[sequence] // 2
    return place + torch.where(place < part, 0, 2 * (cp_size - 1) * part)


def mla_decode(x: Inputs) -> Any:
    """The rotated part of q, in place; rows [c_kv | k_pe] of the cache."""
    cos, sin = (table[x.ids[0]][:, None] for table in (x.cos, x.sin))
    q_pe = x.q[..., -ROTARY:]
    q_pe.copy_(others.rotate(q_pe, cos, sin, True))
    cache, slots = x.caches
    row = torch.cat((x.v.flatten(-2), others.rotate(x.k, cos, sin, True).squeeze(2)), -1)
    cache.flatten(0, 1)[slots] = row.flatten(0, 1)
    return q_pe


def record(x: Inputs) -> Any:
    """k, [latent | rotated], as records with latents in e4m3, after the norm of the first elements."""
    latents, scales, k_pe, slots = x.caches
    cos, sin = (table[x.ids[0]][:, None] for table in (x.cos, x.sin))
    y = torch.cat((rms(x.k[..., :NORMED], x.weights[1][:NORMED]), x.k[..., NORMED:]), -1)
    latent, pe = y.tensor_split([latents.shape[-1]], -1)
    groups = latent.float().unflatten(-1, (scales.shape[-1], -1))
    unit = groups.abs().amax(-1, keepdim=True) / 448
    if scales.dtype == E8M0:
        unit = unit.log2().ceil().exp2()
    stored = (groups / unit).to(FP8).flatten(-2), unit.squeeze(-1).to(scales.dtype), others.rotate(pe, cos, sin, True)
    for place, part in zip((latents, scales, k_pe), stored):
        place.view(torch.uint8)[slots // PAGE, slots % PAGE] = part.contiguous().view(torch.uint8).flatten(0, 1)
    return x.caches


def mla_fp8(x: Inputs) -> Any:
    """q in fp8, and k, [latent | rotated], in the cache."""
    cos, sin = (table[x.ids[0]][:, None] for table in (x.cos, x.sin))
    n = x.q.shape[-1] - ROTARY
    q, k = (torch.cat((y[..., :n], others.rotate(y[..., n:], cos, sin, True)), -1) for y in (x.q, x.k))
    k_cache, _, slots = x.caches
    k_cache.flatten(0, 1).view(torch.uint8)[slots] = (k.float() / 0.05).to(FP8).view(torch.uint8).flatten(0, 1)
    return (q.float() / 0.05).to(FP8)
