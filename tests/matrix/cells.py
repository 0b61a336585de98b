"""The functions with small arguments, and the judgement of a cell of the matrix.

A cell is "right" (outputs, written tensors and gradients equal the oracle's, and nothing else was written) or
"refused" (`InvalidInput`, no byte changed). Any other outcome raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from jitrope import InvalidInput

from .. import oracle
from ..said import KINDS

Args = dict[str, Any]
B, S, H, D, P = 2, 3, 2, 8, 6  # batch, sequence, heads of q, elements, rows of the tables
FP8 = torch.float8_e4m3fn
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2, FP8: 0.0634}
SMALLEST = {FP8: 2**-10}  # half of the smallest step

SIZES = {
    "q": (B, S, H, D), "k": (B, S, 1, D), "v": (B, S, 1, D), "qkv": (B, S, 2, 4 * D),
    "q2": (B, 2, H, D), "k2": (B, 2, 1, D), "v2": (B, 2, 1, D),
    "q_weight": (D,), "k_weight": (D,), "q_weight2": (D,), "k_weight2": (D,), "q_bias": (D,), "k_bias": (D,),
    "k_cache": (10, 1, D), "v_cache": (10, 1, D),
    "q_out": (B, S, H, D), "k_out": (B, S, 1, D), "v_out": (B, S, 1, D),
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Function:
    """A public function. `like`: the argument with the strides of each output; None: the output is contiguous."""

    name: str
    turned: tuple[str, ...]
    like: tuple[str | None, ...]
    copied: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    derived: bool = True  # has a gradient
    options: Args = field(default_factory=dict)
    label: str = ""

    @property
    def title(self) -> str:
        return self.name + self.label

    @property
    def public(self) -> str:
        """The public function."""
        kinds = {
            "rope": "apply_rope",
            "rope_into": "apply_rope",
            "fused_qkv": "prepare_fused_qkv",
            "fused_qkv_norm": "prepare_fused_qkv",
            "norm_rope_joint": "prepare_joint_qkv",
        }
        return kinds.get(self.name.rstrip("_"), "prepare_qkv")

    @property
    def in_place(self) -> bool:
        return self.name.endswith("_")

    @property
    def outs(self) -> tuple[str, ...]:
        """Arguments that the results are written to."""
        return tuple(name for name in self.written if name.endswith("_out"))

    @property
    def heads(self) -> tuple[str, ...]:
        """Arguments (B, S, H, D)."""
        return (*self.turned, *self.copied)

    def spoken(self, args: Args) -> Args:
        """Arguments in the layout of the function."""
        if self.name != "norm_rope_joint":
            return args
        args = dict(args)
        for word, n in (("first", ""), ("second", "2")):
            args[word] = tuple(args.pop(letter + n) for letter in "qkv")
            args[f"{word}_weights"] = tuple(args.pop(f"{letter}_weight{n}") for letter in "qk")
        return args

    def __call__(self, args: Args) -> tuple[Any, ...]:
        out = KINDS[self.name](**self.spoken(args))
        return out if isinstance(out, tuple) else (out,)

    def expected(self, args: Args) -> oracle.Result:
        kept = {name: value for name, value in args.items() if name not in ("launch", "rounding", "check")}
        return getattr(oracle, self.name)(**self.spoken(kept))  # type: ignore[no-any-return]


JOINT = ("q", "k", "q2", "k2")
FUSED = {"heads": (4, 2), "order": "grouped"}
CACHE = {"k_cache": None, "v_cache": None, "slot_mapping": None}
FUNCTIONS = [
    Function("rope", ("q", "k"), ("q", "k")),
    Function("rope_", ("q", "k"), (), written=("q", "k")),
    Function("fused_qkv", ("qkv",), (None, None, None), options=FUSED),
    Function("fused_qkv_", ("qkv",), (), written=("qkv",), options=FUSED),
    Function("fused_qkv_norm", ("qkv",), (None, None, None), (), ("q_weight", "k_weight"), options=FUSED),
    Function("fused_qkv_norm_", ("qkv",), (), (), ("q_weight", "k_weight"), ("qkv",), False, FUSED),
    Function("fp8", ("q", "k"), ("q", "k"), derived=False, options={"q_scale": 0.25, "k_scale": 0.01}),
    Function("kv_cache", ("q", "k"), ("q",), ("v",), (), ("k_cache", "v_cache"), False),
    Function("kv_cache", ("q", "k"), ("q",), ("v",), (), ("k", "k_cache", "v_cache"), False,
             {"rotate_k": True}, "[rotate_k]"),
    Function("kv_cache_", ("q", "k"), (), ("v",), (), ("q", "k_cache", "v_cache"), False),
    Function("norm_rope", ("q", "k"), ("q", "k"), (), ("q_weight", "k_weight")),
    Function("norm_rope", ("q", "k"), ("q", "k"), (), ("q_weight", "k_weight"), (), True,
             {"across_heads": True, "zero_centered": True}, "[across]"),
    Function("norm_rope_", ("q", "k"), (), (), ("q_weight", "k_weight"), ("q", "k"), False),
    Function("norm_fp8", ("q", "k"), ("q", "k"), (), ("q_weight", "k_weight"), derived=False,
             options={"q_scale": 0.25, "k_scale": 0.01}),
    Function("norm_scaled", ("q", "k"), ("q", "k", None, None), (), ("q_weight", "k_weight"), derived=False,
             options={"hadamard": True}, label="[hadamard]"),
    Function("norm_kv_cache", ("q", "k"), ("q",), ("v",), ("q_weight", "k_weight"), ("k_cache", "v_cache"), False),
    Function("norm_kv_cache", ("q", "k"), ("q",), ("v",), ("q_weight", "k_weight"), ("k_cache", "v_cache"), False,
             {"v_norm": True}, "[v_norm]"),
    Function("norm_kv_cache_", ("q", "k"), (), ("v",), ("q_weight", "k_weight"), ("q", "k_cache", "v_cache"), False),
    Function("rope_into", ("q", "k"), (), written=("q_out", "k_out"), derived=False),
    Function("norm_into", ("q", "k"), (), ("v",), ("q_weight", "k_weight"), ("q_out", "k_out", "v_out"), False),
    Function("norm_rope_joint", JOINT, (None, None, None), ("v", "v2"),
             ("q_weight", "k_weight", "q_weight2", "k_weight2")),
]  # fmt: skip
OF = {function.title: function for function in FUNCTIONS}


@dataclass(frozen=True)
class Cell:
    function: Function
    device: str

    # ---- arguments ---------------------------------------------------------------------------------

    def rand(self, *size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
        """The same numbers for the same sizes, between -2 and 2."""
        generator = torch.Generator("cpu").manual_seed(sum(size) + 1000 * seed)
        with torch.device("cpu"):
            x = torch.rand(size, generator=generator, dtype=torch.float64) * 4 - 2
        return x.to(dtype=dtype, device=self.device)

    def size(self, name: str) -> tuple[int, ...]:
        if name.endswith(("weight", "weight2", "bias")) and self.function.options.get("across_heads"):
            return (D * (H if name.startswith("q") else 1),)
        return SIZES[name]

    def args(self, **changes: Any) -> Args:
        """Fresh arguments of a plain valid call; `changes` replace some, and None removes a tensor."""
        f = self.function
        names = (*f.heads, *f.outs, *f.weights, *(("k_cache", "v_cache") if "kv_cache" in f.name else ()))
        args: Args = {name: self.rand(*self.size(name), seed=n) for n, name in enumerate(names)}
        angles = self.rand(P, D // 2, seed=50)
        args |= {"cos": angles.cos(), "sin": angles.sin()} | f.options
        if "kv_cache" in f.name:
            args["slot_mapping"] = torch.tensor([[1, 2, -1], [9, 0, 7]], device=self.device)
        args |= changes
        return args

    def fitted(self, args: Args) -> Args:
        """The arguments, with output tensors of the shapes of q, k and v."""
        like = {name: args[name[0]] for name in self.function.outs}
        other = {n: x for n, x in like.items() if x is None or (isinstance(x, Tensor) and x.shape != args[n].shape)}
        return {**args, **{n: None if x is None else torch.full(x.shape, 7.0).to(x) for n, x in other.items()}}

    def call(self, args: Args) -> tuple[Any, ...]:
        return self.function(args)

    # ---- judgement ---------------------------------------------------------------------------------

    def settle(
        self, args: Args, run: Callable[[Args], tuple[Any, ...]] | None = None, *, refusal: Any = InvalidInput,
        fake: bool = True, same: bool = True, versions: bool = True, wants: Args | None = None,
    ) -> str:  # fmt: skip
        """Call with `args` and judge the outcome. `wants`: arguments for the oracle, if they differ.

        fake: also make the call with fake tensors, which must have the same strides. same: written tensors are
        returned themselves. versions: their versions are incremented.
        """
        args = self.fitted(args) if isinstance(args.get("q"), Tensor) and not args["q"].is_nested else args
        plain = plain_bits(self)
        want, want_written = self.function.expected(args if wants is None else wants)
        snapshot = Snapshot(args)
        counted = {name: _version(x) for name, x in args.items() if isinstance(x, Tensor)}
        try:
            out = (run or self.call)(args)
        except refusal as error:
            snapshot.check({})
            self.check_text(error)
            assert plain_bits.__wrapped__(self) == plain, "the right call has other bits now"
            return "refused"
        self.compare(args, out, want, want_written, same)
        snapshot.check({name: args[name] for name in want_written})
        for name, version in counted.items():
            if versions and version is not None:
                written = name in want_written and args[name].numel() > 0
                assert not written or _version(args[name]) > version, f"the version of {name} is as it was"
                shared = any(_share(args[name], args[other]) for other in want_written)
                assert written or shared or _version(args[name]) == version, f"{name} counts as written"
        if fake and run is None:
            self.check_fake(args, out)
        assert plain_bits.__wrapped__(self) == plain, "the right call has other bits now"
        return "right"

    def compare(self, args: Args, out: Any, want: Any, want_written: Args, same: bool = True) -> None:
        f = self.function
        assert len(out) == len(want)
        if f.in_place and same:
            for y, name in zip(out, f.turned):
                assert y is args[name], f"{name} itself does not come back"
        for y, name in zip(out, f.outs if same else ()):
            assert y is args[name], f"{name} itself does not come back"
        for n, (y, wanted) in enumerate(zip(out, want)):
            close(y, wanted, f"output {n}")
        for name, wanted in want_written.items():
            close(args[name], wanted, name)
        for y, name in zip(out, f.like):
            if y is not None:
                check_strides(y, None if name is None else args[name], f"the output for {name}")

    def check_fake(self, args: Args, out: Sequence[Any]) -> None:
        """Assert that the call with fake tensors returns tensors of the same kinds."""
        tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
        plain = all(type(x) in (Tensor, torch.nn.Parameter) for x in tensors)
        if not plain or any(x.is_neg() or x.is_conj() or x.is_inference() for x in tensors):
            return
        mode = FakeTensorMode()
        with torch.no_grad():
            fakes = tree_map_only(Tensor, lambda x: mode.from_tensor(x.detach()), args)
        with torch.no_grad(), mode:
            for y, real in zip(self.call(fakes), out):
                if real is not None:
                    assert y.shape == real.shape
                    assert steps(y) == steps(real), f"strides are {real.stride()}, those of a fake {y.stride()}"
                    assert (y.dtype, y.device) == (real.dtype, real.device)

    def check_text(self, error: BaseException) -> None:
        text = str(error)
        names = (self.function.public, "Packed", "Starts", "Mrope", "Norm", "KVCache", "Quantize", "DynamicQuantize")
        assert text.split(": ")[0] in names, f"the refusal does not name the function: {text}"
        assert "\n" not in text, text

    def settle_grad(
        self, leaves: Args, build: Callable[[Args], Args], run: Callable[[Args], tuple[Any, ...]] | None = None, *,
        cotangent: Callable[[Tensor], Tensor] = lambda g: g, refusal: Any = InvalidInput, same: bool = True,
        gradient: Callable[[Tensor], Tensor] | None = None,
    ) -> str:  # fmt: skip
        """Judge gradients too. `build(leaves)` returns arguments made from leaves that require a gradient.

        Names that begin with "base" are not arguments, but tensors that others are views of. They are part of
        the loss, with their values after the call. The oracle writes by `copy_` under torch's autograd. `gradient`
        makes the gradient of an output; `cotangent` makes another tensor with the same numbers, for jitrope.
        """
        plain = plain_bits(self)
        leaves = {name: x.detach().clone().requires_grad_() for name, x in leaves.items()}
        exact = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
        built = build(leaves)
        args = {**self.args(), **{name: x for name, x in built.items() if not name.startswith("base")}}
        bases = [x for name, x in built.items() if name.startswith("base")]
        rest = {name: x.detach().clone() if isinstance(x, Tensor) else x for name, x in args.items()}
        snapshot = Snapshot({**built, **args})
        try:
            out = (run or self.call)(args)
        except refusal as error:
            snapshot.check({})
            self.check_text(error)
            assert plain_bits.__wrapped__(self) == plain, "the right call has other bits now"
            return "refused"
        # torch itself refuses some writes. They are refused above, so there is nothing to compare.
        want_built = build(exact)
        want_args = {**rest, **{name: x for name, x in want_built.items() if not name.startswith("base")}}
        want, want_written = self.function.expected(want_args)
        for name, y in want_written.items():
            if want_args[name].requires_grad:
                want_args[name].copy_(y)
        ends = [*out, *bases]
        want_ends = [*want, *(x for name, x in want_built.items() if name.startswith("base"))]
        with torch.no_grad():
            self.compare(args, out, want, want_written, same)
        used = [(y, z) for y, z in zip(ends, want_ends) if z is not None and z.requires_grad]
        assert used
        for y, _ in used:
            assert y.requires_grad, "an output lost its gradient"
        gradient = gradient or (lambda y: self.rand(*y.shape, seed=90).to(y.dtype))
        gradients = [gradient(y) for y, _ in used]
        torch.autograd.backward([y for y, _ in used], [cotangent(g) for g in gradients])
        torch.autograd.backward([z for _, z in used], [g.double() for g in gradients])
        for name, leaf in leaves.items():
            wanted = exact[name].grad
            if wanted is None:
                wanted = torch.zeros_like(exact[name])
            got = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            close(got, wanted, f"the gradient of {name}")
        assert plain_bits.__wrapped__(self) == plain, "the right call has other bits now"
        return "right"


def close(y: Any, wanted: Any, what: str) -> None:
    if wanted is None or y is None:
        assert y is wanted is None, f"{what} is {type(y).__name__}"
        return
    assert tuple(y.shape) == tuple(wanted.shape), f"{what} has shape {tuple(y.shape)}"
    tolerance = TOLERANCES[y.dtype]
    got, wanted = y.detach().resolve_neg().to("cpu").double(), wanted.detach().to("cpu").double()
    assert torch.equal(got.isnan(), wanted.isnan()), f"{what} is NaN elsewhere"
    error = (got - wanted).abs() - tolerance * wanted.abs() - SMALLEST.get(y.dtype, tolerance)
    error = error[~error.isnan()]
    assert not (error > 0).any(), f"{what} is wrong by {error.max().item() + tolerance:.3g}"


def steps(x: Tensor) -> list[int]:
    """The strides of axes with more than one element."""
    return [stride for size, stride in zip(x.shape, x.stride()) if size > 1] if x.numel() else []


def check_strides(y: Tensor, like: Tensor | None, what: str) -> None:
    if type(y) is not Tensor or y._is_view():  # a view, as requested
        return
    wanted = torch.empty(y.shape, device="meta") if like is None else torch.empty_like(like, device="meta")
    assert steps(y) == steps(wanted), f"{what} has strides {y.stride()}, not {wanted.stride()}"


@cache
def plain_bits(cell: Cell) -> list[bytes]:
    """The bytes of a plain valid call's results, from its first run; `__wrapped__` runs it again."""
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        args = cell.args()
        out = cell.call(args)
    found = (*out, *(args[name] for name in cell.function.written))
    return [x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() for x in found]


class Snapshot:
    """All bytes of the storages of the arguments."""

    def __init__(self, args: Args) -> None:
        self.before: dict[int, tuple[Tensor, bytes]] = {}
        for argument in args.values():
            for x in inner(argument):
                storage = x.untyped_storage()
                self.before.setdefault(storage.data_ptr(), (x, _bytes(x)))

    def check(self, written: Args) -> None:
        """Assert that only the bytes of the elements of `written` have changed."""
        may: dict[int, Tensor] = {}
        for argument in written.values():
            for x in inner(argument):
                size = x.element_size()
                storage = x.untyped_storage()
                elements = torch.zeros(storage.nbytes() // size, dtype=torch.bool)
                elements.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(True)
                mask = torch.zeros(storage.nbytes(), dtype=torch.bool)
                mask[: elements.numel() * size] = elements.repeat_interleave(size)
                address = storage.data_ptr()
                may[address] = may[address] | mask if address in may else mask
        for address, (x, before) in self.before.items():
            after = torch.frombuffer(bytearray(_bytes(x)), dtype=torch.uint8) if before else torch.empty(0)
            was = torch.frombuffer(bytearray(before), dtype=torch.uint8) if before else torch.empty(0)
            changed = after != was
            if address in may:
                changed &= ~may[address]
            assert not changed.any(), f"{int(changed.sum())} bytes were written that must not be"


def inner(x: Any) -> list[Tensor]:
    """The tensors with an argument's numbers, without autograd's history."""
    if not isinstance(x, Tensor) or x.is_meta or isinstance(x, torch._subclasses.FakeTensor):
        return []
    if x.layout != torch.strided or x.is_nested:
        return []
    held = getattr(x, "inner", None)
    if held is not None:
        return inner(held)
    with torch._C.DisableTorchFunctionSubclass():
        x = x.detach()
    return [x.as_subclass(Tensor)]


def _bytes(x: Tensor) -> bytes:
    storage = x.untyped_storage()
    if storage.nbytes() == 0:
        return b""
    with torch.inference_mode(False), torch.no_grad():
        whole = torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage)
        return whole.cpu().numpy().tobytes()


def _version(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version


def _share(x: Tensor, y: Tensor) -> bool:
    return isinstance(y, Tensor) and x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
