"""What jitrope does for each rope function of diffusers.

Each function here stands for one form of rope: it takes the host's own function and then that one's arguments,
and gives its bits. A call whose arithmetic it does not have goes to the host, and is counted with the reason.
The docstring's first line says what the host's tables are; the README's table has it.

One file for all of it, though long: a short function a form, and the checks they share.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...api import apply_rope
from ...plan.spec import MAX_HEAD_DIM
from .counting import note
from .tables import columns, of_pairs, waves

Rope = Callable[..., Any]

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_COMPLEX = {torch.complex64: "complex64", torch.complex128: "complex128"}

_SHAPES = "the tables' shape is not that of q and k"
_WORDS = "arguments that jitrope does not know"


def shared(
    host: Rope, x: Tensor, freqs_cis: Any, use_real: bool = True, use_real_unbind_dim: int = -1, sequence_dim: int = 2,
    **words: Any,
) -> Any:  # fmt: skip
    """fp32 (cos, sin), (S, D) each, for neighbours or halves; or complex (B, S, D / 2)"""
    arguments = (x, freqs_cis, use_real, use_real_unbind_dim, sequence_dim)
    if words or (use_real and not is_pair(freqs_cis)):
        return _left(_WORDS, host, *arguments, **words)
    if not use_real:
        reason = misfit(x, freqs_cis, complex_table=True) or rows_misfit(x, "bshd", freqs_cis, 3)
        return _left(reason, host, *arguments) if reason else _complex(x, freqs_cis, "bshd")
    if use_real_unbind_dim not in (-1, -2) or sequence_dim not in (1, 2):
        return _left(_WORDS, host, *arguments)
    layout = "bshd" if sequence_dim == 1 else "bhsd"
    reason = misfit(x, *freqs_cis, moves=True) or rows_misfit(x, layout, freqs_cis[0], 2, width=1)
    if reason:
        return _left(reason, host, *arguments)
    cos, sin = (table.to(x.device) for table in freqs_cis)
    return _rotated(x, cos, sin, layout=layout, interleaved=use_real_unbind_dim == -1)


def qwen(host: Rope, x: Tensor, freqs_cis: Any, use_real: bool = True, **words: Any) -> Any:
    """complex64 (S, D / 2)"""
    if words or use_real:
        return _left(_WORDS, host, x, freqs_cis, use_real=use_real, **words)
    reason = misfit(x, freqs_cis, complex_table=True) or rows_misfit(x, "bshd", freqs_cis, 2)
    return _left(reason, host, x, freqs_cis, use_real=False) if reason else _complex(x, freqs_cis, "bshd")


def complex_rows(host: Rope, x: Tensor, freqs_cis: Any) -> Any:
    """complex64 (B, S, D / 2)"""
    reason = misfit(x, freqs_cis, complex_table=True) or rows_misfit(x, "bshd", freqs_cis, 3)
    return _left(reason, host, x, freqs_cis) if reason else _complex(x, freqs_cis, "bshd")


def any_flow(host: Rope, x: Tensor, freqs: Any) -> Any:
    """complex128 (1, 1, S, D / 2), products in fp64"""
    reason = misfit(x, freqs, complex_table=True) or rows_misfit(x, "bhsd", freqs, 4)
    if reason or freqs.dtype != torch.complex128:
        return _left(reason or "the tables' dtype", host, x, freqs)
    return _complex(x, freqs, "bhsd")


def wan(host: Rope, x: Tensor, freqs_cos: Any, freqs_sin: Any) -> Any:
    """fp32 (cos, sin), (1, S, 1, D) each: of a pair the first cosine and the second sine"""
    reason = misfit(x, freqs_cos, freqs_sin) or rows_misfit(x, "bshd", freqs_cos, 4, width=1)
    if reason:
        return _left(reason, host, x, freqs_cos, freqs_sin)
    cos, sin = of_pairs(freqs_cos, freqs_sin)
    return _rotated(x, cos, sin, interleaved=True, rounding=promoted(x, cos))


def helios(host: Rope, x: Tensor, freqs_cis: Any) -> Any:
    """fp32 (B, S, 2 D), cosines before sines: of a pair the first cosine and the second sine"""
    reason = misfit(x, freqs_cis) or rows_misfit(x, "bshd", freqs_cis, 3, width=2)
    if reason:
        return _left(reason, host, x, freqs_cis)
    cos, sin = of_pairs(*freqs_cis.chunk(2, dim=-1))
    return _rotated(x, cos, sin, interleaved=True, rounding=promoted(x, cos))


def mochi(host: Rope, x: Tensor, freqs_cos: Any, freqs_sin: Any) -> Any:
    """fp32 (cos, sin), (S, H, D / 2) each, learned for each head"""
    reason = misfit(x, freqs_cos, freqs_sin)
    if not reason and tuple(freqs_cos.shape) != (x.shape[1], x.shape[2], x.shape[3] // 2):
        reason = _SHAPES
    if reason:
        return _left(reason, host, x, freqs_cos, freqs_sin)
    return _rotated(x, freqs_cos[None], freqs_sin[None], interleaved=True)


def kandinsky5(host: Rope, x: Tensor, rope: Any) -> Any:
    """fp32 2 x 2 rotations (B, S, 1, D / 2, 2, 2); the result is rounded to bf16 first"""
    # `.to(bfloat16)` is of the fp32 sum: anything but bf16 goes through it.
    rotated = _matrices(host, x if x.dtype == torch.bfloat16 else x.float(), rope)
    return rotated.to(torch.bfloat16)


def kandinsky6(host: Rope, x: Tensor, rope: Any) -> Any:
    """fp32 2 x 2 rotations (S, 1, D / 2, 2, 2)"""
    return _matrices(host, x, rope)


def prx(host: Rope, xq: Tensor, freqs_cis: Any) -> Any:
    """fp32 2 x 2 rotations (1, 1, S, D / 2, 2, 2)"""
    reason = misfit(xq, freqs_cis, moves=True)
    if not reason and (freqs_cis.dim() != 6 or freqs_cis.shape[1] != 1):
        reason = _SHAPES
    if not reason:
        reason = rows_misfit(xq, "bhsd", freqs_cis[:, 0, :, :, 0, 0], 3)
    if reason:
        return _left(reason, host, xq, freqs_cis)
    cos, sin = columns(freqs_cis.to(xq.device))
    return _rotated(xq, cos[:, 0], sin[:, 0], layout="bhsd", interleaved=True)


def hidream(host: Rope, xq: Tensor, xk: Tensor, freqs_cis: Any) -> Any:
    """fp32 2 x 2 rotations (B, S, 1, D / 2, 2, 2), q and k in one call"""
    reason = misfit(xq, freqs_cis) or pair_misfit(xq, xk)
    if not reason and freqs_cis.dim() != 6:
        reason = _SHAPES
    if not reason:
        reason = rows_misfit(xq, "bshd", freqs_cis[..., 0, 0], 4)
    if reason:
        return _left(reason, host, xq, xk, freqs_cis)
    return _rotated_both(xq, xk, *columns(freqs_cis), interleaved=True)


def ltx(host: Rope, x: Tensor, freqs: Any) -> Any:
    """fp32 (cos, sin), (B, S, H D) each, before the heads are split"""
    if not is_pair(freqs):
        return _left(_WORDS, host, x, freqs)
    reason = misfit(x, *freqs, rank=3)
    cos, sin = freqs
    if not reason and not (tuple(cos.shape[1:]) == tuple(x.shape[1:]) and cos.shape[0] in (1, x.shape[0])):
        reason = _SHAPES
    if reason:
        return _left(reason, host, x, freqs)
    # A pair is two neighbours, so any even part of the row will do for a head.
    width = math.gcd(x.shape[-1], 128)
    x, cos, sin = (part.unflatten(-1, (-1, width)) for part in (x, cos, sin))
    return _rotated(x, cos, sin, interleaved=True).flatten(2)


def ltx2_split(host: Rope, x: Tensor, freqs: Any) -> Any:
    """fp32 (cos, sin), (B, H, S, D / 2) each, of halves; products by addcmul"""
    if not is_pair(freqs):
        return _left(_WORDS, host, x, freqs)
    reason = misfit(x, *freqs, rank=3)
    cos, sin = freqs
    if not reason and not (
        cos.dim() == 4
        and (cos.shape[0], cos.shape[2]) == tuple(x.shape[:2])
        and 2 * cos.shape[1] * cos.shape[3] == x.shape[2]
        and 2 * cos.shape[3] <= MAX_HEAD_DIM
    ):
        reason = _SHAPES
    if reason:
        return _left(reason, host, x, freqs)
    x = x.unflatten(-1, (cos.shape[1], -1))
    return _rotated(x, cos.transpose(1, 2), sin.transpose(1, 2), rounding="addcmul").flatten(2)


def joy(host: Rope, xq: Tensor, xk: Tensor, freqs_cis: Any) -> Any:
    """fp32 (cos, sin), (S, D) each, q and k in one call"""
    return _joint(host, xq, xk, freqs_cis, 2)


def joy_plus(host: Rope, xq: Tensor, xk: Tensor, freqs_cis: Any) -> Any:
    """fp32 (cos, sin), (B, S, D) each, q and k in one call"""
    return _joint(host, xq, xk, freqs_cis, 3)


def halves(host: Rope, x: Tensor, rope: Any) -> Any:
    """(cos, sin), (S, D) each, in the model's dtype; halves, products in fp32"""
    if not is_pair(rope):
        return _left(_WORDS, host, x, rope)
    reason = misfit(x, *rope, moves=True) or rows_misfit(x, "bshd", rope[0], 2, width=1)
    if reason:
        return _left(reason, host, x, rope)
    cos, sin = (table.to(x.device) for table in rope)
    return _rotated(x, cos, sin)


def minimax_h3(host: Rope, x: Tensor, cos: Any, sin: Any) -> Any:
    """fp32 (cos, sin), (S, R) each, of the first R of D elements; halves, all in the model's dtype"""
    reason = misfit(x, cos, sin) or rows_misfit(x, "bshd", cos, 2, width=0)
    return _left(reason, host, x, cos, sin) if reason else _rotated_in_dtype(x, cos, sin)


def minimax_music3(host: Rope, x: Tensor, rotary_emb: Any) -> Any:
    """fp32 (cos, sin), (S, R) each, of the first R of D elements; halves, all in the model's dtype"""
    if not is_pair(rotary_emb):
        return _left(_WORDS, host, x, rotary_emb)
    reason = misfit(x, *rotary_emb) or rows_misfit(x, "bshd", rotary_emb[0], 2, width=0)
    return _left(reason, host, x, rotary_emb) if reason else _rotated_in_dtype(x, *rotary_emb)


def ernie(host: Rope, x: Tensor, freqs_cis: Any) -> Any:
    """fp32 angles (B, S, 1, R), two neighbours alike, of halves; all in the model's dtype"""
    reason = misfit(x, freqs_cis) or rows_misfit(x, "bshd", freqs_cis, 4, width=0)
    if reason or freqs_cis.dtype != torch.float32:
        return _left(reason or "the tables' dtype", host, x, freqs_cis)
    return _rotated_in_dtype(x, *waves(freqs_cis))


def stable_audio3(host: Rope, t: Tensor, freqs: Any) -> Any:
    """angles (S, R), of the first R of D elements; halves"""
    reason = misfit(t, freqs)
    if not reason and (freqs.dim() != 2 or freqs.shape[0] < t.shape[1] or not _fits_partly(freqs, t)):
        reason = _SHAPES
    if reason:
        return _left(reason, host, t, freqs)
    first = freqs.shape[0] - t.shape[1]
    cos, sin = waves(freqs)
    return _rotated(t, cos[first:], sin[first:], rotary_dim=freqs.shape[1])


def allegro(host: Rope, x: Tensor, freqs_cis: Any, positions: Any) -> Any:
    """fp32 (cos, sin), (P, D / 3) each, and position ids, for each third of a head; halves of a third"""
    tables = [table for pair in freqs_cis for table in pair]
    reason = misfit(x, *tables)
    third = x.shape[-1] // 3
    batch, _, seqlen, head_dim = x.shape if x.dim() == 4 else (0, 0, 0, 0)
    fitting = len(freqs_cis) == len(positions) == 3 and 3 * third == head_dim and third % 2 == 0
    if not reason and not (
        fitting
        and all(tuple(ids.shape) in ((batch, seqlen), (1, seqlen)) and ids.device == x.device for ids in positions)
        and all(table.dim() == 2 and table.shape[1] == third for table in tables)
    ):
        reason = _SHAPES
    if reason:
        return _left(reason, host, x, freqs_cis, positions)
    for axis, ((cos, sin), ids) in enumerate(zip(freqs_cis, positions)):
        x, _ = apply_rope(
            x, None, cos, sin, position_ids=ids, layout="bhsd", rotary_dim=third, rotary_offset=axis * third
        )
    note("jitrope")
    return x


def wan_animate2(host: Rope, x: Tensor, grid_sizes: Any, freqs: Any, time_stride: int = 1) -> Any:
    """complex128 (P, D / 2), a part of it for each axis of the grid of patches; the result is fp32"""
    reason = misfit(x, freqs, complex_table=True)
    if not reason and (freqs.dim() != 2 or 2 * freqs.shape[1] != x.shape[3] or freqs.dtype != torch.complex128):
        reason = _SHAPES
    if reason:
        return _left(reason, host, x, grid_sizes, freqs, time_stride)
    grids = grid_sizes.tolist()  # the host asks the device for it in every call too
    if len(grids) != x.shape[0] or any(grid != grids[0] for grid in grids) or math.prod(grids[0]) != x.shape[1]:
        return _left("samples of different or padded grids", host, x, grid_sizes, freqs, time_stride)
    frames, height, width = grids[0]
    return _complex(x.float(), _grid_table(freqs, frames, height, width, time_stride), "bshd")


def sana_wm(host: Rope, x: Tensor, freqs: Any) -> Any:
    """complex64 (1, 1, S, D / 2), of q and k in (B, H, D, S)"""
    rows = x.permute(0, 1, 3, 2)
    reason = misfit(rows, freqs, complex_table=True) or rows_misfit(rows, "bhsd", freqs, 4)
    return _left(reason, host, x, freqs) if reason else _complex(rows, freqs, "bhsd").permute(0, 1, 3, 2)


def sana_wm_camera(
    host: Rope, feats: Tensor, matrix: Tensor, rotary_emb: Any = None, inverse_rope: bool = False
) -> Any:
    """complex64 (1, 1, S, D / 4), of the second half of a head; the first is turned by the camera's matrices"""
    if rotary_emb is None:
        return host(feats, matrix)
    half = feats.shape[-1] // 2
    reason = misfit(feats, rotary_emb, complex_table=True) or rows_misfit(feats[..., half:], "bhsd", rotary_emb, 4)
    turned = None if reason else host(feats, matrix)
    if turned is None or turned.dtype != feats.dtype:
        return _left(reason or "the camera's dtype", host, feats, matrix, rotary_emb, inverse_rope)
    return _complex(turned, rotary_emb, "bhsd", rotary_dim=half, rotary_offset=half, inverse=inverse_rope)


# ---- what they have in common ------------------------------------------------------------------------


def _left(reason: str, host: Rope, *arguments: Any, **words: Any) -> Any:
    note("host", reason)
    return host(*arguments, **words)


def _rotated(x: Tensor, cos: Tensor | None, sin: Tensor | None, **options: Any) -> Tensor:
    note("jitrope")
    return apply_rope(x, None, cos, sin, **options)[0]


def _rotated_both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
    note("jitrope", count=2)
    return apply_rope(q, k, cos, sin, **options)


def _rotated_in_dtype(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _rotated(x, cos, sin, rotary_dim=cos.shape[-1], rounding="dtype")


def _complex(x: Tensor, table: Tensor, layout: str, **options: Any) -> Tensor:
    rounding = _COMPLEX[table.dtype]
    table = (table[:, 0] if table.dim() == 4 else table).resolve_conj()  # 4: (B, 1, S, D / 2)
    return _rotated(x, None, None, freqs_cis=table, layout=layout, interleaved=True, rounding=rounding, **options)


def _matrices(host: Rope, x: Tensor, rope: Any) -> Any:
    """2 x 2 rotations (S, 1, D / 2, 2, 2), or with a batch axis, of x (S, H, D) or (B, S, H, D)."""
    rows, table = (x if x.dim() == 4 else x[None]), (rope if rope.dim() == 6 else rope[None])
    reason = misfit(rows, rope)
    if not reason and table.dim() != 6:
        reason = _SHAPES
    if not reason:
        reason = rows_misfit(rows, "bshd", table[..., 0, 0], 4)
    if reason or table.shape[2] != 1:
        return _left(reason or _SHAPES, host, x, rope)
    cos, sin = columns(rope)
    if rope.dim() == 5:
        cos, sin = cos[None], sin[None]
    return _rotated(rows, cos, sin, interleaved=True).view(x.shape)


def _joint(host: Rope, q: Tensor, k: Tensor, tables: Any, dims: int) -> Any:
    if not is_pair(tables):
        return _left(_WORDS, host, q, k, tables)
    reason = misfit(q, *tables, moves=True) or pair_misfit(q, k) or rows_misfit(q, "bshd", tables[0], dims, width=1)
    if reason:
        return _left(reason, host, q, k, tables)
    cos, sin = (table.to(q.device) for table in tables)
    return _rotated_both(q, k, cos, sin, interleaved=True)


def promoted(x: Tensor, table: Tensor) -> str:
    """Without an upcast of its own a host computes in the wider dtype of the two."""
    return "dtype" if x.dtype == table.dtype != torch.float32 else "fp32"


def is_pair(tables: Any) -> bool:
    return isinstance(tables, (tuple, list)) and len(tables) == 2


def misfit(x: Tensor, *tables: Any, complex_table: bool = False, moves: bool = False, rank: int = 4) -> str:
    """Why a call is not one whose arithmetic jitrope has, "" if it is. moves: the host takes tables from elsewhere."""
    if x.dim() != rank or (rank == 4 and x.shape[-1] > MAX_HEAD_DIM):
        return f"q and k are not (B, S, H, D) with D up to {MAX_HEAD_DIM}"
    if x.dtype not in _FLOATS or x.device.type not in ("cuda", "cpu"):
        return "q and k are not fp32, fp16 or bf16 on a CPU or CUDA device"
    for table in tables:
        if not isinstance(table, Tensor) or table.dtype not in (_COMPLEX if complex_table else _FLOATS):
            return "the tables' dtype"
        if table.device != x.device and not moves:
            return "the tables are on another device"
        if table.requires_grad and torch.is_grad_enabled():
            return "the tables take a gradient"
    if len(tables) == 2 and (tables[0].shape != tables[1].shape or tables[0].dtype != tables[1].dtype):
        return _SHAPES
    return ""


def pair_misfit(q: Tensor, k: Tensor) -> str:
    same = q.dtype == k.dtype and q.device == k.device and q.dim() == k.dim() == 4
    return (
        "" if same and q.shape[:2] == k.shape[:2] and q.shape[3] == k.shape[3] else "q and k differ in shape or dtype"
    )


def rows_misfit(x: Tensor, layout: str, table: Tensor, dims: int, width: float = 0.5) -> str:
    """Whether a table has exactly a row for each token. dims: 2 (S, W), 3 (B, S, W), 4 (B, S, H, W) in the layout.

    width: of a row, in heads; 0: any even part of a head.
    """
    if table.dim() != dims:
        return _SHAPES
    batch, seqlen, heads = (x.shape[axis] for axis in ((0, 1, 2) if layout == "bshd" else (0, 2, 1)))
    axes = table.shape[:-1]
    if dims == 4:
        table_heads = axes[2] if layout == "bshd" else axes[1]
        if table_heads != 1 and not (layout == "bshd" and table_heads == heads):
            return _SHAPES
    rows = axes[0] if dims == 2 else axes[2] if dims == 4 and layout == "bhsd" else axes[1]
    if rows != seqlen or (dims > 2 and axes[0] not in (1, batch)):
        return _SHAPES
    fitting = table.shape[-1] == int(width * x.shape[-1]) if width else _fits_partly(table, x)
    return "" if fitting else _SHAPES


def _fits_partly(table: Tensor, x: Tensor) -> bool:
    return table.shape[-1] % 2 == 0 and 0 < table.shape[-1] <= x.shape[-1]


def _grid_table(freqs: Tensor, frames: int, height: int, width: int, stride: int) -> Tensor:
    """The table (S, D / 2) of a grid whose axes have their own parts of the angles."""
    pairs = freqs.shape[1]
    small = pairs // 3
    parts = freqs.split([pairs - 2 * small, small, small], dim=1)
    axes = (parts[0][: frames * stride : stride, None, None], parts[1][:height, None], parts[2][:width])
    return torch.cat([axis.expand(frames, height, width, -1) for axis in axes], dim=-1).flatten(0, 2)
