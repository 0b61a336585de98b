"""The operations of packed QKV with a norm: their check, the same in plain torch, and its gradient."""

from __future__ import annotations

from ..plan.options import Options, changed, norm_of
from ..plan.problem import Views
from ..plan.views import Tensors, packed_sizes, packed_views, separate_views
from . import reference
from .checks import check_norm
from .fit import failing
from .operation import BIASES, WEIGHTS, Call, Normed, Operation, norm_turned_back
from .projections import (
    RopeQKV,
    RopeQKVBackward,
    contiguous_parts,
    every_gradient,
    join_qkv,
    shaped_parts,
)
from .stand_ins import weight_sums


def check_qkv_norm(name: str, tensors: Tensors, options: Options) -> None:
    """The rule of a norm of packed QKV."""
    if norm_of(options).v_norm and not options.copy_v:
        failing(name)("copy_v=False does not go with v_norm, because v is not a view then; leave copy_v out")
    others = {label: x for label, x in tensors.items() if label != "qkv"}
    check_norm(name, {**shaped_parts(tensors["qkv"], options), **others}, options)


def backward(t: Tensors, o: Options) -> Tensors:
    """The gradients of packed QKV, the weights and the biases; `o` rotates back."""
    found = reference.qk_norm_rope_backward({**t, **contiguous_parts(t, o)}, o)
    own = found.pop("q"), found.pop("k"), found.pop("v", t["dv"])
    return {"qkv": join_qkv(*own, t.get("dgate"), o), **found}


class _QKVNorm(Normed, RopeQKV):
    name, stage = "qk_norm_rope_qkv", "packed QKV with a norm"
    tensors = ("qkv", "bias?", *WEIGHTS, *BIASES)
    hidden = ("inverse",)
    rules = (*RopeQKV.rules, check_qkv_norm)
    goes_bare = Operation.goes_bare  # without a table there is the norm

    def of_qkv(self, call: Call, saved: Tensors, grads: Tensors, options: Options) -> Tensors:
        back = changed(norm_turned_back(options), copy_v=True)
        if "v" not in grads:  # its part is zeros, whatever v is
            back = changed(back, norm=norm_of(back)._replace(v_norm=False))
        return call(QKV_NORM_BACKWARD, {**every_gradient(grads, options), **saved}, back)


class _QKVNormBackward(RopeQKVBackward):
    """The kernel reads q and k of the projection, v or only its gradient, and writes one tensor."""

    name = "qk_norm_rope_qkv_backward"
    tensors = (*RopeQKVBackward.tensors, "qkv", *WEIGHTS, *BIASES, "bias?")
    options = _QKVNorm.options
    results = ("qkv", "q_weight", "k_weight", "q_bias", "k_bias")
    norm = True
    reference = staticmethod(backward)
    gradient = Operation.gradient  # there is no second derivative

    def fresh(self, tensors: Tensors, options: Options, blocks: int) -> Tensors:
        qkv = tensors["qkv"]
        widths = dict.fromkeys("qk", packed_sizes(qkv, options)[1])
        return {"qkv": qkv.new_empty(qkv.shape), **weight_sums(tensors, widths, blocks)}

    def fakes(self, tensors: Tensors, options: Options) -> Tensors:
        alike = Operation.fresh(self, tensors, options, 0)
        return {**alike, "qkv": tensors["qkv"].new_empty(tensors["qkv"].shape)}

    def places(self, options: Options) -> tuple[str, ...]:
        return ("qkv", "qkv", "qkv" if norm_of(options).v_norm else "dv", *self.writes)

    def heads(self, tensors: Tensors, options: Options) -> tuple[Views, Views]:
        q, k, v = packed_views(tensors["qkv"], options)
        if not norm_of(options).v_norm:
            v = separate_views(tensors["dq"], tensors["dk"], tensors["dv"], options)[2]
        return (q, k, v), packed_views(tensors["qkv_out"], options)

    finishes = Operation.finishes  # always: `finish` drops the scratch

    def finish(self, outputs: Tensors, tensors: Tensors, options: Options) -> Tensors:
        outputs = super().finish(outputs, tensors, options)
        return {name: outputs[name] for name in self.results if name in outputs}


QKV_NORM, QKV_NORM_BACKWARD = _QKVNorm(), _QKVNormBackward()
