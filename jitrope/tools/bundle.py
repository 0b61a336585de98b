"""Kernels in a file, for machines that compile nothing: `JITROPE_SYSTEM_CACHE=kernels.tar`, or `load`.

A bundle is a tar of entries with a manifest and a SHA-256 of every file. Its kernels are matched by source (templates,
constants, options, architecture, format), not by compiler, so a machine that uses them needs neither NVRTC nor headers
nor CuPy's compiler: only CuPy's driver part, which loads a cubin. The digests find damage, not malice: a bundle is
code, so take it from where you would take a wheel.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..base import arguments
from ..base.errors import CacheError, CompileError, JitropeError
from ..base.spec import Spec
from ..jit import layers
from ..jit.cache import KernelCache
from ..jit.entry import Entry, described, pack
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
    if os.path.isdir(path):
        raise CacheError(f"cannot write the bundle {path}: it is a folder")

    def one(kernel: tuple[Spec, str]) -> tuple[Built, dict[str, bytes]]:
        built, files = _files_of(*kernel)
        done(built)
        return built, files

    with ThreadPoolExecutor(max(1, jobs)) as pool:
        results = list(pool.map(one, work))
    if failed := [built for built, _ in results if built.failed]:
        reasons = "\n".join(f"{item.spec.name} {item.arch}: {item.outcome}" for item in failed)
        raise CompileError(f"{path} is not written, {len(failed)} of {len(results)} kernels are missing:\n{reasons}")
    layers.write_bundle(path, {key_of(*kernel).portable_folder: files for kernel, (_, files) in zip(work, results)})
    return [built for built, _ in results]


def _files_of(spec: Spec, arch: str) -> tuple[Built, dict[str, bytes]]:
    """Build a kernel; its entry's files as a cache has them, or as they would be stored."""
    try:
        found = build(spec, arch)
        key = key_of(spec, arch)
        files = None if found.compiled else kernel_cache().read(key)
        files = files or pack(key, render(spec).text, found.data, spec.to_dict())
        return Built(spec, arch, "compiled" if found.compiled else "cached"), files
    except JitropeError as error:
        return Built(spec, arch, str(error), failed=True), {}


def load(path: Path, into: KernelCache | None = None) -> list[Entry]:
    """Put a bundle's kernels into a cache, by default the user's; returns them.

    Everything is checked before anything is written. In the cache these kernels serve beside any compiler. They take
    the place of kernels that were loaded from another bundle before, and `prune` leaves them alone.

    Args:
        path: the bundle's file.
        into: the cache.

    Raises:
        CacheError: the file is not a bundle, is damaged, has anything else in it, or the cache cannot be written.
    """
    path = arguments.path("load", "path", path)
    if into is not None and not isinstance(into, KernelCache):
        arguments.refuse("load", "into", into, "a KernelCache, or None")
    cache = kernel_cache() if into is None else into
    bundle = layers.Bundle(path)
    for folder in bundle.kernels:
        bundle.read(folder)
    loaded: list[Entry] = []
    for folder in bundle.kernels:
        meta, files = bundle.read(folder)
        if not cache.install(folder, files, replace=True):
            raise CacheError(f"cannot write the kernel cache {cache.root}; {len(loaded)} kernels of {path} are in it")
        loaded.append(described(cache.root / folder, meta, files))
    return loaded


def entries(path: Path) -> list[Entry]:
    """The kernels of a bundle, checked.

    Raises:
        CacheError: the file is not a bundle, is damaged, or has anything else in it.
    """
    path = arguments.path("entries", "path", path)
    bundle = layers.Bundle(path)
    return [described(path / folder, *bundle.read(folder)) for folder in bundle.kernels]
