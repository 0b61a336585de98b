"""The examples run as a reader runs them, and say what they checked; on a CPU they print no times."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from . import fresh
from .devices import slow

ROOT = Path(__file__).parent.parent
YES, NO = re.compile(r"\byes\b"), re.compile(r"\bNO\b|\d ms\b|\d x\b|\d tokens/s")
"""What an example checked, and what it must not say: that a check fails and, on a CPU, times and factors."""
MODEL = ["diffusion_pipeline.py", "--model"]
COMMANDS = [*([name] for name in ("quickstart.py", "layouts_and_tables.py", "packed_training.py", "serving.py"))]
COMMANDS += [["attention.py"], ["new_kernel.py"]]
SLOW = [*([*MODEL, name] for name in ("qwen", "flux", "wan")), ["caching.py"], ["transformers_trainer.py"]]


@pytest.mark.parametrize("command", [*COMMANDS, *map(slow, SLOW)], ids=lambda command: f"{command[0]} {command[-1]}")
def test_example(command: list[str], tmp_path: Path) -> None:
    path = ROOT / "examples" / command[0]
    if "diffusion" in command[0]:
        command = [*command, "--out", str(tmp_path)]
    done = fresh.python(str(path), *command[1:], CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert YES.search(done.stdout)
    assert not NO.search(done.stdout)
    if "diffusion" in command[0]:
        assert done.stdout.count("of the same bits: yes") == 2  # latents and pixels
        assert [path.read_bytes()[:4] for path in tmp_path.iterdir()] == [b"\x89PNG"]
    if "serving" in command[0]:
        assert done.stdout.count("its formula's results: yes") == 6
        assert "of the plain model's: yes" in done.stdout
    if command[0] in ("attention.py", "transformers_trainer.py"):
        assert done.stdout.count(": yes") == 5
    if "caching" in command[0]:
        assert "$ jitrope bundle write kernels.zip" in done.stdout  # a line of the Dockerfile
        assert "2 good, 0 damaged; cold start: 2 found, 0 missing" in done.stdout  # in the image
        assert ("NVRTC: none" in done.stdout) == (torch.version.cuda is None)
        for said in ("MissingKernel", "2 good, 1 damaged", "3 kernels removed", 'kernels_total{source="compiled"} 4'):
            assert said in done.stdout
    if "new_kernel" in command[0]:
        assert done.stdout.count(": compiled, ") == done.stdout.count(": cached, ") == 3
        assert done.stdout.count("the same bits as plain torch: yes") == 4  # by g++; the GPU's are not shown here


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def on_processes(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, which starts others."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [[], TORCHRUN], ids=["alone", "torchrun"])
def test_context_parallel(launcher: list[str]) -> None:
    """On two processes, started by itself and by torchrun; it compares with one process under both masks."""
    done = on_processes(*launcher, str(ROOT / "examples" / "context_parallel.py"))
    assert "on 2 ranks (cpu" in done.stdout
    assert done.stdout.count(": yes") == 2  # both masks give one process's output and gradients
    differ = [float(number) for number in re.findall(r"output and 5 gradients .*: yes\n.*, (\S+) of", done.stdout)]
    assert len(differ) == 2
    assert 0 < max(differ) < 1e-5
    assert done.stdout.count("100 rows, ") == 2 * 2
    assert not NO.search(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "cp"), [([], 2), ([], 1), (TORCHRUN, 2)], ids=["cp", "dp", "torchrun"])
def test_train_context_parallel(launcher: list[str], cp: int) -> None:
    """On two processes, which share a batch or have one each."""
    done = on_processes(*launcher, str(ROOT / "examples" / "train_context_parallel.py"), "--cp", str(cp))
    assert f"dp {2 // cp}, cp {cp} on cpu" in done.stdout
    assert done.stdout.count(": yes") == 2  # gradients, and the loss falls
    assert not NO.search(done.stdout)


def test_every_example_is_run() -> None:
    ran = {command[0] for command in COMMANDS + SLOW} | {"context_parallel.py", "train_context_parallel.py"}
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == ran
