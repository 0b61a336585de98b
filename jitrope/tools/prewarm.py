"""Find the kernels that a program will need and build them ahead of time. No GPU is needed.

>>> specs = prewarm.specs_of(heads=[32, 8])  # rope of 32 heads of q and 8 of k, bf16
>>> results = prewarm.prewarm(specs, ["sm_80", "sm_90"], jobs=2)
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..base import arguments
from ..base.config import log
from ..base.errors import InvalidInput, JitropeError
from ..base.spec import DTYPES, Spec, spec_from_dict
from ..base.views import DTYPE_NAMES, FP8, Tensors, fused_shape
from ..call import Call
from ..jit import kernels, recording
from ..plan.options import Options
from ..run import dispatch
from ..run.planning import planning
from ..sinks.results import LETTERS
from ..sources.operation import operation_of
from ..sources.source import OF_TABLES
from ..thd import spec as _  # noqa: F401  (adds its kinds of specs to the registry)

__all__ = ["Built", "prewarm", "read_record", "specs_of"]

TORCH_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items() if name in DTYPES}

_ARCH = re.compile(r"(?:sm_?)?([1-9]\d*)|([1-9]\d*)\.(\d)")
"""Ways to write an architecture, without "a" or "f", as a GPU looks for it. The compiler checks that it exists."""


def specs_of(
    heads: Any, head_dim: int = 128, dtype: str = "bf16", *, call: str = "", width: str = "half", backward: bool = False
) -> list[Spec]:
    """The kernels of a call, for both launches and any number of tokens, with contiguous tensors of one batch row.

    The call is made on meta tensors. A text leaves out dtypes and shapes: tables are fp32, or fp64 where they are
    rounded as complex128. Weights and a k_pe_cache have the dtype of q; positions and slots are int64, other integers
    int32. A scale is one number, and a page has 16 rows. For other tensors use `jitrope.planning` or `jitrope.record`.

    >>> [spec.launch for spec in prewarm.specs_of(heads=[32, 8])]
    ['token_linear', 'token_linear', 'grid_2d', 'grid_2d']
    >>> prewarm.specs_of([32, 8], call="bshd heads q k > rotate cos sin > in_place")[0].call
    'bshd heads q k > rotate cos sin rotary_dim=128 > in_place'

    Args:
        heads: those of q and k, as [32, 8], also for a call without q, or of q alone, as 24.
        head_dim, dtype: the elements of a head; "fp32", "fp16" or "bf16".
        call: the text, as `KernelEvent.call` and `jitrope cache ls` have it. "": rope in fresh tensors.
        width: of cos and sin, "half" or "full".
        backward: plan the gradients of heads, weights and biases too.

    Returns:
        The specs, each once.

    Raises:
        InvalidInput: an argument is wrong, the function does not take such a call, or its text does not say enough.
    """
    name = "specs_of"
    counts = arguments.wholes(name, "heads", heads if hasattr(heads, "__len__") else [heads], 1)
    size, backward = arguments.whole(name, "head_dim", head_dim, 1), arguments.flag(name, "backward", backward)
    kind = TORCH_DTYPES[arguments.word(name, "dtype", dtype, DTYPES)]
    full = arguments.word(name, "width", width, ("half", "full")) == "full"
    found = Call.parse(str(call) or f"bshd heads {'q k'[: 2 * len(counts) - 1]} > rotate cos sin > fresh")
    given, o = {*found.tensors}, found.options
    alone = {"q", "dq"} & given and not {"k", "dk", "kv"} & given
    per_group = counts[0] // counts[-1] if {"qkv", "weight"} & given else 0
    if len(counts) != (1 if alone else 2) or o.q_per_group != per_group:
        arguments.refuse(name, "heads", heads, "those of q and k, as [32, 8], or of q alone, as the call has them")
    o = o._replace(rotary_dim=o.rotary_dim or size - o.rotary_offset, max_seqlen=_TOKENS * ("cu_seqlens" in given))
    with torch.inference_mode(False), torch.enable_grad(), planning() as specs:
        try:
            tensors = _stand_ins(found.tensors, o, counts, size, kind, full)
        except RuntimeError as error:  # sizes that torch does not take
            raise InvalidInput(f"{name}: heads or call have wrong sizes: {str(error).splitlines()[0]}") from error
        op, own = operation_of(found.name, tensors, o), [x for label, x in tensors.items() if label not in OF_TABLES]
        leaves = [x.requires_grad_(backward) for x in own if x.dtype == kind and x.dim()]
        tensors.update({label: tensors[label].clone() for label in op.written(tensors, o)})  # no leaves
        try:
            o, tensors = (o, tensors) if "cos" in tensors else op.without_table(tensors, o)
            if op.function:
                op.check(tensors, o)
        except (KeyError, StopIteration) as error:
            text = f"call lacks {[*error.args, 'heads'][0]}, which it needs with its other tensors"
            raise InvalidInput(f"{name}: {text}") from error
        if results := [x for x in dispatch.call(op, tensors, o).values() if x.requires_grad]:
            torch.autograd.grad(results, leaves, [torch.empty_like(x) for x in results], allow_unused=True)
    return specs


_TOKENS = 4096  # of a stream


def _stand_ins(names: Sequence[str], o: Options, heads: Sequence[int], dim: int, dtype: Any, full: bool) -> Tensors:
    """Meta tensors for a call, contiguous ones of one batch row; none for `out`. full: the width of cos and sin."""
    tokens, packed = _TOKENS * (1 + ("first_q" in names)), "cu_seqlens" in names
    pages, pe = (tokens // 16, 16), o.rotary_dim * ("k_pe_cache" in names)
    real, cis = torch.float64 if o.rounding == "complex128" else torch.float32, o.table == "freqs_cis"
    width = o.rotary_dim // (1 if o.table == "cos_sin_cache" or (full and not cis) else 2)
    fused, axes = fused_shape(heads[-1], dim, o), [max(o.axis_of_pair) + 1] if o.axis_of_pair else []

    def of_heads(count: int, size: int) -> list[int]:
        return [{"h": count, "d": size, "b": 1}.get(axis, _TOKENS) for axis in o.layout]

    scales: dict[str, Any] = dict.fromkeys(("q_scale", "k_scale", "v_scale", "q_factor"), ())
    scales["q_weights"] = [{"h": heads[0], "b": 1}.get(axis, tokens) for axis in o.layout[:-1]]
    shapes: dict[str, Any] = {"cu_seqlens": 5, "page_table": (4, 8), "lengths": 4, "errors": 1}
    ids = {"slot_mapping": tokens, "position_ids": (*axes, tokens), "start_positions": 4 if packed else 1}
    tables = dict.fromkeys(("cos", "sin"), (tokens * o.cp_size, width))
    kinds = dict.fromkeys(shapes, torch.int32) | dict.fromkeys(ids, torch.int64)
    kinds |= dict.fromkeys(tables, real.to_complex() if cis else real) | dict.fromkeys(scales, torch.float32)
    shapes |= {**ids, **tables, **scales, "qkv": of_heads(*fused), "bias": fused, "k_pe": of_heads(1, o.rotary_dim)}
    shapes |= {"x": [*of_heads(*fused)[:-2], _TOKENS], "weight": (*fused, _TOKENS)}
    shapes |= {"kv": of_heads(heads[-1], o.rotary_offset + o.v_dim), "k_pe_cache": (*pages, heads[-1], pe)}
    for letter in LETTERS:
        count, size = heads[0 if letter in ("q", "gate") else -1], (letter == "v" and o.v_dim) or dim
        weight = size * (count if o.across_heads or letter == "v" else 1) - o.rotary_dim * (o.of == "k_nope")
        shapes |= {letter: of_heads(count, size), f"{letter}_cache": (*pages, count, size - pe)}
        shapes |= dict.fromkeys((f"{letter}_weight", f"{letter}_bias"), weight)
        kinds[f"{letter}_cache"] = FP8 if f"{letter}_scale" in names else dtype
    found = {name: re.sub("^(first_|second_|d)", "", name) for name in names if not name.endswith("_out")}
    if unknown := [name for name, own in found.items() if own not in shapes]:
        raise InvalidInput(f"specs_of: call has {unknown[0]}, whose shape its text does not say; record a run instead")
    return {name: torch.empty(shapes[own], dtype=kinds.get(own, dtype), device="meta") for name, own in found.items()}


def architecture(text: Any) -> str | None:
    """An architecture as NVRTC names it: "sm_90" for sm_90, sm90, 90 and 9.0. None if the text names none."""
    match = _ARCH.fullmatch(text) if isinstance(text, str) else None
    return "sm_" + "".join(part or "" for part in match.groups()) if match else None


def read_record(path: Path) -> list[Spec]:
    """The kernels in a file, each once.

    The file is JSON with a version and a list `spec`: what `jitrope.record` writes or `jitrope cache ls --json` prints.

    >>> _ = Path("run.json").write_text('{"version": 1, "spec": []}')
    >>> prewarm.read_record(Path("run.json"))
    []

    Raises:
        CacheError: the file cannot be read, or is no record of this version.
        InvalidInput: a spec in it is wrong.
    """
    path = arguments.path("read_record", "path", path)
    data = recording.content(path)
    specs: dict[Spec, None] = {}
    for i, item in enumerate(data["spec"]):
        try:
            specs[spec_from_dict(item)] = None
        except (TypeError, ValueError) as error:  # without it a kernel would be missing later
            raise InvalidInput(f"{path}: spec[{i}]: {error}") from error
    return [*specs]


def this_versions(listed: Iterable[tuple[Any, str]]) -> list[tuple[Spec, str]]:
    """(spec, architecture) of a cache's entries. The log gives the number of those of another version, left out."""
    listed, found = list(listed), []
    for described, arch in listed:
        with suppress(InvalidInput):
            found.append((spec_from_dict(described), arch))
    if others := len(listed) - len(found):
        log.warning("%d of the cache's %d kernels are another version's and are left out", others, len(listed))
    return found


@dataclass(frozen=True)
class Built:
    """The result for one kernel.

    >>> prewarm.prewarm(prewarm.specs_of(heads=8)[:1], ["sm_90"], jobs=1)[0].outcome
    'compiled'

    Attributes:
        spec, arch: the kernel.
        outcome: "compiled", "cached" or the error's text.
        failed: whether it is an error.
    """

    spec: Spec
    arch: str
    outcome: str
    failed: bool = False


def prewarm(specs: Iterable[Spec], archs: Iterable[str], jobs: int) -> list[Built]:
    """Build every spec for every architecture into the kernel cache. Errors are results; they are not raised.

    Args:
        specs: the results of `specs_of`, `jitrope.planning`, `read_record` or `jitrope.record`.
        archs: architectures, such as "sm_90" or "9.0".
        jobs: the number of kernels that are compiled at a time.

    Returns:
        The result for each kernel, in order.

    Raises:
        InvalidInput: an argument is of another kind.
    """

    def kept(spec: Spec, arch: str) -> Built:
        found = kernels.build(spec, arch)
        outcome = "compiled" if found.compiled else "cached"
        return Built(spec, arch, outcome if found.kept else "the kernel cache cannot be written", not found.kept)

    specs = arguments.items("prewarm", "specs", specs, "a list of specs")
    archs = arguments.items("prewarm", "archs", archs, "a list of architectures")
    return build_each("prewarm", pairs(specs, archs), jobs, kept)


def pairs(specs: Iterable[Spec], archs: Iterable[str]) -> list[tuple[Spec, str]]:
    """Each kernel with each architecture that it is for."""
    return [(x, arch) for x, arch in itertools.product(specs, archs) if not isinstance(x, Spec) or x.runs_on(arch)]


def reasons(failed: Iterable[Built]) -> list[str]:
    """A line for each reason of failures, with the first kernel that has it and the number of the others."""
    alike: dict[str, list[Built]] = {}
    for item in failed:
        alike.setdefault(item.outcome, []).append(item)
    more = {reason: f" and {len(items) - 1} more" * (len(items) > 1) for reason, items in alike.items()}
    return [f"{items[0].spec.name} {items[0].arch}{more[reason]}: {reason}" for reason, items in alike.items()]


def build_each(
    function: str, work: Iterable[tuple[Any, Any]], jobs: int, build: Callable[[Spec, str], Built]
) -> list[Built]:
    """Build each (spec, architecture) once, some at a time. An error of jitrope's becomes a failed result."""
    wanted: dict[tuple[Spec, str], None] = {}
    for spec, given in work:
        arch = architecture(given)
        if not isinstance(spec, Spec):
            arguments.refuse(function, "specs", spec, "specs from specs_of, planning, read_record or record")
        if arch is None:
            arguments.refuse(function, "archs", given, "architectures such as 'sm_90'")
        wanted[spec, arch] = None

    def one(kernel: tuple[Spec, str]) -> Built:
        try:
            return build(*kernel)
        except JitropeError as error:
            return Built(*kernel, str(error).removeprefix(f"{kernel[0].name}: "), failed=True)

    with ThreadPoolExecutor(max(1, arguments.whole(function, "jobs", jobs, 0))) as pool:  # NVRTC releases the GIL
        return list(pool.map(one, wanted))
