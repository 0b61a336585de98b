"""Which way a call goes: past torch's dispatcher, through an autograd function, or to the library's op.

A call that nothing watches does not go through torch's dispatcher, which would cost as much host time as the
launch; one that is like one of the last ones is not even looked at again (`runtime.rope_again`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import ops, reference, runtime
from .ops import N_TABLES, Outputs, Parts, keep, rotate_back, rotate_back_qkv, spare_stays, turned_back
from .problem import value_view
from .reference import Tables
from .runtime import Check
from .spec import Options

_IN_PLACE, _Q_PER_GROUP, _VALUES, _K_TOO = (
    Options._fields.index(name) for name in ("in_place", "q_per_group", "values", "k_too")
)
_is_compiling = torch.compiler.is_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_written = torch._C._increment_version


class _Recorded(torch.autograd.Function):
    """A call under eager autograd: a fraction of the host time of the library's own recording."""

    @staticmethod
    def forward(
        ctx: Any, check: Check, options: tuple[Any, ...], q: Tensor, k: Tensor | None, *tables: Any
    ) -> Any:  # fmt: skip
        keep(ctx, tables, options)  # type: ignore[arg-type]
        ctx.in_place = options[-1]
        if ctx.in_place:
            ctx.mark_dirty(*(x for x in (q, k) if x is not None))
        q_out, k_out = call(q, k, tables, options, check)  # type: ignore[arg-type]
        return q_out if k is None else (q_out, k_out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        dq, dk = (*grads, None)[:2]
        rotated = rotate_back(call, ctx, dq, dk)
        if ctx.in_place:  # what stayed passes its gradient on
            cu_seqlens, values = ctx.saved_tensors[2], Options(*ctx.options)
            rotated = tuple(  # type: ignore[assignment]
                y if g is None or y is None else spare_stays(g, y, cu_seqlens, values)
                for g, y in zip((dq, dk), rotated)
            )
        return None, None, *rotated, *(None,) * N_TABLES


class _RecordedQKV(torch.autograd.Function):
    """The same for packed QKV; with `values` off the third output is a view of the input."""

    @staticmethod
    def forward(ctx: Any, check: Check, options: tuple[Any, ...], qkv: Tensor, *tables: Any) -> Any:
        parts = call_qkv(qkv, tables, options, check)  # type: ignore[arg-type]
        ctx.k_like = (parts[1].shape, parts[1].dtype, parts[1].device)
        keep(ctx, tables, options)  # type: ignore[arg-type]
        return parts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return None, None, rotate_back_qkv(call_qkv_backward, ctx, *grads), *(None,) * N_TABLES


class _RecordedQKVInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, check: Check, options: tuple[Any, ...], qkv: Tensor, *tables: Any) -> Any:
        ctx.save_for_backward(*tables)
        ctx.options = turned_back(options, in_place=True)
        ctx.mark_dirty(qkv)
        return call_qkv(qkv, tables, options, check)[0]  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rotated = call_qkv(grad.clone(memory_format=torch.contiguous_format), ctx.saved_tensors, ctx.options)[0]
        return None, None, rotated, *(None,) * N_TABLES


# ---- which way ---------------------------------------------------------------------------------------


def _plain(x: Tensor, tables: Tables) -> bool:
    """Nothing but autograd may watch this call.

    Other watchers are torch.compile, functorch transforms, forward-mode AD, dispatch modes (fake
    tensors, selective checkpointing) and tensor subclasses. A table that requires a gradient is
    left to the check, which refuses it.
    """
    cos, sin, lengths, starts, ids = tables
    return (
        not _is_compiling()
        and type(x) is type(cos) is type(sin) is Tensor
        and (lengths is None or type(lengths) is Tensor)
        and (starts is None or type(starts) is Tensor)
        and (ids is None or type(ids) is Tensor)
        and x.is_cuda
        and _dispatch_modes() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
        and not (torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad))
    )


def sharded(*tensors: Tensor | None) -> bool:
    """One of them is a DTensor, whose class is not imported for the question."""
    return any(type(x) is not Tensor and hasattr(x, "device_mesh") for x in tensors if x is not None)


def call(q: Tensor, k: Tensor | None, tables: Tables, options: tuple[Any, ...], check: Check = None) -> Outputs:
    """Rotate, whoever watches. `options` are the values of `Options`; `check` refuses bad input.

    A plain call goes straight to the launch, past torch's dispatcher.
    """
    in_place = options[-1]
    if not _is_compiling() and _dispatch_modes() == 0 and forward_ad._current_level < 0:
        out = runtime.rope_again(q, k, tables, options)
        if out is not None:
            if in_place:
                _written((q,) if k is None else (q, k))
            return out
    plain = _plain(q, tables) and (k is None or type(k) is Tensor)
    if not plain and sharded(q, k, *tables):
        from . import sharding

        return sharding.rope(call, q, k, tables, options, check)  # type: ignore[no-any-return]
    wants_grad = _wants_grad(q, k)
    if plain and not wants_grad:
        out = runtime.rope(q, k, tables, options, check, True)
        if in_place:
            _written((q,) if k is None else (q, k))
        return out
    if wants_grad and (plain or (in_place and not _is_compiling())):
        recorded: Any = _Recorded.apply(check, options, q, k, *tables)
        return (recorded, None) if k is None else recorded
    if check is not None:
        check(q, k, tables, options)
    if in_place and not wants_grad:
        torch.ops.jitrope.rope_(q, k, *tables, *options[:-1])
        return q, k
    q_out, k_out = ops.rope(q, k, tables, options)
    if in_place:  # traced under autograd: a copy, which Inductor writes in place
        values = Options(*options)
        q_out = q.copy_(spare_stays(q, q_out, tables[2], values))
        k_out = None if k is None else k.copy_(spare_stays(k, k_out, tables[2], values))  # type: ignore[arg-type]
    return q_out, k_out


def call_fp8(
    q: Tensor, k: Tensor | None, q_scale: Tensor, k_scale: Tensor | None, tables: Tables, options: tuple[Any, ...],
    check: Check,
) -> Outputs:  # fmt: skip
    """`call` with fp8 outputs, which have no gradient: the check refuses what asks for one."""
    tensors = (q, k, q_scale, k_scale)
    if _plain(q, tables) and (k is None or type(k) is Tensor) and not _wants_grad(q, k):
        return runtime.rope_fp8(*tensors, tables, options, check)
    if sharded(*tensors, *tables):
        from . import sharding

        return sharding.rope_fp8(call_fp8, *tensors, tables, options, check)  # type: ignore[no-any-return]
    check(*tensors, tables, options)  # type: ignore[misc]
    q_out, k_out = torch.ops.jitrope.rope_fp8(*tensors, *tables, *options[:-1])
    return q_out, None if k is None else k_out


def call_kv_cache(tensors: Sequence[Any], tables: Tables, options: tuple[Any, ...], check: Check) -> Tensor:
    """`call` that stores k and v: q, k, v, both caches, slots and the scales of q, k and v; gives q."""
    q, k, v, k_cache, v_cache = tensors[:5]
    in_place = options[_IN_PLACE]
    written = (k_cache, v_cache, *((q,) if in_place else ()), *((k,) if options[_K_TOO] else ()))
    if not _is_compiling() and _dispatch_modes() == 0 and forward_ad._current_level < 0:
        out = runtime.rope_kv_cache_again(tensors, tables, options)
        if out is not None:
            _written(written)
            return out
    plain = _plain(q, tables) and all(type(x) is Tensor for x in tensors[1:5])
    if plain and not _wants_grad(q, k, v):
        out = runtime.rope_kv_cache(*tensors, tables, options, check, True)  # type: ignore[call-arg]
        _written(written)
        return out
    if sharded(*tensors, *tables):
        from . import sharding

        return sharding.rope_kv_cache(call_kv_cache, tensors, tables, options, check)  # type: ignore[no-any-return]
    check(*tensors, tables, options)  # type: ignore[misc]
    if in_place:
        torch.ops.jitrope.rope_kv_cache_(*tensors, *tables, *options[:-1])
        return q  # type: ignore[no-any-return]
    return torch.ops.jitrope.rope_kv_cache(*tensors, *tables, *options[:-1])  # type: ignore[no-any-return]


def _wants_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def call_qkv(qkv: Tensor, tables: Tables, options: tuple[Any, ...], check: Check = None) -> Parts:
    """`call` of packed QKV: q, k and v; three times qkv in place."""
    in_place, values = options[_IN_PLACE], options[_VALUES]
    plain = _plain(qkv, tables)
    if not plain and sharded(qkv, *tables):
        from . import sharding

        return sharding.rope_qkv(call_qkv, qkv, tables, options, check)  # type: ignore[no-any-return]
    wants_grad = torch.is_grad_enabled() and qkv.requires_grad
    if plain and not wants_grad:
        parts = runtime.rope_qkv(qkv, tables, options, check)
        if in_place:
            _written((qkv,))
        return parts
    if wants_grad and (plain or (in_place and not _is_compiling())):
        if in_place:
            return (_RecordedQKVInPlace.apply(check, options, qkv, *tables),) * 3
        return _RecordedQKV.apply(check, options, qkv, *tables)  # type: ignore[no-any-return]
    if check is not None:
        check(qkv, tables, options)
    if in_place and not wants_grad:
        torch.ops.jitrope.rope_qkv_(qkv, *tables, *options[:-1])
        return qkv, qkv, qkv
    q, k, v = torch.ops.jitrope.rope_qkv(qkv, *tables, *options[:-1])
    if in_place:
        value = v if values else value_view(qkv, options[_Q_PER_GROUP])
        rotated = reference.join_qkv(q, k, value, options[_Q_PER_GROUP])
        return (qkv.copy_(spare_stays(qkv, rotated, tables[2], Options(*options))),) * 3
    return q, k, v if values else value_view(qkv, options[_Q_PER_GROUP])


def call_qkv_backward(dq: Tensor, dk: Tensor, dv: Tensor, tables: Tables, options: tuple[Any, ...]) -> Tensor:
    """q and k rotated, and v, in one packed tensor."""
    watched = torch.is_grad_enabled() and any(x.requires_grad for x in (dq, dk, dv))
    if all(type(x) is Tensor for x in (dq, dk, dv)) and _plain(dq, tables) and not watched:
        return runtime.rope_qkv_backward(dq, dk, dv, tables, options)
    return ops.rope_qkv_backward(dq, dk, dv, tables, options)
