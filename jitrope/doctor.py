"""What `jitrope doctor` looks at."""

from __future__ import annotations

import os
import platform
import stat
from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import __version__, apply_rope, compiler, reference, runtime
from .cache import untrusted
from .errors import JitropeError
from .prewarm import Call
from .render import render
from .spec import Options


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    what: str
    ok: bool
    found: str


def run() -> list[Check]:
    """Every check, the self-test last. None raises."""
    checks = [
        Check("jitrope, Python", True, f"{__version__}, {platform.python_version()}"),
        Check("torch", True, f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}"),
        _gpu(),
    ]
    checks += [_check("CuPy and NVRTC", _compilers), _check("kernel cache", _cache)]
    checks += [Check("CUDA headers", True, "not needed: kernels include none"), _check("self-test", _self_test)]
    return checks


def _check(what: str, look: Callable[[], str]) -> Check:
    try:
        return Check(what, True, look())
    except ImportError as error:
        return Check(what, False, runtime.missing_cupy(str(error)))
    except (JitropeError, OSError, AssertionError) as error:
        return Check(what, False, str(error))


def _gpu() -> Check:
    if not torch.cuda.is_available():
        return Check("GPU", True, "none: CPU tensors take the torch reference, kernels can be prewarmed with --arch")
    names = [f"{torch.cuda.get_device_name(i)} ({runtime.arch_of(i)})" for i in range(torch.cuda.device_count())]
    return Check("GPU", True, ", ".join(names))


def _compilers() -> str:
    found = compiler.versions()
    archs = compiler.supported_archs()
    if torch.cuda.is_available() and runtime.arch_of(0) not in archs:
        raise JitropeError(f"NVRTC {found['nvrtc']} compiles for {', '.join(archs)}, not {runtime.arch_of(0)}")
    return f"CuPy {found['cupy']}, NVRTC {found['nvrtc']} for {archs[0]} to {archs[-1]}"


def _cache() -> str:
    root = runtime.kernel_cache().root
    nearest = root
    while not nearest.exists():
        nearest = nearest.parent
    if not os.access(nearest, os.W_OK):
        raise JitropeError(f"{root} cannot be written; set JITROPE_CACHE_DIR, or kernels are compiled by every process")
    if root.exists() and (reason := untrusted(root)):
        raise JitropeError(f"{root} {reason}; its kernels are not loaded")
    mode = f"mode {stat.S_IMODE(root.stat().st_mode):o}" if root.exists() else "made on the first call"
    good, bad = runtime.kernel_cache().verify()
    return f"{root}, {mode}, {good} kernels, {len(bad)} damaged"


def _self_test() -> str:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k = (torch.randn(1, 9, heads, 64).to(device, torch.bfloat16) for heads in (4, 2))
    angles = torch.rand(9, 32, device=device) * 9
    got = apply_rope(q, k, angles.cos(), angles.sin())
    want = reference.rope(q, k, angles.cos(), angles.sin(), None, None, None, Options(rotary_dim=64))
    assert all(torch.equal(a, b) for a, b in zip(got, want) if a is not None and b is not None), "wrong numbers"
    if device == "cuda":
        return "a call on the GPU gives the reference's bits"
    compiler.compile_source(render(Call(6, head_dim=64).specs()[0]), "sm_90")
    return "a CPU call gives the reference's bits, and a kernel compiles for sm_90"
