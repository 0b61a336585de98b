"""Learned tables: the gradients of cos, sin and angles, against torch's autograd in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import jitrope
from jitrope import InvalidInput, Norm

from . import oracle
from .devices import DEVICES
from .said import KINDS

B, S, D, P = 2, 6, 16, 9


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * 4 - 2


def pair(*shape: int) -> dict[str, Tensor]:
    return {"cos": rand(*shape).cos(), "sin": rand(*shape).sin()}


IDS = torch.tensor([[3, 0, 3, 8, 1, 1], [1, 4, 2, 0, 0, 7]])
AXES = torch.stack((IDS, IDS.flip(0), IDS.flip(1)))
SPARE = {"cu_seqlens": torch.tensor([0, 3, 3, 5]), "layout": "thd"}
# name: the tables, and the words; "thd": (T, H, D)
FORMS: dict[str, tuple[dict[str, Tensor], dict[str, Any]]] = {
    "half": (pair(P, D // 2), {}),
    "full-interleaved": (pair(P, D), {"interleaved": True}),
    "per-head (Mochi)": (pair(1, S, 4, D // 2), {"interleaved": True}),
    "partial": (pair(P, 4), {"rotary_dim": 8, "rotary_offset": 4, "interleaved": True, "interleaved_out": False}),
    "ids": (pair(P, D // 2), {"position_ids": IDS}),
    "mrope": (pair(P, D // 2), {"position_ids": AXES, "mrope_section": (4, 2, 2)}),
    "spare tokens": (pair(P, D // 2), SPARE),
    "angles": ({"freqs": rand(P, D // 2)}, {"mscale": 1.5}),
    "angles of each row (Megatron)": ({"freqs": rand(P, B, 1, D // 2)}, {}),
    "packed angles (RoPE-Mixed)": ({"freqs": rand(P, D)}, {**SPARE, "inverse": True}),
    "cos_sin_cache": ({"cos_sin_cache": rand(P, D)}, {}),
    "freqs_cis": ({"freqs_cis": torch.polar(rand(P, D // 2) + 3, rand(P, D // 2))}, {"interleaved": True}),
}
KIND = {"rope": ("rope", {}), "norm": ("norm_rope", {}), "norm behind": ("norm_rope", {"after_rope": True})}
CELLS = [(form, kind) for form in FORMS for kind in KIND if kind == "rope" or "inverse" not in FORMS[form][1]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("form", "kind"), CELLS)
def test_a_table_gets_its_gradient(form: str, kind: str, device: str) -> None:
    (tables, words), (function, more) = FORMS[form], KIND[kind]
    sizes = (S,) if words.get("layout") == "thd" else (B, S)
    q, k, *grads = (rand(*sizes, 4, D, seed=n) for n in range(4))
    weights = [None, None] * (kind != "rope")
    exact = [x.to(torch.cdouble if x.is_complex() else torch.double).requires_grad_() for x in tables.values()]
    out, _ = getattr(oracle, function)(q, k, *weights, **dict(zip(tables, exact)), **words, **more)
    want = torch.autograd.grad(out, exact, [g.double() for g in grads])
    q[5:] = torch.nan  # spare tokens of "thd"
    on = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in words.items()}
    leaves = [x.to(device).clone().requires_grad_() for x in tables.values()]

    def call(q: Tensor, k: Tensor, *xs: Tensor) -> Any:
        return KINDS[function](q, k, *weights, **dict(zip(tables, xs)), **on, **more)

    compiled = [torch.compile(call, backend="aot_eager")] * (kind == "rope" and form != "freqs_cis")
    for each in (call, lambda *xs: checkpoint(call, *xs, use_reentrant=False), *compiled):
        out = each(q.to(device), k.to(device), *leaves)
        for x, y in zip(torch.autograd.grad(out, leaves, [g.to(device) for g in grads]), want):
            torch.testing.assert_close(x.cpu().to(y.dtype), y, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rounding", ["fp32", "dtype"])
def test_sums_are_rounded_once_to_the_dtype_of_a_table(rounding: str, device: str) -> None:
    q, k, *grads = (rand(B, S, n, D, seed=n).bfloat16() for n in (4, 2, 4, 2))
    tables = {name: x.bfloat16() for name, x in pair(S, D // 2).items()}
    exact = [x.double().requires_grad_() for x in tables.values()]
    want = torch.autograd.grad(oracle.rope(q, k, *exact)[0], exact, [g.double() for g in grads])
    leaves = [x.to(device).requires_grad_() for x in tables.values()]
    out = jitrope.apply_rope(q.to(device), k.to(device), *leaves, rounding=rounding)
    for x, y in zip(torch.autograd.grad(out, leaves, [g.to(device) for g in grads]), want):
        half_a_step = 2.0 ** (y.frexp().exponent - 9)
        assert ((x.cpu() - y).abs() <= half_a_step * 1.001 + 1e-6).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("twice", [False, True])
def test_layers_that_share_tables_and_second_derivatives(twice: bool, device: str) -> None:
    def found(leaves: list[Tensor], rotate: Any) -> list[Tensor]:
        q, cos, sin = (x.requires_grad_() for x in leaves)
        y = rotate(rotate(q, None, cos, sin)[0], None, cos, cos)[0]
        first = torch.autograd.grad(y.pow(3).sum(), leaves, create_graph=twice)
        return [*torch.autograd.grad(sum(x.sin().sum() for x in first), leaves)] if twice else [*first]

    leaves = [rand(B, S, 4, D), *pair(S, D // 2).values()]
    want = found([x.double() for x in leaves], lambda *xs: oracle.rope(*xs)[0])
    for x, y in zip(found([x.to(device) for x in leaves], jitrope.apply_rope), want):
        torch.testing.assert_close(x.cpu().double(), y, rtol=1e-4, atol=1e-4 * y.abs().max().item())


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_that_are_not_rotated_count_for_no_row(device: str) -> None:
    q, leaves = rand(B, S, 4, D).to(device), [x.to(device).requires_grad_() for x in pair(S, D // 2).values()]
    out = jitrope.apply_rope(q, None, *leaves, unrotated=2)[0], jitrope.apply_rope(q[:, 2:], None, *leaves)[0]
    torch.testing.assert_close(*[torch.autograd.grad(x.sin().sum(), leaves) for x in out])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("label", ["q", "k", "positions"])
@pytest.mark.parametrize("learned", ["cos", "q_scale"])
def test_heads_of_inference_mode_are_refused_by_their_name(learned: str, label: str, device: str) -> None:
    """torch keeps them for the gradient of a table or of a factor."""
    given = {"q": rand(B, S, 4, D), "k": rand(B, S, 4, D), "q_scale": rand(B, S), **pair(P, D // 2)}
    given = {name: x.to(device) for name, x in {**given, "positions": IDS}.items()}
    given[learned].requires_grad_()
    with torch.inference_mode():
        kept = given[label].clone()
    with pytest.raises(InvalidInput, match=rf"apply_rope: {label} was made in inference mode, .*; pass a clone"):
        jitrope.apply_rope(**{**given, label: kept})
    with torch.no_grad():
        for x, y in zip(jitrope.apply_rope(**{**given, label: kept}), jitrope.apply_rope(**given)):
            assert torch.equal(x, y)


def test_calls_without_a_gradient_refuse_learned_tables() -> None:
    q, tables = rand(B, S, 4, D), [x.requires_grad_() for x in pair(S, D // 2).values()]
    cache = jitrope.KVCache(*torch.zeros(2, 2, 12, 4, D)[:, 0], torch.arange(12))
    for words in ({"inplace": True}, {"quantize": jitrope.Quantize(1.0, 1.0)}, {"cache": cache}):
        with pytest.raises(InvalidInput, match=r"requires a gradient, but this call has none.*; pass .*\.detach\(\)"):
            jitrope.prepare_qkv(q, q.clone(), q.clone(), *tables, norm=Norm(), **words)
