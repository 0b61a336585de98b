"""The `jitrope` command: results on stdout, talk on stderr, an exit code that tells."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.syntax import Syntax
from rich.table import Table

from . import __version__
from .errors import JitropeError

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Rotary position embeddings, compiled on first call."
)
cache_app = typer.Typer(no_args_is_help=True, help="Look at the kernels on disk, check them, remove them.")
app.add_typer(cache_app, name="cache")
out, err = Console(), Console(stderr=True)

JSON = Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of tables.")]
HEADS = Annotated[list[str] | None, typer.Option("--heads", help="Heads of q and k, as 32,8, or of q alone, as 24.")]
HEAD_DIM = Annotated[list[int], typer.Option(help="Elements of a head.")]
DTYPE = Annotated[list[str], typer.Option(help="Of q and k: fp32, fp16 or bf16.")]
TABLE_DTYPE = Annotated[list[str], typer.Option(help="Of cos and sin: fp32, fp16 or bf16.")]
INTERLEAVED = Annotated[bool, typer.Option("--interleaved/--halves", help="Pairs are (2i, 2i+1) or (i, i + half).")]
ROTARY_DIM = Annotated[int, typer.Option(help="Elements of a head that are rotated; 0: all.")]
WIDTH = Annotated[str, typer.Option(help="Of the tables: half or full.")]
ROUNDING = Annotated[str, typer.Option(help="fp32 or complex64.")]
PACKED = Annotated[str | None, typer.Option(help="cu_seqlens are given, as int32 or int64.")]
IN_PLACE = Annotated[bool, typer.Option("--in-place", help="Of apply_rope_.")]
BACKWARD = Annotated[bool, typer.Option("--backward", help="With the gradient's kernels.")]


def main() -> None:
    """The console script: one line for an error that is not ours to trace."""
    try:
        app()
    except JitropeError as error:
        say("error:", error)
        sys.exit(1)


def say(word: str, text: object) -> None:
    """A line on stderr. The text is not markup: the extra's brackets in `jitrope[cuda13]` stay."""
    err.print(f"[red]{word}[/red] {escape(str(text))}", highlight=False, soft_wrap=True)


def print_json(data: Any) -> None:
    """Machine-readable output, whatever the terminal."""
    print(json.dumps(data, indent=1, default=str))


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


# ---- prewarm and render ------------------------------------------------------------------------


def _calls(heads: list[str], fields: dict[str, Any]) -> list[Any]:
    from .prewarm import expand

    try:
        totals = [sum(int(part) for part in text.split(",")) for text in heads]
    except ValueError as error:
        raise typer.BadParameter(f"--heads takes numbers, as 32,8: {error}") from error
    return expand({"heads": totals, **fields})


@app.command()
def prewarm(
    heads: HEADS = None,
    head_dim: HEAD_DIM = [128],  # noqa: B006  typer's way of a repeatable option
    dtype: DTYPE = ["bf16"],  # noqa: B006
    table_dtype: TABLE_DTYPE = ["fp32"],  # noqa: B006
    interleaved: INTERLEAVED = False,
    rotary_dim: ROTARY_DIM = 0,
    width: WIDTH = "half",
    rounding: ROUNDING = "fp32",
    packed: PACKED = None,
    in_place: IN_PLACE = False,
    angles: Annotated[bool, typer.Option("--angles", help="The table is `freqs`.")] = False,
    cp_size: Annotated[int, typer.Option(help="Context parallel ranks.")] = 1,
    q_per_group: Annotated[int, typer.Option(help="Of packed QKV, whose --heads are all three's; 0: apart.")] = 0,
    backward: BACKWARD = False,
    file: Annotated[
        Path | None, typer.Option("--from", help="TOML or JSON with calls, or `jitrope cache ls --json` of a real run.")
    ] = None,
    arch: Annotated[str, typer.Option(help="Architectures, as sm_80,sm_90; default: this machine's GPUs.")] = "",
    jobs: Annotated[int, typer.Option(help="Compiles at a time; 0: one a core.")] = 0,
    as_json: JSON = False,
) -> None:
    """Compile kernels ahead of time, for this machine or, with --arch, for any; no GPU is needed.

    Without --heads or --from it builds the kernels of popular models. A file may set every field of a
    call, those without a flag here too.
    """
    from .prewarm import DEFAULT_CALLS, read_calls
    from .prewarm import prewarm as build

    archs = [name for name in arch.replace(" ", "").split(",") if name] or _local_archs()
    if not archs:
        raise JitropeError("there is no GPU here; say for which to build, as --arch sm_80,sm_90")
    if file is not None:
        specs = read_calls(file)
    else:
        fields = {
            "head_dim": head_dim, "dtype": dtype, "table_dtype": table_dtype, "interleaved": interleaved,
            "rotary_dim": rotary_dim, "width": width, "rounding": rounding, "packed": packed,
            "in_place": in_place, "angles": angles, "cp_size": cp_size, "q_per_group": q_per_group,
            "backward": backward,
        }  # fmt: skip
        calls = _calls(heads, fields) if heads else DEFAULT_CALLS
        specs = list(dict.fromkeys(spec for call in calls for spec in call.specs()))
    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task("", total=len(specs) * len(archs))
        built = build(specs, archs, jobs or os.cpu_count() or 1, lambda _: progress.advance(task))
    failed = [item for item in built if item.failed]
    counts = {word: sum(item.outcome == word for item in built) for word in ("compiled", "cached")}
    if as_json:
        kernels = [{"name": b.spec.name, "arch": b.arch, "outcome": b.outcome, "failed": b.failed} for b in built]
        print_json({**counts, "failed": len(failed), "kernels": kernels})
    else:
        out.print(f"{counts['compiled']} compiled, {counts['cached']} cached, {len(failed)} failed", highlight=False)
    for item in failed:
        say("failed", f"{item.spec.name} {item.arch}: {item.outcome}")
    if failed or not built:
        raise typer.Exit(1)


@app.command()
def render(
    heads: Annotated[str, typer.Option(help="Heads of q and k, as 32,8, or of q alone, as 24.")] = "32,8",
    head_dim: Annotated[int, typer.Option(help="Elements of a head.")] = 128,
    dtype: Annotated[str, typer.Option(help="Of q and k: fp32, fp16 or bf16.")] = "bf16",
    table_dtype: Annotated[str, typer.Option(help="Of cos and sin: fp32, fp16 or bf16.")] = "fp32",
    interleaved: INTERLEAVED = False,
    rotary_dim: ROTARY_DIM = 0,
    width: WIDTH = "half",
    rounding: ROUNDING = "fp32",
    packed: PACKED = None,
    in_place: IN_PLACE = False,
    backward: Annotated[bool, typer.Option("--backward", help="The gradient's kernel.")] = False,
    launch: Annotated[str, typer.Option(help="token_linear or grid_2d.")] = "token_linear",
    as_json: JSON = False,
) -> None:
    """Print the CUDA of a kernel."""
    from .render import render as render_source

    fields = {
        "head_dim": head_dim, "dtype": dtype, "table_dtype": table_dtype, "interleaved": interleaved,
        "rotary_dim": rotary_dim, "width": width, "rounding": rounding, "packed": packed,
        "in_place": in_place and not backward, "backward": backward,
    }  # fmt: skip
    (call,) = _calls([heads], fields)
    found = [spec for spec in call.specs() if spec.launch == launch and spec.conjugate == backward]
    if not found:
        raise typer.BadParameter(f"--launch is {launch!r}; allowed are token_linear and grid_2d")
    source = render_source(found[0])
    if as_json:
        print_json({"name": source.name, "entry": source.entry, "spec": found[0].to_dict(), "text": source.text})
    elif out.is_terminal:
        out.print(Syntax(source.text, "cuda"))
    else:
        print(source.text, end="")


def _local_archs() -> list[str]:
    import torch

    from .runtime import arch_of

    return sorted({arch_of(i) for i in range(torch.cuda.device_count())}) if torch.cuda.is_available() else []


# ---- cache -------------------------------------------------------------------------------------


@cache_app.command("ls")
def cache_ls(as_json: JSON = False) -> None:
    """List the kernels; with --json in the form that `jitrope prewarm --from` reads."""
    from .runtime import kernel_cache

    entries = list(kernel_cache().entries())
    if as_json:
        specs = list({json.dumps(entry.spec): entry.spec for entry in entries}.values())
        rows = [{"name": e.name, "arch": e.arch, "bytes": e.size, "path": e.path} for e in entries]
        print_json({"spec": specs, "entries": rows})
        return
    table = Table("kernel", "arch", "KiB", box=None)
    for entry in entries:
        table.add_row(entry.name, entry.arch, f"{entry.size / 1024:.0f}")
    out.print(table)


@cache_app.command("info")
def cache_info(as_json: JSON = False) -> None:
    """Where the cache is and how much is in it."""
    from .runtime import kernel_cache

    cache = kernel_cache()
    entries = list(cache.entries())
    facts = {"folder": cache.root, "kernels": len(entries), "bytes": sum(entry.size for entry in entries)}
    _print_facts(facts, as_json)


@cache_app.command("verify")
def cache_verify(as_json: JSON = False) -> None:
    """Check every kernel against its checksum; exit code 1 if one is damaged."""
    from .runtime import kernel_cache

    good, bad = kernel_cache().verify()
    if as_json:
        print_json({"good": good, "bad": [{"path": path, "reason": reason} for path, reason in bad]})
    else:
        out.print(f"{good} good, {len(bad)} damaged", highlight=False)
        for path, reason in bad:
            say("damaged", f"{path}: {reason}")
    if bad:
        raise typer.Exit(1)


@cache_app.command("clear")
def cache_clear(as_json: JSON = False) -> None:
    """Remove every kernel."""
    from .runtime import kernel_cache

    removed = kernel_cache().clear()
    _print_facts({"removed": removed}, as_json)


def _print_facts(facts: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(facts)
        return
    for name, value in facts.items():
        out.print(f"{name}: {escape(str(value))}", highlight=False, soft_wrap=True)


# ---- doctor ------------------------------------------------------------------------------------


@app.command()
def doctor(as_json: JSON = False) -> None:
    """Look at everything jitrope needs and run it once; exit code 1 if something is missing."""
    from . import doctor as checks

    results = checks.run()
    if as_json:
        print_json({"ok": all(r.ok for r in results), "checks": [dataclasses.asdict(r) for r in results]})
    else:
        table = Table("", "what", "found", box=None)
        for result in results:
            table.add_row("[green]ok[/green]" if result.ok else "[red]no[/red]", result.what, escape(result.found))
        out.print(table)
    if not all(result.ok for result in results):
        raise typer.Exit(1)


# ---- bench -------------------------------------------------------------------------------------

bench_app = typer.Typer(no_args_is_help=True, help="Time jitrope on this machine's GPU, beside torch and others.")
app.add_typer(bench_app, name="bench")


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

    from .bench import report

    if not torch.cuda.is_available():
        raise JitropeError("jitrope bench needs a CUDA device")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not (total and err.is_terminal)) as progress:
        task = progress.add_task("", total=total, completed=-1)
        rows = function(lambda text: progress.update(task, advance=1, description=text))
    device = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "jitrope": __version__}
    head = f"{device['device']}, torch {device['torch']}, jitrope {__version__}"
    if as_json:
        print_json({**device, "host": platform.node(), "rows": rows})
    else:
        err.print(head, highlight=False)
        out.print(report.table(rows), soft_wrap=True)
    if to is not None and plot is not None:
        plot(rows, head, str(to))
        err.print(f"wrote {to}", highlight=False)


@bench_app.command("rope")
def bench_rope(
    only: Annotated[str, typer.Option(help="Cases to run, by name, as flux,wan.")] = "",
    peers: PEERS = True,
    table_dtype: Annotated[str, typer.Option(help="Of cos and sin: fp32, fp16 or bf16.")] = "fp32",
    as_json: JSON = False,
) -> None:
    """GPU time of one q + k call, cold and hot, beside a copy of the same bytes and other libraries."""
    from .bench import rope

    _bench(lambda _: rope.run(only.split(",") if only else None, peers, table_dtype), as_json)


@bench_app.command("thd")
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
    from .bench import thd

    counts = _numbers("--sequences", sequences)
    if table not in thd.TABLES:
        raise typer.BadParameter(f"--table is {table!r}; allowed are {', '.join(thd.TABLES)}")
    _bench(
        lambda step: thd.run(tokens, heads, head_dim, counts, table, launch.split(","), uneven, peers, step),
        as_json, len(counts), thd.plot, plot,
    )  # fmt: skip


@bench_app.command("layer")
def bench_layer(
    batches: Annotated[str, typer.Option(help="Sequences x length of each batch.")] = "128x512,512x128,1024x64,2401x28",
    peers: PEERS = True,
    plot: PLOT = None,
    as_json: JSON = False,
) -> None:
    """A transformer layer's forward and backward on packed batches (hidden 2048, 16 heads), and rope's share."""
    from .bench import layer

    shapes = [tuple(_numbers("--batches", text.replace("x", ","))) for text in batches.split(",")]
    if any(len(shape) != 2 for shape in shapes):
        raise typer.BadParameter(f"--batches takes sequences x length, as 128x512, not {batches!r}")
    _bench(lambda step: layer.run(shapes, peers, step), as_json, len(shapes), layer.plot, plot)


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{option} takes numbers with commas between: {error}") from error


@bench_app.command("train")
def bench_train(peers: PEERS = True, as_json: JSON = False) -> None:
    """Forward and backward of padded SBHD, of a million packed tokens, and of DeepSpeed's entry."""
    from .bench import train

    _bench(lambda _: train.run(peers), as_json)


@bench_app.command("host")
def bench_host(as_json: JSON = False) -> None:
    """Host time to enqueue a call, beside torch's own x.add_(1)."""
    from .bench import host

    _bench(lambda _: host.run(), as_json)


@bench_app.command("cold")
def bench_cold(as_json: JSON = False) -> None:
    """A process's first call: compiled, from disk; and what importing costs."""
    from .bench import cold

    _bench(lambda _: cold.run(), as_json)
