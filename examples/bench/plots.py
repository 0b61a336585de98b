"""The one style of all plots: bars from 0 in groups, with the message as the title.

A plot is 1,800 pixels wide, to be shown at 900. Its background is a light card, so that it is readable on a white page
and on a dark one. A name has the same colour in every plot.
"""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

from jitrope import JitropeError

WIDTH, HEIGHT, DPI = 9.0, 4.5, 200
LEFT, RIGHT = 0.075, 0.975
MOST_SERIES = 5
CARD, EDGE, TEXT, QUIET = "#f6f8fa", "#d1d9e0", "#1f2328", "#59636e"
COLOURS = {
    "jitrope": "#d9480f",
    "torch.compile": "#1767b3",
    "torch": "#5b6bbf",
    "Liger": "#0b7a5c",
    "F.rms_norm + apply_rope": "#a8518a",
    "no rope": "#7d8894",
    "COPY": "#33393f",
}
HATCHES = ("", "////", "....")
"""Of the first series of a colour in a plot, the second and the third."""


class Plot(NamedTuple):
    """Bars for each series in each group. A series begins with a name of COLOURS.

    unit: of the y axis. line: the label of a line at 1, where values are times over something. by: words on the groups.
    most: the end of the y axis, if it is not 0; a bar that is longer is cut, with a gap.
    """

    message: str
    unit: str
    groups: Mapping[str, Mapping[str, float]]
    line: str = ""
    by: str = ""
    most: float = 0


def colour(series: str) -> str:
    """That of the name with which it begins."""
    return next(found for name, found in COLOURS.items() if series.startswith(name))


def draw(plot: Plot, below: str, to: Path) -> None:
    """Write a PNG; `below` is the small second line, with device and versions.

    Raises:
        JitropeError: matplotlib is not installed.
    """
    series = list(dict.fromkeys(name for group in plot.groups.values() for name in group))
    assert len(series) <= MOST_SERIES, f"{plot.message}: {len(series)} series"
    pyplot = _pyplot()
    with pyplot.rc_context({"font.size": 10.5, "text.color": TEXT, "hatch.linewidth": 1.2, "hatch.color": CARD}):
        chart, axes = pyplot.subplots(figsize=(WIDTH, HEIGHT))
        _card(chart)
        _bars(axes, plot, series)
        _axes(axes, plot)
        chart.text(0.03, 0.925, plot.message, fontsize=13.5, fontweight="bold")
        chart.text(0.03, 0.868, below, fontsize=9.5, color=QUIET)
        legend = {"handlelength": 1.4, "handletextpad": 0.5, "columnspacing": 1.3, "frameon": False}
        chart.legend(loc="center left", bbox_to_anchor=(0.022, 0.81), ncols=MOST_SERIES + 1, **legend)
        under = max(label.get_text().count("\n") for label in axes.get_xticklabels()) + (2.4 if plot.by else 1)
        chart.subplots_adjust(LEFT, bottom=0.05 + 0.04 * under, right=RIGHT, top=0.755)
        _save(chart, to)
        pyplot.close(chart)


def _bars(axes: Any, plot: Plot, series: list[str]) -> None:
    """The bars, each with its number above."""
    from matplotlib.patheffects import withStroke

    style: dict[str, dict[str, Any]] = {}
    for name in series:
        hatch = HATCHES[sum(colour(before) == colour(name) for before in style)]
        style[name] = {"color": colour(name), "hatch": hatch, "edgecolor": CARD, "linewidth": 0}
        axes.bar(0, 0, label=name, **style[name])
    above: dict[str, Any] = {"ha": "center", "va": "bottom", "size": min(9.5, _points(plot) / 2.4)}
    above |= {"textcoords": "offset points", "path_effects": [withStroke(linewidth=2, foreground=CARD)]}
    place = 0
    for group in plot.groups.values():
        for name, value in group.items():
            top = min(value, plot.most or value)
            axes.bar(place, top, 0.86, **style[name])
            if top < value:
                gap: dict[str, Any] = {"color": CARD, "linewidth": 7, "solid_capstyle": "butt"}
                axes.plot((place - 0.46, place + 0.46), (0.84 * top, 0.87 * top), **gap)
            end = 1 if plot.line and 0.9 < value < 1 else top  # the line does not go through a number
            axes.annotate(f"{value:.{2 if value < 10 else 1 if value < 1000 else 0}f}", (place, end), (0, 2), **above)
            place += 1
        place += 1
    if plot.line:
        axes.axhline(1, color=COLOURS["COPY"], linewidth=1.2, linestyle=(0, (4, 2)), label=plot.line)


def _points(plot: Plot) -> float:
    """The width of a bar; a group takes that of its bars and one more."""
    return WIDTH * 72 * (RIGHT - LEFT) / sum(len(group) + 1 for group in plot.groups.values())


def _axes(axes: Any, plot: Plot) -> None:
    """From 0; the names of the groups in lines that are as long as a group is wide, smaller if a word is longer."""
    start, ticks, names, size = 0, [], [], 10.5
    for name, group in plot.groups.items():
        letters = int(_points(plot) * (len(group) + 0.7) / 6.2)
        names.append(fill(name, letters, break_long_words=False))
        size = min(size, 10.5 * letters / max(map(len, names[-1].split("\n"))))
        ticks.append(start + (len(group) - 1) / 2)
        start += len(group) + 1
    axes.set_xticks(ticks, names, size=size)
    axes.set(xlim=(-1, start - 1), ylim=(0, axes.get_ylim()[1] * 1.04), facecolor="none")
    axes.set_ylabel(plot.unit, color=QUIET)
    axes.set_xlabel(plot.by, color=QUIET)
    axes.tick_params(length=0, colors=TEXT)
    axes.grid(axis="y", color=EDGE, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set(visible=side == "bottom", color=QUIET)


def _card(chart: Any) -> None:
    """A light background with round corners, beside which the page shows."""
    from matplotlib.patches import FancyBboxPatch

    inset = 0.02
    shape = {"boxstyle": "round,pad=0,rounding_size=0.12", "transform": chart.dpi_scale_trans}  # in inches
    size = WIDTH - 2 * inset, HEIGHT - 2 * inset
    chart.add_artist(FancyBboxPatch((inset, inset), *size, **shape, facecolor=CARD, edgecolor=EDGE, zorder=-1))


def _save(chart: Any, to: Path) -> None:
    """As a PNG of 256 colours, which takes a third of the bytes."""
    from PIL import Image

    whole = BytesIO()
    chart.savefig(whole, dpi=DPI, facecolor="none")
    Image.open(whole).quantize(256, Image.Quantize.FASTOCTREE).save(to, "PNG", optimize=True)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise JitropeError("plots need matplotlib: pip install -e '.[bench]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
