"""Rows of numbers as a table."""

from __future__ import annotations

from typing import Any

from rich.table import Table


def table(rows: list[dict[str, Any]]) -> Table:
    """A table with the rows' keys as its head."""
    result = Table(*(rows[0] if rows else ()), box=None, pad_edge=False)
    for row in rows:
        result.add_row(*(_text(value) for value in row.values()))
    return result


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}" if value < 10 else f"{value:.1f}"
    return str(value)


def figure(
    rows: list[dict[str, Any]], x: str, y: str, line: str, title: str, x_label: str, y_label: str, path: str
) -> None:
    """A line plot of column y over column x, a line for each value of column `line`, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    chart, axes = pyplot.subplots(figsize=(9, 4.5), constrained_layout=True)
    ticks = list(dict.fromkeys(str(row[x]) for row in rows))
    for label in dict.fromkeys(row[line] for row in rows):
        points = [row for row in rows if row[line] == label]
        ours = str(label).startswith("jitrope")
        axes.plot(
            [ticks.index(str(row[x])) for row in points], [row[y] for row in points], label=label,
            marker="o", linewidth=2.5 if ours else 1.5, linestyle="--" if label in ("COPY", "none") else "-",
        )  # fmt: skip
    axes.set_xticks(range(len(ticks)), ticks)
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    values = [row[y] for row in rows]
    if max(values) > 3 * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "235" else "")
    else:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3, which="both")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    chart.savefig(path, dpi=120)
    pyplot.close(chart)
