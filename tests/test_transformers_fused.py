"""Norms of q, k and v in the launch of rope: every attention class of transformers, tiny and random, on the CPU.

An enabled layer must give the stock layer's bits in fp32, bf16 and fp16, with one launch.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from jitrope.integrations import _attention, _deferred, _host, _rewrite, _variants
from jitrope.integrations import transformers as integration

HOST = "pip install 'transformers>=5.17'"
if os.environ.get("CI"):  # CI has every host
    import transformers
else:
    transformers = pytest.importorskip("transformers", reason=f"the host library is not installed: {HOST}")

from . import transformers_zoo as zoo  # noqa: E402  it imports transformers
from .devices import slow  # noqa: E402
from .hosts import group  # noqa: E402


def words(text: str) -> list[str]:
    return text.split()


# The classes of transformers 5.24 by what was done, each with its family.
FUSED = words(
    """
afmoe.AfmoeAttention apertus.ApertusAttention apertus1p5.Apertus1p5TextAttention beam.BeamAttention
diffusion_gemma.DiffusionGemmaDecoderTextAttention diffusion_gemma.DiffusionGemmaEncoderTextAttention
doge.DogeAttention dots1.Dots1Attention dots3_note.Dots3NoteVisionAttention embedding_gemma2.EmbeddingGemma2Attention
esmc.EsmcAttention esmfold2.EsmFold2AtomAttention exaone4.Exaone4Attention exaone4_5.Exaone4_5_Attention
exaone_moe.ExaoneMoeAttention flex_olmo.FlexOlmoAttention flint.FlintAttention gemma3.Gemma3Attention
gemma3n.Gemma3nTextAttention gemma4.Gemma4TextAttention gemma4_unified.Gemma4UnifiedTextAttention
glm4_moe.Glm4MoeAttention glm5_next.Glm5NextVisionAttention glm_ocr.GlmOcrVisionAttention
hunyuan_v1_dense.HunYuanDenseV1Attention hunyuan_v1_moe.HunYuanMoEV1Attention hunyuan_vl.HunYuanVLDenseV1Attention
hy_v3.HYV3Attention kolibri1.Kolibri1Attention laguna.LagunaAttention lara_mini.LaraMiniAttention lfm2.Lfm2Attention
lfm2_moe.Lfm2MoeAttention lfm3.Lfm3Attention lfm3_vl.Lfm3VlVisionAttention llama4.Llama4TextAttention
mellum.MellumAttention minimax_m2.MiniMaxM2Attention minimax_m3_vl.MiniMaxM3VLAttention
minimax_m3_vl.MiniMaxM3VLIndexer
molmo2.Molmo2Attention muse_glimmer_assistant.MuseGlimmerAssistantAttention
nemotron3_5_transcribe.Nemotron3_5TranscribeAttention neomme.NeoMMEAttention olmo2.Olmo2Attention olmo3.Olmo3Attention
olmo_hybrid.OlmoHybridAttention olmoe.OlmoeAttention pe_audio.PeAudioEncoderAttention
pe_audio_video.PeAudioVideoEncoderAttention pe_video.PeVideoEncoderAttention qwen3.Qwen3Attention
qwen3_5.Qwen3_5Attention qwen3_5_moe.Qwen3_5MoeAttention qwen3_moe.Qwen3MoeAttention qwen3_next.Qwen3NextAttention
qwen3_omni_moe.Qwen3OmniMoeTalkerCodePredictorAttention qwen3_omni_moe.Qwen3OmniMoeThinkerTextAttention
qwen3_vl.Qwen3VLTextAttention qwen3_vl_moe.Qwen3VLMoeTextAttention qwen4_exp.Qwen4ExpTextAttention
sapiens2.Sapiens2Attention step3p7.Step3p7Attention t5gemma2.T5Gemma2MergedAttention t5gemma2.T5Gemma2SelfAttention
timesfm2_5.TimesFm2_5Attention
"""
)
APART = words(
    """
axk1.AXK1Attention axk2.AXK2Attention axk2.AXK2Indexer bailing_hybrid.BailingHybridAttention bitnet.BitNetAttention
deepseek_v3.DeepseekV3Attention deepseek_v32.DeepseekV32Attention deepseek_v32.DeepseekV32Indexer
dots3_note.Dots3NoteTextAttention dots3_note.Dots3NoteTextIndexer glm4_moe_lite.Glm4MoeLiteAttention
glm_moe_dsa.GlmMoeDsaAttention glm_moe_dsa.GlmMoeDsaIndexer hy_v4.HYV4Attention hy_v4.HYV4Indexer
longcat_flash.LongcatFlashMLA minicpm3.MiniCPM3Attention mistral4.Mistral4Attention
mistral_large4.MistralLarge4TextAttention mistral_large4.MistralLarge4TextIndexer
muse_glimmer.MuseGlimmerTextAttention muse_spark.MuseSparkTextAttention persimmon.PersimmonAttention phi.PhiAttention
qwen4_exp.Qwen4ExpTextQSAIndexer stablelm.StableLmAttention youtu.YoutuAttention
"""
)
"""Latent attention, which norms the latents; slices or products between norm and rope."""
UNKNOWN = {
    "chameleon.ChameleonAttention": "ChameleonLayerNorm: a norm's weight must have one axis",
    "cohere.CohereAttention": "CohereLayerNorm: a norm's weight must have one axis",
    "dory.DoryAttention": "DoryL2Norm: jitrope has no norm with its results",
}
COUNTS = {"fused": 66, "apart": 27, "unknown": 3, "no norm": 132, "no rope of jitrope": 7, "not made": 13}
NO_ARGUMENTS = {
    "muse_glimmer_assistant.MuseGlimmerAssistantAttention"
}  # its k has more tokens than q, so it is not fused
NO_ROPE_LAYERS = {"flint.FlintAttention"}  # the first layers of the default configuration do not rotate
FAST = ("gemma4", "hunyuan_v1_dense", "lfm2", "llama4", "olmo2", "qwen3", "qwen3_next")


@pytest.fixture(autouse=True)
def _stock() -> Iterator[None]:
    """After each test, no function is replaced."""
    assert not _host.placed
    yield
    integration.disable()


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Arguments in a dtype."""
    if isinstance(value, tuple):
        return tuple(cast(part, dtype) for part in value)
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def outcome(module: nn.Module, given: dict[str, Any]) -> dict[str, Tensor]:
    """The result, and the gradients of the parameters."""
    module.zero_grad()
    out = zoo.first(module(**given))
    if out.is_floating_point() and out.requires_grad:
        out.float().square().mean().backward()
    grads = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    return {"out": out.detach(), **grads}


def compare(module: nn.Module, chosen: Any, label: str, fused: int) -> None:
    """One layer, stock and enabled, in three dtypes."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        module.to(dtype)

        def given(dtype: torch.dtype = dtype) -> dict[str, Any]:
            return {name: cast(x, dtype) for name, x in zoo.arguments(module, *chosen).items()}

        stock = outcome(module, given())
        with integration.enable(module) as report:
            ours = outcome(module, given())
        assert report.calls.get("fused", 0) == fused, (label, dtype, report.calls, report.reasons)
        assert stock.keys() == ours.keys()
        assert torch.equal(ours["out"], stock["out"]), (label, dtype)
        assert torch.equal(outcome(module, given())["out"], stock["out"])
        for name, want in stock.items():
            bound = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.1, "atol": 0.05}
            bound["atol"] *= float(want.abs().max())
            torch.testing.assert_close(ours[name], want, **bound, msg=lambda text: f"{label} {name}: {text}")  # noqa: B023


def norms_at_rope(cls: type) -> str:
    """Where the code of a class has norms, by their names: before or after rope, or elsewhere."""
    forward = inspect.unwrap(cls.forward)  # type: ignore[attr-defined]
    ropes = {name: _variants.names(function) for name, function in _attention._ropes(forward).items()}
    source = _rewrite.Source(forward, ropes)
    return source.order([name for name in source.modules() if "norm" in name])


def check(family: str) -> dict[str, str]:
    """Compare all fused layers of a family. Returns, by class, what was done."""
    done: dict[str, str] = {}
    modules = zoo.attention_modules(family)
    for cls in zoo.attention_classes(family):
        label = f"{family}.{cls.__name__}"
        if cls.__name__ not in modules:  # the zoo has no small configuration for it
            assert not norms_at_rope(cls), label
            done[label] = "not made"
            continue
        module = modules[cls.__name__].eval()
        try:
            with integration.enable(module) as report:
                done[label] = report.attention[f"{cls.__module__}.{cls.__name__}"]
        except integration.JitropeError:
            done[label] = "left alone"
            continue
        if done[label].startswith(_attention.FUSED) and label not in NO_ARGUMENTS:
            chosen = zoo.choice(module)
            assert chosen is not None, label
            compare(module, chosen, label, fused=label not in NO_ROPE_LAYERS)
    return done


def kind(label: str, what: str) -> str:
    """The kind of a class by its description; the description must be right for it."""
    if what.startswith(_attention.FUSED):
        assert label in FUSED
        return "fused"
    assert label not in FUSED
    if what.startswith("left alone"):
        return "no rope of jitrope"
    if label in UNKNOWN:
        assert what == f"rope only: {UNKNOWN[label]}"
        return "unknown"
    if label in APART:
        assert what == "rope only: its norms are not directly before or after rope"
        return "apart"
    return "not made" if what == "not made" else "no norm"


@pytest.mark.parametrize("family", FAST)
def test_family(family: str) -> None:
    done = check(family)
    assert any(kind(label, what) == "fused" for label, what in done.items())
    assert {label for label in FUSED if label.startswith(family + ".")} <= done.keys()


@pytest.mark.slow
def test_every_family() -> None:
    """The kinds of all classes are counted, so a new or another class is noticed."""
    done = {label: what for family in zoo.families() for label, what in check(family).items()}
    kinds = {label: kind(label, what) for label, what in done.items()}
    assert {label for label, name in kinds.items() if name == "fused"} == set(FUSED)
    counts = {name: list(kinds.values()).count(name) for name in COUNTS}
    if transformers.__version__.startswith("5.24."):
        assert counts == COUNTS, [label for label, name in kinds.items() if name == "not made"]


# ---- whole models --------------------------------------------------------------------------------------

MODELS = {  # the launches of a forward; other layers of these models have no rope
    "afmoe": 2,
    "gemma3": 2,
    "gemma4": 2,
    "hunyuan_v1_dense": 2,
    "lfm2_moe": 1,
    "llama4": 2,
    "olmo2": 2,
    "qwen3_5": 1,
    "qwen3_vl_moe": 2,
}


def language_model(family: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    return zoo.made(zoo.models(family)[0], family).to(dtype)


@pytest.mark.parametrize("family", MODELS)
def test_model(family: str) -> None:
    """Logits in fp32 and bf16, and all is restored afterwards."""
    for dtype in (torch.float32, torch.bfloat16):
        model = language_model(family, dtype)
        with torch.no_grad():
            stock = zoo.run(model)
            with integration.enable(model) as report:
                ours = zoo.run(model)
            assert report.calls == {"jitrope": 0, "host": 0, "fused": MODELS[family]}, report.reasons
            assert torch.equal(ours, stock)
            assert stock.float().std() > 0.01
        assert not _host.placed


@pytest.mark.parametrize("family", ["qwen3", "gemma4", "olmo3", "hunyuan_v1_dense"])
def test_generation(family: str) -> None:
    """A decoding step has one token, and k and v go to a cache."""
    model = language_model(family)
    words = {"input_ids": zoo.IDS, "attention_mask": torch.ones_like(zoo.IDS), "max_new_tokens": 5, "do_sample": False}
    stock = model.generate(**words)
    with integration.enable(model) as report:
        assert torch.equal(model.generate(**words), stock)
    assert report.calls["fused"] == 2 * 5
    assert report.calls["host"] == report.calls["jitrope"] == 0


@pytest.mark.slow
def test_compiled_fullgraph_in_bf16() -> None:
    model = language_model("qwen3").eval().bfloat16()
    torch.compiler.reset()
    with integration.enable(model) as report, torch.no_grad():
        want = model(zoo.IDS).logits
        got = torch.compile(model, fullgraph=True, backend="aot_eager")(zoo.IDS).logits
    assert torch.equal(got, want)
    assert report.calls == {"jitrope": 0, "host": 0, "fused": 2 * 2}


@pytest.mark.parametrize(
    "family",
    ["hunyuan_v1_dense", *(slow(name) for name in ("embedding_gemma2", "qwen3_next"))],
)
def test_compiled_fullgraph(family: str) -> None:
    """Norm after rope; q, k and v; and q with a gate. Compiled before `enable`, too."""
    (module,) = zoo.attention_modules(family).values()
    module.eval()
    chosen = zoo.choice(module)
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    want = outcome(module, zoo.arguments(module, *chosen))
    assert torch.equal(outcome(compiled, zoo.arguments(module, *chosen))["out"], want["out"])
    for _ in range(2):
        with integration.enable(module) as report:
            for _ in range(3):
                got = outcome(compiled, zoo.arguments(module, *chosen))
                for name, value in want.items():
                    torch.testing.assert_close(got[name if name == "out" else f"_orig_mod.{name}"], value)
            assert report.calls["fused"] >= 1  # when it is traced
        before = integration.calls.copy()
        assert torch.equal(outcome(compiled, zoo.arguments(module, *chosen))["out"], want["out"])
        assert integration.calls == before


def test_v_is_in_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """q and k have calls of their own in Gemma 4, and v's norm follows; all is one launch."""
    model = language_model("gemma4")
    seen = []

    def spy(q: Tensor, k: Tensor, v: Tensor, **words: Any) -> Any:
        seen.append(v.shape == k.shape and words["norm"].words["norm"].v_norm)
        return prepare(q, k, v, **words)

    with integration.enable(model), torch.no_grad():
        prepare = _deferred.prepare_qkv
        monkeypatch.setattr(_deferred, "prepare_qkv", spy)
        zoo.run(model)
    assert seen == [True, True]


# ---- other libraries around a layer --------------------------------------------------------------------


def fused_calls(model: nn.Module, stock: Tensor, **words: Any) -> dict[str, int]:
    """The calls of an enabled model, which must give the stock bits."""
    with integration.enable(model, **words) as report, torch.no_grad():
        assert torch.equal(zoo.run(model), stock)
    return report.calls


def test_accelerate_hooks() -> None:
    """A hooked layer is fused; a hooked norm is called, because hooks may load its weight."""
    qwen3 = language_model("qwen3")
    hooks = pytest.importorskip("accelerate.hooks", reason="pip install accelerate")
    with torch.no_grad():
        want = zoo.run(qwen3)
    first, second = (layer.self_attn for layer in qwen3.model.layers)
    hooks.add_hook_to_module(first, hooks.ModelHook())
    assert fused_calls(qwen3, want) == {"jitrope": 0, "host": 0, "fused": 2}
    hooks.add_hook_to_module(second.q_norm, hooks.ModelHook())
    with integration.enable(qwen3) as report, torch.no_grad():
        assert torch.equal(zoo.run(qwen3), want)
    assert report.calls == {"jitrope": 1, "host": 0, "fused": 1}
    assert report.reasons == {"not fused: a norm has its own forward": 1}


@pytest.mark.parametrize("hooked", [0, 1])
def test_hooks_of_one_norm_leave_the_others_fused(hooked: int) -> None:
    qwen3 = language_model("qwen3")
    with torch.no_grad():
        want = zoo.run(qwen3)
        qwen3.model.layers[hooked].self_attn.q_norm.register_forward_hook(lambda *_: None)
        with integration.enable(qwen3) as report:
            assert torch.equal(zoo.run(qwen3), want)
    assert report.calls == {"jitrope": 1, "host": 0, "fused": 1}
    assert report.reasons == {"not fused: a norm has hooks": 1}


def test_a_report_is_active_while_its_norms_are_fused() -> None:
    """Rope was replaced by an earlier report."""
    qwen3 = language_model("qwen3")
    with integration.enable(qwen3, fuse_norm=False):
        report = integration.enable(qwen3)
    assert "(disabled)" not in repr(report)
    integration.disable(qwen3)
    assert "(disabled)" in repr(report)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_default_dtype_gives_the_same_bits(dtype: torch.dtype) -> None:
    model = language_model("llama4")
    with torch.no_grad():
        want = zoo.run(model)
    torch.set_default_dtype(dtype)
    try:
        report = integration.enable(model)
    finally:
        torch.set_default_dtype(torch.float32)
    with report, torch.no_grad():
        assert torch.equal(zoo.run(model), want)


def test_peft() -> None:
    """Adapters of projections; a norm in an adapter is another module, and is called."""
    qwen3 = language_model("qwen3")
    peft = pytest.importorskip("peft", reason="pip install peft")
    model = peft.get_peft_model(qwen3, peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2)).eval()
    with torch.no_grad():
        assert fused_calls(model, zoo.run(model)) == {"jitrope": 0, "host": 0, "fused": 2}
    words = {"target_modules": ["q_proj"], "modules_to_save": ["k_norm"], "r": 2}
    model = peft.get_peft_model(language_model("qwen3"), peft.LoraConfig(**words)).eval()
    with torch.no_grad():
        assert fused_calls(model, zoo.run(model)) == {"jitrope": 2, "host": 0}


def test_gradient_checkpointing() -> None:
    qwen3 = language_model("qwen3")
    qwen3.train()
    want = outcome(qwen3, {"input_ids": zoo.IDS})
    qwen3.gradient_checkpointing_enable()
    with integration.enable(qwen3) as report:
        got = outcome(qwen3, {"input_ids": zoo.IDS})
    assert report.calls == {"jitrope": 0, "host": 0, "fused": 4}
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-5 * float(value.abs().max()))


def test_trainer(tmp_path: Any) -> None:
    """The loop that TRL's and axolotl's trainers inherit, with adapters and checkpointing, has the stock results."""
    pytest.importorskip("accelerate", reason="pip install accelerate")
    peft = pytest.importorskip("peft", reason="pip install peft")
    data = [{"input_ids": ids, "labels": ids} for ids in zoo.IDS.repeat(4, 1)]
    found = []
    for enabled in (False, True):
        torch.manual_seed(0)
        model = peft.get_peft_model(language_model("qwen3"), peft.LoraConfig(target_modules=["q_proj", "k_proj"], r=2))
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=3, use_cpu=True, report_to=[], save_strategy="no", logging_steps=1,
            gradient_checkpointing=True, learning_rate=1e-2, disable_tqdm=True,
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=data)
        with integration.enable(model) if enabled else nullcontext() as report:
            trainer.train()
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        found.append(torch.cat([torch.tensor(losses), *(p.detach().flatten() for p in model.parameters())]))
    assert report.calls == {"jitrope": 0, "host": 0, "fused": 12}  # two layers, three steps, each forward twice
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)


def test_fsdp2() -> None:
    """Sharded layers are of derived classes, and hold plain parameters in a forward."""
    from torch.distributed.fsdp import fully_shard

    model = language_model("qwen3")
    want = outcome(model, {"input_ids": zoo.IDS})
    with group(1):
        for layer in model.model.layers:
            fully_shard(layer.self_attn)
            fully_shard(layer)
        fully_shard(model)
        with integration.enable(model) as report:
            got = outcome(model, {"input_ids": zoo.IDS})
    assert report.calls == {"jitrope": 0, "host": 0, "fused": 2}
    assert torch.equal(got["out"], want["out"])
    for name, value in want.items():
        if name != "out":
            torch.testing.assert_close(got[name].to_local(), value, rtol=1e-4, atol=1e-5 * float(value.abs().max()))
