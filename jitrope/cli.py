"""The `jitrope` command: results on stdout, talk on stderr, an exit code that tells."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.syntax import Syntax
from rich.table import Table

from . import __version__
from .bench.cli import app as bench_app
from .errors import JitropeError
from .spec import ROUNDINGS

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Rotary position embeddings, compiled on first call."
)
cache_app = typer.Typer(no_args_is_help=True, help="Look at the kernels on disk, check them, remove them.")
app.add_typer(cache_app, name="cache")
app.add_typer(bench_app, name="bench")
out, err = Console(), Console(stderr=True)

JSON = Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of tables.")]
HEADS = Annotated[list[str] | None, typer.Option("--heads", help="Heads of q and k, as 32,8, or of q alone, as 24.")]
HEAD_DIM = Annotated[list[int], typer.Option(help="Elements of a head.")]
DTYPE = Annotated[list[str], typer.Option(help="Of q and k: fp32, fp16 or bf16.")]
TABLE_DTYPE = Annotated[list[str], typer.Option(help="Of cos and sin: fp32, fp16 or bf16; fp64 with complex128.")]
INTERLEAVED = Annotated[bool, typer.Option("--interleaved/--halves", help="Pairs are (2i, 2i+1) or (i, i + half).")]
ROTARY_DIM = Annotated[int, typer.Option(help="Elements of a head that are rotated; 0: all.")]
WIDTH = Annotated[str, typer.Option(help="Of the tables: half or full.")]
ROUNDING = Annotated[str, typer.Option(help=f"{', '.join(ROUNDINGS[:-1])} or {ROUNDINGS[-1]}.")]
NORM = Annotated[str, typer.Option(help="Of qk_norm_rope: its norm_rounding, none, once or twice.")]
WEIGHT_DTYPE = Annotated[str | None, typer.Option(help="Of the norm's weights: fp32, fp16 or bf16.")]
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
    norm: NORM = "",
    weight_dtype: WEIGHT_DTYPE = None,
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
            "norm": norm, "weight_dtype": weight_dtype, "backward": backward,
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
    norm: NORM = "",
    weight_dtype: WEIGHT_DTYPE = None,
    backward: Annotated[bool, typer.Option("--backward", help="The gradient's kernel.")] = False,
    launch: Annotated[str, typer.Option(help="token_linear or grid_2d.")] = "token_linear",
    as_json: JSON = False,
) -> None:
    """Print the CUDA of a kernel."""
    from .render import render as render_source

    fields = {
        "head_dim": head_dim, "dtype": dtype, "table_dtype": table_dtype, "interleaved": interleaved,
        "rotary_dim": rotary_dim, "width": width, "rounding": rounding, "packed": packed,
        "in_place": in_place and not backward, "norm": norm, "weight_dtype": weight_dtype, "backward": backward,
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
