"""The named calls of the table on a device, and what is compared in a situation of torch."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import jitrope
from jitrope import InvalidInput

from ..calls import DYNAMIC, NAMED, STREAMS
from ..host.backend import DEVICE
from ..results import Caches, check_heads, near, places_of
from ..sweep import FUNCTIONS, NORM_WORDS, Made

TABLES = ("cos", "sin", "freqs_cis")
Args = dict[str, Tensor]
Run = Callable[[Args], tuple[Tensor, ...]]


def of(names: Any = tuple(NAMED), cpu: bool = True, gpu: Any = pytest.mark.gpu) -> Any:
    """The test is for these calls, or for those of each `kind`, on the CPU and, with these marks, on the GPU.

    A tenth of them runs for a commit.
    """
    rows = [(x, kind) for kind, xs in names.items() for x in xs] if isinstance(names, dict) else [*zip(names)]
    places = [("cpu", "", ())] * cpu + [(DEVICE, "-cuda", gpu)] * bool(gpu)
    made = [
        pytest.param((name, device), *kind, id="-".join((name, *kind)) + text, marks=marks)
        for device, text, marks in places
        for name, *kind in rows
    ]
    chosen = pytest.mark.parametrize(["call", "kind"][: len(rows[0])], made, indirect=["call"])
    return lambda test: pytest.mark.tenth(chosen(test))


def times_one(leaves: Args) -> Args:
    return {name: x * 1 for name, x in leaves.items()}


class Call:
    """A named call on a device. A test changes `args`, its tensors by name, and then says how the call ends."""

    def __init__(self, name: str, device: str) -> None:
        self.name, self.device, self.case = name, device, NAMED[name]
        self.made = m = Made(self.case, device)
        self.places: Any = places_of(m)
        self.words = {x: y for x, y in (m.words() | self.places.words).items() if x not in TABLES}
        self.words |= {"inplace": True} if name.endswith("_") else {}
        self.heads, self.weights = [*m.tensors], [*m.weights]
        self.copied = [x for x in self.heads if x.endswith("v") and x != "qkv"]
        self.turned = [x for x in self.heads if x not in self.copied]
        self.args: Args = {**m.tensors, **m.weights, "cos": m.turn["cos"], "sin": m.turn["sin"]}
        if "qkv" in self.args:
            self.args["qkv"] = m.tensors["qkv"].unflatten(-1, (m.counts[1], -1))
        self.cached = ["k_cache", "v_cache"] if "cache" in self.words else []
        if self.cached:
            given = self.words["cache"].tensors
            self.args |= {"slots" if x == "slot_mapping" else x: given[x] for x in given}
        self.outs = [f"{x}_out" for x in self.places.given]
        self.args |= dict(zip(self.outs, self.words.get("out", ())))
        in_place = self.turned if self.case["out"] == "inplace" else ["q"] if name.endswith("_") else []
        self.scales: dict[str, Any] = {}
        self.written = [*in_place, *["k"] * (name == "cache_own_k"), *self.cached, *self.outs]
        norm_in_place = bool(in_place and self.weights)
        self.derived = not (norm_in_place or self.cached or self.outs or self.case["convert"] != "none")
        self.writes_heads = bool({*self.turned} & {*self.written})
        self.no_gradient = "" if self.derived else "requires a gradient, but this call has none"

    def changed(self, names: Iterable[str], change: Callable[[Tensor], Any] = lambda x: x) -> Call:
        """Another call of this name, in which some tensors are changed."""
        one = Call(self.name, self.device)
        one.args |= {x: change(one.args[x]) for x in names}
        return one

    def __call__(self, args: Args) -> tuple[Tensor, ...]:
        """The results that are tensors; a scale comes after its values."""
        words = {**self.words, **{x: args[x] for x in TABLES if x in args}}
        words |= {"positions": args["position_ids"]} if "position_ids" in args else {}
        if "norm" in words:
            own = {x: args[x] for x in self.weights}
            words["norm"] = jitrope.Norm(**own, **NORM_WORDS.get(self.case["norm"], {}))
        if self.cached:
            pages = self.case["out"] == "pages"
            slots = jitrope.Pages(args["page_table"], seq_lens=args["lengths"]) if pages else args["slots"]
            rotate_k = self.name == "cache_own_k"
            words["cache"] = jitrope.KVCache(args["k_cache"], args["v_cache"], slots, rotate_k=rotate_k, **self.scales)
        if self.outs:
            words["out"] = [args[x] for x in self.outs]
        given: list[Any] = [args[x] for x in self.heads]
        if self.case["source"] in STREAMS:
            given = [given[:3], given[3:]]
        elif self.case["source"] == "no_v":
            given.append(None)
        results = self.made.function(*given, **words)
        if isinstance(results, Tensor):
            return (results,)
        results = results[: 1 + (self.name == "cache_own_k")] if self.cached else results
        if self.case["convert"] in DYNAMIC:
            return tuple([x for scaled in results if scaled is not None for x in scaled])
        return tuple([x for x in results if x is not None])

    def like(self, args: Args) -> Made:
        """The tensors for the results in fp64."""
        m = copy.copy(self.made)
        m.tensors, m.weights = ({x: args[x] for x in names} for names in (self.heads, self.weights))
        turn = {x: y for x, y in m.turn.items() if x not in TABLES}
        m.turn = turn | {x: args[x] for x in (*TABLES, "position_ids") if x in args}
        return m

    def expected(self, args: Args) -> list[Tensor]:
        """The results in fp64 of a call that has a gradient."""
        m = self.like(args)
        found = [m.expected(x) for x in m.outputs]
        if self.turned == ["qkv"] == self.written:
            q, k, v = found
            return [torch.cat((q.unflatten(-2, (k.shape[-2], -1)), k.unsqueeze(-2), v.unsqueeze(-2)), -2).flatten(-2)]
        return found

    def tried(self, args: Args, refusal: str, run: Run | None, around: Any = None, bases: Iterable[Tensor] = ()) -> Any:
        """The results, or None of a call that is refused with these words. It writes nothing but what it must."""
        held, results = [getattr(x, "held", x) for x in (*args.values(), *bases)], None
        held = [
            x for x in held if x.layout == torch.strided and not (x.is_nested or x.is_meta or isinstance(x, FakeTensor))
        ]
        before = [bytes_of(x) for x in held]
        with around or nullcontext():
            if refusal:
                with pytest.raises(InvalidInput, match=refusal) as error:
                    (run or self)(args)
                assert str(error.value).split(": ")[0] in (FUNCTIONS[self.case["source"]], "Norm", "KVCache", "Pages")
                assert "\n" not in str(error.value)
            else:
                results = (run or self)(args)
        written = [] if refusal else [getattr(args[x], "held", args[x]) for x in self.written]
        for x, old in zip(held, before):
            changed = bytes_of(x) != old
            for y in written:
                if y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
                    own = torch.zeros(len(old) // y.element_size(), dtype=torch.bool)
                    own.as_strided(y.shape, y.stride(), y.storage_offset()).fill_(True)
                    changed &= ~own.repeat_interleave(y.element_size())
            assert not changed.any(), f"{int(changed.sum())} bytes were written that must not be"
        return results

    def check(
        self, refusal: str = "", run: Run | None = None, *, around: AbstractContextManager[Any] | None = None,
        numbers: Args | None = None, same_tensors: bool = True, fake: bool = True, versions: bool = True,
    ) -> None:  # fmt: skip
        """The call is right, or refused with these words.

        numbers: what the tensors hold, if fp64 cannot read it. same_tensors: what is written is returned itself.
        fake: a call with fake tensors has results of the same strides. versions: what is written counts as written.
        """
        args, written = self.args, self.written
        if refusal:
            self.tried(args, refusal, run, around)
            return
        like = self.like({n: x.detach().clone() for n, x in (numbers or args).items()})
        counts = {n: x._version for n, x in args.items() if not x.is_inference()} if versions else {}
        self.places.caches = {x[0]: getattr(args[x], "held", args[x]) for x in self.cached}
        self.places.tensors = [*self.places.caches.values()]
        self.places.before = [x.detach().clone() for x in self.places.caches.values()]
        results = self.tried(args, refusal, run, around)
        self.compare({n: getattr(x, "held", x) for n, x in args.items()}, results, like, same_tensors)
        own = [args[x].untyped_storage().data_ptr() for x in written if counts]
        for name, count in counts.items():
            if name in written and args[name].numel():
                assert args[name]._version > count, f"the version of {name} is as it was"
            elif args[name].untyped_storage().data_ptr() not in own:
                assert args[name]._version == count, f"{name} counts as written"
        plain = all(type(x) in (Tensor, torch.nn.Parameter) and not x.is_inference() for x in args.values())
        if fake and run is None and plain and not any(x.is_neg() or x.is_conj() for x in args.values()):
            mode = FakeTensorMode()
            with torch.no_grad():
                self.check_alike({n: mode.from_tensor(x.detach()) for n, x in args.items()}, results, mode)

    def compare(self, args: Args, results: tuple[Tensor, ...], like: Made, same_tensors: bool = True) -> None:
        if self.turned == ["qkv"] == self.written:
            by_letter = self.made.named(results[0])
        else:
            scaled = [jitrope.Scaled(*x) for x in zip(results[::2], results[1::2])]
            by_letter = dict.fromkeys("qkv") | dict(zip("qkv", scaled if self.case["convert"] in DYNAMIC else results))
        if same_tensors:
            for y, name in zip(results, self.outs or self.turned):
                assert y is args[name] or name not in self.written, f"{name} itself does not come back"
        if isinstance(self.places, Caches) and "slots" in args:
            slots = enumerate(args["slots"].flatten().tolist())
            self.places.named = {slot: token for token, slot in slots if 0 <= slot < args["k_cache"].shape[:2].numel()}
        if self.scales:
            self.places.scales = {x: float(y) for x, y in self.scales.items()}
        if self.outs:
            self.places.given = {x[0]: args[x] for x in self.outs}
        if all(x.numel() for x in (*results, *[args[x] for x in self.written])):
            self.places.check(like, by_letter)
        else:
            for x in like.outputs:
                y, want = by_letter[x], like.expected(x)
                if want.numel():
                    check_heads(like, y, x)
                assert (y[0] if isinstance(y, tuple) else y).shape == want.shape
        if self.outs or self.case["out"] == "inplace":
            return
        as_given: list[Any] = {"latent": ["q"], "grouped": [], "streams": []}.get(self.case["source"], self.turned)
        if self.case["convert"] in DYNAMIC:
            as_given = [name for x in as_given for name in (x, None)]
        for y, name in itertools.zip_longest(results, as_given[: len(results)]):
            if type(y) is Tensor and not y._is_view() and name not in self.written:
                wanted = torch.empty(y.shape, device="meta") if name is None else args[name].to("meta")
                assert steps(y) == steps(torch.empty_like(wanted)), f"the result for {name} has strides {y.stride()}"

    def check_alike(self, args: Args, results: Iterable[Tensor], around: AbstractContextManager[Any]) -> None:
        """Tensors without numbers give results of the same kinds."""
        with around:
            found = self(args)
        for y, x in zip(found, results, strict=True):
            assert (y.shape, steps(y), y.dtype) == (x.shape, steps(x), x.dtype)
            assert y.is_meta or y.device == x.device
        for y, name in zip(found, self.outs or self.turned):
            assert y is args[name] or name not in self.written, f"{name} itself does not come back"

    def check_gradient(
        self, build: Callable[[Args], Args] = dict, run: Run | None = None, *, leaves: Args | None = None,
        refusal: str | None = None, around: AbstractContextManager[Any] | None = None, same_tensors: bool = True,
        begin: Callable[[Args], Args] = times_one, gradient: Callable[[Tensor], Tensor] | None = None,
        given: Callable[[Tensor], Tensor] = lambda g: g,
    ) -> None:  # fmt: skip
        """The results and the gradients of `leaves` are right, or the call is refused.

        build: makes arguments of what begins with leaves. Those whose names begin with "base" are what others are views
        of, and part of the loss after the call. gradient: of a result; given: a tensor with its numbers for jitrope.
        """
        refusal = self.no_gradient if refusal is None else refusal
        leaves = leaves or {name: self.args[name] for name in (*self.heads, *self.weights)}
        leaves = {n: x.detach().clone().requires_grad_() for n, x in leaves.items()}
        exact = {n: x.detach().double().requires_grad_() for n, x in leaves.items()}
        built = build(begin(leaves))
        args = {**self.args, **{n: built[n] for n in built if n in self.args}}
        rest = {n: x.detach().clone() for n, x in args.items()}
        results = self.tried(args, refusal, run, around, built.values())
        if refusal:
            return
        exact_built = build(begin(exact))
        exact_args = {**rest, **{n: exact_built[n] for n in exact_built if n in self.args}}
        wanted = self.expected(exact_args)
        with torch.no_grad():
            like = self.like({n: x.detach().clone() for n, x in exact_args.items()})
            self.compare(args, results, like, same_tensors)
        for name, y in zip(self.written, wanted):
            exact_args[name].copy_(y)
        bases = [n for n in built if n.startswith("base")]
        ends = [*results, *[built[n] for n in bases]], [*wanted, *[exact_built[n] for n in bases]]
        pairs = [(y, z) for y, z in zip(*ends, strict=True) if z.requires_grad]
        assert pairs
        assert all(y.requires_grad for y, _ in pairs), "a result lost its gradient"
        gradients = [(gradient or (lambda y: self.made.noise(*y.shape)))(y) for y, _ in pairs]
        torch.autograd.backward([y for y, _ in pairs], [given(g) for g in gradients])
        torch.autograd.backward([z for _, z in pairs], [g.double() for g in gradients])
        for name, leaf in leaves.items():
            pair = [torch.zeros_like(x) if x.grad is None else x.grad for x in (leaf, exact[name])]
            assert not leaf.numel() or near(*pair) is None, name


@functools.cache
def bits(name: str, device: str) -> list[Tensor]:
    """The results of a plain call, from its first run; `__wrapped__` runs it again."""
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        call = Call(name, device)
        results = call(call.args)
        return [x.cpu() for x in (*results, *[call.args[x] for x in call.written])]


def bytes_of(x: Tensor) -> Tensor:
    """All bytes of a tensor's storage."""
    with torch.inference_mode(False), torch.no_grad():
        return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage()).cpu().clone()


def steps(x: Tensor) -> list[int]:
    """The strides of axes with more than one element."""
    return [stride for size, stride in zip(x.shape, x.stride()) if size > 1] if x.numel() else []


CALLS = [Call(name, "cpu") for name in NAMED]
DERIVED = [x.name for x in CALLS if x.derived]
NORMED = [x.name for x in CALLS if x.weights]
CACHED = [x.name for x in CALLS if x.cached]
NO_PAGES = [x for x in NAMED if x != "pages"]
SLOTS = [x.name for x in CALLS if "slots" in x.args]
SEVERAL = [x.name for x in CALLS if len(x.turned) > 1 and x.name != "latent"]  # q and k
FP8S = [x.name for x in CALLS if x.case["convert"] == "e4m3" and not x.cached]
ONE_TABLE = [x.name for x in CALLS if x.name != "streams"]
