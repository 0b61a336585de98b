"""SGLang's diffusion models: norm and rope of q and k, and rope alone, in one launch.

>>> from jitrope.integrations import sglang_diffusion as jitrope_sglang_diffusion
>>> report = jitrope_sglang_diffusion.enable()  # in the workers, before the model is made
>>> jitrope_sglang_diffusion.disable()

The signatures are those of sglang 0.5.23, of `sglang.multimodal_gen.runtime.layers` and of
`sglang.kernels.ops.diffusion.rope`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..api import apply_rope, prepare_qkv
from ..base.errors import InvalidInput
from ..ops.values import Norm
from . import _host
from ._serving import heads


def apply_flashinfer_rope_qk_inplace(
    q: Tensor,
    k: Tensor,
    cos_sin_cache: Tensor,
    *,
    head_size: int | None = None,
    is_neox: bool = False,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate q and k in one launch: in place if both are contiguous, as the host.

    >>> q, k = torch.randn(2, 1, 16, 8, 64)
    >>> cache = jitrope.tables.cos_sin_cache(16, jitrope.tables.inv_freq(rotary_dim=64)[0])
    >>> q, k = jitrope_sglang_diffusion.apply_flashinfer_rope_qk_inplace(q, k, cache)

    Args:
        q, k: (B, S, H, D); k may have its own number of heads.
        cos_sin_cache: (P, R), the cosines of the R / 2 pairs, then their sines; fp32, fp16 or bf16.
        head_size: D, or None.
        is_neox: True: pairs are halves, (i, i + R / 2); False: neighbours.
        positions: int32 or int64, (B * S): rows of the table; None: token s of each batch row takes row s.

    Returns:
        (q, k) rotated, in fp32 arithmetic rounded once. The errors are those of `jitrope.apply_rope`.
    """
    words: Any = {"sizes": (head_size or 0, 0), "inplace": q.is_contiguous() and k.is_contiguous()}
    return _rotate(q, k, cos_sin_cache, positions, is_neox, **words)


def apply_rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the neighbours of x, (B, S, H, D) or (T, H, D), by tables with a row for each token.

    >>> cos, sin = jitrope.tables.cos_sin(16, jitrope.tables.inv_freq(rotary_dim=64)[0])
    >>> x = jitrope_sglang_diffusion.apply_rotary_embedding(torch.randn(1, 16, 8, 64), cos, sin)

    Args:
        cos, sin: (S, D / 2), or with interleaved also (S, D), with two equal neighbours.
        interleaved: allows the wide tables; the pairs are neighbours in any case.

    Returns:
        x rotated. The sum is that of the host's kernel: the second product is not rounded. The errors are those of
        `apply_flashinfer_rope_qk_inplace`.
    """
    if interleaved and cos.shape[-1] == x.shape[-1]:
        cos, sin = cos[..., ::2], sin[..., ::2]
    words: Any = {"layout": "thd" if x.dim() == 3 else "bshd", "rounding": "addcmul"}
    return apply_rope(x, None, cos, sin, interleaved=True, rotary_dim=2 * cos.shape[-1], **words)[0]


def apply_qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_norm: Any,
    k_norm: Any,
    head_dim: int,
    cos_sin_cache: Tensor,
    *,
    freqs_complex: Tensor | None = None,
    is_neox: bool = False,
    positions: Tensor | None = None,
    position_offset: int = 0,
    allow_inplace: bool = True,
    allow_strided_qk: bool = False,
    round_norm_before_rope: bool = False,
    cache_has_full_width: bool = False,
) -> tuple[Tensor, Tensor]:
    """RMSNorm of each head of q and k, then rope, in one launch; for more heads and dtypes than the host's kernel.

    >>> from types import SimpleNamespace
    >>> norm = SimpleNamespace(weight=torch.ones(64), variance_epsilon=1e-6)
    >>> q, k = torch.randn(2, 1, 16, 8, 64)
    >>> cache = jitrope.tables.cos_sin_cache(16, jitrope.tables.inv_freq(rotary_dim=64)[0])
    >>> q, k = jitrope_sglang_diffusion.apply_qk_norm_rope(q, k, norm, norm, 64, cache)

    Args:
        q, k, cos_sin_cache, is_neox, positions: as in `apply_flashinfer_rope_qk_inplace`.
        q_norm, k_norm: the host's RMSNorm, with weight (D) and variance_epsilon, of all D elements and one epsilon.
        head_dim: D.
        freqs_complex: ignored; the host's other form of the table.
        position_offset: without positions, the row of the first token.
        allow_inplace: overwrite q and k if they are contiguous, or, with allow_strided_qk, in any case.
        round_norm_before_rope: round the normalised elements to q's dtype, and with a table in that dtype the products
            too. By default the result is rounded once.
        cache_has_full_width: the table is (P, 2 R), [cos, sin] of each element.

    Returns:
        (q, k) normalised and rotated. The errors are those of `apply_flashinfer_rope_qk_inplace`.
    """
    if q_norm.variance_epsilon != k_norm.variance_epsilon:
        raise InvalidInput("the norms of q and k must have one epsilon")
    if any(getattr(norm, "variance_size_override", None) is not None for norm in (q_norm, k_norm)):
        raise InvalidInput("a norm takes the variance of a part of a head")
    norm = q_norm.weight, k_norm.weight, q_norm.variance_epsilon
    inplace = allow_inplace and (allow_strided_qk or (q.is_contiguous() and k.is_contiguous()))
    table = cos_sin_cache if positions is not None else cos_sin_cache[position_offset:]
    words: Any = {"exact": round_norm_before_rope, "full": cache_has_full_width, "inplace": inplace}
    return _rotate(q, k, table, positions, is_neox, norm, (head_dim, 0), **words)


def fused_inplace_qknorm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    *,
    is_neox: bool,
    eps: float = 1e-6,
    head_dim: int = 0,
    rope_dim: int = 0,
    round_norm_before_rope: bool = False,
    cache_has_full_width: bool = False,
) -> None:
    """`apply_qk_norm_rope` in place, of tokens without a batch axis, with its errors.

    >>> q, k = torch.randn(2, 16, 8, 64)
    >>> cache = jitrope.tables.cos_sin_cache(16, jitrope.tables.inv_freq(rotary_dim=64)[0])
    >>> given = q, k, torch.ones(64), torch.ones(64), cache, torch.arange(16)
    >>> jitrope_sglang_diffusion.fused_inplace_qknorm_rope(*given, is_neox=True)

    q and k are (T, H, D), the weights (D), positions (T). head_dim is D, and rope_dim the table's width R, or 0.
    """
    words: Any = {"exact": round_norm_before_rope, "full": cache_has_full_width, "inplace": True}
    norm, sizes = (q_weight, k_weight, eps), (head_dim, rope_dim)
    _rotate(q, k, cos_sin_cache, positions, is_neox, norm, sizes, **words)


def fused_qknorm_rope_out_of_place(
    q: Tensor,
    k: Tensor,
    q_out: Tensor,
    k_out: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    *,
    is_neox: bool,
    eps: float = 1e-6,
    head_dim: int = 0,
    rope_dim: int = 0,
    round_norm_before_rope: bool = False,
    cache_has_full_width: bool = False,
) -> None:
    """`fused_inplace_qknorm_rope` that writes to q_out and k_out, (T, H, D), with its errors.

    >>> q, k, q_out, k_out = torch.randn(4, 16, 8, 64)
    >>> cache = jitrope.tables.cos_sin_cache(16, jitrope.tables.inv_freq(rotary_dim=64)[0])
    >>> given = q, k, q_out, k_out, torch.ones(64), torch.ones(64), cache, torch.arange(16)
    >>> jitrope_sglang_diffusion.fused_qknorm_rope_out_of_place(*given, is_neox=True)
    """
    words: Any = {"exact": round_norm_before_rope, "full": cache_has_full_width, "out": (q_out, k_out, None)}
    norm, sizes = (q_weight, k_weight, eps), (head_dim, rope_dim)
    _rotate(q, k, cos_sin_cache, positions, is_neox, norm, sizes, **words)


def fused_rmsnorm_interleaved_rope_(
    x: Tensor, weight: Tensor, cos_sin_cache: Tensor, eps: float, head_dim: int
) -> Tensor:
    """RMSNorm across the heads of x, (T, H * head_dim), and rope of interleaved pairs, in place (Wan). Returns x.

    Token t takes row t modulo P of the table, (P, head_dim). The normalised heads are rounded before the rotation. The
    errors are those of `apply_qk_norm_rope`.

    >>> cache = jitrope.tables.cos_sin_cache(5, jitrope.tables.inv_freq(rotary_dim=64)[0])
    >>> x, weight = torch.randn(10, 512), torch.ones(512)
    >>> x = jitrope_sglang_diffusion.fused_rmsnorm_interleaved_rope_(x, weight, cache, 1e-6, 64)
    """
    split, rows = heads("x", x, 1, head_dim), cos_sin_cache.shape[0]
    if rows == 0 or len(split) % rows:
        raise InvalidInput(f"x has {len(split)} tokens; the table's {rows} rows must divide them")
    norm = Norm(weight, eps=eps, across_heads=True, rounding="once")
    q = split.unflatten(0, (len(split) // rows, rows))
    prepare_qkv(q, None, None, cos_sin_cache=cos_sin_cache, interleaved=True, norm=norm, inplace=True)
    return x


def _rotate(
    q: Tensor,
    k: Tensor,
    table: Tensor,
    positions: Tensor | None,
    is_neox: bool,
    norm: tuple[Tensor, Tensor, float] | None = None,
    sizes: tuple[int, int] = (0, 0),
    exact: bool = False,
    full: bool = False,
    **words: Any,
) -> tuple[Tensor, Tensor]:
    """q and k prepared.

    norm: the weights and epsilon. sizes: (head_dim, rope_dim), or 0. exact: the normalised elements are rounded, and
    products to a 16-bit table's dtype. full: a column for each element.
    """
    found = q.shape[-1], table.shape[-1] // (2 if full else 1)
    if any(size not in (0, there) for size, there in zip(sizes, found)):
        raise InvalidInput(f"(head_dim, rope_dim) are {sizes}; q and cos_sin_cache have {found}")
    if positions is not None and q.dim() == 4:
        if positions.shape != (q.shape[0] * q.shape[1],):
            had = f"positions have shape {tuple(positions.shape)}"
            raise InvalidInput(f"{had}; q has {q.shape[0]} x {q.shape[1]} tokens")
        positions = positions.unflatten(0, q.shape[:2])
    tables: Any = {"cos_sin_cache": table}
    if full:
        cos, sin = table.chunk(2, -1)
        tables = {"cos": cos, "sin": sin, "rotary_dim": cos.shape[-1]}
    if norm is not None:
        words["norm"] = Norm(*norm[:2], eps=norm[2], rounding="once" if exact else "none")
    words["rounding"] = "dtype" if exact and table.dtype == q.dtype != torch.float32 else "fp32"
    words |= {"layout": "thd" if q.dim() == 3 else "bshd", "positions": positions, "interleaved": not is_neox}
    q, k, _ = prepare_qkv(q, k, None, **tables, **words)
    return q, k


_LAYERS, _ROPE = "sglang.multimodal_gen.runtime.layers", "sglang.kernels.ops.diffusion.rope"
_WAN = _host.named(f"{_ROPE}.rmsnorm_interleaved_rope_cutedsl", fused_rmsnorm_interleaved_rope_)  # needs CuTe DSL
_FUNCTIONS = {
    **_WAN,
    **_host.named(f"{_ROPE}.rotary_triton", apply_rotary_embedding),
    **_host.named(f"{_ROPE}.qknorm_rope_jit", fused_inplace_qknorm_rope, fused_qknorm_rope_out_of_place),
    **_host.named(f"{_LAYERS}.rotary_embedding.utils", apply_flashinfer_rope_qk_inplace),
    **_host.named(f"{_LAYERS}.layernorm", apply_qk_norm_rope),
}


def enable() -> _host.Report:
    """Replace the rope of SGLang's diffusion models in this process; call it before the model is made.

    Calls that jitrope refuses go to SGLang's own functions. Raises ImportError if SGLang or its diffusion models cannot
    be imported, and JitropeError if this version lacks a function.
    """
    return _host.enable("sglang_diffusion", _FUNCTIONS, optional=_WAN)


disable = _host.disabler(__name__)
