"""The frequencies of a model's configuration."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ..base import arguments
from ..base.errors import InvalidInput, require
from .frequencies import ROPE_TYPES, Device, Found, Length, inv_freq, length, number

_WITH_ALPHA = ("alpha", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
"""HunYuan's parameters. Its models read alpha only."""

_AXIAL: dict[str, dict[str, Any]] = {"pixtral": {"in_turn": True}, "minimax_m3_vl_vision": {"axes": 3}}
"""Parameters of "axial" that a configuration does not name, by model_type."""

_SIZES = (
    *(("head_dim",), ("attention_head_dim",), ("kv_channels",)),
    ("memory_attention_hidden_size", "memory_attention_num_attention_heads", "memory_attention_downsample_rate"),
    *(("embed_dim", "num_heads"), ("hidden_size", "num_attention_heads"), ("hidden_size", "num_heads")),
)
"""Names of the head's size, or of a width and its divisors. The first row that a configuration has counts."""

_TOP = {
    *("rope_parameters", "rope_scaling", "rope_theta", "layer_rope_theta", "partial_rotary_factor"),
    *("rotary_dim", "qk_rope_head_dim"),
    # These speak of rope, but not of its frequencies:
    *("rope_interleave", "no_rope_layers", "no_rope_layer_interval", "rope_scaling_layers", "use_mem_rope"),
    *("memory_attention_rope_dropout", "memory_attention_rope_feat_sizes", "memory_attention_rope_k_sizes"),
    "ignore_keys_at_rope_validation",
}
_INNER = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "max_position_embeddings"),
    *("mrope_section", "mrope_interleaved", "interleaved"),  # which axis a pair takes: for `Mrope`
    "llama_4_scaling_beta",  # a factor of q, by its position
}
"""Names with "rope" or "rotary" that are known beside rope_parameters, and all names that are known in it."""

_REFUSED = {
    "hunyuan_vl_text": "the two elements of a pair take different axes",
    "gemma4_vision": "each half of a head is rotated on its own",
    "kimi_k25_vision": "width and height take turns from pair to pair, with equal frequencies",
    "llama4_vision_model": "positions are those of an image's patches",
    "efficientloftr": "all heads share one range of frequencies",
    "musicflamingo": "positions are times in seconds",
    "mistral_large4_text": "the frequencies are learned",
    "pos_embed_rescale": "positions are fractions of an image's sides",  # DINOv3
}
"""Models whose tables are not position x frequency with `Mrope`'s axes, by model_type or by a name that they have."""


def from_config(
    config: Any,
    *,
    layer_type: str | None = None,
    seq_len: Length = None,
    head_dim: int | None = None,
    device: Device = None,
) -> Found:
    """`inv_freq` for a model's configuration: transformers' object, or a dict with the same names (config.json).

    >>> tables.from_config({"head_dim": 4, "rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 2.0}})
    (tensor([0.5000, 0.0050]), 1.0)

    Args:
        config: the function reads rope_parameters (or the older rope_scaling and rope_theta), head_dim (or
            attention_head_dim, kv_channels, or hidden_size and num_attention_heads), partial_rotary_factor,
            max_position_embeddings, original_max_position_embeddings and, in a dict, rotary_dim, and qk_rope_head_dim
            for multi-head latent attention. A dict with a model_type of transformers is read by its class there, which
            fills in what the file leaves out. Any other dict must have rope_theta and the rest. Names that choose
            layers, such as no_rope_layers, are not read. partial_rotary_factor counts also if the module of that model
            ignores it, as Llama's does in transformers.
        layer_type: the type of layer, if rope_parameters has one entry for each type, as in transformers' objects for
            Gemma 3 ("full_attention", "sliding_attention") and DeepSeek V4 ("main", "compress"); else None.
        seq_len: for "dynamic" and "longrope"; the other types do not depend on it.
        head_dim: replaces the configuration's value, for a dict that has it under another name.

    Returns:
        As in `inv_freq`, (R / 2,) fp32 and a number; R is the number of rotated elements. If positions have several
        axes, pass `Mrope` with mrope_section; for "axial", R / 2 / axes pairs for each, in the model's order of axes;
        for Ernie 4.5 VL axis_of_pair.

    Raises:
        InvalidInput: as in `inv_freq`. Or the configuration has no such parameters, or none for this layer_type. Or it
            names a parameter of rope that this function does not know. Or the model computes its tables otherwise; or
            transformers is missing or cannot read a dict with model_type.
    """
    if seq_len is not None:
        length("seq_len", seq_len, "from_config")
    config = _with_defaults(config)
    _refuse_unknown(config)
    rope_type, parameters = _typed(_rope_parameters(config, layer_type))
    longest, trained = _get(config, "max_position_embeddings"), "original_max_position_embeddings"
    found = {"partial_rotary_factor": 1.0, "max_position_embeddings": longest, "seq_len": seq_len}
    beside = {name: _get(config, name) for name in ("rope_theta", "partial_rotary_factor")}
    found |= {name: value for name, value in (beside | parameters).items() if value is not None}
    no_theta = "config has no rope_theta, and its default depends on the model; add it, or pass its text_config"
    _require("rope_theta" in found, no_theta)
    thetas = _get(config, "layer_rope_theta") or ()
    thetas = arguments.items("from_config", "config's layer_rope_theta", thetas, "a list of numbers")
    others = [theta for theta in thetas if theta and theta != found["rope_theta"]]
    _require(not others, "layers differ in layer_rope_theta; pass a dict with one layer's rope_theta")
    # In Phi-3 it is beside rope_parameters and has priority.
    found[trained] = (layer_type is None and _get(config, trained)) or found.get(trained) or longest
    for name in [x for x in ("max_position_embeddings", trained, "partial_rotary_factor") if found[x] is not None]:
        number(name, found[name], "from_config")
    if rope_type in ("yarn", "longrope") and longest and found[trained]:
        found.setdefault("factor", longest / found[trained])
    if rope_type == "axial":
        found |= _AXIAL.get(_get(config, "model_type"), {})
    if layer_type is not None and not isinstance(config, Mapping):
        with suppress(AttributeError, TypeError, ValueError):  # in transformers, layers may have different head sizes
            config = config.per_layer_config[layer_type]
    rotary_dim = _rotary_dim(config, rope_type, head_dim, found["partial_rotary_factor"])
    if found.get("axes") == 3:  # elements that are left over are not rotated
        rotary_dim -= rotary_dim % 6
    known = {name: value for name, value in found.items() if name in ROPE_TYPES[rope_type].parameters}
    return inv_freq(rope_type, rotary_dim=rotary_dim, theta=found["rope_theta"], device=device, **known)


_require = functools.partial(require, "from_config")


def _get(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _with_defaults(config: Any) -> Any:
    """A file that names a model, as transformers' class reads it: with the defaults that the file leaves out."""
    model_type = config.get("model_type") if isinstance(config, Mapping) else None
    if not isinstance(model_type, str):
        return config
    try:
        from transformers import CONFIG_MAPPING

        known = model_type in CONFIG_MAPPING
        return CONFIG_MAPPING[model_type].from_dict(copy.deepcopy(dict(config))) if known else config
    except Exception as error:  # there is no transformers, or it does not expect the values
        text = f"transformers does not read config, a file of {model_type!r}; pass a dict without model_type"
        raise InvalidInput(f"from_config: {text} ({error!r:.150})") from error


def _refuse_unknown(config: Any) -> None:
    """Refuse models with tables of their own, and names that may change the frequencies."""
    if config is None or isinstance(config, (str, bytes)):
        arguments.refuse("from_config", "config", config, "a transformers configuration, or a dict of it")
    names = [str(name) for name in (config if isinstance(config, Mapping) else getattr(config, "__dict__", ()))]
    for name, why in _REFUSED.items():
        own = name in (_get(config, "model_type"), *names)
        _require(not own, f"{name} has its own kind of table: {why}; compute it from inv_freq")
    top = _TOP if isinstance(config, Mapping) else {*_TOP, "compress_rope_theta"}  # which DeepSeek V4's object has read
    for name in names:
        known = name in top or not {"rope", "rotary"} & {*name.split("_")} or _get(config, name) in (None, False)
        _require(known, f"{name} is unknown; pass a dict without it, or use inv_freq")


def _rope_parameters(config: Any, layer_type: str | None) -> dict[str, Any]:
    """The parameters of one type of layer, or of all layers."""
    found = _get(config, "rope_parameters") or _get(config, "rope_scaling") or {}
    if not isinstance(found, Mapping):
        arguments.refuse("from_config", "config's rope_parameters", found, "a dict")
    layers = {name: value for name, value in found.items() if isinstance(value, Mapping)}
    beside = {name: value for name, value in found.items() if name not in layers}
    arguments.word("from_config", "layer_type", layer_type, layers or (None,))
    if layer_type is None:
        return beside
    own = dict(layers[layer_type])
    if _type(own) == "yarn":  # transformers reads truncate beside the types, not in the type's own parameters
        own["truncate"] = beside.get("truncate", True)
    return {name: value for name, value in beside.items() if name not in ("rope_type", "type", "truncate")} | own


def _type(parameters: Mapping[str, Any]) -> Any:
    found = parameters.get("rope_type") or parameters.get("type") or "default"
    return "default" if found == "mrope" else found  # in Qwen2-VL's file; its positions have several axes


def _typed(parameters: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The type in `ROPE_TYPES`, and its parameters that are not None. Refuses those that the type does not have."""
    rope_type, given = _type(parameters), {name: value for name, value in parameters.items() if value is not None}
    if rope_type == "dynamic" and "alpha" in given:
        rope_type, factor = "ntk", {"factor": given["alpha"]}
        given = {name: value for name, value in given.items() if name not in _WITH_ALPHA} | factor
    arguments.word("from_config", "rope_type", rope_type, ROPE_TYPES)
    unknown = [name for name in given if name not in _INNER | ROPE_TYPES[rope_type].parameters.keys()]
    _require(not unknown, f"{rope_type!r} has no {', '.join(unknown)}; leave out what the model ignores")
    return rope_type, given


def _rotary_dim(config: Any, rope_type: str, head_dim: int | None, partial: float) -> int:
    is_file = isinstance(config, Mapping)
    if head_dim is None:
        several = is_file and (_get(config, "global_head_dim") or _get(config, "per_layer_config"))
        _require(not several, "config has heads of several sizes; pass head_dim, or transformers' object")
        latent, rotary_dim = _get(config, "qk_rope_head_dim"), _get(config, "rotary_dim")
        if latent and (is_file or rope_type == "default"):
            return arguments.whole("from_config", "config's qk_rope_head_dim", latent)
        if rotary_dim and is_file and partial == 1 and rope_type != "proportional":
            ignored = _get(config, "rope_parameters")  # by transformers 5
            _require(not ignored, "rotary_dim is not partial_rotary_factor's 1; leave it out")
            return arguments.whole("from_config", "config's rotary_dim", rotary_dim)
        sizes, *_ = *[row for row in _SIZES if all(_get(config, name) for name in row)], ()
        _require(sizes, "config has neither head_dim nor hidden_size and num_attention_heads")
        head_dim, *divisors = (arguments.whole("from_config", f"config's {x}", _get(config, x), 1) for x in sizes)
        head_dim //= math.prod(divisors)
    head_dim = arguments.whole("from_config", "head_dim", head_dim, 2)
    return head_dim if rope_type == "proportional" else int(head_dim * partial)
