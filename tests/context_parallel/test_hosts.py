"""The README's lines for torchtitan and Megatron-core: a model on several ranks computes what it does on one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jitrope import context_parallel
from jitrope.context_parallel import Schedule

from .. import hosts
from ..ranks import GROUPS, _started, on_ranks

README = Path(context_parallel.__file__).with_name("README.md").read_text()


@pytest.fixture(autouse=True)
def processes_of_its_own() -> Iterator[None]:
    """Other tests get new ones: with torchtitan 0.3.0 imported, calls with two collectives at once may crash later."""
    yield
    for process, _ in _started.pop(("gloo", 4), ()):
        process.kill()


def assign(host: str, model: Any, schedule: Schedule) -> None:
    """Run the lines of the README that name a host."""
    (lines,) = (text for text in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if f"# {host}" in text)
    exec(lines, {**vars(context_parallel), "model": model, "schedule": schedule})


def gradients(loss: Tensor, x: Any, group: Any) -> list[Tensor]:
    """Those of the parameters, added up over the ranks of a group."""
    found = [grad.clone() for grad in torch.autograd.grad(loss, x)]
    for grad in found:
        dist.all_reduce(grad, group=group)
    return found


@pytest.mark.skipif(find_spec("torchtitan") is None, reason="torchtitan is not installed")
@on_ranks
def test_torchtitan() -> None:
    """torchtitan cuts tokens and positions, and the model's attention is ours."""
    with hosts.triton():
        torch.manual_seed(0)
        model = hosts.titan_config("llama3", False).build()
        model.init_states()
        from torchtitan.distributed.context_parallel import cp_shard

        tokens, places = torch.randint(0, 2048, (2, 48)), torch.arange(48).expand(2, -1)
        weights = [p for p in model.parameters() if p.requires_grad]
        want = model(tokens, positions=places)
        grads = torch.autograd.grad(want.square().sum(), weights)
        for group in GROUPS:
            size = dist.get_world_size(group)
            schedule = Schedule.fixed(2, 48, "cpu", group=group)
            mesh = DeviceMesh.from_group(dist.group.WORLD if group is None else group, "cpu", mesh_dim_names=("cp",))
            (own, at), _ = cp_shard(mesh, (tokens, places), None)
            assign("torchtitan", model, schedule)
            got = model(own, positions=at)
            rows = schedule.shard(want.detach().flatten(0, 1)).unflatten(0, (2, 48 // size))
            found = gradients(got.square().sum(), weights, group)
            torch.testing.assert_close(got, rows, rtol=1e-4, atol=1e-5)
            hosts.close(found, grads, 1e-4)


@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron is not installed")
@on_ranks
def test_megatron() -> None:
    """A layer of Megatron-core, with the rows that Megatron gives each rank."""
    alone = GROUPS[0]
    with pytest.MonkeyPatch.context() as patch:
        core = hosts.megatron(patch)
        x, freqs = torch.randn(48, 2, 64, generator=torch.Generator().manual_seed(0)), hosts.freqs_of(48, 32)
        ranks = core.groups.ProcessGroupCollection(tp=alone, cp=alone, pp=alone)
        layer = hosts.megatron_attention(core, ranks, "RMSNorm")
        layer.config.apply_rope_fusion = False
        weights = [p for name, p in layer.named_parameters() if name != "linear_proj.bias"]  # which the layer returns
        want, _ = layer(x, None, rotary_pos_emb=freqs)
        grads = torch.autograd.grad(want.square().sum(), weights)
        parts = SimpleNamespace(layers=[SimpleNamespace(self_attention=layer)])
        for group in GROUPS:
            schedule = Schedule.fixed(2, 48, "cpu", group=group)
            assign("Megatron-core", SimpleNamespace(decoder=parts, config=layer.config), schedule)
            size, rank = dist.get_world_size(group), dist.get_rank(group)
            chunks = torch.arange(48).chunk(2 * size)  # of each sequence
            at = torch.cat((chunks[rank], chunks[2 * size - 1 - rank]))
            got, _ = layer(x[at], None, rotary_pos_emb=freqs[at])
            found = gradients(got.square().sum(), weights, group)
            torch.testing.assert_close(got, want[at], rtol=1e-4, atol=1e-4)
            hosts.close(found, grads, 1e-4)
