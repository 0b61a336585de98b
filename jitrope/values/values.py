"""Values that a user makes once and passes to every layer: positions, norms and caches; see also `quantize`.

The constructor checks types, words and numbers; a call checks shapes and dtypes of the tensors. A value in a call takes
no more time than keywords.
Values can be pickled, printed and traced by torch.compile. Two values are equal only if they are the same object.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..base.arguments import flag, items, number, refuse, tensor, whole, wholes, word
from ..base.errors import InvalidInput
from ..base.views import MEANS, Tensors
from ..stages.norm import KINDS as NORM_KINDS
from ..stages.norm import OF as NORM_OF
from ..stages.norm import ROUNDINGS as NORM_ROUNDINGS
from ..stages.norm import NormOptions
from .asked import Value
from .stand_ins import constant

if TYPE_CHECKING:
    from collections.abc import Sequence


def flags(name: str, **given: Any) -> dict[str, bool]:
    """The arguments that are True. They may be True or False."""
    return {label: True for label, value in given.items() if flag(name, label, value)}


class Positions(Value):
    """The table's row for each token; see `apply_rope`."""

    def _placed(self, start_positions: Tensor | None = None, cp_size: int = 1, cp_rank: int = 0) -> None:
        name = type(self).__name__
        if start_positions is not None:
            self.tensors["start_positions"] = tensor(name, "start_positions", start_positions)
        size, rank = whole(name, "cp_size", cp_size), whole(name, "cp_rank", cp_rank)
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
            self.words["max_seqlen"] = whole("Packed", "max_seqlen", max_seqlen)
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
            token and axis. A, the number of sections, is at most 4.
        mrope_section: the number of pairs of each axis, rotary_dim / 2 in all. A pair takes the id of its axis.
        mrope_interleaved: True: the pairs of axis a > 0 are a, a + A, a + 2A, ..., as many as its section has; all
            others belong to axis 0 (Qwen3-VL). False: the pairs of a section are neighbours (Qwen2-VL).

    Raises:
        InvalidInput: an argument has a wrong type.
    """

    def __init__(self, position_ids: Tensor, mrope_section: Sequence[int], mrope_interleaved: bool = False) -> None:
        self.tensors = {"position_ids": tensor("Mrope", "position_ids", position_ids)}
        self.words = {"mrope_section": wholes("Mrope", "mrope_section", mrope_section, 0)}
        if not self.words["mrope_section"]:
            refuse("Mrope", "mrope_section", mrope_section, "the number of pairs of each axis")
        self.words.update(flags("Mrope", mrope_interleaved=mrope_interleaved))


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

    Raises:
        InvalidInput: an argument has a wrong type.
    """

    def __init__(self, position_ids: Tensor) -> None:
        self.tensors = {"position_ids": tensor("Shifts", "position_ids", position_ids)}
        self.words = {"shifts": True}


class Norm(Value):
    """A norm of q and k: x / sqrt(mean(x^2) + eps) times the weight (RMSNorm, arXiv:1910.07467, eq. 4).

    Make one in each forward, because FSDP and `torch.func` replace a module's parameters.

    >>> q, k = torch.randn(2, 1, 16, 8, 64)
    >>> q, k, _ = jitrope.prepare_qkv(q, k, None, norm=jitrope.Norm(torch.ones(64), torch.ones(64)))

    Args:
        q_weight, k_weight: (D), or (H D) with across_heads; contiguous, in fp32, fp16 or bf16, and all weights and
            biases in one dtype; None: no weight. Without weights it is the L2 norm of Llama 4; with weights of
            D ** -0.5, and eps / D as eps, TransformerEngine's `L2Normalization`.
        q_bias, k_bias: like the weights, added at the end; only with "layer_norm".
        kind: "rms_norm", or "layer_norm": the mean of x is subtracted first (arXiv:1607.06450; Phi, Persimmon,
            CogVideoX, HunyuanDiT).
        eps: added to the mean of the squares. Qwen3, FLUX, Qwen-Image and Wan have this default in transformers and
            diffusers.
        across_heads: one mean over all heads of a token (Wan, LTX), not one for each head (FLUX, Qwen3).
        mean_squares: only with across_heads, if each rank has a part of the heads (tensor parallelism of Wan, LTX-2,
            MiniMax-M2): the means of x^2 of each token over the heads of all ranks, (q's, k's), in fp32, (B, S), with
            "thd" (T). k's is None without k. Pass this rank's part of the weights. If all ranks have equally many
            heads, in the default layout: `mean = q.float().square().mean((-2, -1))`, then
            `all_reduce(mean, op=ReduceOp.AVG)`. across_heads then also goes with a cache, `DynamicQuantize` and
            hadamard. mean_squares cannot be combined with "layer_norm", v_norm and `prepare_joint_qkv`. They get a
            gradient. To train, use an all_reduce that passes it on, such as
            `torch.distributed.nn.functional.all_reduce(mean, op=ReduceOp.AVG)`, which returns the mean of all ranks.
            A mean's gradient is computed from q's (or k's) gradient in its dtype.
        zero_centered: the factor is 1 + weight (Gemma, Qwen3-Next).
        after_rope: the norm follows the rotation (Hunyuan, Llama 4, TransformerEngine's default); by default it is
            before.
        of: "qk", "q", "k" or "v". A q or k that is not normalised is only rotated, with the bits of a call without a
            norm (q of DeepSeek-V3.2's indexer). It has no weights, and mean_squares is refused. "v": with a cache, v
            alone is normalised on its way there, by one mean over all heads of a token, as the latents of MLA are (kv_a
            norm of DeepSeek); kind is "rms_norm", and across_heads, after_rope and v_norm are refused.
        v_weight: (Hv D), only with of="v".
        v_norm: normalise v too, without a weight (Gemma 3n and 4), in the same launch. Without a cache v takes a launch
            of its own in these cases: it has another shape or dtype than k; inplace; across_heads; tables for each
            head; DTensors; heads rotated in part, if v is not converted; Ulysses or quantize, unless out has a tensor
            for v. Its gradient takes a launch of its own in the same cases, and if q or k gets no gradient.
        rounding: how often the norm's result is rounded to q's dtype; with after_rope the rotated elements are rounded
            before the norm too, except with "none". "none": never. "once": after the weight, as in torch.nn.RMSNorm and
            LayerNorm. "twice": before and after the weight, as in the RMSNorm of transformers and diffusers. Both give
            the bits of those modules and a rotation, in the order of after_rope: on a CPU always; on a GPU with
            "rms_norm" for aligned heads of 64, 128 and 256 that are rotated whole, or in their first 16, 32, 64 or 128
            elements ("twice": of 128 alone); across heads those that are rotated whole, "once", in fp16 and bf16, up to
            6,144 elements a token. In other cases elements are summed in another order, and a few results differ in the
            last bit.

    Raises:
        InvalidInput: an argument is wrong, or two do not fit together.
    """

    def __init__(
        self,
        q_weight: Tensor | None = None,
        k_weight: Tensor | None = None,
        *,
        q_bias: Tensor | None = None,
        k_bias: Tensor | None = None,
        v_weight: Tensor | None = None,
        kind: str = "rms_norm",
        eps: float = 1e-6,
        across_heads: bool = False,
        mean_squares: Sequence[Tensor | None] | None = None,
        zero_centered: bool = False,
        after_rope: bool = False,
        of: str = "qk",
        v_norm: bool = False,
        rounding: str = "none",
    ) -> None:
        kind = word("Norm", "kind", kind, NORM_KINDS)
        of = word("Norm", "of", of, NORM_OF)
        weights = {"q_weight": q_weight, "k_weight": k_weight, "q_bias": q_bias, "k_bias": k_bias, "v_weight": v_weight}
        self.tensors = {label: tensor("Norm", label, x) for label, x in weights.items() if x is not None}
        on = flags("Norm", across_heads=across_heads, zero_centered=zero_centered, after_rope=after_rope, v_norm=v_norm)
        apart = [label for label in self.tensors if label[0] not in of]
        if of == "v":
            apart += [label for label in ("across_heads", "after_rope", "v_norm") if label in on]
            apart += ["kind='layer_norm'"] * (kind == "layer_norm")
        for label in apart:
            raise InvalidInput(f"Norm: {label} does not go with of={of!r}; leave it out")
        if mean_squares is not None:
            without = {"across_heads=False": "across_heads" not in on, "v_norm": "v_norm" in on}
            without.update({f"of={of!r}": of != "qk", f"kind={kind!r}": kind == "layer_norm"})
            for label in [label for label, refused in without.items() if refused]:
                raise InvalidInput(f"Norm: mean_squares does not go with {label}; leave one out")
            must = "those of q and k: two tensors, or a tensor and None"
            means = items("Norm", "mean_squares", mean_squares, must)
            if len(means) != 2 or not isinstance(means[0], Tensor) or not isinstance(means[1], (Tensor, type(None))):
                refuse("Norm", "mean_squares", mean_squares, must)
            self.tensors.update({name: x for name, x in zip(MEANS, means) if x is not None})
        rounding = word("Norm", "rounding", rounding, NORM_ROUNDINGS)
        if type(eps := number("Norm", "eps", eps)) is float and eps < 0:
            refuse("Norm", "eps", eps, "0 or above")
        self.words = {"norm": NormOptions(rounding, **on, kind=kind, of=of, eps=eps)}

    def _arguments(self) -> dict[str, Any]:
        default, norm = NormOptions()._asdict(), self.words["norm"]._asdict()
        found = {name: x for name, x in (*self.tensors.items(), *norm.items()) if x != default.get(name)}
        means = tuple([found.pop(name, None) for name in MEANS])
        return found if means[0] is None else {**found, "mean_squares": means}


class Ulysses(Value):
    """As `out=`: return q, k and v as (ranks, B, S, H / ranks, D), contiguous, the layout that Ulysses sends.

    Each rank's group of heads is in one piece, so `torch.distributed.all_to_all_single` takes the results as they are
    (arXiv:2309.14509). The gradient arrives in that layout. See `apply_rope` for buffers of your own in it.

    >>> q, k, v = torch.randn(3, 1, 16, 8, 64)
    >>> cos, sin = jitrope.tables.cos_sin(16, jitrope.tables.inv_freq(rotary_dim=64)[0])
    >>> q, k, v = jitrope.prepare_qkv(q, k, v, cos, sin, out=jitrope.Ulysses(4))
    >>> q.shape
    torch.Size([4, 1, 16, 2, 64])

    Args:
        ranks: the number of ranks; it must divide the numbers of heads. With "sbhd" and the other layouts the axis of
            ranks comes first too.

    Raises:
        InvalidInput: ranks is not a whole number of at least 1.
    """

    def __init__(self, ranks: int) -> None:
        self.tensors, self.words = {}, {"ulysses_degree": int(whole("Ulysses", "ranks", ranks, 1))}

    def _arguments(self) -> dict[str, Any]:
        return {"ranks": self.words["ulysses_degree"]}


def scales(name: str, like: Tensor, **given: float | Tensor | None) -> Tensors:
    """The scales that are not None, as tensors on the device of `like`."""
    return {label: _scale(name, label, scale, like) for label, scale in given.items() if scale is not None}


def _scale(name: str, label: str, scale: float | Tensor, like: Tensor) -> Tensor:
    if isinstance(scale, Tensor) or not isinstance(like, Tensor):
        return scale
    value = _number(name, label, scale)
    with getattr(like, "fake_mode", None) or nullcontext():  # the mode of a fake tensor need not be active
        made: Tensor = _scale_of(like.device, value, label)
    return made


def divisors(name: str, needed: str = "", **given: Any) -> dict[str, Any]:
    """The scales that are not None. fp32 must hold the reciprocal of a number, by which a call multiplies."""
    found = {label: scale for label, scale in given.items() if scale is not None or label == needed}
    for label, scale in found.items():
        if not isinstance(scale, Tensor) and _number(name, label, scale) <= 2.0**-128 + 2.0**-150:  # fp32: 2 ** -128
            refuse(name, label, scale, "above 2.94e-39, so that fp32 holds its reciprocal")
    return found


def _number(name: str, label: str, scale: Any) -> float:
    value = number(name, label, scale, or_else=", or a tensor in fp32 on q's device")
    if type(value) is float and abs(value) > torch.finfo(torch.float32).max:
        refuse(name, label, scale, "a number that fp32 holds")
    return value


@constant
def _scale_of(device: torch.device, scale: float, label: str) -> Tensor:
    """A separate tensor for each argument, because guards refuse a tensor that is given twice."""
    return torch.full((), scale, dtype=torch.float32, device=device)
