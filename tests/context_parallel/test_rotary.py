"""`rope=`: the launch that packs k and v also rotates."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import jitrope
from jitrope.context_parallel import Rope, Schedule, all_gather_attention

from ..host.backend import DEVICE
from ..ranks import GROUPS, on_ranks
from .batches import CASES, assert_rows, made, schedule_of

ROPED = [
    "spare",
    "padded, two-sided",
    "apart, causal",
    "contiguous, two-sided",
    "one long, short window",
    "kept",
    "groups",
    "Dv larger",
]


@on_ranks
@pytest.mark.parametrize("name", [*ROPED, "more ranks than tokens"])
def test_rope(name: str) -> None:
    """It equals apply_rope at each row's position and then attention, with the same gradients."""
    batch = replace(CASES[name], dtype=torch.float32)
    freqs = torch.outer(torch.arange(310.0), torch.tensor([1.0, 0.1, 0.01]))
    words = {"freqs": freqs, "interleaved": True, "rotary_dim": 6}
    for group in GROUPS:
        schedule, results = schedule_of(batch, group=group), []
        for fused in (True, False):
            q, k, v, dout = (schedule.shard(x).requires_grad_() for x in made(batch)[0])
            where, rope = {"positions": schedule.position_ids, "layout": "thd"}, Rope(**words) if fused else None
            given = (q, k) if fused else jitrope.apply_rope(q, k, **words, **where)
            out = all_gather_attention(*given, v, schedule, rope=rope, **batch.options)
            results.append((out, *torch.autograd.grad(out, (q, k, v), dout)))
        spare = (batch.sequence < 0)[schedule.indices.long()]
        for what, got, want in zip(("out", "dq", "dk", "dv"), *results):
            assert_rows(got, want, spare, 1e-5 * max([1.0, *want.abs().flatten().tolist()]), what)


@on_ranks
def test_a_rank_without_rows_writes_nothing() -> None:
    """Of fewer tokens than ranks: k and v of a rank without rows keep their versions, and gradients flow."""
    for group in GROUPS:
        schedule, rope = Schedule(torch.tensor([0, 1]), 1, group=group), Rope(freqs=torch.ones(1, 4))
        q, k, v = (torch.randn(schedule.rows, 2, 8, requires_grad=True) for _ in range(3))
        versions = [x._version for x in (q, k, v)]
        all_gather_attention(q, k, v, schedule, rope=rope).sum().backward()
        assert [x._version for x in (q, k, v)] == versions
        assert all(x.grad is not None and x.grad.shape == x.shape for x in (q, k, v))


@pytest.mark.parametrize("head_groups", [1, 2])
def test_tables_get_no_gradient(head_groups: int) -> None:
    q, cos = torch.randn(10, 4, 16), torch.ones(10, 8, requires_grad=True)
    rope, schedule = Rope(cos, torch.zeros(10, 8)), Schedule(torch.tensor([0, 7, 10]), 10)
    assert not all_gather_attention(q, q, q, schedule, rope=rope, head_groups=head_groups).requires_grad


@pytest.mark.gpu
@pytest.mark.parametrize("spare", [0, 5])
def test_one_launch(spare: int) -> None:
    """It rotates q and k and packs k and v, with the bits of apply_rope followed by attention."""
    cu_seqlens = torch.tensor([0, 37, 178, 178, 207], dtype=torch.int32, device=DEVICE)
    torch.manual_seed(0)
    of = {"device": DEVICE, "dtype": torch.bfloat16, "requires_grad": True}
    q, k, v = (torch.randn(207 + spare, heads, 64, **of) for heads in (8, 2, 2))
    freqs = torch.outer(torch.arange(141.0, device=DEVICE), torch.rand(32, device=DEVICE))
    dout = torch.randn_like(q)
    schedule = Schedule(cu_seqlens, 207 + spare, max_seqlen=141)
    rotated = jitrope.apply_rope(q, k, freqs=freqs, positions=jitrope.Packed(cu_seqlens))
    want = all_gather_attention(*rotated, v, schedule)
    out = all_gather_attention(q, k, v, schedule, rope=Rope(freqs=freqs))
    assert torch.equal(out, want)
    for got, expected in zip(*(torch.autograd.grad(x, (q, k, v), dout) for x in (out, want))):
        torch.testing.assert_close(got, expected, rtol=2**-6, atol=2**-6 * float(expected.abs().max()))
