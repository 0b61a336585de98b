"""Run a rendered kernel on the CPU: g++, the shim, ASan and UBSan."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch

from jitrope.jit.render import Source

HERE = Path(__file__).parent
SHIM = HERE / "shim.h"
FLAGS = (
    "-std=c++20", "-O0", "-g1", "-ffp-contract=off", "-fno-strict-aliasing", "-mf16c", "-mfma", "-pthread", "-w",
    "-fsanitize=address,undefined", "-fPIC", "-fno-gnu-unique", "-fvisibility=hidden",
    # ASan's checks are calls, and UBSan's end in an illegal instruction, whose line ASan reports: the code is smaller.
    "--param", "asan-instrumentation-with-call-threshold=0", "-fsanitize-undefined-trap-on-error",
    # ASan sees each access through such a pointer. To check the pointers too takes a seventh of a build.
    "-fno-sanitize=null,object-size,pointer-overflow", "-pipe",
)  # fmt: skip
LINK = ("-shared", "-nodefaultlibs")
"""The process that loads a kernel has the libraries: to look for its names in them takes a fifth of a build."""
OPTIONS = "detect_leaks=0:handle_sigill=2"
"""ASan's: leaks are torch's, and pytest's own handler must not take the signal of UBSan."""
DAYS = 14
"""What no test used for so long is deleted."""
asked = cache(partial(subprocess.check_output, stderr=subprocess.STDOUT, text=True))
"""What a command says, such as g++ of itself."""


@cache
def folder() -> Path:
    """The user's folder of built kernels, for all test runs."""
    caches = os.environ.get("XDG_CACHE_HOME")
    found = (Path(caches) if caches else Path.home() / ".cache") / "jitrope-tests"
    found.mkdir(mode=0o700, parents=True, exist_ok=True)
    for file in found.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process deletes it too
            if file.stat().st_mtime < time.time() - DAYS * 86400:
                file.unlink()
    return found


def gcc(flags: tuple[str, ...], files: Sequence[Path], code: str = "") -> Path:
    """What g++ makes of files, and of a kernel's code. It is built only once for its texts, flags and g++.

    It is installed in one step, so that other processes see all of it or nothing.
    """
    assert shutil.which("g++"), "the kernels' CPU tests need g++"
    texts = [SHIM.read_text(), code, *(file.read_text() if file.suffix else file.name for file in files)]
    made = folder() / hashlib.sha256(repr((asked(("g++", "-v")), FLAGS, flags, texts)).encode()).hexdigest()[:32]
    data = b""
    with contextlib.suppress(FileNotFoundError):
        data = made.read_bytes()
        os.utime(made)  # its use is noted
    if hashlib.sha256(data[:-32]).digest() != data[-32:]:  # it ends with the digest of its other bytes
        with tempfile.TemporaryDirectory() as own:
            kernel, part = Path(own, "kernel.cpp"), Path(own, "part")
            kernel.write_text(code)
            sources = [*files, *[kernel] * bool(code)]
            command = ["g++", *FLAGS, *flags, "-include", str(SHIM), *map(str, sources), "-o", str(part)]
            environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
            assert done.returncode == 0, done.stderr[-4000:]
            data = part.read_bytes()
        with tempfile.NamedTemporaryFile(dir=folder(), delete=False) as file:
            file.write(data + hashlib.sha256(data).digest())
        os.chmod(file.name, 0o700)
        os.replace(file.name, made)
    return made


def build(source: Source) -> Path:
    """A kernel as a library: its `run` launches it once."""
    call = f"[](const void* p) {{ {source.entry}(*static_cast<const Params*>(p)); }}"
    launcher = gcc(("-c", "-O1"), [HERE / "runtime.cpp"])
    return gcc(LINK, [launcher], f"{source.text}\nconst Built built{{sizeof(Params), {call}}};\n")


def run(
    source: Source, grid: tuple[int, ...], block: int, tensors: list[torch.Tensor | None], words: list[int]
) -> None:
    """Run a kernel whose parameters are the addresses of `tensors`, then `words`; writes the tensors."""
    given = [x for x in tensors if x is not None]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in given}
    region = {address: number for number, address in enumerate(storages)}
    parameters = []
    for x in tensors:
        at = [-1, 0] if x is None else [region[x.untyped_storage().data_ptr()], x.storage_offset() * x.element_size()]
        parameters += at
    parameters += [x for word in words for x in (-1, word)]
    sizes = [x.nbytes() for x in storages.values()]
    header = [*(*grid, 1)[:3], block, len(sizes), *sizes, len(parameters) // 2, *parameters]
    views = [torch.empty(0, dtype=torch.uint8).set_(x).numpy() for x in storages.values()]
    with tempfile.NamedTemporaryFile() as file:
        file.write(np.array(header, dtype=np.int64).tobytes())
        for view in views:
            file.write(view.tobytes())
        file.flush()
        environment = {**os.environ, "ASAN_OPTIONS": OPTIONS}
        command = [gcc(("-ldl",), [HERE / "main.cpp"]), build(source), file.name]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr[-4000:]
        data = Path(file.name).read_bytes()
    at = 0
    for view in views:
        view[:] = np.frombuffer(data, np.uint8, len(view), at)
        at += len(view)
