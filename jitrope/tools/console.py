"""Functions that several commands use: printing (results on stdout, messages on stderr) and building kernels."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..base import config
from ..base.errors import JitropeError
from ..base.spec import Spec
from ..jit import compiler, kernels
from ..jit.entry import Entry
from .prewarm import Built


def printable(text: object) -> str:
    """Text without control sequences of a terminal, which the name or the content of a file may hold."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in str(text))


def say(text: object) -> None:
    """Print a line on stderr."""
    print(printable(text), file=sys.stderr)


def answer(as_json: bool, data: Any, text: object) -> None:
    """Print a result on stdout: the data as JSON, or the text."""
    print(json.dumps(data, indent=1, default=str) if as_json else printable(text), flush=True)


def rows(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Kernels for JSON."""
    return [{"name": e.name, "arch": e.arch, "bytes": e.size, "path": e.path} for e in entries]


def print_entries(entries: Sequence[Entry], where: object, as_json: bool) -> None:
    """Print kernels as JSON, which `prewarm --from` reads, or a line for each with tabs between the columns."""
    if as_json:
        specs = list({json.dumps(entry.spec): entry.spec for entry in entries}.values())
        return answer(True, {"spec": specs, "entries": rows(entries)}, "")
    for e in entries:
        answer(False, None, f"{e.name}\t{e.arch}\t{e.size}\t{e.path}")
    say(f"{total(entries)} in {where}")


def total(entries: Sequence[Entry]) -> str:
    """The number of kernels and their bytes."""
    size = sum(entry.size for entry in entries)
    return f"{len(entries)} kernel{'s' * (len(entries) != 1)}, {size / 2**20:.1f} MiB"


# ---- building ------------------------------------------------------------------------------------


def architectures(given: list[str] | None) -> list[str]:
    """The architectures of `--arch`, or those of this machine's GPUs."""
    local = {kernels.arch_of(i) for i in range(torch.cuda.device_count())} if torch.cuda.is_available() else set()
    if not given and not local:
        raise JitropeError("there is no GPU here; name the architectures to build for, as --arch sm_80,sm_90")
    return given or sorted(local)


def build_all(work: Sequence[tuple[Spec, str]], dry_run: bool, as_json: bool, build: Callable[[], list[Built]]) -> bool:
    """Build kernels, or find out which would be built, and print the results. False if one failed or there are none."""
    config.configure(compile=True)  # the command asks for it, so the environment does not matter
    built = [_would_build(*kernel) for kernel in work] if dry_run else build()
    failed = [item for item in built if item.failed]
    words = ("would compile" if dry_run else "compiled", "cached")
    counts = {word: sum(item.outcome == word for item in built) for word in words} | {"failed": len(failed)}
    each = [{"name": b.spec.name, "arch": b.arch, "outcome": b.outcome, "failed": b.failed} for b in built]
    answer(as_json, {**counts, "kernels": each}, ", ".join(f"{count} {word}" for word, count in counts.items()))
    for item in failed:
        say(f"failed: {item.spec.name} {item.arch}: {item.outcome}")
    if not built:
        say("error: there was nothing to build")
    return bool(built) and not failed


def _would_build(spec: Spec, arch: str) -> Built:
    """The result of building a kernel, found without building it."""
    try:
        if kernels.kernel_cache().holds(kernels.key_of(spec, arch)):
            return Built(spec, arch, "cached")
        fault = compiler.unsupported(arch, compiler.supported_archs(), compiler.nvrtc_version())
    except JitropeError as error:
        return Built(spec, arch, str(error), failed=True)
    return Built(spec, arch, "; ".join(fault) if fault else "would compile", failed=fault is not None)
