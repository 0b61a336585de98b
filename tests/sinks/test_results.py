"""Results in tensors that the caller gives, and in groups of heads for the ranks of Ulysses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import jitrope
from jitrope import DynamicQuantize, InvalidInput, KVCache, Norm, Packed, Quantize, Scaled, Ulysses

from .. import oracle
from ..devices import DEVICE, DEVICES, inputs, noise, turn
from ..results import same
from ..sweep import E4M3, FP4

B, S, D, R = 2, 6, 64, 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("missing", ["q", "k", "v", "qk", "qkv"])
@pytest.mark.parametrize(
    "words", [{}, {"quantize": Quantize(0.5, 0.25)}, {"norm": Norm(v_norm=True)}], ids=["rope", "quantize", "v_norm"]
)
def test_a_missing_item_is_a_fresh_tensor(words: dict[str, Any], missing: str, device: str) -> None:
    """A v that no stage changes is then returned as it is."""
    q, k, v, cos, sin = inputs(device, B, S, 4, D)
    want = jitrope.prepare_qkv(q, k, v, cos, sin, **words)
    given = [None if letter in missing else torch.empty_like(x) for letter, x in zip("qkv", want)]
    got = jitrope.prepare_qkv(q, k, v, cos, sin, out=given, **words)
    for y, out, wanted in zip(got, given, want):
        assert y is out or out is None
        assert y.dtype == wanted.dtype
        assert same(y, wanted)
    assert "norm" in words or "v" not in missing or got[2] is v
    assert got[1].stride() == k.stride()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "words",
    [
        *({}, {"quantize": Quantize(0.5)}, {"norm": Norm(v_norm=True)}, {"quantize": DynamicQuantize(torch.int8)}),
        {"quantize": DynamicQuantize(group=32), "norm": Norm()},
    ],
    ids=str,
)
def test_a_call_with_a_cache_writes_q_to_the_given_tensor(words: dict[str, Any], device: str) -> None:
    q, k, v, cos, sin = inputs(device, B, S, 4, D)
    found: list[list[Tensor]] = []
    for given in (False, True):
        caches = torch.zeros(2, 12, 2, D, dtype=q.dtype, device=device)
        kept, slots = k.clone(), torch.arange(12, device=device).flip(0)
        buffer = torch.full((4 + 2, B, S, D), 7.0, device=device).to(found[0][0].dtype) if given else None
        out = None if buffer is None else buffer[1:-1].permute(1, 2, 0, 3)
        cache = KVCache(*caches, slots, rotate_k=True)
        got = jitrope.prepare_qkv(q, kept, v, cos, sin, cache=cache, out=(out, None, None), **words)
        assert got[1] is kept
        assert got[2] is v
        found.append([*(got[0] if isinstance(got[0], Scaled) else [got[0]]), kept, caches])
        if buffer is not None:
            assert found[1][0] is out
            assert (buffer[::5].float() == 7).all()  # the first and the last of six
    assert all(same(x, y) for x, y in zip(*found))


@pytest.mark.parametrize("device", DEVICES)
def test_strides_and_addresses_of_outputs_may_change_from_call_to_call(device: str) -> None:
    """An output may also have elements apart from each other, and begin at any address."""
    q, k, _, cos, sin = inputs(device, B, S, 4, D)
    want = jitrope.apply_rope(q, k, cos, sin)[0]
    for _ in range(2):
        unaligned = torch.empty(q.numel() + 1, dtype=q.dtype, device=device)[1:].view(q.shape)
        apart = torch.empty(q.mT.shape, dtype=q.dtype, device=device).mT
        turned = torch.empty(q.transpose(0, 2).shape, dtype=q.dtype, device=device).transpose(0, 2)
        for out in (torch.empty_like(q), turned, unaligned, apart):
            assert jitrope.apply_rope(q, k, cos, sin, out=[out, None])[0] is out
            assert same(out, want)


@pytest.mark.parametrize("device", DEVICES)
def test_a_v_that_is_copied_after_the_launch_may_have_any_strides(device: str) -> None:
    """Three heads of v are not like two of k, and fp4 needs pairs of neighbours only of what it converts."""
    q, k, _, cos, sin = inputs(device, B, S, 2, D)
    (v,) = noise(device, q.dtype, (B, S, 3, D))
    out = torch.zeros(*v.shape, 2, device=device, dtype=q.dtype)[..., 0]
    jitrope.prepare_qkv(q, k, v, cos, sin, quantize=DynamicQuantize(FP4), out=(None, None, out))
    assert torch.equal(out, v)


@pytest.mark.gpu
@pytest.mark.parametrize("words", [{}, {"norm": Norm()}, {"quantize": Quantize(0.5, 0.25)}], ids=str)
def test_outputs_that_share_memory_with_each_other_are_refused_in_a_replay_too(words: dict[str, Any]) -> None:
    """With a conversion v is copied after the launch, and may not be its own copy."""
    q, k, v, cos, sin = inputs(DEVICE, B, S, 4, D)
    converted = "quantize" in words
    for step in range(3):
        x, dtype = q.roll(step, 1), E4M3 if converted else q.dtype
        own = torch.zeros(2, 2, B, S, D, dtype=dtype, device=DEVICE).permute(0, 2, 3, 1, 4)
        out = [torch.empty_like(q, dtype=dtype), own[0], torch.empty_like(v) if converted else own[1]]
        got = jitrope.prepare_qkv(x, k, v, cos, sin, out=out, **words)
        assert all(y is given for y, given in zip(got, out))
        assert all(same(*both) for both in zip(got, jitrope.prepare_qkv(x, k, v, cos, sin, **words)))
    out[2] = v if converted else own[0]
    names = "out's v and v" if converted else "out's k and out's v"
    with pytest.raises(InvalidInput, match=f"{names} share memory"):
        jitrope.prepare_qkv(q, k, v, cos, sin, out=out, **words)


Q, K, V, COS, SIN = inputs("meta", B, S, 4, D)
HALF = {"cos": COS[:, :16], "sin": SIN[:, :16]}
EACH = torch.empty(1, S, 4, D // 2, device="meta")
SEQUENCES = Packed(torch.empty(3, dtype=torch.int32, device="meta"))
LAUNCHES: dict[str, tuple[dict[str, Any], tuple[int, int], bool]] = {
    # words, the launches without given tensors and with them, and whether the one of q and k copies v
    "rope": ({}, (1, 1), True),
    "norm": ({"norm": Norm(rounding="once")}, (1, 1), True),
    "after": ({"norm": Norm(after_rope=True)}, (1, 1), True),
    "quantize": ({"quantize": Quantize(0.5, 0.25)}, (1, 1), True),
    "norm and quantize": ({"norm": Norm(), "quantize": Quantize(0.5, 0.25)}, (1, 1), True),
    "v_norm": ({"norm": Norm(v_norm=True)}, (1, 1), True),
    "v_norm, no table": ({"norm": Norm(v_norm=True), "cos": None, "sin": None}, (1, 1), True),
    "v_norm and quantize": ({"norm": Norm(v_norm=True), "quantize": Quantize(0.5, 0.25)}, (2, 1), True),
    "v_norm, part": ({"norm": Norm(v_norm=True), "rotary_dim": 32, **HALF}, (2, 2), True),
    "other pairs": ({"interleaved_out": True}, (1, 1), True),
    "packed": ({"q": Q[0], "k": K[0], "v": V[0], "positions": SEQUENCES}, (1, 1), True),
    "across": ({"norm": Norm(across_heads=True)}, (1, 1), False),
    "across and v_norm": ({"norm": Norm(across_heads=True, v_norm=True)}, (2, 2), False),
    "each head": ({"k": Q, "v": Q, "cos": EACH, "sin": EACH}, (1, 1), False),
    "wider v": ({"v": torch.empty(B, S, 2, 80, dtype=V.dtype, device="meta")}, (1, 1), False),
    "no k": ({"k": None, "norm": Norm()}, (1, 1), False),
}


@pytest.mark.parametrize("kind", LAUNCHES)
def test_v_is_copied_in_the_launch_of_q_and_k_where_the_kernel_can(kind: str) -> None:
    """Given tensors change nothing else of the kernel. A norm of v may have a launch of its own."""
    own, counts, copied = LAUNCHES[kind]
    words = {"q": Q, "k": K, "v": V, "cos": COS, "sin": SIN, **own}
    want, lists = jitrope.prepare_qkv(**words), []
    for letters in ("", "qk", "qkv"):
        out = [torch.empty_like(x) if x is not None and n in letters else None for n, x in zip("qkv", want)]
        with jitrope.planning(["auto"]) as specs:
            got = jitrope.prepare_qkv(**words, out=out)
        assert all(y is x for x, y in zip(out, got) if x is not None)
        lists.append(specs)
    assert (len(lists[0]), len(lists[2])) == counts
    assert lists[1] == lists[0]
    assert lists[2][-1].copy_v == copied


RANKED: dict[str, tuple[tuple[int, int, int], str, dict[str, Any]]] = {
    "a head for each rank": ((2, 2, 2), "bshd", {}),
    "more heads than one step of a block": ((96, 64, 64), "bshd", {}),
    "sbhd": ((4, 2, 2), "sbhd", {"norm": Norm(after_rope=True)}),
    "bhsd": ((4, 2, 2), "bhsd", {"interleaved": True}),
    "packed": ((4, 2, 2), "thd", {}),
    "norm across heads": ((4, 4, 4), "bshd", {"norm": Norm(across_heads=True)}),
    "norm of v": ((4, 2, 2), "bshd", {"norm": Norm(v_norm=True)}),
    "fp8, v too": ((4, 2, 2), "bshd", {"quantize": Quantize(0.05, 0.1, 0.2)}),
    "scales of groups, v too": ((8, 4, 4), "bhsd", {"quantize": DynamicQuantize(group=32, v=True)}),
    "int8, v too": ((8, 4, 4), "sbhd", {"quantize": DynamicQuantize(torch.int8, v=True), "norm": Norm(v_norm=True)}),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", RANKED)
def test_one_buffer_for_one_all_to_all(name: str, device: str) -> None:
    """q, k and v of a rank side by side in a buffer of the caller, or fresh; nothing else of it is written."""
    counts, layout, words = RANKED[name]
    heads = noise(device, torch.bfloat16, *[(1 if layout == "thd" else B, S, n, D) for n in counts])
    given = *[oracle.heads(x, layout) for x in heads], *turn(device, S, D // 2)
    packed = Packed(torch.tensor([0, 2, 5], dtype=torch.int32, device=device))
    words = {**words, **({"positions": packed} if layout == "thd" else {"layout": layout})}
    want, axis = jitrope.prepare_qkv(*given, **words), layout.index("h")
    first = want[0].values if isinstance(want[0], Scaled) else want[0]
    shape = [R, *first.shape]
    shape[axis + 1] = sum(counts) // R + 1  # one head more
    buffer = torch.full(shape, 7.0, device=device).to(first.dtype)
    parts = buffer.split([*[count // R for count in counts], 1], axis + 1)
    for out in (parts[:3], parts[:3], Ulysses(R)):
        got = jitrope.prepare_qkv(*given, **words, out=out)
        for n, (x, y) in enumerate(zip(got, want)):
            pairs = [*zip(x, y)] if isinstance(y, Scaled) else [(x, y)]
            assert pairs[0][0].is_contiguous() if isinstance(out, Ulysses) else pairs[0][0] is parts[n]
            assert all(scale.is_contiguous() for scales in pairs[1:] for scale in scales)
            for z, whole in pairs:  # what a rank gets is one piece
                assert same(z, torch.stack(whole.chunk(R, axis)))
        assert (parts[3].float() == 7).all()
        buffer[:] = torch.full((), 7.0).to(buffer.dtype)


@pytest.mark.parametrize("quantize", [Quantize(1.0, 1.0), DynamicQuantize(), DynamicQuantize(per="head")], ids=repr)
@pytest.mark.parametrize("device", DEVICES)
def test_a_normalised_v_beside_converted_heads_has_its_gradient(quantize: Any, device: str) -> None:
    """Its launch is then its own, also for ranks."""
    q, k, v, cos, sin = inputs(device, B, S, 4, D)
    v.requires_grad_()
    words: dict[str, Any] = {"norm": Norm(v_norm=True), "quantize": quantize}
    want = torch.stack(jitrope.prepare_qkv(q, k, v, cos, sin, **words)[2].chunk(R, 2))
    got = jitrope.prepare_qkv(q, k, v, cos, sin, **words, out=Ulysses(R))[2]
    one, two = (torch.autograd.grad((x.float() ** 3).sum(), v)[0] for x in (got, want))
    assert one.any()
    assert torch.equal(one, two)


@pytest.mark.parametrize("letters", ["q", "v", "qv"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_second_derivative(letters: str, device: str) -> None:
    """Of some of q, k and v."""
    *heads, cos, sin = inputs(device, B, S, 4, D)
    leaves = [x.requires_grad_() for letter, x in zip("qkv", heads) if letter in letters]
    want = [torch.stack(x.chunk(R, 2)) for x in jitrope.prepare_qkv(*heads, cos, sin)]
    found = []
    for results in (jitrope.prepare_qkv(*heads, cos, sin, out=Ulysses(R)), want):
        firsts = torch.autograd.grad(sum((x.float() ** 2).sum() for x in results), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum((x.float() ** 3).sum() for x in firsts), leaves))
    torch.testing.assert_close(*found)
