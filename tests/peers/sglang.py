"""SGLang: its rope functions, replaced by jitrope's. Its tests compare with FlashInfer's, or else with plain torch."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from jitrope.integrations import sglang as ours

from .standin import by_cache, module

_NAMES = ("apply_rope_inplace", "apply_rope_inplace_with_kvcache", "rotary_embedding")


def install(checkout: Path) -> None:
    module("sglang", next((d for d in (checkout / "python" / "sglang", checkout / "sglang") if d.exists()), None))
    try:
        import triton.testing  # noqa: F401
    except ImportError:
        module("triton", jit=lambda function: function)
        module("triton.language", constexpr=int)
        module("triton.testing", assert_close=torch.testing.assert_close)
    module("sglang.utils", is_in_ci=lambda: False)
    for name in ("sglang.jit_kernel.rope", "sglang.kernels.ops.attention.rope"):
        module(name, **{key: getattr(ours, key) for key in _NAMES})
    try:
        import flashinfer.rope  # type: ignore[import]  # noqa: F401
    except Exception:
        module("flashinfer.rope", apply_rope_with_cos_sin_cache_inplace=_reference)


def _reference(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool = True
) -> None:
    for x in (query, key):
        x.copy_(by_cache(positions, x, head_size, cos_sin_cache, is_neox))
