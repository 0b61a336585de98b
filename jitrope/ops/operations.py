"""The operations that the library launches."""

from __future__ import annotations

from collections.abc import Container

import torch

from .. import chain
from ..plan.options import LAYOUT_AXES, NO_NORM, NormOptions, Options, changed, norm_of
from ..plan.problem import Views
from ..plan.views import BLOCK_SCALES, FORMATS, Tensors, cache_view, head_view, joined
from ..sinks.results import empty_elements, empty_scale
from ..stages.convert import least_scales
from ..stages.norm import gradients_of_means
from . import checks, operation
from .fit import sizes_of
from .into import ByRank, Into, ScaledInto, joins_k, refuse_other_v
from .joint import QK_NORM_ROPE_JOINT, JointInto
from .kv_cache import check_one_format
from .latent import ROPE_LATENT, ROPE_LATENT_BACKWARD, ROPE_LATENT_INTO
from .operation import BIASES, GIVEN_MEANS, ROTATION, WEIGHTS, Normed, Operation, empty_like
from .pages import PAGE_TENSORS
from .projections import QKV_NORM, QKV_NORM_BACKWARD, ROPE_QKV, ROPE_QKV_BACKWARD, FusedInto, FusedScales, QKVNorm
from .stand_ins import weight_sums
from .words import resolved


class _Rope(Operation):
    name, function = "rope", "apply_rope"
    shards = True
    options = (*ROTATION, "shifts")

    def gradient(self, call: operation.Call, saved: Tensors, grads: Tensors, options: Options) -> Tensors:
        found = operation.rotated_back(self, call, saved, grads, options)
        if options.inplace:  # tokens that are not rotated keep their gradient
            found = {name: operation.spare_stays(grads[name], x, saved, options) for name, x in found.items()}
        return found


class _RopePrepared(_Rope):
    """The same, by its other function, which messages name."""

    function = "prepare_qkv"


class _RopeFp8(Operation):
    name, function, stage = "rope_fp8", "prepare_qkv", "quantize"
    tensors: tuple[str, ...] = ("q", "k?", "q_scale", "k_scale?", "v_scale?")
    options: tuple[str, ...] = (*ROTATION, "out_dtype")
    inplace = differentiable = False
    rules: tuple[operation.Rule, ...] = (checks.check, checks.check_fp8)

    def fresh(self, tensors: Tensors, options: Options, blocks: int) -> Tensors:
        dtype = FORMATS[options.out_dtype].dtype
        return {name: empty_like(tensors[name], dtype=dtype) for name in self.results if name in tensors}


class _RopeKVCache(Operation):
    name, function, stage = "rope_kv_cache", "prepare_qkv", "cache"
    tensors: tuple[str, ...] = (
        *("q", "k", "v?", "k_cache", "v_cache?", "slot_mapping?"),
        *("q_scale?", "k_scale?", "v_scale?"),
        *PAGE_TENSORS,
    )
    options: tuple[str, ...] = (*operation.NORMED, *operation.PLACED, "rotate_k", "out_dtype", "clear_page")
    results: tuple[str, ...] = ("q",)
    writes = ("q_out", "k_cache", "v_cache")
    mutated: tuple[str, ...] = ("k_cache", "v_cache", "errors")
    differentiable = False
    rules: tuple[operation.Rule, ...] = (checks.check_kv_cache,)

    def written(self, options: Options) -> tuple[str, ...]:
        return (*super().written(options), *(("k",) if options.rotate_k else ()))

    def fresh(self, tensors: Tensors, options: Options, blocks: int) -> Tensors:
        return {"q": empty_like(tensors["q"], dtype=self.converted(tensors, options).get("q"))}

    def heads(self, tensors: Tensors, options: Options) -> tuple[Views, Views]:
        q, k, q_out = (head_view(tensors[name], options.layout) for name in ("q", "k", "q_out"))
        v = head_view(tensors["v"], options.layout) if "v" in tensors else None
        paged = "page_table" in tensors or BLOCK_SCALES[0] in tensors
        caches = [cache_view(tensors[name], paged) for name in ("k_cache", "v_cache") if name in tensors]
        return (q, k, v), (q_out, caches[0], None if v is None else caches[1])


class _QKNormRopeFp8(Normed, _RopeFp8):
    name, stage = "qk_norm_rope_fp8", "quantize with a norm or hadamard"
    tensors = (*_RopeFp8.tensors, *WEIGHTS, *BIASES, *GIVEN_MEANS)
    options = (*ROTATION, "hadamard", "out_dtype")
    rules = (*_RopeFp8.rules, checks.check_stored)


class _QKNormRopeScaled(Normed):
    """Heads of q and k, or groups of their elements, are divided by scales, which are returned too.

    v goes to a tensor of the call (`ScaledInto`), with dynamic_v in the same way.
    """

    name, function, stage = "qk_norm_rope_scaled", "prepare_qkv", "dynamic scales"
    tensors: tuple[str, ...] = ("q", "k?", "q_scale?", "k_scale?", "v_scale?", *WEIGHTS, *BIASES, *GIVEN_MEANS)
    labels = {f"{name}_scale": f"{name}_global_scale" for name in "qkv"}  # noqa: RUF012
    options = (*ROTATION, "hadamard", "out_dtype", "group", "scale_out", "swizzled", "dynamic_v")
    results: tuple[str, ...] = ("q", "k", "q_scale", "k_scale")
    inplace = differentiable = False
    rules = (checks.check, checks.check_scaled, checks.check_stored)

    def fresh(self, tensors: Tensors, options: Options, blocks: int) -> Tensors:
        given = [(name, tensors[name]) for name in ("q", "k") if name in tensors and name in self.results]
        out: Tensors = {name: empty_elements(x, options.out_dtype) for name, x in given}
        out.update({f"{name}_scale": empty_scale(x, options) for name, x in given})
        return out

    def converted(self, tensors: Tensors, options: Options) -> dict[str, torch.dtype]:
        return dict.fromkeys(("q", "k", "v") if options.dynamic_v else ("q", "k"), FORMATS[options.out_dtype].dtype)

    def made(self, given: Container[str], options: Options) -> tuple[str, ...]:
        return tuple([name for name in self.results if name[0] in given])


class _QKNormRopeScales(_QKNormRopeScaled):
    """The scales alone, each of a head of a batch row; `gather.with_scales` converts by them in a second launch."""

    name = "qk_norm_rope_scales"
    tensors = ("q", "k?", "v?", *_QKNormRopeScaled.tensors[2:])
    options = (*ROTATION, "hadamard", "out_dtype", "per_row", "dynamic_v")
    results = ("q_scale", "k_scale", "v_scale")
    writes = ("q", "k", "v")

    def check(self, name: str, tensors: Tensors, options: Options) -> None:
        super().check(name, tensors, options)
        if "v" in tensors and not joins_k(tensors["v"], tensors.get("k"), tensors["cos"]):
            refuse_other_v(name, tensors, options)

    def fresh(self, tensors: Tensors, options: Options, blocks: int) -> Tensors:
        q, packed = tensors["q"], "cu_seqlens" in tensors
        rows = tensors["cu_seqlens"].shape[0] - 1 if packed else sizes_of(q, options.layout)[0]
        heads = {name: sizes_of(tensors[name], options.layout)[2] for name in "qkv" if name in tensors}
        return {f"{name}_scale": least_scales((rows, count), q, options) for name, count in heads.items()}


class _QKNormRopeKVCache(Normed, _RopeKVCache):
    name, stage = "qk_norm_rope_kv_cache", "norm with cache"
    tensors = (*_RopeKVCache.tensors, *[f"{x}?" for x in BLOCK_SCALES], *WEIGHTS, "v_weight?", *BIASES, *GIVEN_MEANS)
    mutated = (*_RopeKVCache.mutated, *BLOCK_SCALES)
    options: tuple[str, ...] = (*_RopeKVCache.options, "hadamard", "scale_fmt")
    rules: tuple[operation.Rule, ...] = (*_RopeKVCache.rules, checks.check_stored)


class _QKNormRopeKVCacheScaled(_QKNormRopeKVCache):
    """k and v go to a cache; q is divided by scales, which are returned too."""

    name, stage = "qk_norm_rope_kv_cache_scaled", "dynamic scales with cache"
    labels = {"q_scale": "q_global_scale"}  # noqa: RUF012
    options = (*_QKNormRopeKVCache.options, "group", "scale_out", "swizzled")
    results = ("q", "q_scale")
    inplace = False
    rules = (*_QKNormRopeKVCache.rules, check_one_format)
    fresh, converted, made = _QKNormRopeScaled.fresh, _QKNormRopeScaled.converted, _QKNormRopeScaled.made


class _QKNormRope(Normed):
    name, function, stage = "qk_norm_rope", "prepare_qkv", "norm"
    tensors: tuple[str, ...] = ("q", "k?", *WEIGHTS, *BIASES, *GIVEN_MEANS)
    options: tuple[str, ...] = ROTATION
    hidden: tuple[str, ...] = ("inverse",)
    shards = True
    rules: tuple[operation.Rule, ...] = (checks.check, checks.check_norm)

    def gradient(self, call: operation.Call, saved: Tensors, grads: Tensors, options: Options) -> Tensors:
        tables = {name: x for name, x in saved.items() if name not in self.names}
        if norm_of(options).kind == NO_NORM.kind:
            return ROPE.gradient(call, tables, grads, changed(options, norm=None))
        back = operation.norm_turned_back(changed(options, norm=norm_of(options)._replace(v_norm=False)))
        names = dict(zip("qk", [name for name in "qk" if name in grads]))  # k's gradient alone takes the name of q's
        if names["q"] == "k" and (of := norm_of(back).of) != "qk":
            back = changed(back, norm=norm_of(back)._replace(of="k" if of == "q" else "q"))
        tensors = {"d" + as_name: grads[name] for as_name, name in names.items()}
        for ending in ("", "_weight", "_bias", "_mean_square"):
            given = {as_name: name + ending for as_name, name in names.items() if name + ending in saved}
            tensors.update({as_name + ending: saved[name] for as_name, name in given.items()})
        found = call(QK_NORM_ROPE_BACKWARD, {**tensors, **(tables if "q" in grads else operation.of_k(tables))}, back)
        found = {names[name[0]] + name[1:]: x for name, x in found.items()}
        return {**found, **gradients_of_means(saved, saved, found, options)}


class _NormOfV(_QKNormRope):
    """The same for v alone, which takes the place of q and is not rotated."""

    labels = {"q": "v"}  # noqa: RUF012

    def check(self, name: str, tensors: Tensors, options: Options) -> None:
        checks.check(name, tensors, options, "v")


def norm_of_v(norm: NormOptions) -> NormOptions:
    """The norm of v alone, by that of a call with v_norm: it has no weight."""
    return NormOptions(norm.rounding, norm.across_heads, kind=norm.kind, eps=norm.eps)


class _QKNormRopeHadamard(_QKNormRope):
    """q and k are multiplied by the Hadamard matrix last."""

    name, stage = "qk_norm_rope_hadamard", "hadamard"
    options = (*_QKNormRope.options, "hadamard")
    hidden = ()
    shards = False
    rules = (*_QKNormRope.rules, checks.check_whole_head)

    def gradient(self, call: operation.Call, saved: Tensors, grads: Tensors, options: Options) -> Tensors:
        return super().gradient(call, saved, transformed_back(call, grads, options), changed(options, hadamard=False))


def transformed_back(call: operation.Call, grads: Tensors, options: Options) -> Tensors:
    """The gradients with those of q and k transformed, in their own launch: the matrix is its own transpose."""
    own = {name: joined(grads[name], options.layout) for name in "qk" if name in grads}
    if not own:
        return grads
    words = {name: getattr(options, name) for name in ("layout", "rotary_dim", "rotary_offset", "hadamard")}
    given = dict(zip("qk", own.values()))  # k's gradient alone takes the name of q's
    alone, tensors = resolved(QK_NORM_ROPE_HADAMARD, given, {**words, "norm": NO_NORM})
    return {**grads, **dict(zip(own, call(QK_NORM_ROPE_HADAMARD, tensors, alone).values()))}


class _QKVHadamard(QKVNorm):
    """The same in fused QKV."""

    name, stage = "qk_norm_rope_qkv_hadamard", "fused QKV with hadamard"
    options = (*QKVNorm.options, "hadamard")
    hidden = ()

    def of_qkv(self, call: operation.Call, saved: Tensors, grads: Tensors, options: Options) -> Tensors:
        grads, back = transformed_back(call, grads, options), changed(options, hadamard=False)
        if norm_of(options).kind != NO_NORM.kind:
            return super().of_qkv(call, saved, grads, back)
        tables = {name: x for name, x in saved.items() if name not in self.names}
        return ROPE_QKV.of_qkv(call, tables, grads, changed(back, norm=None))


class _QKVNormRope(_QKNormRope):
    """v is normalised too, like q and k but without a weight. `gather.with_v` chooses it."""

    name = "qkv_norm_rope"
    tensors = ("q", "k", "v", *WEIGHTS, *BIASES)
    results = ("q", "k", "v")
    inplace = shards = False

    def gradient(self, call: operation.Call, saved: Tensors, grads: Tensors, options: Options) -> Tensors:
        """The gradients, from one launch if all of q, k and v have one; else that of v has its own."""
        own = dict(grads)
        if len(own) == 3:
            tensors = {**{"d" + name: grad for name, grad in own.items()}, **saved}
            return call(QKV_NORM_ROPE_BACKWARD, tensors, operation.norm_turned_back(options))
        grad = own.pop("v", None)
        others = {name: x for name, x in saved.items() if name != "v"}
        found = super().gradient(call, others, own, options) if own else {}
        if grad is not None:
            words = {"layout": options.layout, "norm": norm_of_v(norm_of(options))}
            of_v, alone = resolved(NORM_OF_V, {"q": saved["v"]}, words)
            found["v"] = NORM_OF_V.gradient(call, alone, {"q": grad}, of_v)["q"]
        return found


class _QKNormRopeBackward(Operation):
    name = "qk_norm_rope_backward"
    tensors: tuple[str, ...] = ("dq", "dk?", "q", "k?", *WEIGHTS, *BIASES, *GIVEN_MEANS)
    options = _QKNormRope.options
    results: tuple[str, ...] = ("q", "k", "q_weight", "k_weight", "q_bias", "k_bias")
    norm = shards = True
    inplace = False

    def fresh(self, tensors: Tensors, options: Options, blocks: int) -> Tensors:
        out = {name: empty_like(tensors[name]) for name in "qkv" if name in tensors}
        across, axis = norm_of(options).across_heads, LAYOUT_AXES[options.layout][2]
        given = {name: x for name, x in out.items() if name == "q" or (name == "k" and x.shape[axis])}
        sizes = {name: x.shape[-1] * (x.shape[axis] if across else 1) for name, x in given.items()}
        return {**out, **weight_sums(tensors, sizes, blocks)}

    def fakes(self, tensors: Tensors, options: Options) -> Tensors:
        return super().fresh(tensors, options, 0)

    def compute(self, places: Tensors, tensors: Tensors, options: Options) -> None:
        chain.back(tensors, places, changed(options, inverse=not options.inverse))

    def finish(self, outputs: Tensors, tensors: Tensors, options: Options) -> Tensors:
        return {name: outputs[name] for name in self.results if name in outputs}


class _QKVNormRopeBackward(_QKNormRopeBackward):
    name = "qkv_norm_rope_backward"
    tensors = ("dq", "dk", "dv", "q", "k", "v", *WEIGHTS, *BIASES)
    results = ("q", "k", "v", "q_weight", "k_weight", "q_bias", "k_bias")
    shards = False


ROPE, ROPE_FP8, ROPE_KV_CACHE = _Rope(), _RopeFp8(), _RopeKVCache()
QK_NORM_ROPE, QK_NORM_ROPE_BACKWARD = _QKNormRope(), _QKNormRopeBackward()
QKV_NORM_ROPE, QKV_NORM_ROPE_BACKWARD, NORM_OF_V = _QKVNormRope(), _QKVNormRopeBackward(), _NormOfV()
QK_NORM_ROPE_HADAMARD, QKV_HADAMARD = _QKNormRopeHadamard(), _QKVHadamard()
QK_NORM_ROPE_FP8, QK_NORM_ROPE_KV_CACHE = _QKNormRopeFp8(), _QKNormRopeKVCache()
QK_NORM_ROPE_SCALED, QK_NORM_ROPE_KV_CACHE_SCALED = _QKNormRopeScaled(), _QKNormRopeKVCacheScaled()
QK_NORM_ROPE_SCALES = _QKNormRopeScales()
PREPARED: dict[str, tuple[Operation, Operation]] = {
    "cache": (ROPE_KV_CACHE, QK_NORM_ROPE_KV_CACHE),
    "quantize": (ROPE_FP8, QK_NORM_ROPE_FP8),
    "dynamic": (QK_NORM_ROPE_SCALED,) * 2,
    "cache dynamic": (QK_NORM_ROPE_KV_CACHE_SCALED,) * 2,
    "hadamard": (QK_NORM_ROPE_HADAMARD,) * 2,
    "": (_RopePrepared(), QK_NORM_ROPE),
}
"""The operations of `prepare_qkv`, without a norm and with one."""
_PREPARED: tuple[Operation, ...] = (
    *(ROPE, *PREPARED["cache"], *PREPARED["quantize"]),
    *(QK_NORM_ROPE_SCALED, QK_NORM_ROPE, QK_NORM_ROPE_HADAMARD),
)
_INTO = (*_PREPARED, QK_NORM_ROPE_KV_CACHE_SCALED)
for _op in (*_INTO, *PREPARED[""][:1]):
    _op.into = (ScaledInto if "q_scale" in _op.results else Into)(_op)
    if "k" in _op.results:
        _op.by_rank = ByRank(_op)
ROPE_INTO, QKV_NORM_ROPE.into = ROPE.into, QK_NORM_ROPE.into
FUSED_INTO = {op.name: FusedInto(op.into) for op in _INTO}
"""The operations of `prepare_fused_qkv` with stages of `prepare_qkv`, by the names of those."""
_OF_STREAMS = (QK_NORM_ROPE.into, QK_NORM_ROPE_HADAMARD.into, QK_NORM_ROPE_FP8.into, QK_NORM_ROPE_SCALED.into)
JOINT_INTO = {op.base.name: op for op in map(JointInto, _OF_STREAMS)}
"""The operations of `prepare_joint_qkv` with stages of `prepare_qkv`, by the names of those."""
FUSED_SCALES, JOINT_SCALES = FusedScales(QK_NORM_ROPE_SCALES), JointInto(QK_NORM_ROPE_SCALES)
OPERATIONS: tuple[Operation, ...] = (
    *(*_PREPARED, *[op.into for op in _INTO], *[op.by_rank for op in _PREPARED if "k" in op.results]),
    *(ROPE_QKV, ROPE_QKV_BACKWARD, ROPE_LATENT, ROPE_LATENT_BACKWARD, ROPE_LATENT_INTO),
    *(QK_NORM_ROPE_SCALES, QK_NORM_ROPE_KV_CACHE_SCALED, QKV_NORM_ROPE, QK_NORM_ROPE_JOINT),
    *(QK_NORM_ROPE_BACKWARD, QKV_NORM_ROPE_BACKWARD),
    *(QKV_NORM, QKV_HADAMARD, QKV_NORM_BACKWARD, *FUSED_INTO.values(), FUSED_SCALES),
    *(*JOINT_INTO.values(), JOINT_SCALES),
)
"""The operations with ops of torch."""
