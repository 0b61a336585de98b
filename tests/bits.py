"""The bits of up to 2,000 seeded calls, to compare two states of the code on one machine.

    python -m tests.bits before.json         # in the old checkout; on its GPU, else on the CPU, in plain torch
    python -m tests.bits before.json         # in the new one: names the calls whose bits differ

The calls are those of the soak's jobs, on a GPU with both launches. The file must not exist in the first run. Both
checkouts must have the same table (`calls.py`, `jobs.py`); calls that only one has are counted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path

import torch

import jitrope

from .jobs import Outputs, pool

LAUNCHES = ("token_linear", "grid_2d")


def digest(outputs: Outputs) -> str:
    """Of results, whatever their dtypes and strides."""
    found = hashlib.sha256()
    for x in outputs:
        if x is not None:
            found.update(x.detach().contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()[:16]


def digests(count: int, device: str) -> dict[str, str]:
    """Of so many calls, by launch, number and name. Calls whose repetition may have other bits are left out."""
    found = {}
    launches = LAUNCHES if device != "cpu" else LAUNCHES[:1]
    for launch in launches:
        jitrope.configure(launch=launch)
        for number, job in enumerate(pool(count // len(launches), seed=0)):
            if job.repeatable:
                found[f"{launch} {number} {job}"] = digest(job.make(device, number).start())
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args(arguments)
    found = digests(given.count, given.device)
    if not given.file.exists():
        given.file.write_text(json.dumps(found, indent=0))
        print(f"{len(found)} calls on {given.device} are in {given.file}")
        return 0
    before = json.loads(given.file.read_text())
    same = found.keys() & before.keys()
    other = sorted(name for name in same if found[name] != before[name])
    alone = len(found.keys() ^ before.keys())
    print(f"{len(same)} calls in both, {alone} in one alone, {len(other)} with other bits", *other, sep="\n")
    return int(bool(other) or alone > len(same))


if __name__ == "__main__":
    sys.exit(main())
