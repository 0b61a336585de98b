"""A scale of q: rounding, stages, gradients, torch's machinery, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import jitrope
from jitrope import Packed

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


Q, K, V, COS, SIN = inputs("cpu")
REFUSED = {
    "a word": ({"q_scale": "1"}, r"apply_rope: q_scale is '1'; it must be a finite number, or a tensor"),
    "nan": ({"q_scale": float("nan")}, "q_scale is nan"),
    "fp16": (
        {"q_scale": torch.ones(6).half()},
        r"q_scale is float16; it must be \(\) or \(6,\) or \(1\|2, 6\), float32",
    ),
    "length": ({"q_scale": torch.ones(5)}, r"q_scale is .*; it must be \(\) or \(6,\) or \(1\|2, 6\), float32"),
    "heads": ({"q_scale": torch.ones(2, 6, 4)}, r"q_scale is .*; it must be \(\) or \(6,\) or \(1\|2, 6\), float32"),
    "device": (
        {"q_scale": torch.ones(6, device="meta")},
        r"q_scale is .*; it must be \(\) or \(6,\) or \(1\|2, 6\), float32",
    ),
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
