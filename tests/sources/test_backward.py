"""Gradients: what is kept for them, tables that learn, and second derivatives."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import jitrope
from jitrope import Norm, Packed, Quantize

from .. import oracle
from ..devices import DEVICES, noise

rand = lambda *shape: noise("cpu", torch.float32, shape)[0]  # noqa: E731


def test_only_tables_and_lengths_are_kept() -> None:
    q, k, (cos, sin), ends = rand(9, 4, 16), rand(9, 2, 16), rand(2, 9, 8), torch.tensor([0, 5, 7])
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.data_ptr()), lambda x: x):
        jitrope.apply_rope(q.requires_grad_(), k.requires_grad_(), cos, sin, positions=Packed(ends))
    assert {*kept} == {x.data_ptr() for x in (cos, sin, ends)}


class Nothing(torch.autograd.Function):
    """It has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> None:
        return None


def test_without_a_gradient_of_the_results_there_is_none() -> None:
    q = rand(1, 4, 2, 64).requires_grad_()
    out = Nothing.apply(jitrope.apply_rope(q, None, freqs=rand(4, 32))[0])
    assert torch.autograd.grad(out.sum(), q, allow_unused=True) == (None,)


@pytest.mark.parametrize(
    "words", [{"order": "qkv_gated", "heads": (4, 2)}, {"copy_v": False, "heads": (8, 2)}], ids=str
)
def test_views_of_a_projection_may_be_written(words: dict[str, Any]) -> None:
    """A gate, and v that is not copied. The same call again is known."""
    leaf, angles, found = rand(1, 6, 12, 64).requires_grad_(), rand(6, 32), []
    for _ in range(3):
        *_, view = jitrope.prepare_fused_qkv(leaf * 1, freqs=angles, **words)
        found.append(torch.autograd.grad(view.mul_(2).square().sum(), leaf)[0])
    assert found[0].any()
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("order", "axes"), [("qkv", (8, 64)), ("grouped", (2, 256)), ("qkv_gated", (12, 64))])
def test_a_projection_of_every_second_element(order: str, axes: tuple[int, int], device: str) -> None:
    """One axis of all heads, which is not dense, has the results and gradients of a tensor with an axis of heads."""
    leaf, bias = rand(2, 5, 2 * axes[0] * axes[1]).to(device).requires_grad_(), rand(*axes).to(device)
    words: dict[str, Any] = {"freqs": rand(5, 32).to(device), "heads": (4, 2), "order": order}
    found = []
    for wide, own in ((leaf, bias.flatten()), (leaf.unflatten(-1, (axes[0], -1)), bias)):
        parts = [*jitrope.prepare_fused_qkv(wide[..., ::2], **words, bias=own)]
        parts += jitrope.prepare_fused_qkv(wide[..., ::2], **words, copy_v=False)
        written = (wide * 1)[..., ::2]
        assert jitrope.prepare_fused_qkv(written, **words, inplace=True) is written
        sums = [sum(x.sin().sum() for x in parts), written.pow(3).sum()]
        found.append([*parts, written, *[torch.autograd.grad(x, leaf)[0] for x in sums]])
    for x, y in zip(*found):
        assert torch.equal(x.flatten(2), y.flatten(2))


def of_projection(q: Tensor, freqs: Tensor, inplace_grad: bool) -> Tensor:
    """In place, in a projection whose last heads are v's."""
    words: dict[str, Any] = {"freqs": freqs, "heads": (1, 1), "inplace": True, "inplace_grad": inplace_grad}
    return jitrope.prepare_fused_qkv(q, **words)


def of_q(q: Tensor, freqs: Tensor, inplace_grad: bool) -> Tensor:
    words: dict[str, Any] = {"rotary_offset": 32, "rotary_dim": 64, "inplace": True, "inplace_grad": inplace_grad}
    return jitrope.apply_rope(q, None, freqs=freqs, **words)[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("call", [of_q, of_projection])
def test_a_gradient_in_place_overwrites_that_of_the_result(call: Any, device: str) -> None:
    """With the bits of a fresh one. One that is needed again, or without memory of its own, stays."""
    width = 96 if call is of_q else 64
    leaf, angles, given = (rand(*n).to(device) for n in ((2, 6, 3, width), (6, 32), (2, 6, 3, width)))
    leaf.requires_grad_()
    (want,) = torch.autograd.grad(call(leaf * 1, angles, False), leaf, given)
    for _ in range(2):
        own = given.clone()
        torch.autograd.grad(call(leaf * 1, angles, True), leaf, own)
        assert torch.equal(own, want)
    one = torch.ones((), device=device)
    kept: list[Any] = [(given.clone(), True), (one.expand_as(leaf), False)]
    for grad, again in kept:
        stays = grad.clone()
        torch.autograd.grad(call(leaf * 1, angles, True), leaf, grad, create_graph=again)
        assert torch.equal(grad, stays)


def test_a_second_derivative_without_the_gate() -> None:
    qkv = rand(2, 6, 8, 64).requires_grad_()
    *parts, _ = jitrope.prepare_fused_qkv(qkv, freqs=rand(6, 32), heads=(2, 2), order="qkv_gated")
    (first,) = torch.autograd.grad(parts[2].pow(3).sum() + parts[0].square().sum(), qkv, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), qkv)
    want = torch.zeros_like(qkv)
    want[:, :, 0:4:2] = 2
    want[:, :, 6:] = 6 * qkv[:, :, 6:]
    torch.testing.assert_close(second, want, rtol=1e-4, atol=1e-4)


def test_a_batch_of_cotangents_in_another_thread() -> None:
    """`is_grads_batched` on a GPU: torch runs a backward there in a thread that does not know of the batch."""
    batch, cos, sin = rand(3, 1, 6, 2, 64), rand(6, 32), rand(6, 32)
    want = torch.stack([jitrope.apply_rope(x, None, cos, sin)[0] for x in batch])
    text = "bshd heads q > rotate cos sin rotary_dim=64 > fresh"
    with ThreadPoolExecutor(1) as pool:
        elsewhere = torch._vmap_internals._vmap(
            lambda x: pool.submit(torch.ops.jitrope.prepare, [x, cos, sin], text, [0, 0]).result()[0]
        )
        assert torch.equal(elsewhere(batch), want)


def test_no_gradient_is_dropped_in_silence() -> None:
    """A conversion has none; where a call cannot see that one is wanted, the backward says so."""
    leaf = rand(3, 1, 6, 2, 32).requires_grad_()
    out = jitrope.DynamicQuantize()
    scales = torch.vmap(lambda x: jitrope.prepare_qkv(x, None, None, quantize=out)[0].scale)(leaf)
    with pytest.raises(jitrope.JitropeError, match="prepare_qkv has no gradient"):
        scales.sum().backward()
    with torch.no_grad():
        jitrope.prepare_qkv(leaf[0], None, None, quantize=Quantize(1.0))
    text = "bshd heads q > rotate cos sin rotary_dim=32 > convert q_scale > fresh"
    values = torch.ops.jitrope.prepare([leaf[0], rand(6, 16), rand(6, 16), torch.ones(())], text, [0, 0])[0]
    with pytest.raises(jitrope.JitropeError, match="has no gradient"):
        values.float().sum().backward()


# ---- tables that learn: against torch's autograd in fp64 ---------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("norm", "words"), [(None, {}), (Norm(), {}), (Norm(after_rope=True), {"after_rope": True})], ids=str
)
def test_spare_tokens_do_not_reach_a_table(norm: Any, words: dict[str, Any], device: str) -> None:
    """Tokens after the last sequence may hold NaN."""
    (q, grad), angles, ends = rand(2, 6, 4, 16), rand(9, 16), torch.tensor([0, 3, 3, 5])
    exact, leaf = angles.double().requires_grad_(), angles.to(device).requires_grad_()
    words = {"freqs": exact, "cu_seqlens": ends, "layout": "thd", **words}
    (out, _), _ = oracle.rope(q, None, **words) if norm is None else oracle.norm_rope(q, None, **words)
    (want,) = torch.autograd.grad(out, exact, grad.double())
    q[5:] = torch.nan
    positions = Packed(ends.to(device))
    got, *_ = jitrope.prepare_qkv(q.to(device), None, None, freqs=leaf, positions=positions, norm=norm)
    (found,) = torch.autograd.grad(got, leaf, grad.to(device))
    torch.testing.assert_close(found.cpu().double(), want, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_angles_of_each_row_of_a_batch(device: str) -> None:
    """Megatron's table, (P, B, 1, W)."""
    (q, grad), angles = rand(2, 2, 6, 4, 16), rand(9, 2, 1, 8)
    exact, leaf = angles.double().requires_grad_(), angles.to(device).requires_grad_()
    (want,) = torch.autograd.grad(oracle.rope(q, None, freqs=exact)[0][0], exact, grad.double())
    got, _ = jitrope.apply_rope(q.to(device), None, freqs=leaf)
    (found,) = torch.autograd.grad(got, leaf, grad.to(device))
    torch.testing.assert_close(found.cpu().double(), want, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rounding", ["fp32", "dtype"])
def test_sums_are_rounded_once_to_the_dtype_of_a_table(rounding: str, device: str) -> None:
    q, k, *grads = (rand(2, 6, n, 16).bfloat16() for n in (4, 2, 4, 2))
    tables = [x.bfloat16() for x in (rand(6, 8).cos(), rand(6, 8).sin())]
    exact = [x.double().requires_grad_() for x in tables]
    want = torch.autograd.grad(oracle.rope(q, k, *exact)[0], exact, [g.double() for g in grads])
    leaves = [x.to(device).requires_grad_() for x in tables]
    out = jitrope.apply_rope(q.to(device), k.to(device), *leaves, rounding=rounding)
    for x, y in zip(torch.autograd.grad(out, leaves, [g.to(device) for g in grads]), want):
        half_a_step = 2.0 ** (y.frexp().exponent - 9)
        assert ((x.cpu() - y).abs() <= half_a_step * 1.001 + 1e-6).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("twice", [False, True])
def test_layers_that_share_tables_and_second_derivatives(twice: bool, device: str) -> None:
    found, made = [], (rand(2, 6, 4, 16), rand(6, 8).cos(), rand(6, 8).sin())
    exact = [x.double() for x in made]
    for leaves, rotate in (
        ([x.to(device) for x in made], jitrope.apply_rope),
        (exact, lambda *given: oracle.rope(*given)[0]),
    ):
        q, cos, sin = (x.requires_grad_() for x in leaves)
        y = rotate(rotate(q, None, cos, sin)[0], None, cos, cos)[0]
        grads = torch.autograd.grad(y.pow(3).sum(), leaves, create_graph=twice)
        found.append(torch.autograd.grad(sum(x.sin().sum() for x in grads), leaves) if twice else grads)
    for x, y in zip(*found):
        torch.testing.assert_close(x.cpu().double(), y, rtol=1e-4, atol=1e-4 * y.abs().max().item())


class Given(torch.autograd.Function):
    """Its gradient is that which it keeps."""

    @staticmethod
    def forward(ctx: Any, given: Any, *xs: Tensor) -> Tensor:
        ctx.given = given
        return xs[0].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *ctx.given


WINDOWS = torch.arange(70.0).as_strided((1, 2, 1, 64), (70, 4, 70, 1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("given", ["one", "windows", "negative", "inference"])
def test_a_gradient_without_memory_of_its_own_stays(given: str, device: str) -> None:
    """q's and k's are one tensor, elements overlap, torch negates lazily, or torch lets nothing write."""
    leaf, angles = rand(1, 2, 1, 64).to(device).requires_grad_(), rand(2, 32).to(device)
    grad = WINDOWS.to(device)[..., :] if given == "windows" else rand(1, 2, 1, 64).to(device)
    grad = torch.view_as_complex(rand(1, 2, 1, 64, 2).to(device)).conj().imag if given == "negative" else grad
    if given == "inference":
        with torch.inference_mode():
            grad = grad.clone()
    found = []
    for again in (False, True):
        q, k = jitrope.apply_rope(leaf * 1, leaf * 1, freqs=angles, inplace=True, inplace_grad=again)
        both = (grad, grad) if given == "one" else (grad, torch.ones_like(leaf))
        found.append(torch.autograd.grad(Given.apply(both, q, k).sum(), leaf)[0])
    assert torch.equal(*found)
