"""Attention layers whose norms of q and k and rope become one launch, in the host's own `forward`.

The forward runs with an `AsSelf` in place of its module: it calls ours for one step and the host's for all others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..base.errors import InvalidInput
from ..stages.norm import Norm
from ..values.constants import filled
from . import _host
from ._host import Function
from ._norms import check_results, form_of, parameters_of


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
        parameters = [(filled(x.device, x.shape[-1:], torch.float32, x.shape[-1] ** -0.5), None)] * 2
    (q, q_bias), (k, k_bias) = parameters
    return Norm(q, k, q_bias=q_bias, k_bias=k_bias, **found, **words)
