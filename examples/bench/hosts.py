"""`bench hosts`: a step of a model of each library that jitrope has a module for, stock and with jitrope enabled.

Stock and ours take turns in one process, after a check that they give the same within rounding. A library that is not
installed is named on stderr and left out.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, redirect_stdout
from functools import partial
from types import ModuleType
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

from . import (
    host_comfy,
    host_deepspeed,
    host_flashinfer,
    host_models,
    host_sglang,
    host_sglang_diffusion,
    host_te,
    host_vllm,
    host_vllm_omni,
    host_xfuser,
)
from .harness import DEVICE, in_rounds, stream_time
from .host_models import COUNTS, Pair, Side
from .plots import Plot
from .report import AS_JSON, ONLY, SMOKE, app, chosen, say, show
from .sections import Row, Section, Table, grouped, of, span

HOSTS = {
    name: host
    for module in (
        host_models,
        host_te,
        host_deepspeed,
        host_xfuser,
        host_vllm_omni,
        host_sglang_diffusion,
        host_comfy,
        host_vllm,
        host_sglang,
        host_flashinfer,
    )
    for name, host in module.HOSTS.items()
}
TOLERANCE = 2**-4
"""Of the norm of a result or gradient: bf16 rounds q and k by 2**-9, and two layers and softmax make more of it."""
OFF = "off %"
Step = Callable[[], list[Tensor]]


def results(side: Side, cotangents: dict[str, Tensor], trained: bool) -> list[Tensor]:
    """A step's output; with `trained` also the gradients of its inputs and parameters."""
    model, words = side
    with torch.set_grad_enabled(trained):
        out: Tensor = tree_leaves(model(**words))[0]
    if not trained:
        return [out]
    if not cotangents:
        cotangents["out"] = torch.randn_like(out)
    leaves = [x for x in (*words.values(), *model.parameters()) if isinstance(x, Tensor) and x.requires_grad]
    grads = torch.autograd.grad(out, leaves, cotangents["out"], allow_unused=True)
    return [out.detach(), *(grad for grad in grads if grad is not None)]


def steps_of(pair: Pair) -> dict[str, Step]:
    """A call of each side, with the same cotangent."""
    cotangents: dict[str, Tensor] = {}

    def run(side: Side) -> list[Tensor]:
        if pair.compile_mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        return results(side, cotangents, pair.trained)

    return {"stock": partial(run, pair.stock), "jitrope": partial(run, pair.ours)}


def compile_in_place(side: Side, mode: str, smoke: bool) -> None:
    """Compile a model; diffusers compiles one block of each kind."""
    model: Any = side.model
    words: dict[str, Any] = {"backend": "eager"} if smoke else {"mode": mode}
    if hasattr(model, "compile_repeated_blocks"):
        model.compile_repeated_blocks(fullgraph=True, **words)
    else:
        model.compile(**words)


def difference(steps: Mapping[str, Step], calls: Callable[[], Mapping[str, int]]) -> tuple[float, Counter[str]]:
    """(The largest difference between two steps over the norm of stock's, jitrope's calls in a step).

    A compiled step is traced here, and its calls count then.
    """
    at_first = Counter(calls())
    want = [x.clone() for x in steps["stock"]()]
    before = Counter(calls())
    assert all(before[kind] == at_first[kind] for kind in ("jitrope", "fused")), "stock calls jitrope"
    got = [x.clone() for x in steps["jitrope"]()]
    counted = Counter(calls())
    counted.subtract(before)
    norms = [(x - y).float().norm() / y.float().norm() for x, y in zip(got, want, strict=True)]
    off = float(torch.stack(norms).max())  # NaN if any is
    assert off <= TOLERANCE, f"with jitrope a result is off by {off:.3g} of its norm"
    assert counted["jitrope"] + counted["fused"] > 0, "jitrope was not called"
    return off, counted


def peak(step: Step) -> float | None:
    """Memory of a step above what is held before it, in MiB."""
    if DEVICE != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - held) / 2**20


def time_of_kernels(step: Step, count: int = 3) -> float:
    """Microseconds of a step's kernels and copies, without the gaps between them."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(count):
            step()
        torch.cuda.synchronize()
    return float(sum(event.self_device_time_total for event in found.key_averages())) / count


def rows(name: str, modes: tuple[str, ...], smoke: bool) -> Iterator[Row]:
    """The rows of a model, in each mode stock and ours."""
    host = HOSTS[name]
    torch._dynamo.reset()
    gc.collect()  # the model before, which has cycles
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
    with ExitStack() as stack:
        try:
            with redirect_stdout(sys.stderr):  # rows go to stdout, and the log of xDiT too
                version = getattr(_imported(host.package), "__version__", "")
                pair = stack.enter_context(host.make(smoke))
        except (ImportError, FileNotFoundError) as error:  # the second: TransformerEngine without its compiled part
            say(f"{name} is left out: {host.package} cannot be imported ({error})")
            return
        library = f"{host.package.split('.')[0]} {version or pair.version}".strip()
        head = {"host": library, "model": host.model, "step": host.step}
        for mode in modes:
            yield from measured(pair, {**head, "mode": mode}, smoke)


def _imported(package: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except NotImplementedError as error:  # xDiT without a GPU
        raise ImportError(str(error)) from error


def measured(pair: Pair, head: Row, smoke: bool) -> Iterator[Row]:
    """Two rows of a mode."""
    if head["mode"] == "compiled":
        for side in (pair.stock, pair.ours):
            compile_in_place(side, pair.compile_mode, smoke)
    steps = steps_of(pair)
    off, counted = difference(steps, pair.calls)

    def silent(step: Step) -> None:
        step()

    for step in [*steps.values()] * 2:  # a graph is captured at its second call
        step()
    memory = {by: peak(step) for by, step in steps.items()}
    us = in_rounds({by: partial(stream_time, [partial(silent, step)], 3) for by, step in steps.items()}, rounds=9)
    timed = {by: partial(time_of_kernels, step) for by, step in steps.items()}
    gpu = in_rounds(timed, rounds=3) if DEVICE == "cuda" else {}
    for by in steps:
        row = {**head, "by": by, "ms": us[by] / 1e3, "x stock": us["stock"] / us[by], "peak MiB": memory[by]}
        row |= {"GPU ms": gpu[by] / 1e3, "GPU x stock": gpu["stock"] / gpu[by]} if gpu else {}
        row |= {f"{kind} calls": counted[kind] if by == "jitrope" else None for kind in COUNTS}
        yield {**row, OFF: 100 * off if by == "jitrope" else None}


@app.command("hosts")
def command(
    only: ONLY = "",
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Time compiled models too.")] = True,
    smoke: SMOKE = False,
    as_json: AS_JSON = False,
) -> None:
    """A training step, a decoding step or a forward of each host's models, random weights: stock and with jitrope."""
    modes = ("eager", "compiled")[: 1 + compiled]
    show({name: partial(rows, name, modes, smoke) for name in chosen(only, HOSTS)}, smoke, as_json)


# ---- in examples/results/README.md -----------------------------------------------------------------------

EAGER, COMPILED = {"mode": "eager"}, {"mode": "compiled"}


def line(row: Row) -> str:
    """The library, the model and its step."""
    return f"{row['host']}: {row['model']}, {row['step']}"


def ms(row: Row, kind: str = "") -> str:
    """A step's time, and how many times as fast as stock it is. kind: "GPU ", if it was measured."""
    if f"{kind}ms" not in row:
        return ""
    return f"{row[f'{kind}ms']:.2f}" + (f" ({row[f'{kind}x stock']:.2f})" if row["by"] != "stock" else "")


def mebibytes(row: Row) -> str:
    """Peak memory, where it was measured."""
    return "" if row["peak MiB"] is None else f"{row['peak MiB']:.0f}"


def launches(row: Row) -> str:
    """Calls of a step with norms, with rope alone, and left to the host."""
    return f"{row['fused calls']} + {row['jitrope calls']}, {row['host calls']} left"


def plot(rows: list[Row]) -> Plot:
    """How many times as fast as stock. Further kinds of a model are only in the tables: "A, kind", "A (kind)"."""
    ours = [row for row in rows if row["by"] == "jitrope"]
    first = [row for row in ours if "," not in row["model"] and not row["model"].endswith(("op)", "cache)"))]
    shown = [{**row, "by": row["mode"]} for row in first]
    series = {"eager": "jitrope", "compiled": "jitrope, both compiled"}
    groups = grouped(
        shown,
        lambda row: f"{row['host'].split()[0].replace('_', ' ')} {row['model']} {row['step'].split(',')[0]}",
        series,
        value="x stock",
    )
    message = f"A model's step with jitrope is {span(row['x stock'] for row in shown)} times as fast"
    return Plot(message, "times as fast as stock", groups, "stock")


_BY = (("", "stock"), (", jitrope", "jitrope"))
SECTION = Section(
    "Models of other libraries",
    """
    Wall time of one step of a few layers with real widths and random bf16 weights: as the library makes the model,
    and with jitrope enabled. Both take turns in one process; in brackets, times as fast as stock. "GPU ms" is the time
    of a step's kernels alone, from torch's profiler; where wall time is much longer, the step waits for the host, and
    varies from run to run.
    "Train" is forward and backward without an optimizer. "Decode" is one token of each of 8 sequences, with a static
    cache of 2048 tokens, 1024 of them filled; compiled, it uses CUDA graphs, as transformers' `generate` does. Memory
    is the peak of a step above weights and inputs. "Off" is the largest difference of the output or a gradient from
    stock's, in percent of its norm. "Diffusion" has more models of diffusers. Compiled, Qwen3-VL's
    vision tower has 15 graph breaks of its own, and the host's work is its time. torchtitan 0.3.0 imports a class for
    FSDP that torch 2.11 lacks; an empty class took its place, which a step on one GPU does not use. Megatron-core has a
    row with TransformerEngine's modules, where stock is TransformerEngine's fused rope and norms, and one without,
    where stock is Megatron's rope in plain torch. ComfyUI is not a
    package: its models here are blocks as wide as FLUX.1's, written for the bench with the functions of comfy-kitchen,
    and stock uses the backend in brackets. vLLM runs without its compiler, with all of its own kernels and a paged
    cache; compiled, its eager step is a CUDA graph, as SGLang's and FlashInfer's are. In "fused op" its own op for
    norms and rope, which its compiler puts there with `enable_qk_norm_rope_fusion`, stands against jitrope's; without
    it jitrope takes rope alone. SGLang's layers of Qwen3 run with FlashAttention 3 and pages of one token; in "rope and
    cache" and "fused op" their attention is that of SGLang's Qwen3-MoE, where rope fills the cache too, or where
    `--enable-fused-qk-norm-rope` puts one op for norms and rope. SGLang's FLUX.1 is a model of its diffusion part, with
    FlashAttention 3 and SGLang's op for norms and rope; torch compiles it, and each attention breaks the graph.
    FlashInfer has no layers: these are as wide as Qwen3-32B's, written for the bench with its norms, rope, cache,
    FlashAttention 2 and activation. Its function for norms, rope and cache takes 64 and 8 heads, which Qwen3-32B has.
    An eager decode step of vLLM, SGLang and FlashInfer waits for the host, which works longer with jitrope's functions
    than with theirs. xDiT runs its own class of FLUX.1, with its attention processors and its choice of attention, on
    one rank, which sends nothing. DeepSpeed has no layers: these are as wide as Llama 3 8B's, written for the bench
    with its `DistributedAttention`, whose exchange of heads and tokens is copies on one rank, and torch's attention.
    Compiled, this exchange is eager, behind graph breaks: torch 2.11 would trace it without its gradient. vLLM-Omni's
    models run as in one of its workers, but with torch's attention; compiled, each block is compiled for sizes that may
    change, as the worker does it. jitrope takes their rope, and their norms stay vLLM's. The plot has one kind of each
    model; the tables have all, with the slowest.
    """,
    "jitrope bench hosts",
    (
        *(
            Table(
                f"{kind}ms of a step",
                line,
                {
                    f"{name}{label}": of(partial(ms, kind=kind), by=by, **mode)
                    for name, mode in (("eager", EAGER), ("compiled", COMPILED))
                    for label, by in _BY
                },
            )
            for kind in ("", "GPU ")
        ),
        Table(
            "MiB of a step, calls, difference",
            line,
            {
                **{
                    f"{name}{label}": of(mebibytes, by=by, **mode)
                    for name, mode in (("eager", EAGER), ("compiled", COMPILED))
                    for label, by in _BY
                },
                "launches with norms + rope alone": of(launches, by="jitrope", **EAGER),
                "off, %": of(OFF, by="jitrope", **EAGER),
                "off compiled, %": of(OFF, by="jitrope", **COMPILED),
            },
        ),
    ),
    plot,
)
