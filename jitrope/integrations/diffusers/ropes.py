"""Rope of diffusers: jitrope's functions for the rope functions of its modules, in the host's words and with its bits.

`ROPES` says which function each class calls. A call that jitrope refuses (`InvalidInput`) is the host's.

Tables are used as views wherever possible. Tables that must be converted are converted in each call, and nothing is
kept, because a program may write to a table between two calls without a reliable sign: inference tensors have no
version, and a write through `.data` does not change it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...api import apply_rope
from ...base.errors import InvalidInput
from .. import _host

Tables = Sequence[Tensor]

WORDS = "arguments that jitrope does not know"
_SHAPES = "the tables' shape does not fit q and k"


class Form(NamedTuple):
    """The tables of a rope, (cos, sin) or one complex table, and how they are used."""

    axes: int = 2  # of the tables: 2 (S, W), 3 (B, S, W) or 4 (B, S, H, W)
    width: float = 1  # of a row, in heads; 0: only the first part of a head is rotated, and rows have its width
    interleaved: bool = True  # this and `layout` as in `apply_rope`
    rounding: str = "fp32"  # or "promoted": in the wider dtype of q and tables; "complex": in the table's dtype
    layout: str = "bshd"

    def words(self, q: Tensor, tables: Tables, tokens: int | None = None) -> dict[str, Any]:
        """The words of `apply_rope` for tables of q's tokens, or of that number."""
        table = tables[0]
        tokens = q.shape[1 if self.layout == "bshd" else 2] if tokens is None else tokens
        width = int(self.width * q.shape[-1]) if self.width else table.shape[-1]
        if table.dim() != self.axes or table.shape[min(self.axes - 2, 1)] != tokens or table.shape[-1] != width:
            raise InvalidInput(_SHAPES)
        names = ("cos", "sin") if len(tables) == 2 else ("freqs_cis",)
        words: dict[str, Any] = {name: part.to(q.device).resolve_conj() for name, part in zip(names, tables)}
        words |= {"interleaved": self.interleaved, "rounding": self.rounding}
        if self.rounding == "complex":
            words["rounding"] = _host.COMPLEX.get(table.dtype, "complex64")
        elif self.rounding == "promoted":
            words["rounding"] = "dtype" if q.dtype == table.dtype != torch.float32 else "fp32"
        return words if self.width else {**words, "rotary_dim": width}

    def turn(self, q: Tensor, tables: Tables, k: Tensor | None = None, **words: Any) -> tuple[Tensor, Any]:
        """(q, k) rotated."""
        return apply_rope(q, k, layout=self.layout, **self.words(q, tables), **words)


PAIRS = Form()  # as FLUX has them
HEADS = Form(axes=4)  # LTX: each head has its own
HALF = Form(axes=4, width=0.5, rounding="promoted")  # Wan
ROWS = Form(axes=3, width=0.5, rounding="complex")  # Z-Image
TURNS = Form(axes=2, width=0.5, rounding="complex")  # Qwen-Image
_HALVES = Form(interleaved=False)
_PART = Form(width=0, interleaved=False, rounding="dtype")
_MATRICES = Form(axes=4, width=0.5)
_COLUMNS = ROWS._replace(layout="bhsd")


def pair(tables: Any) -> Tables:
    """The host's (cos, sin). It may be asked for before the projections, which the host would compute again."""
    if not isinstance(tables, (tuple, list)) or len(tables) != 2:
        raise InvalidInput(WORDS)
    if getattr(tables[0], "dtype", None) == torch.float64:
        raise InvalidInput("cos is torch.float64")
    return tables


def of_pairs(cos: Tensor, sin: Tensor) -> Tables:
    """The first cosine and the second sine of each pair, as views: half the width of a head."""
    return cos[..., 0::2], sin[..., 1::2]


def _of_matrices(table: Tensor) -> Tables:
    """The cosines and sines of a table of 2 x 2 rotations [[cos, -sin], [sin, cos]], the last two axes: one copy."""
    return table.select(-1, 0).contiguous().unbind(-1)


# ---- the host's functions, by its parameters --------------------------------------------------------------


def shared(
    x: Tensor, freqs_cis: Any, use_real: bool = True, use_real_unbind_dim: int = -1, sequence_dim: int = 2
) -> Tensor:
    """diffusers.models.embeddings: tables (S, D), or complex (B, S, D / 2)."""
    if use_real_unbind_dim not in (-1, -2) or sequence_dim not in (1, 2):
        raise InvalidInput(WORDS)
    if not use_real:
        return ROWS.turn(x, (freqs_cis,))[0]
    form = Form(interleaved=use_real_unbind_dim == -1, layout=("bshd", "bhsd")[sequence_dim - 1])
    return form.turn(x, pair(freqs_cis))[0]


def qwen(x: Tensor, freqs_cis: Tensor, use_real: bool = True, use_real_unbind_dim: int = -1) -> Tensor:
    """Qwen-Image and Nucleus: complex (S, D / 2)."""
    if use_real:
        raise InvalidInput(WORDS)
    return TURNS.turn(x, (freqs_cis,))[0]


def _any_flow(hidden_states: Tensor, freqs: Tensor) -> Tensor:
    return _COLUMNS._replace(rounding="complex128").turn(hidden_states, (freqs.squeeze(1),))[0]


def _sana_wm(hidden_states: Tensor, freqs: Tensor) -> Tensor:
    return _COLUMNS.turn(hidden_states.permute(0, 1, 3, 2), (freqs.squeeze(1),))[0].permute(0, 1, 3, 2)


def _helios(hidden_states: Tensor, freqs_cis: Tensor) -> Tensor:
    return HALF._replace(axes=3).turn(hidden_states, of_pairs(*freqs_cis.chunk(2, dim=-1)))[0]


def _hidream(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    return _MATRICES.turn(xq, _of_matrices(freqs_cis), xk)


def _prx(xq: Tensor, freqs_cis: Tensor) -> Tensor:
    tables = [table.squeeze(1) for table in _of_matrices(freqs_cis)]
    return _MATRICES._replace(axes=3, layout="bhsd").turn(xq, tables)[0]


def _kandinsky6(x: Tensor, rope: Tensor) -> Tensor:
    tables = _of_matrices(rope)
    rows = x if x.dim() == 4 else x[None]
    return _MATRICES.turn(rows, tables if rope.dim() == 6 else [table[None] for table in tables])[0].view(x.shape)


def _joy(xq: Tensor, xk: Tensor, freqs_cis: Any) -> tuple[Tensor, Tensor]:
    return Form(axes=pair(freqs_cis)[0].dim()).turn(xq, freqs_cis, xk)


def _halves(hidden_states: Tensor, rope: Any) -> Tensor:
    return _HALVES.turn(hidden_states, pair(rope))[0]


def _stable_audio3(t: Tensor, freqs: Tensor) -> Tensor:
    angles = freqs[-t.shape[1] :].float()
    return _PART._replace(rounding="fp32").turn(t, (angles.cos(), angles.sin()))[0]


def _minimax_music3(hidden_states: Tensor, rotary_emb: Any) -> Tensor:
    return _PART.turn(hidden_states, pair(rotary_emb))[0]


def _minimax_h3(hidden_states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _PART.turn(hidden_states, (cos, sin))[0]


def _ltx(x: Tensor, freqs: Any) -> Tensor:
    """Before the heads are split. A pair is two neighbours, so any even part of the row can be treated as a head."""
    width = math.gcd(x.shape[-1], 128)
    heads, cos, sin = (part.unflatten(-1, (-1, width)) for part in (x, *pair(freqs)))
    return HEADS.turn(heads, (cos, sin))[0].flatten(2)


def _ltx2_split(x: Tensor, freqs: Any) -> Tensor:
    cos, sin = (table.transpose(1, 2) for table in pair(freqs))
    if cos.dim() != 4 or 2 * cos.shape[2] * cos.shape[3] != x.shape[-1]:
        raise InvalidInput(_SHAPES)
    form = Form(axes=4, width=0.5, interleaved=False, rounding="addcmul")
    return form.turn(x.unflatten(-1, (cos.shape[2], -1)), (cos, sin))[0].flatten(2)


def _wan_animate2(x: Tensor, grid_sizes: Tensor, freqs: Tensor, time_stride: int = 1) -> Tensor:
    """Each axis of a grid has a part of the angles; the result is fp32."""
    grids = grid_sizes.tolist()  # the host also waits for the device in every call
    if len(grids) != x.shape[0] or any(grid != grids[0] for grid in grids) or math.prod(grids[0]) != x.shape[1]:
        raise InvalidInput("samples of different or padded grids")
    frames, height, width = grids[0]
    small = freqs.shape[1] // 3
    first, *rest = freqs.split([freqs.shape[1] - 2 * small, small, small], dim=1)
    axes = (first[: frames * time_stride : time_stride, None, None], rest[0][:height, None], rest[1][:width])
    table = torch.cat([axis.expand(frames, height, width, -1) for axis in axes], dim=-1)
    return TURNS._replace(rounding="complex128").turn(x.float(), (table.flatten(0, 2),))[0]


# ---- the classes that rotate ------------------------------------------------------------------------------

_LTX2 = "LTX2AudioVideo LTX2Perturbed SanaWMLTX2AudioVideo SanaWMLTX2Perturbed SanaWMLTX2Refiner"
_CLASSES: dict[tuple[Callable[..., Any], str], str] = {
    (shared, "apply_rotary_emb"): """
        Flux FluxIPAdapter Flux2 Flux2KV Flux2ParallelSelf Flux2KVParallelSelf Flux3 LongCatImage OvisImage Bria
        BriaFibo Krea2 MotifVideo MotifVideoCross AceStep Lumina2 HunyuanVideo HunyuanVideo15 HunyuanImage Hunyuan
        FusedHunyuan PAGHunyuan PAGCFGHunyuan CogVideoX FusedCogVideoX EasyAnimate CogView4 CogView4Training GlmImage
        Cosmos OmniGen Lumina StableAudio""",
    (qwen, "apply_rotary_emb_qwen"): "QwenDoubleStream QwenImage21 QwenImage21Flex",
    (qwen, "_apply_rotary_emb_nucleus"): "NucleusMoE",
    (_any_flow, "apply_rotary_emb"): "AnyFlow AnyFlowCausal",
    (_sana_wm, "_apply_rotary_emb"): "SanaWMBidirectionalGDNAttention SanaWMSoftmaxAttention",
    (_helios, "apply_rotary_emb_transposed"): "Helios",
    (_hidream, "apply_rope"): "HiDream",
    (_prx, "apply_rope"): "PRX",
    (_kandinsky6, "apply_rotary"): "Kandinsky6 Kandinsky6SR",
    (_joy, "_apply_rotary_emb"): "JoyImage",
    (_joy, "_apply_rotary_emb_batched"): "JoyImageEditPlus",
    (_halves, "_apply_rotary_emb"): "AudioDiTSelf AudioDiTCross",
    (_stable_audio3, "_apply_rotary_partial"): "StableAudio3Self",
    (_minimax_music3, "_apply_partial_rotary_emb"): "MiniMaxMusic3",
    (_minimax_h3, "_apply_rotary_emb"): "MiniMaxH3",
    (_ltx, "apply_rotary_emb"): "LTXVideo",
    (_ltx, "apply_interleaved_rotary_emb"): _LTX2,
    (_ltx2_split, "apply_split_rotary_emb"): _LTX2,
    (_wan_animate2, "rope_apply"): "WanAnimate2",
}

ROPES: dict[str, list[tuple[Callable[..., Any], str]]] = {
    cls: [rope for rope, classes in _CLASSES.items() if cls in classes.split()]
    for cls in " ".join(_CLASSES.values()).split()
}
"""By the name of a class, up to "AttnProcessor": our function, and the name of the host's that it calls."""

LEFT = {"Mochi", "Kandinsky5", "ErnieImageSingleStream", "SanaLinear", "Cosmos3", "Ideogram4", "BriaFibo2", "Allegro"}
"""Classes that rotate in their own code, or (Allegro) by three tables. Nobody measured a gain."""
