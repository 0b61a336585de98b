"""Kernels in a file, for machines that compile nothing: `JITROPE_SYSTEM_CACHE=kernels.tar`, or `load`.

A bundle is a tar of entries with a manifest and a SHA-256 of every file. Its kernels are matched by source (templates,
constants, options, architecture, format), not by compiler, so a machine that uses them needs neither NVRTC nor headers
nor CuPy's compiler: only CuPy's driver part, which loads a cubin. The digests find damage, not malice: a bundle is
code, so take it from where you would take a wheel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..base import arguments
from ..base.errors import CacheError, CompileError, JitropeError
from ..base.spec import Spec
from ..jit import layers
from ..jit.entry import Entry, Read, described, pack
from ..jit.kernels import build, kernel_cache, key_of
from ..jit.render import render
from .prewarm import Built, checked_kernels

__all__ = ["entries", "load", "write"]


def write(
    path: Path, kernels: Iterable[tuple[Spec, str]], jobs: int, done: Callable[[Built], None] = lambda _: None
) -> list[Built]:
    """Write kernels to `path`, compiling those that no cache has; needs no GPU.

    The same kernels give the same bytes, and a bundle is there whole or not at all.

    Args:
        path: the file; its folder must exist.
        kernels: (spec, architecture) of each, as (spec, "sm_90"); specs are of `jitrope.tools.prewarm.specs_of`,
            `jitrope.tools.prewarm.read_calls` or `jitrope.record`. Repeated ones are written once.
        jobs: how many are compiled at a time.
        done: called after each, in any order.

    Returns:
        What became of each kernel, in order.

    Raises:
        InvalidInput: an argument is not of its kind.
        CompileError: a kernel could not be made; nothing is written.
        CacheError: the file cannot be written, or there is nothing to write.
    """
    path = arguments.path("write", "path", path)
    jobs = arguments.whole("write", "jobs", jobs, 0)
    work = list(dict.fromkeys(checked_kernels("write", kernels)))
    if not work:
        raise CacheError("kernels is empty: there is nothing to bundle")

    def one(kernel: tuple[Spec, str]) -> tuple[Built, dict[str, bytes]]:
        result = _built(*kernel)
        done(result[0])
        return result

    with ThreadPoolExecutor(max(1, jobs)) as pool:
        results = list(pool.map(one, work))
    if failed := [built for built, _ in results if built.failed]:
        reasons = "\n".join(f"{item.spec.name} {item.arch}: {item.outcome}" for item in failed)
        raise CompileError(f"{path} is not written, {len(failed)} of {len(results)} kernels are missing:\n{reasons}")
    layers.write_bundle(path, {key_of(*kernel).portable_folder: files for kernel, (_, files) in zip(work, results)})
    return [built for built, _ in results]


def _built(spec: Spec, arch: str) -> tuple[Built, dict[str, bytes]]:
    """Build a kernel; with its entry's files as a cache has them, or as they would be stored."""
    try:
        found = build(spec, arch)
        key = key_of(spec, arch)
        cached = None if found.compiled else kernel_cache().read(key)
        files = cached or pack(key, render(spec).text, found.data, spec.to_dict())
        return Built(spec, arch, "compiled" if found.compiled else "cached"), files
    except JitropeError as error:
        return Built(spec, arch, str(error), failed=True), {}


def load(path: Path) -> list[Entry]:
    """Put a bundle's kernels into the user's cache; returns them.

    Everything is checked before anything is written. In the cache these kernels serve beside any compiler. They take
    the place of kernels that were loaded from another bundle before, and `prune` leaves them alone.

    Args:
        path: the bundle's file.

    Raises:
        CacheError: the file is not a bundle or is damaged, or the cache cannot be written.
    """
    cache = kernel_cache()
    found = _read(arguments.path("load", "path", path))
    for number, (folder, (_, files)) in enumerate(found.items()):
        if not cache.install(folder, files):
            raise CacheError(f"cannot write the kernel cache {cache.root}; {number} kernels of {path} are in it")
    return [described(cache.root / folder, *read) for folder, read in found.items()]


def entries(path: Path) -> list[Entry]:
    """The kernels of a bundle, checked.

    Raises:
        CacheError: the file is not a bundle or is damaged.
    """
    path = arguments.path("entries", "path", path)
    return [described(path / folder, *read) for folder, read in _read(path).items()]


def _read(path: Path) -> dict[str, Read]:
    bundle = layers.Bundle(path)
    return {folder: bundle.read(folder) for folder in bundle.kernels}
