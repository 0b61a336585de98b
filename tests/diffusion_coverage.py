"""The models of diffusers that jitrope covers. `python -m tests.diffusion_coverage` prints the README's table."""

from __future__ import annotations

from collections import defaultdict

from jitrope.integrations.diffusers import forms
from jitrope.integrations.diffusers.fused import FUSED, INLINE
from jitrope.integrations.diffusers.sites import SITES

# Classes, and the models with them.
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


# Forms (`forms.py`), and the host's tables.
_TABLES = """
SHARED: fp32 (cos, sin), (S, D) each, for neighbours or halves; or complex (B, S, D / 2)
JOY: fp32 (cos, sin), (S, D) each, q and k in one call
JOY_PLUS: fp32 (cos, sin), (B, S, D) each, q and k in one call
HALVES: (cos, sin), (S, D) each, in the model's dtype; halves, products in fp32
STABLE_AUDIO3: angles (S, R), of the first R of D elements; halves
MINIMAX_MUSIC3 MINIMAX_H3: fp32 (cos, sin), (S, R) each, of the first R of D elements; halves, all in the model's dtype
ERNIE: fp32 angles (B, S, 1, R), two neighbours alike, of halves; all in the model's dtype
MOCHI: fp32 (cos, sin), (S, H, D / 2) each, learned for each head
WAN: fp32 (cos, sin), (1, S, 1, D) each: of a pair the first cosine and the second sine
HELIOS: fp32 (B, S, 2 D), cosines before sines: of a pair the first cosine and the second sine
LTX: fp32 (cos, sin), (B, S, H D) each, before the heads are split
LTX2_SPLIT: fp32 (cos, sin), (B, H, S, D / 2) each, of halves; products by addcmul
ALLEGRO: fp32 (cos, sin), (P, D / 3) each, and position ids, for each third of a head; halves of a third
COMPLEX_ROWS: complex64 (B, S, D / 2)
QWEN: complex64 (S, D / 2)
WAN_ANIMATE2: complex128 (P, D / 2), a part of it for each axis of the grid of patches; the result is fp32
ANY_FLOW: complex128 (1, 1, S, D / 2), products in fp64
SANA_WM: complex64 (1, 1, S, D / 2), of q and k in (B, H, D, S)
SANA_WM_CAMERA: complex64 (1, 1, S, D / 4), of the second half of a head; the first is turned by the camera's matrices
HIDREAM: fp32 2 x 2 rotations (B, S, 1, D / 2, 2, 2), q and k in one call
PRX: fp32 2 x 2 rotations (1, 1, S, D / 2, 2, 2)
KANDINSKY6: fp32 2 x 2 rotations (S, 1, D / 2, 2, 2)
KANDINSKY5: fp32 2 x 2 rotations (B, S, 1, D / 2, 2, 2); the result is rounded to bf16 first
"""


def _coverage() -> dict[str, list[str]]:
    lines = [line.split(":") for line in _MODELS.strip().replace("\n  ", " ").splitlines()]
    return dict(sorted((model, classes.split()) for classes, models in lines for model in models.split()))


COVERAGE = _coverage()
"""By model class: its covered classes."""


def table() -> str:
    """The models, sorted by the form of their tables and by the way jitrope rotates in them."""
    rows: dict[tuple[str, str], list[str]] = defaultdict(list)
    for model, covered in COVERAGE.items():
        forms = "<br>".join(dict.fromkeys(form for cls in covered for form in _forms(cls)))
        where = ", ".join(dict.fromkeys(_where(cls) for cls in covered))
        rows[forms, where].append(f"`{model}`")
    lines = ["| models | tables, as the model has them | where jitrope rotates |", "|---|---|---|"]
    lines += [f"| {', '.join(models)} | {forms} | {where} |" for (forms, where), models in rows.items()]
    return "\n".join(lines)


def _forms(cls: str) -> list[str]:
    if cls in INLINE:
        return [INLINE[cls].says]
    lines = [line.split(": ", 1) for line in _TABLES.strip().splitlines()]
    said = {id(getattr(forms, name)): tables for names, tables in lines for name in names.split()}
    return [said[id(site.form)] for site in SITES[cls]]


def _where(cls: str) -> str:
    if cls in FUSED:
        return "processor, with the norm"
    return "processor of ours" if cls in INLINE else "processor" if "Processor" in cls else "`forward` of a module"


if __name__ == "__main__":
    print(table())
