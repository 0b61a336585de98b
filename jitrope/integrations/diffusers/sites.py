"""The classes of diffusers that call a rope function, and the form of that rope."""

from __future__ import annotations

from . import forms
from .twins import Site

# Form, name of the rope function and, if another function of the module calls it, that function's name: classes.
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


def _sites() -> dict[str, tuple[Site, ...]]:
    found: dict[str, tuple[Site, ...]] = {}
    for line in _SITES.strip().replace("\n  ", " ").splitlines():  # indented lines continue the previous one
        site, classes = line.split(":")
        form, *names = site.split()
        for cls in classes.split():
            found[cls] = (*found.get(cls, ()), Site(getattr(forms, form), *names))
    return found


SITES = _sites()  # the ropes of each class (an attention processor, or a module that rotates in `forward`), by its name
