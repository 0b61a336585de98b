"""A diffusers pipeline from a prompt to a picture, run twice: stock and with jitrope. Both have the same bits.

    python examples/diffusion_pipeline.py --model flux          # or qwen, wan
    python examples/diffusion_pipeline.py --out pictures        # default: jitrope-example in the temporary folder

Nothing is downloaded. All weights are random, so the picture is a texture and the prompt does not matter. On a CPU
transformer and picture are tiny. On a GPU they have the real model's widths and size, in bf16, with a few of its blocks
(--blocks), and the time of a step is printed; a CPU runs jitrope in plain torch, where times mean nothing.
`jitrope bench diffusion` measures this with care. With a real checkpoint the program is four lines:

    pipeline = diffusers.FluxPipeline.from_pretrained("black-forest-labs/FLUX.1-dev", torch_dtype=torch.bfloat16)
    report = jitrope_diffusers.enable(pipeline.to("cuda"))
    pipeline("a lighthouse").images[0].save("lighthouse.png")
    print(report)                                 # how many calls jitrope took, and why the host had the others
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import diffusers
import torch
import transformers
from PIL import Image, ImageDraw, ImageFont
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from jitrope.integrations import diffusers as jitrope_diffusers

SEED = 0
PROMPT = "A lighthouse above a stormy sea at dusk, its beam through the rain, gulls, wet rocks, oil on canvas"

# ---- 1. the parts of a pipeline ------------------------------------------------------------------------
# Text encoders have one layer, but the output width of the real ones. VAEs have few channels, but the real ones'
# strides, so the latents have the real shapes.


def tokenizer(text: str, longest: int) -> transformers.PreTrainedTokenizerFast:
    """Word by word, trained here on the only text that it will see."""
    special = ["<pad>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"]
    words = Tokenizer(models.WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.train_from_iterator([text], trainers.WordLevelTrainer(special_tokens=special))
    names = dict(zip(("pad_token", "eos_token", "unk_token"), special))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=longest, **names)


def t5(cls: type, width: int) -> transformers.PreTrainedModel:
    small = {"d_kv": 16, "d_ff": 64, "num_heads": 2, "num_layers": 1, "vocab_size": 128}
    return cls(cls.config_class(d_model=width, **small))


# A transformer's configuration has the real model's widths as its defaults.
TINY = {"attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 32, "axes_dims_rope": (4, 4, 8)}
TINY_WAN = {"attention_head_dim": 24, "num_attention_heads": 2, "ffn_dim": 64, "text_dim": 32}


def flux(tiny: bool, blocks: int):
    layers = {"num_layers": blocks, "num_single_layers": 2 * blocks}
    transformer = diffusers.FluxTransformer2DModel(**layers, **(TINY if tiny else {}))
    pixels, text = (128, 64) if tiny else (1024, 512)
    clip = transformers.CLIPTextConfig(
        hidden_size=768, intermediate_size=64, num_hidden_layers=1, vocab_size=128, bos_token_id=3, eos_token_id=1
    )
    vae = {"latent_channels": 16, "block_out_channels": (16, 16, 32, 32), "norm_num_groups": 8, "layers_per_block": 1}
    vae |= {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    pipeline = diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=diffusers.AutoencoderKL(**vae, shift_factor=0.1159, scaling_factor=0.3611),
        text_encoder=transformers.CLIPTextModel(clip),
        tokenizer=tokenizer(PROMPT, 77),
        text_encoder_2=t5(transformers.T5EncoderModel, transformer.config.joint_attention_dim),
        tokenizer_2=tokenizer(PROMPT, text),
        transformer=transformer,
    )
    return pipeline, {"height": pixels, "width": pixels, "max_sequence_length": text}


def qwen(tiny: bool, blocks: int):
    transformer = diffusers.QwenImageTransformer2DModel(num_layers=blocks, **(TINY if tiny else {}))
    width = transformer.config.joint_attention_dim
    text = {"hidden_size": width, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    text |= {"num_key_value_heads": 2, "vocab_size": 128, "bos_token_id": 3, "eos_token_id": 1}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [width // 4, 0, 0]}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": width}
    pipeline = diffusers.QwenImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=diffusers.AutoencoderKLQwenImage(base_dim=16, num_res_blocks=1),
        text_encoder=transformers.Qwen2_5_VLForConditionalGeneration(
            transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
        ),
        tokenizer=None,
        transformer=transformer,
    )
    before, after = pipeline.prompt_template_encode.split("{}")
    pipeline.tokenizer = tokenizer(before + PROMPT + after, 1024)
    # The pipeline leaves out the tokens of its own instruction, which are 34 with Qwen's tokenizer.
    pipeline.prompt_template_encode_start_idx = len(pipeline.tokenizer(before).input_ids)
    pixels = 128 if tiny else 1024
    return pipeline, {"height": pixels, "width": pixels, "true_cfg_scale": 1.0}


def wan(tiny: bool, blocks: int):
    transformer = diffusers.WanTransformer3DModel(num_layers=blocks, **(TINY_WAN if tiny else {}))
    pipeline = diffusers.WanPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=diffusers.AutoencoderKLWan(base_dim=8, num_res_blocks=1),
        text_encoder=t5(transformers.UMT5EncoderModel, transformer.config.text_dim),
        tokenizer=tokenizer(PROMPT, 512),
        transformer=transformer,
    )
    height, columns, frames, text = (64, 96, 5, 64) if tiny else (480, 832, 81, 512)
    call = {"height": height, "width": columns, "num_frames": frames}
    return pipeline, call | {"max_sequence_length": text, "guidance_scale": 1.0}


MODELS = {"flux": flux, "qwen": qwen, "wan": wan}


# ---- 2. a run of the pipeline: text to latents to pixels -----------------------------------------------


def build(model: str, blocks: int, device: str):
    """The pipeline, and a function that runs it for a number of steps: (latents, pixels)."""
    transformers.logging.set_verbosity_error()  # warnings of parts that are not used here
    torch.manual_seed(SEED)
    if device == "cuda":
        torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        pipeline, call = MODELS[model](device == "cpu", blocks)
    torch.set_default_dtype(torch.float32)
    pipeline.to(device).set_progress_bar_config(disable=True)
    for part in (p for p in pipeline.components.values() if isinstance(p, torch.nn.Module)):
        part.eval()
    assert all(table.dtype == torch.float32 for table in pipeline.transformer.buffers())  # rope's: as from_pretrained

    def run(steps: int) -> tuple[torch.Tensor, torch.Tensor]:
        latents = {}
        output = pipeline(
            prompt=PROMPT,
            num_inference_steps=steps,
            output_type="pt",
            generator=torch.Generator(device).manual_seed(SEED),
            callback_on_step_end=lambda _, step, time, now: latents.update(now) or {},
            **call,
        )
        return latents["latents"], output.frames[0] if model == "wan" else output.images

    return pipeline, run


def one_step(pipeline, run):
    """A function that does one denoising step: the transformer's forward, with what the pipeline gave it."""
    seen = []
    hook = pipeline.transformer.register_forward_pre_hook(lambda _, *given: seen.append(given), with_kwargs=True)
    run(1)
    hook.remove()
    args, words = seen[0]
    return torch.no_grad()(lambda: pipeline.transformer(*args, **words))


def milliseconds(step, count: int = 10) -> float:
    """The time of one step; the first is not counted."""
    step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start) / count


# ---- 3. the two pictures and their difference ----------------------------------------------------------


def picture(stock: torch.Tensor, ours: torch.Tensor, title: str, path: Path) -> None:
    """stock | jitrope | difference x 1000, of pixels (N, 3, H, W) between 0 and 1; of a video the middle frame."""
    stock, ours = (x[len(x) // 2].float().cpu() for x in (stock, ours))
    low, high = stock.quantile(0.01), stock.quantile(0.99)  # random weights give little contrast
    panels = {
        "stock": (stock - low) / (high - low),
        "jitrope": (ours - low) / (high - low),
        f"difference x 1000 (largest: {(ours - stock).abs().max():g})": (ours - stock).abs() * 1000,
    }
    width, gap, head = 360, 12, 76
    height = round(width * stock.shape[1] / stock.shape[2])
    sheet = Image.new("RGB", (3 * width + 4 * gap, head + height + gap), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(18)
    draw.text((gap, gap), title, "black", font)
    for i, (name, pixels) in enumerate(panels.items()):
        left = gap + i * (width + gap)
        array = (pixels.clamp(0, 1) * 255).byte().permute(1, 2, 0).numpy()
        sheet.paste(Image.fromarray(array).resize((width, height)), (left, head))
        draw.text((left, head - 3 * gap), name, "black", font)
    sheet.save(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="flux")
    gpu = torch.cuda.is_available()
    parser.add_argument("--steps", type=int, default=4 if gpu else 2, help="denoising steps")
    parser.add_argument("--blocks", type=int, default=4 if gpu else 1, help="of FLUX double (and 2 x single), else all")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "jitrope-example", metavar="FOLDER")
    arguments = parser.parse_args()
    pipeline, run = build(arguments.model, arguments.blocks, "cuda" if gpu else "cpu")
    step = one_step(pipeline, run) if gpu else None

    latents, pixels = run(arguments.steps)
    stock_ms = milliseconds(step) if gpu else 0.0
    # Until the block ends. Without one: report = enable(pipeline), and disable() if ever.
    with jitrope_diffusers.enable(pipeline) as report:
        our_latents, our_pixels = run(arguments.steps)
        print(report)
        ours_ms = milliseconds(step) if gpu else 0.0
    if gpu:
        print(f"one step: {stock_ms:.2f} ms, with jitrope {ours_ms:.2f} ms: {stock_ms / ours_ms:.2f} x")

    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"{arguments.model}.png"
    picture(pixels, our_pixels, f"{arguments.model}, {arguments.steps} steps, random weights", path)
    print(f"wrote {path}: stock, jitrope and their difference")
    checks = {
        f"latents {tuple(latents.shape)} of the same bits": torch.equal(latents, our_latents),
        f"pixels {tuple(pixels.shape)} of the same bits": torch.equal(pixels, our_pixels),
        "all pixels are finite": bool(pixels.isfinite().all()),
        "jitrope rotated in each call": sum(report.calls.values()) > report.calls["host"] == 0,
    }
    for what, right in checks.items():
        print(f"{what}: {'yes' if right else 'NO'}")
    sys.exit(not all(checks.values()))


if __name__ == "__main__":
    main()
