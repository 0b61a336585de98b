"""The stages in plain torch: the gradients that they compute, against torch's autograd through them."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from jitrope import chain
from jitrope.plan.options import Options
from jitrope.sinks import results
from jitrope.stages.norm import NO_NORM, takes

NORMS = {
    "none": NO_NORM,
    "rms": {"norm_kind": "rms_norm", "zero_centered": True},
    "layer": {"norm_kind": "layer_norm"},
    "after": {"norm_kind": "rms_norm", "after_rope": True},
    "across": {"norm_kind": "rms_norm", "across_heads": True},
    "of_k": {"norm_kind": "rms_norm", "of": "k", "after_rope": True},
    "v_norm": {"norm_kind": "layer_norm", "v_norm": True},
}


def made(o: Options, packed: bool) -> dict[str, Tensor]:
    """q, k and v, (1, 7, heads, 16), tables, a scale of q, weights and biases; packed: two tokens are spare."""
    torch.manual_seed(0)
    t = {name: torch.randn(1, 7, heads, 16) for name, heads in (("q", 4), ("k", 2), ("v", 2))}
    heads = {"q": 4, "k": 2} if o.across_heads else {"q": 1, "k": 1}
    names = [f"{name}_{kind}" for name in "qk" for kind in ("weight", "bias")[: 1 + (o.norm_kind == "layer_norm")]]
    t.update({name: torch.randn(heads[name[0]] * 16) for name in names if takes(name[0], o)})
    angles = torch.rand(7, 6) * 6
    t.update(cos=angles.cos(), sin=angles.sin(), q_factor=torch.rand(7) + 0.5)
    if packed:
        t["cu_seqlens"] = torch.tensor([0, 3, 5])
        t.update({name: t[name][0] for name in "qkv"})
    return t


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("hadamard", "packed"), [*itertools.product((False, True), repeat=2)])
@pytest.mark.parametrize("pairs", [*itertools.product((False, True), repeat=2)], ids=str)
def test_the_stages_gradients_are_autograds(norm: str, hadamard: bool, packed: bool, pairs: tuple[bool, bool]) -> None:
    words = dict(zip(("interleaved", "interleaved_out"), pairs), hadamard=hadamard, layout="thd" if packed else "bshd")
    o = Options(rotary_dim=12, rotary_offset=2, **NORMS[norm], **words)
    t = made(o, packed)
    leaves = {name: x.requires_grad_() for name, x in t.items() if name in "qkv" or name.endswith(("_weight", "_bias"))}
    fresh = {name: torch.full_like(t[name].detach(), 777) for name in "qkv"}
    chain.run([(t, o)], results.places(fresh, o), o)
    grads = [torch.randn_like(x) for x in fresh.values()]
    want = torch.autograd.grad([*fresh.values()], [*leaves.values()], grads)
    given = {**{name: x.detach() for name, x in t.items()}, **dict(zip(("dq", "dk", "dv"), grads))}
    found = {name: torch.full_like(given[name], 777) for name in leaves}
    chain.back(given, results.places(found, o), o)
    for name, expected in zip(leaves, want):
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_a_rotation_in_the_dtype_rounds_what_follows_it() -> None:
    """q's scale and the transform read heads in their dtype, as from a host that stores them in between."""
    o = Options(rotary_dim=16, rounding="dtype", hadamard=True, **NO_NORM)
    t = {name: x.bfloat16() if name in "qkv" else x for name, x in made(o, False).items()}
    t.update(cos=t["cos"].new_ones(7, 8), sin=t["sin"].new_zeros(7, 8))
    scaled = (t["q"].float() * t["q_factor"][:, None, None]).bfloat16()
    want = chain.transform.forward("q", scaled, t, o._replace(rounding="fp32")).bfloat16()
    assert torch.equal(chain.forward("q", chain.load("q", t, o), t, o), want)
    exact = chain.forward("q", chain.load("q", t, o), t, o._replace(rounding="fp32")).bfloat16()
    assert not torch.equal(exact, want)


def test_a_rotation_keeps_strides() -> None:
    """The order of the sums of a norm behind it depends on them."""
    t = made(Options(**NO_NORM), True)
    x = t["q"].transpose(0, 2).contiguous().transpose(0, 2)[None]
    for interleaved_out in (False, True):
        o = Options(rotary_dim=12, layout="thd", interleaved_out=interleaved_out)
        y = chain.rotate.paired("q", chain.rotate.forward("q", x, t, o), o)
        assert y.stride() == x.stride()
