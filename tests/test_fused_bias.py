"""`prepare_fused_qkv` with the projection's bias: the bits of a call of qkv + bias, and its gradients."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import jitrope
from jitrope.ops import library
from jitrope.ops.projections import QKV_NORM, ROPE_QKV
from jitrope.plan.options import NormOptions

from . import oracle
from .cases import BIASES, QKV_CASES, QKV_NORM_CASES, Case, NormCase, as_fused, heads_of, lower, make, make_bias, named
from .cases import qkv_norm_call as norm_call
from .devices import DEVICES, slow
from .said import said
from .test_norm import assert_near

AnyCase = Case | NormCase
CASES: list[tuple[AnyCase, str]] = list(zip((*QKV_CASES, *QKV_NORM_CASES), itertools.cycle(BIASES)))
SOME = [
    pair for pair in CASES if pair[0].name in ("qkv-grouped", "qkv-gated", "qkv-gated-packed", "grouped-sbhd", "gated")
]
NORMED = [pair for pair in CASES if isinstance(pair[0], NormCase)]


class Made:
    """The tensors of a case, and a call of them."""

    def __init__(
        self, case: AnyCase, form: str, device: str = "cpu", leaves: bool = False, v_norm: bool = False
    ) -> None:
        self.weights: dict[str, Tensor] = {}
        if isinstance(case, NormCase):
            self.qkv, self.weights, words = norm_call(case, device)
            words["norm"] = jitrope.Norm(**self.weights, **{**case.norm._asdict(), "v_norm": v_norm})
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

    def parts(self, qkv: Tensor) -> tuple[Tensor, ...]:
        return oracle.split(qkv, self.words["heads"], self.words["order"])


def dout(x: Tensor) -> Tensor:
    return torch.sin(torch.arange(x.numel(), device=x.device).float() * 3).view(x.shape).to(x)


def same(got: Any, want: Any, exact: bool = True) -> None:
    assert len(got) == len(want)
    if not exact:
        assert_near(got, want)
    for x, y in zip(got, want) if exact else ():
        assert torch.equal(x, y)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("case", "form"), CASES, ids=str)
def test_the_bits_of_the_sum(case: AnyCase, form: str, device: str) -> None:
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [pair[0] for pair in SOME], ids=str)
def test_without_a_table_the_bias_is_added(case: AnyCase, device: str) -> None:
    """It is also the only work of such a call."""
    made = Made(case, "flat", device)
    words = {"cos": None, "sin": None, "freqs": None, "positions": None}
    want = made.call(made.sum(), **words) if made.weights else made.parts(made.sum())
    same(made.call(bias=made.bias, **words), want)
    same(made.parts(made.call(made.qkv.clone(), made.bias, inplace=True, **words)), want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("case", "form"), CASES, ids=str)
def test_the_gradients_are_those_of_the_sum(case: AnyCase, form: str, device: str) -> None:
    """Of all results, and of each alone; the bias' is the sum over the tokens, by torch."""
    gradients_are_those_of_the_sum(*(Made(case, form, device, leaves=True) for _ in range(2)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [NORMED[0][0], NORMED[1][0], NORMED[7][0]], ids=str)
def test_v_is_normalised_after_its_bias(case: AnyCase, device: str) -> None:
    """The gate is not normalised."""
    made = Made(case, "flat", device, v_norm=True)
    got = made.call(bias=made.bias)
    same(got, made.call(made.sum()))
    same(got[3:], made.parts(made.sum())[3:])
    qkv = made.qkv.clone()
    made.call(qkv, made.bias, inplace=True)
    same(made.parts(qkv), got)
    gradients_are_those_of_the_sum(*(Made(case, "heads", device, leaves=True, v_norm=True) for _ in range(2)))


def gradients_are_those_of_the_sum(ours: Made, theirs: Made) -> None:
    got, want = ours.call(bias=ours.bias), theirs.call(theirs.sum())
    everything = range(len(got))
    for picked in (everything, *[(n,) for n in everything]):
        grads = [
            torch.autograd.grad([ys[n] for n in picked], made.leaves, [dout(ys[n].detach()) for n in picked],
                                retain_graph=True, allow_unused=True)
            for ys, made in ((got, ours), (want, theirs))
        ]  # fmt: skip
        grads = [[torch.zeros_like(x) if y is None else y for x, y in zip(ours.leaves, found)] for found in grads]
        assert_near(*grads)


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
@pytest.mark.parametrize(("case", "form"), [CASES[0], NORMED[0]], ids=str)
def test_the_gradient_of_a_learned_table(case: AnyCase, form: str, device: str) -> None:
    ours, theirs = (Made(case, form, device, leaves=True) for _ in range(2))
    for made in (ours, theirs):
        made.leaves += [made.words[name].requires_grad_() for name in ("cos", "sin")]
    gradients_are_those_of_the_sum(ours, theirs)


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


@pytest.mark.slow
@pytest.mark.parametrize("bias", ["flat", "heads"])
@pytest.mark.parametrize(("case", "inplace"), [(case, x) for case, _ in SOME for x in (False, True)], ids=str)
def test_opcheck(case: AnyCase, inplace: bool, bias: str) -> None:
    made = Made(case, bias, leaves=not inplace)
    rope, op, words = case, ROPE_QKV, {"inplace": inplace}
    if isinstance(case, NormCase):
        rope, op, words = case.rope, QKV_NORM, {**words, "norm": NormOptions(*case.norm)}
    (_, _, *tables), options = lower(make(as_fused(rope)), q_per_group=rope.shape[3], **words)
    given = {"qkv": made.qkv, "bias": made.bias, **made.weights}
    arguments = library.arguments(op, named(op, [given.get(name) for name in op.names], tables), options)
    torch.library.opcheck(getattr(torch.ops.jitrope, op.name + "_" * inplace).default, arguments)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("frozen", [False, slow(True)])
@pytest.mark.parametrize(("case", "form"), SOME, ids=str)
def test_compile_fullgraph(case: AnyCase, form: str, inplace: bool, frozen: bool) -> None:
    """The eager results and gradients. frozen: the bias has none."""
    made = Made(case, form)
    if inplace and made.weights:
        return  # there is no gradient in place

    def model(x: Tensor, bias: Tensor) -> Any:
        if inplace:
            return (made.call(x * 2, bias, inplace=True).float() * 3,)
        q, k, v, *gate = made.call(x * 2, bias)
        return q.float().sum(-1), k * 2, v + 1, *[x.sigmoid() for x in gate]

    results = []
    torch._dynamo.reset()
    for function in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        leaves = [x.clone().requires_grad_() for x in made.leaves[: 2 - frozen]]
        outputs = function(leaves[0], made.bias if frozen else leaves[1])
        results.append([*outputs, *torch.autograd.grad(sum(y.float().sin().sum() for y in outputs), leaves)])
    for got, want in zip(*results):
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "a view of v": ({"copy_v": False}, "copy_v=False does not go with bias, because v is not a view then"),
    "size": ({"bias": torch.ones(63)}, r"qkv has shape \(2, 6, 2, 32\) but bias \(63,\); it must be \(2, 32\) or"),
    "axes": ({"bias": torch.ones(1, 2, 32)}, r"bias \(1, 2, 32\); it must be \(2, 32\) or \(64,\)"),
    "dtype": ({"bias": torch.ones(64).bfloat16()}, "bias is torch.bfloat16 on cpu but qkv is torch.float32 on cpu"),
    "device": ({"bias": torch.ones(64, device="meta")}, "bias is torch.float32 on meta but qkv"),
    "a number": ({"bias": 1.0}, "bias is 1.0; it must be a tensor"),
    "order": ({"order": "qkv"}, "qkv has shape .*, but heads=.4, 2. with order='qkv' are 8 heads of D elements"),
}


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_by_name_that_write_nothing(name: str, inplace: bool) -> None:
    changes, text = REFUSALS[name]
    table = torch.zeros(6, 4)
    words = {"qkv": torch.ones(2, 6, 2, 32), "cos": table, "sin": table, "heads": (4, 2), "bias": torch.ones(64),
             "order": "grouped", "inplace": inplace, **changes}  # fmt: skip
    before = words["qkv"].clone()
    with pytest.raises(jitrope.InvalidInput, match=text) as error:
        jitrope.prepare_fused_qkv(**words)
    assert str(error.value).startswith("prepare_fused_qkv: ")
    assert torch.equal(words["qkv"], before)
