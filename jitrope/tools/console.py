"""What the commands share: output (results on stdout, messages on stderr), and building kernels."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..base import config
from ..base.errors import JitropeError
from ..base.spec import Spec
from ..jit import kernels
from ..jit.entry import Entry
from .prewarm import Built, refused

UNITS = {"d": 86400, "h": 3600, "m": 60}


def printable(text: object) -> str:
    """Text without commands to the terminal, which a file's name or its content may hold."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in str(text))


def say(text: object) -> None:
    """Print a line on stderr."""
    print(printable(text), file=sys.stderr)


def answer(as_json: bool, data: Any, text: object) -> None:
    """Print a result on stdout: the data as JSON, or the text."""
    print(json.dumps(data, indent=1, default=str) if as_json else printable(text), flush=True)


def size_text(count: float) -> str:
    """Bytes for a reader."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB"):
        if count >= 1024:
            count, unit = count / 1024, larger
    return f"{count:.{int(count < 10 and unit != 'B')}f} {unit}"


def age_text(written: float) -> str:
    """How long ago a time was, in the largest whole unit; "" if it is unknown."""
    seconds = max(0, int(time.time() - written))
    return next((f"{seconds // n}{unit}" for unit, n in UNITS.items() if seconds >= n), "now") if written else ""


def rows(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Kernels for JSON."""
    return [{"name": e.name, "arch": e.arch, "bytes": e.size, "path": e.path} for e in entries]


def print_entries(entries: Sequence[Entry], where: object, as_json: bool) -> None:
    """Print kernels: as a file for `prewarm --from`, as a table, or off a terminal a line each with tabs between."""
    if as_json:
        specs = list({json.dumps(entry.spec): entry.spec for entry in entries}.values())
        return answer(True, {"spec": specs, "entries": rows(entries)}, "")
    for e in entries:
        if sys.stdout.isatty():
            print(f"{size_text(e.size):>8} {age_text(e.written):>5} {e.arch:7} {e.name}")
        else:
            print(e.name, e.arch, e.size, e.path, sep="\t")
    say(f"{total(entries)} in {where}")


def total(entries: Sequence[Entry]) -> str:
    """The number of some kernels, and their bytes."""
    return f"{len(entries)} kernel{'s' * (len(entries) != 1)}, {size_text(sum(entry.size for entry in entries))}"


# ---- building ------------------------------------------------------------------------------------


def architectures(given: list[str] | None) -> list[str]:
    """Those of `--arch`, or those of this machine's GPUs."""
    local = {kernels.arch_of(i) for i in range(torch.cuda.device_count())} if torch.cuda.is_available() else set()
    if not given and not local:
        raise JitropeError("there is no GPU here; name the architectures to build for, as --arch sm_80,sm_90")
    return given or sorted(local)


Work = Sequence[tuple[Spec, str]]


def build_all(
    work: Work, dry_run: bool, as_json: bool, build: Callable[[Callable[[Built], None]], list[Built]]
) -> bool:
    """Build kernels, or say what would be built, and report. False unless every kernel is there or would be."""
    config.configure(compile=True)  # the user asks for it, whatever the environment says
    built = [_would_build(*kernel) for kernel in work] if dry_run else build(_progress(len(work)))
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


def _progress(steps: int) -> Callable[[Built], None]:
    """To be called after each step: counts them on stderr, if that is a terminal."""
    numbers = itertools.count(1)

    def step(_: Built) -> None:
        number = next(numbers)
        if sys.stderr.isatty():
            print(f"\rcompiling {number}/{steps}", end="\n" * (number == steps), file=sys.stderr, flush=True)

    return step


def _would_build(spec: Spec, arch: str) -> Built:
    """What building a kernel would do: it looks into the same caches and asks the same compiler."""
    try:
        if kernels.is_cached(spec, arch):
            return Built(spec, arch, "cached")
        reason = refused(arch)
    except JitropeError as error:
        reason = str(error)
    return Built(spec, arch, reason or "would compile", failed=bool(reason))
