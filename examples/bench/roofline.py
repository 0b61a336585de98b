"""`bench roofline`: how near each kind of call comes to the memory's speed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

from jitrope.ops.watch import memory_speed

from . import decode, presets, qk_norm, rope
from .harness import COPY, DEVICE, Case, measure
from .plots import Plot
from .report import AS_JSON, ONLY, SMOKE, Rows, app, chosen, show
from .sections import Row, Section, Table, of, span

PREFILL = (4096, (32, 8), 128)  # tokens, heads of q and of k and v, head size


class Kind(NamedTuple):
    """A kind of call: `by` in the case that `make(smoke)` makes. trained: fields with gradients; then the backward."""

    make: Callable[[bool], Case]
    by: str = "jitrope"
    trained: tuple[str, ...] = ()


def norm(smoke: bool, training: bool = False) -> Case:
    """Return a prefill of `bench qk-norm`."""
    kind = qk_norm.CASES["prefill"]
    return qk_norm.case(qk_norm.tiny(kind) if smoke else kind, False, training)


def cache(smoke: bool) -> Case:
    """Return a prefill of `bench decode`."""
    tokens, heads, dim = (20, (4, 2), 16) if smoke else PREFILL
    return decode.case(tokens, heads, dim, True, False, 64 if smoke else decode.POSITIONS)


def of_preset(name: str, smoke: bool) -> Case:
    """Return a forward of `bench presets`."""
    return presets.case(presets.PRESETS[name], False, smoke)


ROPE = partial(rope.case, "prefill", False)
KINDS = {
    "rope": Kind(ROPE),
    "rope in place": Kind(ROPE, "jitrope in place"),
    "rope by ids": Kind(ROPE, "jitrope, position_ids"),
    "norm and rope": Kind(norm),
    "its gradient": Kind(partial(norm, training=True), trained=("q", "k", "q_weight", "k_weight")),
    "KV cache": Kind(cache, "jitrope, KV cache"),
    "fp8 KV cache": Kind(cache, "jitrope, fp8 KV cache"),
    "norm and KV cache": Kind(cache, "jitrope, norm and KV cache"),
    **{name: Kind(partial(of_preset, name)) for name, preset in presets.PRESETS.items() if not preset.hot},
}


def datasheet() -> float | None:
    """TB/s of this GPU's memory, as its driver states clock and width."""
    if DEVICE != "cuda":
        return None
    import cupy  # not all versions of torch tell

    states = cupy.cuda.Device().attributes
    return memory_speed(
        SimpleNamespace(memory_clock_rate=states["MemoryClockRate"], memory_bus_width=states["GlobalMemoryBusWidth"])
    )


def rows(name: str, hot: bool, smoke: bool) -> Rows:
    """Of a kind, its inputs cold, or hot in L2 as far as they fit."""
    kind = KINDS[name]
    made = kind.make(smoke)
    copy = made.beside.get(kind.by, COPY)
    only = {kind.by: made.ours[kind.by]}
    plain = {label: call for label, call in made.plain.items() if label in only}
    case = replace(made, ours=only, moved={copy: made.moved[copy]}, peers={}, plain=plain, hot=hot)
    times = measure(case, kind.trained)
    us, copied = times[kind.by].backward if kind.trained else times[kind.by].forward, times[copy].forward
    speed, most = made.moved[copy] / us / 1e6, datasheet()
    head = {"call": name, "L2": "hot" if hot else "cold", "by": kind.by, "MiB": made.moved[copy] / 2**20, "us": us}
    return [{**head, "TB/s": speed, "% of copy": 100 * copied / us, "% of datasheet": most and 100 * speed / most}]


@app.command("roofline")
def command(only: ONLY = "", smoke: SMOKE = False, as_json: AS_JSON = False) -> None:
    """Bytes a second of each kind of call, and their share of this GPU's copy and of its datasheet, cold and hot."""
    names = chosen(only, KINDS)
    show({f"{name}, {hot}": partial(rows, name, hot == "hot", smoke) for name in names for hot in ("cold", "hot")},
         smoke, as_json)  # fmt: skip


# ---- in examples/results/README.md -----------------------------------------------------------------------


def plot(rows: Rows) -> Plot:
    """Cold calls."""
    cold: list[Any] = [row for row in rows if row["L2"] == "cold"]
    groups = {str(row["call"]): {"jitrope": row["% of copy"]} for row in cold}
    shares = span((row["% of copy"] for row in cold), 0)
    return Plot(f"Calls reach {shares} % of the speed of a copy", "% of a copy's bytes a second", groups)


def line(row: Row) -> str:
    """Of the table."""
    return f"{row['call']}, {row['L2']}"


SECTION = Section(
    "Roofline",
    """
    Bytes that each kind of call must read and write, over its time; the share of the bytes a second of COPY, which
    moves as many; and of the memory's speed by its clock and width. Cold calls find none of their inputs in L2. Hot
    calls have the same inputs every time: what fits in L2 comes from there, so both shares can exceed 100 %.
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
