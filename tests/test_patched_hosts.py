"""Changes that users make in a host's models around `enable`: they have the effect that they have without jitrope."""

from __future__ import annotations

import gc
import linecache
import sys
import types
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .devices import slow
from .hosts import doubled, missing

transformers = pytest.importorskip("transformers", reason="pip install transformers")
diffusers = pytest.importorskip("diffusers", reason="pip install diffusers")

import transformers.models.qwen3.modeling_qwen3 as qwen3  # noqa: E402
from diffusers.models.transformers import transformer_flux as flux  # noqa: E402

from jitrope.integrations import _host  # noqa: E402
from jitrope.integrations import diffusers as on_diffusers  # noqa: E402
from jitrope.integrations import transformers as on_transformers  # noqa: E402
from jitrope.integrations import xfuser as on_xdit  # noqa: E402

from . import diffusion_zoo as zoo  # noqa: E402


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield
    on_transformers.disable()
    gc.collect()
    assert not _host.placed


class Qwen3:
    """A small model with random weights."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = transformers.Qwen3Config(**sizes, head_dim=8, num_hidden_layers=2, vocab_size=64)
        self.model = transformers.Qwen3ForCausalLM(config).eval()
        for p in self.model.parameters():
            p.data = 0.2 * torch.randn(p.shape)
        self.layers = [layer.self_attn for layer in self.model.model.layers]

    def __call__(self) -> Tensor:
        return self.model(input_ids=torch.tensor([[5, 9, 17, 33, 3, 8, 21, 40]])).logits


def of_diffusers(name: str) -> tuple[Any, Any]:
    if name not in zoo.MODELS:
        missing("pip install -U diffusers")
    return zoo.prepared(zoo.MODELS[name])


# ---- transformers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["apply_rotary_pos_emb", "Qwen3RMSNorm.forward"])
def test_a_patch_after_enable(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, (place, _, last) = Qwen3(), name.rpartition(".")
    holder = getattr(qwen3, place) if place else qwen3
    with monkeypatch.context() as patch:
        patch.setattr(holder, last, doubled(getattr(holder, last)))
        want = run()
    with on_transformers.enable(run.model) as report:
        fused = run()
        monkeypatch.setattr(holder, last, doubled(getattr(holder, last)))
        torch.testing.assert_close(run(), want)
        assert report.calls["fused"] == 2
        assert report.reasons.total() > 0
        monkeypatch.undo()
        assert torch.equal(run(), fused)
        assert report.calls["fused"] == 4


class Config:
    def __init__(self, offset: float) -> None:
        self.offset = offset


class Norm(nn.Module):
    """An RMSNorm whose weights have an offset: in an attribute, of the class if it is 0, or in a configuration."""

    _offset = 0

    def __init__(self, offset: float, by_config: bool) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(0.2 * torch.randn(8)), 1e-6
        if by_config:
            self.config = Config(offset)
        elif offset:
            self._offset = offset

    def forward(self, x: Tensor) -> Tensor:
        offset = self.config.offset if hasattr(self, "config") else self._offset
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * (self.weight.float() + offset)).to(x.dtype)


@pytest.mark.parametrize("by_config", [False, True])
def test_norms_of_one_class_with_other_arithmetic(by_config: bool) -> None:
    run = Qwen3()
    for i, layer in enumerate(run.layers):
        layer.q_norm = Norm(i, by_config)
        layer.k_norm = Norm(i, by_config)
    run.layers[0].q_norm.only_here = 1.0
    want = run()
    with on_transformers.enable(run.model) as report:
        torch.testing.assert_close(run(), want)
    assert report.calls["fused"] >= 1


class Scaled(qwen3.Qwen3RMSNorm):
    """A norm with what a user may add: a scale, and a gain in a buffer; in training it doubles its result."""

    doubles = False

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) * getattr(self, "scale", 1.0)
        y = y * self.gain if hasattr(self, "gain") else y
        return 2 * y if self.doubles and self.training else y


@pytest.mark.parametrize(("name", "compiled"), [("scale", False), ("gain", False), slow("gain", True)])
def test_what_is_added_to_a_norm_after_enable(name: str, compiled: bool) -> None:
    run = Qwen3()
    for layer in run.layers:
        layer.q_norm.__class__ = Scaled
    norm = run.layers[1].q_norm
    with on_transformers.enable(run.model) as report:
        fused = run()
        assert report.calls["fused"] == 2
        if compiled:
            run.model.compile(backend="eager", fullgraph=True)
            torch.testing.assert_close(run(), fused)
        norm.register_buffer(name, torch.tensor(3.0)) if name == "gain" else setattr(norm, name, 3.0)
        got = run()
        assert report.reasons == {"not fused: q_norm is another Scaled than in the model that was enabled": 1}
    run.model._compiled_call_impl = None
    torch.testing.assert_close(got, run())
    assert not torch.allclose(got, fused)


def test_a_norm_with_other_results_in_training() -> None:
    run = Qwen3()
    for layer in run.layers:
        layer.q_norm.__class__ = Scaled
        layer.q_norm.doubles = True
    want = run.model.train() and run()
    with on_transformers.enable(run.model.eval()) as report:
        run.model.train()
        torch.testing.assert_close(run(), want)
    assert report.calls["fused"] == 0


class Unknown(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.tanh()


def test_a_second_model_of_the_class() -> None:
    """The report is of this model's norms; those of a known form are fused."""
    first, second, third = Qwen3(), Qwen3(), Qwen3()
    for layer in second.layers:
        layer.q_norm = layer.k_norm = Unknown()
    for layer in third.layers:
        layer.q_norm, layer.k_norm = Norm(2.0, False), Norm(2.0, False)
    want = [run() for run in (first, second, third)]
    reports = [on_transformers.enable(run.model).table() for run in (first, second, third)]
    told = [report.splitlines()[1].partition("Attention: ")[2] for report in reports]
    assert told[0].startswith("norm and rope fused (RMSNorm")
    assert told[1].startswith("rope only: Unknown")
    assert told[2].startswith("rope only: Norm")  # jitrope has no norm of 2 + weight
    for run, out in zip((first, second, third), want):
        torch.testing.assert_close(run(), out)


def test_hooks_of_all_modules() -> None:
    run, seen = Qwen3(), []

    def hook(module: Any, arguments: Any, out: Any) -> Any:
        if isinstance(module, qwen3.Qwen3RMSNorm) and out.shape[-1] == 8:
            seen.append(module)
            return 2 * out
        return None

    with on_transformers.enable(run.model):
        fused = run()
        handle = nn.modules.module.register_module_forward_hook(hook)
        got = run()
        handle.remove()
        assert len(seen) == 4
        assert torch.equal(run(), fused)
    handle = nn.modules.module.register_module_forward_hook(hook)
    torch.testing.assert_close(got, run())
    handle.remove()


@pytest.mark.parametrize("strict", [False, slow(True)])
def test_an_export_has_the_norms(strict: bool) -> None:
    run = Qwen3()
    words = {"input_ids": torch.tensor([[5, 9, 17, 33]]), "use_cache": False}
    with on_transformers.enable(run.model) as report:
        program = torch.export.export(run.model, (), words, strict=strict)
        assert (report.calls["fused"], report.reasons) == (2, {})
        want = run.model(**words).logits
    torch.testing.assert_close(program.module()(**words).logits, want)


def test_a_class_that_is_defined_again() -> None:
    """As by a cell of a notebook that runs twice; the older model goes on."""
    code = """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.NORM_q, self.NORM_k = host.Qwen3RMSNorm(8), host.Qwen3RMSNorm(8)
    def forward(self, x, cos, sin):
        q, k = self.NORM_q(x).transpose(1, 2), self.NORM_k(0.5 * x).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return q @ k.transpose(2, 3)
"""
    names = types.ModuleType("transformers_modules.cells")
    vars(names).update(nn=nn, host=qwen3, apply_rotary_pos_emb=qwen3.apply_rotary_pos_emb)
    made = []
    for number, label in enumerate(("first", "second")):
        file, text = f"<cell {number}>", code.replace("NORM", label)
        linecache.cache[file] = (len(text), None, text.splitlines(True), file)
        exec(compile(text, file, "exec"), vars(names))
        vars(names)["Attention"].__module__ = names.__name__
        made.append(vars(names)["Attention"]())
    given = torch.randn(1, 3, 2, 8), torch.randn(1, 3, 8), torch.randn(1, 3, 8)
    want = [layer(*given) for layer in made]
    sys.modules[names.__name__] = names
    try:
        for layer in made:
            on_transformers.enable(layer)
        for layer, out in zip(made, want):
            torch.testing.assert_close(layer(*given), out)
    finally:
        on_transformers.disable()
        del sys.modules[names.__name__]


# ---- diffusers -----------------------------------------------------------------------------------------


class Kept(nn.Module):
    """A projection that keeps its result for the next steps."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear, self.out = linear, None

    def forward(self, x: Tensor) -> Tensor:
        if self.out is None:
            self.out = self.linear(x)
        return self.out


def forget(linear: nn.Module) -> nn.Module:
    """The same by an own `forward`."""
    kept, forward = [], linear.forward
    linear.forward = lambda x: kept[0] if kept else kept.append(forward(x)) or kept[0]
    return linear


@pytest.mark.parametrize("keep", [Kept, forget])
@pytest.mark.parametrize("name", ["WanTransformer3DModel", "FluxTransformer2DModel"])
def test_a_projection_that_keeps_its_result(name: str, keep: Any) -> None:
    steps = []
    for on in (False, True):
        model, inputs = of_diffusers(name)
        for module in list(model.modules()):
            if isinstance(getattr(module, "to_k", None), nn.Linear):
                module.to_k = keep(module.to_k)
        if on:
            on_diffusers.enable(model)
        steps.append([zoo.forward(model, inputs) for _ in range(2)])
    for a, b in zip(*steps):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("fuse_norm", [False, True])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("what", ["rope", "norm"])
def test_a_patch_of_diffusers(what: str, first: bool, fuse_norm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before or after `enable`."""
    model, inputs = of_diffusers("FluxTransformer2DModel")
    place, name = (flux, "apply_rotary_emb") if what == "rope" else (nn.RMSNorm, "forward")
    with monkeypatch.context() as patch:
        patch.setattr(place, name, doubled(getattr(place, name)))
        want = zoo.forward(model, inputs)
        if first:
            if what == "rope":
                with pytest.raises(_host.JitropeError, match=f"its rope function is {doubled.__module__}'s"):
                    on_diffusers.enable(model, fuse_norm=fuse_norm)
                return
            on_diffusers.enable(model, fuse_norm=fuse_norm)
            torch.testing.assert_close(zoo.forward(model, inputs), want)
            return
    with on_diffusers.enable(model, fuse_norm=fuse_norm) as report:
        fused = zoo.forward(model, inputs)
        with monkeypatch.context() as patch:
            patch.setattr(place, name, doubled(getattr(place, name)))
            torch.testing.assert_close(zoo.forward(model, inputs), want)
        assert torch.equal(zoo.forward(model, inputs), fused)
    assert report.reasons.total() > 0 or (what == "norm" and not fuse_norm)


def test_processors_that_the_host_makes_later_are_restored() -> None:
    model, inputs = of_diffusers("FluxTransformer2DModel")
    want = {name: type(x) for name, x in model.attn_processors.items()}
    with on_diffusers.enable(model) as report:
        model.set_attn_processor({name: type(x)() for name, x in model.attn_processors.items()})
        zoo.forward(model, inputs)
        assert report.calls["fused"] > 0
        assert "(disabled)" not in repr(report)
    assert {name: type(x) for name, x in model.attn_processors.items()} == want
    assert "(disabled)" in repr(report)


def test_a_callable_in_place_of_rope(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = of_diffusers("FluxTransformer2DModel")
    monkeypatch.setattr(flux, "apply_rotary_emb", partial(doubled(flux.apply_rotary_emb)))
    with pytest.raises(_host.JitropeError, match="its rope function is functools's"):
        on_diffusers.enable(model)


def test_a_patch_of_a_rope_that_a_model_does_not_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wan's rope is in its processor, and `embeddings` has another one of its name."""
    from diffusers.models import embeddings

    model, inputs = of_diffusers("WanTransformer3DModel")
    want = zoo.forward(model, inputs)
    monkeypatch.setattr(embeddings, "apply_rotary_emb", doubled(embeddings.apply_rotary_emb))
    with on_diffusers.enable(model) as report:
        torch.testing.assert_close(zoo.forward(model, inputs), want)
        assert report.calls["fused"] > 0


def test_a_model_that_was_enabled_beside_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """xDiT's drop-in replaces a rope function of diffusers, which is the host's again afterwards."""
    monkeypatch.setitem(sys.modules, "xfuser", types.ModuleType("xfuser"))
    model, inputs = of_diffusers("FluxTransformer2DModel")
    with on_xdit.enable(), on_diffusers.enable(model):
        want = zoo.forward(model, inputs)
    with on_diffusers.enable(model) as report:
        torch.testing.assert_close(zoo.forward(model, inputs), want)
        assert report.calls["fused"] > 0
        assert not report.reasons
