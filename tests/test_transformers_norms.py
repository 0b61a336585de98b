"""Norms in the launch of rope, in transformers: recognised modules, any use of what waits, and patches of users."""

from __future__ import annotations

import copy
import gc
import importlib
import itertools
import os
import pickle
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import jitrope
from jitrope.integrations import _host, _norms
from jitrope.integrations import transformers as integration

HOST = "pip install 'transformers>=5.17'"
if os.environ.get("CI"):  # CI has every host
    import transformers
else:
    transformers = pytest.importorskip("transformers", reason=f"the host library is not installed: {HOST}")

import transformers.models.gemma3.modeling_gemma3 as gemma3  # noqa: E402
import transformers.models.qwen3.modeling_qwen3 as modeling  # noqa: E402
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb  # noqa: E402  the layers below call it
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm  # noqa: E402

from . import transformers_zoo as zoo  # noqa: E402
from .hosts import doubled  # noqa: E402


@pytest.fixture(autouse=True)
def _stock() -> Iterator[None]:
    """After each test, no function is replaced."""
    assert not _host.placed
    yield
    integration.disable()
    assert not _host.placed


# ---- norms ---------------------------------------------------------------------------------------------


class Double(nn.Module):
    """A norm with another result."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return 2 * F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class FixedEps(Double):
    """A norm that does not use its eps."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, 1e-6)


class Grouped(Double):
    """A norm with an option, which must be the same in other modules."""

    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        rows = x.unflatten(-1, (self.groups, -1))
        return F.rms_norm(rows, rows.shape[-1:], None, self.eps).flatten(-2) * self.weight


class Plain(Double):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class RowsOf8(Double):
    """A norm that is RMSNorm for heads of 8 elements alone."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.unflatten(-1, (-1, 8))
        return F.rms_norm(rows, (8,), None, self.eps).flatten(-2) * self.weight


class Clipped(Plain):
    """A norm that clips large values."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clamp(-1000, 1000))


class Long(Plain):
    """A norm that is another one for many tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.shape[1] < 9999 else x


SCALE = 1.0


class Global(Plain):
    """A norm that reads a number, which may change."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * SCALE


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda *_: None)
    return module


UNKNOWN = "jitrope has no norm with its results"
OF_JIT = "a norm is scripted or traced by torch.jit"
RECOGNISED = {
    "torch": (lambda: nn.RMSNorm(8, 1e-5), "RMSNorm, rounded once"),
    "torch-default-eps": (lambda: nn.RMSNorm(8), "RMSNorm, rounded once"),
    "layer": (lambda: nn.LayerNorm(8), "LayerNorm, rounded once"),
    "layer-no-bias": (lambda: nn.LayerNorm(8, bias=False), "LayerNorm, rounded once"),
    "wide": (lambda: nn.LayerNorm(64), "LayerNorm, rounded once"),
    "qwen3": (lambda: Qwen3RMSNorm(16), "RMSNorm, rounded twice"),
    "plain": (Plain, "RMSNorm, rounded once"),
    "option": (Grouped, "RMSNorm, rounded twice"),
    "bf16": (lambda: Qwen3RMSNorm(16).bfloat16(), "RMSNorm, rounded twice"),
    "meta": (lambda: Qwen3RMSNorm(16).to("meta"), "RMSNorm, rounded twice"),
    "double": (Double, f"Double: {UNKNOWN}"),
    "fixed-eps": (FixedEps, f"FixedEps: {UNKNOWN}"),
    "groups": (lambda: Grouped(2), f"Grouped: {UNKNOWN}"),
    "rows-of-8": (RowsOf8, f"RowsOf8: {UNKNOWN}"),
    "clipped": (Clipped, f"Clipped: {UNKNOWN}"),
    "long": (Long, "Long: its code branches on the values or sizes of its arguments"),
    "global": (Global, "Global: it reads the global SCALE"),
    "linear": (lambda: nn.Linear(8, 8), "Linear: a norm's weight must have one axis"),
    "batch": (lambda: nn.BatchNorm1d(8), "BatchNorm1d has other parameters than a weight and a bias"),
    "identity": (nn.Identity, f"Identity: {UNKNOWN}"),
    "traced": (lambda: torch.jit.trace(nn.LayerNorm(8), torch.ones(8)), f"TopLevelTracedModule: {OF_JIT}"),
    "hooked": (lambda: hooked(Qwen3RMSNorm(16)), "Qwen3RMSNorm: a norm has hooks"),
}


@pytest.mark.parametrize("name", RECOGNISED)
def test_norms(name: str) -> None:
    make, what = RECOGNISED[name]
    module = make()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    assert str(_norms.recognise(module)) == what
    for key, value in module.state_dict().items():
        assert value.device.type == "meta" or torch.equal(value, before[key])


@pytest.mark.parametrize("mode", [lambda: torch.autocast("cpu", torch.bfloat16), FakeTensorMode, torch.inference_mode])
def test_enable_judges_outside_of_modes(mode: Any) -> None:
    model = zoo.language_model("qwen3", torch.bfloat16)
    with torch.no_grad():
        want = zoo.run(model)
        with mode():
            report = integration.enable(model)
        for _ in range(2):
            assert torch.equal(zoo.run(model), want)
    assert report.calls == {"jitrope": 0, "host": 0, "fused": 4}


# ---- uses of what waits --------------------------------------------------------------------------------


class Layer(nn.Module):
    """The parts of an attention; `use` is what a class does with them."""

    def __init__(self, use: Any, norm: Any = Qwen3RMSNorm, k_norm: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.use = use
        self.q_proj, self.k_proj = nn.Linear(16, 16), nn.Linear(16, 16)
        self.q_norm, self.k_norm = norm(8), (k_norm or norm)(8)
        for module in (self.q_norm, self.k_norm):
            module.weight.data = torch.randn(8)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        q, k = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in (self.q_proj(x), self.k_proj(x)))
        return self.use(self, q, k, cos, sin)

    def rope(self, *arguments: Any, **words: Any) -> Any:
        return apply_rotary_pos_emb(*arguments, **words)


def given() -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    return torch.randn(2, 6, 16), *torch.randn(2, 2, 6, 8)


def views(self: Layer, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    q = self.q_norm(q.transpose(1, 2)).transpose(1, 2)
    k = self.k_norm(k).reshape(2, 2, 3, 2, 8).flatten(2, 3)
    q, k = self.rope(q, k, cos=cos, sin=sin)
    return q.permute(0, 2, 1, 3).flatten(2), k


def views_of_results(self: Layer, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """LayerNorm's results are contiguous, and its inputs are not."""
    q, k = self.q_norm(q).view(4, 6, 8), self.k_norm(k).view(size=(4, 6, 8))
    return self.rope(q.view(2, 2, 6, 8), k.view(2, 2, 6, 8), cos, sin)


def swapped(self: Layer, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """The last axis, of 8 too, becomes another one."""
    q, k = (x.repeat(1, 1, 2, 1)[:, :, :8] for x in (q, k))
    cos, sin = (x.repeat(1, 2, 1)[:, :8] for x in (cos, sin))
    return self.rope(self.q_norm(q).transpose(2, 3), self.k_norm(k).transpose(2, 3), cos, sin)


def plain(self: Layer, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return self.rope(self.q_norm(q), self.k_norm(k), cos, sin)


def shapes(self: Layer, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    q, k = self.q_norm(q), self.k_norm(k)
    told = q.dim(), q.ndim, len(q), q.dtype, q.device, q.numel()
    assert q.shape == k.size() == (2, 2, 6, 8)
    assert told == (4, 4, 2, cos.dtype, cos.device, 192)
    return self.rope(q, k, cos, sin)


def in_place(self: Layer, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """The rotated tensors are changed."""
    q, k = self.rope(self.q_norm(q), self.k_norm(k), cos, sin)
    q *= 2
    k[..., 0] = 0
    return q, k


def between(self: Layer, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """The normalised tensors are changed, also through a view."""
    q, k = self.q_norm(q), self.k_norm(k)
    part = q.transpose(1, 2)
    q[..., 1] = 3
    k *= 2
    part.mul_(2)
    return self.rope(q, k, cos, sin)


def twice(self: Layer, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """The normalised tensors have another use."""
    q, k = self.q_norm(q), self.k_norm(k)
    turned = self.rope(q, k, cos, sin)
    return q + turned[0], torch.cat([k, k]), turned[1]


def functions(self: Layer, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """An autograd function and an op, which read memory, get the normalised tensors."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 3

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 3

    return Scaled.apply(self.q_norm(q)), torch.ops.aten.mul(self.k_norm(k), 2)


def change_after(self: Layer, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """The normalised q is changed after the call."""
    q = self.q_norm(q)
    turned = self.rope(q, self.k_norm(k), cos, sin)
    return turned, q.detach().mul_(2)


def no_grad(self: Layer, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """The norms have no gradient."""
    with torch.no_grad():
        q, k = self.q_norm(q), self.k_norm(k)
    return self.rope(q, k, cos, sin)


def sliced(self: Layer, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    q, k = self.q_norm(q), self.k_norm(k)
    return self.rope(q[..., :8], k[..., :8], cos, sin)


def last(self: Layer, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """The norms come last."""
    q, k = self.rope(q, k, cos, sin)
    return self.q_norm(q), self.k_norm(k)


def last_and_more(self: Layer, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """The results of the rotation have another use, too."""
    q, k = self.rope(q, k, cos, sin)
    return self.q_norm(q), q * 2, self.k_norm(k), k.transpose(1, 2) + 1


def eps(_: int) -> nn.Module:
    return Qwen3RMSNorm(8, 1e-2)


USES = {  # the launches of four calls
    "views": (Layer(views), 4),
    "views-of-results": (Layer(views_of_results, nn.LayerNorm), 0),
    "swapped": (Layer(swapped), 0),
    "plain": (Layer(plain), 4),
    "shapes": (Layer(shapes), 4),
    "in-place": (Layer(in_place), 4),
    "between": (Layer(between), 0),
    "twice": (Layer(twice), 4),
    "functions": (Layer(functions), 0),
    "change-after": (Layer(change_after), 4),
    "no-grad": (Layer(no_grad), 0),
    "sliced": (Layer(sliced), 0),
    "last": (Layer(last), 3),
    "last-and-more": (Layer(last_and_more), 3),
    "two-eps": (Layer(plain, k_norm=eps), 0),
}


@pytest.mark.parametrize("name", USES)
def test_uses(name: str) -> None:
    """Any use of the tensors gives the host's bits and gradients, in the first calls and later."""

    def results(layer: Any) -> Any:
        flat = torch.utils._pytree.tree_leaves(layer(*given()))
        layer.zero_grad()
        if any(x.requires_grad for x in flat):
            sum((x.sum() for x in flat if x.requires_grad), torch.zeros(())).backward()
        return flat, [p.grad for p in layer.parameters()]

    layer, fused = USES[name]
    want, grads = results(layer)
    with integration.enable(layer) as report:
        for _ in range(4):
            got, found = results(layer)
            assert len(got) == len(want)
            assert all(map(torch.equal, got, want))
            assert [x.requires_grad for x in got] == [x.requires_grad for x in want]
            assert all(type(x) is Tensor for x in got)
            for a, b in zip(found, grads):
                assert (a is None) == (b is None)
                if a is not None:
                    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert report.calls["fused"] == fused, report.reasons


def test_a_change_in_between_is_an_error() -> None:
    """What waits must not be computed from other values."""

    def buffer(self: Layer, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        q, k = q.detach().clone(), k.detach()
        normed, other = self.q_norm(q), self.k_norm(k)
        if changes:
            q.zero_()
        return self.rope(normed, other, cos, sin)

    layer, changes = Layer(buffer), False
    with integration.enable(layer):
        layer(*given())
        changes = True
        with pytest.raises(RuntimeError, match=r"q or k was changed in place between its norm and rope; .* fuse_norm="):
            layer(*given())


def test_a_second_derivative_is_an_error_that_says_what_to_do() -> None:
    layer = Layer(plain)
    with integration.enable(layer):
        q, _ = layer(*given())
        (grad,) = torch.autograd.grad(q.sum(), layer.q_norm.weight, create_graph=True)
        with pytest.raises(jitrope.JitropeError, match=r"no second derivative.*fuse_norm=False"):
            grad.sum().backward()


@pytest.mark.parametrize("fuse_norm", [False, True])
def test_torch_fx(fuse_norm: bool) -> None:
    """A layer that torch.fx traces is the host's."""

    class Traced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_norm, self.k_norm = Qwen3RMSNorm(8), Qwen3RMSNorm(8)

        def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
            return apply_rotary_pos_emb(self.q_norm(q), self.k_norm(k), cos, sin)

    layer, arguments = Traced(), (*torch.randn(2, 2, 2, 6, 8), *torch.randn(2, 2, 6, 8))
    want = layer(*arguments)
    with integration.enable(layer, fuse_norm=fuse_norm):
        traced = torch.fx.symbolic_trace(layer)
    assert all(map(torch.equal, traced(*arguments), want))


# ---- around the layers ---------------------------------------------------------------------------------


@pytest.fixture
def qwen3() -> nn.Module:
    return zoo.language_model("qwen3")


def out(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return zoo.run(model)


def test_report(qwen3: nn.Module) -> None:
    with integration.enable(qwen3) as report:
        name = "transformers.models.qwen3.modeling_qwen3.Qwen3Attention"
        assert report.attention == {name: "norm and rope fused (RMSNorm, rounded twice)"}
        assert f"{name}: norm and rope fused" in report.table()
        assert str(report).startswith("2 functions replaced, norm and rope fused in 1 attention class; 0 calls since")
        with integration.enable(qwen3) as again:  # changes nothing, and undoes nothing
            assert again.attention == report.attention
        assert len(_host.placed) == 2
    assert not _host.placed


def test_norms_elsewhere_are_reported() -> None:
    """Norms of latents wait in the first calls, in vain."""
    model = zoo.language_model("deepseek_v3")
    want = out(model)
    with integration.enable(model) as report:
        for _ in range(4):
            assert torch.equal(out(model), want)
        (what,) = report.attention.values()
    assert what == "rope only: its norms are not directly before or after rope"
    assert report.calls == {"jitrope": 8, "host": 0}


def test_rope_alone(qwen3: nn.Module) -> None:
    want = out(qwen3)
    with integration.enable(qwen3, fuse_norm=False) as report:
        assert torch.equal(out(qwen3), want)
    assert report.calls == {"jitrope": 2, "host": 0}
    assert not report.attention


def test_an_error_undoes_enable(qwen3: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integration, "fuse", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        integration.enable(qwen3)
    assert not _host.placed


def test_models_hold_nothing_of_jitrope(qwen3: nn.Module) -> None:
    want = out(qwen3)
    keys = [set(vars(module)) for module in qwen3.modules()]
    integration.enable(qwen3)
    for _ in range(2):
        assert torch.equal(out(qwen3), want)
    assert [set(vars(module)) for module in qwen3.modules()] == keys
    assert b"jitrope" not in pickle.dumps(qwen3)
    others = pickle.loads(pickle.dumps(qwen3)), copy.deepcopy(qwen3), copy.copy(qwen3)
    assert all(torch.equal(out(other), want) for other in others)
    integration.disable(zoo.language_model("gemma3"))
    assert _host.placed
    integration.disable(qwen3)
    assert not _host.placed
    assert all(torch.equal(out(other), want) for other in (qwen3, *others))


def test_threads_enable_models_of_one_class(qwen3: nn.Module) -> None:
    models, forward = [qwen3, *[copy.deepcopy(qwen3) for _ in range(3)]], Qwen3RMSNorm.forward
    for _ in range(5):
        ready = threading.Barrier(len(models))
        threads = [threading.Thread(target=lambda m: (ready.wait(), integration.enable(m)), args=(m,)) for m in models]  # noqa: B023
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert Qwen3RMSNorm.forward is not forward
        integration.disable()
        assert Qwen3RMSNorm.forward is forward


@pytest.mark.parametrize("family", ["qwen3", "hunyuan_v1_dense"])
def test_enable_and_disable_in_the_midst_of_a_forward(family: str) -> None:
    model = zoo.language_model(family)
    steps = itertools.cycle([integration.disable, lambda: integration.enable(model)])
    want = out(model)
    for layer in model.model.layers:
        for module in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.o_proj):
            module.register_forward_pre_hook(lambda *_: next(steps)() and None)
    assert all(torch.equal(out(model), want) for _ in range(4))


@pytest.mark.parametrize("cause", ["autocast", "hook"])
def test_a_norm_that_is_not_fused_is_a_reason(
    qwen3: nn.Module, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    """The log says, as the report does, that only the norms are the host's."""
    monkeypatch.setitem(_host.reasons, "transformers", Counter())
    why = {"autocast": "autocast may change the norm", "hook": "a norm has hooks"}[cause]
    with integration.enable(qwen3) as report, torch.autocast("cpu", torch.bfloat16, cause != "hook"):
        for layer in qwen3.model.layers if cause == "hook" else ():
            hooked(layer.self_attn.q_norm)
            hooked(layer.self_attn.k_norm)
        out(qwen3)
    assert report.calls == {"jitrope": 2, "host": 0}
    assert report.reasons == {f"not fused: {why}": 4}
    assert [x.getMessage() for x in caplog.records] == [f"jitrope: norms left to transformers: not fused: {why}"]


def test_tensors_are_let_go(qwen3: nn.Module) -> None:
    """Attention runs without the tensors before the norm, as in the host's code."""
    alive, made = [], []
    attention = qwen3.model.layers[0].self_attn
    attention.q_proj.register_forward_hook(lambda _, __, out: made.append(weakref.ref(out)) and None)
    attention.o_proj.register_forward_pre_hook(lambda *_: alive.append(made[-1]()))
    gc.disable()
    try:
        with integration.enable(qwen3):
            for _ in range(2):
                out(qwen3)
    finally:
        gc.enable()
    assert alive == [None, None]


def test_norms_that_are_not_rotated_hold_no_graph() -> None:
    """Their first calls are kept from checkpoints, with their gradients, a second derivative too, and no longer."""
    layer = Layer(lambda self, q, k, *_: (self.q_norm(q), self.k_norm(k)))
    x, *tables = given()

    def second(layer: nn.Module) -> Tensor:
        y = x.clone().requires_grad_()
        made.append(weakref.ref(y))
        grads = torch.autograd.grad(layer(y, *tables)[0].sin().sum(), (y, layer.q_norm.weight), create_graph=True)
        return torch.autograd.grad(sum(grad.square().sum() for grad in grads), layer.q_norm.weight)[0]

    made: list[Any] = []
    want = second(layer)
    with integration.enable(layer):
        for _ in range(4):
            assert torch.equal(second(layer), want)
            y = x.clone().requires_grad_()
            made.append(weakref.ref(y))
            layer(y, *tables)  # without a backward, which would free what is saved
            del y
    assert [y() for y in made] == [None] * 9


# ---- changes that users make after enable --------------------------------------------------------------


@pytest.mark.parametrize(
    ("holder", "name"),
    [
        (modeling, "apply_rotary_pos_emb"),
        (Qwen3RMSNorm, "forward"),
        (modeling.Qwen3Attention, "forward"),
        (gemma3.Gemma3RMSNorm, "_norm"),
        (gemma3, "rotate_half"),
    ],
)
def test_a_patch_after_enable(holder: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of what a norm's forward or a rope function calls."""
    model = zoo.language_model("gemma3" if "emma3" in holder.__name__ else "qwen3")
    with monkeypatch.context() as patch:
        patch.setattr(holder, name, doubled(getattr(holder, name)))
        want = out(model)
    with integration.enable(model) as report:
        fused = [out(model), out(model)][1]
        monkeypatch.setattr(holder, name, doubled(getattr(holder, name)))
        for _ in range(5):
            torch.testing.assert_close(out(model), want)
        monkeypatch.undo()
        before = report.calls["fused"]
        assert torch.equal(out(model), fused)
        assert report.calls["fused"] == before + 2


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
def test_norms_of_one_class_with_other_arithmetic(qwen3: nn.Module, by_config: bool) -> None:
    for i, layer in enumerate(qwen3.model.layers):
        layer.self_attn.q_norm, layer.self_attn.k_norm = Norm(i, by_config), Norm(i, by_config)
    qwen3.model.layers[0].self_attn.q_norm.only_here = 1.0
    want = out(qwen3)
    with integration.enable(qwen3) as report:
        for _ in range(2):
            torch.testing.assert_close(out(qwen3), want)
    assert report.calls["fused"] >= 2


class Scaled(Qwen3RMSNorm):
    """A norm with what a user may add: a scale, and a gain in a buffer; in training it doubles its result."""

    doubles = False

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) * getattr(self, "scale", 1.0)
        y = y * self.gain if hasattr(self, "gain") else y
        return 2 * y if self.doubles and self.training else y


@pytest.mark.parametrize("name", ["scale", "gain", "eps", "weight"])
def test_what_is_changed_in_a_norm_after_enable(qwen3: nn.Module, name: str) -> None:
    for layer in qwen3.model.layers:
        layer.self_attn.q_norm.__class__ = Scaled
    norm = qwen3.model.layers[1].self_attn.q_norm
    with integration.enable(qwen3) as report:
        fused = [out(qwen3), out(qwen3)][1]
        assert report.calls["fused"] == 4
        if name == "gain":
            norm.register_buffer(name, torch.tensor(3.0))
        elif name == "eps":
            norm.variance_epsilon = 0.5
        elif name == "weight":
            norm.weight = nn.Parameter(torch.randn(8))
        else:
            setattr(norm, name, 3.0)
        got = out(qwen3)
    torch.testing.assert_close(got, out(qwen3))
    assert not torch.allclose(got, fused)


def test_a_norm_with_other_results_in_training(qwen3: nn.Module) -> None:
    for layer in qwen3.model.layers:
        layer.self_attn.q_norm.__class__ = Scaled
        layer.self_attn.q_norm.doubles = True
    want = out(qwen3.train())
    with integration.enable(qwen3.eval()) as report:
        qwen3.train()
        torch.testing.assert_close(out(qwen3), want)
    assert report.calls["fused"] == 0


def test_hooks_of_all_modules(qwen3: nn.Module) -> None:
    seen = []

    def hook(module: Any, arguments: Any, result: Any) -> Any:
        if isinstance(module, Qwen3RMSNorm) and module.weight.numel() == 8:
            seen.append(module)
            return 2 * result
        return None

    with integration.enable(qwen3):
        fused = [out(qwen3), out(qwen3)][1]
        handle = nn.modules.module.register_module_forward_hook(hook)
        got = out(qwen3)
        handle.remove()
        assert len(seen) == 4
        assert torch.equal(out(qwen3), fused)
    handle = nn.modules.module.register_module_forward_hook(hook)
    torch.testing.assert_close(got, out(qwen3))
    handle.remove()


def test_models_of_one_class() -> None:
    """The report is of this model's norms; those of a known form are fused."""
    first, second, third = (zoo.language_model("qwen3") for _ in range(3))
    for layer in second.model.layers:
        layer.self_attn.q_norm = layer.self_attn.k_norm = Double()
    for layer in third.model.layers:
        del layer.self_attn.q_norm
        layer.self_attn.q_norm = lambda x: 2 * x
    models = first, second, third
    want = [out(model) for model in models]
    told = [integration.enable(model).attention.popitem()[1] for model in models]
    assert told[0].startswith("norm and rope fused (RMSNorm")
    assert told[1].startswith("rope only: ")
    for _ in range(2):
        for model, logits in zip(models, want):
            torch.testing.assert_close(out(model), logits)


# ---- what a rope function reads ------------------------------------------------------------------------

REMOTE = """
import math, torch
from torch import nn
from transformers.models.llama.modeling_llama import rotate_half
SCALE = 1.0
def helper(x):
    return x * SCALE
def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    LINE
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
class Attention(nn.Module):
    def forward(self, q, k, cos, sin):
        return apply_rotary_pos_emb(q, k, cos, sin)
"""
LINES = {
    "q = q * math.log(q.shape[-2], 16) if q.shape[-2] > 16 else q": "none of jitrope's|branches on the values or sizes",
    "q = q if q.shape[-2] < 9999 else 2 * q": "branches on the values or sizes",
    "q = 2 * q if q.abs().max() > 1e30 else q": "branches on the values or sizes",
    "q, k = q.clamp(-8, 8), k.clamp(-8, 8)": "others for other numbers of tokens or larger values",
    "q = q * max(1, q.shape[-2] // 4096)": "branches on the values or sizes",
    "q = q * (q.shape[-2] // 64 + 1)": "others for other numbers of tokens or larger values",
    "q = q * SCALE": "reads the global SCALE",
    "q = helper(q)": "reads the global SCALE",
}


@pytest.mark.parametrize("line", LINES)
def test_a_rope_function_that_is_not_seen_whole(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"remote_{[*LINES].index(line)}"
    (tmp_path / f"{name}.py").write_text(REMOTE.replace("LINE", line))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(jitrope.JitropeError, match=LINES[line]):
        integration.enable(importlib.import_module(name).Attention())
    sys.modules.pop(name)


def test_a_file_that_is_edited_after_its_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loaded code runs, not that of the disk."""
    import linecache

    text = REMOTE.replace("LINE", "pass").replace(
        "return apply_rotary_pos_emb(q", "return (lambda: 1.0)(), apply_rotary_pos_emb(q"
    )
    path = tmp_path / "edited.py"
    path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    layer = importlib.import_module("edited").Attention()
    path.write_text(text.replace("1.0)()", "7.0)()"))
    os.utime(path, (9e9, 9e9))
    linecache.checkcache()
    with integration.enable(layer):
        assert layer(*torch.randn(2, 1, 2, 5, 8), *torch.randn(2, 1, 5, 8))[0] == 1.0
    sys.modules.pop("edited")
