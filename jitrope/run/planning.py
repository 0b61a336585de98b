"""Find the kernels that calls need, on meta tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

from ..base.arguments import items, number, whole, word
from ..base.config import LAUNCHES
from ..base.spec import Spec
from ..base.views import Tensors
from ..plan.options import Options
from ..sources.operation import Operation, missing_weights
from . import launch

_planning: ContextVar[tuple[list[Spec], list[str], int, float]] = ContextVar("planning", default=([], [], 0, 0))


@contextlib.contextmanager
def planning(launches: Sequence[str] = LAUNCHES, sm_count: int = 132, memory_speed: float = 0) -> Iterator[list[Spec]]:
    """List the kernels that the calls in a `with` block need. No kernel is compiled or launched.

    The calls must be made on meta tensors.

    >>> q, k = (torch.empty(1, 4096, heads, 128, dtype=torch.bfloat16, device="meta") for heads in (32, 8))
    >>> cos, sin = torch.empty(2, 4096, 64, device="meta")
    >>> with jitrope.planning(["auto"]) as specs:
    ...     q, k = jitrope.apply_rope(q, k, cos, sin)
    >>> [spec.name for spec in specs]
    ['rope_bf16_d128_halves_forward_token_linear']

    A kernel depends on shapes, strides, dtypes and alignment, which meta tensors have too; they are aligned like fresh
    tensors. A backward in the block is also listed. Calls on other tensors run as usual and are not listed. Calls of
    `jitrope.thd`, of `jitrope.context_parallel` and of other threads are not listed either.

    Args:
        launches: the launches to plan each call for, with any number of tokens and on any GPU; ("auto",) is the one
            that a real call would use.
        sm_count: the number of multiprocessors of the GPU. The choice of "auto" depends on it.
        memory_speed: of the GPU's memory by its clock and width, in TB/s, as 3.35 of an H100 and 4.8 of an H200; 0, the
            default, counts as slow. The choice of "auto" depends on it.

    Yields:
        The list of specs, each once, in the order of the calls. It grows with each call.

    Raises:
        InvalidInput: a launch is unknown, sm_count is not a whole number of at least 1, or memory_speed is no number.
    """
    words = ("auto", *LAUNCHES)
    asked = [word("planning", "launches", x, words) for x in items("planning", "launches", launches, "a list of words")]
    specs: list[Spec] = []
    memory_speed = number("planning", "memory_speed", memory_speed)
    token = _planning.set((specs, asked, whole("planning", "sm_count", sm_count, 1), memory_speed))
    try:
        yield specs
    finally:
        _planning.reset(token)


def note(op: Operation, tensors: Tensors, options: Options) -> None:
    """Add the kernels of a call on meta tensors to the list of its `planning` block, if it is in one."""
    specs, launches, sm_count, speed = _planning.get()
    if not launches or next(iter(tensors.values())).device.type != "meta":
        return
    from ..plan import heuristics, problem

    if launches != ["auto"] and (other := op.instead(tensors, options))[0] is not op:  # for other GPUs
        note(*other)
    named = launch.with_outputs(op, {**tensors, **missing_weights(op, tensors, options)}, options)
    named = op.named(named, options)
    for asked in launches:
        # Else many tokens for an SM, with slow memory and with fast; and few.
        for each in [(sm_count, speed)] if asked == "auto" else ((0, 0.0), (0, heuristics.FAST_MEMORY), (1 << 40, 0.0)):
            found = problem.plan_call(*op.head_views(named, options), named, options._replace(launch=asked), *each)
            if found is not None and found[0].spec not in specs:
                specs.append(found[0].spec.of(op.text(tensors, options)))
