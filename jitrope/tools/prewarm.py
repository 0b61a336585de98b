"""Which kernels a program will ask for, and building them ahead of time. Needs no GPU.

>>> specs = prewarm.Call(heads=40, position_ids="int64").specs()     # 32 heads of q and 8 of k, bf16, by position_ids
>>> prewarm.prewarm(specs, ["sm_80", "sm_90"], jobs=4)
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..base import arguments
from ..base.config import log
from ..base.errors import CompileError, InvalidInput, JitropeError
from ..base.spec import ACCESS_BYTES, DTYPES, ITEM_SIZES, Spec
from ..jit import compiler, kernels
from ..jit.registry import spec_from_dict
from ..jit.render import Source
from ..plan.heuristics import RopeProblem, plan
from ..plan.spec import MAX_HEAD_DIM, NORM_ROUNDINGS, ROUNDINGS, RopeSpec
from ..thd.spec import CorrectionSpec, RowsSpec, SegmentsSpec

__all__ = ["DEFAULT_CALLS", "Built", "Call", "expand", "prewarm", "read_calls", "refused", "this_versions"]

_MANY, _SM_COUNT = 1 << 20, 132

ARCH = re.compile(r"sm_[1-9]\d*[af]?")
"""How an architecture is written; which of them there are, the compiler says (`refused`)."""

UNKEPT = "the kernel cache cannot be written"
"""What becomes of a kernel that is compiled and not kept."""

_NUMBERS = "tuple[int, ...]"
_KINDS: dict[Any, Callable[..., Any]] = {  # by a field's annotation
    "int": arguments.whole, "bool": arguments.flag, "bool | None": arguments.flag, _NUMBERS: arguments.wholes,
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """A kind of call with aligned, ordinary tensors: of `apply_rope`, with q_per_group of `prepare_packed_qkv`, with
    slots, fp8 or a norm of `prepare_qkv`.

    The kernels of a call are both launches, and with `backward` the gradient's. Fields that are not listed are
    arguments of those functions and of their values.

    Attributes:
        heads: those of q and k (and v, if the call moves it) together, since one block takes all of a token's.
        dtype, table_dtype: "fp32", "fp16" or "bf16", of q and of the tables; "fp64" tables with "complex128".
        rotary_dim: 0: the whole head.
        width: "half" or "full" tables.
        angles: they are `freqs`.
        freqs_cis: they are complex64.
        packed, start_positions, position_ids, slots: None, or "int32" or "int64", the dtype of cu_seqlens,
            start_positions, position_ids and slot_mapping.
        page_size: rows, of a cache whose pages do not follow each other, else 0.
        kv_dtype: the cache's, if it is "fp8".
        fp8: q (and without a cache k) comes out as fp8.
        batch_inner: (S, B, H, D) in memory, B > 1.
        norm, weight_dtype: rounding of a call's `Norm`, "" without one, and its weights' dtype.
        across_heads: the heads of q and of k of a norm over all of them, else ().
        two_streams, two_tables: a `prepare_joint_qkv` call, and one with tables for each stream.
        backward: the gradient's kernels too.

    Raises:
        InvalidInput: a field has a value that no call has.
    """

    heads: int
    head_dim: int = 128
    dtype: str = "bf16"
    table_dtype: str = "fp32"
    interleaved: bool = False
    interleaved_out: bool | None = None
    rotary_dim: int = 0
    rotary_offset: int = 0
    width: str = "half"
    angles: bool = False
    rounding: str = "fp32"
    packed: str | None = None
    packed_table: bool = False
    start_positions: str | None = None
    cp_size: int = 1
    q_per_group: int = 0
    copy_v: bool = True
    batch_inner: bool = False
    freqs_cis: bool = False
    position_ids: str | None = None
    mrope_section: tuple[int, ...] = ()
    mrope_interleaved: bool = False
    slots: str | None = None
    page_size: int = 0
    kv_dtype: str | None = None
    rotate_k: bool = False
    fp8: bool = False
    norm: str = ""
    weight_dtype: str | None = None
    zero_centered: bool = False
    across_heads: tuple[int, ...] = ()
    two_streams: bool = False
    two_tables: bool = False
    in_place: bool = False
    backward: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in _KINDS and (value is not None or "None" not in field.type):
                object.__setattr__(self, field.name, _KINDS[field.type]("Call", field.name, value))
        for name, value, allowed in (
            ("dtype", self.dtype, DTYPES),
            ("table_dtype", self.table_dtype, (*DTYPES, "fp64") if str(self.rounding) == "complex128" else DTYPES),
            ("width", self.width, ("half", "full")),
            ("rounding", self.rounding, ROUNDINGS),
            ("packed", self.packed, (None, "int32", "int64")),
            ("start_positions", self.start_positions, (None, "int32", "int64")),
            ("position_ids", self.position_ids, (None, "int32", "int64")),
            ("slots", self.slots, (None, "int32", "int64")),
            ("norm", self.norm, ("", *NORM_ROUNDINGS)),
            ("weight_dtype", self.weight_dtype, (None, *DTYPES)),
            ("kv_dtype", self.kv_dtype, (None, self.dtype, "fp8")),
        ):
            if not (value is None or isinstance(value, str)) or value not in allowed:
                arguments.refuse("Call", name, value, f"one of {', '.join(map(repr, allowed))}")
        rotary = self.rotary_dim or self.head_dim
        if rotary % 2 or not 0 < rotary <= self.head_dim <= MAX_HEAD_DIM:
            raise InvalidInput(f"head_dim {self.head_dim} with rotary_dim {rotary}: even, and at most {MAX_HEAD_DIM}")
        if self.mrope_section and sum(self.mrope_section) != rotary // 2:
            raise InvalidInput(f"mrope_section is {self.mrope_section}; it must be {rotary // 2} pairs in all")
        for name, least in (("heads", 1), ("cp_size", 1), ("q_per_group", 0), ("rotary_offset", 0), ("page_size", 0)):
            if getattr(self, name) < least:
                raise InvalidInput(f"{name} is {getattr(self, name)}; it must be at least {least}")

    def _require_possible(self) -> None:
        """Refuse what the functions refuse of such a call, so that no kernel is promised that cannot be compiled."""
        values = self.q_per_group > 0 or self.slots or self.two_streams
        mixed = self.interleaved_out not in (None, self.interleaved)
        for name, given, others in (
            ("rounding='complex128'", self.rounding == "complex128", {"angles": self.angles, "packed": self.packed}),
            (f"norm={self.norm!r}", self.norm, {
                "packed": self.packed, "angles": self.angles, "slots": self.slots,
                "fp8": self.fp8 or self.kv_dtype == "fp8", "cp_size": self.cp_size > 1, "interleaved_out": mixed,
            }),
            ("position_ids", self.position_ids, {
                "packed": self.packed, "start_positions": self.start_positions, "cp_size": self.cp_size > 1,
            }),
            ("slots", self.slots, {"packed": self.packed, "backward": self.backward}),
            ("across_heads", self.across_heads, {"q_per_group": self.q_per_group, "two_streams": self.two_streams}),
            ("interleaved_out", mixed, {
                "width='full'": self.width == "full", "in_place": self.in_place, "q_per_group or slots": values,
            }),
        ):  # fmt: skip
            for other in (other for other, also in others.items() if given and also):
                raise InvalidInput(f"{name} does not go with {other}: no function takes both, and no kernel does")

    def specs(self) -> list[RopeSpec]:
        """The kernels of this call, each once.

        Raises:
            InvalidInput: no function of jitrope takes such a call.
        """
        self._require_possible()
        rotary = self.rotary_dim or self.head_dim
        problem = RopeProblem(
            dtype=self.dtype,
            table_dtype=self.table_dtype,
            head_dim=self.head_dim,
            rotary_dim=rotary,
            rotary_offset=self.rotary_offset,
            interleaved=self.interleaved,
            interleaved_out=self.interleaved if self.interleaved_out is None else self.interleaved_out,
            inverse=False,
            freqs=self.angles,
            full_width=self.width == "full",
            per_head=False,
            packed_table=self.packed_table,
            rounding=self.rounding,
            in_place=self.in_place,
            cu_seqlens_dtype=self.packed,
            start_positions_dtype=self.start_positions,
            cp_size=self.cp_size,
            position_ids_dtype=self.position_ids,
            mrope_section=self.mrope_section,
            mrope_interleaved=self.mrope_interleaved,
            slot_mapping_dtype=self.slots,
            page_size=self.page_size,
            rotate_k=self.rotate_k,
            q_out="fp8" if self.fp8 else self.dtype,
            kv_out=self.kv_dtype or ("fp8" if self.fp8 and not self.slots else self.dtype),
            norm_rounding=self.norm,
            across_heads=bool(self.across_heads),
            row_heads=self.across_heads,
            zero_centered=self.zero_centered,
            weight_dtype=self.weight_dtype,
            two_streams=self.two_streams,
            two_tables=self.two_tables,
            gradient=False,
            q_per_group=max(1, self.q_per_group),
            copy_v=self.slots is not None
            or self.two_streams
            or (self.q_per_group > 0 and self.copy_v and not self.in_place),
            batch_inner=self.batch_inner,
            wide=False,
            batch=2 if self.batch_inner else 1,
            tokens=_MANY,
            heads=self.heads,
            q_heads=self.heads // (3 if self.two_streams else 2),
            num_sequences=1 if self.packed else 0,
            max_seqlen=0,
            vec_limit=_aligned(self.head_dim, self.dtype),
            table_vec_limit=_aligned(rotary if self.width == "full" else rotary // 2, self.table_dtype),
            table_step_limit=2 if self.freqs_cis else 1,
            weight_vec_limit=_aligned(self.head_dim, self.weight_dtype) if self.weight_dtype else 1,
            launch="auto",
            sm_count=_SM_COUNT,
        )
        problems = [replace(problem, launch=launch) for launch in ("token_linear", "grid_2d")]
        if self.backward:  # of a fresh tensor, whichever way the forward went
            problems += [
                replace(
                    p, inverse=True, in_place=False, interleaved=p.interleaved_out, interleaved_out=p.interleaved,
                    copy_v=self.q_per_group > 0, gradient=bool(self.norm), two_streams=False,
                    two_tables=False, heads=self.heads * 2 // 3 if self.two_streams else self.heads,
                    rounding="complex64" if self.norm else self.rounding, norm_rounding="none" if self.norm else "",
                )
                for p in problems
            ]  # fmt: skip
        return list(dict.fromkeys(plan(p).spec for p in problems))


def _aligned(elements: int, dtype: str) -> int:
    """Elements an access where rows of so many elements follow each other."""
    vec = ACCESS_BYTES // ITEM_SIZES[dtype]
    while elements % vec:
        vec //= 2
    return vec


# Popular models. q and k go together, except where an integration's host hands them over one by one.
DEFAULT_CALLS = (
    [Call(heads, in_place=in_place) for heads in (40, 64, 72) for in_place in (False, True)]  # Llama, Qwen, Mistral
    + [Call(heads, position_ids="int64", in_place=True) for heads in (40, 72)]  # serving: vLLM, SGLang
    + [Call(48, position_ids="int64", in_place=True, slots="int64", kv_dtype=kv) for kv in (None, "fp8")]
    + [Call(40, backward=True), Call(40, packed="int32", backward=True)]
    + [Call(24, interleaved=True, width=width) for width in ("full", "half")]  # FLUX, HunyuanVideo
    + [Call(48, interleaved=True, backward=True)]
    + [Call(24, interleaved=True, rounding="complex64")]  # Qwen-Image
    + [  # with the norm: FLUX's double and single blocks, Qwen-Image's, Wan's of 14B and 1.3B, Qwen3
        Call(72, interleaved=True, width="full", norm="once", weight_dtype="bf16", two_streams=True),
        Call(48, interleaved=True, width="full", norm="once", weight_dtype="bf16", in_place=True),
        Call(
            72,
            interleaved=True,
            freqs_cis=True,
            rounding="complex64",
            norm="twice",
            weight_dtype="bf16",
            two_streams=True,
            two_tables=True,
        ),
        *(
            Call(
                2 * heads,
                interleaved=True,
                freqs_cis=True,
                norm="once",
                weight_dtype="bf16",
                in_place=True,
                across_heads=(heads, heads),
            )
            for heads in (40, 12)
        ),
        Call(40, norm="twice", weight_dtype="bf16", backward=True),
    ]
    + [Call(heads, interleaved=True) for heads in (12, 40)]  # Wan 1.3B, 14B
    + [
        Call(heads, angles=True, width="full", packed=packed, backward=True)  # Megatron, TransformerEngine: q, then k
        for heads in (8, 32)
        for packed in (None, "int32")
    ]
    + [Call(16, head_dim=80), Call(16, head_dim=64), Call(16, head_dim=256)]  # vision towers, Gemma
)


def read_calls(path: Path) -> list[Spec]:
    """The kernels that a file names.

    TOML or JSON: `call = [...]`, each with `Call`'s fields, of which a list stands for each of its values (`expand`);
    and `spec = [...]`, whole specs, as `jitrope.record` writes and `jitrope cache ls --json` prints. Of such a
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
    return [spec for call in expand(described) for spec in call.specs()]


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


def expand(described: dict[str, Any]) -> list[Call]:
    """The calls of a description in which any field may be a list, which stands for each of its values.

    A list of numbers is one value of a field that has several (`mrope_section`, `across_heads`); a list of such lists
    stands for each of them.

    Raises:
        InvalidInput: as `Call`, or it is no description, or names a field that there is not.
    """
    if not isinstance(described, Mapping):
        raise InvalidInput(f"described is {arguments.shown(described)}; it must be a call's fields, a dict")
    if unknown := [name for name in described if name not in {field.name for field in fields(Call)}]:
        allowed = ", ".join(field.name for field in fields(Call))
        raise InvalidInput(f"a call has no field {unknown[0]!r}; its fields are {allowed}")
    if "heads" not in described:
        raise InvalidInput("described has no heads; they must be those of q and k together")
    tuples = {field.name for field in fields(Call) if field.type == _NUMBERS}
    axes = [_values(value, name in tuples) for name, value in described.items()]
    return [Call(**dict(zip(described, values))) for values in itertools.product(*axes)]


def _values(value: Any, of_numbers: bool) -> list[Any]:
    """The values that a field takes in turn."""
    if not isinstance(value, list):
        return [value]
    if not of_numbers:
        return value
    several = value if value and all(isinstance(item, list) for item in value) else [value]
    return [tuple(numbers) for numbers in several]


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
        specs: of `Call.specs`, `read_calls` or `jitrope.record`.
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
            arguments.refuse(function, "specs", spec, "of Call.specs, read_calls or jitrope.record")
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
