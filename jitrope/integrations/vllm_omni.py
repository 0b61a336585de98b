"""vLLM-Omni: rope of its diffusion models, and RMSNorm with rope.

>>> from jitrope.integrations import vllm_omni as jitrope_vllm_omni
>>> report = jitrope_vllm_omni.enable()  # in the workers, before the model is made
>>> jitrope_vllm_omni.disable()

The signatures are those of `vllm_omni.diffusion.layers` (0.30.0; 0.24.0 has the same, without the fused functions), and
of FlashAttention's `apply_rotary_emb`, which vLLM contains and the layer `RotaryEmbedding` calls on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..api import apply_rope
from ..base.errors import InvalidInput
from ..ops.values import Norm
from . import _host
from ._norms import unhooked
from ._serving import prepare


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotate the first R elements of each head of x, as FlashAttention's function of this name.

    >>> cos, sin = jitrope.tables.cos_sin(16, jitrope.tables.inv_freq(rotary_dim=64)[0])
    >>> x = jitrope_vllm_omni.apply_rotary_emb(torch.randn(1, 16, 8, 64), cos, sin)

    Args:
        x: (B, S, H, D).
        cos, sin: (P, R / 2); fp32, fp16 or bf16, for any dtype of x.
        interleaved: the pairs are neighbours, not halves.
        inplace: overwrite x.
        seqlen_offsets, cu_seqlens: refused, as no layer passes them.
        max_seqlen: ignored.

    Returns:
        x rotated, in fp32 arithmetic rounded once. The errors are those of `jitrope.apply_rope`.
    """
    if cu_seqlens is not None or isinstance(seqlen_offsets, Tensor) or seqlen_offsets:
        raise InvalidInput("seqlen_offsets or cu_seqlens is given; call jitrope.apply_rope with Starts or Packed")
    return apply_rope(x, None, cos, sin, interleaved=interleaved, rotary_dim=2 * cos.shape[-1], inplace=inplace)[0]


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the first R elements of each head of x, (B, S, H, D) or (S, H, D), by cos and sin, (S, R / 2).

    The tables may be (B, S, R / 2) too. The result has the dtype that x and cos promote to. The errors are those of
    `apply_rotary_emb`.

    >>> cos, sin = jitrope.tables.cos_sin(16, jitrope.tables.inv_freq(rotary_dim=64)[0])
    >>> x = jitrope_vllm_omni.apply_rotary_emb_torch(torch.randn(1, 16, 8, 64), cos, sin)
    """
    x = x.to(torch.promote_types(x.dtype, cos.dtype))
    return _rotate(x, None, cos, sin, interleaved, 2 * cos.shape[-1])[0]


def apply_rope_to_qk(
    rope: Any, query: Tensor, key: Tensor, image_rotary_emb: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Rotate q and k in one launch, where the host has one for each and two that convert the tables.

    >>> from types import SimpleNamespace
    >>> rope, (q, k) = SimpleNamespace(interleaved=True, half_head_dim=True), torch.randn(2, 1, 16, 8, 64)
    >>> tables = jitrope.tables.cos_sin(16, jitrope.tables.inv_freq(rotary_dim=64)[0])
    >>> q, k = jitrope_vllm_omni.apply_rope_to_qk(rope, q, k, tables)

    Args:
        rope: the host's layer `RotaryEmbedding`, with interleaved, the pairs are neighbours, and half_head_dim, the
            tables have one column for each pair. Before 0.28 layers lack half_head_dim, and it is true for them.
        query, key: (B, S, H, D) or (S, H, D).
        image_rotary_emb: (cos, sin), (S, R / 2) or (S, R) each, or with a batch axis, whose first row is read; or
            None, then q and k are returned. The host rounds them to q's dtype; here they are read in fp32, to which
            fp64 is rounded, as FLUX has it.

    Returns:
        (query, key) rotated, in fp32 arithmetic rounded once. The errors are those of `apply_rotary_emb`.
    """
    if image_rotary_emb is None:
        return query, key
    if isinstance(rope, nn.Module):  # it is not called
        unhooked(rope, noun="rope")
        if type(rope).__module__ != f"{_LAYERS}.rope":
            raise InvalidInput(f"rope is a {type(rope).__name__}, which is not the host's")
    cos, sin = (table[0] if table.dim() == 3 else table for table in image_rotary_emb)
    if cos.dtype == torch.float64:
        cos, sin = cos.float(), sin.float()
    half = getattr(rope, "half_head_dim", True)
    query, rotated = _rotate(query, key, cos, sin, rope.interleaved, cos.shape[-1] * (1 + half))
    return query, rotated


def fused_qk_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the neighbours of q and k, (B, S, H, D), by fp32 cos and sin, (S, D), in one launch, with the host's bits.

    The errors are those of `apply_rotary_emb`.

    >>> tables = jitrope.tables.cos_sin(16, jitrope.tables.inv_freq(rotary_dim=64)[0], width="full", interleaved=True)
    >>> q, k = jitrope_vllm_omni.fused_qk_rope(*torch.randn(2, 1, 16, 8, 64), *tables)
    """
    return _rotate(q, k, cos, sin, True, cos.shape[-1])


def fused_qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    rope_table: Tensor,
    eps: float,
    *,
    head_dim: int | None = None,
    rotary_dim: int | None = None,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """RMSNorm of each head of q and k, rounded to their dtype, then rope, in one launch.

    >>> q, k = torch.randn(16, 8, 64), torch.randn(16, 2, 64)
    >>> table = jitrope.tables.cos_sin_cache(16, jitrope.tables.inv_freq(rotary_dim=64)[0])
    >>> q, k = jitrope_vllm_omni.fused_qk_norm_rope(q, k, torch.ones(64), torch.ones(64), table, 1e-6)

    Args:
        q, k: (T, H, D); k may have its own number of heads.
        q_weight, k_weight: (D).
        rope_table: (T, R): the cosines of the R / 2 pairs of each token, then the sines.
        head_dim, rotary_dim: D and R, or None.
        interleaved: the pairs are neighbours, not halves.

    Returns:
        (q, k) normalised and rotated. The errors are those of `apply_rotary_emb`.
    """
    sizes, found = (head_dim, rotary_dim), (q.shape[-1], rope_table.shape[-1])
    if any(size not in (None, there) for size, there in zip(sizes, found)) or len(rope_table) != len(q):
        raise InvalidInput(
            f"(head_dim, rotary_dim) are {sizes}; q and rope_table have {found}, and a row for each token"
        )
    norm = Norm(q_weight, k_weight, eps=eps, rounding="once")
    q, k, _ = prepare(q, k, None, rope_table, None, not interleaved, norm=norm)
    return q, k


def _rotate(q: Tensor, k: Any, cos: Tensor, sin: Tensor, interleaved: bool, width: int) -> tuple[Tensor, Any]:
    layout = "thd" if q.dim() == 3 else "bshd"
    return apply_rope(q, k, cos, sin, interleaved=interleaved, rotary_dim=width, layout=layout)


_LAYERS = "vllm_omni.diffusion.layers"
_FLASH = _host.named("vllm.vllm_flash_attn.layers.rotary", apply_rotary_emb)
_FUSED = {  # 0.24.0 has neither
    **_host.named(f"{_LAYERS}.fused_qk_rope", fused_qk_rope),
    **_host.named(f"{_LAYERS}.fused_qk_norm_rope", fused_qk_norm_rope),
}
_FUNCTIONS = {**_FLASH, **_host.named(f"{_LAYERS}.rope", apply_rotary_emb_torch, apply_rope_to_qk), **_FUSED}


def enable() -> _host.Report:
    """Replace the rope of vLLM-Omni's diffusion models in this process; call it before the model is made.

    Calls that jitrope refuses go to the host's own functions. Raises ImportError without vLLM-Omni, and JitropeError if
    this version lacks a function.
    """
    return _host.enable("vllm_omni", _FUNCTIONS, {**_FLASH, **_FUSED})


disable = _host.disabler(__name__)
