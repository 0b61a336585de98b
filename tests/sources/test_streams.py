"""Two streams in one launch: the bits of calls of each, empty streams, tokens that are not rotated, what is kept."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import jitrope
from jitrope import DynamicQuantize, Mrope, Norm, Quantize, Scaled, Ulysses, prepare_joint_qkv, prepare_qkv

from ..devices import DEVICE, DEVICES, noise
from ..sweep import E5M2, FP4

FIRST, SECOND = 3, 5
ANGLES = torch.outer(torch.arange(8.0), torch.rand(32, generator=torch.Generator().manual_seed(4)) * 3)
COS, SIN = ANGLES.cos(), ANGLES.sin()
assert_same = partial(torch.testing.assert_close, rtol=0, atol=0)


def streams(device: str, first: int = FIRST, second: int = SECOND) -> list[Tensor]:
    """q, k and v of the first stream in bf16, then of the second, which are parts of one wider tensor."""
    x = torch.randn(2, first + second, 8, 64, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    return [*[y.contiguous() for y in x[:, :first].split((4, 2, 2), 2)], *x[:, first:].split((4, 2, 2), 2)]


@pytest.mark.parametrize("device", ["cpu", pytest.param(DEVICE, marks=[pytest.mark.gpu, pytest.mark.hardware])])
def test_a_stream_with_cosines_of_one_is_only_normalised(device: str) -> None:
    """As in FLUX, one call serves both streams, and the text before the image is not rotated."""
    given, weights = streams(device), noise(device, torch.bfloat16, *[(64,)] * 4)
    cos, sin = torch.ones(8, 32, device=device), torch.zeros(8, 32, device=device)
    cos[FIRST:], sin[FIRST:] = COS[:SECOND], SIN[:SECOND]
    norms = [Norm(*weights[:2], rounding="once"), Norm(*weights[2:], rounding="once")]
    q, k, v = prepare_joint_qkv(given[:3], given[3:], cos, sin, norm=norms, interleaved=True)
    assert_same(q[:, :FIRST], F.rms_norm(given[0], (64,), weights[0], 1e-6))
    assert_same(k[:, :FIRST], F.rms_norm(given[1], (64,), weights[1], 1e-6))
    want = prepare_qkv(*given[3:], cos[FIRST:], sin[FIRST:], norm=norms[1], interleaved=True)
    assert_same((q[:, FIRST:], k[:, FIRST:], v[:, FIRST:]), want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "stages",
    [
        {},
        {"quantize": Quantize(0.05, 0.02, 0.1, dtype=E5M2, hadamard=True)},
        {"quantize": DynamicQuantize(torch.int8)},
        {"quantize": DynamicQuantize(FP4, group=16, scale_dtype=torch.float8_e4m3fn, q_global_scale=0.5, v=True)},
        {"out": (None, None, None)},
        {"q_scale": torch.linspace(0.5, 1.5, 16).view(2, 8), "interleaved": True, "rounding": "dtype"},
    ],
    ids=["plain", "fp8 with v, transformed", "int8", "fp4", "out", "scaled"],
)
def test_norms_and_tables_that_differ_have_the_bits_of_each_stream(stages: dict[str, Any], device: str) -> None:
    """The second tables have other strides. Fresh results share no memory with the streams."""
    given, words = streams(device), {x: y.to(device) if isinstance(y, Tensor) else y for x, y in stages.items()}
    weights, calls = noise(device, torch.float32, *[(64,)] * 4), []
    norms = [Norm(*weights[:2], zero_centered=True), Norm(*weights[2:], zero_centered=True)]
    tables = {x: (y[:FIRST].to(device), torch.cat((y, y), 1).to(device)[FIRST:, :32]) for x, y in
              (("cos", COS), ("sin", SIN))}  # fmt: skip
    got = prepare_joint_qkv(given[:3], given[3:], norm=norms, **tables, **words)
    for n, tokens in enumerate((slice(0, FIRST), slice(FIRST, None))):
        own = {name: x[n] for name, x in tables.items()}
        more = {**words, "q_scale": words["q_scale"][:, tokens]} if "q_scale" in words else words
        calls.append(prepare_qkv(*given[3 * n : 3 * n + 3], **own, norm=norms[n], **more))
    flat = [[y for x in results for y in (x if isinstance(x, Scaled) else (x,))] for results in (got, *calls)]
    for x, one, two in zip(*flat):
        assert x.is_contiguous()
        assert x.untyped_storage().data_ptr() not in [y.untyped_storage().data_ptr() for y in given]
        for part, want in zip((x[:, :FIRST], x[:, FIRST:]), (one, two)):
            assert torch.equal(part.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "norm", [None, Norm(rounding="once"), Norm(v_norm=True, of="k")], ids=["no", "qk", "of k and v"]
)
@pytest.mark.parametrize("unrotated", [1, FIRST, 4])
def test_tokens_that_are_not_rotated_end_in_either_stream(unrotated: int, norm: Norm | None, device: str) -> None:
    """In the first, between both, or in the second: the bits and the gradients of the streams joined before."""
    given = [x.float().requires_grad_() for x in streams(device)]
    words = {"cos": COS[: 8 - unrotated].to(device), "sin": SIN[: 8 - unrotated].to(device), "unrotated": unrotated}
    got = prepare_joint_qkv(given[:3], given[3:], norm=norm, **words)
    want = prepare_qkv(*[torch.cat(pair, 1) for pair in zip(given[:3], given[3:])], norm=norm, **words)
    assert_same(got, want)
    grads = [torch.sin(3 * x.detach()) for x in want]
    torch.testing.assert_close(torch.autograd.grad(got, given, grads), torch.autograd.grad(want, given, grads))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [(0, 3), (3, 0), (0, 0)])
def test_a_stream_may_be_empty(tokens: tuple[int, int], device: str) -> None:
    given = [x.requires_grad_() for x in streams(device, *tokens)]
    cos, sin = COS.to(device), SIN.to(device)
    q, k, v = prepare_joint_qkv(given[:3], given[3:], cos, sin, norm=Norm())
    assert q.shape == (2, sum(tokens), 4, 64)
    assert k.shape == v.shape == (2, sum(tokens), 2, 64)
    if sum(tokens):
        full = given[:3] if tokens[0] else given[3:]
        assert_same((q, k, v), prepare_qkv(*full, cos, sin, norm=Norm()))
    for x, grad in zip(given, torch.autograd.grad(q.sum() + k.sum() + v.sum(), given)):
        assert x.shape == grad.shape


def test_without_a_norm_a_backward_keeps_no_heads() -> None:
    """It keeps the first stream's q alone, for its length."""
    kept: list[Tensor] = []
    given = [x.requires_grad_() for x in streams("cpu")]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        prepare_joint_qkv(given[:3], given[3:], COS, SIN)
    assert {x.data_ptr() for x in kept} & {x.data_ptr() for x in given} == {given[0].data_ptr()}


@pytest.mark.parametrize("v_norm", [False, True])
@pytest.mark.parametrize("way", ["mrope", "angles", "unrotated stream", "ranks"])
def test_one_launch(way: str, v_norm: bool) -> None:
    """Forward; backward one for each stream."""
    cos, sin, angles = (torch.empty(8, 32, device="meta") for _ in range(3))
    ids = torch.empty(3, 2, 8, dtype=torch.int64, device="meta")
    words: dict[str, Any] = {
        "mrope": {"cos": cos, "sin": sin, "positions": Mrope(ids, (16, 8, 8))},
        "angles": {"freqs": angles, "mscale": 1.5, "q_scale": 0.5},
        "unrotated stream": {"cos": cos[FIRST:], "sin": sin[FIRST:], "unrotated": FIRST, "rounding": "complex64"},
        "ranks": {"cos": cos, "sin": sin, "quantize": DynamicQuantize(v=True), "out": Ulysses(2)},
    }[way]
    given = [x.to("meta").requires_grad_(way != "ranks") for x in streams("cpu")]
    with jitrope.planning(["auto"]) as specs:
        out = prepare_joint_qkv(given[:3], given[3:], norm=Norm(v_norm=True) if v_norm else None, **words)
        assert len(specs) == 1
        if way != "ranks":
            torch.autograd.grad(out, given, [torch.empty_like(x) for x in out])
            assert 2 <= len(set(specs)) <= 3  # streams of one kind have one kernel
    assert {spec.v_norm for spec in specs} == {v_norm}
