"""Norms of q and k that wait for rope, so that one launch computes both: transformers' attention in eager mode.

The `forward` of a norm class is replaced. For the norms of an attention `Layer` its result is a `Pending`: views of it
wait too, our rope function (`Rope`) launches norm and rope together, and everything else computes the host's norm
first. Whether rope follows is seen in the first calls, in which the host's norm runs too. Where the norms follow rope,
our rope function launches all, and the norms return what was computed.
"""

from __future__ import annotations

import inspect
import re
import threading
import weakref
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..api import prepare_qkv
from ..base.errors import InvalidInput
from ..ops.values import Norm
from ..ops.watch import in_autocast, saves_otherwise, transformed, watched, without_autocast
from . import _host
from ._host import Function
from ._norms import PROBE_DIM, NormForm, called, check_results, on_its_own, parameters_of, recognise, small
from ._variants import OF_K, OF_Q, Variant, equal, names, probe, read, replaced, words_of

NAMES = re.compile(r"\w*apply_\w*rotary\w*")  # the names of rope functions
HOST = "transformers"
FUSED = "norm and rope fused"
APART = "rope only: its norms are not directly before or after rope"

_TRIES = 3  # a norm whose result did not go to rope in so many calls waits no more
_here = threading.local()


# ---- tensors that wait ---------------------------------------------------------------------------------

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

    root: Norming | Turned
    x: Tensor
    made: Tensor | None
    step: Any

    @staticmethod
    def of(root: Any, x: Tensor, made: Tensor | None = None, step: Any = None) -> Any:
        """A new one."""
        new: Any = Tensor._make_subclass(Pending, _NOTHING) if made is None else made.as_subclass(Pending)
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
        if x.dtype != self.x.dtype or x.untyped_storage()._cdata != self.x.untyped_storage()._cdata:
            return None
        made = None if self.made is None else func(self.made, *args, **words)
        return Pending.of(self.root, x, made, (self, func, args, words))


_NOTHING = torch.empty(0, device="meta")


def real(value: Any) -> Any:
    """A value, in which each Pending is its tensor."""
    if type(value) is Pending:
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


class Source:
    """A tensor that is read later, and the modes of the call."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.grad, self.cast = x, torch.is_grad_enabled(), in_autocast(x)
        self.version = None if x.is_inference() else x._version

    def check(self) -> None:
        """Raise RuntimeError if the tensor has changed."""
        if self.version is not None and self.x._version != self.version:
            hint = "call jitrope.integrations.transformers.enable with fuse_norm=False"
            raise RuntimeError(f"q or k was changed in place between its norm and rope; {hint}")

    def late(self, function: Function, *arguments: Any) -> Any:
        """The result of a host's function, in the modes of the call."""
        self.check()
        with torch.set_grad_enabled(self.grad), without_autocast(_NOTHING if self.cast else self.x):
            return function(*arguments)


class Norming(Source):
    """A call of a norm whose result waits. out: the result, if it is known, and its version."""

    def __init__(self, waiting: Waiting, module: nn.Module, host: Function, x: Tensor, weights: Any) -> None:
        super().__init__(x)
        self.waiting, self.module, self.host, self.weights = waiting, module, host, weights
        self.out: Source | None = None

    def result(self) -> Tensor:
        """The host's result."""
        if self.out is None:
            _host.note_unfused(HOST, f"{self.waiting.name} has another use than rope")
            self.out = Source(self.late(self.host, self.module, self.x))
        return self.out.x


class _Late(torch.autograd.Function):
    """The host's norm, which saves no tensor for backward, but calls the norm again.

    So a layer that is checkpointed saves the same tensors in its first call and when it is computed again.
    """

    @staticmethod
    def forward(ctx: Any, norming: Norming, *tensors: Tensor | None) -> Tensor:
        """The result; tensors are the norm's input, weight and bias."""
        ctx.norming, ctx.tensors = norming, tensors
        result: Tensor = norming.host(norming.module, norming.x)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        """The gradients of the tensors."""
        norming, (x, *others) = ctx.norming, ctx.tensors
        leaf = x.detach().requires_grad_(x.requires_grad)
        y = norming.late(norming.host, norming.module, leaf)
        wanted = [t for t in (leaf, *others) if t is not None and t.requires_grad]
        found = iter(torch.autograd.grad(y, wanted, grad))
        return None, *(next(found) if t is not None and t.requires_grad else None for t in (leaf, *others))


class Turned(Source):
    """A rotated tensor whose norm follows. out: the norm's result."""

    def __init__(self, waiting: Waiting, x: Tensor, out: Tensor, alone: Function) -> None:
        super().__init__(x)
        self.waiting, self.out, self.alone = waiting, out, alone

    def result(self) -> Tensor:
        """The rotated tensor."""
        _host.note_unfused(HOST, f"what goes to {self.waiting.name} has another use")
        rotated: Tensor = self.late(self.alone)
        return rotated


# ---- norms ---------------------------------------------------------------------------------------------


class Layer:
    """An attention module whose norms may wait. ropes: its rope functions: (globals of its code, name, function)."""

    def __init__(self, module: nn.Module, ropes: list[Any], report: _host.Report) -> None:
        self.module, self.ropes, self.report = weakref.ref(module), ropes, report
        self.of_host = type(module).__module__.startswith("transformers.")
        self.norms: list[Waiting] = []
        self.after: dict[int, Waiting] = {}  # the norms of the rotated tensors, by their numbers
        self.after_key: Any = None
        self.kept: dict[Any, Any] = {}

    def key(self) -> Any:
        """What may change after something was learned of the code of this module."""
        module = self.module()
        return None if module is None else (type(module).forward, module.__dict__.get("forward"))

    def fuses(self) -> bool:
        """Whether one of its norms waits, or may wait yet."""
        return bool(self.after) or any(norm.known or norm.tries < _TRIES for norm in self.norms)

    def follows(self, index: int, waiting: Waiting) -> None:
        """Note that a norm takes a rotated tensor. From the next call on, the rotation does both."""
        self.after[index] = waiting
        module = self.module()
        if len(self.after) == 2 and module is not None:
            owner = next(base for base in type(module).__mro__ if "forward" in vars(base))
            self.report.replace_method(owner, "forward", _inside, f"{FUSED}, the norm last")
            self.after_key = self.key()


_layers: dict[int, Layer] = {}
_waiting: dict[int, Waiting] = {}


def _inside(theirs: Function) -> Function:
    """An attention's forward, during which our rope function knows the layer."""

    def forward(self: Any, *arguments: Any, **words: Any) -> Any:
        layer = None if torch.compiler.is_compiling() else _layers.get(id(self))
        if layer is None or layer.module() is not self:
            return theirs(self, *arguments, **words)
        before, _here.layer = getattr(_here, "layer", None), layer
        try:
            return theirs(self, *arguments, **words)
        finally:
            _here.layer = before

    return forward


class Waiting:
    """A norm whose result may wait for rope."""

    def __init__(self, module: nn.Module, name: str, form: NormForm, layer: Layer) -> None:
        self.module = weakref.ref(module, partial(_forget, id(module)))
        self.name, self.form, self.layer = name, form, layer
        self.key, self.known, self.tries = None, False, 0

    def weights(self, module: nn.Module, x: Tensor) -> tuple[Any, ...]:
        """The weight and bias for a launch. Raises InvalidInput if the host's norm must run."""
        if type(x) is not Tensor or watched() or transformed():
            raise InvalidInput("a mode of torch is on, or q is of a subclass of torch.Tensor")
        for place, name, function in self.layer.ropes:
            if place.get(name) is not function:
                raise InvalidInput(f"{name} was replaced after enable")
        weights = parameters_of(module)
        if not self.form.fits(module):
            raise InvalidInput(f"{self.name} is another {type(module).__name__} than in the model that was enabled")
        check_results((self.form,), weights[0], x)
        if not self.layer.of_host and x.is_inference():
            raise InvalidInput("tensors of inference mode do not tell whether they are changed")
        return weights

    def call(self, host: Function, module: Any, x: Any) -> Any:
        """The norm of x, which may wait; or the host's."""
        if type(x) is Pending:
            if type(x.root) is Turned and x.step is None and x.root.waiting is self:
                return x.root.out
            x = real(x)
        if (index := getattr(x, "_jitrope_turned", None)) is not None:
            if not saves_otherwise():
                self.layer.follows(index, self)
        elif self.known or self.tries < _TRIES or self.key != self.layer.key():
            try:
                weights = self.weights(module, x)
            except InvalidInput as error:
                _host.note_unfused(HOST, error.args[0])
            else:
                return self.wait(Norming(self, module, host, x, weights))
        return host(module, x)

    def wait(self, norming: Norming) -> Any:
        """A tensor for rope. Until it is known that rope follows, it has the host's values."""
        key = self.layer.key()
        if key != self.key:
            self.key, self.known, self.tries = key, False, 0
        if self.known:
            return Pending.of(norming, norming.x)
        self.tries += not saves_otherwise()
        norming.out = Source(_Late.apply(norming, norming.x, *norming.weights))
        return Pending.of(norming, norming.x, norming.out.x)


def _forget(number: int, _: Any) -> None:
    _waiting.pop(number, None)


def _norm(theirs: Function) -> Function:
    """A norm's forward, whose result may wait."""

    def forward(self: Any, *arguments: Any, **words: Any) -> Any:
        if not torch.compiler.is_compiling() and len(arguments) == 1 and not words:
            waiting = _waiting.get(id(self))
            if waiting is not None and waiting.module() is self:
                return waiting.call(theirs, self, arguments[0])
        return theirs(self, *arguments, **words)

    return forward


# ---- rope ----------------------------------------------------------------------------------------------


class Rope:
    """A rope function that is replaced: its variant, and its launches with norms."""

    def __init__(self, original: Function, variant: Variant) -> None:
        self.original, self.variant, self.names = original, variant, names(original)
        self.exact = variant._replace(exact=True)
        self.fuses, self.calls = False, [told for told in called(original) if told[0] is not None]
        self.tried: dict[Any, bool] = {}

    def __str__(self) -> str:
        return str(self.variant)

    def check(self) -> None:
        """Raise InvalidInput if a function that the host's calls was replaced."""
        for holder, name, value in self.calls:
            if getattr(holder, name, None) is not value:
                raise InvalidInput(f"{name} was replaced after enable")

    def alone(self, *arguments: Any, **words: Any) -> Any:
        """The rotation without norms. Beside fused norms it has the host's bits too."""
        self.check()
        return replaced(self.exact if self.fuses else self.variant, self.names, *arguments, **words)

    def call(self, host: str, ours: Function, theirs: Function, *arguments: Any, **words: Any) -> Any:
        """The rotation, with the norms that wait for it; in place of `_host.take`."""
        if torch.compiler.is_compiling() or not self.fuses:
            return _host.take(host, ours, theirs, *arguments, **words)
        layer, made = getattr(_here, "layer", None), None
        alone = partial(_host.take, host, ours, theirs)
        try:
            if Pending in map(type, (*arguments, *words.values())):
                made = self.before(*arguments, **words)
            elif layer is not None and layer.after_key == layer.key():
                made = self.after(layer, partial(alone, *arguments, **words), *arguments, **words)
        except InvalidInput as error:
            _host.note_unfused(HOST, error.args[0])
        if made is not None:
            return made[0] if len(made) == 1 else tuple(made)
        made = alone(*real(arguments), **real(words))
        for index, x in enumerate(made if type(made) is tuple else ()):
            x._jitrope_turned = index  # a norm that takes it tells its layer
        return made

    def before(self, *arguments: Any, **words: Any) -> list[Tensor]:
        """The rotation of tensors whose norms wait. Raises InvalidInput if they must be computed before."""
        q, k, cos, sin, axis = read(self.names, *arguments, **words)
        heads, norms = [q] if k is None else [q, k], []
        for x in heads:
            norm = x.root if type(x) is Pending else None
            if type(norm) is not Norming or norm.grad != torch.is_grad_enabled():
                raise InvalidInput("a norm of q or k does not wait")
            norm.check()
            if norm.out is not None and (norm.waiting.known or norm.out.version != Source(norm.out.x).version):
                raise InvalidInput(f"{norm.waiting.name} has another use than rope")
            norms.append(norm)
        waiting, weights = [norm.waiting for norm in norms], [norm.weights for norm in norms]
        out = self.launch(waiting, weights, [n.x for n in norms], [x.x for x in heads], (cos, sin, axis), False)
        for one in waiting:
            one.known = True
        return out

    def after(self, layer: Layer, alone: Function, *arguments: Any, **words: Any) -> list[Any]:
        """The rotation and the norms that follow it. Raises InvalidInput if they must be computed after it."""
        q, k, *table = read(self.names, *arguments, **words)
        heads, waiting = [q, k], [layer.after[i] for i in (0, 1)]
        modules = [w.module() for w in waiting]
        if k is None or None in modules:
            raise InvalidInput("the norms of this layer are not known")
        weights = [w.weights(m, x) for w, m, x in zip(waiting, modules, heads)]  # type: ignore[arg-type]
        out = self.launch(waiting, weights, heads, heads, table, True)
        return [
            Pending.of(Turned(w, x, y, lambda i=i: alone()[i]), x)
            for i, (w, x, y) in enumerate(zip(waiting, heads, out))
        ]

    def launch(
        self,
        waiting: list[Waiting],
        weights: list[Any],
        sources: list[Tensor],
        heads: list[Tensor],
        table: Any,
        after: bool,
    ) -> list[Tensor]:
        """All in one launch. sources: the tensors whose last axis is a row of a norm; heads: views of them."""
        self.check()
        words = words_of(self.exact, heads[0], *table)
        across = [_across(*pair, -3 if words["layout"] == "bhsd" else -2) for pair in zip(sources, heads)]
        if across[0] != across[-1]:
            raise InvalidInput("the norms of q and k differ")
        kept, key = waiting[0].layer.kept, (self, after, across[0], *waiting)
        modules: list[Any] = [w.module() for w in waiting]
        state = [*(x for pair in weights for x in pair), *(getattr(m, w.form.eps) for m, w in zip(modules, waiting))]
        norm, known = kept.get(key, (None, ()))
        if norm is None or not all(a is b for a, b in zip(state, known)):
            forms = [w.form for w in waiting]
            if not self.right(forms[0], modules[0], after, across[0]):
                raise InvalidInput(f"{type(modules[0]).__name__} and rope have other bits")
            norm = norm_of(forms, modules, across[0], after)
            kept[key] = norm, state
        _host.note(HOST, "fused", device=heads[0].device.type)
        return run(norm, heads, words)

    def right(self, form: NormForm, module: nn.Module, after: bool, across: bool) -> bool:
        """Whether norms of this form in the launch have the host's bits."""
        key = form, after, across
        if key not in self.tried:
            with on_its_own():
                self.tried[key] = _same(self, form, module, after, across)
        return self.tried[key]


def _across(source: Tensor, heads: Tensor, axis: int) -> bool:
    """Whether a row of the source is all heads of a token. Raises InvalidInput if it is not one head either."""
    size, step = heads.shape[-1], source.stride(-1)
    if heads.stride(-1) == step:
        if size == source.shape[-1]:
            return False
        if size * heads.shape[axis] == source.shape[-1] and heads.stride(axis) == size * step:
            return True
    raise InvalidInput("the norm's rows are not the heads of a token")


def norm_of(forms: list[NormForm], modules: list[nn.Module], across: bool, after: bool) -> Norm:
    """The norms of q and k as one value. Raises InvalidInput if they differ."""
    words = [form.words(module) for form, module in zip(forms, modules)]
    if words[0] != words[-1]:
        raise InvalidInput("the norms of q and k differ")
    weights: dict[str, Any] = {}
    for label, module in zip("qk", modules):
        weights[f"{label}_weight"], weights[f"{label}_bias"] = parameters_of(module)
    return Norm(**weights, **words[0], across_heads=across, after_rope=after)


def run(norm: Norm, heads: list[Tensor], words: dict[str, Any]) -> list[Tensor]:
    """Norm and rope of q and perhaps k in one launch."""
    if heads[0].dim() == 4:
        return list(prepare_qkv(heads[0], heads[1] if len(heads) > 1 else None, None, norm=norm, **words)[: len(heads)])
    return [x.squeeze(0) for x in run(norm, [x.unsqueeze(0) for x in heads], words)]


def _same(rope: Rope, form: NormForm, module: nn.Module, after: bool, across: bool) -> bool:
    """Compare the launch with the host's functions, on small CPU tensors."""
    variant, fp32, bf16 = rope.exact, torch.float32, torch.bfloat16
    pairs = [(fp32, fp32), (bf16, bf16), *([(bf16, fp32)] if variant.bits[1] else [])]
    for shape, dtypes in product([s for s in variant.shapes if s[0] == 4 or not across], pairs):
        given = dict(zip(rope.names, probe(rope.original, variant, shape, 1, dtypes)))
        labels = [name for name in (*OF_Q, *OF_K) if name in given]
        heads, tokens_last = [given[name] for name in labels], shape[2] == shape[1] - 2
        counts = [x.shape[-3 if tokens_last else -2] if across else 1 for x in heads]
        norms = [small(form, module, dtypes[0], n * PROBE_DIM, seed) for seed, n in enumerate(counts)]

        def normed(x: Tensor, norm: Any, swaps: bool = tokens_last) -> Tensor:
            if not across:
                return norm(x)  # type: ignore[no-any-return]
            rows = x.transpose(1, 2) if swaps else x
            y: Tensor = norm(rows.flatten(-2)).view(rows.shape)
            return y.transpose(1, 2) if swaps else y

        def turned(xs: list[Tensor], given: Any = given, labels: Any = labels) -> list[Tensor]:
            out = rope.original(*{**given, **dict(zip(labels, xs))}.values())
            return [out] if isinstance(out, Tensor) else list(out)

        try:
            if after:
                want = [normed(x, norm) for x, norm in zip(turned(heads), norms)]
            else:
                want = turned([normed(x, norm) for x, norm in zip(heads, norms)])
            table = read(rope.names, *given.values())[2:]
            norm = norm_of([form] * len(norms), norms, across, after)
            ours = run(norm, heads, words_of(variant, heads[0], *table))
        except Exception:  # the host's code, or jitrope, does not compute this
            return False
        if not equal(ours, want, tolerance=0.0):
            return False
    return True


# ---- finding the norms of a model ----------------------------------------------------------------------


def ropes_of(cls: type) -> list[tuple[dict[str, Any], str, Function]]:
    """The rope functions that a class's methods call: (the globals of the code, name, function)."""
    found = []
    for method in vars(cls).values():
        function = inspect.unwrap(method) if callable(method) and not isinstance(method, type) else None
        if inspect.isfunction(function):
            told = inspect.getclosurevars(function).globals
            found += [(function.__globals__, n, f) for n, f in told.items() if NAMES.fullmatch(n) and callable(f)]
    return found


def attention(model: nn.Module) -> dict[type, list[nn.Module]]:
    """The modules of a model with a method that calls a rope function, by their classes."""
    modules: dict[type, list[nn.Module]] = {}
    for module in model.modules():
        modules.setdefault(type(module), []).append(module)
    found: dict[type, list[nn.Module]] = {}
    for cls, some in modules.items():
        owner = next((base for base in cls.__mro__ if issubclass(base, nn.Module) and ropes_of(base)), None)
        if owner is not None:
            found.setdefault(owner, []).extend(some)
    return found


def fuse(cls: type, modules: list[nn.Module], report: _host.Report) -> tuple[str, list[Layer]]:
    """Let the norms of attention modules wait for rope. Returns what was done, and the layers whose norms wait."""
    ropes = [place for place in ropes_of(cls) if place[2] in _host.placed]
    if not ropes:
        return "left alone: jitrope does not replace its rope function", []
    layers, forms, reasons = [], set(), set()
    for module in modules:
        layer = _layers.get(id(module))
        if layer is None or layer.module() is not module:
            layer = Layer(module, ropes, report)
        layer.ropes, layer.report = ropes, report
        for name, norm in module.named_children():
            form = _form(norm)
            fits = [_host.placed[f].what for _, _, f in ropes]
            if isinstance(form, str):
                reasons |= {form} if "norm" in type(norm).__name__.lower() else set()
            elif not any(
                rope.right(form, norm, *way) for rope in fits for way in product((False, True), (False, True))
            ):
                reasons.add(f"{type(norm).__name__} and rope have other bits")
            else:
                _place(norm, name, form, layer, report)
                forms.add(str(form))
                for rope in fits:
                    rope.fuses = True
        if layer.norms:
            layers.append(layer)
            _layers[id(module)] = layer
    if not layers:
        return f"rope only: {min(reasons, default='no norm of q and k was found')}", []
    return f"{FUSED} ({'; '.join(sorted(forms))})", layers


_forms: dict[type, list[NormForm]] = {}


def _form(norm: nn.Module) -> NormForm | str:
    """The form of a norm, or why it has none."""
    known = _forms.setdefault(type(norm), [])
    form = next((form for form in known if form.fits(norm)), None) or recognise(norm)
    if not isinstance(form, str) and form not in known:
        known.append(form)
    return form


def _place(norm: nn.Module, name: str, form: NormForm, layer: Layer, report: _host.Report) -> None:
    """Replace the forward of a norm's class, and note the norm."""
    report.replace_method(type(norm), "forward", _norm, "norms of q and k wait for rope")
    waiting = _waiting.get(id(norm))
    if waiting is None or waiting.module() is not norm or waiting.layer is not layer:
        waiting = _waiting[id(norm)] = Waiting(norm, name, form, layer)
        layer.norms.append(waiting)
    waiting.form = form._replace(forward=type(norm).forward)
