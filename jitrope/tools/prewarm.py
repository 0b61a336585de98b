"""Find the kernels that a program will need and build them ahead of time. No GPU is needed.

>>> specs = prewarm.specs_of(heads=[32, 8], positions="int64")  # 32 heads of q, 8 of k, bf16, by position_ids
>>> results = prewarm.prewarm(specs, ["sm_80", "sm_90"], jobs=2)
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..base import arguments
from ..base.config import log
from ..base.errors import InvalidInput, JitropeError
from ..base.spec import Spec
from ..jit import kernels
from ..jit.registry import spec_from_dict
from ..ops.planning import planning
from ..thd import spec as _  # noqa: F401  (adds its kinds of specs to the registry)
from .described import Described

__all__ = ["DEFAULT_CALLS", "Built", "default_specs", "prewarm", "read_calls", "specs_of"]

_ARCH = re.compile(r"(?:sm_?)?([1-9]\d*)|([1-9]\d*)\.(\d)")
"""Ways to write an architecture, without "a" or "f", as a GPU looks for it. The compiler checks that it exists."""

# Popular models. q and k go together, except for hosts that rotate them one by one.
_WEIGHTS = {"q_weight": "bf16", "k_weight": "bf16"}
_ONCE = {**_WEIGHTS, "rounding": "once"}
_TWICE = {**_WEIGHTS, "rounding": "twice"}
_SLOTS = {"slot_mapping": "int64", "k_cache": "bf16", "v_cache": "bf16"}
_FP8_SLOTS = {**_SLOTS, "k_cache": "fp8", "v_cache": "fp8", "k_scale": 1.0, "v_scale": 1.0}
_PACKED = {"cu_seqlens": "int32"}
_SERVING = {"positions": "int64", "inplace": True}
_FLUX = {"interleaved": True, "width": "full", "norm": _ONCE}
_QWEN_IMAGE = {"interleaved": True, "rounding": "complex64", "norm": _TWICE, "table": "freqs_cis", "two_tables": True}
_WAN = {"interleaved": True, "norm": {**_ONCE, "across_heads": True}, "inplace": True, "table": "freqs_cis"}
DEFAULT_CALLS: list[dict[str, Any]] = [
    {"heads": [[32, 8], [32, 32], [64, 8]], "inplace": [False, True]},  # Llama, Qwen, Mistral
    {"heads": [[32, 8], [64, 8]], **_SERVING},  # vLLM, SGLang
    {"function": "prepare_qkv", "heads": [32, 8], **_SERVING, "cache": [_SLOTS, _FP8_SLOTS]},
    {"function": "prepare_qkv", "heads": [32, 8], **_SERVING, "cache": [_SLOTS, _FP8_SLOTS], "norm": _TWICE},  # Qwen3
    {"heads": [32, 8], "positions": [None, _PACKED], "backward": True},  # training
    {"heads": 24, "interleaved": True, "width": ["full", "half"]},  # FLUX, HunyuanVideo
    {"heads": [24, 24], "interleaved": True, "backward": True},
    {"heads": 24, "interleaved": True, "rounding": "complex64"},  # Qwen-Image
    # With the norm: the double and single blocks of FLUX, the blocks of Qwen-Image, Wan (14B and 1.3B) and Qwen3.
    {"function": "prepare_joint_qkv", "heads": [24, 24], **_FLUX},
    {"function": "prepare_qkv", "heads": [24, 24], **_FLUX, "inplace": True},
    {"function": "prepare_joint_qkv", "heads": [24, 24], **_QWEN_IMAGE},
    {"function": "prepare_qkv", "heads": [[40, 40], [12, 12]], **_WAN},
    {"function": "prepare_qkv", "heads": [32, 8], "norm": _TWICE, "backward": True},
    {"heads": [[12], [40]], "interleaved": True},
    # Megatron, TransformerEngine: q, then k.
    {"heads": [[8], [32]], "table": "freqs", "width": "full", "positions": [None, _PACKED], "backward": True},
    {"heads": 16, "head_dim": [80, 64, 256]},  # vision towers, Gemma
]


def specs_of(**call: Any) -> list[Spec]:
    """The kernels of a call that is described in words. The call is made on aligned meta tensors (`jitrope.planning`).

    Both launches are planned, and with backward those of the gradient too. All other words are passed to the function
    as keywords, and the function refuses wrong ones.

    >>> [spec.launch for spec in prewarm.specs_of(heads=[32, 8])]
    ['token_linear', 'grid_2d']

    Args:
        function: "apply_rope", the default, "prepare_qkv", "prepare_packed_qkv", "prepare_joint_qkv" or
            "prepare_mla_qkv", which has rotary_dim too, and v_dim, by default head_dim - rotary_dim.
        heads: those of q and k, as [32, 8], or of q alone, as 24. v has as many as k, or v_heads.
        head_dim, dtype, batch: those of q and k. The defaults are 128, "bf16" and 1; dtype is "fp32", "fp16" or "bf16".
        table: "cos_sin", "freqs", "cos_sin_cache" or "freqs_cis". table_dtype: its dtype, by default "fp32"; for
            freqs_cis, the dtype of the real part. width: "half" or "full". two_tables: prepare_joint_qkv gets a table
            for each stream.
        positions: the dtype of a tensor of ids, or a dict of words of `Packed`, `Mrope`, `Starts`, or with "shifts"
            `Shifts`. norm, cache, quantize: dicts of words of `Norm`, `KVCache` and `Quantize`, or without scales of
            `DynamicQuantize`. Write a tensor as its dtype, as in {"cu_seqlens": "int32"}. A dtype of quantize is "fp8",
            "fp8_e5m2", "int8" or "fp4", a scale_dtype "fp32", "e8m0" or "fp8", a scale_fmt "ue8m0".
            page_size, in cache: the rows of a page, if the pages are not neighbours in memory. group, in cache: the
            elements with one block scale, by default 16. Without a v_cache there is no v.
        bias: True: prepare_packed_qkv also gets the projection's bias.
        backward: plan the gradient of q, k and v too.

    Returns:
        The specs, each once.

    Raises:
        InvalidInput: the function does not take such a call.
    """
    return list(dict.fromkeys(specs_of_each(call)))


def architecture(text: Any) -> str | None:
    """An architecture as NVRTC names it: "sm_90" for sm_90, sm90, 90 and 9.0. None if the text names none."""
    match = _ARCH.fullmatch(text) if isinstance(text, str) else None
    return "sm_" + "".join(part or "" for part in match.groups()) if match else None


def default_specs() -> list[Spec]:
    """The kernels of `DEFAULT_CALLS`, each once.

    >>> len(prewarm.default_specs()) > 50
    True
    """
    return list(dict.fromkeys(spec for call in DEFAULT_CALLS for spec in specs_of_each(call)))


def _specs(described: Mapping[str, Any]) -> list[Spec]:
    with torch.inference_mode(False), torch.enable_grad(), planning() as specs:
        try:
            Described(**described).make()
        except (TypeError, RuntimeError) as error:  # an unknown word, sizes that torch does not take
            raise InvalidInput(str(error).splitlines()[0]) from error
    return specs


def read_calls(path: Path) -> list[Spec]:
    """The kernels that a file describes, each once.

    The file is TOML or JSON with one or both of two lists. `call`: calls in the words of `specs_of`, where a list of
    values means a call with each of them; a list of numbers is one value of heads, [32, 8]. `spec`: whole specs, as
    `jitrope.record` writes them and `jitrope cache ls --json` prints them. The latter has `entries` too; then specs of
    another version are left out, and the log gives their number.

    >>> _ = Path("calls.json").write_text('{"call": [{"heads": [32, 8]}]}')
    >>> specs = prewarm.read_calls(Path("calls.json"))

    Raises:
        InvalidInput: the file cannot be read, or a call or a spec in it is wrong.
    """
    path = arguments.path("read_calls", "path", path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise InvalidInput(f"cannot read {path}: {error}") from error
    if not text.strip():  # an empty recording
        return []
    try:
        is_json = path.suffix == ".json" or text.lstrip().startswith("{")  # no TOML starts with a brace
        data = json.loads(text) if is_json else _toml(text)
        if not isinstance(data, dict) or not data.keys() & {"call", "spec"}:
            raise InvalidInput("it has neither a `call` nor a `spec` list")
        calls, whole = (arguments.items("read_calls", x, data.get(x, ()), "a list") for x in ("call", "spec"))
        specs: list[Spec] = [spec for some in _each("call", calls, specs_of_each) for spec in some]
        specs += filter(None, this_versions(whole)) if "entries" in data else _each("spec", whole, spec_from_dict)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{path}: {error}") from error
    return list(dict.fromkeys(specs))


def _each(kind: str, items: Iterable[Any], read: Callable[[Any], Any]) -> Iterator[Any]:
    """Read each item. A wrong item is an error that names it, because without it a kernel would be missing later."""
    for i, item in enumerate(items):
        try:
            yield read(item)
        except (TypeError, ValueError) as error:
            raise InvalidInput(f"{kind}[{i}]: {error}") from error


def this_versions(listed: Iterable[dict[str, Any]]) -> list[Spec | None]:
    """The specs of a cache's entries, with None for an entry of another version. The log gives the number of these."""
    specs: list[Spec | None] = []
    for described in listed:
        try:
            specs.append(spec_from_dict(described))
        except InvalidInput:
            specs.append(None)
    if others := specs.count(None):
        log.warning("%d of the cache's %d kernels are another version's and are left out", others, len(specs))
    return specs


def specs_of_each(described: Any) -> list[Spec]:
    """The kernels of a call in which a list of values means a call with each of them."""
    if not isinstance(described, Mapping) or "heads" not in described:
        raise InvalidInput(f"a call must be a table of words with heads, not {arguments.shown(described)}")
    axes = []
    for name, value in described.items():
        several = isinstance(value, list) and (name != "heads" or any(isinstance(item, list) for item in value))
        if several and not value:
            arguments.refuse("call", name, value, "a value, or a list of values")
        axes.append(value if several else [value])
    return [spec for values in itertools.product(*axes) for spec in _specs(dict(zip(described, values)))]


def _toml(text: str) -> Any:
    try:
        import tomllib
    except ImportError as error:  # Python 3.10
        raise InvalidInput("TOML needs Python 3.11; write the same as JSON") from error
    return tomllib.loads(text)


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
        specs: the results of `specs_of`, `jitrope.planning`, `read_calls` or `jitrope.record`.
        archs: architectures, such as "sm_90" or "9.0".
        jobs: the number of kernels that are compiled at a time.

    Returns:
        The result for each kernel, in order.

    Raises:
        InvalidInput: an argument is of another kind.
    """

    def kept(spec: Spec, arch: str) -> Built:
        found = kernels.build(spec, arch)
        if not found.kept:
            return Built(spec, arch, "the kernel cache cannot be written", failed=True)
        return Built(spec, arch, "compiled" if found.compiled else "cached")

    specs = arguments.items("prewarm", "specs", specs, "a list of specs")
    archs = arguments.items("prewarm", "archs", archs, "a list of architectures")
    return build_each("prewarm", itertools.product(specs, archs), jobs, kept)


def reasons(failed: Iterable[Built]) -> list[str]:
    """A line for each reason of failures, with the first kernel that has it and the number of the others."""
    alike: dict[str, list[Built]] = {}
    for item in failed:
        alike.setdefault(item.outcome, []).append(item)
    lines = []
    for reason, items in alike.items():
        more = f" and {len(items) - 1} more" if items[1:] else ""
        lines.append(f"{items[0].spec.name} {items[0].arch}{more}: {reason}")
    return lines


def build_each(
    function: str, work: Iterable[tuple[Any, Any]], jobs: int, build: Callable[[Spec, str], Built]
) -> list[Built]:
    """Build each (spec, architecture) once, some at a time. An error of jitrope's becomes a failed result."""
    wanted: dict[tuple[Spec, str], None] = {}
    for spec, given in work:
        arch = architecture(given)
        if not isinstance(spec, Spec):
            arguments.refuse(function, "specs", spec, "specs from specs_of, planning, read_calls or record")
        if arch is None:
            arguments.refuse(function, "archs", given, "architectures such as 'sm_90'")
        wanted[spec, arch] = None

    def one(kernel: tuple[Spec, str]) -> Built:
        try:
            return build(*kernel)
        except JitropeError as error:
            return Built(*kernel, str(error), failed=True)

    with ThreadPoolExecutor(max(1, arguments.whole(function, "jobs", jobs, 0))) as pool:  # NVRTC releases the GIL
        return list(pool.map(one, wanted))
