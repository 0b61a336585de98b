"""`bench report`: examples/results/README.md and its plots, written from the JSON files beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent, fill
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
    qk_norm,
    roofline,
    rope,
    stages,
    targets,
    train,
)
from .report import Rows, app, say
from .sections import Section, markdown

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

Times are medians of one run of a benchmark of [examples/bench](../bench), in which all that is compared takes turns.
COPY is torch's copy (`y.copy_(x)`) of as many bytes as a call must read and write; "over COPY" is a time divided by
COPY's. Tensors are bf16 and random. Cold calls find none of their inputs in L2; hot calls have the same inputs every
time. An empty cell was not measured.

`jitrope bench NAME --json > examples/results/NAME_DEVICE.json` measures another device (`-` in NAME becomes `_`);
`python -m examples.bench report` then writes this page and the plots again. `--out examples/results/NAME_DEVICE` of
`thd` and `layer` writes JSON, CSV and the plot at once.
"""

APART = """
## Measured apart

These figures were measured in other runs, and their JSON was not kept.

- NVIDIA H100, TransformerEngine's HEAD (d0067d0, 2026-08), on the packs of "Packed training": 1.47, 1.57, 1.60, 1.61,
  1.64, 1.66 and 1.69 times two COPYs for 1, 8, 32, 128, 512, 1024 and 2401 sequences.
- NVIDIA H100, SGLang's kernel with positions, on the decode steps of "Serving": 1.09 us (32/8 heads, 1 token), 1.34 us
  (32/8, 64) and 1.15 us (64/8, 4).
- NVIDIA H100, torch 2.11, jitrope in place of the functions of vLLM 0.24.0, SGLang 0.5.17 and FlashInfer 0.7.2.post1 in
  two layers of Qwen3 (`examples/serving.py` has some of them): 8 sequences decode 0.77 to 0.94 times as fast as stock
  eager, and 0.99 to 1.00 times in a CUDA graph; 4096 tokens take 0.99 to 1.01 times as fast eager, and 0.99 to 1.02
  times in a graph.
- NVIDIA H100, angles in place of cosines (`freqs=`), with an earlier state of the kernels. Half-width angles over COPY:
  Wan 1.01 (cosines and sines 1.05), prefill 1.03 (1.01), FLUX 1.04 (1.01), a decode step of 64 tokens 1.85 (1.60).
  Making cosines and sines takes 3.2 to 8.5 us. So pass angles for packed batches, and half-width ones where the table
  is long beside the heads. For dense batches with short tables and for decoding, make cosines and sines once for all
  layers.
- NVIDIA H100, `prepare_fused_qkv` on 16,384 tokens, 8 groups of 4 + 2 heads: 1.02 times COPY; slicing QKV and then
  rotating takes 2.38.
- NVIDIA H100, `python examples/diffusion_pipeline.py --model flux` (12 blocks, 1024 x 1024): latents and pixels have
  the same bits with jitrope and without, and a step takes 29.0 ms in place of 38.1.
- A machine with an NVIDIA H200, `jitrope bench cold`: the first call of a process takes 79 ms with an empty cache and
  4.2 ms from disk; `import jitrope` takes 33 ms beside torch's 1.3 s.
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
    strange = [path.name for path in sorted(folder.glob("*.json")) if path.stem.rpartition("_")[0] not in SECTIONS]
    if strange:
        raise JitropeError(f"{', '.join(strange)}: names must be NAME_DEVICE.json, with NAME of {', '.join(SECTIONS)}")
    parts = [dedent(HEAD).strip()]
    for name, section in SECTIONS.items():
        files = kept(folder, name)
        if files:
            parts += [f"## {section.title}", fill(" ".join(section.text.split()), 120, break_on_hyphens=False)]
            parts += [f"Repeat it with `{section.command}`."]
            parts += [part for each in files for part in _device(section, each)]
    return "\n\n".join([*parts, APART.strip()]) + "\n"


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
    for name, section in SECTIONS.items():
        for each in kept(folder, name):
            drawn, to = section.plot(each.rows), folder / f"{each.name}.png"
            if drawn is not None:
                plots.draw(drawn, f"{each.head['device']}, {each.versions}", to)
                say(f"wrote {to}")
