"""What all hosts share: functions that are replaced and restored, their signatures, and reports."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from jitrope.base.errors import InvalidInput, JitropeError
from jitrope.integrations import _host, deepspeed, megatron, transformer_engine


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


def enabled(name: str, ours: Any) -> Any:
    return _host.enable(name.split(".")[0], {f"{name}:rope": ours})


# ---- signatures ----------------------------------------------------------------------------------------


def ours(t: Any, table: Any, scale: float = 1.0, part: Any = None) -> Any:
    """What the tests call jitrope's; a host has other parameters."""
    if part == "refused":
        raise InvalidInput("part is refused")
    return "jitrope", t, table, scale, part


def a_keyword(t: Any, table: Any, scale: float = 1.0, part: Any = None, new: Any = None) -> Any:
    return "host", t, table, scale, part, new


def a_place(t: Any, new: Any, table: Any, scale: float = 1.0, part: Any = None) -> Any:
    return "host", t, new, table, scale, part


def a_default(t: Any, table: Any, scale: float = 2.0, part: Any = "all") -> Any:
    return "host", t, table, scale, part


def fewer(t: Any, part: Any = None) -> Any:
    return "host", t, part


def any_words(*arguments: Any, **words: Any) -> Any:
    return "host", arguments, words


SIGNATURES = [  # the host's function, arguments, words, the result, the reason why the host's runs
    (a_keyword, (1, 2), {}, ("jitrope", 1, 2, 1.0, None), ""),
    (a_keyword, (1, 2), {"new": None}, ("jitrope", 1, 2, 1.0, None), ""),
    (a_keyword, (1, 2), {"new": 5}, ("host", 1, 2, 1.0, None, 5), "jitrope does not know the argument new of rope"),
    (a_keyword, (1, 2, 3.0, 4, 5), {}, ("host", 1, 2, 3.0, 4, 5), "jitrope does not know the argument new of rope"),
    (a_keyword, (1, 2), {"part": "refused"}, ("host", 1, 2, 1.0, "refused", None), "part is refused"),
    (a_place, (1, 2, 3), {}, ("host", 1, 2, 3, 1.0, None), "jitrope does not know the argument new of rope"),
    (a_place, (1, 2), {"table": 3}, ("host", 1, 2, 3, 1.0, None), "jitrope does not know the argument new of rope"),
    (a_default, (1, 2), {}, ("jitrope", 1, 2, 2.0, "all"), ""),
    (a_default, (1, 2, 3.0), {"part": None}, ("jitrope", 1, 2, 3.0, None), ""),
    (fewer, (1, 2), {}, ("host", 1, 2), "rope was called without table"),
    (any_words, (1, 2), {}, ("host", (1, 2), {}), "jitrope does not know the argument 1 of rope"),
    (any_words, (), {"t": 1, "table": 2}, ("jitrope", 1, 2, 1.0, None), ""),
    (any_words, (), {"t": 1, "table": 2, "x": 3}, ("host", (), {"t": 1, "table": 2, "x": 3}),
     "jitrope does not know the argument x of rope"),
]  # fmt: skip


@pytest.mark.parametrize(("theirs", "arguments", "words", "result", "reason"), SIGNATURES)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_host_with_other_parameters(
    monkeypatch: pytest.MonkeyPatch, theirs: Any, arguments: Any, words: Any, result: Any, reason: str, compiled: bool
) -> None:
    """Ours takes what it knows under the names of the host, with the host's defaults; the rest goes to the host."""
    torch._dynamo.reset()  # the code below is one function, compiled once a case
    module = host_of(monkeypatch, "host_s", theirs)

    def call(x: Tensor) -> Any:
        return x + 1, module.rope(*arguments, **words)

    with enabled("host_s", ours) as report:
        run = torch.compile(call, backend="eager", fullgraph=True) if compiled else call
        assert run(torch.zeros(1))[1] == result
    assert report.calls == {"jitrope": int(not reason), "host": int(bool(reason))}
    assert report.reasons == ({reason: 1} if reason else {})


def test_a_host_without_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Megatron's hooks: an argument that jitrope does not know is named, never a TypeError."""
    module = host_of(monkeypatch, "host_n", None)
    with enabled("host_n", ours):
        assert module.rope(1, 2, part=3) == ("jitrope", 1, 2, 1.0, 3)
        with pytest.raises(InvalidInput, match=r"^jitrope does not know the argument max_seqlen of rope$"):
            module.rope(1, 2, max_seqlen=3)
    assert module.rope is None


# ---- what is left --------------------------------------------------------------------------------------


def test_missing_functions_and_broken_dependencies_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    module = host_of(monkeypatch, "host_o", ours)
    (tmp_path / "broken_o.py").write_text("raise OSError('libx.so.1: cannot open')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"^broken_o cannot be imported: OSError: libx.so.1: cannot open"):
        _host.enable("broken_o", {"broken_o:rope": any_words})
    with pytest.raises(ImportError, match="No module named 'absent_o'"):
        _host.enable("absent_o", {"absent_o:rope": any_words})
    with pytest.raises(JitropeError, match="this version of host_o has no host_o:rope2"):
        _host.enable("host_o", dict.fromkeys(["host_o:rope", "host_o:rope2"], any_words))
    assert module.rope is ours  # all or nothing


@pytest.mark.parametrize(
    ("host", "module"),
    [
        (transformer_engine, "transformer_engine.pytorch.attention.rope"),
        (transformer_engine, "transformer_engine.pytorch.attention.multi_head_attention"),
        (megatron, "megatron.core.transformer.attention"),
        (deepspeed, "deepspeed.sequence.layer"),
    ],
)
def test_a_host_that_cannot_be_imported(host: Any, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"^{host.__name__.split('.')[-1]} cannot be imported: \w+Error: "):
        host.enable()


# ---- replacing and restoring ---------------------------------------------------------------------------


def test_every_module_that_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's `from host import rope` too, but not the same function under another name."""
    module, user = host_of(monkeypatch, "host_m", fewer), host_of(monkeypatch, "user_m", fewer)
    user.other = fewer
    with enabled("host_m", ours) as report:
        assert module.rope is user.rope is not fewer
        assert (module.rope.__name__, module.rope.__module__, module.rope.__doc__) == ("rope", "host_m", None)
        assert user.other is fewer
        assert "host_m.rope: jitrope" in report.table()
    assert module.rope is user.rope is fewer


def test_contexts_undo_only_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    module, disable = host_of(monkeypatch, "host_x", fewer), _host.disabler("jitrope.integrations.host_x")
    with enabled("host_x", ours) as outer:
        with enabled("host_x", ours) as inner, inner:
            assert "(disabled)" not in str(inner)
        assert module.rope is not fewer
        assert repr(outer) == "1 function replaced; 0 calls since; 0 left to host_x"
    assert module.rope is fewer
    assert str(outer) == "1 function replaced (disabled); 0 calls since; 0 left to host_x"
    with enabled("host_x", ours):
        disable()
        disable()
        assert module.rope is fewer
    assert module.rope is fewer


@pytest.mark.parametrize("last", [0, 1])
def test_a_function_of_two_hosts(monkeypatch: pytest.MonkeyPatch, last: int) -> None:
    """As diffusers' in xDiT: it stays replaced until both are disabled, in any order."""
    hosts = ["host_a", "host_b"]
    modules = [host_of(monkeypatch, name, fewer) for name in hosts]
    reports = [enabled(name, ours) for name in hosts]
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
    report = enabled("host_p", ours)
    module.rope = a_place
    with report:
        pass
    assert module.rope is a_place


class Rope:
    def forward(self, x: Any) -> Any:
        return "host", x


class Derived(Rope):
    pass


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


def test_a_compiled_function_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is replaced in compiled code too."""
    module = host_of(monkeypatch, "host_t", torch.compile(lambda x: x + 1, backend="eager"))
    with enabled("host_t", lambda x: x + 100):
        assert torch.compile(lambda x: module.rope(x), backend="eager")(torch.zeros(1)) == 100


def test_a_report_counts_since_its_enable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reasons are counted, the most frequent first, and there is a bound on their number."""
    module = host_of(monkeypatch, "host_r", lambda x: x)

    def refusing(x: int) -> int:
        if x % 2:
            raise InvalidInput("odd" if x < 9 else f"{x} is odd")
        return x

    with enabled("host_r", refusing):
        module.rope(3)
    with enabled("host_r", refusing) as report:
        assert [module.rope(x) for x in (1, 2, 3)] == [1, 2, 3]
        assert str(report).splitlines()[1:] == ["  2 x odd"]
        for x in range(9, 9 + 2 * 2 * _host._MOST_REASONS, 2):
            module.rope(x)
    assert report.calls == {"jitrope": 1, "host": 2 + 2 * _host._MOST_REASONS}
    assert report.reasons["other reasons"] > 0
    assert len(_host.reasons["host_r"]) <= _host._MOST_REASONS + 1
