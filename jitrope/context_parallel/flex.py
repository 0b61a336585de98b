"""torch.nn.attention.flex_attention over ranges of keys: compiled on CUDA; without a backward on CPUs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .interface import Backend, Case, Gradients, Result, Varlen, key_ranges, rows_with_keys

_BLOCK = 128


class Flex(Backend):
    """Memory: two numbers for each block of 128 x 128 scores. The backward runs the forward again."""

    name = "flex"

    def refuses(self, case: Case) -> str | None:
        if not hasattr(_module(), "AuxRequest"):
            return f"flex_attention of this torch ({torch.__version__}) has no return_aux"
        sizes = (case.head_dim, case.head_dim_v)
        if case.device.type == "cuda":
            if case.dtype == torch.float64:
                return "q is torch.float64; allowed are fp32, fp16 and bf16"
            if min(sizes) < 16 or max(sizes) > 256:
                return f"the head sizes are {sizes[0]} and {sizes[1]}; they must be from 16 to 256"
            return None
        if case.device.type != "cpu":
            return f"q is on {case.device}; allowed are CUDA and CPU devices"
        if case.grad:
            return "it has no backward on CPUs"
        return "it gives no max_logit on CPUs" if case.max_logit else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, case: Case) -> Result:
        low, high = key_ranges(varlen, len(q))
        q = rows_with_keys(q, low, high)
        out, aux = _attend((q, k, v), low, high, varlen.scale, lse=case.lse, max_scores=case.max_logit)
        row_max = aux.max_scores[0].masked_fill(low >= high, -torch.inf) if case.max_logit else None
        lse = aux.lse[0].float().masked_fill(low >= high, -torch.inf) if case.lse else None
        return Result(out, lse, row_max, ())

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Result, varlen: Varlen) -> Gradients:
        low, high = key_ranges(varlen, len(q))
        inputs = [x.detach().requires_grad_() for x in (rows_with_keys(q, low, high), k, v)]
        with torch.enable_grad():
            again = _attend(inputs, low, high, varlen.scale)[0]
        dq, dk, dv = torch.autograd.grad(again, inputs, rows_with_keys(dout, low, high))
        return dq, dk, dv


@cache
def _module() -> Any:
    from torch.nn.attention import flex_attention

    return flex_attention


@cache
def _compiled() -> Any:
    return torch.compile(_module().flex_attention)


def _attend(inputs: Sequence[Tensor], low: Tensor, high: Tensor, scale: float, **wanted: bool) -> tuple[Tensor, Any]:
    """(out (Tq, Hq, Dv), the wanted auxiliary outputs)."""
    q, k, _ = inputs

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= low[query]) & (key < high[query])

    attention = _compiled() if q.is_cuda else _module().flex_attention
    out, aux = attention(
        *(x.transpose(0, 1)[None] for x in inputs),
        block_mask=_block_mask(low, high, len(k), visible),
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=_module().AuxRequest(**wanted),
    )
    return out[0].transpose(0, 1), aux


def _block_mask(low: Tensor, high: Tensor, keys: int, visible: Any) -> Any:
    """The blocks with some visible scores, and those with only visible scores. Does not wait for the device."""
    pad = -len(low) % _BLOCK
    lows, highs = (torch.nn.functional.pad(x, (0, pad)).view(-1, _BLOCK) for x in (low, high))
    seen = lows < highs
    first = torch.where(seen, lows, keys).amin(1, keepdim=True)
    last = torch.where(seen, highs, 0).amax(1, keepdim=True)
    start = torch.arange(0, max(keys, 1), _BLOCK, device=low.device)
    some = (first < start + _BLOCK) & (last > start)
    whole = (lows.amax(1, keepdim=True) <= start) & (highs.amin(1, keepdim=True) >= start + _BLOCK)
    return _module().BlockMask.from_kv_blocks(
        *_ordered(some & ~whole), *_ordered(whole), BLOCK_SIZE=_BLOCK, mask_mod=visible, seq_lengths=(len(low), keys)
    )


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """(set blocks of each row, their columns before all others): (1, 1, rows) and (1, 1, rows, columns), int32."""
    order = blocks.int().argsort(dim=1, descending=True, stable=True)
    return blocks.sum(1).int()[None, None], order.int()[None, None]
