"""Spec -> kernel: from memory, else from a cache, else compiled; and what may not be compiled."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from ..base import config
from ..base.config import log
from ..base.errors import CompileError, JitropeError, MissingKernel
from ..base.spec import Spec
from . import compiler, recording
from .cache import KernelCache
from .compiler import Kernel
from .entry import CUBIN, Key
from .render import ingredients, render

compiled: list[str] = []
"""Names of the kernels that this process compiled, in order."""

_kernels: dict[tuple[Spec, int], Kernel] = {}
_build_lock = threading.RLock()
LONGEST_BUILD = 60.0
"""Seconds that a fork waits for a kernel that another thread builds."""


@lru_cache(maxsize=8)
def _cache_at(root: Path, system: tuple[Path, ...], max_bytes: int) -> KernelCache:
    return KernelCache(root, system, max_bytes)


def kernel_cache() -> KernelCache:
    """The caches that the environment names now."""
    return _cache_at(config.cache_dir(), config.system_caches(), config.cache_size())


def _before_fork() -> None:
    """A child has only the thread that forks: what another was importing or compiling would hang there for ever."""
    _build_lock.acquire(timeout=LONGEST_BUILD)


def _after_fork_in_parent() -> None:
    with contextlib.suppress(RuntimeError):  # it was not had in time
        _build_lock.release()


def _after_fork_in_child() -> None:
    """Its lock and what it counts are its own."""
    global _build_lock
    _build_lock = threading.RLock()
    _cache_at.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


def get_kernel(spec: Spec, device: int) -> Kernel:
    """The kernel of a spec on a device: from memory, else from disk, else compiled."""
    kernel = _kernels.get((spec, device))
    if kernel is None:
        recording.note(spec)
        if torch.cuda.is_current_stream_capturing():
            raise JitropeError(
                f"{spec.name} is not loaded yet, and nothing can be loaded while a CUDA graph is "
                "captured; make the same call once before the capture"
            )
        with _build_lock:
            kernel = _kernels.get((spec, device)) or _load(spec, device)
            _kernels[spec, device] = kernel
    return kernel


def arch_of(device: int) -> str:
    """`sm_90` and the like."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


class Cubin(NamedTuple):
    """A spec's cubin: a file's path or its bytes. kept: it is on disk now, or was."""

    path: Path | None
    data: bytes | None
    compiled: bool
    kept: bool


def build(spec: Spec, arch: str, rebuild: bool = False, whole: bool = False) -> Cubin:
    """Make sure that a spec's cubin is cached. What was compiled comes as bytes: they are not read again.

    rebuild: what a cache has is no good. whole: what a call does not read, the text, has to be intact too.

    Raises MissingKernel where it would have to be compiled and that is forbidden, CompileError where it cannot be.
    """
    cache = kernel_cache()
    key = key_of(spec, arch)
    if not rebuild and (found := cache.find(key, whole)) is not None:
        return Cubin(None, found, False, True) if isinstance(found, bytes) else Cubin(found, None, False, True)
    if not config.compile_allowed():
        raise missing_kernel(spec, arch, cache)
    start = time.perf_counter()
    source = render(spec)
    cubin, _ = compiler.compile_source(source, arch, spec=spec.to_dict())
    ms = 1e3 * (time.perf_counter() - start)
    compiled.append(spec.name)
    cache.count(compiled=1, compile_ms=ms)
    if log.isEnabledFor(logging.INFO):
        log.info("compiled %s for %s in %.0f ms: %s", spec.name, arch, ms, cache.explain(key))
    if rebuild:
        cache.discard(key)
    kept = cache.store(key, source.text, cubin, spec.to_dict()) is not None
    return Cubin(None, cubin, True, kept)


def is_cached(spec: Spec, arch: str) -> bool:
    """Whether a cache has a spec's kernel, whole; nothing is changed. CompileError without CuPy."""
    return kernel_cache().holds(key_of(spec, arch))


def key_of(spec: Spec, arch: str) -> Key:
    """What identifies a spec's kernel here; without NVRTC its compiler is "", and any serves.

    Raises CompileError without CuPy, which loads what is found too.
    """
    compiler.import_cupy()
    try:
        version = compiler.compiler_version()
    except CompileError:
        version = ""
    return Key(spec.name, ingredients(spec), compiler.options_for(arch), arch, version)


def missing_kernel(spec: Spec, arch: str, cache: KernelCache) -> MissingKernel:
    """The error of a kernel that is in no cache where nothing may be compiled."""
    fields = spec.to_dict()
    text = shlex.quote(json.dumps({"spec": [fields]}))
    command = f"echo {text} > missing.json && jitrope prewarm --from missing.json --arch {arch}"
    places = ", ".join(map(str, (cache.root, *(layer.path for layer in cache.system))))
    message = (
        f"{spec.name} for {arch} is not in {places}, and compiling is forbidden (JITROPE_NO_COMPILE or "
        f"jitrope.configure). This makes it, where compiling is allowed:\n{command}"
    )
    return MissingKernel(message, fields, arch, command)


def _load(spec: Spec, device: int) -> Kernel:
    arch = arch_of(device)
    try:
        return _load_own(spec, arch, device)
    except compiler.Refused as error:
        virtual = compiler.virtual_arch(arch) if config.compile_allowed() else None
        if virtual is None:
            raise
        _tell_of_ptx(arch, virtual, str(error))
        return _open(build(spec, virtual), spec, device)


def _load_own(spec: Spec, arch: str, device: int) -> Kernel:
    """From a cubin of the device's own architecture."""
    found = build(spec, arch)
    try:
        return _open(found, spec, device)
    except compiler.Refused:
        if found.compiled or not config.compile_allowed():
            raise
        log.warning("the driver refused the cached kernel %s; it is rebuilt", spec.name)
        return _open(build(spec, arch, rebuild=True), spec, device)


_told: set[tuple[str, str]] = set()


def _tell_of_ptx(arch: str, virtual: str, reason: str) -> None:
    if (arch, virtual) not in _told:
        _told.add((arch, virtual))
        log.warning("%s; the driver compiles PTX for %s in its place, at each process's first call", reason, virtual)


def _open(found: Cubin, spec: Spec, device: int) -> Kernel:
    if found.path is not None:
        return Kernel(found.path, spec.entry, device)
    assert found.data is not None
    with cubin_file(found.data) as temporary:
        return Kernel(temporary, spec.entry, device)


@contextlib.contextmanager
def cubin_file(cubin: bytes) -> Iterator[Path]:
    """A cubin as a file for as long as it takes to load it; in memory, where no temporary folder can be written."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="jitrope-")
    except OSError:
        with _memory_file(cubin) as path:
            yield path
        return
    with folder as name:
        path = Path(name) / CUBIN
        try:
            path.write_bytes(cubin)
        except OSError:  # a full disk
            with _memory_file(cubin) as path:
                yield path
        else:
            yield path


@contextlib.contextmanager
def _memory_file(data: bytes) -> Iterator[Path]:
    if not hasattr(os, "memfd_create"):
        raise CompileError("there is neither a temporary folder that can be written nor, as on Linux, a file in memory")
    with open(os.memfd_create("jitrope"), "wb") as file:
        file.write(data)
        file.flush()
        yield Path(f"/proc/self/fd/{file.fileno()}")
