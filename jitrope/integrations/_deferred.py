"""Norms and rotations of one forward of attention, computed as late as possible and so in one launch.

The rewritten code of a forward (`_rewrite`) has a `Pass`. Its `norm` and `rope` return a `Normed` or `Turned`, which
stands for the result and knows only methods that give views. `real` computes what is pending and returns the tensor. A
norm without a rotation, and all that jitrope refuses, is computed by the host's module and function, as in its code.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..api import prepare_qkv
from ..base.errors import InvalidInput
from ..ops.values import Norm
from . import _host
from ._host import Function
from ._norms import NormForm, check_results, parameters_of
from ._variants import Variant, read, words_of

Step = tuple[str, tuple[Any, ...], dict[str, Any]]


class Rope(NamedTuple):
    """A rope function that is known: the names of its parameters, its variant, the host's and ours in its place."""

    names: tuple[str, ...]
    variant: Variant
    host: Function
    ours: Function


@dataclass
class Plan:
    """The norms and rope functions of a forward, by their names in its code."""

    host: str
    norms: dict[str, tuple[NormForm, ...]]
    ropes: dict[str, Rope]
    after: bool = False  # the norms follow the rotation
    across: bool = False  # norms may be across heads

    def begin(self, settles: bool) -> Pass:
        """The pass of a forward that begins. settles: its code calls `Pass.settled`."""
        return Pass(self, settles=settles)


VIEWS = ("transpose", "permute", "view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten", "to")


class _Later:
    """A tensor that is computed later. A method that gives a view is kept (`_viewed`), and applied to the tensor."""

    run: Pass
    steps: tuple[Step, ...]  # the methods, and their arguments
    before: Any = None  # the same without the last step, if there is one
    made: Tensor | None = None  # made once, because it may be a copy that is then changed in place

    def of(self, whole: Any) -> Any:
        """The tensor, from that without any step."""
        if self.made is None:
            self.made = whole if self.before is None else _replay(self.before.of(whole), self.steps[-1:])
        return self.made

    def then(self, view: Any) -> Any:
        """Note that a view is one step further."""
        view.before = self
        return self.run.noted(view)

    def __getattr__(self, name: str) -> Function:
        if name not in VIEWS:
            raise AttributeError(name)
        return partial(self._viewed, name)


class Norming:
    """A call of a norm of a tensor or of a `Turned`, which is made later."""

    def __init__(self, module: nn.Module, form: NormForm, source: Any) -> None:
        self.module, self.form, self.source = module, form, source
        self.words = form.words(module)
        self.out: Tensor | None = None

    def finish(self, out: Tensor | None) -> None:
        """Keep the result, and let go of the source."""
        self.out, self.source = out, None


class Normed(_Later):
    """The result of a `Norming`, and views of it. heads: if the norm is across heads, their axis; else -1."""

    def __init__(self, run: Pass, norming: Norming, steps: tuple[Step, ...] = (), heads: int = -1) -> None:
        self.run, self.norming, self.steps, self.heads = run, norming, steps, heads

    @property
    def x(self) -> Tensor:
        """The same view of the source."""
        return _replay(self.norming.source, self.steps)  # type: ignore[no-any-return]

    def _viewed(self, name: str, *arguments: Any, **words: Any) -> Any:
        heads: int | None = -1
        if name == "view" and not words and torch.dtype not in map(type, arguments):
            name = "reshape"  # the norm's result may be contiguous where its source is not
        if self.norming.out is None and isinstance(self.norming.source, Tensor) and not words:
            before = self.x
            heads = _heads(self.heads, name, arguments, before, getattr(before, name)(*arguments))
        if heads is None or words or self.norming.out is not None:
            return getattr(self.run.real(self), name)(*arguments, **words)
        return self.then(Normed(self.run, self.norming, (*self.steps, (name, arguments, words)), heads))


def _heads(heads: int, name: str, arguments: tuple[Any, ...], before: Tensor, x: Tensor) -> int | None:
    """The axis of heads in a view x, -1 if the norm's rows are x's; None if its rows are not known any more."""
    axes = before.dim()
    if name == "to":
        return heads if x.dtype == before.dtype and x.device == before.device else None
    if name in ("transpose", "permute"):
        flat = arguments[0] if len(arguments) == 1 and not isinstance(arguments[0], int) else arguments
        order = [axis % axes for axis in flat]
        if name == "transpose":
            first, second = order
            order = list(range(axes))
            order[first], order[second] = second, first
        if order[-1] != axes - 1:
            return None
        return heads if heads < 0 else order.index(heads)
    if heads >= 0:
        return None
    if x.shape[-1] == before.shape[-1]:  # rows stay whole, and in their order
        return -1 if name != "unsqueeze" or x.dim() - 1 != arguments[0] % x.dim() else None
    split = x.dim() >= 2 and x.shape[-1] * x.shape[-2] == before.shape[-1]
    return x.dim() - 2 if split and x.shape[:-2] == before.shape[:-1] else None


class Turn:
    """A call of a rope function, which is made later."""

    def __init__(self, rope: Rope, function: Function, arguments: Any, words: Any) -> None:
        self.rope, self.function, self.arguments, self.words = rope, function, arguments, words
        self.q, self.k, self.cos, self.sin, self.axis = read(rope.names, *arguments, **words)
        self.single = self.k is None
        self.out: tuple[Any, ...] = ()  # results of the host's function, or of ours
        self.pending, self.alone = True, False  # alone: the norms after it are computed, without its own results

    def like(self, other: Turn) -> bool:
        """Whether the heads of two calls can be rotated together."""
        same = self.function is other.function and self.cos is other.cos and self.sin is other.sin
        return same and self.axis == other.axis and self.single and other.single

    def finish(self, out: tuple[Any, ...]) -> None:
        """Keep the results, and let go of the arguments."""
        self.out, self.pending = out, False
        self.arguments, self.words, self.q, self.k, self.cos, self.sin = (), {}, None, None, None, None


class Turned(_Later):
    """A result of a `Turn`: its number, and the views of it."""

    def __init__(self, run: Pass, turn: Turn, index: int, steps: tuple[Step, ...] = ()) -> None:
        self.run, self.turn, self.index, self.steps = run, turn, index, steps

    def _viewed(self, name: str, *arguments: Any, **words: Any) -> Any:
        return self.then(Turned(self.run, self.turn, self.index, (*self.steps, (name, arguments, words))))


def _replay(x: Any, steps: tuple[Step, ...]) -> Any:
    for name, arguments, words in steps:
        x = getattr(x, name)(*arguments, **words)
    return x


@dataclass
class Pass:
    """What is pending in one forward."""

    plan: Plan
    strict: bool = False  # for trials: a launch that jitrope refuses raises, and none is counted
    settles: bool = False  # `settled` may be called, so all results are noted
    results: list[Any] = field(default_factory=list)  # weak references, since the last call of `settled`
    norms: list[Norming] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    told: list[str] = field(default_factory=list)  # reasons

    def norm(self, name: str, module: Function, x: Any) -> Any:
        """The norm of x by a module, later if a launch can compute it. Another function is called."""
        source, viewed = (x.turn.q, x.steps) if isinstance(x, Turned) else (x, ())
        if isinstance(source, Tensor) and not viewed and isinstance(module, nn.Module):
            try:
                weight = parameters_of(module)[0]
                forms = [form for form in self.plan.norms[name] if form.fits(module)]
                if not forms:
                    was = f"another {type(module).__name__} than in the model that was enabled"
                    raise InvalidInput(f"{name} is {was}")
                check_results(forms, weight, source)
            except InvalidInput as error:
                self._tell(error.args[0])
            else:
                self.norms.append(Norming(module, forms[0], x))
                return self.noted(Normed(self, self.norms[-1]))
        return module(self.real(x))

    def _tell(self, reason: str) -> None:
        """Note once in this forward why norms are not fused."""
        if reason not in self.told:
            self.told.append(reason)
            _host.note_unfused(self.plan.host, reason)

    def rope(self, name: str, function: Function, *arguments: Any, **words: Any) -> Any:
        """A call of a rope function, later if the launch of a norm can do it too."""
        rope = self.plan.ropes[name]
        if function is not rope.host and function is not rope.ours:
            _host.note_unfused(self.plan.host, f"{name} was replaced after enable")
            return self._call(function, arguments, words)
        try:
            turn = Turn(rope, function, arguments, words)
        except (InvalidInput, TypeError):
            return self._call(function, arguments, words)
        heads = (turn.q,) if turn.single else (turn.q, turn.k)
        if not all(map(self._waits, heads)):
            return self._call(function, arguments, words)
        self.turns.append(turn)
        made = tuple([self.noted(Turned(self, turn, i)) for i in range(len(heads))])
        return made[0] if turn.single else made

    def _waits(self, x: Any) -> bool:
        """Whether a rotation of x can be in the launch of a norm: of one to come, or of one that is pending."""
        if self.plan.after:
            return isinstance(x, Tensor)
        return isinstance(x, Normed) and x.norming.out is None and isinstance(x.norming.source, Tensor)

    def _call(self, function: Function, arguments: Any, words: Any) -> Any:
        return function(*[self.real(x) for x in arguments], **{name: self.real(x) for name, x in words.items()})

    def settled(self, function: Any) -> Any:
        """A function that may change tensors, or a mode of torch: all results are computed before, rotations first."""
        for turn in self.turns:
            if turn.pending:
                self._settle(turn)
        if self.norms and not self.strict:
            self._tell("a tensor or a mode of torch may change between a norm and the rotation")
        for result in self.results:
            self.real(result())
        self.results = []
        return function

    def noted(self, result: Any) -> Any:
        """A new result, which `settled` computes if it is called later."""
        if self.settles:
            self.results.append(weakref.ref(result))
        return result

    def real(self, x: Any) -> Any:
        """A tensor; everything else as it is."""
        if isinstance(x, tuple):
            return tuple([self.real(part) for part in x])
        if isinstance(x, Turned):
            while x.turn.pending:
                self._settle(x.turn)
            return x.of(x.turn.out[x.index])
        if isinstance(x, Normed):
            norming = x.norming
            source = norming.source
            if norming.out is None and isinstance(source, Turned) and source.turn.pending and not source.turn.alone:
                self._settle(source.turn)
            if norming.out is None:
                norming.finish(norming.module(self.real(norming.source)))
            self.norms = [other for other in self.norms if other is not norming]
            return x.of(norming.out)
        return x

    def _settle(self, turn: Turn) -> None:
        """Compute a call of rope with its norms, and all that goes into the same launch."""
        device = turn.cos.device.type
        try:
            if turn.alone:
                raise InvalidInput("a rotated tensor has another use than its norm")
            alike = [other for other in self.turns if other is turn or other.like(turn)]
            self._launch(alike if len(alike) == 2 else [turn])  # q's and k's calls, if they are two
        except InvalidInput as error:
            if self.strict:
                raise
            self._tell(error.args[0])
            out = self._call(turn.function, turn.arguments, turn.words)
            turn.finish((out,) if turn.single else out)
        else:
            if self.strict:
                return  # a trial looks at its turns
            _host.note(self.plan.host, "fused", device=device)
        self.turns = [other for other in self.turns if other.pending and not other.alone]

    def _launch(self, turns: list[Turn]) -> None:
        """Compute all results of one or two calls, their norms and perhaps v's."""
        heads = [(turn, i, x) for turn in turns for i, x in enumerate((turn.q, turn.k)) if x is not None]
        normed = [self._norm_of(turn, i) if self.plan.after else x for turn, i, x in heads]
        norms = [x.norming for x in normed]
        if any(norm.out is not None for norm in norms):
            raise InvalidInput("a normalised tensor has another use than its rotation")
        tensors = [x if self.plan.after else x.x for _, _, x in heads]
        words, flat = _words(turns[0], tensors), tensors[0].dim() == 3
        across = [_is_across(x, tensor, words["layout"]) for x, tensor in zip(normed, tensors)]
        if across[0] and not self.plan.across:
            raise InvalidInput("a norm across heads has other bits")
        if across[0] != across[-1] or norms[0].words != norms[-1].words:
            raise InvalidInput("the norms of q and k differ")
        v = None if flat or across[0] else self._v(norms, tensors)
        weights: dict[str, Any] = {}
        for label, norm in zip("qk", norms):
            weights[f"{label}_weight"], weights[f"{label}_bias"] = parameters_of(norm.module)
        norm_of_all = Norm(
            **weights, **norms[0].words, across_heads=across[0], after_rope=self.plan.after, v_norm=v is not None
        )
        q, k, *_ = [*(x.unsqueeze(0) if flat else x for x in tensors), None]
        made = prepare_qkv(q, k, None if v is None else v.source, norm=norm_of_all, **words)
        out = [x.squeeze(0) if flat else x for x in made[: len(tensors)]]
        finished = norms if v is None else [*norms, v]
        if v is not None:
            v.finish(made[2])
        for (turn, _, _), norm, x in zip(heads, norms, out):
            if self.plan.after:
                turn.alone = True
                norm.finish(x)
            else:
                turn.out = (*turn.out, x)
        for turn in turns:
            if not self.plan.after:
                turn.finish(turn.out)
        self.norms = [other for other in self.norms if not any(other is norm for norm in finished)]

    def _norm_of(self, turn: Turn, index: int) -> Normed:
        """The pending norm of a result of a call."""
        for norm in self.norms:
            if isinstance(norm.source, Turned) and norm.source.turn is turn and norm.source.index == index:
                return Normed(self, norm)
        raise InvalidInput("the norm of q or k is missing")

    def _v(self, norms: list[Norming], tensors: list[Tensor]) -> Norming | None:
        """The pending norm of v: like k's, without a weight, of a tensor like k."""
        if len(norms) < 2:
            return None
        k, form = tensors[1], norms[1].form
        for norm in self.norms:
            x = norm.source
            if any(norm is other for other in norms) or not isinstance(x, Tensor) or x.shape != k.shape:
                continue
            like_k = {**norm.words, "zero_centered": form.zero_centered} == norms[1].words and x.dtype == k.dtype
            if like_k and parameters_of(norm.module) == (None, None):
                return norm
        return None


def _words(turn: Turn, heads: list[Tensor]) -> dict[str, Any]:
    """The launch's words, with the host's rounding. Raises InvalidInput if jitrope has none for these dtypes."""
    variant, q, cos = turn.rope.variant, heads[0], turn.cos
    words = words_of(variant, q, cos, turn.sin, turn.axis)
    if q.dtype == torch.float32 == cos.dtype:
        return words
    rounding = variant.bits[int(q.dtype != cos.dtype)]  # Dynamo of torch 2.11 takes no bool
    if not rounding or cos.dtype not in (q.dtype, torch.float32):
        raise InvalidInput(f"q is {q.dtype} and the tables are {cos.dtype}")
    return {**words, "rounding": rounding}


def _is_across(normed: Normed, x: Tensor, layout: str) -> bool:
    if normed.heads < 0:
        return False
    if normed.heads != x.dim() - (3 if layout == "bhsd" else 2):
        raise InvalidInput("the norm's rows are not the heads of a token")
    return True
