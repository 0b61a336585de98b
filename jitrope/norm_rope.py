"""The user's functions for QK-norm + rope: arguments in words to options; `checks` refuses what does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import checks
from .arguments import refuse
from .errors import InvalidInput
from .norm_ops import call, call_joint
from .problem import constant
from .reference import Tables
from .rope import _sections, one_table
from .spec import LAYOUT_AXES, Norm


def qk_norm_rope(
    q: Tensor,
    k: Tensor | None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    eps: float = 1e-6,
    across_heads: bool = False,
    zero_centered: bool = False,
    norm_rounding: str = "none",
    cos_sin_cache: Tensor | None = None,
    freqs_cis: Tensor | None = None,
    position_ids: Tensor | None = None,
    mrope_section: Sequence[int] = (),
    mrope_interleaved: bool = False,
    start_positions: Tensor | None = None,
    layout: str = "bshd",
    interleaved: bool = False,
    rotary_dim: int | None = None,
    rotary_offset: int = 0,
    rounding: str = "fp32",
    launch: str = "auto",
    check: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """RMSNorm of q and k, then rope, in one launch; returns fresh tensors.

    A head x becomes x / sqrt(mean(x^2) + eps) times the weight (RMSNorm, arXiv:1910.07467, equation 4), then is
    rotated as `apply_rope` does it. Differentiable in q, k and the weights; the gradient is one launch too
    and the same from run to run.

    >>> q, k = jitrope.qk_norm_rope(q, k, norm_q.weight, norm_k.weight, cos, sin)     # (B, S, H, D)

    Args:
        q, k: as `apply_rope`'s; k may be None.
        q_weight, k_weight: (D), or (H D) with across_heads; fp32, fp16 or bf16; None: no weight.
        cos, sin: as `apply_rope`'s, as are cos_sin_cache and freqs_cis in their place. No table at all: q and k are
            normalised only.
        eps: added to the mean of the squares. The default is that of Qwen3, FLUX, Qwen-Image and Wan in transformers
            and diffusers.
        across_heads: one mean over all heads of a token (Wan, LTX), not one for each head (FLUX, Qwen3).
        zero_centered: the factor is 1 + weight (Gemma, Qwen3-Next).
        norm_rounding: between norm and rope. "none": nothing is rounded. "once": to q's dtype, behind the
            weight, as torch.nn.RMSNorm does; "twice": before the weight and behind it, as transformers' and
            diffusers' own RMSNorm do. Both give those chains' bits: on a CPU always, on a GPU for heads of 64,
            128 and 256, rotated whole and aligned, across heads only "once", in fp16 and bf16. Elsewhere
            squares are summed in another order, and a rare element differs in its last bit.
        The others are `apply_rope`'s.

    Returns:
        (q, k) of the shapes, dtype and (where dense) strides of the inputs.

    Raises:
        InvalidInput: the arguments do not fit together; nothing was written.
        CompileError: the kernel could not be built; the message says what to install.
    """
    if _none(cos, sin, cos_sin_cache, freqs_cis):  # nothing is rotated, at whatever positions
        mrope_section, mrope_interleaved, rotary_offset = (), False, 0
    tables, kind, rotary_dim = _arguments(
        "qk_norm_rope", q, cos, sin, cos_sin_cache, freqs_cis, start_positions, position_ids, layout, rotary_dim,
        rotary_offset,
    )  # fmt: skip
    options = (
        layout, interleaved, interleaved, rotary_dim, rotary_offset, 0, 1, 0, kind, _sections(mrope_section),
        mrope_interleaved, 1.0, False, 0, True, False, False, rounding, launch, False, False,
    )  # fmt: skip
    norm = Norm(norm_rounding, across_heads, zero_centered, eps)
    if check is not False:
        rest = {"k": k, "q_weight": q_weight, "k_weight": k_weight}
        checks.check_all("qk_norm_rope", checks.check_norm, check, {"q": q}, rest, tables, options, norm)
    return call(q, k, (q_weight, k_weight), tables, options, norm, checks.check_norm)


def qk_norm_rope_(
    q: Tensor,
    k: Tensor | None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    eps: float = 1e-6,
    across_heads: bool = False,
    zero_centered: bool = False,
    norm_rounding: str = "none",
    cos_sin_cache: Tensor | None = None,
    freqs_cis: Tensor | None = None,
    position_ids: Tensor | None = None,
    mrope_section: Sequence[int] = (),
    mrope_interleaved: bool = False,
    start_positions: Tensor | None = None,
    layout: str = "bshd",
    interleaved: bool = False,
    rotary_dim: int | None = None,
    rotary_offset: int = 0,
    rounding: str = "fp32",
    launch: str = "auto",
    check: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`qk_norm_rope` in place: q and k themselves are normalised and rotated, and returned.

    Arguments and errors are those of `qk_norm_rope`. There is no gradient, which would need q and k as they were.

    Raises:
        InvalidInput: also where a gradient is asked for, and for a tensor whose elements overlap in memory.
        CompileError: as `qk_norm_rope`.
    """
    if _none(cos, sin, cos_sin_cache, freqs_cis):  # nothing is rotated, at whatever positions
        mrope_section, mrope_interleaved, rotary_offset = (), False, 0
    tables, kind, rotary_dim = _arguments(
        "qk_norm_rope_", q, cos, sin, cos_sin_cache, freqs_cis, start_positions, position_ids, layout, rotary_dim,
        rotary_offset,
    )  # fmt: skip
    options = (
        layout, interleaved, interleaved, rotary_dim, rotary_offset, 0, 1, 0, kind, _sections(mrope_section),
        mrope_interleaved, 1.0, False, 0, True, False, False, rounding, launch, False, True,
    )  # fmt: skip
    norm = Norm(norm_rounding, across_heads, zero_centered, eps)
    if check is not False:
        rest = {"k": k, "q_weight": q_weight, "k_weight": k_weight}
        checks.check_all("qk_norm_rope_", checks.check_norm, check, {"q": q}, rest, tables, options, norm)
    return call(q, k, (q_weight, k_weight), tables, options, norm, checks.check_norm)


def qk_norm_rope_joint(
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    first_weights: Sequence[Tensor | None] | None,
    second_weights: Sequence[Tensor | None] | None,
    cos: Tensor | Sequence[Tensor] | None = None,
    sin: Tensor | Sequence[Tensor] | None = None,
    *,
    eps: float = 1e-6,
    zero_centered: bool = False,
    norm_rounding: str = "none",
    cos_sin_cache: Tensor | Sequence[Tensor] | None = None,
    freqs_cis: Tensor | Sequence[Tensor] | None = None,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    rotary_offset: int = 0,
    rounding: str = "fp32",
    launch: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """`qk_norm_rope` of two streams into joint tensors: norm, rope and concatenation in one launch.

    For attention over text and image tokens that have projections and norms of their own (FLUX, Qwen-Image,
    HunyuanVideo): q and k of both streams are normalised, each with its weights, and rotated, v is copied,
    and all are written one stream behind the other.

    >>> q, k, v = jitrope.qk_norm_rope_joint((tq, tk, tv), (q, k, v), text_weights, weights, cos, sin)

    Args:
        first, second: (q, k, v) of the tokens in front and of those behind, (B, S1, H, D) and (B, S2, H, D),
            with the same H and D in both; any strides.
        first_weights, second_weights: (q_weight, k_weight) of each stream, (D) each; None: no weights.
        cos, sin, or another table: as `apply_rope`'s, over both streams, at least S1 + S2 rows; or a pair of each, of
            the first stream and of the second. A stream that is not to be rotated has cosines of one and sines of
            zero.
        The others are `qk_norm_rope`'s; the norm is each head's own.

    Returns:
        q, k and v, (B, S1 + S2, H, D), contiguous.

    Raises:
        InvalidInput, CompileError: as `qk_norm_rope`.
    """
    name = "qk_norm_rope_joint"
    first, second = (_parts(name, label, x, 3) for label, x in (("first", first), ("second", second)))
    streams = (*first, *second)
    weights = (*_parts(name, "first_weights", first_weights, 2), *_parts(name, "second_weights", second_weights, 2))
    for label, x in (("first", first[0]), ("second", second[0])):
        if not isinstance(x, Tensor) or x.is_nested or x.dim() != 4:
            refuse(name, f"{label}'s q", x, "a tensor (B, S, H, D)")
    rows = first[0].shape[1] + second[0].shape[1]
    given = {"cos": cos, "sin": sin, "cos_sin_cache": cos_sin_cache, "freqs_cis": freqs_cis}
    (cos1, cos2), (sin1, sin2), (cache1, cache2), (cis1, cis2) = (
        (x, None) if x is None or isinstance(x, Tensor) else _parts(name, label, x, 2) for label, x in given.items()
    )
    if _none(cos, sin, cos_sin_cache, freqs_cis):
        rotary_offset = 0
    tables, kind, rotary_dim = _arguments(
        "qk_norm_rope_joint", first[0], cos1, sin1, cache1, cis1, None, None, "bshd", rotary_dim,
        rotary_offset, rows,
    )  # fmt: skip
    second_tables: tuple[Tensor | None, Tensor | None] = (None, None)
    if any(table is not None for table in (cos2, sin2, cache2, cis2)):
        *second, other = one_table("qk_norm_rope_joint", cos2, sin2, cache2, None, cis2)
        if other != kind:
            raise InvalidInput(
                f"qk_norm_rope_joint: the first table is {kind}, the second {other}; pass two of one kind"
            )
        second_tables = (second[0], second[1])
    options = (
        "bshd", interleaved, interleaved, rotary_dim, rotary_offset, 0, 1, 0, kind, (),
        False, 1.0, False, 0, True, False, False, rounding, launch, False, False,
    )  # fmt: skip
    norm = Norm(norm_rounding, False, zero_centered, eps)
    return call_joint(streams, weights, second_tables, tables, options, norm, checks.check_norm_joint)


def _none(*tables: Any) -> bool:
    """Whether there is no table. Each is compared with None alone: Dynamo cannot trace `is` between two tuples."""
    return all(table is None for table in tables)


def _parts(name: str, label: str, value: Any, count: int) -> tuple[Any, ...]:
    """So many tensors of an argument that has them side by side."""
    if value is None and "weights" in label:
        return (None,) * count
    if not isinstance(value, (list, tuple)) or len(value) != count:
        refuse(name, label, value, f"a tuple of {count} tensors")
    return tuple(value)


def _arguments(
    name: str,
    q: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    cos_sin_cache: Tensor | None,
    freqs_cis: Tensor | None,
    start_positions: Tensor | None,
    position_ids: Tensor | None,
    layout: str,
    rotary_dim: int | None,
    rotary_offset: int,
    rows: int | None = None,
) -> tuple[Tables, str, int | None]:
    """The tables that the ops take, which of `spec.TABLES` they are, and rotary_dim."""
    kind = "cos_sin"
    if _none(cos, sin, cos_sin_cache, freqs_cis):
        if not isinstance(q, Tensor) or q.is_nested or q.dim() not in (3, 4):
            refuse(name, "q", q, "a tensor with 3 or 4 axes")
        cos, sin = _no_rotation(q, layout, rows)
        rotary_dim, start_positions, position_ids = q.shape[-1] - q.shape[-1] % 2, None, None
    elif cos is None or sin is None or cos_sin_cache is not None or freqs_cis is not None:
        cos, sin, kind = one_table(name, cos, sin, cos_sin_cache, None, freqs_cis)
    return (cos, sin, None, start_positions, position_ids), kind, rotary_dim


def _no_rotation(q: Tensor, layout: str, rows: int | None) -> tuple[Tensor, Tensor]:
    """Tables that turn nothing: one row, seen as many."""
    if rows is None:
        known = isinstance(layout, str) and layout in LAYOUT_AXES and (q.dim() == 4 or layout == "thd")
        rows = q.shape[LAYOUT_AXES[layout][1]] if known else 1
    cos, sin = _one_row(q.device, q.shape[-1] // 2)
    return cos.expand(rows, -1), sin.expand(rows, -1)


@constant
def _one_row(device: torch.device, pairs: int) -> tuple[Tensor, Tensor]:
    return torch.ones(1, pairs, device=device), torch.zeros(1, pairs, device=device)
