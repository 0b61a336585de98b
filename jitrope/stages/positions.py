"""Positions: the row of a token in the tables, and whether the token comes after the last sequence.

row = its place in its sequence + start - unrotated, or its id. Source: context parallelism cuts sequences as
Megatron-LM does; mrope is of arXiv:2409.12191.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..base import layouts, partition
from ..base.arguments import flag, flags, refuse, refuse_beside, shown, tensor, whole, wholes
from ..base.fit import INTEGERS, Fail, named, sizes_of
from ..base.spec import INDEX_DTYPES, MAX_AXES, MAX_PAIRS
from ..base.views import Tensors
from ..values.asked import Value


class Positions(Value):
    """The table's row for each token; see `apply_rope`."""

    def _placed(self, start_positions: Tensor | None = None, cp_size: int = 1, cp_rank: int = 0) -> None:
        name = type(self).__name__
        if start_positions is not None:
            self.tensors["start_positions"] = tensor(name, "start_positions", start_positions)
        size, rank = whole(name, "cp_size", cp_size, 1), whole(name, "cp_rank", cp_rank, 0)
        if size != 1 or rank != 0:
            self.words.update(cp_size=size, cp_rank=rank)


class Packed(Positions):
    """Concatenated sequences, (T, H, D). Positions start at 0 in each. The layout is "thd".

    >>> q, freqs = torch.randn(10, 8, 64), jitrope.tables.freqs(16, jitrope.tables.inv_freq(rotary_dim=64)[0])
    >>> packed = jitrope.Packed(torch.tensor([0, 7, 10]))  # sequences of 7 and 3 tokens
    >>> q, _ = jitrope.apply_rope(q, None, freqs=freqs, positions=packed)

    Args:
        cu_seqlens: int32 or int64 offsets (N + 1) of N sequences, on q's device, ascending from 0. The host does not
            read them. Tokens after the last sequence become zero; in place they do not change, except that a bias is
            added. Tokens past the end of the table become NaN.
        max_seqlen: the length of the longest sequence, if known on the host.
        start_positions: int32 or int64, (N): the position of the first token of each sequence; default 0.
        packed_table: the table has a row for each token of the batch, so positions do not restart (as in tables of
            mRoPE).
        cp_size, cp_rank: context parallelism. Every sequence is cut into 2 cp_size chunks, and q and k hold this rank's
            chunks cp_rank and 2 cp_size - 1 - cp_rank of each, concatenated. cu_seqlens, max_seqlen and the tables
            describe the whole batch. Sequences may have any length: token t of the batch adds a place to chunk
            t % (2 cp_size) of its sequence, so the chunks of a sequence differ by at most one token
            (`jitrope.context_parallel.Partition`).

    Raises:
        InvalidInput: an argument has a wrong type. The values are not read; see `check` of `apply_rope`.
    """

    def __init__(
        self,
        cu_seqlens: Tensor,
        max_seqlen: int | None = None,
        *,
        start_positions: Tensor | None = None,
        packed_table: bool = False,
        cp_size: int = 1,
        cp_rank: int = 0,
    ) -> None:
        self.tensors = {"cu_seqlens": tensor("Packed", "cu_seqlens", cu_seqlens)}
        self.words = {"layout": "thd"}
        if max_seqlen is not None:
            self.words["max_seqlen"] = whole("Packed", "max_seqlen", max_seqlen, 0)
        self.words.update(flags("Packed", packed_table=packed_table))
        self._placed(start_positions, cp_size, cp_rank)


class Starts(Positions):
    """A first position for each batch row, or context parallelism of batch rows.

    >>> q, freqs = torch.randn(2, 1, 8, 64), jitrope.tables.freqs(16, jitrope.tables.inv_freq(rotary_dim=64)[0])
    >>> starts = jitrope.Starts(torch.tensor([5, 9]))  # the two tokens are at positions 5 and 9
    >>> q, _ = jitrope.apply_rope(q, None, freqs=freqs, positions=starts)

    Args:
        start_positions: int32 or int64, (B), on q's device: the position of the first token of each row; default 0.
            Positions outside of the table give NaN.
        cp_size, cp_rank: context parallelism as in `Packed`, with sequences of one length and chunks of one size.

    Raises:
        InvalidInput: an argument has a wrong type.
    """

    def __init__(self, start_positions: Tensor | None = None, *, cp_size: int = 1, cp_rank: int = 0) -> None:
        self.tensors, self.words = {}, {}
        self._placed(start_positions, cp_size, cp_rank)


class Mrope(Positions):
    """A position along each of several axes (multimodal rope, arXiv:2409.12191; the axial rope of images and video).

    >>> q, freqs = torch.randn(1, 10, 8, 64), jitrope.tables.freqs(16, jitrope.tables.inv_freq(rotary_dim=64)[0])
    >>> mrope = jitrope.Mrope(torch.randint(16, (3, 10)), (16, 8, 8))  # time, height and width of 10 tokens
    >>> q, _ = jitrope.apply_rope(q, None, freqs=freqs, positions=mrope)

    Args:
        position_ids: int32 or int64, (A, S) or (A, B, S), with "thd" (A, T), on q's device: a row of the table for each
            token and axis. A is at most 4.
        mrope_section: the number of pairs of each axis, rotary_dim / 2 in all. A pair takes the id of its axis.
        mrope_interleaved: True: the pairs of axis a > 0 are a, a + A, a + 2A, ..., as many as its section says, and
            there must be so many; all others belong to axis 0 (Qwen3-VL). False: the pairs of a section are neighbours
            (Qwen2-VL).
        axis_of_pair: in place of these the axis of each pair, in any order: [1, 2] * 22 + [0] * 20 (Ernie 4.5 VL).

    Raises:
        InvalidInput: an argument has a wrong type.
    """

    def __init__(
        self,
        position_ids: Tensor,
        mrope_section: Sequence[int] | None = None,
        mrope_interleaved: bool = False,
        *,
        axis_of_pair: Sequence[int] | None = None,
    ) -> None:
        self.tensors = {"position_ids": tensor("Mrope", "position_ids", position_ids)}
        self.words = _axes("Mrope", position_ids, mrope_section, mrope_interleaved, axis_of_pair)
        if not self.words:
            refuse("Mrope", "mrope_section", mrope_section, "the number of pairs of each axis, or pass axis_of_pair")


class Shifts(Positions):
    """Differences of positions: keys in a cache move from old positions to new ones, forwards or back.

    >>> k, freq = torch.randn(1, 2, 8, 64), jitrope.tables.inv_freq(rotary_dim=64)[0]
    >>> tables = jitrope.tables.cos_sin(16, freq)
    >>> old, new = torch.tensor([9, 4]), torch.tensor([2, 5])
    >>> keys, _ = jitrope.apply_rope(k, None, *tables, positions=old)
    >>> keys, _ = jitrope.apply_rope(keys, None, *tables, positions=jitrope.Shifts(new - old), inplace=True)
    >>> torch.allclose(keys, jitrope.apply_rope(k, None, *tables, positions=new)[0], atol=1e-5)
    True

    For servers that reuse cached text at another place (LMCache, the context shift of llama.cpp). k may be the keys of
    packed K|V pages, a view.

    Args:
        position_ids: new - old, int32 or int64, (S) or (B, S), with "thd" (T), on q's device. A token is rotated by the
            row of the table that is the difference's size, and back if the difference is below 0. A difference past the
            table on either side gives NaN. The tables begin at position 0 and have no factor (of YaRN), because the
            keys have it already. Pass them as cos and sin, cos_sin_cache or freqs_cis.
        mrope_section, mrope_interleaved, axis_of_pair: as in `Mrope`, whose axes position_ids then has: a difference
            along each.

    Raises:
        InvalidInput: an argument has a wrong type.
    """

    def __init__(
        self,
        position_ids: Tensor,
        mrope_section: Sequence[int] | None = None,
        mrope_interleaved: bool = False,
        *,
        axis_of_pair: Sequence[int] | None = None,
    ) -> None:
        self.tensors = {"position_ids": tensor("Shifts", "position_ids", position_ids)}
        self.words = {"shifts": True, **_axes("Shifts", position_ids, mrope_section, mrope_interleaved, axis_of_pair)}


def _axes(name: str, ids: Tensor, sections: Any, interleaved: Any, axes: Any) -> dict[str, Any]:
    """The word of the axis of each pair, if there are several."""
    if flag(name, "mrope_interleaved", interleaved) and sections is None:
        refuse(name, "mrope_interleaved", interleaved, "False without mrope_section")
    if sections is not None:
        refuse_beside(name, ["mrope_section"], [] if axes is None else ["axis_of_pair"])
        pairs = wholes(name, "mrope_section", sections, 0)
        if not 0 < sum(pairs) <= MAX_PAIRS or len(pairs) > MAX_AXES or ids.shape[:1] != (len(pairs),):
            had = f"the number of pairs of each axis, at most {MAX_AXES}; position_ids is {shown(ids)}"
            refuse(name, "mrope_section", sections, had)
        axes = [axis for axis, count in enumerate(pairs) for _ in range(count)]
        if interleaved:
            n, axes = len(pairs), [0] * len(axes)
            for axis, count in enumerate(pairs[1:], 1):
                if count > (most := len(axes[axis::n])):
                    must = f"at most {most} for axis {axis}, because mrope_interleaved gives it one pair in {n}"
                    refuse(name, "mrope_section", sections, must)
                axes[axis : n * count : n] = [axis] * count
    elif axes is not None:
        axes = wholes(name, "axis_of_pair", given := axes, 0)
        if not 0 < len(axes) <= MAX_PAIRS or max(axes) >= MAX_AXES:
            refuse(name, "axis_of_pair", given, f"the axis of each pair, from 0 to {MAX_AXES - 1}")
    return {} if axes is None else {"axis_of_pair": (*axes,)}


class Words(layouts.Words):
    axis_of_pair: tuple[int, ...] = ()  # of position_ids, if it has several axes
    shifts: bool = False  # position_ids are differences, and those below 0 rotate back
    packed_table: bool = False
    cp_size: int = 1
    cp_rank: int = 0
    max_seqlen: int = 0
    unrotated: int = 0  # the first tokens of each sequence, before those of the tables


class Fields:
    """Constants of a kernel; a dtype is None if its tensor is not given."""

    packed_table: bool  # there is a row for each token of the packed batch
    cu_seqlens_dtype: str | None = field(metadata={"words": INDEX_DTYPES})
    start_positions_dtype: str | None = field(metadata={"words": INDEX_DTYPES})
    cp_size: int  # ranks that share each sequence
    position_ids_dtype: str | None = field(metadata={"words": INDEX_DTYPES})
    axis_of_pair: tuple[int, ...]  # of position_ids, if it has several axes
    shifts: bool  # a position id below 0 rotates back
    prefixed: bool  # a run-time number of first tokens of a sequence is not rotated; rows count from the next token


TENSORS = ("cu_seqlens", "start_positions", "position_ids")
POSITIONS = {*TENSORS}
"""Tensors by which a token's row differs from its place in the batch row."""
ARGUMENTS = {"prefixed": ("", "long long unrotated")}
COUNTS = ("max_seqlen", "unrotated")
"""Words that change from call to call. They are not in a call's text: torch.compile and export keep symbols."""
ALL_TOKENS = 2**31 - 1
BARE = {"unrotated": ALL_TOKENS}
"""The words of a call without a table, which rotates nothing: every token comes before those of the tables."""
WHOLE = "cu_seqlens, start_positions, unrotated and cp_size"
"""Words and tensors by which tokens are counted from the first one of a whole sequence."""

RULE = "dual_chunk"  # the rule of `partition` by which rope's context parallelism cuts sequences

TURNED = ("q", "k")
"""The letters of heads that have positions."""


def bare(o: Words) -> bool:
    """Whether a call has no table."""
    return o.unrotated == ALL_TOKENS


def apart(t: Container[str], o: Words) -> dict[str, bool]:
    """Words that do not go with a table for each stream, and whether a call has them."""
    return {label(o): "position_ids" in t, "unrotated": o.unrotated > 0}


def behind(first: int, o: Words) -> tuple[int, dict[str, int]]:
    """(the row of the token `first` of each sequence, the words of the tokens from it on)."""
    row = first - o.unrotated if o.unrotated < first else 0
    return row, {"unrotated": o.unrotated - first if o.unrotated > first else 0}


def counted(t: Container[str], o: Words) -> bool:
    """Whether rows are counted from the first token of each batch row."""
    return "start_positions" in t or 0 < o.unrotated < ALL_TOKENS


def label(o: Words) -> str:
    """The user's name of position_ids."""
    return "position_ids" if o.axis_of_pair else "positions"


def check(t: Tensors, pairs: int, o: Words, fail: Fail) -> None:
    """Refuse positions that do not fit q, and each other. pairs: those of a head that are rotated."""
    q, size, own = t["q"], o.cp_size, o.axis_of_pair
    rows, seqlen, *_ = sizes_of(q, o.layout)
    check_counted(label(o), "position_ids" in t, o, fail)
    check_counted("packed_table", o.packed_table and not bare(o), o, fail)
    fail.when(o.cp_rank >= size, f"cp_rank is {o.cp_rank}; it must be from 0 to cp_size - 1 = {size - 1}")
    if "cu_seqlens" in t:
        fail.unlike("cu_seqlens", t["cu_seqlens"], q.device, INTEGERS, ("N + 1",), contiguous=True)
        rows = t["cu_seqlens"].shape[0] - 1  # len would make a symbol a number
        fail.when(o.layout != "thd", f"cu_seqlens goes with layout 'thd', not {o.layout!r}; leave layout out")
        fail.when(rows < 0, "cu_seqlens is empty; it must have N + 1 offsets")
    elif size != 1 and seqlen % 2 != 0:
        fail(f"{fail.main} is {named(q, o.layout)}; with cp_size={size} S must be even, for two equal chunks")
    if "start_positions" in t:
        starts, like = t["start_positions"], "cu_seqlens" * ("cu_seqlens" in t)
        fail.unlike("start_positions", starts, q.device, INTEGERS, (rows,), contiguous=True, like=like)
    if "position_ids" in t:
        had = f"mrope_section or axis_of_pair has {len(own)} pairs; it must have {pairs}"
        fail.when(own and len(own) != pairs, had)
        axes = ((*range(max(own) + 1, MAX_AXES + 1),),) if own else ()
        allowed = [(*axes, seqlen), *([] if o.layout == "thd" else [(*axes, (1, rows), seqlen)])]
        ids, use = t["position_ids"], "jitrope.Packed takes cu_seqlens, Starts first positions, Mrope several axes"
        wrong = not own and (ids.shape[-1:] != (seqlen,) or ids.dim() > len(allowed))
        use = "pass positions.squeeze(0)" if ids.shape == (1, seqlen) else use
        fail.unlike(label(o), ids, q.device, INTEGERS, *allowed, hint=f"; {use}" * wrong)


def check_counted(word: str, given: bool, o: Words, fail: Fail) -> None:
    """Refuse what does not go with tokens that are not counted."""
    if given and o.unrotated > 0:
        instead = "pass a table" if bare(o) else "give these tokens a row of the table with cosines of 1"
        fail(f"{word} does not go {'without a table' if bare(o) else 'with unrotated'}; {instead}")


def table_rows(tokens: int, device: torch.device, t: Tensors, o: Words) -> Tensor:
    """Each token's row of the table, (axes, batch or 1, tokens).

    The rows of tokens that are not rotated, before those of the table, are below 0.
    """
    if "position_ids" in t:
        return ids_view(t["position_ids"], o).long()
    index, starts = torch.arange(tokens, device=device)[None], t.get("start_positions")
    bounds: Any = 0, tokens * o.cp_size
    if "cu_seqlens" in t:
        ends, sequence = t["cu_seqlens"].long(), sequences_of(tokens, t, o)
        index, bounds = index - offsets_of(t, o)[sequence], (ends[sequence], ends[sequence + 1])
        starts = None if starts is None else pad(starts, (0, 1))[sequence]  # the last is there without sequences
    elif starts is not None:
        starts = starts[:, None]
    rows = local_positions(index, bounds[0], bounds[1], o)
    rows = rows if starts is None else rows + starts
    rows = rows + bounds[0] if o.packed_table else rows
    return rows[None] - o.unrotated


def turned(rows: Tensor, o: Words) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(the rows that tokens read, whether each is not rotated, whether it is rotated back along each axis)."""
    if o.unrotated:
        return rows.clamp(min=0), rows[0] < 0, None
    return (rows.abs(), None, rows < 0) if o.shifts else (rows, None, None)


def offsets_of(t: Tensors, o: Words) -> Any:
    """The offsets of the sequences among the tokens of a rank."""
    return partition.local_rows(t["cu_seqlens"].long(), o.cp_rank, o.cp_size, RULE)


def spare(tokens: int, t: Tensors, o: Words) -> Tensor | None:
    """A mask of the tokens after the last sequence; None without sequences."""
    if "cu_seqlens" not in t:
        return None
    end = offsets_of(t, o)[-1]
    return torch.arange(tokens, device=end.device).ge(end)


def spare_stays(x: Tensor, y: Tensor, t: Tensors, o: Words) -> Tensor:
    """y (tokens, ...), but with x's tokens after the last sequence."""
    mask = spare(x.shape[0], t, o)
    return y if mask is None else torch.where(mask[:, None, None], x, y)


def cleared(letter: str, x: Tensor, t: Tensors, o: Words) -> Tensor:
    """x (batch, seq, ...), in which tokens of q and k after the last sequence are zero."""
    mask = spare(x.shape[1], t, o) if letter in TURNED else None
    return x if mask is None else x.masked_fill(mask.view(-1, *[1] * (x.dim() - 2)), 0)


def sequences_of(tokens: int, t: Tensors, o: Words) -> Tensor:
    """The sequence of each of a packed batch's tokens; of those after the last sequence that one."""
    offsets = offsets_of(t, o)
    index = torch.arange(tokens, device=offsets.device)
    return torch.searchsorted(offsets[1:], index, right=True).clamp(max=len(offsets) - 2)


def local_positions(index: Tensor, first: Tensor | int, end: Tensor | int, o: Words) -> Tensor:
    """The position in its sequence of the index-th token that a rank has of it.

    A sequence owns the tokens [first, end) of the batch and is cut into 2 cp_size chunks (`partition`). A rank has
    the chunks cp_rank and 2 cp_size - 1 - cp_rank.
    """
    if o.cp_size == 1:
        return index
    of = partition.number_of_chunks(o.cp_size, RULE)
    head, tail = partition.chunks_of(o.cp_rank, o.cp_size, RULE)
    size = partition.count(end, head, of) - partition.count(first, head, of)
    begins = [partition.before(end, chunk, of) - partition.before(first, chunk, of) for chunk in (head, tail)]
    return torch.where(index < size, begins[0] + index, begins[1] + index - size)


def ids_view(position_ids: Tensor, o: Words) -> Tensor:
    """An (axes, batch, seq) view of position_ids, of the axes that pairs have; batch is 1 where they are shared."""
    ids = position_ids[: max(o.axis_of_pair) + 1] if o.axis_of_pair else position_ids[None]
    return ids if ids.dim() == 3 else ids[:, None]
