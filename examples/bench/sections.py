"""What a benchmark says of itself in examples/results/README.md: a `Section` of words, tables and a plot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from .plots import Plot
from .report import Rows

Row = dict[str, Any]
PLAIN = {"torch.compile": "torch.compile", "torch eager": "eager torch"}
"""Plain torch: its label in the JSON, and as it is shown."""


class Column(NamedTuple):
    """Cells of a table: the text of those rows whose values are the ones in `where`."""

    text: Callable[[Row], str]
    where: Mapping[str, Any]


class Table(NamedTuple):
    """A line for each name that `line` gives to a row. Cells with several rows join their texts with " / "."""

    corner: str
    line: Callable[[Row], str]
    columns: Mapping[str, Column]


class Section(NamedTuple):
    """A part of examples/results/README.md. plot: of a file's rows; None where there is nothing to draw."""

    title: str
    text: str
    command: str
    tables: tuple[Table, ...]
    plot: Callable[[Rows], Plot | None] = lambda rows: None


def of(text: str | Callable[[Row], str], **where: Any) -> Column:
    """A column; `text` may be a key of the rows."""
    return Column(text if callable(text) else lambda row: short(row.get(text)), where)


def short(value: float | None) -> str:
    """As the tables show a number."""
    return "" if value is None else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def markdown(table: Table, rows: Rows) -> str:
    """The table, without columns and lines that have no number; empty if there is none."""
    lines: dict[str, dict[str, str]] = {}
    for row in rows:
        for head, (text, where) in table.columns.items():
            if all(row.get(key) == value for key, value in where.items()) and (cell := text(row)):
                cells = lines.setdefault(table.line(row), {})
                cells[head] = f"{cells[head]} / {cell}" if head in cells else cell
    heads = [head for head in table.columns if any(head in cells for cells in lines.values())]
    body = [[line, *(cells.get(head, "") for head in heads)] for line, cells in lines.items()]
    whole = [[table.corner, *heads], ["---", *["--:"] * len(heads)], *body]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in whole) if body else ""


def grouped(
    rows: Iterable[Row],
    group: Callable[[Row], str],
    series: Mapping[str, str],
    key: str = "by",
    value: str | Callable[[Row], float] = "x COPY",
) -> dict[str, dict[str, float]]:
    """The groups of a plot. series: value of column `key` -> the name that is shown, in the order of the bars."""
    found: dict[str, dict[str, float]] = {}
    for row in sorted(rows, key=lambda row: [*series, row[key]].index(row[key])):
        if row[key] in series:
            found.setdefault(group(row), {})[series[row[key]]] = value(row) if callable(value) else row[value]
    return found


def span(values: Iterable[float], digits: int = 2) -> str:
    """From the least to the most."""
    ordered = [f"{value:.{digits}f}" for value in sorted(values)]
    return ordered[0] if ordered[0] == ordered[-1] else f"{ordered[0]} to {ordered[-1]}"
