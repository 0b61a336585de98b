"""`jitrope bench cp` without a GPU: what it counts, and that everything it times runs on small batches."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typer.testing import CliRunner

from jitrope.bench import cp, cp_step, report
from jitrope.context_parallel.plain import Math
from jitrope.tools.cli import app

SMALL = cp.Batch(tokens=97, sequences=3, heads=((2, 2), (4, 2)), head_dim=8, window=3, device="cpu")
FULL = cp.Batch(device="cpu")
CASES = [(cp_size, heads) for cp_size in (2, 4, 8) for heads in FULL.heads]


# ---- what is counted -----------------------------------------------------------------------------------


def test_bytes_of_moved_rows() -> None:
    """65,536 tokens, 16 heads of 64, bf16, rank 1 of 2: 2 KiB a row; chunks 1 and 2 of 4 see 2 + 3 chunks of keys."""
    row, tokens = 2 * 16 * 64, 65536
    moved = {work.name: work.bytes_moved for work in cp.works(2, FULL, ragged=False)}
    order = 2 * tokens * row
    assert moved == {
        "sequence to rank order": order,
        "sequence to rank order, k and v": 2 * order,
        "rank to sequence order": order,
        "rank to sequence order, k and v": 2 * order,
        "copy valid": 2 * (tokens // 4) * row,
        "gather of visible keys, k and v": 2 * order * 5 // 4,
        "sum of chunks, dK and dV": 2 * (tokens * 5 // 4 + tokens) * row,
        "sum over ranks, dK and dV": 2 * (2 + 1) * (tokens // 2) * row,
    }


@pytest.mark.parametrize("ragged", [False, True])
def test_batches(ragged: bool) -> None:
    """Sequences fill the batch, even ones but for a token, random ones not."""
    bounds = FULL.bounds(ragged=ragged)
    lengths = [b - a for a, b in pairwise(bounds)]
    assert (len(lengths), sum(lengths)) == (16, 65536)
    assert (set(lengths) == {4096}) is not ragged
    assert FULL.schedule(2, ragged=ragged).max_seqlen == max(lengths)


def test_te_peak_by_hand() -> None:
    """A rank of 2 with 4 rows, 3 heads of q, 1 of k and v, 8 numbers each: K = 128 bytes, Q = 192, L = 48."""
    assert cp_step.te_peak(4, 2, (3, 1), 8) == (2 * 128 + 4 * 192 + 2 * 48, 9 * 128 + 4 * 192 + 2 * 48)
    # With many ranks the keys that are gathered are most: three of K before the attention has anything.
    assert cp_step.te_peak(4, 64, (1, 1), 8).forward == 3 * (2 * 64 * 4 * 8)


class Live(TorchDispatchMode):
    """The most bytes of storages at a time, but for those of `besides`."""

    def __init__(self, besides: Any) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known = {x.untyped_storage()._cdata for x in besides}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in self.known:
                storage = x.untyped_storage()
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return out

    def _gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def most_bytes(besides: Any, call: Callable[[], None]) -> int:
    with Live(besides) as live:
        call()
    assert live.now == 0, "something stayed"
    return live.most


@pytest.mark.parametrize(("cp_size", "heads"), CASES)
def test_te_peak_is_what_its_allocations_come_to(cp_size: int, heads: tuple[int, int]) -> None:
    """At full size; fake tensors have no memory, only its size. The offsets of the two sequences are 12 + 8 bytes."""
    with FakeTensorMode():
        call = cp_step.call_of(cp_size, "causal", heads, FULL, cp.SHAPES)
        x = cp_step.local(call, heads, FULL)
        peak = most_bytes(x, lambda: cp_step.te_step(x, cp_size, cp.SHAPES, FULL))
    assert 0 <= peak - max(cp_step.te_peak(len(x.q), cp_size, heads, FULL.head_dim)) < 256


SHARES = {"causal": 0.6, "window 512": 0.6}
"""Of TransformerEngine's peak, at most; tables of rows, which it has none of, are in ours."""


@pytest.mark.parametrize("mask", SHARES)
@pytest.mark.parametrize(("cp_size", "heads"), CASES)
def test_share_of_te_peak(cp_size: int, heads: tuple[int, int], mask: str) -> None:
    """The autograd function itself at full size, with all that it takes but the attention's kernels."""
    with FakeTensorMode():
        call = cp_step.call_of(cp_size, mask, heads, FULL, cp.SHAPES)
        x = cp_step.local(call, heads, FULL)
        with cp_step.one_rank_of(cp_size, call.schedule.shape.cp_rank):
            peak = most_bytes(x, lambda: cp_step._our_peak(x, cp_size, mask, heads, FULL, cp.SHAPES, {}))
    assert len(x.q) * cp_size == FULL.tokens
    theirs = max(cp_step.te_peak(len(x.q), cp_size, heads, FULL.head_dim))
    # No step can do with less than the keys and values that a rank sees, and their gradients.
    least = 2 * (x.k.nbytes + x.v.nbytes) * (cp_size if mask == "causal" else 1)
    assert least < peak <= SHARES[mask] * theirs


# ---- what is run ---------------------------------------------------------------------------------------


def test_the_step_that_is_timed_is_attention() -> None:
    """A group of one: the parts put together are what `all_gather_attention` gives, gradients included."""
    batch = SMALL._replace(tokens=40)
    call = cp_step.call_of(1, "window 3", (4, 2), batch, Math())
    torch.manual_seed(0)
    x = cp_step.local(call, (4, 2), batch)
    schedule = call.schedule
    out = cp_step.all_gather_attention(*x[:3], schedule=schedule)
    want = out, *torch.autograd.grad(out, x[:3], x.dout)
    with torch.no_grad():
        k, v = cp_step.unpack(cp_step.pack(x.k, x.v, call), call)
        result = cp_step.attend(x.q, k, v, call)
        dq, dkeys, dvalues = cp_step.attend_backward(x.dout, x.q, k, v, result.out, result.saved, call)
        dk, dv = (torch.empty_like(y).flatten(1) for y in (x.k, x.v))
        cp_step.unpack_gradients(cp_step.pack_gradients(dkeys, dvalues, call), dk, dv, call)
    got = result.out, dq, dk.view_as(x.k), dv.view_as(x.v)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    seen: list[str] = []
    found = cp.run(cp.PARTS, [2], SMALL._replace(heads=((4, 2),)), seen.append)
    assert len(seen) == len(cp.steps(cp.PARTS, [2], SMALL._replace(heads=((4, 2),)))) == 2 + 3 + 2
    return found


def test_rows(rows: list[dict[str, Any]]) -> None:
    """All operations on even and ragged batches, tables of three batches, the step's parts of two masks, memory."""
    of = {part: [row for row in rows if row["part"] == part] for part in ("rows", "metadata", "step", "memory")}
    assert [len(part) for part in of.values()] == [2 * 8, 3 * 3, 2 * 9, 2 * (5 + 4)]
    assert all(row["us"] > 0 and row["x"] > 0 and row["of"] == "COPY" for row in of["rows"])
    assert {row["case"] for row in of["rows"]} == {"even", "ragged"}
    assert [row["case"].split()[0] for row in of["metadata"][::3]] == ["16", "512", "2401"]
    assert {row["case"] for row in of["step"]} == {"causal 4/2, math", "window 3 4/2, math"}
    assert {row["case"].split(", ")[1] for row in of["memory"]} == {"tensors", "with math's kernels"}
    alone = [row["x"] for row in of["step"] if row["what"].startswith("attention alone") and "causal" in row["case"]]
    assert sum(alone) == pytest.approx(1)
    by_formula = [row["MiB"] for row in of["memory"] if row["what"].endswith("by formula")]
    assert by_formula[0] == max(cp_step.te_peak(48, 2, (4, 2), 8)) / 2**20
    assert not dist.is_initialized()


def test_a_table_and_a_plot(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    table = report.table(rows)
    assert len(table.rows) == len(rows)
    pytest.importorskip("matplotlib", reason="plots need it: pip install 'jitrope[bench]'")
    for part in ("rows", "step"):
        path = tmp_path / f"{part}.png"
        cp.plot([row for row in rows if row["part"] == part], "a title", str(path))
        assert path.read_bytes().startswith(b"\x89PNG")


BAD = [
    (["--only", "rows,speed"], "--only has speed"),
    (["--heads", "32/8,64"], "not '32/8,64'"),
    (["--cp", "2,x"], "--cp takes numbers"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_options_are_named(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "cp", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert message in result.output


def test_help_names_the_parts() -> None:
    result = CliRunner().invoke(app, ["bench", "cp", "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert ",".join(cp.PARTS) in result.output
    assert "torchrun" in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device to run on")
def test_a_missing_device_is_said() -> None:
    assert "needs a CUDA device" in str(CliRunner().invoke(app, ["bench", "cp"]).exception)


def test_under_torchrun_only_the_step_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    result = CliRunner().invoke(app, ["bench", "cp"], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "--only is 'step' under torchrun" in result.output


def _ranks(rank: int, cp_size: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/group", rank=rank, world_size=cp_size)
    rows = cp_step.run_ranks(SMALL._replace(tokens=256, heads=((4, 2),)))
    torch.save(rows, f"{path}/{rank}.pt")
    dist.destroy_process_group()


def test_ranks(tmp_path: Path) -> None:
    """Two of them: what comes from the other in a step, in MiB; only the window's rows are exchanged."""
    torch.multiprocessing.spawn(_ranks, (2, str(tmp_path)), 2)
    rows = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    assert rows[0] == rows[1], "each time is the slower rank's"
    by = {(row["case"].split(" 4/2")[0], row["what"]): row["MiB"] * 2**20 for row in rows[0]}
    row = 2 * 2 * 2 * 8  # bytes of k and v
    gathered = 128 * row
    assert by["causal", "step"] == 3 * by["causal", "all-gather of k and v"] == 3 * gathered
    assert by["causal", "step, keep_gathered"] == 2 * gathered
    assert by["causal", "step, head_groups=2"] == 3 * gathered
    assert ("causal", "exchange of k and v") not in by
    exchanged = by["window 3", "exchange of k and v"]
    assert by["window 3", "step"] == 3 * exchanged
    # Of three sequences, before rank 0's chunk 3: of chunk 2 three keys, of chunk 1 two, which is half of them at most.
    assert exchanged == 3 * (3 + 2) * row
