"""FlashAttention 2, 3 and 4 and cuDNN, through torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..plan.partition import Mask
from .interface import Backend, Case, Gradients, Result, Varlen


@dataclass(frozen=True)
class Flash(Backend):
    """torch.ops.aten._flash_attention_forward and _backward, with the implementation that is active in torch.

    impl: its name in torch.nn.attention; None: torch's own. module: its package. capabilities: major compute
    capabilities of supported devices. max_segments: None: no limit.
    """

    name: str
    impl: str | None
    module: str
    capabilities: range
    max_segments: int | None = None

    def refuses(self, case: Case) -> str | None:
        most = self.max_segments
        many = most is not None and case.segments > most
        own = (
            (many, f"there are {case.segments} segments; at most {most} are possible"),
            (case.max_logit, "it gives no max_logit"),
        )
        return _refuses(case, 256, own) or self._refuses_impl(case) or _refuses_device(case, self.capabilities)

    def _refuses_impl(self, case: Case) -> str | None:
        wanted, active = self.impl, active_impl()
        if wanted == active:
            windowed = case.mask.left >= 0 or case.mask.right > 0
            if wanted != "FA4" or not windowed or hasattr(torch.nn.attention._fa4, "_aten_to_fa4_window_size"):
                return None
            return f"it has windows from torch 2.13 on; this is torch {torch.__version__}"
        if wanted is None:
            return f"torch has {active} active in its place; pass {'flash' + str(active)[2:]!r}"
        if not hasattr(torch.nn.attention, "activate_flash_attention_impl"):
            return f"this torch ({torch.__version__}) has no registry of FlashAttention implementations"
        if not _installed(self.module):
            return f"the module {self.module} is not installed"
        return f"it is not active; call torch.nn.attention.activate_flash_attention_impl({wanted!r})"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, case: Case) -> Result:
        out, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, *_lengths(varlen), False, **_words(varlen)
        )
        # Rows without keys are +inf or -inf here, and the backward needs them unchanged.
        reported = torch.where(lse.isinf(), -torch.inf, lse) if case.lse else None
        return Result(out, reported, None, (lse, state, unused))

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Result, varlen: Varlen) -> Gradients:
        lse, *state = result.saved
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            dout.contiguous(), q, k, v, result.out, lse, *_lengths(varlen), *state, **_words(varlen)
        )
        return dq, dk, dv


class Cudnn(Backend):
    """torch.ops.aten._scaled_dot_product_cudnn_attention and its backward.

    It needs full masks, because its causal mask counts from the first key. It needs sequences of one length, because
    torch's backward for packed sequences uses the head size as the longest length (pytorch/pytorch#186142), which gives
    a wrong dq in torch 2.11.
    """

    name = "cudnn"

    def refuses(self, case: Case) -> str | None:
        own = (
            (not case.mask.full, "it has full masks only: its causal mask counts from the first key"),
            (not case.equal, "sequences may be empty or of different lengths; it takes fixed-length batches only"),
            (case.heads != case.kv_heads, f"q has H={case.heads} and k H={case.kv_heads}; they must be equal"),
            (case.lse or case.max_logit, "it gives neither lse nor max_logit"),
        )
        return _refuses(case, 128, own) or _refuses_device(case, range(9, 100))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, case: Case) -> Result:
        out, lse, *_, seed, offset, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *(_batched(x, varlen) for x in (q, k, v)), None, True, 0.0, False, False, scale=varlen.scale
        )
        return Result(_packed(out), None, None, (lse, seed, offset))

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Result, varlen: Varlen) -> Gradients:
        dout, q, k, v, out = (_batched(x, varlen) for x in (dout.contiguous(), q, k, v, result.out))
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, *result.saved, None, None, None, q.shape[2], k.shape[2], 0.0, False, scale=varlen.scale
        )
        return _packed(dq), _packed(dk), _packed(dv)


def _batched(x: Tensor, varlen: Varlen) -> Tensor:
    """Packed rows of equal segments (T, H, D) as (B, H, S, D)."""
    return x.view(len(varlen.cu_seqlens_q) - 1, -1, *x.shape[1:]).transpose(1, 2)


def _packed(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(0, 1)


def active_impl() -> str | None:
    """The active implementation in place of torch's own FlashAttention, or None."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return current() if current else None


def _refuses(case: Case, most: int, own: Iterable[tuple[bool, str]]) -> str | None:
    """The first reason to refuse: a common one, or one of a backend's own. most: the largest D."""
    d, d_v = case.head_dim, case.head_dim_v
    on_gpu = case.device.type == "cuda" and not torch.version.hip
    reasons = (
        (not on_gpu, f"q is on {case.device}; it needs a CUDA device"),
        (case.dtype not in (torch.float16, torch.bfloat16), f"q is {case.dtype}; allowed are fp16 and bf16"),
        (d % 8 != 0 or d > most, f"D is {d}; it must be a multiple of 8 up to {most}"),
        (d != d_v, f"v has D={d_v} and k D={d}; they must be equal"),
    )
    return next((why for holds, why in (*reasons, *own) if holds), None)


def _refuses_device(case: Case, capabilities: range) -> str | None:
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    major, minor = torch.cuda.get_device_capability(case.device)
    if major in capabilities:
        return None
    return f"the device has compute capability {major}.{minor}; allowed are {capabilities[0]} to {capabilities[-1]}"


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package is not installed
        return False


def _lengths(varlen: Varlen) -> tuple[Any, ...]:
    """The segments, no dropout, and whether the mask is causal.

    For max_q = 1, FlashAttention 2 assumes that no segment is empty and no row is spare, so max_q is at least 2.
    """
    return varlen.cu_seqlens_q, varlen.cu_seqlens_k, max(varlen.max_q, 2), varlen.max_k, 0.0, varlen.mask == Mask(-1, 0)


def _words(varlen: Varlen) -> dict[str, float]:
    if varlen.mask.full or varlen.mask == Mask(-1, 0):
        return {"scale": varlen.scale}
    return {"scale": varlen.scale, "window_size_left": varlen.mask.left, "window_size_right": varlen.mask.right}
