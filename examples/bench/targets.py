"""`bench targets`: kinds of calls over a copy, beside what they are to reach on an NVIDIA H200."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from .harness import DEVICE
from .kinds import KINDS, Kind, Timed, timed
from .report import AS_JSON, ONLY, SMOKE, Rows, app, chosen, show
from .sections import Section, Table, of

TARGETS = {
    "rope": 1.02,
    "rope by ids": 1.04,
    "rope by ids: prefill": 1.05,
    "rope by ids: prefill, in place": 1.05,
    "rope by ids: head72": 1.08,
    "rope of half a head": 1.02,
    "rope by angles": 1.05,
    "ids along three axes": 1.08,
    "packed evenly": 0.98,
    "packed unevenly": 1.00,
    "one sequence": 1.02,
    "a million tokens of 8 heads": 1.05,
    "a million tokens of 32 heads": 1.02,
    "SBHD forward": 1.02,
    "SBHD backward": 1.02,
    "norm": 1.04,
    "norm: prefill": 1.06,
    "norm: prefill, in place": 1.06,
    "norm by ids": 1.08,
    "norm rounded twice": 1.06,
    "norm and its gradient": 1.10,
    "norm and KV cache": 1.08,
    "norm and KV cache of a step": 1.15,
    "Hadamard": 1.10,
    "fp8": 1.12,
    "fp8: fp8, given scales": 1.10,
    "fp8, scales of heads": 1.55,
    "fp8, scales of heads: Hadamard": 1.65,
    "DeepSeek's indexer": 1.10,
    "DeepSeek's indexer: step": 1.50,
    "DeepSeek's attention": 0.97,
    "DeepSeek's attention: forward": 0.83,
    "DeepSeek's attention: both": 0.93,
    "DeepSeek's step in fp8": 0.90,
    "a gate in the same launch": 1.10,
    "decode": 1.05,
    "decode: cos and sin rows, 32/8": 1.08,
    "decode: cos and sin rows, fresh, 32/8": 1.08,
    "decode: cos_sin_cache and ids, fresh, 32/8": 1.15,
    "KV cache of a step": 1.15,
    "KV cache of a prefill": 1.04,
    "fp8 KV cache": 1.08,
    "rows between ranks": 1.04,
    "sums of rows": 1.06,
    "sums of rows: sum of chunks, dK and dV": 1.08,
}
"""Times over COPY on an NVIDIA H200, by kind, or by kind and case."""
PEERS = Path(__file__).parents[1] / "results"
"""Where the files of others' kernels are, peers_DEVICE.json."""
PADS = (7, 61, 131)
"""MiB that are held while tensors are placed; a ratio moves by 1 % with their addresses."""


def placed(kind: Kind, smoke: bool) -> Iterator[Timed]:
    """The kind in several places of the memory, with new tensors in each."""
    for size in PADS:
        torch.cuda.empty_cache()
        pad = torch.empty(size << 20, dtype=torch.uint8, device=DEVICE)
        yield timed(kind, smoke)
        del pad


def best_peers(device: str, folder: Path = PEERS) -> dict[str, dict[str, Any]]:
    """The fastest kernel of others for a work, measured in an earlier run on such a device; none of other devices."""
    files = [json.loads(path.read_text()) for path in folder.glob("peers_*.json")]
    return {row["work"]: row for each in files if each["device"] == device for row in each["rows"]}


def rows(group: str, case: str, smoke: bool, peers: Mapping[str, Mapping[str, Any]]) -> Rows:
    """Medians of the places; the ratio is that of one place."""
    kind, most = KINDS[group][case], TARGETS.get(f"{group}: {case}", TARGETS[group])
    found = [*placed(kind, smoke)]
    over = median(each.us / each.copied for each in found)
    head = {"work": f"{group}: {case}", "pass": kind.part, "us": median(each.us for each in found)}
    reached = {"x COPY": over, "target": most, "reached": "yes" if over <= most else "no"}
    peer = peers.get(f"{group}: {case}", {})
    return [{**head, **reached, "peer": peer.get("by"), "peer x COPY": peer.get("x COPY")}]


@app.command("targets")
def command(only: ONLY = "", smoke: SMOKE = False, as_json: AS_JSON = False) -> None:
    """Kinds of calls over a copy of their bytes, medians of three places in memory, and the targets on an H200."""
    peers = best_peers(torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")
    steps = {
        f"{group}: {case}": partial(rows, group, case, smoke, peers)
        for group in chosen(only, [name for name in TARGETS if name in KINDS])
        for case in KINDS[group]
    }
    show(steps, smoke, as_json)


# ---- in examples/results/README.md -----------------------------------------------------------------------

SECTION = Section(
    "Targets",
    """
    GPU time over COPY of the bytes of q, k, v, caches and rows that a call must read and write, without tables, ids and
    slots; and the most that it should take on an NVIDIA H200. Another GPU shows its own ratios. Both passes of a pack
    are over two COPYs, those of a norm over 2.5. Each number is the median of three places of the tensors in memory,
    and the ratio is of times of one place, in rounds. Calls are cold, tables included, except that a million tokens
    have one table, and read its first 120 rows. Those of 256 tokens are hot, results included. Peers are the
    fastest kernels of others for the same work, in a run that peers_h200.json describes.
    """,
    "jitrope bench targets",
    (
        Table(
            "work",
            lambda row: str(row["work"]),
            {
                "us": of("us"),
                "over COPY": of(lambda row: f"{row['x COPY']:.3f}"),
                "target": of("target"),
                "reached": of(lambda row: str(row["reached"])),
                "best peer": of(lambda row: f"{row['peer']} {row['peer x COPY']:.2f}" if row.get("peer") else ""),
            },
        ),
    ),
)
