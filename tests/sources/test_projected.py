"""`project_qkv`: its bits, when it is two steps, what it refuses. `test_stages` has its calls and gradients."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

import jitrope
from jitrope import InvalidInput, Norm, prepare_fused_qkv, project_qkv
from jitrope.jit.compiler import compile_source
from jitrope.jit.render import render
from jitrope.sources import projected
from jitrope.tools.prewarm import pairs, specs_of

from ..calls import named
from ..devices import DEVICES, noise
from ..machine_code import bounds, disassemble
from ..results import planned

HALF = torch.bfloat16
same = partial(torch.testing.assert_close, rtol=0, atol=0)


def made(device: str, tokens: int = 40, size: int = 128, whole: bool = False) -> tuple[list[Tensor], Norm]:
    """x, weight, cos and sin for 4 heads of q and 2 of k, and a norm. whole: small integers, whose sums are exact."""
    x, weight, *tables = noise(device, torch.float32, (2, tokens, 72), (8 * size, 72), *[(tokens, size // 2)] * 2)
    x, weight = (y.round().clamp(-2, 2) if whole else y for y in (x, weight * (1 if whole else 0.1)))
    norm = Norm(*noise(device, HALF, (size,), (size,)), rounding="twice")
    return [x.to(HALF), weight.to(HALF), *tables], norm


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [64, 128])
def test_a_rounded_projection_has_the_bits_of_two_steps(size: int, device: str) -> None:
    """Where the sums of both are exact."""
    (x, weight, *tables), norm = made(device, size=size, whole=True)
    words: Any = {"heads": (4, 2), "norm": norm, "bias": weight.flatten()[: 8 * size]}
    got = project_qkv(x, weight, *tables, **words, round_projection=True)
    same(got, prepare_fused_qkv(linear(x, weight), *tables, **words))


@pytest.mark.parametrize("device", DEVICES)
def test_few_tokens_and_a_norm_with_a_gradient_are_two_steps(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm's gradient needs the projection."""
    (x, weight, *tables), norm = made(device)
    two = prepare_fused_qkv(linear(x, weight), *tables, heads=(4, 2), norm=norm)
    weight.requires_grad_()
    out = project_qkv(x, weight, *tables, heads=(4, 2), norm=norm)
    same([y.detach() for y in out], [*two])
    (grad,) = torch.autograd.grad(out, weight, [torch.ones_like(y) for y in out])
    assert grad.isfinite().all()
    assert grad.any()
    monkeypatch.setattr(projected, "LEAST_FILLED", 92)
    same(project_qkv(x, weight.detach(), *tables, heads=(4, 2), norm=norm), two)


@pytest.mark.parametrize("device", DEVICES)
def test_a_compiled_call(device: str) -> None:
    (x, weight, *tables), norm = made(device)

    def call(x: Tensor, weight: Tensor) -> Any:
        return project_qkv(x, weight, *tables, heads=(4, 2), norm=norm)

    same(torch.compile(call, backend="aot_eager", fullgraph=True)(x, weight), call(x, weight))


def test_a_kernel_from_the_text_of_a_call() -> None:
    x, weight = torch.empty(1, 8192, 256, dtype=HALF, device="meta"), torch.empty(1536, 256, dtype=HALF, device="meta")
    with jitrope.planning(["auto"]) as specs:
        project_qkv(x, weight, *torch.empty(2, 8192, 64, device="meta"), heads=(8, 2))
    assert [spec.kind for spec in specs] == ["project_qkv"]
    assert specs[0] in specs_of((8, 2), call=specs[0].call)


@pytest.mark.parametrize(
    "words", ["", "rms", "twice packed", "after", "rms interleaved", "rms number slots ids", "rms size=64"]
)
def test_machine_code(words: str, tmp_path: Path) -> None:
    """The tensor cores of sm_90 multiply, and no thread of a kernel of models keeps its sums on its stack."""
    bounds()  # of a known compiler
    (spec,) = planned({**named(f"32+8 128 {words}"), "source": "projected"}, tokens=4096)
    cubin, log = compile_source(render(spec), f"sm_90{spec.features}", ("--ptxas-options=-v",))
    assert "0 bytes stack frame, 0 bytes spill stores" in log
    assert any("HGMMA" in line for line in disassemble([cubin], "sm_90", tmp_path)[0])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            {"weight": torch.zeros(1024, 71)},
            r"weight is .*\(1024, 71\), .*; it must be \(W, K\) in fp32, fp16 or bf16, like x, which is ",
        ),
        (
            {"weight": torch.zeros(1024)},
            r"weight is .*\(1024,\), .*; it must be \(W, K\) in fp32, fp16 or bf16, like x",
        ),
        ({"x": None}, "x is None; it must be a tensor"),
        ({"round_projection": 2}, "round_projection is 2; it must be True or False"),
        ({"inplace": True}, "got an unexpected keyword argument 'inplace'"),
    ],
)
def test_refusals(words: dict[str, Any], sentence: str) -> None:
    given: dict[str, Any] = {"x": torch.zeros(1, 4, 72), "weight": torch.zeros(1024, 72), "heads": (4, 2), **words}
    with pytest.raises((InvalidInput, TypeError), match=sentence):
        project_qkv(**given, cos=torch.zeros(4, 64), sin=torch.zeros(4, 64))


def test_other_gpus_get_the_kernel_of_two_steps() -> None:
    """As `prewarm` plans a call for any of them; that of tensor cores is for sm_90 alone."""
    with jitrope.planning(["auto"]) as own:
        x, weight = (
            torch.empty(1, 64, 256, dtype=HALF, device="meta"),
            torch.empty(1536, 256, dtype=HALF, device="meta"),
        )
        project_qkv(x, weight, *torch.empty(2, 64, 64, device="meta"), heads=(8, 2))
    every = specs_of((8, 2), call=own[0].call)
    assert {spec.kind for spec in every} == {"project_qkv", "rope"}
    assert {spec.kind for spec, _ in pairs(every, ["sm_80"])} == {"rope"}
    assert {spec.kind for spec, _ in pairs(every, ["sm_90"])} == {"project_qkv", "rope"}


@pytest.mark.parametrize("device", DEVICES)
def test_parameters_that_are_not_aligned_are_two_steps(device: str) -> None:
    (x, weight, *tables), norm = made(device, whole=True)
    bias = torch.nn.Parameter(weight.flatten()[1 : 1 + 8 * 128], requires_grad=False)
    words: Any = {"heads": (4, 2), "norm": norm, "bias": bias}
    got = project_qkv(x, weight, *tables, **words, round_projection=True)
    same(got, prepare_fused_qkv(linear(x, weight), *tables, **words))
