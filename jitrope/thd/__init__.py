"""Move packed ("thd") tensors between the order of a batch and the order of context-parallel ranks.

These are the functions of TransformerEngine's context parallelism, under its names without the prefix "thd_". Rows may
have any size and alignment, sequences any number and length, and there may be rows after the last sequence. Each
move of rows is one launch, also for two tensors; a correction is one for each tensor. None waits for the GPU, and on a
CPU offsets that do not fit are refused. `jitrope.context_parallel.Partition` explains the rows of each rank. The halves
and corrections are for ring attention (arXiv:2310.01889), which joins softmaxes over parts of the keys by their
log-sum-exp (FlashAttention, arXiv:2205.14135 and 2307.08691).

The two functions that reorder rows have a gradient. The others have none, and refuse tensors that require one: call
them in a `torch.autograd.Function`.

cu_seqlens are the offsets of the sequences in the whole batch, (B + 1) int32 or int64, ascending from 0. "Of a rank"
means offsets in the rows of one rank. They include any padding between sequences. In shapes, T is the number of tokens
of the batch or of the rank, and B the number of sequences.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..base import arguments
from ..torch_state import is_compiling, own_ops, wants_grad
from . import ops as thd_ops
from .reference import Correction, Move
from .shape import Shape

__all__ = [
    "copy_valid_tokens_from_per_split_to_rank_local",
    "cp_rank_order_to_sequence_order",
    "get_partitioned_indices",
    "grad_correction",
    "out_correction",
    "read_half_tensor",
    "read_second_half_lse",
    "second_half_lse_correction",
    "sequence_order_to_cp_rank_order",
]

Rows = Tensor | tuple[Tensor, ...]  # (T, ...), or a pair of tensors with equally many rows
CORRECTIONS = {"none": "nothing", "add": "add", "copy": "copy"}  # the words of `grad_correction` for the kernels' words


# ---- between a batch and its ranks -----------------------------------------------------------------


class _Reordered(torch.autograd.Function):
    """Tensors in the other order; the backward restores the order of gradients."""

    @staticmethod
    def forward(ctx: Any, map: str, cu_seqlens: Tensor, shape: Shape, x: Tensor, y: Tensor | None = None) -> Any:
        xs = (x,) if y is None else (x, y)  # torch.compile cannot trace `*xs` here
        ctx.map, ctx.shape = map, shape
        ctx.save_for_backward(cu_seqlens)
        rows = shape.all_rows if map == "to_ranks" else shape.tokens
        out = tuple(x.new_empty((rows, *x.shape[1:])) for x in xs)
        thd_ops.move(Move([thd_ops.rows_of(x) for x in xs], out, map, cu_seqlens, shape=shape))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        back = "to_sequences" if ctx.map == "to_ranks" else "to_ranks"
        return None, None, None, *_Reordered.apply(back, ctx.saved_tensors[0], ctx.shape, *grads)


def _reorder(name: str, map: str, x: Rows, cu_seqlens: Tensor, cp_size: int, tokens: int | None, rule: str) -> Rows:
    several = isinstance(x, (tuple, list))
    xs = arguments.parts(name, "x", x, 2) if several else (x,)
    labels = {f"x[{i}]": y for i, y in enumerate(xs)} if several else {"x": x}
    fail = thd_ops.fail_of(name, gradient=True, **labels, cu_seqlens=cu_seqlens)
    if not all(y.dim() >= 1 and len(y) == len(xs[0]) and y.device == xs[0].device for y in xs):
        each = ", ".join(arguments.shown(y) for y in xs)
        fail(f"x is {each}; it must be (T, ...), or a pair with as many rows on one device")
    tokens = len(xs[0]) if tokens is None else tokens
    shape = thd_ops.shape_of(fail, xs[0], cu_seqlens, rule, total_tokens=tokens, cp_size=cp_size, cp_rank=0)
    if wants_grad(*xs) and not is_compiling() and cu_seqlens.is_inference():
        cu_seqlens = cu_seqlens.clone()  # which autograd can keep
    rows = shape.tokens if map == "to_ranks" else shape.all_rows
    if len(xs[0]) != rows:
        had = f"x has {len(xs[0])} rows; total_tokens={shape.tokens} on cp_size={cp_size} ranks are {rows}"
        fail(f"{had} (pass total_tokens if it is not the number of rows)")
    out: tuple[Tensor, ...] = _Reordered.apply(map, cu_seqlens, shape, *xs)
    return out if several else out[0]


def sequence_order_to_cp_rank_order(
    x: Rows, cu_seqlens: Tensor, cp_size: int, total_tokens: int | None = None, *, rule: str = "dual_chunk"
) -> Rows:
    """Reorder a batch into the shards of all ranks, one shard after the other. Differentiable.

    >>> thd.sequence_order_to_cp_rank_order(torch.arange(8), torch.tensor([0, 8]), cp_size=2)
    tensor([0, 1, 6, 7, 2, 3, 4, 5])

    Args:
        x: (T, ...), or a pair of such tensors (k and v), which one launch moves.
        cu_seqlens: (B + 1), of the batch.
        cp_size: the number of ranks that share each sequence.
        total_tokens: T, to check the number of rows.
        rule: "dual_chunk" (a rank has a chunk from each end) or "contiguous".

    Returns:
        (cp_size * ceil(T / cp_size), ...): rank r's shard begins at row r * ceil(T / cp_size). Where T is not a
        multiple of cp_size, some ranks have one row less, and their shards end in a row of zeros.

    Raises:
        InvalidInput: the arguments do not fit together.
    """
    return _reorder("sequence_order_to_cp_rank_order", "to_ranks", x, cu_seqlens, cp_size, total_tokens, rule)


def cp_rank_order_to_sequence_order(
    x: Rows, cu_seqlens: Tensor, cp_size: int, total_tokens: int | None = None, *, rule: str = "dual_chunk"
) -> Rows:
    """The inverse of `sequence_order_to_cp_rank_order`: (cp_size * ceil(T / cp_size), ...) to (T, ...).

    Arguments and errors are those of `sequence_order_to_cp_rank_order`. Pass total_tokens = T if x has more rows
    than that. Differentiable.

    >>> by_rank = torch.tensor([0, 1, 6, 7, 2, 3, 4, 5])
    >>> thd.cp_rank_order_to_sequence_order(by_rank, torch.tensor([0, 8]), cp_size=2)
    tensor([0, 1, 2, 3, 4, 5, 6, 7])
    """
    return _reorder("cp_rank_order_to_sequence_order", "to_sequences", x, cu_seqlens, cp_size, total_tokens, rule)


def get_partitioned_indices(
    cu_seqlens: Tensor, total_tokens: int, world_size: int, rank: int, *, rule: str = "dual_chunk"
) -> Tensor:
    """The tokens of a rank, in the order of its rows, as indices into the batch.

    >>> thd.get_partitioned_indices(torch.tensor([0, 8]), 8, world_size=2, rank=0)
    tensor([0, 1, 6, 7], dtype=torch.int32)

    Args:
        cu_seqlens: (B + 1), of the batch.
        total_tokens: T, rows of the batch, including those after the last sequence.
        world_size: the number of ranks that share each sequence.
        rank: the rank, from 0 to world_size - 1.
        rule, and the errors: see `sequence_order_to_cp_rank_order`.

    Returns:
        (rows), int32. rows is T / world_size, rounded down on some ranks and up on others.
    """
    fail = thd_ops.fail_of("get_partitioned_indices", cu_seqlens=cu_seqlens)
    sizes = {"total_tokens": total_tokens, "world_size": world_size, "rank": rank}
    shape = thd_ops.shape_of(fail, cu_seqlens, cu_seqlens, rule, **sizes)
    return thd_ops.table("to_ranks", cu_seqlens, shape)


# ---- on one rank -------------------------------------------------------------------------------------


def copy_valid_tokens_from_per_split_to_rank_local(
    out: Tensor, x: Tensor, cu_seqlens_padded: Tensor, cu_seqlens: Tensor
) -> None:
    """Copy the tokens of x that are not padding to the same rows of out. Other rows of out do not change.

    >>> out, x = torch.zeros(6), torch.tensor([1.0, 2.0, 3.0, 9.0, 4.0, 9.0])
    >>> thd.copy_valid_tokens_from_per_split_to_rank_local(out, x, torch.tensor([0, 4, 6]), torch.tensor([0, 3, 4]))
    >>> out
    tensor([1., 2., 3., 0., 4., 0.])

    Args:
        out, x: (T, ...), of the same shape and dtype.
        cu_seqlens_padded: (B + 1), the rows where the sequences of this rank (or step) begin. The first may be above 0.
        cu_seqlens: (B + 1). Its differences are the numbers of valid tokens.

    Raises:
        InvalidInput: the arguments do not fit together; nothing was written.
    """
    name = "copy_valid_tokens_from_per_split_to_rank_local"
    fail = thd_ops.fail_of(name, out=out, x=x, cu_seqlens_padded=cu_seqlens_padded, cu_seqlens=cu_seqlens)
    fail.when(out.dim() == 0, "out has no axes; it must be (T, ...)")
    fail.unlike("x", x, out.device, (out.dtype,), out.shape, like="out")
    thd_ops.check_offsets(fail, "x", x, cu_seqlens_padded=cu_seqlens_padded, cu_seqlens=cu_seqlens)
    cu_seqlens = cu_seqlens.to(cu_seqlens_padded.dtype)
    thd_ops.require_written("out", out, fail)
    if len(cu_seqlens) > 1:
        shape = Shape(0, len(cu_seqlens) - 1, 1, 0)
        thd_ops.move(Move([thd_ops.rows_of(x)], [out], "valid", cu_seqlens_padded, cu_seqlens, shape=shape))


def read_half_tensor(x: Tensor, cu_seqlens: Tensor, half_idx: int) -> Tensor:
    """The first (0) or second (1) half of each sequence of a rank's rows, concatenated.

    >>> thd.read_half_tensor(torch.arange(8).view(8, 1, 1), torch.tensor([0, 6, 8]), half_idx=1).flatten()
    tensor([3, 4, 5, 7])

    Args:
        x: (T, H, D), or (2, T, H, D) for k and v in one launch.
        cu_seqlens: (B + 1), of a rank.
        half_idx: 0 or 1. Errors: see `sequence_order_to_cp_rank_order`.

    Returns:
        (T / 2, H, D) or (2, T / 2, H, D). If T is odd, the first half has one more row. The halves of a sequence are
        its chunks by the rule "contiguous" for two ranks; if its length is odd, one of them has one more row.
    """
    fail = thd_ops.fail_of("read_half_tensor", x=x, cu_seqlens=cu_seqlens)
    both = x.dim() == 4
    fail.unlike("x", x, x.device, (x.dtype,), (2, "T", "H", "D") if both else ("T", "H", "D"), like="x")
    xs = tuple(x) if both else (x,)
    shape = thd_ops.shape_of(fail, x, cu_seqlens, "contiguous", tokens=len(xs[0]), halves=2, half_idx=half_idx)
    out = x.new_empty((len(xs), shape.rows, *xs[0].shape[1:]))
    thd_ops.move(Move([thd_ops.rows_of(y) for y in xs], list(out), "to_ranks", cu_seqlens, shape=shape))
    return out if both else out[0]


# ---- ring attention's corrections --------------------------------------------------------------------


def second_half_lse_correction(lse: Tensor, lse_per_step: Tensor, cu_seqlens: Tensor, lse_packed: bool) -> None:
    """Join a step's log-sum-exp with that of the second half of each sequence, in place: log(exp(lse) + exp(step)).

    >>> lse = torch.zeros(1, 4)
    >>> thd.second_half_lse_correction(lse, torch.zeros(1, 2), torch.tensor([0, 4]), lse_packed=True)
    >>> lse
    tensor([[0.0000, 0.0000, 0.6931, 0.6931]])

    Args:
        lse: natural logarithms, contiguous, fp32: (H, rows >= T) if packed, else (B, H, longest).
        lse_per_step: the same for the second halves alone: (H, >= T / 2) or (B, H, >= longest / 2).
        cu_seqlens: (B + 1), of a rank.
        lse_packed: True for (H, rows), False for (B, H, longest).

    Raises:
        InvalidInput: the arguments do not fit together; nothing was written.
    """
    name = "second_half_lse_correction"
    packed, rows = thd_ops.check_lse(name, lse_packed, cu_seqlens, lse=lse, lse_per_step=lse_per_step)
    _correct(Correction("lse", "nothing", "add", packed, cu_seqlens, rows, lse=lse, lse_step=lse_per_step))


def read_second_half_lse(lse: Tensor, cu_seqlens: Tensor, lse_packed: bool, second_half_lse_seqlen: int) -> Tensor:
    """The log-sum-exp of the second half of each sequence.

    >>> thd.read_second_half_lse(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.tensor([0, 4]), True, 2)
    tensor([[3., 4.]])

    Args:
        lse, cu_seqlens, lse_packed, and the errors: see `second_half_lse_correction`.
        second_half_lse_seqlen: n, the number of columns of the result.

    Returns:
        fp32, (H, n) if packed, else (B, H, n); zero after the last row of the halves.
    """
    name = "read_second_half_lse"
    packed, rows = thd_ops.check_lse(name, lse_packed, cu_seqlens, lse=lse)
    columns = arguments.whole(name, "second_half_lse_seqlen", second_half_lse_seqlen, 0)
    out = lse.new_zeros((*lse.shape[:-1], columns))
    _correct(Correction("read_lse", "nothing", "copy", packed, cu_seqlens, rows, lse=lse, lse_step=out))
    return out


def out_correction(
    out: Tensor,
    out_per_step: Tensor,
    lse: Tensor,
    lse_per_step: Tensor,
    cu_seqlens: Tensor,
    only_second_half: bool,
    lse_packed: bool,
) -> None:
    """Add a step's output to out, in place: out += dtype(step * exp(lse_per_step - lse)), in fp32; zero stays zero.

    >>> out, step, lse = torch.zeros(2, 1, 1), torch.ones(2, 1, 1), torch.zeros(1, 2)
    >>> thd.out_correction(out, step, lse, lse, torch.tensor([0, 2]), only_second_half=False, lse_packed=True)
    >>> out.flatten()
    tensor([1., 1.])

    Args:
        out: (T, H, D).
        out_per_step: (T, H, D), or (T / 2, H, D) with only_second_half; out's dtype.
        lse, lse_per_step: see `second_half_lse_correction`; without only_second_half both have the same shape.
        cu_seqlens: (B + 1), of a rank.
        only_second_half: the step has only the queries of the second halves.
        lse_packed, and the errors: see `second_half_lse_correction`.
    """
    name = "out_correction"
    fail = thd_ops.fail_of(name, out=out, out_per_step=out_per_step)
    packed, _ = thd_ops.check_lse(name, lse_packed, cu_seqlens, lse=lse, lse_per_step=lse_per_step)
    first = "nothing" if arguments.flag(name, "only_second_half", only_second_half) else "add"
    thd_ops.check_step(fail, "out", out, out_per_step, first, "add")
    fits = lse.shape[-2] == out.shape[1] and not (packed and lse.shape[-1] < len(out)) and lse.device == out.device
    if not fits or (first != "nothing" and lse.shape != lse_per_step.shape):
        both_are = f"lse is {arguments.shown(lse)}, lse_per_step {arguments.shown(lse_per_step)}"
        fail(f"{both_are}; they must have one shape, and out's heads and at least its rows: {arguments.shown(out)}")
    step = thd_ops.rows_of(out_per_step)
    _correct(Correction("out", first, "add", packed, cu_seqlens, len(out), out, step, lse, lse_per_step))


def grad_correction(grad: Tensor, grad_per_step: Tensor, cu_seqlens: Tensor, first_half: str, second_half: str) -> None:
    """Add a step's gradient to that of each sequence, or copy it there, in place and for each half separately.

    >>> grad = torch.ones(4, 1, 1)
    >>> thd.grad_correction(grad, grad.clone(), torch.tensor([0, 4]), first_half="copy", second_half="add")
    >>> grad.flatten()
    tensor([1., 1., 2., 2.])

    Args:
        grad: (T, H, D) or (2, T, H, D).
        grad_per_step: the same shape, or only the T / 2 rows of one half if the other half's word is "none".
        cu_seqlens: (B + 1), of a rank.
        first_half, second_half: "add", "copy" or "none". Errors: see `second_half_lse_correction`.
    """
    name = "grad_correction"
    fail = thd_ops.fail_of(name, grad=grad, grad_per_step=grad_per_step, cu_seqlens=cu_seqlens)
    first = CORRECTIONS[arguments.word(name, "first_half", first_half, CORRECTIONS)]
    second = CORRECTIONS[arguments.word(name, "second_half", second_half, CORRECTIONS)]
    thd_ops.check_step(fail, "grad", grad, grad_per_step, first, second, 2)
    thd_ops.check_offsets(fail, "grad", grad, cu_seqlens=cu_seqlens)
    for one, step in zip(grad, grad_per_step) if grad.dim() == 4 else [(grad, grad_per_step)]:
        _correct(Correction("grad", first, second, True, cu_seqlens, len(one), one, thd_ops.rows_of(step)))


def _correct(given: Correction) -> None:
    own_ops.thd_correct(*given)
