"""Every diffusers transformer that rotates, tiny and random, with jitrope: the stock model's bits."""

from __future__ import annotations

import copy
import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from types import CodeType

import pytest
import torch

from jitrope.integrations import diffusers as integration
from jitrope.integrations.diffusers import coverage
from jitrope.integrations.diffusers.inline import INLINE

diffusers = pytest.importorskip("diffusers", reason="the diffusers extra is not installed")
from .devices import DEVICES  # noqa: E402
from .diffusion_zoo import MODELS, forward, prepared  # noqa: E402

EACH = pytest.mark.parametrize("name", list(MODELS))
# One of each way in: a module's name, one that is imported in a call, a nested function, a module's forward, a
# processor of ours; and of each kind of table.
COMPILED = [
    "FluxTransformer2DModel", "CogView4Transformer2DModel", "WanTransformer3DModel", "SanaWMTransformer3DModel",
    "Ideogram4Transformer2DModel", "LTX2VideoTransformer3DModel-split", "AnyFlowTransformer3DModel",
    "PRXTransformer2DModel", "ErnieImageTransformer2DModel",
]  # fmt: skip
CONTROLNETS = {
    "CosmosControlNetModel", "FluxControlNetModel", "FluxMultiControlNetModel", "HunyuanDiT2DControlNetModel",
    "HunyuanDiT2DMultiControlNetModel", "QwenImageControlNetModel", "QwenImageMultiControlNetModel",
}  # fmt: skip


def seeded(model, inputs):
    torch.manual_seed(1)
    return forward(model, inputs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@EACH
def test_the_stock_models_bits(name, dtype, device) -> None:
    entry = MODELS[name]
    if device == "cpu" and dtype not in entry.dtypes:
        pytest.skip(f"the stock model does not run in {dtype} on a CPU")
    model, inputs = prepared(entry, device, dtype)
    with torch.no_grad():
        stock = seeded(model, inputs)
        with integration.enable(model, fuse_norm=False) as report:
            ours = seeded(model, inputs)
            again = seeded(model, inputs)
            calls, reasons = report.calls, dict(report.reasons)
        with integration.enable(model) as fused_report:
            fused = seeded(model, inputs)
            fused_calls = fused_report.calls
        back = seeded(model, inputs)
    assert torch.equal(ours, stock)
    assert torch.equal(again, stock)
    assert torch.equal(back, stock)
    assert calls == {"jitrope": 2 * entry.rotations, "host": 0}, reasons
    assert set(report.replaced) <= set(coverage.COVERAGE[name.split("-")[0]])
    if device == "cpu":
        assert torch.equal(fused, stock)
    else:  # the sum of squares of a head of other sizes than powers of two is taken in another order
        torch.testing.assert_close(fused, stock, rtol=2e-2, atol=2e-2)
    assert fused_calls["host"] == 0
    assert fused_calls["jitrope"] == (0 if fused_report.fused == fused_report.replaced else calls["jitrope"] // 2)


@EACH
def test_gradients_are_the_hosts(name) -> None:
    if not MODELS[name].gradients:
        pytest.skip("the stock model has no backward on a CPU")
    model, inputs = prepared(MODELS[name])
    grads = []
    for ours in (False, True):
        model.zero_grad()
        if ours:
            integration.enable(model, fuse_norm=False)
        seeded(model, inputs).square().mean().backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for parameter, want in grads[0].items():
        torch.testing.assert_close(grads[1][parameter], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_fullgraph(name) -> None:
    model, inputs = prepared(MODELS[name])
    torch._dynamo.reset()
    with torch.no_grad(), integration.enable(model, fuse_norm=False) as report:
        want = forward(model, inputs)
        eager = report.calls["jitrope"]
        compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
        with torch._dynamo.config.patch(error_on_recompile=True):
            torch.testing.assert_close(forward(compiled, inputs), want)
            torch.testing.assert_close(forward(compiled, inputs), want)
    assert report.calls == {"jitrope": 2 * eager, "host": 0}  # once as it ran, once as it was traced


@pytest.mark.parametrize("fuse_norm", [False, True])
def test_regional_compilation(fuse_norm) -> None:
    model, inputs = prepared(MODELS["FluxTransformer2DModel"])
    torch._dynamo.reset()
    with torch.no_grad():
        stock = forward(model, inputs)
        with integration.enable(model, fuse_norm=fuse_norm) as report:
            model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
            torch.testing.assert_close(forward(model, inputs), stock)
            assert report.calls["host"] == 0
            assert report.calls["jitrope"] + report.calls.get("fused", 0) > 0
        torch.testing.assert_close(forward(model, inputs), stock)  # the host's again, compiled anew


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "name",
    ["FluxTransformer2DModel", "Lumina2Transformer2DModel", "Kandinsky5Transformer3DModel",
     "HiDreamImageTransformer2DModel", "LTX2VideoTransformer3DModel-split", "ErnieImageTransformer2DModel",
     "WanTransformer3DModel"],
)  # fmt: skip
def test_autocast(name, device) -> None:
    """Nothing that a rope is made of is cast by it."""
    model, inputs = prepared(MODELS[name], device)
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        stock = forward(model, inputs)
        with integration.enable(model, fuse_norm=False) as report:
            assert torch.equal(forward(model, inputs), stock)
    assert report.calls == {"jitrope": MODELS[name].rotations, "host": 0}


def test_tables_in_bf16() -> None:
    """Wan's buffers after `.to(bfloat16)`: the host rounds every product."""
    model, inputs = prepared(MODELS["WanTransformer3DModel"], "cpu", torch.bfloat16)
    model = model.to(torch.bfloat16)
    assert model.rope.freqs_cos.dtype == torch.bfloat16
    with torch.no_grad():
        stock = forward(model, inputs)
        with integration.enable(model, fuse_norm=False) as report:
            assert torch.equal(forward(model, inputs), stock)
    assert report.calls == {"jitrope": MODELS["WanTransformer3DModel"].rotations, "host": 0}


def test_learned_tables_take_their_gradient() -> None:
    """Mochi's are parameters: in training its rope is the host's, which the report says."""
    model, inputs = prepared(MODELS["MochiTransformer3DModel"])
    with integration.enable(model) as report:
        forward(model, inputs).square().mean().backward()
    assert model.pos_frequencies.grad.abs().sum() > 0
    assert report.calls["jitrope"] == 0
    assert set(report.reasons) == {"the tables take a gradient"}


# ---- the table of what is covered ----------------------------------------------------------------------


def modules():
    import diffusers.models.controlnets as controlnets
    import diffusers.models.transformers as transformers

    for package in (transformers, controlnets):
        for found in pkgutil.iter_modules(package.__path__):
            yield importlib.import_module(f"{package.__name__}.{found.name}")


def classes(module, base=object):
    found = [cls for cls in vars(module).values() if inspect.isclass(cls) and cls.__module__ == module.__name__]
    return [cls for cls in found if issubclass(cls, base)]


def test_every_model_that_mentions_rope_is_in_the_table() -> None:
    mentions = re.compile(r"\brope|_rope|rotary", re.IGNORECASE)
    found = {
        cls.__name__
        for module in modules()
        if mentions.search(inspect.getsource(module))
        for cls in classes(module, diffusers.ModelMixin)
    }
    assert found == set(coverage.COVERAGE)


def names(code: CodeType) -> set[str]:
    """The names that code refers to, and the functions in it."""
    nested = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return {*code.co_names, *(inner.co_name for inner in nested)}.union(*map(names, nested))


def test_every_class_that_calls_a_rope_function_is_covered() -> None:
    """Found by the names of functions that rotate, directly or by another function of the module."""
    rotates = re.compile(r"apply_(\w+_)?rot|apply_rope|rope_apply|_rotate_half|apply_ucpe_transform")
    found = set()
    for module in [*modules(), importlib.import_module("diffusers.models.attention_processor")]:
        functions = {name: names(f.__code__) for name, f in vars(module).items() if inspect.isfunction(f)}
        calling = {name for name, called in functions.items() if any(map(rotates.search, called))}
        for cls in classes(module):
            methods = [inspect.unwrap(f) for f in vars(cls).values() if inspect.isfunction(f)]
            called = set().union(*(names(method.__code__) for method in methods))
            if any(map(rotates.search, called)) or called & calling:
                found.add(cls.__name__)
    assert found == set(coverage.SITES) | set(INLINE)


def test_every_covered_class_is_of_a_model() -> None:
    covered = {name for names in coverage.COVERAGE.values() if not isinstance(names, str) for name in names}
    assert covered == set(coverage.SITES) | set(INLINE)


def test_the_zoo_has_every_model_of_the_table() -> None:
    assert {name.split("-")[0] for name in MODELS} | CONTROLNETS == set(coverage.COVERAGE)


def test_controlnets_made_of_covered_blocks() -> None:
    """Those that are not in the zoo hold the processors of their transformers."""
    flux, _ = prepared(MODELS["FluxTransformer2DModel"])
    qwen, _ = prepared(MODELS["QwenImageTransformer2DModel"])
    hunyuan, _ = prepared(MODELS["HunyuanDiT2DModel"])
    cosmos, _ = prepared(MODELS["CosmosTransformer3DModel"])
    made = [
        getattr(diffusers, name).from_config({**model.config, "num_layers": 1, "_class_name": name})
        for name, model in (
            ("FluxControlNetModel", flux), ("QwenImageControlNetModel", qwen), ("HunyuanDiT2DControlNetModel", hunyuan),
            ("CosmosControlNetModel", cosmos),
        )
    ]  # fmt: skip
    made += [diffusers.FluxMultiControlNetModel(made[:1]), diffusers.QwenImageMultiControlNetModel(made[1:2])]
    for model in made:
        with integration.enable(model) as report:
            assert report.models == [model]
            assert set(report.replaced) <= set(coverage.COVERAGE[type(model).__name__])


def test_the_readme_has_the_table() -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    assert coverage.table() in readme
