"""vLLM's decoder layers for `bench hosts`: with vLLM's own kernels, and with jitrope enabled.

Both sides have the same layers and the same paged cache: a step first puts its functions into vLLM's module of ops.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from .harness import DEVICE, bf16
from .host_models import LM_TINY, QWEN3, Pair, random_weights
from .host_serving import Layers, hosts, pair_of, sizes

os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # read by vLLM's import; stdout is for the report

KINDS = {"": "", "fused": " (fused op)"}
"""Kinds of attention, and the text after the model's name: rope alone, norms and rope."""
OPS = ("rotary_embedding", "fused_qk_norm_rope")
"""The functions in vLLM's module of ops that a step may call, and that jitrope replaces."""
BLOCK = 16
"""Tokens in a block of the paged cache."""
TINY = {**LM_TINY, "head_dim": 64}


def fused_attention(self: Any, positions: Tensor, hidden_states: Tensor) -> Tensor:
    """The forward of Qwen3's attention with norms and rope in one op, which vLLM's compiler can put there."""
    from vllm import _custom_ops

    qkv, _ = self.qkv_proj(hidden_states)
    heads = self.num_heads, self.num_kv_heads, self.num_kv_heads, self.head_dim
    weights = self.q_norm.weight, self.k_norm.weight
    table = self.rotary_emb.cos_sin_cache
    _custom_ops.fused_qk_norm_rope(qkv, *heads, self.q_norm.variance_epsilon, *weights, table, True, positions)
    out: Tensor = self.o_proj(self.attn(*qkv.split((self.q_size, self.kv_size, self.kv_size), -1)))[0]
    return out


@contextmanager
def one_rank(config: Any) -> Iterator[None]:
    """Put vLLM's configuration in force, with its choice of kernels, and make its groups of this process alone."""
    from vllm import distributed as dist
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(config), config.kernel_config.ir_op_priority.set_priority():
        dist.init_distributed_environment(1, 0, "tcp://127.0.0.1:0", local_rank=0, backend="gloo")  # nothing is sent
        try:
            dist.initialize_model_parallel()
            yield
        finally:
            dist.destroy_model_parallel()
            dist.destroy_distributed_environment()


def configuration(model: Any) -> Any:
    """A configuration of vLLM without its compiler. A stand-in for a model's has what attention reads."""
    from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode, VllmConfig

    words: dict[str, Any] = {"mode": CompilationMode.NONE, "cudagraph_mode": CUDAGraphMode.NONE}
    config = VllmConfig(compilation_config=CompilationConfig(custom_ops=["all"], **words))
    stand_in: Any = SimpleNamespace(
        dtype=torch.bfloat16, is_diffusion=False, is_hybrid=False, is_moe=False, is_mm_prefix_lm=False,
        get_num_attention_heads=lambda _: model.num_attention_heads,
        get_num_kv_heads=lambda _: model.num_key_value_heads,
        get_head_size=lambda: model.head_dim,
    )  # fmt: skip
    config.model_config = stand_in
    return config


def decoder_layers(model: Any, config: Any, fused: bool) -> Any:
    """Decoder layers with random weights."""
    from vllm.model_executor.models.qwen3 import Qwen3DecoderLayer
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_default_torch_dtype(torch.bfloat16), torch.device(DEVICE):
        names = [f"layers.{i}" for i in range(model.num_hidden_layers)]
        layers: Any = nn.ModuleList(Qwen3DecoderLayer(model, config.cache_config, prefix=name) for name in names)
    random_weights(layers)
    if fused:
        for layer in layers:
            layer.self_attn.forward = MethodType(fused_attention, layer.self_attn)
    return layers.eval()


def batch_of(config: Any, batch: int, cached: int, new: int) -> tuple[Tensor, Callable[[], Any]]:
    """(Positions, the forward context) of sequences with cached tokens and new ones; fills the layers' caches."""
    from vllm.forward_context import set_forward_context
    from vllm.v1.attention.backend import CommonAttentionMetadata

    length = cached + new
    blocks = -(-length // BLOCK)
    table = torch.arange(batch * blocks, device=DEVICE, dtype=torch.int32).view(batch, blocks)
    positions = torch.arange(cached, length, device=DEVICE)
    slots = (table[:, positions // BLOCK].long() * BLOCK + positions % BLOCK).flatten()
    starts = torch.arange(batch + 1, dtype=torch.int32) * new
    common = CommonAttentionMetadata(
        query_start_loc=starts.to(DEVICE), query_start_loc_cpu=starts, num_reqs=batch, num_actual_tokens=batch * new,
        seq_lens=torch.full((batch,), length, device=DEVICE, dtype=torch.int32), max_query_len=new, max_seq_len=length,
        block_table_tensor=table, slot_mapping=slots,
    )  # fmt: skip
    config.cache_config.block_size = BLOCK
    attentions = config.compilation_config.static_forward_context
    for each in attentions.values():
        shape = each.attn_backend.get_kv_cache_shape(batch * blocks, BLOCK, each.num_kv_heads, each.head_size)
        each.kv_cache = bf16(*shape)
    spec = each.get_kv_cache_spec(config)
    builder = each.attn_backend.get_builder_cls()(spec, list(attentions), config, torch.device(DEVICE))
    metadata = builder.build(0, common)
    by_name = {"slot_mapping": dict.fromkeys(attentions, slots), "num_tokens": batch * new}
    return positions.repeat(batch), partial(set_forward_context, dict.fromkeys(attentions, metadata), config, **by_name)


@contextmanager
def pair(decode: bool, kind: str, smoke: bool) -> Iterator[Pair]:
    """Two layers of Qwen3-8B: one token of each of 8 sequences with 1024 earlier ones, or 4096 tokens of one."""
    import vllm._C_stable_libtorch  # noqa: F401  # raises ImportError where vLLM cannot run
    from transformers import Qwen3Config
    from vllm import _custom_ops

    from jitrope.integrations import vllm as integration

    model = Qwen3Config(**{**QWEN3, **(TINY if smoke else {})})
    config = configuration(model)
    with ExitStack() as stack:
        stack.enter_context(one_rank(config))
        layers = decoder_layers(model, config, kind == "fused")
        shape = sizes(decode, smoke)
        positions, context = batch_of(config, *shape)
        words = {"positions": positions, "x": bf16(len(positions), model.hidden_size)}
        places = [(_custom_ops, name) for name in OPS]
        yield stack.enter_context(pair_of(integration, places, Layers(layers, context), words, kind == "fused"))


HOSTS = hosts("vllm", "Qwen3-8B", KINDS, pair)
