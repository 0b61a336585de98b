"""`jitrope bench rope`: GPU time of q + k, beside a copy of the same bytes and peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import apply_rope, apply_rope_
from ..ops import reference
from ..plan.problem import DTYPE_NAMES
from ..plan.spec import Options
from . import peers as others
from .thd import Progress
from .timing import cold_copies, copy_calls, copy_time, gpu_time, median_of_rounds

# name: (B, S, Hq, Hk, D), interleaved, hot
CASES = {
    "qwen-image": ((1, 4352, 24, 24, 128), True, False),
    "flux": ((1, 4608, 24, 24, 128), False, False),
    "wan": ((1, 32760, 12, 12, 128), True, False),
    "prefill": ((1, 8192, 32, 8, 128), False, False),
    "train": ((1, 4096, 32, 32, 128), False, False),
    "head80": ((32, 512, 8, 8, 80), False, False),
    "head256": ((1, 2048, 64, 8, 256), False, False),
    **{f"head{d}": ((1, 4096, 16, 16, d), False, False) for d in (72, 96, 112, 160, 192)},
    "decode1": ((1, 1, 32, 8, 128), False, True),
    "decode64": ((64, 1, 32, 8, 128), False, True),
    "few4": ((4, 1, 64, 8, 128), False, True),
}

# name: frames, height and width of its tokens; pairs that turn with each, as their axial tables have them
GRIDS = {"wan": ((21, 30, 52), (22, 21, 21))}
AXIAL_ROWS = 64

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def inputs(shape: tuple[int, int, int, int, int], table_dtype: str = "fp32") -> Inputs:
    """bf16 q and k, half-width tables."""
    b, s, hq, hk, d = shape
    q, k = (torch.randn(b, s, h, d, device="cuda", dtype=torch.bfloat16) for h in (hq, hk))
    angles = torch.outer(torch.arange(s, device="cuda"), 10000 ** (-torch.arange(d // 2, device="cuda") / (d // 2)))
    dtype = next(dtype for dtype, name in DTYPE_NAMES.items() if name == table_dtype)
    return q, k, angles.cos().to(dtype), angles.sin().to(dtype)


def run(
    names: Sequence[str], peers: bool, table_dtype: str, position_ids: bool = True,
    progress: Progress = lambda text: None,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each case and implementation. Cold: q, k, tables, ids and outputs rotate past L2."""
    rows = []
    for name in names:
        progress(name)
        rows += _case(name, peers, table_dtype, position_ids)
    return rows


def _case(name: str, with_peers: bool, table_dtype: str, with_ids: bool) -> list[dict[str, Any]]:
    shape, interleaved, hot = CASES[name]
    b, s, hq, hk, d = shape
    moved = 2 * 2 * b * s * (hq + hk) * d
    copies, calls = (1, 200) if hot else (cold_copies(moved, at_least=3), 12)
    sets = [inputs(shape, table_dtype) for _ in range(copies)]
    check(sets[0], interleaved)

    measured: dict[str, Callable[[], float]] = {}
    copy = copy_calls(moved, copies)
    measured["COPY"] = lambda: copy_time(copy, calls)

    def add(label: str, call: Callable[..., Any], sets: Sequence[tuple[Tensor, ...]]) -> None:
        bound = [lambda s=s: call(*s) for s in sets]  # type: ignore[misc]
        bound[0]()  # compiled now, not between the timings
        measured[label] = lambda: gpu_time(bound, calls_per_graph=calls)

    one_table = [(q, k, *sets[0][2:]) for q, k, _, _ in sets]  # for all calls, as a model's layers have it
    for label, function in (("jitrope", apply_rope), ("jitrope in place", apply_rope_)):
        call = partial(function, interleaved=interleaved)
        add(label, call, sets)
        if not hot:
            add(f"{label}, one table", call, one_table)
    if with_ids:
        _add_position_ids(name, sets, interleaved, add)
    for label, peer in others.available(interleaved, sets) if with_peers else ():
        add(label, peer, sets)

    times = median_of_rounds(measured)
    base = times["COPY"]
    return [
        {"case": name, "by": label, "us": us, "x COPY": us / base, "TB/s": moved / us / 1e6}
        for label, us in times.items()
    ]


def _add_position_ids(
    name: str, sets: Sequence[Inputs], interleaved: bool, add: Callable[[str, Callable[..., Any], Any], None]
) -> None:
    """Calls that read which row of the table each token has."""
    ids = torch.arange(sets[0][0].shape[1], device="cuda")
    with_ids = [(*each, ids.clone()) for each in sets]
    check(sets[0], interleaved, ids)
    for label, function in (("jitrope", apply_rope), ("jitrope in place", apply_rope_)):
        add(f"{label}, position_ids", _by_ids(function, interleaved=interleaved), with_ids)
    if name not in GRIDS:
        return
    grid, section = GRIDS[name]
    ids = torch.cartesian_prod(*(torch.arange(size, device="cuda") for size in grid)).T.contiguous()
    axial = [(q, k, cos[:AXIAL_ROWS].clone(), sin[:AXIAL_ROWS].clone(), ids.clone()) for q, k, cos, sin in sets]
    check(axial[0][:4], interleaved, ids, section)
    call = _by_ids(apply_rope, interleaved=interleaved, mrope_section=section)
    add("jitrope, axial position_ids", call, axial)


def _by_ids(function: Callable[..., Any], **words: Any) -> Callable[..., Any]:
    return lambda q, k, cos, sin, ids: function(q, k, cos, sin, position_ids=ids, **words)


def check(
    inputs: Inputs, interleaved: bool, position_ids: Tensor | None = None, mrope_section: tuple[int, ...] = ()
) -> None:
    """The bits that are timed are the reference's."""
    q, k, cos, sin = inputs
    got = apply_rope(
        q, k, cos, sin, interleaved=interleaved, position_ids=position_ids, mrope_section=mrope_section
    )  # fmt: skip
    options = Options(
        interleaved=interleaved, interleaved_out=interleaved, rotary_dim=q.shape[-1], mrope_section=mrope_section
    )
    want = reference.rope(q, k, cos, sin, None, None, position_ids, options)
    for a, b in zip(got, want):
        assert torch.equal(a, b), "jitrope differs from its reference"  # type: ignore[arg-type]


def plot(rows: list[dict[str, Any]], title: str, path: str) -> None:
    """Times over COPY, bars for each case and implementation."""
    from .report import bars

    shown = [row for row in rows if row["by"] != "COPY"]
    bars(shown, "case", "x COPY", "by", title, "time over a copy of q and k", path, most=2.0)
