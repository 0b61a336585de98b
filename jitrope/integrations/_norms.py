"""Recognise the norm modules of a host that has many, by calling them; and read a norm's weight for our launch.

A `NormForm` describes the arithmetic and the module's attributes. `recognise` calls a copy of a module, with small
random CPU parameters, and looks for the `jitrope.Norm` that gives the same bits in fp32 and bf16.
"""

from __future__ import annotations

import copy
import inspect
import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import product
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Proxy
from torch.fx.proxy import GraphAppendingTracer

from ..api import prepare_qkv
from ..base.errors import InvalidInput
from ..ops.values import Norm
from ..ops.watch import hooks_of_all, in_autocast, outside_modes
from ._host import Function, module_of

PROBE_DIM = 8  # of a copy's weight
_PLAIN = (bool, int, float, str, tuple, list, type(None))
# A torch.nn.RMSNorm without an eps uses that of its computing type, which is fp32 for fp32, fp16 and bf16
# (its documentation, and ATen's rms_norm on CPU and CUDA).
DEFAULT_EPS = torch.finfo(torch.float32).eps
_OF_TORCHTITAN = {"_param_init", "_parallelized", "_pos_arg_list", "_sharding_config"}
_OF_OTHERS = {"_is_hf_initialized", "_is_fsdp_managed_module", "_fsdp_use_orig_params"}  # transformers, FSDP
_WITHOUT_EFFECT = {*dir(nn.Module), *vars(nn.Module()), "weight", "bias", *_OF_TORCHTITAN, *_OF_OTHERS}
_AFFINE = frozenset(("weight", "bias"))


State = tuple[tuple[Any, str, Any], ...]
"""(holder, name, value): of a function's global the module, of a method the class, of a module's attribute None."""


def changed(state: State, module: Any = None) -> str:
    """The name of the first attribute that has another value now, or ""."""
    for holder, name, value in state:
        found = getattr(module if holder is None else holder, name, _PLAIN)
        if found is not value and not (isinstance(value, _PLAIN) and found == value):
            return name
    return ""


@dataclass(frozen=True, eq=False)
class NormForm:
    """The arithmetic of a norm's class, and the state that it was found with."""

    cls: type[nn.Module]
    eps: str  # the attribute
    kind: str
    rounding: str
    zero_centered: bool
    mixed: bool = False  # with an fp32 weight the result keeps the dtype and the bits of x's norm
    state: State = ()  # other attributes, and what its forward reads and calls: all must be the same
    sizes: tuple[str, ...] = ()  # the attributes that are the width of its weight
    total: bool = False  # it divides by the root of the sum of squares, not of their mean
    names: frozenset[str] | None = None  # the attributes that it may have; None: any

    def __str__(self) -> str:
        kinds = {"rms_norm": "RMSNorm", "layer_norm": "LayerNorm"}
        return f"{kinds[self.kind]}{' of 1 + weight' if self.zero_centered else ''}, rounded {self.rounding}"

    def fits(self, module: nn.Module) -> bool:
        """Whether a module is of this form."""
        if type(module) is not self.cls or changed(self.state, module):
            return False
        listed = not torch.compiler.is_compiling()  # not each torch can trace all names of a module
        known = self.names
        return known is None or not (_has_others(module) or (listed and not known.issuperset(module.__dict__)))

    def words(self, module: nn.Module) -> dict[str, Any]:
        """The words of `jitrope.Norm` for a module of this form."""
        eps = getattr(module, self.eps)
        own = {"kind": self.kind, "rounding": self.rounding, "zero_centered": self.zero_centered}
        return {**own, "eps": DEFAULT_EPS if eps is None else eps}


def _has_others(module: nn.Module) -> bool:
    """Whether a norm has parameters, buffers or modules that are no weight and bias."""
    own = module.__dict__
    return bool(own["_buffers"] or own["_modules"]) or not _AFFINE.issuperset(own["_parameters"])


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
        raise InvalidInput("a norm's weight has another dtype")


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
    if "forward" in own and not wrapped:
        raise InvalidInput(f"{noun} has its own forward")
    weight, bias = own.get("weight", parameters.get("weight")), own.get("bias", parameters.get("bias"))
    if not all(x is None or x.dim() == 1 for x in (weight, bias)):
        raise InvalidInput("a norm's weight must have one axis")
    return weight, bias


# ---- recognising ---------------------------------------------------------------------------------------

_KNOWN = {
    "transformer_engine.pytorch.module.rmsnorm.RMSNorm": ("rms_norm", False),
    "transformer_engine.pytorch.module.layernorm.LayerNorm": ("layer_norm", False),
    "transformer_engine.pytorch.ops.basic.l2normalization.L2Normalization": ("rms_norm", True),
    "megatron.core.transformer.torch_norm.L2Norm": ("rms_norm", False),
}
"""Norms that cannot be tried on a CPU or compile themselves: the kind, and whether squares are summed, not averaged.

All compute in fp32 and round once.
"""

_PART = "_norm"
"""The method that `forward` of Megatron's L2Norm calls."""

_forms: dict[Any, list[NormForm | str]] = {}
"""By a norm's class and its methods, the forms of its modules so far, or last the reason why others have none."""


def form_of(module: nn.Module) -> NormForm:
    """The form of a norm. Raises InvalidInput if it has none, or the module must be called itself.

    A class is tried once, and again for a module with other attributes, until one has no form.
    """
    cls, name = type(module), type(module).__name__
    unhooked(module)  # a module with hooks says nothing about its class
    found = _forms.setdefault((cls, cls.forward, getattr(cls, _PART, None)), [])
    form = next((form for form in found if isinstance(form, str) or form.fits(module)), None)
    if form is None:
        form = _known(cls, module)
        if form is None and torch.compiler.is_compiling():  # a trial cannot be traced
            raise InvalidInput(f"{name}: call the layer once before it is compiled")
        form = form or _recognise(module)
        found.append(form)
    if isinstance(form, str):
        raise InvalidInput(f"{name}{form}")
    return form


def of_host(cls: Any, name: str) -> bool:
    """Whether a class has a method as it, or a base, was defined, perhaps compiled."""
    method = getattr(cls, name)
    if module_of(method) == "torch._dynamo.eval_frame":
        method = method._torchdynamo_orig_callable
    return module_of(method) in [base.__module__ for base in cls.__mro__]


def _known(cls: Any, module: nn.Module) -> NormForm | None:
    kind, total = _KNOWN.get(f"{cls.__module__}.{cls.__qualname__}", ("", False))
    if not kind or not all(of_host(cls, name) for name in ("forward", _PART) if hasattr(cls, name)):
        return None
    centre = getattr(module, "zero_centered_gamma", None)
    state = () if centre is None else ((None, "zero_centered_gamma", centre),)
    return NormForm(cls, "eps", kind, "once", bool(centre), state=state, total=total)


def _recognise(module: nn.Module) -> NormForm | str:
    """The form of a norm module, or why it has none, to be put behind the name of its class."""
    cls, weight = type(module), unhooked(module)[0]  # it may be sharded now
    if _has_others(module):
        return " has other parameters than a weight and a bias"
    width = PROBE_DIM if weight is None else weight.shape[0]
    of_classes = [vars(base).items() for base in reversed(cls.__mro__)]
    given = {k: v for each in of_classes for k, v in each if k[:2] != "__" and isinstance(v, _PLAIN)} | vars(module)
    others = {k: v for k, v in given.items() if k not in _WITHOUT_EFFECT}
    plain = {k: v for k, v in others.items() if isinstance(v, _PLAIN)}
    names = frozenset({*others, *_WITHOUT_EFFECT})
    sizes = tuple(k for k, v in plain.items() if type(v) is not bool and v in (width, (width,)))
    calls = state_of(cls.forward, cls)
    with on_its_own():
        for eps, kind, rounding, zero_centered in product(
            [k for k, v in plain.items() if type(v) is float or v is None],
            ("rms_norm", "layer_norm"),
            ("once", "twice"),
            (False, True),
        ):
            fixed = tuple((None, k, v) for k, v in others.items() if k not in sizes and k != eps)
            form = NormForm(cls, eps, kind, rounding, zero_centered, False, (*fixed, *calls), sizes, names=names)
            if _same(form, module):
                if why := undetermined(cls.forward, small(form, module, torch.float32), _probe(), cls=cls):
                    return f": {why}"
                fp32 = small(form, module, torch.float32)
                return replace(form, mixed=weight is not None and _alike(form, fp32, torch.bfloat16))
    return ": jitrope has no norm with its results"


def small(form: NormForm, module: nn.Module, dtype: torch.dtype, width: int = PROBE_DIM, seed: int = 1) -> nn.Module:
    """A copy of a norm with a random weight (and bias) of a few elements on the CPU."""
    made = copy.copy(module)
    generator = torch.Generator().manual_seed(seed)
    given = {name: module.__dict__.get(name, module._parameters.get(name)) for name in ("weight", "bias")}
    parameters: dict[str, Any] = dict.fromkeys(module._parameters)
    for name, x in given.items():
        made.__dict__.pop(name, None)
        if x is not None:
            value = torch.randn(width, generator=generator, device="cpu", dtype=torch.float32).to(dtype)
            parameters[name] = nn.Parameter(value, requires_grad=False)
    made.__dict__["_parameters"] = parameters
    for name in form.sizes:
        made.__dict__[name] = width if isinstance(getattr(module, name), int) else (width,)
    return made


def _same(form: NormForm, module: nn.Module) -> bool:
    """Whether a form has a module's bits, in training too, and also with another eps."""
    dtypes, widths = (torch.float32, torch.bfloat16), (PROBE_DIM, 3 * PROBE_DIM)
    for dtype, training, width, eps in product(dtypes, (False, True), widths, ({}, {form.eps: 0.01})):
        probe = small(form, module, dtype, width)
        probe.__dict__.update({"training": training, **eps})
        if not _alike(form, probe, dtype, width):
            return False
    probe = small(form, module, torch.float32)
    return all(_alike(form, probe, torch.float32, tokens=n, size=size) for n, size in PROBES)


def _probe(width: int = PROBE_DIM, tokens: int = 5, size: float = 30.0) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, tokens, 3, width, generator=generator, device="cpu", dtype=torch.float32)
    sizes = torch.logspace(-3, math.log10(size), tokens, device="cpu", dtype=torch.float32)  # eps matters in small rows
    return x * sizes.view(-1, 1, 1)


def _alike(form: NormForm, module: nn.Module, dtype: torch.dtype, width: int = PROBE_DIM, **words: Any) -> bool:
    x = _probe(width, **words).to(dtype)
    try:
        want = module(x)
        weight, bias = parameters_of(module)
        norm = Norm(weight, q_bias=bias, **form.words(module))
        ours = prepare_qkv(x, None, None, norm=norm)[0]
    except Exception:  # the host's code computes something else
        return False
    return isinstance(want, Tensor) and want.dtype == x.dtype and torch.equal(want, ours)


# ---- what a host's function reads -------------------------------------------------------------------------


@contextmanager
def on_its_own() -> Iterator[None]:
    """A context without gradients, autocast and modes of torch, in which a host's functions are judged."""
    with ExitStack() as stack:
        for device in [name for name in ("cpu", "cuda") if torch.is_autocast_enabled(name)]:
            stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(outside_modes())
        stack.enter_context(torch.no_grad())
        yield


PROBES = ((2, 1.0), (4096, 1.0), (5, 1e4))
"""The numbers of tokens and the sizes of the values with which a host's function is called, beside the usual ones."""


class _Symbols(GraphAppendingTracer):
    """Makes the stand-ins for tensors with which a function is called, to see whether it asks for their values."""

    def create_arg(self, a: Any) -> Any:
        return None if isinstance(a, Tensor) else super().create_arg(a)

    def to_bool(self, obj: Any) -> bool:
        raise _Branch


class _Branch(BaseException):  # no code of a host catches it
    pass


def undetermined(function: Function, *arguments: Any, cls: Any = None) -> str:
    """Why calls of a host's function say nothing about others: it reads a global value, or it branches; else ""."""
    for _, name, value in called(function, cls):
        if not (callable(value) or isinstance(value, ModuleType)):
            return f"it reads the global {name}"
    symbols = _Symbols(graph := Graph())
    try:
        function(*(Proxy(graph.placeholder("x"), symbols) if isinstance(x, Tensor) else x for x in arguments))
    except _Branch:
        return "its code branches on the values or sizes of its arguments"
    except Exception:  # stand-ins cannot do all; what is left to say is said by calls
        pass
    return ""


def state_of(function: Any, cls: Any = None) -> State:
    """What a host's function, perhaps a method of cls, reads and calls, but for names of an outer function."""
    return tuple(told for told in called(function, cls) if told[0] is not None)


def called(function: Any, cls: Any = None) -> State:
    """What the code of a host's function reads, and the code of what it calls; the holder of an outer name is None."""
    found: dict[tuple[int, str], tuple[Any, str, Any]] = {}
    todo = [function]
    while todo:
        one = inspect.unwrap(todo.pop())
        if not isinstance(one, FunctionType) or one.__module__.split(".")[0] == "torch":
            continue
        told, module = inspect.getclosurevars(one), sys.modules.get(one.__module__)
        own = {name: getattr(cls, name, None) for name in told.unbound if cls and name != "forward"}
        for holder, values in ((module, told.globals), (None, told.nonlocals), (cls, own)):
            for name, value in values.items():
                if (id(holder), name) not in found and (holder is not cls or isinstance(value, FunctionType)):
                    found[id(holder), name] = holder, name, value
                    todo.append(value)
    return tuple(found.values())
