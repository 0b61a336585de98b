"""Which classes of diffusers rotate, by which form of rope, and what that covers of each model.

`python -m jitrope.integrations.diffusers` prints the table of the README.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from . import ropes
from .fused import FUSED
from .inline import INLINE
from .twins import Site


def _sites(rope: ropes.Rope, *classes: str, name: str = "apply_rotary_emb", through: str = "") -> dict[str, Any]:
    return {cls: (Site(name, rope, through),) for cls in classes}


SITES: dict[str, tuple[Site, ...]] = {
    **_sites(
        ropes.shared,
        "FluxAttnProcessor", "FluxIPAdapterAttnProcessor", "Flux2AttnProcessor", "Flux2KVAttnProcessor",
        "Flux2ParallelSelfAttnProcessor", "Flux2KVParallelSelfAttnProcessor", "Flux3AttnProcessor",
        "LongCatImageAttnProcessor", "OvisImageAttnProcessor", "BriaAttnProcessor", "BriaFiboAttnProcessor",
        "Krea2AttnProcessor", "MotifVideoAttnProcessor2_0", "MotifVideoCrossAttnProcessor2_0",
        "AceStepAttnProcessor2_0", "Lumina2AttnProcessor2_0", "HunyuanVideoAttnProcessor2_0",
        "HunyuanVideo15AttnProcessor2_0", "HunyuanImageAttnProcessor", "HunyuanAttnProcessor2_0",
        "FusedHunyuanAttnProcessor2_0", "PAGHunyuanAttnProcessor2_0", "PAGCFGHunyuanAttnProcessor2_0",
        "CogVideoXAttnProcessor2_0", "FusedCogVideoXAttnProcessor2_0", "EasyAnimateAttnProcessor2_0",
        "CogView4AttnProcessor", "CogView4TrainingAttnProcessor", "GlmImageAttnProcessor", "CosmosAttnProcessor2_0",
        "CosmosAttnProcessor2_5", "OmniGenAttnProcessor2_0", "LuminaAttnProcessor2_0", "StableAudioAttnProcessor2_0",
    ),
    **_sites(ropes.qwen, "QwenDoubleStreamAttnProcessor2_0", name="apply_rotary_emb_qwen"),
    **_sites(
        ropes.qwen, "QwenImage21AttnProcessor", "QwenImage21FlexAttnProcessor", name="apply_rotary_emb_qwen",
        through="_qwenimage21_prepare_qkv",
    ),
    **_sites(ropes.qwen, "NucleusMoEAttnProcessor2_0", name="_apply_rotary_emb_nucleus"),
    **_sites(ropes.complex_rows, "ZSingleStreamAttnProcessor", "BriaFibo2AttnProcessor"),
    **_sites(ropes.any_flow, "AnyFlowAttnProcessor", "AnyFlowCausalAttnProcessor"),
    **_sites(ropes.wan, "WanAttnProcessor", "SkyReelsV2AttnProcessor", "SanaLinearAttnProcessor3_0"),
    **_sites(ropes.wan_animate2, "WanAnimate2AttnProcessor", name="rope_apply"),
    **_sites(ropes.helios, "HeliosAttnProcessor", name="apply_rotary_emb_transposed"),
    **_sites(ropes.mochi, "MochiAttnProcessor2_0"),
    **_sites(ropes.kandinsky5, "Kandinsky5AttnProcessor", name="apply_rotary"),
    **_sites(ropes.kandinsky6, "Kandinsky6AttnProcessor", "Kandinsky6SRAttnProcessor", name="apply_rotary"),
    **_sites(ropes.prx, "PRXAttnProcessor2_0", name="apply_rope"),
    **_sites(ropes.hidream, "HiDreamAttnProcessor", name="apply_rope"),
    **_sites(ropes.ltx, "LTXVideoAttnProcessor"),
    **{
        cls: (Site("apply_interleaved_rotary_emb", ropes.ltx), Site("apply_split_rotary_emb", ropes.ltx2_split))
        for cls in (
            "LTX2AudioVideoAttnProcessor", "LTX2PerturbedAttnProcessor", "SanaWMLTX2AudioVideoAttnProcessor",
            "SanaWMLTX2PerturbedAttnProcessor", "SanaWMLTX2RefinerAttnProcessor",
        )
    },
    **_sites(ropes.joy, "JoyImageAttnProcessor", name="_apply_rotary_emb"),
    **_sites(ropes.joy_plus, "JoyImageEditPlusAttnProcessor", name="_apply_rotary_emb_batched"),
    **_sites(ropes.halves, "AudioDiTSelfAttnProcessor", "AudioDiTCrossAttnProcessor", name="_apply_rotary_emb"),
    **_sites(ropes.minimax_h3, "MiniMaxH3AttnProcessor", name="_apply_rotary_emb"),
    **_sites(ropes.minimax_music3, "MiniMaxMusic3AttnProcessor", name="_apply_partial_rotary_emb"),
    **_sites(ropes.ernie, "ErnieImageSingleStreamAttnProcessor"),
    **_sites(ropes.stable_audio3, "StableAudio3SelfAttnProcessor", name="_apply_rotary_partial"),
    **_sites(ropes.allegro, "AllegroAttnProcessor2_0", name="apply_rotary_emb_allegro"),
    **_sites(ropes.sana_wm, "SanaWMBidirectionalGDNAttention", "SanaWMSoftmaxAttention", name="_apply_rotary_emb"),
    **_sites(
        ropes.sana_wm_camera, "SanaWMBidirectionalGDNCamAttention", "SanaWMSoftmaxCamAttention",
        name="_apply_ucpe_transform",
    ),
}  # fmt: skip
"""The classes that call a rope function: attention processors, and modules where it is called in `forward`."""

_HUNYUAN_DIT = ("HunyuanAttnProcessor2_0", "FusedHunyuanAttnProcessor2_0", "PAGHunyuanAttnProcessor2_0",
                "PAGCFGHunyuanAttnProcessor2_0")  # fmt: skip
_LTX2 = ("LTX2AudioVideoAttnProcessor", "LTX2PerturbedAttnProcessor")
_COSMOS = ("CosmosAttnProcessor2_0", "CosmosAttnProcessor2_5")

COVERAGE: dict[str, tuple[str, ...] | str] = {
    "AceStepTransformer1DModel": ("AceStepAttnProcessor2_0",),
    "AllegroTransformer3DModel": ("AllegroAttnProcessor2_0",),
    "AnyFlowFARTransformer3DModel": ("AnyFlowAttnProcessor", "AnyFlowCausalAttnProcessor"),
    "AnyFlowTransformer3DModel": ("AnyFlowAttnProcessor",),
    "BriaFibo2Transformer2DModel": ("BriaFibo2AttnProcessor",),
    "BriaFiboTransformer2DModel": ("BriaAttnProcessor", "BriaFiboAttnProcessor"),
    "BriaTransformer2DModel": ("BriaAttnProcessor",),
    "ChromaTransformer2DModel": ("FluxAttnProcessor",),
    "ChronoEditTransformer3DModel": ("WanAttnProcessor",),
    "CogVideoXTransformer3DModel": ("CogVideoXAttnProcessor2_0", "FusedCogVideoXAttnProcessor2_0"),
    "CogView4Transformer2DModel": ("CogView4AttnProcessor", "CogView4TrainingAttnProcessor"),
    "ConsisIDTransformer3DModel": ("CogVideoXAttnProcessor2_0",),
    "Cosmos3OmniTransformer": ("Cosmos3AttnProcessor",),
    "CosmosControlNetModel": _COSMOS,
    "CosmosTransformer3DModel": _COSMOS,
    "EasyAnimateTransformer3DModel": ("EasyAnimateAttnProcessor2_0",),
    "ErnieImageTransformer2DModel": ("ErnieImageSingleStreamAttnProcessor",),
    "Flux2Transformer2DModel": (
        "Flux2AttnProcessor", "Flux2KVAttnProcessor", "Flux2ParallelSelfAttnProcessor",
        "Flux2KVParallelSelfAttnProcessor",
    ),
    "Flux3Transformer2DModel": ("Flux3AttnProcessor",),
    "FluxControlNetModel": ("FluxAttnProcessor",),
    "FluxMultiControlNetModel": ("FluxAttnProcessor",),
    "FluxTransformer2DModel": ("FluxAttnProcessor", "FluxIPAdapterAttnProcessor"),
    "GlmImageTransformer2DModel": ("GlmImageAttnProcessor",),
    "HeliosTransformer3DModel": ("HeliosAttnProcessor",),
    "HiDreamImageTransformer2DModel": ("HiDreamAttnProcessor",),
    "HunyuanDiT2DControlNetModel": _HUNYUAN_DIT,
    "HunyuanDiT2DModel": _HUNYUAN_DIT,
    "HunyuanDiT2DMultiControlNetModel": _HUNYUAN_DIT,
    "HunyuanImageTransformer2DModel": ("HunyuanImageAttnProcessor",),
    "HunyuanVideo15Transformer3DModel": ("HunyuanVideo15AttnProcessor2_0",),
    "HunyuanVideoFramepackTransformer3DModel": ("HunyuanVideoAttnProcessor2_0",),
    "HunyuanVideoTransformer3DModel": ("HunyuanVideoAttnProcessor2_0",),
    "Ideogram4Transformer2DModel": ("Ideogram4AttnProcessor",),
    "JoyImageEditPlusTransformer3DModel": ("JoyImageEditPlusAttnProcessor",),
    "JoyImageEditTransformer3DModel": ("JoyImageAttnProcessor",),
    "Kandinsky5Transformer3DModel": ("Kandinsky5AttnProcessor",),
    "Kandinsky6SRTransformer3DModel": ("Kandinsky6SRAttnProcessor",),
    "Kandinsky6Transformer3DModel": ("Kandinsky6AttnProcessor",),
    "Krea2Transformer2DModel": ("Krea2AttnProcessor",),
    "LTX2VideoTransformer3DModel": _LTX2,
    "LTXVideoTransformer3DModel": ("LTXVideoAttnProcessor",),
    "LongCatAudioDiTTransformer": ("AudioDiTSelfAttnProcessor", "AudioDiTCrossAttnProcessor"),
    "LongCatImageTransformer2DModel": ("LongCatImageAttnProcessor",),
    "Lumina2Transformer2DModel": ("Lumina2AttnProcessor2_0",),
    "LuminaNextDiT2DModel": ("LuminaAttnProcessor2_0",),
    "MiniMaxH3Transformer3DModel": ("MiniMaxH3AttnProcessor",),
    "MiniMaxMusic3Transformer1DModel": ("MiniMaxMusic3AttnProcessor",),
    "MochiTransformer3DModel": ("MochiAttnProcessor2_0",),
    "MotifVideoTransformer3DModel": ("MotifVideoAttnProcessor2_0", "MotifVideoCrossAttnProcessor2_0"),
    "NucleusMoEImageTransformer2DModel": ("NucleusMoEAttnProcessor2_0",),
    "OmniGenTransformer2DModel": ("OmniGenAttnProcessor2_0",),
    "OvisImageTransformer2DModel": ("OvisImageAttnProcessor",),
    "PRXTransformer2DModel": ("PRXAttnProcessor2_0",),
    "QwenImage21Transformer2DModel": ("QwenImage21AttnProcessor", "QwenImage21FlexAttnProcessor"),
    "QwenImageControlNetModel": ("QwenDoubleStreamAttnProcessor2_0",),
    "QwenImageMultiControlNetModel": ("QwenDoubleStreamAttnProcessor2_0",),
    "QwenImageTransformer2DModel": ("QwenDoubleStreamAttnProcessor2_0",),
    "SanaVideoTransformer3DModel": ("SanaLinearAttnProcessor3_0",),
    "SanaWMLTX2RefinerTransformer3DModel": (
        "SanaWMLTX2AudioVideoAttnProcessor", "SanaWMLTX2PerturbedAttnProcessor", "SanaWMLTX2RefinerAttnProcessor",
    ),
    "SanaWMTransformer3DModel": (
        "SanaWMBidirectionalGDNAttention", "SanaWMSoftmaxAttention", "SanaWMBidirectionalGDNCamAttention",
        "SanaWMSoftmaxCamAttention",
    ),
    "SkyReelsV2Transformer3DModel": ("SkyReelsV2AttnProcessor",),
    "StableAudio3DiTModel": ("StableAudio3SelfAttnProcessor",),
    "StableAudioDiTModel": ("StableAudioAttnProcessor2_0",),
    "WanAnimate2Transformer3DModel": ("WanAnimate2AttnProcessor",),
    "WanAnimateTransformer3DModel": ("WanAttnProcessor",),
    "WanTransformer3DModel": ("WanAttnProcessor",),
    "WanVACETransformer3DModel": ("WanAttnProcessor",),
    "ZImageControlNetModel": ("ZSingleStreamAttnProcessor",),
    "ZImageTransformer2DModel": ("ZSingleStreamAttnProcessor",),
}  # fmt: skip
"""By model class: the classes in it that are covered, or why none is."""


def table() -> str:
    """The README's table: the models by what their tables are and where in them jitrope rotates."""
    rows: dict[tuple[str, str], list[str]] = defaultdict(list)
    for model, covered in COVERAGE.items():
        if isinstance(covered, str):
            rows["-", f"not covered: {covered}"].append(f"`{model}`")
            continue
        forms = "<br>".join(dict.fromkeys(form for cls in covered for form in _forms(cls)))
        where = ", ".join(dict.fromkeys(_where(cls) for cls in covered))
        rows[forms, where].append(f"`{model}`")
    lines = ["| models | tables, as the model has them | where jitrope rotates |", "|---|---|---|"]
    lines += [f"| {', '.join(models)} | {forms} | {where} |" for (forms, where), models in rows.items()]
    return "\n".join(lines)


def _forms(cls: str) -> list[str]:
    functions = [INLINE[cls]] if cls in INLINE else [site.rope for site in SITES[cls]]
    return [(function.__doc__ or "").split("\n")[0].strip() for function in functions]


def _where(cls: str) -> str:
    if cls in FUSED:
        return "processor, with the norm"
    return "processor of ours" if cls in INLINE else "processor" if "Processor" in cls else "`forward` of a module"
