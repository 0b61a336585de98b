"""Tensors that wait: the result of a host's norm, computed by our rope function, or by the host when it is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..ops.watch import same_memory, version, without_autocast, without_values
from . import _host
from ._host import Function

if TYPE_CHECKING:
    from ._waiting import Waiting

HOST = "transformers"

_VIEWS = {
    *(Tensor.transpose, Tensor.view, Tensor.reshape, Tensor.permute, Tensor.contiguous, Tensor.to),
    *(Tensor.unsqueeze, Tensor.squeeze, Tensor.flatten, Tensor.unflatten),
}
_SHAPES = {
    *(Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.device.__get__, Tensor.ndim.__get__),  # type: ignore[attr-defined]
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__),
}


class Pending(Tensor):
    """The result of a norm or of a rotation that waits, or a view of it. It has no values for code that reads memory.

    Attributes:
        root: what computes it.
        x: the same view of the source of `root`.
        made: its values, once they are computed.
        step: the Pending of which this is a view, the function that made it, and its arguments.
    """

    root: Later
    x: Tensor
    made: Tensor | None
    step: Any

    @staticmethod
    def of(root: Any, x: Tensor, made: Tensor | None = None, step: Any = None) -> Any:
        """A new one."""
        new: Any = without_values(Pending, _NOTHING) if made is None else made.as_subclass(Pending)
        new.root, new.x, new.made, new.step = root, x, made, step
        return new

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What is known without the values, and views; else the function of the values."""
        words, first = kwargs or {}, args[0] if args else None
        if type(first) is Pending:
            if func in _SHAPES:
                return func(first.x, *args[1:], **words)
            if func in _VIEWS and (view := first._view(func, args[1:], words)) is not None:
                return view
        return func(*real(args), **real(words))

    def _view(self, func: Function, args: Any, words: Any) -> Any:
        try:
            x = func(self.x, *args, **words)
        except RuntimeError:  # the result may have strides that allow it
            return None
        if x.dtype != self.x.dtype or not same_memory(x, self.x):
            return None
        made = None if self.made is None else func(self.made, *args, **words)
        return Pending.of(self.root, x, made, (self, func, args, words))


_NOTHING = torch.empty(0, device="meta")


def real(value: Any) -> Any:
    """A value, in which each Pending is its tensor."""
    if type(value) is Pending:
        value.root.used = True
        if value.made is None:
            if value.step is None:
                value.made = value.root.result()
            else:
                before, func, args, words = value.step
                value.made = func(real(before), *args, **words)
        return value.made
    if type(value) in (list, tuple):
        return type(value)([real(x) for x in value])
    return {name: real(x) for name, x in value.items()} if type(value) is dict else value


class Later:
    """What a host's function computes of x, later, as it would now: outside of autocast.

    Attributes:
        waiting: the norm.
        state: its weight, bias and eps.
        out: the function's result, once it is there.
        used: whether something has read it.
        done: the launch's result, for a norm that follows.
    """

    out: Tensor | None = None
    used = False
    done: Tensor | None = None

    def __init__(self, waiting: Waiting, x: Tensor, state: Any, function: Function) -> None:
        self.waiting, self.x, self.state, self.function = waiting, x, state, function
        self.version, self.grad = _version(x), torch.is_grad_enabled()

    def result(self) -> Tensor:
        """The function's result."""
        if self.out is None:
            which = "what goes to" if self.done is not None else "the result of"
            _host.note_unfused(HOST, f"{which} {self.waiting.name} has another use")
            check(self.x, self.version)
            with torch.set_grad_enabled(self.grad), without_autocast(self.x):
                self.out = self.function(self.x)
        return self.out


def check(x: Tensor, version: int) -> None:
    """Raise RuntimeError if x has changed since it had this version."""
    if _version(x) != version:
        hint = "call jitrope.integrations.transformers.enable with fuse_norm=False"
        raise RuntimeError(f"q or k was changed in place between its norm and rope; {hint}")


def unseen(x: Tensor, version: int) -> Any:
    """A context in which a checkpoint does not count what autograd saves of x. It compares that with later calls."""

    def unpack(saved: Tensor) -> Tensor:
        check(x, version)
        return saved

    return torch.autograd.graph.saved_tensors_hooks(Tensor.detach, unpack)  # a result itself would hold its own graph


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else version(x)
