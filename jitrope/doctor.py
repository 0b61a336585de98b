"""What `jitrope doctor` looks at, each thing with what to do about it, and the cold start of `jitrope cache verify`."""

from __future__ import annotations

import difflib
import errno
import importlib.metadata
import json
import logging
import os
import platform
import re
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from . import __version__, apply_rope, bundle, compiler, config, kernels, reference, render
from .cache import KernelCache
from .entry import untrusted
from .errors import CacheError, CompileError, JitropeError, MissingKernel
from .prewarm import Call
from .spec import ROPE_KINDS, Options
from .thd_spec import KINDS, spec_from_dict

ROOM = 1 << 20
"""Bytes that a kernel cache must have room for: a kernel and its text are a tenth of it."""

REINSTALL = "pip install --force-reinstall --no-deps jitrope"


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. status: "ok", "note" (works, but look) or "fault"; advice: what to do about it."""

    what: str
    status: str
    found: str
    advice: str = ""


class Fault(Exception):
    """Something is broken: what was found and what to do about it."""

    status = "fault"

    def __init__(self, found: str, advice: str) -> None:
        super().__init__(found)
        self.advice = advice


class Note(Fault):
    """Something that works, or that is only slower, and should be known."""

    status = "note"


def run() -> list[Check]:
    """Every check, the self-test last. None raises."""
    variables = _check("variables", _variables)  # before others read them: what is wrong is said once
    checks = [
        Check("jitrope", "ok", f"{__version__}, Python {platform.python_version()}, {platform.system()}"),
        Check("torch", "ok", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}"),
        _check("GPU", _gpu),
        _check("templates", _templates),
        _check("CuPy", _cupy),
        _check("NVRTC", _nvrtc),
        _check("kernel cache", _cache),
        _check("entries", _entries),
        *(_check("system cache", partial(_system, path)) for path in config.system_caches()),
        variables,
    ]
    compiles = all(check.status != "fault" for check in checks if check.what in ("templates", "CuPy", "NVRTC"))
    return [*checks, _check("self-test", lambda: _self_test(compiles and config.compile_allowed()))]


def _check(what: str, look: Callable[[], str]) -> Check:
    try:
        return Check(what, "ok", look())
    except Fault as fault:
        return Check(what, fault.status, str(fault), fault.advice)
    except ImportError as error:
        return Check(what, "fault", f"{error}", REINSTALL)
    except Exception as error:  # the doctor reports whatever it meets
        return Check(what, "fault", f"{type(error).__name__ * (not isinstance(error, JitropeError))} {error}".strip())


def _gpu() -> str:
    if torch.cuda.is_available():
        names = [f"{torch.cuda.get_device_name(i)} ({kernels.arch_of(i)})" for i in range(torch.cuda.device_count())]
        return ", ".join(names)
    without_gpu = "CPU tensors take the torch reference, kernels can be prewarmed with --arch"
    if not torch.version.cuda:
        raise Note(
            "none that this torch can use: it is built without CUDA",
            f"{without_gpu}; for a GPU install torch for CUDA",
        )
    raise Note(
        "none that torch can see",
        f"{without_gpu}; if there is a GPU, see whether nvidia-smi finds it and what CUDA_VISIBLE_DEVICES says",
    )


def _templates() -> str:
    kinds = (*ROPE_KINDS, *KINDS)
    try:
        files = {name for kind in kinds for name in render._texts(f"{kind}.cu.jinja")}
    except FileNotFoundError as error:
        raise Fault(str(error), REINSTALL) from error
    return f"all {len(files)} files, of {len(kinds)} kinds of kernels; they include no CUDA headers"


def _cupy() -> str:
    names = {str(found.metadata["Name"]).lower() for found in importlib.metadata.distributions()}
    wheels = sorted(name for name in names if re.fullmatch(r"cupy(-cuda\w+|-rocm[\w-]+)?", name))
    if len(wheels) > 1:
        raise Fault(
            f"{' and '.join(wheels)} are installed, whose files overwrite each other",
            f"pip uninstall -y {' '.join(wheels)} && {_install()}",
        )
    try:
        version, major = compiler.import_cupy().__version__, compiler.cuda_major()
    except ImportError as error:
        raise Fault(f"cannot be imported ({error}), and no kernel is compiled without", _install()) from error
    built_for = f"{version}, for CUDA {major}"
    if torch.version.cuda and int(torch.version.cuda.split(".")[0]) != major:
        raise Note(
            f"{built_for}, but torch is for CUDA {torch.version.cuda}: the driver has to be new enough for both",
            f"pip uninstall -y {' '.join(wheels)} && {_install()}",
        )
    return built_for


def _install() -> str:
    """The command that brings CuPy and NVRTC for torch's CUDA."""
    return compiler.install(int((torch.version.cuda or "13").split(".")[0]))


def _nvrtc() -> str:
    try:
        version, supported = compiler.nvrtc_version(), compiler.supported_archs()
    except ImportError:
        raise Fault("not looked for: CuPy is missing", _install()) from None
    except CompileError as error:
        if not config.compile_allowed():
            raise Note("not there, and not needed: compiling is forbidden", "nothing, if all is cached") from error
        raise Fault(
            f"cannot be loaded ({_one_line(error.__cause__)})", compiler.install(compiler.cuda_major())
        ) from error
    for device in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if wrong := compiler.unsupported(kernels.arch_of(device), supported, version):
            raise Fault(*wrong)
    return f"{version[0]}.{version[1]}, for {supported[0]} to {supported[-1]}"


def _one_line(error: BaseException | None) -> str:
    return " ".join(str(error).split())


# ---- the kernel cache ----------------------------------------------------------------------------


def _cache() -> str:
    root = kernels.kernel_cache().root
    elsewhere = "set JITROPE_CACHE_DIR to a folder of your own; until then every process compiles its kernels"
    nearest = next(folder for folder in (root, *root.absolute().parents) if os.path.lexists(folder))
    if not nearest.is_dir():
        raise Fault(f"{nearest} is not a folder", f"remove it, or {elsewhere}")
    try:
        with tempfile.TemporaryFile(dir=nearest) as file:
            file.write(bytes(ROOM))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise Fault(
                f"{root}: there is no room ({error.strerror})", f"jitrope cache prune, or {elsewhere}"
            ) from error
        raise Fault(f"{root} cannot be written ({error.strerror})", elsewhere) from error
    if not root.exists():
        return f"{root}, made on the first call"
    if reason := untrusted(root):
        mine = f"chmod 700 {root}, if you trust what is in it" if "written" in reason else f"remove {root}"
        raise Fault(f"{root} {reason}; its kernels are not loaded", f"{mine}, or {elsewhere}")
    return f"{root}, mode {stat.S_IMODE(root.stat().st_mode):o}"


def _entries() -> str:
    try:
        good, bad = kernels.kernel_cache().verify()
    except CacheError as error:
        raise Note(str(error), "see the kernel cache") from error
    if bad:
        names = ", ".join(f"{path.name} ({reason})" for path, reason in bad[:2]) + (", ..." if len(bad) > 2 else "")
        raise Note(
            f"{good} good, {len(bad)} damaged: {names}",
            "nothing: a damaged kernel is made again on its next use; jitrope cache verify lists all of them",
        )
    return f"{good} kernels, none damaged"


def _system(path: Path) -> str:
    advice = "JITROPE_SYSTEM_CACHE names folders and bundles that exist and that only root and you can write"
    try:
        if reason := untrusted(path):
            raise Fault(f"{path} {reason}; it is not used", advice)
        found = bundle.entries(path) if path.is_file() else list(KernelCache(path).entries())
    except OSError as error:
        raise Fault(f"{path} cannot be read ({error.strerror})", advice) from error
    except CacheError as error:
        raise Fault(str(error), "write it again: jitrope bundle write") from error
    return f"{path}, {len(found)} kernels"


# ---- the environment -----------------------------------------------------------------------------


class _Collect(logging.Handler):
    """The messages of jitrope's log, in place of stderr."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def _variables() -> str:
    before, collect = list(config.log.handlers), _Collect()
    config.log.handlers = [collect]
    try:
        for read in (config.set_up_logging, config.compile_allowed, config.cache_size):
            read()  # says on the log what it cannot read
    finally:
        config.log.handlers = before
    found, advice = list(collect.messages), ["set it to what it may be, or not at all"] if collect.messages else []
    for name in config.unknown_variables():
        found.append(f"{name} is unknown and has no effect")
        likely = difflib.get_close_matches(name, config.VARIABLES, 1, 0.8)
        advice.append(f"{name} may be {likely[0]}" if likely else f"jitrope reads {', '.join(config.VARIABLES)}")
    if found:
        raise (Fault if collect.messages else Note)("; ".join(found), "; ".join(dict.fromkeys(advice)))
    return "nothing unknown in JITROPE_*" + ("" if config.compile_allowed() else "; compiling is forbidden")


# ---- running something ---------------------------------------------------------------------------


def _self_test(compiles: bool) -> str:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k = (torch.randn(1, 9, heads, 64).to(device, torch.bfloat16) for heads in (4, 2))
    angles = torch.rand(9, 32, device=device) * 9
    got = apply_rope(q, k, angles.cos(), angles.sin())
    want = reference.rope(q, k, angles.cos(), angles.sin(), None, None, None, Options(rotary_dim=64))
    if not all(torch.equal(a, b) for a, b in zip(got, want) if a is not None and b is not None):
        raise Fault("wrong numbers", "report it, with the output of `jitrope doctor --json`")
    if device == "cuda":
        return "a call on the GPU gives the reference's bits"
    if not compiles:
        return "a CPU call gives the reference's bits; no kernel was compiled"
    compiler.compile_source(render.render(Call(6, head_dim=64).specs()[0]), "sm_90")
    return "a CPU call gives the reference's bits, and a kernel compiles for sm_90"


_COLD = "import json; from jitrope.doctor import look_up_all; print(json.dumps(look_up_all()))"


def cold_start() -> dict[str, Any]:
    """`look_up_all` in a fresh process: nothing of this one's memory helps it."""
    done = subprocess.run([sys.executable, "-c", _COLD], capture_output=True, text=True)
    if done.returncode:
        raise CacheError(f"the cold start failed: {done.stderr.strip()}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def look_up_all() -> dict[str, Any]:
    """Ask for every kernel of every cache as a call would, in a process that must not compile.

    loaded: on a GPU of this machine; checked: found whole, for an architecture that is not here; bad: those that
    would have been compiled, or that the driver refuses; compiled: how many were, which is none.
    """
    config.configure(compile=False)
    cache = kernels.kernel_cache()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = {kernels.arch_of(i): i for i in range(count)}
    entries = list(cache.entries())
    for layer in cache.system:
        entries += bundle.entries(layer.path) if layer.path.is_file() else KernelCache(layer.path).entries()
    loaded, checked, bad = 0, 0, []
    for entry in entries:
        try:
            spec = spec_from_dict(entry.spec)
            if entry.arch in devices:
                kernels.get_kernel(spec, devices[entry.arch])
                loaded += 1
            else:
                kernels.build(spec, entry.arch)
                checked += 1
        except MissingKernel:
            reason = cache.explain(kernels.key_of(spec, entry.arch))
            bad.append({"name": entry.name, "arch": entry.arch, "reason": f"would be compiled: {reason}"})
        except JitropeError as error:
            bad.append({"name": entry.name, "arch": entry.arch, "reason": str(error)})
    return {"loaded": loaded, "checked": checked, "bad": bad, "compiled": len(kernels.compiled)}
