"""Known calls: what torch's guards, by which they are known, see."""

from __future__ import annotations

import torch


def test_a_guard_sees_what_changes_and_what_watches() -> None:
    """Known calls use torch's guards instead of comparing each tensor."""
    q, other = torch.randn(2, 3), torch.randn(2, 3)
    guards = torch._C._dynamo.guards.TensorGuards(q, other, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    assert guards.check(torch.randn(2, 3), torch.randn(2, 3))
    assert not guards.check(q, q)  # one tensor twice
    subclass = torch.nn.Parameter(torch.randn(2, 3), requires_grad=False)
    others = (
        torch.randn(2, 4), torch.randn(3, 2).T, q.double(), q.half(), torch.randn(2, 3, requires_grad=True), subclass,
        torch.randn(2, 3, device="meta"), torch.randn(6),
    )  # fmt: skip
    for x in others:
        assert not guards.check(x, other)
        with torch.no_grad():
            assert not guards.check(x, other)
    with torch.inference_mode():
        assert not guards.check(torch.randn(2, 3), other)
    seen = []
    torch.vmap(lambda x: (seen.append(guards.check(q, other)), x)[1])(torch.randn(4))
    torch.func.grad(lambda x: (seen.append(guards.check(q, other)), x.sum())[1])(torch.randn(4))
    assert seen == [False, False]
