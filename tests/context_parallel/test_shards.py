"""`Partition`: which rows each rank has, and functions that cut and join."""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from jitrope import InvalidInput
from jitrope.base.partition import RULES
from jitrope.context_parallel import Partition, Schedule, all_gather_attention

from ..fresh import python
from ..ranks import GROUPS, on_ranks
from .batches import dealt, random_batch


@pytest.mark.parametrize("seed", range(48))
def test_partition(seed: int) -> None:
    """Every token is in one row of one rank, and rows, positions and offsets are right, with padding and without."""
    batch, cp_size = random_batch(seed)
    want, starts = dealt(batch, cp_size), [0, *accumulate(batch.cut)]
    assert sorted(t for rows in want for t in rows) == list(range(batch.tokens))
    x = torch.randn(batch.tokens, 2, 3)
    for rank, tokens in enumerate(want):
        ranks: dict[str, Any] = {"cp_size": cp_size, "cp_rank": rank, "rule": batch.rule}
        words = {"cu_seqlens_padded": batch.padded, "separate_padding": batch.separate, **ranks}
        part, by_padded = (
            Partition(batch.cu_seqlens, batch.tokens, **words),
            Partition(batch.offsets, batch.tokens, **ranks),
        )
        assert batch.separate or torch.equal(by_padded.indices, part.indices)
        assert part.rows == len(tokens)
        assert part.indices.tolist() == tokens
        first = [max(s for s in starts if s <= t) for t in tokens]
        assert part.position_ids.tolist() == [t - s if t < starts[-1] else 0 for t, s in zip(tokens, first)]
        local = [sum(t < s for t in tokens) for s in batch.offsets]
        assert part.local_cu_seqlens.tolist() == by_padded.local_cu_seqlens.tolist() == local
        assert torch.equal(part.shard(x), x[tokens])


def test_shard_of_any_tensor() -> None:
    """Tensors with one axis or many, and integers. The gradient is zero in the rows of other ranks."""
    part = Partition(torch.tensor([0, 5, 11]), 12, cp_size=2, cp_rank=1)
    for x in (torch.arange(12), torch.randn(12, 2, 3, 2).double(), torch.randn(24)[::2] > 0):
        assert torch.equal(part.shard(x), x[part.indices.long()])
    x = torch.randn(12, 4, requires_grad=True)
    part.shard(x).sum().backward()
    want = torch.zeros(12, 4)
    want[part.indices.long()] = 1
    assert torch.equal(x.grad, want)


def test_a_partition_of_inference_mode_serves_training() -> None:
    part = Partition(torch.tensor([0, 7, 10]), 10, cp_size=2, cp_rank=0)
    with torch.inference_mode():
        rows, cu_seqlens = part.shard(torch.arange(10)), torch.tensor([0, 7, 10])
    x = torch.randn(10, 3, requires_grad=True)
    x[part.indices].sum().backward()
    assert x.grad[:, 0].nonzero().flatten().tolist() == rows.tolist()
    whole = Partition(cu_seqlens, 10).unshard(x)
    assert torch.equal(whole, x)
    whole.sum().backward()


@pytest.mark.parametrize("strict", [False, True])
def test_a_partition_that_was_exported_serves_eager_calls(strict: bool) -> None:
    part, x = Partition(torch.tensor([0, 7, 10]), 10, cp_size=2, cp_rank=0), torch.arange(10.0)
    cut = type("Cut", (torch.nn.Module,), {"forward": lambda self, x: part.shard(x)})()
    exported = torch.export.export(cut, (x,), strict=strict).module()
    assert part.shard(x).tolist() == exported(x).tolist() == [0, 1, 6, 7, 9]


@pytest.mark.parametrize("inside", [False, True])
def test_a_compiled_function_cuts_a_batch(inside: bool) -> None:
    of = partial(Partition, torch.tensor([0, 7, 10]), 10, cp_size=2, cp_rank=0)
    part, x, found = of(), torch.randn(10, 3, requires_grad=True), []
    for compile_it in (partial, partial(torch.compile, backend="aot_eager", fullgraph=True)):
        call = compile_it(lambda own: (of() if inside else part).shard(own) * part.position_ids[:, None])
        found.append((out := call(x), torch.autograd.grad(out.sum(), x)[0]))
    assert all(torch.equal(*both) for both in zip(*found))


LATE = """
import weakref, torch.distributed as dist, jitrope.context_parallel
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
import torch.distributed.nn.functional  # as Dynamo does, which the first step of an optimizer imports
group = weakref.ref(dist.group.WORLD)
dist.destroy_process_group()
assert group() is None
"""


def test_a_destroyed_group_is_gone() -> None:
    """Also if Dynamo was imported after the group was made. Else its threads are alive when Python ends."""
    python("-c", LATE, check=True)


@on_ranks
def test_unshard() -> None:
    """It inverts shard for any tensor, and its gradient is the sum of all ranks' gradients."""
    cu, tokens = torch.tensor([0, 5, 5, 16]), 19
    for group in GROUPS:
        for rule in RULES:
            part = Partition(cu, tokens, rule=rule, group=group)
            several = torch.randn(tokens, 2, 3, generator=torch.Generator().manual_seed(0))
            for x in (torch.arange(tokens), several, several[:, :0]):
                assert torch.equal(part.unshard(part.shard(x)), x)
            local = torch.randn(part.rows, 2, dtype=torch.float64, requires_grad=True)
            weight = torch.arange(2.0 * tokens, dtype=torch.float64).view(tokens, 2)
            (part.unshard(local) * weight * (dist.get_rank(group) + 1)).sum().backward()
            ranks = sum(range(1, dist.get_world_size(group) + 1))
            torch.testing.assert_close(local.grad, weight[part.indices.long()] * ranks)


@on_ranks
def test_groups() -> None:
    """Ranks are counted in the group. A DeviceMesh of one axis is one; DTensors are refused by name."""
    mesh, cu = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "cp")), torch.tensor([0, 16])
    assert repr(Schedule(cu, 16, group=mesh["cp"])) == repr(Schedule(cu, 16))
    assert repr(Partition(cu, 16)) == f"Partition(4 of 16 tokens, 1 sequences, rank {dist.get_rank()} of 4, dual_chunk)"
    assert f"rank {dist.get_rank() // 2} of 2" in repr(Partition(cu, 16, group=GROUPS[1]))  # of 0 and 2, or 1 and 3
    with pytest.raises(InvalidInput, match=r"group is Dev.*; it must be a process group, a DeviceMesh of one axis"):
        Partition(cu, 16, group=mesh)
    with pytest.raises(InvalidInput, match="not in the group"):
        Partition(cu, 16, group=dist.GroupMember.NON_GROUP_MEMBER)
    x = distribute_tensor(torch.randn(4, 2, 8), mesh["cp"], [Replicate()])
    with pytest.raises(InvalidInput, match=r"q is a DTensor; pass q.to_local\(\)"):
        all_gather_attention(x, x, x, Schedule(cu, 16))
