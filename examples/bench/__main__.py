"""`python -m examples.bench NAME`, `python examples/bench NAME` and, from the package, `jitrope bench NAME`."""

import sys
from importlib import import_module
from pathlib import Path

NAMES = (
    *("rope", "decode", "cp", "train", "layer", "block", "qk_norm", "presets", "stages", "projection"),
    *("diffusion", "hosts", "host", "cold", "roofline", "targets", "results"),
)
"""The files with commands, in the order in which the help lists them."""

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))  # a folder that is run has no name to be found by
    for name in NAMES:
        import_module(f"examples.bench.{name}")
    import_module("examples.bench.report").main()
