"""A cold start: find every kernel of every cache without compiling."""

from __future__ import annotations

import contextlib
from typing import Any

from ..base import config
from ..base.errors import CacheError, JitropeError, MissingKernel
from ..jit import kernels
from ..jit.entry import Entry, Listing
from .prewarm import this_versions


def caches() -> list[Listing]:
    """The user's cache and the read-only ones."""
    cache = kernels.kernel_cache()
    return [cache, *cache.system]


def cold_start() -> dict[str, Any]:
    """Look up every whole kernel of every cache, as a call would. Afterwards this process must not compile.

    Returns:
        loaded: the number of kernels loaded on a GPU of this machine. checked: the number found for other
        architectures. bad: kernels that would have been compiled, or that the driver refuses. others: the number of
        kernels of another version, which no call uses.
    """
    config.configure(compile=False)
    devices = {arch: device for device, arch in enumerate(kernels.local_archs())}
    found: dict[str, Any] = {"loaded": 0, "checked": 0, "bad": [], "others": 0}
    entries: list[Entry] = []
    for cache in caches():
        with contextlib.suppress(CacheError):  # `verify` of the cache reports it
            entries += cache.entries()
    for entry, spec in zip(entries, this_versions(entry.spec for entry in entries)):
        try:
            if spec is None:
                found["others"] += 1
            elif entry.arch in devices:
                kernels.get_kernel(spec, devices[entry.arch])
                found["loaded"] += 1
            else:
                kernels.build(spec, entry.arch)
                found["checked"] += 1
        except JitropeError as error:
            missing = "would be compiled: its templates or its compiler are different"
            reason = missing if isinstance(error, MissingKernel) else str(error)
            found["bad"].append({"name": entry.name, "arch": entry.arch, "reason": reason})
    return found
