"""`Norm`: the bits of the hosts' norms, words that go together, means of several ranks."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import jitrope
from jitrope import Norm, prepare_qkv
from jitrope.values import constants

from .. import oracle
from ..devices import DEVICE, DEVICES, noise, slow, turn
from ..results import near, near_each

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
BITS = [64, 128, 256]  # head sizes whose sums of squares follow torch's on a GPU
HARDWARE = [pytest.mark.gpu, pytest.mark.hardware]
assert_same = partial(torch.testing.assert_close, rtol=0, atol=0)


# ---- the hosts' bits ---------------------------------------------------------------------------------

WAYS = [{}, {"interleaved": True}, {"interleaved": True, "rounding": "complex64"}, {"rounding": "dtype"}]
TORCH, QWEN3 = "torch.nn.RMSNorm", "transformers.models.qwen3.modeling_qwen3.Qwen3RMSNorm"
GEMMA = "transformers.models.gemma.modeling_gemma.GemmaRMSNorm"
HOSTS = {TORCH: "once", QWEN3: "twice", "diffusers.models.normalization.RMSNorm": "twice"}


def host_norm(place: str, dim: int, weight: Tensor | None, eps: float = 1e-6) -> torch.nn.Module:
    """A library's own RMSNorm."""
    path, _, name = place.rpartition(".")
    reason = f"{path.partition('.')[0]} is not installed: pip install -e '.[diffusers]'"
    norm = getattr(pytest.importorskip(path, reason=reason), name)(dim, eps=eps)
    norm.weight = None if weight is None else torch.nn.Parameter(weight, requires_grad=False)
    return norm


ON_CPU = [*itertools.product(["cpu"], (64, 72, 80, 96, 128, 192, 256), DTYPES)]
ON_GPU = [*itertools.product([DEVICE], BITS, DTYPES[:2])]
HOST_NORMS = [
    *((host, *case) for host in HOSTS for case in ON_CPU),
    *(pytest.param(host, *case, marks=HARDWARE) for host in HOSTS for case in ON_GPU),
    *(pytest.param(TORCH, DEVICE, dim, torch.float32, marks=HARDWARE) for dim in BITS),
]


@pytest.mark.parametrize("words", WAYS, ids=str)
@pytest.mark.parametrize(("host", "device", "dim", "dtype"), HOST_NORMS)
def test_a_norm_and_a_rotation_have_the_hosts_bits(
    host: str, device: str, dim: int, dtype: torch.dtype, words: dict[str, Any]
) -> None:
    """Before and after the rotation, with weights and without, in place too."""
    for lead, heads in (((1, 65), (6, 2)), ((2, 3), (4, 4))):
        q, k, *weights = noise(device, dtype, *[(*lead, n, dim) for n in heads], (dim,), (dim,))
        cos, sin = turn(device, lead[1], dim // 2)
        turned = jitrope.apply_rope(q, k, cos, sin, **words)
        for own in (weights, *[(None, None)] * (host == TORCH)):
            norms, rounding = [host_norm(host, dim, w, 1e-5) for w in own], {"eps": 1e-5, "rounding": HOSTS[host]}
            before, after = ([norm(x) for norm, x in zip(norms, xs)] for xs in ((q, k), turned))
            want = jitrope.apply_rope(*before, cos, sin, **words)
            norm, behind = Norm(*own, **rounding), Norm(*own, **rounding, after_rope=True)
            assert_same(prepare_qkv(q, k, None, cos, sin, norm=norm, **words)[:2], want)
            assert_same(prepare_qkv(q, k, None, cos, sin, norm=behind, **words)[:2], tuple(after))
            given = q.clone(), k.clone()
            got = prepare_qkv(*given, None, cos, sin, norm=norm, inplace=True, **words)
            assert got[0] is given[0]
            assert got[1] is given[1]
            assert_same(given, want)


PARTS = [(256, 128), (256, 64), (256, 32), (256, 16), (128, 64), (128, 32), (128, 16), (64, 32), (64, 16)]


@pytest.mark.parametrize(("dim", "rotary_dim"), PARTS)
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("device", ["cpu", pytest.param(DEVICE, marks=HARDWARE)])
def test_partly_rotated_heads_have_the_hosts_bits(device: str, dtype: torch.dtype, dim: int, rotary_dim: int) -> None:
    """Few tokens and many: each launch. Twice, on a GPU, for heads of 128."""
    hosts = (TORCH, QWEN3) if device == "cpu" or dim == 128 else (TORCH,)
    for tokens, host in itertools.product((3, 2048), hosts):
        q, k, *weights = noise(device, dtype, (1, tokens, 6, dim), (1, tokens, 2, dim), (dim,), (dim,))
        cos, sin = turn(device, tokens, rotary_dim // 2)
        normed, norm = (
            [host_norm(host, dim, w)(x) for x, w in zip((q, k), weights)],
            Norm(*weights, rounding=HOSTS[host]),
        )
        for interleaved in (False, True):
            words = {"rotary_dim": rotary_dim, "interleaved": interleaved}
            want = jitrope.apply_rope(*normed, cos, sin, **words)
            assert_same(prepare_qkv(q, k, None, cos, sin, norm=norm, **words)[:2], want)


@pytest.mark.parametrize(
    ("device", "dim", "dtype"), [*ON_CPU, *[pytest.param(*case, marks=HARDWARE) for case in ON_GPU]]
)
def test_after_rope_is_llama_4s_norm(device: str, dim: int, dtype: torch.dtype) -> None:
    """Complex rotation, then its norm, which has no weight."""
    llama4 = pytest.importorskip("transformers.models.llama4.modeling_llama4", reason="transformers is not installed")
    q, k = noise(device, dtype, (2, 33, 6, dim), (2, 33, 2, dim))
    cos, sin = turn(device, 33, dim // 2)
    turned = llama4.apply_rotary_emb(q, k, torch.complex(cos, sin).expand(2, -1, -1))
    want = tuple([llama4.Llama4TextL2Norm(1e-6)(x) for x in turned])
    words = {"interleaved": True, "rounding": "complex64", "norm": Norm(rounding="twice", after_rope=True)}
    assert_same(prepare_qkv(q, k, None, cos, sin, **words)[:2], want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_centered_is_gemmas(dtype: torch.dtype) -> None:
    """Gemma's norm, also with fp32 weights beside q in bf16. zero_centered is the same as weights plus one."""
    q, k = noise("cpu", dtype, (2, 5, 4, 96), (2, 5, 2, 96))
    weights = noise("cpu", torch.float32, (96,), (96,), seed=1)
    cos, sin = turn("cpu", 5, 48)
    for own in (weights, [w.to(dtype) for w in weights]):
        want = jitrope.apply_rope(*[host_norm(GEMMA, 96, w)(x) for x, w in zip((q, k), own)], cos, sin)
        norm = Norm(*own, zero_centered=True, rounding="once")
        assert_same(prepare_qkv(q, k, None, cos, sin, norm=norm)[:2], want)
    shifted = Norm(*[w + 1 for w in weights])
    got = prepare_qkv(q, k, None, cos, sin, norm=Norm(*weights, zero_centered=True))
    assert_same(got[:2], prepare_qkv(q, k, None, cos, sin, norm=shifted)[:2])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_is_torchs(dtype: torch.dtype, device: str) -> None:
    """`torch.nn.LayerNorm` with weights and biases (CogVideoX, HunyuanDiT), before and after the rotation."""
    q, k, *own = noise(device, dtype, (2, 33, 6, 64), (2, 33, 2, 64), *[(64,)] * 4)
    cos, sin = turn(device, 33, 32)
    before, after = (
        [F.layer_norm(x, (64,), own[n], own[n + 2], eps=1e-5) for n, x in enumerate(xs)]
        for xs in ((q, k), jitrope.apply_rope(q, k, cos, sin))
    )
    for after_rope, want in ((False, jitrope.apply_rope(*before, cos, sin)), (True, tuple(after))):
        words = {"kind": "layer_norm", "rounding": "once", "eps": 1e-5, "after_rope": after_rope}
        norm = Norm(*own[:2], q_bias=own[2], k_bias=own[3], **words)
        got = prepare_qkv(q, k, None, cos, sin, norm=norm)[:2]
        (near_each if device == DEVICE else assert_same)(got, want)


@pytest.mark.parametrize("device", DEVICES)
def test_layer_norm_keeps_the_variance_of_large_elements(device: str) -> None:
    """Elements far from zero: squares less the squared mean would lose all digits."""
    x = 1e4 + noise("cpu", torch.float32, (1, 5, 3, 64))[0]
    got = prepare_qkv(x.to(device), None, None, norm=Norm(kind="layer_norm"))[0].cpu()
    torch.testing.assert_close(got, F.layer_norm(x.double(), (64,), eps=1e-6).float(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("device", ["cpu", pytest.param(DEVICE, marks=HARDWARE)])
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize(
    ("heads", "dim", "per_head"), [(12, 128, False), (40, 128, False), (32, 64, True)], ids=["wan", "wan-14b", "ltx"]
)
def test_once_across_heads_is_torchs(heads: int, dim: int, per_head: bool, dtype: torch.dtype, device: str) -> None:
    """Interleaved pairs with a shared table as in Wan; halves with angles for each head as in LTX-2."""
    shape = (2, 17, heads, dim)
    q, k, *weights = noise(device, dtype, shape, shape, *[(heads * dim,)] * 2)
    cos, sin = turn(device, *((2, 17, heads) if per_head else (17,)), dim // 2)
    words = {"rounding": "addcmul"} if per_head else {"interleaved": True}
    normed = [F.rms_norm(x.flatten(-2), w.shape, w, 1e-6).view(shape) for x, w in zip((q, k), weights)]
    want = jitrope.apply_rope(*normed, cos, sin, **words)
    norm = Norm(*weights, across_heads=True, rounding="once")
    assert_same(prepare_qkv(q, k, None, cos, sin, norm=norm, **words)[:2], want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rounding", ["none", "twice"])
def test_v_norm_is_gemma_4s_norm(rounding: str, device: str) -> None:
    """Close, as Gemma 4 takes a power in place of a reciprocal root; with its gradient."""
    gemma4 = pytest.importorskip(
        "transformers.models.gemma4.modeling_gemma4", reason="this transformers has no Gemma 4"
    )
    q, k, v = noise(device, torch.float32, (2, 5, 4, 64), (2, 5, 2, 64), (2, 5, 2, 64))
    ours, theirs = v.clone().requires_grad_(), v.clone().requires_grad_()
    got = prepare_qkv(q, k, ours, norm=Norm(v_norm=True, rounding=rounding))[2]
    want = gemma4.Gemma4RMSNorm(64, with_scale=False)(theirs)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*[torch.autograd.grad(y.sin().sum(), x) for y, x in ((got, ours), (want, theirs))])


# ---- words of a norm that go together, and sizes -----------------------------------------------------

LAYER, PER_HEAD = {"kind": "layer_norm"}, (3, 3)
TOGETHER: dict[str, tuple[tuple[int, int], int, dict[str, Any], dict[str, Any]]] = {
    # heads of q and k (3 and 3: with a table of each), elements of a head, words of the norm, of the call
    "after": ((4, 2), 16, {"after_rope": True, "zero_centered": True}, {}),
    "across": ((4, 2), 16, {"across_heads": True, "rounding": "twice"}, {}),
    "across-zero": (PER_HEAD, 16, {"across_heads": True, "zero_centered": True}, {"interleaved": True}),
    "across-after": (PER_HEAD, 16, {"across_heads": True, "after_rope": True, "rounding": "once"}, {}),
    "across-layer": ((7, 2), 64, {**LAYER, "across_heads": True}, {}),
    "across-layer-per-head": (PER_HEAD, 16, {**LAYER, "across_heads": True}, {}),
    "across-warps": ((50, 3), 128, {"across_heads": True}, {}),
    "layer-zero": ((4, 2), 16, {**LAYER, "zero_centered": True}, {"rotary_dim": 8, "interleaved": True}),
    "layer-after": ((3, 1), 96, {**LAYER, "after_rope": True, "rounding": "twice"}, {"rotary_dim": 48}),
    "layer-after-per-head": (PER_HEAD, 16, {**LAYER, "after_rope": True}, {}),
    "after-partial": (PER_HEAD, 16, {"after_rope": True, "rounding": "twice"}, {"rotary_dim": 8, "interleaved": True}),
    "after-97-heads": ((97, 97), 128, {"after_rope": True}, {}),
    "d6": ((3, 2), 6, {}, {}),
    "d16": ((4, 2), 16, {}, {"rotary_dim": 8, "rotary_offset": 4}),
    "one weight": ((9, 3), 80, {}, {"rotary_dim": 26}),
    "d112": ((4, 4), 112, {"rounding": "twice"}, {}),
    "d160": ((3, 1), 160, {}, {"interleaved": True}),
    "d192": ((3, 1), 192, {}, {"rotary_dim": 64, "rotary_offset": 128}),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "launch"), [(torch.float32, "token_linear"), (torch.bfloat16, "grid_2d")])
@pytest.mark.parametrize("name", TOGETHER)
def test_words_that_go_together_and_heads_of_any_size(name: str, dtype: torch.dtype, launch: str, device: str) -> None:
    """Results, and the gradients of q, k, weights and biases in fp32, against fp64; two runs give the same bits."""
    jitrope.configure(launch=launch)
    heads, dim, own, words = TOGETHER[name]
    labels = ["q_weight", *["k_weight"] * (name != "one weight"), *["q_bias", "k_bias"] * ("kind" in own)]
    shapes = [(2, 11, n, dim) for n in heads]
    grads = noise("cpu", dtype, *shapes, seed=2)
    weights = noise("cpu", torch.float32, *[(dim * heads[x[0] == "k"] ** ("across_heads" in own),) for x in labels])
    given = [*noise("cpu", dtype, *shapes, seed=1), *weights]
    cos, sin = turn("cpu", *((2, 11, 3) if heads is PER_HEAD else (11,)), words.get("rotary_dim", dim) // 2)
    exact = [x.double().requires_grad_() for x in given]
    by_name, flat = dict(zip(labels, exact[2:])), {"norm_kind" if x == "kind" else x: y for x, y in own.items()}
    wanted, _ = oracle.norm_rope(*exact[:2], cos=cos, sin=sin, **by_name, **flat, **words)
    want = torch.autograd.grad(wanted, exact, [x.double() for x in grads])
    leaves, found = [x.to(device).requires_grad_() for x in given], []
    for _ in range(2):
        norm = Norm(**dict(zip(labels, leaves[2:])), **own)
        got = prepare_qkv(*leaves[:2], None, cos.to(device), sin.to(device), norm=norm, **words)[:2]
        found.append(torch.autograd.grad(got, leaves, [x.to(device) for x in grads]))
    for x, y in zip(got, wanted):
        near(x.detach(), y.detach(), noise=3 * 2**-8 if "rounding" in own and dtype == torch.bfloat16 else 1e-5)
    assert_same(*found)
    rtol = {torch.float32: 2e-5, torch.bfloat16: 2**-6}[dtype]
    for leaf, x, y in zip(leaves, found[0], want):
        assert x.dtype == leaf.dtype
        atol = rtol / 4 * max(1e-3, float(y.abs().max()))
        torch.testing.assert_close(x.double().cpu(), y, rtol=rtol, atol=atol)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dim", [7, 45])
def test_a_norm_alone_of_odd_heads(dim: int, device: str) -> None:
    q, weight = noise(device, torch.float32, (1, 3, 2, dim), (dim,))
    torch.testing.assert_close(prepare_qkv(q, None, None, norm=Norm(weight))[0], F.rms_norm(q, (dim,), weight, 1e-6))


@pytest.mark.parametrize("device", DEVICES)
def test_fake_tensors_leave_nothing_behind(device: str) -> None:
    """The table of no rotation is kept, but never a fake one, which a later real call would use."""
    constants.one_row.cache_clear()
    with FakeTensorMode():
        prepare_qkv(torch.ones(1, 2, 1, 10, device=device), None, None, norm=Norm())
    with torch.inference_mode():
        prepare_qkv(torch.ones(1, 2, 1, 12, device=device), None, None, norm=Norm())
    for dim in (10, 12):
        q = torch.ones(1, 2, 1, dim, device=device, requires_grad=True)
        out, *_ = prepare_qkv(q, None, None, norm=Norm())
        torch.testing.assert_close(out, torch.ones_like(q))
        out.sum().backward()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["plain", "joint", slow("across"), slow("two tables")])
def test_one_graph_for_all_lengths(kind: str, device: str) -> None:
    """Of a full graph, with its gradient; after the first length nothing is compiled."""
    size = (48 if kind == "across" else 16,)
    weights = [x.requires_grad_() for x in noise(device, torch.float32, size, size)]

    def model(q: Tensor, k: Tensor, v: Tensor, cos: Any, sin: Any) -> Any:
        if kind in ("joint", "two tables"):
            cos, sin = ((cos, cos), (sin, sin)) if kind == "two tables" else (cos, sin)
            streams = [x * 2 for x in (q, k, v)], [x[:, 1:] for x in (q, k, v)]
            return jitrope.prepare_joint_qkv(*streams, cos, sin, norm=Norm(*weights))
        norm = Norm(*weights, across_heads=kind == "across", rounding="once")
        return prepare_qkv(q * 2, k, None, cos, sin, norm=norm)[:2]

    counter, frames = CompileCounterWithBackend("aot_eager"), []
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=counter, dynamic=True)
    for tokens in (5, 7, 12, 33):
        leaves = [x.requires_grad_() for x in noise(device, torch.float32, *[(2, tokens, 3, 16)] * 3, seed=tokens)]
        wanted, found = [*leaves[:2], weights[0]], []
        for function in (compiled, model):
            outputs = function(*leaves, *turn(device, 2 * tokens, 8))
            found.append([*outputs, *torch.autograd.grad(sum(y.sin().sum() for y in outputs), wanted)])
        torch.testing.assert_close(*found)
        frames.append(counter.frame_count)
    assert frames == frames[:1] * 4


# ---- a norm across the heads of several ranks, from given means of squares -----------------------------

RANKS: dict[str, tuple[dict[str, Any], dict[str, Any], int, torch.dtype]] = {  # words of norm and call, D, dtype
    "wan": ({}, {"interleaved": True}, 64, torch.bfloat16),
    "after": ({"after_rope": True, "rounding": "once"}, {"rotary_dim": 32}, 64, torch.float32),
    "twice": ({"rounding": "twice"}, {"rounding": "dtype"}, 80, torch.float16),
    "centered": ({"zero_centered": True}, {"q_scale": 0.125, "unrotated": 1}, 64, torch.float32),
    "odd": ({}, {}, 6, torch.float32),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("launch", ["token_linear", "grid_2d"])
@pytest.mark.parametrize("way", RANKS)
def test_each_rank_has_its_part_of_the_whole(way: str, launch: str, device: str) -> None:
    """And, where the mean of all ranks passes the gradient on, the gradients of all heads; of q or k alone too."""
    jitrope.configure(launch=launch)
    own, words, dim, dtype = RANKS[way]
    shapes = (2, 5, 6, dim), (2, 5, 4, dim), (6 * dim,), (4 * dim,)
    q, k, *weights = (x.requires_grad_() for x in noise(device, dtype, *shapes))
    cos, sin = turn(device, 5 - words.get("unrotated", 0), words.get("rotary_dim", dim) // 2)
    whole = Norm(*weights, across_heads=True, **own)
    want = prepare_qkv(q, k, None, cos, sin, norm=whole, **words)[:2]
    means, ranks = [x.float().square().mean((-2, -1)) for x in (q, k)], []
    for n in range(2):
        norm = Norm(*[w.chunk(2)[n] for w in weights], across_heads=True, mean_squares=means, **own)
        ranks.append(prepare_qkv(q.chunk(2, 2)[n], k.chunk(2, 2)[n], None, cos, sin, norm=norm, **words)[:2])
    got = [torch.cat(xs, 2) for xs in zip(*ranks)]
    # "once" and "twice" round to the dtype between; another order of the sum may move an element there.
    rtol = {torch.float32: 2e-5, torch.float16: 2**-8, torch.bfloat16: 2**-6}[dtype]
    for x, y in zip(got, want):
        torch.testing.assert_close(x, y, rtol=rtol, atol=rtol * float(y.detach().abs().max()))
    grads = [torch.sin(torch.arange(x.numel(), device=device).float() * 3).view(x.shape).to(dtype) for x in want]
    leaves = (q, k, *weights)
    for some, of in (((0, 1), (0, 1, 2, 3)), ((0,), (0, 2)), ((1,), (1, 3))):
        found = [
            torch.autograd.grad([xs[n] for n in some], [leaves[n] for n in of], [grads[n] for n in some], True)
            for xs in (got, want)
        ]
        for x, y in zip(*found):
            torch.testing.assert_close(x, y, rtol=rtol, atol=rtol * float(y.abs().max()))


@pytest.mark.parametrize("device", DEVICES)
def test_the_gradient_of_a_mean_alone(device: str) -> None:
    """It has one where q and k have none, in a known call too; without it q's gradient takes it as a constant."""
    q, k = noise(device, torch.float32, (2, 5, 6, 64), (2, 5, 4, 64))
    means = [x.square().mean((-2, -1)).requires_grad_() for x in (q, k)]
    for _ in range(3):
        out = prepare_qkv(q, k, None, norm=Norm(across_heads=True, mean_squares=means))[:2]
        for x, mean, found in zip((q, k), means, torch.autograd.grad(sum(y.sum() for y in out), means)):
            want = -x.sum((-2, -1)) / 2 / (mean.detach() + 1e-6) ** 1.5
            torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
    q.requires_grad_()
    fixed = Norm(across_heads=True, mean_squares=[x.detach() for x in means])
    (found,) = torch.autograd.grad(prepare_qkv(q, k, None, norm=fixed)[0].sum(), q)
    factor = 1 / (means[0].detach() + 1e-6).sqrt()[..., None, None]
    torch.testing.assert_close(found, factor.expand(q.shape), rtol=1e-4, atol=1e-5)


def test_tokens_after_the_last_sequence_give_a_mean_no_gradient() -> None:
    """Not NaN either, where they and eps are 0."""
    q = torch.randn(4, 2, 8)
    q[3] = 0
    q.requires_grad_()
    norm = Norm(torch.ones(16), across_heads=True, eps=0.0, mean_squares=(q.square().mean((-2, -1)), None))
    words = {"freqs": torch.rand(8, 4), "positions": jitrope.Packed(torch.tensor([0, 3]))}
    prepare_qkv(q, None, None, norm=norm, **words)[0].sum().backward()
    assert not q.grad[3].any()
