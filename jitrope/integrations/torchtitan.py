"""torchtitan: its rope modules, through its own overrides.

    --override.imports jitrope.integrations.torchtitan.cos_sin_rope jitrope.integrations.torchtitan.complex_rope

replaces each `CosSinRoPE.Config` and each `ComplexRoPE.Config` of the model. Subclasses are not replaced, because they
compute something else. One launch rotates q and k, and one their gradients; the kernel selects rows by positions, so
nothing is gathered. Outputs have the host's bits on the same device. Parameters and checkpoints do not change.

    --override.imports jitrope.integrations.torchtitan.attention

replaces each `GQAttention.Config`, and its rope as above. If it has norms of q and k (Qwen3), they are in the same
launch. The two ropes cannot be named beside it, because torchtitan refuses overrides of nested configurations.

q and k are (B, S, H, D), as in torchtitan 0.3, or packed (T, H, D), as in versions since 2026-08-20. The host still
checks the positions. Calls left to the host are logged once for each reason; `calls` and `reasons` count them.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from functools import lru_cache, partial, wraps
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from ..api import apply_rope, prepare_qkv
from ..base.errors import InvalidInput
from ..ops.values import Norm
from . import _host
from ._layers import AsSelf, form_of
from ._norms import NormForm, check_results, unhooked

calls = _host.calls["torchtitan"]
"""Calls so far, by "jitrope" and "host"; a call of a compiled model counts when it is traced."""

reasons = _host.reasons["torchtitan"]
"""The reasons why calls were left to the host."""


def rotate_cos_sin(
    query: Tensor, key: Tensor, cache: Tensor, positions: Tensor | None = None, norm: Norm | None = None
) -> tuple[Tensor, Tensor]:
    """Rotate halves by a table of `CosSinRoPE`.

    >>> q, k = torch.randn(2, 1, 16, 8, 64)
    >>> cache = torch.cat(jitrope.tables.cos_sin(16, jitrope.tables.inv_freq(rotary_dim=64)[0], width="full"), -1)
    >>> q, k = jitrope_torchtitan.rotate_cos_sin(q, k, cache)

    Args:
        query, key: (B, S, H, D) or (T, H, D), each with its number of heads, any strides.
        cache: (max_seq_len, 2 D): cosines of the D / 2 pairs twice, then sines.
        positions: int32 or int64 (B, S) or (1, S), or (T), rows of the cache; default 0, 1, ... A token with a position
            outside of the cache becomes NaN here; the modules run the host's check before.
        norm: a norm of query and key before the rotation, in the same launch.

    Returns:
        query and key rotated, in fp32 arithmetic rounded once. Gradients flow to both.

    Raises:
        InvalidInput: the arguments do not fit together.
    """
    half = cache.shape[-1] // 4  # both members of a pair have one angle, so half of the table is enough
    words = {"cos": cache[:, :half], "sin": cache[:, 2 * half : 3 * half], "rotary_dim": 2 * half}
    return _both(query, key, norm, positions=positions, **words)


def rotate_complex(
    query: Tensor, key: Tensor, cache: Tensor, positions: Tensor | None = None, norm: Norm | None = None
) -> tuple[Tensor, Tensor]:
    """Rotate neighbours by a table of `ComplexRoPE`: complex64 cos + i sin, (max_seq_len, D / 2).

    The other arguments, the result and the errors are those of `rotate_cos_sin`.

    >>> q, k = torch.randn(2, 1, 16, 8, 64)
    >>> cache = torch.complex(*jitrope.tables.cos_sin(16, jitrope.tables.inv_freq(rotary_dim=64)[0]))
    >>> q, k = jitrope_torchtitan.rotate_complex(q, k, cache)
    """
    words = {"freqs_cis": cache, "interleaved": True, "rounding": "complex64"}
    return _both(query, key, norm, positions=positions, **words)


def _both(query: Tensor, key: Tensor, norm: Norm | None, **words: Any) -> tuple[Tensor, Tensor]:
    words["layout"] = "thd" if query.dim() == 3 else "bshd"
    q, k = (apply_rope(query, key, **words) if norm is None else prepare_qkv(query, key, None, norm=norm, **words))[:2]
    assert k is not None
    return q, k


def _rotate(
    rope: Any, function: Any, query: Tensor, key: Tensor, positions: Any = None, weights: tuple[Tensor, ...] = ()
) -> Any:
    """query and key rotated by a module's table; each rank rotates its shards.

    function: of query, key, table, weights and, if they are given, positions.
    """
    # The host broadcasts a partial rotation or refuses it.
    if any(x.shape[-1] != rope.config.dim for x in (query, key)):
        raise InvalidInput("the heads and the table have different sizes")
    cache, given = _local(rope.cache), () if positions is None else (positions,)
    if given and rope._check is not None:
        rope._check(_local(positions), max_valid_pos=cache.shape[0] - 1)
    return function(query, key, cache, *weights, *given)


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _weights(norms: tuple[Any, ...], form: NormForm, words: dict[str, Any], query: Tensor) -> tuple[Tensor, ...]:
    """The weights of norms of a form for heads like query."""
    found: list[Tensor] = []
    for norm in norms:
        weight, bias = unhooked(norm, wrapped=_moves_nothing(norm))
        check_results((form,), weight, query)
        if bias is not None or form.words(norm) != words:
            raise InvalidInput("the norms of q and k differ, or have a bias")
        if weight is not None:
            found.append(weight)
    return tuple(found)


def _moves_nothing(module: Any) -> bool:
    """Whether a module's parallel `forward` only calls that of its class: its tensors are where they have to be."""
    config = getattr(module, "_sharding_config", None)
    if config is None or not module._parallelized:
        return False
    same = config.in_src_shardings == config.in_dst_shardings and config.out_src_shardings == config.out_dst_shardings
    return bool(same and config.local_map is None)


def _typed(function: Any, weights: int = 0) -> Any:
    """The function with the types of its inputs and outputs, for torchtitan's sharding checker.

    weights: the number of tensors after the table that every rank has whole.
    """
    import spmd_types as spmd

    table = {"dp": spmd.R, "cp": spmd.R, "tp": spmd.R}
    parts, same = {"dp": spmd.V, "cp": spmd.V, "tp": spmd.V}, {"dp": spmd.V, "cp": spmd.V, "tp": spmd.R}
    typed = {}
    for dim, tokens in ((4, ("dp", "cp")), (3, (("dp", "cp"),))):
        heads, ids = (parts, spmd.PartitionSpec(*tokens, "tp", None)), (same, spmd.PartitionSpec(*tokens))
        whole = (heads, heads, *([table] * (1 + weights)))
        for types in ((*whole, ids), whole):
            typed[dim, len(types)] = spmd.local_map(in_types=types, out_types=(heads, heads))(function)
    return lambda *tensors: typed.get((tensors[0].dim(), len(tensors)), function)(*tensors)


_ROPE = "torchtitan.models.common.rope"
_FUNCTIONS = {"CosSinRoPE": rotate_cos_sin, "ComplexRoPE": rotate_complex}
_PLACES = {**dict.fromkeys(_FUNCTIONS, _ROPE), "GQAttention": "torchtitan.models.common.attention"}
"""The modules of the host's classes. They are imported at first use."""


def _host_class(name: str) -> Any:
    return getattr(importlib.import_module(_PLACES[name]), name)


@lru_cache
def _subclass(name: str) -> Any:
    """Our subclass of the host's class of this name, with its own configuration."""
    host, module = _host_class(name), {"__module__": __name__}
    words = {**module, "__qualname__": f"{name}.Config"}
    config: Any = dataclass(kw_only=True, slots=True)(type("Config", (host.Config,), words))
    methods = _rope_methods(host) if name in _FUNCTIONS else _attention_methods(host)
    return type(name, (host,), {**module, "Config": config, **methods})


def _rope_methods(host: Any) -> dict[str, Any]:
    function = _typed(_FUNCTIONS[host.__name__])

    def forward(self: Any, query: Tensor, key: Tensor, positions: Tensor | None = None) -> Any:
        ours, theirs = partial(_rotate, self, function), partial(host.forward, self)
        return _host.take("torchtitan", ours, theirs, query, key, positions)

    check = getattr(sys.modules[host.__module__], "_maybe_check_max_pos", None)  # not in all versions
    return {"forward": forward, "_check": staticmethod(check) if check else None}


def _attention_methods(host: Any) -> dict[str, Any]:
    def built(self: Any, config: Any) -> None:
        host.__init__(self, config)
        self._norm_form = form = _form(self)
        if form is not None:  # we keep no module, because a pipeline copies the layer
            affine = sum(getattr(norm, "weight", None) is not None for norm in (self.q_norm, self.k_norm))
            self._norm_words = form.words(self.q_norm)
            self._norm_and_rotate = _normed(_FUNCTIONS[type(self.rope).__name__], affine, self._norm_words)

    @wraps(host.forward)  # torchtitan reads the names of its arguments
    def forward(self: Any, *arguments: Any, **words: Any) -> Any:
        fused = self._norm_form is not None
        layer = AsSelf(self, q_norm=None, k_norm=None, rope=partial(_FUSED, self)) if fused else self
        return host.forward(layer, *arguments, **words)

    return {"__init__": built, "forward": forward}


def _form(layer: Any) -> NormForm | None:
    """The form of a layer's two norms, found before its forward may be compiled; None if they stay with the host."""
    norms = (layer.q_norm, layer.k_norm)
    if None in norms or type(layer.rope).__module__ != __name__:
        return None
    try:
        forms = [form_of(norm) for norm in norms]
    except InvalidInput as error:
        _host.note_unfused("torchtitan", error.args[0])
        return None
    return forms[0] if forms[0] == forms[1] else None


def _normed(rotate: Any, affine: int, words: dict[str, Any]) -> Any:
    """A function of query, key, table, `affine` weights and perhaps positions. words: those of the norm."""

    def function(query: Tensor, key: Tensor, cache: Tensor, *others: Tensor) -> Any:
        return rotate(query, key, cache, *others[affine:], **{"norm": Norm(*others[:affine], **words)})

    return _typed(function, affine)


def _fused(layer: Any, query: Tensor, key: Tensor, positions: Any = None) -> Any:
    unhooked(layer.rope, _moves_nothing(layer.rope), "rope")  # we do not call it
    weights = _weights((layer.q_norm, layer.k_norm), layer._norm_form, layer._norm_words, query)
    return _rotate(layer.rope, layer._norm_and_rotate, query, key, positions, weights), 1


def _separate(reason: str, layer: Any, query: Tensor, key: Tensor, positions: Any = None) -> Any:
    _host.note_unfused("torchtitan", reason)
    return layer.rope(layer.q_norm(query), layer.k_norm(key), positions)


_FUSED = _host.or_else("torchtitan", "fused", _fused, _separate)


def __getattr__(name: str) -> Any:
    """Return `CosSinRoPE`, `ComplexRoPE` or `GQAttention`, for configurations written by hand, and for pickle."""
    if name in _PLACES:
        return _subclass(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _derived(config: Any, name: str) -> Any:
    from torchtitan.config.override import derive

    return derive(config, _subclass(name).Config)


def cos_sin_rope(config: Any) -> Any:
    """The override of `CosSinRoPE.Config`: name it in `override.imports`.

    >>> from torchtitan.models.common.rope import CosSinRoPE
    >>> rope = jitrope_torchtitan.cos_sin_rope(CosSinRoPE.Config(dim=64, max_seq_len=16)).build()
    """
    return _derived(config, "CosSinRoPE")


def complex_rope(config: Any) -> Any:
    """The override of `ComplexRoPE.Config`: name it in `override.imports`.

    >>> from torchtitan.models.common.rope import ComplexRoPE
    >>> rope = jitrope_torchtitan.complex_rope(ComplexRoPE.Config(dim=64, max_seq_len=16)).build()
    """
    return _derived(config, "ComplexRoPE")


def attention(config: Any) -> Any:
    """The override of `GQAttention.Config` and its rope: name it in `override.imports`, and no other.

    Norms of q and k and the rotation are one launch. A rope that the other two overrides do not replace stays.

    >>> from torchtitan.models.qwen3 import qwen3_configs
    >>> layer = qwen3_configs["debugmodel"](attn_backend="flex").layers[0]
    >>> layer.attention = jitrope_torchtitan.attention(layer.attention)
    """
    made = _derived(config, "GQAttention")
    rope = type(made.rope).__qualname__.partition(".")[0]
    if rope in _FUNCTIONS and type(made.rope).__module__ == _ROPE:
        made.rope = _derived(made.rope, rope)
    return made


@lru_cache(maxsize=1)
def register() -> None:
    """Register the overrides with torchtitan. Importing this module after torchtitan does it too.

    >>> jitrope_torchtitan.register()

    Raises:
        ImportError: torchtitan is not installed.
    """
    from torchtitan.config.override import override

    for name, factory in zip(_PLACES, (cos_sin_rope, complex_rope, attention)):
        override(target=_host_class(name).Config, exact=True, description=factory.__doc__)(factory)


if "torchtitan.config.override" in sys.modules:  # true when torchtitan imports this module as an override
    register()
