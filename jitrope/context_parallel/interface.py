"""What an attention backend is asked for and gives."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..plan.partition import Mask


class Case(NamedTuple):
    """What the host knows of a rank's attention: all that a backend may be refused for.

    Attributes:
        device, dtype: those of q, k and v.
        heads, kv_heads: of q, and of k and v, in one head group.
        head_dim, head_dim_v: elements of a head of q and k, and of v.
        mask: (left, right): how many keys before and behind its own a query sees; -1: no bound.
        segments: pairs of a chunk's queries and the keys that they see, at most.
        equal: every segment has as many queries, at least one, and as many keys.
        grad: a gradient is asked for.
        lse, max_logit: so are these outputs.
    """

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    mask: Mask = Mask()
    segments: int = 1
    equal: bool = False
    grad: bool = True
    lse: bool = False
    max_logit: bool = False


class Varlen(NamedTuple):
    """Segments of packed queries and keys, with FlashAttention's rules for masks.

    cu_seqlens_q, cu_seqlens_k: int32 offsets (segments + 1). max_q, max_k: no segment is longer. A segment's last
    query stands at its last key. Rows after the last offset belong to no segment.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_q: int
    max_k: int
    mask: Mask
    scale: float


class Result(NamedTuple):
    """out (Tq, Hq, Dv): zero for rows without keys. lse and row_max, the largest logit (Hq, Tq), fp32: -inf for those.

    Both may be None where the case does not ask for them. Rows of no segment are unspecified in all but row_max,
    which is -inf. saved: what `backward` takes besides.
    """

    out: Tensor
    lse: Tensor | None
    row_max: Tensor | None
    saved: tuple[Tensor, ...]


class Backend(Protocol):
    """q (Tq, Hq, D), k (Tk, Hk, D), v (Tk, Hk, Dv), heads in groups that follow one another; see `Varlen`.

    Rows of q and dout without keys may hold anything; rows of k and v of no segment are zero.
    """

    name: str

    def refuses(self, case: Case) -> str | None:
        """Why this case is not for this backend, in words; None: it is."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, case: Case) -> Result:
        """See `Result`."""

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, saved: tuple[Tensor, ...], varlen: Varlen
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv, of the shapes and dtypes of q, k, v; unspecified in rows of no segment."""


def key_ranges(varlen: Varlen, rows: int) -> tuple[Tensor, Tensor]:
    """(low, high): query i sees the keys [low_i, high_i). (rows) each, int32; empty where it sees none."""
    cu_q, cu_k, mask = varlen.cu_seqlens_q, varlen.cu_seqlens_k, varlen.mask
    row = torch.arange(rows, device=cu_q.device, dtype=cu_q.dtype)
    segment = torch.searchsorted(cu_q[1:].contiguous(), row, right=True).clamp(max=len(cu_q) - 2)
    low, high = cu_k[segment], cu_k[segment + 1]
    key = high - (cu_q[segment + 1] - row)  # where the query stands
    if mask.right >= 0:
        high = torch.minimum(high, key + mask.right + 1)
    if mask.left >= 0:
        low = torch.maximum(low, key - mask.left)
    seen = (row < cu_q[-1]) & (low < high)
    return torch.where(seen, low, 0), torch.where(seen, high, 0)


def rows_with_keys(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """0 * NaN is NaN: what rows without keys hold must not get into sums over rows."""
    return torch.where((low < high)[:, None, None], x, 0)
