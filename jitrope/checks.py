"""What the user's functions refuse, each in words: the argument, what was given and what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .errors import InvalidInput
from .problem import DTYPE_NAMES
from .spec import DTYPES, LAUNCHES, LAYOUT_AXES, MAX_HEAD_DIM, ROUNDINGS, Options

_MAX_TOKENS = 2**31 - 1  # CUDA's limit on the first grid axis


def check_qkv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cu_seqlens: Tensor | None,
    start_positions: Tensor | None,
    values: tuple[Any, ...],
) -> None:
    """Refuse what does not fit of a packed call."""
    options = Options(*values)
    name = "apply_rope_qkv_" if options.in_place else "apply_rope_qkv"
    groups, width = options.q_per_group, qkv.shape[-1]
    require = _requirer(name)
    require(isinstance(groups, int) and groups > 0, f"q_per_group is {groups!r}; it is at least 1")
    require(options.layout in ("bshd", "sbhd", "thd"), f"layout is {options.layout!r}; allowed are bshd, sbhd, thd")
    rank = 3 if options.layout == "thd" else 4
    require(qkv.dim() == rank, f"qkv has shape {tuple(qkv.shape)}, layout {options.layout!r} needs {rank} axes")
    require(width % (groups + 2) == 0, f"qkv is {width} wide, which q_per_group + 2 = {groups + 2} does not divide")
    require(cos.dim() != 4 or cos.shape[2] == 1, "tables for each head do not go with packed QKV")
    if options.in_place:
        _require_no_overlap("qkv", qkv, require)
    packed = qkv.unflatten(-1, (groups + 2, -1))
    # A group's k stands for all heads: what remains to be checked does not depend on their number.
    check(packed[..., -2, :], packed[..., -2, :], cos, sin, cu_seqlens, start_positions, values, name)


def check(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    cu_seqlens: Tensor | None,
    start_positions: Tensor | None,
    values: tuple[Any, ...],
    name: str = "",
) -> None:
    """Refuse what does not fit, naming the argument, what was given and what is allowed."""
    options = Options(*values)
    require = _requirer(name or ("apply_rope_" if options.in_place else "apply_rope"))
    _check_words(options, require)
    forward_mode = forward_ad._current_level >= 0 and any(
        x is not None and forward_ad.unpack_dual(x).tangent is not None for x in (q, k, cos, sin)
    )
    require(not forward_mode, "forward-mode derivatives (jvp) are not supported; use the backward")
    _check_heads(q, k, options, require)
    _check_lengths(q, cu_seqlens, start_positions, options, require)
    _check_tables(q, k, cos, sin, cu_seqlens is not None, options, require)


def _requirer(name: str) -> Callable[[bool, str], None]:
    def require(condition: bool, message: str) -> None:
        if not condition:
            raise InvalidInput(f"{name}: {message}")

    return require


def _check_heads(q: Tensor, k: Tensor | None, options: Options, require: Any) -> None:
    rank = 3 if options.layout == "thd" else 4
    letters = options.layout.upper()
    for label, x in (("q", q), ("k", k)):
        if x is None:
            continue
        require(
            x.dim() == rank,
            f"{label} has shape {tuple(x.shape)}, layout {options.layout!r} needs {rank} axes ({', '.join(letters)})",
        )
        require(_is_float(x), f"{label} is {x.dtype}; allowed are fp32, fp16 and bf16")
        same = x.device == q.device and x.dtype == q.dtype
        require(same, f"k is {x.dtype} on {x.device} but q is {q.dtype} on {q.device}")
        if options.in_place:
            _require_no_overlap(label, x, require)
    require(q.device.type in ("cuda", "cpu"), f"q is on {q.device}; allowed are CUDA and CPU devices")
    batch, seqlen, _, head_dim = _axes(q, options.layout)
    if k is not None:
        k_batch, k_seqlen, _, k_head_dim = _axes(k, options.layout)
        require(
            (k_batch, k_seqlen, k_head_dim) == (batch, seqlen, head_dim),
            f"q is {_named(q, options.layout)} but k is {_named(k, options.layout)}; only H may differ",
        )
    require(batch * seqlen <= _MAX_TOKENS, f"q has {batch * seqlen} tokens, at most {_MAX_TOKENS} are possible")
    require(head_dim <= MAX_HEAD_DIM, f"q has D={head_dim}, at most {MAX_HEAD_DIM} is possible")
    rotary, offset = options.rotary_dim, options.rotary_offset
    require(offset >= 0, f"rotary_offset is {offset}; it cannot be negative")
    after = f" - rotary_offset={head_dim - offset}" if offset else f"={head_dim}"
    require(
        rotary % 2 == 0 and 0 < rotary <= head_dim - offset,
        f"rotary_dim is {rotary}; it must be even and from 2 to D{after}",
    )


def _require_no_overlap(label: str, x: Tensor, require: Any) -> None:
    require(
        all(stride or size < 2 for size, stride in zip(x.shape, x.stride())),
        f"{label} is expanded (strides {tuple(x.stride())}): its elements overlap, which in place cannot be",
    )


def _check_words(options: Options, require: Any) -> None:
    require(options.layout in LAYOUT_AXES, f"layout is {options.layout!r}; allowed are {', '.join(LAYOUT_AXES)}")
    require(options.rounding in ROUNDINGS, f"rounding is {options.rounding!r}; allowed are {', '.join(ROUNDINGS)}")
    require(
        options.launch == "auto" or options.launch in LAUNCHES,
        f"launch is {options.launch!r}; allowed are auto, {', '.join(LAUNCHES)}",
    )


def _check_lengths(
    q: Tensor, cu_seqlens: Tensor | None, start_positions: Tensor | None, options: Options, require: Any
) -> None:
    batch, seqlen, *_ = _axes(q, options.layout)
    size, rank = options.cp_size, options.cp_rank
    # Words only where they are needed: what changes from call to call is symbolic where it is traced.
    if not (isinstance(size, int) and size >= 1):
        require(False, f"cp_size is {size!r}; it is at least 1")
    if not (isinstance(rank, int) and 0 <= rank < size):
        require(False, f"cp_rank is {rank!r}, which is not from 0 to cp_size - 1 = {size - 1}")
    for label, x in (("cu_seqlens", cu_seqlens), ("start_positions", start_positions)):
        if x is None:
            continue
        require(x.dtype in (torch.int32, torch.int64), f"{label} is {x.dtype}; allowed are int32 and int64")
        require(x.device == q.device, f"{label} is on {x.device} but q is on {q.device}")
        require(x.dim() == 1, f"{label} has shape {tuple(x.shape)}; it is one axis")
        require(x.is_contiguous(), f"{label} has stride {x.stride()}; it must be contiguous")
    if cu_seqlens is None:
        require(options.max_seqlen == 0, "max_seqlen goes with cu_seqlens, which is not given")
        require(not options.packed_table, "packed_table goes with cu_seqlens, which is not given")
        where = f"q is {_named(q, options.layout)}"
        require(size == 1 or seqlen % 2 == 0, f"{where}: under context parallelism a rank has two equal chunks")
        rows = batch
    else:
        require(options.layout == "thd", f"cu_seqlens goes with layout 'thd', not {options.layout!r}")
        if options.max_seqlen < 0:
            require(False, f"max_seqlen is {options.max_seqlen}; it cannot be negative")
        require(len(cu_seqlens) >= 1, "cu_seqlens is empty; it has N + 1 offsets")
        rows = len(cu_seqlens) - 1
    require(
        start_positions is None or len(start_positions) == rows,
        f"start_positions has {0 if start_positions is None else len(start_positions)} entries for {rows} "
        + ("batch rows" if cu_seqlens is None else "sequences"),
    )


def _check_tables(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, packed: bool, options: Options, require: Any
) -> None:
    batch, seqlen, heads, head_dim = _axes(q, options.layout)
    where = _named(q, options.layout)
    rotary = options.rotary_dim
    first, both = ("freqs", "freqs is") if options.angles else ("cos", "cos and sin are")
    for label, table in (("freqs", cos),) if options.angles else (("cos", cos), ("sin", sin)):
        shape = tuple(table.shape)
        require(2 <= table.dim() <= 4, f"{label} has shape {shape}; it is (P, W), (B, P, W) or (B, P, H, W)")
        if options.angles:
            require(table.dtype == torch.float32, f"freqs is {table.dtype}; angles are fp32, or positions are lost")
        require(_is_float(table), f"{label} is {table.dtype}; allowed are fp32, fp16 and bf16")
        require(table.device == q.device, f"{label} is on {table.device} but q is on {q.device}")
        require(
            not (table.requires_grad and torch.is_grad_enabled()),
            f"{label} requires a gradient, which jitrope does not compute; pass {label}.detach()",
        )
    require(
        cos.shape == sin.shape and cos.dtype == sin.dtype,
        f"cos is {tuple(cos.shape)} {cos.dtype} but sin is {tuple(sin.shape)} {sin.dtype}; they must match",
    )
    width = cos.shape[-1]
    require(
        width == rotary // 2 or width == rotary,  # not `in`, which is False of symbolic sizes
        f"{both} {width} wide; with rotary_dim {rotary} (D={head_dim}) they are {rotary // 2} (half width) or "
        f"{rotary} (full width); pass rotary_dim for a partial rotation",
    )
    require(options.angles or options.mscale == 1, "mscale goes with freqs; multiply cos and sin by it instead")
    mixed = options.interleaved != options.interleaved_out
    require(not mixed or width != rotary, f"interleaved_out goes with half-width tables, {rotary // 2} wide")
    rows = cos.shape[0] if cos.dim() == 2 else cos.shape[1]
    needed = options.max_seqlen if packed else seqlen * options.cp_size
    if not options.packed_table and rows < needed:
        require(False, f"q is {where} but {first} has {rows} rows; {needed} positions are used")
    require(rows > 0 or seqlen == 0, f"{first} has no rows")
    if cos.dim() > 2:
        rows = cos.shape[0]
        require(
            rows == 1 or rows == batch, f"q is {where} but {first} has {rows} batch rows; allowed are 1 and B={batch}"
        )
    if cos.dim() == 4 and cos.shape[2] != 1:
        require(not options.angles, f"freqs has angles for {cos.shape[2]} heads; they are shared, or use cos and sin")
        same = k is None or _axes(k, options.layout)[2] == heads
        require(
            cos.shape[2] == heads and same,
            f"q is {where} but cos has angles for {cos.shape[2]} heads; they go with as many heads in q and in k",
        )


def _is_float(x: Tensor) -> bool:
    return DTYPE_NAMES.get(x.dtype) in DTYPES


def _axes(x: Tensor, layout: str) -> list[int]:
    """The sizes (B, S, H, D) of a tensor in `layout`."""
    return [1 if axis is None else x.shape[axis] for axis in LAYOUT_AXES[layout]]


def _named(x: Tensor, layout: str) -> str:
    """A shape by its letters: `(B=2, S=128, H=32, D=64)`."""
    return "(" + ", ".join(f"{letter.upper()}={size}" for letter, size in zip(layout, x.shape)) + ")"
