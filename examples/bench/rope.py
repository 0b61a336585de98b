"""`bench rope`: GPU time of q + k."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jitrope import Mrope, apply_rope

from . import peers as others
from .harness import COPY, DEVICE, Call, Case, angles, bf16, measure
from .harness import rows as rows_of
from .plots import Plot
from .report import AS_JSON, ONLY, PEERS, SMOKE, Rows, app, chosen, show
from .sections import PLAIN, Row, Section, Table, grouped, of, span

Shape = tuple[int, int, int, int, int]
"""B, S, Hq, Hk, D"""

# name: shape, interleaved, hot
CASES: dict[str, tuple[Shape, bool, bool]] = {
    "qwen-image": ((1, 4352, 24, 24, 128), True, False),
    "flux": ((1, 4608, 24, 24, 128), False, False),
    "wan": ((1, 32760, 12, 12, 128), True, False),
    "prefill": ((1, 8192, 32, 8, 128), False, False),
    "train": ((1, 4096, 32, 32, 128), False, False),
    "head80": ((32, 512, 8, 8, 80), False, False),
    "head64": ((1, 8192, 32, 8, 64), False, False),
    "head256": ((1, 2048, 64, 8, 256), False, False),
    **{f"head{d}": ((1, 4096, 16, 16, d), False, False) for d in (72, 96, 112, 160, 192)},
    "decode1": ((1, 1, 32, 8, 128), False, True),
    "decode64": ((64, 1, 32, 8, 128), False, True),
    "few4": ((4, 1, 64, 8, 128), False, True),
}

# name: frames, height and width of its tokens; pairs that turn with each, as their axial tables have them
GRIDS = {"wan": ((21, 30, 52), (22, 21, 21))}
AXIAL_ROWS = 64


def small(shape: Shape) -> Shape:
    """The same kind of shape, of a few tokens."""
    b, s, hq, hk, d = shape
    return min(b, 2), min(s, 12), 4, max(1, 4 * hk // hq), d


class Inputs(NamedTuple):
    """bf16 q and k, fp32 half-width tables."""

    q: Tensor  # (B, S, Hq, D); k (B, S, Hk, D)
    k: Tensor
    cos: Tensor  # (S, D / 2)
    sin: Tensor
    shared: tuple[Tensor, ...]  # the same, and one for all calls, as a model's layers have it
    ids: Tensor  # (S,)
    axial: tuple[Tensor, ...]  # tables of AXIAL_ROWS rows
    axes: Mrope | None  # ids of three axes (3, S), and pairs that turn with each


def case(name: str, with_peers: bool = True, smoke: bool = False) -> Case:
    """Cold: q, k, tables, ids and outputs rotate past L2."""
    shape, interleaved, hot = CASES[name]
    grid, section = GRIDS.get(name, ((), ()))
    if smoke:
        shape, grid = small(shape), (2, 2, 3) if grid else ()
    b, s, hq, hk, d = shape
    half = angles(s, d)
    tables = half.cos(), half.sin()

    def inputs() -> Inputs:
        axial, axes = tuple(table[:AXIAL_ROWS].clone() for table in tables), None
        if grid:
            ids = torch.cartesian_prod(*(torch.arange(size, device=DEVICE) for size in grid)).T.contiguous()
            axes = Mrope(ids, section)
        q, k, rows = bf16(b, s, hq, d), bf16(b, s, hk, d), torch.arange(s, device=DEVICE)
        cos, sin = (table.clone() for table in tables)
        return Inputs(q, k, cos, sin, tables, rows, axial, axes)

    ours: dict[str, Call] = {}
    for label, inplace in (("jitrope", False), ("jitrope in place", True)):
        call: Any = partial(apply_rope, interleaved=interleaved, inplace=inplace)
        ours[label] = partial(lambda call, x: call(x.q, x.k, x.cos, x.sin), call)
        if not hot:
            ours[f"{label}, one table"] = partial(lambda call, x: call(x.q, x.k, *x.shared), call)
        by_ids = partial(lambda call, x: call(x.q, x.k, x.cos, x.sin, positions=x.ids), call)
        ours[f"{label}, position_ids"] = by_ids
    plain = dict.fromkeys(ours, others.plain_pair(interleaved))
    if grid:
        label = "jitrope, axial position_ids"
        ours[label] = lambda x: apply_rope(x.q, x.k, *x.axial, positions=x.axes, interleaved=interleaved)
        plain[label] = lambda x: others.plain_pair(interleaved)(_gathered(x, section))
    peers = others.pairs(interleaved) if with_peers else {}
    return Case(inputs, ours, {COPY: 2 * 2 * b * s * (hq + hk) * d}, peers, hot=hot, plain=plain)


def _gathered(x: Inputs, section: tuple[int, ...]) -> Inputs:
    """With a row of cosines and sines for each token, section by section of its pairs."""
    assert x.axes is not None
    rows, made = x.axes.tensors["position_ids"], []
    for table in x.axial:
        made.append(torch.cat([part[ids] for part, ids in zip(table.split(section, -1), rows)], -1))
    return x._replace(cos=made[0], sin=made[1])


def rows(name: str, with_peers: bool, smoke: bool) -> Rows:
    """Of a case."""
    made = case(name, with_peers, smoke)
    us = {by: times.forward for by, times in measure(made).items()}
    return rows_of(us, made.moved[COPY], case=name)


@app.command("rope")
def command(only: ONLY = "", peers: PEERS = True, smoke: SMOKE = False, as_json: AS_JSON = False) -> None:
    """GPU time of one q + k call, cold and hot, beside a copy of the same bytes and other libraries."""
    steps = {name: partial(rows, name, peers, smoke) for name in chosen(only, CASES)}
    show(steps, smoke, as_json)


# ---- in examples/results/README.md -----------------------------------------------------------------------

NAMES = {
    "qwen-image": "Qwen-Image",
    "flux": "FLUX",
    "flux-joint": "FLUX, two streams",
    "wan": "Wan",
    "ltx": "LTX",
    "qwen3": "Qwen3",
    "train": "training",
    "decode1": "decode",
    "decode64": "decode",
    "few4": "decode",
}


def name_of(row: Row) -> str:
    """Of its case, as it is shown."""
    case = str(row["case"])
    return NAMES.get(case) or (f"head size {case[4:]}" if case.startswith("head") else case)


def line_of(row: Row, shape: Shape, **notes: bool) -> str:
    """The case with its shape, and the notes that are true."""
    return ", ".join([f"{name_of(row)} {shape}", *(note for note in notes if notes[note])])


def line(row: Row) -> str:
    """The case with its shape."""
    shape, interleaved, hot = CASES[row["case"]]
    return line_of(row, shape, interleaved=interleaved, hot=hot)


def plot(rows: Rows) -> Plot:
    """Cold cases of the models, and two other head sizes."""
    cases = ("qwen-image", "flux", "wan", "prefill", "train", "head80", "head256")
    series = {"jitrope": "jitrope", "torch.compile": "torch.compile", "Liger (in place)": "Liger (in place)"}
    groups = grouped((row for row in rows if row["case"] in cases), name_of, series)
    ours = span(group["jitrope"] for group in groups.values())
    return Plot(f"Rope with jitrope takes {ours} times a copy of the same bytes", "time over COPY", groups, "COPY")


SECTION = Section(
    "Rope of q and k",
    """
    GPU time of one call that rotates q and k, over COPY of the bytes of q and k. COPY does not read the tables, which
    are half width and in fp32: Wan's are 4.2 % of the bytes of q and k, the others' less. The kernel asks L2 to keep
    tables that all calls share, so part of them stays there. With `Mrope` Wan's tables are small, one for each of its
    three axes.
    """,
    "jitrope bench rope",
    (
        Table(
            "q + k (B, S, Hq, Hk, D)",
            line,
            {
                "COPY, us": of("us", by=COPY),
                "`apply_rope`": of("x COPY", by="jitrope"),
                "with ids": of("x COPY", by="jitrope, position_ids"),
                "with `Mrope`": of("x COPY", by="jitrope, axial position_ids"),
                "in place": of("x COPY", by="jitrope in place"),
                "in place, with ids": of("x COPY", by="jitrope in place, position_ids"),
                "flash-attn": of("x COPY", by="flash-attn"),
                "Liger (in place)": of("x COPY", by="Liger (in place)"),
                **{head: of("x COPY", by=by) for by, head in PLAIN.items()},
            },
        ),
    ),
    plot,
)
