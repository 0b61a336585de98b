"""The user's functions: arguments in words to options; `checks` refuses what does not fit."""

from __future__ import annotations

from torch import Tensor

from .checks import check, check_qkv
from .errors import InvalidInput
from .ops import call, call_qkv


def apply_rope(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    freqs: Tensor | None = None,
    mscale: float = 1.0,
    layout: str = "bshd",
    interleaved: bool = False,
    interleaved_out: bool | None = None,
    rotary_dim: int | None = None,
    rotary_offset: int = 0,
    inverse: bool = False,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    start_positions: Tensor | None = None,
    packed_table: bool = False,
    cp_size: int = 1,
    cp_rank: int = 0,
    rounding: str = "fp32",
    launch: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Rotate q and k by position-dependent angles, in one launch; returns fresh tensors.

    Pair i of a head, (x0, x1), becomes (x0 cos_i - x1 sin_i, x1 cos_i + x0 sin_i); see RoFormer,
    arXiv:2104.09864, equation 34. The gradient is the rotation back; cos, sin and freqs get none.

    >>> q, k = jitrope.apply_rope(q, k, cos, sin)                       # (B, S, H, D), halves
    >>> q, _ = jitrope.apply_rope(q, None, cos, sin, interleaved=True)  # one tensor alone
    >>> q, k = jitrope.apply_rope(q, k, freqs=freqs, layout="thd", cu_seqlens=cu_seqlens)

    Args:
        q: (B, S, Hq, D) in the default layout; fp32, fp16 or bf16; any strides, nothing is copied.
            D is at most 512.
        k: as q with its own number of heads (GQA, MQA), or None, which comes back in its place.
        cos, sin: tables over positions, fp32, fp16 or bf16, any strides: (P, W), or a row of tables
            for each batch entry (B, P, W), or for each head too (B, P, H, W); an axis of size 1 is
            shared. P is at least the number of positions used. W is rotary_dim / 2 (half width: an
            angle a pair) or rotary_dim (full width: an angle an element, laid out like the head;
            the members of a pair may differ).
        freqs: in place of cos and sin: fp32 angles in radians, (P, W), (B, P, W) or, as Megatron and
            TransformerEngine have them, (P, 1 or B, 1, W). The kernel takes each sine and cosine
            once a token, with the accuracy of torch's own.
        mscale: with freqs: a factor of the cosines and sines (YaRN, arXiv:2309.00071, section 3.4).
        layout: "bshd", "sbhd", "bhsd" or, for packed sequences, "thd": (T, H, D). Without
            cu_seqlens a packed token t uses row t of the table.
        interleaved: True: pairs are (0, 1), (2, 3), ...; False: (i, i + rotary_dim / 2).
        interleaved_out: the pairing of the output, where it is another than the input's (multi-head
            latent attention rotates interleaved pairs into halves). With half-width tables only.
        rotary_dim: even; only so many elements of a head are rotated. Default: D - rotary_offset,
            for tables of that width or half of it.
        rotary_offset: the first element of a head that is rotated; the others stay.
        inverse: rotate by the negative angles, exactly the gradient's arithmetic.
        cu_seqlens: with "thd": int32 or int64 offsets (N + 1) of N sequences, on q's device, from 0
            and ascending. Positions restart at 0 in each. Not read on the host. Tokens after the
            last sequence come out as zeros (`apply_rope_` leaves them alone); tokens past the
            table's end come out as NaN.
        max_seqlen: with cu_seqlens: the longest sequence, if the host knows it.
        start_positions: int32 or int64, (B,), or (N,) with cu_seqlens: the position of the first
            token of each batch row or sequence. Positions outside of the table come out as NaN.
        packed_table: with cu_seqlens: the table has a row for each token of the packed batch, so that
            positions do not restart (mRoPE tables, say).
        cp_size, cp_rank: context parallelism. q and k hold this rank's chunks cp_rank and
            2 cp_size - 1 - cp_rank of the 2 cp_size equal chunks of every sequence, whose length is
            therefore a multiple of 2 cp_size. cu_seqlens, max_seqlen and the tables are those of the
            whole batch.
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
    if freqs is not None or cos is None or sin is None:
        cos, sin = _tables("apply_rope", cos, sin, freqs)
    options = (
        layout, interleaved, interleaved if interleaved_out is None else interleaved_out,
        q.shape[-1] - rotary_offset if rotary_dim is None else rotary_dim, rotary_offset, max_seqlen or 0, cp_size,
        cp_rank, freqs is not None, mscale, packed_table, 0, True, rounding, launch, inverse, False,
    )  # fmt: skip
    return call(q, k, cos, sin, cu_seqlens, start_positions, options, check)


def apply_rope_(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    freqs: Tensor | None = None,
    mscale: float = 1.0,
    layout: str = "bshd",
    interleaved: bool = False,
    rotary_dim: int | None = None,
    rotary_offset: int = 0,
    inverse: bool = False,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    start_positions: Tensor | None = None,
    packed_table: bool = False,
    cp_size: int = 1,
    cp_rank: int = 0,
    rounding: str = "fp32",
    launch: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """`apply_rope` in place: q and k themselves are rotated, and returned.

    Arguments and errors are those of `apply_rope`; the pairing of the output is the input's. A tensor
    whose elements overlap in memory (an expanded one) is refused. Under autograd torch's rules for
    in-place operations hold: q and k may not be leaves that require a gradient.
    """
    if freqs is not None or cos is None or sin is None:
        cos, sin = _tables("apply_rope_", cos, sin, freqs)
    options = (
        layout, interleaved, interleaved, q.shape[-1] - rotary_offset if rotary_dim is None else rotary_dim,
        rotary_offset, max_seqlen or 0, cp_size, cp_rank, freqs is not None, mscale, packed_table, 0, True, rounding,
        launch, inverse, True,
    )  # fmt: skip
    return call(q, k, cos, sin, cu_seqlens, start_positions, options, check)


def apply_rope_qkv(
    qkv: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    q_per_group: int = 1,
    copy_v: bool = True,
    freqs: Tensor | None = None,
    mscale: float = 1.0,
    layout: str = "bshd",
    interleaved: bool = False,
    rotary_dim: int | None = None,
    rotary_offset: int = 0,
    inverse: bool = False,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    start_positions: Tensor | None = None,
    packed_table: bool = False,
    cp_size: int = 1,
    cp_rank: int = 0,
    rounding: str = "fp32",
    launch: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Split packed QKV and rotate q and k, in one launch; the gradient is one launch too.

    >>> q, k, v = jitrope.apply_rope_qkv(qkv, cos, sin, q_per_group=4)     # 4 heads of q to one of k and v

    Args:
        qkv: (B, S, G, (q_per_group + 2) D) in the default layout ("sbhd" and "thd" are the others):
            each of the G groups holds its q_per_group heads of q, then one of k, then one of v, as
            a grouped-query projection leaves them.
        q_per_group: heads of q in a group.
        copy_v: False: v is returned as a view of qkv, and nothing of it is moved.
        The others are `apply_rope`'s; tables for each head are refused.

    Returns:
        q (B, S, G q_per_group, D), k and v (B, S, G, D), contiguous; v a view if asked. Of the
        tokens after the last sequence q and k are zero; v is copied whole.

    Raises:
        InvalidInput, CompileError: as `apply_rope`.
    """
    if freqs is not None or cos is None or sin is None:
        cos, sin = _tables("apply_rope_qkv", cos, sin, freqs)
    rotary = qkv.shape[-1] // (max(q_per_group, 1) + 2) - rotary_offset if rotary_dim is None else rotary_dim
    options = (
        layout, interleaved, interleaved, rotary, rotary_offset, max_seqlen or 0, cp_size, cp_rank, freqs is not None,
        mscale, packed_table, q_per_group, copy_v, rounding, launch, inverse, False,
    )  # fmt: skip
    return call_qkv(qkv, (cos, sin, cu_seqlens, start_positions), options, check_qkv)


def apply_rope_qkv_(
    qkv: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    q_per_group: int = 1,
    freqs: Tensor | None = None,
    mscale: float = 1.0,
    layout: str = "bshd",
    interleaved: bool = False,
    rotary_dim: int | None = None,
    rotary_offset: int = 0,
    inverse: bool = False,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    start_positions: Tensor | None = None,
    packed_table: bool = False,
    cp_size: int = 1,
    cp_rank: int = 0,
    rounding: str = "fp32",
    launch: str = "auto",
) -> Tensor:
    """Rotate q and k where they lie in packed QKV, and return it; v is not touched.

    For attention that takes packed input or views. Arguments and errors are `apply_rope_qkv`'s.
    """
    if freqs is not None or cos is None or sin is None:
        cos, sin = _tables("apply_rope_qkv_", cos, sin, freqs)
    rotary = qkv.shape[-1] // (max(q_per_group, 1) + 2) - rotary_offset if rotary_dim is None else rotary_dim
    options = (
        layout, interleaved, interleaved, rotary, rotary_offset, max_seqlen or 0, cp_size, cp_rank, freqs is not None,
        mscale, packed_table, q_per_group, True, rounding, launch, inverse, True,
    )  # fmt: skip
    return call_qkv(qkv, (cos, sin, cu_seqlens, start_positions), options, check_qkv)[0]


def _tables(name: str, cos: Tensor | None, sin: Tensor | None, freqs: Tensor | None) -> tuple[Tensor, Tensor]:
    """The two tables that the ops take: angles twice, their positions on the axis of cos and sin's."""
    if freqs is None:
        if cos is None or sin is None:
            raise InvalidInput(f"{name}: cos and sin, or freqs, are to be given")
        return cos, sin
    if cos is not None or sin is not None:
        raise InvalidInput(f"{name}: freqs goes without cos and sin")
    if freqs.dim() == 4:  # (P, B, 1, W)
        freqs = freqs.transpose(0, 1)
    return freqs, freqs
