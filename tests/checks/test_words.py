"""The keywords of the public functions, and the values that replace several of them."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import jitrope
from jitrope import KVCache, Mrope, Norm, Packed, Pages, Quantize, Shifts, Starts, Ulysses
from jitrope.base import config

Q, K, V = (torch.randn(12, heads, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
COS, SIN = torch.linspace(0, 3, 64).view(16, 4).cos(), torch.linspace(0, 3, 64).view(16, 4).sin()
TWELVE, IDS, ENDS = torch.arange(12), torch.arange(12) % 5, torch.tensor([0, 2, 12], dtype=torch.int32)
ONE, TWO, CACHES, PAGES = torch.ones(8), torch.tensor([6, 6]), torch.zeros(2, 12, 2, 8), torch.zeros(2, 5, 4, 2, 8)
VALUES: dict[str, Callable[[], tuple[str, Any]]] = {
    "packed": lambda: ("positions", Packed(ENDS, 10, start_positions=torch.tensor([1, 2]), cp_size=1)),
    "starts": lambda: ("positions", Starts(torch.tensor([1]))),
    "mrope": lambda: ("positions", Mrope(torch.stack((IDS, IDS + 1)), [1, 3])),
    "shifts": lambda: ("positions", Shifts(IDS - 4)),
    "norm": lambda: ("norm", Norm(ONE, ONE, eps=1e-5, rounding="once")),
    "cache": lambda: ("cache", KVCache(*CACHES, TWELVE, rotate_k=True)),
    "pages": lambda: ("cache", KVCache(*PAGES, Pages(TWELVE[:4], torch.tensor([0, 2, 4]), TWO - 3, clear_page=True))),
    "quantize": lambda: ("quantize", Quantize(0.5, torch.tensor(0.25))),
    "ulysses": lambda: ("out", Ulysses(2)),
}


def run(word: str, value: Any) -> list[Tensor]:
    """The results of a call with the value, and the tensors of the value, which may be written."""
    out = jitrope.prepare_qkv(Q, K.clone(), V, COS, SIN, layout="thd", **{word: value})
    return [x.float() for x in tree_leaves([out, value.tensors]) if isinstance(x, Tensor)]


@pytest.mark.parametrize("name", VALUES)
def test_a_value_may_be_kept_copied_pickled_and_printed(name: str) -> None:
    word, value = VALUES[name]()
    want = run(word, value)
    for other in (value, copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert {value: 1}.get(other) == (1 if other is value else None)
        assert all(torch.equal(x, y) for x, y in zip(run(word, other), want))
    text = repr(value)
    assert text.startswith(f"{type(value).__name__}(")
    assert "\n" not in text
    assert "tensor([" not in text  # shapes, no numbers
    shown, kinds = re.findall(r"(?<=[(, ])([a-z_]+)=", text), [type(value), *[Pages] * ("Pages(" in text)]
    assert {*shown} <= {word for kind in kinds for word in inspect.signature(kind).parameters}


@pytest.mark.parametrize("made", ["before", "inside"])
@pytest.mark.parametrize("name", VALUES)
def test_a_compiled_call_takes_a_value(name: str, made: str) -> None:
    torch._dynamo.reset()
    word, value = VALUES[name]()
    call = (lambda: run(word, value)) if made == "before" else lambda: run(*VALUES[name]())
    for x, y in zip(torch.compile(call, fullgraph=True, backend="aot_eager")(), call()):
        torch.testing.assert_close(x, y)


INSTEAD = {
    "position_ids": "pass positions=position_ids",
    "mrope_section": "pass positions=jitrope.Mrope(position_ids, mrope_section)",
    "start_positions": "pass positions=jitrope.Starts(start_positions)",
    "cu_seqlens": "pass positions=jitrope.Packed(cu_seqlens, ...)",
    "max_seqlen": "pass positions=jitrope.Packed(cu_seqlens, ...)",
    "cp_rank": "pass positions=jitrope.Packed(cu_seqlens, ...)",
    "eps": "pass norm=jitrope.Norm(...)",
    "q_weight": "pass norm=jitrope.Norm(...)",
    "k_cache": "pass cache=jitrope.KVCache(...)",
    "slot_mapping": "pass cache=jitrope.KVCache(...)",
    "k_scale": "pass quantize=jitrope.Quantize(...)",
    "launch": "pass jitrope.configure(launch=...)",
    "is_neox_style": "pass interleaved=not is_neox_style",
    "unsqueeze_dim": "pass layout='bhsd' or 'bshd'",
}
LACKED = ("eps", "q_weight", "k_cache", "slot_mapping", "k_scale")
"""Words of norms, caches and conversions, which `apply_rope` does not have."""


@pytest.mark.parametrize("word", INSTEAD)
def test_a_word_of_another_library_is_told_the_right_one(word: str) -> None:
    for function, heads in ((jitrope.apply_rope, [Q, K]), (jitrope.prepare_qkv, [Q, K, V])):
        with pytest.raises(TypeError) as error:
            function(*heads, COS, SIN, layout="thd", **{word: 1})  # type: ignore[call-overload]
        elsewhere = " to prepare_qkv" if function is jitrope.apply_rope and word in LACKED else ""
        text = f"{function.__name__}() got an unexpected keyword argument {word!r}; {INSTEAD[word]}{elsewhere}"
        assert str(error.value) == text


@pytest.mark.parametrize(
    ("function", "words", "hint"),
    [
        *[(jitrope.apply_rope, word, "") for word in ("table", "fp8", "rotery_dim")],
        *[(jitrope.apply_rope, word, "; prepare_qkv has it") for word in ("norm", "cache", "quantize")],
        *[(jitrope.prepare_mla_qkv, word, "") for word in ("inverse", "inplace", "rotary_dim", "rotary_offset")],
        (jitrope.prepare_mla_qkv, "norm", "; prepare_qkv has it"),
    ],
)
def test_a_word_that_a_function_does_not_have_is_refused_as_python_does(function: Any, words: str, hint: str) -> None:
    with pytest.raises(TypeError) as error:
        function(Q, K, V, COS, SIN, **{words: True}) if "mla" in function.__name__ else function(Q, K, **{words: True})
    assert str(error.value) == f"{function.__name__}() got an unexpected keyword argument {words!r}{hint}"


def test_help_shows_the_keywords() -> None:
    """An editor reads the TypedDict; `help` reads the signature."""
    for function in (jitrope.apply_rope, jitrope.prepare_qkv, jitrope.prepare_fused_qkv):
        parameters = inspect.signature(function).parameters
        assert {"positions", "layout", "interleaved", "rotary_dim", "inplace", "check"} <= parameters.keys()
        assert parameters["layout"].default == "bshd"
        assert not any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def test_a_forced_launch_gives_the_same_bits_and_stays_until_another_is_set() -> None:
    want = jitrope.apply_rope(Q, K, COS, SIN, layout="thd")
    for launch in ("token_linear", "grid_2d"):
        jitrope.configure(launch=launch)
        assert all(map(torch.equal, jitrope.apply_rope(Q, K, COS, SIN, layout="thd"), want))  # type: ignore[arg-type]
    jitrope.configure(compile=False)
    try:
        assert config.launch() == "grid_2d"
        with pytest.raises(jitrope.InvalidInput):
            jitrope.configure(compile="no")  # type: ignore[arg-type]
        assert not config.compile_allowed()
    finally:
        jitrope.configure(compile=None)


def test_a_launch_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """`configure` takes precedence; calls, compiled or not, follow it, and refuse a wrong word."""
    compiled = torch.compile(jitrope.apply_rope, backend="eager", fullgraph=True)
    want = jitrope.apply_rope(Q, K, COS, SIN, layout="thd")
    for given, told in (("", "auto"), ("auto", "auto"), ("grid_2d", "grid_2d")):
        monkeypatch.setenv("JITROPE_LAUNCH", given)
        assert config.launch() == told
        assert all(map(torch.equal, compiled(Q, K, COS, SIN, layout="thd"), want))  # type: ignore[arg-type]
    for told in ("token_linear", "auto"):
        jitrope.configure(launch=told)
        assert config.launch() == told
    monkeypatch.setenv("JITROPE_LAUNCH", "3d")
    jitrope.configure(launch=None)
    with pytest.raises(jitrope.InvalidInput) as error:
        jitrope.apply_rope(Q, K, COS, SIN, layout="thd")
    assert str(error.value).endswith("JITROPE_LAUNCH is '3d'; it must be one of 'auto', 'token_linear', 'grid_2d'")


def test_check_takes_right_calls() -> None:
    q, k, (cos, sin) = Q.view(2, 6, 4, 8), K.view(2, 6, 2, 8), (COS[:6], SIN[:6])
    ones, zeros, nothing = torch.ones(6, 8), torch.zeros(6, 8), torch.ones(0, 6, 4)
    jitrope.apply_rope(q, k, cos, sin, check=True)
    jitrope.apply_rope(q, k, cos.repeat(1, 2), sin.repeat(1, 2), check=True)
    jitrope.apply_rope(q, k, cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1), check=True, interleaved=True)
    jitrope.apply_rope(q, k, ones, zeros, check=True)
    jitrope.apply_rope(q[:, :0], None, ones[:0], zeros[:0], check=True)
    jitrope.apply_rope(q[:0], None, nothing, nothing, check=True)
    jitrope.apply_rope(q.transpose(1, 2), None, cos, sin, layout="bhsd", check=True)
