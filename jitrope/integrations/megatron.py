"""Megatron-core: the fused-rope hooks of `megatron.core.models.common.embeddings.rope_utils`.

>>> from jitrope.integrations import megatron as jitrope_megatron
>>> report = jitrope_megatron.enable()  # before the model's configuration is made, with apply_rope_fusion=True
>>> jitrope_megatron.disable()

With or without TransformerEngine, `apply_rope_fusion` then means jitrope. The hooks do not receive the configuration,
so the patched `apply_rotary_pos_emb` also passes on the pairing of packed batches, multi-head latent attention's
(interleaved pairs into halves), mscale, and mRoPE with a batch. Without `apply_rope_fusion` the host's own code runs.
Latent attention with YaRN calls two fused functions of its own, in Triton; they are replaced too. In `SelfAttention`
with norms of q and k, the split of QKV, the norms and rope are one launch.
"""

from __future__ import annotations

import inspect
import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..api import apply_rope, prepare_mla_qkv, prepare_packed_qkv
from ..base.errors import InvalidInput
from ..ops.values import Packed
from . import _host, transformer_engine
from ._layers import AsSelf, norm_of


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


def fused_apply_mla_rope_for_q(
    t: Tensor,
    cos: Tensor,
    sin: Tensor,
    qk_head_dim: int,
    emb_dim: int,
    cu_seqlens_q: Tensor | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    rotary_interleaved: bool = False,
) -> Tensor:
    """Rotate the last emb_dim elements of the heads of latent attention's q, from interleaved pairs into halves.

    The signature and the formula are those of `megatron.core.fusions.fused_mla_yarn_rope_apply`. Use the result: t
    keeps its elements here, while Megatron's function writes into t and returns it, and writes into the gradient.

    >>> cos, sin = torch.rand(2, 16, 1, 1, 64)
    >>> q = jitrope_megatron.fused_apply_mla_rope_for_q(torch.randn(16, 1, 8, 128 + 64), cos, sin, 128, 64)

    Args:
        t: [s, b, h, qk_head_dim + emb_dim], or [tokens, h, ...] with cu_seqlens_q.
        cos, sin: [rows, 1, 1, emb_dim] in t's dtype or in fp32, with equal halves, as `YarnRotaryEmbedding` makes them.
            Without cu_seqlens_q they are those of this rank's positions.
        cu_seqlens_q: offsets of the whole packed batch, int32 or int64 [sequences + 1].
        cp_rank, cp_size: context parallelism with two chunks a rank, only with cu_seqlens_q.
        rotary_interleaved: must be False, as in Megatron.

    Returns:
        q in fp32 arithmetic rounded once, contiguous.

    Raises:
        InvalidInput: the arguments do not fit together, or rotary_interleaved is True.
        CompileError: the kernel could not be built.
    """
    words = _latent(cos, sin, emb_dim, cu_seqlens_q, cp_rank, cp_size, rotary_interleaved)
    return apply_rope(t, None, **words, rotary_dim=emb_dim, rotary_offset=qk_head_dim)[0].contiguous()


def fused_apply_mla_rope_for_kv(
    kv: Tensor,
    k_pos_emb: Tensor,
    cos: Tensor,
    sin: Tensor,
    emb_dim: int,
    k_dim: int,
    v_dim: int,
    cu_seqlens_kv: Tensor | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    rotary_interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Split latent attention's kv into k and v, and append the rotated k_pos_emb to each head of k, in one launch.

    The gradient is one launch too. That of k_pos_emb is summed over the heads in fp32.

    >>> cos, sin = torch.rand(2, 16, 1, 1, 64)
    >>> kv, k_pos_emb = torch.randn(16, 1, 8, 128 + 96), torch.randn(16, 1, 1, 64)
    >>> k, v = jitrope_megatron.fused_apply_mla_rope_for_kv(kv, k_pos_emb, cos, sin, 64, 128, 96)

    Args:
        kv: [s, b, h, k_dim + v_dim], or [tokens, h, ...] with cu_seqlens_kv.
        k_pos_emb: [s, b, 1, emb_dim], or [tokens, 1, emb_dim].
        cos, sin, cu_seqlens_kv, cp_rank, cp_size, rotary_interleaved: as in `fused_apply_mla_rope_for_q`.

    Returns:
        k [.., h, k_dim + emb_dim] and v [.., h, v_dim], contiguous.

    Raises:
        InvalidInput, CompileError: as `fused_apply_mla_rope_for_q`.
    """
    if kv.shape[-1] != k_dim + v_dim or k_pos_emb.shape[-1] != emb_dim:
        sizes = f"kv has heads of {kv.shape[-1]} and k_pos_emb of {k_pos_emb.shape[-1]}"
        raise InvalidInput(f"fused_apply_mla_rope_for_kv: {sizes}, not of {k_dim} + {v_dim} and {emb_dim}")
    words = _latent(cos, sin, emb_dim, cu_seqlens_kv, cp_rank, cp_size, rotary_interleaved)
    no_q = kv.new_empty((*kv.shape[:-2], 0, k_dim + emb_dim))
    _, k, v = prepare_mla_qkv(no_q, kv, k_pos_emb, **words)
    return k, v


def _latent(
    cos: Tensor, sin: Tensor, emb_dim: int, cu_seqlens: Tensor | None, cp_rank: int, cp_size: int, interleaved: bool
) -> dict[str, Any]:
    """The words of a rotation of interleaved pairs into halves."""
    if interleaved:
        raise InvalidInput("rotary_interleaved is not supported in multi-latent attention")
    if cos.shape[-1] != emb_dim or sin.shape[-1] != emb_dim:
        raise InvalidInput(f"cos and sin have {cos.shape[-1]} and {sin.shape[-1]} columns; they must have {emb_dim}")
    words: dict[str, Any] = {"interleaved": True, "interleaved_out": False, "layout": "sbhd"}
    if cu_seqlens is not None:
        words |= {"layout": "thd", "positions": Packed(cu_seqlens, cp_size=cp_size, cp_rank=cp_rank)}
    words |= {name: x.flatten(1)[:, : emb_dim // 2] for name, x in (("cos", cos), ("sin", sin))}
    return words


def _packed(t: Tensor, freqs: Tensor, cu_seqlens: Tensor, cp_size: int, cp_rank: int) -> Packed:
    row_for_each_token = freqs.shape[0] == t.shape[0] * cp_size
    return Packed(cu_seqlens, packed_table=row_for_each_token, cp_size=cp_size, cp_rank=cp_rank)


def _rotate(t: Tensor, freqs: Tensor, interleaved: bool, mla: bool = False, **words: Any) -> Tensor:
    words |= {"layout": "thd" if words.get("positions") else "sbhd", "rotary_dim": freqs.shape[-1]}
    words |= {"interleaved": interleaved or mla, "interleaved_out": interleaved}
    if mla:  # both halves of the table are equal; input pairs are neighbours, output pairs are not
        freqs = freqs[..., : freqs.shape[-1] // 2]
    return apply_rope(t, None, freqs=freqs.float(), **words)[0].contiguous()


# ---- SelfAttention with norms of q and k ---------------------------------------------------------------


def _attention_forward(theirs: _host.Function) -> _host.Function:
    """`SelfAttention.forward` with the split of QKV, the norms and rope in one launch."""
    signature = inspect.signature(theirs)

    def forward(layer: Any, *arguments: Any, **words: Any) -> Any:
        bound = signature.bind(layer, *arguments, **words)
        given = bound.arguments
        freqs, packed = given.get("rotary_pos_emb"), given.get("packed_seq_params")
        why = _not_fused(layer, freqs, packed, given)
        if why is not None:
            if why:
                _host.note("megatron", "host", f"not fused: {why}", 0)
            return theirs(layer, *arguments, **words)
        table: Any = freqs[0] if isinstance(freqs, tuple) else freqs
        given["rotary_pos_emb"] = None
        given["self"] = AsSelf(layer, get_query_key_value_tensors=partial(_qkv, layer, table, _cu_seqlens(packed)))
        return theirs(*bound.args, **bound.kwargs)

    return forward


def _not_fused(layer: Any, freqs: Any, packed: Any, given: dict[str, Any]) -> str | None:
    """The reason why the host's `forward` runs as it is, "" for none that needs telling; None if norms are fused."""
    config, names = layer.config, ("q_layernorm", "k_layernorm")
    norms = {type(getattr(layer, name, None)).__name__ for name in names}
    without_rope = config.no_rope_freq and config.no_rope_freq[layer.layer_number - 1]
    if freqs is None or without_rope or not config.apply_rope_fusion or norms & {"NoneType", "IdentityOp"}:
        return ""
    method = "get_query_key_value_tensors"
    if getattr(type(layer), method) is not getattr(_self_attention(), method):
        return f"{type(layer).__name__} has its own {method}"
    refused = {
        "inference": given.get("inference_context") is not None or given.get("inference_params") is not None,
        "attention_output_gate": config.attention_output_gate,
        "test_mode": config.test_mode,
        "more tensor parallel ranks than query groups": config.num_query_groups < layer.world_size,
        "q and k have different tables": isinstance(freqs, tuple) and freqs[0] is not freqs[1],
        "q and k have different cu_seqlens": _cu_seqlens(packed, "q") is not _cu_seqlens(packed, "kv"),
    }
    return next((why for why, holds in refused.items() if holds), None)


def _cu_seqlens(packed: Any, of: str = "q") -> Tensor | None:
    """The offsets of a packed batch, with padding where it has any."""
    if packed is None or packed.qkv_format != "thd":
        return None
    padded: Tensor | None = getattr(packed, f"cu_seqlens_{of}_padded")
    return getattr(packed, f"cu_seqlens_{of}") if padded is None else padded


def _qkv(layer: Any, freqs: Tensor, cu_seqlens: Tensor | None, hidden: Tensor, *arguments: Any, **_: Any) -> Any:
    """`get_query_key_value_tensors` with q and k normalised and rotated."""
    mixed, split = _self_attention().get_query_key_value_tensors(layer, hidden, *arguments, split_qkv=False)
    fused = _host.or_else("megatron", "fused", _fused, _separate)
    return fused(mixed if cu_seqlens is None else mixed.squeeze(1), split, freqs, cu_seqlens, layer)


def _fused(
    mixed: Tensor, split: list[int], freqs: Tensor, cu_seqlens: Tensor | None, layer: Any
) -> tuple[tuple[Tensor, ...], int]:
    norm = norm_of({"q": layer.q_layernorm, "k": layer.k_layernorm}, mixed[..., : split[1]])
    words = {"freqs": freqs.float(), "rotary_dim": freqs.shape[-1], "interleaved": layer.config.rotary_interleaved}
    words |= {"layout": "sbhd" if cu_seqlens is None else "thd", "mscale": _mscale(layer)}
    if cu_seqlens is not None:
        group = layer.pg_collection.cp
        words["positions"] = _packed(mixed, freqs, cu_seqlens, group.size(), group.rank())
    out = prepare_packed_qkv(mixed, norm=norm, q_per_group=split[0] // split[1], **words)
    return tuple([x if cu_seqlens is None else x.unsqueeze(1) for x in out]), 1


def _separate(
    reason: str, mixed: Tensor, split: list[int], freqs: Tensor, cu_seqlens: Tensor | None, layer: Any
) -> tuple[Tensor, ...]:
    """The same with the host's norms and its rope function, which may be ours."""
    _host.note("megatron", "host", f"not fused: {reason}", 0)
    q, k, v = mixed.split(split, -1)
    rope = sys.modules[_ATTENTION].apply_rotary_pos_emb
    words = {"config": layer.config, "cu_seqlens": cu_seqlens, "mscale": _mscale(layer)}
    q = layer.q_layernorm(q.unflatten(-1, (-1, split[1])).flatten(-3, -2))
    q, k = (rope(x, freqs, cp_group=layer.pg_collection.cp, **words) for x in (q, layer.k_layernorm(k)))
    return tuple([x if cu_seqlens is None else x.unsqueeze(1) for x in (q, k, v)])


def _mscale(layer: Any) -> float:
    found: float = sys.modules[_ATTENTION]._yarn_get_concentration_factor_from_config(layer.config)
    return found


def _self_attention() -> Any:
    return sys.modules[_ATTENTION].SelfAttention


_ROPE_UTILS = "megatron.core.models.common.embeddings.rope_utils"
_ATTENTION = "megatron.core.transformer.attention"
_FUSED_QKV = f"{_ATTENTION}:apply_fused_qkv_rotary_pos_emb"
_LATENT = _host.named(
    "megatron.core.fusions.fused_mla_yarn_rope_apply", fused_apply_mla_rope_for_q, fused_apply_mla_rope_for_kv
)
_FUNCTIONS: dict[str, _host.Function] = {
    f"{_ROPE_UTILS}:fused_apply_rotary_pos_emb": fused_apply_rotary_pos_emb,
    f"{_ROPE_UTILS}:fused_apply_rotary_pos_emb_thd": fused_apply_rotary_pos_emb_thd,
    f"{_ROPE_UTILS}:apply_rotary_pos_emb": apply_rotary_pos_emb,
    _FUSED_QKV: transformer_engine.apply_fused_qkv_rotary_pos_emb,
    **_LATENT,
}


def enable() -> _host.Report:
    """Replace Megatron's rope in every module that holds it, and fuse the norms of `SelfAttention` with it.

    `report.calls["fused"]` counts the launches with norms, and `report.reasons` has the reasons why norms were not
    fused. Raises ImportError without Megatron.
    """
    report = _host.enable("megatron", _FUNCTIONS, {_FUSED_QKV, *_LATENT})
    cls, what = _self_attention(), "norms of q and k and rope fused"
    if "split_qkv" in inspect.signature(cls.get_query_key_value_tensors).parameters:
        report.replace_method(cls, "forward", _attention_forward, what)
    else:
        report.left[f"{_ATTENTION}.SelfAttention.forward"] = "this version splits QKV itself"
    return report


def disable() -> None:
    """Undo `enable`."""
    _host.disable("megatron")
