"""Norms of q and k in the launch of rope: every attention class of transformers, tiny and random, on the CPU.

An enabled layer must give the stock layer's bits in fp32, bf16 and fp16, in its first calls and afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from jitrope.integrations import _host, _waiting
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


# The classes of transformers 5.24 that are fused, each with its family.
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
UNKNOWN = {
    "chameleon.ChameleonAttention": "ChameleonLayerNorm: a norm's weight must have one axis",
    "cohere.CohereAttention": "CohereLayerNorm: a norm's weight must have one axis",
    "dory.DoryAttention": "DoryL2Norm: jitrope has no norm with its results",
}
NO_ARGUMENTS = {  # not called here: a draft's k has more tokens than q; indexers and MLA without small arguments
    "muse_glimmer_assistant.MuseGlimmerAssistantAttention",
    *words("axk2.AXK2Indexer deepseek_v32.DeepseekV32Indexer dots3_note.Dots3NoteTextIndexer"),
    *words("glm_moe_dsa.GlmMoeDsaIndexer hy_v4.HYV4Indexer longcat_flash.LongcatFlashMLA"),
}
FAST = ("dinov3_vit", "gemma4", "hunyuan_v1_dense", "lfm2", "llama4", "olmo2", "qwen3", "qwen3_next", "qwen3_vl")


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


def compare(module: nn.Module, chosen: Any, waits: bool) -> bool:
    """One layer, stock and enabled, in three dtypes if its norms may wait; whether it is fused.

    Rope alone has other strides than the host's in some classes, so matrix products may sum in another order.
    """
    fused = set()
    for dtype in (torch.float32, torch.bfloat16, torch.float16) if waits else (torch.float32,):
        module.to(dtype)

        def given(dtype: torch.dtype = dtype) -> dict[str, Any]:
            return {name: cast(x, dtype) for name, x in zoo.arguments(module, *chosen).items()}

        stock = zoo.outcome(module, given())
        with integration.enable(module) as report:
            for _ in range(2):  # the host's norm runs too; it does not
                zoo.check_close(zoo.outcome(module, given()), stock, dtype, report.calls["fused"] > 0)
        fused.add(report.calls["fused"] > 0)
        assert torch.equal(zoo.outcome(module, given())["out"], stock["out"])
    assert len(fused) == 1
    return fused.pop()


def check(family: str) -> dict[str, str]:
    """Compare all layers of a family. Returns, by class, what was done."""
    done: dict[str, str] = {}
    modules = zoo.attention_modules(family)
    for cls in zoo.attention_classes(family):
        label = f"{family}.{cls.__name__}"
        if cls.__name__ not in modules:  # the zoo has no small configuration for it
            done[label] = "not made"
            continue
        module = modules[cls.__name__].eval()
        try:
            with integration.enable(module) as report:
                done[label] = report.attention[f"{cls.__module__}.{cls.__name__}"]
        except integration.JitropeError:
            done[label] = "left alone"
            continue
        if label in UNKNOWN:
            assert done[label] == f"rope only: {UNKNOWN[label]}"
        waits, chosen = done[label].startswith(_waiting.FUSED), zoo.choice(module)
        assert chosen or not waits or label in NO_ARGUMENTS
        if chosen and not compare(module, chosen, waits) and waits:
            done[label] = "apart"
    return done


def fused(done: dict[str, str]) -> set[str]:
    return {label for label, what in done.items() if what.startswith(_waiting.FUSED)} - NO_ARGUMENTS


@pytest.mark.parametrize("family", FAST)
def test_family(family: str) -> None:
    assert fused(check(family)) == {label for label in FUSED if label.startswith(family + ".")}


@pytest.mark.slow
def test_every_family() -> None:
    """The classes are counted, so a new or another class is noticed."""
    done = {label: what for family in zoo.families() for label, what in check(family).items()}
    if transformers.__version__.startswith("5.24."):
        assert fused(done) == set(FUSED) - NO_ARGUMENTS
        assert (len(done), len(FUSED)) == (248, 66)
    else:
        assert fused(done) >= {label for label in FUSED if done.get(label, "not made") != "not made"} - NO_ARGUMENTS


# ---- whole models --------------------------------------------------------------------------------------

MODELS = {  # the launches of the second forward: Gemma 4 rotates q and k by themselves; some layers have no rope
    "afmoe": 2,
    "gemma3": 2,
    "gemma4": 4,
    "hunyuan_v1_dense": 2,
    "lfm2_moe": 1,
    "llama4": 2,
    "olmo2": 2,
    "qwen3_5": 1,
    "qwen3_vl_moe": 2,
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("family", MODELS)
def test_model(family: str, mode: Any) -> None:
    """Logits in fp32 and bf16, and all is restored afterwards."""
    for dtype in (torch.float32, torch.bfloat16):
        model = zoo.language_model(family, dtype)
        with mode():
            stock = zoo.run(model)
            with integration.enable(model) as report:
                assert torch.equal(zoo.run(model), stock)
                before = report.calls
                assert torch.equal(zoo.run(model), stock)
                assert report.calls - before == {"fused": MODELS[family]}, report.reasons
            assert stock.float().std() > 0.01
        assert not _host.placed


@pytest.mark.parametrize("family", ["qwen3", "gemma4", "olmo3", "hunyuan_v1_dense"])
def test_generation(family: str) -> None:
    """A decoding step has one token, and k and v go to a cache."""
    model = zoo.language_model(family)
    words = {"input_ids": zoo.IDS, "attention_mask": torch.ones_like(zoo.IDS), "max_new_tokens": 5, "do_sample": False}
    stock = model.generate(**words)
    with integration.enable(model) as report:
        assert torch.equal(model.generate(**words), stock)
    assert report.calls["fused"] >= 2 * 4
    assert report.calls["host"] == 0


@pytest.mark.parametrize("family", ["qwen3", *(slow(name) for name in ("hunyuan_v1_dense", "gemma4", "olmo2"))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_fullgraph(family: str, dtype: torch.dtype) -> None:
    """Compiled, the host's norms run, in one graph, before and after `enable`. The bits stay."""
    model = zoo.language_model(family, dtype)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        want = zoo.run(model)
        assert torch.equal(zoo.run(compiled), want)
        with integration.enable(model) as report:
            for _ in range(3):
                assert torch.equal(zoo.run(compiled), want)
            assert torch.equal(zoo.run(model), want)
            traced = 4 if family == "gemma4" else 2
            assert report.calls["jitrope"] >= traced
            assert report.calls["fused"] <= traced
        before = integration.calls.copy()
        assert torch.equal(zoo.run(compiled), want)
        assert integration.calls == before


@pytest.mark.parametrize("strict", [False, slow(True)])
def test_an_export_has_the_norms(strict: bool) -> None:
    model = zoo.language_model("qwen3")
    given = {"input_ids": zoo.IDS, "use_cache": False}
    with integration.enable(model), torch.no_grad():
        for _ in range(2):
            want = model(**given).logits
        program = torch.export.export(model, (), given, strict=strict)
    torch.testing.assert_close(program.module()(**given).logits, want)


# ---- other libraries around a layer --------------------------------------------------------------------


def fused_calls(model: nn.Module, stock: Tensor) -> dict[str, int]:
    """The calls of an enabled model, which must give the stock bits."""
    with integration.enable(model) as report, torch.no_grad():
        assert torch.equal(zoo.run(model), stock)
    return report.calls


def test_accelerate_hooks() -> None:
    """A hooked layer is fused; a hooked norm is called, because hooks may load its weight."""
    qwen3 = zoo.language_model("qwen3")
    hooks = pytest.importorskip("accelerate.hooks", reason="pip install accelerate")
    with torch.no_grad():
        want = zoo.run(qwen3)
    first, second = (layer.self_attn for layer in qwen3.model.layers)
    hooks.add_hook_to_module(first, hooks.ModelHook())
    assert fused_calls(qwen3, want) == {"jitrope": 0, "host": 0, "fused": 2}
    with integration.enable(qwen3) as report, torch.no_grad():
        assert torch.equal(zoo.run(qwen3), want)
        hooks.add_hook_to_module(second.q_norm, hooks.ModelHook())
        assert torch.equal(zoo.run(qwen3), want)
    assert report.calls == {"jitrope": 1, "host": 0, "fused": 3}
    assert report.reasons["not fused: a norm has its own forward"] == 1


def test_peft() -> None:
    """Adapters of projections; a norm in an adapter is in another module, and is called."""
    peft = pytest.importorskip("peft", reason="pip install peft")
    words = {"target_modules": ["q_proj", "v_proj"], "r": 2}
    model = peft.get_peft_model(zoo.language_model("qwen3"), peft.LoraConfig(**words)).eval()
    with torch.no_grad():
        assert fused_calls(model, zoo.run(model)) == {"jitrope": 0, "host": 0, "fused": 2}
    model = peft.get_peft_model(
        zoo.language_model("qwen3"), peft.LoraConfig(**words, modules_to_save=["k_norm"])
    ).eval()
    with torch.no_grad():
        assert fused_calls(model, zoo.run(model)) == {"jitrope": 2, "host": 0}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "hunyuan_v1_dense", "gemma4"])
def test_gradient_checkpointing(family: str, reentrant: bool) -> None:
    """What is learned in a first forward does not change what its second one saves. Norms after rope learn nothing."""
    model = zoo.language_model(family).train()
    given = {"input_ids": zoo.IDS}
    want = zoo.outcome(model, given)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with integration.enable(model) as report:
        for _ in range(2):
            zoo.check_close(zoo.outcome(model, given), want)
    assert report.calls["host"] == 0
    assert report.calls["fused"] >= (0 if family == "hunyuan_v1_dense" and not reentrant else 6)


def test_trainer(tmp_path: Any) -> None:
    """The loop that TRL's and axolotl's trainers inherit, with adapters and checkpointing, has the stock results."""
    pytest.importorskip("accelerate", reason="pip install accelerate")
    peft = pytest.importorskip("peft", reason="pip install peft")
    data = [{"input_ids": ids, "labels": ids} for ids in zoo.IDS.repeat(4, 1)]
    found = []
    for enabled in (False, True):
        torch.manual_seed(0)
        config = peft.LoraConfig(target_modules=["q_proj", "k_proj"], r=2)
        model = peft.get_peft_model(zoo.language_model("qwen3"), config)
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
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = zoo.language_model("qwen3")
    want = zoo.outcome(model, {"input_ids": zoo.IDS})
    with group(1):
        mesh = init_device_mesh("cpu", (1,))
        for layer in model.model.layers:
            fully_shard(layer.self_attn, mesh=mesh)
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        with integration.enable(model) as report:
            for _ in range(2):
                got = zoo.outcome(model, {"input_ids": zoo.IDS})
    assert report.calls == {"jitrope": 0, "host": 0, "fused": 4}
    assert torch.equal(got["out"], want["out"])
    for name, value in want.items():
        if name != "out":
            torch.testing.assert_close(got[name].to_local(), value, rtol=1e-4, atol=1e-5 * float(value.abs().max()))
