"""Find the attention classes of a model, and fuse their norms of q, k and v with rope.

A class is found by its code: one of its methods calls a rope function. Its forward is rewritten (`_rewrite`) if its
norms are of a known form (`_norms`), and if a trial on small tensors gives the bits of the host's norms and rope
function. Only the code object of the forward changes. So hooks, decorators, subclasses and wrapped modules keep the
function that they hold, and nothing of jitrope is in the model.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ..base.errors import InvalidInput
from . import _host
from ._deferred import Pass, Plan, Rope
from ._host import Function, Placed
from ._norms import PROBE_DIM, NormForm, is_called, recognise, small
from ._rewrite import Source
from ._variants import OF_K, OF_Q, equal, names, probe

NAMES = re.compile(r"\w*apply_\w*rotary\w*")  # the names of rope functions

FUSED = "norm and rope fused"
_ROPE_ONLY, _LEFT, _NO_NORM = "rope only: ", "left alone: ", "no norm of q and k was found"


def attention(model: nn.Module) -> dict[type, list[nn.Module]]:
    """The modules of a model with a method that calls a rope function, by their classes."""
    modules: dict[type, list[nn.Module]] = {}
    for module in model.modules():
        modules.setdefault(type(module), []).append(module)
    found: dict[type, list[nn.Module]] = {}
    for cls, some in modules.items():
        owner = next((base for base in cls.__mro__ if calls_rope(base)), None)
        if owner is not None:
            found.setdefault(owner, []).extend(some)
    return found


def calls_rope(cls: type) -> bool:
    """Whether a class of modules has a method that calls a rope function."""
    methods = (_unwrapped(method) for method in vars(cls).values())
    return issubclass(cls, nn.Module) and any(f is not None and _ropes(f) for f in methods)


def _unwrapped(method: Any) -> FunctionType | None:
    """The function in decorators."""
    function = inspect.unwrap(method) if callable(method) and not isinstance(method, type) else None
    return function if isinstance(function, FunctionType) else None


def _ropes(function: FunctionType) -> dict[str, Function]:
    """The rope functions in a function's code, by their names."""
    known = {name: function.__globals__.get(name) for name in function.__code__.co_names if NAMES.fullmatch(name)}
    return {name: f for name, f in known.items() if callable(f)}


def fuse(cls: type, modules: list[nn.Module], report: _host.Report) -> str:
    """Rewrite the forward of an attention class. Returns what was done: `FUSED`, or what else and why."""
    forward = _unwrapped(vars(cls).get("forward"))
    ropes = {} if forward is None else _ropes(forward)
    if not ropes or forward is None:
        return _ROPE_ONLY + "its forward does not call a rope function"
    places = {name: _host.placed[f] for name, f in ropes.items() if f in _host.placed}
    if not places:
        return _LEFT + "jitrope does not replace its rope function"
    plan = plan_of(forward)
    try:
        if plan is None:
            plan, code = _made(forward, modules, places, report.host)
            report.recode(forward, code, plan)
            found = plan.norms
        else:
            found = _extended(plan, forward, modules, places)
    except ValueError as error:
        return _ROPE_ONLY + str(error)
    forms_of = {str(form) for forms in found.values() for form in forms}
    return f"{FUSED}{', the norm last' if plan.after else ''} ({'; '.join(sorted(forms_of))})"


def plan_of(forward: Any) -> Plan | None:
    """The plan of a forward that is rewritten now."""
    placed = _host.placed.get(_unwrapped(forward))
    return placed.what if placed is not None and isinstance(placed.what, Plan) else None


def turned(layer: Any, rope: Function, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """q and k, (B, S, H, D), transposed and rotated as in a layer, with its norms if they are fused."""
    plan = None if layer is None else plan_of(type(layer).forward)
    if plan is None:
        return rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    run = Pass(plan, strict=True)

    def normed(x: Any, heads: Tensor) -> Any:
        for name in plan.norms:
            norm = getattr(layer, name)
            width = heads.shape[-1] if getattr(norm, "weight", None) is None else norm.weight.numel()
            if width == heads.shape[-1]:
                return run.norm(name, norm, x)
            if width == heads.shape[-2] * heads.shape[-1]:
                return run.norm(name, norm, x.flatten(2)).view(heads.shape)
        raise InvalidInput("the norms of this layer have other sizes than its heads")

    def both(q: Any, k: Any) -> Any:
        return run.rope(rope.__name__, rope, q.transpose(1, 2), k.transpose(1, 2), cos, sin)

    if plan.after:
        last = [normed(x, heads) for x, heads in zip(both(q, k), (q, k))]
        return tuple([run.real(x) for x in last])
    return run.real(both(normed(q, q), normed(k, k)))


def _forms(modules: list[nn.Module], name: str) -> tuple[dict[NormForm, nn.Module], dict[type, str]]:
    """The forms of the norms of this name, each with a norm; by class, why other modules of this name have none."""
    forms: dict[NormForm, nn.Module] = {}
    reasons: dict[type, str] = {}
    refused: set[type] = set()
    for module in modules:
        norm = getattr(module, name, None)
        if not isinstance(norm, nn.Module) or type(norm) in refused or any(form.fits(norm) for form in forms):
            continue
        form = recognise(norm)
        if not isinstance(form, str):
            forms[form] = norm
            continue
        reasons[type(norm)] = form
        if not is_called(norm):
            refused.add(type(norm))
    return forms, reasons


def _made(forward: FunctionType, modules: list[nn.Module], places: dict[str, Placed], host: str) -> tuple[Plan, Any]:
    """The plan and the code of a forward. Raises ValueError with the reason why there are none."""
    source = Source(forward, {name: names(place.original) for name, place in places.items()})
    called = {name: _forms(modules, name) for name in source.modules()}
    found = {name: forms for name, (forms, _) in called.items() if forms}
    norms = {name: tuple(forms) for name, forms in found.items()}
    order = source.order(norms)
    if not order:
        unknown = {
            name: why
            for name, (_, reasons) in called.items()
            for cls, why in reasons.items()
            if "norm" in cls.__name__.lower()
        }
        if source.order([*norms, *unknown]):
            raise ValueError(min(unknown.values()))
        raise ValueError("its norms are not directly before or after rope" if norms or unknown else _NO_NORM)
    ours = _ropes(forward)
    ropes = {name: Rope(names(p.original), p.what, p.original, ours[name]) for name, p in places.items()}
    plan = Plan(host, norms, ropes, order == "after")
    alias = re.sub(r"\W", "_", f"_jitrope_{forward.__qualname__}_{id(forward)}")
    some = {form: (name, norm) for name, forms in found.items() for form, norm in forms.items()}
    _try(plan, {name: place.original for name, place in places.items()}, some)
    code = source.rewritten(norms, alias, plan.after)
    forward.__globals__[alias] = plan  # stays there, for a forward that runs while it is restored
    return plan, code


def _extended(
    plan: Plan, forward: FunctionType, modules: list[nn.Module], places: dict[str, Placed]
) -> dict[str, tuple[NormForm, ...]]:
    """The forms of another model's norms, which the plan gets. Raises ValueError with the reason why it has none."""
    ours = _ropes(forward)  # a rope function of another file may have been restored and replaced again
    plan.ropes = {name: rope._replace(ours=ours[name]) for name, rope in plan.ropes.items()}
    called = {name: _forms(modules, name) for name in plan.norms}
    found = {name: tuple(forms) for name, (forms, _) in called.items() if forms}
    if not found:
        raise ValueError(min((why for _, reasons in called.values() for why in reasons.values()), default=_NO_NORM))
    own = {form: (name, norm) for name, (forms, _) in called.items() for form, norm in forms.items()}
    some = {form: norm for form, norm in own.items() if form not in plan.norms[norm[0]]}
    if some:
        trial = replace(plan, norms=found)
        _try(trial, {name: place.original for name, place in places.items()}, some)
        plan.across &= trial.across
    for name, forms in found.items():
        plan.norms[name] = tuple(dict.fromkeys((*plan.norms[name], *forms)))
    return found


# ---- the trial -----------------------------------------------------------------------------------------


def _try(plan: Plan, hosts: dict[str, Function], some: dict[NormForm, tuple[str, nn.Module]]) -> None:
    """Compare with the host. Raises ValueError if the bits differ, and notes whether norms may be across heads.

    some: a norm of each form, with its name.
    """
    across, plan.across = [], True
    bf16, fp32 = torch.bfloat16, torch.float32
    for (form, norm), (rope, host) in product(some.items(), hosts.items()):
        variant = plan.ropes[rope].variant
        known = [(fp32, fp32), (bf16, bf16), *([(bf16, fp32)] if variant.bits[1] else [])]
        for shape, dtypes in product(variant.shapes, known):
            trial = partial(_same, plan, form, norm, rope, host, probe(host, variant, shape, 1, dtypes))
            if not trial():
                raise ValueError(f"{type(norm[1]).__name__} and {rope} in {dtypes[0]} have other bits")
            if shape[0] == 4 and not plan.after:
                across.append(trial(across=2 if shape[2] == shape[1] - 2 else 1))
    plan.across = bool(across) and all(across)


def _same(
    plan: Plan, form: NormForm, norm: tuple[str, nn.Module], rope: str, host: Function, arguments: Any, across: int = 0
) -> bool:
    """Whether the norms of q and k and a rope function give the host's bits.

    norm: one of this form, with its name. across: the axis of tokens, if the norms are across heads; else 0.
    """
    named = dict(zip(names(host), arguments))
    heads = [named.pop(name) for name in (*OF_Q, *OF_K) if name in named]
    single = len(heads) == 1
    if single:  # q and k in two calls
        heads.append(heads[0] * 0.5)
    widths = [x.shape[1 if across == 2 else 2] * PROBE_DIM if across else PROBE_DIM for x in heads]
    norms = [small(form, norm[1], heads[0].dtype, width, seed) for seed, width in enumerate(widths)]

    def all_of(normed: Callable[..., Any], turned: Callable[..., Any]) -> list[Any]:
        def one(i: int, x: Any) -> Any:
            if not across:
                return normed(norms[i], x)
            rows = (x.transpose(1, 2) if across == 2 else x).flatten(-2)
            y = normed(norms[i], rows).view(*rows.shape[:-1], -1, PROBE_DIM)
            return y.transpose(1, 2) if across == 2 else y

        xs = heads if plan.after else [one(i, x) for i, x in enumerate(heads)]
        others = named.values()
        out = [turned(x, *others) for x in xs] if single else list(turned(*xs, *others))
        return [one(i, x) for i, x in enumerate(out)] if plan.after else out

    try:
        want = all_of(lambda m, x: m(x), host)
    except Exception:  # on any error the host does not compute this
        return bool(across)
    run = Pass(plan, strict=True)
    try:
        ours = all_of(partial(run.norm, norm[0]), partial(run.rope, rope, host))
        made: list[Tensor] = [run.real(x) for x in ours]
    except InvalidInput:
        return False
    return bool(run.turns) and equal(made, want, tolerance=0.0)
