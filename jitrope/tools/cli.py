"""The `jitrope` command. Results go to stdout and messages to stderr; the exit code tells success."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import itertools
import os
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import __version__
from ..base.errors import CacheError, InvalidInput, JitropeError
from ..base.spec import DTYPES, Spec
from ..jit.kernels import kernel_cache
from ..jit.render import render as render_source
from . import bundle, verify
from . import doctor as checks
from .console import answer, architectures, build_all, print_entries, rows, say, total
from .prewarm import ARCH, default_specs, read_calls, specs_of, this_versions
from .prewarm import prewarm as build

Options = argparse.Namespace
Option = tuple[tuple[str, ...], dict[str, Any]]
COMMANDS: dict[str, tuple[Callable[[Options], Any], tuple[Option, ...]]] = {}
GROUPS = {"cache": "List, check and remove the kernels on disk.", "bundle": "Move kernels to other machines."}
SECONDS = {"d": 86400, "h": 3600, "m": 60}
HELP = """Rotary position embeddings, compiled on first call.

Examples:
    jitrope doctor
    jitrope prewarm --arch sm_90
    jitrope cache ls

Exit codes: 0 done, 1 something failed, was damaged or missing, 2 wrong usage."""


def _command(name: str, *options: Option) -> Callable[[Callable[[Options], Any]], Callable[[Options], Any]]:
    """Make a function a command. Its docstring is the help text; if it returns False, the exit code is 1."""
    return lambda function: COMMANDS.setdefault(name, (function, options))[0]


def _option(*names: str, **words: Any) -> Option:
    return names, words


def _value(pattern: str, example: str, read: Callable[[str], Any]) -> Callable[[str], Any]:
    """The reader of an option's text, which must match a pattern."""

    def value(text: str) -> Any:
        if not re.fullmatch(pattern, text):
            raise argparse.ArgumentTypeError(f"{text!r} must be written as {example}")
        return read(text)

    return value


_heads = _value(r"\d+(,\d+)*", "32,8", lambda text: [*map(int, text.split(","))])
_archs = _value(f"{ARCH.pattern}(,{ARCH.pattern})*", "sm_80,sm_90", lambda text: list(dict.fromkeys(text.split(","))))
_age = _value(r"\d{1,6}[dhm]", "30d, 12h or 45m", lambda text: float(text[:-1]) * SECONDS[text[-1]])
_count = _value(r"[1-9]\d*", "8", int)

JSON = _option("--json", action="store_true", help="print JSON on stdout instead of text")
DRY_RUN = _option("--dry-run", action="store_true", help="print what would be done, and change nothing")
ARCHS = _option("--arch", type=_archs, help="architectures, as sm_80,sm_90; default: those of this machine's GPUs")
JOBS = _option(
    "--jobs", type=_count, default=os.cpu_count() or 1, help="kernels compiled at a time; default: all cores"
)
FROM = _option("--from", dest="file", type=Path, help="TOML or JSON: calls, a recorded run, or `cache ls --json`")
BUNDLE = _option("path", type=Path, help="a file that `jitrope bundle write` wrote")
FLAG: dict[str, Any] = {"action": "store_true", "default": None}  # None: not given
CALL = (
    _option("--heads", type=_heads, action="append", help="heads of q and k, as 32,8, or of q alone, as 24"),
    _option("--head-dim", type=int, help="elements of a head; default: 128"),
    _option("--dtype", choices=DTYPES, help="the dtype of q and k; default: bf16"),
    _option("--interleaved", **FLAG, help="pairs are (2i, 2i+1), not (i, i + half)"),
    _option("--rotary-dim", type=int, help="elements of a head that are rotated; default: all"),
    _option("--width", choices=("half", "full"), help="the width of cos and sin; default: half"),
    _option("--in-place", dest="inplace", **FLAG, help="q and k are overwritten"),
    _option("--backward", **FLAG, help="the gradient's kernels too; for `render`, only these"),
    FROM,
)


def main() -> None:
    """The console script. An error of jitrope's is printed as one line without a traceback."""
    try:
        if sys.argv[1:2] == ["bench"]:
            return bench(sys.argv[2:])
        given = _parser().parse_args()
        if given.run is None:
            given.parser.print_help()
            sys.exit(2)
        sys.exit(given.run(given) is False)
    except argparse.ArgumentError as error:
        given.parser.error(str(error))
    except JitropeError as error:
        say(f"error: {error}")
        sys.exit(1)
    except BrokenPipeError:  # as in `jitrope render | head`: keep Python from writing the rest at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _parser() -> argparse.ArgumentParser:
    words: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    top = argparse.ArgumentParser("jitrope", description=HELP, **words)
    top.add_argument("--version", action="version", version=__version__)
    top.set_defaults(run=None, parser=top)
    parents = {"": top.add_subparsers(metavar="command")}

    def add(name: str, text: str, run: Any) -> argparse.ArgumentParser:
        group, _, last = name.rpartition(" ")
        made = parents[group].add_parser(last, help=text.splitlines()[0], description=text, **words)
        made.set_defaults(run=run, parser=made)
        return made

    for name, text in GROUPS.items():
        parents[name] = add(name, text, None).add_subparsers(metavar="command")
    for name, (function, options) in COMMANDS.items():
        made = add(name, inspect.getdoc(function) or "", function)
        for names, more in (*options, JSON):
            made.add_argument(*names, **more)
    add("bench", inspect.getdoc(bench) or "", None)
    return top


# ---- kernels -------------------------------------------------------------------------------------


@_command("prewarm", *CALL, ARCHS, JOBS, DRY_RUN)
def prewarm(given: Options) -> bool:
    """Compile kernels ahead of time, for this machine or others, without a GPU.

    Without --heads and --from it compiles the kernels of popular models. A
    file can describe every kind of call; the options describe common ones.

    Examples:
        jitrope prewarm --arch sm_80,sm_90 --jobs 8
        jitrope prewarm --heads 32,8 --head-dim 128 --backward
        JITROPE_RECORD=run.json python train.py
        jitrope prewarm --from run.json
    """
    specs, archs = _specs(given, given.heads), architectures(given.arch)
    work = list(itertools.product(specs, archs))
    return build_all(work, given.dry_run, given.json, lambda: build(specs, archs, given.jobs))


@_command("render", *CALL)
def render(given: Options) -> None:
    """Print the CUDA text of a kernel; with --from, of the first kernel.

    Examples:
        jitrope render --heads 24 --interleaved --head-dim 64
        jitrope render --json | jq -r .text
    """
    specs = _specs(given, given.heads or [[32, 8]])
    if given.backward:
        specs = [spec for spec in specs if spec.to_dict()["inverse"]]
    if not specs:
        raise JitropeError("there is no such kernel")
    source = render_source(specs[0])
    found = {"name": source.name, "entry": source.entry, "spec": specs[0].to_dict(), "text": source.text}
    answer(given.json, found, source.text.removesuffix("\n"))


def _specs(given: Options, heads: list[list[int]] | None) -> list[Spec]:
    """The kernels that the options describe. Without a file and heads, these are the kernels of popular models."""
    names = ("head_dim", "dtype", "interleaved", "rotary_dim", "width", "inplace", "backward")
    words = {name: getattr(given, name) for name in names if getattr(given, name) is not None}
    if given.file and (given.heads or words):
        raise argparse.ArgumentError(None, "--from does not go with the options of a call")
    if given.file:
        return read_calls(given.file)
    if words and not heads:
        raise argparse.ArgumentError(None, "the options of a call need --heads")
    try:
        return [*specs_of(heads=heads, **words)] if heads else [*default_specs()]
    except InvalidInput as error:
        raise argparse.ArgumentError(None, str(error)) from error


# ---- cache ---------------------------------------------------------------------------------------


@_command("cache ls")
def cache_ls(given: Options) -> None:
    """List the kernels; with --json as a file for `jitrope prewarm --from`."""
    cache = kernel_cache()
    print_entries(cache.entries(), cache.root, given.json)


@_command("cache verify", _option("--cold", action="store_true", help="also look up every kernel without compiling"))
def cache_verify(given: Options) -> bool:
    """Check every kernel of every cache; exit code 1 if one is damaged.

    With --cold it also loads the kernels of this machine's GPUs and looks up
    the others, as a new process would that must not compile. The exit code
    is also 1 if a kernel would be compiled, or if there is no kernel.

    Examples:
        jitrope cache verify --cold
    """
    verified = [cache.verify() for cache in verify.caches()]
    good, bad = sum(count for count, _ in verified), [item for _, items in verified for item in items]
    found: dict[str, Any] = {"good": good, "bad": [{"path": path, "reason": reason} for path, reason in bad]}
    lines = [f"{good} good, {len(bad)} damaged"]
    wrong = [f"damaged: {path}: {reason}" for path, reason in bad]
    if given.cold:
        found["cold"] = cold = verify.cold_start()
        lines.append("cold start: {loaded} loaded, {checked} looked up, {others} of another version".format(**cold))
        wrong += [f"missing: {item['name']} {item['arch']}: {item['reason']}" for item in cold["bad"]]
        if not (cold["loaded"] or cold["checked"] or wrong):
            wrong.append("error: there is nothing to look up")
    answer(given.json, found, "\n".join(lines))
    for line in wrong:
        say(line)
    return not wrong


@_command("cache clear", DRY_RUN)
def cache_clear(given: Options) -> None:
    """Remove every kernel from your folder. Read-only caches are not changed."""
    _report(kernel_cache().clear(given.dry_run), given)


@_command("cache prune", _option("--older-than", type=_age, required=True, help="30d, 12h or 45m"), DRY_RUN)
def cache_prune(given: Options) -> None:
    """Remove the kernels that are older than some time.

    Kernels that were loaded from a bundle are kept.

    Examples:
        jitrope cache prune --older-than 30d --dry-run
    """
    _report(kernel_cache().prune(given.older_than, given.dry_run), given)


def _report(removed: list[Path], given: Options) -> None:
    text = f"{len(removed)} kernels {'would be ' * given.dry_run}removed from {kernel_cache().root}"
    answer(given.json, {"removed": removed, "dry_run": given.dry_run}, text)


# ---- bundle --------------------------------------------------------------------------------------


@_command("bundle write", _option("path", type=Path, help="the file to write, a tar"), FROM, ARCHS, JOBS, DRY_RUN)
def bundle_write(given: Options) -> bool:
    """Write kernels to a file and compile those that are not cached.

    The file is for JITROPE_SYSTEM_CACHE or `jitrope bundle load`. Without
    --from it gets the kernels of your cache, for the architectures that
    they were compiled for, or for those of --arch.

    Examples:
        jitrope bundle write kernels.tar --from run.json --arch sm_90,sm_100
        JITROPE_SYSTEM_CACHE=kernels.tar JITROPE_NO_COMPILE=1 python serve.py
    """
    work = [(spec, "") for spec in read_calls(given.file)] if given.file else _cached()
    if given.file or given.arch:
        work = list(itertools.product(dict.fromkeys(spec for spec, _ in work), architectures(given.arch)))
    complete = build_all(work, given.dry_run, given.json, lambda: bundle.write(given.path, work, given.jobs))
    if not given.dry_run and not given.json:
        say(f"wrote {given.path}")
    return complete


def _cached() -> list[tuple[Spec, str]]:
    """(spec, arch) of this version's kernels in the user's own folder. Raises CacheError if one is damaged."""
    cache = kernel_cache()
    entries, bad = cache.survey()
    if bad:
        reasons = "\n".join(f"{path}: {reason}" for path, reason in bad)
        raise CacheError(f"these kernels would be missing; remove them, or name the kernels with --from:\n{reasons}")
    specs = this_versions(entry.spec for entry in entries)
    return [(spec, entry.arch) for spec, entry in zip(specs, entries) if spec is not None]


@_command("bundle load", BUNDLE)
def bundle_load(given: Options) -> None:
    """Copy a bundle's kernels into your cache, after all are checked."""
    loaded = bundle.load(given.path)
    answer(given.json, {"loaded": rows(loaded)}, f"{total(loaded)} copied to {kernel_cache().root}")


@_command("bundle ls", BUNDLE)
def bundle_ls(given: Options) -> None:
    """List a bundle's kernels; exit code 1 if one does not match its checksums."""
    print_entries(bundle.entries(given.path), given.path, given.json)


# ---- this machine --------------------------------------------------------------------------------


@_command("doctor")
def doctor(given: Options) -> bool:
    """Check everything that jitrope needs, and run a kernel; exit code 1 for a fault."""
    results = checks.run()
    faults = [result.what for result in results if not result.ok]
    lines = []
    for result in results:
        lines.append(f"{'ok' if result.ok else 'FAULT':6}{result.what:14}{result.found}")
        lines += [f"{'':20}to do: {result.advice}"] if result.advice else []
    lines.append(f"{len(faults)} broken: {', '.join(faults)}" if faults else "jitrope works here.")
    answer(given.json, {"ok": not faults, "checks": list(map(dataclasses.asdict, results))}, "\n".join(lines))
    return not faults


def bench(arguments: list[str]) -> None:
    """Time jitrope on this machine's GPU (in a checkout, with jitrope[bench])."""
    folder = Path(__file__).parents[2] / "examples" / "bench"
    if not folder.is_dir():
        text = "the benchmarks are not in the package: run examples/bench in a checkout of jitrope's repository"
        raise JitropeError(text)
    sys.argv = ["jitrope bench", *arguments]
    try:
        runpy.run_path(str(folder), run_name="__main__")
    except ModuleNotFoundError as error:
        raise JitropeError(f"the benchmarks need {error.name}: pip install 'jitrope[bench]'") from error
