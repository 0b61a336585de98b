"""Decoding with a paged KV cache: one launch a layer rotates q and k and stores k and v; a step is a CUDA graph.

python examples/serving.py [--layers 4] [--batch 8] [--steps 64] [--device cuda] [--fp8]    # fewer on a CPU

A tiny Llama with random weights continues prompts of random lengths. Positions, slots and tokens are updated on the
device, so one captured step serves for every token. The last row of the batch is idle: its slots are negative, so
nothing is stored. Afterwards a plain model without a cache reads the text. Its hidden states must be the same up to
rounding, and it must choose the same tokens. A CPU runs this without a graph and prints no times. --fp8 keeps the cache
in 8 bits.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import jitrope
from jitrope import tables

HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 8, 2, 64, 512
PAGE, PROMPT, SCALE = 16, 40, 0.05  # tokens of a page, the longest prompt, what one unit of an fp8 cache stands for
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

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.embedding.weight.T


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    return y.transpose(1, 2)


class Server:
    """Rows of text that grow together, each with pages of its own, anywhere in the cache."""

    def __init__(self, model: Model, lengths: Tensor, longest: int, table: Tensor, fp8: bool) -> None:
        device, dtype = table.device, model.norm.weight.dtype
        batch, pages = len(lengths), -(-longest // PAGE)
        self.model, self.table, self.fp8 = model, table, fp8
        shape = (2, len(model.layers), batch * pages, PAGE, KV_HEADS, HEAD_DIM)
        self.k_caches, self.v_caches = torch.zeros(shape, device=device, dtype=torch.float8_e4m3fn if fp8 else dtype)
        self.scales = {"k_scale": SCALE, "v_scale": SCALE} if fp8 else {}
        self.page_table = torch.randperm(batch * pages, device=device).view(batch, pages)
        # What a step reads and changes, all on the device.
        self.lengths = lengths  # of the prompts; 0: an idle row
        self.positions = lengths.clone()  # of the token to come
        self.text = torch.zeros(batch, longest + 1, device=device, dtype=torch.long)
        self.hidden = torch.zeros(batch, longest, HEADS * HEAD_DIM, device=device, dtype=dtype)
        self.index, self.rows = torch.arange(pages * PAGE, device=device), torch.arange(batch, device=device)

    def run(self, tokens: Tensor, positions: Tensor, present: Tensor) -> Tensor:
        """Hidden states of tokens (B, S) at these positions, which are cached where they are present."""
        slots = self.page_table.gather(1, positions // PAGE) * PAGE + positions % PAGE
        slots = slots.masked_fill(~present, -1)
        mask = (self.index <= positions[..., None])[:, None]  # (B, 1, S, pages x PAGE): causal, of one row's pages

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            caches = self.k_caches[layer], self.v_caches[layer]
            cache = jitrope.KVCache(*caches, slots, **self.scales)
            jitrope.prepare_qkv(q, k, v, cos_sin_cache=self.table, positions=positions, cache=cache, inplace=True)
            return sdpa(q, *(self.gathered(cache, q.dtype) for cache in caches), mask)

        return self.model(tokens, attend)

    def gathered(self, cache: Tensor, dtype: torch.dtype) -> Tensor:
        """Each row's pages, one after the other: (B, pages x PAGE, KV_HEADS, D)."""
        if self.fp8:  # which torch does not gather
            found = cache.view(torch.uint8)[self.page_table].view(torch.float8_e4m3fn).to(dtype) * SCALE
        else:
            found = cache[self.page_table]
        return found.flatten(1, 2)

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

    def restart(self) -> None:
        """As it was after the prefill."""
        index = torch.arange(self.text.shape[1], device=self.text.device)
        self.text.masked_fill_(index > self.lengths[:, None], 0)
        self.hidden.masked_fill_((index[:-1] >= self.lengths[:, None])[..., None], 0)
        self.positions.copy_(self.lengths)

    def choose(self, hidden: Tensor) -> None:
        self.text[self.rows, self.positions] = self.model.logits(hidden).argmax(-1)


def check(server: Server, inv_freq: Tensor, factor: float, tolerance: float) -> str:
    """The text and its hidden states against the model without cache, by eager torch's rope."""
    text = server.text[:, :-1]
    cos, sin = tables.cos_sin(text.shape[1], inv_freq, attention_factor=factor, width="full")
    cos, sin = cos[:, None], sin[:, None]

    def rotated(x: Tensor) -> Tensor:
        x0, x1 = x.float().chunk(2, -1)
        return (x.float() * cos + torch.cat((-x1, x0), -1) * sin).to(x.dtype)

    want = server.model(text, lambda layer, q, k, v: sdpa(rotated(q), rotated(k), v, None))
    index = torch.arange(text.shape[1], device=text.device)
    lengths, ends = server.lengths[:, None], server.positions[:, None]
    known, chosen = index < ends, (index >= lengths - 1) & (index < ends)
    error = float((server.hidden[known] - want[known]).float().norm() / want[known].float().norm())
    assert error < tolerance, f"hidden states differ by {error:.2g} of their size"
    logits = server.model.logits(want[chosen]).float()
    behind = logits.amax(-1) - logits.gather(1, server.text[:, 1:][chosen][:, None])[:, 0]
    assert float(behind.max()) <= 4 * tolerance * float(logits.std()), "a token is not the plain model's choice"
    same = int((behind == 0).sum())
    return f"hidden states within {error:.1g} of the plain model's: yes; {same} of {len(behind)} tokens are its choice"


def decode(word: str, server: Server, step: Callable[[], None], steps: int) -> None:
    """All the steps after the prefill, timed on a GPU."""
    server.restart()
    synchronize = torch.cuda.synchronize if server.text.is_cuda else lambda: None
    synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize()
    if server.text.is_cuda:
        print(f"{word}: {steps * (len(server.text) - 1) / (time.perf_counter() - start):.0f} tokens/s")


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    gpu = torch.cuda.is_available()
    parser.add_argument("--layers", type=int, default=4 if gpu else 2)
    parser.add_argument("--batch", type=int, default=8 if gpu else 4, help="rows, one of them idle")
    parser.add_argument("--steps", type=int, default=64 if gpu else 20)
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--fp8", action="store_true", help="keep the cache in e4m3")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device(arguments.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tolerance = 0.1 if arguments.fp8 else 0.03 if dtype == torch.bfloat16 else 1e-4

    model = Model(arguments.layers).to(device, dtype)
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}  # Llama 3.1's
    scaling["original_max_position_embeddings"] = 8192
    inv_freq, factor = tables.inv_freq("llama3", rotary_dim=HEAD_DIM, theta=500000.0, device=device, **scaling)
    longest = PROMPT + arguments.steps
    table = tables.cos_sin_cache(longest, inv_freq, attention_factor=factor)  # cosines, then sines; one for all layers
    lengths = torch.randint(1, PROMPT + 1, (arguments.batch,), device=device)
    lengths[-1] = 0
    server = Server(model, lengths, longest, table, arguments.fp8)
    server.prefill(torch.randint(VOCABULARY, (arguments.batch, PROMPT), device=device))

    server.step()  # compiles
    decode("eager", server, server.step, arguments.steps)
    print("eager:", check(server, inv_freq, factor, tolerance))
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            server.step()
        decode("CUDA graph", server, graph.replay, arguments.steps)
        print("CUDA graph:", check(server, inv_freq, factor, tolerance))


if __name__ == "__main__":
    main()
