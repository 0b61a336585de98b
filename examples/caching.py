"""The kernel cache: what is on disk and why, kernels ahead of time, and images that compile nothing.

python examples/caching.py

Each step runs in a temporary folder and is checked. On a GPU, calls ask for kernels. Without one the same steps run up
to the driver; they need CuPy and NVRTC (`pip install cupy-cuda13x nvidia-cuda-nvrtc`). A container needs this, and the
wheel that README.md makes:

    JITROPE_RECORD=run.json python serve.py         # once, where there is a GPU: lists the kernels of the program

    FROM python:3.12-slim AS kernels                # has NVRTC, needs no GPU
    COPY jitrope-0.1.0-py3-none-any.whl run.json ./
    RUN pip install ./jitrope-0.1.0-py3-none-any.whl cupy-cuda13x nvidia-cuda-nvrtc
    RUN jitrope bundle write /kernels.zip --from run.json --arch sm_90,sm_100

    FROM python:3.12-slim                           # the same version of jitrope, without CuPy and NVRTC
    COPY jitrope-0.1.0-py3-none-any.whl ./
    RUN pip install ./jitrope-0.1.0-py3-none-any.whl
    COPY --from=kernels /kernels.zip /opt/kernels.zip
    ENV JITROPE_SYSTEM_CACHE=/opt/kernels.zip JITROPE_NO_COMPILE=1
    RUN jitrope cache verify --cold                 # fails the build if a call would have to compile one of them

`jitrope bundle load kernels.zip` copies the kernels into the image's own cache instead. Where compiling is fine but
slow starts are not, a volume at ~/.cache/jitrope, or at JITROPE_CACHE_DIR, is enough.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import jitrope
from jitrope.base import config
from jitrope.jit import compiler, kernels
from jitrope.tools import cli
from jitrope.tools.prewarm import specs_of

GPU = torch.cuda.is_available()
ARCH = kernels.arch_of(0) if GPU else "sm_90"
FILE, PACKAGE = Path(__file__).resolve(), Path(jitrope.__file__).parent


def call(interleaved: bool = False) -> None:
    """The first call of a program: 32 heads of q, 8 of k. Without a GPU it ends before loading and launching."""
    if GPU:
        q, k = (torch.randn(1, 256, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (32, 8))
        cos, sin = torch.rand(2, 256, 64, device="cuda")
        jitrope.apply_rope(q, k, cos, sin, interleaved=interleaved)
    else:
        pairs = " interleaved" * interleaved
        kernels.build(specs_of([32, 8], call=f"bshd heads q k > rotate cos sin{pairs} > fresh")[0], ARCH)


seen: list[str] = []
jitrope.on_compile(lambda event: seen.append(event.source))


def counts() -> str:
    return f"{seen.count('disk')} found, {seen.count('compiled')} compiled"


def nvrtc() -> str:
    try:
        return ".".join(map(str, compiler.nvrtc_version()))
    except jitrope.CompileError:
        return "none"


def shown(line: str, output: str, **variables: str) -> str:
    """Print a line of shell and its output, and return the output."""
    line = line if len(line) < 120 else f"{line[:60]} ... {line[-60:]}"
    print("$", *(f"{name}={value}" for name, value in variables.items() if name in config.VARIABLES), line)
    print("".join(f"    {text}\n" for text in output.splitlines()), end="")
    return output


def command(line: str) -> str:
    """Run a `jitrope` command in this process, which saves the import of torch, and return its output."""
    output = io.StringIO()
    words, _, file = line.partition(" > ")
    sys.argv = words.split()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), contextlib.suppress(SystemExit):
        cli.main()
    if file:
        Path(file).write_text(output.getvalue())
    return shown(line, "" if file else output.getvalue())


def shell(line: str, **variables: str) -> str:
    """Run a line of shell with these variables, and return its output; `jitrope` and `program` use this Python."""
    functions = f'jitrope() {{ "{sys.executable}" -m jitrope "$@"; }}'
    functions += f'\nprogram() {{ "{sys.executable}" $OPTIONS "{FILE}" call; }}'
    given = {"env": {**os.environ, **variables}, "text": True, "stdout": subprocess.PIPE}
    done = subprocess.run(["sh", "-c", f"exec 2>&1\n{functions}\n{line}"], **given)
    return shown(line, done.stdout, **variables)


def without_nvidia(site: Path) -> dict[str, str]:
    """For a Python that has all packages of this one less NVIDIA's: no NVRTC and no header. Its variables."""
    site.mkdir()
    folders = [Path(path) for path in sys.path if path.endswith("-packages") and Path(path).is_dir()]
    for path in [PACKAGE, *(path for folder in folders for path in folder.iterdir())]:
        if not path.name.startswith("nvidia") and path.suffix != ".pth" and not (site / path.name).exists():
            (site / path.name).symlink_to(path)
    return {"OPTIONS": "-S", "PYTHONPATH": str(site)}


def main(folder: Path) -> None:
    for name in config.VARIABLES:  # the reader's own settings stay out of it
        os.environ.pop(name, None)
    os.environ["JITROPE_CACHE_DIR"] = str(folder / "cache")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(PACKAGE.parent), *sys.path])  # for processes in another folder
    os.chdir(folder)
    cache = kernels.kernel_cache()

    print(f"1. The first call ({ARCH}) renders, compiles, stores, and is recorded.")
    with jitrope.record(folder / "run.json") as specs:
        call()
    print(counts())
    # The folder's name: the kernel's, the architecture, a hash of what it is made from, and one of what compiled it.
    # kernel.cu is the whole text, for reading or compiling by hand; spec.json has the constants and the checksums.
    (entry,) = cache.entries()
    print(entry.path.name)
    for file in sorted(entry.path.iterdir()):
        print(f"    {file.stat().st_size:7d} {file.name}")

    print("2. The key has all that a kernel is made from. It has no time, path or driver, so a kernel is never stale.")
    meta = json.loads((entry.path / "spec.json").read_text())
    for name in ("format", "arch", "options", "compiler", "source"):  # source: a hash, of templates and constants too
        print(f"    {name}: {meta[name]}")
    assert " 0 compiled" in shell("program")  # any process that comes to the same key loads the file

    print("3. Kernels ahead of time, for GPUs that are elsewhere: of a described call, or of a recorded run.")
    command("jitrope prewarm --heads 32,8 --arch sm_80,sm_100")  # both launches of each
    if not specs:  # torch's path, which CPU tensors take, asks for no kernel: list them
        assert not GPU
        command("jitrope cache ls --json > run.json")
    command("jitrope prewarm --from run.json --arch sm_120")

    print("4. One file for images. It needs no compiler there, and the user's own folder stays empty.")
    command(f"jitrope bundle write kernels.zip --from run.json --arch {ARCH}")
    image = {"JITROPE_CACHE_DIR": "image", "JITROPE_SYSTEM_CACHE": "kernels.zip", "JITROPE_NO_COMPILE": "1"}
    if torch.version.cuda is None:
        assert " 0 compiled" in shell("program", **image, **without_nvidia(folder / "site"))
    else:  # torch for CUDA is not imported without NVIDIA's packages: NVRTC is there, and is not asked
        assert " 0 compiled" in shell("program", **image)

    print(
        "5. A forgotten kernel is an error there, not a slow request. The error has the command that makes the kernel."
    )
    jitrope.configure(compile=False)  # the same as JITROPE_NO_COMPILE=1
    try:
        call(interleaved=True)
    except jitrope.MissingKernel as error:
        print(f"    {type(error).__name__}: {str(error).splitlines()[0]}")
        repair = error.command
    shell(repair)
    call(interleaved=True)  # now it is there
    jitrope.configure(compile=None)

    print("6. Every load is checked. A damaged kernel is reported, and made again.")
    cubin = entry.path / "kernel.cubin"
    cubin.write_bytes(cubin.read_bytes()[:-1] + b"x")
    command("jitrope cache verify")
    assert "1 compiled" in shell("program")
    assert not cache.verify()[1]

    print(
        "7. A folder that cannot be written is one warning; kernels stay in memory. (No folder fits below /dev/null.)"
    )
    assert "1 compiled" in shell("program", JITROPE_CACHE_DIR="/dev/null/kernels")

    print("8. Old kernels go when you say so. A year later:")
    for old in cache.entries():
        os.utime(old.path, (time.time() - 365 * 86400,) * 2)
    command("jitrope cache prune --older-than 30d")
    assert not cache.entries()
    print("as expected in each step: yes")


if __name__ == "__main__":
    if sys.argv[1:] == ["call"]:
        call()
        print(f"{counts()}; NVRTC: {nvrtc()}")
    else:
        with tempfile.TemporaryDirectory(prefix="jitrope-example-") as name:
            main(Path(name))
