"""The `jitrope` command: results on stdout, talk on stderr, an exit code that tells.

It is longer than other files because its options and their help are the interface.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from .. import __version__
from ..base import config
from ..base.errors import CacheError, InvalidInput, JitropeError
from ..base.spec import DTYPES, INDEX_DTYPES
from ..plan.spec import NORM_ROUNDINGS, ROUNDINGS

EXIT_CODES = "Exit codes: 0 done, 1 something failed, was damaged or missing, 2 wrong usage."


def _examples(*lines: str) -> str:
    """The last lines of a help text: each a paragraph, which is what keeps them apart."""
    return "\n\n".join(["Examples:", *map(escape, lines)])


app = typer.Typer(
    no_args_is_help=True,
    help="Rotary position embeddings, compiled on first call.",
    epilog=_examples("jitrope doctor", "jitrope prewarm --arch sm_90", "jitrope cache ls") + f"\n\n{EXIT_CODES}",
)
cache_app = typer.Typer(
    no_args_is_help=True,
    help="Look at the kernels on disk, check them, remove them.",
    epilog=_examples("jitrope cache ls", "jitrope cache verify --cold", "jitrope cache prune --max-size 200M"),
)
bundle_app = typer.Typer(
    no_args_is_help=True,
    help="Carry kernels to machines that cannot compile.",
    epilog=_examples("jitrope bundle write kernels.tar --arch sm_90", "jitrope bundle load kernels.tar"),
)
app.add_typer(cache_app, name="cache")
app.add_typer(bundle_app, name="bundle")
out, err = Console(), Console(stderr=True)


def _one_of(what: str, words: Sequence[str], more: str = "") -> Any:
    """An option that takes one of a few words, which its help names and a shell completes."""

    def complete(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return typer.Option(help=f"{what}: {', '.join(words[:-1])} or {words[-1]}{more}.", autocompletion=complete)


JSON = Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of tables.")]
DRY_RUN = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")]
ARCH = Annotated[str, typer.Option(help="Architectures, as sm_80,sm_90; default: this machine's GPUs.")]
JOBS = Annotated[int, typer.Option(min=0, help="Compiles at a time; 0: one a core.")]
HEADS = Annotated[list[str] | None, typer.Option("--heads", help="Heads of q and k, as 32,8, or of q alone, as 24.")]
HEAD_DIM = Annotated[list[int], typer.Option(help="Elements of a head.")]
DTYPE = Annotated[list[str], _one_of("Of q and k", DTYPES)]
TABLE_DTYPE = Annotated[list[str], _one_of("Of cos and sin", DTYPES, "; fp64 with complex128")]
INTERLEAVED = Annotated[bool, typer.Option("--interleaved/--halves", help="Pairs are (2i, 2i+1) or (i, i + half).")]
ROTARY_DIM = Annotated[int, typer.Option(help="Elements of a head that are rotated; 0: all.")]
WIDTH = Annotated[str, _one_of("Of the tables", ("half", "full"))]
ROUNDING = Annotated[str, _one_of("Arithmetic", ROUNDINGS)]
NORM = Annotated[str, _one_of("Of qk_norm_rope: its norm_rounding", NORM_ROUNDINGS)]
WEIGHT_DTYPE = Annotated[str | None, _one_of("Of the norm's weights", DTYPES)]
PACKED = Annotated[str | None, _one_of("cu_seqlens are given, as", INDEX_DTYPES)]
IN_PLACE = Annotated[bool, typer.Option("--in-place", help="Of apply_rope_.")]
BACKWARD = Annotated[bool, typer.Option("--backward", help="With the gradient's kernels.")]


def main() -> None:
    """The console script: one line for an error that is not ours to trace."""
    try:
        app(prog_name="jitrope")
    except JitropeError as error:
        say("error:", error)
        sys.exit(1)


@app.command(
    "bench", add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def bench(context: typer.Context) -> None:
    """Time jitrope on this machine's GPU, beside torch and others (in a checkout: examples/bench)."""
    folder = Path(__file__).parents[2] / "examples" / "bench"
    if not folder.is_dir():
        raise JitropeError(
            "the benchmarks are not in the package: run examples/bench in a checkout of jitrope's repository"
        )
    sys.argv = ["jitrope bench", *context.args]
    runpy.run_path(str(folder), run_name="__main__")


def say(word: str, text: object) -> None:
    """A line on stderr. The text is not markup: the extra's brackets in `jitrope[cuda13]` stay."""
    err.print(f"[red]{word}[/red] {escape(_printable(text))}", highlight=False, soft_wrap=True)


def _printable(text: object) -> str:
    """Without commands to the terminal, which a file's name or an error about its content may have in it."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in str(text))


def tell(text: object) -> None:
    """A line on stdout, as it is."""
    out.print(escape(str(text)), highlight=False, soft_wrap=True)


def print_json(data: Any) -> None:
    """Machine-readable output, whatever the terminal."""
    print(json.dumps(data, indent=1, default=str))


def _size(count: float) -> str:
    """Bytes for a reader."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 10 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def _bytes(text: str) -> int:
    try:
        return config.parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _age(used: float) -> str:
    """How long ago, in the largest whole unit."""
    if not used:
        return ""
    seconds = max(0, int(time.time() - used))
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length} {unit}"
    return "now"


class _Rate(ProgressColumn):
    """Steps a second."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:.1f}/s" if speed else "", style="progress.data.speed")


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[Any], None]]:
    """A bar on stderr, if that is a terminal; what is given is called after each step."""
    columns = (BarColumn(), MofNCompleteColumn(), _Rate(), TimeElapsedColumn(), TimeRemainingColumn())
    disable = not err.is_terminal
    with Progress(TextColumn(what), *columns, console=err, transient=True, disable=disable) as progress:
        task = progress.add_task("", total=total)
        yield lambda _: progress.advance(task)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


# ---- prewarm and render ------------------------------------------------------------------------


def _calls(heads: list[str], fields: dict[str, Any]) -> list[Any]:
    from .prewarm import expand

    try:
        totals = [sum(int(part) for part in text.split(",")) for text in heads]
    except ValueError as error:
        raise typer.BadParameter(f"--heads takes numbers, as 32,8: {error}") from error
    try:
        return expand({"heads": totals, **fields})
    except InvalidInput as error:
        raise typer.BadParameter(str(error)) from error


def _archs(text: str) -> list[str]:
    import torch

    from ..jit.kernels import arch_of
    from .prewarm import ARCH

    given = [name for name in text.replace(" ", "").split(",") if name]
    if wrong := [name for name in given if not ARCH.fullmatch(name)]:
        raise typer.BadParameter(f"--arch takes architectures, as sm_80,sm_90: {', '.join(wrong)}")
    local = {arch_of(i) for i in range(torch.cuda.device_count())} if torch.cuda.is_available() else set()
    if not given and not local:
        raise JitropeError("there is no GPU here; say for which to build, as --arch sm_80,sm_90")
    return list(dict.fromkeys(given)) or sorted(local)


@app.command(
    epilog=_examples(
        "jitrope prewarm --arch sm_80,sm_90 --jobs 8",
        "jitrope prewarm --heads 32,8 --head-dim 128 --backward",
        "JITROPE_RECORD=run.json python train.py && jitrope prewarm --from run.json",
    )
)
def prewarm(
    heads: HEADS = None,
    head_dim: HEAD_DIM = [128],  # noqa: B006  typer's way of a repeatable option
    dtype: DTYPE = ["bf16"],  # noqa: B006
    table_dtype: TABLE_DTYPE = ["fp32"],  # noqa: B006
    interleaved: INTERLEAVED = False,
    rotary_dim: ROTARY_DIM = 0,
    width: WIDTH = "half",
    rounding: ROUNDING = "fp32",
    packed: PACKED = None,
    in_place: IN_PLACE = False,
    angles: Annotated[bool, typer.Option("--angles", help="The table is `freqs`.")] = False,
    cp_size: Annotated[int, typer.Option(help="Context parallel ranks.")] = 1,
    q_per_group: Annotated[int, typer.Option(help="Of packed QKV, whose --heads are all three's; 0: apart.")] = 0,
    norm: NORM = "",
    weight_dtype: WEIGHT_DTYPE = None,
    backward: BACKWARD = False,
    file: Annotated[
        Path | None, typer.Option("--from", help="TOML or JSON: calls, a recorded run, or `jitrope cache ls --json`.")
    ] = None,
    record: Annotated[Path | None, typer.Option(help="Add the kernels to this file, for --from elsewhere.")] = None,
    arch: ARCH = "",
    jobs: JOBS = 0,
    dry_run: DRY_RUN = False,
    as_json: JSON = False,
) -> None:
    """Compile kernels ahead of time, for this machine or, with --arch, for any; no GPU is needed.

    Without --heads or --from it builds the kernels of popular models. A file
    may set every field of a call, those without a flag here too.
    """
    from .prewarm import DEFAULT_CALLS, read_calls
    from .prewarm import prewarm as build

    if file is not None:
        specs = read_calls(file)
    else:
        fields = {
            "head_dim": head_dim, "dtype": dtype, "table_dtype": table_dtype, "interleaved": interleaved,
            "rotary_dim": rotary_dim, "width": width, "rounding": rounding, "packed": packed,
            "in_place": in_place, "angles": angles, "cp_size": cp_size, "q_per_group": q_per_group,
            "norm": norm, "weight_dtype": weight_dtype, "backward": backward,
        }  # fmt: skip
        calls = _calls(heads, fields) if heads else DEFAULT_CALLS
        specs = list(dict.fromkeys(spec for call in calls for spec in call.specs()))
    archs = _archs(arch)
    if record is not None and not dry_run:
        from ..jit.recording import add

        add(record, specs)
    kernels = list(itertools.product(specs, archs))
    workers = jobs or os.cpu_count() or 1
    _build(kernels, dry_run, as_json, lambda done: build(specs, archs, workers, done), _unkept() if dry_run else "")


def _build(
    kernels: Sequence[tuple[Any, str]],
    dry_run: bool,
    as_json: bool,
    build: Callable[[Any], list[Any]],
    unkept: str = "",
) -> None:
    """Compile, or say what would be, and say how it went; exit code 1 unless every kernel is there or would be.

    unkept: why what is compiled would be lost, which is a failure, or "".
    """
    config.configure(compile=True)  # it is asked for, whatever the environment says
    with _progress("compiling", len(kernels)) as step:
        built = [_would(*kernel, unkept) for kernel in kernels] if dry_run else build(step)
    failed = [item for item in built if item.failed]
    words = ("would compile", "cached") if dry_run else ("compiled", "cached")
    counts = {word: sum(item.outcome == word for item in built) for word in words}
    if as_json:
        rows = [{"name": b.spec.name, "arch": b.arch, "outcome": b.outcome, "failed": b.failed} for b in built]
        print_json({**counts, "failed": len(failed), "kernels": rows})
    else:
        tell(", ".join(f"{count} {word}" for word, count in {**counts, "failed": len(failed)}.items()))
    for item in failed:
        say("failed", f"{item.spec.name} {item.arch}: {item.outcome}")
    if not built:
        say("error:", "there was nothing to build")
    if failed or not built:
        raise typer.Exit(1)


def _would(spec: Any, arch: str, unkept: str) -> Any:
    """What building a kernel would do: the same look into the caches, and the same compiler is asked."""
    from ..jit import kernels
    from .prewarm import Built, refused

    try:
        if kernels.is_cached(spec, arch):
            return Built(spec, arch, "cached")
        reason = refused(arch) or unkept
    except JitropeError as error:
        reason = str(error)
    return Built(spec, arch, reason or "would compile", failed=bool(reason))


def _unkept() -> str:
    """What `prewarm` says where nothing can be written to the kernel cache, or is read from it; else ""."""
    from ..jit.entry import untrusted
    from ..jit.kernels import kernel_cache
    from .doctor import cannot_write
    from .prewarm import UNKEPT

    root = kernel_cache().root
    return UNKEPT if cannot_write(root) or (root.exists() and untrusted(root)) else ""


@app.command(
    epilog=_examples("jitrope render --heads 24 --interleaved --head-dim 64", "jitrope render --json | jq -r .text")
)
def render(
    heads: Annotated[str, typer.Option(help="Heads of q and k, as 32,8, or of q alone, as 24.")] = "32,8",
    head_dim: Annotated[int, typer.Option(help="Elements of a head.")] = 128,
    dtype: Annotated[str, typer.Option(help="Of q and k: fp32, fp16 or bf16.")] = "bf16",
    table_dtype: Annotated[str, typer.Option(help="Of cos and sin: fp32, fp16 or bf16.")] = "fp32",
    interleaved: INTERLEAVED = False,
    rotary_dim: ROTARY_DIM = 0,
    width: WIDTH = "half",
    rounding: ROUNDING = "fp32",
    packed: PACKED = None,
    in_place: IN_PLACE = False,
    norm: NORM = "",
    weight_dtype: WEIGHT_DTYPE = None,
    backward: Annotated[bool, typer.Option("--backward", help="The gradient's kernel.")] = False,
    launch: Annotated[str, typer.Option(help="token_linear or grid_2d.")] = "token_linear",
    as_json: JSON = False,
) -> None:
    """Print the CUDA of a kernel."""
    from ..jit.render import render as render_source

    fields = {
        "head_dim": head_dim, "dtype": dtype, "table_dtype": table_dtype, "interleaved": interleaved,
        "rotary_dim": rotary_dim, "width": width, "rounding": rounding, "packed": packed,
        "in_place": in_place and not backward, "norm": norm, "weight_dtype": weight_dtype, "backward": backward,
    }  # fmt: skip
    (call,) = _calls([heads], fields)
    found = [spec for spec in call.specs() if spec.launch == launch and spec.conjugate == backward]
    if not found:
        raise typer.BadParameter(f"--launch is {launch!r}; allowed are token_linear and grid_2d")
    source = render_source(found[0])
    if as_json:
        print_json({"name": source.name, "entry": source.entry, "spec": found[0].to_dict(), "text": source.text})
    elif out.is_terminal:
        out.print(Syntax(source.text, "cuda"))
    else:
        print(source.text, end="")


# ---- cache -------------------------------------------------------------------------------------


def _print_entries(entries: Sequence[Any]) -> None:
    """A row a name, and in it a line for each kernel; not on a terminal a line a kernel: name, arch, bytes, path."""
    named: dict[str, list[Any]] = {}
    for entry in sorted(entries, key=lambda entry: (entry.name, int("".join(filter(str.isdigit, entry.arch)) or 0))):
        named.setdefault(entry.name, []).append(entry)
    if not out.is_terminal:
        for entry in itertools.chain.from_iterable(named.values()):
            print(entry.name, entry.arch, entry.size, entry.path, sep="\t")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("kernel")
    table.add_column("arch", style="cyan", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("used", justify="right", no_wrap=True, style="dim")
    for name, some in named.items():
        lines = ([e.arch for e in some], [_size(e.size) for e in some], [_age(e.used) for e in some])
        table.add_row(_folded(name, max(30, out.width - 26)), *("\n".join(column) for column in lines))
    if named:
        out.print(table)


def _folded(name: str, width: int) -> Text:
    """A kernel's name in lines, cut behind an underscore."""
    lines = [""]
    for part in name.replace("_", "_ ").split():
        if len(lines[-1] + part) > width:
            lines.append("  ")
        lines[-1] += part
    return Text("\n".join(lines), overflow="fold")


def _rows(entries: Sequence[Any]) -> list[dict[str, Any]]:
    return [{"name": e.name, "arch": e.arch, "bytes": e.size, "path": e.path} for e in entries]


def _total(entries: Sequence[Any]) -> str:
    return f"{len(entries)} kernel{'s' * (len(entries) != 1)}, {_size(sum(entry.size for entry in entries))}"


@cache_app.command("ls", epilog=_examples("jitrope cache ls", "jitrope cache ls --json > run.json"))
def cache_ls(as_json: JSON = False) -> None:
    """List the kernels; with --json in the form that `jitrope prewarm --from` reads."""
    from ..jit.kernels import kernel_cache

    cache = kernel_cache()
    entries = list(cache.entries())
    if as_json:
        specs = list({json.dumps(entry.spec): entry.spec for entry in entries}.values())
        print_json({"spec": specs, "entries": _rows(entries)})
        return
    _print_entries(entries)
    err.print(f"{_total(entries)} in {escape(str(cache.root))}", highlight=False, soft_wrap=True)


@cache_app.command("path", epilog=_examples("jitrope cache path", 'du -sh "$(jitrope cache path)"'))
def cache_path(as_json: JSON = False) -> None:
    """Print the folder of the kernels, and with --json the read-only caches below it."""
    from ..jit.kernels import kernel_cache

    cache = kernel_cache()
    if as_json:
        print_json({"path": cache.root, "system": [layer.path for layer in cache.system]})
    else:
        tell(cache.root)


@cache_app.command("size", epilog=_examples("jitrope cache size", "jitrope cache size --json"))
def cache_size(as_json: JSON = False) -> None:
    """Print how much the kernels take, and the bound (JITROPE_CACHE_SIZE)."""
    from ..jit.kernels import kernel_cache

    entries, bound = list(kernel_cache().entries()), config.cache_size()
    if as_json:
        print_json({"kernels": len(entries), "bytes": sum(e.size for e in entries), "max_bytes": bound})
    else:
        tell(f"{_total(entries)} of {_size(bound) if bound else 'any size'}")


@cache_app.command("verify", epilog=_examples("jitrope cache verify", "jitrope cache verify --cold --json"))
def cache_verify(
    cold: Annotated[
        bool, typer.Option("--cold", help="Start a process that may not compile, and load every kernel there.")
    ] = False,
    as_json: JSON = False,
) -> None:
    """Check every kernel, of read-only caches too, against its checksums; exit code 1 if one is damaged.

    With --cold also if one would be compiled, or if there is none: kernels of
    this machine's GPUs are loaded, the others looked up as a call would.
    """
    from .doctor import cold_start, verify_all

    good, bad = verify_all()
    wrong = [("damaged", f"{path}: {reason}") for path, reason in bad]
    found: dict[str, Any] = {"good": good, "bad": [{"path": path, "reason": reason} for path, reason in bad]}
    lines = [f"{good} good, {len(bad)} damaged"]
    try:
        if cold:
            found["cold"] = looked = cold_start()
            lines.append("cold start: {loaded} loaded, {checked} looked up, {compiled} compiled".format(**looked))
            if others := looked["others"]:
                lines[-1] += f"; {others} of another version, for which no call asks"
            wrong += [("missing", f"{item['name']} {item['arch']}: {item['reason']}") for item in looked["bad"]]
            if looked["compiled"]:
                wrong.append(("error:", f"{looked['compiled']} kernels were compiled"))
            if not (looked["loaded"] or looked["checked"] or wrong):
                wrong.append(("error:", "there is nothing to look up"))
    except CacheError as error:
        found["cold"] = {"error": str(error)}
        wrong.append(("error:", str(error)))
    if as_json:
        print_json(found)
    for line in () if as_json else lines:
        tell(line)
    for word, text in wrong:
        say(word, text)
    if wrong:
        raise typer.Exit(1)


@cache_app.command("clear", epilog=_examples("jitrope cache clear --dry-run", "jitrope cache clear"))
def cache_clear(dry_run: DRY_RUN = False, as_json: JSON = False) -> None:
    """Remove every kernel from your folder; read-only caches stay."""
    from ..jit.kernels import kernel_cache

    cache = kernel_cache()
    removed = cache.clear(dry_run)
    if as_json:
        print_json({"removed": removed, "dry_run": dry_run})
    else:
        tell(f"{removed} kernels {'would be ' * dry_run}removed from {cache.root}")


@cache_app.command("prune", epilog=_examples("jitrope cache prune", "jitrope cache prune --max-size 200M --dry-run"))
def cache_prune(
    max_size: Annotated[
        str, typer.Option(help="What may stay, as 200M, 1GiB or bytes; default: JITROPE_CACHE_SIZE.")
    ] = "",
    dry_run: DRY_RUN = False,
    as_json: JSON = False,
) -> None:
    """Remove the kernels that were not used for longest, but none of the last hour."""
    from ..jit.kernels import kernel_cache

    cache, bound = kernel_cache(), _bytes(max_size) if max_size else config.cache_size()
    gone = cache.prune(bound, dry_run) if bound or max_size else []
    if as_json:
        print_json({"removed": _rows(gone), "bytes": sum(entry.size for entry in gone), "dry_run": dry_run})
        return
    _print_entries(gone)
    left = _total([entry for entry in cache.entries() if entry.path not in {e.path for e in gone}])
    tell(f"{_total(gone)} {'would be ' * dry_run}removed, {left} left in {cache.root}")


# ---- bundle ------------------------------------------------------------------------------------


@bundle_app.command(
    "write",
    epilog=_examples(
        "jitrope bundle write kernels.tar",
        "jitrope bundle write kernels.tar --from run.json --arch sm_90,sm_100",
        "JITROPE_SYSTEM_CACHE=kernels.tar JITROPE_NO_COMPILE=1 python serve.py",
    ),
)
def bundle_write(
    path: Annotated[Path, typer.Argument(help="The file to write, a tar.")],
    file: Annotated[
        Path | None, typer.Option("--from", help="TOML or JSON as for `jitrope prewarm`; default: what the cache has.")
    ] = None,
    arch: Annotated[
        str, typer.Option(help="Architectures, as sm_80,sm_90; default: as cached; of --from the GPUs'.")
    ] = "",
    jobs: JOBS = 0,
    dry_run: DRY_RUN = False,
    as_json: JSON = False,
) -> None:
    """Write kernels to a file for JITROPE_SYSTEM_CACHE or `jitrope bundle load`, compiling what is not cached."""
    from . import bundle
    from .prewarm import read_calls

    if file is not None:
        kernels = list(itertools.product(read_calls(file), _archs(arch)))
    else:
        kernels = _cached()
        if arch:
            kernels = list(itertools.product(dict.fromkeys(spec for spec, _ in kernels), _archs(arch)))
    workers = jobs or os.cpu_count() or 1
    _build(kernels, dry_run, as_json, lambda step: bundle.write(path, kernels, workers, step))
    if not dry_run and not as_json:
        err.print(f"wrote {escape(str(path))}, {_size(path.stat().st_size)}", highlight=False, soft_wrap=True)


def _cached() -> list[tuple[Any, str]]:
    """(spec, arch) of the kernels in the user's own folder, of this version. CacheError: one is damaged."""
    from ..jit.kernels import kernel_cache
    from .doctor import verify_all
    from .prewarm import this_versions

    if bad := verify_all(own_only=True)[1]:
        reasons = "\n".join(f"{path}: {reason}" for path, reason in bad)
        raise CacheError(f"these would be left out; remove them, or name the kernels with --from:\n{reasons}")
    entries = list(kernel_cache().entries())
    specs = this_versions(entry.spec for entry in entries)
    return [(spec, entry.arch) for spec, entry in zip(specs, entries) if spec is not None]


@bundle_app.command("load", epilog=_examples("jitrope bundle load kernels.tar", "jitrope bundle load k.tar --dry-run"))
def bundle_load(
    path: Annotated[Path, typer.Argument(help="A file that `jitrope bundle write` wrote.")],
    dry_run: DRY_RUN = False,
    as_json: JSON = False,
) -> None:
    """Put a bundle's kernels into your kernel cache, all of them checked before the first is written."""
    from ..jit.kernels import kernel_cache
    from . import bundle

    loaded = bundle.entries(path) if dry_run else bundle.load(path)
    if as_json:
        print_json({"loaded": _rows(loaded), "dry_run": dry_run})
    else:
        tell(f"{_total(loaded)} {'would be ' * dry_run}put into {kernel_cache().root}")


@bundle_app.command("ls", epilog=_examples("jitrope bundle ls kernels.tar", "jitrope bundle ls kernels.tar --json"))
def bundle_ls(
    path: Annotated[Path, typer.Argument(help="A file that `jitrope bundle write` wrote.")], as_json: JSON = False
) -> None:
    """List a bundle's kernels, each checked against its digest; exit code 1 if it is damaged."""
    from . import bundle

    entries = bundle.entries(path)
    if as_json:
        specs = list({json.dumps(entry.spec): entry.spec for entry in entries}.values())
        print_json({"spec": specs, "entries": _rows(entries)})
        return
    _print_entries(entries)
    err.print(f"{_total(entries)} in {escape(str(path))}", highlight=False, soft_wrap=True)


# ---- doctor ------------------------------------------------------------------------------------


@app.command(epilog=_examples("jitrope doctor", "jitrope doctor --json > report.json"))
def doctor(as_json: JSON = False) -> None:
    """Look at everything jitrope needs and run it once; exit code 1 if something is broken."""
    from . import doctor as checks

    results = checks.run()
    faults, notes = ([r.what for r in results if r.status == status] for status in ("fault", "note"))
    if as_json:
        rows = [{**dataclasses.asdict(result), "ok": result.status != "fault"} for result in results]
        print_json({"ok": not faults, "checks": rows})
    else:
        table = Table(box=None, pad_edge=False, show_header=False)
        for style in ("bold", "", None):
            table.add_column(style=style, no_wrap=style is not None, overflow="fold")
        for result in results:
            color = {"ok": "green", "note": "yellow", "fault": "red"}[result.status]
            table.add_row(f"[{color}]{result.status}[/{color}]", result.what, escape(_printable(result.found)))
            if result.advice:
                table.add_row("", "", f"[cyan]to do:[/cyan] {escape(result.advice)}")
        out.print(table, highlight=False)
        out.print()
        if faults:
            out.print(f"[red]{len(faults)} broken:[/red] {', '.join(faults)}", highlight=False)
        else:
            out.print("[green]jitrope works here.[/green]" + f" Worth a look: {', '.join(notes)}" * bool(notes))
    if faults:
        raise typer.Exit(1)
