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

# The modules whose configuration, as an object, is refused, by a part of the message. Odd sizes are the defaults'.
REFUSALS = {
    "use_rotary_embedding is unknown": "ClvpRotaryPositionalEmbedding",
    "has no rope_theta": "CodeGenRotaryEmbedding GPTJRotaryEmbedding",
    "fractions of an image": "DINOv3ViTRopePositionEmbedding EomtDinov3RotaryEmbedding Sapiens2RopePositionEmbedding",
    "efficientloftr": "EfficientLoFTRRotaryEmbedding",
    "spatial_rope_base_frequency is unknown": "EsmFold2RotaryEmbedding",
    "each half of a head": "Gemma4VisionRotaryEmbedding",
    "rotary_dim is 21; it must be even": "Glm4MoeRotaryEmbedding Glm4vMoeTextRotaryEmbedding",
    "take different axes": "HunYuanVLRotaryEmbedding",
    "with equal frequencies": "Kimi_K25VisionRotaryEmbedding",
    "llama4_vision_model": "Llama4VisionRotaryEmbedding",
    "learned": "MistralLarge4TextRotaryEmbedding",
    "seconds": "MusicFlamingoRotaryEmbedding",
    "rotary_dim is 73; it must be even": "Qwen3OmniMoeRotaryEmbedding Qwen3OmniMoeTalkerRotaryEmbedding "
    "Qwen3OmniMoeThinkerTextRotaryEmbedding",
    "rotary_embedding_base is unknown": "SeamlessM4TConformerRotaryPositionalEmbedding "
    "Wav2Vec2BertRotaryPositionalEmbedding Wav2Vec2ConformerRotaryPositionalEmbedding",
}
REFUSED = {name: text for text, names in REFUSALS.items() for name in names.split()}
# Changes of defaults with which the module cannot compute a table.
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [16, 24, 24]}
_EACH = {"full_attention": _SECTIONS, "sliding_attention": _SECTIONS}
_OWN = {"Glm4vText": _SECTIONS, "GlmImageText": _SECTIONS, "CohereCompass": _EACH}
CHANGED = {f"{name}RotaryEmbedding": {"rope_parameters": parameters} for name, parameters in _OWN.items()}
# Names that a file may leave out, because its class has defaults for them.
LEFT_OUT = ("rope_parameters", "head_dim", "partial_rotary_factor", "pos_embed_rescale", "per_layer_config")
TOKENS = 7


def modules() -> Iterator[tuple[type, Any, Any]]:
    """Each class of a rotary module, a configuration that it takes, and the module; or the class alone.

    The configuration is what the module's argument names, or the first of its file that works.
    """
    transformers = pytest.importorskip("transformers", reason="its modules are what is compared with")
    for path in sorted(Path(transformers.__path__[0], "models").glob("*/modeling_*.py")):
        if "inv_freq" not in (source := path.read_text()) and "Rotary" not in source:
            continue
        name = f"transformers.models.{path.parent.name}.{path.stem}"
        configurations = importlib.import_module(name.replace("modeling_", "configuration_", 1))
        others = [x for x in vars(configurations).values() if isinstance(x, type) and hasattr(x, "model_type")]
        others = [x for x in others if x.__module__.startswith("transformers.models")]
        for found in [*vars(importlib.import_module(name)).values()]:
            if not isinstance(found, type) or found.__module__ != name:
                continue
            if "Rotary" not in found.__name__ and "RopePosition" not in found.__name__:
                continue
            named = next(iter(inspect.signature(found).parameters.values())).annotation
            is_named = hasattr(named, "model_type") and named.__module__.startswith("transformers.models")
            made: tuple[Any, Any] = (None, None)
            for each in [*([named] if is_named else []), *others]:
                with suppress(AttributeError, KeyError, TypeError, ValueError):  # it is of another part of the model
                    config = each(**copy.deepcopy(CHANGED.get(found.__name__, {})))
                    made = (config, found(config))
                    break
            yield found, *made


def of_pairs(module: Any, config: Any, layer_type: str | None, ids: torch.Tensor, pairs: int) -> torch.Tensor:
    """The module's cosines and sines for pairs, (2, tokens, pairs). ids: (axes, tokens)."""
    words = {} if layer_type is None else {"layer_type": layer_type}
    axial = (getattr(config, "rope_parameters", None) or {}).get("rope_type") == "axial"
    position_ids = ids if len(ids) == 1 else ids.T if axial else ids[:, None]
    got = module(torch.empty(1, TOKENS, 8), position_ids, **words)
    got = torch.stack([got.real, got.imag] if isinstance(got, torch.Tensor) else list(got))
    got = got.detach().reshape(2, TOKENS, -1)
    if got.shape[-1] != 2 * pairs:
        return got
    halves, neighbours = got.unflatten(-1, (2, pairs)).unbind(-2), got.unflatten(-1, (pairs, 2)).unbind(-1)
    same = [both[0] for both in (halves, neighbours) if torch.equal(*both)]
    assert same, "the two elements of a pair differ"
    return same[0]


def check(module: Any, config: Any, layer_type: str | None) -> None:
    """Compare every cosine and sine, with other positions along each axis."""
    inv_freq, factor = tables.from_config(config, layer_type=layer_type)
    sections, name = getattr(module, "mrope_section", None), type(module).__name__
    sections = sections[layer_type] if isinstance(sections, dict) else sections
    count = len(sections or [0])
    if (getattr(config, "rope_parameters", None) or {}).get("rope_type") == "axial":
        count = 3 if "MiniMaxM3" in name else 2
    count = 2 if name == "NeoMMERotaryEmbedding" else count
    ids = torch.randint(1, 60, (count, TOKENS), generator=torch.Generator().manual_seed(0))
    axes = [0] * len(inv_freq)
    for axis in range(count if count > 1 else 0):
        alone = torch.zeros_like(ids)
        alone[axis] = 1
        sines = of_pairs(module, config, layer_type, alone, len(inv_freq))[1, 0]
        for pair in sines.nonzero().flatten().tolist():
            axes[pair] = axis
    table = tables.cos_sin(60, inv_freq, attention_factor=factor, angles="fp32")
    rows = ids[axes].T  # (tokens, pairs)
    want = torch.stack([x.gather(0, rows) for x in table])
    torch.testing.assert_close(of_pairs(module, config, layer_type, ids, len(inv_freq)), want, rtol=0, atol=2e-7)


@pytest.mark.slow
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


RAMP = {"beta_fast": 32, "beta_slow": 1}
V3 = {"type": "yarn", "factor": 40, **RAMP, "mscale": 1.0, "mscale_all_dim": 1.0}
V4 = {"type": "yarn", "factor": 16, **RAMP, "original_max_position_embeddings": 65536}
OLMO = {"rope_type": "yarn", "factor": 8.0, **RAMP, "original_max_position_embeddings": 8192}
ALPHA = {"type": "dynamic", "alpha": 1000.0, **RAMP, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
LATENT, BOTH = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64}, ("full_attention", "sliding_attention")
# Published files, whose names are older than transformers 5: the layers' types, the width, heads and length, and more.
FILES: dict[str, tuple[tuple[str | None, ...], tuple[int, ...], dict[str, Any]]] = {
    "hunyuan_v1_dense.HunYuanDenseV1": ((None,), (4096, 32, 262144), {
        "head_dim": 128, "rope_theta": 10000.0, "rope_scaling": ALPHA}),
    "deepseek_v3.DeepseekV3": ((None,), (7168, 128, 163840), {
        **LATENT, "rope_theta": 10000, "rope_scaling": {**V3, "original_max_position_embeddings": 4096}}),
    "deepseek_v4.DeepseekV4": (("main", "compress"), (4096, 64, 1048576), {
        "model_type": "deepseek_v4", "head_dim": 512, "qk_rope_head_dim": 64, "rope_theta": 10000,
        "compress_rope_theta": 160000, "rope_scaling": V4}),
    "gemma3.Gemma3Text": (BOTH, (2560, 8, 131072), {
        "model_type": "gemma3_text", "head_dim": 256, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
        "sliding_window_pattern": 6, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}),
    "bailing_hybrid.BailingHybrid": ((None,), (4096, 32, 131072), {
        **LATENT, "rope_theta": 600000.0, "partial_rotary_factor": 0.5}),
    "modernbert.ModernBert": (BOTH, (768, 12, 8192), {
        "model_type": "modernbert", "global_rope_theta": 160000.0, "local_rope_theta": 10000.0,
        "rope_theta": 160000.0}),
    "olmo3.Olmo3": (BOTH, (4096, 32, 65536), {"model_type": "olmo3", "rope_theta": 500000, "rope_scaling": OLMO}),
    "cohere2_moe.Cohere2Moe": ((None,), (), {  # its module does not read rope_scaling
        "model_type": "cohere2_moe", "rope_theta": 50000, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_published_file_has_the_frequencies_of_its_module(name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="its modules are what is compared with")
    layer_types, sizes, more = FILES[name]
    file = {**dict(zip(("hidden_size", "num_attention_heads", "max_position_embeddings"), sizes)), **more}
    folder, prefix = name.split(".")
    library = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    config = getattr(transformers, f"{prefix}Config")(**copy.deepcopy(file))
    module = getattr(library, f"{prefix.removesuffix('Text')}RotaryEmbedding")(config)
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
