"""Rotary position embeddings (RoPE) and the other steps between QKV projection and attention, in one launch.

>>> q, k = torch.randn(2, 1, 16, 8, 64)  # (B, S, H, D) each
>>> cos, sin = jitrope.tables.cos_sin(16, jitrope.tables.inv_freq(rotary_dim=64)[0])
>>> q, k = jitrope.apply_rope(q, k, cos, sin)

- `apply_rope` rotates q and k.
- `prepare_qkv` rotates, and also normalises (`Norm`), stores in a KV cache (`KVCache`, `Pages`) or converts to fp8,
  int8 or fp4 (`Quantize`, `DynamicQuantize`).
- `prepare_fused_qkv` splits the output of a fused projection, in any common order, normalises and rotates.
- `project_qkv` also makes the projection, by tensor cores.
- `prepare_joint_qkv` normalises, rotates, joins and converts two streams (FLUX, Qwen-Image).
- `prepare_mla_qkv` rotates, and makes k and v of multi-head latent attention (DeepSeek).
- `Packed`, `Starts`, `Mrope` and `Shifts` are kinds of `positions=`.
- `configure` changes settings; `record` and `planning` list the kernels that a run needs, and `on_compile` calls a
  function for each kernel that is compiled or read from a cache.

More modules:

- `jitrope.tables`: frequencies, cosines and sines of every common kind of RoPE
- `jitrope.integrations`: drop-ins for hosts, `jitrope.integrations.transformers`, `jitrope.integrations.diffusers`,
  `jitrope.integrations.torchtitan`, `jitrope.integrations.transformer_engine`, `jitrope.integrations.megatron`,
  `jitrope.integrations.deepspeed`, `jitrope.integrations.comfy_kitchen`, `jitrope.integrations.xfuser`
  and `jitrope.integrations.timm`
- `jitrope.context_parallel`: packed batches cut between ranks, and attention over them
- `jitrope.thd`: the rows of packed batches, under TransformerEngine's names
- `jitrope.tools.prewarm`, `jitrope.tools.bundle`, `jitrope.jit`, `jitrope.jit.cache`: kernels built ahead of time, in a
  file, on disk

In shapes, B is the batch, S the tokens of a sequence, T the tokens of a packed batch of N sequences, H the heads (Hq of
q, Hk of k and v), D the elements of a head, P the rows of a table, W its width, and R the rotated elements of a head.
Angles are in radians, positions and offsets in tokens, sizes in bytes.

The examples run after `import torch, jitrope` and the import of their module by its last name, as in
`from jitrope import tables`. A drop-in is imported with `jitrope_` before its host's name.
"""

from typing import Any as _Any

from .api import apply_rope, prepare_fused_qkv, prepare_joint_qkv, prepare_mla_qkv, prepare_qkv, project_qkv
from .base.config import __version__, configure
from .base.config import set_up_logging as _set_up_logging
from .base.errors import CacheError, CompileError, InvalidInput, JitropeError, MissingKernel
from .jit.recording import KernelEvent, on_compile, record
from .run.planning import planning
from .sinks.cache import KVCache
from .sinks.pages import Pages
from .sinks.results import Ulysses
from .stages.convert import DynamicQuantize, Quantize, Scaled
from .stages.norm import Norm
from .stages.positions import Mrope, Packed, Shifts, Starts

# ruff: noqa: RUF022  (in the order of the documentation)
__all__ = ["apply_rope", "prepare_qkv", "prepare_fused_qkv", "prepare_joint_qkv", "prepare_mla_qkv", "project_qkv"]
__all__ += ["Packed", "Shifts", "Starts", "Mrope", "Norm", "KVCache", "Pages"]
__all__ += ["Quantize", "DynamicQuantize", "Scaled", "Ulysses"]
__all__ += ["configure", "record", "on_compile", "KernelEvent", "planning"]
__all__ += ["JitropeError", "InvalidInput", "CompileError", "MissingKernel", "CacheError", "__version__"]

_LAZY = ("context_parallel", "integrations", "tables", "thd")


def __getattr__(name: str) -> _Any:
    """Import `jitrope.tables` and the other modules of functions at their first use."""
    if name in _LAZY:
        from importlib import import_module

        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])


_set_up_logging()
