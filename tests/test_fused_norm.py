"""`prepare_fused_qkv` with a norm: the bits of a split by hand and `prepare_qkv`, and its gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import jitrope
from jitrope import Norm
from jitrope.ops import library
from jitrope.ops.projections import QKV_NORM, QKV_NORM_BACKWARD
from jitrope.plan.options import NormOptions

from . import oracle
from .cases import QKV_NORM_CASES, NormCase, as_fused, lower, make, named, qkv_norm_call
from .devices import DEVICES, slow
from .said import said
from .test_norm import assert_equal, assert_near

WHOLE = [case for case in QKV_NORM_CASES if case.name in ("grouped", "gated-mrope", "flat-mqa")]
SOME = [case for case in QKV_NORM_CASES if case.name in ("grouped-sbhd", "flat", "gated")]


class Made:
    """The tensors of a case, and its two calls: the fused one, and a split by hand with `prepare_qkv`."""

    def __init__(self, case: NormCase, device: str = "cpu", v_norm: bool = False, leaves: bool = False) -> None:
        self.qkv, self.weights, words = qkv_norm_call(case, device)
        self.heads, self.order = words.pop("heads"), words.pop("order")
        self.words = said(**words)
        self.norm_words = {**case.norm._asdict(), "v_norm": v_norm}
        if leaves:
            self.qkv.requires_grad_()
            for x in self.weights.values():
                x.requires_grad_()

    @property
    def norm(self) -> Norm:
        return Norm(**self.weights, **self.norm_words)

    @property
    def leaves(self) -> list[Tensor]:
        return [self.qkv, *self.weights.values()]

    def fused(self, qkv: Tensor | None = None, **words: Any) -> Any:
        own = {"norm": self.norm, "heads": self.heads, "order": self.order, **self.words, **words}
        return jitrope.prepare_fused_qkv(self.qkv if qkv is None else qkv, **own)

    def apart(self, **words: Any) -> list[Tensor]:
        q, k, v, *gate = oracle.split(self.qkv, self.heads, self.order)
        return [*jitrope.prepare_qkv(q, k, v, **{"norm": self.norm, **self.words, **words}), *gate]


def dout(x: Tensor) -> Tensor:
    return torch.sin(torch.arange(x.numel(), device=x.device).float() * 3).view(x.shape).to(x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("case", "v_norm"), [*[(case, False) for case in QKV_NORM_CASES], *[(case, True) for case in WHOLE]], ids=str
)
def test_the_bits_of_a_split_and_prepare_qkv(case: NormCase, v_norm: bool, device: str) -> None:
    """Also in a second call; and the gradients of qkv, the weights and the biases, all or of some results."""
    for _ in range(2):
        ours, theirs = (Made(case, device, v_norm, leaves=True) for _ in range(2))
        got, want = ours.fused(), theirs.apart()
        assert len(got) == len(want) == (4 if ours.order == "qkv_gated" else 3)
        assert_equal(got, want)
        assert all(x.is_contiguous() for x in got[:3])
        assert got[2].untyped_storage().data_ptr() != ours.qkv.untyped_storage().data_ptr()
        everything = range(len(got))
        for picked in (everything, (0,), (1,), (2,), everything[-1:]):
            pairs = [([x[n] for n in picked], made) for x, made in ((got, ours), (want, theirs))]
            grads = []
            for ys, made in pairs:
                found = torch.autograd.grad(
                    ys, made.leaves, [dout(y.detach()) for y in ys], retain_graph=True, allow_unused=True
                )
                grads.append([torch.zeros_like(x) if y is None else y for x, y in zip(made.leaves, found)])
            assert_near(*grads)
            assert grads[0][0].shape == ours.qkv.shape


@pytest.mark.parametrize("device", DEVICES)
def test_a_v_without_a_gradient_may_be_anything(device: str) -> None:
    """Also one that is normalised."""
    made = Made(SOME[0], device, True, leaves=True)
    with torch.no_grad():
        oracle.split(made.qkv, made.heads, made.order)[2].fill_(torch.nan)
    q, k, *_ = made.fused()
    for grad in torch.autograd.grad((q, k), made.leaves, (dout(q.detach()), dout(k.detach()))):
        assert not grad.isnan().any()


@pytest.mark.parametrize("device", DEVICES)
def test_a_gradient_with_strides_of_zero(device: str) -> None:
    ours, theirs = (Made(SOME[2], device, leaves=True) for _ in range(2))
    grads = [
        torch.autograd.grad(sum(y.sum() for y in ys), made.leaves)
        for ys, made in ((ours.fused(), ours), (theirs.apart(), theirs))
    ]
    assert_near(*grads)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", SOME, ids=str)
def test_a_view_of_v_and_in_place(case: NormCase, device: str) -> None:
    made = Made(case, device)
    want = made.apart()
    got = made.fused(copy_v=False)
    assert_equal(got, want)
    assert got[2].untyped_storage().data_ptr() == made.qkv.untyped_storage().data_ptr()
    for _ in range(2):
        qkv = made.qkv.clone()
        assert made.fused(qkv, inplace=True) is qkv
        assert_equal(oracle.split(qkv, made.heads, made.order), want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_v_is_normalised_in_place_too(case: NormCase, device: str) -> None:
    made = Made(case, device, v_norm=True)
    want, qkv = made.apart(), made.qkv.clone()
    made.fused(qkv, inplace=True)
    assert_equal(oracle.split(qkv, made.heads, made.order), want)


@pytest.mark.parametrize("device", DEVICES)
def test_v_norm_beside_a_partial_rotation(device: str) -> None:
    """One launch here, but two of `prepare_qkv`, whose sum for v has another order."""
    made = Made(SOME[2], device, v_norm=True)
    assert_near(made.fused(), made.apart())


@pytest.mark.parametrize("device", DEVICES)
def test_without_a_table_heads_are_only_normalised(device: str) -> None:
    """Positions have no effect then."""
    made = Made(next(case for case in QKV_NORM_CASES if case.name == "gated-mrope"), device)
    assert_equal(made.fused(cos=None, sin=None), made.apart(cos=None, sin=None))


@pytest.mark.parametrize("device", DEVICES)
def test_the_gradient_of_a_learned_table(device: str) -> None:
    grads = []
    for fused in (True, False):
        made = Made(QKV_NORM_CASES[0], device, leaves=True)
        table = [made.words[name].requires_grad_() for name in ("cos", "sin")]
        out = made.fused() if fused else made.apart()
        grads.append(torch.autograd.grad(out, [*made.leaves, *table], [dout(x.detach()) for x in out]))
    assert_near(*grads)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [*SOME, *WHOLE], ids=str)
@pytest.mark.parametrize("how", ["norm", "v_norm", "no norm", "no table", "bias"])
def test_a_transform_with_its_gradient(how: str, case: NormCase, device: str) -> None:
    """Of some results too; and in place, and with v as a view."""
    found = []
    words: dict[str, Any] = {"hadamard": True, **({"norm": None} if how.startswith("no ") else {})}
    words.update({"cos": None, "sin": None, "cos_sin_cache": None} if how == "no table" else {})
    for fused in (True, False):
        made = Made(case, device, how == "v_norm", leaves=True)
        leaves, own = made.leaves[: None if words.get("norm", 1) else 1], dict(words)
        if how == "bias":
            leaves.append(dout(made.qkv.flatten(0, -3)[0]).requires_grad_())
            if fused:
                own["bias"] = leaves[-1]
            else:
                made.qkv = made.qkv + leaves[-1]
        out = made.fused(**own) if fused else made.apart(**own)
        grads = [dout(x.detach()) for x in out]
        for picked in (range(len(out)), (0,), (1,), (2,)):
            given = [out[n] for n in picked], leaves, [grads[n] for n in picked]
            some = torch.autograd.grad(*given, retain_graph=True, allow_unused=True)
            found.append([x if x is not None else torch.zeros_like(y) for x, y in zip(some, leaves)])
        found.append([*out])
    for got, want in zip(found[: len(found) // 2], found[len(found) // 2 :]):
        assert_near(got, want)
    assert_equal(found[len(found) // 2 - 1], found[-1])
    if how in ("norm", "no norm"):
        made = Made(case, device)
        assert_equal(made.fused(**words, copy_v=False), found[-1])
        qkv = made.qkv.clone()
        assert made.fused(qkv, **words, inplace=True) is qkv
        assert_equal(oracle.split(qkv, made.heads, made.order), found[-1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["flat-across", "gated-across"])
@pytest.mark.parametrize("how", ["plain", "transformed", "biased"])
def test_given_means_of_rows_and_their_gradients(how: str, name: str, device: str) -> None:
    found = []
    for fused in (True, False):
        made = Made(next(case for case in QKV_NORM_CASES if case.name == name), device, leaves=True)
        words: dict[str, Any] = {"hadamard": how == "transformed"}
        bias = dout(made.qkv.flatten(0, -3)[0]) * (how == "biased")
        if how == "biased" and fused:
            words["bias"] = bias
        q, k, *_ = oracle.split(made.qkv.detach() + bias, made.heads, made.order)
        means = [x.float().square().mean((-2, -1)).requires_grad_() for x in (q, k)]
        norm = Norm(**made.weights, **made.norm_words, mean_squares=means)
        leaves = made.leaves
        made.qkv = made.qkv if fused else made.qkv + bias
        out = [*(made.fused if fused else made.apart)(norm=norm, **words)]
        grads = torch.autograd.grad(out, [*leaves, *means], [dout(x.detach()) for x in out])
        found.append((out, grads))
    assert_equal(found[0][0], found[1][0])
    assert_near(found[0][1], found[1][1])


def kernels(case: NormCase, v_norm: bool = False) -> list[Any]:
    made = Made(case, "meta", v_norm, leaves=True)
    with jitrope.planning(["auto"]) as specs:
        out = made.fused()
        torch.autograd.grad(out, made.leaves, [torch.empty_like(x) for x in out])
    return specs


@pytest.mark.parametrize("case", QKV_NORM_CASES, ids=str)
def test_the_forward_and_the_gradient_are_one_launch_each(case: NormCase) -> None:
    """v and its gradient are copied in it, except across heads; with v_norm v is normalised there."""
    copies = not case.across_heads
    assert [(spec.gradient, spec.copy_v) for spec in kernels(case)] == [(False, copies), (True, copies)]
    if copies:
        assert [(spec.gradient, spec.v_norm) for spec in kernels(case, v_norm=True)] == [(False, True), (True, True)]


def op_call(case: NormCase, op: Any, device: str = "cpu", **changes: Any) -> tuple[Any, ...]:
    """The arguments of torch's op of a case."""
    made = Made(case, device)
    norm = NormOptions(*case.norm)
    (qkv, _, *tables), options = lower(make(as_fused(case.rope), device), q_per_group=case.rope.shape[3], norm=norm)
    tensors = {"qkv": qkv, **made.weights}
    if op is QKV_NORM_BACKWARD:
        tensors = {**{"d" + name: dout(x) for name, x in zip(("q", "k", "v", "gate"), made.apart())}, **tensors}
    own = [tensors.get(name) for name in op.names]
    return library.arguments(op, named(op, own, tables), options._replace(**changes))


@pytest.mark.parametrize("case", SOME, ids=str)
@pytest.mark.parametrize("form", ["", *(slow(form) for form in ("_", "_backward"))])
def test_opcheck(form: str, case: NormCase) -> None:
    op = QKV_NORM_BACKWARD if form == "_backward" else QKV_NORM
    arguments = op_call(case, op, inplace=form == "_")
    if not form:
        arguments[0].requires_grad_()
    torch.library.opcheck(getattr(torch.ops.jitrope, QKV_NORM.name + form).default, arguments)


@pytest.mark.parametrize("how", ["copied", "view", "transformed", "in place"])
@pytest.mark.parametrize("case", [SOME[0], slow(SOME[2])], ids=str)
def test_compile_fullgraph(case: NormCase, how: str) -> None:
    """The eager results and gradients."""
    made = Made(case)

    def model(x: Tensor, norm: Norm) -> Any:
        if how == "in place":
            return (made.fused(x * 2, norm=norm, inplace=True).float() * 3,)
        q, k, v, *gate = made.fused(x * 2, norm=norm, copy_v=how != "view", hadamard=how == "transformed")
        return q.float().sum(-1), k * 2, v + 1, *[x.sigmoid() for x in gate]

    results = []
    torch._dynamo.reset()
    for function in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        leaves = [x.clone().requires_grad_(how != "in place") for x in made.leaves]
        norm = Norm(**dict(zip(made.weights, leaves[1:])), **made.norm_words)
        outputs = function(leaves[0], norm)
        results.append([*outputs])
        if how != "in place":
            results[-1] += torch.autograd.grad(sum(y.float().sin().sum() for y in outputs), leaves)
    for got, want in zip(*results):
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)


def test_there_is_no_second_derivative() -> None:
    made = Made(QKV_NORM_CASES[-2], leaves=True)
    out = sum(x.square().sum() for x in made.fused())
    (first,) = torch.autograd.grad(out, made.qkv, create_graph=True)
    with pytest.raises(jitrope.JitropeError, match="no second derivative"):
        first.sum().backward()


W = torch.ones(8)
REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "across heads": ({"norm": Norm(across_heads=True, v_norm=True)}, "across_heads does not go with v_norm in fused"),
    "a transform": ({"norm": Norm(across_heads=True), "hadamard": True}, "across_heads does not go with hadamard"),
    "a view of v": ({"norm": Norm(v_norm=True), "copy_v": False}, "copy_v=False does not go with v_norm"),
    "a weight": ({"norm": Norm(torch.ones(4))}, r"H=4, D=8\) but q_weight .* it must be \(D\), 8 numbers, or H D with"),
    "k's weight": ({"norm": Norm(W, torch.ones(4))}, r"k is \(B=2, S=6, H=2, D=8\) but k_weight has shape \(4,\)"),
    "a bias": ({"norm": Norm(W, q_bias=W)}, "q_bias goes with kind='layer_norm'"),
    "dtypes": ({"norm": Norm(W, W.half())}, "they must match"),
    "another value": ({"norm": W}, "norm is .*; it must be a jitrope.Norm"),
    "inverse": ({"inverse": True}, "inverse does not go with fused QKV with a norm"),
    "shifts": ({"positions": jitrope.Shifts(torch.zeros(6, dtype=torch.int64))}, "shifts does not go with"),
    "tables for each head": ({"cos": torch.zeros(1, 6, 2, 4), "sin": torch.zeros(1, 6, 2, 4)}, "must share it"),
    "layout": ({"layout": "bhsd"}, "layout is 'bhsd'"),
    "width": ({"heads": (6, 2)}, "qkv has shape .*, but heads=.6, 2. with order='grouped' are 10 heads"),
    "heads": ({"heads": (0, 2)}, r"heads\[0\] is 0"),
    "a gradient in place": ({"inplace": True, "norm": Norm(W.clone().requires_grad_())}, "has no gradient in place"),
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
