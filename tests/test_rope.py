"""The user's functions on the CPU: values, gradients, torch's machinery, refusals."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import jitrope
from jitrope import reference

from .cases import CASES, Case, make


def by_name(*names: str) -> list[Case]:
    found = [case for case in CASES if case.name in names]
    assert len(found) == len(names)
    return found


def options_of(case: Case, q, keywords) -> tuple:
    """What follows the tensors in a call of the op."""
    return (case.layout, case.interleaved, case.rotary_dim or q.shape[-1], 0, case.rounding, "auto", False)


# ---- values ------------------------------------------------------------------------------------


def test_a_pair_is_turned_by_hand() -> None:
    """(3, 4) turned by 90 degrees is (-4, 3), in both pairings; the rest of the head stays."""
    q = torch.tensor([3.0, 4.0, 7.0, 8.0]).view(1, 1, 1, 4)
    cos, sin = torch.zeros(1, 1), torch.ones(1, 1)
    out, none = jitrope.apply_rope(q, None, cos, sin, rotary_dim=2, interleaved=True)
    assert out.flatten().tolist() == [-4, 3, 7, 8]
    assert none is None
    q = torch.tensor([3.0, 5.0, 4.0, 6.0]).view(1, 1, 1, 4)
    out, _ = jitrope.apply_rope(q, None, torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]]))
    assert out.flatten().tolist() == [-4, 5, 3, 6]


def test_positions_are_relative() -> None:
    """q at position m and k at n: the product depends on m - n only, which is what rope is for."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 64).expand(2, 12, 1, 64)
    angles = torch.outer(torch.arange(12.0), 10000 ** (-torch.arange(32) / 32))
    q, k = (x.unsqueeze(0) for x in (q, k))
    q, k = jitrope.apply_rope(q, k, angles.cos(), angles.sin())
    scores = (q[0, :, 0] @ k[0, :, 0].T).double()
    for offset in range(-11, 12):
        diagonal = scores.diagonal(offset)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_in_place_gives_the_same_bits(case: Case) -> None:
    q, k, cos, sin, keywords = make(case)
    expected = jitrope.apply_rope(q, k, cos, sin, **keywords)
    before = [None if x is None else x.clone() for x in (q, k)]
    outputs = jitrope.apply_rope_(q, k, cos, sin, **keywords)
    assert outputs[0] is q
    assert outputs[1] is k
    end = int(keywords["cu_seqlens"][-1]) if "cu_seqlens" in keywords else None
    for out, want, old in zip(outputs, expected, before):
        if want is not None:
            assert torch.equal(out[:end].nan_to_num(9), want[:end].nan_to_num(9))
            if end is not None:  # spare rows: zero in a fresh output, untouched in place
                assert torch.equal(out[end:], old[end:])
                assert not want[end:].any()


def test_outputs_keep_dense_strides() -> None:
    q, k, cos, sin, keywords = make(*by_name("bhsd"))
    for x, out in zip((q, k), jitrope.apply_rope(q, k, cos, sin, **keywords)):
        assert out.stride() == x.stride()


@pytest.mark.parametrize("shape", [(0, 4, 2, 8), (2, 0, 2, 8), (2, 4, 0, 8)])
def test_nothing_to_rotate(shape: tuple[int, ...]) -> None:
    q = torch.empty(shape)
    cos = torch.zeros(4, 4)
    out, k = jitrope.apply_rope(q, q.clone(), cos, cos)
    assert out.shape == k.shape == shape


def test_module_names() -> None:
    assert set(jitrope.__all__) <= set(dir(jitrope))


# ---- gradients ---------------------------------------------------------------------------------


def autograd_reference(case: Case, q, k, cos, sin, keywords):
    """The rotation in differentiable torch, fp32."""
    order = {"bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3)}
    rotary = case.rotary_dim or q.shape[-1]
    outputs = []
    for x in (q, k):
        view = x.unsqueeze(0) if case.layout == "thd" else x.permute(order[case.layout])
        c, s = (reference.table_view(t).float() for t in (cos, sin))
        spare = torch.zeros(view.shape[1], dtype=torch.bool)
        if "cu_seqlens" in keywords:
            position, spare = reference.positions(view.shape[1], keywords["cu_seqlens"])
            c, s = c[:, position], s[:, position]
        else:
            c, s = c[:, : view.shape[1]], s[:, : view.shape[1]]
        y = reference._rotate(view.float(), c, s, case.interleaved, rotary, False)
        y = torch.where(spare[None, :, None, None], torch.zeros(()), y)
        y = y.squeeze(0) if case.layout == "thd" else y.permute(order[case.layout])
        outputs.append(y.to(x.dtype))
    return outputs


GRADIENT_CASES = by_name(
    "halves", "interleaved", "partial", "full", "full-interleaved", "full-partial", "sbhd", "bhsd", "packed",
    "per-head", "packed-qkv", "fp32", "batched-table",
)  # fmt: skip


@pytest.mark.parametrize("case", GRADIENT_CASES, ids=str)
@pytest.mark.parametrize("in_place", [False, True])
def test_gradient_is_autograds(case: Case, in_place: bool) -> None:
    q, k, cos, sin, keywords = make(case)
    grads = []
    for rotate in (autograd_reference, None):
        leaves = [x.detach().clone().requires_grad_() for x in (q, k)]
        if rotate:
            outputs = rotate(case, *leaves, cos, sin, keywords)
        elif in_place:
            outputs = jitrope.apply_rope_(*(x * 1 for x in leaves), cos, sin, **keywords)
        else:
            outputs = jitrope.apply_rope(*leaves, cos, sin, **keywords)
        torch.manual_seed(1)
        weights = [torch.randn(y.shape).to(y.dtype) for y in outputs]
        grads.append(torch.autograd.grad(outputs, leaves, weights))
    for got, want in zip(grads[1], grads[0]):
        if in_place and case.lengths:  # spare tokens stay, so their gradient passes as it is
            end = sum(case.lengths)
            weight = weights[0] if got is grads[1][0] else weights[1]
            assert torch.equal(got[end:], weight[end:])
            got, want = got[:end], want[:end]
        torch.testing.assert_close(got, want, rtol=2**-8, atol=1e-6)


def test_gradient_is_not_the_forward_rotation() -> None:
    """torchembed 0.3.0 reused the forward's sign; rotating the gradient of q . q0 back must give q0."""
    q, _, cos, sin, _ = make(*by_name("fp32"))
    q.requires_grad_()
    out, _ = jitrope.apply_rope(q, None, cos, sin)
    out.backward(out.detach())
    torch.testing.assert_close(q.grad, q.detach(), rtol=1e-5, atol=1e-5)


def test_expanded_gradient() -> None:
    q, k, cos, sin, _ = make(*by_name("fp32"))
    leaves = [x.requires_grad_() for x in (q, k)]
    outputs = jitrope.apply_rope(*leaves, cos, sin)
    (outputs[0].sum() + outputs[1].sum()).backward()  # stride-0 gradients
    expanded = [x.grad.clone() for x in leaves]
    for x in leaves:
        x.grad = None
    outputs = jitrope.apply_rope(*leaves, cos, sin)
    torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
    for x, want in zip(leaves, expanded):
        torch.testing.assert_close(x.grad, want)


@pytest.mark.parametrize("which", [0, 1])
def test_gradient_through_one_of_two(which: int) -> None:
    q, k, cos, sin, _ = make(*by_name("fp32"))
    leaves = [x.requires_grad_() for x in (q, k)]
    jitrope.apply_rope(*leaves, cos, sin)[which].square().sum().backward()
    assert leaves[1 - which].grad is None or not leaves[1 - which].grad.any()
    torch.testing.assert_close(leaves[which].grad, 2 * leaves[which].detach(), rtol=1e-4, atol=1e-4)


def test_only_tables_and_lengths_are_saved() -> None:
    q, k, cos, sin, keywords = make(*by_name("packed"))
    saved = []

    def pack(x):
        saved.append(x.data_ptr())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        jitrope.apply_rope(q.requires_grad_(), k.requires_grad_(), cos, sin, **keywords)
    assert set(saved) == {x.data_ptr() for x in (cos, sin, keywords["cu_seqlens"])}


def test_in_place_on_a_leaf_is_refused_by_torch() -> None:
    q, k, cos, sin, _ = make(*by_name("fp32"))
    with pytest.raises(RuntimeError, match="leaf"):
        jitrope.apply_rope_(q.requires_grad_(), k, cos, sin)


def test_in_place_bumps_the_version() -> None:
    """A tensor that backward still needs and that was rotated in place is noticed by autograd."""
    q, k, cos, sin, _ = make(*by_name("fp32"))
    version = q._version
    jitrope.apply_rope_(q, k, cos, sin)
    assert q._version > version


# ---- torch's machinery -------------------------------------------------------------------------


@pytest.mark.parametrize("case", by_name("halves", "q-alone", "packed", "full-partial"), ids=str)
@pytest.mark.parametrize("op", ["rope", "rope_"])
def test_opcheck(case: Case, op: str) -> None:
    q, k, cos, sin, keywords = make(case)
    if op == "rope":
        q.requires_grad_()
    arguments = (q, k, cos, sin, keywords.get("cu_seqlens"), *options_of(case, q, keywords))
    torch.library.opcheck(getattr(torch.ops.jitrope, op).default, arguments)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_compile_fullgraph(in_place: bool, grad: bool) -> None:
    q, k, cos, sin, _ = make(*by_name("fp32"))
    rotate = jitrope.apply_rope_ if in_place else jitrope.apply_rope

    def model(q, k):
        q, k = rotate(q * 2, k * 2, cos, sin)
        return q.sum(-1), k * q.mean()

    results = []
    for function in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        leaves = [x.clone().requires_grad_(grad) for x in (q, k)]
        outputs = function(*leaves)
        if grad:
            (outputs[0].sum() + outputs[1].square().sum()).backward()
            outputs = (*outputs, *(x.grad for x in leaves))
        results.append(outputs)
    for got, want in zip(results[1], results[0]):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("grad", [False, True])
def test_compiled_in_place_leaves_spare_tokens(grad: bool) -> None:
    q, k, cos, sin, keywords = make(*by_name("packed"))

    def model(q, k):
        return jitrope.apply_rope_(q * 1, k * 1, cos, sin, **keywords)

    results = []
    for function in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        leaves = [x.clone().requires_grad_(grad) for x in (q, k)]
        outputs = function(*leaves)
        assert torch.equal(outputs[0][18:], q[18:])
        if grad:
            torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
            outputs = (*outputs, *(x.grad for x in leaves))
            assert torch.equal(outputs[2][18:], torch.ones_like(q[18:]))
        results.append(outputs)
    for got, want in zip(*results):
        assert torch.equal(got, want)


def test_compile_with_inductor() -> None:
    q, k, cos, sin, _ = make(*by_name("fp32"))

    def model(q, k):
        q, k = jitrope.apply_rope(q + 1, k, cos, sin)
        return q * k[:, :, :1]

    torch.testing.assert_close(torch.compile(model, fullgraph=True)(q, k), model(q, k))


def test_vmap() -> None:
    q, _, cos, sin, _ = make(*by_name("fp32"))
    stacked = torch.stack([q, q.flip(1), q * 2])
    out = torch.func.vmap(lambda x: jitrope.apply_rope(x, None, cos, sin)[0])(stacked)
    want = torch.stack([jitrope.apply_rope(x, None, cos, sin)[0] for x in stacked])
    torch.testing.assert_close(out, want)


@pytest.mark.parametrize("function", [jitrope.apply_rope, jitrope.apply_rope_])
def test_forward_mode_is_refused(function) -> None:
    """torch would drop the tangent of an op without a rule, in silence."""
    q, _, cos, sin, _ = make(*by_name("fp32"))
    with pytest.raises(jitrope.InvalidInput, match="forward-mode"):
        torch.func.jvp(lambda x: function(x * 1, None, cos, sin)[0], (q,), (q,))


def test_functional_gradient_is_refused_by_torch() -> None:
    q, _, cos, sin, _ = make(*by_name("fp32"))
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda x: jitrope.apply_rope(x, None, cos, sin)[0].sum())(q)


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE])
def test_selective_checkpointing(policy: CheckpointPolicy) -> None:
    q, k, cos, sin, _ = make(*by_name("fp32"))
    seen = []

    def choose(context, op, *arguments, **keywords):
        if op is torch.ops.jitrope.rope.default:
            seen.append(context.is_recompute)
            return policy
        return CheckpointPolicy.PREFER_RECOMPUTE

    def block(q, k):
        q, k = jitrope.apply_rope(q * 2, k * 2, cos, sin)
        return (q.sin().sum() + k.cos().sum()).square()

    grads = []
    for run in (
        block,
        lambda q, k: checkpoint(
            block, q, k, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(choose)
        ),
    ):
        leaves = [x.clone().requires_grad_() for x in (q, k)]
        run(*leaves).backward()
        grads.append([x.grad for x in leaves])
    assert seen
    for got, want in zip(grads[1], grads[0]):
        torch.testing.assert_close(got, want)


def test_fake_tensors_and_meta() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, k, cos, sin, keywords = make(*by_name("bhsd"))
        outputs = jitrope.apply_rope(q, k, cos, sin, **keywords)
        assert [y.stride() for y in outputs] == [q.stride(), k.stride()]
        with pytest.raises(jitrope.InvalidInput):
            jitrope.apply_rope(q, k, cos[:2], sin[:2], **keywords)


# ---- refusals ----------------------------------------------------------------------------------


def call(**changes):
    arguments = {
        "q": torch.ones(2, 6, 4, 8), "k": torch.ones(2, 6, 2, 8), "cos": torch.zeros(6, 4), "sin": torch.zeros(6, 4),
    }  # fmt: skip
    arguments.update(changes)
    return arguments


packed = {"q": torch.ones(6, 4, 8), "k": None, "layout": "thd"}
REFUSALS = {
    "rank": (call(q=torch.ones(6, 4, 8)), r"q has shape \(6, 4, 8\), layout 'bshd' needs 4 axes"),
    "k-rank": (call(k=torch.ones(6, 4, 8)), "k has shape"),
    "thd-rank": (call(layout="thd"), "needs 3 axes"),
    "dtype": (call(q=torch.ones(2, 6, 4, 8).double(), k=None), "q is torch.float64; allowed are fp32, fp16 and bf16"),
    "integers": (call(q=torch.ones(2, 6, 4, 8, dtype=torch.int32), k=None), "q is torch.int32"),
    "mixed-dtypes": (call(k=torch.ones(2, 6, 2, 8).half()), "k is torch.float16 on cpu but q is torch.float32"),
    "device-mix": (call(k=torch.ones(2, 6, 2, 8, device="meta")), "k is torch.float32 on meta but q"),
    "table-device": (call(cos=torch.zeros(6, 4, device="meta")), "cos is on meta but q is on cpu"),
    "device": (call(q=torch.ones(2, 6, 4, 8, device="meta"), k=None), "allowed are CUDA and CPU"),
    "batch": (call(k=torch.ones(1, 6, 2, 8)), r"q is \(B=2, S=6, H=4, D=8\) but k is \(B=1, S=6, H=2, D=8\)"),
    "odd-rotary": (call(rotary_dim=3), "rotary_dim is 3; it must be even"),
    "large-rotary": (call(rotary_dim=10), "rotary_dim is 10; it must be even and from 2 to D=8"),
    "large-head": (call(q=torch.ones(1, 1, 1, 514), k=None), "D=514, at most 512"),
    "short-table": (call(cos=torch.zeros(5, 4), sin=torch.zeros(5, 4)), r"\(B=2, S=6, H=4, D=8\) but cos has 5 rows"),
    "table-width": (call(cos=torch.zeros(6, 3), sin=torch.zeros(6, 3)), "3 wide; with rotary_dim 8"),
    "table-rank": (call(cos=torch.zeros(4), sin=torch.zeros(4)), r"cos has shape \(4,\)"),
    "table-dtype": (call(cos=torch.zeros(6, 4).double(), sin=torch.zeros(6, 4).double()), "cos is torch.float64"),
    "complex-table": (call(cos=torch.zeros(6, 4).cfloat(), sin=torch.zeros(6, 4).cfloat()), "cos is torch.complex64"),
    "tables-differ": (call(sin=torch.zeros(7, 4)), "they must match"),
    "table-batch": (call(cos=torch.zeros(3, 6, 4), sin=torch.zeros(3, 6, 4)), "3 batch rows; allowed are 1 and B=2"),
    "table-heads": (call(cos=torch.zeros(1, 6, 4, 4), sin=torch.zeros(1, 6, 4, 4)), "angles for 4 heads"),
    "table-grad": (call(cos=torch.zeros(6, 4, requires_grad=True)), "cos requires a gradient"),
    "layout": (call(layout="hsbd"), "layout is 'hsbd'; allowed are bshd, sbhd, bhsd, thd"),
    "launch": (call(launch="3d"), "launch is '3d'; allowed are auto, token_linear, grid_2d"),
    "rounding": (call(rounding="bf16"), "rounding is 'bf16'; allowed are fp32, complex64"),
    "lengths-layout": (call(cu_seqlens=torch.tensor([0, 6])), "cu_seqlens goes with layout 'thd', not 'bshd'"),
    "lengths-dtype": (call(**packed, cu_seqlens=torch.tensor([0.0, 6.0])), "cu_seqlens is torch.float32"),
    "lengths-device": (call(**packed, cu_seqlens=torch.zeros(2, dtype=torch.int32, device="meta")), "on meta but q"),
    "lengths-rank": (call(**packed, cu_seqlens=torch.zeros(2, 2, dtype=torch.int32)), "one axis of N \\+ 1 offsets"),
    "lengths-strided": (call(**packed, cu_seqlens=torch.zeros(4, dtype=torch.int32)[::2]), "must be contiguous"),
    "lengths-too-long": (call(**packed, cu_seqlens=torch.tensor([0, 6]), max_seqlen=7), "7 positions are used"),
    "max-alone": (call(**packed, max_seqlen=7), "max_seqlen goes with cu_seqlens"),
}


@pytest.mark.parametrize("name", REFUSALS)
@pytest.mark.parametrize("function", [jitrope.apply_rope, jitrope.apply_rope_])
def test_refusals_name_the_argument_and_write_nothing(name: str, function) -> None:
    arguments, message = REFUSALS[name]
    before = arguments["q"].clone()
    with pytest.raises(jitrope.InvalidInput, match=message) as error:
        function(**arguments)
    assert str(error.value).startswith(f"{function.__name__}: ")
    assert isinstance(error.value, ValueError)
    if not before.is_meta:
        assert torch.equal(arguments["q"], before)


def test_expanded_in_place_is_refused() -> None:
    q = torch.ones(1, 6, 4, 8).expand(2, 6, 4, 8)
    with pytest.raises(jitrope.InvalidInput, match="q is expanded"):
        jitrope.apply_rope_(q, None, torch.zeros(6, 4), torch.zeros(6, 4))
