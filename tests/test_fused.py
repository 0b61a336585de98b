"""`prepare_fused_qkv`: the bits of a split by hand, what its gradients and arguments may be, and its refusals.

`test_stages` has its combinations with all else.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import jitrope
from jitrope import DynamicQuantize, InvalidInput, KVCache, Norm, Quantize, Ulysses

from . import oracle
from .cases import BIASES, QKV_CASES, QKV_NORM_CASES, Case, NormCase, as_fused, heads_of, make, make_bias
from .cases import qkv_norm_call as norm_call
from .devices import DEVICES
from .results import near_each
from .said import said

AnyCase = Case | NormCase
CASES: list[tuple[AnyCase, str]] = list(zip((*QKV_CASES, *QKV_NORM_CASES), itertools.cycle(BIASES)))
SOME = [
    pair for pair in CASES if pair[0].name in ("qkv-grouped", "qkv-gated", "qkv-gated-packed", "grouped-sbhd", "gated")
]
NORMED = [pair for pair in CASES if isinstance(pair[0], NormCase)]
GATED = next(case for case in QKV_NORM_CASES if case.name == "gated")


class Made:
    """The tensors of a case, and a call of them."""

    def __init__(
        self, case: AnyCase, form: str, device: str = "cpu", leaves: bool = False, v_norm: bool = False
    ) -> None:
        self.weights: dict[str, Tensor] = {}
        if isinstance(case, NormCase):
            self.qkv, self.weights, words = norm_call(case, device)
            words["norm"] = jitrope.Norm(**self.weights, **{**case.norm, "v_norm": v_norm})
        else:
            self.qkv, _, cos, sin, words = make(as_fused(case), device)
            words.update(cos=cos, sin=sin, heads=heads_of(case))
        self.bias = make_bias(self.qkv, form)
        self.words = said(**words)
        self.leaves = [x.requires_grad_(leaves) for x in (self.qkv, self.bias, *self.weights.values())]

    def sum(self) -> Tensor:
        return self.qkv + self.bias.view(self.qkv.shape[-2:])

    def call(self, qkv: Tensor | None = None, bias: Tensor | None = None, **words: Any) -> Any:
        given = self.qkv if qkv is None else qkv
        return jitrope.prepare_fused_qkv(given, bias=bias, **{**self.words, **words})

    def apart(self) -> list[Tensor]:
        """The same by a split, and `prepare_qkv`."""
        words = {name: x for name, x in self.words.items() if name not in ("heads", "order")}
        q, k, v, *gate = self.parts(self.qkv)
        normed = "norm" in self.words
        function: Any = jitrope.prepare_qkv if normed else jitrope.apply_rope
        return [*[*function(q, k, *([v] if normed else []), **words), v][:3], *gate]

    def parts(self, qkv: Tensor) -> tuple[Tensor, ...]:
        return oracle.split(qkv, self.words["heads"], self.words["order"])


def dout(x: Tensor) -> Tensor:
    return torch.sin(torch.arange(x.numel(), device=x.device).float() * 3).view(x.shape).to(x)


def same(got: Any, want: Any, exact: bool = True) -> None:
    assert len(got) == len(want)
    if not exact:
        near_each(got, want)
    for x, y in zip(got, want) if exact else ():
        assert torch.equal(x, y)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("case", "form"), CASES, ids=str)
def test_the_bits_of_a_split_and_of_the_sum_with_a_bias(case: AnyCase, form: str, device: str) -> None:
    """Fresh and in place, by both launches, also in a second call. No result shares memory with qkv, and qkv stays.

    With narrow accesses of the bias a norm adds squares in another order.
    """
    made = Made(case, form, device)
    before, exact = made.qkv.clone(), not made.weights or form in ("flat", "heads")
    for launch in ("token_linear", "grid_2d", "grid_2d"):
        jitrope.configure(launch=launch)
        got = made.call(bias=made.bias)
        same(got, made.call(made.sum()), exact)
        assert all(x.is_contiguous() for x in got)
        assert len({x.untyped_storage().data_ptr() for x in (made.qkv, *got)}) == 1 + len(got)
        assert torch.equal(made.qkv, before)
        qkv = before.clone()
        assert made.call(qkv, made.bias, inplace=True) is qkv
        same([qkv], [made.call(made.sum(), inplace=True)], exact)
        same(made.call(), made.apart())


@pytest.mark.parametrize("device", DEVICES)
def test_a_v_without_a_gradient_may_be_anything(device: str) -> None:
    """Also one that is normalised."""
    made = Made(NORMED[0][0], "flat", device, leaves=True, v_norm=True)
    with torch.no_grad():
        made.parts(made.qkv)[2].fill_(torch.nan)
    q, k, *_ = made.call()
    leaves = [made.qkv, *made.weights.values()]
    for grad in torch.autograd.grad((q, k), leaves, (dout(q.detach()), dout(k.detach()))):
        assert not grad.isnan().any()


@pytest.mark.parametrize("device", DEVICES)
def test_a_gradient_with_strides_of_zero(device: str) -> None:
    ours, theirs = (Made(GATED, "flat", device, leaves=True) for _ in range(2))
    found = [
        torch.autograd.grad(sum(y.sum() for y in ys), [made.qkv, *made.weights.values()])
        for ys, made in ((ours.call(), ours), (theirs.apart(), theirs))
    ]
    same(*found, exact=False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("case", "form"), [pair for pair in SOME if pair not in NORMED], ids=str)
def test_the_gradients_in_place(case: Case, form: str, device: str) -> None:
    """Also where qkv is a view, and where it or the bias has no gradient."""
    for wanted in ((True, True), (False, True), (True, False)):
        ours, theirs = (Made(case, form, device) for _ in range(2))
        found = []
        for made, ours_too in ((ours, True), (theirs, False)):
            leaves = [x.requires_grad_() for x, wants in zip(made.leaves, wanted) if wants]
            base = (made.qkv if ours_too else made.sum()).flatten(-2) * 1
            qkv = base.unflatten(-1, made.qkv.shape[-2:])
            out = made.call(qkv, made.bias if ours_too else None, inplace=True)
            found.append([out, *torch.autograd.grad(out, leaves, dout(out.detach()))])
        for got, want in zip(*found):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("case", "form"), SOME, ids=str)
def test_no_tokens(case: AnyCase, form: str, device: str) -> None:
    """The bias then has a gradient of zeros."""
    made = Made(case, form, device, leaves=True)
    first = 0 if made.words.get("layout") in ("sbhd", "thd") else 1
    made.words.pop("positions", None)
    got = made.call(made.qkv.narrow(first, 0, 0), made.bias)
    assert all(x.shape[first] == 0 for x in got)
    found = torch.autograd.grad(got, made.leaves[:2], [torch.empty_like(x) for x in got])
    assert not any(x.any() for x in found)


def test_forward_mode_is_refused() -> None:
    made = Made(QKV_CASES[-1], "flat")
    with pytest.raises(jitrope.InvalidInput, match="forward-mode"):
        torch.func.jvp(lambda bias: made.call(bias=bias)[0], (made.bias,), (made.bias,))


def test_a_second_derivative() -> None:
    made = Made(QKV_CASES[-1], "flat", leaves=True)
    out = sum(x.square().sum() for x in made.call(bias=made.bias))
    first = torch.autograd.grad(out, made.leaves, create_graph=True)
    tokens = made.qkv[..., 0, 0].numel()
    second = torch.autograd.grad(first[1].sum(), made.leaves)
    torch.testing.assert_close(second[0], torch.full_like(made.qkv, 2.0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(second[1], torch.full_like(made.bias, 2.0 * tokens), rtol=1e-4, atol=1e-4)


def kernels(case: AnyCase, form: str, **words: Any) -> list[Any]:
    made = Made(case, form, "meta", leaves=not words)
    with jitrope.planning(["auto"]) as specs:
        out = made.call(bias=made.bias, **words)
        if not words:
            torch.autograd.grad(out, made.leaves, [torch.empty_like(x) for x in out])
    return specs


@pytest.mark.parametrize(("case", "form"), CASES, ids=str)
def test_the_forward_and_the_gradient_are_one_launch_each(case: AnyCase, form: str) -> None:
    """Without a norm the gradient is the kernel without a bias. Across heads v and a gate have theirs by torch."""
    normed = isinstance(case, NormCase)
    copies = not (isinstance(case, NormCase) and case.across_heads)
    gated = (case.rope if isinstance(case, NormCase) else case).options.get("order") == "qkv_gated" and copies
    assert [(x.added_bias, x.gated) for x in kernels(case, form)] == [(True, gated), (normed, False)]
    assert [(x.added_bias, x.gated, x.copy_v) for x in kernels(case, form, inplace=True)] == [(True, gated, copies)]


def test_a_norm_has_no_second_derivative() -> None:
    made = Made(QKV_NORM_CASES[-2], "flat", leaves=True)
    (first,) = torch.autograd.grad(sum(x.square().sum() for x in made.call()), made.qkv, create_graph=True)
    with pytest.raises(jitrope.JitropeError, match="no second derivative"):
        first.sum().backward()


@pytest.mark.parametrize("stage", ["cache", "quantize", "out"])
@pytest.mark.parametrize("number", [np.int64, float])
def test_heads_are_any_whole_numbers(number: Any, stage: str) -> None:
    """numpy's and 3.0 too."""
    qkv, table = torch.randn(2, 5, 10 * 64), torch.rand(5, 32)
    words: dict[str, Any] = {"quantize": DynamicQuantize(v=True), "out": (None, None, torch.zeros(2, 5, 2, 64))}
    words["cache"] = KVCache(*torch.zeros(2, 24, 2, 64), torch.arange(10))
    one, two = (
        jitrope.prepare_fused_qkv(qkv, table, table, heads=heads, **{stage: words[stage]})
        for heads in ((6, 2), [number(6), number(2)])
    )
    assert [x is None for x in one] == [x is None for x in two] == [False, *[stage == "cache"] * 2]
    q, same_q = (x[0].values.view(torch.uint8) if stage == "quantize" else x[0] for x in (one, two))
    assert torch.equal(q, same_q)


W = torch.ones(8)
REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "across heads": ({"norm": Norm(across_heads=True, v_norm=True)}, "across_heads does not go with v_norm in fused"),
    "a transform": ({"norm": Norm(across_heads=True), "hadamard": True}, "across_heads does not go with hadamard"),
    "a view of v": ({"norm": Norm(v_norm=True), "copy_v": False}, "copy_v=False does not go with v_norm"),
    "a weight": ({"norm": Norm(torch.ones(4))}, r"q_weight .* it must be \(8,\), .* like q of qkv \(.* H=4, D=8\)$"),
    "k's weight": ({"norm": Norm(W, torch.ones(4))}, r"k_weight is .*\(4,\).*like q_weight and k of qkv \(.*H=2"),
    "a bias": ({"norm": Norm(W, q_bias=W)}, "q_bias goes with kind='layer_norm'"),
    "dtypes": ({"norm": Norm(W, W.half())}, "k_weight is float16; it must be .*, float32, contiguous"),
    "another value": ({"norm": W}, "norm is .*; it must be a jitrope.Norm"),
    "inverse": ({"inverse": True}, "inverse does not go with norm"),
    "shifts": ({"positions": jitrope.Shifts(torch.zeros(6, dtype=torch.int64))}, "shifts does not go with"),
    "tables for each head": ({"cos": torch.zeros(1, 6, 2, 4), "sin": torch.zeros(1, 6, 2, 4)}, "must share it"),
    "layout": ({"layout": "bhsd"}, "layout is 'bhsd'"),
    "width": ({"heads": (6, 2)}, "qkv has shape .*, but heads=.6, 2. with order='grouped' are 10 heads"),
    "heads": ({"heads": (0, 2)}, r"heads\[0\] is 0"),
    "a gradient in place": ({"inplace": True, "norm": Norm(W.clone().requires_grad_())}, "leave inplace=True out"),
    "a view of v and a bias": ({"bias": torch.ones(64), "copy_v": False}, "copy_v=False does not go with bias"),
    "size of a bias": ({"bias": torch.ones(63)}, r"bias is .*; it must be \(2, 32\) or \(64,\), float32"),
    "axes of a bias": ({"bias": torch.ones(1, 2, 32)}, r"bias is .*; it must be \(2, 32\) or \(64,\), float32"),
    "dtype of a bias": ({"bias": torch.ones(64).bfloat16()}, r"bias is bfloat16; it must be .*, float32"),
    "device of a bias": ({"bias": torch.ones(64, device="meta")}, "bias is .* on meta; it must be .* on cpu like qkv"),
    "a number as a bias": ({"bias": 1.0}, "bias is 1.0; it must be a tensor"),
    "order": ({"order": "qkv"}, "qkv has shape .*, but heads=.4, 2. with order='qkv' are 8 heads of D elements"),
}  # fmt: skip


@pytest.mark.parametrize(
    "more", [{"quantize": jitrope.Quantize(0.5, 0.5)}, {"out": (torch.zeros(2, 6, 4, 8), None, None)}]
)
def test_a_view_of_v_is_refused_with_more_stages_too(more: dict[str, Any]) -> None:
    table, words = torch.zeros(6, 4), {"heads": (4, 2), "order": "grouped", "norm": Norm(v_norm=True), "copy_v": False}
    with pytest.raises(jitrope.InvalidInput, match="copy_v=False does not go with v_norm"):
        jitrope.prepare_fused_qkv(torch.ones(2, 6, 2, 32), table, table, **words, **more)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_by_name_that_write_nothing(name: str, inplace: bool) -> None:
    changes, text = REFUSALS[name]
    table = torch.zeros(6, 4)
    words = {"qkv": torch.ones(2, 6, 2, 32), "cos": table, "sin": table, "heads": (4, 2), "norm": Norm(W, W),
             "order": "grouped", "inplace": inplace, **changes}  # fmt: skip
    before = words["qkv"].clone()
    with pytest.raises(jitrope.InvalidInput, match=text) as error:
        jitrope.prepare_fused_qkv(**words)
    assert str(error.value).startswith("prepare_fused_qkv: ")
    assert torch.equal(words["qkv"], before)


@pytest.mark.parametrize(("order", "width"), [("qkv", 10), ("grouped", 10), ("qkv_gated", 16)])
def test_one_token_in_place(order: str, width: int) -> None:
    """A decode step: its heads lie one after the other, as in a tensor of their own."""
    qkv, table = torch.randn(1, 1, width * 64), (torch.randn(1, 32), torch.randn(1, 32))
    q, k, v, *gate = jitrope.prepare_fused_qkv(qkv, *table, heads=(6, 2), order=order)
    jitrope.prepare_fused_qkv(own := qkv.clone(), *table, heads=(6, 2), order=order, inplace=True)
    parts = jitrope.prepare_fused_qkv(own, *(torch.ones(1, 32), torch.zeros(1, 32)), heads=(6, 2), order=order)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v, *gate), parts))


def test_refusals_beside_other_stages() -> None:
    qkv, bias, table = (torch.ones(shape).bfloat16() for shape in ((2, 5, 2, 5 * 64), (2, 5 * 64), (5, 32)))
    cache = KVCache(*torch.zeros(2, 24, 2, 64).bfloat16(), torch.arange(10))

    def refused(match: str, qkv: Any = qkv, **words: Any) -> None:
        with pytest.raises(InvalidInput, match=match):
            jitrope.prepare_fused_qkv(
                qkv, table, table, **{"heads": (6, 2), "order": "grouped", "cache": cache, **words}
            )

    refused("prepare_fused_qkv: cache is 1; it must be a jitrope.KVCache", cache=1)
    refused("prepare_fused_qkv: quantize is 1; it must be a jitrope.Quantize", quantize=1)
    refused("inverse does not go with cache; leave it out", inverse=True)
    refused("out's k is .*; it must be None, because k goes to the cache", out=(None, qkv, None))
    refused("out is .*; it must be a tuple of 3 tensors", out=qkv)
    refused("prepare_fused_qkv: per='head' does not go with a cache", quantize=DynamicQuantize(per="head"))
    for per in ("token", "head"):
        words = {"cache": None, "quantize": DynamicQuantize(per=per, v=True), "copy_v": False}
        refused("copy_v=False does not go with v=True of quantize", **words)
    refused("Ulysses does not go with a cache", out=Ulysses(2))
    refused("copy_v=False does not go with Ulysses", out=Ulysses(2), cache=None, copy_v=False)
    refused("q is .*; for 4 ranks it needs a multiple of 4 heads", out=Ulysses(4), cache=None)
    one = [torch.zeros(1, 2, 5, n, 64).bfloat16() for n in (6, 2, 2)]
    refused("there must be a rank for each of the 2 groups", out=one, cache=None)
    refused("across_heads does not go with a cache", norm=Norm(across_heads=True))
    refused(
        "prepare_fused_qkv: hadamard does not go with quantize; give it to that", quantize=Quantize(1.0), hadamard=True
    )
    refused("k_scale of quantize does not go with a cache", quantize=Quantize(1.0, 1.0))
    refused("copy_v=False does not go with bias", bias=bias, copy_v=False)
    refused(r"bias is float32; it must be \(2, 320\) or \(640,\), bfloat16", bias=bias.float())
    refused("heads=.14, 2. with order='grouped' are 18 heads of D elements", heads=(14, 2))
    refused("heads is 'a'", heads="a")
    refused("order is 'b'", order="b")
    refused(r"order is \['qkv'\]; it must be one of", order=["qkv"])
    refused("copy_v is None; it must be True or False", copy_v=None)
    refused("qkv is None; it must be a tensor", qkv=None)
    refused("qkv requires a gradient, but this call has none", qkv=qkv.clone().requires_grad_())
    buffer = torch.zeros(2, 5, 10 * 64).bfloat16()
    out = (buffer[..., : 6 * 64].unflatten(2, (-1, 64)), None, None)
    refused("out's q and qkv share memory", buffer.unflatten(2, (2, -1)), out=out)
    refused(r"out's q is .*; it must be \(2, 5, 6, 64\), bfloat16", out=(out[0][..., :32], None, None))
    out = (None, None, torch.zeros(2, 5, 2, 64).bfloat16())
    refused("copy_v=False does not go with out's v", cache=None, copy_v=False, out=out)
