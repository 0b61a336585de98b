"""What the user's functions refuse, each in words: the argument, what was given and what is allowed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..base.arguments import flag, number, refuse, whole, wholes, word
from ..base.errors import InvalidInput
from ..base.spec import DTYPES, MAX_AXES
from ..plan.problem import DTYPE_NAMES, overlaps_itself, refuse_meeting
from ..plan.spec import (
    LAUNCHES,
    LAYOUT_AXES,
    MAX_HEAD_DIM,
    NORM_ROUNDINGS,
    ROUNDINGS,
    TABLES,
    Norm,
    Options,
    changed,
)
from ..plan.views import FP8, Tensors, table_pair
from .reference import table_rows

ONE_TABLE = TABLES[1:]
"""Words for one table in place of cos and sin."""

_MAX_TOKENS = 2**31 - 1  # CUDA's limit on the first grid axis


_WORDS = {"layout": tuple(LAYOUT_AXES), "rounding": ROUNDINGS, "launch": ("auto", *LAUNCHES)}
_TABLE_LABELS = ("cos", "sin", "cu_seqlens", "start_positions", "position_ids")


# ---- arguments of any type -------------------------------------------------------------------------


def canonical(tensors: Tensors) -> Tensors:
    """A call's tensors, with one table in place of cos and sin called cos, its axes in their order."""
    full = {"cos" if name in ONE_TABLE else name: x for name, x in tensors.items()}
    if "freqs" in tensors and full["cos"].dim() == 4:  # (P, B, 1, W)
        full["cos"] = full["cos"].transpose(0, 1)
    return full


def resolved(op: Any, tensors: Mapping[str, Any], asked: Mapping[str, Any], name: str = "") -> tuple[Options, Tensors]:
    """The options of a call, each of its type, with defaults filled in; and its tensors, by their names in the kernel.

    The tensors are checked first. The head size is that of the first one.

    Raises:
        TypeError: a word that the function does not have.
    """
    inplace = asked.get("inplace", False)
    name = name or op.function + "_" * (inplace is True)
    for word_ in (*asked, *[label for label in tensors if label not in op.names]):
        if word_ not in op.words and word_ not in op.tables:
            raise TypeError(f"{name}() got an unexpected keyword argument {word_!r}")
    kinds = [kind for kind in ONE_TABLE if kind in tensors]
    pair = "cos" in tensors or "sin" in tensors
    if len(kinds) + pair != 1 - op.norm * (not kinds and not pair) or ("cos" in tensors) != ("sin" in tensors):
        had = ", ".join([*(["cos and sin"] if {"cos", "sin"} <= tensors.keys() else []), *kinds])
        had = had or next((word_ for word_ in ("cos", "sin") if word_ in tensors), "none")
        raise InvalidInput(f"{name}: give cos and sin, or one of cos_sin_cache, freqs and freqs_cis, not {had}")
    needed = {*[label for label in op.tensors if not label.endswith("?")], "cos", "sin", *ONE_TABLE}
    for label in op.tensors:
        if not label.endswith("?") and label not in tensors:
            refuse(name, op.labels.get(label, label), None, "a tensor")
    for label, x in tensors.items():
        if not isinstance(x, Tensor) or x.layout is not torch.strided or x.is_nested:
            tensor = "a strided tensor" if isinstance(x, Tensor) else "a tensor"
            shown = (kinds or ["cos"])[0] if label == "cos2" else op.labels.get(label, label)
            refuse(name, shown, x, tensor if label in needed else f"{tensor} or None")
    full = canonical(dict(tensors))
    first = next(iter(full.values()))
    cos = full.get("cos")
    widths = first.shape[-1] if first.dim() else 0, cos.shape[-1] if cos is not None and cos.dim() else 0
    kind = kinds[0] if kinds else "cos_sin"
    words = tuple([item for item in asked.items() if item[0] != "check"])
    try:
        known = not (torch.compiler.is_compiling() or torch.jit.is_tracing())  # type: ignore[attr-defined]
        options = (_kept if known else _resolved)(op, name, kind, words, *widths)
    except TypeError:  # a word without a hash
        options = _resolved(op, name, kind, words, *widths)
    return options, full if cos is not None else op.unrotated(name, full, options)


def _resolved(
    op: Any, name: str, kind: str, words: tuple[tuple[str, Any], ...], width: int, table_width: int
) -> Options:
    values = {word_: _typed(name, word_, value) for word_, value in words if word_ not in _NORM_WORDS}
    if op.norm:
        values["norm"] = _norm(name, dict(words))
    o = Options(**{"rotary_dim": None, "interleaved_out": None, "table": kind, **values})
    if o.rotary_dim is None:  # from the width of cos_sin_cache or freqs_cis, if one is given, else from the head
        head_dim = width // (o.q_per_group + 2) if o.q_per_group > 0 else width
        twice = {"cos_sin_cache": 1, "freqs_cis": 2}.get(o.table)
        rotary_dim = twice * table_width if twice else head_dim - o.rotary_offset
        if op.norm and not table_width:  # nothing is rotated
            rotary_dim -= rotary_dim % 2
        o = changed(o, rotary_dim=rotary_dim)
        if twice and (o.rotary_dim < 2 or o.rotary_dim % 2):
            width_words = "rotary_dim (even)" if twice == 1 else "rotary_dim / 2"
            raise InvalidInput(f"{name}: {o.table} is {table_width} wide; it must be (P, W) with W = {width_words}")
    interleaved_out = o.interleaved if o.interleaved_out is None else o.interleaved_out
    return changed(o, interleaved_out=interleaved_out, max_seqlen=o.max_seqlen or 0)


_kept = lru_cache(maxsize=4096)(_resolved)


def _typed(name: str, label: str, value: Any) -> Any:
    default = Options._field_defaults[label]
    if value is None and label in ("interleaved_out", "rotary_dim", "max_seqlen"):
        return None
    if label in _WORDS:
        return word(name, label, value, _WORDS[label])
    if label == "mrope_section":
        return wholes(name, label, value, 0)
    kinds: dict[type, Callable[..., Any]] = {bool: flag, int: whole, float: number}
    return kinds[type(default)](name, label, value)


_NORM_WORDS = ("norm_rounding", "across_heads", "zero_centered", "eps")


def _norm(name: str, words: dict[str, Any]) -> Norm:
    rounding = word(name, "norm_rounding", words.get("norm_rounding", "none"), NORM_ROUNDINGS)
    across, centered = (flag(name, x, words.get(x, False)) for x in ("across_heads", "zero_centered"))
    return Norm(rounding, across, centered, number(name, "eps", words.get("eps", Norm().eps)))


def check_asked(name: str, asked: Mapping[str, Any]) -> bool:
    """Whether a call has `check=True`: the positions are looked at, which waits for the device."""
    return flag(name, "check", asked.get("check", False))


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
                    f"{name}: {label} requires a gradient and is {kind}, which torch cannot write in place; "
                    f"call {name.removesuffix('_')}"
                )


def check_watched(op: Any, wants_grad: bool, tensors: Tensors, options: Options) -> None:
    """Refuse what torch does not let a call write, and what autograd cannot keep for a backward."""
    name = op.label(options)
    if wants_grad and options.inplace and op.norm:
        raise InvalidInput(f"{name}: it has no gradient, which would need q and k as they were; call {op.function}")
    if torch.compiler.is_compiling():
        return
    written = {label: tensors[label] for label in op.written(options) if label in tensors}
    if written:
        check_written(name, wants_grad, **written)
    if wants_grad and op.differentiable:
        _refuse_transforms(name)
        saved = op.saved(tensors)
        for label in ("cos", "sin", "cos2", "sin2"):
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
    require = _requirer(name)
    require(groups > 0, lambda: f"q_per_group is {groups!r}; it must be at least 1")
    require(
        options.layout in ("bshd", "sbhd", "thd"), lambda: f"layout is {options.layout!r}; allowed are bshd, sbhd, thd"
    )
    rank = 3 if options.layout == "thd" else 4
    require(qkv.dim() == rank, lambda: f"qkv has shape {tuple(qkv.shape)}, layout {options.layout!r} needs {rank} axes")
    require(
        width > 0 and width % (groups + 2) == 0,
        lambda: f"qkv is {width} wide, which q_per_group + 2 = {groups + 2} does not divide",
    )
    label = "cos" if options.table == "cos_sin" else options.table
    require(
        cos.dim() != 4 or cos.shape[2] == 1,
        lambda: f"{label} has shape {tuple(cos.shape)}; with packed QKV the heads must share it: (P, W) or (B, P, W)",
    )
    if options.inplace:
        _require_no_overlap("qkv", qkv, require)
    packed = qkv.unflatten(-1, (groups + 2, -1))
    # A group's k stands for all heads: what remains to be checked does not depend on their number.
    heads = {"q": packed[..., -2, :], "k": packed[..., -2, :]}
    check(name, {**heads, **_tables(tensors)}, changed(options, inplace=False), "qkv")


def check_fp8(name: str, tensors: Tensors, options: Options) -> None:
    """Refuse what does not fit of a call with fp8 outputs; see `check`."""
    require = _requirer(name)
    check(name, tensors, options)
    q = tensors["q"]
    _refuse_gradients(require, tensors, "q", "k")
    _check_scale("q_scale", tensors.get("q_scale"), q, True, require)
    _check_scale("k_scale", tensors.get("k_scale"), q, "k" in tensors, require)


def check_kv_cache(name: str, tensors: Tensors, options: Options) -> None:
    """Refuse what does not fit of a call that stores k and v; see `check`."""
    require = _requirer(name)
    q, k, v, k_cache, v_cache, slot_mapping = (
        tensors[label] for label in ("q", "k", "v", "k_cache", "v_cache", "slot_mapping")
    )
    cos = tensors["cos"]
    read_only = changed(options, inplace=False)
    check(name, tensors, read_only)
    _check_heads(k, v, read_only, require, "k", "v")
    if options.inplace:
        _require_no_overlap("q", q, require)
    _refuse_gradients(require, tensors, "q", "k", "v", "k_cache", "v_cache")
    require("cu_seqlens" not in tensors, "cu_seqlens does not go with a cache; position_ids say where each token is")
    require(cos.dim() != 4 or cos.shape[2] == 1, "tables for each head do not go with a cache")
    require(
        v.shape == k.shape,
        lambda: f"k is {_named(k, options.layout)} but v is {_named(v, options.layout)}; they must match",
    )
    if options.rotate_k:
        _require_no_overlap("k", k, require)
    batch, seqlen, heads, head_dim = _axes(k, options.layout)
    for label, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        require(
            cache.dim() in (3, 4) and tuple(cache.shape[-2:]) == (heads, head_dim),
            lambda: (
                f"k is {_named(k, options.layout)} but {label} has shape {tuple(cache.shape)}; it is (slots, H, D) or "
                "(pages, rows, H, D)"
            ),
        )
        require(cache.device == q.device, lambda: f"{label} is on {cache.device} but q is on {q.device}")
        require(cache.dtype in (k.dtype, FP8), lambda: f"{label} is {cache.dtype}; allowed are k's {k.dtype} and {FP8}")
        _require_no_overlap(label, cache, require)
    written, read = {"k_cache": k_cache, "v_cache": v_cache}, {"v": v}
    (written if options.inplace else read)["q"] = q
    (written if options.rotate_k else read)["k"] = k
    _require_apart(name, written, read)
    same = k_cache.shape == v_cache.shape and k_cache.dtype == v_cache.dtype
    require(
        same,
        lambda: (
            f"k_cache is {tuple(k_cache.shape)} {k_cache.dtype} but v_cache is {tuple(v_cache.shape)} {v_cache.dtype}; "
            "they must match"
        ),
    )
    paged = [c.dim() == 4 and c.stride(0) != c.shape[1] * c.stride(1) for c in (k_cache, v_cache)]
    require(
        paged[0] == paged[1], "k_cache and v_cache have their pages in different orders; give both the same strides"
    )
    slots = k_cache.shape[0] * (k_cache.shape[1] if k_cache.dim() == 4 else 1)
    require(slots <= _MAX_TOKENS, lambda: f"the caches have {slots} slots, at most {_MAX_TOKENS} are possible")
    _check_integers("slot_mapping", slot_mapping, q, require)
    require(
        slot_mapping.is_contiguous(), lambda: f"slot_mapping has strides {slot_mapping.stride()}; it must be contiguous"
    )
    require(
        slot_mapping.numel() == batch * seqlen,
        lambda: f"slot_mapping has shape {tuple(slot_mapping.shape)} for {batch * seqlen} tokens",
    )
    scaled = k_cache.dtype == FP8
    for label, wanted in (("q_scale", "q_scale" in tensors), ("k_scale", scaled), ("v_scale", scaled)):
        _check_scale(label, tensors.get(label), q, wanted, require)


def check_norm(name: str, tensors: Tensors, options: Options) -> None:
    """Refuse what does not fit of a call that normalises too; see `check`."""
    require = _requirer(name)
    check(name, tensors, options)
    norm = options.norm or Norm()
    q, q_weight, k_weight = tensors["q"], tensors.get("q_weight"), tensors.get("k_weight")
    require("cu_seqlens" not in tensors, "cu_seqlens does not go with a norm; position_ids say where each token is")
    require("k" in tensors or k_weight is None, "k_weight is given, but k is not")
    for label, weight in (("q", q_weight), ("k", k_weight)):
        x = tensors.get(label)
        if x is None or weight is None:
            continue
        _, _, heads, size = _axes(x, options.layout)
        size, letters = (heads * size, "H D") if norm.across_heads else (size, "D")
        require(
            weight.dim() == 1 and weight.shape[0] == size,
            lambda: (
                f"{label} is {_named(x, options.layout)} but {label}_weight has shape {tuple(weight.shape)}; it is "
                f"({letters}), {size} numbers" + ("" if norm.across_heads else ", or H D with across_heads")
            ),
        )
        require(_is_float(weight), lambda: f"{label}_weight is {weight.dtype}; allowed are fp32, fp16 and bf16")
        require(weight.is_contiguous(), lambda: f"{label}_weight has stride {weight.stride()}; it must be contiguous")
        require(weight.device == q.device, lambda: f"{label}_weight is on {weight.device} but q is on {q.device}")
    if q_weight is not None and k_weight is not None:
        require(
            q_weight.dtype == k_weight.dtype,
            lambda: f"q_weight is {q_weight.dtype} but k_weight is {k_weight.dtype}; they must match",
        )


def check_norm_joint(name: str, tensors: Tensors, options: Options) -> None:
    """Refuse what does not fit of a call with two streams; see `check_norm`."""
    require = _requirer(name)
    norm = options.norm or Norm()
    streams = [tensors[letter + n] for n in "12" for letter in "qkv"]
    labels = [f"{stream}'s {letter}" for stream in ("first", "second") for letter in "qkv"]
    for label, x in zip(labels, streams):
        require(isinstance(x, Tensor) and x.dim() == 4, lambda: f"{label} is not a tensor (B, S, H, D)")
    for label, x in zip(labels, streams):
        like = streams[0 if label.startswith("first") else 3]
        same = x.shape[:2] == like.shape[:2] and x.shape[-1] == like.shape[-1]
        require(
            same and x.dtype == streams[0].dtype and x.device == streams[0].device,
            lambda: (
                f"{label} is {_named(x, 'bshd')} {x.dtype} on {x.device}; q is {_named(like, 'bshd')} "
                f"{streams[0].dtype} on {streams[0].device}"
            ),
        )
    for n, letter in enumerate("qkv"):
        a, b = streams[n], streams[n + 3]
        require(
            a.shape[0] == b.shape[0] and a.shape[2:] == b.shape[2:],
            lambda: f"first's {letter} is {_named(a, 'bshd')}, second's {_named(b, 'bshd')}; only S may differ",
        )
    require(streams[1].shape == streams[2].shape, "v has another number of heads than k")
    given = {x.dtype for label, x in tensors.items() if "weight" in label}
    require(len(given) < 2, lambda: f"the weights are {', '.join(sorted(map(str, given)))}; they must match")
    two_tables = "cos2" in tensors
    for stream, weight in (("1", ""), ("2", "2")):
        of_table = "2" if stream == "2" and two_tables else ""
        own = {"q": "q" + stream, "k": "k" + stream, "q_weight": "q_weight" + weight, "k_weight": "k_weight" + weight}
        own |= {"cos": "cos" + of_table, "sin": "sin" + of_table}
        check_norm(name, {label: tensors[x] for label, x in own.items() if x in tensors}, options)
    cos, other = tensors["cos"], tensors.get("cos2", tensors["cos"])
    require(cos.dtype == other.dtype, lambda: f"the first table is {cos.dtype} but the second {other.dtype}")
    require(
        cos.shape[-1] == other.shape[-1],
        lambda: f"the first table is {cos.shape[-1]} wide but the second {other.shape[-1]}",
    )
    rows = cos.shape[0] if cos.dim() == 2 else cos.shape[1]
    tokens = streams[0].shape[1] + streams[3].shape[1]
    require(
        two_tables or rows >= tokens,
        lambda: f"the streams have {tokens} tokens but the table has {rows} rows",
    )
    require(not norm.across_heads, "across_heads does not go with two streams")
    for table in (cos, other):
        require(table.dim() != 4 or table.shape[2] == 1, "tables for each head do not go with two streams")


def _tables(tensors: Tensors) -> Tensors:
    return {label: tensors[label] for label in _TABLE_LABELS if label in tensors}


def _check_scale(label: str, scale: Tensor | None, q: Tensor, wanted: bool, require: Require) -> None:
    if scale is None or not wanted:
        require(scale is None, lambda: f"{label} is given, but what it scales is not stored as fp8")
        require(not wanted, lambda: f"{label} is missing; fp8 is stored divided by it")
        return
    fits = scale.dtype == torch.float32 and scale.numel() == 1 and scale.device == q.device
    require(
        fits,
        lambda: f"{label} is {tuple(scale.shape)} {scale.dtype} on {scale.device}; it is one fp32 number on q's device",
    )


def _refuse_gradients(require: Require, tensors: Tensors, *labels: str) -> None:
    for label in labels:
        x = tensors.get(label)
        require(
            x is None or not (x.requires_grad and torch.is_grad_enabled()),
            lambda: f"{label} requires a gradient, but this call has none; use apply_rope, or torch.no_grad()",
        )


def check_positions(name: str, tensors: Tensors, options: Options) -> None:
    """Refuse positions outside of the table, and slots outside of a cache. Waits for the device."""
    q, cos = next(iter(tensors.values())), tensors["cos"]
    given = [tensors.get(label) for label in _TABLE_LABELS[2:]]
    cu_seqlens, start_positions, position_ids = [getattr(x, "full_tensor", lambda x=x: x)() for x in given]
    _, seqlen, _, _ = _axes(q, options.layout)
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
    require = _requirer(name)
    forward_mode = forward_ad._current_level >= 0 and any(
        x is not None and forward_ad.unpack_dual(x).tangent is not None for x in (q, k, cos, sin)
    )
    require(not forward_mode, "forward-mode derivatives (jvp) are not supported; use the backward")
    for table, x in _tables(tensors).items():
        table = options.table if table == "cos" and sin is None else table
        require(x.device == q.device, lambda: f"{table} is on {x.device} but {label} is on {q.device}")
    _check_heads(q, k, options, require, label, "k" if label == "q" else label)
    if options.inplace and k is not None:
        _require_apart(name, {"q": q, "k": k}, {})
    _check_lengths(q, cu_seqlens, start_positions, options, require)
    _check_position_ids(q, tensors, options, require)
    _check_tables(q, k, cos, sin, cu_seqlens is not None, "position_ids" in tensors, options, require)


Require = Callable[[bool, "str | Callable[[], str]"], None]


def _requirer(name: str) -> Require:
    """A message with numbers is made only where it is needed: traced, it would fix what is symbolic there."""

    def require(condition: bool, message: str | Callable[[], str]) -> None:
        if not condition:
            raise InvalidInput(f"{name}: {message if isinstance(message, str) else message()}")

    return require


def _check_heads(q: Tensor, k: Tensor | None, options: Options, require: Require, first: str, second: str) -> None:
    rank = 3 if options.layout == "thd" else 4
    letters = options.layout.upper()
    for label, x in ((first, q), (second, k)):
        if x is None:
            continue
        require(
            x.dim() == rank,
            lambda: (
                f"{label} has shape {tuple(x.shape)}, layout {options.layout!r} needs {rank} axes "
                f"({', '.join(letters)})"
            ),
        )
        require(_is_float(x), lambda: f"{label} is {x.dtype}; allowed are fp32, fp16 and bf16")
        same = x.device == q.device and x.dtype == q.dtype
        require(same, lambda: f"{label} is {x.dtype} on {x.device} but {first} is {q.dtype} on {q.device}")
        if options.inplace:
            _require_no_overlap(label, x, require)
    known = q.device.type in ("cuda", "cpu", "meta")
    require(known, lambda: f"{first} is on {q.device}; it must be on a CUDA device, the CPU or meta")
    batch, seqlen, _, head_dim = _axes(q, options.layout)
    if k is not None:
        k_batch, k_seqlen, _, k_head_dim = _axes(k, options.layout)
        require(
            (k_batch, k_seqlen, k_head_dim) == (batch, seqlen, head_dim),
            lambda: (
                f"{first} is {_named(q, options.layout)} but {second} is {_named(k, options.layout)}; only H may differ"
            ),
        )
    require(
        batch * seqlen <= _MAX_TOKENS,
        lambda: f"{first} has {batch * seqlen} tokens, at most {_MAX_TOKENS} are possible",
    )
    require(head_dim <= MAX_HEAD_DIM, lambda: f"{first} has D={head_dim}, at most {MAX_HEAD_DIM} is possible")
    rotary, offset = options.rotary_dim, options.rotary_offset
    require(offset >= 0, lambda: f"rotary_offset is {offset}; it cannot be negative")
    require(
        rotary % 2 == 0 and 0 < rotary <= head_dim - offset,
        lambda: (
            f"rotary_dim is {rotary}; it must be even and from 2 to D"
            + (f" - rotary_offset={head_dim - offset}" if offset else f"={head_dim}")
        ),
    )


def _require_no_overlap(label: str, x: Tensor, require: Require) -> None:
    """For a tensor that is written. A compiler's symbolic strides are only asked for expanded axes."""
    if torch.compiler.is_compiling():
        overlaps = not all(stride or size < 2 for size, stride in zip(x.shape, x.stride()))
    else:
        overlaps = overlaps_itself(x)
    require(
        not overlaps,
        lambda: (
            f"{label} has strides {tuple(x.stride())}, with which its elements overlap in memory; in place they must "
            f"not: pass {label}.contiguous(), or call the function that returns fresh tensors"
        ),
    )


def _require_apart(name: str, written: dict[str, Tensor], read: dict[str, Tensor]) -> None:
    """Refuse memory that a call would write and also read or write as another tensor, where there is memory."""
    tensors = {**written, **read}
    real = all(type(x) in (Tensor, torch.nn.Parameter) and x.device.type != "meta" for x in tensors.values())
    if real and not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is None:
        refuse_meeting(name, tensors, tuple(written))


def _check_lengths(
    q: Tensor, cu_seqlens: Tensor | None, start_positions: Tensor | None, options: Options, require: Require
) -> None:
    batch, seqlen, *_ = _axes(q, options.layout)
    size, rank = options.cp_size, options.cp_rank
    require(size >= 1, lambda: f"cp_size is {size}; it must be at least 1")
    require(0 <= rank < size, lambda: f"cp_rank is {rank}; it must be from 0 to cp_size - 1 = {size - 1}")
    for label, x in (("cu_seqlens", cu_seqlens), ("start_positions", start_positions)):
        if x is None:
            continue
        _check_integers(label, x, q, require)
        require(x.dim() == 1, lambda: f"{label} has shape {tuple(x.shape)}; it is one axis")
        require(x.is_contiguous(), lambda: f"{label} has stride {x.stride()}; it must be contiguous")
    if cu_seqlens is None:
        require(options.max_seqlen == 0, "max_seqlen goes with cu_seqlens, which is not given")
        require(not options.packed_table, "packed_table goes with cu_seqlens, which is not given")
        require(
            size == 1 or seqlen % 2 == 0,
            lambda: f"q is {_named(q, options.layout)}: under context parallelism a rank has two equal chunks",
        )
        rows = batch
    else:
        require(options.layout == "thd", lambda: f"cu_seqlens goes with layout 'thd', not {options.layout!r}")
        require(options.max_seqlen >= 0, lambda: f"max_seqlen is {options.max_seqlen}; it cannot be negative")
        require(len(cu_seqlens) >= 1, "cu_seqlens is empty; it has N + 1 offsets")
        rows = len(cu_seqlens) - 1
    require(
        start_positions is None or len(start_positions) == rows,
        lambda: (
            f"start_positions has {0 if start_positions is None else len(start_positions)} entries for {rows} "
            + ("batch rows" if cu_seqlens is None else "sequences")
        ),
    )


def _check_integers(label: str, x: Tensor, q: Tensor, require: Require) -> None:
    require(x.dtype in (torch.int32, torch.int64), lambda: f"{label} is {x.dtype}; allowed are int32 and int64")
    require(x.device == q.device, lambda: f"{label} is on {x.device} but q is on {q.device}")


def _check_position_ids(q: Tensor, tensors: Tensors, options: Options, require: Require) -> None:
    ids, sections = tensors.get("position_ids"), options.mrope_section
    if ids is None:
        require(not sections, "mrope_section goes with position_ids, which is not given")
        return
    _check_integers("position_ids", ids, q, require)
    pairs = options.rotary_dim // 2
    require(
        not sections or (len(sections) <= MAX_AXES and sum(sections) == pairs),
        lambda: f"mrope_section is {tuple(sections)}; it must be at most {MAX_AXES} numbers of pairs, {pairs} in all",
    )
    batch, seqlen, *_ = _axes(q, options.layout)
    axes = (len(sections),) if sections else ()
    allowed = (
        [(*axes, seqlen)] if options.layout == "thd" else [(*axes, seqlen), (*axes, 1, seqlen), (*axes, batch, seqlen)]
    )
    require(
        any(len(ids.shape) == len(shape) and all(a == b for a, b in zip(ids.shape, shape)) for shape in allowed),
        lambda: (
            f"q is {_named(q, options.layout)} but position_ids has shape {tuple(ids.shape)}; allowed are "
            + ", ".join(dict.fromkeys(map(str, allowed)))
        ),
    )
    with_others = "cu_seqlens" in tensors or "start_positions" in tensors or options.cp_size > 1
    require(
        not with_others, "position_ids go without cu_seqlens, start_positions and cp_size: they say all that those do"
    )
    if not sections:
        require(not options.mrope_interleaved, "mrope_interleaved goes with mrope_section, which is not given")


def _check_tables(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor | None,
    packed: bool,
    ids: bool,
    options: Options,
    require: Require,
) -> None:
    batch, seqlen, heads, head_dim = _axes(q, options.layout)
    rotary, kind = options.rotary_dim, options.table
    angles = kind == "freqs"
    in_fp64 = options.rounding == "complex128"
    first, both = ("cos", "cos and sin are") if kind == "cos_sin" else (kind, f"{kind} is")
    if kind == "freqs_cis":
        allowed = torch.complex128 if cos.dtype == torch.complex128 and in_fp64 else torch.complex64
        require(
            cos.dtype == allowed,
            lambda: f"freqs_cis is {cos.dtype}; it is complex64, or complex128 with rounding='complex128'",
        )
    if kind == "cos_sin_cache":
        require(cos.dim() == 2, lambda: f"cos_sin_cache has shape {tuple(cos.shape)}; it is (P, rotary_dim)")
        require(
            cos.shape[-1] == rotary, lambda: f"cos_sin_cache is {cos.shape[-1]} wide, rotary_dim is {rotary}: cos | sin"
        )
    cos, sin = table_pair(cos, sin, kind)
    for label, table in (("cos", cos), ("sin", sin)) if kind == "cos_sin" else ((kind, cos),):
        shape = tuple(table.shape)
        axes = "(P, 1 or B, 1, W)" if angles else "(B, P, H, W)"
        require(2 <= table.dim() <= 4, lambda: f"{label} has shape {shape}; it must be (P, W), (B, P, W) or {axes}")
        if angles:
            require(
                table.dtype == torch.float32, lambda: f"freqs is {table.dtype}; angles are fp32, or positions are lost"
            )
        fits = _is_float(table) or (in_fp64 and table.dtype == torch.float64)
        require(
            fits,
            lambda: f"{label} is {table.dtype}; allowed are fp32, fp16, bf16, and fp64 with rounding='complex128'",
        )
        require(
            not (table.requires_grad and torch.is_grad_enabled()),
            lambda: f"{label} requires a gradient, which jitrope does not compute; pass {label}.detach()",
        )
    require(
        cos.shape == sin.shape and cos.dtype == sin.dtype,
        lambda: f"cos is {tuple(cos.shape)} {cos.dtype} but sin is {tuple(sin.shape)} {sin.dtype}; they must match",
    )
    width = cos.shape[-1]
    require(
        width == rotary // 2 or width == rotary,  # not `in`, which is False of symbolic sizes
        lambda: (
            f"{both} {width} wide; with rotary_dim {rotary} (D={head_dim}) they are {rotary // 2} (half width) or "
            f"{rotary} (full width); pass rotary_dim for a partial rotation"
        ),
    )
    require(
        not in_fp64 or not (angles or packed),
        "rounding='complex128' does not go with freqs or cu_seqlens; take cos and sin, and position_ids",
    )
    require(angles or options.mscale == 1, "mscale goes with freqs; multiply cos and sin by it instead")
    mixed = options.interleaved != options.interleaved_out
    require(not mixed or width != rotary, lambda: f"interleaved_out goes with half-width tables, {rotary // 2} wide")
    rows = cos.shape[0] if cos.dim() == 2 else cos.shape[1]
    needed = options.max_seqlen if packed else 0 if ids else seqlen * options.cp_size
    require(
        options.packed_table or rows >= needed,
        lambda: f"q is {_named(q, options.layout)} but {first} has {rows} rows; {needed} positions are used",
    )
    require(rows > 0 or seqlen == 0, lambda: f"{first} has no rows")
    if cos.dim() > 2:
        rows = cos.shape[0]
        require(
            rows == 1 or rows == batch,
            lambda: f"q is {_named(q, options.layout)} but {first} has {rows} batch rows; allowed are 1 and B={batch}",
        )
    if cos.dim() == 4 and cos.shape[2] != 1:
        require(not angles, lambda: f"freqs has angles for {cos.shape[2]} heads; they are shared, or use cos and sin")
        same = k is None or _axes(k, options.layout)[2] == heads
        require(
            cos.shape[2] == heads and same,
            lambda: (
                f"q is {_named(q, options.layout)} but cos has angles for {cos.shape[2]} heads; they go with as many "
                "heads in q and in k"
            ),
        )


def _is_float(x: Tensor) -> bool:
    return DTYPE_NAMES.get(x.dtype) in DTYPES


def _axes(x: Tensor, layout: str) -> list[int]:
    """The sizes (B, S, H, D) of a tensor in `layout`."""
    return [1 if axis is None else x.shape[axis] for axis in LAYOUT_AXES[layout]]


def _named(x: Tensor, layout: str) -> str:
    """A shape by its letters: `(B=2, S=128, H=32, D=64)`."""
    return "(" + ", ".join(f"{letter.upper()}={size}" for letter, size in zip(layout, x.shape)) + ")"
