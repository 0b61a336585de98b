"""A scale of q: rounding, stages, gradients, torch's machinery, refusals."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import jitrope
from jitrope import DynamicQuantize, KVCache, Norm, Packed, Quantize
from jitrope.ops.operations import ROPE
from jitrope.plan.options import Options

from .cases import op_arguments
from .devices import DEVICES

SHAPES = {"number": (), "tokens": (6,), "rows": (2, 6), "one row": (1, 6)}


def inputs(device: str, dtype: torch.dtype = torch.bfloat16, dim: int = 64) -> tuple[Tensor, ...]:
    """q, k, v, cos and sin of 2 x 6 tokens."""
    generator = torch.Generator().manual_seed(dim)
    q, k, v = (torch.randn(2, 6, n, dim, generator=generator).to(device, dtype) for n in (4, 2, 2))
    angles = torch.rand(6, dim // 2, generator=generator).to(device) * 50
    return q, k, v, angles.cos(), angles.sin()


def factor_of(form: str, device: str) -> Tensor:
    return (torch.rand(SHAPES[form], generator=torch.Generator().manual_seed(3)) + 0.5).to(device)


def each(factor: Tensor) -> Tensor:
    """The factor beside (B, S, H, D)."""
    return factor[..., None, None] if factor.dim() else factor


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("words", [{}, {"rotary_dim": 32, "inplace": True}, {"interleaved": True}], ids=str)
@pytest.mark.parametrize("form", SHAPES)
def test_q_is_rounded_once(form: str, words: dict[str, Any], device: str) -> None:
    """The bits of the rotation in fp32, times the factor, rounded; k's do not change."""
    q, k, _, cos, sin = inputs(device)
    tables = [x[:, : words.get("rotary_dim", 64) // 2] for x in (cos, sin)]
    factor, plain = factor_of(form, device), {name: x for name, x in words.items() if name != "inplace"}
    want = (jitrope.apply_rope(q.float(), None, *tables, **plain)[0] * each(factor)).bfloat16()
    want_k = jitrope.apply_rope(q, k, *tables, **plain)[1]
    given = (q.clone(), k.clone())
    got = jitrope.apply_rope(*given, *tables, q_scale=factor, **words)
    assert torch.equal(got[0], want)
    assert torch.equal(got[1], want_k)  # type: ignore[arg-type]
    if "inplace" in words:
        assert got[0] is given[0]
    if form == "number":
        again = jitrope.apply_rope(q, k, *tables, q_scale=float(factor), **plain)
        assert torch.equal(again[0], want)


@pytest.mark.parametrize("device", DEVICES)
def test_a_number_is_not_compiled(device: str) -> None:
    """A known call takes another number, and a call without one is another kind."""
    q, k, _, cos, sin = inputs(device, torch.float32)
    plain = jitrope.apply_rope(q, k, cos, sin)[0]
    for number in (0.5, 0.25, 3, 1, 0.5, -2.0):
        assert torch.equal(jitrope.apply_rope(q, k, cos, sin, q_scale=number)[0], plain * number)
    assert torch.equal(jitrope.apply_rope(q, k, cos, sin, q_scale=None)[0], plain)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", ["number", "rows"])
def test_every_stage_scales_q_alone(form: str, device: str) -> None:
    """Norms, fp8, dynamic scales, Hadamard, caches and out=: q as from a tensor in fp32, times the factor."""
    q, k, v, cos, sin = inputs(device)
    factor, norm = factor_of(form, device), Norm(torch.ones(64, device=device), rounding="none")
    exact = {
        name: jitrope.prepare_qkv(q.float(), None, None, cos, sin, norm=value)[0] * each(factor)
        for name, value in {"": None, "norm": norm, "after": Norm(after_rope=True)}.items()
    }
    call = partial(jitrope.prepare_qkv, q, k, v, cos, sin, q_scale=factor)
    for name, value in (("norm", norm), ("after", Norm(after_rope=True))):
        got = call(norm=value)
        torch.testing.assert_close(got[0], exact[name].bfloat16(), rtol=2**-7, atol=1e-6)
        assert torch.equal(got[1], jitrope.prepare_qkv(q, k, v, cos, sin, norm=value)[1])
    as_fp8 = (exact[""] * (1 / torch.tensor(0.02))).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(call(quantize=Quantize(0.02, 0.02))[0].view(torch.uint8), as_fp8.view(torch.uint8))
    for hadamard in (False, True):
        given = jitrope.prepare_qkv(exact[""], None, None, quantize=DynamicQuantize(hadamard=hadamard))[0]
        scaled = call(quantize=DynamicQuantize(hadamard=hadamard))[0]
        assert torch.equal(scaled.scale, given.scale)
        assert torch.equal(scaled.values.view(torch.uint8), given.values.view(torch.uint8))
    caches, wanted = torch.zeros(2, 16, 2, 64, device=device).bfloat16(), torch.zeros(2, 16, 2, 64, device=device)
    wanted, slots = wanted.bfloat16(), torch.arange(12, device=device)
    jitrope.prepare_qkv(q, k, v, cos, sin, cache=KVCache(*wanted, slots))
    assert torch.equal(call(cache=KVCache(*caches, slots))[0], exact[""].bfloat16())
    assert torch.equal(caches, wanted)
    outs = [torch.empty_like(x) for x in (q, k, v)]
    call(out=outs)
    assert torch.equal(outs[0], exact[""].bfloat16())
    assert torch.equal(outs[2], v)


@pytest.mark.parametrize("device", DEVICES)
def test_fused_and_joint_calls(device: str) -> None:
    q, k, v, cos, sin = inputs(device)
    factor = factor_of("rows", device)
    qkv = torch.cat((q.unflatten(2, (2, 2)), k.unsqueeze(3), v.unsqueeze(3)), 3).flatten(-2)
    want = jitrope.apply_rope(q, k, cos, sin, q_scale=factor)
    got = jitrope.prepare_fused_qkv(qkv, cos, sin, heads=(4, 2), order="grouped", q_scale=factor)
    assert all(torch.equal(x, y) for x, y in zip(got, (*want, v)))  # type: ignore[arg-type]
    streams = [[x[:, part] for x in (q, k, v)] for part in (slice(0, 2), slice(2, 6))]
    both = jitrope.prepare_joint_qkv(*streams, cos, sin, norm=Norm(), q_scale=factor)
    alone = jitrope.prepare_qkv(q, k, v, cos, sin, norm=Norm(), q_scale=factor)
    assert all(torch.equal(x, y) for x, y in zip(both, alone))  # type: ignore[arg-type]


@pytest.mark.parametrize("device", DEVICES)
def test_spare_tokens_stay_zero(device: str) -> None:
    """Whatever the scales of tokens after the last sequence are."""
    q, k, _, cos, sin = inputs(device)
    factor = torch.tensor([1.0, 2, 3, 4, torch.nan, torch.inf], device=device)
    packed = Packed(torch.tensor([0, 3, 4], device=device))
    got = jitrope.apply_rope(q[0], k[0], cos, sin, positions=packed, q_scale=factor)[0]
    assert not got[4:].any()
    want = jitrope.apply_rope(q[0].float(), None, cos, sin, positions=packed)[0][:4] * factor[:4, None, None]
    assert torch.equal(got[:4], want.bfloat16())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wanted", ["qk", "q", "k"])
@pytest.mark.parametrize("norm", [None, Norm(), Norm(after_rope=True, kind="layer_norm")], ids=str)
def test_gradients_are_those_of_the_plain_chain(norm: Norm | None, wanted: str, device: str) -> None:
    q, k, _, cos, sin = inputs(device, torch.float32)
    factor = factor_of("rows", device)
    xs = [x.clone().requires_grad_(name in wanted) for name, x in zip("qk", (q, k))]
    grads = [torch.randn_like(x) for x in xs]

    def gradients(results: Any) -> list[Tensor]:
        chosen = [(y, g) for y, g in zip(results, grads) if y.requires_grad]
        leaves = [x for x in xs if x.requires_grad]
        return list(torch.autograd.grad([y for y, _ in chosen], leaves, [g for _, g in chosen], retain_graph=True))

    plain = jitrope.prepare_qkv(*xs, None, cos, sin, norm=norm)[:2]
    want = gradients((plain[0] * each(factor), plain[1]))
    for _ in range(3):  # recorded by torch's op, and again as a known call
        got = gradients(jitrope.prepare_qkv(*xs, None, cos, sin, norm=norm, q_scale=factor)[:2])
        for x, y in zip(got, want):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("inplace", [False, True])
def test_the_gradient_of_fused_qkv(inplace: bool, device: str) -> None:
    """In place the rest of a head, which is not rotated, is scaled too."""
    _, _, _, cos, sin = inputs(device)
    qkv = torch.randn(2, 6, 2, 5 * 64, device=device, requires_grad=True)
    factor, grads = factor_of("rows", device), []
    for scaled in (True, False):
        words: dict[str, Any] = {"heads": (6, 2), "order": "grouped"}
        words |= {"rotary_dim": 32, "inplace": inplace and scaled}
        words |= {"q_scale": factor} if scaled else {}
        out = jitrope.prepare_fused_qkv(qkv * 1, cos[:, :16], sin[:, :16], **words)
        if isinstance(out, Tensor):
            q, k, v = (x.flatten(2, 3) for x in out.unflatten(-1, (5, 64)).split((3, 1, 1), 3))
        else:
            q, k, v = out
        q = q if scaled else q * each(factor)
        grads.append(torch.autograd.grad(q.square().sum() + 2 * k.square().sum() + v.pow(3).sum(), qkv)[0])
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wanted", ["views", "q", "k"])
def test_the_gradient_in_place(wanted: str, device: str) -> None:
    """Of views, and where q or k has none."""
    q, k, _, cos, sin = inputs(device, torch.float32)
    q, k = (x.requires_grad_(wanted in ("views", name)) for name, x in (("q", q), ("k", k)))
    leaves, factor, found = [x for x in (q, k) if x.requires_grad], factor_of("rows", device), []
    for inplace in (True, False):
        xs = [x.flatten(2).mul(1).unflatten(2, (-1, 64)) if wanted == "views" else x * 1 for x in (q, k)]
        out = jitrope.apply_rope(*xs, cos, sin, q_scale=factor, inplace=inplace)
        found.append(torch.autograd.grad(sum(x.pow(3).sum() for x in out), leaves))  # type: ignore[arg-type, union-attr]
    for got, want in zip(*found):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("device", DEVICES)
def test_a_learned_scale_gets_a_gradient_from_plain_torch(device: str) -> None:
    q, k, _, cos, sin = inputs(device, torch.float32)
    for form in ("number", "rows"):
        factor = factor_of(form, device).requires_grad_()
        x = q.clone().requires_grad_()
        got = jitrope.apply_rope(x, k, cos, sin, q_scale=factor)[0]
        want = jitrope.apply_rope(x, k, cos, sin)[0] * each(factor)
        grad = torch.randn_like(got)
        for a, b in zip(*(torch.autograd.grad(y, (x, factor), grad) for y in (got, want))):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    with pytest.raises(jitrope.InvalidInput, match=r"q_scale requires a gradient, .* pass q_scale.detach\(\)"):
        jitrope.prepare_qkv(q, k, None, cos, sin, q_scale=factor, quantize=Quantize(1.0, 1.0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [0.125, "tensor"], ids=str)
def test_a_compiled_call(scale: Any, device: str) -> None:
    q, k, _, cos, sin = inputs(device, torch.float32)
    factor = factor_of("rows", device) if scale == "tensor" else scale

    def call(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        return jitrope.prepare_qkv(q, k, None, cos, sin, norm=Norm(), q_scale=factor)[:2]  # type: ignore[return-value]

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True)
    for x in (q, q.clone().requires_grad_()):
        for got, want in zip(compiled(x, k), call(x, k)):
            torch.testing.assert_close(got, want)
        if x.requires_grad:
            grads = [torch.autograd.grad(f(x, k)[0].square().sum(), x)[0] for f in (compiled, call)]
            torch.testing.assert_close(*grads)


def test_opcheck() -> None:
    q, k, _, cos, sin = inputs("cpu", torch.float32)
    options = Options(rotary_dim=64)
    tables = (cos, sin, None, None, None, factor_of("rows", "cpu"))
    given = op_arguments(ROPE, (q.requires_grad_(), k), tables, options)
    torch.library.opcheck(torch.ops.jitrope.rope.default, given)


Q, K, V, COS, SIN = inputs("cpu")
REFUSED = {
    "a word": ({"q_scale": "1"}, r"apply_rope: q_scale is '1'; it must be a finite number, or a tensor"),
    "nan": ({"q_scale": float("nan")}, "q_scale is nan"),
    "fp16": ({"q_scale": torch.ones(6).half()}, "q_scale is torch.float16 on cpu; it must be fp32 on cpu"),
    "length": ({"q_scale": torch.ones(5)}, r"q_scale has shape \(5,\); allowed are \(\), \(6,\), \(1, 6\), \(2, 6\)"),
    "heads": ({"q_scale": torch.ones(2, 6, 4)}, r"q_scale has shape \(2, 6, 4\)"),
    "device": ({"q_scale": torch.ones(6, device="meta")}, "q_scale is on meta but q is on cpu"),
    "sparse": ({"q_scale": torch.ones(6).to_sparse()}, "q_scale is .* a strided tensor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_scale_is_refused(name: str) -> None:
    words, text = REFUSED[name]
    with pytest.raises(jitrope.InvalidInput, match=text):
        jitrope.apply_rope(Q, K, COS, SIN, **words)


def test_a_scale_of_inference_mode_is_refused_by_its_name() -> None:
    """Autograd cannot keep such a tensor for the backward."""
    with torch.inference_mode():
        scale = torch.ones(6)
    with pytest.raises(jitrope.InvalidInput, match=r"apply_rope: q_scale is .* pass q_scale.clone\(\)"):
        jitrope.apply_rope(Q.clone().requires_grad_(), K, COS, SIN, q_scale=scale)
