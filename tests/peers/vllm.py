"""vLLM: `enable` if it is installed; else layers with its names, whose native path is plain torch in fp32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from jitrope.integrations import vllm as ours

from .standin import by_cache, made, module

_MODELS = {  # heads of q, of k, the part of a head of 128 that is rotated, sections, whether they interleave
    "zai-org/GLM-4.1V-9B-Thinking": (32, 2, 0.5, (8, 12, 12), False),
    "Qwen/Qwen2-VL-7B-Instruct": (28, 4, 1.0, (16, 24, 24), False),
    "Qwen/Qwen2-VL-72B-Instruct": (64, 8, 1.0, (16, 24, 24), False),
    "Qwen/Qwen2.5-VL-72B-Instruct": (64, 8, 1.0, (16, 24, 24), False),
    "Qwen/Qwen3-VL-4B-Instruct": (32, 8, 1.0, (24, 20, 20), True),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": (32, 4, 1.0, (24, 20, 20), True),
}


def install(checkout: Path) -> None:
    if not made(module("vllm._custom_ops")):
        ours.enable()
        return
    platform = SimpleNamespace(seed_everything=torch.manual_seed, is_cuda_alike=lambda: True, is_rocm=lambda: False)
    module("vllm.model_executor.layers.rotary_embedding", get_rope=get_rope, RotaryEmbedding=Rope)
    module("vllm.platforms", current_platform=platform)
    module("vllm.utils", is_xpu=lambda: False)
    module("vllm.utils.torch_utils", set_random_seed=torch.manual_seed)
    module("vllm.transformers_utils.config", get_config=get_config)


def get_config(name: str, *_: Any) -> Any:
    heads, kv_heads, partial, sections, interleaved = _MODELS[name]
    config = SimpleNamespace(
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=128, max_position_embeddings=32768,
        partial_rotary_factor=partial,
        rope_parameters={"rope_theta": 1e6, "mrope_section": sections, "mrope_interleaved": interleaved},
    )  # fmt: skip
    config.get_text_config = lambda: config
    return config


def get_rope(
    head_size: int, rotary_dim: int | None = None, max_position: int = 8192, base: float = 10000.0, is_neox_style:
    bool = True, rope_parameters: dict[str, Any] | None = None, dtype: torch.dtype | None = None, **words: Any,
) -> nn.Module:  # fmt: skip
    rope = rope_parameters or {}
    dim = int(rotary_dim or head_size * rope.get("partial_rotary_factor", 1.0))
    made = Rope(head_size, dim, max_position, rope.get("rope_theta", base), is_neox_style, dtype or torch.float32)
    made.sections, made.mixed = rope.get("mrope_section", ()), rope.get("mrope_interleaved", False)
    return made


class Rope(nn.Module):
    sections: Sequence[int] = ()
    mixed = False

    def __init__(
        self, head_size: int, rotary_dim: int, max_position: int, base: float, is_neox_style: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.head_size, self.is_neox_style = head_size, is_neox_style
        inverse = base ** (-torch.arange(0, rotary_dim, 2, device="cpu").float() / rotary_dim)
        angles = torch.arange(max_position, device="cpu").float()[:, None] * inverse
        self.register_buffer("cos_sin_cache", torch.cat((angles.cos(), angles.sin()), -1).to(dtype))

    def forward_native(self, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
        table = self.cos_sin_cache
        if self.sections and positions.dim() == 2:  # the rows as one table with a row for each token
            table = _mixed(table[positions], self.sections, self.mixed)
            positions = torch.arange(positions.shape[1], device=positions.device)
        return tuple(
            None if x is None else by_cache(positions, x, self.head_size, table, self.is_neox_style)
            for x in (query, key)
        )

    def forward_cuda(self, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
        if self.sections and positions.dim() == 2:
            cos, sin = self.cos_sin_cache[positions].chunk(2, -1)
            width, neox = self.cos_sin_cache.shape[-1], self.is_neox_style
            ours.triton_mrope(query, key, cos, sin, self.sections, self.head_size, width, self.mixed, neox)
        else:
            ours.rotary_embedding(positions, query, key, self.head_size, self.cos_sin_cache, self.is_neox_style)
        return query, key

    forward = forward_cuda


def _mixed(rows: Tensor, sections: Sequence[int], interleaved: bool) -> Tensor:
    """(axes, T, R) to (T, R): each pair from the axis of its section."""
    if interleaved:
        axis = [0] * sum(sections)
        for a in range(1, len(sections)):
            axis[a : len(sections) * sections[a] : len(sections)] = [a] * sections[a]
    else:
        axis = [a for a, count in enumerate(sections) for _ in range(count)]
    return torch.stack([rows[a, :, column] for column, a in enumerate(axis * 2)], -1)
