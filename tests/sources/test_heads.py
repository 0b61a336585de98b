"""q, k and v as tensors of their own: a norm of one of them, or of v too, with the bits and the launches of each."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import jitrope
from jitrope import Norm, prepare_qkv

from ..calls import PLAIN
from ..devices import DEVICES, noise
from ..results import places_of
from ..sweep import Made

LAYER = {"kind": "layer_norm"}
assert_same = partial(torch.testing.assert_close, rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("of", ["q", "k"])
@pytest.mark.parametrize("own", [{}, {**LAYER, "after_rope": True}, {"across_heads": True}], ids=str)
def test_a_norm_of_one_beside_a_rotation_of_the_other(own: dict[str, Any], of: str, device: str) -> None:
    """The bits are those of a norm of both and of `apply_rope`, and so are the gradients, also of q or k alone."""
    q, k = (x.requires_grad_() for x in noise(device, torch.float32, (2, 11, 4, 16), (2, 11, 2, 16)))
    weights = noise(device, torch.float32, *[(16 * n ** ("across_heads" in own),) for n in (4, 2)])
    (cos, sin), one = torch.randn(2, 11, 8, device=device), {f"{of}_weight": weights["qk".index(of)]}
    both = prepare_qkv(q, k, None, cos, sin, norm=Norm(*weights, **own), q_scale=0.5)
    plain = jitrope.apply_rope(q, k, cos, sin, q_scale=0.5)
    want = [both[0], plain[1]] if of == "q" else [plain[0], both[1]]
    for some in ((0, 1), (0,), (1,)):
        leaves = [(q, k)[n] for n in some]
        given = [x if n in some else x.detach() for n, x in enumerate((q, k))]
        got = prepare_qkv(*given, None, cos, sin, norm=Norm(**one, **own, of=of), q_scale=0.5)[:2]
        assert_same(list(got), want)
        found, wanted = (
            torch.autograd.grad([ys[n].sin().sum() for n in some], leaves, retain_graph=True) for ys in (got, want)
        )
        torch.testing.assert_close(found, wanted, rtol=2e-5, atol=5e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_gradient_beside_k_without_heads(device: str) -> None:
    """The weights of k get zeros, and q's get what they get alone."""
    q, k, *own = noise(device, torch.float32, (1, 4, 2, 64), (1, 4, 0, 64), *[(64,)] * 4)
    q, *own = (x.requires_grad_() for x in (q, *own))
    words = {"cos": torch.ones(4, 32, device=device), "sin": torch.zeros(4, 32, device=device)}
    both = Norm(*own[:2], q_bias=own[2], k_bias=own[3], **LAYER)
    out = prepare_qkv(q, k, None, norm=both, **words)
    found = torch.autograd.grad(sum(x.square().sum() for x in out[:2]), (q, own[0], own[2], own[1], own[3]))
    alone = prepare_qkv(q, None, None, norm=Norm(own[0], q_bias=own[2], **LAYER), **words)[0]
    assert_same(found[:3], torch.autograd.grad(alone.square().sum(), (q, own[0], own[2])))
    assert not any(x.any() for x in found[3:])


V_NORMS: dict[str, tuple[int, tuple[int, int, int], dict[str, Any], dict[str, Any]]] = {
    # launches, heads of q, k and v (0: no k; -1: k is v), words of the norm, of the call
    "twice, zero centered": (1, (4, 2, 2), {"rounding": "twice", "zero_centered": True}, {}),
    "after rope": (1, (4, 2, 2), {"after_rope": True, "rounding": "once"}, {"interleaved": True}),
    "layer norm": (1, (4, 2, 2), {**LAYER, "eps": 1e-3}, {"rounding": "dtype"}),
    "of k": (1, (4, 2, 2), {"of": "k"}, {}),
    "k as v": (1, (4, 2, -1), {}, {}),
    "odd heads": (1, (3, 1, 1), {"rounding": "once"}, {}),
    "across heads": (2, (4, 2, 2), {"across_heads": True}, {}),
    "wider v": (2, (4, 2, 4), {}, {}),
    "no k": (2, (4, 0, 2), {}, {}),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", V_NORMS)
def test_v_norm_has_the_bits_of_a_norm_of_v_alone(kind: str, device: str) -> None:
    """And q and k those of a call without v, also in a second call and in the gradients of some results."""
    launches, heads, own, words = V_NORMS[kind]
    q, k, v = (x.requires_grad_() for x in noise(device, torch.bfloat16, *[(2, 6, abs(n), 64) for n in heads]))
    k, v = k if heads[1] else None, k if heads[2] < 0 else v
    weights = [torch.linspace(0.5, 1.5, 64, device=device)] * (2 if heads[1] else 1)
    weights = [] if "across_heads" in own or "of" in own else weights
    cos, sin = torch.randn(2, 9, 32, device=device)
    alone = Norm(**{name: x for name, x in own.items() if name not in ("zero_centered", "after_rope", "of")})
    for _ in range(2):
        got = prepare_qkv(q, k, v, cos, sin, norm=Norm(*weights, v_norm=True, **own), **words)
        want = prepare_qkv(q, k, None, cos, sin, norm=Norm(*weights, **own), **words)
        want = [*want[:2], prepare_qkv(v, None, None, norm=alone)[0]]
        assert_same([x for x in got if x is not None], [x for x in want if x is not None])
        for some in ((0, 1, 2), (2,), (0,)):
            picked = [n for n in some if got[n] is not None]
            douts = [torch.sin(got[n].detach().float() * 3).bfloat16() for n in picked]
            leaves = [x for n, x in enumerate((q, k, v)) if x is not None and (n < 2 or v is not k)]
            found, wanted = (
                torch.autograd.grad([ys[n] for n in picked], leaves, douts, retain_graph=True, allow_unused=True)
                for ys in (got, want)
            )
            assert [x is None for x in found] == [x is None for x in wanted]
            assert_same([x for x in found if x is not None], [x for x in wanted if x is not None])
    meta = [None if x is None else x.detach().to("meta") for x in (q, k, v, cos, sin)]
    with jitrope.planning(["auto"]) as specs:
        prepare_qkv(*meta, norm=Norm(v_norm=True, **own), **words)
    assert len(specs) == launches


@pytest.mark.parametrize(
    ("launches", "values"),
    [
        *[(1, x) for x in ({}, {"positions": "ids"}, {"table": "none"}, {"table": "cache"}, {"table": "cis"})],
        *[(1, x) for x in ({"more": "number"}, {"layout": "bhsd"}, {"rounding": "dtype"})],
        *[(2, x) for x in ({"out": "inplace"}, {"out": "ulysses"}, {"part": "first"}, {"part": "middle"})],
        *[(2, x) for x in ({"convert": "e4m3"}, {"table": "per_head", "heads": "mha"}, {"transform": "head"})],
    ],
    ids=str,
)
def test_v_norm_is_one_launch_where_a_kernel_can_do_it(launches: int, values: dict[str, str]) -> None:
    """Forward and, if there is one, backward."""
    m = Made({**PLAIN, "norm": "v_norm", **values}, "meta")
    with jitrope.planning(["auto"]) as specs:
        m.call(**places_of(m).words)
    assert len(specs) == launches
    assert specs[-1].v_norm == specs[-1].copy_v == (launches == 1) or values.get("out") == "ulysses"
    if launches == 1:
        m = Made(m.case, "meta", leaves=True)
        with jitrope.planning(["auto"]) as specs:
            out = [*m.call().values()]
            torch.autograd.backward(out, [torch.empty_like(x) for x in out])
        assert [(spec.gradient, spec.v_norm) for spec in specs] == [(False, True), (True, True)]
