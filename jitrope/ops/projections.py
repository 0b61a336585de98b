"""The operations on projections that hold several of q, k and v: the same in plain torch, and gradients."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import chain
from ..base.arguments import refuse
from ..plan import views
from ..plan.options import Options, changed, norm_of
from ..plan.problem import Views
from ..plan.views import MEANS, Tensors, canonical, fused_part, fused_sizes
from ..sinks.results import LETTERS
from ..stages import bias
from ..stages.norm import gradients_of_means
from . import checks, operation
from .fit import check_pairs, failing
from .into import Into, copy_heads
from .operation import BIASES, GIVEN_MEANS, ROTATION, WEIGHTS, Call, Normed, Operation, Rule, empty_like
from .stand_ins import weight_sums

FUSED = ("q_per_group", "order", "copy_v")


def part_with_bias(t: Tensors, name: str, o: Options) -> Tensor:
    """One part of a call's fused tensor, a view, or with the projection's bias a fresh tensor."""
    return bias.forward(name, fused_part(t["qkv"], name, o), t, o)


def split_qkv(qkv: Tensor, o: Options) -> Tensors:
    """q, k and v, and the gate, (..., heads, D); views, except a q of several groups."""
    return _split({"qkv": qkv}, o)


def _split(t: Tensors, o: Options) -> Tensors:
    parts = {name: part_with_bias(t, name, o) for name in LETTERS[: 3 + (o.order == "qkv_gated")]}
    return {**parts, "q": parts["q"].flatten(-3, -2)} if o.order == "grouped" else parts


def heads_of(t: Tensors, o: Options) -> Tensors:
    """A call's tensors with the parts of its fused tensor, which have the projection's bias if it is given."""
    return {**t, **{name: x.contiguous() for name, x in _split(t, o).items()}}


def join_qkv(q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, o: Options) -> Tensor:
    """The inverse of `split_qkv`; a missing gate is zero."""
    if o.order == "grouped":
        return torch.cat((q.unflatten(-2, (-1, o.q_per_group)), k.unsqueeze(-2), v.unsqueeze(-2)), -2).flatten(-2)
    if o.order == "qkv_gated":
        q = torch.stack((q, torch.zeros_like(q) if gate is None else gate), -2).flatten(-3, -2)
    return torch.cat((q, k, v), -2)


def fused_places(qkv: Tensor, o: Options) -> Tensors:
    """The places of q, k, v and the gate in a fused tensor."""
    found = dict(zip("qkv", views.fused_views(qkv, o)))
    if o.order == "qkv_gated":
        found["gate"] = fused_part(canonical(qkv, o.layout), "gate", o).unsqueeze(3)
    return found


class RopeQKV(Operation):
    """A projection's bias is added first, if it is given; v and the gate are then written too."""

    name, function, stage = "rope_qkv", "prepare_fused_qkv", "fused QKV"
    tensors: tuple[str, ...] = ("qkv", "bias?")
    options: tuple[str, ...] = (*ROTATION, *FUSED)
    results: tuple[str, ...] = ("q", "k", "v", "gate")
    reads = ("qkv", "qkv", "qkv")
    rules: tuple[Rule, ...] = (checks.check_qkv,)

    def written(self, options: Options) -> tuple[str, ...]:
        return ("qkv",) if options.inplace else ()

    def fresh(self, tensors: Tensors, options: Options, blocks: int) -> Tensors:
        """Without `copy_v` v is a view of the fused tensor, and so is a gate that has no bias."""
        qkv = tensors["qkv"]
        lead, (groups, head_dim) = qkv.shape[:-2], fused_sizes(qkv, options)
        q = qkv.new_empty((*lead, groups * options.q_per_group, head_dim))
        k = qkv.new_empty((*lead, groups, head_dim))
        out = {"q": q, "k": k, "v": empty_like(k) if options.copy_v else fused_part(qkv, "v", options)}
        if options.order == "qkv_gated":
            out["gate"] = empty_like(q) if "bias" in tensors else fused_part(qkv, "gate", options)
        return out

    def heads(self, tensors: Tensors, options: Options) -> tuple[Views, Views]:
        apart = views.sums_heads(tensors, options)
        biased = "bias" in tensors and not apart
        inputs: Views = views.fused_views(tensors["qkv"], options, biased)
        outputs: Views = inputs
        if not options.inplace:
            outputs = views.separate_views(tensors["q_out"], tensors["k_out"], tensors["v_out"], options, biased)
        if apart or not options.copy_v or (options.inplace and not biased and not norm_of(options).v_norm):
            inputs, outputs = (*inputs[:2], None), (*outputs[:2], None)
        return inputs, outputs

    def finishes(self, tensors: Tensors, options: Options) -> bool:
        copies = "bias" in tensors or (options.copy_v and not options.inplace)
        return copies and views.sums_heads(tensors, options)

    def finish(self, outputs: Tensors, tensors: Tensors, options: Options) -> Tensors:
        """Write v, and a gate with its bias, which a norm across heads leaves."""
        for name in ("v", "gate") if "bias" in tensors and options.order == "qkv_gated" else ("v",):
            out = outputs[name] if name in outputs else fused_part(outputs["qkv"], name, options)
            copy_heads(out, part_with_bias(tensors, name, options))
        return outputs

    def made(self, given: Container[str], options: Options) -> tuple[str, ...]:
        if "bias" in given:
            return self.results[: 3 + (options.order == "qkv_gated")]
        return self.results[: 2 + (options.copy_v and not options.inplace)]

    def produced(self, given: Container[str], options: Options) -> tuple[str, ...]:
        return ("qkv",) if options.inplace else self.results[: 3 + (options.order == "qkv_gated")]

    def complete(self, results: Tensors, tensors: Tensors, options: Options) -> Tensors:
        seen = [name for name in self.produced(tensors, options) if name not in results]
        return {**results, **{name: fused_part(tensors["qkv"], name, options) for name in seen}}

    def goes_bare(self, tensors: Container[str], asked: Mapping[str, Any]) -> bool:
        return "q_factor" in tensors or "bias" in tensors or not asked.get("inplace", False)

    def put(self, tensors: Tensors, results: Tensors, options: Options) -> Tensors:
        qkv = join_qkv(results["q"], results["k"], results["v"], results.get("gate"), options)
        own = tensors["qkv"]
        biased = own + views.bias_like(tensors["bias"], own) if "bias" in tensors else own
        return {"qkv": own.copy_(operation.spare_stays(biased, qkv, tensors, options))}

    def parts(self, tensors: Tensors, options: Options) -> list[tuple[Tensors, Options]]:
        return [(heads_of(tensors, options), options)]

    def sink(self, outputs: Tensors, tensors: Tensors, options: Options) -> Tensors:
        if options.inplace:
            return fused_places(outputs["qkv"], options)
        return super().sink(outputs, tensors, options)

    def saved(self, tensors: Tensors, options: Options) -> Tensors:
        return {name: x for name, x in tensors.items() if name != "qkv"}

    def gradient(self, call: Call, saved: Tensors, grads: Tensors, options: Options) -> Tensors:
        """The gradients; that of the bias is the sum of qkv's over the tokens."""
        if not options.copy_v and grads.keys() == {"v"}:  # a view of qkv, with nothing to rotate back
            dq, dk, dv = every_gradient(grads, options).values()
            return {"qkv": join_qkv(dq, dk, dv, None, options)}
        found, own = self.of_qkv(call, saved, grads, options), saved.get("bias")
        if own is not None and own.requires_grad:
            found["bias"] = bias.back(found["qkv"], own)
        return found

    def of_qkv(self, call: Call, saved: Tensors, grads: Tensors, options: Options) -> Tensors:
        """The gradients without that of the bias."""
        saved = {name: x for name, x in saved.items() if name != "bias"}
        if options.inplace:
            grad = grads["qkv"].clone(memory_format=torch.contiguous_format)
            return call(ROPE_QKV, {"qkv": grad, **saved}, operation.turned_back(options, inplace=True))
        back = changed(operation.turned_back(options), copy_v=True)
        return call(ROPE_QKV_BACKWARD, {**every_gradient(grads, options), **saved}, back)


def every_gradient(grads: Tensors, options: Options) -> Tensors:
    """The gradients of q, k and v as dq, dk and dv, zeros for missing ones, and that of the gate if it is given."""
    (first, some), n = next(iter(grads.items())), options.q_per_group
    heads = some.shape[-2] // (n if first in ("q", "gate") else 1)
    for name, count in (("q", heads * n), ("k", heads), ("v", heads)):
        if name not in grads:
            grads[name] = some.new_zeros((*some.shape[:-2], count, some.shape[-1]))
    return {"d" + name: grads[name] for name in ("q", "k", "v", "gate") if name in grads}


class RopeQKVBackward(Operation):
    name = "rope_qkv_backward"
    tensors: tuple[str, ...] = ("dq", "dk", "dv", "dgate?")
    options: tuple[str, ...] = (*ROTATION, *FUSED)
    results: tuple[str, ...] = ("qkv",)
    reads = ("dq", "dk", "dv")
    writes = ("qkv_out", "qkv_out", "qkv_out")
    inplace = False

    def fresh(self, tensors: Tensors, options: Options, blocks: int) -> Tensors:
        *lead, groups, head_dim = tensors["dk"].shape
        return {"qkv": tensors["dk"].new_empty((*lead, *views.fused_shape(groups, head_dim, options)))}

    def parts(self, tensors: Tensors, options: Options) -> list[tuple[Tensors, Options]]:
        """The gradients are heads that are rotated back."""
        grads = {name: tensors[f"d{name}"].contiguous() for name in LETTERS if f"d{name}" in tensors}
        return [({**tensors, **grads}, options)]

    def sink(self, outputs: Tensors, tensors: Tensors, options: Options) -> Tensors:
        places = {**outputs, **fused_places(outputs["qkv"], options)}
        if "gate" in places and "dgate" not in tensors:
            places.pop("gate").zero_()
        return places

    def heads(self, tensors: Tensors, options: Options) -> tuple[Views, Views]:
        outputs = views.fused_views(tensors["qkv_out"], options)
        return views.separate_views(tensors["dq"], tensors["dk"], tensors["dv"], options), outputs

    def finishes(self, tensors: Tensors, options: Options) -> bool:
        return options.order == "qkv_gated"

    def finish(self, outputs: Tensors, tensors: Tensors, options: Options) -> Tensors:
        """The gate's part of the gradient is a copy, because the kernel has as many heads to copy as k has."""
        if options.order == "qkv_gated":
            part = fused_part(outputs["qkv"], "gate", options)
            copy_heads(part, tensors["dgate"]) if "dgate" in tensors else part.zero_()
        return outputs

    def gradient(self, call: Call, saved: Tensors, grads: Tensors, options: Options) -> Tensors:
        found = call(ROPE_QKV, {**grads, **saved}, operation.turned_back(options))
        return {"d" + name: x for name, x in found.items()}


# ---- with a norm -----------------------------------------------------------------------------------


def _check_copied(name: str, options: Options) -> None:
    if norm_of(options).v_norm and not options.copy_v:
        failing(name)("copy_v=False does not go with v_norm, because v is not a view then; leave copy_v out")


def check_qkv_norm(name: str, tensors: Tensors, options: Options) -> None:
    """The rule of a norm of fused QKV."""
    _check_copied(name, options)
    others = {label: x for label, x in tensors.items() if label != "qkv"}
    apart = {**views.shaped_parts(tensors["qkv"], options), **others}
    checks.check_norm(name, apart, options)
    checks.check_whole_head(name, apart, options)


class QKVNorm(Normed, RopeQKV):
    name, stage = "qk_norm_rope_qkv", "fused QKV with a norm"
    tensors = ("qkv", "bias?", *WEIGHTS, *BIASES, *GIVEN_MEANS)
    hidden: tuple[str, ...] = ("inverse",)
    rules = (*RopeQKV.rules, check_qkv_norm)
    goes_bare = Operation.goes_bare  # without a table there is the norm

    def of_qkv(self, call: Call, saved: Tensors, grads: Tensors, options: Options) -> Tensors:
        back = changed(operation.norm_turned_back(options), copy_v=True)
        if "v" not in grads:  # its part is zeros, whatever v is
            back = changed(back, norm=norm_of(back)._replace(v_norm=False))
        found = call(QKV_NORM_BACKWARD, {**every_gradient(grads, options), **saved}, back)
        if MEANS[0] in saved:
            xs, own = heads_of(saved, options), split_qkv(found["qkv"], options)
            found.update(gradients_of_means(saved, xs, own, options))
        return found


class _QKVNormBackward(RopeQKVBackward):
    """The kernel reads q and k of the projection, v or only its gradient, and writes one tensor."""

    name = "qk_norm_rope_qkv_backward"
    tensors = (*RopeQKVBackward.tensors, "qkv", *WEIGHTS, *BIASES, "bias?", *GIVEN_MEANS)
    options = QKVNorm.options
    results = ("qkv", "q_weight", "k_weight", "q_bias", "k_bias")
    norm = True
    gradient = Operation.gradient  # there is no second derivative

    def fresh(self, tensors: Tensors, options: Options, blocks: int) -> Tensors:
        qkv, across = tensors["qkv"], norm_of(options).across_heads
        parts = views.shaped_parts(qkv, options)
        widths = {name: parts[name].shape[-1] * (parts[name].shape[-2] if across else 1) for name in "qk"}
        return {"qkv": qkv.new_empty(qkv.shape), **weight_sums(tensors, widths, blocks)}

    def fakes(self, tensors: Tensors, options: Options) -> Tensors:
        alike = Operation.fresh(self, tensors, options, 0)
        return {**alike, "qkv": tensors["qkv"].new_empty(tensors["qkv"].shape)}

    def compute(self, places: Tensors, tensors: Tensors, options: Options) -> None:
        chain.back(heads_of(tensors, options), places, changed(options, inverse=not options.inverse))

    def places(self, options: Options) -> tuple[str, ...]:
        return ("qkv", "qkv", "qkv" if norm_of(options).v_norm else "dv", *self.writes)

    def heads(self, tensors: Tensors, options: Options) -> tuple[Views, Views]:
        q, k, v = views.fused_views(tensors["qkv"], options)
        if not norm_of(options).v_norm:
            v = views.separate_views(tensors["dq"], tensors["dk"], tensors["dv"], options)[2]
        outputs = views.fused_views(tensors["qkv_out"], options)
        return ((q, k, None), (*outputs[:2], None)) if views.sums_heads(tensors, options) else ((q, k, v), outputs)

    finishes = Operation.finishes  # always: `finish` drops the scratch

    def finish(self, outputs: Tensors, tensors: Tensors, options: Options) -> Tensors:
        outputs = super().finish(outputs, tensors, options)
        if views.sums_heads(tensors, options):
            copy_heads(fused_part(outputs["qkv"], "v", options), tensors["dv"])
        return {name: outputs[name] for name in self.results if name in outputs}


# ---- with the stages of `prepare_qkv`: caches, conversions, and tensors of the caller --------------


class FusedInto(Operation):
    """A form of `Into` that reads q, k and v in a projection's output. The projection's bias is added first, if given.

    Its outputs are always tensors of the call; `gather` makes those that the caller does not give.
    """

    function = "prepare_fused_qkv"
    reads = ("qkv", "qkv", "qkv")
    inplace = differentiable = False

    def __init__(self, into: Operation) -> None:
        self.into_given, base = into, into.base if isinstance(into, Into) else into
        self.name, self.stage = f"{base.name}_packed", f"fused QKV with {base.stage or 'out'}"
        own = [name for name in into.tensors if name.rstrip("?") not in ("q", "k", "v")]
        self.tensors = ("qkv", "bias?", *own)
        self.options = (*[word for word in into.options if word != "rotate_k"], *FUSED)
        self.hidden, self.tables, self.norm = into.hidden, into.tables, into.norm
        self.results, self.writes, self.labels = into.results, into.writes, into.labels
        self.mutated = into.mutated
        super().__init__()

    def written(self, options: Options) -> tuple[str, ...]:
        return self.into_given.written(options)

    def separate(self, tensors: Tensors, options: Options) -> Tensors:
        """Tensors as a call on separate q, k and v has them. Only their shapes, dtypes and devices are right."""
        heads = views.shaped_parts(tensors["qkv"], options)
        if not options.dynamic_v and "v_out" not in tensors and "v_cache" not in tensors:
            del heads["v"]
        return {**heads, **{name: x for name, x in tensors.items() if name not in ("qkv", "bias")}}

    def check(self, name: str, tensors: Tensors, options: Options) -> None:
        fail = failing(name)
        if "v_out" in tensors and not options.copy_v:
            refuse(name, "out's v", tensors["v_out"], "None with copy_v=False")
        if "v_cache" not in tensors:
            _check_copied(name, options)
        checks.check_qkv(name, tensors, options)
        alone = "use a call without cache, quantize and out"
        checks.refuse_gradients(fail, tensors, "qkv", "bias", use=alone)
        if options.dynamic_v and not options.copy_v:
            fail("copy_v=False does not go with v=True of quantize; leave copy_v out")
        if "bias" in tensors and norm_of(options).of == "v":
            fail("the norm has of='v', which does not go with bias")
        self.into_given.check(name, self.separate(tensors, options), options)
        if "bias" in tensors and checks.takes_pairs(tensors, options):
            check_pairs({"bias": tensors["bias"]}, options, fail)
        q, groups = tensors.get("q_out"), fused_sizes(tensors["qkv"], options)[0]
        by_rank = q is not None and q.dim() > tensors["qkv"].dim() and len(q) != groups
        if by_rank and options.order == "grouped" and options.q_per_group > 1:
            fail(f"with order='grouped' and heads for each rank there must be a rank for each of the {groups} groups")

    def heads(self, tensors: Tensors, options: Options) -> tuple[Views, Views]:
        inputs, outputs = self.into_given.heads(self.separate(tensors, options), options)
        fused = views.fused_views(tensors["qkv"], options)
        return tuple([None if x is None else own for x, own in zip(inputs, fused)]), outputs  # type: ignore[return-value]

    def fresh(self, tensors: Tensors, options: Options, blocks: int) -> Tensors:
        return self.into_given.fresh(self.separate(tensors, options), options, blocks)

    def made(self, given: Container[str], options: Options) -> tuple[str, ...]:
        return self.into_given.made(given, options)

    def finishes(self, tensors: Tensors, options: Options) -> bool:
        return self.into_given.finishes(self.separate(tensors, options), options)

    def finish(self, outputs: Tensors, tensors: Tensors, options: Options) -> Tensors:
        return self.into_given.finish(outputs, {**tensors, "v": part_with_bias(tensors, "v", options)}, options)

    def parts(self, tensors: Tensors, options: Options) -> list[tuple[Tensors, Options]]:
        return [(heads_of(tensors, options), options)]


class FusedScales(FusedInto):
    """The same of scales alone, without outputs of heads."""

    def heads(self, tensors: Tensors, options: Options) -> tuple[Views, Views]:
        inputs, _ = super().heads(tensors, options)
        return inputs, inputs

    def places(self, options: Options) -> tuple[str, ...]:
        return (*self.reads, *self.reads)

    def made(self, given: Container[str], options: Options) -> tuple[str, ...]:
        return self.into_given.made("qkv" if options.dynamic_v else "qk", options)


ROPE_QKV, ROPE_QKV_BACKWARD = RopeQKV(), RopeQKVBackward()
QKV_NORM, QKV_NORM_BACKWARD = QKVNorm(), _QKVNormBackward()
