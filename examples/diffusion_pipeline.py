"""A diffusion pipeline's denoising steps, with and without jitrope: the same bits, and the times.

    python examples/diffusion_pipeline.py --model flux      # or qwen, wan

Weights are random. On a CPU the transformer is tiny; on a GPU it has the real model's widths, in bf16,
with a few of its blocks (--blocks), at the real model's size of picture.
"""

from __future__ import annotations

import argparse
import time

import diffusers
import torch

from jitrope.integrations import diffusers as jitrope_diffusers

SEED = 0


def flux(tiny: bool, blocks: int, device: str):
    width = {"attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 32, "axes_dims_rope": [4, 4, 8]}
    if not tiny:
        width = {}  # the configuration's defaults are FLUX.1's
    transformer = diffusers.FluxTransformer2DModel(
        num_layers=blocks, num_single_layers=2 * blocks, pooled_projection_dim=768, in_channels=64, **width
    )
    pixels, text = (64, 16) if tiny else (1024, 512)
    call = {
        "prompt_embeds": (1, text, transformer.config.joint_attention_dim),
        "pooled_prompt_embeds": (1, 768),
        "height": pixels,
        "width": pixels,
    }
    parts = ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    return diffusers.FluxPipeline, transformer, parts, call


def qwen(tiny: bool, blocks: int, device: str):
    width = {"attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 32, "axes_dims_rope": (4, 4, 8)}
    if not tiny:
        width = {}
    transformer = diffusers.QwenImageTransformer2DModel(num_layers=blocks, **width)
    pixels, text = (64, 16) if tiny else (1024, 256)
    call = {
        "prompt_embeds": (1, text, transformer.config.joint_attention_dim),
        "prompt_embeds_mask": torch.ones(1, text, dtype=torch.long, device=device),
        "height": pixels,
        "width": pixels,
    }
    return diffusers.QwenImagePipeline, transformer, ("vae", "text_encoder", "tokenizer"), call


def wan(tiny: bool, blocks: int, device: str):
    width = {"num_attention_heads": 2, "attention_head_dim": 24, "ffn_dim": 64, "text_dim": 32}
    if not tiny:
        width = {"num_attention_heads": 40, "attention_head_dim": 128, "ffn_dim": 13824, "text_dim": 4096}
    transformer = diffusers.WanTransformer3DModel(num_layers=blocks, **width)
    height, columns, frames, text = (64, 64, 5, 16) if tiny else (480, 832, 81, 512)
    embeddings = (1, text, transformer.config.text_dim)
    call = {
        "prompt_embeds": embeddings,
        "negative_prompt_embeds": embeddings,
        "guidance_scale": 1.0,
        "height": height,
        "width": columns,
        "num_frames": frames,
    }
    return diffusers.WanPipeline, transformer, ("vae", "text_encoder", "tokenizer"), call


MODELS = {"flux": flux, "qwen": qwen, "wan": wan}


def build(model: str, blocks: int, device: str):
    """A pipeline without encoders and decoder, and a function that runs its denoising steps."""
    tiny = device == "cpu"
    torch.manual_seed(SEED)
    with torch.device(device):
        if not tiny:
            torch.set_default_dtype(torch.bfloat16)
        pipeline_class, transformer, missing, call = MODELS[model](tiny, blocks, device)
        torch.set_default_dtype(torch.float32)
    dtype = torch.float32 if tiny else torch.bfloat16
    transformer = transformer.eval()
    if model == "wan":  # its tables are buffers, which from_pretrained keeps in fp32
        transformer.rope = type(transformer.rope)(
            transformer.config.attention_head_dim, transformer.config.patch_size, transformer.config.rope_max_seq_len
        ).to(device)
    pipeline = pipeline_class(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), transformer=transformer, **dict.fromkeys(missing)
    )
    pipeline.set_progress_bar_config(disable=True)
    arguments = {
        name: torch.randn(value, device=device, dtype=dtype) if isinstance(value, tuple) else value
        for name, value in call.items()
    }

    def steps(count: int) -> torch.Tensor:
        generator = torch.Generator(device).manual_seed(SEED)
        output = pipeline(**arguments, num_inference_steps=count, generator=generator, output_type="latent")
        return output.frames if model == "wan" else output.images

    return pipeline, steps


def timed(steps, count: int, device: str) -> tuple[torch.Tensor, float]:
    """(latents, milliseconds a step), the first run not counted."""
    steps(1)
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    latents = steps(count)
    if device == "cuda":
        torch.cuda.synchronize()
    return latents, 1e3 * (time.perf_counter() - start) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="flux")
    parser.add_argument("--steps", type=int, default=4, help="denoising steps")
    parser.add_argument(
        "--blocks", type=int, default=4, help="double blocks of FLUX (twice as many single), else blocks"
    )
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pipeline, steps = build(arguments.model, arguments.blocks, device)

    stock, stock_ms = timed(steps, arguments.steps, device)
    with jitrope_diffusers.enable(pipeline) as report:
        ours, ours_ms = timed(steps, arguments.steps, device)
        print(report)

    same = torch.equal(stock, ours)
    print(f"latents {tuple(stock.shape)}: {'the same bits' if same else 'DIFFERENT'}")
    print(f"one step: {stock_ms:.2f} ms, with jitrope {ours_ms:.2f} ms: {stock_ms / ours_ms:.2f} x")
    if device == "cpu":
        print("no GPU here: both ways are plain torch, and the times say nothing")
    assert same
    assert torch.isfinite(stock).all()
    assert report.calls["jitrope"] > 0
    assert report.calls["host"] == 0


if __name__ == "__main__":
    main()
