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
    return "" if value is None else str(value)


def figure(
    rows: list[dict[str, Any]], x: str, y: str, line: str, title: str, x_label: str, y_label: str, path: str,
    panel: str | None = None,
) -> None:  # fmt: skip
    """A line plot of column y over column x, a line for each value of column `line`, as a PNG.

    With `panel` there is one for each value of that column, side by side.
    """
    pyplot = _pyplot()
    panels = list(dict.fromkeys(row[panel] for row in rows)) if panel else [None]
    size = (9 if len(panels) == 1 else 3 + 4.5 * len(panels), 4.5)
    chart, (every,) = pyplot.subplots(1, len(panels), figsize=size, sharey=True, squeeze=False, layout="constrained")
    for name, axes in zip(panels, every):
        _lines(axes, [row for row in rows if panel is None or row[panel] == name], x, y, line)
        axes.set(title=title if panel is None else f"{panel} {name}", xlabel=x_label)
    every[0].set_ylabel(y_label)
    values = [row[y] for row in rows]
    if max(values) > 3 * min(values):
        every[0].set_yscale("log")
        every[0].yaxis.set_major_formatter("{x:g}")
        every[0].yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "235" else "")
    else:
        every[0].set_ylim(bottom=0)
    if panel is not None:
        chart.suptitle(title)
    every[-1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    chart.savefig(path, dpi=120)
    pyplot.close(chart)


def _lines(axes: Any, rows: list[dict[str, Any]], x: str, y: str, line: str) -> None:
    ticks = list(dict.fromkeys(str(row[x]) for row in rows))
    for label in dict.fromkeys(row[line] for row in rows):
        points = [row for row in rows if row[line] == label]
        ours = str(label).startswith("jitrope")
        axes.plot(
            [ticks.index(str(row[x])) for row in points], [row[y] for row in points], label=label,
            marker="o", linewidth=2.5 if ours else 1.5, linestyle="--" if label[:4] in ("COPY", "none") else "-",
        )  # fmt: skip
    axes.set_xticks(range(len(ticks)), ticks)
    axes.grid(alpha=0.3, which="both")


def bars(
    rows: list[dict[str, Any]], x: str, y: str, bar: str, title: str, y_label: str, path: str, most: float,
    least: float = 0.0,
) -> None:  # fmt: skip
    """Column y in groups of column x, a bar for each value of column `bar` that a group has, as a PNG.

    Bars higher than `most` end there, and say how high they are. The axis starts at `least`.
    """
    pyplot = _pyplot()
    labels = list(dict.fromkeys(row[bar] for row in rows))
    groups = {name: [row for row in rows if row[x] == name] for name in dict.fromkeys(row[x] for row in rows)}
    chart, axes = pyplot.subplots(figsize=(4 + 0.13 * (len(rows) + 2 * len(groups)), 4.5), layout="constrained")
    start, ticks, seen = 0.0, [], set()
    for group in groups.values():
        for i, row in enumerate(group):
            label, value = row[bar], row[y]
            color = pyplot.get_cmap("tab20")(labels.index(label) % 20)
            axes.bar(
                start + i, min(value, most), 0.9, color=color, label=f"{'_' if label in seen else ''}{label}"
            )  # fmt: skip
            if value > most:
                axes.text(start + i, most, f"{value:.3g}", ha="center", va="bottom", fontsize=6, rotation=90)
            seen.add(label)
        ticks.append(start + (len(group) - 1) / 2)
        start += len(group) + 2
    axes.set_xticks(ticks, groups, rotation=20)
    axes.set_ylim(least, 1.15 * min(most, max(row[y] for row in rows)))
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(title=title, ylabel=y_label)
    axes.grid(alpha=0.3, axis="y")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8)
    chart.savefig(path, dpi=120)
    pyplot.close(chart)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
