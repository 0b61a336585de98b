"""The models of `bench hosts`, each twice with the same weights: as its library makes it, and with jitrope enabled.

Real widths, random bf16 weights and a few of the layers. `enable` replaces functions for all models, so transformers'
stock model comes from a second import of its file, and timm's stock model keeps copies of the functions.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import diffusion
from .harness import DEVICE, angles, bf16, twice
from .turns import Turns

COUNTS = ("jitrope", "fused", "host")
"""The keys of a report's calls: rope, rope with norms, and left to the host."""


class Side(NamedTuple):
    """A model and the arguments of its forward."""

    model: nn.Module
    words: dict[str, Any]


class Pair(NamedTuple):
    """A model twice. trained: a step is forward and backward. calls: jitrope's so far, by kind.

    version: what follows the library's name in a row, where its module has no version.
    """

    stock: Side
    ours: Side
    calls: Callable[[], Mapping[str, int]]
    trained: bool = True
    compile_mode: str = "default"
    version: str = ""


class Host(NamedTuple):
    """A model of a library. package: the library's module. make: the pair, on real widths or tiny."""

    package: str
    model: str
    step: str
    make: Callable[[bool], AbstractContextManager[Pair]]


def counts(report: Any, fused: bool) -> dict[str, int]:
    """The calls so far of a report that does not tell those with norms. fused: all have them."""
    return {"fused" if fused else "jitrope": report.calls["jitrope"], "host": report.calls["host"]}


def need_gpu() -> None:
    """Raise ImportError, by which a host is left out, without a GPU."""
    if DEVICE != "cuda":
        raise ImportError("its kernels need a GPU")


def random_weights(model: nn.Module) -> None:
    """bf16 parameters, with those of norms near 1; buffers keep their dtypes."""
    for name, x in model.named_parameters():
        of_norm = x.dim() == 1 and not name.endswith("bias")
        x.data = 1 + 0.1 * bf16(*x.shape) if of_norm else 0.02 * bf16(*x.shape)


def share(model: nn.Module, weights_of: nn.Module) -> None:
    """Give a model the parameters of another one."""
    for x, y in zip(model.parameters(), weights_of.parameters(), strict=True):
        x.data = y.data


def keeping(cls: Any, method: str = "forward", **functions: Any) -> Any:
    """A class like cls with a method that keeps these functions, whatever replaces them in its module."""
    from jitrope.integrations._host import with_code

    found = getattr(cls, method)
    return type(cls.__name__, (cls,), {method: with_code(found, found.__code__, **functions)})


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist: Any = torch.distributed
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


# ---- transformers --------------------------------------------------------------------------------------


@contextmanager
def second_import(name: str) -> Iterator[Any]:
    """A module with functions and classes of its own, from the file of a model."""
    spec: Any = importlib.util.find_spec(name)
    copied: Any = importlib.util.spec_from_file_location(f"{name}_stock", spec.origin)
    module = importlib.util.module_from_spec(copied)
    sys.modules[copied.name] = module  # dataclasses look here for it
    try:
        copied.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[copied.name]


@contextmanager
def transformers_pair(
    family: str,
    cls: str,
    config: Mapping[str, Any],
    tiny: Mapping[str, Any],
    words: Callable[[nn.Module, bool], dict[str, Any]],
    smoke: bool,
    trained: bool = False,
    compile_mode: str = "default",
) -> Iterator[Pair]:
    """A model class of a family. words: the arguments of a step of a model."""
    from jitrope.integrations import transformers as integration

    name = f"transformers.models.{family}.modeling_{family}"
    configs = importlib.import_module(name.replace("modeling", "configuration"))
    made = getattr(configs, cls.removesuffix("Model") + "Config")(**{**config, **(tiny if smoke else {})})
    made._attn_implementation = "sdpa"
    with second_import(name) as file:
        torch.manual_seed(0)
        with torch.device(DEVICE):
            stock, ours = (getattr(of, cls)(made).eval() for of in (file, importlib.import_module(name)))
        random_weights(stock)
        for module in stock.modules():
            if getattr(module, "scaling", 0) == 1 and hasattr(module, "q_norm"):  # its trained weight has the scale
                module.q_norm.weight.data *= module.head_dim**-0.5
        share(ours, stock)

        def side(model: nn.Module) -> Side:
            torch.manual_seed(1)
            return Side(model, words(model, smoke))

        with integration.enable(ours) as report:
            yield Pair(side(stock), side(ours), lambda: report.calls, trained, compile_mode)


def train_words(model: Any, smoke: bool) -> dict[str, Any]:
    """Embeddings of 4096 tokens."""
    return {"inputs_embeds": bf16(1, 6 if smoke else 4096, model.config.hidden_size).requires_grad_()}


@torch.no_grad()
def decode_words(model: Any, smoke: bool) -> dict[str, Any]:
    """Embeddings of one token in each of 8 sequences, with a cache of 1024 earlier ones and place for as many."""
    from transformers import StaticCache

    batch, length = (2, 8) if smoke else (8, 1024)
    cache = StaticCache(config=model.config, max_cache_len=length + 1024)
    known = inspect.signature(type(model).forward).parameters
    words = {"cache" if "cache" in known else "past_key_values": cache, "use_cache": True}
    model(inputs_embeds=bf16(batch, length, model.config.hidden_size), **words)
    return {"inputs_embeds": bf16(batch, 1, model.config.hidden_size), **words}


def tower_words(model: Any, smoke: bool) -> dict[str, Any]:
    """The patches of a picture of 1024 x 1024 pixels."""
    config, side = model.config, 4 if smoke else 64
    size = config.in_channels * config.temporal_patch_size * config.patch_size**2
    grid = torch.tensor([[1, side, side]], device=DEVICE)
    return {"hidden_states": bf16(side * side, size), "grid_thw": grid}


_SMALL = {"hidden_size": 32, "intermediate_size": 48}
LM_TINY = {**_SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
QWEN3 = {
    "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "num_hidden_layers": 2, "vocab_size": 8,
}  # fmt: skip
GEMMA4 = {  # the widths are the configuration's defaults
    "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "vocab_size": 8,
    "hidden_size_per_layer_input": 0,
}  # fmt: skip
TOWER = {"depth": 4, "deepstack_visual_indexes": ()}
TOWER_TINY = {**_SMALL, "num_heads": 2, "out_hidden_size": 32, "num_position_embeddings": 16}
_qwen3 = partial(transformers_pair, "qwen3", "Qwen3Model", QWEN3, LM_TINY)
_gemma4 = partial(transformers_pair, "gemma4", "Gemma4TextModel", GEMMA4, {**LM_TINY, "global_head_dim": 32})
_tower = partial(transformers_pair, "qwen3_vl", "Qwen3VLVisionModel", TOWER, TOWER_TINY)


# ---- other libraries -----------------------------------------------------------------------------------


@contextmanager
def diffusers_pair(name: str, smoke: bool) -> Iterator[Pair]:
    """A model of `bench diffusion`, which has more of them and more variants."""
    from jitrope.integrations import diffusers as integration

    model = diffusion.MODELS[name]
    transformer, words, _ = diffusion.build(model, tuple(1 for _ in model.blocks) if smoke else model.blocks, smoke)
    words["return_dict"] = False
    ours = diffusion.sharing(transformer)
    with Turns() as turns:
        turns.take(transformer)
        report = turns.take(ours, partial(integration.enable, ours))
        yield Pair(Side(transformer, words), Side(ours, words), lambda: report.calls, trained=False)


class Chain(nn.Module):
    """Layers in turn, with the same further arguments."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, **words: Any) -> Tensor:
        """x through all layers; of a layer's tuple its first result."""
        for layer in self.layers:
            out = layer(x, **words)
            x = out[0] if isinstance(out, tuple) else out
        return x


@contextmanager
def torchtitan_pair(family: str, overrides: tuple[str, ...], smoke: bool) -> Iterator[Pair]:
    """Two layers of an 8B model of torchtitan, without and with jitrope's overrides."""
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models.common.attention import ScaledDotProductAttention

    from jitrope.integrations import torchtitan as integration

    configs = getattr(importlib.import_module(f"torchtitan.models.{family}"), f"{family}_configs")
    integration.register()
    models = []
    for given in ([], [f"{integration.__name__}.{name}" for name in overrides]):
        config = configs["debugmodel" if smoke else "8B"](attn_backend="flex")
        config.layers = config.layers[:2]
        for layer in config.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
        apply_overrides(OverrideConfig(imports=given), config)
        with torch.device(DEVICE):
            layers = [layer.build() for layer in config.layers]
            for each in layers:
                each.init_states()
        models.append(Chain(layers))
    stock, ours = models
    random_weights(stock)
    share(ours, stock)
    words = {"x": bf16(1, 6 if smoke else 4096, config.dim).requires_grad_(), "attention_masks": None}
    yield Pair(Side(stock, words), Side(ours, words), lambda: integration.calls)


@contextmanager
def timm_pair(name: str, size: int, smoke: bool) -> Iterator[Pair]:
    """Four blocks of a model, with 8 pictures of `size` x `size` pixels."""
    import timm
    from timm.layers import pos_embed_sincos

    from jitrope.integrations import timm as integration
    from jitrope.integrations._host import with_code

    cat: Any = pos_embed_sincos.apply_rot_embed_cat
    rotate = with_code(cat, cat.__code__, apply_rot_embed=pos_embed_sincos.apply_rot_embed)
    size = 32 if smoke else size
    tiny = {"embed_dim": 64, "num_heads": 2, "depth": 2, "num_classes": 8} if smoke else {"depth": 4}
    with torch.device(DEVICE):
        stock, ours = (timm.create_model(name, img_size=size, global_pool="token", **tiny) for _ in range(2))
    random_weights(stock)
    share(ours, stock)
    kept = keeping(type(stock.blocks[0].attn), apply_rot_embed_cat=rotate)
    for block in stock.blocks:
        block.attn.__class__ = kept
    words = {"x": bf16(1 if smoke else 8, 3, size, size)}
    with integration.enable() as report:
        yield Pair(Side(stock, words), Side(ours, words), lambda: report.calls)


class Sdpa(nn.Module):
    """torch's attention in place of Megatron's own without TransformerEngine, which keeps all scores in memory."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
        """q, k, v (S, B, H, D)."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).permute(2, 0, 1, 3).flatten(2)


@contextmanager
def groups() -> Iterator[None]:
    """Megatron's groups, all of this process alone."""
    from megatron.core import parallel_state

    with one_rank():
        try:
            parallel_state.initialize_model_parallel()
            yield
        finally:
            parallel_state.destroy_model_parallel()


def megatron_spec(te: bool) -> Any:
    """Megatron's plan of a layer, with TransformerEngine's modules, or its own and torch's attention."""
    from megatron.core.models.gpt import gpt_layer_specs

    if te:
        need_gpu()
        importlib.import_module("transformer_engine.pytorch")
        return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=True)
    spec: Any = gpt_layer_specs.get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = Sdpa
    return spec


def attention_with_rope_of_te() -> Any:
    """Megatron's class of attention, which keeps TransformerEngine's fused rope, whatever replaces it."""
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer.attention import SelfAttention

    from jitrope.integrations._host import with_code

    rope: Any = rope_utils.apply_rotary_pos_emb
    rope = with_code(rope, rope.__code__, fused_apply_rotary_pos_emb=rope_utils.fused_apply_rotary_pos_emb)
    return keeping(SelfAttention, apply_rotary_pos_emb=rope)


@contextmanager
def megatron_pair(te: bool, smoke: bool) -> Iterator[Pair]:
    """Two layers as large as Qwen3-8B's, of Megatron-core with or without TransformerEngine."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    from jitrope.integrations import megatron as integration

    sizes = dict(zip(("hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
                     (32, 48, 4, 2, 16) if smoke else (4096, 12288, 32, 8, 128)))  # fmt: skip
    words: dict[str, Any] = {"use_cpu_initialization": True, "bf16": True, "params_dtype": torch.bfloat16}
    words |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "bias_dropout_fusion": False, "add_bias_linear": False}
    words |= {"normalization": "RMSNorm", "qk_layernorm": True, "gated_linear_unit": True, "activation_func": F.silu}
    spec = megatron_spec(te)
    kept: Any = attention_with_rope_of_te() if te else None
    with groups(), integration.enable() as report:
        if te:
            model_parallel_cuda_manual_seed(0)
        stock, ours = (
            Chain([build_module(spec, config=config, layer_number=1 + i).to(DEVICE) for i in range(2)])
            for config in (TransformerConfig(num_layers=2, apply_rope_fusion=on, **sizes, **words) for on in (te, True))
        )
        random_weights(stock)
        share(ours, stock)
        for layer in stock.layers if te else ():
            layer.self_attention.__class__ = kept
        length = 6 if smoke else 4096
        freqs = twice(angles(length, sizes["kv_channels"])).float()[:, None, None]
        x = bf16(length, 1, sizes["hidden_size"]).requires_grad_()
        given = {"x": x, "attention_mask": None, "rotary_pos_emb": freqs}
        yield Pair(Side(stock, given), Side(ours, given), lambda: report.calls)


HOSTS = {
    "qwen3-train": Host(
        "transformers", "Qwen3-8B", "train, 4096 tokens, 2 layers", partial(_qwen3, train_words, trained=True)
    ),
    "qwen3-decode": Host(
        "transformers", "Qwen3-8B", "decode, 8 sequences, 2 layers",
        partial(_qwen3, decode_words, compile_mode="reduce-overhead"),
    ),
    "gemma4-train": Host(
        "transformers", "Gemma 4", "train, 4096 tokens, 2 layers", partial(_gemma4, train_words, trained=True)
    ),
    "qwen3-vl-tower": Host(
        "transformers", "Qwen3-VL's tower", "forward, 4096 patches, 4 blocks", partial(_tower, tower_words)
    ),
    "flux": Host("diffusers", "FLUX.1", "denoise, 4608 tokens, 12 blocks", partial(diffusers_pair, "flux")),
    "llama3-train": Host(
        "torchtitan", "Llama 3 8B", "train, 4096 tokens, 2 layers",
        partial(torchtitan_pair, "llama3", ("cos_sin_rope", "complex_rope")),
    ),
    "qwen3-titan-train": Host(
        "torchtitan", "Qwen3-8B", "train, 4096 tokens, 2 layers", partial(torchtitan_pair, "qwen3", ("attention",))
    ),
    "megatron-train": Host("megatron.core", "Qwen3-8B", "train, 4096 tokens, 2 layers", partial(megatron_pair, False)),
    "dinov3-train": Host(
        "timm", "DINOv3 ViT-L", "train, 8 pictures of 1024 patches, 4 blocks",
        partial(timm_pair, "vit_large_patch16_dinov3", 512),
    ),
    "rope-mixed-train": Host(
        "timm", "RoPE-ViT-B (learned)", "train, 8 pictures of 1024 patches, 4 blocks",
        partial(timm_pair, "vit_base_patch16_rope_mixed_224", 512),
    ),
}  # fmt: skip
