"""Which classes of diffusers rotate, by which form of rope, and what that covers of each model.

`python -m jitrope.integrations.diffusers` prints the table of the README.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from . import forms
from .fused import FUSED, INLINE
from .twins import Site

# Form, the name of the rope function and, if another function of the module calls it, that one's: the classes.
_SITES = """
SHARED apply_rotary_emb: FluxAttnProcessor FluxIPAdapterAttnProcessor Flux2AttnProcessor Flux2KVAttnProcessor
  Flux2ParallelSelfAttnProcessor Flux2KVParallelSelfAttnProcessor Flux3AttnProcessor LongCatImageAttnProcessor
  OvisImageAttnProcessor BriaAttnProcessor BriaFiboAttnProcessor Krea2AttnProcessor MotifVideoAttnProcessor2_0
  MotifVideoCrossAttnProcessor2_0 AceStepAttnProcessor2_0 Lumina2AttnProcessor2_0 HunyuanVideoAttnProcessor2_0
  HunyuanVideo15AttnProcessor2_0 HunyuanImageAttnProcessor HunyuanAttnProcessor2_0 FusedHunyuanAttnProcessor2_0
  PAGHunyuanAttnProcessor2_0 PAGCFGHunyuanAttnProcessor2_0 CogVideoXAttnProcessor2_0 FusedCogVideoXAttnProcessor2_0
  EasyAnimateAttnProcessor2_0 CogView4AttnProcessor CogView4TrainingAttnProcessor GlmImageAttnProcessor
  CosmosAttnProcessor2_0 CosmosAttnProcessor2_5 OmniGenAttnProcessor2_0 LuminaAttnProcessor2_0
  StableAudioAttnProcessor2_0
QWEN apply_rotary_emb_qwen: QwenDoubleStreamAttnProcessor2_0
QWEN apply_rotary_emb_qwen _qwenimage21_prepare_qkv: QwenImage21AttnProcessor QwenImage21FlexAttnProcessor
QWEN _apply_rotary_emb_nucleus: NucleusMoEAttnProcessor2_0
COMPLEX_ROWS apply_rotary_emb: ZSingleStreamAttnProcessor BriaFibo2AttnProcessor
ANY_FLOW apply_rotary_emb: AnyFlowAttnProcessor AnyFlowCausalAttnProcessor
WAN apply_rotary_emb: WanAttnProcessor SkyReelsV2AttnProcessor SanaLinearAttnProcessor3_0
WAN_ANIMATE2 rope_apply: WanAnimate2AttnProcessor
HELIOS apply_rotary_emb_transposed: HeliosAttnProcessor
MOCHI apply_rotary_emb: MochiAttnProcessor2_0
KANDINSKY5 apply_rotary: Kandinsky5AttnProcessor
KANDINSKY6 apply_rotary: Kandinsky6AttnProcessor Kandinsky6SRAttnProcessor
PRX apply_rope: PRXAttnProcessor2_0
HIDREAM apply_rope: HiDreamAttnProcessor
LTX apply_rotary_emb: LTXVideoAttnProcessor
LTX apply_interleaved_rotary_emb: LTX2AudioVideoAttnProcessor LTX2PerturbedAttnProcessor
  SanaWMLTX2AudioVideoAttnProcessor SanaWMLTX2PerturbedAttnProcessor SanaWMLTX2RefinerAttnProcessor
LTX2_SPLIT apply_split_rotary_emb: LTX2AudioVideoAttnProcessor LTX2PerturbedAttnProcessor
  SanaWMLTX2AudioVideoAttnProcessor SanaWMLTX2PerturbedAttnProcessor SanaWMLTX2RefinerAttnProcessor
JOY _apply_rotary_emb: JoyImageAttnProcessor
JOY_PLUS _apply_rotary_emb_batched: JoyImageEditPlusAttnProcessor
HALVES _apply_rotary_emb: AudioDiTSelfAttnProcessor AudioDiTCrossAttnProcessor
MINIMAX_H3 _apply_rotary_emb: MiniMaxH3AttnProcessor
MINIMAX_MUSIC3 _apply_partial_rotary_emb: MiniMaxMusic3AttnProcessor
ERNIE apply_rotary_emb: ErnieImageSingleStreamAttnProcessor
STABLE_AUDIO3 _apply_rotary_partial: StableAudio3SelfAttnProcessor
ALLEGRO apply_rotary_emb_allegro: AllegroAttnProcessor2_0
SANA_WM _apply_rotary_emb: SanaWMBidirectionalGDNAttention SanaWMSoftmaxAttention
SANA_WM_CAMERA _apply_ucpe_transform: SanaWMBidirectionalGDNCamAttention SanaWMSoftmaxCamAttention
"""

# Classes, and the models that have them.
_MODELS = """
AceStepAttnProcessor2_0: AceStepTransformer1DModel
AllegroAttnProcessor2_0: AllegroTransformer3DModel
AnyFlowAttnProcessor AnyFlowCausalAttnProcessor: AnyFlowFARTransformer3DModel
AnyFlowAttnProcessor: AnyFlowTransformer3DModel
BriaFibo2AttnProcessor: BriaFibo2Transformer2DModel
BriaAttnProcessor BriaFiboAttnProcessor: BriaFiboTransformer2DModel
BriaAttnProcessor: BriaTransformer2DModel
FluxAttnProcessor: ChromaTransformer2DModel FluxControlNetModel FluxMultiControlNetModel
WanAttnProcessor: ChronoEditTransformer3DModel WanAnimateTransformer3DModel WanTransformer3DModel
    WanVACETransformer3DModel
CogVideoXAttnProcessor2_0 FusedCogVideoXAttnProcessor2_0: CogVideoXTransformer3DModel
CogView4AttnProcessor CogView4TrainingAttnProcessor: CogView4Transformer2DModel
CogVideoXAttnProcessor2_0: ConsisIDTransformer3DModel
Cosmos3AttnProcessor: Cosmos3OmniTransformer
CosmosAttnProcessor2_0 CosmosAttnProcessor2_5: CosmosControlNetModel CosmosTransformer3DModel
EasyAnimateAttnProcessor2_0: EasyAnimateTransformer3DModel
ErnieImageSingleStreamAttnProcessor: ErnieImageTransformer2DModel
Flux2AttnProcessor Flux2KVAttnProcessor Flux2ParallelSelfAttnProcessor Flux2KVParallelSelfAttnProcessor:
  Flux2Transformer2DModel
Flux3AttnProcessor: Flux3Transformer2DModel
FluxAttnProcessor FluxIPAdapterAttnProcessor: FluxTransformer2DModel
GlmImageAttnProcessor: GlmImageTransformer2DModel
HeliosAttnProcessor: HeliosTransformer3DModel
HiDreamAttnProcessor: HiDreamImageTransformer2DModel
HunyuanAttnProcessor2_0 FusedHunyuanAttnProcessor2_0 PAGHunyuanAttnProcessor2_0 PAGCFGHunyuanAttnProcessor2_0:
  HunyuanDiT2DControlNetModel HunyuanDiT2DModel HunyuanDiT2DMultiControlNetModel
HunyuanImageAttnProcessor: HunyuanImageTransformer2DModel
HunyuanVideo15AttnProcessor2_0: HunyuanVideo15Transformer3DModel
HunyuanVideoAttnProcessor2_0: HunyuanVideoFramepackTransformer3DModel HunyuanVideoTransformer3DModel
Ideogram4AttnProcessor: Ideogram4Transformer2DModel
JoyImageEditPlusAttnProcessor: JoyImageEditPlusTransformer3DModel
JoyImageAttnProcessor: JoyImageEditTransformer3DModel
Kandinsky5AttnProcessor: Kandinsky5Transformer3DModel
Kandinsky6SRAttnProcessor: Kandinsky6SRTransformer3DModel
Kandinsky6AttnProcessor: Kandinsky6Transformer3DModel
Krea2AttnProcessor: Krea2Transformer2DModel
LTX2AudioVideoAttnProcessor LTX2PerturbedAttnProcessor: LTX2VideoTransformer3DModel
LTXVideoAttnProcessor: LTXVideoTransformer3DModel
AudioDiTSelfAttnProcessor AudioDiTCrossAttnProcessor: LongCatAudioDiTTransformer
LongCatImageAttnProcessor: LongCatImageTransformer2DModel
Lumina2AttnProcessor2_0: Lumina2Transformer2DModel
LuminaAttnProcessor2_0: LuminaNextDiT2DModel
MiniMaxH3AttnProcessor: MiniMaxH3Transformer3DModel
MiniMaxMusic3AttnProcessor: MiniMaxMusic3Transformer1DModel
MochiAttnProcessor2_0: MochiTransformer3DModel
MotifVideoAttnProcessor2_0 MotifVideoCrossAttnProcessor2_0: MotifVideoTransformer3DModel
NucleusMoEAttnProcessor2_0: NucleusMoEImageTransformer2DModel
OmniGenAttnProcessor2_0: OmniGenTransformer2DModel
OvisImageAttnProcessor: OvisImageTransformer2DModel
PRXAttnProcessor2_0: PRXTransformer2DModel
QwenImage21AttnProcessor QwenImage21FlexAttnProcessor: QwenImage21Transformer2DModel
QwenDoubleStreamAttnProcessor2_0: QwenImageControlNetModel QwenImageMultiControlNetModel QwenImageTransformer2DModel
SanaLinearAttnProcessor3_0: SanaVideoTransformer3DModel
SanaWMLTX2AudioVideoAttnProcessor SanaWMLTX2PerturbedAttnProcessor SanaWMLTX2RefinerAttnProcessor:
  SanaWMLTX2RefinerTransformer3DModel
SanaWMBidirectionalGDNAttention SanaWMSoftmaxAttention SanaWMBidirectionalGDNCamAttention SanaWMSoftmaxCamAttention:
  SanaWMTransformer3DModel
SkyReelsV2AttnProcessor: SkyReelsV2Transformer3DModel
StableAudio3SelfAttnProcessor: StableAudio3DiTModel
StableAudioAttnProcessor2_0: StableAudioDiTModel
WanAnimate2AttnProcessor: WanAnimate2Transformer3DModel
ZSingleStreamAttnProcessor: ZImageControlNetModel ZImageTransformer2DModel
"""


def _lines(text: str) -> Iterator[tuple[list[str], list[str]]]:
    """The words before and behind the colon of each line; an indented line goes on with the one before."""
    for line in text.strip().replace("\n  ", " ").splitlines():
        before, behind = line.split(":")
        yield before.split(), behind.split()


def _sites() -> dict[str, tuple[Site, ...]]:
    found: dict[str, tuple[Site, ...]] = {}
    for (form, *names), classes in _lines(_SITES):
        for cls in classes:
            found[cls] = (*found.get(cls, ()), Site(getattr(forms, form), *names))
    return found


SITES = _sites()
"""The classes that call a rope function: attention processors, and modules where it is called in `forward`."""

COVERAGE = dict(sorted((model, tuple(classes)) for classes, models in _lines(_MODELS) for model in models))
"""By model class: the classes in it that are covered."""


def table() -> str:
    """The README's table: the models by what their tables are and where in them jitrope rotates."""
    rows: dict[tuple[str, str], list[str]] = defaultdict(list)
    for model, covered in COVERAGE.items():
        says = "<br>".join(dict.fromkeys(says for cls in covered for says in _forms(cls)))
        where = ", ".join(dict.fromkeys(_where(cls) for cls in covered))
        rows[says, where].append(f"`{model}`")
    lines = ["| models | tables, as the model has them | where jitrope rotates |", "|---|---|---|"]
    lines += [f"| {', '.join(models)} | {says} | {where} |" for (says, where), models in rows.items()]
    return "\n".join(lines)


def _forms(cls: str) -> list[str]:
    return [INLINE[cls].call.__doc__ or ""] if cls in INLINE else [site.form.says for site in SITES[cls]]


def _where(cls: str) -> str:
    if cls in FUSED:
        return "processor, with the norm"
    return "processor of ours" if cls in INLINE else "processor" if "Processor" in cls else "`forward` of a module"
