"""The keywords of the public functions, and the values that replace several of them."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from typing import Any

import numpy as np
import pytest
import torch

import jitrope
from jitrope import KVCache, Mrope, Norm, Packed, Pages, Quantize, Shifts, Starts, Ulysses
from jitrope import torch_state as watch
from jitrope.base import config

Q, K, V = (torch.randn(2, 6, heads, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
ANGLES = torch.linspace(0, 3, 32).view(8, 4)
COS, SIN = ANGLES.cos(), ANGLES.sin()
LENGTHS = torch.tensor([0, 2, 6], dtype=torch.int32)
IDS = torch.tensor([3, 1, 4, 1, 5, 2])


def caches() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(12, 2, 8), torch.zeros(12, 2, 8)


VALUES = {
    "packed": Packed(LENGTHS, 4, start_positions=torch.tensor([1, 2]), cp_size=1),
    "starts": Starts(torch.tensor([1, 2])),
    "mrope": Mrope(torch.stack((IDS, IDS + 1)), [1, 3]),
    "shifts": Shifts(IDS - 4),
    "norm": Norm(torch.ones(8), torch.ones(8), eps=1e-5, rounding="once"),
    "cache": KVCache(*caches(), torch.arange(12), rotate_k=True),
    "quantize": Quantize(0.5, torch.tensor(0.25)),
    "pages": Pages(torch.tensor([4, 1, 0, 3]), torch.tensor([0, 2, 4]), torch.tensor([3, 4]), clear_page=True),
    "ulysses": Ulysses(2),
}
PLAIN = {"quantize": lambda: Quantize(0.5, 0.25), "ulysses": lambda: Ulysses(2)}


def run(value: Any) -> list[torch.Tensor]:
    """The results of a call with the value."""
    words = {Norm: "norm", KVCache: "cache", Quantize: "quantize", Ulysses: "out"}
    if isinstance(value, Pages):
        value = KVCache(torch.zeros(5, 4, 2, 8), torch.zeros(5, 4, 2, 8), value)
    if type(value) in words:
        cache = isinstance(value, KVCache)
        out = jitrope.prepare_qkv(Q, K.clone(), V, COS, SIN, **{words[type(value)]: value})
        return [*(x.float() for x in out if x is not None), *(value.tensors.values() if cache else ())]
    q, k = (Q[0], K[0]) if isinstance(value, Packed) else (Q, K)
    return [x for x in jitrope.apply_rope(q, k, COS, SIN, positions=value) if x is not None]


@pytest.mark.parametrize("name", VALUES)
def test_a_value_may_be_kept_copied_pickled_and_printed(name: str) -> None:
    value = VALUES[name]
    want = run(value)
    for other in (value, copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert {value: 1}.get(other) == (1 if other is value else None)
        for x, y in zip(run(other), want):
            assert torch.equal(x, y)
    text = repr(value)
    assert text.startswith(f"{type(value).__name__}(")
    assert "\n" not in text
    assert "tensor([" not in text  # shapes, no numbers
    shown = set(re.findall(r"(?<=[(, ])([a-z_]+)=", text))
    assert shown <= set(inspect.signature(type(value)).parameters)


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("made", ["before", "inside"])
def test_a_compiled_call_takes_a_value(name: str, made: str) -> None:
    value = VALUES[name]

    def call(*tensors: torch.Tensor) -> list[torch.Tensor]:
        if made == "before":
            return run(value)
        return run(type(value)(*tensors[: 2 if name == "norm" else None]))

    given = {"mrope": ()}.get(name, (*value.tensors.values(),)[: {"packed": 1, "cache": 3}.get(name)])
    if made == "inside" and name == "mrope":
        call = lambda: run(Mrope(torch.stack((IDS, IDS + 1)), (1, 3)))  # type: ignore[assignment, misc]  # noqa: E731
    if made == "inside" and name in PLAIN:
        call = lambda: run(PLAIN[name]())  # type: ignore[assignment, misc]  # noqa: E731
        given = ()
    torch._dynamo.reset()
    for x, y in zip(torch.compile(call, fullgraph=True)(*given), call(*given)):
        torch.testing.assert_close(x, y)


OLD = {
    "position_ids": "positions=position_ids",
    "cu_seqlens": r"positions=jitrope.Packed\(",
    "max_seqlen": r"positions=jitrope.Packed\(",
    "cp_rank": r"positions=jitrope.Packed\(",
    "start_positions": r"positions=jitrope.Starts\(",
    "mrope_section": r"positions=jitrope.Mrope\(",
    "launch": r"jitrope.configure\(launch=",
    "k_scale": r"quantize=jitrope.Quantize\(",
    "k_cache": r"cache=jitrope.KVCache\(",
    "eps": r"norm=jitrope.Norm\(",
}


@pytest.mark.parametrize("word", OLD)
def test_another_word_is_told_the_right_one(word: str) -> None:
    for function, tensors in ((jitrope.apply_rope, (Q, K)), (jitrope.prepare_qkv, (Q, K, V))):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{word}'; pass {OLD[word]}"):
            function(*tensors, COS, SIN, **{word: 1})


def test_an_unknown_word_is_refused_as_python_does() -> None:
    for word in ("table", "fp8", "rotery_dim"):
        with pytest.raises(TypeError, match=rf"apply_rope\(\) got an unexpected keyword argument '{word}'$"):
            jitrope.apply_rope(Q, K, COS, SIN, **{word: True})


WITHOUT_MEANING = {
    "norm across heads and cache": (
        {"norm": Norm(across_heads=True), "cache": VALUES["cache"]},
        "across_heads does not go with a cache",
    ),
    "two scales of k": ({"cache": VALUES["cache"], "quantize": VALUES["quantize"]}, "give its scales to KVCache"),
    "fp8 in place": ({"quantize": VALUES["quantize"], "inplace": True}, "inplace does not go with quantize"),
    "fp8 of a q in place": (
        {"cache": VALUES["cache"], "quantize": Quantize(0.5), "inplace": True},
        "inplace does not go",
    ),
    "ids in a list": ({"positions": [0, 1]}, "positions is .*it must be a tensor of ids, or a jitrope.Packed"),
    "a norm's module": ({"norm": torch.nn.RMSNorm(8)}, "norm is a module, RMSNorm; it must be a jitrope.Norm"),
    "caches in a tuple": ({"cache": caches()}, "cache is .*it must be a jitrope.KVCache"),
    "a number to quantize": ({"quantize": 0.5}, "quantize is 0.5; it must be a jitrope.Quantize"),
}


@pytest.mark.parametrize("name", WITHOUT_MEANING)
def test_a_combination_without_a_meaning_is_refused(name: str) -> None:
    words, message = WITHOUT_MEANING[name]
    k = K.clone()
    with pytest.raises(jitrope.InvalidInput, match=message):
        jitrope.prepare_qkv(Q, k, V, COS, SIN, **words)
    assert torch.equal(k, K)


MADE_WRONG = {
    "packed": (lambda: Packed([0, 2, 6]), r"Packed: cu_seqlens is \[0, 2, 6\]; it must be a tensor"),
    "packed, length": (lambda: Packed(LENGTHS, 2.5), "Packed: max_seqlen is 2.5; it must be a whole number"),
    "starts": (lambda: Starts(3), "Starts: start_positions is 3; it must be a tensor"),
    "mrope": (lambda: Mrope(IDS, ()), "Mrope: mrope_section is"),
    "shifts": (lambda: Shifts([1]), r"Shifts: position_ids is \[1\]; it must be a tensor"),
    "norm": (lambda: Norm("w"), "Norm: q_weight is 'w'; it must be a tensor"),
    "norm, rounding": (lambda: Norm(rounding="thrice"), "Norm: rounding is 'thrice'; it must be one of"),
    "cache": (lambda: KVCache(*caches(), [1]), r"KVCache: slot_mapping is \[1\]; it must be a tensor"),
    "quantize": (lambda: Quantize(None), "Quantize: q_scale is None; it must be a finite number, or a tensor"),
}


@pytest.mark.parametrize("name", MADE_WRONG)
def test_a_value_is_checked_when_it_is_made(name: str) -> None:
    make, message = MADE_WRONG[name]
    with pytest.raises(jitrope.InvalidInput, match=message):
        make()


def test_help_shows_the_keywords() -> None:
    """An editor reads the TypedDict; `help` reads the signature."""
    for function in (jitrope.apply_rope, jitrope.prepare_qkv, jitrope.prepare_fused_qkv):
        parameters = inspect.signature(function).parameters
        assert {"positions", "layout", "interleaved", "rotary_dim", "inplace", "check"} <= parameters.keys()
        assert parameters["layout"].default == "bshd"
        assert not any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def test_a_forced_launch_gives_the_same_bits() -> None:
    want = jitrope.apply_rope(Q, K, COS, SIN)
    try:
        for launch in ("token_linear", "grid_2d"):
            jitrope.configure(launch=launch)
            for x, y in zip(jitrope.apply_rope(Q, K, COS, SIN), want):
                assert x is not None
                assert torch.equal(x, y)  # type: ignore[arg-type]
        with pytest.raises(jitrope.InvalidInput, match="configure: launch is '3d'; it must be one of None, 'auto', "):
            jitrope.configure(launch="3d")
        jitrope.configure(compile=False)
        assert config.launch() == "grid_2d"  # a setting that is not given does not change
    finally:
        jitrope.configure(compile=None, launch=None)


def test_a_launch_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """`configure` takes precedence; calls, compiled or not, follow it, and refuse a wrong word."""
    compiled = torch.compile(jitrope.apply_rope, backend="eager", fullgraph=True)
    want = jitrope.apply_rope(Q, K, COS, SIN)
    for given, told in (("", "auto"), ("auto", "auto"), ("grid_2d", "grid_2d")):
        monkeypatch.setenv("JITROPE_LAUNCH", given)
        assert config.launch() == told
        for x, y in zip(compiled(Q, K, COS, SIN), want):
            assert torch.equal(x, y)
    for told in ("token_linear", "auto"):
        jitrope.configure(launch=told)
        assert config.launch() == told
    monkeypatch.setenv("JITROPE_LAUNCH", "3d")
    jitrope.configure(launch=None)
    allowed = "'auto', 'token_linear', 'grid_2d'"
    with pytest.raises(jitrope.InvalidInput, match=f"JITROPE_LAUNCH is '3d'; it must be one of {allowed}$"):
        jitrope.apply_rope(Q, K, COS, SIN)


# ---- common mistakes -----------------------------------------------------------------------------------

_Q, _K = torch.ones(2, 6, 4, 8), torch.ones(2, 6, 2, 8)
_ANGLES = torch.arange(6.0)[:, None] / torch.arange(1.0, 5.0)
_COS, _SIN = _ANGLES.cos(), _ANGLES.sin()
_REPEATED = [x.repeat_interleave(2, -1) for x in (_COS, _SIN)]
_HALVES = [torch.cat((x, x), -1) for x in (_COS, _SIN)]
_PARTIAL = [torch.cat((x, x), -1) for x in (_COS[:, :2], _SIN[:, :2])]

MISTAKES = {
    "no k": ((_Q, _COS, _SIN), {}, "sin is missing; pass cos and sin, .*, and None in the place of a k"),
    "no sin": (
        (_Q, _K, _COS),
        {},
        "sin is missing; pass cos and sin, or one of cos_sin_cache, freqs and freqs_cis, and None",
    ),
    "tables for q and k": (
        (_Q, *[x[None, :, None] for x in (_COS, _SIN)]),
        {},
        "sin is missing; pass cos and sin, .*, and None in the place of a k",
    ),
    "numpy": ((_Q, _K, _COS.numpy(), _SIN), {}, r"pass torch.from_numpy\(cos\)"),
    "no batch": ((_Q[0], _K[0], _COS, _SIN), {}, r'for \(T, H, D\) pass layout="thd"'),
    "packed with a batch": (
        (_Q, _K, _COS, _SIN),
        {"positions": jitrope.Packed(torch.tensor([0, 6]))},
        r"it must be \(T, H, D\), .*; Packed implies layout 'thd'",
    ),
    "real and imaginary parts": (
        (_Q, _K),
        {"freqs_cis": torch.stack((_COS, _SIN), -1)},
        r"pass torch.view_as_complex\(table\)",
    ),
    "a tuple": ((_Q, _K, (_COS, _SIN)), {}, r"cos is a tuple of 2; unpack it: pass \*table"),
    "complex": ((_Q, _K, torch.polar(_COS, _SIN)), {}, "pass a complex table as freqs_cis=table"),
    "complex twice": ((_Q, _K, *[torch.polar(_COS, _SIN)] * 2), {}, "pass a complex table as freqs_cis=table"),
    "nothing": ((_Q, _K), {}, "pass cos and sin, .*, not none"),
    "an axis of heads": ((_Q, _K, _COS[None, None], _SIN[None, None]), {}, r"pass cos.squeeze\(1\)"),
    "exchanged": ((_Q, _K, _SIN, _COS), {"check": True}, "as if they were exchanged; pass cos first, then sin"),
    "neighbours": ((_Q, _K, *_REPEATED), {"check": True}, "twice in a row, but .* pass interleaved=True"),
    "halves": ((_Q, _K, *_HALVES), {"check": True, "interleaved": True}, "second half, but .* pass interleaved=False"),
    "partial halves": ((_Q, _K, *_PARTIAL), {"check": True}, "as in a full-width table, .* pass rotary_dim=4"),
    "exchanged in a cache": (
        (_Q, _K),
        {"check": True, "cos_sin_cache": torch.cat((_SIN, _COS), 1)},
        "in cos_sin_cache row 0 .* exchanged",
    ),
    "offsets past the end": (
        (_Q[0], _K[0], _COS, _SIN),
        {"check": True, "positions": jitrope.Packed(torch.tensor([0, 9]))},
        "ends at 9, but q",
    ),
    "another dtype": ((_Q, _K.half(), _COS, _SIN), {}, r"pass k.to\(q\)"),
    "layout of both": (
        (_Q.transpose(1, 2), _Q[:, :, :1].transpose(1, 2), _COS, _SIN),
        {},
        "only H may differ, and layout is 'bshd'",
    ),
    "a list": ((_Q.tolist(), _K, _COS, _SIN), {}, "q is a list of"),
    "heads that are not split": (
        (_Q.flatten(2), None, _COS, _SIN),
        {},
        r"for \(B, S, H D\) q.unflatten\(-1, \(H, D\)\)",
    ),
    "one head without its axis": ((_Q, _K[:, :, 0], _COS, _SIN), {}, r"for \(B, S, D\) k.unsqueeze\(2\)"),
    "one of two is not split": ((_Q, _K.flatten(2), _COS, _SIN), {}, r"for \(B, S, H D\) k.unflatten\(-1, \(H, D\)\)"),
    "heads first, not split": ((_Q.flatten(2), None, _COS, _SIN), {"layout": "bhsd"}, r'pass layout="thd"$'),
    "another width": ((_Q, _K[..., :4], _COS, _SIN), {}, "only H may differ, and layout is 'bshd'$"),
    "another batch": ((_Q, _K[:1], _COS, _SIN), {}, "only H may differ, and layout is 'bshd'$"),
    "an odd head": ((_Q[..., :7], None, _COS, _SIN), {}, "rotary_dim, by default D, is 7"),
    "a negative position": (
        (_Q, _K, _COS, _SIN),
        {"check": True, "positions": torch.arange(6) - 1},
        "go from -1 to 4; they must be 0",
    ),
    "a difference past the table": (
        (_Q, _K, _COS, _SIN),
        {"check": True, "positions": jitrope.Shifts(torch.full((6,), -9))},
        "differences of positions have sizes from 9 to 9, but the table has rows 0 to",
    ),
    "offsets that fall": (
        (_Q[0], _K[0], _COS, _SIN),
        {"check": True, "positions": jitrope.Packed(torch.tensor([0, 4, 3, 6]))},
        r"cu_seqlens\[2\] falls from 4 to 3; .* ascend",
    ),
    "offsets that begin late": (
        (_Q[0], _K[0], _COS, _SIN),
        {"check": True, "positions": jitrope.Packed(torch.tensor([1, 4]))},
        r"cu_seqlens\[0\] is 1",
    ),
    "layout": ((_Q.transpose(1, 2),) * 2 + (_COS, _SIN), {"check": True}, "pass layout='bhsd'"),
}


CAPTURED = {
    "apply_rope": lambda: jitrope.apply_rope(_Q, _K, _COS, _SIN, check=True),
    "prepare_qkv": lambda: jitrope.prepare_qkv(_Q, _K, None, _COS, _SIN, norm=Norm(), check=True),
    "prepare_fused_qkv": lambda: jitrope.prepare_fused_qkv(_Q, _COS, _SIN, heads=(2, 1), check=True),
    "prepare_mla_qkv": lambda: jitrope.prepare_mla_qkv(_Q, _Q * 2, _K[:, :, :1], _COS, _SIN, check=True),
}


@pytest.mark.parametrize("name", CAPTURED)
def test_a_check_during_the_capture_of_a_cuda_graph_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for the device, which ends a capture with an error of CUDA."""
    CAPTURED[name]()
    monkeypatch.setattr(watch, "capturing", lambda x: True)
    with pytest.raises(jitrope.InvalidInput, match=f"{name}: check=True .* CUDA graph do not; leave it out"):
        CAPTURED[name]()


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_of_the_first_hour_is_named(name: str) -> None:
    arguments, words, text = MISTAKES[name]
    with pytest.raises(jitrope.InvalidInput, match=text):
        jitrope.apply_rope(*arguments, **words)


def test_a_forgotten_v_is_named() -> None:
    with pytest.raises(jitrope.InvalidInput, match=r"prepare_qkv: sin is missing; .* None in the place of a k or v"):
        jitrope.prepare_qkv(_Q, _K, _COS, _SIN)


@pytest.mark.parametrize(
    ("word", "text"),
    [("norm", "prepare_qkv has it"), ("is_neox_style", "pass interleaved=not is_neox_style"),
     ("unsqueeze_dim", "pass layout="), ("slot_mapping", r"cache=jitrope.KVCache\(...\) to prepare_qkv")],
)  # fmt: skip
def test_a_word_of_another_function_or_library_is_named(word: str, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        jitrope.apply_rope(_Q, _K, _COS, _SIN, **{word: None})  # type: ignore[call-overload]


def test_check_takes_right_calls() -> None:
    for tables, words in (((_COS, _SIN), {}), (_HALVES, {}), (_REPEATED, {"interleaved": True})):
        jitrope.apply_rope(_Q, _K, *tables, check=True, **words)
    ones, zeros = torch.ones(6, 8), torch.zeros(6, 8)
    jitrope.apply_rope(_Q, _K, ones, zeros, check=True)
    jitrope.apply_rope(_Q[:, :0], None, ones[:0], zeros[:0], check=True)
    jitrope.apply_rope(_Q[:0], None, torch.ones(0, 6, 4), torch.ones(0, 6, 4), check=True)
    jitrope.apply_rope(_Q.transpose(1, 2), None, _COS, _SIN, layout="bhsd", check=True)


def test_prepare_qkv_names_itself() -> None:
    """Without a norm, a cache and fp8 it is the operation of `apply_rope`."""
    with pytest.raises(jitrope.InvalidInput, match=r"^prepare_qkv: pass cos and sin"):
        jitrope.prepare_qkv(Q, K, V)
    with pytest.raises(TypeError, match=r"^prepare_qkv\(\) got an unexpected keyword argument 'q_weight'; pass norm="):
        jitrope.prepare_qkv(Q, K, V, COS, SIN, q_weight=1)


WRONG = {  # a value with a wrong number or word, and the message
    "eps": (lambda: Norm(eps=-10), "Norm: eps is -10.0; it must be 0 or above"),
    "a scale of zero": (lambda: Quantize(0), "q_scale is 0; it must be above 2.94e-39"),
    "a negative scale": (lambda: KVCache(*caches(), IDS, v_scale=-1.0), "v_scale is -1.0; it must be above 2.94e-39"),
    "a scale that fp32 makes zero": (lambda: Quantize(1e-60), "q_scale is 1e-60; it must be above 2.94e-39"),
    "a scale without a reciprocal": (lambda: Quantize(1e-39), "q_scale is 1e-39; it must be above 2.94e-39, so that"),
    "a cache's scale without a reciprocal": (
        lambda: KVCache(*caches(), IDS, k_scale=1e-40),
        "k_scale is 1e-40; it must",
    ),
    "hadamard": (lambda: Quantize(1.0, hadamard="rest"), "Quantize: hadamard is 'rest'; it must be True or False"),
    "an array of words": (lambda: jitrope.DynamicQuantize(scale_fmt=np.array(["ue8m0"])), "scale_fmt is a numpy array"),
    "scale_fmt": (lambda: jitrope.DynamicQuantize(scale_fmt="x"), "it must be one of None, 'ue8m0'"),
    "no configuration": (lambda: jitrope.tables.from_config(None), "config is None; it must be a transformers"),
    "a file's name": (lambda: jitrope.tables.from_config("config.json"), "config is 'config.json'; it must be"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_refused_when_it_is_made(name: str) -> None:
    make, text = WRONG[name]
    with pytest.raises(jitrope.InvalidInput, match=text):
        make()
