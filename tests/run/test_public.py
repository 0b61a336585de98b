"""A public function repeats its recent calls, found by what their user wrote, eager and compiled."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

import jitrope
from jitrope.run import dispatch, launch
from jitrope.run.public import FUNCTIONS

from ..devices import DEVICES, slow

COS, SIN = jitrope.tables.cos_sin(64, jitrope.tables.inv_freq(rotary_dim=64)[0])
W = torch.ones(64)
WORDS = {"inplace": (0, bool), "interleaved": (1.0, bool), "unrotated": (True, int), "mscale": (True, float)}


@pytest.mark.parametrize("word", WORDS)
def test_a_known_call_has_the_same_words(word: str) -> None:
    """Numbers of other kinds are equal, and are refused after a call with the right one too, or mean the same."""
    q, freqs, (wrong, kind), found = torch.randn(1, 6, 4, 64), torch.rand(6, 32), WORDS[word], []
    for value in (wrong, kind(wrong)) * 3:
        try:
            found.append(jitrope.apply_rope(q.clone(), None, freqs=freqs, **{word: value})[0].tolist())
        except jitrope.InvalidInput as error:
            found.append(str(error))
    assert found[2:4] == found[4:] == found[:2]


def test_a_known_call_uses_the_tensors_of_its_user() -> None:
    """v that is only passed on, out in a list, a number of q, and a projection without an axis of heads."""
    freqs, norm = torch.rand(6, 32), jitrope.Norm(torch.ones(64), torch.ones(64))
    for turn in range(4):
        q, k, v = torch.randn(3, 1, 6, 4, 64)
        v = v if turn % 2 else v.double()[:, :1]
        assert jitrope.prepare_qkv(q, k, v, freqs=freqs, norm=norm)[2] is v
        given = [torch.empty_like(q), torch.empty_like(k)]
        found = jitrope.apply_rope(q, k, freqs=freqs, out=given if turn % 2 else tuple(given))
        assert all(x is y for x, y in zip(found, given))
        half = jitrope.apply_rope(q, None, freqs=freqs, q_scale=0.5 * (turn % 2 + 1))[0]
        torch.testing.assert_close(half, found[0] * 0.5 * (turn % 2 + 1))
        qkv = torch.cat([x.flatten(2) for x in (q, k, torch.randn_like(k))], -1)
        split = jitrope.prepare_fused_qkv(qkv, freqs=freqs, heads=(4, 4))
        assert all(torch.equal(x, y) for x, y in zip(split, found))
    with pytest.raises(jitrope.InvalidInput, match="qkv has shape"):  # as many elements
        jitrope.prepare_fused_qkv(qkv.view(6, -1), freqs=freqs, heads=(4, 4))


def test_a_call_keeps_no_tensors() -> None:
    """Neither a known one nor one that is refused."""
    for _ in range(3):
        q, weight = torch.randn(1, 16, 4, 64), torch.ones(64)
        found = jitrope.prepare_qkv(q, None, None, COS, SIN, norm=jitrope.Norm(weight))[0]
        kept = [weakref.ref(x) for x in (q, weight, found)]
        del q, weight, found
        assert [ref() for ref in kept] == [None] * 3
    q, k, v = torch.randn(3, 1, 16, 4, 64)
    kept = [weakref.ref(v)]
    with pytest.raises(jitrope.InvalidInput):
        jitrope.prepare_qkv(q, k, v, COS, SIN, norm=jitrope.Norm(v_norm=True), inplace=True, rotary_offset=999)
    del v
    assert kept[0]() is None


@pytest.mark.parametrize("device", DEVICES)
def test_a_recorded_call_in_place_is_known_but_for_what_torch_does_not_write(device: str, monkeypatch: Any) -> None:
    """A leaf is refused, before it is written, and views are recorded each by itself."""
    leaves = [torch.randn(1, 16, 4, 64, device=device, requires_grad=True) for _ in range(2)]
    tables, before, looked = (COS.to(device), SIN.to(device)), leaves[0].detach().clone(), Mock(wraps=dispatch._call)
    monkeypatch.setattr(dispatch, "_call", looked)
    fresh = jitrope.apply_rope(*leaves, *tables)
    want = [*fresh, *torch.autograd.grad(fresh, leaves, [x.detach() for x in fresh])]
    for turn in ("first", "known", "known", "a leaf", "views"):
        given = [(x * 1).view_as(x) if turn == "views" else x * 1 for x in leaves]
        if turn == "a leaf":
            with pytest.raises(jitrope.InvalidInput, match="q requires a gradient and is a leaf"):
                jitrope.apply_rope(leaves[0], given[1], *tables, inplace=True)
            assert torch.equal(leaves[0], before)
            continue
        looked.reset_mock()
        out = jitrope.apply_rope(*given, *tables, inplace=True)
        assert all(x is y for x, y in zip(out, given))
        grads = torch.autograd.grad([*out], leaves, [x.detach() for x in out])
        assert all(map(torch.equal, (*out, *grads), want))
        assert turn != "known" or not looked.called
    with torch.no_grad():
        assert jitrope.apply_rope(leaves[0], leaves[1], *tables, inplace=True)[0] is leaves[0]
    assert torch.equal(leaves[0], want[0])


def test_a_call_of_two_launches_is_not_tried_again(monkeypatch: Any) -> None:
    """Its words cannot find it: the user got what another launch computed."""
    (q, k, v), quantize = torch.randn(3, 1, 16, 4, 64), jitrope.DynamicQuantize(per="head")
    tried = Mock(wraps=launch.keep_spelled)
    monkeypatch.setattr(launch, "keep_spelled", tried)
    found = [jitrope.prepare_qkv(q, k, v, COS, SIN, quantize=quantize)[0] for _ in range(3)]
    tried.assert_called_once()
    assert all(torch.equal(x.scale, found[0].scale) for x in found)


@pytest.mark.parametrize(("inplace", "call"), [
    (True, lambda q, k, v: jitrope.prepare_qkv(q, k, v, COS, SIN, inplace=True)),
    (False, lambda q, k, v: jitrope.prepare_qkv(v=v, q=q, k=k, cos=COS, sin=SIN)),
])  # fmt: skip
@pytest.mark.parametrize("first", ["v is q", "v is k", "q is a view of v"])
def test_a_tensor_that_an_earlier_call_had_twice(inplace: bool, call: Any, first: str) -> None:
    q, k, v = torch.randn(3, 1, 16, 4, 64)
    flat = torch.randn(1, 16, 256)
    given = {"v is q": (q, k, q), "v is k": (q, k, k), "q is a view of v": (flat.view(1, 16, 4, 64), k, flat)}[first]
    for _ in range(2):
        call(*given)
    q, k, v = torch.randn(3, 1, 16, 4, 64)
    v = v.flatten(2) if first == "q is a view of v" else v
    want = FUNCTIONS["apply_rope"](q.clone(), k.clone(), COS, SIN)
    found = call(q, k, v)
    assert all(map(torch.equal, found, want))
    assert found[2] is v
    assert (found[0] is q, found[1] is k) == (inplace, inplace)


@pytest.mark.parametrize("placed", ["ids", "starts"])
def test_positions_that_are_dropped_and_are_slots(placed: str) -> None:
    """Without a table positions have no effect; those of an earlier call were its slots, or its lengths."""
    same, (q, k, v) = torch.tensor([5]), torch.randn(3, 1, 4, 64)
    for where, at in ((same, same), (same, torch.tensor([41 if placed == "ids" else 9]))):
        caches = torch.zeros(2, 4, 16, 4, 64)
        if placed == "ids":
            cache = jitrope.KVCache(*caches, at)
            jitrope.prepare_qkv(q, k, v, positions=where, cache=cache, layout="thd")
        else:
            cache = jitrope.KVCache(*caches, jitrope.Pages(torch.tensor([[2, 3]]), seq_lens=at))
            jitrope.prepare_qkv(q[None], k[None], v[None], positions=jitrope.Starts(where), cache=cache)
    written = caches[0].flatten(0, 1).any(-1).any(-1).nonzero().flatten().tolist()
    assert written == {"ids": [41], "starts": [40]}[placed]


@pytest.mark.parametrize("more", [{"inplace": True}, {"out": True}])
def test_what_is_checked_each_time_is_computed_each_time(more: dict[str, Any]) -> None:
    """check=True beside a norm of v that takes a launch of its own."""
    norm = jitrope.Norm(v_norm=True, across_heads="out" in more)
    for _ in range(3):
        q, k, v = torch.randn(3, 1, 16, 4, 64)
        want = FUNCTIONS["prepare_qkv"](q, k, v, COS, SIN, norm=norm)
        words = {"out": [torch.zeros_like(x) for x in (q, k, v)]} if "out" in more else more
        found = jitrope.prepare_qkv(q, k, v, COS, SIN, norm=norm, check=True, **words)
        assert all(torch.equal(x, y) for x, y in zip(found, want))
    ids = torch.arange(16) + 100
    with pytest.raises(jitrope.InvalidInput, match="position"):
        jitrope.prepare_qkv(*torch.randn(3, 1, 16, 4, 64), COS, SIN, norm=norm, check=True, positions=ids, inplace=True)


def test_a_class_of_the_users_is_made_of_more_than_its_arguments() -> None:
    made = lambda self, ends: jitrope.Packed.__init__(self, ends, int(ends.diff().max()))  # noqa: E731
    sequences = type("Sequences", (jitrope.Packed,), {"__init__": made})
    x, tables = torch.randn(40, 4, 64), (COS[:16], SIN[:16])
    jitrope.apply_rope(x, None, *tables, positions=sequences(torch.tensor([0, 10, 20, 30, 40])))
    with pytest.raises(jitrope.InvalidInput, match="cos has 16 rows; it needs 37"):
        jitrope.apply_rope(x, None, *tables, positions=sequences(torch.tensor([0, 1, 2, 3, 40])))


def test_a_value_that_is_made_again() -> None:
    q, k = torch.randn(2, 1, 16, 4, 64)
    norm = jitrope.Norm(W, W)
    before = jitrope.prepare_qkv(q, k, None, COS, SIN, norm=norm)[0]
    norm.__init__(W, W, eps=0.75)  # type: ignore[misc]
    after = jitrope.prepare_qkv(q, k, None, COS, SIN, norm=norm)[0]
    assert not torch.equal(before, after)


class Norm(jitrope.Norm):  # has the name of jitrope's
    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight, weight, eps=0.5)
        self.tag = 3


def changed_list(q: Tensor) -> Any:
    sections = [16, 8, 8]
    mrope = jitrope.Mrope(torch.stack([torch.arange(16) + n for n in (0, 3, 7)]), sections)
    sections[:] = [8, 16, 8]
    return jitrope.apply_rope(q, None, COS, SIN, positions=mrope)[0]


def own_attribute(q: Tensor) -> Any:
    norm = Norm(W)
    norm.tag = 5
    return jitrope.prepare_qkv(q, q * 2, None, COS, SIN, norm=norm)[0] + norm.tag


def refused(q: Tensor) -> Any:
    try:
        return jitrope.apply_rope(q, None, COS, SIN, positions=torch.arange(15))[0]
    except jitrope.InvalidInput:
        return q + 1


COMPILED: dict[str, Callable[[Tensor], Tensor]] = {
    "changed list": changed_list, "own attribute": own_attribute, "refused": refused,
    "read attribute": lambda q: jitrope.prepare_qkv(q, None, None, COS, SIN, norm=(norm := jitrope.Norm(W * 2)))[0]
    + norm.tensors["q_weight"],
}  # fmt: skip


@pytest.mark.parametrize("name", [slow(x) if x == "own attribute" else x for x in COMPILED])
def test_a_compiled_call_does_as_in_eager_mode(name: str) -> None:
    """Without a full graph each function of jitrope is compiled by itself, so one size is enough there."""
    own, call = name == "own attribute", COMPILED[name]
    if own and torch.__version__.startswith("2.11"):
        pytest.skip("torch 2.11 fails on its own graph break at a function's cache; jitrope cannot spell such a class")
    torch._dynamo.reset()
    whole = call is refused and hasattr(torch, "float8_e8m0fnu")  # torch 2.6 cannot trace an exception of a package
    compiled = torch.compile(call, backend="eager" if own else "aot_eager", fullgraph=whole)
    for tokens in (16,) if own else (16, 15, 14):
        q = torch.randn(1, 16 if call is changed_list else tokens, 4, 64)
        assert torch.equal(compiled(q), call(q))


def test_a_value_from_a_compiled_function() -> None:
    q, start = torch.randn(1, 16, 4, 64), torch.tensor([3])
    made = torch.compile(lambda x: jitrope.Starts(x), backend="eager")(start)
    assert not hasattr(made, "shape")
    found = [jitrope.apply_rope(q, None, COS, SIN, positions=x)[0] for x in (made, jitrope.Starts(start))]
    assert torch.equal(*found)


def test_what_a_call_without_gradients_leaves_is_not_taken_for_one_with_them() -> None:
    """A gradient of a norm needs the old q and k, and autograd forbids to write a view of several results."""
    q, k = torch.randn(2, 1, 16, 4, 64)
    words = {"norm": jitrope.Norm(), "inplace": True}
    qkv = torch.randn(1, 16, 8 * 64, requires_grad=True)
    fused = {"heads": (4, 2), "copy_v": False}
    with torch.no_grad():
        for _ in range(2):
            leaves = [x.clone().requires_grad_() for x in (q, k)]
            jitrope.prepare_qkv(*leaves, None, COS, SIN, **words)
            jitrope.prepare_fused_qkv(qkv * 1, COS, SIN, **fused)
    leaves = [x.clone().requires_grad_() for x in (q, k)]
    with pytest.raises(jitrope.InvalidInput, match="but this call has none; leave inplace=True out"):
        jitrope.prepare_qkv(*[x * 1 for x in leaves], None, COS, SIN, **words)
    jitrope.prepare_fused_qkv(qkv * 1, COS, SIN, **fused)[2].mul_(2)


def test_a_v_that_is_returned_as_given_may_be_nested() -> None:
    q, k, cos, sin = torch.randn(1, 5, 2, 8), torch.randn(1, 5, 2, 8), torch.randn(5, 4), torch.randn(5, 4)
    v = torch.nested.nested_tensor([torch.randn(2, 8)])
    for _ in range(2):
        assert jitrope.prepare_qkv(q, k, v, cos, sin)[2] is v
