"""RMSNorm of q and k, rope, and the joining of two streams, in one launch if the host's modules allow it.

Otherwise (a norm with hooks, offloaded, of another class or dtype, or autocast), `InvalidInput` gives the reason, and
the host's code runs with its rope replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...api import prepare_joint_qkv, prepare_qkv
from ...base.errors import InvalidInput
from ...ops.values import Norm
from ...ops.watch import in_autocast
from .._norms import DEFAULT_EPS, parameters_of

Pair = tuple[Tensor, Tensor]
Parts = tuple[Tensor, Tensor, Tensor]
Words = dict[str, Any]

_NORM_ROUNDING = {  # by a norm's class; see `jitrope.Norm`
    ("torch.nn.modules.normalization", "RMSNorm"): "once",
    ("diffusers.models.normalization", "RMSNorm"): "twice",
}


class Norms(NamedTuple):
    """The weights of norms and their common words.

    q's weight comes before k's, and the weights of a joint call's first stream before those of its second.
    """

    weights: Sequence[Tensor | None]
    words: Words

    def of(self, stream: int) -> Norm:
        """The norm of a stream's q and k."""
        return Norm(*self.weights[2 * stream : 2 * stream + 2], **self.words)


def norm_of(module: Any) -> tuple[Tensor | None, float, str]:
    """A norm's (weight, eps, rounding). Raises InvalidInput if the module must be called.

    It must if it has another class (as wrapped and parametrized norms), a bias, a weight that is not a plain tensor,
    hooks or its own `forward`. (The last two serve to offload.)
    """
    rounding = _NORM_ROUNDING.get((type(module).__module__, type(module).__name__))
    if rounding is None:
        raise InvalidInput("there is no norm" if module is None else f"a norm is {type(module).__name__}")
    forward = type(module).forward
    if hasattr(forward, "__wrapped__") or forward.__module__ != type(module).__module__:
        raise InvalidInput(f"the forward of {type(module).__name__} was replaced")
    weight, bias = parameters_of(module)
    if bias is not None:
        raise InvalidInput("a norm has a bias")
    return weight, DEFAULT_EPS if module.eps is None else module.eps, rounding


def norms_of(x: Tensor, *modules: Any, **words: Any) -> Norms:
    """The norms of these modules, for one launch with activations like x. words: further ones of `jitrope.Norm`.

    Raises InvalidInput if one launch cannot compute them.
    """
    if in_autocast(x):
        raise InvalidInput("autocast")
    weights, epsilons, roundings = zip(*map(norm_of, modules))
    if len(set(epsilons)) > 1 or len(set(roundings)) > 1:
        raise InvalidInput("the norms of q and k differ")
    norms = Norms(weights, {"eps": epsilons[0], "rounding": roundings[0], **words})
    refuse_mixed(norms, x)
    return norms


def refuse_mixed(norms: Norms, *tensors: Tensor) -> None:
    """Raise InvalidInput for a weight of another dtype: the hosts' norms then return that dtype, jitrope does not."""
    if any(weight is not None and weight.dtype != x.dtype for weight in norms.weights for x in tensors):
        raise InvalidInput("a norm's weight has another dtype")


def norm_rope(norms: Norms, q: Tensor, k: Tensor | None, rope: Words, *, fresh: bool = False) -> Any:
    """Normalise q (B, Sq, H, D) and k (B, Sk, H, D), then rotate them if rope's words are given.

    fresh: no other code holds q and k, so they may be overwritten.
    """
    tensors = [q] if k is None else [q, k]
    refuse_mixed(norms, *tensors)
    inplace = fresh and _overwritable(*tensors)
    if k is None or rope or q.shape[1] == k.shape[1]:
        return prepare_qkv(q, k, None, norm=norms.of(0), inplace=inplace, **rope)[:2]
    each = [Norm(weight, **norms.words) for weight in norms.weights]
    return tuple([prepare_qkv(x, None, None, norm=norm, inplace=inplace)[0] for x, norm in zip(tensors, each)])


def norm_rope_front(norms: Norms, q: Tensor, k: Tensor, rope: Words, *, fresh: bool = False) -> Any:
    """`norm_rope`, but tokens after the last row of the tables (S, W) are only normalised."""
    rows = rope["cos"].shape[0]
    if fresh and _overwritable(q, k):
        refuse_mixed(norms, q, k)
        for part, words in ((slice(rows), rope), (slice(rows, None), {})):
            prepare_qkv(q[:, part], k[:, part], None, norm=norms.of(0), inplace=True, **words)
        return q, k
    after = (0, 0, 0, q.shape[1] - rows)
    longer = {"cos": F.pad(rope["cos"], after, value=1.0), "sin": F.pad(rope["sin"], after)}
    return norm_rope(norms, q, k, {**rope, **longer})


def _overwritable(*tensors: Tensor) -> bool:
    """Whether q and k may be overwritten. Strided tensors may not: the host passes contiguous ones to attention."""
    return not torch.is_grad_enabled() and all(x.is_contiguous() for x in tensors)


def joint(norms: Norms, first: Parts, second: Parts, rope: Words) -> Parts:
    """Normalise, rotate and join q, k, v of two streams, each (B, S, H, D), to one sequence."""
    refuse_mixed(norms, *first[:2], *second[:2])
    return prepare_joint_qkv(first, second, norm=(norms.of(0), norms.of(1)), **rope)


def beside(first: Words, second: Words) -> Words:
    """Words for a joint call of two streams, each with its own tables."""
    return {name: (value, second[name]) if isinstance(value, Tensor) else value for name, value in first.items()}


def no_turn(rope: Words, rows: int) -> Words:
    """Words like `rope` that rotate nothing: cosines of 1 and sines of 0, in one repeated row."""
    row: Tensor = rope["cos"][:1]
    return {**rope, "cos": torch.ones_like(row).expand(rows, -1), "sin": torch.zeros_like(row).expand(rows, -1)}
