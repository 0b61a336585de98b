"""The models of `bench hosts`: each is made as its library makes it, and stays so or has jitrope enabled.

Real widths, random bf16 weights and a few of the layers. Each side is made in a process of its own from the same seeds.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import diffusion
from .harness import DEVICE, angles, bf16, twice

COUNTS = ("jitrope", "fused", "host")
"""The keys of a report's calls: rope, rope with norms, and left to the host."""


class Side(NamedTuple):
    """A model and the arguments of its forward, stock or with jitrope.

    calls: jitrope's so far, by kind. trained: a step is forward and backward. version: what follows the library's name
    in a row, where its module has no version.
    """

    model: nn.Module
    words: dict[str, Any]
    calls: Callable[[], Mapping[str, int]]
    trained: bool = True
    compile_mode: str = "default"
    version: str = ""


class Host(NamedTuple):
    """A model of a library. package: the library's module. make: of (with jitrope, tiny), a side.

    compiled: jitrope has a part in its step under torch.compile.
    """

    package: str
    model: str
    step: str
    make: Callable[[bool, bool], AbstractContextManager[Side]]
    compiled: bool = True


@contextmanager
def enabled(host: str, on: bool, *models: nn.Module) -> Iterator[Callable[[], Mapping[str, int]]]:
    """jitrope's drop-in for a host, if `on`; the calls so far."""
    if not on:
        yield dict
        return
    with importlib.import_module(f"jitrope.integrations.{host}").enable(*models) as report:
        yield lambda: report.calls


def need_gpu() -> None:
    """Raise ImportError, by which a host is left out, without a GPU."""
    if DEVICE != "cuda":
        raise ImportError("its kernels need a GPU")


def random_weights(model: nn.Module) -> None:
    """bf16 parameters, with those of norms near 1, the same in each process; buffers keep their dtypes."""
    torch.manual_seed(0)
    for name, x in model.named_parameters():
        of_norm = x.dim() == 1 and not name.endswith("bias")
        x.data = 1 + 0.1 * bf16(*x.shape) if of_norm else 0.02 * bf16(*x.shape)


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
def transformers_side(
    family: str,
    cls: str,
    config: Mapping[str, Any],
    tiny: Mapping[str, Any],
    words: Callable[[nn.Module, bool], dict[str, Any]],
    on: bool,
    smoke: bool,
    **more: Any,
) -> Iterator[Side]:
    """A model class of a family. words: the arguments of a step of a model. more: of `Side`."""
    name = f"transformers.models.{family}.modeling_{family}"
    configs = importlib.import_module(name.replace("modeling", "configuration"))
    made = getattr(configs, cls.removesuffix("Model") + "Config")(**{**config, **(tiny if smoke else {})})
    made._attn_implementation = "sdpa"
    with torch.device(DEVICE):
        model = getattr(importlib.import_module(name), cls)(made).eval()
    random_weights(model)
    for module in model.modules():
        if getattr(module, "scaling", 0) == 1 and hasattr(module, "q_norm"):  # its trained weight has the scale
            module.q_norm.weight.data *= module.head_dim**-0.5
    with enabled("transformers", on, model) as calls:
        torch.manual_seed(1)
        yield Side(model, words(model, smoke), calls, **more)


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

    def same_step(*_: Any) -> None:
        for layer in cache.layers:
            layer.cumulative_length.fill_(length)

    model.register_forward_pre_hook(same_step)
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
_qwen3 = partial(transformers_side, "qwen3", "Qwen3Model", QWEN3, LM_TINY)
_gemma4 = partial(transformers_side, "gemma4", "Gemma4TextModel", GEMMA4, {**LM_TINY, "global_head_dim": 32})
_tower = partial(transformers_side, "qwen3_vl", "Qwen3VLVisionModel", TOWER, TOWER_TINY)


# ---- diffusers, and xDiT, which has its own class of FLUX.1 ----------------------------------------------


@contextmanager
def diffusers_side(name: str, on: bool, smoke: bool) -> Iterator[Side]:
    """A model of `bench diffusion`, which has more of them and more variants."""
    model = diffusion.MODELS[name]
    transformer, words, _ = diffusion.build(model, tuple(1 for _ in model.blocks) if smoke else model.blocks, smoke)
    with enabled("diffusers", on, transformer) as calls:
        yield Side(transformer, {**words, "return_dict": False}, calls, trained=False)


@contextmanager
def xfuser_groups() -> Iterator[None]:
    """xDiT's groups, all of this process alone."""
    from xfuser.core.distributed import parallel_state

    backend = "nccl" if DEVICE == "cuda" else "gloo"
    with one_rank():
        parallel_state.init_distributed_environment(1, 0, local_rank=0, backend=backend)
        try:
            parallel_state.initialize_model_parallel(backend=backend)
            yield
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state._FS = None  # which xDiT does not destroy
            parallel_state.destroy_distributed_environment()


@contextmanager
def xfuser_side(on: bool, smoke: bool) -> Iterator[Side]:
    """FLUX.1 as `bench diffusion` builds it, in xDiT's class, on one rank."""
    from xfuser import envs
    from xfuser.config import xFuserArgs
    from xfuser.core.distributed import get_runtime_state, initialize_runtime_state
    from xfuser.model_executor.models.transformers import transformer_flux as xdit

    if envs.get_device_name() != DEVICE:
        need_gpu()
    flux, cls = diffusion.MODELS["flux"], xdit.xFuserFlux1Transformer2DWrapper
    transformer, words, _ = diffusion.build(flux, (1, 1) if smoke else flux.blocks, smoke)
    known = inspect.signature(cls.__init__).parameters
    config = {name: value for name, value in transformer.config.items() if name in known}
    with xfuser_groups(), enabled("xfuser", on) as calls:
        with torch.device("meta"):
            model = cls(**config).eval().requires_grad_(False)
        model.load_state_dict(transformer.state_dict(), assign=True)
        initialize_runtime_state(SimpleNamespace(transformer=model), xFuserArgs().create_config()[0])
        get_runtime_state().max_condition_sequence_length = words["encoder_hidden_states"].shape[1]
        yield Side(model, {**words, "return_dict": False}, calls, trained=False)


# ---- libraries for training ------------------------------------------------------------------------------


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
def torchtitan_side(family: str, on: bool, smoke: bool) -> Iterator[Side]:
    """Two layers of an 8B model of torchtitan; on: with jitrope's override."""
    fsdp: Any = importlib.import_module("torch.distributed.fsdp")
    vars(fsdp).setdefault("DataParallelMeshDims", object)  # torch 2.11 lacks it, and one process does not use it

    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models.common.attention import ScaledDotProductAttention

    from jitrope.integrations import torchtitan as integration

    configs = getattr(importlib.import_module(f"torchtitan.models.{family}"), f"{family}_configs")
    integration.register()
    config = configs["debugmodel" if smoke else "8B"](attn_backend="flex")
    config.layers = config.layers[:2]
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    apply_overrides(OverrideConfig(imports=[f"{integration.__name__}.attention"] if on else []), config)
    with torch.device(DEVICE):
        layers = [layer.build() for layer in config.layers]
        for each in layers:
            each.init_states()
    random_weights(model := Chain(layers))
    words = {"x": bf16(1, 6 if smoke else 4096, config.dim).requires_grad_(), "attention_masks": None}
    yield Side(model, words, lambda: integration.calls)


@contextmanager
def timm_side(name: str, size: int, on: bool, smoke: bool) -> Iterator[Side]:
    """Four blocks of a model, with 8 pictures of `size` x `size` pixels."""
    import timm

    size = 32 if smoke else size
    tiny = {"embed_dim": 64, "num_heads": 2, "depth": 2, "num_classes": 8} if smoke else {"depth": 4}
    with enabled("timm", on) as calls:
        with torch.device(DEVICE):
            model = timm.create_model(name, img_size=size, global_pool="token", **tiny)
        random_weights(model)
        yield Side(model, {"x": bf16(1 if smoke else 8, 3, size, size)}, calls)


class Sdpa(nn.Module):
    """torch's attention in place of Megatron's own without TransformerEngine, which keeps all scores in memory."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
        """q, k, v (S, B, H, D)."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).permute(2, 0, 1, 3).flatten(2)


@contextmanager
def megatron_groups() -> Iterator[None]:
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


def qwen3_words(smoke: bool) -> dict[str, Any]:
    """4096 tokens as wide as Qwen3-8B's, (S, 1, width), and the angles of its heads."""
    tokens, width, head_dim = (8, 64, 16) if smoke else (4096, 4096, 128)
    freqs = twice(angles(tokens, head_dim)).float()[:, None, None]
    return {"x": bf16(tokens, 1, width).requires_grad_(), "rotary_pos_emb": freqs}


@contextmanager
def megatron_side(te: bool, on: bool, smoke: bool) -> Iterator[Side]:
    """Two layers as large as Qwen3-8B's, of Megatron-core with or without TransformerEngine."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    sizes = dict(zip(("hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
                     (64, 96, 4, 2, 16) if smoke else (4096, 12288, 32, 8, 128)))  # fmt: skip
    words: dict[str, Any] = {"use_cpu_initialization": True, "bf16": True, "params_dtype": torch.bfloat16}
    words |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "bias_dropout_fusion": False, "add_bias_linear": False}
    words |= {"normalization": "RMSNorm", "qk_layernorm": True, "gated_linear_unit": True, "activation_func": F.silu}
    spec = megatron_spec(te)
    with megatron_groups(), enabled("megatron", on) as calls:
        if te:
            model_parallel_cuda_manual_seed(0)
        # Stock without TransformerEngine has no fused rope.
        config = TransformerConfig(num_layers=2, apply_rope_fusion=te or on, **sizes, **words)
        layers = [build_module(spec, config=config, layer_number=1 + i).to(DEVICE) for i in range(2)]
        random_weights(model := Chain(layers))
        yield Side(model, {**qwen3_words(smoke), "attention_mask": None}, calls)


@contextmanager
def te_side(before: bool, on: bool, smoke: bool) -> Iterator[Side]:
    """Two layers of TransformerEngine as large as Qwen3-8B's. before: norms of q and k come before rope, as there."""
    need_gpu()
    import transformer_engine
    from transformer_engine.pytorch import TransformerLayer

    width, wide, heads, groups, head_dim = (64, 96, 4, 2, 16) if smoke else (4096, 12288, 32, 8, 128)
    words: dict[str, Any] = {"normalization": "RMSNorm", "activation": "swiglu", "bias": False}
    words |= {"qk_norm_type": "RMSNorm", "qk_norm_before_rope": before, "params_dtype": torch.bfloat16}
    words |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "num_gqa_groups": groups, "kv_channels": head_dim}
    with enabled("transformer_engine", on) as calls:
        model = Chain([TransformerLayer(width, wide, heads, layer_number=1 + i, **words) for i in range(2)])
        random_weights(model)
        yield Side(model, qwen3_words(smoke), calls, version=transformer_engine.__version__)


TRAIN, DENOISE = "train, 4096 tokens, 2 layers", "denoise, 4608 tokens, 12 blocks"
PICTURES = "train, 8 pictures of 1024 patches, 4 blocks"
HOSTS = {
    "qwen3-train": Host("transformers", "Qwen3-8B", TRAIN, partial(_qwen3, train_words)),
    "qwen3-decode": Host(
        "transformers", "Qwen3-8B", "decode, 8 sequences, 2 layers",
        partial(_qwen3, decode_words, trained=False, compile_mode="reduce-overhead"),
    ),
    "gemma4-train": Host("transformers", "Gemma 4", TRAIN, partial(_gemma4, train_words)),
    "qwen3-vl-tower": Host(
        "transformers", "Qwen3-VL's tower", "forward, 4096 patches, 4 blocks",
        partial(_tower, tower_words, trained=False),
    ),
    "flux": Host("diffusers", "FLUX.1", DENOISE, partial(diffusers_side, "flux")),
    "xfuser-flux": Host("xfuser.__version__", "FLUX.1", DENOISE, xfuser_side),
    "llama3-train": Host("torchtitan", "Llama 3 8B", TRAIN, partial(torchtitan_side, "llama3")),
    "qwen3-titan-train": Host("torchtitan", "Qwen3-8B", TRAIN, partial(torchtitan_side, "qwen3")),
    "megatron-train": Host("megatron.core", "Qwen3-8B", TRAIN, partial(megatron_side, False)),
    "megatron-te-train": Host("megatron.core", "Qwen3-8B, TransformerEngine", TRAIN, partial(megatron_side, True)),
    "te-train": Host("transformer_engine.pytorch", "Qwen3-8B", TRAIN, partial(te_side, True)),
    "te-behind-train": Host(
        "transformer_engine.pytorch", "Qwen3-8B, norms behind rope", TRAIN, partial(te_side, False)
    ),
    "dinov3-train": Host("timm", "DINOv3 ViT-L", PICTURES, partial(timm_side, "vit_large_patch16_dinov3", 512), False),
}  # fmt: skip
