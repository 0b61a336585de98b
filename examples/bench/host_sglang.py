"""SGLang's decoder layers for `bench hosts`: with SGLang's own kernels, and with jitrope enabled.

Both sides have the same layers, the same cache and SGLang's FlashAttention 3: a step first puts its functions into
SGLang's modules. The layers are those of Qwen3; "rope and cache" and "fused op" have the attention of its Qwen3-MoE.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from .harness import DEVICE, bf16
from .host_models import LM_TINY, QWEN3, Pair, need_gpu, random_weights
from .host_serving import Layers, hosts, pair_of, sizes

KINDS = {"": "", "cache": " (rope and cache)", "fused": " (fused op)"}
"""Kinds of attention, and the text after the model's name: rope alone, rope that fills the cache, norms and rope."""
PLACES = (
    ("sglang.kernels.ops.attention.rope", "apply_rope_inplace"),
    ("sglang.kernels.ops.attention.rope", "apply_rope_inplace_with_kvcache"),
    ("sglang.srt.models.qwen3_moe", "fused_qk_norm_rope"),
)
"""The functions of SGLang that a step may call, and that jitrope replaces."""
TINY = {**LM_TINY, "head_dim": 128}


def configuration(model: Any, fused: bool) -> tuple[Any, Any]:
    """(SGLang's arguments of a server, a stand-in for its configuration of a model)."""
    from sglang.srt.configs.model_config import AttentionArch
    from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig
    from sglang.srt.server_args import ServerArgs

    words: dict[str, Any] = {"device": DEVICE, "cuda_graph_config": CudaGraphConfig()}
    arguments = ServerArgs(model_path="dummy", enable_fused_qk_norm_rope=fused, **words)
    stand_in = SimpleNamespace(
        hf_config=model, hf_text_config=model, hidden_size=model.hidden_size, head_dim=model.head_dim,
        dtype=torch.bfloat16, context_len=model.max_position_embeddings, attention_arch=AttentionArch.MHA,
        is_encoder_decoder=False, is_local_attention_model=False,
        get_num_kv_heads=lambda _: model.num_key_value_heads,
    )  # fmt: skip
    return arguments, stand_in


@contextmanager
def one_rank(arguments: Any, config: Any) -> Iterator[None]:
    """Put SGLang's arguments in force, and make its groups of this process alone."""
    from sglang.srt.distributed import parallel_state as dist
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.server_args import set_global_server_args_for_scheduler

    set_global_server_args_for_scheduler(arguments)
    dist.init_distributed_environment(1, 0, "tcp://127.0.0.1:0", local_rank=0, backend="gloo")  # nothing is sent
    try:
        dist.initialize_model_parallel()
        initialize_dp_attention(arguments, config)
        yield
    finally:
        dist.destroy_model_parallel()
        dist.destroy_distributed_environment()


def decoder_layers(model: Any, kind: str) -> Any:
    """Decoder layers with random weights."""
    from sglang.srt.models.qwen3 import Qwen3DecoderLayer
    from sglang.srt.models.qwen3_moe import Qwen3MoeAttention

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(DEVICE):
            layers: Any = nn.ModuleList(Qwen3DecoderLayer(model, i) for i in range(model.num_hidden_layers))
            heads = model.num_attention_heads, model.num_key_value_heads
            words = {name: getattr(model, name) for name in ("head_dim", "rms_norm_eps", "max_position_embeddings")}
            for i, layer in enumerate(layers if kind else ()):
                words |= {"rope_theta": layer.self_attn.rope_theta, "config": model}
                layer.self_attn = Qwen3MoeAttention(model.hidden_size, *heads, i, **words)
    finally:
        torch.set_default_dtype(before)
    random_weights(layers)
    return layers.eval()


def runner_of(arguments: Any, config: Any, batch: int, length: int) -> Any:
    """A stand-in for SGLang's runner of models, as attention reads it, with a filled cache of pages of one token."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool

    layers = config.hf_config.num_hidden_layers
    heads = config.get_num_kv_heads(1), config.head_dim
    requests = ReqToTokenPool(batch, length, DEVICE, False)
    pool = MHATokenToKVPool(batch * length, 1, config.dtype, *heads, layers, DEVICE, False)
    for each in (*pool.k_buffer, *pool.v_buffer):
        each.normal_()
    slots = torch.arange(1, 1 + batch * length, device=DEVICE, dtype=torch.int32)  # SGLang keeps slot 0 for padding
    requests.req_to_token[1:] = slots.view(batch, length)
    return SimpleNamespace(
        server_args=arguments, model_config=config, device=DEVICE, req_to_token_pool=requests, token_to_kv_pool=pool,
        token_to_kv_pool_allocator=None, kv_cache_dtype=config.dtype, kv_cache_dtype_str="auto", page_size=1,
        sliding_window_size=None, is_draft_worker=False, ps=SimpleNamespace(tp_size=1, attn_cp_size=1),
    )  # fmt: skip


def batch_of(runner: Any, batch: int, cached: int, new: int) -> tuple[Tensor, Callable[[], Any], Any]:
    """(Positions, the forward context, SGLang's batch) of sequences with cached tokens and new ones."""
    from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    length = cached + new
    lengths = torch.full((batch,), length)
    positions = torch.arange(cached, length, device=DEVICE).repeat(batch)
    found = ForwardBatch(
        forward_mode=ForwardMode.DECODE if new == 1 else ForwardMode.EXTEND, batch_size=batch, positions=positions,
        input_ids=torch.zeros_like(positions), req_pool_indices=torch.arange(1, batch + 1, device=DEVICE),
        seq_lens=lengths.to(DEVICE), seq_lens_cpu=lengths, seq_lens_sum=batch * length,
        out_cache_loc=runner.req_to_token_pool.req_to_token[1:, cached:].flatten().long(),
    )  # fmt: skip
    if new > 1:
        found.extend_num_tokens = batch * new
        found.extend_seq_lens_cpu, found.extend_prefix_lens_cpu = [new] * batch, [cached] * batch
        found.extend_seq_lens, found.extend_prefix_lens = (torch.full_like(found.seq_lens, n) for n in (new, cached))
    backend = FlashAttentionBackend(runner)
    backend.init_forward_metadata(found)
    return positions, partial(forward_context, ForwardContext(backend)), found


@contextmanager
def pair(decode: bool, kind: str, smoke: bool) -> Iterator[Pair]:
    """Two layers of Qwen3-8B: one token of each of 8 sequences with 1024 earlier ones, or 4096 tokens of one."""
    need_gpu()
    import sgl_kernel  # noqa: F401  # raises ImportError if SGLang's kernels are not installed
    from transformers import Qwen3Config

    from jitrope.integrations import sglang as integration

    model = Qwen3Config(**{**QWEN3, **(TINY if smoke else {})})
    arguments, config = configuration(model, kind == "fused")
    with ExitStack() as stack:
        stack.enter_context(one_rank(arguments, config))
        layers = decoder_layers(model, kind)
        shape = sizes(decode, smoke)
        runner = runner_of(arguments, config, shape[0], sum(shape[1:]))
        positions, context, batch = batch_of(runner, *shape)
        words = {"positions": positions, "x": bf16(len(positions), model.hidden_size)}
        places = [(importlib.import_module(module), name) for module, name in PLACES]
        steps = pair_of(integration, places, Layers(layers, context, (batch,)), words, kind == "fused")
        yield stack.enter_context(steps)


HOSTS = hosts("sglang", "Qwen3-8B", KINDS, pair)
