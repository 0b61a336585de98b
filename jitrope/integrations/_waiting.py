"""Norms of q and k that wait for rope, so that one launch computes both: transformers' attention in eager mode.

The `forward` of a norm class is replaced. For the norms of an attention `Layer` its result is a `Pending`: views of it
wait too, our rope function (`Rope`) launches norm and rope together, and everything else computes the host's norm
first. Whether rope follows is seen in the first calls, in which the host's norm runs too. Where the norms follow rope,
our rope function launches all, and the norms return what was computed.
"""

from __future__ import annotations

import inspect
import re
import sys
import threading
import weakref
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..base.errors import InvalidInput
from ..ops.values import Norm
from ..ops.watch import saves_otherwise, transformed, watched
from . import _host
from ._host import Function
from ._norms import check_results, form_of, parameters_of
from ._pending import HOST, Later, Pending, check, real, unseen
from ._variants import State, Variant, changed, launch, names, read, result, rotate, state_of, words_of

ROPES = re.compile(r"\w*apply_\w*rotary\w*")  # the names of rope functions
NORMS = re.compile(r"(q|k|qk|query|key)_(layer)?norm")  # and of the norms of q and k in an attention
WAITS = "norms of q and k wait for rope"

_TRIES = 3  # a norm whose result did not go to rope in so many calls waits no more
_here = threading.local()


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
        """The norm of x, which may wait; or the host's."""
        if type(x) is Pending:
            if x.root.done is not None and x.step is None and x.root.waiting is self:
                return x.root.done
            x = real(x)
        if (index := getattr(x, "_jitrope_turned", None)) is not None:
            if not saves_otherwise():  # a checkpoint computes its calls again, and compares what they save
                self.layer.after[index] = self  # from the next call on, the rotation does both
        elif self.rotated or self.tries < _TRIES:
            try:
                later = Later(self, x, self.state(module, x), host)
            except InvalidInput as error:
                _host.note_unfused(HOST, error.args[0])
            else:
                if not self.rotated:  # this call shows where the host's result goes
                    self.tries += not saves_otherwise()
                    with unseen(x, later.version):
                        later.out = host(x)
                return Pending.of(later, x, later.out)
        return host(x)


# ---- rope ----------------------------------------------------------------------------------------------


class Rope:
    """A rope function that is replaced: its variant, and its launches with norms."""

    fuses = False  # whether norms may wait for it

    def __init__(self, original: Function, variant: Variant) -> None:
        self.variant, self.exact, self.names = variant, variant._replace(exact=True), names(original)
        self.calls = state_of(original)

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
            if Pending in map(type, (*arguments, *words.values())):
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
        laters = [x.root for x in heads if type(x) is Pending]
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
        for index, x in enumerate(heads):
            waiting = layer.after[index]
            if (module := waiting.module()) is None:
                raise InvalidInput(f"{waiting.name} is not there any more")
            laters.append(Later(waiting, x, waiting.state(module, x), lambda _, i=index: alone()[i]))
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


# ---- finding the norms of a model ----------------------------------------------------------------------


def ropes_of(cls: type) -> State:
    """The rope functions that a class's methods call."""
    found: list[Any] = []
    for function in map(inspect.unwrap, filter(callable, vars(cls).values())):
        if inspect.isfunction(function):
            told = inspect.getclosurevars(function).globals
            module = sys.modules.get(function.__module__)
            found += [(module, n, f) for n, f in told.items() if ROPES.fullmatch(n) and callable(f)]
    return tuple(found)


def attention(model: nn.Module) -> dict[type, list[nn.Module]]:
    """The modules of a model with a method that calls a rope function, by their classes."""
    found: dict[type, list[nn.Module]] = {}
    classes = {type(module) for module in model.modules()}
    owners = {cls: next((b for b in cls.__mro__ if b is not object and ropes_of(b)), None) for cls in classes}
    for module in model.modules():
        if (cls := owners[type(module)]) is not None:
            found.setdefault(cls, []).append(module)
    return found


def fuse(cls: type, modules: list[nn.Module], report: _host.Report) -> str:
    """Let the norms of attention modules wait for rope. Returns what was done, or why it was not."""
    places = tuple(place for place in ropes_of(cls) if place[2] in _host.placed)
    if not places:
        return "left alone: jitrope does not replace its rope function"
    forms, reasons = set(), set()
    for module in modules:
        for name, norm in module.named_children():
            if not NORMS.fullmatch(name):
                continue
            try:
                forms.add(str(form_of(norm)))
            except InvalidInput as error:
                reasons.add(error.args[0])
                continue
            layer = _layers.setdefault(module, Layer(module, places))
            layer.ropes = places
            for each, made in ((type(module), _attention), (type(norm), _norm)):
                report.replace_method(each, "forward", made, WAITS)
            if norm not in _waiting or _waiting[norm].layer is not layer:
                _waiting[norm] = Waiting(norm, name, layer)
    if not forms:
        return f"rope only: {min(reasons, default='no norm of q and k was found')}"
    for _, _, function in places:
        _host.placed[function].what.fuses = True
    return f"{WAITS} ({'; '.join(sorted(forms))})"
