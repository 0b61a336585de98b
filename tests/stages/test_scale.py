"""The scale of q: what is rounded, which numbers are compiled, and gradients of q beside a scale that has none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import jitrope
from jitrope import Packed

from ..devices import DEVICES, inputs, noise, turn

SHAPES = {"a number": (), "tokens": (6, 1, 1), "rows": (2, 6, 1, 1), "one row": (1, 6, 1, 1)}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("words", [{}, {"rotary_dim": 32, "inplace": True}, {"interleaved": True}], ids=str)
@pytest.mark.parametrize("form", SHAPES)
def test_q_is_rounded_once(form: str, words: dict[str, Any], device: str) -> None:
    """The bits of the rotation in fp32, times the scale, rounded; k's do not change."""
    q, k, *_ = inputs(device, 2, 6, 4, 64)
    (scale,), tables = noise(device, torch.float32, SHAPES[form]), turn(device, 6, words.get("rotary_dim", 64) // 2)
    plain = {name: x for name, x in words.items() if name != "inplace"}
    want = (jitrope.apply_rope(q.float(), None, *tables, **plain)[0] * scale).bfloat16()
    want_k = jitrope.apply_rope(q, k, *tables, **plain)[1]
    got = jitrope.apply_rope(q.clone(), k.clone(), *tables, q_scale=scale.view(scale.shape[:-2]), **words)
    assert torch.equal(got[0], want)
    assert torch.equal(got[1], want_k)
    if form == "a number":
        assert torch.equal(jitrope.apply_rope(q, k, *tables, q_scale=float(scale), **plain)[0], want)


@pytest.mark.parametrize("device", DEVICES)
def test_a_number_is_not_compiled(device: str) -> None:
    """A known call takes another number, and a call without one is another kind."""
    q, angles = torch.randn(2, 6, 4, 64, device=device), torch.rand(6, 32, device=device)
    plain = jitrope.apply_rope(q, None, freqs=angles)[0]
    for number in (0.5, 0.25, 3, 1, 0.5, -2.0):
        assert torch.equal(jitrope.apply_rope(q, None, freqs=angles, q_scale=number)[0], plain * number)
    assert torch.equal(jitrope.apply_rope(q, None, freqs=angles, q_scale=None)[0], plain)


def test_a_rotation_with_a_scale_has_the_kernel_of_a_plain_one() -> None:
    q, angles = torch.empty(2, 6, 4, 64, device="meta"), torch.empty(6, 32, device="meta")
    for scale in (0.5, torch.empty(6, device="meta")):
        with jitrope.planning() as specs:
            jitrope.apply_rope(q, None, freqs=angles, q_scale=scale)
        assert {spec.kind for spec in specs} == {"rope"}


@pytest.mark.parametrize("device", DEVICES)
def test_spare_tokens_stay_zero(device: str) -> None:
    """Whatever the scales of tokens after the last sequence are."""
    q, angles = torch.randn(6, 4, 64, device=device).bfloat16(), torch.rand(6, 32, device=device)
    scale = torch.tensor([1.0, 2, 3, 4, torch.nan, torch.inf], device=device)
    packed = Packed(torch.tensor([0, 3, 4], device=device))
    got = jitrope.apply_rope(q, None, freqs=angles, positions=packed, q_scale=scale)[0]
    assert not got[4:].any()
    want = jitrope.apply_rope(q.float(), None, freqs=angles, positions=packed)[0][:4] * scale[:4, None, None]
    assert torch.equal(got[:4], want.bfloat16())


@pytest.mark.parametrize("device", DEVICES)
def test_the_temperature_of_llama_4_has_its_bits(device: str) -> None:
    """transformers scales q of layers without rope: bf16 times fp32, rounded once."""
    q, k = (torch.randn(2, 7, n, 64, device=device).bfloat16() for n in (4, 2))
    positions = torch.arange(7, device=device) + 8190.0
    scales = torch.log1p(torch.floor((positions + 1.0) / 8192)) * 0.1 + 1.0
    want = (q * scales.view(1, 7, 1, 1)).to(q.dtype)
    got, same, none = jitrope.prepare_qkv(q, k, None, q_scale=scales)
    assert none is None
    assert torch.equal(got, want)
    assert torch.equal(same, k)
    in_place = q.clone()
    assert jitrope.prepare_qkv(in_place, None, None, q_scale=scales, inplace=True)[0] is in_place
    assert torch.equal(in_place, want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("inplace", [False, True])
def test_the_gradient_of_fused_qkv(inplace: bool, device: str) -> None:
    """In place the rest of a head, which is not rotated, is scaled too. A fixed scale has no gradient."""
    leaf = torch.randn(2, 6, 2, 5, 64, device=device, requires_grad=True)
    scale, angles = torch.rand(2, 6, device=device) + 0.5, torch.rand(6, 16, device=device)
    words: dict[str, Any] = {"heads": (6, 2), "order": "grouped", "rotary_dim": 32, "freqs": angles}
    q, k, v = jitrope.prepare_fused_qkv(leaf.flatten(-2) * 1, **words)
    plain = (q * scale[..., None, None]).square().sum() + 2 * k.square().sum() + v.pow(3).sum()
    made = jitrope.prepare_fused_qkv(leaf.flatten(-2) * 1, q_scale=scale, inplace=inplace, **words)
    q, k, v = made.unflatten(-1, (5, 64)).split((3, 1, 1), 3) if inplace else made
    scaled = q.square().sum() + 2 * k.square().sum() + v.pow(3).sum()
    torch.testing.assert_close(*[torch.autograd.grad(x, leaf)[0] for x in (scaled, plain)])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wanted", ["views", "q", "k"])
def test_the_gradient_in_place(wanted: str, device: str) -> None:
    """Of views, and where q or k has none."""
    q, k = (
        torch.randn(2, 6, n, 64, device=device, requires_grad=wanted in ("views", x)) for n, x in ((4, "q"), (2, "k"))
    )
    scale, angles = torch.rand(2, 6, device=device) + 0.5, torch.rand(6, 32, device=device)
    leaves, found = [x for x in (q, k) if x.requires_grad], []
    for inplace in (True, False):
        own = [x.flatten(2).mul(1).unflatten(2, (-1, 64)) if wanted == "views" else x * 1 for x in (q, k)]
        out = jitrope.apply_rope(*own, freqs=angles, q_scale=scale, inplace=inplace)
        found.append(torch.autograd.grad(sum(x.pow(3).sum() for x in out), leaves))
    for got, want in zip(*found):
        torch.testing.assert_close(got, want)
