"""Results in tensors that the caller gives: `out=` of `apply_rope` and `prepare_qkv`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import jitrope
from jitrope import DynamicQuantize, InvalidInput, KVCache, Norm, Quantize
from jitrope.run import dispatch
from jitrope.run import launch as runtime

from .cases import CASES, make
from .devices import DEVICE, DEVICES

FP8 = torch.float8_e4m3fn


def elsewhere(x: Tensor, value: float = 7) -> Tensor:
    """A tensor of x's shape in the middle of another buffer, with the last but one axis first in memory."""
    order = [x.dim() - 2, *[axis for axis in range(x.dim()) if axis != x.dim() - 2]]
    sizes = [x.shape[axis] for axis in order]
    buffer = torch.full((sizes[0] + 2, *sizes[1:]), value, device=x.device).to(x.dtype)
    return buffer[1:-1].permute([order.index(axis) for axis in range(x.dim())])


def untouched(out: Tensor, value: float = 7) -> bool:
    """Whether the buffer around a tensor from `elsewhere` is as it was."""
    buffer = out._base.float()
    return bool((buffer[0] == value).all() and (buffer[-1] == value).all())


def bits(x: Tensor | None) -> Any:
    return None if x is None else (x.dtype, x.shape, x.cpu().contiguous().view(torch.uint8).tolist())


def tensors(device: str, *heads: int, size: int = 64, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(heads))
    return [torch.randn(2, 6, count, size, generator=generator).to(device, dtype) for count in heads]


def tables(device: str, *lead: int, rows: int = 9, pairs: int = 32) -> tuple[Tensor, Tensor]:
    angles = torch.rand(*lead[:1], rows, *lead[1:], pairs, generator=torch.Generator().manual_seed(3)).to(device) * 9
    return angles.cos(), angles.sin()


# ---- values --------------------------------------------------------------------------------------


def heads_of(kind: str, device: str) -> tuple[list[Any], dict[str, Any]]:
    """(q, k, v, cos and sin; words) of a call of `prepare_qkv`."""
    q, k, v = tensors(device, 4, 2, 2)
    weights = [torch.linspace(0.5, 1.5, 64, device=device).roll(n) for n in (0, 7)]
    cos, sin = tables(device)
    words: dict[str, Any] = {}
    if "norm" in kind:
        words["norm"] = Norm(*weights, rounding="once")
    if "v_norm" in kind:
        words["norm"] = Norm(*weights, v_norm=True)
    if "after" in kind:
        words["norm"] = Norm(*weights, after_rope=True)
    if "across" in kind:
        words["norm"] = Norm(across_heads=True, v_norm="v_norm" in kind)
    if "quantize" in kind:
        words["quantize"] = Quantize(0.5, 0.25)
    if "other pairs" in kind:
        words["interleaved_out"] = True
    if "each head" in kind:
        (k, v), (cos, sin) = tensors(device, 4, 4), tables(device, 1, 4)
    if "wider v" in kind:
        (v,) = tensors(device, 2, size=80)
    if "no k" in kind:
        k, words["norm"] = None, Norm(weights[0])
    if "thd" in kind:
        q, k, v = q[0], k[0], v[0]
        words["positions"] = jitrope.Packed(torch.tensor([0, 2, 5], dtype=torch.int32, device=device))
    if "part" in kind:
        words["rotary_dim"], (cos, sin) = 32, tables(device, pairs=16)
    if "no table" in kind:
        cos = sin = None
    return [q, k, v, cos, sin], words


KINDS = {
    **dict.fromkeys(("rope", "norm", "norm, no table", "after", "thd", "norm and quantize", "quantize"), True),
    **dict.fromkeys(("v_norm", "v_norm, no table", "v_norm and quantize", "other pairs"), True),
    **dict.fromkeys(("across", "across and v_norm", "each head", "wider v", "no k"), False),
    "v_norm, part": False,
}
"""Kinds of calls, and whether v is copied in the launch of q and k."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("missing", ["q", "k", "v", "qk", "qkv"])
@pytest.mark.parametrize("kind", ["rope", "quantize", "v_norm"])
def test_a_missing_item_is_a_fresh_tensor(kind: str, missing: str, device: str) -> None:
    args, words = heads_of(kind, device)
    want = jitrope.prepare_qkv(*args, **words)
    given = [None if letter in missing else elsewhere(x) for letter, x in zip("qkv", want)]
    got = jitrope.prepare_qkv(*args, out=given, **words)
    for y, out, wanted in zip(got, given, want):
        assert y is out or out is None
        assert bits(y) == bits(wanted)
    if kind == "rope" and "v" in missing:
        assert got[2] is args[2]
    if "k" in missing:
        assert got[1].stride() == args[1].stride()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("words", [
    {}, {"quantize": Quantize(0.5)}, {"norm": Norm(v_norm=True)}, {"quantize": DynamicQuantize(torch.int8)},
    {"quantize": DynamicQuantize(group=32), "norm": Norm()},
], ids=str)  # fmt: skip
def test_a_call_with_a_cache_writes_q_to_the_given_tensor(words: dict[str, Any], device: str) -> None:
    q, k, v = tensors(device, 4, 2, 2)
    results = []
    for given in (False, True):
        caches = [torch.zeros(12, 2, 64, dtype=q.dtype, device=device) for _ in range(2)]
        kept, cache = k.clone(), KVCache(*caches, torch.arange(12, device=device).flip(0), rotate_k=True)
        scaled = isinstance(words.get("quantize"), DynamicQuantize)
        out = elsewhere(results[0][0]) if given else None
        got = jitrope.prepare_qkv(q, kept, v, *tables(device), cache=cache, out=(out, None, None), **words)
        assert got[1] is kept
        assert got[2] is v
        values, scale = got[0] if scaled else (got[0], k)
        assert not given or (values is out and untouched(out))
        results.append((values, scale, kept, *caches))
    assert [bits(x) for x in results[0]] == [bits(x) for x in results[1]]


def test_no_elements() -> None:
    q, k, v = (x[:, :0] for x in tensors("cpu", 4, 2, 2))
    out = [torch.empty_like(x) for x in (q, k, v)]
    assert all(x is y for x, y in zip(jitrope.prepare_qkv(q, k, v, *tables("cpu"), out=out), out))


# ---- torch's machinery ---------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_autograd_sees_that_given_tensors_are_written(device: str) -> None:
    """A backward that needs their old values is refused, also after a call like an earlier one."""
    q, k, v = tensors(device, 4, 2, 2)
    for _ in range(2):
        outs = [torch.ones_like(x) for x in (q, k, v)]
        products = [torch.ones_like(x, requires_grad=True) * x for x in outs]
        jitrope.prepare_qkv(q, k, v, *tables(device), out=outs)
        for product in products:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["rope", "norm", "v_norm", "quantize", "v_norm and quantize", "across"])
def test_a_like_call_with_other_tensors_is_not_looked_at_again(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The replay writes the new tensors, and refuses those that share memory."""
    runtime.local.recent = {}
    (q, *args), words = heads_of(kind, DEVICE)
    for turn in range(3):
        x = q.roll(turn, 1)
        want = jitrope.prepare_qkv(x, *args, **words)
        given = [elsewhere(y) for y in want]
        got = jitrope.prepare_qkv(x, *args, out=given, **words)
        for y, out, wanted in zip(got, given, want):
            assert y is out
            assert bits(y) == bits(wanted)
            assert untouched(y)
        if turn == 0:
            monkeypatch.setattr(dispatch, "_call", lambda *_: pytest.fail("looked at again"))
    if kind in ("rope", "norm"):
        k, v, *rest = args
        over = torch.empty(3, *given[2].permute(2, 0, 1, 3).shape, dtype=v.dtype, device=DEVICE)  # (H, B, S, D) thrice
        own, both = (over[:2].unbind() if n else (over[0], over[0]) for n in (1, 0))
        assert jitrope.prepare_qkv(q, k, v, *rest, out=[given[0], *(x.permute(1, 2, 0, 3) for x in own)], **words)
        with pytest.raises(InvalidInput, match="out's k and out's v share memory"):
            jitrope.prepare_qkv(q, k, v, *rest, out=[given[0], *(x.permute(1, 2, 0, 3) for x in both)], **words)


@pytest.mark.gpu
@pytest.mark.parametrize("label", ["q_weight", "cos_sin_cache", "bias"])
def test_outputs_that_share_memory_with_other_tensors_are_refused_in_a_replay_too(label: str) -> None:
    given = {"q_weight": (16,), "cos_sin_cache": (64, 16), "bias": (96,)}
    given = {name: torch.randn(shape, device=DEVICE) for name, shape in given.items()}
    qkv, memory = torch.randn(1, 64, 2, 3 * 16, device=DEVICE), torch.zeros(64 * 2 * 16, device=DEVICE)

    def call(q_weight: Tensor, cos_sin_cache: Tensor, bias: Tensor) -> None:
        words = {"cos_sin_cache": cos_sin_cache, "out": (memory.view(1, 64, 2, 16), None, None)}
        if label == "bias":
            jitrope.prepare_fused_qkv(qkv, heads=(2, 2), order="grouped", bias=bias, **words)
        else:
            jitrope.prepare_qkv(qkv[..., :16], None, None, norm=Norm(q_weight), **words)

    call(**given)
    given[label] = memory[: given[label].numel()].view_as(given[label])
    with pytest.raises(InvalidInput, match=f"out's q and {label} share memory"):
        call(**given)


@pytest.mark.gpu
def test_a_copied_v_that_shares_memory_is_refused_in_a_replay_too() -> None:
    """v is copied after the launch here, because k is stored as fp8."""
    args, words = heads_of("quantize", DEVICE)
    q, k, v, *_ = args
    fresh = [torch.empty_like(x, dtype=FP8) for x in (q, k)]
    for _ in range(2):
        jitrope.prepare_qkv(*args, out=(*fresh, torch.empty_like(v)), **words)
    with pytest.raises(InvalidInput, match="out's v and v share memory"):
        jitrope.prepare_qkv(*args, out=(*fresh, v), **words)


@pytest.mark.parametrize("device", DEVICES)
def test_strides_and_addresses_of_outputs_may_change_from_call_to_call(device: str) -> None:
    """An output may also have elements apart from each other, and begin at any address."""
    q, k, cos, sin, _ = make(CASES[0], device)
    want = bits(jitrope.apply_rope(q, k, cos, sin)[0])
    for _ in range(2):
        unaligned = torch.empty(q.numel() + 1, dtype=q.dtype, device=device)[1:].view(q.shape)
        apart = torch.empty(q.mT.shape, dtype=q.dtype, device=device).mT
        for out in (torch.empty_like(q), elsewhere(q), unaligned, apart):
            got, _ = jitrope.apply_rope(q, k, cos, sin, out=[out, None])
            assert got is out
            assert bits(got) == want


@pytest.mark.parametrize("kind", KINDS)
def test_planning_lists_the_kernel_of_the_same_call(kind: str) -> None:
    """Tensors of the caller change nothing of the kernel, and v only joins it where the kernel can copy it."""
    args, words = heads_of(kind, "meta")
    lists = []
    for letters in ("", "qk", "qkv"):
        want = jitrope.prepare_qkv(*args, **words)
        given = [x if x is None or letter not in letters else torch.empty_like(x) for letter, x in zip("qkv", want)]
        with jitrope.planning(["auto"]) as specs:
            got = jitrope.prepare_qkv(*args, out=[x if n in letters else None for n, x in zip("qkv", given)], **words)
        assert all(y is x for n, x, y in zip("qkv", given, got) if n in letters)
        lists.append(specs)
    alone = kind in ("across and v_norm", "v_norm, part", "v_norm and quantize")
    assert len(lists[0]) == (2 if alone else 1)  # v's norm has a launch of its own
    assert lists[1] == lists[0]
    assert lists[2][-1].copy_v == (KINDS[kind] or kind == "v_norm, part")  # that is a copy of the normalised v
    assert len(lists[2]) == (1 if KINDS[kind] else len(lists[0]))


# ---- refusals ------------------------------------------------------------------------------------


Change = Callable[[Any], Any]
Q, K, V = tensors("cpu", 4, 2, 2)
COS, SIN = tables("cpu")
WIDE = torch.randn(2, 6, 6, 64).bfloat16()


def of(letter: str, make: Change) -> Change:
    """A change of one item of fresh outputs."""
    return lambda outs: [make(x) if name == letter else x for name, x in zip("qkv", outs)]


CACHE = KVCache(*torch.zeros(2, 12, 2, 64).bfloat16(), torch.arange(12))
REFUSALS: dict[str, tuple[str, Change, dict[str, Any]]] = {
    "out is 3; it must be a tuple of 2 tensors": ("apply_rope", lambda outs: 3, {}),
    "out is (None, None, None); it must be a tuple of 2 tensors": ("apply_rope", lambda outs: (None, None, None), {}),
    "out is a tensor of shape (3,), float32, on cpu; it must be a tuple of 3 tensors": (
        "prepare_qkv", lambda outs: torch.zeros(3), {}),
    "out's q is 3; it must be a tensor": ("apply_rope", of("q", lambda x: 3), {}),
    "out's k is a tensor of shape (2, 6, 4, 64), bfloat16, on cpu; it must be (2, 6, 2, 64), bfloat16, on cpu": (
        "apply_rope", of("k", lambda x: x.repeat(1, 1, 2, 1)), {}),
    "out's v is float32; it must be (2, 6, 2, 64), bfloat16, on cpu": (
        "prepare_qkv", of("v", lambda x: x.float()), {}),
    "out's q is bfloat16; it must be (2, 6, 4, 64), float8_e4m3fn, on cpu": (
        "prepare_qkv", lambda outs: outs, {"quantize": Quantize(0.5, 0.5)}),
    "out's q is float8_e4m3fn; it must be (2, 6, 4, 64), bfloat16, on cpu": (
        "apply_rope", of("q", lambda x: x.to(FP8)), {}),
    "out's q is a tensor of shape (2, 6, 4, 64), bfloat16, on meta; it must be (2, 6, 4, 64), bfloat16, on cpu": (
        "apply_rope", of("q", lambda x: x.to("meta")), {}),
    "out's q is a tensor of shape (2, 4, 6, 64), bfloat16, on cpu; it must be (2, 6, 4, 64), bfloat16, on cpu like q; "
    "pass its transpose(1, 2)": ("apply_rope", of("q", lambda x: x.transpose(1, 2)), {}),
    "out's k has strides (768, 0, 64, 1); its elements overlap in memory": (
        "apply_rope", of("k", lambda x: x[:, :1].expand(-1, 6, -1, -1)), {}),
    "out's q and q share memory": ("apply_rope", of("q", lambda x: Q), {}),
    "out's q and k share memory": ("apply_rope", of("q", lambda x: WIDE[:, :, :4]), {"k": WIDE[:, :, 3:5]}),
    "out's q and cos share memory": ("apply_rope", of("q", lambda x: WIDE[:, :, :4]), {"cos": WIDE[0, :, 0, :32]}),
    "out's k and out's v share memory": ("prepare_qkv", lambda outs: (None, outs[1], outs[1]), {}),
    "out's v and v share memory": ("prepare_qkv", of("v", lambda x: V), {"norm": Norm(v_norm=True)}),
    "out's k requires a gradient, but this call has none; use a call without cache, quantize and out": (
        "apply_rope", of("k", lambda x: x.requires_grad_()), {}),
    "inplace does not go with out": ("apply_rope", lambda outs: outs, {"inplace": True}),
    "inplace does not go with out; leave it out": ("prepare_qkv", lambda outs: outs, {"inplace": True, "norm": Norm()}),
    "out's k is a tensor of shape (2, 6, 2, 64), bfloat16, on cpu; it must be None, because k is None": (
        "apply_rope", lambda outs: outs, {"k": None}),
    "out's v is a tensor of shape (2, 6, 2, 64), bfloat16, on cpu; it must be None, because v is None": (
        "prepare_qkv", lambda outs: outs, {"v": None}),
    "out's v is a tensor of shape (2, 6, 2, 64), bfloat16, on cpu; it must be None, because v goes to the cache": (
        "prepare_qkv", of("k", lambda x: None), {"cache": CACHE}),
    "inplace does not go with out; leave it": (
        "prepare_qkv", lambda outs: (outs[0], None, None), {"cache": CACHE, "inplace": True}),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSALS)
def test_a_wrong_output_is_refused_before_anything_is_written(message: str) -> None:
    name, change, words = REFUSALS[message]
    heads = {"q": Q, "k": K, "v": V, "cos": COS, "sin": SIN if "cos" not in words else SIN[:6].bfloat16(), **words}
    if name == "apply_rope":
        del heads["v"]
    fresh = [torch.full_like(x, 7) for x in (Q, K, V)][: len(heads) - 2 if name == "apply_rope" else 3]
    out = change(fresh[: 2 if name == "apply_rope" else 3])
    before = {n: x.clone() for n, x in heads.items() if isinstance(x, Tensor)}
    for _ in range(2):
        with pytest.raises(InvalidInput) as error:
            getattr(jitrope, name)(**heads, out=out)
        assert str(error.value).startswith(f"{name}: {message}")
    assert all(bool((x == 7).all()) for x in fresh)
    assert all(torch.equal(heads[n], x) for n, x in before.items())


def test_no_tensors_are_refused_in_place_too() -> None:
    """`out=(None, None)` means fresh tensors, which a call in place does not make."""
    with pytest.raises(InvalidInput, match="apply_rope: inplace does not go with out; leave it out"):
        jitrope.apply_rope(Q.clone(), K.clone(), COS, SIN, out=(None, None), inplace=True)
    for words in ({"norm": Norm()}, {"cache": CACHE}):
        with pytest.raises(InvalidInput, match="prepare_qkv: inplace does not go with out; leave it out"):
            jitrope.prepare_qkv(Q.clone(), K.clone(), V, COS, SIN, out=[None] * 3, inplace=True, **words)


@pytest.mark.parametrize("label", ["q", "k", "v", "q_weight", "out's q"])
def test_a_tensor_that_requires_a_gradient_is_refused(label: str) -> None:
    """As by torch's own functions with out=; under no_grad the call is made."""
    given = {"q": Q, "k": K, "v": V, "q_weight": torch.ones(64), "out's q": torch.zeros_like(Q)}
    given[label] = given[label].clone().requires_grad_()

    def call() -> Any:
        norm = Norm(given["q_weight"])
        out = (given["out's q"], None, torch.empty_like(V))
        return jitrope.prepare_qkv(given["q"], given["k"], given["v"], COS, SIN, norm=norm, out=out)

    with pytest.raises(InvalidInput, match=f"{label} requires a gradient, but this call has none; use a call without"):
        call()
    with torch.no_grad():
        assert call()[0] is given["out's q"]
    assert given["out's q"].any()


def test_check_reads_the_positions_before_anything_is_written() -> None:
    out = torch.full_like(Q, 7)
    with pytest.raises(InvalidInput, match="positions go from 0 to 99, but the table has rows 0 to 8"):
        jitrope.apply_rope(Q, K, COS, SIN, positions=torch.tensor([0, 1, 2, 3, 4, 99]), check=True, out=(out, None))
    assert bool((out == 7).all())
    assert jitrope.apply_rope(Q, K, COS, SIN, check=True, out=(out, None))[0] is out
    assert bits(out) == bits(jitrope.apply_rope(Q, K, COS, SIN)[0])


def test_transforms_of_functions_are_refused() -> None:
    out = torch.empty_like(Q[0])
    for transform in (lambda f: torch.vmap(f)(Q), lambda f: torch.func.jacrev(f)(Q[0])):
        with pytest.raises(InvalidInput, match=r"torch.func's (vmap|grad) is not supported here"):
            transform(lambda q: jitrope.apply_rope(q, None, COS, SIN, layout="thd", out=(out, None))[0])
