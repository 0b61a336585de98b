"""`jitrope cache verify`: checksums of every cache, and a cold start that must not compile."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from ..base import config
from ..base.errors import CacheError, JitropeError, MissingKernel
from ..jit import kernels
from ..jit.cache import KernelCache
from ..jit.entry import Entry
from ..jit.layers import Layer
from .prewarm import this_versions


def verify_all() -> tuple[int, list[tuple[Path, str]]]:
    """How many kernels of all caches are whole, and the damaged ones with the reason.

    A folder or bundle that is rejected as a whole is one item.
    """
    found = [place.verify() for place in _places()]
    return sum(good for good, _ in found), [item for _, bad in found for item in bad]


def cold_start() -> dict[str, Any]:
    """`look_up_all` in a fresh process, which has nothing in memory.

    Raises:
        CacheError: the process failed, with its last line.
    """
    code = "import json; from jitrope.tools.verify import look_up_all; print(json.dumps(look_up_all()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise CacheError(f"the cold start failed: {lines[-1]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def look_up_all() -> dict[str, Any]:
    """Ask for every whole kernel of every cache as a call would, in a process that must not compile.

    Returns:
        loaded: kernels loaded on a GPU of this machine; checked: kernels found for another architecture; bad: kernels
        that would have been compiled, or that the driver refuses; others: kernels of another version, which no call
        asks for.
    """
    config.configure(compile=False)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = {kernels.arch_of(i): i for i in range(count)}
    found: dict[str, Any] = {"loaded": 0, "checked": 0, "bad": [], "others": 0}
    entries: list[Entry] = []
    for place in _places():
        with contextlib.suppress(CacheError):  # `verify_all` reports it
            entries += place.entries()
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
            missing = "would be compiled: it is made from other templates or by another compiler"
            reason = missing if isinstance(error, MissingKernel) else str(error)
            found["bad"].append({"name": entry.name, "arch": entry.arch, "reason": reason})
    return found


def _places() -> list[KernelCache | Layer]:
    cache = kernels.kernel_cache()
    return [cache, *cache.system]
