"""Situations around a tensor. Each is a small function with a name, a description and the expected outcome."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from jitrope import InvalidInput, JitropeError

from .cells import FP8, SIZES, Args, B, Cell, D, Function, H, P, S, close

Ends = Callable[[Function], "str | None"]


@dataclass(frozen=True)
class Situation:
    """`ends`: the expected outcome of a function, or None if it is not tried."""

    name: str
    text: str
    run: Callable[[Cell], str]
    ends: Ends
    slow: bool = False
    gpu: bool = False  # it needs a GPU
    cuda: bool = True  # torch itself can do it on a GPU
    host: bool = True  # tests/host/backend.py can do it: not without memory, because it treats such tensors as a GPU's


SITUATIONS: list[Situation] = []


def right(f: Function) -> str | None:
    return "right"


def refused(f: Function) -> str | None:
    return "refused"


def derived(f: Function) -> str | None:
    """The function has a gradient."""
    return "right" if f.derived else "refused"


def where_written(f: Function) -> str | None:
    """q, k or qkv is like this: refused if it is written."""
    return "refused" if any(name in f.written for name in f.turned) else "right"


def only(ends: Any, needs: Callable[[Function], Any]) -> Ends:
    """Only functions with `needs` are tried."""
    return lambda f: (ends(f) if callable(ends) else ends) if needs(f) else None


def if_not_needed(letter: str, ends: Callable[[Function], str | None]) -> Callable[[Function], str | None]:
    """An axis without elements: heads need D, and a fused projection has the heads that the call names."""
    return lambda f: "refused" if letter == "D" or (letter == "H" and "fused" in f.name) else ends(f)


def situation(name: str, text: str, ends: Ends = right, **how: Any) -> Callable[[Any], Any]:
    def add(run: Callable[[Cell], str]) -> Callable[[Cell], str]:
        SITUATIONS.append(Situation(name, text, run, ends, **how))
        return run

    return add


def has(*names: str) -> Callable[[Function], bool]:
    def needs(f: Function) -> bool:
        given = {*f.heads, *f.weights, "cos", "sin", *(("k_cache", "v_cache") if "kv_cache" in f.name else ())}
        return given.issuperset(names)

    return needs


def several(f: Function) -> bool:
    return len(f.turned) > 1


NORMS = "norm"
CACHES = "kv_cache"


def named(word: str) -> Callable[[Function], bool]:
    return lambda f: word in f.name


def simple(f: Function) -> bool:
    """The function takes layouts and lengths."""
    return f.name != "norm_rope_joint"


# ---- options: the oracle and the library agree on the whole docstring -------------------------------


def option(name: str, text: str, ends: Ends = right) -> Callable[[Any], Any]:
    """A situation that consists only of other arguments."""

    def add(change: Callable[[Cell], Args]) -> Any:
        def run(cell: Cell) -> str:
            wants = cell.args() if ends(cell.function) == "refused" else None
            return cell.settle(changed(cell, change(cell)), wants=wants)

        return situation(name, text, ends)(run)

    return add


def changed(cell: Cell, changes: Args) -> Args:
    args = cell.args(**changes)
    return {name: value for name, value in args.items() if value is not DROP}


DROP = object()
NO_TABLES = {"cos": DROP, "sin": DROP}


@option("plain", "the right call that others are compared with")
def _(cell: Cell) -> Args:
    return {}


@option("interleaved", "pairs of neighbours")
def _(cell: Cell) -> Args:
    return {"interleaved": True}


@option("full-width tables", "an angle an element")
def _(cell: Cell) -> Args:
    angles = cell.rand(P, D)
    return {"cos": angles.cos(), "sin": angles.sin()}


@option("cos_sin_cache", "both in one table; a partial rotation at an offset")
def _(cell: Cell) -> Args:
    return {**NO_TABLES, "cos_sin_cache": cell.rand(P, 4), "rotary_offset": 2}


@option("freqs", "angles (P, B, 1, W)", only(right, lambda f: "norm" not in f.name))
def _(cell: Cell) -> Args:
    return {**NO_TABLES, "freqs": cell.rand(P, B, 1, D // 2)}


@option("freqs and mscale", "YaRN", only(right, lambda f: f.name in MSCALED))
def _(cell: Cell) -> Args:
    return {**NO_TABLES, "freqs": cell.rand(P, D), "mscale": 1.25}


MSCALED = ("rope", "rope_", "fused_qkv", "fused_qkv_")


@option("freqs_cis", "complex64")
def _(cell: Cell) -> Args:
    return {**NO_TABLES, "freqs_cis": torch.polar(torch.ones(P, D // 2), cell.rand(P, D // 2).cpu()).to(cell.device)}


@option(
    "inverse",
    "the rotation back, with tables of an angle an element",
    only(right, lambda f: f.name in (*MSCALED, "fp8")),
)
def _(cell: Cell) -> Args:
    return {"cos": cell.rand(P, D, seed=1), "sin": cell.rand(P, D, seed=2), "inverse": True, "interleaved": True}


@option("interleaved_out", "pairs into halves, with a norm in tensors of their own",
        lambda f: "refused" if (f.in_place and f.weights) or f.options.get("rotate_k") else "right")  # fmt: skip
def _(cell: Cell) -> Args:
    return {"interleaved": True, "interleaved_out": False, "rotary_dim": 4, "rotary_offset": 2,
            "cos": cell.rand(P, 2), "sin": cell.rand(P, 2)}  # fmt: skip


@option("tables of each batch row", "(B, P, W)")
def _(cell: Cell) -> Args:
    return {"cos": cell.rand(B, P, D // 2, seed=1), "sin": cell.rand(B, P, D // 2, seed=2)}


@option("tables of each head", "(B, P, H, W), k with as many heads",
        lambda f: "refused" if any(x in f.name for x in ("fused", "kv_cache", "joint")) else "right")  # fmt: skip
def _(cell: Cell) -> Args:
    changes = {"cos": cell.rand(1, P, H, D // 2, seed=1), "sin": cell.rand(1, P, H, D // 2, seed=2)}
    if "k" in cell.function.heads and cell.function.name != "norm_rope_joint":
        changes["k"] = cell.rand(B, S, H, D, seed=1)
        if "k_weight" in cell.function.weights:
            changes["k_weight"] = cell.rand(*cell.size("q_weight"), seed=7)
        for name in ("v", "k_cache", "v_cache"):
            if has(name)(cell.function):
                changes[name] = cell.rand(*SIZES[name][:-2], H, D, seed=3)
    return changes


@option("position_ids", "of each batch row, some outside of the table", only(right, simple))
def _(cell: Cell) -> Args:
    return {"position_ids": torch.tensor([[3, 0, 5], [P, 1, -1]], device=cell.device)}


@option("mrope", "three axes of positions in sections", only(right, simple))
def _(cell: Cell) -> Args:
    ids = torch.arange(3 * B * S, device=cell.device).view(3, B, S) % P
    return {"position_ids": ids.int(), "mrope_section": [1, 2, 1]}


@option("mrope, spread", "the pairs of an axis are not neighbours, full width", only(right, simple))
def _(cell: Cell) -> Args:
    ids = torch.arange(2 * S, device=cell.device).view(2, S) % P
    angles = cell.rand(P, D)
    return {"position_ids": ids, "mrope_section": (2, 2), "mrope_interleaved": True, "cos": angles.cos(),
            "sin": angles.sin()}  # fmt: skip


@option("start_positions", "one for each batch row", only(right, simple))
def _(cell: Cell) -> Args:
    return {"start_positions": torch.tensor([2, 0], device=cell.device, dtype=torch.int32)}


def packed(cell: Cell, tokens: int) -> Args:
    """Heads of "thd", with slots for as many tokens."""
    args: Args = {name: cell.rand(tokens, *SIZES[name][2:], seed=n) for n, name in enumerate(cell.function.heads)}
    if "kv_cache" in cell.function.name:
        args["slot_mapping"] = torch.arange(tokens, device=cell.device)
    return {**args, "layout": "thd"}


@option("thd", "packed tokens", only(right, simple))
def _(cell: Cell) -> Args:
    return packed(cell, 5)


def ragged(f: Function) -> bool:
    return simple(f) and "norm" not in f.name and "kv_cache" not in f.name


@option("cu_seqlens", "sequences, an empty one, spare tokens", only(right, ragged))
def _(cell: Cell) -> Args:
    return {**packed(cell, 7), "cu_seqlens": torch.tensor([0, 3, 3, 5], device=cell.device)}


@option("cu_seqlens and start_positions", "int32", only(right, ragged))
def _(cell: Cell) -> Args:
    offsets = torch.tensor([0, 2, 5], device=cell.device, dtype=torch.int32)
    return {**packed(cell, 5), "cu_seqlens": offsets, "start_positions": offsets[:2]}


@option("packed_table", "a row for each token", only(right, lambda f: f.name in MSCALED))
def _(cell: Cell) -> Args:
    offsets = torch.tensor([0, 3, 5], device=cell.device)
    return {**packed(cell, 5), "cu_seqlens": offsets, "packed_table": True, "max_seqlen": 3}


@option("context parallel", "two chunks of a dense batch", only(right, lambda f: f.name in MSCALED))
def _(cell: Cell) -> Args:
    name = cell.function.turned
    even = {n: cell.rand(B, 4, *SIZES[n][2:], seed=5) for n in name}
    return {**even, "cos": cell.rand(12, 4), "sin": cell.rand(12, 4), "cp_size": 2, "cp_rank": 1}


@option("context parallel, packed", "chunks of each sequence", only(right, lambda f: f.name in MSCALED))
def _(cell: Cell) -> Args:
    offsets = torch.tensor([0, 7, 7, 9], device=cell.device)
    return {**packed(cell, 5), "cu_seqlens": offsets, "cp_size": 2, "cp_rank": 0, "cos": cell.rand(9, 4),
            "sin": cell.rand(9, 4)}  # fmt: skip


@option("sbhd", "the sequence first", only(right, simple))
def _(cell: Cell) -> Args:
    return {"layout": "sbhd", **{n: cell.rand(S, B, *SIZES[n][2:], seed=4) for n in cell.function.heads}}


@option(
    "bhsd", "heads before the sequence", lambda f: "refused" if "fused" in f.name else "right" if simple(f) else None
)
def _(cell: Cell) -> Args:
    heads = {n: cell.rand(B, SIZES[n][2], S, SIZES[n][3], seed=4) for n in cell.function.heads}
    return {"layout": "bhsd", **heads}


@option("without k", "k is None", only(right, lambda f: several(f) and simple(f) and "kv_cache" not in f.name))
def _(cell: Cell) -> Args:
    changes: Args = {"k": None}
    if "k_scale" in cell.function.options:
        changes["k_scale"] = None
    return {**changes, **({"k_weight": None} if cell.function.weights else {})}


@option("v stays", "v comes back as a view", only(right, lambda f: f.name in ("fused_qkv", "fused_qkv_norm")))
def _(cell: Cell) -> Args:
    return {"copy_v": False}


@option("all heads of q first", "order", only(right, lambda f: f.name.startswith("fused_qkv")))
def _(cell: Cell) -> Args:
    return {"order": "qkv", "qkv": cell.rand(B, S, 8, D, seed=4)}


@option("a gate after each head of q", "order", only(right, lambda f: f.name.startswith("fused_qkv")))
def _(cell: Cell) -> Args:
    return {"order": "qkv_gated", "qkv": cell.rand(B, S, 12, D, seed=4)}


@option("a projection's bias", "it is added first", only(right, lambda f: f.name.startswith("fused_qkv")))
def _(cell: Cell) -> Args:
    return {"bias": cell.rand(8 * D, seed=5)}


@option("without weights", "the norm alone", only(right, named(NORMS)))
def _(cell: Cell) -> Args:
    return dict.fromkeys(cell.function.weights)


@option("without a table", "the norm alone, positions given", only(right, named(NORMS)))
def _(cell: Cell) -> Args:
    ids = {"position_ids": torch.full((S,), 1000, device=cell.device)} if simple(cell.function) else {}
    return {"cos": None, "sin": None, **ids}


@option("zero_centered", "one weight is missing, another eps", only(right, named(NORMS)))
def _(cell: Cell) -> Args:
    return {"zero_centered": True, "k_weight": None, "eps": 0.25}


@option("layer_norm", "the mean is subtracted; with biases", only(right, named(NORMS)))
def _(cell: Cell) -> Args:
    names = () if "joint" in cell.function.name else ("q_bias", "k_bias")
    biases = {name: cell.rand(*cell.size(name), seed=n) for n, name in enumerate(names)}
    return {"norm_kind": "layer_norm", **biases}


@option("after_rope", "the norm follows the rotation", only(right, named(NORMS)))
def _(cell: Cell) -> Args:
    return {"after_rope": True}


@option("fp8 cache", "with scales", only(right, named(CACHES)))
def _(cell: Cell) -> Args:
    caches = {name: cell.rand(*SIZES[name], seed=8).to(FP8) for name in ("k_cache", "v_cache")}
    q_scale = {} if cell.function.in_place else {"q_scale": torch.tensor(0.5, device=cell.device)}
    return {**caches, "k_scale": 0.5, "v_scale": torch.tensor([0.001], device=cell.device), **q_scale}


@option("pages", "a paged cache, heads before the rows", only(right, named(CACHES)))
def _(cell: Cell) -> Args:
    return {n: cell.rand(5, 1, 2, D, seed=8).transpose(1, 2) for n in ("k_cache", "v_cache")}


@option("both tables of the joint call", "each stream has its own", only(right, named("joint")))
def _(cell: Cell) -> Args:
    return {"cos": (cell.rand(S, 4), cell.rand(2, 4)), "sin": (cell.rand(S, 4, seed=1), cell.rand(2, 4, seed=1))}


def _dtype(dtype: torch.dtype) -> None:
    @situation(str(dtype).removeprefix("torch."), "every tensor that may be is of this dtype")
    def _(cell: Cell) -> str:
        return cell.settle({n: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
                            for n, x in cell.args().items()})  # fmt: skip

    @situation(f"{dtype} and its gradient", "the same under autograd".removeprefix("torch."), derived)
    def _(cell: Cell) -> str:
        f = cell.function
        leaves = {n: cell.args()[n].to(dtype) for n in (*f.heads, *f.weights)}
        return cell.settle_grad(leaves, lambda leaves: {n: x * 1 for n, x in leaves.items()})


_dtype(torch.bfloat16)
_dtype(torch.float16)


# ---- lazy bits ---------------------------------------------------------------------------------------


def negative(x: Tensor) -> Tensor:
    """The same numbers, read with torch's lazy negative bit."""
    y = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert y.is_neg()
    return y


def negative_dense(x: Tensor) -> Tensor:
    y = torch._neg_view(-x)
    assert y.is_neg()
    return y


def gradient_leaves(cell: Cell) -> Args:
    f, args = cell.function, cell.args()
    return {n: args[n] for n in (*f.heads, *f.weights)}


for _group, _needs in (
    ("q", has()), ("k", several), ("v", has("v")), ("tables", has()), ("weights", has("q_weight")),
    ("k_cache", has("k_cache")),
):  # fmt: skip

    def _names(f: Function, group: str) -> tuple[str, ...]:
        if group == "q":
            return f.turned[:1]
        return {"tables": ("cos", "sin"), "weights": f.weights}.get(group, (group,))

    for _make, _how in ((negative, "every other element"), (negative_dense, "dense")):

        def _read(f: Function, group: str = _group, strided: bool = _make is negative) -> str | None:
            """Written tensors must not have this bit, and weights must be contiguous."""
            written = any(name in f.written for name in _names(f, group))
            return "refused" if written or (group == "weights" and strided) else "right"

        @situation(f"negative bit on {_group}, {_how}", "z.conj().imag, read lazily", only(_read, _needs))
        def _(cell: Cell, group: str = _group, make: Any = _make) -> str:
            args = cell.args()
            return cell.settle({**args, **{n: make(args[n]) for n in _names(cell.function, group)}})


@situation("negative bit under autograd", "on all that is rotated", lambda f: "right" if f.derived and not f.in_place
           else "refused")  # fmt: skip
def _(cell: Cell) -> str:
    return cell.settle_grad(gradient_leaves(cell), lambda leaves: {
        n: torch._neg_view(-x) if n in cell.function.turned else x * 1 for n, x in leaves.items()})  # fmt: skip


@situation("gradients with the negative bit", "as complex numbers hand them back", only(right, lambda f: f.derived))
def _(cell: Cell) -> str:
    seen = []

    def run(args: Args) -> tuple[Any, ...]:
        out = cell.call(args)
        lazy = []
        for y in out:
            y = y * 1
            y.register_hook(lambda g: seen.append(g.is_neg()))
            lazy.append(torch.complex(torch.zeros_like(y), y).conj().imag.neg())
        return tuple(lazy)

    return cell.settle_grad(gradient_leaves(cell), times_one, run, same=False)


@situation("dense gradients with the negative bit", "handed to backward", only(right, lambda f: f.derived))
def _(cell: Cell) -> str:
    return cell.settle_grad(gradient_leaves(cell), times_one, cotangent=negative_dense)


@situation("expanded gradients", "those of a sum", only(right, lambda f: f.derived))
def _(cell: Cell) -> str:
    one = torch.ones((), device=cell.device)
    return cell.settle_grad(gradient_leaves(cell), times_one, gradient=lambda y: one.expand(y.shape))


@situation("gradients of other strides", "transposed and padded", only(right, lambda f: f.derived))
def _(cell: Cell) -> str:
    return cell.settle_grad(gradient_leaves(cell), times_one, cotangent=lambda g: torch.stack((g, g), -1).permute(
        4, 1, 0, 2, 3).contiguous().permute(0, 2, 1, 3, 4)[1])  # fmt: skip


@situation("unaligned gradients", "off by an element", only(right, lambda f: f.derived))
def _(cell: Cell) -> str:
    return cell.settle_grad(gradient_leaves(cell), times_one, cotangent=lambda g: torch.cat(
        (g.flatten()[:1], g.flatten()))[1:].view(g.shape))  # fmt: skip


def _conjugate(make: Any, name: str) -> None:
    @situation(f"{name} on freqs_cis", "a table of the rotation back")
    def _(cell: Cell) -> str:
        cis = torch.polar(torch.ones(P, D // 2), cell.rand(P, D // 2).cpu()).to(cell.device)
        return cell.settle(changed(cell, {**NO_TABLES, "freqs_cis": make(cis)}))


_conjugate(lambda z: z.conj(), "conjugate bit")
_conjugate(lambda z: torch._neg_view(z), "negative bit")
_conjugate(lambda z: torch._neg_view(z.conj()), "both bits")


# ---- views in place, with and without autograd -------------------------------------------------------


def times_one(leaves: Args) -> Args:
    return {n: x * 1 for n, x in leaves.items()}


@situation("gradients", "against torch's own through the oracle", derived)
def _(cell: Cell) -> str:
    return cell.settle_grad(gradient_leaves(cell), times_one)


def _origin(name: str, shape: Callable[[tuple[int, ...]], tuple[int, ...]], view: Callable[..., Tensor],
            ends: Ends = derived) -> None:  # fmt: skip
    """q, k or qkv are views of fresh tensors, with and without a gradient."""

    @situation(f"{name} under autograd", "q and k together, each a view", ends)
    def _(cell: Cell) -> str:
        f, args = cell.function, cell.args()
        leaves = {n: cell.rand(*shape(cell.size(n)), seed=30 + i) for i, n in enumerate(f.turned)}
        leaves |= {n: args[n] for n in (*f.copied, *f.weights)}

        def build(leaves: Args) -> Args:
            built = times_one(leaves)
            for n in f.turned:
                built[f"base of {n}"] = built[n]
                built[n] = view(built[n], cell.size(n))
            return built

        return cell.settle_grad(leaves, build)

    @situation(f"{name} without gradients", "the same under no_grad")
    def _(cell: Cell) -> str:
        f = cell.function
        bases = {n: cell.rand(*shape(cell.size(n)), seed=30 + i) for i, n in enumerate(f.turned)}
        return cell.settle(cell.args(**{n: view(x, cell.size(n)) for n, x in bases.items()}))


def multi_output(f: Function) -> str | None:
    """torch forbids writes to the outputs of unbind, chunk and split under autograd."""
    return "refused" if not f.derived or f.in_place else "right"


_origin("view", lambda s: (*s[:2], s[2] * s[3]), lambda x, s: x.view(s))
_origin("unflatten", lambda s: (*s[:2], s[2] * s[3]), lambda x, s: x.unflatten(-1, s[2:]))
_origin("transpose", lambda s: (s[1], s[0], *s[2:]), lambda x, s: x.transpose(0, 1))
_origin("view and transpose", lambda s: (s[1], s[0] * s[2], s[3]),
        lambda x, s: x.view(s[1], s[0], *s[2:]).transpose(0, 1))  # fmt: skip
_origin("permute", lambda s: (s[3], s[2], s[1], s[0]), lambda x, s: x.permute(3, 2, 1, 0))
_origin("select", lambda s: (*s, 2), lambda x, s: x[..., 1])
_origin("narrow", lambda s: (*s[:3], s[3] + 3), lambda x, s: x.narrow(-1, 1, s[3]))
_origin("slice with a step", lambda s: (*s[:3], 2 * s[3]), lambda x, s: x[..., ::2])
_origin("squeeze", lambda s: (1, *s), lambda x, s: x.squeeze(0))
_origin("as_strided", lambda s: (2, *s), lambda x, s: x.as_strided(s, x.stride()[1:], 3))
_origin("unbind", lambda s: (2, *s), lambda x, s: x.unbind(0)[1], multi_output)
_origin("chunk", lambda s: (2 * s[0], *s[1:]), lambda x, s: x.chunk(2)[1], multi_output)
_origin("split", lambda s: (*s[:3], 2 * s[3]), lambda x, s: x.split(s[3], -1)[0], multi_output)
_origin("a view of a view", lambda s: (1, *s[:2], s[2] * s[3]), lambda x, s: x[0].view(s)[:, :])


def _of_one(name: str, take: Callable[[Tensor], list[Tensor]], ends: Ends) -> None:
    """q and k are views of one projection."""

    @situation(name, "q and k together, under autograd", only(ends, lambda f: several(f) and simple(f)))
    def _(cell: Cell) -> str:
        f, args = cell.function, cell.args()
        leaves = {"base": cell.rand(B, S, H + 1, D, seed=9), **{n: args[n] for n in (*f.copied, *f.weights)}}

        def build(leaves: Args) -> Args:
            built = times_one(leaves)
            return {**built, **dict(zip("qk", take(built["base"])))}

        return cell.settle_grad(leaves, build)

    @situation(f"{name} without gradients", "q and k together", only(right, lambda f: several(f) and simple(f)))
    def _(cell: Cell) -> str:
        base = cell.rand(B, S, H + 1, D, seed=9)
        return cell.settle(cell.args(**dict(zip("qk", take(base)))), versions=True)


_of_one("slices of one projection", lambda x: [x[:, :, :H], x[:, :, H:]], derived)
_of_one("split of one projection", lambda x: list(x.split([H, 1], 2)), multi_output)


@situation("a leaf in place", "torch forbids it under autograd", lambda f: "right" if f.derived and not f.in_place
           else "refused")  # fmt: skip
def _(cell: Cell) -> str:
    return cell.settle_grad(gradient_leaves(cell), lambda leaves: leaves)


@situation("a view of a leaf in place", "torch forbids it too", lambda f: "right" if f.derived and not f.in_place
           else "refused")  # fmt: skip
def _(cell: Cell) -> str:
    return cell.settle_grad(gradient_leaves(cell), lambda leaves: {n: x[:] for n, x in leaves.items()})


@situation("a leaf under no_grad", "it is written and stays a leaf")
def _(cell: Cell) -> str:
    args = {n: Parameter(x) if n in cell.function.heads else x for n, x in cell.args().items()}
    return cell.settle(args, lambda args: in_context(torch.no_grad(), cell, args), fake=False)


def in_context(context: Any, cell: Cell, args: Args) -> tuple[Any, ...]:
    with context:
        return cell.call(args)


@situation("a view made under no_grad", "torch forbids writes to it where gradients are recorded", lambda f: "refused"
           if f.in_place or not f.derived else "right")  # fmt: skip
def _(cell: Cell) -> str:
    """Such a view is a leaf."""

    def build(leaves: Args) -> Args:
        built = times_one(leaves)
        with torch.no_grad():
            return {**built, **{n: built[n][:] for n in cell.function.turned}}

    return cell.settle_grad(gradient_leaves(cell), build)


@situation("detach", "written through, past autograd")
def _(cell: Cell) -> str:
    args = cell.args()
    bases = {n: x.clone().requires_grad_() * 1 for n, x in args.items() if n in cell.function.heads}
    ended = cell.settle({**args, **{n: x.detach() for n, x in bases.items()}})
    for n, x in bases.items():
        assert torch.equal(x.detach(), args[n]) == (n not in cell.function.written)
    return ended


@situation("one of two wants a gradient", "q alone, k alone", only(derived, several))
def _(cell: Cell) -> str:
    ended = set()
    for name in cell.function.turned:
        ended.add(cell.settle_grad({name: cell.args()[name]}, times_one))
    assert len(ended) == 1
    return ended.pop()


@situation("only a weight wants a gradient", "q and k do not", only(derived, named(NORMS)))
def _(cell: Cell) -> str:
    ended = {cell.settle_grad({n: cell.args()[n]}, times_one) for n in cell.function.weights}
    assert len(ended) == 1
    return ended.pop()


def learned(f: Function) -> str | None:
    return "right" if f.derived and not f.in_place else "refused"


@situation("tables that want a gradient", "they get one where the call has gradients", learned)
def _(cell: Cell) -> str:
    args = cell.args()
    return cell.settle_grad({name: args[name] for name in ("cos", "sin")}, lambda leaves: leaves)


@situation("tables that want a gradient, under no_grad", "nothing is lost")
def _(cell: Cell) -> str:
    args = cell.args()
    args["sin"].requires_grad_()
    return cell.settle(args, lambda args: in_context(torch.no_grad(), cell, args))


# ---- aliases -----------------------------------------------------------------------------------------


def same_memory(f: Function) -> str | None:
    return "refused" if len([n for n in f.turned if n in f.written]) > 0 else "right"


@situation("q is k", "one tensor twice; refused where it is written", only(same_memory, several))
def _(cell: Cell) -> str:
    args = cell.args()
    changes = dict.fromkeys(cell.function.turned[:2], args["k"])
    if "q_weight" in args:
        changes["q_weight"] = args["k_weight"]
    if simple(cell.function):
        return cell.settle({**args, **changes})
    changes["q2"] = args["k2"]  # as many heads in both streams
    return cell.settle({**args, **changes})


@situation("k is v", "one tensor twice", only(lambda f: "refused" if "k" in f.written else "right", has("v")))
def _(cell: Cell) -> str:
    args = cell.args()
    return cell.settle({**args, "v": args["k"]})


@situation("both streams are one", "q is q2, k is k2, v is v2", only(right, named("joint")))
def _(cell: Cell) -> str:
    args = cell.args()
    return cell.settle({**args, **{f"{n}{two}": args[n + one] for n in ("q", "k", "v", "q_weight", "k_weight")
                                   for one, two in (("", "2"),)}})  # fmt: skip


@situation("k_cache is v_cache", "both are written", only("refused", named(CACHES)))
def _(cell: Cell) -> str:
    args = cell.args()
    return cell.settle({**args, "v_cache": args["k_cache"]})


@situation("caches in one tensor", "stacked, each other's neighbours", only(right, named(CACHES)))
def _(cell: Cell) -> str:
    both = cell.rand(10, 2, 1, D)
    return cell.settle(cell.args(k_cache=both[:, 0], v_cache=both[:, 1]), versions=True)


@situation("k lies in its cache", "what is read is written", only("refused", named(CACHES)))
def _(cell: Cell) -> str:
    cache = cell.rand(10, 1, D)
    return cell.settle(cell.args(k_cache=cache, k=cache[:6].view(B, S, 1, D)))


@situation("one weight twice", "for all", only(right, named(NORMS)))
def _(cell: Cell) -> str:
    args = cell.args()
    if cell.function.options.get("across_heads"):
        args["k"] = cell.rand(B, S, H, D, seed=3)
    return cell.settle({**args, **dict.fromkeys(cell.function.weights, args["q_weight"])})


@situation("cos is sin", "one table twice")
def _(cell: Cell) -> str:
    args = cell.args()
    return cell.settle({**args, "sin": args["cos"]})


@situation("equal number scales", "1.0 and 1.0", only(right, lambda f: "fp8" in f.name or "kv_cache" in f.name))
def _(cell: Cell) -> str:
    if "fp8" in cell.function.name:
        return cell.settle(cell.args(q_scale=1.0, k_scale=1.0))
    caches = {name: cell.rand(*SIZES[name], seed=8).to(FP8) for name in ("k_cache", "v_cache")}
    return cell.settle(cell.args(**caches, k_scale=1.0, v_scale=1.0))


@situation("one scale tensor twice", "a tensor", only(right, lambda f: "fp8" in f.name or "kv_cache" in f.name))
def _(cell: Cell) -> str:
    scale = torch.tensor(0.5, device=cell.device)
    if "fp8" in cell.function.name:
        return cell.settle(cell.args(q_scale=scale, k_scale=scale))
    caches = {name: cell.rand(*SIZES[name], seed=8).to(FP8) for name in ("k_cache", "v_cache")}
    return cell.settle(cell.args(**caches, k_scale=scale, v_scale=scale))


@situation("overlapping windows", "as_strided; refused where they are written", where_written)
def _(cell: Cell) -> str:
    f = cell.function
    changes = {}
    for n in f.written or f.heads:
        if n not in f.heads:
            continue
        b, s, h, d = cell.size(n)
        base = cell.rand(b * s * h * d, seed=4)
        changes[n] = base.as_strided((b, s, h, d), (s * h * d, h * d // 2, d, 1))
    return cell.settle(cell.args(**changes))


@situation("overlapping windows of caches", "as_strided", only("refused", named(CACHES)))
def _(cell: Cell) -> str:
    return cell.settle(cell.args(v_cache=cell.rand(11 * D).as_strided((10, 1, D), (D // 2, D, 1))))


@situation("q and k overlap", "parts of one buffer; refused where they are written", only(same_memory, several))
def _(cell: Cell) -> str:
    base = cell.rand(B * S * H * D + 8)
    changes = {"q": base[8:].view(B, S, H, D), "k": base[: B * S * D].view(B, S, 1, D)}
    return cell.settle(cell.args(**changes), versions=True)


@situation("q and k are interleaved", "slices of one tensor that do not overlap", only(right, several))
def _(cell: Cell) -> str:
    base = cell.rand(B, S, H, 2, D)
    args = cell.args(q=base[:, :, :, 0], k=base[:, :, :1, 1])
    return cell.settle(args)


@situation("q and k alternate", "elements of one tensor, in turn", only(right, several))
def _(cell: Cell) -> str:
    base = cell.rand(B, S, H, D, 2)
    return cell.settle(cell.args(q=base[..., 0], k=base[:, :, :1, :, 1]))


@situation("k lies in q's gaps", "rows of q with k between them", only(right, several))
def _(cell: Cell) -> str:
    base = cell.rand(B, S, (H + 1) * D)
    return cell.settle(cell.args(q=base[..., : H * D].unflatten(-1, (H, D)), k=base[..., H * D :].unsqueeze(2)))


# ---- expanded, empty and odd shapes ------------------------------------------------------------------


for _axis, _letter in enumerate("BSHD"):

    def _overlaps(f: Function, letter: str = _letter) -> str | None:
        """k has one head, so it does not overlap along H."""
        return "refused" if [n for n in f.turned if n in f.written and (letter != "H" or n != "k")] else "right"

    @situation(f"expanded along {_letter}", "all that is rotated; refused where it is written", _overlaps)
    def _(cell: Cell, axis: int = _axis) -> str:
        f = cell.function
        changes = {n: cell.args()[n].narrow(axis, 0, 1).expand(cell.size(n)) for n in f.turned
                   if not f.written or n in f.written or f.name == "kv_cache"}  # fmt: skip
        return cell.settle(cell.args(**changes))

    @situation(f"an expanded v along {_letter}", "it is only read", only(right, has("v")))
    def _(cell: Cell, axis: int = _axis) -> str:
        changes = {n: cell.args()[n].narrow(axis, 0, 1).expand(cell.size(n)) for n in cell.function.copied}
        return cell.settle(cell.args(**changes))

    @situation(f"an expanded k along {_letter}", "where it is only read",
               only(lambda f, h=_letter == "H": "refused" if "k" in f.written and not h else "right",
                    has("v")))  # fmt: skip
    def _(cell: Cell, axis: int = _axis) -> str:
        return cell.settle(cell.args(k=cell.args()["k"].narrow(axis, 0, 1).expand(cell.size("k"))))

    @situation(f"no elements along {_letter}", "an empty tensor", if_not_needed(_letter, right))
    def _(cell: Cell, axis: int = _axis, letter: str = _letter) -> str:
        wants = cell.args() if if_not_needed(letter, right)(cell.function) == "refused" else None
        return cell.settle(cell.args(**emptied(cell, axis, letter)), wants=wants)

    @situation(f"no elements along {_letter}, under autograd", "its gradient is empty", if_not_needed(_letter, derived))
    def _(cell: Cell, axis: int = _axis, letter: str = _letter) -> str:
        changes = emptied(cell, axis, letter)
        leaves = {n: x for n, x in {**gradient_leaves(cell), **changes}.items() if n in gradient_leaves(cell)}
        return cell.settle_grad(
            leaves, lambda leaves: {**times_one(leaves), **{n: x for n, x in changes.items() if n not in leaves}}
        )


def emptied(cell: Cell, axis: int, letter: str) -> Args:
    f = cell.function
    changes: Args = {n: cell.args()[n].narrow(axis, 0, 0) for n in f.heads}
    if letter == "H" and f.options.get("across_heads"):
        changes |= {n: cell.args()[n][:0] for n in f.weights}
    if letter == "D":
        changes |= {n: cell.args()[n][:0] for n in f.weights}
    if "kv_cache" in f.name:
        if letter in "BS":
            changes["slot_mapping"] = torch.empty(changes["q"].shape[:2], dtype=torch.long, device=cell.device)
        else:
            changes |= {n: cell.args()[n].narrow(axis - 1, 0, 0) for n in ("k_cache", "v_cache")}
    return changes


@situation("one stream is empty", "text alone", only(right, named("joint")))
def _(cell: Cell) -> str:
    args = cell.args()
    return cell.settle({**args, **{n: args[n][:, :0] for n in ("q", "k", "v")}})


@situation("no heads of k", "q has some", only(right, lambda f: several(f) and simple(f) and "kv_cache" not in f.name))
def _(cell: Cell) -> str:
    args = cell.args()
    short = {"k_weight": args["k_weight"][:0]} if cell.function.options.get("across_heads") else {}
    return cell.settle({**args, "k": args["k"][:, :, :0], **short})


@situation("no slots", "a cache without any", only(right, named(CACHES)))
def _(cell: Cell) -> str:
    return cell.settle(cell.args(**{n: cell.rand(0, 1, D) for n in ("k_cache", "v_cache")}))


@situation("a table without rows", "there are tokens", refused)
def _(cell: Cell) -> str:
    return cell.settle(cell.args(**{n: cell.rand(0, D // 2) for n in ("cos", "sin")}), wants=cell.args())


@situation("a table of one row, no tokens", "an empty batch")
def _(cell: Cell) -> str:
    changes = {n: cell.rand(0, D // 2) for n in ("cos", "sin")}
    return cell.settle(cell.args(**emptied(cell, 1, "S"), **changes))


@situation("0-d q", "a number is no head", refused)
def _(cell: Cell) -> str:
    return zero_d(cell, cell.function.turned[0])


for _label, _needs in (("k", several), ("v", has("v")), ("cos", has()), ("q_weight", has("q_weight")),
                       ("k_cache", has("k_cache"))):  # fmt: skip

    @situation(f"0-d {_label}", "a number is no such tensor", only("refused", _needs))
    def _(cell: Cell, label: str = _label) -> str:
        return zero_d(cell, label)


def zero_d(cell: Cell, name: str) -> str:
    good = cell.args()
    return cell.settle(cell.args(**{name: cell.rand()}), wants=good)


def _strided(name: str, make: Callable[[Cell, tuple[int, ...]], Tensor], leaf: bool = True) -> None:
    @situation(f"{name} heads", "all that is rotated or copied, its strides promised")
    def _(cell: Cell) -> str:
        return cell.settle(cell.args(**{n: make(cell, cell.size(n)) for n in cell.function.heads}))


_strided("padded", lambda c, s: c.rand(*s[:2], s[2] + 1, s[3] + 8)[:, :, 1:, :-8])
_strided("unaligned", lambda c, s: c.rand(s[0] * s[1] * s[2] * s[3] + 1)[1:].view(s))
_strided("sequence-first", lambda c, s: c.rand(s[1], s[0], *s[2:]).transpose(0, 1))
_strided("heads-first", lambda c, s: c.rand(s[0], s[2], s[1], s[3]).transpose(1, 2))
_strided("elements-first", lambda c, s: c.rand(s[3], *s[:3]).permute(1, 2, 3, 0))
_strided("channels-last", lambda c, s: c.rand(*s).to(memory_format=torch.channels_last))
_strided("every other element of", lambda c, s: c.rand(*s[:3], 2 * s[3])[..., 1::2])
_strided("every other token of", lambda c, s: c.rand(s[0], 2 * s[1], *s[2:])[:, ::2])
_strided("odd-strided", lambda c, s: c.rand(*s[:3], s[3] + 1)[..., 1:])


@situation("strided tables", "cosines and sines in turn, transposed")
def _(cell: Cell) -> str:
    both = cell.rand(D // 2, P, 2)
    return cell.settle(cell.args(cos=both[..., 0].T, sin=both[..., 1].T))


@situation("tables of unlike strides", "one contiguous, one not")
def _(cell: Cell) -> str:
    return cell.settle(cell.args(cos=cell.rand(P, D // 2), sin=cell.rand(D // 2, P).T))


@situation("expanded tables", "one angle, one row, one column")
def _(cell: Cell) -> str:
    ended = {cell.settle(cell.args(cos=cell.rand(*s).expand(P, D // 2), sin=cell.rand(*s, seed=1).expand(P, D // 2)))
             for s in ((1, 1), (1, D // 2), (P, 1))}  # fmt: skip
    return ended.pop()


@situation("strided position_ids", "a transposed and an expanded view", only(right, simple))
def _(cell: Cell) -> str:
    ids = torch.tensor([[3, 0], [5, 1], [2, 2]], device=cell.device).T
    return cell.settle(cell.args(position_ids=ids)) and cell.settle(cell.args(position_ids=ids[:1].expand(B, S)))


@situation("strided weights", "every other one; expanded", only("refused", named(NORMS)))
def _(cell: Cell) -> str:
    ended = set()
    for make in (lambda s: cell.rand(2 * s[0])[::2], lambda s: cell.rand(1).expand(s)):
        ended.add(cell.settle(cell.args(**{n: make(cell.size(n)) for n in cell.function.weights})))
    assert len(ended) == 1
    return ended.pop()


@situation("strided slots", "every other one", only("refused", named(CACHES)))
def _(cell: Cell) -> str:
    slots = torch.arange(B * S, device=cell.device).repeat_interleave(2).view(B, S, 2)[..., 0]
    return cell.settle(cell.args(slot_mapping=slots))


@situation("strided start_positions", "every other one", only("refused", simple))
def _(cell: Cell) -> str:
    return cell.settle(cell.args(start_positions=torch.tensor([1, 9, 0, 9], device=cell.device)[::2]))


@situation("strided caches", "padded and transposed", only(right, named(CACHES)))
def _(cell: Cell) -> str:
    changes = {n: cell.rand(2, D + 2, 10, seed=5).permute(2, 0, 1)[:, 1:, 2:] for n in ("k_cache", "v_cache")}
    return cell.settle(cell.args(**changes))


@situation("no stride to name", "axes of one element with strides of their own")
def _(cell: Cell) -> str:
    changes = {}
    for n in cell.function.heads:
        _, s, h, d = cell.size(n)
        changes[n] = cell.rand(s * h * d).as_strided((1, s, h, d), (7, h * d, d, 1))
    slots = {"slot_mapping": torch.tensor([1, 3, 2], device=cell.device)} if "kv_cache" in cell.function.name else {}
    return cell.settle(cell.args(**changes, **slots))


# ---- kinds of tensors --------------------------------------------------------------------------------


@situation("Parameters", "every tensor is one, under no_grad")
def _(cell: Cell) -> str:
    args = {n: Parameter(x, requires_grad=x.is_floating_point()) if isinstance(x, Tensor) else x
            for n, x in cell.args().items()}  # fmt: skip
    return cell.settle(args, lambda args: in_context(torch.no_grad(), cell, args))


@situation("Parameters without gradients", "requires_grad=False")
def _(cell: Cell) -> str:
    args = {n: Parameter(x, requires_grad=False) if isinstance(x, Tensor) else x for n, x in cell.args().items()}
    return cell.settle(args)


class Named(Tensor):
    """A subclass that does nothing."""


class Held(Tensor):
    """A wrapper that runs each op on the tensor it holds."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=inner.device, requires_grad=inner.requires_grad,
        )  # fmt: skip

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrapped(x: Any) -> Any:
            return x.inner if isinstance(x, Held) else x

        out = func(*tree_map(unwrapped, args), **tree_map(unwrapped, kwargs or {}))
        return tree_map(lambda y: Held(y) if isinstance(y, Tensor) else y, out)


def held(x: Any) -> Any:
    return Held(x) if isinstance(x, Tensor) else x


def _kind(name: str, text: str, wrap: Callable[[Any], Any], ends: Ends = right) -> None:
    def judged(cell: Cell, chosen: Callable[[str], bool]) -> str:
        plain = cell.args()
        args = {n: wrap(x) if isinstance(x, Tensor) and chosen(n) else x for n, x in plain.items()}
        return cell.settle(
            args, lambda args: tuple(y.inner if isinstance(y, Held) else y for y in cell.call(args)),
            wants=cell.args(), same=False, fake=False, versions=False,
        )  # fmt: skip

    @situation(f"{name}, every tensor", text, ends)
    def _(cell: Cell) -> str:
        return judged(cell, lambda n: True)

    @situation(f"{name}, heads alone", text, ends)
    def _(cell: Cell) -> str:
        return judged(cell, lambda n: n in cell.function.heads)

    @situation(f"{name}, tables alone", text, ends)
    def _(cell: Cell) -> str:
        return judged(cell, lambda n: n in ("cos", "sin"))


_kind("a subclass", "with torch's own __torch_function__", lambda x: x.as_subclass(Named))
_kind("a wrapper subclass", "with a __torch_dispatch__", held)


def inference(x: Any) -> Any:
    with torch.inference_mode():
        return x.clone() if isinstance(x, Tensor) else x


def _where_inference(name: str, chosen: Callable[[Function, str], bool], ends: Ends) -> None:
    @situation(f"inference tensors outside, {name}", "made in inference mode, used outside of it", ends)
    def _(cell: Cell) -> str:
        args = {n: inference(x) if chosen(cell.function, n) else x for n, x in cell.args().items()}
        return cell.settle(args)


_where_inference("all", lambda f, n: True, lambda f: "refused" if f.written else "right")
_where_inference("tables", lambda f, n: n in ("cos", "sin"), right)
_where_inference("weights", lambda f, n: n in f.weights, only(right, named(NORMS)))
_where_inference("what is written", lambda f, n: n in f.written, only(refused, lambda f: f.written))


@situation("inference tensors inside", "made and used in inference mode, in place too")
def _(cell: Cell) -> str:
    args = {n: inference(x) for n, x in cell.args().items()}
    return cell.settle(args, lambda args: in_context(torch.inference_mode(), cell, args), fake=False)


@situation("inference mode", "tensors of outside, in place too", right)
def _(cell: Cell) -> str:
    return cell.settle(cell.args(), lambda args: in_context(torch.inference_mode(), cell, args))


@situation("inference tables under autograd", "they cannot be kept for the backward", refused)
def _(cell: Cell) -> str:
    tables = {n: inference(x) for n, x in cell.args().items() if n in ("cos", "sin")}
    return cell.settle_grad(gradient_leaves(cell), lambda leaves: {**times_one(leaves), **tables})


@situation("no_grad", "tensors that want a gradient")
def _(cell: Cell) -> str:
    f = cell.function
    args = {n: x.requires_grad_() * 1 if n in (*f.heads, *f.weights) else x for n, x in cell.args().items()}
    return cell.settle(args, lambda args: in_context(torch.no_grad(), cell, args), fake=False)


@situation("autocast", "dtypes stay what they are")
def _(cell: Cell) -> str:
    context = torch.autocast(torch.device(cell.device).type, dtype=torch.bfloat16)
    return cell.settle(cell.args(), lambda args: in_context(context, cell, args))


@situation("autocast under autograd", "backward outside of it", derived)
def _(cell: Cell) -> str:
    context = torch.autocast(torch.device(cell.device).type, dtype=torch.bfloat16)
    return cell.settle_grad(gradient_leaves(cell), times_one, lambda args: in_context(context, cell, args))


@situation("default dtype fp64", "torch.set_default_dtype")
def _(cell: Cell) -> str:
    def run(args: Args) -> tuple[Any, ...]:
        torch.set_default_dtype(torch.float64)
        try:
            return cell.call(args)
        finally:
            torch.set_default_dtype(torch.float32)

    return cell.settle(cell.args(), run)


@situation("deterministic algorithms", "torch.use_deterministic_algorithms", derived)
def _(cell: Cell) -> str:
    torch.use_deterministic_algorithms(True)
    try:
        return cell.settle_grad(gradient_leaves(cell), times_one)
    finally:
        torch.use_deterministic_algorithms(False)


@situation("anomaly detection", "torch.autograd.set_detect_anomaly", derived)
def _(cell: Cell) -> str:
    with torch.autograd.set_detect_anomaly(True):
        return cell.settle_grad(gradient_leaves(cell), times_one)


@situation("meta tensors", "on torch's device without memory: shapes and strides", host=False)
def _(cell: Cell) -> str:
    args = {n: x.to("meta") if isinstance(x, Tensor) else x for n, x in cell.args().items()}
    return shapes_alone(cell, args, nullcontext())


@situation("fake tensors", "FakeTensorMode at the call")
def _(cell: Cell) -> str:
    mode = FakeTensorMode()
    args = {n: mode.from_tensor(x) if isinstance(x, Tensor) else x for n, x in cell.args().items()}
    return shapes_alone(cell, args, mode)


@situation("fake tensors outside of their mode", "the mode is theirs")
def _(cell: Cell) -> str:
    mode = FakeTensorMode()
    args = {n: mode.from_tensor(x) if isinstance(x, Tensor) else x for n, x in cell.args().items()}
    return shapes_alone(cell, args, nullcontext())


@situation("fake tensors under autograd", "their gradients are fake", derived)
def _(cell: Cell) -> str:
    mode = FakeTensorMode()
    leaves = {n: mode.from_tensor(x.detach()).requires_grad_() for n, x in gradient_leaves(cell).items()}
    rest = {n: mode.from_tensor(x) if isinstance(x, Tensor) else x for n, x in cell.args().items()}
    try:
        out = cell.call({**rest, **times_one(leaves)})
    except InvalidInput as error:
        cell.check_text(error)
        return "refused"
    torch.autograd.backward(out, [torch.ones_like(y) for y in out])
    for n, leaf in leaves.items():
        assert leaf.grad is not None, n
        assert leaf.grad.shape == leaf.shape
    return "right"


def shapes_alone(cell: Cell, args: Args, context: Any) -> str:
    """Results without numbers have the shapes, dtypes and strides of real ones."""
    real = cell.call(cell.args())
    try:
        with context:
            out = cell.call(args)
    except InvalidInput as error:
        cell.check_text(error)
        return "refused"
    assert len(out) == len(real)
    for y, x in zip(out, real):
        assert (y.shape, y.stride(), y.dtype) == (x.shape, x.stride(), x.dtype)
    for y, name in zip(out, cell.function.turned if cell.function.in_place else ()):
        assert y is args[name]
    return cell.settle(cell.args())


@situation("the meta device as default", 'torch.device("meta") active at the call')
def _(cell: Cell) -> str:
    ended = {cell.settle(cell.args(), lambda args: in_context(torch.device("meta"), cell, args)) for _ in range(2)}
    return ended.pop()


@situation("the meta device as default, other options", "whatever is made for them is not on it")
def _(cell: Cell) -> str:
    f = cell.function
    ids = {"position_ids": torch.tensor([[0, 2, 1]], device=cell.device)} if simple(f) else {}
    return cell.settle(cell.args(**ids), lambda args: in_context(torch.device("meta"), cell, args), fake=False)


@situation("the meta device as default, under autograd", "at the call", derived)
def _(cell: Cell) -> str:
    return cell.settle_grad(gradient_leaves(cell), times_one, lambda args: in_context(torch.device("meta"), cell, args))


for _label, _convert in (
    ("sparse", lambda x: x.to_sparse()), ("mkldnn", lambda x: x.to_mkldnn()),
    ("nested", lambda x: torch.nested.nested_tensor(list(x))),
    ("a quantized", lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)),
):  # fmt: skip

    @situation(f"{_label} q", "not a tensor with strides", refused)
    def _(cell: Cell, convert: Any = _convert) -> str:
        name = cell.function.turned[0]
        good = cell.args()
        odd = convert(good[name].cpu())
        odd = odd if odd.is_mkldnn else odd.to(cell.device)  # only CPUs have that layout
        return cell.settle({**good, name: odd}, wants=cell.args(), versions=False)


# ---- modes, hooks and transforms ---------------------------------------------------------------------


class Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


for _mode, _label in ((Dispatched, "a dispatch mode"), (Functions, "a function mode")):

    @situation(f"{_label} of the user", "in place counts as written there too")
    def _(cell: Cell, mode: Any = _mode) -> str:
        ended = {cell.settle(cell.args(), lambda args: in_context(mode(), cell, args)) for _ in range(2)}
        return ended.pop()

    @situation(f"{_label} under autograd", "forward and backward", derived)
    def _(cell: Cell, mode: Any = _mode) -> str:
        with mode():
            leaves = gradient_leaves(cell)
        return cell.settle_grad(leaves, times_one, lambda args: in_context(mode(), cell, args))


@situation("saved-tensor hooks", "what is kept for the backward is packed", derived)
def _(cell: Cell) -> str:
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: (x.clone(),), lambda held: held[0])
    return cell.settle_grad(gradient_leaves(cell), times_one, lambda args: in_context(hooks, cell, args))


@situation("save_on_cpu", "what is kept for the backward goes elsewhere", derived)
def _(cell: Cell) -> str:
    hooks = torch.autograd.graph.save_on_cpu()
    return cell.settle_grad(gradient_leaves(cell), times_one, lambda args: in_context(hooks, cell, args))


for _reentrant in (False, True):

    @situation(f"checkpoint, use_reentrant={_reentrant}", "computed again for the backward",
               only(right, lambda f: f.derived))  # fmt: skip
    def _(cell: Cell, reentrant: bool = _reentrant) -> str:
        f = cell.function

        def run(args: Args) -> tuple[Any, ...]:
            names = [n for n, x in args.items() if isinstance(x, Tensor)]

            def again(*tensors: Tensor) -> tuple[Any, ...]:
                given = dict(zip(names, tensors))
                if f.in_place:  # the inputs of a checkpoint do not change
                    given |= {n: given[n] * 1 for n in f.turned}
                return cell.call({**args, **given})

            out = checkpoint(again, *(args[n] for n in names), use_reentrant=reentrant)
            for n, y in zip(f.turned, out):
                if f.in_place:
                    args[n].data.copy_(y.data)
            return out  # type: ignore[no-any-return]

        return cell.settle_grad(gradient_leaves(cell), times_one, run, same=False)


@situation("double backward", "the gradient's gradient; a norm has none", only(
    lambda f: "refused" if "norm" in f.name else "right", lambda f: f.derived))  # fmt: skip
def _(cell: Cell) -> str:
    def second(call: Any, leaves: Args, dtype: torch.dtype) -> list[Tensor]:
        out = [y for y in call({**cell.args(), **{n: x * 1 for n, x in leaves.items()}}) if y is not None]
        cotangents = [cell.rand(*y.shape, seed=9 + n).to(dtype).requires_grad_() for n, y in enumerate(out)]
        first = torch.autograd.grad(out, [leaves[n] for n in names], cotangents, create_graph=True)
        loss = sum((g * cell.rand(*g.shape, seed=40 + n).to(dtype)).sum() for n, g in enumerate(first))
        return list(torch.autograd.grad(loss, cotangents))

    names = cell.function.heads
    leaves = {n: x.requires_grad_() for n, x in gradient_leaves(cell).items() if n in names}
    try:
        got = second(cell.call, leaves, torch.float32)
    except JitropeError as error:
        text = str(error)
        assert "second derivative" in text, text
        return "refused"
    exact = {n: x.detach().double().requires_grad_() for n, x in leaves.items()}
    for y, wanted in zip(got, second(lambda args: cell.function.expected(args)[0], exact, torch.float64)):
        close(y, wanted, "the second derivative")
    return "right"


@situation("backward twice", "retain_graph", only(right, lambda f: f.derived))
def _(cell: Cell) -> str:
    leaves = {n: x.requires_grad_() for n, x in gradient_leaves(cell).items()}
    out = cell.call({**cell.args(), **times_one(leaves)})
    gradients = [cell.rand(*y.shape) for y in out]
    once = torch.autograd.grad(out, list(leaves.values()), gradients, retain_graph=True)
    twice = torch.autograd.grad(out, list(leaves.values()), gradients)
    assert all(torch.equal(a, b) for a, b in zip(once, twice))
    return "right"


@situation("some outputs unused", "the others' gradients are right", only(right, lambda f: f.derived))
def _(cell: Cell) -> str:
    def partly(call: Any, leaves: Args, which: int) -> tuple[Any, ...]:
        y = call({**cell.args(), **times_one(leaves)})[which]
        gradient = cell.rand(*y.shape).to(y.dtype)
        return torch.autograd.grad(y, list(leaves.values()), gradient, materialize_grads=True)

    count = len(cell.call(cell.args()))
    for which in range(count):
        leaves = {n: x.requires_grad_() for n, x in gradient_leaves(cell).items()}
        exact = {n: x.detach().double().requires_grad_() for n, x in leaves.items()}
        wanted = partly(lambda args: cell.function.expected(args)[0], exact, which)
        for n, g, z in zip(leaves, partly(cell.call, leaves, which), wanted):
            close(g, z, f"the gradient of {n} by output {which}")
    return "right"


@situation("written after the call", "a backward that needs what was there raises", only(right, lambda f: f.derived))
def _(cell: Cell) -> str:
    args = {**cell.args(), **times_one({n: x.requires_grad_() for n, x in gradient_leaves(cell).items()})}
    out = cell.call(args)
    args["cos"].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(out, [torch.ones_like(y) for y in out])
    return "right"


def by_name(cell: Cell, names: tuple[str, ...]) -> Callable[..., Any]:
    """The call as a function of some of its tensors."""
    rest = cell.args()

    def call(*tensors: Tensor) -> Any:
        return cell.call({**rest, **dict(zip(names, tensors))})

    return call


def expected_by_name(cell: Cell, names: tuple[str, ...]) -> Callable[..., Any]:
    rest = cell.args()

    def call(*tensors: Tensor) -> Any:
        return cell.function.expected({**rest, **dict(zip(names, tensors))})[0]

    return call


def transformed(cell: Cell, transform: Callable[..., Any], *tensors: Any) -> str:
    """A functorch transform of a call against that of the oracle. torch itself refuses some."""
    names = cell.function.turned
    before = [x.clone() for x in tensors]
    try:
        got = transform(by_name(cell, names))(*tensors)
    except InvalidInput as error:
        cell.check_text(error)
        for x, was in zip(tensors, before):
            assert torch.equal(x, was)
        cell.settle(cell.args())
        return "refused"
    want = transform(expected_by_name(cell, names))(*(x.double() for x in tensors))
    for y, z in zip(torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(want)):
        close(y, z, "what the transform gives")
    return "right"


def heads_of(cell: Cell) -> tuple[Tensor, ...]:
    return tuple(cell.args()[n] for n in cell.function.turned)


@situation("vmap", "torch.func.vmap over an axis in front", lambda f: "either")
def _(cell: Cell) -> str:
    tensors = tuple(torch.stack((x, 2 * x)) for x in heads_of(cell))
    return transformed(cell, torch.func.vmap, *tensors)


def loss_of(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *xs: sum((y.double() * y.double()).sum() for y in call(*(x * 1 for x in xs)))


@situation("torch.func.grad", "refused, as the message says: loss.backward() is there", refused)
def _(cell: Cell) -> str:
    argnums = tuple(range(len(cell.function.turned)))
    return transformed(cell, lambda call: torch.func.grad(loss_of(call), argnums), *heads_of(cell))


@situation("torch.func.vjp", "refused likewise", refused)
def _(cell: Cell) -> str:
    def transform(call: Any) -> Any:
        def pulled(*xs: Tensor) -> Any:
            out, back = torch.func.vjp(lambda *xs: call(*(x * 1 for x in xs)), *xs)
            return back(tuple(y * 0 + 1 for y in out))

        return pulled

    return transformed(cell, transform, *heads_of(cell))


@situation("torch.func.jvp", "forward mode: there is none", refused)
def _(cell: Cell) -> str:
    def transform(call: Any) -> Any:
        return lambda *xs: torch.func.jvp(lambda *xs: call(*(x * 1 for x in xs)), xs, xs)

    return transformed(cell, transform, *heads_of(cell))


@situation("a dual tensor", "forward mode of torch.autograd", refused)
def _(cell: Cell) -> str:
    args = cell.args()
    name = cell.function.turned[-1]
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(args[name], torch.ones_like(args[name]))
        return cell.settle({**args, name: dual}, wants=cell.args(), fake=False)


@situation("torch.func.functionalize", "torch's own has no rule for ops that write", only(right, lambda f: not f.written
           and "kv_cache" not in f.name))  # fmt: skip
def _(cell: Cell) -> str:
    def run(args: Args) -> tuple[Any, ...]:
        names = [n for n, x in args.items() if isinstance(x, Tensor)]
        return torch.func.functionalize(lambda *xs: cell.call({**args, **dict(zip(names, xs))}))(  # type: ignore[no-any-return]
            *(args[n] for n in names)
        )

    return cell.settle(cell.args(), run, same=False)


# ---- copies, pickles and other holders ---------------------------------------------------------------


@situation("deepcopy and pickle", "of what comes back, and of arguments afterwards")
def _(cell: Cell) -> str:
    args = cell.args()
    for y in (*cell.call(args), *(args[n] for n in cell.function.written)):
        # torch itself pickles no fp8 tensors, but saves them
        held = io.BytesIO()
        torch.save(y, held)
        held.seek(0)
        pickled = y if y.dtype == FP8 else pickle.loads(pickle.dumps(y))
        for twin in (copy.deepcopy(y), torch.load(held), pickled):
            assert twin.dtype == y.dtype
            assert twin.stride() == y.stride() or not y.is_contiguous()
            assert torch.equal(twin.float(), y.float())
    return cell.settle(cell.args())


@situation("a pickled error", "what a refusal says survives", refused)
def _(cell: Cell) -> str:
    def run(args: Args) -> tuple[Any, ...]:
        with pytest.raises(InvalidInput) as caught:
            cell.call(args)
        error = caught.value
        for twin in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
            assert type(twin) is InvalidInput
            assert str(twin) == str(error)
        raise error

    return cell.settle(cell.args(cos=cell.rand(P, 3)), run, wants=cell.args())


@situation("many threads", "eight calls each, numbers of their own")
def _(cell: Cell) -> str:
    wrong: list[BaseException] = []

    def work(n: int) -> None:
        try:
            for _ in range(8):
                args = cell.args()
                first = cell.function.turned[0]
                args[first] = args[first] * (n + 1)
                want, want_written = cell.function.expected(args)
                cell.compare(args, cell.call(args), want, want_written)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if wrong:
        raise wrong[0]
    return cell.settle(cell.args())


@situation("many threads under autograd", "each with its own graph", only(right, lambda f: f.derived))
def _(cell: Cell) -> str:
    ended: list[Any] = []

    def work() -> None:
        try:
            ended.append(cell.settle_grad(gradient_leaves(cell), times_one))
        except BaseException as error:
            ended.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for end in ended:
        if isinstance(end, BaseException):
            raise end
    return str(ended[0])


# ---- a device ----------------------------------------------------------------------------------------


@situation("another stream", "what the current stream is given", gpu=True)
def _(cell: Cell) -> str:
    stream = torch.cuda.Stream()

    def run(args: Args) -> tuple[Any, ...]:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            out = cell.call(args)
        torch.cuda.current_stream().wait_stream(stream)
        return out

    return cell.settle(cell.args(), run)


@situation("a CUDA graph", "captured, then played with other numbers", gpu=True)
def _(cell: Cell) -> str:
    args, fresh = cell.args(), cell.args()
    cell.call(cell.args())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cell.call(args)
    first = cell.function.turned[0]
    fresh[first] = fresh[first] * 0.5
    for n, x in fresh.items():
        if isinstance(x, Tensor):
            args[n].copy_(x)
    want, want_written = cell.function.expected(fresh)
    graph.replay()
    torch.cuda.synchronize()
    cell.compare(args, out, want, want_written)
    return "right"
