"""RMSNorm of q and k, rope, and the joining of two streams, in one launch where the host's modules allow it.

Where they do not (a norm with hooks, offloaded, of another class or dtype), the norm is called as the host calls it,
and rope alone is jitrope's. Each call of `norm_rope` and `joint` is counted once, with the reason if it is not fused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...api import apply_rope, qk_norm_rope, qk_norm_rope_, qk_norm_rope_joint
from .counting import note
from .tables import lengthened, no_turn

Pair = tuple[Tensor, Tensor]
Parts = tuple[Tensor, Tensor, Tensor]

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)

# Where a norm's class rounds to q's dtype; see `jitrope.qk_norm_rope`.
_NORM_ROUNDING = {
    ("torch.nn.modules.normalization", "RMSNorm"): "once",
    ("diffusers.models.normalization", "RMSNorm"): "twice",
}
# A torch.nn.RMSNorm without an eps takes that of the type it computes in, fp32 for fp32, fp16 and bf16 alike
# (its documentation, and ATen's rms_norm on CPU and CUDA).
_DEFAULT_EPS = torch.finfo(torch.float32).eps


class Rope(NamedTuple):
    """Tables and arithmetic of a rotation, as `jitrope.apply_rope` has them: cos and sin, or freqs_cis."""

    cos: Tensor | None = None
    sin: Tensor | None = None
    freqs_cis: Tensor | None = None
    rounding: str = "fp32"
    interleaved: bool = True


def unfit(x: Tensor, tables: Any, count: int, dtypes: Sequence[torch.dtype], rows: int | None = None) -> str:
    """Why a call is not ours; "" if it is. The tables are so many tensors; (`rows`, W) each, if rows are given.

    A call without rope has a count of 0, whatever its tables are.
    """
    if x.dtype not in _FLOATS or x.device.type not in ("cpu", "cuda"):
        return "the dtype or device of the activations"
    if torch.is_autocast_enabled(x.device.type):
        return "autocast"
    if count and not (isinstance(tables, (tuple, list)) and len(tables) == count):
        return "the tables' form"
    for table in tables if count else ():
        # Tables that stayed on the CPU are moved, as the hosts do.
        if (
            not isinstance(table, Tensor)
            or table.dtype not in dtypes
            or table.device.type not in ("cpu", x.device.type)
        ):
            return "the tables' dtype or device"
        if table.requires_grad or (rows is not None and (table.dim() != 2 or table.shape[0] != rows)):
            return "the tables' shape or gradient"
    return ""


def norm_of(module: Any) -> tuple[Tensor | None, float, str] | None:
    """A norm's (weight, eps, norm_rounding), or None for a module that has to be called.

    Such are other classes (wrapped and parametrized norms too), a bias, a weight that is no plain tensor,
    and modules with hooks or a `forward` of their own, which is how accelerate and diffusers offload.
    """
    rounding = _NORM_ROUNDING.get((type(module).__module__, type(module).__name__))
    if rounding is None or "forward" in module.__dict__ or module._forward_hooks or module._forward_pre_hooks:
        return None
    if module._backward_hooks or module._backward_pre_hooks:
        return None
    # Not by the module's own look-up, which takes microseconds. Flat-parameter sharding puts plain tensors beside.
    parameters = module._parameters
    weight = module.__dict__.get("weight", parameters.get("weight"))
    if weight is not None and (type(weight) not in (nn.Parameter, Tensor) or weight.dim() != 1):
        return None
    if module.__dict__.get("bias", parameters.get("bias")) is not None:
        return None
    return weight, _DEFAULT_EPS if module.eps is None else module.eps, rounding


def norm_rope(
    q: Tensor, k: Tensor, norms: Sequence[Any], ropes: Sequence[Rope | None], *, across_heads: bool = False,
    fresh: bool = False,
) -> Pair:  # fmt: skip
    """q (B, Sq, Hq, D) and k (B, Sk, Hk, D), each by its norm and then its rope, which may be the same or None.

    fresh: q and k are nobody else's, and may be overwritten.
    """
    found = _launchable(norms, (q, k))
    if isinstance(found, str):
        rotated = sum(rope is not None for rope in ropes)
        note("jitrope" if rotated else "host", found, rotated or 1)
        q, k = (_called(norm, x, across_heads) for norm, x in zip(norms, (q, k)))
        return _rotated(q, ropes[0]), _rotated(k, ropes[1])
    note("fused")
    weights, eps, rounding = found
    words: dict[str, Any] = {"eps": eps, "norm_rounding": rounding, "across_heads": across_heads}
    call: Any = qk_norm_rope_ if fresh and _overwritable(q, k) else qk_norm_rope
    if ropes[0] is ropes[1] and q.shape[1] == k.shape[1]:
        return call(q, k, *weights, **_words(q, ropes[0]), **words)  # type: ignore[no-any-return]
    q, _ = call(q, None, weights[0], **_words(q, ropes[0]), **words)
    k, _ = call(k, None, weights[1], **_words(k, ropes[1]), **words)
    return q, k


def norm_rope_front(q: Tensor, k: Tensor, norms: Sequence[Any], rope: Rope, *, fresh: bool = False) -> Pair:
    """`norm_rope` where the tokens behind the rows of the table (S, W) are normalised only."""
    found = _launchable(norms, (q, k))
    cos: Any = rope.cos
    sin: Any = rope.sin
    if isinstance(found, str) or not (fresh and _overwritable(q, k)):
        cos, sin = (lengthened(table, q.shape[1], rest) for table, rest in ((cos, 1.0), (sin, 0.0)))
        rope = rope._replace(cos=cos, sin=sin)
        return norm_rope(q, k, norms, (rope, rope), fresh=fresh)
    note("fused")
    weights, eps, rounding = found
    front, behind = slice(0, cos.shape[0]), slice(cos.shape[0], None)
    for tokens, words in ((front, _words(q, rope)), (behind, {})):
        qk_norm_rope_(q[:, tokens], k[:, tokens], *weights, eps=eps, norm_rounding=rounding, **words)
    return q, k


def _overwritable(q: Tensor, k: Tensor) -> bool:
    """Whether results may stand where q and k, nobody else's, are.

    Strided ones would reach an attention kernel that the host gives contiguous ones.
    """
    return not torch.is_grad_enabled() and q.is_contiguous() and k.is_contiguous()


def norm_alone(x: Tensor, norm: Any, across_heads: bool = False) -> Tensor:
    """A norm beside a call that is counted already."""
    found = _launchable((norm,), (x,))
    if isinstance(found, str):
        return _called(norm, x, across_heads)
    weights, eps, rounding = found
    return qk_norm_rope(x, None, *weights, eps=eps, norm_rounding=rounding, across_heads=across_heads)[0]


def joint(first: Parts, second: Parts, norms: Sequence[Any], ropes: Sequence[Rope | None]) -> Parts:
    """q, k, v of two streams, each (B, S, H, D), as one sequence; the norms of q and k, first's before second's.

    ropes: one for the joint sequence, or the first's, not None, and the second's.
    """
    found = _launchable(norms, (*first[:2], *second[:2]))
    if not isinstance(found, str) and any(x.dtype != first[0].dtype for x in (first[2], second[2])):
        found = "v has a dtype of its own"
    if isinstance(found, str):
        note("jitrope", found, 2 * sum(rope is not None for rope in ropes))
        normed = [_called(norm, x, False) for norm, x in zip(norms, (*first[:2], *second[:2]))]
        if len(ropes) == 2:
            normed = [_rotated(x, ropes[i // 2]) for i, x in enumerate(normed)]
        q, k = (torch.cat((normed[i], normed[i + 2]), 1) for i in (0, 1))
        if len(ropes) == 1:
            q, k = _rotated(q, ropes[0]), _rotated(k, ropes[0])
        return q, k, torch.cat((first[2], second[2]), 1)
    note("fused")
    (first_q, first_k, second_q, second_k), eps, rounding = found
    words = {"eps": eps, "norm_rounding": rounding, **_joint_words(first[0], second[0], ropes)}
    return qk_norm_rope_joint(first, second, (first_q, first_k), (second_q, second_k), **words)


def _launchable(modules: Sequence[Any], tensors: Sequence[Tensor]) -> tuple[list[Any], float, str] | str:
    """The weights, eps and rounding of norms that one launch can do, or why it cannot."""
    weights, dtype, device, setting = [], tensors[0].dtype, tensors[0].device, None
    for module, x in zip(modules, tensors):
        found = norm_of(module)
        if found is None:
            return _why_called(module)
        weight = found[0]
        if x.dtype != dtype or dtype not in _FLOATS:
            return "q or k has a dtype of its own"
        if weight is not None and (weight.dtype != dtype or weight.device != device):
            return "a norm's weight has another dtype or device"
        setting = setting or found[1:]
        if found[1:] != setting:
            return "the norms of q and k differ"
        weights.append(weight)
    return weights, *setting  # type: ignore[misc]


def _why_called(module: Any) -> str:
    if (type(module).__module__, type(module).__name__) in _NORM_ROUNDING:
        return "a norm has hooks, a bias or an unusual weight"
    return "there is no norm" if module is None else f"a norm is {type(module).__name__}"


def _called(norm: Any, x: Tensor, across_heads: bool) -> Tensor:
    """What the host does: the module, or nothing where there is none."""
    if norm is None:
        return x
    return norm(x.flatten(2)).unflatten(2, x.shape[2:]) if across_heads else norm(x)  # type: ignore[no-any-return]


def _rotated(x: Tensor, rope: Rope | None) -> Tensor:
    return x if rope is None else apply_rope(x, None, **_words(x, rope))[0]


def _words(x: Tensor, rope: Rope | None) -> dict[str, Any]:
    """A rope in a call's words. Tables in the model's dtype (Wan) make products of it only of x of that dtype."""
    if rope is None:
        return {}
    rounding = rope.rounding
    if rounding == "dtype" and rope.cos is not None and x.dtype != rope.cos.dtype:
        rounding = "fp32"
    given = {"cos": rope.cos, "sin": rope.sin, "freqs_cis": rope.freqs_cis}
    tables = {name: None if table is None else table.to(x.device) for name, table in given.items()}
    return {**tables, "rounding": rounding, "interleaved": rope.interleaved}


def _joint_words(first: Tensor, second: Tensor, ropes: Sequence[Rope | None]) -> dict[str, Any]:
    """Each stream's own tables as pairs; those of one that is not rotated are a single row."""
    words = _words(first, ropes[0])
    if len(ropes) == 1:
        return words
    if ropes[1] is None:
        own = dict(zip(("cos", "sin"), no_turn(words["cos"], second.shape[1])))
    else:
        own = _words(second, ropes[1])
    names = [name for name in ("cos", "sin", "freqs_cis") if words[name] is not None]
    return words | {name: (words[name], own[name]) for name in names}
