"""`prepare_fused_qkv`: gradients of some tensors, launches, one token, no tokens. `stages/test_bias` has its bias."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import jitrope
from jitrope import DynamicQuantize, KVCache, Norm, Packed, prepare_fused_qkv

from ..devices import DEVICES, noise

FP32, TABLE = torch.float32, [(5, 32), (5, 32)]
ORDERS = [("qkv", 10), ("grouped", 10), ("qkv_gated", 16)]
"""Each order with its number of heads, for 6 heads of q and 2 of k."""
assert_same = partial(torch.testing.assert_close, rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_a_v_without_a_gradient_may_be_anything(device: str) -> None:
    """Also one that is normalised."""
    qkv, cos, sin = noise(device, FP32, (2, 5, 10, 64), *TABLE)
    qkv[:, :, 8:] = torch.nan
    leaves = [qkv.requires_grad_(), *torch.ones(2, 64, device=device, requires_grad=True).unbind()]
    q, k, _ = prepare_fused_qkv(qkv, cos, sin, heads=(6, 2), norm=Norm(*leaves[1:], v_norm=True))
    for grad in torch.autograd.grad(q.sum() + k.sum(), leaves):
        assert not grad.isnan().any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm", [None, {}, {"across_heads": True, "after_rope": True}], ids=str)
@pytest.mark.parametrize(("order", "heads"), ORDERS)
def test_a_gradient_with_strides_of_zero(order: str, heads: int, norm: dict[str, Any] | None, device: str) -> None:
    """As from `sum().backward()`; packed, with tokens after the last sequence."""
    qkv, bias, cos, sin = noise(device, FP32, (2, 5, heads, 64), (heads * 64,), *TABLE)
    size = [64 * (n if norm and "across_heads" in norm else 1) for n in (6, 2)]
    weights = [torch.linspace(0.5, 1.5, n, device=device) for n in size if norm is not None]
    leaves = [x.requires_grad_() for x in (qkv.flatten(2).flatten(0, 1), bias, *weights)]
    words = {"positions": Packed(torch.tensor([0, 4, 7], device=device)), "heads": (6, 2), "order": order}
    words["norm"] = None if norm is None else Norm(*weights, **norm)
    out = prepare_fused_qkv(leaves[0], cos, sin, bias=bias, **words)
    got = torch.autograd.grad(sum(x.sum() for x in out), leaves, retain_graph=True)
    torch.testing.assert_close(got, torch.autograd.grad(out, leaves, [torch.ones_like(x) for x in out]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wanted", [(True, True), (False, True), (True, False)], ids=["both", "bias", "qkv"])
@pytest.mark.parametrize(("order", "heads"), ORDERS)
def test_the_gradients_in_place(order: str, heads: int, wanted: tuple[bool, bool], device: str) -> None:
    """Also where qkv is a view, and where it or the bias has no gradient."""
    given = noise(device, FP32, (2, 5, heads, 64), (heads * 64,), *TABLE)
    shape, words = (2, 5 * 64) if order == "grouped" else (heads, 64), {"heads": (6, 2), "order": order}
    qkv, bias = (x.requires_grad_(some) for x, some in zip((given[0].flatten(2), given[1]), wanted))
    leaves, found = [x for x, some in zip((qkv, bias), wanted) if some], []
    for fused, own in ((qkv * 1, bias), (qkv + bias, None)):
        out = prepare_fused_qkv(fused.unflatten(-1, shape), *given[2:], bias=own, inplace=True, **words)
        found.append([out, *torch.autograd.grad(out, leaves, torch.sin(3 * out.detach()))])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm", [None, Norm()], ids=["no", "norm"])
@pytest.mark.parametrize(("order", "heads"), ORDERS)
def test_no_tokens(order: str, heads: int, norm: Norm | None, device: str) -> None:
    """The bias then has a gradient of zeros."""
    qkv, bias, cos, sin = noise(device, FP32, (2, 5, heads, 64), (heads * 64,), *TABLE)
    empty, bias = qkv[:, :0].flatten(2).requires_grad_(), bias.requires_grad_()
    got = prepare_fused_qkv(empty, cos, sin, heads=(6, 2), order=order, bias=bias, norm=norm)
    assert [x.shape for x in got] == [(2, 0, n, 64) for n in (6, 2, 2, 6)[: len(got)]]
    found = torch.autograd.grad(got, (empty, bias), [torch.empty_like(x) for x in got])
    assert not any(x.any() for x in found)


def test_a_second_derivative() -> None:
    """Of a rotation, whose squares have the gradient 2 (qkv + bias)."""
    angles = torch.rand(5, 32)
    qkv, bias = torch.randn(2, 5, 640, requires_grad=True), torch.randn(640, requires_grad=True)
    words = {"cos": angles.cos(), "sin": angles.sin(), "heads": (6, 2), "bias": bias}
    out = sum(x.square().sum() for x in prepare_fused_qkv(qkv, **words))
    first = torch.autograd.grad(out, (qkv, bias), create_graph=True)
    second = torch.autograd.grad(first[1].sum(), (qkv, bias))
    torch.testing.assert_close(second[0], torch.full_like(qkv, 2.0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(second[1], torch.full_like(bias, 20.0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("norm", [None, {}, {"across_heads": True}], ids=str)
@pytest.mark.parametrize(("order", "heads"), ORDERS)
def test_the_forward_and_the_gradient_are_one_launch_each(order: str, heads: int, norm: dict[str, Any] | None) -> None:
    """Without a norm the gradient is the kernel without a bias. Across heads v and a gate have theirs by torch."""
    qkv, bias, cos, sin = noise("meta", FP32, (2, 5, heads, 64), (heads * 64,), *TABLE)
    words = {"heads": (6, 2), "order": order, "norm": None if norm is None else Norm(**norm)}
    copies, leaves = norm is None or not norm, (qkv.flatten(2).requires_grad_(), bias.requires_grad_())
    gated = order == "qkv_gated" and copies
    with jitrope.planning(["auto"]) as specs:
        out = prepare_fused_qkv(leaves[0], cos, sin, bias=bias, **words)
        torch.autograd.grad(out, leaves, [torch.empty_like(x) for x in out])
    assert [(x.added_bias, x.gated) for x in specs] == [(True, gated), (norm is not None, False)]
    with jitrope.planning(["auto"]) as specs:
        prepare_fused_qkv(qkv.detach().flatten(2), cos, sin, bias=bias.detach(), inplace=True, **words)
    assert [(x.added_bias, x.gated, x.copy_v) for x in specs] == [(True, gated, copies)]


@pytest.mark.parametrize("stage", ["cache", "quantize", "out"])
@pytest.mark.parametrize("number", [np.int64, float])
def test_heads_are_any_whole_numbers(number: Any, stage: str) -> None:
    """numpy's and 3.0 too."""
    qkv, table = torch.randn(2, 5, 10 * 64), torch.rand(5, 32)
    words: dict[str, Any] = {"quantize": DynamicQuantize(v=True), "out": (None, None, torch.zeros(2, 5, 2, 64))}
    words["cache"] = KVCache(*torch.zeros(2, 24, 2, 64), torch.arange(10))
    one, two = (
        prepare_fused_qkv(qkv, table, table, heads=heads, **{stage: words[stage]})
        for heads in ((6, 2), [number(6), number(2)])
    )
    assert [x is None for x in one] == [x is None for x in two] == [False, *[stage == "cache"] * 2]
    q, same_q = (x[0].values.view(torch.uint8) if stage == "quantize" else x[0] for x in (one, two))
    assert_same(q, same_q)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("order", "heads"), ORDERS)
def test_one_token_in_place(order: str, heads: int, device: str) -> None:
    """A decode step: its heads lie one after the other, as in a tensor of their own."""
    qkv, words = torch.randn(1, 1, heads * 64, device=device), {"heads": (6, 2), "order": order}
    cos, sin, ones, zeros = (*torch.randn(2, 1, 32), torch.ones(1, 32), torch.zeros(1, 32))
    want = prepare_fused_qkv(qkv, cos.to(device), sin.to(device), **words)
    prepare_fused_qkv(own := qkv.clone(), cos.to(device), sin.to(device), inplace=True, **words)
    assert_same(want, prepare_fused_qkv(own, ones.to(device), zeros.to(device), **words))
