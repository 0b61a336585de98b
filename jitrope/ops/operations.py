"""What the library launches: a row for each operation, a few lines each, from which all else follows."""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor

from ..base.arguments import refuse
from ..plan.problem import (
    NormCall,
    Views,
    cache_view,
    empty_parts,
    head_view,
    joint_parts,
    qkv_views,
    separate_views,
    value_view,
)
from ..plan.spec import LAYOUT_AXES, Options, changed, norm_of
from ..plan.views import FP8, Tensors, tables_of
from . import checks, reference
from .operation import (
    NORMED,
    ROTATION,
    SERVING,
    TABLE_WORDS,
    Call,
    Operation,
    empty_like,
    spare_stays,
    turned_back,
)
from .stand_ins import one_row


class _Rope(Operation):
    name, function = "rope", "apply_rope"
    shards = True
    words = (*ROTATION, "check", "inplace")

    def reference(self, t: Tensors, o: Options) -> Tensors:
        q, k = reference.rope(t["q"], t.get("k"), *tables_of(t), o)
        return _given(q=q, k=k)

    def gradient(self, call: Call, saved: Tensors, grads: Tensors, options: Options) -> Tensors:
        back = turned_back(options)
        if "q" in grads:
            found = call(self, {**grads, **saved}, back)
        else:
            found = {"k": call(self, {"q": grads["k"], **saved}, back)["q"]}
        if options.inplace:  # what stayed passes its gradient on
            found = {name: spare_stays(grads[name], x, saved, options) for name, x in found.items()}
        return found


class _RopeFp8(Operation):
    name, function, stage = "rope_fp8", "prepare_qkv", "quantize"
    tensors = ("q", "k?", "q_scale", "k_scale?")
    options = (*SERVING, "max_seqlen")
    words = (*options, "check")
    inplace = differentiable = False

    def check(self, name: str, tensors: Tensors, options: Options) -> None:
        checks.check_fp8(name, tensors, options)

    def fresh(self, tensors: Tensors, options: Options, blocks: int) -> Tensors:
        return {name: empty_like(tensors[name], dtype=FP8) for name in self.results if name in tensors}

    def reference(self, t: Tensors, o: Options) -> Tensors:
        q, k = reference.rope_fp8(t["q"], t.get("k"), t["q_scale"], t.get("k_scale"), tables_of(t), o)
        return _given(q=q, k=k)


class _RopeKVCache(Operation):
    name, function, stage = "rope_kv_cache", "prepare_qkv", "cache"
    tensors = ("q", "k", "v", "k_cache", "v_cache", "slot_mapping", "q_scale?", "k_scale?", "v_scale?")
    options = (*SERVING, "rotate_k")
    words = (*options, "check", "inplace")
    tables = frozenset(TABLE_WORDS)
    results = ("q",)
    writes = ("q_out", "k_cache", "v_cache")
    mutated = ("k_cache", "v_cache")
    differentiable = False

    def check(self, name: str, tensors: Tensors, options: Options) -> None:
        checks.check_kv_cache(name, tensors, options)

    def written(self, options: Options) -> tuple[str, ...]:
        return (*super().written(options), *(("k",) if options.rotate_k else ()))

    def fresh(self, tensors: Tensors, options: Options, blocks: int) -> Tensors:
        return {"q": empty_like(tensors["q"], dtype=FP8 if "q_scale" in tensors else None)}

    def heads(self, tensors: Tensors, options: Options) -> tuple[Views, Views]:
        q, k, v, out = (head_view(tensors[name], options.layout) for name in ("q", "k", "v", "q_out"))
        return (q, k, v), (out, cache_view(tensors["k_cache"]), cache_view(tensors["v_cache"]))

    def on_cpu(self, t: Tensors, options: Options) -> Tensors:
        tensors = [t.get(name) for name in self.names]
        q, k = reference.rope_kv_cache(*tensors, tables_of(t), options)  # type: ignore[call-arg,arg-type]
        if options.rotate_k:
            t["k"].copy_(k)
        return {"q": t["q"].copy_(q) if options.inplace else q}


class _RopeQKV(Operation):
    name, function, stage = "rope_qkv", "prepare_packed_qkv", "packed QKV"
    tensors = ("qkv",)
    options = (*ROTATION, "q_per_group", "copy_v")
    words = (*ROTATION[:-1], "q_per_group", "copy_v", "check", "inplace")
    results = ("q", "k", "v")
    reads = ("qkv", "qkv", "qkv")

    def check(self, name: str, tensors: Tensors, options: Options) -> None:
        checks.check_qkv(name, tensors, options)

    def written(self, options: Options) -> tuple[str, ...]:
        return ("qkv",) if options.inplace else ()

    def fresh(self, tensors: Tensors, options: Options, blocks: int) -> Tensors:
        return dict(zip("qkv", empty_parts(tensors["qkv"], options.q_per_group, options.copy_v)))

    def places(self, options: Options) -> tuple[str, ...]:
        return (*self.reads, *(self.reads if options.inplace else self.writes))

    def heads(self, tensors: Tensors, options: Options) -> tuple[Views, Views]:
        o = options
        inputs: Views = qkv_views(tensors["qkv"], o.q_per_group, o.layout)
        outputs: Views = inputs
        if not o.inplace:
            outputs = separate_views(tensors["q_out"], tensors["k_out"], tensors["v_out"], o)
        if o.inplace or not o.copy_v:
            inputs, outputs = (*inputs[:2], None), (*outputs[:2], None)
        return inputs, outputs

    def reference(self, t: Tensors, o: Options) -> Tensors:
        parts = dict(zip("qkv", reference.rope_qkv(t["qkv"], *tables_of(t), o)))
        return self.complete({name: parts[name] for name in self.made(t, o)}, t, o)

    def made(self, given: Container[str], options: Options) -> tuple[str, ...]:
        return ("q", "k", "v")[: 2 + (options.copy_v and not options.inplace)]

    def produced(self, given: Container[str], options: Options) -> tuple[str, ...]:
        return ("qkv",) if options.inplace else ("q", "k", "v")

    def complete(self, results: Tensors, tensors: Tensors, options: Options) -> Tensors:
        if "v" not in results:
            results["v"] = value_view(tensors["qkv"], options.q_per_group)
        return results

    def put(self, tensors: Tensors, results: Tensors, options: Options) -> Tensors:
        qkv, o = tensors["qkv"], options
        rotated = reference.join_qkv(results["q"], results["k"], results["v"], o.q_per_group)
        return {"qkv": qkv.copy_(spare_stays(qkv, rotated, tensors, o))}

    def gradient(self, call: Call, saved: Tensors, grads: Tensors, options: Options) -> Tensors:
        if options.inplace:
            grad = grads["qkv"].clone(memory_format=torch.contiguous_format)
            return call(self, {"qkv": grad, **saved}, turned_back(options, inplace=True))
        some, groups = next(iter(grads.values())), options.q_per_group
        heads = some.shape[-2] // (groups if "q" in grads else 1)
        for name, count in (("q", heads * groups), ("k", heads), ("v", heads)):
            if name not in grads:
                grads[name] = some.new_zeros((*some.shape[:-2], count, some.shape[-1]))
        ordered = {"d" + name: grads[name] for name in "qkv"}
        return call(ROPE_QKV_BACKWARD, {**ordered, **saved}, changed(turned_back(options), copy_v=True))


class _RopeQKVBackward(Operation):
    name = "rope_qkv_backward"
    tensors = ("dq", "dk", "dv")
    options = (*ROTATION, "q_per_group", "copy_v")
    results = ("qkv",)
    reads = ("dq", "dk", "dv")
    writes = ("qkv_out", "qkv_out", "qkv_out")
    inplace = False

    def fresh(self, tensors: Tensors, options: Options, blocks: int) -> Tensors:
        dk = tensors["dk"]
        return {"qkv": dk.new_empty((*dk.shape[:-1], (options.q_per_group + 2) * dk.shape[-1]))}

    def heads(self, tensors: Tensors, options: Options) -> tuple[Views, Views]:
        outputs = qkv_views(tensors["qkv_out"], options.q_per_group, options.layout)
        return separate_views(tensors["dq"], tensors["dk"], tensors["dv"], options), outputs

    def reference(self, t: Tensors, o: Options) -> Tensors:
        return {"qkv": reference.rope_qkv_backward(t["dq"], t["dk"], t["dv"], *tables_of(t), o)}

    def gradient(self, call: Call, saved: Tensors, grads: Tensors, options: Options) -> Tensors:
        found = call(ROPE_QKV, {**grads, **saved}, turned_back(options))
        return {"d" + name: x for name, x in found.items()}


class _RopeInto(Operation):
    """q and k rotated, v copied, in one launch, into tensors of the caller's, whose heads may lie apart."""

    name = "rope_into"
    tensors = ("q", "k", "v", "q_out", "k_out", "v_out")
    results = ()
    mutated = ("q_out", "k_out", "v_out")
    inplace = differentiable = False

    def on_cpu(self, t: Tensors, options: Options) -> Tensors:
        for name, x in zip("qkv", (*reference.rope(t["q"], t["k"], *tables_of(t), options), t["v"])):
            t[name + "_out"].copy_(x)  # type: ignore[arg-type]
        return {}


class _QKNormRope(Operation):
    name, function, stage = "qk_norm_rope", "prepare_qkv", "norm"
    tensors: tuple[str, ...] = ("q", "k?", "q_weight?", "k_weight?")
    options: tuple[str, ...] = (*NORMED, "inverse")
    words: tuple[str, ...] = (*NORMED, "norm", "check", "inplace")
    tables: frozenset[str] = frozenset(TABLE_WORDS[:-1])
    shards = True
    norm = True

    def check(self, name: str, tensors: Tensors, options: Options) -> None:
        checks.check_norm(name, tensors, options)

    def normed(self, tensors: Tensors, options: Options) -> NormCall | None:
        return NormCall(norm_of(options), tuple([tensors.get(name) for name in ("q_weight", "k_weight")]))

    def reference(self, t: Tensors, o: Options) -> Tensors:
        tensors = [t.get(name) for name in self.names]
        q, k = reference.qk_norm_rope(*tensors, tables_of(t), o, norm_of(o))  # type: ignore[call-arg,arg-type]
        return _given(q=q, k=k)

    def saved(self, tensors: Tensors) -> Tensors:
        return {name: x for name, x in tensors.items() if not name.endswith("_v")}

    def unrotated(self, name: str, tensors: Tensors, options: Options) -> Tensors:
        """The tensors of a call without a table, and tables that turn nothing: one row, seen as many."""
        q = next(iter(tensors.values()))
        if q.dim() not in (3, 4):
            refuse(name, "q", q, "a tensor with 3 or 4 axes")
        cos, sin = one_row(q.device, options.rotary_dim // 2)
        rows = self.unrotated_rows(tensors, options)
        return {**tensors, "cos": cos.expand(rows, -1), "sin": sin.expand(rows, -1)}

    def unrotated_rows(self, tensors: Tensors, options: Options) -> int:
        """The rows of a table for its tokens."""
        return tensors["q"].shape[LAYOUT_AXES[options.layout][1]]

    def gradient(self, call: Call, saved: Tensors, grads: Tensors, options: Options) -> Tensors:
        # Roundings pass gradients on as they are: one kernel for all, with contracted products, which are the fewest.
        norm = norm_of(options)
        back = changed(turned_back(options), rounding="complex64", norm=norm._replace(rounding="none"))
        letters = [name for name in "qk" if name in grads]
        tensors = {"d" + as_name: grads[name] for as_name, name in zip("qk", letters)}
        for ending in ("", "_weight"):
            for as_name, name in zip("qk", letters):
                if name + ending in saved:
                    tensors[as_name + ending] = saved[name + ending]
        tables = {name: x for name, x in saved.items() if name not in self.names}
        found = call(QK_NORM_ROPE_BACKWARD, {**tensors, **tables}, back)
        names = dict(zip("qk", letters))
        return {names[name[0]] + name[1:]: x for name, x in found.items()}


class _QKNormRopeJoint(_QKNormRope):
    name, function = "qk_norm_rope_joint", "prepare_joint_qkv"
    tensors = (
        "first_q", "first_k", "first_v", "second_q", "second_k", "second_v", "q_weight?", "k_weight?",
        "second_q_weight?", "second_k_weight?", "second_cos?", "second_sin?",
    )  # fmt: skip
    options = NORMED
    words = ("norm", "interleaved", "rotary_dim", "rotary_offset", "rounding", "launch")
    tables = frozenset(TABLE_WORDS[:4])
    labels = {  # noqa: RUF012
        **{f"{stream}_{letter}": f"{stream}'s {letter}" for stream in ("first", "second") for letter in "qkv"},
        **{f"{letter}_weight": f"first's {letter}_weight" for letter in "qk"},
        **{f"second_{letter}_weight": f"second's {letter}_weight" for letter in "qk"},
    }
    results = ("q", "k", "v")
    reads = ("first_q", "first_k", "first_v")
    inplace = shards = False

    def unrotated_rows(self, tensors: Tensors, options: Options) -> int:
        return tensors["first_q"].shape[1] + tensors["second_q"].shape[1]

    def check(self, name: str, tensors: Tensors, options: Options) -> None:
        checks.check_norm_joint(name, tensors, options)

    def fresh(self, tensors: Tensors, options: Options, blocks: int) -> Tensors:
        return dict(zip("qkv", joint_parts(*[tensors[name] for name in ("first_q", "first_k", "first_v", "second_q")])))

    def normed(self, tensors: Tensors, options: Options) -> NormCall | None:
        second = tuple([head_view(tensors[name], options.layout) for name in ("second_q", "second_k", "second_v")])
        tables = (tensors["second_cos"], tensors.get("second_sin")) if "second_cos" in tensors else ()
        weights = tuple([tensors.get(name) for name in self.names[6:10]])
        return NormCall(norm_of(options), weights, second, tables)

    def reference(self, t: Tensors, o: Options) -> Tensors:
        x = [t.get(name) for name in self.names]
        parts = reference.qk_norm_rope_joint(x[:3], x[3:6], x[6:8], x[8:10], tables_of(t), o, norm_of(o), x[10:])  # type: ignore[arg-type]
        return dict(zip("qkv", parts))

    def gradient(self, call: Call, saved: Tensors, grads: Tensors, options: Options) -> Tensors:
        """Each stream's own: its tokens, and its rows of the tables."""
        found: Tensors = {}
        begin = 0
        for stream, second in (("first_", ""), ("second_", "second_")):
            end = begin + saved[stream + "q"].shape[1]
            own = {name: x[:, begin:end] for name, x in grads.items()}
            if "v" in own:
                found[stream + "v"] = own.pop("v")
            names = {name: stream + name for name in "qk"} | {x: second + x for x in ("q_weight", "k_weight")}
            kept = {name: saved[other] for name, other in names.items() if other in saved}
            if second and "second_cos" in saved:
                kept.update({name: saved[second + name] for name in ("cos", "sin") if second + name in saved})
            else:
                tables = {name: saved[name] for name in ("cos", "sin") if name in saved}
                kept.update({name: x[begin:end] if x.dim() == 2 else x[:, begin:end] for name, x in tables.items()})
            if own:
                of_stream = QK_NORM_ROPE.gradient(call, kept, own, options)
                found.update({names[name]: x for name, x in of_stream.items()})
            begin = end
        return found


class _QKNormRopeBackward(Operation):
    name = "qk_norm_rope_backward"
    tensors = ("dq", "dk?", "q", "k?", "q_weight?", "k_weight?")
    options = _QKNormRope.options
    results = ("q", "k", "q_weight", "k_weight")
    norm = True
    inplace = False

    def fresh(self, tensors: Tensors, options: Options, blocks: int) -> Tensors:
        out = {name: empty_like(tensors[name]) for name in "qk" if name in tensors}
        width = sum(self._sizes(tensors, options)) if "q_weight" in tensors or "k_weight" in tensors else 0
        if width:
            out["weight_grads"] = torch.empty(blocks, width, dtype=torch.float32, device=tensors["q"].device)
        return out

    def fakes(self, tensors: Tensors, options: Options) -> Tensors:
        return {name: empty_like(tensors[name]) for name in self.results if name in tensors}

    def finish(self, outputs: Tensors, tensors: Tensors, options: Options) -> Tensors:
        sums = outputs.pop("weight_grads", None)
        if sums is not None:
            weights = [name for name in ("q_weight", "k_weight") if name in tensors]
            total = sums.sum(0).to(tensors[weights[0]].dtype)  # the check has seen that they have one dtype
            for name, part in zip(("q_weight", "k_weight"), total.split(self._sizes(tensors, options))):
                if name in weights:
                    outputs[name] = part
        return outputs

    def _sizes(self, tensors: Tensors, options: Options) -> list[int]:
        """The numbers of the weights of q and k."""
        across, axis = norm_of(options).across_heads, LAYOUT_AXES[options.layout][2]
        given = [tensors[name] for name in "qk" if name in tensors]
        return [x.shape[-1] * (x.shape[axis] if across else 1) for x in given]

    def normed(self, tensors: Tensors, options: Options) -> NormCall | None:
        grads = [head_view(tensors[name], options.layout) if name in tensors else None for name in ("dq", "dk")]
        weights = tuple([tensors.get(name) for name in ("q_weight", "k_weight")])
        return NormCall(norm_of(options), weights, grads=tuple(grads))

    def reference(self, t: Tensors, o: Options) -> Tensors:
        tensors = [t.get(name) for name in self.names]
        found = reference.qk_norm_rope_backward(*tensors, tables_of(t), o, norm_of(o))  # type: ignore[call-arg,arg-type]
        return _given(**dict(zip(self.results, found)))


def _given(**tensors: Tensor | None) -> Tensors:
    return {name: x for name, x in tensors.items() if x is not None}


ROPE, ROPE_FP8, ROPE_KV_CACHE, ROPE_INTO = _Rope(), _RopeFp8(), _RopeKVCache(), _RopeInto()
ROPE_QKV, ROPE_QKV_BACKWARD = _RopeQKV(), _RopeQKVBackward()
QK_NORM_ROPE, QK_NORM_ROPE_JOINT, QK_NORM_ROPE_BACKWARD = _QKNormRope(), _QKNormRopeJoint(), _QKNormRopeBackward()
OPERATIONS = (
    ROPE, ROPE_FP8, ROPE_KV_CACHE, ROPE_QKV, ROPE_QKV_BACKWARD, QK_NORM_ROPE, QK_NORM_ROPE_JOINT, QK_NORM_ROPE_BACKWARD,
)  # fmt: skip
"""Those that torch has as ops; `ROPE_INTO` is for context parallelism alone."""
