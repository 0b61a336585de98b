"""Spec -> kernel: from memory, else from a cache, else from the compiler."""

from __future__ import annotations

import json
import os
import shlex
import threading
import time
from functools import lru_cache
from typing import NamedTuple

import torch

from ..base import config
from ..base.errors import CompileError, JitropeError, MissingKernel
from ..base.spec import Spec, record_of
from . import compiler, recording
from .cache import KernelCache
from .driver import Kernel, Refused
from .entry import Key
from .render import ingredients, render

compiled: list[str] = []  # names of the kernels that this process compiled, in order

_kernels: dict[tuple[Spec, int], Kernel] = {}
_build_lock = threading.RLock()


_cache_at = lru_cache(maxsize=8)(KernelCache)


def kernel_cache() -> KernelCache:
    """The cache of the current settings."""
    return _cache_at(config.cache_dir(), config.system_caches())


def _renew_locks() -> None:
    """After fork() the child has only the forking thread, so a lock held by another would never be released."""
    global _build_lock
    _build_lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)


def get_kernel(spec: Spec, device: int) -> Kernel:
    """The kernel of a spec on a device: from memory, else from a cache, else from the compiler."""
    kernel = _kernels.get((spec, device))
    if kernel is None:
        recording.note(spec)
        if torch.cuda.is_current_stream_capturing():
            text = "is not loaded yet, and a kernel cannot be loaded while a CUDA graph is captured"
            raise JitropeError(f"{spec.name} {text}; make the same call once before the capture")
        with _build_lock:
            kernel = _kernels.get((spec, device)) or _load(spec, device)
            _kernels[spec, device] = kernel
    return kernel


def arch_of(device: int) -> str:
    """A GPU's architecture, such as "sm_90"."""
    return "sm_" + "".join(map(str, torch.cuda.get_device_capability(device)))


def local_archs() -> list[str]:
    """The architecture of each GPU of this machine. The list is empty if torch can use none, or was built for AMD."""
    if torch.version.hip or not torch.cuda.is_available():
        return []
    return [arch_of(device) for device in range(torch.cuda.device_count())]


class Cubin(NamedTuple):
    """A spec's cubin. compiled: by this call; kept: it is on disk."""

    data: bytes
    compiled: bool
    kept: bool


def build(spec: Spec, arch: str, rebuild: bool = False) -> Cubin:
    """Find a spec's cubin in a cache, or compile and store it. Compiled bytes are not read back from the disk.

    rebuild: compile even if a cache has the kernel, because the driver refused it. The new entry replaces the old one,
        or is found before it.

    Raises CompileError if the kernel cannot be compiled, MissingKernel if compiling is forbidden.
    """
    cache, key, start = kernel_cache(), key_of(spec, arch), time.perf_counter()
    if not rebuild and (found := cache.find(key)) is not None:
        recording.tell(spec, arch, start, "disk")
        return Cubin(found, compiled=False, kept=True)
    if not config.compile_allowed():
        raise missing_kernel(spec, arch, cache)
    start = time.perf_counter()
    source = render(spec)
    cubin, _ = compiler.compile_source(source, arch + spec.features)
    compiled.append(spec.name)
    config.log.info("compiled %s for %s in %.0f ms", spec.name, arch, 1e3 * (time.perf_counter() - start))
    kept = cache.store(key, source.text, cubin, spec.to_dict())
    recording.tell(spec, arch, start, "compiled")
    return Cubin(cubin, compiled=True, kept=kept)


def key_of(spec: Spec, arch: str) -> Key:
    """The identity of a spec's kernel here. Without CuPy or NVRTC its compiler is "", which any compiler matches."""
    try:
        version = compiler.compiler_version()
    except CompileError:
        version = ""
    return Key(spec.name, ingredients(spec), compiler.options_for(arch + spec.features), arch, version)


def missing_kernel(spec: Spec, arch: str, cache: KernelCache) -> MissingKernel:
    """The error for a kernel that is in no cache and may not be compiled."""
    record = shlex.quote(json.dumps(record_of([spec])))
    command = f"echo {record} > missing.json && jitrope prewarm --from missing.json --arch {arch}"
    places = ", ".join(map(str, (cache.root, *(layer.root for layer in cache.system))))
    text = "compiling is forbidden (JITROPE_NO_COMPILE or jitrope.configure). Where compiling is allowed, this command"
    message = f"{spec.name} for {arch} is not in {places}, and {text} makes it:\n{command}"
    return MissingKernel(message, spec.to_dict(), arch, command)


def _load(spec: Spec, device: int) -> Kernel:
    found = build(spec, arch_of(device))
    try:
        return Kernel(found.data, spec.entry, device, spec.shared_bytes)
    except Refused:
        if found.compiled or not config.compile_allowed():
            raise
        config.log.warning("the driver refused the cached kernel %s; it is rebuilt", spec.name)
        return Kernel(build(spec, arch_of(device), rebuild=True).data, spec.entry, device, spec.shared_bytes)
