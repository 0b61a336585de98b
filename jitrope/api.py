"""The user's functions: what they take, in words, and what they give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from torch import Tensor

from .base.arguments import refuse
from .base.errors import InvalidInput
from .base.signature import with_words
from .ops.dispatch import call
from .ops.operation import Operation
from .ops.operations import QK_NORM_ROPE, QK_NORM_ROPE_JOINT, ROPE, ROPE_FP8, ROPE_KV_CACHE, ROPE_QKV
from .ops.values import KVCache, Norm, Positions, Quantize
from .ops.words import ONE_TABLE, unexpected
from .plan.spec import Options
from .plan.views import Tensors

if TYPE_CHECKING:
    from typing_extensions import TypedDict, Unpack
else:
    from typing import TypedDict


class JointWords(TypedDict, total=False):
    """The keywords that all functions have; `apply_rope` says what they mean."""

    interleaved: bool
    rotary_dim: int | None
    rotary_offset: int
    rounding: str


class PackedWords(JointWords, total=False):
    """Those of `prepare_packed_qkv`."""

    cos_sin_cache: Tensor | None
    freqs: Tensor | None
    freqs_cis: Tensor | None
    mscale: float
    layout: str
    inverse: bool
    check: bool


class RopeWords(PackedWords, total=False):
    """Those of `apply_rope` and `prepare_qkv`: the whole list."""

    interleaved_out: bool | None


_DEFAULTS = {**Options._field_defaults, "interleaved_out": None, "rotary_dim": None, "check": False}


@with_words(RopeWords, _DEFAULTS)
def apply_rope(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    positions: Tensor | Positions | None = None,
    inplace: bool = False,
    **words: Unpack[RopeWords],
) -> tuple[Tensor, Tensor | None]:
    """Rotate q and k by position-dependent angles, in one launch.

    Pair i of a head, (x0, x1), becomes (x0 cos_i - x1 sin_i, x1 cos_i + x0 sin_i); see RoFormer,
    arXiv:2104.09864, equation 34. The gradient is the rotation back; cos, sin and freqs get none.

    >>> q, k = jitrope.apply_rope(q, k, cos, sin)                            # (B, S, H, D), halves
    >>> q, _ = jitrope.apply_rope(q, None, cos, sin, interleaved=True)       # one tensor alone
    >>> q, k = jitrope.apply_rope(q, k, cos, sin, positions=position_ids, inplace=True)
    >>> q, k = jitrope.apply_rope(q, k, freqs=freqs, positions=jitrope.Packed(cu_seqlens))      # (T, H, D)

    Args:
        q: (B, S, Hq, D) in the default layout; fp32, fp16 or bf16; any strides, nothing is copied. D is at most 512.
        k: as q with its own number of heads (GQA, MQA), or None, which comes back in its place.
        cos, sin: tables over positions, fp32, fp16 or bf16, any strides: (P, W), or a row of tables for each batch
            entry (B, P, W), or for each head too (B, P, H, W); an axis of size 1 is shared. P is at least the number
            of positions used. W is rotary_dim / 2 (half width: an angle a pair) or rotary_dim (full width: an angle an
            element, laid out like the head; the members of a pair may differ).
        cos_sin_cache: in place of cos and sin: both in one table (P, rotary_dim), the cosines of the pairs before the
            sines, as vLLM and SGLang have it. rotary_dim is its width.
        freqs: in place of cos and sin: fp32 angles in radians, (P, W), (B, P, W) or, as Megatron and TransformerEngine
            have them, (P, 1 or B, 1, W). The kernel takes each sine and cosine once a token, with the accuracy of
            torch's own.
        freqs_cis: in place of cos and sin: complex64 cos + i sin, (P, rotary_dim / 2) or with the axes of cos.
        positions: the table's row for each token. By default a token t takes row t. A tensor of int32 or int64 ids, on
            q's device, any strides: (S) or (B, S); (T) with "thd". `Packed`: sequences one behind the other. `Starts`:
            each row goes on from a position of its own. `Mrope`: a position along each of several axes. Positions
            outside of the table come out as NaN and are never read; `check` refuses them.
        mscale: with freqs: a factor of the cosines and sines (YaRN, arXiv:2309.00071, section 3.4).
        layout: "bshd", "sbhd", "bhsd" or, for packed sequences, "thd": (T, H, D), which `Packed` implies.
        interleaved: True: pairs are (0, 1), (2, 3), ...; False: (i, i + rotary_dim / 2).
        interleaved_out: the pairing of the output, where it is another than the input's (multi-head latent attention
            rotates interleaved pairs into halves). With half-width tables only, and not in place.
        rotary_dim: even; only so many elements of a head are rotated. Default: D - rotary_offset, for tables of that
            width or half of it.
        rotary_offset: the first element of a head that is rotated; the others stay.
        inverse: rotate by the negative angles, exactly the gradient's arithmetic.
        rounding: how products and their sum are rounded, for the bits of a model's own eager code on the same device:
            "fp32": each to fp32, as real tensors are (FLUX, Wan); "complex64" and "complex128": as torch's complex
            multiply (Qwen-Image; Lumina2, whose tables are fp64); "dtype": the tables, each product and the sum to q's
            dtype (rotate-half in the model's dtype, as in transformers); "addcmul": fp32, the second product through
            `addcmul` (LTX-2). All but "dtype" round to q's dtype once.
        inplace: q and k themselves are rotated, and returned. Under autograd torch's rules for in-place operations
            hold: q and k may not be leaves that require a gradient. Their elements may not overlap in memory, and cos
            and sin must not lie in it.
        check: refuse positions outside of the table, however they are given. For finding mistakes: it waits for the
            device, and so cannot be captured in a CUDA graph or compiled.

    Returns:
        (q, k) rotated, of the shapes, dtype and (where dense) strides of the inputs.

    Raises:
        InvalidInput: the arguments do not fit together; nothing was written.
        CompileError: the kernel could not be built; the message says what to install.
    """
    tensors: Any = {"q": q, "cos": cos, "sin": sin} if k is None else {"q": q, "k": k, "cos": cos, "sin": sin}
    asked: dict[str, Any] = {"inplace": True} if inplace is True else {}
    form: Any = None
    if words or cos is None or sin is None or type(inplace) is not bool:
        out = call(ROPE, tensors, _gather(ROPE, tensors, words, _ROPE_WORDS, positions, inplace))
    else:  # the lines that everyone writes have a key that is cheaper than their names and words
        if type(positions) is Tensor:
            tensors["position_ids"], form = positions, "ids"
        elif positions is not None:
            asked, form = {**_placed(ROPE, tensors, positions), **asked}, getattr(positions, "form", "ids")
        out = call(ROPE, tensors, asked, ("apply_rope", k is None, form, inplace))
    return out["q"], out.get("k")


@with_words(RopeWords, _DEFAULTS)
def prepare_qkv(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    positions: Tensor | Positions | None = None,
    norm: Norm | None = None,
    cache: KVCache | None = None,
    quantize: Quantize | None = None,
    inplace: bool = False,
    **words: Unpack[RopeWords],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """All between the projection and attention, in one launch: norm, rope, conversion to fp8, the write to a KV cache.

    >>> q, k, v = jitrope.prepare_qkv(q, k, v, cos, sin, norm=jitrope.Norm(norm_q.weight, norm_k.weight))
    >>> q, _, v = jitrope.prepare_qkv(q, k, v, cos, sin, positions=position_ids, layout="thd",
    ...                               cache=jitrope.KVCache(k_cache, v_cache, slot_mapping))

    With a norm it is differentiable in q, k and the weights; the gradient is one launch too and the same from run to
    run. With a cache or fp8 there is no gradient, and in place none with a norm, which would need q and k as they were.

    Args:
        q, k: as `apply_rope`'s; k may be None without a cache.
        v: with a cache (B, S, Hk, D) in the default layout, stored as it is. Otherwise it is not looked at.
        cos, sin: as `apply_rope`'s. With a norm there may be no table at all: q and k are normalised only.
        norm: RMSNorm of q and k before the rotation. It does not go with cache or quantize.
        cache: where k, rotated, and v are stored.
        quantize: q, and k where there is no cache, come out as fp8.
        The others are `apply_rope`'s. No stage takes mscale, inverse, interleaved_out, packed_table or cp_size; a norm
        takes no `Packed` and freqs, a cache no `Packed` and rounding, quantize no rounding and inplace.

    Returns:
        (q, k, v) of the shapes, dtype and (where dense) strides of the inputs; v is the input. With a cache k is None,
        or with its rotate_k the input, rotated.

    Raises:
        InvalidInput, CompileError: as `apply_rope`; nothing was written.
    """
    op: Operation
    tensors: Any = {"q": q, "k": k}
    if cache is None:
        op = ROPE_FP8 if quantize is not None else ROPE if norm is None else QK_NORM_ROPE
    else:
        op, tensors["v"] = ROPE_KV_CACHE, v
    tensors.update(cos=cos, sin=sin)
    asked = _gather(op, tensors, words, _ROPE_WORDS, positions, inplace)
    if norm is not None:
        if op is not QK_NORM_ROPE:
            raise InvalidInput("prepare_qkv: norm does not go with cache or quantize; normalise in a call before")
        _add("prepare_qkv", "norm", norm, Norm, tensors, asked)
        _forget_positions(tensors, asked)
    if cache is not None:
        _add("prepare_qkv", "cache", cache, KVCache, tensors, asked)
    if quantize is not None:
        if not isinstance(quantize, Quantize):
            refuse("prepare_qkv", "quantize", quantize, "a jitrope.Quantize")
        given = quantize.on(q)
        if cache is not None and "k_scale" in given:
            raise InvalidInput("prepare_qkv: quantize has a k_scale, but k goes to the cache; give it to KVCache")
        tensors.update(given)
    out = call(op, tensors, asked)
    return out["q"], out.get("k") if cache is None else k if "rotate_k" in asked else None, v


@overload
def prepare_packed_qkv(
    qkv: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    positions: Tensor | Positions | None = None,
    q_per_group: int = 1,
    copy_v: bool = True,
    inplace: Literal[False] = False,
    **words: Unpack[PackedWords],
) -> tuple[Tensor, Tensor, Tensor]: ...


@overload
def prepare_packed_qkv(
    qkv: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    positions: Tensor | Positions | None = None,
    q_per_group: int = 1,
    inplace: Literal[True],
    **words: Unpack[PackedWords],
) -> Tensor: ...


@with_words(PackedWords, _DEFAULTS)
def prepare_packed_qkv(
    qkv: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    positions: Tensor | Positions | None = None,
    q_per_group: int = 1,
    copy_v: bool = True,
    inplace: bool = False,
    **words: Unpack[PackedWords],
) -> tuple[Tensor, Tensor, Tensor] | Tensor:
    """Split packed QKV and rotate q and k, in one launch; the gradient is one launch too.

    >>> q, k, v = jitrope.prepare_packed_qkv(qkv, cos, sin, q_per_group=4)     # 4 heads of q to one of k and v

    Args:
        qkv: (B, S, G, (q_per_group + 2) D) in the default layout ("sbhd" and "thd" are the others): each of the G
            groups holds its q_per_group heads of q, then one of k, then one of v, as a grouped-query projection leaves
            them.
        q_per_group: heads of q in a group.
        copy_v: False: v is returned as a view of qkv, and nothing of it is moved.
        inplace: q and k are rotated where they lie, v is not touched, and qkv itself is returned: for attention that
            takes packed input or views.
        The others are `apply_rope`'s, without interleaved_out; tables for each head are refused.

    Returns:
        q (B, S, G q_per_group, D), k and v (B, S, G, D), contiguous; v a view if asked. Of the tokens after the last
        sequence q and k are zero; v is copied whole. In place: qkv.

    Raises:
        InvalidInput, CompileError: as `apply_rope`.
    """
    tensors: Any = {"qkv": qkv, "cos": cos, "sin": sin}
    asked = _gather(ROPE_QKV, tensors, words, _PACKED_WORDS, positions, inplace)
    asked["q_per_group"] = q_per_group
    if copy_v is not True:
        asked["copy_v"] = copy_v
    out = call(ROPE_QKV, tensors, asked)
    return qkv if "qkv" in out else (out["q"], out["k"], out["v"])


@with_words(JointWords, _DEFAULTS)
def prepare_joint_qkv(
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    cos: Tensor | Sequence[Tensor] | None = None,
    sin: Tensor | Sequence[Tensor] | None = None,
    *,
    norm: Norm | Sequence[Norm],
    cos_sin_cache: Tensor | Sequence[Tensor] | None = None,
    freqs_cis: Tensor | Sequence[Tensor] | None = None,
    **words: Unpack[JointWords],
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of two streams in joint tensors: norm, rope and concatenation in one launch.

    For text and image tokens with projections and norms of their own (FLUX, Qwen-Image, HunyuanVideo): q and k of both
    streams are normalised and rotated, v is copied, and one stream is written behind the other. The gradient is a
    launch for each stream.

    >>> q, k, v = jitrope.prepare_joint_qkv(text_qkv, image_qkv, cos, sin, norm=(text_norm, image_norm))

    Args:
        first, second: (q, k, v) of the tokens in front and of those behind, (B, S1, H, D) and (B, S2, H, D),
            with the same H and D in both; any strides.
        cos, sin, or another table: as `apply_rope`'s, over both streams, at least S1 + S2 rows; or a pair of each, of
            the first stream and of the second. A stream that is not to be rotated has cosines of one and sines of
            zero. No table at all: q and k are normalised only.
        norm: the `Norm` of each stream, or one for both. They differ in their weights alone, and are each head's own.
        The others are `apply_rope`'s.

    Returns:
        q, k and v, (B, S1 + S2, H, D), contiguous.

    Raises:
        InvalidInput, CompileError: as `apply_rope`.
    """
    name = "prepare_joint_qkv"
    tensors: dict[str, Any] = {}
    for label, stream in (("first", first), ("second", second)):
        tensors.update(zip((f"{label}_q", f"{label}_k", f"{label}_v"), _parts(name, label, stream, 3)))
        if not isinstance(q := tensors[f"{label}_q"], Tensor) or q.is_nested or q.dim() != 4:
            refuse(name, f"{label}'s q", q, "a tensor (B, S, H, D)")
    tables: dict[str, Any] = {"cos": cos, "sin": sin, "cos_sin_cache": cos_sin_cache, "freqs_cis": freqs_cis}
    second_tables = {}
    for label, table in tables.items():
        if table is not None and not isinstance(table, Tensor):
            tables[label], second_tables[label] = both = _parts(name, label, table, 2)
            if not all(isinstance(x, Tensor) for x in both):
                refuse(name, label, table, "a tensor, or a tuple of 2 tensors")
    if len(second_tables) > 0:
        tensors.update(zip(("second_cos", "second_sin"), _second_tables(name, tables, second_tables)))
    tensors.update(tables)
    asked = _gather(QK_NORM_ROPE_JOINT, tensors, words, _JOINT_WORDS)
    _forget_positions(tensors, asked)
    norms = (norm, norm) if isinstance(norm, Norm) else _parts(name, "norm", norm, 2)
    of_second: dict[str, Any] = {}
    for value, given in zip(norms, (tensors, of_second)):
        _add(name, "norm", value, Norm, given, asked)
    if norms[0].words["norm"] != norms[1].words["norm"]:
        raise InvalidInput(f"{name}: the norms are {norms[0]} and {norms[1]}; they may differ in their weights alone")
    tensors.update({"second_" + label: weight for label, weight in of_second.items()})
    out = call(QK_NORM_ROPE_JOINT, tensors, asked)
    return out["q"], out["k"], out["v"]


_JOINT_WORDS = frozenset(JointWords.__annotations__)
_PACKED_WORDS = _JOINT_WORDS | frozenset(PackedWords.__annotations__)
_ROPE_WORDS = _PACKED_WORDS | frozenset(RopeWords.__annotations__)


def _gather(
    op: Operation, tensors: Tensors, words: Any, allowed: frozenset[str], positions: Any = None, inplace: bool = False
) -> dict[str, Any]:
    """Put the tensors among the words to the others, without those that are None; the words that stay."""
    for word in [*words]:
        if word not in allowed:
            raise unexpected(op.function, word)
        if word in ONE_TABLE:
            tensors[word] = words.pop(word)
    if inplace is not False:
        words["inplace"] = inplace
    if positions is not None:
        words = {**_placed(op, tensors, positions), **words}
    for name in [*tensors]:
        if tensors[name] is None:
            del tensors[name]
    return words  # type: ignore[no-any-return]


def _placed(op: Operation, tensors: Tensors, positions: Any) -> dict[str, Any]:
    """Put the tensors of `positions` to the others; its words."""
    if isinstance(positions, Positions):
        tensors.update(positions.tensors)
        return positions.words
    if not isinstance(positions, Tensor):
        refuse(op.function, "positions", positions, "a tensor of ids, or a jitrope.Packed, Mrope or Starts")
    tensors["position_ids"] = positions
    return {}


def _forget_positions(tensors: Tensors, words: dict[str, Any]) -> None:
    """Without a table nothing is rotated, at whatever positions."""
    if not any(name in tensors for name in ("cos", "sin", *ONE_TABLE)):
        for name in ("position_ids", "start_positions"):
            tensors.pop(name, None)
        for word in ("mrope_section", "mrope_interleaved", "rotary_dim", "rotary_offset"):
            words.pop(word, None)


def _add(name: str, label: str, value: Any, kind: Any, tensors: Tensors, words: dict[str, Any]) -> None:
    """Put what a value holds to a call's tensors and words."""
    if not isinstance(value, kind):
        refuse(name, label, value, f"a jitrope.{kind.__name__}")
    tensors.update(value.tensors)
    words.update(value.words)


def _second_tables(name: str, first: dict[str, Any], second: dict[str, Any]) -> list[Tensor]:
    """The tables of the second stream, of the first one's kind."""
    given = {label for label, table in first.items() if table is not None}
    if given != second.keys():
        had, other = (" and ".join(sorted(labels)) for labels in (given, second))
        raise InvalidInput(f"{name}: the first table is {had}, the second {other}; pass two of one kind")
    return list(second.values())


def _parts(name: str, label: str, value: Any, count: int) -> tuple[Any, ...]:
    """So many things of an argument that has them side by side."""
    if not isinstance(value, (list, tuple)) or len(value) != count:
        refuse(name, label, value, f"a tuple of {count} {'norms' if label == 'norm' else 'tensors'}")
    return tuple(value)
