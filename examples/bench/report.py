"""All that the commands share: options, and rows of numbers as a table or as JSON."""

from __future__ import annotations

import csv
import json
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby, zip_longest
from pathlib import Path
from textwrap import wrap
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jitrope import JitropeError, __version__

from .plots import Plot, draw

app = typer.Typer(
    no_args_is_help=True,
    help="Time jitrope on this machine's GPU, beside torch and others.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Rows = list[dict[str, Any]]
Steps = Mapping[str, Callable[[], Iterable[dict[str, Any]]]]
"""The parts of a benchmark, by a name for the progress bar; each makes some rows, or yields them one by one."""

ONLY = Annotated[str, typer.Option(help="Cases to run, by name, as flux,wan.")]
PEERS = Annotated[bool, typer.Option("--peers/--no-peers", help="Time what else is installed.")]
SMOKE = Annotated[bool, typer.Option("--smoke", help="Tiny shapes, on the CPU too: does it run?")]
AS_JSON = Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of tables.")]
OUT = Annotated[Path | None, typer.Option(help="Write OUT.json, OUT.csv and the plot, OUT.png.")]


def main() -> None:
    """The command line; one line for an error that is not a benchmark's to trace."""
    try:
        app(prog_name="jitrope bench")
    except JitropeError as error:
        say(f"error: {error}")
        sys.exit(1)


def say(text: str) -> None:
    """A line on stderr."""
    Console(stderr=True).print(escape(text), highlight=False, soft_wrap=True)


def show(
    steps: Steps, smoke: bool, as_json: bool, out: Path | None = None, plot: Callable[[Rows], Plot] | None = None
) -> None:
    """Run the steps and print their rows; with `out`, write them too, and their plot.

    A step that fails is named on stderr, the others go on, and the command exits with 1. If the run is stopped, by
    Ctrl-C or SIGTERM (`timeout`, a job's end), the finished rows are printed all the same.

    Raises:
        JitropeError: there is no GPU, and this is no smoke run.
    """
    if out and not out.parent.is_dir():
        raise typer.BadParameter(f"--out: there is no folder {out.parent}")
    if not (smoke or torch.cuda.is_available()):
        raise JitropeError("jitrope bench needs a CUDA device (or --smoke)")
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    rows: Rows = []
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        failed = _run(steps, rows)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        head = {"device": name, "torch": torch.__version__, "jitrope": __version__}
        text = json.dumps({**head, "rows": rows}, indent=1, default=str)
        about = f"{name}, torch {torch.__version__}, jitrope {__version__}"
        if as_json:
            print(text, flush=True)
        else:
            say(about)
            print(table(rows, shutil.get_terminal_size().columns if sys.stdout.isatty() else None), flush=True)
        if out and plot and rows:
            Path(f"{out}.json").write_text(text + "\n")
            _write_csv(rows, Path(f"{out}.csv"))
            draw(plot(rows), about, Path(f"{out}.png"))
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
    if failed:
        raise typer.Exit(1)


def _write_csv(rows: Rows, to: Path) -> None:
    """A line for each row, below their keys."""
    with to.open("w", newline="") as file:
        writer = csv.DictWriter(file, dict.fromkeys(key for row in rows for key in row))
        writer.writeheader()
        writer.writerows(rows)


def _stop(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `timeout` sends it twice
    raise KeyboardInterrupt


def _run(steps: Steps, rows: Rows) -> bool:
    """Add the rows of the steps to `rows`, each as soon as it is there. Returns whether a step failed.

    On a terminal a bar shows how far the run is. Elsewhere each row is a line on stderr, so that a log has the rows of
    a run that is killed.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    err, failed = Console(stderr=True), False
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task("", total=len(steps))
        for what, step in steps.items():
            progress.update(task, description=what)
            try:
                for row in step():
                    rows.append(row)
                    if not err.is_terminal:
                        say(json.dumps(row, default=str))
            except Exception as error:  # say so in place of rows; hours of others' are kept
                say(f"{what} failed: {type(error).__name__}: {error}")
                failed = True
            except KeyboardInterrupt:
                say(f"stopped in {what}; {len(rows)} rows are finished")
                raise
            progress.advance(task)
    return failed


# ---- tables ----------------------------------------------------------------------------------------------


def table(rows: Rows, width: int | None = None) -> str:
    """The rows in columns, below their keys; nothing is cut off.

    Where that is wider than `width`, the first columns become headings of groups of rows. A group leaves out columns
    that are empty in it, and breaks long heads, and if need be long texts, between words.
    """
    keys, parts = list(rows[0]) if rows else [], []
    labels = next((i for i, key in enumerate(keys) if any(isinstance(row.get(key), float) for row in rows)), 1)
    for above in range(labels):
        parts = _parts(keys[:above], keys[above:], rows)
        if all(_fits(_narrow(cells), width) for _, cells in parts):
            break
    return "\n\n".join(
        "\n".join([*wrap(heading, width or sys.maxsize), *_lines(cells, width)]) for heading, cells in parts
    )


def _parts(above: list[str], keys: list[str], rows: Rows) -> list[tuple[str, list[list[str]]]]:
    """(heading, cells) of each group of rows that have the columns `above` in common."""

    def heading(row: dict[str, Any]) -> str:
        return "; ".join(f"{key}: {_text(row.get(key))}" for key in above)

    return [(text, _cells(keys, [*group])) for text, group in groupby(rows, heading)]


def _cells(keys: Iterable[str], rows: Rows) -> list[list[str]]:
    """Head and body, without columns that are empty."""
    kept = [key for key in keys if any(row.get(key) is not None for row in rows)]
    return [kept, *([_text(row.get(key)) for key in kept] for row in rows)]


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}" if value < 10 else f"{value:.1f}"
    return "" if value is None else str(value)


def _fits(widths: list[int], width: int | None) -> bool:
    return width is None or sum(widths) + 2 * (len(widths) - 1) <= width


def _longest_word(texts: Iterable[str]) -> int:
    return max((len(word) for text in texts for word in text.split()), default=0)


def _narrow(cells: list[list[str]]) -> list[int]:
    """Widths of the columns if only their heads are broken between words."""
    return [max(_longest_word(column[:1]), *map(len, column[1:])) for column in zip(*cells)]


def _lines(cells: list[list[str]], width: int | None) -> Iterator[str]:
    """Columns with two spaces between; numbers are flush right."""
    columns = list(zip(*cells))
    widths = [max(map(len, column)) for column in columns]
    if not _fits(widths, width):
        widths, least = _narrow(cells), [_longest_word(column) for column in columns]
        while not _fits(widths, width) and widths != least:
            widest = max((i for i in range(len(columns)) if widths[i] > least[i]), key=widths.__getitem__)
            widths[widest] -= 1
    flush = [str.rjust if all(set(text) <= set("-.0123456789") for text in body) else str.ljust for _, *body in columns]
    for row in cells:
        broken = [wrap(text, n, break_long_words=False, break_on_hyphens=False) for text, n in zip(row, widths)]
        for texts in zip_longest(*broken, fillvalue=""):
            yield "  ".join(place(text, n) for place, text, n in zip(flush, texts, widths)).rstrip()


# ---- options ---------------------------------------------------------------------------------------------


def chosen(only: str, known: Iterable[str]) -> list[str]:
    """The names that `--only` asks for, all if it is empty."""
    known = list(known)
    unknown = [name for name in only.split(",") if name not in known] if only else []
    if unknown:
        raise typer.BadParameter(f"--only has {', '.join(unknown)}; allowed are {', '.join(known)}")
    return only.split(",") if only else known


def numbers(option: str, text: str) -> list[int]:
    """Of "1,4"."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{option} takes numbers with commas between: {error}") from error


def pairs(option: str, text: str, between: str) -> list[tuple[int, int]]:
    """Of "32/8,64/8", with "/" between."""
    found = [numbers(option, part.replace(between, ",")) for part in text.split(",")]
    if any(len(pair) != 2 for pair in found):
        raise typer.BadParameter(f"{option} takes pairs of numbers with {between!r} between, not {text!r}")
    return [(pair[0], pair[1]) for pair in found]
