"""An attention module with jitrope: a batch, packed documents, and decoding with a KV cache, against plain torch.

python examples/attention.py

Copy `Attention`, and `Cache` if you decode. One launch splits the fused projection, normalises and rotates q and k, and
with a cache stores k and v; its gradient is one launch too. `Plain` is the same module in plain torch. Runs on a GPU in
bf16, or on a CPU in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import jitrope
from jitrope import tables


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """(B, S, Hq, D) of q (B, S, Hq, D), k and v (B, L, Hk, D); causal without a mask."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    return y.transpose(1, 2)


class Cache:
    """k and v of one layer, (B, longest, Hk, D) each; a row of the batch is a page."""

    def __init__(self, like: Tensor, batch: int, longest: int, kv_heads: int, head_dim: int) -> None:
        self.k, self.v = like.new_zeros(2, batch, longest, kv_heads, head_dim)
        self.index = torch.arange(longest, device=like.device)
        self.first_slots = torch.arange(batch, device=like.device)[:, None] * longest

    def at(self, positions: Tensor) -> jitrope.KVCache:
        """Where tokens at these positions (B, S) are stored."""
        return jitrope.KVCache(self.k, self.v, self.first_slots + positions)


class Attention(nn.Module):
    """Causal attention with grouped heads, RMSNorm of q and k, and rope of halves, as in Qwen3."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, self.head_dim = (heads, kv_heads), head_dim
        self.qkv = nn.Linear(hidden, (heads + 2 * kv_heads) * head_dim, bias=False)  # all of q, then of k, then of v
        self.q_norm, self.k_norm = (nn.RMSNorm(head_dim, eps=1e-6) for _ in range(2))
        self.out = nn.Linear(heads * head_dim, hidden, bias=False)

    def forward(
        self,
        x: Tensor,  # (B, S, hidden); packed: (T, hidden)
        cos: Tensor,  # (positions, head_dim / 2)
        sin: Tensor,
        positions: Tensor | jitrope.Packed | None = None,  # None: 0, 1, 2, ...
        mask: Tensor | None = None,  # packed: (T, T)
        cache: Cache | None = None,  # with positions (B, S), and without gradients
    ) -> Tensor:
        # Made in each forward, because FSDP replaces parameters.
        norm = jitrope.Norm(self.q_norm.weight, self.k_norm.weight, eps=self.q_norm.eps)
        words = {"heads": self.heads, "positions": positions, "norm": norm}
        if cache is None:
            q, k, v = jitrope.prepare_fused_qkv(self.qkv(x), cos, sin, **words)
        else:
            q, _, _ = jitrope.prepare_fused_qkv(self.qkv(x), cos, sin, **words, cache=cache.at(positions))
            k, v = cache.k, cache.v
            mask = (cache.index <= positions[..., None])[:, None]  # (B, 1, S, longest): what is stored up to here
        if x.dim() == 2:  # packed: scaled_dot_product_attention wants a batch
            return self.out(sdpa(q[None], k[None], v[None], mask)[0].flatten(-2))
        return self.out(sdpa(q, k, v, mask).flatten(-2))


class Plain(Attention):
    """The same module in plain torch, for x (B, S, hidden)."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads, kv_heads = self.heads
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.head_dim)).split((heads, kv_heads, kv_heads), 2)
        cos, sin = (table[: x.shape[1], None] for table in (cos, sin))

        def rotated(y: Tensor) -> Tensor:
            a, b = y.float().chunk(2, -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(y.dtype)

        return self.out(sdpa(rotated(self.q_norm(q)), rotated(self.k_norm(k)), v, None).flatten(-2))


def check(what: str, found: list[Tensor], wanted: list[Tensor]) -> None:
    error = max(float((x - y).detach().norm() / y.detach().norm()) for x, y in zip(found, wanted, strict=True))
    limit = 0.02 if found[0].dtype == torch.bfloat16 else 1e-5
    print(f"{what}, within {limit} of plain torch's: {'yes' if error < limit else 'NO'}")
    if not error < limit:
        raise SystemExit(f"{what}: differs by {error:.2g} of its size")


def main() -> None:
    torch.manual_seed(0)
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    batch, longest, hidden, heads, kv_heads, head_dim = 2, 48, 256, 4, 2, 64
    ours, plain = (model(hidden, heads, kv_heads, head_dim).to(device, dtype) for model in (Attention, Plain))
    for norm in (ours.q_norm, ours.k_norm):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
    plain.load_state_dict(ours.state_dict())
    inv_freq, _ = tables.inv_freq(rotary_dim=head_dim, theta=1e6)
    cos, sin = tables.cos_sin(longest, inv_freq.to(device))
    x = torch.randn(batch, longest, hidden, device=device, dtype=dtype, requires_grad=True)

    def gradients(model: nn.Module, y: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(y.float().square().sum(), [x, *model.parameters()]))

    wanted = plain(x, cos, sin)
    y = ours(x, cos, sin)
    check(f"a batch {tuple(y.shape)}: output", [y], [wanted])
    check("gradients of x and 4 weights", gradients(ours, y), gradients(plain, wanted))

    lengths = torch.tensor([30, 1, 17])  # documents, one after another without padding
    cu_seqlens = F.pad(lengths.cumsum(0), (1, 0)).int().to(device)
    packed = jitrope.Packed(cu_seqlens)  # made once for a batch, for all layers
    document = torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(device)
    mask = (document[:, None] == document).tril()  # causal, inside a document
    y = ours(x[0], cos, sin, packed, mask)
    alone = torch.cat([plain(part[None], cos, sin)[0] for part in x[0].split(lengths.tolist())])
    check(f"{len(lengths)} packed documents: output", [y], [alone])
    check("gradients of x and 4 weights", gradients(ours, y), gradients(plain, alone))

    with torch.no_grad():
        cache = Cache(x, batch, longest, kv_heads, head_dim)
        index = torch.arange(longest, device=device).expand(batch, -1)
        parts = [40] + [1] * (longest - 40)  # the prompt, then a token at a time
        pieces = zip(x.split(parts, 1), index.split(parts, 1))
        y = torch.cat([ours(part, cos, sin, positions, cache=cache) for part, positions in pieces], 1)
    check(f"a prompt of {parts[0]} tokens and {len(parts) - 1} decoded: output", [y], [wanted])


if __name__ == "__main__":
    main()
