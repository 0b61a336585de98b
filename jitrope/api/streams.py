"""The public function for two streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..base.arguments import parts, refuse
from ..base.errors import InvalidInput
from ..checks.words import second_tables
from ..run.gather import add, gather, result, sent
from ..run.public import repeated
from ..sinks.cache import KVCache
from ..sinks.results import Ulysses  # noqa: F401  in the signature
from ..sources.streams import STREAMED
from ..stages.convert import DynamicQuantize, Quantize
from ..stages.norm import Norm
from ..stages.positions import Positions
from .keywords import JointWords, with_words

if TYPE_CHECKING:
    from typing_extensions import Unpack

_JOINT_WORDS = frozenset(JointWords.__annotations__)


@repeated
@with_words(JointWords)
def prepare_joint_qkv(
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    cos: Tensor | Sequence[Tensor] | None = None,
    sin: Tensor | Sequence[Tensor] | None = None,
    *,
    positions: Tensor | Positions | None = None,
    norm: Norm | Sequence[Norm] | None = None,
    cache: KVCache | None = None,
    quantize: Quantize | DynamicQuantize | None = None,
    hadamard: bool = False,
    cos_sin_cache: Tensor | Sequence[Tensor] | None = None,
    freqs: Tensor | None = None,
    freqs_cis: Tensor | Sequence[Tensor] | None = None,
    **words: Unpack[JointWords],
) -> tuple[Any, Any, Any]:
    """Prepare two streams for joint attention in one launch: norm, rope, concatenation, conversion to fp8, int8 or fp4.

    It serves text and image tokens that have their own projections and norms (FLUX, Qwen-Image, HunyuanVideo). q and k
    of both streams are normalised and rotated, v is copied, and the streams are concatenated along the sequence. The
    gradient is one launch for each stream, and with v_norm or hadamard another one. With quantize or tensors in out
    there is no gradient.

    >>> text_qkv, image_qkv = (torch.randn(3, 1, tokens, 8, 64).unbind() for tokens in (4, 12))
    >>> cos, sin = jitrope.tables.cos_sin(16, jitrope.tables.inv_freq(rotary_dim=64)[0])
    >>> q, k, v = jitrope.prepare_joint_qkv(text_qkv, image_qkv, cos, sin, norm=jitrope.Norm(eps=1e-5))

    Args:
        first, second: (q, k, v) of each stream in the order of the result, (B, S1, H, D) and (B, S2, H, D), with the
            same H and D; any strides.
        cos, sin, or another table: as in `apply_rope`, for both streams, with at least S1 + S2 rows; or a pair, one for
            each stream, except freqs. To leave the first stream unrotated, pass unrotated=S1 and a table for the second
            alone. Without a table q and k are not rotated.
        positions: the row of each token of both streams, (S1 + S2) or (B, S1 + S2), or `Mrope`. It goes with one table.
        norm: the `Norm` of each stream, or one for both. Only their weights may differ; across_heads is refused. None:
            the streams are rotated and concatenated.
        cache: store k and v of both streams, as in `prepare_qkv`; slots and pages are of the concatenated tokens. There
            is no rotate_k, and no gradient.
        quantize, hadamard: as in `prepare_qkv`, of the concatenated q, k and v, with one set of scales for both streams
            (the operands of FlashAttention-3 in fp8, and of SageAttention). per="head" and "kv_head" take two launches.
        out: (q_out, k_out, v_out), as in `apply_rope`, for the concatenated q, k and v; or `Ulysses`.
        The other arguments are those of `apply_rope`. unrotated counts from the first stream's first token, and goes
            with one table.

    Returns:
        q, k and v, (B, S1 + S2, H, D), contiguous unless they are given; with a cache k and v are None. With quantize
        they are as in `prepare_qkv`.

    Raises:
        InvalidInput, CompileError: as in `apply_rope`.
    """
    name = "prepare_joint_qkv"
    tensors: dict[str, Any] = {}
    for label, stream in (("first", first), ("second", second)):
        tensors.update(zip((f"{label}_q", f"{label}_k", f"{label}_v"), parts(name, label, stream, 3)))
        if not isinstance(q := tensors[f"{label}_q"], Tensor) or q.is_nested or q.dim() != 4:
            refuse(name, f"{label}'s q", q, "a tensor (B, S, H, D)")
    tables: Any = {"cos": cos, "sin": sin, "cos_sin_cache": cos_sin_cache, "freqs": freqs, "freqs_cis": freqs_cis}
    tensors.update({**second_tables(name, tables), **tables})
    norms: Any = parts(name, "norm", norm, 2) if isinstance(norm, (list, tuple)) else (norm, norm)
    asked = gather(STREAMED, tensors, words, _JOINT_WORDS, positions, False, norms[0], cache, quantize, hadamard)
    if norm is not None:
        of_second: dict[str, Any] = {}
        add(name, "norm", norms[1], (Norm,), of_second, {})
        if getattr(norms[0], "words", None) != getattr(norms[1], "words", None):
            raise InvalidInput(f"{name}: the norms are {norms[0]} and {norms[1]}; only their weights may differ")
        tensors.update({"second_" + label: weight for label, weight in of_second.items()})
    made = sent(STREAMED, tensors, asked, quantize)
    return result(made, "q"), result(made, "k"), result(made, "v")
