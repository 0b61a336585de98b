"""The checks of each operation. A refusal names the argument, its value and the allowed values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import torch_state as watch
from ..base import views
from ..base.fit import FLOATS, Fail, named, sizes_of
from ..base.layouts import LAYOUT_AXES, MAX_HEAD_DIM, MAX_TOKENS
from ..base.memory import overlaps_itself, refuse_meeting, span
from ..base.views import BLOCK_SCALES, FORMATS, FP8, FP8S, PER_ITEM, TABLE_NAMES, Tensors
from ..plan.options import Options
from ..sinks import cache, pages
from ..stages import norm, positions, rotate, scale, transform
from ..stages.convert import converts_v

LEARNED = ("cos", "sin", "second_cos", "second_sin", "q_factor")  # torch computes their gradients, from q and k too


def check_watched(op: Any, t: Tensors, o: Options) -> None:
    """Refuse tensors that torch does not let a call write, or that autograd cannot keep for a backward."""
    fail, compiling = Fail(op.function), watch.is_compiling()
    fail.when(watch.has_tangent(t.values()), "forward-mode derivatives (jvp) are not supported; use the backward")
    copied = "v" if op.out == "ranks" and not converts_v(t, o.dynamic_v) else ""
    wanted = [label for label, x in t.items() if watch.wants_grad(x) and (op.differentiable or label != copied)]
    fixed = [label for label in (*LEARNED, "q_scale", "k_scale", "v_scale") if label in wanted]
    written = {label: t[label] for label in op.written(o) if label in t}
    for kind in () if compiling else watch.transforms():
        if kind != "jvp" and (written or (wanted and op.differentiable and kind != "vmap")):  # jvp is refused before
            instead = "give the tensors a batch axis" if kind == "vmap" else "use torch.autograd.grad"
            fail(f"torch.func's {kind} is not supported here; {instead}")
    lost = wanted if not op.differentiable or (o.inplace and op.norm) else fixed if o.inplace else []
    for label in [label_of(op, label, o) for label in lost]:
        had = f"{label} requires a gradient, but this call has none{' in place' * o.inplace}"
        fail(f"{had}; pass {label}.detach(), or use torch.no_grad()")
    if compiling:
        return
    for name, x in written.items():
        label, apart = op.label(name), watch.not_writable(x) if wanted and x.requires_grad else None
        states = {
            "made in inference mode": x.is_inference() and not torch.is_inference_mode_enabled(),
            "torch's lazy zeros": watch.is_zero(x),
            "lazily negated": x.is_neg(),
            f"{apart} that requires a gradient": apart,
        }
        for state, found in states.items():
            fail.when(found, f"{label} is {state}, which this call cannot write; pass a clone")
    for name, x in (t if fixed else op.saved(t, o) if wanted else {}).items():
        label = label_of(op, name, o)
        fail.when(x.is_inference(), f"{label} was made in inference mode, so autograd cannot keep it; pass a clone")


def check_memory(op: Any, t: Tensors, o: Options) -> None:
    """Refuse a tensor that is written and shares memory with another tensor of the call, or between its elements."""
    labels = {name: label_of(op, name, o) for name in t}
    written = {name: t[name] for name in op.written(o) if name in t}
    for name, x in written.items():
        had = f"{labels[name]} has strides {tuple(x.stride())}; its elements overlap in memory, so it cannot be written"
        Fail(op.function).when(overlaps_itself(x), f"{had}; pass a clone")
    require_apart(op.function, written, t, labels)


def label_of(op: Any, name: str, o: Options) -> str:
    """The user's name of a tensor of a call."""
    return rotate.label_of(name, o) if name in TABLE_NAMES else op.label(name)


# ---- the checks of the operations, and the rules of their stages, which follow `check` -----------------


def check_heads(q: Tensor, k: Tensor | None, o: Options, fail: Fail, first: str, second: str) -> None:
    """Check q and k. first, second: their names for messages."""
    on = f"{first} is on {q.device}"
    fail.when(q.device.type not in ("cuda", "cpu", "meta"), f"{on}; it must be on a CUDA device, the CPU or meta")
    fail.unlike(first, q, q.device, FLOATS, tuple(o.layout.upper()), like=first)
    batch, seqlen, _, head_dim = sizes_of(q, o.layout)
    if k is not None:
        shape = ["H" if axis == "h" else size for axis, size in zip(o.layout, q.shape)]
        fail.unlike(second, k, q.device, (q.dtype,), shape, like=first)
    tokens, had = batch * seqlen, f"{first} has D={head_dim}; at most {MAX_HEAD_DIM} is possible"
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
    names = ("bias", *"qkv", "q_out", "k_out", *["v_out"] * (not apart))  # v is copied after the launch
    for name in [x for x in names if x in t and PER_ITEM.get(t[x].dtype, 1) == 1]:
        x, label = t[name], f"out's {name[0]}" if name.endswith("_out") else name
        steps = [stride for size, stride in zip(x.shape[:-1], x.stride()) if size > 1]
        odd = x.stride(-1) != 1 or any(n % 2 for n in (x.shape[-1], x.storage_offset(), *steps))
        had = f"{label} has D={x.shape[-1]}, strides {tuple(x.stride())} and offset {x.storage_offset()}"
        fail.when(odd, f"{had}; fp4 needs aligned pairs of neighbouring elements")
    first, dim, of = o.rotary_offset, o.rotary_dim, 2 if o.interleaved else 4
    must = f"for fp4 the first must be even, and the second a multiple of {of}"
    fail.when(first % 2 or dim % of, f"rotary_offset is {first}, rotary_dim {dim}; {must}")


def check(op: Any, t: Tensors, o: Options) -> None:
    """Refuse tensors and options that do not fit together."""
    q, fail = t["q"], Fail(op.function, op.label("q"))
    check_heads(q, t.get("k"), o, fail, op.label("q"), op.label("k"))
    positions.check(t, o.rotary_dim // 2, o, fail)
    scale.check(t, sizes_of(q, o.layout)[1], o, fail)
    rotate.check(t, o, bool(op.source.said or op.cache), fail)


def check_scales(op: Any, t: Tensors, o: Options) -> None:
    """The rule of conversions without a cache."""
    for own in "qkv":
        _check_scale(op, t, own, own in t, o, op.convert == "given" and own != "v")


def check_kv_cache(op: Any, t: Tensors, o: Options) -> None:
    """The rule of a call that stores k and v in caches."""
    fail, k, blocks = Fail(op.function), t["k"], t.get(BLOCK_SCALES[0])
    kv: Tensors = {label: t[label] for label in ("k", "v") if label in t}
    check_heads(k, kv.get("v"), o, fail, "k", "v")
    heads, v_heads = (sizes_of(x, o.layout)[2] for x in (k, kv.get("v", k)))
    if v_heads != heads and (not heads or v_heads == 0 or v_heads % heads):
        had = f"k is {named(k, o.layout)} but v is {named(kv['v'], o.layout)}"
        fail(f"{had}; v must have as many heads, or a multiple of them")
    cache.check(kv, t, o, fail)
    pages.check(t, o, fail)
    fail.when(o.inplace and "q_scale" in t, "q is returned as fp8, which cannot be in place; leave inplace=True out")
    _check_scale(op, t, "q", True, o, False)
    for label in kv:
        scaled = t["k_cache"].dtype in FP8S if blocks is None else blocks.dtype == FP8 and f"{label}_scale" in t
        _check_scale(op, t, label, scaled, o, True)
    if o.computed and blocks is not None:
        cache.check_format(t, o, fail)


def _check_scale(op: Any, t: Tensors, own: str, wanted: bool, o: Options, needed: bool) -> None:
    """Refuse a wrong given scale of `own`, q, k or v. wanted: it may have one; needed: it then must."""
    scale, label, fail = t.get(f"{own}_scale"), op.label(f"{own}_scale"), Fail(op.function)
    if scale is None:
        return fail.when(wanted and needed, f"{label} is missing; pass it, because fp8 is stored divided by it")
    fail.when(not wanted, f"{label} is given, but no output is divided by it; leave it out")
    batch, _, heads, _ = sizes_of(t[own], o.layout)
    rows = (batch, t["cu_seqlens"].shape[0] - 1) if "cu_seqlens" in t else (batch,)
    shapes = [scale.shape] if scale.numel() == 1 else [(), (heads,), (rows, heads)]
    fail.unlike(label, scale, t["q"].device, (torch.float32,), *shapes)


def check_whole_heads(op: Any, t: Tensors, o: Options) -> None:
    """The rule of a norm, and of other stages that need all elements of a head."""
    fail, dim = Fail(op.function), t["q"].shape[-1]
    others = {"a cache": "k_cache" in t, "dynamic scales": o.computed or o.per_row}
    if norm.sums_heads(t, o):
        fail.apart("across_heads", {**others, transform.LABEL: getattr(o, transform.LABEL)})
    norm.check(t, o, fail)
    fail.apart("inverse", {"norm": o.inverse and norm.norm_of(o).kind != "no_norm"})
    fail.when(o.group and dim % o.group, f"group is {o.group}; it must divide D={dim}")
    if o.out_dtype == "fp4" or ("k_cache" in t and PER_ITEM.get(t["k_cache"].dtype, 1) > 1):
        check_pairs(t, o, fail)
    transform.check(t, o, fail)


def check_results(op: Any, t: Tensors, o: Options) -> None:
    """Refuse heads that ranks do not divide, and output tensors of the caller with another shape or dtype."""
    fail, q = Fail(op.function), t["q"]
    for letter in [x for x in "qkv" if x in t and (o.ulysses_degree or (op.out and f"{x}_out" in t))]:
        x, out, word = t[letter], t.get(f"{letter}_out"), op.format_of(letter, t, o)
        fail.unlike(letter, x, q.device, (x.dtype,), tuple(o.layout.upper()))
        ranks = o.ulysses_degree if out is None else len(out) if out.dim() == x.dim() + 1 else 0
        if ranks and x.shape[LAYOUT_AXES[o.layout][2]] % ranks:
            fail(f"{letter} is {named(x, o.layout)}; for {ranks} ranks it needs a multiple of {ranks} heads")
        if out is None:
            continue
        *shape, dim = (views.by_rank(x, o.layout, ranks) if ranks else x).shape
        dtype, _, per_item = FORMATS[word] if word else (x.dtype, 0, 1)
        fail.unlike(f"out's {letter}", out, q.device, (dtype,), (*shape, dim // per_item))
        if per_item > 1 and out.stride(-1) != 1:
            fail(f"out's {letter} has strides {tuple(out.stride())}; for fp4 the last must be 1")
