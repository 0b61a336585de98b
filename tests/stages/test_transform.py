"""The Hadamard transform of heads, with and without a conversion behind it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import jitrope
from jitrope import Norm

from ..devices import DEVICES
from ..host import backend


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [2, 4, 8, 16, 32])
def test_the_order_is_sylvesters(size: int, device: str) -> None:
    """Element i of q of row i is 1, so the results are the rows of the matrix; v stays."""
    q, v = torch.eye(size, device=device).view(1, size, 1, size), torch.rand(1, size, 1, size, device=device)
    got, _, same = jitrope.prepare_qkv(q, None, v, hadamard=True)
    want = torch.tensor([[(-1.0) ** (i & j).bit_count() for i in range(size)] for j in range(size)]) / size**0.5
    torch.testing.assert_close(got.view(size, size).cpu(), want)
    assert torch.equal(same, v)


@pytest.mark.gpu
@pytest.mark.skipif(backend.DEVICE != "cpu", reason="launches are counted on the host's kernels")
@pytest.mark.parametrize("norm", [None, Norm(), Norm(kind="layer_norm"), Norm(after_rope=True)], ids=str)
def test_one_launch_and_two_for_the_gradient(norm: Any) -> None:
    q, k = (torch.randn(2, 5, n, 64).bfloat16().requires_grad_() for n in (4, 2))
    before = backend.launched.total()
    words: dict[str, Any] = {"freqs": torch.rand(9, 16), "rotary_dim": 32, "rotary_offset": 32, "norm": norm}
    out = jitrope.prepare_qkv(q, k, None, **words, hadamard=True)[:2]
    assert backend.launched.total() == before + 1
    torch.autograd.grad(out, (q, k), [torch.ones_like(y) for y in out])
    assert backend.launched.total() == before + 3
