"""What all hosts share: calls that are jitrope's or left to the host, patches, changed norms, reports, restoring."""

from __future__ import annotations

import importlib
import inspect
import itertools
import pkgutil
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from jitrope.base.errors import InvalidInput, JitropeError
from jitrope.integrations import _host

from ..devices import slow
from ..hosts import doubled
from .conftest import live


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    assert not _host.placed


def host_of(monkeypatch: pytest.MonkeyPatch, name: str, function: Any) -> ModuleType:
    """A module of a host with a function `rope`."""
    module = ModuleType(name)
    module.rope = function
    monkeypatch.setitem(sys.modules, name, module)
    return module


FUNCTIONS = {"diffusers": 2, "transformers": 3, "megatron": 4, "transformer_engine": 3, "timm": 3, "deepspeed": 2,
             "comfy_kitchen": 16}  # fmt: skip
FUSING = ("diffusers", "transformers", "megatron", "transformer_engine", "torchtitan")


@pytest.mark.parametrize(("name", "count"), FUNCTIONS.items())
def test_enable_and_disable(request: Any, name: str, count: int) -> None:
    """An enabled host computes the same, and counts it. Enabled twice it is undone once, and leaves no trace."""
    x, host = live(request, name), importlib.import_module(f"jitrope.integrations.{name}")
    with x.enable() as report:
        assert (len(report.replaced), report.left) == (count, {})
    functions = {} if name == "comfy_kitchen" else {at: pkgutil.resolve_name(at) for at in report.replaced}
    with torch.no_grad():
        stock = x.run()
        with x.enable() as report:
            for at, theirs in functions.items():
                ours = pkgutil.resolve_name(at)
                assert ours is not theirs
                assert theirs is None or inspect.signature(ours) == inspect.signature(theirs)
            with x.enable() as again:
                assert again.replaced == report.replaced
                torch.testing.assert_close(x.run(), stock)
            torch.testing.assert_close(x.run(), stock)
            assert report.calls == Counter(x.calls) + Counter(x.calls)
            assert again.calls.total() == again.calls["host"] + 2 * sum(x.calls.values())
            assert str(report).startswith(f"{count} functions replaced")
            assert str(report).endswith(f"; {2 * sum(x.calls.values())} calls since; 0 left to {name}")
            assert all(f"{at}: " in report.table() for at in report.replaced)
        assert "(disabled)" in str(report)
        assert torch.equal(x.run(), stock)
        assert {at: pkgutil.resolve_name(at) for at in functions} == functions
        with x.enable():
            host.disable()
            host.disable()
            assert {at: pkgutil.resolve_name(at) for at in functions} == functions
    assert torch.equal(x.run(), stock)


@pytest.mark.parametrize("name", [name for name in (*FUSING, "timm", "deepspeed") if name != "megatron"])
def test_a_call_that_jitrope_refuses_is_the_hosts(request: Any, monkeypatch: Any, caplog: Any, name: str) -> None:
    """In fp64: it has the host's bits and is counted, with its reason, which the log has once."""
    monkeypatch.setitem(_host.reasons, name, Counter())
    x = live(request, name, torch.float64)
    stock = x.run()
    with x.enable() as report:
        assert torch.equal(x.run(), stock)
        assert torch.equal(x.run(), stock)
    of_one = 2 if name == "timm" else sum(x.rope.values())  # q, then k
    assert report.calls == Counter(host=2 * of_one)
    assert all(": q is float64; it must be " in reason for reason in report.reasons)
    assert all(f"\n  {n} x {reason}" in str(report) for reason, n in report.reasons.items())
    assert {f"jitrope: left to {name}: {reason}" for reason in report.reasons} >= {
        record.getMessage().replace("norms left", "left") for record in caplog.records
    }
    assert len(caplog.records) == len(report.reasons)


# ---- patches of users, and other libraries -------------------------------------------------------------

FLUX, TITAN = "diffusers.models.transformers.transformer_flux", "torchtitan.models.common"
CORE, TE = "megatron.core.transformer", "transformer_engine.pytorch"
QWEN3, GEMMA3 = (f"transformers.models.{name}.modeling_{name}" for name in ("qwen3", "gemma3"))
LATER = "was replaced after enable"
NO_VARIANT, NO_NORM = "none of jitrope's variants gives its results", "is no norm that jitrope knows, or was changed"
FOREIGN = "apply_rotary_emb: it is tests.hosts's"
RAISED = (NO_VARIANT, FOREIGN)
TITAN_NORM = "a norm is not torchtitan's RMSNorm or has no weight, or q's and k's differ"
TITAN_TEXT = "a method of CosSinRoPE was replaced, or its file has another text than in 0.3.0"
PATCHES = [  # what is patched, and what is told if it was so before `enable`, and after; "": all is fused within it
    ("diffusers", f"{FLUX}.apply_rotary_emb", FOREIGN, f"apply_rotary_emb {LATER}"),
    ("diffusers rope", f"{FLUX}.apply_rotary_emb", FOREIGN, ""),
    ("diffusers", "torch.nn.RMSNorm.forward", "jitrope does not know RMSNorm", f"RMSNorm.forward {LATER}"),
    ("diffusers", "torch.nn.functional.rms_norm", "jitrope does not know RMSNorm", f"rms_norm {LATER}"),
    ("diffusers", f"{FLUX}.FluxAttnProcessor.__call__", "it is tests.hosts's", ""),
    ("transformers", f"{QWEN3}.apply_rotary_pos_emb", NO_VARIANT, f"apply_rotary_pos_emb {LATER}"),
    ("transformers", f"{QWEN3}.Qwen3RMSNorm.forward", NO_NORM, NO_NORM),
    ("transformers", f"{QWEN3}.Qwen3Attention.forward", "", ""),
    ("transformers gemma3", f"{GEMMA3}.Gemma3RMSNorm._norm", NO_NORM, NO_NORM),
    ("transformers gemma3", f"{GEMMA3}.rotate_half", NO_VARIANT, f"rotate_half {LATER}"),
    ("megatron L2Norm", f"{CORE}.attention.apply_rotary_pos_emb", *["apply_rotary_pos_emb was replaced"] * 2),
    ("megatron L2Norm", f"{CORE}.torch_norm.L2Norm.forward", NO_NORM, NO_NORM),
    ("megatron L2Norm", f"{CORE}.torch_norm.L2Norm._norm", NO_NORM, NO_NORM),
    ("megatron", f"{CORE}.attention.SelfAttention.get_query_key_value_tensors",
     "get_query_key_value_tensors is not the one that jitrope knows",
     "SelfAttention has its own get_query_key_value_tensors"),
    ("megatron", f"{CORE}.attention.Attention.forward", "jitrope does not know the argument 1 of forward", ""),
    ("transformer_engine", f"{TE}.attention.multi_head_attention.apply_rotary_pos_emb",
     *["apply_rotary_pos_emb was replaced"] * 2),
    ("transformer_engine", f"{TE}.module.RMSNorm.forward", NO_NORM, NO_NORM),
    ("timm", "timm.models.eva.apply_rot_embed_cat", *["apply_rot_embed_cat or apply_rot_embed was replaced"] * 2),
    ("torchtitan", "torch.nn.functional.rms_norm", TITAN_NORM, TITAN_NORM),
    ("torchtitan", f"{TITAN}.nn_modules.RMSNorm.forward", TITAN_NORM, TITAN_NORM),
    *(("torchtitan", f"{TITAN}.rope.CosSinRoPE.{method}", TITAN_TEXT, TITAN_TEXT)
      for method in ("forward", "apply_rotary_emb", "_reshape_cache")),
    ("torchtitan", f"{TITAN}.attention.GQAttention.forward",
     *["GQAttention.forward was replaced, or has another text than in 0.3.0"] * 2),
]  # fmt: skip
WHEN = ("before enable", "after enable", "after a call")
COMPILED = [slow(*row, "compiled") for row in PATCHES if row[0] in ("timm", "torchtitan")]


@pytest.mark.parametrize(
    ("name", "place", "before", "after", "when"), [*((*row, when) for row in PATCHES for when in WHEN), *COMPILED]
)
def test_a_patch(request: Any, name: str, place: str, before: str, after: str, when: str) -> None:
    """It has the effect that it has without jitrope, and the report tells; without it all is fused again."""
    x, told = live(request, name), before if when == "before enable" else after
    holder, _, last = place.rpartition(".")
    cls, patch = pkgutil.resolve_name(holder), pytest.MonkeyPatch()
    kind = staticmethod if isinstance(vars(cls).get(last), staticmethod) else lambda function: function
    torch.compiler.reset()
    run = torch.compile(x.run, backend="aot_eager") if when == "compiled" else x.run
    with torch.no_grad(), ExitStack() as stack:
        stock = x.run()
        with pytest.MonkeyPatch.context() as alone:
            alone.setattr(cls, last, kind(doubled(getattr(cls, last), named="megatron" not in name)))
            want = x.run()
        assert not torch.equal(want, stock)
        if when != "before enable":
            report = stack.enter_context(x.enable())
            fused = run() if when != "after enable" else None
        stack.callback(patch.undo)
        patch.setattr(cls, last, kind(doubled(getattr(cls, last), named="megatron" not in name)))
        if when == "before enable" and before in RAISED:
            with pytest.raises(JitropeError, match=before):
                x.enable()
            return
        if when == "before enable":
            report = stack.enter_context(x.enable())
        known = report.calls
        torch.testing.assert_close(run(), want)
        assert told in str(report) + report.table()
        if when != "compiled":
            assert (report.calls - known)["fused"] == (0 if told else x.calls.get("fused", 0))
        if when.startswith("after"):
            patch.undo()
            known = report.calls
            again = run()
            assert report.calls - known == Counter(x.calls)
            assert fused is None or torch.equal(again, fused)
        elif when == "compiled":
            patch.undo()
            known = report.calls
            assert torch.equal(run(), fused)
            assert report.calls == known  # the first trace is still valid


# A hook of accelerate, which offloads by its own `forward` in the module.
OFFLOADS = SimpleNamespace(no_grad=False, init_hook=lambda norm: norm, post_forward=lambda norm, out: out)
OFFLOADS.pre_forward = lambda norm, x: ((x + 1,), {})
CHANGES: dict[str, Any] = {  # a function, or what a subclass of a user's has
    "a subclass": {"forward": lambda self, x: 2 * super(type(self), self).forward(x)},
    "a hook": lambda norm: norm.register_forward_hook(lambda module, given, out: 2 * out),
    "accelerate": lambda norm: pytest.importorskip("accelerate.hooks").add_hook_to_module(norm, OFFLOADS),
    "a parametrized weight": lambda norm: nn.utils.parametrize.register_parametrization(norm, "weight", nn.Tanh()),
    "a buffer": lambda norm: norm.register_buffer("weight", norm._parameters.pop("weight").detach() * 3),
    "a property": {"weight": property(lambda self: self._parameters["weight"] * 3)},
    "an eps": lambda norm: setattr(norm, "eps" if hasattr(norm, "eps") else "variance_epsilon", 0.5),
    "a hook of all modules": lambda norm: nn.modules.module.register_module_forward_hook(
        lambda module, given, out: 2 * out if module is norm else None
    ),
}


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(("name", "change"), [*itertools.product(FUSING, CHANGES)])
def test_a_changed_norm_is_called(request: Any, name: str, change: str, first: bool) -> None:
    """Before or after `enable` and a call: rope is still jitrope's, and the weights get the gradients of the host's."""
    x, results = live(request, name), []
    plain = x.run()
    with ExitStack() as hooks, ExitStack() as enables:
        if not first:
            report = enables.enter_context(x.enable())
            x.run()
        for norm in x.norms:
            made = CHANGES[change]
            if isinstance(made, dict):
                norm.__class__ = type("Mine", (type(norm),), made)
            elif hasattr(handle := made(norm), "remove"):
                hooks.callback(handle.remove)
        if first:
            report = enables.enter_context(x.enable())
        for calls in (x.rope, x.rope, {}):  # then without jitrope
            known = report.calls
            if not calls:
                enables.close()
            out, weights = x.run(), [weight for norm in x.norms for weight in norm.parameters()]
            results.append([out, *(torch.autograd.grad(out.square().sum(), weights) if weights else ())])
            assert report.calls - known == Counter(calls)
        told = "".join(report.reasons) + report.table().partition("rope only: ")[2]
        assert re.search("norm|has buffers or modules|there are hooks of all modules", told)
    assert not torch.equal(out, plain)
    torch.testing.assert_close(results[0], results[2], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(results[1], results[2], rtol=1e-4, atol=1e-4)


def ours(t: Any, table: Any, scale: float = 1.0, part: Any = None) -> Any:
    """What the tests call jitrope's; a host has other parameters."""
    if str(part).startswith("refused"):
        raise InvalidInput(part)
    return "jitrope", t, table, scale, part


fewer = lambda t, part=None: ("host", t, part)  # noqa: E731

THEIRS: dict[str, Any] = {
    "a keyword": lambda t, table, scale=1.0, part=None, new=None: ("host", t, table, scale, part, new),
    "a place": lambda t, new, table, scale=1.0, part=None: ("host", t, new, table, scale, part),
    "a default": lambda t, table, scale=2.0, part="all": ("host", t, table, scale, part),
    "fewer": fewer,
    "any words": lambda *arguments, **words: ("host", arguments, words),
}
NEW = "jitrope does not know the argument new of rope"
SIGNATURES = [  # the host's function, arguments, words, the result, the reason why the host's runs
    ("a keyword", (1, 2), {}, ("jitrope", 1, 2, 1.0, None), ""),
    ("a keyword", (1, 2), {"new": None}, ("jitrope", 1, 2, 1.0, None), ""),
    ("a keyword", (1, 2), {"new": 5}, ("host", 1, 2, 1.0, None, 5), NEW),
    ("a keyword", (1, 2, 3.0, 4, 5), {}, ("host", 1, 2, 3.0, 4, 5), NEW),
    ("a keyword", (1, 2), {"part": "refused"}, ("host", 1, 2, 1.0, "refused", None), "refused"),
    ("a place", (1, 2, 3), {}, ("host", 1, 2, 3, 1.0, None), NEW),
    ("a place", (1, 2), {"table": 3}, ("host", 1, 2, 3, 1.0, None), NEW),
    ("a default", (1, 2), {}, ("jitrope", 1, 2, 2.0, "all"), ""),
    ("a default", (1, 2, 3.0), {"part": None}, ("jitrope", 1, 2, 3.0, None), ""),
    ("fewer", (1, 2), {}, ("host", 1, 2), "rope was called without table"),
    ("any words", (1, 2), {}, ("host", (1, 2), {}), NEW.replace("new", "1")),
    ("any words", (), {"t": 1, "table": 2}, ("jitrope", 1, 2, 1.0, None), ""),
    ("any words", (), {"t": 1, "table": 2, "x": 3}, ("host", (), {"t": 1, "table": 2, "x": 3}),
     NEW.replace("new", "x")),
]  # fmt: skip


@pytest.mark.parametrize(("theirs", "arguments", "words", "result", "reason"), SIGNATURES)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_host_with_other_parameters(
    monkeypatch: pytest.MonkeyPatch, theirs: str, arguments: Any, words: Any, result: Any, reason: str, compiled: bool
) -> None:
    """Ours takes what it knows under the names of the host, with the host's defaults; the rest goes to the host."""
    torch._dynamo.reset()  # the code below is one function, compiled once a case
    module = host_of(monkeypatch, "host_s", THEIRS[theirs])

    call = lambda x: (x + 1, module.rope(*arguments, **words))  # noqa: E731
    with _host.enable("host_s", {"host_s:rope": ours}) as report:
        run = torch.compile(call, backend="eager", fullgraph=True) if compiled else call
        assert run(torch.zeros(1))[1] == result
    assert report.calls == {"jitrope": int(not reason), "host": int(bool(reason))}
    assert report.reasons == ({reason: 1} if reason else {})


def test_a_host_without_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Megatron's hooks: an argument that jitrope does not know is named, never a TypeError."""
    module = host_of(monkeypatch, "host_n", None)
    with _host.enable("host_n", {"host_n:rope": ours}):
        assert module.rope(1, 2, part=3) == ("jitrope", 1, 2, 1.0, 3)
        with pytest.raises(InvalidInput, match=r"^jitrope does not know the argument max_seqlen of rope$"):
            module.rope(1, 2, max_seqlen=3)
    assert module.rope is None


def test_missing_functions_and_broken_dependencies_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    module = host_of(monkeypatch, "host_o", ours)
    (tmp_path / "broken_o.py").write_text("raise OSError('libx.so.1: cannot open')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"^broken_o cannot be imported: OSError: libx.so.1: cannot open"):
        _host.enable("broken_o", {"broken_o:rope": ours})
    with pytest.raises(ImportError, match="No module named 'absent_o'"):
        _host.enable("absent_o", {"absent_o:rope": ours})
    with pytest.raises(JitropeError, match="this version of host_o has no host_o:rope2"):
        _host.enable("host_o", dict.fromkeys(["host_o:rope", "host_o:rope2"], ours))
    assert module.rope is ours  # all or nothing


FILES = str.split("""transformer_engine.pytorch.attention.rope transformer_engine.pytorch.attention.multi_head_attention
megatron.core.transformer.attention deepspeed.sequence.layer""")


@pytest.mark.parametrize("module", FILES)
def test_a_host_that_cannot_be_imported(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    host = module.split(".")[0]
    with pytest.raises(ImportError, match=rf"^{host} cannot be imported: \w+Error: "):
        importlib.import_module(f"jitrope.integrations.{host}").enable()


# ---- replacing and restoring ---------------------------------------------------------------------------


def test_every_module_that_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's `from host import rope` too, but not the same function under another name."""
    module, user = host_of(monkeypatch, "host_m", fewer), host_of(monkeypatch, "user_m", fewer)
    user.other = fewer
    with _host.enable("host_m", {"host_m:rope": ours}) as report:
        assert module.rope is user.rope is not fewer
        assert (module.rope.__name__, module.rope.__module__, module.rope.__doc__) == ("rope", "host_m", None)
        assert user.other is fewer
        assert "host_m.rope: jitrope" in report.table()
    assert module.rope is user.rope is fewer


@pytest.mark.parametrize("last", [0, 1])
def test_a_function_of_two_hosts(monkeypatch: pytest.MonkeyPatch, last: int) -> None:
    """As diffusers' in xDiT: it stays replaced until both are disabled, in any order."""
    hosts = ["host_a", "host_b"]
    modules = [host_of(monkeypatch, name, fewer) for name in hosts]
    reports = [_host.enable(name, {f"{name}:rope": ours}) for name in hosts]
    _host.disabler(hosts[1 - last])()
    assert [module.rope(1, part=2)[0] for module in modules] == ["host"] * 2
    assert all(module.rope is not fewer for module in modules)
    assert ["(disabled)" in str(report) for report in reports] == [last == 1, last == 0]
    assert reports[0].calls["host"] == 2  # it counts for the host that was enabled first
    with reports[last]:
        pass
    assert [module.rope for module in modules] == [fewer] * 2


def test_what_others_put_there_since_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    module = host_of(monkeypatch, "host_p", fewer)
    report = _host.enable("host_p", {"host_p:rope": ours})
    module.rope = ours
    with report:
        pass
    assert module.rope is ours


class Rope:
    forward = lambda self, x: ("host", x)  # noqa: E731


class Derived(Rope): ...


@pytest.mark.parametrize("cls", [Rope, Derived])
def test_a_method(cls: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is replaced in the class that defines it, and restored unless someone else has replaced it since."""
    before, report = Rope.forward, _host.Report("host_c")
    for _ in range(2):
        report.replace_method(cls, "forward", lambda theirs: lambda self, x: ("jitrope", *theirs(self, x)), "fused")
    assert Rope().forward(1) == Derived().forward(1) == ("jitrope", "host", 1)
    assert report.table() == f"{__name__}.Rope.forward: fused"
    with report:
        assert "forward" not in vars(Derived)
    assert Rope.forward is before
    report.replace_method(cls, "forward", lambda theirs: lambda self, x: theirs(self, x), "fused")
    monkeypatch.setattr(Rope, "forward", mine := lambda self, x: x)
    with report:
        pass
    assert Rope.forward is mine


def test_a_compiled_function_of_a_host_is_replaced_in_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    module = host_of(monkeypatch, "host_t", torch.compile(lambda x: x + 1, backend="eager"))
    with _host.enable("host_t", {"host_t:rope": lambda x: x + 100}):
        assert torch.compile(lambda x: module.rope(x), backend="eager")(torch.zeros(1)) == 100


def test_a_report_counts_since_its_enable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reasons are counted, the most frequent first, and there is a bound on their number."""
    module, refused = host_of(monkeypatch, "host_r", THEIRS["a keyword"]), "refused: odd"
    with _host.enable("host_r", {"host_r:rope": ours}):
        module.rope(1, 2, part=refused)
    with _host.enable("host_r", {"host_r:rope": ours}) as report:
        assert [module.rope(1, 2, part=x)[0] for x in (refused, None, refused)] == ["host", "jitrope", "host"]
        assert str(report).splitlines()[1:] == ["  2 x refused: odd"]
        for x in range(2 * _host._MOST_REASONS):
            module.rope(1, 2, part=f"refused: {x}")
    assert report.calls == {"jitrope": 1, "host": 2 + 2 * _host._MOST_REASONS}
    assert report.reasons["other reasons"] > 0
    assert len(_host.reasons["host_r"]) <= _host._MOST_REASONS + 1
