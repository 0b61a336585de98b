"""`jitrope bench`: its commands and their options; what they run is in the files beside this one."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .. import __version__
from ..base.errors import JitropeError

app = typer.Typer(no_args_is_help=True, help="Time jitrope on this machine's GPU, beside torch and others.")
out, err = Console(), Console(stderr=True)

JSON = Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of tables.")]
PEERS = Annotated[bool, typer.Option("--peers/--no-peers", help="Time what else is installed.")]
PLOT = Annotated[Path | None, typer.Option(help="Write a plot to this PNG file.")]


def _bench(
    function: Callable[[Callable[[str], Any]], Any],
    as_json: bool,
    total: int = 0,
    plot: Callable[[list[dict[str, Any]], str, str], None] | None = None,
    to: Path | None = None,
) -> None:
    """Run a benchmark, with a progress bar of `total` steps, and print or plot its rows."""
    import torch

    from . import report

    if not torch.cuda.is_available():
        raise JitropeError("jitrope bench needs a CUDA device")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not (total and err.is_terminal)) as progress:
        task = progress.add_task("", total=total, completed=-1)
        rows = function(lambda text: progress.update(task, advance=1, description=text))
    device = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "jitrope": __version__}
    head = f"{device['device']}, torch {device['torch']}, jitrope {__version__}"
    if as_json:
        print(json.dumps({**device, "host": platform.node(), "rows": rows}, indent=1, default=str))
    else:
        err.print(head, highlight=False)
        out.print(report.table(rows), soft_wrap=True)
    if to is not None and plot is not None:
        plot(rows, head, str(to))
        err.print(f"wrote {to}", highlight=False)


@app.command("rope")
def bench_rope(
    only: Annotated[str, typer.Option(help="Cases to run, by name, as flux,wan.")] = "",
    peers: PEERS = True,
    table_dtype: Annotated[str, typer.Option(help="Of cos and sin: fp32, fp16 or bf16.")] = "fp32",
    position_ids: Annotated[
        bool, typer.Option("--position-ids/--no-position-ids", help="Time calls with position_ids too.")
    ] = True,
    plot: PLOT = None,
    as_json: JSON = False,
) -> None:
    """GPU time of one q + k call, cold and hot, beside a copy of the same bytes and other libraries."""
    from . import rope

    names = _names(only, rope.CASES)
    _bench(
        lambda step: rope.run(names, peers, table_dtype, position_ids, step), as_json, len(names), rope.plot, plot
    )  # fmt: skip


@app.command("decode")
def bench_decode(
    tokens: Annotated[str, typer.Option(help="Tokens of a step.")] = "1,4,16,64,256",
    heads: Annotated[str, typer.Option(help="Heads of q and of k and v, as 32/8,64/8.")] = "32/8,64/8",
    head_dim: Annotated[int, typer.Option(help="Elements of a head.")] = 128,
    prefill: Annotated[int, typer.Option(help="Tokens of the prefill, of the first heads; 0: none.")] = 4096,
    peers: PEERS = True,
    plot: PLOT = None,
    as_json: JSON = False,
) -> None:
    """A serving step, hot: GPU and host time of q + k and of their KV-cache write, beside copies of their bytes."""
    from . import decode

    counts, pairs = _numbers("--tokens", tokens), _pairs("--heads", heads)
    _bench(
        lambda step: decode.run(counts, pairs, head_dim, prefill, peers, step),
        as_json, len(counts) * len(pairs) + bool(prefill), decode.plot, plot,
    )  # fmt: skip


@app.command("cp")
def bench_cp(
    only: Annotated[str, typer.Option(help="Parts to run, of rows,metadata,step; under torchrun step.")] = "",
    cp: Annotated[str, typer.Option(help="Ranks, one of which this GPU stands for.")] = "2,4,8",
    sequences: Annotated[int, typer.Option(help="Sequences of the batch.")] = 16,
    tokens: Annotated[int, typer.Option(help="Tokens of the batch, over all ranks.")] = 65536,
    heads: Annotated[
        str, typer.Option(help="Heads of q and of k and v, as 16/16,32/8; rows: the first.")
    ] = "16/16,32/8",
    head_dim: Annotated[int, typer.Option(help="Elements of a head.")] = 64,
    window: Annotated[int, typer.Option(help="Keys before a query's own, of the mask with a window.")] = 512,
    plot: PLOT = None,
    as_json: JSON = False,
) -> None:
    """Context parallelism, one rank of several: moves of rows beside copies, tables, the step and its memory.

    torchrun --nproc-per-node 2 -m jitrope bench cp --only step: whole steps of real ranks, a GPU each.
    """
    from . import cp as context
    from . import cp_step

    names, sizes = _names(only, context.PARTS), _numbers("--cp", cp)
    batch = context.Batch(tokens, sequences, tuple(_pairs("--heads", heads)), head_dim, window)
    if not cp_step.launched():
        total = len(context.steps(names, sizes, batch))
        _bench(lambda step: context.run(names, sizes, batch, step), as_json, total, context.plot, plot)
        return
    if only != "step":
        raise typer.BadParameter("--only is 'step' under torchrun, whose ranks do nothing else together")
    with cp_step.joined() as rank:
        if rank == 0:
            total = len(batch.heads) * len(batch.windows())
            _bench(lambda step: cp_step.run_ranks(batch, step), as_json, total, context.plot, plot)
        else:
            cp_step.run_ranks(batch)


@app.command("thd")
def bench_thd(
    sequences: Annotated[str, typer.Option(help="Numbers of sequences.")] = "1,8,32,128,512,1024,2401",
    tokens: Annotated[int, typer.Option(help="Tokens of the pack.")] = 65536,
    heads: Annotated[int, typer.Option(help="Heads of the one tensor.")] = 32,
    head_dim: Annotated[int, typer.Option(help="Elements of a head.")] = 128,
    table: Annotated[str, typer.Option(help="freqs (each angle twice), freqs-half or cos-sin.")] = "freqs",
    launch: Annotated[str, typer.Option(help="Launches, as auto,token_linear,grid_2d.")] = "auto",
    uneven: Annotated[bool, typer.Option("--uneven/--even", help="Random lengths, or all the same.")] = False,
    peers: PEERS = True,
    plot: PLOT = None,
    as_json: JSON = False,
) -> None:
    """Forward and backward of a packed tensor over the number of sequences in it, beside two copies."""
    from . import thd

    counts = _numbers("--sequences", sequences)
    if table not in thd.TABLES:
        raise typer.BadParameter(f"--table is {table!r}; allowed are {', '.join(thd.TABLES)}")
    _bench(
        lambda step: thd.run(tokens, heads, head_dim, counts, table, launch.split(","), uneven, peers, step),
        as_json, len(counts), thd.plot, plot,
    )  # fmt: skip


@app.command("layer")
def bench_layer(
    batches: Annotated[str, typer.Option(help="Sequences x length of each batch.")] = "128x512,512x128,1024x64,2401x28",
    peers: PEERS = True,
    plot: PLOT = None,
    as_json: JSON = False,
) -> None:
    """A transformer layer's forward and backward on packed batches (hidden 2048, 16 heads), and rope's share."""
    from . import layer

    shapes = [tuple(_numbers("--batches", text.replace("x", ","))) for text in batches.split(",")]
    if any(len(shape) != 2 for shape in shapes):
        raise typer.BadParameter(f"--batches takes sequences x length, as 128x512, not {batches!r}")
    _bench(lambda step: layer.run(shapes, peers, step), as_json, len(shapes), layer.plot, plot)


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{option} takes numbers with commas between: {error}") from error


def _pairs(option: str, text: str) -> list[tuple[int, int]]:
    pairs = [_numbers(option, part.replace("/", ",")) for part in text.split(",")]
    if any(len(pair) != 2 for pair in pairs):
        raise typer.BadParameter(f"{option} takes heads of q / heads of k and v, as 32/8, not {text!r}")
    return [(pair[0], pair[1]) for pair in pairs]


@app.command("train")
def bench_train(peers: PEERS = True, as_json: JSON = False) -> None:
    """Forward and backward of padded SBHD, of a million packed tokens, and of DeepSpeed's entry."""
    from . import train

    _bench(lambda _: train.run(peers), as_json)


@app.command("qk-norm")
def bench_qk_norm(
    only: Annotated[str, typer.Option(help="Cases to run, by name, as flux,wan.")] = "",
    peers: PEERS = True,
    backward: Annotated[bool, typer.Option("--backward/--no-backward", help="Time training's cases too.")] = True,
    plot: PLOT = None,
    as_json: JSON = False,
) -> None:
    """GPU time of RMSNorm + rope of q and k, forward and backward, beside a copy of the same bytes and others."""
    from . import qk_norm

    names = _names(only, qk_norm.CASES)
    total = len(names) + backward * len({*names} & {*qk_norm.TRAINED})
    _bench(lambda step: qk_norm.run(names, peers, backward, step), as_json, total, qk_norm.plot, plot)


@app.command("diffusion")
def bench_diffusion(
    only: Annotated[str, typer.Option(help="Models to run, as flux,qwen.")] = "",
    blocks: Annotated[int, typer.Option(help="Blocks to build, of the first kind; 0: a few, by the model.")] = 0,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Time compiled blocks too.")] = True,
    rounds: Annotated[int, typer.Option(help="Steps of each to take the median of.")] = 9,
    plot: PLOT = None,
    as_json: JSON = False,
) -> None:
    """A denoising step of diffusers' transformers, random weights: stock, with jitrope, and with no rope at all."""
    from . import diffusion

    names = _names(only, diffusion.MODELS)
    _bench(
        lambda step: diffusion.run(names, blocks, compiled, rounds, progress=step),
        as_json, len(names) * (1 + compiled), diffusion.plot, plot,
    )  # fmt: skip


def _names(only: str, known: Iterable[str]) -> list[str]:
    """The names that `--only` asks for, all if it is empty."""
    known = list(known)
    unknown = [name for name in only.split(",") if name not in known] if only else []
    if unknown:
        raise typer.BadParameter(f"--only has {', '.join(unknown)}; allowed are {', '.join(known)}")
    return only.split(",") if only else known


@app.command("host")
def bench_host(as_json: JSON = False) -> None:
    """Host time to enqueue a call, beside torch's own x.add_(1)."""
    from . import host

    _bench(lambda _: host.run(), as_json)


@app.command("cold")
def bench_cold(as_json: JSON = False) -> None:
    """A process's first call: compiled, from disk; and what importing costs."""
    from . import cold

    _bench(lambda _: cold.run(), as_json)
