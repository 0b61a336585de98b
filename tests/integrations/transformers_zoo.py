"""A tiny random model of every family of transformers with rope, made by shrinking its default configuration.

The sizes of a configuration are found by the names of its attributes; a family that needs others is in `WORDS`.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from jitrope.integrations import transformers as integration

HOST = "pip install 'transformers>=5.17' 'kernels>=0.17.2'"
if os.environ.get("CI"):  # CI has every host
    import transformers
else:
    transformers = pytest.importorskip("transformers", reason=f"the host library is not installed: {HOST}")

from transformers import PreTrainedConfig, PreTrainedModel  # noqa: E402

SIZES = {
    r"(\w+_)?vocab_size(_\w+)?": 64,
    r"((n|out|projection|model|hidden|text|decoder)_)?(embed_dim|embd|dim|hidden_size|embed)": 32,
    r"d_model|width|output_dim": 32,
    r".*(intermediate_size|ffn_dim|mlp_dim|n_inner|mlp_hidden_size|ffn_hidden_size).*|d_ff": 48,
    r"(num_)?(encoder_|decoder_|hidden_|n_)?layers?|depth|n_layer": 2,
    r"(num_|n_|encoder_|decoder_)?(attention_)?heads?": 4,
    r"(\w+_)?(num_)?(global_)?(key_value|kv)_heads|n_kv_heads": 2,
    r"((global|swa|v|attention|index|qk_rope|qk_nope|qk)_)?head_(dim|size)": 8,
    r"(q_|kv_|o_|laurel_)?(lora_)?rank": 16,
    r"(moe_)?(num|n)_(local_|routed_)?experts": 4,
    r"(moe_)?(top_?k|k)|num_experts_per_tok(en)?": 2,
    r"n_group|topk_group|num_expert_groups?|n_groups": 1,
    r"max_(position_embeddings|seq_len|sequence_length)": 64,
}
COMPUTED = {"layer_types", "mlp_layer_types", "no_rope_layers", "indexer_types", "kv_sharing_modes", "per_layer_config"}
INDEXER = dict(zip(("n_heads", "kv_heads", "head_dim", "budget", "compress_ratio"), (2, 1, 8, 4, 2)))
SLIDING = {"layer_types": ["sliding_attention", "full_attention"]}
WORDS: dict[str, dict[str, Any]] = {
    "dots1": {"n_routed_experts": 4, "num_local_experts": 4}, "deepseek_v2": {"num_experts_per_tok": 2},
    "esmfold2": {"head_dim": 32}, "neomme": {"head_dim": 16}, "gptj": {"rotary_dim": 4},
    "idefics": {"qk_layer_norms": True}, "flint": SLIDING, "gemma3n": {"num_kv_shared_layers": 0, **SLIDING},
    "qwen4_exp": {f"indexer_{name}": value for name, value in INDEXER.items()},
}  # fmt: skip
AS_MANY_KV = """axk1 axk2 bailing_hybrid deepseek_v2 deepseek_v3 deepseek_v32 dory dots3_note glm4_moe_lite glm_moe_dsa
hy_v4 kimi_k25 minicpm3 mistral4 mistral_large4 nemotron3_5_transcribe unlimited_ocr youtu esmc"""
ALIKE: dict[str, dict[str, Any]] = {
    AS_MANY_KV: {"num_key_value_heads": 4},
    "cohere glm4_moe sapiens2": {"use_qk_norm": True},
    "stablelm phi": {"qk_layernorm": True},
    "hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl ministral": {"head_dim": 8},
    "lfm2_moe lfm3": {"layer_types": ["conv", "full_attention"]},
    "qwen3_5 qwen3_5_moe qwen3_next qwen4_exp": {"layer_types": ["linear_attention", "full_attention"]},
}
for _families, _words in ALIKE.items():
    for _family in _families.split():
        WORDS[_family] = {**_words, "text_config": _words, **WORDS.get(_family, {})}


def config_of(cls: Any, words: dict[str, Any]) -> Any:
    """A small configuration; `words` have those of its parts too."""
    base, made = cls(), {}
    for name, plain in base.to_dict().items():
        try:
            value = getattr(base, name)
        except Exception:  # some differ between the layers, each with an error of its own
            value = plain
        if isinstance(value, PreTrainedConfig):
            made[name] = config_of(type(value), words.get(name, {}))
        elif name not in COMPUTED and isinstance(value, int) and not isinstance(value, bool):
            plain = 3 + len(name) if name.endswith("_id") and value > 63 else value
            sizes = (min(value, size) for pattern, size in SIZES.items() if re.fullmatch(pattern, name))
            if (size := next(sizes, plain)) != value:
                made[name] = size
    made.update({name: value for name, value in words.items() if not isinstance(made.get(name), PreTrainedConfig)})
    known = inspect.signature(cls.__init__).parameters
    loose = any(p.kind == p.VAR_KEYWORD for p in known.values())
    return cls(**{name: value for name, value in made.items() if loose or name in known})


def modeling(family: str, kind: str = "modeling") -> Any:
    """The file of a family's classes and functions, or of its configurations."""
    return importlib.import_module(f"transformers.models.{family}.{kind}_{family}")


def _own(family: str, kind: str = "modeling") -> list[Any]:
    module = modeling(family, kind)
    return [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__]


def models(family: str) -> list[type]:
    """The model classes of a file, with those first that are likely to be the smallest."""
    found = [c for c in _own(family) if issubclass(c, PreTrainedModel) and c.config_class is not None]
    found = [c for c in found if not c.__name__.endswith("PreTrainedModel")]
    kinds = ("ForCausalLM", "TextModel", "Model")
    return sorted(found, key=lambda c: ([not c.__name__.endswith(kind) for kind in kinds], len(c.__name__)))


def language_model(family: str, dtype: torch.dtype = torch.float32, cls: Any = None, **words: Any) -> nn.Module:
    """A model on the CPU, with random parameters of a size that shows rope. cls: not the smallest one of its file."""
    torch.manual_seed(0)
    cls = cls or models(family)[0]
    config = config_of(cls.config_class, {**WORDS.get(family, {}), **words})
    config._attn_implementation = "eager"
    model = cls(config)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape) * 0.2
    return model.eval().to(dtype)


IDS = torch.tensor([[5, 9, 17, 33, 3, 8, 21, 40], [7, 6, 5, 4, 33, 22, 11, 3]])


def run(model: nn.Module) -> Tensor:
    """The logits or hidden states of a language model, in inference mode."""
    with torch.inference_mode():
        return model(input_ids=IDS)[0]


def attention_modules(family: str) -> dict[str, nn.Module | None]:
    """A module of each attention class by its name: made alone from a configuration, or of a model; or None."""
    needed, found = {cls.__name__: cls for cls in _own(family) if integration._ropes_of(cls)}, {}
    for cls in _own(family, "configuration") if needed else ():
        with suppress(Exception):  # another configuration may fit
            whole = config_of(cls, WORDS.get(family, {}))
            for config in (whole, *(part for part in vars(whole).values() if isinstance(part, PreTrainedConfig))):
                config._attn_implementation = "eager"
                for name in needed.keys() - found.keys():
                    words = list(inspect.signature(needed[name]).parameters)
                    with suppress(Exception):
                        found[name] = needed[name](**{word: 0 if word == "layer_idx" else config for word in words})
    for cls in models(family):
        if needed.keys() <= found.keys():
            break
        with suppress(Exception):  # another model may be made
            of_model = integration._attention(language_model(family, cls=cls))
            found = {**{x.__name__: y[0] for x, y in of_model.items() if x.__name__ in needed}, **found}
    for module in found.values():
        torch.manual_seed(0)
        for parameter in module.parameters():
            parameter.data = torch.randn(parameter.shape) * 0.2
    return dict.fromkeys(needed) | found


def arguments(
    module: nn.Module, width: int, flat: bool, masked: bool, form: str, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Arguments of an attention's forward by their names, with tables of a width.

    form: cos and sin of "all tokens" of 6, or of the "last tokens", which are 4, or a "complex" table.
    """
    generator = torch.Generator().manual_seed(3)
    size = next(m.in_features for m in module.modules() if isinstance(m, nn.Linear))
    tokens = (6,) if flat else (2, 6)
    hidden, other = (torch.randn(*tokens, size, generator=generator).to(dtype) for _ in range(2))
    turned, kind = (4,) if form == "last tokens" else tokens, torch.float32 if form == "complex" else dtype
    cos, sin = (torch.randn(*turned, width, generator=generator).to(kind) for _ in range(2))
    known = {
        "hidden_states": hidden,
        "position_embeddings": torch.complex(cos, sin) if form == "complex" else (cos, sin),
        "encoder_hidden_states": other,
        "cu_seqlens": torch.tensor([0, 6], dtype=torch.int32),
        "shared_kv_states": {},
        "position_ids": torch.arange(6).expand(2, 6),
        "attention_mask": torch.zeros(2, 1, 6, 6, dtype=dtype) if masked else None,
    }
    parameters = inspect.signature(module.forward).parameters.values()
    needed = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    return {p.name: known.get(p.name) for p in needed if p.name in known or p.default is p.empty}


def outcome(module: nn.Module, given: dict[str, Any]) -> dict[str, Tensor]:
    """The result, and the gradients of the parameters."""
    module.zero_grad()
    out = next(x for x in tree_leaves(module(**given)) if isinstance(x, Tensor))
    if out.is_floating_point() and out.requires_grad:
        out.float().square().mean().backward()
    parameters = getattr(module, "_orig_mod", module).named_parameters()  # of a compiled module
    grads = {name: p.grad.clone() for name, p in parameters if p.grad is not None}
    return {"out": out.detach(), **grads}


def check_close(
    ours: dict[str, Tensor], stock: dict[str, Tensor], dtype: torch.dtype = torch.float32, exact: bool = True
) -> None:
    """The results have the same bits, if exact, and gradients are close: sums over tokens are in another order."""
    assert ours.keys() == stock.keys()
    assert not exact or torch.equal(ours["out"], stock["out"])
    for name, want in stock.items():
        bound = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.1, "atol": 0.05}
        bound["atol"] *= float(want.float().abs().max())
        torch.testing.assert_close(ours[name], want, **bound, msg=lambda text: f"{name}: {text}")  # noqa: B023
