"""torch.library ops and their backward: what torch.compile, checkpointing, vmap and fake tensors see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..base.errors import JitropeError
from ..plan import partition
from ..plan.problem import value_view
from ..plan.spec import Given, Options, changed
from ..plan.views import FP8, Tables, table_pair
from . import launch as runtime
from . import reference
from .reference import RULE

Outputs = tuple[Tensor, "Tensor | None"]
Parts = tuple[Tensor, Tensor, Tensor]


# ---- the library ops -----------------------------------------------------------------------------

_TYPES = {bool: "bool", int: "int", float: "float", str: "str", tuple: "int[]"}
_NAMES = [name for name in Options._fields if name != "in_place"]  # in place is an op of its own
_N_OPTIONS = len(_NAMES)
_OPTIONS = ", ".join(f"{_TYPES[type(Options._field_defaults[name])]} {name}" for name in _NAMES)
_TABLES = "Tensor cos, Tensor sin, Tensor? cu_seqlens, Tensor? start_positions, Tensor? position_ids"
N_TABLES = 5
_ARGUMENTS = f"{_TABLES}, {_OPTIONS}"
_CACHE = "Tensor v, Tensor(c!) k_cache, Tensor(d!) v_cache, Tensor slot_mapping"
_SCALES = "Tensor? q_scale, Tensor? k_scale, Tensor? v_scale"
_lib = torch.library.Library("jitrope", "DEF")
for _schema in (
    # `k` is optional and an op returns tensors only: without it the second one is empty.
    f"rope(Tensor q, Tensor? k, {_ARGUMENTS}) -> (Tensor, Tensor)",
    f"rope_(Tensor(a!) q, Tensor(b!)? k, {_ARGUMENTS}) -> ()",
    f"rope_fp8(Tensor q, Tensor? k, Tensor q_scale, Tensor? k_scale, {_ARGUMENTS}) -> (Tensor, Tensor)",
    # `rotated` is k once more where it is rotated in place too: else nothing may say that k is written.
    f"rope_kv_cache(Tensor q, Tensor k, Tensor(b!)? rotated, {_CACHE}, {_SCALES}, {_ARGUMENTS}) -> Tensor",
    f"rope_kv_cache_(Tensor(a!) q, Tensor k, Tensor(b!)? rotated, {_CACHE}, {_SCALES}, {_ARGUMENTS}) -> ()",
    f"rope_qkv(Tensor qkv, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
    f"rope_qkv_(Tensor(a!) qkv, {_ARGUMENTS}) -> ()",
    f"rope_qkv_backward(Tensor dq, Tensor dk, Tensor dv, {_ARGUMENTS}) -> Tensor",
):
    _lib.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def _cpu(q: Tensor, k: Tensor | None, tables: Tables, options: Options) -> Any:
    q_out, k_out = reference.rope(q, k, *tables, options)
    if not options.in_place:
        return q_out, k_out
    for x, out in ((q, q_out), (k, k_out)):
        if x is not None and out is not None:
            x.copy_(spare_stays(x, out, tables[2], options))
    return q, k


def _cpu_fp8(
    q: Tensor, k: Tensor | None, q_scale: Tensor, k_scale: Tensor | None, tables: Tables, options: Options
) -> Any:
    return reference.rope_fp8(q, k, q_scale, k_scale, tables, options)


def _cpu_kv_cache(q: Tensor, k: Tensor, *rest: Any) -> Tensor:
    *tensors, tables, options = rest
    q_out, k_out = reference.rope_kv_cache(q, k, *tensors, tables, options)  # type: ignore[call-arg]
    if options.k_too:
        k.copy_(k_out)
    return q.copy_(q_out) if options.in_place else q_out


def _cpu_qkv(qkv: Tensor, tables: Tables, options: Options) -> Parts:
    parts = reference.rope_qkv(qkv, *tables, options)
    if options.in_place:
        rotated = reference.join_qkv(*parts, options.q_per_group)
        qkv.copy_(spare_stays(qkv, rotated, tables[2], options))
        return qkv, qkv, qkv
    return parts if options.values else (*parts[:2], value_view(qkv, options.q_per_group))


def _cpu_qkv_backward(dq: Tensor, dk: Tensor, dv: Tensor, tables: Tables, options: Options) -> Tensor:
    return reference.rope_qkv_backward(dq, dk, dv, *tables, options)


def spare_stays(x: Tensor, rotated: Tensor, cu_seqlens: Tensor | None, options: Options) -> Tensor:
    """What an in-place call makes of x: the tokens after the last sequence are not touched."""
    if cu_seqlens is None:
        return rotated
    end = partition.local_rows(cu_seqlens[-1].long(), options.cp_rank, options.cp_size, RULE)
    spare = torch.arange(x.shape[0], device=x.device) >= end
    return torch.where(spare[:, None, None], x, rotated)


def read_options(options: Sequence[Any], in_place: bool = False) -> Options:
    """The options of an op's arguments: it has a list where they are a tuple here, and [0] for an empty one."""
    values: Given = (*(tuple(o)[o == [0] :] if isinstance(o, list) else o for o in options), in_place)
    return Options(*values)


def as_op(tables: Tables, options: Options) -> tuple[Any, ...]:
    """Tables and options as an op takes them. Inductor knows no complex numbers: these go as real views."""
    if options.table == "freqs_cis":
        tables = (*table_pair(*tables[:2], "freqs_cis"), *tables[2:])
        options = changed(options, table="cos_sin")
    if not options.mrope_section:  # AOTInductor hands no empty list over
        options = changed(options, mrope_section=(0,))
    return (*tables, *list(options)[:_N_OPTIONS])  # Dynamo of torch 2.6 cannot slice a named tuple


def mutating(op: Any, *written: int, gives: bool = False) -> Any:
    """An op that writes some of its arguments, which torch's versions then count. gives: it has outputs too."""

    def call(*arguments: Any) -> Any:
        out = op(*arguments)
        torch._C._increment_version([x for n in written if (x := arguments[n]) is not None])
        return out if gives else None

    return call


def _register(key: str, rope: Any, rope_fp8: Any, rope_kv_cache: Any, rope_qkv: Any, backward: Any) -> None:
    def call(function: Any, tensors: int, in_place: bool = False) -> Any:
        """`function` of an op's first tensors, its tables and its options."""
        return lambda *a: function(
            *a[:tensors], a[tensors : tensors + N_TABLES], read_options(a[tensors + N_TABLES :], in_place)
        )

    def functional(op: Any) -> Any:
        def with_an_empty_k(q: Tensor, *rest: Any) -> Any:
            q_out, k_out = op(q, *rest)
            return q_out, q_out.new_empty(0) if k_out is None else k_out

        return with_an_empty_k

    def with_k(op: Any) -> Any:
        return lambda q, k, rotated, *rest: op(q, k if rotated is None else rotated, *rest)

    def functional_qkv(qkv: Tensor, *rest: Any) -> Any:  # an op's outputs may not be views of its inputs
        q, k, v = call(rope_qkv, 1)(qkv, *rest)
        return q, k, v if read_options(rest[N_TABLES:]).values else qkv.new_empty(0)

    for name, implementation in {
        "rope": functional(call(rope, 2)),
        "rope_": mutating(call(rope, 2, True), 0, 1),
        "rope_fp8": functional(call(rope_fp8, 4)),
        "rope_kv_cache": mutating(with_k(call(rope_kv_cache, 9)), 2, 4, 5, gives=True),
        "rope_kv_cache_": mutating(with_k(call(rope_kv_cache, 9, True)), 0, 2, 4, 5),
        "rope_qkv": functional_qkv,
        "rope_qkv_": mutating(call(rope_qkv, 1, True), 0),
        "rope_qkv_backward": call(backward, 3),
    }.items():
        _lib.impl(name, implementation, key)


_register("CPU", _cpu, _cpu_fp8, _cpu_kv_cache, _cpu_qkv, _cpu_qkv_backward)


CUDA = runtime.rope, runtime.rope_fp8, runtime.rope_kv_cache, runtime.rope_qkv, runtime.rope_qkv_backward
_register("CUDA", *CUDA)


@torch.library.register_fake("jitrope::rope", lib=_lib)
def _rope_fake(q: Tensor, k: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(0) if k is None else torch.empty_like(k)


@torch.library.register_fake("jitrope::rope_fp8", lib=_lib)
def _rope_fp8_fake(q: Tensor, k: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    q_out = torch.empty_like(q, dtype=FP8)
    return q_out, q_out.new_empty(0) if k is None else torch.empty_like(k, dtype=FP8)


@torch.library.register_fake("jitrope::rope_kv_cache", lib=_lib)
def _rope_kv_cache_fake(q: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(q, dtype=FP8 if read_options(rest[9 + N_TABLES :]).fp8 else q.dtype)


@torch.library.register_fake("jitrope::rope_", lib=_lib)
@torch.library.register_fake("jitrope::rope_kv_cache_", lib=_lib)
@torch.library.register_fake("jitrope::rope_qkv_", lib=_lib)
def _in_place_fake(*_: Any) -> None:
    return None


@torch.library.register_fake("jitrope::rope_qkv", lib=_lib)
def _qkv_fake(qkv: Tensor, *rest: Any) -> Parts:
    *lead, groups, width = qkv.shape
    q_per_group = read_options(rest[N_TABLES:]).q_per_group
    q = qkv.new_empty((*lead, groups * q_per_group, width // (q_per_group + 2)))
    k = qkv.new_empty((*lead, groups, width // (q_per_group + 2)))
    return q, k, torch.empty_like(k) if read_options(rest[N_TABLES:]).values else qkv.new_empty(0)


@torch.library.register_fake("jitrope::rope_qkv_backward", lib=_lib)
def _qkv_backward_fake(dq: Tensor, dk: Tensor, dv: Tensor, *rest: Any) -> Tensor:
    return dq.new_empty((*dk.shape[:-1], (read_options(rest[N_TABLES:]).q_per_group + 2) * dk.shape[-1]))


def rope(q: Tensor, k: Tensor | None, tables: Tables, options: Options) -> Outputs:
    """The op of fresh tensors; without k it is None again."""
    q_out, k_out = torch.ops.jitrope.rope(q, k, *as_op(tables, options))
    return q_out, None if k is None else k_out


def rope_qkv_backward(dq: Tensor, dk: Tensor, dv: Tensor, tables: Tables, options: Options) -> Tensor:
    """The op."""
    return torch.ops.jitrope.rope_qkv_backward(dq, dk, dv, *as_op(tables, options))  # type: ignore[no-any-return]


def rope_into(inputs: Parts, outputs: Parts, tables: Tables, options: Options) -> None:
    """`runtime.rope_into` in plain torch."""
    q, k, v = inputs
    q, k = reference.rope(q, k, *tables, options)  # type: ignore[assignment]
    for out, x in zip(outputs, (q, k, v)):
        out.copy_(x)


# ---- the backward ----------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def turned_back(options: Options, in_place: bool = False) -> Options:
    """The options of the gradient: a rotation's transpose is the rotation back, from output to input."""
    o = options
    return changed(
        o, conjugate=not o.conjugate, interleaved=o.interleaved_out, interleaved_out=o.interleaved, in_place=in_place
    )


def keep(ctx: Any, tables: Tables, options: Options) -> None:
    """Tables, lengths, starts and positions; never q or k."""
    ctx.options = turned_back(options)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tables)


def rotate_back(
    rotate: Callable[..., Outputs], tables: Tables, options: Options, dq: Tensor | None, dk: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of q and k, by the op or by `dispatch.call`."""
    if dq is not None:
        return rotate(dq, dk, tables, options)
    if dk is not None:
        return None, rotate(dk, None, tables, options)[0]
    return None, None


def rotate_back_qkv(rotate: Callable[..., Tensor], ctx: Any, *grads: Tensor | None) -> Tensor | None:
    """The gradient of packed QKV, by the op or by `dispatch.call_qkv_backward`."""
    if all(x is None for x in grads):
        return None
    (*lead, groups, dim), dtype, device = ctx.k_like
    sizes = ((*lead, groups * ctx.options.q_per_group, dim), (*lead, groups, dim), (*lead, groups, dim))
    dq, dk, dv = (torch.zeros(size, dtype=dtype, device=device) if x is None else x for size, x in zip(sizes, grads))
    return rotate(dq, dk, dv, ctx.saved_tensors, ctx.options)


def _setup_rope(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.has_k = inputs[1] is not None
    keep(ctx, inputs[2 : 2 + N_TABLES], read_options(inputs[2 + N_TABLES :]))  # type: ignore[arg-type]


def _backward_rope(ctx: Any, dq: Tensor | None, dk: Tensor | None) -> tuple[Any, ...]:
    return *rotate_back(rope, ctx.saved_tensors, ctx.options, dq, dk if ctx.has_k else None), *(None,) * (
        N_TABLES + _N_OPTIONS
    )


def _setup_qkv(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.k_like = (output[1].shape, output[1].dtype, output[1].device)
    keep(ctx, inputs[1 : 1 + N_TABLES], read_options(inputs[1 + N_TABLES :]))  # type: ignore[arg-type]


def _backward_qkv(ctx: Any, dq: Tensor | None, dk: Tensor | None, dv: Tensor | None) -> tuple[Any, ...]:
    dv = None if dv is None or dv.numel() == 0 else dv  # no values: v's gradient comes through the view
    return rotate_back_qkv(rope_qkv_backward, ctx, dq, dk, dv), *(None,) * (N_TABLES + _N_OPTIONS)


def _setup_qkv_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[3 : 3 + N_TABLES])
    ctx.options = turned_back(read_options(inputs[3 + N_TABLES :]))


def _backward_of_qkv_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    options = changed(ctx.options, values=True)
    return *torch.ops.jitrope.rope_qkv(grad, *as_op(ctx.saved_tensors, options)), *(None,) * (N_TABLES + _N_OPTIONS)


def _no_backward(ctx: Any, *_: Any) -> Any:
    raise JitropeError("fp8 outputs have no gradient; call it under torch.no_grad()")


for _name, _rule, _setup in (
    ("rope", _backward_rope, _setup_rope),
    ("rope_qkv", _backward_qkv, _setup_qkv),
    ("rope_qkv_backward", _backward_of_qkv_backward, _setup_qkv_backward),
    ("rope_fp8", _no_backward, None),
):
    torch.library.register_autograd(f"jitrope::{_name}", _rule, setup_context=_setup, lib=_lib)
