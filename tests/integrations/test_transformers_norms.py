"""Norms in the launch of rope, in transformers: recognised modules, any use of what waits, and patches of users."""

from __future__ import annotations

import gc
import importlib.util
import linecache
import os
import sys
import weakref
from collections import Counter
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import jitrope
from jitrope.integrations import _host, _norms
from jitrope.integrations import transformers as integration

from ..devices import slow
from ..hosts import doubled
from . import transformers_zoo as zoo

gemma3, modeling = zoo.modeling("gemma3"), zoo.modeling("qwen3")
Qwen3RMSNorm = modeling.Qwen3RMSNorm
apply_rotary_pos_emb = zoo.modeling("llama").apply_rotary_pos_emb  # the layers below call it


HOOKED = Qwen3RMSNorm(16)
HOOKED.register_forward_hook(lambda *_: None)
UNKNOWN = "is no norm that jitrope knows, or was changed"
NORMS: list[tuple[Any, str]] = [
    *[(nn.RMSNorm(8, 1e-5), "RMSNorm, rounded once"), (nn.LayerNorm(8), "LayerNorm, rounded once")],
    *[(Qwen3RMSNorm(16), "RMSNorm, rounded twice"), (gemma3.Gemma3RMSNorm(16), "RMSNorm of 1 + weight, rounded once")],
    (type("Derived", (nn.LayerNorm,), {})(8), "LayerNorm, rounded once"),
    (nn.LayerNorm((2, 8), elementwise_affine=False), "a norm's weight must be a parameter with one axis"),
    *[(nn.Linear(8, 8), "a norm's weight must be a parameter with one axis"), (nn.Identity(), f"Identity {UNKNOWN}")],
    (type("Mine", (Qwen3RMSNorm,), {"forward": lambda self, x: x})(16), f"Mine {UNKNOWN}"),
    (torch.jit.trace(nn.LayerNorm(8), torch.ones(8)), "a norm is scripted or traced by torch.jit"),
    (HOOKED, "a norm has hooks"),
]


@pytest.mark.parametrize(("norm", "what"), NORMS)
def test_norms(norm: nn.Module, what: str) -> None:
    try:
        told = str(_norms.form_of(norm))
    except jitrope.InvalidInput as error:
        told = error.args[0]
    assert told == what


@pytest.mark.parametrize("mode", [lambda: torch.autocast("cpu", torch.bfloat16), FakeTensorMode, torch.inference_mode])
def test_enable_judges_outside_of_modes(mode: Any) -> None:
    model = zoo.language_model("qwen3", torch.bfloat16)
    want = zoo.run(model)
    with mode():
        report = integration.enable(model)
    for _ in range(2):
        assert torch.equal(zoo.run(model), want)
    assert report.calls == {"jitrope": 0, "host": 0, "fused": 4}


# ---- uses of what waits --------------------------------------------------------------------------------

AFTER = ("views", "swapped", "last and more", "rotated without grad", "not rotated", "changed")
"""The uses that call the norms; else they come first."""


class Layer(nn.Module):
    """The parts of an attention, and a use of q and k, which its norms have made or which are normalised here."""

    def __init__(self, use: str, norm: Any = Qwen3RMSNorm, k_norm: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.use = use
        self.q_proj, self.k_proj = nn.Linear(16, 16), nn.Linear(16, 16)
        self.q_norm, self.k_norm = norm(8), (k_norm or norm)(8)
        for module in (self.q_norm, self.k_norm):
            module.weight.data = torch.randn(8)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        q, k = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in (self.q_proj(x), self.k_proj(x)))
        q, k = (q, k) if self.use in AFTER else (self.q_norm(q), self.k_norm(k))
        t = cos, sin
        rope, fewer = apply_rotary_pos_emb, partial(checkpoint, torch.mul, use_reentrant=True)
        match self.use:
            case "" | "plain" | "two eps":
                return rope(q, k, *t)
            case "views":
                q = self.q_norm(q.transpose(1, 2)).transpose(1, 2)
                k = self.k_norm(k).reshape(2, 2, 3, 2, 8).flatten(2, 3)
                assert q.shape == k.size() == (2, 2, 6, 8)
                assert (q.dim(), q.ndim, len(q), q.numel()) == (4, 4, 2, 192)
                assert (q.dtype, q.device) == (cos.dtype, cos.device)
                q, k = rope(q, k, cos=cos, sin=sin)
                return q.permute(0, 2, 1, 3).flatten(2), k
            case "views of results":  # LayerNorm's results are contiguous, and its inputs are not
                q, k = q.view(4, 6, 8), k.view(size=(4, 6, 8))
                return rope(q.view(2, 2, 6, 8), k.view(2, 2, 6, 8), *t)
            case "swapped":  # the last axis, of 8 too, becomes another one
                q, k = (x.repeat(1, 1, 2, 1)[:, :, :8] for x in (q, k))
                cos, sin = (x.repeat(1, 2, 1)[:, :8] for x in t)
                return rope(self.q_norm(q).transpose(2, 3), self.k_norm(k).transpose(2, 3), cos, sin)
            case "between":  # the normalised tensors are changed, also through a view
                part = q.transpose(1, 2)
                q[..., 1] = 3
                k *= 2
                part.mul_(2)
                return rope(q, k, *t)
            case "twice":  # the normalised tensors have another use, and q is changed after the call
                turned = rope(q, k, *t)
                return q + turned[0], torch.cat([k, k]), turned[1], q.detach().mul_(2)
            case "functions":  # an autograd function and an op, which read memory, get the normalised tensors
                return fewer(q, 3), torch.ops.aten.mul(k, 2)
            case "sliced":
                return rope(q[..., :8], k[..., :8], *t)
            case "last and more":  # the results of the rotation have another use, too
                q, k = rope(q, k, *t)
                return self.q_norm(q), q * 2, self.k_norm(k), k.transpose(1, 2) + 1
            case "rotated without grad":
                with torch.no_grad():
                    q, k = rope(q, k, *t)
                return self.q_norm(q), self.k_norm(k)
            case "not rotated":
                return self.q_norm(q), self.k_norm(k)
            case "changed":
                q, k = q.detach().clone(), k.detach()
                normed, other = self.q_norm(q), self.k_norm(k)
                if self.training:
                    q.zero_()
                return rope(normed, other, *t)
            case "reentrant checkpoint":  # a function of autograd
                return fewer(q, torch.tensor(2)), k
            case "torch.func":  # what waits is a constant of the function that is derived
                return torch.func.grad(lambda x: (x * q.transpose(1, 2)).sum())(torch.ones(2, 6, 2, 8)), k
        wrap, _, rotates = self.use.partition(": ")
        function = {
            "compile": partial(torch.compile, backend="aot_eager"),
            "vmap": torch.func.vmap,
            "checkpoint": lambda function: partial(checkpoint, function, use_reentrant=False),
        }[wrap]
        if rotates == "rotates":  # the rotation is in what takes the tensors
            return function(lambda q, k: rope(q, k, *t))(q, k)
        # It takes tensors that are rotated before, or later, or not; and views.
        part = function(lambda x: (2 * x).sin())
        first = part(q.transpose(1, 2))
        return *rope(q, k, *t), first, part(q), part(k)


GENERATOR = torch.Generator().manual_seed(1)
GIVEN = torch.randn(2, 6, 16, generator=GENERATOR), *torch.randn(2, 2, 6, 8, generator=GENERATOR)


def results(layer: Any, grad: bool = True) -> tuple[list[Tensor], list[Tensor]]:
    """(the results, the gradients of the parameters)"""
    layer.zero_grad()
    with torch.set_grad_enabled(grad):
        flat = tree_leaves(layer(*GIVEN))
        if any(x.requires_grad for x in flat):
            sum((x.square().sum() for x in flat if x.requires_grad), torch.zeros(())).backward()
    return flat, [p.grad for p in layer.parameters() if p.grad is not None]


# The launches of four calls.
USES = {"plain": 4, "views": 4, "views of results": 0, "swapped": 0, "between": 0, "twice": 4, "functions": 0,
        "sliced": 0, "last and more": 3, "rotated without grad": 3, "two eps": 0}  # fmt: skip


@pytest.mark.parametrize("name", USES)
def test_uses(name: str) -> None:
    """Any use of the tensors gives the host's bits and gradients, in the first calls and later."""
    layer = Layer(name, *({"views of results": [nn.LayerNorm]}.get(name, [])))
    if name == "two eps":
        layer.k_norm.variance_epsilon = 1e-2
    want, grads = results(layer)
    with integration.enable(layer) as report:
        for _ in range(4):
            got, found = results(layer)
            assert len(got) == len(want)
            assert all(map(torch.equal, got, want))
            assert [x.requires_grad for x in got] == [x.requires_grad for x in want]
            assert all(type(x) is Tensor for x in got)
            torch.testing.assert_close(found, grads, rtol=1e-4, atol=1e-4)
    assert report.calls["fused"] == USES[name], report.reasons


def test_a_function_of_autograd_does_not_lose_its_gradient() -> None:
    """Such a function takes a waiting tensor, in a layer whose earlier calls were fused, as a tensor without values."""
    layer = Layer("plain")
    with integration.enable(layer):
        for layer.use in ("plain", "plain", "reentrant checkpoint"):
            out = layer(*GIVEN)[0]
        with pytest.raises(RuntimeError, match="invalid gradient"):
            out.sum().backward()


TAKES: list[Any] = [slow("compile: rotates", False), slow("compile: rotates", True)]
USERS = ("checkpoint: rotates", "checkpoint: takes", "compile: takes", "vmap: takes", "torch.func")
TAKES += product(USERS, (False, True))


@pytest.mark.parametrize(("use", "grad"), TAKES)
def test_what_takes_a_waiting_tensor(use: str, grad: bool) -> None:
    """In a layer whose earlier calls were fused, it has the host's results and gradients, or says what to do."""
    torch.compiler.reset()
    layer = Layer(use)
    want = results(layer, grad)
    with integration.enable(layer):
        for layer.use in ("plain", "plain", use, use):
            if grad and use == layer.use == "vmap: takes":
                with pytest.raises(RuntimeError, match=r"^torch\.func takes the result of a norm .*fuse_norm=False$"):
                    results(layer, grad)
            elif layer.use == use:
                torch.testing.assert_close(results(layer, grad), want, rtol=1e-4, atol=1e-4)
            else:
                results(layer, grad)


@pytest.mark.parametrize(("norm", "name"), [(nn.RMSNorm, "rms_norm"), (nn.LayerNorm, "layer_norm")])
def test_a_function_of_torch_is_replaced(norm: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer("plain", norm)
    with integration.enable(layer) as report:
        for _ in range(2):
            layer(*GIVEN)
        monkeypatch.setattr(nn.functional, name, doubled(getattr(nn.functional, name)))
        layer(*GIVEN)
    assert report.calls["fused"] == 2


def test_a_change_in_between_is_an_error() -> None:
    """What waits must not be computed from other values."""
    layer = Layer("changed")
    with integration.enable(layer):
        layer.eval()(*GIVEN)
        layer.train()
        with pytest.raises(RuntimeError, match=r"q or k was changed in place between its norm and rope; .* fuse_norm="):
            layer(*GIVEN)


def test_a_second_derivative_is_an_error_that_says_what_to_do() -> None:
    layer = Layer("plain")
    with integration.enable(layer):
        q, _ = layer(*GIVEN)
        (grad,) = torch.autograd.grad(q.sum(), layer.q_norm.weight, create_graph=True)
        with pytest.raises(jitrope.JitropeError, match=r"no second derivative.*fuse_norm=False"):
            grad.sum().backward()


@pytest.mark.parametrize("fuse_norm", [False, True])
def test_torch_fx(fuse_norm: bool) -> None:
    """A layer that torch.fx traces is the host's."""
    layer = Layer("")
    want = layer(*GIVEN)
    with integration.enable(layer, fuse_norm=fuse_norm):
        assert all(map(torch.equal, torch.fx.symbolic_trace(layer)(*GIVEN), want))


# ---- around the layers ---------------------------------------------------------------------------------


def test_report() -> None:
    with integration.enable(zoo.language_model("qwen3")) as report:
        name = "transformers.models.qwen3.modeling_qwen3.Qwen3Attention"
        assert report.attention == {name: "norms of q and k wait for rope (RMSNorm, rounded twice)"}
        assert f"{name}: norms of q and k wait for rope" in report.table()
        assert str(report).startswith("3 functions replaced, norms of q and k wait for rope in 1 attention class; 0 ")


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3"])
def test_norms_that_are_not_fused(family: str) -> None:
    """Norms of latents do not wait, and those of q and k do not if nobody wants it."""
    model = zoo.language_model(family)
    want = zoo.run(model)
    with integration.enable(model, fuse_norm=family != "qwen3") as report:
        for _ in range(4):
            assert torch.equal(zoo.run(model), want)
        told = [] if family == "qwen3" else ["rope only: no norm of q and k was found"]
        assert [*report.attention.values()] == told
    assert report.calls == {"jitrope": 8, "host": 0}


def test_an_error_undoes_enable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integration, "_fuse", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        integration.enable(zoo.language_model("qwen3"))
    assert not _host.placed


@pytest.mark.parametrize("family", ["qwen3", "olmo3", "hunyuan_v1_dense"])
def test_autocast(family: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model in bf16 has the stock bits: only the norms are the host's, as the report and the log say."""
    monkeypatch.setitem(_host.reasons, "transformers", Counter())
    model, results = zoo.language_model(family, torch.bfloat16), []
    for around in (nullcontext, partial(integration.enable, model)):
        with around() as report, torch.autocast("cpu", torch.bfloat16):
            results += [model(input_ids=zoo.IDS)[0] for _ in range(2)]
    assert all(torch.equal(x, results[0]) for x in results)
    assert report.calls["fused"] == 0
    why = "not fused: autocast may change the norm"
    assert {*report.reasons} == {why}
    assert [x.getMessage() for x in caplog.records] == [f"jitrope: norms left to transformers: {why}"]


def test_tensors_are_let_go() -> None:
    """Attention runs without the tensors before the norm, as in the host's code."""
    qwen3, alive, made = zoo.language_model("qwen3"), [], []
    attention = qwen3.model.layers[0].self_attn
    attention.q_proj.register_forward_hook(lambda _, __, out: made.append(weakref.ref(out)) and None)
    attention.o_proj.register_forward_pre_hook(lambda *_: alive.append(made[-1]()))
    gc.disable()
    try:
        with integration.enable(qwen3):
            for _ in range(2):
                zoo.run(qwen3)
    finally:
        gc.enable()
    assert alive == [None, None]


def test_what_is_changed_after_enable() -> None:
    """A new weight is read, and a norm with a `_norm` of its own is called."""
    qwen3 = zoo.language_model("qwen3")
    norm = qwen3.model.layers[0].self_attn.q_norm
    with integration.enable(qwen3) as report:
        first, fused = zoo.run(qwen3), zoo.run(qwen3)
        assert torch.equal(first, fused)
        norm.weight = nn.Parameter(torch.randn(8))
        results = [zoo.run(qwen3)]
        norm._norm = print
        results.append(zoo.run(qwen3))
        assert report.calls["fused"] == 4 + 2 + 1
    assert all(torch.equal(x, zoo.run(qwen3)) for x in results)
    assert not torch.allclose(results[0], fused)


# ---- what a rope function reads ------------------------------------------------------------------------

REMOTE = """
import functools, math, torch
from torch import nn
from transformers.models.llama.modeling_llama import rotate_half
SCALE = 1.0
class Settings:
    scale = 1.0
def helper(x):
    return x * SCALE
def scaled(function):
    @functools.wraps(function)
    def call(x):
        return function(x) * SCALE
    return call
@scaled
def decorated(x):
    return x
def inner(factors):
    return lambda x: x * factors[0]
outer = inner([1.0])
def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    LINE
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
class Attention(nn.Module):
    def forward(self, q, k, cos, sin):
        return apply_rotary_pos_emb(q, k, cos, sin)
"""


def remote(tmp_path: Path, line: str, old: str = "", new: str = "") -> Any:
    """Imports REMOTE with another line, as remote code."""
    path = tmp_path / f"remote_{tmp_path.parent.name}_{tmp_path.name}.py"
    path.write_text(REMOTE.replace("LINE", line).replace(old, new))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LINES = {
    "none of jitrope's|branches on the values or sizes": [
        "q = q * math.log(q.shape[-2], 16) if q.shape[-2] > 16 else q"],
    "branches on the values or sizes": [
        "q = q if q.shape[-2] < 9999 else 2 * q", "q = 2 * q if q.abs().max() > 1e30 else q",
        "q = q * max(1, q.shape[-2] // 4096)", "q = q * max(1.0, math.log(q.shape[-2]) / math.log(9999))",
        "q = q if int(q.shape[-2]) < 9999 else 2 * q", "q = [q * 2 ** n for n in range(q.shape[-2] // 9999 + 1)][-1]",
        "assert isinstance(q, torch.Tensor); q = q if len(q.mT) < 9999 else 2 * q",
        "q = q.view(*q.shape[:-1], 8) * (1 if q.shape[-2] < 9999 else 2)", "q = sum(row * 0 for row in q) + q",
        "q = q if [*q.shape][-2] < 9999 else 2 * q", "first, *_ = q.size(); q = q if first < 9999 else 2 * q"],
    "others for other numbers of tokens or larger values": [
        "q, k = q.clamp(-8, 8), k.clamp(-8, 8)", "q = q * (q.shape[-2] // 64 + 1)"],
    "reads the global Settings": ["q = q * Settings.scale"],
    "reads the global factors": ["q = outer(q)"],
    "reads the global SCALE": [
        "q = q * SCALE", "q = helper(q)", "q = decorated(q)", "q = (lambda x: x * SCALE)(q)",
        "q = (lambda x: helper(x))(q)", "def nested(x):\n        return x * SCALE\n    q = nested(q)",
        "q = sum(x * SCALE for x in (q,))"],
}  # fmt: skip


@pytest.mark.parametrize(("why", "line"), [(why, line) for why, lines in LINES.items() for line in lines])
def test_a_rope_function_that_is_not_seen_whole(why: str, line: str, tmp_path: Path) -> None:
    with pytest.raises(jitrope.JitropeError, match=why):
        integration.enable(remote(tmp_path, line).Attention())


def test_a_rope_function_without_its_text(tmp_path: Path) -> None:
    """Nobody can see whether it has code in it that reads a global value."""
    module = remote(tmp_path, "q = (lambda x: x * SCALE)(q)")
    Path(module.__file__).unlink()
    linecache.checkcache()
    with pytest.raises(jitrope.JitropeError, match=r"branches on .*, or may do so"):
        integration.enable(module.Attention())


def test_a_patch_of_what_nested_code_calls(tmp_path: Path) -> None:
    module = remote(tmp_path, "q = (lambda x: nothing(x))(q)")
    module.nothing = lambda x: x
    layer, given = module.Attention(), (*torch.randn(2, 1, 2, 5, 8), *torch.randn(2, 1, 5, 8))
    want = layer(*given)
    with integration.enable(layer) as report:
        assert torch.equal(layer(*given)[0], want[0])
        module.nothing = lambda x: 2 * x
        torch.testing.assert_close(layer(*given)[0], 2 * want[0])
    assert report.calls == {"jitrope": 1, "host": 1}


def test_a_file_that_is_edited_after_its_import(tmp_path: Path) -> None:
    """The loaded code runs, not that of the disk."""
    module = remote(tmp_path, "pass", "return apply_rotary_pos_emb(q", "return (lambda: 1.0)(), apply_rotary_pos_emb(q")
    layer, path = module.Attention(), Path(module.__file__)
    path.write_text(path.read_text().replace("1.0)()", "7.0)()"))
    os.utime(path, (9e9, 9e9))
    linecache.checkcache()
    with integration.enable(layer):
        assert layer(*torch.randn(2, 1, 2, 5, 8), *torch.randn(2, 1, 5, 8))[0] == 1.0


def test_norms_that_are_not_rotated_hold_no_graph() -> None:
    """Their first calls are kept from checkpoints, with their gradients, a second derivative too, and no longer."""
    layer, (x, *tables), made, results = Layer("not rotated"), GIVEN, [], []
    for around in (nullcontext, partial(integration.enable, layer)):
        with around():
            for _ in range(4):
                y = x.clone().requires_grad_()
                made.append(weakref.ref(y))
                out, weight = layer(y, *tables)[0], layer.q_norm.weight
                grads = torch.autograd.grad(out.sin().sum(), (y, weight), create_graph=True)
                results += torch.autograd.grad(sum(grad.square().sum() for grad in grads), weight)
                y = x.clone().requires_grad_()
                made.append(weakref.ref(y))
                layer(y, *tables)  # without a backward, which would free what is saved
                del y, out, grads
    assert all(torch.equal(result, results[0]) for result in results)
    assert [y() for y in made] == [None] * 16
