"""Other implementations of the same rotation, as far as they are installed. Imported inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..base.config import log
from .timing import Step

T = TypeVar("T")

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
Pair = Callable[[Tensor, Tensor], Any]
"""Packed q and k (T, H, D) -> the two rotated."""
Rotate = Callable[[Tensor, Tensor, Tensor, Tensor], Any]
"""(q, k, cos, sin) with (B, S, H, D) activations and half-width fp32 tables."""


def available(interleaved: bool, sets: Sequence[Inputs]) -> Iterator[tuple[str, Rotate]]:
    """(name, call) of each peer that does this pairing here, for calls with these `sets` of inputs."""
    yield "torch eager", _eager(interleaved)
    # One compiled function a shape, as a model would have; the bench's shapes are not dynamic.
    torch._dynamo.reset()
    yield "torch.compile", torch.compile(_eager(interleaved), dynamic=False)
    for make in (_flash_attn, _liger, _torchembed):
        try:
            peer = make(interleaved, sets)
        except ImportError:
            continue
        if peer is not None:
            yield peer


def usable(calls: dict[str, T], argument: Tensor) -> dict[str, T]:
    """Those that take this input; the others are named on stderr. torchembed's grid ends at 65,535 tokens."""
    found = {}
    for label, call in calls.items():
        try:
            call(argument)  # type: ignore[operator]
            torch.cuda.synchronize()
        except RuntimeError as error:
            log.warning("%s is left out of this row: %s", label, error)
        else:
            found[label] = call
    return found


def _positions(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Of packed tokens in their sequences; made once, outside the timing."""
    starts = torch.repeat_interleave(cu_seqlens[:-1].long(), cu_seqlens.diff().long(), output_size=tokens)
    return torch.arange(tokens, device=cu_seqlens.device) - starts


def packed(cu_seqlens: Tensor, tokens: int, angles: Tensor) -> dict[str, Step]:
    """Rotations of one packed (T, H, D) tensor, halves; `angles` are half width, a row a position."""
    positions = _positions(cu_seqlens, tokens)
    longest = int(cu_seqlens.diff().max())

    cos_table, sin_table = angles.cos(), angles.sin()

    def eager(x: Tensor) -> Tensor:
        cos, sin = cos_table[positions, None], sin_table[positions, None]
        x0, x1 = x.float().chunk(2, -1)
        return torch.cat((x0 * cos - x1 * sin, x1 * cos + x0 * sin), -1).to(x.dtype)

    torch._dynamo.reset()
    found: dict[str, Step] = {"torch.compile": torch.compile(eager, dynamic=False), "torch eager": eager}
    with suppress(ImportError):
        from flash_attn.layers.rotary import apply_rotary_emb

        found["flash-attn"] = lambda x: apply_rotary_emb(
            x, cos_table, sin_table, cu_seqlens=cu_seqlens, max_seqlen=longest
        )
    with suppress(ImportError):
        from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

        freqs = torch.cat((angles, angles), -1)[:, None, None]
        found["TransformerEngine"] = lambda x: apply_rotary_pos_emb(
            x, freqs, tensor_format="thd", fused=True, cu_seqlens=cu_seqlens
        )
    return found


def packed_pairs(cu_seqlens: Tensor, tokens: int, angles: Tensor) -> dict[str, Pair]:
    """The same of libraries that rotate q and k together and know no cu_seqlens: a table with a row a token."""
    positions = _positions(cu_seqlens, tokens)
    cos, sin = angles.cos()[positions], angles.sin()[positions]
    found: dict[str, Pair] = {}
    with suppress(ImportError):
        from liger_kernel.transformers import liger_rotary_pos_emb

        full = [torch.cat((table, table), -1)[None] for table in (cos, sin)]

        def liger(q: Tensor, k: Tensor) -> Any:
            rotated = liger_rotary_pos_emb(*(x[None].transpose(1, 2) for x in (q, k)), *full)
            return tuple(x.transpose(1, 2)[0] for x in rotated)

        found["Liger"] = liger
    with suppress(ImportError):
        from torchembed._triton import fused_rope_forward

        def torchembed(q: Tensor, k: Tensor) -> Any:
            rotated = fused_rope_forward(*(x.transpose(0, 1)[None].contiguous() for x in (q, k)), cos, sin)
            return tuple(x[0].transpose(0, 1) for x in rotated)

        found["torchembed"] = torchembed
    return found


def kv_cache() -> dict[str, Callable[..., Tensor]]:
    """What rotates q and k and writes a KV cache: (q, k, v, cos_sin_cache, position_ids, k_cache, v_cache, slots,
    k_scale, v_scale) -> q; halves, caches (slots, Hk, D), of fp8 as bytes, and no padding."""

    def eager(
        q: Tensor, k: Tensor, v: Tensor, table: Tensor, positions: Tensor, k_cache: Tensor, v_cache: Tensor,
        slots: Tensor, k_scale: Tensor, v_scale: Tensor,
    ) -> Tensor:  # fmt: skip
        cos, sin = table[positions].chunk(2, -1)
        q, k = _eager(False)(q, k, cos, sin)
        for cache, x, scale in ((k_cache, k, k_scale), (v_cache, v, v_scale)):
            if cache.dtype == torch.uint8:
                x = (x.float() * (1 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
            cache[slots] = x.flatten(0, 1)
        return q

    return {"torch.compile": torch.compile(eager, dynamic=False)}


def sbhd(freqs: Tensor) -> dict[str, Step]:
    """Rotations of one (S, B, H, D) tensor by full-width angles (S, 1, 1, D), halves."""

    cos, sin = freqs.cos(), freqs.sin()

    def eager(x: Tensor) -> Tensor:
        x0, x1 = x.float().chunk(2, -1)
        return (x.float() * cos + torch.cat((-x1, x0), -1) * sin).to(x.dtype)

    torch._dynamo.reset()
    found: dict[str, Step] = {"torch.compile": torch.compile(eager, dynamic=False), "torch eager": eager}
    with suppress(ImportError):
        from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

        found["TransformerEngine"] = lambda x: apply_rotary_pos_emb(x, freqs, tensor_format="sbhd", fused=True)
    return found


def deepspeed(cos: Tensor, sin: Tensor) -> dict[str, Step]:
    """The two paths of DeepSpeed 0.19's apply_rotary_pos_emb for (S, B, H, D) and (S, 1, 1, D) tables, as it
    defines them: plain torch, and torchembed between two copies."""

    def plain(x: Tensor) -> Tensor:
        x0, x1 = x.chunk(2, -1)
        return x * cos + torch.cat((-x1, x0), -1) * sin

    found: dict[str, Step] = {"DeepSpeed's torch path": plain}
    with suppress(ImportError):
        from torchembed._triton import fused_rope_forward

        tables = [table.reshape(len(table), -1) for table in (cos, sin)]

        def torchembed(x: Tensor) -> Tensor:
            moved = x.movedim(0, -2).contiguous()
            rotated: Tensor = fused_rope_forward(moved, moved, *tables)[0]
            return rotated.movedim(-2, 0).contiguous()

        found["DeepSpeed's torchembed path"] = torchembed
    return found


def _eager(interleaved: bool) -> Rotate:
    def one(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos[None, :, None], sin[None, :, None]
        if interleaved:
            x0, x1 = x.float().unflatten(-1, (-1, 2)).unbind(-1)
            return torch.stack((x0 * cos - x1 * sin, x1 * cos + x0 * sin), -1).flatten(-2).to(x.dtype)
        x0, x1 = x.float().chunk(2, -1)
        return torch.cat((x0 * cos - x1 * sin, x1 * cos + x0 * sin), -1).to(x.dtype)

    return lambda q, k, cos, sin: (one(q, cos, sin), one(k, cos, sin))


def _flash_attn(interleaved: bool, sets: Sequence[Inputs]) -> tuple[str, Rotate]:
    from flash_attn.ops.triton.rotary import apply_rotary

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return tuple(apply_rotary(x, cos, sin, interleaved=interleaved, inplace=True) for x in (q, k))

    return "flash-attn", rotate


def _liger(interleaved: bool, sets: Sequence[Inputs]) -> tuple[str, Rotate] | None:
    if interleaved:
        return None
    from liger_kernel.transformers import liger_rotary_pos_emb

    # Its own format of the tables, made outside the timing.
    tables = {id(cos): [torch.cat((t, t), -1)[None] for t in (cos, sin)] for _, _, cos, sin in sets}

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return liger_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), *tables[id(cos)])

    return "Liger (in place)", rotate


def _torchembed(interleaved: bool, sets: Sequence[Inputs]) -> tuple[str, Rotate] | None:
    if interleaved:
        return None
    from torchembed._triton import fused_rope_forward

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return fused_rope_forward(q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous(), cos, sin)

    return "torchembed", rotate
