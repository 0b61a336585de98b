"""Which kernels a program will ask for, and building them ahead of time. Needs no GPU.

>>> specs = prewarm.specs_of(heads=[32, 8], positions="int64")     # 32 heads of q, 8 of k, bf16, by position_ids
>>> prewarm.prewarm(specs, ["sm_80", "sm_90"], jobs=4)
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import api
from ..base import arguments
from ..base.config import log
from ..base.errors import CompileError, InvalidInput, JitropeError
from ..base.spec import DTYPES, Spec
from ..jit import compiler, kernels
from ..jit.registry import spec_from_dict
from ..jit.render import Source
from ..ops.planning import planning
from ..ops.values import KVCache, Mrope, Norm, Packed, Quantize, Starts
from ..ops.words import rotary_dim_of
from ..plan.problem import DTYPE_NAMES
from ..plan.spec import LAYOUT_AXES, TABLES, RopeSpec
from ..thd.spec import CorrectionSpec, RowsSpec, SegmentsSpec

__all__ = ["DEFAULT_CALLS", "Built", "default_specs", "expand", "prewarm", "read_calls", "refused", "specs_of"]

ARCH = re.compile(r"sm_[1-9]\d*[af]?")
"""Syntax of an architecture's name. Whether it exists is checked by the compiler (`refused`)."""

UNKEPT = "the kernel cache cannot be written"
"""The fault of a kernel that is compiled and not kept."""

_TOKENS, _ROWS, _SEQUENCES = 4096, 1 << 20, 4
"""Sizes that no kernel depends on: tokens of a sequence, rows of a table, sequences of a packed batch."""

_TORCH = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_FUNCTIONS = ("apply_rope", "prepare_qkv", "prepare_packed_qkv", "prepare_joint_qkv")

# Popular models. q and k go together, except where an integration's host hands them over one by one.
_WEIGHTS = {"q_weight": "bf16", "k_weight": "bf16"}
_ONCE = {**_WEIGHTS, "rounding": "once"}
_SLOTS = {"slot_mapping": "int64", "k_cache": "bf16", "v_cache": "bf16"}
_FLUX = {"interleaved": True, "width": "full", "norm": _ONCE}
_QWEN_IMAGE = {"interleaved": True, "rounding": "complex64", "norm": {**_WEIGHTS, "rounding": "twice"}}
_WAN = {"interleaved": True, "norm": {**_ONCE, "across_heads": True}, "inplace": True}
DEFAULT_CALLS: list[dict[str, Any]] = [
    {"heads": [[32, 8], [32, 32], [64, 8]], "inplace": [False, True]},  # Llama, Qwen, Mistral
    {"heads": [[32, 8], [64, 8]], "positions": "int64", "inplace": True},  # serving: vLLM, SGLang
    {"function": "prepare_qkv", "heads": [32, 8], "positions": "int64", "inplace": True, "cache": [
        _SLOTS, {**_SLOTS, "k_cache": "fp8", "v_cache": "fp8", "k_scale": 1.0, "v_scale": 1.0}]},
    {"heads": [32, 8], "positions": [None, {"cu_seqlens": "int32"}], "backward": True},  # training
    {"heads": 24, "interleaved": True, "width": ["full", "half"]},  # FLUX, HunyuanVideo
    {"heads": [24, 24], "interleaved": True, "backward": True},
    {"heads": 24, "interleaved": True, "rounding": "complex64"},  # Qwen-Image
    # With the norm: FLUX's double and single blocks, Qwen-Image's, Wan's of 14B and 1.3B, Qwen3.
    {"function": "prepare_joint_qkv", "heads": [24, 24], **_FLUX},
    {"function": "prepare_qkv", "heads": [24, 24], **_FLUX, "inplace": True},
    {"function": "prepare_joint_qkv", "heads": [24, 24], **_QWEN_IMAGE, "table": "freqs_cis", "two_tables": True},
    {"function": "prepare_qkv", "heads": [[40, 40], [12, 12]], **_WAN, "table": "freqs_cis"},
    {"function": "prepare_qkv", "heads": [32, 8], "norm": {**_WEIGHTS, "rounding": "twice"}, "backward": True},
    {"heads": [[12], [40]], "interleaved": True},
    # Megatron, TransformerEngine: q, then k.
    {"heads": [[8], [32]], "table": "freqs", "width": "full", "positions": [None, {"cu_seqlens": "int32"}],
     "backward": True},
    {"heads": 16, "head_dim": [80, 64, 256]},  # vision towers, Gemma
]  # fmt: skip


def specs_of(**call: Any) -> list[RopeSpec]:
    """The kernels of a call that is described in words: it is made on aligned meta tensors (`jitrope.planning`).

    Both launches of it are planned, and its gradient's with backward. All words that are not listed are keywords of the
    function itself, which refuses what does not fit.

    Args:
        function: "apply_rope", the default, "prepare_qkv", "prepare_packed_qkv" or "prepare_joint_qkv".
        heads: of q and k, as [32, 8]; of q alone, as 24. v has k's.
        head_dim, dtype, batch: of q and k; 128, "bf16" and 1. dtype is "fp32", "fp16" or "bf16".
        table: "cos_sin", "freqs", "cos_sin_cache" or "freqs_cis". table_dtype: "fp32"; of freqs_cis the real part's.
            width: "half" or "full". two_tables: prepare_joint_qkv gets a table for each stream.
        positions: the dtype of a tensor of ids, or a dict of words of `Packed`, `Mrope` or `Starts`. norm, cache,
            quantize: those of `Norm`, `KVCache` and `Quantize`. A tensor is given by its dtype, as in
            {"cu_seqlens": "int32", "cp_size": 2}; page_size, of a cache: rows of pages that are not neighbours.
        backward: plan the gradient too.

    Returns:
        The specs, each once.

    Raises:
        InvalidInput: no function of jitrope takes such a call.
    """
    return list(dict.fromkeys(_specs_of(call)))


def default_specs() -> list[RopeSpec]:
    """The kernels of `DEFAULT_CALLS`, each once."""
    return list(dict.fromkeys(spec for call in DEFAULT_CALLS for spec in _specs_of(call)))


def _specs(described: Mapping[str, Any]) -> list[RopeSpec]:
    with torch.inference_mode(False), torch.enable_grad(), planning() as specs:
        try:
            _Described(**described).make()
        except (TypeError, RuntimeError) as error:  # a word that a function or a value lacks, sizes past torch's
            raise InvalidInput(str(error).splitlines()[0]) from error
    return specs


class _Described:
    """A call in words, and its tensors on the meta device."""

    def __init__(
        self, function: str = "apply_rope", heads: Any = (), head_dim: int = 128, dtype: str = "bf16", batch: int = 1,
        backward: bool = False, **words: Any,
    ) -> None:  # fmt: skip
        self.name = name = arguments.word("call", "function", function, _FUNCTIONS)
        self.heads = arguments.wholes(name, "heads", heads if hasattr(heads, "__len__") else [heads], 1)
        if not 1 <= len(self.heads) <= 2 or (len(self.heads) < 2 and name in _FUNCTIONS[2:]):
            arguments.refuse(name, "heads", heads, "those of q and k, as [32, 8]")
        self.head_dim = arguments.whole(name, "head_dim", head_dim, 1)
        self.batch = arguments.whole(name, "batch", batch, 1)
        self.dtype = arguments.word(name, "dtype", dtype, DTYPES)
        self.backward, self.words = arguments.flag(name, "backward", backward), words
        positions = words.get("positions")
        self.packed = isinstance(positions, Mapping) and "cu_seqlens" in positions
        layout = "thd" if self.packed else words.get("layout", "bshd")
        self.layout = arguments.word(name, "layout", layout, tuple(LAYOUT_AXES))
        self.leaves: list[Tensor] = []

    def empty(self, label: str, dtype: Any, shape: Sequence[int]) -> Tensor:
        dtype = _TORCH[arguments.word(self.name, label, dtype, tuple(_TORCH))]
        return torch.empty(shape, dtype=dtype, device="meta")

    def trained(self, x: Tensor) -> Tensor:
        """x as an input of the gradient."""
        if not self.backward:
            return x
        self.leaves.append(x.requires_grad_())
        return x.clone() if self.words.get("inplace") else x  # torch writes no leaf

    def q_or_k(self, count: int, size: int) -> Tensor:
        sizes = {"b": self.batch, "s": _TOKENS, "t": _TOKENS, "h": count, "d": size}
        return self.trained(self.empty("dtype", self.dtype, [sizes[letter] for letter in self.layout]))

    def tables(
        self, table: str = "cos_sin", table_dtype: str = "fp32", width: str = "half", two_tables: bool = False
    ) -> dict[str, Any]:
        table = arguments.word(self.name, "table", table, TABLES)
        full = arguments.word(self.name, "width", width, ("half", "full")) == "full" or table == "cos_sin_cache"
        rotary = arguments.whole(self.name, "rotary_dim", rotary_dim_of(self.name, self.words, self.head_dim), 0)
        shape = [_ROWS, rotary // (1 if full else 2)]
        made = self.empty("table_dtype", table_dtype, [*shape, 2] if table == "freqs_cis" else shape)
        made = torch.view_as_complex(made) if table == "freqs_cis" else made
        given = (made, made) if arguments.flag(self.name, "two_tables", two_tables) else made
        return dict.fromkeys(("cos", "sin") if table == "cos_sin" else (table,), given)

    def value(self, label: str, given: Any) -> Any:
        """A value of its words; a tensor is given by its dtype."""
        if label == "positions" and isinstance(given, str):
            return self.empty(label, given, (_TOKENS,))
        if not isinstance(given, Mapping):
            or_dtype = "the dtype of a tensor of ids, or " if label == "positions" else ""
            arguments.refuse(self.name, label, given, f"{or_dtype}a table of its words")
        words, across = dict(given), given.get("across_heads")
        page, k_heads, axes = words.pop("page_size", None), self.heads[-1], words.get("mrope_section")
        cache = [_TOKENS, k_heads, self.head_dim]
        if page is not None:  # k's and v's pages take turns
            cache = [_TOKENS, 2, arguments.whole(label, "page_size", page, 1), *cache[1:]]
        shapes: dict[str, Sequence[int]] = {
            "cu_seqlens": (_SEQUENCES + 1,), "start_positions": (_SEQUENCES if self.packed else self.batch,),
            "position_ids": (len(axes) if isinstance(axes, (list, tuple)) else 1, _TOKENS),
            "slot_mapping": (self.batch * _TOKENS,), "k_cache": cache, "v_cache": cache,
            "q_weight": (self.head_dim * (self.heads[0] if across else 1),),
            "k_weight": (self.head_dim * (k_heads if across else 1),),
        }  # fmt: skip
        for word, dtype in words.items():
            if word in shapes:
                x = self.empty(word, dtype, shapes[word])
                words[word] = self.trained(x) if label == "norm" else x[:, 0] if x.dim() == 5 else x
        places = Packed if self.packed else Mrope if "position_ids" in words else Starts
        kind = {"norm": Norm, "cache": KVCache, "quantize": Quantize, "positions": places}[label]
        return kind(**words)

    def make(self) -> None:
        """Make the call, and the gradient's."""
        words = self.words
        tables = self.tables(**{x: words.pop(x) for x in ("table", "table_dtype", "width", "two_tables") if x in words})
        for label in ("positions", "norm", "cache", "quantize"):
            if words.get(label) is not None:
                words[label] = self.value(label, words[label])
        if self.name == "prepare_packed_qkv":
            words["q_per_group"] = self.heads[0] // self.heads[1]
            if words["q_per_group"] * self.heads[1] != self.heads[0]:
                arguments.refuse(self.name, "heads", self.heads, "of q and k, q's a multiple of k's")
            given: list[Any] = [self.q_or_k(self.heads[1], (words["q_per_group"] + 2) * self.head_dim)]
        else:
            q_k_v = (*self.heads, *self.heads[1:])
            given = [[self.q_or_k(n, self.head_dim) for n in q_k_v] for _ in range(2)]  # of two streams
            if self.name != "prepare_joint_qkv":
                given = [*given[0], None, None][: 2 if self.name == "apply_rope" else 3]
        out = getattr(api, self.name)(*given, **tables, **words)
        results = [x for x in ([out] if isinstance(out, Tensor) else out) if x is not None and x.requires_grad]
        if results:
            torch.autograd.grad(results, self.leaves, [torch.empty_like(x) for x in results], allow_unused=True)


def read_calls(path: Path) -> list[Spec]:
    """The kernels that a file names.

    TOML or JSON: `call = [...]`, each with the words of `specs_of`, of which a list stands for each of its values
    (`expand`); and `spec = [...]`, whole specs, as `jitrope.record` writes and `jitrope cache ls --json` prints. Of a
    listing, which has `entries` too, another version's specs are left out, and the log says how many.

    Raises:
        InvalidInput: the file cannot be read, or names something that no call or spec has.
    """
    path = arguments.path("read_calls", "path", path)
    try:
        text = path.read_text()
        if not text.strip():  # a record of a run that asked for nothing
            return []
        is_json = path.suffix == ".json" or text.lstrip().startswith("{")  # which no TOML does
        data = json.loads(text) if is_json else _toml(text)
    except (OSError, ValueError) as error:
        raise InvalidInput(f"cannot read {path}: {error}") from error
    except RecursionError as error:
        raise InvalidInput(f"cannot read {path}: it is nested too deeply") from error
    if not isinstance(data, dict) or not data.keys() & {"call", "spec"}:
        raise InvalidInput(f"{path} has neither a `call` nor a `spec` list")
    calls, whole = data.get("call", []), data.get("spec", [])
    try:
        for name, value in (("call", calls), ("spec", whole)):
            if not isinstance(value, list):
                raise InvalidInput(f"`{name}` is {value!r}, not a list")
        specs: list[Spec] = [spec for some in _each("call", calls, _specs_of) for spec in some]
        specs += filter(None, this_versions(whole)) if "entries" in data else _each("spec", whole, spec_from_dict)
    except InvalidInput as error:
        raise InvalidInput(f"{path}: {error}") from error
    except RecursionError as error:
        raise InvalidInput(f"{path} is nested too deeply") from error
    return list(dict.fromkeys(specs))


def _each(kind: str, items: Iterable[Any], read: Callable[[Any], Any]) -> Iterator[Any]:
    """What is read of each item. One that cannot be read is named, and none is left out: its kernel would be missing
    where nothing can be compiled."""
    for i, item in enumerate(items):
        try:
            yield read(item)
        except (TypeError, ValueError) as error:
            raise InvalidInput(f"{kind}[{i}]: {error}") from error


def _specs_of(described: dict[str, Any]) -> list[RopeSpec]:
    return [spec for call in expand(described) for spec in _specs(call)]


def this_versions(listed: Iterable[dict[str, Any]]) -> list[Spec | None]:
    """The specs of a cache's entries; None for an entry of another version. The log says how many those are."""
    specs: list[Spec | None] = []
    for described in listed:
        try:
            specs.append(spec_from_dict(described))
        except InvalidInput:
            specs.append(None)
    if others := specs.count(None):
        log.warning("%d of the cache's %d kernels are another version's and are left out", others, len(specs))
    return specs


def expand(described: Any) -> list[dict[str, Any]]:
    """The calls of a description in which a list stands for each of its values.

    A list of numbers is one value of heads, [32, 8]; a list of such lists stands for each of them.

    Raises:
        InvalidInput: it is no description, has no heads, or a list has no values.
    """
    if not isinstance(described, Mapping) or "heads" not in described:
        raise InvalidInput(f"described is {arguments.shown(described)}; it must be a call's words, a dict with heads")
    axes = []
    for name, value in described.items():
        several = isinstance(value, list) and (name != "heads" or any(isinstance(item, list) for item in value))
        if several and not value:
            arguments.refuse("call", name, value, "a value, or a list of some")
        axes.append(value if several else [value])
    return [dict(zip(described, values)) for values in itertools.product(*axes)]


def _toml(text: str) -> Any:
    try:
        import tomllib
    except ImportError as error:  # Python 3.10
        raise InvalidInput("TOML needs Python 3.11; write the same as JSON") from error
    return tomllib.loads(text)


@dataclass(frozen=True)
class Built:
    """What became of one kernel.

    Attributes:
        spec, arch: which it is.
        outcome: "compiled", "cached" or the error's words.
        failed: it is an error.
    """

    spec: Spec
    arch: str
    outcome: str
    failed: bool = False


def prewarm(
    specs: Iterable[Spec], archs: Iterable[str], jobs: int, done: Callable[[Built], None] = lambda built: None
) -> list[Built]:
    """Build every spec for every architecture into the kernel cache. What fails is said, not raised.

    Args:
        specs: of `specs_of`, `jitrope.planning`, `read_calls` or `jitrope.record`.
        archs: architectures, as "sm_90".
        jobs: how many are compiled at a time.
        done: called after each, in any order.

    Returns:
        What became of each, in order.
    """

    def one(item: tuple[Spec, str]) -> Built:
        spec, arch = item
        try:
            found = kernels.build(spec, arch)
            built = Built(spec, arch, "compiled" if found.compiled else "cached")
            if not found.kept:
                built = Built(spec, arch, UNKEPT, failed=True)
        except JitropeError as error:
            built = Built(spec, arch, str(error), failed=True)
        done(built)
        return built

    jobs = arguments.whole("prewarm", "jobs", jobs, 0)
    each = (
        arguments.items("prewarm", name, some, f"a list of {name}")
        for name, some in (("specs", specs), ("archs", archs))
    )
    work = checked_kernels("prewarm", itertools.product(*each))
    with ThreadPoolExecutor(max(1, jobs)) as pool:  # NVRTC lets go of the interpreter while it works
        return list(pool.map(one, work))


def checked_kernels(function: str, kernels: Iterable[tuple[Spec, str]]) -> list[tuple[Spec, str]]:
    """(spec, architecture) of each; InvalidInput with anything else."""
    found: list[tuple[Spec, str]] = []
    for i, kernel in enumerate(arguments.items(function, "kernels", kernels, "a list of (spec, architecture)")):
        if not isinstance(kernel, (tuple, list)) or len(kernel) != 2:
            arguments.refuse(function, f"kernels[{i}]", kernel, "(spec, architecture)")
        spec, arch = kernel
        if not isinstance(spec, (RopeSpec, RowsSpec, SegmentsSpec, CorrectionSpec)):
            arguments.refuse(function, "specs", spec, "of specs_of, planning, read_calls or record")
        if not isinstance(arch, str) or not ARCH.fullmatch(arch):
            arguments.refuse(function, "archs", arch, "architectures such as 'sm_90'")
        found.append((spec, arch))
    return found


def refused(arch: str) -> str:
    """Why the compiler here makes nothing for an architecture, or "": it is asked to compile an empty source.

    Raises:
        InvalidInput: it is not written as one.
    """
    if not isinstance(arch, str) or not ARCH.fullmatch(arch):
        arguments.refuse("refused", "arch", arch, "an architecture such as 'sm_90'")
    return _refused(arch)


@lru_cache
def _refused(arch: str) -> str:
    try:
        compiler.compile_source(Source("", "", "nothing"), arch)
    except CompileError as error:
        return str(error).splitlines()[0].removeprefix("nothing: ")
    return ""
