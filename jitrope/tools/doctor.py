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

from .. import __version__, apply_rope
from ..base import config
from ..base.errors import CacheError, CompileError, JitropeError, MissingKernel
from ..jit import compiler, kernels, render
from ..jit.entry import Entry, untrusted
from ..jit.registry import KINDS
from ..jit.system_cache import SystemLayer
from ..ops import reference
from ..plan.spec import Options
from .prewarm import Call, this_versions

ROOM = 1 << 20
"""Bytes that a kernel cache must have room for: a kernel and its text are a tenth of it."""

REINSTALL = "pip install --force-reinstall --no-deps jitrope"
IF_ALL_CACHED = "nothing, if the kernels that are needed are all there: jitrope cache verify --cold"
WRITE_AGAIN = "a damaged one is written again by jitrope bundle write"


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
        *(_check("system cache", partial(_system, layer)) for layer in kernels.kernel_cache().system),
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
    kinds = tuple(KINDS)
    try:
        files = {name for kind in kinds for name in render._texts(f"{kind}.cu.jinja")}
    except CompileError as error:
        raise Fault(str(error), REINSTALL) from error
    return f"all {len(files)} files, of {len(kinds)} kinds of kernels; they include no CUDA headers"


def _cupy() -> str:
    names = {str(found.metadata["Name"]).lower() for found in importlib.metadata.distributions()}
    wheels = sorted(name for name in names if re.fullmatch(r"cupy(-cuda\w+|-rocm[\w-]+)?", name))
    if len(wheels) > 1:
        raise Fault(
            f"{' and '.join(wheels)} are installed, whose files overwrite each other",
            f"pip uninstall -y {' '.join(wheels)} && {compiler.install()}",
        )
    try:
        version, major = compiler.import_cupy().__version__, compiler.cuda_major()
    except CompileError as error:
        found, advice = compiler.cupy_fault(error.__cause__ or error)
        raise Fault(f"{found}, and no kernel is compiled without", advice) from error
    built_for = f"{version}, for CUDA {major}"
    if torch.version.cuda and int(torch.version.cuda.split(".")[0]) != major:
        raise Note(
            f"{built_for}, but torch is for CUDA {torch.version.cuda}: the driver has to be new enough for both",
            f"pip uninstall -y {' '.join(wheels)} && {compiler.install()}",
        )
    return built_for


def _nvrtc() -> str:
    try:
        compiler.import_cupy()
    except CompileError:
        raise Fault("not looked for: CuPy cannot be imported", "see CuPy") from None
    try:
        version, supported = compiler.nvrtc_version(), compiler.supported_archs()
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
    error = cannot_write(root)
    if error and error.errno == errno.ENOTDIR:
        raise Fault(f"{error.filename} is not a folder", f"remove it, or {elsewhere}")
    if root.exists() and (reason := untrusted(root)):
        mine = f"chmod 700 {root}, if you trust what is in it" if "written" in reason else f"remove {root}"
        raise Fault(f"{root} {reason}; its kernels are not loaded", f"{mine}, or {elsewhere}")
    if error and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        raise Fault(f"{root}: there is no room ({error.strerror})", f"jitrope cache prune, or {elsewhere}") from error
    if error:
        found = f"{root} cannot be written ({error.strerror})"
        if not config.compile_allowed():
            raise Note(f"{found}, and need not: compiling is forbidden", IF_ALL_CACHED) from error
        if good := verify_all(own_only=True)[0]:
            text = f"{found}; its {good} kernels are loaded, and every process compiles the others it needs"
            raise Note(text, IF_ALL_CACHED) from error
        raise Fault(found, elsewhere) from error
    if not root.exists():
        return f"{root}, made on the first call"
    return f"{root}, mode {stat.S_IMODE(root.stat().st_mode):o}"


def cannot_write(root: Path) -> OSError | None:
    """Why a kernel cache in `root` could not keep a kernel, tried in the folder or where it would be made, or None."""
    try:
        nearest = next(folder for folder in (root, *root.absolute().parents) if os.path.lexists(folder))
        if not nearest.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(nearest))
        with tempfile.TemporaryFile(dir=nearest) as file:
            file.write(bytes(ROOM))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error
    return None


def verify_all(own_only: bool = False) -> tuple[int, list[tuple[Path, str]]]:
    """How many kernels are whole, and what is not with the reason, in the user's own folder and the layers below it.

    A folder or bundle of which nothing is used is one item.
    """
    cache = kernels.kernel_cache()
    try:
        good, bad = cache.verify()
    except CacheError as error:
        good, bad = 0, [(cache.root, str(error))]
    for layer in () if own_only else cache.system:
        more, worse = layer.verify()
        good, bad = good + more, bad + worse
    return good, bad


def _some(bad: list[tuple[Path, str]]) -> str:
    """The first two of what is damaged, for one line."""
    return ", ".join(f"{path.name} ({reason})" for path, reason in bad[:2]) + (", ..." if len(bad) > 2 else "")


def _entries() -> str:
    root = kernels.kernel_cache().root
    good, bad = verify_all(own_only=True)
    if bad and bad[0][0] == root:
        raise Note(f"none are loaded: {bad[0][1]}", "see the kernel cache")
    if bad:
        raise Note(
            f"{good} good, {len(bad)} damaged: {_some(bad)}",
            "nothing: a call makes a damaged kernel again, jitrope prewarm its text too; cache verify lists them",
        )
    return f"{good} kernels, none damaged"


def _system(layer: SystemLayer) -> str:
    good, bad = layer.verify()
    if bad and bad[0][0] == layer.path:
        advice = "JITROPE_SYSTEM_CACHE names folders and bundles that are there and that only their owner can write; "
        raise Fault(f"{layer.path} is not used: {bad[0][1]}", advice + WRITE_AGAIN)
    if bad:
        raise Fault(f"{layer.path}, {good} good, {len(bad)} damaged: {_some(bad)}", WRITE_AGAIN)
    if not good:
        raise Note(f"{layer.path}, 0 kernels", "jitrope bundle ls lists a bundle, another version's is written again")
    return f"{layer.path}, {good} kernels"


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
    try:
        got = apply_rope(q, k, angles.cos(), angles.sin())
    except MissingKernel as error:  # only where nothing may be compiled: no bundle has to have this one
        raise Note("not run: its kernel is in no cache, and compiling is forbidden", IF_ALL_CACHED) from error
    want = reference.rope(q, k, angles.cos(), angles.sin(), None, None, None, Options(rotary_dim=64))
    if not all(torch.equal(a, b) for a, b in zip(got, want) if a is not None and b is not None):
        raise Fault("wrong numbers", "report it, with the output of `jitrope doctor --json`")
    if device == "cuda":
        return "a call on the GPU gives the reference's bits"
    if not compiles:
        return "a CPU call gives the reference's bits; no kernel was compiled"
    compiler.compile_source(render.render(Call(6, head_dim=64).specs()[0]), "sm_90")
    return "a CPU call gives the reference's bits, and a kernel compiles for sm_90"


_COLD = "import json; from jitrope.tools.doctor import look_up_all; print(json.dumps(look_up_all()))"


def cold_start() -> dict[str, Any]:
    """`look_up_all` in a fresh process: nothing of this one's memory helps it.

    Raises:
        CacheError: the process failed; its last words.
    """
    done = subprocess.run([sys.executable, "-c", _COLD], capture_output=True, text=True)
    if done.returncode:
        words = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise CacheError(f"the cold start failed: {words[-1]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def look_up_all() -> dict[str, Any]:
    """Ask for every whole kernel of every cache as a call would, in a process that must not compile.

    loaded: on a GPU of this machine; checked: found whole, for an architecture that is not here; bad: those that
    would have been compiled, or that the driver refuses; others: how many are another version's, for which no call
    asks; compiled: how many were, which is none. What is damaged `verify_all` says.
    """
    config.configure(compile=False)
    cache = kernels.kernel_cache()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = {kernels.arch_of(i): i for i in range(count)}
    entries = _own_entries() + [entry for layer in cache.system for entry in layer.entries()]
    loaded, checked, others, bad = 0, 0, 0, []
    for entry, spec in zip(entries, this_versions(entry.spec for entry in entries)):
        if spec is None:
            others += 1
            continue
        try:
            if entry.arch in devices:
                kernels.get_kernel(spec, devices[entry.arch])
                loaded += 1
            else:
                kernels.build(spec, entry.arch)
                checked += 1
        except MissingKernel:
            own = entry.path.parent == cache.root
            reason = cache.explain(kernels.key_of(spec, entry.arch)) if own else "it is made from another source"
            bad.append({"name": entry.name, "arch": entry.arch, "reason": f"would be compiled: {reason}"})
        except JitropeError as error:
            bad.append({"name": entry.name, "arch": entry.arch, "reason": str(error)})
    return {"loaded": loaded, "checked": checked, "bad": bad, "others": others, "compiled": len(kernels.compiled)}


def _own_entries() -> list[Entry]:
    """Those of the user's own folder, if any of them is loaded."""
    cache = kernels.kernel_cache()
    try:
        return [] if untrusted(cache.root) else list(cache.entries())
    except (OSError, CacheError):
        return []
