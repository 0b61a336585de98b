"""FSDP2 and context parallelism together: a model of compiled blocks, trained on packed documents.

python examples/train_context_parallel.py [--cp 2]                         # on all GPUs, or two processes of a CPU
torchrun --nproc-per-node 8 examples/train_context_parallel.py --cp 4      # dp 2 x cp 4

The ranks are a mesh of dp x cp. A row of the mesh has a batch of its own and cuts it between its cp ranks. FSDP2 shards
weights over all ranks. The first step's gradients are compared with those of one process that has all batches and no
jitrope.context_parallel; then the loss must fall. Blocks are compiled by Inductor on a GPU; a CPU takes the backend
"aot_eager", which needs no C++ compiler.
"""

from __future__ import annotations

import argparse
import os
import socket
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import jitrope
from jitrope.context_parallel import Partition, Schedule, all_gather_attention

LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 2, 4, 2, 64, 128
HIDDEN, LONGEST = HEADS * HEAD_DIM, 512
IGNORED = -100  # the label that F.cross_entropy leaves out


class Batch(NamedTuple):
    """Packed documents: tokens and labels (T), and where each document begins (N + 1)."""

    tokens: Tensor
    labels: Tensor
    cu_seqlens: Tensor


class Block(nn.Module):
    """Attention with QK-norm, and an MLP, for the rows that a rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(HEAD_DIM, eps=1e-6), nn.RMSNorm(HEAD_DIM, eps=1e-6)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN, bias=False), nn.Linear(2 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, positions: jitrope.Packed, schedule: Schedule) -> Tensor:
        norm = jitrope.Norm(self.q_norm.weight, self.k_norm.weight)  # here, not in __init__: FSDP replaces weights
        heads = {"heads": (HEADS, KV_HEADS), "norm": norm, "positions": positions}
        q, k, v = jitrope.prepare_fused_qkv(self.qkv(self.norm(x)), cos, sin, **heads)
        x = x + self.out(all_gather_attention(q, k, v, schedule).flatten(1))
        return x + self.down(F.silu(self.up(self.mlp_norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, cos: Tensor, sin: Tensor, positions: jitrope.Packed, schedule: Schedule) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin, positions, schedule)
        return self.head(x)


def batch_of(seed: int, tokens: int, device: torch.device) -> Batch:
    """Documents of random lengths, each of which counts up from somewhere: the next token is known from the last."""
    made, lengths = torch.Generator().manual_seed(seed), []
    while (rest := tokens - sum(lengths)) > 0:
        lengths.append(min(rest, int(torch.randint(1, min(LONGEST, tokens // 2), (), generator=made))))
    starts = torch.randint(VOCABULARY, (len(lengths),), generator=made)
    documents = [(int(start) + torch.arange(n)) % VOCABULARY for start, n in zip(starts, lengths)]
    # Shift labels here, in the whole batch. A rank cannot: the next token of a row may be on another rank.
    labels = [torch.cat((document[1:], torch.tensor([IGNORED]))) for document in documents]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    return Batch(*(x.to(device) for x in (torch.cat(documents), torch.cat(labels), cu_seqlens)))


def loss_of(model: nn.Module, batch: Batch, tables: tuple[Tensor, Tensor], part: Partition, schedule: Schedule) -> Tensor:
    """The sum of the losses of this rank's rows."""
    shape = schedule.shape
    positions = jitrope.Packed(batch.cu_seqlens, cp_size=shape.cp_size, cp_rank=shape.cp_rank)
    logits = model(part.shard(batch.tokens), *tables, positions, schedule)
    labels = part.shard(batch.labels)
    return F.cross_entropy(logits.float(), labels, reduction="sum", ignore_index=IGNORED)


def alone(batches: list[Batch], tables: tuple[Tensor, Tensor], count: Tensor) -> dict[str, Tensor]:
    """The gradients of one process that has all batches."""
    torch.manual_seed(0)
    model = Model().to(tables[0].device)
    for batch in batches:
        whole = {"cp_size": 1, "cp_rank": 0}
        part = Partition(batch.cu_seqlens, len(batch.tokens), **whole)
        (loss_of(model, batch, tables, part, Schedule(batch.cu_seqlens, len(batch.tokens), **whole)) / count).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def run(arguments: argparse.Namespace) -> None:
    """One rank, in a group that is there."""
    device, cp, ranks = "cuda" if dist.get_backend() == "nccl" else "cpu", arguments.cp, dist.get_world_size()
    if ranks % cp:
        raise SystemExit(f"--cp {cp} does not divide {ranks} ranks")
    mesh = init_device_mesh(device, (ranks // cp, cp), mesh_dim_names=("dp", "cp"))
    everyone = init_device_mesh(device, (ranks,), mesh_dim_names=("fsdp",))

    torch.manual_seed(0)  # the same weights on every rank
    model = Model().to(device)
    for block in model.blocks:
        block.compile(fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
        fully_shard(block, mesh=everyone)
    fully_shard(model, mesh=everyone)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    batches = [batch_of(seed, arguments.tokens, torch.device(device)) for seed in range(ranks // cp)]
    batch = batches[mesh.get_local_rank("dp")]
    theta = jitrope.tables.inv_freq(rotary_dim=HEAD_DIM, device=device)[0]
    tables = jitrope.tables.cos_sin(LONGEST, theta)  # for the positions of the whole batch, on every rank
    # Which rows are this rank's, and whose keys they see: made once for a batch, used by every layer.
    part = Partition(batch.cu_seqlens, len(batch.tokens), group=mesh["cp"])
    schedule = Schedule(batch.cu_seqlens, len(batch.tokens), group=mesh["cp"], max_seqlen=LONGEST)
    count = (batch.labels != IGNORED).sum()
    dist.all_reduce(count, group=mesh.get_group("dp"))  # of all batches

    losses, worst = [], 0.0
    for step in range(arguments.steps):
        loss = loss_of(model, batch, tables, part, schedule) / count  # this rank's part of the mean
        (loss * ranks).backward()  # FSDP divides the sum of gradients by dp x cp
        if step == 0:
            grads = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
            for name, want in alone(batches, tables, count).items():
                worst = max(worst, float((grads[name] - want).abs().max() / want.abs().max()))
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach())
        losses.append(float(loss))
    right = {"gradients are one process's up to rounding": worst < 1e-4, "the loss falls": losses[-1] < losses[0]}
    if dist.get_rank() == 0:
        print(f"dp {ranks // cp} x cp {cp} on {device}: {arguments.tokens} tokens a batch, {len(grads)} parameters")
        for what, found in right.items():
            print(f"{what}: {'yes' if found else 'NO'}")
        print(f"largest difference {worst:.1e} of a gradient's largest value; loss {losses[0]:.3f} to {losses[-1]:.3f}")
    if not all(right.values()):
        raise SystemExit(1)


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
    run(arguments)
    dist.barrier()  # a rank that ends early closes its connections to the others
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    gpu = torch.cuda.is_available()
    parser.add_argument("--cp", type=int, default=0, help="ranks that share a batch; default: 2, or the only one")
    parser.add_argument("--tokens", type=int, default=4096 if gpu else 200)
    parser.add_argument("--steps", type=int, default=10 if gpu else 4)
    arguments = parser.parse_args()
    launched = dist.is_torchelastic_launched()
    ranks = int(os.environ["WORLD_SIZE"]) if launched else torch.cuda.device_count() or 2
    arguments.cp = arguments.cp or min(2, ranks)
    if launched:
        join(dist.get_node_local_rank(), int(os.environ["LOCAL_WORLD_SIZE"]), 0, arguments)
    else:
        torch.multiprocessing.spawn(join, (ranks, free_port(), arguments), ranks)


if __name__ == "__main__":
    main()
