"""Megatron-core, installed or in the checkout, with jitrope's `enable`."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path

from jitrope.integrations import megatron, transformer_engine

from .standin import module


def install(checkout: Path) -> None:
    alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29512}
    for name, value in alone.items():
        os.environ.setdefault(name, str(value))
    import_module("megatron.core.transformer.attention")  # before the stand-in of TransformerEngine
    megatron.enable()
    fused = transformer_engine.apply_fused_qkv_rotary_pos_emb
    module("transformer_engine.pytorch.attention.rope", apply_fused_qkv_rotary_pos_emb=fused)
