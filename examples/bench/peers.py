"""The same operations of others, as far as they are installed (imported inside), and in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from .harness import Call, twice

Pair = Callable[[Tensor, Tensor], Any]
"""Packed q and k (T, H, D) -> the two rotated."""


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Plain torch: x (..., D) by half-width tables that broadcast to it, in fp32, rounded once."""
    if interleaved:
        x0, x1 = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((x0 * cos - x1 * sin, x1 * cos + x0 * sin), -1).flatten(-2).to(x.dtype)
    x0, x1 = x.float().chunk(2, -1)
    return torch.cat((x0 * cos - x1 * sin, x1 * cos + x0 * sin), -1).to(x.dtype)


def compiled(eager: Call) -> Call:
    """Shapes are not dynamic, as a model's are not."""
    return torch.compile(eager, dynamic=False)


def with_compiled(eager: Call) -> dict[str, Call]:
    """Both ways to run plain torch."""
    return {"torch eager": eager, "torch.compile": compiled(eager)}


# ---- q (B, S, Hq, D), k (B, S, Hk, D), cos and sin (S, D / 2) of a call's inputs -------------------------


def plain_pair(interleaved: bool) -> Call:
    """q and k in plain torch."""
    return lambda x: tuple(rotate(y, x.cos[None, :, None], x.sin[None, :, None], interleaved) for y in (x.q, x.k))


def pairs(interleaved: bool) -> dict[str, Call]:
    """All that do this pairing."""
    found = with_compiled(plain_pair(interleaved))
    with suppress(ImportError):
        from flash_attn.ops.triton.rotary import apply_rotary

        found["flash-attn"] = lambda x: tuple(
            apply_rotary(y, x.cos, x.sin, interleaved=interleaved, inplace=True) for y in (x.q, x.k)
        )
    if interleaved:
        return found
    with suppress(ImportError):
        from liger_kernel.transformers import liger_rotary_pos_emb

        tables = Full()
        found["Liger (in place)"] = lambda x: liger_rotary_pos_emb(*_heads_first(x.q, x.k), *tables(x.cos, x.sin))
    return found


def normed_pairs(weights: Call, eps: float) -> dict[str, Call]:
    """RMSNorm of each head, and rope of halves. weights: q's and k's, of a call's inputs."""
    found: dict[str, Call] = {}
    with suppress(ImportError):
        from liger_kernel.transformers import liger_rotary_pos_emb
        from liger_kernel.transformers.functional import liger_rms_norm

        tables = Full()

        def chain(x: Any) -> Any:
            q, k = (liger_rms_norm(y, w, eps, in_place=False) for y, w in zip((x.q, x.k), weights(x)))
            return _heads_first(*liger_rotary_pos_emb(*_heads_first(q, k), *tables(x.cos, x.sin)))

        found["Liger"] = chain
    return found


def latent(cp_size: int) -> dict[str, Call]:
    """Latent attention of packed q, k = kv and v = k_pe, (T, H, D), or with cp_size 0 (B, S, H, D); it overwrites q."""
    found: dict[str, Call] = {}
    with suppress(ImportError):
        import triton  # noqa: F401  # without it Megatron-core can be imported, but not called
        from megatron.core.fusions.fused_mla_yarn_rope_apply import (
            fused_apply_mla_rope_for_kv,
            fused_apply_mla_rope_for_q,
        )

        tables = Full()

        def both(x: Any) -> Any:
            cos, sin = (table[0, :, None, None] for table in tables(x.cos, x.sin))
            q, kv, k_pe = (x.q, x.k, x.v) if cp_size else (y.transpose(0, 1) for y in (x.q, x.k, x.v))
            rotary, own = k_pe.shape[-1], ((x.cu_seqlens, 0, cp_size) if cp_size else ())
            n = q.shape[-1] - rotary
            k, v = fused_apply_mla_rope_for_kv(kv, k_pe, cos, sin, rotary, n, kv.shape[-1] - n, *own)
            return fused_apply_mla_rope_for_q(q, cos, sin, n, rotary, *own), k, v

        found["Megatron-core"] = both
    return found


class Full:
    """Liger's own format of tables, (1, S, D), made in a table's first call, which is not timed."""

    def __init__(self) -> None:
        self.made: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Of half-width cos and sin (S, D / 2)."""
        if id(cos) not in self.made:
            self.made[id(cos)] = twice(cos)[None], twice(sin)[None]
        return self.made[id(cos)]


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]


def plain_kv_cache(fp8: bool, norm: bool = False) -> Call:
    """q and k rotated by position, k and v written to a cache; see `decode.Inputs`. fp8 is rounded once from fp32."""

    def write(x: Any) -> Tensor:
        paged = (x.kv_fp8 if fp8 else x.kv).tensors
        cos, sin = (part[:, None] for part in x.table[x.positions].chunk(2, -1))
        q, k = (_rms_norm(y, x.norm.tensors[f"{name}_weight"]) if norm else y for name, y in (("q", x.q), ("k", x.k)))
        k, v = (k.float(), x.v.float()) if fp8 else (k, x.v)
        for name, rows, y in zip("kv", x.rows[2 * fp8 :], (rotate(k, cos, sin), v)):
            if fp8:  # as bytes, which index_put takes
                y = (y * (1 / paged[f"{name}_scale"])).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
            rows[paged["slot_mapping"]] = y.flatten(0, 1)
        return rotate(q, cos, sin)

    return write


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """As in Qwen3's code in transformers."""
    y = x.float()
    return weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


# ---- one tensor x of a call's inputs ---------------------------------------------------------------------


def packed(cu_seqlens: Tensor, tokens: int, angles: Tensor) -> dict[str, Call]:
    """Of packed x (T, H, D), halves; `angles` are half width, a row a position."""
    positions, longest = _positions(cu_seqlens, tokens), int(cu_seqlens.diff().max())
    cos, sin = angles.cos(), angles.sin()
    found = with_compiled(lambda x: rotate(x.x, cos[positions, None], sin[positions, None]))
    with suppress(ImportError):
        from flash_attn.layers.rotary import apply_rotary_emb

        found["flash-attn"] = lambda x: apply_rotary_emb(x.x, cos, sin, cu_seqlens=cu_seqlens, max_seqlen=longest)
    with suppress(ImportError):
        from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

        freqs = twice(angles)[:, None, None]
        found["TransformerEngine"] = lambda x: apply_rotary_pos_emb(
            x.x, freqs, tensor_format="thd", fused=True, cu_seqlens=cu_seqlens
        )
    return found


def packed_pairs(cu_seqlens: Tensor, tokens: int, angles: Tensor) -> dict[str, Pair]:
    """The same of libraries that rotate q and k together and know no cu_seqlens: a table with a row a token."""
    positions = _positions(cu_seqlens, tokens)
    cos, sin = angles.cos()[positions], angles.sin()[positions]
    found: dict[str, Pair] = {}
    with suppress(ImportError):
        from liger_kernel.transformers import liger_rotary_pos_emb

        full = twice(cos)[None], twice(sin)[None]

        def liger(q: Tensor, k: Tensor) -> Any:
            rotated = liger_rotary_pos_emb(*_heads_first(q[None], k[None]), *full)
            return tuple(x.transpose(1, 2)[0] for x in rotated)

        found["Liger"] = liger
    return found


def _positions(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Of packed tokens in their sequences; made once, outside the timing."""
    starts = torch.repeat_interleave(cu_seqlens[:-1].long(), cu_seqlens.diff().long(), output_size=tokens)
    return torch.arange(tokens, device=cu_seqlens.device) - starts


def sbhd(angles: Tensor) -> dict[str, Call]:
    """Of x (S, B, H, D) by half-width angles (S, D / 2), halves."""
    cos, sin = (table[:, None, None] for table in (angles.cos(), angles.sin()))
    found = with_compiled(lambda x: rotate(x.x, cos, sin))
    with suppress(ImportError):
        from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

        freqs = twice(angles)[:, None, None]
        found["TransformerEngine"] = lambda x: apply_rotary_pos_emb(x.x, freqs, tensor_format="sbhd", fused=True)
    return found
