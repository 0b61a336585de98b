"""The attention backends: their contract, and the choice of one for a call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..base import arguments
from ..base.fit import FLOATS, Fail
from ..thd.shape import Mask
from ..torch_state import is_traced

NAME = "all_gather_attention"  # the name at the beginning of messages

fail = Fail(NAME)
DTYPES: tuple[torch.dtype, ...] = (*FLOATS, torch.float64)
_BLOCK = 128
_MOST_SEGMENTS = 65535  # of FlashAttention 2: the limit of CUDA's second grid axis
_CAPABILITIES: dict[str | None, range] = {"FA3": range(9, 10), "FA4": range(9, 11)}  # major
_aten = torch.ops.aten


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
    """The outputs of `Backend.forward`. Rows of no segment are unspecified in out, and -inf in lse and row_max."""

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
    # Of cu_q[1:] torch 2.11's Inductor reads cu_q.
    segment = (torch.searchsorted(cu_q, row, right=True) - 1).clamp(0, len(cu_q) - 2)
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


class Flash(Backend):
    """torch.ops.aten._flash_attention_forward and _backward: FlashAttention 2, or what is active in its place."""

    name = "flash"

    def reasons(self, case: Case) -> Iterator[tuple[bool, str]]:
        d, d_v, torchs = case.head_dim, case.head_dim_v, torch.nn.attention
        active = getattr(torchs, "current_flash_attention_impl", lambda: None)()
        yield case.device.type != "cuda" or bool(torch.version.hip), f"q is on {case.device}; it needs a CUDA device"
        yield case.dtype not in (torch.float16, torch.bfloat16), f"q is {case.dtype}; allowed are fp16 and bf16"
        yield d % 8 != 0 or d > 256, f"D is {d}; it must be a multiple of 8 up to 256"
        yield d != d_v, f"v has D={d_v} and k D={d}; they must be equal"
        too_many = active is None and case.segments > _MOST_SEGMENTS
        yield too_many, f"there are {case.segments} segments; at most {_MOST_SEGMENTS} are possible"
        yield case.max_logit, "it gives no max_logit"
        if active == "FA4" and (case.mask.left >= 0 or case.mask.right > 0):
            old = not hasattr(torchs._fa4, "_aten_to_fa4_window_size")
            yield old, f"FlashAttention 4 has windows from torch 2.13 on; this is torch {torch.__version__}"
        yield not torch.cuda.is_available(), "there is no CUDA device"
        (major, minor), can = torch.cuda.get_device_capability(case.device), _CAPABILITIES.get(active, range(8, 100))
        allowed = f"allowed are {can[0]} to {can[-1]}"
        yield major not in can, f"the device has compute capability {major}.{minor}; {allowed}"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, case: Case) -> Result:
        lengths, words = _given(varlen)
        out, lse, *state, _ = _aten._flash_attention_forward(q, k, v, *lengths, False, **words)
        reported = None
        if case.lse:  # rows without keys are +inf or -inf here, spare rows anything; the backward needs them unchanged
            spare = torch.arange(len(q), device=q.device) >= varlen.cu_seqlens_q[-1]
            reported = lse.masked_fill(lse.isinf() | spare, -torch.inf)
        return Result(out, reported, None, (lse, *state))

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Result, varlen: Varlen) -> Gradients:
        (lse, *state), (lengths, words), out = result.saved, _given(varlen), result.out
        dq, dk, dv = _aten._flash_attention_backward(dout.contiguous(), q, k, v, out, lse, *lengths, *state, **words)
        return dq, dk, dv


def _given(varlen: Varlen) -> tuple[tuple[Any, ...], dict[str, float]]:
    """The segments, no dropout and whether the mask is causal; and the scale, with the window of another mask.

    For max_q = 1, FlashAttention 2 assumes that no segment is empty and no row is spare, so max_q is at least 2.
    """
    mask, causal = varlen.mask, varlen.mask == Mask(-1, 0)
    window = {} if mask.full or causal else {"window_size_left": mask.left, "window_size_right": mask.right}
    lengths = varlen.cu_seqlens_q, varlen.cu_seqlens_k, max(varlen.max_q, 2), varlen.max_k, 0.0, causal
    return lengths, {"scale": varlen.scale, **window}


class Flex(Backend):
    """torch.nn.attention.flex_attention over ranges of keys: compiled on CUDA; without a backward on CPUs.

    Memory: two numbers for each block of 128 x 128 scores. The backward runs the forward again.
    """

    name = "flex"

    def reasons(self, case: Case) -> Iterator[tuple[bool, str]]:
        on, sizes = case.device.type, (case.head_dim, case.head_dim_v)
        old = not hasattr(_module(), "AuxRequest")
        yield old, f"flex_attention of this torch ({torch.__version__}) has no return_aux"
        yield on not in ("cuda", "cpu"), f"q is on {case.device}; allowed are CUDA and CPU devices"
        if on == "cuda":
            yield case.dtype == torch.float64, "q is torch.float64; allowed are fp32, fp16 and bf16"
            odd = min(sizes) < 16 or max(sizes) > 256
            yield odd, f"the head sizes are {sizes[0]} and {sizes[1]}; they must be from 16 to 256"
        else:
            yield case.grad, "it has no backward on CPUs"
            yield case.max_logit, "it gives no max_logit on CPUs"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, case: Case) -> Result:
        low, high = key_ranges(varlen, len(q))
        q = rows_with_keys(q, low, high)
        out, aux = _flex((q, k, v), low, high, varlen.scale, lse=case.lse, max_scores=case.max_logit)
        row_max = aux.max_scores[0].masked_fill(low >= high, -torch.inf) if case.max_logit else None
        lse = aux.lse[0].float().masked_fill(low >= high, -torch.inf) if case.lse else None
        return Result(out, lse, row_max, ())

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Result, varlen: Varlen) -> Gradients:
        low, high = key_ranges(varlen, len(q))
        inputs = [x.detach().requires_grad_() for x in (rows_with_keys(q, low, high), k, v)]
        with torch.enable_grad():
            again = _flex(inputs, low, high, varlen.scale)[0]
        dq, dk, dv = torch.autograd.grad(again, inputs, rows_with_keys(dout, low, high))
        return dq, dk, dv


def _module() -> Any:
    import torch.nn.attention.flex_attention as module  # imports Dynamo, which cannot trace `cache`

    return module


_compiled = cache(lambda: torch.compile(_module().flex_attention))


def _flex(inputs: Sequence[Tensor], low: Tensor, high: Tensor, scale: float, **wanted: bool) -> tuple[Tensor, Any]:
    """(out (Tq, Hq, Dv), the wanted auxiliary outputs)."""
    q, k, _ = inputs

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= low[query]) & (key < high[query])

    attention = _compiled() if q.is_cuda and not is_traced() else _module().flex_attention
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


class Math(Backend):
    """Plain torch, for any device, dtype, head size and mask. All scores of a KV head are in memory.

    Products and sums are in fp32, or in fp64 for fp64. Memory: a few times Hq / Hk * Tq * Tk numbers.
    """

    name = "math"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, case: Case) -> Result:
        out = q.new_empty(*q.shape[:2], v.shape[2])
        lse, row_max = (torch.empty(q.shape[1], len(q), dtype=torch.float32, device=q.device) for _ in range(2))
        for heads, head, _, (weights, lse[heads], row_max[heads]) in _by_head(q, k, varlen):
            out[:, heads] = torch.einsum("gqk,kd->qgd", weights, _wide(v[:, head]))
        return Result(out, lse, row_max, ())

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Result, varlen: Varlen) -> Gradients:
        dout = rows_with_keys(dout, *key_ranges(varlen, len(q)))
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        for heads, head, queries, (weights, _, _) in _by_head(q, k, varlen):
            given = _wide(dout[:, heads])
            dweights = torch.einsum("qgd,kd->gqk", given, _wide(v[:, head]))
            dscores = weights * (dweights - (weights * dweights).sum(-1, keepdim=True)) * varlen.scale
            dq[:, heads] = torch.einsum("gqk,kd->qgd", dscores, _wide(k[:, head]))
            dk[:, head] = torch.einsum("gqk,qgd->kd", dscores, _wide(queries))
            dv[:, head] = torch.einsum("gqk,qgd->kd", weights, given)
        return dq, dk, dv


def _weights(q: Tensor, k: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """q (Tq, G, D), k (Tk, D) -> softmax (G, Tq, Tk), zero in rows without keys; lse and row_max (G, Tq)."""
    scores = torch.einsum("qgd,kd->gqk", _wide(q) * scale, _wide(k)).masked_fill(~visible, -torch.inf)
    row_max = scores.amax(-1)
    weights = torch.exp(scores - row_max.clamp(min=torch.finfo(scores.dtype).min)[..., None])
    total = weights.sum(-1)
    return weights / torch.where(total == 0, 1, total)[..., None], row_max + total.log(), row_max


def _by_head(q: Tensor, k: Tensor, varlen: Varlen) -> Iterator[Any]:
    """(heads of q, their head of k and v, the queries of these heads, `_weights`) of each head of k."""
    low, high = key_ranges(varlen, len(q))
    key, size, q = torch.arange(len(k), device=q.device), q.shape[1] // k.shape[1], rows_with_keys(q, low, high)
    visible = (key >= low[:, None]) & (key < high[:, None])
    for head in range(k.shape[1]):
        heads = slice(head * size, (head + 1) * size)
        yield heads, head, q[:, heads], _weights(q[:, heads], k[:, head], visible, varlen.scale)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


BACKENDS: dict[str, Backend] = {"flash": Flash(), "flex": Flex(), "math": Math()}


def choose(name: str, case: Case) -> Backend:
    """The backend of that name, or for "auto" the first that accepts the case.

    Raises InvalidInput if there is no such backend, or it refuses the case.
    """
    arguments.word(NAME, "backend", name, ("auto", *BACKENDS))
    if name == "auto":
        names = BACKENDS if case.device.type == "cuda" else ("math",)
        name = next(name for name in names if BACKENDS[name].refuses(case) is None)
    why = BACKENDS[name].refuses(case)
    if why is not None:
        fail(f"backend {name!r} cannot do this: {why}")
    return BACKENDS[name]
