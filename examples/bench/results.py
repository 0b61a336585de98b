"""`bench report`: examples/results/README.md and its plots, written from the JSON files beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any, NamedTuple

import typer

from jitrope import JitropeError

from . import (
    block,
    cold,
    cp,
    decode,
    diffusion,
    host,
    hosts,
    layer,
    plots,
    presets,
    projection,
    qk_norm,
    roofline,
    rope,
    stages,
    targets,
    train,
)
from .report import Rows, app, say
from .sections import Section, markdown, span

FOLDER = Path(__file__).parents[1] / "results"
SECTIONS: dict[str, Section] = {
    "rope": rope.SECTION,
    "qk_norm": qk_norm.SECTION,
    "presets": presets.SECTION,
    "stages": stages.SECTION,
    "decode": decode.SECTION,
    "host": host.SECTION,
    "thd": train.THD,
    "train": train.TRAIN,
    "layer": layer.SECTION,
    "block": block.SECTION,
    "projection": projection.SECTION,
    "cp": cp.SECTION,
    "diffusion": diffusion.SECTION,
    "hosts": hosts.SECTION,
    "cold": cold.SECTION,
    "roofline": roofline.SECTION,
    "targets": targets.SECTION,
}
"""By the first part of the JSON files' names, NAME_DEVICE.json, in the order of the page."""

HEAD = """
# Results

<!-- Written by `python -m examples.bench report` from the JSON files of this folder. Do not edit it by hand. -->
"""

FIRST = """
- **Kernels.** Rope of q and k takes about as long as a copy of their bytes, with QK-norm too. Conversions to fp4, and
  those with a scale for a whole head, take much longer than a copy. Gradients of latent attention (DeepSeek) take
  longer than with Megatron-core's kernels, unless q and its gradient are in place.
- **Steps.** An eager model gains most of what norms and rope cost. A compiled one gains little, because Inductor fuses
  them too. A step that waits for the CPU may lose: one decoded token, or a model with many graph breaks.
"""

MEASURED = """
## How it was measured

Times are medians of one run of a benchmark of [examples/bench](../bench), in which all that is compared takes turns.
COPY is torch's copy (`y.copy_(x)`) of as many bytes as a call must read and write; "over COPY" is a time divided by
COPY's. Tensors are bf16 and random. Cold calls find none of their inputs in L2; hot calls have the same inputs every
time. An empty cell was not measured.

`jitrope bench NAME --json > examples/results/NAME_DEVICE.json` measures another device (`-` in NAME becomes `_`);
`python -m examples.bench report` then writes this page and the plots again. `--out examples/results/NAME_DEVICE` of
`thd` and `layer` writes JSON, CSV and the plot at once.
"""


class Kept(NamedTuple):
    """A file of results. head: device and versions."""

    name: str
    head: dict[str, Any]
    rows: Rows

    @property
    def versions(self) -> str:
        """Of torch and jitrope."""
        return f"torch {self.head['torch']}, jitrope {self.head['jitrope']}"


def kept(folder: Path, name: str) -> list[Kept]:
    """The results of a benchmark, a file for each device."""
    found = []
    for path in sorted(folder.glob(f"{name}_*.json")):
        head = json.loads(path.read_text())
        found.append(Kept(path.stem, head, head.pop("rows")))
    return found


def page(folder: Path) -> str:
    """All of README.md.

    Raises:
        JitropeError: a JSON file belongs to no section.
    """
    known = {*SECTIONS, "peers"}  # which the targets have beside them
    strange = [path.name for path in sorted(folder.glob("*.json")) if path.stem.rpartition("_")[0] not in known]
    if strange:
        raise JitropeError(f"{', '.join(strange)}: names must be NAME_DEVICE.json, with NAME of {', '.join(SECTIONS)}")
    parts = [HEAD.strip(), *_first(folder), MEASURED.strip()]
    for name, section in SECTIONS.items():
        files = kept(folder, name)
        if files:
            parts += [f"## {section.title}", fill(" ".join(section.text.split()), 120, break_on_hyphens=False)]
            parts += [f"Repeat it with `{section.command}`."]
            parts += [part for each in files for part in _device(section, each)]
    return "\n\n".join(parts) + "\n"


def gain(folder: Path) -> tuple[plots.Plot, Kept, str] | None:
    """The picture of the first screen and of the repository's page, what it shows, and its name."""
    files = kept(folder, "qk_norm")
    return (qk_norm.gain(files[0].rows), files[0], f"gain{files[0].name[7:]}.png") if files else None


def _first(folder: Path) -> Iterator[str]:
    """What to conclude: a picture, the least and the most of each device, words, and all losses of steps."""
    if drawn := gain(folder):
        yield f"![{drawn[0].message}]({drawn[2]})"
    found: dict[str, dict[str, list[float]]] = {}
    for what, device, value in _conclusions(folder):
        found.setdefault(what, {}).setdefault(device, []).append(value)
    devices = list(dict.fromkeys(device for each in found.values() for device in each))
    table = [["least to most", *devices], ["---", *["--:"] * len(devices)]]
    table += [
        [what, *(span(each[device]) if device in each else "" for device in devices)] for what, each in found.items()
    ]
    yield "\n".join(f"| {' | '.join(cells)} |" for cells in table)
    yield FIRST.strip()
    for each in kept(folder, "hosts"):
        ours = [(row, f"{row['x stock']:.2f}") for row in each.rows if row["by"] == "jitrope"]
        slower = [f"{row['model']} {row['step'].split(',')[0]}, {row['mode']} {x}" for row, x in ours if float(x) < 1]
        if slower:
            yield fill(f"Slower with jitrope, {each.head['device']}: {'; '.join(slower)}.", 120, break_on_hyphens=False)


def _conclusions(folder: Path) -> Iterator[tuple[str, str, float]]:
    """A line of the table, a device, and one of its numbers: cold calls of models' shapes, and whole steps."""
    for each in (*kept(folder, "rope"), *kept(folder, "qk_norm")):
        section = SECTIONS[each.name.rpartition("_")[0]]
        shown = section.plot(each.rows)
        for by, value in [pair for group in shown.groups.values() for pair in group.items()] if shown else []:
            if by in ("jitrope", "torch.compile"):
                yield f"{section.title}, {by}: time over a copy's", each.head["device"], value
    for mode in ("eager", "compiled"):
        for each in (*kept(folder, "diffusion"), *kept(folder, "hosts")):
            for row in [row for row in each.rows if (row["by"], row["mode"]) == ("jitrope", mode)]:
                yield f"A model's step, {mode}: times as fast as without", each.head["device"], row["x stock"]


def _device(section: Section, each: Kept) -> Iterator[str]:
    yield f"### {section.title}: {each.head['device']}"
    yield f"{each.versions}; [{each.name}.json]({each.name}.json)"
    drawn = section.plot(each.rows)
    if drawn is not None:
        yield f"![{drawn.message}]({each.name}.png)"
    yield from filter(None, (markdown(table, each.rows) for table in section.tables))


FOLDER_OF = Annotated[Path, typer.Argument(help="The folder of the JSON files.", exists=True, file_okay=False)]


@app.command("report")
def command(folder: FOLDER_OF = FOLDER) -> None:
    """Write README.md and the plots of examples/results from the JSON files there."""
    (folder / "README.md").write_text(page(folder))
    say(f"wrote {folder / 'README.md'}")
    pictures: list[tuple[plots.Plot | None, Kept, str]] = [
        (section.plot(each.rows), each, f"{each.name}.png")
        for name, section in SECTIONS.items()
        for each in kept(folder, name)
    ]
    if first := gain(folder):
        pictures.append(first)
    for drawn, each, name in pictures:
        if drawn is not None:
            plots.draw(drawn, f"{each.head['device']}, {each.versions}", folder / name)
            say(f"wrote {folder / name}")
