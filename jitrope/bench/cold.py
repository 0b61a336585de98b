"""`jitrope bench cold`: the first call of a process, with an empty cache and from a warm one."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from ..base.config import cache_dir_set_to

_PROCESS = """
import json, sys, time
sys.dont_write_bytecode = False
t0 = time.perf_counter()
import torch
t1 = time.perf_counter()
import jitrope
t2 = time.perf_counter()
from jitrope import compiler
q, k = (torch.randn(1, 64, h, 128, device="cuda", dtype=torch.bfloat16) for h in (32, 8))
cos = torch.rand(64, 64, device="cuda")
q + 1, torch.cuda.synchronize()
t3 = time.perf_counter()
compiler.import_cupy()
t4 = time.perf_counter()
if sys.argv[1] == "nvrtc":
    compiler.nvrtc_version()
t5 = time.perf_counter()
jitrope.apply_rope(q, k, cos, cos)
torch.cuda.synchronize()
t6 = time.perf_counter()
print(json.dumps({"import torch": t1 - t0, "import jitrope": t2 - t1, "import cupy": t4 - t3,
                  "load nvrtc": t5 - t4, "first call": t6 - t5}))
"""


def run(repeats: int = 5) -> list[dict[str, Any]]:
    """Medians over fresh processes, in milliseconds; modules are in bytecode, as an installed package's are."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        _first_call(folder, "filled")  # puts the modules' bytecode there, and the kernel of the last row
        for label, cache, argument in (
            ("empty cache", "empty", ""),
            ("empty cache, NVRTC loaded before", "empty too", "nvrtc"),
            ("from disk", "filled", ""),
        ):
            fresh = cache != "filled"
            results = [_first_call(folder, f"{cache}{i}" if fresh else cache, argument) for i in range(repeats)]
            row: dict[str, Any] = {"cache": label}
            row.update({f"{key} ms": 1e3 * statistics.median(r[key] for r in results) for key in results[0]})
            rows.append(row)
    return rows


def _first_call(folder: str, cache: str, argument: str = "") -> dict[str, float]:
    command = [sys.executable, "-X", f"pycache_prefix={folder}/bytecode", "-c", _PROCESS, argument]
    with cache_dir_set_to(f"{folder}/{cache}"):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result
