"""All that the commands share: options, and rows of numbers as a table, as JSON and as a plot."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from jitrope import JitropeError, __version__

app = typer.Typer(no_args_is_help=True, help="Time jitrope on this machine's GPU, beside torch and others.")

Rows = list[dict[str, Any]]
Steps = Mapping[str, Callable[[], Rows]]
"""The parts of a benchmark, by a name for the progress bar; each makes some rows."""
Draw = Callable[[Rows, str, Path], None]
"""(rows, title, the PNG file)"""

ONLY = Annotated[str, typer.Option(help="Cases to run, by name, as flux,wan.")]
PEERS = Annotated[bool, typer.Option("--peers/--no-peers", help="Time what else is installed.")]
PLOT = Annotated[Path | None, typer.Option(help="Write a plot to this PNG file.")]
SMOKE = Annotated[bool, typer.Option("--smoke", help="Tiny shapes, on the CPU too: does it run?")]
AS_JSON = Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of tables.")]


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


def show(steps: Steps, smoke: bool, as_json: bool, to: Path | None = None, draw: Draw | None = None) -> None:
    """Run the steps, print their rows and draw them.

    A step that fails is named on stderr, the others go on, and the command exits with 1.

    Raises:
        JitropeError: there is no GPU, and this is no smoke run.
    """
    if not (smoke or torch.cuda.is_available()):
        raise JitropeError("jitrope bench needs a CUDA device (or --smoke)")
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    err, rows, failed = Console(stderr=True), [], False
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task("", total=len(steps))
        for what, step in steps.items():
            progress.update(task, description=what)
            try:
                rows += step()
            except Exception as error:  # say so in place of rows; hours of others' are kept
                say(f"{what} failed: {type(error).__name__}: {error}")
                failed = True
            progress.advance(task)
    title = f"{name}, torch {torch.__version__}, jitrope {__version__}"
    if as_json:
        head = {"device": name, "torch": torch.__version__, "jitrope": __version__, "host": platform.node()}
        print(json.dumps({**head, "rows": rows}, indent=1, default=str))
    else:
        say(title)
        Console().print(table(rows), soft_wrap=True)
    if to is not None and draw is not None and rows:
        draw(rows, title, to)
        say(f"wrote {to}")
    if failed:
        raise typer.Exit(1)


def table(rows: Rows) -> Table:
    """A table with the rows' keys as its head."""
    result = Table(*(rows[0] if rows else ()), box=None, pad_edge=False)
    for row in rows:
        result.add_row(*(_text(value) for value in row.values()))
    return result


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}" if value < 10 else f"{value:.1f}"
    return "" if value is None else escape(str(value))


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


# ---- plots -----------------------------------------------------------------------------------------------


def lines(rows: Rows, x: str, y: str, line: str, labels: tuple[str, str, str], to: Path, panel: str = "") -> None:
    """Column y over column x as a PNG, a line for each value of column `line`; labels: title, of x, of y.

    With `panel` there is one plot for each value of that column, side by side.
    """
    panels = list(dict.fromkeys(row[panel] for row in rows)) if panel else [None]
    size = (9 if len(panels) == 1 else 3 + 4.5 * len(panels), 4.5)
    chart, (every,) = _pyplot().subplots(1, len(panels), figsize=size, sharey=True, squeeze=False, layout="constrained")
    for name, axes in zip(panels, every):
        here = [row for row in rows if not panel or row[panel] == name]
        ticks = list(dict.fromkeys(str(row[x]) for row in here))
        for label in dict.fromkeys(row[line] for row in here):
            points = [(ticks.index(str(row[x])), row[y]) for row in here if row[line] == label]
            width = 2.5 if label.startswith("jitrope") else 1.5
            style = "--" if label.startswith(("COPY", "none")) else "-"
            axes.plot(*zip(*points), label=label, marker="o", linewidth=width, linestyle=style)
        axes.set_xticks(range(len(ticks)), ticks)
        axes.grid(alpha=0.3, which="both")
        axes.set(title=f"{panel} {name}" if panel else labels[0], xlabel=labels[1])
    every[0].set_ylabel(labels[2])
    if max(row[y] for row in rows) > 3 * min(row[y] for row in rows):
        every[0].set_yscale("log")
        every[0].yaxis.set_major_formatter("{x:g}")
        every[0].yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "235" else "")
    else:
        every[0].set_ylim(bottom=0)
    if panel:
        chart.suptitle(labels[0])
    every[-1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    chart.savefig(to, dpi=120)


def bars(rows: Rows, x: str, y: str, bar: str, labels: tuple[str, str], to: Path, bounds: tuple[float, float]) -> None:
    """Column y in groups of column x as a PNG, a bar for each value of column `bar`; labels: title, of y.

    The axis goes from bounds[0] to bounds[1]. Bars that are higher end there, with their height above them.
    """
    kinds = list(dict.fromkeys(row[bar] for row in rows))
    groups = {name: [row for row in rows if row[x] == name] for name in dict.fromkeys(row[x] for row in rows)}
    pyplot = _pyplot()
    colors = dict(zip(kinds, pyplot.get_cmap("tab20").colors))
    chart, axes = pyplot.subplots(figsize=(4 + 0.13 * (len(rows) + 2 * len(groups)), 4.5), layout="constrained")
    start, ticks, (least, most) = 0, [], bounds
    for group in groups.values():
        for place, row in enumerate(group, start):
            axes.bar(place, min(row[y], most), 0.9, color=colors[row[bar]])
            if row[y] > most:
                axes.text(place, most, f"{row[y]:.3g}", ha="center", va="bottom", fontsize=6, rotation=90)
        ticks.append(start + (len(group) - 1) / 2)
        start += len(group) + 2
    for kind, color in colors.items():
        axes.bar(0, 0, label=kind, color=color)
    axes.set_xticks(ticks, groups, rotation=20)
    axes.set_ylim(least, 1.15 * min(most, max(row[y] for row in rows)))
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(title=labels[0], ylabel=labels[1])
    axes.grid(alpha=0.3, axis="y")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8)
    chart.savefig(to, dpi=120)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise JitropeError("plots need matplotlib: pip install 'jitrope[bench]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
