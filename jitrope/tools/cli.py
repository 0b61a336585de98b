"""The `jitrope` command: results on stdout, messages on stderr, and an exit code."""

from __future__ import annotations

import dataclasses
import itertools
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.syntax import Syntax
from rich.table import Table

from .. import __version__
from ..base.errors import InvalidInput, JitropeError
from ..base.spec import DTYPES
from . import console
from .cli_cache import bundle_app, cache_app
from .console import ARCH, DRY_RUN, JOBS, JSON, architectures, build_all, examples, print_json, printable, say

EXIT_CODES = "Exit codes: 0 done, 1 something failed, was damaged or missing, 2 wrong usage."

app = typer.Typer(
    no_args_is_help=True,
    help="Rotary position embeddings, compiled on first call.",
    epilog=examples("jitrope doctor", "jitrope prewarm --arch sm_90", "jitrope cache ls") + f"\n\n{EXIT_CODES}",
)
app.add_typer(cache_app, name="cache")
app.add_typer(bundle_app, name="bundle")


def _one_of(what: str, words: Sequence[str]) -> Any:
    """An option that takes one of a few words; its help names them and a shell completes them."""

    def complete(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return typer.Option(help=f"{what}: {', '.join(words[:-1])} or {words[-1]}.", autocompletion=complete)


HEADS = "Heads of q and k, as 32,8, or of q alone, as 24."
HEAD_DIM = Annotated[int, typer.Option(help="Elements of a head.")]
DTYPE = Annotated[str, _one_of("The dtype of q and k", DTYPES)]
INTERLEAVED = Annotated[bool, typer.Option("--interleaved/--halves", help="Pairs are (2i, 2i+1) or (i, i + half).")]
ROTARY_DIM = Annotated[int, typer.Option(help="How many elements of a head are rotated; 0: all.")]
WIDTH = Annotated[str, _one_of("The width of cos and sin", ("half", "full"))]
IN_PLACE = Annotated[bool, typer.Option("--in-place", help="q and k are overwritten.")]
BACKWARD = Annotated[bool, typer.Option("--backward", help="The gradient's kernels too.")]


def main() -> None:
    """The console script: an error of jitrope's is one line, without a traceback."""
    try:
        app(prog_name="jitrope")
    except JitropeError as error:
        say("error:", error)
        sys.exit(1)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def _specs(heads: list[str], **words: Any) -> list[Any]:
    """The kernels of the calls that the options describe."""
    from .prewarm import specs_of

    try:
        counts = [[int(part) for part in text.split(",")] for text in heads]
    except ValueError as error:
        raise typer.BadParameter(f"--heads must be numbers, as 32,8: {error}") from error
    if not words["rotary_dim"]:
        del words["rotary_dim"]
    try:
        return specs_of(heads=counts, **words)
    except InvalidInput as error:
        raise typer.BadParameter(str(error)) from error


@app.command(
    epilog=examples(
        "jitrope prewarm --arch sm_80,sm_90 --jobs 8",
        "jitrope prewarm --heads 32,8 --head-dim 128 --backward",
        "JITROPE_RECORD=run.json python train.py && jitrope prewarm --from run.json",
    )
)
def prewarm(
    heads: Annotated[list[str] | None, typer.Option("--heads", help=HEADS)] = None,
    head_dim: HEAD_DIM = 128,
    dtype: DTYPE = "bf16",
    interleaved: INTERLEAVED = False,
    rotary_dim: ROTARY_DIM = 0,
    width: WIDTH = "half",
    in_place: IN_PLACE = False,
    backward: BACKWARD = False,
    file: Annotated[
        Path | None, typer.Option("--from", help="TOML or JSON: calls, a recorded run, or `jitrope cache ls --json`.")
    ] = None,
    record: Annotated[Path | None, typer.Option(help="Add the kernels to this file, for --from elsewhere.")] = None,
    arch: ARCH = "",
    jobs: JOBS = 0,
    dry_run: DRY_RUN = False,
    as_json: JSON = False,
) -> None:
    """Compile kernels ahead of time, for this machine or, with --arch, for any; needs no GPU.

    Without --heads and --from it compiles the kernels of popular models. A
    file can describe every kind of call; the options describe the common ones.
    """
    from .prewarm import default_specs, read_calls
    from .prewarm import prewarm as build

    if file is not None:
        specs: list[Any] = list(read_calls(file))
    else:
        fields = {"head_dim": head_dim, "dtype": dtype, "interleaved": interleaved, "rotary_dim": rotary_dim}
        fields |= {"width": width, "inplace": in_place, "backward": backward}
        specs = _specs(heads, **fields) if heads else default_specs()
    archs = architectures(arch)
    if record is not None and not dry_run:
        from ..jit.recording import add

        add(record, specs)
    kernels = list(itertools.product(specs, archs))
    workers = jobs or os.cpu_count() or 1
    build_all(kernels, dry_run, as_json, lambda done: build(specs, archs, workers, done))


@app.command(
    epilog=examples("jitrope render --heads 24 --interleaved --head-dim 64", "jitrope render --json | jq -r .text")
)
def render(
    heads: Annotated[str, typer.Option(help=HEADS)] = "32,8",
    head_dim: HEAD_DIM = 128,
    dtype: DTYPE = "bf16",
    interleaved: INTERLEAVED = False,
    rotary_dim: ROTARY_DIM = 0,
    width: WIDTH = "half",
    in_place: IN_PLACE = False,
    backward: Annotated[bool, typer.Option("--backward", help="The gradient's kernel.")] = False,
    launch: Annotated[str, _one_of("The launch", ("token_linear", "grid_2d"))] = "token_linear",
    file: Annotated[
        Path | None, typer.Option("--from", help="As for `jitrope prewarm`: the first kernel of it.")
    ] = None,
    as_json: JSON = False,
) -> None:
    """Print the CUDA of a kernel."""
    from ..jit.render import render as render_source
    from .prewarm import read_calls

    if file is not None:
        found = list(read_calls(file))
    else:
        fields = {"head_dim": head_dim, "dtype": dtype, "interleaved": interleaved, "rotary_dim": rotary_dim}
        specs = _specs([heads], **fields, width=width, inplace=in_place and not backward, backward=backward)
        found = [spec for spec in specs if spec.launch == launch and spec.inverse == backward]
    if not found:
        raise typer.BadParameter("there is no such kernel; --launch must be token_linear or grid_2d")
    source = render_source(found[0])
    if as_json:
        print_json({"name": source.name, "entry": source.entry, "spec": found[0].to_dict(), "text": source.text})
    elif console.out.is_terminal:
        console.out.print(Syntax(source.text, "cuda"))
    else:
        print(source.text, end="")


@app.command(epilog=examples("jitrope doctor", "jitrope doctor --json > report.json"))
def doctor(as_json: JSON = False) -> None:
    """Look at everything that jitrope needs and run one kernel; exit code 1 if something is broken."""
    from . import doctor as checks

    results = checks.run()
    faults = [result.what for result in results if not result.ok]
    if as_json:
        print_json({"ok": not faults, "checks": [dataclasses.asdict(result) for result in results]})
    else:
        table = Table(box=None, pad_edge=False, show_header=False)
        for style in ("bold", "", None):
            table.add_column(style=style, no_wrap=style is not None, overflow="fold")
        for result in results:
            mark = "[green]ok[/green]" if result.ok else "[red]fault[/red]"
            table.add_row(mark, result.what, escape(printable(result.found)))
            if result.advice:
                table.add_row("", "", f"[cyan]to do:[/cyan] {escape(result.advice)}")
        console.out.print(table, highlight=False)
        broken = f"[red]{len(faults)} broken:[/red] {', '.join(faults)}"
        console.out.print(broken if faults else "[green]jitrope works here.[/green]", highlight=False)
    if faults:
        raise typer.Exit(1)


@app.command(
    "bench", add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def bench(context: typer.Context) -> None:
    """Time jitrope on this machine's GPU, beside torch and others (in a checkout: examples/bench)."""
    folder = Path(__file__).parents[2] / "examples" / "bench"
    if not folder.is_dir():
        raise JitropeError(
            "the benchmarks are not in the package: run examples/bench in a checkout of jitrope's repository"
        )
    sys.argv = ["jitrope bench", *context.args]
    runpy.run_path(str(folder), run_name="__main__")
