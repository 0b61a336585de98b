"""`jitrope cache` and `jitrope bundle`."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from ..base.errors import CacheError
from . import console
from .console import JSON, examples, print_json, tell, total

cache_app = typer.Typer(
    no_args_is_help=True,
    help="List, check and remove the kernels on disk.",
    epilog=examples("jitrope cache ls", "jitrope cache verify --cold", "jitrope cache prune --older-than 30d"),
)
bundle_app = typer.Typer(
    no_args_is_help=True,
    help="Carry kernels to machines that cannot compile.",
    epilog=examples("jitrope bundle write kernels.tar --arch sm_90", "jitrope bundle load kernels.tar"),
)
BUNDLE = Annotated[Path, typer.Argument(help="A file that `jitrope bundle write` wrote.")]

# ---- cache -------------------------------------------------------------------------------------


@cache_app.command("ls", epilog=examples("jitrope cache ls", "jitrope cache ls --json > run.json"))
def cache_ls(as_json: JSON = False) -> None:
    """List the kernels; with --json as a file for `jitrope prewarm --from`."""
    from ..jit.kernels import kernel_cache

    cache = kernel_cache()
    console.print_entries(cache.entries(), cache.root, as_json)


@cache_app.command("path", epilog=examples("jitrope cache path", 'du -sh "$(jitrope cache path)"'))
def cache_path(as_json: JSON = False) -> None:
    """Print the folder of the kernels; with --json also the read-only caches below it."""
    from ..jit.kernels import kernel_cache

    cache = kernel_cache()
    if as_json:
        print_json({"path": cache.root, "system": [layer.path for layer in cache.system]})
    else:
        tell(cache.root)


@cache_app.command("size", epilog=examples("jitrope cache size", "jitrope cache size --json"))
def cache_size(as_json: JSON = False) -> None:
    """Print how many kernels there are, and their bytes."""
    from ..jit.kernels import kernel_cache

    entries = kernel_cache().entries()
    if as_json:
        print_json({"kernels": len(entries), "bytes": sum(entry.size for entry in entries)})
    else:
        tell(total(entries))


@cache_app.command("verify", epilog=examples("jitrope cache verify", "jitrope cache verify --cold --json"))
def cache_verify(
    cold: Annotated[
        bool, typer.Option("--cold", help="Also look up every kernel in a new process that must not compile.")
    ] = False,
    as_json: JSON = False,
) -> None:
    """Check every kernel of every cache against its checksums; exit code 1 if one is damaged.

    With --cold, exit code 1 too if a kernel would be compiled, or if there is
    none: the kernels of this machine's GPUs are loaded, the others looked up.
    """
    from .verify import cold_start, verify_all

    good, bad = verify_all()
    wrong = [("damaged", f"{path}: {reason}") for path, reason in bad]
    found: dict[str, Any] = {"good": good, "bad": [{"path": path, "reason": reason} for path, reason in bad]}
    lines = [f"{good} good, {len(bad)} damaged"]
    if cold:
        try:
            found["cold"] = looked = cold_start()
            words = "cold start: {loaded} loaded, {checked} looked up, {others} of another version"
            lines.append(words.format(**looked))
            wrong += [("missing", f"{item['name']} {item['arch']}: {item['reason']}") for item in looked["bad"]]
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
        console.say(word, text)
    if wrong:
        raise typer.Exit(1)


@cache_app.command("clear", epilog=examples("jitrope cache clear --dry-run", "jitrope cache clear"))
def cache_clear(dry_run: console.DRY_RUN = False, as_json: JSON = False) -> None:
    """Remove every kernel from your folder; read-only caches stay."""
    from ..jit.kernels import kernel_cache

    cache = kernel_cache()
    removed = cache.clear(dry_run)
    if as_json:
        print_json({"removed": removed, "dry_run": dry_run})
    else:
        tell(f"{removed} kernels {'would be ' * dry_run}removed from {cache.root}")


@cache_app.command("prune", epilog=examples("jitrope cache prune --older-than 30d --dry-run"))
def cache_prune(
    older_than: Annotated[str, typer.Option(help="The age, as 30d, 12h or 45m.")],
    dry_run: console.DRY_RUN = False,
    as_json: JSON = False,
) -> None:
    """Remove the kernels that were compiled longer ago; those loaded from a bundle stay."""
    from ..jit.kernels import kernel_cache

    cache = kernel_cache()
    gone = cache.prune(console.seconds_of(older_than), dry_run)
    if as_json:
        print_json({"removed": console.rows(gone), "bytes": sum(entry.size for entry in gone), "dry_run": dry_run})
    else:
        tell(f"{total(gone)} {'would be ' * dry_run}removed from {cache.root}")


# ---- bundle ------------------------------------------------------------------------------------


@bundle_app.command(
    "write",
    epilog=examples(
        "jitrope bundle write kernels.tar",
        "jitrope bundle write kernels.tar --from run.json --arch sm_90,sm_100",
        "JITROPE_SYSTEM_CACHE=kernels.tar JITROPE_NO_COMPILE=1 python serve.py",
    ),
)
def bundle_write(
    path: Annotated[Path, typer.Argument(help="The file to write, a tar.")],
    file: Annotated[
        Path | None, typer.Option("--from", help="TOML or JSON as for `jitrope prewarm`; default: your cache.")
    ] = None,
    arch: Annotated[
        str, typer.Option(help="Architectures, as sm_80,sm_90; default: as cached, or with --from the GPUs' here.")
    ] = "",
    jobs: console.JOBS = 0,
    dry_run: console.DRY_RUN = False,
    as_json: JSON = False,
) -> None:
    """Write kernels to a file, compiling those that are not cached.

    The file is for JITROPE_SYSTEM_CACHE or `jitrope bundle load`.
    """
    from . import bundle
    from .prewarm import read_calls

    if file is not None:
        kernels = list(itertools.product(read_calls(file), console.architectures(arch)))
    else:
        kernels = _cached()
        if arch:
            kernels = list(itertools.product(dict.fromkeys(spec for spec, _ in kernels), console.architectures(arch)))
    workers = jobs or os.cpu_count() or 1
    console.build_all(kernels, dry_run, as_json, lambda step: bundle.write(path, kernels, workers, step))
    if not dry_run and not as_json:
        console.remark(f"wrote {path}, {console.size_text(path.stat().st_size)}")


def _cached() -> list[tuple[Any, str]]:
    """(spec, arch) of the kernels in the user's own folder, of this version. CacheError: one is damaged."""
    from ..jit.kernels import kernel_cache
    from .prewarm import this_versions

    if bad := kernel_cache().verify()[1]:
        reasons = "\n".join(f"{path}: {reason}" for path, reason in bad)
        raise CacheError(f"these would be left out; remove them, or name the kernels with --from:\n{reasons}")
    entries = kernel_cache().entries()
    specs = this_versions(entry.spec for entry in entries)
    return [(spec, entry.arch) for spec, entry in zip(specs, entries) if spec is not None]


@bundle_app.command("load", epilog=examples("jitrope bundle load kernels.tar", "jitrope bundle load k.tar --dry-run"))
def bundle_load(path: BUNDLE, dry_run: console.DRY_RUN = False, as_json: JSON = False) -> None:
    """Put a bundle's kernels into your cache; all are checked before the first is written."""
    from ..jit.kernels import kernel_cache
    from . import bundle

    loaded = bundle.entries(path) if dry_run else bundle.load(path)
    if as_json:
        print_json({"loaded": console.rows(loaded), "dry_run": dry_run})
    else:
        tell(f"{total(loaded)} {'would be ' * dry_run}put into {kernel_cache().root}")


@bundle_app.command("ls", epilog=examples("jitrope bundle ls kernels.tar", "jitrope bundle ls kernels.tar --json"))
def bundle_ls(path: BUNDLE, as_json: JSON = False) -> None:
    """List a bundle's kernels; exit code 1 if one does not match its digest."""
    from . import bundle

    console.print_entries(bundle.entries(path), path, as_json)
