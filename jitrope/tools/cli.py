"""The `jitrope` command. Results go to stdout and messages to stderr; the exit code shows success."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import io
import itertools
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import __version__
from ..base.config import configure
from ..base.errors import CacheError, InvalidInput, JitropeError
from ..base.spec import Spec
from ..jit.kernels import kernel_cache
from ..jit.render import render as render_source
from . import bundle, options
from . import doctor as checks
from .console import answer, architectures, build_all, details, paragraph, print_entries, rows, say, total
from .models import specs_of_model
from .prewarm import default_specs, read_calls, specs_of, this_versions
from .prewarm import prewarm as build
from .server import specs_of_server

Options = argparse.Namespace
COMMANDS: dict[str, tuple[Callable[[Options], Any], tuple[options.Option, ...]]] = {}
GROUPS = {"cache": "List, show, check and remove the kernels on disk.", "bundle": "Move kernels to other machines."}
HELP = """Rotary position embeddings, compiled on first call.

Examples:
    jitrope doctor
    jitrope prewarm --arch sm_90
    jitrope cache ls

Exit codes: 0 done, 1 something failed, was damaged or missing, 2 wrong usage."""


def _command(name: str, *takes: options.Option) -> Callable[[Callable[[Options], Any]], Callable[[Options], Any]]:
    """Make a function a command. Its docstring is the help text; if it returns False, the exit code is 1."""
    return lambda function: COMMANDS.setdefault(name, (function, takes))[0]


def main() -> None:
    """The console script. Errors of jitrope have no traceback; with --json they are {"error": ...} on stdout."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # paths may have any letters
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
        if options.wants_json():
            answer(True, {"error": str(error)}, "")
        else:
            say(f"error: {error}")
        sys.exit(1)
    except OSError as error:  # of stdout: Python must not write the rest at exit
        if not isinstance(error, BrokenPipeError):  # as in `jitrope render | head`
            say(f"error: {error}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _parser() -> argparse.ArgumentParser:
    top = options.Parser(prog="jitrope", description=HELP)
    top.add_argument("--version", action="version", version=__version__)
    top.set_defaults(run=None, parser=top)
    parents: dict[str, Any] = {"": top.add_subparsers(metavar="command")}

    def add(name: str, text: str, run: Any) -> argparse.ArgumentParser:
        group, _, last = name.rpartition(" ")
        made: argparse.ArgumentParser = parents[group].add_parser(last, help=text.partition("\n")[0], description=text)
        made.set_defaults(run=run, parser=made)
        return made

    for name, text in GROUPS.items():
        parents[name] = add(name, text, None).add_subparsers(metavar="command")
    for name, (function, takes) in COMMANDS.items():
        made = add(name, inspect.getdoc(function) or "", function)
        for names, more in (*takes, options.JSON):
            made.add_argument(*names, **more)
    add("bench", inspect.getdoc(bench) or "", None)
    return top


# ---- kernels -------------------------------------------------------------------------------------


_SERVED = options.MODEL, options.SERVE, options.SERVED_IDS


@_command("prewarm", *options.CALL, *_SERVED, options.INVARIANT, options.ARCHS, options.JOBS, options.DRY_RUN)
def prewarm(given: Options) -> bool:
    """Compile kernels ahead of time, for this machine's GPU or those of --arch.

    With --arch no GPU is needed.

    Without --heads, --model and --from it compiles the kernels of popular
    models. A file can describe every kind of call; the options describe common
    ones. --dry-run lists the kernels.

    Examples:
        jitrope prewarm --arch sm_80,sm_90 --jobs 8
        jitrope prewarm --heads 32,8 --head-dim 128 --backward
        jitrope prewarm --model path/to/config.json --dry-run
        jitrope prewarm --model path/to/pipeline --dtype bf16
        jitrope prewarm --model path/to/folder --serve 8 --ids int64,int32
        JITROPE_RECORD=run.json python train.py
        jitrope prewarm --from run.json
    """
    if given.batch_invariant:
        configure(batch_invariant=True)
    specs, archs = _specs(given, given.heads), architectures(given.arch)
    work = list(itertools.product(specs, archs))
    return build_all(work, given.dry_run, given.json, lambda: build(specs, archs, given.jobs))


@_command("render", *options.CALL)
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
    """The kernels of the options. Without a file, model and heads: the kernels of popular models."""
    names = ("head_dim", "dtype", "interleaved", "rotary_dim", "width", "inplace", "backward")
    words = {name: getattr(given, name) for name in names if getattr(given, name) is not None}
    model = getattr(given, "model", None)
    if given.file and (given.heads or words or model):
        raise argparse.ArgumentError(None, "--from does not go with --model, nor with the options of a call")
    if model and (given.heads or words.keys() - {"dtype"}):
        raise argparse.ArgumentError(None, "--model does not go with the options of a call, except --dtype")
    ranks, ids = getattr(given, "serve", None), getattr(given, "ids", None)
    if (ranks and not model) or (ids and not ranks):
        raise argparse.ArgumentError(None, "--serve needs --model" if ranks else "--ids needs --serve")
    if given.file and getattr(given, "batch_invariant", False):
        raise argparse.ArgumentError(None, "--from does not go with --batch-invariant")
    if given.file:
        return read_calls(given.file)
    if model:
        served = {"ids": ids} if ids else {}
        return specs_of_server(model, ranks=ranks, **words, **served) if ranks else specs_of_model(model, **words)
    if words and not heads:
        raise argparse.ArgumentError(None, "the options of a call need --heads")
    try:
        return [*specs_of(heads=heads, **words)] if heads else [*default_specs()]
    except InvalidInput as error:
        raise argparse.ArgumentError(None, str(error)) from error


# ---- cache ---------------------------------------------------------------------------------------


@_command("cache ls")
def cache_ls(given: Options) -> None:
    """List the kernels: key, architecture, size, and a description.

    A description is the kernel's name in words: rope, or a norm and rope (qk
    norm rope), dtype, elements of a head, pairs, tables, direction, and the
    launch, token linear for many tokens and grid 2d for few. With --json the
    list is a file for `jitrope prewarm --from`.
    """
    cache = kernel_cache()
    print_entries(cache.entries(), cache.root, given.json)


@_command("cache info", options.KEY)
def cache_info(given: Options) -> None:
    """Show one kernel: spec, options, compiler and files.

    Examples:
        jitrope cache info 1a2b3c4d
    """
    answer(given.json, *details(kernel_cache().entries(), given.key))


@_command("cache verify", options.COLD)
def cache_verify(given: Options) -> bool:
    """Check every kernel of every cache; exit code 1 if one is damaged.

    With --cold it also loads the kernels of this machine's GPUs and looks up
    the others, like a new process that must not compile. The exit code is
    also 1 if a kernel would be compiled, or if there is no kernel.

    Examples:
        jitrope cache verify --cold
    """
    verified = [cache.verify() for cache in checks.caches()]
    good, bad = sum(count for count, _ in verified), [item for _, items in verified for item in items]
    found: dict[str, Any] = {"good": good, "bad": [{"path": path, "reason": reason} for path, reason in bad]}
    lines = [f"{good} good, {len(bad)} damaged"]
    wrong = [f"damaged: {path}: {reason}" for path, reason in bad]
    if given.cold:
        found["cold"] = cold = checks.cold_start()
        lines.append("cold start: {loaded} loaded, {checked} looked up, {others} of another version".format(**cold))
        wrong += [f"missing: {item['name']} {item['arch']}: {item['reason']}" for item in cold["bad"]]
        if not (cold["loaded"] or cold["checked"] or wrong):
            found["error"] = "there is nothing to look up"
            wrong.append("error: there is nothing to look up")
    answer(given.json, found, "\n".join(lines))
    for line in wrong:
        say(line)
    return not wrong


@_command("cache clear", options.DRY_RUN)
def cache_clear(given: Options) -> None:
    """Remove every kernel from your folder. Read-only caches are not changed."""
    _report(kernel_cache().clear(given.dry_run), given)


@_command("cache prune", options.OLDER, options.DRY_RUN)
def cache_prune(given: Options) -> None:
    """Remove the kernels older than a given age.

    Kernels loaded from a bundle are kept.

    Examples:
        jitrope cache prune --older-than 30d --dry-run
    """
    kept = "; kernels from bundles are kept, which `jitrope cache clear` removes"
    _report(kernel_cache().prune(given.older_than, given.dry_run), given, kept)


def _report(removed: list[Path], given: Options, kept: str = "") -> None:
    text = f"{len(removed)} kernels {'would be ' * given.dry_run}removed from {kernel_cache().root}{kept}"
    answer(given.json, {"removed": removed, "dry_run": given.dry_run}, text)


# ---- bundle --------------------------------------------------------------------------------------


@_command("bundle write", options.WRITTEN, options.FROM, options.ARCHS, options.JOBS, options.DRY_RUN)
def bundle_write(given: Options) -> bool:
    """Write kernels to a file and compile those that are not cached.

    Use the file as JITROPE_SYSTEM_CACHE or with `jitrope bundle load`.
    Without --from it contains the kernels of your cache, for the
    architectures that they were compiled for, or for those of --arch.

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


@_command("bundle load", options.BUNDLE)
def bundle_load(given: Options) -> None:
    """Check a bundle's kernels, and copy them into your cache."""
    loaded = bundle.load(given.path)
    answer(given.json, {"loaded": rows(loaded)}, f"{total(loaded)} copied to {kernel_cache().root}")


@_command("bundle ls", options.BUNDLE)
def bundle_ls(given: Options) -> None:
    """List a bundle's kernels; exit code 1 if one does not match its checksums."""
    print_entries(bundle.entries(given.path), given.path, given.json)


# ---- this machine --------------------------------------------------------------------------------


@_command("doctor")
def doctor(given: Options) -> bool:
    """Check all that jitrope needs, and run a kernel; exit code 1 for a fault."""
    results = checks.run()
    faults = [result.what for result in results if not result.ok]
    notes = [result.what for result in results if result.ok and result.advice]
    lines = []
    for result in results:
        word = "FAULT" if not result.ok else "note" if result.advice else "ok"
        lines += paragraph(f"{word:6}{result.what:14}", result.found)
        lines += paragraph(f"{'':20}to do: ", result.advice) if result.advice else []
    last = ["" if faults else "jitrope works here."]
    for word, found in (("fault", faults), ("note", notes)):
        last += [f"{len(found)} {word}{'s' * (len(found) != 1)}: {', '.join(found)}."] if found else []
    lines.append(" ".join(filter(None, last)))
    answer(given.json, {"ok": not faults, "checks": list(map(dataclasses.asdict, results))}, "\n".join(lines))
    return not faults


def bench(arguments: list[str]) -> None:
    """Time jitrope on this machine's GPU (in a checkout, with the extra bench).

    The benchmarks are in a checkout of jitrope's repository, and not in the
    package. In the checkout's folder, these commands install and list them:

        pip install -e ".[bench]"
        jitrope bench --help
    """
    folder = Path(__file__).parents[2] / "examples" / "bench"
    try:
        if not folder.is_dir():
            text = "the benchmarks are not in the package: run examples/bench in a checkout of jitrope's repository"
            raise JitropeError(text)
        sys.argv = ["jitrope bench", *arguments]
        runpy.run_path(str(folder), run_name="__main__")
    except (ModuleNotFoundError, JitropeError) as error:
        if {"-h", "--help"} & {*arguments}:
            _parser().parse_args(["bench", "--help"])
        if isinstance(error, JitropeError):
            raise
        raise JitropeError(f"the benchmarks need {error.name}: pip install -e '.[bench]'") from error
