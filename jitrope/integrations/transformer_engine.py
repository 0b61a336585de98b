"""TransformerEngine: the public functions of `transformer_engine.pytorch.attention.rope`.

>>> from jitrope.integrations import transformer_engine as jitrope_transformer_engine
>>> report = jitrope_transformer_engine.enable()
>>> jitrope_transformer_engine.disable()

In `MultiheadAttention` with a norm of q and k, before or after rope, the norms and rope are one launch.

The signatures and defaults are the same. `fused` is ignored: every call is one launch with fp32 arithmetic.
Rows after the last packed sequence are zero, and rows at positions past the table are NaN; in TransformerEngine these
rows have undefined content.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from ..api import apply_rope, prepare_fused_qkv, prepare_qkv
from ..base.errors import InvalidInput
from ..stages.positions import Packed, Starts
from . import _host
from ._layers import AsSelf, norm_of, without_rope


def apply_rotary_pos_emb(
    t: Tensor, freqs: Tensor, tensor_format: str = "sbhd", start_positions: Tensor | None = None,
    interleaved: bool = False, fused: bool = False, cu_seqlens: Tensor | None = None, cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:  # fmt: skip
    """Rotate t by angles; the gradient flows to t.

    >>> t, freqs, cu_seqlens = torch.randn(10, 8, 64), torch.randn(16, 1, 1, 64), torch.tensor([0, 7, 10])
    >>> t = apply_rotary_pos_emb(t, freqs, tensor_format="thd", cu_seqlens=cu_seqlens)

    Args:
        t: [s, b, h, d], [b, s, h, d] or [t, h, d]; any strides. The output is contiguous.
        freqs: angles in radians [s2, 1 or b, 1, d2], d2 <= d, of all positions, also under context parallelism.
        tensor_format: "sbhd", "bshd" or "thd".
        start_positions: (b,) int32 or int64, the position of the first token of each sequence.
        interleaved: True: pairs are neighbours; False: halves.
        fused: ignored.
        cu_seqlens: (b + 1,) offsets of the whole packed batch; required for "thd".
        cp_size, cp_rank: context parallelism with two chunks a rank, in every format.

    Returns:
        t rotated, with the same shape and dtype.

    Raises:
        InvalidInput, CompileError: as `jitrope.apply_rope`; and "thd" without cu_seqlens.
    """
    return _rotate(t, freqs, _words(tensor_format, start_positions, interleaved, cu_seqlens, cp_size, cp_rank))


def apply_fused_qkv_rotary_pos_emb(
    qkv: Tensor, q_freqs: Tensor, k_freqs: Tensor, qkv_split_arg_list: list[int], tensor_format: str = "sbhd",
    start_positions: Tensor | None = None, interleaved: bool = False, cu_seqlens: Tensor | None = None,
    cp_size: int = 1, cp_rank: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Split fused QKV [.., groups, sum(split)] and rotate q and k; v is copied.

    Unlike TransformerEngine's function it accepts "thd", and start_positions also with context parallelism and in the
    gradient. It is one launch if q and k share their tensor of angles and head size; otherwise q and k take one each.

    >>> qkv, freqs = torch.randn(16, 1, 2, 384), torch.randn(16, 1, 1, 64)
    >>> q, k, v = apply_fused_qkv_rotary_pos_emb(qkv, freqs, freqs, [256, 64, 64])
    >>> q.shape
    torch.Size([16, 1, 8, 64])

    Args:
        qkv: [s, b, g, w], [b, s, g, w] or [t, g, w], w = sum(qkv_split_arg_list); any strides.
        q_freqs, k_freqs: angles [s2, 1, 1, d2].
        qkv_split_arg_list: elements of q, k and v in a group; the head size is the second.
        The other arguments are those of `apply_rotary_pos_emb`.

    Returns:
        q [.., g * split[0] / split[1], split[1]], k [.., g, split[1]], v [.., g, split[2]].

    Raises:
        InvalidInput, CompileError: as `apply_rotary_pos_emb`; and a split that does not fit qkv.
    """
    q_width, k_width, v_width = qkv_split_arg_list
    if sum(qkv_split_arg_list) != qkv.shape[-1] or k_width < 1 or q_width % k_width:
        raise InvalidInput(f"qkv_split_arg_list {qkv_split_arg_list} does not split groups of {qkv.shape[-1]}")
    words = _words(tensor_format, start_positions, interleaved, cu_seqlens, cp_size, cp_rank)
    if k_width == v_width and q_freqs is k_freqs:
        words.update(freqs=q_freqs.float(), rotary_dim=q_freqs.shape[-1])
        heads = qkv.shape[-2] * q_width // k_width, qkv.shape[-2]
        q, k, v = prepare_fused_qkv(qkv, heads=heads, order="grouped", **words)
        return q, k, v
    q, k, v = qkv.split(qkv_split_arg_list, -1)
    q = q.unflatten(-1, (-1, k_width)).flatten(-3, -2)
    return _rotate(q, q_freqs, words), _rotate(k, k_freqs, words), v.contiguous()


def _rotate(t: Tensor, freqs: Tensor, words: dict[str, Any]) -> Tensor:
    return apply_rope(t, None, freqs=freqs.float(), rotary_dim=freqs.shape[-1], **words)[0].contiguous()


def _words(
    tensor_format: str, starts: Tensor | None, interleaved: bool, cu_seqlens: Any, cp_size: int, cp_rank: int
) -> dict[str, Any]:
    """`apply_rope`'s keywords for TransformerEngine's."""
    where: Any = {"start_positions": starts, "cp_size": cp_size, "cp_rank": cp_rank}
    positions = Packed(cu_seqlens, **where) if tensor_format == "thd" else Starts(**where)
    return {"layout": tensor_format, "interleaved": interleaved, "positions": positions}


# ---- MultiheadAttention with norms of q and k ----------------------------------------------------------


def _stand_in(layer: Any, *rope: Any) -> AsSelf:
    """The layer, which gives us q and k where it calls its norms before rope.

    It then calls norms again, as after rope, and takes the results.
    """
    given: list[Tensor] = []

    def q_norm(q: Tensor) -> Tensor:
        given.append(q)
        return q

    def k_norm(k: Tensor) -> Tensor:
        q_out, k_out = _FUSED(layer, *rope, *given, k)
        AsSelf.__init__(as_self, layer, q_norm=lambda _: q_out, k_norm=lambda _: k_out, qk_norm_before_rope=False)
        return k

    as_self = AsSelf(layer, q_norm=q_norm, k_norm=k_norm, qk_norm_before_rope=True)
    return as_self


def _host_module() -> Any:
    """The module of attention, by an import, which torch.compile can trace; it cannot trace `sys.modules`."""
    from transformer_engine.pytorch.attention import multi_head_attention

    return multi_head_attention


def _refusals(rope: Any, layer: Any, given: dict[str, Any]) -> dict[str, bool]:
    """The reasons why norms are not fused, and whether they hold. rope: jitrope's function in the host."""
    return {
        "": layer.q_norm is None,
        "apply_rotary_pos_emb was replaced": _host_module().apply_rotary_pos_emb is not rope,
        "fp8": _host_module().FP8GlobalStateManager.is_fp8_enabled(),
    }


def _cu_seqlens(layer: Any, given: dict[str, Any], of: str) -> Any:
    """The offsets of a packed batch that rope uses."""
    padded = "_padded" if given.get("pad_between_seqs") else ""
    return given.get(f"cu_seqlens_{of}{padded}") if layer.qkv_format == "thd" else None


def _fused(layer: Any, freqs: Tensor, cu_seqlens: Tensor | None, q: Tensor, k: Tensor) -> tuple[Any, ...]:
    norm = norm_of((layer.q_norm, layer.k_norm), q, after_rope=not layer.qk_norm_before_rope)
    where = (layer.rotary_pos_interleaved, cu_seqlens, layer.cp_size, layer.cp_rank)
    words = {"freqs": freqs.float(), "rotary_dim": freqs.shape[-1], **_words(layer.qkv_format, None, *where)}
    return prepare_qkv(q, k, None, norm=norm, **words)[:2]


def _separate(
    reason: str, layer: Any, freqs: Tensor, cu_seqlens: Tensor | None, q: Tensor, k: Tensor
) -> tuple[Tensor, ...]:
    """The same with the host's norms and its rope function, which may be ours."""
    _host.note_unfused("transformer_engine", reason)
    words = {"fused": True, "cu_seqlens": cu_seqlens, "cp_size": layer.cp_size, "cp_rank": layer.cp_rank}
    words |= {"tensor_format": layer.qkv_format, "interleaved": layer.rotary_pos_interleaved}
    rotate = partial(_host_module().apply_rotary_pos_emb, freqs=freqs, **words)
    both = (q, layer.q_norm), (k, layer.k_norm)
    return tuple([rotate(norm(x)) if layer.qk_norm_before_rope else norm(rotate(x)) for x, norm in both])


_FUSED = _host.or_else("transformer_engine", _fused, _separate)
_ROPE = "transformer_engine.pytorch.attention.rope"
_ATTENTION = "transformer_engine.pytorch.attention.multi_head_attention"
_KNOWN = """
hidden_states attention_mask attn_mask_type window_size bottom_right_diagonal is_first_microbatch
checkpoint_core_attention rotary_pos_emb core_attention_bias_type core_attention_bias alibi_slopes cu_seqlens_q
cu_seqlens_kv cu_seqlens_q_padded cu_seqlens_kv_padded max_seqlen_q max_seqlen_kv fast_zero_fill pad_between_seqs
thd_attention_policies thd_attention_policy_dispatch softcap
"""
"""The arguments of self-attention in training; a call with another one, as of inference, is the host's."""

_FUNCTIONS = _host.named(_ROPE, apply_rotary_pos_emb, apply_fused_qkv_rotary_pos_emb)


@_host.alone
def enable() -> _host.Report:
    """Replace TransformerEngine's rope in every module that holds it, and fuse the norms of `MultiheadAttention`.

    `report.calls["fused"]` counts the launches with norms, and `report.reasons` has the reasons why norms were not
    fused. Raises ImportError without TransformerEngine.
    """
    cls = getattr(*_host.held("transformer_engine", f"{_ATTENTION}:MultiheadAttention"))
    report = _host.enable("transformer_engine", _FUNCTIONS)
    rope = _host.load("transformer_engine", _ROPE).apply_rotary_pos_emb
    made = without_rope("transformer_engine", _KNOWN, partial(_refusals, rope), _cu_seqlens, _stand_in)
    report.replace_method(cls, "forward", made, "norms of q and k and rope fused")
    return report


disable = _host.disabler(__name__)
