"""A diffusion transformer of SGLang for `bench hosts`: with SGLang's own kernels, and with jitrope enabled.

Both sides have the same weights and the attention that SGLang chooses, FlashAttention 3 on an H100. A step first puts
its functions into SGLang's modules. `--enable-torch-compile` compiles the whole model too, but in another mode, which
tries more kernels.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from . import diffusion
from .harness import DEVICE, bf16
from .host_models import Host, Pair, Side, counts, need_gpu, random_weights, share
from .host_serving import Step

PACKAGE = "sglang.multimodal_gen"
PLACES = ("apply_qk_norm_rope", "fused_inplace_qknorm_rope")
"""The functions in SGLang's module of norms that a step may call, and that jitrope replaces."""
TINY = {"num_attention_heads": 2, "in_channels": 8, "joint_attention_dim": 32, "pooled_projection_dim": 16}


class Denoise(Step):
    """A step without a CUDA graph, which is compiled if its model is."""

    def compile(self, **words: Any) -> None:
        """Compile the model alone, so that its functions are put into modules outside of it."""
        self.model.compile(**words)

    def forward(self, **words: Any) -> Tensor:
        """The model's, in a context of SGLang's."""
        from sglang.multimodal_gen.runtime.managers.forward_context import set_forward_context

        with set_forward_context(current_timestep=0, attn_metadata=None):
            return self.eager(words)


@contextmanager
def one_rank() -> Iterator[None]:
    """SGLang's groups of this process alone, and a stand-in for the arguments of its server.

    Afterwards torch's attention uses cuDNN again, which SGLang turns off when it is imported.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    dist = importlib.import_module(f"{PACKAGE}.runtime.distributed.parallel_state")
    server = importlib.import_module(f"{PACKAGE}.runtime.server_args.server_args")
    arguments = {"attention_backend": None, "enable_attention_backend_autotune": False, "kv_gather_degree": 1}
    server.set_global_server_args(SimpleNamespace(**arguments))
    try:
        dist.init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, backend="gloo")  # nothing is sent
        dist.initialize_model_parallel(sequence_parallel_degree=1, backend="gloo")
        yield
    finally:
        dist.destroy_model_parallel()
        dist.destroy_distributed_environment()
        server.set_global_server_args(None)
        torch.backends.cuda.enable_cudnn_sdp(before)


def flux(smoke: bool) -> Any:
    """FLUX.1 with 4 double and 8 single blocks."""
    configs = importlib.import_module(f"{PACKAGE}.configs.models.dits.flux")
    models = importlib.import_module(f"{PACKAGE}.runtime.models.dits.flux")
    blocks = dict(zip(diffusion.LAYERS, (1, 1) if smoke else diffusion.MODELS["flux"].blocks))
    config = configs.FluxConfig(arch_config=configs.FluxArchConfig(**blocks, **(TINY if smoke else {})))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(DEVICE):
            return models.FluxTransformer2DModel(config, {}).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)


def flux_words(model: Any, smoke: bool) -> dict[str, Any]:
    """The arguments of a step with a picture of 64 x 64 tokens and 512 tokens of text."""
    _, height, width, text = (1, 4, 6, 8) if smoke else diffusion.MODELS["flux"].size
    config, grid = model.config, [torch.arange(n, device=DEVICE) for n in (1, height, width)]
    ids = torch.cat((torch.zeros(text, 3, device=DEVICE), torch.cartesian_prod(*grid)))
    return {
        "hidden_states": bf16(1, height * width, config.in_channels),
        "encoder_hidden_states": bf16(1, text, config.joint_attention_dim),
        "pooled_projections": bf16(1, config.pooled_projection_dim),
        "timestep": torch.full((1,), 500.0, device=DEVICE),
        "guidance": torch.full((1,), 4000.0, device=DEVICE),
        "freqs_cis": model.rotary_emb(ids),
    }


@contextmanager
def flux_pair(smoke: bool) -> Iterator[Pair]:
    """FLUX.1 twice with the same weights."""
    need_gpu()
    import sgl_kernel  # noqa: F401  # raises ImportError if SGLang's kernels are not installed

    from jitrope.integrations import sglang_diffusion as integration

    with ExitStack() as stack:
        stack.enter_context(one_rank())
        models = [flux(smoke) for _ in range(2)]
        random_weights(models[0])
        share(models[1], models[0])
        words = flux_words(models[0], smoke)
        norms = importlib.import_module(f"{PACKAGE}.runtime.layers.layernorm")
        stock = {(norms, name): getattr(norms, name) for name in PLACES}
        report = stack.enter_context(integration.enable())
        ours = {place: getattr(*place) for place in stock}
        sides = [Side(Denoise(model, of), words) for model, of in zip(models, (stock, ours))]
        version = importlib.import_module("sglang").__version__
        yield Pair(sides[0], sides[1], partial(counts, report, True), trained=False, version=version)


HOSTS = {
    "sglang-flux": Host(PACKAGE, "FLUX.1", "denoise, 4608 tokens, 12 blocks", flux_pair),
}
