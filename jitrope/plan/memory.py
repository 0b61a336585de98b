"""Memory that a call writes: elements that overlap, and tensors that meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from ..base.errors import InvalidInput


class Span(NamedTuple):
    """Where a tensor lies: its address, its axes as (size, bytes from an element to the next), bytes of an element."""

    at: int
    axes: tuple[tuple[int, int], ...]
    item: int

    @property
    def extent(self) -> int:
        """Bytes from the first to the last element."""
        if any(size == 0 for size, _ in self.axes):
            return 0
        return sum((size - 1) * step for size, step in self.axes) + self.item


def span(x: Tensor) -> Span:
    item = x.element_size()
    return Span(x.data_ptr(), tuple([(size, stride * item) for size, stride in zip(x.shape, x.stride())]), item)


def overlaps_itself(x: Tensor) -> bool:
    """Whether two elements share memory, as in an expanded tensor or in overlapping windows."""
    axes = sorted((stride, size) for size, stride in zip(x.shape, x.stride()) if size > 1)
    if x.numel() == 0 or not axes:
        return False
    if axes[0][0] == 0:  # expanded
        return True
    past = [sum((size - 1) * stride for stride, size in axes[:n]) for n in range(len(axes))]
    if all(stride > reach for (stride, _), reach in zip(axes, past)):  # each axis steps over all smaller ones
        return False
    steps = [stride for stride, _ in axes]
    return len(set(steps)) < len(steps) or _reaches(0, {stride: (1 - size, size - 1) for stride, size in axes}, True)


def meet(a: Span, b: Span) -> bool:
    """Whether a and b share a byte."""
    distance = b.at - a.at
    if not a.extent or not b.extent or not -b.extent < distance < a.extent:
        return False
    ranges: dict[int, tuple[int, int]] = {}
    for x, sign in ((a, 1), (b, -1)):
        for count, step in ((x.item, 1), *x.axes):
            low, high = ranges.get(step, (0, 0))
            ranges[step] = (low - (count - 1), high) if sign < 0 else (low, high + count - 1)
    return _reaches(distance, ranges)


def _reaches(target: int, ranges: dict[int, tuple[int, int]], moved: bool = False) -> bool:
    """Whether steps, repeated within their ranges, can add up to the target; moved: not all zero times."""
    axes = sorted(((step, low, high) for step, (low, high) in ranges.items() if low < high and step), reverse=True)
    rest = [
        (sum(s * low for s, low, _ in axes[n:]), sum(s * high for s, _, high in axes[n:])) for n in range(len(axes) + 1)
    ]

    def search(n: int, left: int, still: bool) -> bool:
        if n == len(axes):
            return left == 0 and not still
        step, low, high = axes[n]
        first, last = -((rest[n + 1][1] - left) // step), (left - rest[n + 1][0]) // step
        return any(
            search(n + 1, left - step * x, still and x == 0) for x in range(max(low, first), min(high, last) + 1)
        )

    return search(0, target, moved)


def refuse_meeting(name: str, spans: Mapping[str, Span], written: Sequence[str]) -> None:
    """Refuse memory that one tensor writes and another reads or writes."""
    for n, label in enumerate(written):
        for other, x in spans.items():
            if other not in written[: n + 1] and meet(spans[label], x):
                raise InvalidInput(
                    f"{name}: {label} and {other} share memory, which is written; pass tensors that do not overlap"
                )
