"""A few training steps on packed documents: sequences of any lengths, one after another, without padding.

python examples/packed_training.py [--documents 64] [--tokens 8192] [--steps 10]    # fewer without a GPU

q, k and v are one projection: one launch splits it and rotates q and k, and one more computes the gradient. The loss
must fall. Runs on a GPU, or on a CPU in plain torch.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

import jitrope

HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 8, 2, 64, 256


def document_lengths(documents: int, tokens: int) -> torch.Tensor:
    """Random lengths that fill the pack; some may be 0."""
    cuts = torch.randint(0, tokens + 1, (documents - 1,)).sort().values
    return torch.cat((cuts, torch.tensor([tokens]))).diff(prepend=torch.tensor([0]))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        hidden = HEADS * HEAD_DIM
        self.qkv, self.out = nn.Linear(hidden, (HEADS + 2 * KV_HEADS) * HEAD_DIM), nn.Linear(hidden, hidden)

    def forward(self, x, freqs, positions, mask):
        q, k, v = jitrope.prepare_fused_qkv(self.qkv(x), freqs=freqs, positions=positions, heads=(HEADS, KV_HEADS))
        q, k, v = (y.transpose(0, 1)[None] for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.out(y[0].transpose(0, 1).flatten(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    gpu = torch.cuda.is_available()
    parser.add_argument("--documents", type=int, default=64 if gpu else 8)
    parser.add_argument("--tokens", type=int, default=8192 if gpu else 256)
    parser.add_argument("--steps", type=int, default=10 if gpu else 5)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if gpu else "cpu"

    lengths = document_lengths(arguments.documents, arguments.tokens)
    cu_seqlens = torch.cat((torch.zeros(1), lengths.cumsum(0))).int().to(device)
    packed = jitrope.Packed(cu_seqlens)  # made once per batch, for all layers
    document = torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(device)
    index = torch.arange(arguments.tokens, device=device)
    mask = (document[:, None] == document) & (index[:, None] >= index)  # causal, inside a document

    # Angles, one for each pair; the kernel computes their sines and cosines.
    theta = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2, device=device) / HEAD_DIM)
    freqs = torch.outer(torch.arange(int(lengths.max()), device=device), theta)

    hidden = HEADS * HEAD_DIM
    model = nn.ModuleList([nn.Embedding(VOCABULARY, hidden), Attention(), nn.Linear(hidden, VOCABULARY)]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # Each document counts up from somewhere: the next token is known from the last one.
    start = torch.randint(VOCABULARY, (len(lengths),), device=device)
    tokens = (start[document] + index - cu_seqlens[document]) % VOCABULARY
    target = (tokens + 1) % VOCABULARY
    losses = []
    for _ in range(arguments.steps):
        x = model[0](tokens)
        x = x + model[1](x, freqs, packed, mask)
        loss = F.cross_entropy(model[2](x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    right = losses[-1] < losses[0]
    print(f"{arguments.tokens} tokens of {len(lengths)} documents on {device}, {arguments.steps} steps")
    print(f"the loss falls: {'yes' if right else 'NO'} ({losses[0]:.3f} to {losses[-1]:.3f})")

    raise SystemExit(not right)


if __name__ == "__main__":
    main()
