"""Functions for several commands: printing (results on stdout, messages on stderr), and building."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ..base import config
from ..base.errors import JitropeError
from ..base.spec import Spec, record_of
from ..jit import kernels
from ..jit.entry import Entry
from .prewarm import Built, build_each, reasons, this_versions

Work = Sequence[tuple[Spec, str]]  # (spec, architecture) of each kernel


def printable(text: object) -> str:
    """Text without terminal control sequences, which the name or the content of a file may contain."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in str(text))


def say(text: object) -> None:
    """Print a line on stderr."""
    print(printable(text), file=sys.stderr)


def answer(as_json: bool, data: Any, text: object) -> None:
    """Print a result on stdout: the data as JSON, or the text."""
    print(json.dumps(data, indent=1, default=str) if as_json else printable(text), flush=True)


def rows(some: Sequence[Entry]) -> list[dict[str, Any]]:
    """Kernels for JSON."""
    return [{"name": e.name, "arch": e.arch, "call": e.spec.get("call"), "bytes": e.size, "path": e.path} for e in some]


def total(entries: Sequence[Entry]) -> str:
    """The number of kernels and their bytes."""
    return f"{len(entries)} kernel{'s' * (len(entries) != 1)}, {sum(x.size for x in entries) / 2**20:.1f} MiB"


def print_entries(places: Sequence[tuple[object, Sequence[Entry]]], as_json: bool) -> None:
    """Print the kernels of folders and bundles as JSON, which `prewarm --from` reads, or one a line."""
    entries = [entry for _, some in places for entry in some]
    if as_json:
        specs = dict(this_versions((entry.spec, entry.arch) for entry in entries))
        return answer(True, {**record_of(specs), "entries": rows(entries)}, "")
    for place, some in places:
        for entry in some:
            answer(False, None, f"{entry.arch:8}{entry.size / 2**10:5.0f} KiB  {in_words(entry.name, entry.spec)}")
        say(f"{total(some)} in {place}")


def in_words(name: str, spec: dict[str, Any]) -> str:
    """A kernel's name, and the text of the call that built it."""
    return f"{name.replace('_', ' ')}: {spec.get('call', '')}".removesuffix(": ")


def architectures(given: list[str] | None) -> list[str]:
    """The architectures of `--arch`, or those of this machine's GPUs."""
    local = sorted(set(kernels.local_archs()))
    if not given and not local:
        raise JitropeError("there is no GPU here; name the architectures to build for, as --arch sm_80,sm_90")
    return given or local


def build_all(work: Work, dry_run: bool, as_json: bool, build: Callable[[], list[Built]]) -> bool:
    """Build kernels, or with dry_run only list them, and print the results. False if one failed or there are none."""
    config.configure(compile=True)  # the user requests it, so ignore the environment
    built = build_each("prewarm", work, 1, _would_build) if dry_run else build()
    failed = [item for item in built if item.failed]
    outcomes = ("would compile" if dry_run else "compiled", "cached")
    counts = {word: sum(item.outcome == word for item in built) for word in outcomes} | {"failed": len(failed)}
    each = [{"name": b.spec.name, "arch": b.arch, "outcome": b.outcome, "failed": b.failed} for b in built]
    good = [b for b in built if dry_run and not b.failed]
    lines = [f"{b.outcome:15}{b.arch:8}{in_words(b.spec.name, b.spec.to_dict())}" for b in good]
    lines.append(", ".join(f"{count} {word}" for word, count in counts.items()))
    answer(as_json, {**counts, "kernels": each}, "\n".join(lines))
    for reason in reasons(failed):
        say(f"failed: {reason}")
    if not built:
        say("error: there was nothing to build")
    return bool(built) and not failed


def _would_build(spec: Spec, arch: str) -> Built:
    """The result that building a kernel would have, without building it."""
    cached = kernels.kernel_cache().read(kernels.key_of(spec, arch))
    return Built(spec, arch, "cached" if cached else "would compile")
