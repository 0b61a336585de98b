"""The checks of `jitrope doctor`: versions, folders and one kernel, each fault with advice; and a cold start."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from .. import __version__, apply_rope
from ..base import config
from ..base.errors import CacheError, CompileError, JitropeError, MissingKernel
from ..jit import compiler, kernels, render
from ..jit.cache import Layer
from ..jit.entry import Entry
from ..plan.options import Options
from ..sources.heads import HEADS
from .prewarm import specs_of, this_versions

ROOM = 1 << 20
"""Bytes that must be free in a kernel cache. A kernel with its source needs a tenth of them."""

ELSEWHERE = "set JITROPE_CACHE_DIR to a folder that you own and can write; until then each process compiles its kernels"
OWNED = "JITROPE_SYSTEM_CACHE must name folders or bundles that exist and only root and you can write, or a digest"
IF_CACHED = "nothing, if the caches have every kernel you need: jitrope cache verify --cold"
CPU = "CPU tensors use plain torch; if there is a GPU, "


@dataclass(frozen=True)
class Check:
    """The result of one check. ok: False for a fault. advice: the remedy, also for a doubtful result."""

    what: str
    ok: bool
    found: str
    advice: str = ""


Found = tuple[bool, str, str]
"""(False for a fault, the finding, the advice or "")."""


def run() -> list[Check]:
    """Run all checks, the kernel last. No error is raised."""
    own, *layers = caches()
    return [
        Check("jitrope", True, f"{__version__}, Python {platform.python_version()}, {platform.system()}"),
        Check("torch", True, f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}"),
        _check("GPU", _gpu),
        _check("compiler", _compiler),
        _check("kernel cache", partial(_cache, own, True)),
        *(_check("system cache", partial(_cache, layer, False)) for layer in layers),
        _check("variables", _variables),
        _check("kernel", _kernel),
    ]


def _check(what: str, look: Callable[[], Found]) -> Check:
    try:
        return Check(what, *look())
    except CompileError as error:
        if not config.compile_allowed():
            return Check(what, True, "not there, and compiling is forbidden", IF_CACHED)
        return Check(what, False, str(error).splitlines()[0])  # of a missing library it ends with the remedy
    except Exception as error:  # every error must be reported
        return Check(what, False, f"{type(error).__name__}: {error}")


def _gpu() -> Found:
    if torch.version.hip:
        text = f"torch is built for ROCm {torch.version.hip}"
        return False, text, "AMD GPUs are not supported; calls need an NVIDIA GPU and a torch built for CUDA"
    if archs := kernels.local_archs():
        return True, ", ".join(f"{torch.cuda.get_device_name(i)} ({arch})" for i, arch in enumerate(archs)), ""
    if not torch.version.cuda:
        return True, "torch is built without CUDA", f"{CPU}install a torch for CUDA"
    return True, "none that torch can use", f"{CPU}check nvidia-smi and CUDA_VISIBLE_DEVICES"


def _compiler() -> Found:
    names = {str(found.metadata["Name"]).lower() for found in importlib.metadata.distributions()}
    wheels = sorted(name for name in names if re.fullmatch(r"cupy(-cuda\w+|-rocm[\w-]+)?", name))
    again = f"pip uninstall -y {' '.join(wheels)} && {compiler.install()}"
    if len(wheels) > 1:
        return False, f"{' and '.join(wheels)} are installed, and their files overwrite each other", again
    archs = sorted({*kernels.local_archs()})
    if not wheels and not archs:
        return True, "CuPy is not installed; needed only to compile kernels (prewarm, bundle write)", compiler.install()
    found, major = f"{compiler.compiler_version()}, for CUDA {compiler.cuda_major()}", compiler.cuda_major()
    for arch in (archs or ["sm_90"]) if config.compile_allowed() else ():
        compiler.compile_source(render.render(specs_of([4, 2], 64)[0]), arch)
        found += f"; a kernel compiles for {arch}"
    if torch.version.cuda and compiler.torch_cuda_major() != major:
        return True, f"{found}; but torch is for CUDA {torch.version.cuda}: the driver must support both", again
    return True, found, ""


def _cache(cache: Layer, own: bool) -> Found:
    good, bad = cache.verify()
    if bad and bad[0][0] == cache.root:
        return False, f"{bad[0][1]}; it is not used", f"chown it, remove it, or {ELSEWHERE}" if own else OWNED
    found = f"{cache.root}, {good} kernels"
    if bad:
        found += f", {len(bad)} damaged, such as {bad[0][0].name} ({bad[0][1]})"
    if not own:
        return not bad, found, "" if good and not bad else "write it again with jitrope bundle write"
    if error := cannot_write(cache.root):
        needed = config.compile_allowed() and not good
        found += f"; it cannot be written ({error.strerror})"
        return not needed, found, ELSEWHERE if needed else IF_CACHED
    return True, found, "nothing: the next call rebuilds a damaged kernel" if bad else ""


def cannot_write(root: Path) -> OSError | None:
    """The error of a write to a kernel cache, or to the folder where the cache would be made; None if it works."""
    try:
        nearest = next(folder for folder in (root, *root.absolute().parents) if os.path.lexists(folder))
        with tempfile.TemporaryFile(dir=nearest) as file:
            file.write(bytes(ROOM))
            file.flush()
    except OSError as error:
        return error
    return None


def _variables() -> Found:
    if names := config.unknown_variables():
        return True, f"{', '.join(names)} is unknown and has no effect", f"jitrope reads {', '.join(config.VARIABLES)}"
    return True, "no unknown JITROPE_*" + ("" if config.compile_allowed() else "; compiling is forbidden"), ""


def _kernel() -> Found:
    device = "cuda" if kernels.local_archs() else "cpu"
    q, k = (torch.randn(1, 9, heads, 64).to(device, torch.bfloat16) for heads in (4, 2))
    angles = torch.rand(9, 32, device=q.device) * 9
    tensors = {"q": q, "k": k, "cos": angles.cos(), "sin": angles.sin()}
    got, want = apply_rope(*tensors.values()), HEADS.on_cpu(tensors, Options(rotary_dim=64)).values()
    if not all(torch.equal(a, b) for a, b in zip(got, want) if a is not None):
        return False, "wrong numbers", "report it, with the output of `jitrope doctor --json`"
    return True, f"a call on the {'GPU' if device == 'cuda' else 'CPU'} gives the reference's bits", ""


def caches() -> list[Layer]:
    """The user's cache and the read-only ones."""
    return [kernels.kernel_cache(), *kernels.kernel_cache().system]


def cold_start() -> tuple[int, list[str]]:
    """Look up every whole kernel of every cache, as a call would. Afterwards this process must not compile.

    Returns:
        The number of kernels that were found, those of this machine's GPUs loaded too; and a line for each kernel that
        would have been compiled, or that the driver refuses. Kernels of another version are left out.
    """
    config.configure(compile=False)
    devices = {arch: device for device, arch in enumerate(kernels.local_archs())}
    good, wrong, entries = 0, list[str](), list[Entry]()
    for cache in caches():
        with contextlib.suppress(CacheError):  # `verify` of the cache reports it
            entries += cache.entries()
    for spec, arch in this_versions((entry.spec, entry.arch) for entry in entries):
        try:
            if arch in devices:
                kernels.get_kernel(spec, devices[arch])
            else:
                kernels.build(spec, arch)
            good += 1
        except JitropeError as error:
            missing = "would be compiled: its templates or its compiler are different"
            reason = missing if isinstance(error, MissingKernel) else error
            wrong.append(f"missing: {spec.name} {arch}: {reason}")
    return good, wrong
