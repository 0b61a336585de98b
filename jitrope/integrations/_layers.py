"""Attention layers whose norms of q and k and rope become one launch, in the host's own `forward`.

The forward runs with an `AsSelf` in place of its module, so that it calls ours for one step and the host's for all
others. The norms are modules of a known form (`_norms`), or of a class in `_KNOWN`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..base.errors import InvalidInput
from ..ops.stand_ins import filled
from ..ops.values import Norm
from . import _host
from ._host import Function
from ._norms import NormForm, check_results, parameters_of, recognise

_KNOWN = {
    "transformer_engine.pytorch.module.rmsnorm.RMSNorm": ("rms_norm", False),
    "transformer_engine.pytorch.module.layernorm.LayerNorm": ("layer_norm", False),
    "transformer_engine.pytorch.ops.basic.l2normalization.L2Normalization": ("rms_norm", True),
    "megatron.core.transformer.torch_norm.L2Norm": ("rms_norm", False),
}
"""Norms that cannot be tried on a CPU or compile themselves: the kind, and whether squares are summed, not averaged.

All compute in fp32 and round once.
"""

_PART = "_norm"
"""The method that `forward` of Megatron's L2Norm calls."""

_forms: dict[Any, list[NormForm | str]] = {}
"""By a norm's class and its methods, the forms of its modules so far, or last the reason why others have none."""


class AsSelf:
    """A module with some other attributes, to be `self` in a method of its class."""

    def __init__(self, module: nn.Module, **attributes: Any) -> None:
        for name, value in {**attributes, "_module": module}.items():
            object.__setattr__(self, name, value)  # torch 2.11 cannot trace `self.__dict__.update`

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_module"], name, value)


def without_rope(
    host: str, known: str, refusals: Callable[..., dict[str, bool]], cu_seqlens: Function, stand_in: Function
) -> Callable[[Function], Function]:
    """A maker of attention's `forward` for `Report.replace_method`: ours rotates, so the host's gets no table.

    known: the names of the arguments of the host's `forward` that this was written for, with spaces.
    refusals: of the layer and the arguments by name: whether each reason holds. The host's `forward` runs as it is for
        the first one that does; "" is one that is not told.
    cu_seqlens: of the layer, the arguments, and "q" or "kv": the offsets of a packed batch, or None.
    stand_in: of the layer, and the table and the offsets of q and k: the `AsSelf`.
    """

    def made(theirs: Function) -> Function:
        parameters = [*inspect.signature(theirs).parameters.values()][1:]
        places, defaults = _host.places_of(parameters), {p.name: p.default for p in parameters}
        names = known.split()

        def forward(layer: Any, *arguments: Any, **words: Any) -> Any:
            given = {**dict(zip(places, arguments)), **words}
            freqs = given.get("rotary_pos_emb")
            table, of_k = freqs if isinstance(freqs, tuple) else (freqs, freqs)
            offsets, of_kv = (cu_seqlens(layer, given, of) for of in ("q", "kv"))
            reasons = [
                ("", table is None),
                *refusals(layer, given).items(),
                ("q and k have different tables", table is not of_k),
                ("q and k have different cu_seqlens", offsets is not of_kv),
                *((f"{_host.UNKNOWN} {n} of forward", True) for n in _host.others(given, names, defaults)),
            ]
            why = next((why for why, holds in reasons if holds), None)
            if why is None:
                return theirs(stand_in(layer, table, offsets), **{**given, "rotary_pos_emb": None})
            if why:
                _host.note_unfused(host, why)
            return theirs(layer, *arguments, **words)

        return forward

    return made


def of_host(cls: Any, name: str) -> bool:
    """Whether a class has a method as it, or a base, was defined, perhaps compiled."""
    method = getattr(cls, name)
    if _host.module_of(method) == "torch._dynamo.eval_frame":
        method = method._torchdynamo_orig_callable
    return _host.module_of(method) in [base.__module__ for base in cls.__mro__]


def form_of(module: nn.Module) -> NormForm:
    """The form of a norm. Raises InvalidInput if it has none, or the module must be called itself.

    A class is tried once, and again for a module with other attributes, until one has no form.
    """
    parameters_of(module)  # a module with hooks says nothing about its class
    cls = type(module)
    found = _forms.setdefault((cls, cls.forward, getattr(cls, _PART, None)), [])
    form = next((form for form in found if isinstance(form, str) or form.fits(module)), None)
    if form is None:
        form = _known(cls, module)
        if form is None and torch.compiler.is_compiling():  # a trial cannot be traced
            raise InvalidInput(f"{cls.__name__}: call the layer once before it is compiled")
        form = form or recognise(module)
        found.append(form)
    if isinstance(form, str):
        raise InvalidInput(form)
    return form


def _known(cls: Any, module: nn.Module) -> NormForm | None:
    kind, total = _KNOWN.get(f"{cls.__module__}.{cls.__qualname__}", ("", False))
    if not kind or not all(of_host(cls, name) for name in ("forward", _PART) if hasattr(cls, name)):
        return None
    centre = getattr(module, "zero_centered_gamma", None)
    state = () if centre is None else ((None, "zero_centered_gamma", centre),)
    return NormForm(cls, "eps", kind, "once", bool(centre), state=state, total=total)


def norm_of(norms: tuple[nn.Module, nn.Module], x: Tensor, **words: Any) -> Norm:
    """The `Norm` of q's and k's modules, for heads like x. words: its other words.

    Raises InvalidInput if a module has no known form or must be called itself, or the two differ.
    """
    forms, parameters = [form_of(module) for module in norms], [parameters_of(module) for module in norms]
    for form, (weight, _) in zip(forms, parameters):
        check_results(form, weight, x)
    found, of_k = (form.words(module) | {"total": form.total} for form, module in zip(forms, norms))
    if found != of_k:
        raise InvalidInput("the norms of q and k differ")
    if found.pop("total"):  # x / sqrt(sum + eps) = x / sqrt(mean + eps / D) / sqrt(D)
        found["eps"] /= x.shape[-1]
        parameters = [(filled(x.device, x.shape[-1], torch.float32, x.shape[-1] ** -0.5), None)] * 2
    (q, q_bias), (k, k_bias) = parameters
    return Norm(q, k, q_bias=q_bias, k_bias=k_bias, **found, **words)
