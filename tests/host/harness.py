"""Run a rendered kernel on the CPU: g++, the shim, ASan and UBSan."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
from functools import cache
from pathlib import Path

import numpy as np
import torch

from jitrope.jit.render import Source

HERE = Path(__file__).parent
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


@cache
def folder() -> Path:
    """The folder of built kernels that the processes of a test run share; set by `tests/conftest.py`."""
    given = os.environ.get("TEST_HOST_BUILDS")
    return Path(given) if given else Path(tempfile.mkdtemp(prefix="jitrope-host-"))


def gcc(arguments: list[str], made: Path) -> Path:
    """Run g++, and install its result in one step, so that other processes see all of it or nothing."""
    compiler = shutil.which("g++")
    assert compiler, "the kernels' CPU tests need g++"
    part = made.with_name(f"{made.name}.{os.getpid()}.{threading.get_ident()}")
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run([compiler, *arguments, "-o", str(part)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    part.replace(made)
    return made


@cache
def built(name: str, *more: str) -> Path:
    """Build once what kernels need: the object that launches them, and a program that runs a library."""
    text = "".join((HERE / file).read_text() for file in ("shim.h", name))
    made = folder() / hashlib.sha256(text.encode()).hexdigest()[:16]
    return made if made.exists() else gcc([*FLAGS, *more, str(HERE / name)], made)


@cache
def libraries() -> tuple[str, ...]:
    """What a process must load at its start, before a kernel that is a shared library: kernels name none (LINK)."""
    names = ("libasan.so", "libstdc++.so")
    return tuple(subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip() for name in names)


def build(source: Source) -> Path:
    """A kernel as a library: its `run` launches it once."""
    call = f"[](const void* p) {{ {source.entry}(*static_cast<const Params*>(p)); }}"
    text = f"{source.text}\nconst Built built{{sizeof(Params), {call}}};\n"
    made = folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    if not made.exists():
        code = made.with_suffix(f".{os.getpid()}.{threading.get_ident()}.cpp")
        code.write_text(text)
        launcher = built("runtime.cpp", "-c", "-O1")
        gcc([*FLAGS, *LINK, "-include", str(HERE / "shim.h"), str(code), str(launcher)], made)
        code.unlink()
    return made


def run(
    source: Source,
    grid: tuple[int, int],
    block: int,
    tensors: list[torch.Tensor | None],
    words: list[int],
) -> None:
    """Run a kernel whose parameters are the addresses of `tensors`, then `words`; writes the tensors."""
    storages: list[torch.UntypedStorage] = []
    parameters = []
    for tensor in tensors:
        if tensor is None:
            parameters += [-1, 0]
            continue
        storage = tensor.untyped_storage()
        known = [i for i, other in enumerate(storages) if other.data_ptr() == storage.data_ptr()]
        if not known:
            storages.append(storage)
        region = known[0] if known else len(storages) - 1
        parameters += [region, tensor.storage_offset() * tensor.element_size()]
    for word in words:
        parameters += [-1, word]
    header = [*grid, block, len(storages), *(s.nbytes() for s in storages), len(parameters) // 2, *parameters]
    views = [torch.empty(0, dtype=torch.uint8).set_(s).numpy() for s in storages]
    with tempfile.NamedTemporaryFile(dir=folder()) as file:
        file.write(np.array(header, dtype=np.int64).tobytes())
        for view in views:
            file.write(view.tobytes())
        file.flush()
        environment = {**os.environ, "ASAN_OPTIONS": OPTIONS}
        command = [built("main.cpp", "-ldl"), build(source), file.name]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr[-4000:]
        data = Path(file.name).read_bytes()
    at = 0
    for view in views:
        view[:] = np.frombuffer(data, np.uint8, len(view), at)
        at += len(view)
