"""Whole `__call__`s for attention processors: RMSNorm of q and k, rope and the joining of two streams in one launch.

Each does what the host's does: same arguments, same projections, same attention call, and the same result bit for bit.
It is used where the text of the host's own is one that it was written for (`COPIES`). A call that it refuses
(autocast, other norms or tables) goes to the host's. It writes only into tensors of its own.

Functions of the host are looked up in the module of its class in each call, because another library may have replaced
some.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...api import prepare_joint_qkv, prepare_qkv
from ...base.errors import InvalidInput
from ...stages.norm import Norm
from ...torch_state import in_autocast
from .._norms import DEFAULT_EPS, parameters_of
from .ropes import HALF, HEADS, PAIRS, ROWS, TURNS, WORDS, Form, of_pairs, pair

# How norms of these classes round; see `jitrope.Norm`.
_ROUNDING = {"torch.nn.modules.normalization.RMSNorm": "once", "diffusers.models.normalization.RMSNorm": "twice"}
RMS_NORM = {"fa91ca74b4badaaf", "ab9075d036873ac9"}  # the texts of diffusers' RMSNorm, 0.36 and 0.41


class Call(NamedTuple):
    """A call of a processor: the module of its class, itself, and the arguments under the host's names."""

    host: Any
    self: Any
    attn: Any
    hidden_states: Tensor
    encoder_hidden_states: Any = None
    encoder_hidden_states_mask: Any = None
    attention_mask: Any = None
    image_rotary_emb: Any = None
    rotary_emb: Any = None
    freqs_cis: Any = None


# ---- norms, rope and the joining of two streams ------------------------------------------------------------


class Norms(NamedTuple):
    """The weights of q's and k's norm of each stream, one after another, and the norms' common words."""

    weights: Sequence[Tensor | None]
    words: dict[str, Any]

    def check(self, *tensors: Tensor) -> None:
        """Raise InvalidInput for a weight of another dtype: the hosts' norms then return that one, jitrope does not."""
        if any(weight is not None and weight.dtype != x.dtype for weight in self.weights for x in tensors):
            raise InvalidInput("a norm's weight has another dtype than q and k")


def norms_of(x: Tensor, attn: Any, *streams: str, **words: Any) -> Norms:
    """The norms of q and k for one launch with activations like x. words: more of `jitrope.Norm`.

    streams: what the norms' names have before "q" and "k", such as "added_". It is asked for before the projections,
    which the host would compute again. Raises InvalidInput if one launch cannot compute the norms.
    """
    if in_autocast(x):
        raise InvalidInput("autocast")
    each = [_norm_of(getattr(attn, f"norm_{stream}{name}")) for stream in streams for name in "qk"]
    if any(found != each[0][1] for _, found in each):
        raise InvalidInput("the norms of q and k differ")
    norms = Norms([weight for weight, _ in each], {**each[0][1], **words})
    norms.check(x)
    return norms


def _norm_of(module: Any) -> tuple[Tensor | None, dict[str, Any]]:
    """A norm's weight, and its words of `jitrope.Norm`. Raises InvalidInput if the module must be called.

    It must if it has another class (as wrapped and parametrized norms), a bias, a weight that is not a plain tensor,
    hooks or its own `forward`. (The last two serve to offload.)
    """
    cls = type(module)
    rounding = _ROUNDING.get(f"{cls.__module__}.{cls.__name__}")
    if rounding is None:
        raise InvalidInput("there is no norm" if module is None else f"a norm is {cls.__name__}")
    weight, bias = parameters_of(module)
    if bias is not None:
        raise InvalidInput("a norm has a bias")
    return weight, {"eps": DEFAULT_EPS if module.eps is None else module.eps, "rounding": rounding}


def launch(norms: Norms, form: Form, tables: Any, *streams: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v) of one stream, each (B, S, H, D), or of two joined; q and k are normalised and rotated.

    tables: of all tokens, or a pair with those of each stream. None (attention to text, whose k has another length
    than q): q and k are only normalised.
    """
    tensors, weights, words = [x for stream in streams for x in stream[:2]], norms.weights, norms.words
    norms.check(*tensors)
    if tables is None:
        q, k = (prepare_qkv(x, None, None, norm=Norm(y, **words))[0] for x, y in zip(tensors, weights))
        return q, k, streams[0][2]
    if isinstance(tables[0], Tensor):
        rope = form.words(tables, *tensors[::2])
    else:
        rope, other = (form.words(table, q) for table, q in zip(tables, tensors[::2]))
        rope |= {name: (x, other[name]) for name, x in rope.items() if isinstance(x, Tensor)}
    norm = [Norm(*weights[i : i + 2], **words) for i in range(0, len(weights), 2)]
    if len(streams) == 1:
        return prepare_qkv(*streams[0], norm=norm[0], **rope)
    return prepare_joint_qkv(*streams, norm=norm, **rope)


# ---- shared by processors --------------------------------------------------------------------------------


def _heads(attn: Any, *tensors: Tensor) -> Any:
    """Each as (B, S, H, D); under tensor parallelism H is this rank's number of heads."""
    return tuple(x.unflatten(-1, (-1, attn.inner_dim // attn.heads)) for x in tensors)


def _qkv(attn: Any, x: Tensor, source: Tensor | None = None) -> Any:
    """The projections of x; keys and values come from `source`, if given."""
    source = x if source is None else source
    return _heads(attn, attn.to_q(x), attn.to_k(source), attn.to_v(source))


def _added_qkv(attn: Any, x: Tensor) -> Any:
    return _heads(attn, attn.add_q_proj(x), attn.add_k_proj(x), attn.add_v_proj(x))


def _attended(call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Any, parallel: bool = True) -> Tensor:
    """The host's attention: (B, S, H * D)."""
    config = call.self._parallel_config if parallel else None
    words = {"attn_mask": mask, "backend": call.self._attention_backend, "parallel_config": config}
    out: Tensor = call.host.dispatch_attention_fn(q, k, v, **words)
    return out.flatten(2, 3).to(q.dtype)


def _out(attn: Any, x: Tensor) -> Tensor:
    """The output projection and its dropout, if there are any."""
    for module in getattr(attn, "to_out", None) or ():
        x = module(x)
    return x


# ---- the processors; what goes into a launch is freed before attention, which needs memory ---------------------


def _flux(project: bool, copy: bool, call: Call) -> Any:
    """FLUX of one or two streams, text before image. project: one stream too; copy: two before they are projected."""
    attn, text = call.attn, call.encoder_hidden_states
    streams = {"": 0} if attn.added_kv_proj_dim is None else {"added_": 3, "": 0}  # with the first of its projections
    norms, tables = norms_of(call.hidden_states, attn, *streams), pair(call.image_rotary_emb)
    qkv = call.host._get_qkv_projections(attn, call.hidden_states, text)
    qkv = [_heads(attn, *qkv[first : first + 3]) for first in streams.values()]
    qkv = launch(norms, PAIRS, tables, *qkv)
    out = _attended(call, *qkv, call.attention_mask)
    if text is None:
        return _out(attn, out) if project else out
    text, image = out.split_with_sizes([text.shape[1], out.shape[1] - text.shape[1]], dim=1)
    if copy:
        text, image = text.contiguous(), image.contiguous()
    return _out(attn, image), attn.to_add_out(text)


def _flux2_parallel(call: Call) -> Any:
    """q, k and v are strided views of one projection, which also gives the MLP's input."""
    attn, tables = call.attn, pair(call.image_rotary_emb)
    norms = norms_of(call.hidden_states, attn, "")
    qkv_mlp = attn.to_qkv_mlp_proj(call.hidden_states)
    width = 3 * attn.inner_dim
    width = qkv_mlp.shape[-1] * width // (width + attn.mlp_hidden_dim * attn.mlp_mult_factor)  # of this rank
    projected, mlp = torch.split(qkv_mlp, [width, qkv_mlp.shape[-1] - width], dim=-1)
    qkv = launch(norms, PAIRS, tables, _heads(attn, *projected.chunk(3, dim=-1)))
    out = _attended(call, *qkv, call.attention_mask)
    return attn.to_out(torch.cat([out, attn.mlp_act_fn(mlp)], dim=-1))


def _qwen(masks: bool, call: Call) -> Any:
    """Qwen-Image: tables of image and of text; attention takes text before image. masks: it masks the text."""
    attn, image, text, mask = call.attn, call.hidden_states, call.encoder_hidden_states, call.attention_mask
    if text is None or (masks and mask is not None):
        raise InvalidInput("no text, or a mask")  # the host refuses that too
    if masks and call.encoder_hidden_states_mask is not None:
        ones = torch.ones(image.shape[:2], dtype=torch.bool, device=image.device)
        mask = torch.cat([call.encoder_hidden_states_mask, ones], dim=1)[:, None, None, :]
    norms, (of_image, of_text) = norms_of(image, attn, "added_", ""), pair(call.image_rotary_emb)
    qkv = launch(norms, TURNS, ((of_text,), (of_image,)), _added_qkv(attn, text), _qkv(attn, image))
    out = _attended(call, *qkv, mask)
    text, image = out[:, : text.shape[1]], out[:, text.shape[1] :]
    return _out(attn, image.contiguous()), attn.to_add_out(text.contiguous())


def _wan(crossed: bool, call: Call) -> Any:
    """Wan: norms across heads, rope in self-attention alone. crossed: attention to text is parallel too.

    With an image, whose tokens come before 512 of text, a second attention uses its keys and values.
    """
    attn, text, image, tables = call.attn, call.encoder_hidden_states, None, call.rotary_emb
    norms = norms_of(call.hidden_states, attn, "", across_heads=True)
    tables = None if tables is None else of_pairs(*pair(tables))
    if attn.add_k_proj is not None:
        image, text = text.tensor_split([text.shape[1] - 512], dim=1)
    q, k, v = call.host._get_qkv_projections(attn, call.hidden_states, text)
    q, k, v = launch(norms, HALF, tables, _heads(attn, q, k, v))
    parallel = crossed or text is None
    out = _attended(call, q, k, v, call.attention_mask, parallel)
    if image is not None:
        k, v = call.host._get_added_kv_projections(attn, image)
        k, v = _heads(attn, attn.norm_added_k(k), v)
        out = out + _attended(call, q, k, v, None, parallel)
    return _out(attn, out)


def _ltx(call: Call) -> Any:
    """LTX-Video: as Wan, with tables (B, S, H * D): each head has its own."""
    attn, x, mask, tables = call.attn, call.hidden_states, call.attention_mask, call.image_rotary_emb
    source = x if call.encoder_hidden_states is None else call.encoder_hidden_states
    if mask is not None:
        mask = attn.prepare_attention_mask(mask, source.shape[1], source.shape[0])
        mask = mask.view(source.shape[0], attn.heads, -1, mask.shape[-1])
    norms = norms_of(x, attn, "", across_heads=True)
    tables = None if tables is None else _heads(attn, *pair(tables))
    qkv = launch(norms, HEADS, tables, _qkv(attn, x, source))
    return _out(attn, _attended(call, *qkv, mask))


def _hunyuan(call: Call) -> Any:
    """HunyuanVideo: image before text, which is not rotated, and has its own weights or the image's."""
    attn, image, text, tables = call.attn, call.hidden_states, call.encoder_hidden_states, pair(call.image_rotary_emb)
    if text is None:
        raise InvalidInput("no text")
    two, rows = attn.add_q_proj is not None, text.shape[1]
    norms = norms_of(image, attn, *(("", "added_") if two else ("",)))
    tables = [F.pad(table, (0, 0, 0, rows), value=value) for table, value in zip(tables, (1.0, 0.0))]
    streams = (_qkv(attn, image), _added_qkv(attn, text)) if two else (_qkv(attn, torch.cat([image, text], dim=1)),)
    qkv = launch(norms, PAIRS, tables, *streams)
    del streams
    out = _attended(call, *qkv, call.attention_mask)
    image, text = _out(attn, out[:, :-rows]), out[:, -rows:]
    return image, text if getattr(attn, "to_add_out", None) is None else attn.to_add_out(text)


def _z_image(call: Call) -> Any:
    """Z-Image."""
    attn, mask = call.attn, call.attention_mask
    if call.freqs_cis is None:
        raise InvalidInput(WORDS)
    qkv = launch(norms_of(call.hidden_states, attn, ""), ROWS, (call.freqs_cis,), _qkv(attn, call.hidden_states))
    if mask is not None and mask.ndim == 2:
        mask = mask[:, None, None, :]
    return _out(attn, _attended(call, *qkv, mask))


# ---- which of them stands for which text of the host's `__call__` -------------------------------------------

_TEXTS: dict[Callable[..., Any], str] = {  # in the order of diffusers' versions, from 0.36 to 0.42
    partial(_flux, False, False): "8646542a4f433943",
    partial(_flux, False, True): "6576b68b6158e83b d5b36134887ebe45",
    partial(_flux, True, False): "fa5f37f1f3b507c8 a92fd9cfb896bedb 2106c36979e28f30",
    _flux2_parallel: "66dee2df7e0ec4e0 5850a55d0e2a6b05 18a20dca47451835",
    partial(_qwen, False): "04a0b19727c265e5",
    partial(_qwen, True): "ac06e31720cc08fc 2a0c20db8321b4d4 e6dfad13458f15b3",
    partial(_wan, True): "3cb730668e365536 aa8d7b3940827e84 be927e58ea7fba80",  # Wan in 0.36; SkyReels V2
    partial(_wan, False): "184ebefc0184bba7 a000dc173c7fbf59 13c09feedcfe814a",  # ChronoEdit; Wan since 0.37
    _hunyuan: "79744a7e109e2f2b 9d2e9a44e1dc2bf7",
    _ltx: "e45c9370c2173fdb cac2aabbea3a63db",
    _z_image: "0b99aba335ba3000 f8f65d350a617957",
}

COPIES = {text: copy for copy, texts in _TEXTS.items() for text in texts.split()}

FUSED = {"Flux", "Flux2", "Flux2ParallelSelf", "QwenDoubleStream", "Wan", "SkyReelsV2"}
FUSED |= {"HunyuanVideo", "LTXVideo", "ZSingleStream"}
"""The classes with those texts, by their names up to "AttnProcessor"."""
