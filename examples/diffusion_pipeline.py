"""A diffusion pipeline from a prompt to a picture, with and without jitrope: the same bits, the times, a profile.

    python examples/diffusion_pipeline.py --model flux          # or qwen, wan
    python examples/diffusion_pipeline.py --out pictures        # default: jitrope-example in the temporary folder

Nothing is downloaded. Every weight is random, so the picture is a texture and the prompt does not matter; what is
computed, and how long it takes, is what real weights would give. On a CPU the transformer is tiny; on a GPU it has
the real model's widths, in bf16, with a few of its blocks (--blocks), at the real model's size of picture.
With a real checkpoint all that is left of this file is:

    pipeline = diffusers.FluxPipeline.from_pretrained("black-forest-labs/FLUX.1-dev", torch_dtype=torch.bfloat16)
    report = jitrope_diffusers.enable(pipeline.to("cuda"))
    pipeline("a lighthouse").images[0].save("lighthouse.png")
    print(report)                                 # how many calls jitrope took, and why the host had the others
"""

from __future__ import annotations

import argparse
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
    transformer = diffusers.FluxTransformer2DModel(
        num_layers=blocks, num_single_layers=2 * blocks, **(TINY if tiny else {})
    )
    pixels, text = (256, 64) if tiny else (1024, 512)
    clip = transformers.CLIPTextConfig(
        hidden_size=768, intermediate_size=64, num_hidden_layers=1, vocab_size=128, bos_token_id=3, eos_token_id=1
    )
    pipeline = diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=diffusers.AutoencoderKL(
            latent_channels=16,
            block_out_channels=(16, 16, 32, 32),
            norm_num_groups=8,
            layers_per_block=1,
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            shift_factor=0.1159,
            scaling_factor=0.3611,
        ),
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
    text = {
        "hidden_size": width,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "bos_token_id": 3,
        "eos_token_id": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [width // 4, 0, 0]},
    }
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
    pixels = 256 if tiny else 1024
    return pipeline, {"height": pixels, "width": pixels}


def wan(tiny: bool, blocks: int):
    transformer = diffusers.WanTransformer3DModel(num_layers=blocks, **(TINY_WAN if tiny else {}))
    pipeline = diffusers.WanPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=diffusers.AutoencoderKLWan(base_dim=8, num_res_blocks=1),
        text_encoder=t5(transformers.UMT5EncoderModel, transformer.config.text_dim),
        tokenizer=tokenizer(PROMPT, 512),
        transformer=transformer,
    )
    height, columns, frames, text = (128, 224, 9, 64) if tiny else (480, 832, 81, 512)
    return pipeline, {
        "height": height,
        "width": columns,
        "num_frames": frames,
        "max_sequence_length": text,
        "guidance_scale": 1.0,
    }


MODELS = {"flux": flux, "qwen": qwen, "wan": wan}


# ---- 2. a run of the pipeline: text to latents to pixels -----------------------------------------------


def build(model: str, blocks: int, device: str):
    """The pipeline, and a function that runs it for a number of steps: (latents, pixels)."""
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


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def milliseconds(step, count: int = 10) -> float:
    """Of one step, the first not counted."""
    step()
    wait()
    start = time.perf_counter()
    for _ in range(count):
        step()
    wait()
    return 1e3 * (time.perf_counter() - start) / count


# ---- 3. where a step's time goes -----------------------------------------------------------------------
# Stock, rope is a handful of elementwise ops on q and k, and so is the RMSNorm of some models; what jitrope does
# instead is one kernel, which is named after it.

REST = "rope, elementwise"
GROUPS = {  # the first that has a part of the kernel's name, or of the op's on a CPU
    "jitrope": ("jitrope",),
    "attention": ("flash", "fmha", "attention", "sdpa"),
    "matmul": ("gemm", "nvjet", "cublas", "cutlass", "xmma", "addmm", "::mm", "::bmm", "conv"),
    "norm": ("norm",),
}


def profile(step, device: str) -> tuple[dict[str, float], list[str]]:
    """(milliseconds of each group, a line for each of the ops or kernels that take the longest)."""
    with torch.profiler.profile() as profiler:
        step()
        wait()
    groups, lines = dict.fromkeys([*GROUPS, REST], 0.0), []
    for event in profiler.key_averages():
        if event.device_type.name.lower() == device:
            ms = (event.self_device_time_total if device == "cuda" else event.self_cpu_time_total) / 1e3
            group = next((g for g, parts in GROUPS.items() if any(p in event.key.lower() for p in parts)), REST)
            groups[group] += ms
            lines.append((ms, f"  {ms:9.3f} ms {event.count:5} x  {group:18} {event.key[:70]}"))
    return groups, [line for _, line in sorted(lines, reverse=True)[:10]]


# ---- 4. the two pictures and their difference ----------------------------------------------------------


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
    parser.add_argument("--steps", type=int, default=4, help="denoising steps")
    parser.add_argument("--blocks", type=int, default=4, help="double blocks of FLUX (and 2 x single), else blocks")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "jitrope-example", metavar="FOLDER")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pipeline, run = build(arguments.model, arguments.blocks, device)
    step = one_step(pipeline, run)

    latents, pixels = run(arguments.steps)
    stock_ms, (stock_groups, stock_lines) = milliseconds(step), profile(step, device)

    # Until the block ends. Without one: report = enable(pipeline), and disable(pipeline) if ever.
    with jitrope_diffusers.enable(pipeline) as report:
        our_latents, our_pixels = run(arguments.steps)
        ours_ms, (groups, lines) = milliseconds(step), profile(step, device)
        print(report)

    same = torch.equal(latents, our_latents) and torch.equal(pixels, our_pixels)
    print(f"latents {tuple(latents.shape)}, pixels {tuple(pixels.shape)}: {'the same bits' if same else 'DIFFERENT'}")
    print(f"one step: {stock_ms:.2f} ms, with jitrope {ours_ms:.2f} ms: {stock_ms / ours_ms:.2f} x")
    print("a step's longest, stock:", *stock_lines, "with jitrope:", *lines, sep="\n")
    print(f"{device.upper()} time of a step:    stock  with jitrope")
    for group, ms in stock_groups.items():
        print(f"  {group:18} {ms:8.3f} ms {groups[group]:8.3f} ms")
    if device == "cpu":
        print("no GPU here: jitrope too is plain torch, and the times say nothing")

    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"{arguments.model}.png"
    picture(pixels, our_pixels, f"{arguments.model}, {arguments.steps} steps, random weights", path)
    print(f"wrote {path}")
    assert same
    assert pixels.isfinite().all()
    assert report.calls["host"] == 0
    assert sum(report.calls.values()) > 0


if __name__ == "__main__":
    main()
