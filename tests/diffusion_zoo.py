"""Every diffusers transformer that applies rope, tiny and random: `MODELS` by class name, `prepared` and `forward`.

`Model.calls` counts the calls of the host's rope functions in one forward of these inputs; 0: the rope is in the code
of the attention processors.

The file is a long table with one entry for each model.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from torch import Tensor, arange, cat, nn, ones, randint, randn, tensor, zeros
from torch.utils._pytree import tree_leaves, tree_map_only

FP32 = torch.float32


@dataclass(frozen=True)
class Model:
    """One transformer; `fp32` names the forward inputs that stay fp32 in every dtype (positions, ids, timesteps)."""

    make: Callable[..., tuple[nn.Module, dict[str, Any]]]  # a fresh model on the CPU in fp32, forward's keywords
    calls: int = 0
    fused: int = 0  # calls of processors with the norm in the same launch, in one forward of these inputs
    fp32: frozenset[str] = frozenset()
    gradients: bool = True  # whether the stock model has a backward on a CPU (flex attention has none)


MODELS: dict[str, Model] = {}


def entry(
    name: str, fp32: str = "", variant: str = "", build: Callable[..., nn.Module] | None = None, **words: Any
) -> Callable:
    """Decorator: registers a function that returns (configuration, forward's keywords), if diffusers has the class.

    A second configuration of a class is a `variant`, named "class-variant". `build` makes the module from the
    configuration if the class alone does not run. words: more of `Model`.
    """

    def register(entry: Callable[[], tuple[dict[str, Any], dict[str, Any]]]) -> Callable:
        def make(given: Any = None) -> tuple[nn.Module, dict[str, Any]]:
            config, inputs = given or entry()
            return (build or getattr(diffusers, name))(**config), inputs

        if hasattr(diffusers, name):
            MODELS[f"{name}-{variant}" if variant else name] = Model(make, fp32=frozenset(fp32.split()), **words)
        return entry

    return register


def initialise(module: nn.Module) -> None:
    """Random parameters, none of them zero: zero gates and projections would hide the attention."""
    for parameter in module.parameters():
        if not parameter.is_floating_point():
            continue
        if parameter.dim() >= 2:
            fan_in = parameter[0].numel()
            nn.init.normal_(parameter, std=fan_in**-0.5)
        else:  # norm weights near 1, biases near 0
            centre = 1.0 if bool((parameter == 1).all()) else 0.0
            nn.init.normal_(parameter, mean=centre, std=0.1)


def reloaded(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """`module` saved and loaded in `dtype`; if it cannot be saved, its children are."""
    if not isinstance(module, diffusers.ModelMixin):
        for name, child in list(module.named_children()):
            setattr(module, name, reloaded(child, dtype))
        return module
    with tempfile.TemporaryDirectory() as folder:
        module.save_pretrained(folder)
        return type(module).from_pretrained(folder, torch_dtype=dtype)


def moved(values: Any, device: Any, dtype: torch.dtype | None) -> Any:
    """`values` with their tensors on `device`, floating ones in `dtype` (None: unchanged)."""
    return tree_map_only(Tensor, lambda x: x.to(device, dtype if x.is_floating_point() else None), values)


def prepared(
    name: str, device: Any = "cpu", dtype: torch.dtype = FP32, given: Any = None
) -> tuple[Any, dict[str, Any]]:
    """A seeded model in eval mode, as after `from_pretrained(torch_dtype=dtype)`, and its inputs.

    given: another configuration and other keywords of forward.

    That is not `module.to(dtype)`: fp32 tables stay fp32, and so do the modules the class keeps in fp32.
    """
    torch.manual_seed(0)
    module, inputs = MODELS[name].make(given)
    with torch.no_grad():
        initialise(module)
    if dtype != FP32:
        module = reloaded(module, dtype)
    inputs = {key: moved(value, device, None if key in MODELS[name].fp32 else dtype) for key, value in inputs.items()}
    return module.to(device).eval(), inputs


def forward(module: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """All output tensors of one forward, flattened and concatenated if there is more than one."""
    outputs = [x for x in tree_leaves(module(**inputs)) if isinstance(x, Tensor)]
    return outputs[0] if len(outputs) == 1 else torch.cat([output.flatten() for output in outputs])


# Inputs of many models. B = 2 wherever the model allows it.


def grid(*sizes: int) -> Tensor:
    """Positions (prod(sizes), len(sizes)) of a grid in row-major order, fp32."""
    axes = torch.meshgrid(*(torch.arange(float(size)) for size in sizes), indexing="ij")
    return torch.stack(axes, -1).reshape(-1, len(sizes))


def image_ids(height: int, width: int, axes: int = 3) -> Tensor:
    """(height * width, axes): zeros, then the row and the column; the last of 4 axes is zero."""
    ids = torch.zeros(height * width, axes)
    ids[:, 1:3] = grid(height, width)
    return ids


def text_mask(length: int, dtype: torch.dtype = torch.long) -> Tensor:
    """(2, length): the second row is two tokens shorter."""
    mask = torch.ones(2, length, dtype=dtype)
    mask[1, -2:] = 0
    return mask


def of(**words: Any) -> dict[str, Any]:
    return words


HEADS = of(num_attention_heads=2, attention_head_dim=16)
SIGMAS, STEPS, FLOAT_STEPS = tensor([0.5, 0.25]), tensor([3, 700]), tensor([3.0, 700.0])  # one for each row

# fmt: off

FLUX = of(in_channels=4, num_layers=1, num_single_layers=2, **HEADS, joint_attention_dim=32, axes_dims_rope=(4, 4, 8))
FLUX2 = FLUX | of(axes_dims_rope=(4, 4, 4, 4))

def flux_inputs(axes=3):
    text = zeros(6, axes)
    text[:, 3:] = arange(6.0)[:, None]
    return of(hidden_states=randn(2, 16, 4), encoder_hidden_states=randn(2, 6, 32), timestep=SIGMAS,
        img_ids=image_ids(4, 4, axes), txt_ids=text)

@entry("FluxTransformer2DModel", calls=6, fused=3, fp32="img_ids txt_ids")
def flux():
    return FLUX | of(pooled_projection_dim=32), flux_inputs() | of(pooled_projections=randn(2, 32))

@entry("Flux2Transformer2DModel", calls=6, fused=3, fp32="img_ids txt_ids")
def flux2():
    return FLUX2 | of(timestep_guidance_channels=32), flux_inputs(4) | of(guidance=tensor([4.0, 4.0]))

@entry("ChromaTransformer2DModel", calls=6, fused=3, fp32="img_ids txt_ids")
def chroma():
    return FLUX | of(approximator_num_channels=16, approximator_hidden_dim=32, approximator_layers=1), flux_inputs()

@entry("QwenImageTransformer2DModel", calls=8, fused=2)
def qwen_image():
    return of(patch_size=2, in_channels=16, out_channels=4, num_layers=2, **HEADS, joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4)), of(
        hidden_states=randn(2, 16, 16), encoder_hidden_states=randn(2, 7, 16), encoder_hidden_states_mask=text_mask(7),
        timestep=SIGMAS, img_shapes=[[(1, 4, 4)]] * 2,
        **({"txt_seq_lens": [7, 7]} if diffusers.__version__.startswith("0.36") else {}))

WAN = of(patch_size=(1, 2, 2), **HEADS, in_channels=4, out_channels=4, text_dim=16, freq_dim=32, ffn_dim=32,
    num_layers=2, cross_attn_norm=True, rope_max_seq_len=32)

def wan_inputs():
    return of(hidden_states=randn(2, 4, 2, 8, 8), encoder_hidden_states=randn(2, 5, 16), timestep=STEPS)

@entry("WanTransformer3DModel", fused=4)
def wan():
    return WAN, wan_inputs()

HUNYUAN_VIDEO = of(in_channels=4, out_channels=4, **HEADS, num_layers=1, num_single_layers=2, num_refiner_layers=1,
    patch_size=2, patch_size_t=1, guidance_embeds=True, text_embed_dim=16, pooled_projection_dim=8,
    rope_axes_dim=(4, 4, 8))

def hunyuan_inputs():
    return of(hidden_states=randn(2, 4, 2, 8, 8), timestep=STEPS, encoder_hidden_states=randn(2, 6, 16),
        encoder_attention_mask=text_mask(6), pooled_projections=randn(2, 8), guidance=tensor([6144.0, 6144.0]))

@entry("HunyuanVideoTransformer3DModel", calls=6, fused=3)
def hunyuan_video():
    return HUNYUAN_VIDEO, hunyuan_inputs()

@entry("LTXVideoTransformer3DModel", calls=4, fused=4)
def ltx():
    return of(in_channels=4, out_channels=4, **HEADS, cross_attention_dim=32, num_layers=2, caption_channels=16), of(
        hidden_states=randn(2, 2 * 4 * 4, 4), encoder_hidden_states=randn(2, 6, 16), timestep=STEPS,
        encoder_attention_mask=text_mask(6), num_frames=2, height=4, width=4,
        rope_interpolation_scale=(0.32, 32.0, 32.0))

Z_IMAGE = of(in_channels=4, dim=32, n_layers=2, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=16,
    axes_dims=[4, 4, 8], axes_lens=[64, 32, 32])

def z_image_inputs():
    return of(x=[randn(4, 1, 8, 8), randn(4, 1, 8, 6)], t=SIGMAS, cap_feats=[randn(6, 16), randn(5, 16)])

@entry("ZImageTransformer2DModel", fused=4)
def z_image():
    return Z_IMAGE, z_image_inputs()

class ZImageControlled(nn.Module):
    """A Z-Image transformer under its control net, which shares the transformer's embedders and refiners."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.controlnet = diffusers.ZImageControlNetModel(**config)
        self.transformer = diffusers.ZImageTransformer2DModel(**Z_IMAGE)

    def forward(self, x: Any, t: Tensor, cap_feats: Any, control_context: Any) -> Any:
        controlnet = self.controlnet.from_transformer(self.controlnet, self.transformer)
        samples = controlnet(x, t, cap_feats, control_context)
        return self.transformer(x, t, cap_feats, controlnet_block_samples=samples)

@entry("ZImageControlNetModel", fused=9, gradients=False, build=ZImageControlled)
def z_image_controlnet():
    context = [randn(6, 1, 8, 8), randn(6, 1, 8, 6)]
    return of(control_layers_places=[0, 1], control_refiner_layers_places=[0], control_in_dim=6,
        add_control_noise_refiner="control_noise_refiner", dim=32, n_refiner_layers=1, n_heads=2,
        n_kv_heads=2), z_image_inputs() | of(control_context=context)

@entry("Flux3Transformer2DModel", calls=8, fp32="img_ids txt_ids image_cond_ids")
def flux3():
    condition = image_ids(3, 3, 4)
    condition[:, 0] = 10
    return FLUX2 | of(cond_in_channels=6, num_single_layers=1, timestep_channels=32), flux_inputs(4) | of(
        image_cond_hidden_states=randn(2, 9, 6), image_cond_ids=condition)

@entry("LongCatImageTransformer2DModel", calls=6, fp32="img_ids txt_ids")
def longcat_image():
    return FLUX | of(pooled_projection_dim=32), flux_inputs()

@entry("OvisImageTransformer2DModel", calls=6, fp32="img_ids txt_ids")
def ovis_image():
    return FLUX | of(out_channels=4), flux_inputs()

@entry("BriaTransformer2DModel", calls=6, fp32="img_ids txt_ids")
def bria():
    return FLUX, flux_inputs()

@entry("BriaFiboTransformer2DModel", calls=6, fp32="img_ids txt_ids")
def bria_fibo():
    layers = [randn(2, 6, 24) for _ in range(3)]
    return FLUX | of(text_encoder_dim=24), flux_inputs() | of(text_encoder_layers=layers)

@entry("Krea2Transformer2DModel", calls=4, fp32="position_ids")
def krea2():
    return of(in_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=32, timestep_embed_dim=32, text_hidden_dim=32, num_text_layers=3, text_num_attention_heads=2,
        text_num_key_value_heads=2, text_intermediate_size=32, num_layerwise_text_blocks=1, num_refiner_text_blocks=1,
        axes_dims_rope=(4, 4, 8)), of(
        hidden_states=randn(2, 16, 4), encoder_hidden_states=randn(2, 6, 3, 32), timestep=SIGMAS,
        position_ids=cat([zeros(6, 3), image_ids(4, 4)]), encoder_attention_mask=text_mask(6, torch.bool))

@entry("Lumina2Transformer2DModel", calls=8)
def lumina2():
    return of(sample_size=8, in_channels=4, hidden_size=64, num_layers=2, num_refiner_layers=1, num_attention_heads=4,
        num_kv_heads=2, multiple_of=16, axes_dim_rope=(4, 4, 8), axes_lens=(64, 32, 32), cap_feat_dim=16), of(
        hidden_states=randn(2, 4, 8, 8), timestep=SIGMAS, encoder_hidden_states=randn(2, 6, 16),
        encoder_attention_mask=text_mask(6, torch.bool))

@entry("MotifVideoTransformer3DModel", calls=8)
def motif_video():
    return of(in_channels=9, out_channels=4, **HEADS, num_layers=1, num_single_layers=2, num_decoder_layers=1,
        text_embed_dim=16, rope_axes_dim=(4, 4, 8), enable_text_cross_attention_dual=True,
        enable_text_cross_attention_single=True), of(
        hidden_states=randn(2, 9, 2, 8, 8), timestep=STEPS, encoder_hidden_states=randn(2, 6, 16),
        encoder_attention_mask=text_mask(6))

@entry("HunyuanVideoFramepackTransformer3DModel", calls=6, fused=3)
def framepack():
    return HUNYUAN_VIDEO | of(has_image_proj=True, image_proj_dim=12,
        has_clean_x_embedder=True), hunyuan_inputs() | of(image_embeds=randn(2, 3, 12), indices_latents=arange(8, 10),
        latents_clean=randn(2, 4, 2, 8, 8), indices_latents_clean=tensor([0, 12]),
        latents_history_2x=randn(2, 4, 2, 8, 8), indices_latents_history_2x=arange(4, 6),
        latents_history_4x=randn(2, 4, 4, 8, 8), indices_latents_history_4x=arange(4))

@entry("HunyuanVideo15Transformer3DModel", calls=4)
def hunyuan_video15():
    return of(in_channels=9, out_channels=4, **HEADS, num_layers=2, num_refiner_layers=1, text_embed_dim=16,
        text_embed_2_dim=12, image_embed_dim=8, rope_axes_dim=(4, 4, 8), target_size=16), of(
        hidden_states=randn(2, 9, 2, 4, 4), timestep=FLOAT_STEPS, encoder_hidden_states=randn(2, 6, 16),
        encoder_attention_mask=text_mask(6), encoder_hidden_states_2=randn(2, 5, 12),
        encoder_attention_mask_2=text_mask(5), image_embeds=randn(2, 3, 8))

@entry("HunyuanImageTransformer2DModel", calls=6)
def hunyuan_image():
    return of(in_channels=4, out_channels=4, **HEADS, num_layers=1, num_single_layers=2, num_refiner_layers=1,
        guidance_embeds=True, text_embed_dim=16, text_embed_2_dim=12, rope_axes_dim=(8, 8)), of(
        hidden_states=randn(2, 4, 4, 4), timestep=FLOAT_STEPS, encoder_hidden_states=randn(2, 6, 16),
        encoder_attention_mask=text_mask(6), encoder_hidden_states_2=randn(2, 5, 12),
        encoder_attention_mask_2=text_mask(5), guidance=tensor([3584.0, 3584.0]))

@entry("SkyReelsV2Transformer3DModel", fused=4)
def skyreels_v2():
    return WAN | of(inject_sample_info=True), wan_inputs() | of(fps=tensor([0, 1]))

@entry("ChronoEditTransformer3DModel", fused=4)
def chrono_edit():
    return WAN | of(rope_temporal_skip_len=8), wan_inputs()

@entry("WanVACETransformer3DModel", fused=8)
def wan_vace():
    return WAN | of(num_layers=2, vace_layers=[0, 1],
        vace_in_channels=6), wan_inputs() | of(control_hidden_states=randn(2, 6, 2, 8, 8))

@entry("WanAnimateTransformer3DModel", fused=4)
def wan_animate():
    sizes = {"4": 16, "8": 16, "16": 16, "32": 16, "64": 16}
    return WAN | of(in_channels=12, latent_channels=4, image_dim=16, motion_encoder_channel_sizes=sizes,
        motion_encoder_size=16, motion_style_dim=16, motion_dim=4, motion_encoder_dim=16, face_encoder_hidden_dim=16,
        face_encoder_num_heads=2, inject_face_latents_blocks=2), wan_inputs() | of(hidden_states=randn(2, 12, 3, 8, 8),
        encoder_hidden_states_image=randn(2, 3, 16), pose_hidden_states=randn(2, 4, 2, 8, 8),
        face_pixel_values=randn(2, 3, 5, 16, 16))

@entry("HeliosTransformer3DModel", calls=4)
def helios():
    config = {key: value for key, value in WAN.items() if key != "rope_max_seq_len"}
    return config | of(rope_dim=(8, 4, 4)), wan_inputs() | of(
        indices_hidden_states=arange(20, 22).expand(2, -1), latents_history_short=randn(2, 4, 2, 8, 8),
        indices_latents_history_short=arange(18, 20).expand(2, -1), latents_history_mid=randn(2, 4, 2, 8, 8),
        indices_latents_history_mid=arange(16, 18).expand(2, -1), latents_history_long=randn(2, 4, 16, 8, 8),
        indices_latents_history_long=arange(16).expand(2, -1))

@entry("AnyFlowTransformer3DModel", calls=4)
def anyflow():
    return WAN, wan_inputs() | of(hidden_states=randn(2, 2, 4, 8, 8), timestep=tensor([[700.0, 500.0], [3.0, 3.0]]),
        r_timestep=tensor([[600.0, 400.0], [2.0, 2.0]]))

@entry("AnyFlowFARTransformer3DModel", calls=4, gradients=False)
def anyflow_far():
    times = tensor([[700.0, 500.0, 500.0], [3.0, 3.0, 3.0]])
    return WAN | of(full_chunk_limit=2,
        chunk_partition=(1, 1, 1)), wan_inputs() | of(hidden_states=randn(2, 3, 4, 8, 8), timestep=times,
        r_timestep=times / 2, chunk_partition=[1, 1, 1])

JOY = of(patch_size=[1, 2, 2], in_channels=4, hidden_size=32, num_attention_heads=2, text_dim=16, mlp_width_ratio=2.0,
    num_layers=2, rope_dim_list=[4, 4, 8])

def joy_image_inputs():
    return of(hidden_states=randn(2, 2, 4, 1, 8, 8), timestep=FLOAT_STEPS, encoder_hidden_states=randn(2, 6, 16))

@entry("JoyImageEditTransformer3DModel", calls=2)
def joy_image():
    return JOY, joy_image_inputs()

@entry("JoyImageEditTransformer3DModel", variant="mrope", calls=4)
def joy_image_mrope():
    return JOY | of(rope_type="mrope"), joy_image_inputs()

@entry("JoyImageEditPlusTransformer3DModel", calls=2)
def joy_image_edit_plus():
    return JOY, of(
        hidden_states=randn(2, 25, 4, 1, 2, 2), timestep=FLOAT_STEPS, encoder_hidden_states=randn(2, 6, 16),
        encoder_hidden_states_mask=text_mask(6), shape_list=[[(1, 4, 4), (1, 3, 3)], [(1, 4, 4), (1, 2, 2)]])

@entry("NucleusMoEImageTransformer2DModel", calls=6)
def nucleus_moe_image():
    return of(patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=4,
        num_key_value_heads=2, joint_attention_dim=16, axes_dims_rope=(8, 4, 4), mlp_ratio=4.0, num_experts=4,
        dense_moe_strategy="leave_first_block_dense", moe_intermediate_dim=16, capacity_factors=2.0), of(
        hidden_states=randn(2, 16, 16), img_shapes=[(1, 4, 4)] * 2, encoder_hidden_states=randn(2, 7, 16),
        encoder_hidden_states_mask=text_mask(7, torch.bool), timestep=SIGMAS)

@entry("QwenImage21Transformer2DModel", calls=4)
def qwen_image21():
    return of(in_channels=16, out_channels=16, num_layers=2, **HEADS, context_in_dim=16, axes_dims_rope=(4, 4, 8)), of(
        hidden_states=randn(2, 16, 16), encoder_hidden_states=randn(2, 7, 16), timestep=tensor([0.5, 0.5]),
        img_shapes=[[(1, 4, 4)]] * 2, img_mask=tensor([[False] * 7 + [True] * 4] * 2),
        encoder_hidden_states_mask=text_mask(7))

def ltx2_inputs():
    return of(hidden_states=randn(2, 2 * 4 * 4, 4), audio_hidden_states=randn(2, 5, 6),
        encoder_hidden_states=randn(2, 6, 16), audio_encoder_hidden_states=randn(2, 6, 16), timestep=STEPS,
        encoder_attention_mask=text_mask(6), audio_encoder_attention_mask=text_mask(6), num_frames=2, height=4, width=4,
        audio_num_frames=5)

LTX2 = of(in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=32, cross_attention_dim=64,
    audio_in_channels=6, audio_out_channels=6, audio_num_attention_heads=2, audio_attention_head_dim=16,
    audio_cross_attention_dim=32, num_layers=2, caption_channels=16)

@entry("LTX2VideoTransformer3DModel", calls=16)
def ltx2():
    return LTX2, ltx2_inputs()

@entry("LTX2VideoTransformer3DModel", variant="split", calls=16)
def ltx2_split():
    return LTX2 | of(rope_type="split"), ltx2_inputs()

@entry("LongCatAudioDiTTransformer", calls=8)
def longcat_audio():
    return of(dit_dim=32, dit_depth=2, dit_heads=2, dit_text_dim=16, latent_dim=4, ff_mult=2.0), of(
        hidden_states=randn(2, 12, 4), encoder_hidden_states=randn(2, 6, 16),
        encoder_attention_mask=text_mask(6, torch.bool), timestep=SIGMAS, attention_mask=ones(2, 12, dtype=torch.bool),
        latent_cond=randn(2, 12, 4))

@entry("GlmImageTransformer2DModel", calls=4)
def glm_image():
    return of(patch_size=2, in_channels=4, out_channels=4, num_layers=2, **HEADS, text_embed_dim=16, time_embed_dim=32,
        condition_dim=16, prior_vq_quantizer_codebook_size=32), of(
        hidden_states=randn(2, 4, 8, 8), encoder_hidden_states=randn(2, 6, 16), prior_token_id=randint(32, (2, 16)),
        prior_token_drop=zeros(2, 16, dtype=torch.bool), timestep=STEPS, target_size=tensor([[64.0, 64.0]] * 2),
        crop_coords=zeros(2, 2))

@entry("AceStepTransformer1DModel", calls=4)
def ace_step():
    return of(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, in_channels=12, audio_acoustic_hidden_dim=4, patch_size=2, sliding_window=4,
        encoder_hidden_size=16), of(
        hidden_states=randn(2, 16, 4), timestep=SIGMAS, timestep_r=SIGMAS, encoder_hidden_states=randn(2, 6, 16),
        context_latents=randn(2, 16, 8))

def rotary_tables(positions, sizes, halves=False):
    """(cos, sin), (S, sum(sizes)) each, of positions (S, axes): every angle twice in a row, or in both halves."""
    axes = [positions[:, axis, None] * 10000.0 ** (-(arange(0, size, 2) / size)) for axis, size in enumerate(sizes)]
    angles = cat(axes, -1)
    angles = cat([angles, angles], -1) if halves else angles.repeat_interleave(2, -1)
    return (angles.cos(), angles.sin())

COGVIDEOX = of(num_attention_heads=3, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=32,
    text_embed_dim=16, num_layers=2, sample_width=8, sample_height=8, sample_frames=5, patch_size=2,
    max_text_seq_length=6, use_rotary_positional_embeddings=True)

def cogvideox_inputs():
    return of(hidden_states=randn(2, 2, 4, 8, 8), encoder_hidden_states=randn(2, 6, 16), timestep=STEPS,
        image_rotary_emb=rotary_tables(grid(2, 4, 4), (4, 6, 6)))

@entry("CogVideoXTransformer3DModel", calls=4, fp32="image_rotary_emb")
def cogvideox():
    return COGVIDEOX, cogvideox_inputs()

@entry("ConsisIDTransformer3DModel", calls=4, fp32="image_rotary_emb")
def consisid():
    return COGVIDEOX | of(is_train_face=True, cross_attn_interval=1, cross_attn_dim_head=8, cross_attn_num_heads=2,
        LFE_id_dim=12, LFE_vit_dim=16, LFE_depth=2, LFE_dim_head=8, LFE_num_heads=2, LFE_num_id_token=2,
        LFE_num_querie=4, LFE_output_dim=32, LFE_ff_mult=2,
        LFE_num_scale=2), cogvideox_inputs() | of(id_cond=randn(2, 12),
        id_vit_hidden=[randn(2, 5, 16) for _ in range(2)])

@entry("HunyuanDiT2DModel", calls=12, fp32="image_rotary_emb")
def hunyuan_dit():
    return of(**HEADS, in_channels=4, patch_size=2, sample_size=8, hidden_size=32, num_layers=4, mlp_ratio=2.0,
        cross_attention_dim=16, cross_attention_dim_t5=16, pooled_projection_dim=8, text_len=5, text_len_t5=6), of(
        hidden_states=randn(2, 4, 8, 8), timestep=FLOAT_STEPS, encoder_hidden_states=randn(2, 5, 16),
        text_embedding_mask=text_mask(5), encoder_hidden_states_t5=randn(2, 6, 16), text_embedding_mask_t5=text_mask(6),
        image_meta_size=tensor([[64.0, 64.0, 64.0, 64.0, 0.0, 0.0]] * 2), style=zeros(2, dtype=torch.long),
        image_rotary_emb=rotary_tables(grid(4, 4), (8, 8)))

@entry("StableAudioDiTModel", calls=4, fp32="rotary_embedding")
def stable_audio():
    return of(sample_size=12, in_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=4,
        num_key_value_attention_heads=2, out_channels=4, cross_attention_dim=32, time_proj_dim=32,
        global_states_input_dim=24, cross_attention_input_dim=16), of(
        hidden_states=randn(2, 4, 12), timestep=SIGMAS, encoder_hidden_states=randn(2, 6, 16),
        global_hidden_states=randn(2, 1, 24), rotary_embedding=rotary_tables(grid(13), (8,), halves=True))

@entry("LuminaNextDiT2DModel", calls=6)
def lumina_next():
    cos, sin = rotary_tables(grid(4, 4), (8, 8))
    return of(sample_size=8, patch_size=2, in_channels=4, hidden_size=64, num_layers=2, num_attention_heads=4,
        num_kv_heads=2, multiple_of=16, cross_attention_dim=16), of(
        hidden_states=randn(2, 4, 8, 8), timestep=SIGMAS, encoder_hidden_states=randn(2, 6, 16),
        encoder_mask=text_mask(6), image_rotary_emb=torch.complex(cos, sin)[:, ::2].reshape(4, 4, 8).contiguous(),
        cross_attention_kwargs={})

@entry("SanaWMLTX2RefinerTransformer3DModel", calls=4, fp32="video_rotary_emb")
def sana_wm_refiner():
    cos, sin = rotary_tables(grid(2, 4, 4), (20, 22, 22))
    return LTX2, of(
        hidden_states=randn(2, 2 * 4 * 4, 4), encoder_hidden_states=randn(2, 6, 16), timestep=STEPS,
        video_rotary_emb=(cos.expand(2, -1, -1), sin.expand(2, -1, -1)), encoder_attention_mask=text_mask(6))

@entry("EasyAnimateTransformer3DModel", calls=4)
def easy_animate():
    return of(num_attention_heads=2, attention_head_dim=32, in_channels=4, out_channels=4, patch_size=2, sample_width=8,
        sample_height=8, num_layers=2, mmdit_layers=1, time_embed_dim=32, text_embed_dim=16, text_embed_dim_t5=12), of(
        hidden_states=randn(2, 4, 2, 8, 8), timestep=FLOAT_STEPS, encoder_hidden_states=randn(2, 6, 16),
        encoder_hidden_states_t5=randn(2, 5, 12))

@entry("CogView4Transformer2DModel", calls=4)
def cogview4():
    sizes = tensor([[64.0, 64.0]] * 2)
    return of(patch_size=2, in_channels=4, out_channels=4, num_layers=2, **HEADS, text_embed_dim=16, time_embed_dim=32,
        condition_dim=16, pos_embed_max_size=8, sample_size=8), of(
        hidden_states=randn(2, 4, 8, 8), encoder_hidden_states=randn(2, 6, 16), timestep=STEPS, original_size=sizes,
        target_size=sizes, crop_coords=zeros(2, 2))

@entry("CosmosTransformer3DModel", calls=4)
def cosmos():
    return of(in_channels=4, out_channels=4, **HEADS, num_layers=2, mlp_ratio=2.0, text_embed_dim=16, adaln_lora_dim=8,
        max_size=(4, 16, 16), rope_scale=(2.0, 1.0, 1.0), concat_padding_mask=False), of(
        hidden_states=randn(2, 4, 2, 8, 8), timestep=SIGMAS, encoder_hidden_states=randn(2, 6, 16), fps=16)

@entry("OmniGenTransformer2DModel", calls=4)
def omnigen():
    return of(in_channels=4, patch_size=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=32, num_layers=2, pad_token_id=0, vocab_size=32, max_position_embeddings=256,
        original_max_position_embeddings=128, rope_scaling=of(short_factor=[1.0] * 8, long_factor=[2.0] * 8),
        pos_embed_max_size=8, time_step_dim=32), of(
        hidden_states=randn(2, 4, 8, 8), timestep=SIGMAS, input_ids=randint(1, 32, (2, 20)),
        input_img_latents=[randn(1, 4, 8, 8) for _ in range(2)], input_image_sizes={0: [[2, 18]], 1: [[2, 18]]},
        attention_mask=ones(2, 37, 37, dtype=torch.long), position_ids=arange(37).expand(2, -1))

SANA_WM = of(in_channels=4, num_layers=2, hidden_size=64, num_attention_heads=2, softmax_every_n=2, linear_head_dim=32,
    chunk_plucker_channels=6, chunk_plucker_post_attn_blocks=1, image_size=8, caption_channels=16, mlp_ratio=2.0)

def sana_wm_inputs():
    return of(hidden_states=randn(2, 4, 2, 4, 4), timestep=tensor([[[3.0, 3.0]], [[700.0, 500.0]]]),
        encoder_hidden_states=randn(2, 1, 6, 16), encoder_attention_mask=text_mask(6))

@entry("SanaWMTransformer3DModel", calls=4)
def sana_wm():
    return SANA_WM, sana_wm_inputs()
