"""`python -m tests.peers NAME --checkout DIR [arguments of pytest]`: a peer's own tests, with jitrope in its place."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch

import jitrope

from . import PEERS

_ROOT = Path(__file__).resolve().parents[2]
_START = (  # installed packages come before the checkout's unbuilt ones
    "import sys; sys.path[:1] = [sys.argv[1]]; sys.path.append(sys.argv[2]); "
    "import pytest; sys.exit(pytest.main(sys.argv[3:]))"
)


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.peers", description=__doc__)
    parser.add_argument("peer", nargs="?", choices=PEERS, help="whose tests")
    parser.add_argument("--checkout", type=Path, metavar="DIR", help="a checkout of the peer's repository")
    parser.add_argument("--list", action="store_true", help="show the table")
    options, rest = parser.parse_known_args()
    if options.list:
        for name, peer in PEERS.items():
            print(f"{name}\n  jitrope stands for: {peer.stands_for}\n  tests: {', '.join(peer.tests)}")
            print(f"  without a GPU: {peer.cpu}" + (f"\n  needs: {peer.needs}" if peer.needs else ""))
            for part, why in peer.deselect:
                print(f"  left out: {part}: {why}")
        return 0
    if not (options.peer and options.checkout):
        parser.error("give a peer and --checkout, or --list")
    checkout = options.checkout.resolve()
    files = sorted({str(file) for glob in PEERS[options.peer].tests for file in checkout.glob(glob)})
    if not files:
        parser.error(f"{checkout} has none of {', '.join(PEERS[options.peer].tests)}")
    return _run(options.peer, checkout, files, rest)


def _run(name: str, checkout: Path, files: list[str], rest: list[str]) -> int:
    with tempfile.TemporaryDirectory() as reports:
        environment = os.environ | {
            "JITROPE_PEER_NAME": name, "JITROPE_PEER_CHECKOUT": str(checkout), "JITROPE_PEER_REPORTS": reports,
            "PYTEST_PLUGINS": "tests.peers.plugin",  # workers of pytest-xdist load it too
        }  # fmt: skip
        arguments = [f"--rootdir={checkout}", "-c", os.devnull, "-p", "no:cacheprovider", "-W", "ignore"]
        arguments += [] if PEERS[name].conftest else ["--noconftest"]
        command = [sys.executable, "-c", _START, str(_ROOT), str(checkout), *arguments, *files, *rest]
        status = subprocess.run(command, cwd=checkout, env=environment).returncode
        deselected, outcomes, calls = (_sum(reports, kind) for kind in ("deselected", "outcomes", "calls"))
    for reason, count in deselected.items():
        print(f"left out: {count} tests: {reason}")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(
        f"{name} {_version(checkout)} on {device}, jitrope {jitrope.__version__}, torch {torch.__version__}: "
        f"{', '.join(f'{count} {outcome}' for outcome, count in outcomes.items() if count) or 'nothing ran'}; "
        f"{calls.total()} calls of jitrope"
    )
    collected = {"--collect-only", "--co"} & set(rest)
    if not (calls or collected):
        print("No test reached jitrope: this run proves nothing.")
    return status or int(not (calls or collected))


def _sum(reports: str, kind: str) -> Counter[str]:
    """The sum of the processes' numbers; all have deselected the same tests."""
    total: Counter[str] = Counter()
    for file in Path(reports).glob(f"{kind}-*.json"):
        numbers = Counter(json.loads(file.read_text()))
        total = numbers if kind == "deselected" else total + numbers
    return total


def _version(checkout: Path) -> str:
    """The commit of a checkout, or the version of a source archive, or the content of a file COMMIT."""
    if (checkout / ".git").exists():
        git = ["git", "-C", str(checkout), "describe", "--always", "--tags", "--dirty"]
        return subprocess.run(git, capture_output=True, text=True).stdout.strip()
    for name, pattern in (("COMMIT", r"(.+)"), ("PKG-INFO", r"\nVersion: (.+)")):
        if (checkout / name).exists() and (found := re.search(pattern, (checkout / name).read_text())):
            return found[1]
    return "of unknown version"


if __name__ == "__main__":
    sys.exit(main())
