"""Find the kernels that calls need, on meta tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

from ..base.arguments import items, whole, word
from ..base.config import LAUNCHES
from ..base.spec import Spec
from ..base.views import Tensors
from ..plan.options import Options
from ..sources.operation import Operation, missing_weights
from . import launch

_planning: ContextVar[tuple[list[Spec], list[str], int]] = ContextVar("planning", default=([], [], 0))


@contextlib.contextmanager
def planning(launches: Sequence[str] = LAUNCHES, sm_count: int = 132) -> Iterator[list[Spec]]:
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
        launches: the launches to plan each call for, with any number of tokens; ("auto",) is the one that a real call
            would use. Where a kernel depends on how fast the GPU's memory is, both are listed.
        sm_count: the number of multiprocessors of the GPU. The choice of "auto" depends on it.

    Yields:
        The list of specs, each once, in the order of the calls. It grows with each call.

    Raises:
        InvalidInput: a launch is unknown, or sm_count is not a whole number of at least 1.
    """
    words = ("auto", *LAUNCHES)
    asked = [word("planning", "launches", x, words) for x in items("planning", "launches", launches, "a list of words")]
    specs: list[Spec] = []
    token = _planning.set((specs, asked, whole("planning", "sm_count", sm_count, 1)))
    try:
        yield specs
    finally:
        _planning.reset(token)


def note(op: Operation, tensors: Tensors, options: Options) -> None:
    """Add the kernels of a call on meta tensors to the list of its `planning` block, if it is in one."""
    specs, launches, sm_count = _planning.get()
    if next(iter(tensors.values())).device.type != "meta":
        return
    from ..plan import heuristics, problem

    named = launch.with_outputs(op, {**tensors, **missing_weights(tensors, options)}, options)
    for asked in launches:
        few, many = (sm_count, sm_count) if asked == "auto" else (1 << 20, 0)  # as for few and for many tokens on an SM
        for gpu in ((many, 0.0), (many, heuristics.FAST_MEMORY), (few, 0.0)):
            found = problem.plan_call(*op.head_views(named, options), named, options._replace(launch=asked), *gpu)
            if found is not None and found[0].spec not in specs:
                specs.append(found[0].spec.of(op.text(tensors, options)))
