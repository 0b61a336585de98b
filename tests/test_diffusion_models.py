"""Every diffusers transformer that rotates, tiny and random, gives the stock model's bits with jitrope."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from types import CodeType

import pytest
import torch

from jitrope.integrations import _host
from jitrope.integrations import diffusers as integration
from jitrope.integrations.diffusers import forms
from jitrope.integrations.diffusers.fused import FUSED, INLINE
from jitrope.integrations.diffusers.sites import SITES

diffusers = pytest.importorskip("diffusers", reason="the diffusers extra is not installed")
from .devices import DEVICES, slow  # noqa: E402
from .diffusion_coverage import COVERAGE, table  # noqa: E402
from .diffusion_zoo import FUSED_CALLS, MODELS, forward, prepared  # noqa: E402

EACH = pytest.mark.parametrize("name", list(MODELS))
# Fused ones (Flux with its gradients: test_diffusers_fused.py); and rope alone, one of each way: a name imported in a
# call, a module's forward, a processor of ours.
COMPILED = [
    *((name, True) for name in ("Flux2", "QwenImage", "Wan", "HunyuanVideo", "LTXVideo", "ZImage")),
    *((name, False) for name in ("CogView4", "SanaWM", "Ideogram4")),
]
CONTROLNETS = {
    "CosmosControlNetModel",
    "FluxControlNetModel",
    "FluxMultiControlNetModel",
    "HunyuanDiT2DControlNetModel",
    "HunyuanDiT2DMultiControlNetModel",
    "QwenImageControlNetModel",
    "QwenImageMultiControlNetModel",
}


def seeded(model, inputs):
    """A forward with the same random numbers and order of sums: a mixture of experts sums its experts by atomics."""
    torch.manual_seed(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return forward(model, inputs)
    finally:
        torch.use_deterministic_algorithms(False)


def classes_in(model):
    return {type(part) for part in integration._parts(model)}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, slow(torch.float16)],
    ids=["fp32", "bf16", "fp16"],
)
@EACH
def test_the_stock_models_bits(name, dtype, device) -> None:
    """Outputs and reports with rope alone, with the norm in the same launch, and stock again."""
    entry = MODELS[name]
    if device == "cpu" and dtype not in entry.dtypes:
        pytest.skip(f"the stock model does not run in {dtype} on a CPU")
    model, inputs = prepared(entry, device, dtype)
    with torch.no_grad():
        stock = seeded(model, inputs)
        with integration.enable(model, fuse_norm=False) as report:
            alone, classes = [seeded(model, inputs) for _ in range(2)], classes_in(model)
        assert all(torch.equal(ours, stock) for ours in alone)
        assert report.calls == {"jitrope": 2 * entry.rotations, "host": 0}, report
        assert not report.fused
        assert set(report.replaced) <= set(COVERAGE[name.split("-")[0]])
        with integration.enable(model) as report:
            assert (classes_in(model) != classes) == (name in FUSED_CALLS)
            assert report.fused.total() == sum(report.replaced[cls] for cls in FUSED)
            for _ in range(2 if name in FUSED_CALLS else 0):
                ours = seeded(model, inputs)
                # On a GPU, squares of heads of other sizes than powers of two are summed in another order.
                exact = {"rtol": 0, "atol": 0} if device == "cpu" else {"rtol": 2e-2, "atol": 2e-2}
                torch.testing.assert_close(ours, stock, **exact)
        assert ("rope alone" in str(report)) == (name not in FUSED_CALLS)
        if name in FUSED_CALLS:
            assert report.calls == {"jitrope": 0, "host": 0, "fused": 2 * FUSED_CALLS[name]}, report
            assert not report.reasons
        assert torch.equal(seeded(model, inputs), stock)


@EACH
def test_gradients_are_the_hosts(name) -> None:
    if not MODELS[name].gradients:
        pytest.skip("the stock model has no backward on a CPU")
    model, inputs = prepared(MODELS[name])

    def gradients():
        model.zero_grad()
        seeded(model, inputs).square().mean().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    stock = gradients()
    with integration.enable(model, fuse_norm=False):
        alone = gradients()
    assert alone.keys() == stock.keys()
    for key, want in stock.items():
        torch.testing.assert_close(alone[key], want, rtol=1e-4, atol=1e-5)
    if name in FUSED_CALLS:
        with integration.enable(model) as report:
            fused = gradients()
        assert report.calls["fused"] == FUSED_CALLS[name]
        assert any("norm_q" in key for key in stock)
        for key, want in stock.items():
            torch.testing.assert_close(fused[key], want, rtol=1e-3, atol=1e-4 * float(want.abs().max()) + 1e-7)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fuse_norm"), COMPILED)
def test_compiled_fullgraph_without_recompiles(name, fuse_norm) -> None:
    (name,) = [key for key in MODELS if re.fullmatch(rf"{name}Transformer[23]DModel", key)]
    model, inputs = prepared(MODELS[name])
    torch._dynamo.reset()
    with torch.no_grad(), integration.enable(model, fuse_norm=fuse_norm) as report:
        want = forward(model, inputs)
        eager = report.calls
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert torch.equal(forward(compiled, inputs), want)
        other = {key: value * 0.5 if key == "hidden_states" else value for key, value in inputs.items()}
        with torch._dynamo.config.patch(error_on_recompile=True):
            again = forward(compiled, other)
        calls = report.calls
        torch.testing.assert_close(again, forward(model, other))
    assert calls == {who: 2 * count for who, count in eager.items()}  # once when it ran, once when it was traced
    assert calls["host"] == 0


def test_a_refusal_is_decided_as_a_call_is_traced() -> None:
    """The graph does not break: it contains the host's own function, and the reason is counted."""
    rope = forms.rope_of(forms.HALVES, lambda x, tables: x * tables[0][None, :, None])
    x, table = torch.randn(2, 6, 3, 16), torch.rand(6, 16)
    torch._dynamo.reset()
    compiled = torch.compile(rope, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, (table, table)), rope(x, (table, table)))
    before = _host.reasons["diffusers"].copy()
    for other in (table.double(), table[:1]):
        assert torch.equal(compiled(x, (other, other)), x * other[None, :, None])
    reasons = _host.reasons["diffusers"] - before
    assert any("torch.float64" in reason for reason in reasons)
    assert len(reasons) == 2


@pytest.mark.slow
def test_regional_compilation() -> None:
    model, inputs = prepared(MODELS["FluxTransformer2DModel"])
    torch._dynamo.reset()
    with torch.no_grad():
        stock = forward(model, inputs)
        with integration.enable(model) as report:
            model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
            torch.testing.assert_close(forward(model, inputs), stock)
            assert report.calls["host"] == 0
            assert report.calls["fused"] > 0
        torch.testing.assert_close(forward(model, inputs), stock)  # the host's again, compiled again


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "name",
    [
        "HiDreamImageTransformer2DModel",
        "Kandinsky5Transformer3DModel",
        "LTX2VideoTransformer3DModel-split",
        "Lumina2Transformer2DModel",
        "WanTransformer3DModel",
    ],
)
def test_autocast(name, device) -> None:
    """Autocast does not cast the operations of a rope."""
    model, inputs = prepared(MODELS[name], device)
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        stock = forward(model, inputs)
        with integration.enable(model, fuse_norm=False) as report:
            assert torch.equal(forward(model, inputs), stock)
    assert report.calls == {"jitrope": MODELS[name].rotations, "host": 0}


def test_learned_tables_take_their_gradient() -> None:
    """Mochi's tables are parameters, which get their gradient."""
    model, inputs = prepared(MODELS["MochiTransformer3DModel"])
    forward(model, inputs).square().mean().backward()
    want, model.pos_frequencies.grad = model.pos_frequencies.grad, None
    with integration.enable(model) as report:
        forward(model, inputs).square().mean().backward()
    assert report.calls["jitrope"] > 0
    assert want.abs().sum() > 0
    torch.testing.assert_close(model.pos_frequencies.grad, want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))


# ---- the table of covered models -----------------------------------------------------------------------


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
    assert found == set(COVERAGE)


def names(code: CodeType) -> set[str]:
    """The names that code refers to, and the names of the functions in it."""
    nested = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return {*code.co_names, *(inner.co_name for inner in nested)}.union(*map(names, nested))


def test_every_class_that_calls_a_rope_function_is_covered() -> None:
    """Classes are found by the names of the rope functions that they call, directly or through another function."""
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
    assert found == set(SITES) | set(INLINE)


def test_every_covered_class_is_of_a_model() -> None:
    covered = {name for names in COVERAGE.values() for name in names}
    assert covered == set(SITES) | set(INLINE)


def test_the_zoo_has_every_model_of_the_table() -> None:
    assert {name.split("-")[0] for name in MODELS} | CONTROLNETS == set(COVERAGE)


def test_controlnets_made_of_covered_blocks() -> None:
    """ControlNets that are not in the zoo hold the processors of their transformers."""
    flux, _ = prepared(MODELS["FluxTransformer2DModel"])
    qwen, _ = prepared(MODELS["QwenImageTransformer2DModel"])
    hunyuan, _ = prepared(MODELS["HunyuanDiT2DModel"])
    cosmos, _ = prepared(MODELS["CosmosTransformer3DModel"])
    made = [
        getattr(diffusers, name).from_config({**model.config, "num_layers": 1, "_class_name": name})
        for name, model in {
            "FluxControlNetModel": flux,
            "QwenImageControlNetModel": qwen,
            "HunyuanDiT2DControlNetModel": hunyuan,
            "CosmosControlNetModel": cosmos,
        }.items()
    ]
    made += [diffusers.FluxMultiControlNetModel(made[:1]), diffusers.QwenImageMultiControlNetModel(made[1:2])]
    for model in made:
        with integration.enable(model) as report:
            assert set(report.replaced) <= set(COVERAGE[type(model).__name__])


def test_the_readme_has_the_table() -> None:
    page = Path(__file__).parent.parent / "jitrope" / "integrations" / "diffusers" / "README.md"
    assert table() in page.read_text()
