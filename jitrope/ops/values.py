"""The values that a user makes once and hands to every layer: where tokens are, and what else a launch does.

Each is checked when it is made. A call takes its tensors by name and its words, so that a value costs no more than
keywords would. A value may be pickled, printed and traced by torch.compile. Two values are equal if they are one
object.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..base.arguments import flag, number, refuse, shown, tensor, whole, wholes, word
from ..plan.problem import constant
from ..plan.spec import NORM_ROUNDINGS, NormOptions
from ..plan.views import Tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

_INTEGERS = (torch.int32, torch.int64)


class Value:
    """Tensors by name, and words that are not the defaults. It does not change."""

    tensors: Tensors
    words: dict[str, Any]

    def __repr__(self) -> str:
        parts = [f"{name}={shown(x)}" for name, x in (*self.tensors.items(), *self.words.items())]
        return f"{type(self).__name__}({', '.join(parts)})"


class Positions(Value):
    """Which row of the table a token takes; `apply_rope` describes it. Ids are given as a tensor."""

    form: tuple[Any, ...]  # names of its tensors, and its words

    def _complete(self, start_positions: Tensor | None = None, cp_size: int = 1, cp_rank: int = 0) -> None:
        name = type(self).__name__
        if start_positions is not None:
            self.tensors["start_positions"] = tensor(name, "start_positions", start_positions)
        size, rank = whole(name, "cp_size", cp_size), whole(name, "cp_rank", cp_rank)
        if size != 1 or rank != 0:
            self.words.update(cp_size=size, cp_rank=rank)
        self.form = (*self.tensors, *self.words.items())


class Packed(Positions):
    """Sequences one behind the other, (T, H, D): positions restart at 0 in each. The layout is "thd".

    >>> q, k = jitrope.apply_rope(q, k, cos, sin, positions=jitrope.Packed(cu_seqlens))

    Args:
        cu_seqlens: int32 or int64 offsets (N + 1) of N sequences, on q's device, from 0 and ascending. They are not
            read on the host. Tokens after the last sequence come out as zeros, and in place they stay. Tokens past the
            table's end come out as NaN.
        max_seqlen: the longest sequence, if the host knows it.
        start_positions: int32 or int64, (N): the position of the first token of each sequence; default 0.
        packed_table: the table has a row for each token of the batch, so that positions do not restart (the tables of
            mRoPE, say).
        cp_size, cp_rank: context parallelism: q and k hold this rank's chunks cp_rank and 2 cp_size - 1 - cp_rank of
            the 2 cp_size chunks of every sequence, one behind the other. cu_seqlens, max_seqlen and the tables are
            those of the whole batch. Sequences may have any length: token t of the batch gives chunk t % (2 cp_size)
            of its sequence a place, so that a sequence's chunks differ by one token at most
            (`jitrope.context_parallel.Partition`).

    Raises:
        InvalidInput: an argument is of another type. Its values are not looked at; see `check` of `apply_rope`.
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
            self.words["max_seqlen"] = whole("Packed", "max_seqlen", max_seqlen)
        if flag("Packed", "packed_table", packed_table):
            self.words["packed_table"] = True
        self._complete(start_positions, cp_size, cp_rank)


class Starts(Positions):
    """Each batch row goes on from a position of its own, or the rows are a rank's part of longer ones.

    Args:
        start_positions: int32 or int64, (B), on q's device: the position of the first token of each row; default 0.
            Positions outside of the table come out as NaN.
        cp_size, cp_rank: context parallelism, as in `Packed`, with sequences of one length and chunks of one size.

    Raises:
        InvalidInput: an argument is of another type.
    """

    def __init__(self, start_positions: Tensor | None = None, *, cp_size: int = 1, cp_rank: int = 0) -> None:
        self.tensors, self.words = {}, {}
        self._complete(start_positions, cp_size, cp_rank)


class Mrope(Positions):
    """A position along each of several axes (multimodal rope, arXiv:2409.12191; the axial rope of images and video).

    Args:
        position_ids: int32 or int64, (A, S) or (A, B, S), with "thd" (A, T), on q's device: as many rows of the table
            a token as there are sections. A is at most 4.
        mrope_section: pairs of each axis, rotary_dim / 2 in all; the pairs of each section take the id of their axis.
        mrope_interleaved: the pairs of axis a > 0 are a, a + A, a + 2A, ..., as many as its section has, and all others
            are those of axis 0 (Qwen3-VL). Otherwise a section's pairs are neighbours (Qwen2-VL).

    Raises:
        InvalidInput: an argument is of another type.
    """

    def __init__(self, position_ids: Tensor, mrope_section: Sequence[int], mrope_interleaved: bool = False) -> None:
        self.tensors = {"position_ids": tensor("Mrope", "position_ids", position_ids)}
        self.words = {"mrope_section": wholes("Mrope", "mrope_section", mrope_section, 0)}
        if not self.words["mrope_section"]:
            refuse("Mrope", "mrope_section", mrope_section, "the number of pairs of each axis")
        if flag("Mrope", "mrope_interleaved", mrope_interleaved):
            self.words["mrope_interleaved"] = True
        self._complete()


class Norm(Value):
    """RMSNorm of q and k before the rotation: x / sqrt(mean(x^2) + eps) times the weight.

    The formula is equation 4 of arXiv:1910.07467.

    Make one where the weights are at hand: FSDP and `torch.func` replace a module's parameters.

    Args:
        q_weight, k_weight: (D), or (H D) with across_heads; fp32, fp16 or bf16; None: no weight.
        eps: added to the mean of the squares. The default is that of Qwen3, FLUX, Qwen-Image and Wan in transformers
            and diffusers.
        across_heads: one mean over all heads of a token (Wan, LTX), not one for each head (FLUX, Qwen3).
        zero_centered: the factor is 1 + weight (Gemma, Qwen3-Next).
        rounding: between norm and rope. "none": nothing is rounded. "once": to q's dtype, behind the weight, as
            torch.nn.RMSNorm does; "twice": before the weight and behind it, as transformers' and diffusers' own RMSNorm
            do. Both give those chains' bits: on a CPU always, on a GPU for heads of 64, 128 and 256, rotated whole and
            aligned, across heads only "once", in fp16 and bf16. Elsewhere squares are summed in another order, and a
            rare element differs in its last bit.

    Raises:
        InvalidInput: an argument is of another type.
    """

    def __init__(
        self,
        q_weight: Tensor | None = None,
        k_weight: Tensor | None = None,
        *,
        eps: float = 1e-6,
        across_heads: bool = False,
        zero_centered: bool = False,
        rounding: str = "none",
    ) -> None:
        self.tensors = {}
        for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
            if weight is not None:
                self.tensors[name] = tensor("Norm", name, weight)
        across, centred = flag("Norm", "across_heads", across_heads), flag("Norm", "zero_centered", zero_centered)
        rounding = word("Norm", "rounding", rounding, NORM_ROUNDINGS)
        self.words = {"norm": NormOptions(rounding, across, centred, number("Norm", "eps", eps))}


class KVCache(Value):
    """Where the call stores k, rotated, and v: a paged cache as vLLM's (arXiv:2309.06180).

    Args:
        k_cache, v_cache: (slots, Hk, D), or pages (pages, rows, Hk, D) (a cache with the heads before the rows is a
            transposed view); any strides; of k's dtype or torch.float8_e4m3fn.
        slot_mapping: int32 or int64, an entry for each token, (B, S) or flat: the slot, page * rows + row, that its k
            and v go to. Negative slots are padding, and slots past the end do not exist: nothing is stored (`check`
            refuses the latter). Of two tokens with one slot either may win.
        k_scale, v_scale: with fp8 caches, which hold k / k_scale and v / v_scale; see `Quantize`.
        rotate_k: k itself is rotated too, in place.

    Raises:
        InvalidInput: an argument is of another type.
    """

    def __init__(
        self,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        *,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        rotate_k: bool = False,
    ) -> None:
        self.tensors = {
            "k_cache": tensor("KVCache", "k_cache", k_cache),
            "v_cache": tensor("KVCache", "v_cache", v_cache),
            "slot_mapping": tensor("KVCache", "slot_mapping", slot_mapping),
            **scales("KVCache", k_cache, k_scale=k_scale, v_scale=v_scale),
        }
        self.words = {"rotate_k": True} if flag("KVCache", "rotate_k", rotate_k) else {}


class Quantize(Value):
    """q, and without a cache k, come out as torch.float8_e4m3fn (arXiv:2209.05433).

    Args:
        q_scale, k_scale: what one unit of the output stands for: stored is y / scale, at most 448 in size, rounded once
            from fp32 (times the reciprocal of the scale). Numbers, or fp32 tensors of one element, () or (1), on q's
            device, which are not read on the host. A cache has its own scale of k.

    Raises:
        InvalidInput: an argument is of another type.
    """

    def __init__(self, q_scale: float | Tensor, k_scale: float | Tensor | None = None) -> None:
        self.given = {"q_scale": q_scale, "k_scale": k_scale}
        for label, scale in self.given.items():
            if not isinstance(scale, Tensor) and (scale is not None or label == "q_scale"):
                _number("Quantize", label, scale)
        self.tensors, self.words = {}, {}

    def on(self, q: Tensor) -> Tensors:
        """The scales as tensors on q's device. Shapes and errors are those of `Quantize`."""
        return scales("Quantize", q, **self.given)

    def __repr__(self) -> str:
        return f"Quantize({', '.join(f'{name}={shown(x)}' for name, x in self.given.items() if x is not None)})"


def scales(name: str, like: Tensor, **given: float | Tensor | None) -> Tensors:
    """Scales as the kernels read them, tensors on the device of `like`."""
    return {label: _scale(name, label, scale, like) for label, scale in given.items() if scale is not None}


def _scale(name: str, label: str, scale: float | Tensor, like: Tensor) -> Tensor:
    if isinstance(scale, Tensor) or not isinstance(like, Tensor):
        return scale  # type: ignore[return-value]
    value = _number(name, label, scale)
    with getattr(like, "fake_mode", None) or nullcontext():  # a fake tensor's, which need not be active
        made: Tensor = _scale_of(like.device, value, label)
    return made


def _number(name: str, label: str, scale: Any) -> float:
    value = number(name, label, scale, or_else=", or a tensor of one fp32 number on q's device")
    if type(value) is float and abs(value) > torch.finfo(torch.float32).max:
        refuse(name, label, scale, "a number that fp32 holds")
    return value


@constant
def _scale_of(device: torch.device, scale: float, label: str) -> Tensor:
    """One for each argument: a guard refuses a tensor that it has twice."""
    return torch.full((), scale, device=device)
