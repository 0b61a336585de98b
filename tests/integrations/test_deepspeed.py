"""DeepSpeed: jitrope's functions against the host's own."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product

import pytest
import torch

from jitrope.integrations import deepspeed

from .. import hosts
from ..devices import devices

T, ROWS = (6, 2, 3, 16), (2, 6, 3, 16)
CASES = {  # shape of t, shape of the tables
    "sbhd": (T, (6, 1, 1, 16)), "bshd": (ROWS, (1, 6, 1, 16)), "bshd-batched": (ROWS, (2, 6, 1, 16)),
    "sequence-is-batch": ((1, 1, 3, 16), (1, 1, 1, 16)), "partial": (T, (6, 1, 1, 8)),
    "shd": ((6, 3, 16), (6, 1, 16)), "sd": ((6, 16), (6, 16)), "heads-too": (T, (6, 1, 3, 16)),
    "one-angle": (T, (1, 1, 1, 16)), "fewer-axes": (ROWS, (6, 1, 16)),
}  # fmt: skip
SOME = (("sbhd", "bfloat16"), ("bshd-batched", "float32"))


@pytest.mark.parametrize(("device", "name", "dtype"), devices(product(CASES, ("float32", "bfloat16")), SOME))
def test_forward_and_gradient(device: str, name: str, dtype: str) -> None:
    layer, (shape, table_shape) = hosts.installed("deepspeed.sequence.layer"), CASES[name]
    torch.manual_seed(0)
    t, angles, results = torch.randn(shape).to(device, getattr(torch, dtype)), torch.rand(table_shape) * 9, []
    cos, sin = angles.cos().to(t), angles.sin().to(t)
    for function, leaf in ((deepspeed, t.clone()), (layer, t.float().clone())):
        out = function.apply_rotary_pos_emb(leaf.requires_grad_(), cos.to(leaf), sin.to(leaf))
        results.append((out, *torch.autograd.grad(out.sin().sum(), leaf)))
    rtol, atol = (2**-7, 0.1) if dtype == "bfloat16" else (1e-5, 1e-5)
    for got, want in zip(*results):
        assert got.dtype == t.dtype
        torch.testing.assert_close(got.float(), want, rtol=rtol, atol=atol)


def test_the_gradient_of_fpdt() -> None:
    """Its own function, and every module that holds the rope."""
    layer = hosts.installed("deepspeed.sequence.layer")
    fpdt_layer = hosts.installed("deepspeed.sequence.fpdt_layer")
    host, t, angles = fpdt_layer.apply_rotary_pos_emb_backward, torch.randn(2, 6, 3, 16), torch.rand(1, 6, 1, 16)
    with deepspeed.enable() as report:
        assert layer.apply_rotary_pos_emb is fpdt_layer.apply_rotary_pos_emb
        got = fpdt_layer.apply_rotary_pos_emb_backward(t, angles.cos(), angles.sin())
    torch.testing.assert_close(got, host(t, angles.cos(), angles.sin()))
    assert report.calls == {"jitrope": 1, "host": 0}


def test_attention_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a group of one the Ulysses layer calls the replaced function, with the host's result."""
    layer, host = hosts.installed("deepspeed.sequence.layer"), hosts.installed("deepspeed")
    # A group of one needs no sums in shared memory, which DeepSpeed would build for a minute and a half.
    monkeypatch.setitem(host.ops.__compatible_ops__, "deepspeed_shm_comm", False)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 6, 4, 16, requires_grad=True) for _ in range(3))
    angles, results = torch.rand(6, 1, 1, 16), []
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        host.comm.init_distributed("gloo", auto_mpi_discovery=False)
        attention = layer.DistributedAttention(lambda q, k, v: q * k + v, torch.distributed.group.WORLD)
        for enable in (nullcontext, deepspeed.enable):
            with enable() as report:
                out = attention(q, k, v, 0, rotary_pos_emb=(angles.cos(), angles.sin()))
                results.append((out, *torch.autograd.grad(out.square().sum(), (q, k))))
    finally:
        torch.distributed.destroy_process_group()
    assert report.calls == {"jitrope": 2, "host": 0}
    torch.testing.assert_close(*results)
