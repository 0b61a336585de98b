"""DeepSpeed: jitrope's functions against the host's own."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from jitrope.integrations import deepspeed

from .. import hosts
from ..devices import devices

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


CASES = {  # shape of t, shape of the tables
    "sbhd": ((6, 2, 3, 16), (6, 1, 1, 16)),
    "bshd": ((2, 6, 3, 16), (1, 6, 1, 16)),
    "bshd-batched": ((2, 6, 3, 16), (2, 6, 1, 16)),
    "sequence-is-batch": ((1, 1, 3, 16), (1, 1, 1, 16)),
    "partial": ((6, 2, 3, 16), (6, 1, 1, 8)),
    "shd": ((6, 3, 16), (6, 1, 16)),
    "sd": ((6, 16), (6, 16)),
    "heads-too": ((6, 2, 3, 16), (6, 1, 3, 16)),
    "one-angle": ((6, 2, 3, 16), (1, 1, 1, 16)),
    "fewer-axes": ((2, 6, 3, 16), (6, 1, 16)),
}


@pytest.mark.parametrize(
    ("device", "name", "dtype"),
    devices(product(CASES, ("fp32", "bf16")), (("sbhd", "bf16"), ("bshd-batched", "fp32"))),
)
def test_forward_and_gradient(device: str, name: str, dtype: str) -> None:
    layer = hosts.installed("deepspeed.sequence.layer")
    torch.manual_seed(0)
    shape, table_shape = CASES[name]
    t = torch.randn(shape).to(device, DTYPES[dtype])
    angles = torch.rand(table_shape) * 9
    cos, sin = (f(angles).to(t) for f in (torch.cos, torch.sin))
    results = []
    for function, x in ((deepspeed, t), (layer, t.float())):
        leaf = x.clone().requires_grad_()
        out = function.apply_rotary_pos_emb(leaf, cos.to(x), sin.to(x))
        results.append((out, *torch.autograd.grad(out.sin().sum(), leaf)))
    for a, b in zip(*results):
        assert a.dtype == t.dtype
        rtol, atol = (2**-7, 0.1) if dtype == "bf16" else (1e-5, 1e-5)
        torch.testing.assert_close(a.float(), b, rtol=rtol, atol=atol)


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
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        from deepspeed import comm

        comm.init_distributed("gloo", auto_mpi_discovery=False)
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, 6, 4, 16, requires_grad=True) for _ in range(3))
        angles = torch.rand(6, 1, 1, 16)
        attention = layer.DistributedAttention(lambda q, k, v: q * k + v, torch.distributed.group.WORLD)
        results = []
        for patched in (False, True):
            if patched:
                report = deepspeed.enable()
            out = attention(q, k, v, 0, rotary_pos_emb=(angles.cos(), angles.sin()))
            results.append((out, *torch.autograd.grad(out.square().sum(), (q, k))))
    finally:
        deepspeed.disable()
        torch.distributed.destroy_process_group()
    assert report.calls == {"jitrope": 2, "host": 0}
    torch.testing.assert_close(*results)
