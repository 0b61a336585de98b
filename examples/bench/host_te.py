"""The layers of `bench hosts` with TransformerEngine, which need a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from .harness import DEVICE, angles, bf16, twice
from .host_models import Chain, Host, Pair, Side, keeping, megatron_pair, need_gpu, random_weights, share


@contextmanager
def pair(before: bool, smoke: bool) -> Iterator[Pair]:
    """Two layers as large as Qwen3-8B's. before: norms of q and k come before rope, as in Qwen3."""
    need_gpu()
    import transformer_engine
    from transformer_engine.pytorch import TransformerLayer
    from transformer_engine.pytorch.attention import multi_head_attention

    from jitrope.integrations import transformer_engine as integration

    width, wide, heads, groups, head_dim, tokens = (64, 96, 4, 2, 16, 8) if smoke else (4096, 12288, 32, 8, 128, 4096)
    words: dict[str, Any] = {"normalization": "RMSNorm", "activation": "swiglu", "bias": False}
    words |= {"qk_norm_type": "RMSNorm", "qk_norm_before_rope": before, "params_dtype": torch.bfloat16}
    words |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "num_gqa_groups": groups, "kv_channels": head_dim}
    stock, ours = (
        Chain([TransformerLayer(width, wide, heads, layer_number=1 + i, **words) for i in range(2)]) for _ in range(2)
    )
    random_weights(stock)
    share(ours, stock)
    rope = multi_head_attention.apply_rotary_pos_emb
    kept = keeping(multi_head_attention.MultiheadAttention, apply_rotary_pos_emb=rope)
    for layer in stock.layers:
        layer.self_attention.__class__ = kept
    x = bf16(tokens, 1, width).requires_grad_()
    given = {"x": x, "rotary_pos_emb": twice(angles(tokens, head_dim)).float()[:, None, None].to(DEVICE)}
    with integration.enable() as report:
        yield Pair(Side(stock, given), Side(ours, given), lambda: report.calls, version=transformer_engine.__version__)


HOSTS = {
    **{
        f"te-{name}train": Host(
            "transformer_engine.pytorch", f"Qwen3-8B{label}", "train, 4096 tokens, 2 layers", partial(pair, before)
        )
        for name, label, before in (("", "", True), ("behind-", ", norms behind rope", False))
    },
    "megatron-te-train": Host(
        "megatron.core", "Qwen3-8B, TransformerEngine", "train, 4096 tokens, 2 layers", partial(megatron_pair, True)
    ),
}
