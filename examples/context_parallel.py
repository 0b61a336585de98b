"""A layer on packed documents of any lengths, the batch cut between ranks: trained, and compared with one process.

python examples/context_parallel.py     # on all GPUs, or without one on two processes
torchrun --nproc-per-node 2 examples/context_parallel.py [--tokens 4096] [--steps 10] [--window 64]

Each rank embeds, projects and rotates its own rows only. Attention gathers the keys that they see. After the training
steps, the rows of all ranks are put together again, and output and gradients are compared with those of the whole batch
on one process. GPUs talk through NCCL, CPUs through gloo; a CPU has 200 tokens and 3 steps.
"""

from __future__ import annotations

import argparse
import os
import socket

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import jitrope
from jitrope.context_parallel import Partition, Schedule, all_gather_attention

HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 8, 2, 64, 256
HIDDEN = HEADS * HEAD_DIM


def document_lengths(tokens: int) -> list[int]:
    """One long document, short, empty and random ones; no length is a multiple of another."""
    lengths = [9, tokens // 2 + 28, 5, 0, 1]
    while (rest := tokens - sum(lengths)) > 0:
        lengths.append(min(rest, int(torch.randint(1, tokens // 4, ()))))
    return lengths


class Model(nn.Module):
    """A layer with an embedding before it; its rows are those of one rank, or of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        self.projection, self.head = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: Tensor, freqs: Tensor, positions: jitrope.Packed, schedule: Schedule) -> Tensor:
        x = self.embedding(tokens)  # (rows, HIDDEN)
        q, k, v = self.qkv(x).unflatten(-1, (-1, HEAD_DIM)).split((HEADS, KV_HEADS, KV_HEADS), 1)
        q, k = jitrope.apply_rope(q, k, freqs=freqs, positions=positions)
        y = all_gather_attention(q, k, v, schedule)
        return self.head(x + self.projection(y.flatten(1)))


def step(model: Model, tokens: Tensor, target: Tensor, freqs: Tensor, schedule: Schedule) -> tuple[Tensor, Tensor]:
    """(logits, loss) with gradients; each rank has its rows' part of the batch's mean loss."""
    model.zero_grad()
    shape = schedule.shape
    # The offsets are the whole batch's; which of its positions these rows have follows from the rank.
    positions = jitrope.Packed(schedule.cu_seqlens, cp_size=shape.cp_size, cp_rank=shape.cp_rank)
    logits = model(tokens, freqs, positions, schedule)
    loss = F.cross_entropy(logits.float(), target, reduction="sum") / shape.tokens
    loss.backward()
    if shape.cp_size > 1:
        for x in (loss.detach(), *(p.grad for p in model.parameters())):
            dist.all_reduce(x)
    return logits.detach(), loss.detach()


def differences(model: Model, batch: tuple[Tensor, Tensor, Tensor], part: Partition, schedule: Schedule) -> dict:
    """Of what all ranks have together from what one process has: the largest, over the largest value."""
    tokens, target, freqs = batch
    logits, _ = step(model, part.shard(tokens), part.shard(target), freqs, schedule)
    found = {"output": part.unshard(logits)} | {name: p.grad.clone() for name, p in model.named_parameters()}
    whole = {"window": schedule.mask, "causal": True, "cp_size": 1, "cp_rank": 0}
    alone = Schedule(schedule.cu_seqlens, schedule.shape.tokens, **whole)
    want = {"output": step(model, *batch, alone)[0]} | {name: p.grad for name, p in model.named_parameters()}
    return {name: float((x - want[name]).abs().max() / want[name].abs().max()) for name, x in found.items()}


def rows_from_others(schedule: Schedule) -> int:
    """Keys that come to this rank each time."""
    return sum(schedule.received) - schedule.received[schedule.shape.cp_rank]


def report(schedule: Schedule, errors: dict, limit: float) -> None:
    """Rank 0 prints, from numbers that all ranks have told."""
    shape = schedule.shape
    own = torch.tensor([shape.rows, rows_from_others(schedule)], device=schedule.cu_seqlens.device)
    counts = [torch.empty_like(own) for _ in range(shape.cp_size)]
    dist.all_gather(counts, own)
    right = all(error < limit for error in errors.values())
    if shape.cp_rank == 0:
        window = "causal" if schedule.mask.left < 0 else f"causal, window {schedule.mask.left}"
        print(f"{window}: {schedule.saving:.0%} of an all-gather's rows need not be sent")
        for rank, (rows, keys) in enumerate(counts):
            print(f"  rank {rank}: {rows} rows, {keys} keys from others")
        worst = max(errors, key=errors.get)
        print(f"  output and {len(errors) - 1} gradients are one process's up to rounding: {'yes' if right else 'NO'}")
        print(f"  (the largest difference is that of {worst}, {errors[worst]:.1e} of its largest value)")
    if not right:
        raise SystemExit(f"the ranks' results differ from one process's: {errors}")


def run(rank: int, arguments: argparse.Namespace) -> None:
    """One rank, in a group that is there."""
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)  # the same batch and weights on every rank
    lengths = document_lengths(arguments.tokens)
    total = sum(lengths)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)
    # Each document counts up from somewhere: the next token is known from the last one.
    start = torch.randint(VOCABULARY, (len(lengths),)).to(device)
    tokens = (start[document] + torch.arange(total, device=device) - cu_seqlens[document]) % VOCABULARY
    target = (tokens + 1) % VOCABULARY
    theta = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2, device=device) / HEAD_DIM)
    freqs = torch.outer(torch.arange(max(lengths), device=device), theta)  # angles, one a pair
    model = Model().to(device, dtype)

    # Which rows are this rank's, and whose keys they see: made once for a batch, used by every layer.
    part = Partition(cu_seqlens, total)
    schedule = Schedule(cu_seqlens, total, max_seqlen=max(lengths))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(arguments.steps):
        losses.append(step(model, part.shard(tokens), part.shard(target), freqs, schedule)[1].item())
        optimizer.step()
    if rank == 0:
        print(f"{total} tokens of {len(lengths)} documents on {dist.get_world_size()} ranks ({device.type}, {dtype})")
        print(f"loss falls: {'yes' if losses[-1] < losses[0] else 'NO'} ({losses[0]:.3f} to {losses[-1]:.3f})")
    if not losses[-1] < losses[0]:
        raise SystemExit("the loss does not fall")

    limit = 0.03 if dtype == torch.bfloat16 else 1e-4
    windowed = Schedule(cu_seqlens, total, max_seqlen=max(lengths), window=(arguments.window, 0))
    for each in (schedule, windowed):
        report(each, differences(model, (tokens, target, freqs), part, each), limit)


def join(rank: int, ranks: int, port: int, arguments: argparse.Namespace) -> None:
    """A process of this machine's, started from here or by torchrun, which says where the others are."""
    gpus = torch.cuda.device_count() >= ranks
    if gpus:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(max(1, os.cpu_count() // ranks))
    where = {} if dist.is_torchelastic_launched() else {"init_method": f"tcp://127.0.0.1:{port}"}
    if where:
        where |= {"rank": rank, "world_size": ranks}
    dist.init_process_group("nccl" if gpus else "gloo", **where)
    run(dist.get_rank(), arguments)
    dist.barrier()  # a rank that ends early closes its connections to the others
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    gpu = torch.cuda.is_available()
    parser.add_argument("--tokens", type=int, default=4096 if gpu else 200)
    parser.add_argument("--steps", type=int, default=10 if gpu else 3)
    parser.add_argument("--window", type=int, default=64 if gpu else 4)
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error("--steps must be at least 2: the losses of two steps are compared")
    if dist.is_torchelastic_launched():
        join(dist.get_node_local_rank(), int(os.environ["LOCAL_WORLD_SIZE"]), 0, arguments)
    else:
        ranks = torch.cuda.device_count() or 2
        torch.multiprocessing.spawn(join, (ranks, free_port(), arguments), ranks)


if __name__ == "__main__":
    main()
