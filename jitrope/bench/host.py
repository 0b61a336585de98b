"""`jitrope bench host`: what a call costs the CPU, beside torch's own in-place add."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import apply_rope, apply_rope_
from ..plan.spec import Options
from . import decode
from .rope import inputs
from .timing import host_time


def run() -> list[dict[str, Any]]:
    """A decode step's q and k (64 tokens, 32 + 8 heads): the GPU work is shorter than the call."""
    q, k, cos, sin = inputs((1, 64, 32, 8, 128))
    ids = torch.arange(64, device="cuda")
    step = decode.inputs(64, 32, 8, 128)
    x = torch.ones(64, device="cuda")
    leaf = q.detach().requires_grad_()
    options = Options(rotary_dim=128)[:-1]
    calls: dict[str, Callable[[], Any]] = {
        "x.add_(1)": lambda: x.add_(1),
        "two empty_like": lambda: (torch.empty_like(q), torch.empty_like(k)),
        "apply_rope_": lambda: apply_rope_(q, k, cos, sin),
        "apply_rope": lambda: apply_rope(q, k, cos, sin),
        "apply_rope_, position_ids": lambda: apply_rope_(q, k, cos, sin, position_ids=ids),
        "apply_rope, position_ids": lambda: apply_rope(q, k, cos, sin, position_ids=ids),
        "apply_rope_, cos_sin_cache and position_ids": lambda: decode.by_ids(step),
        "apply_rope_kv_cache_": lambda: decode.to_cache(step),
        "torch.ops.jitrope.rope_": lambda: torch.ops.jitrope.rope_(q, k, cos, sin, None, None, None, *options),
        "torch.ops.jitrope.rope": lambda: torch.ops.jitrope.rope(q, k, cos, sin, None, None, None, *options),
        "apply_rope, recorded for backward": lambda: apply_rope(leaf, k, cos, sin),
    }
    with torch.no_grad():
        times = {name: host_time(call) for name, call in list(calls.items())[:-1]}
    name, call = list(calls.items())[-1]
    times[name] = host_time(call)
    base = times["x.add_(1)"]
    return [{"call": name, "host us": us, "x add_": us / base} for name, us in times.items()]
