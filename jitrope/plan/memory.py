"""Memory that a call writes: elements that overlap, and tensors that meet."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..base.errors import InvalidInput


def extent(x: Tensor) -> int:
    """Bytes from the first to the last element."""
    if x.numel() == 0:
        return 0
    return (sum((size - 1) * stride for size, stride in zip(x.shape, x.stride())) + 1) * x.element_size()


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


def meet(a: Tensor, b: Tensor) -> bool:
    """Whether a and b share a byte."""
    distance = b.data_ptr() - a.data_ptr()
    if a.numel() == 0 or b.numel() == 0 or not -extent(b) < distance < extent(a):
        return False
    ranges: dict[int, tuple[int, int]] = {}
    for x, sign in ((a, 1), (b, -1)):
        size = x.element_size()
        for step, count in ((1, size), *((stride * size, n) for n, stride in zip(x.shape, x.stride()))):
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


def refuse_meeting(name: str, tensors: dict[str, Tensor], written: Sequence[str]) -> None:
    """Refuse memory that one tensor writes and another reads or writes."""
    for n, label in enumerate(written):
        for other, x in tensors.items():
            if other not in written[: n + 1] and meet(tensors[label], x):
                raise InvalidInput(
                    f"{name}: {label} and {other} share memory, which is written; pass tensors that do not overlap"
                )
