"""The presets of `examples/bench/presets.py`, at a few tokens, against plain torch: results, gradients, launches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from examples.bench import chains, harness
from examples.bench.chains import ROTARY
from examples.bench.presets import PRESETS, Preset, case, texts
from examples.bench.rope import small
from jitrope.call import Call
from jitrope.tools.prewarm import specs_of

from .devices import DEVICES
from .host import backend

GUIDE = (Path(__file__).parent.parent / "examples" / "start.md").read_text()
# The names in the guide's table of models, which leaves out a host and the indexer (serving.py has it).
MODELS = {
    **{"qwen3": "Qwen3", "gemma4": "Gemma 4", "llama4": "Llama 4", "hunyuan": "Hunyuan", "cogview4": "CogView4"},
    **dict.fromkeys(("cogvideox", "hunyuandit"), "CogVideoX, HunyuanDiT"),
    **dict.fromkeys(("qwen3-vl-decode", "qwen3-vl-prefill"), "Qwen3-VL"),
    **dict.fromkeys(("deepseek-mla", "deepseek-mla-thd", "deepseek-mla-cp", "deepseek-mla-decode"), "DeepSeek V3"),
    **dict.fromkeys(("deepseek-mla-decode-fp8", "deepseek-record", "deepseek-record-decode"), "DeepSeek V3"),
    **dict.fromkeys(("deepseek-v4-record", "nvfp4-record"), "DeepSeek V3"),
    **dict.fromkeys(("qwen3.5", "qwen3.5-fused"), "Qwen3-Next, 3.5"),
    **{"flux-fp8": "FLUX", "wan-ulysses": "Wan"},
    **dict.fromkeys(("flux-fp8-heads", "flux-fp8-heads-hadamard"), "FLUX"),
}
INDEXERS = ("deepseek-indexer", "deepseek-indexer-hadamard", "deepseek-indexer-decode")
LAUNCHES = dict.fromkeys((*INDEXERS[:2], "flux-fp8-heads", "flux-fp8-heads-hadamard"), 2)
"""Launches of a forward call, where there is more than one. A gradient takes one."""
TRAINED = [name for name, preset in PRESETS.items() if preset.trained]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device of a preset's inputs."""
    for module in (chains, harness):
        monkeypatch.setattr(module, "DEVICE", request.param)
    return str(request.param)


def made(preset: Preset, dtype: torch.dtype) -> tuple[chains.Inputs, list[Tensor]]:
    """The inputs in a dtype, and those of them that get gradients: the trained ones, weights and biases."""
    torch.manual_seed(3)
    x = preset.make(small(preset.shape), preset.rotary_dim or preset.shape[-1])
    fields: dict[str, Any] = {name: getattr(x, name).detach().to(dtype).requires_grad_() for name in preset.trained}
    pairs = {name: tuple([w.to(dtype).requires_grad_() for w in getattr(x, name)]) for name in ("weights", "biases")}
    return x._replace(**fields, **pairs), [*fields.values(), *[w for pair in pairs.values() for w in pair]]


@pytest.mark.parametrize("name", [name for name, preset in PRESETS.items() if preset.plain])
def test_results_are_those_of_plain_torch(name: str, device: str) -> None:
    torch.manual_seed(3)
    own = case(PRESETS[name], False, smoke=True)
    inputs = own.inputs()
    assert inputs.q.device.type == device
    harness.agree(own, inputs)


@pytest.mark.parametrize("name", TRAINED)
def test_gradients_are_those_of_plain_torch(name: str, device: str) -> None:
    """Those of the chain in fp32, and of weights and biases where it has them."""
    preset, found = PRESETS[name], []
    for call, dtype in ((preset.ours, torch.bfloat16), (preset.plain, torch.float32)):
        x, leaves = made(preset, dtype)
        outputs = tree_leaves(call(x))
        generator = torch.Generator().manual_seed(4)
        grads = [torch.randn(y.shape, generator=generator).to(y.device).bfloat16().to(y.dtype) for y in outputs]
        found.append(torch.autograd.grad(outputs, leaves, grads, allow_unused=True))
    assert all(x is not None for x in found[0][: len(preset.trained)])
    for got, want in zip(*found):
        assert (got is None) == (want is None)
        if got is not None:
            torch.testing.assert_close(got.float(), want, rtol=2**-7, atol=2**-8 * float(want.abs().max()))


@pytest.mark.gpu
@pytest.mark.skipif(backend.DEVICE != "cpu", reason="launches are counted on the host's kernels")
@pytest.mark.parametrize("name", PRESETS)
def test_launches(name: str) -> None:
    preset = PRESETS[name]
    x, leaves = made(preset, torch.bfloat16)
    before = backend.launched.total()
    with torch.set_grad_enabled(bool(preset.trained)):
        outputs = tree_leaves(preset.ours(x))
    forward = backend.launched.total()
    assert forward - before == LAUNCHES.get(name, 1)
    if preset.trained:
        torch.autograd.grad(outputs, leaves, [torch.ones_like(y) for y in outputs], allow_unused=True)
        assert backend.launched.total() - forward == 1


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
@pytest.mark.usefixtures("device")
def test_a_preset_says_its_calls(name: str) -> None:
    """As many as it launches, each with a text that `prewarm` reads."""
    found = texts(PRESETS[name])
    _, _, q_heads, k_heads, size = PRESETS[name].shape
    assert len(found) == LAUNCHES.get(name, 1)
    for text in [x for x in found if "k_block_scale" not in x]:  # whose shape no text says
        alone = not {"k", "kv", "qkv"} & {*Call.parse(text).tensors}
        heads = {"qwen3.5-fused": [8, 2], **{x: [q_heads] for x in INDEXERS[:2]}}.get(name, [q_heads, k_heads])
        assert len(heads) == 2 - alone
        assert specs_of(heads, ROTARY if name == "deepseek-mla-decode" else size, call=text)


def test_each_preset_is_in_the_guide() -> None:
    _, _, models = GUIDE.partition("\n## What each model needs\n")
    rows = [line.strip("|").split("|")[0].strip() for line in models.split("\n## ")[0].splitlines() if line[:1] == "|"]
    assert {*MODELS, "te-mha", *INDEXERS} == set(PRESETS)
    assert set(MODELS.values()) <= set(rows)
