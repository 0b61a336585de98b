"""Norms in the launch of rope, in transformers: recognised modules and code, and what may surround a layer."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import itertools
import os
import pickle
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jitrope.integrations import _host, _norms, _rewrite
from jitrope.integrations import transformers as integration

HOST = "pip install 'transformers>=5.17'"
if os.environ.get("CI"):  # CI has every host
    import transformers
else:
    transformers = pytest.importorskip("transformers", reason=f"the host library is not installed: {HOST}")

from transformers.models.llama.modeling_llama import apply_rotary_pos_emb  # noqa: E402  the layers below call it
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm  # noqa: E402

from . import transformers_zoo as zoo  # noqa: E402
from .test_transformers_fused import fused_calls, language_model  # noqa: E402


@pytest.fixture(autouse=True)
def _stock() -> Iterator[None]:
    """After each test, no function is replaced."""
    assert not _host.placed
    yield
    integration.disable()


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


class RowsOf8(Double):
    """A norm that is RMSNorm for heads of 8 elements alone."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.unflatten(-1, (-1, 8))
        return F.rms_norm(rows, (8,), None, self.eps).flatten(-2) * self.weight


class Projected(Double):
    """A norm with a product, which autocast computes in bf16."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        return F.linear(y.float(), torch.eye(y.shape[-1])).to(x.dtype)


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda *_: None)
    return module


OF_JIT = "a norm is scripted or traced by torch.jit"
RECOGNISED = {
    "torch": (lambda: nn.RMSNorm(8, 1e-5), "RMSNorm, rounded once"),
    "torch-default-eps": (lambda: nn.RMSNorm(8), "RMSNorm, rounded once"),
    "layer": (lambda: nn.LayerNorm(8), "LayerNorm, rounded once"),
    "layer-no-bias": (lambda: nn.LayerNorm(8, bias=False), "LayerNorm, rounded once"),
    "wide": (lambda: nn.LayerNorm(64), "LayerNorm, rounded once"),
    "qwen3": (lambda: Qwen3RMSNorm(16), "RMSNorm, rounded twice"),
    "option": (Grouped, "RMSNorm, rounded twice"),
    "bf16": (lambda: Qwen3RMSNorm(16).bfloat16(), "RMSNorm, rounded twice"),
    "meta": (lambda: Qwen3RMSNorm(16).to("meta"), "RMSNorm, rounded twice"),
    "double": (Double, "Double: jitrope has no norm with its results"),
    "fixed-eps": (FixedEps, "FixedEps: jitrope has no norm with its results"),
    "groups": (lambda: Grouped(2), "Grouped: jitrope has no norm with its results"),
    "rows-of-8": (RowsOf8, "RowsOf8: jitrope has no norm with its results"),
    "linear": (lambda: nn.Linear(8, 8), "Linear: a norm's weight must have one axis"),
    "batch": (lambda: nn.BatchNorm1d(8), "BatchNorm1d has other parameters than a weight and a bias"),
    "identity": (nn.Identity, "Identity: jitrope has no norm with its results"),
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


def test_options_of_a_norm_are_fixed() -> None:
    form = _norms.recognise(Grouped())
    assert isinstance(form, _norms.NormForm)
    assert form.fits(Grouped())
    assert not form.fits(Grouped(2))
    assert not form.fits(Double())


def test_norms_that_autocast_changes() -> None:
    for module, devices in ((Qwen3RMSNorm(16), ("cpu",)), (nn.RMSNorm(8), ("cpu",)), (Projected(), ())):
        form = _norms.recognise(module)
        assert isinstance(form, _norms.NormForm)
        assert form.autocast[:1] == devices


@pytest.mark.gpu
def test_norms_that_autocast_of_a_gpu_changes() -> None:
    """It computes LayerNorm in fp32, and torch's RMSNorm in some versions."""
    x = torch.ones(2, 8, device="cuda", dtype=torch.bfloat16)
    for module in (Qwen3RMSNorm(8), nn.RMSNorm(8), nn.LayerNorm(8)):
        form = _norms.recognise(module)
        assert isinstance(form, _norms.NormForm)
        with torch.autocast("cuda", torch.bfloat16):
            kept = module.to(x)(x).dtype == x.dtype
        assert form.autocast == (("cpu", "cuda") if kept else ("cpu",))
        assert kept or type(module) is not Qwen3RMSNorm
        assert not kept or type(module) is not nn.LayerNorm


# ---- code ----------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """The parts of an attention, which each class below uses in its way."""

    def __init__(self, k_eps: float = 1e-6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q_proj, self.k_proj = nn.Linear(16, 16), nn.Linear(16, 16)
        self.q_norm, self.k_norm = Qwen3RMSNorm(8), Qwen3RMSNorm(8, k_eps)
        for norm in (self.q_norm, self.k_norm):
            norm.weight.data = torch.randn(8)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """q and k, (B, H, S, D)."""
        return tuple(y.unflatten(-1, (2, 8)).transpose(1, 2) for y in (self.q_proj(x), self.k_proj(x)))


class Nested(Layer):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        q, k = self.heads(x)
        return apply_rotary_pos_emb(self.q_norm(q), self.k_norm(k), cos, sin)


class Tuples(Layer):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        q, k = self.heads(x)
        q, k = self.q_norm(q), self.k_norm(k)
        both = apply_rotary_pos_emb(q, k, cos=cos, sin=sin)
        return both[0], both[1]


class Views(Layer):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        q, k = self.heads(x)
        q = self.q_norm(q.transpose(1, 2)).transpose(1, 2)
        k = self.k_norm(k).reshape(2, 2, 3, 2, 8).flatten(2, 3)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return q.permute(0, 2, 1, 3).flatten(2), [y.sum() for y in (q, k)], (lambda: k)()


class ViewsOfResults(Layer):
    """LayerNorm's results are contiguous, and its inputs are not."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = nn.LayerNorm(8), nn.LayerNorm(8)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        q, k = self.heads(x)
        q = self.q_norm(q).view(4, 6, 8)
        k = self.k_norm(k).view(4, 6, 8)
        return apply_rotary_pos_emb(q.view(2, 2, 6, 8), k.view(2, 2, 6, 8), cos, sin)


class ViewsByKeyword(ViewsOfResults):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        q, k = self.heads(x)
        q, k = self.q_norm(q).view(size=(2, 2, 6, 8)), self.k_norm(k).view(size=(2, 2, 6, 8))
        return apply_rotary_pos_emb(q, k, cos, sin)


class Branches(Layer):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        q, k = self.heads(x)
        if x.shape[0] == 2:
            q, k = self.q_norm(q), self.k_norm(k)
        if cos is not None:
            q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return q, k


class InPlace(Layer):
    """The rotated tensors are changed."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        q, k = self.heads(x)
        q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        q *= 2
        k[..., 0] = 0
        return q, k


class Copies(Layer):
    """Copies of the results are changed, also through views of them, and by a function."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        q, k = self.heads(x)
        q, k = apply_rotary_pos_emb(self.q_norm(q), self.k_norm(k), cos, sin)
        v = self.k_norm(k).transpose(1, 2).reshape(2, 12, 8)
        v[:, 0] = 0
        q = q.to(torch.float64)
        q.mul_(0.5)
        part = q.transpose(1, 2)
        change(part)
        k = k.transpose(1, 2).reshape(2, 12, 8)
        k[..., 0] *= 2
        return q, k, v, part


def change(x: Tensor) -> None:
    x[:, 0] = 0


class Buffer(Layer):
    """One buffer holds q, then k, then other values."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        q, k = (y.detach() for y in self.heads(x))
        buffer = q.clone()
        q = self.q_norm(buffer)
        buffer.copy_(k)
        k = self.k_norm(buffer)
        torch.add(buffer, 1, out=buffer)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        buffer[:] = 0
        return q, k, buffer


class Tables(Layer):
    """The tables, and the normalised q, are changed after the call."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        (q, k), cos, sin = self.heads(x), cos.clone(), sin.clone()
        q = self.q_norm(q)
        turned = apply_rotary_pos_emb(q, self.k_norm(k), cos, sin)
        F.relu(cos, inplace=True)
        sin *= 0
        q.zero_()
        return turned, q


class TablesAgain(Layer):
    """The tables are changed in other ways behind the rotation."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        cos = cos.clone()
        q, k = self.heads(x)
        q, k = apply_rotary_pos_emb(self.q_norm(q), self.k_norm(k), cos, sin)
        cos[0]: Tensor = sin[0]
        q_again, k_again = self.heads(x)
        q_again, k_again = apply_rotary_pos_emb(self.q_norm(q_again), self.k_norm(k_again), cos, sin)
        nn.functional.relu(cos, True)
        return q, k, q_again, k_again


class TablesInALoop(Layer):
    """A loop fills the tables behind the rotation."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        cos = cos.clone()
        q, k = self.heads(x)
        q, k = apply_rotary_pos_emb(self.q_norm(q), self.k_norm(k), cos, sin)
        for cos[0] in sin:
            pass
        return q, k


class TablesInAList(Layer):
    """A list that is made fills them."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        cos = cos.clone()
        q, k = self.heads(x)
        q, k = apply_rotary_pos_emb(self.q_norm(q), self.k_norm(k), cos, sin)
        _ = [None for cos[0] in sin]
        return q, k


class TablesLast(Layer):
    """The tables are changed, and a rotated tensor has another use than its norm, which comes last."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        (q, k), cos = self.heads(x), cos.clone()
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        q_last, k_last = self.q_norm(q), self.k_norm(k)
        k_last = k_last + 1
        cos.zero_()
        return q, q_last, k_last


class NoGrad(Layer):
    """The norms have no gradient."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        q, k = self.heads(x)
        with torch.no_grad():
            q, k = self.q_norm(q), self.k_norm(k)
        return apply_rotary_pos_emb(q, k, cos, sin)


class NoGradCount(Layer):
    """Something else is changed without a gradient, in a block and in a function."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        q, k = self.heads(x)
        seen = torch.zeros(1)
        q, k = apply_rotary_pos_emb(self.q_norm(q), self.k_norm(k), cos, sin)
        with torch.no_grad():
            seen.add_(1)
            seen[0] += 1
        return q, k, seen


class NoGradFunction(Layer):
    """A function inside of it has its own mode."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        @torch.no_grad()
        def count(seen: Tensor) -> Tensor:
            return seen.add_(1)

        q, k = self.heads(x)
        q, k = apply_rotary_pos_emb(self.q_norm(q), self.k_norm(k), cos, sin)
        return q, k, count(torch.zeros(1))


class NoGradMode(Layer):
    """The rotated tensors have a gradient, what follows has none."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        q, k = self.heads(x)
        q, k = apply_rotary_pos_emb(self.q_norm(q), self.k_norm(k), cos, sin)
        torch.set_grad_enabled(False)
        twice = 2 * q
        torch.set_grad_enabled(True)
        return q, k, twice


class Before(Layer):
    """Results and views of them are used after what comes between: a mode, changes of them and of a norm's source."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        heads = self.heads(x)
        q, k = self.q_norm(heads[0]), self.k_norm(heads[1])
        turned = apply_rotary_pos_emb(q, k, cos, sin)
        q_turned, k_turned = turned
        wide, flat = q_turned.to(torch.float64), k_turned.transpose(1, 2)
        shown = q.transpose(1, 2)
        torch.set_grad_enabled(False)
        again = k_turned.transpose(1, 2)
        torch.set_grad_enabled(True)
        q_turned *= 2
        heads[1].mul_(2)
        return wide, flat, again, shown, k


class Between(Layer):
    """The normalised tensors are changed."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        q, k = self.heads(x)
        q, k = self.q_norm(q), self.k_norm(k)
        k[..., 0] = 0
        return apply_rotary_pos_emb(q, k, cos, sin)


class Twice(Layer):
    """The normalised tensors have another use."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        q, k = self.heads(x)
        q, k = self.q_norm(q), self.k_norm(k)
        turned = apply_rotary_pos_emb(q, k, cos, sin)
        return q + turned[0], k


class Last(Layer):
    """The norm comes last, and the result of the rotation has another use."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        q, k = self.heads(x)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        q_last = self.q_norm(q)
        k_last = self.k_norm(k)
        return q, q_last, k_last, k


class Sliced(Layer):
    """Only a part of the normalised head is rotated."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        q, k = self.heads(x)
        q, k = self.q_norm(q), self.k_norm(k)
        return apply_rotary_pos_emb(q[..., :8], k[..., :8], cos, sin)


class Parent(Layer):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        q, k = super().heads(x)
        return apply_rotary_pos_emb(self.q_norm(q), self.k_norm(k), cos, sin)


class Starred(Layer):
    """A tuple of other values is spread between norm and rope."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        q, k = self.heads(x)
        q, k, *_ = self.q_norm(q), self.k_norm(k), x, x
        first, *others = x, 2 * x, 3 * x
        both = (cos, sin)
        q, k, last = *apply_rotary_pos_emb(self.q_norm(q), self.k_norm(k), *both), x
        return q, k, first, others, last


CODE = {  # the launches, or why the class is left
    "nested": (Nested, 1),
    "tuples": (Tuples, 1),
    "views": (Views, 1),
    "branches": (Branches, 1),
    "in-place": (InPlace, 1),
    "views-of-results": (ViewsOfResults, 1),
    "views-by-keyword": (ViewsByKeyword, 0),
    "copies": (Copies, 1),
    "buffer": (Buffer, 0),
    "tables": (Tables, 1),
    "tables-again": (TablesAgain, 2),
    "tables-in-a-loop": (TablesInALoop, "a loop or a `with` assigns to a part of a tensor"),
    "tables-in-a-list": (TablesInAList, "a loop or a `with` assigns to a part of a tensor"),
    "tables-last": (TablesLast, "a tensor is changed in place"),
    "no-grad": (NoGrad, "a norm, rope or its result is in a `with` statement"),
    "no-grad-count": (NoGradCount, 1),
    "no-grad-function": (NoGradFunction, "a function inside of it changes a tensor in place"),
    "no-grad-mode": (NoGradMode, 1),
    "before": (Before, 1),
    "between": (Between, 0),
    "twice": (Twice, 0),
    "last": (Last, 1),
    "sliced": (Sliced, "its norms are not directly"),
    "parent": (Parent, 1),
    "starred": (Starred, 1),
    "two-eps": (lambda: Nested(1e-2), 0),
}


@pytest.mark.parametrize("name", CODE)
def test_code(name: str) -> None:
    """Any use of the tensors gives the host's bits."""
    make, expected = CODE[name]
    layer, (cos, sin) = make(), torch.randn(2, 2, 6, 8)
    x = torch.randn(2, 6, 16)
    want = layer(x, cos, sin)
    with integration.enable(layer) as report:
        got = layer(x, cos, sin)
    (what,) = report.attention.values()
    if isinstance(expected, str):
        assert what.startswith(f"rope only: {expected}")
    else:
        assert what.startswith("norm and rope fused")
        assert report.calls.get("fused", 0) == expected
    flat = [torch.utils._pytree.tree_leaves(result) for result in (got, want)]
    assert len(flat[0]) == len(flat[1])
    assert all(torch.equal(a, b) for a, b in zip(*flat))
    assert [x.requires_grad for x in flat[0]] == [x.requires_grad for x in flat[1]]


def test_code_that_cannot_be_rewritten() -> None:
    made: dict[str, Any] = {"Layer": Layer, "apply_rotary_pos_emb": apply_rotary_pos_emb}
    exec(inspect.getsource(Nested), made)
    with pytest.raises(ValueError, match="its source is not there"):
        _rewrite.Source(made["Nested"].forward, {})
    code = Nested.forward.__code__
    moved = type(Nested.forward)(code.replace(co_firstlineno=code.co_firstlineno - 3), made)
    with pytest.raises(ValueError, match="its loaded code is not that of its source"):
        _rewrite.Source(moved, {})


# ---- around the layers ---------------------------------------------------------------------------------


@pytest.fixture
def qwen3() -> nn.Module:
    return language_model("qwen3")


def test_report(qwen3: nn.Module) -> None:
    with integration.enable(qwen3) as report:
        name = "transformers.models.qwen3.modeling_qwen3.Qwen3Attention"
        assert report.attention == {name: "norm and rope fused (RMSNorm, rounded twice)"}
        assert f"{name}: norm and rope fused" in report.table()
        assert str(report).startswith("1 function replaced, norm and rope fused in 1 attention class; 0 calls since")
        with integration.enable(qwen3) as again:  # changes nothing, and undoes nothing
            assert again.attention == report.attention
        assert len(_host.placed) == 2
    assert not _host.placed


def test_rope_alone(qwen3: nn.Module) -> None:
    with torch.no_grad():
        assert fused_calls(qwen3, zoo.run(qwen3), fuse_norm=False) == {"jitrope": 2, "host": 0}


def test_an_error_undoes_enable(qwen3: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integration, "fuse", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        integration.enable(qwen3)
    assert not _host.placed


def test_code_is_swapped_and_restored(qwen3: nn.Module) -> None:
    """Hooks that hold the function call the current code; models hold nothing of jitrope."""
    cls = type(qwen3.model.layers[0].self_attn)
    outer, function = cls.forward, inspect.unwrap(cls.forward)
    code, signature = function.__code__, inspect.signature(outer)
    integration.enable(qwen3)
    assert cls.forward is outer
    assert function.__code__ is not code
    assert function.__code__.co_firstlineno == code.co_firstlineno
    assert inspect.signature(outer) == signature
    assert b"jitrope" not in pickle.dumps(qwen3)
    other = pickle.loads(pickle.dumps(copy.deepcopy(qwen3)))
    with torch.no_grad():
        assert torch.equal(zoo.run(other), zoo.run(qwen3))
    integration.disable(language_model("gemma3"))
    assert function.__code__ is not code
    integration.disable(qwen3)
    assert function.__code__ is code


def test_a_change_in_between_is_a_reason() -> None:
    layer, (cos, sin) = Between(), torch.randn(2, 2, 6, 8)
    with integration.enable(layer) as report:
        layer(torch.randn(2, 6, 16), cos, sin)
    assert any("may change between a norm and the rotation" in reason for reason in report.reasons)


def test_threads_enable_models_of_one_class(qwen3: nn.Module) -> None:
    models = [qwen3, *[copy.deepcopy(qwen3) for _ in range(3)]]
    function = inspect.unwrap(type(qwen3.model.layers[0].self_attn).forward)
    code = function.__code__
    for _ in range(5):
        ready = threading.Barrier(len(models))
        threads = [threading.Thread(target=lambda m: (ready.wait(), integration.enable(m)), args=(m,)) for m in models]  # noqa: B023
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert function.__code__ is not code
        integration.disable()
        assert function.__code__ is code


def test_enable_and_disable_in_the_midst_of_a_forward(qwen3: nn.Module) -> None:
    steps = itertools.cycle([integration.disable, lambda: integration.enable(qwen3)])
    with torch.no_grad():
        want = zoo.run(qwen3)
        for layer in qwen3.model.layers:
            for module in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.o_proj):
                module.register_forward_pre_hook(lambda *_: next(steps)() and None)
        assert all(torch.equal(zoo.run(qwen3), want) for _ in range(3))


@pytest.mark.parametrize("cause", ["autocast", "hook"])
def test_a_call_that_is_not_fused_counts_once(
    qwen3: nn.Module, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    """The log says, as the report does, that only the norms are the host's."""
    monkeypatch.setitem(_host.reasons, "transformers", Counter())
    why = {"autocast": "a norm's weight has another dtype", "hook": "a norm has hooks"}[cause]
    with integration.enable(qwen3) as report, torch.no_grad(), torch.autocast("cpu", torch.bfloat16, cause != "hook"):
        for layer in qwen3.model.layers if cause == "hook" else ():
            hooked(layer.self_attn.q_norm)
            hooked(layer.self_attn.k_norm)
        zoo.run(qwen3)
    assert report.calls == {"jitrope": 2, "host": 0}
    assert report.reasons == {f"not fused: {why}": 2}
    assert [x.getMessage() for x in caplog.records] == [f"jitrope: norms left to transformers: not fused: {why}"]


def test_calls_that_are_not_fused(qwen3: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight of another dtype changes the dtype of the host's norm, and autocast may change it, so that one runs."""
    with integration.enable(qwen3) as report, torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            got = zoo.run(qwen3)
        assert report.reasons == {"not fused: a norm's weight has another dtype": 2}
        qwen3.bfloat16().model.layers[0].self_attn.float()
        with contextlib.suppress(RuntimeError):  # of the host: linear layers of two dtypes
            zoo.run(qwen3)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(got, zoo.run(language_model("qwen3")), rtol=0.1, atol=0.05)
    monkeypatch.setattr(_norms, "_same_in_autocast", lambda *_: ())
    with integration.enable(qwen3.bfloat16()) as report, torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        zoo.run(qwen3)
    assert report.reasons == {"not fused: autocast may change the norm": 2}


@pytest.mark.parametrize("family", ["qwen3", "gemma4", "olmo3", "hunyuan_v1_dense"])
def test_autocast(family: str) -> None:
    """A model in bf16 under autocast has the stock bits with one launch a layer, and its gradients."""
    model = language_model(family).bfloat16()
    results = []
    for on in (False, True):
        with integration.enable(model) if on else contextlib.nullcontext() as report:
            with torch.autocast("cpu", torch.bfloat16):
                out = zoo.run(model)
            grads = torch.autograd.grad(out.float().square().mean(), [*model.parameters()], allow_unused=True)
        results.append([out, *(grad for grad in grads if grad is not None)])
    assert report.calls == {"jitrope": 0, "host": 0, "fused": 2}, report.reasons
    assert torch.equal(results[0][0], results[1][0])
    for want, got in zip(*results):
        assert (got - want).float().norm() <= 0.03 * want.float().norm()


def test_another_model_of_the_class() -> None:
    """The second model's norms have no weight, which is another form; `enable` of that model adds it."""
    first, second = language_model("neomme"), language_model("neomme")
    for layer in (module for module in second.modules() if hasattr(module, "q_norm")):
        for norm in (layer.q_norm, layer.k_norm):
            norm.with_scale, norm.weight = True, nn.Parameter(torch.rand(16))
    with torch.no_grad():
        want = zoo.run(second)
        with integration.enable(first) as report:
            assert torch.equal(zoo.run(second), want)
            assert "fused" not in report.calls
            assert any("another NeoMMERMSNorm" in reason for reason in report.reasons)
            with integration.enable(second):
                assert torch.equal(zoo.run(second), want)
                assert report.calls["fused"] > 0


def test_a_norm_that_is_no_module() -> None:
    """It is not fused in its own model; and it is called where another model of the class is fused."""
    first, second = Nested(), Nested()
    norm = second.q_norm
    del second.q_norm
    second.q_norm = lambda x: 2 * norm(x)
    given = torch.randn(2, 6, 16), *torch.randn(2, 2, 6, 8)
    want = second(*given)
    with integration.enable(first) as report:
        assert all(map(torch.equal, second(*given), want))
        first(*given)
    assert report.calls == {"jitrope": 1, "host": 0, "fused": 1}


@pytest.mark.parametrize("fuse_norm", [False, True])
def test_torch_fx(fuse_norm: bool) -> None:
    """A layer that torch.fx traces is the host's."""
    layer, given = Nested(), (torch.randn(2, 6, 16), *torch.randn(2, 2, 6, 8))
    want = layer(*given)
    with integration.enable(layer, fuse_norm=fuse_norm) as report:
        traced = torch.fx.symbolic_trace(layer)
    assert all(map(torch.equal, traced(*given), want))
    assert report.reasons == {"torch.fx traces the call": 1}


def test_tensors_are_let_go(qwen3: nn.Module) -> None:
    """Attention runs without the tensors before the norm, as in the host's code."""
    alive = []
    attention = qwen3.model.layers[0].self_attn
    made: list[Any] = []
    attention.q_proj.register_forward_hook(lambda _, __, out: made.append(weakref.ref(out)) and None)
    attention.o_proj.register_forward_pre_hook(lambda *_: alive.append(made[0]()))
    gc.disable()
    try:
        with integration.enable(qwen3) as report, torch.no_grad():
            zoo.run(qwen3)
    finally:
        gc.enable()
    assert report.calls["fused"] == 2
    assert alive == [None]
