"""The way from a checked call to the work: torch.library ops, their backward, and the short cut.

`torch.ops.jitrope.rope`, `rope_`, `rope_qkv` and `rope_qkv_` are what torch.compile, checkpointing, vmap
and fake tensors see. A call that nothing watches does not go through torch's dispatcher, which would cost
as much host time as the launch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import reference, runtime
from .problem import value_view
from .spec import Options

Outputs = tuple[Tensor, "Tensor | None"]
Parts = tuple[Tensor, Tensor, Tensor]
Check = Callable[..., None] | None
Tables = tuple[Tensor, Tensor, "Tensor | None", "Tensor | None"]
"""cos, sin, cu_seqlens and start_positions."""

_IN_PLACE = Options._fields.index("in_place")
assert Options._fields[-1] == "in_place"
_Q_PER_GROUP = Options._fields.index("q_per_group")
_VALUES = Options._fields.index("values")

# ---- the library ops -----------------------------------------------------------------------------

_TYPES = {bool: "bool", int: "int", float: "float", str: "str"}
_OPTIONS = ", ".join(f"{_TYPES[type(default)]} {name}" for name, default in Options._field_defaults.items())
_ARGUMENTS = "Tensor cos, Tensor sin, Tensor? cu_seqlens, Tensor? start_positions, " + _OPTIONS.rsplit(", ", 1)[0]
_lib = torch.library.Library("jitrope", "DEF")
for _schema in (
    # `k` is optional and an op returns tensors only: without it the second one is empty.
    f"rope(Tensor q, Tensor? k, {_ARGUMENTS}) -> (Tensor, Tensor)",
    f"rope_(Tensor(a!) q, Tensor(b!)? k, {_ARGUMENTS}) -> ()",
    f"rope_qkv(Tensor qkv, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
    f"rope_qkv_(Tensor(a!) qkv, {_ARGUMENTS}) -> ()",
    f"rope_qkv_backward(Tensor dq, Tensor dk, Tensor dv, {_ARGUMENTS}) -> Tensor",
):
    _lib.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def _split(rest: tuple[Any, ...]) -> tuple[Tables, Options]:
    return rest[:4], Options(*rest[4])  # type: ignore[return-value]


def _cpu(q: Tensor, k: Tensor | None, *rest: Any) -> Any:
    tables, options = _split(rest)
    q_out, k_out = reference.rope(q, k, *tables, options)
    if not options.in_place:
        return q_out, k_out
    for x, out in ((q, q_out), (k, k_out)):
        if x is not None and out is not None:
            x.copy_(_spare_stays(x, out, tables[2], options.cp_size))
    return q, k


def _cpu_qkv(qkv: Tensor, *rest: Any) -> Parts:
    tables, options = _split(rest)
    parts = reference.rope_qkv(qkv, *tables, options)
    if options.in_place:
        rotated = reference.join_qkv(*parts, options.q_per_group)
        qkv.copy_(_spare_stays(qkv, rotated, tables[2], options.cp_size))
        return qkv, qkv, qkv
    return parts if options.values else (*parts[:2], value_view(qkv, options.q_per_group))


def _spare_stays(x: Tensor, rotated: Tensor, cu_seqlens: Tensor | None, cp_size: int) -> Tensor:
    """What an in-place call makes of x: the tokens after the last sequence are not touched."""
    if cu_seqlens is None:
        return rotated
    spare = torch.arange(x.shape[0], device=x.device) >= cu_seqlens[-1] // cp_size
    return torch.where(spare[:, None, None], x, rotated)


def _register(key: str, rope: Any, rope_qkv: Any, backward: Any) -> None:
    def functional(q: Tensor, k: Tensor | None, *rest: Any) -> Any:
        q_out, k_out = rope(q, k, *rest[:4], (*rest[4:], False))
        return q_out, q.new_empty(0) if k_out is None else k_out

    def mutating(q: Tensor, k: Tensor | None, *rest: Any) -> None:
        rope(q, k, *rest[:4], (*rest[4:], True))

    def functional_qkv(qkv: Tensor, *rest: Any) -> Any:  # an op's outputs may not be views of its inputs
        q, k, v = rope_qkv(qkv, *rest[:4], (*rest[4:], False))
        return q, k, v if rest[4 + _VALUES] else qkv.new_empty(0)

    def mutating_qkv(qkv: Tensor, *rest: Any) -> None:
        rope_qkv(qkv, *rest[:4], (*rest[4:], True))

    def backward_qkv(dq: Tensor, dk: Tensor, dv: Tensor, *rest: Any) -> Tensor:
        return backward(dq, dk, dv, *rest[:4], (*rest[4:], False))  # type: ignore[no-any-return]

    for name, implementation in (
        ("rope", functional), ("rope_", mutating), ("rope_qkv", functional_qkv), ("rope_qkv_", mutating_qkv),
        ("rope_qkv_backward", backward_qkv),
    ):  # fmt: skip
        _lib.impl(name, implementation, key)


def _cpu_qkv_backward(dq: Tensor, dk: Tensor, dv: Tensor, *rest: Any) -> Tensor:
    tables, options = _split(rest)
    return reference.rope_qkv_backward(dq, dk, dv, *tables, options)


_register("CPU", _cpu, _cpu_qkv, _cpu_qkv_backward)
_register("CUDA", runtime.rope, runtime.rope_qkv, runtime.rope_qkv_backward)


@torch.library.register_fake("jitrope::rope", lib=_lib)
def _rope_fake(q: Tensor, k: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(0) if k is None else torch.empty_like(k)


@torch.library.register_fake("jitrope::rope_", lib=_lib)
@torch.library.register_fake("jitrope::rope_qkv_", lib=_lib)
def _in_place_fake(*_: Any) -> None:
    return None


@torch.library.register_fake("jitrope::rope_qkv", lib=_lib)
def _qkv_fake(qkv: Tensor, *rest: Any) -> Parts:
    *lead, groups, width = qkv.shape
    q_per_group = rest[4 + _Q_PER_GROUP]
    q = qkv.new_empty((*lead, groups * q_per_group, width // (q_per_group + 2)))
    k = qkv.new_empty((*lead, groups, width // (q_per_group + 2)))
    return q, k, torch.empty_like(k) if rest[4 + _VALUES] else qkv.new_empty(0)


@torch.library.register_fake("jitrope::rope_qkv_backward", lib=_lib)
def _qkv_backward_fake(dq: Tensor, dk: Tensor, dv: Tensor, *rest: Any) -> Tensor:
    return dq.new_empty((*dk.shape[:-1], (rest[4 + _Q_PER_GROUP] + 2) * dk.shape[-1]))


# ---- the backward ----------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def turned_back(options: tuple[Any, ...], in_place: bool = False) -> tuple[Any, ...]:
    """The options of the gradient: a rotation's transpose is the rotation back, from output to input."""
    o = Options(*options)
    return tuple(
        o._replace(
            conjugate=not o.conjugate, interleaved=o.interleaved_out, interleaved_out=o.interleaved, in_place=in_place
        )
    )


def _keep(ctx: Any, tables: Tables, options: tuple[Any, ...]) -> None:
    """Tables, lengths and starts; never q or k."""
    ctx.options = turned_back(options)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tables)


def _rotate_back(ctx: Any, dq: Tensor | None, dk: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    cos, sin, cu_seqlens, start_positions = ctx.saved_tensors
    if dq is not None:
        return call(dq, dk, cos, sin, cu_seqlens, start_positions, ctx.options)
    if dk is not None:
        return None, call(dk, None, cos, sin, cu_seqlens, start_positions, ctx.options)[0]
    return None, None


def _rotate_back_qkv(ctx: Any, *grads: Tensor | None) -> Tensor | None:
    if all(x is None for x in grads):
        return None
    (*lead, groups, dim), dtype, device = ctx.k_like
    sizes = ((*lead, groups * ctx.options[_Q_PER_GROUP], dim), (*lead, groups, dim), (*lead, groups, dim))
    dq, dk, dv = (torch.zeros(size, dtype=dtype, device=device) if x is None else x for size, x in zip(sizes, grads))
    return call_qkv_backward(dq, dk, dv, ctx.saved_tensors, ctx.options)


def _setup_rope(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.has_k = inputs[1] is not None
    _keep(ctx, inputs[2:6], (*inputs[6:], False))


def _backward_rope(ctx: Any, dq: Tensor | None, dk: Tensor | None) -> tuple[Any, ...]:
    return *_rotate_back(ctx, dq, dk if ctx.has_k else None), *(None,) * (3 + len(ctx.options))


def _setup_qkv(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.k_like = (output[1].shape, output[1].dtype, output[1].device)
    _keep(ctx, inputs[1:5], (*inputs[5:], False))


def _backward_qkv(ctx: Any, dq: Tensor | None, dk: Tensor | None, dv: Tensor | None) -> tuple[Any, ...]:
    dv = None if dv is None or dv.numel() == 0 else dv  # no values: v's gradient comes through the view
    return _rotate_back_qkv(ctx, dq, dk, dv), *(None,) * (3 + len(ctx.options))


def _setup_qkv_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[3:7])
    ctx.options = turned_back((*inputs[7:], False))


def _backward_of_qkv_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    options = tuple(Options(*ctx.options)._replace(values=True))
    return *call_qkv(grad, ctx.saved_tensors, options), *(None,) * (3 + len(options))


for _name, _rule, _setup in (
    ("rope", _backward_rope, _setup_rope),
    ("rope_qkv", _backward_qkv, _setup_qkv),
    ("rope_qkv_backward", _backward_of_qkv_backward, _setup_qkv_backward),
):
    torch.library.register_autograd(f"jitrope::{_name}", _rule, setup_context=_setup, lib=_lib)


class _Recorded(torch.autograd.Function):
    """A call under eager autograd: a fraction of the host time of the library's own recording."""

    @staticmethod
    def forward(
        ctx: Any, check: Check, options: tuple[Any, ...], q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor,
        cu_seqlens: Tensor | None, start_positions: Tensor | None,
    ) -> Any:  # fmt: skip
        _keep(ctx, (cos, sin, cu_seqlens, start_positions), options)
        ctx.in_place = options[-1]
        if ctx.in_place:
            ctx.mark_dirty(*(x for x in (q, k) if x is not None))
        q_out, k_out = call(q, k, cos, sin, cu_seqlens, start_positions, options, check)
        return q_out if k is None else (q_out, k_out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        dq, dk = (*grads, None)[:2]
        rotated = _rotate_back(ctx, dq, dk)
        if ctx.in_place:  # what stayed passes its gradient on
            cu_seqlens, cp_size = ctx.saved_tensors[2], Options(*ctx.options).cp_size
            rotated = tuple(  # type: ignore[assignment]
                y if g is None or y is None else _spare_stays(g, y, cu_seqlens, cp_size)
                for g, y in zip((dq, dk), rotated)
            )
        return None, None, *rotated, None, None, None, None


class _RecordedQKV(torch.autograd.Function):
    """The same for packed QKV; with `values` off the third output is a view of the input."""

    @staticmethod
    def forward(ctx: Any, check: Check, options: tuple[Any, ...], qkv: Tensor, *tables: Any) -> Any:
        parts = call_qkv(qkv, tables, options, check)  # type: ignore[arg-type]
        ctx.k_like = (parts[1].shape, parts[1].dtype, parts[1].device)
        _keep(ctx, tables, options)  # type: ignore[arg-type]
        return parts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return None, None, _rotate_back_qkv(ctx, *grads), None, None, None, None


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
        return None, None, rotated, None, None, None, None


# ---- which way ---------------------------------------------------------------------------------------


def _plain(x: Tensor, tables: Tables) -> bool:
    """Nothing but autograd may watch this call.

    Other watchers are torch.compile, functorch transforms, forward-mode AD, dispatch modes (fake
    tensors, selective checkpointing) and tensor subclasses. A table that requires a gradient is
    left to the check, which refuses it.
    """
    cos, sin = tables[:2]
    return (
        not torch.compiler.is_compiling()
        and type(x) is type(cos) is type(sin) is Tensor
        and x.is_cuda
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
        and not (torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad))
    )


def call(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    cu_seqlens: Tensor | None,
    start_positions: Tensor | None,
    options: tuple[Any, ...],
    check: Check = None,
) -> Outputs:
    """Rotate, whoever watches. `options` are the values of `Options`; `check` refuses bad input.

    A plain call goes straight to the launch, past torch's dispatcher.
    """
    in_place = options[_IN_PLACE]
    tables = (cos, sin, cu_seqlens, start_positions)
    plain = _plain(q, tables) and (k is None or type(k) is Tensor)
    wants_grad = torch.is_grad_enabled() and (q.requires_grad or (k is not None and k.requires_grad))
    if plain and not wants_grad:
        out = runtime.rope(q, k, *tables, options, check)
        if in_place:
            torch._C._increment_version((q,) if k is None else (q, k))
        return out
    if wants_grad and (plain or (in_place and not torch.compiler.is_compiling())):
        recorded: Any = _Recorded.apply(check, options, q, k, *tables)
        return (recorded, None) if k is None else recorded
    if check is not None:
        check(q, k, *tables, options)
    if in_place and not wants_grad:
        torch.ops.jitrope.rope_(q, k, *tables, *options[:-1])
        return q, k
    q_out, k_out = torch.ops.jitrope.rope(q, k, *tables, *options[:-1])
    if in_place:  # traced under autograd: a copy, which Inductor writes in place
        cp_size = Options(*options).cp_size
        q_out = q.copy_(_spare_stays(q, q_out, cu_seqlens, cp_size))
        k_out = None if k is None else k.copy_(_spare_stays(k, k_out, cu_seqlens, cp_size))
    return q_out, None if k is None else k_out


def call_qkv(qkv: Tensor, tables: Tables, options: tuple[Any, ...], check: Check = None) -> Parts:
    """`call` of packed QKV: q, k and v; three times qkv in place."""
    in_place, values = options[_IN_PLACE], options[_VALUES]
    plain = _plain(qkv, tables)
    wants_grad = torch.is_grad_enabled() and qkv.requires_grad
    if plain and not wants_grad:
        parts = runtime.rope_qkv(qkv, *tables, options, check)
        if in_place:
            torch._C._increment_version((qkv,))
        return parts
    if wants_grad and (plain or (in_place and not torch.compiler.is_compiling())):
        if in_place:
            return (_RecordedQKVInPlace.apply(check, options, qkv, *tables),) * 3
        return _RecordedQKV.apply(check, options, qkv, *tables)  # type: ignore[no-any-return]
    if check is not None:
        check(qkv, *tables, options)
    if in_place and not wants_grad:
        torch.ops.jitrope.rope_qkv_(qkv, *tables, *options[:-1])
        return qkv, qkv, qkv
    q, k, v = torch.ops.jitrope.rope_qkv(qkv, *tables, *options[:-1])
    if in_place:
        value = v if values else value_view(qkv, options[_Q_PER_GROUP])
        rotated = reference.join_qkv(q, k, value, options[_Q_PER_GROUP])
        return (qkv.copy_(_spare_stays(qkv, rotated, tables[2], Options(*options).cp_size)),) * 3
    return q, k, v if values else value_view(qkv, options[_Q_PER_GROUP])


def call_qkv_backward(dq: Tensor, dk: Tensor, dv: Tensor, tables: Tables, options: tuple[Any, ...]) -> Tensor:
    """q and k rotated, and v, in one packed tensor."""
    watched = torch.is_grad_enabled() and any(x.requires_grad for x in (dq, dk, dv))
    if all(type(x) is Tensor for x in (dq, dk, dv)) and _plain(dq, tables) and not watched:
        return runtime.rope_qkv_backward(dq, dk, dv, *tables, options)
    return torch.ops.jitrope.rope_qkv_backward(dq, dk, dv, *tables, *options[:-1])  # type: ignore[no-any-return]
