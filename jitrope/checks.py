"""What the user's functions refuse, each in words: the argument, what was given and what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .errors import InvalidInput
from .problem import DTYPE_NAMES
from .reference import FP8, Tables, table_pair, table_rows
from .spec import DTYPES, LAUNCHES, LAYOUT_AXES, MAX_AXES, MAX_HEAD_DIM, NORM_ROUNDINGS, ROUNDINGS, Norm, Options

_MAX_TOKENS = 2**31 - 1  # CUDA's limit on the first grid axis


def check_qkv(qkv: Tensor, tables: Tables, values: tuple[Any, ...]) -> None:
    """Refuse what does not fit of a packed call."""
    cos = tables[0]
    options = Options(*values)
    name = "apply_rope_qkv_" if options.in_place else "apply_rope_qkv"
    groups, width = options.q_per_group, qkv.shape[-1]
    require = _requirer(name)
    require(isinstance(groups, int) and groups > 0, lambda: f"q_per_group is {groups!r}; it is at least 1")
    require(
        options.layout in ("bshd", "sbhd", "thd"), lambda: f"layout is {options.layout!r}; allowed are bshd, sbhd, thd"
    )
    rank = 3 if options.layout == "thd" else 4
    require(qkv.dim() == rank, lambda: f"qkv has shape {tuple(qkv.shape)}, layout {options.layout!r} needs {rank} axes")
    require(
        width % (groups + 2) == 0, lambda: f"qkv is {width} wide, which q_per_group + 2 = {groups + 2} does not divide"
    )
    require(cos.dim() != 4 or cos.shape[2] == 1, "tables for each head do not go with packed QKV")
    if options.in_place:
        _require_no_overlap("qkv", qkv, require)
    packed = qkv.unflatten(-1, (groups + 2, -1))
    # A group's k stands for all heads: what remains to be checked does not depend on their number.
    check(packed[..., -2, :], packed[..., -2, :], tables, values, name)


def check_fp8(
    q: Tensor, k: Tensor | None, q_scale: Tensor, k_scale: Tensor | None, tables: Tables, values: tuple[Any, ...]
) -> None:
    """Refuse what does not fit of a call with fp8 outputs."""
    name = "apply_rope_fp8"
    require = _requirer(name)
    check(q, k, tables, values, name)
    _refuse_gradients(require, q=q, k=k)
    _check_scale("q_scale", q_scale, q, True, require)
    _check_scale("k_scale", k_scale, q, k is not None, require)


def check_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    tables: Tables,
    values: tuple[Any, ...],
) -> None:
    """Refuse what does not fit of a call that stores k and v."""
    options = Options(*values)
    name = "apply_rope_kv_cache_" if options.in_place else "apply_rope_kv_cache"
    require = _requirer(name)
    for label, x in (("k", k), ("v", v), ("k_cache", k_cache), ("v_cache", v_cache), ("slot_mapping", slot_mapping)):
        require(isinstance(x, Tensor), lambda: f"{label} is {type(x).__name__}; it is a tensor")
    check(q, k, tables, values, name)
    check(v, k, tables, values, name)
    _refuse_gradients(require, q=q, k=k, v=v, k_cache=k_cache, v_cache=v_cache)
    require(tables[2] is None, "cu_seqlens does not go with a cache; position_ids say where each token is")
    require(tables[0].dim() != 4 or tables[0].shape[2] == 1, "tables for each head do not go with a cache")
    require(
        v.shape == k.shape,
        lambda: f"k is {_named(k, options.layout)} but v is {_named(v, options.layout)}; they must match",
    )
    if options.k_too:
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
    same = k_cache.shape == v_cache.shape and k_cache.dtype == v_cache.dtype
    require(
        same,
        lambda: f"k_cache is {tuple(k_cache.shape)} {k_cache.dtype}, v_cache {tuple(v_cache.shape)} {v_cache.dtype}",
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
    for label, scale, wanted in (
        ("q_scale", q_scale, options.fp8), ("k_scale", k_scale, scaled), ("v_scale", v_scale, scaled),
    ):  # fmt: skip
        _check_scale(label, scale, q, wanted, require)


def check_norm(
    q: Tensor, k: Tensor | None, q_weight: Tensor | None, k_weight: Tensor | None, tables: Tables,
    values: tuple[Any, ...], norm: Norm, name: str = "",
) -> None:  # fmt: skip
    """Refuse what does not fit of a call that normalises too."""
    options = Options(*values)
    name = name or ("qk_norm_rope_" if options.in_place else "qk_norm_rope")
    require = _requirer(name)
    check(q, k, tables, values, name)
    require(
        norm.rounding in NORM_ROUNDINGS,
        lambda: f"norm_rounding is {norm.rounding!r}; allowed are {', '.join(NORM_ROUNDINGS)}",
    )
    require(tables[2] is None, "cu_seqlens does not go with a norm; position_ids say where each token is")
    require(k is not None or k_weight is None, "k_weight is given, but k is not")
    for label, x, weight in (("q", q, q_weight), ("k", k, k_weight)):
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


def check_norm_joint(*arguments: Any) -> None:
    """Refuse what does not fit of a call with two streams."""
    name = "qk_norm_rope_joint"
    require = _requirer(name)
    *tensors, tables, values, norm = arguments
    streams, weights, second_tables = tensors[:6], tensors[6:10], tensors[10:]
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
    given = {w.dtype for w in weights if w is not None}
    require(len(given) < 2, lambda: f"the weights are {', '.join(sorted(map(str, given)))}; they must match")
    of_second = tables if second_tables[0] is None else (*second_tables, None, None, None)
    for n, own in enumerate((tables, of_second)):
        check_norm(streams[3 * n], streams[3 * n + 1], weights[2 * n], weights[2 * n + 1], own, values, norm, name)
    cos, other = tables[0], of_second[0]
    require(cos.dtype == other.dtype, lambda: f"the first table is {cos.dtype} but the second {other.dtype}")
    require(
        cos.shape[-1] == other.shape[-1],
        lambda: f"the first table is {cos.shape[-1]} wide but the second {other.shape[-1]}",
    )
    rows = cos.shape[0] if cos.dim() == 2 else cos.shape[1]
    tokens = streams[0].shape[1] + streams[3].shape[1]
    require(
        second_tables[0] is not None or rows >= tokens,
        lambda: f"the streams have {tokens} tokens but the table has {rows} rows",
    )
    require(not norm.across_heads, "across_heads does not go with two streams")
    for table in (cos, other):
        require(table.dim() != 4 or table.shape[2] == 1, "tables for each head do not go with two streams")


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


def _refuse_gradients(require: Require, **tensors: Tensor | None) -> None:
    for label, x in tensors.items():
        require(
            x is None or not (x.requires_grad and torch.is_grad_enabled()),
            lambda: f"{label} requires a gradient, which this call has none for; use apply_rope, or torch.no_grad()",
        )


def check_positions(q: Tensor, tables: Tables, values: tuple[Any, ...], name: str) -> None:
    """Refuse positions outside of the table, whichever way they are given. Waits for the device."""
    options = Options(*values)
    whole = (getattr(x, "full_tensor", lambda x=x: x)() for x in tables[2:])  # of DTensors
    cos, cu_seqlens, start_positions, position_ids = tables[0], *whole
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


def check_slots(k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, name: str) -> None:
    """Refuse slots past the end of the caches. Waits for the device."""
    count = k_cache.shape[0] * (k_cache.shape[1] if k_cache.dim() == 4 else 1)
    highest = int(slot_mapping.max()) if slot_mapping.numel() else -1
    if highest >= count:
        raise InvalidInput(f"{name}: slot_mapping goes up to {highest}, but the caches have slots 0 to {count - 1}")


def check(q: Tensor, k: Tensor | None, tables: Tables, values: tuple[Any, ...], name: str = "") -> None:
    """Refuse what does not fit, naming the argument, what was given and what is allowed."""
    cos, sin, cu_seqlens, start_positions, position_ids = tables
    options = Options(*values)
    require = _requirer(name or ("apply_rope_" if options.in_place else "apply_rope"))
    _check_words(options, require)
    forward_mode = forward_ad._current_level >= 0 and any(
        x is not None and forward_ad.unpack_dual(x).tangent is not None for x in (q, k, cos, sin)
    )
    require(not forward_mode, "forward-mode derivatives (jvp) are not supported; use the backward")
    _check_heads(q, k, options, require)
    _check_lengths(q, cu_seqlens, start_positions, options, require)
    _check_position_ids(q, tables, options, require)
    _check_tables(q, k, cos, sin, cu_seqlens is not None, position_ids is not None, options, require)


Require = Callable[[bool, "str | Callable[[], str]"], None]


def _requirer(name: str) -> Require:
    """A message with numbers is made only where it is needed: traced, it would fix what is symbolic there."""

    def require(condition: bool, message: str | Callable[[], str]) -> None:
        if not condition:
            raise InvalidInput(f"{name}: {message if isinstance(message, str) else message()}")

    return require


def _check_heads(q: Tensor, k: Tensor | None, options: Options, require: Require) -> None:
    rank = 3 if options.layout == "thd" else 4
    letters = options.layout.upper()
    for label, x in (("q", q), ("k", k)):
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
        require(same, lambda: f"k is {x.dtype} on {x.device} but q is {q.dtype} on {q.device}")
        if options.in_place:
            _require_no_overlap(label, x, require)
    require(q.device.type in ("cuda", "cpu"), lambda: f"q is on {q.device}; allowed are CUDA and CPU devices")
    batch, seqlen, _, head_dim = _axes(q, options.layout)
    if k is not None:
        k_batch, k_seqlen, _, k_head_dim = _axes(k, options.layout)
        require(
            (k_batch, k_seqlen, k_head_dim) == (batch, seqlen, head_dim),
            lambda: f"q is {_named(q, options.layout)} but k is {_named(k, options.layout)}; only H may differ",
        )
    require(batch * seqlen <= _MAX_TOKENS, lambda: f"q has {batch * seqlen} tokens, at most {_MAX_TOKENS} are possible")
    require(head_dim <= MAX_HEAD_DIM, lambda: f"q has D={head_dim}, at most {MAX_HEAD_DIM} is possible")
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
    require(
        all(stride or size < 2 for size, stride in zip(x.shape, x.stride())),
        lambda: f"{label} is expanded (strides {tuple(x.stride())}): its elements overlap, which in place cannot be",
    )


def _check_words(options: Options, require: Require) -> None:
    require(
        options.layout in LAYOUT_AXES, lambda: f"layout is {options.layout!r}; allowed are {', '.join(LAYOUT_AXES)}"
    )
    require(
        options.rounding in ROUNDINGS, lambda: f"rounding is {options.rounding!r}; allowed are {', '.join(ROUNDINGS)}"
    )
    require(
        options.launch == "auto" or options.launch in LAUNCHES,
        lambda: f"launch is {options.launch!r}; allowed are auto, {', '.join(LAUNCHES)}",
    )


def _check_lengths(
    q: Tensor, cu_seqlens: Tensor | None, start_positions: Tensor | None, options: Options, require: Require
) -> None:
    batch, seqlen, *_ = _axes(q, options.layout)
    size, rank = options.cp_size, options.cp_rank
    require(isinstance(size, int) and size >= 1, lambda: f"cp_size is {size!r}; it is at least 1")
    require(
        isinstance(rank, int) and 0 <= rank < size,
        lambda: f"cp_rank is {rank!r}, which is not from 0 to cp_size - 1 = {size - 1}",
    )
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


def _check_position_ids(q: Tensor, tables: Tables, options: Options, require: Require) -> None:
    *_, cu_seqlens, start_positions, ids = tables
    sections = options.mrope_section
    if ids is None:
        require(not sections, "mrope_section goes with position_ids, which is not given")
        return
    _check_integers("position_ids", ids, q, require)
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
    with_others = cu_seqlens is not None or start_positions is not None or options.cp_size > 1
    require(
        not with_others, "position_ids go without cu_seqlens, start_positions and cp_size: they say all that those do"
    )
    if not sections:
        require(not options.mrope_interleaved, "mrope_interleaved goes with mrope_section, which is not given")
        return
    pairs = options.rotary_dim // 2
    require(
        len(sections) <= MAX_AXES and all(size >= 0 for size in sections) and sum(sections) == pairs,
        lambda: f"mrope_section is {tuple(sections)}; it is at most {MAX_AXES} numbers of pairs, {pairs} in all",
    )


def _check_tables(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, packed: bool, ids: bool, options: Options, require: Require
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
        require(2 <= table.dim() <= 4, lambda: f"{label} has shape {shape}; it is (P, W), (B, P, W) or (B, P, H, W)")
        if angles:
            require(
                table.dtype == torch.float32, lambda: f"freqs is {table.dtype}; angles are fp32, or positions are lost"
            )
        fits = _is_float(table) or (in_fp64 and table.dtype == torch.float64)
        require(
            fits,
            lambda: f"{label} is {table.dtype}; allowed are fp32, fp16, bf16, and fp64 with rounding='complex128'",
        )
        require(table.device == q.device, lambda: f"{label} is on {table.device} but q is on {q.device}")
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
