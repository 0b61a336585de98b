"""Functions for several commands: printing (results on stdout, messages on stderr) and building kernels."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ..base import config
from ..base.errors import CompileError, JitropeError
from ..base.spec import Spec
from ..jit import compiler, kernels
from ..jit.entry import Entry
from .listing import each_in_words, listed, rows, table
from .prewarm import Built, reasons

Work = Sequence[tuple[Spec, str]]
"""(spec, architecture) of each kernel."""


def printable(text: object) -> str:
    """Text without terminal control sequences, which the name or the content of a file may contain."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in str(text))


def say(text: object) -> None:
    """Print a line on stderr."""
    print(printable(text), file=sys.stderr)


def answer(as_json: bool, data: Any, text: object) -> None:
    """Print a result on stdout: the data as JSON, or the text."""
    print(json.dumps(data, indent=1, default=str) if as_json else printable(text), flush=True)


def print_entries(entries: Sequence[Entry], where: object, as_json: bool) -> None:
    """Print kernels as JSON, which `prewarm --from` reads, or as a table."""
    if as_json:
        specs = list({json.dumps(entry.spec): entry.spec for entry in entries}.values())
        return answer(True, {"spec": specs, "entries": rows(entries)}, "")
    if entries:
        answer(False, None, listed(entries))
    say(f"{total(entries)} in {where}")


def total(entries: Sequence[Entry]) -> str:
    """The number of kernels and their bytes."""
    size = sum(entry.size for entry in entries)
    return f"{len(entries)} kernel{'s' * (len(entries) != 1)}, {size / 2**20:.1f} MiB"


# ---- building ------------------------------------------------------------------------------------


def architectures(given: list[str] | None) -> list[str]:
    """The architectures of `--arch`, or those of this machine's GPUs."""
    local = sorted(set(kernels.local_archs()))
    if not given and not local:
        raise JitropeError("there is no GPU here; name the architectures to build for, as --arch sm_80,sm_90")
    return given or local


def build_all(work: Work, dry_run: bool, as_json: bool, build: Callable[[], list[Built]]) -> bool:
    """Build kernels, or with dry_run only list them, and print the results. False if one failed or there are none.

    Without CuPy a dry run does not read the cache, because CuPy's version is part of a kernel's key.

    Raises:
        JitropeError: NVRTC does not know an architecture, and not all of its kernels are cached. Nothing is built.
    """
    config.configure(compile=True)  # the user requests it, so ignore the environment
    _check_architectures(work)
    note = _cache_not_read() if dry_run else {}
    would_build = functools.partial(Built, outcome="would compile") if note else _would_build
    built = [would_build(*kernel) for kernel in work] if dry_run else build()
    failed = [item for item in built if item.failed]
    outcomes, words = ("would compile" if dry_run else "compiled", "cached"), each_in_words([b.spec for b in built])
    counts = {word: sum(item.outcome == word for item in built) for word in outcomes} | {"failed": len(failed)}
    each = [
        {"name": b.spec.name, "kernel": kernel, "arch": b.arch, "outcome": b.outcome, "failed": b.failed}
        for b, kernel in zip(built, words)
    ]
    empty = {} if built else {"error": "there was nothing to build"}
    lines = [(b.outcome, b.arch, kernel) for b, kernel in zip(built, words) if dry_run and not b.failed]
    text = [table(("STATE", "ARCH", "KERNEL"), lines)] * bool(lines)
    text.append(", ".join(f"{count} {word}" for word, count in counts.items()))
    answer(as_json, {**counts, "kernels": each, **empty, **note}, "\n".join(text))
    for reason in reasons(failed):
        say(f"failed: {reason}")
    if not built:
        say("error: there was nothing to build")
    if note:
        say(f"note: {note['note']}")
    return bool(built) and not failed


def _cache_not_read() -> dict[str, str]:
    """{"note": the reason why a dry run does not read the cache, with the remedy}, or {}."""
    try:
        compiler.import_cupy()
    except CompileError as error:
        return {"note": f"the cache was not read: {error}"}
    return {}


def _check_architectures(work: Work) -> None:
    """Raise JitropeError for an architecture that this NVRTC does not know, unless its kernels are all cached."""
    try:
        known, (major, minor) = compiler.supported_archs(), compiler.nvrtc_version()
    except CompileError:
        return  # without NVRTC, each uncached kernel fails with this reason
    for arch in dict.fromkeys(arch for _, arch in work):
        if compiler.unsupported(arch, known, (major, minor)) and not all(_cached(*k) for k in work if k[1] == arch):
            numbers = ", ".join(known).replace(", sm_", ", ")
            raise JitropeError(f"NVRTC {major}.{minor} does not know {arch}; it knows {numbers}")


def _cached(spec: Spec, arch: str) -> bool:
    return kernels.kernel_cache().holds(kernels.key_of(spec, arch))


def _would_build(spec: Spec, arch: str) -> Built:
    """The result that building a kernel would have, without building it."""
    try:
        if _cached(spec, arch):
            return Built(spec, arch, "cached")
        compiler.supported_archs()  # raises if there is no NVRTC
    except JitropeError as error:
        return Built(spec, arch, str(error), failed=True)
    return Built(spec, arch, "would compile")
