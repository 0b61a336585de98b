"""The checks of each operation. A refusal names the argument, its value and the allowed values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..base.arguments import refuse
from ..base.errors import InvalidInput
from ..plan import views
from ..plan.options import Options, changed, norm_of
from ..plan.views import BLOCK_SCALES, FP8, FP8S, PER_ITEM, TABLE_NAMES, Tensors
from . import fit, watch
from .fit import Fail, failing, named
from .kv_cache import check_caches
from .pages import check_pages, check_slots

WEIGHTS = ("q_weight", "k_weight", "v_weight", "q_bias", "k_bias")
LEARNED = ("cos", "sin", "second_cos", "second_sin", "q_factor")  # torch computes their gradients, from q and k too
MAX_HADAMARD = 256
_STAGES = "use a call without cache and quantize"


def check_watched(op: Any, wants_grad: bool, tensors: Tensors, options: Options) -> None:
    """Refuse tensors that torch does not let a call write, or that autograd cannot keep for a backward."""
    name = op.function
    if watch.has_tangent(tensors.values()):
        raise InvalidInput(f"{name}: forward-mode derivatives (jvp) are not supported; use the backward")
    if wants_grad and options.inplace and op.norm:
        why = ", because that needs the old q and k" if norm_of(options).kind != "no_norm" else ""
        raise InvalidInput(f"{name}: it has no gradient in place{why}; leave inplace=True out")
    learned = [
        label for label in LEARNED if label in tensors and tensors[label].requires_grad and torch.is_grad_enabled()
    ]
    if learned and (not op.differentiable or options.inplace):
        label, instead = op.label(learned[0]), "leave inplace=True out, or " if options.inplace else ""
        text = f"{label} requires a gradient, but this call has none; {instead}pass {label}.detach()"
        raise InvalidInput(f"{name}: {text}")
    wants_grad = wants_grad or bool(learned)
    if torch.compiler.is_compiling():
        return
    written = {label: tensors[label] for label in op.written(options) if label in tensors}
    if written:
        _refuse_transforms(name, written=True)
    for label, x in written.items():
        _check_written(name, op.label(label), x, wants_grad and op.differentiable)
    if not wants_grad or not op.differentiable:
        return
    _refuse_transforms(name)
    for label, x in (tensors if learned else op.saved(tensors, options)).items():
        if x.is_inference():
            label = label_of(op, label, options)
            refuse(name, label, x, f"a tensor that was not made in inference mode; pass {label}.clone()")


def _check_written(name: str, label: str, x: Tensor, wants_grad: bool) -> None:
    """Refuse to write inference tensors, lazy negatives and zeros and, under autograd, leaves and some views."""
    if x.is_inference() and not torch.is_inference_mode_enabled():
        refuse(name, label, x, "a tensor that was not made in inference mode; this call writes it outside of that mode")
    hint = "" if label.startswith("out's") else f"; pass {label}"
    if watch.is_zero(x):
        refuse(name, label, x, f"a tensor with memory, not torch's lazy zeros{hint and hint + '.clone()'}")
    if x.is_neg():
        refuse(name, label, x, f"a tensor without torch's lazy negative bit{hint and hint + '.resolve_neg()'}")
    if wants_grad and x.requires_grad and (kind := watch.not_writable(x)):
        text = f"{label} requires a gradient and is {kind}, which torch cannot write in place"
        raise InvalidInput(f"{name}: {text}; leave inplace=True out")


def _refuse_transforms(name: str, written: bool = False) -> None:
    """Refuse torch.func's transforms, except vmap where nothing is written."""
    for kind in watch.transforms():
        if kind != "jvp" and (written or kind != "vmap"):  # jvp is refused before
            instead = "give the tensors a batch axis" if kind == "vmap" else "use torch.autograd.grad"
            raise InvalidInput(f"{name}: torch.func's {kind} is not supported here; {instead}")


def check_memory(op: Any, tensors: Tensors, options: Options) -> None:
    """Refuse a tensor that is written and shares memory with another tensor of the call."""
    named = {name: label_of(op, name, options) for name in tensors}
    written = {named[name]: tensors[name] for name in op.written(options) if name in tensors}
    fit.require_apart(op.function, written, {named[name]: x for name, x in tensors.items()})


def label_of(op: Any, name: str, options: Options) -> str:
    """The user's name of a tensor of a call."""
    of_call = {"cos": fit.label_of_table, "position_ids": fit.label_of_ids}
    return of_call[name](options) if name in of_call else op.label(name)


# ---- the checks of the operations, and the rules of their stages, which follow `check` -----------------


def check(name: str, tensors: Tensors, options: Options, label: str = "q") -> None:
    """Refuse tensors and options that do not fit together.

    label: the name of q, or of the tensor that contains it, for messages.
    """
    q, k = tensors["q"], tensors.get("k")
    fail = failing(name)
    for table, x in _tables(tensors).items():
        if x.device != q.device:
            labels = {"cos": fit.label_of_table(options), "position_ids": fit.label_of_ids(options), **fit.USERS_NAMES}
            fail(f"{labels.get(table, table)} is on {x.device} but {label} is on {q.device}")
    fit.check_heads(q, k, options, fail, label, "k" if label == "q" else label)
    fit.check_lengths(tensors, options, fail)
    fit.check_position_ids(tensors, options, fail)
    fit.check_factor(tensors, q, fit.sizes_of(q, options.layout)[1], options.layout, fail)
    fit.check_tables(tensors, options, fail)


def check_qkv(name: str, tensors: Tensors, options: Options) -> None:
    """The check of a fused call."""
    qkv, cos, fail = tensors["qkv"], tensors["cos"], failing(name)
    fit.refuse_per_head(cos, options, "fused QKV", fail)
    if norm_of(options).across_heads and norm_of(options).v_norm:
        fail("across_heads does not go with v_norm in fused QKV; split it, and pass q, k and v to prepare_qkv")
    if options.inplace:
        fit.require_no_overlap("qkv", qkv, fail)
    # k is also checked as q: the rest of the check does not depend on the number of heads
    k = views.fused_part(qkv, "k", options)
    check(name, {"q": k, "k": k, **_tables(tensors)}, changed(options, inplace=False), "qkv")
    if "bias" in tensors:
        _check_bias(qkv, tensors["bias"], options, fail)


def _check_bias(qkv: Tensor, bias: Tensor, options: Options, fail: Fail) -> None:
    """Refuse a wrong bias of a projection whose output fits."""
    shape = tuple(qkv.shape[-2:])
    if tuple(bias.shape) not in (shape, (shape[0] * shape[1],)):
        had = f"qkv has shape {tuple(qkv.shape)} but bias {tuple(bias.shape)}"
        fail(f"{had}; it must be {shape} or ({shape[0] * shape[1]},), as the projection has it")
    if bias.dtype != qkv.dtype or bias.device != qkv.device:
        fail(f"bias is {bias.dtype} on {bias.device} but qkv is {qkv.dtype} on {qkv.device}; they must match")
    if not options.copy_v:
        fail("copy_v=False does not go with bias, because v is not a view then; leave copy_v out")


def check_fp8(name: str, tensors: Tensors, options: Options) -> None:
    """The rule of fp8 outputs."""
    fail = failing(name)
    refuse_gradients(fail, tensors, "q", "k", *(("v",) if "v_scale" in tensors else ()))
    for own in "qkv":
        fit.check_scale(f"{own}_scale", tensors, own, own in tensors, options, fail, needed=own != "v")


def check_kv_cache(name: str, tensors: Tensors, options: Options) -> None:
    """The check of a call that stores k and v in caches."""
    fail = failing(name)
    _refuse_sums(tensors, options, "a cache", fail)
    q, k, cos = (tensors[label] for label in ("q", "k", "cos"))
    kv: Tensors = {label: tensors[label] for label in ("k", "v") if label in tensors}
    if ("v" in kv) != ("v_cache" in tensors):
        refuse(name, "v", kv.get("v"), "a tensor" if "v_cache" in tensors else "None, because the cache has no v_cache")
    read_only = changed(options, inplace=False)
    check(name, tensors, read_only)
    fit.check_heads(k, kv.get("v"), read_only, fail, "k", "v")
    if options.inplace:
        fit.require_no_overlap("q", q, fail)
    refuse_gradients(fail, tensors, "q", "k", "v", "k_cache", "v_cache", *BLOCK_SCALES)
    fit.refuse_per_head(cos, options, "a cache", fail)
    heads, v_heads = (fit.sizes_of(x, options.layout)[2] for x in (k, kv.get("v", k)))
    if v_heads != heads and (not heads or v_heads == 0 or v_heads % heads):
        had = f"k is {named(k, options.layout)} but v is {named(kv['v'], options.layout)}"
        fail(f"{had}; v must have as many heads, or a multiple of them")
    if options.rotate_k:
        fit.require_no_overlap("k", k, fail)
    check_caches(kv, tensors, options, fail)
    (check_slots if "slot_mapping" in tensors else check_pages)(tensors, options, fail)
    if options.inplace and "q_scale" in tensors:
        fail("q is returned as fp8, which cannot be in place; leave inplace=True out")
    own = "q_global_scale" if options.scale_out == "fp8" else "q_scale"
    fit.check_scale(own, tensors, "q", "q_scale" in tensors, options, fail)
    blocks = tensors.get(BLOCK_SCALES[0])
    for label in kv:
        given = f"{label}_scale" in tensors
        scaled = tensors["k_cache"].dtype in FP8S if blocks is None else given and blocks.dtype == FP8
        fit.check_scale(f"{label}_scale", tensors, label, scaled, options, fail)


def check_scaled(name: str, tensors: Tensors, options: Options) -> None:
    """The rule of dynamic scales."""
    fail = failing(name)
    _refuse_sums(tensors, options, "dynamic scales", fail)
    for own in [own for own in "qkv" if f"{own}_scale" in tensors]:
        fit.check_scale(f"{own}_global_scale", tensors, own, own in tensors, options, fail)
    refuse_gradients(fail, tensors, "q", "k")
    if options.dynamic_v:
        refuse_gradients(fail, tensors, "v", use="leave v=True of quantize out")


def check_stored(name: str, tensors: Tensors, options: Options) -> None:
    """The rule of a norm whose results are converted or stored."""
    check_norm(name, tensors, options)
    check_whole_head(name, tensors, options)
    refuse_gradients(failing(name), tensors, *WEIGHTS, *views.MEANS)


def _refuse_sums(tensors: Tensors, options: Options, beside: str, fail: Fail) -> None:
    """Refuse a norm across heads that the kernel sums itself."""
    if views.sums_heads(tensors, options):
        fail(f"across_heads does not go with {beside}; pass mean_squares, or normalise before")


def takes_pairs(tensors: Tensors, options: Options) -> bool:
    """Whether a call writes fp4."""
    return options.out_dtype == "fp4" or ("k_cache" in tensors and PER_ITEM.get(tensors["k_cache"].dtype, 1) > 1)


def check_whole_head(name: str, tensors: Tensors, options: Options) -> None:
    """The rule of a stage that needs all elements of a head."""
    fail, dim = failing(name), tensors["q"].shape[-1]
    if options.inverse and norm_of(options).kind != "no_norm":
        fail("inverse does not go with norm; rotate back in a call without a norm")
    if options.group and dim % options.group:
        fail(f"group is {options.group}; it must divide D={dim}")
    if takes_pairs(tensors, options):
        fit.check_pairs(tensors, options, fail)
    if options.hadamard and (dim > MAX_HADAMARD or dim & (dim - 1)):
        fail(f"hadamard goes with a power of two of elements up to {MAX_HADAMARD}; q has D={dim}, so leave it out")
    if options.hadamard:
        _refuse_sums(tensors, options, "hadamard", fail)


def check_norm(name: str, tensors: Tensors, options: Options) -> None:
    """The rule of a norm: its weights fit q and k."""
    fail, norm = failing(name), norm_of(options)
    fit.check_means(tensors, options.layout, fail)
    if norm.of == "k" and "k" not in tensors:
        fail("the norm has of='k', but k is not given")
    if norm.v_norm and "k_cache" in tensors and "v" not in tensors:
        fail("the norm has v_norm, but v is not given")
    if norm.of == "v" and "v_cache" not in tensors:
        fail("the norm has of='v', which goes with a cache of v; without one pass v as q to a call of its own")
    weights = {label: tensors[label] for label in WEIGHTS if label in tensors}
    for label, weight in weights.items():
        owner, _, kind = label.partition("_")
        if owner not in tensors:
            fail(f"{label} is given, but {owner} is not")
        if kind == "bias" and norm.kind != "layer_norm":
            fail(f"{label} goes with kind='layer_norm'; pass it, or leave {label} out")
        x = tensors[owner]
        _, _, heads, size = fit.sizes_of(x, options.layout)
        size, letters = (heads * size, "H D") if norm.across_heads or owner == "v" else (size, "D")
        if weight.dim() != 1 or weight.shape[0] != size:
            of = f"{owner} of qkv" if options.q_per_group else owner
            had = f"{of} is {named(x, options.layout)} but {label} has shape {tuple(weight.shape)}"
            or_else = "" if letters == "H D" else ", or H D with across_heads"
            fail(f"{had}; it must be ({letters}), {size} numbers{or_else}")
        if not fit.is_float(weight):
            fail(f"{label} is {weight.dtype}; allowed are fp32, fp16 and bf16")
        if not weight.is_contiguous():
            fail(f"{label} has stride {weight.stride()}; it must be contiguous")
        if weight.device != x.device:
            fail(f"{label} is on {weight.device} but q is on {x.device}")
    if len({weight.dtype for weight in weights.values()}) > 1:
        had = " but ".join([f"{label} is {weight.dtype}" for label, weight in weights.items()])
        fail(f"{had}; they must match")


def check_into(
    name: str, tensors: Tensors, options: Options, labels: dict[str, str], dtypes: dict[str, torch.dtype]
) -> None:
    """The check of the caller's output tensors, given labels for messages, and dtypes that differ from the inputs'."""
    fail, shapes = failing(name), {}
    for label in [label for label in labels if label in tensors]:
        letter, out = label[0], tensors[label]
        x = tensors[letter]
        fit.check_axes(letter, x, tensors["q"], fail)
        if out.dim() == x.dim() + 1 and len(out):  # a group of heads for each rank
            fit.check_ranks(letter, x, len(out), options, fail)
            x = views.by_rank(x, options.layout, len(out))
        per_item = PER_ITEM[dtypes[letter]] if letter in dtypes else 1
        shapes[label] = (*x.shape[:-1], x.shape[-1] // per_item), dtypes.get(letter, x.dtype)
    check_outs(name, tensors, labels, shapes)


def check_outs(
    name: str,
    tensors: Tensors,
    labels: dict[str, str],
    wanted: dict[str, tuple[tuple[int, ...], torch.dtype]],
    use: str = "use a call without out",
) -> None:
    """Refuse output tensors of the caller that are not as wanted, shapes and dtypes by name, or that share memory."""
    fail, device = failing(name), tensors["q"].device
    outs = {labels[x]: tensors[x] for x in wanted}
    for (label, out), (shape, dtype) in zip(outs.items(), wanted.values()):
        if out.shape != shape or out.dtype != dtype or out.device != device:
            swapped = out.dim() == 4 and out.transpose(1, 2).shape == shape
            hint = "; pass its transpose(1, 2)" if swapped else ""
            had = f"{label} is {tuple(out.shape)} {out.dtype} on {out.device}"
            fail(f"{had}; it must be {tuple(shape)} {dtype} on {device}{hint}")
        if PER_ITEM.get(dtype, 1) > 1 and out.stride(-1) != 1:
            fail(f"{label} has strides {tuple(out.stride())}; for fp4 the last must be 1")
        fit.require_no_overlap(label, out, fail, fit.OWN_MEMORY)
    read = {label: x for label, x in tensors.items() if label not in labels}
    refuse_gradients(fail, {**read, **outs}, *read, *outs, use=use)


def _tables(tensors: Tensors) -> Tensors:
    return {label: tensors[label] for label in TABLE_NAMES if label in tensors}


def refuse_gradients(fail: Fail, tensors: Tensors, *labels: str, use: str = _STAGES) -> None:
    """Refuse tensors that require a gradient in a call that has none. use: another call, for the message."""
    for label in labels:
        x = tensors.get(label)
        label = fit.USERS_NAMES.get(label, label)
        if x is not None and (x.requires_grad and torch.is_grad_enabled()):
            fail(f"{label} requires a gradient, but this call has none; {use}, or torch.no_grad()")
