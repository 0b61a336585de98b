"""`bench hosts`: a step of a model of each library that jitrope has a module for, stock and with jitrope enabled.

Each side is a process of its own, as a user has it, and they take turns. Both must give the same within rounding. A
library that is not installed is named on stderr and left out.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

import jitrope

from . import host_layers, host_models
from .harness import DEVICE, stream_time
from .host_models import COUNTS, Side
from .plots import Plot
from .report import AS_JSON, ONLY, SMOKE, app, chosen, say, show
from .sections import Row, Section, Table, grouped, of, span

HOSTS = {**host_models.HOSTS, **host_layers.HOSTS}
TOLERANCE = 2**-4
"""Of the norm of a result or gradient: bf16 rounds q and k by 2**-9, and two layers and softmax make more of it."""
OFF = "off %"
ROOT = Path(__file__).parents[2]


# ---- a side, in its process ------------------------------------------------------------------------------


class Runner:
    """A host's model, stock or with jitrope: its step, and what it takes."""

    def __init__(self, side: Side, smoke: bool) -> None:
        self.side, self.smoke, self.results = side, smoke, list[Tensor]()
        self.cotangent: Tensor | None = None

    def prepare(self, mode: str) -> dict[str, int]:
        """Take a mode from now on, and return the calls of a step. A compiled one is traced, and counts then."""
        if mode == "compiled":
            compile_in_place(self.side, self.smoke)
        before = Counter(self.side.calls())
        self.results = [x.clone() for x in self.step()]
        counted = Counter(self.side.calls())
        counted.subtract(before)
        for _ in range(2):  # a graph is captured at the second call
            self.step()
        return dict(counted)

    def step(self) -> list[Tensor]:
        """A step's output; of a trained model also the gradients of its inputs and parameters."""
        model, words, trained = self.side.model, self.side.words, self.side.trained
        if self.side.compile_mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        with torch.set_grad_enabled(trained):
            out: Tensor = tree_leaves(model(**words))[0]
        if not trained:
            return [out]
        leaves = [x for x in (*words.values(), *model.parameters()) if isinstance(x, Tensor) and x.requires_grad]
        if self.cotangent is None:
            torch.manual_seed(2)  # the same in each process
            self.cotangent = torch.randn_like(out)
        grads = torch.autograd.grad(out, leaves, self.cotangent, allow_unused=True)
        return [out.detach(), *(grad for grad in grads if grad is not None)]

    def keep(self, path: str) -> None:
        """Write the results of a step to a file."""
        torch.save(self.results, path)

    def compare(self, path: str) -> float:
        """The largest difference from the results in a file, over their norms."""
        off = difference(self.results, torch.load(path, map_location=DEVICE))
        self.results = []
        return off

    def wall(self) -> float:
        """Microseconds of a step. A turn takes 0.1 s at least: a short step waits for the CPU, which varies more."""
        step = [lambda: self.step().clear()]
        us = stream_time(step, 1)  # another process had the GPU
        return stream_time(step, max(3, round(25_000 / us)))

    def gpu(self, count: int = 3) -> float:
        """Microseconds of a step's kernels and copies, without the gaps between them."""
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(count):
                self.step()
            torch.cuda.synchronize()
        return float(sum(event.self_device_time_total for event in found.key_averages())) / count

    def peak(self) -> float | None:
        """Memory of a step above what is held before it, in MiB."""
        if DEVICE != "cuda":
            return None
        self.results = []
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        self.step()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - held) / 2**20


def compile_in_place(side: Side, smoke: bool) -> None:
    """Compile a model; diffusers compiles one block of each kind."""
    model: Any = side.model
    words: dict[str, Any] = {"backend": "eager"} if smoke else {"mode": side.compile_mode}
    if hasattr(model, "compile_repeated_blocks"):
        model.compile_repeated_blocks(fullgraph=True, **words)
    else:
        model.compile(**words)


def difference(got: list[Tensor], want: list[Tensor]) -> float:
    """The largest difference over the norm of what is wanted; NaN if any is."""
    norms = [(x - y).float().norm() / y.float().norm() for x, y in zip(got, want, strict=True)]
    return float(torch.stack(norms).max())


def serve(name: str, on: bool, smoke: bool) -> None:
    """Answer the requests of `Process`, each a line of JSON with a method of `Runner` and its arguments."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print on stdout

    def reply(kind: str, value: Any) -> None:
        print(json.dumps([kind, value]), file=replies, flush=True)

    host = HOSTS[name]
    with ExitStack() as stack:
        try:
            version = getattr(_imported(host.package), "__version__", "")
            side = stack.enter_context(host.make(on, smoke))
        except (ImportError, FileNotFoundError) as error:  # the second: TransformerEngine without its compiled part
            return reply("left", f"{host.package} cannot be imported ({error})")
        runner = Runner(side, smoke)
        reply("value", f"{host.package.split('.')[0]} {version or side.version}".strip())
        for line in sys.stdin:
            method, *arguments = json.loads(line)
            reply("value", getattr(runner, method)(*arguments))


def _imported(package: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except NotImplementedError as error:  # xDiT without a GPU
        raise ImportError(str(error)) from error


# ---- the sides of a model take turns ---------------------------------------------------------------------

START = """
import sys
sys.path.insert(0, sys.argv[1])
import jitrope
sys.path[0] = sys.argv[2]
from examples.bench.hosts import serve
serve(sys.argv[3], *map(bool, map(int, sys.argv[4:])))
"""
"""A process's program, of the folders of jitrope and of this package, and of the arguments of `serve`."""


class Process:
    """A `Runner` in a process of its own. folder: where jitrope is."""

    def __init__(self, label: str, folder: Path, name: str, on: bool, smoke: bool) -> None:
        self.label, words = label, [str(folder), str(ROOT), name, str(int(on)), str(int(smoke))]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([sys.executable, "-c", START, *words], stdin=pipe, stdout=pipe, text=True)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def send(self, *request: Any) -> None:
        """Ask for a method of `Runner`."""
        print(json.dumps(request), file=self.process.stdin, flush=True)

    def receive(self) -> Any:
        """The reply.

        Raises:
            ImportError: the library is not there.
            RuntimeError: the process has ended.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self.label} has ended; its error is above")
        kind, value = json.loads(line)
        if kind == "left":
            raise ImportError(value)
        return value

    def ask(self, *request: Any) -> Any:
        """`send` and `receive`."""
        self.send(*request)
        return self.receive()


def rows(name: str, modes: tuple[str, ...], smoke: bool, beside: Path | None = None) -> Iterator[Row]:
    """The rows of a model, in each mode stock, ours, and perhaps jitrope of another folder."""
    here, host = Path(jitrope.__file__).parents[1], HOSTS[name]
    folders = {"stock": here, "jitrope": here} | ({} if beside is None else {BESIDE: beside})
    with ExitStack() as stack:
        by = {
            label: stack.enter_context(Process(label, folder, name, label != "stock", smoke))
            for label, folder in folders.items()
        }
        try:
            library, *_ = [side.receive() for side in by.values()]
        except ImportError as error:
            say(f"{name} is left out: {error}")
            return
        kept = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "results"
        for mode in modes[: 1 + host.compiled]:
            head = {"host": library, "model": host.model, "step": host.step, "mode": mode}
            yield from measured(by, mode, head, str(kept))


def measured(by: Mapping[str, Process], mode: str, head: Row, kept: str) -> Iterator[Row]:
    """A row of each side in a mode. kept: a file for stock's results."""
    for side in by.values():
        side.send("prepare", mode)
    counted = {label: Counter(side.receive()) for label, side in by.items()}
    by["stock"].ask("keep", kept)
    off = {label: side.ask("compare", kept) for label, side in by.items() if label != "stock"}
    for label, found in off.items():
        assert found <= TOLERANCE, f"with {label} a result is off by {found:.3g} of its norm"
        assert counted[label]["jitrope"] + counted[label]["fused"] > 0, f"{label} was not called"
    memory = {label: side.ask("peak") for label, side in by.items()}
    us = in_turn(by, "wall", 9)
    gpu = in_turn(by, "gpu", 3) if DEVICE == "cuda" else {}
    for label in by:
        row = {**head, "by": label, "ms": us[label] / 1e3, "x stock": us["stock"] / us[label]}
        row["peak MiB"] = memory[label]
        row |= {"GPU ms": gpu[label] / 1e3, "GPU x stock": gpu["stock"] / gpu[label]} if gpu else {}
        row |= {f"{kind} calls": None if label == "stock" else counted[label][kind] for kind in COUNTS}
        yield {**row, OFF: 100 * off[label] if label in off else None}


def in_turn(by: Mapping[str, Process], what: str, rounds: int) -> dict[str, float]:
    """The shortest of each side's times: for seconds at a time the CPU gives a side up to 1.6 x its time."""
    found = [{label: side.ask(what) for label, side in by.items()} for _ in range(rounds)]
    return {label: min(each[label] for each in found) for label in by}


BESIDE = "jitrope of --beside"


@app.command("hosts")
def command(
    only: ONLY = "",
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Time compiled models too.")] = True,
    beside: Annotated[
        Path | None, typer.Option(help="A folder with another jitrope, timed in the same run.", exists=True)
    ] = None,
    smoke: SMOKE = False,
    as_json: AS_JSON = False,
) -> None:
    """A training step, a decoding step or a forward of each host's models, random weights: stock and with jitrope."""
    modes = ("eager", "compiled")[: 1 + compiled]
    show({name: partial(rows, name, modes, smoke, beside) for name in chosen(only, HOSTS)}, smoke, as_json)


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
    """How many times as fast as stock. Further kinds of a model are only in the tables: "A, kind"."""
    ours = [row for row in rows if row["by"] == "jitrope"]
    first = [row for row in ours if "," not in row["model"]]
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
    and with jitrope enabled. Each has a process of its own, and they take turns; in brackets, times as fast as
    stock. Times are the shortest of nine turns, because a step that waits for the host took up to 1.6 x as long for
    seconds at a time; here only those of Qwen3-8B and Gemma 4 on an H200 are, the others are medians. "GPU ms" is
    the time of a step's kernels alone, from torch's profiler. "Train" is forward and backward without an optimizer.
    "Decode" is one token of each of 8 sequences, with a static cache of 2048 tokens, 1024 of them filled; compiled,
    it uses CUDA graphs, as transformers' `generate` does. Memory is the peak of a step above weights and inputs.
    "Off" is the largest difference of the output or a gradient from stock's, in percent of its norm. "Diffusion"
    has more models of diffusers. Compiled, Qwen3-VL's vision tower has 15 graph breaks of its own, and the host's
    work is its time. torchtitan 0.3.0 imports a class for FSDP that torch 2.11 lacks; an empty class took its
    place, which a step on one GPU does not use. Megatron-core has a row with TransformerEngine's modules, where
    stock is TransformerEngine's fused rope and norms, and one without, where stock is Megatron's rope in plain
    torch. ComfyUI is not a package: its models here are blocks as wide as FLUX.1's, written for the bench with the
    functions of comfy-kitchen, and stock uses the backend in brackets. xDiT runs its own class of FLUX.1, with its
    attention processors and its choice of attention, on one rank, which sends nothing. DeepSpeed has no layers:
    these are as wide as Llama 3 8B's, written for the bench with its `DistributedAttention`, whose exchange of
    heads and tokens is copies on one rank, and torch's attention. Compiled, this exchange is eager, behind graph
    breaks: torch 2.11 would trace it without its gradient. The plot has one kind of each model; the tables have
    all, with the slowest.
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
