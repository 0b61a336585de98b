"""Run a rendered kernel on the CPU: g++, the shim, ASan and UBSan."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import torch

from jitrope.render import Source

HERE = Path(__file__).parent
FLAGS = (
    "-std=c++20", "-O1", "-g1", "-ffp-contract=off", "-fno-strict-aliasing", "-mf16c", "-mfma", "-pthread", "-w",
    "-fsanitize=address,undefined", "-fno-sanitize-recover=all",
)  # fmt: skip

# Whether the threads of a block meet, where that is not always so: a word of the template, or never.
COLLECTIVES = {
    "jitrope_rope": "TOGETHER",
    "jitrope_thd_rows": "SEARCHES",
    "jitrope_thd_tables": "false",
    "jitrope_cp_segment_rows": "false",
}


@cache
def folder() -> Path:
    """Where this process keeps what it built."""
    return Path(tempfile.mkdtemp(prefix="jitrope-host-"))


@cache
def build(source: Source) -> Path:
    """The executable of a kernel."""
    digest = hashlib.sha256(source.text.encode()).hexdigest()[:16]
    program = folder() / digest
    text = f'#include "shim.h"\n{source.text}\n#define KERNEL {source.entry}\n#include "main.h"\n'
    code = program.with_suffix(".cpp")
    code.write_text(text)
    compiler = shutil.which("g++")
    assert compiler, "the kernels' CPU tests need g++"
    defines = [f"-DJITROPE_COLLECTIVES={COLLECTIVES.get(source.entry, 'true')}"]
    done = subprocess.run(
        [compiler, *FLAGS, *defines, f"-I{HERE}", str(code), "-o", str(program)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return program


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
        environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
        done = subprocess.run([str(build(source)), file.name], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr[-4000:]
        data = Path(file.name).read_bytes()
    at = 0
    for view in views:
        view[:] = np.frombuffer(data, np.uint8, len(view), at)
        at += len(view)
