"""Memory that a call writes: elements that overlap, and tensors that meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import InvalidInput


class Span(NamedTuple):
    """Where a tensor lies: its address, its axes as (size, bytes from an element to the next), bytes of an element."""

    at: int
    axes: tuple[tuple[int, int], ...]
    item: int

    @property
    def extent(self) -> int:
        """Bytes from the first to the last element."""
        reach = sum((size - 1) * step for size, step in self.axes)
        return reach + self.item if all(size for size, _ in self.axes) else 0


def span(x: Tensor) -> Span:
    item = x.element_size()
    return Span(x.data_ptr(), tuple([(size, stride * item) for size, stride in zip(x.shape, x.stride())]), item)


def overlaps_itself(x: Tensor) -> bool:
    """Whether two elements share memory, as in an expanded tensor or in overlapping windows.

    A compiler's symbols show only expanded axes.
    """
    axes = [(stride, size) for size, stride in zip(x.shape, x.stride()) if size > 1]
    if any(isinstance(number, torch.SymInt) for axis in axes for number in axis):
        return any(isinstance(stride, int) and stride == 0 for stride, _ in axes)
    ranges = {stride: (1 - size, size - 1) for stride, size in axes}
    return x.numel() > 0 and (0 in ranges or len(ranges) < len(axes) or _reaches(0, ranges, moved=True))


def meet(a: Span, b: Span) -> bool:
    """Whether a and b share a byte."""
    distance = b.at - a.at
    ranges: dict[int, tuple[int, int]] = {}
    for x, sign in ((a, 1), (b, -1)):
        for count, step in ((x.item, 1), *x.axes):
            ends = (0, sign * (count - 1))
            low, high = ranges.get(step, (0, 0))
            ranges[step] = (low + min(ends), high + max(ends))
    return a.extent > 0 and b.extent > 0 and -b.extent < distance < a.extent and _reaches(distance, ranges)


def _reaches(target: int, ranges: dict[int, tuple[int, int]], moved: bool = False) -> bool:
    """Whether steps, repeated within their ranges, can add up to the target; moved: not all zero times."""
    if not any(ranges):  # steps of 0 lead nowhere
        return target == 0 and not moved
    step = max(ranges)
    (low, high), rest = ranges[step], {x: ends for x, ends in ranges.items() if x != step}
    least, most = (sum(x * ends[n] for x, ends in rest.items()) for n in (0, 1))
    times = range(max(low, -((most - target) // step)), min(high, (target - least) // step) + 1)
    return any(_reaches(target - step * n, rest, moved and n == 0) for n in times)


def refuse_meeting(name: str, spans: Mapping[str, Span], written: Sequence[str], labels: Mapping[str, str]) -> None:
    """Refuse memory that one tensor writes and another reads or writes. labels: users' names, which may be equal."""
    for n, label in enumerate(written):
        for other, x in spans.items():
            if other not in written[: n + 1] and meet(spans[label], x):
                shared = f"{labels.get(label, label)} and {labels.get(other, other)} share memory, which is written"
                raise InvalidInput(f"{name}: {shared}; pass tensors that do not overlap")
