"""The way from a checked call to the work: torch.library ops, their backward, and the short cut.

`torch.ops.jitrope.rope` and `rope_` are what torch.compile, checkpointing, vmap and fake tensors see.
A call that nothing watches does not go through torch's dispatcher, which would cost as much host time
as the launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import reference, runtime
from .runtime import Options

Outputs = tuple[Tensor, "Tensor | None"]
Check = Callable[..., None] | None

# ---- the library ops -----------------------------------------------------------------------------

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
    for x, out in ((q, q_out), (k, k_out)):
        if x is not None and out is not None:
            x.copy_(_spare_stays(x, out, cu_seqlens))
    return q, k


def _spare_stays(x: Tensor, rotated: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """What an in-place call makes of x: the tokens after the last sequence are not touched."""
    if cu_seqlens is None:
        return rotated
    spare = torch.arange(x.shape[0], device=x.device) >= cu_seqlens[-1]
    return torch.where(spare[:, None, None], x, rotated)


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


# ---- the backward ----------------------------------------------------------------------------------


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, k, cos, sin, cu_seqlens, *ctx.options = inputs
    ctx.has_k = k is not None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(cos, sin, cu_seqlens)  # tables and lengths; never q or k


def _backward(ctx: Any, dq: Tensor | None, dk: Tensor | None) -> tuple[Any, ...]:
    """The same op with `conjugate` turned round: a rotation's transpose is the rotation back."""
    *options, conjugate = ctx.options
    options = (*options, not conjugate, False)
    cos, sin, cu_seqlens = ctx.saved_tensors
    dk = dk if ctx.has_k else None
    if dq is not None:
        dq, dk = call(dq, dk, cos, sin, cu_seqlens, options)
    elif dk is not None:
        dk, _ = call(dk, None, cos, sin, cu_seqlens, options)
    return dq, dk, *(None,) * (3 + len(ctx.options))


torch.library.register_autograd("jitrope::rope", _backward, setup_context=_setup_context, lib=_lib)


class _Recorded(torch.autograd.Function):
    """A call under eager autograd: a fraction of the host time of the library's own recording."""

    @staticmethod
    def forward(ctx: Any, check: Check, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *rest: Any) -> Any:
        cu_seqlens, *options = rest
        _setup_context(ctx, (q, k, cos, sin, cu_seqlens, *options[:-1]), None)
        ctx.in_place = options[-1]
        if ctx.in_place:
            ctx.mark_dirty(*(x for x in (q, k) if x is not None))
        q_out, k_out = call(q, k, cos, sin, cu_seqlens, tuple(options), check)
        return q_out if k is None else (q_out, k_out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        dq, dk = (*grads, None)[:2]
        rotated = _backward(ctx, dq, dk)
        if ctx.in_place:  # what stayed passes its gradient on
            cu_seqlens = ctx.saved_tensors[2]
            rotated = (
                *(y if g is None else _spare_stays(g, y, cu_seqlens) for g, y in zip((dq, dk), rotated)),
                *rotated[2:],
            )
        return None, *rotated, None


# ---- which way ---------------------------------------------------------------------------------------


def call(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    cu_seqlens: Tensor | None,
    options: tuple[Any, ...],
    check: Check = None,
) -> Outputs:
    """Rotate, whoever watches. `options` are the values of `Options`; `check` refuses bad input.

    A plain call goes straight to the launch, past torch's dispatcher: nothing but autograd may watch
    it. Other watchers are torch.compile, functorch transforms, forward-mode AD, dispatch modes (fake
    tensors, selective checkpointing) and tensor subclasses.
    """
    in_place = options[-1]
    plain = (
        not torch.compiler.is_compiling()
        and type(q) is type(cos) is type(sin) is Tensor
        and (k is None or type(k) is Tensor)
        and q.is_cuda
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
    )
    grad = torch.is_grad_enabled()
    wants_grad = grad and (q.requires_grad or (k is not None and k.requires_grad))
    if grad and (cos.requires_grad or sin.requires_grad):
        plain = False  # refused by `check`
    if plain and not wants_grad:
        out = runtime.rope(q, k, cos, sin, cu_seqlens, options, check)
        if in_place:
            torch._C._increment_version((q,) if k is None else (q, k))
        return out
    if wants_grad and (plain or (in_place and not torch.compiler.is_compiling())):
        recorded: Any = _Recorded.apply(check, q, k, cos, sin, cu_seqlens, *options)
        return (recorded, None) if k is None else recorded
    if check is not None:
        check(q, k, cos, sin, cu_seqlens, options)
    if in_place and not wants_grad:
        torch.ops.jitrope.rope_(q, k, cos, sin, cu_seqlens, *options[:-1])
        return q, k
    q_out, k_out = torch.ops.jitrope.rope(q, k, cos, sin, cu_seqlens, *options[:-1])
    if in_place:  # traced under autograd: a copy, which Inductor writes in place
        q_out = q.copy_(_spare_stays(q, q_out, cu_seqlens))
        k_out = None if k is None else k.copy_(_spare_stays(k, k_out, cu_seqlens))
    return q_out, None if k is None else k_out
