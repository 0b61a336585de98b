"""The `jitrope` command. Results go to stdout and messages to stderr; the exit code shows success."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import io
import itertools
import os
import re
import runpy
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .. import __version__
from ..base.errors import CacheError, InvalidInput, JitropeError
from ..base.spec import DTYPES, Spec
from ..jit.kernels import kernel_cache
from ..jit.render import render as render_source
from . import bundle
from . import doctor as checks
from .console import answer, architectures, build_all, print_entries, rows, say, total
from .models import specs_of_model
from .prewarm import architecture, pairs, read_record, specs_of, this_versions
from .prewarm import prewarm as build

Options = argparse.Namespace
Option = tuple[tuple[str, ...], dict[str, Any]]
COMMANDS: dict[str, tuple[Callable[[Options], Any], tuple[Option, ...]]] = {}
GROUPS = {"cache": "List, check and remove the kernels on disk.", "bundle": "Move kernels to other machines."}


# ---- options -------------------------------------------------------------------------------------

_SECONDS = {"d": 86400, "h": 3600, "m": 60}


def _option(*names: str, **words: Any) -> Option:
    return names, words


def _value(pattern: str, example: str, read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return the reader of an option's text, which must match a pattern."""

    def value(text: str) -> Any:
        if not re.fullmatch(pattern, text):
            raise argparse.ArgumentTypeError(f"{text!r} must be written as {example}")
        return read(text)

    return value


def _archs(text: str) -> list[str]:
    found = {part: architecture(part) for part in text.split(",")}
    if wrong := [part for part, arch in found.items() if arch is None]:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r} must be an architecture, such as sm_120, sm120, 120 or 12.0")
    return list(dict.fromkeys(filter(None, found.values())))


_heads = _value(r"[1-9]\d*(,[1-9]\d*)*", "32,8", lambda text: [*map(int, text.split(","))])
_count = _value(r"[1-9]\d*", "a whole number of at least 1, such as 8", int)
_age = _value(r"\d{1,6}[dhm]", "30d, 12h or 45m", lambda text: float(text[:-1]) * _SECONDS[text[-1]])

_JSON = _option("--json", action="store_true", help="print JSON on stdout")
_DRY_RUN = _option("--dry-run", action="store_true", help="print the actions, and change nothing")
_ARCHS = _option("--arch", metavar="ARCH", type=_archs, help="such as sm_80,sm_90; default: this machine's GPUs")
_JOBS = _option("--jobs", metavar="N", type=_count, default=os.cpu_count() or 1, help="default: all cores")
_RECORDED = "a recorded run, or `cache ls --json`'s output; repeatable"
_FROM = _option("--from", dest="files", metavar="FILE", type=Path, action="append", help=_RECORDED)
_OF_MODEL = "a config.json or its folder, or a pipeline's folder; repeatable"
_MODEL = _option("--model", dest="models", metavar="PATH", type=Path, action="append", help=_OF_MODEL)
_BUNDLE = _option("path", metavar="FILE", type=Path, help="a file from `jitrope bundle write`")
_CALL = (
    _option("call", metavar="CALL", nargs="*", help="a text, as `cache ls` prints it; default: fresh rope"),
    _option("--heads", metavar="N,N", type=_heads, action="append", help="of q and k, as 32,8, or of q; repeatable"),
    _option("--head-dim", metavar="N", type=_count, help="elements of a head; default: 128"),
    _option("--dtype", choices=DTYPES, help="default: bf16, of a --model its own"),
    _option("--width", choices=("half", "full"), help="width of cos and sin; default: half"),
    _option("--backward", action="store_true", default=None, help="also the gradient's; `render` prints its first"),
    _FROM,
)
_WORDS = ("head_dim", "dtype", "width", "backward")


# ---- the parser ----------------------------------------------------------------------------------


def _command(name: str, *takes: Option) -> Callable[[Callable[[Options], Any]], Callable[[Options], Any]]:
    """Make a function a command. Its docstring is the help text; if it returns False, the exit code is 1."""
    return lambda function: COMMANDS.setdefault(name, (function, takes))[0]


def main() -> None:
    """Rotary position embeddings, compiled on first call.

    Examples:
        jitrope doctor
        jitrope prewarm --heads 32,8 "bshd heads q k > rotate cos sin > in_place"
        jitrope cache ls

    Exit codes: 0 done, 1 something failed, was damaged or missing, 2 wrong usage.
    """
    # The docstring is the help text. Errors of jitrope are one line without a traceback.
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
    kept: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    top = argparse.ArgumentParser(prog="jitrope", description=inspect.getdoc(main), **kept)
    top.add_argument("--version", action="version", version=__version__)
    top.set_defaults(run=None, parser=top)
    parents: dict[str, Any] = {"": top.add_subparsers(metavar="command")}

    def add(name: str, text: str, run: Any) -> argparse.ArgumentParser:
        group, _, last = name.rpartition(" ")
        short = text.partition("\n")[0]
        made: argparse.ArgumentParser = parents[group].add_parser(last, help=short, description=text, **kept)
        made.set_defaults(run=run, parser=made)
        return made

    for name, text in GROUPS.items():
        parents[name] = add(name, text, None).add_subparsers(metavar="command")
    for name, (function, takes) in COMMANDS.items():
        made = add(name, inspect.getdoc(function) or "", function)
        for names, more in (*takes, _JSON):
            made.add_argument(*names, **more)
    add("bench", inspect.getdoc(bench) or "", None)
    return top


# ---- kernels -------------------------------------------------------------------------------------


@_command("prewarm", *_CALL, _MODEL, _ARCHS, _JOBS, _DRY_RUN)
def prewarm(given: Options) -> bool:
    """Compile kernels ahead of time, for this machine's GPU or those of --arch.

    With --arch no GPU is needed.

    The kernels are those of calls (CALL, --heads and the options after it),
    of a --model with the drop-in, or of a recorded run (--from). --dry-run
    lists them. A call is written as `jitrope cache ls` prints it.

    Examples:
        jitrope prewarm --heads 32,8 --head-dim 128 --arch sm_80,sm_90
        jitrope prewarm --heads 32,8 "thd heads q k > rotate cos sin > in_place"
        jitrope prewarm --model path/to/config.json --backward --dry-run
        jitrope prewarm --model path/to/pipeline --dtype bf16 --jobs 8
        JITROPE_RECORD=run.json python train.py
        jitrope prewarm --from run.json
    """
    specs, archs = _specs(given), architectures(given.arch)
    return build_all(pairs(specs, archs), given.dry_run, given.json, lambda: build(specs, archs, given.jobs))


@_command("render", *_CALL)
def render(given: Options) -> None:
    """Print the CUDA text of a kernel; with --from, of the first kernel.

    Examples:
        jitrope render --heads 8 "bshd heads q > rotate cos sin interleaved > fresh"
        jitrope render --heads 32,8 --json | jq -r .text
    """
    spec = next((spec for spec in _specs(given) if not given.backward or spec.to_dict()["inverse"]), None)
    if spec is None:
        raise JitropeError("there is no such kernel")
    source = render_source(spec)
    found = {"name": source.name, "entry": source.entry, "spec": spec.to_dict(), "text": source.text}
    answer(given.json, found, f"// {spec.call}\n" * bool(spec.call) + source.text.removesuffix("\n"))


def _specs(given: Options) -> list[Spec]:
    """The kernels of calls with --heads, of --model or of --from, one of which must be given."""
    words = {name: getattr(given, name) for name in _WORDS if getattr(given, name) is not None}
    models = getattr(given, "models", None)
    if sum(map(bool, (given.heads, models, given.files))) != 1:
        raise argparse.ArgumentError(None, f"pass one of --heads, {'--model, ' * hasattr(given, 'models')}--from")
    if not given.heads and (given.call or words.keys() - ({"dtype", "backward"} if models else set())):
        raise argparse.ArgumentError(None, "a call and its options need --heads; --model takes --dtype and --backward")
    if given.files:
        return _each(read_record, given.files)
    if models:
        return _each(lambda path: specs_of_model(path, **words), models)
    try:
        return _each(lambda x: specs_of(x[0], call=x[1], **words), itertools.product(given.heads, given.call or [""]))
    except InvalidInput as error:
        raise argparse.ArgumentError(None, str(error)) from error


def _each(read: Callable[[Any], Iterable[Spec]], given: Iterable[Any]) -> list[Spec]:
    """What is read of all that is given, each kernel once."""
    return [*dict.fromkeys(spec for x in given for spec in read(x))]


# ---- cache ---------------------------------------------------------------------------------------


@_command("cache ls")
def cache_ls(given: Options) -> None:
    """List the kernels: architecture, size, name, and the call that built it.

    A call's text is what `jitrope prewarm` reads. Kernels in read-only caches
    are listed too. With --json the list is a file for `jitrope prewarm --from`.
    """
    print_entries([(cache.root, cache.entries()) for cache in checks.caches()], given.json)


@_command("cache path")
def cache_path(given: Options) -> None:
    """Print the folder of the kernels."""
    root = kernel_cache().root
    answer(given.json, {"path": root}, root)


@_command("cache verify", _option("--cold", action="store_true", help="also look up every kernel without compiling"))
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
    text, wrong = f"{good} good, {len(bad)} damaged", [f"damaged: {path}: {reason}" for path, reason in bad]
    if given.cold:
        found["looked_up"], found["missing"] = looked_up, missing = checks.cold_start()
        text += f"; cold start: {looked_up} found, {len(missing)} missing"
        wrong += missing or ([] if looked_up or wrong else ["error: there is nothing to look up"])
    answer(given.json, found, text)
    for line in wrong:
        say(line)
    return not wrong


@_command("cache clear", _DRY_RUN)
def cache_clear(given: Options) -> None:
    """Remove every kernel from your folder. Read-only caches are not changed."""
    _report(kernel_cache().clear(given.dry_run), given)


_AGE = _option("--older-than", metavar="AGE", type=_age, required=True, help="30d, 12h or 45m")


@_command("cache prune", _AGE, _DRY_RUN)
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


_WRITTEN = _option("path", metavar="FILE", type=Path, help="the file to write, a zip; with --hub a new folder")
_HUB = _option("--hub", action="store_true", help="write a repository for Hugging Face's kernels")


@_command("bundle write", _WRITTEN, _HUB, _FROM, _ARCHS, _JOBS, _DRY_RUN)
def bundle_write(given: Options) -> bool:
    """Write kernels to a file and compile those that are not cached.

    Use the file as JITROPE_SYSTEM_CACHE or with `jitrope bundle load`.
    Without --from it contains the kernels of your cache, for the
    architectures that they were compiled for, or for those of --arch.

    With --hub it writes a folder: jitrope and the kernels, as a repository
    that Hugging Face's `kernels` loads without CuPy, NVRTC and jitrope.

    Examples:
        jitrope bundle write kernels.zip --from run.json --arch sm_90,sm_100
        jitrope bundle write --hub jitrope-hub --from run.json --arch sm_90
        JITROPE_SYSTEM_CACHE=kernels.zip JITROPE_NO_COMPILE=1 python serve.py
    """
    work = [(spec, "") for spec in _each(read_record, given.files)] if given.files else _cached()
    if given.files or given.arch:
        work = pairs(dict.fromkeys(spec for spec, _ in work), architectures(given.arch))
    write = bundle.write_hub if given.hub else bundle.write
    complete = build_all(work, given.dry_run, given.json, lambda: write(given.path, work, given.jobs))
    if not given.dry_run and not given.json:
        say(f"wrote {given.path}")
    return complete


def _cached() -> list[tuple[Spec, str]]:
    """(spec, arch) of this version's kernels in the user's own folder. Raises CacheError if one is damaged."""
    entries, bad = kernel_cache().survey()
    if bad:
        reasons = "\n".join(f"{path}: {reason}" for path, reason in bad)
        raise CacheError(f"these kernels would be missing; remove them, or name the kernels with --from:\n{reasons}")
    return this_versions((entry.spec, entry.arch) for entry in entries)


@_command("bundle load", _BUNDLE)
def bundle_load(given: Options) -> None:
    """Check a bundle's kernels, and copy them into your cache."""
    loaded = bundle.load(given.path)
    answer(given.json, {"loaded": rows(loaded)}, f"{total(loaded)} copied to {kernel_cache().root}")


@_command("bundle ls", _BUNDLE)
def bundle_ls(given: Options) -> None:
    """List a bundle's kernels; exit code 1 if one does not match its checksums."""
    print_entries([(given.path, bundle.entries(given.path))], given.json)


# ---- this machine --------------------------------------------------------------------------------


@_command("doctor")
def doctor(given: Options) -> bool:
    """Check all that jitrope needs, and run a kernel; exit code 1 for a fault."""
    results = checks.run()
    faults, lines = [result.what for result in results if not result.ok], []
    for result in results:
        word = "FAULT" if not result.ok else "note" if result.advice else "ok"
        lines.append(f"{word:6}{result.what:14}{result.found}")
        lines += [f"{'':20}to do: {result.advice}"] if result.advice else []
    lines.append(f"faults: {', '.join(faults)}" if faults else "jitrope works here")
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
    if not folder.is_dir():
        raise JitropeError("the benchmarks are not in the package: run examples/bench in a checkout of the repository")
    sys.argv = ["jitrope bench", *arguments]
    try:
        runpy.run_path(str(folder), run_name="__main__")
    except ModuleNotFoundError as error:
        raise JitropeError(f"the benchmarks need {error.name}: pip install -e '.[bench]'") from error
