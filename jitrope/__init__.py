"""jitrope: rotary position embeddings at the speed of memory, compiled on first call.

>>> q, k = jitrope.apply_rope(q, k, cos, sin)

Besides the functions below:

- `jitrope.tables`: cosines, sines and angles of every common kind of rope
- `jitrope.context_parallel`: packed batches cut between ranks, and attention over them
- `jitrope.thd`: rows of packed batches, as TransformerEngine's context parallelism moves them
- `jitrope.integrations.transformers`, `jitrope.integrations.diffusers`, `jitrope.integrations.vllm`,
  `jitrope.integrations.sglang`, `jitrope.integrations.torchtitan`, `jitrope.integrations.transformer_engine`,
  `jitrope.integrations.megatron`, `jitrope.integrations.deepspeed`: in place of a host's own rope
- `jitrope.tools.prewarm`, `jitrope.tools.bundle`, `jitrope.jit.cache`: kernels made ahead of time, in a file, on disk

In shapes B is the batch, S the tokens of a sequence, T those of a packed batch of N sequences, H heads (Hq of q, Hk of
k and v), D elements of a head, P rows of a table, W its width, R the elements of a head that are rotated. Angles are in
radians, positions and offsets in tokens, sizes in bytes.
"""

from typing import Any as _Any

from .api import apply_rope, prepare_joint_qkv, prepare_packed_qkv, prepare_qkv
from .base.config import __version__, configure
from .base.config import set_up_logging as _set_up_logging
from .base.errors import CacheError, CompileError, InvalidInput, JitropeError, MissingKernel
from .jit.recording import record
from .ops.planning import planning
from .ops.values import KVCache, Mrope, Norm, Packed, Quantize, Starts

__all__ = [
    "CacheError",
    "CompileError",
    "InvalidInput",
    "JitropeError",
    "KVCache",
    "MissingKernel",
    "Mrope",
    "Norm",
    "Packed",
    "Quantize",
    "Starts",
    "__version__",
    "apply_rope",
    "configure",
    "planning",
    "prepare_joint_qkv",
    "prepare_packed_qkv",
    "prepare_qkv",
    "record",
]

_LAZY = ("context_parallel", "tables", "thd")


def __getattr__(name: str) -> _Any:
    """`jitrope.tables` and the other modules of functions are imported when they are first asked for."""
    if name in _LAZY:
        from importlib import import_module

        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])


_set_up_logging()
