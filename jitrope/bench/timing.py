"""How `jitrope bench` times: GPU time by CUDA-graph replay, host time by a loop, medians of both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Step = Callable[[Any], Any]
"""Rotates one tensor."""

COLD_BYTES = 400 << 20
"""What a round of cold calls touches: several times any L2."""


def gpu_time(calls: Sequence[Callable[[], Any]], repeats: int = 30, calls_per_graph: int = 0) -> float:
    """Microseconds a call: one CUDA graph goes through `calls`, and is replayed.

    Give as many calls as there are copies of the inputs; with one call its inputs stay in L2. What
    a call returns is kept until the graph is captured, so that no call writes where another did.
    """
    for call in calls:
        call()
    forget_l2()
    rounds = max(1, -(-calls_per_graph // len(calls)))
    graph = torch.cuda.CUDAGraph()
    kept = []
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            kept += [call() for call in calls]
    times = []
    for _ in range(3):
        graph.replay()
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (rounds * len(calls)))
    del kept
    return float(statistics.median(times))


def median_of_rounds(measured: Mapping[str, Callable[[], float]], rounds: int = 3) -> dict[str, float]:
    """The median of each, measured in rounds, so that what the clocks do meets everyone."""
    times = [{label: measure() for label, measure in measured.items()} for _ in range(rounds)]
    return {label: statistics.median(each[label] for each in times) for label in measured}


def forget_l2() -> None:
    """Let ordinary traffic push out what the one before asked L2 to keep.

    Without it Liger ran 4 % faster behind torch.compile, whose kernels keep what they broadcast, than
    behind eager torch.
    """
    buffer = torch.zeros(64 << 20, device="cuda")
    for _ in range(20):
        buffer.add_(1)
    torch.cuda.synchronize()


def stream_time(calls: Sequence[Callable[[], Any]], repeats: int = 10) -> float:
    """Microseconds a call, launched one after the other; means nothing for calls shorter than a launch."""
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for call in [*calls] * 4:
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (4 * len(calls)))
    return float(statistics.median(times))


def turn_by_turn(calls: dict[str, Callable[[], Any]], rounds: int = 15) -> dict[str, float]:
    """Median microseconds of long calls, one of each in every round, so that the clocks treat them alike.

    Launched on the stream, behind a wait in which the host gets ahead; for calls of many kernels, whose
    matrix products heat the GPU: measured one after the other, the last comes out 5 % slower.
    """
    for call in calls.values():
        call()
        call()
    times: dict[str, list[float]] = {label: [] for label in calls}
    for _ in range(rounds):
        for label, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(2_000_000)  # cycles, about a millisecond
            start.record()
            call()
            end.record()
            end.synchronize()
            times[label].append(start.elapsed_time(end) * 1e3)
    return {label: statistics.median(values) for label, values in times.items()}


def cold_copies(bytes_a_call: int, at_least: int = 2, at_most: int = 64) -> int:
    """How many copies of a call's inputs make every call find a cold L2."""
    return max(at_least, min(at_most, -(-COLD_BYTES // max(1, bytes_a_call))))


def host_time(call: Callable[[], Any], count: int = 300, repeats: int = 15) -> float:
    """Microseconds of host time to enqueue one call; the GPU is waited for between rounds."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        times.append((time.perf_counter() - start) * 1e6 / count)
    torch.cuda.synchronize()
    return statistics.median(times)


def train_step(call: Step, x: torch.Tensor, grad: torch.Tensor) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """(forward alone, forward and backward) of a differentiable call on x, with this gradient of its output.

    A call that returns x's heads, the second axis from the end, in parts gets its parts of the gradient.
    """
    leaf = x.detach().requires_grad_()
    with torch.no_grad():
        out = call(x)
    grads = grad if isinstance(out, torch.Tensor) else grad.split([part.shape[-2] for part in out], -2)
    del out

    def forward() -> Any:
        with torch.no_grad():
            return call(x)

    return forward, lambda: torch.autograd.grad(call(leaf), leaf, grads)


def copy_calls(bytes_moved: int, copies: int) -> list[Callable[[], Any]]:
    """torch's `y.copy_(x)` that reads and writes so many bytes in all, over as many buffers."""
    count = bytes_moved // 4
    x, y = torch.randn(copies, 2, count, device="cuda", dtype=torch.bfloat16).unbind(1)
    return [lambda i=i: y[i].copy_(x[i]) for i in range(copies)]  # type: ignore[misc]


def copy_time(calls: list[Callable[[], Any]], calls_per_graph: int) -> float:
    """Microseconds of a copy: the faster of a graph's replay and plain launches.

    In a graph a copy of 512 MiB is a memcpy node, which takes 1.2 x what the same copy takes on a
    stream.
    """
    return min(gpu_time(calls, calls_per_graph=calls_per_graph), stream_time(calls))
