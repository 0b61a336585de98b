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
from jitrope import DynamicQuantize, KVCache, Mrope, Norm, Packed, Pages, Quantize, Shifts, Starts, Ulysses
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


E4M3, FP4 = torch.float8_e4m3fn, getattr(torch, "float4_e2m1fn_x2", torch.uint8)
E8M0, F32 = getattr(torch, "float8_e8m0fnu", torch.uint8), "float32, on cpu"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (KVCache(ONE.view(2, 1, 4), None, ENDS, rotate_k=True, k_block_scale=ONE[:2, None, None], scale_fmt="ue8m0"),
         f"KVCache(k_cache=a tensor of shape (2, 1, 4), {F32}, slot_mapping=a tensor of shape (3,), int32, on cpu, "
         f"rotate_k=True, k_block_scale=a tensor of shape (2, 1, 1), {F32}, scale_fmt='ue8m0')"),
        (Pages(TWELVE, seq_lens=ONE),
         f"Pages(page_table=a tensor of shape (12,), int64, on cpu, seq_lens=a tensor of shape (8,), {F32})"),
        (Quantize(0.5, hadamard=True), "Quantize(q_scale=0.5, hadamard=True)"),
        (DynamicQuantize(torch.int8, hadamard=True), "DynamicQuantize(dtype=torch.int8, hadamard=True)"),
        (DynamicQuantize(scale_fmt="ue8m0", v=True), "DynamicQuantize(scale_fmt='ue8m0', v=True)"),
        (DynamicQuantize(per="head"), "DynamicQuantize(per='head')"),
        (DynamicQuantize(group=32, scale_dtype=E8M0, swizzled=True),
         f"DynamicQuantize(group=32, scale_dtype={E8M0}, swizzled=True)"),
        (DynamicQuantize(FP4, scale_dtype=E4M3, k_global_scale=0.5),
         f"DynamicQuantize(dtype={FP4}, scale_dtype={E4M3}, k_global_scale=0.5)"),
    ],
)  # fmt: skip
def test_printed(value: Any, text: str) -> None:
    assert repr(value) == text


@pytest.mark.parametrize("made", ["before", "inside"])
@pytest.mark.parametrize("name", VALUES)
def test_a_compiled_call_takes_a_value(name: str, made: str) -> None:
    torch._dynamo.reset()
    word, value = VALUES[name]()
    call = (lambda: run(word, value)) if made == "before" else lambda: run(*VALUES[name]())
    for x, y in zip(torch.compile(call, fullgraph=True, backend="aot_eager")(), call()):
        torch.testing.assert_close(x, y)


NORM, CACHE = "norm=jitrope.Norm(...)", "cache=jitrope.KVCache(...)"
INSTEAD = {
    **{"position_ids": "positions=position_ids", "start_positions": "positions=jitrope.Starts(start_positions)"},
    "mrope_section": "positions=jitrope.Mrope(position_ids, mrope_section)",
    **dict.fromkeys(("cu_seqlens", "cp_rank"), "positions=jitrope.Packed(cu_seqlens, ...)"),
    **{"eps": NORM, "q_weight": NORM, "k_cache": CACHE, "k_scale": "quantize=jitrope.Quantize(...)"},
    **{"is_neox_style": "interleaved=not is_neox_style", "unsqueeze_dim": "layout='bhsd' or 'bshd'"},
}


@pytest.mark.parametrize("word", INSTEAD)
def test_a_word_of_another_library_is_told_the_right_one(word: str) -> None:
    for function, heads in ((jitrope.apply_rope, [Q, K]), (jitrope.prepare_qkv, [Q, K, V])):
        with pytest.raises(TypeError) as error:
            function(*heads, COS, SIN, layout="thd", **{word: 1})  # type: ignore[call-overload]
        lacks = function is jitrope.apply_rope and INSTEAD[word].startswith(("norm", "cache", "quantize"))
        text = f"{function.__name__}() got an unexpected keyword argument {word!r}; pass {INSTEAD[word]}"
        text += " to prepare_qkv" * lacks
        assert str(error.value) == text


ROPE, LATENT = (jitrope.apply_rope, Q, K), (jitrope.prepare_mla_qkv, Q, K, V, COS, SIN)
ELSEWHERE = "; prepare_qkv has it"


@pytest.mark.parametrize(
    ("call", "word", "hint"),
    [(ROPE, "rotery_dim", ""), (ROPE, "norm", ELSEWHERE), (LATENT, "inverse", ""), (LATENT, "norm", ELSEWHERE)],
)
def test_a_word_that_a_function_does_not_have_is_refused_as_python_does(call: Any, word: str, hint: str) -> None:
    function, *arguments = call
    with pytest.raises(TypeError) as error:
        function(*arguments, **{word: True})
    assert str(error.value) == f"{function.__name__}() got an unexpected keyword argument {word!r}{hint}"


def test_help_shows_the_keywords() -> None:
    """An editor reads the TypedDict; `help` reads the signature."""
    for function in (jitrope.apply_rope, jitrope.prepare_qkv, jitrope.prepare_fused_qkv):
        parameters = inspect.signature(function).parameters
        assert {"positions", "layout", "interleaved", "rotary_dim", "inplace", "check"} <= parameters.keys()
        assert parameters["layout"].default == "bshd"
        assert not any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def test_a_forced_launch_gives_the_same_bits_and_stays_until_another_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """`configure` is over the environment. Calls, compiled or not, follow both, and refuse a wrong word."""
    compiled = torch.compile(jitrope.apply_rope, backend="eager", fullgraph=True)
    want = jitrope.apply_rope(Q, K, COS, SIN, layout="thd")
    for of_environment, launch, told in (
        *(("", None, "auto"), ("auto", None, "auto"), ("grid_2d", None, "grid_2d")),
        *(("grid_2d", "token_linear", "token_linear"), ("grid_2d", "auto", "auto"), ("", "grid_2d", "grid_2d")),
    ):
        monkeypatch.setenv("JITROPE_LAUNCH", of_environment)
        jitrope.configure(launch=launch)
        assert config.launch() == told
        for call in (jitrope.apply_rope, compiled):
            assert all(map(torch.equal, call(Q, K, COS, SIN, layout="thd"), want))
    jitrope.configure(compile=False)
    assert config.launch() == "grid_2d"
    with pytest.raises(jitrope.InvalidInput):
        jitrope.configure(compile="no")  # type: ignore[arg-type]
    assert not config.compile_allowed()
    jitrope.configure(compile=None, launch=None)
    monkeypatch.setenv("JITROPE_LAUNCH", "3d")
    with pytest.raises(jitrope.InvalidInput) as error:
        jitrope.apply_rope(Q, K, COS, SIN, layout="thd")
    assert str(error.value).endswith("JITROPE_LAUNCH is '3d'; it must be one of 'auto', 'token_linear', 'grid_2d'")


def test_check_takes_right_calls() -> None:
    q, k, (cos, sin) = Q.view(2, 6, 4, 8), K.view(2, 6, 2, 8), (COS[:6], SIN[:6])
    ones, zeros, nothing = torch.ones(6, 8), torch.zeros(6, 8), torch.ones(0, 6, 4)
    for own, table, words in (
        *((q, (cos, sin), {}), (q, (cos.repeat(1, 2), sin.repeat(1, 2)), {}), (q, (ones, zeros), {})),
        (q, (cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)), {"interleaved": True}),
        *((q[:, :0], (ones[:0], zeros[:0]), {}), (q[:0], (nothing, nothing), {})),
        (q.transpose(1, 2), (cos, sin), {"layout": "bhsd"}),
    ):
        jitrope.apply_rope(own, k if own is q else None, *table, check=True, **words)
