"""Find the kernels that a program will need and build them ahead of time. No GPU is needed.

>>> specs = prewarm.specs_of(heads=[32, 8])  # rope of 32 heads of q and 8 of k, bf16
>>> results = prewarm.prewarm(specs, ["sm_80", "sm_90"], jobs=2)
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..api import apply_rope
from ..base import arguments
from ..base.config import log
from ..base.errors import InvalidInput, JitropeError
from ..base.spec import DTYPES, Spec, spec_from_dict
from ..jit import kernels
from ..ops.planning import planning
from ..plan.views import DTYPE_NAMES
from ..thd import spec as _  # noqa: F401  (adds its kinds of specs to the registry)

__all__ = ["Built", "prewarm", "read_record", "specs_of"]

TORCH_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items() if name in DTYPES}

_ARCH = re.compile(r"(?:sm_?)?([1-9]\d*)|([1-9]\d*)\.(\d)")
"""Ways to write an architecture, without "a" or "f", as a GPU looks for it. The compiler checks that it exists."""

_TOKENS = 4096  # no kernel depends on their number


def specs_of(
    heads: Any,
    head_dim: int = 128,
    dtype: str = "bf16",
    *,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    width: str = "half",
    inplace: bool = False,
    backward: bool = False,
) -> list[Spec]:
    """The kernels of `apply_rope` for contiguous q and k (B, S, H, D) and fp32 cos and sin, for both launches.

    The call is made on meta tensors. For any other call use `jitrope.planning` or `jitrope.record`.

    >>> [spec.launch for spec in prewarm.specs_of(heads=[32, 8])]
    ['token_linear', 'grid_2d']

    Args:
        heads: those of q and k, as [32, 8], or of q alone, as 24.
        head_dim, dtype: the elements of a head; "fp32", "fp16" or "bf16".
        interleaved, rotary_dim, inplace: the words of `apply_rope`.
        width: of cos and sin, "half" or "full".
        backward: plan the gradient of q and k too.

    Returns:
        The specs, each once.

    Raises:
        InvalidInput: an argument is wrong, or the function does not take such a call.
    """
    name = "specs_of"
    counts = arguments.wholes(name, "heads", heads if hasattr(heads, "__len__") else [heads], 1)
    if not 1 <= len(counts) <= 2:
        arguments.refuse(name, "heads", heads, "those of q and k, as [32, 8], or of q alone")
    size = arguments.whole(name, "head_dim", head_dim, 1)
    kind = TORCH_DTYPES[arguments.word(name, "dtype", dtype, DTYPES)]
    rotated = size if rotary_dim is None else arguments.whole(name, "rotary_dim", rotary_dim, 0)
    columns = rotated // (1 if arguments.word(name, "width", width, ("half", "full")) == "full" else 2)
    backward, inplace = arguments.flag(name, "backward", backward), arguments.flag(name, "inplace", inplace)
    empty = partial(torch.empty, device="meta")
    with torch.inference_mode(False), torch.enable_grad(), planning() as specs:
        try:
            leaves = [empty(1, _TOKENS, n, size, dtype=kind, requires_grad=backward) for n in counts]
        except RuntimeError as error:  # sizes that torch does not take
            raise InvalidInput(f"{name}: heads are too many: {str(error).splitlines()[0]}") from error
        q, *ks = (x.clone() if inplace else x for x in leaves)  # torch does not write into leaves
        k, (cos, sin) = ks[0] if ks else None, empty(2, _TOKENS, columns, dtype=torch.float32)
        out = apply_rope(q, k, cos, sin, interleaved=interleaved, rotary_dim=rotated, inplace=inplace)
        if backward:
            results = [x for x in out if x is not None]
            torch.autograd.grad(results, leaves, [torch.empty_like(x) for x in results])
    return specs


def architecture(text: Any) -> str | None:
    """An architecture as NVRTC names it: "sm_90" for sm_90, sm90, 90 and 9.0. None if the text names none."""
    match = _ARCH.fullmatch(text) if isinstance(text, str) else None
    return "sm_" + "".join(part or "" for part in match.groups()) if match else None


def read_record(path: Path) -> list[Spec]:
    """The kernels in a file, each once.

    The file is JSON with a list `spec`, as `jitrope.record` writes it and `jitrope cache ls --json` prints it. The
    latter has `entries` too; then specs of another version are left out, and the log gives their number.

    >>> _ = Path("run.json").write_text('{"spec": []}')
    >>> prewarm.read_record(Path("run.json"))
    []

    Raises:
        InvalidInput: the file cannot be read, or a spec in it is wrong.
    """
    path = arguments.path("read_record", "path", path)
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig") or '{"spec": []}')  # an empty recording
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInput(f"cannot read {path}: {error}") from error
    if not isinstance(data, dict) or not isinstance(data.get("spec"), list):
        raise InvalidInput(f"{path} has no `spec` list")
    if "entries" in data:
        return [*dict(this_versions((item, "") for item in data["spec"]))]
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
