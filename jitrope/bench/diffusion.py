"""`jitrope bench diffusion`: denoising steps of diffusers' transformers, stock and with jitrope.

Real widths, random bf16 weights, a few of the blocks. What is timed of one model are copies of it that share its
weights, so that stock and ours can take turns without switching anything between two steps.
"""

from __future__ import annotations

import copy
import gc
import inspect
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..base.config import log
from .thd import Progress
from .timing import turn_by_turn

Step = Callable[[], Tensor]
"""One forward of a transformer."""

LAYERS = ("num_layers", "num_single_layers")
ROPE_WORDS = ("image_rotary_emb", "rotary_emb")
QK_NORMS = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")


@dataclass(frozen=True)
class Model:
    """A transformer of diffusers, by what its configuration's defaults are not.

    depth: its blocks, double and single ones where it has both; blocks: how many of them are built.
    size: frames, rows and columns of the latent that it is given (of tokens where it takes tokens), and text tokens.
    inputs: (configuration, size, randn) -> what forward takes. joint: text and picture attend to each other.
    """

    name: str
    depth: tuple[int, ...]
    blocks: tuple[int, ...]
    size: tuple[int, int, int, int]
    inputs: Callable[..., dict[str, Any]]
    config: dict[str, Any]
    tiny: dict[str, Any]
    joint: bool = True


def _ids(*sizes: int) -> Tensor:
    """(tokens, axes) positions of a grid, the last axis the fastest."""
    return torch.cartesian_prod(*(torch.arange(size) for size in sizes)).float()


def _flux(config: Any, size: tuple[int, ...], randn: Any) -> dict[str, Any]:
    frames, rows, columns, text = size
    return {
        "hidden_states": randn(1, rows * columns, config.in_channels),
        "encoder_hidden_states": randn(1, text, config.joint_attention_dim),
        "pooled_projections": randn(1, config.pooled_projection_dim),
        "timestep": torch.tensor([0.5]), "guidance": torch.tensor([3.5]),
        "img_ids": _ids(frames, rows, columns), "txt_ids": torch.zeros(text, 3),
    }  # fmt: skip


def _flux2(config: Any, size: tuple[int, ...], randn: Any) -> dict[str, Any]:
    frames, rows, columns, text = size
    return {
        "hidden_states": randn(1, rows * columns, config.in_channels),
        "encoder_hidden_states": randn(1, text, config.joint_attention_dim),
        "timestep": torch.tensor([0.5]), "guidance": torch.tensor([4.0]),
        "img_ids": _ids(frames, rows, columns, 1), "txt_ids": _ids(1, 1, 1, text),
    }  # fmt: skip


def _qwen(config: Any, size: tuple[int, ...], randn: Any) -> dict[str, Any]:
    frames, rows, columns, text = size
    return {
        "hidden_states": randn(1, frames * rows * columns, config.in_channels),
        "encoder_hidden_states": randn(1, text, config.joint_attention_dim),
        "timestep": torch.tensor([0.5]), "img_shapes": [[(frames, rows, columns)]],
    }  # fmt: skip


def _wan(config: Any, size: tuple[int, ...], randn: Any) -> dict[str, Any]:
    return {
        "hidden_states": randn(1, config.in_channels, *size[:3]), "timestep": torch.tensor([500]),
        "encoder_hidden_states": randn(1, size[3], config.text_dim),
    }  # fmt: skip


def _hunyuan(config: Any, size: tuple[int, ...], randn: Any) -> dict[str, Any]:
    return {
        "hidden_states": randn(1, config.in_channels, *size[:3]), "timestep": torch.tensor([500]),
        "encoder_hidden_states": randn(1, size[3], config.text_embed_dim),
        "encoder_attention_mask": torch.ones(1, size[3], dtype=torch.long),
        "pooled_projections": randn(1, config.pooled_projection_dim), "guidance": torch.tensor([6000.0]),
    }  # fmt: skip


def _ltx(config: Any, size: tuple[int, ...], randn: Any) -> dict[str, Any]:
    frames, rows, columns, text = size
    return {
        "hidden_states": randn(1, frames * rows * columns, config.in_channels), "timestep": torch.tensor([500]),
        "encoder_hidden_states": randn(1, text, config.caption_channels),
        "encoder_attention_mask": torch.ones(1, text), "num_frames": frames, "height": rows, "width": columns,
        "rope_interpolation_scale": (8 / 25, 32, 32),  # what the VAE leaves of 25 frames a second, of rows, of columns
    }  # fmt: skip


_HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
MODELS = {
    "flux": Model(
        "FluxTransformer2DModel", (19, 38), (4, 8), (1, 64, 64, 512), _flux, {"guidance_embeds": True},
        {**_HEADS, "in_channels": 8, "joint_attention_dim": 32, "pooled_projection_dim": 16,
         "axes_dims_rope": (4, 4, 8), "guidance_embeds": True},
    ),
    "flux2": Model(
        "Flux2Transformer2DModel", (8, 48), (2, 6), (1, 64, 64, 512), _flux2, {},
        {**_HEADS, "in_channels": 8, "joint_attention_dim": 32, "axes_dims_rope": (4, 4, 4, 4)},
    ),
    "qwen": Model(
        "QwenImageTransformer2DModel", (60,), (10,), (1, 64, 64, 256), _qwen, {},
        {**_HEADS, "in_channels": 8, "joint_attention_dim": 32, "axes_dims_rope": (4, 4, 8)},
    ),
    "wan": Model(
        "WanTransformer3DModel", (40,), (4,), (21, 60, 104, 512), _wan, {},  # 480p, 81 frames
        {**_HEADS, "ffn_dim": 64, "text_dim": 32, "freq_dim": 32}, joint=False,
    ),
    "hunyuan": Model(
        "HunyuanVideoTransformer3DModel", (20, 40), (4, 8), (8, 90, 160, 256), _hunyuan, {},  # 720p, 29 frames
        {**_HEADS, "in_channels": 4, "num_refiner_layers": 1, "text_embed_dim": 32, "pooled_projection_dim": 16,
         "rope_axes_dim": (4, 4, 8)},
    ),
    "ltx": Model(
        "LTXVideoTransformer3DModel", (28,), (8,), (16, 15, 22, 128), _ltx, {},  # 480 x 704, 121 frames
        {**_HEADS, "in_channels": 8, "cross_attention_dim": 32, "caption_channels": 32}, joint=False,
    ),
}  # fmt: skip


# ---- one model -----------------------------------------------------------------------------------------


def build(model: Model, blocks: tuple[int, ...], tiny: bool, device: str) -> tuple[Any, dict[str, Any], int]:
    """(transformer, what a step gives it, tokens that self-attention sees), in bf16, of random weights."""
    import diffusers

    size = (min(2, model.size[0]), 4, 6, 8) if tiny else model.size
    torch.manual_seed(0)
    with torch.device(device):
        with _default_dtype(torch.bfloat16):
            layers = dict(zip(LAYERS, blocks))
            transformer = getattr(diffusers, model.name)(**layers, **(model.tiny if tiny else model.config))
        transformer.eval().requires_grad_(False)
        # Wan's tables are buffers, in fp32 as from_pretrained has them.
        assert all(table.dtype == torch.float32 for table in transformer.buffers())
        for module, name in _qk_norms(transformer):
            if isinstance(weight := getattr(getattr(module, name), "weight", None), Tensor):
                weight.copy_(1 + 0.1 * torch.randn_like(weight))  # a trained weight is not all ones
        inputs = model.inputs(transformer.config, size, partial(torch.randn, dtype=torch.bfloat16))
    hidden = inputs["hidden_states"]  # of tokens, or a latent of five axes, which is cut into patches of 2 x 2
    tokens = hidden.shape[1] if hidden.dim() == 3 else hidden.shape[2:].numel() // 4
    return transformer, inputs, tokens + model.joint * size[3]


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


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
    for module, name in [*_qk_norms(result)]:
        setattr(module, name, nn.Identity())
    return result


def _qk_norms(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    return (
        (module, name) for module in model.modules() for name in QK_NORMS
        if isinstance(getattr(module, name, None), nn.Module)
    )  # fmt: skip


# ---- what is measured --------------------------------------------------------------------------------


def _jitrope(fuse_norm: bool) -> Callable[[nn.Module], tuple[Any, Any]]:
    def enabled(transformer: nn.Module) -> tuple[Any, Any]:
        from ..integrations import diffusers as ours

        model = sharing(transformer)
        return model, ours.enable(model, fuse_norm=fuse_norm)

    return enabled


# by: (a copy of the model, the report of what jitrope does in it), whether it is timed compiled too
VARIANTS: dict[str, tuple[Callable[[nn.Module], tuple[Any, Any]], bool]] = {
    "stock": (lambda model: (sharing(model), None), True),
    "jitrope": (_jitrope(True), True),
    "jitrope, rope only": (_jitrope(False), False),
    "no rope": (lambda model: (without_rope(model), None), False),
    "no rope, no qk-norm": (lambda model: (without_norms(without_rope(model)), None), False),
}


def run(
    names: Sequence[str], blocks: int = 0, compiled: bool = True, rounds: int = 9, tiny: bool = False,
    backend: str = "inductor", progress: Progress = lambda text: None,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each model, mode (eager; its repeated blocks compiled) and variant.

    blocks: of the first kind, and of the second in proportion; 0: the model's own. Where there is no GPU, as in the
    tests, times are the host's and say nothing.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    for name in names:
        model = MODELS[name]
        built = tuple(blocks * n // model.blocks[0] for n in model.blocks) if blocks else model.blocks
        torch._dynamo.reset()
        with torch.no_grad():
            transformer, inputs, tokens = build(model, built, tiny, device)
            head = {
                "model": name, "blocks": f"{'+'.join(map(str, built))} of {'+'.join(map(str, model.depth))}",
                "tokens": tokens,
            }  # fmt: skip
            for mode in ("eager", "compiled")[: 1 + compiled]:
                progress(f"{name} {mode}")
                for row in _mode(transformer, inputs, backend if mode == "compiled" else "", rounds, device):
                    rows.append({**head, "mode": mode, **row})
        del transformer, inputs
        _forget(device)
    return rows


def _forget(device: str) -> None:
    """Give back what a model and its compiled copies had."""
    torch._dynamo.reset()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def _mode(
    transformer: nn.Module, inputs: dict[str, Any], backend: str, rounds: int, device: str
) -> list[dict[str, Any]]:
    """Rows of the variants, compiled by a backend or, if that is "", eager."""
    want = transformer(**inputs, return_dict=False)[0]
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, Step] = {}
    for by, (make, also_compiled) in VARIANTS.items():
        if backend and not also_compiled:
            continue
        rows[by] = dict.fromkeys(ROW) | {"by": by}
        try:
            model, report = make(transformer)
            if backend:
                model.compile_repeated_blocks(fullgraph=True, backend=backend)
            step = partial(_step, model, inputs)
            rows[by] |= _observe(step, report, want if "no rope" not in by else None, bool(backend), device)
            steps[by] = step
        except Exception as error:  # a host that is not supported, a graph that breaks: the others are timed
            rows[by]["against eager stock"] = f"FAILED: {type(error).__name__}: {error}"[:200]
            log.warning("%s did not run", by, exc_info=True)
    times = _times(steps, rounds, device)
    for by, us in times.items():
        rows[by] |= {"ms": us / 1e3, "x stock": times["stock"] / us if "stock" in times else None}
    return list(rows.values())


ROW = (
    "by", "ms", "x stock", "peak MiB", "against eager stock", "jitrope calls", "fused calls", "host calls",
    "graph breaks",
)  # fmt: skip


def _step(model: Any, inputs: dict[str, Any]) -> Tensor:
    return model(**inputs, return_dict=False)[0]  # type: ignore[no-any-return]


def _observe(step: Step, report: Any, want: Tensor | None, compiled: bool, device: str) -> dict[str, Any]:
    """What a variant's first steps show: is its result the stock one's, who rotated, memory, graph breaks."""
    torch._dynamo.utils.counters.clear()
    before = Counter(report.calls) if report is not None else Counter()
    step()  # compiled now
    seen: dict[str, Any] = {}
    if compiled:
        seen["graph breaks"] = sum(torch._dynamo.utils.counters["graph_break"].values())
    if report is not None:
        calls = Counter(report.calls)
        calls.subtract(before)
        # Of a compiled step the report has what was traced, once for all blocks; the ops tell what runs.
        ran = _ops(step) if compiled else calls
        seen |= {"jitrope calls": ran["jitrope"], "fused calls": ran["fused"], "host calls": calls["host"]}
        if calls["host"] or not ran["jitrope"] + ran["fused"]:
            log.warning("the host rotates: %s", report)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    got = step()
    if device == "cuda":
        seen["peak MiB"] = (torch.cuda.max_memory_allocated() - held) / 2**20
    if want is not None:
        off = (got.float() - want.float()).abs().max()
        same = torch.equal(got, want)
        seen["against eager stock"] = "same bits" if same else f"max diff {off:.3g} of {want.abs().max():.3g}"
    return seen


def _ops(step: Step) -> Counter[str]:
    """jitrope's ops that a step runs, those that normalize as "fused"."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    names = [event.name for event in profile.events() or () if event.name.startswith("jitrope::")]
    return Counter("fused" if "norm" in name else "jitrope" for name in names)


def _times(steps: dict[str, Step], rounds: int, device: str) -> dict[str, float]:
    """Median microseconds of each, one of each in every round."""
    if device == "cuda":
        return turn_by_turn(steps, rounds)
    times: dict[str, list[float]] = {by: [] for by in steps}
    for _ in range(rounds):
        for by, step in steps.items():
            start = time.perf_counter()
            step()
            times[by].append((time.perf_counter() - start) * 1e6)
    return {by: statistics.median(each) for by, each in times.items()}


def plot(rows: list[dict[str, Any]], title: str, path: str) -> None:
    """Speed-ups over the stock model, bars for each model and mode: jitrope's, and what no rope at all would give."""
    from .report import bars

    shown = [
        {**row, "step": f"{row['model']}\n{row['mode']}"} for row in rows if row["x stock"] and row["by"] != "stock"
    ]
    bars(shown, "step", "x stock", "by", title, "times as fast as stock", path, most=2.0, least=0.8)
