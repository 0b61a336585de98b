"""jitrope: rotary position embeddings at the speed of memory, compiled on first call.

>>> q, k = jitrope.apply_rope(q, k, cos, sin)
"""

from .config import configure
from .config import set_up_logging as _set_up_logging
from .errors import CacheError, CompileError, InvalidInput, JitropeError, MissingKernel
from .norm_rope import qk_norm_rope, qk_norm_rope_, qk_norm_rope_joint
from .recording import record
from .rope import (
    apply_rope,
    apply_rope_,
    apply_rope_fp8,
    apply_rope_kv_cache,
    apply_rope_kv_cache_,
    apply_rope_qkv,
    apply_rope_qkv_,
)
from .version import __version__

__all__ = [
    "CacheError",
    "CompileError",
    "InvalidInput",
    "JitropeError",
    "MissingKernel",
    "__version__",
    "apply_rope",
    "apply_rope_",
    "apply_rope_fp8",
    "apply_rope_kv_cache",
    "apply_rope_kv_cache_",
    "apply_rope_qkv",
    "apply_rope_qkv_",
    "configure",
    "qk_norm_rope",
    "qk_norm_rope_",
    "qk_norm_rope_joint",
    "record",
]

_set_up_logging()
