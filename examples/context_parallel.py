"""An attention layer on packed documents of any lengths, the batch cut between ranks, compared with one process.

python examples/context_parallel.py     # on all GPUs, or without one on two processes
torchrun --nproc-per-node 2 examples/context_parallel.py [--tokens 4096] [--window 64]

Each rank projects and rotates its own rows only. Attention gathers the keys that they see: with a window those are few.
The rows of all ranks are put together again, and output and gradients are compared with those of the whole batch on one
process. GPUs talk through NCCL, CPUs through gloo; a CPU has 200 tokens.
"""

from __future__ import annotations

import argparse
import os
import socket

import torch
import torch.distributed as dist
from torch import Tensor, nn

import jitrope
from jitrope.context_parallel import Partition, Schedule, all_gather_attention

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
HIDDEN = HEADS * HEAD_DIM


def document_lengths(tokens: int) -> list[int]:
    """One long document, short, empty and random ones; no length is a multiple of another."""
    lengths = [9, tokens // 2 + 28, 5, 0, 1]
    while (rest := tokens - sum(lengths)) > 0:
        lengths.append(min(rest, int(torch.randint(1, tokens // 4, ()))))
    return lengths


class Layer(nn.Module):
    """Attention, for the rows of one rank or of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        self.projection = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, freqs: Tensor, schedule: Schedule) -> Tensor:
        shape = schedule.shape
        # The offsets are the whole batch's; which of its positions these rows have follows from the rank.
        positions = jitrope.Packed(schedule.cu_seqlens, cp_size=shape.cp_size, cp_rank=shape.cp_rank)
        q, k, v = jitrope.prepare_fused_qkv(self.qkv(x), freqs=freqs, positions=positions, heads=(HEADS, KV_HEADS))
        return self.projection(all_gather_attention(q, k, v, schedule).flatten(1))


def results(layer: Layer, x: Tensor, freqs: Tensor, schedule: Schedule) -> tuple[dict, dict]:
    """Of these rows of x: what each row has, and the gradients of weights, summed over ranks."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    y = layer(x, freqs, schedule)
    y.float().square().sum().backward()
    weights = {name: p.grad.clone() for name, p in layer.named_parameters()}
    for gradient in weights.values() if schedule.shape.cp_size > 1 else ():
        dist.all_reduce(gradient)
    return {"output": y.detach(), "x": x.grad}, weights


def differences(layer: Layer, x: Tensor, freqs: Tensor, part: Partition, schedule: Schedule) -> dict:
    """Of what all ranks have together from what one process has: the largest, over the largest value."""
    rows, weights = results(layer, part.shard(x), freqs, schedule)
    found = {name: part.unshard(value) for name, value in rows.items()} | weights
    whole = {"window": schedule.mask, "causal": True, "cp_size": 1, "cp_rank": 0}
    rows, weights = results(layer, x, freqs, Schedule(schedule.cu_seqlens, schedule.shape.tokens, **whole))
    return {name: float((found[name] - y).abs().max() / y.abs().max()) for name, y in (rows | weights).items()}


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
    x, layer = torch.randn(total, HIDDEN).to(device, dtype), Layer().to(device, dtype)
    theta = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2, device=device) / HEAD_DIM)
    freqs = torch.outer(torch.arange(max(lengths), device=device), theta)  # angles, one a pair
    if rank == 0:
        print(f"{total} tokens of {len(lengths)} documents on {dist.get_world_size()} ranks ({device.type}, {dtype})")

    part = Partition(cu_seqlens, total)  # which rows are this rank's
    for window in ((-1, -1), (arguments.window, 0)):
        # Whose keys they see: made once for a batch, used by every layer.
        schedule = Schedule(cu_seqlens, total, max_seqlen=max(lengths), window=window)
        report(schedule, differences(layer, x, freqs, part, schedule), 0.03 if dtype == torch.bfloat16 else 1e-4)


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
    parser.add_argument("--window", type=int, default=64 if gpu else 4)
    arguments = parser.parse_args()
    if dist.is_torchelastic_launched():
        join(dist.get_node_local_rank(), int(os.environ["LOCAL_WORLD_SIZE"]), 0, arguments)
    else:
        ranks = torch.cuda.device_count() or 2
        torch.multiprocessing.spawn(join, (ranks, free_port(), arguments), ranks)


if __name__ == "__main__":
    main()
