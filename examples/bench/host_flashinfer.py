"""Layers of Qwen3-32B with FlashInfer's functions for `bench hosts`: with its own kernels, and with jitrope enabled.

FlashInfer has no layers, so they are written here. It does the norms, rope, the write to the paged cache, attention and
the activation; torch has the matrix products. Both sides have the same layers and the same cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from .harness import DEVICE, angles, bf16
from .host_models import Pair, need_gpu, random_weights
from .host_serving import Layers, hosts, pair_of, sizes

KINDS = {"": "", "fp8": " (fp8 cache)", "fused": " (norms, rope and cache)"}
"""Kinds of attention, and the text after the model's name: rope alone; rope, fp8 and the cache; all in one function."""
PLACES = (
    ("rope", "apply_rope_with_cos_sin_cache_inplace"),
    ("rope", "rope_quantize_fp8_append_paged_kv_cache"),
    ("cake_fused_qk_rope_append", "cake_fused_qk_rmsnorm_rope_append_paged_kv_cache"),
)
"""The functions of FlashInfer's modules that a step may call, and that jitrope replaces."""
HEADS, KV_HEADS, HEAD_DIM, PAGE = 64, 8, 128, 16


class Layer(nn.Module):
    """A decoder layer. library: FlashInfer. kind: of attention."""

    def __init__(self, library: Any, kind: str, width: int, wide: int) -> None:
        super().__init__()
        self.library, self.kind = library, kind
        self.qkv = nn.Linear(width, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out, self.up = nn.Linear(HEADS * HEAD_DIM, width, bias=False), nn.Linear(width, 2 * wide, bias=False)
        self.down = nn.Linear(wide, width, bias=False)
        self.before, self.after = (nn.Parameter(torch.ones(width)) for _ in range(2))
        dtype = torch.float32 if kind == "fused" else torch.bfloat16
        for name in ("q_norm", "k_norm"):
            self.register_buffer(name, 1 + 0.1 * torch.randn(HEAD_DIM).to(dtype))
        self.cache: Any = None

    def forward(self, positions: Tensor, x: Tensor, batch: Any, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """The sum before the layer grows in `residual`."""
        fi = self.library
        if residual is None:
            residual, x = x, fi.rmsnorm(x, self.before)
        else:
            fi.fused_add_rmsnorm(x, residual, self.before)
        q = self.stored(positions, self.qkv(x), batch)
        x = self.out(batch.attention.run(q, self.cache).flatten(1))
        fi.fused_add_rmsnorm(x, residual, self.after)
        return self.down(fi.silu_and_mul(self.up(x))), residual

    def stored(self, positions: Tensor, qkv: Tensor, batch: Any) -> Tensor:
        """q with norm and rope; k and v are in the cache then."""
        fi = self.library
        norms: Any = self.q_norm, self.k_norm
        if self.kind == "fused":
            words = {"num_q_heads": HEADS, "num_kv_heads": KV_HEADS, "qk_norm_policy": 2}
            words |= dict(zip(("q_norm_weight", "k_norm_weight"), norms))
            tables = batch.table, batch.lengths, batch.starts, batch.pages
            function = fi.cake_fused_qk_rope_append.cake_fused_qk_rmsnorm_rope_append_paged_kv_cache
            q: Tensor = function(qkv, *tables, *self.cache, **words)
            return q
        *heads, v = qkv.unflatten(-1, (-1, HEAD_DIM)).split((HEADS, KV_HEADS, KV_HEADS), 1)
        q, k = (fi.rmsnorm(x, weight) for x, weight in zip(heads, norms))
        if self.kind == "fp8":
            function = fi.rope.rope_quantize_fp8_append_paged_kv_cache
            given = q, k, None, None, v, batch.table, positions, self.cache
            q, _ = function(*given, batch.indices, batch.indptr, batch.requests, positions, page_size=PAGE)
            return q.bfloat16()  # FlashAttention 2 takes no q in fp8
        fi.rope.apply_rope_with_cos_sin_cache_inplace(positions, q.flatten(1), k.flatten(1), HEAD_DIM, batch.table)
        pages = batch.indices, batch.indptr, batch.last
        fi.append_paged_kv_cache(k, v, batch.requests, positions, self.cache, *pages)
        return q


def batch_of(library: Any, cache_dtype: torch.dtype, batch: int, cached: int, new: int) -> Any:
    """FlashInfer's tables of sequences with cached tokens and new ones, and its plan for attention."""
    length = cached + new
    each = -(-length // PAGE)  # pages of a sequence
    integers = partial(torch.arange, device=DEVICE, dtype=torch.int32)
    theta = angles(length, HEAD_DIM)
    found = SimpleNamespace(
        table=torch.cat((theta.cos(), theta.sin()), -1), pages=integers(batch * each).view(batch, each),
        indices=integers(batch * each), indptr=integers(batch + 1) * each, starts=integers(batch + 1) * new,
        lengths=torch.full((batch,), length, device=DEVICE, dtype=torch.int32),
        requests=integers(batch).repeat_interleave(new), positions=integers(cached, length).repeat(batch),
    )  # fmt: skip
    found.last = found.lengths - (each - 1) * PAGE
    workspace = torch.empty(256 << 20, device=DEVICE, dtype=torch.uint8)
    found.attention = library.BatchPrefillWithPagedKVCacheWrapper(workspace, backend="fa2")
    words = {"causal": True, "q_data_type": torch.bfloat16, "kv_data_type": cache_dtype}
    tables = found.starts, found.indptr, found.indices, found.last
    found.attention.plan(*tables, HEADS, KV_HEADS, HEAD_DIM, PAGE, o_data_type=torch.bfloat16, **words)
    return found


@contextmanager
def pair(decode: bool, kind: str, smoke: bool) -> Iterator[Pair]:
    """Two layers of Qwen3-32B: one token of each of 8 sequences with 1024 earlier ones, or 4096 tokens of one."""
    need_gpu()
    import flashinfer
    import flashinfer.cake_fused_qk_rope_append

    from jitrope.integrations import flashinfer as integration

    width, wide = (64, 96) if smoke else (5120, 25600)
    with torch.device(DEVICE):
        layers: Any = nn.ModuleList(Layer(flashinfer, kind, width, wide) for _ in range(2))
    random_weights(layers)
    shape = sizes(decode, smoke)
    dtype = torch.float8_e4m3fn if kind == "fp8" else torch.bfloat16
    batch = batch_of(flashinfer, dtype, *shape)
    for layer in layers:
        layer.cache = tuple(bf16(batch.pages.numel(), PAGE, KV_HEADS, HEAD_DIM).to(dtype) for _ in range(2))
    words = {"positions": batch.positions, "x": bf16(len(batch.positions), width)}
    places = [(getattr(flashinfer, module), name) for module, name in PLACES]
    with pair_of(integration, places, Layers(layers, nullcontext, (batch,)), words, kind == "fused") as steps:
        yield steps


HOSTS = hosts("flashinfer", "Qwen3-32B's layers", KINDS, pair)
