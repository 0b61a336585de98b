"""How everything is timed: a `Case`, and `measure`.

GPU time is that of a CUDA graph that goes through many calls; host time that of a loop. Calls are cold, with inputs of
their own that together exceed any L2, or hot, with the same inputs again and again: a `Case` says which. Beside the
calls runs COPY, torch's own copy of as many bytes. All of a case are timed in rounds, one after the other in each, and
the median of the rounds counts, so that whatever the clocks do meets all of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from jitrope.base.config import log

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COPY = "COPY"
COLD_BYTES = 1 << 30
"""The calls of a cold graph move at least so much before one of them meets its inputs again: several times any L2."""
GRAPH_BYTES = 4 << 30
"""The calls of a graph return at most so much, which is kept until it is captured; a single call may return more."""
ROUNDS = 3

Call = Callable[[Any], Any]
"""Takes one set of a case's inputs."""
T = TypeVar("T")


@dataclass
class Case:
    """Calls that do the same, and copies of the bytes that they must move.

    Attributes:
        inputs: makes the inputs of a call, a NamedTuple; each time others.
        ours, peers: label -> call. A peer that refuses these inputs is left out, and named on stderr.
        moved: label of a copy -> bytes that a call reads and writes.
        beside: label of a call -> the copy beside it, where that is not the first.
        hot: every call has the same inputs, in L2; otherwise each finds a cold one.
        plain: label of ours -> plain torch that must give the same: the same bits, or within `tolerance`
            (relative, absolute). `written` are the fields of the inputs that are compared too.
        sets: cold calls have at least so many sets of inputs; more than 1 where L2 could keep a large table.
    """

    inputs: Callable[[], Any]
    ours: Mapping[str, Call]
    moved: Mapping[str, int]
    peers: Mapping[str, Call] = field(default_factory=dict)
    beside: Mapping[str, str] = field(default_factory=dict)
    hot: bool = False
    plain: Mapping[str, Call] = field(default_factory=dict)
    written: Sequence[str] = ()
    tolerance: tuple[float, float] = (0.0, 0.0)
    sets: int = 1


class Times(NamedTuple):
    """Microseconds of a call; of its backward, which is `both` less `forward`; of both."""

    forward: float
    backward: float = 0.0
    both: float = 0.0


def measure(case: Case, trained: Sequence[str] = ()) -> dict[str, Times]:
    """The times of a case's copies and calls, by label.

    trained: fields of the inputs that get gradients; without any there is no backward. A copy stands for either pass.
    """
    torch._dynamo.reset()  # a compiled function per shape, as a model would have
    largest = max(case.moved.values())
    copies = 1 if case.hot else max(case.sets, cold_copies(largest))
    a_graph = max(1, min(200 if case.hot else 12, GRAPH_BYTES // largest))
    sets = [case.inputs() for _ in range(copies)]
    agree(case, sets[0])
    timed: dict[str, Callable[[], Times]] = {}
    for label, size in case.moved.items():
        timed[label] = partial(_time_copy, copy_calls(size, copies), a_graph)
    for label, call in {**case.ours, **usable(case.peers, sets[0])}.items():
        timed[label] = partial(_time, call, sets, trained, a_graph)
    return in_rounds(timed, lambda rounds: Times(*map(statistics.median, zip(*rounds))))


def rows(us: Mapping[str, float], bytes_moved: int, **head: Any) -> list[dict[str, Any]]:
    """A row for each time, with that time over COPY's and the bytes a second."""
    return [{**head, "by": by, "us": t, "x COPY": t / us[COPY], "TB/s": bytes_moved / t / 1e6} for by, t in us.items()]


def cold_copies(bytes_a_call: int) -> int:
    """How many sets of inputs make every call find a cold L2."""
    return max(1, min(64, -(-COLD_BYTES // bytes_a_call))) if DEVICE == "cuda" else 1


def in_rounds(
    timed: Mapping[str, Callable[[], T]], middle: Callable[[Sequence[T]], Any] = statistics.median, rounds: int = ROUNDS
) -> dict[str, Any]:
    """The median of each, measured in rounds."""
    found = [{label: time_it() for label, time_it in timed.items()} for _ in range(rounds)]
    return {label: middle([each[label] for each in found]) for label in timed}


def usable(peers: Mapping[str, Call], inputs: Any) -> dict[str, Call]:
    """The peers that take these inputs; the others are named on stderr."""
    found = {}
    for label, call in peers.items():
        try:
            call(inputs)
            _synchronize()
        except RuntimeError as error:
            log.warning("%s is left out of this row: %s", label, error)
        else:
            found[label] = call
    return found


@torch.no_grad()
def agree(case: Case, inputs: Any) -> None:
    """Each of ours gives what plain torch gives."""
    for label, plain in case.plain.items():
        seen = []
        for call in (case.ours[label], plain):
            mine = deepcopy(inputs)  # tensors within values too
            seen.append(tree_leaves([call(mine), [getattr(mine, name) for name in case.written]]))
        for got, want in zip(*seen, strict=True):
            if any(case.tolerance):
                rtol, atol = case.tolerance
                torch.testing.assert_close(got.float(), want.float(), rtol=rtol, atol=atol)
            else:
                assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), f"{label} differs from plain torch"


# ---- one time --------------------------------------------------------------------------------------------


def gpu_time(calls: Sequence[Callable[[], Any]], a_graph: int = 12, repeats: int = 20) -> float:
    """Microseconds a call: one CUDA graph goes through `calls`, at least `a_graph` of them, and is replayed.

    The results of all calls are kept until the graph is captured, so that no call writes where another did. Without a
    GPU it is the host's time of one call, which says nothing.
    """
    for call in calls:
        call()
    if DEVICE != "cuda":
        return host_time(calls[0], 1, 1)
    forget_l2()
    rounds = max(1, -(-a_graph // len(calls)))
    graph, kept = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            kept += [call() for call in calls]
    for _ in range(3):
        graph.replay()
    return statistics.median(_between_events(graph.replay) for _ in range(repeats)) / (rounds * len(calls))


def _between_events(call: Callable[[], Any], wait: int = 0) -> float:
    """Microseconds of the stream's work on a call; `wait`: cycles before it, in which the host gets ahead."""
    cuda: Any = torch.cuda
    start, end = (cuda.Event(enable_timing=True) for _ in range(2))
    if wait:
        cuda._sleep(wait)
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def forget_l2() -> None:
    """Let ordinary traffic push out what the one before asked L2 to keep.

    Without it Liger ran 4 % faster behind torch.compile, whose kernels keep their tables, than behind eager torch.
    """
    buffer = torch.zeros(64 << 20, device=DEVICE)
    for _ in range(20):
        buffer.add_(1)
    _synchronize()


def stream_time(calls: Sequence[Callable[[], Any]], repeats: int = 10) -> float:
    """Microseconds a call, launched one after the other; means nothing for calls shorter than a launch."""
    if DEVICE != "cuda":
        return host_time(calls[0], 1, 1)
    times = [_between_events(lambda: [call() for call in [*calls] * 4]) for _ in range(repeats)]
    return statistics.median(times) / (4 * len(calls))


def turn_by_turn(calls: Mapping[str, Callable[[], Any]], rounds: int = 15) -> dict[str, float]:
    """Median microseconds of long calls of many kernels, one of each in every round.

    They are launched on the stream, behind a wait of about a millisecond. Matrix products heat the GPU: measured one
    after the other, the last comes out 5 % slower.
    """
    for call in [*calls.values()] * 2:
        call()
    if DEVICE != "cuda":
        return in_rounds({label: partial(host_time, call, 1, 1) for label, call in calls.items()}, rounds=1)
    return in_rounds({label: partial(_between_events, call, 2_000_000) for label, call in calls.items()}, rounds=rounds)


def host_time(call: Callable[[], Any], count: int = 300, repeats: int = 5) -> float:
    """Microseconds of host time to enqueue one call; the GPU is waited for between repeats."""
    times = []
    for _ in range(repeats):
        _synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        times.append((time.perf_counter() - start) * 1e6 / count)
    _synchronize()
    return statistics.median(times)


def host_times(
    calls: Mapping[str, Callable[[], Any]], recorded: Collection[str] = (), count: int = 300
) -> dict[str, float]:
    """`host_time` of each, in rounds; autograd is on for the labels in `recorded` alone."""

    def one(label: str, count: int, repeats: int) -> float:
        with torch.set_grad_enabled(label in recorded):
            return host_time(calls[label], count, repeats)

    count, repeats = (count, 5) if DEVICE == "cuda" else (1, 1)
    for label in calls:
        one(label, 1, 1)
    return in_rounds({label: partial(one, label, count, repeats) for label in calls})


def _synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def copy_calls(bytes_moved: int, copies: int) -> list[Callable[[], Any]]:
    """torch's `y.copy_(x)` that reads and writes so many bytes in all, over as many buffers."""
    x, y = bf16(copies, 2, bytes_moved // 4).unbind(1)
    return [partial(y[i].copy_, x[i]) for i in range(copies)]


def _time_copy(calls: Sequence[Callable[[], Any]], a_graph: int) -> Times:
    """The faster of a graph's replay and plain launches: in a graph a copy of 512 MiB takes 1.2 x as long."""
    us = min(gpu_time(calls, a_graph), stream_time(calls))
    return Times(us, us, 2 * us)


def _time(call: Call, sets: Sequence[Any], trained: Sequence[str], a_graph: int) -> Times:
    with torch.no_grad():
        forward = gpu_time([partial(call, each) for each in sets], a_graph)
    if not trained:
        return Times(forward)
    both = gpu_time([train_step(call, each, trained) for each in sets], a_graph)
    return Times(forward, both - forward, both)


def train_step(call: Call, inputs: Any, trained: Sequence[str]) -> Callable[[], Any]:
    """Forward and backward of a call, for the gradients of these fields of its inputs."""
    leaves = [getattr(inputs, name).detach().requires_grad_() for name in trained]
    inputs = inputs._replace(**dict(zip(trained, leaves)))
    with torch.no_grad():
        grads = [torch.randn_like(y) for y in tree_leaves(call(inputs))]
    return lambda: torch.autograd.grad(tree_leaves(call(inputs)), leaves, grads)


# ---- inputs of several benchmarks ------------------------------------------------------------------------


def bf16(*shape: int) -> Tensor:
    """Random numbers."""
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def angles(rows: int, head_dim: int) -> Tensor:
    """Half-width angles (rows, head_dim / 2) of base 10000."""
    theta = 10000 ** (-torch.arange(head_dim // 2, device=DEVICE) / (head_dim // 2))
    return torch.outer(torch.arange(rows, device=DEVICE), theta)


def twice(table: Tensor) -> Tensor:
    """A half-width table as a full-width one, halves."""
    return torch.cat((table, table), -1)
