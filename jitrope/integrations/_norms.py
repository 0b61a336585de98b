"""The norms that jitrope knows, by the names or the texts of their classes, and a norm's weight for our launch."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..base.errors import InvalidInput
from ..torch_state import hooks_of_all, in_autocast
from ._host import module_of, original, own, text_of

# A torch.nn.RMSNorm without an eps uses that of its computing type, which is fp32 for fp32, fp16 and bf16
# (its documentation, and ATen's rms_norm on CPU and CUDA).
DEFAULT_EPS = torch.finfo(torch.float32).eps


class NormForm(NamedTuple):
    """What a norm computes."""

    kind: str
    rounding: str = "once"
    zero_centered: bool = False
    eps: str = "eps"  # the attribute
    total: bool = False  # it divides by the root of the sum of squares, not of their mean
    mixed: bool = True  # with an fp32 weight the result has the dtype and the bits of x's norm

    def __str__(self) -> str:
        kinds = {"rms_norm": "RMSNorm", "layer_norm": "LayerNorm"}
        return f"{kinds[self.kind]}{' of 1 + weight' if self.zero_centered else ''}, rounded {self.rounding}"

    def words(self, module: nn.Module) -> dict[str, Any]:
        """The words of `jitrope.Norm` for a module of this form."""
        eps = getattr(module, self.eps)
        eps = DEFAULT_EPS if eps is None else eps
        return {"kind": self.kind, "rounding": self.rounding, "zero_centered": self.zero_centered, "eps": eps}


RMS, LAYER, ONE_PLUS = NormForm("rms_norm"), NormForm("layer_norm"), NormForm("rms_norm", zero_centered=True)
_NAMES = {
    "torch.nn.modules.normalization.RMSNorm": RMS,
    "torch.nn.modules.normalization.LayerNorm": LAYER,
    "transformer_engine.pytorch.module.rmsnorm.RMSNorm": RMS._replace(mixed=False),
    "transformer_engine.pytorch.module.layernorm.LayerNorm": LAYER._replace(mixed=False),
    "transformer_engine.pytorch.ops.basic.l2normalization.L2Normalization": RMS._replace(total=True),
    "megatron.core.transformer.torch_norm.L2Norm": RMS,
}
"""Classes, or the classes that have their `forward`."""

_PART = "_norm"
"""The method that a norm's `forward` may call."""

_TEXTS = (
    (RMS._replace(rounding="twice", eps="variance_epsilon", mixed=False), "", "790fa612e4fa57ac"),
    (RMS._replace(eps="variance_epsilon"), "", "d648a851428914b9 3a14dd1587c3d230 351d497dcdfd48bd"),
    (RMS, "62999e4207721b36", "7db79da21ac2d724"),
    (RMS, "a1c27ed5fac56db4", "4a9f53ff4e679404"),
    (ONE_PLUS, "8d43d65dbc28018f", "4ea581d26b40bbaa"),
    (ONE_PLUS, "a1c27ed5fac56db4", "2a18f679fdfe238c 350041feaa400633 65e5154c463d6d85 975ca4a46141a826"),
    (ONE_PLUS, "a1c27ed5fac56db4", "a2f6910ff951867d d7437e1d603e740e fcfaa061b110e650"),
    (LAYER, "", "cdf6dc293a0ba768"),
)
"""For transformers 5.17 to 5.24: the texts of `_norm`, and of the `forward` of classes, most of which are copies."""


def form_of(module: nn.Module) -> NormForm:
    """The form of a norm. Raises InvalidInput if it has none, or the module must be called itself."""
    unhooked(module)
    cls, own = type(module), module.__dict__
    if own["_buffers"] or own["_modules"]:  # such as a parametrized weight
        raise InvalidInput(f"{cls.__name__} has buffers or modules")
    form: NormForm | None = _of_class(cls)
    if form is None:
        raise InvalidInput(f"{cls.__name__} is no norm that jitrope knows, or was changed")
    centre = getattr(module, "zero_centered_gamma", None)
    return form if centre is None else form._replace(zero_centered=bool(centre))


@torch.compiler.assume_constant_result
def _of_class(cls: Any) -> NormForm | None:
    return _form_of(cls, cls.forward, getattr(cls, _PART, None), nn.functional.rms_norm, nn.functional.layer_norm)


@lru_cache  # torch 2.11 traces into it
def _form_of(cls: Any, forward: Any, part: Any, *called: Any) -> NormForm | None:
    known = of_host(cls, forward) and (part is None or of_host(cls, part)) and all(own("torch", f) for f in called)
    if not known or hasattr(cls, "weight") or hasattr(cls, "bias"):
        return None
    owner = next(base for base in cls.__mro__ if "forward" in vars(base))
    for name in (f"{base.__module__}.{base.__qualname__}" for base in (cls, owner)):
        if name in _NAMES:
            return _NAMES[name]
    text, of_part = (text_of(original(method)) for method in (forward, part))
    return next((form for form, known, texts in _TEXTS if of_part == known and text in texts.split()), None)


def of_host(cls: Any, method: Any) -> bool:
    """Whether a class's method is as the class, or a base, defined it, perhaps compiled."""
    method = original(method)
    method = getattr(method, "_torchdynamo_orig_callable", method)
    return module_of(method) in [base.__module__ for base in cls.__mro__]


def parameters_of(module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    """A norm's weight and bias. Raises InvalidInput if the module must be called.

    It must if it has hooks or its own `forward` (both serve to offload), a weight or bias that is not a plain tensor
    with one axis, or if torch.jit made it.
    """
    weight, bias = unhooked(module)
    if not all(x is None or type(x) in (nn.Parameter, Tensor) or hasattr(x, "fake_mode") for x in (weight, bias)):
        raise InvalidInput("a norm's weight is not a plain tensor")
    return weight, bias


def check_results(form: NormForm, weight: Tensor | None, x: Tensor) -> None:
    """Raise InvalidInput if autocast or the weight's dtype may change the results of a norm of x."""
    if in_autocast(x):
        raise InvalidInput("autocast may change the norm")
    if weight is not None and weight.dtype != x.dtype and not form.mixed:
        raise InvalidInput("a norm's weight has another dtype than q and k")


def unhooked(module: nn.Module, wrapped: bool = False, noun: str = "a norm") -> tuple[Tensor | None, Tensor | None]:
    """As `parameters_of`, but weight and bias of any kind. wrapped: its own `forward` does what its class's does."""
    # The module's own attribute access takes microseconds. Flat-parameter sharding puts plain tensors into `__dict__`.
    own, parameters = module.__dict__, module._parameters
    if not isinstance(parameters, dict):
        raise InvalidInput(f"{noun} is scripted or traced by torch.jit")
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        raise InvalidInput(f"{noun} has hooks")
    if hooks_of_all():
        raise InvalidInput("there are hooks of all modules")
    if ("forward" in own and not wrapped) or _PART in own:
        raise InvalidInput(f"{noun} has its own forward")
    weight, bias = own.get("weight", parameters.get("weight")), own.get("bias", parameters.get("bias"))
    plain = all(x is None or (isinstance(x, Tensor) and x.dim() == 1) for x in (weight, bias))
    if not plain or len(own.get("normalized_shape", "1")) != 1 or own["_buffers"].keys() & {"weight", "bias"}:
        raise InvalidInput("a norm's weight must be a parameter with one axis")
    return weight, bias
