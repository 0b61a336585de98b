"""The frequencies of a model's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ..base import arguments
from ..base.errors import InvalidInput
from .frequencies import ROPE_TYPES, Device, Found, Length, inv_freq, least, length


def from_config(
    config: Any,
    *,
    layer_type: str | None = None,
    seq_len: Length = None,
    head_dim: int | None = None,
    device: Device = None,
) -> Found:
    """`inv_freq` for a model's configuration: transformers' object, or a dict with the same names (config.json).

    >>> tables.from_config({"head_dim": 4, "rope_parameters": {"rope_type": "linear", "factor": 2.0}})
    (tensor([0.5000, 0.0050]), 1.0)

    Args:
        config: the function reads rope_parameters (or the older rope_scaling and rope_theta), head_dim (or
            attention_head_dim, kv_channels, or hidden_size and num_attention_heads), partial_rotary_factor,
            max_position_embeddings, original_max_position_embeddings and, in a dict, rotary_dim, and qk_rope_head_dim
            for multi-head latent attention. A file may leave out defaults of its class, such as rope_theta: pass the
            object then.
        layer_type: the type of layer, if rope_parameters has one entry for each type; else None.
        seq_len: for "dynamic" and "longrope"; the other types do not depend on it.
        head_dim: replaces the configuration's value, for a dict that has it under another name.

    Returns:
        As in `inv_freq`, (R / 2,) fp32 and a number; R is the number of rotated elements.

    Raises:
        InvalidInput: as in `inv_freq`; or the configuration has no such parameters, or none for this layer_type.
    """
    if layer_type is not None and not isinstance(layer_type, str):
        arguments.refuse("from_config", "layer_type", layer_type, "the name of a type of layer, or None")
    if head_dim is not None:
        head_dim = arguments.whole("from_config", "head_dim", head_dim, 2)
    if seq_len is not None:
        length("seq_len", seq_len, "from_config")
    parameters = _rope_parameters(config, layer_type)
    if layer_type is not None and not isinstance(config, Mapping):
        with suppress(AttributeError, TypeError, ValueError):  # in transformers, layers may have different head sizes
            config = config.per_layer_config[layer_type]
    found: dict[str, Any] = {"rope_theta": 10000.0, "partial_rotary_factor": 1.0, "seq_len": seq_len}
    longest = found["max_position_embeddings"] = _get(config, "max_position_embeddings")
    for source in ({name: _get(config, name) for name in ("rope_theta", "partial_rotary_factor")}, parameters):
        found.update((name, value) for name, value in source.items() if value is not None)
    trained = found.get("original_max_position_embeddings")
    if layer_type is None:  # in Phi-3 it is beside rope_parameters and has priority
        trained = _get(config, "original_max_position_embeddings") or trained
    found["original_max_position_embeddings"] = trained = trained or longest
    for name in ("max_position_embeddings", "original_max_position_embeddings", "partial_rotary_factor"):
        if found[name] is not None:
            arguments.number("from_config", name, found[name], least(name))
    rope_type = found.get("rope_type") or found.get("type") or "default"
    if rope_type == "mrope":  # in Qwen2-VL's file; its positions have several axes
        rope_type = "default"
    arguments.word("from_config", "rope_type", rope_type, ROPE_TYPES)
    if rope_type in ("yarn", "longrope") and longest and trained:
        found.setdefault("factor", longest / trained)
    accepted = ROPE_TYPES[rope_type].parameters
    known = {name: value for name, value in found.items() if name in accepted}
    rotary_dim = _rotary_dim(config, rope_type, head_dim, found["partial_rotary_factor"])
    return inv_freq(rope_type, rotary_dim=rotary_dim, theta=found["rope_theta"], device=device, **known)


def _get(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _rope_parameters(config: Any, layer_type: str | None) -> dict[str, Any]:
    """The parameters of one type of layer, or of all layers."""
    names = ("rope_parameters", "rope_scaling", "rope_theta")
    if config is None or isinstance(config, (str, bytes)):
        arguments.refuse("from_config", "config", config, "a transformers configuration, or a dict of it")
    if not any(name in config if isinstance(config, Mapping) else hasattr(config, name) for name in names):
        raise InvalidInput(f"from_config: config has none of {', '.join(names)}; perhaps its text_config has")
    found = _get(config, "rope_parameters") or _get(config, "rope_scaling") or {}
    if not isinstance(found, Mapping):
        arguments.refuse("from_config", "config's rope_parameters", found, "a dict")
    layer_types = [name for name, value in found.items() if isinstance(value, Mapping)]
    if layer_type is None and not layer_types:
        return dict(found)
    if layer_type not in layer_types:
        allowed = " or ".join(map(repr, layer_types)) or "None, because all layers share the parameters"
        raise InvalidInput(f"from_config: layer_type is {layer_type!r}; allowed is {allowed}")
    # transformers reads truncate beside the layer types, not inside them.
    return {**found[layer_type], "truncate": found.get("truncate", True)}


def _rotary_dim(config: Any, rope_type: str, head_dim: int | None, partial: float) -> int:
    if head_dim is None and isinstance(config, Mapping):
        if _get(config, "global_head_dim") or _get(config, "per_layer_config"):
            raise InvalidInput("from_config: config has heads of several sizes; pass head_dim, or transformers' object")
        for name in ("qk_rope_head_dim", *(["rotary_dim"] if partial == 1 and rope_type != "proportional" else [])):
            if _get(config, name):
                return arguments.whole("from_config", f"config's {name}", config[name])
    names = ("head_dim", "attention_head_dim", "kv_channels")
    head_dim = head_dim or next(filter(None, (_get(config, name) for name in names)), None)
    if head_dim is None:
        sizes = [_get(config, name) for name in ("hidden_size", "num_attention_heads")]
        if None in sizes:
            raise InvalidInput("from_config: config has neither head_dim nor hidden_size and num_attention_heads")
        width, heads = (arguments.whole("from_config", "config's sizes", size, 1) for size in sizes)
        head_dim = width // heads
    head_dim = arguments.whole("from_config", "config's head_dim", head_dim, 1)
    return int(head_dim) if rope_type == "proportional" else int(head_dim * partial)
