"""What the user's functions refuse, each in words: the argument, what was given and what is allowed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..base.arguments import refuse
from ..base.errors import InvalidInput
from ..plan.spec import Options, changed, norm_of
from ..plan.views import FP8, Tables, Tensors
from .fit import (
    MAX_TOKENS,
    Fail,
    check_heads,
    check_integers,
    check_lengths,
    check_position_ids,
    check_tables,
    failing,
    is_float,
    named,
    require_apart,
    require_no_overlap,
    sizes_of,
)
from .reference import table_rows


def check_written(name: str, wants_grad: bool, **tensors: Tensor | None) -> None:
    """Refuse what cannot be written: leaves and some views under autograd, inference tensors, lazy negatives."""
    if torch.compiler.is_compiling():
        return
    _refuse_transforms(name, written=True)
    for label, x in tensors.items():
        if x is None:
            continue
        if x.is_inference() and not torch.is_inference_mode_enabled():
            refuse(name, label, x, "a tensor that was not made in inference mode, because it is written outside of it")
        if x.is_neg():
            refuse(name, label, x, f"a tensor without torch's lazy negative bit; pass {label}.resolve_neg()")
        if wants_grad and x.requires_grad:
            leaf = x.is_leaf or (x._is_view() and x._base.is_leaf)  # type: ignore[union-attr]
            views = getattr(torch._C._autograd, "_get_creation_meta", None)
            if leaf or (views and x._is_view() and views(x) != torch._C._autograd.CreationMeta.DEFAULT):
                kind = "a leaf" if leaf else "a view by unbind, split or chunk, or made under no_grad"
                raise InvalidInput(
                    f"{name}: {label} requires a gradient and is {kind}, which torch cannot write in place"
                )


def check_watched(op: Any, wants_grad: bool, tensors: Tensors, options: Options) -> None:
    """Refuse what torch does not let a call write, and what autograd cannot keep for a backward."""
    name = op.function
    if wants_grad and options.inplace and op.norm:
        raise InvalidInput(f"{name}: it has no gradient, which would need q and k as they were; leave inplace=True out")
    if torch.compiler.is_compiling():
        return
    written = {label: tensors[label] for label in op.written(options) if label in tensors}
    if written:
        check_written(name, wants_grad, **written)
    if wants_grad and op.differentiable:
        _refuse_transforms(name)
        saved = op.saved(tensors)
        for label in ("cos", "sin", "second_cos", "second_sin"):
            if label in tensors and tensors[label].requires_grad:
                raise InvalidInput(
                    f"{name}: {label} requires a gradient, which jitrope does not compute; pass {label}.detach()"
                )
        for label, x in saved.items():
            if x.is_inference():
                label = op.labels.get(label, label)
                refuse(name, label, x, f"a tensor that was not made in inference mode; pass {label}.clone()")


def _refuse_transforms(name: str, written: bool = False) -> None:
    """Refuse torch.func's transforms, but for vmap where nothing is written."""
    for interpreter in torch._C._functorch.get_interpreter_stack() or ():
        kind = interpreter.key().name.lower()
        if kind != "jvp" and (written or kind != "vmap"):  # the check refuses jvp
            raise InvalidInput(
                f"{name}: torch.func's {kind} is not supported here; "
                + ("give the tensors a batch axis" if kind == "vmap" else "use torch.autograd.grad")
            )


# ---- what does not fit -----------------------------------------------------------------------------


def check_qkv(name: str, tensors: Tensors, options: Options) -> None:
    """Refuse what does not fit of a packed call; see `check`."""
    qkv, cos = tensors["qkv"], tensors["cos"]
    groups, width = options.q_per_group, qkv.shape[-1] if qkv.dim() else 0
    fail = failing(name)
    if groups <= 0:
        fail(f"q_per_group is {groups!r}; it must be at least 1")
    if options.layout not in ("bshd", "sbhd", "thd"):
        fail(f"layout is {options.layout!r}; allowed are bshd, sbhd, thd")
    rank = 3 if options.layout == "thd" else 4
    if qkv.dim() != rank:
        fail(f"qkv has shape {tuple(qkv.shape)}, layout {options.layout!r} needs {rank} axes")
    if width <= 0 or width % (groups + 2) != 0:
        fail(f"qkv is {width} wide, which q_per_group + 2 = {groups + 2} does not divide")
    label = "cos" if options.table == "cos_sin" else options.table
    if cos.dim() == 4 and cos.shape[2] != 1:
        fail(f"{label} has shape {tuple(cos.shape)}; with packed QKV the heads must share it: (P, W) or (B, P, W)")
    if options.inplace:
        require_no_overlap("qkv", qkv, fail)
    packed = qkv.unflatten(-1, (groups + 2, -1))
    # A group's k stands for all heads: what remains to be checked does not depend on their number.
    heads = {"q": packed[..., -2, :], "k": packed[..., -2, :]}
    check(name, {**heads, **_tables(tensors)}, changed(options, inplace=False), "qkv")


def check_fp8(name: str, tensors: Tensors, options: Options) -> None:
    """Refuse what does not fit of a call with fp8 outputs; see `check`."""
    fail = failing(name)
    check(name, tensors, options)
    q = tensors["q"]
    _refuse_gradients(fail, tensors, "q", "k")
    _check_scale("q_scale", tensors.get("q_scale"), q, True, fail)
    _check_scale("k_scale", tensors.get("k_scale"), q, "k" in tensors, fail)


def check_kv_cache(name: str, tensors: Tensors, options: Options) -> None:
    """Refuse what does not fit of a call that stores k and v; see `check`."""
    fail = failing(name)
    q, k, v, k_cache, v_cache, slot_mapping = (
        tensors[label] for label in ("q", "k", "v", "k_cache", "v_cache", "slot_mapping")
    )
    cos = tensors["cos"]
    read_only = changed(options, inplace=False)
    check(name, tensors, read_only)
    check_heads(k, v, read_only, fail, "k", "v")
    if options.inplace:
        require_no_overlap("q", q, fail)
    _refuse_gradients(fail, tensors, "q", "k", "v", "k_cache", "v_cache")
    if "cu_seqlens" in tensors:
        fail("cu_seqlens does not go with a cache; position_ids say where each token is")
    if cos.dim() == 4 and cos.shape[2] != 1:
        fail("tables for each head do not go with a cache")
    if v.shape != k.shape:
        fail(f"k is {named(k, options.layout)} but v is {named(v, options.layout)}; they must match")
    if options.rotate_k:
        require_no_overlap("k", k, fail)
    _check_caches(k, k_cache, v_cache, options, fail)
    written, read = {"k_cache": k_cache, "v_cache": v_cache}, {"v": v}
    (written if options.inplace else read)["q"] = q
    (written if options.rotate_k else read)["k"] = k
    require_apart(name, written, read)
    check_integers("slot_mapping", slot_mapping, q, fail)
    if not slot_mapping.is_contiguous():
        fail(f"slot_mapping has strides {slot_mapping.stride()}; it must be contiguous")
    batch, seqlen, *_ = sizes_of(k, options.layout)
    if slot_mapping.numel() != batch * seqlen:
        fail(f"slot_mapping has shape {tuple(slot_mapping.shape)} for {batch * seqlen} tokens")
    if options.inplace and "q_scale" in tensors:
        fail("q comes out as fp8, which does not fit in place; leave inplace=True out")
    scaled = k_cache.dtype == FP8
    for label, wanted in (("q_scale", "q_scale" in tensors), ("k_scale", scaled), ("v_scale", scaled)):
        _check_scale(label, tensors.get(label), q, wanted, fail)


def _check_caches(k: Tensor, k_cache: Tensor, v_cache: Tensor, options: Options, fail: Fail) -> None:
    _, _, heads, head_dim = sizes_of(k, options.layout)
    for label, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dim() not in (3, 4) or tuple(cache.shape[-2:]) != (heads, head_dim):
            fail(
                f"k is {named(k, options.layout)} but {label} has shape {tuple(cache.shape)}; it is (slots, H, D) or "
                "(pages, rows, H, D)"
            )
        if cache.device != k.device:
            fail(f"{label} is on {cache.device} but k is on {k.device}")
        if cache.dtype not in (k.dtype, FP8):
            fail(f"{label} is {cache.dtype}; allowed are k's {k.dtype} and {FP8}")
        require_no_overlap(label, cache, fail)
    same = k_cache.shape == v_cache.shape and k_cache.dtype == v_cache.dtype
    if not same:
        fail(
            f"k_cache is {tuple(k_cache.shape)} {k_cache.dtype} but v_cache is {tuple(v_cache.shape)} {v_cache.dtype}; "
            "they must match"
        )
    paged = [c.dim() == 4 and c.stride(0) != c.shape[1] * c.stride(1) for c in (k_cache, v_cache)]
    if paged[0] != paged[1]:
        fail("k_cache and v_cache have their pages in different orders; give both the same strides")
    slots = k_cache.shape[0] * (k_cache.shape[1] if k_cache.dim() == 4 else 1)
    if slots > MAX_TOKENS:
        fail(f"the caches have {slots} slots, at most {MAX_TOKENS} are possible")


def check_norm(name: str, tensors: Tensors, options: Options) -> None:
    """Refuse what does not fit of a call that normalises too; see `check`."""
    fail = failing(name)
    check(name, tensors, options)
    norm = norm_of(options)
    q, q_weight, k_weight = tensors["q"], tensors.get("q_weight"), tensors.get("k_weight")
    if "cu_seqlens" in tensors:
        fail("cu_seqlens does not go with a norm; position_ids say where each token is")
    if "k" not in tensors and k_weight is not None:
        fail("k_weight is given, but k is not")
    for label, weight in (("q", q_weight), ("k", k_weight)):
        x = tensors.get(label)
        if x is None or weight is None:
            continue
        _, _, heads, size = sizes_of(x, options.layout)
        size, letters = (heads * size, "H D") if norm.across_heads else (size, "D")
        if weight.dim() != 1 or weight.shape[0] != size:
            fail(
                f"{label} is {named(x, options.layout)} but {label}_weight has shape {tuple(weight.shape)}; it is "
                f"({letters}), {size} numbers" + ("" if norm.across_heads else ", or H D with across_heads")
            )
        if not is_float(weight):
            fail(f"{label}_weight is {weight.dtype}; allowed are fp32, fp16 and bf16")
        if not weight.is_contiguous():
            fail(f"{label}_weight has stride {weight.stride()}; it must be contiguous")
        if weight.device != q.device:
            fail(f"{label}_weight is on {weight.device} but q is on {q.device}")
    if q_weight is not None and k_weight is not None and q_weight.dtype != k_weight.dtype:
        fail(f"q_weight is {q_weight.dtype} but k_weight is {k_weight.dtype}; they must match")


def check_norm_joint(name: str, tensors: Tensors, options: Options) -> None:
    """Refuse what does not fit of a call with two streams; see `check_norm`."""
    fail = failing(name)
    norm = norm_of(options)
    streams = [tensors[f"{stream}_{letter}"] for stream in ("first", "second") for letter in "qkv"]
    labels = [f"{stream}'s {letter}" for stream in ("first", "second") for letter in "qkv"]
    for label, x in zip(labels, streams):
        if not isinstance(x, Tensor) or x.dim() != 4:
            fail(f"{label} is not a tensor (B, S, H, D)")
    for label, x in zip(labels, streams):
        like = streams[0 if label.startswith("first") else 3]
        same = x.shape[:2] == like.shape[:2] and x.shape[-1] == like.shape[-1]
        if not same or x.dtype != streams[0].dtype or x.device != streams[0].device:
            fail(
                f"{label} is {named(x, 'bshd')} {x.dtype} on {x.device}; q is {named(like, 'bshd')} "
                f"{streams[0].dtype} on {streams[0].device}"
            )
    for n, letter in enumerate("qkv"):
        a, b = streams[n], streams[n + 3]
        if a.shape[0] != b.shape[0] or a.shape[2:] != b.shape[2:]:
            fail(f"first's {letter} is {named(a, 'bshd')}, second's {named(b, 'bshd')}; only S may differ")
    if streams[1].shape != streams[2].shape:
        fail("v has another number of heads than k")
    given = {x.dtype for label, x in tensors.items() if "weight" in label}
    if len(given) >= 2:
        fail(f"the weights are {', '.join(sorted(map(str, given)))}; they must match")
    two_tables = "second_cos" in tensors
    for stream, second in (("first_", ""), ("second_", "second_")):
        own = {name: stream + name for name in ("q", "k")}
        own.update({name: second + name for name in ("q_weight", "k_weight")})
        own.update({name: (second if two_tables else "") + name for name in ("cos", "sin")})
        check_norm(name, {label: tensors[x] for label, x in own.items() if x in tensors}, options)
    cos, other = tensors["cos"], tensors.get("second_cos", tensors["cos"])
    if cos.dtype != other.dtype:
        fail(f"the first table is {cos.dtype} but the second {other.dtype}")
    if cos.shape[-1] != other.shape[-1]:
        fail(f"the first table is {cos.shape[-1]} wide but the second {other.shape[-1]}")
    rows = cos.shape[0] if cos.dim() == 2 else cos.shape[1]
    tokens = streams[0].shape[1] + streams[3].shape[1]
    if not two_tables and rows < tokens:
        fail(f"the streams have {tokens} tokens but the table has {rows} rows")
    if norm.across_heads:
        fail("across_heads does not go with two streams")
    for table in (cos, other):
        if table.dim() == 4 and table.shape[2] != 1:
            fail("tables for each head do not go with two streams")


def _tables(tensors: Tensors) -> Tensors:
    return {label: tensors[label] for label in Tables._fields if label in tensors}


def _check_scale(label: str, scale: Tensor | None, q: Tensor, wanted: bool, fail: Fail) -> None:
    if scale is None or not wanted:
        if scale is not None:
            fail(f"{label} is given, but what it scales is not stored as fp8")
        if wanted:
            fail(f"{label} is missing; fp8 is stored divided by it")
        return
    fits = scale.dtype == torch.float32 and scale.numel() == 1 and scale.device == q.device
    if not fits:
        fail(f"{label} is {tuple(scale.shape)} {scale.dtype} on {scale.device}; it is one fp32 number on q's device")


def _refuse_gradients(fail: Fail, tensors: Tensors, *labels: str) -> None:
    for label in labels:
        x = tensors.get(label)
        if x is not None and (x.requires_grad and torch.is_grad_enabled()):
            fail(f"{label} requires a gradient, but this call has none; use apply_rope, or torch.no_grad()")


def check_positions(name: str, tensors: Tensors, options: Options) -> None:
    """Refuse positions outside of the table, and slots outside of a cache. Waits for the device."""
    q, cos = next(iter(tensors.values())), tensors["cos"]
    given = [tensors.get(label) for label in Tables._fields[2:]]
    cu_seqlens, start_positions, position_ids = [getattr(x, "full_tensor", lambda x=x: x)() for x in given]
    _, seqlen, _, _ = sizes_of(q, options.layout)
    rows, spare = table_rows(seqlen, q.device, cu_seqlens, start_positions, position_ids, options)
    if spare is not None:
        rows = rows[..., ~spare]
    count = cos.shape[0] if cos.dim() == 2 else cos.shape[1]
    if rows.numel() == 0:
        return
    lowest, highest = (int(x) for x in rows.aminmax())
    if lowest < 0 or highest >= count:
        raise InvalidInput(f"{name}: positions go from {lowest} to {highest}, but the table has rows 0 to {count - 1}")
    if "slot_mapping" in tensors:
        _check_slots(name, tensors["k_cache"], tensors["slot_mapping"])


def _check_slots(name: str, k_cache: Tensor, slot_mapping: Tensor) -> None:
    count = k_cache.shape[0] * (k_cache.shape[1] if k_cache.dim() == 4 else 1)
    highest = int(slot_mapping.max()) if slot_mapping.numel() else -1
    if highest >= count:
        raise InvalidInput(f"{name}: slot_mapping goes up to {highest}, but the caches have slots 0 to {count - 1}")


def check(name: str, tensors: Tensors, options: Options, label: str = "q") -> None:
    """Refuse what does not fit, naming the argument, what was given and what is allowed.

    label: the argument that q is, or is a part of.
    """
    q, k, cos, sin = tensors["q"], tensors.get("k"), tensors["cos"], tensors.get("sin")
    cu_seqlens, start_positions = tensors.get("cu_seqlens"), tensors.get("start_positions")
    fail = failing(name)
    forward_mode = forward_ad._current_level >= 0 and any(
        x is not None and forward_ad.unpack_dual(x).tangent is not None for x in (q, k, cos, sin)
    )
    if forward_mode:
        fail("forward-mode derivatives (jvp) are not supported; use the backward")
    for table, x in _tables(tensors).items():
        table = options.table if table == "cos" and sin is None else table
        if x.device != q.device:
            fail(f"{table} is on {x.device} but {label} is on {q.device}")
    check_heads(q, k, options, fail, label, "k" if label == "q" else label)
    if options.inplace and k is not None:
        require_apart(name, {"q": q, "k": k}, {})
    check_lengths(q, cu_seqlens, start_positions, options, fail)
    check_position_ids(q, tensors, options, fail)
    check_tables(q, k, cos, sin, cu_seqlens is not None, "position_ids" in tensors, options, fail)
