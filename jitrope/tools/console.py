"""Functions for several commands: printing (results on stdout, messages on stderr), kernels as text, and building."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..base import config
from ..base.errors import CacheError, CompileError, InvalidInput, JitropeError
from ..base.spec import Spec
from ..jit import compiler, kernels
from ..jit.entry import NAME, Entry
from ..jit.registry import spec_from_dict
from .prewarm import Built, reasons

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


# ---- kernels as text -----------------------------------------------------------------------------


def each_in_words(specs: Sequence[Spec]) -> list[str]:
    """Kernels in the words of their names. If several have one name, their different fields are added."""
    alike: dict[str, dict[Spec, None]] = {}
    for spec in specs:
        alike.setdefault(spec.name.replace("_", " "), {})[spec] = None
    found = {spec: ", ".join([words, *_differences(spec, group)]) for words, group in alike.items() for spec in group}
    return [found[spec] for spec in specs]


def _differences(spec: Spec, others: Iterable[Spec]) -> list[str]:
    rows = [other.to_dict() for other in others]
    fields = {n: v for n, v in spec.to_dict().items() if v is not False and any(row.get(n) != v for row in rows)}
    return [name if value is True else f"{name} {value}" for name, value in fields.items()]


def kernels_of(entries: Sequence[Entry]) -> list[str]:
    """Cached kernels in words. For a kernel of another version only the name is known."""
    specs: list[Spec | None] = []
    for entry in entries:
        try:
            specs.append(spec_from_dict(entry.spec))
        except InvalidInput:
            specs.append(None)
    words = iter(each_in_words([spec for spec in specs if spec is not None]))
    return [f"{e.name} (of another version)" if spec is None else next(words) for e, spec in zip(entries, specs)]


def keys(entries: Sequence[Entry]) -> list[str]:
    """A short key of each kernel: the start of its hash, with the compiler's hash if several have this start."""
    short = [_hashes(entry)[0][:8] for entry in entries]
    count = Counter(short)
    return [key if count[key] == 1 else f"{key}-{_hashes(entry)[1]}" for key, entry in zip(short, entries)]


def _hashes(entry: Entry) -> tuple[str, str]:
    match = NAME.fullmatch(entry.path.name)
    return (match["source"], match["tag"]) if match else (entry.path.name, "")


def find(entries: Sequence[Entry], key: str) -> Entry:
    """The kernel with a key, or with the start of one. Raises CacheError if there is none or several."""
    ids = [f"{short}\n{'-'.join(_hashes(entry))}\n{entry.path.name}" for short, entry in zip(keys(entries), entries)]
    found = [entry for entry, names in zip(entries, ids) if any(name.startswith(key) for name in names.split("\n"))]
    if len(found) != 1:
        fault = f"{key!r} is the start of {len(found)} keys" if found else f"no kernel here has the key {key!r}"
        raise CacheError(f"{fault}; `jitrope cache ls` lists the keys")
    return found[0]


def size(count: int) -> str:
    """A number of bytes as text."""
    return f"{count / 2**10:.0f} KiB"


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table with a header. The last column is a `paragraph`."""
    if not lines:
        return ""
    widths = [max(len(line[i]) for line in (head, *lines)) + 2 for i in range(len(head) - 1)]
    text = []
    for *cells, last in (head, *lines):
        text += paragraph("".join(cell.ljust(width) for cell, width in zip(cells, widths)), last)
    return "\n".join(text)


def paragraph(start: str, text: str) -> list[str]:
    """The lines of a text after a start. On a terminal they are wrapped to its width; elsewhere it is one line."""
    room = shutil.get_terminal_size().columns - len(start) if sys.stdout and sys.stdout.isatty() else 0
    lines = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) if room >= 20 else [text]
    return [start + (lines or [""])[0], *(" " * len(start) + line for line in lines[1:])]


def rows(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Kernels for JSON."""
    named = zip(keys(entries), entries)
    return [{"key": key, "name": e.name, "arch": e.arch, "bytes": e.size, "path": e.path} for key, e in named]


def listed(entries: Sequence[Entry]) -> str:
    """Kernels as a table."""
    named = zip(keys(entries), entries, kernels_of(entries))
    lines = [(key, entry.arch, size(entry.size), words) for key, entry, words in named]
    return table(("KEY", "ARCH", "SIZE", "KERNEL"), lines)


def details(entries: Sequence[Entry], key: str) -> tuple[dict[str, Any], str]:
    """All details of one kernel, as JSON for `jitrope render --from`, and as text."""
    entry = find(entries, key)
    at = entries.index(entry)
    key, words, row = keys(entries)[at], kernels_of(entries)[at], rows(entries)[at]
    again = f"jitrope cache info {key} --json | jitrope render --from /dev/stdin"
    options, compiler = entry.meta.get("options", ()), entry.meta.get("compiler", "")
    more = {"kernel": words, "options": options, "compiler": compiler, "files": entry.files}
    named = {
        "key": key,
        "kernel": words,
        "name": entry.name,
        "architecture": entry.arch,
        "options": " ".join(map(str, options)),
        "compiler": compiler,
        "folder": entry.path,
        "files": ", ".join(f"{name} {size(count)}" for name, count in entry.files.items()),
        "render again": again,
    }
    fields = [f"  {name:23}{json.dumps(value)}" for name, value in entry.spec.items()]
    lines = [f"{name:14}{value}" for name, value in named.items()]
    return {**row, **more, "spec": [entry.spec], "render": again}, "\n".join([*lines, "spec", *fields])


# ---- building ------------------------------------------------------------------------------------


def architectures(given: list[str] | None) -> list[str]:
    """The architectures of `--arch`, or those of this machine's GPUs."""
    local = sorted(set(kernels.local_archs()))
    if not given and not local:
        raise JitropeError("there is no GPU here; name the architectures to build for, as --arch sm_80,sm_90")
    return given or local


def build_all(work: Work, dry_run: bool, as_json: bool, build: Callable[[], list[Built]]) -> bool:
    """Build kernels, or with dry_run only list them, and print the results. False if one failed or there are none.

    Before any is built, this raises JitropeError if NVRTC does not know an architecture, and not all of its kernels are
    cached.
    """
    config.configure(compile=True)  # the user requests it, so ignore the environment
    _check_architectures(work)
    built = [_would_build(*kernel) for kernel in work] if dry_run else build()
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
    answer(as_json, {**counts, "kernels": each, **empty}, "\n".join(text))
    for reason in reasons(failed):
        say(f"failed: {reason}")
    if not built:
        say("error: there was nothing to build")
    return bool(built) and not failed


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
        return Built(spec, arch, "cached" if _cached(spec, arch) else "would compile")
    except JitropeError as error:
        return Built(spec, arch, str(error), failed=True)
