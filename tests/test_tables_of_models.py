"""Every rotary module of transformers, built from its default configuration, against the table of that configuration.

A table is right, or the configuration is refused. None is wrong.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import itertools
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from jitrope import InvalidInput, tables

REFUSED = {
    "ClvpRotaryPositionalEmbedding": "use_rotary_embedding is unknown",
    "CodeGenRotaryEmbedding": "has no rope_theta",
    "DINOv3ViTRopePositionEmbedding": "fractions of an image",
    "EfficientLoFTRRotaryEmbedding": "efficientloftr",
    "EomtDinov3RotaryEmbedding": "fractions of an image",
    "Ernie4_5_VLMoeTextRotaryEmbedding": "take turns from pair to pair, and time",
    "EsmFold2RotaryEmbedding": "spatial_rope_base_frequency is unknown",
    "GPTJRotaryEmbedding": "has no rope_theta",
    "Gemma4VisionRotaryEmbedding": "each half of a head",
    "Glm4MoeRotaryEmbedding": "rotary_dim is 21; it must be even",
    "Glm4vMoeTextRotaryEmbedding": "rotary_dim is 21; it must be even",
    "HunYuanVLRotaryEmbedding": "take different axes",
    "Kimi_K25VisionRotaryEmbedding": "with equal frequencies",
    "Llama4VisionRotaryEmbedding": "llama4_vision_model",
    "MistralLarge4TextRotaryEmbedding": "learned",
    "MusicFlamingoRotaryEmbedding": "seconds",
    "Qwen3OmniMoeRotaryEmbedding": "rotary_dim is 73; it must be even",
    "Qwen3OmniMoeTalkerRotaryEmbedding": "rotary_dim is 73; it must be even",
    "Qwen3OmniMoeThinkerTextRotaryEmbedding": "rotary_dim is 73; it must be even",
    "Sapiens2RopePositionEmbedding": "fractions of an image",
    "SeamlessM4TConformerRotaryPositionalEmbedding": "rotary_embedding_base is unknown",
    "Wav2Vec2BertRotaryPositionalEmbedding": "rotary_embedding_base is unknown",
    "Wav2Vec2ConformerRotaryPositionalEmbedding": "rotary_embedding_base is unknown",
}
"""The modules whose configuration, as an object, is refused, and a part of the message. Odd sizes are the defaults'."""

_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [16, 24, 24]}
CHANGED = {
    "Glm4vTextRotaryEmbedding": {"rope_parameters": _SECTIONS},
    "GlmImageTextRotaryEmbedding": {"rope_parameters": _SECTIONS},
    "CohereCompassRotaryEmbedding": {"rope_parameters": {"full_attention": _SECTIONS, "sliding_attention": _SECTIONS}},
}
"""Changes of defaults with which the module cannot compute a table."""

LEFT_OUT = ("rope_parameters", "head_dim", "partial_rotary_factor", "pos_embed_rescale", "per_layer_config")
"""Names that a file may leave out, because its class has defaults for them."""

TOKENS = 7


def modules() -> Iterator[tuple[type, Any, Any]]:
    """Each class of a rotary module, a configuration that it takes, and the module; or the class alone."""
    transformers = pytest.importorskip("transformers", reason="its modules are what is compared with")
    for path in sorted(Path(transformers.__path__[0], "models").glob("*/modeling_*.py")):
        if "inv_freq" not in (source := path.read_text()) and "Rotary" not in source:
            continue
        library = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
        for name, found in vars(library).items():
            is_class = isinstance(found, type) and found.__module__ == library.__name__
            if is_class and ("Rotary" in name or "RopePosition" in name):
                yield found, *built(found, library)


def built(module: type, library: Any) -> tuple[Any, Any]:
    """The configuration that the module's argument names, or the first of its file that works."""
    words = CHANGED.get(module.__name__, {})
    argument = next(iter(inspect.signature(module).parameters.values()))
    named = argument.annotation if isinstance(argument.annotation, type) else None
    configurations = importlib.import_module(library.__name__.replace("modeling_", "configuration_", 1))
    others = [x for x in vars(configurations).values() if isinstance(x, type) and hasattr(x, "model_type")]
    for each in ([named] if hasattr(named, "model_type") else []) + others:
        if each.__module__.startswith("transformers.models"):
            try:
                return (config := each(**copy.deepcopy(words))), module(config)
            except (AttributeError, KeyError, TypeError, ValueError):  # a configuration of another part of the model
                pass
    return None, None


def of_module(module: Any, config: Any, layer_type: str | None, ids: torch.Tensor, axial: bool) -> Any:
    """The module's cosines and sines for pairs, (tokens, pairs) each. ids: (axes, tokens)."""
    words = {} if layer_type is None else {"layer_type": layer_type}
    position_ids = ids if len(ids) == 1 else ids.T if axial else ids[:, None]
    got = module(torch.empty(1, TOKENS, 8), position_ids, **words)
    got = torch.stack([got.real, got.imag] if isinstance(got, torch.Tensor) else list(got))
    return got.detach().reshape(2, TOKENS, -1)


def by_pairs(got: torch.Tensor, pairs: int) -> torch.Tensor:
    if got.shape[-1] == 2 * pairs:
        halves, neighbours = got.unflatten(-1, (2, pairs)), got.unflatten(-1, (pairs, 2))
        for both in (halves.unbind(-2), neighbours.unbind(-1)):
            if torch.equal(*both):
                return both[0]
        raise AssertionError("the two elements of a pair differ")
    return got


def is_for_mrope(axes: list[int], count: int) -> bool:
    """Whether `Mrope` can say which axis each pair takes, with the axes in some order."""
    runs = [axis for axis, _ in itertools.groupby(axes)]
    if len(runs) == len(set(runs)):
        return True
    for order in itertools.permutations(range(count)):
        said = [order[0]] * len(axes)
        for place, axis in enumerate(order[1:], 1):
            taken = range(place, len(axes), count)[: axes.count(axis)]
            for pair in taken:
                said[pair] = axis
        if said == axes:
            return True
    return False


def check(module: Any, config: Any, layer_type: str | None) -> None:
    """Compare every cosine and sine, with other positions along each axis."""
    inv_freq, factor = tables.from_config(config, layer_type=layer_type)
    parameters = getattr(config, "rope_parameters", None) or {}
    axial = parameters.get("rope_type") == "axial"
    sections = getattr(module, "mrope_section", None)
    sections = sections[layer_type] if isinstance(sections, dict) else sections
    count = (3 if "MiniMaxM3" in type(module).__name__ else 2) if axial else len(sections or [0])
    if type(module).__name__ == "NeoMMERotaryEmbedding":
        count = 2
    ids = torch.randint(1, 60, (count, TOKENS), generator=torch.Generator().manual_seed(0))
    axes = [0] * len(inv_freq)
    for axis in range(count if count > 1 else 0):
        alone = torch.zeros_like(ids)
        alone[axis] = 1
        sines = by_pairs(of_module(module, config, layer_type, alone, axial), len(inv_freq))[1, 0]
        for pair in sines.nonzero().flatten().tolist():
            axes[pair] = axis
    assert is_for_mrope(axes, count), axes
    table = tables.cos_sin(60, inv_freq, attention_factor=factor, angles="fp32")
    rows = ids[axes].T  # (tokens, pairs)
    want = torch.stack([x.gather(0, rows) for x in table])
    got = by_pairs(of_module(module, config, layer_type, ids, axial), len(inv_freq))
    torch.testing.assert_close(got, want, rtol=0, atol=2e-7)


def test_tables_of_every_model_are_right_or_refused() -> None:
    right, refused, wrong = [], {}, {}
    for module_class, config, module in modules():
        name = module_class.__name__
        assert module is not None, f"{name}: no configuration of its file builds it; see CHANGED"
        named = [n for n, _ in module.named_buffers() if n.endswith("_inv_freq") and "original" not in n]
        for layer_type in [n.removesuffix("_inv_freq") for n in named] or [None]:
            try:
                check(module, config, layer_type)
                right.append((name, layer_type))
            except InvalidInput as error:
                refused[name] = str(error)
            except Exception as error:  # whatever it is, it is not right
                wrong[name, layer_type] = repr(error)
            short = {"rope_theta": 3e4, **{x: value for x, value in config.to_dict().items() if x not in LEFT_OUT}}
            files = (config.to_dict(), json.loads(config.to_json_string()), short)
            for file, layer in itertools.product(files, {layer_type, None}):
                with suppress(InvalidInput):
                    found, same = tables.from_config(file, layer_type=layer)[0], False
                    with suppress(Exception):  # its class may refuse it
                        whole = type(config).from_dict(copy.deepcopy(file)) if file is short else config
                        same = torch.equal(found, tables.from_config(whole, layer_type=layer)[0])
                    if not same:
                        wrong[name, layer, "as a file", len(file)] = tuple(found.shape)
    print(f"\n{len(right)} right, {len(refused)} refused, {len(wrong)} wrong")
    assert not wrong
    assert {name: message for name, message in refused.items() if REFUSED.get(name, "no row") not in message} == {}
    assert len(right) > 200


YARN = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}
ALPHA = {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
FILES: dict[str, tuple[str, tuple[str | None, ...], dict[str, Any]]] = {
    "hunyuan_v1_dense.HunYuanDenseV1": ("HunYuanDenseV1Config", (None,), {
        "hidden_size": 4096, "num_attention_heads": 32, "head_dim": 128, "max_position_embeddings": 262144,
        "rope_theta": 10000.0, "rope_scaling": {**ALPHA, "type": "dynamic"},
    }),
    "deepseek_v4.DeepseekV4": ("DeepseekV4Config", ("main", "compress"), {
        "model_type": "deepseek_v4", "hidden_size": 4096, "num_attention_heads": 64, "head_dim": 512,
        "qk_rope_head_dim": 64, "max_position_embeddings": 1048576, "rope_theta": 10000,
        "compress_rope_theta": 160000, "rope_scaling": YARN,
    }),
    "gemma3.Gemma3": ("Gemma3TextConfig", ("full_attention", "sliding_attention"), {
        "model_type": "gemma3_text", "hidden_size": 2560, "num_attention_heads": 8, "head_dim": 256,
        "max_position_embeddings": 131072, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
        "sliding_window_pattern": 6, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }),
    "bailing_hybrid.BailingHybrid": ("BailingHybridConfig", (None,), {
        "hidden_size": 4096, "num_attention_heads": 32, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
        "max_position_embeddings": 131072, "rope_theta": 600000.0, "partial_rotary_factor": 0.5,
    }),
    "modernbert.ModernBert": ("ModernBertConfig", ("full_attention", "sliding_attention"), {
        "model_type": "modernbert", "hidden_size": 768, "num_attention_heads": 12,
        "global_rope_theta": 160000.0, "local_rope_theta": 10000.0,
        "max_position_embeddings": 8192, "rope_theta": 160000.0,
    }),
    "olmo3.Olmo3": ("Olmo3Config", ("full_attention", "sliding_attention"), {
        "model_type": "olmo3", "hidden_size": 4096, "num_attention_heads": 32, "max_position_embeddings": 65536,
        "rope_theta": 500000, "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "beta_fast": 32, "beta_slow": 1,
                                               "original_max_position_embeddings": 8192},
    }),
    "cohere2_moe.Cohere2Moe": ("Cohere2MoeConfig", (None,), {  # its module does not read rope_scaling
        "model_type": "cohere2_moe", "rope_theta": 50000, "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    }),
}  # fmt: skip
"""Published files, whose names are older than transformers 5."""


@pytest.mark.parametrize("name", FILES)
def test_a_published_file_has_the_frequencies_of_its_module(name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="its modules are what is compared with")
    config_class, layer_types, file = FILES[name]
    folder, prefix = name.split(".")
    library = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    config = getattr(transformers, config_class)(**copy.deepcopy(file))
    module = getattr(library, f"{prefix}RotaryEmbedding")(config)
    as_published = copy.deepcopy(file)
    for layer_type in layer_types:
        start = f"{layer_type}_" if layer_type else ""
        want = getattr(module, f"{start}inv_freq"), getattr(module, f"{start}attention_scaling")
        for each in (file, config, config.to_dict()):
            inv_freq, factor = tables.from_config(each, layer_type=layer_type)
            assert torch.equal(inv_freq, want[0])
            assert factor == want[1]
    assert file == as_published
    if layer_types != (None,):
        with pytest.raises(InvalidInput, match=r"layer_type is None; it must be one of '.*', '"):
            tables.from_config(file)
