"""Tensors that a kernel needs and a call does not give. Each is made once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from .. import torch_state as watch
from ..base.layouts import LAYOUT_AXES
from ..base.views import Tensors, shaped_parts
from ..plan.options import Options
from ..stages.norm import norm_of

COUNTERS = 4096  # counters of blocks: one for each 16 blocks of a launch, and one more (`templates/block_sums.cuh`)

MOST_CONSTANTS = 4096  # of a function

CONSTANTS: set[int] = set()
"""The ids of the tensors that `constant` keeps."""

_counters: dict[tuple[torch.device, int], Tensor] = {}


def kept(make: Callable[..., Any], device: torch.device, *arguments: Any) -> Any:
    """The tensors of `make(device, *arguments)`, which all streams may read, and which stay.

    On a GPU another thread makes them: this one may allocate from a memory pool that is used again, such as that of a
    CUDA graph of torch.compile.
    """
    if device.type != "cuda":
        with torch.inference_mode(False):
            return make(device, *arguments)

    def run() -> Any:
        torch.cuda.set_device(device)  # a new thread has GPU 0, where this process may have no context
        made = make(device, *arguments)
        torch.cuda.current_stream().synchronize()
        return made

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


def constant(make: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the tensors of a function that depend only on a device and some numbers.

    Tensors made under torch.compile, a dispatch mode, a transform of torch.func, forward-mode AD, torch.jit.trace or a
    CUDA graph's capture are not kept. Graphs read those that are, so none is freed.
    """
    known: dict[tuple[Any, ...], Any] = {}

    def get(device: torch.device, *numbers: Any) -> Any:
        if watch.watched() or watch.transformed():
            return make(device, *numbers)
        key = (device, *numbers)
        if key in known:
            return known[key]
        if (device.type == "cuda" and torch.cuda.is_current_stream_capturing()) or len(known) >= MOST_CONSTANTS:
            return make(device, *numbers)
        found = known.setdefault(key, kept(make, *key))
        CONSTANTS.update(map(id, found if isinstance(found, tuple) else (found,)))
        return found

    get.cache_clear = known.clear  # type: ignore[attr-defined]
    return get


def counters(x: Tensor) -> Tensor:
    """Zeros that a kernel counts its blocks with and sets back: one tensor for a stream, or for a capture's call."""
    if x.is_meta or watch.capturing(x):
        return _zeros(x.device)
    key = (x.device, watch.get_stream(x.get_device()))
    found = _counters.get(key)
    if found is None:
        found = _counters.setdefault(key, kept(_zeros, x.device))
    return found


def _zeros(device: torch.device) -> Tensor:
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def weight_sums(tensors: Tensors, widths: dict[str, int], blocks: int) -> Tensors:
    """The gradients of the given weights and biases, and the memory of the kernel that sums them over its blocks.

    widths: the lengths of a weight of q, and of k if it has heads, in the kernel's order.
    """
    given = {name: x for name, x in tensors.items() if name.endswith(("_weight", "_bias"))}
    if not given:
        return {}
    kinds = ("weight", "bias") if any(name.endswith("_bias") for name in given) else ("weight",)
    sizes = {f"{name}_{kind}": size for kind in kinds for name, size in widths.items()}
    some, width = next(iter(given.values())), sum(sizes.values())  # all have one dtype: `checks`
    sums = some.new_empty(width) if blocks else some.new_zeros(width)
    parts = dict(zip(sizes, sums.split([*sizes.values()])))
    out = {name: parts[name] if name in parts else torch.zeros_like(x) for name, x in given.items()}
    scratch = {"block_sums": some.new_empty((blocks, width), dtype=torch.float32), "counters": counters(some)}
    return {"weight_grads": sums, **out, **scratch}


def missing_weights(tensors: Tensors, options: Options) -> Tensors:
    """Factors of one and biases of zero for missing ones if some are given, because a kernel takes all or none."""
    norm, made = norm_of(options), {}
    given = [name for name in tensors if name.endswith(("_weight", "_bias"))]
    biased = any(name.endswith("_bias") for name in given)
    if "qkv" in tensors:
        tensors = {**tensors, **shaped_parts(tensors["qkv"], options)}
    heads = {"q": "q", "k": "k", "first_q": "q", "first_k": "k", "second_q": "second_q", "second_k": "second_k"}
    for head, owner in heads.items() if given else ():
        x = tensors.get(head)
        for ending, value in (("_weight", 0 if norm.zero_centered else 1), *([("_bias", 0)] if biased else [])):
            if x is not None and owner + ending not in tensors:
                count = x.shape[-1] * (x.shape[LAYOUT_AXES[options.layout][2]] if norm.across_heads else 1)
                made[owner + ending] = filled(x.device, count, tensors[given[0]].dtype, value)
    return made


@constant
def one_row(device: torch.device, pairs: int) -> tuple[Tensor, Tensor]:
    """Cosines of one and sines of zero."""
    like = torch.empty(1, pairs, dtype=torch.float32, device=device)
    return torch.ones_like(like), torch.zeros_like(like)


@constant
def filled(device: torch.device, count: int, dtype: torch.dtype, value: float) -> Tensor:
    """So many equal numbers."""
    return torch.full((count,), value, dtype=dtype, device=device)
