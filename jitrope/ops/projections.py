"""The operations on the outputs of projections that hold several of q, k and v."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch

from ..plan.options import Options, changed, norm_of
from ..plan.problem import Views
from ..plan.views import Tensors, packed_outputs, packed_part, packed_shape, packed_views, separate_views
from . import checks, reference
from .fit import failing
from .operation import ROTATION, Call, Operation, turned_back

PACKED = ("q_per_group", "order", "copy_v")


class RopeQKV(Operation):
    name, function, stage = "rope_qkv", "prepare_packed_qkv", "packed QKV"
    tensors: tuple[str, ...] = ("qkv",)
    options: tuple[str, ...] = (*ROTATION, *PACKED)
    words: tuple[str, ...] = (*ROTATION[:-1], *PACKED, "check", "inplace")
    results: tuple[str, ...] = ("q", "k", "v")
    reads = ("qkv", "qkv", "qkv")
    check = staticmethod(checks.check_qkv)
    reference = staticmethod(reference.rope_qkv)

    def written(self, options: Options) -> tuple[str, ...]:
        return ("qkv",) if options.inplace else ()

    def fresh(self, tensors: Tensors, options: Options, blocks: int) -> Tensors:
        return packed_outputs(tensors["qkv"], options)

    def heads(self, tensors: Tensors, options: Options) -> tuple[Views, Views]:
        inputs: Views = packed_views(tensors["qkv"], options)
        outputs: Views = inputs
        if not options.inplace:
            outputs = separate_views(tensors["q_out"], tensors["k_out"], tensors["v_out"], options)
        if not options.copy_v or (options.inplace and not norm_of(options).v_norm):
            inputs, outputs = (*inputs[:2], None), (*outputs[:2], None)
        return inputs, outputs

    def made(self, given: Container[str], options: Options) -> tuple[str, ...]:
        return ("q", "k", "v")[: 2 + (options.copy_v and not options.inplace)]

    def produced(self, given: Container[str], options: Options) -> tuple[str, ...]:
        return ("qkv",) if options.inplace else ("q", "k", "v", "gate")[: 3 + (options.order == "qkv_gated")]

    def complete(self, results: Tensors, tensors: Tensors, options: Options) -> Tensors:
        views = [name for name in self.produced(tensors, options) if name not in results]
        return {**results, **{name: packed_part(tensors["qkv"], name, options) for name in views}}

    def goes_bare(self, tensors: Container[str], asked: Mapping[str, Any]) -> bool:
        return "q_factor" in tensors or not asked.get("inplace", False)

    def put(self, tensors: Tensors, results: Tensors, options: Options) -> Tensors:
        return super().put(tensors, {"qkv": reference.join_qkv(results, options)}, options)

    def gradient(self, call: Call, saved: Tensors, grads: Tensors, options: Options) -> Tensors:
        if options.inplace:
            grad = grads["qkv"].clone(memory_format=torch.contiguous_format)
            return call(ROPE_QKV, {"qkv": grad, **saved}, turned_back(options, inplace=True))
        back = changed(turned_back(options), copy_v=True)
        return call(ROPE_QKV_BACKWARD, {**every_gradient(grads, options), **saved}, back)


def every_gradient(grads: Tensors, options: Options) -> Tensors:
    """The gradients of q, k and v as dq, dk and dv, zeros for missing ones, and that of the gate if it is given."""
    (first, some), n = next(iter(grads.items())), options.q_per_group
    heads = some.shape[-2] // (n if first in ("q", "gate") else 1)
    for name, count in (("q", heads * n), ("k", heads), ("v", heads)):
        if name not in grads:
            grads[name] = some.new_zeros((*some.shape[:-2], count, some.shape[-1]))
    return {"d" + name: grads[name] for name in ("q", "k", "v", "gate") if name in grads}


def check_bias(name: str, tensors: Tensors, options: Options) -> None:
    """Refuse a wrong bias of a projection whose output fits."""
    fail, qkv, bias = failing(name), tensors["qkv"], tensors["bias"]
    shape = tuple(qkv.shape[-2:])
    if tuple(bias.shape) not in (shape, (shape[0] * shape[1],)):
        had = f"qkv has shape {tuple(qkv.shape)} but bias {tuple(bias.shape)}"
        fail(f"{had}; it must be {shape} or ({shape[0] * shape[1]},), as the projection has it")
    if bias.dtype != qkv.dtype or bias.device != qkv.device:
        fail(f"bias is {bias.dtype} on {bias.device} but qkv is {qkv.dtype} on {qkv.device}; they must match")
    if not options.copy_v:
        fail("copy_v=False does not go with bias, because v is not a view then; leave copy_v out")


class Biased(RopeQKV):
    """A projection's bias is added first, so v and the gate are written too. A base of two operations."""

    results = ("q", "k", "v", "gate")
    goes_bare = Operation.goes_bare  # without a table there is the bias

    def check(self, name: str, tensors: Tensors, options: Options) -> None:
        super().check(name, tensors, options)
        check_bias(name, tensors, options)

    def fresh(self, tensors: Tensors, options: Options, blocks: int) -> Tensors:
        out = packed_outputs(tensors["qkv"], options)
        return {name: torch.empty_like(out["q"]) if name == "gate" else x for name, x in out.items()}

    def heads(self, tensors: Tensors, options: Options) -> tuple[Views, Views]:
        inputs: Views = packed_views(tensors["qkv"], options, with_gate=True)
        if options.inplace:
            return inputs, inputs
        outputs = separate_views(tensors["q_out"], tensors["k_out"], tensors["v_out"], options, with_gate=True)
        return inputs, outputs

    def made(self, given: Container[str], options: Options) -> tuple[str, ...]:
        return self.results[: 3 + (options.order == "qkv_gated")]

    def put(self, tensors: Tensors, results: Tensors, options: Options) -> Tensors:
        biased = reference.with_bias(tensors)
        super().put(biased, results, options)
        return {"qkv": tensors["qkv"].copy_(biased["qkv"])}

    def saved(self, tensors: Tensors, options: Options) -> Tensors:
        return {**super().saved(tensors, options), "bias": tensors["bias"]}

    def gradient(self, call: Call, saved: Tensors, grads: Tensors, options: Options) -> Tensors:
        """As without a bias; that of the bias is the sum over tokens."""
        bias = saved["bias"]
        if not self.norm:  # without a norm it needs no input
            saved = {name: x for name, x in saved.items() if name != "bias"}
        found = super().gradient(call, saved, grads, options)
        if bias.requires_grad:
            found["bias"] = found["qkv"].flatten(0, -3).sum(0).view(bias.shape)
        return found


class _BiasedQKV(Biased):
    name, stage = "rope_qkv_bias", "packed QKV with a bias"
    tensors = ("qkv", "bias")


class RopeQKVBackward(Operation):
    name = "rope_qkv_backward"
    tensors: tuple[str, ...] = ("dq", "dk", "dv", "dgate?")
    options: tuple[str, ...] = (*ROTATION, *PACKED)
    results: tuple[str, ...] = ("qkv",)
    reads = ("dq", "dk", "dv")
    writes = ("qkv_out", "qkv_out", "qkv_out")
    inplace = False
    reference = staticmethod(reference.rope_qkv_backward)

    def fresh(self, tensors: Tensors, options: Options, blocks: int) -> Tensors:
        *lead, groups, head_dim = tensors["dk"].shape
        return {"qkv": tensors["dk"].new_empty((*lead, *packed_shape(groups, head_dim, options)))}

    def heads(self, tensors: Tensors, options: Options) -> tuple[Views, Views]:
        outputs = packed_views(tensors["qkv_out"], options)
        return separate_views(tensors["dq"], tensors["dk"], tensors["dv"], options), outputs

    def finishes(self, tensors: Tensors, options: Options) -> bool:
        return options.order == "qkv_gated"

    def finish(self, outputs: Tensors, tensors: Tensors, options: Options) -> Tensors:
        """The gate's part of the gradient is a copy, because the kernel has as many heads to copy as k has."""
        part = packed_part(outputs["qkv"], "gate", options)
        part.copy_(tensors["dgate"]) if "dgate" in tensors else part.zero_()
        return outputs

    def gradient(self, call: Call, saved: Tensors, grads: Tensors, options: Options) -> Tensors:
        found = call(ROPE_QKV, {**grads, **saved}, turned_back(options))
        return {"d" + name: x for name, x in found.items()}


ROPE_QKV, ROPE_QKV_BACKWARD, ROPE_QKV_BIAS = RopeQKV(), RopeQKVBackward(), _BiasedQKV()
