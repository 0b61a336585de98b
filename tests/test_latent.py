"""`prepare_mla_qkv`: latent attention's q, k and v, and their gradients."""

from __future__ import annotations

import pytest
import torch

import jitrope
from jitrope.base.layouts import LAYOUT_AXES
from jitrope.plan.options import Options
from jitrope.run.dispatch import call
from jitrope.sources.latent import LATENT_BACKWARD
from tests.said import said

from . import oracle
from .cases import LATENT_CASES, LatentCase, latent_call, make_latent
from .devices import DEVICES


def plain(tensors, o: Options, words, rope=jitrope.apply_rope):
    """The same by slices, a concatenation and `apply_rope`."""
    q, kv, k_pe = tensors
    k = torch.cat((kv[..., : o.rotary_offset], k_pe.expand(*kv.shape[:-1], -1)), -1)
    return (*rope(q, k, **words), kv[..., o.rotary_offset :])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", LATENT_CASES, ids=str)
def test_values_and_gradients_are_those_of_the_plain_chain(case: LatentCase, device: str) -> None:
    tensors, words, whole = latent_call(case, device)
    o = make_latent(case)[1]
    results = []
    for function in (lambda xs: jitrope.prepare_mla_qkv(*xs, **said(**words)), lambda xs: plain(xs, o, said(**whole))):
        leaves = [x.detach().clone().requires_grad_() for x in tensors]
        out = function(leaves)
        generator = torch.Generator().manual_seed(2)
        weights = [torch.randn(y.shape, generator=generator).to(y) for y in out]
        results.append((out, torch.autograd.grad(out, leaves, weights)))
    assert all(x.is_contiguous() for x in results[0][0][1:])
    for got, want in zip((*results[0][0], *results[0][1][:2]), (*results[1][0], *results[1][1][:2])):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    unit = torch.finfo(tensors[0].dtype).eps  # the plain chain rounds each head before the sum
    heads = tensors[1].shape[LAYOUT_AXES[o.layout][2]]
    torch.testing.assert_close(results[0][1][2], results[1][1][2], rtol=4 * unit, atol=4 * unit * heads)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", LATENT_CASES, ids=str)
def test_the_sum_over_heads_is_in_fp32(case: LatentCase, device: str) -> None:
    """The gradient of k_pe is the fp64 one, rounded once; with rounding "dtype" its products are rounded too."""
    tensors, words, _ = latent_call(case, device)
    o = make_latent(case)[1]
    leaf = tensors[2].clone().requires_grad_()
    _, k, _ = jitrope.prepare_mla_qkv(tensors[0], tensors[1], leaf, **said(**words))
    weight = torch.randn(k.shape, generator=torch.Generator().manual_seed(3)).to(k)
    first, second = (torch.autograd.grad(k, leaf, weight, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    back = {**words, "interleaved": o.interleaved_out, "interleaved_out": o.interleaved, "inverse": True}
    part = weight[..., o.rotary_offset :].double().cpu().sum(LAYOUT_AXES[o.layout][2], keepdim=True)
    back = {name: x.cpu() if hasattr(x, "cpu") else x for name, x in back.items()}
    (want, _), _ = oracle.rope(part, None, back.pop("cos", None), back.pop("sin", None), **back)
    unit = torch.finfo(first.dtype).eps
    atol = 4 * unit if o.rounding == "dtype" else 4e-6
    torch.testing.assert_close(first.double().cpu(), want, rtol=unit, atol=atol)


@pytest.mark.parametrize("device", DEVICES)
def test_the_sum_over_no_heads_is_zero(device: str) -> None:
    cos, sin = torch.rand(2, 6, 8, device=device)
    options = Options(rotary_dim=16, rotary_offset=32, v_dim=24, inverse=True)
    for heads in (3, 0):  # the second finds what the first has left
        dq, dk, dv = (torch.randn(1, 6, n, d, device=device) for n, d in ((200, 48), (heads, 48), (heads, 24)))
        found = call(LATENT_BACKWARD, {"dq": dq, "dk": dk, "dv": dv, "cos": cos, "sin": sin}, options)
    assert not found["k_pe"].any()


@pytest.mark.parametrize("device", DEVICES)
def test_q_without_heads_and_strided_inputs(device: str) -> None:
    """kv alone, as `fused_apply_mla_rope_for_kv`; k_pe and kv as slices of one projection, in any strides."""
    down = torch.randn(2, 6, 3 * (32 + 24) + 16, device=device)
    kv, k_pe = down[..., :-16].unflatten(-1, (3, -1)), down[..., None, -16:]
    cos, sin = torch.rand(2, 6, 8, device=device)
    q = torch.randn(2, 6, 3, 48, device=device)
    want = jitrope.prepare_mla_qkv(q, kv.contiguous(), k_pe.contiguous(), cos, sin)
    none, k, v = jitrope.prepare_mla_qkv(q[:, :, :0], kv, k_pe, cos, sin)
    assert none.shape == (2, 6, 0, 48)
    assert torch.equal(k, want[1])
    assert torch.equal(v, want[2])
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    strided, *_ = jitrope.prepare_mla_qkv(turned, kv, k_pe, cos, sin)
    assert torch.equal(strided, want[0])
    assert strided.stride() == turned.stride()


def test_one_launch_each_way() -> None:
    """DeepSeek-V3: one kernel forward and one backward, with 16-byte accesses."""
    q, kv, k_pe = (
        torch.empty(1, 4096, *s, dtype=torch.bfloat16, device="meta").requires_grad_()
        for s in ((128, 192), (128, 256), (1, 64))
    )
    freqs = torch.empty(4096, 32, device="meta")
    with jitrope.planning(["auto"]) as specs:
        out = jitrope.prepare_mla_qkv(q, kv, k_pe, freqs=freqs, interleaved=True, interleaved_out=False)
        grads = torch.autograd.grad(out, (q, kv, k_pe), [torch.empty_like(x) for x in out])
    assert [x.shape for x in out] == [q.shape, (1, 4096, 128, 192), (1, 4096, 128, 128)]
    assert [x.shape for x in grads] == [q.shape, kv.shape, k_pe.shape]
    assert [(spec.v_dim, spec.vec, spec.inverse) for spec in specs] == [(128, 8, False), (128, 8, True)]


Q, KV, K_PE, TABLE = (torch.ones(2, 6, *s) for s in ((4, 48), (3, 56), (1, 16), (8,)))
REFUSALS = {
    "kv is narrow": ({"kv": KV[..., :32]}, r"q is \(B=2, S=6, H=4, D=48\), k_pe .* and kv .*D=32\); kv must be wider"),
    "heads of k_pe": (
        {"k_pe": K_PE.expand(2, 6, 3, 16)},
        r"k_pe is .*; it must be \(2, 6, 1, 16\), float32, .* like q \(B=2, S=6, H=4, D=48\)",
    ),
    "odd k_pe": ({"k_pe": K_PE[..., :15]}, "rotary_dim is 15; it must be even"),
    "wide k_pe": ({"k_pe": torch.ones(2, 6, 1, 50)}, r"k_pe is .*; it must be \(2, 6, 1, 48\), float32, .*D=48"),
    "tokens of kv": (
        {"kv": KV[:, :5]},
        r"kv is .*; it must be \(2, 6, H, D\), float32, .* like q \(B=2, S=6, H=4, D=48\)",
    ),
    "tokens of k_pe": (
        {"k_pe": K_PE[:, :5]},
        r"k_pe is .*; it must be \(2, 6, 1, 16\), float32, .* like q \(B=2, S=6, H=4, D=48\)",
    ),
    "axes of kv": (
        {"kv": KV.flatten(2)},
        r"kv is .*; it must be \(2, 6, H, D\), float32, .* like q \(B=2, S=6, H=4, D=48\)",
    ),
    "axes of k_pe": (
        {"k_pe": K_PE[:, :, 0]},
        r"k_pe is .*; it must be \(2, 6, 1, 16\), float32, .* like q \(B=2, S=6, H=4, D=48\)",
    ),
    "a number": (
        {"kv": torch.ones(())},
        r"kv is .*; it must be \(2, 6, H, D\), float32, .* like q \(B=2, S=6, H=4, D=48\)",
    ),
    "dtype": ({"kv": KV.half()}, r"kv is float16; it must be \(2, 6, H, D\), float32"),
    "not a tensor": ({"k_pe": None}, "k_pe is None; it must be a tensor"),
    "nested": (
        {"q": torch.nested.nested_tensor([Q[0], Q[1, :5]])},
        "q is a nested tensor; it must be a strided tensor",
    ),
    "table": (
        {"cos": TABLE[0, :, :4], "sin": TABLE[0, :, :4]},
        r"cos is .*\(6, 4\).* it must be \(P, 8\|16\) or .*; k_pe has rotary_dim elements",
    ),
    "rows": ({"cos": TABLE[0, :5], "sin": TABLE[0, :5]}, "cos has 5 rows; it needs 6"),
    "tables for each head": (
        {"cos": TABLE[:, :, None].expand(2, 6, 4, 8), "sin": TABLE[:, :, None].expand(2, 6, 4, 8)},
        "the heads must share it",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_name_the_argument(name: str) -> None:
    changes, message = REFUSALS[name]
    arguments = {"q": Q, "kv": KV, "k_pe": K_PE, "cos": TABLE[0], "sin": TABLE[0]}
    with pytest.raises(jitrope.InvalidInput, match=message) as error:
        jitrope.prepare_mla_qkv(**{**arguments, **changes})
    assert str(error.value).startswith("prepare_mla_qkv: ")


@pytest.mark.parametrize("word", ["inverse", "inplace", "rotary_dim", "rotary_offset", "norm", "cu_seqlens"])
def test_other_words_are_refused(word: str) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{word}'"):
        jitrope.prepare_mla_qkv(Q, KV, K_PE, TABLE[0], TABLE[0], **{word: True})


def test_there_is_no_second_derivative() -> None:
    leaf = KV.clone().requires_grad_()
    _, k, _ = jitrope.prepare_mla_qkv(Q, leaf, K_PE, TABLE[0], TABLE[0])
    (first,) = torch.autograd.grad(k.square().sum(), leaf, create_graph=True)
    with pytest.raises(jitrope.JitropeError, match="no gradient"):
        torch.autograd.grad(first.sum(), leaf)


def test_inputs_of_unused_results_have_no_gradient() -> None:
    leaves = [x.clone().requires_grad_() for x in (Q, KV, K_PE)]
    q, k, v = jitrope.prepare_mla_qkv(*leaves, TABLE[0], TABLE[0])
    found = [torch.autograd.grad(x.sum(), leaves, retain_graph=True, allow_unused=True) for x in (q, k, v)]
    assert [[x is not None for x in grads] for grads in found] == [[True, False, False]] + 2 * [[False, True, True]]


def test_refusals_of_fp8() -> None:
    one, five = jitrope.Quantize(1.0), torch.ones(5)
    for quantize, match in (
        (1, "quantize is 1; it must be a jitrope.Quantize"),
        (jitrope.DynamicQuantize(), r"quantize is DynamicQuantize\(.*; it must be a jitrope.Quantize"),
        (one, "k_scale is missing"),
        (jitrope.Quantize(1.0, 1.0, five), r"v_scale is .*; it must be \(\) or \(3,\) or \(2, 3\), float32"),
        (jitrope.Quantize(1.0, 1.0, hadamard=True), "hadamard does not go with latent attention; leave it out"),
    ):
        with pytest.raises(jitrope.InvalidInput, match=f"prepare_mla_qkv: {match}"):
            jitrope.prepare_mla_qkv(Q, KV, K_PE, TABLE[0], TABLE[0], quantize=quantize)
    narrow = KV[..., : Q.shape[-1] - K_PE.shape[-1]]
    for words in ({"quantize": jitrope.Quantize(1.0, 1.0)}, {"out": (None,) * 3}):  # there is no v
        with pytest.raises(jitrope.InvalidInput, match="kv must be wider than q less k_pe"):
            jitrope.prepare_mla_qkv(Q, narrow, K_PE, TABLE[0], TABLE[0], **words)
    leaf, both = KV.clone().requires_grad_(), jitrope.Quantize(1.0, 1.0)
    with pytest.raises(
        jitrope.InvalidInput, match=r"kv requires a gradient, .*; use a call without cache, quantize and out"
    ):
        jitrope.prepare_mla_qkv(Q, leaf, K_PE, TABLE[0], TABLE[0], quantize=both)


def test_refusals_of_given_tensors() -> None:
    tensors, words, _ = latent_call(LATENT_CASES[0], "cpu")
    q, k, v = jitrope.prepare_mla_qkv(*tensors, **said(**words))
    for out, match in (
        ((q, k), "out is .*; it must be a tuple of 3 tensors"),
        ((q, k, v[..., 1:]), "out's v is .*; it must be"),
        ((q.double(), k, v), r"out's q is float64; it must be \(2, 3, 4, 48\), bfloat16"),
        ((q, k[:1].expand_as(k), v), "out's k is|out's k has strides"),
        ((q, k, 1), "v_out|out's v is 1"),
        ((tensors[0], None, None), "out's q and q share memory"),
        ((q, q, v), "out's"),
        ((q.clone().requires_grad_(), k, v), "out's q|q_out requires a gradient"),
    ):
        with pytest.raises(jitrope.InvalidInput, match=match):
            jitrope.prepare_mla_qkv(*tensors, out=out, **said(**words))


def test_first_tokens_beside_another_pairing_are_refused() -> None:
    words = {"interleaved": True, "interleaved_out": False, "unrotated": 1}
    with pytest.raises(jitrope.InvalidInput, match="interleaved_out does not go without a table; pass a table"):
        jitrope.prepare_mla_qkv(Q, KV, K_PE, interleaved=True, interleaved_out=False)
    with pytest.raises(jitrope.InvalidInput, match="interleaved_out does not go with unrotated"):
        jitrope.prepare_mla_qkv(Q, KV, K_PE, TABLE[0], TABLE[0], **words)
