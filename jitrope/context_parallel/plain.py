"""Attention in plain torch, for any device, dtype, head size and mask. All scores of a KV head are in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from .interface import Backend, Case, Gradients, Result, Varlen, key_ranges, rows_with_keys


class Math(Backend):
    """Products and sums are in fp32, or in fp64 for fp64. Memory: a few times Hq / Hk * Tq * Tk numbers."""

    name = "math"

    def refuses(self, case: Case) -> str | None:
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, case: Case) -> Result:
        low, high = key_ranges(varlen, len(q))
        visible, q = _visible(low, high, len(k)), rows_with_keys(q, low, high)
        out = q.new_empty(*q.shape[:2], v.shape[2])
        lse, row_max = (torch.empty(q.shape[1], len(q), dtype=torch.float32, device=q.device) for _ in range(2))
        for heads, head in _head_groups(q, k):
            parts = [_wide(x) for x in (q[:, heads], k[:, head], v[:, head])]
            out[:, heads], lse[heads], row_max[heads] = _attend(parts, visible, varlen.scale)
        return Result(out, lse, row_max, ())

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Result, varlen: Varlen) -> Gradients:
        low, high = key_ranges(varlen, len(q))
        visible, q, dout = _visible(low, high, len(k)), *(rows_with_keys(x, low, high) for x in (q, dout))
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        for heads, head in _head_groups(q, k):
            inputs = [_wide(x.detach()).requires_grad_() for x in (q[:, heads], k[:, head], v[:, head])]
            with torch.enable_grad():
                part = _attend(inputs, visible, varlen.scale)[0]
            gradients = torch.autograd.grad(part, inputs, _wide(dout[:, heads]))
            dq[:, heads], dk[:, head], dv[:, head] = gradients
        return dq, dk, dv


def _attend(inputs: list[Tensor], visible: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """q (Tq, G, D), k (Tk, D), v (Tk, Dv) -> out (Tq, G, Dv), lse (G, Tq), row_max (G, Tq)."""
    q, k, v = inputs
    scores = torch.einsum("qgd,kd->gqk", q * scale, k).masked_fill(~visible, -torch.inf)
    row_max = scores.detach().amax(-1)
    weights = torch.exp(scores - row_max.clamp(min=torch.finfo(scores.dtype).min)[..., None])
    total = weights.sum(-1)
    out = torch.einsum("gqk,kd->qgd", weights / torch.where(total == 0, 1, total)[..., None], v)
    return out, row_max + total.log(), row_max


def _visible(low: Tensor, high: Tensor, keys: int) -> Tensor:
    """(Tq, Tk) bool."""
    key = torch.arange(keys, device=low.device)
    return (key >= low[:, None]) & (key < high[:, None])


def _head_groups(q: Tensor, k: Tensor) -> list[tuple[slice, int]]:
    """(heads of q, head of k and v)."""
    size = q.shape[1] // k.shape[1]
    return [(slice(head * size, (head + 1) * size), head) for head in range(k.shape[1])]


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
