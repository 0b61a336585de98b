"""Megatron-core: the fused-rope hooks of `megatron.core.models.common.embeddings.rope_utils`.

>>> from jitrope.integrations import megatron as jitrope_megatron
>>> report = jitrope_megatron.enable()  # before the model's configuration is made, with apply_rope_fusion=True
>>> jitrope_megatron.disable()

With or without TransformerEngine, `apply_rope_fusion` then means jitrope. The hooks do not receive the configuration,
so the patched `apply_rotary_pos_emb` also passes on the pairing of packed batches, multi-head latent attention's
(interleaved pairs into halves), mscale, and mRoPE with a batch. Without `apply_rope_fusion` the host's own code runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..api import apply_rope
from ..base.errors import InvalidInput
from ..ops.values import Packed
from . import _host, transformer_engine


def fused_apply_rotary_pos_emb(
    t: Tensor, freqs: Tensor, transpose_output_memory: bool = False, interleaved: bool = False
) -> Tensor:
    """Rotate t [s, b, h, d] by angles freqs [s, 1 or b, 1, r] in fp32.

    transpose_output_memory is ignored, as in Megatron's own hook; the output is contiguous.

    >>> t = jitrope_megatron.fused_apply_rotary_pos_emb(torch.randn(16, 1, 8, 64), torch.randn(16, 1, 1, 64))

    Raises:
        InvalidInput, CompileError: as `jitrope.apply_rope`.
    """
    return _rotate(t, freqs, interleaved)


def fused_apply_rotary_pos_emb_thd(
    t: Tensor, cu_seqlens: Tensor, freqs: Tensor, cp_size: int = 1, cp_rank: int = 0, interleaved: bool = False
) -> Tensor:
    """Rotate packed t [tokens, h, d], this rank's share, by angles freqs [rows, 1, 1, r].

    cu_seqlens are offsets of the whole batch. As in Megatron, a table with as many rows as the batch has
    tokens has a row for each token (mRoPE), and any other table a row for each position.

    >>> t, cu_seqlens = torch.randn(10, 8, 64), torch.tensor([0, 7, 10])
    >>> t = jitrope_megatron.fused_apply_rotary_pos_emb_thd(t, cu_seqlens, torch.randn(16, 1, 1, 64))

    Raises:
        InvalidInput, CompileError: as `jitrope.apply_rope`.
    """
    return _rotate(t, freqs, interleaved, positions=_packed(t, freqs, cu_seqlens, cp_size, cp_rank))


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    config: Any,
    cu_seqlens: Tensor | None = None,
    mscale: float = 1.0,
    cp_group: torch.distributed.ProcessGroup | None = None,
) -> Tensor:
    """`rope_utils.apply_rotary_pos_emb` with `apply_rope_fusion`.

    >>> from types import SimpleNamespace  # in place of a TransformerConfig
    >>> config = SimpleNamespace(apply_rope_fusion=True, rotary_interleaved=False, multi_latent_attention=False)
    >>> t = jitrope_megatron.apply_rotary_pos_emb(torch.randn(16, 1, 8, 64), torch.randn(16, 1, 1, 64), config)

    Args:
        t: [s, b, h, d], or [tokens, h, d] with cu_seqlens.
        freqs: angles in radians [s, 1 or b, 1, r]; without cu_seqlens, for this rank's positions.
        config: an object with `apply_rope_fusion`, `rotary_interleaved` and `multi_latent_attention`.
        cu_seqlens: offsets of the whole packed batch, int32 or int64 [sequences + 1].
        mscale: a factor of sines and cosines.
        cp_group: the context parallel group, with cu_seqlens; default: Megatron's own, if it is set up.

    Returns:
        t rotated, with the same shape and dtype, contiguous.

    Raises:
        InvalidInput: the arguments do not fit together, apply_rope_fusion is off, or both multi_latent_attention and
            rotary_interleaved are on.
        CompileError: the kernel could not be built.
    """
    if not config.apply_rope_fusion:
        raise InvalidInput("apply_rope_fusion is off")
    positions = None
    if cu_seqlens is not None:
        if cp_group is None:
            from megatron.core import parallel_state

            cp_group = parallel_state.get_context_parallel_group()
        positions = _packed(t, freqs, cu_seqlens, cp_group.size(), cp_group.rank())
    mla = bool(config.multi_latent_attention)
    if mla and config.rotary_interleaved:
        raise InvalidInput("apply_rotary_pos_emb: multi_latent_attention with rotary_interleaved is not supported")
    return _rotate(t, freqs, config.rotary_interleaved, mla, positions=positions, mscale=mscale)


def _packed(t: Tensor, freqs: Tensor, cu_seqlens: Tensor, cp_size: int, cp_rank: int) -> Packed:
    row_for_each_token = freqs.shape[0] == t.shape[0] * cp_size
    return Packed(cu_seqlens, packed_table=row_for_each_token, cp_size=cp_size, cp_rank=cp_rank)


def _rotate(t: Tensor, freqs: Tensor, interleaved: bool, mla: bool = False, **words: Any) -> Tensor:
    words |= {"layout": "thd" if words.get("positions") else "sbhd", "rotary_dim": freqs.shape[-1]}
    words |= {"interleaved": interleaved or mla, "interleaved_out": interleaved}
    if mla:  # both halves of the table are equal; input pairs are neighbours, output pairs are not
        freqs = freqs[..., : freqs.shape[-1] // 2]
    return apply_rope(t, None, freqs=freqs.float(), **words)[0].contiguous()


_ROPE_UTILS = "megatron.core.models.common.embeddings.rope_utils"
_FUSED_QKV = "megatron.core.transformer.attention:apply_fused_qkv_rotary_pos_emb"
_FUNCTIONS: dict[str, _host.Function] = {
    f"{_ROPE_UTILS}:fused_apply_rotary_pos_emb": fused_apply_rotary_pos_emb,
    f"{_ROPE_UTILS}:fused_apply_rotary_pos_emb_thd": fused_apply_rotary_pos_emb_thd,
    f"{_ROPE_UTILS}:apply_rotary_pos_emb": apply_rotary_pos_emb,
    _FUSED_QKV: transformer_engine.apply_fused_qkv_rotary_pos_emb,
}


def enable() -> _host.Report:
    """Replace Megatron's rope in every module that holds it. Raises ImportError without Megatron."""
    return _host.enable("megatron", _FUNCTIONS, {_FUSED_QKV})


def disable() -> None:
    """Undo `enable`."""
    _host.disable("megatron")
