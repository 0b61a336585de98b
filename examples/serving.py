"""How a server calls jitrope: functions of vLLM, SGLang and FlashInfer in their own signatures, and a served model.

python examples/serving.py [--layers 4] [--batch 8] [--steps 64]    # fewer without a GPU

First each function is compared with its published formula in plain torch. A server with fused kernels of its own gains
little by them, and an eager decode step may lose, because the CPU works longer.

Then a tiny Llama with random weights continues prompts of random lengths. One launch a layer rotates q and k and stores
k and v in a paged cache. Positions, slots and tokens are updated on the device, so on a GPU one captured CUDA graph
serves for every token. The last row of the batch is idle: its slots are negative, so nothing is stored. A plain model
without a cache then reads the text, and its hidden states must be the same up to rounding.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import jitrope
from jitrope import DynamicQuantize, KVCache, Norm, Pages, Quantize, tables

FP8 = torch.float8_e4m3fn


# ---- functions of servers, of T tokens. Rows of cos_sin_cache: the cosines of the pairs, then their sines ------------


def rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor | None, head_size: int, cos_sin_cache: Tensor, is_neox: bool
) -> None:
    """Rope of (T, H * head_size) in place: vLLM's `_custom_ops`, SGLang's `kernels.ops.attention.rope`."""
    q, k = (x if x is None else x.view(len(positions), -1, head_size) for x in (query, key))
    words = {"positions": positions, "interleaved": not is_neox, "layout": "thd"}
    jitrope.apply_rope(q, k, cos_sin_cache=cos_sin_cache, inplace=True, **words)


def fused_qknorm_rope_cache(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos_sin_cache: Tensor, positions: Tensor, slot_mapping: Tensor,
    key_cache: Tensor, value_cache: Tensor, num_q_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int,
    eps: float, norm_weight_bias: float = 0.0, kv_cache_dtype: str = "auto", k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """RMSNorm, rope of halves and the write to pages, (pages, rows, H, head_dim): vLLM's `_custom_ops`."""
    counts = num_q_heads, num_kv_heads, num_kv_heads
    q, k, v = qkv.clone().unflatten(-1, (-1, head_dim)).split(counts, 1)
    norm = Norm(q_weight, k_weight, eps=eps, zero_centered=norm_weight_bias == 1.0, rounding="once")
    scales = {} if kv_cache_dtype == "auto" else {"k_scale": k_scale, "v_scale": v_scale}
    cache = KVCache(key_cache, value_cache, slot_mapping, rotate_k=True, **scales)
    words = {"positions": positions, "rotary_dim": rotary_dim, "layout": "thd", "inplace": True}
    q, k, v = jitrope.prepare_qkv(q, k, v, cos_sin_cache=cos_sin_cache, norm=norm, cache=cache, **words)
    return q.flatten(1), k.flatten(1), v.flatten(1)


def rope_quantize_fp8_append_paged_kv_cache(
    q_rope: Tensor, k_rope: Tensor, q_nope: Tensor | None, k_nope: Tensor | None, v: Tensor, cos_sin_cache: Tensor,
    pos_ids: Tensor, paged_kv_cache: tuple[Tensor, Tensor], kv_indices: Tensor, kv_indptr: Tensor,
    batch_indices: Tensor, positions: Tensor, is_neox: bool = True, quantize_dtype: torch.dtype | None = None,
    quant_scale_q: float = 1.0, quant_scale_kv: float = 1.0, page_size: int = 16, kv_layout: str = "NHD",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rope, fp8 and the write to pages, of heads in two parts: FlashInfer's `rope`, without MLA and outputs."""
    q, k = (x if rest is None else torch.cat((x, rest), -1) for x, rest in ((q_rope, q_nope), (k_rope, k_nope)))
    k_cache, v_cache = (x if kv_layout == "NHD" else x.transpose(1, 2) for x in paged_kv_cache)
    pages = Pages(kv_indices, kv_indptr, batch_indices=batch_indices, cache_positions=positions)
    cache = KVCache(k_cache, v_cache, pages, k_scale=1 / quant_scale_kv, v_scale=1 / quant_scale_kv)
    words = {"positions": pos_ids, "interleaved": not is_neox, "rotary_dim": q_rope.shape[-1], "layout": "thd"}
    quantize = Quantize(1 / quant_scale_q, dtype=quantize_dtype or FP8)
    q, _, _ = jitrope.prepare_qkv(q, k, v, cos_sin_cache=cos_sin_cache, quantize=quantize, cache=cache, **words)
    return q[..., : q_rope.shape[-1]], q[..., q_rope.shape[-1] :]


def fused_indexer_q_rope_quant(
    positions: Tensor, q: Tensor, cos_sin_cache: Tensor, weights: Tensor, softmax_scale: float, head_scale: float,
    is_neox: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """DeepSeek's indexer: rope and fp8 of q (T, H, 128); weights times its scales: vLLM's `sparse_attn_indexer`."""
    words = {"positions": positions, "interleaved": not is_neox, "layout": "thd"}
    factors = weights.float() * (softmax_scale * head_scale)
    words["quantize"] = DynamicQuantize(scale_fmt="ue8m0", q_weights=factors)
    (values, weighted), _, _ = jitrope.prepare_qkv(q, None, None, cos_sin_cache=cos_sin_cache, **words)
    return values, weighted


def fused_k_indexer_norm_rope_cache(
    k_input: Tensor, weight: Tensor, bias: Tensor, eps: float, cos_sin_cache: Tensor, positions: Tensor,
    kv_cache: Tensor, slot_mapping: Tensor,
) -> None:  # fmt: skip
    """DeepSeek's indexer: LayerNorm, rope, fp8 and the write of k (T, 128).

    This is SGLang's `fused_k_indexer_norm_rope`, then vLLM's `indexer_k_quant_and_cache`: a page of kv_cache, (pages,
    rows, 132) in uint8, has the values of all its rows, then their scales.
    """
    rows = kv_cache.shape[1]
    values, scales = kv_cache.flatten(1).split([rows * 128, rows * 4], 1)
    values = values.view(FP8).unflatten(1, (rows, 1, 128))
    scales = scales.view(torch.float32).unflatten(1, (rows, 1, 1))
    cache = KVCache(values, None, slot_mapping, k_block_scale=scales, scale_fmt="ue8m0")
    norm = Norm(k_weight=weight, k_bias=bias, kind="layer_norm", eps=eps, of="k")
    words = {"positions": positions, "interleaved": True, "layout": "thd", "norm": norm, "cache": cache}
    k, quantize = k_input[:, None], DynamicQuantize(scale_fmt="ue8m0")
    jitrope.prepare_qkv(k[:, :0], k, None, cos_sin_cache=cos_sin_cache, quantize=quantize, **words)  # no head of q


def concat_and_cache_mla_rope_fused(
    positions: Tensor, q_pe: Tensor, k_pe: Tensor, kv_c: Tensor, cos_sin_cache: Tensor, is_neox: bool,
    slot_mapping: Tensor, kv_cache: Tensor, kv_cache_dtype: str, kv_cache_scale: Tensor,
) -> None:  # fmt: skip
    """Rope of q_pe and k_pe in place, and the write of rows [kv_c | k_pe]: vLLM's `_custom_ops`, for MLA."""
    size, width = kv_c.shape[-1], k_pe.shape[-1]
    latent, c_kv = kv_cache[..., :size].unflatten(-1, (-1, width)), kv_c.unflatten(-1, (-1, width))
    scales = {} if kv_cache_dtype == "auto" else {"k_scale": kv_cache_scale, "v_scale": kv_cache_scale}
    cache = KVCache(kv_cache[..., None, size:], latent, slot_mapping, rotate_k=True, **scales)
    words = {"positions": positions, "interleaved": not is_neox, "layout": "thd", "inplace": True}
    jitrope.prepare_qkv(q_pe, k_pe.view(-1, 1, width), c_kv, cos_sin_cache=cos_sin_cache, cache=cache, **words)


# ---- their formulas, in plain torch ----------------------------------------------------------------------------------


def turned(x: Tensor, rows: Tensor, is_neox: bool) -> Tensor:
    """x (T, H, D) in fp32, the first R elements of its heads rotated by rows (T, R) of the table."""
    cos, sin = rows[:, None].chunk(2, -1)
    first, rest = x.float().tensor_split([rows.shape[-1]], -1)
    a, b = first.chunk(2, -1) if is_neox else (first[..., ::2], first[..., 1::2])
    pairs = a * cos - b * sin, b * cos + a * sin
    return torch.cat((torch.cat(pairs, -1) if is_neox else torch.stack(pairs, -1).flatten(-2), rest), -1)


def in_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """(Values, scales (T, H)), whose scales are powers of two."""
    scales = torch.exp2((x.abs().amax(-1) / 448).log2().ceil())
    return (x / scales[..., None]).to(FP8), scales


def check_functions(device: str, t: int = 9, heads: int = 4, kv_heads: int = 2, dim: int = 128) -> None:
    """Call each function with random tensors of t tokens, and compare."""
    table = tables.cos_sin_cache(50, tables.inv_freq(rotary_dim=64, device=device)[0])
    positions, slots = torch.randint(50, (t,), device=device), torch.randperm(64, device=device)[:t]
    rows, one = table[positions], torch.ones(1, device=device)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device)

    def say(name: str, *pairs: tuple[Tensor, Tensor]) -> None:
        for got, want in pairs:  # a value between two of fp8 may be rounded up or down
            a, b, step = got.float(), want.float(), 0.13 if got.dtype == FP8 else 1e-4
            right = torch.allclose(a, b, rtol=step, atol=1e-4) and float((a - b).norm() / b.norm()) < 1e-2
            assert right, f"{name} differs from its formula"
        print(f"{name}: its formula's results: yes")

    q, k, v = random(t, heads, dim), random(t, kv_heads, dim), random(t, kv_heads, dim)
    got = q.flatten(1).clone(), k.flatten(1).clone()
    rotary_embedding(positions, *got, dim, table, True)
    say("rotary_embedding", *((x, turned(y, rows, True).flatten(1)) for x, y in zip(got, (q, k))))

    weights, caches = (random(dim), random(dim)), random(2, 4, 16, kv_heads, dim)
    qkv, sizes = torch.cat((q, k, v), 1).flatten(1), (heads, kv_heads, dim, 64, 1e-6)
    got = fused_qknorm_rope_cache(qkv, *weights, table, positions, slots, *caches, *sizes)
    want = [turned(F.rms_norm(x, (dim,), w, 1e-6), rows, True) for x, w in zip((q, k), weights)] + [v]
    stored = [(cache.flatten(0, 1)[slots], x) for cache, x in zip(caches, want[1:])]
    say("fused_qknorm_rope_cache", *((x, y.flatten(1)) for x, y in zip(got, want)), *stored)

    pages = torch.tensor([3, 1, 2], device=device), torch.tensor([0, 2, 3], device=device)  # of two requests
    requests, places = torch.arange(t, device=device) % 2, torch.arange(t, device=device)
    fp8 = tuple(torch.zeros(2, 4, 16, kv_heads, dim, device=device).to(FP8))
    parts = (q[..., :64], k[..., :64], q[..., 64:], k[..., 64:], v)
    given = *parts, table, positions, fp8, *pages, requests, places
    got = rope_quantize_fp8_append_paged_kv_cache(*given, quant_scale_q=20.0, quant_scale_kv=10.0)
    want = [x * n for x, n in ((turned(q, rows, True), 20.0), (turned(k, rows, True), 10.0), (v, 10.0))]
    page = pages[0][pages[1][requests] + places // 16]
    stored = [(x.view(torch.uint8)[page, places % 16].view(FP8), y.to(FP8)) for x, y in zip(fp8, want[1:])]
    say("rope_quantize_fp8_append_paged_kv_cache", (torch.cat(got, -1), want[0].to(FP8)), *stored)

    of_heads = random(t, heads)
    got = fused_indexer_q_rope_quant(positions, q, table, of_heads, 0.1, 0.5, False)
    values, scales = in_fp8(turned(q, rows, False))
    say("fused_indexer_q_rope_quant", (got[0], values), (got[1], of_heads * scales * 0.05))

    index, bias = torch.zeros(4, 16, 132, device=device, dtype=torch.uint8), random(dim)
    fused_k_indexer_norm_rope_cache(k[:, 0], weights[0], bias, 1e-6, table, positions, index, slots)
    normed = F.layer_norm(k[:, :1], (dim,), weights[0], bias, 1e-6)
    values, scales = in_fp8(turned(normed, rows, False))
    kept, of_kept = index.flatten(1).split([16 * 128, 16 * 4], 1)
    kept = kept.unflatten(1, (16, 128)).flatten(0, 1)[slots].view(FP8)
    of_kept = of_kept.contiguous().view(torch.float32).flatten()[slots]
    say("fused_k_indexer_norm_rope_cache", (kept, values[:, 0]), (of_kept, scales[:, 0]))

    q_pe, k_pe, kv_c, cache = random(t, heads, 64), random(t, 64), random(t, 512), random(4, 16, 576)
    want = turned(q_pe, rows, False), turned(k_pe[:, None], rows, False)[:, 0]
    concat_and_cache_mla_rope_fused(positions, q_pe, k_pe, kv_c, table, False, slots, cache, "auto", one)
    stored = cache.flatten(0, 1)[slots], torch.cat((kv_c, want[1]), -1)
    say("concat_and_cache_mla_rope_fused", (q_pe, want[0]), (k_pe, want[1]), stored)


# ---- a served model --------------------------------------------------------------------------------------------------

HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 8, 2, 64, 512
PAGE, PROMPT = 16, 40  # tokens of a page, the longest prompt
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q, k, v), each (B, S, heads, D) and not rotated yet -> (B, S, HEADS, D)"""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        hidden = HEADS * HEAD_DIM
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))
        self.qkv = nn.Linear(hidden, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        nn.init.normal_(self.qkv.weight, std=1.5 * hidden**-0.5)  # so that positions matter
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, 2 * hidden, bias=False), nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, x: Tensor, index: int, attend: Attend) -> Tensor:
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (-1, HEAD_DIM))
        x = x + self.out(attend(index, *qkv.split((HEADS, KV_HEADS, KV_HEADS), -2)).flatten(-2))
        return x + self.down(F.silu(self.up(self.norms[1](x))))


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HEADS * HEAD_DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.RMSNorm(HEADS * HEAD_DIM)

    def forward(self, tokens: Tensor, attend: Attend) -> Tensor:
        x = self.embedding(tokens)
        for index, layer in enumerate(self.layers):
            x = layer(x, index, attend)
        return self.norm(x)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    return y.transpose(1, 2)


class Server:
    """Rows of text that grow together, each with pages of its own, anywhere in the cache."""

    def __init__(self, model: Model, lengths: Tensor, longest: int, table: Tensor) -> None:
        device, dtype = table.device, model.norm.weight.dtype
        batch, pages = len(lengths), -(-longest // PAGE)
        self.model, self.table = model, table
        shape = (2, len(model.layers), batch * pages, PAGE, KV_HEADS, HEAD_DIM)
        self.k_caches, self.v_caches = torch.zeros(shape, device=device, dtype=dtype)
        self.page_table = torch.randperm(batch * pages, device=device).view(batch, pages)
        # What a step reads and changes, all on the device.
        self.lengths = lengths  # of the prompts; 0: an idle row
        self.positions = lengths.clone()  # of the token to come
        self.text = torch.zeros(batch, longest + 1, device=device, dtype=torch.long)
        self.hidden = torch.zeros(batch, longest, HEADS * HEAD_DIM, device=device, dtype=dtype)
        self.index, self.rows = torch.arange(pages * PAGE, device=device), torch.arange(batch, device=device)

    def run(self, tokens: Tensor, positions: Tensor, present: Tensor) -> Tensor:
        """Hidden states of tokens (B, S) at these positions, which are cached where they are present."""
        slots = (self.page_table.gather(1, positions // PAGE) * PAGE + positions % PAGE).masked_fill(~present, -1)
        mask = (self.index <= positions[..., None])[:, None]  # (B, 1, S, pages x PAGE): causal, of one row's pages

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            caches = self.k_caches[layer], self.v_caches[layer]
            words = {"positions": positions, "cache": KVCache(*caches, slots), "inplace": True}
            jitrope.prepare_qkv(q, k, v, cos_sin_cache=self.table, **words)
            return sdpa(q, *(cache[self.page_table].flatten(1, 2) for cache in caches), mask)  # each row's pages

        return self.model(tokens, attend)

    def prefill(self, prompts: Tensor) -> None:
        positions = torch.arange(prompts.shape[1], device=prompts.device).expand_as(prompts)
        self.hidden[:, : prompts.shape[1]] = self.run(prompts, positions, positions < self.lengths[:, None])
        self.text[:, : prompts.shape[1]] = prompts
        self.choose(self.hidden[self.rows, (self.lengths - 1).clamp(min=0)])

    def step(self) -> None:
        """One more token for each row; nothing in here waits for the device or depends on the host."""
        tokens, positions = self.text[self.rows, self.positions][:, None], self.positions[:, None]
        hidden = self.run(tokens, positions, self.lengths[:, None] > 0)[:, 0]
        self.hidden[self.rows, self.positions] = hidden
        self.positions += self.lengths > 0
        self.choose(hidden)

    def choose(self, hidden: Tensor) -> None:
        """The next token of each row."""
        self.text[self.rows, self.positions] = (hidden @ self.model.embedding.weight.T).argmax(-1)


def check(server: Server, tolerance: float) -> str:
    """The text and its hidden states against the model without cache, by eager torch's rope."""
    text, table = server.text[:, :-1], server.table

    def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(*(turned(x, table, True).to(x.dtype) for x in (q, k)), v, None)

    want, index = server.model(text, attend), torch.arange(text.shape[1], device=text.device)
    known = index < server.positions[:, None]
    error = float((server.hidden[known] - want[known]).float().norm() / want[known].float().norm())
    assert error < tolerance, f"hidden states differ by {error:.2g} of their size"
    return f"hidden states within {error:.1g} of the plain model's: yes"


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    gpu = torch.cuda.is_available()
    parser.add_argument("--layers", type=int, default=4 if gpu else 2)
    parser.add_argument("--batch", type=int, default=8 if gpu else 4, help="rows, one of them idle")
    parser.add_argument("--steps", type=int, default=64 if gpu else 20)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    device, dtype, tolerance = ("cuda", torch.bfloat16, 0.03) if gpu else ("cpu", torch.float32, 1e-4)
    check_functions(device)

    model = Model(arguments.layers).to(device, dtype)
    longest, inv_freq = PROMPT + arguments.steps, tables.inv_freq(rotary_dim=HEAD_DIM, device=device)[0]
    table = tables.cos_sin_cache(longest, inv_freq)  # one for all layers
    lengths = torch.randint(1, PROMPT + 1, (arguments.batch,), device=device)
    lengths[-1] = 0
    server = Server(model, lengths, longest, table)
    server.prefill(torch.randint(VOCABULARY, (arguments.batch, PROMPT), device=device))

    server.step()  # compiles
    step, how = server.step, "step by step"
    if gpu:
        graph, how = torch.cuda.CUDAGraph(), "in a CUDA graph"
        with torch.cuda.graph(graph):
            server.step()
        step = graph.replay
    for _ in range(arguments.steps - 1):
        step()
    print(f"a served model, {how}: {check(server, tolerance)}")


if __name__ == "__main__":
    main()
