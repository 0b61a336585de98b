"""A fused projection that holds q, k and v: the source, and its gradient."""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor

from .. import chain
from ..base import views
from ..base.arguments import refuse
from ..base.fit import Fail
from ..base.views import MEANS, Tensors, canonical, fused_part, fused_sizes
from ..plan.options import Options
from ..sinks import results
from ..sinks.results import LETTERS
from ..stages import bias, positions
from ..stages.norm import NO_NORM, gradients_of_means, norm_of, sums_heads
from .backward import Backward, norm_turned_back, turned_back
from .operation import Call, Operation, operation, tables_of
from .outs import copy_heads
from .source import Read, Source


def part_with_bias(t: Tensors, name: str, o: Options) -> Tensor:
    """One part of a call's fused tensor, a view, or with the projection's bias a fresh tensor."""
    return bias.forward(name, fused_part(t["qkv"], name, o), t, o)


def split_qkv(t: Tensors, o: Options) -> Tensors:
    """q, k and v, and the gate, (..., heads, D); views, except a q of several groups, or with a bias."""
    parts = {name: part_with_bias(t, name, o) for name in LETTERS[: 3 + _gated(o)]}
    return {**parts, "q": parts["q"].flatten(-3, -2)} if o.order == "grouped" else parts


def heads_of(t: Tensors, o: Options) -> Tensors:
    """A call's tensors with the parts of its fused tensor, which have the projection's bias if it is given."""
    return {**t, **{name: x.contiguous() for name, x in split_qkv(t, o).items()}}


def join_qkv(q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, o: Options) -> Tensor:
    """The inverse of `split_qkv`; a missing gate is zero."""
    if o.order == "grouped":
        return torch.cat((q.unflatten(-2, (-1, o.q_per_group)), k.unsqueeze(-2), v.unsqueeze(-2)), -2).flatten(-2)
    if o.order == "qkv_gated":
        q = torch.stack((q, torch.zeros_like(q) if gate is None else gate), -2).flatten(-3, -2)
    return torch.cat((q, k, v), -2)


def fused_places(qkv: Tensor, o: Options) -> Tensors:
    """The places of q, k, v and the gate in a fused tensor."""
    parts = {name: fused_part(canonical(qkv, o.layout), name, o) for name in LETTERS[: 3 + _gated(o)]}
    return {name: x if x.dim() == 5 else x.unsqueeze(3) for name, x in parts.items()}


def _gated(o: Options) -> bool:
    return o.order == "qkv_gated"


class Fused(Source):
    """A projection's bias is added first, if it is given; v and the gate are then written too."""

    word = op = "fused"
    said, function = "fused QKV", "prepare_fused_qkv"
    needed = ("qkv",)
    labels = {"q": "qkv", "k": "qkv"}  # noqa: RUF012
    refused = frozenset(("shifts", "rotate_k"))

    def reads(self, t: Tensors, o: Options) -> dict[str, Read]:
        found = dict(zip("qkv", views.fused_views(t["qkv"], o, self._writes_gate(t, o))))
        if o.per_row and not o.dynamic_v:
            del found["v"]
        return {letter: ("qkv", x) for letter, x in found.items()}

    def _writes_gate(self, t: Tensors, o: Options) -> bool:
        """Whether a kernel writes the gate, which lies beside q."""
        return "bias" in t and _gated(o) and (o.inplace or "gate_out" in t) and not sums_heads(t, o)

    def out_view(self, out: Tensor, letter: str, t: Tensors, o: Options) -> Tensor:
        heads = super().out_view(out, letter, t, o)
        return heads.expand(-1, -1, -1, 2, -1) if letter == "q" and self._writes_gate(t, o) else heads

    def shaped(self, t: Tensors, o: Options) -> Tensors:
        heads = views.shaped_parts(t["qkv"], o)
        if "v_cache" not in t and ("k_cache" in t or not o.copy_v):
            del heads["v"]
        return {**heads, **{name: x for name, x in t.items() if name != "qkv"}}

    def letters(self, given: Container[str], o: Options) -> tuple[str, ...]:
        return LETTERS[: 2 + o.copy_v + ("bias" in given and _gated(o))]

    def viewed(self, given: Container[str], o: Options) -> tuple[str, ...]:
        """v without `copy_v`, and a gate that has no bias."""
        return (*("v",) * (not o.copy_v), *("gate",) * (_gated(o) and "bias" not in given))

    def parts(self, t: Tensors, o: Options) -> list[tuple[Tensors, Options]]:
        return [(heads_of(t, o), o)]

    def check(self, op: Operation, t: Tensors, o: Options) -> None:
        fail, qkv, norm, bias = Fail(op.function), t["qkv"], norm_of(o), t.get("bias")
        if "v_out" in t and not o.copy_v:
            refuse(op.function, "out's v", t["v_out"], "None with copy_v=False")
        why = ", because v is not a view then"
        others = {f"v_norm{why}": norm.v_norm and "v_cache" not in t, f"bias{why}": bias is not None}
        others["v=True of quantize"] = o.dynamic_v
        for beside in [x for x, given in others.items() if given and not o.copy_v]:
            fail(f"copy_v=False does not go with {beside}; leave copy_v out")
        apart = "across_heads does not go with v_norm in fused QKV; split it, and pass q, k and v to prepare_qkv"
        fail.when(norm.across_heads and norm.v_norm, apart)
        if bias is not None:
            own, shape, flat = tuple(bias.shape), tuple(qkv.shape[-2:]), (qkv.shape[-2] * qkv.shape[-1],)
            had = f"qkv has shape {tuple(qkv.shape)} but bias {own}"
            fail.when(own not in (shape, flat), f"{had}; it must be {shape} or {flat}, as the projection has it")
            had = f"bias is {bias.dtype} on {bias.device} but qkv is {qkv.dtype} on {qkv.device}"
            fail.when(bias.dtype != qkv.dtype or bias.device != qkv.device, f"{had}; they must match")
            fail.when(norm.of == "v", "the norm has of='v', which does not go with bias")
        super().check(op, t, o)
        q, groups = t.get("q_out"), fused_sizes(qkv, o)[0]
        several = o.order == "grouped" and o.q_per_group > 1
        if several and q is not None and q.dim() > qkv.dim() and len(q) != groups:
            fail(f"with order='grouped' and heads for each rank there must be a rank for each of the {groups} groups")

    def copied(self, outputs: Tensors, t: Tensors, o: Options) -> Tensors:
        """v, and a gate with its bias, which a norm across heads leaves."""
        gate = "bias" in t and _gated(o) and (o.inplace or "gate" in outputs)
        return {name: part_with_bias(t, name, o) for name in ("v", "gate")[: 1 + gate]}

    def overwritten(self, given: Container[str]) -> tuple[str, ...]:
        return ("qkv",) if "qkv" in given else ()

    def places(self, t: Tensors, o: Options) -> Tensors:
        return fused_places(t["qkv"], o)

    def put(self, t: Tensors, found: Tensors, o: Options) -> Tensors:
        qkv, own = join_qkv(found["q"], found["k"], found["v"], found.get("gate"), o), t["qkv"]
        biased = own + views.bias_like(t["bias"], own) if "bias" in t else own
        return {"qkv": own.copy_(positions.spare_stays(biased, qkv, t, o))}

    def saved(self, t: Tensors, o: Options, tables: Tensors) -> Tensors:
        normed = o.norm is not None and o.norm.kind != NO_NORM.kind
        return t if normed else {name: x for name, x in t.items() if name != "qkv"}

    def gradient(self, op: Operation, call: Call, saved: Tensors, grads: Tensors, o: Options) -> Tensors:
        """The gradients; that of the bias is the sum of qkv's over the tokens."""
        if not o.copy_v and grads.keys() == {"v"}:  # a view of qkv, with nothing to rotate back
            dq, dk, dv = every_gradient(grads, o).values()
            return {"qkv": join_qkv(dq, dk, dv, None, o)}
        tables, own, plain = tables_of(saved), saved.get("bias"), o._replace(norm=None, copy_v=True)
        if not o.copy_v and grads.keys() == {"v"}:  # a view of qkv, with nothing to rotate back
            dq, dk, dv = every_gradient(grads, o).values()
            return {"qkv": join_qkv(dq, dk, dv, None, o)}
        if o.norm is not None and o.norm.kind != NO_NORM.kind:
            back = norm_turned_back(o, "v" in grads)._replace(copy_v=True)  # without it v's part is zeros
            found = call(FUSED_BACKWARD, {**every_gradient(grads, o), **saved}, back)
            if MEANS[0] in saved:
                xs = heads_of(saved, o)
                found.update(gradients_of_means(saved, xs, split_qkv({"qkv": found["qkv"]}, o), o))
        elif o.inplace:
            grad = grads["qkv"].clone(memory_format=torch.contiguous_format)
            found = call(operation(self), {"qkv": grad, **tables}, turned_back(plain, inplace=True))
        else:
            found = call(FUSED_BACKWARD, {**every_gradient(grads, o), **tables}, turned_back(plain))
        if own is not None and own.requires_grad:
            found["bias"] = bias.back(found["qkv"], own)
        return found


def every_gradient(grads: Tensors, o: Options) -> Tensors:
    """The gradients of q, k and v as dq, dk and dv, zeros for missing ones, and that of the gate if it is given."""
    (first, some), n = next(iter(grads.items())), o.q_per_group
    heads = some.shape[-2] // (n if first in ("q", "gate") else 1)
    for name, count in (("q", heads * n), ("k", heads), ("v", heads)):
        if name not in grads:
            grads[name] = some.new_zeros((*some.shape[:-2], count, some.shape[-1]))
    return {"d" + name: grads[name] for name in ("q", "k", "v", "gate") if name in grads}


class FusedBackward(Backward):
    """The gradient of a fused projection, one tensor. With a norm the kernel reads q and k, v or only its gradient."""

    results = ("qkv", "q_weight", "k_weight", "q_bias", "k_bias")

    def of_heads(self, t: Tensors, o: Options) -> Tensors:
        *lead, groups, head_dim = t["dk"].shape
        return {"qkv": t["dk"].new_empty((*lead, *views.fused_shape(groups, head_dim, o)))}

    def compute(self, outputs: Tensors, t: Tensors, o: Options) -> None:
        places = {**results.places(outputs, o), **fused_places(outputs["qkv"], o)}
        if "gate" in places and "dgate" not in t:
            places.pop("gate").zero_()
        if o.norm is not None:
            return chain.back(heads_of(t, o), places, o._replace(inverse=not o.inverse))
        grads = {name: t[f"d{name}"].contiguous() for name in LETTERS if f"d{name}" in t}
        chain.run([({**t, **grads}, o)], places, o)

    def ways(self, named: Tensors, o: Options) -> list[tuple[Read, Read] | None]:
        reads: list[Read] = [(f"d{x}", views.head_view(named[f"d{x}"], o.layout)) for x in "qkv"]
        if o.norm is not None:
            reads[: 2 + o.norm.v_norm] = [("qkv", x) for x in views.fused_views(named["qkv"], o)][: 2 + o.norm.v_norm]
        outs = [("qkv_out", x) for x in views.fused_views(named["qkv_out"], o)]
        found: list[tuple[Read, Read] | None] = [*zip(reads, outs)]
        return [*found[:2], None] if sums_heads(named, o) else found

    def finishes(self, named: Container[str], o: Options) -> bool:
        return o.norm is not None or _gated(o)  # with a norm it drops the scratch

    def finish(self, outputs: Tensors, t: Tensors, o: Options) -> Tensors:
        """The gate's part of the gradient is a copy, because the kernel has as many heads to copy as k has."""
        if _gated(o):
            part = fused_part(outputs["qkv"], "gate", o)
            copy_heads(part, t["dgate"]) if "dgate" in t else part.zero_()
        if sums_heads(t, o):
            copy_heads(fused_part(outputs["qkv"], "v", o), t["dv"])
        return super().finish(outputs, t, o)

    def gradient(self, call: Call, saved: Tensors, grads: Tensors, o: Options) -> Tensors:
        if o.norm is not None:
            return super().gradient(call, saved, grads, o)
        found = call(operation(self.source), {**grads, **saved}, turned_back(o))
        return {"d" + name: x for name, x in found.items()}


FUSED = Fused()
FUSED_BACKWARD = FusedBackward(FUSED)
