"""`bench cold`: the first call of a process, with an empty cache and from a warm one."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from .harness import DEVICE
from .report import AS_JSON, SMOKE, Rows, app, show
from .sections import Section, Table, of

ROOT = Path(__file__).parents[2]

_PROCESS = """
import json, sys, time
sys.dont_write_bytecode = False
device, nvrtc = sys.argv[1:]
times, last = {}, time.perf_counter()
def lap(name):
    global last
    now = time.perf_counter()
    times[name], last = now - last, now
import torch
lap("import torch")
import jitrope
lap("import jitrope")
q, k = (torch.randn(1, 64, h, 128, device=device, dtype=torch.bfloat16) for h in (32, 8))
cos = torch.rand(64, 64, device=device)
q + 1
if device == "cuda":
    torch.cuda.synchronize()
    from jitrope.jit import compiler
    last = time.perf_counter()
    compiler.import_cupy()
    lap("import cupy")
    if nvrtc:
        compiler.nvrtc_version()
    lap("load nvrtc")
last = time.perf_counter()
jitrope.apply_rope(q, k, cos, cos)
if device == "cuda":
    torch.cuda.synchronize()
lap("first call")
print(json.dumps(times))
"""

# label: (the cache, "" for one that is empty in every process; NVRTC is loaded before)
CASES = {
    "empty cache": ("", ""),
    "empty cache, NVRTC loaded before": ("", "nvrtc"),
    "from disk": ("filled", ""),
}


@app.command("cold")
def command(smoke: SMOKE = False, as_json: AS_JSON = False) -> None:
    """A process's first call: compiled, from disk; and the time of the imports."""
    show({"cold": lambda: rows(1 if smoke else 5)}, smoke, as_json)


def rows(repeats: int) -> Rows:
    """Medians over fresh processes, in milliseconds; modules are in bytecode, as an installed package's are."""
    found: Rows = []
    with tempfile.TemporaryDirectory() as folder:
        first_call(Path(folder), "filled", "")  # puts the modules' bytecode there, and the kernel of the last row
        for label, (cache, nvrtc) in CASES.items():
            caches = [cache or f"{label} {i}" for i in range(repeats)]
            results = [first_call(Path(folder), each, nvrtc) for each in caches]
            medians = {f"{key} ms": 1e3 * statistics.median(each[key] for each in results) for key in results[0]}
            found.append({"cache": label, **medians})
    return found


def first_call(folder: Path, cache: str, nvrtc: str) -> dict[str, float]:
    """Seconds of a fresh process's imports and first call."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "JITROPE_CACHE_DIR": str(folder / cache), "PYTHONPATH": path}
    command = [sys.executable, "-X", f"pycache_prefix={folder}/bytecode", "-c", _PROCESS, DEVICE, nvrtc]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    times: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return times


# ---- in examples/results/README.md -----------------------------------------------------------------------

LAPS = ("import torch", "import jitrope", "import cupy", "load nvrtc", "first call")
SECTION = Section(
    "The first call of a process",
    """
    Medians over fresh processes, in milliseconds. With an empty cache the first call renders, compiles and stores its
    kernel; "from disk" it loads one that another process stored.
    """,
    "jitrope bench cold",
    (Table("cache", lambda row: str(row["cache"]), {f"{lap}, ms": of(f"{lap} ms") for lap in LAPS}),),
)
