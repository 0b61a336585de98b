"""A norm across the heads of several ranks, from given means of squares: values, stages, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import jitrope
from jitrope import DynamicQuantize, InvalidInput, KVCache, Norm, Quantize, planning
from jitrope.plan.options import Options

from .cases import NORM_ROPE, op_arguments
from .devices import DEVICES

RANKS = 2


def inputs(device: str, dtype: torch.dtype = torch.bfloat16, dim: int = 64, b: int = 2) -> tuple[list[Tensor], Any]:
    """[q, k, v] of 2 x 5 tokens with 6 and 4 heads, weights of all heads, and cos and sin."""
    generator = torch.Generator().manual_seed(dim)
    heads = [torch.randn(b, 5, n, dim, generator=generator).to(device, dtype) for n in (6, 4, 4)]
    weights = [torch.randn(n * dim, generator=generator).to(device, dtype) for n in (6, 4)]
    angles = torch.rand(5, dim // 2, generator=generator).to(device) * 50
    return heads, (weights, (angles.cos(), angles.sin()))


def mean_square(x: Tensor) -> Tensor:
    """The mean of squares of all heads of each token, (B, S)."""
    return x.float().square().mean((-2, -1))


def parts(x: Tensor, axis: int = 2) -> list[Tensor]:
    """The part of each rank."""
    return [*x.chunk(RANKS, axis)]


def normed64(x: Tensor, weight: Tensor | None, mean: Tensor, eps: float = 1e-6) -> Tensor:
    """The norm of one rank's heads in fp64, given the mean of all ranks."""
    y = x.double() / (mean.double() + eps).sqrt()[..., None, None]
    return y if weight is None else y * weight.double().unflatten(0, (x.shape[2], -1))


WAYS = {
    "wan": {"interleaved": True},
    "ltx": {"rounding": "addcmul"},
    "after": {"norm": {"after_rope": True}},
    "once": {"norm": {"rounding": "once"}},
    "twice": {"norm": {"rounding": "twice"}, "rounding": "dtype"},
    "centered": {"norm": {"zero_centered": True}},
    "partial": {"rotary_dim": 32, "dtype": torch.float32},
    "d80": {"dim": 80, "dtype": torch.float16},
    "linear": {"launch": "token_linear", "interleaved": True},
    "odd": {"dim": 6, "dtype": torch.float32},
    "scaled": {"q_scale": 0.125, "unrotated": 1},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["bshd", "sbhd", "bhsd", "thd"])
@pytest.mark.parametrize("way", WAYS)
def test_each_rank_has_its_part_of_the_whole(way: str, layout: str, device: str) -> None:
    """Every rank's results are close to the heads of the call with all heads."""
    words: dict[str, Any] = dict(WAYS[way])
    jitrope.configure(launch=words.pop("launch", "auto"))
    own, dtype = words.pop("norm", {}), words.pop("dtype", torch.bfloat16)
    (q, k, _), (weights, tables) = inputs(device, dtype, words.pop("dim", 64), b=1 if layout == "thd" else 2)
    tables = [x[:, : words.get("rotary_dim", 10**6) // 2] for x in tables]
    whole = jitrope.prepare_qkv(q, k, None, *tables, norm=Norm(*weights, across_heads=True, **own), **words)[:2]

    def laid(x: Tensor) -> Tensor:
        return {"bshd": x, "sbhd": x.transpose(0, 1), "bhsd": x.transpose(1, 2), "thd": x[0]}[layout]

    means = [mean_square(x)[0] if layout == "thd" else mean_square(x) for x in (q, k)]
    # "once" and "twice" round to the dtype between; another order of the sum may move an element there.
    rtol = {torch.float32: 2e-5, torch.float16: 2**-8, torch.bfloat16: 2**-6}[dtype]
    for rank in range(RANKS):
        mine = [parts(x)[rank] for x in (q, k)]
        norm = Norm(*[parts(w, 0)[rank] for w in weights], across_heads=True, mean_squares=means, **own)
        got = jitrope.prepare_qkv(*[laid(x) for x in mine], None, *tables, norm=norm, layout=layout, **words)[:2]
        for x, y in zip(got, whole):
            want = laid(parts(y)[rank])
            torch.testing.assert_close(x, want, rtol=rtol, atol=rtol * float(want.abs().max()))


def test_torchs_machinery() -> None:
    """Graphs, fake tensors, and torch's own checks of the op."""
    (q, k, _), (weights, tables) = inputs("cpu")

    def call(q: Tensor, k: Tensor) -> Any:
        norm = Norm(*weights, across_heads=True, mean_squares=(mean_square(q), mean_square(k)))
        return jitrope.prepare_qkv(q, k, None, *tables, norm=norm)[:2]

    for x, y in zip(torch.compile(call, fullgraph=True, backend="aot_eager")(q, k), call(q, k)):
        assert torch.equal(x, y)
    given = [q, k, *weights, None, None, mean_square(q), mean_square(k)]
    options = Options(rotary_dim=64, interleaved_out=False, norm_kind="rms_norm", across_heads=True)
    arguments = op_arguments(NORM_ROPE, given, tables, options)
    utils = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(torch.ops.jitrope.prepare.default, arguments, test_utils=utils)


def test_refusals() -> None:
    (q, k, _), (weights, tables) = inputs("cpu")
    means = [mean_square(x) for x in (q, k)]

    def refused(match: str, *heads: Any, given: Any = means, **own: Any) -> None:
        def call(*of_heads: Tensor, **words: Any) -> None:
            norm = Norm(*of_heads, mean_squares=given, **{"across_heads": True, **words})
            jitrope.prepare_qkv(*(heads or (q, k)), None, *tables, norm=norm)

        with pytest.raises(InvalidInput, match=match):
            call(*own.pop("weights", weights), **own)

    refused("Norm: mean_squares does not go with across_heads=False", across_heads=False)
    refused("Norm: mean_squares does not go with kind='layer_norm'", kind="layer_norm")
    refused("Norm: mean_squares does not go with v_norm", v_norm=True)
    refused("mean_squares is a list of 1; it must be those of q and k: two tensors", given=means[:1])
    refused("mean_squares is .*it must be those of q and k", given=(None, means[1]))
    refused("mean_squares is 0.5; it must be those of q and k", given=0.5)
    refused("k is given, but mean_squares' k is not", given=(means[0], None))
    refused("mean_squares' k is given, but k is not", q, None, weights=weights[:1])
    refused(r"mean_squares' q is .*; it must be \(2, 5\), float32", given=(means[0][..., None], means[1]))
    refused(r"mean_squares' q is .*; it must be \(2, 5\), float32", given=[x.t() for x in means])
    refused(r"mean_squares' k is float64; it must be \(2, 5\), float32", given=(means[0], means[1].double()))
    one = Norm(*[w[:64] for w in weights], across_heads=True, mean_squares=means)
    with pytest.raises(InvalidInput, match=r"q_weight is .*\(64,\).*; it must be \(384,\)"):
        jitrope.prepare_qkv(q, k, None, *tables, norm=one)
    needed = Norm(across_heads=True, mean_squares=(means[0].clone().requires_grad_(), means[1]))
    cache = KVCache(*torch.zeros(2, 10, 4, 64, dtype=k.dtype), torch.arange(10))
    for words in ({"quantize": DynamicQuantize()}, {"quantize": Quantize(1.0, 1.0)}, {"cache": cache}):
        with pytest.raises(InvalidInput, match="mean_squares' q requires a gradient, but this call has none"):
            jitrope.prepare_qkv(q, k, k, *tables, norm=needed, **words)
        with torch.no_grad():
            jitrope.prepare_qkv(q, k, k, *tables, norm=needed, **words)
    with pytest.raises(InvalidInput, match="mean_squares' q does not go with"):
        jitrope.prepare_joint_qkv((q, q, q), (q, q, q), *tables, norm=one)


GRADIENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "centered": {"norm": {"zero_centered": True}, "interleaved": True},
    "after": {"norm": {"after_rope": True, "rounding": "once"}, "rotary_dim": 32},
    "scaled": {"q_scale": 0.125, "unrotated": 1},
    "bf16": {"dtype": torch.bfloat16, "norm": {"rounding": "twice"}},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["bshd", "sbhd", "thd"])
@pytest.mark.parametrize("way", GRADIENTS)
def test_gradients_are_those_of_the_call_with_all_heads(way: str, layout: str, device: str) -> None:
    """Each rank's part of the heads and weights, where the mean of all ranks passes the gradient on; of k alone too."""
    words = dict(GRADIENTS[way])
    own, dtype = words.pop("norm", {}), words.pop("dtype", torch.float32)
    (q, k, _), (weights, tables) = inputs(device, dtype, b=1 if layout == "thd" else 2)
    tables = [x[: 5 - words.get("unrotated", 0), : words.get("rotary_dim", 64) // 2] for x in tables]
    leaves = [x.requires_grad_() for x in (q, k, *weights)]

    def laid(x: Tensor) -> Tensor:
        return {"bshd": x, "sbhd": x.transpose(0, 1), "thd": x[0]}[layout]

    def call(of: list[Tensor], ws: Any, **more: Any) -> Any:
        norm = Norm(*ws, across_heads=True, **own, **more)
        return jitrope.prepare_qkv(*[laid(x) for x in of], None, *tables, norm=norm, layout=layout, **words)[:2]

    means = [mean_square(x)[0] if layout == "thd" else mean_square(x) for x in (q, k)]
    split = [parts(x) for x in (q, k)], [parts(w, 0) for w in weights]
    ranks = [call([x[r] for x in split[0]], [w[r] for w in split[1]], mean_squares=means) for r in range(RANKS)]
    axis = 1 if layout == "thd" else 2
    got = [torch.cat(xs, axis) for xs in zip(*ranks)]
    want = call([q, k], weights)
    grads = [torch.sin(torch.arange(x.numel(), device=device).float() * 3).view(x.shape).to(dtype) for x in want]
    rtol = {torch.float32: 2e-5, torch.bfloat16: 2**-6}[dtype]
    for some, of in (((0, 1), (0, 1, 2, 3)), ((0,), (0, 2)), ((1,), (1, 3))):
        found = [
            torch.autograd.grad([xs[n] for n in some], [leaves[n] for n in of], [grads[n] for n in some], True)
            for xs in (got, want)
        ]
        for x, y in zip(*found):
            torch.testing.assert_close(x, y, rtol=rtol, atol=rtol * float(y.abs().max()))


@pytest.mark.parametrize("device", DEVICES)
def test_the_gradient_of_a_mean_alone(device: str) -> None:
    """It has one where q and k have none, in a known call too; without it q's gradient takes the mean as a constant."""
    (q, k, _), (weights, tables) = inputs(device, torch.float32)
    means = [mean_square(x).requires_grad_() for x in (q, k)]
    ones = [torch.ones_like(x) for x in (q, k)]
    for _ in range(3):
        norm = Norm(*weights, across_heads=True, mean_squares=means)
        out = jitrope.prepare_qkv(q, k, None, *tables, norm=norm)[:2]
        found = torch.autograd.grad(out, means, ones)
        for n, (x, mean) in enumerate(zip((q, k), means)):
            exact = mean.detach().double().requires_grad_()
            y = normed64(x, weights[n], exact).float()
            turned = jitrope.apply_rope(y, None, *tables)[0]
            torch.testing.assert_close(
                found[n], torch.autograd.grad(turned.sum(), exact)[0].float(), rtol=1e-4, atol=1e-4
            )
    leaf = q.clone().requires_grad_()
    norm = Norm(*weights, across_heads=True, mean_squares=[x.detach() for x in means])
    (dq,) = torch.autograd.grad(jitrope.prepare_qkv(leaf, k, None, *tables, norm=norm)[0].sum(), leaf)
    (want,) = torch.autograd.grad(
        jitrope.apply_rope(normed64(leaf, weights[0], means[0].detach()).float(), None, *tables)[0].sum(), leaf
    )
    torch.testing.assert_close(dq, want, rtol=1e-4, atol=1e-5)


def test_tokens_after_the_last_sequence_give_a_mean_no_gradient() -> None:
    """Not NaN either, where they and eps are 0."""
    q = torch.randn(4, 2, 8)
    q[3] = 0
    q.requires_grad_()
    norm = Norm(torch.ones(16), across_heads=True, eps=0.0, mean_squares=(q.square().mean((-2, -1)), None))
    words = {"freqs": torch.rand(8, 4), "positions": jitrope.Packed(torch.tensor([0, 3]))}
    jitrope.prepare_qkv(q, None, None, norm=norm, **words)[0].sum().backward()
    assert not q.grad[3].any()


def test_planned() -> None:
    q, k = (torch.empty(1, 4096, 10, 128, dtype=torch.bfloat16, device="meta") for _ in range(2))
    weights = [torch.empty(1280, dtype=torch.bfloat16, device="meta") for _ in range(2)]
    means = torch.empty(2, 1, 4096, device="meta")
    with planning() as called:
        table = torch.empty(4096, 64, device="meta")
        norm_of = Norm(*weights, across_heads=True, mean_squares=means)
        jitrope.prepare_qkv(q, k, None, table, table, norm=norm_of)
    assert all(spec.given_means and not spec.across_heads and "given_means" in spec.name for spec in called)
