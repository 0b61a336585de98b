"""`python -m tests.peers NAME --checkout DIR [arguments of pytest]`: a peer's own tests, with jitrope in its place."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
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
    name, checkout = options.peer, options.checkout.resolve()
    files = sorted({str(file) for glob in PEERS[name].tests for file in checkout.glob(glob)})
    if not files:
        parser.error(f"{checkout} has none of {', '.join(PEERS[name].tests)}")
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "JITROPE_PEER_NAME": name, "JITROPE_PEER_CHECKOUT": str(checkout), "JITROPE_PEER_REPORTS": folder,
            "PYTEST_PLUGINS": "tests.peers.plugin",  # workers of pytest-xdist load it too
        }  # fmt: skip
        arguments = [f"--rootdir={checkout}", "-c", os.devnull, "-p", "no:cacheprovider", "-W", "ignore"]
        arguments += [] if PEERS[name].conftest else ["--noconftest"]
        command = [sys.executable, "-c", _START, str(_ROOT), str(checkout), *arguments, *files, *rest]
        status = subprocess.run(command, cwd=checkout, env=environment).returncode
        reports = [json.loads(file.read_text()) for file in Path(folder).iterdir()]
    calls = sum(sum(report["calls"].values()) for report in reports)
    outcomes = [f"{count} {kind}" for report in reports for kind, count in report["outcomes"].items() if count]
    for reason, count in max((report["deselected"] for report in reports), key=len, default={}).items():  # all the same
        print(f"left out: {count} tests: {reason}")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(
        f"{name} {_version(checkout)} on {device}, jitrope {jitrope.__version__}, torch {torch.__version__}: "
        f"{', '.join(outcomes) or 'nothing ran'}; {calls} calls of jitrope"
    )
    collected = {"--collect-only", "--co"} & set(rest)
    if not (calls or collected):
        print("No test reached jitrope: this run proves nothing.")
    return status or int(not (calls or collected))


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
