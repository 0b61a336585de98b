"""vLLM-Omni's diffusion transformers for `bench hosts`: as its worker runs them, and with jitrope enabled.

Each side has a model of its own, with the same weights. They share the functions of their modules, so a step first puts
its functions there.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from .harness import DEVICE, bf16
from .host_models import Host, Pair, Side, random_weights, share
from .host_serving import Step
from .host_vllm import one_rank

FILES = "vllm_omni.diffusion.models"
ROTARY = "vllm.vllm_flash_attn.layers.rotary"
FUNCTIONS = ("apply_rope_to_qk", "apply_rotary_emb")
"""The functions that a step finds in the file of its model, or in FlashAttention's, and that jitrope replaces."""


class Model(NamedTuple):
    """A transformer. tiny: what a smoke run changes in the configuration. text: tokens of a text.

    words: makes the further arguments of a step, of the configuration, the rows of the picture and the tokens of text.
    """

    file: str
    name: str
    config: Mapping[str, Any]
    tiny: Mapping[str, Any]
    text: int
    words: Callable[[Mapping[str, Any], int, int], dict[str, Any]]


class Denoise(Step):
    """A step of a diffusion model."""

    def compile(self, **words: Any) -> None:
        """Compile each block as vLLM-Omni does, for sizes that may change."""
        from vllm_omni.diffusion.compile import regionally_compile

        regionally_compile(self.model, dynamic=True, **words)


def configuration() -> Any:
    """vLLM's configuration in a worker of vLLM-Omni, with its choice of kernels."""
    from vllm.config import CompilationConfig, DeviceConfig, VllmConfig
    from vllm_omni.platforms import current_omni_platform

    config = VllmConfig(compilation_config=CompilationConfig(), device_config=DeviceConfig(device=DEVICE))
    config.kernel_config.ir_op_priority = current_omni_platform.get_default_ir_op_priority(config)
    return config


@contextmanager
def worker() -> Iterator[Any]:
    """vLLM-Omni's configuration of one rank, in force, with torch's attention."""
    from vllm_omni.diffusion.config import set_current_diffusion_config
    from vllm_omni.diffusion.data import AttentionConfig, OmniDiffusionConfig
    from vllm_omni.diffusion.forward_context import set_forward_context

    config = OmniDiffusionConfig(diffusion_attention_config=AttentionConfig(default="TORCH_SDPA"))
    context = set_forward_context(omni_diffusion_config=config)
    with one_rank(configuration()), set_current_diffusion_config(config), context:
        yield config


def transformer(cls: Any, config: Mapping[str, Any], of_rank: Any) -> Any:
    """A model without weights. FLUX.1 would take the number of its blocks from the rank's configuration."""
    from vllm.utils.torch_utils import set_default_torch_dtype

    needed = inspect.signature(cls).parameters["od_config"].default is inspect.Parameter.empty
    with set_default_torch_dtype(torch.bfloat16), torch.device(DEVICE):
        return cls(**config, **({"od_config": of_rank} if needed else {})).eval()


@contextmanager
def pair(model: Model, smoke: bool) -> Iterator[Pair]:
    """A few blocks, with 4096 tokens of a picture."""
    import vllm._C_stable_libtorch  # noqa: F401  # raises ImportError where vLLM cannot run

    from jitrope.integrations import vllm_omni as integration

    file, rotary = (importlib.import_module(name) for name in (f"{FILES}.{model.file}", ROTARY))
    places = [(at, name) for at in (file, rotary) for name in FUNCTIONS if hasattr(at, name)]
    config = {**model.config, **(model.tiny if smoke else {})}
    grid, text = (4, 8) if smoke else (64, model.text)

    def side(made: nn.Module) -> Side:
        return Side(Denoise(made, {(at, name): getattr(at, name) for at, name in places}), words)

    with worker() as of_rank:
        make = partial(transformer, getattr(file, model.name), config, of_rank)
        stock = make()
        random_weights(stock)
        with torch.device(DEVICE):
            words = {"hidden_states": bf16(1, grid**2, config["in_channels"]), "timestep": torch.tensor([0.5])}
            words |= model.words(config, grid, text)
        theirs = side(stock)
        with integration.enable() as report:
            ours = make()
            share(ours, stock)
            yield Pair(theirs, side(ours), lambda: report.calls, trained=False)


def flux_words(config: Mapping[str, Any], grid: int, text: int) -> dict[str, Any]:
    """Text and guidance, and the places of all tokens."""
    return {
        "encoder_hidden_states": bf16(1, text, config["joint_attention_dim"]),
        "pooled_projections": bf16(1, config["pooled_projection_dim"]),
        "guidance": torch.tensor([4.0]),
        "img_ids": torch.cartesian_prod(*(torch.arange(n) for n in (1, grid, grid))).float(),
        "txt_ids": torch.zeros(text, 3),
    }


def qwen_words(config: Mapping[str, Any], grid: int, text: int) -> dict[str, Any]:
    """Text, and the sizes of picture and text, for the tables."""
    return {
        "encoder_hidden_states": bf16(1, text, config["joint_attention_dim"]),
        "img_shapes": [[(1, grid, grid)]],
        "txt_seq_lens": [text],
    }


_TINY = {
    "in_channels": 8, "num_attention_heads": 2, "attention_head_dim": 64, "joint_attention_dim": 32, "num_layers": 1,
    "axes_dims_rope": (16, 24, 24),
}  # fmt: skip
FLUX = Model(
    "flux.flux_transformer", "FluxTransformer2DModel",
    {
        "in_channels": 64, "joint_attention_dim": 4096, "pooled_projection_dim": 768, "guidance_embeds": True,
        "num_layers": 4, "num_single_layers": 8,
    },
    {**_TINY, "pooled_projection_dim": 16, "num_single_layers": 1}, 512, flux_words,
)  # fmt: skip
QWEN = Model(
    "qwen_image.qwen_image_transformer", "QwenImageTransformer2DModel",
    {"in_channels": 64, "joint_attention_dim": 3584, "num_layers": 10}, _TINY, 256, qwen_words,
)  # fmt: skip
HOSTS = {
    "vllm-omni-flux": Host("vllm_omni", "FLUX.1", "denoise, 4608 tokens, 12 blocks", partial(pair, FLUX)),
    "vllm-omni-qwen": Host("vllm_omni", "Qwen-Image", "denoise, 4352 tokens, 10 blocks", partial(pair, QWEN)),
}
