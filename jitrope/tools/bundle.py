"""Kernels in a file, for machines that compile nothing: `JITROPE_SYSTEM_CACHE=kernels.tar` or `load`.

A bundle is a tar of entries with a manifest and a SHA-256 of every file. Its kernels are found by what they are made
from (templates, constants, options, architecture, format), not by what compiler made them, so where they are used
neither NVRTC nor a header nor CuPy's compiler is needed: only CuPy's driver part, which loads a cubin. The digests
find damage, not malice: a bundle is code, take it from where you would take a wheel.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..base import arguments
from ..base.errors import CacheError, CompileError, JitropeError
from ..base.spec import Spec
from ..jit import archive
from ..jit.cache import KernelCache
from ..jit.entry import Entry, listed, pack
from ..jit.kernels import build, kernel_cache, key_of
from ..jit.render import render
from .prewarm import Built, checked_kernels


def write(
    path: Path, kernels: Iterable[tuple[Spec, str]], jobs: int, done: Callable[[Built], None] = lambda _: None
) -> list[Built]:
    """Write kernels to `path`, compiling those that no cache has; needs no GPU.

    The same kernels give the same bytes, and a bundle is there whole or not at all.

    Args:
        path: the file; its folder has to be there.
        kernels: (spec, architecture) of each, as (spec, "sm_90"); specs are of `jitrope.tools.prewarm.Call.specs`,
            `jitrope.tools.prewarm.read_calls` or `jitrope.record`. What comes twice is written once.
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
    cache = kernel_cache()

    def one(item: tuple[Spec, str]) -> tuple[Built, str, dict[str, bytes]]:
        spec, arch = item
        files: dict[str, bytes] | None = None
        name = ""
        try:
            found = build(spec, arch)
            key = key_of(spec, arch)
            name = key.portable_folder
            if not found.compiled and (files := cache.read(key)) is None:  # its text is damaged, or it went meanwhile
                found = build(spec, arch, rebuild=True)
            if files is None:
                assert found.data is not None
                files = pack(key, render(spec).text, found.data, spec.to_dict())
            built = Built(spec, arch, "compiled" if found.compiled else "cached")
        except JitropeError as error:
            built = Built(spec, arch, str(error), failed=True)
        done(built)
        return built, name, files or {}

    with ThreadPoolExecutor(max(1, jobs)) as pool:
        results = list(pool.map(one, work))
    if failed := [built for built, _, _ in results if built.failed]:
        reasons = "\n".join(f"{item.spec.name} {item.arch}: {item.outcome}" for item in failed)
        raise CompileError(f"{path} is not written, {len(failed)} of {len(results)} kernels are missing:\n{reasons}")
    archive.write(path, {name: files for _, name, files in results})
    return [built for built, _, _ in results]


def load(path: Path, into: KernelCache | None = None) -> list[Entry]:
    """Put a bundle's kernels into a cache, by default the user's; returns which they are.

    All of it is checked before anything is written. In the cache they serve beside any compiler, in place of those of
    a bundle that was loaded before, and pruning leaves them alone.

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
    found = archive.Archive(path)
    for _ in found.read_all():
        pass
    loaded: list[Entry] = []
    for folder, meta, files in found.read_all():
        if not cache.install(folder, files, replace=True):
            raise CacheError(f"cannot write the kernel cache {cache.root}; {len(loaded)} kernels of {path} are in it")
        loaded.append(_entry(cache.root / folder, meta, files))
    return loaded


def entries(path: Path) -> list[Entry]:
    """What is in a bundle, checked.

    Raises:
        CacheError: the file is not a bundle, is damaged, or has anything else in it.
    """
    path = arguments.path("entries", "path", path)
    return [_entry(path / folder, meta, files) for folder, meta, files in archive.Archive(path).read_all()]


def _entry(path: Path, meta: dict[str, object], files: dict[str, bytes]) -> Entry:
    size = sum(map(len, files.values()))
    return listed(path, meta, size)
