"""Every parameter of the functions, with values of every type. A value with a plain meaning is accepted. Any other
is refused in one line that names the parameter. No call changes the result of a later one.

`python -m tests.test_arguments` prints every refusal, so that a person can read them.
"""

from __future__ import annotations

import enum
import inspect
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import jitrope
from jitrope import InvalidInput

from .matrix.cells import FP8, FUNCTIONS, SIZES, Args, B, Cell, D, Function, P, S
from .matrix.situations import DROP, NO_TABLES, packed
from .said import KINDS

TENSORS = ("q", "k", "v", "qkv", "cos", "sin", "cos_sin_cache", "freqs", "freqs_cis", "position_ids", "cu_seqlens",
           "start_positions", "k_cache", "v_cache", "slot_mapping", "q_weight", "k_weight", "q_bias", "k_bias", "bias",
           "q_mean_square", "k_mean_square", "q_out", "k_out", "v_out", "page_table", "page_indptr", "last_page_len",
           "seq_lens", "cu_seqlens_q", "batch_indices", "cache_positions", "errors")  # fmt: skip
SEQUENCES = ("first", "second")
INTS = ("rotary_dim", "rotary_offset", "max_seqlen", "cp_size", "cp_rank", "unrotated")
FLAGS = ("interleaved", "interleaved_out", "mrope_interleaved", "inverse", "packed_table", "check", "rotate_k",
         "across_heads", "zero_centered", "after_rope", "v_norm", "copy_v", "inplace", "hadamard",
         "clear_page")  # fmt: skip
NUMBERS = ("mscale", "eps")
WORDS = ("layout", "rounding", "norm_rounding", "norm_kind", "of", "order")
SCALES = ("q_scale", "k_scale", "v_scale", "q_factor")
SECTIONS = ("mrope_section",)
HEADS = ("heads",)
PLACES = ("batch_indices", "cache_positions")
LENGTHS = ("last_page_len", "seq_lens", "cache_positions")
FLAT = ("slot_mapping", "errors", *PLACES)  # any axes
PAGED = ("page_table", "page_indptr", "last_page_len", "seq_lens", "cu_seqlens_q", *PLACES, "errors", "clear_page")
KNOWN = {*TENSORS, *SEQUENCES, *INTS, *FLAGS, *NUMBERS, *WORDS, *SCALES, *SECTIONS, *HEADS}

_NORM = ("q_weight", "k_weight", "q_bias", "k_bias", "q_mean_square", "k_mean_square")
_SLOTS = (
    "slot_mapping",
    "page_table",
    "page_indptr",
    "lengths",
    "cu_seqlens_q",
    "batch_indices",
    "errors",
    "clear_page",
)
_CACHE = ("q", "k", "v", "k_cache", "v_cache", *_SLOTS, "q_scale", "k_scale", "v_scale", "rotate_k")
OWN: dict[str, tuple[str, ...]] = {
    "rope": ("q", "k"),
    "rope_into": (),
    "fused_qkv": ("qkv", "bias", "copy_v", "order"),
    "fused_qkv_norm": ("qkv", "bias", *_NORM, "copy_v", "order"),
    "fp8": ("q", "k", "q_scale", "k_scale"),
    "kv_cache": _CACHE,
    "norm_rope": ("q", "k", *_NORM),
    "norm_fp8": ("q", "k", "q_scale", "k_scale", *_NORM, "hadamard"),
    "norm_kv_cache": (*_CACHE, *_NORM),
    "norm_into": ("q", "k", "v", *_NORM, "q_out", "k_out", "v_out"),
    "norm_rope_joint": ("hadamard",),
}
"""The tensors and words of each kind of call, beside `SHARED`."""
_ONE_STREAM = ("layout", "check", "inplace", "inverse", "cu_seqlens", "start_positions", "max_seqlen", "packed_table",
               "cp_size", "cp_rank")  # fmt: skip
SHARED = ("cos", "sin", "cos_sin_cache", "freqs", "freqs_cis", "mscale", "position_ids", "mrope_section",
          "mrope_interleaved", "unrotated", "q_factor", "interleaved", "interleaved_out", "rotary_dim", "rotary_offset",
          "rounding", *_ONE_STREAM)  # fmt: skip
VALUES = ("Packed", "Starts", "Mrope", "Norm", "KVCache", "Pages", "Quantize")

REFUSED = "refused"
EITHER = "either"  # valid, or refused
PLAIN = [f for f in FUNCTIONS if not f.label]


class Word(str, enum.Enum):
    bshd = "bshd"
    grouped = "grouped"
    fp32 = "fp32"
    auto = "auto"
    none = "none"
    rms_norm = "rms_norm"
    qk = "qk"


# Names that a refusal may have in place of the parameter's.
OTHER_NAMES = {
    "k": ("k_scale",),
    "q_factor": ("q_scale",),
    "position_ids": ("positions",),
    "norm_rounding": ("rounding",),
    "norm_kind": ("kind",),
    **{f"{letter}_out": (f"out's {letter}",) for letter in "qkv"},
    **dict.fromkeys(("q_mean_square", "k_mean_square"), ("mean_squares",)),
    **dict.fromkeys(("first_weights", "second_weights"), ("q_weight", "the weights")),
}
MODULE = torch.nn.Identity()
# Values that only sequences and words accept: (kind, value).
STRANGERS: list[tuple[str, Any]] = [
    ("a string", "8"), ("no words", ""), ("bytes", b"bshd"), ("a list", [1, 2]), ("a dict", {"a": 1}), ("a set", {1}),
    ("a module", MODULE), ("a class", Tensor), ("a function", print), ("an object", object()), ("an ellipsis", ...),
    ("a dtype", torch.float32), ("a list of lists", [[1], [2]]), ("a numpy array", np.arange(2)),
    ("a numpy array of words", np.array(["a"])), ("a numpy date", np.datetime64("2026-01-01")),
    ("a tensor of two", torch.arange(2)),
]  # fmt: skip


def kinds(parameter: str, plain: Any, cell: Cell) -> Iterator[tuple[str, Any, Any]]:
    """(kind, value, meaning: a plain value, REFUSED or EITHER) for a parameter with this plain value."""
    if parameter in INTS:
        yield from [
            ("np.int64", np.int64(plain), plain), ("np.int32", np.int32(plain), plain), ("float", float(plain), plain),
            ("np.float32", np.float32(plain), plain), ("np.float64", np.float64(plain), plain), ("True", True, 1),
            ("np.bool_", np.bool_(True), 1), ("False", False, 0), ("a half more", plain + 0.5, REFUSED),
            ("nan", float("nan"), REFUSED), ("inf", float("inf"), REFUSED), ("2**70", 2**70, REFUSED),
            ("1e300", 1e300, REFUSED), ("-1", -1, REFUSED), ("np.int8(-1)", np.int8(-1), REFUSED),
            ("None", None, None if parameter in ("rotary_dim", "max_seqlen") else REFUSED),
            ("complex", complex(plain), EITHER), ("0-d array", np.array(plain), EITHER),
            ("0-d tensor", torch.tensor(plain), EITHER), *((n, v, REFUSED) for n, v in STRANGERS),
        ]  # fmt: skip
    elif parameter in FLAGS:
        yield from [
            ("np.bool_", np.bool_(plain), plain), ("int", int(plain), plain), ("float", float(plain), plain),
            ("np.int64", np.int64(plain), plain), ("np.float32", np.float32(plain), plain), ("2", 2, REFUSED),
            ("-1", -1, REFUSED), ("0.5", 0.5, REFUSED), ("nan", float("nan"), REFUSED),
            ("None", None, None if parameter == "interleaved_out" else REFUSED),
            ("complex", complex(plain), EITHER), ("0-d array", np.array(plain), EITHER),
            ("0-d tensor", torch.tensor(plain), EITHER), ("an empty list", [], REFUSED),
            *((n, v, REFUSED) for n, v in STRANGERS),
        ]  # fmt: skip
    elif parameter in NUMBERS:
        yield from [
            ("int", 2, 2.0), ("np.float32", np.float32(0.5), 0.5), ("np.float64", np.float64(plain), plain),
            ("np.int64", np.int64(2), 2.0), ("True", True, EITHER), ("None", None, REFUSED),
            ("nan", float("nan"), EITHER), ("inf", float("inf"), EITHER), ("-1", -1.0, EITHER),
            ("10**400", 10**400, REFUSED), ("complex", 1j, REFUSED), ("0-d array", np.array(plain), EITHER),
            ("0-d tensor", torch.tensor(plain), EITHER), *((n, v, REFUSED) for n, v in STRANGERS),
        ]  # fmt: skip
    elif parameter in WORDS:
        yield from [
            ("np.str_", np.str_(plain), plain), ("an enum of words", Word(plain), plain),
            ("upper case", plain.upper(), REFUSED), ("with a space", plain + " ", REFUSED), ("None", None, REFUSED),
            ("1", 1, REFUSED), ("True", True, REFUSED), ("0.5", 0.5, REFUSED), ("a word in a list", [plain], REFUSED),
            ("a word in a tuple", (plain,), REFUSED), ("500 letters", "a" * 500, REFUSED),
            ("two lines", "a\nb", REFUSED), *((n, v, REFUSED) for n, v in STRANGERS),
        ]  # fmt: skip
    elif parameter in SECTIONS:
        yield from [
            ("list", list(plain), plain), ("tuple", plain, plain), ("numpy array", np.array(plain), plain),
            ("numpy int32", np.array(plain, dtype=np.int32), plain), ("torch.Size", torch.Size(plain), plain),
            ("np.int64 inside", [np.int64(n) for n in plain], plain),
            ("floats inside", [float(n) for n in plain], plain),
            ("numpy floats", np.array(plain, dtype=np.float32), plain), ("True inside", [True, 2, True], plain),
            ("range", range(1, 3), EITHER), ("a half inside", [1.5, 1.5, 1], REFUSED), ("None", None, EITHER),
            ("None inside", [1, None, 1], REFUSED), ("a string inside", ["1", 2, 1], REFUSED), ("4", 4, REFUSED),
            ("1.5", 1.5, REFUSED), ("True", True, REFUSED), ("a string", "121", REFUSED), ("bytes", b"121", REFUSED),
            ("a tensor", torch.tensor(plain), REFUSED), ("lists inside", [[1, 2, 1]], REFUSED),
            ("-1", [-1, 3, 2], REFUSED),
            ("too few pairs", [1, 1, 1], REFUSED), ("five axes", [1, 1, 1, 1, 0], REFUSED),
            ("nan inside", [float("nan"), 2, 1], REFUSED),
            ("2**70 inside", [2**70, 2, 1], REFUSED), ("two axes of numpy", np.array([[1, 2, 1]]), REFUSED),
            ("a 0-d array", np.array(4), REFUSED), ("a tensor inside", [torch.tensor(1), 2, 1], EITHER),
            ("a dict", {1: 1, 2: 2}, REFUSED), ("a module", MODULE, REFUSED), ("an object", object(), REFUSED),
            ("a class", tuple, REFUSED), ("a generator", (n for n in plain), EITHER),
        ]  # fmt: skip
    elif parameter in HEADS:
        yield from [
            ("list", list(plain), plain), ("numpy array", np.array(plain), plain),
            ("numpy int32", np.array(plain, dtype=np.int32), plain), ("torch.Size", torch.Size(plain), plain),
            ("np.int64 inside", [np.int64(n) for n in plain], plain), ("floats inside", [*map(float, plain)], plain),
            ("numpy floats", np.array(plain, dtype=np.float32), plain), ("one", plain[:1], REFUSED),
            ("three", (*plain, 1), REFUSED), ("none", (), REFUSED), ("None", None, REFUSED), ("4", 4, REFUSED),
            ("exchanged", plain[::-1], REFUSED), ("that do not divide", (5, 2), REFUSED), ("zero", (0, 2), REFUSED),
            ("no k", (4, 0), REFUSED), ("-1", (-4, 2), REFUSED), ("too many", (6, 2), REFUSED),
            ("True inside", (4, True), REFUSED), ("a half inside", (4.5, 2), REFUSED),
            ("None inside", (4, None), REFUSED), ("2**70 inside", (2**70, 2), REFUSED),
            ("nan inside", (float("nan"), 2), REFUSED), ("a tensor", torch.tensor(plain), REFUSED),
            ("a tensor inside", (torch.tensor(4), 2), EITHER),
            *((n, v, REFUSED) for n, v in STRANGERS),
        ]  # fmt: skip
    elif parameter in SCALES:
        scale = torch.tensor(plain, device=cell.device)
        yield from [
            ("int", 2, 2.0), ("np.float32", np.float32(plain), plain), ("np.float64", np.float64(plain), plain),
            ("np.int64", np.int64(2), 2.0), ("True", True, EITHER), ("a tensor", scale, plain),
            ("a tensor of one", scale[None], REFUSED if parameter == "q_factor" else plain),
            ("fp64", scale.double(), REFUSED), ("of seven", scale.expand(7), REFUSED),
            ("on meta", scale.to("meta"), REFUSED), ("complex", 1j, REFUSED),
            ("None", None, None if parameter == "q_scale" and "kv" in cell.function.name
                     else EITHER if parameter == "q_factor" else REFUSED),
            ("0-d array", np.array(plain), EITHER), ("10**400", 10**400, REFUSED),
            ("a whole tensor", torch.tensor(2), REFUSED),
            *((n, v, REFUSED) for n, v in STRANGERS if n != "a tensor of two"),
        ]  # fmt: skip
    elif parameter in SEQUENCES:
        yield from [
            ("list", list(plain), plain), ("too few", plain[:-1], REFUSED), ("too many", (*plain, plain[0]), REFUSED),
            ("None", None, REFUSED), ("a tensor", plain[0], REFUSED),
            ("a list inside", (plain[0].tolist(), *plain[1:]), REFUSED), ("empty", (), REFUSED),
            ("a number inside", (1.0, *plain[1:]), REFUSED), ("None inside", (None, *plain[1:]), EITHER),
            ("numpy inside", (plain[0].cpu().numpy(), *plain[1:]), REFUSED), ("numpy", np.arange(3.0), REFUSED),
            ("a module inside", (MODULE, *plain[1:]), REFUSED), ("1", 1, REFUSED), ("True", True, REFUSED),
            ("a generator", (x for x in plain), EITHER), ("another dtype", (plain[0].double(), *plain[1:]), REFUSED),
            ("on meta", (plain[0].to("meta"), *plain[1:]), REFUSED),
            ("another rank", (plain[0][0], *plain[1:]), REFUSED),
            *((n, v, REFUSED) for n, v in STRANGERS),
        ]  # fmt: skip
    else:
        yield from kinds_of_tensors(parameter, plain, cell)


def kinds_of_tensors(parameter: str, plain: Tensor, cell: Cell) -> Iterator[tuple[str, Any, Any]]:
    whole = not (plain.is_floating_point() or plain.is_complex())
    other = torch.int16 if whole else torch.float64
    size = torch.full((), 1, dtype=plain.dtype, device=plain.device)
    yield from [
        ("list", plain.tolist(), REFUSED), ("tuple", tuple(plain.tolist()), REFUSED),
        ("numpy array", plain.cpu().numpy(), REFUSED), ("numpy scalar", np.float32(1), REFUSED),
        ("np.int64", np.int64(1), REFUSED), ("1", 1, REFUSED), ("0", 0, REFUSED), ("0.5", 0.5, REFUSED),
        ("True", True, REFUSED), ("False", False, REFUSED), ("None", None, EITHER),
        ("a tuple of tensors", (plain, plain), EITHER if "joint" in cell.function.name else REFUSED),
        ("on meta", plain.to("meta"), REFUSED), ("another dtype", plain.to(other), REFUSED),
        ("bool", plain != 0, REFUSED), ("complex128", plain.to(torch.complex128), REFUSED),
        ("fp8", plain.real.float().to(FP8), EITHER if parameter in ("k_cache", "v_cache") else REFUSED),
        ("int8", plain.real.to(torch.int8), REFUSED), ("0-d", size, EITHER if parameter == "errors" else REFUSED),
        ("an axis more", plain[None], EITHER), ("two axes more", plain[None, None], EITHER),
        ("four axes more", plain[None, None, None, None], EITHER if parameter in FLAT else REFUSED),
        ("an axis less", plain[0], EITHER), ("too short", plain[:-1], EITHER), ("too narrow", plain[..., :-1], EITHER),
        ("empty", plain[:0], EITHER), ("twice as long", torch.cat((plain, plain)), EITHER),
        *((n, v, REFUSED) for n, v in STRANGERS if n != "a tensor of two" or not whole),
    ]  # fmt: skip
    if parameter in (  # never read on the host
        *("cu_seqlens", "position_ids", "start_positions", "slot_mapping"),
        *("page_table", "page_indptr", "last_page_len", "seq_lens", "cu_seqlens_q", *PLACES),
    ):
        for name, value in (("unsorted", plain.flip(0)), ("far", plain + 2**40), ("negative", plain - 2**40)):
            yield f"{name}", value.contiguous(), "survived"
        if parameter not in PAGED:  # these have one dtype
            yield "int32", plain.int(), plain
    if parameter == "cu_seqlens":
        for name, ends in (("falling", [0, 5, 2, 5]), ("from 1", [1, 2, 3, 5]), ("past the end", [0, 4, 9, 70]),
                           ("all negative", [-7, -5, -3, -2])):  # fmt: skip
            yield name, torch.tensor(ends, device=cell.device), "survived"


def context(cell: Cell, parameter: str) -> tuple[Args, Any] | None:
    """Arguments of a valid call that depends on the parameter, and the parameter's plain value."""
    f = cell.function
    changes: Args = {}
    plain: Any = None
    ids = torch.tensor([[3, 0, 5], [1, 4, 2]], device=cell.device)
    ids = torch.cat((ids, ids[:, :2]), 1) if f.name == "norm_rope_joint" else ids  # tokens of both streams
    if parameter == "cos_sin_cache":
        changes, plain = dict(NO_TABLES), cell.rand(P, D)
    elif parameter == "freqs":
        changes, plain = dict(NO_TABLES), cell.rand(P, D // 2)
    elif parameter == "freqs_cis":
        changes, plain = dict(NO_TABLES), torch.polar(torch.ones(P, 4), cell.rand(P, 4).cpu()).to(cell.device)
    elif parameter == "position_ids":
        plain = ids
    elif parameter in ("mrope_section", "mrope_interleaved"):
        changes = {"position_ids": torch.stack((ids, ids.flip(0), ids.flip(1))), "mrope_section": (1, 2, 1)}
        if parameter == "mrope_interleaved":
            changes["mrope_section"] = (2, 1, 1)
        plain = (1, 2, 1) if parameter == "mrope_section" else True
    elif parameter in ("cu_seqlens", "max_seqlen", "packed_table"):
        offsets = torch.tensor([0, 3, 3, 5], device=cell.device)
        changes = {**packed(cell, 5), "cu_seqlens": offsets}
        plain = {"cu_seqlens": offsets, "max_seqlen": 3, "packed_table": True}[parameter]
    elif parameter == "start_positions":
        plain = torch.tensor([2, 0], device=cell.device)
    elif parameter in ("q_bias", "k_bias"):
        changes, plain = {"norm_kind": "layer_norm"}, cell.rand(D, seed=3)
    elif parameter == "bias":
        plain = cell.rand(8 * D, seed=3)
    elif parameter in ("q_mean_square", "k_mean_square"):
        means = {name: cell.rand(B, S, seed=4).square() for name in ("q_mean_square", "k_mean_square")}
        changes = {**means, "across_heads": True, "q_weight": cell.rand(2 * D)}
        if "fused_qkv" in f.name:
            changes |= {"q_weight": cell.rand(4 * D), "k_weight": cell.rand(2 * D)}
        plain = means[parameter]
    elif parameter in ("cp_size", "cp_rank"):
        changes = {n: cell.rand(B, 4, *SIZES[n][2:], seed=5) for n in f.turned}
        if "kv_cache" in f.name:
            changes |= {"v": cell.rand(B, 4, *SIZES["v"][2:]), "slot_mapping": torch.arange(4 * B, device=cell.device)}
        changes |= {"cos": cell.rand(12, 4), "sin": cell.rand(12, 4), "cp_size": 2, "cp_rank": 1}
        plain = {"cp_size": 2, "cp_rank": 1}[parameter]
    elif parameter == "rotary_dim":
        changes, plain = {"cos": cell.rand(P, 2), "sin": cell.rand(P, 2, seed=1)}, 4
    elif parameter == "rotary_offset":
        changes, plain = {"cos": cell.rand(P, 2), "sin": cell.rand(P, 2, seed=1), "rotary_dim": 4}, 2
    elif parameter == "mscale":
        changes, plain = {**NO_TABLES, "freqs": cell.rand(P, D // 2)}, 1.25
    elif parameter in PAGED:
        ragged = parameter in ("page_indptr", "last_page_len")
        tables = {
            "page_table": torch.tensor([0, 2, 1]) if ragged else torch.tensor([[0, 4, 3], [2, 1, 3]]),
            **({"page_indptr": torch.tensor([0, 2, 3])} if ragged else {"seq_lens": torch.tensor([4, 3])}),
            **({"last_page_len": torch.tensor([2, 1])} if ragged else {}),
            "cu_seqlens_q": torch.tensor([0, 3, 6]),
            "errors": torch.zeros(1, dtype=torch.int32),
        }
        if parameter in PLACES:
            of_tokens = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([1, 2, 3, 0, 1, 2])
            tables = {"page_table": tables["page_table"], **dict(zip(PLACES, of_tokens))}
        changes = {name: x.to(cell.device) for name, x in tables.items()} | {"slot_mapping": DROP}
        changes |= {name: cell.rand(5, 2, 1, D, seed=8) for name in ("k_cache", "v_cache")}
        plain = True if parameter == "clear_page" else changes[parameter]
    elif parameter in SCALES[:3] and "kv_cache" in f.name:
        changes = {name: cell.rand(*SIZES[name], seed=8).to(FP8) for name in ("k_cache", "v_cache")}
        changes |= {"k_scale": 0.5, "v_scale": 0.5}
        plain = 0.5
    elif parameter in SCALES:
        plain = 0.5
    elif parameter == "heads":
        plain = (4, 2)
    elif parameter == "unrotated":
        plain = 1
    elif parameter in FLAGS:
        plain = True
        if parameter == "across_heads":
            changes = {"q_weight": cell.rand(2 * D), "k": cell.rand(B, S, 2, D), "k_weight": cell.rand(2 * D)}
        if parameter == "copy_v":
            plain = False
    elif parameter in NUMBERS:
        plain = 0.25
    elif parameter in WORDS:
        words = {"layout": "bshd", "rounding": "fp32", "norm_rounding": "none", "norm_kind": "rms_norm", "of": "qk"}
        plain = {**words, "order": "grouped"}[parameter]
    args = {n: x for n, x in cell.args(**changes).items() if x is not DROP}
    args = f.spoken(cell.fitted(args))
    if plain is None:
        plain = args[parameter]
    return args, plain


def copied(x: Any) -> Any:
    return tuple(map(copied, x)) if type(x) is tuple else x.clone() if isinstance(x, Tensor) else x


def bits(function: Function, args: Args) -> list[Any]:
    """A call's outputs and its tensors after the call, as bytes."""
    out = KINDS[function.name](**args)
    tensors = [*(out if isinstance(out, tuple) else (out,)), *(args[name] for name in function.written)]
    return [None if x is None else (x.dtype, tuple(x.shape), *numbers_of(x)) for x in tensors]


def numbers_of(x: Tensor) -> tuple[Any, ...]:
    """A tensor's bytes."""
    if x.is_meta:
        return ()
    x = x.detach().resolve_neg().resolve_conj().cpu().flatten()
    return (x.view(torch.uint8).numpy().tobytes() if x.numel() else b"",)


@cache
def memories() -> list[Any]:
    """The functions of the library that remember results."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("jitrope")]
    things = [thing for module in modules for thing in vars(module).values() if not isinstance(thing, ModuleType)]
    return [thing.cache_clear for thing in things if callable(getattr(thing, "cache_clear", None))]


def forget() -> None:
    """Forget all results of earlier calls, except a thread's: each cell has its own thread."""
    for clear in memories():
        clear()


def one_cell(function: Function, args: Args, parameter: str, wanted: Any, value: Any, means: Any) -> tuple[str, str]:
    """(outcome, the refusal's text), at first use and again after the valid call, which has the bits `wanted`."""

    def attempt(value: Any) -> Any:
        given = {**{n: copied(x) for n, x in args.items()}, parameter: value}
        before = {n: numbers_of(x) for n, x in given.items() if isinstance(x, Tensor) and not x.is_meta}
        try:
            return bits(function, given)
        except InvalidInput as error:
            for n, was in before.items():
                assert numbers_of(given[n]) == was, f"{n} was written"
            return str(error)

    plain = args[parameter]
    forget()
    generator = inspect.isgenerator(value)
    first = attempt(copied(value))
    assert attempt(copied(plain)) == wanted, "the right call has other bits after this one"
    again = first if generator else attempt(copied(value))
    assert attempt(copied(plain)) == wanted, "the right call has other bits after both"
    assert first == again, f"the first time {str(first)[:200]}, after the right call {str(again)[:200]}"
    if isinstance(first, str):
        meant = not isinstance(means, str) or means not in (REFUSED, EITHER, "survived")
        if meant:
            assert isinstance(attempt(copied(means)), str), f"refused, though it means {means!r}: {first}"
        check_text(function, parameter, first)
        return "refused", first
    assert means != REFUSED or not isinstance(means, str), "it is taken"
    if not isinstance(means, str) or means not in (REFUSED, EITHER, "survived"):
        assert first == attempt(copied(means)), f"another result than {means!r} gives"
    return "right", ""


def check_text(function: Function, parameter: str, text: str) -> None:
    name, _, said = text.partition(": ")
    assert name in (function.public, *VALUES), f"it does not begin with the function: {text}"
    assert "\n" not in text, f"more than a line: {text}"
    assert len(text) < 400, f"too long: {text}"
    names = "|".join((parameter, *OTHER_NAMES.get(parameter, ())))
    assert re.search(rf"\b({names})\b", said), f"it does not name {parameter}: {text}"


def table(function: Function, parameter: str, device: str) -> list[tuple[str, str, str]]:
    """(kind, outcome, text) for every kind of value of the parameter; each in its own thread."""
    cell = Cell(function, device)
    args, plain = context(cell, parameter)
    args = {**args, parameter: plain}
    wanted = bits(function, {n: copied(x) for n, x in args.items()})
    rows: list[tuple[str, str, str]] = []

    def run(kind: str, value: Any, means: Any) -> None:
        try:
            rows.append((kind, *one_cell(function, args, parameter, wanted, value, means)))
        except Exception as error:
            rows.append((kind, "WRONG", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"))

    for kind in kinds(parameter, plain, cell):
        thread = threading.Thread(target=run, args=kind)
        thread.start()
        thread.join()
    return rows


def parameters() -> list[tuple[Function, str]]:
    """Each kind of call with each of its words; words of values count as the call's."""
    found = []
    for f in PLAIN:
        names = [*OWN[f.name.rstrip("_")]]
        if f.name == "rope_into":
            names = [*f.turned, *f.outs]
        if f.name == "norm_rope_joint":
            names += [*SEQUENCES]
        norm = (
            "eps",
            "zero_centered",
            "after_rope",
            "norm_rounding",
            "norm_kind",
            "of",
            *(() if any(x in f.name for x in ("joint", "kv_cache", "fused")) else ("across_heads",)),
        )
        norm += ("v_norm",) if "kv_cache" in f.name or "fused" in f.name else ()
        names = [word for name in names for word in (LENGTHS if name == "lengths" else (name,))]
        names += [*HEADS] if "fused" in f.name else []
        joint, normed = f.name == "norm_rope_joint", "norm" in f.name
        words = [*names, *[word for word in SHARED if not (joint and word in _ONE_STREAM)], *(norm if normed else ())]
        without = {
            *(("interleaved_out", "q_scale") if f.in_place else ()),
        }
        without |= {"inverse"} if normed or "kv_cache" in f.name else set()  # it goes with neither
        without |= {"inplace"} if "fp8" in f.name or "into" in f.name else set()
        without |= {"hadamard"} if "kv_cache" in f.name else set()  # it goes with quantize alone
        without |= {"k_block_scale", "v_block_scale", "scale_fmt"}  # heads are too short; test_index_cache has them
        without |= {"v_weight"}  # it goes with of="v" alone; test_latent_norm has it
        without |= {"v_scale"} if "fp8" in f.name else set()  # these calls have no v; test_quantized_v has it
        found += [(f, word) for word in dict.fromkeys(words) if word not in without]
    return found


@pytest.mark.parametrize("function", PLAIN, ids=lambda f: f.name)
def test_every_parameter_is_known(function: Function) -> None:
    signature = set(inspect.signature(getattr(jitrope, function.public)).parameters)
    assert signature - {"positions", "norm", "cache", "quantize", "out", *VALUES} <= KNOWN
    assert {word for f, word in parameters() if f is function} <= KNOWN


def with_marks() -> Iterator[Any]:
    """The calls of all functions take the same way, so every parameter but its first is marked slow."""
    seen: set[str] = set()
    for function, parameter in parameters():
        marks = [pytest.mark.slow, pytest.mark.tenth] if parameter in seen else []
        seen.add(parameter)
        yield pytest.param(function, parameter, marks=marks, id=f"{function.name}-{parameter}")


@pytest.mark.parametrize(("function", "parameter"), with_marks())
def test_any_type(function: Function, parameter: str) -> None:
    rows = table(function, parameter, "cpu")
    wrong = [f"{kind}: {text}" for kind, ended, text in rows if ended == "WRONG"]
    assert len(rows) > 15
    assert not wrong, "\n".join(wrong)


def main(device: str = "cpu", words: str = "") -> Counter[str]:
    counts: Counter[str] = Counter()
    for function, parameter in parameters():
        if words in f"{function.name}.{parameter}":
            for kind, ended, text in table(function, parameter, device):
                counts[ended] += 1
                if text:
                    print(f"{function.name}.{parameter} | {kind} | {ended} | {text}")
    print(f"{sum(counts.values())} cells: {dict(counts)}")
    return counts


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(bool(main(*sys.argv[1:])["WRONG"]))
