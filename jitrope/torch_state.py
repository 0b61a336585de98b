"""Queries about torch's state around a call, and torch's private names, with a fallback where torch has one.

Some files have their own: `dispatch` and `public`, because a function would take time in each call,
`context_parallel/backends.py`, because the ops of attention have no public names, and `integrations`, which read the
hooks of a host's modules.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad, graph

Function = TypeVar("Function", bound=Callable[..., Any])

is_traced = torch.compiler.is_dynamo_compiling  # by Dynamo, line by line
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
outside_modes: Callable[[], AbstractContextManager[Any]] = torch.utils._python_dispatch._disable_current_modes
written: Callable[[Sequence[Tensor]], None] = getattr(torch._C, "_increment_version", graph.increment_version)
tracing = getattr(torch._C, "_get_tracing_state", torch.jit.is_tracing)  # type: ignore[attr-defined]
grad_enabled = torch.is_grad_enabled
get_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", int)  # a torch without CUDA has neither
get_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", int)
on_gpu: Callable[[Tensor], bool] = operator.attrgetter("is_cuda")
is_view: Callable[[Tensor], bool] = operator.methodcaller("_is_view")
collectives = torch.ops._c10d_functional
own_ops: Any = getattr(torch.ops, __name__.split(".")[0])  # "jitrope", or the name under which a loader imports a copy
is_zero: Callable[[Tensor], bool] = operator.methodcaller("_is_zerotensor")  # lazily: it has no memory
version: Callable[[Tensor], int] = operator.attrgetter("_version")  # counts the writes to a tensor

is_batched: Callable[[Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor  # of is_grads_batched
_PLAIN = (Tensor, torch.nn.Parameter)


def is_compiling() -> bool:
    """Whether torch compiles. While it decomposes an op, torch before 2.12 only has a context that says so."""
    return torch.compiler.is_compiling() or torch._guards.TracingContext.try_get() is not None


def watched() -> bool:
    """Whether more than autograd watches a call: torch.compile, dispatch modes, forward-mode AD, torch.jit.trace."""
    return is_compiling() or dispatch_modes() > 0 or forward_ad._current_level >= 0 or bool(tracing())


def transformed() -> bool:
    """Whether a transform of torch.func is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def saves_otherwise() -> Any:
    """The hooks, if any, that handle what autograd saves, as a checkpoint does, which compares it with later calls."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return (grad_enabled() and object()) if top is None else top(True)  # torch 2.6 does not tell; nothing equals it


def transforms() -> list[str]:
    """The active transforms of torch.func, such as "vmap"."""
    return [entry.key().name.lower() for entry in torch._C._functorch.get_interpreter_stack() or ()]


def has_tangent(tensors: Iterable[Tensor]) -> bool:
    """Whether forward-mode AD follows one of the tensors."""
    return forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def same_memory(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are views of one piece of memory, or of one meta tensor."""
    return bool(x.untyped_storage()._cdata == y.untyped_storage()._cdata)


def not_writable(x: Tensor) -> str | None:
    """The kind of x, which requires a gradient, if autograd does not let a call write it: a leaf, or some views."""
    if x.is_leaf or (is_view(x) and x._base.is_leaf):  # type: ignore[union-attr]
        return "a leaf"
    made_by = getattr(torch._C._autograd, "_get_creation_meta", None)
    if made_by and is_view(x) and made_by(x) != torch._C._autograd.CreationMeta.DEFAULT:
        return "a view by unbind, split or chunk, or made under no_grad"
    return None


def batch_level(x: Tensor) -> int:
    """The level of a batch of `is_grads_batched`, which torch tells only to the thread that began the backward."""
    return next(level for level in range(1, 65) if not is_batched(with_batch(x, level)))


def with_batch(x: Tensor, level: int) -> Tensor:
    """A tensor of a batch with the batch as its first axis."""
    return torch._remove_batch_dim(x, level, 1, 0)


def without_batch(x: Tensor, level: int) -> Tensor:
    """The inverse of `with_batch`."""
    return torch._add_batch_dim(x, 0, level)


def plain(tensors: Mapping[str, Any]) -> bool:
    """Whether the tensors can be read from the memory of the GPU or the CPU directly, and only autograd watches.

    The library's ops handle tensor subclasses, torch.func's transforms, and lazy negative and conjugate bits.
    """
    for x in tensors.values():
        if type(x) not in _PLAIN or x.is_meta or x.is_neg() or x.is_conj() or is_batched(x):
            return False
        if is_zero(x) or torch._is_functional_tensor(x):  # they have no memory
            return False
    return not watched() and not transformed()


def wants_grad(*tensors: Any) -> bool:
    """Whether autograd records a call of these tensors."""
    return grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tensors)


def in_autocast(x: Tensor) -> bool:
    """Whether autocast is on for x's device. The meta device has none."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """A context without autocast on x's device."""
    return torch.autocast(x.device.type, enabled=False) if in_autocast(x) else nullcontext()


def hooks_of_all() -> bool:
    """Whether a hook of every module is registered."""
    own = torch.nn.modules.module
    forward = own._global_forward_hooks or own._global_forward_pre_hooks
    return bool(forward or own._global_backward_hooks or own._global_backward_pre_hooks)


def sharded(tensors: Iterable[Any]) -> bool:
    """Whether one of the tensors is a DTensor, found without importing the class."""
    return any(type(x) is not Tensor and hasattr(x, "device_mesh") for x in tensors)


def capturing(x: Tensor) -> bool:
    """Whether x is on a GPU and a CUDA graph is being captured on the current stream."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """The C++ `apply` of an autograd function. The Python one first checks for torch.func's transforms."""
    found: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return found


def constant(function: Function) -> Function:
    """Mark a function of plain values, which Dynamo then calls and does not trace.

    torch.compiler's decorator does the same, but imports Dynamo, which takes a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def autograd_of(op: Any, backward: Callable[..., Any], setup: Callable[..., None]) -> Any:
    """The function that records an op for backward, as `torch.library.register_autograd` makes it."""
    return torch._library.autograd.make_autograd_impl(op, torch._library.autograd.Info(backward, setup))


def guard(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Return a C++ function that tests whether other tensors are of the same kind.

    It compares types, dispatch keys, dtypes, devices, sizes, strides and requires_grad, but not addresses. It refuses a
    tensor that is given twice, and a nested tensor aborts the process.
    """
    guards = torch._C._dynamo.guards.TensorGuards
    check: Callable[..., bool] = guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


@constant
def wgmma_count(device: torch.device) -> int:
    """The multiprocessors of a GPU with the tensor cores' instructions of sm_90, which later ones have not, else 0."""
    if device.type != "cuda":
        return 132 if device.type == "meta" else 0
    gpu = torch.cuda.get_device_properties(device)
    return gpu.multi_processor_count if (gpu.major, gpu.minor) == (9, 0) else 0


def memory_speed(gpu: Any) -> float:
    """TB/s of a GPU's memory with these properties, in two transfers a cycle; 0.0 if this torch does not tell."""
    clock, width = (getattr(gpu, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))  # kHz, bits
    return float(2 * clock * width / 8e9)
