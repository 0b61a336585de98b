"""Tiny random transformers of diffusers with every attention processor that jitrope knows, and with their tables."""

from __future__ import annotations

import tempfile
from functools import partial
from typing import Any, NamedTuple

import diffusers
import torch
from torch import Tensor, arange, cartesian_prod, cat, nn, ones, tensor, zeros
from torch.utils._pytree import tree_leaves, tree_map_only

FP32 = torch.float32


class Model(NamedTuple):
    """One transformer, and what one forward of its inputs counts."""

    name: str  # of the class, and perhaps "-" and a variant
    config: dict[str, Any]
    inputs: dict[str, Any]  # the keywords of forward
    calls: int = 0  # of the host's rope functions; 0: its rope is in the code of the attention processors
    fused: int = 0  # of processors with the norm in the same launch
    fp32: str = ""  # the names of inputs that stay fp32 in every dtype (positions, ids, tables)
    gradients: bool = True  # whether the stock model has a backward on a CPU (flex attention has none)


def prepared(
    name: str, device: Any = "cpu", dtype: torch.dtype = FP32, config: Any = None, inputs: Any = None
) -> tuple[Any, dict[str, Any]]:
    """A seeded model in eval mode, as after `from_pretrained(torch_dtype=dtype)`, and its inputs.

    That is not `module.to(dtype)`: fp32 tables stay fp32, and so do the modules the class keeps in fp32.
    No parameter is zero: zero gates and projections would hide the attention.

    config, inputs: what is another in them than in `MODELS`.
    """
    torch.manual_seed(0)
    model, made = MODELS[name], {}
    module = getattr(diffusers, name.partition("-")[0])(**{**model.config, **(config or {})})
    for parameter in filter(Tensor.is_floating_point, module.parameters()):
        if parameter.dim() >= 2:
            nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
        else:  # norm weights near 1, biases near 0
            nn.init.normal_(parameter, mean=float(bool((parameter == 1).all())), std=0.1)
    if dtype != FP32:
        with tempfile.TemporaryDirectory() as folder:
            module.save_pretrained(folder)
            module = type(module).from_pretrained(folder, torch_dtype=dtype)
    for key, value in {**model.inputs, **(inputs or {})}.items():
        kind = None if key in model.fp32.split() else dtype
        to = lambda x, kind=kind: x.to(device, kind if x.is_floating_point() else None, copy=True)  # noqa: E731
        made[key] = tree_map_only(Tensor, to, value)
    return module.to(device).eval(), made


def forward(module: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """All output tensors of one forward, flattened and concatenated if there is more than one.

    It has the same random numbers and order of sums each time: a mixture of experts sums its experts by atomics.
    """
    torch.manual_seed(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        outputs = [x for x in tree_leaves(module(**inputs)) if isinstance(x, Tensor)]
    finally:
        torch.use_deterministic_algorithms(False)
    return outputs[0] if len(outputs) == 1 else torch.cat([output.flatten() for output in outputs])


# ---- the table: B = 2 wherever the model allows it -------------------------------------------------------

of, numbers = dict, torch.Generator().manual_seed(0)
randn, randint = (partial(draw, generator=numbers) for draw in (torch.randn, torch.randint))


def rotary_tables(positions: Tensor, sizes: tuple[int, ...], halves: bool = False) -> tuple[Tensor, Tensor]:
    """(cos, sin), (S, sum(sizes)) each, of positions (S, axes): every angle twice in a row, or in both halves."""
    axes = [positions[:, axis, None] * 10000.0 ** (-(arange(0, size, 2) / size)) for axis, size in enumerate(sizes)]
    angles = cat(axes, -1)
    angles = cat([angles, angles], -1) if halves else angles.repeat_interleave(2, -1)
    return angles.cos(), angles.sin()


# Of two rows of text the second is two tokens shorter.
MASK, MASK5, MASK7 = (tensor([[1] * length, [1] * (length - 2) + [0] * 2]) for length in (6, 5, 7))
BOOL_MASK, BOOL_MASK7 = MASK.bool(), MASK7.bool()
TEXT, IMAGE, PATCHES = randn(2, 6, 16), randn(2, 4, 8, 8), randn(2, 16, 16)
SQUARE, NINE, CUBE = (cartesian_prod(*map(arange, map(float, sizes))) for sizes in ((4, 4), (3, 3), (2, 4, 4)))
# (height * width, axes): zeros, the row and the column; and a fourth axis, which text has.
IMAGE_IDS = cat([zeros(16, 1), SQUARE], 1)
TEXT_IDS = cat([zeros(6, 3), arange(6.0)[:, None]], 1)
OTHER_IDS = cat([zeros(9, 1) + 10, NINE, zeros(9, 1)], 1)
HEADS = of(num_attention_heads=2, attention_head_dim=16)
IN_OUT = of(in_channels=4, out_channels=4, **HEADS)
TEXTS = of(encoder_hidden_states=TEXT, encoder_attention_mask=MASK)
SIGMAS, STEPS, FLOAT_STEPS = tensor([0.5, 0.25]), tensor([3, 700]), tensor([3.0, 700.0])  # one for each row

# fmt: off

FLUX = of(in_channels=4, num_layers=1, num_single_layers=2, **HEADS, joint_attention_dim=32, axes_dims_rope=(4, 4, 8))
FLUX2 = FLUX | of(axes_dims_rope=(4, 4, 4, 4))
FLUX_INPUTS = of(hidden_states=randn(2, 16, 4), encoder_hidden_states=randn(2, 6, 32), timestep=SIGMAS,
    img_ids=IMAGE_IDS, txt_ids=zeros(6, 3))
FLUX2_INPUTS = FLUX_INPUTS | of(img_ids=cat([IMAGE_IDS, zeros(16, 1)], 1), txt_ids=TEXT_IDS)
IDS = "img_ids txt_ids"
WAN = of(patch_size=(1, 2, 2), **HEADS, in_channels=4, out_channels=4, text_dim=16, freq_dim=32, ffn_dim=32,
    num_layers=2, cross_attn_norm=True, rope_max_seq_len=32)
WAN_INPUTS = of(hidden_states=randn(2, 4, 2, 8, 8), encoder_hidden_states=randn(2, 5, 16), timestep=STEPS)
HUNYUAN_VIDEO = of(**IN_OUT, num_layers=1, num_single_layers=2, num_refiner_layers=1, patch_size=2, patch_size_t=1,
    guidance_embeds=True, text_embed_dim=16, pooled_projection_dim=8, rope_axes_dim=(4, 4, 8))
HUNYUAN_INPUTS = of(hidden_states=randn(2, 4, 2, 8, 8), timestep=STEPS, **TEXTS, pooled_projections=randn(2, 8),
    guidance=tensor([6144.0, 6144.0]))
Z_IMAGE = of(in_channels=4, dim=32, n_layers=2, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=16,
    axes_dims=[4, 4, 8], axes_lens=[64, 32, 32])
Z_IMAGE_INPUTS = of(x=[randn(4, 1, 8, 8), randn(4, 1, 8, 6)], t=SIGMAS, cap_feats=[randn(6, 16), randn(5, 16)])
TIMES = tensor([[700.0, 500.0, 500.0], [3.0, 3.0, 3.0]])
JOY = of(patch_size=[1, 2, 2], in_channels=4, hidden_size=32, num_attention_heads=2, text_dim=16, mlp_width_ratio=2.0,
    num_layers=2, rope_dim_list=[4, 4, 8])
JOY_INPUTS = of(hidden_states=randn(2, 2, 4, 1, 8, 8), timestep=FLOAT_STEPS, encoder_hidden_states=TEXT)
LTX2_INPUTS = of(hidden_states=randn(2, 2 * 4 * 4, 4), audio_hidden_states=randn(2, 5, 6), encoder_hidden_states=TEXT,
    audio_encoder_hidden_states=randn(2, 6, 16), timestep=STEPS, encoder_attention_mask=MASK,
    audio_encoder_attention_mask=MASK, num_frames=2, height=4, width=4, audio_num_frames=5)
LTX2 = of(in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=32, cross_attention_dim=64,
    audio_in_channels=6, audio_out_channels=6, audio_num_attention_heads=2, audio_attention_head_dim=16,
    audio_cross_attention_dim=32, num_layers=2, caption_channels=16)
COGVIDEOX = of(num_attention_heads=3, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=32,
    text_embed_dim=16, num_layers=2, sample_width=8, sample_height=8, sample_frames=5, patch_size=2,
    max_text_seq_length=6, use_rotary_positional_embeddings=True)
COGVIDEOX_INPUTS = of(hidden_states=randn(2, 2, 4, 8, 8), encoder_hidden_states=TEXT, timestep=STEPS,
    image_rotary_emb=rotary_tables(CUBE, (4, 6, 6)))
SIZES = tensor([[64.0, 64.0]] * 2)
SANA_WM = of(in_channels=4, num_layers=2, hidden_size=64, num_attention_heads=2, softmax_every_n=2, linear_head_dim=32,
    chunk_plucker_channels=6, chunk_plucker_post_attn_blocks=1, image_size=8, caption_channels=16, mlp_ratio=2.0)
SANA_WM_INPUTS = of(hidden_states=randn(2, 4, 2, 4, 4), timestep=tensor([[[3.0, 3.0]], [[700.0, 500.0]]]),
    encoder_hidden_states=randn(2, 1, 6, 16), encoder_attention_mask=MASK)
ROWS = [
    Model("FluxTransformer2DModel", FLUX | of(pooled_projection_dim=32), FLUX_INPUTS |
        of(pooled_projections=randn(2, 32)), calls=6, fused=3, fp32=IDS),
    Model("Flux2Transformer2DModel", FLUX2 | of(timestep_guidance_channels=32), FLUX2_INPUTS |
        of(guidance=tensor([4.0, 4.0])), calls=6, fused=3, fp32=IDS),
    Model("ChromaTransformer2DModel", FLUX | of(approximator_num_channels=16, approximator_hidden_dim=32,
        approximator_layers=1), FLUX_INPUTS, calls=6, fused=3, fp32=IDS),
    Model("QwenImageTransformer2DModel", of(patch_size=2, in_channels=16, out_channels=4, num_layers=2, **HEADS,
        joint_attention_dim=16, axes_dims_rope=(8, 4, 4)), of(hidden_states=PATCHES,
        encoder_hidden_states=randn(2, 7, 16), encoder_hidden_states_mask=MASK7, timestep=SIGMAS,
        img_shapes=[[(1, 4, 4)]] * 2, **{"txt_seq_lens": [7, 7]} if diffusers.__version__.startswith("0.36") else {}),
        calls=8, fused=2),
    Model("WanTransformer3DModel", WAN, WAN_INPUTS, fused=4),
    Model("HunyuanVideoTransformer3DModel", HUNYUAN_VIDEO, HUNYUAN_INPUTS, calls=6, fused=3),
    Model("LTXVideoTransformer3DModel", of(**IN_OUT, cross_attention_dim=32, num_layers=2, caption_channels=16),
        of(hidden_states=randn(2, 2 * 4 * 4, 4), timestep=STEPS, **TEXTS, num_frames=2, height=4, width=4,
        rope_interpolation_scale=(0.32, 32.0, 32.0)), calls=4, fused=4),
    Model("ZImageTransformer2DModel", Z_IMAGE, Z_IMAGE_INPUTS, fused=4),
    Model("Flux3Transformer2DModel", FLUX2 | of(cond_in_channels=6, num_single_layers=1, timestep_channels=32),
        FLUX2_INPUTS | of(image_cond_hidden_states=randn(2, 9, 6), image_cond_ids=OTHER_IDS), calls=8,
        fp32=f"{IDS} image_cond_ids"),
    Model("LongCatImageTransformer2DModel", FLUX | of(pooled_projection_dim=32), FLUX_INPUTS, calls=6, fp32=IDS),
    Model("OvisImageTransformer2DModel", FLUX | of(out_channels=4), FLUX_INPUTS, calls=6, fp32=IDS),
    Model("BriaTransformer2DModel", FLUX, FLUX_INPUTS, calls=6, fp32=IDS),
    Model("BriaFiboTransformer2DModel", FLUX | of(text_encoder_dim=24), FLUX_INPUTS |
        of(text_encoder_layers=[*randn(3, 2, 6, 24)]), calls=6, fp32=IDS),
    Model("Krea2Transformer2DModel", of(in_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=32, timestep_embed_dim=32, text_hidden_dim=32, num_text_layers=3,
        text_num_attention_heads=2, text_num_key_value_heads=2, text_intermediate_size=32, num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1, axes_dims_rope=(4, 4, 8)), of(hidden_states=randn(2, 16, 4),
        encoder_hidden_states=randn(2, 6, 3, 32), timestep=SIGMAS, position_ids=cat([zeros(6, 3), IMAGE_IDS]),
        encoder_attention_mask=BOOL_MASK), calls=4, fp32="position_ids"),
    Model("Lumina2Transformer2DModel", of(sample_size=8, in_channels=4, hidden_size=64, num_layers=2,
        num_refiner_layers=1, num_attention_heads=4, num_kv_heads=2, multiple_of=16, axes_dim_rope=(4, 4, 8),
        axes_lens=(64, 32, 32), cap_feat_dim=16), of(hidden_states=IMAGE, timestep=SIGMAS, encoder_hidden_states=TEXT,
        encoder_attention_mask=BOOL_MASK), calls=8),
    Model("MotifVideoTransformer3DModel", of(in_channels=9, out_channels=4, **HEADS, num_layers=1, num_single_layers=2,
        num_decoder_layers=1, text_embed_dim=16, rope_axes_dim=(4, 4, 8), enable_text_cross_attention_dual=True,
        enable_text_cross_attention_single=True), of(hidden_states=randn(2, 9, 2, 8, 8), timestep=STEPS, **TEXTS),
        calls=8),
    Model("HunyuanVideo15Transformer3DModel", of(in_channels=9, out_channels=4, **HEADS, num_layers=2,
        num_refiner_layers=1, text_embed_dim=16, text_embed_2_dim=12, image_embed_dim=8, rope_axes_dim=(4, 4, 8),
        target_size=16), of(hidden_states=randn(2, 9, 2, 4, 4), timestep=FLOAT_STEPS, **TEXTS,
        encoder_hidden_states_2=randn(2, 5, 12), encoder_attention_mask_2=MASK5, image_embeds=randn(2, 3, 8)), calls=4),
    Model("HunyuanImageTransformer2DModel", of(**IN_OUT, num_layers=1, num_single_layers=2, num_refiner_layers=1,
        guidance_embeds=True, text_embed_dim=16, text_embed_2_dim=12, rope_axes_dim=(8, 8)),
        of(hidden_states=randn(2, 4, 4, 4), timestep=FLOAT_STEPS, **TEXTS, encoder_hidden_states_2=randn(2, 5, 12),
        encoder_attention_mask_2=MASK5, guidance=tensor([3584.0, 3584.0])), calls=6),
    Model("SkyReelsV2Transformer3DModel", WAN | of(inject_sample_info=True), WAN_INPUTS | of(fps=tensor([0, 1])),
        fused=4),
    Model("ChronoEditTransformer3DModel", WAN | of(rope_temporal_skip_len=8), WAN_INPUTS, fused=4),
    Model("WanVACETransformer3DModel", WAN | of(num_layers=2, vace_layers=[0, 1], vace_in_channels=6), WAN_INPUTS |
        of(control_hidden_states=randn(2, 6, 2, 8, 8)), fused=8),
    Model("HeliosTransformer3DModel", {key: value for key, value in WAN.items() if key != "rope_max_seq_len"} |
        of(rope_dim=(8, 4, 4)), WAN_INPUTS | of(indices_hidden_states=arange(20, 22).expand(2, -1),
        latents_history_short=randn(2, 4, 2, 8, 8), indices_latents_history_short=arange(18, 20).expand(2, -1),
        latents_history_mid=randn(2, 4, 2, 8, 8), indices_latents_history_mid=arange(16, 18).expand(2, -1),
        latents_history_long=randn(2, 4, 16, 8, 8), indices_latents_history_long=arange(16).expand(2, -1)), calls=4),
    Model("AnyFlowTransformer3DModel", WAN, WAN_INPUTS | of(hidden_states=randn(2, 2, 4, 8, 8),
        timestep=tensor([[700.0, 500.0], [3.0, 3.0]]), r_timestep=tensor([[600.0, 400.0], [2.0, 2.0]])), calls=4),
    Model("AnyFlowFARTransformer3DModel", WAN | of(full_chunk_limit=2, chunk_partition=(1, 1, 1)), WAN_INPUTS |
        of(hidden_states=randn(2, 3, 4, 8, 8), timestep=TIMES, r_timestep=TIMES / 2, chunk_partition=[1, 1, 1]),
        calls=4, gradients=False),
    Model("JoyImageEditTransformer3DModel", JOY, JOY_INPUTS, calls=2),
    Model("JoyImageEditTransformer3DModel-mrope", JOY | of(rope_type="mrope"), JOY_INPUTS, calls=4),
    Model("JoyImageEditPlusTransformer3DModel", JOY, of(hidden_states=randn(2, 25, 4, 1, 2, 2), timestep=FLOAT_STEPS,
        encoder_hidden_states=TEXT, encoder_hidden_states_mask=MASK,
        shape_list=[[(1, 4, 4), (1, 3, 3)], [(1, 4, 4), (1, 2, 2)]]), calls=2),
    Model("NucleusMoEImageTransformer2DModel", of(patch_size=2, in_channels=16, out_channels=4, num_layers=2,
        attention_head_dim=16, num_attention_heads=4, num_key_value_heads=2, joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4), mlp_ratio=4.0, num_experts=4, dense_moe_strategy="leave_first_block_dense",
        moe_intermediate_dim=16, capacity_factors=2.0), of(hidden_states=PATCHES, img_shapes=[(1, 4, 4)] * 2,
        encoder_hidden_states=randn(2, 7, 16), encoder_hidden_states_mask=BOOL_MASK7, timestep=SIGMAS), calls=6),
    Model("QwenImage21Transformer2DModel", of(in_channels=16, out_channels=16, num_layers=2, **HEADS, context_in_dim=16,
        axes_dims_rope=(4, 4, 8)), of(hidden_states=PATCHES, encoder_hidden_states=randn(2, 7, 16),
        timestep=tensor([0.5, 0.5]), img_shapes=[[(1, 4, 4)]] * 2, img_mask=tensor([[False] * 7 + [True] * 4] * 2),
        encoder_hidden_states_mask=MASK7), calls=4),
    Model("LTX2VideoTransformer3DModel", LTX2, LTX2_INPUTS, calls=16),
    Model("LTX2VideoTransformer3DModel-split", LTX2 | of(rope_type="split"), LTX2_INPUTS, calls=16),
    Model("LongCatAudioDiTTransformer", of(dit_dim=32, dit_depth=2, dit_heads=2, dit_text_dim=16, latent_dim=4,
        ff_mult=2.0), of(hidden_states=randn(2, 12, 4), encoder_hidden_states=TEXT, encoder_attention_mask=BOOL_MASK,
        timestep=SIGMAS, attention_mask=ones(2, 12, dtype=torch.bool), latent_cond=randn(2, 12, 4)), calls=8),
    Model("GlmImageTransformer2DModel", of(patch_size=2, num_layers=2, **IN_OUT, text_embed_dim=16, time_embed_dim=32,
        condition_dim=16, prior_vq_quantizer_codebook_size=32), of(hidden_states=IMAGE, encoder_hidden_states=TEXT,
        prior_token_id=randint(32, (2, 16)), prior_token_drop=zeros(2, 16, dtype=torch.bool), timestep=STEPS,
        target_size=tensor([[64.0, 64.0]] * 2), crop_coords=zeros(2, 2)), calls=4),
    Model("AceStepTransformer1DModel", of(hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, in_channels=12, audio_acoustic_hidden_dim=4,
        patch_size=2, sliding_window=4, encoder_hidden_size=16), of(hidden_states=randn(2, 16, 4), timestep=SIGMAS,
        timestep_r=SIGMAS, encoder_hidden_states=TEXT, context_latents=randn(2, 16, 8)), calls=4),
    Model("CogVideoXTransformer3DModel", COGVIDEOX, COGVIDEOX_INPUTS, calls=4, fp32="image_rotary_emb"),
    Model("HunyuanDiT2DModel", of(**HEADS, in_channels=4, patch_size=2, sample_size=8, hidden_size=32, num_layers=4,
        mlp_ratio=2.0, cross_attention_dim=16, cross_attention_dim_t5=16, pooled_projection_dim=8, text_len=5,
        text_len_t5=6), of(hidden_states=IMAGE, timestep=FLOAT_STEPS, encoder_hidden_states=randn(2, 5, 16),
        text_embedding_mask=MASK5, encoder_hidden_states_t5=TEXT, text_embedding_mask_t5=MASK,
        image_meta_size=tensor([[64.0, 64.0, 64.0, 64.0, 0.0, 0.0]] * 2), style=zeros(2, dtype=torch.long),
        image_rotary_emb=rotary_tables(SQUARE, (8, 8))), calls=12, fp32="image_rotary_emb"),
    Model("StableAudioDiTModel", of(sample_size=12, in_channels=4, num_layers=2, attention_head_dim=16,
        num_attention_heads=4, num_key_value_attention_heads=2, out_channels=4, cross_attention_dim=32,
        time_proj_dim=32, global_states_input_dim=24, cross_attention_input_dim=16), of(hidden_states=randn(2, 4, 12),
        timestep=SIGMAS, encoder_hidden_states=TEXT, global_hidden_states=randn(2, 1, 24),
        rotary_embedding=rotary_tables(arange(13.0)[:, None], (8,), halves=True)), calls=4, fp32="rotary_embedding"),
    Model("LuminaNextDiT2DModel", of(sample_size=8, patch_size=2, in_channels=4, hidden_size=64, num_layers=2,
        num_attention_heads=4, num_kv_heads=2, multiple_of=16, cross_attention_dim=16), of(hidden_states=IMAGE,
        timestep=SIGMAS, encoder_hidden_states=TEXT, encoder_mask=MASK,
        image_rotary_emb=torch.complex(*rotary_tables(SQUARE, (8, 8)))[:, ::2].reshape(4, 4, 8).contiguous(),
        cross_attention_kwargs={}), calls=6),
    Model("SanaWMLTX2RefinerTransformer3DModel", LTX2, of(hidden_states=randn(2, 2 * 4 * 4, 4),
        encoder_hidden_states=TEXT, timestep=STEPS,
        video_rotary_emb=tuple([x.expand(2, -1, -1) for x in rotary_tables(CUBE, (20, 22, 22))]),
        encoder_attention_mask=MASK), calls=4, fp32="video_rotary_emb"),
    Model("EasyAnimateTransformer3DModel", of(num_attention_heads=2, attention_head_dim=32, in_channels=4,
        out_channels=4, patch_size=2, sample_width=8, sample_height=8, num_layers=2, mmdit_layers=1, time_embed_dim=32,
        text_embed_dim=16, text_embed_dim_t5=12), of(hidden_states=randn(2, 4, 2, 8, 8), timestep=FLOAT_STEPS,
        encoder_hidden_states=TEXT, encoder_hidden_states_t5=randn(2, 5, 12)), calls=4),
    Model("CogView4Transformer2DModel", of(patch_size=2, num_layers=2, **IN_OUT, text_embed_dim=16, time_embed_dim=32,
        condition_dim=16, pos_embed_max_size=8, sample_size=8), of(hidden_states=IMAGE, encoder_hidden_states=TEXT,
        timestep=STEPS, original_size=SIZES, target_size=SIZES, crop_coords=zeros(2, 2)), calls=4),
    Model("CosmosTransformer3DModel", of(**IN_OUT, num_layers=2, mlp_ratio=2.0, text_embed_dim=16, adaln_lora_dim=8,
        max_size=(4, 16, 16), rope_scale=(2.0, 1.0, 1.0), concat_padding_mask=False),
        of(hidden_states=randn(2, 4, 2, 8, 8), timestep=SIGMAS, encoder_hidden_states=TEXT, fps=16), calls=4),
    Model("OmniGenTransformer2DModel", of(in_channels=4, patch_size=2, hidden_size=64, num_attention_heads=4,
        num_key_value_heads=4, intermediate_size=32, num_layers=2, pad_token_id=0, vocab_size=32,
        max_position_embeddings=256, original_max_position_embeddings=128,
        rope_scaling=of(short_factor=[1.0] * 8, long_factor=[2.0] * 8), pos_embed_max_size=8, time_step_dim=32),
        of(hidden_states=IMAGE, timestep=SIGMAS, input_ids=randint(1, 32, (2, 20)),
        input_img_latents=[randn(1, 4, 8, 8) for _ in range(2)], input_image_sizes={0: [[2, 18]], 1: [[2, 18]]},
        attention_mask=ones(2, 37, 37, dtype=torch.long), position_ids=arange(37).expand(2, -1)), calls=4),
    Model("SanaWMTransformer3DModel", SANA_WM, SANA_WM_INPUTS, calls=4),
]
# fmt: on

MODELS = {row.name: row for row in ROWS if hasattr(diffusers, row.name.partition("-")[0])}
