"""Changes that users make in a host's models around `enable`: they have the effect that they have without jitrope."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from . import diffusion_zoo as zoo
from .hosts import doubled, missing

diffusers = pytest.importorskip("diffusers", reason="pip install diffusers")

from diffusers.models.transformers import transformer_flux as flux  # noqa: E402

from jitrope.integrations import _host  # noqa: E402
from jitrope.integrations import diffusers as on_diffusers  # noqa: E402
from jitrope.integrations import xfuser as on_xdit  # noqa: E402


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield
    gc.collect()
    assert not _host.placed


def of_diffusers(name: str) -> tuple[Any, Any]:
    if name not in zoo.MODELS:
        missing("pip install -U diffusers")
    return zoo.prepared(zoo.MODELS[name])


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
