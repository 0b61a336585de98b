"""QK-norm + rope: its library ops, their backward, and which way a call goes (see `dispatch`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..base.errors import InvalidInput, JitropeError
from ..plan.problem import joint_parts
from ..plan.spec import Given, Norm, Options, changed
from ..plan.views import Tables, Weights, table_pair
from . import checks, reference
from . import launch as runtime
from .dispatch import _dispatch_modes, _is_compiling, _plain, _wants_grad, _written, refuse_sharded, sharded
from .launch import Check
from .library import _ARGUMENTS, _N_OPTIONS, N_TABLES, Outputs, Parts, _lib, as_op, mutating, read_options, turned_back

_NORM = "str norm_rounding, bool across_heads, bool zero_centered, float eps"
_WEIGHTS = "Tensor? q_weight, Tensor? k_weight"
_N = len(Norm._fields)
_STREAMS = ", ".join(f"Tensor {name}{n}" for n in (1, 2) for name in "qkv")
_STREAM_WEIGHTS = ", ".join(f"Tensor? {name}_weight{n}" for n in (1, 2) for name in "qk")
_N_JOINT = 12  # tensors of a joint call: those, and cos and sin of the second stream
for _schema in (
    f"qk_norm_rope(Tensor q, Tensor? k, {_WEIGHTS}, {_ARGUMENTS}, {_NORM}) -> (Tensor, Tensor)",
    f"qk_norm_rope_(Tensor(a!) q, Tensor(b!)? k, {_WEIGHTS}, {_ARGUMENTS}, {_NORM}) -> ()",
    f"qk_norm_rope_joint({_STREAMS}, {_STREAM_WEIGHTS}, Tensor? cos2, Tensor? sin2, {_ARGUMENTS}, {_NORM}) "
    "-> (Tensor, Tensor, Tensor)",
    # What is not there comes back empty.
    f"qk_norm_rope_backward(Tensor dq, Tensor? dk, Tensor q, Tensor? k, {_WEIGHTS}, {_ARGUMENTS}, {_NORM}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
):
    _lib.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


# ---- the library ops -----------------------------------------------------------------------------


def _cpu(q: Tensor, k: Tensor | None, *rest: Any) -> Outputs:
    weights, tables, options, norm = rest[:2], *rest[2:]
    outputs = reference.qk_norm_rope(q, k, *weights, tables, options, norm)  # type: ignore[call-arg]
    if not options.in_place:
        return outputs
    for x, out in zip((q, k), outputs):
        if x is not None and out is not None:
            x.copy_(out)
    return q, k


def _cpu_joint(*arguments: Any) -> Parts:
    streams, weights, second_tables = arguments[:6], arguments[6:10], arguments[10:_N_JOINT]
    tables, options, norm = arguments[_N_JOINT:]
    return reference.qk_norm_rope_joint(
        streams[:3], streams[3:], weights[:2], weights[2:], tables, options, norm, second_tables
    )


def _cpu_backward(*arguments: Any) -> tuple[Tensor | None, ...]:
    *tensors, tables, options, norm = arguments
    return reference.qk_norm_rope_backward(*tensors, tables, options, norm)  # type: ignore[call-arg]


def _register(key: str, forward: Any, joint: Any, backward: Any) -> None:
    def call(function: Any, tensors: int, in_place: bool = False) -> Any:
        """`function` of an op's first tensors, its tables, its options and its norm."""

        def called(*a: Any) -> Any:
            rest, norm = a[tensors:-_N], Norm(*a[-_N:])
            return function(*a[:tensors], rest[:N_TABLES], read_options(rest[N_TABLES:], in_place), norm)

        return called

    def with_empty_ones(op: Any) -> Any:
        def called(q: Tensor, *rest: Any) -> Any:
            return tuple(q.new_empty(0) if x is None else x for x in op(q, *rest))

        return called

    for name, implementation in {
        "qk_norm_rope": with_empty_ones(call(forward, 4)),
        "qk_norm_rope_": mutating(call(forward, 4, True), 0, 1),
        "qk_norm_rope_joint": call(joint, _N_JOINT),
        "qk_norm_rope_backward": with_empty_ones(call(backward, 6)),
    }.items():
        _lib.impl(name, implementation, key)


_register("CPU", _cpu, _cpu_joint, _cpu_backward)


def _cuda_backward(*arguments: Any) -> tuple[Tensor | None, ...]:
    """Both weights' gradients are one tensor's parts, which an op's outputs may not be."""
    dq, dk, dq_weight, dk_weight = runtime.qk_norm_rope_backward(*arguments)
    return dq, dk, dq_weight, dk_weight if dq_weight is None or dk_weight is None else dk_weight.clone()


CUDA = runtime.qk_norm_rope, runtime.qk_norm_rope_joint, _cuda_backward
_register("CUDA", *CUDA)


def _like(x: Tensor | None, other: Tensor) -> Tensor:
    return other.new_empty(0) if x is None else torch.empty_like(x)


@torch.library.register_fake("jitrope::qk_norm_rope", lib=_lib)
def _fake(q: Tensor, k: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), _like(k, q)


@torch.library.register_fake("jitrope::qk_norm_rope_", lib=_lib)
def _in_place_fake(*_: Any) -> None:
    return None


@torch.library.register_fake("jitrope::qk_norm_rope_joint", lib=_lib)
def _joint_fake(q1: Tensor, k1: Tensor, v1: Tensor, q2: Tensor, *_: Any) -> Parts:
    return joint_parts(q1, k1, v1, q2)


@torch.library.register_fake("jitrope::qk_norm_rope_backward", lib=_lib)
def _backward_fake(dq: Tensor, dk: Tensor | None, q: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(_like(x, q) for x in (q, *rest[:3]))


# ---- the backward ----------------------------------------------------------------------------------


def _keep(ctx: Any, tensors: Sequence[Tensor | None], tables: Tables, options: Options, norm: Norm) -> None:
    # Roundings pass gradients on as they are: one kernel for all, with contracted products, which are the fewest.
    ctx.options = changed(turned_back(options), rounding="complex64")
    ctx.norm = norm._replace(rounding="none")
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *tables)


def _grads(
    ctx: Any, dq: Tensor | None, dk: Tensor | None, tensors: Sequence[Any], tables: Tables
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k and the weights: the tensors."""
    q, k, q_weight, k_weight = tensors
    if dq is None and dk is None:
        return None, None, None, None
    if dq is None:  # k alone
        dk, _, dw, _ = call_backward(dk, None, k, None, k_weight, None, tables, ctx.options, ctx.norm)  # type: ignore[arg-type]
        return None, dk, None, dw
    k = None if dk is None else k
    return call_backward(dq, dk, q, k, q_weight, k_weight if k is not None else None, tables, ctx.options, ctx.norm)


def call_backward(
    dq: Tensor, dk: Tensor | None, q: Tensor, k: Tensor | None, q_weight: Tensor | None, k_weight: Tensor | None,
    tables: Tables, options: Options, norm: Norm,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients of q, k and the weights, past torch's dispatcher where nothing watches."""
    tensors = (dq, dk, q, k, q_weight, k_weight)
    if _plain(tensors, tables) and not _wants_grad(*tensors):
        return runtime.qk_norm_rope_backward(*tensors, tables, options, norm)
    out = torch.ops.jitrope.qk_norm_rope_backward(*tensors, *as_op(tables, options), *norm)
    return tuple(None if like is None else x for x, like in zip(out, (q, k, q_weight, k_weight)))


def _joint_grads(ctx: Any, dq: Tensor | None, dk: Tensor | None, dv: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of the streams' tensors and weights: each stream's own tokens and rows of the tables."""
    q1, k1, q2, k2, *rest = ctx.saved_tensors
    weights, second_tables, tables = rest[:4], rest[4:6], rest[6:]
    grads: list[Tensor | None] = []
    weight_grads: list[Tensor | None] = []
    begin = 0
    for n, (q, k) in enumerate(((q1, k1), (q2, k2))):
        end = begin + q.shape[1]
        own = [None if x is None else x[:, begin:end] for x in (dq, dk, dv)]
        if n == 1 and second_tables[0] is not None:
            rows = second_tables
        else:
            rows = [t[begin:end] if t.dim() == 2 else t[:, begin:end] for t in tables[:2]]
        tensors = (q, k, *weights[2 * n : 2 * n + 2])
        dq_n, dk_n, dw_q, dw_k = _grads(ctx, own[0], own[1], tensors, (rows[0], rows[1], None, None, None))
        grads += [dq_n, dk_n, own[2]]
        weight_grads += [dw_q, dw_k]
        begin = end
    return *grads, *weight_grads, None, None


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    rest, norm = inputs[4:-_N], Norm(*inputs[-_N:])
    ctx.has_k = inputs[1] is not None
    _keep(ctx, inputs[:4], rest[:N_TABLES], read_options(rest[N_TABLES:]), norm)


def _backward(ctx: Any, dq: Tensor | None, dk: Tensor | None) -> tuple[Any, ...]:
    *tensors, cos, sin, cu_seqlens, starts, ids = ctx.saved_tensors
    grads = _grads(ctx, dq, dk if ctx.has_k else None, tensors, (cos, sin, cu_seqlens, starts, ids))
    return *grads, *(None,) * (_N + N_TABLES + _N_OPTIONS)


def _setup_joint(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    rest = inputs[_N_JOINT:-_N]
    q1, k1, _, q2, k2, _ = inputs[:6]
    options, norm = read_options(rest[N_TABLES:]), Norm(*inputs[-_N:])
    _keep(ctx, (q1, k1, q2, k2, *inputs[6:_N_JOINT]), rest[:N_TABLES], options, norm)


def _backward_joint(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    return *_joint_grads(ctx, *grads), *(None,) * (_N + N_TABLES + _N_OPTIONS)


def _no_second_backward(ctx: Any, *_: Any) -> Any:
    raise JitropeError("qk_norm_rope has no second derivative")


for _name, _rule, _set_up in (
    ("qk_norm_rope", _backward, _setup),
    ("qk_norm_rope_joint", _backward_joint, _setup_joint),
    ("qk_norm_rope_backward", _no_second_backward, None),
):
    torch.library.register_autograd(f"jitrope::{_name}", _rule, setup_context=_set_up, lib=_lib)


class _Recorded(torch.autograd.Function):
    """A call under eager autograd, past torch's dispatcher."""

    @staticmethod
    def forward(
        ctx: Any, check: Check, options: Options, norm: Norm, q: Tensor, k: Tensor | None, q_weight: Any,
        k_weight: Any, *tables: Any,
    ) -> Any:  # fmt: skip
        _keep(ctx, (q, k, q_weight, k_weight), tables, options, norm)  # type: ignore[arg-type]
        out = runtime.qk_norm_rope(q, k, q_weight, k_weight, tables, options, norm, check)  # type: ignore[arg-type]
        return out[0] if k is None else out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        *tensors, cos, sin, cu_seqlens, starts, ids = ctx.saved_tensors
        dq, dk = (*grads, None)[:2]
        found = _grads(ctx, dq, dk, tensors, (cos, sin, cu_seqlens, starts, ids))
        return None, None, None, *found, *(None,) * N_TABLES


class _RecordedJoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, check: Check, options: Options, norm: Norm, *tensors: Any) -> Any:
        q1, k1, _, q2, k2, _ = tensors[:6]
        _keep(ctx, (q1, k1, q2, k2, *tensors[6:_N_JOINT]), tensors[_N_JOINT:], options, norm)  # type: ignore[arg-type]
        return runtime.qk_norm_rope_joint(*tensors[:_N_JOINT], tensors[_N_JOINT:], options, norm, check)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return None, None, None, *_joint_grads(ctx, *grads), *(None,) * N_TABLES


# ---- which way -------------------------------------------------------------------------------------


def call(
    q: Tensor, k: Tensor | None, weights: Weights, tables: Tables, given: Given, norm: Norm, check: Check
) -> Outputs:
    """Normalise and rotate, whoever watches; a plain call goes straight to the launch."""
    labels = ("q", "k", "q_weight", "k_weight")
    tensors = (q, k, *weights)
    if not _is_compiling() and _dispatch_modes() == 0 and forward_ad._current_level < 0 and not _wants_grad(*tensors):
        out = runtime.qk_norm_rope_again(q, k, weights, tables, given, norm)
        if out is not None:
            return out
    options = Options(*given)
    in_place = options.in_place
    plain, wants_grad = _plain(tensors, tables), _wants_grad(*tensors)
    name = "qk_norm_rope_" if in_place else "qk_norm_rope"
    if in_place and wants_grad:
        raise InvalidInput(
            "qk_norm_rope_: it has no gradient, which would need q and k as they were; call qk_norm_rope"
        )
    if plain and not wants_grad:
        if in_place and (q.is_inference() or (k is not None and k.is_inference())):
            checks.check_written(name, False, q=q, k=k)
        out = runtime.qk_norm_rope(q, k, *weights, tables, options, norm, check, True)
        if in_place:
            _written((q,) if k is None else (q, k))
        return out
    options, norm = checks.resolved_norm(name, {"q": q}, dict(zip(labels[1:], tensors[1:])), tables, options, norm)
    checks.check_watched(name, wants_grad, tables, {"q": q, "k": k} if in_place else {}, **dict(zip(labels, tensors)))
    if not plain and check is not None and sharded(*tensors, *tables):
        from . import sharding

        check(*tensors, tables, options, norm)
        labelled = dict(zip(labels, tensors))
        (q, k, *own), tables = sharding.prepared(name, labelled, tables, Options(*options), norm.across_heads)
        weights = own[0], own[1]
        check = None
    if plain:
        out = _Recorded.apply(check, options, norm, q, k, *weights, *tables)
        return (out, None) if k is None else out
    if check is not None:
        check(q, k, *weights, tables, options, norm)
    if in_place:
        torch.ops.jitrope.qk_norm_rope_(q, k, *weights, *as_op(tables, options), *norm)
        return q, k
    q_out, k_out = torch.ops.jitrope.qk_norm_rope(q, k, *weights, *as_op(tables, options), *norm)
    return q_out, None if k is None else k_out


def call_joint(
    streams: Sequence[Tensor], weights: Sequence[Tensor | None], second_tables: Sequence[Tensor | None],
    tables: Tables, given: Given, norm: Norm, check: Check,
) -> Parts:  # fmt: skip
    """The same of two streams, q, k and v of each; the weights are those of q and k of each.

    second_tables: cos and sin of the second, if they are not rows of the tables.
    """
    tensors, options = (*streams, *weights, *second_tables), Options(*given)
    own = second_tables[0] is None or _plain(streams[:1], (*second_tables, None, None, None))  # type: ignore[arg-type]
    plain = own and _plain(tensors, tables)
    name, wants_grad = "qk_norm_rope_joint", _wants_grad(*streams, *weights)
    if plain and not wants_grad:
        return runtime.qk_norm_rope_joint(*tensors, tables, options, norm, check)
    needed = dict(zip([f"{stream}'s {letter}" for stream in ("first", "second") for letter in "qkv"], streams))
    labels = [f"{stream}'s {x}_weight" for stream in ("first", "second") for x in "qk"]
    options, norm = checks.resolved_norm(name, needed, dict(zip(labels, weights)), tables, options, norm)
    refuse_sharded(name, *tensors, *tables)
    kept = {label: x for label, x in (*needed.items(), *zip(labels, weights)) if not label.endswith("v")}
    checks.check_watched(name, wants_grad, tables, {}, **kept)
    checks.check_watched(name, wants_grad, (*second_tables, None, None, None), {})  # type: ignore[arg-type]
    if plain:
        return _RecordedJoint.apply(check, options, norm, *tensors, *tables)  # type: ignore[no-any-return]
    if check is not None:
        check(*tensors, tables, options, norm)
    cos, sin = second_tables
    if options.table == "freqs_cis" and cos is not None and sin is not None:
        tensors = (*tensors[:10], *table_pair(cos, sin, "freqs_cis"))
    return torch.ops.jitrope.qk_norm_rope_joint(*tensors, *as_op(tables, options), *norm)  # type: ignore[no-any-return]
