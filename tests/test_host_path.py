"""GPU tests also run on the CPU, through the real launch path (`tests/host/backend.py`)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from .host import backend

ROOT = Path(__file__).parent.parent
FILES = [
    "gpu gpu_thd mean_squares row_scales",
    "packed_norm packed_bias swizzled fp4_cache transformers stages presets",
    "quantize hadamard q_scale unrotated shifts learned serving_fused same_bits",
    "rope out pages ulysses latent latent_cache packed_cache",
]
OPTIONS = ["-v", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", "not test_stages or short"]


@pytest.mark.slow
@pytest.mark.parametrize("files", FILES)
def test_gpu_tests_on_the_host(files: str) -> None:
    paths = [f"tests/test_{file}.py" for file in files.split()]
    command = [sys.executable, "-m", "pytest", *OPTIONS, *paths]
    done = subprocess.run(command, cwd=ROOT, env=backend.environment(), capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-6000:]}{done.stderr[-2000:]}"
    assert all(re.search(rf"^{path}::.* PASSED", done.stdout, re.MULTILINE) for path in paths)
