"""The checks of each operation. A refusal names the argument, its value and the allowed values."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import torch_state as watch
from ..base.arguments import refuse, refuse_beside
from ..base.errors import InvalidInput
from ..base.fit import FLOATS, Fail, named, sizes_of
from ..base.layouts import LAYOUT_AXES, MAX_HEAD_DIM, MAX_TOKENS
from ..base.memory import overlaps_itself, refuse_meeting, span
from ..base.views import BLOCK_SCALES, FORMATS, PER_ITEM, TABLE_NAMES, Tensors, by_rank
from ..plan.options import Options
from ..sinks import cache, pages
from ..stages import BEHIND, convert, norm, positions, rotate, transform
from ..stages.convert import TENSORS as SCALES

LEARNED = ("cos", "sin", "second_cos", "second_sin", "q_factor")  # torch computes their gradients, from q and k too


def check_watched(op: Any, t: Tensors, o: Options) -> None:
    """Refuse tensors that torch does not let a call write, or that autograd cannot keep for a backward."""
    name, fail, differentiable = op.function, Fail(op.function), op.differentiable(t, o)
    fail.when(watch.has_tangent(t.values()), "forward-mode derivatives (jvp) are not supported; use the backward")
    copied = "v" if o.ulysses_degree and not convert.converts_v(t, o.dynamic_v) else ""
    wanted = [label for label, x in t.items() if watch.wants_grad(x) and (differentiable or label != copied)]
    fixed = [label for label in (*LEARNED, *SCALES) if label in wanted]
    compiling = watch.is_compiling()
    written = {label: t[label] for label in op.written(t, o)}
    for kind in () if compiling else watch.transforms():
        if kind != "jvp" and (written or (wanted and differentiable and kind != "vmap")):  # jvp is refused before
            instead = "give the tensors a batch axis" if kind == "vmap" else "use torch.autograd.grad"
            fail(f"torch.func's {kind} is not supported here; {instead}")
    if (wanted and not differentiable) or (fixed and o.inplace):
        label, other = label_of(op, (fixed or wanted)[0], t, o), "use a call without cache, quantize and out"
        other = "leave v=True of quantize out" if label == "v" and o.dynamic_v else other
        fresh = o.inplace and op.differentiable(t, o._replace(inplace=False))
        use = "leave inplace=True out, or " if fresh else "" if fixed else f"{other}, or "
        use += f"pass {label}.detach()" if fixed else "torch.no_grad()"
        fail(f"{label} requires a gradient, but this call has none; {use}")
    if compiling:
        return
    for label, x in written.items():
        _check_written(name, op.label(label), x, bool(wanted))
    for label, x in (t if fixed else op.saved(t, o) if wanted else {}).items():
        if x.is_inference():
            label = label_of(op, label, t, o)
            refuse(name, label, x, f"a tensor that was not made in inference mode; pass {label}.clone()")


def _check_written(name: str, label: str, x: Tensor, wants_grad: bool) -> None:
    """Refuse to write inference tensors, lazy negatives and zeros and, under autograd, leaves and some views."""
    if x.is_inference() and not torch.is_inference_mode_enabled():
        refuse(name, label, x, "a tensor that was not made in inference mode; this call writes it outside of that mode")
    if watch.is_zero(x) or x.is_neg():
        hint = "" if label.startswith("out's") else f"; pass {label}.clone()"
        refuse(name, label, x, f"a tensor with its numbers in memory, not torch's lazy zeros or negatives{hint}")
    if wants_grad and x.requires_grad and (kind := watch.not_writable(x)):
        text = f"{label} requires a gradient and is {kind}, which torch cannot write in place"
        raise InvalidInput(f"{name}: {text}; leave inplace=True out")


def check_memory(op: Any, t: Tensors, o: Options) -> None:
    """Refuse a tensor that is written and shares memory with another tensor of the call, or between its elements."""
    labels = {name: label_of(op, name, t, o) for name in t}
    written = {name: t[name] for name in op.written(t, o)}
    for name, x in written.items():
        own = f"{name}.contiguous(), or leave inplace=True out"
        use = own if name in ("q", "k", "qkv") else "a tensor with memory for each element"
        had = f"{labels[name]} has strides {tuple(x.stride())}; its elements overlap in memory, so it cannot be written"
        Fail(op.function).when(overlaps_itself(x), f"{had}; pass {use}")
    require_apart(op.function, written, t, labels)


def label_of(op: Any, name: str, t: Container[str], o: Options) -> str:
    """The user's name of a tensor of a call."""
    if (o.computed or o.per_row) and name in SCALES[: 1 if "k_cache" in t else 3]:
        return f"{name[0]}_global_scale"
    return rotate.label_of(name, o) if name in TABLE_NAMES else op.label(name)


# ---- the checks of the operations, and the rules of their stages, which follow `check` -----------------


def check_heads(heads: Tensors, o: Options, fail: Fail) -> None:
    """Check q, which owns `fail`, and k if it is there. heads: by their names for messages."""
    layout, first, q = o.layout, fail.owner, next(iter(heads.values()))
    for label, x in heads.items():
        hint = "" if x is q else f"; only H may differ, and layout is {layout!r}"
        hint = hint if x.dtype == q.dtype and x.device == q.device else f"; pass {label}.to({first})"
        if x.dim() != len(layout):
            flat = f", for (B, S, H * D) {label}.unflatten(-1, (H, D)), for (B, S, D) {label}.unsqueeze(2)"
            hint = '; for (T, H, D) pass layout="thd"' + flat * (layout == "bshd")
            hint = "; the layout is 'thd', which Packed implies" if layout == "thd" else hint
        shape: Sequence[Any] = [size if axis != "h" else "H" for axis, size in zip(layout, q.shape)]
        dtypes, shape, like = (FLOATS, layout.upper(), first) if x is q else ((q.dtype,), shape, "")
        fail.unlike(label, x, q.device, dtypes, shape, like=like, hint=hint)
    batch, seqlen, _, head_dim = sizes_of(q, layout)
    tokens, had = batch * seqlen, f"{first} has D={head_dim}; at most {MAX_HEAD_DIM} is possible"
    on = f"{first} is on {q.device}; it must be on a CUDA device, the CPU or meta"
    fail.when(q.device.type not in ("cuda", "cpu", "meta"), on)
    fail.when(tokens > MAX_TOKENS, f"{first} has {tokens} tokens; at most {MAX_TOKENS} are possible")
    fail.when(head_dim > MAX_HEAD_DIM, f"{had}; pass a view of the rotated elements")
    rotate.check_dims(head_dim, o, fail)


def require_apart(name: str, written: Tensors, read: Tensors, labels: dict[str, str]) -> None:
    """Refuse memory that a call would write as one tensor and read or write as another; skip tensors without memory."""
    t = {**written, **read}
    real = all(type(x) in (Tensor, torch.nn.Parameter) and x.device.type != "meta" for x in t.values())
    if real and not watch.transformed():
        refuse_meeting(name, {label: span(x) for label, x in t.items()}, tuple(written), labels)


def check_pairs(t: Tensors, o: Options, fail: Fail) -> None:
    """Refuse tensors whose elements cannot be taken in aligned pairs: fp4 stores two in a byte."""
    apart = "v" in t and ("k" not in t or t["v"].shape != t["k"].shape)
    names = ("bias", *"qkv", "q_out", "k_out", "k_pe_cache", *["v_out"] * (not apart))  # v is copied after the launch
    for name in [x for x in names if x in t and PER_ITEM.get(t[x].dtype, 1) == 1]:
        x, label = t[name], f"out's {name[0]}" if name.endswith("_out") else fail.main if name == "q" else name
        steps = [stride for size, stride in zip(x.shape[:-1], x.stride()) if size > 1]
        odd = x.stride(-1) != 1 or any(n % 2 for n in (x.shape[-1], x.storage_offset(), *steps))
        had = f"{label} has D={x.shape[-1]}, strides {tuple(x.stride())} and offset {x.storage_offset()}"
        fail.when(odd, f"{had}; fp4 needs aligned pairs of neighbouring elements")
    first, dim, of = o.rotary_offset, o.rotary_dim, 2 if o.interleaved else 4
    must = f"for fp4 the first must be even, and the second a multiple of {of}"
    fail.when(first % 2 or dim % of, f"rotary_offset is {first}, rotary_dim {dim}; {must}")


def check(op: Any, t: Tensors, o: Options) -> None:
    """Refuse tensors and options that do not fit together."""
    q, label = t["q"], op.label("q")
    fail = Fail(op.function, label, q, o.layout, op.main)
    check_heads({label: q, **({op.label("k"): t["k"]} if "k" in t else {})}, o, fail)
    positions.check(t, o.rotary_dim // 2, o, fail)
    rotate.check(t, o, op.said or "a cache" * ("k_cache" in t), fail)
    for stage in BEHIND.values():
        stage.check(t, o, fail)


def check_kv_cache(op: Any, t: Tensors, o: Options) -> None:
    """The rule of a call that stores k and v in caches."""
    k = t["k"]
    fail = Fail(op.function, "k", k, o.layout, op.main)
    kv: Tensors = {label: t[label] for label in ("k", "v") if label in t}
    check_heads(kv, o, fail)
    heads, v_heads = (sizes_of(x, o.layout)[2] for x in (k, kv.get("v", k)))
    if v_heads != heads and (not heads or v_heads == 0 or v_heads % heads):
        had = f"k is {named(k, o.layout)} but v is {named(kv['v'], o.layout)}"
        fail(f"{had}; v must have as many heads, or a multiple of them")
    cache.check(kv, t, o, fail)
    pages.check(t, o, fail)
    if o.computed and BLOCK_SCALES[0] in t:
        cache.check_format(t, o, fail)


def check_scale(op: Any, own: str, t: Tensors, o: Options) -> None:
    """Refuse a wrong given scale of `own`, q, k or v, and a missing one."""
    scale, label = t.get(f"{own}_scale"), label_of(op, f"{own}_scale", t, o)
    fail = Fail(op.function, own, t.get(own), o.layout)
    if own == "q" and "q_weights" in t:
        fail.unlike("q_weights", t["q_weights"], t["q"].device, (torch.float32,), t["q"].shape[:-1])
    wanted, needed = own in t, own != "v" and not (o.computed or o.per_row) and any(x in t for x in SCALES[:3])
    if "k_cache" in t:
        wanted, needed = wanted and (own == "q" or cache.takes_scale(t)), own != "q" and BLOCK_SCALES[0] not in t
    if scale is None:
        return fail.when(wanted and needed, f"{label} is missing; pass it, because fp8 is stored divided by it")
    fail.when(not wanted, f"{label} is given, but no output is divided by it; leave it out")
    batch, _, heads, _ = sizes_of(t[own], o.layout)
    rows = (batch, t["cu_seqlens"].shape[0] - 1) if "cu_seqlens" in t else (batch,)
    shapes = [scale.shape] if scale.numel() == 1 else [(), (heads,), (rows, heads)]
    fail.unlike(label, scale, t["q"].device, (torch.float32,), *shapes)


def check_whole_heads(op: Any, t: Tensors, o: Options) -> None:
    """The rule of a norm, and of other stages that need all elements of a head."""
    fail, dim = Fail(op.function, op.label("q"), t["q"], o.layout, op.main), t["q"].shape[-1]
    others = {"a cache": "k_cache" in t, "dynamic scales": o.computed or o.per_row}
    others[transform.LABEL] = getattr(o, transform.LABEL)
    if norm.sums_heads(t, o):
        beside = [x for x, given in others.items() if given]
        refuse_beside(op.function, ["across_heads"], beside, "pass mean_squares, or normalise before")
    norm.check(t, o, fail)
    fail.when(o.inverse and norm.normed(o), "inverse does not go with norm; rotate back in a call without a norm")
    fail.when(o.group and dim % o.group, f"group is {o.group}; it must divide D={dim}")
    if o.out_dtype == "fp4" or ("k_cache" in t and PER_ITEM.get(t["k_cache"].dtype, 1) > 1):
        check_pairs(t, o, fail)


def check_results(op: Any, t: Tensors, o: Options) -> None:
    """Refuse heads that ranks do not divide, and output tensors of the caller with another shape or dtype."""
    fail, q = Fail(op.function), t["q"]
    for letter in [x for x in "qkv" if x in t and (o.ulysses_degree or (f"{x}_out" in t and not o.per_row))]:
        x, out, word = t[letter], t.get(f"{letter}_out"), op.format_of(letter, t, o)
        fail.unlike(letter, x, q.device, (x.dtype,), tuple(o.layout.upper()))
        ranks = o.ulysses_degree if out is None else len(out) if out.dim() == x.dim() + 1 else 0
        if ranks and x.shape[LAYOUT_AXES[o.layout][2]] % ranks:
            fail(f"{letter} is {named(x, o.layout)}; for {ranks} ranks it needs a multiple of {ranks} heads")
        if out is None:
            continue
        *shape, dim = (by_rank(x, o.layout, ranks) if ranks else x).shape
        dtype, _, per_item = FORMATS[word] if word else (x.dtype, 0, 1)
        must = (*shape, dim // per_item)
        turned = out.shape != must and len(must) == 4 and out.shape == (must[0], *must[2:0:-1], must[3])
        fail.unlike(f"out's {letter}", out, q.device, (dtype,), must, hint="; pass its transpose(1, 2)" * turned)
        if per_item > 1 and out.stride(-1) != 1:
            fail(f"out's {letter} has strides {tuple(out.stride())}; for fp4 the last must be 1")
