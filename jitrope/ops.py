"""The torch.library ops: `torch.ops.jitrope.rope` and `rope_`, their fakes and the backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import reference, runtime
from .runtime import Options

_ARGUMENTS = (
    "Tensor cos, Tensor sin, Tensor? cu_seqlens, str layout, bool interleaved, int rotary_dim, "
    "int max_seqlen, str rounding, str launch, bool conjugate"
)
_lib = torch.library.Library("jitrope", "DEF")
_tags = (torch.Tag.pt2_compliant_tag,)
# `k` is optional and an op returns tensors only: without it the second one is empty.
_lib.define(f"rope(Tensor q, Tensor? k, {_ARGUMENTS}) -> (Tensor, Tensor)", tags=_tags)
_lib.define(f"rope_(Tensor(a!) q, Tensor(b!)? k, {_ARGUMENTS}) -> ()", tags=_tags)


def _cpu(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, cu_seqlens: Tensor | None, options: Options) -> Any:
    o = options
    q_out, k_out = reference.rope(q, k, cos, sin, cu_seqlens, o.layout, o.interleaved, o.rotary_dim, o.conjugate)
    if not o.in_place:
        return q_out, k_out
    end = None if cu_seqlens is None else int(cu_seqlens[-1])  # in place, spare rows stay
    for x, out in ((q, q_out), (k, k_out)):
        if x is not None and out is not None:
            x[:end].copy_(out[:end])
    return q, k


def _functional(execute: Any) -> Any:
    def rope(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, cu_seqlens: Tensor | None, *options: Any) -> Any:
        q_out, k_out = execute(q, k, cos, sin, cu_seqlens, Options(*(*options, False)))
        return q_out, q.new_empty(0) if k_out is None else k_out

    return rope


def _mutating(execute: Any) -> Any:
    def rope_(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, cu_seqlens: Tensor | None, *options: Any) -> None:
        execute(q, k, cos, sin, cu_seqlens, Options(*(*options, True)))

    return rope_


for _key, _execute in (("CPU", _cpu), ("CUDA", runtime.rope)):
    _lib.impl("rope", _functional(_execute), _key)
    _lib.impl("rope_", _mutating(_execute), _key)


@torch.library.register_fake("jitrope::rope", lib=_lib)
def _rope_fake(q: Tensor, k: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(0) if k is None else torch.empty_like(k)


@torch.library.register_fake("jitrope::rope_", lib=_lib)
def _rope_inplace_fake(*_: Any) -> None:
    return None


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, ctx.k, cos, sin, cu_seqlens, *ctx.options = inputs
    ctx.k = ctx.k is not None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(cos, sin, cu_seqlens)  # tables and lengths; never q or k


def _backward(ctx: Any, dq: Tensor | None, dk: Tensor | None) -> tuple[Any, ...]:
    """The same op with `conjugate` turned round: a rotation's transpose is the rotation back."""
    *options, conjugate = ctx.options
    tensors = (*ctx.saved_tensors, *options, not conjugate)
    dk = dk if ctx.k else None
    nothing = (None,) * (3 + len(ctx.options))
    if dq is None:
        return None, None if dk is None else torch.ops.jitrope.rope(dk, None, *tensors)[0], *nothing
    dq, dk_out = torch.ops.jitrope.rope(dq, dk, *tensors)
    return dq, None if dk is None else dk_out, *nothing


torch.library.register_autograd("jitrope::rope", _backward, setup_context=_setup_context, lib=_lib)


class InPlace(torch.autograd.Function):
    """`rope_` under autograd: marks what it writes, and rotates the gradients back."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor | None, *rest: Any) -> Any:
        _setup_context(ctx, (q, k, *rest), None)
        ctx.mark_dirty(*(x for x in (q, k) if x is not None))
        torch.ops.jitrope.rope_(q, k, *rest)
        return q if k is None else (q, k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        dq, dk = (*grads, None)[:2]
        return _backward(ctx, dq, dk)
