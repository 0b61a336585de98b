"""The operations of packed QKV with a norm: their check, the same in plain torch, and its gradient."""

from __future__ import annotations

from ..plan.options import Options, changed, norm_of
from ..plan.problem import Views
from ..plan.views import Tensors, packed_part, packed_sizes, packed_views, separate_views
from . import reference
from .checks import check_norm, check_qkv
from .fit import failing
from .operation import BIASES, NORMED, PLACED, WEIGHTS, Call, Normed, Operation, empty_like, norm_turned_back
from .projections import PACKED, RopeQKV, RopeQKVBackward, every_gradient
from .stand_ins import weight_sums


def check_qkv_norm(name: str, tensors: Tensors, options: Options) -> None:
    """The check of a packed call with a norm."""
    check_qkv(name, tensors, options)
    fail, norm = failing(name), norm_of(options)
    if norm.across_heads:
        fail("across_heads does not go with packed QKV; split it, and pass q, k and v to prepare_qkv")
    if norm.v_norm and not options.copy_v:
        fail("copy_v=False does not go with v_norm, because v is not a view then; leave copy_v out")
    k = packed_part(tensors["qkv"], "k", options)
    q = k[..., :1, :].expand(*k.shape[:-2], k.shape[-2] * options.q_per_group, -1)  # its shape is what matters
    others = {label: x for label, x in tensors.items() if label != "qkv"}
    check_norm(name, {"q": q, "k": k, **others}, changed(options, inplace=False))


def backward(t: Tensors, o: Options) -> Tensors:
    """The gradients of packed QKV, the weights and the biases; `o` rotates back."""
    parts = {name: x.contiguous() for name, x in reference.split_qkv(reference.with_bias(t)["qkv"], o).items()}
    found = reference.qk_norm_rope_backward({**t, **parts}, o)
    gate = t.get("dgate", t["dq"].new_zeros(t["dq"].shape))
    own = {"q": found.pop("q"), "k": found.pop("k"), "v": found.pop("v", t["dv"]), "gate": gate}
    return {"qkv": reference.join_qkv(own, o), **found}


class _QKVNorm(Normed, RopeQKV):
    name, stage = "qk_norm_rope_qkv", "packed QKV with a norm"
    tensors = ("qkv", "bias?", *WEIGHTS, *BIASES)
    options = (*NORMED, *PLACED, "inverse", *PACKED)
    words = (*NORMED, *PLACED, *PACKED, "norm", "check", "inplace")
    check = staticmethod(check_qkv_norm)
    goes_bare = Operation.goes_bare  # without a table there is the norm

    def saved(self, tensors: Tensors, options: Options) -> Tensors:
        return dict(tensors)

    def of_qkv(self, call: Call, saved: Tensors, grads: Tensors, options: Options) -> Tensors:
        back = changed(norm_turned_back(options), copy_v=True)
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
        sums = {name: empty_like(tensors[name]) for name in self.results[1:] if name in tensors}
        return {"qkv": tensors["qkv"].new_empty(tensors["qkv"].shape), **sums}

    def places(self, options: Options) -> tuple[str, ...]:
        return ("qkv", "qkv", "qkv" if norm_of(options).v_norm else "dv", *self.writes)

    def heads(self, tensors: Tensors, options: Options) -> tuple[Views, Views]:
        q, k, v = packed_views(tensors["qkv"], options)
        if not norm_of(options).v_norm:
            v = separate_views(tensors["dq"], tensors["dk"], tensors["dv"], options)[2]
        return (q, k, v), packed_views(tensors["qkv_out"], options)

    def finishes(self, tensors: Tensors, options: Options) -> bool:
        return True

    def finish(self, outputs: Tensors, tensors: Tensors, options: Options) -> Tensors:
        if super().finishes(tensors, options):
            super().finish(outputs, tensors, options)
        return {name: outputs[name] for name in self.results if name in outputs}


QKV_NORM, QKV_NORM_BACKWARD = _QKVNorm(), _QKVNormBackward()
