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
from typing import Any

import torch

from .. import __version__, apply_rope
from ..base import config
from ..base.errors import CacheError, CompileError, JitropeError, MissingKernel
from ..jit import compiler, kernels, render
from ..jit.entry import Entry, Listing
from ..ops import reference
from ..plan.options import Options
from .prewarm import specs_of, this_versions

ROOM = 1 << 20
"""Bytes that must be free in a kernel cache. A kernel with its source needs a tenth of them."""

ELSEWHERE = "set JITROPE_CACHE_DIR to a folder that you own and can write; until then each process compiles its kernels"
AFTER_CUPY = "first do what the line of CuPy says"
IF_CACHED = "nothing, if the caches have every kernel you need: jitrope cache verify --cold"


@dataclass(frozen=True)
class Check:
    """The result of one check. ok: False for a fault. advice: the remedy, also for a doubtful result."""

    what: str
    ok: bool
    found: str
    advice: str = ""


class Fault(Exception):
    """A fault: the finding and the advice."""


Found = tuple[str, str]
"""(finding, advice or "")."""


def run() -> list[Check]:
    """Run all checks, the kernel last. No error is raised."""
    built_for = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda or 'none'}"
    return [
        _check("jitrope", _jitrope),
        Check("torch", True, f"{torch.__version__}, {built_for}"),
        _check("GPU", _gpu),
        _check("CuPy", _cupy),
        _check("NVRTC", _nvrtc),
        _check("kernel cache", _cache),
        *(_check("system cache", partial(_layer, layer)) for layer in kernels.kernel_cache().system),
        _check("variables", _variables),
        _check("kernel", _kernel),
    ]


def _check(what: str, look: Callable[[], Found]) -> Check:
    try:
        return Check(what, True, *look())
    except Fault as fault:
        return Check(what, False, *fault.args)
    except Exception as error:  # every error must be reported
        return Check(what, False, f"{type(error).__name__}: {error}")


def _jitrope() -> Found:
    found, other = f"{__version__}, Python {platform.python_version()}, {platform.system()}", Path("jitrope")
    if other.is_dir() and not other.samefile(Path(__file__).parents[1]):
        return f"{found}; this folder has another folder jitrope", "run Python elsewhere: it would import that folder"
    return found, ""


def _gpu() -> Found:
    if torch.version.hip:
        text = f"torch is built for ROCm {torch.version.hip}"
        raise Fault(text, "AMD GPUs are not supported; calls need an NVIDIA GPU and a torch built for CUDA")
    if archs := kernels.local_archs():
        return ", ".join(f"{torch.cuda.get_device_name(i)} ({arch})" for i, arch in enumerate(archs)), ""
    if not torch.version.cuda:
        return "torch is built without CUDA", "CPU tensors use plain torch; if there is a GPU, install a torch for CUDA"
    advice = "CPU tensors use plain torch; if there is a GPU, check nvidia-smi and CUDA_VISIBLE_DEVICES"
    return "none that torch can use", advice


def _cupy() -> Found:
    names = {str(found.metadata["Name"]).lower() for found in importlib.metadata.distributions()}
    wheels = sorted(name for name in names if re.fullmatch(r"cupy(-cuda\w+|-rocm[\w-]+)?", name))
    again = f"pip uninstall -y {' '.join(wheels)} && {compiler.install()}"
    if len(wheels) > 1:
        raise Fault(f"{' and '.join(wheels)} are installed, and their files overwrite each other", again)
    try:
        version, major = compiler.import_cupy().__version__, compiler.cuda_major()
    except CompileError as error:
        fault = _with_remedy(error)
        if not config.compile_allowed():
            return "not there, and not needed: compiling is forbidden", IF_CACHED
        if compiler.without_cupy() == compiler.MISSING and not kernels.local_archs():
            return "not installed; needed only to compile kernels (prewarm, bundle write)", fault.args[1]
        raise fault from error
    if torch.version.cuda and compiler.torch_cuda_major() != major:
        text = f"{version}, for CUDA {major}, but torch is for CUDA {torch.version.cuda}: the driver must support both"
        return text, again
    return f"{version}, for CUDA {major}", ""


def _nvrtc() -> Found:
    if reason := compiler.without_cupy():
        return f"not checked: {reason}", AFTER_CUPY
    try:
        version, supported = compiler.nvrtc_version(), compiler.supported_archs()
    except CompileError as error:
        if not config.compile_allowed():
            return "not there, and not needed: compiling is forbidden", IF_CACHED
        raise _with_remedy(error) from error
    for arch in kernels.local_archs():
        if wrong := compiler.unsupported(arch, supported, version):
            raise Fault(*wrong)
    return f"{version[0]}.{version[1]}, for {supported[0]} to {supported[-1]}", ""


def _with_remedy(error: CompileError) -> Fault:
    """The fault of a missing library, whose message ends with a colon and the remedy."""
    found, _, advice = str(error).rpartition(": ")
    return Fault(found, advice)


def _cache() -> Found:
    cache = kernels.kernel_cache()
    good, bad, found = _verified(cache, f"make it yours (chown), remove it, or {ELSEWHERE}")
    if error := cannot_write(cache.root):
        found += f"; it cannot be written ({error.strerror})"
        if config.compile_allowed() and not good:
            raise Fault(found, ELSEWHERE)
        return found, IF_CACHED
    return found, "nothing: the next call rebuilds a damaged kernel" if bad else ""


def _layer(layer: Listing) -> Found:
    advice = "JITROPE_SYSTEM_CACHE must name existing folders or bundles that only their owner can write"
    good, bad, found = _verified(layer, advice)
    if bad:
        raise Fault(found, "write it again with jitrope bundle write")
    return found, "" if good else "write it again: it has no kernels of this version"


def _verified(place: Listing, advice: str) -> tuple[int, int, str]:
    """(number of whole kernels, of damaged ones, both as text). Raises Fault if the folder or bundle cannot be used."""
    good, bad = place.verify()
    if bad and bad[0][0] == place.root:
        raise Fault(f"{bad[0][1]}; it is not used", advice)
    found = f"{place.root}, {good} kernels"
    if bad:
        found += f", {len(bad)} damaged, such as {bad[0][0].name} ({bad[0][1]})"
    return good, len(bad), found


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
    if unknown := config.unknown_variables():
        return f"{', '.join(unknown)} is unknown and has no effect", f"jitrope reads {', '.join(config.VARIABLES)}"
    return "no unknown JITROPE_*" + ("" if config.compile_allowed() else "; compiling is forbidden"), ""


def _kernel() -> Found:
    device = "cuda" if kernels.local_archs() else "cpu"
    without_cupy = compiler.without_cupy()
    if without_cupy and device == "cuda" and config.compile_allowed():
        return f"not checked: {without_cupy}", AFTER_CUPY
    q, k = (torch.randn(1, 9, heads, 64).to(device, torch.bfloat16) for heads in (4, 2))
    angles = torch.rand(9, 32, device=device) * 9
    try:
        got = apply_rope(q, k, angles.cos(), angles.sin())
        tensors = {"q": q, "k": k, "cos": angles.cos(), "sin": angles.sin()}
        want = reference.rope(tensors, Options(rotary_dim=64)).values()
        if not all(torch.equal(a, b) for a, b in zip(got, want) if a is not None):
            raise Fault("wrong numbers", "report it, with the output of `jitrope doctor --json`")
        if device == "cuda":
            return "a call on the GPU gives the reference's bits", ""
        if without_cupy or not config.compile_allowed():
            reason = f": {without_cupy}" if without_cupy else ""
            return f"a CPU call gives the reference's bits; no kernel was compiled{reason}", ""
        compiler.compile_source(render.render(specs_of(heads=[4, 2], head_dim=64)[0]), "sm_90")
        return "a CPU call gives the reference's bits, and a kernel compiles for sm_90", ""
    except MissingKernel:
        return "not run: its kernel is in no cache, and compiling is forbidden", IF_CACHED
    except CompileError as error:
        raise Fault(str(error).splitlines()[0], "") from error


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
