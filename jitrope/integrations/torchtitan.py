"""torchtitan: its rope modules, through its own overrides.

    --override.imports jitrope.integrations.torchtitan.cos_sin_rope jitrope.integrations.torchtitan.complex_rope

replaces each `CosSinRoPE.Config` and each `ComplexRoPE.Config` of the model. Subclasses are not replaced, because they
compute something else. One launch rotates q and k, and one their gradients; the kernel selects rows by positions, so
nothing is gathered. Outputs have the host's bits on the same device. Parameters and checkpoints do not change.

    --override.imports jitrope.integrations.torchtitan.attention

replaces the rope of each attention as above, and Qwen 3.5's `MRoPE.Config`. If a `GQAttention` has norms of q and k
(Qwen3), they are in the same launch, and so are those of `Qwen35Attention`, which rotates a part of each head. The two
ropes cannot be named beside it, because torchtitan refuses overrides of nested configurations.

q and k are (B, S, H, D), as in torchtitan 0.3, or packed (T, H, D), as in versions since 2026-08-20. The host still
checks the positions. Calls left to the host are logged once for each reason; `calls` and `reasons` count them.
"""

from __future__ import annotations

import dis
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial, wraps
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..api import apply_rope, prepare_qkv
from ..base.errors import InvalidInput
from ..ops.values import Mrope, Norm, Positions
from . import _host
from ._layers import AsSelf, form_of
from ._norms import NormForm, check_results, unhooked

calls = _host.calls["torchtitan"]
"""Calls so far, by "jitrope" and "host"; a call of a compiled model counts when it is traced."""

reasons = _host.reasons["torchtitan"]
"""The reasons why calls were left to the host."""


def rotate_cos_sin(
    query: Tensor,
    key: Tensor,
    cache: Tensor,
    positions: Tensor | None = None,
    norm: Norm | None = None,
    mrope_section: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate halves by a table of `CosSinRoPE`.

    >>> q, k = torch.randn(2, 1, 16, 8, 64)
    >>> cache = torch.cat(jitrope.tables.cos_sin(16, jitrope.tables.inv_freq(rotary_dim=64)[0], width="full"), -1)
    >>> q, k = jitrope_torchtitan.rotate_cos_sin(q, k, cache)

    Args:
        query, key: (B, S, H, D) or (T, H, D), each with its number of heads, any strides.
        cache: (max_seq_len, 2 R): cosines of the R / 2 pairs twice, then sines. The first R elements are rotated.
        positions: int32 or int64 (B, S) or (1, S), or (T), rows of the cache; default 0, 1, ... A token with a position
            outside of the cache becomes NaN here; the modules run the host's check before.
        norm: a norm of query and key before the rotation, in the same launch.
        mrope_section: the number of pairs of each axis, interleaved (`MRoPE`); positions may then be (B, S, 3) or
            (T, 3), along time, height and width.

    Returns:
        query and key rotated, in fp32 arithmetic rounded once. Gradients flow to both. The errors are those of
        `jitrope.apply_rope`.
    """
    half = cache.shape[-1] // 4  # both members of a pair have one angle, so half of the table is enough
    words = {"cos": cache[:, :half], "sin": cache[:, 2 * half : 3 * half], "rotary_dim": 2 * half}
    rows: Tensor | Positions | None = positions
    if mrope_section is not None and positions is not None and positions.dim() == query.dim() - 1:
        rows = Mrope(positions.movedim(-1, 0), mrope_section, mrope_interleaved=True)
    return _both(query, key, norm, positions=rows, **words)


def rotate_complex(
    query: Tensor, key: Tensor, cache: Tensor, positions: Tensor | None = None, norm: Norm | None = None
) -> tuple[Tensor, Tensor]:
    """Rotate neighbours by a table of `ComplexRoPE`: complex64 cos + i sin, (max_seq_len, D / 2).

    The other arguments, the result and the errors are those of `rotate_cos_sin`, without mrope_section.

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
    rope: Any, size: int, function: Any, query: Tensor, key: Tensor, positions: Any = None, weights: Any = ()
) -> Any:
    """query and key rotated by a module's table; each rank rotates its shards.

    size: of the part of each head that the host rotates.
    function: of the module's configuration, query, key, table, weights and, if they are given, positions.
    """
    host, forward, parts = rope._original
    if host.forward is not forward or any(n in rope.__dict__ or getattr(type(rope), n) is not f for n, f in parts):
        raise InvalidInput(f"a method of {host.__name__} was replaced")
    if size != rope.config.dim:  # the host broadcasts a smaller table or refuses it
        raise InvalidInput("the heads and the table have different sizes")
    cache, given = _local(rope.cache), () if positions is None else (positions,)
    if given and rope._check is not None:
        rope._check(_local(positions), max_valid_pos=cache.shape[0] - 1)
    return function(rope.config, query, key, cache, *weights, *given)


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _weights(
    norms: tuple[Any, ...], form: NormForm, words: dict[str, Any], affine: bool, query: Tensor
) -> tuple[Tensor, ...]:
    """The weights of norms of a form for heads like query. affine: whether each has one."""
    found: list[Tensor] = []
    for norm in norms:
        weight, bias = unhooked(norm, wrapped=_moves_nothing(norm))
        if not form.fits(norm) or (weight is not None) != affine:
            raise InvalidInput("a norm was replaced or changed after the layer was built, or one alone has a weight")
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


def _rotation(rotate: Any, affine: int = 0, norm: dict[str, Any] | None = None) -> Any:
    """A function for `_rotate` with `affine` weights. norm: the words of a norm before the rotation."""

    def function(config: Any, query: Tensor, key: Tensor, cache: Tensor, *others: Tensor) -> Any:
        words = {} if norm is None else {"norm": Norm(*others[:affine], **norm)}
        section = getattr(config, "mrope_section", None)
        words |= {} if section is None else {"mrope_section": section}
        return rotate(query, key, cache, *others[affine:], **words)

    return _typed(function, affine)


def _typed(function: Any, weights: int) -> Any:
    """The function with the types of its inputs and outputs, for torchtitan's sharding checker.

    weights: the number of tensors after the table that every rank has whole.
    """
    import spmd_types as spmd

    table = {"dp": spmd.R, "cp": spmd.R, "tp": spmd.R}
    parts, same = {"dp": spmd.V, "cp": spmd.V, "tp": spmd.V}, {"dp": spmd.V, "cp": spmd.V, "tp": spmd.R}
    typed = {}
    for dim, tokens in ((4, ("dp", "cp")), (3, (("dp", "cp"),))):
        heads = (parts, spmd.PartitionSpec(*tokens, "tp", None))
        ids, of_axes = ((same, spmd.PartitionSpec(*tokens, *axis)) for axis in ((), (None,)))
        for ids_dim, given in ((0, ()), (dim - 2, (ids,)), (dim - 1, (of_axes,))):
            types = (None, heads, heads, *([table] * (1 + weights)), *given)
            typed[dim, ids_dim] = spmd.local_map(in_types=types, out_types=(heads, heads))(function)

    def chosen(config: Any, query: Tensor, *tensors: Tensor) -> Any:
        ids_dim = tensors[-1].dim() if len(tensors) > 2 + weights else 0
        return typed.get((query.dim(), ids_dim), function)(config, query, *tensors)

    return chosen


_FUNCTIONS = {"CosSinRoPE": rotate_cos_sin, "ComplexRoPE": rotate_complex, "MRoPE": rotate_cos_sin}
_PLACES = {
    "CosSinRoPE": "torchtitan.models.common.rope",
    "ComplexRoPE": "torchtitan.models.common.rope",
    "MRoPE": "torchtitan.models.qwen3_5.rope",
    "GQAttention": "torchtitan.models.common.attention",
    "Qwen35Attention": "torchtitan.models.qwen3_5.model",
}
"""The modules of the host's classes. They are imported at first use."""


@lru_cache
def _subclass(name: str) -> Any:
    """Our subclass of the host's class of this name, with its own configuration."""
    host, module = getattr(importlib.import_module(_PLACES[name]), name), {"__module__": __name__}
    words = {**module, "__qualname__": f"{name}.Config"}
    config: Any = dataclass(kw_only=True, slots=True)(type("Config", (host.Config,), words))
    methods = _rope_methods(host) if name in _FUNCTIONS else _attention_methods(host)
    return type(name, (host,), {**module, "Config": config, **methods})


def _rope_methods(host: Any) -> dict[str, Any]:
    function = _rotation(_FUNCTIONS[host.__name__])

    def forward(self: Any, query: Tensor, key: Tensor, positions: Tensor | None = None) -> Any:
        ours, theirs = partial(_rotate, self, query.shape[-1], function), partial(host.forward, self)
        return _host.take("torchtitan", ours, theirs, query, key, positions)

    check = getattr(sys.modules[host.__module__], "_maybe_check_max_pos", None)  # not in all versions
    names = ("apply_rotary_emb", "_reshape_cache", "_compute_mrope_cache", "_rotate_half")  # what the forward calls
    parts = [(name, _host.own("torchtitan", getattr(host, name))) for name in names if hasattr(host, name)]
    original = (host, _host.own("torchtitan", host.forward), parts)
    return {"forward": forward, "_check": staticmethod(check) if check else None, "_original": original}


def _attention_methods(host: Any) -> dict[str, Any]:
    original = _host.own("torchtitan", host.forward)
    theirs = _without_copies(original)

    def built(self: Any, config: Any) -> None:
        host.__init__(self, config)
        self._norm_form = form = _form(self)
        if form is not None:  # we keep no module, because a pipeline copies the layer
            self._rope_class, self._norm_words = type(self.rope), form.words(self.q_norm)
            self._norm_affine = getattr(self.q_norm, "weight", None) is not None
            function = _FUNCTIONS[type(self.rope).__name__]
            self._norm_and_rotate = _rotation(function, 2 * self._norm_affine, self._norm_words)

    @wraps(host.forward)  # torchtitan reads the names of its arguments
    def forward(self: Any, *arguments: Any, **words: Any) -> Any:
        if None in (self._norm_form, self.q_norm, self.k_norm):
            return host.forward(self, *arguments, **words)
        if host.forward is not original:
            _host.note_unfused("torchtitan", f"{host.__name__}.forward was replaced")
            return host.forward(self, *arguments, **words)
        whole = {"q_norm": _as_it_is, "k_norm": _as_it_is, "rotary_dim": self.head_dim}
        return theirs(AsSelf(self, rope=partial(_FUSED, self), **whole), *arguments, **words)

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


def _without_copies(forward: Any) -> Any:
    """A `forward` with `_joined` in place of `torch.cat`; `forward` itself if it has none, or is not a function.

    It also stays if `torch` is more in it than the name of a global, because all of them have one entry in its code.
    """
    if not isinstance(forward, FunctionType) or "cat" not in forward.__code__.co_names:
        return forward
    if {i.opname for i in dis.get_instructions(forward.__code__) if i.argval == "torch"} != {"LOAD_GLOBAL"}:
        return forward
    forward.__globals__[_TORCH.__name__] = _TORCH
    names = tuple(_TORCH.__name__ if name == "torch" else name for name in forward.__code__.co_names)
    return _host.with_code(forward, forward.__code__.replace(co_names=names))


def _joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """torch.cat, without a copy if only one part has elements along the axis."""
    some = [part for part in parts if part.shape[dim]]
    return some[0] if len(some) == 1 else torch.cat(some, dim=dim)


_TORCH = ModuleType("_jitrope_torch", "torch, as the host's layers see it whose heads we rotate whole.")
vars(_TORCH).update({name: x for name, x in vars(torch).items() if name[:2] != "__"})
vars(_TORCH).update(cat=_joined, __getattr__=partial(getattr, torch))  # torch imports some modules at first use


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _rotated_size(layer: Any) -> int:
    size: int = getattr(layer, "rotary_dim", layer.head_dim)
    return size


def _fused(layer: Any, query: Tensor, key: Tensor, positions: Any = None) -> Any:
    if type(layer.rope) is not layer._rope_class:
        raise InvalidInput("rope was replaced after the layer was built")
    unhooked(layer.rope, _moves_nothing(layer.rope), "rope")  # we do not call it
    norms = (layer.q_norm, layer.k_norm)
    weights = _weights(norms, layer._norm_form, layer._norm_words, layer._norm_affine, query)
    return _rotate(layer.rope, _rotated_size(layer), layer._norm_and_rotate, query, key, positions, weights), 1


def _separate(reason: str, layer: Any, query: Tensor, key: Tensor, positions: Any = None) -> Any:
    _host.note_unfused("torchtitan", reason)
    heads, size = (layer.q_norm(query), layer.k_norm(key)), _rotated_size(layer)
    rotated = layer.rope(*(x[..., :size] for x in heads), positions)
    return [_joined([x, whole[..., size:]], dim=-1) for x, whole in zip(rotated, heads)]


_FUSED = _host.or_else("torchtitan", "fused", _fused, _separate)


def __getattr__(name: str) -> Any:
    """Return our subclass of a class of the host, for configurations written by hand, and for pickle."""
    if name in _PLACES:
        return _subclass(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _derived(config: Any, **changes: Any) -> Any:
    """The configuration of our subclass, or of the same class if we have none."""
    from torchtitan.config.override import derive

    made = type(config)
    name = made.__qualname__.partition(".")[0]
    return derive(config, _subclass(name).Config if _PLACES.get(name) == made.__module__ else made, **changes)


def cos_sin_rope(config: Any) -> Any:
    """The override of `CosSinRoPE.Config`: name it in `override.imports`.

    >>> from torchtitan.models.common.rope import CosSinRoPE
    >>> rope = jitrope_torchtitan.cos_sin_rope(CosSinRoPE.Config(dim=64, max_seq_len=16)).build()
    """
    return _derived(config)


def complex_rope(config: Any) -> Any:
    """The override of `ComplexRoPE.Config`: name it in `override.imports`.

    >>> from torchtitan.models.common.rope import ComplexRoPE
    >>> rope = jitrope_torchtitan.complex_rope(ComplexRoPE.Config(dim=64, max_seq_len=16)).build()
    """
    return _derived(config)


def attention(config: Any) -> Any:
    """The override of `BaseAttention.Config` and its rope: name it in `override.imports`, and no other.

    Norms of q and k and the rotation are one launch in `GQAttention` and in `Qwen35Attention`. In other attention, as
    in subclasses of these, only the rope is replaced; a rope of another class than the host's stays.

    >>> from torchtitan.models.qwen3 import qwen3_configs
    >>> layer = qwen3_configs["debugmodel"](attn_backend="flex").layers[0]
    >>> layer.attention = jitrope_torchtitan.attention(layer.attention)
    """
    return _derived(config, **({"rope": _derived(config.rope)} if getattr(config, "rope", None) else {}))


@lru_cache(maxsize=1)
def register() -> None:
    """Register the overrides with torchtitan. Importing this module after torchtitan does it too.

    >>> jitrope_torchtitan.register()

    Raises:
        ImportError: torchtitan is not installed.
    """
    from torchtitan.config.override import override
    from torchtitan.models.common import attention as common
    from torchtitan.models.common import rope

    for host, factory in ((rope.CosSinRoPE, cos_sin_rope), (rope.ComplexRoPE, complex_rope)):
        override(target=host.Config, exact=True, description=factory.__doc__)(factory)
    override(target=common.BaseAttention.Config, description=attention.__doc__)(attention)


if "torchtitan.config.override" in sys.modules:  # true when torchtitan imports this module as an override
    register()
