"""Rope of diffusers: jitrope's functions for the rope functions of its modules, in the host's words and with its bits.

`ROPES` says which classes call a function. Tables are used as views, and nothing is kept of a call.
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


class Form(NamedTuple):
    """The tables of a rope, (cos, sin) or one complex table, and how they are used."""

    axes: int = 2  # of the tables: 2 (S, W), 3 (B, S, W) or 4 (B, S, H, W)
    width: float = 1  # of a row, in heads
    interleaved: bool = True  # this and `layout` as in `apply_rope`
    rounding: str = "fp32"  # with cos and sin; "promoted": in the wider dtype of q and tables
    layout: str = "bshd"

    def words(self, tables: Tables, *tensors: Tensor) -> dict[str, Any]:
        """The words of `apply_rope` for tables of all tokens of these tensors, one tensor after another."""
        x, table = tensors[0], tables[0]
        tokens = sum(each.shape[self.layout.index("s")] for each in tensors)
        width = int(self.width * x.shape[-1])
        if table.dim() != self.axes or table.shape[min(self.axes - 2, 1)] != tokens or table.shape[-1] != width:
            raise InvalidInput("the tables' shape does not fit q and k")
        rounding = _host.COMPLEX.get(table.dtype, self.rounding)
        if rounding == "promoted":
            rounding = "dtype" if x.dtype == table.dtype != torch.float32 else "fp32"
        names = ("cos", "sin") if len(tables) == 2 else ("freqs_cis",)
        words: dict[str, Any] = {name: part.to(x.device) for name, part in zip(names, tables)}
        return words | {"interleaved": self.interleaved, "rounding": rounding}

    def turn(self, x: Tensor, tables: Tables) -> Tensor:
        """x rotated."""
        return apply_rope(x, None, layout=self.layout, **self.words(tables, x))[0]


PAIRS = Form()  # as FLUX has them
HEADS = Form(axes=4)  # LTX: each head has its own
HALF = Form(axes=4, width=0.5, rounding="promoted")  # Wan
ROWS = Form(axes=3, width=0.5)  # Z-Image
TURNS = Form(axes=2, width=0.5)  # Qwen-Image
_COLUMNS = ROWS._replace(layout="bhsd")


def pair(tables: Any) -> Tables:
    """The host's (cos, sin). It may be asked for before the projections, which the host would compute again."""
    if not isinstance(tables, (tuple, list)) or len(tables) != 2 or tables[0].dtype == torch.float64:
        raise InvalidInput("there are no two tables, or cos is torch.float64")
    return tables


def of_pairs(cos: Tensor, sin: Tensor) -> Tables:
    """The first cosine and the second sine of each pair, as views: half the width of a head."""
    return cos[..., 0::2], sin[..., 1::2]


# ---- the host's functions, by its parameters --------------------------------------------------------------


def shared(
    x: Tensor, freqs_cis: Any, use_real: bool = True, use_real_unbind_dim: int = -1, sequence_dim: int = 2
) -> Tensor:
    """diffusers.models.embeddings: tables (S, D), or complex (B, S, D / 2)."""
    if use_real_unbind_dim not in (-1, -2) or sequence_dim not in (1, 2):
        raise InvalidInput(WORDS)
    if not use_real:
        return ROWS.turn(x, (freqs_cis,))
    form = Form(interleaved=use_real_unbind_dim == -1, layout=("bshd", "bhsd")[sequence_dim - 1])
    return form.turn(x, pair(freqs_cis))


def qwen(x: Tensor, freqs_cis: Tensor, use_real: bool = True, use_real_unbind_dim: int = -1) -> Tensor:
    """Qwen-Image and Nucleus: complex (S, D / 2)."""
    if use_real:
        raise InvalidInput(WORDS)
    return TURNS.turn(x, (freqs_cis,))


def _any_flow(hidden_states: Tensor, freqs: Tensor) -> Tensor:
    return _COLUMNS.turn(hidden_states, (freqs.squeeze(1),))


def _sana_wm(hidden_states: Tensor, freqs: Tensor) -> Tensor:
    return _COLUMNS.turn(hidden_states.permute(0, 1, 3, 2), (freqs.squeeze(1),)).permute(0, 1, 3, 2)


def _helios(hidden_states: Tensor, freqs_cis: Tensor) -> Tensor:
    return HALF._replace(axes=3).turn(hidden_states, of_pairs(*freqs_cis.chunk(2, dim=-1)))


def _joy(xq: Tensor, xk: Tensor, freqs_cis: Any) -> Any:
    return apply_rope(xq, xk, **Form(axes=pair(freqs_cis)[0].dim()).words(freqs_cis, xq))


def _halves(hidden_states: Tensor, rope: Any) -> Tensor:
    return Form(interleaved=False).turn(hidden_states, pair(rope))


def _ltx(x: Tensor, freqs: Any) -> Tensor:
    """Before the heads are split. A pair is two neighbours, so any even part of the row can be treated as a head."""
    width = math.gcd(x.shape[-1], 128)
    heads, cos, sin = (part.unflatten(-1, (-1, width)) for part in (x, *pair(freqs)))
    return HEADS.turn(heads, (cos, sin)).flatten(2)


def _ltx2_split(x: Tensor, freqs: Any) -> Tensor:
    cos, sin = (table.transpose(1, 2) for table in pair(freqs))
    if cos.dim() != 4 or 2 * cos.shape[2] * cos.shape[3] != x.shape[-1]:
        raise InvalidInput(WORDS)
    form = Form(axes=4, width=0.5, interleaved=False, rounding="addcmul")
    return form.turn(x.unflatten(-1, (cos.shape[2], -1)), (cos, sin)).flatten(2)


# ---- the classes that rotate ------------------------------------------------------------------------------

_LTX2 = "LTX2AudioVideo LTX2Perturbed SanaWMLTX2AudioVideo SanaWMLTX2Perturbed SanaWMLTX2Refiner"
ROPES: dict[tuple[Callable[..., Any], str], str] = {
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
    (_joy, "_apply_rotary_emb"): "JoyImage",
    (_joy, "_apply_rotary_emb_batched"): "JoyImageEditPlus",
    (_halves, "_apply_rotary_emb"): "AudioDiTSelf AudioDiTCross",
    (_ltx, "apply_rotary_emb"): "LTXVideo",
    (_ltx, "apply_interleaved_rotary_emb"): _LTX2,
    (_ltx2_split, "apply_split_rotary_emb"): _LTX2,
}
"""By our function and the name of the host's: the classes that call it, by their names up to "AttnProcessor"."""
