"""`bench diffusion`: denoising steps of diffusers' transformers, stock and with jitrope.

Real widths, random bf16 weights, a few of the blocks. The variants of a model are copies of it that share its weights.
jitrope's functions are in diffusers only while one of ours runs (`Turns`).
"""

from __future__ import annotations

import copy
import gc
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import prod
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor, nn

from jitrope.base.errors import JitropeError

from .harness import DEVICE, turn_by_turn
from .plots import Plot
from .report import AS_JSON, ONLY, SMOKE, Rows, app, chosen, show
from .sections import Row, Section, Table, grouped, of, span
from .turns import Turns

Step = Callable[[], Tensor]
"""One forward of a transformer."""
Size = tuple[int, int, int, int]

LAYERS = ("num_layers", "num_single_layers")
ROPE_WORDS = ("image_rotary_emb", "rotary_emb")
QK_NORMS = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")


class Model(NamedTuple):
    """A transformer of diffusers, by the parts of its configuration that are not defaults.

    depth: its blocks, double and single ones where it has both; blocks: how many of them are built.
    size: frames, rows and columns of the latent that it is given (of tokens where it takes tokens), and text tokens.
    tiny: the configuration of a smoke run. latent: it takes a latent, which it cuts into patches of 2 x 2.
    joint: text and picture attend to each other.
    """

    name: str
    depth: tuple[int, ...]
    blocks: tuple[int, ...]
    size: Size
    tiny: dict[str, Any]
    config: Mapping[str, Any] = MappingProxyType({})
    latent: bool = False
    joint: bool = True


_WIDTHS = {"joint_attention_dim": 32, "text_dim": 32, "text_embed_dim": 32, "caption_channels": 32}
MODELS = {
    "flux": Model(
        "FluxTransformer2DModel",
        (19, 38),
        (4, 8),
        (1, 64, 64, 512),
        {"in_channels": 8, "axes_dims_rope": (4, 4, 8)},
        {"guidance_embeds": True},
    ),
    "flux2": Model(
        "Flux2Transformer2DModel", (8, 48), (2, 6), (1, 64, 64, 512), {"in_channels": 8, "axes_dims_rope": (4,) * 4}
    ),
    "qwen": Model(
        "QwenImageTransformer2DModel", (60,), (10,), (1, 64, 64, 256), {"in_channels": 8, "axes_dims_rope": (4, 4, 8)}
    ),
    "wan": Model(  # 480p, 81 frames
        "WanTransformer3DModel",
        (40,),
        (4,),
        (21, 60, 104, 512),
        {"ffn_dim": 64, "freq_dim": 32},
        latent=True,
        joint=False,
    ),
    "hunyuan": Model(  # 720p, 29 frames
        "HunyuanVideoTransformer3DModel",
        (20, 40),
        (4, 8),
        (8, 90, 160, 256),
        {"in_channels": 4, "num_refiner_layers": 1, "rope_axes_dim": (4, 4, 8)},
        latent=True,
    ),
    "ltx": Model(  # 480 x 704, 121 frames
        "LTXVideoTransformer3DModel",
        (28,),
        (8,),
        (16, 15, 22, 128),
        {"in_channels": 8, "cross_attention_dim": 32},
        joint=False,
    ),
}
_TINY = {"num_attention_heads": 2, "attention_head_dim": 16, "pooled_projection_dim": 16, **_WIDTHS}


def arguments(transformer: nn.Module, model: Model, size: Size) -> dict[str, Any]:
    """All that a step's forward asks for, in bf16."""
    config: Any = transformer.config
    (*grid, text), randn = size, partial(torch.randn, dtype=torch.bfloat16)
    width = next(config[name] for name in _WIDTHS if name in config)
    axes = len(config.get("axes_dims_rope", ()))
    txt_ids = torch.zeros(text, axes)
    if axes == 4:
        txt_ids[:, 3] = torch.arange(text)
    known = {
        "hidden_states": randn(1, config.in_channels, *grid)
        if model.latent
        else randn(1, prod(grid), config.in_channels),
        "encoder_hidden_states": randn(1, text, width),
        "encoder_attention_mask": torch.ones(1, text, dtype=torch.long),
        "pooled_projections": randn(1, config.get("pooled_projection_dim", 1)),
        "timestep": torch.tensor([500]) if model.latent else torch.tensor([0.5]),
        "guidance": torch.tensor([4.0]) if config.get("guidance_embeds", True) else None,
        "img_ids": torch.cartesian_prod(*(torch.arange(n) for n in (*grid, 1)[:axes])).float() if axes else None,
        "txt_ids": txt_ids,
        "img_shapes": [[tuple(grid)]],
        **dict(zip(("num_frames", "height", "width"), grid)),
        "rope_interpolation_scale": (8 / 25, 32, 32),  # LTX's VAE: 8 of 25 frames a second, 32 x 32 pixels
    }
    return {name: known[name] for name in inspect.signature(transformer.forward).parameters if name in known}


# ---- one model -----------------------------------------------------------------------------------------


def build(model: Model, blocks: tuple[int, ...], tiny: bool, device: str = DEVICE) -> tuple[Any, dict[str, Any], int]:
    """(transformer, the arguments of a step, tokens that self-attention sees), in bf16, of random weights."""
    import diffusers

    size = (min(2, model.size[0]), 4, 6, 8) if tiny else model.size
    kind = getattr(diffusers, model.name)
    config = {**_TINY, **model.tiny, **model.config} if tiny else model.config
    config = {name: value for name, value in config.items() if name in inspect.signature(kind.__init__).parameters}
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    with torch.device(device), torch.no_grad():
        torch.set_default_dtype(torch.bfloat16)
        try:
            transformer = kind(**dict(zip(LAYERS, blocks)), **config)
        finally:
            torch.set_default_dtype(before)
        transformer.eval().requires_grad_(False)
        # Wan's tables are buffers, in fp32 as from_pretrained has them.
        assert all(table.dtype == torch.float32 for table in transformer.buffers())
        for module, name in qk_norms(transformer):
            if isinstance(weight := getattr(getattr(module, name), "weight", None), Tensor):
                weight.copy_(1 + 0.1 * torch.randn_like(weight))  # a trained weight is not all ones
        words = arguments(transformer, model, size)
    return transformer, words, prod(size[:3]) // (4 if model.latent else 1) + model.joint * size[3]


def sharing(model: nn.Module) -> Any:
    """A copy whose parameters and buffers are the model's own."""
    return copy.deepcopy(model, {id(x): x for x in (*model.parameters(), *model.buffers())})


def without_rope(model: nn.Module) -> Any:
    """A copy whose attention gets no tables, and so does not rotate. The tables are built all the same."""

    def drop(names: list[str], _: nn.Module, args: tuple[Any, ...], words: dict[str, Any]) -> Any:
        args = tuple(None if name in ROPE_WORDS else value for name, value in zip(names, args))
        return args, {name: None if name in ROPE_WORDS else value for name, value in words.items()}

    result = sharing(model)
    for module in result.modules():
        if hasattr(module, "processor"):
            names = list(inspect.signature(module.forward).parameters)
            module.register_forward_pre_hook(partial(drop, names), with_kwargs=True)
    return result


def without_norms(model: nn.Module) -> Any:
    """A copy whose attention normalizes neither q nor k, cross-attention's included."""
    result = sharing(model)
    for module, name in [*qk_norms(result)]:
        setattr(module, name, nn.Identity())
    return result


def qk_norms(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """(module, name) of every norm of q and k."""
    for module in model.modules():
        yield from ((module, name) for name in QK_NORMS if isinstance(getattr(module, name, None), nn.Module))


# ---- the measurement -----------------------------------------------------------------------------------


def _jitrope(model: nn.Module, fuse_norm: bool) -> Any:
    from jitrope.integrations import diffusers as ours

    return ours.enable(model, fuse_norm=fuse_norm)


# by: a copy of the model, jitrope's part in it, whether it is timed compiled too
VARIANTS: dict[str, tuple[Callable[[nn.Module], nn.Module], Callable[[nn.Module], Any] | None, bool]] = {
    "stock": (sharing, None, True),
    "jitrope": (sharing, partial(_jitrope, fuse_norm=True), True),
    "jitrope, rope only": (sharing, partial(_jitrope, fuse_norm=False), False),
    "no rope": (without_rope, None, False),
    "no rope, no qk-norm": (lambda model: without_norms(without_rope(model)), None, False),
}


@torch.no_grad()
def rows(name: str, mode: str, blocks: int, tiny: bool = False) -> Rows:
    """A row for each variant, in mode "eager" or with its repeated blocks "compiled".

    blocks: of the first kind, and of the second in proportion; 0: the model's own.
    """
    model = MODELS[name]
    built = tuple(blocks * n // model.blocks[0] for n in model.blocks) if blocks else model.blocks
    torch._dynamo.reset()
    transformer, words, tokens = build(model, built, tiny)
    want = transformer(**words, return_dict=False)[0]
    found: dict[str, dict[str, Any]] = {}
    steps: dict[str, Step] = {}
    with Turns() as turns:
        for by, (make, enable, also_compiled) in VARIANTS.items():
            if mode == "compiled" and not also_compiled:
                continue
            made: Any = make(transformer)
            try:
                report = turns.take(made, enable and partial(enable, made))
            except JitropeError:  # its rope is not a function
                continue
            if mode == "compiled":
                made.compile_repeated_blocks(fullgraph=True, backend="eager" if tiny else "inductor")
            steps[by] = partial(_step, made, words)
            found[by] = _observe(steps[by], report, None if "no rope" in by else want, mode)
        us = turn_by_turn(steps, 9)
    kind = f"{'+'.join(map(str, built))} of {'+'.join(map(str, model.depth))}"
    head = {"model": name, "blocks": kind, "tokens": tokens, "mode": mode}
    del transformer, words, steps
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
    return [{**head, "by": by, "ms": us[by] / 1e3, "x stock": us["stock"] / us[by], **found[by]} for by in found]


def _step(model: Any, words: dict[str, Any]) -> Tensor:
    result: Tensor = model(**words, return_dict=False)[0]
    return result


def _observe(step: Step, report: Any, want: Tensor | None, mode: str) -> dict[str, Any]:
    """Of a variant's first steps: memory, is its result the stock one's, who rotated, graph breaks."""
    seen = dict.fromkeys(
        ("peak MiB", "against eager stock", "jitrope calls", "fused calls", "host calls", "graph breaks")
    )
    counters: Any = torch._dynamo.utils.counters
    counters.clear()
    before = Counter(report.calls) if report is not None else Counter()
    step()  # compiled now
    if mode == "compiled":
        seen["graph breaks"] = sum(counters["graph_break"].values())
    if report is not None:
        calls = Counter(report.calls)  # of a compiled step those of its trace, once for all blocks
        calls.subtract(before)
        seen |= {"jitrope calls": calls["jitrope"], "fused calls": calls["fused"], "host calls": calls["host"]}
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    got = step()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        seen["peak MiB"] = (torch.cuda.max_memory_allocated() - held) / 2**20
    if want is not None:
        off = (got.float() - want.float()).abs().max()
        same = torch.equal(got, want)
        seen["against eager stock"] = "same bits" if same else f"max diff {off:.3g} of {want.abs().max():.3g}"
    return seen


@app.command("diffusion")
def command(
    only: ONLY = "",
    blocks: Annotated[int, typer.Option(help="Blocks to build, of the first kind; 0: a few, by the model.")] = 0,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Time compiled blocks too.")] = True,
    smoke: SMOKE = False,
    as_json: AS_JSON = False,
) -> None:
    """A denoising step of diffusers' transformers, random weights: stock, with jitrope, and with no rope at all."""
    modes = ("eager", "compiled")[: 1 + compiled]
    names = chosen(only, MODELS)
    steps = {f"{n} {mode}": partial(rows, n, mode, blocks or int(smoke), smoke) for n in names for mode in modes}
    show(steps, smoke, as_json)


# ---- in examples/results/README.md -----------------------------------------------------------------------

NAMES = {
    "flux": "FLUX.1",
    "flux2": "FLUX.2",
    "qwen": "Qwen-Image",
    "wan": "Wan-14B, 480p, 81 frames",
    "hunyuan": "HunyuanVideo",
    "ltx": "LTX-Video",
}
EAGER, COMPILED = {"mode": "eager"}, {"mode": "compiled"}


def line(row: Row) -> str:
    """The model, its tokens and blocks."""
    return f"{NAMES[row['model']]}, {row['tokens']} tokens, {row['blocks']} blocks"


def ms(row: Row) -> str:
    """A step's time, and how many times as fast as stock it is."""
    return f"{row['ms']:.1f}" + (f" ({row['x stock']:.2f})" if row["by"] != "stock" else "")


def mebibytes(row: Row) -> str:
    """Peak memory, where it was measured."""
    return "" if row["peak MiB"] is None else f"{row['peak MiB']:.0f}"


def plot(rows: Rows) -> Plot:
    """Eager steps: how many times as fast as stock."""
    series = {
        "jitrope": "jitrope",
        "jitrope, rope only": "jitrope, norm not fused",
        "no rope": "no rope",
        "no rope, no qk-norm": "no rope, no norm",
    }
    shown = (row for row in rows if row["mode"] == "eager")
    groups = grouped(shown, lambda row: NAMES[row["model"]].split(",")[0], series, value="x stock")
    faster = span(group["jitrope"] for group in groups.values())
    message = f"A denoising step with jitrope is {faster} times as fast as stock"
    return Plot(message, "times as fast as stock diffusers", groups, "stock")


SECTION = Section(
    "Diffusion",
    """
    Time of one denoising step of diffusers' transformers with real widths, random weights and some of their blocks:
    stock diffusers and jitrope in turns in one process, in milliseconds and, in brackets, times as fast as stock. "Norm
    not fused" is `enable(..., fuse_norm=False)`. "No rope" is the stock model without it, as if rope took no time; "no
    rope, no norm" leaves out RMSNorm of q and k too. Compiled is `compile_repeated_blocks`; a compiled step does not
    have the eager one's bits, with jitrope or without. Memory is the peak of a step above the weights.
    """,
    "jitrope bench diffusion",
    (
        Table(
            "ms of a step",
            line,
            {
                "stock": of(ms, by="stock", **EAGER),
                "jitrope": of(ms, by="jitrope", **EAGER),
                "norm not fused": of(ms, by="jitrope, rope only", **EAGER),
                "no rope": of(ms, by="no rope", **EAGER),
                "no rope, no norm": of(ms, by="no rope, no qk-norm", **EAGER),
                "stock compiled": of(ms, by="stock", **COMPILED),
                "jitrope compiled": of(ms, by="jitrope", **COMPILED),
            },
        ),
        Table(
            "MiB of a step, and its result beside stock's eager one",
            line,
            {
                "stock": of(mebibytes, by="stock", **EAGER),
                "jitrope": of(mebibytes, by="jitrope", **EAGER),
                "result": of(lambda row: row["against eager stock"], by="jitrope", **EAGER),
                "calls left to the host": of(lambda row: str(row["host calls"]), by="jitrope", **EAGER),
                "stock compiled": of(mebibytes, by="stock", **COMPILED),
                "jitrope compiled": of(mebibytes, by="jitrope", **COMPILED),
                "graph breaks": of(lambda row: str(row["graph breaks"]), by="jitrope", **COMPILED),
                "stock's result": of(lambda row: row["against eager stock"], by="stock", **COMPILED),
                "jitrope's result": of(lambda row: row["against eager stock"], by="jitrope", **COMPILED),
            },
        ),
    ),
    plot,
)
