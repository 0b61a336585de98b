"""Queries about torch's state around a call. They use private names of torch, some with a fallback."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

is_compiling = torch.compiler.is_compiling
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
written: Callable[[Sequence[Tensor]], None] = torch._C._increment_version
grad_enabled = torch.is_grad_enabled
get_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", int)  # a torch without CUDA has neither
get_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", int)
on_gpu: Callable[[Tensor], bool] = operator.attrgetter("is_cuda")

records_ops = hasattr(getattr(torch._library, "autograd", None), "make_autograd_impl")

_tracing = torch._C._get_tracing_state
_legacy_batched = torch._C._functorch.is_legacy_batchedtensor  # of is_grads_batched
_PLAIN = (Tensor, torch.nn.Parameter)


def watched() -> bool:
    """Whether more than autograd watches a call: torch.compile, dispatch modes, forward-mode AD, torch.jit.trace."""
    return is_compiling() or dispatch_modes() > 0 or forward_ad._current_level >= 0 or _tracing() is not None


def transformed() -> bool:
    """Whether a transform of torch.func is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def plain(tensors: Mapping[str, Any]) -> bool:
    """Whether the tensors can be read from the GPU's memory directly, and only autograd watches.

    The library's ops handle tensor subclasses, torch.func's transforms, and lazy negative and conjugate bits.
    """
    for x in tensors.values():
        if type(x) not in _PLAIN or not on_gpu(x) or x.is_neg() or x.is_conj() or _legacy_batched(x):
            return False
        if x._is_zerotensor() or torch._is_functional_tensor(x):  # they have no memory
            return False
    return not watched() and not transformed()


def wants_grad(*tensors: Any) -> bool:
    """Whether autograd records a call of these tensors."""
    return grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tensors)


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


def autograd_of(op: Any, backward: Callable[..., Any], setup: Callable[..., None]) -> Callable[..., Any]:
    """The function that records an op for backward, as `torch.library.register_autograd` makes it."""
    info = torch._library.autograd.Info(backward, setup)
    found: Callable[..., Any] = torch._library.autograd.make_autograd_impl(op, info)
    return found


def guard(tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """Return a C++ function that tests whether other tensors are of the same kind; None if this torch has none.

    It compares types, dispatch keys, dtypes, devices, sizes, strides and requires_grad, but not addresses. It refuses a
    tensor that is given twice, and a nested tensor aborts the process.
    """
    guards = getattr(torch._C._dynamo.guards, "TensorGuards", None)
    if guards is None:
        return None
    check: Callable[..., bool] = guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


def memory_speed(gpu: Any) -> float:
    """TB/s of a GPU's memory with these properties, in two transfers a cycle; 0.0 if this torch does not tell."""
    clock, width = (getattr(gpu, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))  # kHz, bits
    return float(2 * clock * width / 8e9)
