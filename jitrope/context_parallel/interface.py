"""The contract of an attention backend."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..ops.fit import failing
from ..plan.partition import Mask

NAME = "all_gather_attention"  # the name at the beginning of messages

fail = failing(NAME)


class Case(NamedTuple):
    """The parts of a rank's attention that are known without the GPU. A backend may refuse a case."""

    device: torch.device
    dtype: torch.dtype
    heads: int  # of q in one head group
    kv_heads: int  # of k and v
    head_dim: int  # elements of a head of q and k
    head_dim_v: int
    mask: Mask = Mask()
    segments: int = 1  # the most there may be; one is a chunk's queries and the keys that they see
    equal: bool = False  # all segments have as many queries, at least one, and as many keys
    grad: bool = True  # gradients are wanted, and these outputs:
    lse: bool = False
    max_logit: bool = False


class Varlen(NamedTuple):
    """Segments of packed queries and keys, with FlashAttention's rules for masks.

    The last query of a segment is at the position of its last key. Rows after the last offset belong to no segment.
    """

    cu_seqlens_q: Tensor  # int32 offsets (segments + 1)
    cu_seqlens_k: Tensor
    max_q: int  # at least the longest segment
    max_k: int
    mask: Mask
    scale: float


class Result(NamedTuple):
    """The outputs of `Backend.forward`. Rows of no segment are unspecified, except in row_max, where they are -inf."""

    out: Tensor  # (Tq, Hq, Dv), zero for rows without keys
    lse: Tensor | None  # (Hq, Tq), fp32, -inf for rows without keys; None if the case does not need it
    row_max: Tensor | None  # the same of the largest logit
    saved: tuple[Tensor, ...]  # more tensors for `Backend.backward`


Gradients = tuple[Tensor, Tensor, Tensor]  # dq, dk and dv


class Backend(Protocol):
    """Attention over segments: q (Tq, Hq, D), k (Tk, Hk, D), v (Tk, Hk, Dv). Each head of k has Hq / Hk heads of q.

    Rows of q and dout without keys may have any content. Rows of k and v of no segment are zero.
    """

    name: str

    def refuses(self, case: Case) -> str | None:
        """Return the reason why the backend cannot do this case, or None if it can."""
        return next((why for holds, why in self.reasons(case) if holds), None)

    def reasons(self, case: Case) -> Iterable[tuple[bool, str]]:
        """(whether it holds, the text) of each reason to refuse a case. None is asked after one that holds."""
        return ()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, case: Case) -> Result:
        """Compute the attention; see `Result`."""

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Result, varlen: Varlen) -> Gradients:
        """Return dq, dk and dv with the shapes and dtypes of q, k and v. Rows of no segment are unspecified."""


def key_ranges(varlen: Varlen, rows: int) -> tuple[Tensor, Tensor]:
    """(low, high), each (rows), int32: query i sees the keys [low_i, high_i), which may be none."""
    cu_q, cu_k, mask = varlen.cu_seqlens_q, varlen.cu_seqlens_k, varlen.mask
    row = torch.arange(rows, device=cu_q.device, dtype=cu_q.dtype)
    segment = torch.searchsorted(cu_q[1:].contiguous(), row, right=True).clamp(max=len(cu_q) - 2)
    low, high = cu_k[segment], cu_k[segment + 1]
    key = high - (cu_q[segment + 1] - row)  # at the position of the query
    if mask.right >= 0:
        high = torch.minimum(high, key + mask.right + 1)
    if mask.left >= 0:
        low = torch.maximum(low, key - mask.left)
    seen = (row < cu_q[-1]) & (low < high)
    return torch.where(seen, low, 0), torch.where(seen, high, 0)


def rows_with_keys(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return x with zeros in rows without keys, because such rows may be NaN, and 0 * NaN is NaN."""
    return torch.where((low < high)[:, None, None], x, 0)
