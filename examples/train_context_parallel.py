"""FSDP2 and context parallelism together: a model of compiled blocks, trained on packed documents.

python examples/train_context_parallel.py [--cp 2]                         # on all GPUs, or two processes of a CPU
torchrun --nproc-per-node 8 examples/train_context_parallel.py --cp 4      # dp 2 x cp 4

The ranks are a mesh of dp x cp. A row of the mesh has a batch of its own and cuts it between its cp ranks. FSDP2 shards
weights over all ranks. The first step's gradients are compared with those of one process that has all batches; then the
loss must fall. GPUs compute in bf16, with blocks compiled by Inductor. A CPU computes in fp32, with torch.compile's
backend "aot_eager", which needs no C++ compiler.
"""

from __future__ import annotations

import argparse
import os
import socket
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

import jitrope
from jitrope.context_parallel import Partition, Schedule, all_gather_attention

LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 2, 4, 2, 64, 128
HIDDEN, LONGEST = HEADS * HEAD_DIM, 512  # LONGEST: tokens of a document
IGNORED = -100  # the label that a document's last token has


class Batch:
    """Packed documents of random lengths, and this rank's rows of them; made once for all layers.

    ranks: group=, or cp_size=1 and cp_rank=0 for the whole batch.
    """

    def __init__(self, seed: int, tokens: int, device: str, **ranks: Any) -> None:
        made, lengths = torch.Generator().manual_seed(seed), []
        while (rest := tokens - sum(lengths)) > 0:
            lengths.append(min(rest, int(torch.randint(1, min(LONGEST, tokens // 2), (), generator=made))))
        # Each document counts up from somewhere, so the next token is known from the last one.
        starts = torch.randint(VOCABULARY, (len(lengths),), generator=made).tolist()
        documents = [(start + torch.arange(length)) % VOCABULARY for start, length in zip(starts, lengths)]
        # Shift labels here, in the whole batch. A rank cannot: the next token of a row may be on another rank.
        labels = [torch.cat((document[1:], torch.tensor([IGNORED]))) for document in documents]
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int().to(device)

        self.schedule = Schedule(cu_seqlens, tokens, max_seqlen=LONGEST, **ranks)  # whose keys these rows see
        _ = self.schedule.sum_rows  # it is kept; if the first compiled block made it, Dynamo would trace twice
        shape = self.schedule.shape
        self.positions = jitrope.Packed(cu_seqlens, cp_size=shape.cp_size, cp_rank=shape.cp_rank)
        part = Partition(cu_seqlens, tokens, **ranks)
        self.tokens, self.labels = (part.shard(torch.cat(x).to(device)) for x in (documents, labels))

    def loss(self, model: nn.Module, tables: tuple[Tensor, Tensor]) -> Tensor:
        """The sum over this rank's rows."""
        logits = model(self.tokens, tables, self.positions, self.schedule)
        return F.cross_entropy(logits.float(), self.labels, reduction="sum", ignore_index=IGNORED)


class Block(nn.Module):
    """Attention with QK-norm, and an MLP, for the rows of a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(HEAD_DIM, eps=1e-6), nn.RMSNorm(HEAD_DIM, eps=1e-6)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN, bias=False), nn.Linear(2 * HIDDEN, HIDDEN, bias=False)

    def forward(
        self, x: Tensor, tables: tuple[Tensor, Tensor], positions: jitrope.Packed, schedule: Schedule
    ) -> Tensor:
        norm = jitrope.Norm(self.q_norm.weight, self.k_norm.weight)  # here, because FSDP replaces the weights
        words = {"heads": (HEADS, KV_HEADS), "norm": norm, "positions": positions}
        q, k, v = jitrope.prepare_fused_qkv(self.qkv(self.norm(x)), *tables, **words)
        x = x + self.out(all_gather_attention(q, k, v, schedule).flatten(1))
        return x + self.down(F.silu(self.up(self.mlp_norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, tokens: Tensor, *rest: Any) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, *rest)
        return self.head(x)


def alone(batches: list[Batch], tables: tuple[Tensor, Tensor], count: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """The gradients of one process that has all batches."""
    torch.manual_seed(0)
    model = Model().to(count.device, dtype)
    for batch in batches:
        (batch.loss(model, tables) / count).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def run(arguments: argparse.Namespace) -> None:
    """One rank, in a group that is there."""
    device, cp, ranks = "cuda" if dist.get_backend() == "nccl" else "cpu", arguments.cp, dist.get_world_size()
    if ranks % cp:
        raise SystemExit(f"--cp {cp} does not divide {ranks} ranks")
    dp = ranks // cp
    mesh = init_device_mesh(device, (dp, cp), mesh_dim_names=("dp", "cp"))
    everyone = init_device_mesh(device, (ranks,))

    torch.manual_seed(0)  # the same weights on every rank
    model = Model().to(device)
    dtype, limit = (torch.bfloat16, 0.05) if device == "cuda" else (torch.float32, 1e-4)
    # Otherwise FSDP would cast the tables of cosines and sines to bf16 too.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in model.blocks:
        block.compile(fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
        fully_shard(block, mesh=everyone, mp_policy=policy)
    fully_shard(model, mesh=everyone, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    batch = Batch(mesh.get_local_rank("dp"), arguments.tokens, device, group=mesh["cp"])
    inv_freq, _ = jitrope.tables.inv_freq(rotary_dim=HEAD_DIM, device=device)
    tables = jitrope.tables.cos_sin(LONGEST, inv_freq)  # for positions of the whole batch
    count = (batch.labels != IGNORED).sum()
    dist.all_reduce(count)  # the labels of all ranks

    losses, differences = [], {}
    for step in range(arguments.steps):
        loss = batch.loss(model, tables) / count  # this rank's part of the mean
        (loss * dp * cp).backward()  # FSDP divides the sum of all ranks' gradients by dp * cp
        if step == 0:
            found = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
            whole = [Batch(seed, arguments.tokens, device, cp_size=1, cp_rank=0) for seed in range(dp)]
            for name, want in alone(whole, tables, count, dtype).items():
                differences[name] = float((found[name] - want).abs().max() / want.abs().max())
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total := loss.detach())
        losses.append(float(total))

    worst = max(differences, key=differences.get)
    right = {"gradients are one process's up to rounding": differences[worst] < limit}
    right["the loss falls"] = losses[-1] < losses[0]
    if dist.get_rank() == 0:
        print(f"dp {dp}, cp {cp} on {device} in {dtype}, {arguments.tokens} tokens a batch, {arguments.steps} steps")
        print(*(f"{what}: {'yes' if true else 'NO'}" for what, true in right.items()), sep="\n")
        print(f"the largest difference is {worst}'s, {differences[worst]:.1e} of its largest value")
        print(f"the loss was {losses[0]:.3f}, and is {losses[-1]:.3f}")
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
