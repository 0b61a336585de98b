"""RMSNorm of q and k, rope, and the joining of two streams, in one launch if the host's modules allow it.

Otherwise (a norm with hooks, offloaded, of another class or dtype, or autocast), `InvalidInput` gives the reason, and
the host's code runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...api import prepare_joint_qkv, prepare_qkv
from ...base.errors import InvalidInput
from ...ops.values import Norm
from ...ops.watch import hooks_of_all, in_autocast
from .. import _host

Parts = tuple[Tensor, Tensor, Tensor]
Words = dict[str, Any]

_ROUNDING = {  # by a norm's class; see `jitrope.Norm`
    ("torch.nn.modules.normalization", "RMSNorm"): "once",
    ("diffusers.models.normalization", "RMSNorm"): "twice",
}
_RMS_NORM = {"fa91ca74b4badaaf", "ab9075d036873ac9"}  # the texts of diffusers' RMSNorm, 0.36 and 0.41
_BY_TORCH = F.rms_norm  # which torch.nn.RMSNorm calls
_EPS = torch.finfo(torch.float32).eps  # of a torch.nn.RMSNorm without an eps


class Norms(NamedTuple):
    """The weights of norms and their common words.

    q's weight comes before k's, and the weights of a joint call's first stream before those of its second.
    """

    weights: Sequence[Tensor | None]
    words: Words

    def of(self, stream: int) -> Norm:
        """The norm of a stream's q and k."""
        return Norm(*self.weights[2 * stream : 2 * stream + 2], **self.words)

    def check(self, *tensors: Tensor) -> None:
        """Raise InvalidInput for a weight of another dtype: the hosts' norms then return that one, jitrope does not."""
        if any(weight is not None and weight.dtype != x.dtype for weight in self.weights for x in tensors):
            raise InvalidInput("a norm's weight has another dtype")


def norm_of(module: Any) -> tuple[Tensor | None, float, str]:
    """A norm's (weight, eps, rounding). Raises InvalidInput if the module must be called.

    It must if it has another class (as wrapped and parametrized norms), a bias, a weight that is not a plain tensor,
    hooks or its own `forward`. (The last two serve to offload.)
    """
    cls = type(module)
    rounding = _ROUNDING.get((cls.__module__, cls.__name__))
    if rounding is None:
        raise InvalidInput("there is no norm" if module is None else f"a norm is {cls.__name__}")
    replaced = hasattr(cls.forward, "__wrapped__") or cls.forward.__module__ != cls.__module__
    if replaced or F.rms_norm is not _BY_TORCH:
        raise InvalidInput(f"the forward of {cls.__name__} was replaced")
    hooked = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    if hooked or hooks_of_all():
        raise InvalidInput("a norm has hooks")
    if "forward" in module.__dict__:
        raise InvalidInput("a norm has its own forward")
    weight = module.weight
    if getattr(module, "bias", None) is not None:
        raise InvalidInput("a norm has a bias")
    if not (weight is None or type(weight) in (nn.Parameter, Tensor) or hasattr(weight, "fake_mode")):
        raise InvalidInput("a norm's weight is not a plain tensor")
    return weight, _EPS if module.eps is None else module.eps, rounding


def unknown(norm: Any) -> bool:
    """Whether diffusers' class of norms computes what jitrope does not know."""
    return _host.text_of(norm.forward) not in _RMS_NORM


def norms_of(x: Tensor, attn: Any, *names: str, **words: Any) -> Norms:
    """An attention's norms of these names, for one launch with activations like x. words: more of `jitrope.Norm`.

    Raises InvalidInput if one launch cannot compute them.
    """
    if in_autocast(x):
        raise InvalidInput("autocast")
    weights, epsilons, roundings = zip(*(norm_of(getattr(attn, f"norm_{name}")) for name in names))
    if len(set(epsilons)) > 1 or len(set(roundings)) > 1:
        raise InvalidInput("the norms of q and k differ")
    norms = Norms(weights, {"eps": epsilons[0], "rounding": roundings[0], **words})
    norms.check(x)
    return norms


def norm_rope(norms: Norms, q: Tensor, k: Tensor | None, rope: Words) -> Any:
    """Normalise q (B, Sq, H, D) and k (B, Sk, H, D), then rotate them if rope's words are given."""
    tensors = [q] if k is None else [q, k]
    norms.check(*tensors)
    if k is None or rope or q.shape[1] == k.shape[1]:
        return prepare_qkv(q, k, None, norm=norms.of(0), **rope)[:2]
    each = [Norm(weight, **norms.words) for weight in norms.weights]
    return tuple([prepare_qkv(x, None, None, norm=norm)[0] for x, norm in zip(tensors, each)])


def joint(norms: Norms, first: Parts, second: Parts, rope: Words) -> Parts:
    """Normalise, rotate and join q, k, v of two streams, each (B, S, H, D), to one sequence."""
    norms.check(*first[:2], *second[:2])
    return prepare_joint_qkv(first, second, norm=(norms.of(0), norms.of(1)), **rope)


def beside(first: Words, second: Words) -> Words:
    """Words for a joint call of two streams, each with its own tables."""
    return {name: (value, second[name]) if isinstance(value, Tensor) else value for name, value in first.items()}
