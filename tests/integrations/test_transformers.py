"""transformers' models, tiny and random, give the stock models' bits with jitrope, on the CPU and the GPU."""

from __future__ import annotations

import copy
import os
import pickle
import re
from collections import Counter
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import jitrope
from jitrope.integrations import _host
from jitrope.integrations import transformers as integration
from jitrope.integrations.transformers import variants

from .. import fresh
from ..devices import DEVICES, devices, slow
from ..host import backend
from ..hosts import group, installed
from . import transformers_zoo as zoo

# Families, and the launches of a forward: some rotate q and k separately, and some layers have no rope.
TWO = str.split("llama qwen2 gemma2 glm glm4 phi phi3 gpt_neox cohere ernie4_5 gpt_oss deepseek_v3 deepseek_v2")
ROPE = {**dict.fromkeys(TWO, 2), "gptj": 4}
TWO_FUSED = str.split("qwen3 gemma3 olmo2 olmo3 afmoe hunyuan_v1_dense llama4 qwen3_vl_moe")
FUSED = {**dict.fromkeys(TWO_FUSED, 2), "gemma3n": 4, "gemma4": 4, "lfm2_moe": 1, "qwen3_5": 1}
OF_V = {"gemma3n": 2, "gemma4": 2}  # the launches of v's norms
# With partial rotary ours keeps the strides, while the hosts' concatenation is contiguous, so later matrix products may
# sum in another order. torch's complex products on a CPU differ with the strides (deepseek_v2).
CLOSE = {"glm", "glm4", "phi3", "gpt_neox", "deepseek_v2"}

ON_HOST = backend.DEVICE == "cpu"  # CPU tensors stand in for those of a GPU


@pytest.fixture(autouse=True)
def _trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials are in plain torch, as beside a GPU."""
    if ON_HOST:
        monkeypatch.setattr(integration, "recognise", backend.plain()(integration.recognise))


GIVEN = {"input_ids": zoo.IDS, "use_cache": False}


# ---- whole models --------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [*ROPE, *FUSED])
def test_model_and_gradients(name: str, device: str) -> None:
    """A training step, enabled and afterwards."""
    model, given = zoo.language_model(name).to(device), {**GIVEN, "input_ids": zoo.IDS.to(device)}
    stock = zoo.outcome(model, given)
    # Kernels sum the squares of such small heads in another order than torch.
    exact = name not in CLOSE and not (name in FUSED and (ON_HOST or device != "cpu"))
    with integration.enable(model) as report:
        zoo.check_close(zoo.outcome(model, given), stock, exact=exact)
        before = report.calls  # norms after rope are in its launch from the second call on
        zoo.check_close(zoo.outcome(model, given), stock, exact=exact)
        assert report.calls - before == Counter(fused=FUSED.get(name, 0), jitrope={**ROPE, **OF_V}.get(name, 0))
    zoo.check_close(zoo.outcome(model, given), stock)
    assert stock["out"].std() > 0.01


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "cohere", "gptj", "glm4"])
def test_bf16_model(name: str, device: str) -> None:
    """It rounds once, or has the host's bits."""
    model, given = zoo.language_model(name, torch.bfloat16).to(device), {**GIVEN, "input_ids": zoo.IDS.to(device)}
    with torch.no_grad():
        stock = model(**given).logits
        for rounding in ("fp32", "dtype"):
            with integration.enable(model, rounding=rounding) as report:
                ours = model(**given).logits
                with pytest.raises(jitrope.InvalidInput, match="rounding differs from that of an earlier call"):
                    integration.enable(model, rounding="dtype" if rounding == "fp32" else "fp32")
            assert report.calls == {"host": 0, "jitrope": ROPE[name]}
            torch.testing.assert_close(ours, stock, rtol=0.1, atol=0.05)
    assert name in CLOSE or device != "cpu" or torch.equal(ours, stock)


GENERATE = [("llama",), ("qwen3",), ("gemma4",), ("olmo3",), ("hunyuan_v1_dense",)]


@pytest.mark.parametrize(("device", "family"), devices(GENERATE, GENERATE[:1]))
def test_generation(device: str, family: str) -> None:
    """A decoding step has one token, and one row of the tables, and k and v go to a cache."""
    model, ids = zoo.language_model(family).to(device), zoo.IDS.to(device)
    words = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "do_sample": False}
    stock = model.generate(**words)
    with integration.enable(model) as report:
        assert torch.equal(model.generate(**words), stock)
    assert report.calls["jitrope"] + report.calls["fused"] >= 2 * 5
    assert report.calls["fused"] >= (2 * 4 if family in FUSED else 0)
    assert report.calls["host"] == 0


ONE_LAYER = {"num_hidden_layers": 1}
COMPILED: list[Any] = [(name, dtype, ONE_LAYER) for name, dtype in
                       (("llama", torch.float32), ("llama", torch.float64), ("qwen3", torch.bfloat16))]  # fmt: skip
COMPILED += [(name, torch.bfloat16, {}) for name in ("gemma4", "glm")]
COMPILED += [(name, torch.float32, {}) for name in ("deepseek_v2", "deepseek_v3", "olmo2", "hunyuan_v1_dense")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype", "words"), COMPILED)
def test_compiled_fullgraph(name: str, dtype: torch.dtype, words: dict[str, int]) -> None:
    """A model that is compiled before and after `enable` is one graph, in which the host's norms run.

    In an fp64 model the host's rope runs too.
    """
    model, given = zoo.language_model(name, dtype, **words), GIVEN
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")

    stock = zoo.outcome(model, given)
    zoo.check_close(zoo.outcome(compiled, given), stock, dtype)
    with integration.enable(model) as report:
        want = zoo.outcome(model, given)
        before = report.calls
        for _ in range(10):  # more often than torch would recompile one function
            zoo.check_close(zoo.outcome(compiled, given), want, dtype)
        # Counted when traced; the norms are the compiler's.
        by = "host" if dtype == torch.float64 else "jitrope"
        assert report.calls - before == {by: {**ROPE, **FUSED}[name] // (2 if words else 1)}
        zoo.check_close(zoo.outcome(model, given), want, dtype)
    must = "(B, H, S, D), float32 or float16 or bfloat16, on cpu"
    assert by == "jitrope" or report.reasons == {f"apply_rope: q is float64; it must be {must}": 3}
    before = integration.calls.copy()
    zoo.check_close(zoo.outcome(compiled, given), stock, dtype)
    assert integration.calls == before


@pytest.mark.parametrize("strict", [False, slow(True)])
def test_an_export_has_the_norms(strict: bool) -> None:
    model = zoo.language_model("qwen3")
    with integration.enable(model), torch.no_grad():
        for _ in range(2):
            want = model(**GIVEN).logits
        program = torch.export.export(model, (), GIVEN, strict=strict)
    torch.testing.assert_close(program.module()(**GIVEN).logits, want)


# ---- every attention class -----------------------------------------------------------------------------

# The classes of transformers 5.24 that are fused, without "Attention" at their ends.
FUSED_NAMES = str.split("""
Afmoe Apertus Apertus1p5Text Beam DiffusionGemmaDecoderText DiffusionGemmaEncoderText Doge Dots1 Dots3NoteVision
EmbeddingGemma2 Esmc EsmFold2Atom Exaone4 Exaone4_5_ ExaoneMoe FlexOlmo Flint Gemma3 Gemma3nText Gemma4Text
Gemma4UnifiedText Glm4Moe Glm5NextVision GlmOcrVision HunYuanDenseV1 HunYuanMoEV1 HunYuanVLDenseV1 HYV3 Kolibri1 Laguna
LaraMini Lfm2 Lfm2Moe Lfm3 Lfm3VlVision Llama4Text Mellum MiniMaxM2 MiniMaxM3VL Molmo2 MuseGlimmerAssistant
Nemotron3_5Transcribe NeoMME Olmo2 Olmo3 OlmoHybrid Olmoe PeAudioEncoder PeAudioVideoEncoder PeVideoEncoder Qwen3
Qwen3_5 Qwen3_5Moe Qwen3Moe Qwen3Next Qwen3OmniMoeTalkerCodePredictor Qwen3OmniMoeThinkerText Qwen3VLText
Qwen3VLMoeText Qwen4ExpText Sapiens2 Step3p7 T5Gemma2Merged T5Gemma2Self TimesFm2_5
""")
FUSED_CLASSES = ["MiniMaxM3VLIndexer", *[f"{name}Attention" for name in FUSED_NAMES]]
# Not called here: a draft's k has more tokens than q; indexers and MLA without small arguments.
NO_ARGUMENTS = str.split("""MuseGlimmerAssistantAttention AXK2Indexer DeepseekV32Indexer Dots3NoteTextIndexer
GlmMoeDsaIndexer HYV4Indexer LongcatFlashMLA""")
FORMS = ("all tokens", "last tokens", "complex")
FAST = ("dinov3_vit", "gemma4", "hunyuan_v1_dense", "lfm2", "llama4", "olmo2", "qwen3", "qwen3_next", "qwen3_vl")


def compared(family: str) -> dict[str, bool | None]:
    """Compares all layers of a family, stock and enabled. By class: whether it is fused; None if no layer was made."""
    modules = zoo.attention_modules(family)
    done: dict[str, bool | None] = dict.fromkeys(modules)
    for label, module in modules.items():
        if module is None:
            continue
        done[label] = False
        try:
            with integration.enable(module.eval()) as report:
                what = next(what for cls, what in report.attention.items() if cls.endswith("." + label))
        except integration.JitropeError:  # left alone
            continue
        waits, chosen = what.startswith(integration.WAITS), None
        for form, *rest in product(FORMS, (8, 4, 16, 2, 12, 6, 32, 64), (False, True), (False, True)):
            with suppress(Exception), torch.no_grad():  # others may fit
                module(**zoo.arguments(module, *rest, form))
                chosen = (*rest, form)
                break
        assert chosen or not waits or label in NO_ARGUMENTS
        fused = set()
        for dtype in ((torch.float32, torch.bfloat16, torch.float16) if waits else (torch.float32,)) if chosen else ():
            module.to(dtype)
            stock = zoo.outcome(module, zoo.arguments(module, *chosen, dtype))
            with integration.enable(module) as report:
                for _ in range(2):  # the host's norm runs too; it does not
                    ours = zoo.outcome(module, zoo.arguments(module, *chosen, dtype))
                    # Rope alone has other strides than the host's in some classes, so matrix products may differ.
                    zoo.check_close(ours, stock, dtype, report.calls["fused"] > 0)
            fused.add(report.calls["fused"] > 0)
            assert torch.equal(zoo.outcome(module, zoo.arguments(module, *chosen, dtype))["out"], stock["out"])
        assert len(fused) < 2
        done[label] = waits and True in fused
    return done


@pytest.mark.parametrize("family", FAST)
def test_family(family: str) -> None:
    done = compared(family)
    assert {label for label, fuses in done.items() if fuses} == done.keys() & FUSED_CLASSES


@pytest.mark.slow
def test_every_family() -> None:
    """The classes are counted, so a new or another class is noticed."""
    done: dict[str, bool | None] = {}
    for path in sorted(Path(zoo.transformers.models.__path__[0]).glob("*/modeling_*.py")):
        family = path.stem.removeprefix("modeling_")
        if family == path.parent.name and re.search(r"apply_\w*rotary", path.read_text()):
            done |= compared(family)
    wanted = set(FUSED_CLASSES) - set(NO_ARGUMENTS)
    if zoo.transformers.__version__.startswith("5.24."):
        assert {label for label, fuses in done.items() if fuses} == wanted
        assert (len(done), len(FUSED_CLASSES)) == (248, 66)
    else:
        assert all(done[label] is not False for label in wanted & done.keys())


# ---- other libraries around a layer --------------------------------------------------------------------


def test_a_layer_with_hooks_of_accelerate_is_fused() -> None:
    qwen3 = zoo.language_model("qwen3")
    hooks = pytest.importorskip("accelerate.hooks", reason="pip install accelerate")
    for layer in qwen3.model.layers:
        hooks.add_hook_to_module(layer.self_attn, hooks.ModelHook())
    want = zoo.run(qwen3)
    with integration.enable(qwen3) as report:
        assert torch.equal(zoo.run(qwen3), want)
    assert report.calls == {"jitrope": 0, "host": 0, "fused": 2}


@pytest.mark.parametrize(("saved", "by"), [(None, "fused"), (["k_norm"], "jitrope")])
def test_peft(saved: Any, by: str) -> None:
    """A training step of adapters of projections. A norm in an adapter is in another module, and is called."""
    peft = pytest.importorskip("peft", reason="pip install peft")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, modules_to_save=saved)
    model = peft.get_peft_model(zoo.language_model("qwen3"), config)
    stock = zoo.outcome(model, GIVEN)
    with integration.enable(model) as report:
        zoo.check_close(zoo.outcome(model, GIVEN), stock)
    assert report.calls == {"jitrope": 0, "host": 0, by: 2}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "hunyuan_v1_dense", "gemma4"])
def test_gradient_checkpointing(family: str, reentrant: bool) -> None:
    """What is learned in a first forward does not change what its second one saves. Norms after rope learn nothing."""
    model = zoo.language_model(family).train()
    want = zoo.outcome(model, GIVEN)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with integration.enable(model) as report:
        for _ in range(2):
            zoo.check_close(zoo.outcome(model, GIVEN), want)
    assert report.calls["host"] == 0
    assert report.calls["fused"] >= (0 if family == "hunyuan_v1_dense" and not reentrant else 6)


def test_fsdp2() -> None:
    """Sharded layers are of derived classes, and hold plain parameters in a forward."""
    model = zoo.language_model("qwen3")
    want = zoo.outcome(model, GIVEN)
    with group(1):
        mesh = init_device_mesh("cpu", (1,))
        for part in [x for layer in model.model.layers for x in (layer.self_attn, layer)]:
            fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh)
        with integration.enable(model) as report:
            for _ in range(2):
                got = zoo.outcome(model, GIVEN)
    assert report.calls == {"jitrope": 0, "host": 0, "fused": 4}
    zoo.check_close({k: x.to_local() if hasattr(x, "to_local") else x for k, x in got.items()}, want)


# ---- recognising ---------------------------------------------------------------------------------------


def host_of(place: str) -> Any:
    """The function that is at "family" or "family:function" now."""
    file, _, name = place.partition(":")
    return getattr(zoo.modeling(file), name or "apply_rotary_pos_emb")


def enabled(place: str) -> integration.Report:
    """The report of `enable` for a model of a family's file."""
    return integration.enable(type("Model", (nn.Module,), {"__module__": zoo.modeling(place.split(":")[0]).__name__})())


RECOGNISED = {  # a variant, and each "file" or "file:function" of it
    "halves, full tables": "llama gemma4 muse_glimmer_assistant qwen2_vl:apply_rotary_pos_emb_vision",
    "halves, full tables, partial": "gpt_neox qwen4_exp",
    "halves, full tables, behind first tokens": "dinov3_vit",
    "halves, half tables": "gpt_oss",
    "interleaved, full tables": "cohere sam2_video:apply_rotary_pos_emb_2d",
    "interleaved, first tables, partial": "glm",
    "interleaved, half tables": "openai_privacy_filter gptj",  # GPT-J has the sine first
    "interleaved into halves, first tables": "deepseek_v3:apply_rotary_pos_emb_interleave",
    "interleaved, complex tables": "llama4:apply_rotary_emb llama4:vision_apply_rotary_emb "
    "deepseek_v2:apply_rotary_emb",
}


@pytest.mark.parametrize(("name", "variant"), [(x, key) for key, names in RECOGNISED.items() for x in names.split()])
def test_recognised(name: str, variant: str) -> None:
    """Our function also gives the host's results with other shapes, dtypes and strides.

    Recognising neither depends on the random state or default device nor changes them.
    """
    host, fp32, bf16, state = host_of(name), torch.float32, torch.bfloat16, torch.get_rng_state()
    with torch.device("meta"):
        report = enabled(name)
    assert torch.equal(torch.get_rng_state(), state)
    with report:
        rope = report.replaced[f"{host.__module__}.{host.__name__}"]
        assert str(rope) == variant
        for shape in rope.variant.shapes:
            for part in (1, 2) if rope.variant.partial else (1,):
                for dtypes in ((fp32, fp32), (bf16, fp32), (fp32, bf16)):
                    arguments = variants.probe(host, rope.variant, shape, part, dtypes)
                    for n, x in enumerate(arguments):  # views of tensors with another order of axes
                        if isinstance(x, Tensor) and x.dim() > 3:
                            arguments[n] = x.transpose(-3, -2).contiguous().transpose(-3, -2)
                    assert variants.equal(host_of(name)(*arguments), host(*arguments), tolerance=0.02)


RETURNS_FP64 = lambda q, k, cos, sin, unsqueeze_dim=1: tuple(  # noqa: E731
    x.double() if x.dtype == torch.bfloat16 else x for x in host_of("llama")(q, k, cos, sin, unsqueeze_dim)
)
NOT_RECOGNISED: dict[Any, str] = {
    RETURNS_FP64: "the dtype of its results",
    dict: "its signature is not known",
    "clvp": "its signature is not known",
    "edgetam_video:apply_rotary_pos_emb_2d_cross_attn": "its signature is not known",  # tables of k apart
    "nanochat": "none of jitrope's variants",  # rotates back
    "deepseek_v4": "the part of a head that it rotates is not the first",
}


@pytest.mark.parametrize("function", NOT_RECOGNISED)
def test_not_recognised(function: Any) -> None:
    told = variants.recognise(host_of(function) if isinstance(function, str) else function)
    assert NOT_RECOGNISED[function] in told


# Who must compute a call of a function: words are q's and k's shapes, the table's shape, the dtypes of q, k and the
# tables (f, d, b), and its other arguments.
SAM, SHORT = "sam2_video:apply_rotary_pos_emb_2d", {"q": (1, 2, 6, 8), "k": (1, 2, 6, 8), "table": (6, 8)}
DECODE = {"q": (2, 4, 1, 16), "k": (2, 2, 1, 16), "table": (2, 1, 16)}
ALIKE = dict(zip(("q", "k", "table"), ((4, 4, 4, 16), (4, 4, 4, 16), (4, 4, 16))))
CALLS: list[tuple[str, str, dict[str, Any]]] = [
    *[("jitrope", "llama", words) for words in (
        {}, {"table": (1, 6, 16)}, {"unsqueeze_dim": -3}, {"table": (6, 16), "unsqueeze_dim": 0}, DECODE, ALIKE,
        {"q": (2, 6, 4, 16), "k": (2, 6, 2, 16), "unsqueeze_dim": 2}, {**ALIKE, "unsqueeze_dim": 2},
        {"q": (2, 1, 4, 16), "k": (2, 1, 2, 16), "table": (2, 1, 16), "unsqueeze_dim": 2},
        {"q": (2, 1, 6, 16), "k": (2, 1, 6, 16)}, {"q": (6, 4, 16), "k": (6, 2, 16), "table": (6, 16)},
        {"dtypes": "bbf"},  # wider tables widen the result, as under autocast
    )],
    *[("host", "llama", words) for words in (
        {"dtypes": "ddf"}, {"dtypes": "ffd"}, {"dtypes": "fdf"}, {"table": (2, 1, 16)}, {"table": (2, 6, 1)},
        {"q": (1, 4, 6, 16), "k": (1, 2, 6, 16)},  # angles of another batch row
        {"q": (1, 1, 2, 1024), "k": (1, 1, 2, 1024), "table": (1, 2, 1024)},
    )],
    # Without k these return a tensor or a pair.
    ("host", "qwen4_exp", {"k": None}), ("host", "mistral_large4:apply_rotary_pos_emb_interleave", {"k": None}),
    # Some ignore position_ids, and some do not.
    ("jitrope", "glmasr", {"position_ids": None}), ("host", "glmasr", {"position_ids": torch.arange(6)}),
    # A draft's queries use the last rows of the tables; jitrope would read the first ones.
    ("host", "muse_glimmer_assistant", {"q": (2, 4, 2, 16)}),
    # Memory attention rotates keys that are longer than the tables, or only in part.
    ("jitrope", SAM, SHORT), ("jitrope", SAM, {**SHORT, "repeat_freqs_k": True}),
    ("host", SAM, {**SHORT, "k": (1, 2, 12, 8), "repeat_freqs_k": True}), ("host", SAM, {**SHORT, "k": (1, 2, 0, 8)}),
    ("host", SAM, {**SHORT, "k": (1, 2, 14, 8), "num_k_exclude_rope": 2, "repeat_freqs_k": True}),
]  # fmt: skip


@pytest.mark.parametrize(("who", "place", "words"), CALLS)
def test_calls(who: str, place: str, words: Any) -> None:
    dtypes, tensors = {"f": torch.float32, "d": torch.float64, "b": torch.bfloat16}, []
    words = {"q": (2, 4, 6, 16), "k": (2, 2, 6, 16), "table": (2, 6, 16), "dtypes": "fff", **words}
    table, kinds = words.pop("table"), words.pop("dtypes")
    for shape, kind in zip((words.pop("q"), words.pop("k"), table, table), kinds + kinds[-1]):
        tensors.append(shape and torch.randn(shape).to(dtypes[kind]))
    want = host_of(place)(*tensors, **words)
    with enabled(place) as report:
        got = host_of(place)(*tensors, **words)
        assert type(got) is type(want)
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert report.calls == {"jitrope": 0, "host": 0, who: 1}


# ---- enable and disable ----------------------------------------------------------------------------------


LOADED = """
import sys, torch

model, inputs, want, function = torch.load(sys.argv[1], weights_only=False)
with torch.no_grad():
    assert torch.equal(model(**inputs).logits, want)
assert function is sys.modules["transformers.models.qwen3.modeling_qwen3"].apply_rotary_pos_emb
assert "jitrope" not in sys.modules  # models hold nothing of it
"""


def test_enabled_models_are_copied_pickled_and_loaded_in_a_fresh_process(tmp_path: Path) -> None:
    """Pickled functions load too, as the host's functions of that process."""
    qwen3 = zoo.language_model("qwen3")
    want, keys = zoo.run(qwen3), [set(vars(module)) for module in qwen3.modules()]
    with integration.enable(qwen3) as report:
        for _ in range(2):
            assert torch.equal(zoo.run(qwen3), want)
        assert [set(vars(module)) for module in qwen3.modules()] == keys
        assert b"jitrope" not in pickle.dumps(qwen3)
        others = pickle.loads(pickle.dumps(copy.deepcopy(qwen3))), copy.deepcopy(qwen3), copy.copy(qwen3)
        before = report.calls
        assert all(torch.equal(zoo.run(other), want) for other in others)
        assert sum((report.calls - before).values()) == 6
        torch.save((qwen3, {"input_ids": zoo.IDS}, want, host_of("qwen3")), tmp_path / "saved")
    assert not _host.placed
    assert all(torch.equal(zoo.run(other), want) for other in (qwen3, *others))
    fresh.python("-c", LOADED, str(tmp_path / "saved"), env=os.environ, check=True)


def test_what_is_left_alone_is_reported() -> None:
    """gpt-oss has two functions. One is replaced; the other has an unknown signature and is not."""
    host, other = host_of("gpt_oss:_apply_rotary_emb"), host_of("qwen2")
    with enabled("gpt_oss") as report:
        assert host_of("qwen2") is other
        assert host_of("gpt_oss:_apply_rotary_emb") is host
        label = f"{host.__module__}._apply_rotary_emb"
        assert report.left == {label: "its signature is not known"}
        assert f"{label}: left alone: its signature is not known" in report.table()
        assert str(report) == "1 function replaced, 1 left alone; 0 calls since; 0 left to transformers"
    assert repr(report).startswith("1 function replaced, 1 left alone (disabled); 0 calls since")


def test_models_without_rope() -> None:
    for model, name in ((nn.Linear(2, 2), "Linear"), (zoo.language_model("gpt2"), "GPT2.*")):
        with pytest.raises(jitrope.JitropeError, match=f"file of {name} has no rope function"):
            integration.enable(model)
    with pytest.raises(jitrope.InvalidInput, match=r"^enable: model is 'qwen2'; it must be a model, such as pipe"):
        integration.enable("qwen2")


SCRIPT = """
from transformers.utils import import_utils
# transformers asks for one minor version of kernels; what is used here is the same in its neighbours.
import_utils.is_kernels_available.__wrapped__.__defaults__ = ("0.17", "1.0")
import torch
from jitrope.integrations import transformers as integration
from tests.integrations import transformers_zoo as zoo

model = zoo.language_model("llama")
stock = zoo.run(model)
with integration.enable(model) as report:  # a function that kernels has made a module of
    assert torch.equal(zoo.run(model), stock)
assert report.calls == {"jitrope": 2, "host": 0}, report
assert isinstance(zoo.modeling("llama").apply_rotary_pos_emb, torch.nn.Module)
"""


@pytest.mark.slow
def test_functions_that_kernels_has_made_modules() -> None:
    """transformers applies its decorators when it is imported, so this test needs its own process."""
    installed("kernels")
    fresh.python("-c", SCRIPT, check=True)
