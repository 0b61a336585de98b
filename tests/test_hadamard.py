"""`hadamard=` without a conversion: heads in their dtype, with gradients, in every place for results."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import jitrope
from jitrope import InvalidInput, Norm, Quantize

from . import oracle
from .host import backend

NORMS: dict[str, Any] = {
    "none": None,
    "rms": lambda w: Norm(*w),
    "layer": lambda w: Norm(*w, q_bias=w[1], kind="layer_norm"),
    "after": lambda w: Norm(after_rope=True),
}


class Inputs:
    """q, k and v, tables for 32 of 64 elements from `first` on, weights."""

    def __init__(self, device: str, layout: str = "bshd", dtype: torch.dtype = torch.float32, first: int = 32) -> None:
        generator = torch.Generator().manual_seed(2)
        batch = 1 if layout == "thd" else 2
        q, k, v = (torch.randn(batch, 5, heads, 64, generator=generator) for heads in (4, 2, 2))
        self.layout, self.first = layout, first
        self.heads = [oracle.unheads(x.to(device, dtype), layout) for x in (q, k, v)]
        self.tables = [torch.randn(9, 16, generator=generator).to(device) for _ in range(2)]
        self.weights = [torch.randn(64, generator=generator).to(device, dtype) for _ in range(2)]

    def words(self) -> dict[str, Any]:
        return {"layout": self.layout, "rotary_dim": 32, "rotary_offset": self.first}


@pytest.mark.gpu
@pytest.mark.skipif(backend.DEVICE != "cpu", reason="launches are counted on the host's kernels")
@pytest.mark.parametrize("norm", NORMS)
def test_one_launch_and_two_for_the_gradient(norm: str) -> None:
    x = Inputs("cpu", dtype=torch.bfloat16)
    q, k = (y.requires_grad_() for y in x.heads[:2])
    words = {"norm": NORMS[norm](x.weights)} if norm != "none" else {}
    before = backend.launched.total()
    out = jitrope.prepare_qkv(q, k, None, *x.tables, **x.words(), **words, hadamard=True)[:2]
    assert backend.launched.total() == before + 1
    torch.autograd.grad(out, (q, k), [torch.ones_like(y) for y in out])
    assert backend.launched.total() == before + 3


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "beside quantize": ({"quantize": Quantize(0.1, 0.1)}, "hadamard does not go with quantize; give it to that"),
    "a number": ({"hadamard": 2}, "hadamard is 2; it must be"),
    "a word": ({"hadamard": "rotary"}, "prepare_qkv: hadamard is 'rotary'; it must be True or False"),
    "across heads": ({"norm": Norm(across_heads=True)}, "across_heads does not go with hadamard"),
    "inverse": ({"norm": Norm(), "inverse": True}, "inverse does not go with norm"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    changes, message = REFUSED[name]
    x = Inputs("cpu")
    before = [y.clone() for y in x.heads]
    with pytest.raises(InvalidInput, match=message):
        jitrope.prepare_qkv(*x.heads, *x.tables, **{**x.words(), "hadamard": True, **changes})
    assert all(torch.equal(a, b) for a, b in zip(x.heads, before))
