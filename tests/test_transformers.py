"""transformers' models, tiny and random, give the stock models' bits with jitrope, on the CPU and the GPU."""

from __future__ import annotations

import copy
import inspect
import json
import os
import pickle
import shutil
import sys
import types
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jitrope
from jitrope.integrations import _host, _variants
from jitrope.integrations import transformers as integration
from jitrope.tools import bundle
from jitrope.tools.prewarm import specs_of

from . import fresh
from .devices import DEVICES, slow
from .host import backend
from .hosts import missing

HOST = "pip install 'transformers>=5.17' 'kernels>=0.17.2'"
if os.environ.get("CI"):  # CI has every host
    import transformers
else:
    transformers = pytest.importorskip("transformers", reason=f"the host library is not installed: {HOST}")

from . import transformers_zoo as zoo  # noqa: E402  it imports transformers


def numbers(words: str) -> dict[str, int]:
    """Sizes of a configuration."""
    return {name: int(value) for name, value in (word.split("=") for word in words.split())}


SIZES = numbers("hidden_size=32 intermediate_size=48 num_hidden_layers=2 num_attention_heads=4")
# a family, and the calls of rope in a forward pass, by whom
MODELS = {
    "llama": {"jitrope": 2},
    "qwen2": {"jitrope": 2},
    "qwen3": {"fused": 2},
    "gemma2": {"jitrope": 2},
    "gemma3": {"fused": 2},
    "gemma3n": {"fused": 4},  # q and k separately
    "gemma4": {"fused": 4},
    "glm": {"jitrope": 2},
    "glm4": {"jitrope": 2},
    "phi": {"jitrope": 2},
    "phi3": {"jitrope": 2},
    "gpt_neox": {"jitrope": 2},
    "cohere": {"jitrope": 2},
    "olmo2": {"fused": 2},
    "ernie4_5": {"jitrope": 2},
    "gpt_oss": {"jitrope": 2},  # tables of half width
    "deepseek_v3": {"jitrope": 2},  # interleaved pairs into halves, k with one head
    "deepseek_v2": {"jitrope": 2},  # complex tables
    "gptj": {"jitrope": 4},  # q and k separately
}
# With partial rotary ours keeps the strides, while the hosts' concatenation is contiguous, so later matrix products may
# sum in another order. torch's complex products on a CPU differ with the strides (deepseek_v2).
CLOSE = {"glm", "glm4", "phi3", "gpt_neox", "deepseek_v2"}


ON_HOST = backend.DEVICE == "cpu"  # CPU tensors stand in for those of a GPU


@pytest.fixture(autouse=True)
def _trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials are in plain torch, as beside a GPU."""

    def plain(original: Any) -> Any:
        def function(*arguments: Any) -> Any:
            with backend.plain():
                return original(*arguments)

        return function

    for name in ("fuse", "recognise") if ON_HOST else ():
        monkeypatch.setattr(integration, name, plain(getattr(integration, name)))


@pytest.fixture(autouse=True)
def _stock() -> Iterator[None]:
    """After each test, no function is replaced."""
    assert not _host.placed
    yield
    integration.disable()


def prepared(name: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[nn.Module, dict[str, Tensor]]:
    return zoo.language_model(name).to(device, dtype), {"input_ids": zoo.IDS.to(device)}


def outcome(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The logits, and the gradient of every parameter."""
    model.zero_grad()
    logits = model(**inputs, use_cache=False).logits
    logits.float().square().mean().backward()
    grads = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **grads}


# ---- models --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_model_and_gradients(name: str, device: str) -> None:
    model, inputs = prepared(name, device)
    stock = outcome(model, inputs)
    with integration.enable(model) as report:
        ours = outcome(model, inputs)
    back = outcome(model, inputs)
    assert report.calls == {"jitrope": 0, "host": 0, **MODELS[name]}
    assert stock.keys() == ours.keys()
    assert stock["logits"].std() > 0.01
    # Kernels sum the squares of such small heads in another order than torch.
    if name not in CLOSE and not ("fused" in MODELS[name] and (ON_HOST or device != "cpu")):
        assert torch.equal(ours["logits"], stock["logits"])
    for key, want in stock.items():  # strides of gradients differ, and with them the order of sums over positions
        for got in (ours, back):
            torch.testing.assert_close(got[key], want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "cohere", "gptj", "glm4"])
def test_bf16_model(name: str, device: str) -> None:
    """It rounds once, or has the host's bits."""
    model, inputs = prepared(name, device, torch.bfloat16)
    with torch.no_grad():
        stock = model(**inputs).logits
        for rounding in ("fp32", "dtype"):
            with integration.enable(model, rounding=rounding) as report:
                ours = model(**inputs).logits
                with pytest.raises(jitrope.InvalidInput, match="rounding differs from that of an earlier call"):
                    integration.enable(model, rounding="dtype" if rounding == "fp32" else "fp32")
            assert report.calls == {"host": 0, **MODELS[name]}
            torch.testing.assert_close(ours, stock, rtol=0.1, atol=0.05)
    assert name in CLOSE or device != "cpu" or torch.equal(ours, stock)


@pytest.mark.parametrize("device", DEVICES)
def test_generation_with_a_cache(device: str) -> None:
    """A decoding step has one position, and one row of the tables."""
    model, inputs = prepared("llama", device)
    words = {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"]), "max_new_tokens": 5, "do_sample": False}
    stock = model.generate(**words)
    with integration.enable(model) as report:
        assert torch.equal(model.generate(**words), stock)
    assert report.calls["jitrope"] >= 2 * 5
    assert report.calls["host"] == 0


@pytest.mark.parametrize(
    "name", ["llama", "gemma4", *(slow(x) for x in ("glm", "deepseek_v2", "deepseek_v3", "olmo2"))]
)
def test_compiled_fullgraph(name: str) -> None:
    model, inputs = prepared(name)
    torch.compiler.reset()
    with integration.enable(model):
        want = outcome(model, inputs)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        before = integration.calls.copy()
        for _ in range(10):  # more often than torch would recompile one function
            got = outcome(compiled, inputs)
            for key, value in want.items():
                torch.testing.assert_close(got[key if key == "logits" else f"_orig_mod.{key}"], value)
    # Counted when traced; the norms are the compiler's.
    assert integration.calls - before == {"jitrope": sum(MODELS[name].values())}


def test_compiled_fullgraph_of_calls_that_are_refused() -> None:
    """An fp64 model compiles to one graph, in which the host's functions run."""
    model, inputs = prepared("llama", dtype=torch.float64)
    want = model(**inputs).logits
    torch.compiler.reset()
    with integration.enable(model) as report:
        assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(**inputs).logits, want)
        assert report.calls == {"jitrope": 0, "host": 2}
        assert torch.equal(model(**inputs).logits, want)
        # A compiled call counts once, in its trace.
        assert report.reasons["apply_rope: q is torch.float64; allowed are fp32, fp16 and bf16"] == 4


# ---- recognising ---------------------------------------------------------------------------------------


def host_of(file: str, name: str = "apply_rotary_pos_emb") -> Any:
    module = pytest.importorskip(f"transformers.models.{file}.modeling_{file}", reason=f"no {file}: {HOST}")
    return getattr(module, name)


RECOGNISED = {  # "file" or "file:function", and its variant
    "llama": "halves, full tables",
    "gpt_neox": "halves, full tables, partial",
    "cohere": "interleaved, full tables",
    "glm": "interleaved, first tables, partial",
    "gpt_oss": "halves, half tables",
    "openai_privacy_filter": "interleaved, half tables",
    "gemma4": "halves, full tables",
    "deepseek_v3:apply_rotary_pos_emb_interleave": "interleaved into halves, first tables",
    "qwen2_vl:apply_rotary_pos_emb_vision": "halves, full tables",
    "qwen4_exp": "halves, full tables, partial",
    "muse_glimmer_assistant": "halves, full tables",
    "gptj": "interleaved, half tables",  # the sine first
    "deepseek_v2:apply_rotary_emb": "interleaved, complex tables",
    "llama4:apply_rotary_emb": "interleaved, complex tables",
    "llama4:vision_apply_rotary_emb": "interleaved, complex tables",
    "dinov3_vit": "halves, full tables, behind first tokens",
    "sam2_video:apply_rotary_pos_emb_2d": "interleaved, full tables",
}


@pytest.mark.parametrize("name", RECOGNISED)
def test_recognised(name: str) -> None:
    """Our function also gives the host's results with other shapes, dtypes and strides."""
    host = host_of(*name.split(":"))
    variant = _variants.recognise(host)
    assert isinstance(variant, _variants.Variant), variant
    assert str(variant) == RECOGNISED[name]
    ours = partial(_variants.replaced, variant, _variants.names(host))
    for shape in variant.shapes:
        for part in (1, 2) if variant.partial else (1,):
            for dtypes in ((torch.float32,) * 2, (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
                arguments = _variants.probe(host, variant, shape, part, dtypes)
                # as models have q and k: views of a tensor with another order of axes
                arguments = [
                    x.transpose(-3, -2).contiguous().transpose(-3, -2)
                    if isinstance(x, Tensor) and x.dim() > 3 and x.shape[-1] == 8
                    else x
                    for x in arguments
                ]
                assert _variants.equal(ours(*arguments), host(*arguments), tolerance=0.02)


def test_memory_attention_of_sam() -> None:
    """The host rotates keys that are longer than the tables, or only in part."""
    host, ours = put("sam2_video", "apply_rotary_pos_emb_2d")
    q, k, cos, sin = torch.randn(4, 1, 2, 6, 8)
    cos, sin = cos[0, 0], sin[0, 0]
    for words in ({}, {"repeat_freqs_k": True}):
        assert all(torch.equal(a, b) for a, b in zip(ours(q, k, cos, sin, **words), host(q, k, cos, sin, **words)))
    left = integration.calls["host"]
    for words in ({"num_k_exclude_rope": 2, "repeat_freqs_k": True}, {"repeat_freqs_k": True}):
        given = q, torch.cat((k, k, k[:, :, : words.get("num_k_exclude_rope", 0)]), 2), cos, sin
        assert all(torch.equal(a, b) for a, b in zip(ours(*given, **words), host(*given, **words)))
    assert integration.calls["host"] == left + 2


def turns_a_middle_part(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    begin = (q.shape[-1] - cos.shape[-1]) // 2
    end = begin + cos.shape[-1]

    def turned(x: Tensor) -> Tensor:
        x0, x1 = x[..., begin:end].chunk(2, -1)
        y = x[..., begin:end] * cos + torch.cat((-x1, x0), -1) * sin
        return torch.cat((x[..., :begin], y, x[..., end:]), -1)

    return turned(q), turned(k)


def swaps_the_sign(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    q, k = integration.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)
    return q, -k


def returns_fp64(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    q, k = integration.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)
    return q.double() if q.dtype == torch.bfloat16 else q, k


def raises(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    raise RuntimeError("only on a GPU")


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (turns_a_middle_part, "the part of a head that it rotates is not the first"),
        (swaps_the_sign, "none of jitrope's variants"),
        (returns_fp64, "the dtype of its results"),
        (raises, "none of jitrope's variants"),
        (lambda q, k, angles: (q, k), "its signature is not known"),
        (dict, "its signature is not known"),
    ],
)
def test_not_recognised(function: Any, why: str) -> None:
    assert why in _variants.recognise(function)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("clvp", "its signature is not known"),
        ("edgetam_video:apply_rotary_pos_emb_2d_cross_attn", "its signature is not known"),  # tables of k apart
        ("nanochat", "none of jitrope's variants"),  # rotates back
        ("deepseek_v4", "is not the first"),
    ],
)
def test_functions_of_transformers_that_are_left_alone(name: str, why: str) -> None:
    assert why in _variants.recognise(host_of(*name.split(":")))


def test_probing_leaves_no_trace() -> None:
    """Recognising neither depends on the random state or default device nor changes them."""
    state = torch.get_rng_state()
    with torch.device("meta"):
        assert isinstance(_variants.recognise(host_of("llama")), _variants.Variant)
    assert torch.equal(torch.get_rng_state(), state)


# ---- calls ---------------------------------------------------------------------------------------------


@pytest.fixture
def llama() -> Iterator[tuple[Any, Any, integration.Report]]:
    """(the host's function, its replacement, the report)"""
    host = host_of("llama")
    model, _ = prepared("llama")
    with integration.enable(model) as report:
        yield host, host_of("llama"), report


def heads(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


SHAPES = {  # q, k, the tables, unsqueeze_dim; of equal or single axes too
    "bhsd": ((2, 4, 6, 16), (2, 2, 6, 16), (2, 6, 16), 1),
    "bshd": ((2, 6, 4, 16), (2, 6, 2, 16), (2, 6, 16), 2),
    "shared": ((2, 4, 6, 16), (2, 2, 6, 16), (1, 6, 16), 1),
    "decode": ((2, 4, 1, 16), (2, 2, 1, 16), (2, 1, 16), 1),
    "decode-bshd": ((2, 1, 4, 16), (2, 1, 2, 16), (2, 1, 16), 2),
    "one-head": ((2, 1, 6, 16), (2, 1, 6, 16), (2, 6, 16), 1),
    "all-alike": ((4, 4, 4, 16), (4, 4, 4, 16), (4, 4, 16), 1),
    "all-alike-bshd": ((4, 4, 4, 16), (4, 4, 4, 16), (4, 4, 16), 2),
    "from-the-end": ((2, 4, 6, 16), (2, 2, 6, 16), (2, 6, 16), -3),
    "unbatched-tables": ((2, 4, 6, 16), (2, 2, 6, 16), (6, 16), 0),
    "unbatched": ((6, 4, 16), (6, 2, 16), (6, 16), 1),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(llama: Any, name: str) -> None:
    host, ours, report = llama
    *shapes, axis = SHAPES[name]
    q, k, cos = (heads(*shape) for shape in shapes)
    sin = torch.randn_like(cos)
    for function in (ours, integration.apply_rotary_pos_emb):
        for a, b in zip(function(q, k, cos, sin, axis), host(q, k, cos, sin, axis)):
            assert torch.equal(a, b)
    assert report.calls == {"jitrope": 1, "host": 0}
    single, none = integration.apply_rotary_pos_emb(q, None, cos, sin, axis)
    assert none is None
    assert torch.equal(single, host(q, k, cos, sin, axis)[0])


def test_nothing_is_copied(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel gets the transposed views that models have."""
    _, ours, _ = llama
    q, k = (heads(2, 6, n, 16).transpose(1, 2) for n in (4, 2))
    cos, sin = heads(2, 6, 16), heads(2, 6, 16)
    seen = []
    rotate = _variants.apply_rope

    def spy(*arguments: Any, **words: Any) -> Any:
        seen.append([x.data_ptr() for x in (*arguments, words["cos"], words["sin"])])
        return rotate(*arguments, **words)

    monkeypatch.setattr(_variants, "apply_rope", spy)
    q_out, _ = ours(q, k, cos, sin)
    assert seen == [[x.data_ptr() for x in (q, k, cos, sin)]]
    assert q_out.stride() == q.stride()


HOSTS_OWN = {  # q, k and tables left to the host, which may refuse them too
    "fp64": (heads(2, 4, 6, 16).double(), heads(2, 2, 6, 16).double(), heads(2, 6, 16)),
    "fp64-tables": (heads(2, 4, 6, 16), heads(2, 2, 6, 16), heads(2, 6, 16).double()),
    "one-angle": (heads(2, 4, 6, 16), heads(2, 2, 6, 16), heads(2, 1, 16)),
    "angles-of-a-batch-row": (heads(1, 4, 6, 16), heads(1, 2, 6, 16), heads(2, 6, 16)),
    "another-k": (heads(2, 4, 6, 16), heads(2, 2, 6, 16).double(), heads(2, 6, 16)),
    "long-head": (heads(1, 1, 2, 1024), heads(1, 1, 2, 1024), heads(1, 2, 1024)),
    "one-wide": (heads(2, 4, 6, 16), heads(2, 2, 6, 16), heads(2, 6, 1)),
}


@pytest.mark.parametrize("name", HOSTS_OWN)
def test_calls_left_to_the_host(llama: Any, name: str) -> None:
    host, ours, report = llama
    q, k, cos = HOSTS_OWN[name]
    for a, b in zip(ours(q, k, cos, cos), host(q, k, cos, cos)):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    assert report.calls == {"jitrope": 0, "host": 1}


def test_the_hosts_errors_stay() -> None:
    """Llama's function and its replacement refuse partial rotary."""
    model, _ = prepared("llama")
    with integration.enable(model), pytest.raises(RuntimeError, match="must match"):
        host_of("llama")(heads(2, 4, 6, 16), heads(2, 2, 6, 16), heads(2, 6, 8), heads(2, 6, 8))


def put(file: str, name: str = "apply_rotary_pos_emb") -> tuple[Any, Any]:
    """(the host's function, its replacement)"""
    host = host_of(file, name)
    variant = _variants.recognise(host)
    ours = partial(_variants.replaced, variant, _variants.names(host))
    _host.Report("transformers").replace(sys.modules[host.__module__], name, ours, variant)
    return host, host_of(file, name)


def test_rows_for_k_only() -> None:
    """A draft model's queries use the last rows of the tables; jitrope would read the first ones."""
    host, ours = put("muse_glimmer_assistant")
    arguments = (heads(2, 4, 2, 16), heads(2, 2, 6, 16), heads(2, 6, 16), heads(2, 6, 16))
    for a, b in zip(ours(*arguments), host(*arguments)):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("file", "name"),
    [("qwen4_exp", "apply_rotary_pos_emb"), ("mistral_large4", "apply_rotary_pos_emb_interleave")],
)
def test_without_k(file: str, name: str) -> None:
    """Without k the hosts' functions return a tensor or a pair, so those run."""
    host, ours = put(file, name)
    q, cos, sin = heads(2, 4, 6, 16), heads(2, 6, 16), heads(2, 6, 16)
    before = integration.calls.copy()
    got, want = (function(q, k=None, cos=cos, sin=sin) for function in (ours, host))
    assert type(got) is type(want)
    assert torch.equal(got[0], want[0])
    assert integration.calls - before == {"host": 1}


def test_with_position_ids() -> None:
    """Some hosts' functions ignore position_ids and some do not, so those run."""
    host, ours = put("glmasr")
    arguments = (heads(2, 4, 6, 16), heads(2, 2, 6, 16), heads(2, 6, 16), heads(2, 6, 16))
    before = integration.calls.copy()
    for ids in (None, torch.arange(6)):
        for a, b in zip(ours(*arguments, ids), host(*arguments, ids)):
            assert torch.equal(a, b)
    assert integration.calls - before == {"jitrope": 1, "host": 1}


def test_wider_tables_widen_the_result(llama: Any) -> None:
    """bf16 heads and fp32 tables, as under autocast, give the host's fp32 result."""
    host, ours, report = llama
    q, k = (heads(2, n, 6, 16, dtype=torch.bfloat16) for n in (4, 2))
    cos, sin = heads(2, 6, 16), heads(2, 6, 16)
    for a, b in zip(ours(q, k, cos, sin), host(q, k, cos, sin)):
        assert a.dtype == torch.float32
        assert torch.equal(a, b)
    assert report.calls == {"jitrope": 1, "host": 0}


# ---- the plain functions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
def test_plain_function(interleaved: bool) -> None:
    """It rotates part of a head, halves or neighbours, and refuses fp64; a table gets its gradient."""
    q, k, cos, sin = heads(2, 4, 6, 16), heads(2, 2, 6, 16), heads(2, 6, 8), heads(2, 6, 8)
    host = host_of("cohere" if interleaved else "gpt_neox")
    want = host(q[..., :8], k[..., :8], cos, sin) if interleaved else host(q, k, cos, sin)
    for x, ours, theirs in zip((q, k), integration.apply_rotary_pos_emb(q, k, cos, sin, interleaved=interleaved), want):
        assert torch.equal(ours[..., :8], theirs[..., :8])
        assert torch.equal(ours[..., 8:], x[..., 8:])
    with pytest.raises(jitrope.InvalidInput, match="float64"):
        integration.apply_rotary_pos_emb(q.double(), k.double(), cos, sin, interleaved=interleaved)
    out, _ = integration.apply_rotary_pos_emb(q, k, cos.requires_grad_(), sin, interleaved=interleaved)
    assert torch.autograd.grad(out.sum(), cos)[0].any()


# ---- enable and disable ----------------------------------------------------------------------------------


def test_enable_reaches_every_holder_and_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama
    from transformers.models.qwen2 import modeling_qwen2

    host, other = modeling_llama.apply_rotary_pos_emb, modeling_qwen2.apply_rotary_pos_emb
    elsewhere = types.ModuleType("elsewhere")  # a user's `from ... import apply_rotary_pos_emb`
    elsewhere.apply_rotary_pos_emb = host
    monkeypatch.setitem(sys.modules, "elsewhere", elsewhere)
    model, _ = prepared("llama")
    with integration.enable(model) as report:
        ours = modeling_llama.apply_rotary_pos_emb
        assert ours is elsewhere.apply_rotary_pos_emb is not host
        assert modeling_qwen2.apply_rotary_pos_emb is other
        assert inspect.signature(ours) == inspect.signature(host)
        assert "modeling_llama.apply_rotary_pos_emb: halves, full tables" in report.table()
        with integration.enable(model) as again:  # changes nothing, and undoes nothing
            assert again.replaced == report.replaced
            assert modeling_llama.apply_rotary_pos_emb is ours
        assert modeling_llama.apply_rotary_pos_emb is ours
        integration.disable(prepared("qwen2")[0])
        assert modeling_llama.apply_rotary_pos_emb is ours
        integration.disable(model)
        assert modeling_llama.apply_rotary_pos_emb is host
    assert modeling_llama.apply_rotary_pos_emb is elsewhere.apply_rotary_pos_emb is host


LOADED = """
import sys, torch

model, inputs, want, function = torch.load(sys.argv[1], weights_only=False)
with torch.no_grad():
    assert torch.equal(model(**inputs).logits, want)
assert function is sys.modules["transformers.models.llama.modeling_llama"].apply_rotary_pos_emb
assert "jitrope" not in sys.modules  # models hold nothing of it
"""


def test_enabled_models_pickle_and_load_in_a_fresh_process(tmp_path: Path) -> None:
    """Pickled functions load too, as the host's functions of that process."""
    from transformers.models.llama import modeling_llama

    model, inputs = prepared("llama")
    with torch.no_grad():
        want = model(**inputs).logits
        with integration.enable(model) as report:
            other = pickle.loads(pickle.dumps(copy.deepcopy(model)))
            assert torch.equal(other(**inputs).logits, want)
            assert report.calls["jitrope"] == 2
            torch.save((model, inputs, want, modeling_llama.apply_rotary_pos_emb), tmp_path / "saved")
        assert torch.equal(other(**inputs).logits, want)
    done = fresh.python("-c", LOADED, str(tmp_path / "saved"), env=os.environ)
    assert done.returncode == 0, done.stderr[-4000:]


def test_what_is_left_alone_is_reported() -> None:
    """gpt-oss has two functions. One is replaced; the other has an unknown signature and is not."""
    from transformers.models.gpt_oss import modeling_gpt_oss

    host = modeling_gpt_oss._apply_rotary_emb
    with integration.enable(prepared("gpt_oss")[0]) as report:
        assert modeling_gpt_oss._apply_rotary_emb is host
        label = f"{modeling_gpt_oss.__name__}._apply_rotary_emb"
        assert report.left == {label: "its signature is not known"}
        assert f"{label}: left alone: its signature is not known" in report.table()
        assert str(report) == "1 function replaced, 1 left alone; 0 calls since; 0 left to transformers"
    assert str(report).startswith("1 function replaced, 1 left alone (disabled); ")


def test_a_report_begins_with_the_most_frequent_reason() -> None:
    from transformers.models.llama import modeling_llama

    with integration.enable(prepared("llama")[0]) as report:
        for width, dtype in ((16, torch.float64), (1024, torch.float32), (1024, torch.float32)):
            x, table = torch.rand(1, 2, 4, width, dtype=dtype), torch.rand(1, 4, width, dtype=dtype)
            modeling_llama.apply_rotary_pos_emb(x, x, table, table)
    summary, first, second = str(report).splitlines()
    assert summary == "1 function replaced (disabled); 0 calls since; 3 left to transformers"
    assert first.startswith("  2 x ")
    assert "1024" in first
    assert second.startswith("  1 x apply_rope: q is torch.float64")


def test_nothing_to_replace() -> None:
    with pytest.raises(jitrope.JitropeError, match="the file of Linear has no rope function"):
        integration.enable(nn.Linear(2, 2))
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=8)
    with pytest.raises(jitrope.JitropeError, match="the file of GPT2Model has"):
        integration.enable(transformers.GPT2Model(config))


@pytest.mark.parametrize("function", ["enable", "disable"])
def test_what_is_not_a_model_is_refused(function: str) -> None:
    with pytest.raises(jitrope.InvalidInput, match=f"{function}: model is 'model'; it must be a model .*, or None"):
        getattr(integration, function)("model")


def test_words_of_enable() -> None:
    model = prepared("llama")[0]
    with pytest.raises(jitrope.InvalidInput, match="enable: fuse_norm is 'x'; it must be True or False"):
        integration.enable(model, fuse_norm="x")
    with pytest.raises(jitrope.InvalidInput, match="enable: rounding is 'bf16'; it must be one of 'fp32', 'dtype'"):
        integration.enable(model, rounding="bf16")


def test_a_model_of_diffusers_belongs_to_its_module() -> None:
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.FluxTransformer2DModel(num_layers=0, num_single_layers=1, num_attention_heads=1)
    with pytest.raises(jitrope.JitropeError) as error:
        integration.enable(model)
    said = "the file of FluxTransformer2DModel has no rope function that jitrope can replace"
    assert str(error.value) == f"{said}; it is of diffusers: use jitrope.integrations.diffusers"
    pipeline = diffusers.FluxPipeline(**dict.fromkeys(inspect.signature(diffusers.FluxPipeline).parameters))
    with pytest.raises(jitrope.InvalidInput, match=r"use jitrope.integrations.diffusers$"):
        integration.enable(pipeline)


def test_wrapped_and_derived_models() -> None:
    """A class is found through its bases, which covers the classes of FSDP and of users."""

    class Mine(transformers.LlamaForCausalLM):
        pass

    config = transformers.LlamaConfig(**SIZES, vocab_size=64, attn_implementation="eager")
    with integration.enable(nn.Sequential(Mine(config))) as report:
        assert list(report.replaced) == ["transformers.models.llama.modeling_llama.apply_rotary_pos_emb"]


# ---- the kernels library -----------------------------------------------------------------------------------


@pytest.fixture
def kernels() -> Any:
    try:
        import kernels
    except ImportError:
        missing(HOST)
    return kernels


KERNELIZED = {"llama": 16, "gpt_neox": 8, "gpt_oss": 8, "openai_privacy_filter": 8, "nanochat": 16, "olmo2": 16}
NOT_OURS = {"nanochat"}


@pytest.mark.parametrize("mode", ["INFERENCE", "TRAINING"])
@pytest.mark.parametrize("file", KERNELIZED)
def test_kernelized(kernels: Any, file: str, mode: str) -> None:
    """Functions of one name compute different things. Each keeps its results and gradients, also in one graph."""
    host = host_of(file)
    if isinstance(host, nn.Module):  # transformers has decorated it
        host = type(host)().forward
    function = kernels.use_kernel_forward_from_hub("rotary_pos_emb")(
        types.FunctionType(host.__code__, host.__globals__, host.__name__, host.__defaults__)
    )

    @kernels.use_kernelized_func(function)
    class Attention(nn.Module):
        def forward(self, *arguments: Tensor) -> Any:
            return function(*arguments)

    q, k = heads(2, 4, 6, 16).requires_grad_(), heads(2, 2, 6, 16).requires_grad_()
    tables = heads(2, 6, KERNELIZED[file]), heads(2, 6, KERNELIZED[file])

    def results(attention: Any) -> tuple[Tensor, ...]:
        out = attention(q, k, *tables)
        return *out, *torch.autograd.grad(out[0].square().sum() + out[1].sin().sum(), (q, k))

    attention = Attention()
    want = results(attention)
    wanted = getattr(kernels.Mode, mode) | kernels.Mode.TORCH_COMPILE
    with kernels.use_kernel_mapping(integration.kernel_mapping("cpu"), inherit_mapping=False):
        kernels.kernelize(attention, mode=wanted, device="cpu", use_fallback=False)
    before = integration.calls.copy()
    torch.compiler.reset()
    for ours in (torch.compile(attention, fullgraph=True, backend="aot_eager"), attention):
        for a, b in zip(results(ours), want):
            torch.testing.assert_close(a, b)
    assert integration.calls - before == {"host" if file in NOT_OURS else "jitrope": 2}
    before = integration.calls.copy()
    function(q.double(), k.double(), *(t.double() for t in tables))
    assert integration.calls - before == {"host": 1}


def test_layer_alone(kernels: Any) -> None:
    """Without a replaced function, the layer computes the plain one."""
    q, k, cos, sin = heads(2, 4, 6, 16), heads(2, 2, 6, 16), heads(2, 6, 8), heads(2, 6, 8)
    layer = integration.kernel_mapping()["rotary_pos_emb"]["cuda"].load()()
    for a, b in zip(layer(q, k, cos, sin), integration.apply_rotary_pos_emb(q, k, cos, sin)):
        assert torch.equal(a, b)


SCRIPT = """
from transformers.utils import import_utils
# transformers asks for one minor version of kernels; what is used here is the same in its neighbours.
import_utils.is_kernels_available.__wrapped__.__defaults__ = ("0.17", "1.0")
import kernels, torch, transformers
from jitrope.integrations import transformers as integration

config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, attn_implementation="eager")
model = transformers.LlamaForCausalLM(config)
ids = torch.arange(10)[None]
stock = model(ids).logits
with integration.enable(model) as report:  # a function that kernels has made a module of
    assert torch.equal(model(ids).logits, stock)
assert report.calls == {"jitrope": 2, "host": 0}, report
kernels.register_kernel_mapping(integration.kernel_mapping("cpu"))
kernels.kernelize(model, mode=kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE, device="cpu")
integration.calls.clear()
logits = model(ids).logits
assert torch.equal(logits, stock)
logits.sum().backward()
assert integration.calls == {"jitrope": 2}, integration.calls
assert isinstance(transformers.models.llama.modeling_llama.apply_rotary_pos_emb, torch.nn.Module)
print("kernelized")
"""


@pytest.mark.slow
def test_kernelized_model(kernels: Any) -> None:
    """transformers applies its decorators when it is imported, so this test needs its own process."""
    root = str(Path(__file__).parent.parent)
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = fresh.python("-c", SCRIPT, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().endswith("kernelized")


HUB = """
import sys, torch
sys.modules.update(dict.fromkeys(("cupy", "cupy_backends", "jinja2")))  # importing one of them fails
from pathlib import Path
import kernels
hub = kernels.get_local_kernel(Path(sys.argv[1]), trust_remote_code=True)
assert "jitrope" not in sys.modules and hub.__name__ == "_jitrope_0123456"
x, angles = torch.randn(1, 4, 2, 8), torch.rand(4, 4)
assert hub.apply_rope(x, None, angles.cos(), angles.sin())[0].shape == x.shape
jit, tools = (sys.modules[f"{hub.__name__}.jit.kernels"], __import__(f"{hub.__name__}.tools.prewarm").tools)
(found,) = {jit.build(spec, "sm_90").compiled for spec in tools.prewarm.specs_of(heads=8)}
print("from the bundle" if not found else "compiled")
"""


def test_the_package_is_a_kernel_of_the_hub(kernels: Any, tmp_path: Path) -> None:
    """Under the name of one release, with torch alone: no CuPy, no Jinja. Its kernels come from the bundle in it."""
    pytest.importorskip("cupy", reason="the bundle is compiled")
    root, backend = Path(__file__).parent.parent, "cuda" if torch.version.cuda else "cpu"
    folder = tmp_path / "build" / f"torch-{backend}"
    shutil.copytree(root / "jitrope", folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(root / "templates", folder / "templates", dirs_exist_ok=True)
    metadata = {
        "id": "_jitrope_0123456",
        "name": "jitrope",
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": [],
    }
    (folder / "metadata.json").write_text(json.dumps({**metadata, "backend": {"type": backend}}))
    bundle.write(folder / "kernels.tar", [(spec, "sm_90") for spec in specs_of(heads=8)], 1)
    environment = {**os.environ, "JITROPE_CACHE_DIR": str(tmp_path / "k")}
    done = fresh.python("-c", HUB, str(tmp_path), env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "from the bundle"
