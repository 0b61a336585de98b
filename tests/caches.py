"""What the tests of kernels on disk share: a key, its entry, and processes that use a cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from jitrope.jit.cache import KernelCache
from jitrope.jit.entry import CUBIN, Key

KEY = Key("rope_x", "ingredients", ("-std=c++17",), "sm_90", "nvrtc 13.0")
DATA = b"\x7fELF cubin"
ROOT = Path(__file__).parent.parent
IMPORTS = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
IMPORT = "from jitrope.jit import kernels; from jitrope.tools.prewarm import specs_of"


def filled(cache: KernelCache, key: Key = KEY) -> Path:
    """Store an entry. Returns its cubin's path."""
    assert cache.store(key, "text", DATA, {"a": 1})
    return cache.root / key.folder / CUBIN


def edit(folder: Path, name: str, value: object) -> None:
    meta = json.loads((folder / "spec.json").read_text())
    (folder / "spec.json").write_text(json.dumps({**meta, name: value}))


def run_in_child(work: Callable[[], None]) -> int:
    """Run `work` in a fork. Returns the exit status, or minus the signal that ended the child."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as error:
            print(f"in the child: {error!r}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


ON_THE_GPU = """
import torch, jitrope
torch.manual_seed(0)
q = torch.randn(1, 64, 4, 128, device="cuda", dtype=torch.bfloat16)
angles = torch.rand(64, 64, device="cuda")
cos, sin = angles.cos(), angles.sin()
def call():
    out, _ = jitrope.apply_rope(q, None, cos, sin)
    torch.cuda.synchronize()
    return out
"""


def on_the_gpu(code: str, cache: Path, **environment: str) -> str:
    """The output of a process that makes calls."""
    given = {**os.environ, "JITROPE_CACHE_DIR": str(cache), "PYTHONPATH": IMPORTS, **environment}
    done = subprocess.run([sys.executable, "-c", ON_THE_GPU + code], capture_output=True, text=True, env=given)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


COUNTED = """
seen = []
jitrope.on_compile(lambda event: seen.append(event.source))
call()
print(seen.count("compiled"), seen.count("disk"))
"""
