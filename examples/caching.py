"""The kernel cache: what is on disk and why, an image that compiles nothing, and kernels as metrics.

python examples/caching.py

Each step runs in a temporary folder and is checked. Step 3 runs the lines of examples/Dockerfile that begin with
jitrope. On a GPU, calls ask for kernels. Without one the same steps run up to the driver; they need CuPy and NVRTC
(`pip install cupy-cuda13x nvidia-cuda-nvrtc`).

Where compiling is fine but slow starts are not, a volume at ~/.cache/jitrope, or at JITROPE_CACHE_DIR, is enough.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
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

# ---- for a metrics system: the kernels that this process compiled, or read from a cache ------------------------------
# A warm server counts none: alert if "compiled" grows, and log event.call, the text of the call that needed the kernel.
count, seconds = Counter(), Counter()


def observe(event: jitrope.KernelEvent) -> None:
    """In the thread that needs the kernel, before its launch."""
    count[event.source] += 1
    seconds[event.source] += event.seconds


def metrics() -> str:
    """In Prometheus' text format."""
    lines = [f'jitrope_kernels_total{{source="{source}"}} {number}' for source, number in count.items()]
    lines += [f'jitrope_kernel_seconds_total{{source="{source}"}} {total:.3f}' for source, total in seconds.items()]
    return "\n".join(lines) + "\n"


jitrope.on_compile(observe)
# ----------------------------------------------------------------------------------------------------------------------


def call(interleaved: bool = False) -> None:
    """The first call of a program: 32 heads of q, 8 of k. Without a GPU it ends before loading and launching."""
    if GPU:
        q, k = (torch.randn(1, 256, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (32, 8))
        cos, sin = torch.rand(2, 256, 64, device="cuda")
        jitrope.apply_rope(q, k, cos, sin, interleaved=interleaved)
    else:
        pairs = " interleaved" * interleaved
        kernels.build(specs_of([32, 8], call=f"bshd heads q k > rotate cos sin{pairs} > fresh")[0], ARCH)


def indented(text: str) -> None:
    print("".join(f"    {line}\n" for line in text.splitlines()), end="")


def command(line: str, exit_code: int = 0) -> str:
    """Run a `jitrope` command in this process, which saves the import of torch, and return its output."""
    output, code = io.StringIO(), 0
    words, _, file = line.partition(" > ")
    sys.argv = words.split()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
    print("$", line)
    if file:
        Path(file).write_text(output.getvalue())
    else:
        indented(output.getvalue())
    assert code == exit_code, (code, output.getvalue())
    return output.getvalue()


def nvrtc() -> str:
    try:
        return ".".join(map(str, compiler.nvrtc_version()))
    except jitrope.CompileError:
        return "none"


def without_nvidia(site: Path) -> dict[str, str]:
    """For a Python that has all packages of this one less NVIDIA's: no NVRTC and no header. Its variables."""
    site.mkdir()
    folders = [Path(path) for path in sys.path if path.endswith("-packages") and Path(path).is_dir()]
    for path in [PACKAGE, *(path for folder in folders for path in folder.iterdir())]:
        if not path.name.startswith("nvidia") and path.suffix != ".pth" and not (site / path.name).exists():
            (site / path.name).symlink_to(path)
    return {"PYTHONPATH": str(site)}


def image(verify: str) -> None:
    """What runs in the image: the last stage's command, and the program."""
    command(verify)
    call()
    print(metrics() + f"NVRTC: {nvrtc()}")


def main(folder: Path) -> None:
    for name in config.VARIABLES:  # the reader's own settings stay out of it
        os.environ.pop(name, None)
    os.environ["JITROPE_CACHE_DIR"] = str(folder / "cache")
    os.chdir(folder)
    cache = kernels.kernel_cache()

    print(f"1. The first call ({ARCH}) renders, compiles, stores, and is recorded.")
    with jitrope.record("run.json") as specs:
        call()
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

    print("3. The Dockerfile: kernels of the recorded run, here for a GPU that is elsewhere too, go into one file.")
    if not specs:  # torch's path, which CPU tensors take, asks for no kernel: list them
        assert not GPU
        command("jitrope cache ls --json > run.json")
    lines = re.findall(r"^RUN (jitrope .*)", FILE.with_name("Dockerfile").read_text(), re.MULTILINE)
    *first_stage, verify = (line.replace("$ARCH", f"{ARCH},sm_100").replace(" /", " ") for line in lines)
    for line in first_stage:
        command(line)
    print("   The image has no compiler, and the user's own folder stays empty.")
    own = {"JITROPE_CACHE_DIR": "image", "JITROPE_SYSTEM_CACHE": "kernels.zip", "JITROPE_NO_COMPILE": "1"}
    # torch for CUDA is not imported without NVIDIA's packages: then NVRTC is there, and is not asked.
    paths, options = {"PYTHONPATH": os.pathsep.join([str(PACKAGE.parent), *sys.path])}, []
    if torch.version.cuda is None:
        paths, options = without_nvidia(folder / "site"), ["-S"]
    words = {"env": {**os.environ, **own, **paths}, "text": True, "stdout": subprocess.PIPE, "check": True}
    output = subprocess.run([sys.executable, *options, FILE, "image", verify], **words).stdout
    indented(output)
    assert 'total{source="disk"}' in output
    assert "compiled" not in output
    assert not Path("image").exists()

    print("4. A forgotten kernel is an error there, not a slow request. The error has the command that builds it.")
    jitrope.configure(compile=False)  # the same as JITROPE_NO_COMPILE=1
    try:
        call(interleaved=True)
    except jitrope.MissingKernel as error:
        print(f"    {type(error).__name__}: {str(error).splitlines()[0]}")
        echo, prewarm = error.command.split(" && ")
    jitrope.configure(compile=None)
    subprocess.run(echo, shell=True, check=True)  # writes missing.json
    command(prewarm)
    call(interleaved=True)  # now it is there

    print("5. Every load is checked. A damaged kernel is reported, and made again.")
    cubin = entry.path / "kernel.cubin"
    cubin.write_bytes(cubin.read_bytes()[:-1] + b"x")
    command("jitrope cache verify", exit_code=1)
    assert "1 compiled" in command(f"jitrope prewarm --from run.json --arch {ARCH}")
    assert not cache.verify()[1]

    print("6. Old kernels go when you say so. A year later:")
    for old in cache.entries():
        os.utime(old.path, (time.time() - 365 * 86400,) * 2)
    command("jitrope cache prune --older-than 30d")
    assert not cache.entries()

    print("7. A metrics system reads these lines:")
    indented(metrics())
    print("as expected in each step: yes")


if __name__ == "__main__":
    if sys.argv[1:2] == ["image"]:
        image(sys.argv[2])
    else:
        with tempfile.TemporaryDirectory(prefix="jitrope-example-") as name:
            main(Path(name))
