"""Which backend takes a case, and the blocks of flex. `test_attention` has their results."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from jitrope.context_parallel.backends import BACKENDS, Case, _block_mask, key_ranges
from jitrope.thd.shape import Mask

from .batches import random_batch, schedule_of

CPU = torch.device("cpu")
PLAIN = Case(torch.device("cuda"), torch.bfloat16, 8, 2, 128, 128, Mask(-1, 0), 10)


@pytest.mark.parametrize(("name", "changes", "why"), [  # by the device alone: checks/test_refusals.py
    ("flash", {"dtype": torch.float32}, "allowed are fp16 and bf16"), ("flash", {"max_logit": True}, "no max_logit"),
    ("flash", {"head_dim": 100, "head_dim_v": 100}, "multiple of 8"), ("flash", {"segments": 65536}, "at most 65535"),
    ("flash", {"head_dim": 264, "head_dim_v": 264}, "up to 256"), ("flash", {"head_dim": 192}, "v has D=128 and k D=1"),
    ("flex", {"dtype": torch.float64}, "allowed are fp32, fp16 and bf16"), ("flex", {"head_dim": 8}, "from 16 to 256"),
    ("flex", {"device": CPU, "grad": False, "max_logit": True}, "no max_logit on CPUs"),
])  # fmt: skip
def test_a_backend_refuses(name: str, changes: dict[str, Any], why: str) -> None:
    """A backend names the reason why it refuses a case, and "math" refuses none."""
    case = PLAIN._replace(**changes)
    assert re.search(why, BACKENDS[name].refuses(case))
    assert BACKENDS["math"].refuses(case) is None


def test_the_version_of_flash_that_is_active_has_its_own_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    many = PLAIN._replace(segments=65536)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    assert BACKENDS["flash"].refuses(PLAIN._replace(segments=65535)) is None
    for version, most in (("FA3", 9), ("FA4", 10)):
        monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda v=version: v, raising=False)
        assert BACKENDS["flash"].refuses(many) == f"the device has compute capability 8.6; allowed are 9 to {most}"


@pytest.mark.parametrize("seed", range(24))
def test_blocks_of_flex(seed: int) -> None:
    """The listed blocks are those with a visible score, and whole blocks have no other. Compiled kernels use them."""
    batch, cp_size = random_batch(1000 + seed, times=23)
    for rank in {0, cp_size - 1}:
        schedule = schedule_of(batch, cp_size=cp_size, cp_rank=rank)
        table = schedule.segments
        rows = schedule.rows if table.query_rows is None else len(table.query_rows)
        (low, high), keys = key_ranges(schedule.varlen(1.0), rows), len(table.key_rows)
        scores = (torch.arange(keys) >= low[:, None]) & (torch.arange(keys) < high[:, None])
        scores = torch.nn.functional.pad(scores, (0, -keys % 128, 0, -rows % 128))
        blocks = scores.view(len(scores) // 128, 128, -1, 128).transpose(1, 2).flatten(2)
        made = _block_mask(low, high, keys, lambda *_: None)
        listed = torch.zeros(2, *blocks.shape[:2], dtype=torch.bool)  # whether each block is, in part or as a whole
        each = ((made.kv_num_blocks, made.kv_indices), (made.full_kv_num_blocks, made.full_kv_indices))
        for dense, (count, order) in zip(listed, each):
            for row, n, columns in zip(dense, count[0, 0].tolist(), order[0, 0]):
                row[columns[:n].long()] = True
        assert not (listed[0] & listed[1]).any()
        assert torch.equal(listed[1], blocks.all(2))
        assert torch.equal(listed[0] | listed[1], blocks.any(2))
