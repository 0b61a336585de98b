"""torchtitan: rope, and the norms of q and k, in one launch, through its own overrides.

    --override.imports jitrope.integrations.torchtitan.attention

replaces the rope of each attention, if it is a `CosSinRoPE` or a `ComplexRoPE`. If a `GQAttention` (Qwen3) has norms of
q and k, they are in the same launch. Parameters and checkpoints do not change. The host's code runs if its files have
another text than those that this file was written for. `calls` and `reasons` count the calls left to the host.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from functools import lru_cache, partial, wraps
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..api import prepare_qkv
from ..base.errors import InvalidInput
from ..stages.norm import Norm
from ..torch_state import in_autocast
from . import _host
from ._layers import AsSelf
from ._norms import unhooked

HOST = "torchtitan"

calls = _host.calls[HOST]
"""Calls so far, by "jitrope", "fused" (with norms) and "host"; a call of a compiled model counts when it is traced."""

reasons = _host.reasons[HOST]
"""The reasons why calls were left to the host."""

_PLACES = {
    "CosSinRoPE": ("torchtitan.models.common.rope", "c81b4bf4ee9bfc13"),
    "ComplexRoPE": ("torchtitan.models.common.rope", "c81b4bf4ee9bfc13"),
    "GQAttention": ("torchtitan.models.common.attention", "26226984317777ee"),
}
"""The modules of the host's classes, and what 0.3.0 has as the text of a rope's module or of attention's `forward`."""

_READ = ("forward", "apply_rotary_emb", "_reshape_cache", "_rotate_half")
"""The methods of a rope that our launch stands for. A module has its own `forward` if it is sharded."""


# ---- the launch ----------------------------------------------------------------------------------------


def _rotation(kind: str) -> Any:
    """The launch for a kind of rope, with the types of its outputs for torchtitan's sharding checker."""
    import spmd_types as spmd

    heads = ({"dp": spmd.V, "cp": spmd.V, "tp": spmd.V}, spmd.PartitionSpec("dp", "cp", "tp", None))

    @spmd.local_map(out_types=(heads, heads))
    def function(query: Tensor, key: Tensor, cache: Tensor, ids: Any, weights: Any, norm: Any) -> Any:
        if kind == "ComplexRoPE":
            table: Any = {"freqs_cis": cache, "interleaved": True, "rounding": "complex64"}
        else:  # cosines of the pairs twice, then sines; one half is enough
            half = cache.shape[-1] // 4
            table = {"cos": cache[:, :half], "sin": cache[:, 2 * half : 3 * half], "rotary_dim": 2 * half}
        made = Norm(*weights, **norm) if weights else None
        return prepare_qkv(query, key, None, norm=made, positions=ids, layout="bshd", **table)[:2]

    return function


def _rotated(
    rope: Any, query: Any, key: Any, positions: Any = None, *more: Any, norm: Any = ((), None), **others: Any
) -> Any:
    """query and key rotated by a module's table, after a norm; each rank rotates its shards.

    norm: its weights and words. more, others: of other versions, and so never used.
    """
    host, known, check = rope._original
    if any(getattr(host, n) is not f or n in rope.__dict__.keys() - {"forward"} for n, f in known.items()):
        raise InvalidInput(f"a method of {host.__name__} was replaced, or its file has another text than in 0.3.0")
    if query.shape[-1] != rope.config.dim:  # the host broadcasts a smaller table or refuses it
        raise InvalidInput("the heads and the table have different sizes")
    cache = rope.cache.to_local() if isinstance(rope.cache, DTensor) else rope.cache
    if positions is not None:
        check(positions, max_valid_pos=cache.shape[0] - 1)
    return rope._rotation(query, key, cache, positions, *norm)


def _fused(layer: Any, query: Tensor, key: Tensor, positions: Any = None) -> Any:
    if type(layer.rope).__module__ != __name__:
        raise InvalidInput("the layer's rope is not jitrope's")
    unhooked(layer.rope, _moves_nothing(layer.rope), "rope")  # we do not call it
    norms, (cls, *known) = (layer.q_norm, layer.k_norm), layer._norm
    weights: Any = [unhooked(norm, _moves_nothing(norm))[0] for norm in norms]
    plain = all(type(norm) is cls and norm.weight is not None for norm in norms)
    if not plain or [cls.forward, nn.functional.rms_norm] != known or norms[0].eps != norms[1].eps:
        raise InvalidInput(f"a norm is not torchtitan's {cls.__name__} or has no weight, or q's and k's differ")
    if in_autocast(query) or any(weight.dtype != query.dtype for weight in weights):
        raise InvalidInput("autocast or the weight's dtype may change the norm")
    return _rotated(layer.rope, query, key, positions, norm=(weights, {"eps": norms[0].eps, "rounding": "once"}))


def _separate(reason: str, layer: Any, query: Tensor, key: Tensor, positions: Any = None) -> Any:
    _host.note_unfused(HOST, reason)
    return layer.rope(layer.q_norm(query), layer.k_norm(key), positions)


_turn = _host.or_else(HOST, _fused, _separate)


def _moves_nothing(module: Any) -> bool:
    """Whether a module's parallel `forward` only calls that of its class: its tensors are where they have to be."""
    config = getattr(module, "_sharding_config", None)
    if config is None or not module._parallelized or config.local_map is not None:
        return False
    ends = ("in", "out")
    return all(getattr(config, f"{x}_src_shardings") == getattr(config, f"{x}_dst_shardings") for x in ends)


# ---- the host's classes --------------------------------------------------------------------------------


@lru_cache
def _subclass(name: str) -> Any:
    """Our subclass of the host's class of this name, with its own configuration."""
    module, own = importlib.import_module(_PLACES[name][0]), {"__module__": __name__}
    host = getattr(module, name)
    words = {**own, "__qualname__": f"{name}.Config"}
    config: Any = dataclass(kw_only=True, slots=True)(type("Config", (host.Config,), words))
    made = (_of_rope if name.endswith("RoPE") else _of_attention)(host, module)
    return type(name, (host,), {**own, "Config": config, **made})


def _of_rope(host: Any, module: Any) -> dict[str, Any]:
    @wraps(host.forward)  # torchtitan reads the names of its arguments
    def forward(self: Any, *arguments: Any, **words: Any) -> Any:
        return _host.take(HOST, partial(_rotated, self), partial(host.forward, self), *arguments, **words)

    same = _host.text_of(module) == _PLACES[host.__name__][1]
    known = {n: _host.own(HOST, getattr(host, n)) if same else None for n in _READ if hasattr(host, n)}
    original = (host, known, getattr(module, "_maybe_check_max_pos", None))
    return {"forward": forward, "_rotation": staticmethod(_rotation(host.__name__)), "_original": original}


def _of_attention(host: Any, module: Any) -> dict[str, Any]:
    theirs = _host.own(HOST, host.forward) if _host.text_of(host.forward) == _PLACES[host.__name__][1] else None
    norm, own = module.RMSNorm, partial(_host.own, "torch")  # with torch's forward, which calls a function

    @wraps(host.forward)
    def forward(self: Any, *arguments: Any, **words: Any) -> Any:
        normed = self.q_norm is not None and self.k_norm is not None
        if normed and host.forward is theirs:
            as_self = AsSelf(self, q_norm=lambda q: q, k_norm=lambda k: k, rope=partial(_turn, self))
            return theirs(as_self, *arguments, **words)
        if normed:
            _host.note_unfused(HOST, f"{host.__name__}.forward was replaced, or has another text than in 0.3.0")
        return host.forward(self, *arguments, **words)

    return {"forward": forward, "_norm": (norm, own(norm.forward), own(nn.functional.rms_norm))}


def __getattr__(name: str) -> Any:
    """Return our subclass of a class of the host, for configurations written by hand, and for pickle."""
    if name in _PLACES:
        return _subclass(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def attention(config: Any) -> Any:
    """The override of `BaseAttention.Config` and its rope: name it in `override.imports`.

    Norms of q and k and the rotation are one launch in `GQAttention`. In other attention, as in its subclasses, only
    the rope is replaced; a rope of another class than the host's two stays.

    >>> from torchtitan.models.qwen3 import qwen3_configs
    >>> layer = qwen3_configs["debugmodel"](attn_backend="flex").layers[0]
    >>> layer.attention = jitrope_torchtitan.attention(layer.attention)
    """
    from torchtitan.config.override import derive

    def ours(config: Any, **changes: Any) -> Any:
        made = type(config)
        name = made.__qualname__.partition(".")[0]
        known = _PLACES.get(name, ("",))[0] == made.__module__
        return derive(config, _subclass(name).Config if known else made, **changes)

    return ours(config, **({"rope": ours(config.rope)} if getattr(config, "rope", None) else {}))


@lru_cache(maxsize=1)
def register() -> None:
    """Register the override with torchtitan. Importing this module after torchtitan does it too.

    >>> jitrope_torchtitan.register()

    Raises:
        ImportError: torchtitan is not installed.
    """
    from torchtitan.config.override import override
    from torchtitan.models.common.attention import BaseAttention

    override(target=BaseAttention.Config, description=attention.__doc__)(attention)


if "torchtitan.config.override" in sys.modules:  # true when torchtitan imports this module as an override
    register()
