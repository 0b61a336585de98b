"""What the commands share: output (results on stdout, messages on stderr), options, and building kernels."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from ..base import config
from ..base.errors import JitropeError

JSON = Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of text.")]
DRY_RUN = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and change nothing.")]
ARCH = Annotated[str, typer.Option(help="Architectures, as sm_80,sm_90; default: this machine's GPUs.")]
JOBS = Annotated[int, typer.Option(min=0, help="How many kernels to compile at a time; 0: one per core.")]

out, err = Console(), Console(stderr=True)


def examples(*lines: str) -> str:
    """The last lines of a help text; each is a paragraph, because others are joined."""
    return "\n\n".join(["Examples:", *map(escape, lines)])


# ---- output --------------------------------------------------------------------------------------


def printable(text: object) -> str:
    """Text without commands to the terminal, which a file's name or its content may hold."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in str(text))


def say(word: str, text: object) -> None:
    """Print a line on stderr. The text is not markup, so `jitrope[cuda13]` keeps its brackets."""
    err.print(f"[red]{word}[/red] {escape(printable(text))}", highlight=False, soft_wrap=True)


def tell(text: object) -> None:
    """Print a line on stdout."""
    out.print(escape(str(text)), highlight=False, soft_wrap=True)


def remark(text: object) -> None:
    """Print a line on stderr that is no error."""
    err.print(escape(str(text)), highlight=False, soft_wrap=True)


def print_json(data: Any) -> None:
    """Print JSON on stdout, whatever the terminal."""
    print(json.dumps(data, indent=1, default=str))


def size_text(count: float) -> str:
    """Bytes for a reader."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 10 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


UNITS = {"d": 86400, "h": 3600, "m": 60}


def age_text(written: float) -> str:
    """How long ago a time was, in the largest whole unit; "" if it is unknown."""
    if not written:
        return ""
    seconds = max(0, int(time.time() - written))
    return next((f"{seconds // length}{unit}" for unit, length in UNITS.items() if seconds >= length), "now")


def seconds_of(text: str) -> float:
    """The seconds of an age such as 30d, 12h or 45m."""
    match = re.fullmatch(r"(\d{1,6})([dhm])", text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is not an age; use days, hours or minutes, as 30d, 12h or 45m")
    return float(match[1]) * UNITS[match[2]]


def total(entries: Sequence[Any]) -> str:
    """The number of some kernels, and their bytes."""
    return f"{len(entries)} kernel{'s' * (len(entries) != 1)}, {size_text(sum(entry.size for entry in entries))}"


def rows(entries: Sequence[Any]) -> list[dict[str, Any]]:
    """Kernels for JSON."""
    return [{"name": e.name, "arch": e.arch, "bytes": e.size, "path": e.path} for e in entries]


def print_entries(entries: Sequence[Any], where: object, as_json: bool) -> None:
    """Print kernels: as a file for `prewarm --from`, as a table, or off a terminal a line each with tabs between."""
    if as_json:
        specs = list({json.dumps(entry.spec): entry.spec for entry in entries}.values())
        print_json({"spec": specs, "entries": rows(entries)})
        return
    table = Table("kernel", "arch", "size", "written", box=None, pad_edge=False)
    table.columns[0].overflow = "fold"
    for column in table.columns[1:]:
        column.no_wrap = True
    for entry in entries:
        table.add_row(entry.name, entry.arch, size_text(entry.size), age_text(entry.written))
        if not out.is_terminal:
            print(entry.name, entry.arch, entry.size, entry.path, sep="\t")
    if out.is_terminal:
        out.print(table)
    remark(f"{total(entries)} in {where}")


@contextmanager
def progress(what: str, steps: int) -> Iterator[Callable[[Any], None]]:
    """A bar on stderr, if that is a terminal; call the result after each step."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("", total=steps)
        yield lambda _: bar.advance(task)


# ---- building ------------------------------------------------------------------------------------


def architectures(text: str) -> list[str]:
    """The architectures of `--arch`, or those of this machine's GPUs."""
    import torch

    from ..jit.kernels import arch_of
    from .prewarm import ARCH as PATTERN

    given = [name for name in text.replace(" ", "").split(",") if name]
    if wrong := [name for name in given if not PATTERN.fullmatch(name)]:
        raise typer.BadParameter(f"--arch must be architectures, as sm_80,sm_90, not {', '.join(wrong)}")
    local = {arch_of(i) for i in range(torch.cuda.device_count())} if torch.cuda.is_available() else set()
    if not given and not local:
        raise JitropeError("there is no GPU here; name the architectures to build for, as --arch sm_80,sm_90")
    return list(dict.fromkeys(given)) or sorted(local)


def build_all(
    kernels: Sequence[tuple[Any, str]], dry_run: bool, as_json: bool, build: Callable[[Any], list[Any]]
) -> None:
    """Build kernels, or say what would be built, and report; exit code 1 unless every kernel is there or would be."""
    config.configure(compile=True)  # the user asks for it, whatever the environment says
    with progress("compiling", len(kernels)) as step:
        built = [_would_build(*kernel) for kernel in kernels] if dry_run else build(step)
    failed = [item for item in built if item.failed]
    words = ("would compile", "cached") if dry_run else ("compiled", "cached")
    counts = {word: sum(item.outcome == word for item in built) for word in words} | {"failed": len(failed)}
    if as_json:
        each = [{"name": b.spec.name, "arch": b.arch, "outcome": b.outcome, "failed": b.failed} for b in built]
        print_json({**counts, "kernels": each})
    else:
        tell(", ".join(f"{count} {word}" for word, count in counts.items()))
    for item in failed:
        say("failed", f"{item.spec.name} {item.arch}: {item.outcome}")
    if not built:
        say("error:", "there was nothing to build")
    if failed or not built:
        raise typer.Exit(1)


def _would_build(spec: Any, arch: str) -> Any:
    """What building a kernel would do: it looks into the same caches and asks the same compiler."""
    from ..jit import kernels
    from .prewarm import Built, refused

    try:
        if kernels.is_cached(spec, arch):
            return Built(spec, arch, "cached")
        reason = refused(arch)
    except JitropeError as error:
        reason = str(error)
    return Built(spec, arch, reason or "would compile", failed=bool(reason))
