"""Recognise the rope functions of a host that has many, by calling them.

A `Variant` describes the arithmetic, an entry of `SIGNATURES` the parameters. `recognise` calls a host's function on
small random CPU tensors and looks for the variant that gives the same bits; `replaced` computes its calls.
"""

from __future__ import annotations

import inspect
import operator
import re
import sys
from itertools import product
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Graph, Interpreter, Node, Proxy
from torch.fx.proxy import GraphAppendingTracer

from ...api import apply_rope, prepare_qkv
from ...base.errors import InvalidInput
from ...stages.norm import Norm
from ...torch_state import outside_modes
from .._host import Function, module_of

Shape = tuple[int, int, int]
SHAPES: tuple[Shape, ...] = ((4, 3, 1), (4, 3, 2), (4, 2, 0), (4, 2, 1), (3, 2, 0), (3, 2, 1))
"""Axes of q, axes of the tables, and the place of the heads' axis that the tables get."""
OF_Q, OF_K = ("q", "x", "tensor", "query", "xq"), ("k", "key", "xk")
"""The names of the parameters that are rotated; they come first."""


class Variant(NamedTuple):
    """The arithmetic of a host's rope function."""

    interleaved: bool = False
    interleaved_out: bool = False
    table: str = "full"  # an angle for each element; "half", "complex": each pair; "first": pairs, in the first half
    partial: bool = False  # narrower tables rotate the first part of a head
    prefixed: bool = False  # tables with fewer rows rotate the last tokens
    widens: bool = False  # the result has the dtype that q and the tables promote to, not q's
    axis: int = 1  # where the tables get the heads' axis, by default
    bits: tuple[str, str] = ("", "")  # `rounding` with the host's bits in bf16, with bf16 and fp32 tables; "": none
    shapes: tuple[Shape, ...] = SHAPES  # the shapes for which this was tested
    exact: bool = False  # calls in fp16 and bf16 must have the host's bits too

    def __str__(self) -> str:
        pairs = "interleaved" if self.interleaved else "halves"
        into = " into halves" if self.interleaved != self.interleaved_out else ""
        words = f"{', partial' if self.partial else ''}{', behind first tokens' if self.prefixed else ''}"
        return f"{pairs}{into}, {self.table} tables{words}"


_FP32 = (torch.float32,) * 2
_OF_PAIRS = ("half", "complex")  # tables with a column for each pair


def words_of(v: Variant, q: Any, cos: Tensor, sin: Tensor, unsqueeze_dim: int | None = None) -> dict[str, Any]:
    """The words of `apply_rope` for variant v. Raises InvalidInput if v was not tested with these shapes, or dtypes.

    Args:
        q: a tensor (B, H, S, D), (B, S, H, D), (H, S, D) or (S, H, D), or its stand-in with a shape. With three axes it
            must get a first axis of size 1.
        cos, sin: (S, W) or (B, S, W).
        unsqueeze_dim: the place of the heads' axis in the tables, from the front or the end; default: v.axis.
    """
    axis = v.axis if unsqueeze_dim is None else unsqueeze_dim
    axes, width, dim, q_axes = cos.dim(), cos.shape[-1], q.shape[-1], len(q.shape)
    axis = axis if axis >= 0 else axis + axes + 1
    rotary = 2 * width if v.table in _OF_PAIRS else width
    layout, position = ("bhsd", -2) if axis == axes - 2 else ("bshd", -3)
    known = (q_axes, axes, axis) in v.shapes and (rotary == dim or v.partial)
    first = q.shape[position] - cos.shape[-2] if known else 0
    if not known or (first and not (v.prefixed and first > 0)):
        raise InvalidInput(f"q has shape {tuple(q.shape)} and cos {tuple(cos.shape)}, with {axis=}")
    if v.table == "first":
        cos, sin = cos[..., : width // 2], sin[..., : width // 2]
    words = {"cos": cos, "sin": sin, "layout": layout, "rotary_dim": rotary, "unrotated": first}
    words["interleaved"] = v.interleaved
    if v.table == "complex":
        words["rounding"] = "complex64"
    if v.exact and not q.dtype == cos.dtype == torch.float32:
        rounding = v.bits[int(q.dtype != cos.dtype)]  # Dynamo of torch 2.11 takes no bool
        if not rounding or cos.dtype not in (q.dtype, torch.float32):
            raise InvalidInput(f"q is {q.dtype} and the tables are {cos.dtype}, and the host's bits are not known")
        words["rounding"] = rounding
    return words if v.interleaved == v.interleaved_out else {**words, "interleaved_out": v.interleaved_out}


def rotate(v: Variant, heads: list[Tensor], *table: Any) -> list[Tensor]:
    """q, or q and k, rotated by variant v. table: cos, sin and unsqueeze_dim, as in `words_of`.

    Raises InvalidInput if v was not tested with these shapes, or jitrope refuses the call.
    """
    if v.widens and heads[0].dtype != table[0].dtype:
        wide = torch.promote_types(heads[0].dtype, table[0].dtype)
        heads = [x.to(wide) for x in heads]
    return launch(heads, None, words_of(v, heads[0], *table))


def launch(heads: list[Tensor], norm: Norm | None, words: dict[str, Any]) -> list[Tensor]:
    """Rope of q, or of q and k, and norms before or after it. words: those of `words_of`."""
    if heads[0].dim() == 3:
        return [x.squeeze(0) for x in launch([x.unsqueeze(0) for x in heads], norm, words)]
    q, k = heads[0], heads[1] if len(heads) == 2 else None
    out: Any = apply_rope(q, k, **words) if norm is None else prepare_qkv(q, k, None, norm=norm, **words)
    return list(out[: len(heads)])


def result(heads: list[Tensor]) -> Any:
    """What a host's function returns for q, or for q and k."""
    return tuple(heads) if len(heads) == 2 else heads[0]


SIGNATURES: set[tuple[str, ...]] = {  # the names of the parameters
    ("q", "k", "cos", "sin", "unsqueeze_dim"),
    ("q", "k", "cos", "sin", "position_ids", "unsqueeze_dim"),
    ("x", "cos", "sin", "unsqueeze_dim"),
    ("q", "k", "cos", "sin"),  # the axis is fixed in the function, in these and those below
    ("q", "k", "cos", "sin", "kwargs"),  # DINOv3, Sapiens 2
    ("q", "k", "cos", "sin", "num_k_exclude_rope", "repeat_freqs_k"),  # SAM 2 and 3, memory attention
    ("tensor", "sin", "cos"),  # GPT-J, CodeGen
    ("xq", "xk", "freqs_cis"),  # Llama 4, DeepSeek V2
    ("query", "key", "freqs_ci"),  # Llama 4's vision tower, (S, 1, W)
}
_UNUSED = ("repeat_freqs_k",)  # k must have as many tokens as q, so nothing is repeated


def read(known: tuple[str, ...], *arguments: Any, **words: Any) -> tuple[list[Any], Any]:
    """q and perhaps k, and (cos, sin, unsqueeze_dim or None), of a call of a function with these parameters.

    Raises InvalidInput if an argument is missing, or jitrope does not know it.
    """
    given = {**dict(zip(known, arguments)), **words}
    if any(isinstance(x, Proxy) for x in given.values()):
        raise InvalidInput("torch.fx traces the call")
    q, pair = given.pop(known[0], None), known[1] in OF_K
    k = given.pop(known[1], None) if pair else None
    if pair and k is None:
        raise InvalidInput("k is None; the hosts' functions return different results for that")
    if known[-1] in ("freqs_cis", "freqs_ci"):
        table = given.pop(known[-1], None)
        if table is None or not table.is_complex():
            raise InvalidInput(f"{known[-1]} is {getattr(table, 'dtype', table)}, not complex")
        if known[-1] == "freqs_ci":
            table = table.reshape(-1, table.shape[-1])
        cos, sin = table.real, table.imag
    else:
        cos, sin = given.pop("cos", None), given.pop("sin", None)
    axis = given.pop("unsqueeze_dim", None)
    others = [n for n, x in given.items() if n not in _UNUSED and (isinstance(x, Tensor) or x)] if given else []
    if others or q is None or cos is None or sin is None or len(arguments) > len(known):
        said = f"{', '.join(others)} given; jitrope does not know that"
        raise InvalidInput(said if others else f"the arguments are not {', '.join(known)}")
    return [q, k] if pair else [q], (cos, sin, axis)


def _parameters(host: Function) -> list[inspect.Parameter]:
    # The `kernels` library turns functions into modules, whose `forward` has the function's signature.
    try:
        return list(inspect.signature(host.forward if isinstance(host, nn.Module) else host).parameters.values())
    except (TypeError, ValueError):
        return []


def names(host: Function) -> tuple[str, ...]:
    """The names of a function's parameters; () if it has no signature."""
    return tuple(p.name for p in _parameters(host))


# ---- recognising ---------------------------------------------------------------------------------------


def recognise(host: Function) -> Variant | str:
    """The variant that a host's rope function computes, or the reason why there is none."""
    known = names(host)
    if known not in SIGNATURES:
        return "its signature is not known"
    default = _parameters(host)[-1].default
    # Outside of autocast and modes of torch; the arguments are on the CPU.
    with torch.autocast("cpu", enabled=False), outside_modes(), torch.no_grad():
        for v in _CANDIDATES:
            found: list[Variant] = []
            for axis in (None,) if known[-1] == "unsqueeze_dim" else (-2, 1, 0):
                some = [shape for shape in SHAPES if axis in (None, shape[2], shape[2] - shape[1] - 1)]
                same = [_same(host, v, shape) for shape in some]
                if False not in same and True in same:
                    right = tuple(shape for shape, fits in zip(some, same) if fits)
                    found.append(v._replace(axis=default if axis is None else axis, shapes=right))
            if found:
                return _completed(host, max(found, key=lambda v: len(v.shapes)))
    return "none of jitrope's variants gives its results"


_CANDIDATES = (
    *[Variant(way, way, table) for way, table in product((False, True), ("full", "half", "first"))],
    *[Variant(True, False, table) for table in ("half", "first")],  # jitrope changes the pairing only with half tables
    Variant(True, True, "complex"),
)


def _completed(host: Function, v: Variant) -> Variant | str:
    """A variant that is right for whole heads of 5 tokens in fp32, completed by tests with other arguments."""
    shape = v.shapes[0]
    part = _same(host, v._replace(partial=True), shape, part=2)
    if part is False:
        return "the part of a head that it rotates is not the first"
    v = v._replace(partial=part is True)  # None: it refuses narrower tables
    v = v._replace(prefixed=_same(host, v._replace(prefixed=True), shape, tokens=(5, 3)) is True)
    bf16, fp32 = torch.bfloat16, torch.float32
    wide = [_same(host, v._replace(widens=widens), shape, dtypes=(bf16, fp32)) for widens in (False, True)]
    if True not in wide or not _same(host, v, shape, dtypes=(bf16, bf16)):
        return "the dtype of its results is not one of jitrope's"
    if why := undetermined(host, *probe(host, v, shape)):
        return why
    if not all(_same(host, v, shape, tokens=(n, n), size=size) for n, size in ((2, 1.0), (4096, 1.0), (5, 1e4))):
        return "its results are others for other numbers of tokens or larger values"
    v = v._replace(widens=wide[0] is not True)
    return v._replace(bits=(_rounding(host, v, bf16), "" if v.widens else _rounding(host, v, fp32)))


def _rounding(host: Function, v: Variant, tables: torch.dtype) -> str:
    """The rounding that has the host's bits for heads in bf16 and these tables, or ""."""
    for rounding in ("dtype", "fp32"):
        exact = v._replace(exact=True, bits=(rounding, rounding))
        if _same(host, exact, v.shapes[0], dtypes=(torch.bfloat16, tables)):
            return rounding
    return ""


def probe(
    host: Function, v: Variant, shape: Shape, part: int = 1, dtypes: Any = _FP32, tokens: Any = (5, 5), size: float = 1
) -> list[Any]:
    """Make the arguments of a call. A head has 8 elements; 8 / part of them rotate. tokens: (q's, the tables')."""
    generator = torch.Generator().manual_seed(0)

    def random(dtype: torch.dtype, *sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device="cpu", dtype=torch.float32).to(dtype)

    axes, table_axes, axis = shape
    width = (4 if v.table in _OF_PAIRS else 8) // part
    placed = [(heads, tokens[0]) if axis == table_axes - 2 else (tokens[0], heads) for heads in (3, 2)]
    q, k = (random(dtypes[0], *(2,) * (axes - 3), *sizes, 8) * size for sizes in placed)
    cos, sin = (random(dtypes[1], *(2,) * (table_axes - 2), tokens[1], width) for _ in range(2))
    values: dict[str, Any] = {"cos": cos, "sin": sin, "position_ids": None, "unsqueeze_dim": axis}
    values |= dict.fromkeys(OF_Q, q) | dict.fromkeys(OF_K, k)
    values |= dict.fromkeys(("freqs_cis", "freqs_ci"), torch.complex(cos.float(), sin.float()))
    values |= {"num_k_exclude_rope": 0, "repeat_freqs_k": False}
    return [values[name] for name in names(host) if name != "kwargs"]


def _same(host: Function, v: Variant, shape: Shape, **words: Any) -> bool | None:
    """Whether ours and the host's results are the same; None if the host raises, or returns other shapes."""
    arguments = probe(host, v, shape, **words)
    heads, table = read(names(host), *arguments)
    try:
        want = host(*arguments)
        if [x.shape for x in ([want] if isinstance(want, Tensor) else want)] != [x.shape for x in heads]:
            return None
    except Exception:  # on any error the host does not compute this
        return None
    ours = result(rotate(v._replace(axis=shape[2]), heads, *table))
    return equal(ours, want, tolerance=0.05 if "dtypes" in words and not v.exact else 0.0)  # in bf16 roundings differ


def equal(ours: Any, want: Any, tolerance: float) -> bool:
    """Whether two results are of the same type, shapes and dtypes, and of the same values."""
    if type(ours) is not type(want):
        return False
    if not isinstance(ours, Tensor):
        return len(ours) == len(want) and all(equal(a, b, tolerance) for a, b in zip(ours, want))
    alike = (ours.dtype, ours.shape) == (want.dtype, want.shape)
    return alike and torch.allclose(ours.float(), want.float(), rtol=tolerance, atol=tolerance)


# ---- what a host's function reads -------------------------------------------------------------------------

State = tuple[tuple[Any, str, Any], ...]  # (holder, name, value): of a function's global the module


def changed(state: State) -> str:
    """The name of the first function that is another one now, or ""."""
    return next((name for holder, name, value in state if getattr(holder, name, None) is not value), "")


class _Symbol(Proxy):
    """A stand-in for a tensor or a size. It has as many axes as in the probe."""

    shape = property(lambda self: self.size())

    @property
    def ndim(self) -> Any:
        run = Interpreter(nn.Module(), garbage_collect_values=False, graph=self.node.graph)
        run.run()
        return run.env[self.node].dim()

    def size(self, *axis: int) -> Any:
        sizes = [self.tracer.create_proxy("call_method", "size", (self, i), {}) for i in range(self.ndim)]
        return sizes[axis[0]] if axis else tuple(sizes)


class _Symbols(GraphAppendingTracer):
    """Makes the stand-ins with which a function is called, to see whether it asks for their values."""

    def proxy(self, node: Node) -> Proxy:
        return _Symbol(node, self)

    def create_arg(self, a: Any) -> Any:
        return a if isinstance(a, Tensor) else super().create_arg(a)

    def to_bool(self, obj: Any) -> bool:
        test = obj.node
        if test.target is operator.eq and test.args[1] == 0 and test.args[0].target == "size":
            return False  # the tensor is not empty
        raise _Branch


class _Branch(BaseException):  # no code of a host catches it
    pass


def undetermined(function: Function, *arguments: Any) -> str:
    """Why calls of a host's function say nothing about others: it reads a global value, or it branches; else ""."""
    stand_in = _Symbols(Graph()).create_proxy
    try:
        for _, name, value in called(function):
            if not (inspect.isroutine(value) or isinstance(value, ModuleType)):
                return f"it reads the global {name}"
        function(*(stand_in("placeholder", "x", (x,), {}) if isinstance(x, Tensor) else x for x in arguments))
    except (_Branch, Exception):  # such as `math.log` or `range` of a stand-in, or a code without its text
        return "its code branches on the values or sizes of its arguments, or may do so"
    return ""


def called(function: Any) -> State:
    """What the code of a host's function reads, and the code of what it calls; the holder of an outer name is None."""
    found: dict[tuple[int, str], tuple[Any, str, Any]] = {}
    todo = [function, inspect.unwrap(function), getattr(type(function), "forward", None)]
    while todo:
        one = todo.pop()
        if not isinstance(one, FunctionType) or module_of(one).split(".")[0] == "torch":
            continue
        told, module = inspect.getclosurevars(one), sys.modules.get(one.__module__)
        for holder, values in ((module, {**_nested(one), **told.globals}), (None, told.nonlocals)):
            for name, value in values.items():
                if (id(holder), name) not in found:
                    found[id(holder), name] = holder, name, value
                    todo += [value, inspect.unwrap(value)]
    return tuple(found.values())


def _nested(function: FunctionType) -> dict[str, Any]:
    """The globals that a function's text names, if there may be code in it that `getclosurevars` does not see."""
    text = re.sub(r'(?s)""".*?"""|#[^\n]*', "", inspect.getsource(function))
    inner = re.search(r"(?s)\b(lambda|for|class)\b|\bdef\b.*\bdef\b", text)
    words = [word for word in re.findall(r"\w+", text) if word != function.__name__] if inner else []
    return {word: function.__globals__[word] for word in words if word in function.__globals__}
