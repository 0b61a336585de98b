"""`bench roofline`: how near each kind of call comes to the memory's speed."""

from __future__ import annotations

from functools import partial

import torch

from jitrope.torch_state import memory_speed

from . import presets
from .harness import DEVICE, Case
from .kinds import KINDS as GROUPS
from .kinds import Kind, timed
from .plots import Plot
from .report import AS_JSON, ONLY, SMOKE, Rows, app, chosen, show
from .sections import Row, Section, Table, grouped, of, span


def of_preset(name: str, smoke: bool) -> Case:
    """Return a forward of `bench presets`."""
    return presets.case(presets.PRESETS[name], False, smoke)


# Without the million tokens, which need 50 GiB.
KINDS = {
    **{group: next(iter(cases.values())) for group, cases in GROUPS.items() if not group.startswith("a million")},
    "rope in place": GROUPS["rope"]["prefill, in place"],
    **{name: Kind(partial(of_preset, name)) for name, preset in presets.PRESETS.items() if not preset.hot},
}


def datasheet() -> float | None:
    """TB/s of this GPU's memory by its clock and width, if this torch tells them."""
    if DEVICE != "cuda":
        return None
    return memory_speed(torch.cuda.get_device_properties(torch.cuda.current_device())) or None


def rows(name: str, hot: bool, smoke: bool) -> Rows:
    """Of a kind, its inputs cold, or hot in L2 as far as they fit."""
    kind = KINDS[name]
    us, copied, moved = timed(kind, smoke, hot)
    speed, most = moved / us / 1e6, datasheet()
    head = {"call": name, "L2": "hot" if hot else "cold", "by": kind.by, "pass": kind.part, "MiB": moved / 2**20}
    shares = {"% of copy": 100 * copied / us, "% of datasheet": most and 100 * speed / most}
    return [{**head, "us": us, "TB/s": speed, **shares}]


@app.command("roofline")
def command(only: ONLY = "", smoke: SMOKE = False, as_json: AS_JSON = False) -> None:
    """Bytes a second of each kind of call, and their share of this GPU's copy and of its datasheet, cold and hot."""
    names = chosen(only, KINDS)
    show({f"{name}, {hot}": partial(rows, name, hot == "hot", smoke) for name in names for hot in ("cold", "hot")},
         smoke, as_json)  # fmt: skip


# ---- in examples/results/README.md -----------------------------------------------------------------------

PLOTTED = (
    *("rope", "rope by ids", "rope of half a head", "rope by angles", "packed evenly", "SBHD forward", "norm"),
    *("gradient of a norm", "decode", "KV cache of a prefill", "fp8 KV cache", "rows between ranks"),
)


def plot(rows: Rows) -> Plot:
    """A dozen kinds, cold and hot."""
    shown = [row for row in rows if row["call"] in PLOTTED]
    series = {"cold": "jitrope", "hot": "jitrope, hot"}
    groups = grouped(shown, lambda row: str(row["call"]), series, "L2", "% of copy")
    shares = span((row["% of copy"] for row in rows if row["L2"] == "cold"), 0)
    return Plot(f"All cold calls reach {shares} % of the speed of a copy", "% of a copy's bytes a second", groups)


def line(row: Row) -> str:
    """Of the table."""
    return f"{row['call']}, {row['L2']}"


SECTION = Section(
    "Roofline",
    """
    Bytes of q, k, v, caches and rows that each kind of call must read and write, over its time; the share of the bytes
    a second of COPY, which moves as many; and of the memory's speed by its clock and width. Cold calls find none of
    their inputs in L2. Hot calls have the same inputs every time: what fits in L2 comes from there, so both shares can
    exceed 100 %.
    """,
    "jitrope bench roofline",
    (
        Table(
            "call",
            line,
            {"MiB": of("MiB"), "us": of("us"), **{key: of(key) for key in ("TB/s", "% of copy", "% of datasheet")}},
        ),
    ),
    plot,
)
