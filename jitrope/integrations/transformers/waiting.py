"""Norms of q and k that wait for rope, so that one launch computes both: transformers' attention in eager mode.

The result of a norm of an attention `Layer` is a `Pending`: views of it wait too, our rope function (`Rope`) launches
norm and rope together, and everything else computes the host's norm first. Whether rope follows is seen in the first
calls, in which the host's norm runs too. Where the norms follow rope, our rope function launches all. v's norm does
not wait: it is a launch of its own.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import nullcontext
from functools import lru_cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ...api import prepare_qkv
from ...base.errors import InvalidInput
from ...stages.norm import Norm
from ...torch_state import same_memory, saves_otherwise, transformed, version, watched, without_autocast
from .. import _host
from .._host import Function
from .._norms import check_results, form_of, parameters_of
from .variants import State, Variant, called, changed, launch, names, read, result, rotate, words_of

HOST, WAITS = "transformers", "norms of q and k wait for rope"

_HINT = "call jitrope.integrations.transformers.enable with fuse_norm=False"
_TRIES = 3  # a norm whose result did not go to rope in so many calls waits no more
_here = threading.local()


# ---- tensors that wait --------------------------------------------------------------------------------

_VIEWS = {
    *(Tensor.transpose, Tensor.view, Tensor.reshape, Tensor.permute, Tensor.contiguous, Tensor.to),
    *(Tensor.unsqueeze, Tensor.squeeze, Tensor.flatten, Tensor.unflatten),
}
_SHAPES = {
    *(Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.device.__get__, Tensor.ndim.__get__),  # type: ignore[attr-defined]
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__),
}


class Pending(Tensor):
    """The result of a norm or of a rotation that waits, or a view of it; no code that reads memory finds its values."""

    root: Later  # computes it
    x: Tensor  # the same view of the source of `root`
    made: Tensor | None  # its values, once they are computed
    step: Any  # the Pending of which this is a view, the function that made it, and its arguments

    @staticmethod
    def of(root: Any, x: Tensor, made: Tensor | None = None, step: Any = None) -> Any:
        """A new one."""
        new: Any = nothing(x.shape, root.grad).as_subclass(Hollow) if made is None else made.as_subclass(Pending)
        new.root, new.x, new.made, new.step = root, x, made, step
        return new

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What is known without the values, and views; else the function of the values."""
        words, first = kwargs or {}, args[0] if args else None
        if isinstance(first, Pending):
            if func in _SHAPES:
                return func(first.x, *args[1:], **words)
            if func in _VIEWS and (view := first._view(func, args[1:], words)) is not None:
                return view
        return func(*real(args), **real(words))

    def _view(self, func: Function, args: Any, words: Any) -> Any:
        try:
            x = func(self.x, *args, **words)
            if x.dtype != self.x.dtype or not same_memory(x, self.x):
                return None
        except RuntimeError:  # the result may have strides that allow it, or torch.func wraps it
            return None
        made = None if self.made is None else func(self.made, *args, **words)
        return Pending.of(self.root, x, made, (self, func, args, words))


class Hollow(Pending):
    """One without values in its memory. Dynamo does not trace code with a class that has a `__torch_dispatch__`."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any) -> Any:  # type: ignore[override]
        """The function of the values, for what takes no notice of `__torch_function__`, as torch.func.vmap."""
        if any(isinstance(x, Hollow) and x.root.grad for x in args):
            raise RuntimeError(f"torch.func takes the result of a norm that waits for rope; {_HINT}")
        return func(*real(args), **real(kwargs or {}))


@lru_cache
def nothing(shape: torch.Size, grad: bool) -> Tensor:
    """Return a tensor without values. An autograd Function ignores its class; a backward there must be an error."""
    with torch.inference_mode(False):
        return torch.empty((), device="meta").expand(shape).requires_grad_(grad)


def real(value: Any) -> Any:
    """A value, in which each Pending is its tensor."""
    if isinstance(value, Pending):
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
    """What a host's function computes of x, later, as it would now: outside of autocast. state: that of its norm."""

    out: Tensor | None = None  # the function's result, once it is there
    used = False  # whether something has read it
    done: Tensor | None = None  # the launch's result, for a norm that follows

    def __init__(self, waiting: Waiting, x: Tensor, state: Any, function: Function) -> None:
        self.waiting, self.x, self.state, self.function = waiting, x, state, function
        self.version, self.grad, self.saves = _version(x), torch.is_grad_enabled(), saves_otherwise()

    def result(self) -> Tensor:
        """The function's result."""
        if self.out is None:
            which = "what goes to" if self.done is not None else "the result of"
            _host.note_unfused(HOST, f"{which} {self.waiting.name} has another use")
            check(self.x, self.version)
            # A checkpoint that begins after the norm would compute it only once, in the first of its two calls.
            apart = nullcontext() if saves_otherwise() == self.saves else unseen(self.x, self.version)
            with torch.set_grad_enabled(self.grad), without_autocast(self.x), apart:
                self.out = self.function(self.x)
        return self.out


def check(x: Tensor, version: int) -> None:
    """Raise RuntimeError if x has changed since it had this version."""
    if _version(x) != version:
        raise RuntimeError(f"q or k was changed in place between its norm and rope; {_HINT}")


def unseen(x: Tensor, version: int) -> Any:
    """A context in which a checkpoint does not count what autograd saves of x. It compares that with later calls."""

    def unpack(saved: Tensor) -> Tensor:
        check(x, version)
        return saved

    return torch.autograd.graph.saved_tensors_hooks(Tensor.detach, unpack)  # a result itself would hold its own graph


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else version(x)


# ---- norms ---------------------------------------------------------------------------------------------


class Layer:
    """An attention module whose norms may wait. ropes: its rope functions, as they were when it was enabled."""

    def __init__(self, module: nn.Module, ropes: State) -> None:
        self.ropes, self.of_host = ropes, type(module).__module__.startswith("transformers.")
        self.after: dict[int, Waiting] = {}  # the norms of the rotated tensors, by their numbers
        self.kept: dict[Any, Any] = {}


_layers: WeakKeyDictionary[nn.Module, Layer] = WeakKeyDictionary()
_waiting: WeakKeyDictionary[nn.Module, Waiting] = WeakKeyDictionary()


def _attention(theirs: Function) -> Function:
    """An attention's forward, during which our rope function knows the layer."""

    def forward(self: Any, *arguments: Any, **words: Any) -> Any:
        if torch.compiler.is_compiling() or self not in _layers:
            return theirs(self, *arguments, **words)
        before, _here.layer = getattr(_here, "layer", None), _layers[self]
        try:
            return theirs(self, *arguments, **words)
        finally:
            _here.layer = before

    return forward


def _norm(theirs: Function) -> Function:
    """A norm's forward, whose result may wait."""

    def forward(self: Any, *arguments: Any, **words: Any) -> Any:
        if torch.compiler.is_compiling() or len(arguments) != 1 or words or (waiting := _waiting.get(self)) is None:
            return theirs(self, *arguments, **words)
        return waiting.call(self, partial(theirs, self), arguments[0])

    return forward


class Waiting:
    """A norm whose result may wait for rope."""

    rotated = False  # whether rope has taken its result
    tries = 0  # calls that did not show it

    def __init__(self, module: nn.Module, name: str, layer: Layer) -> None:
        self.module, self.name, self.layer = weakref.ref(module), name, layer

    def state(self, module: nn.Module, x: Tensor) -> tuple[Any, ...]:
        """The weight, bias, form and eps for a launch. Raises InvalidInput if the host's norm must run."""
        if type(x) is not Tensor or watched() or transformed():
            raise InvalidInput("a mode of torch is on, or q is of a subclass of torch.Tensor")
        if name := changed(self.layer.ropes):
            raise InvalidInput(f"{name} was replaced after enable")
        form, weights = form_of(module), parameters_of(module)
        check_results(form, weights[0], x)
        if not self.layer.of_host and x.is_inference():
            raise InvalidInput("tensors of inference mode do not tell whether they are changed")
        return *weights, form, getattr(module, form.eps)

    def call(self, module: nn.Module, host: Function, x: Any) -> Any:
        """The norm of x, which may wait, or of v, which does not; or the host's."""
        if isinstance(x, Pending):
            root, whole, x = x.root, x.step is None, x if x.root.done is not None else real(x)
            if root.done is not None:  # rope has launched the norm of q or k, too
                at_once = whole and root.waiting is self and root.grad == torch.is_grad_enabled()
                return root.done if at_once else host(real(x))
        if (index := getattr(x, "_jitrope_turned", None)) is not None and not saves_otherwise():
            self.layer.after[index] = self  # from the next call on, the rotation does both
        if index is not None or (self.tries >= _TRIES and not self.rotated):
            return host(x)
        try:
            state = self.state(module, x)
            if self.name == "v_norm":
                out = prepare_qkv(x, None, None, norm=Norm(state[0], q_bias=state[1], **state[2].words(module)))[0]
                _host.note(HOST, "jitrope")
                return out
        except InvalidInput as error:
            _host.note_unfused(HOST, error.args[0])
            return host(x)
        later = Later(self, x, state, host)
        if not self.rotated:  # this call shows where the host's result goes
            self.tries += not later.saves  # a checkpoint computes its calls again, and compares what they save
            with unseen(x, later.version):
                later.out = host(x)
        return Pending.of(later, x, later.out)


def wait(module: nn.Module, name: str, norm: nn.Module, ropes: State, report: _host.Report) -> None:
    """Let a norm of an attention module wait for one of the rope functions that the module calls."""
    layer = _layers.setdefault(module, Layer(module, ropes))
    layer.ropes = ropes
    report.replace_method(type(module), "forward", _attention, WAITS)
    report.replace_method(type(norm), "forward", _norm, WAITS)
    if norm not in _waiting or _waiting[norm].layer is not layer:
        _waiting[norm] = Waiting(norm, name, layer)
    for _, _, function in ropes:
        _host.placed[function].what.fuses = True


# ---- rope ----------------------------------------------------------------------------------------------


class Rope:
    """A rope function that is replaced: its variant, and its launches with norms."""

    fuses = False  # whether norms may wait for it

    def __init__(self, original: Function, variant: Variant) -> None:
        self.variant, self.exact, self.names = variant, variant._replace(exact=True), names(original)
        self.calls = tuple(told for told in called(original) if told[0] is not None)

    def __str__(self) -> str:
        return str(self.variant)

    def read(self, *arguments: Any, **words: Any) -> tuple[list[Any], Any]:
        """As the function `read`. Raises InvalidInput if a function that the host's calls was replaced."""
        if name := changed(self.calls):
            raise InvalidInput(f"{name} was replaced after enable")
        return read(self.names, *arguments, **words)

    def alone(self, *arguments: Any, **words: Any) -> Any:
        """The rotation without norms. Beside fused norms it has the host's bits too."""
        heads, table = self.read(*arguments, **words)
        return result(rotate(self.exact if self.fuses else self.variant, heads, *table))

    def call(self, host: str, ours: Function, theirs: Function, *arguments: Any, **words: Any) -> Any:
        """The rotation, with the norms that wait for it; in place of `_host.take`."""
        alone = partial(_host.take, host, ours, theirs)
        if torch.compiler.is_compiling() or not self.fuses:
            return alone(*arguments, **words)
        layer = getattr(_here, "layer", None)
        try:
            if not {Pending, Hollow}.isdisjoint(map(type, (*arguments, *words.values()))):
                return self.before(*self.read(*arguments, **words))
            if layer is not None and len(layer.after) == 2:
                return self.after(layer, partial(alone, *arguments, **words), *self.read(*arguments, **words))
        except InvalidInput as error:
            _host.note_unfused(HOST, error.args[0])
        out = alone(*real(arguments), **real(words))
        for index, x in enumerate(out if type(out) is tuple else ()):
            x._jitrope_turned = index  # a norm that takes it tells its layer
        return out

    def before(self, heads: list[Any], table: Any) -> Any:
        """The rotation of tensors whose norms wait. Raises InvalidInput if they must be computed before."""
        laters = [x.root for x in heads if isinstance(x, Pending)]
        for later in laters:
            if len(laters) < len(heads) or later.done is not None or later.grad != torch.is_grad_enabled():
                raise InvalidInput("a norm of q or k does not wait")
            if later.used:
                raise InvalidInput(f"the result of {later.waiting.name} has another use")
            check(later.x, later.version)
        out = self.launch(laters, [x.x for x in heads], table, False)
        for later in laters:
            later.waiting.rotated = True
        return result(out)

    def after(self, layer: Layer, alone: Function, heads: list[Any], table: Any) -> Any:
        """The rotation and the norms that follow it. Raises InvalidInput if they must be computed after it."""
        laters = []
        for index, x in enumerate(heads if len(heads) == 2 else ()):
            waiting = layer.after[index]
            if (module := waiting.module()) is None:
                raise InvalidInput(f"{waiting.name} is not there any more")
            laters.append(Later(waiting, x, waiting.state(module, x), lambda _, i=index: alone()[i]))
        if not laters:
            raise InvalidInput("norms follow the rotation of q and k, and this is one of a tensor alone")
        for later, x in zip(laters, self.launch(laters, heads, table, True)):
            later.done = x
        return tuple(Pending.of(later, later.x) for later in laters)

    def launch(self, laters: list[Later], heads: list[Tensor], table: Any, after: bool) -> list[Tensor]:
        """All in one launch. heads: views of what the norms take. Raises InvalidInput if the norms differ."""
        words = words_of(self.exact, heads[0], *table)
        across = {_across(a.x, x, -3 if words["layout"] == "bhsd" else -2) for a, x in zip(laters, heads)}
        waiting, states = [later.waiting for later in laters], [later.state for later in laters]
        kept, key = waiting[0].layer.kept, (after, *across, *waiting)
        norm, known = kept.get(key, (None, ()))
        if norm is None or not all(a is b for old, new in zip(known, states) for a, b in zip(old, new)):
            told = [form.words(norm.module()) for norm, (_, _, form, _) in zip(waiting, states)]
            if len(across) == 2 or told[0] != told[-1]:
                raise InvalidInput("the norms of q and k differ")
            (q, q_bias, *_), (k, k_bias, *_) = (*states, (None,) * 4)[:2]
            norm = Norm(q, k, q_bias=q_bias, k_bias=k_bias, **told[0], across_heads=across.pop(), after_rope=after)
            kept[key] = norm, states
        out = launch(heads, norm, words)
        _host.note(HOST, "fused")
        return out


def _across(source: Tensor, heads: Tensor, axis: int) -> bool:
    """Whether a row of the source is all heads of a token. Raises InvalidInput if it is not one head either."""
    size, step = heads.shape[-1], source.stride(-1)
    if heads.stride(-1) == step:
        if size == source.shape[-1]:
            return False
        if size * heads.shape[axis] == source.shape[-1] and heads.stride(axis) == size * step:
            return True
    raise InvalidInput("the norm's rows are not the heads of a token")
