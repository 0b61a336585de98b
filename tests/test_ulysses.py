"""Results for the all-to-all of Ulysses: a group of heads for each rank, fresh or in given tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import jitrope
from jitrope import DynamicQuantize, InvalidInput, KVCache, Norm, Quantize, Scaled, Ulysses
from jitrope.base.layouts import LAYOUT_AXES
from jitrope.run import launch as runtime

from .devices import DEVICE, DEVICES

B, S, D, R = 2, 6, 64, 2


def sent(x: Tensor, layout: str, ranks: int = R) -> Tensor:
    """What rank r gets is [r]: the all-to-all's copy that this layout replaces."""
    axis = LAYOUT_AXES[layout][2]
    return torch.stack(x.chunk(ranks, axis))


def heads(layout: str, device: str, counts: tuple[int, ...], dtype: torch.dtype, grad: bool = False) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    order = {"bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3)}
    found = []
    for count in counts:
        x = torch.randn(B, S, count, D, generator=generator)
        x = x[0] if layout == "thd" else x.permute(order[layout])
        found.append(x.to(device, dtype).requires_grad_(grad))
    return found


def tables(device: str, width: int = D // 2, *lead: int) -> tuple[Tensor, Tensor]:
    angles = torch.rand(*lead[:1], S + 3, *lead[1:], width, generator=torch.Generator().manual_seed(3)).to(device) * 9
    return angles.cos(), angles.sin()


# name: (heads of q, of k and v; the call's words); the reason is the name
KINDS: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "rope": ((8, 4, 4), {}),
    "a head for each rank": ((2, 2, 2), {}),
    "more heads than one step of a block": ((96, 64, 64), {}),
    "fp32, interleaved": ((4, 2, 2), {"interleaved": True, "dtype": torch.float32}),
    "sbhd": ((4, 2, 2), {"layout": "sbhd"}),
    "bhsd": ((4, 2, 2), {"layout": "bhsd"}),
    "thd": ((4, 2, 2), {"layout": "thd"}),
    "packed": ((4, 2, 2), {"layout": "thd", "packed": (0, 2, 5)}),
    "partial": ((4, 2, 2), {"rotary_dim": 32, "rotary_offset": 16}),
    "other pairs": ((4, 2, 2), {"interleaved_out": True}),
    "ids": ((4, 2, 2), {"ids": True}),
    "a scale of q": ((4, 2, 2), {"q_scale": 0.5, "dtype": torch.float32}),
    "hadamard": ((4, 2, 2), {"hadamard": True}),
    "angles of each head: v by a copy": ((4, 4, 4), {"per_head": True}),
    "norm": ((4, 2, 2), {"norm": {"rounding": "once"}}),
    "norm, sbhd": ((4, 2, 2), {"norm": {"after_rope": True}, "layout": "sbhd"}),
    "layer norm": ((4, 4, 4), {"norm": {"kind": "layer_norm"}}),
    "norm across heads": ((4, 4, 4), {"norm": {"across_heads": True}}),
    "norm of v": ((4, 2, 2), {"norm": {"v_norm": True}}),
    "fp8, v too": ((4, 2, 2), {"quantize": Quantize(0.05, 0.1, 0.2)}),
    "norm, fp8, hadamard": ((4, 2, 2), {"norm": {}, "quantize": Quantize(0.05, 0.1, hadamard=True)}),
    "scales of each head": ((8, 4, 4), {"quantize": DynamicQuantize()}),
    "scales of groups, v too, bhsd": ((8, 4, 4), {"quantize": DynamicQuantize(group=32, v=True), "layout": "bhsd"}),
    "norms, scales, int8, v too, sbhd": (
        (8, 4, 4),
        {"norm": {"v_norm": True}, "quantize": DynamicQuantize(torch.int8, v=True), "layout": "sbhd"},
    ),
}


def call(name: str, device: str, grad: bool = False) -> tuple[list[Any], dict[str, Any], list[Tensor]]:
    """(q, k, v, cos, sin; words; the tensors with a gradient)."""
    counts, given = KINDS[name]
    words = dict(given)
    layout = words.get("layout", "bshd")
    x = heads(layout, device, counts, words.pop("dtype", torch.bfloat16), grad)
    made: list[Tensor] = []
    if words.pop("per_head", False):
        cos, sin = tables(device, D // 2, 1, counts[0])
    else:
        cos, sin = tables(device, words.get("rotary_dim", D) // 2)
    if "norm" in words:
        norm = words["norm"]
        sizes = [count * D if norm.get("across_heads") else D for count in counts[:2]]
        made = [torch.linspace(0.5, 1.5, size, device=device).requires_grad_(grad) for size in sizes]
        words["norm"] = Norm(*made, **norm)
    if words.pop("ids", False):
        words["positions"] = torch.tensor([[3, 0, 5, 1, 1, 8], [2, 2, 7, 0, 6, 4]], device=device)
    if "packed" in words:
        words["positions"] = jitrope.Packed(torch.tensor(words.pop("packed"), dtype=torch.int32, device=device))
        words.pop("layout")
    return [*x, cos, sin], words, [*x, *made]


def same(a: Any, b: Any) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def flat(results: Any) -> list[Tensor]:
    return [y for x in results for y in (x if isinstance(x, Scaled) else (x,))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", KINDS)
def test_one_buffer_for_one_all_to_all(name: str, device: str) -> None:
    """q, k and v of a rank side by side in a buffer of the caller; nothing else of it is written."""
    given, words, _ = call(name, device)
    layout, counts = KINDS[name][1].get("layout", "bshd"), KINDS[name][0]
    want = jitrope.prepare_qkv(*given, **words)
    if flat(want)[0].dtype != flat(want[2:])[0].dtype:  # v is not converted, so it has no place between q and k
        given[2], want = None, (*want[:2], None)
    first = want[0].values if isinstance(want[0], Scaled) else want[0]
    axis = LAYOUT_AXES[layout][2] + 1
    shape = [R, *first.shape]
    shape[axis] = sum(counts) // R + 1  # one head more
    buffer = torch.full(shape, 7.0, device=device).to(first.dtype)
    parts = buffer.split([*[count // R for count in counts], 1], axis)
    out = parts[:3] if given[2] is not None else (*parts[:2], None)
    for _ in range(2):
        got = jitrope.prepare_qkv(*given, **words, out=out)
        for x, y, part in zip(got, want, out):
            if isinstance(y, Scaled):
                assert x.values is part
                assert same(x.values, sent(y.values, layout))
                assert same(x.scale, sent(y.scale, layout))
            elif y is not None:
                assert x is part
                assert same(x, sent(y, layout))
        assert (parts[3].float() == 7).all()
        buffer[:] = torch.full((), 7.0).to(buffer.dtype)


# ---- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("quantize", [Quantize(1.0, 1.0), DynamicQuantize(), DynamicQuantize(per="head")], ids=repr)
@pytest.mark.parametrize("device", DEVICES)
def test_a_normalised_v_beside_converted_heads_has_its_gradient(quantize: Any, device: str) -> None:
    """Its launch is then its own, also in that layout."""
    found = []
    for words in ({}, {"out": Ulysses(R)}):
        given, norm, leaves = call("norm of v", device, grad=True)
        given[:2] = [x.detach() for x in given[:2]]
        norm["norm"] = Norm(v_norm=True)
        v = jitrope.prepare_qkv(*given, **norm, quantize=quantize, **words)[2]
        v = v if words else sent(v, "bshd")
        found.append(torch.autograd.grad((v.float() ** 3).sum(), leaves[2])[0])
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_a_second_derivative(device: str) -> None:
    found = []
    for by_hand in (True, False):
        (q, k, _, cos, sin), _, _ = call("rope", device, grad=True)
        if by_hand:
            out = sent(jitrope.apply_rope(q, k, cos, sin)[0], "bshd")
        else:
            out = jitrope.apply_rope(q, k, cos, sin, out=Ulysses(R))[0]
        (first,) = torch.autograd.grad((out.float() ** 2).sum(), q, create_graph=True)
        found.append(torch.autograd.grad((first.float() ** 3).sum(), q)[0])
    torch.testing.assert_close(*found)


# ---- refusals ------------------------------------------------------------------------------------

REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "grouped heads that ranks do not divide": (
        {"out": Ulysses(8)},
        "k is .*H=4.*; for 8 ranks it needs a multiple of 8",
    ),
    "heads of q": ({"out": Ulysses(3)}, "q is .*H=8.*; for 3 ranks it needs a multiple of 3 heads"),
    "in place": ({"out": Ulysses(2), "inplace": True}, "inplace does not go with Ulysses"),
    "the same in given tensors": ({"out": (torch.zeros(3, B, S, 2, D), None, None)}, "q is .*H=8.*; for 3 ranks"),
    "another shape": (
        {"out": (torch.zeros(4, B, S, 3, D), None, None)},
        r"out's q is .*; it must be \(4, 2, 6, 2, 64\), float32",
    ),
    "no ranks": (
        {"out": (torch.zeros(0, B, S, 3, D), None, None)},
        r"out's q is .*; it must be \(2, 6, 8, 64\), float32",
    ),
    "a cache": (
        {"out": Ulysses(2), "cache": KVCache(*torch.zeros(2, 50, 4, D), torch.arange(12))},
        "Ulysses does not go with a cache",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    words, text = REFUSALS[name]
    q, k, v, cos, sin = call("rope", "cpu")[0]
    with pytest.raises(InvalidInput, match=text):
        jitrope.prepare_qkv(q.float(), k.float(), v.float(), cos, sin, **words)


@pytest.mark.parametrize("ranks", [0, -1, 1.5, "2", None])
def test_ranks_are_a_number(ranks: Any) -> None:
    with pytest.raises(InvalidInput, match="Ulysses: ranks is "):
        Ulysses(ranks)


@pytest.mark.gpu
def test_one_launch() -> None:
    given, words, _ = call("norm", DEVICE)
    runtime.local.recent.clear()
    jitrope.prepare_qkv(*given, **words, out=Ulysses(R))
    (prepared,) = {known.origin[0] for functions in runtime.local.recent.values() for known in functions}
    assert not prepared.left  # v is copied in the launch
