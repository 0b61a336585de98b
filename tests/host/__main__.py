"""`python -m tests.host`: the tests marked `gpu`, on the CPU, through the real launch path (`backend.py`).

Options are pytest's, such as -n 2; without a file they are for all of FILES.
"""

from __future__ import annotations

import os
import sys

from . import backend

FILES = (
    "base context_parallel/test_rotary.py integrations/test_comfy_kitchen.py integrations/test_deepspeed.py "
    "integrations/test_timm.py integrations/test_transformers.py run sinks situations sources stages tables "
    "test_new_stage.py test_presets.py test_same_bits.py test_stages.py thd tools/test_prewarm.py values"
)


if __name__ == "__main__":  # replace this process: the sanitizers must be loaded at its start
    named = [option for option in sys.argv[1:] if option.partition("::")[0].endswith(".py")]
    files = [] if named else [f"tests/{name}" for name in FILES.split()]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu", *files, *sys.argv[1:]]
    os.execve(sys.executable, command, backend.environment())
