"""`python -m tests.host`: the tests marked `gpu`, on the CPU, through the real launch path (`backend.py`).

Options are pytest's, such as -n 2; without a file they are for all of FILES.
"""

from __future__ import annotations

import os
import sys

from . import backend

FILES = (
    "comfy_kitchen defaults fp4_cache gpu_thd hadamard index_cache joint latent "
    "latent_cache latent_norm learned mean_squares new_stage other_pairs out fused packed_cache "
    "pages presets prewarm public q_scale quantize quantized_v rope row_scales same_bits shifts stages swizzled "
    "timm transformers ulysses unrotated"
)


def main(options: list[str]) -> None:
    """Replace this process: the sanitizers must be loaded at its start."""
    named = [option for option in options if option.partition("::")[0].endswith(".py")]
    files = [] if named else [f"tests/test_{name}.py" for name in FILES.split()]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu", *files, *options]
    os.execve(sys.executable, command, backend.environment())


if __name__ == "__main__":
    main(sys.argv[1:])
