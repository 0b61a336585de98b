"""Megatron-core: the fused-rope hooks of `megatron.core.models.common.embeddings.rope_utils`.

>>> from jitrope.integrations import megatron as jitrope_megatron
>>> report = jitrope_megatron.enable()  # before the model's configuration is made, with apply_rope_fusion=True
>>> jitrope_megatron.disable()

With or without TransformerEngine, `apply_rope_fusion` then means jitrope. The hooks do not receive the configuration,
so the patched `apply_rotary_pos_emb` also passes on the pairing of packed batches, multi-head latent attention's
(interleaved pairs into halves), mscale, and mRoPE with a batch.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..api import apply_rope, prepare_fused_qkv
from ..base.errors import InvalidInput
from ..stages.positions import Packed
from . import _host
from ._layers import AsSelf, norm_of, without_rope
from ._norms import of_host


def fused_apply_rotary_pos_emb(
    t: Tensor, freqs: Tensor, transpose_output_memory: bool = False, interleaved: bool = False
) -> Tensor:
    """Rotate t [s, b, h, d] by angles freqs [s, 1 or b, 1, r] in fp32.

    transpose_output_memory is ignored, as in Megatron's own hook; the output is contiguous. The errors are those of
    `jitrope.apply_rope`.

    >>> t = jitrope_megatron.fused_apply_rotary_pos_emb(torch.randn(16, 1, 8, 64), torch.randn(16, 1, 1, 64))
    """
    return _rotate(t, freqs, interleaved)


def fused_apply_rotary_pos_emb_thd(
    t: Tensor, cu_seqlens: Tensor, freqs: Tensor, cp_size: int = 1, cp_rank: int = 0, interleaved: bool = False
) -> Tensor:
    """Rotate packed t [tokens, h, d], this rank's share, by angles freqs [rows, 1, 1, r].

    cu_seqlens are offsets of the whole batch. As in Megatron, a table with as many rows as the batch has
    tokens has a row for each token (mRoPE), and any other table a row for each position. The errors are those of
    `jitrope.apply_rope`.

    >>> t, cu_seqlens = torch.randn(10, 8, 64), torch.tensor([0, 7, 10])
    >>> t = jitrope_megatron.fused_apply_rotary_pos_emb_thd(t, cu_seqlens, torch.randn(16, 1, 1, 64))
    """
    return _rotate(t, freqs, interleaved, **_packed(t, freqs, cu_seqlens, cp_size, cp_rank))


def apply_rotary_pos_emb(
    t: Tensor, freqs: Tensor, config: Any, cu_seqlens: Tensor | None = None, mscale: float = 1.0,
    cp_group: torch.distributed.ProcessGroup | None = None, mla_rotary_interleaved: bool | None = None,
) -> Tensor:  # fmt: skip
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
        cp_group: the context parallel group, which cu_seqlens need.
        mla_rotary_interleaved: True: pairs are neighbours in t, and halves in the result. None:
            config.multi_latent_attention, as in the versions of Megatron without this argument.

    Returns:
        t rotated, with the same shape and dtype, contiguous.

    Raises:
        InvalidInput: the arguments do not fit together, apply_rope_fusion is off, or both mla_rotary_interleaved and
            config.rotary_interleaved are True.
        CompileError: the kernel could not be built.
    """
    if not config.apply_rope_fusion:
        raise InvalidInput("apply_rope_fusion is off")
    mla = bool(config.multi_latent_attention if mla_rotary_interleaved is None else mla_rotary_interleaved)
    if mla and config.rotary_interleaved:
        raise InvalidInput("apply_rotary_pos_emb: mla_rotary_interleaved with rotary_interleaved is not supported")
    where = _where(t, freqs, cu_seqlens, cp_group)
    return _rotate(t, freqs, config.rotary_interleaved, mla, mscale=mscale, **where)


def _packed(t: Tensor, freqs: Tensor, cu_seqlens: Tensor, cp_size: int, cp_rank: int) -> dict[str, Any]:
    """The words for t [tokens, ...]."""
    row_for_each_token = freqs.shape[0] == t.shape[0] * cp_size
    positions = Packed(cu_seqlens, packed_table=row_for_each_token, cp_size=cp_size, cp_rank=cp_rank)
    return {"layout": "thd", "positions": positions}


def _where(t: Tensor, freqs: Tensor, cu_seqlens: Tensor | None, cp_group: Any) -> dict[str, Any]:
    """The words for t [s, b, ...], or with cu_seqlens for this rank's [tokens, ...]."""
    if cu_seqlens is None:
        return {"layout": "sbhd"}
    if cp_group is None:
        raise InvalidInput("pass cp_group with cu_seqlens")
    return _packed(t, freqs, cu_seqlens, cp_group.size(), cp_group.rank())


def _rotate(t: Tensor, freqs: Tensor, interleaved: bool, mla: bool = False, **words: Any) -> Tensor:
    words = {"layout": "sbhd", "rotary_dim": freqs.shape[-1], **words}
    words |= {"interleaved": interleaved or mla, "interleaved_out": interleaved}
    if mla:  # both halves of the table are equal; input pairs are neighbours, output pairs are not
        freqs = freqs[..., : freqs.shape[-1] // 2]
    return apply_rope(t, None, freqs=freqs.float(), **words)[0].contiguous()


# ---- SelfAttention with norms of q and k ---------------------------------------------------------------


def _refusals(rope: Any, qkv: Any, layer: Any, given: dict[str, Any]) -> dict[str, bool]:
    """The reasons why norms are not fused, and whether they hold.

    rope: jitrope's function in the host. qkv: the host's method.
    """
    config, norms = layer.config, {type(getattr(layer, f"{x}_layernorm", None)).__name__ for x in "qk"}
    no_rope = config.no_rope_freq and config.no_rope_freq[layer.layer_number - 1]
    return {
        "": bool(no_rope or not config.apply_rope_fusion or norms & {"NoneType", "IdentityOp"}),
        f"{type(layer).__name__} has its own {_QKV}": _QKV in vars(layer) or getattr(type(layer), _QKV) is not qkv,
        "the host splits QKV": config.attention_output_gate or config.num_query_groups < layer.world_size,
        "apply_rotary_pos_emb was replaced": _host_module().apply_rotary_pos_emb is not rope,
        "test_mode": config.test_mode,
    }


def _cu_seqlens(layer: Any, given: dict[str, Any], of: str) -> Tensor | None:
    """The offsets of a packed batch, with padding where it has any."""
    packed = given.get("packed_seq_params")
    if packed is None or packed.qkv_format != "thd":
        return None
    padded: Tensor | None = getattr(packed, f"cu_seqlens_{of}_padded")
    return getattr(packed, f"cu_seqlens_{of}") if padded is None else padded


def _stand_in(layer: Any, freqs: Tensor, cu_seqlens: Tensor | None) -> AsSelf:
    """The layer, whose `get_query_key_value_tensors` also normalises and rotates q and k."""
    host = _host_module()
    mscale = getattr(layer, "_yarn_concentration_factor", None)  # of 0.19; 0.16 asks its configuration
    mscale = mscale or host._yarn_get_concentration_factor_from_config(layer.config)
    rope = {"freqs": freqs, "cu_seqlens": cu_seqlens, "mscale": mscale}

    def made(*given: Any, **words: Any) -> tuple[Tensor, ...]:
        qkv, split = getattr(host.SelfAttention, _QKV)(layer, *given, **{**words, "split_qkv": False})
        if cu_seqlens is None:
            return _FUSED(layer, qkv, split, **rope)  # type: ignore[no-any-return]
        return tuple(x.unsqueeze(1) for x in _FUSED(layer, qkv.squeeze(1), split, **rope))

    return AsSelf(layer, **{_QKV: made})


def _fused(layer: Any, qkv: Tensor, split: Any, freqs: Tensor, cu_seqlens: Tensor | None, mscale: float) -> Any:
    words = _where(qkv, freqs, cu_seqlens, layer.pg_collection.cp)
    words |= {"freqs": freqs.float(), "rotary_dim": freqs.shape[-1], "interleaved": layer.config.rotary_interleaved}
    norm = norm_of((layer.q_layernorm, layer.k_layernorm), qkv[..., : split[1]])
    heads = qkv.shape[-2] * split[0] // split[1], qkv.shape[-2]
    return prepare_fused_qkv(qkv, heads=heads, order="grouped", norm=norm, mscale=mscale, **words)


def _separate(reason: str, layer: Any, qkv: Tensor, split: Any, **words: Any) -> tuple[Tensor, ...]:
    """The same by the host's norms and its rope function, which may be ours."""
    _host.note_unfused("megatron", reason)
    rotate = partial(_host_module().apply_rotary_pos_emb, config=layer.config, cp_group=layer.pg_collection.cp, **words)
    q, k, v = qkv.split([*split], -1)
    q = q.unflatten(-1, (-1, split[1])).flatten(-3, -2)
    return rotate(layer.q_layernorm(q)), rotate(layer.k_layernorm(k)), v


def _host_module() -> Any:
    """The module of attention, by an import, which torch.compile can trace; it cannot trace `sys.modules`."""
    from megatron.core.transformer import attention

    return attention


_FUSED = _host.or_else("megatron", _fused, _separate)
_QKV = "get_query_key_value_tensors"
_KNOWN = "hidden_states attention_mask rotary_pos_emb attention_bias packed_seq_params"
"""The arguments of attention in training; a call with another one, as of inference, is the host's."""

_ROPE_UTILS = "megatron.core.models.common.embeddings.rope_utils"
_ATTENTION = "megatron.core.transformer.attention"
_FUNCTIONS = _host.named(_ROPE_UTILS, fused_apply_rotary_pos_emb, fused_apply_rotary_pos_emb_thd, apply_rotary_pos_emb)


@_host.alone
def enable() -> _host.Report:
    """Replace Megatron's rope in every module that holds it, and fuse the norms of `SelfAttention` with it.

    `report.calls["fused"]` counts the launches with norms, and `report.reasons` has the reasons why norms were not
    fused. Raises ImportError without Megatron.
    """
    cls, what = getattr(*_host.held("megatron", f"{_ATTENTION}:SelfAttention")), "norms of q and k and rope fused"
    report = _host.enable("megatron", _FUNCTIONS)
    rope, qkv = _host.load("megatron", _ROPE_UTILS).apply_rotary_pos_emb, getattr(cls, _QKV)
    if not of_host(cls, qkv) or "split_qkv" not in inspect.signature(qkv).parameters:
        report.left[f"{_ATTENTION}.Attention.forward"] = f"{_QKV} is not the one that jitrope knows"
    else:
        made = without_rope("megatron", _KNOWN, partial(_refusals, rope, qkv), _cu_seqlens, _stand_in)
        report.replace_method(cls, "forward", made, what)
    return report


disable = _host.disabler(__name__)
