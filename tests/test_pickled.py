"""What users hold is pickled, copied and printed: a worker process passes it to its parent."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch

import jitrope
from jitrope.context_parallel import Partition, Rope, Schedule, all_gather_attention
from jitrope.context_parallel.backends import Case
from jitrope.jit import kernels
from jitrope.jit.cache import KernelCache
from jitrope.jit.entry import Entry
from jitrope.plan.heuristics import Plan
from jitrope.plan.options import Options
from jitrope.thd.shape import Mask
from jitrope.thd.spec import CorrectionSpec, RowsSpec, SegmentsSpec
from jitrope.tools.doctor import Check
from jitrope.tools.prewarm import Built, specs_of

SPEC = specs_of([32, 8])[0]
PICKLED = {
    "rope spec": SPEC,
    "rows spec": RowsSpec("table"),
    "segments spec": SegmentsSpec(False, "int32", 2, "dual_chunk", False, False, False, True, 128),
    "correction spec": CorrectionSpec("lse", "add", "copy", True, "fp32", "int32", 1),
    "plan": Plan(SPEC, (1, 2)),
    "a norm's options": Options(norm_kind="rms_norm", norm_rounding="once"),
    "built": Built(SPEC, "sm_90", "cached"),
    "mask": Mask(),
    "entry": Entry(Path("/a"), "name", "sm_90", 3, {}),
    "check": Check("compiler", True, "cupy 14.0"),
    "case": Case(torch.device("cpu"), torch.float32, 2, 1, 8, 8),
}


@pytest.mark.parametrize("what", PICKLED)
def test_values_are_pickled_copied_and_printed(what: str) -> None:
    value = PICKLED[what]
    assert pickle.loads(pickle.dumps(value)) == copy.deepcopy(value) == copy.copy(value) == value
    assert " object at 0x" not in repr(value)


OFFSETS = torch.tensor([0, 3, 10], dtype=torch.int32)
OBJECTS = {
    "partition": (Partition(OFFSETS, 11, cp_size=2, cp_rank=1), "Partition(6 of 11 tokens, 2 sequences, rank 1 of 2, "),
    "schedule": (Schedule(OFFSETS, 11, window=(4, -1)), "Schedule(11 of 11 tokens, 2 sequences, rank 0 of 1, "),
    "fixed schedule": (Schedule.fixed(2, 4, "cpu"), "Schedule(8 of 8 tokens, 2 sequences, rank 0 of 1, dual_chunk, "),
    "rope": (Rope(torch.ones(11, 2), torch.zeros(11, 2)), "Rope(interleaved=False, "),
}


@pytest.mark.parametrize("what", OBJECTS)
def test_objects_are_pickled_copied_and_printed(what: str) -> None:
    """New ones, and used ones, which may hold tables from earlier use."""
    x, text = OBJECTS[what]
    assert repr(x).startswith(text)
    for used in (False, True):
        if used and isinstance(x, Partition):
            assert x.position_ids.shape == (x.shape.rows,)
        for again in (pickle.loads(pickle.dumps(x)), copy.deepcopy(x), copy.copy(x)):
            assert repr(again) == repr(x)
            if isinstance(x, Schedule):
                q = torch.randn(x.shape.rows, 2, 4)
                assert torch.equal(*(all_gather_attention(q, q, q, one) for one in (x, again)))
            if isinstance(x, Partition):
                assert torch.equal(again.indices, x.indices)
                rows = torch.arange(float(x.shape.tokens)).unsqueeze(1)
                assert torch.equal(again.shard(rows), x.shard(rows))


def test_a_partition_of_a_group_says_that_it_stays(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/init", rank=0, world_size=1)
    try:
        part = Partition(OFFSETS, 10)
        assert torch.equal(copy.deepcopy(part).indices, part.indices)
        with pytest.raises(pickle.PicklingError, match="belongs to its process: make it from cu_seqlens there"):
            pickle.dumps(part)
    finally:
        torch.distributed.destroy_process_group()


ERRORS = [kind("a") for kind in (jitrope.JitropeError, jitrope.InvalidInput, jitrope.CompileError, jitrope.CacheError)]
ERRORS += [kernels.missing_kernel(SPEC, "sm_90", KernelCache(Path("/a")))]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_are_pickled_and_have_one_base(error: jitrope.JitropeError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)
    assert isinstance(error, jitrope.JitropeError)
