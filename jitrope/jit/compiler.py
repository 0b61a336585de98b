"""Source -> cubin. The only file that imports CuPy.

NVRTC is called through CuPy's bindings, not through its compiler, because the bindings need no GPU and no driver.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from ..base.config import cupy_import_environment
from ..base.errors import CompileError
from .render import Source

PACKAGES = {12: ("cupy-cuda12x", "nvidia-cuda-nvrtc-cu12"), 13: ("cupy-cuda13x", "nvidia-cuda-nvrtc")}
"""The packages of CuPy and NVRTC by CUDA's major version, as in the extras `cuda12` and `cuda13`."""

_failed: Exception | None = None
"""The error of the first import of CuPy. A second import in the same process would raise other, misleading errors."""

_refused: dict[tuple[str, str, tuple[str, ...]], str] = {}
"""The messages of the sources that did not compile, by text, architecture and options."""


@lru_cache(maxsize=1)
def import_cupy() -> Any:
    """Import CuPy with the parts used here. This happens when a kernel is first looked for, not with jitrope.

    Raises:
        CompileError: CuPy is missing or broken. The message ends with ": " and the remedy.
    """
    global _failed
    try:
        if _failed is not None:
            raise _failed
        with cupy_import_environment():
            import cupy

            _ = cupy.__version__, cupy.cuda.driver, cupy.cuda.nvrtc
    except Exception as error:  # an incompatible library or extension module can raise any error
        missing = isinstance(error, ModuleNotFoundError) and error.name == "cupy"
        _failed, cause = None if missing else error, error
        while isinstance(cause.__cause__, Exception):  # CuPy wraps the original error in many lines
            cause = cause.__cause__
        fault = f"cannot be imported ({type(cause).__name__}: {' '.join(str(cause).split())})"
        remedy = install() if missing else f"{install()} --force-reinstall, and start Python again"
        raise CompileError(f"jitrope compiles through CuPy, which {fault}: {remedy}") from error
    return cupy


@lru_cache(maxsize=1)
def _nvrtc() -> Any:
    nvrtc = import_cupy().cuda.nvrtc
    try:
        nvrtc.getVersion()
    except Exception as error:  # the error of CuPy's loader, of any type
        reason = " ".join(str(error).split())
        raise CompileError(f"NVRTC cannot be loaded ({reason}); install it: {install(cuda_major())}") from error
    return nvrtc


def install(major: int | None = None) -> str:
    """The command that installs CuPy and NVRTC for a major version of CUDA, or the nearest; by default torch's.

    It names packages that exist in every index. No message may name an extra of jitrope, which an index may not have.
    """
    wanted = torch_cuda_major() if major is None else major
    return "pip install " + " ".join(PACKAGES[min(max(PACKAGES), max(min(PACKAGES), wanted))])


def torch_cuda_major() -> int:
    """The major version of the CUDA that torch was built for; 13 if torch was built without CUDA."""
    return int((torch.version.cuda or "13").split(".")[0])


@lru_cache(maxsize=1)
def compiler_version() -> str:
    """The versions of CuPy and of the NVRTC that is loaded, which compiles. Raises CompileError if there is none."""
    return f"cupy {import_cupy().__version__}, nvrtc {'.'.join(map(str, nvrtc_version()))}"


def cuda_major() -> int:
    """The major version of the CUDA that CuPy was built for."""
    return int(import_cupy().cuda.driver.get_build_version()) // 1000


def nvrtc_version() -> tuple[int, int]:
    """NVRTC's own (major, minor)."""
    major, minor = _nvrtc().getVersion()
    return int(major), int(minor)


def unsupported(arch: str, supported: Sequence[str], version: tuple[int, int]) -> str | None:
    """The fault and the remedy if an NVRTC of this version cannot compile for `arch`, or None."""
    if arch.rstrip("af") in supported:
        return None
    newer, older = install(version[0] + 1), install(version[0] - 1)
    fault = f"NVRTC {version[0]}.{version[1]} compiles for {', '.join(supported)}, not for {arch}"
    return f"{fault}; for a newer architecture {newer} --upgrade; for an older one {older}"


def options_for(arch: str) -> tuple[str, ...]:
    """NVRTC's options for an architecture such as "sm_90": no fast-math and no flush to zero.

    A product and a sum are contracted only where a template uses an intrinsic for it. `-minimal` leaves out what no
    template uses, such as textures, and takes an eighth less time.
    """
    return "-std=c++17", f"-arch={arch}", "-minimal"


def compile_source(source: Source, arch: str, extra_options: tuple[str, ...] = ()) -> tuple[bytes, str]:
    """Compile a source to (cubin, the compiler's log). This needs neither a GPU nor a driver."""
    wanted = source.text, arch, extra_options
    if wanted in _refused:  # another compile would fail too, and keep the source again
        raise CompileError(_refused[wanted])
    nvrtc = _nvrtc()
    program = nvrtc.createProgram(source.text, f"{source.name}.cu", (), ())
    try:
        nvrtc.compileProgram(program, options_for(arch) + extra_options)
        # CuPy's getCUBIN treats a cubin as a C string and drops the last byte, which is 0.
        return nvrtc.getCUBIN(program) + b"\0", nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError as error:
        if wrong := unsupported(arch, [f"sm_{number}" for number in nvrtc.getSupportedArchs()], nvrtc_version()):
            raise CompileError(f"{source.name}: {wrong}") from error
        lines = [f"{source.name} for {arch}: {error}", nvrtc.getProgramLog(program).strip()]
        _refused[wanted] = "\n".join([*lines, f"source: {_keep(source)}"])
        raise CompileError(_refused[wanted]) from error
    finally:
        nvrtc.destroyProgram(program)


def _keep(source: Source) -> str:
    """Keep a source that does not compile. Returns the file's path, or the reason why it could not be written."""
    try:
        with tempfile.NamedTemporaryFile("w", prefix=f"{source.name[:80]}-", suffix=".cu", delete=False) as file:
            file.write(source.text)
    except OSError as error:
        return f"not kept ({error})"
    return file.name
