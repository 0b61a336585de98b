"""`hadamard=` without a conversion: heads in their dtype, with gradients, in every place for results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import jitrope
from jitrope import InvalidInput, KVCache, Norm, Packed, Quantize, Ulysses

from . import oracle
from .devices import DEVICES
from .host import backend

LAYOUTS = ("bshd", "sbhd", "bhsd", "thd")
NORMS: dict[str, Any] = {
    "none": None,
    "rms": lambda w: Norm(*w),
    "layer": lambda w: Norm(*w, q_bias=w[1], kind="layer_norm"),
    "after": lambda w: Norm(after_rope=True),
}
WAYS = ("in place", "out", "ulysses", "cache", "cache in place", "no table", "packed")
OPTIONS: dict[str, dict[str, Any]] = {"rms": {}, "layer": {"norm_kind": "layer_norm"}, "after": {"after_rope": True}}


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

    def expected(self, x: Tensor, number: int, norm: str, interleaved: bool = False) -> Tensor:
        """q or k in fp64 by the oracle."""
        y, o = oracle.heads(oracle.exact(x), self.layout), OPTIONS.get(norm, {})
        own = (None, None) if norm == "after" else (self.weights[number], None)
        own = (own[0], self.weights[1]) if norm == "layer" and number == 0 else own
        turn = {"cos": self.tables[0], "sin": self.tables[1], "interleaved": interleaved}
        turn |= {"rotary_dim": 32, "rotary_offset": self.first}
        y = oracle.normed(y, *own, o) if norm in ("rms", "layer") else y
        y = oracle.rotated(y, turn)
        y = oracle.normed(y, *own, o) if norm == "after" else y
        return oracle.unheads(y @ oracle.hadamard_matrix(64).to(y), self.layout)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_and_gradients(layout: str, norm: str, device: str) -> None:
    """Of q, k, weights and a bias, of both and of k alone."""
    x = Inputs(device, layout)
    found = []
    for ours in (True, False):
        q, k, *x.weights = leaves = [y.detach().requires_grad_() for y in (*x.heads[:2], *x.weights)]
        if ours:
            words = {"norm": NORMS[norm](x.weights)} if norm != "none" else {}
            out = jitrope.prepare_qkv(q, k, None, *x.tables, **x.words(), **words, hadamard=True)[:2]
        else:
            out = tuple([x.expected(y, i, norm) for i, y in enumerate((q, k))])
        generator = torch.Generator().manual_seed(3)
        weights = [torch.randn(y.shape, generator=generator).to(y) for y in out]
        both = torch.autograd.grad(out, leaves, weights, allow_unused=True, retain_graph=True)
        alone = torch.autograd.grad(out[1], leaves, weights[1], allow_unused=True)
        found.append((*out, *both, *alone))
    for got, want in zip(*found):
        zero = got is not None and want is None
        assert (got is None) == (want is None) or (zero and not got.any())
        if want is not None:
            torch.testing.assert_close(got.double(), want.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "way", ["in place", "out", "ulysses", "cache", "cache in place", "no table", "packed", "known"]
)
def test_places_of_results(way: str, device: str) -> None:
    """bf16, rounded once."""
    x = Inputs(device, dtype=torch.bfloat16, layout="thd" if way == "packed" else "bshd", first=32)
    q, k, v = x.heads
    want = [x.expected(y, i, "rms") for i, y in enumerate((q, k))]
    words: dict[str, Any] = {**x.words(), "norm": Norm(*x.weights), "hadamard": True}
    tables, caches = x.tables, []
    if way == "no table":
        tables, words["norm"] = [], None
        matrix = oracle.hadamard_matrix(64)
        want = [y.double().cpu() @ matrix for y in (q, k)]
    elif way == "packed":
        words["positions"] = Packed(torch.tensor([0, 5], device=device))
    elif way == "out":
        words["out"] = [torch.empty_like(y).transpose(1, 2).contiguous().transpose(1, 2) for y in x.heads]
    elif way == "ulysses":
        words["out"] = Ulysses(2)
    elif way.startswith("cache"):
        caches = [torch.zeros(12, 2, 64, device=device, dtype=q.dtype) for _ in range(2)]
        words["cache"] = KVCache(*caches, torch.arange(10, device=device), rotate_k=True)
    words["inplace"] = way.endswith("in place")
    calls = 2 if way == "known" else 1
    for _ in range(calls):
        got = list(jitrope.prepare_qkv(q, k, v, *tables, **words))
    if way == "ulysses":
        got = [torch.cat([*y], 2) for y in got]
    assert (got[0] is q) == way.endswith("in place")
    for y, wanted in zip(got, want):
        torch.testing.assert_close(y.double().cpu(), wanted.cpu(), rtol=2**-8, atol=1e-4)
    if caches:
        assert torch.equal(caches[0][:10], got[1].flatten(0, 1))
        assert torch.equal(caches[1][:10], v.flatten(0, 1))
    elif way in ("out", "ulysses"):
        assert torch.equal(got[2], v)


@pytest.mark.parametrize("device", DEVICES)
def test_a_learned_table(device: str) -> None:
    x = Inputs(device)
    found = []
    for ours in (True, False):
        x.tables[0] = cos = x.tables[0].detach().requires_grad_()
        q, k = x.heads[:2]
        out = [x.expected(y, i, "rms") for i, y in enumerate((q, k))]
        if ours:
            out = [*jitrope.prepare_qkv(q, k, None, *x.tables, **x.words(), norm=Norm(*x.weights), hadamard=True)[:2]]
        found.append(torch.autograd.grad(sum((y.double() ** 3).sum() for y in out), cos)[0])
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-2)


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


def test_in_place_there_is_no_gradient() -> None:
    """The reason is that of a norm only beside one."""
    x, table = torch.randn(1, 4, 2, 16, requires_grad=True) * 1, torch.randn(2, 4, 8)
    for norm, text in ((None, "in place; leave"), (Norm(), "in place, because that needs the old q and k; leave")):
        with pytest.raises(InvalidInput, match=f"it has no gradient {text} inplace=True out"):
            jitrope.prepare_qkv(x, None, None, *table, norm=norm, hadamard=True, inplace=True)


def test_it_compiles_with_its_gradient() -> None:
    x = Inputs("cpu")
    q, k = (y.requires_grad_() for y in x.heads[:2])
    torch._dynamo.reset()

    def loss(function: Any) -> list[Tensor]:
        out = function(q, k)
        return [*out, *torch.autograd.grad(out, (q, k), [torch.ones_like(y) for y in out])]

    def forward(q: Tensor, k: Tensor) -> Any:
        return jitrope.prepare_qkv(q * 2, k, None, *x.tables, **x.words(), norm=Norm(*x.weights), hadamard=True)[:2]

    for got, want in zip(loss(torch.compile(forward, fullgraph=True, backend="aot_eager")), loss(forward)):
        torch.testing.assert_close(got, want)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "beside quantize": ({"quantize": Quantize(0.1, 0.1)}, "hadamard is given beside quantize, which has its own"),
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
