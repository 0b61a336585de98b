"""Every function in every situation of torch is right or refused, nothing else.

`python -m tests.test_matrix` prints the whole table.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from .host import backend
from .matrix import compiled as compiled  # adds its situations
from .matrix.cells import FUNCTIONS, Cell, Function
from .matrix.situations import SITUATIONS, Situation

ON_HOST = os.environ.get("TEST_DEVICE") == "host"
COUNTS = {"right": 2869, "refused": 1069, "either": 21}


def cells(device: str) -> Iterator[tuple[Function, Situation, str]]:
    for situation in SITUATIONS:
        for function in FUNCTIONS:
            ends = situation.ends(function)
            off = (situation.gpu and device != "cuda") or (device == "cuda" and not situation.cuda)
            off = off or (ON_HOST and (situation.slow or not situation.host))
            if ends is not None and not off:
                yield function, situation, ends


def judge(function: Function, situation: Situation, ends: str, device: str) -> str:
    ended = situation.run(Cell(function, device))
    assert ended in ("right", "refused")
    assert ends in ("either", ended), f"it ends {ended}, not {ends}"
    return ended


def params(device: str) -> list[Any]:
    """Of the situations that compile a call, "torch.compile" alone is not marked slow."""
    found = []
    for function, situation, ends in cells(device):
        slow = situation.slow and situation.name != "torch.compile"
        marks = [pytest.mark.slow, pytest.mark.tenth] if slow else []
        found.append(pytest.param(function, situation, ends, marks=marks, id=f"{function.title}-{situation.name}"))
    return found


@pytest.mark.parametrize(("function", "situation", "ends"), params("cpu"))
def test_cell(function: Function, situation: Situation, ends: str) -> None:
    judge(function, situation, ends, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(("function", "situation", "ends"), params(backend.DEVICE))
def test_cell_on_device(function: Function, situation: Situation, ends: str) -> None:
    judge(function, situation, ends, backend.DEVICE)


def test_counts() -> None:
    """No cell is lost: the number of cells by expected outcome."""
    counts = Counter(ends for *_, ends in cells("cpu"))
    assert counts == COUNTS, counts


def main(device: str = "cpu", part: str = "") -> Counter[str]:
    """Every cell's outcome, one line a situation. part: only "fast" or "slow" cells, or words of a situation's name."""
    counts: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    found: dict[str, dict[str, str]] = {}
    for function, situation, ends in cells(device):
        if part and part != ("slow" if situation.slow else "fast") and part not in situation.name:
            continue
        begin = time.perf_counter()
        try:
            ended = judge(function, situation, ends, device)
        except Exception as error:
            ended = "WRONG"
            lines = str(error).splitlines() or [""]
            print(f"{function.title} | {situation.name} | {type(error).__name__}: {lines[0][:200]}", flush=True)
        seconds[situation.name] += time.perf_counter() - begin
        counts[ended] += 1
        found.setdefault(situation.name, {})[function.title] = ended
    marks = {"right": "+", "refused": "-", "WRONG": "!"}
    for name, row in found.items():
        line = " ".join(marks.get(row.get(f.title, ""), " ") for f in FUNCTIONS)
        print(f"{name:50} {line} {seconds[name]:6.1f} s")
    print(f"{sum(counts.values())} cells: " + ", ".join(f"{n} {word}" for word, n in sorted(counts.items())))
    return counts


if __name__ == "__main__":
    torch.set_num_threads(1)
    if ON_HOST:
        backend.install()
    sys.exit(bool(main(*sys.argv[1:])["WRONG"]))
