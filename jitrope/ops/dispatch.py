"""Which way a call goes: past torch's dispatcher, through an autograd function, or to the library's op.

A call that nothing watches does not go through torch's dispatcher, which would cost as much host time as the
launch; one that is like one of the last ones is not even looked at again (`runtime.rope_again`).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..base.errors import InvalidInput
from ..plan.problem import value_view
from ..plan.spec import Given, Options
from ..plan.views import Tables
from . import checks, reference
from . import launch as runtime
from . import library as ops
from .launch import Check
from .library import N_TABLES, Outputs, Parts, as_op, keep, rotate_back, rotate_back_qkv, spare_stays, turned_back

_is_compiling = torch.compiler.is_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_written = torch._C._increment_version
_tracing = torch._C._get_tracing_state
_on_gpu = operator.attrgetter("is_cuda")
_PLAIN = (Tensor, torch.nn.Parameter)


class _Recorded(torch.autograd.Function):
    """A call under eager autograd: a fraction of the host time of the library's own recording."""

    @staticmethod
    def forward(
        ctx: Any, rotate: Any, check: Check, options: Options, q: Tensor, k: Tensor | None, *tables: Any
    ) -> Any:  # fmt: skip
        keep(ctx, tables, options)  # type: ignore[arg-type]
        ctx.in_place = options.in_place
        if ctx.in_place:
            ctx.mark_dirty(*(x for x in (q, k) if x is not None))
        q_out, k_out = rotate(q, k, tables, options, check)
        return q_out if k is None else (q_out, k_out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        dq, dk = (*grads, None)[:2]
        tables = ctx.saved_tensors  # once: a checkpoint gives them once
        rotated = rotate_back(call, tables, ctx.options, dq, dk)
        if ctx.in_place:  # what stayed passes its gradient on
            cu_seqlens, values = tables[2], ctx.options
            rotated = tuple(  # type: ignore[assignment]
                y if g is None or y is None else spare_stays(g, y, cu_seqlens, values)
                for g, y in zip((dq, dk), rotated)
            )
        return None, None, None, *rotated, *(None,) * N_TABLES


class _RecordedView(torch.autograd.Function):
    """A tensor that was rotated in place: torch records a view of another tensor only by itself."""

    @staticmethod
    def forward(ctx: Any, options: Options, x: Tensor, *tables: Any) -> Tensor:
        keep(ctx, tables, options)  # type: ignore[arg-type]
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        tables = ctx.saved_tensors
        rotated = call(grad, None, tables, ctx.options)[0]
        rotated = spare_stays(grad, rotated, tables[2], ctx.options)
        return None, rotated, *(None,) * N_TABLES


class _RecordedQKV(torch.autograd.Function):
    """The same for packed QKV; with `values` off the third output is a view of the input."""

    @staticmethod
    def forward(ctx: Any, check: Check, options: Options, qkv: Tensor, *tables: Any) -> Any:
        parts = call_qkv(qkv, tables, options, check)  # type: ignore[arg-type]
        ctx.k_like = (parts[1].shape, parts[1].dtype, parts[1].device)
        keep(ctx, tables, options)  # type: ignore[arg-type]
        return parts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return None, None, rotate_back_qkv(call_qkv_backward, ctx, *grads), *(None,) * N_TABLES


class _RecordedQKVInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, check: Check, options: Options, qkv: Tensor, *tables: Any) -> Any:
        ctx.save_for_backward(*tables)
        ctx.options = turned_back(options, in_place=True)
        ctx.mark_dirty(qkv)
        return call_qkv(qkv, tables, options, check)[0]  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rotated = call_qkv(grad.clone(memory_format=torch.contiguous_format), ctx.saved_tensors, ctx.options)[0]
        return None, None, rotated, *(None,) * N_TABLES


# ---- which way ---------------------------------------------------------------------------------------


def _plain(tensors: Sequence[Any], tables: Tables) -> bool:
    """Nothing but autograd may watch this call, and its tensors are as they lie in memory.

    Other watchers are torch.compile, functorch transforms, forward-mode AD, dispatch modes (fake
    tensors, selective checkpointing), torch.jit.trace and tensor subclasses. The library's ops resolve lazy negative
    and conjugate bits. A table that requires a gradient is left to the check, which refuses it.
    """
    if _is_compiling() or _dispatch_modes() or _tracing() is not None or forward_ad._current_level >= 0:
        return False
    for x in (*tensors, *tables):
        if x is not None and (type(x) not in _PLAIN or x.is_neg()):
            return False
    q, (cos, sin, *_) = tensors[0], tables
    return (
        q is not None
        and _on_gpu(q)
        and not cos.is_conj()
        and torch._C._functorch.peek_interpreter_stack() is None
        and not (torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad))
    )


def sharded(*tensors: Tensor | None) -> bool:
    """One of them is a DTensor, whose class is not imported for the question."""
    return any(type(x) is not Tensor and hasattr(x, "device_mesh") for x in tensors if x is not None)


def refuse_sharded(name: str, *tensors: Tensor | None) -> None:
    """Refuse DTensors where a call takes a rank's own tensors only."""
    if sharded(*tensors):
        raise InvalidInput(f"{name}: it takes no DTensors; pass x.to_local(), and make results with DTensor.from_local")


def call(q: Tensor, k: Tensor | None, tables: Tables, given: Given, check: Check = None) -> Outputs:
    """Rotate, past torch's dispatcher if nothing watches the call. `check` refuses bad input."""
    if not _is_compiling() and _dispatch_modes() == 0 and forward_ad._current_level < 0:
        out = runtime.rope_again(q, k, tables, given)
        if out is not None:
            return out
    options = Options(*given)
    in_place = options.in_place
    plain, wants_grad = _plain((q, k), tables), _wants_grad(q, k)
    if plain and not wants_grad:
        if in_place and (q.is_inference() or (k is not None and k.is_inference())):
            checks.check_written("apply_rope_", False, q=q, k=k)
        out = runtime.rope(q, k, tables, options, check, True)
        if in_place:
            _written((q,) if k is None else (q, k))
        return out
    if check is not None:
        name = "apply_rope_" if in_place else "apply_rope"
        options = checks.resolved(name, {"q": q}, {"k": k}, tables, options, plain)
        checks.check_watched(name, wants_grad, tables, {"q": q, "k": k} if in_place else {})
        if not plain and sharded(q, k, *tables):
            from . import sharding

            check(q, k, tables, options)
            (q, k), tables = sharding.prepared(name, {"q": q, "k": k}, tables, options)
            check = None
    if wants_grad and (plain or (in_place and not _is_compiling())):
        alone = q._is_view() or (k is not None and (k._is_view() or k.requires_grad != q.requires_grad))
        if in_place and alone:
            with torch.no_grad():
                call(q, k, tables, options, check)
            both = (x if x is None or not x.requires_grad else _RecordedView.apply(options, x, *tables) for x in (q, k))
            return tuple(both)  # type: ignore[return-value]
        recorded: Any = _Recorded.apply(runtime.rope if plain else call, check, options, q, k, *tables)
        return (recorded, None) if k is None else recorded
    if check is not None:
        check(q, k, tables, options)
    if in_place and not wants_grad:
        torch.ops.jitrope.rope_(q, k, *as_op(tables, options))
        return q, k
    q_out, k_out = ops.rope(q, k, tables, options)
    if in_place:  # traced under autograd: a copy, which Inductor writes in place
        q_out = q.copy_(spare_stays(q, q_out, tables[2], options))
        k_out = None if k is None else k.copy_(spare_stays(k, k_out, tables[2], options))  # type: ignore[arg-type]
    return q_out, k_out


def call_fp8(
    q: Tensor, k: Tensor | None, q_scale: Tensor, k_scale: Tensor | None, tables: Tables, given: Given,
    check: Check,
) -> Outputs:  # fmt: skip
    """`call` with fp8 outputs, which have no gradient: the check refuses what asks for one."""
    tensors, options = (q, k, q_scale, k_scale), Options(*given)
    if _plain(tensors, tables) and not _wants_grad(q, k):
        return runtime.rope_fp8(*tensors, tables, options, check)
    rest = {"k": k, "q_scale": q_scale, "k_scale": k_scale}
    options = checks.resolved("apply_rope_fp8", {"q": q}, rest, tables, options)
    refuse_sharded("apply_rope_fp8", *tensors, *tables)
    check(*tensors, tables, options)  # type: ignore[misc]
    q_out, k_out = torch.ops.jitrope.rope_fp8(*tensors, *as_op(tables, options))
    return q_out, None if k is None else k_out


def call_kv_cache(tensors: Sequence[Any], tables: Tables, given: Given, check: Check) -> Tensor:
    """`call` that stores k and v: q, k, v, both caches, slots and the scales of q, k and v; gives q."""
    q, k, v, k_cache, v_cache = tensors[:5]
    if not _is_compiling() and _dispatch_modes() == 0 and forward_ad._current_level < 0:
        out = runtime.rope_kv_cache_again(tensors, tables, given)
        if out is not None:
            return out
    options = Options(*given)
    in_place = options.in_place
    name = "apply_rope_kv_cache_" if in_place else "apply_rope_kv_cache"
    written = {"k_cache": k_cache, "v_cache": v_cache}
    if in_place:
        written["q"] = q
    if options.k_too is not False:
        written["k"] = k
    complete = not any(x is None for x in tensors[:6])
    if complete and _plain(tensors, tables) and not _wants_grad(q, k, v, k_cache, v_cache):
        if any(x.is_inference() for x in written.values()):
            checks.check_written(name, False, **written)
        out = runtime.rope_kv_cache(*tensors, tables, options, check, True)  # type: ignore[call-arg]
        _written(tuple(written.values()))
        return out
    needed = dict(zip(("q", "k", "v", "k_cache", "v_cache", "slot_mapping"), tensors))
    scales = dict(zip(("q_scale", "k_scale", "v_scale"), tensors[6:]))
    options = checks.resolved(name, needed, scales, tables, options)
    refuse_sharded(name, *tensors, *tables)
    checks.check_watched(name, False, tables, written)
    check(*tensors, tables, options)  # type: ignore[misc]
    tensors = (q, k, k if options.k_too else None, *tensors[2:])
    if in_place:
        torch.ops.jitrope.rope_kv_cache_(*tensors, *as_op(tables, options))
        return q  # type: ignore[no-any-return]
    return torch.ops.jitrope.rope_kv_cache(*tensors, *as_op(tables, options))  # type: ignore[no-any-return]


def _wants_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tensors)


def call_qkv(qkv: Tensor, tables: Tables, given: Given, check: Check = None) -> Parts:
    """`call` of packed QKV: q, k and v; three times qkv in place."""
    options = Options(*given)
    in_place = options.in_place
    plain, wants_grad = _plain((qkv,), tables), _wants_grad(qkv)
    if plain and not wants_grad:
        if in_place and qkv.is_inference():
            checks.check_written("apply_rope_qkv_", False, qkv=qkv)
        parts = runtime.rope_qkv(qkv, tables, options, check)
        if in_place:
            _written((qkv,))
        return parts
    if check is not None:
        name = "apply_rope_qkv_" if in_place else "apply_rope_qkv"
        options = checks.resolved(name, {"qkv": qkv}, {}, tables, options, plain)
        refuse_sharded(name, qkv, *tables)
        checks.check_watched(name, wants_grad, tables, {"qkv": qkv} if in_place else {})
    values = options.values
    if wants_grad and (plain or (in_place and not _is_compiling())):
        if in_place:
            return (_RecordedQKVInPlace.apply(check, options, qkv, *tables),) * 3
        return _RecordedQKV.apply(check, options, qkv, *tables)  # type: ignore[no-any-return]
    if check is not None:
        check(qkv, tables, options)
    if in_place and not wants_grad:
        torch.ops.jitrope.rope_qkv_(qkv, *as_op(tables, options))
        return qkv, qkv, qkv
    q, k, v = torch.ops.jitrope.rope_qkv(qkv, *as_op(tables, options))
    if in_place:
        value = v if values else value_view(qkv, options.q_per_group)
        rotated = reference.join_qkv(q, k, value, options.q_per_group)
        return (qkv.copy_(spare_stays(qkv, rotated, tables[2], options)),) * 3
    return q, k, v if values else value_view(qkv, options.q_per_group)


def call_qkv_backward(dq: Tensor, dk: Tensor, dv: Tensor, tables: Tables, options: Options) -> Tensor:
    """q and k rotated, and v, in one packed tensor."""
    if _plain((dq, dk, dv), tables) and not _wants_grad(dq, dk, dv):
        return runtime.rope_qkv_backward(dq, dk, dv, tables, options)
    return ops.rope_qkv_backward(dq, dk, dv, tables, options)
