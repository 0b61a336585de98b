"""What `jitrope doctor` looks at: versions, folders and one kernel, each with the advice that repairs it."""

from __future__ import annotations

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
from ..base.errors import CompileError, MissingKernel
from ..jit import compiler, kernels, render
from ..jit.cache import KernelCache
from ..jit.layers import Layer
from ..ops import reference
from ..plan.spec import Options
from .prewarm import specs_of

ROOM = 1 << 20
"""Bytes that must be free in a kernel cache: a kernel and its text take a tenth of that."""

ELSEWHERE = "set JITROPE_CACHE_DIR to a folder that you own and can write; until then each process compiles its kernels"
IF_CACHED = "nothing, if every kernel that is needed is there: jitrope cache verify --cold"


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. ok: False for a fault; advice: what to do, also where a look is worth it."""

    what: str
    ok: bool
    found: str
    advice: str = ""


class Fault(Exception):
    """Something is broken: what was found, and what to do about it."""

    def __init__(self, found: str, advice: str) -> None:
        super().__init__(found)
        self.advice = advice


Found = tuple[str, str]
"""(what was found, advice or "")."""


def run() -> list[Check]:
    """Every check, the kernel last. None of them raises."""
    return [
        Check("jitrope", True, f"{__version__}, Python {platform.python_version()}, {platform.system()}"),
        Check("torch", True, f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}"),
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
        return Check(what, False, str(fault), fault.advice)
    except Exception as error:  # the doctor must report whatever it meets
        return Check(what, False, f"{type(error).__name__}: {error}")


def _gpu() -> Found:
    if torch.cuda.is_available():
        found = [f"{torch.cuda.get_device_name(i)} ({kernels.arch_of(i)})" for i in range(torch.cuda.device_count())]
        return ", ".join(found), ""
    found_none = "none that torch can use" + (": it is built without CUDA" if not torch.version.cuda else "")
    return found_none, "CPU tensors use plain torch; if there is a GPU, look at nvidia-smi and CUDA_VISIBLE_DEVICES"


def _cupy() -> Found:
    names = {str(found.metadata["Name"]).lower() for found in importlib.metadata.distributions()}
    wheels = sorted(name for name in names if re.fullmatch(r"cupy(-cuda\w+|-rocm[\w-]+)?", name))
    again = f"pip uninstall -y {' '.join(wheels)} && {compiler.install()}"
    if len(wheels) > 1:
        raise Fault(f"{' and '.join(wheels)} are installed, and their files overwrite each other", again)
    try:
        version, major = compiler.import_cupy().__version__, compiler.cuda_major()
    except CompileError as error:
        found, advice = compiler.cupy_fault(error.__cause__ or error)
        raise Fault(f"{found}; without it no kernel is compiled", advice) from error
    if torch.version.cuda and compiler.torch_cuda_major() != major:
        text = f"{version}, for CUDA {major}, but torch is for CUDA {torch.version.cuda}: the driver must support both"
        return text, again
    return f"{version}, for CUDA {major}", ""


def _nvrtc() -> Found:
    try:
        version, supported = compiler.nvrtc_version(), compiler.supported_archs()
    except CompileError as error:
        if not config.compile_allowed():
            return "not there, and not needed: compiling is forbidden", IF_CACHED
        reason, _, advice = str(error).rpartition(": ")
        raise Fault(reason, advice) from error
    for device in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if wrong := compiler.unsupported(kernels.arch_of(device), supported, version):
            raise Fault(*wrong)
    return f"{version[0]}.{version[1]}, for {supported[0]} to {supported[-1]}", ""


def _cache() -> Found:
    cache = kernels.kernel_cache()
    good, bad, found = _verified(cache, cache.root, f"chmod 700 it, remove it, or {ELSEWHERE}")
    if error := cannot_write(cache.root):
        found += f"; it cannot be written ({error.strerror})"
        if config.compile_allowed() and not good:
            raise Fault(found, ELSEWHERE)
        return found, IF_CACHED
    return found, "nothing: the next call makes a damaged kernel again" if bad else ""


def _layer(layer: Layer) -> Found:
    advice = "JITROPE_SYSTEM_CACHE must name folders and bundles that exist and that only their owner can write"
    good, bad, found = _verified(layer, layer.path, advice)
    if bad:
        raise Fault(found, "jitrope bundle write it again")
    return found, "" if good else "write it again: it has no kernels of this version"


def _verified(place: KernelCache | Layer, path: Path, advice: str) -> tuple[int, int, str]:
    """(whole kernels, damaged ones, the two in words). Fault: the place as a whole is not used."""
    good, bad = place.verify()
    if bad and bad[0][0] == path:
        raise Fault(f"{path} is not used: {bad[0][1]}", advice)
    damaged = [f"{name.name} ({reason})" for name, reason in bad[:1]] + ["..."] * (len(bad) > 1)
    return good, len(bad), f"{path}, {good} kernels" + (f", {len(bad)} damaged: {', '.join(damaged)}" if bad else "")


def cannot_write(root: Path) -> OSError | None:
    """The error of writing to a kernel cache, tried in the folder or in the one where it would be made, or None."""
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
    device = "cuda" if torch.cuda.is_available() else "cpu"
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
        if not config.compile_allowed():
            return "a CPU call gives the reference's bits; no kernel was compiled", ""
        compiler.compile_source(render.render(specs_of(heads=[4, 2], head_dim=64)[0]), "sm_90")
        return "a CPU call gives the reference's bits, and a kernel compiles for sm_90", ""
    except MissingKernel:
        return "not run: its kernel is in no cache, and compiling is forbidden", IF_CACHED
    except CompileError as error:
        raise Fault(str(error).splitlines()[0], "") from error
