"""The user's functions. All checking happens here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .errors import InvalidInput
from .ops import call
from .runtime import DTYPE_NAMES, Options
from .spec import DTYPES, LAUNCHES, LAYOUT_AXES, MAX_HEAD_DIM, ROUNDINGS

_MAX_TOKENS = 2**31 - 1  # CUDA's limit on the first grid axis


def apply_rope(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    layout: str = "bshd",
    interleaved: bool = False,
    rotary_dim: int | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    rounding: str = "fp32",
    launch: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Rotate q and k by position-dependent angles, in one launch; returns fresh tensors.

    Pair i of a head, (x0, x1), becomes (x0 cos_i - x1 sin_i, x1 cos_i + x0 sin_i); see RoFormer,
    arXiv:2104.09864, equation 34. The gradient is the rotation back; cos and sin get none.

    >>> q, k = jitrope.apply_rope(q, k, cos, sin)                       # (B, S, H, D), halves
    >>> q, _ = jitrope.apply_rope(q, None, cos, sin, interleaved=True)  # one tensor alone

    Args:
        q: (B, S, Hq, D) in the default layout; fp32, fp16 or bf16; any strides, nothing is copied.
            D is at most 512.
        k: as q with its own number of heads (GQA, MQA), or None, which comes back in its place.
        cos, sin: tables over positions, fp32, fp16 or bf16, any strides: (P, W), or a row of tables
            for each batch entry (B, P, W), or for each head too (B, P, H, W); an axis of size 1 is
            shared. P is at least the number of positions used. W is rotary_dim / 2 (half width: an
            angle a pair) or rotary_dim (full width: an angle an element, laid out like the head;
            the members of a pair may differ).
        layout: "bshd", "sbhd", "bhsd" or, for packed sequences, "thd": (T, H, D). Without
            cu_seqlens a packed token t uses row t of the table.
        interleaved: True: pairs are (0, 1), (2, 3), ...; False: (i, i + rotary_dim / 2).
        rotary_dim: even; only the first so many elements of a head are rotated. Default: D, for
            tables of width D or D / 2.
        cu_seqlens: with "thd": int32 or int64 offsets (N + 1) of N sequences, on q's device, from 0
            and ascending. Positions restart at 0 in each. Not read on the host. Tokens after the
            last sequence come out as zeros (`apply_rope_` leaves them alone); tokens past the
            table's end come out as NaN.
        max_seqlen: with cu_seqlens: the longest sequence, if the host knows it.
        rounding: "fp32" rounds each product and their sum to fp32, as eager torch does on real
            tensors; "complex64" gives the bits of torch's complex64 multiply on the same device.
            The result is rounded to q's dtype once.
        launch: "auto", or force "token_linear" or "grid_2d"; all give the same bits.

    Returns:
        (q, k) rotated, of the shapes, dtype and (where dense) strides of the inputs.

    Raises:
        InvalidInput: the arguments do not fit together; nothing was written.
        CompileError: the kernel could not be built; the message says what to install.
    """
    rotary = q.shape[-1] if rotary_dim is None else rotary_dim
    options = (layout, interleaved, rotary, max_seqlen or 0, rounding, launch, False, False)
    return call(q, k, cos, sin, cu_seqlens, options, _check)


def apply_rope_(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    layout: str = "bshd",
    interleaved: bool = False,
    rotary_dim: int | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    rounding: str = "fp32",
    launch: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """`apply_rope` in place: q and k themselves are rotated, and returned.

    Arguments and errors are those of `apply_rope`. A tensor whose elements overlap in memory (an
    expanded one) is refused. Under autograd torch's rules for in-place operations hold: q and k may
    not be leaves that require a gradient.
    """
    rotary = q.shape[-1] if rotary_dim is None else rotary_dim
    options = (layout, interleaved, rotary, max_seqlen or 0, rounding, launch, False, True)
    return call(q, k, cos, sin, cu_seqlens, options, _check)


def _check(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, cu_seqlens: Tensor | None, values: tuple[Any, ...]
) -> None:
    """Refuse what does not fit, naming the argument, what was given and what is allowed."""
    options = Options(*values)
    name = "apply_rope_" if options.in_place else "apply_rope"

    def require(condition: bool, message: str) -> None:
        if not condition:
            raise InvalidInput(f"{name}: {message}")

    _check_words(options, require)
    forward_mode = forward_ad._current_level >= 0 and any(
        x is not None and forward_ad.unpack_dual(x).tangent is not None for x in (q, k, cos, sin)
    )
    require(not forward_mode, "forward-mode derivatives (jvp) are not supported; use the backward")
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
            require(
                all(stride or size < 2 for size, stride in zip(x.shape, x.stride())),
                f"{label} is expanded (strides {tuple(x.stride())}): its elements overlap, which in place cannot be",
            )
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
    rotary = options.rotary_dim
    require(
        rotary % 2 == 0 and 0 < rotary <= head_dim,
        f"rotary_dim is {rotary}; it must be even and from 2 to D={head_dim}",
    )
    _check_lengths(q, cu_seqlens, options, require)
    _check_tables(q, k, cos, sin, cu_seqlens is not None, options, require)


def _check_words(options: Options, require: Any) -> None:
    require(options.layout in LAYOUT_AXES, f"layout is {options.layout!r}; allowed are {', '.join(LAYOUT_AXES)}")
    require(options.rounding in ROUNDINGS, f"rounding is {options.rounding!r}; allowed are {', '.join(ROUNDINGS)}")
    require(
        options.launch == "auto" or options.launch in LAUNCHES,
        f"launch is {options.launch!r}; allowed are auto, {', '.join(LAUNCHES)}",
    )


def _check_lengths(q: Tensor, cu_seqlens: Tensor | None, options: Options, require: Any) -> None:
    if cu_seqlens is None:
        require(options.max_seqlen == 0, "max_seqlen goes with cu_seqlens, which is not given")
        return
    require(options.layout == "thd", f"cu_seqlens goes with layout 'thd', not {options.layout!r}")
    require(options.max_seqlen >= 0, f"max_seqlen is {options.max_seqlen}; it cannot be negative")
    require(
        cu_seqlens.dtype in (torch.int32, torch.int64), f"cu_seqlens is {cu_seqlens.dtype}; allowed are int32 and int64"
    )
    require(cu_seqlens.device == q.device, f"cu_seqlens is on {cu_seqlens.device} but q is on {q.device}")
    require(
        cu_seqlens.dim() == 1 and len(cu_seqlens) >= 1,
        f"cu_seqlens has shape {tuple(cu_seqlens.shape)}; it is one axis of N + 1 offsets",
    )
    require(cu_seqlens.is_contiguous(), f"cu_seqlens has stride {cu_seqlens.stride()}; it must be contiguous")


def _check_tables(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, packed: bool, options: Options, require: Any
) -> None:
    batch, seqlen, heads, head_dim = _axes(q, options.layout)
    where = _named(q, options.layout)
    rotary = options.rotary_dim
    for label, table in (("cos", cos), ("sin", sin)):
        shape = tuple(table.shape)
        require(2 <= table.dim() <= 4, f"{label} has shape {shape}; it is (P, W), (B, P, W) or (B, P, H, W)")
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
        width in (rotary // 2, rotary),
        f"cos and sin are {width} wide; with rotary_dim {rotary} (D={head_dim}) they are {rotary // 2} (half width) or "
        f"{rotary} (full width); pass rotary_dim for a partial rotation",
    )
    rows = cos.shape[0] if cos.dim() == 2 else cos.shape[1]
    needed = options.max_seqlen if packed else seqlen
    require(rows >= needed, f"q is {where} but cos has {rows} rows; {needed} positions are used")
    require(not packed or rows > 0 or seqlen == 0, "cos has no rows")
    if cos.dim() > 2:
        rows = cos.shape[0]
        require(rows in (1, batch), f"q is {where} but cos has {rows} batch rows; allowed are 1 and B={batch}")
    if cos.dim() == 4 and cos.shape[2] != 1:
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
